"""Lesson 02, solved with plain loops. minirad/cache/radix_cache.py does the same on bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    """How many tokens `a` and `b` begin with alike, in whole pages."""
    length = 0
    while length < len(a) and length < len(b) and a[length] == b[length]:
        length += 1
    return length // page_size * page_size


def split_node(tree: Tree, node: Node, at: int) -> Node:
    """Cuts a node in two after `at` tokens and returns the new upper half."""
    page = tree.page_size
    upper = tree.new_node(node.tokens[:at], node.slots[:at], node.parent)
    upper.lock_ref = node.lock_ref
    upper.hits = node.hits
    upper.priority = node.priority
    upper.created = node.created
    upper.last_access = tree.now
    node.parent.children[tuple(upper.tokens[:page])] = upper
    node.tokens = node.tokens[at:]
    node.slots = node.slots[at:]
    node.parent = upper
    node.last_access = tree.now
    upper.children[tuple(node.tokens[:page])] = node
    return upper


def match_prefix(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], Node]:
    """The longest prefix of `tokens` that is in the tree, in whole pages."""
    node = tree.root
    slots: list[int] = []
    while True:
        rest = tokens[len(slots) :]
        child = node.children.get(tuple(rest[: tree.page_size]))
        if child is None:
            return slots, node
        shared = common_prefix(child.tokens, rest, tree.page_size)
        if shared < len(child.tokens):
            child = split_node(tree, child, shared)
        child.last_access = tree.now
        slots.extend(child.slots)
        node = child


def insert(tree: Tree, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Node]:
    """Puts `tokens` with their `slots` into the tree, in whole pages."""
    whole = len(tokens) // tree.page_size * tree.page_size
    tokens, slots = tokens[:whole], slots[:whole]
    found, node = match_prefix(tree, tokens)
    prefix_len = len(found)
    if prefix_len == whole:
        return prefix_len, node
    leaf = tree.new_node(tokens[prefix_len:], slots[prefix_len:], node)
    node.children[tuple(leaf.tokens[: tree.page_size])] = leaf
    return prefix_len, leaf


def claim_two_subtrees() -> list[list[int]]:
    """The second prompt goes on where the first one ended: nothing parts there, so nothing is split."""
    return [[1, 2], [1, 2, 3]]
