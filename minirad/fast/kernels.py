"""Small fused kernels for a GPU, in Triton: what lies between the matrix products of a Llama layer.

A decode step computes little and launches much: norm, residual, rotation, writing keys and values, gate.
Each is one kernel here instead of five to ten of torch's. The arithmetic is that of model/llama.py, in
float32 between reading and writing, with the same places of rounding; sums are taken in another order,
so results agree to rounding, not to the bit.

Imported only where there is a GPU with Triton (fused_llama.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirad.fast.early_launch import launch_options, let_next_begin, wait_for_previous

__all__ = ["add_rms_norm", "fill_pages", "greedy", "rms_norm", "rotate_and_write", "silu_mul", "to_host"]


@triton.jit
def _norm_kernel(
    x, delta, w, out, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        let_next_begin()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(w + at, mask=inside, other=0.0)
    if EARLY:
        wait_for_previous()
    h = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_DELTA:
        # The residual is rounded before it is normed, as torch's addition rounds it.
        h = (h.to(tl.float32) + tl.load(delta + row * width + at, mask=inside, other=0.0).to(tl.float32)).to(
            h.dtype
        )
        tl.store(x + row * width + at, h, mask=inside)
    f = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, 0) / width + eps)
    normed = (f * scale).to(h.dtype)
    tl.store(out + row * width + at, weight * normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[T, width]`, normed over its rows."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds delta to x in place, and norms the sum."""
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    _norm_kernel[(len(x),)](
        x, x if delta is None else delta, weight, out, width, eps, HAS_DELTA=delta is not None, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8), **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    qkv, cos, sin, slots, q, k, v,
    Q: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        let_next_begin()
        wait_for_previous()
    # One token: all of its heads, the two halves of each apart.
    token = tl.program_id(0)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    source = qkv + token.to(tl.int64) * (Q + 2 * KV) * 2 * HALF + head * 2 * HALF + at
    there = (head < Q + 2 * KV) & (at < HALF)
    first, second = tl.load(source, mask=there), tl.load(source + HALF, mask=there)
    c = tl.load(cos + token * HALF + at).to(tl.float32)
    s = tl.load(sin + token * HALF + at).to(tl.float32)
    # Each product is rounded, then their sum: so torch does it.
    kind = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    low = ((x * c).to(kind).to(tl.float32) - (y * s).to(kind).to(tl.float32)).to(kind)
    high = ((y * c).to(kind).to(tl.float32) + (x * s).to(kind).to(tl.float32)).to(kind)
    to_q = q + token.to(tl.int64) * Q * 2 * HALF + head * 2 * HALF + at
    tl.store(to_q, low, mask=head < Q)
    tl.store(to_q + HALF, high, mask=head < Q)
    slot = tl.load(slots + token).to(tl.int64)
    is_k, to_k = (head >= Q) & (head < Q + KV), k + (slot * KV + head - Q) * 2 * HALF + at
    tl.store(to_k, low, mask=is_k)
    tl.store(to_k + HALF, high, mask=is_k)
    is_v, to_v = (head >= Q + KV) & (head < Q + 2 * KV), v + (slot * KV + head - Q - KV) * 2 * HALF + at
    tl.store(to_v, first, mask=is_v)
    tl.store(to_v + HALF, second, mask=is_v)


def rotate_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rotates queries and keys, and stores keys and values in one layer of the pool.

    Args:
        qkv: `[T, heads + 2 * kv_heads, head_dim]`, contiguous.
        cos, sin: `[T, head_dim / 2]`.
        slots: int32 or int64 `[T]`.
        k, v: the pool's layer, `[slots, kv_heads, head_dim]`.

    Returns:
        the rotated queries, `[T, heads, head_dim]`.
    """
    tokens, heads, head_dim = qkv.shape
    kv = k.shape[1]
    q = torch.empty((tokens, heads - 2 * kv, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_kernel[(tokens,)](
        qkv, cos, sin, slots, q, k, v, Q=heads - 2 * kv, KV=kv, HALF=head_dim // 2,
        HEADS=triton.next_power_of_2(heads), num_warps=4, **launch_options(qkv.device),
    )  # fmt: skip
    return q


@triton.jit
def _silu_kernel(gate_up, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        let_next_begin()
        wait_for_previous()
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(gate.dtype)
    tl.store(out + row * width + at, silu * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up `[T, 2 * width]`: `[T, width]`."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_kernel[(tokens, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=4, **launch_options(out.device)
    )
    return out


@triton.jit(do_not_specialize=["known"])
def _pages_kernel(
    table, rows, indptr, slots, out, chosen, token_ids, known, stride, skip,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, stop = tl.load(indptr + entry), tl.load(indptr + entry + 1)
    row, last = tl.load(rows + entry).to(tl.int64), tl.load(slots + entry) // PAGE
    count = stop - start
    pages = tl.load(table + row * stride + skip + at, mask=at < count, other=0)
    pages = tl.where(at == count - 1, last, pages)
    tl.store(out + start + at, pages, mask=at < count)
    tl.store(table + row * stride + skip + at, pages, mask=at == count - 1)
    taken = (entry < known) & (tl.program_id(1) == 0)
    tl.store(token_ids + entry, tl.load(chosen + entry, mask=taken, other=0).to(tl.int32), mask=taken)


def fill_pages(
    table: Tensor, rows: Tensor, indptr: Tensor, slots: Tensor, out: Tensor, page_size: int, longest: int,
    skip: int = 0, chosen: Tensor | None = None, token_ids: Tensor | None = None,
) -> None:  # fmt: skip
    """Lists the pages of decoding requests in `out`, enters each one's newest page into `table`, and takes
    over the tokens that the step before has chosen.

    Args:
        table: int32 `[rows, pages]`, pages by request row, right but for the newest page.
        rows, slots: int32 `[B]`, each entry's row, and the slot of its new token.
        indptr: int32 `[B + 1]`, where each entry's pages begin in `out`.
        longest: the largest number of pages of an entry.
        skip: so many first pages of each row are left out of the lists.
        chosen, token_ids: float64, copied to the first entries of int32 `[B]`; None to leave these alone.
    """
    block = 1024
    grid = (len(rows), triton.cdiv(longest, block))
    known = 0 if chosen is None else len(chosen)
    _pages_kernel[grid](
        table, rows, indptr, slots, out, slots if chosen is None else chosen,
        slots if token_ids is None else token_ids, known, table.stride(0), skip, PAGE=page_size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "count"])
def _to_host_kernel(source, target, stride, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = tl.load(source + at // count * stride + at % count, mask=at < 2 * count)
    tl.store(target + at, found, mask=at < 2 * count)


def to_host(source: Tensor, target: Tensor) -> None:
    """Copies float64 `[2, B]` (rows contiguous) to pinned memory. For a copy by torch the next step waits
    until one engine of the card has handed over to another, and back (bench/LOG.md)."""
    count = source.shape[1]
    block = triton.next_power_of_2(2 * count)
    _to_host_kernel[(1,)](source, target, source.stride(0), count, BLOCK=block, num_warps=4)


@triton.jit
def _best_of_chunk_kernel(
    logits, best, where, total, vocab, chunks, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        let_next_begin()
        wait_for_previous()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    tl.store(best + row * chunks + chunk, top)
    tl.store(where + row * chunks + chunk, tl.min(tl.where(x == top, at, vocab), 0))
    tl.store(total + row * chunks + chunk, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _best_of_all_kernel(
    best, where, total, out, count, chunks, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        let_next_begin()
        wait_for_previous()
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < chunks
    tops = tl.load(best + row * chunks + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    places = tl.load(where + row * chunks + at, mask=inside, other=0)
    sums = tl.load(total + row * chunks + at, mask=inside, other=0.0) * tl.exp(tops - top)
    token = tl.min(tl.where((tops == top) & inside, places, 2147483647), 0)
    # Where there is NaN, any token: but one that can be looked up, as running ahead does before it is told.
    token = tl.minimum(token, vocab - 1)
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + count + row, -tl.log(tl.sum(sums, 0)).to(tl.float64))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row (the lowest of equals), and its log-probability: float64 `[2, B]`.

    logits: `[B, vocab]`. A row with a NaN has a NaN for its log-probability, and some token.
    """
    count, vocab = logits.shape
    block = 4096
    chunks = triton.cdiv(vocab, block)
    best = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
    total, where = torch.empty_like(best), torch.empty_like(best, dtype=torch.int32)
    out = torch.empty((2, count), dtype=torch.float64, device=logits.device)
    _best_of_chunk_kernel[(count, chunks)](
        logits, best, where, total, vocab, chunks, BLOCK=block, num_warps=8, **launch_options(out.device)
    )
    _best_of_all_kernel[(count,)](
        best, where, total, out, count, chunks, vocab, BLOCK=triton.next_power_of_2(chunks), num_warps=1,
        **launch_options(out.device),
    )  # fmt: skip
    return out
