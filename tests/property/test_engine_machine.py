"""The engine against everything at once: a Hypothesis machine over tiny pools, checked after every step."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from conftest import TINY, tiny_config
from game_support import (
    ADAPTERS,
    EverySo,
    Fresh,
    HeldWorker,
    merged,
    require_kv_as_computed_alone,
    write_adapters,
    write_head,
)
from hypothesis import HealthCheck, Phase, seed, settings
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
from minirad.cache.radix_cache import RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import disk_events as dv
from minirad.observe import draft_events as dev
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.outputs import GenerationOutput, Pin, StepReport
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.schedule.policies import is_behind
from minirad.schedule.request import Request
from minirad.speculative.head import DraftHead
from minirad.tiers import disk, disk_names
from minirad.tiers.disk_cache import DiskCache
from minirad.tiers.hiradix_cache import HOST_WRITE, HiRadixCache

EXAMPLES = int(os.environ.get("MINIRAD_EXAMPLES", "40"))

_config = tiny_config()
# Two sets of weights: the engine's may change while it runs.
WEIGHTS = [random_weights(_config, seed, dtype=torch.float32, device="cpu") for seed in (0, 1)]
MODELS = [LlamaModel(_config, weights) for weights in WEIGHTS]
COLD = [ColdReference(model) for model in MODELS]
TRANSFORMERS = [TransformersReference(TINY, weights) for weights in WEIGHTS]
HAPPENED: Counter[str] = Counter()  # events, over all examples: what the machine reaches

# The same with each adapter, merged into the weights: what an engine with adapters has to say.
FILES = TemporaryDirectory()  # of the draft head and the adapters
HEAD = write_head(Path(FILES.name) / "head", MODELS[0])
LORA = write_adapters(Path(FILES.name), _config)
MERGED = {name: [merged(_config, weights, name) for weights in WEIGHTS] for name in ("", *ADAPTERS)}
MERGED_MODELS = {name: [LlamaModel(_config, each) for each in both] for name, both in MERGED.items()}
MERGED_COLD = {name: [ColdReference(model) for model in MERGED_MODELS[name]] for name in ADAPTERS}
MERGED_JUDGES = {name: [TransformersReference(TINY, each) for each in MERGED[name]] for name in ADAPTERS}
FRESH = {
    name: [Fresh(model, DraftHead.load(HEAD, MODELS[at])) for at, model in enumerate(models)]
    for name, models in MERGED_MODELS.items()
}
# What games have to reach: in any few of them, and in many. (Which games are played depends on the modules
# that are loaded: Hypothesis takes constants from them.)
OFTEN = (
    "DraftVerified", "(accepted)", "(rejected)", "TokensForced", "BlocksWritten", "RequestForked",
    "NodeDemoted", "(slots looked at)",
)  # fmt: skip
RARE = ("BlocksRead", "BlocksLate", "(read by another)", "VersionBumped", "RequestRetracted", "LoadEnded")
BLOCK = 4  # least units of a block on the disk here: the pools are tiny
BYTES = 8_000  # a block's file, or a little less

# Prompts are beginnings of a few long texts with a short ending of their own: they share much.
TEXTS = ([5] * 40, [5, 6] * 20, [5, 5, 5, 5, 7, 8, 9, 5] * 5, [6, 7, 8] * 13)
prompts = st.builds(
    lambda text, length, ending: (text[:length] + ending) or [5],
    st.sampled_from(TEXTS),
    st.integers(0, 20),
    st.lists(st.sampled_from([5, 6, 7]), max_size=2),
)
extra_keys = st.sampled_from([None] * 6 + ["adapter", ("bc", "a")])
loras = st.sampled_from(["", "", *ADAPTERS])  # where the engine has them


class Extras(NamedTuple):
    """What else a request may have."""

    lora: str = ""
    masked: bool = False


requests = st.tuples(
    prompts,
    st.builds(
        SamplingParams,
        max_new_tokens=st.integers(0, 8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        logprob_start=st.sampled_from([None, None, 0, 3]),
        stop_token_ids=st.sampled_from([()] * 5 + [(7, 30), tuple(range(8, 60, 3))]),
        seed=st.just(11),
    ),
    extra_keys,
    st.integers(-1, 1),
    st.builds(Extras, loras, st.sampled_from([False] * 5 + [True])),
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
                assert event.request not in gone or self.gave_up(event, report)
            elif isinstance(event, ev.RequestAdmitted):
                assert event.request not in gone, "pushed out and taken back in one step"
                self.waited.discard(event.request)
            elif isinstance(event, ev.RequestDeferred) and event.reason.startswith("shares"):
                assert event.request not in self.waited, "waited twice for a prefix"
                assert event.reason.split()[4].rstrip(",") in report.batch
                self.waited.add(event.request)

    def gave_up(self, event: ev.RequestFinished, report: StepReport) -> bool:
        """The one request that ran was retracted, nobody has room even alone, and pins hold the rest."""
        stuck = self.engine.scheduler.stuck
        alone = report.kind == "idle" and stuck is not None and stuck.id == event.request
        return alone and event.reason == "error" and bool(self.engine._pins)


# With a host tier (its copies end late, and some fail), with pairs for keys, or plain.
tiers = st.fixed_dictionaries(
    {
        "host_write": st.sampled_from(HOST_WRITE),
        "host_kv_tokens": st.sampled_from([0, 8, 16, 16, 32, 64]),
        "load_back_threshold": st.sampled_from([1, 1, 2, 6]),
        "bigram_keys": st.sampled_from([None, False, True]),
        "radix_cache": st.sampled_from([True] * 9 + [False]),
    }
).map(lambda drawn: drawn if drawn["radix_cache"] else {**drawn, "host_kv_tokens": 0})
drafts = st.fixed_dictionaries(
    {
        "speculative": st.sampled_from([None, "ngram", "eagle", "eagle"]),
        "draft_tokens": st.integers(1, 5),
        "draft_ngram": st.integers(1, 4),
        "jump_forward": st.booleans(),
    }
)
# A folder, or none: blocks that it holds at most, and how often its threads are late.
folders = st.sampled_from([None, (3, 0.0), (10, 0.0), (1000, 0.0), (1000, 0.3), (1000, 0.3)])


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted; prefixes are pinned, the tree flushed; policy and weights change."""

    models, cold, judges = MODELS, COLD, TRANSFORMERS  # by which weights the engine has

    def __init__(self) -> None:
        super().__init__()
        self.extras: dict[str, Extras] = {}
        self.masks: dict[str, EverySo] = {}
        self.forced: dict[str, list[tuple[int, ...]]] = {}  # places of what was forced, by request
        self.folder: TemporaryDirectory[str] | None = None
        self.looked = False  # since the last step: the invariants need not be looked at again

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
        drafts=drafts,
        lora=st.booleans(),
        folder=folders,
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
        drafts: dict[str, Any],
        lora: bool,
        folder: tuple[int, float] | None,
    ) -> None:
        config = EngineConfig(
            kv_tokens=tokens, page_size=page, chunk_tokens=chunk, max_running=running,
            schedule_policy=schedule, eviction_policy=eviction, poison_freed=True, **options, **tiers,
            **drafts, draft_model=HEAD if drafts["speculative"] == "eagle" else None,
            lora=LORA if lora else (),
            disk_dir=self.make_folder(copies, folder) if tiers["host_kv_tokens"] and folder else None,
        )  # fmt: skip
        self.engine = self.make_engine(config)
        if isinstance(self.engine.cache, DiskCache):
            assert folder is not None
            self.engine.cache.disk.files.most_bytes = folder[0] * BYTES
        if isinstance(self.engine.cache, HiRadixCache):
            self.engine.cache.copier = LateCopier(self.engine.cache.copier, copies)
        self.weights = 0
        self.said_with: dict[str, list[int]] = {}  # by which weights each token of a sample was said
        self.engine.bus.subscribe(ev.TokenSampled, self.note_weights)
        self.engine.bus.subscribe(None, self.count)
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

    def make_folder(self, seed: int, folder: tuple[int, float]) -> str:
        HeldWorker.rng, HeldWorker.holds, HeldWorker.all_of_them = random.Random(seed), folder[1], []
        self.folder = TemporaryDirectory()
        return self.folder.name

    def known(self, lora: str) -> str:
        """The adapter, where this engine has them."""
        return lora if self.engine.config.lora else ""

    # ------------------------------------------------------------ what may happen

    @rule(several=st.lists(requests, min_size=1, max_size=4))
    def add(self, several: list[tuple[list[int], SamplingParams, Any, int, Any]]) -> None:
        config = self.engine.config
        for prompt, params, extra_key, priority, *more in several:
            extras = more[0] if more else Extras()
            lora, mask = self.known(extras.lora), EverySo(TINY["vocab_size"]) if extras.masked else None
            fits = len(prompt) + params.max_new_tokens <= config.kv_tokens and params.n <= config.max_running
            if not fits:
                before = self.engine.snapshot()
                with pytest.raises(ValueError, match=r"more than|as many rows"):
                    self.engine.add_request(prompt, params, extra_key, priority)
                assert self.engine.snapshot() == before
                continue
            rid = self.engine.add_request(prompt, params, extra_key, priority, token_mask=mask, lora=lora)
            self.asked[rid], self.extras[rid] = (prompt, params), extras._replace(lora=lora)
            if mask is not None:
                self.masks[rid] = mask
            self.added_with[rid] = self.weights
            if self.pins:
                self.excused.add(rid)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.watch.step())

    def count(self, event: ev.Event) -> None:
        HAPPENED[type(event).__name__] += 1
        if isinstance(event, dev.TokensForced):
            self.note_forced(event)
        if isinstance(event, dev.DraftVerified):
            HAPPENED["(accepted)"] += event.accepted
            HAPPENED["(rejected)"] += event.drafted - event.accepted

    def note_forced(self, event: dev.TokensForced) -> None:
        """At these places its mask is not asked."""
        [request] = [each for each in self.engine.scheduler.requests() if each.id == event.request]
        for at in range(len(event.tokens)):
            self.forced.setdefault(request.group, []).append((*request.output, *event.tokens[:at]))

    def note_weights(self, event: ev.TokenSampled) -> None:
        self.said_with.setdefault(event.request, []).append(self.weights)

    def change_weights(self) -> None:
        self.look_at_kv()
        self.weights = 1 - self.weights
        self.engine.update_weights(self.models[self.weights])
        # Prompt log-probabilities may be of both: what lives now is not held to those of one model.
        self.changed |= {request.group for request in self.engine.scheduler.requests()}
        for rid, (prompt, _) in list(self.asked.items())[-2:]:
            assert self.engine.peek(prompt, lora=self.extras.get(rid, Extras()).lora) == 0

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        alive = any(request.group == rid for request in self.engine.scheduler.requests())
        assert self.engine.abort(rid) == alive
        if alive:
            self.aborted.add(rid)

    @rule(prompt=prompts, extra_key=extra_keys, which=st.integers(0, 5), lora=loras)
    def pin_or_unpin(self, prompt: list[int], extra_key: Any, which: int, lora: str) -> None:
        if which < len(self.pins):
            self.engine.unpin(self.pins.pop(which))
            return
        length = self.engine.peek(prompt, extra_key, self.known(lora))
        self.pins.append(self.engine.pin(prompt, extra_key, self.known(lora)))
        assert self.pins[-1].length == length
        self.excused |= {request.group for request in self.engine.scheduler.requests()}

    @rule(
        what=st.sampled_from(["weights", "peek", "flush", "look", *sorted(EVICTION)]),
        prompt=prompts,
        extra_key=extra_keys,
    )
    def something_rare(self, what: str, prompt: list[int], extra_key: Any) -> None:
        before = self.engine.snapshot()
        if what == "weights":
            self.change_weights()
            return
        if what == "look":
            self.look_at_kv()
        elif what == "peek":
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

    @precondition(lambda self: isinstance(self.engine.cache, DiskCache))
    @rule(
        several=st.lists(st.tuples(prompts, loras), min_size=1, max_size=2),
        same=st.booleans(),
        delete=st.integers(0, 9),
    )
    def another_process(self, several: list[tuple[list[int], str]], same: bool, delete: int) -> None:
        """An engine of the same folder, of any weights, reads and writes there; a file is lost."""
        mine, folder = self.engine, Path(self.folder.name)
        weights = self.weights if same else 1 - self.weights
        fits = [(prompt, lora) for prompt, lora in several if len(prompt) + 4 <= mine.config.kv_tokens]
        other = self.make_engine(mine.config)
        other.cache.disk.files.most_bytes = mine.cache.disk.files.most_bytes
        if weights:
            other.update_weights(self.models[weights])
        other.bus.subscribe(dv.BlocksRead, lambda event: HAPPENED.update(["(read by another)"]))
        params = SamplingParams(max_new_tokens=4)
        for prompt, lora in fits:
            [output] = other.generate([prompt], params, lora=self.known(lora))
            self.cold_of(self.known(lora), weights).require_equal(prompt, params, output)
            other.check()
        require_kv_as_computed_alone(other, lambda lora: FRESH[lora][weights])
        other.cache.close()
        for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
            if number == delete:
                file.unlink()
        mine.cache.disk.files.scan()  # it would look some seconds later
        self.add([(prompt, params, None, 0, Extras(lora)) for prompt, lora in fits])

    # ------------------------------------------------------------ what must hold

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "engine") and not self.looked:
            self.engine.check()
            assert self.replay.snapshot() == self.engine.snapshot()
        self.looked = False

    def take(self, report: Any) -> None:
        self.engine.check()
        self.looked = True
        for request in self.engine.scheduler.running:
            assert request.kv_len == request.length - 1, f"{request.id}: a draft was left in its row"
        for request in self.engine.scheduler.live:
            self.look_at_path(request)
        if self.folder is not None:
            self.look_at_folder()
        assert self.replay.snapshot() == self.engine.snapshot()
        for output in report.finished:
            key = (output.request_id, output.index)
            assert key not in self.done, f"{key} finished twice"
            self.done[key] = output
        if report.finished and self.engine.steps % 3 == 0:  # at the end of a game always
            self.look_at_kv()

    def look_at_path(self, request: Request) -> None:
        """What a request holds in the tree spells its own tokens, in its own namespace."""
        path = self.engine.cache.path_up(request.node)[::-1]
        key = RadixKey(request.tokens, request.extra_key, self.engine.config.bigram_keys)
        assert key.data.startswith(b"".join(node.edge for node in path)), (request.id, key, path)
        assert {node.namespace for node in path} <= {key.namespace}, (request.id, key, path)

    def look_at_folder(self) -> None:
        """The folder's bound is kept, nothing failed in a thread, and some jobs are done only now."""
        files = self.engine.cache.disk.files
        assert not files.off and not any(worker.failed for worker in HeldWorker.all_of_them)
        sizes = [path.stat().st_size for path in Path(self.folder.name).iterdir()]
        assert sum(sizes) <= files.most_bytes, sizes
        for worker in HeldWorker.all_of_them:
            worker.do_all()

    def fresh(self, lora: str) -> Fresh:
        return FRESH[lora][self.weights]

    def look_at_kv(self) -> None:
        """All keys and values that are shared are those of their tokens."""
        if self.models is MODELS:
            HAPPENED["(slots looked at)"] += require_kv_as_computed_alone(self.engine, self.fresh)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.play_to_the_end()
        finally:
            if self.folder is not None:
                self.folder.cleanup()

    def play_to_the_end(self) -> None:
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
        self.look_at_kv()
        tree, free = self.engine.cache.total_size, self.engine.allocator.available
        assert tree + free == self.engine.config.kv_tokens, "slots were lost"
        while self.pins:
            self.engine.unpin(self.pins.pop())
        assert self.engine.cache.protected_size == 0
        self.engine.flush_cache()
        assert self.engine.allocator.available == self.engine.config.kv_tokens
        assert getattr(self.engine.cache, "host_size", 0) == 0
        if self.folder is not None:
            self.engine.cache.close()
            self.look_at_folder()
        self.recorder.close()
        check_recording(self.recorder)

    def judge(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        outputs = [output for (request, _), output in self.done.items() if request == rid]
        reasons = {output.finish_reason for output in outputs}
        assert "abort" not in reasons or rid in self.aborted
        assert "error" not in reasons or rid in self.excused
        if rid in self.masks:
            self.judge_mask(
                self.masks[rid], [output.token_ids for output in outputs], self.forced.get(rid, [])
            )
        if not reasons & {"abort", "error"}:
            assert sorted(output.index for output in outputs) == list(range(params.n))
        for output in outputs:
            if output.finish_reason in ("stop", "length"):
                self.judge_tokens(prompt, params, output)
                assert output.cached_tokens <= min(len(prompt) - 1, max((params.logprob_start or 99) - 1, 0))

    def judge_mask(self, mask: Any, replies: list[list[int]], forced: list[tuple[int, ...]]) -> None:
        said = Counter(tuple(reply[:at]) for reply in replies for at in range(len(reply)))
        assert Counter(mask.asked) + Counter(forced) == said, (
            "a mask is asked once for each token, or it told"
        )

    def judge_tokens(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        """Each token is what the weights of its time say after the tokens before it."""
        rid = output.request_id
        name = f"{rid}.{output.index}" if output.index else rid
        said_with = self.said_with.get(name, [])
        assert len(said_with) == len(output.token_ids)
        if params.temperature == 0:
            for at, (token, weights) in enumerate(zip(output.token_ids, said_with, strict=True)):
                judge, mask = self.judge_of(rid, weights), self.masks.get(rid)
                allowed = mask and mask.allowed(output.token_ids[:at])
                told = (rid, self.extras.get(rid), prompt, output)
                assert judge.agrees([*prompt, *output.token_ids[:at]], token, allowed), told
        if output.request_id not in self.changed:
            self.require_as_alone(prompt, params, output)

    def require_as_alone(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        """One rank that shares nothing says the same, drawn tokens included."""
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        rid = output.request_id
        weights, mask = [*self.said_with.get(name, []), self.added_with[rid]][0], self.masks.get(rid)
        cold = self.cold_of(self.extras.get(rid, Extras()).lora, weights)
        cold.require_equal(prompt, params, output, mask and mask.allowed)

    def judge_of(self, rid: str, weights: int) -> TransformersReference:
        lora = self.extras.get(rid, Extras()).lora
        return MERGED_JUDGES[lora][weights] if lora else self.judges[weights]

    def cold_of(self, lora: str, weights: int) -> ColdReference:
        return MERGED_COLD[lora][weights] if lora else self.cold[weights]


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
        for size in random.Random(len(data)).sample(sizes, min(1, len(sizes))):
            path.write_bytes(data[:size])
            # Cut just before its line's end, a frame is whole all the same.
            whole = data[: size + 1].count(b"\n") - 1
            assert Recorder.load(path).frames == recording.frames[:whole]


def play(examples: int, number: int | None = None) -> None:
    """So many games; number: others than those that are played always."""
    machine = EngineMachine if number is None else seed(number)(EngineMachine)
    with (
        patch.object(disk, "Worker", HeldWorker),  # what is late here is so when told, not by the clock
        patch.object(disk.DiskTier, "read_wait", 0.0),
        patch.object(disk_names, "LEAST_UNITS", BLOCK),
    ):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                derandomize=number is None,
                phases=[Phase.generate] if number is not None else tuple(Phase),
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_any_order_of_requests_steps_aborts_pins_and_flushes() -> None:
    play(EXAMPLES)
    assert EXAMPLES < 40 or all(HAPPENED[name] for name in OFTEN), HAPPENED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_games_reach_what_is_rare() -> None:
    play(max(EXAMPLES, 250), 3)
    assert all(HAPPENED[name] for name in OFTEN + RARE), HAPPENED


def test_who_has_no_room_beside_pins_is_given_up_in_the_step_that_retracts_it() -> None:
    """Four of eight slots are pinned: it could begin, decode once, and can never hold five tokens."""
    engine = Engine(EngineConfig(kv_tokens=8), model=MODELS[0])
    watch = Watch(engine)
    engine.generate([[9, 8, 7, 6]], SamplingParams(max_new_tokens=0))
    engine.pin([9, 8, 7, 6])
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=5, ignore_eos=True))
    reports = [watch.step() for _ in range(3)]
    [output] = reports[-1].finished
    assert reports[-1].retracted == ["R2"] and reports[-1].kind == "idle"
    assert output.finish_reason == "error" and output.error.endswith("the rest is pinned")
    assert output.token_ids == [7, 7]
    engine.check()
