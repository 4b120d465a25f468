"""Random cases of lesson 04, beside minirad's own allocator and on rows that it laid out."""

from __future__ import annotations

from random import Random
from types import ModuleType

import numpy as np

from lessons.grading import sibling
from minirad.cache.allocator import PageAllocator

open_cases = sibling(__file__, "exercises")


def random_takes(impl: ModuleType, rng: Random) -> None:
    """A pool that is emptied in random portions."""
    for _ in range(12):
        page, pages = rng.choice((1, 2, 3, 4, 16)), rng.randrange(1, 20)
        pool = open_cases.Watched(impl, pages, page)
        for _ in range(10):
            pool.alloc(rng.randrange(6) * page)
        pool.drain()


def random_takes_and_returns(impl: ModuleType, rng: Random) -> None:
    """A pool in use: portions come and go, and wrong returns are refused."""
    for _ in range(12):
        page, pages = rng.choice((1, 2, 3, 4, 16)), rng.randrange(2, 20)
        pool, reference = open_cases.Watched(impl, pages, page), PageAllocator(pages * page, page)
        held: list[list[int]] = []
        for _ in range(25):
            if held and rng.random() < 0.45:
                slots = held.pop(rng.randrange(len(held)))
                rng.shuffle(slots)
                pool.free(slots)
                pages_gone = sorted({slot // page for slot in slots})
                if rng.random() < 0.3 and slots:
                    extra = [held[0][0]] if held and held[0] else []
                    pool.refused("free", extra + slots[:1], f"page {slots[0] // page} is free already")
                reference_frees(reference, len(pages_gone))
            else:
                count = rng.randrange(5) * page
                slots = pool.alloc(count)
                theirs = reference.alloc(count)
                open_cases.expect(
                    (slots is None) == (theirs is None),
                    f"{pool.where}: the engine's allocator sees it otherwise",
                )
                if slots:
                    held.append(slots)
        pool.drain()


def reference_frees(reference: PageAllocator, count: int) -> None:
    """The engine hands out other pages; as many come back."""
    used = np.setdiff1d(np.arange(1, reference.num_pages + 1), reference.free_pages())
    reference.free(used[:count] * reference.page_size)


def random_rows_grow(impl: ModuleType, rng: Random) -> None:
    """Rows that grow in turn by random numbers of tokens, until the pool is full."""
    for _ in range(25):
        page = rng.choice((1, 2, 3, 4, 4, 8))
        pool = open_cases.Given(rng.randrange(3, 24), page)
        rows: list[list[int]] = [[] for _ in range(rng.randrange(1, 4))]
        for _ in range(20):
            row = rng.choice(rows)
            stop = len(row) + rng.choice((0, 1, 1, 2, rng.randrange(3 * page + 1)))
            row += open_cases.extend(impl, pool, len(row), stop, row[-1] if row else rng.randrange(50)) or []


def random_tables(impl: ModuleType, rng: Random) -> None:
    """Rows laid out by the engine's allocator, with old numbers behind their ends."""
    for _ in range(25):
        page, count = rng.choice((1, 2, 3, 4, 16)), rng.randrange(1, 6)
        lengths = [rng.randrange(1, 5 * page + 2) for _ in range(count)]
        order = list(range(1, sum(-(-length // page) for length in lengths) + 1))
        rng.shuffle(order)
        rows = open_cases.rows_of(lengths, page, order, rng.choice((0, 5 * page)))
        batch = [rng.randrange(count) for _ in range(rng.randrange(1, 5))]
        shorter = [rng.randrange(1, lengths[row] + 1) for row in batch]
        open_cases.check_table(impl, rows, batch, shorter, page)


HIDDEN = {
    "alloc": [random_takes],
    "free": [random_takes_and_returns],
    "alloc_extend": [random_rows_grow],
    "page_table": [random_tables],
}
