"""Computes a batch at once, in the plain way: one forward pass, then the next tokens.

Of each request the last token's logits are looked at, also between chunks: attention is causal, so a NaN
anywhere in what it computed or read shows there, and is found before its KV is given to the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata, BatchEntry, build_metadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.cache.radix_cache import Slots
from minirad.config import EngineConfig, SamplingParams
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.model.sampler import position_uniform, prompt_logprobs, sample
from minirad.parts import NOT_A_NUMBER, Result
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

GREEDY = SamplingParams()


class TorchRunner:
    """The model, its KV pool and attention; the host's table says where each row's KV lies."""

    def __init__(
        self, model: LlamaModel, pool: KVPool, attention: AttentionBackend, rows: ReqToTokenPool,
        config: EngineConfig,
    ) -> None:  # fmt: skip
        self.model, self.pool, self.attention = model, pool, attention
        self.rows, self.page_size, self.device = rows, config.page_size, pool.device

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def launch(self, batch: Batch) -> Computed:
        """Runs the batch's tokens through the model."""
        entries, tokens, wanted = [], [], []
        last, offset = [], 0
        for request, start in zip(batch.requests, batch.starts, strict=True):
            stop = request.kv_len
            entries.append(BatchEntry(request.row, start, stop))
            tokens.append(request.tokens[start:stop])
            wanted += [offset + at - start for at in logprob_positions(request, start)]
            wanted.append(offset + stop - 1 - start)
            last.append(len(wanted) - 1)
            offset += stop - start
        metadata = build_metadata(self.rows.rows, entries, self.page_size, self.device)
        token_ids = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        index = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        return Computed(batch, self.forward(token_ids, metadata, index), last)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, logit_index: Tensor) -> Tensor:
        """The model's logits at these tokens; see `LlamaModel.forward`."""
        return self.model.forward(token_ids, metadata, self.pool, self.attention, logit_index)

    def overlap(self, engine: Any) -> Any:
        """What launches a step before the last one was read (fast/overlap.py); None: each is read at once."""
        return None

    def use(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape."""
        # Adapters are their engine's, and so is whose rows have them: only the own ones come with a model.
        self.model = model if hasattr(self.model, "plain") else getattr(model, "plain", model)

    def copy_slots(self, source: Slots, target: Slots) -> None:
        """Copies KV, all layers: a sample that branches off within a page gets its own copy of the tail."""
        self.pool.copy(torch.from_numpy(source).to(self.device), torch.from_numpy(target).to(self.device))


def logprob_positions(request: Request, start: int) -> range:
    """Which positions, from `start` on, predict a prompt token whose log-probability is wanted."""
    if request.next_logprob >= len(request.prompt):
        return range(0)
    first = max(request.next_logprob - 1, 0)  # what predicts that token; never before `start`
    return range(first, min(request.kv_len, len(request.prompt) - 1))


@dataclass(slots=True)
class Draw:
    """One token to be drawn, from logits row `row`: for a request (index 0) or a sample that branches off it.

    Where none is wanted (between chunks, or no token was asked for) only NaN is looked for.
    """

    request: Request
    index: int
    row: int
    result: Result
    mask: Tensor | None = None

    @property
    def wanted(self) -> bool:
        return self.request.computed and self.request.params.max_new_tokens > 0

    @property
    def params(self) -> SamplingParams:
        return self.request.params if self.wanted else GREEDY

    @property
    def uniform(self) -> float:
        if not self.params.temperature:
            return 0.0
        return position_uniform(self.request.seed, self.request.index + self.index, self.request.length)

    def ask_mask(self, vocab: int) -> None:
        """Which tokens may come next, None for all."""
        ask = self.request.token_mask if self.wanted else None
        try:
            allowed = None if ask is None else ask(list(self.request.output))
            self.mask = None if allowed is None else checked_mask(allowed, vocab)
        except Exception as error:  # the caller's code: anything may come out of it
            self.result.error = f"its token mask failed: {error!r}"


class Computed:
    """A batch's logits `[N, vocab]`: of each request those of `logprob_positions`, then of its last token.

    last: where in N each request's last token is.
    """

    def __init__(self, batch: Batch, logits: Tensor, last: list[int]) -> None:
        self.batch, self.logits, self.last = batch, logits, last

    def read(self) -> list[Result]:
        """Draws what comes next, and reads log-probabilities. What fails for one fails for no other."""
        results, draws, first = [], [], 0
        for request, start, row in zip(self.batch.requests, self.batch.starts, self.last, strict=True):
            samples = [Result() for _ in range(1 + (request.unbranched if request.computed else 0))]
            draws += [Draw(request, index, row, result) for index, result in enumerate(samples)]
            samples[0].branches = samples[1:]
            if first < row:
                samples[0].prompt_logprobs = self._prompt_logprobs(request, start, first, row)
            results.append(samples[0])
            first = row + 1
        for draw in draws:
            draw.ask_mask(self.logits.shape[1])
        self._draw([draw for draw in draws if not draw.result.error])
        return results

    def _prompt_logprobs(self, request: Request, start: int, first: int, stop: int) -> list[float]:
        following = np.array(logprob_positions(request, start)) + 1
        tokens = torch.from_numpy(request.prompt[following]).to(self.logits.device)
        return prompt_logprobs(self.logits[first:stop], tokens)

    def _draw(self, draws: Sequence[Draw]) -> None:
        try:
            drawn = self.sample(draws)
        except Exception as error:
            if len(draws) == 1:
                draws[0].result.error = f"sampling failed: {error!r}"
                return
            for draw in draws:  # one of them is at fault: the others are drawn without it
                self._draw([draw])
            return
        for draw, token, logprob in zip(draws, *drawn, strict=True):
            if logprob != logprob:
                draw.result.error = NOT_A_NUMBER
            elif draw.wanted:
                draw.result.tokens = ((token, logprob),)

    def sample(self, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities."""
        rows = torch.tensor([draw.row for draw in draws], device=self.logits.device)
        masks = [draw.mask for draw in draws]
        return sample(
            self.logits[rows], [draw.params for draw in draws], [draw.uniform for draw in draws],
            masks if any(mask is not None for mask in masks) else None,
        )  # fmt: skip


def checked_mask(allowed: Any, vocab: int) -> Tensor:
    """A caller's mask as a tensor of its own; ValueError unless it is bool `[vocab]` and allows something."""
    mask = torch.as_tensor(allowed).clone()  # the caller may use the same memory for the next one
    if mask.dtype != torch.bool or mask.shape != (vocab,):
        raise ValueError(f"a mask is bool [{vocab}], got {mask.dtype} {list(mask.shape)}")
    if not bool(mask.any()):
        raise ValueError("the mask allows no token")
    return mask
