"""The benchmarks of eviction policies and of tiers: what they count, not how long it took."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minirad.__main__ import main
from minirad.bench import eviction, tiers
from minirad.bench.streams import stream
from minirad.cache.eviction import POLICIES
from minirad.tiers.hiradix_cache import HOST_WRITE

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bench", *words]) == 0
    return capsys.readouterr().out


def test_a_second_tier_saves_what_it_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiers.documents(4, 60, 3)
    monkeypatch.setattr(tiers, "documents", lambda: small)
    found = json.loads(run(capsys, "tiers", "--workloads", "documents", "--reps", "1", "--json"))["runs"]
    by = {row["host_write"]: row for row in found}
    assert list(by) == ["none", *HOST_WRITE]
    plain = by["none"]
    for write in ("write_through", "write_back"):
        assert by[write]["loaded"] > 0
        assert by[write]["computed"] + by[write]["loaded"] == plain["computed"]
        assert by[write]["copied_out"] > 0 and 0 < by[write]["copy_seconds"] < by[write]["seconds"]
    assert plain["loaded"] == plain["copied_out"] == plain["copy_seconds"] == 0
    assert {row["prompt_tokens"] for row in found} == {plain["prompt_tokens"]}


def test_the_table_of_tiers_compares_with_the_run_without_one() -> None:
    def row(write: str, computed: int) -> dict[str, Any]:
        return {
            "workload": "w", "kv_tokens": 9, "host_write": write, "hit_rate": 0.5, "computed": computed,
            "loaded": 3, "copied_out": 4, "copies": 1, "seconds": 1.0, "copy_seconds": 0.001,
        }  # fmt: skip

    lines = tiers.as_table([row("none", 100), row("write_back", 60)]).splitlines()
    assert lines[0].split()[:3] == ["workload", "pool", "host_write"]
    assert lines[3].split()[:6] == ["w", "9", "write_back", "50.0%", "60", "40"]


def test_every_policy_on_a_workload_at_three_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = json.loads(run(capsys, "eviction", "--workloads", "chat", "--streams", "", "--json"))
    assert list(report["rates"]) == list(POLICIES)
    assert len(report["sizes"]) == 3 and report["sizes"] == sorted(set(report["sizes"]))
    for rates in report["rates"].values():
        assert len(rates) == len(report["sizes"])
        assert all(0 <= rate <= report["optimum"] for rate in rates)
    text = eviction.as_table([report])
    assert "*" in text and text.splitlines()[1].split()[:3] == ["workload", "pool", "of"]


def test_a_star_marks_all_that_look_best() -> None:
    rates = {policy: [0.5] for policy in POLICIES} | {"lfu": [0.70001], "mru": [0.7]}
    report = {
        "workload": "w", "distinct": 100, "sizes": (10,), "optimum": 0.9, "rates": rates,
        "bounds": {policy: [0.8] for policy in POLICIES}, "clairvoyant": None,
    }  # fmt: skip
    lines = eviction.as_table([report]).splitlines()
    for line, what, cells in ((lines[3], "70.0%*", slice(3, -3)), (lines[-1], "87.5%*", slice(3, -1))):
        starred = [cell if cell.endswith("*") else "" for cell in line.split()[cells]]
        assert starred == [what if policy in ("lfu", "mru") else "" for policy in POLICIES]


def test_policies_differ_on_a_large_stream() -> None:
    report = eviction.hit_rates_of_stream(stream("evict").head(400))
    by_policy = {tuple(rates) for rates in report["rates"].values()}
    assert len(by_policy) >= 5  # priority is lru here
    for rates in report["rates"].values():
        assert (
            rates == sorted(rates) or rates is report["rates"]["fifo"]
        )  # fifo alone may lose by a larger pool
        assert all(0 < rate <= report["optimum"] for rate in rates)


def test_an_unknown_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("eviction", "tiers"):
        extra = ["--streams", ""] if what == "eviction" else []
        assert main(["bench", what, "--workloads", "nonsense", *extra]) == 2
        assert "nonsense" in capsys.readouterr().err
