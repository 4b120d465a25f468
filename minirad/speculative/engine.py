"""An engine with drafts: slots for them once a batch is known, and those of the rejected ones back at once.

Between two steps nothing is drafted: all books are as without. Within one, a decoding request's row is longer
by its drafts; a draft may evict what is cached, as decoding does, but never pushes a request out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from minirad.engine import Engine
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from minirad.parts import Result
from minirad.process_result import ResultProcessor, failed
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch
from minirad.speculative.jump import forced_tokens
from minirad.speculative.runner import Ahead, DraftBatch, DraftResult, DraftRunner
from minirad.speculative.stats import DraftStats

__all__ = ["DraftingEngine", "drafting"]


def drafting(kind: type[Engine]) -> type[Engine]:
    """The class of an engine that drafts, for a class of one that does not."""
    if issubclass(kind, DraftingEngine):
        return kind
    if kind not in _DRAFTING:
        _DRAFTING[kind] = (
            DraftingEngine if kind is Engine else type(kind.__name__, (DraftingEngine, kind), {})
        )
    return _DRAFTING[kind]


_DRAFTING: dict[Any, type[Engine]] = {}  # by the class that a caller made an engine of


class DraftingEngine(Engine):
    """drafts: running totals of what was drafted and accepted."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if not isinstance(self.runner, DraftRunner):
            raise ValueError(
                f"speculative: these parts have a {type(self.runner).__name__}, which does not draft"
            )
        self.drafts = DraftStats()
        self.runner.texts = self.tokenizing
        before = self.results
        self.results = _Results(
            before.scheduler, before.cache_manager, before.runner, before.texts, before.bus, before.outbox
        )

    def _schedule(self) -> Batch | None:
        self.cache_manager.tree.before_step()
        batch = self.scheduler.next_batch()
        if batch is not None:
            try:
                batch = self._with_drafts(batch)
            except BaseException:
                self.scheduler.put_back(batch.requests)
                raise
        self.cache_manager.tree.before_launch()
        return batch

    def _with_drafts(self, batch: Batch) -> Batch:
        """The same batch, with slots for what its decoding requests draft or are forced to say."""
        counts, chunk = [0] * batch.prefills, self.config.chunk_tokens
        for request in batch.requests[batch.prefills :]:
            counts.append(self._room_for_drafts(request, chunk))
            chunk -= counts[-1] if Ahead.of(request).jump else 0
        same = {each.name: getattr(batch, each.name) for each in fields(Batch)}
        return DraftBatch(**same, counts=counts)

    def _room_for_drafts(self, request: Request, chunk: int) -> int:
        """Gives a request slots for its drafts, or for `chunk` forced tokens at most; how many it got."""
        left = request.params.max_new_tokens - len(request.output) - 1  # one comes anyway
        manager, start, ahead = self.cache_manager, request.kv_len, Ahead.of(request)
        page, most = manager.allocator.page_size, min(left, self.config.draft_tokens)
        ahead.jump = []
        if self.config.jump_forward:
            most_forced = min(left, chunk, manager.room + page)
            ahead.jump = forced_tokens(request, most_forced, self.tokenizing, self.runner.vocab_size)
        count = len(ahead.jump) or (self.runner.drafter.propose(request, most) if most > 0 else 0)
        for room in (manager.room, manager.allocator.available):  # a copy may lock what counts as evictable
            stop = min(start + count, start + -start % page + room // page * page)
            if stop > start and manager.extend(request, stop):
                return stop - start
        return 0

    def commit(self, batch: Batch, results: Sequence[Result]) -> None:
        """Takes rejected drafts' slots back, and then on what the batch said."""
        try:
            drafts = getattr(batch, "drafts", None) or [[]] * len(batch.requests)
            counts = getattr(batch, "counts", None) or [0] * len(batch.requests)
            for at, (request, result) in enumerate(zip(batch.requests, results, strict=True)):
                if counts[at]:
                    self._roll_back(request, drafts[at], result)
                if at >= batch.prefills:
                    accepted = result.accepted if isinstance(result, DraftResult) else 0
                    forced = isinstance(result, DraftResult) and result.forced
                    self.drafts.add(len(drafts[at]), accepted, len(result.tokens), forced)
        except BaseException:
            self.scheduler.put_back([request for request in batch.requests if request.row >= 0])
            for request in batch.requests:
                request.draft = None  # it is ahead with tokens that do not come
            raise
        super().commit(batch, results)

    def _roll_back(self, request: Request, draft: list[int], result: Any) -> None:
        slots = self.rows.rows[request.row, request.kv_len - len(draft) : request.kv_len].tolist()
        if result.forced:  # nothing of it can be rejected
            if self.bus.wants(TokensForced):
                self.bus.emit(TokensForced(request.id, tuple(draft), tuple(slots)))
            return
        if self.bus.wants(TokensDrafted):
            source = self.runner.drafter.source
            self.bus.emit(TokensDrafted(request.id, tuple(draft), tuple(slots), source))
        if self.bus.wants(DraftVerified):
            tokens = tuple(token for token, _ in result.tokens)
            self.bus.emit(DraftVerified(request.id, len(draft), result.accepted, tokens))
        self._take_back(request, result.accepted)

    def _take_back(self, request: Request, accepted: int) -> None:
        """Leaves a row with what has KV that holds; a page in which nothing is left is free again."""
        self.cache_manager.take_back(request, request.length + accepted, "rejected")


class _Results(ResultProcessor):
    """Takes several tokens of a decoding request on, and lets the drafter know of samples that branch off."""

    def _prefilled(self, request: Request, result: Result, prefill: bool) -> list[tuple[Request, Result]]:
        if not prefill:  # it decodes beside prompts: its tokens are behind what has KV
            return [(request, result)]
        return super()._prefilled(request, result, prefill)

    def _branch(self, leader: Request, index: int, result: Result) -> tuple[Request, Result]:
        sample, result = super()._branch(leader, index, result)
        if sample.row >= 0 and not result.error:
            try:
                self.runner.drafter.branched(sample, result)  # type: ignore[attr-defined]  # a DraftRunner
            except Exception as error:
                result = Result(error=failed("it could not branch off", error))
        return sample, result
