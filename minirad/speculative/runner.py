"""Drafts are verified: one forward pass over the last token and its drafts, and as many tokens as hold.

At each position the model's own token is drawn exactly as without drafts: from the same logits, with the same
uniform number, under the mask for the reply so far. A draft is accepted while it is that token, and the token
behind the last accepted one comes for free. So drafts decide how many tokens a pass yields, never which.

Keeps no books: the engine gives slots to drafts before, and takes those of the rejected back (engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata, BatchEntry, build_metadata
from minirad.config import SamplingParams
from minirad.model.sampler import position_uniform, prompt_logprobs
from minirad.parts import NOT_A_NUMBER, Pending, Result
from minirad.rooms import room
from minirad.runner import Computed, Draw, logprob_positions
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

__all__ = ["Ahead", "DraftBatch", "DraftResult", "DraftRunner", "Drafter", "Verified"]


class Drafter(Protocol):
    """What guesses the next tokens.

    source: its name. layers: how many layers of keys and values it needs in the pool, behind the model's.
    """

    source: str
    layers: int

    def around(self, runner: Any) -> DraftRunner: ...
    def propose(self, request: Request, most: int) -> int: ...
    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]: ...
    def learn(self, verified: Verified, results: list[Any]) -> None: ...
    def branched(self, sample: Request, result: Any) -> None: ...
    def use(self, model: Any) -> None: ...


@dataclass(slots=True)
class DraftBatch(Batch):
    """A batch with slots for drafts: the last `counts[i]` of request i's slots are theirs.

    drafts: the tokens, once they are known (`DraftRunner.launch`).
    """

    counts: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class DraftResult(Result):
    """accepted: how many of its drafts have to keep their KV: those behind which a token was drawn.

    forced: its drafts are what its grammar forces (jump.py), and keep it in any case.
    hidden: of a sample that branches off, the hidden state `[hidden]` of the prompt's last token.
    """

    accepted: int = 0
    forced: bool = False
    hidden: Any = None


@dataclass(slots=True)
class Ahead:
    """What is kept of a request between two steps (`Request.draft`).

    guess: the drafter's own. jump: what its grammar forces behind its last token. The rest is what Tokenizing
    asks of a request, of one whose reply is some tokens ahead of what the engine has taken on.
    """

    params: SamplingParams
    token_mask: Any
    output: list[int] = field(default_factory=list)
    reply: Any = None
    guess: Any = None
    jump: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> Ahead:
        """A request's own."""
        if request.draft is None:
            request.draft = cls(request.params, request.token_mask)
        found: Ahead = request.draft
        return found


class DraftRunner:
    """Any runner, with drafts. Whatever else is asked of it, the runner inside answers.

    texts: says where a reply ends (the engine's Tokenizing); nothing is drawn behind that.
    verified: the class of what `launch` returns for a batch with drafts.
    """

    def __init__(self, inner: Any, drafter: Drafter) -> None:
        self.inner, self.drafter = inner, drafter
        self.verified: type[Verified] = Verified
        self.texts: Any = None
        # Where there is one, tokens are drawn on the device, as they are without drafts.
        fast = room("fast.sampling") if hasattr(inner, "faster") else None
        self.computed: type[Computed] = Computed if fast is None else fast.DrawnOnDevice

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def overlap(self, engine: Any) -> None:
        """No step is launched before the last one was read: it is not known how many tokens that yields."""

    def use(self, model: Any) -> None:
        """Goes on with other weights of the same shape."""
        self.inner.use(model)
        self.drafter.use(model)

    def launch(self, batch: Batch) -> Pending:
        """Runs the batch's tokens and their drafts through the model."""
        counts = batch.counts if isinstance(batch, DraftBatch) else [0] * len(batch.requests)
        drafts = self._drafts(batch.requests, counts)
        if not self.drafter.layers and not any(drafts):
            pending: Pending = self.inner.launch(batch)  # which may replay a captured step
            return pending
        if isinstance(batch, DraftBatch):
            batch.drafts = drafts
        tokens, entries, wanted, last, offset = [], [], [], [], 0
        for request, start, draft in zip(batch.requests, batch.starts, drafts, strict=True):
            stop, known = request.kv_len, request.tokens[start : request.kv_len]
            entries.append(BatchEntry(request.row, start, stop))
            tokens.append(np.append(known, np.array(draft, dtype=np.int64)))
            wanted += [offset + at - start for at in logprob_positions(request, start)]
            last.append(len(wanted))
            offset += stop - start
            wanted += range(offset - 1 - len(draft), offset)
        tell = getattr(self.inner, "tell", None)
        if tell is not None:  # adapters: whose rows these are
            tell(batch)
        metadata = self.plan(entries)
        ids = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        index = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        hidden, logits = self.forward(ids, metadata, index)
        return self.verified(self, batch, drafts, self.computed(batch, logits, last), hidden, metadata)

    def _drafts(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Of each request what it has slots for: what its grammar forces, or else what is drafted for it."""
        jumps = [
            request.draft.jump[:count] if count else []
            for request, count in zip(requests, counts, strict=True)
        ]
        counts = [0 if jump else count for jump, count in zip(jumps, counts, strict=True)]
        drafts = self.drafter.draft(requests, counts)
        return [jump or draft for jump, draft in zip(jumps, drafts, strict=True)]

    def plan(self, entries: Sequence[BatchEntry]) -> AttentionMetadata:
        """The metadata of tokens in these rows."""
        self.rows.rewritten.update(entry.row for entry in entries)  # a captured step has to look again
        return build_metadata(self.rows.rows, entries, self.page_size, self.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, metadata: AttentionMetadata, logit_index: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The hidden states `[T, hidden]` before the last norm, if the drafter wants them; and logits."""
        if not self.drafter.layers:
            return None, self.inner.forward(token_ids, metadata, logit_index)
        model = getattr(self.inner, "faster", self.model)
        self.attention.plan(metadata, self.pool)
        x = F.embedding(token_ids, model.embed)
        x = model.through_layers(x, metadata, self.pool, self.attention)
        return x, model.logits(x[logit_index])


@dataclass(slots=True)
class DraftDraw(Draw):
    """The token behind the first `ahead` drafts of a request. before: what joins its reply until then."""

    ahead: int = 0
    before: Sequence[int] = ()

    @property
    def wanted(self) -> bool:
        return True

    @property
    def uniform(self) -> float:
        if not self.params.temperature:
            return 0.0
        return position_uniform(self.request.seed, self.request.index, self.request.length + self.ahead)

    def ask_mask(self, vocab: int) -> None:
        """Which tokens may come behind those before."""
        output = self.request.output
        try:
            output += self.before
            Draw.ask_mask(self, vocab)
        finally:
            del output[len(output) - len(self.before) :]


class Verified:
    """A launched batch with drafts.

    logits: `[N, vocab]`, of each request those of `logprob_positions`, then of its last token (at `last`) and
    of its drafts.
    hidden: `[T, hidden]` of all tokens of the batch, or None; metadata: what they are.
    """

    def __init__(
        self, runner: DraftRunner, batch: Batch, drafts: list[list[int]], computed: Computed,
        hidden: Tensor | None, metadata: AttentionMetadata,
    ) -> None:  # fmt: skip
        self.runner, self.batch, self.drafts = runner, batch, drafts
        self.computed, self.hidden, self.metadata = computed, hidden, metadata
        self.logits, self.last = computed.logits, computed.last

    def read(self) -> list[Result]:
        """For each request as many tokens as hold. What fails for one fails for no other."""
        try:
            results = self._drawn()
            self.runner.drafter.learn(self, results)
            return [*results]
        except BaseException:
            for request in self.batch.requests:
                request.draft = None  # it may be ahead with tokens that do not come
            raise

    def _drawn(self) -> list[DraftResult]:
        vocab, first, now = self.logits.shape[1], 0, []
        results, draws = [], []
        mine: list[Any]
        rows = zip(self.batch.requests, self.batch.starts, self.drafts, self.last, strict=True)
        for request, start, draft, row in rows:
            results.append(DraftResult(forced=bool(draft) and bool(request.draft.jump)))
            if results[-1].forced:
                behind = len(draft)
                mine = [DraftDraw(request, 0, row + behind, Result(), ahead=behind, before=draft)]
                now += mine
            elif draft:
                mine = [
                    DraftDraw(request, 0, row + ahead, Result(), ahead=ahead)
                    for ahead in range(len(draft) + 1)
                ]
                now += mine if request.token_mask is None else mine[:1]  # a mask asks for what comes before
            else:
                samples = [DraftResult() for _ in range(request.unbranched if request.computed else 0)]
                results[-1].branches = samples
                each = enumerate([results[-1], *samples])
                mine = [Draw(request, index, row, result) for index, result in each]
                now += mine
            draws.append(mine)
            if first < row:
                results[-1].prompt_logprobs = self.computed._prompt_logprobs(request, start, first, row)
            first = row + len(draft) + 1
        self._draw(now, vocab)
        for result, draft, mine in zip(results, self.drafts, draws, strict=True):
            if result.forced:
                self._jump(result, draft, mine[0])
            elif draft:
                self._accept(result, draft, mine, vocab)
        return results

    def _draw(self, draws: Sequence[Draw], vocab: int) -> None:
        for draw in draws:
            draw.ask_mask(vocab)
        self.computed._draw([draw for draw in draws if not draw.result.error])

    def _jump(self, result: DraftResult, draft: list[int], behind: DraftDraw) -> None:
        """Forced tokens with the model's log-probabilities, and the token that was drawn behind them."""
        logits = self.logits[behind.row - len(draft) : behind.row].float()
        logprobs = prompt_logprobs(logits, torch.tensor(draft, device=logits.device))
        result.accepted, result.error = len(draft), behind.result.error
        result.tokens = [*zip(draft, logprobs, strict=True), *behind.result.tokens]
        for at, logprob in enumerate(logprobs):
            if logprob != logprob:
                result.tokens, result.error = result.tokens[:at], NOT_A_NUMBER
                break

    def _accept(self, result: DraftResult, draft: list[int], draws: Sequence[DraftDraw], vocab: int) -> None:
        """The model's own tokens, up to the first that is not the draft or that ends the reply."""
        run: list[tuple[int, float]] = []
        for draw in draws:
            if draw.ahead and draw.request.token_mask is not None:
                draw.before = [token for token, _ in run]
                draw.ask_mask(vocab)
                self.computed._draw([] if draw.result.error else [draw])
            if draw.result.error:
                result.error, result.accepted = draw.result.error, len(run)
                break
            run += draw.result.tokens
            result.accepted = len(run) - 1
            if run[-1][0] not in draft[draw.ahead : draw.ahead + 1] or self._has_ended(draw.request, run):
                break
        result.tokens = run

    def _has_ended(self, request: Request, run: list[tuple[int, float]]) -> bool:
        ahead = Ahead.of(request)
        ahead.output = request.output + [token for token, _ in run]
        try:
            return bool(self.runner.texts.has_ended(ahead))
        except Exception:  # its text cannot be made: who takes the token on will find that, too
            return True
