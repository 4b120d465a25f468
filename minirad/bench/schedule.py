"""What scheduling costs: time to order a queue, and what each policy's bound on waiting costs in hits.

Three tables, no model:

* order: milliseconds of one `Scheduler.ordered()` for queues of several lengths under each policy, when
  all requests are new (their keys are built), when the tree has changed since (all are looked up again),
  when only the queue has (one more request; the others' matches are known), and when nothing has. Each
  request has 1,024 tokens: one of 64 long beginnings, half of which are in the tree, one of 8
  continuations, and an ending of its own.
* fair: more requests than can be served, over 60 beginnings of 400 tokens, in a cache for 20 of them.
  Hit rate (prompt tokens at first admissions), mean and worst wait in steps from arrival to admission,
  and how often the most unlucky request was passed by a later one's admission (in steps). With --trace
  the same for a trace file.
* estimate: longer replies in a pool that is too small for them, for several `new_token_ratio`s and how
  much of it decays per step: how many requests are retracted, and the tokens computed again for that.

--json prints {clock, order: [{policy, waiting, new_ms, tree_changed_ms, queue_changed_ms, same_ms}],
fair: [{policy, passes, hit_rate, mean_wait, worst_wait, worst_passes, longest_queue, steps}],
estimate: [{ratio, decay, retractions, computed_again, hit_rate, mean_wait, steps}]}; with --trace also
trace: [{policy, passes, hit_rate, mean_wait, worst_wait, steps, seconds}].
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from minirad.bench.tables import cpu_clock, table
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.command import above_zero, positive
from minirad.config import SamplingParams, ScheduleOptions
from minirad.observe import events as ev
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.policies import POLICIES, is_behind
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler
from minirad.simulate import ModelFreeEngine, read_source, run_schedule

QUEUES = (10, 100, 1_000, 10_000)
PASSES = (0, 1, 4, 16, 32, 64, 128, 256)
RATIOS = ((0.0, 1.0), (0.0, 0.1), (0.0, 0.01), (0.0, 0.001), (0.3, 0.01), (0.7, 0.001), (1.0, 0.0))
Tokens = npt.NDArray[np.int64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queues", type=positive, nargs="+", default=list(QUEUES))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--reps", type=positive, default=5, help="of each ordering; the median is shown")
    parser.add_argument("--requests", type=positive, default=1500, help="of the load")
    parser.add_argument("--rate", type=above_zero, default=0.8, help="requests that come per step")
    parser.add_argument("--trace", type=Path, help="a trace file to measure the policies on as well")
    parser.add_argument("--capacity", type=positive, default=2000, help="cache for the trace, in its units")
    parser.add_argument(
        "--step-ms", type=above_zero, default=250.0, help="how long a step of the trace takes"
    )
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    clock, _ = cpu_clock()
    orders = [(policy, size) for size in args.queues for policy in args.policies]
    shown: dict[str, Any] = {"clock": clock}
    shown["order"] = [order_cost(policy, size, args.reps) for policy, size in _bar("order", orders)]
    load = Load(args.requests, args.rate)
    runs = [(policy, ScheduleOptions()) for policy in args.policies if policy != "fair"]
    if "fair" in args.policies:
        runs += [("fair", ScheduleOptions(fair_passes=passes)) for passes in PASSES]
    shown["fair"] = [policy_cost(load, *each) for each in _bar("fair", runs)]
    shown["estimate"] = [estimate_cost(load, *each) for each in _bar("estimate", list(RATIOS))]
    if args.trace is not None:
        shown["trace"] = list(trace_cost(args.trace, args.capacity, args.step_ms, runs))
    if args.json:
        print(json.dumps(shown, indent=1))
    else:
        print("\n\n".join(f"{name}\n{_table(rows)}" for name, rows in shown.items() if name != "clock"))
    return 0


def _bar(name: str, each: list[Any]) -> Any:
    return tqdm(each, desc=f"bench schedule: {name}", delay=2, leave=False)


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [[_shown(value) for value in row.values()] for row in rows]
    return table([name.replace("_", " ") for name in rows[0]], cells)


def _shown(value: object) -> object:
    small = isinstance(value, float) and 0 < value < 0.1
    return f"{value:.2g}" if small else value


# ---------------------------------------------------------------------- order


def order_cost(policy: str, waiting: int, reps: int) -> dict[str, Any]:
    """Milliseconds of one ordering, in four situations."""
    rng = np.random.default_rng(0)
    cache = RadixCache()
    cache_manager = CacheManager(cache, PageAllocator(1, 1), ReqToTokenPool(1, 1), cache.bus)
    scheduler = Scheduler(cache_manager, policy, 512, cache.bus)
    beginnings = rng.integers(0, 50_000, (64, 768))
    continuations = rng.integers(0, 50_000, (8, 192))
    for number, beginning in enumerate(beginnings[::2]):
        tokens = np.concatenate((beginning, continuations[number % 8]))
        cache.insert(RadixKey(tokens), np.arange(len(tokens)))

    def request(number: int) -> Request:
        parts = beginnings[rng.integers(64)], continuations[rng.integers(8)], rng.integers(0, 50_000, 64)
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 200)))
        return Request(f"R{number}", np.concatenate(parts), params, number, number)

    times: dict[str, list[float]] = {"new": [], "tree_changed": [], "queue_changed": [], "same": []}
    for repetition in range(reps):
        scheduler.waiting = [request(number) for number in range(waiting)]
        times["new"].append(_milliseconds(scheduler.ordered))
        cache.insert(RadixKey([60_000 + repetition]), [repetition])
        times["tree_changed"].append(_milliseconds(scheduler.ordered))
        scheduler.waiting.append(request(waiting))
        times["queue_changed"].append(_milliseconds(scheduler.ordered))
        times["same"].append(_milliseconds(scheduler.ordered))
    medians = {f"{name}_ms": round(statistics.median(each), 4) for name, each in times.items()}
    return {"policy": policy, "waiting": waiting, **medians}


def _milliseconds(call: Callable[[], Any]) -> float:
    _, clock = cpu_clock()
    started = clock()
    call()
    return (clock() - started) / 1e6


# ---------------------------------------------------------------------- a load


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at `rate` per step on average: beginnings of which some are asked for often."""

    requests: int
    rate: float
    beginnings: int = 60
    shared: int = 400
    own: int = 40
    most_new: int = 64

    def arrivals(self) -> Iterator[tuple[int, Tokens, SamplingParams]]:
        """Step, prompt and parameters, in order; the same every time."""
        rng = np.random.default_rng(0)
        begin = rng.integers(0, 50_000, (self.beginnings, self.shared))
        popular = 1 / np.arange(1, self.beginnings + 1) ** 0.8
        which = rng.choice(self.beginnings, self.requests, p=popular / popular.sum())
        steps = np.cumsum(rng.exponential(1 / self.rate, self.requests)).astype(int)
        for step, number in zip(steps.tolist(), which.tolist(), strict=True):
            prompt = np.concatenate((begin[number], rng.integers(0, 50_000, self.own)))
            yield step, prompt, SamplingParams(max_new_tokens=int(rng.integers(1, self.most_new)))


@dataclass(slots=True)
class Ran:
    """What came of a load."""

    hit_rate: float | None
    mean_wait: float
    worst_wait: int
    worst_passes: int
    longest_queue: int
    steps: int
    retractions: int
    computed_again: int


def run_load(load: Load, policy: str, options: ScheduleOptions, capacity: int = 8_000, rows: int = 16) -> Ran:
    """Serves a load to its end through the engine's own scheduler."""
    engine = ModelFreeEngine(capacity, 1, "lru", policy, rows, options=options)
    admitted: list[str] = []
    engine.bus.subscribe(ev.RequestAdmitted, lambda event: admitted.append(event.request))
    coming = list(load.arrivals())[::-1]
    passes: dict[str, int] = {}
    longest = 0
    while coming or engine.has_work:
        while coming and coming[-1][0] <= engine.now:
            _, prompt, params = coming.pop()
            engine.add_request(prompt, params)
        longest = max(longest, len(engine.scheduler.waiting))
        known = {request.id: request for request in engine.scheduler.waiting}
        engine.step()
        _note_passes([known[name] for name in admitted if name in known], engine.scheduler.waiting, passes)
        admitted.clear()
    stats, waits = engine.scheduler.stats, [each.wait for each in engine.served.values()]
    return Ran(
        stats.hit_rate, statistics.mean(waits), max(waits), max(passes.values(), default=0), longest,
        engine.now, stats.retractions, stats.again.tokens - stats.again.cached,
    )  # fmt: skip


def _note_passes(admitted: list[Request], waiting: list[Request], passes: dict[str, int]) -> None:
    if admitted:
        last = admitted[0]
        for request in admitted:
            last = request if is_behind(request, last) else last
        for request in waiting:
            if is_behind(last, request):
                passes[request.id] = passes.get(request.id, 0) + 1


def policy_cost(load: Load, policy: str, options: ScheduleOptions) -> dict[str, Any]:
    """Hit rate and waits of a policy under a load."""
    ran = asdict(run_load(load, policy, options))
    names = ("hit_rate", "mean_wait", "worst_wait", "worst_passes", "longest_queue", "steps")
    passes = options.fair_passes if policy == "fair" else None
    return {"policy": policy, "passes": passes, **{name: ran[name] for name in names}}


def estimate_cost(load: Load, ratio: float, decay: float) -> dict[str, Any]:
    """Retractions where replies need more than is left. decay 1: a raise is forgotten in a step."""
    options = ScheduleOptions(new_token_ratio=ratio, new_token_decay=decay)
    long_replies = replace(load, requests=load.requests // 2, rate=load.rate / 4, most_new=256)
    ran = asdict(run_load(long_replies, "lpm", options, capacity=3_000, rows=32))
    names = ("retractions", "computed_again", "hit_rate", "mean_wait", "steps")
    return {"ratio": ratio, "decay": decay, **{name: ran[name] for name in names}}


def trace_cost(
    path: Path, capacity: int, step_ms: float, runs: list[tuple[str, ScheduleOptions]]
) -> Iterator[dict[str, Any]]:
    """Hit rate and waits of each policy on a trace file."""
    source = read_source(str(path), step_ms=step_ms)
    chunk = 512 * min(source.unit_tokens, 16)
    for policy, options in _bar("trace", runs):
        row = run_schedule(source, capacity, 1, "lru", policy, chunk_tokens=chunk, options=options)
        passes = options.fair_passes if policy == "fair" else None
        yield {
            "policy": policy, "passes": passes, "hit_rate": row.hit_rate, "mean_wait": row.mean_wait,
            "worst_wait": row.worst_wait, "steps": row.steps, "seconds": row.seconds,
        }  # fmt: skip
