"""What a tree with a disk tells: each sentence, what it does to a state, what a file may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minirad import RadixKey
from minirad.observe import disk_events as dv
from minirad.observe.event import EVENT_TYPES, ReplayState
from minirad.observe.reading import check_state, event_fields, parse_event
from minirad.observe.replay import CheckedReplay
from minirad.observe.snapshot import State, bare_snapshot
from minirad.tiers.hiradix_cache import HiRadixCache

# As recordings hold them, and what each says. No row may be changed, or recordings of before are lost.
HELD: tuple[tuple[list[Any], str], ...] = (
    (["BlocksRead", 3, 1, "R1", [7, 8], [4, 5], 9, 0, 1, 2000, 1500],
     "2 tokens of R1 read from the disk as n3 below n1: 1 block, 1.5 ms"),
    (["BlocksLate", "R1", 3, 500000],
     "3 blocks from the disk are late: R1 computes instead, after 500.0 ms"),
    (["BlocksWritten", 2, 128, 9000, 1234, 5, 70000],
     "128 tokens in 2 blocks written to the disk in 1.2 ms: 5 files there now"),
    (["BlocksDropped", 1, 900, "dropped", "the least recently used make room", 4, 3600],
     "1 block deleted from the disk: the least recently used make room"),
    (["BlocksDropped", 2, 0, "dropped", "nothing is written any more", 4, 3600],
     "2 blocks not written to the disk: nothing is written any more"),
    (["BlocksDropped", 1, 0, "broken", "it has other tokens", 4, 3600],
     "1 block on the disk skipped: it has other tokens"),
)  # fmt: skip


@pytest.fixture
def state() -> State:
    tree = HiRadixCache(1, host_tokens=16)
    tree.insert(RadixKey([5, 6]), [1, 2])
    request: State = {
        "row": -1, "node": None, "slots": [], "protected": 0, "prompt_tokens": 4, "length": 4, "cached": 0,
        "attempts": 0, "priority": 0,
    }  # fmt: skip
    state = bare_snapshot(tree)
    return {
        **state, "kv_tokens": 8, "free": 6, "tree": {**state["tree"], "disk_bytes": 100_000},
        "waiting": ["R1"], "requests": {"R1": request},
    }  # fmt: skip


@pytest.mark.parametrize(("held", "sentence"), HELD, ids=[said[:20] for _, said in HELD])
def test_each_says_is_held_and_follows(held: list[Any], sentence: str, state: State) -> None:
    event = parse_event(held)
    assert event.describe() == sentence and json.loads(json.dumps(event_fields(event))) == held
    check_state(state)
    replay = CheckedReplay(state)
    replay.apply(event)
    after = replay.snapshot()
    check_state(after)
    assert (after == state) == (held[0] != "BlocksRead")
    for events in ([event], [event, event]):
        _, text = type(event).together(events)
        assert text and not text.endswith(".")
    bare = {**state, "tree": {name: v for name, v in state["tree"].items() if name != "disk_bytes"}}
    with pytest.raises(ValueError, match="this tree has no disk tier"):
        CheckedReplay(bare).apply(event)


def test_the_table_has_every_kind() -> None:
    kinds = {name for kind, name in EVENT_TYPES.items() if kind.__module__ == dv.__name__}
    assert kinds == {held[0] for held, _ in HELD}


def test_what_was_read_is_a_node_of_the_host(state: State) -> None:
    replay = ReplayState(state)
    replay.apply(parse_event(HELD[0][0]))
    node = replay.nodes.look(3)
    assert (node["tokens"], node["slots"], node["host"], node["parent"]) == ([7, 8], [], [4, 5], 1)
    assert replay.tree["host_free"] == state["tree"]["host_free"] - 2


READ = HELD[0][0]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (1, 1, "node 1 is read twice"), (1, 0, "read twice"), (2, 9, "there is no node 9"),
        (3, "R9", "there is no request R9"), (4, [7], "gets 1 tokens and 2 host slots"),
        (5, [], "gets 2 tokens and 0 host slots"), (5, [0, 1], "not in a host tier of 16 tokens"),
        (5, [16, 17], "not in a host tier"), (8, -1, "blocks is -1"), (10, -5, "microseconds is -5"),
    ],
)  # fmt: skip
def test_what_does_not_follow_is_refused(state: State, at: int, value: Any, message: str) -> None:
    held = list(READ)
    held[at] = value
    with pytest.raises(ValueError, match=message):
        CheckedReplay(state).apply(parse_event(held))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (["BlocksLate", "R7", 1, 1], "there is no request R7"),
        (["BlocksDropped", 1, 1, "gone", "so", 1, 1], "blocks are dropped or broken, not 'gone'"),
        (["BlocksDropped", 1, 1, "dropped", "x" * 501, 1, 1], "told in 501 characters"),
        (["BlocksWritten", 1, 1, 1, 1, -1, 1], "files is -1"),
    ],
)
def test_other_kinds_that_do_not_follow(state: State, held: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckedReplay(state).apply(parse_event(held))


@pytest.mark.parametrize("said", [-1, True, "1", None, 1 << 63])
def test_a_state_says_how_large_the_disk_is(state: State, said: Any) -> None:
    state["tree"]["disk_bytes"] = said
    with pytest.raises(ValueError, match="disk_bytes must be a whole number"):
        check_state(state)


def test_a_disk_has_a_host_tier_above(state: State) -> None:
    for name in ("host_tokens", "host_free", "host_write"):
        del state["tree"][name]
    with pytest.raises(ValueError, match="a tree with a disk tier has a host tier, too"):
        check_state(state)
