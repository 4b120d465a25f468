"""Lesson 06: who owns a slot when. Fill in the four functions; README.md says what and why.

    pytest lessons/06_request_life        grades this file

The number line of one request's row, after a forward pass:

    [ 0 ....... protected ....... prefix_len ....... aligned ....... committed )
      the tree's    duplicates of ours:  new: now the     tail: stays ours (unfinished)
      already       freed, row REMAPPED  tree's           or is freed (finished)

You are given:

request.tokens      list of token ids that have KV now ("committed" of them)
request.row         list of equal length: row[i] is the slot with the KV of tokens[i]
request.protected   how many of these slots were the tree's before this commit
request.node        the node that this request holds locked; its first `protected` tokens lie on the way
                    from the root to this node's end

tree.page_size
tree.insert(tokens, slots) -> (prefix_len, node)
                    Puts the whole pages of `tokens` into the tree; what follows the last whole page is
                    left out. The first prefix_len tokens were there: for them the tree keeps the slots
                    that it has. `node` is where the whole pages end.
tree.path_slots(node) -> list of the tree's slots from the root to the end of `node`
tree.lock(node), tree.unlock(node)
                    A node that nobody holds may be evicted at any moment, and here it is: at once. The
                    root can be locked and unlocked like any other node.

freed               a list: append the slots that you give back. Each exactly once, and no slot that
                    somebody still uses. Others have put theirs there before: leave these. A slot that was
                    freed once may have been handed out again since, and be freed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tree(Protocol):
    page_size: int

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Any]: ...
    def path_slots(self, node: Any) -> list[int]: ...
    def lock(self, node: Any) -> None: ...
    def unlock(self, node: Any) -> None: ...


class Request(Protocol):
    tokens: list[int]
    row: list[int]
    protected: int
    node: Any


def commit_unfinished(tree: Tree, request: Request, freed: list[int]) -> None:
    """Passes what a request computed on to the tree; the request goes on running.

    Afterwards:
    * all whole pages of request.tokens are in the tree;
    * duplicates (the tree had them already, see the number line) are in `freed`, and the row points at
      the tree's slots instead;
    * request.protected is the number of tokens in whole pages; request.node is where they end, and it is
      locked once for this request. The old node is not locked for it any more;
    * the tail behind the last whole page still belongs to the request: its slots stay in the row.
    """
    raise NotImplementedError("todo: commit_unfinished")


def commit_finished(tree: Tree, request: Request, freed: list[int]) -> None:
    """The same for the last time: the request ends here.

    The whole pages go into the tree, duplicates are freed, and so is the tail: nobody needs it any more.
    Afterwards the request holds nothing: row == [], protected == 0, node is None and no lock is left.
    """
    raise NotImplementedError("todo: commit_finished")


def plan_chunks(
    lengths: Sequence[int], cached: Sequence[int], chunk_tokens: int, page_size: int = 1
) -> list[list[tuple[int, int, int]]]:
    """Which prompt tokens are computed in which step, with at most `chunk_tokens` of them per step.

    lengths[i]: prompt tokens of request i, at least 1. cached[i]: how many of them the tree matched.
    The requests are served in this order. A request uses what is cached, but never its last token (one
    token is always computed), and only whole pages. A prompt that does not fit into what is left of a
    step begins there all the same, and goes on in the next step, before anybody else.

    Returns the steps; each is a list of (request, start, stop): in this step, tokens [start, stop) of
    that request are computed. No empty steps, no empty pieces. `lengths` and
    `cached` stay as they are.

    plan_chunks([5, 3], [0, 0], chunk_tokens=4) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    """
    raise NotImplementedError("todo: plan_chunks")


def page_owners(
    num_pages: int,
    page_size: int,
    free: Sequence[int],
    tree_slots: Sequence[int],
    rows: Mapping[str, tuple[Sequence[int], int]],
) -> dict[int, list[str]]:
    """Who claims each page, for pages 1 to num_pages. (Page 0 is a dummy and nobody's.)

    Slot s lies on page s // page_size. free: numbers of free pages. tree_slots: all slots in the tree, in any
    order.
    rows: for each live request its row and its `protected`; it owns the slots behind those and only
    reads the ones before. Whoever owns one slot of a page owns the page.

    Returns for each page a sorted list of "free", "tree" and names of requests. In a healthy pool every
    list has exactly one entry. None means a leak, two mean that somebody will read the other's KV.
    """
    raise NotImplementedError("todo: page_owners")
