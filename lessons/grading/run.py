"""Runs the cases of exercises in this process and says in words what happened.

Used by the child process that runs submissions (child.py), and directly by the tests that grade the
reference and the mutants. Does not protect against what a submission may do (isolate.py does).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from lessons.grading.spec import Case, Exercise, Failure, Lesson, Picture

# passed | todo | failed | stuck | memory | output | ended | tampered
WORDS = {
    "passed": "passed",
    "todo": "todo",
    "failed": "failed",
    "stuck": "stuck",
    "memory": "out of memory",
    "output": "too much output",
    "ended": "process ended",
    "tampered": "changed the grader",
}


@dataclass
class Result:
    """What one exercise earned. words: the first failing case; hint: the exercise's, if it failed."""

    lesson: str
    exercise: str
    points: float
    max_points: float
    status: str
    words: str = ""
    hint: str = ""
    pictures: list[Picture] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0
    line: int = 1  # where its first function stands in exercise.py

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        pictures = [(title, picture) for title, picture in data.pop("pictures", [])]
        return cls(**data, pictures=pictures)


def verdict(lesson: Lesson, exercise: Exercise, status: str, words: str = "", **more: Any) -> Result:
    """A Result with its points: all or nothing."""
    points = exercise.points if status == "passed" else 0.0
    hint = exercise.hint if status not in ("passed", "todo") else ""
    return Result(lesson.name, exercise.name, points, exercise.points, status, words, hint, **more)


def run_exercise(lesson: Lesson, exercise: Exercise, impl: ModuleType, student: str = "") -> Result:
    """Tries the cases in order up to the first that fails."""
    started = time.perf_counter()
    missing = [name for name in exercise.asks_for if not callable(getattr(impl, name, None))]
    status, words, pictures = "failed", f"there is no function {', '.join(missing)} in the file", []
    if not missing:
        with lent(impl, exercise.stands_on):
            status, words, pictures = _try_all(lesson, exercise, impl, student)
        if (
            status == "failed"
            and exercise.stands_on
            and _try_all(lesson, exercise, impl, student)[0] == "passed"
        ):
            status, words, pictures = "passed", "", []
    if status == "failed" and not pictures and exercise.show is not None:
        pictures = _pictures(exercise, impl)
    seconds = time.perf_counter() - started
    return verdict(lesson, exercise, status, words, pictures=pictures, seconds=seconds)


def grade_module(lesson: Lesson, impl: ModuleType, student: str = "") -> list[Result]:
    """All exercises of a lesson, in this process: for code that is trusted."""
    return [run_exercise(lesson, exercise, impl, student) for exercise in lesson.exercises]


def seed_of(lesson: Lesson, exercise: Exercise, case: Case, student: str) -> str:
    """Text seeds: the same on every machine and in every process."""
    return f"{lesson.name}/{exercise.name}/{case.__name__}/{student}"


@contextlib.contextmanager
def lent(impl: ModuleType, functions: Mapping[str, Any]) -> Iterator[None]:
    """Other functions in the place of a module's own, for a while."""
    own = {name: vars(impl)[name] for name in functions if name in vars(impl)}
    vars(impl).update(functions)
    try:
        yield
    finally:
        for name in functions:
            vars(impl).pop(name, None)
        vars(impl).update(own)


def _try_all(
    lesson: Lesson, exercise: Exercise, impl: ModuleType, student: str
) -> tuple[str, str, list[Picture]]:
    for case in exercise.cases:
        outcome = _try(case, impl, random.Random(seed_of(lesson, exercise, case, student)))
        if outcome[0] != "passed":
            return outcome
    return "passed", "", []


def _try(case: Case, impl: ModuleType, rng: random.Random) -> tuple[str, str, list[Picture]]:
    try:
        if len(inspect.signature(case).parameters) > 1:
            case(impl, rng)
        else:
            case(impl)
    except Failure as failure:
        return "failed", failure.words, failure.pictures
    except NotImplementedError as error:
        return "todo", str(error) or "todo", []
    except MemoryError:
        return "memory", f"{_about(case)}: it took more memory than the limit allows", []
    except SystemExit as error:
        return "ended", f"{_about(case)}: it called sys.exit({error.code!r})", []
    except RecursionError:
        return "failed", f"{_about(case)}: it called itself too deep (RecursionError)", []
    except Exception as error:  # anything may come out of a student's code
        return "failed", f"{_about(case)}: {_raised(error, impl)}", []
    return "passed", "", []


def _about(case: Case) -> str:
    text = inspect.getdoc(case) or case.__name__.replace("_", " ")
    return text.split("\n")[0].rstrip(".")


def _raised(error: Exception, impl: ModuleType) -> str:
    """The error with the last line of the student's file that it went through."""
    own = getattr(impl, "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    where = f" ({Path(own).name}, line {frames[-1].lineno}, in {frames[-1].name})" if own and frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _pictures(exercise: Exercise, impl: ModuleType) -> list[Picture]:
    assert exercise.show is not None
    try:
        return list(exercise.show(impl))
    except Exception as error:  # drawing runs the student's code again
        return [("no picture", f"{type(error).__name__}: {error}")]


def add_lines(results: Iterable[Result], lesson: Lesson, source: str) -> None:
    """Notes for each result the line of its function in a submission's text."""
    try:
        found = {n.name: n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
    except (SyntaxError, ValueError):
        return
    for result in results:
        names = lesson.exercise(result.exercise).asks_for
        result.line = next((found[name] for name in names if name in found), 1)
