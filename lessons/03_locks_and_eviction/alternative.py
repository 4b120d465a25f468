"""Lesson 03, built otherwise: recursion, sizes by difference, one heap entry per node, numpy keys."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def _move(tree: Tree, tokens: int) -> int:
    tree.protected_size += tokens
    tree.evictable_size -= tokens
    return abs(tokens)


def inc_lock_ref(tree: Tree, node: Node) -> int:
    """From the top down."""

    def lock(step: Node) -> int:
        if step.parent is None:
            return 0
        above = lock(step.parent)
        step.lock_ref += 1
        return above + (len(step.tokens) if step.lock_ref == 1 else 0)

    return _move(tree, lock(node))


def dec_lock_ref(tree: Tree, node: Node) -> int:
    """The path first, as a list; then all of it at once."""
    if node is tree.root:
        return 0
    if not node.lock_ref:
        raise ValueError("unlocked more often than locked")
    path: list[Any] = []
    step: Any = node
    while step is not tree.root:
        path.append(step)
        step = step.parent
    for step in path:
        step.lock_ref -= 1
    return _move(tree, -sum(len(step.tokens) for step in path if step.lock_ref == 0))


class _Entry:
    """A heap entry that is moved, not doubled."""

    __slots__ = ("key", "node")

    def __init__(self, key: Any, node: Any) -> None:
        self.key, self.node = key, node

    def __lt__(self, other: _Entry) -> bool:
        return bool((self.key, self.node.id) < (other.key, other.node.id))


def offer(tree: Tree, node: Node) -> None:
    """Only leaves that may go are noted, and only if their present key is not noted yet."""
    key = tree.key(node)
    if node.lock_ref == 0 and getattr(node, "noted", None) != key:
        node.noted = key  # type: ignore[attr-defined]
        heapq.heappush(tree.heap, _Entry(key, node))


def evict(tree: Tree, num_tokens: int) -> int:
    """Puts the top in order until it is true, then takes it."""
    before = tree.evictable_size
    goal = before - num_tokens
    while tree.heap and tree.evictable_size > goal:
        entry = tree.heap[0]
        node = entry.node
        gone = node.parent is None or node.lock_ref != 0 or len(node.children) != 0
        if gone or entry.key != getattr(node, "noted", None):
            heapq.heappop(tree.heap)
            if gone:
                node.noted = None
        elif tree.key(node) != entry.key:
            node.noted = entry.key = tree.key(node)
            heapq.heapreplace(tree.heap, entry)
        else:
            heapq.heappop(tree.heap)
            above = node.parent
            tree.remove(node)
            tree.evictable_size -= len(node.tokens)
            if above.parent is not None and not above.children:
                offer(tree, above)
    return before - tree.evictable_size


def lru_key(node: Node) -> Any:
    """A number of another kind."""
    return float(node.last_access)


def lfu_key(node: Node) -> Any:
    """One number: hits count more than any tick."""
    return int(np.int64(node.hits) << 40) + node.last_access


def slru_key(node: Node) -> Any:
    """The segment as a number."""
    return (min(node.hits // 2, 1), node.last_access)


def claim_collapse() -> tuple[list[tuple[str, list[int]]], int]:
    """The same with longer prompts: a system prompt [5 6] that is in use, and one old answer."""
    moves = [("insert", [5, 6]), ("insert", [5, 6, 7, 8]), ("insert", [40, 41]), ("match", [5, 6])]
    return moves, 4
