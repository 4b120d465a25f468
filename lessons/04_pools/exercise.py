"""Lesson 04: where a token's KV lives. Fill in the class and the functions; README.md says what and why.

    pytest lessons/04_pools        grades this file

The words used here:

slot     the home of one token's keys and values, a number
page     page_size slots one after the other; slot s lies in page s // page_size
page 0   a dummy that padding writes to. Its slots are never handed out: real pages are 1 to num_pages.
row      says for each token of one request in which slot it lies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt


class PageAllocator:
    """Knows which pages are free. Who uses the others is not its business.

    num_pages: pages that can be handed out, numbers 1 to num_pages; all are free at first.
    page_size: slots of a page.

    Which of the free pages come first is up to you, and so is how you keep them. There may be several
    allocators at a time: each knows its own pages only.
    """

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        raise NotImplementedError("todo: PageAllocator")

    @property
    def available(self) -> int:
        """Free slots (not pages)."""
        raise NotImplementedError("todo: available")

    def alloc(self, num_tokens: int) -> list[int] | None:
        """num_tokens slots, page by page, each page's slots in rising order; [] for 0.
        The list is the caller's from then on: it stays as it is, and may be changed by whoever got it.

        None when there are not that many, and then nothing has changed.
        ValueError, and nothing has changed, unless num_tokens is a multiple of page_size and not negative.
        """
        raise NotImplementedError("todo: alloc")

    def free(self, slots: Sequence[int]) -> None:
        """Takes the pages of these slots back.

        slots: in any order. One slot of a page stands for the whole page, and several slots of a page
        may be there: the page comes back once.

        ValueError, BEFORE ANYTHING HAS CHANGED, when
        - the same slot is there twice,
        - a slot is in page 0, negative, or beyond the last page,
        - a page is free already.
        """
        raise NotImplementedError("todo: free")


def alloc_extend(allocator: Allocator, start: int, stop: int, last_slot: int) -> list[int] | None:
    """Slots for the tokens at positions [start, stop) of one row, in position order.

    The tokens before `start` have slots already; `last_slot` is that of token start - 1. In every row,
    token i lies at offset i % page_size of its page. Therefore three parts, any of which may be empty:

    1. the rest of the page in which token start - 1 lies (that page is this row's already);
    2. whole new pages;
    3. the beginning of one more new page.

    allocator: has page_size, available, and alloc(num_tokens) as above. Take no page that is not needed.
    last_slot means nothing when `start` begins a page.
    Returns None when there are too few free pages, and then none was taken.
    ValueError when stop < start.

    page_size 4, token 5 in slot 21: alloc_extend(a, 6, 13, 21) == [22, 23, *one page, the first of another]
    """
    raise NotImplementedError("todo: alloc_extend")


def page_table(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> npt.NDArray[np.int32]:
    """The page table of a batch, read off the rows.

    rows: int64 [max_rows, max_context]; rows[r, i] is the slot of token i of the request in row r.
    row_ids, lengths: the batch: request b is in row row_ids[b] and has lengths[b] >= 1 tokens. What a
    row holds beyond its length means nothing.

    Returns integers [len(row_ids), most pages of a request]: entry [b, j] is the page that holds tokens
    j * page_size, j * page_size + 1, ... of request b; a last page that is not full counts. Unused
    entries are 0. `rows` is not changed, and a table that you returned before stays as it was.

    One line of numpy does one request: no loop over tokens is needed.
    """
    raise NotImplementedError("todo: page_table")


def claim_of_the_edge() -> dict[str, int | bool]:
    """A published claim, and what the engine says.

    The cache has pages of 16 tokens. A prompt of 2,512 tokens is in the tree, as one edge. A second
    prompt agrees with it in its first 1,587 tokens and then goes another way. A text about this says:

        "The 1,587-token shared edge splits into 99 + 58 blocks of 16."

    Return a dictionary with these keys:
        "pages_above"   whole pages of the shared upper half, after the split
        "tokens_above"  tokens that the upper half holds
        "pages_below"   whole pages of the first prompt's lower half
        "again"         tokens which both prompts have alike, and which the second computes all the same
        "claim_holds"   True or False: do 99 + 58 blocks make up the shared edge?
    """
    raise NotImplementedError("todo: claim_of_the_edge")


if TYPE_CHECKING:

    class Allocator(Protocol):
        """What alloc_extend may use."""

        page_size: int

        @property
        def available(self) -> int: ...
        def alloc(self, num_tokens: int) -> list[int] | None: ...
