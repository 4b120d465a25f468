"""Lesson 14: what its texts say of the stack algorithm and the engine's tree; a policy on the live page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_own_policy import as_before

from lessons.grading.policy import found, found_block_by_block, found_by_lru, random_requests, trace
from lessons.grading.spec import ROOT, find_folder, load_file
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixCache, RadixKey
from viz.live import main

__all__ = ["as_before"]  # a fixture

solution = load_file(find_folder("14") / "solution.py")
SIZES = (
    241, 300, 400, 600, 800, 1_000, 1_200, 1_400, 1_564, 1_800, 2_000, 2_400, 3_000, 3_500, 4_000, 4_500,
    5_000, 6_000, 7_000, 8_000, 9_000, 10_000, 12_000, 15_000, 20_000, 25_000, 30_000, 40_000, 50_000, 60_000,
    80_000,
)  # fmt: skip
EXERCISE = str(ROOT / "14_capacity" / "exercise.py")


def games(count: int) -> Iterator[tuple[list[list[int]], range]]:
    """Small random games, none of them with empty requests, and some sizes from the longest request up."""
    for seed in range(count):
        requests = [each for each in random_requests(Random(seed), 7, 5) if each] or [[1]]
        longest = max(map(len, requests))
        yield requests, range(longest, longest + 5)


def whole_leaves(requests: list[list[int]], sizes: range) -> list[int]:
    return [found(map(RadixKey, requests), size) for size in sizes]


def test_with_one_block_a_node_the_engine_is_the_stack_algorithm() -> None:
    for requests, sizes in games(100):
        needed = solution.needed_sizes(requests)
        engine = [sum(found_block_by_block(requests, size)) for size in sizes]
        assert solution.hit_curve(needed, sizes) == engine, requests


@pytest.mark.slow
def test_with_whole_leaves_a_larger_cache_may_find_less_and_it_is_the_splits_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_less() -> int:
        return sum(any(b < a for a, b in pairwise(whole_leaves(*each))) for each in games(3_000))

    assert with_less() == 5
    split = RadixCache._split

    def keeps_its_age(self: Any, lower: Any, at: int, tick: int) -> Any:
        age = lower.last_access
        upper = split(self, lower, at, tick)
        lower.last_access, lower.queued = age, None
        self._queue.offer(lower)
        return upper

    monkeypatch.setattr(RadixCache, "_split", keeps_its_age)
    assert with_less() == 0


@pytest.mark.slow
def test_on_the_trace_whole_leaves_stay_within_three_percent_of_the_curve() -> None:
    assert len(SIZES) == 31 and max(map(len, trace())) == SIZES[0]
    curve = solution.hit_curve(solution.needed_sizes([key.tokens.tolist() for key in trace()]), SIZES)
    engine = [found(trace(), size) for size in SIZES]
    assert all(abs(there - one) < 0.03 * one for one, there in zip(curve, engine, strict=True))
    assert any(there > one for one, there in zip(curve, engine, strict=True))
    assert all(a <= b for a, b in pairwise(engine))


def test_what_the_pages_say_of_policies() -> None:
    def gain(key: Any, first: int, last: int, size: int) -> float:
        return found(trace()[first - 1 : last], size, key) / found_by_lru(first, last, size) - 1

    lfu, longest = POLICIES["lfu"].key, lambda node: (-len(node), node.last_access)
    assert round(gain(lfu, 1_501, 3_000, 1_800), 2) == 0.13
    assert round(gain(lfu, 3_008, 6_015, 3_000), 2) == 0.20
    assert round(gain(longest, 3_008, 6_015, 3_000), 2) == 0.19
    assert round(gain(longest, 3_008, 6_015, 6_000), 2) == -0.11
    assert round(gain(solution.victim_key, 1, 3_007, 6_000), 3) == -0.055
    assert round(gain(solution.victim_key, 3_008, 6_015, 6_000), 2) == 0.02


# ---------------------------------------------------------------------- the live page


def test_what_cannot_run_is_refused_before_anything_starts(
    as_before: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def victim_key(node):\n    return node.hits\n", encoding="utf-8")
    for asked, words in (
        (["--eviction-policy", EXERCISE], "exercise.py: victim_key is not written yet"),
        (["--compare", f"lru,{EXERCISE}"], "exercise.py: victim_key is not written yet"),
        (["--eviction-policy", "nobody"], "unknown eviction policy 'nobody'; known: lru, lfu"),
        (["--eviction-policy", str(mine), "--tp", "2"], "mine.py: a policy of your own runs in one process"),
        (
            ["--eviction-policy", str(mine), "--workers", "2"],
            "mine.py: a policy of your own runs in one process",
        ),
    ):
        assert main(asked) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_runs_it_and_says_how_it_broke(
    as_before: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, told_to = str(find_folder("14") / "solution.py"), tmp_path / "run.jsonl"
    asked = ["--export", str(tmp_path / "page.html"), "--steps", "60"]
    assert main(["--eviction-policy", own, "--kv-tokens", "300", "--record", str(told_to), *asked]) == 0
    assert "smallest victim_key of solution.py" in told_to.read_text(encoding="utf-8")
    assert main(["--compare", f"lru,{own}", *asked]) == 0
    broken = tmp_path / "broken.py"
    broken.write_text("def victim_key(node):\n    return 1 / (node.hits - 1)\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["--eviction-policy", str(broken), *asked]) == 1
    told = capsys.readouterr().err
    assert "your policy broke: " in told and "victim_key raised ZeroDivisionError" in told
    assert "Traceback" not in told
