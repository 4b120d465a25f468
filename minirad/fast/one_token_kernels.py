"""Triton kernels for one token: each reads its matrix once and does what lies before and after it.

A decode step of one request takes as long as reading the weights from memory. So nothing else may take
time: the norm is part of the product that follows it, rotation and storing, silu and the residual of the
one before. And each kernel fetches its first weights before it waits for what the kernel in front of it
computes (early_launch.py), so that the memory is busy from one matrix to the next.

Sums are taken in float32 and rounded once, when they are written: between a norm and its product nothing
is rounded, unlike in torch. one_token.py launches these; importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from minirad.fast.early_launch import let_next_begin, wait_for_previous

__all__ = ["gated_product", "head_product", "product_added", "qkv_stored"]


@triton.jit
def _tile(w, rows, live, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of a matrix `[?, K]`, `[len(rows), BLOCK_K]`: each byte is read once and not kept in the cache."""
    inside = live[:, None]
    if K < BLOCK_K:
        inside = inside & (k[None, :] < K)
    at = w + rows[:, None].to(tl.int64) * K + k[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _normed(x, g, k, eps, K: tl.constexpr):
    """x times g, not yet divided by x's root mean square; and one over that."""
    v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    return v * g, tl.rsqrt(tl.sum(v * v, 0) / K + eps)


@triton.jit
def _times(tile, h):
    return tl.sum(tile.to(tl.float32) * h[None, :], 1)


@triton.jit
def _two(both, COUNT: tl.constexpr):
    """Elements 0, 2, 4, ... and 1, 3, 5, ..."""
    return tl.split(tl.reshape(both, [COUNT, 2]))


@triton.jit
def qkv_stored(
    x, norm, w, bias, cos, sin, positions, slots, q_out, k_pool, v_pool, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token's q, k, v from its hidden state: q goes to `q_out`, k and v to the token's slot.

    A program takes PAIRS pairs of rows which the rotation mixes, all of one head.
    """
    if EARLY:
        let_next_begin()
    start = tl.program_id(0) * PAIRS
    head = start // HALF
    i = tl.arange(0, 2 * PAIRS)
    rows = head * 2 * HALF + start % HALF + i // 2 + i % 2 * HALF
    k = tl.arange(0, BLOCK_K)
    tile = _tile(w, rows, i >= 0, k, K, BLOCK_K)
    g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous()
    position, slot = tl.load(positions).to(tl.int64), tl.load(slots).to(tl.int64)
    h, scale = _normed(x, g, k, eps, K)
    at = start % HALF + tl.arange(0, PAIRS)
    c, s = tl.load(cos + position * HALF + at), tl.load(sin + position * HALF + at)
    both = _times(tile, h) * scale
    if HAS_BIAS:
        both += tl.load(bias + rows).to(tl.float32)
    low, high = _two(both, PAIRS)
    if head < HEADS + KV_HEADS:
        low, high = low * c - high * s, high * c + low * s
    if head < HEADS:
        to = q_out + head * 2 * HALF
    elif head < HEADS + KV_HEADS:
        to = k_pool + (slot * KV_HEADS + head - HEADS) * 2 * HALF
    else:
        to = v_pool + (slot * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF
    tl.store(to + at, low.to(q_out.dtype.element_ty))
    tl.store(to + at + HALF, high.to(q_out.dtype.element_ty))


@triton.jit
def product_added(
    h, w, bias, x, N,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x `[N]` += w `[N, K]` times h `[K]`, in place."""
    if EARLY:
        let_next_begin()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    k = tl.arange(0, BLOCK_K)
    tile = _tile(w, rows, live, k, K, BLOCK_K)
    if EARLY:
        wait_for_previous()
    old = tl.load(x + rows, mask=live, other=0.0).to(tl.float32)
    v = tl.load(h + k, mask=k < K, other=0.0).to(tl.float32)
    total = _times(tile, v) + old
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    tl.store(x + rows, total.to(x.dtype.element_ty), mask=live)


@triton.jit
def gated_product(
    x, norm, w, bias, out, N, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out `[N]` = silu(gate) * up; gate and up are rows `[0, N)` and `[N, 2N)` of w times the norm of x.

    A program takes TURNS groups of rows one after another and fetches the next while it adds up one.
    """
    if EARLY:
        let_next_begin()
    first = tl.program_id(0) * ROWS * TURNS
    i = tl.arange(0, 2 * ROWS)
    k = tl.arange(0, BLOCK_K)
    tile = _tile(w, first + i // 2 + i % 2 * N, first + i // 2 < N, k, K, BLOCK_K)
    g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous()
    h, scale = _normed(x, g, k, eps, K)
    for turn in range(TURNS):
        end = N if turn + 1 < TURNS else 0  # nothing is fetched after the last
        ahead = first + ROWS + i // 2
        following = _tile(w, ahead + i % 2 * N, ahead < end, k, K, BLOCK_K)
        both = _times(tile, h) * scale
        if HAS_BIAS:
            at = first + i // 2
            both += tl.load(bias + at + i % 2 * N, mask=at < N, other=0.0).to(tl.float32)
        a, b = _two(both, ROWS)
        rows = first + tl.arange(0, ROWS)
        tl.store(out + rows, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=rows < N)
        first += ROWS
        tile = following


@triton.jit
def head_product(
    x, norm, w, out, N, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out `[N]` (float32) = w `[N, K]` times the norm of x. TURNS: as in `gated_product`."""
    if EARLY:
        let_next_begin()
    rows = tl.program_id(0) * ROWS * TURNS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    tile = _tile(w, rows, rows < N, k, K, BLOCK_K)
    g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous()
    h, scale = _normed(x, g, k, eps, K)
    for turn in range(TURNS):
        end = N if turn + 1 < TURNS else 0
        following = _tile(w, rows + ROWS, rows + ROWS < end, k, K, BLOCK_K)
        tl.store(out + rows, _times(tile, h) * scale, mask=rows < N)
        rows += ROWS
        tile = following
