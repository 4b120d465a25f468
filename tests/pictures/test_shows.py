"""What the README promises of `python -m viz.live` is there within ten seconds, and nothing is refused."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from support import ROOT

from minirad import workloads
from minirad.cache.eviction import POLICIES as EVICTION
from minirad.fleet.publish import Publisher
from minirad.observe import events as ev
from minirad.observe.disk_events import BlocksRead, BlocksWritten
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from minirad.observe.snapshot import units
from minirad.tiers.disk import DiskTier
from viz import live
from viz.view.fleet import sums
from viz.web import runs, stream

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text(encoding="utf-8")
STEPS = 24  # at three steps a second: eight seconds, and two until the model is there
TIERS = "--host-kv-tokens 2000 --host-write write_back"
DISK = "--host-kv-tokens 2000 --disk-dir kv-files"
DRAFTS = "--speculative eagle"
FORCED = "--jump-forward"
ADAPTERS = "--lora capitals --lora oneword"


def shown(arguments: str, steps: int = STEPS):
    """What the command shows after so many steps of its engines."""
    run = live.make_run(1, live.settings_of(live._parser().parse_args(arguments.split())))
    for _ in range(steps):
        if run.idle:
            break
        run.advance()
    return run


def happened(run) -> set[type[ev.Event]]:
    return {type(event) for frame in run.recorder.frames for event in frame.events}


def test_these_are_the_commands_of_the_readme():
    # Ranks, a server and workers: tests/server/test_readme_several.py.
    elsewhere = {"--tp 2", "--serve 8000", "--workers 4", "--cache lessons/02_radix_tree/exercise.py"}
    table = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    told = re.findall(r"`python -m viz\.live ?([^`]*)`((?:, `--compare [^`]*`)*)", table)
    commands = {first for first, _ in told} | {
        more for _, rest in told for more in re.findall("`(.*?)`", rest)
    }
    assert commands - elsewhere == {
        "", "--compare lru,lfu", "--compare lpm,fcfs", TIERS, DISK, DRAFTS, FORCED, ADAPTERS, "--publish tcp://127.0.0.1:5557",
        "--connect tcp://HOST:5557 --replay tcp://HOST:6557 --ranks 2",
    }  # fmt: skip


def test_what_one_page_publishes_another_one_shows():
    run = shown("", 0)
    with Publisher(run.engine, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        asked = ["--connect", publisher.endpoint, "--replay", publisher.replay or ""]
        source = stream.FleetSource(stream.followed(live._parser().parse_args(asked)))
        source.start()
        for _ in range(STEPS):
            run.advance()
        held = sum(units(node) for node in run.engine.snapshot()["tree"]["nodes"])
        until = time.monotonic() + 60
        while sums(source.run_now.trace.state()).tokens != held and time.monotonic() < until:
            time.sleep(0.1)
        source.stop()
        source.join(60)
    assert held > 100 and sums(source.run_now.trace.state()).tokens == held and not source.error


def test_the_tree_grows_splits_and_is_evicted():
    run = shown("")
    assert {ev.NodeInserted, ev.NodeGrown, ev.NodeSplit, ev.NodeEvicted} <= happened(run)
    assert not run.refused and not run.notices


@pytest.mark.parametrize("arguments", [TIERS, f"--kv-tokens 300 {TIERS}", "--host-kv-tokens 2000"])
def test_kv_goes_to_the_host_and_comes_back(arguments):
    run = shown(arguments)
    assert {ev.NodeDemoted, ev.LoadStarted, ev.LoadEnded} <= happened(run)
    while not run.idle:
        run.advance()
    run.engine.check()
    assert not run.refused and not run.notices
    assert run.page.requests()["R13"]["hit"] > 100, "a text that was loaded back, not computed again"


def told(run, kind: type[ev.Event]) -> list:
    return [event for frame in run.recorder.frames for event in frame.events if type(event) is kind]


@pytest.mark.parametrize("arguments", [DRAFTS, "--speculative ngram"])
def test_tokens_are_guessed_and_wrong_ones_give_their_slots_back(arguments):
    run = shown(arguments)
    assert {TokensDrafted, DraftVerified, ev.SlotsFreed} <= happened(run)
    verified = told(run, DraftVerified)
    assert any(event.accepted for event in verified) and any(
        event.accepted < event.drafted for event in verified
    )
    assert any(event.cause == "rejected" for event in told(run, ev.SlotsFreed))
    while not run.idle:
        run.advance()
    run.engine.check()
    assert run.engine.drafts.tokens_a_pass > 1 and not run.refused and not run.notices


def test_what_a_grammar_forces_is_not_sampled():
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    run = shown(FORCED)
    assert sum(len(event.tokens) for event in told(run, TokensForced)) > 100
    assert not happened(run) & {TokensDrafted, DraftVerified}
    while not run.idle:
        run.advance()
    run.engine.check()
    assert run.engine.drafts.tokens_a_pass > 3 and not run.refused and not run.notices


def test_two_adapters_say_it_in_their_ways_and_share_no_kv():
    run = shown(ADAPTERS)
    asked = {event.request: event for event in told(run, ev.RequestAdded)}
    assert {event.lora for event in asked.values()} == {"", "capitals", "oneword"}
    assert len({event.namespace for event in asked.values()}) == 3
    said: dict[str, list[int]] = {}
    for event in told(run, ev.TokenSampled):
        said.setdefault(event.request, []).append(event.token)
    replies: dict[str, list[str]] = {}  # some are still being written
    for name, tokens in said.items():
        text = run.engine.tokenizer.decode(tokens, skip_special_tokens=True)
        replies.setdefault(asked[name].lora, []).append(text)
    assert set(replies) == {"", "capitals", "oneword"}
    assert any(len(text) > 8 for text in replies["capitals"])
    assert all(text == text.upper() for text in replies["capitals"])
    assert all(len(text.split()) == 1 for text in replies["oneword"])
    assert not run.refused and not run.notices


def test_a_second_start_hits_what_the_first_one_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "DISK_WAIT", 600.0)  # however slow the disk
    monkeypatch.setattr(DiskTier, "read_wait", 600.0)
    first = shown(DISK)
    while not first.idle:
        first.advance()
    first.close()
    assert told(first, BlocksWritten) and not told(first, BlocksRead)
    assert any((tmp_path / "kv-files").glob("*.safetensors"))
    second = shown(DISK)
    assert sum(len(event.host_slots) for event in told(second, BlocksRead)) >= 64
    while not second.idle:
        second.advance()
    second.engine.check()
    computed = [run.engine.stats.first.tokens - run.engine.stats.first.cached for run in (first, second)]
    assert computed[1] <= computed[0] - 64
    assert not second.refused and not second.notices
    second.close()


def differ(pair) -> list[float]:
    """The hit rates of both sides, which must be told apart by the sentence and in the trees."""
    view = pair.page.view("step", len(pair.page))
    assert not view["say"].startswith("No difference") and "nobody has come" not in view["say"]
    assert view["sides"][0]["svg"] != view["sides"][1]["svg"]
    assert not pair.page.refused and not pair.notices
    return [totals["hit"] for totals in view["totals"]]


@pytest.mark.parametrize("other", ["fcfs", "lof", "random"])
def test_a_schedule_policy_that_knows_the_cache_is_told_from_one_that_does_not(other):
    lpm, blind = differ(shown(f"--compare lpm,{other}"))
    assert lpm > blind + 0.3


def test_two_eviction_policies_are_told_apart():
    lru, lfu = differ(shown("--compare lru,lfu"))
    assert lfu > lru + 0.05


def test_no_two_eviction_policies_do_the_same_there():
    hits = {}
    for name in EVICTION:
        run = shown(f"--workload again --eviction-policy {name}")
        run.engine.check()
        hits[name] = run.engine.scheduler.stats.first.cached
    hits.pop("brrip")  # no workload here is as long as its leases
    for one, two in itertools.combinations(hits, 2):
        assert abs(hits[one] - hits[two]) >= 20, (one, two, hits)


@pytest.mark.parametrize("name", [name for name in workloads.WORKLOADS if not workloads.load(name).program])
def test_every_workload_fits_its_own_pool(name):
    workload = workloads.load(name)
    run = live.Run(1, live.Settings(workload=name), workload)
    while not run.idle:
        run.advance()
    assert not run.refused and not run.notices
