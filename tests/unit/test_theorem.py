"""Theorem 3.1 over random trees, and that the printed counter-examples are what they are said to be."""

from __future__ import annotations

import json
import random
import sys
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.__main__ import main
from minirad.cache.eviction import POLICIES
from minirad.theorem import (
    DROPPED,
    Dropped,
    Finding,
    Job,
    Rules,
    bound,
    cases,
    check_tree,
    counter_examples,
    is_depth_first,
    online,
    random_tree,
    run,
)  # fmt: skip

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(prompts, st.sampled_from(sorted(POLICIES)))
def test_longest_shared_prefix_first_is_depth_first_and_reaches_the_bound(
    trees: list[tuple[int, ...]], policy: str
) -> None:
    # The requests share with those before only what the running one holds: any eviction will do.
    checked = check_tree(trees, Rules(eviction_policy=policy))
    assert checked.bound == len({p[:size] for p in trees for size in range(1, len(p) + 1)})
    assert checked.holds, checked


@settings(max_examples=60, deadline=None)
@given(prompts, st.randoms(use_true_random=False))
def test_no_order_computes_less_and_depth_first_ones_compute_the_bound(
    trees: list[tuple[int, ...]], rng: random.Random
) -> None:
    order = list(range(len(trees)))
    rng.shuffle(order)
    jobs = [Job(prompt) for prompt in trees]
    computed = run(jobs, order=order).computed
    assert computed >= bound(jobs)
    if is_depth_first([trees[number] for number in order]):
        assert computed == bound(jobs)


def test_depth_first_is_recognised() -> None:
    a, ab, ac, b = (0,), (0, 1), (0, 2), (1,)
    assert is_depth_first([ab, a, ac, b])  # a prompt may end anywhere on the way
    assert is_depth_first([a, a, b])
    assert not is_depth_first([ab, b, ac])
    assert not is_depth_first([ab, ac, ab])


# ---------------------------------------------------------------------- without one assumption


@pytest.fixture(scope="module")
def findings() -> dict[str, Finding]:
    return {dropped.name: counter_examples(dropped) for dropped in DROPPED}


@pytest.mark.parametrize(
    ("name", "jobs", "numbers", "beaten", "least"),
    [
        ("one token is always computed", "a a", (1, 2, 2), "aa a", 2),
        ("replies enter the tree", "a>a aa", (2, 1, 1), "aa a>a", 1),
        ("batches of 2", "a a", (1, 2, 2), "a a b", 2),
        ("arrivals over time", "a b a@2", (2, 3, 2), "a b a@2", 2),
        ("the cache is 1 token smaller", "aa aa", (2, 3, 3), None, None),
    ],
)
def test_the_smallest_counter_examples(
    findings: dict[str, Finding],
    name: str,
    jobs: str,
    numbers: tuple[int, int, int],
    beaten: str | None,
    least: int | None,
) -> None:
    finding = findings[name]
    found = finding.not_c
    assert found is not None
    assert " ".join(job.describe() for job in found.jobs) == jobs
    assert (found.bound, found.computed, found.best) == numbers
    other = finding.beaten
    assert (other and " ".join(job.describe() for job in other.jobs), other and other.best) == (beaten, least)


def test_a_counter_example_can_be_run_again(findings: dict[str, Finding]) -> None:
    for dropped in DROPPED:
        found = findings[dropped.name].beaten
        if found is not None:
            assert run(found.jobs, dropped.rules).computed == found.computed
            assert run(found.jobs, dropped.rules, found.best_order).computed == found.best < found.computed
            # With the assumption back in place, nothing is left of it.
            restored = [Job(job.prompt) for job in found.jobs]
            assert run(restored).computed == bound(restored)


def test_cases_come_by_size_and_without_renamed_twins() -> None:
    seen = [tuple(job.prompt for job in jobs) for jobs in cases(Dropped("", Rules()), (2, 4))]
    sizes = [(len(jobs), sum(map(len, jobs))) for jobs in seen]
    assert sizes == sorted(sizes)
    assert len(set(seen)) == len(seen)
    # Bell numbers: the ways to call n tokens equal or not, times the ways to cut them in two.
    assert [sizes.count((1, n)) for n in (1, 2, 3, 4)] == [1, 2, 5, 15]
    assert [sizes.count((2, n)) for n in (2, 3, 4)] == [2, 2 * 5, 3 * 15]


def test_a_given_order_waits_for_who_has_not_come() -> None:
    jobs = [Job((0,)), Job((1,)), Job((0,), arrival=2)]
    assert run(jobs).computed == 3
    assert min(run(jobs, order=order).computed for order in permutations(range(3))) == 2


def test_random_trees_are_seeded() -> None:
    first, again = (random_tree(random.Random(3), 12) for _ in range(2))
    assert first == again
    assert all(first)


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[online.__module__], "SCHEDULE", ("fcfs", "lpm"))  # the others take long
    assert main(["theorem", "--trees", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trees"]["holds"] == result["trees"]["checked"] == 20
    assert result["trees"]["computed"] == result["trees"]["bound"]
    assert all(row["share"] is None or row["share"] <= 1 for row in result["online"])
    assert main(["theorem", "--trees", "2", "--skip-online"]) == 0
    assert "2 of 2 random trees" in capsys.readouterr().out
    assert main(["theorem", "--requests", "0"]) == 2
    assert "requests must be at least 1, got 0" in capsys.readouterr().err
