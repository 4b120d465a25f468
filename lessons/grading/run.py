"""Runs the cases of exercises in this process and says in words what happened.

Used by the child process that runs submissions (child.py), and directly by the tests that grade the
reference and the mutants. Does not protect against what a submission may do (isolate.py does).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, ModuleType
from typing import Any

from lessons.grading.shared import expect_plain
from lessons.grading.spec import Case, Exercise, Failure, Lesson, Picture
from lessons.grading.words import plain, said, shown
from minirad.own_code import last_line

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
    """What one exercise earned.

    words: the first failing case; hint: the exercise's, if it failed, and which of them. whole_file: the
    words are about the file and the same for all exercises of the lesson, none of which was tried.
    """

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
    whole_file: bool = False
    which: int = 0

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(
    lesson: Lesson, exercise: Exercise, status: str, words: str = "", which: int = 0, **more: Any
) -> Result:
    """A Result with its points: all or nothing; which: of the exercise's hints."""
    points = exercise.points if status == "passed" else 0.0
    untold = status in ("passed", "todo") or more.get("whole_file")
    hint = "" if untold else _hint(lesson, exercise, which)
    return Result(
        lesson.name, exercise.name, points, exercise.points, status, plain(words), hint, which=which, **more
    )


def _hint(lesson: Lesson, exercise: Exercise, which: int) -> str:
    """One of the hints, and where the next one is."""
    count = len(exercise.hints)
    if not count:
        return ""
    number = min(which + 1, count)
    next_one = f"; the next: lessons/{lesson.name}/README.md" if number < count else ""
    return f"{exercise.hints[number - 1]} ({number} of {count}{next_one})"


def run_exercise(lesson: Lesson, exercise: Exercise, impl: ModuleType, student: str = "") -> Result:
    """Tries the cases in order up to the first that fails."""
    started = time.perf_counter()
    missing = [name for name in exercise.asks_for if not callable(getattr(impl, name, None))]
    status, words, which = "failed", "", 0
    pictures: list[Picture] = []
    if missing:
        words = f"there is no function {', '.join(missing)} in the file{_what_there_is(impl)}"
    else:
        with lent(impl, exercise.stands_on):
            status, words, pictures, which = _try_all(lesson, exercise, impl, student)
        if (
            status == "failed"
            and exercise.stands_on
            and _try_all(lesson, exercise, impl, student)[0] == "passed"
        ):
            status, words, pictures = "passed", "", []
    if status == "failed" and not pictures and exercise.show is not None:
        pictures = _pictures(exercise, impl)
    seconds = time.perf_counter() - started
    return verdict(lesson, exercise, status, words, which, pictures=pictures, seconds=seconds)


def _what_there_is(impl: ModuleType) -> str:
    """The first functions of a file, in words: it may be another lesson's."""
    own = [
        plain(name, 99)
        for name, value in list(vars(impl).items())
        if not name.startswith("_")
        and isinstance(value, FunctionType | type)
        and value.__module__ == vars(impl).get("__name__")
    ]
    return f"; it has {', '.join(own[:4])}{', ...' if own[4:] else ''}" if own else ""


def grade_module(lesson: Lesson, impl: ModuleType, student: str = "") -> list[Result]:
    """All exercises of a lesson, in this process: for code that is trusted."""
    return [run_exercise(lesson, exercise, impl, student) for exercise in lesson.exercises]


def seed_of(lesson: Lesson, exercise: Exercise, case: Case, student: str) -> str:
    """Text seeds: the same on every machine and in every process, for ids that are no UTF-8, too."""
    text = f"{lesson.name}/{exercise.name}/{case.__name__}/{student}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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


Outcome = tuple[str, str, list[Picture], int]  # status, words, pictures, which hint


def _try_all(lesson: Lesson, exercise: Exercise, impl: ModuleType, student: str) -> Outcome:
    for case in exercise.cases:
        outcome = _try(case, impl, random.Random(seed_of(lesson, exercise, case, student)))
        if outcome[0] != "passed":
            return outcome
    return "passed", "", [], 0


class Called:
    """A submission as the cases see it: the same functions, and what the last of them returned, which is
    never an answer that only says that it is right."""

    def __init__(self, impl: ModuleType) -> None:
        self.impl = impl
        self.returned: tuple[str, Any] | None = None
        self.unfinished: dict[str, Any] = {}  # what an `async def`, or a function with a `yield`, returned

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.impl, name)
        if isinstance(value, type) or not callable(value):
            return value
        file = getattr(self.impl, "__file__", None)

        @functools.wraps(value)  # a function, or what @cache makes of one
        def call(*args: Any, **more: Any) -> Any:
            self.returned = None
            result = value(*args, **more)
            self.returned = (name, result)
            if file:
                expect_plain(name, result, Path(file).absolute().parent)
            if isinstance(result, GeneratorType | CoroutineType | AsyncGeneratorType):
                self.unfinished[name] = result
            return result

        return call


def _try(case: Case, impl: ModuleType, rng: random.Random) -> Outcome:
    called = Called(impl)
    try:
        if len(inspect.signature(case).parameters) > 1:
            case(called, rng)
        else:
            case(called)
    except Failure as failure:
        return "failed", f"{failure.words}{_not_begun(called)}", failure.pictures, failure.hint
    except NotImplementedError as error:
        return "todo", plain(str(error)) or "todo", [], 0
    except MemoryError:
        return "memory", f"{_about(case)}: it took more memory than the limit allows", [], 0
    except SystemExit as error:
        words = f"it called sys.exit({shown(error.code)}){_own_line(error, called)}"
        return "ended", f"{_about(case)}: {words}", [], 0
    except RecursionError as error:
        words = f"it called itself too deep (RecursionError){_own_line(error, called)}"
        return "failed", f"{_about(case)}: {words}", [], 0
    except Exception as error:  # anything may come out of a student's code
        return "failed", f"{_about(case)}: {_raised(error, called)}", [], 0
    return "passed", "", [], 0


def _about(case: Case) -> str:
    text = inspect.getdoc(case) or case.__name__.replace("_", " ")
    return text.split("\n")[0].rstrip(".")


def _raised(error: Exception, called: Called) -> str:
    """The error with the last line of the student's file that it went through.

    Where it went through none, the case could not use what it was given: that is said. (A StopIteration
    that leaves a generator of a case comes as another error; its cause is the student's.)
    """
    cause = error.__cause__
    for each in (error, cause) if isinstance(cause, StopIteration) else (error,):
        where = _own_line(each, called)
        if where:
            return f"{said(each)}{where}"
    if called.returned is None:
        return said(error)
    name, value = called.returned
    return f"after {name} returned {shown(value)}: {said(error)}{_not_begun(called)}"


def _own_line(error: BaseException, called: Called) -> str:
    """ " (exercise.py, line 12, in evict)": the last line of the student's file on its way; "" for none."""
    own = getattr(called.impl, "__file__", None)
    found = last_line(error, own) if own else None
    return f" ({Path(str(own)).name}, line {found[1]}, in {plain(found[0], 200)})" if found else ""


def _not_begun(called: Called) -> str:
    """Says of a function that is no plain one that nothing of it has run; "" where all is well."""
    for name, result in called.unfinished.items():
        if isinstance(result, AsyncGeneratorType):
            return f" (nothing of {name} has run: it is an `async def` with a `yield`)"
        if isinstance(result, CoroutineType) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
            result.close()  # else Python prints that nobody awaited it
            return f" (nothing of {name} has run: it is an `async def`)"
        own = isinstance(result, GeneratorType) and result.gi_code.co_name == name  # no (x for x in ...)
        if own and inspect.getgeneratorstate(result) == inspect.GEN_CREATED:
            return f" (nothing of {name} has run: it has a `yield`)"
    return ""


def _pictures(exercise: Exercise, impl: ModuleType) -> list[Picture]:
    assert exercise.show is not None
    try:
        return list(exercise.show(impl))
    except Exception as error:  # drawing runs the student's code again
        return [("no picture", said(error))]


_DEFINED = re.compile(rb"^(?:async[ \t]+def|def|class)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def add_line(result: Result, lesson: Lesson, source: bytes) -> None:
    """Notes for a result the line of its function in a submission's text.

    The text is searched, not parsed: the parser can be made to take the memory or the stack of whoever
    runs it.
    """
    names = lesson.exercise(result.exercise).asks_for
    for found in _DEFINED.finditer(source):
        if found[1].decode("ascii", "replace") in names:
            result.line = source.count(b"\n", 0, found.start()) + 1
            return
