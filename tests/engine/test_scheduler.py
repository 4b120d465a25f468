"""Who runs next: order, chunks, admission, deferral, retraction; and who owns which slot meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from support import PlainCache, drive, listen

from minirad.config import SamplingParams
from minirad.errors import InvariantError
from minirad.observe import events as ev
from minirad.observe.check import lengths
from minirad.schedule.policies import fcfs, lpm
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
HINT = SamplingParams(max_new_tokens=0)


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def waiting(*wanted: tuple[int, int]) -> list[Request]:
    """Requests of (priority, prompt length), in order of arrival."""
    return [
        Request(f"R{at}", np.arange(length), SamplingParams(), 0, at, priority=priority)
        for at, (priority, length) in enumerate(wanted, start=1)
    ]


# ---------------------------------------------------------------------- order


def test_fcfs_goes_by_priority_then_arrival() -> None:
    queue = waiting((0, 3), (1, 9), (0, 5), (1, 1), (-1, 9))
    order = fcfs(queue[::-1], lambda request: pytest.fail("fcfs looks at no prefix"))
    assert [request.id for request in order] == ["R2", "R4", "R1", "R3", "R5"]


def test_lpm_goes_by_priority_then_longest_match_then_arrival() -> None:
    queue = waiting((0, 3), (0, 9), (0, 5), (1, 1), (0, 9))
    order = lpm(queue[::-1], lambda request: len(request.prompt))
    assert [request.id for request in order] == ["R4", "R2", "R5", "R3", "R1"]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", ["R2", "R3"]), ("lpm", ["R3", "R2"])])
def test_the_policy_decides_who_gets_the_only_row(
    make_engine: MakeEngine, policy: str, expected: list[str]
) -> None:
    engine = make_engine(schedule_policy=policy, max_running=1)
    engine.generate(PROMPT, HINT)
    engine.add_request([20] * 5, reply(2))
    engine.add_request([*PROMPT, 20], reply(2))
    assert [output.request_id for output in drive(engine)] == expected


def test_a_larger_priority_is_served_sooner(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    for priority in (0, -1, 5, 1):
        engine.add_request([20 + priority], reply(2), priority=priority)
    assert [output.request_id for output in drive(engine)] == ["R3", "R4", "R1", "R2"]


def test_a_larger_priority_is_kept_longer(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24, eviction_policy="priority")
    engine.add_request(PROMPT, HINT, priority=1)
    drive(engine)
    engine.generate([range(20, 28), range(30, 36), range(40, 52)], HINT)
    assert engine.peek(PROMPT) == len(PROMPT)
    assert engine.peek(range(20, 28)) < 8


def test_ordering_leaves_no_trace_in_the_tree(make_engine: MakeEngine) -> None:
    engine = make_engine(schedule_policy="lpm", max_running=1)
    engine.generate(PROMPT, HINT)
    engine.add_request([20] * 3, reply(9), priority=1)
    engine.add_request([*PROMPT[:5], 30], reply(2))
    engine.step()
    tree = engine.snapshot()["tree"]
    for _ in range(4):
        engine.step()
        assert engine.snapshot()["tree"] == tree


# ---------------------------------------------------------------------- chunks and batches


@pytest.mark.parametrize("chunk", [1, 4, 7, 16])
def test_a_step_computes_at_most_chunk_tokens_of_prompts(make_engine: MakeEngine, chunk: int) -> None:
    engine = make_engine(chunk_tokens=chunk)
    batches = listen(engine, ev.BatchScheduled)
    for start in (5, 20, 30):
        engine.add_request(range(start, start + 6), reply(3))
    drive(engine)
    sizes = [sum(batch.tokens) for batch in batches if batch.kind == "prefill"]
    assert sum(sizes) == 18
    assert max(sizes) <= chunk
    assert sizes == [min(chunk, 18 - done) for done in range(0, 18, chunk)], "each is as full as can be"
    assert all(set(batch.tokens) == {1} for batch in batches if batch.kind == "decode")


def test_prefill_goes_before_decoding(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=4)
    engine.add_request([20, 21], reply(5))
    assert engine.step().kind == "prefill"
    assert engine.step().kind == "decode"
    engine.add_request(PROMPT, reply(5))
    assert [engine.step().kind for _ in range(3)] == ["prefill", "prefill", "decode"]
    assert sorted(engine.step().batch) == ["R1", "R2"]


# ---------------------------------------------------------------------- admission and deferral


@pytest.mark.parametrize("why", ["rows", "room", "samples"])
def test_a_deferred_request_leaves_no_split_tick_hit_or_event(make_engine: MakeEngine, why: str) -> None:
    engine = make_engine(kv_tokens=24, max_running=1 if why == "rows" else 3)
    engine.generate(PROMPT, HINT)
    engine.add_request(range(20, 32), reply(6), priority=1)
    engine.step()
    wanted = reply(6, n=3 if why == "samples" else 1)
    engine.add_request(PROMPT[:5] + [40] * (9 if why == "room" else 3), wanted)
    tree = engine.snapshot()["tree"]
    heard = listen(engine)
    engine.step()
    assert engine.snapshot()["tree"] == tree
    told = [type(event).__name__ for event in heard]
    deferred = [] if why == "rows" else ["RequestDeferred"]
    assert told == [*deferred, "SlotsAllocated", "BatchScheduled", "TokenSampled", "StepEnded"]
    if why == "room":
        assert heard[0].reason == "11 slots needed, 7 free or evictable beside its match"
    outputs = drive(engine)
    assert {output.finish_reason for output in outputs} == {"length"}


def test_the_first_in_order_is_not_passed_by_smaller_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24, schedule_policy="fcfs")
    engine.add_request(range(20, 32), reply(6))
    engine.step()
    engine.add_request(range(40, 54), reply(2))
    engine.add_request([5], reply(2))
    assert next(output.request_id for output in drive(engine)) == "R1"
    assert engine.snapshot()["step"] > 0
    engine.add_request([6], reply(1))
    assert [output.request_id for output in drive(engine)] == ["R4"]


def test_room_is_looked_at_again_after_locking_the_match(make_engine: MakeEngine) -> None:
    """A tree that cannot say what a lock will cost: found out, and the lock is released once."""
    cache = PlainCache()
    engine = make_engine(cache, kv_tokens=24)
    engine.generate(range(40, 52), HINT)
    engine.add_request(range(20, 28), reply(8), priority=1)
    engine.step()
    heard = listen(engine, ev.RequestDeferred)
    # 4 slots are free and 12 evictable, but 12 of them are what this one wants to lock.
    engine.add_request([*range(40, 52), 53, 54, 55, 56], reply(2))
    engine.step()
    assert "left after locking the match" in heard[0].reason
    assert engine.scheduler.waiting[0].row == -1
    assert cache.evictable_size == 12
    assert len(drive(engine)) == 2
    assert cache.protected_size == 0


def test_an_admission_leaves_room_for_those_who_decode(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=16, page_size=4, chunk_tokens=64)
    retracted = listen(engine, ev.RequestRetracted)
    engine.add_request([20, 21, 22, 23], reply(4))
    engine.step()
    engine.add_request(PROMPT, reply(4))
    engine.step()
    assert [request.id for request in engine.scheduler.waiting] == ["R2"], "its page would be missing at once"
    drive(engine)
    assert retracted == []


# ---------------------------------------------------------------------- retraction


def test_the_lowest_priority_with_the_least_to_lose_is_retracted_first(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24, max_running=4)
    retracted, finished = listen(engine, ev.RequestRetracted), listen(engine, ev.RequestFinished)
    for start, priority in ((10, 1), (20, 0), (30, 0), (40, 1)):
        engine.add_request(range(start, start + 3), reply(12), priority=priority)
    drive(engine)
    order = [event.request for event in retracted]
    # R2 and R3 have lost as much; the last to come goes first, and it is put behind.
    assert order[:2] == ["R3", "R2"]
    assert [event.request for event in finished][:1] == ["R1"]
    assert len(finished) == 4
    assert all(event.generated > 0 for event in retracted)


def test_one_step_retracts_nobody_twice_and_never_the_last(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=16, max_running=4)
    for start in (10, 20, 30, 40):
        engine.add_request(range(start, start + 2), reply(12))
    while engine.has_work:
        report = engine.step()
        assert len(set(report.retracted)) == len(report.retracted)
        assert not set(report.retracted) & {output.request_id for output in report.finished}
        assert report.kind != "decode" or report.batch


def test_cached_tokens_give_way_before_anybody_is_retracted(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=32)
    engine.generate([range(10, 18), range(20, 28)], HINT)
    engine.add_request(range(30, 34), reply(20))
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    assert sum(report.evicted_tokens for report in reports) > 0
    assert [report.retracted for report in reports if report.retracted] == []


# ---------------------------------------------------------------------- ownership


@pytest.mark.parametrize("end", ["finished", "aborted"])
@pytest.mark.parametrize("prompt", [PROMPT, [50, 51, 52]], ids=["hit", "no hit"])
@pytest.mark.parametrize("page", [1, 4])
def test_locks_balance_over_and_over(make_engine: MakeEngine, page: int, prompt: list[int], end: str) -> None:
    engine = make_engine(page_size=page)
    engine.generate(PROMPT, HINT)
    for _ in range(5):
        rid = engine.add_request(prompt, reply(3))
        engine.step()
        if end == "aborted":
            engine.abort(rid)
        drive(engine)
        assert engine.cache.protected_size == 0
        assert engine.allocator.available + engine.cache.evictable_size == 64
        assert engine.rows.available == 4


def test_a_finished_prompt_keeps_its_whole_pages_and_frees_the_tail(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4)
    engine.generate([5, 6, 7, 8, 9, 10], HINT)
    assert engine.peek([5, 6, 7, 8, 9, 10]) == 4
    assert engine.allocator.available == 60


@pytest.mark.parametrize("busy", [False, True])
def test_a_page_that_nobody_owns_is_reported_with_its_number(make_engine: MakeEngine, busy: bool) -> None:
    engine = make_engine(page_size=4)
    if busy:
        engine.add_request([*PROMPT, 13], reply(4))
        engine.step()
    (slot, *_) = engine.allocator.alloc(4)
    with pytest.raises(InvariantError, match=rf"page \[{slot // 4}\]|page {slot // 4} "):
        engine.check()
    engine.allocator.free(np.array([slot]))
    engine.check()


def test_giving_up_what_is_not_ones_own_is_refused_before_anything_changes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, reply(9))
    engine.add_request([20, 21, 22], reply(9))
    for _ in range(3):
        engine.step()
    one, two = engine.scheduler.running
    theirs = engine.rows.rows[two.row, : two.kv_len].copy()
    before = engine.snapshot()
    for slots in (theirs[-1:], theirs[:1]):
        with pytest.raises(InvariantError, match=rf"belongs to .*, not to row {one.row}"):
            engine.cache_manager._release(slots, one.row, "released")
    assert engine.snapshot() == before
    engine.check()


def test_rows_are_handed_out_lowest_first_and_once() -> None:
    pool = ReqToTokenPool(3, 8)
    assert [pool.alloc() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="all 3 rows are held"):
        pool.alloc()
    pool.rows[1] = 7
    pool.free(1)
    assert (pool.rows[1] == 0).all()
    for row in (1, 3, -1):
        with pytest.raises(ValueError, match=f"row {row} is not held"):
            pool.free(row)
    assert pool.alloc() == 1


def test_the_three_lengths_of_a_request_are_checked() -> None:
    (request,) = waiting((0, 4))
    lengths(request)
    request.kv_len = 5
    with pytest.raises(InvariantError, match="0 <= 5 <= 4"):
        lengths(request)
