"""Lesson 10, built otherwise: a heap, loops in the place of recursion, sums by hand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tiers import Node, Tiers


def write_through(tiers: Tiers, path: Sequence[Node], least_hits: int) -> int:
    """First the list of those that want a copy, then the copies."""
    wanted = [node for node in path if not node.on_host and node.hits >= least_hits]
    done: list[int] = []
    for node in wanted:
        if tiers.copy(node) is False:
            return sum(done)
        done.append(node.size)
    return sum(done)


def make_host_room(tiers: Tiers, num_tokens: int) -> bool:
    """A heap of who may go; parents join it."""
    if num_tokens <= tiers.host_size:
        heap: list[Any] = []
        for node in tiers.nodes():
            _push(heap, node)
        while heap and tiers.host_free < num_tokens:
            node = heapq.heappop(heap)[2]
            above = node.parent
            tiers.remove(node)
            if above.parent is not None:
                _push(heap, above)
    return num_tokens <= tiers.host_free


def _push(heap: list[Any], node: Any) -> None:
    if node.on_host and not node.on_device and len(node.below) == 0 and not node.held:
        heapq.heappush(heap, (node.last_access, node.id, node))


def evict(tiers: Tiers, num_tokens: int) -> int:
    """A list that grows while it is gone through, and is removed from its end."""
    freed = 0
    while num_tokens > freed and (victim := _next(tiers)) is not None:
        freed += victim.size
        saved = victim.on_host
        if not saved and tiers.write_back:
            saved = tiers.copy(victim)
        if saved:
            tiers.demote(victim)
            continue
        doomed: list[Any] = [victim]
        for node in doomed:  # grows while it is gone through
            doomed += node.below
        while doomed:
            tiers.remove(doomed.pop())
    return freed


def _next(tiers: Tiers) -> Any:
    """The least recently used of those that no node on the device hangs below."""
    nodes = [node for node in tiers.nodes() if node.on_device]
    parents = {id(node.parent) for node in nodes}
    leaves = [node for node in nodes if id(node) not in parents and not node.lock_ref]
    return min(sorted(leaves, key=lambda node: node.id), key=lambda node: node.last_access, default=None)


def load_back(tiers: Tiers, path: Sequence[Node], prompt_tokens: int, threshold: int) -> int:
    """Positions along the prompt, and a finally."""
    here = sum(node.size for node in path if node.on_device)
    end = sum(node.size for node in path)
    if end == here or min(end, prompt_tokens - 1) - here < threshold:
        return 0
    chain = list(path)[-sum(1 for node in path if not node.on_device) :]
    tiers.hold(chain)
    try:
        lacking = (end - here) - tiers.device_free
        if lacking > 0 and tiers.evict(lacking) < lacking:
            return 0
        tiers.load(chain)
        return end - here
    finally:
        tiers.release(chain)


def break_even(loads: Sequence[tuple[int, float]], prefills: Sequence[tuple[int, float]]) -> int | None:
    """Sums by hand, and a look at the neighbours of the quotient."""
    begin, fetch = _line(loads)
    gain = _line(prefills)[1] - fetch
    if gain <= 0:
        return None
    n = max(1, math.ceil(begin / gain) - 1)
    while not begin < gain * n:
        n += 1
    return n


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    count = len(points)
    x, y = (sum(point[at] for point in points) / count for at in (0, 1))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return y - slope * x, slope
