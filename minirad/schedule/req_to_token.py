"""The req_to_token pool: a row for every running request says in which slot each token's KV lies.

`rows[r, i]` is the slot of token i of the request in row r. The table lives on the host and
is all there is: what the device has to know of a batch goes over with the batch (attention/metadata.py).
A page table is a strided view of a row: `rows[r, :length:page_size] // page_size`.
"""

from __future__ import annotations

import heapq

import numpy as np


class ReqToTokenPool:
    """max_running rows of max_context slots, int64. Rows are handed out lowest first."""

    def __init__(self, max_running: int, max_context: int) -> None:
        self.rows = np.zeros((max_running, max_context), dtype=np.int64)
        # Rows that a device's copy of this table (runner.py) has to take over whole; what a decode step
        # appends it finds out itself.
        self.rewritten: set[int] = set(range(max_running))
        self._free = list(range(max_running))

    @property
    def available(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def alloc(self) -> int:
        """The lowest free row; ValueError when all are held (ask `available` first)."""
        if not self._free:
            raise ValueError(f"all {len(self.rows)} rows are held")
        row = heapq.heappop(self._free)
        self.rewritten.add(row)
        return row

    def free(self, row: int) -> None:
        """Gives a row back. It is zeroed: what is read by mistake is the dummy page."""
        if row in self._free or not 0 <= row < len(self.rows):
            raise ValueError(f"row {row} is not held")
        self.rows[row] = 0
        heapq.heappush(self._free, row)
