"""Several workers behind a router, simulated: engines without a model, real trees, one step after the other.

    python -m minirad simulate chat --workers 2,4 --route round-robin,cache-aware,events

Each worker is an engine of its own with a pool of its own (simulate.ModelFreeEngine). All are stepped
together; requests come as the workload or trace says, and a policy of policies.py sends each to a worker when
it comes. What the policy knows is what a router knows: the prompts it sent, requests in flight, and the
workers' own KV events, `event_delay` steps late. The oracle looks into the trees themselves.

A step is a step, and no seconds are estimated: of the loads that a policy balances, the wait in steps and the
number of steps to the end are all that is seen here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from minirad import command
from minirad.cache.radix_cache import RadixCache, Slots, as_int64
from minirad.config import SamplingParams, at_least
from minirad.errors import require
from minirad.fleet.publish import as_record
from minirad.fleet.wire import Record
from minirad.observe import events as ev
from minirad.observe.event import Event
from minirad.observe.kv_events import KVEvent, KVEventStream
from minirad.observe.route_events import MOST_WORKERS, RequestRouted, RouteFinished, WorkerChanged
from minirad.outputs import GenerationOutput
from minirad.route import policies
from minirad.route.oracle import Oracle
from minirad.route.policies import POLICIES, Policy, RouteOptions, WorkerView, make_policy
from minirad.route.trees import EventTree
from minirad.simulate import (
    Answer,
    ModelFreeEngine,
    Plan,
    Served,
    Source,
    asked_otherwise,
    columns,
    drive,
    endless,
    engine_for,
    in_order,
    items,
    legend,
    one_by_one,
    percent,
    plan_of,
    sources_of,
)

PART_OF_A_TRACE = 16  # a worker's pool, where none is named: all distinct units of the trace divided by this


# ------------------------------------------------------------------ workers that a policy routes to


class TrueTree:
    """What an engine really holds (trees.PrefixView)."""

    def __init__(self, engine: ModelFreeEngine) -> None:
        self._engine = engine

    @property
    def tokens(self) -> int:
        return _tree_of(self._engine).total_size

    def match(self, tokens: Slots, space: Any = None) -> int:
        return self._engine.peek(tokens, space)


class LateEvents:
    """A worker's KV events as a router gets them: those of a step are known `delay` steps after its end."""

    def __init__(self, engine: ModelFreeEngine, delay: int) -> None:
        self._engine, self._delay = engine, delay
        self._tree = EventTree()
        self._late: deque[tuple[int, Record]] = deque()
        KVEventStream(_tree_of(engine), self._take)

    def _take(self, event: KVEvent) -> None:
        self._late.append((self._engine.now, as_record(event)))

    def at(self, step: int) -> EventTree:
        """What is known before a step."""
        while self._late and self._late[0][0] + self._delay < step:
            self._tree.take(self._late.popleft()[1])
        return self._tree


def _tree_of(engine: ModelFreeEngine) -> RadixCache:
    assert isinstance(engine.cache, RadixCache)
    return engine.cache


@dataclass(slots=True)
class Route:
    """A request in flight. left: samples that are not finished."""

    name: str
    tokens: Slots
    extra_key: Any
    left: int


class Stepped(NamedTuple):
    """Who has finished in a step, by the router's names."""

    finished: list[Answer]


class SimulatedFleet:
    """Engines without a model behind a policy, in the shape of one engine (simulate.Driven).

    tell: gets the route events of all that happens, in order. now: the step that comes next.
    """

    def __init__(
        self, engines: Sequence[ModelFreeEngine], policy: Policy, event_delay: int = 0,
        tell: Callable[[Event], Any] | None = None,
    ) -> None:  # fmt: skip
        self.engines, self.policy, self.now = list(engines), policy, 0
        self.loads, self.queued = [0] * len(self.engines), [0] * len(self.engines)
        self.regrets: list[int] = []  # of each request, in the order of their coming
        self._oracle = Oracle([TrueTree(engine) for engine in self.engines])
        self._alive = [True] * len(self.engines)
        self._told: list[LateEvents] = []
        if policy.reads_events or tell is not None:
            self._told = [LateEvents(engine, event_delay) for engine in self.engines]
        self._routes: dict[tuple[int, str], Route] = {}
        self._tell = tell or (lambda event: None)
        for at, engine in enumerate(self.engines):
            engine.bus.subscribe(ev.RequestAdmitted, partial(self._admitted, at))
            self._tell(WorkerChanged(at, "ready", "", f"simulated worker {at}"))

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return any(engine.has_work for engine in self.engines)

    def views(self) -> list[WorkerView]:
        """The workers as the policy sees them before the coming step."""
        trees = [told.at(self.now) for told in self._told]
        return [
            WorkerView(f"w{at}", True, self.loads[at], self.queued[at], trees[at] if trees else None)
            for at in range(len(self.engines))
        ]

    def add_request(
        self, prompt: Any, params: SamplingParams, extra_key: Any = None, priority: int = 0, *,
        reply: tuple[int, ...] | None = None,
    ) -> str:  # fmt: skip
        """Sends a request to a worker, and returns its name here; ValueError for what no worker can run."""
        tokens = as_int64(prompt, "a prompt")
        choice = self.policy.choose(tokens, self.views(), extra_key)
        judged = self._oracle.judge(tokens, self._alive, choice.worker, extra_key)
        assert judged is not None
        number, engine = len(self.regrets) + 1, self.engines[choice.worker]
        if params.temperature > 0 and params.seed is None:  # the same replies whoever gives them
            params = replace(params, seed=number)
        engine.now = self.now
        name = engine.add_request(tokens, params, extra_key, priority, reply=reply)
        route = Route(f"R{number}", tokens, extra_key, params.n)
        self._routes[choice.worker, name] = route
        self.policy.sent(choice.worker, tokens, extra_key)
        self.regrets.append(judged.regret)
        self.loads[choice.worker] += 1
        self.queued[choice.worker] += len(tokens)
        self._tell(
            RequestRouted(
                route.name, choice.worker, self.policy.name, choice.reason, choice.matches, choice.loads,
                judged.best, judged.regret, len(tokens),
            )
        )  # fmt: skip
        return route.name

    def step(self) -> Stepped:
        """One step of every worker that has work."""
        finished = []
        for at, engine in enumerate(self.engines):
            engine.now = self.now
            if engine.has_work:
                finished += [self._answer(at, output) for output in engine.step().finished]
        self.now += 1
        return Stepped(finished)

    def _answer(self, worker: int, output: GenerationOutput) -> Answer:
        """A finished sample by its name here; with the last one its request is not in flight any more."""
        key = worker, output.request_id
        route = self._routes[key]
        route.left -= 1
        if not route.left:
            del self._routes[key]
            self.loads[worker] -= 1
            self.policy.finished(worker, route.tokens, route.extra_key)
            cached = self.engines[worker].served[output.request_id].cached
            self._tell(RouteFinished(route.name, worker, cached, len(route.tokens), "finished"))
        return Answer(route.name, output.index, output.token_ids, output.finish_reason)

    def _admitted(self, worker: int, event: ev.RequestAdmitted) -> None:
        if event.attempt == 1:
            self.queued[worker] -= len(self.engines[worker].served[event.request].prompt)


# ------------------------------------------------------------------ runs


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One run of a policy. Sizes are key units; capacity: of each worker, None without limit.

    requests, prompt: of what was asked, refused ones as well (simulate.Row). cached of prompt units, at first
    attempts. optimum: of one endless cache for all these requests, which no routing can exceed. computed:
    prompt units, also those that were computed again after a retraction, and those of refused requests, which
    no worker had: they are not in computed_by_worker. refused: larger than a worker's cache. regret: units in
    all; regretted: how many requests had any. p50_wait, p99_wait: steps from arrival to first admission.
    """

    source: str
    policy: str
    workers: int
    capacity: int | None
    page_size: int
    event_delay: int
    requests: int
    refused: int
    prompt: int
    cached: int
    optimum: int
    computed: int
    regret: int
    regretted: int
    requests_by_worker: tuple[int, ...]
    computed_by_worker: tuple[int, ...]
    retracted: int
    p50_wait: int | None
    p99_wait: int | None
    steps: int
    seconds: float

    @property
    def hit_rate(self) -> float | None:
        """Cached share of the prompt units; None where there are none."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def optimum_rate(self) -> float | None:
        return self.optimum / self.prompt if self.prompt else None

    @property
    def regret_per_request(self) -> float | None:
        return self.regret / sum(self.requests_by_worker) if any(self.requests_by_worker) else None

    def as_dict(self) -> dict[str, Any]:
        """Fields and rates, for JSON."""
        return {
            **asdict(self), "hit_rate": self.hit_rate, "optimum_rate": self.optimum_rate,
            "regret_per_request": self.regret_per_request,
            "computed_max_of_mean": max_of_mean(self.computed_by_worker),
            "computed_jain": jain(self.computed_by_worker),
            "requests_max_of_mean": max_of_mean(self.requests_by_worker),
            "requests_jain": jain(self.requests_by_worker),
        }  # fmt: skip


def max_of_mean(loads: Sequence[int]) -> float | None:
    """The largest load over the mean: 1 where all are equal, n where one of n has all. None: no load."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else None


def jain(loads: Sequence[int]) -> float | None:
    """Jain's index of fairness: 1 where all are equal, 1/n where one of n has all. None: no load."""
    return sum(loads) ** 2 / (len(loads) * sum(load * load for load in loads)) if any(loads) else None


def percentile(values: Sequence[int], share: float) -> int | None:
    """The smallest value that at least this share of them does not exceed; None of none."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else None


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Every policy with every number of workers. plan: of the engines, of which its first values count.

    capacity: of each worker, None without limit; "": one that fits the source.
    """

    workers: tuple[int, ...] = (4,)
    policies: tuple[str, ...] = tuple(POLICIES)
    options: RouteOptions = field(default_factory=RouteOptions)
    event_delay: int = 0
    capacity: int | str | None = ""
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        for name in self.policies:
            make_policy(name, self.options)  # raises, naming those that there are
        for number in self.workers:
            at_least("workers", number, 1)
            if number > MOST_WORKERS:
                raise ValueError(f"workers must be at most {MOST_WORKERS}, got {number}")
        at_least("event_delay", self.event_delay, 0)

    def capacity_of(self, source: Source) -> int | None:
        if not isinstance(self.capacity, str):
            return self.capacity
        if source.capacity is not None:
            return source.capacity
        least = max((prompt.longest for prompt in source.prompts), default=1) + max(self.plan.page_sizes)
        return max(endless(source).cache.total_size // PART_OF_A_TRACE, least)


def run_route(
    source: Source, policy: str, workers: int, plan: RoutePlan, capacity: int | None,
    progress: Callable[[], Any] | None = None, tell: Callable[[Event], Any] | None = None,
) -> RouteRow:  # fmt: skip
    """One policy with so many workers. tell: gets the route events."""
    started, engines = time.perf_counter(), [_engine(source, plan.plan, capacity) for _ in range(workers)]
    page = plan.plan.page_sizes[0]
    options = replace(plan.options, page_size=page)
    fleet = SimulatedFleet(engines, make_policy(policy, options), plan.event_delay, tell)
    refused = drive(fleet, source.feed(), len(source.prompts), progress)
    served = _served(engines)
    waits, cached = [each.wait for each in served], sum(each.cached for each in served)
    stats = [engine.scheduler.stats for engine in engines]
    require(sum(each.first.cached for each in stats) == cached, "not all cached units were heard of")
    computed = tuple(each.computed for each in stats)
    asked, elsewhere = in_order(served, refused), sum(len(each.prompt) for each in refused)
    return RouteRow(
        source.name, policy, workers, capacity, page, plan.event_delay, len(asked), len(refused),
        sum(len(each.prompt) for each in asked), cached, one_by_one(asked, page), sum(computed) + elsewhere,
        sum(fleet.regrets), sum(map(bool, fleet.regrets)),
        tuple(len(engine.served) for engine in engines), computed, sum(each.retractions for each in stats),
        percentile(waits, 0.5), percentile(waits, 0.99), fleet.now, time.perf_counter() - started,
    )  # fmt: skip


def _engine(source: Source, plan: Plan, capacity: int | None) -> ModelFreeEngine:
    chunk = plan.chunk_tokens or 512 * min(source.unit_tokens, 16)
    return engine_for(
        source, capacity, plan.page_sizes[0], plan.eviction_policies[0], plan.schedule_policies[0],
        plan.max_running, chunk, plan.options,
    )  # fmt: skip


def _served(engines: Sequence[ModelFreeEngine]) -> list[Served]:
    """What became of all requests, in the order of their first admission."""
    found = [
        (engine.served[name].admitted, at, number, engine.served[name])
        for at, engine in enumerate(engines)
        for number, name in enumerate(engine.order)
    ]
    return [each for *_, each in sorted(found, key=lambda row: row[:3])]


@dataclass(frozen=True, slots=True)
class RouteReport:
    """All runs of one source."""

    source: str
    format: str
    unit_tokens: int
    requests: int
    prompt: int
    capacity: int | None
    rows: tuple[RouteRow, ...]

    @property
    def unit(self) -> str:
        return "token" if self.unit_tokens == 1 else "block"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "source": self.source, "format": self.format, "unit_tokens": self.unit_tokens,
            "requests": self.requests, "prompt": self.prompt, "capacity": self.capacity,
            "rows": [row.as_dict() for row in self.rows],
        }  # fmt: skip


def simulate_routes(
    source: Source, plan: RoutePlan | None = None, progress: Callable[[], Any] | None = None
) -> RouteReport:
    """Every policy with every number of workers. progress: called once for each request of each run."""
    plan = plan or RoutePlan()
    capacity = plan.capacity_of(source) if source.prompts else None
    rows = tuple(
        run_route(source, policy, workers, plan, capacity, progress)
        for workers in plan.workers
        for policy in plan.policies
        if source.prompts
    )
    return RouteReport(
        source.name, source.format, source.unit_tokens, len(source.prompts), source.units, capacity, rows
    )


def table(report: RouteReport) -> str:
    """A report as text."""
    unit = report.unit
    of = f" of {report.unit_tokens} tokens" if report.unit_tokens > 1 else ""
    size = "no limit" if report.capacity is None else f"{report.capacity:,} {unit}s"
    head = (
        f"{report.source} ({report.format}): {report.requests:,} requests, {report.prompt:,} prompt "
        f"{unit}s{of}; the cache of each worker: {size}"
    )
    if not report.rows:
        return f"{head}\nno requests: nothing to simulate"
    asked = asked_otherwise(report)
    rows = columns([_cells(row, asked) for row in report.rows])
    return "\n".join([head, "", *rows, *legend(report, "a worker's cache")])


def _cells(row: RouteRow, asked: bool) -> dict[str, str]:
    rates = row.as_dict()

    def decimal(name: str, digits: int) -> str:
        return "-" if rates[name] is None else f"{rates[name]:,.{digits}f}"

    return {
        "workers": str(row.workers), " policy": row.policy,
        **({"asked": f"{row.prompt:,}"} if asked else {}), "hit rate": percent(row.hit_rate),
        "optimum": percent(row.optimum_rate), "computed": f"{row.computed:,}",
        "max/mean": decimal("computed_max_of_mean", 2), "Jain": decimal("computed_jain", 3),
        "requests max/mean": decimal("requests_max_of_mean", 2),
        "regret/request": decimal("regret_per_request", 1),
        "p50 wait": "-" if row.p50_wait is None else f"{row.p50_wait:,}",
        "p99": "-" if row.p99_wait is None else f"{row.p99_wait:,}",
        "steps": f"{row.steps:,}", "s": f"{row.seconds:.1f}",
    }  # fmt: skip


# ------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m minirad simulate` has for several workers."""
    group = parser.add_argument_group("several workers behind a router (a table with a row for each policy)")
    group.add_argument("--workers", help="how many, such as 4 or 2,4,8 (default with --route: 4)")
    group.add_argument("--route", help=f"{', '.join(POLICIES)}, or all (default with --workers)")
    group.add_argument(
        "--event-delay", type=int, default=0, help="steps until the router knows of a KV event"
    )
    policies.add_arguments(group)


def main(args: argparse.Namespace) -> int:
    """Runs the command; ValueError for what cannot be done, with the value."""
    if args.figure is not None:
        command.may_be_written("--figure", args.figure, (".html",), args.sources)
    plan = _route_plan(args)
    reports = [_routed(source, plan) for source in sources_of(args)]
    if args.figure is not None:
        command.figure_writer("simulate", "--figure")([report.as_dict() for report in reports], args.figure)
        print(f"figure written to {args.figure}", file=sys.stderr)
    if args.json:
        print(json.dumps([report.as_dict() for report in reports], indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(table(report) for report in reports))
    return 0


def _routed(source: Source, plan: RoutePlan) -> RouteReport:
    with tqdm(
        total=len(plan.workers) * len(plan.policies) * len(source.prompts), desc=f"routing {source.name}",
        unit=" requests", delay=0.5, leave=False, disable=None, file=sys.stderr,
    ) as bar:  # fmt: skip
        return simulate_routes(source, plan, bar.update)


def _route_plan(args: argparse.Namespace) -> RoutePlan:
    plan = plan_of(args)
    if plan.drive == "replay":
        raise ValueError("--drive replay takes one request at a time: with --workers they arrive over time")
    for name in ("capacities", "page_sizes", "eviction_policies", "schedule_policies"):
        values = getattr(plan, name) or ()
        if len(values) > 1:
            shown = ", ".join(map(str, values))
            raise ValueError(f"with --workers there is one {_ONE[name]} for all, got {shown}")
    names = tuple(POLICIES) if args.route in (None, "all") else tuple(items("route", args.route))
    return RoutePlan(
        tuple(map(_number, items("workers", "4" if args.workers is None else args.workers))), names,
        policies.options_of(args, plan.page_sizes[0], args.seed), args.event_delay,
        "" if plan.capacities is None else plan.capacities[0], plan,
    )  # fmt: skip


_ONE = {
    "capacities": "capacity", "page_sizes": "page size", "eviction_policies": "eviction policy",
    "schedule_policies": "schedule policy",
}  # fmt: skip


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"workers must be a whole number, got {text!r}") from None
