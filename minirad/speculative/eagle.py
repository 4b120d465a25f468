"""Drafts by a head: one layer over the model's own hidden states (head.py), with its KV in the same slots.

Unit i of the head lies in the slot of token i and depends on token i + 1 as well. After each forward pass
the head goes over the same positions, with the hidden states and the next tokens that are known by then
(`learn`): before their KV is given to the tree, so that what is shared there is whole. That leaves a guess at
the token behind the last one; the next step begins with going on from that guess, and from the head's own
features where hidden states are not known yet (`draft`). What it writes then is written over by the
next `learn`, or lies in slots that are given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirad.attention.metadata import BatchEntry
from minirad.config import EngineConfig
from minirad.model.classroom import DRAFT_HEAD
from minirad.model.llama import LlamaModel
from minirad.schedule.request import Request
from minirad.speculative.head import DraftHead
from minirad.speculative.runner import Ahead, DraftRunner, Verified

__all__ = ["EagleDrafter"]


@dataclass(frozen=True, slots=True, eq=False)
class _Guess:
    """What a request begins to draft from, once it has `length` tokens.

    token: the guess at the next one; feature: `[hidden]`, at the hidden state of the last one.
    """

    length: int
    token: int
    feature: Tensor


class EagleDrafter:
    """Drafts with the head that the configuration names, or with the one that the classroom Llama has.

    Raises:
        ValueError: for a head of another size, and where none is named for another model.
    """

    source = "eagle"

    def __init__(self, config: EngineConfig, model: LlamaModel) -> None:
        self.head = DraftHead.load(config.draft_model or DRAFT_HEAD, model)
        self.layers = self.head.layers
        self.runner: Any = None

    def around(self, runner: Any) -> DraftRunner:
        """The runner that verifies the drafts. Raises ValueError where its attention cannot run the head."""
        heads = self.head.config.heads
        if runner.attention.name == "flashinfer" and heads != runner.model.config.heads:
            raise ValueError(
                f"the draft head has {heads} attention heads, the model {runner.model.config.heads}: "
                "attention 'flashinfer' plans for one number, attention 'torch' runs both"
            )
        self.runner = DraftRunner(runner, self)
        return self.runner  # type: ignore[no-any-return]

    def use(self, model: LlamaModel) -> None:
        """Drafts for other weights of the same shape; how well is another question."""
        self.head.target = getattr(model, "plain", model)  # the head is nobody's adapter

    def propose(self, request: Request, most: int) -> int:
        """How many tokens it drafts for a request, `most` at most."""
        guess = Ahead.of(request).guess
        return most if guess is not None and guess.length == request.length else 0

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """The drafts themselves: `counts[i]` tokens of each request, for which it has slots."""
        drafts: list[list[int]] = [
            [request.draft.guess.token] if count else []
            for request, count in zip(requests, counts, strict=True)
        ]
        features = {at: requests[at].draft.guess.feature for at, count in enumerate(counts) if count}
        for step in range(1, max(counts, default=0)):
            going = [at for at, count in enumerate(counts) if count > step]
            places = [requests[at].length - 2 + step for at in going]
            entries = [
                BatchEntry(requests[at].row, place, place + 1)
                for at, place in zip(going, places, strict=True)
            ]
            hidden = torch.stack([features[at] for at in going])
            found = self._units(entries, [drafts[at][-1] for at in going], hidden)
            tokens = self._likeliest(found)
            for at, token, feature in zip(going, tokens, found, strict=True):
                drafts[at].append(token)
                features[at] = feature
        return drafts

    def learn(self, verified: Verified, results: list[Any]) -> None:
        """Goes over the positions whose KV is kept: hidden states and next tokens are known now."""
        assert verified.hidden is not None
        entries: list[BatchEntry] = []
        tokens: list[int] = []
        rows: list[int] = []
        ends = []
        batch = verified.batch
        offsets = verified.metadata.q_indptr.tolist()
        for at, (request, start, draft, result) in enumerate(
            zip(batch.requests, batch.starts, verified.drafts, results, strict=True)
        ):
            if result.error:
                continue
            size = request.kv_len - start - len(draft) + result.accepted
            behind = [*request.tokens[start + 1 :].tolist(), *(token for token, _ in result.tokens)][:size]
            if len(behind) < size:  # nothing was sampled: with bigram keys this unit is shared with nobody
                behind.append(behind[-1] if behind else request.last_token)
            entries.append(BatchEntry(request.row, start, start + size))
            tokens += behind
            rows += range(offsets[at], offsets[at] + size)
            for branch in result.branches:
                branch.hidden = verified.hidden[rows[-1]]
            if result.tokens:
                ends.append((request, result, len(rows) - 1))
        if not entries:
            return
        found = self._units(entries, tokens, verified.hidden[rows])
        self._guess(
            [(request, len(result.tokens)) for request, result, _ in ends], found[[at for *_, at in ends]]
        )

    def branched(self, sample: Request, result: Any) -> None:
        """The unit of the prompt's last token has another next token in each sample: computed anew.

        Under plain keys that unit may be the tree's already, and stays what it is.
        """
        at = len(sample.prompt) - 1
        if not result.tokens or at < sample.protected_len:
            return
        found = self._units([BatchEntry(sample.row, at, at + 1)], [result.tokens[0][0]], result.hidden[None])
        self._guess([(sample, 1)], found)

    def _units(self, entries: list[BatchEntry], behind: list[int], hidden: Tensor) -> Tensor:
        """The head's features `[T, hidden]` for units in these places."""
        runner = self.runner
        metadata = runner.plan(entries)
        tokens = torch.from_numpy(np.array(behind, dtype=np.int64)).to(runner.device)
        return self.head.forward(tokens, hidden, metadata, runner.pool, runner.attention)

    def _likeliest(self, features: Tensor) -> list[int]:
        tokens: list[int] = self.head.logits(features).argmax(-1).tolist()
        return tokens

    def _guess(self, requests: list[tuple[Request, int]], features: Tensor) -> None:
        """What each goes on from, when so many new tokens have joined it."""
        if requests:
            for (request, new), token, feature in zip(
                requests, self._likeliest(features), features, strict=True
            ):
                Ahead.of(request).guess = _Guess(request.length + new, token, feature)
