"""Lesson 03, solved. minirad/cache/eviction.py keeps its heap a little smaller, and is worth reading."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def inc_lock_ref(tree: Tree, node: Node) -> int:
    """Locks a node and all above it; returns how many tokens became protected."""
    moved = 0
    while node.parent is not None:
        if node.lock_ref == 0:
            moved += len(node.tokens)
        node.lock_ref += 1
        node = node.parent
    tree.evictable_size -= moved
    tree.protected_size += moved
    return moved


def dec_lock_ref(tree: Tree, node: Node) -> int:
    """Takes one lock back; returns how many tokens became evictable."""
    if node.parent is not None and node.lock_ref == 0:
        raise ValueError(f"{node} is not locked")
    moved = 0
    while node.parent is not None:
        node.lock_ref -= 1
        if node.lock_ref == 0:
            moved += len(node.tokens)
        node = node.parent
    tree.evictable_size += moved
    tree.protected_size -= moved
    return moved


def offer(tree: Tree, node: Node) -> None:
    """Every offer makes an entry. Older entries of the same node are found out when they come up."""
    heapq.heappush(tree.heap, (tree.key(node), node.id, node))


def evict(tree: Tree, num_tokens: int) -> int:
    """Takes the true minimum off the heap until enough is free."""
    freed = 0
    while freed < num_tokens and tree.heap:
        key, _, leaf = heapq.heappop(tree.heap)
        if leaf.children or leaf.lock_ref > 0 or leaf.parent is None:
            continue  # it is offered again when it is unlocked, or below, when its last child goes
        if key != tree.key(leaf):
            offer(tree, leaf)
            continue
        parent = leaf.parent
        tree.remove(leaf)
        freed += len(leaf.tokens)
        if parent is not tree.root and not parent.children:
            offer(tree, parent)
    tree.evictable_size -= freed
    return freed


def lru_key(node: Node) -> Any:
    """Least recently used first."""
    return node.last_access


def lfu_key(node: Node) -> Any:
    """Fewest hits first, then least recently used."""
    return node.hits, node.last_access


def slru_key(node: Node) -> Any:
    """On probation first, then the proven ones."""
    return node.hits >= 2, node.last_access


def claim_collapse() -> tuple[list[tuple[str, list[int]]], int]:
    """[1] was used after [3] came: when [2] below it has gone, [3] is older."""
    return [("insert", [1]), ("insert", [1, 2]), ("insert", [3]), ("match", [1])], 2
