"""The policy "dfs-weight": depth-first through the tree, the branch that most of the queue wants first.

policies.py finds it by its name, so that it need not be read with the other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.schedule.policies import Peek
from minirad.schedule.request import Request


def dfs_weight(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Depth-first through the tree, from every node into the child that most of the queue wants.

    Requests that match to the end of a node come after those that match further: their prefix is in use as
    long as anything below it runs (the paper's Theorem 3.1 is about such an order; the weights are
    SGLang's). Any tree will do, only its `peek` is asked: the branching of the matched parts is found
    by putting each of them, once, into a scratch tree.
    """
    ends: dict[tuple[Any, bytes], list[Request]] = {}
    for request in waiting:
        key = request.key()
        ends.setdefault((key.namespace, key.data[: peek(request) * key.width]), []).append(request)
    rank = _depth_first(ends)
    return sorted(waiting, key=lambda r: (-r.priority, rank[r.id], r.arrival, r.index))


def _depth_first(ends: dict[tuple[Any, bytes], list[Request]]) -> dict[str, int]:
    """For each request how many requests come before its own node in the weighted depth-first walk."""
    scratch = RadixCache()
    at: dict[int, list[Request]] = {}
    for (namespace, data), requests in ends.items():
        key = RadixKey._from_bytes(data, namespace, 4)
        # A later split leaves the id with the lower half: it stays the end of this prefix.
        node = scratch.insert(key, np.zeros(len(key), dtype=np.int64)).last_node
        at.setdefault(node.id, []).extend(requests)  # the root: for every namespace that matches nothing
    # Per node: how many requests end in it or below, and the first of them to have come.
    wanted: dict[int, tuple[int, tuple[int, int]]] = {}
    for node in reversed(list(scratch.walk())):  # children before parents
        below = [wanted[child.id] for child in node.children.values()]
        own = [(1, (request.arrival, request.index)) for request in at.get(node.id, ())]
        wanted[node.id] = _together(own + below)
    rank: dict[str, int] = {}
    todo: list[tuple[Node, bool]] = [(scratch.root, False)]
    while todo:
        node, below_is_done = todo.pop()
        if below_is_done:
            place = len(rank)
            rank.update((request.id, place) for request in at.get(node.id, ()))
            continue
        todo.append((node, True))
        by_weight = sorted(node.children.values(), key=lambda c: (-wanted[c.id][0], wanted[c.id][1]))
        todo.extend((child, False) for child in reversed(by_weight))
    return rank


def _together(parts: list[tuple[int, tuple[int, int]]]) -> tuple[int, tuple[int, int]]:
    if not parts:
        return 0, (0, 0)
    return sum(count for count, _ in parts), min(first for _, first in parts)
