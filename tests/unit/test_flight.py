"""The flight recorder of a stream: frames, chapters in memory, files on disk."""

from __future__ import annotations

import errno
import gc
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minirad.bench.fleet import _Server
from minirad.fleet.flight import Flight, FlightRecording
from minirad.fleet.follow import Delivered, Gap, Restart, State, Told, Trouble
from minirad.fleet.wire import Batch, Cleared, Decoder, Record, Removed, Stored, WireError
from minirad.observe.event import ReplayState
from minirad.observe.fleet_events import (
    BatchesTaken,
    GapSeen,
    NodeLeft,
    NodeStored,
    RankCleared,
    RankRestarted,
    RankStateSeen,
    TroubleSeen,
)
from minirad.observe.recording import Recording
from minirad.observe.snapshot import is_fleet

SIZE = 4


def tokens(number: int) -> tuple[int, ...]:
    return tuple(number * 7 % 1000 + at for at in range(SIZE))


def delivered(rank: int, seq: int, *events: Record, **more: Any) -> Delivered:
    return Delivered(rank, seq, Batch(1e9 + seq, events, rank, **more), False)


def stored(*hashes: int, parent: int | None = None) -> Stored:
    return Stored(hashes, parent, tuple(map(tokens, hashes)), SIZE)


class Server:
    """A rank that stores chats and removes the oldest ones from their ends: some `held` blocks stay."""

    def __init__(self, rank: int, held: int = 60) -> None:
        self.rank, self.held, self.seq = rank, held, -1
        self.rng = random.Random(rank)
        self.chats: list[list[int]] = []
        self.next = rank << 20

    def batch(self) -> Delivered:
        chat = self.rng.choice(self.chats) if self.chats and self.rng.random() < 0.6 else []
        if not chat:
            self.chats.append(chat)
        new = tuple(range(self.next, self.next + self.rng.randrange(1, 4)))
        self.next += len(new)
        events: list[Record] = [stored(*new, parent=chat[-1] if chat else None)]
        chat.extend(new)
        while sum(map(len, self.chats)) > self.held:
            events.append(Removed((self.chats[0].pop(),)))
            if not self.chats[0]:
                self.chats.pop(0)
        self.seq += 1
        return delivered(self.rank, self.seq, *events)


class Watched(Flight):
    """A flight of which every state after a frame is known, from the replay of its own events."""

    def __init__(self, **options: Any) -> None:
        super().__init__(("tcp://h:1", "tcp://h:2", "tcp://h:3"), **options)
        self.chapters: list[FlightRecording] = [self.recording]
        self.largest = 0

    def take(self, told: Told, now: float | None = None) -> None:
        super().take(told, now)
        self.largest = max(self.largest, self.recording.numbers)
        if self.recording is not self.chapters[-1]:
            self.chapters.append(self.recording)


def fly(flight: Flight, batches: int, step: Callable[[random.Random], float]) -> None:
    """So many batches of three ranks, `step` seconds apart."""
    rng, servers, now = random.Random(0), [Server(rank) for rank in range(3)], 0.0
    for server in servers:
        flight.take(State(server.rank, "live"), now)
    for _ in range(batches):
        now += step(rng)
        flight.take(rng.choice(servers).batch(), now)
        flight.tick(now)
    flight.close(now + 1)


# ---------------------------------------------------------------------- days


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """2,000 batches in small files and small chapters."""
    path = tmp_path_factory.mktemp("flight") / "run.jsonl"
    flight = Watched(
        block_size=SIZE, path=path, most_bytes=60_000, most_files=5, most_numbers=20_000,
        notes={"title": "a day"},
    )  # fmt: skip
    fly(flight, 2000, lambda rng: rng.choice((0.01, 0.05, 0.3, 1.0)))
    return flight


def test_memory_is_bounded_and_chapters_go_on_with_the_same_states(day: Watched) -> None:
    assert len(day.chapters) > 3 and [each.chapter for each in day.chapters] == list(
        range(1, 1 + len(day.chapters))
    )
    assert day.largest <= 21_000
    for old, new in pairwise(day.chapters):
        old.check()
        starts = [at for at in range(len(old)) if old.state(at) == new.header["start"]]
        assert starts, "a chapter starts with a state of the one before it"
        shared = old.frames[starts[-1] + 1 :]
        assert 0.3 < len(shared) / len(old) < 0.7
        assert [frame.events for frame in shared] == [frame.events for frame in new.frames[: len(shared)]]
        assert [frame.index for frame in new.frames] == list(range(len(new)))
    last = day.chapters[-1]
    assert last.numbers - last.numbers_of_start >= sum(
        len(e.tokens) for frame in last for e in frame.events if isinstance(e, NodeStored)
    )
    assert any(frame.keyframe is not None for frame in last) and last.frames[0].keyframe is None
    tree = last.state(len(last) - 1)["tree"]
    assert tree["nodes"] == day.tree.snapshot()["nodes"]


def test_files_are_bounded_and_each_is_a_whole_recording(day: Watched) -> None:
    files = day.files
    assert len(files) == 5 and sorted(files[0].parent.iterdir()) == sorted(files)
    assert files[-1].name > files[0].name != "run.jsonl"
    read = [Recording.load(file) for file in files]
    for file, recording in zip(files, read, strict=True):
        assert file.stat().st_size <= 60_000 and not recording.missing
        recording.check()
        assert is_fleet(recording.header["start"]) and recording.header["notes"]["title"] == "a day"
    for old, new in pairwise(read):
        assert old.state(len(old) - 1) == new.header["start"]
    last = day.chapters[-1]
    assert read[-1].state(len(read[-1]) - 1) == last.state(len(last) - 1)


def test_a_file_is_read_after_a_cut_at_any_byte(day: Watched, tmp_path: Path) -> None:
    whole = day.files[-1].read_bytes()
    first = whole.index(b"\n") + 1
    rng = random.Random(3)
    for at in [first, *(rng.randrange(first + 1, len(whole)) for _ in range(12))]:
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(whole[:at])
        recording = Recording.load(cut)
        assert len(recording) == whole[:at].count(b"\n") - 1
        assert not recording.missing or "the last line is cut off" in recording.missing


def test_files_that_were_there_stay_and_older_ones_of_this_run_go(tmp_path: Path) -> None:
    theirs = tmp_path / "run-3.jsonl"
    theirs.write_text("not ours")
    flight = Flight(block_size=SIZE, path=tmp_path / "run.jsonl", most_bytes=60_000, most_files=2)
    fly(flight, 900, lambda rng: 0.2)
    assert theirs.read_text() == "not ours" and theirs not in flight.files
    assert len(flight.files) == 2 and {*flight.files, theirs} == set(tmp_path.iterdir())


def test_keyframes_are_rare_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = Flight(block_size=SIZE, path=tmp_path / "run.jsonl")
    fly(flight, 300, lambda rng: 0.2)
    (recording,) = map(Recording.load, flight.files)
    assert not any(frame.keyframe for frame in recording)
    monkeypatch.setattr("minirad.fleet.flight.KEYFRAME_EVERY", 20_000)
    flight = Flight(block_size=SIZE, path=tmp_path / "more.jsonl")
    fly(flight, 700, lambda rng: 0.2)
    (recording,) = map(Recording.load, flight.files)
    kept = [frame.index for frame in recording if frame.keyframe is not None]
    assert 2 <= len(kept) <= 8 and not recording.missing
    size = sum(len(frame.to_json()) for frame in recording if frame.keyframe is None)
    assert flight.files[0].stat().st_size < 1.3 * size


# ---------------------------------------------------------------------- frames


def frames_of(flight: Flight) -> list[list[str]]:
    return [[type(event).__name__ for event in frame.events] for frame in flight.recording]


def test_one_frame_for_each_batch_at_low_rates_and_one_for_many_at_high_ones() -> None:
    flight = Flight(("tcp://h:1",), block_size=SIZE)
    for seq in range(5):
        flight.take(delivered(0, seq, stored(seq)), seq * 0.11)
    assert len(flight.recording) == 5
    for seq in range(5, 105):
        flight.take(delivered(0, seq, stored(seq)), 1 + seq * 0.005)
    flight.tick(2.0)
    assert 9 < len(flight.recording) < 18
    last: Any = flight.recording.frames[-1].events[-1]
    assert isinstance(last, BatchesTaken) and last.batches[0] > 5 and "batches of rank 0" in last.kind
    assert flight.recording.frames[0].events[-1].describe() == "rank 0, batch 0: 1 block stored, 0 removed"
    flight.take(delivered(0, 105, stored(105)), 2.01)
    assert flight.recording.frames[-1].events[-1] is last, "it waits for more"
    flight.tick(2.2)
    flight.tick(9.9)
    state = flight.recording.state(len(flight.recording) - 1)
    assert state["step"] == 106 and state["tree"]["ranks"][0]["seq"] == 105
    assert state["tree"]["ranks"][0]["media"] == {"GPU": 106}


def test_what_becomes_nothing_within_a_frame_is_not_told() -> None:
    flight = Flight(block_size=SIZE)
    flight.take(delivered(0, 0, stored(1), Removed((1,))), 0.0)
    assert frames_of(flight) == [["BatchesTaken"]]
    assert flight.recording.frames[0].events[0].describe() == "rank 0, batch 0: 1 block stored, 1 removed"


def test_gaps_troubles_restarts_and_states_are_events_of_frames() -> None:
    flight = Flight(("tcp://h:1", "tcp://h:2"), block_size=SIZE)
    flight.take(State(0, "live"), 0.0)
    flight.take(delivered(0, 7, stored(1, 2), unknown=3, trouble="an event is 5"), 1.0)
    flight.take(Gap(0, 8, 9, "the replay buffer no longer holds them"), 2.0)
    flight.take(Gap(0, 10, 10, "garbage"), 2.01)
    flight.take(Trouble(0, "x" * 9000), 2.02)
    flight.take(delivered(0, 11, Cleared(), stored(5)), 2.03)
    flight.take(Restart(0, "message 0 came after message 11"), 2.04)
    flight.take(delivered(0, 0, stored(6)), 2.05)
    flight.close(3.0)
    flight.recording.check()
    kinds = frames_of(flight)
    assert kinds == [
        ["RankStateSeen", "BatchesTaken"],
        ["TroubleSeen", "NodeStored", "BatchesTaken"],
        ["GapSeen", "BatchesTaken"],
        ["GapSeen", "TroubleSeen", "RankCleared", "NodeLeft", "NodeStored", "BatchesTaken"],
        ["RankRestarted", "NodeLeft", "NodeStored", "BatchesTaken"],
    ]
    first, *_ = flight.recording.frames[0].events
    assert first.describe() == "rank 0 at tcp://h:1 is followed live"
    gap = flight.recording.frames[2].events[0]
    assert gap.describe() == "batches 8 to 9 of rank 0 are lost: the replay buffer no longer holds them"
    (rank,) = flight.recording.state(len(kinds) - 1)["tree"]["ranks"]
    assert rank == {
        "rank": 0, "where": "tcp://h:1", "state": "live", "seq": 0, "batches": 3, "replayed": 0, "lost": 3,
        "unknown": 3, "media": {"GPU": 1}, "maybe": 0,
    }  # fmt: skip


def test_a_rank_that_is_silent_now_and_then_is_no_frame() -> None:
    flight = Flight(("tcp://h:1", "tcp://h:2"), block_size=SIZE)
    for rank in range(2):
        flight.take(State(rank, "live"), 0.0)
    flight.tick(0.2)
    for seq in range(4):
        flight.take(delivered(0, seq, stored(seq)), 10.0 * seq + 1)
        flight.take(State(0, "silent"), 10.0 * seq + 3)
        flight.tick(10.0 * seq + 4)
        flight.take(State(0, "live"), 10.0 * seq + 4.5)
        flight.tick(10.0 * seq + 9.9)
    assert frames_of(flight) == [
        ["RankStateSeen", "BatchesTaken"],
        ["RankStateSeen", "BatchesTaken"],
        *[["NodeStored", "BatchesTaken"]] * 4,
    ]
    flight.take(State(1, "silent"), 50.0)
    flight.tick(54.9)
    assert len(flight.recording) == 6
    flight.tick(55.0)
    flight.take(State(1, "lost"), 56.0)
    assert [frame.events[0].describe() for frame in flight.recording.frames[6:]] == [
        "rank 1 at tcp://h:2 is silent",
        "rank 1 at tcp://h:2 is lost",
    ]
    flight.recording.check()


def test_gaps_that_follow_each_other_are_one_and_troubles_of_a_frame_are_few() -> None:
    flight = Flight(block_size=SIZE)
    flight.take(State(0, "live"), 0.0)
    for number in range(50):
        flight.take(Gap(1, number, number, "garbage"), 0.01)
        flight.take(Trouble(0, f"nothing can be read in {number}"), 0.01)
    flight.take(Gap(1, 50, 59, "garbage"), 0.01)
    flight.close(1.0)
    events = flight.recording.frames[-1].events
    assert sum(isinstance(event, TroubleSeen) for event in events) == 3
    assert [e.last - e.first + 1 for e in events if isinstance(e, GapSeen)] == [1, 1, 1, 57]
    flight.recording.check()


def test_a_publisher_that_begins_anew_with_every_message_is_told_ten_times_a_second() -> None:
    flight = Flight(block_size=SIZE)
    for number in range(1000):  # as two publishers on one port do
        flight.take(Restart(0, "message 0 came after message 0"), number / 1000)
        flight.take(delivered(0, 0, stored(number)), number / 1000)
    flight.close(1.0)
    assert 10 <= len(flight.recording) <= 22
    kinds = Counter(type(event) for frame in flight.recording for event in frame.events)
    assert kinds[RankRestarted] <= len(flight.recording)
    flight.recording.check()
    state = flight.recording.state(len(flight.recording) - 1)
    assert [node["tokens"] for node in state["tree"]["nodes"]] == [list(tokens(999))]
    assert state["tree"]["ranks"][0]["batches"] == 1000


def test_blocks_beyond_the_bound_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirad.fleet.blocks.MOST_BLOCKS", 10)
    flight = Flight(block_size=SIZE)
    for seq in range(3):
        flight.take(delivered(0, seq, stored(*range(20 * seq, 20 * seq + 20))), float(seq))
    told = [e.text for frame in flight.recording for e in frame.events if isinstance(e, TroubleSeen)]
    assert len(told) == 1 and told[0].endswith("blocks: the others are left out")
    assert (
        flight.recording.frames[0].events[-1].describe().endswith("20 blocks stored, 0 removed, 11 ignored")
    )


def test_the_first_block_says_how_large_blocks_are(tmp_path: Path) -> None:
    flight = Flight(("tcp://h:1",), path=tmp_path / "run.jsonl")
    flight.take(State(0, "live"), 0.0)
    assert flight.recording.header["start"]["tree"]["page_size"] == 1
    flight.take(delivered(0, 0, stored(1)), 1.0)
    flight.close(2.0)
    tree = flight.recording.header["start"]["tree"]
    assert (tree["page_size"], len(tree["ranks"]), flight.recording.chapter) == (SIZE, 1, 2)
    read = Recording.load(tmp_path / "run.jsonl")
    assert flight.files == [tmp_path / "run.jsonl"] and not read.missing
    assert read.header == flight.recording.header and read.frames == flight.recording.frames


def test_many_tokens_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirad.fleet.flight.LARGEST_FRAME", 40)
    flight = Flight(block_size=SIZE)
    for seq in range(40):
        flight.take(delivered(0, seq, stored(seq)), 0.001 * seq)
    flight.close(0.05)
    assert 4 <= len(flight.recording) <= 8


# ---------------------------------------------------------------------- a full disk


class Full:
    """A file that takes only so many bytes in all."""

    def __init__(self, file: Any, disk: dict[str, int]) -> None:
        self.file, self.disk = file, disk

    def write(self, data: bytes) -> int:
        part = data[: self.disk["free"]]
        if data and not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.disk["free"] -= len(part)
        done: int = self.file.write(part)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    free = {"free": 1 << 40}
    opened = Path.open

    def limited(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        file = opened(path, mode, *args, **more)
        return Full(file, free) if "w" in mode or "x" in mode else file

    monkeypatch.setattr(Path, "open", limited)
    return free


def test_a_full_disk_is_said_and_writing_goes_on_in_a_new_file(tmp_path: Path, disk: dict[str, int]) -> None:
    flight = Flight(block_size=SIZE, path=tmp_path / "run.jsonl")
    server, now = Server(0), 0.0
    states: list[Any] = []

    def some(count: int) -> None:
        nonlocal now
        for _ in range(count):
            now += 1
            flight.take(server.batch(), now)
            states.append(flight.recording.state(len(flight.recording) - 1))

    some(20)
    assert not flight.trouble
    disk["free"] = 100
    some(20)
    assert flight.trouble.startswith(f"{tmp_path / 'run.jsonl'} cannot be written (No space left on device)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl"], "no file without its first line"
    disk["free"] = 1 << 40
    some(20)
    flight.close(now)
    assert not flight.trouble and len(flight.recording) == 60
    first, second = map(Recording.load, flight.files)
    assert flight.files[1].name == "run-2.jsonl"
    assert not first.missing and not second.missing, "no torn line is left"
    assert first.state(len(first) - 1) == states[len(first) - 1] and 20 <= len(first) < 25
    assert second.state(len(second) - 1) == states[-1] and 15 <= len(second) <= 20
    assert second.header["start"] == states[59 - len(second)]


def test_a_first_file_that_cannot_be_written_is_an_error(tmp_path: Path, disk: dict[str, int]) -> None:
    with pytest.raises(OSError):
        Flight(path=tmp_path / "nowhere" / "run.jsonl")
    disk["free"] = 10
    with pytest.raises(OSError, match="No space left"):
        Flight(path=tmp_path / "run.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_frame_that_nobody_could_read_begins_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minirad.fleet.flight.LONGEST_LINE", 2000)
    flight = Flight(block_size=SIZE, path=tmp_path / "run.jsonl")
    flight.take(delivered(0, 0, stored(1)), 0.0)
    flight.take(delivered(0, 1, stored(*range(2, 200), parent=1)), 1.0)
    flight.take(delivered(0, 2, Removed(tuple(range(199, 2, -1)))), 2.0)
    assert "the state takes 0 MiB" in flight.trouble
    flight.take(delivered(0, 3, stored(300)), 90.0)
    flight.take(delivered(0, 4, stored(301)), 91.0)
    flight.close(92.0)
    assert not flight.trouble
    read = [Recording.load(file) for file in flight.files]
    assert [len(each) for each in read] == [1, 2] and not any(each.missing for each in read)
    assert read[1].state(1) == flight.recording.state(len(flight.recording) - 1)


def test_states_that_were_given_out_stay_as_they_are() -> None:
    flight = Flight(block_size=SIZE)
    server, seen = Server(0), []
    for seq in range(200):
        flight.take(server.batch(), float(seq))
        replay = flight.recording.replay_to(len(flight.recording) - 1)
        assert isinstance(replay, ReplayState)
        seen.append(replay.snapshot())
    assert [flight.recording.state(at) for at in range(len(seen))] == seen
    kinds = {type(event) for frame in flight.recording for event in frame.events}
    assert {NodeStored, NodeLeft, BatchesTaken} <= kinds and not kinds & {
        RankCleared,
        RankRestarted,
        RankStateSeen,
    }


def test_what_goes_leaves_nothing_for_the_collector() -> None:
    """A stream of days runs with rare collections: what is in a circle of references would stay for long."""
    servers = [_Server(rank, 500) for rank in range(2)]
    flight = Flight(["a", "b"])
    gc.collect()
    gc.disable()
    try:
        for number in range(400):
            rank = number % 2
            batch = Batch(1.0, tuple(servers[rank].event() for _ in range(10)), rank)
            flight.take(Delivered(rank, number // 2, batch, False), now=number * 0.05)
        assert flight.tree.ranks[0].removed > 1000
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(type(thing).__name__ for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {"Cell", "Node", "Block"} & left.keys(), left


def any_value(rng: random.Random) -> Any:
    texts = ("", "x" * 10_000, "\x1b<b>", b"", b"y" * 65)
    return rng.choice((None, True, -1, 0, 2**63, 1.5, float("nan"), *texts, [], [[]], {}))


def any_event(rng: random.Random) -> Any:
    """An event of few blocks, of which now and then a field is anything."""
    names: list[Any] = [1, 2, 3, 4, -5, b"six", 2**64 - 7]
    hashes, size = rng.sample(names, rng.choice((1, 1, 2, 3))), rng.choice((0, 1, 1, 2))
    ids = [rng.randrange(2) for _ in range(len(hashes) * size)] if rng.random() < 0.8 else []
    event: dict[str, Any] = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": rng.choice([None, *names]),
        "token_ids": [[id, id] for id in ids] if rng.random() < 0.1 else ids, "block_size": size,
        "medium": rng.choice((None, None, "CPU", "?", "a+b")),
        "lora_name": rng.choice((None, None, None, "a")),
    }  # fmt: skip
    if rng.random() < 0.4:
        event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": rng.choice((None, None, "CPU"))}
    if rng.random() < 0.1:
        event[rng.choice(list(event))] = any_value(rng)
    return event if rng.random() < 0.98 else any_value(rng)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_was_told_can_be_read_again(tmp_path: Path, seed: int) -> None:
    import msgspec

    rng, decoder = random.Random(seed), Decoder()
    flight = Flight(("tcp://h:1",), path=tmp_path / "fleet.jsonl", most_bytes=20_000)
    for seq in range(40):
        events = [any_event(rng) for _ in range(rng.randrange(1, 4))]
        sent = [rng.choice((1.0, float("nan"), 1e300, None)), events, rng.choice((0, -1, "x"))]
        try:
            flight.take(Delivered(0, seq, decoder.decode(msgspec.msgpack.encode(sent)), False), float(seq))
        except WireError as error:
            flight.take(Gap(0, seq, seq, str(error)), float(seq))
        flight.tree.check()
    flight.close(100.0)
    flight.recording.check()
    last = flight.recording.state(len(flight.recording) - 1)
    assert last["tree"]["nodes"] == flight.tree.snapshot()["nodes"]
    for file in flight.files:
        assert not Recording.load(file).missing
