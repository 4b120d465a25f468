"""Drawing tokens by chance on a GPU, in Triton: as in model/sampler.py, without sorting the vocabulary.

Sorting 128,256 numbers for each request costs more than the model's whole step. But of the order only one
place matters: the least likely logit that top_k and top_p leave in, and how many of its equals. It is
narrowed down four bits at a time, each pass adding up what is at or above 16 thresholds: numbers of tokens
for top_k, probabilities for top_p. Then the token is found by its place in the running sum over what is left,
in order of token ids: in whose chunk first, then where in it.

Probabilities are float64 and added up in the same order in every batch, so a draw depends on nothing but
logits, parameters and uniform number. Importing this module needs the package triton.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw"]

CHUNK, PART = 4096, 256  # tokens of a program, and how many of them are looked at together
LOWEST = -(1 << 31)  # no logit's key is so low


def draw(
    logits: Tensor, rows: Tensor, numbers: Tensor, greedy: Tensor, top_k: bool = True, top_p: bool = True
) -> Tensor:
    """Tokens for some rows, and their log-probabilities: float64 `[2, R]`. Nothing here waits.

    Args:
        logits: `[N, vocab]`, contiguous.
        rows: int64 `[R]`, which of them.
        numbers: float64 `[R, 4]`: temperature (above 0), top_k (0: no limit), top_p, uniform number.
        greedy: float64 `[2, N]`, each row's likeliest token and its log-probability.
        top_k, top_p: False if no row has such a limit.
    """
    count, vocab = len(rows), logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    # bfloat16 has 16 bits, so the others need not be looked for
    low = 16 if logits.dtype == torch.bfloat16 else 0
    device = logits.device
    found = torch.empty((2, count, chunks, 16), dtype=torch.float64, device=device)
    sums = torch.empty((count, chunks, 3), dtype=torch.float64, device=device)
    goals = torch.empty(count, dtype=torch.float64, device=device)
    state = torch.full((2, count, 2), LOWEST >> low, dtype=torch.int32, device=device)
    out = torch.empty((2, count), dtype=torch.float64, device=device)
    given = (logits, rows, numbers, greedy, logits.stride(0), greedy.stride(0), vocab, chunks)
    shape = {"LOW": low, "CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}
    grid, passes, turn = (count, chunks), (32 - low) // 4, 0
    for limit, wanted in enumerate((top_k, top_p)):
        for at in range(passes if wanted else 0):
            _narrow[grid](
                *given, found[turn], found[1 - turn], sums, state[turn], state[1 - turn],
                28 - low - 4 * at, BY_MASS=limit == 1, FIRST=at == 0,
                PART=PART, **shape, num_warps=4,
            )  # fmt: skip
            turn = 1 - turn
        if wanted:
            _settle[(count,)](
                *given, found[turn], sums, goals, state[turn], state[1 - turn], BY_MASS=limit == 1, **shape
            )
            turn = 1 - turn
    _weigh[grid](*given, sums, state[turn], **shape, num_warps=8)
    _draw[(count,)](*given, sums, goals, state[turn], out, TOP_K=top_k, TOP_P=top_p, **shape, num_warps=8)
    return out


# ---------------------------------------------------------------------- of one row


@triton.jit
def _key(x, LOW: tl.constexpr):
    """Logits (float32) as int32 in the same order, without the LOW last bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW


@triton.jit
def _logit(key, LOW: tl.constexpr):
    """Back again, for a number."""
    if LOW > 0:
        key = (key << LOW) | tl.where(key < 0, (1 << LOW) - 1, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top, temperature):
    """Probabilities, but for a factor: 1 for the likeliest."""
    return tl.exp((x.to(tl.float64) - top) / temperature)


@triton.jit
def _row(logits, rows, numbers, greedy, stride):
    """Where this program's row of logits begins, its likeliest logit, and its temperature."""
    at = tl.program_id(0)
    row = tl.load(rows + at)
    begin = logits + row * stride
    likeliest = tl.load(greedy + row).to(tl.int64)  # of a row that holds NaN this might be anything
    top = tl.load(begin + tl.minimum(tl.maximum(likeliest, 0), stride - 1)).to(tl.float32)
    return begin, top.to(tl.float64), tl.load(numbers + 4 * at)


@triton.jit
def _top_k(numbers, vocab):
    """float64: how many tokens may be left in."""
    count = tl.load(numbers + 4 * tl.program_id(0) + 1)
    return tl.where((count > 0) & (count < vocab), count, vocab.to(tl.float64))


@triton.jit
def _total(sums, which, chunks, CHUNKS: tl.constexpr):
    """One of the three sums of all chunks: float64 `[CHUNKS]`."""
    chunk = tl.arange(0, CHUNKS)
    at = sums + (tl.program_id(0) * chunks + chunk) * 3 + which
    return tl.load(at, mask=chunk < chunks, other=0.0)


@triton.jit
def _goal(
    numbers, sums, state, top, temperature, vocab, chunks,
    LOW: tl.constexpr, CHUNKS: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """How much has to be at or above the last logit that is left in: tokens, or top_p of their weights.

    BY_MASS: `sums` are those of what lies above top_k's last logit.
    """
    goal = _top_k(numbers, vocab)
    if BY_MASS:
        equals = goal - tl.sum(_total(sums, 1, chunks, CHUNKS), 0)
        weight = _weight(_logit(tl.load(state + 2 * tl.program_id(0)), LOW), top, temperature)
        goal = tl.sum(_total(sums, 0, chunks, CHUNKS), 0) + tl.where(equals > 0, equals * weight, 0.0)
        goal *= tl.load(numbers + 4 * tl.program_id(0) + 2)
    return goal


@triton.jit
def _digit(found, goal, chunks, CHUNKS: tl.constexpr):
    """Of the last pass's thresholds, the first left out, how many have the goal at or above them."""
    chunk, digit = tl.arange(0, CHUNKS)[:, None], tl.arange(0, 16)[None, :]
    at = found + (tl.program_id(0) * chunks + chunk) * 16 + digit
    totals = tl.sum(tl.load(at, mask=chunk < chunks, other=0.0), 0)
    return tl.sum(((totals >= goal) & (tl.arange(0, 16) > 0)).to(tl.int32), 0)


# ---------------------------------------------------------------------- kernels
#
# state: int32 [R, 2], the keys of the last logits that top_k, and both limits, leave in, as far as known.
# found: float64 [R, chunks, 16], what each chunk has at or above each threshold.
# sums: float64 [R, chunks, 3], of each chunk the weights and the number of what lies above a logit, and the
# number of its equals.


@triton.jit
def _narrow(
    logits, rows, numbers, greedy, stride, greedy_stride, vocab, chunks,
    found, next_found, sums, state, next_state, shift,
    LOW: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BY_MASS: tl.constexpr,
    FIRST: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Settles the digit that was looked for in the pass before, and adds up for the next one's thresholds."""
    at, chunk = tl.program_id(0), tl.program_id(1)
    begin, top, temperature = _row(logits, rows, numbers, greedy, stride)
    first = tl.load(state + 2 * at)
    known = tl.load(state + 2 * at + BY_MASS)
    if FIRST:
        known = tl.full([], -(1 << (31 - LOW)), tl.int32)
    else:
        goal = _goal(numbers, sums, state, top, temperature, vocab, chunks, LOW, CHUNKS, BY_MASS)
        known += _digit(found, goal, chunks, CHUNKS) << (shift + 4)
    if chunk == 0:
        tl.store(next_state + 2 * at, tl.where(BY_MASS, first, known))
        tl.store(next_state + 2 * at + 1, tl.where(BY_MASS, known, tl.load(state + 2 * at + 1)))
    thresholds = known + (tl.arange(0, 16) << shift)
    found_here = tl.zeros([16, PART], tl.float64)
    mass, number = tl.zeros([PART], tl.float64), tl.zeros([PART], tl.float64)
    for part in range(CHUNK // PART):  # added up side by side, and across only once
        token = chunk * CHUNK + part * PART + tl.arange(0, PART)
        x = tl.load(begin + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = tl.where(token < vocab, _key(x, LOW), -(1 << 31))
        weight = tl.full([PART], 1.0, tl.float64)
        if BY_MASS:
            weight = _weight(x, top, temperature)
        found_here += tl.where(key[None, :] >= thresholds[:, None], weight[None, :], 0.0)
        if BY_MASS and FIRST:
            mass += tl.where(key > first, weight, 0.0)
            number += (key > first).to(tl.float64)
    place = at * chunks + chunk
    tl.store(next_found + place * 16 + tl.arange(0, 16), tl.sum(found_here, 1))
    if BY_MASS and FIRST:
        tl.store(sums + place * 3, tl.sum(mass, 0))
        tl.store(sums + place * 3 + 1, tl.sum(number, 0))


@triton.jit
def _settle(
    logits, rows, numbers, greedy, stride, greedy_stride, vocab, chunks,
    found, sums, goals, state, next_state,
    LOW: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The last digit. Rows without a top_p keep top_k's last logit, of which rounding might lose some."""
    at = tl.program_id(0)
    _, top, temperature = _row(logits, rows, numbers, greedy, stride)
    first = tl.load(state + 2 * at)
    known = tl.load(state + 2 * at + BY_MASS)
    goal = _goal(numbers, sums, state, top, temperature, vocab, chunks, LOW, CHUNKS, BY_MASS)
    known += _digit(found, goal, chunks, CHUNKS)
    if BY_MASS:
        tl.store(goals + at, goal)
        known = tl.where(tl.load(numbers + 4 * at + 2) < 1, known, first)
    else:
        first = known
    tl.store(next_state + 2 * at, first)
    tl.store(next_state + 2 * at + 1, known)


@triton.jit
def _weigh(
    logits, rows, numbers, greedy, stride, greedy_stride, vocab, chunks, sums, state,
    LOW: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The three sums for the last logit that is left in."""
    at, chunk = tl.program_id(0), tl.program_id(1)
    begin, top, temperature = _row(logits, rows, numbers, greedy, stride)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab
    x = tl.load(begin + token, mask=inside, other=float("-inf")).to(tl.float32)
    key, last = _key(x, LOW), tl.load(state + 2 * at + 1)
    above = inside & (key > last)
    to = sums + (at * chunks + chunk) * 3
    tl.store(to, tl.sum(tl.where(above, _weight(x, top, temperature), 0.0), 0))
    tl.store(to + 1, tl.sum(above.to(tl.float64), 0))
    tl.store(to + 2, tl.sum((inside & (key == last)).to(tl.float64), 0))


@triton.jit
def _draw(
    logits, rows, numbers, greedy, stride, greedy_stride, vocab, chunks, sums, goals, state, out,
    LOW: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """The token at the uniform number's place in the running sum of what is left in."""
    at, chunk = tl.program_id(0), tl.arange(0, CHUNKS)
    begin, top, temperature = _row(logits, rows, numbers, greedy, stride)
    above, equals = _total(sums, 0, chunks, CHUNKS), _total(sums, 2, chunks, CHUNKS)
    last = tl.load(state + 2 * at + 1)
    weight = _weight(_logit(last, LOW), top, temperature)
    kept = tl.sum(equals, 0)
    if TOP_K:
        left = _top_k(numbers, vocab) - tl.sum(_total(sums, 1, chunks, CHUNKS), 0)
        kept = tl.where(last == tl.load(state + 2 * at), tl.minimum(kept, left), kept)
    if TOP_P:
        left = tl.ceil((tl.load(goals + at) - tl.sum(above, 0)) / weight)
        kept = tl.where(tl.load(numbers + 4 * at + 2) < 1, tl.minimum(kept, tl.maximum(left, 1.0)), kept)
    before = tl.cumsum(equals, 0) - equals
    taken = tl.minimum(tl.maximum(kept - before, 0.0), equals)  # of the equals, those with the lowest ids
    mass = above + tl.where(taken > 0, taken * weight, 0.0)
    running = tl.cumsum(mass, 0)
    place = tl.load(numbers + 4 * at + 3) * tl.max(running, 0)
    mine = tl.sum(((running <= place) & (chunk < chunks)).to(tl.int32), 0)
    mine = tl.minimum(mine, tl.max(tl.where(mass > 0, chunk, 0), 0))
    done = tl.sum(tl.where(chunk == mine, running - mass, 0.0), 0)
    some = tl.sum(tl.where(chunk == mine, taken, 0.0), 0)

    token = mine * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(begin + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    key = _key(x, LOW)
    equal = (token < vocab) & (key == last)
    left_in = (key > last) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= some))
    weights = tl.where(left_in & (token < vocab), _weight(x, top, temperature), 0.0)
    steps = done + tl.cumsum(weights, 0)
    index = tl.arange(0, CHUNK)
    chosen = tl.sum((steps <= place).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, index, 0), 0))
    logit = tl.sum(tl.where(index == chosen, x.to(tl.float64), 0.0), 0)
    best = tl.load(greedy + greedy_stride + tl.load(rows + at))  # the likeliest token's log-probability
    tl.store(out + at, (mine * CHUNK + chosen).to(tl.float64))
    tl.store(out + tl.num_programs(0) + at, logit - top + best)
