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


def _instead(name: str, about: str, code: str) -> Mutant:
    """`code` defines the function `name`; the right one is at hand as _right_<name>."""
    return Mutant(name, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


def _wrapped(breaks: str, about: str, methods: str) -> Mutant:
    """A subclass of the right allocator with these methods instead."""
    code = "\n".join(f"    {line}" if line else "" for line in methods.strip().splitlines())
    return Mutant(
        breaks,
        about,
        "def alloc_extend(",
        f"_Right = PageAllocator\n\n\nclass PageAllocator(_Right):\n{code}\n\n\ndef alloc_extend(",
    )


PAGE_POWER = "(self.page_size.bit_length() - 1)"
MUTANTS += [
    # ------------------------------------------------------------ alloc
    # two allocators: the second is made while the first has handed out pages
    _wrapped(
        "alloc",
        "free pages belong to the class: a second pool takes the first one's",
        """
def __init__(self, num_pages, page_size=1):
    super().__init__(num_pages, page_size)
    type(self).stack, type(self).is_free = self.stack, self.is_free
    del self.stack, self.is_free
""",
    ),
    # two allocators with pages of different sizes
    _wrapped(
        "alloc",
        "the page size belongs to the class",
        """
def __init__(self, num_pages, page_size=1):
    super().__init__(num_pages, page_size)
    type(self).page_size = page_size
    del self.page_size
""",
    ),
    # a = pool.alloc(4); pool.alloc(4); look at a
    _wrapped(
        "alloc",
        "returns one list again and again",
        """
_out = []

def alloc(self, num_tokens):
    slots = super().alloc(num_tokens)
    if slots is None:
        return None
    self._out[:] = slots
    return self._out
""",
    ),
    # alloc(0).append(1); alloc(0)
    _wrapped(
        "alloc",
        "one empty list for all who ask for nothing",
        """
_nothing = []

def alloc(self, num_tokens):
    return super().alloc(num_tokens) or (self._nothing if num_tokens == 0 else None)
""",
    ),
    # pages of 3: alloc(3) is refused, alloc(4) is not
    Mutant(
        "alloc",
        "whole pages by a mask: for powers of two only",
        old="if num_tokens < 0 or num_tokens % self.page_size:",
        new="if num_tokens < 0 or num_tokens & (self.page_size - 1):",
    ),
    # two pages, one of them used and given back: both are free, alloc of two pages
    _wrapped(
        "alloc",
        "new pages and pages that came back are never given together",
        """
def alloc(self, num_tokens):
    back = getattr(self, "back", [])
    fresh = [page for page in self.stack if page not in back]
    count = num_tokens // self.page_size
    if num_tokens >= 0 and num_tokens % self.page_size == 0 and max(len(fresh), len(back)) < count:
        return None
    slots = super().alloc(num_tokens)
    self.back = [page for page in back if page in self.is_free]
    return slots

def free(self, slots):
    super().free(slots)
    self.back = sorted({*getattr(self, "back", []), *(slot // self.page_size for slot in slots)})
""",
    ),
    # a pool of more than 127 pages, or 32767 slots
    _wrapped(
        "alloc",
        "slots are int16",
        """
def alloc(self, num_tokens):
    slots = super().alloc(num_tokens)
    return slots and [int(slot) for slot in np.asarray(slots).astype(np.int16)]
""",
    ),
    # 3 pages, alloc(2 pages), free one: the other one must not come again
    _wrapped(
        "alloc",
        "when all is given back but one page, everything is new again",
        """
def free(self, slots):
    super().free(slots)
    if len(self.stack) == self.num_pages - 1 > 1:
        self.stack = list(range(self.num_pages, 0, -1))
        self.is_free = set(self.stack)
""",
    ),
    # ------------------------------------------------------------ free
    Mutant(
        "free",
        "looks at the lowest page and at the highest",
        old="        for page in pages:\n            if not 1",
        new="        for page in {*pages[:1], *pages[-1:]}:\n            if not 1",
    ),
    # pages of 3
    Mutant(
        "free",
        "the page by a shift: for powers of two only",
        old=SORTED,
        new=f"pages = sorted({{slot >> {PAGE_POWER} for slot in slots}}, reverse=True)",
    ),
    # a pool of which nothing was handed out
    Mutant(
        "free",
        "what was never handed out may come back",
        old="if page in self.is_free:",
        new="if page in self.is_free and len(self.is_free) < self.num_pages:",
    ),
    # two pools; a page that is free in one of them
    _wrapped(
        "free",
        "what is free is noted for all pools together",
        """
_all_free = set()

def __init__(self, num_pages, page_size=1):
    super().__init__(num_pages, page_size)
    self._all_free.update(self.is_free)
    self.is_free = self._all_free

def alloc(self, num_tokens):
    self.is_free |= set(self.stack)
    return super().alloc(num_tokens)
""",
    ),
    _wrapped(
        "free",
        "how many pages there are is noted for all pools together",
        """
def __init__(self, num_pages, page_size=1):
    super().__init__(num_pages, page_size)
    type(self).num_pages = num_pages
    del self.num_pages
""",
    ),
    # all slots of a page and a page more: the same slot twice among many
    _wrapped(
        "free",
        "the same slot twice only counts within the first page",
        """
def free(self, slots):
    first = [slot for slot in slots if slot // self.page_size == slots[0] // self.page_size]
    rest = [slot for slot in slots if slot // self.page_size != slots[0] // self.page_size]
    super().free([*first, *set(rest)])
""",
    ),
    # ------------------------------------------------------------ alloc_extend
    # pages of 3
    Mutant(
        "alloc_extend",
        "the boundary by a mask: for powers of two only",
        old=BOUNDARY,
        new="boundary = (start + page - 1) & ~(page - 1)",
    ),
    # an allocator whose free pages do not lie side by side
    Mutant(
        "alloc_extend",
        "as if new pages lay side by side",
        old="    return fill + new[:missing]",
        new="    return fill + (list(range(new[0], new[0] + missing)) if new else [])",
    ),
    # 16 pages at once
    _instead(
        "alloc_extend",
        "sorts the new slots",
        """
def alloc_extend(allocator, start, stop, last_slot):
    slots = _right_alloc_extend(allocator, start, stop, last_slot)
    fill = min(-start % allocator.page_size, stop - start)
    return slots and slots[:fill] + sorted(slots[fill:])
""",
    ),
    # stop < start within one page
    Mutant(
        "alloc_extend",
        "going back within a page is nothing to do",
        old="    if stop < start:\n",
        new="    if stop // allocator.page_size < start // allocator.page_size:\n",
    ),
    # ------------------------------------------------------------ page_table
    # page numbers above 32767
    Mutant(
        "page_table",
        "int16",
        old="table = np.zeros((len(row_ids), most), dtype=np.int32)",
        new="table = np.zeros((len(row_ids), most), dtype=np.int16)",
    ),
    Mutant(
        "page_table",
        "through float32",
        old=PAGES,
        new="pages = rows[row, :length:page_size].astype(np.float32) // page_size",
    ),
    # pages of 3
    Mutant(
        "page_table",
        "by a shift: for powers of two only",
        old=PAGES,
        new="pages = rows[row, :length:page_size] >> (page_size.bit_length() - 1)",
    ),
    # the same batch twice, with other rows
    _instead(
        "page_table",
        "remembers batches",
        """
_KNOWN = {}


def page_table(rows, row_ids, lengths, page_size):
    key = (tuple(row_ids), tuple(lengths), page_size, rows.shape)
    if key not in _KNOWN:
        _KNOWN[key] = _right_page_table(rows, row_ids, lengths, page_size)
    return _KNOWN[key]
""",
    ),
    # two calls, then look at what the first returned
    _instead(
        "page_table",
        "returns one array again and again",
        """
_OUT = np.zeros((256, 4096), dtype=np.int32)


def page_table(rows, row_ids, lengths, page_size):
    table = _right_page_table(rows, row_ids, lengths, page_size)
    out = _OUT[: table.shape[0], : table.shape[1]]
    out[:] = table
    return out
""",
    ),
]
