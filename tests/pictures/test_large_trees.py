"""Large trees and streams: views share what did not change, plans are made from arrays, pages send little."""

from __future__ import annotations

import copy
import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.observe import events as ev
from minirad.observe.event import Nodes, ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.snapshot import evictable_leaves, units
from viz.draw import fold, tree
from viz.measure import STEPS, grown
from viz.notebook.stepper import Stepper
from viz.trace import Trace, View, ids_as_text
from viz.view import victims as explained
from viz.view.columns import Columns, PageOwners, table_of
from viz.view.pool import device_pool, page_map
from viz.view.usage import usage_of
from viz.web.page import Page, pool_runs


@pytest.fixture(scope="module", params=["mixed", "wide", "deep"])
def large(request: pytest.FixtureRequest) -> Recording:
    return grown(request.param, 4000)


@pytest.fixture(scope="module")
def stream() -> Recording:
    return grown("stream", 4000)


def played(seed: int, steps: int = 50) -> Recording:
    """A small tree that grows, is hit, split, locked and evicted from, step by step."""
    rng, cache, next_slot = np.random.default_rng(seed), RadixCache(), 1
    with Recorder(cache, keyframe_every=9) as recorder:
        locked: list[Any] = []
        for _ in range(steps):
            key, act = RadixKey(rng.integers(0, 3, int(rng.integers(1, 12))).tolist()), rng.integers(0, 6)
            if act < 3:
                cache.insert(key, np.arange(next_slot, next_slot + len(key.tokens)))
                next_slot += len(key.tokens)
            elif act == 3:
                cache.evict(int(rng.integers(1, 12)))
            elif act == 4 and locked:
                cache.dec_lock_ref(locked.pop())
            else:
                locked.append(cache.match_prefix(key).last_node)
                cache.inc_lock_ref(locked[-1])
            recorder.cut()
    return recorder


# ---------------------------------------------------------------------- states that share their nodes


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.sampled_from(["event", "step"]), st.integers(0, 999)), max_size=25),
)
def test_views_that_are_kept_never_change_and_all_ways_lead_to_the_same(
    seed: int, ways: list[tuple[str, int]]
) -> None:
    recording = played(seed, 30)
    trace, seen = Trace(recording, ids_as_text), []
    for granularity, at in ways:
        view = trace.view(granularity, at % trace.count(granularity))
        seen.append((view, copy.deepcopy((view.state, view.status, view.ghosts, view.nodes))))
    for view, then in seen:
        assert (view.state, view.status, view.ghosts, view.nodes) == then
        state = ReplayState(recording.header["start"])
        before = [e for f in recording.frames for e in f.events][: _events_at(trace, view)]
        for event in before:
            state.apply(event)
        assert view.state == state.snapshot()
        fresh = Trace(recording, ids_as_text).view(view.granularity, view.index)
        assert (view.status, view.also, view.ghosts) == (fresh.status, fresh.also, fresh.ghosts)


def _events_at(trace: Trace, view: View) -> int:
    return trace.convert(view.granularity, view.index, "event") if view.granularity == "step" else view.index


def test_any_way_to_change_a_node_leaves_snapshots_alone() -> None:
    node = {"id": 3, "parent": 0, "slots": [1], "tokens": [7], "held": {"0": "GPU"}, "hits": 0}
    state = ReplayState(
        {"tree": {"nodes": [node], "ranks": [{"seq": 1}]}, "requests": {}, "waiting": [], "free": 0}
    )
    first = state.snapshot()
    for change in (
        lambda nodes: nodes[3]["slots"].append(2),
        lambda nodes: nodes.get(3)["held"].update({"1": "CPU"}),
        lambda nodes: [each.update(hits=9) for each in nodes.values()],
        lambda nodes: [each.update(parent=5) for _, each in nodes.items()],
        lambda nodes: nodes.pop(3).update(hits=4),
    ):
        kept = state.snapshot()
        told = copy.deepcopy(kept)
        change(state.nodes)
        state.tree["ranks"][0]["seq"] += 1
        assert kept == told and 3 in state.nodes.changed()
    assert first["tree"]["nodes"] == [node] and node["hits"] == 0 and node["slots"] == [1]
    assert state.snapshot()["tree"]["nodes"] == []


def test_a_step_copies_the_nodes_that_it_changes_and_no_others(large: Recording) -> None:
    trace, end = Trace(large, ids_as_text), len(large.frames)
    before, after = trace.view("step", end - 1), trace.view("step", end)
    others = [n for n, node in after.nodes.items() if before.nodes.get(n) is not node]
    named = {number for event in after.events for number in event.touches()}
    assert others and set(others) <= named


def test_a_step_back_replays_little(large: Recording) -> None:
    """Counted: how many events are applied for it, after a long replay has left landmarks."""
    bare = Recording(large.header, [type(f)(f.index, f.step, f.events) for f in large.frames])
    trace, end = Trace(bare, ids_as_text, kept=0), len(bare.frames)
    trace.view("step", end)
    trace.view("step", end - 10)
    applied: list[ev.Event] = []
    original = ReplayState.apply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ReplayState, "apply", lambda self, event: (applied.append(event), original(self, event))[1]
        )
        view = trace.view("step", end - 11)
    assert 0 < len(applied) <= 400 < 4000
    assert view.state == Trace(large, ids_as_text).view("step", end - 11).state


def test_keyframes_share_nodes_in_memory_and_read_from_a_file(tmp_path: Path) -> None:
    recording = played(5, 60)
    recording.save(tmp_path / "run.jsonl")
    for each in (recording, Recording.load(tmp_path / "run.jsonl")):
        states = [frame.keyframe for frame in each.frames if frame.keyframe is not None]
        equal = same = 0
        for before, after in pairwise(states):
            known = {node["id"]: node for node in before["tree"]["nodes"]}
            pairs = [(known.get(node["id"]), node) for node in after["tree"]["nodes"]]
            equal += sum(old == node for old, node in pairs)
            same += sum(old is node for old, node in pairs)
        assert same > 3 and (same == equal or each is not recording)
        each.check()


# ---------------------------------------------------------------------- arrays


@pytest.mark.parametrize("seed", range(4))
def test_arrays_that_are_kept_up_are_those_of_all_nodes(seed: int) -> None:
    trace = Trace(played(seed), ids_as_text)
    order = np.random.default_rng(seed).permutation(trace.count()).tolist()
    for index in [*range(trace.count()), *order]:
        view = trace.view("step", index)
        assert np.array_equal(view.table.rows, table_of(view.nodes).rows)
        anew = PageOwners(1)
        anew.update({}, view.nodes, list(view.nodes))
        cells = view.once("cells", lambda: None)
        assert cells is not None and cells[cells > 0].tolist() == anew.cells[anew.cells > 0].tolist()
        assert pool_runs(view) == [[o.name if o else "", count] for o, count in device_pool(view).runs()]
        assert usage_of(view) == usage_of(view.state)
        owned = device_pool(view.state).by_page()
        assert page_map(view, False).locked.tolist() == [
            (at in owned and owned[at].locked) for at in range(1, device_pool(view.state).last + 1)
        ]


@pytest.mark.parametrize("levels", [0, 10**9])
@pytest.mark.parametrize("shape", ["mixed", "wide", "deep"])
def test_what_lies_below_is_added_up_the_same_level_by_level_and_node_by_node(
    shape: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viz.view.columns._LEVELS", levels)
    nodes = Trace(grown(shape, 1100), ids_as_text).view().nodes
    table, counted, tokens = table_of(nodes), dict.fromkeys([0, *nodes], 0), dict.fromkeys([0, *nodes], 0)
    for number, node in nodes.items():
        at = number
        while True:
            counted[at] += 1
            tokens[at] += units(node)
            if not at:
                break
            at = nodes[at]["parent"] if nodes[at]["parent"] in nodes else 0
    ids = table.id.tolist()
    assert dict(zip([*ids, 0], table.below.nodes.tolist(), strict=True)) == counted
    assert dict(zip([*ids, 0], table.below.tokens.tolist(), strict=True)) == tokens


def test_nodes_that_are_their_own_ancestors_are_below_nothing() -> None:
    nodes = {n: _node(n, parent) for n, parent in ((1, 0), (2, 1), (3, 4), (4, 3), (5, 99))}
    table = table_of(nodes)
    assert table.below.nodes.tolist()[-1] == 3, "1, 2, and 5, whose parent is not there"
    view = _view(nodes)
    made = fold.Heaviest(view, frozenset(), 10)
    assert {made.id(place) for place in made.shown} == {0, 1, 2, 5} and not made.folds


def _node(number: int, parent: int, tokens: int = 1) -> dict[str, Any]:
    return {
        "id": number, "parent": parent, "tokens": [1] * tokens, "slots": [], "units": tokens, "namespace": 0,
        "lock_ref": 0, "last_access": number, "created": number, "hits": 0, "priority": 0,
        "held": {"0": "GPU"}, "seen": True, "blocks": 1,
    }  # fmt: skip


def _view(nodes: dict[int, Any], **status: str) -> View:
    told = {
        "page_size": 16,
        "eviction_policy": "theirs",
        "tick": 9,
        "nodes": list(nodes.values()),
        "ranks": [],
    }
    state = {"step": 1, "kv_tokens": 0, "free": 0, "tree": told, "waiting": [], "requests": {}}
    looks = {n: status.get(f"n{n}", "cached") for n in nodes}
    return View("step", 1, 0, 1, "", (), (), state, looks, {}, {}, frozenset())


# ---------------------------------------------------------------------- what is drawn


def test_cards_and_folds_are_all_of_the_tree(large: Recording) -> None:
    trace, end = Trace(large, ids_as_text), len(large.frames)
    for index in (end - STEPS, end - 3, end):
        view = trace.view("step", index)
        for opened in (frozenset[int](), frozenset({0}), frozenset({0, 1, 2})):
            plan = tree.plan(view, tree.Options(opened=opened))
            shown = {node["id"] for node in plan.nodes}
            all_of_them = [*view.nodes.values(), *view.ghosts.values()]
            assert len(shown) + sum(count for _, count, _ in plan.folds) == len(all_of_them)
            drawn = sum(map(units, plan.nodes)) + sum(tokens for *_, tokens in plan.folds)
            assert drawn == sum(map(units, all_of_them))
            assert all(node["parent"] in shown | {0} or node["id"] in plan.hanging for node in plan.nodes)
            assert set(plan.hanging.values()) <= {parent for parent, *_ in plan.folds}
            assert len(shown) <= fold.CARDS + fold.HOT + fold.OPENED * len(opened)
        inserted = {event.node for event in view.events if isinstance(event, ev.NodeInserted)}
        assert index < end - STEPS + 1 or inserted <= {node["id"] for node in tree.plan(view).nodes}


def test_the_heaviest_are_shown_and_a_fold_opens_to_the_heaviest_of_the_rest() -> None:
    nodes = {n: _node(n, 0 if n <= 500 else 1, tokens=n) for n in range(1, 5001)}
    view = _view(nodes, n7="stored")
    plan = tree.plan(view)
    shown = {node["id"] for node in plan.nodes}
    assert {1, 7} <= shown and len(shown) == fold.CARDS, "the heaviest subtree, and what just happened"
    assert {n for n in shown if n > 500} == set(range(5001 - len([n for n in shown if n > 500]), 5001))
    opened = {node["id"] for node in tree.plan(view, tree.Options(opened=frozenset({0}))).nodes} - shown
    assert len(opened) == fold.OPENED
    text = tree.dot_text(view, ids_as_text)
    assert "+4953 nodes, 12.3 M tokens" in text or "nodes" in text.split('id="f1"')[1][:400]


def test_what_happens_far_down_hangs_from_a_fold() -> None:
    nodes = {n: _node(n, n - 1) for n in range(1, 5001)}
    view = _view(nodes, n4000="removed")
    plan = tree.plan(view)
    assert plan.hanging == {4000: max(node["id"] for node in plan.nodes if node["id"] < 4000)}
    text = tree.dot_text(view, ids_as_text)
    assert f"f{plan.hanging[4000]} -> n4000" in text and "REMOVED" in text
    assert "<svg" in tree.svg(text)


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0"), (9999, "9999"), (10_000, "10 k"), (340_499, "340 k"), (999_499, "999 k"), (999_500, "1.0 M"),
     (1_249_000, "1.2 M"), (99_950_000, "100 M"), (3_200_000_000, "3200 M")],
)  # fmt: skip
def test_numbers_are_short(count: int, said: str) -> None:
    assert tree.short(count) == said


def test_a_hole_and_what_was_not_seen_have_words_of_their_own() -> None:
    nodes = {n: _node(n, n - 1) for n in (1, 2, 3)}
    nodes[1]["held"], nodes[2]["seen"], nodes[2]["held"] = {}, False, {}
    state = _view(nodes).state
    trace = Trace(Recording({"minirad": 1, "config": {}, "model": {}, "start": state}), ids_as_text)
    assert trace.view().status == {1: "hole", 2: "unseen", 3: "cached"}
    text = tree.dot_text(trace.view(), ids_as_text)
    assert "HOLE" in text and "NOT SEEN" in text and "1 block" in text
    assert "gap" in trace.marks()


# ---------------------------------------------------------------------- page, stepper, reasons


def test_a_page_of_a_large_tree_sends_what_is_drawn_or_spoken_of(large: Recording) -> None:
    page, end = Page(Trace(large, ids_as_text)), len(large.frames)
    shown = page.view("step", end)
    view = page.trace.view("step", end)
    assert "failed" not in shown and shown["count"] == len(view.nodes) + len(view.ghosts)
    assert {node["id"] for node in tree.plan(view, tree.Options(height=400)).nodes} <= set(shown["nodes"])
    assert {number for e in view.events for number in e.touches()} <= set(shown["nodes"])
    assert len(shown["nodes"]) < 200 and len(json.dumps(shown)) < 400_000
    assert sum(count for _, count in shown["pool"]) == large.header["start"]["kv_tokens"] // 16
    assert len(shown["pool"]) <= 4096


def test_a_stream_goes_through_page_and_stepper(stream: Recording) -> None:
    page, end = Page(Trace(stream, ids_as_text)), len(stream.frames)
    for index in (end, end - 1, 1):
        assert "failed" not in page.view("step", index)
    assert all(frame["u"] == [0, 0, 0, 0] for frame in page.frames()) and page.view("step", end)["pool"] == []
    stepper = Stepper(stream, decode=ids_as_text)
    assert stepper.shown["pool"]["cells"] == [] and "<svg" in stepper.shown["svg"]
    stepper.back()
    assert stepper.view.status[1] in ("hit", "cached") and "<svg" in stepper.shown["svg"]


@pytest.mark.parametrize("shape", ["mixed", "stream"])
def test_no_view_looks_at_all_nodes_of_a_large_tree(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: what makes something of a node, for a step forward on page and stepper."""
    recording = grown(shape, 3500)
    page, stepper = Page(Trace(recording, ids_as_text)), Stepper(recording, decode=ids_as_text)
    index = len(recording.frames) - 9
    page.view("step", index)
    stepper.go(index)
    assert stepper.shown["svg"]
    looks: list[int] = []
    for module, name in (("columns", "units"), ("columns", "rest_of"), ("pool", "key_tokens")):
        original = getattr(import_module(f"viz.view.{module}"), name)
        counted = lambda node, original=original: (looks.append(1), original(node))[1]  # noqa: E731
        monkeypatch.setattr(f"viz.view.{module}.{name}", counted)
    monkeypatch.setattr(Nodes, "_own_all", lambda self: pytest.fail("all nodes were copied"))
    assert "failed" not in page.view("step", index + 1)
    stepper.forward()
    assert "<svg" in stepper.shown["svg"] and len(looks) < 200


@pytest.mark.parametrize("seed", range(3))
def test_choices_of_a_large_tree_are_those_of_a_small_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(played(seed), ids_as_text)
    views = [trace.view("step", index) for index in range(trace.count())]
    slow = [explained.victims(trace, view) for view in views]
    told = [[(v.event, [n["id"] for n in v.choices], v.count) for v in each] for each in slow]
    assert sum(map(len, told)) > 3
    monkeypatch.setattr(explained, "LARGE", 0)
    for view, wanted in zip(views, told, strict=True):
        found = [(v.event, [n["id"] for n in v.choices], v.count) for v in explained.victims(trace, view)]
        assert found == wanted
        for victim in explained.victims(trace, view):
            assert victim.count == len(evictable_leaves(victim.nodes))


def test_columns_make_room_and_forget() -> None:
    columns, nodes = Columns(), {n: _node(n, 0) for n in range(1, 3000)}
    columns.update(nodes, nodes)
    for n in range(1, 2000):
        del nodes[n]
    columns.update(nodes, list(range(1, 2000)))
    more = {n: _node(n, 0) for n in range(5000, 9000)}
    columns.update({**nodes, **more}, list(more))
    assert np.array_equal(columns.table().rows, table_of({**nodes, **more}).rows)
    assert isinstance(Nodes({}), dict)


def test_a_fold_that_is_opened_again_shows_more_of_it() -> None:
    view = Trace(grown("wide", 4000)).view()
    sizes = [len(tree.plan(view, tree.Options(opened=(1,) * times)).nodes) for times in range(4)]
    assert [more - less for less, more in pairwise(sizes)] == [fold.OPENED] * 3
