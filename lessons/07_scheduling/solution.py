"""Lesson 07, solved in a few lines each. minirad/schedule/ does the same for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Request = Node = Tree = Any  # what exercise.py says of them


def lpm_order(queue: Sequence[Request], match: Callable[[Any], int]) -> list[Any]:
    """Longest prefix match first."""
    return sorted(queue, key=lambda request: (-request.priority, -match(request), request.arrival))


def dfs_order(root: Node) -> list[Any]:
    """Depth-first through a tree of the queue, the most wanted branch first."""
    order: list[Any] = []
    for child in sorted(root.children, key=_wanted):
        order += dfs_order(child)
    return order + sorted(root.requests, key=lambda request: request.arrival)


def _wanted(node: Node) -> tuple[int, float]:
    """The weight, largest first, and the earliest arrival at a node or below it."""
    weight = len(node.requests)
    earliest = min((request.arrival for request in node.requests), default=float("inf"))
    for child in node.children:
        lighter, arrival = _wanted(child)
        weight -= lighter
        earliest = min(earliest, arrival)
    return -weight, earliest


def admit(queue: Sequence[Request], tree: Tree, free: int, reserve: int) -> tuple[list[Any], int]:
    """Algorithm 1 of the SGLang paper, repaired."""
    admitted = []
    for request in queue:
        matched, node = tree.match(request)
        tree.lock(node)
        need = len(request.tokens) - min(matched, len(request.tokens) - 1)
        if free + tree.evictable < need + request.new_tokens + reserve:
            tree.unlock(node)
            break
        if need > free:
            free += tree.evict(need - free)
        free -= need
        reserve += request.new_tokens
        admitted.append(request)
    return admitted, free


def count_passes(waiting: Sequence[Request], admitted: Sequence[Request]) -> None:
    """Called after each step: notes who was passed."""
    for request in waiting:
        rank = (-request.priority, request.arrival)
        if any((-other.priority, other.arrival) > rank for other in admitted):
            request.passes += 1


def fair_order(queue: Sequence[Request], match: Callable[[Any], int], limit: int) -> list[Any]:
    """lpm with bounded overtaking."""

    def key(request: Request) -> tuple[int, bool, int, int]:
        due = request.passes >= limit
        return (-request.priority, not due, 0 if due else -match(request), request.arrival)

    return sorted(queue, key=key)
