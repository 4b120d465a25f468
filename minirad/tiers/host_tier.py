"""The second tier: KV that was evicted from the device, kept in host memory.

Laid out token first (`[slots, layers, 2, kv_heads, head_dim]`), so that a run of neighbouring host slots
is one piece of memory and goes over in one copy. With a GPU the host's part is pinned and copies run on
a stream of their own, beside the computing:

    backup   the side stream waits for what was computed so far, gathers the slots of all layers on the
             device, and copies the pieces out
    load     the side stream copies the pieces in and scatters them over the layers; `fence` makes the
             next forward pass wait for that, and nothing else does

On a CPU there is nothing to run beside, and a copy is over when it returns. This module copies what it
is told to; what is copied, when, and whether the slots are still the same node's, is the tree's business
(hiradix_cache.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirad.cache.node import Slots
from minirad.config import EngineConfig
from minirad.errors import HostCopyError
from minirad.kv.kv_pool import KVPool
from minirad.tiers.hiradix_cache import Copy, NothingToCopy

__all__ = ["HostTier"]


class HostTier:
    """The Copier between a KVPool and `config.host_kv_tokens` slots (and a dummy page) in host memory.

    Attributes:
        kv: `[host slots, layers, 2 (keys, values), kv_heads, head_dim]`, the pool's dtype, on the host.

    Raises:
        ValueError: if the host has not that much memory.
    """

    def __init__(self, pool: KVPool, config: EngineConfig) -> None:
        self.pool = pool
        slots = config.host_kv_tokens + config.page_size
        shape = (slots, pool.num_layers, 2, pool.num_kv_heads, pool.head_dim)
        on_gpu = pool.device.type == "cuda"
        try:
            self.kv = torch.zeros(shape, dtype=pool.dtype, pin_memory=on_gpu)
        except RuntimeError as error:
            size = slots * pool.bytes_per_token / 1e9
            raise ValueError(
                f"host_kv_tokens={config.host_kv_tokens} take {size:.1f} GB of host memory: {error}"
            ) from error
        self._stream: Any = None
        if on_gpu:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._loads: list[Any] = []  # events that the next forward pass has to wait for

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.kv.numel() * self.kv.element_size()

    def backup(self, device_slots: Slots, host_slots: Slots) -> Copy:
        """Begins to copy `device_slots` of all layers to `host_slots` (int64, as many)."""
        try:
            if self._stream is None:
                self._out(device_slots, host_slots)
                return NothingToCopy()
            self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
            with torch.cuda.stream(self._stream):
                self._out(device_slots, host_slots)
                return _StreamCopy(self._stream.record_event())
        except torch.cuda.OutOfMemoryError as error:
            raise HostCopyError(f"{len(device_slots)} tokens could not be gathered: {error}") from error

    def load(self, host_slots: Slots, device_slots: Slots) -> Copy:
        """Begins to copy `host_slots` into `device_slots` of all layers."""
        try:
            if self._stream is None:
                self._in(host_slots, device_slots)
                return NothingToCopy()
            # What still reads or writes these slots was launched before.
            self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
            with torch.cuda.stream(self._stream):
                self._in(host_slots, device_slots)
                event = self._stream.record_event()
        except torch.cuda.OutOfMemoryError as error:
            raise HostCopyError(f"{len(host_slots)} tokens could not be loaded: {error}") from error
        self._loads.append(event)
        return _StreamCopy(event)

    def fence(self) -> None:
        """What is computed from now on waits for the loads that were begun."""
        for event in self._loads:
            torch.cuda.current_stream(self.pool.device).wait_event(event)
        self._loads = []

    # ------------------------------------------------------------ for a tier below (disk_cache.py)

    def copied(self, host_slots: Slots) -> Tensor:
        """A copy of what lies in host slots to which no copy is under way: `[n, *kv.shape[1:]]`."""
        return self.kv[torch.from_numpy(np.array(host_slots))]

    def fill(self, host_slots: Slots, kv: Tensor) -> None:
        """Puts KV of that shape into host slots that no copy reads."""
        self.kv[torch.from_numpy(np.array(host_slots))] = kv

    def fetched(self, device_slots: Slots) -> Tensor:
        """A copy of what lies in slots of the device, of that shape, on the host; waits for it."""
        return self._gathered(device_slots).cpu()

    def _out(self, device_slots: Slots, host_slots: Slots) -> None:
        gathered = self._gathered(device_slots)
        for start, stop, at in _runs(host_slots):
            self.kv[at : at + stop - start].copy_(gathered[start:stop], non_blocking=True)

    def _gathered(self, device_slots: Slots) -> Tensor:
        index = self._index(device_slots)
        parts = [
            t.index_select(0, index) for pair in zip(self.pool.k, self.pool.v, strict=True) for t in pair
        ]
        return torch.stack(parts, dim=1).view(len(index), *self.kv.shape[1:])

    def _in(self, host_slots: Slots, device_slots: Slots) -> None:
        index = self._index(device_slots)
        arrived: Tensor = torch.empty(
            (len(index), *self.kv.shape[1:]), dtype=self.kv.dtype, device=self.pool.device
        )
        for start, stop, at in _runs(host_slots):
            arrived[start:stop].copy_(self.kv[at : at + stop - start], non_blocking=True)
        for layer in range(self.pool.num_layers):
            self.pool.write(layer, index, arrived[:, layer, 0], arrived[:, layer, 1])

    def _index(self, slots: Slots) -> Tensor:
        return torch.from_numpy(np.array(slots)).to(self.pool.device)


class _StreamCopy:
    """A Copy on a side stream: over when its event has been reached."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> bool:
        self._event.synchronize()
        return True


def _runs(slots: Slots) -> list[tuple[int, int, int]]:
    """Stretches of neighbouring slots: (start, stop) in the list, and the first slot."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    bounds = [0, *breaks.tolist(), len(slots)]
    return [(a, b, int(slots[a])) for a, b in pairwise(bounds) if b > a]
