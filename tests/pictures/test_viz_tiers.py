"""The pictures of a cache with two tiers, with pairs of tokens, and of what changes in a running engine."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from minirad import Engine, EngineConfig, Recorder, SamplingParams
from minirad.model.llama import LlamaConfig, LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from viz import kv, live
from viz.draw import tree
from viz.draw.dot import DotError
from viz.draw.still import still
from viz.fork import fork
from viz.live import Replay, Run, Settings
from viz.notebook import panels
from viz.trace import (
    STATUSES,
    TIERS,
    VICTIMS,
    Trace,
    evictable_leaves,
    has_tiers,
    is_bigram,
    key_tokens,
    summary,
    text_tokens,
    tier_of,
    tier_sums,
    units,
)
from viz.view import quiz
from viz.web import commands
from viz.web.compare import Pair
from viz.web.export import page_data
from viz.web.page import Children, Page, spelled_path

MODES = ("write_through", "write_through_selective", "write_back")
CONFIG = LlamaConfig(97, 32, 64, 2, 4, 2, 8, 1e-5, 1e4, None, 512, True, False, False, None, (), "float32")


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.set_num_threads(1)
    return LlamaModel(CONFIG, random_weights(CONFIG, 0, dtype=torch.float32, device="cpu"))


def tiny(model: LlamaModel, **config: Any) -> Engine:
    sizes = {"kv_tokens": 48, "host_kv_tokens": 80, "max_running": 3, "max_context": 48, "chunk_tokens": 16}
    return Engine(EngineConfig(**{**sizes, "load_back_threshold": 2, "device": "cpu", **config}), model=model)


def driven(engine: Engine, requests: int = 30) -> Recorder:
    """Prompts with few beginnings on a pool that is too small for them."""
    rng = random.Random(3)
    bases = [[rng.randrange(97) for _ in range(18)] for _ in range(4)]
    with Recorder(engine, keyframe_every=20) as recording:
        for _ in range(requests):
            prompt = bases[rng.randrange(4)][: rng.randrange(6, 19)] + [rng.randrange(97) for _ in range(3)]
            engine.add_request(prompt, SamplingParams(max_new_tokens=rng.randrange(1, 6), ignore_eos=True))
            for _ in range(rng.randrange(5)):
                engine.step()
                engine.check()
        while engine.has_work:
            engine.step()
            engine.check()
    return recording


# (host_write, page size, pairs of tokens): each of them once
RUNS = [(mode, *keys) for mode, keys in zip(MODES, ((1, False), (2, True), (4, False)), strict=True)]


def first_with(recording: Recording, kind: type[ev.Event]) -> int:
    """The first frame in which an event of a kind is."""
    frames = recording.frames
    return next(i for i, frame in enumerate(frames) if any(isinstance(e, kind) for e in frame.events))


@pytest.fixture(scope="module", params=RUNS, ids=lambda each: "-".join(map(str, each)))
def run(request: Any, model: LlamaModel) -> tuple[Engine, Recorder]:
    mode, page, bigram = request.param
    engine = tiny(model, host_write=mode, page_size=page, bigram_keys=bigram)
    return engine, driven(engine)


def kinds_of(recording: Recording) -> set[type[ev.Event]]:
    return {type(event) for frame in recording.frames for event in frame.events}


# ---------------------------------------------------------------------- every picture of every moment


def test_every_step_can_be_drawn_and_told(
    run: tuple[Engine, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recording = run
    assert {ev.NodeDemoted, ev.LoadStarted, ev.BackupStarted} <= kinds_of(recording)
    trace, page = Trace(recording), Page(Trace(recording))
    ledger = panels.Ledger(recording, trace.decode)
    seen: set[str] = set()
    for index in range(trace.count("step")):
        view = trace.view("step", index)
        seen |= set(view.status.values())
        assert set(view.status.values()) <= set(STATUSES)
        text = tree.dot_text(view, trace.decode, tree.Options(detail="full"))
        assert not re.search("<FONT[^>]*></FONT>", text), "Graphviz refuses an empty FONT"
        for node in view.nodes.values():
            tier = tier_of(node)
            assert tier in TIERS
            card = next(line for line in text.splitlines() if line.startswith(f"n{node['id']} ["))
            assert f"tier-{tier}" in card and f"{tree.TIER_SIGNS[tier]} · t " in card
            assert ("no slots" in card) == (tier == "host") and ("the host<" in card) == (tier != "device")
        with monkeypatch.context() as patch:
            if index % 5:  # the picture itself takes Graphviz
                patch.setattr(tree, "tree_svg", tree.dot_text)
            shown = page.view("step", index)
        assert shown["svg"] and "failed" not in shown
        json.dumps([shown, panels.payload(trace, view, ledger)])
        assert summary(view.events)[1]
    assert {"host", "demoted", "loaded"} <= seen


def test_graphviz_takes_every_detail(run: tuple[Engine, Recorder]) -> None:
    trace = Trace(run[1])
    frame = first_with(run[1], ev.LoadStarted)
    try:
        for detail in tree.DETAILS:
            drawn = tree.tree_svg(trace.view("step", frame + 1), trace.decode, tree.Options(detail=detail))
            assert "tier&#45;" in drawn
    except DotError as error:
        pytest.skip(str(error))


def test_host_map_is_the_snapshot(run: tuple[Engine, Recorder]) -> None:
    engine, recording = run
    size = engine.config.page_size
    for index in range(0, len(recording.frames), 7):
        state = recording.state(index)
        pages = kv.host_pages(state)
        assert [page.number for page in pages] == list(range(1, 80 // size + 1))
        for node in state["tree"]["nodes"]:
            mine = [page.number for page in pages if page.node == node["id"]]
            assert sorted(mine) == sorted({slot // size for slot in node["host"]})
        used = sum(page.tier != "free" for page in pages) * size
        assert used == state["tree"]["host_tokens"] - state["tree"]["host_free"]
        cells = panels.host_cells(Trace(recording).view("step", index + 1), str)
        assert cells["cells"] == [page.node for page in pages]
    assert kv.usage_points(recording)[-1].host == engine.cache.host_size  # type: ignore[attr-defined]


def test_page_runs_of_host_memory_are_the_host_map(run: tuple[Engine, Recorder]) -> None:
    page = Page(Trace(run[1]))
    view = page.view("step", len(run[1].frames) // 2)
    spread = [owner for owner, count in view["host"] for _ in range(count)]
    assert spread == [[p.node, p.tier] for p in kv.host_pages(run[1].state(view["frame"]))]
    records = page.frames()
    assert [r["h"] for r in records] == [point.host for point in kv.usage_points(run[1])]
    assert page.meta()["host_tokens"] == 80


def test_sums_over_a_scene_are_the_engine_s(run: tuple[Engine, Recorder]) -> None:
    engine, recording = run
    sums = tier_sums(e for frame in recording.frames for e in frame.events)
    assert sums["loaded"] == engine.cache_manager.loaded_tokens > 0
    left = {"demoted": ev.NodeDemoted, "evicted": ev.NodeEvicted}
    gone = {what: sum(len(e.slots) for f in recording.frames for e in f.events if isinstance(e, kind))
            for what, kind in left.items()}  # fmt: skip
    assert sums["demoted"] == gone["demoted"]
    assert sum(gone.values()) == engine.cache_manager.evicted_tokens


def test_ages_know_every_kind_of_eviction(run: tuple[Engine, Recorder]) -> None:
    gone = kv.evictions(run[1])
    victims = sum(isinstance(e, VICTIMS) for f in run[1].frames for e in f.events)
    assert len(gone) == victims and all(each.tokens > 0 and each.age >= 0 for each in gone)
    figures = (kv.age_at_eviction(run[1]), kv.host_map(run[1].state(-1)), kv.usage(run[1]))
    assert all(still(figure).startswith(b"\x89PNG") for figure in figures)
    assert "on the host" in [trace.name for trace in figures[2].data]


def test_an_exported_file_holds_the_tiers(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "tree_svg", lambda *_: "")  # pictures with tiers are drawn above
    data = page_data(Page(Trace(driven(tiny(model), 12))))
    tiers = {n["tier"] for view in data["views"]["step"].values() for n in view["nodes"].values()}
    assert {"both", "host", "loading"} <= tiers


# ---------------------------------------------------------------------- who is evicted, and why


def test_the_victim_is_among_the_choices(run: tuple[Engine, Recorder]) -> None:
    _, recording = run
    trace, asked = Trace(recording), 0
    for index in range(1, trace.count("event")):
        event = trace.view("event", index).events[0]
        if not isinstance(event, VICTIMS):
            continue
        before = {n["id"]: n for n in trace.state("event", index - 1)["tree"]["nodes"]}
        from_host = isinstance(event, ev.HostEvicted)
        leaves = {n["id"] for n in evictable_leaves(before, host=from_host)}
        # What hangs below a victim that has no copy goes with it, and has no say.
        assert event.node in leaves, event
        question = quiz.question_for(trace, "event", index)
        if not from_host:
            assert question is not None and question.check(f"n{event.node}")
            assert f"n{event.node}" in question.choices
            asked += 1
        assert quiz.why(trace, trace.view("event", index))[0].startswith(f"n{event.node} went ")
    assert asked


def test_reasons_on_the_page_come_with_the_candidates(run: tuple[Engine, Recorder]) -> None:
    page = Page(Trace(run[1]))
    at = first_with(run[1], ev.NodeDemoted)
    victim = page.view("step", at + 1)["why"][0]
    assert victim["candidates"][0]["id"] == victim["node"] and victim["free"] > 0
    assert "evict" in page.frames()[at]["m"]


# ---------------------------------------------------------------------- without tiers nothing changes


def test_without_a_host_tier_nothing_is_said_of_it(model: LlamaModel) -> None:
    recording = driven(tiny(model, host_kv_tokens=0))
    trace, page = Trace(recording), Page(Trace(recording))
    view = trace.view("step", len(recording.frames) // 2)
    assert not has_tiers(view.state)
    text = tree.dot_text(view, trace.decode)
    assert "tier-" not in text and "host" not in text and " · t " not in text.replace("lock", "")
    shown = page.view("step", view.index)
    assert {"host", "host_used", "tier_sums"}.isdisjoint(shown) and "host_tokens" not in page.meta()
    assert all("tier" not in node for node in shown["nodes"].values()) and "h" not in page.frames()[0]
    assert "host" not in panels.payload(trace, view, panels.Ledger(recording, trace.decode))
    assert kv.host_pages(view) == []
    with pytest.raises(ValueError, match="no host tier"):
        kv.host_map(view)


# ---------------------------------------------------------------------- pairs of tokens


def test_a_tree_of_pairs_reads_as_text(model: LlamaModel) -> None:
    engine = tiny(model, bigram_keys=True)
    with Recorder(engine) as recording:
        engine.generate([[5, 6, 7, 8, 9]], SamplingParams(max_new_tokens=0))
        engine.generate([[5, 6, 7, 8, 1]], SamplingParams(max_new_tokens=0))
    trace = Trace(recording)
    view = trace.view("step")
    texts = {trace.node_text(node) for node in view.nodes.values()}
    assert texts == {"5 6 7 8", "8 9", "8 1"}
    assert all(is_bigram(node) and len(key_tokens(node)) == units(node) for node in view.nodes.values())
    text = tree.dot_text(view, trace.decode)
    assert "5 6 7 8<BR" in text and "8 9<BR" in text and ">3 tokens<" in text
    assert Page(trace).meta()["bigram_keys"] is True


def test_of_pairs_on_the_host_only_the_text_is_known(run: tuple[Engine, Recorder]) -> None:
    engine, recording = run
    at = first_with(recording, ev.NodeDemoted)
    nodes = [n for n in recording.state(at)["tree"]["nodes"] if tier_of(n) == "host"]
    assert nodes
    for node in nodes:
        assert is_bigram(node) == engine.config.bigram_keys and node["slots"] == []
        assert len(text_tokens(node)) == units(node) + engine.config.bigram_keys


def test_what_is_left_of_a_prompt_is_found(run: tuple[Engine, Recorder]) -> None:
    """The path that the page lights for a request that is done spells the beginning of its prompt."""
    _, recording = run
    view = Trace(recording).view()
    nodes, children = view.nodes, Children(view)
    longest = 0
    for added in (e for f in recording.frames for e in f.events if isinstance(e, ev.RequestAdded)):
        path = spelled_path(children, added.token_ids, added.namespace)
        spelled = [token for number in path for token in key_tokens(nodes[number])]
        assert spelled == list(added.token_ids[: len(spelled)])
        longest = max(longest, len(path))
    assert longest > 1


# ---------------------------------------------------------------------- changes in a running engine


def changed(model: LlamaModel) -> Recorder:
    engine = tiny(model, bigram_keys=True, host_write="write_back", page_size=2)
    other = LlamaModel(CONFIG, random_weights(CONFIG, 1, dtype=torch.float32, device="cpu"))
    prompts = [[n, n + 1, *range(20)] for n in range(30, 40, 2)]
    with Recorder(engine) as recording:
        for prompt in prompts[:3]:
            engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.set_eviction_policy("mru")
        engine.generate([prompts[3]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.update_weights(other)
        engine.generate([prompts[0], prompts[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    return recording


def test_old_weights_are_told_apart(model: LlamaModel) -> None:
    recording = changed(model)
    trace = Trace(recording)
    bump = first_with(recording, ev.VersionBumped)
    before, after = trace.view("step", bump), trace.view("step", bump + 1)
    assert "stale" not in before.status.values()
    old = {n for n in before.nodes if n in after.nodes}
    assert old and all("stale" in {after.status[n], *after.also.get(n, ())} for n in old)
    assert all(after.status[n] != "stale" for n in set(after.nodes) - set(before.nodes))
    assert "OLD WEIGHTS" in tree.dot_text(after, trace.decode)
    assert summary(after.events)[1].startswith("weights version 1")
    # A walk that goes backwards, and one that begins at a keyframe, see the same.
    assert Trace(recording).view("step", bump + 1).status == after.status
    assert trace.view("step", bump).status == before.status


def test_a_policy_change_is_an_event_with_a_place(model: LlamaModel) -> None:
    recording = changed(model)
    page = Page(Trace(recording))
    at = first_with(recording, ev.PolicyChanged)
    assert (page.view("step", at)["policy"], page.view("step", at + 1)["policy"]) == ("lru", "mru")
    events = page.view("step", at + 1)["events"]
    assert ("policy", "eviction policy changed from lru to mru") in [(e["tag"], e["text"]) for e in events]


def test_a_fork_carries_tiers_keys_and_changes_over(model: LlamaModel) -> None:
    recording = changed(model)
    engine, again = fork(recording, model=model)
    config = engine.config
    assert (config.host_kv_tokens, config.host_write, config.bigram_keys) == (80, "write_back", True)
    assert (config.page_size, config.load_back_threshold) == (2, 2)
    assert engine.cache.version == 1 and engine.cache.eviction_policy == "mru"  # type: ignore[attr-defined]
    engine.check()
    again.check()
    tiers = (ev.NodeDemoted, ev.LoadStarted, ev.PolicyChanged, ev.VersionBumped)
    assert [type(e) for f in again.frames for e in f.events if isinstance(e, tiers)] == [
        type(e) for f in recording.frames for e in f.events if isinstance(e, tiers)
    ]


def test_a_fork_to_another_page_size_keeps_whole_pages_on_the_host(model: LlamaModel) -> None:
    engine, _ = fork(changed(model), model=model, page_size=16)
    assert engine.config.host_kv_tokens == 80
    engine, _ = fork(changed(model), model=model, page_size=3, kv_tokens=48)
    assert engine.config.host_kv_tokens == 78
    engine.check()


def test_replaying_and_trace_agree_on_everything(run: tuple[Engine, Recorder]) -> None:
    engine, recording = run
    replay = ReplayState(recording.header["start"])
    for frame in recording.frames:
        for event in frame.events:
            replay.apply(event)
    assert replay.snapshot() == engine.snapshot() == Trace(recording).state("step")


# ---------------------------------------------------------------------- pools that are hardly used


def test_of_a_large_pool_the_used_part_is_shown(model: LlamaModel) -> None:
    large = driven(tiny(model, kv_tokens=50_000, host_kv_tokens=0), 4)
    figure = kv.usage(large)
    peak = max(p.evictable + p.protected + p.private for p in kv.usage_points(large))
    assert (
        figure.layout.yaxis.range[1] == pytest.approx(1.15 * peak)
        and f"{peak} of 50000" in figure.layout.title.text
    )
    assert still(figure).startswith(b"\x89PNG")
    small = kv.usage(driven(tiny(model, host_kv_tokens=0), 4))
    assert small.layout.yaxis.range is None and small.layout.title.text == "Pool usage"


# ---------------------------------------------------------------------- the live page


def test_the_command_line_gives_a_run_a_host_tier(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file, record = tmp_path / "run.html", tmp_path / "run.jsonl"
    arguments = [
        "--workload", "chat", "--kv-tokens", "120", "--host-kv-tokens", "200", "--host-write", "write_back",
        "--bigram-keys", "--export", str(file), "--record", str(record), "--steps", "30",
    ]  # fmt: skip
    assert live.main(arguments) == 0
    config = Recorder.load(record).header["config"]
    assert (config["host_kv_tokens"], config["host_write"], config["bigram_keys"]) == (
        200,
        "write_back",
        True,
    )
    assert live.main(["--host-kv-tokens", "9", "--cache", "x.py", "--export", str(file)]) == 2
    assert "--host-kv-tokens 9 with --cache" in capsys.readouterr().err


def test_a_host_tier_is_cut_to_whole_pages() -> None:
    assert Settings(page_size=16, host_kv_tokens=100).config(400).host_kv_tokens == 96


def test_a_replay_is_forked_with_what_it_was_made_of(model: LlamaModel) -> None:
    recording = driven(tiny(model, bigram_keys=True, eviction_policy="lfu", page_size=2), 3)
    settings = commands._recorded_settings(Settings(model="kept"), Replay(recording, "x").recording)
    assert (settings.host_kv_tokens, settings.bigram_keys, settings.page_size) == (80, True, 2)
    assert (settings.eviction_policy, settings.model) == ("lfu", "kept")
    recording.header["config"]["model"] = "/no/such/model"
    with pytest.raises(ValueError, match="'/no/such/model' is not here"):
        commands._recorded_settings(Settings(), recording)


def test_the_pages_fork_is_the_recorded_engine() -> None:
    """Every field of its configuration, and every token that it sampled."""
    config = EngineConfig(
        kv_tokens=220, max_running=2, mixed=True, chunk_tokens=16, seed=5, in_batch_prefix=False, page_size=2,
        in_batch_cached=7, in_batch_shared=9, max_context=100, preemption=False, schedule_policy="fair",
        fair_passes=3, new_token_ratio=0.5, new_token_ratio_min=0.1, new_token_decay=0.2, host_kv_tokens=64,
        load_back_threshold=3, host_write="write_back", bigram_keys=True, eviction_policy="mru",
        overlap=False, poison_freed=True, device="cpu", dtype="float32", attention="torch",
        cuda_graphs=False, cascade=False, rank_digest=False, lora="capitals", disk_mb=9, jump_forward=True,
    )  # fmt: skip
    plain = EngineConfig()
    drafts = {"speculative", "draft_tokens", "draft_ngram", "draft_model"}
    same = {f.name for f in fields(EngineConfig) if getattr(config, f.name) == getattr(plain, f.name)}
    rest = {"model", "dummy_weights", "quantization", "radix_cache", "tp", "disk_dir"}
    assert same - drafts == rest, "a new field is to be set here, too"
    engine = Engine(config)
    hot = SamplingParams(max_new_tokens=6, temperature=1.5, ignore_eos=True)
    engine.generate([3, 4], SamplingParams(max_new_tokens=1))
    engine.flush_cache()
    with Recorder(engine) as recording:
        for prompt in ([5, 6, 7, 8], [5, 6, 9, 9, 9], [20, 21, 22]):
            name = engine.add_request(prompt, hot)
        engine.step()
        engine.set_eviction_policy("lfu")
        while engine.has_work:
            engine.step()
        engine.flush_cache()
    replay = Replay(recording, "x")
    driver = live.Driver(Settings(), speed=0, replay=replay)
    assert name == "R4" and live.COMMANDS["fork"](driver, {}) == {"requests": 3}
    forked = driver.run_now
    assert isinstance(forked, Run) and forked.engine.config == engine.config
    (notice,) = forked.notices
    assert notice.endswith("what was done beside is left out: flushes (1), policy changes (1).")
    while not forked.idle:
        forked.advance()
        forked.engine.check()

    def tokens(of: Recording, first: int) -> dict[int, list[int]]:
        sampled = [e for frame in of for e in frame.events if isinstance(e, ev.TokenSampled)]
        return {k: [e.token for e in sampled if e.request == f"R{first + k}"] for k in range(3)}

    assert tokens(forked.recorder, 1) == tokens(recording, 2) and all(tokens(recording, 2).values())
    json.dumps(driver.hello(forked))
    live.COMMANDS["fork"](
        driver, {"page_size": 4, "schedule_policy": "fcfs"}
    )  # of the fork: only what is asked for changes
    changed = {"page_size": 4, "schedule_policy": "fcfs"}
    assert driver.run_now.engine.config == replace(engine.config, **changed)
    assert driver.run_now.notices == []
    driver.run_now.close()


def test_two_sides_that_refuse_the_same_say_it_once() -> None:
    settings = Settings(workload="agents", kv_tokens=40, compare="lru,lfu")
    names, sides = settings.sides()
    runs = (Run(1, sides[0], None), Run(1, sides[1], None))
    pair = Pair(1, settings, runs, names)
    while not pair.idle:
        pair.advance()
    assert pair.page.meta()["refused"] == f"both: {runs[0].refused}" and runs[0].refused
    runs[1].page.refused = ""
    assert pair.page.refused == f"lru: {runs[0].refused}"
    pair.close()
