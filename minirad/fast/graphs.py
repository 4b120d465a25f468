"""Decoding as a CUDA graph: one launch for a whole step instead of some two hundred.

A decode step does the same kernels in the same order each time; only numbers change. So it is captured
once for each of a few batch sizes, and then replayed: the step's numbers go into buffers that the graph
reads (one copy), the batch is padded to the next captured size with entries that read and write the
dummy page, and what comes out is cut to the real size.

Beside the graphs lies a copy of the req_to_token table on the device, in pages. The host's stays the
authority: a row that was given out or rewritten is taken over whole at its next decode step, and the one
page that a step may add is entered by the kernel that lists the pages for attention.

There is a graph of its own for each kind of attention: cut for short requests or for longer ones
(short_decode.py), and with what all requests of a batch share read once for all (cascade.py).

Only for FlashInfer on an NVIDIA GPU with fused ops. Prompts, and batches with prompts in them, are not
captured: they come in any shape, and their kernels are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirad.fast.cascade import LEAST_REQUESTS, SharedPages, worth_it
from minirad.fast.flashinfer import FlashInferAttention
from minirad.fast.fused_llama import FusedLlama, is_part
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

__all__ = ["DecodeGraphs", "StepOutput", "batch_sizes"]

MOST_PAGES = 1 << 25  # listed for one batch (128 MiB of int32): beyond that a step is not captured


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """Of B requests: logits `[B, vocab]` in the weights' type or float32, and float64 `[2, B]` of each the
    likeliest token and its log-probability. Views of buffers: good until the next step.
    """

    logits: Tensor
    greedy: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """What a captured step reads: int32 views of one buffer, B entries each (indptr B + 1, shared 1)."""

    packed: Tensor
    token_ids: Tensor
    positions: Tensor
    out_slots: Tensor
    rows: Tensor
    last_page_len: Tensor
    indptr: Tensor
    shared: Tensor  # first tokens that are the same in all rows, if attention is a cascade

    @classmethod
    def of(cls, size: int, device: torch.device) -> _Numbers:
        packed = torch.zeros(6 * size + 2, dtype=torch.int32, device=device)
        return cls(packed, *torch.split(packed, [size] * 5 + [size + 1, 1]))


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A graph for batches of up to `size` requests."""

    size: int
    numbers: _Numbers
    attention: Any  # whose buffers the graph uses
    graph: Any
    logits: Tensor
    greedy: Tensor


def batch_sizes(most: int) -> list[int]:
    """The sizes that are captured: 1, 2, 4, 8, 16, 24, 32, then every 32; the last one is `most`."""
    sizes = [1, 2, 4, 8, 16, 24, *range(32, most + 1, 32)]
    return sorted({size for size in sizes if size < most} | {most})


class DecodeGraphs:
    """Captures decode steps when they are first needed, and runs them.

    Args:
        rows: the host's req_to_token table. page_size: slots of its pages.
        cascade: read what all requests share once for all; None: where that was measured faster.
    """

    def __init__(
        self, model: FusedLlama, pool: KVPool, attention: FlashInferAttention, rows: ReqToTokenPool,
        page_size: int, cascade: bool | None = None,
    ) -> None:  # fmt: skip
        self._model, self._pool, self._attention = model, pool, attention
        self._rows, self._page = rows, page_size
        most, context = rows.rows.shape
        self._sizes = batch_sizes(most)
        device = pool.device
        # One more row, for padding: its only page is the dummy.
        self._table = torch.zeros((most + 1, -(-context // page_size)), dtype=torch.int32, device=device)
        self._indices = torch.zeros(min(self._table.numel(), MOST_PAGES), dtype=torch.int32, device=device)
        self._captured: dict[tuple[int, bool, int], _Captured] = {}  # by size, and kind of attention
        self._cascade, self._shared = cascade, SharedPages(rows, page_size)
        on_gpu = device.type == "cuda"
        pinned = [torch.zeros(6 * most + 2, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._pinned = [buffer.numpy() for buffer in pinned]
        self._keep, self._turn = pinned, 0
        self._memory: Any = None  # one pool of memory for all graphs: they never run together
        rows.rewritten.update(range(most))

    @staticmethod
    def possible(model: LlamaModel, attention: Any) -> bool:
        """Whether decode steps of this model can be captured."""
        if not isinstance(model, FusedLlama) or not isinstance(attention, FlashInferAttention):
            return False
        return bool(_kernels_of("short_decode").ShortDecode.fits(*attention.heads[:3]))

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether the pages of all requests can be listed, each with one more token; and of the padding."""
        pages = sum(-(-(request.kv_len + 1) // self._page) for request in requests)
        return pages + self._size(len(requests)) - len(requests) <= len(self._indices)

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def run(self, requests: Sequence[Request], token_ids: Tensor | None = None) -> StepOutput:
        """Computes the last token of each request (its slot is in its row), all at once.

        token_ids: these tokens, `[B]` on the device, where the host does not know them yet.
        """
        size = self._size(len(requests))
        self._take_over(requests)
        skip = self._pages_to_share(requests)
        kind = self._kind(requests, size, skip)
        key = (size, *kind)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(size, kind, requests, skip, token_ids)
        else:
            self._prepare(captured.numbers, requests, skip, token_ids)
        captured.graph.replay()
        count = len(requests)
        return StepOutput(captured.logits[:count], captured.greedy[:, :count])

    def to_host(self, chosen: Tensor, arriving: Tensor) -> None:
        """Tokens and log-probabilities `[2, B]` to pinned memory, behind the step."""
        self._model.kernels.to_host(chosen, arriving)

    def _pages_to_share(self, requests: Sequence[Request]) -> int:
        """How many first pages are read once for all; 0 for the usual way."""
        few = len(requests) < LEAST_REQUESTS
        if few or self._cascade is False:
            return 0
        count = self._shared.count([r.row for r in requests], [r.kv_len for r in requests])
        worth = worth_it(len(requests), count * self._page) or (self._cascade is True and count > 0)
        return count if worth else 0

    def _take_over(self, requests: Sequence[Request]) -> None:
        """Copies rewritten rows to the device, as pages."""
        changed = [request for request in requests if request.row in self._rows.rewritten]
        if not changed:
            return
        numbers = np.array([request.row for request in changed])
        self._shared.forget(numbers.tolist())
        longest = max(request.kv_len for request in changed)
        pages = (self._rows.rows[numbers, : longest : self._page] // self._page).astype(np.int32)
        index = torch.from_numpy(numbers).to(self._table.device)
        self._table[index, : pages.shape[1]] = torch.from_numpy(pages).to(self._table.device)
        self._rows.rewritten.difference_update(numbers.tolist())

    def _prepare(
        self, numbers: _Numbers, requests: Sequence[Request], skip: int, token_ids: Tensor | None,
    ) -> None:  # fmt: skip
        """This step's numbers into the buffers.

        skip: so many first pages are the shared ones. token_ids: see `run`.
        """
        size, count = len(numbers.rows), len(requests)
        rows = np.array([request.row for request in requests])
        lengths = np.array([request.kv_len for request in requests])
        sent = self._host_buffer(size)
        host, indptr, sent[-1] = sent[: 5 * size].reshape(5, size), sent[5 * size : -1], skip * self._page
        host[:] = 0
        if token_ids is None:
            host[0, :count] = [request.last_token for request in requests]
        host[1, :count] = lengths - 1
        host[2, :count] = self._rows.rows[rows, lengths - 1]
        host[3, :count] = rows
        host[3, count:] = len(self._table) - 1
        counts = np.ones(size, dtype=np.int32)
        counts[:count] = -(-lengths // self._page) - skip
        indptr[0] = 0
        np.cumsum(counts, out=indptr[1:])
        host[4] = 1
        host[4, :count] = lengths - (counts[:count] + skip - 1) * self._page
        numbers.packed.copy_(torch.from_numpy(sent), non_blocking=True)
        self._model.kernels.fill_pages(
            self._table, numbers.rows, numbers.indptr, numbers.out_slots, self._indices, self._page,
            int(counts.max()), skip, token_ids, numbers.token_ids,
        )  # fmt: skip

    def _host_buffer(self, size: int) -> Any:
        """int32 for a step's numbers, in pinned memory: from any other a copy waits for the whole stream.

        Two take turns: when one's turn comes again, the step that it was filled for has been read.
        """
        self._turn = 1 - self._turn
        return self._pinned[self._turn][: 6 * size + 2]

    def _kind(self, requests: Sequence[Request], size: int, skip: int) -> tuple[bool, int]:
        """Which attention is fastest: whether a cascade, and cut for how many of a request's own tokens."""
        longest = max(request.kv_len for request in requests) - skip * self._page
        return skip > 0, _kernels_of("short_decode").cut_until(size, longest)

    def _new_attention(self, numbers: _Numbers, shared: bool, until: int) -> Any:
        lists = numbers.indptr, self._indices, numbers.last_page_len
        own = _kernels_of("short_decode").ShortDecode(*self._attention.heads, *lists, self._page, until)
        if not shared:
            return own
        return _kernels_of("cascade_decode").CascadeDecode(own, self._table, numbers.rows, numbers.shared)

    def _capture(
        self, size: int, kind: tuple[bool, int], requests: Sequence[Request], skip: int,
        token_ids: Tensor | None,
    ) -> _Captured:  # fmt: skip
        """Records a step for `size` requests; the first of it is these requests' own."""
        device = self._pool.device
        numbers = _Numbers.of(size, device)
        attention = self._new_attention(numbers, *kind)
        self._prepare(numbers, requests, skip, token_ids)
        model: Any = self._model

        def step() -> tuple[Tensor, Tensor]:
            logits = model.compute(numbers.token_ids, numbers, self._pool, attention)
            return logits, model.kernels.greedy(logits)

        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(2):  # compiles kernels, chooses algorithms; writes the same K and V again
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Sums over several ranks are captured, too; NCCL's own threads look at the device meanwhile.
        mode = "thread_local" if is_part(self._model) else "global"
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
            logits, greedy = step()
        if self._memory is None:
            self._memory = graph.pool()
        return _Captured(size, numbers, attention, graph, logits, greedy)

    def check(self) -> None:
        """The device's table is the host's, for all rows that are not to be taken over anyway.

        For tests: it waits for the device. AssertionError names the row.
        """
        table = self._table.cpu().numpy()
        for row in set(range(len(self._rows.rows))) - self._rows.rewritten:
            host = self._rows.rows[row, :: self._page] // self._page
            used = np.flatnonzero(host)
            assert np.array_equal(table[row, used], host[used]), f"row {row} differs on the device"


def _kernels_of(module: str) -> Any:
    """Imported when needed, because it needs Triton."""
    return import_module(f"minirad.fast.{module}")
