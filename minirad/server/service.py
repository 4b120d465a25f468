"""The seam between threads: any thread submits requests and cancels them; one thread drives the engine.

    ticket = service.submit(spec, on_pieces)     any thread
    service.turn()                               the engine's thread: take in, one step, hand out

`EngineThread` turns for as long as there is work. Who has an engine's thread already (the live page) calls
`turn` in it, with its own way to step. Nothing is shared but the lists under `_changed`, so the engine goes
on serving one thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minirad.cache.node import Slots
from minirad.config import SamplingParams
from minirad.outputs import GenerationOutput
from minirad.server.likeliest import Asking, Top, Watch
from minirad.server.settings import Limits

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.schedule.request import Request, TokenMask

MOST_WAIT = 60  # seconds that a client is asked to wait at most


class Busy(Exception):
    """As many requests wait as may. seconds: when to try again."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Ended(Exception):
    """This server takes no requests any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """What one client asks for: prompts (int64 ids), each with its parameters.

    stream: pieces as they come; else only the last ones. tops: how many of the likeliest tokens are wanted at
    each place; None: no log-probabilities. masks: one for each prompt, or none. extra_key: the namespace.
    lora: an adapter's name, or "".
    """

    prompts: tuple[Slots, ...]
    params: tuple[SamplingParams, ...]
    stream: bool = False
    tops: int | None = None
    masks: tuple[TokenMask, ...] = ()
    extra_key: Hashable = None
    lora: str = ""

    @property
    def samples(self) -> int:
        """Replies in all."""
        return sum(param.n for param in self.params)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something new of one reply. Texts joined together are the output's text.

    index: of the reply, over all prompts of a ticket. token None: it brings none. output: with the last one.
    prompt_tops: with the last one, by position.
    """

    index: int
    text: str = ""
    token: int | None = None
    logprob: float = 0.0
    top: Top = ()
    output: GenerationOutput | None = None
    prompt_tops: dict[int, Top] = field(default_factory=dict)


class Ticket:
    """A submitted request. names: what the engine calls its parts; reason: why it got no answer, or ""."""

    def __init__(self, spec: Spec, on_pieces: Callable[[list[Piece]], None]) -> None:
        self.spec, self.on_pieces = spec, on_pieces
        self.submitted = time.perf_counter()
        self.names: list[str] = []
        self.left = spec.samples
        self.cancelled, self.reason = False, ""
        self.heard: list[_Heard] = []
        self.told: dict[int, float] = {}  # of each reply, when its last token came


class NoMetrics:
    """What is told of requests, and by nobody kept; metrics.py does."""

    def attach(self, engine: Engine) -> None:
        """From now on this engine serves."""

    def token(self, ticket: Ticket, index: int, now: float) -> None:
        """A token of a reply came."""

    def ended(self, ticket: Ticket, output: GenerationOutput) -> None:
        """A reply ended."""


class _Heard:
    """What the engine tells of one prompt's request: tokens as they are drawn, outputs as they come."""

    def __init__(self, service: Service, ticket: Ticket, at: int, texts: Any, asking: Asking | None) -> None:
        self._service, self._ticket, self._asking = service, ticket, asking
        params = ticket.spec.params[at]
        self.first = sum(each.n for each in ticket.spec.params[:at])
        self._keep = ticket.spec.stream or ticket.spec.tops is not None
        self._texts = [texts.stream(params.stop) for _ in range(params.n)] if ticket.spec.stream else []
        self._fresh: list[tuple[int, int, float, Top]] = []
        self._finished: dict[int, GenerationOutput] = {}

    def token(self, request: Request, token: int) -> None:
        index = request.index
        self._service.metrics.token(self._ticket, self.first + index, time.perf_counter())
        if self._keep:
            top = self._asking.of_next(index) if self._asking else ()
            self._fresh.append((index, token, request.output_logprobs[-1], top))
            self._service.touched[self._ticket] = None

    def ended(self, output: GenerationOutput) -> None:
        self._finished[output.index] = output
        self._service.metrics.ended(self._ticket, output)
        self._service.touched[self._ticket] = None

    def pieces(self) -> list[Piece]:
        """What is new."""
        found, last = [], {each[0]: at for at, each in enumerate(self._fresh)}
        for at, (index, token, logprob, top) in enumerate(self._fresh):
            done = self._finished.pop(index, None) if at == last[index] else None
            found.append(self._piece(index, done, token, logprob, top))
        found += [self._piece(index, done) for index, done in self._finished.items()]
        self._fresh, self._finished = [], {}
        return found

    def _piece(
        self, index: int, done: GenerationOutput | None, token: int | None = None, logprob: float = 0.0,
        top: Top = (),
    ) -> Piece:  # fmt: skip
        text = ""
        if self._texts and done is not None:
            text = self._texts[index].end(done.text)
        elif self._texts:
            text = self._texts[index].add(token)
        prompt = self._asking.prompt if self._asking and done is not None else {}
        return Piece(self.first + index, text, token, logprob, top, done, prompt)


class Service:
    """One engine's requests, from other threads to its own and back.

    limits.queue: how many samples may wait beside those for which the engine has rows.
    """

    def __init__(
        self, engine: Engine, limits: Limits | None = None, metrics: NoMetrics | None = None
    ) -> None:
        self.limits, self.metrics = limits or Limits(), metrics or NoMetrics()
        self.error = ""  # what broke the engine
        self.touched: dict[Ticket, None] = {}  # by the step that runs, in the order in which they were told
        self.turns = 0
        self._changed = threading.Condition()
        self._coming: deque[Ticket] = deque()
        self._going: deque[Ticket] = deque()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._open: dict[Ticket, None] = {}
        self._samples = 0  # of the open ones
        self._ending = self._over = False
        self._since: float | None = None  # when the turn that runs began
        self._took: deque[float] = deque([1.0], maxlen=32)  # seconds of the last requests
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        engine.texts  # noqa: B018  (loads the tokenizer now, and refuses here)
        self.engine, self._watch = engine, Watch(engine.runner)
        self.metrics.attach(engine)

    # ------------------------------------------------------------ from any thread

    @property
    def capacity(self) -> int:
        """Samples that may be here at a time."""
        return self.engine.config.max_running + self.limits.queue

    @property
    def open(self) -> int:
        """Samples that are here: they wait or run."""
        return self._samples

    @property
    def ending(self) -> bool:
        """No request is taken any more."""
        return self._ending or bool(self.error)

    @property
    def hangs(self) -> float:
        """Seconds that the step which runs now has taken so far; 0.0 between two."""
        since = self._since
        return 0.0 if since is None else time.perf_counter() - since

    def submit(self, spec: Spec, on_pieces: Callable[[list[Piece]], None]) -> Ticket:
        """Queues what a client asks for.

        on_pieces: called in the engine's thread with what is new, once a turn; it must not wait. The last
        piece of each sample has its output. Where `Ticket.reason` is set there will be no more.

        Raises Busy where too many wait, Ended, and ValueError for what could never run.
        """
        for prompt, params in zip(spec.prompts, spec.params, strict=True):
            self.engine.check_prompt(prompt, params)
        ticket = Ticket(spec, on_pieces)
        with self._changed:
            if self.ending:
                raise Ended(self.error or "the server is ending")
            if self._samples + spec.samples > self.capacity:
                raise Busy(self._busy(spec.samples), self._wait_for())
            self._open[ticket] = None
            self._samples += spec.samples
            self._coming.append(ticket)
            self._changed.notify_all()
        return ticket

    def _busy(self, more: int) -> str:
        return f"{self._samples} replies wait or run, and with {more} more they are over {self.capacity}"

    def _wait_for(self) -> int:
        """Seconds after which a place should be free: what the open ones take, shared by those that run."""
        each = sum(self._took) / len(self._took)
        rounds = self._samples / max(self.engine.config.max_running, 1)
        return int(min(max(each * rounds / 2, 1), MOST_WAIT))

    def cancel(self, ticket: Ticket) -> None:
        """Its client is gone: what runs of it is aborted before the next step, and nothing more is told."""
        with self._changed:
            if ticket in self._open and not ticket.cancelled:
                ticket.cancelled = True
                self._going.append(ticket)
                self._changed.notify_all()

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Calls this with the engine, between two steps, in its thread."""
        answer: Future[Any] = Future()
        with self._changed:
            if self._over or self.error:
                answer.set_exception(Ended(self.error or "the server has ended"))
            else:
                self._calls.append((function, answer))
                self._changed.notify_all()
        return answer

    def end(self) -> None:
        """Takes no more requests; those that are here go on."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def end_all(self, reason: str) -> Future[Any]:
        """Ends every request that is here, with this reason."""
        return self.call(lambda engine: self._fail_all(reason))

    # ------------------------------------------------------------ in the engine's thread

    @property
    def over(self) -> bool:
        """It is ending, and nothing is left to do."""
        return self._ending and not self._open and not self._calls

    def wait(self, timeout: float | None = None) -> None:
        """Returns when there is something to take in, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._coming or self._going or self._calls or self._ending, timeout
            )

    def turn(self, advance: Callable[[], Any] | None = None) -> bool:
        """Takes in what came, makes a step and hands out what is new; False if there was nothing to do.

        advance: how to step; None: the engine's own, which may launch a step before the last was read.
        """
        self._take_in()
        works = self.engine.scheduler.has_work
        if works:
            self._since = time.perf_counter()
            try:
                (advance or self.engine.advance)()
            finally:
                self._since = None
        self._hand_out()
        self.turns += works
        return works

    def use(self, engine: Engine) -> None:
        """Goes on with another engine; what is open ends with that reason."""
        self._fail_all("the engine was replaced by another one")
        self._use(engine)

    def broke(self, error: BaseException) -> None:
        """The engine's step raised this: all that is open ends, and nothing is taken any more."""
        with self._changed:
            self.error = f"the engine broke: {type(error).__name__}: {error}"
            lost = [*self._open]
            calls = [*self._calls]
            for queue in (self._coming, self._going, self._calls):
                queue.clear()
        for ticket in lost:
            self._close(ticket, self.error)
        for _, answer in calls:
            answer.set_exception(Ended(self.error))

    def finish(self) -> None:
        """The engine's thread ends."""
        with self._changed:
            self._over = True
            calls = [*self._calls]
            self._calls.clear()
        for _, answer in calls:
            answer.set_exception(Ended("the server has ended"))

    def _take_in(self) -> None:
        with self._changed:
            coming, going, calls = [*self._coming], [*self._going], [*self._calls]
            for queue in (self._coming, self._going, self._calls):
                queue.clear()
        for ticket in coming:
            if not ticket.cancelled:
                self._begin(ticket)
        for ticket in going:
            self._close(ticket, "its client is gone")
        for function, answer in calls:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(self.engine))
                except ValueError as error:
                    answer.set_exception(error)

    def _begin(self, ticket: Ticket) -> None:
        engine, spec = self.engine, ticket.spec
        requests = []
        try:
            for at, (prompt, params) in enumerate(zip(spec.prompts, spec.params, strict=True)):
                mask: Any = spec.masks[at] if spec.masks else None
                asking = Asking(spec.tops, mask) if spec.tops else None
                request = engine.intake.request(prompt, params, spec.extra_key, 0, asking or mask, spec.lora)
                heard = request.listener = _Heard(self, ticket, at, engine.tokenizing, asking)
                ticket.heard.append(heard)
                requests.append(request)
        except ValueError as error:  # of an engine that came after it was checked
            return self._close(ticket, str(error))
        if spec.tops:
            self._watch.begin()
        engine.enqueue(requests)
        ticket.names = [request.group for request in requests]

    def _hand_out(self) -> None:
        touched, self.touched = self.touched, {}
        if touched:
            self.engine.outbox.take_of({name for ticket in touched for name in ticket.names})
        for ticket in touched:
            if ticket not in self._open:
                continue  # it was closed, and its outputs are nobody's
            pieces = [piece for heard in ticket.heard for piece in heard.pieces()]
            ticket.left -= sum(piece.output is not None for piece in pieces)
            if not ticket.left:
                self._forget(ticket)
                self._took.append(time.perf_counter() - ticket.submitted)
            ticket.on_pieces(pieces)

    def _fail_all(self, reason: str) -> None:
        for ticket in [*self._open]:
            self._close(ticket, reason)

    def _close(self, ticket: Ticket, reason: str) -> None:
        """Ends what runs of a ticket; its client hears why, unless it is gone."""
        if ticket not in self._open:
            return  # it has ended meanwhile
        self._forget(ticket)
        if ticket.names and not self.error:
            self.engine.leave(ticket.names)
        ticket.reason = reason
        if not ticket.cancelled:
            ticket.on_pieces([])

    def _forget(self, ticket: Ticket) -> None:
        with self._changed:
            del self._open[ticket]
            self._samples -= ticket.spec.samples
            if ticket in self._coming:
                self._coming.remove(ticket)
        if ticket.spec.tops and ticket.heard and ticket.names:
            self._watch.end()


class EngineThread(threading.Thread):
    """Turns a service for as long as it goes on. on_end: called in this thread when it is over."""

    def __init__(self, service: Service, on_end: Callable[[], Any] = lambda: None) -> None:
        super().__init__(name="engine", daemon=True)
        self._service, self._on_end = service, on_end

    def run(self) -> None:
        service = self._service
        try:
            while not service.over:
                if not service.turn():
                    service.wait(0.5)
        except BaseException as error:
            traceback.print_exc()
            service.broke(error)
        finally:
            service.finish()
            self._on_end()
