"""Cascade attention for decoding: what all requests of a batch share is read once, not once per request.

A batch below one node of the tree has its first pages in common, and ordinary decoding reads them again for
every request. `SharedPages` says how many pages that is, `worth_it` whether to make something of it, and
cascade_decode.py computes.

Does not look for several groups within a batch that share different beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence

from minirad.schedule.req_to_token import ReqToTokenPool

__all__ = ["LEAST_REQUESTS", "SharedPages", "worth_it"]

# Tokens that need not be read again: for fewer, one more kernel in each layer costs more than it saves
# (bench/LOG.md).
LEAST_SAVED = 1 << 15
LEAST_REQUESTS = 8  # and even if asked for, not for fewer
SCANNED = 128  # pages that are compared at a time


def worth_it(requests: int, shared: int) -> bool:
    """Whether reading `shared` tokens once instead of `requests` times is faster (bench/LOG.md)."""
    return requests >= LEAST_REQUESTS and (requests - 1) * shared >= LEAST_SAVED


class SharedPages:
    """How many first pages the rows of a batch have in common; kept from step to step.

    Only pages before each row's last token count, so that every request keeps a page of its own. Rows that
    were given out or rewritten have to be named with `forget`.
    """

    def __init__(self, rows: ReqToTokenPool, page_size: int) -> None:
        self._table, self._page = rows.rows, page_size
        self._known: set[int] = set()  # rows that agree on the first `_count` pages
        self._count = 0

    def forget(self, rows: Sequence[int]) -> None:
        """The slots in these rows have changed."""
        self._known.difference_update(rows)

    def count(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Pages that all these rows share; lengths: tokens of each, its newest included."""
        now, limit = set(rows), (min(lengths) - 1) // self._page
        fresh = now - self._known
        much = worth_it(len(now), self._count * self._page)
        if fresh and much and len(fresh) < len(now):
            one = next(iter(now - fresh))
            self._count = self._agree([one, *fresh], min(limit, self._count))
        elif fresh or (len(now) < len(self._known) and not much):
            # Without the rows that have gone it may be more; where it is much already, nothing is gained.
            self._count = self._agree(list(now), limit)
        self._known = now
        return min(self._count, limit)

    def _agree(self, rows: list[int], limit: int) -> int:
        """The first pages, up to `limit`, that are equal in all rows."""
        for begin in range(0, limit, SCANNED):
            end = min(begin + SCANNED, limit)
            slots = self._table[rows, begin * self._page : end * self._page : self._page]
            equal = (slots == slots[0]).all(axis=0)
            if not equal.all():
                return begin + int(equal.argmin())
        return limit
