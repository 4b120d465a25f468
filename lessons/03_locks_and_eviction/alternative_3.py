"""Lesson 03 with other data: buckets of leaves by key in an OrderedDict, and a scan over what was offered.

No heap: `tree.heap` holds a single dictionary from a node to the key under which it was last seen, in the
order of the offers. evict takes the smallest by a plain scan over these noted keys (no question to the
tree), asks the tree for that one's key, and scans again if it has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def _climb(node: Any, step: int) -> int:
    """Adds `step` to all locks up to the root; the tokens of nodes that passed between 0 and 1."""
    moved = 0
    while node.parent is not None:
        before, node.lock_ref = node.lock_ref, node.lock_ref + step
        if 0 in (before, node.lock_ref):
            moved += len(node.slots)
        node = node.parent
    return moved


def inc_lock_ref(tree: Tree, node: Node) -> int:
    """One step up."""
    moved = _climb(node, +1)
    tree.protected_size += moved
    tree.evictable_size -= moved
    return moved


class NotLocked(ValueError):
    """A lock that was never taken cannot be given back."""


def dec_lock_ref(tree: Tree, node: Node) -> int:
    """One step down, if there is one."""
    if node.parent is not None and not node.lock_ref > 0:
        raise NotLocked(node.id)
    moved = _climb(node, -1)
    tree.protected_size -= moved
    tree.evictable_size += moved
    return moved


def _noted(tree: Tree) -> OrderedDict[Any, Any]:
    if len(tree.heap) == 0:
        tree.heap.append(OrderedDict())
    found: OrderedDict[Any, Any] = tree.heap[0]
    return found


def offer(tree: Tree, node: Node) -> None:
    """The last one offered stands at the end."""
    noted = _noted(tree)
    noted[node] = tree.key(node)
    noted.move_to_end(node)


def evict(tree: Tree, num_tokens: int) -> int:
    """A scan over the noted keys for every victim: slow for many leaves, but the tree is hardly asked."""
    noted = _noted(tree)
    slots = 0
    while slots < num_tokens:
        for node in [n for n in noted if n.children or n.lock_ref > 0 or n.parent is None]:
            del noted[node]
        if not noted:
            break
        leaf = min(noted, key=lambda node: (noted[node], node.id))
        now = tree.key(leaf)
        if now != noted[leaf]:
            noted[leaf] = now
            continue
        del noted[leaf]
        parent, slots = leaf.parent, slots + len(leaf.slots)
        tree.remove(leaf)
        tree.evictable_size -= len(leaf.slots)
        if parent.parent is not None and len(parent.children) == 0:
            offer(tree, parent)
    return slots


def lru_key(node: Node) -> Any:
    """As a list."""
    return [node.last_access]


def lfu_key(node: Node) -> Any:
    """Two numbers of any length as one fraction, without loss."""
    from fractions import Fraction

    return node.hits + 1 - Fraction(1, node.last_access + 2)


def slru_key(node: Node) -> Any:
    """Nested tuples."""
    proven = node.hits > 1
    return ((int(proven),), (node.last_access,))


def claim_collapse() -> tuple[list[tuple[str, list[int]]], int]:
    """A chain of three; its beginning was used last."""
    moves = [("insert", [1]), ("insert", [1, 2]), ("insert", [1, 2, 3]), ("insert", [6]), ("match", [1, 2])]
    return moves, 2
