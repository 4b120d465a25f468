"""The engine against everything at once: a Hypothesis machine over tiny pools, checked after every step."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from conftest import TINY, tiny_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import ColdReference, LateCopier, TransformersReference

from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.outputs import GenerationOutput, Pin, StepReport
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.schedule.policies import is_behind
from minirad.schedule.request import Request
from minirad.tiers.hiradix_cache import HOST_WRITE, HiRadixCache

EXAMPLES = int(os.environ.get("MINIRAD_EXAMPLES", "60"))

_config = tiny_config()
# Two sets of weights: the engine's may change while it runs.
WEIGHTS = [random_weights(_config, seed, dtype=torch.float32, device="cpu") for seed in (0, 1)]
MODELS = [LlamaModel(_config, weights) for weights in WEIGHTS]
COLD = [ColdReference(model) for model in MODELS]
TRANSFORMERS = [TransformersReference(TINY, weights) for weights in WEIGHTS]
HAPPENED: Counter[str] = Counter()  # events, over all examples: what the machine reaches

# Prompts are beginnings of a few long texts with a short ending of their own: they share much.
TEXTS = ([5] * 40, [5, 6] * 20, [5, 5, 5, 5, 7, 8, 9, 5] * 5, [6, 7, 8] * 13)
prompts = st.builds(
    lambda text, length, ending: (text[:length] + ending) or [5],
    st.sampled_from(TEXTS),
    st.integers(0, 20),
    st.lists(st.sampled_from([5, 6, 7]), max_size=2),
)
extra_keys = st.sampled_from([None] * 6 + ["adapter", ("bc", "a")])
requests = st.tuples(
    prompts,
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(0, 8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        logprob_start=st.sampled_from([None, None, 0, 3]),
        seed=st.just(11),
    ),
    extra_keys,
    st.integers(-1, 1),
).map(lambda drawn: drawn if (drawn[1].logprob_start or 0) < len(drawn[0]) else (drawn[0] * 4, *drawn[1:]))


# Small thresholds, so that the short prompts of this file are deferred for one another, too.
options = st.fixed_dictionaries(
    {
        "mixed": st.sampled_from([True, False]),
        "preemption": st.sampled_from([True, True, False]),
        "in_batch_prefix": st.sampled_from([True, True, False]),
        "in_batch_cached": st.integers(0, 6),
        "in_batch_shared": st.integers(1, 6),
        "fair_passes": st.integers(0, 3),
        "new_token_ratio": st.sampled_from([0.0, 0.0, 0.4, 1.0]),
        "new_token_decay": st.sampled_from([0.0, 0.01, 1.0]),
    }
)


class Watch:
    """Steps an engine and holds the schedule to what it promises: bounds, deferrals, preemption, books."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bound = {"fcfs": 0, "fair": engine.config.fair_passes}.get(engine.config.schedule_policy)
        self.passes: dict[str, int] = {}
        self.waited: set[str] = set()  # for a prefix, in this stay in the queue
        self.priority: dict[str, int] = {}
        self.events: list[ev.Event] = []
        engine.bus.subscribe(None, self.events.append)

    def step(self) -> StepReport:
        scheduler = self.engine.scheduler
        before = list(scheduler.waiting)
        pinned = bool(self.engine._pins)
        self.priority |= {request.id: request.priority for request in scheduler.requests()}
        self.events.clear()
        report = self.engine.step()
        if not pinned:  # else who has no room even alone lets others go first, as long as that lasts
            self.check_passes(before, report)
        self.check_events(report)
        books = self.engine.stats
        assert 0 <= books.first.cached <= books.first.tokens
        assert 0 <= books.again.cached <= books.again.tokens
        assert self.engine.config.mixed or report.kind != "mixed"
        return report

    def check_passes(self, before: list[Request], report: StepReport) -> None:
        admitted = [request for request in before if request.id in report.admitted]
        for request in before:
            if self.bound is None or request not in self.engine.scheduler.waiting:
                continue
            self.passes.setdefault(request.id, 0)
            self.passes[request.id] += any(is_behind(other, request) for other in admitted)
            assert self.passes[request.id] <= self.bound, f"{request.id} was passed too often"

    def check_events(self, report: StepReport) -> None:
        gone: list[str] = []
        for event in self.events:
            if isinstance(event, ev.RequestRetracted):
                assert event.request not in gone, "taken twice in one step"
                gone.append(event.request)
                assert not event.by or self.priority[event.by] > self.priority[event.request]
                assert not event.by or event.by in report.admitted, "pushed out for nothing"
            elif isinstance(event, ev.RequestFinished):
                assert event.request not in gone
            elif isinstance(event, ev.RequestAdmitted):
                assert event.request not in gone, "pushed out and taken back in one step"
                self.waited.discard(event.request)
            elif isinstance(event, ev.RequestDeferred) and event.reason.startswith("shares"):
                assert event.request not in self.waited, "waited twice for a prefix"
                assert event.reason.split()[4].rstrip(",") in report.batch
                self.waited.add(event.request)


# With a host tier (its copies end late, and some fail), with pairs for keys, or plain.
tiers = st.fixed_dictionaries(
    {
        "host_write": st.sampled_from(HOST_WRITE),
        "host_kv_tokens": st.sampled_from([0, 8, 16, 32, 64]),
        "load_back_threshold": st.sampled_from([1, 1, 2, 6]),
        "bigram_keys": st.sampled_from([False, False, True]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted; prefixes are pinned, the tree flushed; policy and weights change."""

    models, cold, judges = MODELS, COLD, TRANSFORMERS  # by which weights the engine has

    def make_engine(self, config: EngineConfig) -> Engine:
        """The engine of this game."""
        return Engine(config, model=self.models[0])

    @initialize(
        page=st.sampled_from([1, 1, 2, 4]),
        tokens=st.sampled_from([8, 16, 16, 24, 32, 64]),
        chunk=st.sampled_from([1, 2, 3, 5, 8, 16, 32]),
        running=st.integers(1, 4),
        schedule=st.sampled_from(sorted(SCHEDULE)),
        eviction=st.sampled_from(sorted(EVICTION)),
        options=options,
        tiers=tiers,
        copies=st.integers(0, 99),
    )
    def start(
        self,
        page: int,
        tokens: int,
        chunk: int,
        running: int,
        schedule: str,
        eviction: str,
        options: dict[str, Any],
        tiers: dict[str, Any],
        copies: int,
    ) -> None:
        config = EngineConfig(
            kv_tokens=tokens, page_size=page, chunk_tokens=chunk, max_running=running,
            schedule_policy=schedule, eviction_policy=eviction, poison_freed=True, **options, **tiers,
        )  # fmt: skip
        self.engine = self.make_engine(config)
        if isinstance(self.engine.cache, HiRadixCache):
            self.engine.cache.copier = LateCopier(self.engine.cache.copier, copies)
        self.weights = 0
        self.said_with: dict[str, list[int]] = {}  # by which weights each token of a sample was said
        self.engine.bus.subscribe(ev.TokenSampled, self.note_weights)
        self.engine.bus.subscribe(None, lambda event: HAPPENED.update([type(event).__name__]))
        self.watch = Watch(self.engine)
        self.recorder = Recorder(self.engine, keyframe_every=7)
        self.replay = ReplayState(self.engine.snapshot())
        self.engine.bus.subscribe(None, self.replay.apply)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.done: dict[tuple[str, int], GenerationOutput] = {}
        self.aborted: set[str] = set()
        self.changed: set[str] = set()
        self.excused: set[str] = set()  # lived beside a pin, which may leave them no room
        self.added_with: dict[str, int] = {}
        self.pins: list[Pin] = []

    # ------------------------------------------------------------ what may happen

    @rule(several=st.lists(requests, min_size=1, max_size=4))
    def add(self, several: list[tuple[list[int], SamplingParams, Any, int]]) -> None:
        config = self.engine.config
        for prompt, params, extra_key, priority in several:
            fits = len(prompt) + params.max_new_tokens <= config.kv_tokens and params.n <= config.max_running
            before = self.engine.snapshot()
            try:
                rid = self.engine.add_request(prompt, params, extra_key, priority)
            except ValueError:
                assert not fits
                assert self.engine.snapshot() == before
                continue
            assert fits
            self.asked[rid] = (prompt, params)
            self.added_with[rid] = self.weights
            if self.pins:
                self.excused.add(rid)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.watch.step())

    def note_weights(self, event: ev.TokenSampled) -> None:
        self.said_with.setdefault(event.request, []).append(self.weights)

    def change_weights(self) -> None:
        self.weights = 1 - self.weights
        self.engine.update_weights(self.models[self.weights])
        # Prompt log-probabilities may be of both: what lives now is not held to those of one model.
        self.changed |= {request.group for request in self.engine.scheduler.requests()}
        for prompt, _ in list(self.asked.values())[-2:]:
            assert self.engine.peek(prompt) == 0

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        alive = any(request.group == rid for request in self.engine.scheduler.requests())
        assert self.engine.abort(rid) == alive
        if alive:
            self.aborted.add(rid)

    @rule(prompt=prompts, extra_key=extra_keys, which=st.integers(0, 5))
    def pin_or_unpin(self, prompt: list[int], extra_key: Any, which: int) -> None:
        if which < len(self.pins):
            self.engine.unpin(self.pins.pop(which))
            return
        length = self.engine.peek(prompt, extra_key)
        self.pins.append(self.engine.pin(prompt, extra_key))
        assert self.pins[-1].length == length
        self.excused |= {request.group for request in self.engine.scheduler.requests()}

    @rule(
        what=st.sampled_from(["weights", "peek", "flush", *sorted(EVICTION)]),
        prompt=prompts,
        extra_key=extra_keys,
    )
    def something_rare(self, what: str, prompt: list[int], extra_key: Any) -> None:
        before = self.engine.snapshot()
        if what == "weights":
            self.change_weights()
            return
        if what == "peek":
            assert 0 <= self.engine.peek(prompt, extra_key) <= len(prompt)
        elif what != "flush":
            self.engine.set_eviction_policy(what)
            before["tree"]["eviction_policy"] = what
        elif self.engine.scheduler.has_work or self.pins:
            with pytest.raises(ValueError, match="cannot flush"):
                self.engine.flush_cache()
        else:
            self.engine.flush_cache()
            assert self.engine.allocator.available == self.engine.config.kv_tokens
            return
        assert self.engine.snapshot() == before

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            assert self.replay.snapshot() == self.engine.snapshot()

    def take(self, report: Any) -> None:
        self.engine.check()
        assert self.replay.snapshot() == self.engine.snapshot()
        for output in report.finished:
            key = (output.request_id, output.index)
            assert key not in self.done, f"{key} finished twice"
            self.done[key] = output

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.take(self.watch.step())
        assert not self.engine.has_work
        for rid, (prompt, params) in self.asked.items():
            self.judge(rid, prompt, params)
        if isinstance(self.engine.cache, HiRadixCache):
            self.engine.cache.poll(wait=True)
            self.engine.check()
        tree, free = self.engine.cache.total_size, self.engine.allocator.available
        assert tree + free == self.engine.config.kv_tokens, "slots were lost"
        while self.pins:
            self.engine.unpin(self.pins.pop())
        assert self.engine.cache.protected_size == 0
        self.engine.flush_cache()
        assert self.engine.allocator.available == self.engine.config.kv_tokens
        assert getattr(self.engine.cache, "host_size", 0) == 0
        self.recorder.close()
        check_recording(self.recorder)

    def judge(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        outputs = [output for (request, _), output in self.done.items() if request == rid]
        reasons = {output.finish_reason for output in outputs}
        assert "abort" not in reasons or rid in self.aborted
        assert "error" not in reasons or rid in self.excused
        if not reasons & {"abort", "error"}:
            assert sorted(output.index for output in outputs) == list(range(params.n))
        for output in outputs:
            if output.finish_reason in ("stop", "length"):
                self.judge_tokens(prompt, params, output)
                assert output.cached_tokens <= min(len(prompt) - 1, max((params.logprob_start or 99) - 1, 0))

    def judge_tokens(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        """Each token is what the weights of its time say after the tokens before it."""
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        said_with = self.said_with.get(name, [])
        assert len(said_with) == len(output.token_ids)
        if params.temperature == 0:
            for at, (token, weights) in enumerate(zip(output.token_ids, said_with, strict=True)):
                assert self.judges[weights].agrees([*prompt, *output.token_ids[:at]], token), (
                    prompt,
                    output,
                )
        if output.request_id not in self.changed:
            self.require_as_alone(prompt, params, output)

    def require_as_alone(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        """One rank that shares nothing says the same, drawn tokens included."""
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        weights = [*self.said_with.get(name, []), self.added_with[output.request_id]][0]
        self.cold[weights].require_equal(prompt, params, output)


def check_recording(recording: Recording) -> None:
    """Every keyframe is what replay from the start arrives at."""
    replay = ReplayState(recording.header["start"])
    for frame in recording:
        for event in frame.events:
            assert isinstance(event, ev.Event)
            assert event.describe()
            replay.apply(event)
        if frame.keyframe is not None:
            assert replay.snapshot() == frame.keyframe
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        recording.save(path)
        data = path.read_bytes()
        sizes = range(data.index(b"\n") + 1, len(data) + 1)
        for size in random.Random(len(data)).sample(sizes, min(3, len(sizes))):
            path.write_bytes(data[:size])
            # Cut just before its line's end, a frame is whole all the same.
            whole = data[: size + 1].count(b"\n") - 1
            assert Recorder.load(path).frames == recording.frames[:whole]


def test_any_order_of_requests_steps_aborts_pins_and_flushes() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
