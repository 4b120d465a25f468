"""Who is let in: one prefix computed once, room reckoned with what is to come, and honest books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from support import ColdReference, drive, listen

from minirad.config import EngineConfig, SamplingParams, ScheduleOptions
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.schedule.admission import RETRACT_MARGIN, FutureTokens, in_batch_prefix
from minirad.schedule.request import Request
from minirad.schedule.stats import Stats

MakeEngine = Callable[..., CheckedEngine]
SYSTEM = list(range(5, 13))
LONG = [5 + at % 50 for at in range(48)]
HINT = SamplingParams(max_new_tokens=0)
SMALL = {"in_batch_cached": 3, "in_batch_shared": 4}


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def deferred(engine: Engine) -> list[ev.RequestDeferred]:
    return listen(engine, ev.RequestDeferred)


# ---------------------------------------------------------------------- in-batch prefix


def test_of_cold_requests_with_one_prefix_only_the_first_computes_it(make_engine: MakeEngine) -> None:
    """The thresholds are 32 and 32: a prefix of 48 tokens, nothing of it in the tree."""
    engine = make_engine(kv_tokens=256)
    told = deferred(engine)
    for number in range(3):
        engine.add_request([*LONG, 20 + number], reply(3))
    first, second = engine.step(), engine.step()
    assert (first.admitted, first.prompt_tokens) == (["R1"], 49)
    assert [(event.request, event.reason) for event in told] == [
        ("R2", "shares 48 tokens with R1, which computes them now"),
        ("R3", "shares 48 tokens with R1, which computes them now"),
    ]
    assert told[0].describe() == "R2 has to wait: shares 48 tokens with R1, which computes them now"
    assert (second.admitted, second.hit_tokens, second.prompt_tokens) == (["R2", "R3"], 96, 98)
    assert len(told) == 2
    assert engine.stats.deferrals == 2
    drive(engine)


def test_without_it_each_computes_the_prefix_for_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=256, in_batch_prefix=False)
    for number in range(3):
        engine.add_request([*LONG, 20 + number], reply(3))
    report = engine.step()
    assert (report.admitted, report.hit_tokens) == (["R1", "R2", "R3"], 0)
    drive(engine)


@pytest.mark.parametrize(
    ("cached", "shared", "waits"), [(32, 32, True), (33, 32, False), (31, 32, True), (0, 31, False)]
)
def test_the_thresholds(make_engine: MakeEngine, cached: int, shared: int, waits: bool) -> None:
    """At most 32 tokens in the tree, at least 32 in common with what is computed."""
    engine = make_engine(kv_tokens=256)
    prefix = LONG[: max(cached, shared)]
    if cached:
        engine.generate(prefix[:cached], HINT)
    engine.add_request([*prefix, 58], reply(2))
    engine.add_request([*prefix, 59], reply(2))
    assert engine.step().admitted == (["R2"] if cached else ["R1"]) + (
        [] if waits else ["R3" if cached else "R2"]
    )
    drive(engine)


def test_policies_that_do_not_look_at_the_tree_keep_their_order(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=256, schedule_policy="fcfs")
    told = deferred(engine)
    for number in range(3):
        engine.add_request([*LONG, 20 + number], reply(2))
    assert engine.step().admitted == ["R1", "R2", "R3"]
    assert told == []


def test_nobody_waits_for_a_tree_that_stays_empty(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=256, radix_cache=False)
    for number in range(3):
        engine.add_request([*LONG, 20 + number], reply(2))
    assert engine.step().admitted == ["R1", "R2", "R3"]


def test_namespaces_share_nothing_in_a_batch_either(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=256)
    for key in ("a", "b", "a"):
        engine.add_request([*LONG, 20], reply(2), extra_key=key)
    assert engine.step().admitted == ["R1", "R2"]


def test_others_are_admitted_past_the_one_that_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(**SMALL)
    for prompt in ([*SYSTEM, 20], [*SYSTEM, 21], [40, 41, 42], [40, 43]):
        engine.add_request(prompt, reply(2))
    assert engine.step().admitted == ["R1", "R3", "R4"]
    assert engine.step().admitted == ["R2"]


def test_a_request_waits_once_whatever_comes_of_it(make_engine: MakeEngine) -> None:
    """The one that computes the prefix is aborted and what it gave the tree evicted: nobody waits again."""
    engine = make_engine(**SMALL)
    told = deferred(engine)
    for number in range(3):
        engine.add_request([*SYSTEM, 20 + number], reply(2))
    assert engine.step().admitted == ["R1"]
    engine.abort("R1")
    engine.cache_manager.make_room(64)
    report = engine.step()
    assert (report.admitted, report.hit_tokens) == (["R2", "R3"], 0)
    assert [event.request for event in told] == ["R2", "R3"]
    drive(engine)


def test_who_is_retracted_may_wait_again(make_engine: MakeEngine) -> None:
    engine = make_engine(**SMALL)
    for number in range(2):
        engine.add_request([*SYSTEM, 20 + number], reply(4))
    engine.step()
    engine.step()
    second = engine.scheduler.running[1]
    assert second.has_waited
    engine.scheduler.retract(second)
    assert not second.has_waited
    drive(engine)


def test_the_deferred_find_what_a_last_chunk_computes(make_engine: MakeEngine) -> None:
    """The end of a long prompt is being computed, its beginning is short enough to count as cold."""
    engine = make_engine(chunk_tokens=6, in_batch_cached=6, in_batch_shared=8)
    told = deferred(engine)
    engine.add_request([*SYSTEM, 20], reply(2))
    engine.step()
    engine.add_request([*SYSTEM, 21], reply(2))
    report = engine.step()
    assert report.batch == ["R1"]
    assert told[0].reason == "shares 8 tokens with R1, which computes them now"
    assert engine.step().hit_tokens == 8


def test_whole_pages_only(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4, in_batch_shared=5)
    told = deferred(engine)
    engine.add_request([*SYSTEM[:7], 20], reply(2))
    engine.add_request([*SYSTEM[:7], 21], reply(2))
    engine.step()
    assert told == [], "7 tokens in common are one page of 4"


def test_a_due_request_waits_for_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(schedule_policy="fair", fair_passes=0, **SMALL)
    engine.add_request([*SYSTEM, 20], reply(2))
    engine.add_request([*SYSTEM, 21], reply(2))
    assert engine.step().admitted == ["R1", "R2"]


@pytest.mark.parametrize(
    ("page", "prompt", "expected"),
    [
        (1, [1, 2, 3], (3, "R1")), (1, [1, 2, 7, 8], (4, "R2")), (1, [1, 2, 5], (2, "R1")),
        (1, [1, 2, 7, 8, 9, 9], (4, "R2")), (2, [1, 2, 7, 5], (2, "R1")), (2, [1, 2, 7, 8], (4, "R2")),
    ],
)  # fmt: skip
def test_the_request_that_computes_the_last_shared_token(
    page: int, prompt: list[int], expected: tuple[int, str]
) -> None:
    """Of equals the one that came first; R2's last token is not computed in this step."""
    batch = []
    for number, computed in enumerate(([1, 2, 3, 4], [1, 2, 7, 8, 9]), start=1):
        batch.append(Request(f"R{number}", np.array(computed), SamplingParams(), 0, number))
        batch[-1].kv_len = 4
    assert (
        in_batch_prefix(Request("R9", np.array(prompt), SamplingParams(), 0, 9), batch, page, 1) == expected
    )


def test_without_a_common_beginning_nothing_is_shared_in_a_batch() -> None:
    asked = Request("R9", np.array([9]), SamplingParams(), 0, 9)
    assert in_batch_prefix(asked, [], 1, 1) == (0, "")
    assert in_batch_prefix(asked, [Request("R1", np.array([1]), SamplingParams(), 0, 1)], 1, 1)[0] == 0


def test_deferring_changes_no_output(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    reference = ColdReference(tiny_model)
    engine = make_engine(kv_tokens=96, **SMALL)
    prompts = [[*SYSTEM, 20 + number % 3] for number in range(7)]
    for prompt, output in zip(prompts, engine.generate(prompts, reply(4)), strict=True):
        reference.require_equal(prompt, reply(4), output)
    assert engine.stats.deferrals > 0


# ---------------------------------------------------------------------- Algorithm 1, and its two slips


def test_an_admitted_request_counts_against_the_next_one(make_engine: MakeEngine) -> None:
    """As printed nothing is added to current_size, and both would be let into room for one."""
    engine = make_engine(kv_tokens=24)
    engine.add_request(range(20, 32), reply(2))
    engine.add_request(range(40, 52), reply(2))
    assert engine.step().admitted == ["R1"]
    assert [output.request_id for output in drive(engine)] == ["R1", "R2"]


def test_only_the_shortfall_is_evicted(make_engine: MakeEngine) -> None:
    """As printed the whole need is evicted: 8 tokens here, of which 3 are missing."""
    engine = make_engine(kv_tokens=16)
    for start in (10, 20, 30):
        engine.generate([start, start + 1, start + 2, start + 3][: 3 if start == 30 else 4], HINT)
    assert (engine.allocator.available, engine.cache.evictable_size) == (5, 11)
    engine.add_request(range(40, 48), reply(1))
    assert engine.step().evicted_tokens == 4, "one leaf of 4, not two"
    assert engine.peek([20, 21, 22, 23]) == 4


def test_the_locks_part_of_the_match_is_not_counted_as_room(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24)
    engine.generate(SYSTEM, HINT)
    engine.add_request(range(20, 28), reply(8))
    engine.step()
    told = deferred(engine)
    # 8 free and 8 evictable; it needs 8 and one for each of the two, but would lock the 8.
    engine.add_request([*SYSTEM, *range(40, 48)], reply(2))
    engine.step()
    assert told[0].reason == "10 slots needed, 8 free or evictable beside its match"


def test_a_match_of_a_failed_admission_is_not_used(make_engine: MakeEngine) -> None:
    """R3 matched 8 tokens when it was tried in vain; they are evicted before it is admitted."""
    engine = make_engine(kv_tokens=24)
    engine.generate(SYSTEM, HINT)
    engine.add_request(range(20, 29), reply(9))
    engine.step()
    engine.add_request([*SYSTEM, *range(40, 50)], reply(2))
    told, admitted = deferred(engine), listen(engine, ev.RequestAdmitted)
    engine.step()
    assert [event.request for event in told] == ["R3"]
    assert engine.scheduler.waiting[0].found.length == 8
    drive(engine)
    assert [(event.request, event.matched, event.cached) for event in admitted] == [("R3", 0, 0)]


# ---------------------------------------------------------------------- tokens to come


def some(new: int, made: int = 0, **how: Any) -> Request:
    request = Request("R1", np.arange(4), SamplingParams(max_new_tokens=new, **how), 0, 1)
    for token in range(made):
        request.append(token, 0.0)
    return request


@pytest.mark.parametrize(
    ("ratio", "page", "request_", "slots"),
    [
        (0.0, 1, some(100), 1), (0.0, 16, some(100), 16), (0.5, 1, some(100), 50),
        (0.5, 16, some(100), 64), (1.0, 1, some(100, made=60), 40), (1.0, 1, some(4, n=3), 12),
        (1.0, 1, some(4, made=4), 1),
    ],
)  # fmt: skip
def test_slots_kept_for_what_is_to_come(ratio: float, page: int, request_: Request, slots: int) -> None:
    assert FutureTokens(ScheduleOptions(new_token_ratio=ratio), page).slots(request_) == slots


def test_the_ratio_decays_is_raised_by_retraction_and_begins_anew_when_idle() -> None:
    future = FutureTokens(
        ScheduleOptions(new_token_ratio=0.5, new_token_ratio_min=0.2, new_token_decay=0.1), 1
    )
    for expected in (0.4, 0.3, 0.2, 0.2):
        future.step(idle=False)
        assert future.ratio == pytest.approx(expected)
    future.retracted([some(100, made=20), some(100, made=10)])
    assert future.ratio == pytest.approx((30 + 2 * RETRACT_MARGIN) / 200)
    future.retracted([some(1000)])
    assert future.ratio == pytest.approx(0.35), "never lowered by one"
    future.retracted([some(10, made=9)])
    assert future.ratio == 1.0
    future.retracted([])
    future.step(idle=True)
    assert future.ratio == 0.5


def test_with_a_ratio_of_1_nobody_is_retracted(make_engine: MakeEngine) -> None:
    def retractions(**options: Any) -> int:
        engine = make_engine(kv_tokens=32, **options)
        for start in (10, 20, 30, 40):
            engine.add_request(range(start, start + 3), reply(12))
        assert len(drive(engine)) == 4
        assert engine.stats.preemptions == 0
        return engine.stats.retractions

    assert retractions(new_token_ratio=1.0, new_token_decay=0.0) == 0
    learned = retractions()
    forgetful = retractions(new_token_decay=1.0)
    assert 0 < learned <= forgetful


def test_the_ratio_is_in_the_report(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24)
    for start in (10, 20, 30):
        engine.add_request(range(start, start + 3), reply(12))
    ratios = []
    while engine.has_work:
        report = engine.step()
        ratios.append(report.new_token_ratio)
        if report.retracted:
            assert report.new_token_ratio > 0
    assert ratios[0] == 0.0
    assert max(ratios) > 0.5


def test_a_lone_request_needs_no_reserve(make_engine: MakeEngine) -> None:
    """Else a ratio could lock out what fits exactly."""
    engine = make_engine(kv_tokens=16, new_token_ratio=1.0)
    engine.add_request(range(20, 28), reply(8))
    assert [output.finish_reason for output in drive(engine)] == ["length"]


# ---------------------------------------------------------------------- books


def test_first_attempts_and_later_ones_are_booked_apart(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24, new_token_decay=1.0)
    heard = listen(engine, ev.RequestAdmitted)
    for start in (10, 20, 30):
        engine.add_request(range(start, start + 4), reply(10))
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    again = [event for event in heard if event.attempt > 1]
    assert again, "somebody was retracted"
    books = engine.stats
    assert (books.first.requests, books.first.tokens, books.first.cached) == (3, 12, 0)
    assert books.hit_rate == 0.0, "hitting one's own prompt again is no hit rate"
    assert books.again.requests == len(again) == books.retractions
    assert books.again.tokens == sum(event.length for event in again)
    assert books.again.cached == sum(event.cached for event in again) > 0
    assert sum(report.again_tokens for report in reports) == books.again.tokens
    assert sum(report.again_hit_tokens for report in reports) == books.again.cached
    assert sum(report.prompt_tokens for report in reports) == books.first.tokens
    assert sum(report.hit_tokens for report in reports) == books.first.cached


def test_samples_count_their_prompt_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(SYSTEM, reply(2, n=3))
    assert (engine.stats.first.tokens, engine.stats.again.tokens) == (8, 0)
    engine.generate([*SYSTEM, 20], reply(2))
    assert engine.stats.hit_rate == 8 / 17


def test_no_tokens_no_rate(make_engine: MakeEngine) -> None:
    assert Stats().hit_rate is None
    assert make_engine().stats.hit_rate is None


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_batch_cached": -1}, "in_batch_cached must be at least 0, got -1"),
        ({"in_batch_shared": 0}, "in_batch_shared must be at least 1, got 0"),
        ({"fair_passes": -1}, "fair_passes must be at least 0, got -1"),
        ({"new_token_ratio": 1.5}, "new_token_ratio must be from 0 to 1, got 1.5"),
        ({"new_token_decay": "x"}, "new_token_decay must be a number, got 'x'"),
        ({"new_token_ratio_min": 0.5}, "new_token_ratio_min 0.5 is above new_token_ratio 0.0"),
        ({"mixed": 1}, "mixed must be True or False, got 1"),
        ({"preemption": None}, "preemption must be True or False, got None"),
    ],
)
def test_wrong_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


def test_the_scheduler_gets_what_the_configuration_says(make_engine: MakeEngine) -> None:
    said = {
        "mixed": True, "preemption": False, "in_batch_prefix": False, "in_batch_cached": 1,
        "in_batch_shared": 2, "fair_passes": 3, "new_token_ratio": 0.5, "new_token_ratio_min": 0.25,
        "new_token_decay": 0.125, "seed": 9,
    }  # fmt: skip
    options = make_engine(**said).scheduler.options
    assert options == ScheduleOptions(**said)
    assert ScheduleOptions.of(EngineConfig()) == ScheduleOptions()
