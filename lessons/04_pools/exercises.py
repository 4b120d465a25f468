"""What lesson 04 asks for, and its open cases."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from lessons.grading import Exercise, Failure, expect
from lessons.grading.shared import as_ints, expect_answers, rows_of
from minirad.cache import allocator as engine
from minirad.cache.radix_cache import RadixCache, RadixKey

# ---------------------------------------------------------------------- what alloc_extend stands on


class Given:
    """The engine's allocator, with lists. `taken`: pages that are in use before the case begins."""

    def __init__(self, num_pages: int, page_size: int, taken: int = 0) -> None:
        self.engine = engine.PageAllocator(num_pages * page_size, page_size)
        self.page_size = page_size
        if taken:
            self.engine.alloc(taken * page_size)

    @property
    def available(self) -> int:
        return self.engine.available

    def alloc(self, num_tokens: int) -> list[int] | None:
        slots = self.engine.alloc(num_tokens)
        return None if slots is None else slots.tolist()


# ---------------------------------------------------------------------- alloc


class Watched:
    """A student's allocator, and what it must have free by the grader's own books."""

    def __init__(self, impl: ModuleType, num_pages: int, page_size: int) -> None:
        self.own = impl.PageAllocator(num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self.free_pages = set(range(1, num_pages + 1))
        self.story = [f"PageAllocator({num_pages}, page_size={page_size})"]
        self.handed_out: list[tuple[Any, list[int]]] = []  # what alloc returned, and how it was then
        self.check_available()

    @property
    def where(self) -> str:
        return "; ".join(self.story[-4:])

    def expect(self, condition: bool, words: str, hint: int = 0) -> None:
        """As the grader's `expect`, with the pool for a picture."""
        expect(condition, words, [("what was asked, and the pool as it should be now", self.drawn())], hint)

    def drawn(self) -> str:
        """The calls so far, and every page with its slots."""
        pages = []
        for page in range(self.num_pages + 1):
            first, state = page * self.page_size, "free" if page in self.free_pages else "in use"
            slots = f"slots {first} to {first + self.page_size - 1}"
            pages.append(f"page {page:2}   {slots:20} {state if page else 'the dummy'}")
        return "\n".join([*self.story, "", *pages])

    def check_available(self, hint: int = 0) -> None:
        got, wanted = self.own.available, len(self.free_pages) * self.page_size
        self.expect(
            got == wanted, f"after {self.where}: available is {got!r} slots, it should be {wanted}", hint
        )
        for given, then in self.handed_out:
            now = list(given)
            self.expect(
                now == then, f"after {self.where}: a list that alloc gave before was {then}, is {now}"
            )

    def alloc(self, num_tokens: int) -> list[int] | None:
        self.story.append(f"alloc({num_tokens})")
        answer = self.own.alloc(num_tokens)
        if num_tokens > len(self.free_pages) * self.page_size:
            self.expect(
                answer is None,
                f"{self.where}: there are too few free slots, and it gave {answer!r}, not None",
            )
            self.check_available()
            return None
        self.expect(answer is not None, f"{self.where}: there is room, and it gave None")
        slots = as_ints(answer, self.where)
        words = f"{self.where}: it gave {slots}"
        hint = int(not any("free(" in call for call in self.story))  # what a page's slots are
        self.expect(
            len(slots) == num_tokens,
            f"{words}: that is {len(slots)} slots, {num_tokens} were asked for",
            hint,
        )
        pages = [slot // self.page_size for slot in slots[:: self.page_size]]
        laid = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        self.expect(
            slots == laid,
            f"{words}: these are not whole pages of {self.page_size}, slots in rising order",
            hint,
        )
        for page in pages:
            self.expect(page != 0, f"{words}: page 0 is the dummy and is never handed out", hint)
            self.expect(page in self.free_pages, f"{words}: page {page} {self._state(page)}", hint)
            self.free_pages.remove(page)
        self.handed_out.append((answer, slots[:]))
        self.check_available()
        return slots

    def free(self, slots: Sequence[int]) -> None:
        self.story.append(f"free({list(slots)})")
        given = list(slots)
        self.own.free(given)
        self.expect(given == list(slots), f"{self.where}: free must not change the list that it is given")
        self.free_pages |= {slot // self.page_size for slot in slots}
        self.check_available()

    def refused(self, name: str, argument: Any, why: str) -> None:
        """A call that must raise ValueError and change nothing."""
        self.story.append(f"{name}({argument})")
        try:
            getattr(self.own, name)(argument)
        except ValueError:
            self.check_available(hint=int(name == "free"))
            return
        self.expect(False, f"{self.where}: {why}, and no ValueError came", 2 * (name == "free"))

    def _state(self, page: int) -> str:
        return (
            "is in use already" if 1 <= page <= self.num_pages else f"does not exist (1 to {self.num_pages})"
        )

    def drain(self) -> None:
        """All that is free can be had, each page once: what the books say is true."""
        while self.free_pages:
            self.alloc(self.page_size)
        self.alloc(self.page_size)


def slots_one_by_one(impl: ModuleType) -> None:
    """Pages of one token."""
    pool = Watched(impl, 5, 1)
    pool.alloc(2)
    pool.alloc(0)
    pool.alloc(3)
    pool.alloc(1)


def whole_pages(impl: ModuleType) -> None:
    """Pages of 4 tokens."""
    pool = Watched(impl, 4, 4)
    pool.alloc(4)
    pool.alloc(8)
    pool.alloc(8)
    pool.alloc(4)


def too_many(impl: ModuleType) -> None:
    """More than there is: None, and nothing has changed."""
    pool = Watched(impl, 3, 2)
    pool.alloc(8)
    pool.alloc(6)


def not_whole_pages(impl: ModuleType) -> None:
    """Numbers that are no whole pages."""
    pool = Watched(impl, 4, 4)
    for number in (1, 6, -4, -1):
        pool.refused("alloc", number, f"{number} tokens are no whole number of pages of 4")
    pool.alloc(16)


def page_size_one_unless_said(impl: ModuleType) -> None:
    """Called without a page size."""
    got = impl.PageAllocator(7).available
    expect(got == 7, f"PageAllocator(7).available is {got!r}; without a page size a page is one slot")


# ---------------------------------------------------------------------- free


def freed_and_given_again(impl: ModuleType) -> None:
    """What comes back can be handed out again."""
    for page in (1, 4):
        pool = Watched(impl, 3, page)
        first, second = pool.alloc(page), pool.alloc(2 * page)
        assert first is not None and second is not None
        pool.free(first)
        pool.alloc(page)
        pool.free(second[::-1])
        pool.free([])
        pool.drain()


def one_slot_stands_for_its_page(impl: ModuleType) -> None:
    """A page comes back whole, whichever of its slots are named."""
    pool = Watched(impl, 4, 4)
    slots = pool.alloc(16)
    assert slots is not None
    pool.free([slots[2]])
    pool.free([slots[7], slots[4], slots[6]])
    pool.free([slots[8], slots[15]])
    pool.drain()


def freed_twice(impl: ModuleType) -> None:
    """A page that is free already is refused, and the other pages of that call stay in use."""
    pool = Watched(impl, 4, 1)
    slots = pool.alloc(4)
    assert slots is not None
    pool.free(slots[:1])
    pool.refused("free", slots[:1], f"slot {slots[0]} is free already")
    pool.refused("free", [slots[1], slots[0]], f"slot {slots[0]} is free already")
    pool.refused("free", [slots[2], slots[3], slots[0]], f"slot {slots[0]} is free already")
    pool.free(slots[1:])
    pool.drain()


def freed_twice_by_another_slot(impl: ModuleType) -> None:
    """Other slots of a page that is free already."""
    pool = Watched(impl, 3, 4)
    slots = pool.alloc(8)
    assert slots is not None
    pool.free(slots[:2])
    pool.refused("free", slots[2:4], f"page {slots[0] // 4} is free already (freed by its other slots)")
    pool.drain()


def never_handed_out(impl: ModuleType) -> None:
    """A page that was free all the time."""
    pool = Watched(impl, 3, 2)
    slots = pool.alloc(2)
    assert slots is not None
    other = next(page for page in (1, 2, 3) if page != slots[0] // 2)
    pool.refused("free", [other * 2], f"page {other} was never handed out")
    pool.drain()


def the_same_slot_twice(impl: ModuleType) -> None:
    """One slot twice in one call: one of the two is somebody's mistake."""
    pool = Watched(impl, 3, 2)
    slots = pool.alloc(6)
    assert slots is not None
    pool.refused("free", [slots[0], slots[2], slots[0]], f"slot {slots[0]} is there twice")
    pool.free(slots)
    pool.drain()


def slots_that_do_not_exist(impl: ModuleType) -> None:
    """Page 0, negative slots, and slots beyond the last page."""
    pool = Watched(impl, 3, 2)
    slots = pool.alloc(6)
    assert slots is not None
    for wrong in (0, 1, -1, -6, 8, 100):
        why = f"slot {wrong} can never have been handed out (slots are 2 to 7)"
        pool.refused("free", [slots[0], wrong], why)
    pool.free(slots)
    pool.drain()


# ---------------------------------------------------------------------- alloc_extend


def extend(impl: ModuleType, pool: Given, start: int, stop: int, last_slot: int) -> list[int] | None:
    """One call, with all that must hold of it."""
    page, before = pool.page_size, set(pool.engine.free_pages().tolist())
    needed = -(-stop // page) - -(-start // page)
    where = (
        f"alloc_extend(allocator, {start}, {stop}, last_slot={last_slot}), "
        f"pages of {page}, {len(before)} of them free"
    )
    answer = impl.alloc_extend(pool, start, stop, last_slot)
    taken = before - set(pool.engine.free_pages().tolist())
    if needed > len(before):
        expect(
            answer is None,
            f"{where}: {needed} new pages are needed, and it gave {answer!r}, not None",
            hint=2,
        )
        expect(not taken, f"{where}: it gave None, but {len(taken)} pages were taken and are lost", hint=2)
        return None
    words = f"{where}: {needed} new pages are needed and there, and it gave None"
    expect(answer is not None, words, hint=2 if needed else 1)
    slots = as_ints(answer, where)
    words = f"{where}: it gave {slots}"
    expect(len(slots) == stop - start, f"{words}: {len(slots)} slots for {stop - start} tokens")
    expect(len(taken) == needed, f"{words}: {needed} new pages are needed, {len(taken)} were taken", hint=2)
    last = last_slot
    for position, slot in zip(range(start, stop), slots, strict=True):
        if position % page:
            expect(
                slot == last + 1,
                f"{words}: token {position} is in the middle of a page and belongs into slot {last + 1}, "
                f"behind token {position - 1}; it got {slot}",
                hint=1,
            )
        else:
            begins = slot % page == 0 and slot // page in taken
            expect(
                begins,
                f"{words}: token {position} begins a page, and slot {slot} does not begin a new one",
                hint=2,
            )
            taken.remove(slot // page)
        last = slot
    return slots


def three_parts(impl: ModuleType) -> None:
    """All three parts: the rest of a page, whole pages, the beginning of one more."""
    extend(impl, Given(8, 4, taken=5), 6, 13, 21)
    extend(impl, Given(8, 4, taken=5), 7, 16, 22)


def one_part_only(impl: ModuleType) -> None:
    """Only one of the three parts."""
    extend(impl, Given(4, 4, taken=1), 1, 3, 4)
    extend(impl, Given(4, 4, taken=1), 1, 4, 4)
    extend(impl, Given(4, 4), 0, 8, 0)
    extend(impl, Given(4, 4), 0, 3, 0)
    extend(impl, Given(4, 4, taken=1), 2, 2, 5)
    extend(impl, Given(4, 4), 0, 0, 0)


def begins_a_page(impl: ModuleType) -> None:
    """`start` begins a page: the last slot means nothing, a new page is needed."""
    extend(impl, Given(6, 4, taken=2), 8, 9, 11)
    extend(impl, Given(6, 4, taken=2), 8, 17, 11)
    extend(impl, Given(6, 4, taken=2), 4, 6, 0)


def one_token_at_a_time(impl: ModuleType) -> None:
    """Decoding: a row that grows by one token eleven times needs three pages of 4."""
    pool, row = Given(3, 4), list[int]()
    for position in range(11):
        row += extend(impl, pool, position, position + 1, row[-1] if row else 0) or []
    wanted = [4 * page + i for page in (1, 2, 3) for i in range(4)][:11]
    expect(row == wanted, f"a row grown token by token lies in {row} instead of {wanted}")


def the_fill_needs_no_page(impl: ModuleType) -> None:
    """A full pool: what fits into the row's own page is no reason to give up."""
    extend(impl, Given(2, 4, taken=2), 5, 8, 8)
    extend(impl, Given(2, 4, taken=2), 5, 9, 8)


def too_few_pages(impl: ModuleType) -> None:
    """Too few pages: None, and none was taken."""
    extend(impl, Given(4, 4, taken=2), 3, 13, 6)
    extend(impl, Given(4, 4, taken=2), 3, 12, 6)


def extend_pages_of_one(impl: ModuleType) -> None:
    """Pages of one token: there is never a rest."""
    extend(impl, Given(6, 1, taken=2), 2, 5, 2)
    extend(impl, Given(6, 1, taken=2), 2, 7, 2)


def backwards(impl: ModuleType) -> None:
    """stop before start."""
    try:
        got = impl.alloc_extend(Given(4, 4), 5, 3, 4)
    except ValueError:
        return
    raise Failure(
        f"alloc_extend(allocator, 5, 3, ...) gave {got!r}: stop lies before start, a ValueError should come"
    )


# ---------------------------------------------------------------------- page_table


def check_table(
    impl: ModuleType, rows: npt.NDArray[np.int64], row_ids: list[int], lengths: list[int], page: int
) -> None:
    kept = rows.copy()
    returned = impl.page_table(rows, list(row_ids), list(lengths), page)
    answer = np.asarray(returned)
    most = max(-(-length // page) for length in lengths)
    where = f"page_table(rows, {row_ids}, lengths {lengths}, page_size={page})"
    expect(bool((rows == kept).all()), f"{where} changed the rows")
    expect(answer.ndim > 0, f"{where} returned {returned!r}, which is no table")
    shape = (len(row_ids), most)
    expect(answer.shape == shape, f"{where} has shape {answer.shape} instead of {shape}")
    expect(np.issubdtype(answer.dtype, np.integer), f"{where} holds {answer.dtype}, not integers")
    for b, (row, length) in enumerate(zip(row_ids, lengths, strict=True)):
        for j in range(most):
            got = int(answer[b, j])
            if j * page >= length:
                expect(
                    got == 0,
                    f"{where}[{b}, {j}] is {got}: request {b} has no such page, it should be 0",
                    hint=1,
                )
                continue
            slot = int(rows[row, j * page])
            words = (
                f"token {j * page} of request {b} lies in slot {slot}, so [{b}, {j}] should be {slot // page}"
            )
            shown = [("the rows of the batch, slot by slot", str(rows[row_ids, : most * page]))]
            expect(got == slot // page, f"{where}: {words}; it is {got}", shown)


def one_request(impl: ModuleType) -> None:
    """One request, whole pages and a last one that is not full."""
    rows = rows_of([8], 4, [3, 1], 0)
    check_table(impl, rows, [0], [8], 4)
    rows = rows_of([10], 4, [3, 1, 7], 0)
    check_table(impl, rows, [0], [10], 4)
    check_table(impl, rows, [0], [1], 4)


def several_requests(impl: ModuleType) -> None:
    """Three requests of different lengths, in rows out of order."""
    rows = rows_of([9, 2, 5, 4], 4, [9, 8, 7, 6, 5, 4, 3], 0)
    check_table(impl, rows, [2, 0, 3], [5, 9, 4], 4)
    check_table(impl, rows, [1, 1], [2, 1], 4)


def old_numbers_behind_the_end(impl: ModuleType) -> None:
    """What an earlier request left behind the end of a row means nothing."""
    rows = rows_of([9, 3], 4, [5, 2, 4, 3], 399)
    check_table(impl, rows, [0, 1], [9, 3], 4)
    check_table(impl, rows, [1, 0], [3, 9], 4)


def table_of_slots(impl: ModuleType) -> None:
    """Pages of one token: the table is the row."""
    check_table(impl, rows_of([4, 2], 1, [6, 2, 9, 4, 1, 3], 7), [0, 1], [4, 2], 1)


# ---------------------------------------------------------------------- a claim


def ask_the_engine() -> dict[str, Any]:
    """What minirad's tree does with the two prompts of the claim."""
    cache, prompt = RadixCache(page_size=16), list(range(2512))
    cache.insert(RadixKey(prompt), prompt)
    above = cache.match_prefix(RadixKey([*prompt[:1587], 100_000]))
    below = next(node for node in cache.walk() if node.parent is above.last_node)
    return {
        "pages_above": above.length // 16,
        "tokens_above": above.length,
        "pages_below": len(below.slots) // 16,
        "again": 1587 - above.length,
        "claim_holds": above.length == 1587,
    }


def the_engine_decides(impl: ModuleType) -> None:
    """Your numbers beside those of RadixCache(page_size=16)."""
    expect_answers("claim_of_the_edge", impl.claim_of_the_edge(), ask_the_engine(), WHY)


WHY = {
    "pages_above": "count the whole pages within 1,587 tokens",
    "tokens_above": "an edge holds whole pages only",
    "pages_below": "2,512 tokens are 157 pages, and the split moves none of them",
    "again": "look at the tokens between the end of the last whole page and the first difference",
    "claim_holds": "the shared edge is the upper half alone, and has fewer than 1,587 tokens",
}
"""What to think of, without the number."""

EXERCISES = [
    Exercise(
        "alloc", 2,
        [slots_one_by_one, whole_pages, too_many, not_whole_pages, page_size_one_unless_said],
        hints=(
            "Refuse first, take afterwards: numbers that are no whole pages, and more than there is.",
            "A list of free page numbers will do: `list(range(1, num_pages + 1))`. Page p has the slots `p "
            "* page_size` to `(p + 1) * page_size - 1`.",
        ),
        functions=("PageAllocator",),
    ),
    Exercise(
        "free", 3,
        [freed_and_given_again, one_slot_stands_for_its_page, freed_twice, freed_twice_by_another_slot,
         never_handed_out, the_same_slot_twice, slots_that_do_not_exist],
        hints=(
            "`{slot // page_size for slot in slots}`. A page may be named by one of its slots or by all of "
            "them. To see quickly whether it is free already, keep a set (or an array of bits) beside your "
            "list.",
            "Two passes: the first only looks, and raises; the second only changes. If one loop does both, "
            "the pages before the faulty one have gone back already when the error comes, and whoever "
            "called still believes to own them.",
            "A slot on a page that is free, a slot on no page from 1 to `num_pages` (negative slots, too), "
            "and the same slot twice in one call.",
        ),
        functions=("PageAllocator",),
    ),
    Exercise(
        "alloc_extend", 3,
        [three_parts, one_part_only, begins_a_page, one_token_at_a_time, the_fill_needs_no_page,
         too_few_pages, extend_pages_of_one, backwards],
        hints=(
            "`boundary = -(-start // page_size) * page_size` is the first page start at or after `start`. "
            "What lies before it, and what behind?",
            "Up to `min(boundary, stop)` the row fills its own page, from `last_slot + 1` on. That needs no "
            "new page, so it works in a full pool, too.",
            "What is left, `stop - boundary` tokens if that is positive, needs new pages: ask for all of "
            'them in one call, in whole pages, so that a "no" costs nothing. Use as many of their slots as '
            "there are tokens.",
        ),
    ),
    Exercise(
        "page_table", 2,
        [one_request, several_requests, old_numbers_behind_the_end, table_of_slots],
        hints=(
            "Only page starts need a look-up: every `page_size`-th token of a row begins a page.",
            "`rows[r, :length:page_size] // page_size`. The slice ends at `length`, so old numbers behind "
            "it never show; what is left of the line is 0.",
        ),
    ),
    Exercise(
        "claim_of_the_edge", 1, [the_engine_decides],
        hints=(
            "Where does the last whole page of 16 end within 1,587 tokens? Does a split move a page's "
            "border?",
            "Ask the engine: `RadixCache(page_size=16)`, `insert` one prompt, `match_prefix` the other, "
            "look at `walk()`.",
        ),
    ),
]  # fmt: skip
