"""The radix benchmark at tiny sizes: the counts are right, the trees agree, the JSON is as documented."""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys

import numpy as np
import pytest

from minirad.bench import radix, scaling, streams
from minirad.bench.tables import cpu_clock, number, table
from minirad.bench.textbook import PerTokenRadixTree, TokenTrie

CLOCK = cpu_clock()[1]


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch loaded, a full collection before each little measurement takes most of the time."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    radix.add_arguments(parser)
    return parser.parse_args(argv)


def counts(run: radix.Run) -> tuple[int, ...]:
    return run.hit, run.new, run.evicted, run.skipped, run.total


@pytest.mark.parametrize(
    ("name", "page", "expected"),
    [
        ("chat", 1, (4788133, 297710, 0)),
        ("chat", 16, (4780832, 297488, 0)),
        ("fewshot", 1, (1998006, 201994, 0)),
        ("fewshot", 16, (1998000, 194000, 0)),
        ("noshare", 1, (13, 2047987, 0)),
        ("noshare", 16, (0, 2048000, 0)),
        ("evict", 1, (2637556, 3725537, 3525730)),
        ("evict", 16, (2605680, 3719984, 3520624)),
        ("split", 1, (2985049, 208384, 0)),
        ("split", 16, (2962656, 208384, 0)),
    ],
)
def test_the_totals_that_every_correct_cache_gets(name: str, page: int, expected: tuple[int, ...]) -> None:
    run = radix.run_stream(streams.stream(name), page, radix.RADIX, CLOCK)
    assert (run.hit, run.new, run.evicted) == expected
    assert run.skipped == 0 and run.total == run.new - run.evicted


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("name", list(streams.STREAMS))
def test_the_textbook_trees_agree(name: str, page: int) -> None:
    count = {"chat": 70, "fewshot": 10, "noshare": 5, "evict": 60, "split": 150}[name]
    few = streams.stream(name).head(count)
    if name == "evict":
        few = streams.Stream(name, few.requests, 20_000)  # so that a few requests fill it
    expected = radix.run_stream(few, page, radix.RADIX, CLOCK)
    assert expected.hit or name == "noshare"
    assert bool(expected.evicted) == (name == "evict")
    assert counts(radix.run_stream(few, page, scaling.KINDS["per_token"], CLOCK)) == counts(expected)
    if name != "evict":  # a trie's leaves are single pages: it evicts no more than it must
        assert counts(radix.run_stream(few, page, scaling.KINDS["trie"], CLOCK)) == counts(expected)


@pytest.mark.parametrize("tree", [TokenTrie, PerTokenRadixTree])
def test_the_textbook_trees_lock_and_evict(tree: type[TokenTrie] | type[PerTokenRadixTree]) -> None:
    cache = tree(2)
    a, b = tree.key([1, 2, 3, 4, 5]), tree.key([1, 2, 7, 8])
    assert cache.insert(a, np.arange(5)).prefix_len == 0
    assert cache.insert(b, np.arange(10, 14)).prefix_len == 2
    found = cache.match_prefix(a)
    assert found.length == 4 and found.slots.tolist() == [0, 1, 2, 3]
    cache.inc_lock_ref(found.last_node)
    assert (cache.evictable_size, cache.protected_size) == (2, 4)
    assert cache.evict(100).slots.tolist() == [12, 13]
    cache.dec_lock_ref(found.last_node)
    gone = cache.evict(100)
    assert gone.num_tokens == 4 and sorted(gone.slots.tolist()) == [0, 1, 2, 3]
    assert cache.evictable_size == cache.protected_size == 0
    assert cache.evict(5).slots.tolist() == [] and len(list(cache.walk())) == 1


def test_streams_come_out_the_same_each_time() -> None:
    first, second = streams.stream("split"), streams.stream("split")
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(first.requests, second.requests, strict=True))
    assert len(first.head(5).requests) == 5 and first.head(None).requests == first.requests
    with pytest.raises(ValueError, match="unknown workload 'chess'; known: chat"):
        streams.stream("chess")


def test_the_json_has_the_documented_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--json", "--no-cache", "--requests", "12", "--reps", "1", "--leaves", "20", "--pages", "1,4"]
    monkeypatch.setattr(radix, "HIT_NODES", (1, 8))
    assert radix.main(options(*argv)) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"clock", "python", "numpy", "reps", "workloads", "evict_one", "full_hit"}
    assert [(row["workload"], row["page"]) for row in result["workloads"]] == [
        (name, page) for name in streams.STREAMS for page in (1, 4)
    ]
    for row in result["workloads"]:
        assert set(row) == {
            "workload", "page", "requests", "hit", "new", "evicted", "evict_calls", "skipped", "total",
            "cache_s", "us", "calls", "per_request_us", "allocator_us", "no_cache_us", "share",
        }  # fmt: skip
        assert row["requests"] == 12 and set(row["us"]) == set(radix.OPERATIONS) - {"evict"}
        assert row["calls"]["match"] == 12 and row["cache_s"] > 0 and 0 < row["share"] < 1
        assert row["cache_s"] * 1e6 / 12 == pytest.approx(row["per_request_us"])
    assert [set(row) for row in result["evict_one"]] == [{"page", "leaves", "us"}] * 2
    assert {(row["nodes"], row["tokens"]) for row in result["full_hit"]} == {
        (n, 4096) for n in radix.HIT_NODES
    }


def test_the_tables_name_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--requests", "5", "--reps", "1", "--leaves", "10", "--pages", "2", "--workloads", "noshare,chat"]
    assert radix.main(options(*argv)) == 0
    text = capsys.readouterr().out
    for word in ("noshare", "chat", "match us", "cache s", "10 leaves", "256 nodes", "page 2, us"):
        assert word in text
    assert "split" not in text and "tree's share" not in text


@pytest.mark.slow
def test_scaling(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "TOKENS", (8, 16))
    monkeypatch.setattr(scaling, "NODES", (1, 4))
    monkeypatch.setattr(scaling, "DEEP_TOKENS", 32)
    monkeypatch.setattr(scaling, "MEMORY_PROMPTS", 50)
    argv = ["--scaling", "--reps", "1", "--leaves", "10,30"]
    assert radix.main(options(*argv, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"clock", "python", "numpy", "reps", "scaling", "memory"}
    kinds = {"radix", "per_token", "trie"}
    assert all(set(row) == {"operation", "by", "n"} | kinds for row in result["scaling"])
    assert [row["n"] for row in result["scaling"] if row["operation"] == "evict"] == [10, 30]
    assert {row["operation"] for row in result["scaling"]} == {"look-up", "insert", "lock", "evict"}
    assert all(row["radix"] < row["per_token"] < row["trie"] for row in result["memory"])
    assert radix.main(options(*argv)) == 0
    text = capsys.readouterr().out
    assert "token trie" in text and "30 leaves" in text and "per prompt of 256 tokens" in text


@pytest.mark.parametrize(
    "argv",
    [["--pages", "0"], ["--workloads", "chess"], ["--reps", "x"], ["--reps", "0"], ["--leaves", "5,-1"]],
)
def test_bad_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*argv)
    assert argv[0] in capsys.readouterr().err


def test_figures_and_tables() -> None:
    assert [number(v) for v in (None, 1234567, 1.234, 123.45, 4321.9, "x")] == [
        "-", "1,234,567", "1.23", "123.5", "4,322", "x",
    ]  # fmt: skip
    assert table(["name", "us"], [["a", 1.5], ["long", 20]]).split("\n") == [
        "name    us",
        "----  ----",
        "a     1.50",
        "long    20",
    ]
    assert table(["only", "head"], []).startswith("only  head")


def test_measuring_imports_no_torch() -> None:
    code = "import sys, minirad.bench.radix, minirad.bench.scaling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_collection_comes_back_on() -> None:
    assert gc.isenabled()
    with pytest.raises(RuntimeError), radix.no_garbage_collection():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()
