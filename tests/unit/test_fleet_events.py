"""What is told of a stream: sentences, what a file holds, and what is refused in one from a stranger."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minirad.observe import fleet_events as fe
from minirad.observe.event import EVENT_TYPES, Event
from minirad.observe.reading import check_state, event_fields, parse_event
from minirad.observe.recording import Recording
from minirad.observe.replay import CheckedReplay, Frame
from viz.trace import Trace
from viz.words import summary

# As recordings hold them, and what each says. No row may be changed, or recordings of before are lost.
HELD: tuple[tuple[list[Any], str], ...] = (
    (["NodeStored", 1, 0, [3, 4, 5, 6], 4, 2, False, 0, "", True, ["0:GPU", "2:GPU"], 1],
     "ranks 0 and 2 stored 2 blocks (4 tokens) as n1 below the root"),
    (["NodeStored", 2, 1, [7, 8, 8, 9], 2, 1, True, 1, "lora-a", True, ["1:CPU+GPU"], 1],
     "rank 1 stored 1 block (2 tokens) in CPU and GPU as n2 below n1 in namespace lora-a"),
    (["NodeStored", 3, 0, [], 0, 1, False, 0, "", False, [], 1],
     "n3 below the root stands for a block that was never told: what follows on it was"),
    (["NodeStored", 4, 3, [], 16, 1, False, 0, "", True, ["0:CPU"], 1],
     "rank 0 stored 1 block (16 tokens) in CPU as n4 below n3"),
    (["NodeExtended", 2, [5, 6, 6, 7], 2, 1, 2], "n2 grew by 1 block (2 tokens)"),
    (["NodeDivided", 5, 1, 2, 1, 2], "n1 divided after 1 block: n5 is its upper part"),
    (["NodeExtended", 2, [1, 1], 1, 1, 2], "n2 grew by 1 block (1 token)"),
    (["NodeShortened", 2, 1, 1, 2], "the last block of n2 (1 token) left: no rank holds it any more"),
    (["NodeLost", 5, 2, "GPU", "", 1, 2], "rank 2 removed n5 (1 block) from GPU"),
    (["NodeHeld", 5, 2, "", "GPU", 1, 2], "rank 2 stored n5 (1 block) in GPU"),
    (["NodesJoined", 5, 1, 2], "n5 and n1 are one node, n1"),
    (["NodeHeld", 1, 0, "GPU", "CPU+GPU", 2, 3], "rank 0 stored n1 (2 blocks) in CPU: it stays on GPU"),
    (["NodeLost", 1, 0, "CPU+GPU", "CPU", 2, 3], "rank 0 removed n1 (2 blocks) from GPU: it is on CPU"),
    (["NodeLost", 1, 2, "GPU", "?", 2, 3],
     "rank 2 removed n1 (2 blocks) from GPU: it may be there still, as it was told twice"),
    (["NodeLost", 1, 2, "?", "", 2, 3], "rank 2 removed n1 (2 blocks), which may have been there"),
    (["NodeMoved", 4, 2, 4], "n4 and what is below it found its parent: n2"),
    (["NodeLeft", 4, ["0:CPU"], 1, 4], "rank 0 removed n4 (1 block): no rank holds it any more"),
    (["NodeLeft", 3, [], 1, 4], "n3 (1 block) left: nothing is below it any more"),
    (["GapSeen", 1, 120, 124, "the replay buffer no longer holds them"],
     "batches 120 to 124 of rank 1 are lost: the replay buffer no longer holds them"),
    (["RankRestarted", 1, "message 0 came after message 9"],
     "rank 1 began anew (message 0 came after message 9): what it held is dropped"),
    (["RankCleared", 2], "rank 2 cleared all its blocks"),
    (["RankStateSeen", 0, "tcp://host:5557", "live"], "rank 0 at tcp://host:5557 is followed live"),
    (["TroubleSeen", 0, "an event's medium is 5"], "rank 0: an event's medium is 5"),
    (["BatchesTaken", 3, [0, 2], [17, 4], [2, 1], [1, 0], [0, 3], 12, 1300, 2, 0.1, 1.5e9],
     "3 batches of 2 ranks: 12 blocks stored, 1,300 removed, 1 replayed, 2 ignored, 3 not known"),
)  # fmt: skip
KINDS = {
    name for name, kind in vars(fe).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}  # fmt: skip


def recording() -> Recording:
    events = [parse_event(held) for held, _ in HELD]
    header = {
        "minirad": 1, "config": {}, "model": {"parameters": None, "tokenizer": ""}, "notes": {},
        "start": fe.empty_state(2),
    }  # fmt: skip
    return Recording(header, [Frame(0, 3, tuple(events))])


@pytest.fixture(scope="module")
def run() -> Recording:
    return recording()


@pytest.mark.parametrize(("held", "sentence"), HELD, ids=[held[0] for held, _ in HELD])
def test_every_event_says_and_is_held(held: list[Any], sentence: str) -> None:
    event = parse_event(held)
    assert event.describe() == sentence
    assert json.loads(json.dumps(event_fields(event))) == held
    tone, together = type(event).together([event])
    assert together and tone in ("", "new", "hit", "split", "evict", "retract")
    assert type(event) not in EVENT_TYPES and not event.by_engine


def test_the_table_has_every_kind_and_tags_name_one_kind_each() -> None:
    assert {held[0] for held, _ in HELD} == KINDS
    ours = [kind.word.tag for kind in EVENT_TYPES]
    theirs = [getattr(fe, name).word.tag for name in KINDS]
    assert len({*ours, *theirs}) == len(ours) + len(theirs)


def test_a_recording_of_all_kinds_is_checked_and_drawn(run: Recording) -> None:
    run.check()
    state = run.state(0)
    check_state(state)
    first, second, third = state["tree"]["ranks"]
    assert (first["media"], first["state"], first["seq"]) == ({"CPU": 2}, "live", 17)
    assert (second["media"], second["lost"]) == ({"CPU": 2, "GPU": 2}, 5)
    assert (third["media"], third["maybe"], third["unknown"]) == ({}, 0, 3)
    one, two = state["tree"]["nodes"]
    assert (one["tokens"], one["held"], one["blocks"]) == ([3, 4, 5, 6], {"0": "CPU"}, 2)
    assert (two["units"], two["pairs"], state["tree"]["spaces"]) == (4, True, ["", "lora-a"])
    view = Trace(run).view("step", 1)
    assert view.title == "step 3 (3 batches of 2 ranks)" and view.status[3] == "evicted"
    assert summary(view.events)[1].startswith("batches 120 to 124 of rank 1 are lost")
    assert Trace(run).marks()["gap"] == [0]


def test_a_fresh_process_reads_it(run: Recording, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    run.save(file)
    code = (
        "import sys; from minirad.observe.recording import Recording;"
        "r = Recording.load(sys.argv[1]); r.check(); print(len(r), r.missing, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.split() == ["1", "False"]


TOGETHER: tuple[tuple[list[Event], str], ...] = (
    ([fe.NodeStored(n, 0, (1, 2), 2, 1, False, 0, "", True, (f"{n}:GPU",), 1) for n in (1, 2, 4, 5, 6)],
     "ranks 1, 2, 4 and 2 more stored 5 blocks (10 tokens) as n1, n2, n4 and 2 more"),
    ([fe.NodeExtended(1, (1,), 1, 1, 1), fe.NodeExtended(1, (1,), 1, 1, 1)],
     "n1 grew by 2 blocks (2 tokens)"),
    ([fe.NodeLost(1, 0, "GPU", "", 1, 1), fe.NodeLost(2, 1, "GPU", "", 1, 1)],
     "ranks 0 and 1 removed n1 and n2"),
    ([fe.NodeLeft(1, ("0:GPU",), 3, 1), fe.NodeLeft(2, (), 1, 1)],
     "n1 and n2 left (4 blocks): no rank holds them any more"),
    ([fe.NodeShortened(1, 2, 1, 1), fe.NodeShortened(2, 4, 2, 1)],
     "n1 and n2 lost 3 blocks (6 tokens) at their ends"),
    ([fe.GapSeen(0, 1, 4, ""), fe.GapSeen(3, 1, 1, "")], "5 batches of ranks 0 and 3 are lost"),
    ([fe.RankCleared(1), fe.RankCleared(0)], "ranks 0 and 1 cleared all blocks"),
    ([fe.RankStateSeen(0, "", "live"), fe.RankStateSeen(1, "", "live")], "ranks 0 and 1 are followed live"),
    ([fe.NodeDivided(3, 1, 1, 1, 1), fe.NodeDivided(4, 2, 1, 1, 1)], "n1 and n2 divided"),
    ([fe.NodeMoved(3, 1, 1), fe.NodeMoved(4, 1, 1)], "n3 and n4 found their parents"),
    ([fe.TroubleSeen(0, "no msgpack"), fe.TroubleSeen(0, "x")], "rank 0: no msgpack (and 1 more)"),
)  # fmt: skip


@pytest.mark.parametrize(("events", "sentence"), TOGETHER, ids=[type(e[0]).__name__ for e, _ in TOGETHER])
def test_many_of_a_kind_in_one_sentence(events: list[Event], sentence: str) -> None:
    assert type(events[0]).together(events)[1] == sentence


# ---------------------------------------------------------------------- from a stranger

HOSTILE_EVENTS: tuple[tuple[list[Any], str], ...] = (
    (["NodeStored", 1, 0, [1], 1, 1, False, 0, "", True, [], 1], "node 1 is stored twice"),
    (["NodeStored", 9, 8, [1], 1, 1, False, 0, "", True, [], 1], "there is no node 8"),
    (["NodeStored", 9, 0, [1], 2, 1, False, 0, "", True, [], 1], "1 tokens, 2 positions and 1 blocks"),
    (["NodeStored", 9, 0, [], 1 << 50, 1, False, 0, "", True, [], 1], "which do not fit"),
    (["NodeStored", 9, 0, [1], 1, 2, False, 0, "", True, [], 1], "which do not fit"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 7, "", True, [], 1], "namespace 7 of 1"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "x" * 2001, True, [], 1], "has 2001 characters"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["GPU"], 1], 'held is told as "0:GPU"'),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["0:GPU", "0:CPU"], 1], "names a rank twice"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["1:GPU", "0:CPU"], 1], "in their order"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["9999:GPU"], 1], "a rank is 0 to 4095"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["0:<b>"], 1], "media are a text such as"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, ["0:GPU+CPU"], 1], "are not in order"),
    (["NodeStored", 9, 0, [], 4, 1, False, 0, "", False, [], 1], "has more than a place"),
    (["NodeStored", 9, 0, [1], 1, 1, False, 0, "", True, "0:GPU", 1], "held must be a list of texts"),
    (["NodeExtended", 1, [1, 2, 3], 2, 1, 1], "which do not fit"),
    (["NodeExtended", 1, [], 2, 1, 1], "which do not fit"),
    (["NodeExtended", 3, [1], 1, 1, 1], "which do not fit"),
    (["NodeShortened", 1, 4, 2, 1], "2 of 2 blocks of node 1 cannot leave so"),
    (["NodeShortened", 1, -1, 1, 1], "cannot leave so"),
    (["NodeDivided", 9, 1, 4, 2, 1], "node 1 of 2 blocks is divided at 2 blocks"),
    (["NodeDivided", 2, 1, 1, 1, 1], "node 2 is made twice"),
    (["NodeDivided", 9, 1, -1, 1, 1], "is divided at"),
    (["NodesJoined", 1, 1, 1], "node 1 is not below node 1"),
    (["NodesJoined", 1, 2, 1], "differ and cannot be one"),
    (["NodeHeld", 1, 0, "", "GPU", 2, 1], "rank 0 holds node 1 in 'GPU', not in ''"),
    (["NodeHeld", 1, 1, "", "GPU", 1, 1], "node 1 has 2 blocks, not 1"),
    (["NodeHeld", 1, 0, "GPU", "", 2, 1], "NodeHeld cannot tell 'GPU' to ''"),
    (["NodeLost", 1, 1, "", "GPU", 2, 1], "NodeLost cannot tell"),
    (["NodeHeld", 1, 1, "", "", 2, 1], "cannot tell"),
    (["NodeHeld", 3, 0, "", "GPU", 1, 1], "node 3 is not seen"),
    (["NodeHeld", 1, -1, "", "GPU", 2, 1], "a rank is 0 to"),
    (["NodeLeft", 1, [], 2, 1], "node 1 was held by"),
    (["NodeLeft", 1, ["0:GPU"], 3, 1], "node 1 has 2 blocks"),
    (["NodeMoved", 1, 2, 1], "node 1 would be its own ancestor"),
    (["NodeMoved", 1, 77, 1], "there is no node 77"),
    (["GapSeen", 0, 5, 4, ""], "a gap from batch 5 to 4"),
    (["GapSeen", 0, 0, (1 << 63) - 1, ""], "more batches are lost than can be counted"),
    (["RankStateSeen", 0, "", "fine"], "a rank is connecting, replaying"),
    (["BatchesTaken", 5, [0], [0], [1], [0], [0], 0, 0, 0, 0.0, 0.0], "step 5 does not follow"),
    (["BatchesTaken", 1, [0], [], [1], [0], [0], 0, 0, 0, 0.0, 0.0], "not one row for each rank"),
    (["BatchesTaken", 2, [0, 0], [0, 0], [1, 1], [0, 0], [0, 0], 0, 0, 0, 0.0, 0.0], "not one row"),
    (["BatchesTaken", 1, [0], [0], [1], [0], [0], -1, 0, 0, 0.0, 0.0], "a number is too large"),
    (["BatchesTaken", 1, [0], [-1], [1], [0], [0], 0, 0, 0, 0.0, 0.0], "seqs must be a list"),
)  # fmt: skip


@pytest.fixture
def replay() -> CheckedReplay:
    state = CheckedReplay(fe.empty_state(2))
    for held in (
        ["NodeStored", 1, 0, [3, 4, 5, 6], 4, 2, False, 0, "", True, ["0:GPU"], 0],
        ["NodeStored", 2, 1, [3, 4], 2, 1, False, 0, "", True, ["1:GPU"], 0],
        ["NodeStored", 3, 0, [], 0, 1, False, 0, "", False, [], 0],
    ):
        state.apply(parse_event(held))
    return state


@pytest.mark.parametrize(("held", "told"), HOSTILE_EVENTS)
def test_an_event_that_cannot_be_is_refused(replay: CheckedReplay, held: list[Any], told: str) -> None:
    before = replay.snapshot()
    with pytest.raises(ValueError) as error:
        replay.apply(parse_event(held))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert replay.snapshot() == before


def test_an_event_of_a_stream_does_not_fit_an_engine() -> None:
    engine = CheckedReplay(
        {
            "step": 0, "kv_tokens": 8, "free": 8, "waiting": [], "requests": {},
            "tree": {"page_size": 1, "eviction_policy": "lru", "tick": 0, "nodes": []},
        }
    )  # fmt: skip
    for held, _ in HELD:
        with pytest.raises(ValueError):
            engine.apply(parse_event(held))


HOSTILE_STATES: tuple[tuple[str, Any, str], ...] = (
    ("tree ranks", 5, "ranks must be a list"),
    ("tree ranks 0 rank", 1, "rank 1 is not in its place"),
    ("tree ranks 0 state", "fine", "state must be connecting or"),
    ("tree ranks 0 seq", -2, "seq must be"),
    ("tree ranks 0 media", {"GPU": 1}, "rank 0 has"),
    ("tree ranks 0 media", {"GPU": True}, "has True blocks"),
    ("tree ranks 0 media", {"<b>": 1}, "media are a text"),
    ("tree ranks 0 media", {"CPU+GPU": 1}, "is no medium"),
    ("tree ranks 0 maybe", 3, "rank 0 has"),
    ("tree ranks 0 where", "x" * 3000, "a text of at most 2000"),
    ("tree spaces", [5], "spaces must be a list of texts"),
    ("tree spaces", [], "namespace 0 of 0"),
    ("tree nodes 0 held", {"7": "GPU"}, "held by rank 7, which is not there"),
    ("tree nodes 0 held", ["0:GPU"], "held must be"),
    ("tree nodes 0 held", {"00": "GPU"}, "a rank is 0 to"),
    ("tree nodes 0 held", {0: "GPU"}, "a rank is 0 to"),
    ("tree nodes 0 held", {"0": "GPU GPU"}, "media are a text"),
    ("tree nodes 0 units", 3, "which do not fit"),
    ("tree nodes 0 blocks", 0, "which do not fit"),
    ("tree nodes 0 slots", [1], "slots must be an empty list"),
    ("tree nodes 0 pairs", True, "which do not fit"),
    ("tree nodes 0 seen", False, "has more than a place"),
    ("tree nodes 0 parent", 2, "its own ancestor"),
    ("tree nodes 0 namespace", -1, "namespace -1 of"),
    ("tree host_tokens", 5, "the tree has no 'host_free'"),
    ("kv_tokens", 5, "a stream has no pool"),
)  # fmt: skip


@pytest.mark.parametrize(("where", "value", "told"), HOSTILE_STATES)
def test_a_state_that_cannot_be_is_refused(replay: CheckedReplay, where: str, value: Any, told: str) -> None:
    state = replay.snapshot()
    state = json.loads(json.dumps(state))
    check_state(state)
    *path, last = where.split()
    at: Any = state
    for name in path:
        at = at[int(name) if isinstance(at, list) else name]
    at[last] = value
    with pytest.raises(ValueError) as error:
        check_state(state)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_any_value_of_a_file_may_be_another_one(run: Recording, tmp_path: Path) -> None:
    """A changed file is read up to the change, or refused: with ValueError, and never otherwise."""
    frames = [Frame(at, 0, (event,)) for at, event in enumerate(run.frames[0].events)]
    keyframe = run.state(0)
    frames[-1] = Frame(len(frames) - 1, 3, frames[-1].events, keyframe)
    whole = Recording(run.header, frames)
    file = tmp_path / "changed.jsonl"
    whole.save(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    rng = random.Random(0)
    junk = [
        None,
        True,
        -1,
        0,
        1,
        2,
        1 << 62,
        1 << 70,
        0.5,
        "",
        "x",
        "0:GPU",
        "?",
        [],
        [1],
        [[]],
        {},
        {"0": "?"},
    ]
    read = refused = 0
    for _ in range(300):
        number = rng.randrange(len(lines))
        line = json.loads(lines[number])
        _change(line, rng, junk)
        changed = [*lines[:number], json.dumps(line), *lines[number + 1 :]]
        file.write_text("\n".join(changed), encoding="utf-8")
        try:
            found = Recording.load(file)
            view = Trace(found).view("step")
            assert view.title and summary(view.events)[1]
            read += not found.missing
            refused += bool(found.missing)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 150 and read > 10


def _change(line: Any, rng: random.Random, junk: list[Any]) -> None:
    """Puts something else in one place of a value."""
    places: list[tuple[Any, Any]] = []

    def look(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in items:
            places.append((value, name))
            if isinstance(each, dict | list):
                look(each)

    look(line)
    where, name = rng.choice(places)
    where[name] = rng.choice(junk)
