"""Ctrl-C, and listeners that fail, anywhere in any public call of the engine: one rule for all.

It is raised when the books are right, by the call in which it came, and then:

* a call that would have returned a handle (`add_request`, `pin`) did nothing: nothing queued, nothing locked;
* `generate` and `stream` leave none of their requests;
* everything else happened whole or not at all;
* no output is lost: what was asked for comes out exactly once, and is right.

Ctrl-C is pressed at the first and the last execution of source lines (sys.settrace), for real at random
moments (setitimer), and listeners raise at each event; then the engine plays on, with `check` at each step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fault_support import Expected, require_nothing_held, small_model
from game_support import ADAPTERS, write_adapters, write_head

import minirad
from minirad.config import EngineConfig, SamplingParams, adapter_of
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, Pin
from minirad.schedule.request import Request
from minirad.tiers import disk_names
from minirad.tiers.disk import DiskTier

INSIDE = str(Path(minirad.__file__).parent) + os.sep
BESIDE = {signal.__file__, contextlib.__file__}  # what our own code calls there counts as ours
LINES_EACH = int(os.environ.get("MINIRAD_LINES", "7"))  # of each call, in the default run
REAL_PRESSES = int(os.environ.get("MINIRAD_PRESSES", "60"))

MODEL, OTHER = small_model(0), small_model(1)
EXPECTED = {id(MODEL): Expected(MODEL), id(OTHER): Expected(OTHER)}
FILES = tempfile.TemporaryDirectory()
HEAD = write_head(Path(FILES.name) / "head", MODEL)
LORA = write_adapters(Path(FILES.name), MODEL.config)
MERGED = {  # by adapter and the model below it
    (name, id(model)): Expected(small_model(seed, lora=name))
    for name in ADAPTERS
    for seed, model in enumerate((MODEL, OTHER))
}
REPLY = SamplingParams(max_new_tokens=3, ignore_eos=True)
SHORT = replace(REPLY, max_new_tokens=1)
TWO = replace(REPLY, n=2, temperature=0.8, seed=5)
BACKGROUND = [  # others' requests: with a common beginning, two samples, long ones that come in chunks
    ([5, 6, 7, 8, 9, 10], REPLY),
    ([5, 6, 7, 8, 11], TWO),
    ([20, 21, 22], SHORT),
    ([5, 6, 7, 30, 31, 32, 33], REPLY),
]
BY = ("", "up", "all", "up")  # whose adapters these have, where the engine has adapters
MINE = [([5, 6, 7, 8, 40], REPLY), ([41, 42], replace(REPLY, n=2)), ([5, 6, 43], SHORT)]
WAYS: list[dict[str, Any]] = [
    {"kv_tokens": 40, "chunk_tokens": 4},
    {"kv_tokens": 48, "page_size": 4, "chunk_tokens": 4, "mixed": True},
    {"kv_tokens": 40, "host_kv_tokens": 64, "load_back_threshold": 1},
    {
        "kv_tokens": 40,
        "speculative": "eagle",
        "draft_model": HEAD,
        "host_kv_tokens": 64,
        "disk_dir": FILES.name,
    },
    {
        "kv_tokens": 48,
        "page_size": 4,
        "mixed": True,
        "speculative": "ngram",
        "draft_ngram": 1,
        "lora": LORA,
        "jump_forward": True,
    },
    {"kv_tokens": 40, "lora": LORA, "host_kv_tokens": 40, "host_write": "write_back", "disk_dir": FILES.name},
]


class Failed(OSError):
    """What a listener raises: no space left on device."""


# ---------------------------------------------------------------------- a world, and the rule


class Forcing:
    """Allows what the model says anyway, greedily, and nothing else; and tells it."""

    def __init__(self, engine: Engine, prompt: list[int], lora: str) -> None:
        self.engine, self.prompt, self.lora = engine, prompt, lora

    def __call__(self, said: list[int]) -> Any:
        return np.arange(MODEL.config.vocab_size) == self.forced(said, 1)[0]

    def forced(self, said: list[int], most: int) -> list[int]:
        ask = expected(self.engine.model, self.lora)
        return ask([*self.prompt, *said], replace(REPLY, max_new_tokens=most), 0).token_ids


class World:
    """An engine with others' requests in the middle of their work, and all that it has to answer."""

    def __init__(self, way: dict[str, Any], steps: int = 3, requests: bool = True) -> None:
        if "disk_dir" in way:
            self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            shutil.copytree(filled(tuple(way)), self.folder.name, dirs_exist_ok=True)
            way = {**way, "disk_dir": self.folder.name, "load_back_threshold": 1}
        self.engine = Engine(EngineConfig(max_running=4, poison_freed=True, **way), model=MODEL)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.lora: dict[str, str] = {}
        if "speculative" in way:
            self.guess()
        self.got: list[GenerationOutput] = []
        self.may_be_aborted: set[str] = set()
        self.pins: list[Pin] = []
        self.said: dict[str, int] = {}  # tokens in each sample when the weights may have changed
        if requests:
            for each, lora in zip(BACKGROUND, BY, strict=True):
                self.ask(*each, lora if "lora" in way else "")
            for _ in range(steps):
                self.step()
        else:
            self.engine.generate([prompt for prompt, _ in BACKGROUND], REPLY)

    def ask(self, prompt: list[int], params: SamplingParams, lora: str = "") -> None:
        mask = (
            Forcing(self.engine, prompt, lora) if self.engine.config.jump_forward and 30 in prompt else None
        )
        rid = self.engine.add_request(prompt, params, lora=lora, token_mask=mask)
        self.asked[rid] = (prompt, params)
        self.lora[rid] = lora

    def guess(self) -> None:
        """Half of the drafts are right: some are accepted and some are not, in most steps."""
        drafter = self.engine.runner.drafter
        draft, propose, rng = drafter.draft, drafter.propose, random.Random(0)

        def guided(request: Request, tokens: list[int]) -> list[int]:
            expect = expected(MODEL, adapter_of(request.extra_key))
            reply = expect(request.prompt.tolist(), request.params, request.index).token_ids
            right = reply[len(request.output) :][: len(tokens)]
            right += tokens[len(right) :]
            return [at if rng.random() < 0.5 else token for at, token in zip(right, tokens, strict=True)]

        def drafts(requests: list[Request], counts: list[int]) -> list[list[int]]:
            found = draft(requests, counts)
            more = [tokens + [9] * (n - len(tokens)) for tokens, n in zip(found, counts, strict=True)]
            return [guided(*each) for each in zip(requests, more, strict=True)]

        drafter.draft = drafts
        if drafter.source == "ngram":
            drafter.propose = lambda request, most: max(propose(request, most), most)

    def step(self) -> None:
        self.got += self.engine.step().finished

    def drain(self) -> None:
        for _ in range(300):
            if not self.engine.has_work:
                return
            self.step()
            self.engine.check()
        raise AssertionError(f"still at work: {self.engine.snapshot()['requests']}")

    def live(self) -> set[str]:
        """Ids that the engine holds, waiting or running."""
        return {name.split(".")[0] for name in self.engine.snapshot()["requests"]}

    def play_on(self) -> None:
        """Whatever was asked for comes out once and right; then a later request, and an empty pool."""
        engine = self.engine
        engine.check()
        assert self.live() <= set(self.asked), "a request runs whose id nobody has"
        self.drain()
        came = Counter((each.request_id, each.index) for each in self.got)
        wanted = {(rid, i) for rid, (_, params) in self.asked.items() for i in range(params.n)}
        assert set(came) <= wanted and max(came.values(), default=1) == 1, came
        missing = {rid for rid, _ in wanted - set(came)}
        assert missing <= self.may_be_aborted, (
            f"lost: {wanted - set(came)}"
        )  # n of them, once number 11 holds
        assert {rid for rid, _ in came} == set(self.asked), "no output at all of some request"
        for output in self.got:
            self.require(output)
        for pin in self.pins:
            engine.unpin(pin)
        for prompt, params in (MINE[2], ([5, 6, 7, 8, 9, 50], SHORT)):
            for lora in ("", *dict(engine.config.lora)):
                for output in engine.generate(prompt, params, lora=lora):
                    expected(engine.model, lora).require_equal(prompt, params, output)
        require_nothing_held(engine)

    def require(self, output: GenerationOutput) -> None:
        prompt, params = self.asked[output.request_id]
        lora, model = self.lora[output.request_id], plain(self.engine.model)
        old, now = expected(MODEL, lora), expected(model, lora)
        if output.finish_reason == "abort":
            assert output.request_id in self.may_be_aborted, output
            wanted = old(prompt, params, output.index).token_ids
            assert output.token_ids == wanted[: len(output.token_ids)]
        elif model is MODEL:
            now.require_equal(prompt, params, output)
        else:  # what it had said by the old weights, and what the new ones say to that
            name = output.request_id + (f".{output.index}" if output.index else "")
            said = output.token_ids[: self.said.get(name, len(output.token_ids))]
            assert said == old(prompt, params, output.index).token_ids[: len(said)], output
            rest = replace(params, max_new_tokens=params.max_new_tokens - len(said))
            if params.temperature == 0 and len(said) < len(output.token_ids):
                assert output.token_ids == said + now([*prompt, *said], rest, 0).token_ids, output


def plain(model: LlamaModel) -> LlamaModel:
    """A model without its adapters."""
    return getattr(model, "plain", model)


def expected(model: LlamaModel, lora: str = "") -> Expected:
    model = plain(model)
    return MERGED[lora, id(model)] if lora else EXPECTED[id(model)]


@cache
def filled(names: tuple[str, ...]) -> str:
    """A folder with the blocks of others' requests, for engines of the way that says these names."""
    [way] = [way for way in WAYS if tuple(way) == names]
    folder = tempfile.mkdtemp(dir=FILES.name)
    engine = Engine(EngineConfig(max_running=4, **{**way, "disk_dir": folder}), model=MODEL)
    for (prompt, _), lora in zip(BACKGROUND, BY, strict=True):
        engine.generate(prompt, REPLY, lora=lora if "lora" in way else "")
    engine.cache.close()
    assert list(Path(folder).iterdir())
    return folder


def as_before(world: World, raised: bool, result: Any) -> None:
    """Nothing to be said but what `play_on` says."""


@dataclass(frozen=True)
class Call:
    """A public call: the world before it, the call, and what has to hold after it, raised or not."""

    make: Callable[[dict[str, Any]], World]
    run: Callable[[World], Any]
    after: Callable[[World, bool, Any], None] = as_before


def quiet(way: dict[str, Any]) -> World:
    return World(way, requests=False)


def pinned(way: dict[str, Any]) -> World:
    world = quiet(way)
    world.pins.append(world.engine.pin([5, 6, 7, 8]))
    return world


def streaming(way: dict[str, Any]) -> World:
    world = World(way)
    world.stream = world.engine.stream(*MINE[1])  # type: ignore[attr-defined]
    for _ in range(3):
        next(world.stream)  # type: ignore[attr-defined]
    return world


def weights(way: dict[str, Any]) -> World:
    world = World(way)
    requests = world.engine.snapshot()["requests"]
    world.said = {name: each["length"] - each["prompt_tokens"] for name, each in requests.items()}
    world.said |= {f"{rid}.1": 0 for rid in world.asked if f"{rid}.1" not in world.said}
    return world


def all_steps(world: World) -> None:
    """Every step to the end: admission, chunks, branches, eviction, finishing."""
    while world.engine.has_work:
        world.step()


def after_add(world: World, raised: bool, result: Any) -> None:
    if not raised:
        world.asked[result], world.lora[result] = MINE[0], ""


def after_generate(world: World, raised: bool, result: Any) -> None:
    assert world.live() <= set(world.asked), "generate left a request of its own"
    if not raised:
        require_mine(result)


def require_mine(outputs: list[GenerationOutput]) -> None:
    wanted = [(prompt, params, index) for prompt, params in MINE for index in range(params.n)]
    assert len(outputs) == len(wanted)
    for (prompt, params, index), output in zip(wanted, outputs, strict=True):
        assert output.index == index
        EXPECTED[id(MODEL)].require_equal(prompt, params, output)


def after_stream(world: World, raised: bool, result: Any) -> None:
    assert world.live() <= set(world.asked), "a stream left a request of its own"
    if not raised and result is not None:
        for index in range(MINE[1][1].n):
            said = [piece.token_id for piece in result if piece.index == index]
            assert said == EXPECTED[id(MODEL)](*MINE[1], index).token_ids


def after_abort(world: World, raised: bool, result: Any) -> None:
    world.may_be_aborted.add("R2")
    running = "R2" in world.live()
    assert raised or (result is True and not running)
    if not running:  # then it was aborted, whole: its outputs are in the next report
        world.drain()
        ends = {each.finish_reason for each in world.got if each.request_id == "R2"}
        assert ends == {"abort"}, ends


def after_pin(world: World, raised: bool, result: Any) -> None:
    if not raised:
        world.pins.append(result)  # else `flush_cache` at the end finds what was left locked


def after_unpin(world: World, raised: bool, result: Any) -> None:
    pin = world.pins.pop()
    with contextlib.suppress(ValueError):  # either it still held, or it had been let go
        world.engine.unpin(pin)
        assert raised
    with pytest.raises(ValueError, match="not held"):
        world.engine.unpin(pin)


def after_flush(world: World, raised: bool, result: Any) -> None:
    before = quiet(world.way).engine  # type: ignore[attr-defined]
    peeks = [world.engine.peek(prompt) for prompt, _ in BACKGROUND]
    kept = [before.peek(prompt) for prompt, _ in BACKGROUND]
    assert peeks in ([0] * len(peeks), kept) and (raised or not any(peeks))


def after_policy(world: World, raised: bool, result: Any) -> None:
    now = world.engine.cache.eviction_policy
    assert now == "lfu" or (raised and now == "lru")
    world.engine.set_eviction_policy("fifo")
    assert world.engine.cache.eviction_policy == "fifo"


def after_weights(world: World, raised: bool, result: Any) -> None:
    new = plain(world.engine.model) is OTHER
    assert raised or new
    for prompt, _ in BACKGROUND:
        assert not (new and world.engine.peek(prompt)), "KV of the old weights is still found"


def after_peek(world: World, raised: bool, result: Any) -> None:
    assert raised or result >= 4


def after_snapshot(world: World, raised: bool, result: Any) -> None:
    assert raised or {name.split(".")[0] for name in result["requests"]} == world.live()


CALLS = {
    "step": Call(lambda way: World(way, steps=0), all_steps),
    "generate": Call(
        World,
        lambda w: w.engine.generate([p for p, _ in MINE], [s for _, s in MINE]),
        after_generate,
    ),
    "stream": Call(World, lambda w: list(w.engine.stream(*MINE[1])), after_stream),
    "stream.close": Call(streaming, lambda w: w.stream.close(), after_stream),  # type: ignore[attr-defined]
    "add_request": Call(World, lambda w: w.engine.add_request(*MINE[0]), after_add),
    # (With drafts it would be done after three steps.)
    "abort": Call(
        lambda way: World(way, 1 if "speculative" in way else 3), lambda w: w.engine.abort("R2"), after_abort
    ),
    "pin": Call(quiet, lambda w: w.engine.pin([5, 6, 7]), after_pin),
    "unpin": Call(pinned, lambda w: w.engine.unpin(w.pins[0]), after_unpin),
    "flush_cache": Call(quiet, lambda w: w.engine.flush_cache(), after_flush),
    "set_eviction_policy": Call(quiet, lambda w: w.engine.set_eviction_policy("lfu"), after_policy),
    "update_weights": Call(weights, lambda w: w.engine.update_weights(OTHER), after_weights),
    "peek": Call(World, lambda w: w.engine.peek([5, 6, 7, 8, 9]), after_peek),
    "check": Call(World, lambda w: w.engine.check()),
    "snapshot": Call(World, lambda w: w.engine.snapshot(), after_snapshot),
}


def world_for(name: str, way: dict[str, Any]) -> World:
    world = CALLS[name].make(way)
    world.way = way  # type: ignore[attr-defined]
    return world


# ---------------------------------------------------------------------- (a) at every line

Point = tuple[str, int]  # file and line


class Tracer:
    """Counts how often each line of ours is executed while it is on, and can press at one of them.

    The collector rests meanwhile: it would run lines of ours where it comes by (the end of an earlier test's
    disk, of a stream that was left), and what is raised in those is lost.
    """

    def __init__(
        self, target: Point | None = None, nth: int = 0, press: Callable[[], None] | None = None
    ) -> None:
        self.counts: Counter[Point] = Counter()
        self.last: dict[Point, int] = {}  # the lines in the order of their last executions
        self.target, self.nth, self.press = target, nth, press
        self.pressed = False
        self._before, self._collects = sys.gettrace(), gc.isenabled()

    def __enter__(self) -> Tracer:
        self._begin()
        return self

    def _begin(self) -> None:
        gc.disable()
        sys.settrace(self._enter_frame)

    def from_here(self) -> None:
        """Counts what is executed from now on, also in the functions that are running."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(INSIDE):
                frame.f_trace = self._line
            frame = frame.f_back  # type: ignore[assignment]
        self._begin()

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        back = frame.f_back.f_code.co_filename if frame.f_back else ""
        ours = name.startswith(INSIDE) or (name in BESIDE and (back.startswith(INSIDE) or back in BESIDE))
        return self._line if ours else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            point = frame.f_code.co_filename, frame.f_lineno
            self.counts[point] += 1
            self.last.pop(point, None)
            self.last[point] = self.counts[point]
            if point == self.target and self.counts[point] == self.nth:
                sys.settrace(self._before)
                self.pressed = True
                assert self.press is not None
                self.press()
        return self._line


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@cache
def all_points(name: str, at: int) -> list[tuple[Point, int]]:
    """Each line that the call executes, with 1 and, where that is another one, its last time."""
    way = WAYS[at]
    CALLS[name].run(world_for(name, way))  # what is imported or compiled at first use, is now
    world = world_for(name, way)
    with Tracer() as tracer:
        CALLS[name].run(world)
    return [(point, nth) for point, times in sorted(tracer.counts.items()) for nth in sorted({1, times})]


def attempt(name: str, world: World, error: type[BaseException]) -> bool:
    """The call; whether it raised. `step` is called again, as a user does."""
    try:
        result = CALLS[name].run(world)
    except error:
        raised, result = True, None
    else:
        raised = False
    world.result = result  # type: ignore[attr-defined]
    return raised


def settle(name: str, world: World, raised: bool) -> None:
    world.engine.check()
    CALLS[name].after(world, raised, world.result)  # type: ignore[attr-defined]
    world.play_on()


def press_at(name: str, way: dict[str, Any], point: Point, nth: int) -> int:
    """One Ctrl-C at one line; how often the line was reached this time, `nth` if it was pressed there."""
    world = world_for(name, way)
    with Tracer(point, nth, press) as tracer:
        raised = attempt(name, world, KeyboardInterrupt)
    if tracer.pressed:
        assert raised, "Ctrl-C was pressed in this call, and nobody was told"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    settle(name, world, raised)
    return tracer.counts[point]


def pressed_at(name: str, way: dict[str, Any], point: Point, nth: int) -> bool:
    """One Ctrl-C at one line, or whether that is nowhere to be had.

    How often a line runs is the same each time, except where a disk's threads bring news when they have them:
    then it is pressed at as late a time as it comes to in one of a few calls.
    """
    for _ in range(4 if "disk_dir" in way else 1):
        reached = press_at(name, way, point, nth)
        if reached == nth:
            return True
        nth = max(reached, 1)
    return False


def try_points(name: str, way: dict[str, Any], points: list[tuple[Point, int]]) -> None:
    failures, missed = [], []
    for point, nth in points:
        where = f"{Path(point[0]).name}:{point[1]} (time {nth})"
        try:
            if not pressed_at(name, way, point, nth):
                missed.append(where)
        except BaseException as error:
            if not isinstance(error, (Exception, KeyboardInterrupt, pytest.fail.Exception)):
                raise
            signal.signal(signal.SIGINT, signal.default_int_handler)
            failures.append(
                f"{where}: {type(error).__name__}: {str(error).splitlines()[0][:140] if str(error) else ''}"
            )
    report = "\n".join(failures[:12])
    assert not failures, f"Ctrl-C in {name}: wrong after {len(failures)} of {len(points)} places\n{report}"
    if "disk_dir" in way:  # there are lines that run only if a thread is late
        assert len(missed) <= max(1, len(points) // 10), missed
    else:
        assert not missed


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts here are shorter than a block on the disk usually is. What lies there is always a hit."""
    monkeypatch.setattr(disk_names, "LEAST_UNITS", 4)
    monkeypatch.setattr(DiskTier, "read_wait", 60.0)


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_lines_of_every_call(name: str) -> None:
    """Some lines of each call, drawn by a fixed seed; the next test presses at all of them."""
    rng = random.Random(name)
    for at, way in enumerate(WAYS):
        points = all_points(name, at)
        count = min(
            len(points),
            LINES_EACH * (3 if name in ("step", "generate", "stream") else 1) // len(WAYS) + (at == 0),
        )
        try_points(name, way, rng.sample(points, count))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_every_line_of_every_call(name: str, way: int) -> None:
    try_points(name, WAYS[way], all_points(name, way))


# ---------------------------------------------------------------------- (b) a listener that raises


class Listener:
    """Raises at the n-th event of its kind, or (nth 0) at each."""

    def __init__(self, nth: int, error: type[BaseException]) -> None:
        self.nth, self.error, self.heard, self.raised = nth, error, 0, 0

    def __call__(self, event: ev.Event) -> None:
        self.heard += 1
        if self.nth in (0, self.heard):
            self.raised += 1
            raise self.error(28, "No space left on device")


def heard_kinds(name: str, way: dict[str, Any]) -> Counter[type[ev.Event]]:
    world, heard = world_for(name, way), Counter[type[ev.Event]]()
    world.engine.bus.subscribe(None, lambda event: heard.update([type(event)]))
    CALLS[name].run(world)
    return heard


def listener_fails(
    name: str, way: dict[str, Any], kind: type[ev.Event], nth: int, error: type[BaseException]
) -> None:
    world = world_for(name, way)
    listener = Listener(nth, error)
    stop = world.engine.bus.subscribe(kind, listener)
    raised = attempt(name, world, error)
    stop()
    assert raised == (listener.raised > 0), "a listener failed and nobody was told"
    settle(name, world, raised)


@pytest.mark.parametrize("error", [Failed, KeyboardInterrupt])
@pytest.mark.parametrize("name", CALLS)
def test_a_listener_that_fails_in_any_call(name: str, error: type[BaseException]) -> None:
    """At the first, the third and at each event of every kind that the call emits."""
    failures, tried = [], 0
    known: set[type[ev.Event]] = set()
    for way in WAYS if error is Failed else WAYS[:1]:
        heard = heard_kinds(name, way)
        for kind in sorted(set(heard) - known, key=lambda each: each.__name__):
            for nth in sorted({1, min(3, heard[kind]), 0}) if error is Failed and way is WAYS[0] else (1,):
                tried += 1
                try:
                    listener_fails(name, way, kind, nth, error)
                except (Exception, KeyboardInterrupt, pytest.fail.Exception) as wrong:
                    said = str(wrong).splitlines()[0][:140] if str(wrong) else ""
                    failures.append(f"{kind.__name__}, time {nth}: {type(wrong).__name__}: {said}")
        known |= set(heard)
    report = "\n".join(failures[:12])
    assert not failures, f"a listener in {name}: wrong after {len(failures)} of {tried}\n{report}"
    assert tried or name in ("peek", "check", "snapshot")


# ---------------------------------------------------------------------- (c) at the very end of a step


def test_ctrl_c_at_the_very_end_of_a_step_loses_no_output() -> None:
    """Python's signal.signal goes on after the handler is in place; each of its lines, and ours after it."""

    def make() -> World:
        world = World(WAYS[0], steps=0, requests=False)
        for n in range(3):
            world.ask([50, 51, 5 + n], SHORT)
        return world

    world = make()
    with Tracer() as tracer:
        world.step()
    last = list(tracer.last.items())[-45:]
    for point, nth in last:
        world = make()
        with Tracer(point, nth, press) as pressing, contextlib.suppress(KeyboardInterrupt):
            world.step()
        assert pressing.pressed, point
        world.engine.check()
        world.step()  # what had finished is in this report
        world.drain()
        assert sorted(each.request_id for each in world.got) == sorted(world.asked), (point, nth)
        for output in world.got:
            world.require(output)


# ---------------------------------------------------------------------- (d) for real

needs_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no setitimer on this system")


def inside_ours(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(INSIDE):
            return True
        frame = frame.f_back
    return False


class RealPress:
    """Presses Ctrl-C once, so many seconds from now; not if the call is over by then."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.pressed = seconds, False

    def __enter__(self) -> RealPress:
        gc.disable()  # what is raised in a callback of the collector (Hypothesis has one) is lost
        self._before = signal.signal(signal.SIGALRM, self._alarm)
        # What the timer was used for before (pytest-timeout) goes on afterwards.
        self._left = signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if inside_ours(frame) and not self.pressed:
            self.pressed = True
            press()

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, self._before)
        signal.setitimer(signal.ITIMER_REAL, *self._left)


@needs_timer
@pytest.mark.parametrize("name", CALLS)
def test_real_ctrl_c_at_random_moments(name: str) -> None:
    rng = random.Random(name)
    took = min(timed(name) for _ in range(2))
    pressed = 0
    for _ in range(-(-REAL_PRESSES // len(CALLS))):
        world = world_for(name, rng.choice(WAYS))
        with RealPress(max(rng.uniform(0.0, 1.0) * took, 1e-6)) as real:
            raised = attempt(name, world, KeyboardInterrupt)
        pressed += real.pressed
        assert raised == real.pressed
        settle(name, world, raised)


def timed(name: str) -> float:
    world = world_for(name, WAYS[0])
    began = time.perf_counter()
    CALLS[name].run(world)
    return time.perf_counter() - began


# ---------------------------------------------------------------------- a second one, in the clean-up


class PressingModel(LlamaModel):
    """Presses Ctrl-C in its n-th forward pass, where it is let through at once."""

    left = 0
    then: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, *args: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.then()
            press()
        return super().forward(*args, **more)


def test_a_second_ctrl_c_while_generate_cleans_up() -> None:
    """Guaranteed: the clean-up is finished first, so that a second Ctrl-C leaves what one leaves.

    One KeyboardInterrupt comes out, none of generate's requests is left, the outputs of others that had
    finished are in the next report. The second is pressed at each line after the first.
    """
    model = small_model(0, PressingModel)
    assert isinstance(model, PressingModel)

    def play(target: Point | None, nth: int) -> Tracer:
        world = World(WAYS[0])
        world.engine.update_weights(model)  # of equal weights
        world.step()
        tracer = Tracer(target, nth, press)
        model.left, model.then = 2, tracer.from_here
        try:
            with pytest.raises(KeyboardInterrupt):
                world.engine.generate([prompt for prompt, _ in MINE], REPLY)
        finally:
            tracer.__exit__()
            model.left = 0
        assert tracer.pressed == (target is not None)
        EXPECTED.setdefault(id(model), EXPECTED[id(MODEL)])
        world.engine.check()
        assert world.live() <= set(world.asked)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        world.said = {}
        world.play_on()
        return tracer

    counted = play(None, 0).counts
    points = sorted(counted.items())
    failures = []
    for point, times in random.Random(0).sample(points, min(len(points), 2 * LINES_EACH)):
        try:
            play(point, times)
        except (Exception, KeyboardInterrupt, pytest.fail.Exception) as error:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            failures.append(f"{Path(point[0]).name}:{point[1]}: {type(error).__name__}: {str(error)[:120]}")
    assert not failures, "\n".join(failures[:12])


# ---------------------------------------------------------------------- other handlers, other threads


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_returns_is_called_once_and_the_call_goes_on(name: str) -> None:
    """As in Jupyter or a server: whoever installed it decides; here nothing is raised, so all is done."""
    calls: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    points = all_points(name, 0)
    signal.signal(signal.SIGINT, mine)
    for point, nth in random.Random(name).sample(points, min(len(points), 4)):
        calls.clear()
        world = world_for(name, WAYS[0])
        with Tracer(point, nth, press) as tracer:
            assert not attempt(name, world, KeyboardInterrupt)
        assert calls == [signal.SIGINT] * tracer.pressed
        assert signal.getsignal(signal.SIGINT) is mine
        settle(name, world, False)


def test_a_handler_that_raises_something_else() -> None:
    class Enough(Exception):
        pass

    def mine(number: int, frame: FrameType | None) -> None:
        raise Enough

    points = all_points("step", 0)
    signal.signal(signal.SIGINT, mine)
    for point, nth in random.Random(1).sample(points, 8):
        world = world_for("step", WAYS[0])
        with Tracer(point, nth, press) as tracer:
            assert attempt("step", world, Enough) == tracer.pressed
        assert signal.getsignal(signal.SIGINT) is mine
        settle("step", world, True)


def test_a_handler_that_gives_way_to_another_stays_replaced() -> None:
    """Polite at the first press, hard at the second: what a handler installs is not undone."""
    points = all_points("step", 0)

    def polite(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for point, nth in random.Random(2).sample(points, 8):
        signal.signal(signal.SIGINT, polite)
        world = world_for("step", WAYS[0])
        with Tracer(point, nth, press) as tracer:
            assert not attempt("step", world, KeyboardInterrupt)
        if tracer.pressed:
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, (point, nth)
        settle("step", world, False)


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_that_is_ignored_stays_ignored(name: str) -> None:
    points = all_points(name, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for point, nth in random.Random(name).sample(points, min(len(points), 2)):
        world = world_for(name, WAYS[0])
        with Tracer(point, nth, press):
            assert not attempt(name, world, KeyboardInterrupt)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        settle(name, world, False)


@pytest.mark.parametrize("name", CALLS)
def test_a_handler_that_python_does_not_know_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """getsignal is None where something other than Python installed it: it could not be put back."""
    world = world_for(name, WAYS[0])
    touched: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        patch.setattr(signal, "signal", lambda *args: touched.append(args))
        assert not attempt(name, world, KeyboardInterrupt)
    assert not touched
    settle(name, world, False)


@pytest.mark.parametrize("name", CALLS)
def test_calls_from_another_thread_work(name: str) -> None:
    """Only the main thread gets Ctrl-C; what another one does goes on, whole."""
    world = world_for(name, WAYS[0])
    raised: list[bool] = []
    worker = threading.Thread(target=lambda: raised.append(attempt(name, world, BaseException)))
    worker.start()
    with contextlib.suppress(KeyboardInterrupt):
        press()
    worker.join()
    assert raised == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    settle(name, world, False)
