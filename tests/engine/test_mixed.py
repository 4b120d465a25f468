"""Decodes that ride along with chunks: what such a batch holds, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import CheckedEngine
from support import ColdReference, drive, listen

from minirad.config import SamplingParams
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder

MakeEngine = Callable[..., CheckedEngine]
SYSTEM = list(range(5, 13))


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def test_those_who_run_decode_beside_a_chunk(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=4, mixed=True)
    batches = listen(engine, ev.BatchScheduled)
    engine.add_request([20, 21], reply(6))
    assert engine.step().kind == "prefill", "nobody decodes yet"
    engine.add_request(SYSTEM, reply(2))
    reports = [engine.step() for _ in range(3)]
    assert [report.kind for report in reports] == ["mixed", "mixed", "decode"]
    assert [(each.kind, each.requests, each.tokens) for each in batches[1:]] == [
        ("mixed", ("R2", "R1"), (4, 1)),
        ("mixed", ("R2", "R1"), (4, 1)),
        ("decode", ("R1", "R2"), (1, 1)),
    ]
    assert batches[1].describe() == "mixed batch of 5 tokens: R2, R1"
    drive(engine)


def test_by_default_they_wait_for_the_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=4)
    engine.add_request([20, 21], reply(6))
    engine.step()
    engine.add_request(SYSTEM, reply(2))
    assert [engine.step().kind for _ in range(3)] == ["prefill", "prefill", "decode"]


def test_a_running_request_gets_a_token_in_every_step(make_engine: MakeEngine) -> None:
    """What mixing is for: a stream of prompts does not hold up a reply."""
    gaps = {}
    for mixed in (False, True):
        engine = make_engine(mixed=mixed, chunk_tokens=6, kv_tokens=128)
        engine.add_request([20], reply(12))
        engine.step()
        steps = []
        sampled = listen(engine, ev.TokenSampled)
        for number in range(8):
            engine.add_request(range(5 + number, 17 + number), reply(1))
        while any(request.id == "R1" for request in engine.scheduler.requests()):
            sampled.clear()
            engine.step()
            steps.append(any(event.request == "R1" for event in sampled))
        gaps[mixed] = steps.count(False)
        drive(engine)
    assert gaps[True] == 0
    assert gaps[False] > 8


def test_a_chunk_leaves_the_room_that_decoding_needs(make_engine: MakeEngine) -> None:
    """At one token a step the prompt and the reply meet in the middle of the pool: the reply goes on."""
    engine = make_engine(mixed=True, kv_tokens=24, chunk_tokens=1)
    sampled = listen(engine, ev.TokenSampled)
    engine.add_request([20], reply(20))
    engine.step()
    engine.add_request(range(30, 45), reply(2))
    stalled = 0
    while any(request.id == "R1" for request in engine.scheduler.requests()):
        sampled.clear()
        report = engine.step()
        assert "R1" in {event.request for event in sampled}
        stalled += bool(engine.scheduler.chunking) and report.kind == "decode"
    assert stalled > 0, "there was a step with room for one of the two"
    drive(engine)


def test_no_retraction_in_a_step_that_computes_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(mixed=True, kv_tokens=20, chunk_tokens=3, new_token_decay=1.0)
    for start in (10, 20, 30, 40):
        engine.add_request(range(start, start + 4), reply(8))
    retracted = 0
    while engine.has_work:
        report = engine.step()
        retracted += len(report.retracted)
        assert not (report.retracted and report.kind in ("mixed", "prefill"))
        assert len(set(report.batch)) == len(report.batch)
    assert retracted > 0


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kv_tokens", [96, 28])
def test_the_outputs_are_those_of_a_cold_engine(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int, kv_tokens: int
) -> None:
    reference = ColdReference(tiny_model)
    engine = make_engine(mixed=True, page_size=page, kv_tokens=kv_tokens, chunk_tokens=5)
    work = [
        (SYSTEM, reply(7)), ([*SYSTEM, 13], reply(7, temperature=1.0, n=3, seed=3)),
        ([*SYSTEM[:6], 20, 21], reply(5, logprob_start=2)), ([30] * 9, reply(7)), (SYSTEM, reply(1)),
        ([*SYSTEM, 14, 15], reply(4, logprob_start=0)),
    ]  # fmt: skip
    asked, outputs, kinds = {}, [], set()
    for prompt, params in work:
        asked[engine.add_request(prompt, params)] = prompt, params
        for _ in range(2):
            report = engine.step()
            kinds.add(report.kind)
            outputs += report.finished
    outputs += drive(engine)
    assert "mixed" in kinds
    assert len(outputs) == sum(params.n for _, params in work)
    for output in outputs:
        reference.require_equal(*asked[output.request_id], output)
    assert engine.cache.protected_size == 0


def test_a_recording_of_mixed_steps_replays_exactly(make_engine: MakeEngine) -> None:
    engine = make_engine(mixed=True, kv_tokens=28, chunk_tokens=3)
    with Recorder(engine, keyframe_every=2) as recording:
        for number in range(5):
            engine.add_request([*SYSTEM, 20 + number], reply(6), priority=number % 2)
            engine.step()
        drive(engine)
    replay = ReplayState(recording.header["start"])
    for frame in recording:
        for event in frame.events:
            replay.apply(event)
        assert frame.keyframe is None or replay.snapshot() == frame.keyframe
    assert any(
        isinstance(event, ev.BatchScheduled) and event.kind == "mixed"
        for frame in recording
        for event in frame.events
    )
