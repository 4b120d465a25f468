"""Overlap: the host's work for one decode step while the device computes the step before.

Token N of a request is on the device as soon as its graph has run; the host need not have seen it to
launch the graph that computes token N + 1. So while nothing but decoding is due, a step is launched
before the last one's tokens are read:

    launch N+1 (slots, plan, replay; its tokens are N's, still on the device)
    read N, commit it: append its tokens, finish who is done

Who turns out to have stopped at N was computed once too often: the result is not looked at, and the slot
is given back. What a request says, and what is left in tree and pool, is the same as step by step.

Only `generate` and `stream` do this, only while no handler needs whole steps (a recording shows them), and
only for batches without anything that the host decides between two tokens: masks, stop texts. (What is drawn
by chance is drawn on the device, from the same numbers.) Every other call first has what is in flight read
(`drain`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from minirad.fast.sampling import next_tokens, to_device
from minirad.model.sampler import is_greedy, position_uniform
from minirad.parts import NOT_A_NUMBER, Result
from minirad.schedule.request import RUNNING, Request
from minirad.schedule.scheduler import Batch

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.fast.graphs import StepOutput

__all__ = ["Overlap"]


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A launched step: tokens and their log-probabilities, `chosen` `[2, B]` on the device, and where they
    arrive on the host when `event` is over."""

    requests: list[Request]
    chosen: Tensor
    arriving: Tensor
    event: Any

    def read(self) -> list[Result]:
        """Waits for the tokens."""
        self.event.synchronize()
        pairs = zip(*self.arriving.tolist(), strict=True)
        return [
            Result(((int(token), logprob),)) if logprob == logprob else Result(error=NOT_A_NUMBER)
            for token, logprob in pairs
        ]


class Overlap:
    """Decodes an engine's running requests with one step always in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, cast(Any, engine.runner)  # the GraphRunner that made this
        most = engine.config.max_running
        on_gpu = engine.device.type == "cuda"
        # Two, for the step that is read and the one in flight.
        self._arriving = [torch.empty(2 * most, dtype=torch.float64, pin_memory=on_gpu) for _ in range(2)]
        self._turn = 0
        self.in_flight: _InFlight | None = None
        self.steps = 0  # read so far, and the seconds in which the host had nothing to do meanwhile
        self.waited = 0.0

    def possible(self) -> bool:
        """Nothing but decoding is due, and nothing in it needs the host between two tokens."""
        engine, scheduler = self._engine, self._engine.scheduler
        graphs = self._runner.graphs
        if graphs is None or engine.bus.whole_steps or not scheduler.decodes_only:
            return False
        if self.in_flight is not None:  # its requests were looked at when it was launched
            return True
        running = scheduler.running
        return bool(running) and graphs.fits(running) and all(map(_needs_no_host, running))

    def advance(self) -> bool:
        """Launches a step and commits the one before it; False if it is not possible."""
        if not self.possible():
            return False
        before = self.in_flight or self._launch(self._engine.scheduler.running, None)
        if before is None:
            return False
        self.in_flight = before  # which stays so if the next cannot be launched
        self.in_flight = self._launch(_going_on(before), before)
        self._process_result(before)
        return True

    def drain(self) -> None:
        """Reads what is in flight, so that the books are those of whole steps."""
        if self.in_flight is not None:
            before, self.in_flight = self.in_flight, None
            self._process_result(before)

    def _launch(self, requests: Sequence[Request], before: _InFlight | None) -> _InFlight | None:
        """A step for these requests; None, with nothing changed, if there are none or there is no room."""
        engine = self._engine
        graphs = self._runner.graphs
        if graphs is None or not requests or not graphs.fits(requests):
            return None
        if not engine.cache_manager.make_room(engine.cache_manager.need_by_one(requests)):
            return None  # a request has to be retracted: the scheduler's business
        engine.cache_manager.extend_by_one(requests)
        try:
            output = graphs.run(requests, None if before is None else _tokens_for(requests, before))
            chosen = _chosen(output, requests)
        except BaseException:  # no memory left for one more graph, say
            for request in requests:
                engine.cache_manager.take_back(request, request.kv_len - 1)
            raise
        engine.scheduler.future.step(idle=False)
        self._turn = 1 - self._turn
        arriving = self._arriving[self._turn][: 2 * len(requests)].view(2, -1)
        graphs.to_host(chosen, arriving)
        return _InFlight(list(requests), chosen, arriving, _mark(engine.device))

    def _process_result(self, flight: _InFlight) -> None:
        engine = self._engine
        try:
            engine.cache_manager.tree.before_step()
            began = time.perf_counter()
            results = flight.read()
            self.waited += time.perf_counter() - began
        except BaseException:  # nothing of it counts, nor of the step that was to go on from it
            self.in_flight = None
            engine.scheduler.put_back([each for each in flight.requests if each.status == RUNNING])
            raise
        self.steps += 1
        for request in self.in_flight.requests if self.in_flight else ():
            request.ahead = 1
        # Who had stopped when this was launched, which was not known yet, has ended meanwhile.
        pairs = [pair for pair in zip(flight.requests, results, strict=True) if pair[0].status == RUNNING]
        engine.commit(Batch([request for request, _ in pairs]), [result for _, result in pairs])
        for request in flight.requests:
            request.ahead = 0


def _going_on(flight: _InFlight) -> list[Request]:
    """Who will not have reached its length with the tokens in flight."""
    return [
        request for request in flight.requests
        if request.status == RUNNING and len(request.output) + 1 < request.params.max_new_tokens
    ]  # fmt: skip


def _chosen(output: StepOutput, requests: Sequence[Request]) -> Tensor:
    """What comes next for each request and its log-probability, as `Engine.step` would sample it."""
    params = [request.params for request in requests]
    if all(map(is_greedy, params)):
        return output.greedy
    # The host may not know the token before it yet, but its place: all before it have KV.
    uniforms = [position_uniform(each.seed, each.index, each.kv_len) for each in requests]
    return next_tokens(output.logits, params, uniforms, output.greedy)


def _tokens_for(requests: Sequence[Request], before: _InFlight) -> Tensor:
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
