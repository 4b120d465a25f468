"""viz/trace.py: any position of a recording is what the engine was, and statuses add up."""

from __future__ import annotations

import random

import pytest

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import SamplingParams
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from viz.notebook.stepper import Stepper
from viz.page import Page
from viz.trace import Trace, decoder_from, ids_as_text, path_of, summary, summary_of
from viz.web.compare import PairPage


def busy_run(make_engine, seed: int, steps: int = 60, keyframe_every: int = 7, **config):
    """A recording of a crowded engine, and the engine's own snapshot after each frame."""
    rng = random.Random(seed)
    engine = make_engine(kv_tokens=48, max_running=3, chunk_tokens=8, **config)
    recorder = Recorder(engine, keyframe_every=keyframe_every)
    snapshots = [engine.snapshot()]
    prefixes = [[rng.randrange(3, 60) for _ in range(rng.randrange(4, 14))] for _ in range(3)]
    for _ in range(steps):
        if rng.random() < 0.4:
            prompt = rng.choice(prefixes) + [rng.randrange(3, 60) for _ in range(rng.randrange(1, 8))]
            engine.add_request(
                prompt, SamplingParams(max_new_tokens=rng.randrange(1, 9), n=rng.choice((1, 1, 2)))
            )
        engine.step()
        snapshots.append(engine.snapshot())
    recorder.close()
    return recorder, snapshots


@pytest.fixture
def cache_run():
    """A tree on its own, told scene by scene."""
    cache = RadixCache()
    recorder = Recorder(cache)

    def put(tokens, slots, scene=None):
        if scene:
            recorder.scene(scene)
        cache.insert(RadixKey(tokens), slots)
        recorder.cut()

    return cache, recorder, put


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_the_engines_own_snapshot(make_engine, seed, page_size):
    recorder, snapshots = busy_run(make_engine, seed, page_size=page_size)
    trace = Trace(recorder, ids_as_text)
    assert trace.count("step") == len(snapshots)
    order = list(range(len(snapshots)))
    random.Random(seed).shuffle(order)
    for index in [*range(len(snapshots)), *order]:  # forwards, then to and fro
        assert trace.view("step", index).state == snapshots[index]


def test_the_last_event_of_a_step_shows_what_the_step_shows(make_engine):
    recorder, snapshots = busy_run(make_engine, 5)
    trace = Trace(recorder, ids_as_text)
    for frame in range(len(trace)):
        by_event = trace.view("event", trace.position_of("event", frame))
        by_step = trace.view("step", frame + 1)
        assert by_event.state == by_step.state == snapshots[frame + 1]
        assert (by_event.status, by_event.ghosts) == (by_step.status, by_step.ghosts)
        assert by_event.so_far == by_step.events
        assert by_event.events == by_step.events[-1:]


def test_a_growing_recorder_is_followed(make_engine):
    engine = make_engine()
    recorder = Recorder(engine)
    trace = Trace(recorder, ids_as_text)
    assert trace.count() == 1 and trace.view().status == {}
    engine.generate([3, 4, 5, 6], SamplingParams(max_new_tokens=3))
    assert trace.view().state == engine.snapshot()
    before = trace.count()
    engine.generate([3, 4, 9], SamplingParams(max_new_tokens=2))
    assert trace.count() > before
    assert trace.view().state == engine.snapshot()


def test_the_scene_at_the_growing_end_is_never_stale(make_engine):
    engine = make_engine()
    recorder = Recorder(engine)
    trace = Trace(recorder, ids_as_text)
    for prompt in ([3, 4, 5, 6], [3, 4, 9], [7, 8]):
        engine.add_request(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
        while engine.has_work:
            engine.step()
            last = trace.view("scene")
            assert last.state == engine.snapshot() and last.events[-1] == recorder.frames[-1].events[-1]
    afresh = Trace(recorder, ids_as_text)
    for index in range(trace.count("scene")):
        assert trace.view("scene", index) == afresh.view("scene", index)


def test_the_views_that_are_kept_are_bounded_by_what_they_hold(make_engine):
    recorder, snapshots = busy_run(make_engine, 4)
    wide, narrow, none = (Trace(recorder, ids_as_text, kept) for kept in (1_000_000, 3000, 0))
    for index, snapshot in enumerate(snapshots):
        for trace in (wide, narrow, none):
            assert trace.view("step", index).state == snapshot
        assert narrow.numbers_kept <= 3000
    assert wide.view("step", 0) is wide.view("step", 0), "all of them fit"
    assert none.view("step", 5) is none.view("step", 5), "the latest is kept, however large"
    assert 3000 < wide.numbers_kept <= 1_000_000 and 0 < none.numbers_kept < 3000
    one = Trace(recorder, ids_as_text)
    held = one.view("step", len(snapshots) - 1).state
    lists = [*held["tree"]["nodes"], *held["requests"].values()]
    numbers = sum(len(each.get("tokens", ())) + len(each["slots"]) for each in lists)
    assert one.numbers_kept > numbers, "tokens and slots are counted"


def test_positions_convert(make_engine):
    recorder, _ = busy_run(make_engine, 1)
    trace = Trace(recorder, ids_as_text)
    assert trace.count("event") == 1 + sum(len(frame.events) for frame in recorder.frames)
    for frame in range(-1, len(trace)):
        for granularity in ("event", "step"):
            assert trace.frame_at(granularity, trace.position_of(granularity, frame)) == frame
    for scene in range(1, trace.count("scene")):
        assert trace.position_of("scene", trace.frame_at("scene", scene)) == scene
    assert trace.convert("step", 7, "event") == trace.position_of("event", 6)
    for bad in (-1, trace.count("step")):
        with pytest.raises(ValueError, match="there is no step"):
            trace.view("step", bad)
    with pytest.raises(ValueError, match="unknown granularity"):
        trace.count("second")


def test_new_hit_and_evicted_add_up_over_a_scene(cache_run):
    cache, recorder, put = cache_run
    put([1, 2, 3, 4], [10, 11, 12, 13], "insert, then hit")
    cache.match_prefix(RadixKey([1, 2, 3, 4]))
    put([1, 2, 3, 4, 5], [0, 0, 0, 0, 14])
    recorder.scene("a split by a hit")
    cache.match_prefix(RadixKey([1, 2, 9]))
    put([7, 8], [20, 21])
    recorder.scene("eviction")
    cache.evict(1)
    cache.evict(1)
    recorder.close()
    trace = Trace(recorder)
    assert [trace.scene_title(i) for i in range(3)] == ["insert, then hit", "a split by a hit", "eviction"]

    first, second, third = (trace.view("scene", i) for i in (1, 2, 3))
    assert first.status == {1: "new", 2: "new"}, "a node inserted and then hit in one scene stays new"
    upper = next(n for n in second.status if n not in (1, 2, 4))
    assert second.status[upper] == "hit" and "split" in second.also[upper]
    assert second.status[1] == "cached" and second.status[4] == "new"
    evicted = [e.node for e in third.events if isinstance(e, ev.NodeEvicted)]
    assert len(evicted) == 2 and set(third.ghosts) == set(evicted)
    assert all(third.status[n] == "evicted" for n in evicted)
    assert third.ghosts[evicted[0]]["slots"], "a ghost remembers what it held"
    assert not set(third.nodes) & set(third.ghosts)


def test_a_split_alone_is_shown_as_split_and_a_ghost_lasts_one_step(cache_run):
    cache, recorder, put = cache_run
    put([1, 2, 3, 4], [10, 11, 12, 13])
    put([1, 2, 9], [0, 0, 15])
    cache.evict(1)
    recorder.cut()
    put([5], [16])
    recorder.close()
    trace = Trace(recorder)
    split = trace.view("step", 2)
    assert sorted(split.status.values()) == ["cached", "new", "split"]
    assert set(trace.view("step", 3).ghosts) == {1}
    assert trace.view("step", 4).ghosts == {}
    assert trace.marks() == {"split": [1], "evict": [2], "retract": []}
    assert trace.next_mark("step", 0, "evict") == 3
    assert trace.next_mark("step", 3, "evict") is None
    assert trace.next_mark("step", 4, "split", -1) == 2
    assert trace.next_mark("step", 2, "split", -1) is None


def test_locked_and_grown_are_told(make_engine):
    engine = make_engine(chunk_tokens=4)
    recorder = Recorder(engine)
    engine.add_request(list(range(3, 15)), SamplingParams(max_new_tokens=3, ignore_eos=True))
    for _ in range(5):
        engine.step()
    trace = Trace(recorder, ids_as_text)
    assert trace.view("step", 1).status == {1: "new"}
    assert trace.view("step", 2).status == {1: "grown"} and "locked" in trace.view("step", 2).also[1]
    assert trace.view("step", 4).status == {1: "locked"}


def test_a_flush_leaves_ghosts(make_engine):
    engine = make_engine()
    recorder = Recorder(engine)
    engine.generate([3, 4, 5], SamplingParams(max_new_tokens=2))
    engine.flush_cache()
    recorder.close()
    last = Trace(recorder, ids_as_text).view()
    assert set(last.status.values()) == {"evicted"} and last.nodes == {}


class SilentTree:
    """A student's tree: RadixCache's methods, no bus."""

    def __init__(self, inner: RadixCache) -> None:
        self._inner = inner

    def __getattr__(self, name: str):
        if name == "bus":
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_a_silent_tree_is_exact_by_step(make_engine):
    engine = make_engine(cache=SilentTree(RadixCache()))
    recorder = Recorder(engine)
    snapshots = [engine.snapshot()]
    for prompt in ([3, 4, 5, 6], [3, 4, 5, 9], [7] * 30, [8] * 30):
        engine.add_request(prompt, SamplingParams(max_new_tokens=4))
        while engine.has_work:
            engine.step()
            snapshots.append(engine.snapshot())
    trace = Trace(recorder, ids_as_text)
    seen = set()
    for index, snapshot in enumerate(snapshots):
        view = trace.view("step", index)
        assert view.state["tree"] == snapshot["tree"]
        assert view.state["requests"] == snapshot["requests"]
        seen |= set(view.status.values())
    assert {"new", "hit", "evicted", "locked"} <= seen
    hits = 0
    for index in range(trace.count("event")):
        view = trace.view("event", index)  # not exact, but never an error
        if isinstance(event := (view.events or (None,))[-1], ev.RequestAdmitted) and event.matched:
            path = path_of(view.nodes, event.node)
            assert all("hit" in {view.status[n], *view.also.get(n, ())} for n in path)
            hits += bool(path)
    assert hits, "a hit is told at the admission, as with a tree that tells events"


def test_sentences(make_engine):
    recorder, _ = busy_run(make_engine, 2)
    trace = Trace(recorder, ids_as_text)
    for granularity in ("event", "step", "scene"):
        for index in range(trace.count(granularity)):
            kind, text = summary(trace.view(granularity, index).events)
            assert text and "\n" not in text
            assert kind in ("", "new", "hit", "split", "evict", "retract", "finish", "decode")
    kind, text = summary([ev.NodeEvicted(3, 0, (1, 2), "lru", "oldest", 4)])
    assert kind == "evict" and "n3 evicted" in text and "next would be n4" in text


def test_a_recording_that_begins_in_the_midst_says_so(make_engine):
    """It said that nothing has happened and the tree is empty, over the nodes that are drawn."""
    engine = make_engine(kv_tokens=64)
    assert summary_of(Trace(Recorder(engine), ids_as_text).view("step", 0)) == (
        "", "Nothing has happened yet: the tree is empty",
    )  # fmt: skip
    engine.add_request([5, 6, 7, 8], SamplingParams(max_new_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    recorder, said = Recorder(engine), "The recording begins here, after step 3"
    engine.step()
    trace = Trace(recorder, ids_as_text)
    for granularity in ("event", "step", "scene"):
        assert trace.view(granularity, 0).nodes and summary_of(trace.view(granularity, 0)) == ("", said)
    assert Page(trace).view("step", 0)["say"] == said
    stepper = Stepper(None, recording=recorder)
    stepper.first()
    assert stepper.sentence == said
    view = trace.view("step", 1)
    assert summary_of(view) == summary(view.events)
    cache = RadixCache()
    cache.insert(RadixKey([1, 2, 3]), [1, 2, 3])
    text = summary_of(Trace(Recorder(cache), ids_as_text).view("step", 0))[1]
    assert text == "The recording begins here: 1 node is in the tree already"


def test_requests_from_before_the_recording_are_listed(make_engine):
    """With what the first state knows of them: those that ran were missing, to their end."""
    engine = make_engine(kv_tokens=64, max_running=2)
    for first in (5, 6, 7):
        engine.add_request([first, 8, 9, 10], SamplingParams(max_new_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()
    page = Page(Trace(recorder := Recorder(engine), ids_as_text))
    while engine.has_work:
        engine.step()
        found = page.requests()
        assert list(found) == ["R1", "R2", "R3"] and {*page.view("step", 1)["requests"]} <= {*found}
    last = len(recorder.frames) - 1
    for name, request in found.items():
        assert request["before"] and request["added"] == -1 and request["prompt"] == 4
        assert request["text"] == "came before the recording began"
        assert request["hit"] == 0 and (request["admitted"] == -1) == (name != "R3")
        assert request["reason"] == "length" and (request["end"] == last) == (name == "R3")
        assert request["segs"][0][0] == ("waiting" if name == "R3" else "decode")
    totals = PairPage(Two(page)).totals(0, len(recorder.frames))
    assert (totals.requests, totals.finished, totals.prompt, totals.cached) == (3, 3, 12, 0)
    with pytest.raises(ValueError, match="prompt of R1 is not known: it came before the recording began"):
        page.prompt("R1")


class Two:
    """A page beside itself."""

    def __init__(self, page):
        self.sides, self.names = (Side(page), Side(page)), ("one", "other")


class Side:
    def __init__(self, page):
        self.page, self.trace, self.idle = page, page.trace, True


def test_paths(make_engine):
    nodes = {1: {"parent": 0}, 4: {"parent": 1}, 9: {"parent": 4}}
    assert path_of(nodes, 9) == [1, 4, 9]
    assert path_of(nodes, 0) == path_of(nodes, None) == path_of(nodes, 77) == []


def test_decoding_shows_special_tokens_and_survives_split_characters():
    decode = decoder_from(None)
    from minirad.model.load import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(None))
    ids = tokenizer.encode("<|im_start|>user\nCaffè 😀<|im_end|>")
    assert decode(ids) == "<|im_start|>user\nCaffè 😀<|im_end|>"
    for cut in range(len(ids)):
        decode(ids[:cut])
    assert "⟨999999⟩" in decode([*ids[:2], 999999])
    assert ids_as_text([3, 14]) == "3 14"
