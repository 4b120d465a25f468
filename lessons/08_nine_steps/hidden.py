"""Hidden cases of lesson 08: the same stories under system prompts that nobody has seen."""

from __future__ import annotations

from random import Random
from types import ModuleType

from lessons.grading import sibling

exercises = sibling(__file__, "exercises")

WORDS = ("kind", "careful", "quick", "funny", "old", "clever", "quiet", "teacher", "sailor", "friend")


def _system(rng: Random) -> str:
    return f"You are a {' '.join(rng.sample(WORDS, rng.randint(1, 8)))}."


def other_split(impl: ModuleType, rng: Random) -> None:
    """Another system prompt."""
    exercises.check_split(impl, _system(rng))


def other_forget(impl: ModuleType, rng: Random) -> None:
    """Another system prompt."""
    exercises.check_forget(impl, _system(rng))


def other_nine(impl: ModuleType, rng: Random) -> None:
    """Another system prompt."""
    exercises.check_nine(impl, _system(rng))


HIDDEN = {"split_story": [other_split], "forget_story": [other_forget], "nine_steps": [other_nine]}
