"""The live page: `python -m viz.live` runs an engine and shows every step of it in the browser.

    python -m viz.live                               a mixed workload on the classroom Llama
    python -m viz.live --workload agents --kv-tokens 600 --eviction-policy lfu
    python -m viz.live --host-kv-tokens 2000 --host-write write_back      with a second tier in host memory
    python -m viz.live --compare lpm,fcfs            two engines side by side; so do two eviction policies
    python -m viz.live --cache lessons/02_radix_tree/exercise.py      a learner's own tree
    python -m viz.live --replay run.jsonl            a recording instead of an engine
    python -m viz.live --export run.html             no server: run to the end, write one file, leave

Three kinds of threads: ONE drives the engine (whoever wants something of it puts a command into its
queue), one serves (web.py: who is let in; routes.py: what is answered) and only reads what was recorded,
and the main thread waits for Ctrl-C. Listens on 127.0.0.1 alone, unless --host says otherwise. Behind
a forwarded port or a proxy on localhost nothing has to be said; behind one with a name of its own:

    python -m viz.live --allow-host hub.example.org

Does not draw (tree.py), count (page.py) or lay out (static/); the engine does not know of it.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.live")  # before what takes its time to import

import argparse
import dataclasses
import itertools
import math
import os
import queue
import secrets
import sys
import threading
import time
import traceback
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from minirad import events as ev
from minirad import workloads
from minirad.cache.eviction import POLICIES as EVICTION_POLICIES
from minirad.config import HOST_WRITE, EngineConfig, SamplingParams
from minirad.errors import InvariantError
from minirad.model.load import resolve_model
from minirad.record import Frame, Recorder, Recording
from minirad.schedule.policies import POLICIES as SCHEDULE_POLICIES
from viz.compare import Pair, compared
from viz.consult import consult
from viz.dot import DotError
from viz.fork import forked_config, require_here
from viz.page import Page, asked_text
from viz.routes import rules
from viz.trace import Trace, decoder_of
from viz.web import HOST, LOOPBACK, Gate, Json, Server

PORT = 8321
NEW_TOKENS = 24  # of a prompt typed on the page
MOST_KV_TOKENS = 1_000_000  # that a page may ask for: a slip of the finger must not take all memory
FASTEST = 1000.0  # steps per second that can be asked for


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of. kv_tokens None: the workload's own pool size. compare: two policies."""

    workload: str = "mixed"
    model: str | None = None
    kv_tokens: int | None = None
    page_size: int = 1
    schedule_policy: str = "lpm"
    eviction_policy: str = "lru"
    chunk_tokens: int = 128
    record: str | None = None
    compare: str | None = None
    cache: tuple[str, ...] = ()  # a student's files
    host_kv_tokens: int = 0
    host_write: str = "write_through"
    bigram_keys: bool = False
    base: EngineConfig = field(
        default_factory=EngineConfig
    )  # for all that is not above: a fork's recorded one

    def sides(self) -> tuple[tuple[str, str], tuple[Settings, Settings]]:
        """Both policies of `compare`, and the settings with each of them. ValueError if it is nonsense."""
        setting, names = compared(self.compare or "")
        first, second = (
            dataclasses.replace(self, **{setting: name}, compare=None, record=_beside(self.record, name))
            for name in names
        )
        return names, (first, second)

    def config(self, kv_tokens: int) -> EngineConfig:
        """The engine's configuration; kv_tokens: the pool where none is set. ValueError as its own."""
        tokens, page = kv_tokens if self.kv_tokens is None else self.kv_tokens, max(self.page_size, 1)
        config = dataclasses.replace(
            self.base, model=self.model, page_size=self.page_size, schedule_policy=self.schedule_policy,
            eviction_policy=self.eviction_policy, chunk_tokens=self.chunk_tokens,
            host_kv_tokens=self.host_kv_tokens // page * page, host_write=self.host_write,
            bigram_keys=self.bigram_keys, kv_tokens=max(tokens // page, 1) * page,
        )  # fmt: skip
        if tokens < page:
            raise ValueError(f"a pool of {tokens} tokens does not hold one page of {page}")
        return config

    def students_tree(self) -> Any:
        """The tree of a learner's files, or None for the engine's own. ValueError if they cannot run."""
        if not self.cache:
            return None
        if self.host_kv_tokens:
            raise ValueError(
                f"--host-kv-tokens {self.host_kv_tokens} with --cache: a tree of your own has no host tier"
            )
        from lessons.grading import student_cache

        return student_cache(self.cache, self.page_size, self.eviction_policy)


# ---------------------------------------------------------------------- one run


class Run:
    """A workload on an engine, recorded; or (replay) a recording alone. Not for several threads."""

    def __init__(
        self, number: int, settings: Settings, workload: workloads.Workload | None, engine: Any = None
    ) -> None:
        from minirad.engine import Engine

        self.number, self.settings = number, settings
        self.workload = workload or workloads.load(settings.workload)
        self.engine = engine or Engine(settings.config(self.workload.kv_tokens), settings.students_tree())
        self.player = workloads.Player(self.workload, self.engine.encode, self.engine)
        notes = {"workload": self.workload.name, "title": self.workload.title, "labels": self.player.labels}
        path = _numbered(settings.record, number)
        self.recorder = Recorder(self.engine, path, keyframe_every=50, notes=notes)
        self.clock = self.asked = 0
        self.notices: list[str] = []
        self.refusals: list[str] = []  # the reason of each
        decode = decoder_of(self.engine.tokenizer) if engine is None else None
        self.trace = Trace(self.recorder, decode)
        self.page = Page(self.trace, self.player.labels)
        self.settle()

    def settle(self) -> None:
        """Notes, between two steps (within one the queues are in motion), whether all is done:
        nothing to compute now and nothing that will come by itself."""
        self.idle = not self.engine.has_work and self.player.next_due is None

    def advance(self) -> None:
        """Sends what is due, then one engine step. When nobody runs, time jumps to the next arrival."""
        engine, player = self.engine, self.player
        if not engine.has_work and player.next_due is not None:
            self.clock = max(self.clock, player.next_due)
        for asked in player.due(self.clock):
            session = asked.session
            self.asked += 1
            try:
                name = engine.add_request(
                    asked.prompt, asked.params, session.extra_key, session.priority,
                    token_mask=asked.token_mask,
                )  # fmt: skip
            except ValueError as error:
                player.refused(asked, error)
                self._note_refusal(asked.label, error)
            else:
                player.sent(asked, name)
        self.clock += 1
        for output in engine.step().finished:
            player.finished(output, self.clock)
        self.settle()
        if self.idle:  # programs let go of their prefixes when they end: after the last step
            self.recorder.cut()
            self.notices += [failure for failure in player.failures if failure not in self.notices]

    def _note_refusal(self, label: str, error: ValueError) -> None:
        """No event tells of it: the engine never had this request. So the page and the file must."""
        self.notices.append(f"{label} was refused: {error}")
        self.refusals.append(str(error))
        self.page.refused = self.recorder.header["notes"]["refused"] = self.refused

    @property
    def refused(self) -> str:
        """How many requests were refused, and the first reason; empty if none was."""
        if not self.refusals:
            return ""
        return f"{len(self.refusals)} of {self.asked} requests refused: {self.refusals[0]}"

    @property
    def served_nobody(self) -> bool:
        return 0 < self.asked == len(self.refusals)

    def close(self, broken: bool = False) -> None:
        """Drops the run. What programs then abort is no part of what was recorded; a broken engine is
        asked for nothing more."""
        self.recorder.close()
        if not broken:
            self.player.close()


class Replay:
    """A finished recording in the place of a Run: nothing can be driven."""

    def __init__(self, recording: Recording, title: str) -> None:
        self.number, self.engine = 1, None
        self.recorder, self.trace = recording, Trace(recording)
        notes = recording.header.get("notes")
        notes = notes if isinstance(notes, dict) else {}
        told = str(notes.get("title", "")) or f"Recording {title}"
        self.workload = workloads.Workload(title, told, ())
        labels = notes.get("labels")
        self.page = Page(
            self.trace, {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}
        )
        self.page.refused = self.refused = str(notes.get("refused", ""))
        self.notices = [recording.missing] if recording.missing else []
        self.idle = True

    def close(self, broken: bool = False) -> None:
        pass


def _numbered(path: str | None, run: int) -> str | None:
    """A restarted run records beside the first one, and not over what an earlier command recorded."""
    if path is None or run == 1:
        return path
    return next(name for n in itertools.count(run) if not Path(name := str(_beside(path, str(n)))).exists())


def _beside(path: str | None, what: str) -> str | None:
    """run.jsonl as run-what.jsonl."""
    return path and str(Path(path).with_name(f"{Path(path).stem}-{what}{Path(path).suffix}"))


def make_run(number: int, settings: Settings, workload: workloads.Workload | None = None) -> Run | Pair:
    """One engine at work, or two where two policies are compared."""
    if settings.compare is None:
        return Run(number, settings, workload)
    names, (first, second) = settings.sides()
    return Pair(number, settings, (Run(number, first, workload), Run(number, second, workload)), names)


def _refused(run: Run | Pair | Replay | None) -> str:
    """What a run says of its refused requests; of two, each side's with its name."""
    if isinstance(run, Pair):
        return run.page.refused
    return run.refused if run else ""


def _policy_of(run: Run | Pair | Replay | None) -> str:
    """The eviction policy that may be changed in the running engine; "": there is none."""
    cache: Any = run.engine.cache if isinstance(run, Run) else None
    return cache.eviction_policy if getattr(cache, "eviction_policies", ()) else ""


def _served_nobody(run: Run | Pair | Replay) -> bool:
    """Every request was refused: there is nothing to see."""
    if isinstance(run, Pair):
        return all(side.served_nobody for side in run.sides)
    return isinstance(run, Run) and run.served_nobody


# ---------------------------------------------------------------------- the engine's thread


class RunBroke(Exception):
    """Something failed within the run itself, not in what a page asked for; the cause is the error."""


@contextmanager
def _within_the_run() -> Iterator[None]:
    """Around a command's work on the engine. A refusal (ValueError) leaves the engine whole."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise RunBroke from error


class Driver(threading.Thread):
    """The one thread that touches the engine: runs steps at a pace, and commands in between."""

    def __init__(
        self, settings: Settings, speed: float, *, paused: bool = False, replay: Replay | None = None
    ):
        super().__init__(name="engine", daemon=True)
        self.settings, self.speed = settings, speed
        self.playing = not paused and replay is None
        self.run_now: Run | Pair | Replay | None = replay
        self.error = ""
        self._listeners: list[Callable[[], None]] = []
        self._token = secrets.token_hex(4)
        self._commands: queue.Queue[tuple[Callable[..., Any], Json, Future[Any]]] = queue.Queue()
        self._stopping, self._ended = threading.Event(), threading.Event()

    # ------------------------------------------------------------ from other threads

    def command(self, name: str, arguments: Json) -> Future[Any]:
        """Asks for a command in the engine's thread. Its answer, or its ValueError; one that is given up
        before it began is not run."""
        answer: Future[Any] = Future()
        if name not in COMMANDS:
            answer.set_exception(ValueError(f"unknown command {name!r}"))
        elif self.error or self._ended.is_set():
            answer.set_exception(
                ValueError("the engine has stopped with an error" if self.error else "the engine has stopped")
            )
        else:
            self._commands.put((COMMANDS[name], arguments, answer))
        return answer

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._stopping.set()
        self._commands.put((_nothing, {}, Future()))  # it may be waiting for one
        self._announce()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called, in any thread, whenever something has changed; returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def key(self, run: Run | Pair | Replay) -> str:
        """Names a run so that no page takes it for one of a server that was here before."""
        return f"{run.number}.{self._token}"

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def page_kind(self) -> str:
        """Which page shows this: viz/static/page.js, or compare.js for two engines."""
        return "compare" if self.settings.compare else "page"

    def hello(self, run: Run | Pair | Replay) -> Json:
        """What a page needs when a run begins."""
        settings = dataclasses.asdict(self.settings)
        return {
            "run": self.key(run),
            "meta": run.page.meta(run.workload.title),
            "choices": {
                "workload": list(workloads.WORKLOADS),
                "schedule_policy": list(SCHEDULE_POLICIES),
                "eviction_policy": list(EVICTION_POLICIES),
                "page_size": [1, 2, 4, 8, 16],
                "host_write": list(HOST_WRITE),
            },
            "settings": {
                **settings,
                "record": None,
                "model": None,
                "cache": None,
                "base": None,
                "workload": run.workload.name,
            },
            "status": self.status(),
        }

    def status(self) -> Json:
        """What the page's header and buttons depend on."""
        run = self.run_now
        return {
            "run": self.key(run) if run else "",
            "playing": self.playing,
            "speed": self.speed,
            "idle": run is None or run.idle,
            "drivable": isinstance(run, Run | Pair) and not self.error,
            "error": self.error,
            "notices": list(run.notices[-3:]) if run else [],
            "refused": _refused(run),
            "policy": _policy_of(run),
        }

    # ------------------------------------------------------------ in the engine's thread

    def run(self) -> None:
        try:
            if self.run_now is None:
                self.begin(self.settings, None)
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            if not (self.settings.cache and isinstance(error, InvariantError)):
                traceback.print_exc()  # of a student's tree the one line that is printed says more
        finally:
            try:
                if self.run_now is not None:
                    self.run_now.close(broken=bool(self.error))
            finally:
                self._end()

    def _end(self) -> None:
        """Nobody waits for what will not be done; pages hear it after the last frame, which may hold what
        broke a student's tree."""
        self._ended.set()
        while not self._commands.empty():
            _, _, answer = self._commands.get_nowait()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ValueError("the engine has stopped"))
        self._announce()

    def begin(self, settings: Settings, workload: workloads.Workload | None) -> Run | Pair:
        """A new engine with a new recording takes the place of the present one."""
        number = self.run_now.number + 1 if self.run_now else 1
        run = make_run(number, settings, workload)
        if self.run_now is not None:
            self.run_now.close()
        self.settings, self.run_now = settings, run
        self._announce()
        return run

    def _turn(self) -> None:
        """One step if one is due, and every command that comes until the next one is."""
        started = time.perf_counter()
        run = self.run_now
        pause = 0.5
        if isinstance(run, Run | Pair) and self.playing and not run.idle:
            run.advance()
            self._announce()
            pause = 1 / self.speed if self.speed > 0 else 0.0
        while not self._stopping.is_set():
            left = started + pause - time.perf_counter()
            try:
                command, arguments, answer = self._commands.get(timeout=max(left, 0.0005))
            except queue.Empty:
                return
            if self._obey(command, arguments, answer):
                return

    def _obey(self, command: Callable[..., Any], arguments: Json, answer: Future[Any]) -> bool:
        """Runs one command. What is wrong with the command is the page's to show, and the run goes on;
        only what broke within the run ends it."""
        if not answer.set_running_or_notify_cancel():
            return False  # its page no longer waits
        try:
            answer.set_result(command(self, arguments))
        except ValueError as error:
            answer.set_exception(error)
        except RunBroke as broke:
            cause = broke.__cause__ or broke
            answer.set_exception(ValueError(f"{type(cause).__name__}: {cause}"))
            raise cause from None
        except Exception as error:
            answer.set_exception(ValueError(f"{type(error).__name__}: {error}"))
        self._announce()
        return command not in (_peek, _prompt, _doctor)  # these may come at any time: no step for them

    def _announce(self) -> None:
        for listener in tuple(self._listeners):
            listener()


# ---------------------------------------------------------------------- commands of the page


def _driven(driver: Driver) -> Run | Pair:
    if not isinstance(driver.run_now, Run | Pair):
        raise ValueError("this is a recording: there is no engine to drive")
    return driver.run_now


def _engine_run(driver: Driver) -> Run:
    run = _driven(driver)
    if isinstance(run, Pair):
        raise ValueError("two engines are compared here: this is possible with one only")
    return run


def _number(arguments: Json, name: str, otherwise: float) -> float:
    """A number of a command's body; fields send theirs as text. ValueError says what is wrong with it."""
    value = arguments.get(name, otherwise)
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return number


def _whole(arguments: Json, name: str, otherwise: int) -> int:
    number = _number(arguments, name, otherwise)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, not {number}")
    return int(number)


def _nothing(driver: Driver, arguments: Json) -> Json:
    return {}


def _play(driver: Driver, arguments: Json) -> Json:
    _driven(driver)
    driver.playing = bool(arguments.get("on", True))
    return {}


def _speed(driver: Driver, arguments: Json) -> Json:
    driver.speed = min(max(_number(arguments, "speed", 3), 0.0), FASTEST)
    return {}


def _step(driver: Driver, arguments: Json) -> Json:
    run = _driven(driver)
    driver.playing = False
    if run.idle:
        raise ValueError("nothing is left to do: submit a prompt, or restart with a workload")
    try:
        run.advance()
    except Exception as error:  # also a ValueError: the command had no argument to be wrong
        raise RunBroke from error
    return {"frames": len(run.trace)}


def _composed(arguments: Json) -> str:
    """The prompt that a typed text stands for: as it is, or as a question in a chat or to an agent."""
    text = arguments.get("text")
    if not isinstance(text, str):
        raise ValueError("a prompt must be text")
    frame = {"chat": workloads.chat_prompt, "agent": workloads.agent_prompt}.get(str(arguments.get("as")))
    return frame(text) if frame else text


def _peek(driver: Driver, arguments: Json) -> Json:
    """What would hit if this prompt came now; the engine stays as it is."""
    run = _engine_run(driver)
    engine = run.engine
    tokens = engine.encode(_composed(arguments)) if arguments.get("text") else []
    hit = engine.peek(tokens) if len(tokens) else 0
    limit = min(engine.config.max_context, engine.config.kv_tokens)
    decode = run.trace.decode
    return {
        "tokens": len(tokens),
        "hit": hit,
        "hit_text": decode([int(t) for t in tokens[:hit]]),
        "rest_text": decode([int(t) for t in tokens[hit:]]),
        "too_long": len(tokens) + NEW_TOKENS > limit,
        "limit": limit - NEW_TOKENS,
    }


def _submit(driver: Driver, arguments: Json) -> Json:
    run = _engine_run(driver)
    text = _composed(arguments)
    if not str(arguments.get("text", "")).strip():
        raise ValueError("the prompt is empty: type something first")
    name = run.engine.add_request(text, SamplingParams(max_new_tokens=NEW_TOKENS))
    run.player.labels[name] = f"yours: {asked_text(text)}"
    run.recorder.cut()  # so that it is seen waiting
    run.settle()
    return {"request": name}


def _evict(driver: Driver, arguments: Json) -> Json:
    run = _engine_run(driver)
    count = _whole(arguments, "tokens", 0)
    if count < 1:
        raise ValueError(f"evict at least 1 token, not {count}")
    before = run.engine.allocator.available
    with _within_the_run():
        run.engine.ownership.make_room(before + min(count, run.engine.cache.evictable_size))
        run.recorder.cut()
    freed = run.engine.allocator.available - before
    if not freed:
        raise ValueError("nothing can be evicted: no unlocked leaf is in the tree")
    return {"freed": freed}


def _flush(driver: Driver, arguments: Json) -> Json:
    run = _engine_run(driver)
    with _within_the_run():
        run.engine.flush_cache()
        run.recorder.cut()
    return {}


def _policy(driver: Driver, arguments: Json) -> Json:
    """Another eviction policy for the engine that runs."""
    run, name = _engine_run(driver), arguments.get("policy")
    if not isinstance(name, str):
        raise ValueError(f"a policy has a name, not {name!r}")
    now = _policy_of(run)
    if not now:
        raise ValueError("this tree decides itself who is evicted: its policy cannot be changed here")
    if name == now:
        raise ValueError(f"the eviction policy is {name} already")
    with _within_the_run():
        run.engine.set_eviction_policy(name)
        run.recorder.cut()
    return {"policy": name}


def _changed_settings(settings: Settings, arguments: Json) -> Settings:
    allowed = {
        "workload", "kv_tokens", "page_size", "schedule_policy", "eviction_policy", "host_kv_tokens",
        "host_write",
    }  # fmt: skip
    changes = {
        name: value for name, value in arguments.items() if name in allowed and value not in ("", None)
    }
    for name in changes:
        if name in ("kv_tokens", "page_size", "host_kv_tokens"):
            changes[name] = _whole(changes, name, 0)
        elif not isinstance(changes[name], str):
            raise ValueError(f"{name} must be a name, not {changes[name]!r}")
    for name, what in (("kv_tokens", "a pool"), ("host_kv_tokens", "a host tier")):
        if changes.get(name, 0) > MOST_KV_TOKENS:
            raise ValueError(
                f"{what} of {changes[name]:,} tokens is more than a page may ask for: "
                f"at most {MOST_KV_TOKENS:,}"
            )
    if str(changes.get("workload", "mixed")) not in workloads.WORKLOADS:
        changes.pop("workload")  # a file is named on the command line only: pages name no paths
    if "workload" in changes and changes["workload"] != settings.workload:
        changes.setdefault("kv_tokens", None)
    return dataclasses.replace(settings, **changes)


def _recorded_settings(settings: Settings, recording: Recording) -> Settings:
    """What a recording's engine was made of; a model that `settings` name serves it instead of its own."""
    if settings.model is None:
        config = forked_config(recording)
        require_here(config.model)
    else:
        config = forked_config(recording, model=settings.model, dummy_weights=None)
    names = {each.name for each in dataclasses.fields(Settings)}
    same = [each.name for each in dataclasses.fields(EngineConfig) if each.name in names]
    return dataclasses.replace(settings, base=config, **{name: getattr(config, name) for name in same})


def _left_out(frames: Sequence[Frame]) -> str:
    """One sentence on what was done to the engine beside its requests: a fork on the page leaves it out."""
    counts: Counter[str] = Counter()
    for frame in frames:
        kinds = Counter(type(event) for event in frame.events)
        for kind, what in LEFT_OUT.items():
            counts[what] += kinds[kind]
        if not kinds[ev.StepEnded] and (kinds[ev.NodeEvicted] or kinds[ev.NodeDemoted]):
            counts["evictions by hand"] += 1
    told = ", ".join(f"{what} ({count})" for what, count in counts.items() if count)
    return told and f"This fork has the recorded requests only; what was done beside is left out: {told}."


LEFT_OUT = {
    ev.RequestAborted: "aborts",
    ev.CacheFlushed: "flushes",
    ev.PolicyChanged: "policy changes",
    ev.VersionBumped: "new weights",
}


def _restart(driver: Driver, arguments: Json) -> Json:
    _driven(driver)
    driver.begin(_changed_settings(driver.settings, arguments), None)
    driver.playing = True
    return {"run": driver.run_now.number if driver.run_now else 0}


def _fork(driver: Driver, arguments: Json) -> Json:
    """The requests recorded up to a frame, as they came, on a new engine with other settings."""
    run = driver.run_now
    if run is None or isinstance(run, Pair):
        raise ValueError("nothing has run yet" if run is None else "a comparison cannot be forked")
    count = len(run.recorder.frames)
    until = _whole(arguments, "frame", count - 1)
    if not -1 <= until < count:
        raise ValueError(f"frame {until} is not in this recording of {count} frames")
    recorded = _recorded_settings(driver.settings, run.recorder)
    workload = workloads.from_recording(run.recorder, until, engine_seed=recorded.base.seed)
    if not workload.sessions:
        raise ValueError("no request had come by then: there is nothing to replay")
    left_out = _left_out(run.recorder.frames[: until + 1])
    forked = driver.begin(_changed_settings(recorded, {**arguments, "workload": ""}), workload)
    if left_out:
        forked.notices.append(left_out)
    driver.playing = True
    return {"requests": len(workload.sessions)}


def _prompt(driver: Driver, arguments: Json) -> Json:
    """A request's whole prompt as text."""
    return {"text": _one_page(driver).prompt_text(str(arguments.get("request")))}


def _doctor(driver: Driver, arguments: Json) -> Json:
    """Where two prompts part, and what that costs; works on a recording, too."""
    return consult(_one_page(driver), arguments)


def _one_page(driver: Driver) -> Page:
    if driver.run_now is None or isinstance(driver.run_now, Pair):
        raise ValueError("the doctor looks at the prompts of one run")
    return driver.run_now.page


COMMANDS: dict[str, Callable[[Driver, Json], Json]] = {
    "play": _play, "speed": _speed, "step": _step, "peek": _peek, "submit": _submit, "evict": _evict,
    "flush": _flush, "policy": _policy, "restart": _restart, "fork": _fork,
    "prompt": _prompt, "doctor": _doctor,
}  # fmt: skip


# ---------------------------------------------------------------------- command line


@dataclass(slots=True)
class Live:
    """Driver and server together, for tests and notebooks: `with Live(...) as live: live.url`.

    host: the address to listen on; allowed: further names under which a browser may know it (viz/web.py).
    """

    driver: Driver
    port: int = 0
    host: str = HOST
    allowed: tuple[str, ...] = ()
    server: Server = field(init=False)

    def __enter__(self) -> Live:
        self.server = Server(rules(self.driver), self.port, self.host, self.allowed)
        self.server.start()
        self.driver.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.driver.stop()
        self.driver.join(timeout=0.3)
        self.server.stop()

    @property
    def url(self) -> str:
        return self.server.url


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {port}")
    return port


def _pace(text: str) -> float:
    speed = float(text)
    if not 0 <= speed <= FASTEST:  # false for nan as well
        raise argparse.ArgumentTypeError(f"steps per second are from 0 (as fast as it goes) to {FASTEST:.0f}")
    return speed


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(prog="python -m viz.live", description="Watch RadixAttention at work.")
    names = ", ".join(workloads.WORKLOADS)
    parser.add_argument("--workload", metavar="NAME|FILE",
                        help=f"{names}; or a file (default: one that shows what is asked for)")  # fmt: skip
    parser.add_argument("--model", help="default: the classroom Llama that comes with minirad")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV pool (default: the workload's)")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--schedule-policy", default="lpm", choices=list(SCHEDULE_POLICIES))
    parser.add_argument("--eviction-policy", default="lru", choices=list(EVICTION_POLICIES))
    parser.add_argument("--host-kv-tokens", type=int, default=0, metavar="N",
                        help="size of a second tier in host memory (default: none)")  # fmt: skip
    parser.add_argument("--host-write", default="write_through", choices=HOST_WRITE,
                        help="when copies are made (default: write_through)")  # fmt: skip
    parser.add_argument("--bigram-keys", action="store_true", help="a tree of pairs of tokens (EAGLE)")
    parser.add_argument("--compare", metavar="A,B",
                        help="two schedule or two eviction policies, side by side")  # fmt: skip
    parser.add_argument("--speed", type=_pace, default=3.0, help="steps per second; 0: as fast as it goes")
    parser.add_argument("--paused", action="store_true", help="wait for the page to press play")
    parser.add_argument("--port", type=_port, default=PORT, help="any free one if it is taken")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS",
                        help=f"address to listen on (default: {HOST}, this machine alone)")  # fmt: skip
    parser.add_argument("--allow-host", metavar="NAME[:PORT]", action="append", default=[],
                        help="a name under which a proxy shows the page, e.g. hub.example.org")  # fmt: skip
    parser.add_argument("--no-open", action="store_true", help="do not open the browser")
    parser.add_argument("--cache", metavar="FILE.py", action="append", default=[],
                        help="a lesson's exercise.py as the tree, or several together")  # fmt: skip
    parser.add_argument(
        "--record", metavar="FILE.jsonl", help="write the recording as it grows, into a new file"
    )
    parser.add_argument("--replay", metavar="FILE.jsonl", help="show a recording instead of an engine")
    parser.add_argument("--export", metavar="FILE.html|FILE.gif", action="append", default=[],
                        help="run to the end without a server and write a file")  # fmt: skip
    parser.add_argument("--steps", type=command.positive, help="with --export: steps at most (default: 2000)")
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line asks for; without --workload one on which that shows within seconds."""
    workload = options.workload
    if workload is None:
        workload = telling_workload(options.compare, options.host_kv_tokens)
    return Settings(
        workload, options.model, options.kv_tokens, options.page_size, options.schedule_policy,
        options.eviction_policy, record=options.record, compare=options.compare,
        cache=tuple(options.cache), host_kv_tokens=options.host_kv_tokens, host_write=options.host_write,
        bigram_keys=options.bigram_keys,
    )  # fmt: skip


def telling_workload(compare: str | None, host_kv_tokens: int) -> str:
    """The built-in workload on which two policies differ at a glance, or a host tier is used."""
    names = [name.strip() for name in (compare or "").split(",")]
    if all(name in SCHEDULE_POLICIES for name in names):
        return "queue"
    if all(name in EVICTION_POLICIES for name in names):
        return "again"
    return "tiers" if host_kv_tokens else "mixed"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    return command.run(parser.prog, lambda: _main(options), DotError)


def _main(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    settings.config(workloads.load(settings.workload).kv_tokens)
    settings.students_tree()
    if settings.compare is not None:
        settings.sides()
        if options.replay:
            raise ValueError("--compare runs two engines, --replay none: only one of them can be had")
    Gate(options.host, tuple(options.allow_host))
    resolve_model(settings.model)
    _check_written(options, settings)
    replay = _replay(options.replay) if options.replay is not None else None
    if options.steps is not None and not options.export:
        raise ValueError(f"--steps {options.steps} goes with --export only: a page runs until Ctrl-C")
    if options.export:
        return _export(options, settings, replay)
    return _serve(options, settings, replay)


def _check_written(options: argparse.Namespace, settings: Settings) -> None:
    """ValueError for a file that may not be written: before anything is loaded or run."""
    reads = [*settings.cache, *(path for path in (settings.workload, options.replay) if path)]
    for path in options.export:
        command.may_be_written("--export", path, (".html", ".gif", ".htm"), reads)
    if settings.record is None:
        return
    if options.replay is not None:
        raise ValueError(f"--record {settings.record} with --replay: nothing runs, so nothing is recorded")
    sides = (settings,) if settings.compare is None else settings.sides()[1]
    for side in sides:
        command.may_be_written("--record", side.record or "", (".jsonl",), reads, keep=True)


def _replay(path: str) -> Replay:
    recording = Recorder.load(path)
    if recording.missing:
        print(f"python -m viz.live: {recording.missing}", file=sys.stderr)
    return Replay(recording, Path(path).name)


def _serve(options: argparse.Namespace, settings: Settings, replay: Replay | None) -> int:
    _one_thread(settings)
    driver = Driver(settings, options.speed, paused=options.paused, replay=replay)
    with Live(driver, options.port, options.host, tuple(options.allow_host)) as live:
        print(f"minirad live: {live.url}   (Ctrl-C ends it)", flush=True)
        if live.server.address not in LOOPBACK:
            print(
                f"anyone who reaches {live.server.address} can drive the engine: it has no password",
                flush=True,
            )
        if not options.no_open:
            threading.Thread(target=webbrowser.open, args=(live.url,), daemon=True).start()
        told = ""
        try:
            while not driver.error:
                time.sleep(0.1)
                told = _tell_refusals(driver.run_now, told)
            time.sleep(1.5)  # so that open pages hear of it
            if settings.cache:
                print(f"your tree broke: {driver.error}   (see the page; Ctrl-C ends it)", flush=True)
                threading.Event().wait()
        except KeyboardInterrupt:
            print()
    if driver.error:
        print(f"the engine stopped: {driver.error}", file=sys.stderr)
    return 1 if driver.error else 0


def _tell_refusals(run: Run | Pair | Replay | None, told: str) -> str:
    """One line once a run is over, and again where a later one ends otherwise; what was told."""
    refused = _refused(run) if run is not None and run.idle else ""
    if refused and refused != told:
        print(refused, file=sys.stderr, flush=True)
    return refused or told


def _one_thread(settings: Settings) -> None:
    """A tiny model is quicker on one thread than on several that wait for one another."""
    if settings.model is None:
        import torch

        torch.set_num_threads(1)


def _export(options: argparse.Namespace, settings: Settings, replay: Replay | None) -> int:
    from viz.export import export

    run: Run | Pair | Replay
    broken = ""
    if replay is not None:
        run = replay
    else:
        _one_thread(settings)
        run = make_run(1, settings)
        broken = _run_out(run, 2000 if options.steps is None else options.steps, settings)
    for path in options.export:
        size = export(
            run.page, path, title=run.workload.title, note=replay.recorder.missing if replay else ""
        )
        print(f"{path}: {len(run.trace)} steps, {size / 1000:.0f} KB")
    _tell_refusals(run, "")
    if broken:
        print(f"your tree broke: {broken}", file=sys.stderr)
    return 1 if broken or _served_nobody(run) else 0


def _run_out(run: Run | Pair, steps: int, settings: Settings) -> str:
    """Runs to the end. What broke a student's tree is said, and shown by the last frame."""
    broken = ""
    try:
        while not run.idle and run.clock < steps:
            run.advance()
    except InvariantError as error:
        if not settings.cache:
            raise
        broken = str(error)
    run.close(broken=bool(broken))
    return broken


def _leave(code: int) -> NoReturn:
    """Ends the process at once: the interpreter's own tidy end waits for whatever import or forward
    pass the engine's thread is in. Nothing is lost, recordings are flushed with every frame."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
