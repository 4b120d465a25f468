"""Which running requests give way to a waiting one of larger priority.

The lowest priority is preempted first, then the request with least to lose, and no more than are needed;
none, if all of them together would not make the room. That is foreseen by a dry run on lock counts: the
locks that victims hold are taken back in a copy of the counts, and a node that no lock is left on would
become evictable. Requests that have finished are not running any more, those whose prompt is in this batch
not yet: neither is preempted. Changes nothing: the scheduler does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from minirad.cache.prefix_cache import path_slots
from minirad.schedule.admission import PrefillBudget, shared_units
from minirad.schedule.request import Request


def outranked(running: Sequence[Request], waiting: Sequence[Request]) -> bool:
    """A waiting request has a larger priority than a running one."""
    largest = max((r.priority for r in waiting), default=-math.inf)
    return any(r.priority < largest for r in running)


def loss(request: Request) -> tuple[int, int, int, int]:
    """Sorts by what is lost with a running request: the smallest goes first."""
    return (request.priority, len(request.output), -request.arrival, -request.index)


def choose_victims(request: Request, running: Iterable[Request], budget: PrefillBudget) -> list[Request]:
    """As few running requests as make room for `request`; none where all would not be enough.

    request: what the tree matches of it was found already.
    """
    lower = sorted((r for r in running if r.priority < request.priority), key=loss)
    page = budget.cache_manager.allocator.page_size
    room, after = budget.cache_manager.room - request.found.cost, replace(budget)
    for count, given_up in enumerate(slots_given_up(lower, request, page), start=1):
        after.preempted(lower[count - 1 : count])
        enough = room + given_up >= after.need(request, request.found.length)
        if enough and after.rows > request.unbranched:
            return lower[:count]
    return []


def slots_given_up(victims: Iterable[Request], request: Request, page: int) -> Iterator[int]:
    """Slots that become free or evictable when the first, the first two, ... victims give up theirs.

    Their private pages, and the nodes that only they lock; but not what `request` matches of these nodes,
    as it would lock that again at once.
    """
    locks: dict[int, int] = {}  # node id: the locks that are left
    total = 0
    for victim in victims:
        total += -(-(victim.kv_len - victim.protected_len) // page) * page
        matched = shared_units(victim, request, request.length) // page * page
        node, end = victim.node, len(path_slots(victim.node))
        while node.parent is not None:  # up to the root
            start = end - len(node.slots)
            locks[node.id] = locks.get(node.id, node.lock_ref) - 1
            if locks[node.id] == 0:
                total += max(end - max(start, matched), 0)
            node, end = node.parent, start
        yield total
