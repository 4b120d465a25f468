"""A larger priority pushes out smaller ones that run: whom, how many, and never for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import CheckedEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ColdReference, PlainCache, drive, listen

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.schedule.preemption import slots_given_up

MakeEngine = Callable[..., CheckedEngine]
SYSTEM = list(range(5, 13))


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def retracted(engine: Engine) -> list[ev.RequestRetracted]:
    return listen(engine, ev.RequestRetracted)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_lowest_priority_gives_way_for_a_row(make_engine: MakeEngine, mixed: bool) -> None:
    engine = make_engine(max_running=3, mixed=mixed)
    gone = retracted(engine)
    for at, priority in enumerate((1, 0, 2)):
        engine.add_request([20 + at], reply(9), priority=priority)
    engine.step()
    engine.step()
    made = len(engine.scheduler.running[0].output)
    engine.add_request([30], reply(2), priority=2)
    report = engine.step()
    assert report.admitted == ["R4"]
    assert report.retracted == ["R2"]
    assert [(event.request, event.by, event.generated) for event in gone] == [("R2", "R4", made)]
    assert gone[0].describe().startswith(f"R2 retracted for R4, which has priority, after {made} new tokens")
    assert engine.stats.preemptions == 1
    assert engine.stats.retractions == 0
    assert sorted(output.request_id for output in drive(engine)) == ["R1", "R2", "R3", "R4"]


def test_equal_priorities_never_push_each_other_out(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    gone = retracted(engine)
    for number in range(3):
        engine.add_request([20 + number], reply(3), priority=1)
        engine.step()
    drive(engine)
    assert gone == []


def test_switched_off_everybody_runs_to_his_end(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1, preemption=False)
    gone = retracted(engine)
    engine.add_request([20], reply(5))
    engine.step()
    engine.add_request([30], reply(5), priority=9)
    assert [output.request_id for output in drive(engine)] == ["R1", "R2"]
    assert gone == []


def test_as_few_as_make_the_room_and_those_with_least_to_lose_first(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=40, max_running=4)
    gone = retracted(engine)
    for start in (20, 30, 40):  # ten slots each, and a step between them
        engine.add_request(range(start, start + 10), reply(5))
        engine.step()
        engine.step()
    engine.add_request(range(50, 58), reply(2), priority=1)
    report = engine.step()
    assert report.admitted == ["R4"]
    assert [event.request for event in gone] == ["R3"], "the last to come has made least"
    drive(engine)


def test_nobody_is_pushed_out_where_it_would_not_help(make_engine: MakeEngine) -> None:
    """The pin holds what the newcomer needs; without it the smaller one would have to go."""
    engine = make_engine(kv_tokens=32)
    engine.generate(range(40, 52), SamplingParams(max_new_tokens=0))
    pin = engine.pin(range(40, 52))
    gone = retracted(engine)
    engine.add_request([20, 21, 22], reply(14))
    engine.step()
    engine.add_request(range(5, 30), reply(2), priority=5)
    for _ in range(4):
        engine.step()
    assert gone == [], "12 are pinned: 25 do not fit even alone"
    engine.unpin(pin)
    engine.step()
    assert [(event.request, event.by) for event in gone] == [("R2", "R3")]
    drive(engine)


def test_what_was_kept_free_for_a_victim_is_free_for_the_newcomer(make_engine: MakeEngine) -> None:
    """It fits exactly: 13 tokens, one more for each of the two; 9 are free, R2 gives 6."""
    engine = make_engine(kv_tokens=16)
    engine.add_request([20], reply(3), priority=1)
    engine.add_request(range(30, 36), reply(3))
    engine.step()
    engine.add_request(range(40, 53), reply(1), priority=1)
    report = engine.step()
    assert (report.admitted, report.retracted) == (["R3"], ["R2"])
    drive(engine)


def test_those_behind_do_not_take_what_was_made_free(make_engine: MakeEngine) -> None:
    """R4 came after R1 and has its priority: it is not admitted in the step that pushed R1 out."""
    engine = make_engine(kv_tokens=32, max_running=2)
    engine.add_request(range(20, 40), reply(8))
    engine.step()
    engine.step()
    engine.add_request(range(40, 50), reply(2), priority=1)
    engine.add_request([50], reply(1))
    report = engine.step()
    assert (report.admitted, report.retracted) == (["R2"], ["R1"])
    order = [output.request_id for output in drive(engine)]
    assert order[0] == "R2"
    assert sorted(order) == ["R1", "R2", "R3"]


def test_one_that_finishes_or_is_still_computing_its_prompt_is_left_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=2, chunk_tokens=4)
    gone = retracted(engine)
    engine.add_request([20], reply(2))
    engine.step()
    engine.add_request(range(30, 42), reply(2))  # three chunks
    engine.step()
    engine.add_request([50], reply(1), priority=3)
    reports = [engine.step() for _ in range(2)]
    assert gone == [], "a prompt between chunks blocks others for as long as it takes"
    assert [report.batch for report in reports] == [["R2"], ["R2"]]
    report = engine.step()
    assert report.admitted == ["R3"]
    assert report.retracted == ["R2"], "both have one token; the last to come goes"
    assert {output.request_id for output in [*report.finished, *drive(engine)]} == {"R1", "R2", "R3"}


def test_several_samples_take_several_rows(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=3)
    gone = retracted(engine)
    for number in range(3):
        engine.add_request([20 + number], reply(6))
    engine.step()
    engine.add_request([30], reply(2, n=2, seed=1), priority=1)
    assert engine.step().admitted == ["R4"]
    assert [event.request for event in gone] == ["R3", "R2"]
    assert len(drive(engine)) == 5


def test_a_victim_goes_on_where_it_was(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    engine = make_engine(max_running=1)
    reference = ColdReference(tiny_model)
    low = engine.add_request(SYSTEM, reply(9))
    outputs = []
    for number in range(3):
        while not any(request.id == low and request.row >= 0 for request in engine.scheduler.running):
            outputs += engine.step().finished
        outputs += engine.step().finished
        engine.add_request([*SYSTEM, 20 + number], reply(2), priority=number + 1)
    outputs += drive(engine)
    for output in outputs:
        prompt = SYSTEM if output.request_id == low else [*SYSTEM, 18 + int(output.request_id[1:])]
        reference.require_equal(prompt, reply(9 if output.request_id == low else 2), output)
    assert engine.stats.preemptions == 3
    assert engine.stats.again.cached > 0, "its prompt was still in the tree"


def test_a_tree_that_cannot_say_what_a_lock_costs_gets_there_too(make_engine: MakeEngine) -> None:
    engine = make_engine(PlainCache(), kv_tokens=32)
    engine.generate(SYSTEM, reply(1))
    engine.add_request([*SYSTEM, 20, 21], reply(9))
    engine.step()
    engine.add_request([*SYSTEM, *range(30, 50)], reply(2), priority=1)
    assert [output.request_id for output in drive(engine)] == ["R3", "R2"]


# ---------------------------------------------------------------------- what a victim gives


prompts = st.lists(st.sampled_from([5, 6]), min_size=1, max_size=14)


@settings(deadline=None, derandomize=True, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    running=st.lists(prompts, min_size=1, max_size=4),
    newcomer=prompts,
    page=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 9),
    count=st.integers(1, 4),
)
def test_what_victims_give_up_is_foreseen_exactly(
    tiny_model: LlamaModel, running: list[list[int]], newcomer: list[int], page: int, steps: int, count: int
) -> None:
    foresees(tiny_model, running, newcomer, page, steps, count)


def foresees(
    model: LlamaModel,
    running: list[list[int]],
    newcomer: list[int],
    page: int,
    steps: int,
    count: int,
    **options: Any,
) -> None:
    """What `slots_given_up` says of the first `count` running requests is what retracting them gives."""
    config = EngineConfig(kv_tokens=128, page_size=page, max_running=8, chunk_tokens=16, **options)
    engine = CheckedEngine(config, model=model)
    for prompt in running:
        engine.add_request(prompt, reply(9))
    for _ in range(steps):
        engine.step()
    engine.add_request(newcomer, reply(2))
    request, scheduler, own = engine.scheduler.waiting[-1], engine.scheduler, engine.cache_manager
    victims = list(scheduler.running)[:count]
    before = own.room - own.find(request.key()).cost
    for victim, given_up in zip(victims, list(slots_given_up(victims, request, page)), strict=True):
        scheduler.retract(victim)
        assert own.room - own.find(request.key()).cost == before + given_up
    engine.check()
