"""Which worker a request goes to, why, and how an oracle judges it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.errors import InvariantError
from minirad.route.oracle import Oracle, judge
from minirad.route.policies import (
    POLICIES,
    Choice,
    NoWorker,
    Policy,
    RouteOptions,
    WorkerView,
    add_arguments,
    make_policy,
    options_of,
)

PROMPT = np.arange(100)


@dataclass(frozen=True)
class Holds:
    """A tree that holds so many tokens of every prompt."""

    tokens: int

    def match(self, tokens: Any, space: Any = None) -> int:
        return min(self.tokens, len(tokens))


def fleet(loads: Sequence[int], held: Sequence[int] = (), dead: Sequence[int] = ()) -> list[WorkerView]:
    trees = [Holds(each) for each in held] or [None] * len(loads)
    return [
        WorkerView(f"w{at}", at not in dead, load, tree=tree)
        for at, (load, tree) in enumerate(zip(loads, trees, strict=True))
    ]


def chosen(policy: Policy, *fleets: list[WorkerView]) -> list[int]:
    return [policy.choose(PROMPT, each).worker for each in fleets]


# ------------------------------------------------------------------ without a look at what is cached


def test_round_robin_takes_turns_and_passes_over_the_dead() -> None:
    policy = make_policy("round-robin")
    assert chosen(policy, *[fleet([0, 9, 0])] * 4) == [0, 1, 2, 0]
    assert chosen(policy, *[fleet([0, 9, 0], dead=[1])] * 3) == [2, 0, 2]
    assert policy.choose(PROMPT, fleet([0, 9, 0])).reason == "it is the turn of w0, one of 3 workers"


def test_least_loaded_goes_by_requests_then_tokens_then_turn() -> None:
    policy = make_policy("least-loaded")
    assert chosen(policy, fleet([2, 1, 3]), fleet([2, 1, 3], dead=[1])) == [1, 0]
    assert chosen(policy, *[fleet([0, 0, 0])] * 4) == [1, 2, 0, 1]
    waiting = [WorkerView("a", True, 1, 50), WorkerView("b", True, 1, 20), WorkerView("c", True, 1, 30)]
    choice = policy.choose(PROMPT, waiting)
    assert choice.worker == 1
    assert choice.reason == "b has the fewest requests in flight, 1; 3 workers with a load of 1 each"


def test_random_is_drawn_by_its_seed() -> None:
    views = fleet([0] * 5, dead=[2])
    first, again, other = (make_policy("random", RouteOptions(seed=s)) for s in (1, 1, 2))
    rows = [chosen(policy, *[views] * 60) for policy in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert set(rows[0]) == {0, 1, 3, 4}


def test_all_tell_what_is_known_of_all_workers() -> None:
    views = fleet([3, 0, 1], held=[40, 0, 120], dead=[1])
    for name in ("round-robin", "least-loaded", "random", "events"):
        choice = make_policy(name).choose(PROMPT, views)
        assert (choice.matches, choice.loads) == ((40, 0, 100), (3, 0, 1))


# ------------------------------------------------------------------ match against load

STRICT = RouteOptions(match_threshold=0.5, balance_abs=4, balance_rel=2)


@pytest.mark.parametrize(
    ("loads", "held", "worker", "reason"),
    [
        ([4, 0, 0], [51, 50, 0], 0, "w0 holds 51 of 100 tokens (51%), more than 50%; loads of 0 to 4"),
        ([1, 1, 0], [50, 0, 0], 2,
         "nobody holds more than 50% (the most is 50 of 100 tokens (50%) at w0), and w2 has the fewest "
         "requests in flight, 0 (loads of 0 to 1)"),
        ([5, 0, 1], [100, 0, 0], 1,
         "w1 has the fewest requests in flight, 0: loads of 0 to 5 are more than 4 and more than 2 times "
         "apart, so no match counts (the most is 100 of 100 tokens (100%) at w0)"),
        ([10, 5, 5], [100, 0, 0], 0, "w0 holds 100 of 100 tokens (100%), more than 50%; loads of 5 to 10"),
        ([3, 2, 1], [0, 80, 80], 2,
         "w2 holds 80 of 100 tokens (80%), more than 50%, as 2 workers do, and has the fewest requests in "
         "flight of them; loads of 1 to 3"),
        ([0, 0, 0], [0, 0, 0], 0,
         "nobody holds more than 50% (nobody holds any of it), and w0 has the fewest requests in flight, 0 "
         "(a load of 0 each)"),
    ],
)  # fmt: skip
def test_the_threshold_that_decided_is_told(
    loads: list[int], held: list[int], worker: int, reason: str
) -> None:
    choice = make_policy("events", STRICT).choose(PROMPT, fleet(loads, held))
    assert choice == Choice(worker, reason, tuple(held), tuple(loads))


def test_the_dead_unbalance_nothing_and_hold_nothing() -> None:
    choice = make_policy("events", STRICT).choose(PROMPT, fleet([0, 9, 9], [100, 60, 0], dead=[0]))
    assert choice.worker == 1 and choice.matches == (0, 60, 0)
    assert "loads of" not in choice.reason and "a load of 9 each" in choice.reason


def test_an_empty_prompt_goes_to_the_least_loaded() -> None:
    choice = make_policy("events").choose(PROMPT[:0], fleet([1, 0], [0, 0]))
    assert choice.worker == 1 and "nobody holds any of it" in choice.reason


def test_cache_aware_goes_by_what_it_sent() -> None:
    policy = make_policy("cache-aware", STRICT)
    views = fleet([0, 0, 0], held=[0, 0, 100])  # what workers say does not count
    first = policy.choose(PROMPT, views)
    policy.sent(first.worker, PROMPT)
    longer = np.concatenate((PROMPT, [7] * 50))
    again = policy.choose(longer, views)
    assert (again.worker, again.matches) == (first.worker, (100, 0, 0))
    assert again.reason == "w0 holds 100 of 150 tokens (67%), more than 50%; a load of 0 each"
    assert policy.choose(PROMPT, views, "tenant").matches == (0, 0, 0)
    policy.finished(first.worker, longer)
    assert policy.choose(longer, views).matches == (150, 0, 0)


def test_what_was_sent_to_a_lost_worker_is_forgotten() -> None:
    policy = make_policy("cache-aware", STRICT)
    policy.sent(0, PROMPT)
    policy.sent(1, PROMPT)
    policy.forget(0)
    assert policy.choose(PROMPT, fleet([0, 0])).matches == (0, 100)
    policy.finished(0, PROMPT)  # of a request that was there when it was lost
    assert policy.choose(PROMPT, fleet([0, 0])).matches == (0, 100)
    policy.sent(0, PROMPT)
    assert policy.choose(PROMPT, fleet([0, 0])).matches == (100, 100)


def test_the_trees_have_the_workers_pages_and_a_bound() -> None:
    policy = make_policy("cache-aware", RouteOptions(page_size=16, tree_tokens=160))
    for start in range(0, 1000, 100):
        policy.sent(0, PROMPT + start)
    assert policy.choose(PROMPT + 900, fleet([0, 0])).matches == (96, 0)
    assert policy.choose(PROMPT, fleet([0, 0])).matches == (0, 0)


# ------------------------------------------------------------------ all policies

NAMES = tuple(POLICIES)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_worker_alive_there_is_no_choice(name: str) -> None:
    policy = make_policy(name)
    with pytest.raises(NoWorker, match="none of the 2 workers is alive"):
        policy.choose(PROMPT, fleet([0, 0], dead=[0, 1]))
    assert policy.choose(PROMPT, fleet([0, 0], dead=[0])).worker == 1


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[tuple[Any, ...]]]:
    """Some workers, and what happens: (prompt, loads, alive, held, forgotten worker or None)."""
    count = draw(st.integers(1, 5))
    each = st.tuples(
        st.lists(st.integers(0, 3), max_size=12),
        st.lists(st.integers(0, 20), min_size=count, max_size=count),
        st.lists(st.booleans(), min_size=count, max_size=count),
        st.lists(st.integers(0, 12), min_size=count, max_size=count),
        st.none() | st.integers(0, count - 1),
    )
    return count, draw(st.lists(each, max_size=20))


def played(name: str, steps: list[tuple[Any, ...]], options: RouteOptions) -> list[Choice | None]:
    """What a policy chooses in a story; a worker that is forgotten is dead."""
    policy, choices = make_policy(name, options), []
    for prompt, loads, alive, held, gone in steps:
        if gone is not None:
            policy.forget(gone)
        dead = [at for at, is_alive in enumerate(alive) if not is_alive or at == gone]
        tokens = np.array(prompt, dtype=np.int64)
        try:
            choice = policy.choose(tokens, fleet(loads, held, dead))
        except NoWorker:
            assert len(dead) == len(loads)
            choices.append(None)
            continue
        assert choice.worker not in dead
        assert all(choice.matches[at] == 0 for at in dead)
        assert choice.loads == tuple(loads)
        assert all(0 <= match <= len(prompt) for match in choice.matches)
        assert choice.reason and "\n" not in choice.reason and not choice.reason.endswith(".")
        assert f"w{choice.worker}" in choice.reason
        policy.sent(choice.worker, tokens)
        choices.append(choice)
    return choices


@settings(max_examples=60, deadline=None)
@given(stories(), st.sampled_from(NAMES), st.integers(0, 3))
def test_the_dead_are_never_chosen_and_two_runs_are_alike(
    story: tuple[int, list[tuple[Any, ...]]], name: str, seed: int
) -> None:
    options = RouteOptions(0.3, 3, 1.5, tree_tokens=30, seed=seed)
    assert played(name, story[1], options) == played(name, story[1], options)


@settings(max_examples=30, deadline=None)
@given(stories())
def test_with_one_worker_all_policies_are_equal(story: tuple[int, list[tuple[Any, ...]]]) -> None:
    one = [(prompt, loads[:1], alive[:1], held[:1], None) for prompt, loads, alive, held, _ in story[1]]
    rows = [played(name, one, RouteOptions()) for name in NAMES]
    workers = [[choice and choice.worker for choice in row] for row in rows]
    assert workers == workers[:1] * len(NAMES)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"match_threshold": 1.5}, "match_threshold must be a number from 0 to 1, got 1.5"),
        ({"match_threshold": float("nan")}, "match_threshold must be a number from 0 to 1, got nan"),
        ({"match_threshold": True}, "match_threshold must be a number from 0 to 1, got True"),
        ({"balance_rel": 0.5}, "balance_rel must be a number from 1 to 1e\\+09, got 0.5"),
        ({"balance_abs": -1}, "balance_abs must be at least 0, got -1"),
        ({"balance_abs": 1.5}, "balance_abs must be a whole number, got 1.5"),
        ({"tree_tokens": 0}, "tree_tokens must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        RouteOptions(**options)


def test_an_unknown_policy_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError) as error:
        make_policy("best")
    assert str(error.value) == (
        "unknown routing policy 'best'; known: round-robin, least-loaded, random, cache-aware, events"
    )


def test_commands_have_the_thresholds_as_options() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert options_of(parser.parse_args([])) == RouteOptions()
    said = "--match-threshold 0.3 --balance-abs 64 --balance-rel 2 --tree-tokens 9"
    assert options_of(parser.parse_args(said.split()), 16, 5) == RouteOptions(0.3, 64, 2.0, 9, 16, 5)


# ------------------------------------------------------------------ the oracle


def test_the_regret_is_what_another_one_had() -> None:
    found = judge([10, 70, 70, 90], [True, True, True, False], 0)
    assert (found.best, found.worker, found.had, found.regret) == (70, 1, 10, 60)
    assert judge([10, 70, 70, 90], [True] * 4, 3).regret == 0
    with pytest.raises(InvariantError, match="worker 1 was chosen, and is not alive"):
        judge([0, 0], [True, False], 1)


def test_where_a_tree_is_not_known_nothing_is_said() -> None:
    oracle = Oracle([Holds(30), None, Holds(200)])
    assert oracle.judge(PROMPT, [True] * 3, 0) is None
    found = oracle.judge(PROMPT, [True, False, True], 0)
    assert found is not None and (found.best, found.worker, found.regret) == (100, 2, 70)
