"""Hidden cases of lesson 11: random forks, choices and trees of thought, against the engine's frontend."""

from __future__ import annotations

import functools
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import sibling
from lessons.grading.desk import ExactEngine, Thought, run_program
from minirad.model.classroom import corpus

exercises = sibling(__file__, "exercises")
solution = sibling(__file__, "solution")


def _fork(rng: Random) -> tuple[int, tuple[int, ...], int, int]:
    """Lengths of a fork, and a chunk into which any of its branches fits."""
    prefix = rng.randint(1, 24)
    own = tuple(rng.randint(1, 8) for _ in range(rng.randint(1, 9)))
    least = prefix + max(own)
    return prefix, own, rng.randint(1, 4), rng.randint(least, least + rng.choice([0, 10, 80]))


def random_prompts(impl: ModuleType, rng: Random) -> None:
    """Forks of any lengths."""
    for _ in range(6):
        exercises.check_computed(impl, *_fork(rng), rng.random() < 0.3, rng.random() < 0.8)


def random_steps(impl: ModuleType, rng: Random) -> None:
    """Forks of any lengths."""
    for _ in range(6):
        exercises.check_steps(impl, *_fork(rng), rng.random() < 0.4, rng.random() < 0.7)


def random_forks(impl: ModuleType, rng: Random) -> None:
    """Forks of any tokens; branches may begin alike, or be equal."""
    for _ in range(4):
        prefix = exercises.tokens(rng.randint(1, 30))
        branches = [[rng.randrange(4) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 6))]
        exercises.check_fork(impl, prefix, branches, rng.randint(1, 4), chunk=rng.choice([8, 40, 512]))


QUESTIONS = (
    ("What is the capital of {}?", " The capital of {} is", tuple(corpus.CAPITALS.items())),
    ("What does a {} say?", " A {} says", tuple(corpus.SOUNDS.items())),
)


def random_choices(impl: ModuleType, rng: Random) -> None:
    """Questions of the lessons, with answers and beginnings of answers."""
    ask, begin, pairs = rng.choice(QUESTIONS)
    some = rng.sample(pairs, 3)
    texts = [f"{begin.format(some[0][0])} {short}" for _, short in some]
    texts += [f" {some[0][1]}.", begin.format(some[0][0])]
    choices = tuple(rng.sample(texts, rng.randint(2, 4)))
    exercises.check_select(impl, f"Question 1: {ask.format(some[0][0])}\nAnswer 1:", choices)


def _tree(rng: Random, depth: int, first: int = 1) -> Thought:
    """A tree of thought whose thoughts begin with ids of their own."""
    size = rng.randint(1, 5)
    below = range(rng.randint(0, 3) if depth else 0)
    children = [_tree(rng, depth - 1, first * 4 + n) for n in below]
    own = (first, *(rng.randrange(50) for _ in range(size - 1)))
    return Thought(own, rng.randint(1, 4), tuple(children))


@functools.cache
def _steps(thought: Thought, kv_tokens: int, promising: Any) -> int:
    """How many the reference takes."""
    return run_program(ExactEngine(kv_tokens), solution.explore, thought, promising, kv_tokens).steps


def _check(impl: ModuleType, thought: Thought, kv_tokens: int, promising: Any) -> None:
    """Also in steps: not one more than the reference takes."""
    exercises.check_explore(impl, thought, promising, kv_tokens, _steps(thought, kv_tokens, promising))


def random_thoughts(impl: ModuleType, rng: Random) -> None:
    """Trees of any shape, in pools of any size."""
    for _ in range(2):
        thought = _tree(rng, rng.randint(1, 3))
        least, most = thought.longest, thought.all
        kv_tokens = rng.choice([least, rng.randint(least, most), most])
        _check(impl, thought, kv_tokens, rng.choice([exercises.everything, exercises.some]))


HIDDEN = {
    "computed_tokens": [random_prompts],
    "steps": [random_steps],
    "fork": [random_forks],
    "select": [random_choices],
    "explore": [random_thoughts],
}
