"""What a router tells: sentences, what a file holds, and what is refused in one from a stranger."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered
from minirad.fleet.wire import Batch, Stored
from minirad.observe import fleet_events as fe
from minirad.observe import route_events as told_of
from minirad.observe.event import EVENT_TYPES, Event
from minirad.observe.reading import check_state, event_fields, parse_event
from minirad.observe.recording import Recording
from minirad.observe.replay import CheckedReplay, Frame
from viz.trace import Trace
from viz.words import summary

# As recordings hold them, and what each says. No row may be changed, or recordings of before are lost.
HELD: tuple[tuple[list[Any], str], ...] = (
    (["WorkerChanged", 0, "starting", "", "http://127.0.0.1:9000"],
     "w0 at http://127.0.0.1:9000 is starting"),
    (["WorkerChanged", 0, "ready", "", ""], "w0 is ready"),
    (["WorkerChanged", 1, "ready", "", ""], "w1 is ready"),
    (["RequestRouted", "R1", 1, "events", "w1 holds 4 of 10 tokens (40%)", [2, 4], [0, 3], 9, 5, 10],
     "R1 goes to w1: w1 holds 4 of 10 tokens (40%) (5 tokens fewer than the best worker holds)"),
    (["RequestRouted", "R2", 0, "round-robin", "it is the turn of w0", [0, 0], [0, 1], None, None, 7],
     "R2 goes to w0: it is the turn of w0"),
    (["RouteFinished", "R1", 1, 4, 10, "finished"],
     "R1 at w1 is answered: 4 of 10 prompt tokens were cached"),
    (["WorkerChanged", 0, "slow", "/health took 2.0 s", ""], "w0 is slow: /health took 2.0 s"),
    (["WorkerChanged", 0, "dead", "its process ended with 1", ""], "w0 is dead: its process ended with 1"),
    (["RouteFinished", "R2", 0, 0, 7, "moved"], "R2 at w0 was not answered: it goes elsewhere"),
    (["RequestRouted", "R2", 1, "round-robin", "it is the turn of w1", [0, 0], [1, 0], 0, 0, 7],
     "R2 goes to w1: it is the turn of w1"),
    (["RouteFinished", "R2", 1, 0, 7, "cancelled"], "R2 at w1 is cancelled: its client went away"),
    (["WorkerChanged", 0, "back", "", ""], "w0 is back"),
    (["RequestRouted", "R3", 0, "random", "w0 was drawn", [0, 0], [0, 0], 0, 0, 3],
     "R3 goes to w0: w0 was drawn"),
    (["RouteFinished", "R3", 0, 0, 3, "failed"], "R3 at w0 failed: its client was told"),
)  # fmt: skip
KINDS = {
    name for name, kind in vars(told_of).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}  # fmt: skip


def recording() -> Recording:
    header = {
        "minirad": 1, "config": {}, "model": {"parameters": None, "tokenizer": ""}, "notes": {},
        "start": fe.empty_state(2),
    }  # fmt: skip
    return Recording(header, [Frame(at, 0, (parse_event(held),)) for at, (held, _) in enumerate(HELD)])


@pytest.mark.parametrize(("held", "sentence"), HELD, ids=[str(at) for at in range(len(HELD))])
def test_every_event_says_and_is_held(held: list[Any], sentence: str) -> None:
    event = parse_event(held)
    assert event.describe() == sentence
    assert json.loads(json.dumps(event_fields(event))) == held
    tone, together = type(event).together([event])
    assert together == sentence and tone in ("", "new", "hit", "split", "evict", "retract")
    assert type(event) not in EVENT_TYPES and event.about() == ()


def test_the_table_has_every_kind_and_tags_name_one_kind_each() -> None:
    assert {held[0] for held, _ in HELD} == KINDS
    assert {held[-1] for held, _ in HELD if held[0] == "RouteFinished"} == set(told_of.OUTCOMES)
    assert {held[2] for held, _ in HELD if held[0] == "WorkerChanged"} == set(told_of.WORKER_STATES)
    others = [kind.word.tag for kind in EVENT_TYPES]
    others += [
        kind.word.tag for kind in vars(fe).values() if isinstance(kind, type) and hasattr(kind, "word")
    ]
    assert not {getattr(told_of, name).word.tag for name in KINDS} & set(others)


def test_a_recording_is_checked_and_leads_to_these_workers_and_routes() -> None:
    run = recording()
    run.check()
    state = run.state(len(run) - 1)
    check_state(json.loads(json.dumps(state)))
    first, second = state["tree"]["workers"]
    assert first == {
        "worker": 0, "where": "http://127.0.0.1:9000", "state": "back", "why": "", "load": 0, "requests": 2,
        "tokens": 0, "cached": 0, "regret": 0,
    }  # fmt: skip
    assert [second[name] for name in ("state", "load", "requests", "tokens", "cached", "regret")] == [
        "ready", 0, 2, 10, 4, 5,
    ]  # fmt: skip
    assert told_of.has_routes(state) and not told_of.has_routes(run.header["start"])
    told = [(r["request"], r["worker"], r["outcome"], r["cached"]) for r in state["tree"]["routes"]]
    assert told == [
        ("R1", 1, "finished", 4), ("R2", 0, "moved", 0), ("R2", 1, "cancelled", 0), ("R3", 0, "failed", 0),
    ]  # fmt: skip
    assert run.state(3)["tree"]["workers"][1]["load"] == 1
    assert run.state(3)["tree"]["routes"][0] == {
        "request": "R1", "worker": 1, "policy": "events", "reason": "w1 holds 4 of 10 tokens (40%)",
        "matches": [2, 4], "loads": [0, 3], "best": 9, "regret": 5, "tokens": 10, "outcome": "", "cached": 0,
    }  # fmt: skip
    view = Trace(run).view("step", 4)
    assert summary(view.events)[1].startswith("R1 goes to w1: ")


def test_the_last_routes_are_kept() -> None:
    state = CheckedReplay(fe.empty_state(1))
    state.apply(told_of.WorkerChanged(0, "ready", ""))
    for number in range(1, 101):
        state.apply(told_of.RequestRouted(f"R{number}", 0, "random", "", (0,), (0,), None, None, 1))
    assert [route["request"] for route in state.tree["routes"]] == [f"R{n}" for n in range(69, 101)]
    for number in range(1, 101):  # also those that are not among the last
        state.apply(told_of.RouteFinished(f"R{number}", 0, 0, 1, "finished"))
    assert state.tree["workers"][0]["load"] == 0
    assert all(route["outcome"] == "finished" for route in state.tree["routes"])


def test_a_stream_without_a_router_has_neither() -> None:
    state = CheckedReplay(fe.empty_state(1)).snapshot()
    check_state(state)
    assert "workers" not in state["tree"] and "routes" not in state["tree"]


TOGETHER: tuple[tuple[list[Event], str], ...] = (
    ([told_of.WorkerChanged(n, "ready", "") for n in (0, 1, 2)], "w0, w1 and w2 are ready"),
    ([told_of.WorkerChanged(0, "ready", ""), told_of.WorkerChanged(0, "dead", "gone")], "w0 is dead: gone"),
    ([told_of.RequestRouted(f"R{n}", n, "p", "", (0, 0), (0, 0), 0, 0, 1) for n in (0, 1)],
     "2 requests went to w0 and w1"),
    ([told_of.RouteFinished("R1", 0, 2, 8, "finished"), told_of.RouteFinished("R2", 0, 3, 9, "finished")],
     "2 requests are answered: 5 of 17 prompt tokens were cached"),
    ([told_of.RouteFinished("R1", 0, 2, 8, "finished"), told_of.RouteFinished("R2", 0, 3, 9, "failed")],
     "1 request is answered, 1 other is not: 2 of 8 prompt tokens were cached"),
    ([told_of.RequestRouted("R1", n, "p", "", (0, 0), (0, 0), 0, 0, 1) for n in (0, 1)],
     "1 request went to w0 and w1"),  # it moved
    ([told_of.RouteFinished("R1", 0, 0, 8, "moved"), told_of.RouteFinished("R1", 1, 2, 8, "finished")],
     "1 request is answered: 2 of 8 prompt tokens were cached"),
)  # fmt: skip


@pytest.mark.parametrize(("events", "sentence"), TOGETHER)
def test_many_of_a_kind_in_one_sentence(events: list[Event], sentence: str) -> None:
    assert type(events[0]).together(events)[1] == sentence


def test_one_recording_holds_a_stream_and_its_routes() -> None:
    flight = Flight(block_size=2)
    flight.note(told_of.WorkerChanged(0, "ready", ""), 1.0)
    flight.note(told_of.RequestRouted("R1", 0, "events", "because", (0,), (0,), 0, 0, 5), 1.05)
    flight.take(Delivered(0, 0, Batch(0.0, (Stored((1,), None, ((1, 2),), 2),)), False), 1.06)
    flight.note(told_of.RouteFinished("R1", 0, 0, 5, "finished"), 1.07)
    flight.tick(2.0)
    flight.recording.check()
    (_, frame) = flight.recording.frames
    assert [type(event).__name__ for event in frame.events] == [
        "RequestRouted", "RouteFinished", "NodeStored", "BatchesTaken",
    ]  # fmt: skip
    state = flight.recording.state(1)
    check_state(json.loads(json.dumps(state)))
    assert state["tree"]["routes"][0]["outcome"] == "finished" and len(state["tree"]["nodes"]) == 1
    flight.close()


# ---------------------------------------------------------------------- from a stranger

ROUTED: list[Any] = ["RequestRouted", "R5", 1, "p", "r", [0, 4], [0, 0], 6, 2, 8]
FINISHED: list[Any] = ["RouteFinished", "R1", 1, 4, 10, "finished"]
HUGE = 1 << 62


def changed(event: list[Any], **fields: Any) -> list[Any]:
    kind = getattr(told_of, event[0])
    names = list(kind.__dataclass_fields__)
    return [event[0], *(fields.get(name, value) for name, value in zip(names, event[1:], strict=True))]


HOSTILE_EVENTS: tuple[tuple[list[Any], str], ...] = (
    (["WorkerChanged", 3, "ready", "", ""], "worker 3 comes after 2 workers"),
    (["WorkerChanged", -1, "ready", "", ""], "worker -1 comes after 2 workers"),
    (["WorkerChanged", 0, "fine", "", ""], "a worker is starting, ready, slow, dead, back, not 'fine'"),
    (["WorkerChanged", 0, "dead", "x" * 2001, ""], "has 2001 characters"),
    (["WorkerChanged", 0, "dead", "", "x" * 2001], "has 2001 characters"),
    (changed(ROUTED, worker=2), "there is no worker 2"),
    (changed(ROUTED, worker=-1), "there is no worker -1"),
    (changed(ROUTED, matches=[4]), "R5 has 1 matches and 2 loads of 2 workers"),
    (changed(ROUTED, loads=[0, 0, 0]), "R5 has 2 matches and 3 loads of 2 workers"),
    (changed(ROUTED, matches=[9, 0]), "R5 has 8 tokens, and more matched"),
    (changed(ROUTED, tokens=-1), "a number is too large, or below 0"),
    (changed(ROUTED, tokens=HUGE), "a number is too large, or below 0"),
    (changed(ROUTED, loads=[0, HUGE]), "a number is too large, or below 0"),
    (changed(ROUTED, best=None), "of 8 tokens the best worker held None, 2 of them more"),
    (changed(ROUTED, best=1), "of 8 tokens the best worker held 1, 2 of them more"),
    (changed(ROUTED, best=9), "of 8 tokens the best worker held 9, 2 of them more"),
    (changed(ROUTED, regret=-1), "a number is too large, or below 0"),
    (changed(ROUTED, reason="x" * 2001), "has 2001 characters"),
    (changed(ROUTED, policy="x" * 2001), "has 2001 characters"),
    (changed(ROUTED, request="a<b>"), "request must be a request's name"),
    (changed(FINISHED, worker=7), "there is no worker 7"),
    (changed(FINISHED, worker=0), "no request is at w0"),
    (changed(FINISHED, cached=11), "11 of 10 prompt tokens were cached"),
    (changed(FINISHED, cached=-1), "a number is too large, or below 0"),
    (changed(FINISHED, outcome="lost"), "a request is finished, moved, cancelled, failed, not 'lost'"),
)  # fmt: skip


@pytest.fixture
def replay() -> CheckedReplay:
    """Two workers, a request in flight at w1, and one that was answered."""
    state = CheckedReplay(fe.empty_state(2))
    for held, _ in HELD[:6]:
        state.apply(parse_event(held))
    state.apply(parse_event(["RouteFinished", "R2", 0, 0, 7, "finished"]))
    state.apply(parse_event(changed(ROUTED, request="R1")))
    return state


@pytest.mark.parametrize(("held", "told"), HOSTILE_EVENTS)
def test_an_event_that_cannot_be_is_refused(replay: CheckedReplay, held: list[Any], told: str) -> None:
    before = replay.snapshot()
    with pytest.raises(ValueError) as error:
        replay.apply(parse_event(held))
    assert told in str(error.value) and "\n" not in str(error.value)
    assert replay.snapshot() == before


def test_before_any_worker_nothing_is_routed_and_to_no_engine() -> None:
    for start in (fe.empty_state(1), {**fe.empty_state(1), "tree": {"page_size": 1, "nodes": []}}):
        for held in (ROUTED, FINISHED):
            with pytest.raises(ValueError, match=r"there is no worker 1|this is no stream of KV events"):
                CheckedReplay(start).apply(parse_event(held))
    with pytest.raises(ValueError, match="WorkerChanged: this is no stream of KV events"):
        CheckedReplay(start).apply(told_of.WorkerChanged(0, "ready", ""))


def test_workers_and_sums_are_bounded() -> None:
    state = CheckedReplay(fe.empty_state(1))
    for worker in range(told_of.MOST_WORKERS):
        state.apply(told_of.WorkerChanged(worker, "ready", ""))
    with pytest.raises(ValueError, match="worker 256 comes after 256 workers"):
        state.apply(told_of.WorkerChanged(256, "ready", ""))
    state.tree["workers"][0].update(load=1, tokens=told_of.MOST_SUM - 5)
    with pytest.raises(ValueError, match="more tokens of a worker than can be counted"):
        state.apply(told_of.RouteFinished("R1", 0, 0, 5, "finished"))


HOSTILE_STATES: tuple[tuple[str, Any, str], ...] = (
    ("tree workers", 5, "workers must be a list of objects"),
    ("tree workers", [5], "workers must be a list of objects"),
    ("tree workers", [], "0 workers; at least 1"),
    ("tree routes", None, "routes must be a list of objects"),
    ("tree workers 0 worker", 1, "worker 0 is not in its place"),
    ("tree workers 0 state", "fine", "worker 0: its state cannot be 'fine'"),
    ("tree workers 0 state", ["ready"], "its state cannot be ['ready']"),
    ("tree workers 0 load", -1, "worker 0: its load cannot be -1"),
    ("tree workers 0 load", True, "worker 0: its load cannot be True"),
    ("tree workers 0 load", 99, "worker 0 has more requests than were sent there"),
    ("tree workers 0 tokens", 1 << 62, "its tokens cannot be"),
    ("tree workers 0 cached", 99, "worker 0 has more cached tokens than tokens"),
    ("tree workers 0 where", "x" * 3000, "has 3000 characters"),
    ("tree workers 0 why", "\ud800", "worker 0: its why cannot be"),
    ("tree workers 0 more", 5, "worker 0 has not just the fields worker, where"),
    ("tree routes 0 worker", 2, "a route to worker 2, which is not there"),
    ("tree routes 0 matches", [], "a route: its matches cannot be []"),
    ("tree routes 0 matches", [0, 0, 0], "a route has 3 matches of 2 workers"),
    ("tree routes 0 loads", [0], "a route has 2 matches of 2 workers"),
    ("tree routes 0 matches", [0, 99], "a route of 10 tokens has 99 of them"),
    ("tree routes 0 cached", 11, "a route of 10 tokens has 11 of them"),
    ("tree routes 0 best", None, "the best worker held None, 5 of them more"),
    ("tree routes 0 best", "9", "a route: its best cannot be '9'"),
    ("tree routes 0 outcome", "lost", "a route: its outcome cannot be 'lost'"),
    ("tree routes 0 reason", None, "a route: its reason cannot be None"),
)  # fmt: skip


@pytest.mark.parametrize(("where", "value", "told"), HOSTILE_STATES)
def test_a_state_that_cannot_be_is_refused(replay: CheckedReplay, where: str, value: Any, told: str) -> None:
    state = json.loads(json.dumps(replay.snapshot()))
    check_state(state)
    *path, last = where.split()
    at: Any = state
    for name in path:
        at = at[int(name) if isinstance(at, list) else name]
    at[last] = value
    with pytest.raises(ValueError) as error:
        check_state(state)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["workers", "routes"])
def test_of_workers_and_routes_there_are_both_or_none(replay: CheckedReplay, name: str) -> None:
    state = json.loads(json.dumps(replay.snapshot()))
    del state["tree"][name]
    with pytest.raises(ValueError, match=f"{name} must be a list of objects"):
        check_state(state)
    state["tree"].pop("workers", None)
    state["tree"].pop("routes", None)
    check_state(state)


def test_any_value_of_a_file_may_be_another_one(tmp_path: Path) -> None:
    """A changed file is read up to the change, or refused: with ValueError, and never otherwise."""
    run = recording()
    last = len(run) - 1
    frames = [*run.frames[:last], Frame(last, 0, run.frames[last].events, run.state(last))]
    file = tmp_path / "changed.jsonl"
    Recording(run.header, frames).save(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    rng = random.Random(0)
    junk = [None, True, -1, 0, 1, 2, 1 << 62, 1 << 70, 0.5, "", "x", "R1", "\ud800", [], [1], [[]], {}]
    read = refused = 0
    for _ in range(150):
        number = rng.randrange(len(lines))
        line = json.loads(lines[number])
        places: list[tuple[Any, Any]] = []
        todo = [line]
        while todo:
            value = todo.pop()
            for name, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                places.append((value, name))
                if isinstance(each, dict | list):
                    todo.append(each)
        where, name = rng.choice(places)
        where[name] = rng.choice(junk)
        file.write_text(
            "\n".join([*lines[:number], json.dumps(line), *lines[number + 1 :]]), encoding="utf-8"
        )
        try:
            found = Recording.load(file)
            view = Trace(found).view("step")
            assert view.title and (not view.events or summary(view.events)[1])
            read += not found.missing
            refused += bool(found.missing)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 75 and read > 5
