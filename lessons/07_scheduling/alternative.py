"""Lesson 07 once more, built otherwise: stable sorts one after the other, a stack, selection by max."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def lpm_order(queue: Sequence[Any], match: Callable[[Any], int]) -> list[Any]:
    order = sorted(queue, key=lambda request: request.arrival)
    lengths = {request.name: match(request) for request in order}
    order.sort(key=lambda request: lengths[request.name], reverse=True)
    order.sort(key=lambda request: request.priority, reverse=True)
    return order


def dfs_order(root: Any) -> list[Any]:
    """A walk with a stack that writes the order from its end."""
    backwards: list[Any] = []
    stack = [root]
    while stack:
        node = stack.pop()
        backwards += sorted(node.requests, key=lambda request: -request.arrival)
        inside = {id(child): _all(child) for child in node.children}
        waiting = list(node.children)
        waiting.sort(
            key=lambda child: min(r.arrival for r in inside[id(child)]) if inside[id(child)] else 1e9
        )
        waiting.sort(key=lambda child: len(inside[id(child)]), reverse=True)
        stack += waiting  # the last one is written next: it comes last in the order
    return backwards[::-1]


def _all(node: Any) -> list[Any]:
    found = list(node.requests)
    for child in node.children:
        found += _all(child)
    return found


def admit(queue: Sequence[Any], tree: Any, free: int, reserve: int) -> tuple[list[Any], int]:
    taken: list[Any] = []
    rest = list(queue)
    while rest:
        request = rest.pop(0)
        length, node = tree.match(request)
        need = max(len(request.tokens) - length, 1)
        tree.lock(node)
        left = free + tree.evictable - need - reserve
        if left < request.new_tokens:
            tree.unlock(node)
            rest.clear()
        else:
            shortfall = max(need - free, 0)
            gained = tree.evict(shortfall) if shortfall else 0
            free, reserve = free + gained - need, reserve + request.new_tokens
            taken.append(request)
    return taken, free


def count_passes(waiting: Sequence[Any], admitted: Sequence[Any]) -> None:
    if not admitted:
        return
    lowest = min(other.priority for other in admitted)
    latest = max(other.arrival for other in admitted if other.priority == lowest)
    for request in waiting:
        same = [other.arrival for other in admitted if other.priority == request.priority]
        by_rank = lowest < request.priority
        by_time = bool(same) and max(same) > request.arrival
        request.passes += by_rank or by_time or (lowest == request.priority and latest > request.arrival)


def fair_order(queue: Sequence[Any], match: Callable[[Any], int], limit: int) -> list[Any]:
    order: list[Any] = []
    for priority in sorted({request.priority for request in queue}, reverse=True):
        mine = [request for request in queue if request.priority == priority]
        due = [request for request in mine if request.passes >= limit]
        order += sorted(due, key=lambda request: request.arrival)
        order += lpm_order([request for request in mine if request.passes < limit], match)
    return order
