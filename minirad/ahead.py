"""Running ahead: the host's work for one decode step while the device computes the step before.

Token N of a request is on the device as soon as its graph has run; the host need not have seen it to
launch the graph that computes token N + 1. So while nothing but decoding is due, a step is launched
before the last one's tokens are read:

    launch N+1 (slots, plan, replay; its tokens are N's, still on the device)
    wait for N, append its tokens, finish who is done

Who turns out to have stopped at N was computed once too often: the result is not looked at, and the slot
is given back. What a request says, and what is left in tree and pool, is the same as step by step.

Only `generate` does this, only while nobody listens (a recording shows whole steps), and only for
batches without anything that the host decides between two tokens: sampling with temperature, masks, stop
texts. `step()` never overlaps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minirad.cache.hiradix_cache import HiRadixCache
from minirad.errors import InvariantError
from minirad.interrupts import HeldInterrupts
from minirad.outputs import GenerationOutput
from minirad.schedule.request import RUNNING, Request

if TYPE_CHECKING:
    from minirad.engine import Engine

__all__ = ["RunAhead"]


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A launched step: `greedy` on the device, and where it arrives on the host when `event` is over."""

    requests: list[Request]
    greedy: Tensor
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
        self.steps = 0  # landed so far, and the seconds in which the host had nothing to do meanwhile
        self.waited = 0.0

    def possible(self) -> bool:
        """Nothing but decoding is due, and nothing in it needs the host between two tokens."""
        engine, scheduler = self._engine, self._engine.scheduler
        if engine.graphs is None or scheduler.waiting or scheduler.chunking or not engine.bus.quiet:
            return False
        running = scheduler.running
        return bool(running) and engine.graphs.fits(running) and all(map(_needs_no_host, running))

    def run(self) -> list[GenerationOutput]:
        """Decodes until something else is due; whatever was launched has been read then."""
        finished: list[GenerationOutput] = []
        with HeldInterrupts() as interrupts:
            flight = self._launch(self._engine.scheduler.running, None)
            while flight is not None:
                following = None
                if not interrupts.noted:
                    following = self._launch(self._going_on(flight), flight)
                finished += self._land(flight, following)
                flight = following
            if interrupts.noted:
                self._engine._held = finished + self._engine._held
        interrupts.deliver()
        return finished

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
        tokens = None
        if before is not None:
            tokens = before.greedy[0]
            if len(requests) != len(before.requests):
                places = {id(request): at for at, request in enumerate(before.requests)}
                index = [places[id(request)] for request in requests]
                tokens = tokens[torch.tensor(index, device=tokens.device)]
        output = graphs.run(requests, tokens)
        self._turn = 1 - self._turn
        # One piece of memory: into any other the copy waits.
        arriving = self._arriving[self._turn][: 2 * len(requests)].view(2, -1)
        arriving.copy_(output.greedy, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Flight(list(requests), output.greedy, arriving, event)

    def _land(self, flight: _Flight, following: _Flight | None) -> list[GenerationOutput]:
        """Reads a step's tokens, and finishes who is done."""
        engine = self._engine
        engine._steps += 1
        if isinstance(engine.cache, HiRadixCache):
            engine.cache.poll()
        began = time.perf_counter()
        flight.event.synchronize()
        self.waited += time.perf_counter() - began
        self.steps += 1
        tokens, logprobs = flight.arriving.tolist()
        ahead = {id(request) for request in following.requests} if following else set()
        finished = []
        for request, token, logprob in zip(flight.requests, tokens, logprobs, strict=True):
            if request.status != RUNNING:
                continue  # it had stopped when this was launched, which was not known yet
            if logprob != logprob:
                raise InvariantError(f"{request.id}: its logits hold NaN")
            request.append(int(token), logprob)
            reason = engine._finish_reason(request)
            if reason:
                if id(request) in ahead:
                    engine.ownership.take_back_one(request)
                finished.append(engine._finish(request, reason))
        return finished


def _needs_no_host(request: Request) -> bool:
    params = request.params
    return params.temperature == 0 and not params.stop and request.token_mask is None
