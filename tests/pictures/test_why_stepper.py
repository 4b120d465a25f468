"""Why a request missed, as the stepper and viz.kv tell it: the same answer everywhere, and made once."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from minirad.config import SamplingParams
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.why.recorded import Recorded
from minirad.why.words import Words
from viz import kv
from viz.notebook import reasons
from viz.notebook.panels import Ledger, event_lines
from viz.stepper import Stepper


@pytest.fixture
def tour(make_engine) -> Stepper:
    """Shared prefixes, evictions and retractions, on the tiny model."""
    engine = make_engine(kv_tokens=40, chunk_tokens=8)
    made = Stepper(engine)
    for number, start in enumerate((3, 3, 20, 3, 40, 50, 20, 3, 40)):
        prompt = [*range(start, start + 7), 30 + number]
        engine.add_request(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
        made.run(2)
    made.run()
    engine.check()
    return made


def admissions(tour: Stepper) -> list[tuple[int, ev.RequestAdmitted]]:
    """Every admission, with its frame."""
    frames = tour.recording.frames
    return [
        (at, e) for at, frame in enumerate(frames) for e in frame.events if isinstance(e, ev.RequestAdmitted)
    ]


def name_of(event: ev.RequestAdmitted) -> str:
    return event.request if event.attempt == 1 else f"{event.request}#{event.attempt}"


def test_each_request_has_one_answer_everywhere(tour: Stepper) -> None:
    found = Recorded.of(tour.recording).answers
    words = Words(tour.trace.decode)
    causes = set()
    assert {name_of(event) for _, event in admissions(tour)} == set(found)
    for frame, event in admissions(tour):
        answer = found[name_of(event)]
        assert (answer.cached, answer.length) == (event.cached, event.length)
        told = tour.why(name_of(event))
        assert str(told) == repr(told) == words.sentence(answer)
        assert told.answers == (answer,) and told.data == (words.as_data(answer),)
        assert json.loads(json.dumps(told.data))[0]["say"] == str(told)
        assert str(kv.why(tour.recording, name_of(event))) == str(told)
        tour.granularity = "step"
        tour.go(tour.trace.position_of("step", frame))
        clauses = "; ".join(words.clauses(answer))
        line = f"{event.describe()}; computed: {clauses}"
        assert line in tour.sentences()
        assert line in [each["text"] for each in tour.shown["events"]]
        causes |= set(answer.by_cause())
    assert {"new", "evicted", "differs"} <= causes


def test_a_prompt_is_asked_about_at_the_moment_on_view(tour: Stepper) -> None:
    prompt, seen = [*range(3, 10), 99], set()
    for index in (0, tour.count - 1, 3, tour.count // 2, 5, tour.count // 2 + 1):
        tour.go(index)
        oracle = Recorded.of(tour.recording, tour.view.frame + 1).why(prompt)
        told = tour.why(prompt)
        assert told.answers == (oracle,)
        seen.add(str(told))
    assert len(seen) > 2
    tour.last()
    assert tour.why(prompt).data == kv.why(tour.recording, prompt).data
    assert tour.why(" ".join(map(str, prompt))).data == tour.why(prompt).data  # ids as one types them
    assert tour.engine is not None and tour.why(prompt).answers[0].matched == tour.engine.peek(prompt)


def test_every_frame_is_taken_once(tour: Stepper, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = Recorded.take
    monkeypatch.setattr(Recorded, "take", lambda self, frame: (taken.append(frame.index), take(self, frame)))
    other = Stepper(tour.recording)
    for _ in range(3):
        for index in range(other.count):
            other.go(index)
            other.shown  # noqa: B018
        other.why("R1")
    assert taken == list(range(len(tour.recording.frames)))
    del taken[:]
    for index in range(other.count):  # forwards: again each once, in a memory of its own
        other.go(index)
        other.why([1, 2, 3])
    assert len(taken) <= len(tour.recording.frames)


def test_it_grows_with_the_run(make_engine) -> None:
    tour = Stepper(make_engine(kv_tokens=40))
    for number in range(3):
        request = tour.submit(" ".join(str(n) for n in range(5, 15 + number)))
        tour.run()
        told = tour.why(str(request))
        assert told.answers[0].name == request
        assert told.answers[0].cached == (0, 10, 11)[number]
    assert tour.fork() and str(tour.why("R1"))  # a fork has a memory of its own


def test_what_would_be_loaded_back_is_told_beside_the_reason(make_engine) -> None:
    tour = Stepper(make_engine(kv_tokens=200, host_kv_tokens=400, load_back_threshold=1))
    tour.submit("3 4 5 6 7 8 9 10")
    tour.run()
    tour.engine.cache_manager.wait_for_copies()
    tour.evict(200)
    output = tour.display()
    output.received({"do": "type", "value": "3 4 5 6 99"})
    driving = json.loads(output.model.controls)["engine"]
    assert driving["hits"] == "0 of 5 tokens would hit, 4 more would be loaded back from the host"
    assert "in host memory only: they are loaded back if there is room" in driving["because"]
    assert tour.what_if("3 4 5 6 99") == (4, 5)


def test_the_prompt_in_the_box_has_its_reason(tour: Stepper) -> None:
    output = tour.display()
    output.received({"do": "type", "value": "3 4 5 6 99"})
    driving = json.loads(output.model.controls)["engine"]
    found = tour.why([3, 4, 5, 6, 99]).answers[0]
    assert driving["hits"] == f"{found.cached} of 5 tokens would hit"
    begin, _, because = driving["because"].partition(": ")
    assert begin == "computed" and because and str(tour.why([3, 4, 5, 6, 99])).endswith(because)
    output.received({"do": "go", "value": 2})  # the box asks the present, whatever is on view
    assert json.loads(output.model.controls)["engine"]["because"] == driving["because"]
    output.received({"do": "type", "value": "word"})  # the tiny model has no tokenizer
    driving = json.loads(output.model.controls)["engine"]
    assert driving["refused"] and not driving["because"]
    output.close()


def test_what_cannot_be_answered_is_said(tour: Stepper, make_engine) -> None:
    with pytest.raises(ValueError, match="no request 'R99' was admitted; known: R1"):
        tour.why("R99")
    with pytest.raises(ValueError, match="the prompt is empty"):
        tour.why([])
    with pytest.raises(ValueError, match=r"no request 'R1' was admitted$"):
        Stepper(make_engine()).why("R1")
    header = {**tour.recording.header, "model": {"tokenizer": ""}}
    with pytest.raises(ValueError, match="has no tokenizer here: ask with token ids"):
        Stepper(Recording(header, tour.recording.frames)).why("a text")
    assert all(isinstance(line, str) for line in tour.why())  # of victims, as before


def test_a_recording_that_cannot_be_followed_is_shown_without_answers(tour: Stepper) -> None:
    frame, event = admissions(tour)[1]
    frames = list(tour.recording.frames)
    other = ev.PrefixTouched((777,), 1, False, None)  # a node that nobody knows
    old = frames[frame]
    frames[frame] = Frame(old.index, old.step, (other, *old.events), None, old.scene)
    recording = Recording(tour.recording.header, frames)
    told = reasons.Reasons(recording, tour.trace.decode)
    assert told.sentence(event) == "" and "cannot be followed" in told.failed
    with pytest.raises(ValueError, match="cannot be followed"):
        told.of("R1")
    ledger = Ledger(recording, tour.trace.decode)
    view = tour.trace.view("step", tour.trace.position_of("step", frame))
    assert event.describe() in [line["text"] for line in event_lines(view, ledger.reasons)]


def test_what_is_said_of_neighbours_alike_is_said_once(make_engine) -> None:
    """A prompt and its reply are computed in different steps, and go together: one clause, one number."""
    engine = make_engine(kv_tokens=32)
    long = SamplingParams(max_new_tokens=12, ignore_eos=True)
    recorder = Recorder(engine)
    made = Stepper(recorder)
    (reply,) = engine.generate([[3, 4, 5, 6, 7, 8]], long)
    for prompt in (range(10, 16), range(20, 26), [3, 4, 5, 6, 7, 8, *reply.token_ids, 9], range(10, 16)):
        engine.generate([list(prompt)], long)
    joined = 0
    words = Words(made.trace.decode)
    for answer in Recorded.of(recorder).answers.values():
        clauses = words.clauses(answer)
        numbers, rest = zip(*(each.split(" ", 1) for each in clauses if each[0] != "t"), strict=True)
        assert all(one != other for one, other in pairwise(rest)), clauses
        counted = sum(int(number.replace(",", "")) for number in numbers)
        assert counted + (clauses[-1] == "the last one, as always") == answer.missed
        joined += len(answer.losses) - len(clauses)
    assert joined


def test_misses_add_up(tour: Stepper) -> None:
    drawn = kv.misses(tour.recording)
    found = Recorded.of(tour.recording).answers
    for number, (name, answer) in enumerate(found.items()):
        assert {trace.x[number] for trace in drawn.data} == {name}
        assert sum(trace.y[number] for trace in drawn.data) == answer.length
        tops = sorted((trace.base[number], trace.base[number] + trace.y[number]) for trace in drawn.data)
        assert tops[-1][1] == answer.length and tops[0][0] == 0
    assert drawn._repr_mimebundle_()["image/png"]


# ---------------------------------------------------------------------- streams


def stream() -> Recording:
    """Two ranks: the first holds a prompt of two blocks, the second held the first of them."""
    tree = pytest.importorskip("minirad.fleet.tree")
    wire = pytest.importorskip("minirad.fleet.wire")
    fleet_events = pytest.importorskip("minirad.observe.fleet_events")
    fleet, recording = tree.FleetTree(), Recording({"start": fleet_events.empty_state(2)})
    told: list[tuple[int, Any]] = [
        (0, wire.Stored((7,), None, ((1, 2),), 2, "GPU", False, ())),
        (0, wire.Stored((8,), 7, ((3, 4),), 2, "GPU", False, ())),
        (1, wire.Stored((7,), None, ((1, 2),), 2, "GPU", False, ())),
        (1, wire.Removed((7,), "GPU")),
    ]
    for step, (rank, each) in enumerate(told, start=1):
        fleet.take(rank, each)
        recording.frames.append(Frame(step - 1, step, tuple(fleet.changes(step))))
    return recording


def test_a_stream_answers_for_each_rank() -> None:
    tour = Stepper(stream())
    told = tour.why([1, 2, 3, 4, 9])
    assert [answer.cached for answer in told.answers] == [4, 0]
    assert [answer.main.cause for answer in told.answers][1] == "evicted"
    assert str(told).splitlines()[1].startswith("rank 1 finds 0 of 5 tokens") and "in batch 4" in str(told)
    tour.first()
    tour.forward()
    assert [answer.cached for answer in tour.why([1, 2, 3, 4, 9]).answers] == [2]  # of the only one so far
    assert kv.why(tour.recording, [1, 2, 3, 4, 9]).data == told.data
    assert str(tour.why("1 2 3 4 9", namespace="other")).count("rank 0") >= 1
    with pytest.raises(ValueError, match="does not tell what was asked"):
        tour.why("R1")
    assert tour.shown["events"]


def test_of_a_stream_each_node_in_the_picture_is_told_by_who_holds_it(request) -> None:
    """It has no pool: neither its pages nor "evicted" can be read off one."""
    path = request.config.rootpath / "notebooks/streams/sglang_two_ranks.jsonl"
    seen = set()
    for recording in (stream(), Recording.load(path)):
        tour = Stepper(recording)
        for index in range(tour.count):
            tour.go(index)
            shown, tree = tour.shown, tour.state["tree"]
            drawn = {int(number) for number in re.findall(r'id="n(\d+)"', shown["svg"])} - {0}
            nodes = shown["ranks"]["nodes"]
            assert set(nodes) == drawn
            for node in tree["nodes"]:
                if node["id"] not in nodes or not node["seen"]:
                    continue
                words = nodes[node["id"]]
                assert words.startswith(f"{node['units']} token") and "any more" not in words
                assert ("D" in words) == bool(node["held"]) and ("HOLE" in words) == (not node["held"])
                for rank in node["held"] if len(tree["ranks"]) > 1 else ():
                    assert rank in words
            gone = drawn - {node["id"] for node in tree["nodes"]}
            assert all(nodes[number] == "no rank holds it any more" for number in gone)
            seen |= gone
            lines = shown["ranks"]["lines"]
            assert len(lines) == len(tree["ranks"])
            for line, row in zip(lines, tree["ranks"], strict=True):
                assert line.startswith(f"rank {row['rank']} ({row['state']}): ")
                assert all(f" {count:,}" in line for count in row["media"].values() if count)
    assert seen


def test_a_stream_names_no_victims_and_asks_nothing() -> None:
    tour = Stepper(stream())
    assert tour.why() == ["A stream tells what a server removed, and not why."]
    tour.first()
    assert tour.why() == ["Nothing was evicted here."]
    output = tour.display()
    assert json.loads(output.model.controls)["quiz"] is None
    output.close()
