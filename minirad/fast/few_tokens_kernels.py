"""Triton kernels for 2 to 128 tokens: memory is read once for all of them, who meet it in the matrix units.

As with one token, a decode step takes as long as reading the weights. A program takes 64 rows or more, the
least that the matrix units take at a time on Hopper. Where these are too few programs, each takes a stretch
of the columns, and the last one to end adds up what all have found, in the order of the stretches; or a block
of the tokens, and finds the rows in the L2 cache. No number depends on who ends first, nor on other tokens.

The norm is taken apart: its gain is multiplied in where the hidden state is written, its root mean square
divides the sums of a product at their end. So what goes into the matrix units is read as it lies.

Each kernel fetches the first columns of its rows before it waits for the kernel in front (early_launch.py).
few_tokens.py launches these; importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from minirad.fast.early_launch import let_next_begin, wait_for_previous

# A kernel that is compiled for a number of tokens that 16 divides adds up in another order than for others.
each_batch_alike = triton.jit(do_not_specialize=["M"])

__all__ = ["gained", "gated_products", "head_products", "products_added", "qkv_stored_each"]


@triton.jit
def gained(
    x, table, token_ids, gain, out, squares,
    K: tl.constexpr, BLOCK_K: tl.constexpr, LOOK_UP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out `[M, K]` = x * gain, squares `[M]` = each row's sum of squares: before a first product.

    LOOK_UP: x is written first, with each token's row of the table.
    """
    if EARLY:
        let_next_begin()
        wait_for_previous()
    token, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    if LOOK_UP:
        row = tl.load(token_ids + token).to(tl.int64)
        v = tl.load(table + row * K + k, mask=k < K, other=0.0)
        tl.store(x + token * K + k, v, mask=k < K)
    else:
        v = tl.load(x + token * K + k, mask=k < K, other=0.0)
    f = v.to(tl.float32)
    g = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + token * K + k, (f * g).to(v.dtype), mask=k < K)
    tl.store(squares + token, tl.sum(f * f, 0))


@triton.jit
def _sums(
    x, w, rows, begin, m, M,
    K: tl.constexpr, SLICE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PATIENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`rows` of w `[?, K]` times the tokens `m` of x `[M, K]`, of columns `[begin, begin + SLICE)`: float32.

    PATIENT: the next kernel may begin when the first columns are asked for.
    """
    there = m[None, :] < M
    at, from_x = w + rows.to(tl.int64)[:, None] * K + begin, x + m[None, :] * K + begin
    k = tl.arange(0, FIRST)
    first = tl.load(at + k[None, :], eviction_policy="evict_first")
    if EARLY:
        if PATIENT:
            let_next_begin()
        wait_for_previous()
    acc = tl.dot(first, tl.load(from_x + k[:, None], mask=there, other=0.0))
    k = tl.arange(0, BLOCK)
    at, from_x = at + FIRST + k[None, :], from_x + FIRST + k[:, None]
    for _ in tl.range(0, (SLICE - FIRST) // BLOCK, num_stages=STAGES):
        tile = tl.load(at, eviction_policy="evict_first")
        acc = tl.dot(tile, tl.load(from_x, mask=there, other=0.0), acc)
        at += BLOCK
        from_x += BLOCK
    return acc


@triton.jit
def _is_last(acc, parts, arrived, tile, split, SPLITS: tl.constexpr, R: tl.constexpr, MP: tl.constexpr):
    """Leaves the sums of a stretch in `parts`; whether those of all of a tile's stretches are there now."""
    at = tl.arange(0, R)[:, None] * MP + tl.arange(0, MP)[None, :]
    tl.store(parts + (tile * SPLITS + split) * R * MP + at, acc)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
    tl.debug_barrier()
    return last


@triton.jit
def _joined(parts, arrived, tile, SPLITS: tl.constexpr, R: tl.constexpr, MP: tl.constexpr):
    """The sums of all stretches, added in their order."""
    at = tl.arange(0, R)[:, None] * MP + tl.arange(0, MP)[None, :]
    total = tl.zeros([R, MP], tl.float32)
    for split in tl.static_range(SPLITS):
        # other programs wrote these while this one ran: not to be taken from its own processor's cache
        total += tl.load(parts + (tile * SPLITS + split) * R * MP + at, cache_modifier=".cg")
    tl.store(arrived + tile, 0)
    return total


@triton.jit
def _over_rms(squares, count, m, M, eps, K: tl.constexpr, MOST: tl.constexpr):
    """One over the tokens' root mean squares, from sums of squares `[count, M]`, count <= MOST."""
    tile = tl.arange(0, MOST)
    there = (tile[:, None] < count) & (m[None, :] < M)
    found = tl.load(squares + tile[:, None] * M + m[None, :], mask=there, other=0.0)
    return tl.rsqrt(tl.sum(found, 0) / K + eps)


@triton.jit
def _two(both, R: tl.constexpr, MP: tl.constexpr):
    """Rows 0, 2, 4, ... and 1, 3, 5, ..."""
    return tl.split(tl.permute(tl.reshape(both, [R // 2, 2, MP]), (0, 2, 1)))


@each_batch_alike
def products_added(
    h, w, bias, x, gain, out, squares, parts, arrived, M, N,
    K: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, MP: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x `[M, N]` += h `[M, K]` times w `[N, K]` transposed; out = x * gain, squares `[N / R, M]` of x."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, m = tile * R + tl.arange(0, R), block * MP + tl.arange(0, MP)
    begin = split * (K // SPLITS)
    acc = _sums(h, w, rows, begin, m, M, K, K // SPLITS, FIRST, BLOCK, STAGES, True, EARLY)
    if SPLITS > 1:
        home = block * tl.num_programs(0) + tile
        if not _is_last(acc, parts, arrived, home, split, SPLITS, R, MP):
            return
        acc = _joined(parts, arrived, home, SPLITS, R, MP)
    at, there = m[None, :] * N + rows[:, None], m[None, :] < M
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    old = tl.load(x + at, mask=there, other=0.0)
    new = (acc + old.to(tl.float32)).to(old.dtype)
    tl.store(x + at, new, mask=there)
    f = new.to(tl.float32)
    tl.store(out + at, (f * tl.load(gain + rows).to(tl.float32)[:, None]).to(old.dtype), mask=there)
    tl.store(squares + tile * M + m, tl.sum(f * f, 0), mask=m < M)


@each_batch_alike
def gated_products(
    x, w, squares, count, bias, out, M, N, eps,
    K: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, MP: tl.constexpr, MOST: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out `[M, N]` = silu(gate) * up; gate and up: rows `[0, N)` and `[N, 2N)` of w times the norm of x."""
    if EARLY:
        let_next_begin()
    first, i = tl.program_id(0) * (R // 2), tl.arange(0, R)
    rows, m = first + i // 2 + i % 2 * N, tl.program_id(1) * MP + tl.arange(0, MP)
    acc = _sums(x, w, rows, 0, m, M, K, K, FIRST, BLOCK, STAGES, False, EARLY)
    acc *= _over_rms(squares, count, m, M, eps, K, MOST)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    a, b = _two(acc, R, MP)
    at = m[None, :] * N + (first + tl.arange(0, R // 2))[:, None]
    tl.store(out + at, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=m[None, :] < M)


@each_batch_alike
def head_products(
    x, w, squares, count, out, M, N, eps,
    K: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    R: tl.constexpr, MP: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out `[M, N]` (float32) = w `[N, K]` times the norm of x."""
    if EARLY:
        let_next_begin()
    rows, m = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * MP + tl.arange(0, MP)
    acc = _sums(x, w, rows, 0, m, M, K, K, FIRST, BLOCK, STAGES, False, EARLY)
    acc *= _over_rms(squares, count, m, M, eps, K, MOST)[None, :]
    tl.store(out + m[None, :].to(tl.int64) * N + rows[:, None], acc, mask=m[None, :] < M)


@each_batch_alike
def qkv_stored_each(
    x, w, squares, count, bias, cos, sin, positions, slots, q_out, k_pool, v_pool, M, eps,
    K: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, R: tl.constexpr,
    MP: tl.constexpr, MOST: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each token's q, k, v from its hidden state: q goes to `q_out`, k and v to the token's slot.

    A program takes one head, its rows in the pairs that the rotation mixes.
    """
    if EARLY:
        let_next_begin()
    HALF: tl.constexpr = R // 2
    head, i, j = tl.program_id(0), tl.arange(0, R), tl.arange(0, HALF)
    m = tl.program_id(1) * MP + tl.arange(0, MP)
    rows, there = head * R + i // 2 + i % 2 * HALF, m[None, :] < M
    acc = _sums(x, w, rows, 0, m, M, K, K, FIRST, BLOCK, STAGES, False, EARLY)
    acc *= _over_rms(squares, count, m, M, eps, K, MOST)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    a, b = _two(acc, R, MP)
    position = tl.load(positions + m, mask=m < M, other=0).to(tl.int64)
    slot = tl.load(slots + m, mask=m < M, other=0).to(tl.int64)
    if head < HEADS + KV_HEADS:
        turn = position[None, :] * HALF + j[:, None]
        c, s = tl.load(cos + turn, mask=there, other=0.0), tl.load(sin + turn, mask=there, other=0.0)
        low, high = a * c - b * s, b * c + a * s
    else:
        low, high = a, b
    if head < HEADS:
        to_q = q_out + (m[None, :] * HEADS + head) * R + j[:, None]
        tl.store(to_q, low.to(q_out.dtype.element_ty), mask=there)
        tl.store(to_q + HALF, high.to(q_out.dtype.element_ty), mask=there)
    elif head < HEADS + KV_HEADS:
        to_k = k_pool + (slot[None, :] * KV_HEADS + head - HEADS) * R + j[:, None]
        tl.store(to_k, low.to(k_pool.dtype.element_ty), mask=there)
        tl.store(to_k + HALF, high.to(k_pool.dtype.element_ty), mask=there)
    else:
        to_v = v_pool + (slot[None, :] * KV_HEADS + head - HEADS - KV_HEADS) * R + j[:, None]
        tl.store(to_v, low.to(v_pool.dtype.element_ty), mask=there)
        tl.store(to_v + HALF, high.to(v_pool.dtype.element_ty), mask=there)
