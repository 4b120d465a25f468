"""Lesson 02: the radix tree. Fill in the functions; README.md says what and why.

    pytest lessons/02_radix_tree                             grades this file
    python -m viz.live --cache lessons/02_radix_tree/exercise.py      runs the engine on your tree

You are given (lessons/grading/tree.py, short enough to read):

node.tokens      list of token ids on this edge; never empty but for the root, always whole pages
node.slots       list of equal length: slots[i] holds the KV of tokens[i]
node.parent      the node above, None for the root
node.children    dict from a child's first page, tuple(child.tokens[:page_size]), to the child
node.lock_ref, node.hits, node.priority, node.created, node.last_access      numbers

tree.root, tree.page_size
tree.now         the clock: it has moved on by one before your function is called
tree.new_node(tokens, slots, parent)     makes a node that knows its parent. Its parent does not know
                                         it yet: that is yours to do. created = last_access = now.

Token ids are whole numbers from 0 on, and may be large: the engine puts more than the model's ids into
them, up to 2**62. Prompts may have many thousands of tokens.

Lists may be read as any sequence of integers: you may keep numpy arrays in your nodes if you like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    """How many tokens `a` and `b` begin with alike, in whole pages.

    a, b: token ids, of any lengths, also empty. Neither is changed.
    Returns a multiple of page_size: the tokens of a page that is not alike to its end do not count.

    common_prefix([1, 2, 3, 4, 5], [1, 2, 3, 9], page_size=2) == 2
    """
    raise NotImplementedError("todo: common_prefix")


def split_node(tree: Tree, node: Node, at: int) -> Node:
    """Cuts a node in two after `at` tokens and returns the new UPPER half.

    at: 0 < at < len(node.tokens), a multiple of tree.page_size.

    `node` itself stays the LOWER half: it keeps its id, its children, and the tokens and slots from
    `at` on. (Whoever holds the node, a lock for instance, still holds the END of its path.)
    The upper half is new: it takes the first `at` tokens and slots, and the place below the parent; its
    one child is `node`. Every link is right afterwards, up and down.
    The upper half gets the same lock_ref, hits, priority and created as `node`.
    Both halves count as just used: last_access = tree.now.
    """
    raise NotImplementedError("todo: split_node")


def match_prefix(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], Node]:
    """The longest prefix of `tokens` that is in the tree, in whole pages.

    Returns (slots, node): the slots of that prefix in order, and the node where it ends (the root, and
    no slots, when nothing matches). When it ends inside a node, that node is split first, so that the
    end of the match is the end of a node.

    Every node on the path (not the root) was just used: last_access = tree.now. The other nodes keep
    their times. Locks, hits and priorities are not yours to change: whoever calls counts the hit. A split
    passes them on, as in split_node. `tokens` and the tree's slots are not changed: return a list of
    your own.
    """
    raise NotImplementedError("todo: match_prefix")


def insert(tree: Tree, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Node]:
    """Puts `tokens` with their `slots` into the tree; what follows the last whole page is left out.

    len(slots) == len(tokens).
    Returns (prefix_len, node): how many tokens were in the tree before, and the node where the whole
    pages of `tokens` end (the root when there is not one page).

    For the first prefix_len tokens the tree keeps the slots that it has: yours are duplicates, and
    whoever called frees them. The rest becomes ONE new leaf, as tree.new_node makes it: not locked,
    no hits. Times, locks and splits as in match_prefix.
    """
    raise NotImplementedError("todo: insert")


def claim_two_subtrees() -> list[list[int]]:
    """A claim found in print: "in a radix tree, a node that is no leaf always has two or more subtrees".

    Returns prompts (at most four, each a list of token ids) that refute it: inserted one after the other
    into the engine's own tree with pages of one token, they leave a node with exactly one child (the
    root does not count).
    """
    raise NotImplementedError("todo: claim_two_subtrees")
