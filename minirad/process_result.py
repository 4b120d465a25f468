"""What a batch said is taken on: KV to the tree, tokens to their requests, samples branch, who is done ends.

What fails for one request (not a number, a text that cannot be made, a copy, a tree that refuses) ends that
request with an error, and the others go on as if it had not been there. A broken invariant is raised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from minirad.errors import InvariantError
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, Outbox
from minirad.parts import Result, Runner
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch, Scheduler


class ResultProcessor:
    """Commits what was read of a launched batch. Finished samples go to the outbox."""

    def __init__(
        self, scheduler: Scheduler, cache_manager: CacheManager, runner: Runner, texts: Any,
        bus: ev.EventBus, outbox: Outbox,
    ) -> None:  # fmt: skip
        self.scheduler, self.cache_manager, self.runner = scheduler, cache_manager, runner
        self.texts, self.bus, self.outbox = texts, bus, outbox

    def process(self, batch: Batch, results: Sequence[Result]) -> None:
        """Gives computed KV to the tree, takes the new tokens on, branches n > 1, finishes who is done.

        What fails for one request ends that request.
        """
        pairs = list(zip(batch.requests, results, strict=True))
        if batch.kind != "decode":  # whose KV stays private until the end
            nested = [self._prefilled(*pair, at < batch.prefills) for at, pair in enumerate(pairs)]
            pairs = [pair for some in nested for pair in some]
        now = time.perf_counter()
        reasons = [self._take(request, result, now) for request, result in pairs]
        for (request, _), reason in zip(pairs, reasons, strict=True):
            if reason:
                self.finish(request, reason)

    def _prefilled(self, request: Request, result: Result, prefill: bool) -> list[tuple[Request, Result]]:
        """Commits a chunk. Returns what samples now or failed: nothing, or the request and its branches."""
        if result.error:
            return [(request, result)]
        try:
            if request.params.logprob_start == 0 and not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing comes before the first token
            request.prompt_logprobs += result.prompt_logprobs
            if prefill:
                self.cache_manager.commit(request, finished=False)
            if not request.computed:
                return []
            if prefill:
                self.scheduler.prefilled(request)
        except Exception as error:
            return [(request, Result(error=failed("it could not be committed", error)))]
        branches = [self._branch(request, i, each) for i, each in enumerate(result.branches, start=1)]
        request.unbranched = 0
        return [(request, result), *branches]

    def _branch(self, leader: Request, index: int, result: Result) -> tuple[Request, Result]:
        """A further sample of an n > 1 request, whose prompt has just been computed."""
        sample = leader.branch(index)
        try:
            tail = self.cache_manager.fork(leader, sample)
            if tail is None:
                self.scheduler.requeue(sample)
                if self.bus.wants(ev.RequestForked):
                    self.bus.emit(ev.RequestForked(sample.id, leader.id, -1, 0))
            else:
                if len(tail):
                    own = self.cache_manager.rows.rows[sample.row, sample.protected_len : sample.kv_len]
                    self.runner.copy_slots(tail, own)
                self.scheduler.prefilled(sample)
        except Exception as error:
            result = Result(error=failed("it could not branch off", error))
        return sample, result

    def _take(self, request: Request, result: Result, now: float) -> str:
        """New tokens join their request, up to one that ends it; its listener, if it has one, is told.

        Returns why it ends now, or "".
        """
        for token, logprob in result.tokens:
            request.first_token_at = request.first_token_at or now
            request.append(token, logprob)
            if self.bus.wants(ev.TokenSampled):
                self.bus.emit(ev.TokenSampled(request.id, token, request.length - 1))
            if request.listener is not None:
                request.listener.token(request, token)
            reason = self._finish_reason(request)
            if reason:
                return reason
        return self._finish_reason(request, result.error) if result.error or not result.tokens else ""

    def _finish_reason(self, request: Request, error: str = "") -> str:
        """Why it ends now; "" if it goes on."""
        try:
            if not error and self.texts.has_ended(request):
                return "stop"
        except Exception as problem:
            error = failed("its text could not be made", problem)
        if error:
            request.error = f"{request.id}: {error}"
            return "error"
        return "length" if len(request.output) >= request.params.max_new_tokens else ""

    def finish(self, request: Request, reason: str) -> None:
        """Commits (or, on an abort or error, drops) what a request holds, and reports its outputs."""
        freed = 0
        try:
            if request.ahead:  # slots of tokens that will not be looked at
                self.cache_manager.take_back(request, request.kv_len - request.ahead)
            request.ahead = 0
            if request.row >= 0 and reason not in ("abort", "error"):
                self.cache_manager.commit(request, finished=True)  # gives its row back
        except Exception as problem:
            request.error, reason = f"{request.id}: {failed('its KV could not be kept', problem)}", "error"
        if request.row >= 0:
            freed = self.cache_manager.release(request, "released")
        self.scheduler.finish(request)
        text = ""
        try:
            text = str(self.texts.final(request))
        except Exception as problem:
            said = f"{request.id}: {failed('its text could not be made', problem)}"
            request.error, reason = request.error or said, reason if reason == "abort" else "error"
        request.finish_reason = reason
        if reason == "abort":
            if self.bus.wants(ev.RequestAborted):
                self.bus.emit(ev.RequestAborted(request.id, freed))
        elif self.bus.wants(ev.RequestFinished):
            self.bus.emit(ev.RequestFinished.of(request, reason))
        for index in range(request.index, request.index + 1 + request.unbranched):  # its samples end with it
            output = _output(request, index, text)
            self.outbox.put(output)
            if request.listener is not None:
                request.listener.ended(output)

    def give_up(self, request: Request) -> None:
        """Nothing can run and nothing will change by itself: pins hold what this request needs."""
        need, shared = self.scheduler.shortage(request)
        beside = f" beside the {shared} pinned ones that it shares" if shared else ""
        request.error = (
            f"{request.id} needs {need} slots{beside}, but of {self.cache_manager.allocator.num_tokens} only "
            f"{self.cache_manager.room} are free or evictable: the rest is pinned"
        )
        self.finish(request, "error")


def failed(what: str, error: Exception) -> str:
    """What a request's error says; a broken invariant is not one request's and is raised again."""
    if isinstance(error, InvariantError):
        raise error
    return f"{what}: {error!r}"


def _output(request: Request, index: int, text: str) -> GenerationOutput:
    now = time.perf_counter()
    first = request.first_token_at or now
    return GenerationOutput(
        request.group, index, text, list(request.output), len(request.prompt), request.cached_tokens,
        request.finish_reason, first - request.added_at, now - request.added_at,
        request.output_logprobs, request.prompt_logprobs, request.error,
    )  # fmt: skip
