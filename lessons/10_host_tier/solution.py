"""Lesson 10, solved. minirad/tiers/hiradix_cache.py does the same while copies are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lessons.grading.tiers import Node, Tiers


def write_through(tiers: Tiers, path: Sequence[Node], least_hits: int) -> int:
    """Copies what a request leaves behind, parents first."""
    copied = 0
    for node in path:
        if node.on_host:
            continue
        if node.hits < least_hits or not tiers.copy(node):
            break
        copied += node.size
    return copied


def make_host_room(tiers: Tiers, num_tokens: int) -> bool:
    """Frees host slots, the least recently used childless node first."""
    if num_tokens > tiers.host_size:
        return False
    while tiers.host_free < num_tokens:
        idle = [node for node in tiers.nodes() if not (node.on_device or node.below or node.held)]
        if not idle:
            return False
        tiers.remove(min(idle, key=_last_used))
    return True


def evict(tiers: Tiers, num_tokens: int) -> int:
    """Frees device slots; what has a copy, or gets one now, stays in the tree."""
    freed = 0
    while freed < num_tokens:
        able = [node for node in tiers.nodes() if _may_leave_the_device(node)]
        if not able:
            break
        victim = min(able, key=_last_used)
        freed += victim.size
        if victim.on_host or (tiers.write_back and tiers.copy(victim)):
            tiers.demote(victim)
        else:
            _remove_with_all_below(tiers, victim)
    return freed


def _last_used(node: Node) -> int:
    return node.last_access


def _may_leave_the_device(node: Node) -> bool:
    return node.on_device and node.lock_ref == 0 and not any(child.on_device for child in node.below)


def _remove_with_all_below(tiers: Tiers, node: Node) -> None:
    for child in node.below:
        _remove_with_all_below(tiers, child)
    tiers.remove(node)


def load_back(tiers: Tiers, path: Sequence[Node], prompt_tokens: int, threshold: int) -> int:
    """Loads the host's part of a match, all of it or nothing, where that saves enough."""
    chain = [node for node in path if not node.on_device]
    need = sum(node.size for node in chain)
    matched = sum(node.size for node in path)
    usable = prompt_tokens - 1
    saved = min(matched, usable) - min(matched - need, usable)
    if not chain or saved < threshold:
        return 0
    tiers.hold(chain)
    if tiers.device_free < need:
        tiers.evict(need - tiers.device_free)
    fits = tiers.device_free >= need
    if fits:
        tiers.load(chain)
    tiers.release(chain)
    return need if fits else 0


def break_even(loads: Sequence[tuple[int, float]], prefills: Sequence[tuple[int, float]]) -> int | None:
    """Where the load's line falls below what computing adds to a pass."""
    per_loaded, start = np.polyfit(*zip(*loads, strict=True), 1)
    per_computed, _ = np.polyfit(*zip(*prefills, strict=True), 1)
    if per_computed <= per_loaded:
        return None
    return max(int(start / (per_computed - per_loaded) // 1) + 1, 1)
