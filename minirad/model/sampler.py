"""From logits to tokens: greedy, temperature, top-k, top-p, and masks for constrained decoding.

A random token is a pure function of (its logits, its sampling parameters, one uniform number), and
the uniform number is a pure function of (seed, sample, position). So a request draws the same
tokens alone, in any batch, after a retraction and on any platform.

`sample` answers on the host at once. `next_tokens` is the same function without waiting for the device: its
answer stays there, ready to be the next batch's input before anyone has read it. This module keeps no
state and stops no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "SamplingLike",
    "is_greedy",
    "next_tokens",
    "position_uniform",
    "prompt_logprobs",
    "sample",
    "to_device",
]

GREEDY_BELOW = 1e-8  # a temperature at which float32 logits that differ at all differ by e^95 and more
ROWS_AT_ONCE = 32  # drawn together: a row of 128,256 tokens takes about ten megabytes on the way


class SamplingLike(Protocol):
    """What the sampler reads of a request's sampling parameters."""

    @property
    def temperature(self) -> float:
        """0 = greedy."""
        ...

    @property
    def top_p(self) -> float:
        """Keep the most likely tokens up to this probability; 1 = all."""
        ...

    @property
    def top_k(self) -> int:
        """Keep this many of the most likely tokens; 0 = all."""
        ...


def is_greedy(param: SamplingLike) -> bool:
    """Temperature 0, or so small that only the likeliest token can be drawn (dividing would overflow)."""
    return param.temperature < GREEDY_BELOW


@torch.inference_mode()
def sample(
    logits: Tensor,
    params: Sequence[SamplingLike],
    uniforms: Sequence[float],
    masks: Sequence[Tensor | None] | None = None,
    greedy: Tensor | None = None,
) -> tuple[list[int], list[float]]:
    """Choose one token per row.

    Args:
        logits: `[N, vocab]`; computed with in float32.
        params: one per row. Temperature 0 takes the most likely token (the lowest id among equals);
            else temperature, then top_k, then top_p, then a draw.
        uniforms: one number in [0, 1) per row; unused where temperature is 0.
        masks: per row None or bool `[vocab]`, True = allowed.
        greedy: the likeliest tokens and their log-probabilities, `[2, N]`, if they are known already.

    Returns:
        token ids, and the log-probability of each under the model's own distribution (temperature
        1, nothing filtered); NaN for rows whose logits hold NaN: some KV slot was read that nobody wrote.

    Raises:
        ValueError: if the numbers of rows differ or a mask allows nothing.
    """
    n = logits.shape[0]
    if not (len(params) == len(uniforms) == n and (masks is None or len(masks) == n)):
        raise ValueError(
            f"sample: {n} rows of logits, {len(params)} params, {len(uniforms)} uniforms"
            + ("" if masks is None else f", {len(masks)} masks")
        )
    if masks is None and (_drawing(logits.device) or all(map(is_greedy, params))):
        tokens, logprobs = next_tokens(
            logits, params, uniforms, greedy
        ).tolist()  # the only transfer of a step
        return [int(token) for token in tokens], logprobs
    logits = logits.float()
    allowed = logits if masks is None else _masked(logits, masks)
    tokens = allowed.argmax(-1)  # the first of equal maxima
    normalizer = logits.logsumexp(-1)
    lost = normalizer.isnan().tolist()
    for row, (param, uniform) in enumerate(zip(params, uniforms, strict=True)):
        if not (is_greedy(param) or lost[row]):
            tokens[row] = _draw(allowed[row], param, uniform)
    logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - normalizer
    return tokens.tolist(), logprobs.tolist()


def _masked(logits: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    allowed = logits.clone()
    for row, mask in enumerate(masks):
        if mask is None:
            continue
        if not bool(mask.any()):
            raise ValueError(f"sample: the mask of request {row} allows no token")
        allowed[row].masked_fill_(~mask.to(logits.device), float("-inf"))
    return allowed


def _draw(logits: Tensor, param: SamplingLike, uniform: float) -> int:
    """Inverse of the cumulative distribution over the kept tokens in id order, at `uniform`.

    In float64: the sum of 10^5 float32 probabilities would be off by more than the least likely
    ones.
    """
    probs = torch.softmax(logits.double() / param.temperature, dim=-1)
    ids = probs.nonzero().squeeze(1)
    if 0 < param.top_k < len(ids):
        ids = _top_k(probs, ids, param.top_k)
    if param.top_p < 1:
        ids = _top_p(probs, ids, param.top_p)
    cumulative = probs[ids].cumsum(0)
    at = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return int(ids[min(int(at), len(ids) - 1)])


def _top_k(probs: Tensor, ids: Tensor, k: int) -> Tensor:
    """The k most likely of `ids`, in id order; among equals the lowest ids."""
    kept = probs[ids]
    near = (kept >= kept.topk(k).values[-1]).nonzero().squeeze(1)  # more than k only among equals
    order = kept[near].sort(descending=True, stable=True).indices[:k]
    return ids[near[order].sort().values]


def _top_p(probs: Tensor, ids: Tensor, top_p: float) -> Tensor:
    """The fewest most likely of `ids` that hold `top_p` of their probability, in id order."""
    kept = probs[ids] / probs[ids].sum()
    # tokens below (1 - top_p) / n hold less than 1 - top_p together, so the rest holds enough:
    # sorting those few hundred is far cheaper than sorting a whole vocabulary
    likely = (kept >= (1 - top_p) / len(ids)).nonzero().squeeze(1)
    ranked = kept[likely].sort(descending=True, stable=True)
    before = ranked.values.cumsum(0) - ranked.values
    count = max(1, int((before < top_p).sum()))
    return ids[likely[ranked.indices[:count]].sort().values]


@torch.inference_mode()
def next_tokens(
    logits: Tensor, params: Sequence[SamplingLike], uniforms: Sequence[float], greedy: Tensor | None = None
) -> Tensor:
    """What `sample` gives without masks, left on the device: nothing here waits for it.

    Args:
        logits: `[N, vocab]`; computed with in float32.
        params, uniforms: one per row, see `sample`.
        greedy: the likeliest tokens and their log-probabilities, `[2, N]`, if they are known already.

    Returns:
        float64 `[2, N]`: tokens, and log-probabilities as in `sample`; NaN for rows that hold NaN, which
        the reader has to look for.

    Raises:
        ValueError: if the numbers of rows differ.
    """
    n = logits.shape[0]
    if not len(params) == len(uniforms) == n:
        raise ValueError(f"next_tokens: {n} rows of logits, {len(params)} params, {len(uniforms)} uniforms")
    random = [row for row, param in enumerate(params) if not is_greedy(param)]
    if greedy is None:
        greedy = _scored(logits.float(), logits.argmax(-1))  # the first of equal maxima
    if not random:
        return greedy
    numbers = [(params[r].temperature, float(params[r].top_k), params[r].top_p, uniforms[r]) for r in random]
    top_k, top_p = any(params[r].top_k > 0 for r in random), any(params[r].top_p < 1 for r in random)
    rows = to_device(torch.tensor(random), logits.device)
    four = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    result = greedy.clone()
    drawing = _drawing(logits.device)
    if drawing is not None:
        return result.index_copy_(1, rows, drawing.draw(logits, rows, four, greedy, top_k, top_p))
    for begin in range(0, len(random), ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        these = logits.index_select(0, rows[some]).float()
        result.index_copy_(1, rows[some], _scored(these, _draw_rows(these, four[some], top_k or top_p)))
    return result


@cache
def _drawing(device: torch.device) -> Any:
    """The kernels that draw without a sort, None where they cannot run."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("minirad.model.sampling_kernels")


def _scored(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tokens `[N]` with the log-probabilities that float32 logits give them: float64 `[2, N]`."""
    logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
    return torch.stack((tokens.double(), logprobs.double()))


def _draw_rows(logits: Tensor, numbers: Tensor, limited: bool) -> Tensor:
    """`_draw` for many rows, of fixed shapes: what is not kept stays, with probability 0.

    numbers: float64 `[R, 4]`: temperature, top_k, top_p, uniform. limited: whether any row has a top_k or
    a top_p, which takes a sort.
    """
    temperature, top_k, top_p, uniform = torch.split(numbers, 1, dim=1)
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    if limited:
        probs = _limited(probs, top_k, top_p)
    cumulative = probs.cumsum(-1)
    at = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    ids = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, ids, 0).amax(-1, keepdim=True)
    return torch.minimum(at, last).squeeze(1)


def _limited(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """probs `[R, vocab]` with those outside each row's top_k, then top_p, set to 0."""
    ranked = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    likely = torch.where((rank < top_k) | (top_k <= 0), ranked.values, 0.0)
    share = likely / likely.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    kept = (before < top_p) | (top_p >= 1) | (rank == 0)
    return torch.zeros_like(probs).scatter_(1, ranked.indices, likely * kept)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting: from memory that the card can read by itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Tensor) -> list[float]:
    """Log-probability of each known next token: logits `[M, vocab]`, next_tokens int64 `[M]`."""
    chosen = logits.gather(1, next_tokens[:, None]).squeeze(1)
    result: list[float] = (chosen - logits.logsumexp(-1)).tolist()
    return result


def position_uniform(seed: int, sample_index: int, position: int) -> float:
    """A uniform number in [0, 1) for one position of one sample: the same on every machine.

    Counter-based (splitmix64's mixing step over the three numbers): nothing to store, nothing to
    restore after a retraction.
    """
    state = 0
    for number in (seed, sample_index, position):
        state = _mix64(state ^ (number & _MASK64))
    return (state >> 11) / (1 << 53)  # 53 bits: as many as a float holds


_MASK64 = (1 << 64) - 1


def _mix64(x: int) -> int:
    """splitmix64 (Steele et al. 2014): add the golden ratio, then shift and multiply twice."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
