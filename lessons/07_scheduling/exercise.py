"""Lesson 07: in which order? Fill in the five functions; README.md says what and why.

    pytest lessons/07_scheduling        grades this file

You are given requests, each with

request.name, request.tokens (list of token ids), request.arrival (a number, different for each; smaller
= came earlier), request.priority (larger = more important), request.passes (how often it was passed by
later ones), request.new_tokens (how many tokens it may still generate)

Whoever is first in the order and does not fit is waited for: nobody else is tried before it. So the order
decides alone who can be passed by whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Request(Protocol):
    name: str
    tokens: list[int]
    arrival: int
    priority: int
    passes: int
    new_tokens: int


class Node(Protocol):
    children: list[Any]
    requests: list[Any]


class Tree(Protocol):
    @property
    def evictable(self) -> int: ...
    def match(self, request: Any) -> tuple[int, Any]: ...
    def lock(self, node: Any) -> None: ...
    def unlock(self, node: Any) -> None: ...
    def evict(self, num_tokens: int) -> int: ...


def lpm_order(queue: Sequence[Request], match: Callable[[Any], int]) -> list[Any]:
    """Longest prefix match first.

    match(request): how many of its tokens are cached now. It walks the tree: ask once per request.

    Larger priority comes before everything else; then the longer match; then who came earlier.
    Returns a new list; the queue stays as it is.
    """
    raise NotImplementedError("todo: lpm_order")


def dfs_order(root: Node) -> list[Any]:
    """Depth-first through a tree of the queue, the most wanted branch first.

    node.children: list of nodes. node.requests: list of requests whose prompt ends at this node (any
    node's list may be empty, and in any order; there may be nobody at all at a node and below it). All
    have one priority. The tree stays as it is; by the next call it may have grown.

    The weight of a node is the number of requests at it and below it. At every node its children come
    first, the one with the largest weight before the others (equal weights: the one with the earliest
    arrival at it or below it). After the last child come the node's own requests, by arrival: what they
    need stays in use as long as anything below it runs.
    """
    raise NotImplementedError("todo: dfs_order")


def admit(queue: Sequence[Request], tree: Tree, free: int, reserve: int) -> tuple[list[Any], int]:
    """Algorithm 1 of the SGLang paper, repaired: whom does this step take on?

    queue: in the order in which they are to be tried, whatever their numbers; it and its requests stay as
    they are. Each call stands for itself: who was refused in one may be admitted in the next.
    free: free slots. reserve: slots that those who run already will still need; they are to be left over.

    tree.match(request) -> (length, node): how many of its tokens are cached now, and where that ends
    tree.evictable: cached tokens that nobody holds locked
    tree.lock(node), tree.unlock(node): take and give back one lock on everything from node to the root
    tree.evict(n) -> how many tokens went: whole leaves that nobody locks, n tokens at least if there are so
        many. Each becomes a free slot. Nodes that were matched before and not locked may be among them.

    For each request in turn:
    * lock what it matches. That may take tokens out of tree.evictable: count the room only now.
    * its `need` is the slots that it has to compute: its tokens less the match. One token is always
      computed, also when all are cached.
    * it fits if free slots and evictable tokens are enough for its need, its own new_tokens and the reserve.
      If it does not fit, give the lock back, and stop here: nobody passes it.
    * evict only what the free slots lack for its need, and only if they lack something.
    * its slots are taken at once, and its new_tokens join the reserve for those who come after it.

    Returns (admitted, free): the admitted requests in order, each with its lock held, and the free slots
    that are left.
    """
    raise NotImplementedError("todo: admit")


def count_passes(waiting: Sequence[Request], admitted: Sequence[Request]) -> None:
    """Called after each step: notes who was passed.

    waiting: those who are still waiting. admitted: those taken on in this step. A request is passed in
    a step that admits somebody who has less priority, or the same and came later. Its `passes` goes up by
    1 for such a step, however many passed it.
    """
    raise NotImplementedError("todo: count_passes")


def fair_order(queue: Sequence[Request], match: Callable[[Any], int], limit: int) -> list[Any]:
    """lpm with bounded overtaking: nobody is passed in more than `limit` steps.

    Larger priority comes before everything else. Among equal priorities, those who were passed in `limit`
    steps or more come first, by arrival; after them the others, by lpm (longer match, then arrival).
    `match` as in lpm_order. limit 0 is first come, first served. Returns a new list; the queue and all
    `passes` stay as they are.
    """
    raise NotImplementedError("todo: fair_order")
