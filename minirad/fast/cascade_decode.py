"""Cascade attention for captured decode steps, in two Triton kernels a layer.

In the first, all queries meet the pages that their requests share, as if they were one long prompt's:
matrix products instead of many passes over memory. In the second (short_decode.py) each request goes on
from that answer with its own pages. Importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirad.fast.early_launch import let_next_begin, wait_for_previous
from minirad.fast.short_decode import ShortDecode, StepAttention, meet
from minirad.kv.kv_pool import KVPool

__all__ = ["CascadeDecode", "shared_attention"]

# The quickest that were measured (bench/LOG.md).
TILE = 64  # rows (a query head of a request each) that a program takes
BLOCK = 8192  # elements of the keys that are fetched at a time
PROGRAMS = 2  # for each processor of the card
MOST_SPLITS = 16


class CascadeDecode(StepAttention):
    """Attention of captured decode steps whose requests share their first pages.

    Args:
        own: attention to each request's own pages; only they are listed.
        table: int32 `[rows, pages]` on the device, the pages of each row.
        rows: int32 `[B]` on the device; the shared pages are read from the first of these rows.
        shared: int32 `[1]` on the device, how many tokens those are, at least 1.
    """

    name = "cascade-decode"

    def __init__(self, own: ShortDecode, table: Tensor, rows: Tensor, shared: Tensor) -> None:
        self.own, self._table, self._rows, self._shared = own, table, rows, shared
        size, group = len(rows), own.num_heads // own.num_kv_heads
        self._tiles = triton.cdiv(size * group, TILE)
        # Few queries do not suffice for all of the card's processors: then the tokens are shared out as well.
        wanted = PROGRAMS * _processors(rows.device)
        self.splits = min(max(1, wanted // (self._tiles * own.num_kv_heads)), MOST_SPLITS)
        shape = (self.splits, size, own.num_heads)
        self._answer = torch.zeros((*shape, own.head_dim), device=rows.device)
        self._lse = torch.zeros(shape, device=rows.device)

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        own, q = self.own, q.contiguous()
        shared_attention[(self._tiles, own.num_kv_heads, self.splits)](
            q, pool.k[layer_id], pool.v[layer_id], self._table, self._rows, self._shared, self._answer,
            self._lse, self._table.stride(0), len(q), scale,
            HEADS=own.num_heads, KV_HEADS=own.num_kv_heads, D=own.head_dim, PAGE=own.page_size, TILE=TILE,
            BLOCK=BLOCK // own.head_dim, SPLITS=self.splits, num_warps=4, num_stages=2, **own.launch,
        )  # fmt: skip
        return own.go_on(layer_id, q, pool, scale, (self._answer, self._lse))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def shared_attention(
    q, k_pool, v_pool, table, rows, shared, answer, lse, stride, requests, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All queries against the first `shared` tokens of one row: a program takes TILE query heads that read
    the same kv head, and one of SPLITS stretches of the tokens.

    answer: float32 `[SPLITS, requests, HEADS, D]`; lse: float32 `[SPLITS, requests, HEADS]`, to the base 2;
    minus infinity where a stretch is empty, and the answer is not written then.
    """
    if EARLY:
        let_next_begin()
    kv_head, split = tl.program_id(1), tl.program_id(2)
    pages = table + tl.load(rows).to(tl.int64) * stride
    length = tl.load(shared)
    blocks = tl.cdiv(length, BLOCK)
    each = tl.cdiv(blocks, SPLITS)
    start, stop = split * each, tl.minimum((split + 1) * each, blocks)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = row // group * HEADS + kv_head * group + row % group
    real = row < requests * group
    d = tl.arange(0, D)
    token = start * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + token // PAGE, mask=token < length, other=0).to(tl.int64)
    if EARLY:
        wait_for_previous()
    out = split * requests * HEADS + head
    if start >= stop:
        tl.store(lse + out, tl.full([TILE], float("-inf"), tl.float32), mask=real)
        return
    queries = tl.load(q + head[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, D], tl.float32)
    best, total, acc = meet(
        queries, k_pool, v_pool, pages, token, page, stop - start, length,
        kv_head, scale, best, total, acc, KV_HEADS, D, PAGE, BLOCK,
    )  # fmt: skip
    tl.store(answer + out[:, None] * D + d[None, :], acc / total[:, None], mask=real[:, None])
    tl.store(lse + out, best + tl.log2(total), mask=real)
