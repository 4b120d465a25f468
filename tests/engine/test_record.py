"""Recordings: replay arrives at every state, files cut off anywhere load, equal runs record equally."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from support import ROOT, PlainCache, drive

from minirad import recording_file
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import SamplingParams
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame, json_line

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TIGHT = {"kv_tokens": 32, "page_size": 2, "chunk_tokens": 5, "max_running": 4}


def eventful(engine: CheckedEngine) -> None:
    """A run in which about everything happens that can."""
    sampled = SamplingParams(max_new_tokens=9, temperature=1.0, n=3, ignore_eos=True)
    greedy = SamplingParams(max_new_tokens=10, ignore_eos=True)
    engine.add_request([*PROMPT, 13], sampled)
    engine.add_request([*PROMPT[:6], 20], greedy, extra_key=("bc", "a"))
    engine.add_request([*PROMPT[:6], 21, 22], greedy, priority=1)
    for _ in range(6):
        engine.step()
    doomed = engine.add_request([30] * 8, greedy)
    drive(engine)
    engine.abort(doomed)
    pin = engine.pin(PROMPT[:4])
    engine.generate([PROMPT, [30] * 9], greedy)
    engine.unpin(pin)
    engine.cache.eviction_policy = "lfu"
    engine.generate([31] * 20, greedy)
    engine.abort(engine.add_request(PROMPT, greedy))
    engine.step()
    engine.flush_cache()
    engine.generate(PROMPT, greedy)


def eventful_below(engine: CheckedEngine) -> None:
    """What happens between the tiers, and new weights: copied, demoted, loaded, computed again, evicted."""
    reply = SamplingParams(max_new_tokens=2, ignore_eos=True)
    whole = SamplingParams(max_new_tokens=2, ignore_eos=True, logprob_start=0)  # no hit is of use to it
    for others in ([30, 31], [32, 33, 34, 35]):
        for params in (reply, reply, reply, whole):
            engine.generate(PROMPT * 2, params)
            if params is reply:
                engine.generate(others * 2, params)
        engine.generate([others[0] + 10] * 26, reply)
        engine.generate(PROMPT * 2, reply)
        engine.generate([others[0] + 11] * 26, reply)
        engine.generate(PROMPT * 2, whole)
    engine.update_weights(engine.model)
    for first in range(40, 46):
        for _ in range(3):
            engine.generate([first, first + 1] * 4, reply)


def kinds(recording: Recording) -> set[str]:
    return {type(event).__name__ for frame in recording for event in frame.events}


@pytest.fixture
def run(make_engine: MakeEngine) -> Recorder:
    engine = make_engine(**TIGHT)
    with Recorder(engine, keyframe_every=6) as recording:
        eventful(engine)
    return recording


@pytest.mark.parametrize("every", [1, 4, 1000])
def test_any_step_is_a_keyframe_and_replay(make_engine: MakeEngine, every: int) -> None:
    engine = make_engine(
        **TIGHT, host_kv_tokens=32, host_write="write_through_selective", load_back_threshold=2
    )
    recording = Recorder(engine, keyframe_every=every)
    states: list[Any] = []
    engine.bus.subscribe(ev.StepEnded, lambda event: states.append((len(recording), engine.snapshot())))
    with recording:
        eventful(engine)
        eventful_below(engine)
    missing = {
        kind.__name__ for kind in ev.EVENT_TYPES if kind.__module__ == "minirad.observe.events"
    } - kinds(recording)
    assert missing == set(), "this run is meant to show every kind of event"
    # A handler of one kind is called before one of all kinds: the frame's own index.
    for index, state in states:
        assert recording.state(index) == state
    assert sum(frame.keyframe is not None for frame in recording) == len(recording) // every
    replay = ReplayState(recording.header["start"])
    for frame in recording:
        for event in frame.events:
            replay.apply(event)
        assert frame.keyframe is None or replay.snapshot() == frame.keyframe
    assert replay.snapshot() == engine.snapshot() == recording.state(len(recording) - 1)
    assert recording.state(-1) == recording.header["start"]
    for index in (-2, len(recording)):
        with pytest.raises(ValueError, match=f"frame {index} is not in this recording"):
            recording.state(index)


def test_a_state_does_not_change_when_replay_goes_on(run: Recorder) -> None:
    replay = run.replay_to(5)
    before = replay.snapshot()
    text = json.dumps(before)
    for frame in run.frames[6:]:
        for event in frame.events:
            replay.apply(event)
    assert json.dumps(before) == text


def test_what_happens_between_steps_belongs_to_the_next_frame(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with Recorder(engine) as recording:
        engine.add_request(PROMPT, SamplingParams(max_new_tokens=1))
        engine.step()
        engine.add_request(PROMPT, SamplingParams(max_new_tokens=1))
        engine.abort("R2")
    assert next(type(event).__name__ for event in recording.frames[0].events) == "RequestAdded"
    assert [type(event).__name__ for event in recording.frames[-1].events] == [
        "RequestAdded",
        "RequestAborted",
    ]
    assert recording.state(len(recording) - 1) == engine.snapshot()
    engine.step()
    assert len(recording) == 2, "a closed recorder hears nothing"
    assert not engine.bus.wants(ev.StepEnded)


def test_scenes_begin_where_they_are_announced(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    with Recorder(engine) as recording:
        recording.scene("Ünïcödé 🙂\u2028 first\nline")
        engine.generate(PROMPT)
        recording.scene("second")
        engine.add_request(PROMPT)
        recording.scene("third, after a cut")
        engine.step()
    titles = {frame.index: frame.scene for frame in recording if frame.scene is not None}
    assert list(titles.values()) == ["Ünïcödé 🙂\u2028 first\nline", "second", "third, after a cut"]
    recording.save(tmp_path / "run.jsonl")
    assert Recorder.load(tmp_path / "run.jsonl").frames == recording.frames


def test_a_recorder_that_starts_in_the_middle(make_engine: MakeEngine) -> None:
    engine = make_engine(**TIGHT)
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=6, n=2))
    engine.step()
    engine.step()
    with Recorder(engine, keyframe_every=2) as recording:
        drive(engine)
    assert recording.state(len(recording) - 1) == engine.snapshot()


# ---------------------------------------------------------------------- files


def test_a_file_is_the_same_saved_at_the_end_or_written_as_it_runs(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(**TIGHT)
    with Recorder(engine, tmp_path / "live.jsonl", keyframe_every=5) as recording:
        eventful(engine)
    recording.save(tmp_path / "saved.jsonl")
    assert (tmp_path / "live.jsonl").read_bytes() == (tmp_path / "saved.jsonl").read_bytes()
    loaded = Recorder.load(tmp_path / "live.jsonl")
    assert loaded.header == recording.header
    assert loaded.frames == recording.frames
    assert [e.describe() for f in loaded for e in f.events] == [
        e.describe() for f in recording for e in f.events
    ]


def test_a_file_is_readable_while_it_is_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    with Recorder(engine, tmp_path / "live.jsonl") as recording:
        for steps in range(1, 4):
            engine.add_request(PROMPT, SamplingParams(max_new_tokens=0))
            engine.step()
            assert len(Recorder.load(tmp_path / "live.jsonl")) == len(recording) == steps


def test_a_file_cut_off_anywhere_gives_its_whole_frames(run: Recorder, tmp_path: Path) -> None:
    del run.frames[14:]
    run.frames[3] = dataclasses.replace(run.frames[3], scene="Ünïcödé 🙂")
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    run.save(path)
    data = path.read_bytes()
    ends = [at for at, byte in enumerate(data) if byte == 0x0A]
    emoji = data.index("🙂".encode())
    around = {end + shift for end in ends for shift in (-1, 0, 1, 2)} | set(range(emoji, emoji + 5))
    for size in sorted(around | set(range(0, len(data), 997))):
        cut.write_bytes(data[:size])
        if size < ends[0]:
            with pytest.raises(ValueError, match="does not begin with the header"):
                Recorder.load(cut)
            continue
        loaded = Recorder.load(cut)
        whole = sum(end <= size for end in ends) - 1  # a line without its end is whole, too
        assert loaded.frames == run.frames[:whole]
        told = f"{cut}, line {whole + 2}: the last line is cut off; "
        told += f"what was before it can be seen ({whole} steps)"
        at_an_end = size in ends or size - 1 in ends or size > len(data)
        assert loaded.missing == ("" if at_an_end else told)


def test_bytes_that_are_no_text_are_told_as_what_they_are(run: Recorder, tmp_path: Path) -> None:
    """json takes NUL bytes for UTF-32."""
    path = tmp_path / "run.jsonl"
    run.save(path)
    first, second, rest = path.read_bytes().split(b"\n", 2)
    for line, told in ((b"\0" * 64, "no JSON: Expecting value at column 1"), (b"{\xff}", "no UTF-8 text")):
        path.write_bytes(b"\n".join((first, second, line, rest)))
        assert f"{path}, line 3: {told}" in Recorder.load(path).missing


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: ["", *lines], "does not begin with the header"),
        (lambda lines: ["[1, 2]", *lines[1:]], "does not begin with the header"),
        (lambda lines: ['{"minirad": 99}', *lines[1:]], "has schema 99, this version reads 1"),
        (lambda lines: [*lines[:2], lines[2][:-9], *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], '{"frame": 1}', *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], '{"frame":1,"step":1,"events":[[]]}', *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], '{"frame":1,"step":1,"events":[["Nonsense",1]]}', *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], '{"frame":1,"step":1,"events":[["StepEnded",1]]}', *lines[3:]], "line 3"),
    ],
)
def test_a_damaged_file_is_read_up_to_its_line_or_refused(
    run: Recorder, tmp_path: Path, damage: Callable[[list[str]], list[str]], message: str
) -> None:
    path = tmp_path / "run.jsonl"
    run.save(path)
    path.write_text("\n".join(damage(path.read_text(encoding="utf-8").split("\n"))), encoding="utf-8")
    if message == "line 3":
        loaded = Recorder.load(path)
        assert loaded.frames == run.frames[:1], "what is whole before it can be seen"
        assert loaded.missing.startswith(f"{path}, line 3: ")
        assert loaded.missing.endswith("what was before it can be seen (1 steps)")
    else:
        with pytest.raises(ValueError, match=message):
            Recorder.load(path)


def test_frames_that_do_not_follow_one_another_end_the_reading(run: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run.save(path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for changed in ([*lines[:3], *lines[4:]], [*lines[:3], lines[4], lines[3], *lines[5:]]):
        path.write_text("".join(changed), encoding="utf-8")
        loaded = Recording.load(path)
        assert loaded.frames == run.frames[:2]
        assert f"{path}, line 4: this is frame 3, but frame 2 is due" in loaded.missing
    path.write_text("".join([lines[0], *lines[2:]]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"run\.jsonl, line 2: this is frame 1, but frame 0 is due"):
        Recording.load(path)
    path.write_text('{"minirad": 1, "start": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match='no "start" with a "tree"'):
        Recording.load(path)


class FullDisk:
    """A raw file with room for so many bytes; the last write ends half-way."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        done = self._file.write(data[: self.room])
        self.room -= done
        return int(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_disk_full_for_a_moment_leaves_no_hole(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path = make_engine(**TIGHT), tmp_path / "run.jsonl"
    with Recorder(engine, path, keyframe_every=4) as recording:
        engine.generate(PROMPT, SamplingParams(max_new_tokens=2))
        before = len(recording)
        disk = recording._file._file = FullDisk(recording._file._file, 300)
        engine.add_request(PROMPT, SamplingParams(max_new_tokens=3))
        failures = 0
        for _ in range(4):
            try:
                engine.step()
            except OSError as error:
                failures += 1
                assert str(path) in str(error)
                kept = Recorder.load(path)
                assert kept.frames == recording.frames[: len(kept)] and len(kept) >= before
        assert failures > 1
        disk.room = 1 << 30
        drive(engine)
        engine.generate(PROMPT, SamplingParams(max_new_tokens=2))
    loaded = Recorder.load(path)
    assert loaded.frames == recording.frames and loaded.missing == ""


def test_who_is_told_that_the_file_ends_goes_on_recording(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, path, told = make_engine(**TIGHT), tmp_path / "run.jsonl", list[OSError]()
    with Recorder(engine, path, notes={"title": "old"}, tell=told.append) as recording:
        engine.generate(PROMPT, SamplingParams(max_new_tokens=2))
        before = len(recording)
        assert recording._file is not None
        recording._file._file = FullDisk(recording._file._file, 300)
        engine.generate(PROMPT, SamplingParams(max_new_tokens=9))
        recording.header["notes"]["title"] = "new"  # what there is no room for either
        assert [str(path) in str(error) for error in told] == [True] and len(recording) > before + 2
    kept = Recorder.load(path)
    assert before <= len(kept) < len(recording) and not kept.missing, "whole lines only"
    assert kept.frames == recording.frames[: len(kept)] and len(told) == 1


def test_a_header_that_cannot_be_renewed_is_told(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "run.jsonl", list[OSError]()
    with Recorder(make_engine(), path, notes={"title": "old"}, tell=told.append) as recording:
        recording.header["notes"]["title"] = "new"
        monkeypatch.setattr(shutil, "copyfileobj", raising(OSError(28, "No space left on device")))
    assert len(told) == 1 and Recorder.load(path).header["notes"] == {"title": "old"}


def raising(error: OSError) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error

    return fail


def test_a_text_that_is_no_unicode_does_not_keep_its_frame_out(run: Recorder, tmp_path: Path) -> None:
    run.frames[2] = dataclasses.replace(run.frames[2], scene="half a pair: \ud800")
    run.save(tmp_path / "run.jsonl")
    loaded = Recorder.load(tmp_path / "run.jsonl")
    assert len(loaded) == len(run) and loaded.frames[2].scene == "half a pair: ?"


def header_of(run: Recorder, **changes: Any) -> str:
    header = json.loads(json.dumps(run.header))
    for path, value in changes.items():
        *inside, last = path.split("__")
        at = header
        for name in inside:
            at = at[name]
        at[last] = value
    return json.dumps(header)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start__kv_tokens": 2 * 10**9}, "kv_tokens must be a whole number from 0 to 67108864"),
        ({"start__kv_tokens": 60_000_000}, "kv_tokens 60000000 are more than 4194304 pages"),
        ({"config": None}, "config must be an object, got None"),
        ({"start__tree__page_size": 0}, "page_size must be a whole number from 1"),
        ({"start__requests": {"Rx": {}}}, "a request has a name such as R3"),
        ({"model__tokenizer": 3}, "tokenizer must be a text or null"),
        ({"notes": {"title": "\ud800"}}, "title must be a text"),
    ],
)
def test_a_header_is_bounded_and_typed(
    run: Recorder, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(header_of(run, **changes) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"run\.jsonl, line 1: .*{message}"):
        Recorder.load(path)


def test_a_line_that_is_too_long_is_refused_at_once(
    run: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    run.save(path)
    first, second, rest = path.read_bytes().split(b"\n", 2)
    for line, told in (
        (b" " * (recording_file.LONGEST_LINE + 5), "longer than 64 MiB"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"frame":1,"step":1,"events":[' + b"[]," * 2_100_000 + b"[]]}", "at most 2000000 are read"),
        (b'{"frame":1,"step":NaN,"events":[]}', "NaN is no number"),
    ):
        path.write_bytes(b"\n".join((first, second, line, rest)))
        loaded = Recorder.load(path)
        assert len(loaded) == 1 and f"{path}, line 3: " in loaded.missing and told in loaded.missing


def test_a_frame_that_does_not_fit_the_state_is_named(run: Recorder) -> None:
    strange = Frame(0, 0, (ev.NodeLocked(99, (99,), 3),))
    recording = Recording(run.header, [strange, *run.frames[1:]])
    for ask in (recording.check, lambda: recording.replay_to(0)):
        with pytest.raises(ValueError, match="frame 0 does not follow from those before it: NodeLocked"):
            ask()
    run.check()


def test_two_runs_with_one_seed_give_identical_recordings_apart_from_the_clock(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    def lines(name: str, **changes: Any) -> list[str]:
        engine = make_engine(**{**TIGHT, **changes})
        with Recorder(engine, keyframe_every=7) as recording:
            eventful(engine)
        for at, frame in enumerate(recording.frames):
            events = tuple(
                dataclasses.replace(e, seconds=0.0) if isinstance(e, ev.StepEnded) else e
                for e in frame.events
            )
            recording.frames[at] = dataclasses.replace(frame, events=events)
        recording.save(tmp_path / name)
        return (tmp_path / name).read_text(encoding="utf-8").split("\n")

    assert lines("a") == lines("b")
    assert lines("a")[1:] != lines("c", seed=7)[1:]


def test_every_event_goes_through_a_line_of_json_and_says_itself(run: Recorder) -> None:
    for frame in run:
        assert Frame.from_json(frame.to_json()) == frame
        for event in frame.events:
            sentence = event.describe()
            assert sentence
            assert not sentence.endswith(".")
            assert "\n" not in sentence


# ---------------------------------------------------------------------- trees on their own, silent trees


def exercise(cache: Any, cut: Callable[[], None]) -> None:
    """Inserts, splits, grows, locks, evicts; a cut after each."""

    def insert(tokens: list[int], first: int) -> Any:
        result = cache.insert(RadixKey(tokens), list(range(first, first + len(tokens))))
        cut()
        return result.last_node

    insert([1, 2, 3, 4], 10)
    node = insert([1, 2, 7], 20)
    cut()
    cache.inc_lock_ref(node)
    cut()
    insert([1, 2, 7, 8], 30)
    cache.match_prefix(RadixKey([1, 2, 3]))
    cut()
    cache.evict(2)
    cut()
    cache.dec_lock_ref(node)
    cut()
    insert([9, 9], 40)
    cache.reset()
    cut()


def test_a_cache_on_its_own_is_recorded_cut_by_cut() -> None:
    cache = RadixCache()
    with Recorder(cache, keyframe_every=3) as recording:
        exercise(cache, recording.cut)
    replay = ReplayState(recording.header["start"])
    for frame in recording:
        for event in frame.events:
            replay.apply(event)
        assert frame.keyframe is None or replay.snapshot() == frame.keyframe
    assert {
        "NodeInserted",
        "NodeSplit",
        "NodeLocked",
        "NodeUnlocked",
        "NodeEvicted",
        "CacheFlushed",
    } <= kinds(recording)


def structure(state: Any) -> dict[int, tuple[Any, ...]]:
    names = ("parent", "tokens", "slots", "lock_ref")
    return {node["id"]: tuple(node[name] for name in names) for node in state["tree"]["nodes"]}


def test_a_silent_cache_on_its_own_is_compared_at_each_cut() -> None:
    silent = PlainCache()
    with Recorder(silent) as recording:
        exercise(silent, recording.cut)
    assert len(recording) > 5
    assert all(frame.keyframe is not None for frame in recording)
    assert {"NodeInserted", "NodeSplit", "NodeLocked", "NodeUnlocked", "NodeEvicted"} <= kinds(recording)
    replay = ReplayState(recording.header["start"])
    for frame in recording:
        for event in frame.events:
            replay.apply(event)
        assert structure(replay.snapshot()) == structure(frame.keyframe)


def test_the_recorder_derives_the_events_of_a_silent_tree_in_an_engine(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    def run(cache: Any) -> Recorder:
        engine = make_engine(cache, **{**TIGHT, "page_size": 1})
        with Recorder(engine) as recording:
            engine.generate([PROMPT, PROMPT[:3] + [20] * 3, [30] * 9], SamplingParams(max_new_tokens=6))
            engine.generate([[31] * 20, PROMPT], SamplingParams(max_new_tokens=6))
            assert structure({"tree": engine.snapshot()["tree"]}) == structure(
                recording.state(len(recording) - 1)
            )
        return recording

    recording = run(PlainCache())
    assert {"NodeInserted", "NodeSplit", "NodeEvicted", "NodeLocked", "NodeUnlocked"} <= kinds(recording)
    assert all(isinstance(frame.events[-1], ev.StepEnded) for frame in recording)
    recording.save(tmp_path / "run.jsonl")
    loaded = Recorder.load(tmp_path / "run.jsonl")
    assert loaded.frames == recording.frames
    assert loaded.state(4) == recording.state(4)


def test_notes_are_kept_and_may_come_later(tmp_path, make_engine):
    engine, labels = make_engine(kv_tokens=64), {}
    path = tmp_path / "run.jsonl"
    with Recorder(engine, path, notes={"workload": "chat", "labels": labels}) as recorder:
        labels[engine.add_request([3, 4, 5, 6])] = "chat 2 · turn 1"
        engine.step()
        early = Recorder.load(path)
        assert early.header["notes"] == {"workload": "chat", "labels": {}}, "not known then"
    late = Recorder.load(path)
    assert late.header["notes"] == {"workload": "chat", "labels": {"R1": "chat 2 · turn 1"}}
    assert late.frames == recorder.frames and late.header["start"] == early.header["start"]
    assert not list(tmp_path.glob("*.new"))
    recorder.save(tmp_path / "copy.jsonl")
    assert Recorder.load(tmp_path / "copy.jsonl").header == late.header
    assert "notes" not in Recorder(engine).header


def nested(deep: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(deep):
        found = [found]
    return found


UNREADABLE = {
    "NaN": {"loss": math.nan},
    "infinite": {"rows": [1, -math.inf]},
    "numpy's NaN": {"loss": np.float32("nan")},
    "a set": {"a": {1}},
    "a key": {(1, 2): 3},
    "a key that is NaN": {math.nan: 1},
    "bytes": {"a": b"x"},
    "too deep": {"a": nested(100_000)},
    "no title": {"title": 5},
    "no labels": {"labels": {"R1": None}},
    "too long a number": {"a": 10**5000},
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_notes_that_could_not_be_read_again_are_not_written(tmp_path, make_engine, what):
    """Nor do they cost the file that is there; what comes later leaves the header as it was."""
    engine, path, notes = make_engine(kv_tokens=64), tmp_path / "run.jsonl", {"workload": "chat"}
    path.write_text("kept")
    for where in (path, None):
        with pytest.raises(ValueError, match="notes must be a dict that JSON can hold"):
            Recorder(engine, where, notes=UNREADABLE[what])
    assert path.read_text() == "kept"
    recorder = Recorder(engine, path, notes=notes)
    engine.generate([3, 4, 5], SamplingParams(max_new_tokens=2))
    notes.update(UNREADABLE[what])
    with pytest.raises(ValueError, match="notes must be a dict that JSON can hold"):
        recorder.close()
    with pytest.raises(ValueError, match="notes must be a dict that JSON can hold"):
        recorder.save(path)
    read = Recorder.load(path)
    assert read.frames == recorder.frames and read.header["notes"] == {"workload": "chat"}


@pytest.mark.parametrize("number", [math.nan, math.inf, np.float64("nan")])
def test_no_line_holds_a_number_that_json_has_not(number):
    with pytest.raises(ValueError):
        json_line({"keyframe": {"tree": {"tick": number}}})


@pytest.mark.parametrize(
    "opens",
    [
        "from minirad import Recording; frames = Recording.load(path).frames",
        "from minirad.observe.recording import Recording; frames = Recording.load(path).frames",
        "from minirad.recording_file import read_recording; frames = read_recording(path).frames",
        "from minirad.record import Recording; frames = Recording.load(path).frames",
    ],
)
def test_a_fresh_process_opens_a_recording(make_engine: Any, tmp_path: Path, opens: str) -> None:
    """Nothing else has been imported that would make the kinds of events known."""
    path = tmp_path / "run.jsonl"
    engine = make_engine()
    with Recorder(engine, path):
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    code = f"path = {str(path)!r}\n{opens}\nassert frames"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_only_has_a_step_is_no_engine() -> None:
    with pytest.raises(ValueError, match=r"an engine or a tree can be recorded, not range\(0, 3\)"):
        Recorder(range(3))
