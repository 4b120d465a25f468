"""Lesson 03 with other data: no heap at all, a sorted list of (key, id) and a dictionary of leaves.

`tree.heap` holds one pair: the sorted list, and for every leaf in it the entry under which it stands. An
offer moves a leaf to its place by bisection; so no entry is ever stale but for locks and new children.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def _path(node: Any) -> list[Any]:
    """The node and all above it but the root."""
    return [] if node.parent is None else [node, *_path(node.parent)]


def inc_lock_ref(tree: Tree, node: Node) -> int:
    """First who changes sides, then the numbers."""
    path = _path(node)
    moved = sum(len(step.tokens) for step in path if not step.lock_ref)
    for step in path:
        step.lock_ref += 1
    tree.evictable_size, tree.protected_size = tree.evictable_size - moved, tree.protected_size + moved
    return moved


def dec_lock_ref(tree: Tree, node: Node) -> int:
    """Those with one lock change sides."""
    path = _path(node)
    if any(step.lock_ref < 1 for step in path):
        raise ValueError(f"{node!r} holds no lock")
    moved = sum(len(step.tokens) for step in path if step.lock_ref == 1)
    for step in path:
        step.lock_ref -= 1
    tree.evictable_size, tree.protected_size = tree.evictable_size + moved, tree.protected_size - moved
    return moved


def _books(tree: Tree) -> tuple[list[Any], dict[int, Any]]:
    if not tree.heap:
        tree.heap += [[], {}]
    return tree.heap[0], tree.heap[1]


def _forget(tree: Tree, node: Any) -> None:
    line, entries = _books(tree)
    entry = entries.pop(node.id, None)
    if entry is not None:
        del line[bisect_left(line, entry[:2], key=lambda each: each[:2])]


def offer(tree: Tree, node: Node) -> None:
    """Takes the leaf out of the line, and puts it in where it belongs now."""
    _forget(tree, node)
    if node.lock_ref == 0 and not node.children:
        line, entries = _books(tree)
        entries[node.id] = entry = (tree.key(node), node.id, node)
        insort(line, entry, key=lambda each: each[:2])


def evict(tree: Tree, num_tokens: int) -> int:
    """From the front of the line. Who is locked leaves it, and comes back with the offer at its unlocking."""
    line, _ = _books(tree)
    gone = 0
    while line and gone < num_tokens:
        key, _, leaf = line[0]
        if leaf.parent is None or leaf.lock_ref or leaf.children:
            _forget(tree, leaf)
        elif tree.key(leaf) != key:
            offer(tree, leaf)
        else:
            _forget(tree, leaf)
            above, size = leaf.parent, len(leaf.tokens)
            tree.remove(leaf)
            tree.evictable_size -= size
            gone += size
            if above is not tree.root and not above.children:
                offer(tree, above)
    return gone


class _Order:
    """A key that knows how to compare itself, and nothing else."""

    def __init__(self, node: Any) -> None:
        self.numbers = (node.hits, node.last_access)

    def __lt__(self, other: _Order) -> bool:
        return self.numbers < other.numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and self.numbers == other.numbers

    __hash__ = None  # type: ignore[assignment]


def lru_key(node: Node) -> Any:
    """A tuple of one."""
    return (node.last_access,)


def lfu_key(node: Node) -> Any:
    """An object that can be compared."""
    return _Order(node)


def slru_key(node: Node) -> Any:
    """The segment's name: 'probation' comes before 'proven' in the alphabet, too."""
    return ["probation" if node.hits < 2 else "proven", node.last_access]


def claim_collapse() -> tuple[list[tuple[str, list[int]]], int]:
    """Two old answers below one question that was asked again; and a prompt in between."""
    moves = [("insert", [1, 2, 3]), ("insert", [9]), ("match", [1, 2]), ("insert", [8, 8])]
    return [*moves, ("match", [9]), ("match", [1, 2])], 2
