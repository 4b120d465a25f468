"""The engine as lesson 11's exercises see it: requests sent, waited for and pinned; and what it counts.

Everything here runs the real scheduler, tree and allocator. Where only tokens count, no model computes
them (`simulate.ModelFreeEngine`); where the likelihood of a text counts, the classroom Llama does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lessons.grading.spec import Failure
from lessons.grading.words import shown
from minirad.config import EngineConfig, SamplingParams, ScheduleOptions
from minirad.engine import Engine
from minirad.frontend import Job, ProgramPlayer, State, play, run
from minirad.outputs import Pin, StepReport
from minirad.simulate import ModelFreeEngine

ENDLESS = 4096  # slots: more than any exercise needs, so that nothing is evicted


class ExactEngine(ModelFreeEngine):
    """No model; a reply is as long as it may be, and of equal prompts the same.

    No request waits for another's prefix (`in_batch_prefix`): what is computed twice is seen.
    """

    def __init__(self, kv_tokens: int = ENDLESS, chunk: int = 512) -> None:
        super().__init__(kv_tokens, chunk=chunk, options=ScheduleOptions(in_batch_prefix=False))
        self.pinned: dict[int, list[int]] = {}  # what is held
        self.let_go: list[list[int]] = []  # what was held
        self.late = 0  # requests that go on from what was let go

    def pin(self, prefix: Any, *rest: Any, **more: Any) -> Pin:
        pin = super().pin(prefix, *rest, **more)
        self.pinned[pin.id] = list(prefix)
        return pin

    def unpin(self, pin: Pin) -> None:
        super().unpin(pin)
        self.let_go.append(self.pinned.pop(pin.id))

    def add_request(self, prompt: Any, params: SamplingParams | None = None, *rest: Any, **more: Any) -> str:
        held = list(self.pinned.values())
        self.late += any(
            len(old) < len(prompt) and old == list(prompt[: len(old)]) and old not in held
            for old in self.let_go
        )
        asked = replace(params or SamplingParams(), ignore_eos=True)
        return super().add_request(prompt, asked, *rest, **more)

    def step(self) -> StepReport:
        """Also where a request ends in an error: whoever asked for it hears of that."""
        report = Engine.step(self)
        self.now += 1
        return report


_STEP = Engine.step


@contextlib.contextmanager
def engines(run: bool) -> Iterator[None]:
    """Whether engines may run meanwhile: not while somebody predicts what they do."""

    def refuse(engine: Engine) -> StepReport:
        raise Failure("your function let an engine run: predict what it does without it")

    before = Engine.step
    setattr(Engine, "step", _STEP if run else refuse)  # noqa: B010 (mypy refuses an assignment)
    try:
        yield
    finally:
        setattr(Engine, "step", before)  # noqa: B010


@functools.cache
def classroom_engine() -> Engine:
    """The classroom Llama on the CPU, started once in a process. It may hold what others left: flush it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    return Engine(EngineConfig(device="cpu", kv_tokens=1024, in_batch_prefix=False))


# ---------------------------------------------------------------------- the desk


class Call(NamedTuple):
    """One call of a student's: kind "send", "score", "wait", "pin" or "unpin", and what it was about."""

    kind: str
    tokens: tuple[int, ...] = ()
    number: int = 0  # new tokens; where scores begin; tokens pinned; requests not done when it was unpinned
    names: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """A request in words."""
        more = f"{self.number} new tokens" if self.kind == "send" else f"scores from place {self.number} on"
        return f"{self.kind} of {len(self.tokens)} tokens {shown(list(self.tokens))} with {more}"


@dataclass
class Desk:
    """What a student's `fork` and `select` call. before: called ahead of each call, with what it will be."""

    engine: Engine
    before: Callable[[Call], None] = lambda call: None
    calls: list[Call] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # pins
    answers: dict[str, Any] = field(default_factory=dict)  # None: on its way
    cached: dict[str, int] = field(default_factory=dict)  # of each request that is done
    start: int = 0  # the engine's count of computed tokens when the desk was opened
    steps: int = 0

    def __post_init__(self) -> None:
        self.start = self.engine.stats.computed

    # -------------------------------------------------------------- for students

    def send(self, tokens: Sequence[int], new_tokens: int) -> str:
        """Puts a request on its way; its answer will be a reply of so many token ids (none: [])."""
        return self._send("send", tokens, new_tokens, SamplingParams(max_new_tokens=new_tokens))

    def score(self, tokens: Sequence[int], start: int) -> str:
        """Puts a request on its way; its answer will be the log-probabilities of tokens[start:]."""
        params = SamplingParams(max_new_tokens=0, logprob_start=start)
        return self._send("score", tokens, start, params)

    def wait(self, names: Sequence[str]) -> list[list[Any]]:
        """Lets the engine work until these requests are done; their answers, in the order of `names`."""
        if isinstance(names, str):
            raise ValueError(f"wait takes a list of names, not the name {names!r}")
        names = list(names)
        self._note(Call("wait", names=tuple(names)))
        unknown = [name for name in names if name not in self.answers]
        if unknown:
            raise ValueError(f"wait: {shown(unknown[0])} is no name that send or score gave")
        while any(self.answers[name] is None for name in names):
            if not self.engine.has_work:
                raise Failure("the engine has nothing to do, and a request that you wait for is not done")
            self.step()
        return [list(self.answers[name]) for name in names]

    def pin(self, tokens: Sequence[int]) -> Any:
        """Holds what the tree has of these tokens now: it is not evicted until `unpin`."""
        self._note(Call("pin", tuple(tokens)))
        pin = self.engine.pin(list(tokens))
        self.held.append(pin)
        self.calls[-1] = self.calls[-1]._replace(number=pin.length)
        return pin

    def unpin(self, pin: Any) -> None:
        """Lets go what `pin` held."""
        self._note(Call("unpin", number=list(self.answers.values()).count(None)))
        if pin not in self.held:
            raise ValueError(f"unpin: {shown(pin)} is no pin that you hold")
        self.held.remove(pin)
        self.engine.unpin(pin)

    # -------------------------------------------------------------- for cases

    def _send(self, kind: str, tokens: Sequence[int], number: int, params: SamplingParams) -> str:
        self._note(Call(kind, tuple(tokens), number))
        name = self.engine.add_request(list(tokens), params)
        self.answers[name] = None
        self.calls[-1] = self.calls[-1]._replace(names=(name,))
        return name

    def _note(self, call: Call) -> None:
        self.before(call)
        self.calls.append(call)

    def step(self) -> None:
        """One step of the engine."""
        self.steps += 1
        for output in self.engine.step().finished:
            if output.request_id not in self.answers:
                continue
            if output.finish_reason == "error":
                raise Failure(f"the engine gave a request up: {output.error}")
            scored = [each for each in output.prompt_logprobs if each is not None]
            self.answers[output.request_id] = scored or list(output.token_ids)
            self.cached[output.request_id] = output.cached_tokens

    def other(self, tokens: Sequence[int], priority: int = 0, serve: bool = True) -> None:
        """Somebody else's request, with one new token; serve: to its end."""
        name = self.engine.add_request(list(tokens), SamplingParams(max_new_tokens=1), None, priority)
        done = False
        while serve and not done:
            done = name in [output.request_id for output in self.engine.step().finished]

    @property
    def requests(self) -> list[Call]:
        """What was sent, in order."""
        return [call for call in self.calls if call.kind in ("send", "score")]

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine has computed since the desk was opened."""
        return self.engine.stats.computed - self.start

    def close(self) -> None:
        """Ends what is on its way, so that the engine can be used again."""
        for pin in self.held:
            self.engine.unpin(pin)
        self.held.clear()
        for name, answer in self.answers.items():
            if answer is None:
                self.engine.abort(name)


# ---------------------------------------------------------------------- the engine's own frontend


class Ran(NamedTuple):
    """What the engine's own frontend did for a program."""

    prompts: list[list[int]]  # in the order of sending
    each: list[int]  # how many tokens of each were computed
    computed: int
    steps: int
    late: int  # requests that went on from a prefix after its pin had been given back
    value: Any


def run_program(
    engine: ExactEngine, program: Callable[..., Any], *args: Any, hints: bool = True, parallel: bool = True
) -> Ran:
    """Plays one program; raises what it raises."""
    player = ProgramPlayer([Job(program, args)], engine.encode, engine, hints=hints, parallel=parallel)
    before, steps = engine.stats.computed, engine.now
    play(engine, player)
    value = player.outcomes[0].result()
    served = list(engine.served.values())
    prompts, each = [one.prompt.tolist() for one in served], [len(one.prompt) - one.cached for one in served]
    return Ran(prompts, each, engine.stats.computed - before, engine.now - steps, engine.late, value)


async def forking(
    s: State, prefix: Sequence[int], branches: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """The frontend's fork: every branch adds its own tokens and generates. Returns the replies."""
    s += list(prefix)
    states = await s.fork(len(branches))
    for state, own in zip(states, branches, strict=True):
        state += list(own)
        state.gen("reply", max_new_tokens=new)
    await states.join()
    return [state.said("reply").token_ids for state in states]


async def selecting(s: State, prefix: Sequence[int], choices: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The frontend's select: the choice, and each choice's score."""
    s += list(prefix)
    await s.select("choice", choices)
    said = s.said("choice")
    return said.text, said.scores


@functools.cache
def forked(
    prefix: int, own: tuple[int, ...], new_tokens: int, chunk: int, hint: bool, parallel: bool
) -> tuple[int, int, tuple[int, ...]]:
    """What a fork of these lengths costs: computed tokens, steps, and of each request the computed tokens."""
    branches = [range(100 * place, 100 * place + size) for place, size in enumerate(own, start=1)]
    before = range(10_000, 10_000 + prefix)
    ran = run_program(
        ExactEngine(chunk=chunk), forking, before, branches, new_tokens, hints=hint, parallel=parallel
    )
    return ran.computed, ran.steps, tuple(ran.each)


@functools.cache
def selected(text: str, choices: tuple[str, ...]) -> tuple[list[int], list[list[int]], int, list[float], int]:
    """A prefix and choices as token ids, and what the frontend's select says: place, scores, computed."""
    engine = classroom_engine()
    engine.flush_cache()
    prefix = engine.encode(text).tolist()
    ids = [engine.texts.encode(choice, prefix[-1]) for choice in choices]
    before = engine.stats.computed
    chosen, scores = run(engine, selecting, prefix, choices).result()
    cost = engine.stats.computed - before
    return prefix, ids, choices.index(chosen), [scores[each] for each in choices], cost


# ---------------------------------------------------------------------- trees of thought


@dataclass(frozen=True)
class Thought:
    """A thought as exercise.py describes it."""

    tokens: tuple[int, ...]
    new_tokens: int
    children: tuple[Thought, ...] = ()

    @property
    def own(self) -> int:
        return len(self.tokens) + self.new_tokens

    @property
    def longest(self) -> int:
        """Slots for the longest way from here on."""
        return self.own + max((child.longest for child in self.children), default=0)

    @property
    def all(self) -> int:
        """Slots for everything from here on."""
        return self.own + sum(child.all for child in self.children)


class Thinking(NamedTuple):
    """ways: all tokens of each, in the tree's order. computed: the fewest tokens. steps: one by one."""

    ways: list[list[int]]
    computed: int
    steps: int


@functools.cache
def endless(root: Thought, promising: Callable[[list[int]], bool]) -> Thinking:
    """A tree of thought level by level, thought by thought, in a pool where nothing is ever evicted."""
    engine = ExactEngine()
    ended: dict[tuple[int, ...], list[int]] = {}  # by the place in the tree
    level: list[tuple[tuple[int, ...], list[int], Thought]] = [((), [], root)]
    while level:
        below = []
        for place, before, thought in level:
            prompt = [*before, *thought.tokens]
            engine.add_request(prompt, SamplingParams(max_new_tokens=thought.new_tokens))
            reply: list[int] = []
            while engine.has_work:
                reply = [token for output in engine.step().finished for token in output.token_ids]
            if promising(reply) and thought.children:
                below += [((*place, i), prompt + reply, child) for i, child in enumerate(thought.children)]
            else:
                ended[place] = prompt + reply
        level = below
    return Thinking([ended[place] for place in sorted(ended)], engine.stats.computed, engine.now)
