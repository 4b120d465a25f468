"""The other scheduling policies, beside fcfs and lpm: see policies.py, which finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minirad.rooms import room

# Any: see policies.py.
Request = Any  # schedule.request.Request
Options = Any  # config.ScheduleOptions
Peek = Callable[[Request], int]  # how many of its tokens the tree would match now
Order = Callable[[Sequence[Request], Peek], list[Request]]


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
    """lpm, but a request that was passed in `passes` steps comes before all others, by arrival.

    A request is passed in a step that leaves it waiting and admits one that has less priority, or the
    same and came later (`Request.passes`; the scheduler counts). Once it is due no request of its priority
    that came later is tried before it, so the bound is exact. 0 is fcfs, a very large number is lpm.
    """

    def order(waiting: Sequence[Request], peek: Peek) -> list[Request]:
        def key(r: Request) -> tuple[int, int, int, int, int]:
            due = r.passes >= passes
            return (-r.priority, not due, 0 if due else -peek(r), r.arrival, r.index)

        return sorted(waiting, key=key)

    return order


def dfs_weight(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Depth-first through the tree, the branch wanted by most first (dfs_weight.py)."""
    ordered: list[Request] = room("schedule.dfs_weight").dfs_weight(waiting, peek)
    return ordered


def _draw(seed: int, number: int) -> int:
    """64 well mixed bits of two numbers (the finaliser of SplitMix64): quicker than a generator each."""
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


POLICIES: dict[str, Callable[[Options], Order]] = {
    "dfs-weight": lambda options: dfs_weight,
    "lof": lambda options: lof,
    "random": lambda options: shuffled(options.seed),
    "fair": lambda options: fair(options.fair_passes),
}
