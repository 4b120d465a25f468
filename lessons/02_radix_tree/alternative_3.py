"""Lesson 02 with other data: nodes hold pages (tuples of tokens), and a match is a chain of linked steps.

Tokens are compared a page at a time, slots are kept in array('q'), and insert splits, if it must, by itself:
it makes the upper half out of its parts and never calls match_prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def _pages(tokens: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Whole pages, one after the other."""
    for start in range(0, len(tokens) - size + 1, size):
        yield tuple(int(token) for token in tokens[start : start + size])


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    """Counts pairs of equal pages until two differ."""
    pairs = zip(_pages(a, page_size), _pages(b, page_size), strict=False)
    return page_size * sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def split_node(tree: Tree, node: Node, at: int) -> Node:
    """The parent's entry is exchanged in its place, so the order of its children stays."""
    parent, tokens, slots = node.parent, list(node.tokens), array("q", map(int, node.slots))
    upper = tree.new_node(tokens[:at], (), parent)  # type: ignore[arg-type]
    upper.slots, node.slots, node.tokens = slots[:at], slots[at:], tokens[at:]
    entries: dict[Any, Any] = {
        page: upper if child is node else child
        for page, child in parent.children.items()  # type: ignore[union-attr]
    }
    parent.children = entries  # type: ignore[union-attr]
    upper.children[next(_pages(node.tokens, tree.page_size))] = node
    node.parent = upper
    upper.hits, upper.created = node.hits, node.created
    upper.lock_ref, upper.priority = node.lock_ref, node.priority
    node.last_access = upper.last_access = tree.now
    return upper


class _Step(NamedTuple):
    """A node on the way, how much of it is alike, and the step before."""

    node: Any
    shared: int
    before: _Step | None


def _descend(tree: Tree, tokens: Sequence[int]) -> tuple[_Step | None, int]:
    """The last step of the longest way down, and how many tokens the way has."""
    step: _Step | None = None
    node, length = tree.root, 0
    while True:
        rest = tokens[length:]
        child = node.children.get(next(_pages(rest, tree.page_size), ()))
        if child is None:
            return step, length
        shared = common_prefix(child.tokens, rest, tree.page_size)
        step, length = _Step(child, shared, step), length + shared
        if shared < len(child.tokens):
            return step, length
        node = child


def _used(tree: Tree, step: _Step | None) -> Any:
    """Splits at the end of the way, notes the time from there upwards; the node where the way ends."""
    if step is None:
        return tree.root
    end = step.node if step.shared == len(step.node.tokens) else split_node(tree, step.node, step.shared)
    node = end
    while node is not tree.root:
        node.last_access = tree.now
        node = node.parent
    return end


def match_prefix(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], Node]:
    """The slots are read off from the end of the way upwards."""
    end = _used(tree, _descend(tree, tokens)[0])
    slots: list[int] = []
    node = end
    while node is not tree.root:
        slots[:0] = [int(slot) for slot in node.slots]
        node = node.parent
    return slots, end


def insert(tree: Tree, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Node]:
    """Needs the length of the way only, never its slots."""
    size = tree.page_size
    kept = [token for page in _pages(tokens, size) for token in page]
    step, length = _descend(tree, kept)
    end = _used(tree, step)
    if length == len(kept):
        return length, end
    leaf = tree.new_node(kept[length:], (), end)
    leaf.slots = array("q", (int(slot) for slot in slots[length : len(kept)]))
    end.children[next(_pages(leaf.tokens, size))] = leaf
    return length, leaf


def claim_two_subtrees() -> list[list[int]]:
    """Two ways that part, and one that goes on where the first ended."""
    return [[3, 1], [3, 2], [3, 1, 5, 6]]
