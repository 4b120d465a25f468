"""Attention for decoding requests, in one Triton kernel without a plan.

FlashInfer cuts long sequences into pieces by a plan that the host makes for every step, and merges their
results in a second kernel. Here the grid is always the same, each program works out its piece from the lists
on the device, and the last program does the merge: no plan, one kernel. Few short requests read little KV,
and what counts is how many kernels follow each other and how long each takes to begin: so one program meets
all of a short request's tokens, and has them in its registers before the kernel in front has ended. Many
requests give the card enough programs as they are, and long ones are cut into as many pieces as that takes.
Importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.fast.early_launch import launch_options, let_next_begin, share_most, wait_for_previous
from minirad.fast.one_token import padded
from minirad.kv.kv_pool import KVPool

__all__ = ["Cut", "ShortDecode", "StepAttention", "cut_until", "decode_attention", "meet"]

FEW_REQUESTS, SOME_REQUESTS, MANY_REQUESTS = 16, 32, 64
AT_ONCE, IN_PIECES = 256, 2048  # tokens
IF_MANY = (AT_ONCE, 4096)
LIMITS = {FEW_REQUESTS: (128, AT_ONCE, IN_PIECES, 16384), SOME_REQUESTS: (128, *IF_MANY), 1 << 30: IF_MANY}
PADDED_GROUP = 16  # query heads per kv head, padded: the matrix units' smallest number of rows


@dataclass(frozen=True, slots=True)
class Cut:
    """How a request's tokens are shared out: among at most `splits` programs, each of which takes `least`
    blocks or more, of `block` tokens; the warps of a program, how many blocks it fetches ahead, and whether
    it does so with the first one before the kernel in front has ended."""

    splits: int
    block: int
    least: int
    warps: int
    stages: int
    ahead: bool

    @classmethod
    def best(cls, requests: int, tokens: int, head_dim: int) -> Cut:
        """The quickest measured (bench/LOG.md); tokens: of the longest request at most, 0 for any number."""
        few, short = requests <= FEW_REQUESTS, 0 < tokens <= AT_ONCE
        block = min(padded(tokens), 16384 // head_dim)
        # One program meets all of a short request's tokens, if it can: merging takes longer.
        if short and (few or (requests <= SOME_REQUESTS and tokens <= block)):
            warps = max(1, block * head_dim // 2048)
            return cls(padded(tokens) // block, block, 1, warps=warps, stages=1, ahead=True)
        if few and 0 < tokens <= IN_PIECES:  # small ones, so that they suffice for all of the processors
            return cls(16, 32, 1, warps=max(1, head_dim // 64), stages=1, ahead=True)
        if few and not tokens:  # one of them may be much longer than the others
            splits = 64 if requests <= 2 else 32
            return cls(splits, 4096 // head_dim, 1, warps=max(1, head_dim // 32), stages=4, ahead=False)
        if few:
            return cls(32 if requests <= 8 else 16, 8192 // head_dim, 1, warps=4, stages=2, ahead=False)
        if not tokens:
            return cls(16, 8192 // head_dim, head_dim // 8, warps=4, stages=2, ahead=False)
        if requests > MANY_REQUESTS:  # whose programs suffice: small ones, so that many lie on each processor
            block = max(16, (2048 if short else 4096) // head_dim)
            return cls(1, block, 1, warps=1 if short else 2, stages=2, ahead=False)
        block = 8192 // head_dim
        if short:
            return cls(1, block, 1, warps=4, stages=1, ahead=True)
        return cls(4, block, 1024 // block, warps=4, stages=2, ahead=False)


def cut_until(requests: int, longest: int) -> int:
    """The number of tokens to cut for where the longest request has so many; 0: any number."""
    limits = next(limits for most, limits in LIMITS.items() if requests <= most)
    return next((limit for limit in limits if longest <= limit), 0)


class StepAttention:
    """An `AttentionBackend` of captured decode steps: without a plan, and keys and values are in the pool."""

    name: str
    reads_pool_only = True

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Refused: the lists are the step's."""
        raise ValueError("a captured step has no plan")

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Refused: the kernel that rotates keys also stores them."""
        raise ValueError("in a captured step the rotation writes keys and values")


class ShortDecode(StepAttention):
    """Attention of captured decode steps of B requests, which needs no plan.

    Args:
        indptr, indices, last_page_len: int32 `[B + 1]`, `[at least all pages]`, `[B]` on the device: the
            pages of each request (see AttentionMetadata). Read whenever a step is replayed, before the
            kernels in front of this one have ended: they must not be written by one of those.
        scale: the factor of q.k before the softmax. page_size: slots of a page.
        tokens: what each request has at most, for a good cut; 0 for any number. More are right as well.

    Raises:
        ValueError: if `fits` says that it does not.
    """

    name = "short-decode"

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, indptr: Tensor,
        indices: Tensor, last_page_len: Tensor, page_size: int, tokens: int = 0, cut: Cut | None = None,
    ) -> None:  # fmt: skip
        if not self.fits(num_heads, num_kv_heads, head_dim):
            raise ValueError(f"ShortDecode: {num_heads}/{num_kv_heads} heads of {head_dim} do not fit")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.page_size, self._lists = page_size, (indptr, indices, last_page_len)
        self.scale, self._batch, device = scale, len(last_page_len), indptr.device
        self.cut = Cut.best(self._batch, tokens, head_dim) if cut is None else cut
        self._group = padded(num_heads // num_kv_heads)
        places = self._batch * num_kv_heads * self.cut.splits * self._group
        self._parts = torch.zeros(places * head_dim, device=device)
        self._sums = torch.zeros(places * 2, device=device)
        self._arrived = torch.zeros(self._batch * num_kv_heads, dtype=torch.int32, device=device)
        self.launch = launch_options(device)

    @staticmethod
    def fits(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether the kernel takes such heads."""
        return num_heads // num_kv_heads <= PADDED_GROUP and head_dim == padded(head_dim) >= 16

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend: q `[B, heads, head_dim]`, one token of each request, gives the same shape."""
        return self.go_on(layer_id, q, pool, scale, None)

    def go_on(
        self, layer_id: int, q: Tensor, pool: KVPool, scale: float, before: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """`run` for queries that have met other tokens before.

        before: the answers that S sets of those gave, `[S, B, heads, head_dim]`, and the logarithms to the
        base 2 of their sums of exponentials, float32 `[S, B, heads]`; both contiguous. Where that is minus
        infinity, the answer is not looked at.
        """
        if len(q) != self._batch or scale != self.scale:
            raise ValueError(
                f"ShortDecode: {len(q)} queries, scale {scale}; made for {self._batch}, {self.scale}"
            )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cut, (answers, lse) = self.cut, before or (q, self._sums)
        kernel = decode_attention[(self.num_kv_heads, cut.splits, self._batch)](
            q.contiguous(), pool.k[layer_id], pool.v[layer_id], *self._lists, answers, lse, out,
            self._parts, self._sums, self._arrived, scale,
            HEADS=self.num_heads, KV_HEADS=self.num_kv_heads, D=self.head_dim, PAGE=self.page_size,
            BLOCK=cut.block, SPLITS=cut.splits, LEAST=cut.least, GROUP=PADDED_GROUP, REAL=self._group,
            BEFORE=0 if before is None else len(answers), AHEAD=cut.ahead, ALONE=len(q) == 1,
            num_warps=cut.warps, num_stages=cut.stages, **self.launch,
        )  # fmt: skip
        if self.launch["EARLY"] and len(q) > 1:  # one token's kernels need the cache
            share_most(kernel.function)
        return out


@triton.jit
def meet(
    queries, k_pool, v_pool, pages, token, page, blocks, length, kv_head, scale, best, total, acc,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of `queries` to some blocks of tokens, added to what they have found so far.

    token, page: of the first block's tokens. length: tokens from there on do not exist. best, total, acc:
    each query's largest score (to the base 2), sum of exponentials and weighted sum of values; returned anew.
    """
    d = tl.arange(0, D)
    for _ in range(blocks):
        inside = token < length
        slot = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * D
        keys = tl.load(k_pool + slot[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        values = tl.load(v_pool + slot[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        token += BLOCK
        page = tl.load(pages + token // PAGE, mask=token < length, other=0).to(tl.int64)
        best, total, acc = _meet_block(queries, keys, values, inside, scale, best, total, acc)
    return best, total, acc


@triton.jit
def _meet_block(queries, keys, values, inside, scale, best, total, acc):
    """As `meet`, of one block that has been read: keys `[D, BLOCK]`, values `[BLOCK, D]`."""
    scores = tl.dot(queries, keys) * (scale * 1.4426950408889634)
    scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(best - higher)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values)
    return higher, total, acc


@triton.jit
def decode_attention(
    q, k_pool, v_pool, indptr, indices, last_page_len, before, before_lse, out, parts, sums, arrived, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, GROUP: tl.constexpr, REAL: tl.constexpr,
    BEFORE: tl.constexpr, AHEAD: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query token per entry against its pages: a program takes one kv head and one stretch of tokens.

    before, before_lse: BEFORE answers that the first of an entry's programs starts from; see `go_on`.
    parts: float32 `[B, KV_HEADS, SPLITS, REAL, D]`, sums `[B, KV_HEADS, SPLITS, 2, REAL]`; arrived: int32
    `[B, KV_HEADS]`, zero before and after. REAL: query heads per kv head, padded to a power of two; GROUP:
    padded further, to the least that the matrix units take. ALONE: is another kernel, not to `share_most`.
    """
    if EARLY:
        let_next_begin()
    kv_head, split, entry = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    real = group < HEADS // KV_HEADS
    begin = tl.load(indptr + entry)
    pages = tl.load(indptr + entry + 1) - begin
    length = (pages - 1) * PAGE + tl.load(last_page_len + entry)
    blocks = tl.cdiv(length, BLOCK)
    each = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    used = tl.cdiv(blocks, each)
    if split >= used:  # without waiting: an entry's first program does
        return
    token = split * each * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(indices + begin + token // PAGE, mask=token < length, other=0).to(tl.int64)
    if AHEAD:  # all but the newest token's, which the kernel in front writes
        old = token < length - 1
        slot = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * D
        keys = tl.load(k_pool + slot[None, :] + d[:, None], mask=old[None, :], other=0.0)
        values = tl.load(v_pool + slot[:, None] + d[None, :], mask=old[:, None], other=0.0)
    if EARLY:
        wait_for_previous()
    if AHEAD:
        new = token == length - 1
        keys = tl.load(k_pool + slot[None, :] + d[:, None], mask=new[None, :], other=keys)
        values = tl.load(v_pool + slot[:, None] + d[None, :], mask=new[:, None], other=values)
    head = entry * HEADS + kv_head * (HEADS // KV_HEADS) + group
    at = head[:, None] * D + d[None, :]
    queries = tl.load(q + at, mask=real[:, None], other=0.0)
    best = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for part in range(BEFORE):
        far = part * tl.num_programs(2) * HEADS
        met = tl.load(before_lse + far + head, mask=real & (split == 0), other=float("-inf"))
        there = met > float("-inf")
        higher = tl.maximum(best, met)
        share = tl.where(there, tl.exp2(met - higher), 0.0)
        fade = tl.where(best > float("-inf"), tl.exp2(best - higher), 0.0)
        answer = tl.load(before + far * D + at, mask=there[:, None], other=0.0).to(tl.float32)
        total = total * fade + share
        acc = acc * fade[:, None] + answer * share[:, None]
        best = higher
    left = tl.minimum(each, blocks - split * each)
    if AHEAD:
        best, total, acc = _meet_block(queries, keys, values, token < length, scale, best, total, acc)
        token += BLOCK
        left -= 1
        page = tl.load(indices + begin + token // PAGE, mask=token < length, other=0).to(tl.int64)
    best, total, acc = meet(
        queries, k_pool, v_pool, indices + begin, token, page, left,
        length, kv_head, scale, best, total, acc, KV_HEADS, D, PAGE, BLOCK,
    )  # fmt: skip
    if used == 1:
        result = acc / total[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None])
        return
    home = (entry * KV_HEADS + kv_head) * SPLITS
    mine = home + split
    tl.store(parts + (mine * REAL + group)[:, None] * D + d[None, :], acc, mask=real[:, None])
    tl.store(sums + mine * 2 * REAL + group, best, mask=real)
    tl.store(sums + mine * 2 * REAL + REAL + group, total, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(arrived + entry * KV_HEADS + kv_head, 1, sem="acq_rel") == used - 1:
        tl.debug_barrier()
        _merge(parts, sums, out, home, entry, kv_head, used, HEADS, KV_HEADS, D, SPLITS, REAL)
        tl.store(arrived + entry * KV_HEADS + kv_head, 0)


@triton.jit
def _merge(
    parts, sums, out, home, entry, kv_head, used,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Adds up what `used` programs have found, each weighted by its share of the exponentials."""
    d = tl.arange(0, D)
    split = tl.arange(0, SPLITS)
    g = tl.arange(0, REAL)
    there = (split < used)[:, None]
    at = (home + split)[:, None] * 2 * REAL + g[None, :]
    # other programs wrote these while this one ran: not to be taken from its own processor's cache
    bests = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums + at + REAL, mask=there, other=0.0, cache_modifier=".cg")
    share = tl.exp2(bests - tl.max(bests, 0)[None, :])
    share = share / tl.sum(share * totals, 0)[None, :]
    at = ((home + split)[:, None, None] * REAL + g[None, :, None]) * D + d[None, None, :]
    found = tl.load(parts + at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    merged = tl.sum(found * share[:, :, None], 0)
    head = kv_head * (HEADS // KV_HEADS) + g
    to = out + (entry * HEADS + head)[:, None] * D + d[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), mask=(g < HEADS // KV_HEADS)[:, None])
