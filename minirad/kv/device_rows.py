"""The device's copy of the request rows (`req_to_token`): which slot holds token i of row r.

The host's numpy table is authoritative: the scheduler writes there and only there. On a CPU the
tensor here is that very memory; on any other device it is a mirror that is brought up to date span
by span. This module decides nothing about rows; it does not allocate, free or check them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["DeviceRows"]


class DeviceRows:
    """A tensor that mirrors `host_rows` (int64 `[max_rows, max_context]`) on `device`.

    Attributes:
        tensor: int64 `[max_rows, max_context]` on the device; shares the host's memory on a CPU.

    Raises:
        ValueError: if `host_rows` is not a two-dimensional int64 array.
    """

    def __init__(self, host_rows: npt.NDArray[np.int64], device: torch.device | str) -> None:
        if host_rows.ndim != 2 or host_rows.dtype != np.int64:
            raise ValueError(
                "DeviceRows: host_rows must be int64 [max_rows, max_context], "
                f"got {host_rows.dtype} {list(host_rows.shape)}"
            )
        self._host = torch.from_numpy(host_rows)
        self._shared = torch.device(device).type == "cpu"
        self.tensor: Tensor = self._host if self._shared else self._host.to(device)

    def sync(self, row: int, start: int, stop: int) -> None:
        """Bring tokens `[start, stop)` of `row` up to date on the device."""
        if not self._shared:
            self.tensor[row, start:stop].copy_(self._host[row, start:stop])

    def sync_many(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Bring many `(row, start, stop)` spans up to date with one copy to the device."""
        if self._shared:
            return
        pieces = [(row, np.arange(start, stop)) for row, start, stop in spans if start < stop]
        if not pieces:
            return
        width = self._host.shape[1]
        flat = torch.from_numpy(np.concatenate([row * width + columns for row, columns in pieces]))
        # index and value travel together: a decode step of many rows costs one transfer, not one
        # per row
        both = torch.stack((flat, self._host.view(-1)[flat])).to(self.tensor.device)
        self.tensor.view(-1).index_copy_(0, both[0], both[1])
