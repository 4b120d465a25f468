"""The bound and the policies that know the future: by hand, in the tables, and where they must refuse."""

from __future__ import annotations

import json
import random

import pytest

from minirad import Engine, EngineConfig
from minirad.__main__ import main
from minirad.bench import eviction
from minirad.bench.streams import Stream
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixKey
from minirad.config import SamplingParams, ScheduleOptions
from minirad.observe import events as ev
from minirad.optimum import Known, Presence, most_kept
from minirad.simulate import ForeseeingReplay, ModelFreeEngine, Plan, Replay, from_workload, simulate, table
from minirad.traces import tokenizer
from minirad.workloads import load


def known(*prompts: str, page: int = 1) -> Known:
    """Each letter is a token."""
    return Known([(RadixKey([ord(letter) for letter in prompt]),) for prompt in prompts], page)


def hits(replay: Replay, what: Known) -> int:
    return sum(replay.serve(*keys) or 0 for keys in what.requests)


def test_a_loop_that_is_one_too_long_for_lru() -> None:
    """Of two pages one is the request's own, and in the other one interval fits at a time."""
    loop = known(*"abcabcabc")
    assert hits(Replay(2), loop) == 0
    # Each crosses two requests: a is kept from the 1st to the 4th, c from the 3rd, b from the 5th.
    assert loop.bound(2) == hits(ForeseeingReplay(loop, 2), loop) == 3
    assert loop.bound(3) == loop.bound(None) == 6
    assert loop.bound(1) == 0


def test_of_a_leaf_that_is_needed_in_part_only_pages_keep_that_part() -> None:
    """The tree gives up all of abcd or nothing; page by page ab would stay."""
    prompts = known("abcd", "xyz", "ab")
    assert prompts.bound(5) == 2
    assert hits(ForeseeingReplay(prompts, 5), prompts) == 0


def test_what_is_refused_asks_for_nothing_and_holds_nothing() -> None:
    prompts = known("ab", "vwxyz", "ab")
    assert prompts.bound(4) == 2 and prompts.bound(5) == 0 and prompts.bound(1) == 0
    assert hits(ForeseeingReplay(prompts, 4), prompts) == 2
    assert known().bound(3) == known("").bound(3) == 0


def test_namespaces_share_nothing_and_a_last_page_that_is_not_whole_takes_room() -> None:
    apart = Known([(RadixKey([1, 2], 1),), (RadixKey([1, 2], 2),), (RadixKey([1, 2], 1),)])
    assert (apart.bound(3), apart.bound(4)) == (1, 2)
    pages = known("abcd", "xyz", "abcd", page=2)  # xyz: two pages while it is served
    assert [pages.bound(size) for size in (4, 6, 7, 8)] == [0, 2, 2, 4]


def test_one_bit_of_foresight() -> None:
    prompts = known("a", "b", "c", "d", "a")
    assert hits(Replay(2), prompts) == 0
    assert hits(ForeseeingReplay(prompts, 2, "dead-first"), prompts) == 1 == prompts.bound(2)
    with pytest.raises(ValueError, match="unknown policy 'lru'; known: clairvoyant, dead-first"):
        ForeseeingReplay(prompts, 2, "lru")


def test_an_eviction_says_when_its_victim_would_have_been_needed() -> None:
    prompts = known("a", "b", "c", "b", "a")
    replay = ForeseeingReplay(prompts, 2)
    reasons: list[str] = []
    replay.cache.bus.subscribe(ev.NodeEvicted, lambda event: reasons.append(event.reason))
    assert hits(replay, prompts) == 1 and replay.cache.eviction_policy == "clairvoyant"
    assert "needed next by request 5" in reasons[0] and "needed never again" in reasons[1]


def test_the_furthest_end_is_dropped_and_only_as_much_as_has_to_be() -> None:
    intervals = [(0, 5, 4), (0, 3, 2), (1, 9, 3), (2, 4, 1)]
    assert most_kept(intervals, [9] * 10) == 10
    assert most_kept(intervals, [9, 9, 7, *[9] * 7]) == 8  # two of the three that end at 9
    assert most_kept(intervals, [0] * 10) == 0
    assert most_kept([], [1]) == most_kept([], []) == 0


def test_a_request_that_evicts_a_part_of_itself_still_fits() -> None:
    """1 2 3 4 is there; for 1 2 with that reply and one more mru takes 3 4, which then have to come back."""
    replay = Replay(6, eviction_policy="mru")
    for prompt in ([1, 2, 3, 4], [5, 6]):
        replay.serve(RadixKey(prompt))
    assert replay.serve(RadixKey([1, 2]), RadixKey([1, 2, 3, 4, 9])) == 2
    assert replay.cache.total_size <= 6
    replay.cache.check()


# ---------------------------------------------------------------------- over time


def test_one_running_at_a_time_has_the_bound_of_a_replay_with_its_replies() -> None:
    """Each prompt ends in a token of its own, so that the token that is always computed is never found."""
    less = 0
    for seed in range(12):
        rng = random.Random(seed)
        size = rng.randint(12, 16)
        begins = [[rng.randrange(9) for _ in range(6)] for _ in range(3)]
        engine = ModelFreeEngine(size, schedule_policy="fcfs", max_running=1, chunk=size)
        presence = Presence(engine)
        engine.script.watch = presence.launched
        for number in range(12):
            prompt = [*rng.choice(begins)[: rng.randint(1, 6)], 100 + number]
            engine.add_request(prompt, SamplingParams(max_new_tokens=rng.randint(1, 4)))
        while engine.has_work:
            engine.step()
            engine.check()
        served = [engine.served[name] for name in engine.order]
        requests = [(each.prompt.tolist(), each.outputs[0][:-1]) for each in served]
        same = Known([(RadixKey(prompt), RadixKey(prompt + reply)) for prompt, reply in requests])
        assert presence.bound() == same.bound(size) >= engine.stats.first.cached
        less += presence.bound() < same.bound(None)
    assert less > 2


def test_two_admitted_in_one_step_may_find_the_same_page() -> None:
    engine = ModelFreeEngine(20, max_running=4)
    presence = Presence(engine)
    engine.script.watch = presence.launched
    for prompts in ([[1, 2, 3]], [[9] * 8], [[1, 2, 3, 4], [1, 2, 3, 5]]):
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=1))
        while engine.has_work:
            engine.step()
            engine.check()
    assert engine.stats.first.cached == presence.bound() == 6


def test_who_waits_for_another_s_prompt_holds_its_pages_meanwhile() -> None:
    engine = ModelFreeEngine(11, options=ScheduleOptions(new_token_ratio=0.0, new_token_ratio_min=0.0))
    presence = Presence(engine)
    engine.script.watch = presence.launched
    engine.add_request([1, 2, 3, 4], SamplingParams(max_new_tokens=6, ignore_eos=True))
    engine.step()
    engine.add_request([9, 8, 7, 6, 5], SamplingParams(max_new_tokens=1))
    assert engine.step().kind == "prefill"  # the first one does not decode in this step
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=1))
    engine.step()
    engine.check()
    assert engine.stats.first.cached == presence.bound() == 4


def test_what_would_make_the_bound_wrong_is_refused() -> None:
    with pytest.raises(ValueError, match="host memory"):
        Presence(Engine(EngineConfig(device="cpu", kv_tokens=64, host_kv_tokens=64)))
    engine = ModelFreeEngine(20)
    engine.script.watch = Presence(engine).launched
    engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=1))
    engine.step()
    engine.pin([1, 2])
    engine.add_request([1, 2], SamplingParams(max_new_tokens=1))
    with pytest.raises(ValueError, match=r"pins hold KV that no request holds: \[1\]"):
        engine.step()


# ---------------------------------------------------------------------- tables


def test_rows_say_how_much_of_the_bound_they_reach(capsys: pytest.CaptureFixture[str]) -> None:
    source = from_workload(load("mixed"), tokenizer())
    replay = simulate(source, Plan("replay", (250, None), (1, 4), (*POLICIES, "clairvoyant", "dead-first")))
    over_time = simulate(source, Plan("schedule", (400,), eviction_policies=("lru", "mru")))
    for row in (*replay.rows, *over_time.rows):
        assert 0 < row.cached <= row.bound <= row.optimum
        assert row.as_dict()["bound_share"] == row.bound_share == row.cached / row.bound
        assert row.as_dict()["bound_rate"] == row.bound_rate == row.bound / row.prompt
        assert (row.capacity is None) <= (row.cached == row.bound == row.optimum)
    assert {row.eviction_policy for row in replay.rows} == {*POLICIES, "clairvoyant", "dead-first"}
    assert any(row.bound < row.optimum for row in (*replay.rows, *over_time.rows))
    assert "these requests in this order" in table(replay)
    assert "in the same steps" in table(over_time)
    head = table(replay).splitlines()[2]
    assert head.index("share of it") < head.index("bound") < head.index("share of bound")


def test_over_time_nobody_knows_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "chat", "--eviction-policy", "lru,dead-first"]) == 2
    assert capsys.readouterr().err == (
        "minirad: eviction policy 'dead-first' has to know what comes next: it runs in a replay only\n"
    )
    assert main(["simulate", "chat", "--eviction-policy", "all", "--capacity", "200", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [row["eviction_policy"] for row in report["rows"]] == list(POLICIES)


def test_bench_eviction_prints_shares_of_the_bound() -> None:
    keys = [RadixKey([number]).tokens for number in list(range(20)) * 4]
    report = eviction.hit_rates_of_stream(Stream("loop", [(key, key) for key in keys]))
    assert report["sizes"] == (2, 5, 10) and report["optimum"] == 0.75
    assert report["rates"]["lru"] == [0.0, 0.0, 0.0]
    assert report["bounds"]["lru"] == report["bounds"]["mru"] == report["clairvoyant"]
    assert 0 < report["clairvoyant"][0] < report["clairvoyant"][1] < report["clairvoyant"][2] < 0.75
    rates, shares = eviction.as_table([report]).split("\n\n")
    assert rates.splitlines()[1].split()[-4:] == ["clairvoyant", "bound", "no", "limit"]
    for line in shares.splitlines()[3:]:
        cells = dict(zip((*POLICIES, "clairvoyant"), line.split()[4:], strict=True))
        assert (cells["lru"], cells["clairvoyant"]) == ("0.0%", "100.0%")


def test_bench_eviction_over_time_gives_each_policy_the_bound_of_its_own_order() -> None:
    report = eviction.hit_rates(from_workload(load("multi-turn"), tokenizer()))
    assert report["clairvoyant"] is None
    for policy in POLICIES:
        pairs = list(zip(report["rates"][policy], report["bounds"][policy], strict=True))
        assert all(0 < rate <= bound <= report["optimum"] for rate, bound in pairs)
    assert len({tuple(bounds) for bounds in report["bounds"].values()}) > 1
    assert " to " in eviction.as_table([report])


def test_bench_eviction_says_what_is_not_there_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "hit_rates_of_stream", lambda work: pytest.fail("measured"))
    for workloads, streams, words in (
        ("nosuch", "chat", "no workload 'nosuch'"),
        ("chat", "chat,nosuch", "unknown stream 'nosuch'; known: chat, "),
        ("", "", "nothing to measure"),
    ):
        assert main(["bench", "eviction", "--workloads", workloads, "--streams", streams]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_the_figure_draws_one_bound_for_a_replay_and_each_order_s_own_over_time() -> None:
    pytest.importorskip("plotly")
    from viz.simulate import bound_lines, figure, hit_rate_lines

    source = from_workload(load("mixed"), tokenizer())
    replay = simulate(source, Plan("replay", (250, 300, None), (1, 4), ("lru", "clairvoyant"))).as_dict()
    lines = bound_lines(replay)
    assert [line.name for line in lines] == ["bound", "bound, page 4"]
    assert list(lines[0].x) == ["250", "300", "unlimited"]
    assert list(lines[0].y) == [row["bound_rate"] for row in replay["rows"] if row["page_size"] == 1][::2]
    over_time = simulate(source, Plan("schedule", (400,), schedule_policies=("lpm", "fcfs"))).as_dict()
    assert [line.name for line in bound_lines(over_time)] == ["bound (lru, lpm)", "bound (lru, fcfs)"]
    assert "bound" in {trace.name for trace in figure([replay]).data}
    every = simulate(source, Plan("schedule", (400,), eviction_policies=tuple(POLICIES))).as_dict()
    longest = max(len(line.name) for line in bound_lines(every))
    assert longest < 40  # the legend takes its room from the charts
    looks = [(line.line.color, line.marker.symbol) for line in hit_rate_lines(every)]
    assert len(set(looks)) == len(looks) == len(POLICIES)
    for row in replay["rows"]:  # as it was saved before there was a bound
        del row["bound_rate"], row["bound_share"]
    assert figure([replay]).data
