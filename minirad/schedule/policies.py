"""In which order waiting requests are tried. Read-only: `peek` leaves no trace in the tree.

Every policy serves a larger `priority` first and breaks ties by arrival. Whoever comes first in the
order and cannot be admitted is waited for, so a policy decides alone who can be passed by whom:

    fcfs        nobody is passed by a later request
    lpm         longest prefix match: no bound, a request without a match may wait as long as others come
    dfs-weight  depth-first through the tree, the branch wanted by most first: no bound
    lof         longest output first: no bound
    random      by a number drawn once for each request: no bound
    fair        lpm, but nobody is passed by later requests in more than `fair_passes` steps

All this among requests of one priority: a stream of larger ones is served first under every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.config import ScheduleOptions
from minirad.schedule.request import Request

Peek = Callable[[Request], int]  # how many of its tokens the tree would match now
Order = Callable[[Sequence[Request], Peek], list[Request]]


def fcfs(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """First come, first served."""
    return sorted(waiting, key=_rank)


def lpm(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Longest prefix match first: it uses what is cached before it is evicted (SGLang paper, 3)."""
    return sorted(waiting, key=lambda r: (-r.priority, -peek(r), r.arrival, r.index))


def lof(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Longest output first, by what was asked for: the long ones do not trail behind at the end.

    A retracted request keeps its place, although less of its output is left.
    """
    return sorted(waiting, key=lambda r: (-r.priority, -r.params.max_new_tokens, r.arrival, r.index))


def shuffled(seed: int) -> Order:
    """By a random number of each request's own. The same seed gives the same order.

    Drawn once per request, not anew at each step: the order is a function of the queue, and a large
    request that is first stays first until there is room for it.
    """

    def order(waiting: Sequence[Request], peek: Peek) -> list[Request]:
        return sorted(waiting, key=lambda r: (-r.priority, _draw(seed, r.arrival), r.arrival, r.index))

    return order


def fair(passes: int) -> Order:
    """lpm, but who was passed in `passes` steps comes before all others, by arrival.

    A request is passed in a step that leaves it waiting and admits one that has less priority, or the
    same and came later (`Request.passes`; the scheduler counts). Once it is due nothing of its priority
    that came later is tried before it, so the bound is exact; those before it in line are at most the
    ones that came earlier. 0 is fcfs, a very large number is lpm.
    """

    def order(waiting: Sequence[Request], peek: Peek) -> list[Request]:
        def key(r: Request) -> tuple[int, int, int, int, int]:
            due = r.passes >= passes
            return (-r.priority, not due, 0 if due else -peek(r), r.arrival, r.index)

        return sorted(waiting, key=key)

    return order


def dfs_weight(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Depth-first through the tree, from every node into the child that most of the queue wants.

    Those who match to the end of a node come after those who match further: their prefix is in use as
    long as anything below it runs (the paper's Theorem 3.1 is about such an order; the weights are
    SGLang's). Any tree will do, only its `peek` is asked: the branching of the matched parts is found
    by putting each of them, once, into a scratch tree.
    """
    ends: dict[tuple[Any, bytes], list[Request]] = {}
    for request in waiting:
        key = request.key()
        ends.setdefault((key.namespace, key.data[: peek(request) * key.width]), []).append(request)
    rank = _depth_first(ends)
    return sorted(waiting, key=lambda r: (-r.priority, rank[r.id], r.arrival, r.index))


def _depth_first(ends: dict[tuple[Any, bytes], list[Request]]) -> dict[str, int]:
    """For each request how many requests come before its own node in the weighted depth-first walk."""
    scratch = RadixCache()
    at: dict[int, list[Request]] = {}
    for (namespace, data), requests in ends.items():
        key = RadixKey._from_bytes(data, namespace, 4)
        # A later split leaves the id with the lower half: it stays the end of this prefix.
        node = scratch.insert(key, np.zeros(len(key), dtype=np.int64)).last_node
        at.setdefault(node.id, []).extend(requests)  # the root: for every namespace that matches nothing
    # Per node: how many requests end in it or below, and the first of them to have come.
    wanted: dict[int, tuple[int, tuple[int, int]]] = {}
    for node in reversed(list(scratch.walk())):  # children before parents
        below = [wanted[child.id] for child in node.children.values()]
        own = [(1, (request.arrival, request.index)) for request in at.get(node.id, ())]
        wanted[node.id] = _together(own + below)
    rank: dict[str, int] = {}
    todo: list[tuple[Node, bool]] = [(scratch.root, False)]
    while todo:
        node, below_is_done = todo.pop()
        if below_is_done:
            place = len(rank)
            rank.update((request.id, place) for request in at.get(node.id, ()))
            continue
        todo.append((node, True))
        by_weight = sorted(node.children.values(), key=lambda c: (-wanted[c.id][0], wanted[c.id][1]))
        todo.extend((child, False) for child in reversed(by_weight))
    return rank


def _together(parts: list[tuple[int, tuple[int, int]]]) -> tuple[int, tuple[int, int]]:
    if not parts:
        return 0, (0, 0)
    return sum(count for count, _ in parts), min(first for _, first in parts)


def _rank(request: Request) -> tuple[int, int, int]:
    return (-request.priority, request.arrival, request.index)


def _draw(seed: int, number: int) -> int:
    """64 well mixed bits of two numbers (the finaliser of SplitMix64): quicker than a generator each."""
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def is_behind(request: Request, other: Request) -> bool:
    """True where `request` has less priority than `other`, or the same and came later."""
    return _rank(request) > _rank(other)


POLICIES: dict[str, Callable[[ScheduleOptions], Order]] = {
    "fcfs": lambda options: fcfs,
    "lpm": lambda options: lpm,
    "dfs-weight": lambda options: dfs_weight,
    "lof": lambda options: lof,
    "random": lambda options: shuffled(options.seed),
    "fair": lambda options: fair(options.fair_passes),
}
CACHE_AWARE = frozenset({"lpm", "dfs-weight", "fair"})
