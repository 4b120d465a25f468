"""Lesson 03: locks and eviction. Fill in the functions; README.md says what and why.

    pytest lessons/03_locks_and_eviction                      grades this file
    python -m viz.live --cache lessons/03_locks_and_eviction/exercise.py

You are given (lessons/grading/tree.py): nodes as in lesson 02, and

tree.root               never locked, never evicted
tree.evictable_size     tokens in nodes with lock_ref == 0
tree.protected_size     tokens in nodes with lock_ref > 0        both kept by you where you change them
tree.now, node.last_access     clock ticks (below 2**40, like node.hits)
tree.key(node)          what the policy orders leaves by; the smallest goes first, ties by node.id
tree.heap               a list, empty at first, that stays between calls; what is in it is your affair
tree.remove(leaf)       takes a leaf out of the tree and frees its slots: its parent forgets it, and
                        leaf.parent becomes None. It does not touch the sizes.

A node may be evicted when nothing hangs below it, nobody locks it, and it is in the tree (and no root):

    not node.children and node.lock_ref == 0 and node.parent is not None
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def inc_lock_ref(tree: Tree, node: Node) -> int:
    """A request begins to use the path from the root to the end of `node`: nothing of it may go.

    Adds one to lock_ref of the node and of every node above it, the root left out. Tokens of nodes that
    were unlocked before move from evictable_size to protected_size.
    Returns how many tokens moved. The root itself may be given: then nothing happens, and 0 moved.
    A lock is no use: times and hits stay as they are.
    """
    raise NotImplementedError("todo: inc_lock_ref")


def dec_lock_ref(tree: Tree, node: Node) -> int:
    """Takes back one inc_lock_ref of the same node.

    Subtracts one along the same path; tokens of nodes that nobody locks any more move back to
    evictable_size. Returns how many moved. The root: nothing, 0. Times and hits stay as they are.
    Raises ValueError, and changes nothing, when the node is not locked at all.
    """
    raise NotImplementedError("todo: dec_lock_ref")


def offer(tree: Tree, node: Node) -> None:
    """The tree says: this leaf came in, was used, or was unlocked. Take note of it for `evict`.

    Called after each of these, also when the node is locked, and often for the same node; never for
    the root or for a node with children. It is NOT called for a parent whose last child `evict`
    removed: that is for you to do there. Graded together with `evict`.
    """
    raise NotImplementedError("todo: offer")


def evict(tree: Tree, num_tokens: int) -> int:
    """Removes leaves (`tree.remove`), the smallest (tree.key(leaf), leaf.id) first, until at least
    num_tokens tokens are gone or nothing can be evicted any more. Returns how many went.

    Only whole leaves, only those that may be evicted (see the top of this file). A parent whose last
    child has gone is a leaf from then on. evictable_size shrinks by what went. What stays, stays as it was.

    Keys change while a leaf waits in your heap: a leaf that was used again has another key by now. Look
    when it comes to the top (a lazy heap), and do not collect all leaves at every call: over many calls,
    tree.key may be asked a few times per call of offer and per victim, not once per leaf and call.
    """
    raise NotImplementedError("todo: evict")


def lru_key(node: Node) -> Any:
    """Least recently used first. Anything that can be compared: a number, a tuple, ...

    This holds for all three keys: what else differs between two nodes must not decide, but for their ids.
    """
    raise NotImplementedError("todo: lru_key")


def lfu_key(node: Node) -> Any:
    """Fewest hits first; among equals, least recently used first."""
    raise NotImplementedError("todo: lfu_key")


def slru_key(node: Node) -> Any:
    """Segmented LRU: leaves with fewer than 2 hits are on probation and go before all others. Within
    each of the two groups, least recently used first (how many hits, does not matter there)."""
    raise NotImplementedError("todo: slru_key")


def claim_collapse() -> tuple[list[tuple[str, list[int]]], int]:
    """A claim found in print: "when a leaf was evicted and its parent has no other child, evict the
    parent at once (and so on upwards): it would be the next victim anyway".

    Returns (moves, num_tokens) that refute it. moves: at most eight pairs, each ("insert", token ids) or
    ("match", token ids), played on a tree with pages of one token under lru. Then evict(num_tokens) leaf
    by leaf, always the least recently used, and evict(num_tokens) that collapses upwards, must leave
    different tokens in the tree although both freed equally many.
    """
    raise NotImplementedError("todo: claim_collapse")
