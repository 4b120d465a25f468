"""What a batch said is taken on: KV to the tree, tokens to their requests, samples branch, who is done ends.

What fails for one request (not a number, a text that cannot be made, a copy, a tree that refuses) ends that
request with an error, and the others go on as if it had not been there. A broken invariant is raised.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from minirad import events as ev
from minirad.errors import InvariantError
from minirad.launch import Result, Runner
from minirad.outputs import GenerationOutput
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch, Scheduler
from minirad.serve import Outbox
from minirad.tokenizing import Tokenizing


class ResultProcessor:
    """Commits what was read of a launched batch. Finished samples go to the outbox."""

    def __init__(
        self, scheduler: Scheduler, ownership: SlotOwnership, runner: Runner, texts: Tokenizing,
        bus: ev.EventBus, outbox: Outbox,
    ) -> None:  # fmt: skip
        self.scheduler, self.ownership, self.runner = scheduler, ownership, runner
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
        for request, result in pairs:
            if result.tokens:
                request.first_token_at = request.first_token_at or now
                self._take(request, result)
        for request, result in pairs:
            reason = self._finish_reason(request, result.error)
            if reason:
                self.finish(request, reason)

    def _prefilled(self, request: Request, result: Result, prefill: bool) -> list[tuple[Request, Result]]:
        """Commits a chunk. Returns who samples now or has failed: nobody, or the request and its branches."""
        if result.error:
            return [(request, result)]
        try:
            if request.params.logprob_start == 0 and not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing comes before the first token
            request.prompt_logprobs += result.prompt_logprobs
            if prefill:
                self.ownership.commit(request, finished=False)
            if not request.computed:
                return []
            if prefill:
                self.scheduler.prefilled(request)
        except InvariantError:
            raise
        except Exception as error:
            return [(request, Result(error=f"it could not be committed: {error!r}"))]
        branches = [self._branch(request, i, each) for i, each in enumerate(result.branches, start=1)]
        request.unbranched = 0
        return [(request, result), *branches]

    def _branch(self, leader: Request, index: int, result: Result) -> tuple[Request, Result]:
        """A further sample of an n > 1 request, whose prompt has just been computed."""
        sample = leader.branch(index)
        try:
            tail = self.ownership.fork(leader, sample)
            if tail is None:
                self.scheduler.requeue(sample)
                if self.bus.wants(ev.RequestForked):
                    self.bus.emit(ev.RequestForked(sample.id, leader.id, -1, 0))
            else:
                if len(tail):
                    own = self.ownership.rows.rows[sample.row, sample.protected_len : sample.kv_len]
                    self.runner.copy_slots(tail, own)
                self.scheduler.prefilled(sample)
        except InvariantError:
            raise
        except Exception as error:
            result = Result(error=f"it could not branch off: {error!r}")
        return sample, result

    def _take(self, request: Request, result: Result) -> None:
        """New tokens join their request, and whoever wants to know is told."""
        for token, logprob in result.tokens:
            request.append(token, logprob)
            if self.bus.wants(ev.TokenSampled):
                self.bus.emit(ev.TokenSampled(request.id, token, request.length - 1))
            if request.listener is not None:
                request.listener.token(request, token)

    def _finish_reason(self, request: Request, error: str) -> str:
        """Why it ends now; "" if it goes on."""
        params, output = request.params, request.output
        if error:
            request.error = f"{request.id}: {error}"
            return "error"
        try:
            if output and (self.texts.is_end(request, output[-1]) or self.texts.has_stopped(request)):
                return "stop"
        except Exception as problem:
            request.error = f"{request.id}: its text could not be made: {problem!r}"
            return "error"
        return "length" if len(output) >= params.max_new_tokens else ""

    def finish(self, request: Request, reason: str) -> None:
        """Commits (or, on an abort or error, drops) what a request holds and takes it off the books."""
        freed = 0
        if request.row >= 0:
            for _ in range(request.ahead):
                self.ownership.take_back_one(request)
            request.ahead = 0
            if reason not in ("abort", "error"):
                reason = self._give_to_tree(request, reason)
            if request.row >= 0:
                freed = self.ownership.release(request, "released")
        self.scheduler.finish(request)
        text, reason = self._final_text(request, reason)
        request.finish_reason = reason
        if reason == "abort":
            if self.bus.wants(ev.RequestAborted):
                self.bus.emit(ev.RequestAborted(request.id, freed))
        elif self.bus.wants(ev.RequestFinished):
            self.bus.emit(
                ev.RequestFinished(
                    request.id, reason, len(request.prompt), request.cached_tokens,
                    len(request.output),
                )
            )  # fmt: skip
        for index in range(request.index, request.index + 1 + request.unbranched):  # its samples end with it
            output = self._output(request, index, text)
            self.outbox.put(output)
            if request.listener is not None:
                request.listener.ended(output)

    def _give_to_tree(self, request: Request, reason: str) -> str:
        """The last commit, which gives its row back; an error if the tree does not take it."""
        try:
            self.ownership.commit(request, finished=True)
            return reason
        except InvariantError:
            raise
        except Exception as problem:
            request.error = f"{request.id}: its KV could not be kept: {problem!r}"
            return "error"

    def _final_text(self, request: Request, reason: str) -> tuple[str, str]:
        """The reply's text, and how it ended: an error, if there is no text of these tokens."""
        try:
            return self.texts.final(request), reason
        except Exception as problem:
            request.error = request.error or f"{request.id}: its text could not be made: {problem!r}"
            return "", reason if reason == "abort" else "error"

    def _output(self, request: Request, index: int, text: str) -> GenerationOutput:
        now = time.perf_counter()
        return GenerationOutput(
            request_id=request.group,
            index=index,
            text=text,
            token_ids=list(request.output),
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            finish_reason=request.finish_reason,
            ttft=(request.first_token_at or now) - request.added_at,
            seconds=now - request.added_at,
            logprobs=request.output_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            error=request.error,
        )

    def give_up(self, request: Request) -> None:
        """Nothing can run and nothing will change by itself: pins hold what this request needs."""
        need, shared = self.scheduler.shortage(request)
        beside = f" beside the {shared} pinned ones that it shares" if shared else ""
        request.error = (
            f"{request.id} needs {need} slots{beside}, but of {self.ownership.allocator.num_tokens} only "
            f"{self.ownership.room} are free or evictable: the rest is pinned"
        )
        self.finish(request, "error")
