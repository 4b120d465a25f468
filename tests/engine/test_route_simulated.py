"""Workers without a model behind a router: what a policy sees, what is counted, and what the command says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minirad.__main__ import main
from minirad.config import SamplingParams
from minirad.observe import route_events as told_of
from minirad.observe.event import Event
from minirad.observe.fleet_events import empty_state
from minirad.observe.reading import check_state
from minirad.observe.replay import CheckedReplay
from minirad.route.policies import POLICIES, make_policy
from minirad.route.simulated import (
    RoutePlan,
    SimulatedFleet,
    Stepped,
    jain,
    max_of_mean,
    percentile,
    run_route,
    simulate_routes,
    table,
)
from minirad.simulate import ModelFreeEngine, Plan, Source, drive, from_trace, from_workload, run_schedule
from minirad.traces import Trace, TraceRequest, tokenizer
from minirad.workloads import load

TEXT = tokenizer()
SHARED = ("chat", "mixed", "few-shot", "agents", "queue")


def talks(seed: int = 0, requests: int = 100) -> Trace:
    """Conversations over block ids: each turn adds blocks to an earlier one, some begin anew."""
    rng, fresh = random.Random(seed), iter(range(1, 100_000))
    known: list[list[int]] = []
    found = []
    for number in range(requests):
        if known and rng.random() < 0.7:
            ids = [*rng.choice(known), *(next(fresh) for _ in range(rng.randint(1, 3)))]
        else:
            ids = [0, *(next(fresh) for _ in range(rng.randint(1, 12)))]
        known.append(ids)
        units = np.array(ids, dtype=np.int64)
        found.append(
            TraceRequest(units, 512 * len(ids), output_units=rng.randint(1, 3), arrival=60.0 * number)
        )
    return Trace("talks", "mooncake", tuple(found), 512)


@pytest.fixture(scope="module")
def trace() -> Source:
    return from_trace(talks(), step_ms=100)


@pytest.fixture(scope="module")
def workloads() -> dict[str, Source]:
    return {name: from_workload(load(name), TEXT) for name in (*SHARED, "self-consistency")}


class Watched(SimulatedFleet):
    """Every step and every choice is looked at from outside."""

    def step(self) -> Stepped:
        done = super().step()
        for engine, load_, queued in zip(self.engines, self.loads, self.queued, strict=True):
            engine.check()
            there = [*engine.scheduler.live, *engine.scheduler.waiting]
            assert load_ == len({request.group for request in there})
            never = [r for r in engine.scheduler.waiting if engine.served[r.id].admitted is None]
            assert queued == sum(len(request.prompt) for request in never)
        return done


def engines(source: Source, count: int, capacity: int) -> list[ModelFreeEngine]:
    longest = max(prompt.longest for prompt in source.prompts)
    return [ModelFreeEngine(capacity, max_context=longest) for _ in range(count)]


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("name", ["chat", "mixed", "self-consistency"])
def test_with_one_worker_every_policy_is_the_engine_alone(workloads: dict[str, Source], name: str) -> None:
    source = workloads[name]
    alone = run_schedule(source, source.capacity, 1, "lru", "lpm")
    assert alone.retracted or name != "mixed"
    for policy in POLICIES:
        row = run_route(source, policy, 1, RoutePlan(), source.capacity)
        assert (row.requests, row.prompt, row.cached, row.optimum, row.steps, row.retracted) == (
            alone.requests, alone.prompt, alone.cached, alone.optimum, alone.steps, alone.retracted,
        )  # fmt: skip
        assert row.p99_wait == alone.worst_wait and row.regret == 0
        again = alone.again_prompt - alone.again_cached
        assert row.computed_by_worker == (alone.prompt - alone.cached + again,)


@pytest.mark.parametrize("capacity", [10, 60, 150, 300])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", ["chat", "mixed"])
def test_refused_requests_count_alike_with_one_engine_and_with_workers(
    workloads: dict[str, Source], name: str, page: int, capacity: int
) -> None:
    source = workloads[name]
    alone = run_schedule(source, capacity, page, "lru", "lpm")
    again = alone.again_prompt - alone.again_cached
    plan = RoutePlan((1, 3), ("random",), capacity=capacity, plan=Plan(page_sizes=(page,)))
    report = simulate_routes(source, plan)
    one, three = report.rows
    assert (one.requests, one.refused, one.prompt, one.cached, one.optimum) == (
        alone.requests, alone.refused, alone.prompt, alone.cached, alone.optimum,
    )  # fmt: skip
    assert (alone.refused > 0) == ((name, capacity) != ("chat", 300)), "all others are too small for some"
    assert one.computed == alone.prompt - alone.cached + again
    assert three.computed >= three.prompt - three.cached
    elsewhere = {row.computed - sum(row.computed_by_worker) for row in report.rows}
    assert len(elsewhere) == 1 and (elsewhere != {0}) == (alone.refused > 0)
    never = max(report.requests - row.requests for row in report.rows)
    words = f"up to {never} of {report.requests} requests never came"
    assert (words in table(report)) == (" asked " in table(report)) == (never > 0)


@pytest.mark.parametrize("policy", tuple(POLICIES))
def test_two_runs_are_alike_and_all_requests_are_there(trace: Source, policy: str) -> None:
    rows = [replace(run_route(trace, policy, 3, RoutePlan(), 200), seconds=0.0) for _ in range(2)]
    assert rows[0] == rows[1]
    row = rows[0]
    assert row.requests == sum(row.requests_by_worker) == 100 and row.refused == 0
    assert row.prompt == trace.units and row.cached <= row.optimum <= row.prompt
    assert row.computed == sum(row.computed_by_worker) >= row.prompt - row.cached
    assert row.regretted <= row.requests and (row.regret == 0) == (row.regretted == 0)


def test_another_seed_draws_other_workers(trace: Source) -> None:
    plan = RoutePlan()
    other = replace(plan, options=replace(plan.options, seed=1))
    first, second = (run_route(trace, "random", 3, each, 200) for each in (plan, other))
    assert first.requests_by_worker != second.requests_by_worker


def test_policies_see_the_same_requests_also_where_replies_are_drawn(workloads: dict[str, Source]) -> None:
    source = workloads["self-consistency"]
    rows = [run_route(source, policy, 3, RoutePlan(), None) for policy in POLICIES]
    assert len({(row.prompt, row.optimum, row.requests) for row in rows}) == 1


def test_what_no_worker_can_hold_is_refused_and_routed_nowhere(trace: Source) -> None:
    told: list[Event] = []
    row = run_route(trace, "cache-aware", 2, RoutePlan(), 12, tell=told.append)
    assert 0 < row.refused < 100 and sum(row.requests_by_worker) == 100 - row.refused
    routed = [event for event in told if isinstance(event, told_of.RequestRouted)]
    assert [event.request for event in routed] == [f"R{n}" for n in range(1, 101 - row.refused)]
    assert "refused: larger than a worker's cache" in table(
        simulate_routes(trace, RoutePlan((2,), ("random",), capacity=12))
    )


# ------------------------------------------------------------------ what policies reach


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("workers", [2, 4])
def test_who_knows_the_trees_is_not_worse_than_round_robin(
    workloads: dict[str, Source], name: str, workers: int
) -> None:
    source = workloads[name]
    cached = {
        policy: run_route(source, policy, workers, RoutePlan(), source.capacity).cached
        for policy in ("round-robin", "cache-aware", "events")
    }
    assert cached["events"] >= cached["round-robin"] <= cached["cache-aware"]


@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_trace_both_cache_aware_policies_are_far_ahead(seed: int) -> None:
    source = from_trace(talks(seed), step_ms=100)
    rows = {policy: run_route(source, policy, 4, RoutePlan(), 300) for policy in POLICIES}
    others = max(rows[name].cached for name in ("round-robin", "least-loaded", "random"))
    for name in ("cache-aware", "events"):
        assert rows[name].cached > 1.3 * others
        assert rows[name].regret < min(rows[other].regret for other in ("round-robin", "random"))


def test_events_that_come_late_are_believed_late(trace: Source) -> None:
    rows = [run_route(trace, "events", 4, RoutePlan(event_delay=delay), 300) for delay in (0, 10_000)]
    assert rows[0].cached > rows[1].cached and rows[0].regret < rows[1].regret
    blind = run_route(trace, "least-loaded", 4, RoutePlan(), 300)  # nobody has told anything yet
    assert rows[1].requests_by_worker == blind.requests_by_worker and rows[1].cached == blind.cached


# ------------------------------------------------------------------ what a policy sees


@pytest.mark.parametrize("policy", ["random", "cache-aware", "events"])
def test_every_step_is_checked_and_what_is_told_leads_to_what_is_there(trace: Source, policy: str) -> None:
    """Loads and waiting tokens are those of the engines; the events replay, and their sums are the row's."""
    replay, told = CheckedReplay(empty_state(1)), []

    def tell(event: Event) -> None:
        replay.apply(event)
        told.append(event)

    fleet = Watched(engines(trace, 3, 100), make_policy(policy), tell=tell)
    assert drive(fleet, trace.feed(), len(trace.prompts)) == []
    workers = replay.tree["workers"]
    assert [each["requests"] for each in workers] == [len(engine.served) for engine in fleet.engines]
    assert [each["load"] for each in workers] == fleet.loads == fleet.queued == [0, 0, 0]
    for each, engine in zip(workers, fleet.engines, strict=True):
        served = engine.served.values()
        assert each["cached"] == sum(one.cached for one in served)
        assert each["tokens"] == sum(len(one.prompt) for one in served)
    assert sum(each["regret"] for each in workers) == sum(fleet.regrets)
    check_state(json.loads(json.dumps(replay.snapshot())))
    kinds = [type(event) for event in told]
    assert kinds.count(told_of.RequestRouted) == kinds.count(told_of.RouteFinished) == 100


def test_without_a_delay_events_say_what_the_trees_hold(trace: Source) -> None:
    looked = 0

    class Compared(Watched):
        def add_request(self, prompt: Any, params: SamplingParams, *rest: Any, **more: Any) -> str:
            nonlocal looked
            for view, engine in zip(self.views(), self.engines, strict=True):
                assert view.tree is not None
                known = view.tree.match(prompt)
                assert known == engine.peek(prompt) and view.tree.tokens == engine.cache.total_size
                looked += known > 0
            return super().add_request(prompt, params, *rest, **more)

    fleet = Compared(engines(trace, 3, 90), make_policy("events"))
    drive(fleet, trace.feed(), len(trace.prompts))
    assert looked > 100 and sum(engine.cache_manager.evicted_tokens for engine in fleet.engines) > 100


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_delay_is_in_steps(delay: int) -> None:
    fleet = SimulatedFleet([ModelFreeEngine(64)], make_policy("events"), delay)
    prompt, reply = np.arange(8), SamplingParams(max_new_tokens=1, ignore_eos=True)
    fleet.add_request(prompt, reply)
    known = []
    for _ in range(6):
        (view,) = fleet.views()
        assert view.tree is not None
        known.append(view.tree.match(prompt))
        fleet.step()
    assert known == [0] * (1 + delay) + [8] * (5 - delay)


def test_a_request_is_in_flight_until_its_last_sample_is_finished() -> None:
    told: list[Event] = []
    fleet = SimulatedFleet([ModelFreeEngine(64)], make_policy("least-loaded"), tell=told.append)
    fleet.add_request(np.arange(8), SamplingParams(max_new_tokens=9, n=3, temperature=1.0))
    loads, finished = [], []
    while fleet.has_work:
        finished += fleet.step().finished
        loads.append(fleet.loads[0])
    assert sorted(answer.index for answer in finished) == [0, 1, 2]
    assert {answer.request_id for answer in finished} == {"R1"}
    assert loads == [1] * (len(loads) - 1) + [0] and len(loads) > 2
    assert [type(event).__name__ for event in told] == ["WorkerChanged", "RequestRouted", "RouteFinished"]


# ------------------------------------------------------------------ figures and the command


def test_how_even_loads_are() -> None:
    assert max_of_mean([3, 3, 3]) == jain([3, 3, 3]) == 1
    assert max_of_mean([0, 8, 0, 0]) == 4 and jain([0, 8, 0, 0]) == 0.25
    assert max_of_mean([1, 3]) == 1.5 and jain([1, 3]) == pytest.approx(0.8)
    assert max_of_mean([0, 0]) is None and jain([0, 0]) is None
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([7], 0.5) == percentile([7], 0.99) == 7 and percentile([], 0.5) is None


def test_the_command_prints_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "few-shot", "--workers", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "few-shot (workload): 6 requests, 883 prompt tokens; the cache of each worker: 320 tokens"
    )
    assert [line.split()[:2] for line in lines[3:]] == [[n, name] for n in "12" for name in POLICIES]
    assert main(["simulate", "few-shot", "chat", "--route", "events", "--json", "--capacity", "inf"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["source"] for report in reports] == ["few-shot", "chat"]
    (row,) = reports[0]["rows"]
    assert (row["workers"], row["policy"], row["capacity"]) == (4, "events", None)
    assert row["hit_rate"] == row["cached"] / row["prompt"] and len(row["computed_by_worker"]) == 4
    assert {"computed_jain", "requests_max_of_mean", "regret_per_request"} < set(row)


def test_thresholds_of_the_command_count(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for more in ([], ["--match-threshold", "1"], ["--balance-abs", "0", "--balance-rel", "1"]):
        assert main(["simulate", "agents", "--workers", "3", "--route", "events", "--json", *more]) == 0
        rows.append(json.loads(capsys.readouterr().out)[0]["rows"][0])
    assert rows[0]["cached"] > rows[1]["cached"] and rows[0]["cached"] > rows[2]["cached"]


def test_the_figure_has_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from viz.routes import bars_of, figure

    file = tmp_path / "routes.html"
    said = ["simulate", "few-shot", "queue", "--workers", "2,3", "--json", "--figure", str(file)]
    assert main(said) == 0
    reports = json.loads(capsys.readouterr().out)
    assert file.stat().st_size > 1_000_000 and "least-loaded" in file.read_text(encoding="utf-8")
    drawn = figure(reports)
    assert len(drawn.data) == 2 * 3 * len(POLICIES)
    bars = bars_of(reports[1], "hit_rate")
    assert [each.name for each in bars] == list(POLICIES)
    assert list(bars[0].x) == ["2", "3"]
    assert list(bars[0].y) == [
        row["hit_rate"] for row in reports[1]["rows"] if row["policy"] == "round-robin"
    ]


def test_a_file_without_requests_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = Source("empty", "workload", (), lambda: from_workload(load("none"), TEXT).feed())
    report = simulate_routes(empty)
    assert report.rows == () and "nothing to simulate" in table(report)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--workers 0", "workers must be at least 1, got 0"),
        ("--workers 257", "workers must be at most 256, got 257"),
        ("--workers many", "workers must be a whole number, got 'many'"),
        ("--workers 2,", "workers must be a list such as 1,2, got '2,'"),
        ("--route best", "unknown routing policy 'best'; known: round-robin, least-loaded"),
        ("--workers 2 --drive replay", "--drive replay takes one request at a time"),
        ("--workers 2 --page-size 1,2", "with --workers there is one page size for all, got 1, 2"),
        ("--workers 2 --capacity 300,inf", "with --workers there is one capacity for all, got 300, None"),
        ("--workers 2 --eviction-policy all", "with --workers there is one eviction policy for all"),
        ("--workers 2 --figure x.pdf", "must end in .html"),
        ("--workers 2 --event-delay -1", "event_delay must be at least 0, got -1"),
        ("--workers 2 --match-threshold 2", "match_threshold must be a number from 0 to 1, got 2.0"),
        ("--workers 2 --balance-rel nan", "balance_rel must be a number from 1 to 1e+09, got nan"),
        ("--workers 2 --seed -1", "seed must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], said: str, told: str) -> None:
    assert main(["simulate", "chat", *said.split()]) == 2
    out = capsys.readouterr()
    assert out.out == "" and told in out.err and out.err.count("\n") == 1


def test_pages_are_matched_as_a_whole(trace: Source) -> None:
    for policy in ("cache-aware", "events"):
        told: list[Event] = []
        plan = RoutePlan(plan=Plan(page_sizes=(4,)))
        row = run_route(trace, policy, 2, plan, 200, tell=told.append)
        assert row.page_size == 4 and row.cached % 4 == row.regret % 4 == 0
        matches = [m for event in told if isinstance(event, told_of.RequestRouted) for m in event.matches]
        assert max(matches) > 0 and all(match % 4 == 0 for match in matches)
