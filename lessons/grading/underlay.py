"""What lies under a student's functions: the same eight, written to be short, not good.

So a `match_prefix` alone already runs in the engine. Everything is looked for the slow way: all
children are compared, all nodes are counted, all leaves are collected at every eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    pages = 0
    while (pages + 1) * page_size <= min(len(a), len(b)):
        page = slice(pages * page_size, (pages + 1) * page_size)
        if list(a[page]) != list(b[page]):
            break
        pages += 1
    return pages * page_size


def best_child(
    node: Any, tokens: Sequence[int], page_size: int, common: Callable[..., int] = common_prefix
) -> tuple[Any, int]:
    """The child that shares at least a page with these tokens, and how much; (None, 0)."""
    for child in node.children.values():
        shared = common(child.tokens, tokens, page_size)
        if shared:
            return child, shared
    return None, 0


def split_node(tree: Any, node: Any, at: int) -> Any:
    parent, page = node.parent, tree.page_size
    upper = tree.new_node(node.tokens[:at], node.slots[:at], parent)
    for name in ("created", "hits", "priority", "lock_ref"):
        setattr(upper, name, getattr(node, name))
    node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
    node.last_access = upper.last_access = tree.now
    parent.children[tuple(upper.tokens[:page])] = upper
    upper.children[tuple(node.tokens[:page])] = node
    return upper


def match_prefix(tree: Any, tokens: Sequence[int]) -> tuple[list[int], Any]:
    node = tree.root
    slots: list[int] = []
    while True:
        rest = tokens[len(slots) :]
        child, shared = best_child(node, rest, tree.page_size, tree.parts["common_prefix"])
        if child is None:
            return slots, node
        whole = shared == len(child.tokens)
        node = child if whole else tree.parts["split_node"](tree, child, shared)
        node.last_access = tree.now
        slots += list(node.slots)
        if not whole:
            return slots, node


def insert(tree: Any, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Any]:
    found, node = tree.parts["match_prefix"](tree, tokens)
    done, stop = len(found), len(tokens) // tree.page_size * tree.page_size
    if done == stop:
        return done, node
    leaf = tree.new_node(tokens[done:stop], slots[done:stop], node)
    node.children[tuple(leaf.tokens[: tree.page_size])] = leaf
    return done, leaf


def inc_lock_ref(tree: Any, node: Any) -> int:
    return _lock(tree, node, 1)


def dec_lock_ref(tree: Any, node: Any) -> int:
    return _lock(tree, node, -1)


def _lock(tree: Any, node: Any, by: int) -> int:
    before = tree.evictable_size
    while node.parent is not None:
        node.lock_ref += by
        node = node.parent
    nodes = list(tree.nodes())
    tree.evictable_size = sum(len(node.tokens) for node in nodes if not node.lock_ref)
    tree.protected_size = sum(len(node.tokens) for node in nodes if node.lock_ref)
    return int(abs(before - tree.evictable_size))


def offer(tree: Any, node: Any) -> None:
    pass


def evict(tree: Any, num_tokens: int) -> None:
    freed = 0
    while freed < num_tokens:
        leaves = [n for n in tree.nodes() if not n.children and not n.lock_ref and n is not tree.root]
        if not leaves:
            return
        victim = min(leaves, key=lambda leaf: (tree.key(leaf), leaf.id))
        tree.remove(victim)
        freed += len(victim.tokens)
        tree.evictable_size -= len(victim.tokens)
