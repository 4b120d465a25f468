"""In which order the queue is tried; what the fair policy bounds; that looking leaves no trace."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from support import drive, listen

from minirad.__main__ import main
from minirad.bench.schedule import PASSES, Load, run_load
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import SamplingParams, ScheduleOptions
from minirad.observe import events as ev
from minirad.schedule.other_policies import dfs_weight, fair, lof, shuffled
from minirad.schedule.policies import CACHE_AWARE, POLICIES, fcfs, is_behind, lpm
from minirad.schedule.request import Request

MakeEngine = Callable[..., CheckedEngine]
SYSTEM = list(range(5, 13))


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def request(number: int, prompt: Any = (1, 2, 3), priority: int = 0, new: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request(f"R{number}", np.array(prompt), params, 0, number, priority=priority)


def names(order: list[Request]) -> list[str]:
    return [each.id for each in order]


def nothing(_: Request) -> int:
    return 0


# ---------------------------------------------------------------------- each order by itself


def test_lof_takes_the_longest_output_first_and_looks_at_no_prefix() -> None:
    queue = [request(1, new=4), request(2, new=9), request(3, new=9), request(4, new=1, priority=1)]
    assert names(lof(queue, lambda _: pytest.fail("no prefix is asked for"))) == ["R4", "R2", "R3", "R1"]


def test_a_retracted_request_keeps_its_place_in_lof() -> None:
    queue = [request(1, new=5), request(2, new=6)]
    queue[1].append(7, 0.0)
    queue[1].append(7, 0.0)
    assert names(lof(queue, nothing)) == ["R2", "R1"]


def test_random_is_a_permutation_that_the_seed_decides() -> None:
    queue = [request(number) for number in range(30)]
    orders = {seed: names(shuffled(seed)(queue, nothing)) for seed in range(4)}
    assert all(sorted(order) == sorted(names(queue)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert names(shuffled(2)(queue, nothing)) == orders[2]
    first = [names(shuffled(seed)(queue, nothing))[0] for seed in range(300)]
    assert all(3 <= first.count(f"R{number}") <= 25 for number in range(30)), "each is first as often"


def test_random_does_not_draw_again_for_those_who_stay() -> None:
    queue = [request(number) for number in range(20)]
    order = shuffled(5)(queue, nothing)
    left = shuffled(5)([each for each in queue if each is not order[0]], nothing)
    assert left == order[1:]


def test_fair_is_lpm_until_somebody_is_due_and_then_goes_by_arrival() -> None:
    queue = [request(1), request(2), request(3), request(4, priority=1)]
    match = {"R1": 0, "R2": 1, "R3": 2, "R4": 0}
    order = fair(2)

    def peek(each: Request) -> int:
        return match[each.id]

    assert names(order(queue, peek)) == names(lpm(queue, peek)) == ["R4", "R3", "R2", "R1"]
    queue[0].passes = 2
    assert names(order(queue, peek)) == ["R4", "R1", "R3", "R2"]
    queue[1].passes = 3
    assert names(order(queue, peek)) == ["R4", "R1", "R2", "R3"]
    assert names(fair(0)(queue, peek)) == names(fcfs(queue, peek))


def test_dfs_weight_goes_into_the_branch_that_most_want() -> None:
    """Below the root two branches: [1..] is wanted by two, [5..] by three, of which two go on to 7."""
    tree = RadixCache()
    for path in ([1, 2, 3], [5, 6, 7], [5, 6, 8], [9]):
        tree.insert(RadixKey(path), np.arange(len(path)))
    queue = [
        request(1, [1, 2, 3, 4]), request(2, [40, 41]), request(3, [5, 6, 8, 4]), request(4, [5, 6, 7, 1]),
        request(5, [1, 2, 4]), request(6, [5, 6, 7, 2]), request(7, [9, 9]), request(8, [40], priority=1),
    ]  # fmt: skip
    order = dfs_weight(queue, lambda each: tree.peek(each.key()))
    assert names(order) == ["R8", "R4", "R6", "R3", "R1", "R5", "R7", "R2"]


def test_dfs_weight_keeps_namespaces_apart() -> None:
    tree = RadixCache()
    tree.insert(RadixKey([1, 2, 3]), np.arange(3))
    tree.insert(RadixKey([1, 2, 3], "a"), np.arange(3))
    queue = [request(1, [1, 2, 3, 9]), request(2, [1, 2, 3, 9]), request(3, [1, 2, 3, 9])]
    for each in queue[1:]:
        each.extra_key = "a"
    assert names(dfs_weight(queue, lambda each: tree.peek(each.key()))) == ["R2", "R3", "R1"]
    assert names(dfs_weight(queue, nothing)) == ["R1", "R2", "R3"], "none matches, in either namespace"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_does_not_depend_on_how_the_queue_is_kept(policy: str) -> None:
    rng = random.Random(7)
    tree = RadixCache()
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 9))] for _ in range(60)]
    for prompt in prompts[::2]:
        tree.insert(RadixKey(prompt), np.arange(len(prompt)))
    queue = [
        request(number, prompt, rng.randrange(2), rng.randrange(5)) for number, prompt in enumerate(prompts)
    ]
    before = tree.snapshot()
    order = POLICIES[policy](ScheduleOptions(seed=3))
    first = order(queue, lambda each: tree.peek(each.key()))
    assert sorted(names(first)) == sorted(names(queue))
    assert [each.priority for each in first] == sorted((each.priority for each in queue), reverse=True)
    for _ in range(5):
        rng.shuffle(queue)
        assert order(queue, lambda each: tree.peek(each.key())) == first
    assert tree.snapshot() == before


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_go_by_arrival_and_samples_by_index(policy: str) -> None:
    if policy == "random":
        pytest.skip("there are no equals in a lottery")
    queue = [request(3), request(1), request(2), request(1)]
    queue[1].index = 2
    order = POLICIES[policy](ScheduleOptions())(queue, nothing)
    assert [(each.arrival, each.index) for each in order] == [(1, 0), (1, 2), (2, 0), (3, 0)]


def test_an_empty_queue_has_an_order() -> None:
    for policy in POLICIES.values():
        assert policy(ScheduleOptions())([], nothing) == []


# ---------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("policy", POLICIES)
def test_ordering_leaves_no_trace_and_knows_when_the_tree_has_changed(
    make_engine: MakeEngine, policy: str
) -> None:
    """What was peeked is kept while the tree holds the same tokens; the order is as if it were not."""
    engine = make_engine(schedule_policy=policy, max_running=1, kv_tokens=40)
    scheduler, rng = engine.scheduler, random.Random(3)
    for number in range(14):
        engine.add_request(SYSTEM[: rng.randrange(9)] + [20 + number] * rng.randrange(1, 4), reply(2))
    while engine.has_work:
        before = engine.snapshot()["tree"]
        kept = scheduler.ordered()
        assert engine.snapshot()["tree"] == before
        afresh = scheduler.order(scheduler.waiting, lambda each: engine.cache.peek(each.key()))
        assert kept == afresh
        assert scheduler.ordered() == afresh
        engine.step()


def test_nothing_is_looked_up_again_while_the_tree_stays_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_running=1, chunk_tokens=64)
    for number in range(5):
        engine.add_request([*SYSTEM, 20 + number], reply(6))
    engine.step()
    asked: list[RadixKey] = []
    find = engine.cache_manager.find
    monkeypatch.setattr(
        engine.cache_manager, "find", lambda key, *last: asked.append(key) or find(key, *last)
    )
    engine.scheduler.ordered()
    assert len(asked) == 4
    engine.add_request([*SYSTEM, 30], reply(6))
    engine.scheduler.ordered()
    assert len(asked) == 5, "only the new one"
    engine.cache_manager.make_room(engine.allocator.available + engine.cache.evictable_size)
    engine.cache.insert(RadixKey([50]), [60])
    engine.scheduler.ordered()
    assert len(asked) == 10, "tokens came into the tree: all are looked up"


def test_one_look_at_the_tree_serves_order_prefix_room_and_lock(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look of an attempt is given the last one, and the lock gets what the order found."""
    engine = make_engine(max_running=4, chunk_tokens=64)
    engine.generate(SYSTEM, reply(1))
    looks: list[tuple[Any, Any]] = []
    locked: list[Any] = []
    find, lock = engine.cache_manager.find, engine.cache_manager.lock

    def look(key: RadixKey, last: Any = None) -> Any:
        found = find(key, last) if last is None else last  # as a tree answers that has not changed
        looks.append((last, found))
        return found

    def hold(key: RadixKey, found: Any) -> Any:
        locked.append(found)
        return lock(key, found)

    monkeypatch.setattr(engine.cache_manager, "find", look)
    monkeypatch.setattr(engine.cache_manager, "lock", hold)
    engine.add_request([*SYSTEM, 20], reply(2))
    assert engine.step().admitted == ["R2"]
    assert [last is None for last, _ in looks] == [True, False, False], "order, in-batch prefix, room"
    assert [found is looks[0][1] for found in locked] == [True]
    drive(engine)


def test_names_of_policies_are_known_without_the_requests() -> None:
    """config.py asks for the names, and requests are made of what config.py holds: no circle, no torch."""
    code = (
        "import sys, minirad.schedule.policies\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('minirad.', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    loaded = set(done.stdout.split())
    assert "minirad.schedule.policies" in loaded
    assert not {"minirad.schedule.request", "minirad.schedule.scheduler", "torch"} & loaded


def test_the_same_seed_gives_the_same_schedule(make_engine: MakeEngine) -> None:
    def schedule(policy: str, seed: int) -> list[Any]:
        engine = make_engine(
            schedule_policy=policy, max_running=2, kv_tokens=40, seed=seed, mixed=True, in_batch_shared=3,
            in_batch_cached=2, new_token_ratio=0.3,
        )  # fmt: skip
        heard = listen(engine, *(kind for kind in ev.EVENT_TYPES if kind is not ev.StepEnded))
        rng = random.Random(1)
        for number in range(10):
            prompt = SYSTEM[: rng.randrange(9)] + [20 + number] * rng.randrange(1, 4)
            engine.add_request(prompt, reply(rng.randrange(6)), priority=rng.randrange(2))
        drive(engine)
        return heard

    for policy in POLICIES:
        assert schedule(policy, 0) == schedule(policy, 0)
    assert schedule("random", 0) != schedule("random", 1)


# ---------------------------------------------------------------------- the bound


def passes_of_the_cold_one(engine: CheckedEngine, stream: int) -> tuple[int, int]:
    """A request without a match among endlessly many that have one: steps it was passed in, its place."""
    engine.generate(SYSTEM, reply(1))
    engine.add_request([*SYSTEM, 20], reply(2))
    cold = engine.add_request([50, 51], reply(1))
    passes = 0
    for number in range(stream):
        engine.add_request([*SYSTEM, 21 + number % 20], reply(2))
        waiting = {each.id: each for each in engine.scheduler.waiting}
        report = engine.step()
        if cold in report.admitted:
            return passes, number
        passes += any(is_behind(waiting[name], waiting[cold]) for name in report.admitted)
    return passes, stream


@pytest.mark.parametrize("bound", [0, 1, 3, 10])
def test_fair_lets_nobody_be_passed_in_more_steps_than_said(make_engine: MakeEngine, bound: int) -> None:
    engine = make_engine(schedule_policy="fair", fair_passes=bound, max_running=1)
    passes, place = passes_of_the_cold_one(engine, 60)
    assert passes == bound
    assert place < 60
    drive(engine)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_without_the_bound_a_request_without_a_match_starves(make_engine: MakeEngine, policy: str) -> None:
    passes, place = passes_of_the_cold_one(make_engine(schedule_policy=policy, max_running=1), 60)
    assert place == 60
    assert passes > 10


def test_fcfs_and_fair_0_are_one_schedule_and_lpm_and_fair_endless_another() -> None:
    load = Load(150, 0.8, beginnings=12, shared=60, own=8, most_new=20)

    def ran(policy: str, passes: int = 0) -> Any:
        return run_load(load, policy, ScheduleOptions(fair_passes=passes), capacity=500, rows=6)

    assert ran("fair", 0) == ran("fcfs")
    assert ran("fair", 10**6) == ran("lpm")
    assert ran("fcfs").worst_passes == 0
    for bound in (1, 4, 16):
        assert ran("fair", bound).worst_passes <= bound


def test_what_the_bound_costs_in_hits() -> None:
    """Between fcfs and lpm: a tighter bound, fewer hits. (How many: `python -m minirad bench schedule`.)"""
    load = Load(300, 0.8, beginnings=30, shared=100, own=10, most_new=40)
    rates = [
        run_load(load, "fair", ScheduleOptions(fair_passes=passes), capacity=1_000, rows=8).hit_rate or 0.0
        for passes in (0, 8, 32, 10**6)
    ]
    assert rates == sorted(rates)
    assert rates[-1] > rates[0] + 0.1


def test_the_policies_that_look_at_the_tree_are_named() -> None:
    for name, make in POLICIES.items():
        asked: list[Request] = []
        make(ScheduleOptions())([request(1)], lambda each, asked=asked: asked.append(each) or 0)
        assert bool(asked) == (name in CACHE_AWARE)


def test_the_bench_runs(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--queues", "3", "--requests", "12", "--reps", "1", "--policies", "lpm", "fair"]
    assert main(["bench", "schedule", *said, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["waiting"]) for row in shown["order"]] == [("lpm", 3), ("fair", 3)]
    assert {row["passes"] for row in shown["fair"]} == {None, *PASSES}
    assert all(row["worst_passes"] <= row["passes"] for row in shown["fair"] if row["passes"] is not None)
    assert len(shown["estimate"]) > 3
    assert main(["bench", "schedule", *said]) == 0
    assert "tree changed ms" in capsys.readouterr().out
