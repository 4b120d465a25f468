"""One place per event: what a class says of itself is all that recorder, files, replay and pictures need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import CheckedEngine

from minirad.config import EngineConfig, SamplingParams
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.observe.event import EVENT_TYPES, ReplayState, event_type, forget
from minirad.observe.reading import event_fields, parse_event
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz import tree
from viz.notebook import panels
from viz.page import Page
from viz.trace import Trace, ids_as_text, summary
from viz.web.export import page_data
from viz.words import word_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def reply(new: int = 2, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **options)


# ---------------------------------------------------------------------- every kind there is


@pytest.fixture(scope="module")
def everything(tiny_model: LlamaModel) -> Recording:
    """A recorded run of some 65 frames in which every kind of event happens."""
    config = EngineConfig(
        kv_tokens=32, page_size=2, chunk_tokens=8, max_running=3, host_kv_tokens=16,
        host_write="write_through_selective", load_back_threshold=2,
    )  # fmt: skip
    engine = CheckedEngine(config, model=tiny_model)
    with Recorder(engine, keyframe_every=4) as recording:
        engine.add_request([*PROMPT, 13], reply(9, n=2, temperature=1.0))
        engine.add_request([*PROMPT[:6], 20], reply(12), extra_key="a")
        engine.add_request([*PROMPT[:6], 21, 22], reply(4))  # together they are more than there is room for
        while engine.has_work:
            engine.step()
        engine.abort(engine.add_request(PROMPT, reply()))
        for _ in range(2):
            engine.generate([PROMPT * 2], reply())  # hit often enough to be copied to the host
        engine.generate([[30] * 26], reply())
        engine.generate([PROMPT * 2], reply())  # loaded back
        engine.generate([[31] * 26], reply())
        engine.generate([PROMPT * 2], reply(logprob_start=0))  # computed again: no hit is of use to it
        for first in (40, 41):
            for _ in range(3):
                engine.generate([[first, first + 1] * 5], reply())
            engine.generate([[first + 5] * 26], reply())
        engine.set_eviction_policy("lfu")
        engine.update_weights(engine.model)
        engine.flush_cache()
    return recording


@pytest.fixture(scope="module")
def states(everything: Recording) -> list[State]:
    """The state after each frame, replayed from the start without a look at a keyframe."""
    replay, found = ReplayState(everything.header["start"]), []
    for frame in everything:
        for event in frame.events:
            replay.apply(event)
        found.append(replay.snapshot())
    return found


# As recordings hold them, and what each says. No row may be changed, or recordings of before are lost.
HELD: tuple[tuple[list[Any], str], ...] = (
    (["RequestAdded", "R1", [3, 4], 3, 0.0, 2, 0, 1, 1.0, 0, [], False, None, None, [], "", False],
     "R1 waits: 2 prompt tokens, up to 3 new, 2 samples in namespace 1"),
    (["RequestAdded", "R1", [3, 4], 3, 0.0, 1, 0, 1, 1.0, 0, [], False, None, None, [], "capitals", True],
     "R1 waits: 2 prompt tokens, up to 3 new under adapter capitals"),
    (["RequestAdmitted", "R5", 0, 2, 4, 3, 9, 2], "R5 matched 4 of 9 tokens, 6 to compute (attempt 2)"),
    (["RequestDeferred", "R6", "0 of 2 rows free"], "R6 has to wait: 0 of 2 rows free"),
    (["RequestForked", "R3.1", "R3", 2, 1], "R3.1 branches off R3 in row 2, 1 tail slot copied"),
    (["Committed", "R1", 1, 4, 6, 7, True],
     "R1 committed 7 tokens up to n1: 4 were there, 2 new, tail of 1 freed"),
    (["TokenSampled", "R1", 7, 5], "R1 sampled token 7 at position 5"),
    (["RequestRetracted", "R6", 8, 1, "R7"],
     "R6 retracted for R7, which has priority, after 1 new token: 8 private slots back to the pool"),
    (["RequestAborted", "R8", 1], "R8 aborted, 1 private slot freed"),
    (["RequestFinished", "R5", "length", 9, 0, 6],
     "R5 finished (length): 6 new tokens, 0 of 9 prompt tokens from the cache"),
    (["PrefixTouched", [1, 3], 2, True, None], "n1 → n3 hit at tick 2"),
    (["NodeInserted", 3, 2, [14], [12], 5, 0, 0], "1 token inserted as n3 below n2"),
    (["NodeGrown", 6, [38], [9], 16, 0], "n6 grew by 1 token"),
    (["NodeSplit", 3, 2, 2, 5], "n2 split at 2: n3 is its upper half"),
    (["NodeLocked", 1, [1], 8], "path to n1 locked: 8 tokens more protected"),
    (["NodeUnlocked", 1, [1], 0], "path to n1 unlocked: 0 tokens more evictable"),
    (["NodeEvicted", 1, 4, [6], "lru", "oldest", None], "n1 evicted, 1 slot freed: oldest"),
    (["BackupStarted", 3, [6, 7]], "copy of n3 to the host begins: 2 tokens"),
    (["BackupEnded", [4], False], "copy of n4 failed: no copy is kept"),
    (["NodeDemoted", 3, [6, 7], "lru", "oldest", 1],
     "n3 lives on the host only, 2 slots freed: oldest, next would be n1"),
    (["LoadStarted", [9, 4], [2, 3]], "n9 → n4 loaded back from the host: 2 tokens not computed again"),
    (["LoadEnded", [9, 4]], "n9, n4 arrived from the host"),
    (["NodeAdopted", 19, [8, 9]], "n19 was computed again and has 2 slots again"),
    (["HostEvicted", 5, 3, [8], "lru", "oldest", 3],
     "n5 evicted from the host, 1 host slot freed: oldest, next would be n3"),
    (["VersionBumped", 1, [0], [2]], "weights version 1: nothing that was cached before matches any more"),
    (["PolicyChanged", "lru", "lfu"], "eviction policy changed from lru to lfu"),
    (["CacheFlushed", 28], "cache flushed: 28 tokens forgotten"),
    (["SlotsAllocated", "R5", [9]], "1 slot allocated for R5"),
    (["SlotsFreed", [2], "tail"], "1 slot freed (tail)"),
    (["BatchScheduled", "mixed", ["R2", "R3"], [1, 4]], "mixed batch of 5 tokens: R2, R3"),
    (["StepEnded", 1, "prefill", 26, 0, 4, 2, 0.5],
     "step 1 (prefill): 4 protected, 0 evictable, 2 private, 26 free"),
)  # fmt: skip


@pytest.mark.parametrize(("held", "sentence"), HELD, ids=[held[0] for held, _ in HELD])
def test_every_event_says_is_held_and_replayed(
    held: list[Any], sentence: str, everything: Recording, states: list[State]
) -> None:
    event = parse_event(held)
    assert event.describe() == sentence and json.loads(json.dumps(event_fields(event))) == held
    kind = type(event)
    frames = [frame for frame in everything if any(type(e) is kind for e in frame.events)]
    assert frames, "the run is meant to show every kind"
    for found in (e for frame in frames for e in frame.events if type(e) is kind):
        assert parse_event(json.loads(json.dumps(event_fields(found)))) == found
    for frame in frames:
        assert everything.state(frame.index) == states[frame.index], (
            "from the nearest keyframe and from the start"
        )


@pytest.mark.parametrize("held", [held for held, _ in HELD], ids=[held[0] for held, _ in HELD])
def test_only_a_field_with_a_default_may_be_missing(held: list[Any]) -> None:
    """Recordings from before the field are shorter."""
    most = held
    for _ in range({"RequestAdded": 3, "RequestRetracted": 1}.get(held[0], 0)):
        held = held[:-1]
        assert json.loads(json.dumps(event_fields(parse_event(held))))[: len(held)] == held
    for wrong in (held[:-1], [*most, 0]):
        with pytest.raises(ValueError, match=rf"{held[0]} has \d+ fields, here there are {len(wrong) - 1}$"):
            parse_event(wrong)


def test_the_table_of_sentences_has_every_kind() -> None:
    # Those of ranks: test_ranks_digest; of drafts: tests/speculative.
    alone = {name for kind, name in ev.EVENT_TYPES.items() if kind.__module__ == ev.__name__}
    assert {held[0] for held, _ in HELD} == alone


def test_keyframes_are_what_the_events_lead_to(everything: Recording, states: list[State]) -> None:
    keyframes = {frame.index: frame.keyframe for frame in everything if frame.keyframe is not None}
    assert len(keyframes) == len(everything) // 4
    assert all(states[index] == keyframe for index, keyframe in keyframes.items())
    everything.check()


# ---------------------------------------------------------------------- a kind of one's own


@pytest.fixture
def node_named() -> Iterator[type[ev.Event]]:
    """A made-up kind of event. Nothing but this class and the listener below knows it."""

    @dataclass(frozen=True, slots=True)
    class NodeNamed(ev.Event):
        """A node was given a name."""

        node: int
        name: str

        word, status, mark = ev.Word("name", "new"), "grown", "split"
        headline = ev.Headline(1000, "new")

        def describe(self) -> str:
            return f"n{self.node} is called {self.name}"

        def apply(self, state: ReplayState) -> None:
            state.nodes[self.node]["name"] = self.name

        def check(self, state: ReplayState) -> None:
            if self.name in [node.get("name") for node in state.nodes.values()]:
                raise ValueError(f"there is a node called {self.name} already")

    yield NodeNamed
    forget(NodeNamed)
    assert event_type("NodeNamed") is None


@pytest.fixture
def named_run(tiny_model: LlamaModel, node_named: Any) -> Recording:
    """A run in which a listener tells of names."""
    engine = CheckedEngine(EngineConfig(kv_tokens=64), model=tiny_model)
    recording = Recorder(engine)

    def name(event: ev.Committed) -> None:
        if engine.bus.wants(node_named):
            engine.bus.emit(node_named(event.node, f"{event.request} {event.committed}"))

    engine.bus.subscribe(ev.Committed, name)
    with recording:
        engine.generate([PROMPT], reply())
    return recording


def test_a_new_event_is_recorded_and_replayed(named_run: Recording, node_named: Any, tmp_path: Path) -> None:
    told = [e for frame in named_run for e in frame.events if type(e) is node_named]
    assert [e.name for e in told] == ["R1 8", "R1 9"]
    named_run.save(tmp_path / "r.jsonl")
    loaded = Recording.load(tmp_path / "r.jsonl")
    assert loaded.frames == named_run.frames and not loaded.missing
    last = loaded.state(len(loaded) - 1)
    assert [node["name"] for node in last["tree"]["nodes"]] == ["R1 9"]
    twice = (tmp_path / "r.jsonl").read_text(encoding="utf-8").replace("R1 9", "R1 8")
    (tmp_path / "r.jsonl").write_text(twice, encoding="utf-8")
    assert "NodeNamed: there is a node called R1 8 already" in Recording.load(tmp_path / "r.jsonl").missing


def test_a_new_event_is_drawn(named_run: Recording, node_named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "svg", lambda text: text)  # Graphviz takes most of the time
    trace = Trace(named_run, ids_as_text)
    view = trace.view("step", 1)
    (event,) = (e for e in view.events if type(e) is node_named)
    sentence = "n1 is called R1 8"
    assert word_of(event) == ("name", "new", False)
    assert view.nodes[1]["name"] == "R1 8" and "grown" in {view.status[1], *view.also[1]}
    assert trace.marks()["split"] == [0, 1] and summary(view.events)[0] == "new"
    assert summary(view.events)[1].startswith(sentence)
    lines = {line["text"]: line for line in panels.event_lines(view)}
    assert lines[sentence]["tag"] == "name" and lines[sentence]["nodes"] == [1]
    exported = json.dumps(page_data(Page(trace)))
    assert f'"text": "{sentence}"' in exported and '"tag": "name"' in exported


def event_of(held: list[Any]) -> ev.Event:
    """An event as a recording's row holds it."""
    kind, *fields = held
    return event_type(kind)(*(tuple(each) if isinstance(each, list) else each for each in fields))


# Two events of one kind in one stretch, and what is told of them.
TOGETHER: tuple[tuple[list[Any], list[Any], str], ...] = (
    (["RequestAdded", "R49", [3, 4], 3, 0.0, 1, 0, 1, 1.0, 0, [], False, None, None, [], "", False],
     ["RequestAdded", "R50", [3], 3, 0.0, 1, 0, 1, 1.0, 0, [], False, None, None, [], "", False],
     "R49 and R50 wait"),
    (["RequestDeferred", "R6", "0 of 2 rows free"], ["RequestDeferred", "R7", "0 of 2 rows free"],
     "R6 and R7 have to wait"),
    (["RequestDeferred", "R6", "0 of 2 rows free"], ["RequestDeferred", "R6", "9 slots needed"],
     "R6 has to wait: 9 slots needed"),
    (["RequestAborted", "R4", 1], ["RequestAborted", "R5", 1], "R4 and R5 aborted, 2 private slots freed"),
    (["NodeInserted", 3, 2, [14], [12], 5, 0, 0], ["NodeInserted", 4, 0, [15], [13], 6, 0, 0],
     "2 tokens inserted as n3 and n4"),
    (["NodeGrown", 6, [38], [9], 16, 0], ["NodeGrown", 7, [38], [10], 16, 0], "n6 and n7 grew by 2 tokens"),
    (["BackupStarted", 3, [6, 7]], ["BackupStarted", 4, [8]],
     "copies of n3 and n4 to the host begin: 3 tokens"),
    (["BackupEnded", [3], True], ["BackupEnded", [4], True], "n3, n4 copied to the host"),
    (["BackupEnded", [3], False], ["BackupEnded", [4], True],
     "n4 copied to the host; copy of n3 failed: no copy is kept"),
    (["NodeAdopted", 3, [8, 9]], ["NodeAdopted", 4, [7]],
     "n3 and n4 were computed again and have 3 slots again"),
    (["HostEvicted", 5, 3, [8], "lru", "oldest", 3], ["HostEvicted", 3, 0, [9], "lru", "oldest", None],
     "n5 and n3 evicted from the host, 2 host slots freed: each the lru policy's next"),
    (["PolicyChanged", "lru", "lfu"], ["PolicyChanged", "lfu", "fifo"],
     "eviction policy changed from lru to lfu, then to fifo"),
    (["CacheFlushed", 28], ["CacheFlushed", 4], "cache flushed: 32 tokens forgotten"),
    (["BlocksLate", "R1", 1, 900], ["BlocksLate", "R2", 2, 900],
     "3 blocks from the disk are late: R1 and R2 compute instead"),
    (["LockPlanted", 3, 7], ["LockPlanted", 4, 8],
     "lock_ref of n3 was made 7 by hand, no other rank is told; "
     "lock_ref of n4 was made 8 by hand, no other rank is told"),
    (["RankRestarted", 1, ""], ["RankRestarted", 2, "new"],
     "ranks 1 and 2 began anew: what they held is dropped"),
)  # fmt: skip
# Kinds of which the last one says what is so now.
LAST_SAYS_ALL = {"VersionBumped", "RanksDiffered"}


@pytest.mark.parametrize(("first", "second", "sentence"), TOGETHER, ids=[first[0] for first, *_ in TOGETHER])
def test_all_of_a_kind_are_told_together(first: list[Any], second: list[Any], sentence: str) -> None:
    """Also with others around them that make no headline; only the last was told."""
    small = ev.SlotsFreed((2,), "tail")
    events = [small, event_of(first), small, event_of(second)]
    assert summary(events)[1] == sentence


def test_every_headline_has_words_for_many() -> None:
    """A new kind with a headline says how several of it are told."""

    def has_own(kind: Any, name: str) -> bool:
        return getattr(kind, name).__func__ is not getattr(ev.Event, name).__func__

    silent = {
        name for kind, name in EVENT_TYPES.items()
        if kind.headline.rank and not (has_own(kind, "together") or has_own(kind, "several"))
    }  # fmt: skip
    assert silent <= LAST_SAYS_ALL


def test_without_a_word_an_event_is_told_by_its_name() -> None:
    @dataclass(frozen=True, slots=True)
    class Nothing(ev.Event):
        def describe(self) -> str:
            return "nothing"

    try:
        assert Nothing.word == ("Nothing", "plain", True)
        assert Nothing().touches() == Nothing().about() == () and Nothing().tone() == ""
        assert summary([Nothing(), Nothing()]) == ("", "nothing")
    finally:
        forget(Nothing)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"__annotations__": {"status": "str"}}, "every event has a 'status', so no field can be called so"),
        ({"__annotations__": {"word": "str"}}, "every event has a 'word'"),
        ({"status": "named"}, "its status is 'named', not one of new, hit"),
        ({"mark": "name"}, "its mark is 'name', not one of split, evict, retract"),
    ],
)
def test_what_cannot_be_drawn_is_no_event(body: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=f"event Wrong: {told}"):
        type("Wrong", (ev.Event,), {"__slots__": (), **body})
    assert event_type("Wrong") is None


def test_two_events_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match=r"an event called NodeSplit already, in minirad\.observe\.events"):
        type("NodeSplit", (ev.Event,), {"__slots__": ()})
    assert event_type("NodeSplit") is ev.NodeSplit


def test_fields_may_be_declared_with_types_or_with_their_names() -> None:
    declared: list[tuple[str, Any]] = [
        ("n", int), ("least", int | None), ("many", tuple[int, ...]), ("few", "ev.Ints"), ("said", str),
    ]  # fmt: skip
    kind = make_dataclass("Declared", declared, bases=(ev.Event,), frozen=True)
    try:
        event = kind(1, None, (2, 3), (), "x")
        assert parse_event(json.loads(json.dumps(event_fields(event)))) == event
        with pytest.raises(ValueError, match="Declared: many must be a list of whole numbers"):
            parse_event(["Declared", 1, None, ["2"], [], "x"])
    finally:
        forget(kind)


def test_a_field_that_no_recording_can_hold_is_named(tmp_path: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class Odd(ev.Event):
        what: Mapping[str, int]

    try:
        with pytest.raises(TypeError, match=r"event Odd: a recording cannot hold what: Mapping\[str, int\]"):
            event_fields(Odd({}))
    finally:
        forget(Odd)


def test_a_bus_with_a_listener_to_all_wants_kinds_that_come_later() -> None:
    bus, heard = ev.EventBus(), []
    bus.subscribe(None, heard.append)

    @dataclass(frozen=True, slots=True)
    class Later(ev.Event):
        pass

    try:
        assert bus.wants(Later)
        bus.emit(Later())
        assert heard == [Later()]
    finally:
        forget(Later)
