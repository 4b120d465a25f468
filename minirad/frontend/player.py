"""Runs programs: several at a time on one engine, each as if it were alone.

    async def capital(s: State, country: str) -> str:
        s.system("You are a helpful assistant.")
        s.user(f"What is the capital of {country}?")
        return await s.gen("answer")

    run(engine, capital, "France").value                            # "The capital of France is Paris."
    run_many(engine, [(capital, "France"), (capital, "Peru")])      # both in the same batches

A program is an `async def` function, and `await` marks exactly the places where the engine works. The
alternatives were plain functions in threads, which look the same but for `await` and bring locks, parked
threads when a run is abandoned, and no way into a browser; and generators (`x = yield s.gen(...)`), whose
values no type checker follows and which call each other less simply. There is no asyncio either: nothing
here waits for a clock or a socket, only for the engine's next step.

**Order.** Requests are sent in the order in which programs ask for them; programs go on in the order in
which the engine reports what they wait for, each as far as it can. So one workload gives one schedule.

ProgramPlayer has the methods of `workloads.Player` (due, sent, refused, finished, next_due), so whatever
drives a workload, with an engine or without one, drives programs.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from minirad.config import SamplingParams
from minirad.frontend.state import State, TokenMask
from minirad.frontend.tasks import ProgramError, Resume, Task, Waitable
from minirad.frontend.texts import Texts

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.outputs import Pin, StepReport

T = TypeVar("T")
R = TypeVar("R")
Function = Callable[..., Coroutine[Any, None, R]]


@dataclass(frozen=True, slots=True)
class Job:
    """A program to be run once. arrival: the step before which it starts.

    seed: what its calls' seeds are made of; None: its place among the jobs. extra_key, priority, lora: of
    all its requests, as in `Engine.add_request`.
    """

    function: Function[Any]
    args: tuple[Any, ...] = ()
    name: str = ""
    arrival: int = 0
    seed: int | None = None
    extra_key: Hashable = None
    priority: int = 0
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """Jobs under a name: a workload. kv_tokens: a pool small enough for evictions to be seen."""

    name: str
    title: str
    jobs: tuple[Job, ...]
    kv_tokens: int = 512

    def player(self, encode: Callable[[str], Iterable[int]], engine: Engine | None = None) -> ProgramPlayer:
        """What drives it; engine: None in a simulation."""
        return ProgramPlayer(self.jobs, encode, engine)


@dataclass(slots=True)
class Usage:
    """Tokens of one job's requests, hints and choices included; summed as requests finish."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """How a job ended: what the program returned, or what it raised; its state and its tokens."""

    name: str
    value: R | None
    error: Exception | None
    state: State
    usage: Usage

    def result(self) -> R:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return cast(R, self.value)


class Asked(Waitable[Any]):
    """A request that is due: add it to an engine, then tell `ProgramPlayer.sent` its id."""

    def __init__(
        self, running: _Running, label: str, prompt: list[int], params: SamplingParams,
        token_mask: TokenMask | None, resume: Resume,
    ) -> None:  # fmt: skip
        super().__init__(label, resume)
        self.running, self.session, self.label = running, running.job, label
        self.prompt, self.params, self.token_mask = prompt, params, token_mask
        self.turn = running.usage.requests
        self.reply: tuple[int, ...] | None = None  # what a program asks is in no recording beforehand


@dataclass(slots=True, eq=False)
class _Running:
    """A job under way; what its states ask for goes through here (the Host of state.py)."""

    player: ProgramPlayer
    job: Job
    name: str
    base_seed: int
    texts: Texts
    usage: Usage = field(default_factory=Usage)
    main: Task[Any] | None = None  # None: not started
    state: State = field(init=False)
    tasks: list[Task[Any]] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    outcome: Outcome[Any] | None = None

    def __post_init__(self) -> None:
        self.state = State(self)

    def begin(self) -> None:
        self.main = self.spawn(self.name, self._program())
        self.main.heard = True  # `outcome` tells

    async def _program(self) -> Any:
        coroutine = self.job.function(self.state, *self.job.args)
        if not isinstance(coroutine, Coroutine):
            raise TypeError(f"a program is an `async def` function, not {self.job.function!r}")
        return await coroutine

    @property
    def hints(self) -> bool:
        return self.player.hints

    def ask(
        self, what: str, prompt: list[int], params: SamplingParams, token_mask: TokenMask | None = None
    ) -> Asked:
        self._require_open(what)
        asked = Asked(self, f"{self.name} · {what}", prompt, params, token_mask, self._resume)
        self.usage.requests += 1
        self.player.queue.append(asked)
        return asked

    def spawn(self, what: str, coroutine: Coroutine[Any, None, T]) -> Task[T]:
        task = Task(what, coroutine, self._resume)
        self.tasks.append(task)
        if self.outcome is not None:
            task.close()
        task.step()
        return task

    def seed(self, place: tuple[int, ...]) -> int:
        digest = hashlib.blake2b(repr((self.base_seed, place)).encode(), digest_size=6).digest()
        return int.from_bytes(digest, "big")

    def pin(self, tokens: list[int]) -> Pin | None:
        engine = self.player.engine
        if engine is None or self.outcome is not None:
            return None
        pin = engine.pin(tokens, self.job.extra_key, self.job.lora)
        self.pins.append(pin)
        return pin

    def unpin(self, pin: Pin | None) -> None:
        if pin in self.pins and self.player.engine is not None:
            self.pins.remove(pin)
            self.player.engine.unpin(pin)

    def end(self) -> None:
        """Notes the outcome and gives back everything: open calls, requests on their way, pins."""
        assert self.main is not None
        error = self.main.error or self._left_open()
        value = None if error else self.main.result()
        self.outcome = Outcome(self.name, value, error, self.state, self.usage)
        self.player.forget(self)
        for task in self.tasks:
            task.close()
        for pin in list(self.pins):
            self.unpin(pin)

    def _left_open(self) -> Exception | None:
        """What a program that has returned did not wait for, or an error that it never met."""
        for task in self.tasks:
            if not task.done:
                return ProgramError(f"{self.name} returned, but did not await {task.what}")
            if task.error is not None and not task.heard:
                return task.error
        return None

    def _require_open(self, what: str) -> None:
        if self.outcome is not None:
            raise ProgramError(f"{self.name} has ended: {what} comes too late")

    def _resume(self, task: Task[Any]) -> None:
        self.player.ready.append((self, task))


class ProgramPlayer:
    """Says which requests of some programs are due, and resumes the programs with what comes back.

    encode: text -> ids. engine: for pins, chat template and masks; None in a simulation: then hints are
    sent but not pinned, replies are scripts without text, and `select` takes the first choice.
    hints: False sends no prefix ahead of a fork's branches or of a `select`'s choices, and pins none.
    parallel: False has one request of a program on its way at a time, in the order of asking. Neither changes
    what a program says: both are there to measure what they are worth.

    Its driver sends what is `due` before each step, passes on what has `finished`, and calls
    `close` if it stops before `done`. `outcomes` is in the jobs' order.
    """

    def __init__(
        self, jobs: Sequence[Job], encode: Callable[[str], Iterable[int]], engine: Engine | None = None,
        *, hints: bool = True, parallel: bool = True,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.hints, self.parallel = hints, parallel
        self.labels: dict[str, str] = {}
        self.queue: list[Asked] = []  # not sent yet
        self.ready: deque[tuple[_Running, Task[Any]]] = deque()
        texts = Texts(encode, engine)
        self._running = [
            _Running(self, job, name, place if job.seed is None else job.seed, texts)
            for place, (job, name) in enumerate(zip(jobs, _names(jobs), strict=True))
        ]
        self._to_start = sorted(self._running, key=lambda running: running.job.arrival)
        self._sent: dict[str, Asked] = {}
        self._now = 0

    def due(self, step: int) -> list[Asked]:
        """What is to be sent before step `step` (counted from 0) is run."""
        self._now = max(self._now, step)
        while self._to_start and self._to_start[0].job.arrival <= step:
            self._to_start.pop(0).begin()
            self._go_on()
        due = self._may_go()
        gone = set(due)
        self.queue = [asked for asked in self.queue if asked not in gone]
        return due

    def _may_go(self) -> list[Asked]:
        """What of the queue can be sent now: without `parallel`, one request of each program."""
        if self.parallel:
            return self.queue
        busy = {asked.running for asked in self._sent.values()}
        first = {asked.running: asked for asked in reversed(self.queue)}
        return [asked for asked in self.queue if asked.running not in busy and first[asked.running] is asked]

    def sent(self, asked: Asked, request_id: str) -> None:
        """The engine's id of a request that was due."""
        self.labels[request_id] = asked.label
        self._sent[request_id] = asked
        if asked.running.outcome is not None:  # an earlier refusal has ended the program
            self._abort(request_id)

    def refused(self, asked: Asked, error: str | Exception = "the engine refused it") -> None:
        """The engine refused it (too long, say): the program gets this as a ProgramError."""
        asked.settle(error=ProgramError(f"{asked.label}: {error}"))
        self._go_on()

    def finished(self, output: Any, step: int) -> None:
        """Takes a GenerationOutput (those of requests that are not ours are ignored)."""
        asked = self._sent.pop(output.request_id, None) if output.index == 0 else None
        if asked is None:
            return
        self._now = max(self._now, step)
        if output.finish_reason == "error" and self._made_room_for(output.request_id):
            self.queue.append(asked)
            return
        usage = asked.running.usage
        usage.prompt_tokens += len(asked.prompt)
        usage.cached_tokens += getattr(output, "cached_tokens", 0)
        usage.new_tokens += len(output.token_ids)
        if output.finish_reason in ("abort", "error"):
            why = getattr(output, "error", "") or "it was aborted"
            asked.settle(error=ProgramError(f"{asked.label}: {why}"))
        else:
            asked.settle(output)
        self._go_on()

    @property
    def next_due(self) -> int | None:
        """The step at which something is due next; None if nothing is (or only after replies)."""
        if self._may_go():
            return self._now
        return self._to_start[0].job.arrival if self._to_start else None

    @property
    def done(self) -> bool:
        """Every program has ended."""
        return all(running.outcome is not None for running in self._running)

    @property
    def outcomes(self) -> list[Outcome[Any]]:
        """Of the jobs that have ended, in the order of the jobs."""
        return [running.outcome for running in self._running if running.outcome is not None]

    def close(self) -> None:
        """Ends what still runs: requests are aborted, pins released."""
        self._to_start.clear()
        for running in self._running:
            if running.outcome is None and running.main is not None:
                running.main.close()
                running.end()

    def forget(self, running: _Running) -> None:
        """Takes a program's requests back, sent or not."""
        self.queue = [asked for asked in self.queue if asked.running is not running]
        for request_id in [name for name, asked in self._sent.items() if asked.running is running]:
            self._abort(request_id)

    def _made_room_for(self, request_id: str) -> bool:
        """Lets all prefixes go if a request had no room beside them: no program fails for a hint's sake."""
        stuck = None if self.engine is None else self.engine.scheduler.stuck
        if stuck is None or stuck.group != request_id:
            return False
        pins = [(running, pin) for running in self._running for pin in running.pins]
        for running, pin in pins:
            running.unpin(pin)
        return bool(pins)

    def _abort(self, request_id: str) -> None:
        del self._sent[request_id]
        if self.engine is not None:
            self.engine.abort(request_id)

    def _go_on(self) -> None:
        """Lets every program run until it waits again or has ended."""
        while True:
            for running in self._running:
                if running.outcome is None and running.main is not None and running.main.done:
                    running.end()
            if not self.ready:
                return
            running, task = self.ready.popleft()
            if running.outcome is None:
                task.step()


def run(engine: Engine, program: Function[R], *args: Any, seed: int = 0) -> Outcome[R]:
    """Runs one program to its end; raises what it raises."""
    outcome: Outcome[R] = run_many(engine, [Job(program, args, seed=seed)])[0]
    outcome.result()
    return outcome


def run_many(
    engine: Engine, programs: Sequence[Job | Function[Any] | tuple[Any, ...]],
    *, hints: bool = True, parallel: bool = True,
) -> list[Outcome[Any]]:  # fmt: skip
    """Runs several programs at the same time; outcomes in their order, errors within them.

    programs: functions, tuples (function, *args), or Jobs. Requests that others have added go on
    meanwhile; those that finish are in the next step's report. hints, parallel: see ProgramPlayer.
    """
    player = ProgramPlayer(
        [_job(each) for each in programs], engine.encode, engine, hints=hints, parallel=parallel
    )
    play(engine, player)
    return player.outcomes


def play(
    engine: Engine, player: ProgramPlayer, watch: Callable[[StepReport], None] = lambda report: None
) -> None:
    """Runs a player's programs to their end. watch: called with each step's report."""
    others: list[Any] = []
    step = 0
    try:
        while not player.done:
            if not engine.has_work:
                if player.next_due is None:
                    raise RuntimeError("the programs wait for something that no request will bring")
                step = max(step, player.next_due)
            send_due(engine, player, step)
            step += 1
            report = engine.step()
            watch(report)
            for output in report.finished:
                player.finished(output, step)
                if output.request_id not in player.labels:
                    others.append(output)
    finally:
        player.close()
        engine.outbox.take_of(player.labels)
        engine.outbox.put_back(others)


def send_due(engine: Engine, player: Any, step: int) -> list[tuple[Any, ValueError | None]]:
    """Adds to an engine what a player (one of these, or workloads.Player) has due; tells it the outcome.

    Returns each request that was due, with the engine's refusal if there was one."""
    due: list[tuple[Any, ValueError | None]] = []
    for asked in player.due(step):
        job = asked.session
        try:
            name = engine.add_request(
                asked.prompt, asked.params, job.extra_key, job.priority, token_mask=asked.token_mask,
                lora=job.lora,
            )  # fmt: skip
        except ValueError as error:
            player.refused(asked, error)
            due.append((asked, error))
        else:
            player.sent(asked, name)
            due.append((asked, None))
    return due


def _job(program: Job | Function[Any] | tuple[Any, ...]) -> Job:
    if isinstance(program, Job):
        return program
    function, *args = program if isinstance(program, tuple) else (program,)
    return Job(function, tuple(args))


def _names(jobs: Sequence[Job]) -> list[str]:
    """Each job's own name, else its function's in words; numbered where several share one."""
    names = [job.name or getattr(job.function, "__name__", "program").replace("_", " ") for job in jobs]
    return [
        f"{name} {names[: at + 1].count(name)}" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]
