"""viz/view: one view model, from which page, notebook and charts say the same; and how viz's rooms depend."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from support import PlainCache, drive

import viz
from minirad import Engine, EngineConfig, Recorder, SamplingParams
from minirad.observe import events as ev
from minirad.observe.recording import Recording
from viz import kv
from viz.notebook.panels import Ledger, pool_cells
from viz.trace import Trace, ids_as_text
from viz.view.pool import Owner, Pool, device_pool, pages, ranges, runs
from viz.view.quiz import asked_about, question_for
from viz.view.requests import Lives
from viz.view.usage import counted_usage, usage_of
from viz.view.victims import first_frame, victims
from viz.web.page import Page


@pytest.fixture(scope="module")
def recording(tiny_model: Any) -> Recording:
    """A crowded engine: samples, a retraction, evictions, a request that is aborted, one left waiting."""
    engine = Engine(EngineConfig(kv_tokens=40, max_running=3, chunk_tokens=8), model=tiny_model)
    with Recorder(engine, keyframe_every=7) as recording:
        for number in range(14):
            prompt = [3 + number % 3] * 6 + [10 + number, 20 + number, 5]
            params = SamplingParams(max_new_tokens=8, n=1 + number % 2, ignore_eos=True)
            name = engine.add_request(prompt, params, priority=number % 2)
            engine.step()
            engine.check()
            if number == 9:
                engine.abort(name)
        for _ in range(2):  # the second one finds its whole prompt, of which one token is computed anew
            engine.add_request([3, 3, 3, 9, 9, 9, 9], SamplingParams(max_new_tokens=1))
            while engine.has_work:
                engine.step()
                engine.check()
    kinds = {type(event) for frame in recording for event in frame.events}
    assert {ev.RequestForked, ev.RequestRetracted, ev.NodeEvicted, ev.RequestAborted} <= kinds
    return recording


# ---------------------------------------------------------------------- the same for all


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views without their SVG: what these tests look at is beside it."""
    monkeypatch.setattr("viz.draw.tree.tree_svg", lambda *_: "")


@pytest.mark.usefixtures("no_pictures")
def test_owners_are_the_same_on_page_notebook_and_chart(recording: Recording) -> None:
    trace = Trace(recording, ids_as_text)
    page = Page(trace)
    for index in range(trace.count("step")):
        view = trace.view("step", index)
        drawn = page.view("step", index)["pool"]
        by_page = [name for name, count in drawn for _ in range(count)]
        cells = pool_cells(view, ids_as_text)
        by_cell = [f"n{c}" if c > 0 else cells["names"][-c - 1] if c else "" for c in cells["cells"]]
        assert by_cell == [each.label for each in pages(view)] == [n if n[:1] != "x" else "" for n in by_page]
        assert [c == "1" for c in cells["locked"]] == [each.locked for each in pages(view)]


def test_a_request_has_one_life(recording: Recording) -> None:
    trace = Trace(recording, ids_as_text)
    lanes, ledger = Page(trace).requests(), Ledger(recording, ids_as_text)
    told = {each["id"]: each for each in ledger.requests(trace.view())}
    spans = kv.spans(recording)
    for name, life in Lives.of(recording).by_id.items():
        lane = lanes[name]
        assert [lane["added"], lane["end"], lane["reason"]] == [life.added, life.end, life.reason]
        assert lane["segs"][-1][2] == life.end + 1 and told[name]["ended"] == life.reason
        assert told[name]["spans"] == [[s.phase, s.start, s.end] for s in spans if s.request == name]
        assert all(a[2] == b[1] for a, b in zip(life.phases, life.phases[1:], strict=False))


def test_lives_are_what_the_events_of_each_frame_say(recording: Recording) -> None:
    events, passed = [frame.events for frame in recording], 0
    for life in Lives.of(recording).by_id.values():
        drawn = [[e.request for e in frame if isinstance(e, ev.TokenSampled)] for frame in events]
        sampled = [frame for frame, names in enumerate(drawn) if life.id in names]
        kinds = [phase for phase, _, _ in life.phases]
        if kinds[:3] == [
            "waiting",
            "prefill",
            "decode",
        ]:  # decodes from the step after its first token
            assert life.phases[2][1] == sampled[0] + 1 and life.phases[1][1] == life.admitted
        for frame, by in life.passes:
            admitted = [e.request for e in events[frame] if isinstance(e, ev.RequestAdmitted)]
            assert set(by) <= set(admitted) and life.id not in admitted
            passed += 1
    assert passed


def test_hits_are_the_slots_that_were_used(recording: Recording) -> None:
    admitted = [e for frame in recording for e in frame.events if isinstance(e, ev.RequestAdmitted)]
    first = {e.request: e for e in admitted if e.attempt == 1}
    assert any(e.matched != e.cached for e in first.values())
    lanes = Page(Trace(recording, ids_as_text)).requests()
    for hit in kv.request_hits(recording):
        event = first.pop(hit.request)
        assert hit.cached_tokens == lanes[hit.request]["hit"] == event.cached
        assert hit.prompt_tokens == lanes[hit.request]["prompt"]
    assert not any("." not in name for name in first)


def test_lives_that_grow_are_those_of_the_whole(recording: Recording) -> None:
    lives = Lives(recording.header["start"])
    for count in range(0, len(recording.frames) + 3, 3):
        lives.catch_up(recording.frames[:count])
    assert lives.by_id == Lives.of(recording).by_id and lives.changed == Lives.of(recording).changed


def test_usage_is_the_engines_own_count(recording: Recording) -> None:
    trace, counted = Trace(recording, ids_as_text), 0
    frames, points = Page(trace).frames(), kv.usage_points(recording)
    for frame in recording:
        state = trace.state("step", frame.index + 1)
        point = points[frame.index]
        assert usage_of(state) == (point.free, point.evictable, point.protected, point.private)
        assert frames[frame.index]["u"] == list(usage_of(state))
        if (own := counted_usage(frame)) is not None:
            assert own == usage_of(state)
            counted += 1
    assert counted > 10


@pytest.mark.usefixtures("no_pictures")
def test_page_and_notebook_ask_and_explain_the_same(recording: Recording) -> None:
    trace = Trace(recording, ids_as_text)
    page, asked = Page(trace), 0
    for granularity in ("step", "scene", "event"):
        for index in range(1, trace.count(granularity)):
            view = trace.view(granularity, index)
            shown, question = page.view(granularity, index)["quiz"], question_for(trace, granularity, index)
            assert (shown is None) == (question is None) == (asked_about(view) is None)
            if shown and question:
                assert shown["ask"] == question.kind
                assert shown["ask"] == "hit" or question.check(str(shown["answer"]))
                asked += 1
            first = first_frame(trace, view)
            assert first == view.frame or granularity == "scene"
            whole = [e for f in range(first, view.frame + 1) for e in trace.frame_events(f)]
            assert granularity == "event" or list(view.events) == whole
    assert asked > 20


def test_a_victim_is_the_first_of_its_choices(recording: Recording) -> None:
    trace, seen = Trace(recording, ids_as_text), 0
    for index in range(1, trace.count("step")):
        for victim in victims(trace, trace.view("step", index)):
            assert victim.choices[0]["id"] == victim.event.node and victim.what == "evicted"
            ids = [node["id"] for node in victim.choices]  # a runner-up may become a leaf only by this
            assert victim.event.runner_up not in ids or ids[1] == victim.event.runner_up
            seen += 1
    assert seen == len(kv.evictions(recording)) > 0


def test_a_tree_that_tells_nothing_is_asked_about_where_the_answer_is_known(tiny_model: Any) -> None:
    """What a recorder finds out afterwards has no order: where the choices are not known, none is asked."""
    engine = Engine(EngineConfig(kv_tokens=48, max_running=3), PlainCache(), model=tiny_model)
    with Recorder(engine) as recording:
        for number in range(12):
            engine.add_request([3 + number % 4] * 8 + [20 + number] * 4, SamplingParams(max_new_tokens=4))
            engine.step()
        drive(engine)
    trace = Trace(recording, ids_as_text)
    asked = [question_for(trace, "step", index) for index in range(1, trace.count("step"))]
    victims_asked = [question for question in asked if question and question.kind == "victim"]
    assert victims_asked and all(question.answer in question.choices for question in victims_asked)


# ---------------------------------------------------------------------- small parts


def test_runs_of_pages() -> None:
    a, b = Owner("node", 1, "", False, [2, 3]), Owner("private", 0, "R1", True, [5, 9])
    pool = Pool(1, 6, (a, b))
    assert pool.runs() == [(None, 1), (a, 2), (None, 1), (b, 1), (None, 1)]
    assert Pool(1, 0, ()).runs() == [] and Pool(1, 3, ()).runs() == [(None, 3)]
    assert (a.name, b.name) == ("n1", "R1") and 9 not in pool.by_page()
    assert runs([3, 4, 5, 9]) == [[3, 3], [9, 1]] and ranges([9, 4, 3, 3, 5]) == [[3, 5], [9, 9]]


def test_a_tree_on_its_own_has_as_many_pages_as_it_uses() -> None:
    node = {"id": 4, "parent": 0, "slots": [8, 9, 2, 3], "tokens": [1, 2, 3, 4], "lock_ref": 0}
    tree = {"page_size": 2, "nodes": [node]}
    state = {"kv_tokens": 0, "free": 0, "requests": {}, "tree": tree}
    assert device_pool(state).last == 4 and [page.label for page in pages(state)] == ["n4", "", "", "n4"]
    assert [page.text for page in pages(state)] == ["3 4", "", "", "1 2"]
    assert usage_of(state) == (0, 4, 0, 0)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("viz.live", "Driver Live Settings COMMANDS _replay main"),
        ("viz.page", "Page"),
        ("viz.stepper", "Stepper Output fork"),
        ("viz.tree", "DETAILS Options dot_text tree_svg tree_png"),
        (
            "viz.kv",
            "pages pool_map host_map usage hit_rate timeline age_at_eviction request_hits spans KvFigure",
        ),
        ("viz.trace", "Trace View decoder_of"),
        ("viz.roofline", "MEASURED read steps main"),
        ("viz.figure3", "main"),
        ("viz.gallery", "main"),
    ],
)
def test_names_that_notebooks_lessons_and_the_readme_use_stay(module: str, names: str) -> None:
    there = vars(importlib.import_module(module))
    assert [name for name in names.split() if name not in there] == []


# ---------------------------------------------------------------------- how the rooms depend on one another

VIZ = Path(viz.__file__).parent
# What each room may import of viz, besides itself; modules at the top may import all but commands.
ROOMS = {
    "view": ("viz.trace", "viz.words"),
    "draw": ("viz.trace", "viz.words", "viz.view"),
    "web": ("viz.trace", "viz.words", "viz.view", "viz.draw", "viz.fork"),
    "notebook": ("viz.trace", "viz.words", "viz.view", "viz.draw", "viz.fork"),
}


def imports() -> dict[str, set[str]]:
    """Module -> the modules of viz that it imports, those within functions among them."""
    places = [(file, file.relative_to(VIZ).with_suffix("").parts) for file in VIZ.rglob("*.py")]
    files = {".".join(("viz", *parts)).removesuffix(".__init__"): file for file, parts in places}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        found[name] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "viz":
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {each if each in files else node.module for each in whole}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in files}
    return found


def test_no_modules_of_viz_import_one_another_in_a_circle() -> None:
    graph, done = imports(), set[str]()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_rooms_import_what_they_may() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for room in [name.split(".")[1] if name.count(".") > 1 else ""]
        if room
        for other in others
        if not other.startswith((f"viz.{room}", *ROOMS[room]))
    ]
    assert wrong == []


def test_no_function_of_viz_is_longer_than_50_lines() -> None:
    long = [
        f"{file.relative_to(VIZ)}:{node.lineno} {node.name}"
        for file in VIZ.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 50
    ]
    assert long == []
