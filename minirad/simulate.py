"""The same tree, policies and scheduler without a model: hit rates of a workload or a trace in seconds.

Two ways of driving:

* **replay**: requests one at a time, in file order, through one RadixCache; only prompts are inserted,
  whole-unit matches count. What a trace is usually judged by, and what the cache alone can do.
* **schedule**: requests arrive over time; the engine serves them in a pool of that size, with a runner that
  computes nothing: replies are scripted, or those of a recording. Waiting, retraction and the rule that one
  token is always computed are part of it.

Hit rate is cached prompt units over prompt units. A unit is a token, or a block of 512 where a trace has
only the blocks' hashes. A request that was retracted and runs again is booked apart, so that computing
one prompt twice cannot look like sharing. The optimum beside it is a cache without limit that sees the
same requests one after another; the bound is what no eviction policy passes at that capacity (optimum.py).

Does not estimate seconds: there is no model, and a step is a step. Does not import torch.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from minirad import command, own_policy, traces
from minirad.cache.eviction import POLICIES as EVICTION
from minirad.cache.node import MAX_TOKEN
from minirad.cache.prefix_cache import usable
from minirad.cache.radix_cache import RadixCache, RadixKey, Slots, as_int64
from minirad.config import EngineConfig, SamplingParams, ScheduleOptions, at_least, one_of
from minirad.doctor import EarlyBreak, diagnose, early_breaks
from minirad.engine import Engine
from minirad.errors import read_text, require
from minirad.observe import events as ev
from minirad.optimum import CLAIRVOYANT, FORESEEING, ForeseeingCache, Known, Presence
from minirad.outputs import StepReport
from minirad.parts import Parts, Result
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch
from minirad.traces import FORMATS, Tokenizer, Trace, detect, prompt_text, read_trace, tokenizer
from minirad.workloads import WORKLOADS, Asked, Player, Workload, load

DRIVES = ("replay", "schedule")
KNOWN_POLICIES = (*EVICTION, *FORESEEING)
REPLY_IDS = 2**30  # scripted replies are ids from here on: no vocabulary and no trace has them
LEAST_SHOWN = 0.002  # of all that is saved: prefixes that save less are not worth a line
SHARES_OF_THE_TREE = (64, 16, 4)  # default capacities: all distinct units divided by these


# ---------------------------------------------------------------------- replay


class Replay:
    """One request at a time through a RadixCache of `capacity` units (None: no limit).

    Slots are fresh numbers that are never used again: no KV is read, and so no pool is needed.
    """

    def __init__(self, capacity: int | None = None, page_size: int = 1, eviction_policy: str = "lru") -> None:
        self.cache = RadixCache(page_size, eviction_policy)
        self.capacity = capacity
        self.evicted = 0
        self._next = page_size

    def serve(self, key: RadixKey, *longer: RadixKey) -> int | None:
        """How many units of the key were in the cache; afterwards all of its whole pages are.

        longer: keys that begin with it and are put in as well (its prompt with a reply).
        None, with nothing changed, for a request that is larger than the whole cache.
        """
        if self.capacity is not None and max(map(self._footprint, (key, *longer))) > self.capacity:
            return None
        return self.serve_together([(key, *longer)])[0]

    def serve_together(self, batch: Sequence[tuple[RadixKey, ...]]) -> list[int]:
        """The same for several requests at once: none finds what another one of them computes."""
        cache = self.cache
        matches = [cache.match_prefix(keys[0]) for keys in batch]
        for match in matches:
            cache.inc_lock_ref(match.last_node)
        for keys in batch:
            for key in keys[1:] or keys:
                self._put(key)
        for match in matches:
            cache.dec_lock_ref(match.last_node)
        return [match.length for match in matches]

    def _put(self, key: RadixKey) -> None:
        """Makes room for the whole request, its last partial page included, and inserts it."""
        cache = self.cache
        # A part of the key itself may be evicted: then more has to be.
        while (excess := self._excess(key)) > 0 and (evicted := cache.evict(excess).num_tokens):
            self.evicted += evicted
        cache.insert(key, self._slots(key))

    def _excess(self, key: RadixKey) -> int:
        if self.capacity is None:
            return 0
        return self.cache.total_size + self._footprint(key) - self.cache.peek(key) - self.capacity

    def _slots(self, key: RadixKey) -> Slots:
        slots = np.arange(self._next, self._next + len(key), dtype=np.int64)
        self._next += self._footprint(key)
        return slots

    def _footprint(self, key: RadixKey) -> int:
        page = self.cache.page_size
        return -(-len(key) // page) * page


class ForeseeingReplay(Replay):
    """A Replay that knows its requests beforehand. They have to be served in that order, one by one."""

    def __init__(self, known: Known, capacity: int | None = None, policy: str = CLAIRVOYANT) -> None:
        super().__init__(capacity, known.page_size)
        self._future = known.future(capacity)
        self.cache = ForeseeingCache(self._future, policy)

    def serve(self, key: RadixKey, *longer: RadixKey) -> int | None:
        self._future.now += 1
        return super().serve(key, *longer)

    def _slots(self, key: RadixKey) -> Slots:
        return self._future.runs.units(key)


# ---------------------------------------------------------------------- the engine without a model


class Finished(Protocol):
    """What a feed reads of a finished sample."""

    @property
    def request_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt that is answered at once, without an engine."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str


@dataclass(slots=True)
class Served:
    """What became of one request: steps of arrival and first admission, its prompt and its replies."""

    prompt: Slots
    extra_key: Any
    arrived: int
    admitted: int | None = None
    cached: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def wait(self) -> int:
        """Steps from arrival to first admission."""
        assert self.admitted is not None
        return self.admitted - self.arrived


class Script:
    """What will be generated, in place of a model: the runner and the texts of an engine without one.

    given: token ids by the request's id; the replies of the others are `scripted_reply`s.
    """

    vocab_size = MAX_TOKEN + 1
    eos_ids = ()

    def __init__(self) -> None:
        self.given: dict[str, tuple[int, ...]] = {}
        self.watch: Callable[[Batch], None] | None = None  # called with each batch that is launched
        self._replies: dict[str, list[int]] = {}

    def reply(self, request: Request) -> list[int]:
        """All that a request will say."""
        if request.id not in self._replies:
            self._replies[request.id] = scripted_reply(request, self.given.get(request.group))
        return self._replies[request.id]

    # A runner's part (parts.Runner): it computes nothing.

    def launch(self, batch: Batch) -> Scripted:
        if self.watch is not None:
            self.watch(batch)
        return Scripted(self, batch)

    def overlap(self, engine: Engine) -> None:
        return None

    def copy_slots(self, source: Slots, target: Slots) -> None:
        pass

    # The texts' part (tokenizing.Tokenizing): ids in, ids out.

    def encode(self, prompt: Any) -> Slots:
        return as_int64(prompt, "a prompt")

    def prepare(self, params: SamplingParams) -> None:
        pass

    def has_ended(self, request: Request) -> bool:
        said = len(request.output)  # a reply as long as it may be ends by its length, as a model's does
        return len(self.reply(request)) <= said < request.params.max_new_tokens

    def final(self, request: Request) -> str:
        self._replies.pop(request.id, None)
        return ""


@dataclass(frozen=True, slots=True)
class Scripted:
    """A batch that was launched."""

    script: Script
    batch: Batch

    def read(self) -> list[Result]:
        """The next token of each request whose prompt is computed, and of the samples that branch off it."""
        results = []
        for request in self.batch.requests:
            if not request.computed:
                results.append(Result())
                continue
            said = len(request.output)
            samples = [request, *map(request.branch, range(1, 1 + request.unbranched))]
            first, *branches = [self.script.reply(sample)[said : said + 1] for sample in samples]
            results.append(Result(_sampled(first), [Result(_sampled(each)) for each in branches]))
        return results


def _sampled(tokens: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Tokens with log-probabilities, as a runner gives them."""
    return tuple((token, 0.0) for token in tokens)


class ModelFreeEngine(Engine):
    """The engine without a model: replies come from a script, and nothing is computed.

    capacity, chunk: in key units. now: the step that comes next; the caller may let idle steps pass.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int = 1,
        eviction_policy: str = "lru",
        schedule_policy: str = "lpm",
        max_running: int = 32,
        max_context: int | None = None,
        chunk: int = 512,
        options: ScheduleOptions | None = None,
    ) -> None:
        config = EngineConfig(
            kv_tokens=capacity // page_size * page_size, page_size=page_size, max_running=max_running,
            max_context=max(min(max_context or capacity, capacity), 2), chunk_tokens=chunk,
            schedule_policy=schedule_policy, eviction_policy=eviction_policy,
            **asdict(options or ScheduleOptions()),
        )  # fmt: skip
        assert config.max_context is not None
        self.script = Script()
        rows = ReqToTokenPool(max_running, config.max_context)
        cache = RadixCache(page_size, eviction_policy)
        super().__init__(parts=Parts(config, self.script, cache, rows, self.script))
        self.now = 0
        self.served: dict[str, Served] = {}
        self.order: list[str] = []  # by first admission
        self.bus.subscribe(ev.RequestAdmitted, self._book)

    def add_request(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        extra_key: Any = None,
        priority: int = 0,
        *,
        token_mask: Any = None,
        lora: str = "",
        reply: tuple[int, ...] | None = None,
    ) -> str:
        """Queues token ids and returns the request's id; ValueError for what can never run.

        reply: what will be generated; None: see scripted_reply.
        """
        name = super().add_request(prompt, params, extra_key, priority, token_mask=token_mask, lora=lora)
        self.served[name] = Served(as_int64(prompt, "a prompt"), extra_key, self.now)
        if reply is not None:
            self.script.given[name] = reply
        return name

    def step(self) -> StepReport:
        """Schedules and commits one batch, and says who has finished."""
        report = super().step()
        self.now += 1
        for output in report.finished:
            require(output.finish_reason != "error", output.error)
            self.served[output.request_id].outputs.append(output.token_ids)
        return report

    def _book(self, event: ev.RequestAdmitted) -> None:
        if event.attempt == 1:
            served = self.served[event.request]
            served.admitted, served.cached = self.now, event.cached
            self.order.append(event.request)


def scripted_reply(request: Request, given: Sequence[int] | None = None) -> list[int]:
    """The reply that is given, as far as `max_new_tokens` allow; else made-up ids, as many as are drawn
    between 1 and these (all of them with ignore_eos).

    Those depend on the prompt alone, and on the sample where it is sampled: equal questions get equal
    answers, as a greedy model gives them.
    """
    params = request.params
    if given is not None:
        return list(given[: params.max_new_tokens])
    seed = zlib.crc32(request.prompt.tobytes())
    if params.temperature > 0:
        seed += 1 + request.index + 1_000 * (params.seed or request.arrival)
    rng = np.random.default_rng(seed)
    most = params.max_new_tokens
    length = int(rng.integers(1, most + 1)) if most and not params.ignore_eos else most
    ids: list[int] = rng.integers(REPLY_IDS, 2**31, length).tolist()
    return ids


# ---------------------------------------------------------------------- what is asked


class Due(NamedTuple):
    """A request that is to be added before the coming step; `handle` is the feed's own."""

    prompt: Sequence[int] | Slots
    params: SamplingParams
    extra_key: Any
    priority: int
    reply: tuple[int, ...] | None
    handle: Any


class Feed(Protocol):
    """Says what is due, and hears what was sent, refused and finished."""

    def due(self, step: int) -> list[Due]: ...
    def sent(self, due: Due, name: str) -> None: ...
    def refused(self, due: Due) -> None: ...
    def finished(self, output: Finished, step: int) -> None: ...
    @property
    def next_due(self) -> int | None: ...


def _space(session: Any) -> Any:
    """The namespace of a session's requests: here no adapter computes, but each has its own."""
    return (session.lora, session.extra_key) if session.lora else session.extra_key


class WorkloadFeed:
    """A workload's Player in the words of a Feed."""

    def __init__(self, workload: Workload, encode: Callable[[str], Sequence[int]]) -> None:
        self._player = Player(workload, encode)

    def due(self, step: int) -> list[Due]:
        return [
            Due(each.prompt, each.params, _space(each.session), each.session.priority, each.reply, each)
            for each in self._player.due(step)
        ]

    def sent(self, due: Due, name: str) -> None:
        asked: Asked = due.handle
        self._player.sent(asked, name)

    def refused(self, due: Due) -> None:
        self._player.refused(due.handle)

    def finished(self, output: Finished, step: int) -> None:
        self._player.finished(output, step)

    @property
    def next_due(self) -> int | None:
        return self._player.next_due


class TraceFeed:
    """A trace's requests at their times; those of one conversation wait for the reply before.

    step_ms: milliseconds of one step. per_step: arrivals per step where the trace has no times.
    """

    def __init__(self, trace: Trace, step_ms: float, per_step: float) -> None:
        self._requests = trace.requests
        self._later: dict[str, deque[int]] = {}  # session -> its requests to come
        self._of: dict[str, int] = {}
        self._heap: list[tuple[int, int]] = []
        for number, request in enumerate(trace.requests):
            untimed = int(number / per_step)
            step = untimed if request.arrival is None else int(request.arrival / step_ms)
            if request.session is not None and request.session in self._later:
                self._later[request.session].append(number)
                continue
            if request.session is not None:
                self._later[request.session] = deque()
            self._heap.append((step, number))
        heapq.heapify(self._heap)

    def due(self, step: int) -> list[Due]:
        found = []
        while self._heap and self._heap[0][0] <= step:
            number = heapq.heappop(self._heap)[1]
            each = self._requests[number]
            params = SamplingParams(max_new_tokens=each.output_units)
            found.append(Due(each.units, params, each.extra_key, 0, each.output, number))
        return found

    def sent(self, due: Due, name: str) -> None:
        self._of[name] = due.handle

    def refused(self, due: Due) -> None:
        """Too long for the pool; the conversation is longer still at its next turn, but may try."""
        self._follow(due.handle, 0)

    def finished(self, output: Finished, step: int) -> None:
        self._follow(self._of.pop(output.request_id), step + 1)

    def _follow(self, number: int, step: int) -> None:
        session = self._requests[number].session
        if session is not None and self._later[session]:
            heapq.heappush(self._heap, (step, self._later[session].popleft()))

    @property
    def next_due(self) -> int | None:
        return self._heap[0][0] if self._heap else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a key, ready for every run; tokens: its length; room: units with all its replies."""

    key: RadixKey
    tokens: int
    room: int
    longest: int  # units of the prompt and one reply
    where: str


@dataclass(frozen=True, slots=True)
class Source:
    """A workload or a trace, read: prompts in file order, and feeds for runs over time."""

    name: str
    format: str
    prompts: tuple[Prompt, ...]
    feed: Callable[[], Feed]
    unit_tokens: int = 1
    capacity: int | None = None  # the workload's own
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = ()  # what was left out, or not understood

    @property
    def unit(self) -> str:
        return "token" if self.unit_tokens == 1 else "block"

    @property
    def units(self) -> int:
        """Prompt units of all requests."""
        return sum(len(prompt.key) for prompt in self.prompts)


def from_trace(trace: Trace, step_ms: float = 200.0, per_step: float = 1.0) -> Source:
    """A trace as a source; see TraceFeed for the options."""
    prompts = tuple(
        Prompt(
            RadixKey(r.units, r.extra_key), r.tokens, len(r.units) + r.output_units,
            len(r.units) + r.output_units, r.where,
        )
        for r in trace.requests
    )  # fmt: skip
    return Source(
        trace.name, trace.format, prompts, lambda: TraceFeed(trace, step_ms, per_step),
        trace.unit_tokens, None, trace.tokenizer, trace.notes,
    )  # fmt: skip


def from_workload(workload: Workload, text: Tokenizer, limit: int | None = None) -> Source:
    """A workload as a source: its prompts are those of a run where each is answered at once."""
    feed = WorkloadFeed(workload, text.encode)
    prompts: list[Prompt] = []
    step: int | None = feed.next_due
    while step is not None and (limit is None or len(prompts) < limit):
        for due in feed.due(step):
            tokens = np.asarray(due.prompt, dtype=np.int64)
            number, new = len(prompts) + 1, due.params.max_new_tokens
            request = Request(f"R{number}", tokens, due.params, number, number)
            feed.sent(due, request.id)
            reply = scripted_reply(request, due.reply)
            reason = "length" if len(reply) == new else "stop"
            feed.finished(Answer(request.id, 0, reply, reason), step)
            prompts.append(
                Prompt(
                    RadixKey(tokens, due.extra_key), len(tokens), len(tokens) + due.params.n * new,
                    len(tokens) + new, f"request {number}",
                )
            )  # fmt: skip
        step = feed.next_due
    return Source(
        workload.name, "workload", tuple(prompts[:limit]), lambda: WorkloadFeed(workload, text.encode),
        1, workload.kv_tokens, text, workload.notes,
    )  # fmt: skip


def read_source(
    name: str,
    format: str | None = None,
    tokenizer_name: str | None = None,
    limit: int | None = None,
    step_ms: float = 200.0,
    per_step: float = 1.0,
    progress: Callable[[], Any] | None = None,
    malformed: str = "stop",
) -> Source:
    """A workload or trace by its name, or a file. ValueError says what is wrong there. See read_trace.

    malformed: "skip" leaves out of a recording all from the malformed line on, for it is a log of changes.
    """
    path = traces.trace_file(name)
    if name not in WORKLOADS and not path.is_file():
        try:
            load(name)  # raises, naming the workloads that there are
        except ValueError as error:
            raise ValueError(f"{error}; traces: {', '.join(traces.TRACES)}") from None
    kind = "workload" if name in WORKLOADS else format or detect(path)
    if kind == "workload":
        return from_workload(load(name, partly=malformed == "skip"), tokenizer(tokenizer_name), limit)
    trace = read_trace(path, format, tokenizer_name, limit, progress, malformed)
    return from_trace(trace, step_ms, per_step)


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Sizes are key units; capacity None: no limit.

    requests, prompt: of what was asked, refused ones as well, but not what would have followed these.
    cached of prompt units, at first attempts; again_*: at re-attempts after a retraction, not in the
    hit rate. len_rule: cached units if one unit is always computed (over time it always is). refused:
    requests larger than the cache, counted as computed. deferred: made to wait for a prefix that another
    one computed. optimum: cached units of an endless cache that sees the same requests one by one, and
    refuses none.
    bound: cached units that no eviction policy passes at this capacity; over time, where the requests run in
    the same steps and leave the same room (optimum.py). Waits are steps from arrival to first admission.
    """

    source: str
    drive: str
    capacity: int | None
    page_size: int
    eviction_policy: str
    schedule_policy: str | None
    requests: int
    prompt: int
    cached: int
    len_rule: int
    optimum: int
    bound: int
    evicted: int
    refused: int
    seconds: float
    again_prompt: int = 0
    again_cached: int = 0
    retracted: int = 0
    deferred: int = 0
    steps: int | None = None
    mean_wait: float | None = None
    worst_wait: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the prompt units; None where there are none."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def optimum_rate(self) -> float | None:
        return self.optimum / self.prompt if self.prompt else None

    @property
    def share(self) -> float | None:
        """Hit rate as a share of the optimum; None where nothing can be shared."""
        return self.cached / self.optimum if self.optimum else None

    @property
    def bound_rate(self) -> float | None:
        return self.bound / self.prompt if self.prompt else None

    @property
    def bound_share(self) -> float | None:
        """Hit rate as a share of the bound; None where nothing could have been found."""
        return self.cached / self.bound if self.bound else None

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates, for JSON."""
        return {
            **asdict(self), "hit_rate": self.hit_rate, "optimum_rate": self.optimum_rate, "share": self.share,
            "bound_rate": self.bound_rate, "bound_share": self.bound_share,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Endless:
    """What an unlimited cache reaches at one page size: cached units and the tree that it leaves."""

    cached: int
    cache: RadixCache


def endless(source: Source, page_size: int = 1) -> Endless:
    """All requests of a source one by one, nothing ever evicted."""
    replay = Replay(None, page_size)
    return Endless(sum(replay.serve(prompt.key) or 0 for prompt in source.prompts), replay.cache)


def run_replay(
    source: Source,
    capacity: int | None,
    page_size: int,
    eviction_policy: str,
    optimum: int,
    progress: Callable[[], Any] | None = None,
    known: Known | None = None,
) -> Row:
    """One request at a time, in file order, prompts only. known: see known_of."""
    known = known or known_of(source, page_size)
    bound, started = known.bound(capacity), time.perf_counter()
    replay = (
        ForeseeingReplay(known, capacity, eviction_policy)
        if eviction_policy in FORESEEING
        else Replay(capacity, page_size, eviction_policy)
    )
    cached = len_rule = refused = 0
    for prompt in source.prompts:
        matched = replay.serve(prompt.key)
        if matched is None:
            refused += 1
        else:
            cached += matched
            len_rule += usable(matched, len(prompt.key), page_size)
        if progress:
            progress()
    return Row(
        source.name, "replay", capacity, page_size, eviction_policy, None, len(source.prompts),
        source.units, cached, len_rule, optimum, bound, replay.evicted, refused,
        time.perf_counter() - started,
    )  # fmt: skip


def known_of(source: Source, page_size: int) -> Known:
    """A source's requests, as optimum.py knows them beforehand."""
    return Known([(prompt.key,) for prompt in source.prompts], page_size)


def run_schedule(
    source: Source,
    capacity: int | None,
    page_size: int,
    eviction_policy: str,
    schedule_policy: str,
    max_running: int = 32,
    chunk_tokens: int = 512,
    progress: Callable[[], Any] | None = None,
    options: ScheduleOptions | None = None,
) -> Row:
    """Arrivals over time, through the engine's own scheduler."""
    started = time.perf_counter()
    engine = engine_for(
        source, capacity, page_size, eviction_policy, schedule_policy, max_running, chunk_tokens, options
    )
    presence = Presence(engine)
    engine.script.watch = presence.launched
    refused = drive(engine, source.feed(), len(source.prompts), progress)
    served = [engine.served[name] for name in engine.order]
    cached = sum(each.cached for each in served)
    waits, stats = [each.wait for each in served], engine.scheduler.stats
    require(stats.first.cached == cached, f"{stats.first.cached} cached units booked, {cached} heard of")
    asked = in_order(served, refused)
    return Row(
        source.name, "schedule", capacity, page_size, eviction_policy, schedule_policy,
        len(asked), sum(len(each.prompt) for each in asked), cached, cached,
        one_by_one(asked, page_size), presence.bound(), engine.cache_manager.evicted_tokens, len(refused),
        time.perf_counter() - started, stats.again.tokens, stats.again.cached,
        stats.retractions, stats.deferrals, engine.now, sum(waits) / len(waits) if waits else None,
        max(waits, default=None),
    )  # fmt: skip


def engine_for(
    source: Source,
    capacity: int | None,
    page_size: int,
    eviction_policy: str,
    schedule_policy: str,
    max_running: int = 32,
    chunk_tokens: int = 512,
    options: ScheduleOptions | None = None,
) -> ModelFreeEngine:
    """An engine for a source's requests; capacity None: nothing need ever be evicted."""
    longest = max((prompt.longest for prompt in source.prompts), default=1)
    room = sum(prompt.room + page_size for prompt in source.prompts)
    return ModelFreeEngine(
        max(room, page_size) if capacity is None else capacity, page_size, eviction_policy, schedule_policy,
        max_running, longest, max(1, chunk_tokens // source.unit_tokens),
        _in_units(options or ScheduleOptions(), source.unit_tokens),
    )  # fmt: skip


def _in_units(options: ScheduleOptions, unit_tokens: int) -> ScheduleOptions:
    """Thresholds that are meant in tokens, where a unit is a block of them."""
    return replace(
        options, in_batch_cached=options.in_batch_cached // unit_tokens,
        in_batch_shared=max(1, options.in_batch_shared // unit_tokens),
    )  # fmt: skip


class Stepped(Protocol):
    """What a step says: who has finished."""

    @property
    def finished(self) -> Sequence[Finished]: ...


class Driven(Protocol):
    """What a feed can drive: an engine without a model, or several behind a router."""

    now: int

    @property
    def has_work(self) -> bool: ...
    def add_request(
        self, prompt: Any, params: SamplingParams, extra_key: Any, priority: int, *,
        reply: tuple[int, ...] | None,
    ) -> str: ...  # fmt: skip
    def step(self) -> Stepped: ...


def drive(
    engine: Driven, feed: Feed, limit: int, progress: Callable[[], Any] | None = None
) -> list[Served]:  # fmt: skip
    """Runs a feed to its end, or its first `limit` requests; returns those that were refused."""
    refused: list[Served] = []
    sent = 0
    while True:
        for due in feed.due(engine.now) if sent < limit else []:
            if sent == limit:
                break
            sent += 1
            try:
                name = engine.add_request(
                    due.prompt, due.params, due.extra_key, due.priority, reply=due.reply
                )
                feed.sent(due, name)
            except ValueError:
                refused.append(_refused(due, engine.now))
                feed.refused(due)
        if engine.has_work:
            step = engine.now
            for output in engine.step().finished:
                feed.finished(output, step)
                if progress and output.index == 0:
                    progress()
        elif sent == limit or (coming := feed.next_due) is None:
            return refused
        else:
            engine.now = max(engine.now + 1, coming)


def _refused(due: Due, step: int) -> Served:
    """With the reply that a trace tells: in a cache without limit it is there for what follows."""
    outputs = [list(due.reply)] if due.reply else []
    return Served(as_int64(due.prompt, "a prompt"), due.extra_key, step, outputs=outputs)


def in_order(served: Sequence[Served], refused: Sequence[Served]) -> list[Served]:
    """All that was asked, by the step of its first admission, or of its coming if it was refused."""
    return sorted(
        [*served, *refused], key=lambda each: each.arrived if each.admitted is None else each.admitted
    )


def one_by_one(asked: Sequence[Served], page_size: int) -> int:
    """Units that an endless cache would have had for these requests, one after another.

    In this order (of their admission), each with its replies in the tree at once, and one unit always
    computed: whatever the real run found in its tree is in this one too, so it is an upper bound.
    """
    replay, total = Replay(None, page_size), 0
    for each in asked:
        key = RadixKey(each.prompt, each.extra_key)
        replies = [np.concatenate((each.prompt, output[:-1])) for output in each.outputs if output]
        matched = replay.serve(key, *(RadixKey(ids.astype(np.int64), each.extra_key) for ids in replies))
        total += usable(matched or 0, len(key), page_size)
    return total


# ---------------------------------------------------------------------- what is shared


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A run of units that later requests found in the cache.

    length: units from the start of the prompt to its end, own: of which this run is the last part.
    reused: by how many requests. saved: units they did not have to compute (own x reused).
    """

    length: int
    own: int
    reused: int
    saved: int
    text: str


def shared_prefixes(cache: RadixCache, text: Tokenizer | None, top: int = 10) -> list[SharedPrefix]:
    """The runs of an endless tree that saved most; those of all nodes add up to its cached units."""
    ends: dict[int, int] = {}
    found = []
    for node in cache.walk():
        if node.parent is None:
            continue
        ends[node.id] = ends.get(node.parent.id, 0) + len(node)
        if node.hits:
            found.append((node.hits * len(node), -node.id, node))
    least = LEAST_SHOWN * sum(saved for saved, _, _ in found)
    best = [each for each in heapq.nlargest(top, found) if each[0] >= least]
    return [
        SharedPrefix(ends[node.id], len(node), node.hits, saved, _excerpt(node.key.tokens, text))
        for saved, _, node in best
    ]


def _excerpt(units: Slots, text: Tokenizer | None, width: int = 64) -> str:
    if text is None:
        shown = ", ".join(map(str, units[:8].tolist()))
        return f"blocks {shown}{', ...' if len(units) > 8 else ''}"
    said = text.decode(units[:width].tolist())
    return said if len(said) <= width and len(units) <= width else said[: width - 3] + "..."


# ---------------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Report:
    """All runs of one source, what it shares, and the prompts that break sharing early.

    prefixes: what is shared with pages of prefix_page units.
    """

    source: str
    format: str
    unit_tokens: int
    requests: int
    tokens: int
    prompt: int
    distinct: int
    rows: tuple[Row, ...]
    prefixes: tuple[SharedPrefix, ...]
    breaks: tuple[EarlyBreak, ...]
    prefix_page: int = 1

    @property
    def unit(self) -> str:
        return "token" if self.unit_tokens == 1 else "block"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for the figure."""
        return {
            "source": self.source, "format": self.format, "unit_tokens": self.unit_tokens,
            "requests": self.requests, "tokens": self.tokens, "prompt": self.prompt,
            "distinct": self.distinct,
            "rows": [row.as_dict() for row in self.rows],
            "prefixes": [asdict(prefix) for prefix in self.prefixes],
            "prefix_page": self.prefix_page,
            "breaks": [asdict(each) for each in self.breaks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Which runs to make: every combination of these. capacities None: a few that fit the source."""

    drive: str | None = None
    capacities: tuple[int | None, ...] | None = None
    page_sizes: tuple[int, ...] = (1,)
    eviction_policies: tuple[str, ...] = ("lru",)
    schedule_policies: tuple[str, ...] = ("lpm",)
    max_running: int = 32
    chunk_tokens: int | None = None
    options: ScheduleOptions = field(default_factory=ScheduleOptions)

    def __post_init__(self) -> None:
        if self.drive is not None:
            one_of("drive", self.drive, DRIVES)
        for name in self.eviction_policies:
            one_of("eviction policy", name, (*EVICTION, *FORESEEING))  # files may have joined
        for name in self.schedule_policies:
            one_of("schedule policy", name, tuple(SCHEDULE))
        for size in self.page_sizes:
            at_least("page size", size, 1)
        for capacity in self.capacities or ():
            if capacity is not None:
                at_least("capacity", capacity, max(self.page_sizes))
        at_least("max_running", self.max_running, 1)
        if self.chunk_tokens is not None:
            at_least("chunk_tokens", self.chunk_tokens, 1)

    def drive_of(self, source: Source) -> str:
        return self.drive or ("schedule" if source.format == "workload" else "replay")

    def capacities_of(self, source: Source, distinct: int) -> list[int | None]:
        if self.capacities is not None:
            return list(self.capacities)
        if source.capacity is not None:
            return [source.capacity, None]
        # Smaller ones would refuse the longest prompt.
        least = max(prompt.longest for prompt in source.prompts) + max(self.page_sizes)
        return [*sorted({max(distinct // part, least) for part in SHARES_OF_THE_TREE}), None]

    def combinations(self, source: Source, distinct: int) -> list[tuple[int, int | None, str, str | None]]:
        """Page size, capacity, eviction and scheduling policy (None: replay) of each run."""
        over_time = self.drive_of(source) == "schedule"
        schedules = self.schedule_policies if over_time else (None,)
        policies = self.eviction_policies
        if over_time and set(policies) == set(KNOWN_POLICIES):
            policies = tuple(EVICTION)  # all that there are over time
        foreseeing = [name for name in policies if name in FORESEEING]
        if over_time and foreseeing:
            raise ValueError(
                f"eviction policy {foreseeing[0]!r} has to know what comes next: it runs in a replay only"
            )
        runs = product(self.page_sizes, self.capacities_of(source, distinct), policies, schedules)
        # Without a limit nothing is evicted: every policy is the same.
        return [run for run in runs if run[1] is not None or run[2] == policies[0]]


def simulate(source: Source, plan: Plan | None = None, progress: Callable[[], Any] | None = None) -> Report:
    """All runs of a plan. progress: called once for each request of each run."""
    plan = plan or Plan()
    whole, page = endless(source), plan.page_sizes[0]
    rows = tuple(_rows(source, plan, whole, progress)) if source.prompts else ()
    shared = whole if page == 1 else endless(source, page)  # what fills no page is not shared
    breaks: list[EarlyBreak] = []
    if source.tokenizer is not None:
        prompts = [prompt.key.tokens for prompt in source.prompts]
        breaks = early_breaks(prompts, source.tokenizer.decode, [p.where for p in source.prompts])
    return Report(
        source.name, source.format, source.unit_tokens, len(source.prompts),
        sum(prompt.tokens for prompt in source.prompts), source.units,
        whole.cache.total_size, rows, tuple(shared_prefixes(shared.cache, source.tokenizer)), tuple(breaks),
        page,
    )  # fmt: skip


def _rows(source: Source, plan: Plan, whole: Endless, progress: Callable[[], Any] | None) -> Iterator[Row]:
    best, known = {1: whole.cached}, dict[int, Known]()
    chunk = plan.chunk_tokens or 512 * min(source.unit_tokens, 16)
    for page_size, capacity, eviction, schedule in plan.combinations(source, whole.cache.total_size):
        if schedule is not None:
            yield run_schedule(
                source, capacity, page_size, eviction, schedule, plan.max_running, chunk, progress,
                plan.options,
            )  # fmt: skip
            continue
        if page_size not in best:
            best[page_size] = endless(source, page_size).cached
        if page_size not in known:
            known[page_size] = known_of(source, page_size)
        yield run_replay(source, capacity, page_size, eviction, best[page_size], progress, known[page_size])


def table(report: Report) -> str:
    """A report as text."""
    unit = report.unit
    lines = [
        f"{report.source} ({report.format}): {report.requests:,} requests, {report.prompt:,} prompt "
        f"{unit}s{_in_tokens(report)}, {report.distinct:,} distinct"
    ]
    if not report.rows:
        return "\n".join([*lines, "no requests: nothing to simulate"])
    asked = asked_otherwise(report)
    lines += ["", *columns([_cells(row, unit, asked) for row in report.rows]), *legend(report, "the cache")]
    lines.append(_bounds(report.rows[0].drive))
    lines += _prefixes(report)
    for each in report.breaks:
        lines += ["", *each.describe().splitlines()]
    return "\n".join(lines)


class Counted(Protocol):
    """A row of a table, as far as it says what was asked."""

    @property
    def requests(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def refused(self) -> int: ...


class Counts(Protocol):
    """A report, as far as it says what there is to ask."""

    @property
    def requests(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def unit(self) -> str: ...
    @property
    def rows(self) -> Sequence[Counted]: ...


def asked_otherwise(report: Counts) -> bool:
    """Whether some row asked for other prompt units than the report's head says: rows say then how many."""
    return any(row.prompt != report.prompt for row in report.rows)


def legend(report: Counts, cache: str) -> list[str]:
    """A sentence each on requests that were refused, and on those that therefore were never asked."""
    lines = []
    if refused := max(row.refused for row in report.rows):
        lines.append(f"refused: larger than {cache}, counted as computed (up to {refused:,} requests)")
    if asked_otherwise(report):
        never = max(report.requests - row.requests for row in report.rows)
        why = f"; up to {never:,} of {report.requests:,} requests never came: a refused one was before them"
        lines.append(f"asked: the prompt {report.unit}s that came, of which the rates are{why * (never > 0)}")
    return lines


def _prefixes(report: Report) -> list[str]:
    if not report.prefixes:
        return []
    pages = f", pages of {report.prefix_page}" if report.prefix_page > 1 else ""
    cells = [
        {
            "saved": f"{p.saved:,}", "reused by": f"{p.reused:,}", f"{report.unit}s": f"{p.own:,}",
            "up to": f"{p.length:,}", " what": repr(p.text) if report.unit == "token" else p.text,
        }
        for p in report.prefixes
    ]  # fmt: skip
    head = f"shared prefixes that save most ({report.unit}s not computed, with a cache without limit{pages})"
    return ["", head, *columns(cells)]


def _bounds(drive: str) -> str:
    if drive == "replay":
        return "bound: no eviction policy finds more in a cache of that size, these requests in this order"
    return "bound: no eviction policy finds more where the requests run in the same steps with the same room"


def _in_tokens(report: Report) -> str:
    return f" of {report.unit_tokens} ({report.tokens:,} tokens)" if report.unit_tokens > 1 else ""


def _cells(row: Row, unit: str, asked: bool) -> dict[str, str]:
    cells = {f"{unit}s of cache": "unlimited" if row.capacity is None else f"{row.capacity:,}"}
    cells["page"] = str(row.page_size)
    cells["eviction"] = row.eviction_policy if row.capacity is not None else "-"
    if row.schedule_policy is not None:
        cells["schedule"] = row.schedule_policy
    if asked:
        cells["asked"] = f"{row.prompt:,}"
    cells["cached"] = f"{row.cached:,}"
    cells["hit rate"] = percent(row.hit_rate)
    cells["optimum"] = percent(row.optimum_rate)
    cells["share of it"] = percent(row.share)
    cells["bound"] = percent(row.bound_rate)
    cells["share of bound"] = percent(row.bound_share)
    if row.drive == "replay":
        cells["one computed"] = percent(row.len_rule / row.prompt if row.prompt else None)
    cells["evicted"] = f"{row.evicted:,}"
    cells["refused"] = f"{row.refused:,}"
    if row.steps is not None:
        cells["retracted"] = f"{row.retracted:,}"
        cells["deferred"] = f"{row.deferred:,}"
        cells["cached again"] = f"{row.again_cached:,} of {row.again_prompt:,}"
        cells["steps"] = f"{row.steps:,}"
        cells["mean wait"] = "-" if row.mean_wait is None else f"{row.mean_wait:.1f}"
        cells["worst"] = "-" if row.worst_wait is None else f"{row.worst_wait:,}"
    cells["s"] = f"{row.seconds:.1f}"
    return cells


def percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"


def columns(rows: Sequence[dict[str, str]]) -> list[str]:
    """Right-aligned columns; a heading that begins with a space is for text, left-aligned."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    heads = {name: name for name in rows[0]}
    return [
        "  ".join(
            row[name].ljust(widths[name]) if name[0] == " " else row[name].rjust(widths[name])
            for name in widths
        ).rstrip()
        for row in [heads, *rows]
    ]


# ---------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad simulate`."""
    named = ", ".join(name for name in WORKLOADS if name != "none")
    known = ", ".join(traces.TRACES)
    parser.add_argument("sources", nargs="*", help=f"workloads ({named}, or all), traces ({known}) and files")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="two prompts, texts or files: where they part"
    )
    parser.add_argument(
        "--format", help=f"of the files: {', '.join(FORMATS)} (default: by their first record)"
    )
    parser.add_argument("--tokenizer", help="model name, directory or tokenizer.json (default: classroom)")
    parser.add_argument(
        "--malformed",
        default="stop",
        help="stop at a malformed record (default), or skip it: left out and named (a recording ends there)",
    )
    parser.add_argument("--drive", help="replay (one by one: default for traces) or schedule (over time)")
    parser.add_argument("--capacity", help="cache sizes, such as 1000,4000,inf: tokens, or blocks of a trace")
    parser.add_argument("--page-size", default="1", help="key units per page, such as 1,16")
    parser.add_argument(
        "--eviction-policy",
        default="lru",
        help=f"{', '.join(EVICTION)}, in a replay {' or '.join(FORESEEING)}; or all; FILE.py: its victim_key",
    )
    parser.add_argument("--schedule-policy", default="lpm", help=f"{', '.join(SCHEDULE)}, or all")
    parser.add_argument("--max-running", type=int, default=32, help="requests that run at a time")
    parser.add_argument(
        "--chunk-tokens", type=int, help="prompt tokens per step (default: 512; 8192 of blocks)"
    )
    parser.add_argument("--mixed", action="store_true", help="decode beside prompts in the same step")
    parser.add_argument(
        "--fair-passes", type=int, default=8, help="of the policy fair: steps to be passed in"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the policy random")
    parser.add_argument("--step-ms", type=float, default=200.0, help="how long a step of a timed trace takes")
    parser.add_argument(
        "--per-step", type=float, default=1.0, help="arrivals per step where there are no times"
    )
    parser.add_argument("--limit", type=int, help="requests to take from each source")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument(
        "--figure", type=Path, help="write a Plotly figure to this HTML file, readable offline"
    )
    import_module("minirad.route.simulated").add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the command; ValueError for what cannot be done, with the value."""
    if args.diff is not None:
        if args.sources:
            raise ValueError(f"--diff compares two prompts; {args.sources[0]!r} is one too many")
        return _diff(args)
    if not args.sources:
        raise ValueError("nothing to simulate: name a workload or a file, or say --diff A B")
    if args.workers is not None or args.route is not None:
        return int(import_module("minirad.route.simulated").main(args))
    if args.figure is not None:
        command.may_be_written("--figure", args.figure, (".html",), args.sources)
    plan = plan_of(args)
    try:
        reports = [_simulated(source, plan) for source in sources_of(args)]
    except own_policy.PolicyBroke as error:
        raise ValueError(str(error)) from error
    if args.figure is not None:
        command.figure_writer("simulate", "--figure")([report.as_dict() for report in reports], args.figure)
        print(f"figure written to {args.figure}", file=sys.stderr)
    if args.json:
        print(json.dumps([report.as_dict() for report in reports], indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(table(report) for report in reports))
    return 0


def sources_of(args: argparse.Namespace) -> list[Source]:
    """What a command names, `all` written out, and all of it read: one may be wrong, and then none runs."""
    names = [n for name in args.sources for n in (_all_workloads() if name == "all" else [name])]
    return [source_of(name, args) for name in names]


def _all_workloads() -> list[str]:
    return [name for name in WORKLOADS if name != "none"]


def _simulated(source: Source, plan: Plan) -> Report:
    runs = len(plan.combinations(source, source.units))
    with tqdm(
        total=runs * len(source.prompts), desc=f"simulating {source.name}", unit=" requests", delay=0.5,
        leave=False, disable=None,
    ) as bar:  # fmt: skip
        return simulate(source, plan, bar.update)


def source_of(name: str, args: argparse.Namespace) -> Source:
    """The workload or file that a command names, read; what was left out is said.

    ValueError if it asks nothing: a table without a row would look like an answer.
    """
    with tqdm(desc=f"reading {name}", unit=" requests", delay=1, leave=False, disable=None) as bar:
        source = read_source(
            name, args.format, args.tokenizer, args.limit, args.step_ms, args.per_step, bar.update,
            args.malformed,
        )  # fmt: skip
    for note in source.notes:
        print(note, file=sys.stderr)
    if not source.prompts:
        raise ValueError(f"there is no request in {name}: nothing to simulate")
    return source


def plan_of(args: argparse.Namespace) -> Plan:
    """The runs that a command asks for; ValueError names what cannot be."""
    for name in ("step_ms", "per_step"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ValueError(f"{name} must be above 0, got {getattr(args, name)}")
    if args.limit is not None:
        at_least("limit", args.limit, 1)
    return Plan(
        args.drive,
        None if args.capacity is None else tuple(map(_capacity, items("capacity", args.capacity))),
        tuple(_number("page size", each) for each in items("page size", args.page_size)),
        _names("eviction policy", own_policy.join_files(args.eviction_policy), KNOWN_POLICIES),
        _names("schedule policy", args.schedule_policy, SCHEDULE),
        args.max_running,
        args.chunk_tokens,
        ScheduleOptions(mixed=args.mixed, fair_passes=args.fair_passes, seed=args.seed),
    )


def items(name: str, text: str) -> list[str]:
    """The parts of a list such as 1,2; ValueError for an empty one."""
    found = [each.strip() for each in text.split(",")]
    if not all(found):
        raise ValueError(f"{name} must be a list such as 1,2, got {text!r}")
    return list(dict.fromkeys(found))


def _names(name: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    return tuple(known) if text == "all" else tuple(items(name, text))


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None


def _capacity(text: str) -> int | None:
    return None if text in ("inf", "unlimited") else _number("capacity", text)


def _diff(args: argparse.Namespace) -> int:
    text = tokenizer(args.tokenizer)
    first, second = (_prompt(each) for each in args.diff)
    (page_size,) = (_number("page size", each) for each in items("page size", args.page_size)[:1])
    diagnosis = diagnose(first, second, text, page_size)
    if args.json:
        print(json.dumps(asdict(diagnosis), indent=1, ensure_ascii=False))
    else:
        print(diagnosis.describe())
    return 0


def _prompt(text_or_file: str) -> str:
    """The text itself, a file's, or the prompt of a file that holds one logged request."""
    try:
        is_file = Path(text_or_file).is_file()
    except (OSError, ValueError):  # a text that cannot be a file's name
        is_file = False
    if not is_file:
        if re.fullmatch(r"\S+\.(txt|md|json|jsonl)", text_or_file):
            raise ValueError(f"there is no file {text_or_file!r}")
        return text_or_file
    text = read_text(text_or_file, "utf-8-sig")
    try:
        record = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    logged = isinstance(record, dict) and {"messages", "prompt", "input", "body", "request"} & set(record)
    return prompt_text(record) if logged else text
