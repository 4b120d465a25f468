"""viz/draw/charts.py: the numbers behind each chart equal the engine's, and charts say them safely."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from PIL import Image

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from viz import kv
from viz.draw.charts import shown
from viz.draw.still import still
from viz.trace import Trace
from viz.view.usage import usage_of

FIGURES = (kv.usage, kv.hit_rate, kv.timeline, kv.age_at_eviction)


@pytest.fixture(params=[1, 4], ids=["page1", "page4"])
def run(request: pytest.FixtureRequest, make_engine) -> tuple[Engine, Recorder, list, list[dict]]:
    """A crowded run: chunks, samples, evictions, a retraction; with reports and snapshots per step."""
    engine = make_engine(kv_tokens=48, page_size=request.param, max_running=3, chunk_tokens=8)
    rng = random.Random(3)
    reports, states = [], []
    recording = Recorder(engine, keyframe_every=1000)
    shared = [rng.randrange(3, 60) for _ in range(10)]
    for number in range(9):
        own = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 6))]
        n = 2 if number == 4 else 1
        engine.add_request(
            shared[: rng.randrange(11)] + own,
            SamplingParams(max_new_tokens=rng.randrange(1, 22), ignore_eos=True, n=n, temperature=1.0),
        )
        for _ in range(4):
            reports.append(engine.step())
            states.append(engine.snapshot())
    while engine.has_work:
        reports.append(engine.step())
        states.append(engine.snapshot())
    recording.close()
    return engine, recording, reports, states


def events_of(recording: Recording, kind: type[ev.Event]) -> Iterator[ev.Event]:
    return (event for frame in recording for event in frame.events if isinstance(event, kind))


def test_the_run_is_worth_testing_with(run) -> None:
    _, recording, reports, _ = run
    assert any(report.retracted for report in reports) or run[0].config.page_size > 1
    assert next(events_of(recording, ev.NodeEvicted), None)
    assert next(events_of(recording, ev.NodeSplit), None)


def test_every_page_has_the_owner_that_the_engine_says(run) -> None:
    engine, recording, _, states = run
    size = engine.config.page_size
    for index, state in enumerate(states):
        cells = kv.pages(recording.state(index))
        assert [cell.number for cell in cells] == list(range(1, 48 // size + 1))
        assert sum(cell.owner == "free" for cell in cells) * size == state["free"]
        by_number = {cell.number: cell for cell in cells}
        for node in state["tree"]["nodes"]:
            for slot in node["slots"]:
                cell = by_number[slot // size]
                assert (cell.owner, cell.node) == ("node", node["id"])
                assert cell.locked == (node["lock_ref"] > 0)
        for name, request in state["requests"].items():
            for at, slot in enumerate(request["slots"]):
                cell = by_number[slot // size]
                assert name in cell.users
                if at >= request["protected"]:
                    assert (cell.owner, cell.request) == ("private", name)


def test_a_page_says_its_text() -> None:
    node = {"id": 3, "parent": 0, "tokens": [7, 8, 9, 10], "slots": [4, 5, 8, 9], "lock_ref": 0}
    state = {"tree": {"page_size": 2, "nodes": [node]}, "requests": {}, "kv_tokens": 10}
    texts = {cell.number: cell.text for cell in kv.pages(state, lambda ids: "+".join(map(str, ids)))}
    assert texts == {1: "", 2: "7+8", 3: "", 4: "9+10", 5: ""}


def test_pool_map_takes_a_state_a_replay_or_a_view(run) -> None:
    _, recording, _, _ = run
    view = Trace(recording).view("step", 12)
    figures = [kv.pool_map(each) for each in (recording.state(11), recording.replay_to(11), view)]
    assert figures[0] == figures[1] == figures[2]
    assert "cached" in figures[0].layout.title.text


def test_usage_equals_the_steps_own_books_and_the_recomputed_ones(run) -> None:
    _, recording, reports, _ = run
    points = kv.usage_points(recording)
    ended = list(events_of(recording, ev.StepEnded))
    assert len(points) == len(reports) == len(ended)
    for index, (point, end) in enumerate(zip(points, ended, strict=True)):
        books = (end.free, end.evictable, end.protected, end.private)
        assert (point.free, point.evictable, point.protected, point.private) == books
        assert usage_of(recording.replay_to(index)) == books
        assert sum(books) == 48


def test_hits_equal_the_step_reports(run) -> None:
    _, recording, reports, _ = run
    hits = kv.request_hits(recording)
    assert len(hits) == 9
    assert sum(hit.cached_tokens for hit in hits) == sum(report.hit_tokens for report in reports)
    total = sum(report.prompt_tokens for report in reports)
    assert sum(hit.prompt_tokens for hit in hits) == total
    computed = total - sum(hit.cached_tokens for hit in hits)
    assert hits[-1].cumulative == pytest.approx(1 - computed / total)
    outs = {out.request_id: out for report in reports for out in report.finished}
    for hit in hits:
        assert (hit.prompt_tokens, hit.cached_tokens) == (
            outs[hit.request].prompt_tokens,
            outs[hit.request].cached_tokens,
        )


def test_spans_follow_every_request_through_the_reports(run) -> None:
    _, recording, reports, _ = run
    found = kv.spans(recording)
    for report in reports:
        for name in report.batch:
            (span,) = [s for s in found if s.request == name and s.start <= report.index <= s.end]
            assert span.phase == report.kind
        for name in report.retracted:
            (span,) = [s for s in found if s.request == name and s.start <= report.index <= s.end]
            assert span.phase in ("retracted", "prefill")  # forked without room: it was prefilled
    computed = sum(sum(event.tokens) for event in events_of(recording, ev.BatchScheduled))
    assert sum(span.tokens for span in found) == computed
    endings = {span.request: span.ending for span in found if span.ending}
    assert endings == {e.request: e.reason for e in events_of(recording, ev.RequestFinished)}
    for name in endings:
        mine = [span for span in found if span.request == name]
        assert all(a.end + 1 == b.start for a, b in pairwise(mine))


def test_a_long_prompt_is_a_span_per_chunk(make_engine) -> None:
    engine = make_engine(chunk_tokens=5)
    with Recorder(engine) as recording:
        engine.generate([list(range(3, 17))], SamplingParams(max_new_tokens=4, ignore_eos=True))
    found = kv.spans(recording)
    assert [(s.phase, s.tokens) for s in found] == [
        ("prefill", 5), ("prefill", 5), ("prefill", 4), ("decode", 3),
    ]  # fmt: skip


def test_aborts_and_what_happens_between_steps(make_engine) -> None:
    engine = make_engine()
    with Recorder(engine) as recording:
        rid = engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=20, ignore_eos=True))
        engine.step()
        engine.abort(rid)
    found = kv.spans(recording)
    assert [(s.phase, s.start, s.end, s.ending) for s in found] == [("prefill", 1, 1, "abort")]
    assert len(kv.usage_points(recording)) == 2
    assert kv.usage_points(recording)[-1].free == 64 - 3


def test_evictions_carry_the_age_that_the_tree_had(run) -> None:
    _, recording, reports, states = run
    gone = kv.evictions(recording)
    assert sum(e.tokens for e in gone) == sum(report.evicted_tokens for report in reports)
    for each in gone:
        before = {n["id"]: n for n in states[each.step - 2]["tree"]["nodes"]}
        assert each.age >= 0 and each.life >= each.age
        if each.node in before:
            assert each.hits >= before[each.node]["hits"]
    assert all(each.policy == "lru" for each in gone)


def test_figures_are_plain_small_and_carry_a_still(run) -> None:
    _, recording, _, _ = run
    figures = [figure(recording) for figure in FIGURES] + [kv.pool_map(recording.state(5))]
    for figure in figures:
        bundle = figure._repr_mimebundle_()
        assert set(bundle) == {"application/vnd.plotly.v1+json", "image/png", "text/plain"}
        assert figure._repr_html_() is None
        assert len(json.dumps(bundle["application/vnd.plotly.v1+json"])) < 200_000
        image = Image.open(io.BytesIO(bundle["image/png"]))
        assert image.width <= 800, "a cell of JupyterLab beside its file list"
        assert Image.open(io.BytesIO(still(figure))).width >= 1200, "the notebook as it is published"
        assert len(image.convert("RGB").getcolors(100_000)) > 3
        assert "<script" not in json.dumps(bundle["application/vnd.plotly.v1+json"])


def test_figures_of_nothing() -> None:
    start = {"step": 0, "kv_tokens": 0, "free": 0, "waiting": [], "requests": {},
             "tree": {"page_size": 1, "eviction_policy": "lru", "tick": 0, "nodes": []}}  # fmt: skip
    empty = Recording({"minirad": 1, "config": {}, "model": {}, "start": start})
    for figure in (*(each(empty) for each in FIGURES), kv.pool_map(start)):
        assert figure._repr_mimebundle_()["image/png"]


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "a\nb\r\n\"c\" 'd'", "🦙🦙", "שלום", "x\u202eevil", "<br>" * 90]
)
def test_hover_text_is_escaped(text: str) -> None:
    line = shown(text, 40)
    assert "<" not in line and "\n" not in line
    assert line.startswith("\u2068") and line.endswith("\u2069")


def test_prompts_reach_the_hover_boxes_escaped(make_engine) -> None:
    engine = make_engine()
    with Recorder(engine) as recording:
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    figures = [
        kv.hit_rate(recording, lambda ids: "<img src=x>"),
        kv.timeline(recording, lambda ids: "<img src=x>"),
        kv.pool_map(recording.state(0), lambda ids: "<img src=x>"),
    ]
    for figure in figures:
        text = json.dumps(figure._repr_mimebundle_()["application/vnd.plotly.v1+json"])
        assert "<img" not in text and "&lt;img" in text


def test_without_colour_the_phases_and_shares_still_differ() -> None:
    for table in (kv.PHASES, kv.USAGE):
        looks = [(colour, pattern) for _, colour, pattern in table]
        assert len(set(looks)) == len(looks)
    for a, b in pairwise(kv.OWNERS):
        assert a != b


def test_a_recording_of_the_classroom_model_shows_words() -> None:
    engine = Engine(EngineConfig(kv_tokens=200))
    with Recorder(engine) as recording:
        engine.generate("Hello there", SamplingParams(max_new_tokens=1))
    assert kv.request_hits(recording)[0].text == "Hello there"
