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
from minirad.model.sampler import is_greedy, sample
from minirad.runner import Computed, Draw
from minirad.schedule.scheduler import Batch

__all__ = ["DrawnOnDevice", "next_tokens", "to_device"]


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
    """What `sample` gives without masks, left on the device: nothing waits for it where Triton runs.

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
        scores, tokens = logits.float(), logits.argmax(-1)  # the first of equal maxima
        logprobs = scores.gather(1, tokens[:, None]).squeeze(1) - scores.logsumexp(-1)
        greedy = torch.stack((tokens.double(), logprobs.double()))
    if not random:
        return greedy
    drawing = drawing_kernels(logits.device)
    if drawing is None:
        return torch.tensor(sample(logits, params, uniforms), dtype=torch.float64, device=logits.device)
    numbers = [(params[r].temperature, float(params[r].top_k), params[r].top_p, uniforms[r]) for r in random]
    top_k, top_p = any(params[r].top_k > 0 for r in random), any(params[r].top_p < 1 for r in random)
    rows = to_device(torch.tensor(random), logits.device)
    four = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    return greedy.index_copy(1, rows, drawing.draw(logits, rows, four, greedy, top_k, top_p))


@cache
def drawing_kernels(device: torch.device) -> Any:
    """The kernels that draw without a sort, None where they cannot run."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    return import_module("minirad.fast.sampling_kernels")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting: from memory that the card can read by itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
