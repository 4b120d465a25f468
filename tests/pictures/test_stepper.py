"""viz/stepper.py without a browser: what its buttons send is sent, the engine's own state is the judge."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import ipywidgets
import pytest
from PIL import Image

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import InvariantError
from minirad.model.classroom import corpus
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from viz import words
from viz.draw.dot import find_dot
from viz.fork import evict_by_hand, fork, forked_config
from viz.notebook.panels import Ledger, event_lines, payload, pool_cells, ranges
from viz.notebook.stepper import Output, Stepper, _esm
from viz.trace import Trace, ids_as_text
from viz.view.quiz import question_for, why
from viz.view.victims import victims

WORDS = SamplingParams(max_new_tokens=6, ignore_eos=True)


def press(output: Output, name: str, value: object = None) -> None:
    """What static/stepper.js sends when a button is pressed."""
    output.received({"do": name, "value": value})


def controls(output: Output) -> dict:
    """What the browser has of the controls."""
    return json.loads(output.model.controls)


def driving(output: Output) -> dict:
    """What the browser has of the engine's controls."""
    return controls(output)["engine"]


def tiny_run(make_engine, **config) -> tuple[Engine, Recorder]:
    """Shared prefixes, evictions and a split, on the tiny model."""
    engine = make_engine(**{"kv_tokens": 40, "chunk_tokens": 8, **config})
    recording = Recorder(engine)
    for number, start in enumerate((3, 3, 20, 3, 40, 50, 20)):
        prompt = [*range(start, start + 7), 30 + number]
        engine.add_request(prompt, SamplingParams(max_new_tokens=5))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    recording.close()
    return engine, recording


@pytest.fixture(autouse=True)
def nobody_draws_any_more() -> Iterator[None]:
    """No test finds outputs of others in the kernel, of which the oldest end where there are too many, nor
    threads that lay out their neighbours."""
    yield
    for output in list(Output._alive):
        output.close()
    for thread in threading.enumerate():
        if "_draw_ahead" in thread.name:
            thread.join(60)


@pytest.fixture
def stepper(make_engine) -> Stepper:
    """Driving the tiny engine; prompts are typed as token ids, for it has no tokenizer."""
    return Stepper(make_engine(kv_tokens=40), params=SamplingParams(max_new_tokens=5, ignore_eos=True))


@pytest.fixture(scope="module")
def classroom() -> Engine:
    """Loaded once; tests that use it flush it first."""
    return Engine(EngineConfig(kv_tokens=600))


# ---------------------------------------------------------------------- looking


@pytest.mark.parametrize("granularity", ["event", "step", "scene"])
def test_forward_and_back_show_the_recorded_states(make_engine, granularity: str) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, granularity=granularity, decode=ids_as_text).display()
    stepper, trace = output.stepper, Trace(recording, ids_as_text)
    press(output, "first")
    there = []
    while controls(output)["forward"]:
        there.append((stepper.state, stepper.shown["svg"]))
        press(output, "forward")
    assert stepper.index == trace.count(granularity) - 1
    assert stepper.state == recording.state(len(recording) - 1)
    for index in range(stepper.index - 1, -1, -1):
        assert controls(output)["back"]
        press(output, "back")
        assert stepper.index == index == controls(output)["index"]
        assert (stepper.state, stepper.shown["svg"]) == there[index]
        assert stepper.state == trace.state(granularity, index)
    assert not controls(output)["back"]


def test_slider_granularity_and_keys_are_the_same_as_the_buttons(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    stepper = output.stepper
    press(output, "go", 4)
    assert stepper.index == 4
    moment = stepper.state
    press(output, "granularity", "event")
    assert stepper.state == moment and stepper.view.granularity == "event"
    assert controls(output)["count"] == stepper.count
    at = stepper.index
    press(output, "forward")
    assert stepper.index == at + 1
    press(output, "back")
    assert stepper.index == at


def test_nonsense_from_the_browser_changes_nothing(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    before = output.stepper.index, output.model.payload
    for nonsense in ("forward", None, {}, {"do": "rm"}, {"do": ["go"]}, {"do": "_session"}, {"do": "engine"}):
        output.received(nonsense)
    wrong = {
        "go": (None, "1", 1.5, True),
        "open": ("x",),
        "quiz": (1,),
        "jump": (3,),
        "fork": ("",),
        "back": (1,),
    }
    for name, values in wrong.items():
        for value in values:
            press(output, name, value)
    assert (output.stepper.index, output.model.payload) == before
    press(output, "go", 9999)
    press(output, "jump", "foo")
    press(output, "granularity", "day")
    assert output.stepper.index == before[0] and "day" in output.stepper.message


def test_jumps_go_to_the_marks(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    stepper = output.stepper
    kinds = {"split": ev.NodeSplit, "evict": ev.NodeEvicted}
    for kind, event in kinds.items():
        stepper.first()
        press(output, "jump", kind)
        assert any(isinstance(e, event) for e in stepper.view.events)
        frame = stepper.view.frame
        assert not any(isinstance(e, event) for f in recording.frames[:frame] for e in f.events)
    stepper.last()
    assert not stepper.jump("evict")
    assert "no further eviction" in stepper.message
    marks = Trace(recording).marks()
    assert {kind: there for kind, _, there in controls(output)["jumps"]} == {
        k: bool(v) for k, v in marks.items()
    }


def test_positions_that_are_not_there(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    stepper = Stepper(recording, decode=ids_as_text)
    with pytest.raises(ValueError, match="there is no step 9999"):
        stepper.go(9999)
    with pytest.raises(ValueError, match="-1"):
        stepper.go(-1)
    stepper.forward()
    assert "end of the recording" in stepper.message
    assert stepper.submit("x") is None and "no engine" in stepper.message
    assert not stepper.fork() and "recording" in stepper.message
    with pytest.raises(ValueError, match="not an engine"):
        stepper.what_if("x")


def test_the_picture_is_of_the_engines_own_state(make_engine) -> None:
    engine, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    shown = output.stepper.shown
    state = engine.snapshot()
    cells = shown["pool"]["cells"]
    for node in state["tree"]["nodes"]:
        assert f'id="n{node["id"]}"' in shown["svg"]
        assert all(cells[slot - 1] == node["id"] for slot in node["slots"])
    assert sum(owner == 0 for owner in cells) == state["free"]
    assert json.loads(output.model.payload) == {**shown, "drawn": 1}


# ---------------------------------------------------------------------- panels


def test_pool_cells_equal_the_state_at_every_event(make_engine) -> None:
    _, recording = tiny_run(make_engine, page_size=2)
    trace = Trace(recording, ids_as_text)
    for index in range(trace.count("event")):
        view = trace.view("event", index)
        pool = pool_cells(view, ids_as_text)
        assert len(pool["cells"]) == len(pool["locked"]) == 20
        nodes = {node["id"]: node for node in view.state["tree"]["nodes"]}
        for page, owner in enumerate(pool["cells"], start=1):
            if owner > 0:
                assert page in {slot // 2 for slot in nodes[owner]["slots"]}
                assert (pool["locked"][page - 1] == "1") == (nodes[owner]["lock_ref"] > 0)


def test_requests_never_tell_the_future(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    trace = Trace(recording, ids_as_text)
    ledger = Ledger(recording, ids_as_text)
    ledger.requests(trace.view())  # it has seen everything
    for index in range(trace.count("event")):
        view = trace.view("event", index)
        known = {
            e.request
            for f in recording.frames[: max(view.frame, 0)]
            for e in f.events
            if isinstance(e, ev.RequestAdded)
        }
        known |= {e.request for e in view.so_far if isinstance(e, ev.RequestAdded)}
        seen = ledger.requests(view)
        assert {request["id"] for request in seen} == known
        for request in seen:
            assert all(last <= ledger.step_of(view) for _, _, last in request["spans"])
            assert set(request["path"]) <= set(view.nodes)


def test_requests_equal_rows_and_reports(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    trace = Trace(recording, ids_as_text)
    ledger = Ledger(recording, ids_as_text)
    for index in range(1, trace.count()):
        view = trace.view("step", index)
        for request in ledger.requests(view):
            live = view.state["requests"].get(request["id"])
            if live:
                assert request["pages"] == ranges(live["slots"])
                assert request["path"] == [] or request["path"][-1] == live["node"]
                assert not request["ended"]
    done = {e.request: e for f in recording for e in f.events if isinstance(e, ev.RequestFinished)}
    for request in ledger.requests(trace.view()):
        end = done[request["id"]]
        assert (request["prompt"], request["cached"], request["ended"]) == (
            end.prompt_tokens, end.cached_tokens, end.reason,
        )  # fmt: skip


def test_requests_that_were_there_before_the_recording(make_engine) -> None:
    engine = make_engine()
    engine.add_request([3, 4, 5], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.step()
    engine.add_request([6, 7, 8], SamplingParams(max_new_tokens=4, ignore_eos=True))
    stepper = Stepper(engine)
    stepper.run()
    assert [request["id"] for request in stepper.shown["requests"]] == ["R1", "R2"]
    assert [request["ended"] for request in stepper.shown["requests"]] == ["length", "length"]
    assert not stepper.fork() and "begins in the middle" in stepper.message


def test_every_event_type_has_a_tag(make_engine) -> None:
    known = words.WORDS
    assert set(known) == set(ev.EVENT_TYPES)
    assert len({word.tag for word in (*known.values(), words.PASSED)}) == len(known) + 1, "one meaning each"
    _, recording = tiny_run(make_engine)
    lines = event_lines(Trace(recording).view("step", 1))
    assert [line["text"] for line in lines] == [e.describe() for e in recording.frames[0].events]


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7, 7]) == [[1, 3], [7, 7]]
    assert ranges([]) == []


def test_a_payload_is_small(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    trace = Trace(recording, ids_as_text)
    assert len(json.dumps(payload(trace, trace.view(), Ledger(recording, ids_as_text)))) < 20_000


# ---------------------------------------------------------------------- quiz and reasons


def test_why_names_the_policy_and_the_runner_up(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    stepper = output.stepper
    press(output, "why")
    assert "Nothing was evicted here" in stepper.message
    stepper.first()
    stepper.jump("evict")
    press(output, "why")
    (event, *_) = [e for e in stepper.view.events if isinstance(e, ev.NodeEvicted)]
    assert f"n{event.node} went by the policy lru" in stepper.message
    if event.runner_up:
        assert f"n{event.runner_up}" in stepper.message
    assert stepper.message == json.loads(output.model.payload)["message"]


def test_victims_are_among_the_unlocked_leaves_of_the_state_before(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    trace = Trace(recording, ids_as_text)
    seen = 0
    for granularity in ("step", "event", "scene"):
        for index in range(1, trace.count(granularity)):
            view = trace.view(granularity, index)
            gone = [event for event in view.events if isinstance(event, ev.NodeEvicted)]
            for event, victim in zip(gone, victims(trace, view), strict=True):
                assert victim.event is event
                leaves = [node["id"] for node in victim.choices]
                assert event.node in leaves and not any(node["lock_ref"] for node in victim.choices)
                assert event.runner_up is None or event.runner_up != event.node
                seen += 1
            assert len(why(trace, view)) <= 4
    assert seen


def test_the_quiz_asks_before_it_shows(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    output = Stepper(recording, decode=ids_as_text).display()
    stepper = output.stepper
    stepper.first()
    press(output, "quiz", True)
    asked = {"victim": 0, "hit": 0}
    while controls(output)["forward"]:
        before = stepper.index
        press(output, "forward")
        question = stepper.question
        if question is None:
            assert stepper.index == before + 1
            continue
        assert stepper.index == before
        assert controls(output)["question"] == {"text": question.text, "choices": list(question.choices)}
        asked[question.kind] += 1
        assert not question.choices or question.answer in question.choices
        press(output, "answer", question.answer)
        assert stepper.index == before + 1 and "Right" in stepper.message
        assert controls(output)["question"] is None
    assert min(asked.values()) > 0
    assert stepper.score == [sum(asked.values())] * 2


def test_a_wrong_answer_is_told_with_the_reason(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    stepper = Stepper(recording, decode=ids_as_text)
    stepper.first()
    stepper.quiz = True
    stepper.forward()
    assert stepper.question == question_for(stepper.trace, "step", 1)
    assert not stepper.answer("77")
    assert "Not quite" in stepper.message and stepper.score == [0, 1]
    assert not stepper.answer("1") and "no question" in stepper.message


# ---------------------------------------------------------------------- driving


def test_buttons_drive_the_engine(stepper: Stepper) -> None:
    output = stepper.display()
    stepper, engine = output.stepper, stepper.engine
    assert not driving(output)["step"]
    press(output, "type", "3 4 5 6")
    assert driving(output)["hits"] == "0 of 4 tokens would hit"
    press(output, "submit", "3 4 5 6")
    assert driving(output)["taken"] == 1 and driving(output)["hits"] == "" and engine.has_work
    assert "R1" in stepper.state["waiting"] and stepper.shown["requests"][0]["id"] == "R1"
    assert driving(output)["step"]
    press(output, "step")
    assert stepper.state == engine.snapshot()
    press(output, "run")
    assert not engine.has_work and stepper.state == engine.snapshot()
    press(output, "type", "3 4 5 6")
    assert driving(output)["hits"] == "3 of 4 tokens would hit"  # the last one is always computed
    press(output, "evict", 2)
    assert stepper.state == engine.snapshot()
    assert any(isinstance(e, ev.NodeEvicted) for e in stepper.view.events)
    stepper.submit("7 8 9")
    press(output, "flush")
    assert "cannot flush" in stepper.message
    press(output, "run")
    press(output, "flush")
    assert engine.cache.total_size == 0 and stepper.state == engine.snapshot()
    press(output, "evict", 2)
    assert "no token can be evicted" in stepper.message
    engine.check()


def test_forward_at_the_present_steps_the_engine(stepper: Stepper) -> None:
    output = stepper.display()
    stepper = output.stepper
    stepper.submit("3 4 5")
    for _ in range(5):
        assert controls(output)["forward"]
        press(output, "forward")
        assert stepper.state == stepper.engine.snapshot()
    assert not controls(output)["forward"]
    stepper.forward()
    assert "Nothing is left" in stepper.message


def test_what_if_touches_nothing(stepper: Stepper) -> None:
    stepper.submit("3 4 5 6 7 8")
    stepper.run()
    before, frames = stepper.engine.snapshot(), len(stepper.recording)
    output = stepper.display()
    for text in ("3", "3 4 5 60", "", "9 9 9"):
        press(output, "type", text)
    assert stepper.what_if("3 4 5 60") == (3, 4)
    assert stepper.engine.snapshot() == before
    stepper.recording.cut()
    assert len(stepper.recording) == frames


def test_a_refused_prompt_is_told_and_nothing_is_lost(stepper: Stepper) -> None:
    stepper.submit("3 4 5")
    stepper.run()
    before, output = stepper.engine.snapshot(), stepper.display()
    stepper = output.stepper
    press(output, "submit", " ".join(["7"] * 90))
    assert "more than the KV pool" in stepper.message
    assert stepper.shown["message"] == stepper.message
    assert driving(output)["taken"] == 0  # the text stays, to be corrected
    assert stepper.engine.snapshot() == before
    press(output, "type", "words")
    assert driving(output)["refused"] and "no tokenizer" in driving(output)["hits"]
    press(output, "submit", "9999")
    assert "outside the vocabulary" in stepper.message
    assert stepper.submit("words") is None and "no tokenizer" in stepper.message
    assert stepper.submit("") is None and "empty" in stepper.message


def test_submitting_while_the_past_is_on_view(stepper: Stepper) -> None:
    stepper.submit("3 4 5")
    stepper.run()
    output = stepper.display()
    stepper = output.stepper
    stepper.go(1)
    assert "goes to the present" in driving(output)["present"]
    assert stepper.submit("3 4 6") == "R2"
    assert stepper.at_present and "went to the present" in stepper.message
    assert driving(output)["present"] == ""


def test_an_engine_error_in_a_step_becomes_text(stepper: Stepper, monkeypatch) -> None:
    stepper.submit("3 4 5")
    stepper.step()
    shown = stepper.state

    def broken() -> None:
        raise RuntimeError("<b>out of order</b>")

    monkeypatch.setattr(stepper.engine, "step", broken)
    output = stepper.display()
    for name in ("run", "forward"):
        press(output, name)
        assert json.loads(output.model.payload)["message"] == "RuntimeError: <b>out of order</b>"
    assert stepper.state == shown
    with pytest.raises(RuntimeError):  # from Python it is an error like any other
        stepper.run()


def test_a_tree_that_breaks_is_shown(stepper: Stepper, monkeypatch) -> None:
    stepper.submit("3 4 5")
    stepper.step()
    frames, bus = len(stepper.recording), stepper.engine.bus

    def broken() -> None:
        bus.emit(ev.PolicyChanged("lru", "fifo"))  # something of a step that does not end
        raise InvariantError("n1 has 2 tokens, but 5 slots")

    monkeypatch.setattr(stepper.engine, "step", broken)
    for act in (stepper.run, stepper.forward):
        with pytest.raises(InvariantError):
            act()
        frames += 1
        assert len(stepper.recording) == frames and stepper.at_present
        assert stepper.message == "This step broke the tree: n1 has 2 tokens, but 5 slots"
        assert stepper.shown["message"] == stepper.message


# ---------------------------------------------------------------------- forks


def same_events(a: Recording, b: Recording) -> None:
    """Equal but for wall-clock seconds."""

    def plain(recording: Recording) -> list:
        return [
            [e if not isinstance(e, ev.StepEnded) else (e.step, e.kind, e.free, e.private) for e in f.events]
            for f in recording
        ]

    assert plain(a) == plain(b)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_fork_with_nothing_changed_is_the_same_run(make_engine, page_size: int) -> None:
    engine, recording = tiny_run(make_engine, page_size=page_size)
    for upto in (None, 0, 5, len(recording) - 1):
        forked, recorder = fork(recording, upto, model=engine.model)
        forked.check()
        cut = Recording(recording.header, recording.frames[: None if upto is None else upto + 1])
        same_events(recorder, cut)
        assert forked.snapshot() == recording.state(len(cut) - 1)


def test_a_fork_repeats_aborts_evictions_and_flushes(make_engine) -> None:
    engine = make_engine(kv_tokens=40)
    recording = Recorder(engine)
    engine.generate([[3, 4, 5, 6], [3, 4, 9, 9, 9]], SamplingParams(max_new_tokens=3))
    assert evict_by_hand(engine, 2) >= 2
    recording.cut()
    rid = engine.add_request([7, 8, 9], SamplingParams(max_new_tokens=9))
    engine.step()
    engine.abort(rid)
    recording.cut()
    engine.step()
    engine.flush_cache()
    recording.cut()
    engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2))
    recording.close()
    forked, recorder = fork(recording, model=engine.model)
    same_events(recorder, recording)
    assert forked.snapshot() == engine.snapshot()


def test_a_fork_of_a_recorder_that_came_late_aborts_and_samples_the_same(make_engine) -> None:
    engine = make_engine(kv_tokens=60, seed=3)
    engine.generate([[9, 9], [8, 8]], SamplingParams(max_new_tokens=1))
    engine.flush_cache()
    engine.set_eviction_policy("mru")
    hot = SamplingParams(max_new_tokens=6, temperature=1.5, ignore_eos=True)
    with Recorder(engine) as recording:
        ids = [engine.add_request([5, 6, 7 + k], hot) for k in range(3)]
        engine.add_request([4, 4], SamplingParams(max_new_tokens=6, temperature=1.5, seed=77))
        engine.step()
        engine.abort(ids[0])
        while engine.has_work:
            engine.step()
    forked, recorder = fork(recording, model=engine.model)
    forked.check()
    assert forked.cache.eviction_policy == "mru" and not forked.has_work

    def told(recorded: Recording) -> list[tuple[str, int, int]]:
        """What happened to requests, each by its place in the order of arrival."""
        events = [e for frame in recorded for e in frame.events]
        order = [e.request for e in events if isinstance(e, ev.RequestAdded)]
        kinds = (ev.RequestAborted, ev.RequestFinished, ev.TokenSampled)
        return [
            (type(e).__name__, order.index(e.request), getattr(e, "token", -1))
            for e in events if isinstance(e, kinds)
        ]  # fmt: skip

    assert ids == ["R3", "R4", "R5"]
    assert ("RequestAborted", 0, -1) in told(recording)
    assert told(recorder) == told(recording)
    again, second = fork(recorder, model=engine.model)  # the fork's own recording says all of it, too
    assert told(second) == told(recording) and again.snapshot() == forked.snapshot()


def test_a_recording_of_a_gpu_is_forked_where_there_is_none(make_engine, monkeypatch) -> None:
    _, recording = tiny_run(make_engine)
    header = {**recording.header, "config": {**recording.header["config"], "device": "cuda:0",
              "attention": "flashinfer", "cuda_graphs": True}}  # fmt: skip
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = forked_config(Recording(header, recording.frames))
    assert (config.device, config.attention, config.cuda_graphs) == ("auto", "auto", None)


def test_a_fork_with_another_policy_or_pool_has_the_same_requests(make_engine) -> None:
    engine, recording = tiny_run(make_engine)
    added = [e for f in recording for e in f.events if isinstance(e, ev.RequestAdded)]
    for changes in ({"eviction_policy": "mru"}, {"kv_tokens": 20}, {"page_size": 2}, {"chunk_tokens": 3}):
        forked, recorder = fork(recording, model=engine.model, **changes)
        forked.check()
        for name, value in changes.items():
            assert getattr(forked.config, name) == value
        assert [e for f in recorder for e in f.events if isinstance(e, ev.RequestAdded)] == added


@pytest.mark.parametrize("pairs", [None, True, False])
def test_a_fork_with_other_drafts_has_the_keys_that_they_want(make_engine, pairs) -> None:
    """What the recorded ones chose by themselves is chosen anew; what somebody said stays."""
    _, recording = tiny_run(make_engine)
    for before in (None, "ngram", "eagle"):
        head = {"draft_model": "its/head"} if before == "eagle" else {}
        config = dataclasses.asdict(EngineConfig(speculative=before, bigram_keys=pairs, **head))
        saved = Recording({**recording.header, "config": config}, recording.frames)
        for after in (None, "ngram", "eagle"):
            forked = forked_config(saved, speculative=after)
            by_itself = pairs is None or pairs == (before == "eagle")
            same = before == after
            assert forked.bigram_keys == (
                (after == "eagle") if by_itself and not same else config["bigram_keys"]
            )
            assert forked.draft_model == (head.get("draft_model") if same else None)
            assert forked_config(saved, speculative=after, bigram_keys=True).bigram_keys
    with pytest.raises(ValueError, match="its/head"):
        forked_config(saved, speculative="ngram", draft_model="its/head")


def test_what_cannot_be_forked(make_engine) -> None:
    engine, recording = tiny_run(make_engine)
    with pytest.raises(ValueError, match="not in this recording"):
        fork(recording, 999, model=engine.model)
    with pytest.raises(ValueError, match="has no size"):
        fork(recording, size=3, model=engine.model)
    with pytest.raises(ValueError, match="more than the KV pool"):
        fork(recording, kv_tokens=8, model=engine.model)
    with Recorder(engine) as late:
        engine.step()
    with pytest.raises(ValueError, match="begins in the middle"):
        fork(late, model=engine.model)
    with pytest.raises(ValueError, match="cache on its own"):
        fork(Recorder(engine.cache))


def test_fork_from_here_and_back(stepper: Stepper) -> None:
    for text in ("3 4 5 6 7", "3 4 9 9", "20 21 22 23", "30 31 32 33 34 35"):
        stepper.submit(text)
        stepper.run()
    original, there = stepper.engine, stepper.engine.snapshot()
    stepper.go(8)
    output = stepper.display()
    stepper, past = output.stepper, stepper.state
    fields = {name: value for name, _, _, value in driving(output)["fork"]}
    press(output, "fork", {**fields, "eviction_policy": "mru"})
    assert stepper.engine is not original and stepper.engine.config.eviction_policy == "mru"
    assert "Forked at step" in stepper.message and driving(output)["original"]
    assert stepper.state["step"] == past["step"]
    assert original.snapshot() == there
    stepper.submit("3 4 5")
    stepper.run()
    press(output, "original")
    assert stepper.engine is original and stepper.state == past
    assert not stepper.original() and not driving(output)["original"]
    press(output, "fork", {**fields, "kv_tokens": 4})
    assert "more than the KV pool" in stepper.message
    assert stepper.engine is original and stepper.state == past
    for wrong in ({"kv_tokens": 0}, {"kv_tokens": "many"}, {"kv_tokens": None, "nonsense": 1}):
        press(output, "fork", {**fields, **wrong})
        assert list(wrong)[-1] in stepper.message and stepper.engine is original


def test_a_fork_says_whose_mask_it_has_not(make_engine) -> None:
    stepper = Stepper(make_engine(kv_tokens=40))
    engine = stepper.engine
    for mask in (None, lambda output: None):
        engine.add_request([3, 4, 5], WORDS, token_mask=mask)
        stepper.run()
    assert stepper.fork()
    assert stepper.message.endswith("A recording holds no grammars: in this fork the replies of R2 are free.")
    assert stepper.original()
    stepper.go(1)
    assert stepper.fork() and "grammars" not in stepper.message  # R2 was not there yet


# ---------------------------------------------------------------------- the classroom model


def test_a_tree_of_ones_own_is_not_forked(make_engine) -> None:
    stepper = Stepper(make_engine(kv_tokens=40))
    stepper.submit("3 4 5")
    engine, tree = stepper.engine, stepper.engine.cache
    engine.cache = type("StudentCache", (), {"__getattr__": lambda self, name: getattr(tree, name)})()
    assert not stepper.fork(eviction_policy="fifo")
    assert "a tree of its own (StudentCache)" in stepper.message
    assert stepper.engine is engine


def test_the_policy_of_a_tree_of_ones_own_is_its_own(make_engine) -> None:
    stepper = Stepper(make_engine(kv_tokens=40))
    engine, tree = stepper.engine, stepper.engine.cache
    engine.cache = type("StudentCache", (), {"__getattr__": lambda self, name: getattr(tree, name)})()
    assert not stepper.set_policy("fifo")
    assert "StudentCache decides itself who is evicted" in stepper.message
    with pytest.raises(ValueError, match="StudentCache decides itself"):
        engine.set_eviction_policy("fifo")
    assert "eviction_policy" not in vars(engine.cache) and tree.eviction_policy == "lru"


def test_agent_and_raw_do_what_their_names_say(classroom: Engine) -> None:
    classroom.flush_cache()
    output = Stepper(classroom, params=SamplingParams(max_new_tokens=3)).display()
    stepper, shared = output.stepper, len(classroom.encode(corpus.AGENT_PROMPT))
    for name in ("agent", "agent", "raw", "raw"):
        press(output, name)
        press(output, "run")
    requests = stepper.shown["requests"]
    assert requests[1]["cached"] >= shared
    assert requests[2]["cached"] <= 1 and requests[3]["cached"] <= 2
    assert "agent" in requests[0]["text"]


def test_chat_or_not(classroom: Engine) -> None:
    classroom.flush_cache()
    output = Stepper(classroom).display()
    stepper = output.stepper
    messages = [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", "Hello")]
    assert stepper.prompt("Hello") == corpus.chat_text(messages, True)
    press(output, "chat", False)
    assert stepper.prompt("Hello") == "Hello"
    assert stepper.prompt("12 34") == "12 34"


ODD_TEXTS = (
    "<script>alert(1)</script>",
    "a \"quoted\" 'one'\nand\r\nlines",
    "🦙 héé",
    "שלום עולם",
    "\u202egnp\u0000\x1b[31m",
    "&lt;b&gt; %s {x}",
)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_is_shown_as_text(classroom: Engine, text: str) -> None:
    classroom.flush_cache()
    output = Stepper(classroom).display()
    stepper = output.stepper
    press(output, "submit", text)
    stepper.run()
    shown = stepper.shown
    assert "<script" not in shown["svg"]
    for characters in ("\u202e", "\x00", "\x1b", "\n"):
        assert characters not in json.dumps([shown["requests"], shown["events"]], ensure_ascii=False)
    assert stepper.png().startswith(b"\x89PNG")


def test_without_javascript_there_is_a_picture_and_the_sentences(classroom: Engine) -> None:
    classroom.flush_cache()
    stepper = Stepper(classroom)
    stepper.submit("Hello")
    stepper.run()
    bundle, _ = stepper._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    image = Image.open(io.BytesIO(bundle["image/png"]))
    assert image.width > 100
    for sentence in stepper.sentences():
        assert sentence in bundle["text/plain"]
    assert stepper.sentence in repr(stepper)


def test_without_graphviz_it_says_how_to_get_it(make_engine, monkeypatch, request) -> None:
    _, recording = tiny_run(make_engine)
    monkeypatch.setenv("MINIRAD_DOT", "no-such-program")
    find_dot.cache_clear()
    request.addfinalizer(find_dot.cache_clear)
    stepper = Stepper(recording, decode=lambda ids: "other text " + ids_as_text(ids))
    assert "no-such-program" in stepper.shown["message"]
    assert "image/png" not in stepper._repr_mimebundle_()[0]


def test_an_open_recorder_brings_its_past(make_engine) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    engine.generate([[3, 4, 5]], WORDS)
    stepper = Stepper(engine, recording=recorder)
    assert stepper.count == len(recorder) + 1 > 1
    stepper.submit("3 4 5 6")
    assert stepper.run() > 0


def test_the_module_is_one_file_that_fetches_nothing() -> None:
    code = _esm()
    assert "import " not in code.replace("important", "")
    for word in ("http://", "https://", "fetch(", "innerHTML", "eval("):
        assert word not in code.replace("http://www.w3.org/2000/svg", "")
    assert code.count("export default") == 1


# ---------------------------------------------------------------------- one stepper in several outputs


def shown_in(output: Output) -> tuple:
    """(granularity, position, picture) as the browser has them."""
    seen = json.loads(output.model.payload)
    assert (
        seen["index"] == controls(output)["index"] and seen["granularity"] == controls(output)["granularity"]
    )
    return seen["granularity"], seen["index"], seen["title"], seen["svg"]


def models_of(show) -> list[Output]:
    """The outputs that showing something makes, as IPython does it."""
    before = list(Output._alive)
    show()
    return [output for output in Output._alive if output not in before]


def shown_in_cell(monkeypatch, cell: str, run: str, stepper: Stepper) -> Output:
    """Shows a stepper as the last line of a cell does, in a notebook that names its cells."""
    shell = SimpleNamespace(parent_header={"metadata": {"cellId": cell}, "header": {"msg_id": run}})
    monkeypatch.setattr("viz.notebook.stepper.get_ipython", lambda: shell)
    (output,) = models_of(stepper._repr_mimebundle_)
    return output


def test_each_output_keeps_the_position_of_its_cell(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    tour = Stepper(recording, decode=ids_as_text)
    bundles, outputs = [], []
    for name, index in (("step", 4), ("step", 4), ("event", 9), ("scene", 2), ("step", tour.count - 1)):
        tour.granularity = name
        tour.go(index)
        outputs += models_of(lambda: bundles.append(tour._repr_mimebundle_()[0]))
        assert shown_in(outputs[-1]) == (name, index, tour.view.title, tour.shown["svg"])
        assert bundles[-1]["text/plain"] == repr(tour) and bundles[-1]["image/png"] == tour.png()
    models = {bundle["application/vnd.jupyter.widget-view+json"]["model_id"] for bundle in bundles}
    assert models == {output.model.model_id for output in outputs} and len(models) == 5
    tour.first()
    assert [shown_in(output)[:2] for output in outputs] == [
        ("step", 4), ("step", 4), ("event", 9), ("scene", 2), ("step", tour.count - 1),
    ]  # fmt: skip


@pytest.mark.parametrize("act", ["back", "first", "jump", "granularity", "open", "quiz"])
def test_moving_one_output_moves_no_other(make_engine, act: str) -> None:
    _, recording = tiny_run(make_engine)
    tour = Stepper(recording, decode=ids_as_text)
    tour.go(6)
    outputs = [tour.display() for _ in range(3)]
    others = [outputs[0], outputs[2]]
    before = [(output.model.payload, output.model.controls) for output in others]
    press(outputs[1], act, {"jump": "evict", "granularity": "event", "open": 1, "quiz": True}.get(act))
    assert outputs[1].model.payload != before[0][0]
    assert [(output.model.payload, output.model.controls) for output in others] == before
    assert (tour.granularity, tour.index, tour.quiz, tour.options.opened) == ("step", 6, False, frozenset())


def test_an_answer_counts_in_its_own_output(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    tour = Stepper(recording, decode=ids_as_text)
    tour.first()
    one, other = tour.display(), tour.display()
    press(one, "quiz", True)
    press(one, "forward")
    press(one, "answer", "77")
    press(other, "answer", "77")
    assert one.stepper.score == [0, 1] and other.stepper.score == tour.score == [0, 0]
    assert "no question" in other.stepper.message


ENGINE_ACTS = {
    "submit": "3 4 5 6", "step": None, "forward": None, "run": None, "raw": None, "evict": 2, "policy": "mru",
    "flush": None,
}  # fmt: skip


def test_the_engine_is_shared_and_others_learn_how_far_they_can_go(stepper: Stepper) -> None:
    stepper.submit("3 4 5")
    stepper.run()
    stepper.go(2)
    here, there = stepper.display(), stepper.display()
    kept = there.model.payload
    press(here, "last")
    for name, value in ENGINE_ACTS.items():
        press(here, name, value)
        assert here.stepper.message == "" or name == "raw", name  # words: there is no tokenizer
        assert there.model.payload == kept and there.stepper.index == stepper.index == 2
        now = controls(there)
        assert now["count"] == here.stepper.count == stepper.count and now["forward"]
        assert (now["engine"]["step"], now["engine"]["policy"]) == (
            stepper.engine.has_work, stepper.engine.cache.eviction_policy,
        )  # fmt: skip
    assert here.stepper.at_present
    press(there, "last")
    assert shown_in(there)[1:] == shown_in(here)[1:] and there.stepper.state == stepper.engine.snapshot()
    stepper.engine.check()


def test_moves_from_python_reach_outputs_that_are_made_later(stepper: Stepper) -> None:
    first = stepper.display()
    stepper.submit("3 4 5")
    stepper.run()
    assert first.stepper.index == 0 and controls(first)["count"] == stepper.count > 1
    assert stepper.display().stepper.index == stepper.index == stepper.count - 1
    assert stepper.output is None


def test_a_fork_in_one_output_is_its_own(stepper: Stepper) -> None:
    for text in ("3 4 5 6 7", "3 4 9 9"):
        stepper.submit(text)
        stepper.run()
    one, other = stepper.display(), stepper.display()
    kept, original = other.model.payload, stepper.engine
    press(one, "fork", {"eviction_policy": "mru"})
    press(one, "submit", "30 31")
    press(one, "run")
    assert one.stepper.engine is not original and one.stepper.count > other.stepper.count
    assert other.stepper.engine is stepper.engine is original and not driving(other)["original"]
    stepper.submit("40")
    assert controls(other)["count"] == stepper.count and other.model.payload == kept
    assert controls(one)["count"] == one.stepper.count
    press(one, "original")
    assert one.stepper.engine is original and controls(one)["count"] == stepper.count


def test_a_tree_that_fails_to_look_up_a_prompt_stops_no_other_output(stepper: Stepper, monkeypatch) -> None:
    stepper.submit("3 4 5")
    typed, other = stepper.display(), stepper.display()
    press(typed, "type", "3 4")

    def broken(tokens, lora) -> int:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(stepper.engine, "peek", broken)
    press(other, "run")
    assert other.stepper.message == "" and controls(typed)["count"] == other.stepper.count
    assert driving(typed)["refused"] and driving(typed)["hits"] == "IndexError: tuple index out of range"


def test_a_title_given_later_leaves_no_output_beyond_the_end(stepper: Stepper) -> None:
    for text in ("3 4 5", "6 7 8", "9 10"):
        stepper.submit(text)
        stepper.run()
    stepper.granularity = "scene"
    output = stepper.display()
    stepper.recording.scene("the end")
    stepper.submit("11 12")
    stepper.run()
    assert stepper.count <= output._at + 1
    press(output, "last")
    assert shown_in(output)[1] == output.stepper.count - 1


def test_many_outputs_share_one_recording_and_trace(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    tour = Stepper(recording, decode=ids_as_text)
    outputs = [tour.display() for _ in range(20)]
    for output in outputs:
        assert output.stepper.recording is recording and output.stepper.trace is tour.trace
        assert output.stepper._session is tour._session
        assert set(output.model.keys) >= {"payload", "controls"} and "_esm" in output.model.keys


def test_an_output_is_two_models_and_a_stepper_is_none(make_engine) -> None:
    """The picture and its layout: a hundred buttons with theirs, for each output, are slow to open."""
    _, recording = tiny_run(make_engine)
    before = set(ipywidgets.widgets.widget._instances)
    tour = Stepper(recording, decode=ids_as_text)
    assert set(ipywidgets.widgets.widget._instances) == before
    output = tour.display()
    made = set(ipywidgets.widgets.widget._instances) - before
    assert made == {output.model.model_id, output.model.layout.model_id}
    output.close()
    assert set(ipywidgets.widgets.widget._instances) == before


def test_a_cell_that_runs_again_leaves_no_model_behind(make_engine, monkeypatch) -> None:
    _, recording = tiny_run(make_engine)
    before = set(ipywidgets.widgets.widget._instances)
    gone: list[weakref.ref] = []
    for run in range(5):
        tour = Stepper(recording, decode=ids_as_text)  # the cell makes a new one each time
        two = [shown_in_cell(monkeypatch, "a", f"run {run}", tour) for _ in range(2)]
        assert len(set(ipywidgets.widgets.widget._instances) - before) == 2 * 2
        gone += [weakref.ref(output) for output in two]
    other = shown_in_cell(monkeypatch, "b", "run 9", tour)
    press(two[0], "first")
    assert two[0].stepper.index == 0 and other.stepper.index == tour.index > 0
    for output in (*two, other):
        output.close()
    del two, tour, other, output
    end = time.monotonic() + 20
    while any(ref() is not None for ref in gone) and time.monotonic() < end:
        time.sleep(0.02)  # until the threads that lay out the neighbours have noticed
        gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    assert set(ipywidgets.widgets.widget._instances) == before


def test_where_cells_have_no_name_the_oldest_outputs_end(make_engine, monkeypatch) -> None:
    _, recording = tiny_run(make_engine)
    monkeypatch.setattr("viz.notebook.stepper.MOST_OUTPUTS", 3)
    tour = Stepper(recording, decode=ids_as_text)
    outputs = [tour.display() for _ in range(5)]
    assert [output.model.comm is None for output in outputs] == [True, True, False, False, False]
    assert outputs[0].stepper.output is None
    press(outputs[4], "first")
    assert outputs[4].stepper.index == 0


# ---------------------------------------------------------------------- small refusals, and another policy


def test_an_empty_prompt_is_refused_with_a_sentence(classroom: Engine) -> None:
    stepper = Stepper(classroom)
    for text in ("", "  \n"):
        assert stepper.submit(text, chat=True) is None and stepper.submit(text, chat=False) is None
        assert stepper.message == "The prompt is empty: type something first."
    assert not classroom.has_work


def test_a_jump_to_nothing_known_names_what_there_is(stepper: Stepper) -> None:
    with pytest.raises(ValueError, match="'foo' to jump to: split, evict, retract"):
        stepper.jump("foo")


def test_the_policy_can_be_changed_while_it_runs(stepper: Stepper) -> None:
    output = stepper.display()
    stepper = output.stepper
    assert driving(output)["policy"] == "lru"
    stepper.submit("1 2 3 4")
    stepper.step()
    assert stepper.set_policy("mru")
    assert [e.describe() for e in stepper.view.events] == ["eviction policy changed from lru to mru"]
    assert stepper.state["tree"]["eviction_policy"] == "mru" == driving(output)["policy"]
    assert stepper.shown["events"][-1]["tag"] == "policy"
    assert not stepper.set_policy("mru") and "mru already" in stepper.message
    assert not stepper.set_policy("best") and "known: lru" in stepper.message
    press(output, "policy", "fifo")
    assert stepper.engine.cache.eviction_policy == "fifo"  # type: ignore[attr-defined]


@pytest.mark.parametrize("chosen", ["lru", "mru", "fifo"])
def test_a_fork_has_the_policy_that_its_box_says(stepper: Stepper, chosen: str) -> None:
    """The box begins with the policy of the moment on view, which was changed by hand; no choice is lost."""
    output = stepper.display()
    stepper = output.stepper
    stepper.submit("1 2 3 4")
    stepper.run()
    stepper.set_policy("mru")
    fields = {name: value for name, _, _, value in driving(output)["fork"]}
    assert fields["eviction_policy"] == "mru"
    press(output, "fork", {**fields, "eviction_policy": chosen})
    assert stepper.engine.cache.eviction_policy == chosen  # type: ignore[attr-defined]
    assert stepper.state["tree"]["eviction_policy"] == chosen
    assert ("nothing changed" in stepper.message) == (chosen == "mru")
    now = {name: value for name, _, _, value in driving(output)["fork"]}
    assert now["eviction_policy"] == chosen
    press(output, "original")
    stepper.first()
    assert {name: value for name, _, _, value in driving(output)["fork"]}["eviction_policy"] == "lru"


@pytest.mark.parametrize("tokens", [0, -1, 1.5, None, True])
def test_to_evict_nothing_is_a_mistake(stepper: Stepper, tokens: object) -> None:
    stepper.submit("1 2 3 4")
    stepper.run()
    before = stepper.engine.snapshot()
    assert stepper.evict(tokens) == 0 and "tokens to evict must be" in stepper.message
    assert stepper.engine.snapshot() == before
    assert stepper.evict(1) >= 1 and not stepper.message


def test_a_refusal_is_read_below_the_cell_that_asked(stepper: Stepper, capsys) -> None:
    """What the cell does next may move on, and hide the message."""
    stepper.submit(" ".join(["7"] * 90))
    stepper.run()
    stepper.first()
    assert "more than the KV pool" in capsys.readouterr().out
    output = stepper.display()
    press(output, "submit", " ".join(["7"] * 90))
    assert "more than the KV pool" in output.stepper.message and capsys.readouterr().out == ""


def test_what_is_of_another_kind_is_named(stepper: Stepper) -> None:
    with pytest.raises(ValueError, match=r"a text here, got \[1, 2\]"):
        stepper.submit([1, 2])
    with pytest.raises(ValueError, match="an Engine or a Recording, got 5"):
        Stepper(5)
    with pytest.raises(ValueError, match="an Engine or a Recording, got 'it'"):
        Stepper("it", recording=stepper.recording)
    for place in (1.5, "1", None, True):
        with pytest.raises(ValueError, match="position must be a whole number"):
            stepper.go(place)
    repr(stepper)


def test_the_past_does_not_hide_the_present_policy(stepper: Stepper) -> None:
    stepper.submit("1 2 3 4")
    stepper.step()
    stepper.set_policy("lfu")
    stepper.first()
    assert stepper.state["tree"]["eviction_policy"] == "lru"
    assert driving(stepper.display())["policy"] == "lfu"


def test_a_recording_and_a_tree_of_ones_own_have_no_policy_to_change(make_engine) -> None:
    _, recording = tiny_run(make_engine)
    look = Stepper(recording, decode=ids_as_text)
    assert not look.set_policy("lfu") and "no engine to drive" in look.message
