"""What lesson 07 asks for, and its open cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, Failure, expect
from lessons.grading.cases import outline
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.errors import InvariantError

# ---------------------------------------------------------------------- what the student is given


@dataclass(eq=False)
class Request:
    """A request as exercise.py describes it."""

    name: str
    tokens: list[int] = field(default_factory=list)
    arrival: int = 0
    priority: int = 0
    passes: int = 0
    new_tokens: int = 0
    index: int = 0  # the engine's own policies ask for it

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Node:
    """A node of the queue's tree: requests that end here, and children."""

    requests: list[Request] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)


class Tree:
    """The engine's tree with what was put in, and what is locked."""

    def __init__(self, *cached: Sequence[int]) -> None:
        self.cache = RadixCache()
        self.locks: list[Any] = []
        self.calls: list[int] = []  # of evict
        self.next_slot = 1
        for tokens in cached:
            self.put(tokens)

    def put(self, tokens: Sequence[int]) -> None:
        self.cache.insert(RadixKey(list(tokens)), list(range(self.next_slot, self.next_slot + len(tokens))))
        self.next_slot += len(tokens)

    @property
    def evictable(self) -> int:
        return self.cache.evictable_size

    def match(self, request: Any) -> tuple[int, Any]:
        found = self.cache.match_prefix(RadixKey(list(request.tokens)))
        return found.length, found.last_node

    def lock(self, node: Any) -> None:
        try:
            self.cache.inc_lock_ref(node)
        except ValueError as error:
            raise Failure(
                f"tree.lock: {error}. It was matched, then evicted: match only when its turn comes"
            ) from error
        self.locks.append(node)

    def unlock(self, node: Any) -> None:
        expect(node in self.locks, "tree.unlock was called for a node that was not locked by you")
        self.locks.remove(node)
        try:
            self.cache.dec_lock_ref(node)
        except InvariantError as error:
            raise Failure(f"tree.unlock: {error}") from error

    def evict(self, num_tokens: int) -> int:
        self.calls.append(num_tokens)
        return self.cache.evict(num_tokens).num_tokens


def names(order: Any) -> list[str]:
    return [request.name for request in order]


def same_order(got: Any, wanted: Sequence[str], queue: Sequence[Request], what: str, hint: int = 0) -> None:
    """The first place where two orders differ, in words."""
    expect(got is not None, f"{what} returned nothing")
    ours = names(got)
    short = sorted(names(queue))
    expect(sorted(ours) == short, f"{what} gave {ours}; it should hold each of {short} once")
    for place, (mine, theirs) in enumerate(zip(ours, wanted, strict=True), start=1):
        expect(
            mine == theirs,
            f"{what} gave {ours}: place {place} should be {theirs}, not {mine} ({list(wanted)})",
            hint=hint,
        )


class Lengths:
    """match(request) from a table; counts how often it is asked."""

    def __init__(self, table: Mapping[str, int]) -> None:
        self.table, self.asked = dict(table), 0

    def __call__(self, request: Any) -> int:
        self.asked += 1
        return self.table[request.name]


def queue_of(**described: tuple[int, int] | tuple[int, int, int]) -> tuple[list[Request], Lengths]:
    """name=(arrival, match) or (arrival, match, priority)."""
    requests = [Request(name, arrival=each[0], priority=(*each, 0)[2]) for name, each in described.items()]
    return requests, Lengths({name: each[1] for name, each in described.items()})


# ---------------------------------------------------------------------- lpm


def lpm_by_hand(impl: ModuleType) -> None:
    """Three requests with different matches."""
    queue, match = queue_of(A=(1, 0), B=(2, 10), C=(3, 5))
    _lpm(impl, queue, match, "BCA", "matches A 0, B 10, C 5")


def lpm_ties(impl: ModuleType) -> None:
    """Equal matches: who came earlier."""
    queue, match = queue_of(C=(3, 5), A=(1, 5), B=(2, 5), D=(0, 4))
    _lpm(impl, queue, match, "ABCD", "A, B and C all match 5, arrivals 1, 2, 3; D matches 4", hint=1)


def lpm_priorities(impl: ModuleType) -> None:
    """Larger priority before a longer match."""
    queue, match = queue_of(A=(1, 50, 0), B=(2, 0, 1), C=(3, 9, 1), D=(4, 99, -1))
    _lpm(
        impl, queue, match, "CBAD", "B and C have priority 1, A 0, D -1; matches A 50, B 0, C 9, D 99", hint=1
    )


def lpm_asks_once(impl: ModuleType) -> None:
    """How often the tree is walked for a queue of 40."""
    queue, match = queue_of(**{f"R{i}": (i, i * 7 % 11) for i in range(40)})
    impl.lpm_order(queue, match)
    expect(match.asked <= 40, f"match was asked {match.asked} times for 40 requests: once each is enough")


def lpm_of_nobody(impl: ModuleType) -> None:
    """An empty queue."""
    got = impl.lpm_order([], Lengths({}))
    expect(list(got) == [], f"lpm_order of an empty queue gave {got!r}")


def _lpm(
    impl: ModuleType, queue: list[Request], match: Lengths, wanted: str, what: str, hint: int = 0
) -> None:
    before = list(queue)
    got = impl.lpm_order(queue, match)
    expect(queue == before, f"{what}: lpm_order changed the queue it was given; return a new list")
    expect(got is not queue, f"{what}: lpm_order returned the queue itself; return a new list")
    same_order(got, list(wanted), queue, f"lpm_order, {what},", hint)


# ---------------------------------------------------------------------- dfs


def dfs_by_hand(impl: ModuleType) -> None:
    """Two branches, the larger one first."""
    a, b, c = (Request(name, arrival=i) for i, name in enumerate("ABC"))
    root = Node(children=[Node([a]), Node([b, c])])
    _dfs(impl, root, "BCA", "one child with A, one with B and C")


def dfs_own_last(impl: ModuleType) -> None:
    """A request that ends where others go on."""
    a, b, c, d = (Request(name, arrival=i) for i, name in enumerate("ABCD"))
    root = Node([d], [Node([a], [Node([b]), Node([c])])])
    _dfs(impl, root, "BCAD", "D ends at the root, A at its child, B and C below that")


def dfs_weights(impl: ModuleType) -> None:
    """The weight counts everything below, not the children."""
    r = {name: Request(name, arrival=i) for i, name in enumerate("ABCDEFGH")}
    deep = Node([], [Node([], [Node([r["A"], r["B"], r["C"]])])])
    wide = Node([], [Node([r["D"]]), Node([r["E"]])])
    root = Node([], [wide, deep, Node([r["F"]])])
    _dfs(impl, root, "ABCDEF", "a deep branch with A, B, C; a wide one with D, E; and F", hint=1)


def dfs_ties(impl: ModuleType) -> None:
    """Branches of equal weight: the one with the earliest request."""
    r = {name: Request(name, arrival=i) for i, name in enumerate("ABCDEF")}
    root = Node([], [Node([r["F"], r["B"]]), Node([r["C"]], [Node([r["A"]])]), Node([r["E"], r["D"]])])
    _dfs(impl, root, "ACBFDE", "three branches of 2: F B; A below C; E D", hint=2)


def dfs_of_little(impl: ModuleType) -> None:
    """A tree with nobody, and one with somebody at the root only."""
    expect(list(impl.dfs_order(Node())) == [], "dfs_order of an empty tree should be []", hint=2)
    b, a = Request("B", arrival=2), Request("A", arrival=1)
    _dfs(impl, Node([b, a]), "AB", "A and B at the root")


def _dfs(impl: ModuleType, root: Node, wanted: Sequence[str], what: str, hint: int = 0) -> None:
    queue = everybody(root)
    shape = shape_of(root)
    got = impl.dfs_order(root)
    expect(shape_of(root) == shape, f"dfs_order, {what}: the tree must stay as it is")
    same_order(got, list(wanted), queue, f"dfs_order, {what},", hint)


def everybody(root: Node) -> list[Request]:
    return [*root.requests, *(request for child in root.children for request in everybody(child))]


def shape_of(node: Node) -> Any:
    return names(node.requests), [shape_of(child) for child in node.children]


# ---------------------------------------------------------------------- admit


def admit_by_hand(impl: ModuleType) -> None:
    """Two requests into an empty pool."""
    run_admit(impl, Tree, [("A", [1, 2, 3], 0), ("B", [4, 5], 0)], 8, 0, "AB", 3)
    run_admit(impl, Tree, [("A", [1, 2, 3], 0), ("B", [4, 5], 0)], 4, 0, "A", 1)
    run_admit(impl, Tree, [], 4, 0, "", 4)


def admit_what_is_cached(impl: ModuleType) -> None:
    """What is cached needs no slot, but one token is always computed."""
    tree = lambda: Tree([1, 2, 3, 4])  # noqa: E731
    run_admit(impl, tree, [("A", [1, 2, 3, 4, 5, 6], 0)], 2, 0, "A", 0, hint=2)
    run_admit(impl, tree, [("A", [1, 2, 3, 4], 0)], 1, 0, "A", 0, hint=2)
    run_admit(impl, tree, [("A", [1, 2, 3, 4], 0)], 0, 0, "", 0, hint=2)


def admit_counts_the_lock(impl: ModuleType) -> None:
    """A request cannot be given the room of the prefix that it uses itself."""
    tree = lambda: Tree([1, 2, 3, 4])  # noqa: E731
    run_admit(impl, tree, [("A", [1, 2, 3, 4, 5, 6, 7], 0)], 2, 0, "", 2, hint=1)
    run_admit(impl, tree, [("A", [1, 2, 5, 6, 7], 0)], 2, 0, "A", 1, hint=1)


def admit_evicts_the_shortfall(impl: ModuleType) -> None:
    """Only what the free slots lack is evicted."""
    tree = lambda: Tree([1, 2], [5, 6], [8, 9])  # noqa: E731
    run_admit(impl, tree, [("A", [20, 21, 22, 23], 0)], 3, 0, "A", 1, cached=4, hint=2)
    run_admit(impl, tree, [("A", [20, 21, 22], 0)], 3, 0, "A", 0, cached=6, hint=2)
    run_admit(impl, tree, [("A", [20, 21, 22, 23, 24], 0)], 0, 0, "A", 1, cached=0, hint=2)


def admit_keeps_the_reserve(impl: ModuleType) -> None:
    """What running and just admitted requests will still generate is left over."""
    run_admit(impl, Tree, [("A", [1, 2, 3], 0)], 5, 3, "", 5, hint=2)
    run_admit(impl, Tree, [("A", [1, 2, 3], 0)], 6, 3, "A", 3, hint=2)
    run_admit(impl, Tree, [("A", [1, 2, 3], 4)], 6, 0, "", 6, hint=2)
    run_admit(impl, Tree, [("A", [1, 2, 3], 4), ("B", [5, 6], 1)], 9, 0, "A", 6, hint=2)
    run_admit(impl, Tree, [("A", [1, 2, 3], 4), ("B", [5, 6], 1)], 10, 0, "AB", 5, hint=2)
    run_admit(impl, lambda: Tree([7, 8, 9]), [("A", [1, 2, 3], 3)], 3, 0, "A", 0, cached=3, hint=2)


def admit_waits_for_the_first(impl: ModuleType) -> None:
    """Nobody passes a request that does not fit."""
    run_admit(impl, Tree, [("A", [1] * 9, 0), ("B", [2], 0)], 5, 0, "", 5)
    run_admit(impl, Tree, [("A", [1], 0), ("B", [2] * 9, 0), ("C", [3], 0)], 5, 0, "A", 4)


def admit_matches_late(impl: ModuleType) -> None:
    """What B could have used was evicted for A."""
    tree = lambda: Tree([5, 6, 7], [8, 9])  # noqa: E731
    run_admit(impl, tree, [("A", [1, 2], 0), ("B", [5, 6, 7, 8, 4], 0)], 1, 0, "A", 2, cached=2, hint=1)
    run_admit(impl, tree, [("A", [1, 2], 0), ("B", [5, 6, 7, 8, 4], 0)], 3, 0, "AB", 1, cached=3, hint=1)


def queue_to_admit(described: Sequence[tuple[str, list[int], int]]) -> list[Request]:
    """Requests in the order in which they are to be tried: by no number of theirs."""
    return [
        Request(name, list(tokens), (3 + 7 * i) % 10, (0, 2, -1, 1)[i % 4], (1, 0, 4)[i % 3], new)
        for i, (name, tokens, new) in enumerate(described)
    ]


def run_admit(
    impl: ModuleType,
    make: Callable[[], Tree],
    described: Sequence[tuple[str, list[int], int]],
    free: int,
    reserve: int,
    wanted: Sequence[str],
    left: int,
    cached: int | None = None,
    hint: int = 0,
) -> None:
    """One call: who is admitted, what is left, what is cached still, and who holds which lock."""
    tree = make()
    queue = queue_to_admit(described)
    kept = "; ".join(f"{path}" for path, _, _ in outline(tree.cache)) or "nothing"
    asks = ", ".join(f"{r.name} {r.tokens} (+{r.new_tokens})" for r in queue) or "nobody"
    what = f"admit of {asks} with {free} free slots, reserve {reserve}, cached {kept}"
    given, before = list(queue), [(list(r.tokens), r.new_tokens) for r in queue]
    answer = impl.admit(given, tree, free, reserve)
    same = names(given) == names(queue) and [(list(r.tokens), r.new_tokens) for r in queue] == before
    expect(same, f"{what}: the queue and its requests must stay as they are; the queue is {names(given)} now")
    expect(
        isinstance(answer, tuple) and len(answer) == 2, f"{what}: returned {answer!r}, not (admitted, free)"
    )
    admitted, free_left = answer
    got = names(admitted)
    expect(got == list(wanted), f"{what}: admitted {got}, it should be {list(wanted)}", hint=hint)
    gone = tree.calls
    expect(
        free_left == left,
        f"{what}: {free_left} free slots are left, it should be {left} (evict was called {gone})",
        hint=hint,
    )
    if cached is not None:
        total = tree.cache.total_size
        expect(
            total == cached,
            f"{what}: {total} tokens are cached afterwards, it should be {cached} (evict was called {gone})",
            hint=hint,
        )
    ends = [tree.match(request)[1] for request in admitted]
    held = sorted(node.id for node in tree.locks if node.parent is not None)
    due = sorted(node.id for node in ends if node.parent is not None)
    expect(
        held == due,
        f"{what}: {len(held)} locks are held on nodes, it should be {len(due)}: "
        "one for each admitted request's match",
        hint=1,
    )
    tree.cache.check()


# ---------------------------------------------------------------------- fair


def passes_by_hand(impl: ModuleType) -> None:
    """Who was passed in one step."""
    for waiting, admitted, wanted in [
        ([(1, 0)], [(2, 0)], [1]),
        ([(2, 0)], [(1, 0)], [0]),
        ([(1, 0), (3, 0), (9, 0)], [(2, 0), (5, 0), (6, 0)], [1, 1, 0]),
        ([(1, 0)], [], [0]),
        ([(5, 1)], [(1, 0)], [1]),
        ([(1, 0)], [(5, 1)], [0]),
        ([(1, 1), (2, 0)], [(3, 1)], [1, 0]),
        ([], [(3, 1)], []),
    ]:
        left = [Request(f"W{arrival}", arrival=arrival, priority=p, passes=7) for arrival, p in waiting]
        taken = [Request(f"A{arrival}", arrival=arrival, priority=p) for arrival, p in admitted]
        impl.count_passes(left, taken)
        got = [request.passes - 7 for request in left]
        what = f"waiting {waiting}, admitted {admitted} (arrival, priority)"
        expect(got == wanted, f"count_passes, {what}: passes went up by {got}, it should be {wanted}")
        expect(not any(r.passes for r in taken), f"count_passes, {what}: who was admitted was not passed")


def fair_by_hand(impl: ModuleType) -> None:
    """A request that was passed often enough goes first."""
    _fair(impl, {"A": (1, 0, 0, 3), "B": (2, 90, 0, 0), "C": (3, 50, 0, 1)}, 3, "ABC")
    _fair(impl, {"A": (1, 0, 0, 2), "B": (2, 90, 0, 0), "C": (3, 50, 0, 1)}, 3, "BCA")
    _fair(impl, {"A": (1, 0, 0, 4), "B": (2, 7, 0, 9), "C": (3, 99, 0, 0)}, 3, "ABC")
    _fair(impl, {"A": (1, 0, 0, 5), "B": (2, 7, 1, 0), "C": (3, 9, 1, 0)}, 3, "CBA")
    _fair(impl, {"B": (2, 9, 0, 0), "A": (1, 3, 0, 0), "C": (3, 99, 0, 0)}, 0, "ABC")
    _fair(impl, {"B": (2, 9, 0, 6), "A": (1, 3, 0, 7), "C": (3, 99, 0, 8)}, 1000, "CBA")
    _fair(impl, {}, 3, "")


def nobody_starves(impl: ModuleType) -> None:
    """A request without a match, and a stream of others that match."""
    for limit in (0, 1, 3):
        cold = Request("cold", arrival=0)
        match = Lengths({"cold": 0})
        queue, most = [cold], 0
        for step in range(12):
            name = f"hot {step}"
            queue.append(Request(name, arrival=step + 1))
            match.table[name] = 100
            first = impl.fair_order(queue, match, limit)[0]
            queue = [request for request in queue if request is not first]
            impl.count_passes(queue, [first])
            if first is cold:
                break
            most += 1
        expect(
            most == limit,
            f"limit {limit}: a request without a match was passed by {most} others before it ran, it should "
            f"be {limit} (one is served per step, one comes with a long match)",
            hint=1,
        )


def _fair(
    impl: ModuleType, described: Mapping[str, tuple[int, int, int, int]], limit: int, wanted: str
) -> None:
    queue = [Request(n, arrival=a, priority=p, passes=passed) for n, (a, _, p, passed) in described.items()]
    match = Lengths({name: length for name, (_, length, _, _) in described.items()})
    before = list(queue)
    got = impl.fair_order(queue, match, limit)
    what = ", ".join(
        f"{n} (came {a}, match {m}, priority {p}, passed {x})" for n, (a, m, p, x) in described.items()
    )
    expect(queue == before, "fair_order changed the queue it was given; return a new list")
    expect(got is not queue, f"fair_order of {what or 'nobody'} returned the queue itself; return a new list")
    expect(match.asked <= len(queue), f"match was asked {match.asked} times for {len(queue)} requests")
    expect(
        [r.passes for r in queue] == [d[3] for d in described.values()], "fair_order must not change passes"
    )
    due = sum(r.passes >= limit for r in queue)
    same_order(got, list(wanted), queue, f"fair_order with limit {limit} of {what}", 2 if due > 1 else 1)


EXERCISES = [
    Exercise(
        "lpm_order", 2, [lpm_by_hand, lpm_ties, lpm_priorities, lpm_asks_once, lpm_of_nobody],
        hints=(
            "`sorted(queue, key=...)` with a tuple as the key does most of the work: what stands first in "
            "it decides first. It asks the key once for each element.",
            "A minus turns one place of the tuple round. `reverse=True` turns all of them round, the "
            "arrival, too.",
        ),
    ),
    Exercise(
        "dfs_order", 3, [dfs_by_hand, dfs_own_last, dfs_weights, dfs_ties, dfs_of_little],
        hints=(
            "A function that calls itself for each child. A request that ends at an inner node comes after "
            "those below it: what it needs is locked by them anyway.",
            "Write a second function that gives the weight of a node and its earliest arrival. Both are "
            "found from the children's, and count the requests, not the children.",
            "Children are sorted by (larger weight, smaller earliest arrival). A node with nobody at it and "
            "below it has no arrival: infinity will do.",
        ),
    ),
    Exercise(
        "admit", 4,
        [
            admit_by_hand, admit_what_is_cached, admit_counts_the_lock, admit_evicts_the_shortfall,
            admit_keeps_the_reserve, admit_waits_for_the_first, admit_matches_late,
        ],
        hints=(
            "Play the docstring's steps by hand: 2 free slots, `[1, 2, 3, 4]` cached, a request `[1, 2, 3, "
            "4, 5, 6, 7]`. It needs 3. Is there room for it?",
            "Locking takes tokens out of `tree.evictable`: look at it only then. And what is matched for "
            "the second request before the first one has evicted may be gone: match when its turn comes.",
            "Four numbers: `free`, `reserve`, `need`, `tree.evictable`. `need` is for now, at least 1, and "
            "is taken from `free`; `new_tokens` and `reserve` are for later, and are only left over. Evict "
            "`need - free`, if that is more than 0.",
        ),
    ),
    Exercise(
        "fair", 3, [passes_by_hand, fair_by_hand, nobody_starves],
        hints=(
            "Somebody was passed if his (priority, arrival) ranks before that of one who was admitted. Ask "
            "with `any`, so that a step counts once.",
            "First priority, then due or not, then (if not due) the match, then arrival. Due is who was "
            "passed in `limit` steps or more.",
            "Their match must not matter: put the same number in its place for all of them. With limit 0 "
            "everybody is due.",
        ),
        functions=("count_passes", "fair_order"),
    ),
]  # fmt: skip
