"""viz/web/compare.py: two engines as one run: what is compared and refused, and that both step together."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re

import pytest
from test_live import Client, wait

from minirad import workloads
from minirad.observe.recorder import Recorder
from viz import live
from viz.live import Driver, Live, Settings
from viz.web.compare import Totals, difference
from viz.web.settings import compared

NOBODY = Totals(0, 0, 0, 0, 0.0, 0, "", 0, 0, 0, False)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lpm,fcfs", ("schedule_policy", ("lpm", "fcfs"))),
        (" lru , lfu ", ("eviction_policy", ("lru", "lfu"))),
        ("fair,dfs-weight", ("schedule_policy", ("fair", "dfs-weight"))),
    ],
)
def test_which_kind_of_policy_it_is(text, found):
    assert compared(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lpm,lru", "lpm is a schedule policy and lru is an eviction policy"),
        ("lpm,lpm", "two different policies"),
        ("lpm", "two policies such as"),
        ("", "two policies such as"),
        ("lpm,", "two policies such as"),
        ("lpm,fcfs,lof", "two policies such as"),
        ("lpm,nonsense", "no policy 'nonsense'.*fcfs, lpm.*lru"),
    ],
)
def test_nonsense_is_refused(text, message, capsys):
    with pytest.raises(ValueError, match=message):
        compared(text)
    assert live.main(["--compare", text, "--no-open"]) == 2
    assert "--compare" in capsys.readouterr().err or "nonsense" in text


def some() -> workloads.Workload:
    """The first sessions of the mixed workload, in a pool small enough for evictions and a retraction."""
    mixed = workloads.load("mixed")
    return dataclasses.replace(mixed, sessions=mixed.sessions[:10], kv_tokens=320)


@pytest.fixture(scope="module")
def pair():
    pair = live.make_run(1, Settings(workload="mixed", compare="lpm,fcfs"), some())
    while not pair.idle:
        pair.advance()
    yield pair
    pair.close()


def told(run) -> list[str]:
    """Sentences rather than events: those carry seconds and the last digits of log-probabilities."""
    return [event.describe() for frame in run.recorder for event in frame.events]


@pytest.mark.slow
def test_each_side_is_what_its_engine_alone_would_do(pair):
    for name, side in zip(pair.names, pair.sides, strict=True):
        alone = live.Run(1, Settings(workload="mixed", schedule_policy=name), some())
        while not alone.idle:
            alone.advance()
        said = told(alone)
        assert len(said) > 100 and said == told(side)
        alone.close()


def test_step_n_of_one_is_beside_step_n_of_the_other(pair):
    lengths = [len(side.trace) for side in pair.sides]
    assert len(pair.page) == max(lengths) and lengths[0] != lengths[1]
    for index in (0, 1, 60, min(lengths), max(lengths)):
        view = pair.page.view("step", index)
        for side, own, length in zip(pair.sides, view["sides"], lengths, strict=True):
            assert own == side.page.view("step", min(index, length))
    frames = pair.page.frames()
    short = lengths.index(min(lengths))
    assert frames[-1]["sides"][short] is None and frames[-1]["sides"][1 - short] is not None
    assert pair.page.frames(5) == frames[5:]
    for bad in (("event", 1), ("step", -1), ("step", max(lengths) + 1)):
        with pytest.raises(ValueError):
            pair.page.view(*bad)


def test_totals_are_the_engines_books(pair):
    view = pair.page.view("step", len(pair.page))
    for side, totals in zip(pair.sides, view["totals"], strict=True):
        books = side.engine.scheduler.stats
        assert (totals["prompt"], totals["cached"]) == (books.first.tokens, books.first.cached)
        assert totals["retracted"] == books.retractions and totals["done"]
        assert totals["evicted"] == side.engine.cache_manager.evicted_tokens
        assert totals["finished"] == totals["requests"] == 17
        assert totals["retracted"] and totals["evicted"]
    say = view["say"]
    worst = max(view["totals"], key=lambda totals: totals["worst"])["worst_id"]
    assert "of the prompts in the cache" in say and "steps on average under" in say and worst in say


def test_growth_shows_only_what_both_have():
    pair = live.make_run(1, Settings(workload="chat", compare="lru,lfu"))
    seen = 0
    while not pair.idle:
        pair.sides[0].advance()
        assert len(pair.page) == seen or pair.sides[1].idle
        if not pair.sides[1].idle:
            pair.sides[1].advance()
        assert len(pair.page) > seen
        seen = len(pair.page)
    pair.close()


def test_sentences():
    some = dataclasses.replace(NOBODY, prompt=100, cached=50, requests=4, wait=2.0, worst=5, worst_id="R2")
    more = dataclasses.replace(some, cached=70)
    patient = dataclasses.replace(some, wait=4.0, worst=9, worst_id="R3")
    names = ("lpm", "fcfs")
    assert difference(names, (NOBODY, NOBODY)) == "lpm and fcfs: no request has come yet"
    assert difference(names, (some, some)).startswith("No difference so far: both found 50%")
    assert "fcfs found 70% of the prompts in the cache, lpm 50%" in difference(names, (some, more))
    assert "on average under both, at most 5" in difference(names, (some, more))
    assert "4.0 steps on average under lpm (worst 9, R3), 2.0 under fcfs" in difference(
        names, (patient, some)
    )


def test_it_is_served_and_driven(tmp_path):
    settings = Settings(workload="chat", compare="lpm,fcfs", record=str(tmp_path / "run.jsonl"))
    driver = Driver(settings, speed=0, paused=True)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None)
        client = Client(server)
        assert b'data-page="compare"' in client.request("GET", "/")[1]
        assert client.do("step") == (200, {"frames": 1})
        assert [side["i"] for side in client.view(1)["sides"]] == [1, 1]
        events = client.stream(lambda event: event[1] == "status")
        assert events[0][2]["meta"]["names"] == ["lpm", "fcfs"] and events[-1][2]["drivable"]
        assert "0 R1" in events[1][2]["requests"] and "1 R1" in events[1][2]["requests"]
        for command in ("submit", "peek", "evict", "flush", "fork"):
            assert client.do(command, text="x", tokens=3)[0] == 400
        client.do("play", on=True)
        wait(lambda: driver.run_now.idle, 60)
        assert client.do("restart")[0] == 200 and driver.run_now.names == ("lpm", "fcfs")
    assert not driver.error
    assert len(Recorder.load(tmp_path / "run-lpm.jsonl")) > 5
    assert len(Recorder.load(tmp_path / "run-fcfs.jsonl")) > 5


def test_export(tmp_path, capsys):
    page = tmp_path / "both.html"
    assert live.main(["--workload", "few-shot", "--compare", "lru,lfu", "--export", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert 'data-page="compare"' in text and "/static/" not in text and "import {" not in text
    packed = re.search(r'id="recording">([^<]+)<', text).group(1)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert len(data["views"]["step"]) == len(data["frames"]) + 1
    assert data["meta"]["names"] == ["lru", "lfu"]
    assert live.main(["--workload", "few-shot", "--compare", "lru,lfu", "--export", "x.gif"]) == 2
    assert "need a .html file" in capsys.readouterr().err
    assert live.main(["--compare", "lru,lfu", "--replay", "none.jsonl"]) == 2
