"""brrip, the policy with leases tuned on a trace: what it keeps, its sign on the trace, and `bench learn`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from minirad.__main__ import main
from minirad.bench import learn
from minirad.cache.eviction import POLICIES, EvictionPolicy
from minirad.cache.other_policies import brrip
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import SamplingParams
from minirad.observe import events as ev
from minirad.simulate import ModelFreeEngine, read_source


@pytest.fixture(scope="module")
def keys() -> list[RadixKey]:
    """The prompts of the trace that is part of the project."""
    return [prompt.key for prompt in read_source("mooncake").prompts]


def test_a_few_newcomers_stay_long_enough_to_be_used_again() -> None:
    """Forty questions in turn in a pool for ten of them: lru has forgotten each one when it comes back."""
    asked = [RadixKey([number, 100 + number, 200 + number]) for number in range(40)] * 10
    policies = {"lru": POLICIES["lru"], "brrip": EvictionPolicy(*brrip(lease=200, hit=1, most=1, every=9))}
    rates = {name: learn.hit_rates(asked, [30], policy)[0] for name, policy in policies.items()}
    assert rates["lru"] == 0 and rates["brrip"] > 0.05


def test_a_lease_is_counted_from_the_last_use_and_grows_with_hits() -> None:
    _, ends, reason = brrip(lease=100, hit=2, most=3, every=5)
    cache = RadixCache(1, "brrip")
    node = cache.insert(RadixKey([1]), [1]).last_node  # at tick 1
    assert (node.created, ends(node)) == (1, 1)
    seen = []
    for _ in range(5):
        cache.match_prefix(RadixKey([1]))
        seen.append(ends(node) - node.last_access)
    assert seen == [200, 400, 600, 600, 600]
    assert "ends first (at tick 606: 5 hits, last used at 6)" in reason(node)
    node.created = 5  # a lucky one
    assert ends(node) - node.last_access == 700


@pytest.mark.slow
def test_it_beats_the_others_on_the_trace_at_every_size(keys: list[RadixKey]) -> None:
    sizes = learn.sizes_of(keys)[::2]  # 1/64, 1/16 and 1/4 of all
    assert sizes == [1564, 6258, 25_032]
    rates = {name: learn.hit_rates(keys, sizes, POLICIES[name]) for name in (*learn.RIVALS, "brrip")}
    for at, size in enumerate(sizes):
        for rival in learn.RIVALS:
            assert rates["brrip"][at] > rates[rival][at], (size, rival)


def test_what_is_tuned_here_is_judged_on_what_it_has_not_seen(keys: list[RadixKey]) -> None:
    choices = [learn.Numbers(1, 1, 1, 9), learn.Numbers(400, 2, 2, 5)]
    found = learn.report(keys[:800], 500, choices)
    assert found["requests"] == [500, 300]
    assert [each["numbers"]["lease"] for each in found["tuned"]] == [400, 1]
    cold, warm = found["judged"]["cold"], found["judged"]["warm"]
    assert cold["sizes"] == warm["sizes"] == learn.sizes_of(keys[500:800])
    assert set(cold["rates"]) == {"lru", "lfu", "slru", "brrip", learn.TUNED}
    assert cold["gains"]["brrip"] == learn.gains(
        cold["rates"]["brrip"], [cold["rates"][name] for name in learn.RIVALS]
    )
    # Warm, a request of the second part finds what the first has left; counted is the second part alone.
    assert warm["rates"]["lru"] == learn.hit_rates(keys[500:800], warm["sizes"], POLICIES["lru"], keys[:500])
    assert warm["rates"]["lru"][-1] > cold["rates"]["lru"][-1]


def test_gains_are_over_the_best_rival() -> None:
    rivals = [[0.1, 0.2, 0.0], [0.2, 0.1, 0.0]]
    mean, least = learn.gains([0.4, 0.1, 0.3], rivals)
    assert (mean, least) == (pytest.approx(0.0), pytest.approx(-0.5))
    assert learn.gains([0.3], [[0.0], [0.0]]) == (0.0, 0.0)


def written(path: str, prompts: Sequence[Sequence[int]]) -> str:
    with open(path, "w", encoding="utf-8") as file:
        for at, ids in enumerate(prompts):
            line = {
                "timestamp": at,
                "input_length": 512 * len(ids),
                "output_length": 1,
                "hash_ids": list(ids),
            }
            file.write(json.dumps(line) + "\n")
    return path


def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    trace = written(str(tmp_path / "t.jsonl"), [[0, int(rng.integers(1, 60))] for _ in range(300)])
    assert main(["bench", "learn", trace, "--split", "200", "--choices", "3"]) == 0
    said = capsys.readouterr().out
    assert "tuned on 200 requests; choices: 3;" in said and "judged on the other 100, warm" in said
    assert main(["bench", "learn", trace, "--choices", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == [150, 150]
    for options, words in (
        (["--split", "300"], "--split must leave requests on both sides: 1 to 299 of 300, not 300"),
        (["--split", "0"], "not 0"),
        (["--choices", "0"], f"--choices must be 1 to {len(learn.CHOICES)}, not 0"),
    ):
        assert main(["bench", "learn", trace, *options]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    for few in (1, 0):  # without an option there is nothing to say of one
        assert main(["bench", "learn", written(str(tmp_path / "few.jsonl"), [[0]] * few)]) == 2
        error = capsys.readouterr().err
        assert f"others to judge by are needed, not {few}" in error and "--split" not in error


def test_it_is_a_policy_of_the_engine() -> None:
    engine = ModelFreeEngine(64, eviction_policy="brrip", max_running=2)
    reasons: list[str] = []
    engine.bus.subscribe(ev.NodeEvicted, lambda event: reasons.append(event.reason))
    rng = np.random.default_rng(1)
    for _ in range(30):
        engine.add_request([int(rng.integers(0, 4)), *range(5, 20)], SamplingParams(max_new_tokens=4))
        while engine.has_work:
            engine.step()
            engine.check()
    assert reasons and all(
        each.startswith("unlocked leaf with the lease that ends first") for each in reasons
    )
