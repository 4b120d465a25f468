"""Wrong solutions of lesson 04, as learners write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lessons.grading import Mutant

TRUTH: dict[str, Any] = {
    "pages_above": 99,
    "tokens_above": 1584,
    "pages_below": 58,
    "again": 3,
    "claim_holds": False,
}


def _claims(**wrong: Any) -> dict[str, Callable[..., Any]]:
    return {"claim_of_the_edge": lambda: TRUTH | wrong}


def _page_by_page(allocator: Any, start: int, stop: int, last_slot: int) -> list[int] | None:
    """Takes pages one by one, and loses those it has when there is no further one."""
    if stop < start:
        raise ValueError
    slots, page = [], allocator.page_size
    for position in range(start, stop):
        if position % page == 0:
            new = allocator.alloc(page)
            if new is None:
                return None
            last_slot = new[0] - 1
        last_slot += 1
        slots.append(last_slot)
    return slots


BOUNDARY = "boundary = -(-start // page) * page"
NEW = "new = allocator.alloc(-(-missing // page) * page)"
PAGES = "pages = rows[row, :length:page_size] // page_size"
MOST = "most = max(-(-length // page_size) for length in lengths)"
TWICE = "if len(set(slots)) < len(slots):"
SORTED = "pages = sorted({slot // self.page_size for slot in slots}, reverse=True)"
KNOWN = "if not 1 <= page <= self.num_pages:"
RETURN_ALL = "        self.stack += pages\n        self.is_free.update(pages)"
MUTANTS = [
    Mutant(
        "alloc", "page 0 is handed out", old="range(num_pages, 0, -1)", new="range(num_pages - 1, -1, -1)"
    ),
    Mutant("alloc", "one page too many", old="range(num_pages, 0, -1)", new="range(num_pages + 1, 0, -1)"),
    Mutant(
        "alloc",
        "available counts pages",
        old="return len(self.stack) * self.page_size",
        new="return len(self.stack)",
    ),
    Mutant(
        "alloc",
        "gives what there is instead of None",
        old="            return None\n        slots:",
        new="            num_tokens = self.available\n        slots:",
    ),
    Mutant(
        "alloc",
        "the last page cannot be had",
        old="if num_tokens > self.available",
        new="if num_tokens >= self.available",
    ),
    Mutant(
        "alloc",
        "rounds up instead of refusing",
        old="if num_tokens < 0 or num_tokens % self.page_size:",
        new="num_tokens = -(-num_tokens // self.page_size) * self.page_size\n        if num_tokens < 0:",
    ),
    Mutant("alloc", "negative numbers go through", old="num_tokens < 0 or ", new=""),
    Mutant(
        "alloc",
        "a page is looked at, not taken",
        old="page = self.stack.pop()",
        new="page = self.stack[-1]\n            self.is_free.add(page)",
    ),
    Mutant(
        "alloc",
        "slots counted from page 0 of the pool",
        old="range(page * self.page_size, (page + 1) * self.page_size)",
        new="range((page - 1) * self.page_size, page * self.page_size)",
    ),
    Mutant(
        "alloc",
        "pages, not slots",
        old="slots += range(page * self.page_size, (page + 1) * self.page_size)",
        new="slots.append(page)",
    ),
    Mutant(
        "alloc",
        "the check comes when half is taken",
        old="        if num_tokens > self.available:\n            return None\n",
        new="        if num_tokens > self.available:\n"
        "            self.stack.clear()\n            return None\n",
    ),
    Mutant("free", "nothing is refused", old=KNOWN, new="if False:", after="def free"),
    Mutant(
        "free", "a page that is free is taken back again", old="if page in self.is_free:", new="if False:"
    ),
    Mutant(
        "free",
        "pages are taken back while they are being checked",
        old='    if page in self.is_free:\n                raise ValueError(f"page {page} is free already")\n'
        + RETURN_ALL,
        new='    if page in self.is_free:\n                raise ValueError(f"page {page} is free already")\n'
        "            self.stack.append(page)\n            self.is_free.add(page)",
    ),
    Mutant("free", "the same slot twice goes through", old=TWICE, new="if False:"),
    Mutant(
        "free",
        "a slot per page must be named only once",
        old=TWICE,
        new="if len({s // self.page_size for s in slots}) < len(slots):",
    ),
    Mutant(
        "free",
        "only slots that begin a page count",
        old=SORTED,
        new="pages = [slot // self.page_size for slot in slots if slot % self.page_size == 0]",
    ),
    Mutant(
        "free",
        "all slots of a page must be there",
        old=SORTED,
        new="pages = [p for p in {s // self.page_size for s in slots}\n"
        "                 if sum(s // self.page_size == p for s in slots) == self.page_size]",
    ),
    Mutant(
        "free",
        "a page comes back once per slot",
        old=SORTED,
        new="pages = [slot // self.page_size for slot in slots]",
    ),
    Mutant("free", "page 0 can be freed", old=KNOWN, new="if not 0 <= page <= self.num_pages:"),
    Mutant(
        "free",
        "the page beyond the last can be freed",
        old=KNOWN,
        new="if not 1 <= page <= self.num_pages + 1:",
    ),
    Mutant("free", "forgets to note that it is free", old=RETURN_ALL, new="        self.stack += pages"),
    Mutant(
        "free",
        "notes that it is free, and keeps it",
        old=RETURN_ALL,
        new="        self.is_free.update(pages)",
    ),
    Mutant(
        "free",
        "slots on the stack, not pages",
        old=RETURN_ALL,
        new="        self.stack += slots\n        self.is_free.update(pages)",
    ),
    Mutant("free", "no free at all", old=RETURN_ALL, new="        pass"),
    Mutant(
        "alloc_extend", "takes page by page and loses what it has", replaces={"alloc_extend": _page_by_page}
    ),
    Mutant(
        "alloc_extend",
        "the last slot again",
        old="fill = list(range(last_slot + 1, last_slot + 1 +",
        new="fill = list(range(last_slot, last_slot +",
    ),
    Mutant("alloc_extend", "always new pages, no rest", old=BOUNDARY, new="boundary = start"),
    Mutant(
        "alloc_extend",
        "a full page has a rest, too",
        old=BOUNDARY,
        new="boundary = (start // page + 1) * page",
    ),
    Mutant(
        "alloc_extend",
        "the rest is not cut at stop",
        old="min(boundary, stop) - start",
        new="boundary - start",
    ),
    Mutant(
        "alloc_extend",
        "pages by the number of tokens alone",
        old=NEW,
        new="new = allocator.alloc(-(-(stop - start) // page) * page)",
    ),
    Mutant(
        "alloc_extend",
        "the last page is dropped",
        old=NEW,
        new="new = allocator.alloc(missing // page * page)",
    ),
    Mutant(
        "alloc_extend",
        "the last page is given out whole",
        old="return fill + new[:missing]",
        new="return fill + new",
    ),
    Mutant(
        "alloc_extend",
        "one page in reserve",
        old=NEW,
        new="new = allocator.alloc((missing // page + 1) * page)",
    ),
    Mutant(
        "alloc_extend",
        "new pages first, then the rest",
        old="return fill + new[:missing]",
        new="return new[:missing] + fill",
    ),
    Mutant(
        "alloc_extend",
        "gives up when the pool is full, whatever is needed",
        old=NEW,
        new=NEW + " if allocator.available else None",
    ),
    Mutant(
        "alloc_extend",
        "backwards is nothing to do",
        old='raise ValueError(f"cannot extend from {start} back to {stop}")',
        new="return []",
    ),
    Mutant("page_table", "slots, not pages", old=PAGES, new="pages = rows[row, :length:page_size]"),
    Mutant(
        "page_table",
        "a page for every token",
        old=PAGES,
        new="pages = (rows[row, :length] // page_size)[:most]",
    ),
    Mutant(
        "page_table",
        "the last page only if it is full",
        old=PAGES,
        new="pages = rows[row, : length // page_size * page_size : page_size] // page_size",
    ),
    Mutant(
        "page_table",
        "what is behind the end is kept",
        old=PAGES,
        new="pages = rows[row, : most * page_size : page_size] // page_size",
    ),
    Mutant(
        "page_table",
        "rows in order, whatever the batch",
        old=PAGES,
        new="pages = rows[list(row_ids).index(row), :length:page_size] // page_size",
    ),
    Mutant("page_table", "as wide as the whole row", old=MOST, new="most = rows.shape[1] // page_size"),
    Mutant(
        "page_table",
        "too narrow: whole pages only",
        old=MOST,
        new="most = max(1, max(length // page_size for length in lengths))",
    ),
    Mutant(
        "page_table",
        "unused entries are -1",
        old="np.zeros((len(row_ids), most), dtype=np.int32)",
        new="np.full((len(row_ids), most), -1, dtype=np.int32)",
    ),
    Mutant(
        "page_table",
        "starts one token late",
        old=PAGES,
        new="pages = rows[row, page_size - 1 : length : page_size] // page_size",
    ),
    Mutant(
        "page_table",
        "each page once, in rising order",
        old=PAGES,
        new="pages = np.unique(rows[row, :length] // page_size)",
    ),
    Mutant("page_table", "divided as floats", old="dtype=np.int32", new="dtype=np.float64"),
    Mutant("claim_of_the_edge", "believes the claim", replaces=_claims(claim_holds=True)),
    Mutant("claim_of_the_edge", "rounds up", replaces=_claims(pages_above=100, tokens_above=1600)),
    Mutant("claim_of_the_edge", "shares every token", replaces=_claims(tokens_above=1587, again=0)),
    Mutant("claim_of_the_edge", "adds both halves", replaces=_claims(pages_above=157, tokens_above=2512)),
    Mutant("claim_of_the_edge", "a page is lost in the split", replaces=_claims(pages_below=57)),
    Mutant("claim_of_the_edge", "the torn page counted twice", replaces=_claims(pages_below=59)),
    Mutant("claim_of_the_edge", "the rest of the page instead of its beginning", replaces=_claims(again=13)),
    Mutant("claim_of_the_edge", "all that follows is counted as alike", replaces=_claims(again=928)),
    Mutant("claim_of_the_edge", "pages for tokens", replaces=_claims(tokens_above=99)),
    Mutant(
        "claim_of_the_edge",
        "one answer is missing",
        replaces={"claim_of_the_edge": lambda: {k: v for k, v in TRUTH.items() if k != "again"}},
    ),
]
