"""Hidden cases of lesson 03: first games that are the same for every student, then random ones.

The fixed ones compare every node with a tree of the grader's own; the random ones, with minirad's RadixCache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import Failure, expect
from lessons.grading.cases import key, laid, pictures, random_tokens, whole
from lessons.grading.game import Move, Twins, random_moves, spelled_out
from lessons.grading.tree import POLICY_KEYS, Node, Tree, name_of, snapshot
from minirad.cache.radix_cache import RadixCache

# ---------------------------------------------------------------------- the same for everybody

LOCKS: list[list[Move]] = [
    [("insert", "abc"), ("insert", "x"), ("lock", "abc"), ("lock", "abc"), ("lock", "abc")],
    [("insert", "abc"), ("insert", "abxyz"), ("match", "x"), ("lock", "abc"), ("lock", "abxyz")],
    [("insert", "abc"), ("insert", "xyz"), ("lock", "abc"), ("lock", "xyz"), ("lock", "")],
    [("insert", "ab"), ("insert", "abcde"), ("insert", "x"), ("lock", "ab"), ("lock", "abcde")],
    [("insert", "abcd"), ("lock", "abcd"), ("match", "ab"), ("lock", "ab"), ("lock", "abcd")],
]
UNLOCKS: list[list[Move]] = [
    [("insert", "abc"), ("insert", "abxy"), ("match", "x"), ("refuse", "abc")],
    [("insert", "abc"), ("insert", "abxy"), ("lock", "abxy"), ("match", "x"), ("refuse", "abc")],
    [("insert", "abc"), ("lock", "abc"), ("match", "x"), ("unlock", "abc"), ("refuse", "abc")],
    [("insert", "ab"), ("insert", "abcd"), ("lock", "ab"), ("lock", "abcd"), ("insert", "x"),
     ("unlock", "abcd"), ("refuse", "abcd"), ("unlock", "ab"), ("refuse", "ab")],
    [("insert", "abcd"), ("lock", "abcd"), ("lock", "abcd"), ("insert", "abx"), ("insert", "y"),
     ("unlock", "abcd"), ("unlock", "abcd"), ("unlock", "")],
    [("insert", "abc", 2), ("match", "abc"), ("match", "abc"), ("lock", "abc"), ("match", "x"),
     ("unlock", "abc")],
]  # fmt: skip
HELD = ("insert", "insert", "match", "lock", "lock", "unlock", "refuse", "remove")
BUSY = ("insert", "insert", "insert", "match", "match", "lock", "unlock", "evict")


def every_lock(impl: ModuleType) -> None:
    """Locks in trees in which all else must stay as it is."""
    _locks(impl, "inc_lock_ref", LOCKS + UNLOCKS[3:])


def every_unlock(impl: ModuleType) -> None:
    """Unlocks, some of them refused, in trees in which all else must stay as it is."""
    _locks(impl, "dec_lock_ref", UNLOCKS)


def _locks(impl: ModuleType, name: str, stories: Sequence[list[Move]]) -> None:
    for page in (1, 3):
        for moves in stories:
            moves = [move for move in moves if name == "dec_lock_ref" or move[0] != "refuse"]
            Twins(impl, [name], page).play(spelled_out(moves, page))
    kinds = tuple(kind for kind in HELD if name == "dec_lock_ref" or kind != "refuse")
    for page in (1, 2):
        Twins(impl, [name], page).play(random_moves(f"lesson 03, {name}, {page}", 50, page, kinds))


def nothing(node: Node) -> int:
    """Everybody is equal: only the ids decide."""
    return 0


def hits_last(node: Node) -> int:
    """The most hits first."""
    return -node.hits


EVICTIONS: list[list[Move]] = [
    # a parent's key is its own; ties go to the smaller id, whoever was offered first, or is larger or newer
    [("insert", "ab"), ("insert", "c"), ("match", "a"), ("evict", 1), ("evict", 1), ("evict", 1)],
    [("insert", "a"), ("insert", "bcd"), ("insert", "ef"), ("match", "a"), ("evict", 1), ("evict", 3)],
    [("insert", "z"), ("insert", "y"), ("insert", "x"), ("match", "z"), ("evict", 1), ("evict", 2)],
    [("insert", "abc"), ("insert", "abd"), ("insert", "x"), ("match", "abd"), ("evict", 1), ("evict", 9)],
    # locked when it comes up, or when its last child goes; unlocked later
    [("insert", "a"), ("insert", "b"), ("lock", "a"), ("evict", 1), ("unlock", "a"), ("evict", 1)],
    [("insert", "ab"), ("match", "a"), ("insert", "c"), ("lock", "a"), ("evict", 9), ("unlock", "a"),
     ("evict", 1)],
    [("insert", "a"), ("insert", "b"), ("lock", "a"), ("lock", "b"), ("evict", 2), ("unlock", "b"),
     ("unlock", "a"), ("insert", "c"), ("evict", 1), ("evict", 9)],
    # more than is there, less than a leaf, nothing at all; then everything grows again
    [("insert", "abc"), ("insert", "de"), ("evict", 0), ("evict", 4), ("evict", 1), ("insert", "ab"),
     ("evict", 99)],
    [("insert", "ab"), ("insert", "ac"), ("insert", "ade"), ("evict", 2), ("insert", "af"), ("evict", 99)],
    # what was used again has another key
    [("insert", "a"), ("insert", "b"), ("insert", "c"), ("match", "a"), ("match", "b"), ("match", "b"),
     ("match", "c"), ("evict", 1), ("evict", 1), ("evict", 1)],
]  # fmt: skip
ORDERS = {**POLICY_KEYS, "nothing": nothing, "hits last": hits_last}


def every_eviction(impl: ModuleType) -> None:
    """Evictions under six orders, slot by slot."""
    for name in ("lru", "lfu", "mru", "priority", "nothing", "hits last"):
        for moves in EVICTIONS:
            Twins(impl, ["offer", "evict"], key=ORDERS[name]).play(spelled_out(moves))
    for name in ("nothing", "mru", "lfu"):
        page = 3 if name == "lfu" else 1
        moves = random_moves(f"lesson 03, evict, {name}", 40, page, BUSY, ORDERS[name])
        Twins(impl, ["offer", "evict"], page, ORDERS[name]).play(moves)


def many_leaves(impl: ModuleType) -> None:
    """A hundred leaves, every third one used again, half of them evicted; and two trees in turn."""
    tokens = [[number] for number in range(100)]
    first = Twins(impl, ["offer", "evict"])
    first.play((("insert", each) for each in tokens), compare=False)
    first.play((("match", each) for each in tokens[::3]), compare=False)
    second = Twins(impl, ["offer", "evict"])
    second.play([("insert", [7]), ("insert", [8])])
    for game in (first, second, first):
        game.play([("evict", 1), ("evict", 20)], compare=game is second)


# Numbers at which a sum with weights, a text, a mask, a float32 or a limit gives another order.
HITS = (0, 1, 2, 3, 4, 9, 10, 15, 16, 17, 99, 100, 255, 256, 1000)
TICKS = (1, 2, 3, 9, 10, 11, 99, 100, 255, 256, 257, 999, 1000, 9999, 10_000, 65_535, 65_536, 10**6,
         2**24, 2**24 + 1, 2**31, 2**31 + 1, 2**39, 2**39 + 1)  # fmt: skip


def leaves_of_all_kinds() -> list[Node]:
    """A leaf for each number of hits and each tick; what else differs must not count."""
    found = []
    for hits in HITS:
        for tick in TICKS:
            number = len(found) + 1
            leaf = Node(number, [1] * (1 + number * 7 % 5), [1] * (1 + number * 7 % 5), None)
            leaf.hits, leaf.last_access = hits, tick
            leaf.created, leaf.priority = number * 37 % tick, number % 3 - 1
            found.append(leaf)
    return found


def every_order(impl: ModuleType) -> None:
    """Leaves with few and many hits, used long ago and just now."""
    for name in ("lru", "lfu", "slru"):
        key, right = getattr(impl, f"{name}_key"), POLICY_KEYS[name]
        leaves = sorted(leaves_of_all_kinds(), key=lambda leaf: (right(leaf), leaf.id))
        for first, second in pairwise(leaves):
            one, two = key(first), key(second)
            good = one < two if right(first) < right(second) else not two < one
            a, b = (
                f"a leaf with {leaf.hits} hits, last used at {leaf.last_access}, made at {leaf.created}, "
                f"{len(leaf.tokens)} tokens, priority {leaf.priority}"
                for leaf in (first, second)
            )
            before = "before" if right(first) < right(second) else "not after (equals: the id decides)"
            expect(good, f"{name}_key: {a} should go {before} {b}; the keys are {one!r} and {two!r}")


# ---------------------------------------------------------------------- random


def random_locks(impl: ModuleType, rng: Random) -> None:
    """Random locks in random trees."""
    for page in (1, 3):
        Game(laid(Tree(page), impl, "inc_lock_ref"), "lru", rng).play(40)


def random_unlocks(impl: ModuleType, rng: Random) -> None:
    """Random locks and unlocks in random trees."""
    for page in (1, 3):
        Game(laid(Tree(page), impl, "dec_lock_ref"), "lru", rng).play(40)


def random_evictions(impl: ModuleType, rng: Random) -> None:
    """Random inserts, look-ups, locks and evictions under several policies."""
    for policy in ("lru", "lfu", "fifo"):
        tree = laid(Tree(rng.choice((1, 1, 2, 4)), key=POLICY_KEYS[policy]), impl, "offer", "evict")
        Game(tree, policy, rng).play(40)


def random_policies(impl: ModuleType, rng: Random) -> None:
    """The student's three keys against the engine's policies."""
    keys: dict[str, Callable[[Any], Any]] = {
        "lru": impl.lru_key,
        "lfu": impl.lfu_key,
        "slru": impl.slru_key,
    }
    for policy, order in keys.items():
        Game(Tree(1, key=order), policy, rng).play(40)


class Game:
    """Plays the same moves on a Tree and on a RadixCache, and compares after every move."""

    MOVES = ("insert", "insert", "insert", "match", "match", "lock", "unlock", "evict")

    def __init__(self, tree: Tree, policy: str, rng: Random) -> None:
        self.tree, self.reference, self.rng = tree, RadixCache(tree.page_size, policy), rng
        self.policy = policy
        self.known: list[list[int]] = []
        self.held: list[tuple[Any, Any]] = []
        self.slot = tree.page_size
        self.ends: list[tuple[Any, Any]] = []

    def play(self, moves: int) -> None:
        for _ in range(moves):
            move = self.rng.choice(self.MOVES)
            before = snapshot(self.tree)
            where, ours, theirs = getattr(self, move)()
            where = f"random tree, pages of {self.tree.page_size}, {self.policy}: {where}"
            if ours != theirs:
                raise Failure(f"{where}: {ours} instead of {theirs}", pictures(self.tree, before))
            self._compare_sizes(where, before)
            whole(self.tree, where, before)

    def _compare_sizes(self, where: str, before: dict[str, Any]) -> None:
        for name in ("evictable_size", "protected_size"):
            ours, theirs = getattr(self.tree, name), getattr(self.reference, name)
            if ours != theirs:
                words = f"{where}: {name} is {ours} instead of {theirs}"
                raise Failure(words, pictures(self.tree, before))

    def insert(self) -> tuple[str, Any, Any]:
        tokens = random_tokens(self.rng, self.known, self.tree.page_size)
        slots = range(self.slot, self.slot + len(tokens))
        self.slot += -(-len(tokens) // self.tree.page_size) * self.tree.page_size
        self.known.append(tokens)
        done, node = self.tree.insert(tokens, slots)
        theirs = self.reference.insert(key(tokens), list(slots))
        self.ends.append((node, theirs.last_node))
        return f"insert of {tokens}", done, theirs.prefix_len

    def match(self) -> tuple[str, Any, Any]:
        tokens = random_tokens(self.rng, self.known, self.tree.page_size)
        slots, node = self.tree.match(tokens)
        theirs = self.reference.match_prefix(key(tokens))
        self.ends.append((node, theirs.last_node))
        return f"look-up of {tokens}", slots, theirs.slots.tolist()

    def lock(self) -> tuple[str, Any, Any]:
        pair = self._choice([end for end in self.ends if self._alive(end)])
        if pair is None:
            return "nothing to lock", 0, 0
        self.held.append(pair)
        moved = self.tree.lock(pair[0]), self.reference.inc_lock_ref(pair[1])
        return f"tokens that inc_lock_ref of {name_of(pair[0])} moved", *moved

    def unlock(self) -> tuple[str, Any, Any]:
        pair = self._choice(self.held)
        if pair is None:
            return "nothing to unlock", 0, 0
        self.held.remove(pair)
        moved = self.tree.unlock(pair[0]), self.reference.dec_lock_ref(pair[1])
        return f"tokens that dec_lock_ref of {name_of(pair[0])} moved", *moved

    def evict(self) -> tuple[str, Any, Any]:
        count = self.rng.choice((1, 2, 5, 20))
        return (
            f"slots freed by evict({count})",
            self.tree.evict(count),
            self.reference.evict(count).slots.tolist(),
        )

    def _alive(self, pair: tuple[Any, Any]) -> bool:
        return pair[0] is self.tree.root or pair[0].parent is not None

    def _choice(self, pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any] | None:
        return self.rng.choice(pairs) if pairs else None


HIDDEN = {
    "inc_lock_ref": [every_lock, random_locks],
    "dec_lock_ref": [every_unlock, random_unlocks],
    "evict": [every_eviction, many_leaves, random_evictions],
    "policies": [every_order, random_policies],
}
