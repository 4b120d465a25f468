"""Lesson 10, built a third way: recursion along the path, sorted lists, and numpy's own least squares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lessons.grading.tiers import Node, Tiers


def write_through(tiers: Tiers, path: Sequence[Node], least_hits: int) -> int:
    """The first node, then the rest of the path."""
    if not path:
        return 0
    first, *rest = path
    new = 0
    if not first.on_host:
        if first.hits < least_hits or not tiers.copy(first):
            return 0
        new = first.size
    return new + write_through(tiers, rest, least_hits)


def make_host_room(tiers: Tiers, num_tokens: int) -> bool:
    """One victim, then the same question again."""
    if tiers.host_free >= num_tokens:
        return True
    if tiers.host_size < num_tokens:
        return False
    order = sorted(tiers.nodes(), key=lambda node: (node.last_access, node.id))
    victim = next((node for node in order if not node.on_device and not node.below and not node.held), None)
    if victim is None:
        return False
    tiers.remove(victim)
    return make_host_room(tiers, num_tokens)


def evict(tiers: Tiers, num_tokens: int) -> int:
    """Reads the tree anew for each victim, children first; the pool counts what was freed."""
    before = tiers.device_free
    while tiers.device_free - before < num_tokens and (victim := _oldest(tiers)) is not None:
        if not victim.on_host and not (tiers.write_back and tiers.copy(victim)):
            for node in list(_from_below(victim)):
                tiers.remove(node)
        else:
            tiers.demote(victim)
    return tiers.device_free - before


def _oldest(tiers: Tiers) -> Node | None:
    best: Node | None = None
    for node in tiers.nodes():
        free = node.on_device and not node.lock_ref and all(not child.on_device for child in node.below)
        if free and (best is None or (node.last_access, node.id) < (best.last_access, best.id)):
            best = node
    return best


def _from_below(node: Node) -> Iterator[Node]:
    for child in node.below:
        yield from _from_below(child)
    yield node


def load_back(tiers: Tiers, path: Sequence[Node], prompt_tokens: int, threshold: int) -> int:
    """Counts the tokens of use one by one, and evicts with its own function."""
    where = [node.on_device for node in path for _ in range(node.size)]
    use = where[: prompt_tokens - 1]
    if use.count(False) < threshold:
        return 0
    need, chain = where.count(False), [node for node in path if not node.on_device]
    tiers.hold(chain)
    short = max(need - tiers.device_free, 0)
    if short:
        evict(tiers, short)
    loaded = 0
    if tiers.device_free >= need:
        tiers.load(chain)
        loaded = need
    tiers.release(chain)
    return loaded


def break_even(loads: Sequence[tuple[int, float]], prefills: Sequence[tuple[int, float]]) -> int | None:
    """Both lines as least squares of a matrix."""
    lines = []
    for points in (loads, prefills):
        tokens, seconds = np.array(points, dtype=float).T
        matrix = np.stack([np.ones_like(tokens), tokens], axis=1)
        lines.append(np.linalg.lstsq(matrix, seconds, rcond=None)[0])
    (start, fetched), (_, computed) = lines
    if not computed > fetched:
        return None
    return int(max(np.floor(start / (computed - fetched)) + 1, 1))
