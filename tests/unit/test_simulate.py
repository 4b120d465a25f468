"""Simulation without a model: exact counts against brute force, and the engine's own decisions."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minirad.__main__ import main
from minirad.cache.eviction import POLICIES as EVICTION
from minirad.cache.radix_cache import RadixKey
from minirad.config import SamplingParams, ScheduleOptions
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.simulate import (
    Answer,
    ModelFreeEngine,
    Plan,
    Replay,
    Source,
    TraceFeed,
    drive,
    endless,
    from_trace,
    from_workload,
    read_source,
    run_replay,
    run_schedule,
    shared_prefixes,
    simulate,
    table,
)
from minirad.traces import Trace, TraceRequest, read_trace, tokenizer
from minirad.workloads import Session, Turn, Workload, from_recording, load

TEXT = tokenizer()


def small_trace(path: Path, requests: int = 200, seed: int = 0) -> Path:
    """Conversations over block ids as a Mooncake trace has them: each turn adds blocks to the last."""
    rng, fresh = random.Random(seed), iter(range(1, 100_000))
    talks: list[list[int]] = []
    lines = []
    for number in range(requests):
        if talks and rng.random() < 0.6:
            ids = rng.choice(talks)
            ids += [next(fresh) for _ in range(rng.randint(0, 4))]
        else:
            ids = [0] + [next(fresh) for _ in range(rng.randint(1, 12))]
            talks.append(ids)
        lines.append(
            json.dumps(
                {
                    "timestamp": 37 * number, "input_length": 512 * len(ids) - rng.randint(0, 511),
                    "output_length": rng.randint(1, 1500), "hash_ids": ids,
                }
            )
        )  # fmt: skip
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_trace(tmp_path_factory.mktemp("traces") / "talks.jsonl")


@pytest.fixture(scope="module")
def source(trace_file: Path) -> Source:
    return from_trace(read_trace(trace_file), step_ms=100)


def brute_force(source: Source, page: int = 1) -> int:
    """Units found in an endless cache, by remembering every prefix."""
    seen: set[bytes] = set()
    total = 0
    for prompt in source.prompts:
        data, size = prompt.key.data, 4 * page
        prefixes = [data[:end] for end in range(size, len(data) + 1, size)]
        total += page * sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return total


# ---------------------------------------------------------------------- replay


@pytest.mark.parametrize("page", [1, 2, 4])
def test_an_endless_cache_finds_all_that_was_there(source: Source, page: int) -> None:
    assert endless(source, page).cached == brute_force(source, page) > 0
    row = run_replay(source, None, page, "lru", endless(source, page).cached)
    assert (row.cached, row.share, row.evicted) == (row.optimum, 1.0, 0)
    # One computed unit costs a hit where a prompt was there to its last page.
    assert row.len_rule <= row.cached


@pytest.mark.parametrize("policy", sorted(EVICTION))
@pytest.mark.parametrize("page", [1, 3])
def test_a_limited_cache_keeps_its_limit(source: Source, policy: str, page: int) -> None:
    replay = Replay(60, page, policy)
    best = endless(source, page).cached
    cached = 0
    for prompt in source.prompts:
        expected, evicted = replay.cache.peek(prompt.key), replay.evicted
        room = 60 - replay.cache.total_size - -(-len(prompt.key) // page) * page + expected
        matched = replay.serve(prompt.key)
        assert (replay.evicted > evicted) == (room < 0 and matched is not None)
        assert matched == (expected if len(prompt.key) <= 60 else None)
        assert replay.cache.total_size <= 60
        cached += matched or 0
    replay.cache.check()
    assert 0 < cached < best
    assert replay.cache.protected_size == 0
    row = run_replay(source, 60, page, policy, best)
    assert (row.cached, row.evicted) == (cached, replay.evicted)


def test_what_is_larger_than_the_cache_counts_as_computed(source: Source) -> None:
    least = min(len(prompt.key) for prompt in source.prompts)
    row = run_replay(source, least - 1, 1, "lru", 0)
    assert (row.refused, row.cached, row.prompt) == (len(source.prompts), 0, source.units)
    assert row.hit_rate == 0


@pytest.mark.parametrize("capacity", [5, 20, 50, 60, None])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_refuses_nothing(seed: int, page: int, capacity: int | None) -> None:
    """Requests far apart come in the same order in every run: each has one and the same optimum."""
    source = spaced(random.Random(seed))
    replayed = run_replay(source, None, page, "lru", 0)
    row = run_schedule(source, capacity, page, "lru", "lpm")
    assert (row.refused > 0) == (capacity in (5, 20)), "some are larger, or none is"
    assert (row.requests, row.prompt) == (len(source.prompts), source.units)
    assert row.optimum == replayed.len_rule > 0
    assert row.cached <= row.bound <= row.optimum


def spaced(rng: random.Random) -> Source:
    """Requests that begin alike, some of them long, one every 40 steps."""
    stem = [rng.randint(3, 9) for _ in range(30)]
    prompts = [stem[: rng.choice((3, 30))] + [rng.randint(3, 9) for _ in range(2)] for _ in range(12)]
    prompts += [stem, stem[:3]]
    sessions = tuple(
        Session(f"s{number}", (Turn(token_ids=tuple(prompt), max_new_tokens=4),), 40 * number)
        for number, prompt in enumerate(prompts)
    )
    return from_workload(Workload("spaced", "Spaced", sessions), TEXT)


def test_requests_served_together_do_not_find_each_other() -> None:
    key = RadixKey([1, 2, 3])
    replay = Replay()
    assert replay.serve_together([(key,), (key,)]) == [0, 0]
    assert replay.serve(key) == 3
    assert replay.cache.total_size == 3


def test_shared_prefixes_add_up_to_what_is_cached(source: Source) -> None:
    best = endless(source)
    prefixes = shared_prefixes(best.cache, None, top=10_000)
    assert prefixes[0].saved == max(prefix.saved for prefix in prefixes)
    assert all(prefix.saved == prefix.own * prefix.reused for prefix in prefixes)
    everything = sum(node.hits * len(node) for node in best.cache.walk())
    assert everything == best.cached >= sum(prefix.saved for prefix in prefixes) > 0.9 * best.cached
    (shared,) = [prefix for prefix in prefixes if prefix.length == 1]
    assert shared.reused == len(source.prompts) - 1  # block 0 begins every prompt


@pytest.mark.parametrize("page", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("name", ["talks", "chat", "agents"])
def test_shared_prefixes_are_those_of_the_page_size(source: Source, name: str, page: int) -> None:
    if name != "talks":
        source = from_workload(load(name), TEXT)
    report = simulate(source, Plan("replay", (None,), page_sizes=(page,)))
    (row,) = report.rows
    assert sum(prefix.saved for prefix in report.prefixes) <= row.cached
    assert bool(report.prefixes) == (row.cached > 0), "none where the table says that nothing is shared"
    assert all(prefix.own % page == 0 for prefix in report.prefixes)
    assert (f"pages of {page})" in table(report)) == (page > 1 and row.cached > 0)
    everything = shared_prefixes(endless(source, page).cache, None, top=10_000)
    assert [each.saved for each in report.prefixes] == [each.saved for each in everything[:10]]
    assert report.distinct == endless(source).cache.total_size, "what there is does not depend on pages"


# ---------------------------------------------------------------------- the engine without a model


def random_requests(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, int]]:
    stems = [[rng.randint(3, 9) for _ in range(rng.randint(1, 12))] for _ in range(3)]
    return [
        (
            rng.choice(stems) + [rng.randint(3, 9) for _ in range(rng.randint(1, 8))],
            SamplingParams(max_new_tokens=rng.randint(0, 8), n=rng.choice((1, 1, 1, 2)), temperature=1.0),
            rng.choice((0, 0, 1)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("schedule", sorted(SCHEDULE))
@pytest.mark.parametrize("page", [1, 4])
def test_every_step_keeps_the_invariants_and_all_finish(schedule: str, page: int) -> None:
    rng = random.Random(f"{schedule} {page}")
    engine = ModelFreeEngine(40, page, "lru", schedule, max_running=4, chunk=7)
    finished = []
    asked = random_requests(rng, 25)
    for prompt, params, priority in asked:
        engine.add_request(prompt, params, priority=priority)
        for _ in range(rng.randint(0, 3)):
            finished += engine.step().finished
            engine.check()
    for _ in range(2000):
        if not engine.has_work:
            break
        finished += engine.step().finished
        engine.check()
    assert len(finished) == sum(params.n for _, params, _ in asked)
    assert len({(out.request_id, out.index) for out in finished}) == len(finished)
    assert sorted(engine.order) == sorted(engine.served)
    first = engine.scheduler.stats.first
    assert (first.requests, first.tokens) == (len(asked), sum(len(prompt) for prompt, *_ in asked))
    assert all(served.wait >= 0 for served in engine.served.values())


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_it_decides_as_the_engine_does(make_engine: Any, seed: int, page: int, mixed: bool) -> None:
    """The real engine's replies as the script: then every event but the clock is the same."""
    asked = random_requests(random.Random(seed), 12)
    real = make_engine(kv_tokens=48, max_running=4, chunk_tokens=7, page_size=page, mixed=mixed)
    outputs, heard = [], record(real.bus)
    for number, (prompt, params, priority) in enumerate(asked):
        real.add_request(prompt, SamplingParams(max_new_tokens=params.max_new_tokens), priority=priority)
        if number % 3 == 2:
            outputs += real.step().finished
    while real.has_work:
        outputs += real.step().finished
    replies = {out.request_id: tuple(out.token_ids) for out in outputs}

    options = ScheduleOptions(mixed=mixed)
    engine = ModelFreeEngine(48, page, max_running=4, chunk=7, max_context=48, options=options)
    ours = record(engine.bus)
    for number, (prompt, params, priority) in enumerate(asked):
        params = SamplingParams(max_new_tokens=params.max_new_tokens)
        engine.add_request(prompt, params, priority=priority, reply=replies[f"R{number + 1}"])
        if number % 3 == 2:
            engine.step()
    while engine.has_work:
        engine.step()
    assert ours == heard
    assert {type(event) for event in ours} >= {ev.NodeEvicted, ev.RequestAdmitted, ev.Committed}
    assert engine.cache.snapshot() == real.cache.snapshot()


def record(bus: ev.EventBus) -> list[ev.Event]:
    """What a bus says, less what a model or a clock has a part in."""
    left_out = (ev.RequestAdded, ev.RequestFinished, ev.TokenSampled, ev.StepEnded)
    heard: list[ev.Event] = []
    bus.subscribe(None, lambda event: None if isinstance(event, left_out) else heard.append(event))
    return heard


def test_requests_that_cannot_run_are_refused() -> None:
    engine = ModelFreeEngine(16, max_running=2)
    for prompt, params in (
        ([1] * 15, SamplingParams(max_new_tokens=2)),
        ([], SamplingParams()),
        ([1], SamplingParams(n=3, max_new_tokens=1)),
    ):
        with pytest.raises(ValueError, match=r"\d|the prompt is empty"):
            engine.add_request(prompt, params)
    assert not engine.has_work
    assert engine.step().finished == []


@pytest.mark.parametrize("schedule", sorted(SCHEDULE))
def test_over_time_never_better_than_the_optimum_and_the_same_again(source: Source, schedule: str) -> None:
    rows = [run_schedule(source, 80, 1, "lru", schedule, 4, 8 * 512) for _ in range(2)]
    for row in rows:
        assert 0 < row.cached <= row.optimum
        assert row.prompt == source.units
        assert row.mean_wait is not None
        assert row.worst_wait is not None
        assert 0 <= row.mean_wait <= row.worst_wait
    first, again = (row.as_dict() for row in rows)
    assert {**first, "seconds": 0} == {**again, "seconds": 0}


def test_reattempts_are_booked_apart() -> None:
    mixed = from_workload(load("mixed"), TEXT)
    row = run_schedule(mixed, 400, 1, "lru", "lpm", 32, 512)
    assert row.retracted > 0
    assert row.again_prompt > row.again_cached > 0
    assert row.prompt == sum(len(each.prompt) for each in served(mixed, 400))
    whole = run_schedule(mixed, None, 1, "lru", "lpm", 32, 512)
    assert (whole.evicted, whole.again_prompt, whole.worst_wait) == (0, 0, 0)


def served(source: Source, capacity: int) -> list[Any]:
    engine = ModelFreeEngine(capacity)
    assert drive(engine, source.feed(), len(source.prompts)) == []
    return list(engine.served.values())


@pytest.mark.parametrize("capacity", [10, 150, 300, None])
@pytest.mark.parametrize("name", ["chat", "mixed", "agents", "multi-turn", "drafts", "tiers"])
def test_a_table_says_what_its_rates_are_of(name: str, capacity: int | None) -> None:
    """Where a request is refused its session ends: what is not asked is in no rate, and that is said."""
    source = from_workload(load(name), TEXT)
    report = simulate(source, Plan(capacities=(capacity, None)))
    row = report.rows[0]
    assert row.hit_rate == row.cached / row.prompt
    assert row.prompt < report.prompt or row.requests == report.requests
    assert row.refused or (row.requests, row.prompt) == (report.requests, report.prompt)
    never, text = report.requests - row.requests, table(report)
    assert (f"up to {never} of {report.requests} requests never came" in text) == (never > 0)
    heads, cells, *_ = (line.split("  ") for line in text.splitlines()[2:])
    assert ("asked" in [head.strip() for head in heads]) == (never > 0)
    assert (f"{row.prompt:,}" in [cell.strip() for cell in cells]) == (never > 0)


# ---------------------------------------------------------------------- recordings


def recorded(make_engine: Any, seed: int, page: int, **config: Any) -> Recorder:
    """Requests that come while others run, until all are answered."""
    rng = random.Random(seed)
    engine = make_engine(kv_tokens=48, max_running=4, chunk_tokens=7, page_size=page, **config)
    with Recorder(engine) as recorder:
        for prompt, params, priority in random_requests(rng, 12):
            params = SamplingParams(max_new_tokens=params.max_new_tokens)
            engine.add_request(prompt, params, priority=priority)
            for _ in range(rng.randint(0, 4)):
                engine.step()
        while engine.has_work:
            engine.step()
    return recorder


@pytest.mark.parametrize("schedule", ["lpm", "fcfs"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_recording_simulated_as_it_was_served_finds_what_it_found(
    make_engine: Any, seed: int, page: int, schedule: str
) -> None:
    recorder = recorded(make_engine, seed, page, schedule_policy=schedule)
    events = [event for frame in recorder.frames for event in frame.events]
    admitted = [each for each in events if isinstance(each, ev.RequestAdmitted)]
    source = from_workload(from_recording(recorder), TEXT)
    row = run_schedule(source, source.capacity, page, "lru", schedule, 4, 7)
    assert row.cached == sum(each.cached for each in admitted if each.attempt == 1)
    assert row.cached > 0 or page > 1
    assert row.again_cached == sum(each.cached for each in admitted if each.attempt > 1)
    assert row.steps == recorder.frames[-1].step
    (note,) = source.notes
    assert f"page_size {page}" in note and f"schedule_policy {schedule}" in note
    assert "those of this run" in note


def test_replies_that_a_recording_does_not_tell_are_made_up_and_counted(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=64)
    with Recorder(engine) as recorder:
        engine.add_request([3, 4, 5], SamplingParams(max_new_tokens=3))
        engine.add_request([6, 4, 5], SamplingParams(max_new_tokens=3, n=2, temperature=1.0))
        gone = engine.add_request([7, 4, 5], SamplingParams(max_new_tokens=9))
        engine.add_request([8, 4, 5], SamplingParams(max_new_tokens=9, ignore_eos=True))
        engine.abort(gone)
        for _ in range(5):
            engine.step()
    workload = from_recording(recorder)
    replies = [session.turns[0].reply for session in workload.sessions]
    assert [reply is not None for reply in replies] == [True, False, False, False]
    assert "1 of 4 replies (the others are made up)" in workload.notes[0]
    row = run_schedule(from_workload(workload, TEXT), 64, 1, "lru", "lpm")
    assert (row.requests, row.refused) == (4, 0)


def damaged(lines: list[bytes], how: str) -> list[bytes]:
    middle = len(lines) // 2
    return {
        "lost": lines[:middle] + lines[middle + 1 :],
        "moved": [*lines[:middle], lines[middle + 1], lines[middle], *lines[middle + 2 :]],
        "broken": [*lines[:middle], b"{]\n", *lines[middle + 1 :]],
        "cut off": [*lines[:-1], lines[-1][: len(lines[-1]) // 2]],
    }[how]


@pytest.mark.parametrize("how", ["lost", "moved", "broken", "cut off"])
def test_a_damaged_recording_is_no_workload_unless_its_part_is_asked_for(
    make_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, how: str
) -> None:
    from viz.web.settings import Settings

    path = tmp_path / "run.jsonl"
    recorded(make_engine, 1, 1).save(path)
    readers: dict[str, Callable[[], Any]] = {
        "load": lambda: load(path),
        "simulate": lambda: read_source(str(path)),
        "viz.live": lambda: Settings(workload=str(path)).load_workload(),
    }
    whole = len(load(path).sessions)
    assert len(Settings(workload=str(path)).load_workload().sessions) == whole
    path.write_bytes(b"".join(damaged(path.read_bytes().splitlines(keepends=True), how)))
    missing = Recording.load(path).missing
    assert "can be seen" in missing
    for read in readers.values():
        with pytest.raises(ValueError, match=re.escape(missing)):
            read()
    for command in (["simulate", str(path)], ["bench", "learn", str(path), "--choices", "1"]):
        assert main(command) == 2
        said = capsys.readouterr()
        assert missing in said.err and said.out == ""
    code, out, err = run(capsys, str(path), "--malformed", "skip", "--json")
    (report,) = json.loads(out)
    assert (code, missing in err) == (0, True)
    assert report["requests"] == len(load(path, partly=True).sessions) <= whole


# ---------------------------------------------------------------------- feeds


def request(units: list[int], **more: Any) -> TraceRequest:
    return TraceRequest(np.array(units), len(units), **more)


def test_arrivals_come_at_their_times_and_turns_wait_for_replies() -> None:
    trace = Trace("t", "mooncake", (
        request([1], arrival=0.0), request([2], arrival=950.0), request([3], arrival=400.0),
        request([4], arrival=0.0, session="s"), request([4, 5], arrival=0.0, session="s"),
    ))  # fmt: skip
    feed = TraceFeed(trace, step_ms=200, per_step=1)

    def due(step: int) -> list[list[int]]:
        found = feed.due(step)
        for each in found:
            feed.sent(each, f"R{each.handle}")
        return [np.asarray(each.prompt).tolist() for each in found]

    assert due(0) == [[1], [4]]
    assert feed.next_due == 2
    assert due(1) == []
    assert due(2) == [[3]]
    engine = ModelFreeEngine(8)
    name = engine.add_request([4], SamplingParams(max_new_tokens=1))
    (output,) = engine.step().finished
    assert output.request_id == name
    feed.finished(Answer("R3", 0, output.token_ids, "length"), 2)
    assert feed.next_due == 3
    assert due(9) == [[4, 5], [2]]


def test_without_times_they_come_so_many_per_step() -> None:
    trace = Trace("t", "openai", tuple(request([number]) for number in range(5)))
    feed = TraceFeed(trace, step_ms=1, per_step=2)
    assert [len(feed.due(step)) for step in range(4)] == [2, 2, 1, 0]


# ---------------------------------------------------------------------- reports and the command


def test_every_combination_is_run_and_unlimited_once(source: Source) -> None:
    plan = Plan(
        capacities=(50, 100, None), page_sizes=(1, 2), eviction_policies=("lru", "lfu"),
    )  # fmt: skip
    calls: list[int] = []
    report = simulate(source, plan, lambda: calls.append(1))
    assert len(report.rows) == 2 * (2 * 2 + 1)
    assert len(calls) == len(report.rows) * len(source.prompts)
    assert report.distinct + report.rows[4].cached == report.prompt
    text = table(report)
    assert "unlimited" in text
    assert f"{report.rows[4].hit_rate:.2%}" in text
    assert json.loads(json.dumps(report.as_dict()))["rows"][0]["source"] == "talks"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["simulate", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_command_over_a_trace(capsys: pytest.CaptureFixture[str], trace_file: Path, source: Source) -> None:
    code, out, _ = run(capsys, str(trace_file), "--json", "--capacity", "80,inf", "--eviction-policy", "all")
    (report,) = json.loads(out)
    assert code == 0
    assert [row["eviction_policy"] for row in report["rows"]] == [
        *EVICTION,
        "clairvoyant",
        "dead-first",
        "lru",
    ]
    assert report["rows"][-1]["cached"] == brute_force(source)
    assert report["rows"][-1]["drive"] == "replay"
    code, out, _ = run(capsys, str(trace_file), "--limit", "5")
    assert "5 requests" in out


def test_command_over_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "chat", "few-shot", "--schedule-policy", "all", "--capacity", "400", "--json")
    chat, few_shot = json.loads(out)
    assert code == 0
    assert [row["schedule_policy"] for row in chat["rows"]] == list(SCHEDULE)
    assert all(row["worst_wait"] is not None for row in few_shot["rows"])
    assert few_shot["prefixes"][0]["text"].startswith("Answer the questions.")


def test_an_early_break_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rules = "You are a careful assistant who answers briefly. You never invent facts. Be polite."
    lines = [
        json.dumps({"messages": [
            {"role": "system", "content": f"It is {number % 24:02d}:{7 * number % 60:02d}. {rules}"},
            {"role": "user", "content": "Who are you?"},
        ]})
        for number in range(20)
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    code, out, _ = run(capsys, str(path))
    assert code == 0
    assert "sharing breaks early: 20 prompts part at token" in out
    assert "'00:00' (line 1)" in out
    assert ". You are a careful" in out


@pytest.mark.parametrize("kind", ["empty file", "header of a recording", "sessions", "none"])
def test_what_asks_nothing_is_an_error(
    make_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"sessions": []}' if kind == "sessions" else "")
    if kind == "header of a recording":
        Recorder(make_engine()).save(path)
    name = "none" if kind == "none" else str(path)
    figure = tmp_path / "empty.html"
    for more in ([], ["--drive", "schedule"], ["--json"], ["--workers", "2"], ["--figure", str(figure)]):
        code, out, err = run(capsys, name, *more)
        assert (code, out) == (2, "")
        assert f"there is no request in {name}" in err
    assert not figure.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "name a workload or a file"),
        (["no-such-workload"], "no-such-workload"),
        (["chat", "--eviction-policy", "lruu"], "lruu"),
        (["chat", "--schedule-policy", "lpm,shortest"], "shortest"),
        (["chat", "--capacity", "12,x"], "capacity must be a whole number, got 'x'"),
        (["chat", "--capacity", "0"], "capacity must be at least 1, got 0"),
        (["chat", "--capacity", "8", "--page-size", "16"], "capacity must be at least 16, got 8"),
        (["chat", "--page-size", "1,,2"], "1,,2"),
        (["chat", "--page-size", "0"], "page size must be at least 1, got 0"),
        (["chat", "--drive", "backwards"], "backwards"),
        (["chat", "--limit", "0"], "limit must be at least 1, got 0"),
        (["chat", "--step-ms", "-1"], "step_ms must be above 0, got -1.0"),
        (["chat", "--max-running", "0"], "max_running must be at least 1, got 0"),
        (["chat", "--tokenizer", "./nowhere"], "nowhere"),
        (["chat", "--diff", "a", "b"], "'chat' is one too many"),
        (["--diff", "missing.txt", "b"], "missing.txt"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_a_malformed_trace_stops_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = small_trace(tmp_path / "t.jsonl", 3)
    path.write_text(path.read_text(encoding="utf-8") + '\n{"timestamp": 1', encoding="utf-8")
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "")
    assert "line 4: no JSON" in err


def test_diff_takes_texts_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hello there"}]}
    (tmp_path / "a.json").write_text(json.dumps(asked), encoding="utf-8")
    (tmp_path / "b.txt").write_text("<|im_start|>user\nHello you<|im_end|>\n", encoding="utf-8")
    code, out, _ = run(capsys, "--diff", str(tmp_path / "a.json"), str(tmp_path / "b.txt"))
    assert code == 0
    assert "«" in out
    assert json.loads(run(capsys, "--diff", "Hello", "Hello", "--json")[1])["better"] is None


def test_the_figure_opens_offline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "out.html"
    code, _, err = run(capsys, "chat", "--schedule-policy", "all", "--figure", str(path))
    page = path.read_text(encoding="utf-8")
    assert code == 0
    assert str(path) in err
    assert "<script src=" not in page
    assert "Plotly.newPlot" in page


def test_lines_of_the_figure(source: Source) -> None:
    pytest.importorskip("plotly")
    from viz.simulate import figure, hit_rate_lines, optimum_lines, wait_bars

    plan = Plan(capacities=(50, 100, None), eviction_policies=("lru", "lfu"))
    report = simulate(source, plan).as_dict()
    lines = hit_rate_lines(report)
    assert [line.name for line in lines] == ["lru", "lfu"]
    # The run without a limit belongs to both.
    assert [list(line.x) for line in lines] == [["50", "100", "unlimited"]] * 2
    assert [line.y[-1] for line in lines] == [report["rows"][-1]["hit_rate"]] * 2
    (best,) = optimum_lines(report)
    assert set(best.y) == {report["rows"][-1]["hit_rate"]}
    assert figure([]).data == ()
    assert {trace.name for trace in figure([report, report]).data} >= {"talks: lru", "talks: optimum"}
    over_time = simulate(source, Plan("schedule", (80,), schedule_policies=("fcfs", "lpm"))).as_dict()
    mean, worst = wait_bars(over_time)
    assert list(mean.x) == ["80, lru, fcfs", "80, lru, lpm"]
    assert list(worst.y) == [row["worst_wait"] for row in over_time["rows"]]


def test_no_torch_no_viz() -> None:
    code = (
        "import sys; from minirad.__main__ import main; "
        "assert main(['simulate', 'chat', '--limit', '3']) == 0; "
        "assert main(['simulate', '--diff', 'a b', 'a c']) == 0; "
        "assert main(['theorem', '--trees', '3', '--skip-online']) == 0; "
        "loaded = {'torch', 'transformers', 'plotly', 'viz'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
