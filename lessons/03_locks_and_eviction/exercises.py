"""What lesson 03 asks for, and its open cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, Failure, expect
from lessons.grading.cases import laid, node_at, pictures, tree_of, whole
from lessons.grading.tree import Node, Tree, name_of, snapshot

# Three prompts with a common beginning, and one alone:
#   [1 2] - [3 4 5]      A
#         - [6]          B
#   [7 8]                C
A, B, C = [1, 2, 3, 4, 5], [1, 2, 6], [7, 8]


def forest() -> Tree:
    return tree_of(A, B, C)


# ---------------------------------------------------------------------- locks


def lock_a_leaf(impl: ModuleType) -> None:
    """Locking one leaf."""
    tree = forest()
    _lock(impl, tree, A, 5, {"[1 2]": 1, "[3 4 5]": 1, "[6]": 0, "[7 8]": 0})


def lock_twice(impl: ModuleType) -> None:
    """Two requests on the same leaf."""
    tree = forest()
    _lock(impl, tree, A, 5, {})
    _lock(impl, tree, A, 0, {"[1 2]": 2, "[3 4 5]": 2})


def lock_two_leaves(impl: ModuleType) -> None:
    """Two requests that share a prefix."""
    tree = forest()
    _lock(impl, tree, A, 5, {})
    _lock(impl, tree, B, 1, {"[1 2]": 2, "[3 4 5]": 1, "[6]": 1, "[7 8]": 0})


def lock_an_inner_node(impl: ModuleType) -> None:
    """Locking a node with children: what hangs below it stays unlocked."""
    _lock(impl, forest(), [1, 2], 2, {"[1 2]": 1, "[3 4 5]": 0, "[6]": 0})


def lock_the_root(impl: ModuleType) -> None:
    """A request that matched nothing locks the root: nothing happens."""
    _lock(impl, forest(), [], 0, {"[1 2]": 0, "[3 4 5]": 0, "[6]": 0, "[7 8]": 0})


def unlock_a_leaf(impl: ModuleType) -> None:
    """Unlocking what one request held."""
    tree = forest()
    tree.lock(node_at(tree, A))
    _unlock(impl, tree, A, 5, {"[1 2]": 0, "[3 4 5]": 0})


def unlock_one_of_two(impl: ModuleType) -> None:
    """One of two requests on the same leaf ends."""
    tree = forest()
    tree.lock(node_at(tree, A))
    tree.lock(node_at(tree, A))
    _unlock(impl, tree, A, 0, {"[1 2]": 1, "[3 4 5]": 1})
    _unlock(impl, tree, A, 5, {"[1 2]": 0, "[3 4 5]": 0})


def unlock_beside_another(impl: ModuleType) -> None:
    """One of two requests that share a prefix ends: the prefix stays locked."""
    tree = forest()
    tree.lock(node_at(tree, A))
    tree.lock(node_at(tree, B))
    _unlock(impl, tree, A, 3, {"[1 2]": 1, "[3 4 5]": 0, "[6]": 1})


def unlock_after_a_split(impl: ModuleType) -> None:
    """A held node was split meanwhile: its lock lies on both halves."""
    tree = tree_of([1, 2, 3, 4])
    node = node_at(tree, [1, 2, 3, 4])
    tree.lock(node)
    tree.insert([1, 2, 9], [500, 501, 502])
    _unlock(impl, tree, [1, 2, 3, 4], 4, {"[1 2]": 0, "[3 4]": 0, "[9]": 0})


def unlock_the_root(impl: ModuleType) -> None:
    """Unlocking the root: nothing happens."""
    tree = forest()
    tree.lock(node_at(tree, C))
    _unlock(impl, tree, [], 0, {"[7 8]": 1})


def unlock_what_is_not_locked(impl: ModuleType) -> None:
    """Unlocking a node that nobody holds."""
    tree = forest()
    tree.lock(node_at(tree, B))
    before = snapshot(tree)
    try:
        impl.dec_lock_ref(tree, node_at(tree, A))
    except ValueError:
        pass
    else:
        raise Failure(
            "dec_lock_ref of node [3 4 5], which nobody holds, should raise ValueError",
            pictures(tree, before),
            hint=1,
        )
    _locks(tree, {"[1 2]": 1, "[3 4 5]": 0, "[6]": 1}, "after dec_lock_ref refused", before, hint=1)


def _lock(impl: ModuleType, tree: Tree, path: list[int], moved: int, locks: dict[str, int]) -> None:
    _turn(impl.inc_lock_ref, "inc_lock_ref", tree, path, moved, locks)


def _unlock(impl: ModuleType, tree: Tree, path: list[int], moved: int, locks: dict[str, int]) -> None:
    _turn(impl.dec_lock_ref, "dec_lock_ref", tree, path, -moved, locks)


def _turn(
    function: Callable[..., int], name: str, tree: Tree, path: list[int], moved: int, locks: dict[str, int]
) -> None:
    """moved: from evictable to protected; negative: the other way."""
    before, node = snapshot(tree), node_at(tree, path)
    sizes = tree.evictable_size, tree.protected_size
    got = function(tree, node)
    where = f"after {name} of {name_of(node)}"
    _locks(tree, locks, where, before)
    tokens_move = int(name == "inc_lock_ref")  # which hint
    shown = pictures(tree, before)
    expect(
        tree.root.lock_ref == 0,
        f"{where} the root has lock_ref {tree.root.lock_ref}; the root is left out",
        shown,
    )
    for size, was, by in (("evictable_size", sizes[0], -moved), ("protected_size", sizes[1], moved)):
        now = getattr(tree, size)
        words = f"{where} {size} should be {was + by} ({was} before, {_tokens(moved)} moved); it is {now!r}"
        expect(now == was + by, words, shown, tokens_move)
    words = f"{name} of {name_of(node)} returned {got!r} instead of {abs(moved)}: {_tokens(moved)} moved"
    expect(got == abs(moved), words, shown, tokens_move)
    whole(tree, where, before)


def _tokens(count: int) -> str:
    return "1 token" if abs(count) == 1 else f"{abs(count)} tokens"


def _locks(tree: Tree, locks: dict[str, int], where: str, before: dict[str, Any], hint: int = 0) -> None:
    for node in tree.nodes():
        wanted = locks.get(name_of(node).removeprefix("node "))
        if wanted is not None and node.lock_ref != wanted:
            words = f"{where} {name_of(node)} has lock_ref {node.lock_ref} instead of {wanted}"
            raise Failure(words, pictures(tree, before), hint)


# ---------------------------------------------------------------------- evict


class Shelf:
    """A tree of short prompts with letters for names, whose evictions are told by these letters."""

    def __init__(
        self, impl: ModuleType, names: str, key: Callable[[Node], Any] | None = None, size: int = 1
    ) -> None:
        self.tree = laid(tree_of(key=key), impl, "offer", "evict")
        self.size = size
        for name in names:
            self.put(name)

    def tokens(self, name: str) -> list[int]:
        """A: [65] (or [65, 165, ...]); AB: that, and B's behind it."""
        return [ord(letter) + 100 * i for letter in name for i in range(self.size)]

    def put(self, name: str) -> None:
        tokens = self.tokens(name)
        self.tree.words.update({str(token): chr(token % 100) for token in tokens})
        self.tree.insert(tokens, [1000 * ord(name[-1]) + i for i in range(len(tokens))])

    def use(self, name: str) -> None:
        self.tree.match(self.tokens(name))

    def node(self, name: str) -> Node:
        return node_at(self.tree, self.tokens(name))

    def evict(self, tokens: int, wanted: str, story: str, hint: int = 0) -> None:
        """story: what happened before, and why these had to go. hint: for when others go."""
        tree, before, size = self.tree, snapshot(self.tree), self.tree.evictable_size
        names = {name_of(node): chr(int(node.tokens[0])) for node in tree.nodes() if node is not tree.root}
        tree.freed = []
        alive = list(tree.nodes())
        got = tree.parts["evict"](tree, tokens)
        gone = [node for node in alive if node.parent is None and node is not tree.root]
        order = {slot: position for position, slot in enumerate(tree.freed)}
        gone.sort(key=lambda node: order.get(node.slots[0], 0))
        freed = "".join(names[name_of(node)] for node in gone)
        shown = pictures(tree, before)
        words = f"{story}, evict({tokens}) freed {_list(freed)}; {_list(wanted)} had to go"
        if sorted(freed) == sorted(wanted):
            words += " (in this order)"
        expect(freed == wanted, words, shown, hint)
        count = len(wanted) * self.size
        call, went = f"{story}, evict({tokens})", f"{_tokens(count)} went"
        expect(got == count, f"{call} returned {got!r} instead of {count}: {went}", shown, hint=2)
        now = tree.evictable_size
        words = f"{call} left evictable_size at {now!r}; it should be {size - count} ({size} before, {went})"
        expect(now == size - count, words, shown, hint=2)
        whole(tree, f"{story}, after evict({tokens})", before)


def _list(names: str) -> str:
    return ", ".join(names) if names else "nothing"


def oldest_first(impl: ModuleType) -> None:
    """The least recently used leaf goes first."""
    shelf = Shelf(impl, "ABC")
    shelf.evict(1, "A", "after A, B and C came in this order")
    shelf.evict(2, "BC", "with only B and C left")


def used_again(impl: ModuleType) -> None:
    """A leaf that was used again is not the oldest any more."""
    shelf = Shelf(impl, "ABC")
    shelf.use("A")
    shelf.evict(2, "BC", "after touching A (the oldest unlocked leaf was B)", hint=1)
    shelf = Shelf(impl, "ABC")
    for _ in range(3):
        shelf.use("B")
    shelf.use("A")
    shelf.evict(1, "C", "after touching B three times, then A", hint=1)
    shelf.evict(1, "B", "after touching B three times, then A, with C gone", hint=1)


def nothing_to_do(impl: ModuleType) -> None:
    """evict(0), and evict on an empty tree."""
    Shelf(impl, "AB").evict(0, "", "with A and B in the tree")
    Shelf(impl, "").evict(3, "", "in an empty tree")


def whole_leaves(impl: ModuleType) -> None:
    """A leaf goes as a whole."""
    Shelf(impl, "ABC", size=3).evict(1, "A", "with leaves of 3 tokens")
    Shelf(impl, "ABC", size=3).evict(3, "A", "with leaves of 3 tokens")
    Shelf(impl, "ABC", size=3).evict(4, "AB", "with leaves of 3 tokens")


def locked_leaves_stay(impl: ModuleType) -> None:
    """Leaves that a request holds are passed over."""
    shelf = Shelf(impl, "ABC")
    shelf.tree.lock(shelf.node("A"))
    shelf.evict(1, "B", "with A locked", hint=1)
    shelf.evict(5, "C", "with A locked and B gone", hint=1)
    shelf.evict(5, "", "with only A left, and A locked", hint=1)
    shelf.tree.unlock(shelf.node("A"))
    shelf.evict(5, "A", "after A was unlocked again", hint=1)


def locked_and_used(impl: ModuleType) -> None:
    """A leaf that was locked when it came up, and used since."""
    shelf = Shelf(impl, "ABC")
    shelf.tree.lock(shelf.node("A"))
    shelf.evict(1, "B", "with A locked", hint=1)
    shelf.put("D")
    shelf.use("A")
    shelf.tree.unlock(shelf.node("A"))
    shelf.evict(2, "CD", "after D came, A was used and then unlocked", hint=1)


def from_the_ends(impl: ModuleType) -> None:
    """Only leaves go; a parent is one when its last child has gone."""
    shelf = Shelf(impl, "")
    for name in ("A", "AB", "C"):
        shelf.put(name)
    shelf.use("A")  # now C is older than A, and B below A is older than both
    shelf.evict(1, "B", "B hangs below A, and A was used since", hint=1)
    shelf.evict(1, "C", "B is gone and A a leaf, but C is older", hint=2)
    shelf.evict(1, "A", "A is the last one", hint=2)


def a_chain(impl: ModuleType) -> None:
    """A chain is eaten from its end, in one call."""
    shelf = Shelf(impl, "")
    for name in ("A", "AB", "ABC"):
        shelf.put(name)
    shelf.evict(9, "CBA", "A, below it B, below it C", hint=2)


def locked_path_stays(impl: ModuleType) -> None:
    """A locked node in the middle protects what is above, not what is below."""
    shelf = Shelf(impl, "")
    for name in ("A", "AB", "ABC", "D"):
        shelf.put(name)
    shelf.tree.lock(shelf.node("AB"))
    shelf.evict(9, "CD", "A, below it B, which is locked, below it C; and D", hint=1)


def equal_times(impl: ModuleType) -> None:
    """Two leaves of one age: the smaller id goes first."""
    shelf = Shelf(impl, "")
    shelf.put("ABX")
    shelf.put("ABY")
    tree = shelf.tree
    before = snapshot(tree)
    first = [node for node in tree.nodes() if not node.children]
    first.sort(key=lambda node: node.id)
    freed = tree.evict(1)
    words = (
        f"both leaves were last used at tick {tree.now}: the one with the smaller id goes first, "
        f"{name_of(first[0])}"
    )
    expect(freed == list(first[0].slots), words, pictures(tree, before))


def other_policies(impl: ModuleType) -> None:
    """evict goes by tree.key, whatever that is."""
    shelf = Shelf(impl, "ABC", key=lambda node: -node.last_access)
    shelf.use("A")
    shelf.evict(2, "AC", "with the most recently used first (key: -last_access), after touching A", hint=1)
    shelf = Shelf(impl, "ABC", key=lambda node: (node.hits, node.last_access))
    for name in "AAB":
        shelf.use(name)
    shelf.evict(3, "CBA", "with the fewest hits first (A has 2, B 1, C none)", hint=1)


def many_small_evictions(impl: ModuleType) -> None:
    """Hundreds of leaves, evicted one by one."""
    asked = [0]

    def key(node: Node) -> int:
        asked[0] += 1
        return int(node.last_access)

    tree = laid(Tree(key=key), impl, "offer", "evict")
    for number in range(240):
        tree.insert([number], [1000 + number])
    for number in range(0, 240, 2):
        tree.match([number])
    for number in [*range(1, 240, 2), *range(0, 240, 2)][:180]:
        freed = tree.evict(1)
        wanted = [1000 + number]
        words = (
            f"of 240 leaves, every second one used again: evict(1) freed slots {freed} instead of {wanted}"
        )
        expect(freed == wanted, words)
    calls = 240 + 120 + 180
    words = (
        f"{calls} calls of offer and evict(1) on 240 leaves asked for {asked[0]} keys. "
        "Keep the heap between calls; do not go through all leaves each time"
    )
    expect(asked[0] <= 12 * calls, words)


# ---------------------------------------------------------------------- policies

# name: last_access, created, hits
LEAVES = {"A": (9, 1, 5), "B": (8, 2, 1), "C": (7, 3, 0), "D": (2, 4, 2), "E": (3, 5, 1), "F": (4, 6, 3)}


def lru_order(impl: ModuleType) -> None:
    """Six leaves in the order of lru_key."""
    _order(impl.lru_key, "lru_key", "DEFCBA")


def lfu_order(impl: ModuleType) -> None:
    """Six leaves in the order of lfu_key."""
    _order(impl.lfu_key, "lfu_key", "CEBDFA")


def slru_order(impl: ModuleType) -> None:
    """Six leaves in the order of slru_key."""
    _order(impl.slru_key, "slru_key", "ECBDFA")


def _order(key: Callable[[Any], Any], name: str, wanted: str) -> None:
    nodes = {}
    for number, (letter, (access, created, hits)) in enumerate(LEAVES.items(), start=1):
        node = Node(number, [number], [number], None)
        node.last_access, node.created, node.hits = access, created, hits
        nodes[letter] = node
    got = "".join(sorted(LEAVES, key=lambda letter: key(nodes[letter])))
    table = "; ".join(f"{letter}: last used {a}, {h} hits" for letter, (a, _, h) in LEAVES.items())
    words = f"{name} lets them go in the order {_list(got)}; it should be {_list(wanted)} ({table})"
    expect(got == wanted, words, hint=int(name == "slru_key"))


# ---------------------------------------------------------------------- a claim


def two_ways_to_evict(impl: ModuleType) -> None:
    """Your moves, then both ways of evicting."""
    answer = impl.claim_collapse()
    good = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list)
    expect(good, f"claim_collapse() gave {answer!r}; (moves, num_tokens) is asked for")
    moves, count = answer
    expect(len(moves) <= 8, f"claim_collapse() gave {len(moves)} moves; at most eight are asked for")
    plain, eager = _played(moves), _played(moves)
    freed = plain.evict(count), _collapse(eager, count)
    where = f"after {moves}, evict({count})"
    shown = [("leaf by leaf", snapshot(plain)), ("collapsing upwards", snapshot(eager))]
    words = (
        f"{where} frees {len(freed[0])} tokens leaf by leaf and {len(freed[1])} collapsing upwards: "
        "they should be equally many"
    )
    expect(len(freed[0]) == len(freed[1]), words, shown)
    words = f"{where} frees the same slots both ways, {sorted(freed[0])}: that refutes nothing"
    expect(set(freed[0]) != set(freed[1]), words, shown, hint=1)


def _played(moves: Sequence[tuple[str, list[int]]]) -> Tree:
    tree, slot = tree_of(), 1
    for kind, tokens in moves:
        if kind == "insert":
            tree.insert(tokens, range(slot, slot + len(tokens)))
            slot += len(tokens)
        elif kind == "match":
            tree.match(tokens)
        else:
            raise Failure(f'claim_collapse() has a move {kind!r}; there are "insert" and "match"')
    return tree


def _collapse(tree: Tree, num_tokens: int) -> list[int]:
    while len(tree.freed) < num_tokens:
        leaves = [node for node in tree.nodes() if not node.children and node is not tree.root]
        if not leaves:
            break
        leaf = min(leaves, key=lambda leaf: (leaf.last_access, leaf.id))
        while leaf is not tree.root and not leaf.children and len(tree.freed) < num_tokens:
            parent = leaf.parent
            tree.remove(leaf)
            leaf = parent
    return tree.freed


LOCKS: Sequence[Callable[[ModuleType], None]] = (
    lock_a_leaf,
    lock_twice,
    lock_two_leaves,
    lock_an_inner_node,
    lock_the_root,
)
UNLOCKS: Sequence[Callable[[ModuleType], None]] = (
    unlock_a_leaf,
    unlock_one_of_two,
    unlock_beside_another,
    unlock_after_a_split,
    unlock_the_root,
    unlock_what_is_not_locked,
)
EVICTIONS: Sequence[Callable[[ModuleType], None]] = (
    oldest_first,
    used_again,
    nothing_to_do,
    whole_leaves,
    locked_leaves_stay,
    locked_and_used,
    from_the_ends,
    a_chain,
    locked_path_stays,
    equal_times,
    other_policies,
    many_small_evictions,
)

EXERCISES = [
    Exercise(
        "inc_lock_ref",
        2,
        LOCKS,
        hints=(
            "Go from the node up to the root, which is left out. Every node on the way counts one reader "
            "more.",
            "When `lock_ref` was 0 before: a node's tokens move from evictable to protected once, however "
            "many requests share it.",
        ),
    ),
    Exercise(
        "dec_lock_ref",
        2,
        UNLOCKS,
        hints=(
            "All that `inc_lock_ref` does, backwards: a node's tokens move back when its `lock_ref` has "
            "become 0.",
            "The node itself is enough: every node above it is locked at least as often. Check before you "
            "change anything.",
        ),
    ),
    Exercise(
        "evict",
        3,
        EVICTIONS,
        functions=("offer", "evict"),
        hints=(
            "`(tree.key(node), node.id, node)`, into `tree.heap`, which stays between the calls. The id "
            "settles ties, and keeps Python from comparing nodes.",
            "May it go at all? `not node.children and node.lock_ref == 0 and node.parent is not None`. If "
            "not: drop it. Is its key still the one in the entry? If not: put it back under the present "
            "key. Only else it is the victim.",
            "Keep its parent in a variable before `tree.remove`. Has the parent, if it is not the root, no "
            "child left? `offer` it. And `tree.evictable_size` shrinks by all that went.",
        ),
    ),
    Exercise(
        "policies",
        2,
        (lru_order, lfu_order, slru_order),
        functions=("lru_key", "lfu_key", "slru_key"),
        hints=(
            "Tuples compare from left to right: what stands first decides, and the next one only among "
            "equals.",
            "`False < True`: a comparison can stand first in the tuple. Which of the two groups is to go "
            "first, and what decides within it?",
        ),
    ),
    Exercise(
        "claim_collapse",
        1,
        (two_ways_to_evict,),
        hints=(
            "A parent is at least as young as its youngest child. When the child goes, the parent may be "
            "much younger than some other leaf.",
            "It was touched by a request that ended there, or went another way. So touch it once more after "
            "the other leaf has come. A look-up that ends inside a node splits it, and both halves count as "
            "just used: let it end at a node's end.",
        ),
    ),
]
