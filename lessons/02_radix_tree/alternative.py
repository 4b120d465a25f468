"""Lesson 02, built otherwise: recursion instead of loops, numpy arrays instead of lists.

Nodes keep arrays, the longest common prefix is one vectorised comparison, insert walks on its own. It
earns full marks like solution.py: what is graded is behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def _array(values: Any) -> Any:
    return np.asarray(values, dtype=np.int64)


def _first(tokens: Any, page_size: int) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens[:page_size])


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    """Whole pages that are equal, counted by numpy up to the first that is not."""
    pages = min(len(a), len(b)) // page_size
    left, right = (_array(x)[: pages * page_size].reshape(pages, page_size) for x in (a, b))
    equal = (left == right).all(axis=1)
    return int(pages if equal.all() else equal.argmin()) * page_size


def split_node(tree: Tree, node: Node, at: int) -> Node:
    """The links first, the numbers after."""
    above, tokens, slots = node.parent, _array(node.tokens), _array(node.slots)
    upper = tree.new_node((), (), above)
    upper.tokens, upper.slots = tokens[:at].copy(), slots[:at].copy()
    node.tokens, node.slots = tokens[at:].copy(), slots[at:].copy()
    node.parent = upper
    upper.children = {_first(node.tokens, tree.page_size): node}
    above.children[_first(upper.tokens, tree.page_size)] = upper
    for name in ("lock_ref", "hits", "priority", "created"):
        setattr(upper, name, getattr(node, name))
    upper.last_access = node.last_access = tree.now
    return upper


def match_prefix(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], Node]:
    """One node per call of the inner function."""

    def below(node: Node, rest: Any) -> tuple[list[int], Node]:
        child = node.children.get(_first(rest, tree.page_size))
        if child is None:
            return [], node
        shared = common_prefix(child.tokens, rest, tree.page_size)
        ends_here = shared < len(child.tokens)
        if ends_here:
            child = split_node(tree, child, shared)
        child.last_access = tree.now
        own = [int(slot) for slot in child.slots]
        if ends_here:
            return own, child
        more, end = below(child, rest[shared:])
        return own + more, end

    return below(tree.root, _array(tokens))


def insert(tree: Tree, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Node]:
    """Goes down by itself, and hangs the leaf in where the path ends."""
    tokens, slots = _array(tokens), _array(slots)
    whole = len(tokens) - len(tokens) % tree.page_size

    def below(node: Node, at: int) -> tuple[int, Node]:
        if at == whole:
            return at, node
        first = _first(tokens[at:whole], tree.page_size)
        child = node.children.get(first)
        if child is None:
            leaf = tree.new_node((), (), node)
            leaf.tokens, leaf.slots = tokens[at:whole].copy(), slots[at:whole].copy()
            node.children[first] = leaf
            return at, leaf
        shared = common_prefix(child.tokens, tokens[at:whole], tree.page_size)
        if shared < len(child.tokens):
            child = split_node(tree, child, shared)
        child.last_access = tree.now
        return below(child, at + shared)

    return below(tree.root, 0)


def claim_two_subtrees() -> list[list[int]]:
    """A prompt that ends inside another one: the split makes an upper half with one child."""
    return [[9], [1, 2, 3, 4], [1, 2]]
