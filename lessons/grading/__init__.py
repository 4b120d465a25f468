"""The machinery behind the lessons. What a lesson's files use:

exercises.py   Exercise(...), Failure, expect        (spec.py)
hidden.py      sibling(__file__, "solution")          (spec.py)
mutants.py     Mutant(...)                            (mutants.py)
test_lesson.py exercise_tests(__file__)               (testing.py)

and what runs a student's tree in the engine: student_cache(path). See spec.py for the contract.
"""

from __future__ import annotations

from typing import Any

from lessons.grading.cache import StudentCache, student_cache
from lessons.grading.mutants import Mutant
from lessons.grading.spec import Exercise, Failure, expect, sibling

__all__ = [
    "Exercise",
    "Failure",
    "Mutant",
    "StudentCache",
    "exercise_tests",
    "expect",
    "sibling",
    "student_cache",
]


def __getattr__(name: str) -> Any:
    """Only test_lesson.py needs pytest: submissions run without it."""
    if name != "exercise_tests":
        raise AttributeError(f"module 'lessons.grading' has no attribute {name!r}")
    from lessons.grading.testing import exercise_tests

    return exercise_tests
