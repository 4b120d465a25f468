"""The invariants of tree, allocator and cache manager, recomputed from what each holds.

`check()` of each of them comes here (rooms.py finds it): this is for tests and debugging, and no part of the
way of a request. InvariantError names the node, page or request and both numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minirad.cache.allocator import PageAllocator
from minirad.cache.node import Node, Slots
from minirad.cache.prefix_cache import path_slots
from minirad.cache.radix_cache import RadixCache
from minirad.errors import require
from minirad.schedule.cache_manager import DUMMY, FREE, TREE, CacheManager, owner_name
from minirad.schedule.request import Request

# ---------------------------------------------------------------------- the tree


def radix_cache(tree: RadixCache) -> None:
    """Sizes are sums over the nodes; locks are at least the children's sum; every child is found under
    its first page and namespace; no page is in two nodes; nodes hold whole pages; no evictable leaf
    would be overlooked.
    """
    evictable = protected = 0
    seen: dict[int, int] = {}
    leaves = []
    for node in tree.walk():
        for first, child in node.children.items():
            _link(tree, node, first, child)
        if node is tree.root:
            continue
        _node(node, tree.page_size)
        for page in (node.slots[:: tree.page_size] // tree.page_size).tolist():
            require(page not in seen, f"page {page} is in n{seen.get(page)} and in n{node.id}")
            seen[page] = node.id
        if node.lock_ref:
            protected += len(node)
        else:
            evictable += len(node)
        if node.evictable:
            leaves.append(node)
    require(evictable == tree.evictable_size, f"evictable is {tree.evictable_size}, counted {evictable}")
    require(protected == tree.protected_size, f"protected is {tree.protected_size}, counted {protected}")
    for leaf in leaves:
        known = leaf.queued is not None and leaf.queued <= tree._queue.policy.key(leaf)
        require(known, f"evictable leaf n{leaf.id} would be overlooked by the eviction queue")


def _link(tree: RadixCache, node: Node, first: Any, child: Node) -> None:
    page = child.edge[: tree.page_size * child.width]
    expected = (child.namespace, page) if node is tree.root else page
    require(first == expected == child.first, f"n{child.id} is filed under a wrong first page")
    require(child.parent is node, f"n{child.id} does not know its parent n{node.id}")
    same = node is tree.root or child.namespace == node.namespace
    require(same, f"n{child.id} left the namespace of its parent n{node.id}")


def _node(node: Node, page_size: int) -> None:
    name, units, slots = f"n{node.id}", node.units, len(node.slots)
    elsewhere = slots == 0 and hasattr(node, "host")  # in another tier, which has a check of its own
    require(units == slots or elsewhere, f"{name}: {units} units but {slots} slots")
    whole = units > 0 and units % page_size == 0
    require(whole, f"{name} holds {units} units, not whole pages of {page_size}")
    below = sum(child.lock_ref for child in node.children.values())
    require(node.lock_ref >= below, f"{name}: lock_ref {node.lock_ref}, children's sum {below}")


# ---------------------------------------------------------------------- the free pages


def page_allocator(pages: PageAllocator) -> None:
    """The stack and the marks tell the same story."""
    stack = np.sort(pages._stack[: pages._top])
    same = len(stack) == pages._is_free.sum() and bool(np.array_equal(stack, pages.free_pages()))
    require(same, f"{pages._top} pages on the free stack, {pages._is_free.sum()} marked free")


# ---------------------------------------------------------------------- the owners


def cache_manager(manager: CacheManager, requests: Iterable[Request], pins: Mapping[int, Any]) -> None:
    """Every page has exactly one owner; every row points at its locked path and then at pages of its own;
    every lock of a node's own is held by a row, a pin or a copy.
    """
    manager.allocator.check()
    live = [request for request in requests if request.row >= 0]
    page_size = manager.allocator.page_size
    expected = np.full_like(manager._owner, FREE)
    expected[0] = DUMMY
    in_tree = []
    for node in manager.cache.walk():
        if node.parent is not None:
            in_tree.append(np.asarray(node.slots, dtype=np.int64)[::page_size] // page_size)
    tree_pages = np.concatenate(in_tree) if in_tree else np.empty(0, dtype=np.int64)
    require(len(np.unique(tree_pages)) == len(tree_pages), "two nodes hold one page")
    expected[tree_pages] = TREE
    for request in live:
        lengths(request)
        _row(manager, request, expected)
    free = manager.allocator.free_pages()
    doubly = free[expected[free] != FREE]
    require(len(doubly) == 0, f"page {doubly[:1]} is free and in use")
    for page in np.flatnonzero(expected != manager._owner)[:1].tolist():
        found, noted = owner_name(int(expected[page])), owner_name(int(manager._owner[page]))
        require(False, f"page {page} is held by {found}, booked to {noted}")
    lost = np.flatnonzero(expected == FREE)
    leaked = np.setdiff1d(lost, free)
    require(len(leaked) == 0, f"page {leaked[:1]} is owned by nobody and not free")
    _locks(manager, live, pins)


def _row(manager: CacheManager, request: Request, expected: Slots) -> None:
    line, page_size = manager.rows.rows[request.row], manager.allocator.page_size
    shared = path_slots(request.node)[: request.protected_len]
    same = np.array_equal(line[: request.protected_len], shared)
    require(same, f"{request.id}: its row does not point at its locked path")
    pages = np.unique(line[request.protected_len : request.kv_len] // page_size)
    taken = pages[expected[pages] != FREE]
    require(len(taken) == 0, f"{request.id}: its page {taken[:1]} has another owner, too")
    expected[pages] = request.row


def _locks(manager: CacheManager, live: list[Request], pins: Mapping[int, Any]) -> None:
    holders: dict[int, int] = {}
    for node in [request.node for request in live] + list(pins.values()) + list(manager.tree.copy_locks):
        holders[node.id] = holders.get(node.id, 0) + 1
    for node in manager.cache.walk():
        if node.parent is None:
            continue
        children = node.children
        below = sum(c.lock_ref for c in getattr(children, "values", lambda c=children: c)())
        own, held = node.lock_ref - below, holders.get(node.id, 0)
        require(own == held, f"n{node.id}: {own} locks of its own, {held} rows, pins and copies hold it")


def lengths(request: Request) -> None:
    """The one assertion about a request's three lengths."""
    ordered = 0 <= request.protected_len <= request.kv_len <= request.length
    said = f"{request.protected_len} <= {request.kv_len} <= {request.length}"
    require(ordered, f"{request.id}: {said} fails")
