"""In which order waiting requests are tried. Read-only: `peek` leaves no trace in the tree.

Every policy serves a larger `priority` first and breaks ties by arrival. A request that comes first in the
order and cannot be admitted is waited for, so a policy alone decides which requests can be passed:

    fcfs        no request is passed by a later one
    lpm         longest prefix match: no bound, a request without a match may wait as long as others come
    dfs-weight  depth-first through the tree, the branch wanted by most first: no bound
    lof         longest output first: no bound
    random      by a number drawn once for each request: no bound
    fair        lpm, but no request is passed by later ones in more than `fair_passes` steps

All this among requests of one priority: a stream of larger ones is served first under every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minirad.rooms import room

# Any: config.py imports this file for its names, and requests import config.py.
Request = Any  # schedule.request.Request
Options = Any  # config.ScheduleOptions
Peek = Callable[[Request], int]  # how many of its tokens the tree would match now
Order = Callable[[Sequence[Request], Peek], list[Request]]


def fcfs(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """First come, first served."""
    return sorted(waiting, key=rank)


def lpm(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Longest prefix match first: it uses what is cached before it is evicted (SGLang paper, 3)."""
    return sorted(waiting, key=lambda r: (-r.priority, -peek(r), r.arrival, r.index))


def rank(request: Request) -> tuple[int, int, int]:
    """Sorts by priority, then by arrival: the policy "fcfs", and every policy's last resort."""
    return (-request.priority, request.arrival, request.index)


def is_behind(request: Request, other: Request) -> bool:
    """True where `request` has less priority than `other`, or the same and came later."""
    return rank(request) > rank(other)


POLICIES: dict[str, Callable[[Options], Order]] = {
    "fcfs": lambda options: fcfs,
    "lpm": lambda options: lpm,
    **room("schedule.other_policies").POLICIES,
}
CACHE_AWARE = frozenset({"lpm", "dfs-weight", "fair"})
