"""The page allocator: which pages of the KV pool are free.

Slot s lies in page s // page_size. Page 0 is never handed out: padding writes there. A page is handed
out whole and comes back whole; its owner meanwhile is noted elsewhere (schedule/cache_manager.py).

Free pages lie on a stack with the lowest on top, so that a small tree stays in one corner of the pool
and its picture can be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minirad.cache.node import Slots
from minirad.errors import as_int64, require
from minirad.rooms import room


class PageAllocator:
    """num_tokens slots (page 0 not counted) in pages of page_size."""

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        if page_size < 1 or num_tokens < page_size:
            raise ValueError(f"{num_tokens} tokens in pages of {page_size}: not one page")
        if num_tokens % page_size:
            raise ValueError(f"page_size {page_size} does not divide {num_tokens} tokens")
        self.page_size, self.num_tokens = page_size, num_tokens
        self.num_pages = num_tokens // page_size
        self._stack = np.arange(self.num_pages, 0, -1, dtype=np.int64)
        self._top = self.num_pages
        self._is_free = np.ones(self.num_pages + 1, dtype=bool)
        self._is_free[0] = False

    @property
    def available(self) -> int:
        """Free slots, always whole pages."""
        return self._top * self.page_size

    def alloc(self, num_tokens: int) -> Slots | None:
        """Slots of whole new pages, or None (and nothing changed) when there are too few."""
        if num_tokens < 0 or num_tokens % self.page_size:
            raise ValueError(f"{num_tokens} tokens are not whole pages of {self.page_size}")
        pages = self._take(num_tokens // self.page_size)
        return None if pages is None else self._slots_of(pages)

    def pages_needed(self, start: int, stop: int) -> int:
        """New pages for positions [start, stop) of a row whose positions before `start` have slots."""
        return -(-stop // self.page_size) - -(-start // self.page_size)

    def alloc_extend(self, start: int, stop: int, last_slot: int) -> Slots | None:
        """Slots for positions [start, stop) of one row, in three parts; None when there are too few.

        First the rest of the page that holds position start-1 (at `last_slot`; not looked at when
        `start` begins a page), then whole new pages, then the beginning of one more.
        """
        if stop < start:
            raise ValueError(f"cannot extend from {start} back to {stop}")
        page = self.page_size
        pages = self._take(self.pages_needed(start, stop))
        if pages is None:
            return None
        first_boundary = min(-(-start // page) * page, stop)
        fill = last_slot + 1 + np.arange(first_boundary - start, dtype=np.int64)
        return np.concatenate((fill, self._slots_of(pages)[: stop - first_boundary]))

    def free(self, slots: Any) -> Slots:
        """Takes the pages of these slots back; returns them. One slot of a page stands for all of it.

        InvariantError, with nothing changed, for a slot given twice or a page that is free already
        (also when its other tokens were freed before), or that was never handed out.
        """
        ordered: Slots = np.sort(as_int64(slots, "slots"))
        if len(ordered) == 0:
            return ordered
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):  # (writing what is wrong takes longer than all else here, so only if it is)
            require(False, f"slot {twice[:1]} is freed twice in one call")
        low, high = int(ordered[0]), int(ordered[-1])
        first, last = self.page_size, self.page_size + self.num_tokens - 1
        strange = low if low < first else high
        require(
            first <= low and high <= last,
            f"slot {strange} was never handed out (slots are {first} to {last})",
        )
        pages = ordered // self.page_size
        pages = pages[np.concatenate(([True], pages[1:] != pages[:-1]))]
        already = pages[self._is_free[pages]]
        if len(already):
            require(False, f"page {already[:1]} is freed but is free already")
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)
        return pages

    def free_pages(self) -> Slots:
        """The free pages, lowest first."""
        return np.flatnonzero(self._is_free).astype(np.int64)

    def check(self) -> None:
        """The stack and the marks tell the same story (observe/check.py)."""
        room("observe.check").page_allocator(self)

    def _slots_of(self, pages: Slots) -> Slots:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _take(self, count: int) -> Slots | None:
        if count > self._top:
            return None
        pages: Slots = self._stack[self._top - count : self._top][::-1].copy()
        self._top -= count
        self._is_free[pages] = False
        return pages
