"""Lesson 04 solved otherwise: a numpy mask, the highest page first, positions worked out one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minirad.cache.radix_cache import RadixCache, RadixKey


class PageAllocator:
    """One bit per page."""

    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        self.size = page_size
        self.used = np.zeros(num_pages + 1, dtype=bool)
        self.used[0] = True

    @property
    def available(self) -> int:
        return int((~self.used).sum()) * self.size

    def alloc(self, num_tokens: int) -> list[int] | None:
        count, rest = divmod(num_tokens, self.size)
        if rest or count < 0:
            raise ValueError(num_tokens)
        pages = np.flatnonzero(~self.used)[::-1][:count]
        if len(pages) < count:
            return None
        self.used[pages] = True
        return (pages[:, None] * self.size + np.arange(self.size)).ravel().tolist()

    def free(self, slots: Sequence[int]) -> None:
        array = np.asarray(slots, dtype=np.int64)
        pages = array // self.size
        if len(np.unique(array)) != len(array) or ((pages < 1) | (pages >= len(self.used))).any():
            raise ValueError(slots)
        if not self.used[pages].all():
            raise ValueError(slots)
        self.used[pages] = False


def alloc_extend(allocator: Any, start: int, stop: int, last_slot: int) -> list[int] | None:
    """Counts the positions at which a page begins, then goes position by position."""
    if stop < start:
        raise ValueError((start, stop))
    size = allocator.page_size
    begins = [position for position in range(start, stop) if position % size == 0]
    new = allocator.alloc(len(begins) * size)
    if new is None:
        return None
    slots: list[int] = []
    for position in range(start, stop):
        if position % size == 0:
            last_slot, new = new[0] - 1, new[size:]
        last_slot += 1
        slots.append(last_slot)
    return slots


def page_table(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> npt.NDArray[np.int32]:
    """All at once, then the unused entries are wiped."""
    pages = (np.asarray(lengths) + page_size - 1) // page_size
    first = np.arange(pages.max()) * page_size
    table = rows[np.asarray(row_ids)[:, None], first] // page_size
    return np.where(np.arange(pages.max()) < pages[:, None], table, 0).astype(np.int32)


def claim_of_the_edge() -> dict[str, int | bool]:
    """Asks the engine's tree."""
    cache, prompt = RadixCache(page_size=16), list(range(2512))
    cache.insert(RadixKey(prompt), prompt)
    match = cache.match_prefix(RadixKey([*prompt[:1587], 9999]))
    below = next(node for node in cache.walk() if node.parent is match.last_node)
    return {
        "pages_above": match.length // 16,
        "tokens_above": match.length,
        "pages_below": len(below.slots) // 16,
        "again": 1587 - match.length,
        "claim_holds": match.length == 1587,
    }
