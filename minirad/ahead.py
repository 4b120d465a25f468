"""Running ahead: the host's work for one decode step while the device computes the step before.

Token N of a request is on the device as soon as its graph has run; the host need not have seen it to
launch the graph that computes token N + 1. So while nothing but decoding is due, a step is launched
before the last one's tokens are read:

    launch N+1 (slots, plan, replay; its tokens are N's, still on the device)
    wait for N, append its tokens, finish who is done

Who turns out to have stopped at N was computed once too often: the result is not looked at, and the slot
is given back. What a request says, and what is left in tree and pool, is the same as step by step.

Only `generate` and `stream` do this, only while nobody listens (a recording shows whole steps), and only
for batches without anything that the host decides between two tokens: masks, stop texts. (What is drawn
by chance is drawn on the device, from the same numbers.) `step()` never overlaps: like everything else
that changes the books, it first has what is in flight read (`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minirad.cache.hiradix_cache import HiRadixCache
from minirad.errors import InvariantError
from minirad.interrupts import HeldInterrupts
from minirad.model.sampler import next_tokens, position_uniform, to_device
from minirad.outputs import GenerationOutput
from minirad.schedule.request import RUNNING, Request

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.runner import StepOutput

__all__ = ["RunAhead"]


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A launched step: tokens and their log-probabilities, `chosen` `[2, B]` on the device, and where they
    arrive on the host when `event` is over."""

    requests: list[Request]
    chosen: Tensor
    arriving: Tensor
    event: Any


class RunAhead:
    """Decodes an engine's running requests with one step always in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        most = engine.config.max_running
        on_gpu = engine.device.type == "cuda"
        # Two, for the step that is read and the one in flight.
        self._arriving = [torch.empty(2 * most, dtype=torch.float64, pin_memory=on_gpu) for _ in range(2)]
        self._turn = 0
        self._flight: _Flight | None = None
        self.busy = False  # with launching or reading
        self.steps = 0  # landed so far, and the seconds in which the host had nothing to do meanwhile
        self.waited = 0.0

    def possible(self) -> bool:
        """Nothing but decoding is due, and nothing in it needs the host between two tokens."""
        engine, scheduler = self._engine, self._engine.scheduler
        if engine.graphs is None or not engine.bus.quiet or not scheduler.decodes_only:
            return False
        if self._flight is not None:  # its requests were looked at when it was launched
            return True
        running = scheduler.running
        return bool(running) and engine.graphs.fits(running) and all(map(_needs_no_host, running))

    def advance(self) -> list[GenerationOutput] | None:
        """Launches a step and reads the one before it: who finished. None if there was nothing to read.

        Ctrl-C and errors come when the books are right again; what finished is in the next report then.
        """
        finished = None
        with HeldInterrupts() as interrupts, self._at_work():
            flight = self._flight or self._launch(self._engine.scheduler.running, None)
            if flight is not None:
                self._flight = flight  # which stays so if the next cannot be launched
                following = None if interrupts.noted else self._launch(self._going_on(flight), flight)
                self._flight = following
                finished = self._land(flight, following)
        try:
            interrupts.deliver()
        except BaseException:
            self._engine._held = (finished or []) + self._engine._held
            raise
        return finished

    def settle(self) -> None:
        """Reads what is in flight, so that the books are those of whole steps.

        Who finishes by that is in the next report.
        """
        if self._flight is None:
            return
        with HeldInterrupts() as interrupts, self._at_work():
            flight, self._flight = self._flight, None
            self._engine._held += self._land(flight, None)
        interrupts.deliver()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _going_on(self, flight: _Flight) -> list[Request]:
        """Who will not have reached its length with the tokens in flight."""
        return [
            request for request in flight.requests
            if request.status == RUNNING and len(request.output) + 1 < request.params.max_new_tokens
        ]  # fmt: skip

    def _launch(self, requests: Sequence[Request], before: _Flight | None) -> _Flight | None:
        """A step for these requests; None, with nothing changed, if there are none or there is no room."""
        engine = self._engine
        graphs = engine.graphs
        if graphs is None or not requests or not graphs.fits(requests):
            return None
        if not engine.ownership.make_room(engine.ownership.need_by_one(requests)):
            return None  # somebody has to be retracted: the scheduler's business
        engine.ownership.extend_by_one(requests)
        try:
            output = graphs.run(requests, None if before is None else _tokens_for(requests, before))
            chosen = _chosen(output, requests)
        except BaseException:  # no memory left for one more graph, say
            for request in requests:
                engine.ownership.take_back_one(request)
            raise
        engine.scheduler.future.step(idle=False)
        self._turn = 1 - self._turn
        # In one piece: into a part of each row torch would copy by way of ordinary memory, and for that it
        # waits until this step has ended.
        arriving = self._arriving[self._turn][: 2 * len(requests)].view(2, -1)
        arriving.copy_(chosen, non_blocking=True)
        return _Flight(list(requests), chosen, arriving, _mark(engine.device))

    def _read(self, flight: _Flight) -> tuple[list[float], list[float]]:
        """Tokens and their log-probabilities, waited for."""
        if isinstance(self._engine.cache, HiRadixCache):
            self._engine.cache.poll()
        began = time.perf_counter()
        flight.event.synchronize()
        self.waited += time.perf_counter() - began
        tokens, logprobs = flight.arriving.tolist()
        if any(logprob != logprob for logprob in logprobs):
            raise InvariantError(f"the logits of some of {[each.id for each in flight.requests]} hold NaN")
        return tokens, logprobs

    def _land(self, flight: _Flight, following: _Flight | None) -> list[GenerationOutput]:
        """Reads a step's tokens, and finishes who is done."""
        engine = self._engine
        try:
            tokens, logprobs = self._read(flight)
        except BaseException:  # nothing of it counts, nor of the step that was to go on from it
            self._flight = None
            engine.scheduler.put_back([each for each in flight.requests if each.status == RUNNING])
            raise
        engine._steps += 1
        self.steps += 1
        ahead = {id(request) for request in following.requests} if following else set()
        # Mostly nobody wants to be told, and a few hundred requests are asked for it at every step.
        take = engine.take_token if engine.is_watched else Request.append
        finished = []
        for request, token, logprob in zip(flight.requests, tokens, logprobs, strict=True):
            if request.status != RUNNING:
                continue  # it had stopped when this was launched, which was not known yet
            take(request, int(token), logprob)
            reason = engine._finish_reason(request)
            if reason:
                if id(request) in ahead:
                    engine.ownership.take_back_one(request)
                finished.append(engine._finish(request, reason))
        return finished


def _chosen(output: StepOutput, requests: Sequence[Request]) -> Tensor:
    """What comes next for each request and its log-probability, as `Engine.step` would sample it."""
    params = [request.params for request in requests]
    if all(each.temperature == 0 for each in params):
        return output.greedy
    # The host may not know the token before it yet, but its place: all before it have KV.
    uniforms = [position_uniform(each.seed, each.index, each.kv_len) for each in requests]
    return next_tokens(output.logits, params, uniforms, output.greedy)


def _tokens_for(requests: Sequence[Request], before: _Flight) -> Tensor:
    """The tokens of a step in flight, on the device, for some of its requests."""
    tokens = before.chosen[0]
    if len(requests) == len(before.requests):
        return tokens
    places = {id(request): at for at, request in enumerate(before.requests)}
    return tokens[to_device(torch.tensor([places[id(request)] for request in requests]), tokens.device)]


def _mark(device: torch.device) -> Any:
    """Something whose `synchronize` waits until the device has come this far."""
    if device.type != "cuda":
        return _Past()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class _Past:
    """A mark on a device that does at once what it is told."""

    def synchronize(self) -> None:
        pass


def _needs_no_host(request: Request) -> bool:
    return not request.params.stop and request.token_mask is None
