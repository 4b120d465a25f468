"""From logits to tokens: greedy, temperature, top-k, top-p, and masks for constrained decoding.

A random token is a pure function of its logits, its sampling parameters and one uniform number, and the
uniform number is a pure function of (seed, sample, position). So a request draws the same tokens alone, in
any batch, after a retraction and on any platform. fast/sampling.py draws them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minirad.config import SamplingParams

GREEDY_BELOW = 1e-8  # a temperature at which float32 logits that differ at all differ by e^95 and more


def is_greedy(param: SamplingParams) -> bool:
    """Temperature 0, or so small that only the likeliest token can be drawn (dividing would overflow)."""
    return param.temperature < GREEDY_BELOW


@torch.inference_mode()
def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    masks: Sequence[Tensor | None] | None = None,
) -> tuple[list[int], list[float]]:
    """Choose one token per row.

    Args:
        logits: `[N, vocab]`; computed with in float32.
        params: one per row. Temperature 0 takes the most likely token (the lowest id among equals);
            else temperature, then top_k, then top_p, then a draw.
        uniforms: one number in [0, 1) per row; unused where temperature is 0.
        masks: per row None or bool `[vocab]`, True = allowed.

    Returns:
        token ids, and the log-probability of each under the model's own distribution (temperature
        1, nothing filtered); NaN for rows whose logits hold NaN: a KV slot was read that was never written.

    Raises:
        ValueError: if the numbers of rows differ or a mask allows nothing.
    """
    n = logits.shape[0]
    if not (len(params) == len(uniforms) == n and (masks is None or len(masks) == n)):
        raise ValueError(
            f"sample: {n} rows of logits, {len(params)} params, {len(uniforms)} uniforms"
            + ("" if masks is None else f", {len(masks)} masks")
        )
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


def _draw(logits: Tensor, param: SamplingParams, uniform: float) -> int:
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
