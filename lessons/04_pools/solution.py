"""Lesson 04, solved with lists and a set. minirad/cache/allocator.py does the same on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt


class PageAllocator:
    """Knows which pages are free."""

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.stack = list(range(num_pages, 0, -1))  # the next one to go is at the end
        self.is_free = set(self.stack)

    @property
    def available(self) -> int:
        """Free slots."""
        return len(self.stack) * self.page_size

    def alloc(self, num_tokens: int) -> list[int] | None:
        """num_tokens slots in whole pages, or None."""
        if num_tokens < 0 or num_tokens % self.page_size:
            raise ValueError(f"{num_tokens} tokens are not whole pages of {self.page_size}")
        if num_tokens > self.available:
            return None
        slots: list[int] = []
        for _ in range(num_tokens // self.page_size):
            page = self.stack.pop()
            self.is_free.remove(page)
            slots += range(page * self.page_size, (page + 1) * self.page_size)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Takes the pages of these slots back."""
        if len(set(slots)) < len(slots):
            raise ValueError("a slot is there twice")
        pages = sorted({slot // self.page_size for slot in slots}, reverse=True)
        for page in pages:
            if not 1 <= page <= self.num_pages:
                raise ValueError(f"page {page} was never handed out")
            if page in self.is_free:
                raise ValueError(f"page {page} is free already")
        self.stack += pages
        self.is_free.update(pages)


def alloc_extend(allocator: Allocator, start: int, stop: int, last_slot: int) -> list[int] | None:
    """Slots for the tokens at positions [start, stop) of one row."""
    if stop < start:
        raise ValueError(f"cannot extend from {start} back to {stop}")
    page = allocator.page_size
    boundary = -(-start // page) * page  # where the page of token start - 1 ends
    fill = list(range(last_slot + 1, last_slot + 1 + min(boundary, stop) - start))
    missing = max(stop - boundary, 0)
    new = allocator.alloc(-(-missing // page) * page)
    if new is None:
        return None
    return fill + new[:missing]


def page_table(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> npt.NDArray[np.int32]:
    """The page table of a batch, read off the rows."""
    most = max(-(-length // page_size) for length in lengths)
    table = np.zeros((len(row_ids), most), dtype=np.int32)
    for entry, row, length in zip(table, row_ids, lengths, strict=True):
        pages = rows[row, :length:page_size] // page_size
        entry[: len(pages)] = pages
    return table


def claim_of_the_edge() -> dict[str, int | bool]:
    """A published claim, and what the engine says."""
    above = 1587 // 16
    return {
        "pages_above": above,
        "tokens_above": above * 16,
        "pages_below": 2512 // 16 - above,
        "again": 1587 - above * 16,
        "claim_holds": False,
    }


if TYPE_CHECKING:

    class Allocator(Protocol):
        """What alloc_extend may use."""

        page_size: int

        @property
        def available(self) -> int: ...
        def alloc(self, num_tokens: int) -> list[int] | None: ...
