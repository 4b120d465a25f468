"""Hidden cases of lesson 04: first some that are the same for every student, then random ones.

The random ones run beside minirad's own allocator, and on rows that it laid out.
"""

from __future__ import annotations

from random import Random
from types import ModuleType

import numpy as np

from lessons.grading import expect, sibling
from lessons.grading.game import said
from minirad.cache.allocator import PageAllocator

open_cases = sibling(__file__, "exercises")


# ---------------------------------------------------------------------- the same for everybody


def pools_side_by_side(impl: ModuleType) -> None:
    """Several pools in turn, two of them alike: none knows of the others."""
    sizes = [(5, 1), (5, 1), (3, 4), (7, 3), (4, 3)]
    pools = [open_cases.Watched(impl, pages, page) for pages, page in sizes]
    held = [pool.alloc(2 * pool.page_size) for pool in pools]
    for pool, slots in zip(pools, held, strict=True):
        pool.refused("free", [slots[0], (pool.num_pages + 1) * pool.page_size], "there is no such page")
        pool.free(slots[:1])
        pool.refused("free", slots[:1], f"slot {slots[0]} is free already")
    for pool in reversed(pools):
        pool.alloc((pool.num_pages - 1) * pool.page_size)
    for pool in pools:
        pool.drain()


def old_and_new_pages(impl: ModuleType) -> None:
    """Pages that came back and pages that were never used, in one portion; pages of 1 and of 3."""
    for page in (1, 3):
        pool = open_cases.Watched(impl, 5, page)
        slots = pool.alloc(3 * page)
        pool.free(slots[:page])
        pool.free(slots[-page:])
        pool.alloc(3 * page)
        pool.alloc(2 * page)
        pool.alloc(page)
        pool.drain()
        pool = open_cases.Watched(impl, 3, page)
        slots = pool.alloc(3 * page)
        pool.free(slots[: 2 * page])
        pool.alloc(2 * page)
        pool.drain()


def pages_of_three(impl: ModuleType) -> None:
    """Pages of 3 slots: what is a whole page, and what is not."""
    pool = open_cases.Watched(impl, 4, 3)
    for number in (1, 2, 4, 8):
        pool.refused("alloc", number, f"{number} tokens are no whole number of pages of 3")
    pool.alloc(3)
    pool.alloc(6)
    pool.drain()


def nothing_is_shared(impl: ModuleType) -> None:
    """The list that alloc(0) gave is changed by whoever got it."""
    own = impl.PageAllocator(3, 1)
    nothing = own.alloc(0)
    if isinstance(nothing, list):
        nothing.append(7)
    again = own.alloc(0)
    expect(list(again) == [], f"the list of one alloc(0) got a 7; the next alloc(0) gave {again}, not []")


def large_pools(impl: ModuleType) -> None:
    """A pool of 33,003 slots, taken at once."""
    own = impl.PageAllocator(11_001, 3)
    got = sorted(int(slot) for slot in own.alloc(33_003))
    wanted = list(range(3, 33_006))
    what = "PageAllocator(11001, page_size=3).alloc(33003)"
    expect(got == wanted, f"{what} should give the slots {said(wanted)}, it gave {said(got)}")
    own.free(got[-3:])
    expect(own.available == 3, f"{what}, then a page is freed: available should be 3, it is {own.available}")


def wrong_pages_in_between(impl: ModuleType) -> None:
    """One wrong slot among right ones, wherever it stands."""
    for page in (1, 3):
        pool = open_cases.Watched(impl, 6, page)
        pool.refused("free", [page], "page 1 was never handed out: the pool is new")
        slots = pool.alloc(6 * page)
        firsts = sorted(slots[::page])
        for at in range(1, 5):
            pool.free([firsts[at]])
            pool.refused("free", firsts, f"slot {firsts[at]} is free already")
            back = pool.alloc(page)
            assert back is not None
        for at in range(6):
            pool.refused("free", [*firsts, firsts[at]], f"slot {firsts[at]} is there twice")
            for wrong in (-1, -page, page - 1, 7 * page):
                mixed = [*firsts[:at], wrong, *firsts[at:]]
                pool.refused("free", mixed, f"slot {wrong} can never have been handed out")
        pool.free(firsts[::-1])
        pool.drain()


class Downwards(open_cases.Given):  # type: ignore[misc,name-defined]
    """An allocator that hands out the last of its pages first, so that they lie side by side nowhere."""

    def alloc(self, num_tokens: int) -> list[int] | None:
        slots, page = super().alloc(num_tokens), self.page_size
        if slots is None:
            return None
        pages = [slots[at : at + page] for at in range(0, len(slots), page)]
        return [slot for each in reversed(pages) for slot in each]


def rows_in_scattered_pages(impl: ModuleType) -> None:
    """An allocator whose pages come in falling order; pages of 1, 3 and 4."""
    for page in (1, 3, 4):
        for start, more in ((0, 3 * page), (2 * page, 2 * page + 1), (2 * page - 1, 2 * page + 1)):
            pool = Downwards(8, page, taken=2)
            open_cases.extend(impl, pool, start, start + more, 2 * page + (start - 1) % page)


def rows_of_three(impl: ModuleType) -> None:
    """Every start and every stop, pages of 3."""
    for start in range(8):
        for stop in range(start, 12):
            last = 3 + (start - 1) % 3
            open_cases.extend(impl, open_cases.Given(4, 3, taken=1), start, stop, last)


def backwards_within_a_page(impl: ModuleType) -> None:
    """stop before start, in the same page and in another one."""
    for start, stop in ((7, 6), (3, 1), (1, 0), (9, 3), (4, 3)):
        try:
            got = impl.alloc_extend(open_cases.Given(4, 4), start, stop, 4 + (start - 1) % 4)
        except ValueError:
            continue
        expect(
            False, f"alloc_extend(allocator, {start}, {stop}, ...) should raise ValueError, it gave {got!r}"
        )


def tables_of_large_numbers(impl: ModuleType) -> None:
    """Page numbers beyond what 8, 16 or 24 bits hold; pages of 1, 3, 4 and 16."""
    for page in (1, 3, 4, 16):
        pages = [300, 2, 70_001, 33_000, 5, 2**24 + 1, 257]
        rows = open_cases.rows_of([3 * page, page + 1, 2 * page], page, pages, 7)
        open_cases.check_table(impl, rows, [2, 0, 1], [2 * page, 3 * page - (page > 1), 1], page)
        open_cases.check_table(impl, rows, [0, 2], [1, page + 1], page)


def tables_one_after_the_other(impl: ModuleType) -> None:
    """The same batch with other rows; and the first table is still what it was."""
    rows = open_cases.rows_of([9, 5], 4, [5, 2, 4, 3, 1], 0)
    first = impl.page_table(rows, [0, 1], [9, 5], 4)
    kept = np.array(first)
    open_cases.check_table(impl, open_cases.rows_of([9, 5], 4, [1, 9, 8, 2, 7], 0), [0, 1], [9, 5], 4)
    now = np.asarray(first).tolist()
    expect(now == kept.tolist(), f"a second call changed the first one's table: {kept.tolist()} became {now}")


# ---------------------------------------------------------------------- random


def random_takes(impl: ModuleType, rng: Random) -> None:
    """A pool that is emptied in random portions."""
    for _ in range(4):
        page, pages = rng.choice((1, 2, 3, 4, 16)), rng.randrange(1, 20)
        pool = open_cases.Watched(impl, pages, page)
        for _ in range(10):
            pool.alloc(rng.randrange(6) * page)
        pool.drain()


def random_takes_and_returns(impl: ModuleType, rng: Random) -> None:
    """A pool in use: portions come and go, and wrong returns are refused."""
    for _ in range(4):
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
    for _ in range(6):
        page = rng.choice((1, 2, 3, 4, 4, 8))
        pool = open_cases.Given(rng.randrange(3, 24), page)
        rows: list[list[int]] = [[] for _ in range(rng.randrange(1, 4))]
        for _ in range(20):
            row = rng.choice(rows)
            stop = len(row) + rng.choice((0, 1, 1, 2, rng.randrange(3 * page + 1)))
            row += open_cases.extend(impl, pool, len(row), stop, row[-1] if row else rng.randrange(50)) or []


def random_tables(impl: ModuleType, rng: Random) -> None:
    """Rows laid out by the engine's allocator, with old numbers behind their ends."""
    for _ in range(6):
        page, count = rng.choice((1, 2, 3, 4, 16)), rng.randrange(1, 6)
        lengths = [rng.randrange(1, 5 * page + 2) for _ in range(count)]
        order = list(range(1, sum(-(-length // page) for length in lengths) + 1))
        rng.shuffle(order)
        rows = open_cases.rows_of(lengths, page, order, rng.choice((0, 5 * page)))
        batch = [rng.randrange(count) for _ in range(rng.randrange(1, 5))]
        shorter = [rng.randrange(1, lengths[row] + 1) for row in batch]
        open_cases.check_table(impl, rows, batch, shorter, page)


HIDDEN = {
    "alloc": [pools_side_by_side, old_and_new_pages, pages_of_three, nothing_is_shared, large_pools,
              random_takes],
    "free": [pools_side_by_side, old_and_new_pages, wrong_pages_in_between, random_takes_and_returns],
    "alloc_extend": [rows_in_scattered_pages, rows_of_three, backwards_within_a_page, random_rows_grow],
    "page_table": [tables_of_large_numbers, tables_one_after_the_other, random_tables],
}  # fmt: skip
