"""Random cases of lesson 03: the same calls to the student's functions and to minirad's RadixCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import Failure
from lessons.grading.cases import key, laid, pictures, random_tokens, whole
from lessons.grading.tree import POLICY_KEYS, Tree, name_of, snapshot
from minirad.cache.radix_cache import RadixCache


def random_locks(impl: ModuleType, rng: Random) -> None:
    """Random locks in random trees."""
    for page in (1, 1, 2, 3):
        Game(laid(Tree(page), impl, "inc_lock_ref"), "lru", rng).play(60)


def random_unlocks(impl: ModuleType, rng: Random) -> None:
    """Random locks and unlocks in random trees."""
    for page in (1, 1, 2, 3):
        Game(laid(Tree(page), impl, "dec_lock_ref"), "lru", rng).play(60)


def random_evictions(impl: ModuleType, rng: Random) -> None:
    """Random inserts, look-ups, locks and evictions under several policies."""
    for policy in ("lru", "lru", "lfu", "mru", "fifo", "slru"):
        tree = laid(Tree(rng.choice((1, 1, 2, 4)), key=POLICY_KEYS[policy]), impl, "offer", "evict")
        Game(tree, policy, rng).play(70)


def random_policies(impl: ModuleType, rng: Random) -> None:
    """The student's three keys against the engine's policies."""
    keys: dict[str, Callable[[Any], Any]] = {
        "lru": impl.lru_key,
        "lfu": impl.lfu_key,
        "slru": impl.slru_key,
    }
    for policy, order in keys.items():
        for _ in range(2):
            Game(Tree(1, key=order), policy, rng).play(60)


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
    "inc_lock_ref": [random_locks],
    "dec_lock_ref": [random_unlocks],
    "evict": [random_evictions],
    "policies": [random_policies],
}
