"""Choosing tokens on the device: what model/sampler.py chooses, for all rows at once and without waiting.

`next_tokens` leaves its answer on the device, ready to be the next batch's input before anyone has read it.
`DrawnOnDevice` reads a computed batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from minirad.config import SamplingParams
from minirad.model.sampler import is_greedy
from minirad.runner import Computed, Draw
from minirad.schedule.scheduler import Batch

__all__ = ["DrawnOnDevice", "next_tokens", "to_device"]

ROWS_AT_ONCE = 32  # drawn together: a row of 128,256 tokens takes about ten megabytes on the way


class DrawnOnDevice(Computed):
    """A computed batch whose tokens are chosen where its logits lie, as far as that can be.

    greedy: the likeliest tokens and their log-probabilities, `[2, N]`, if they are known already.
    """

    def __init__(self, batch: Batch, logits: Tensor, last: list[int], greedy: Tensor | None = None) -> None:
        super().__init__(batch, logits, last)
        self.greedy = greedy

    def sample(self, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
        params = [draw.params for draw in draws]
        on_device = drawing_kernels(self.logits.device) or all(map(is_greedy, params))
        if not on_device or any(draw.mask is not None for draw in draws):
            return super().sample(draws)
        logits, greedy, rows = self.logits, self.greedy, [draw.row for draw in draws]
        if rows != list(range(len(logits))):  # in a decode step there is nothing to pick out
            logits, greedy = logits[torch.tensor(rows, device=logits.device)], None
        # The only transfer of a step.
        tokens, logprobs = next_tokens(logits, params, [draw.uniform for draw in draws], greedy).tolist()
        return [int(token) for token in tokens], logprobs


@torch.inference_mode()
def next_tokens(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], greedy: Tensor | None = None
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
    drawing = drawing_kernels(logits.device)
    if drawing is not None:
        return result.index_copy_(1, rows, drawing.draw(logits, rows, four, greedy, top_k, top_p))
    for begin in range(0, len(random), ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        these = logits.index_select(0, rows[some]).float()
        result.index_copy_(1, rows[some], _scored(these, _draw_rows(these, four[some], top_k or top_p)))
    return result


@cache
def drawing_kernels(device: torch.device) -> Any:
    """The kernels that draw without a sort, None where they cannot run."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("minirad.fast.sampling_kernels")


def _scored(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tokens `[N]` with the log-probabilities that float32 logits give them: float64 `[2, N]`."""
    logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
    return torch.stack((tokens.double(), logprobs.double()))


def _draw_rows(logits: Tensor, numbers: Tensor, limited: bool) -> Tensor:
    """`sampler._draw` for many rows, of fixed shapes: what is not kept stays, with probability 0.

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
