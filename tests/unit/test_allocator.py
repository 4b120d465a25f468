"""The page allocator: whole pages out and in, each exactly once, and nothing changed by a refusal."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.cache.allocator import PageAllocator
from minirad.errors import InvariantError

PAGES = (1, 2, 4, 16)
EXAMPLES = int(os.environ.get("MINIRAD_EXAMPLES", "50"))


def state(pool: PageAllocator) -> tuple[int, list[int]]:
    pool.check()
    return pool.available, pool.free_pages().tolist()


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_handed_out_lowest_first_and_never_page_0(page: int) -> None:
    pool = PageAllocator(8 * page, page)
    assert (pool.available, pool.num_tokens, pool.num_pages) == (8 * page, 8 * page, 8)
    assert pool.alloc(2 * page).tolist() == list(range(page, 3 * page))
    rest = pool.alloc(6 * page)
    assert rest.tolist() == list(range(3 * page, 9 * page)) and rest.dtype == np.int64
    assert pool.available == 0
    pool.check()


@pytest.mark.parametrize("page", PAGES)
def test_too_few_gives_none_and_changes_nothing(page: int) -> None:
    pool = PageAllocator(4 * page, page)
    pool.alloc(page)
    before = state(pool)
    assert pool.alloc(4 * page) is None
    assert pool.alloc_extend(0, 3 * page + 1, 0) is None
    assert state(pool) == before
    assert pool.alloc(0).tolist() == []


@pytest.mark.parametrize("page", PAGES)
def test_extending_a_row_in_three_parts(page: int) -> None:
    pool = PageAllocator(64 * page, page)
    for start in range(0, 2 * page + 1):
        for stop in range(start, 5 * page + 2):
            row = pool.alloc_extend(0, start, 0)
            free = pool.available
            assert pool.pages_needed(start, stop) == -(-stop // page) - -(-start // page)
            more = pool.alloc_extend(start, stop, int(row[-1]) if start else 0)
            assert free - pool.available == pool.pages_needed(start, stop) * page
            line = np.concatenate((row, more))
            assert len(line) == stop
            assert (line % page == np.arange(stop) % page).all()  # a page is filled in order
            firsts = line // page
            assert (firsts == np.repeat(firsts[::page], page)[:stop]).all()  # and by one row only
            assert len(set(firsts.tolist())) == -(-stop // page)
            if stop:
                pool.free(line)
            pool.check()
    assert pool.available == pool.num_tokens


@pytest.mark.parametrize("page", [2, 4, 16])
def test_filling_up_a_page_needs_no_free_page(page: int) -> None:
    pool = PageAllocator(page, page)
    row = pool.alloc_extend(0, 1, 0)
    assert pool.available == 0
    assert pool.alloc_extend(1, page, int(row[-1])).tolist() == list(range(page + 1, 2 * page))
    assert pool.alloc_extend(page, page + 1, 2 * page - 1) is None


@pytest.mark.parametrize("page", PAGES)
def test_double_free_is_refused_before_anything_changes(page: int) -> None:
    pool = PageAllocator(8 * page, page)
    slots = pool.alloc(4 * page)
    pool.free(slots[:page])
    before = state(pool)
    with pytest.raises(InvariantError, match=r"page \[1\] is freed but is free already"):
        pool.free(slots[:page])
    with pytest.raises(InvariantError, match=r"page \[1\] is freed but is free already"):
        pool.free(slots)  # three good pages beside the bad one
    with pytest.raises(InvariantError, match="freed twice in one call"):
        pool.free(np.concatenate((slots[page:], slots[-1:])))
    assert state(pool) == before


@pytest.mark.parametrize("page", [2, 4, 16])
def test_one_token_of_a_page_then_its_neighbour(page: int) -> None:
    pool = PageAllocator(8 * page, page)
    slots = pool.alloc(page)
    assert pool.free(slots[:1]).tolist() == [1]  # one slot stands for its page
    before = state(pool)
    with pytest.raises(InvariantError, match="free already"):
        pool.free(slots[1:2])
    assert state(pool) == before


@pytest.mark.parametrize("page", PAGES)
def test_what_was_never_handed_out_is_refused(page: int) -> None:
    pool = PageAllocator(4 * page, page)
    slots = pool.alloc(2 * page)
    before = state(pool)
    for bad in (0, page - 1, -1, 5 * page, 10**9):
        with pytest.raises(InvariantError, match=f"slot {bad} was never handed out"):
            pool.free([*slots.tolist(), bad])
    with pytest.raises(InvariantError, match="free already"):
        pool.free([3 * page])
    assert state(pool) == before


@pytest.mark.parametrize("page", PAGES)
def test_freeing_in_one_call_is_freeing_one_by_one(page: int) -> None:
    batched, single = PageAllocator(32 * page, page), PageAllocator(32 * page, page)
    for pool in (batched, single):
        pool.alloc(32 * page)
    segments = [
        np.arange(first * page, last * page) for first, last in [(9, 12), (2, 3), (20, 26), (4, 5), (30, 32)]
    ]
    pages = batched.free(np.concatenate(segments))
    for segment in segments:
        single.free(segment)
    assert state(batched) == state(single)
    assert pages.tolist() == sorted(s // page for segment in segments for s in segment[::page].tolist())


def test_freeing_nothing() -> None:
    pool = PageAllocator(4)
    assert pool.free([]).tolist() == [] and pool.free(np.empty(0)).tolist() == []
    assert pool.available == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PageAllocator(8, 0), "8 tokens in pages of 0"),
        (lambda: PageAllocator(3, 4), "3 tokens in pages of 4: not one page"),
        (lambda: PageAllocator(10, 4), "page_size 4 does not divide 10 tokens"),
        (lambda: PageAllocator(8, 4).alloc(3), "3 tokens are not whole pages of 4"),
        (lambda: PageAllocator(8, 4).alloc(-4), "-4 tokens"),
        (lambda: PageAllocator(8, 4).alloc_extend(3, 2, 7), "cannot extend from 3 back to 2"),
        (lambda: PageAllocator(8, 4).free([1.5]), "float64"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_check_finds_a_page_lost_from_the_stack() -> None:
    pool = PageAllocator(8)
    pool._top -= 1
    with pytest.raises(InvariantError, match="7 pages on the free stack, 8 marked free"):
        pool.check()


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None)
@given(
    page=st.sampled_from([1, 2, 3]), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40)
)
def test_against_a_set_of_free_pages(page: int, steps: list[tuple[bool, int]]) -> None:
    pool = PageAllocator(12 * page, page)
    free, held = set(range(1, 13)), []
    for take, number in steps:
        if take:
            slots = pool.alloc(number * page)
            assert (slots is None) == (number > len(free))
            if slots is not None:
                pages = set((slots // page).tolist())
                assert len(pages) == number and pages <= free
                free -= pages
                held.append(slots)
        elif held:
            slots = held.pop(number % len(held))
            free |= set(pool.free(slots).tolist())
        assert state(pool) == (len(free) * page, sorted(free))
