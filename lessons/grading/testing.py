"""The bridge to pytest: `test_exercise = exercise_tests(__file__)` makes one test per exercise.

All exercises of a lesson that were asked for run in one child process (isolate.py); each test reports
its own. conftest.py prints the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lessons.grading.isolate import Limits, grade
from lessons.grading.progress import remember
from lessons.grading.report import explanation, on_github, said_once, tell_github
from lessons.grading.run import Result
from lessons.grading.spec import load_lesson

RESULTS: pytest.StashKey[dict[tuple[str, str], Result]] = pytest.StashKey()


def exercise_tests(file: str) -> Callable[..., None]:
    """A parametrized test function for the lesson whose test_lesson.py this is."""
    lesson = load_lesson(Path(file).resolve().parent)

    @pytest.mark.parametrize("exercise", [each.name for each in lesson.exercises])
    def test_exercise(exercise: str, request: pytest.FixtureRequest) -> None:
        known = request.config.stash.setdefault(RESULTS, {})
        if (lesson.name, exercise) not in known:
            asked = _asked_for(request.session.items, file)
            limits = Limits(seconds=request.config.getoption("--patience", 1.0))
            student = os.environ.get("MINIRAD_STUDENT", "")
            found = list(grade(lesson, lesson.folder, student, limits, only=asked))
            known.update({(lesson.name, result.exercise): result for result in found})
            remember(found)
            if on_github():
                tell_github(found)
        result = known[lesson.name, exercise]
        if result.whole_file and result not in said_once(list(known.values())):
            pytest.fail("not tried: what is wrong with the file is said above", pytrace=False)
        if not result.passed:
            pytest.fail(explanation(result), pytrace=False)

    return test_exercise


def _asked_for(items: list[Any], file: str) -> list[str]:
    """The exercises of this file that this run of pytest selected."""
    here = Path(file).resolve()
    return [
        item.callspec.params["exercise"]
        for item in items
        if Path(item.path).resolve() == here and hasattr(item, "callspec")
    ]
