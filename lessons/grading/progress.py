"""What a learner has solved and predicted, kept in one small file beside the folder lessons/ (not committed).

MINIRAD_PROGRESS names another file. What cannot be read in it, from another version or broken, is as if it
were not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from lessons.grading.run import WORDS, Result
from lessons.grading.spec import ROOT, lesson_folders, lesson_title, load_lesson
from minirad import command

FILE = ".minirad-progress.json"
PREDICTIONS = "predictions"  # the key that stands among the lessons' names


def progress_file() -> Path:
    return Path(os.environ.get("MINIRAD_PROGRESS") or ROOT.parent / FILE)


def _read() -> dict[str, Any]:
    try:
        data = json.loads(progress_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _write(data: dict[str, Any]) -> None:
    """A file that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        command.write_whole(progress_file(), json.dumps(data, indent=1, sort_keys=True))


def _rows(data: dict[str, Any], name: str, **kinds: Any) -> dict[str, dict[str, Any]]:
    """The rows under a name that have these fields, each of its type."""
    rows = data.get(name)
    return {
        key: row
        for key, row in (rows.items() if isinstance(rows, dict) else ())
        if isinstance(row, dict) and all(isinstance(row.get(field), kinds[field]) for field in kinds)
    }


def _solved(data: dict[str, Any], lesson: str) -> dict[str, dict[str, Any]]:
    return _rows(data, lesson, points=int | float, of=int | float, status=str)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def remember(results: Iterable[Result]) -> None:
    """Notes the newest result of each exercise."""
    data = _read()
    for result in results:
        data[result.lesson] = {
            **_solved(data, result.lesson),
            result.exercise: {
                "points": result.points,
                "of": result.max_points,
                "status": result.status,
                "when": _now(),
            },
        }
    _write(data)


def predictions() -> dict[str, dict[str, Any]]:
    """Question (a lesson's two digits, "09/tails" for a second one) -> {"guess", "right", "when"}.

    right is None as long as the answer was not shown.
    """
    return _predictions(_read())


def _predictions(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return _rows(data, PREDICTIONS, guess=str, right=bool | None, when=str)


def remember_prediction(key: str, guess: str) -> None:
    """Notes what somebody has committed to, in the place of what stood there."""
    _note(key, {"guess": guess, "right": None, "when": _now()})


def settle_prediction(key: str, guess: str, right: bool) -> bool:
    """Notes whether a prediction was right. The first verdict on it counts; returns that."""
    row = predictions().get(key)
    if row is None or row["guess"] != guess:
        row = {"guess": guess, "right": None, "when": _now()}
    if row["right"] is None:
        _note(key, {**row, "right": right})
        return right
    return bool(row["right"])


def _note(key: str, row: dict[str, Any]) -> None:
    data = _read()
    _write({**data, PREDICTIONS: {**_predictions(data), key: row}})


class Progress:
    """Lesson -> exercise -> its newest result ({"points", "of", "status", "when"}); reads well when shown.

    predicted: (right, answered) predictions of the notebooks.
    """

    def __init__(self) -> None:
        noted = _read()
        self.titles: dict[str, str] = {}
        self.lessons: dict[str, dict[str, dict[str, Any]]] = {}
        for folder in lesson_folders():
            self.titles[folder.name] = lesson_title(folder)
            known = _solved(noted, folder.name)
            self.lessons[folder.name] = {
                each.name: known.get(each.name)
                or {"points": 0.0, "of": each.points, "status": "todo", "when": ""}
                for each in load_lesson(folder).exercises
            }
        verdicts = [row["right"] for row in _predictions(noted).values() if row["right"] is not None]
        self.predicted = (sum(verdicts), len(verdicts))

    def points(self, lesson: str) -> tuple[float, float]:
        """(earned, possible) of one lesson."""
        rows = self.lessons[lesson].values()
        return sum(row["points"] for row in rows), sum(row["of"] for row in rows)

    def __repr__(self) -> str:
        lines = []
        for name, rows in self.lessons.items():
            earned, possible = self.points(name)
            done = sum(row["status"] == "passed" for row in rows.values())
            lines.append(f"{name:28} {earned:4g} of {possible:g} points, {done} of {len(rows)} exercises")
        lines = lines or ["no lesson with exercises was found"]
        return "\n".join(lines + self._predicted())

    def _predicted(self) -> list[str]:
        """One line, or none where nothing was predicted yet."""
        right, answered = self.predicted
        return [f"{right} of {answered} predicted right"] if answered else []

    def _repr_html_(self) -> str:
        rows = []
        for name, exercises in self.lessons.items():
            earned, possible = self.points(name)
            marks = " ".join(
                f'<span title="{escape(WORDS.get(row["status"], row["status"]))}">'
                f"{'✓' if row['status'] == 'passed' else '·'} {escape(each)}</span>"
                for each, row in exercises.items()
            )
            rows.append(
                f"<tr><td>{escape(name)}</td><td>{earned:g} of {possible:g}</td><td>{marks}</td></tr>"
            )
        return f"<table>{''.join(rows)}</table>{''.join(f'<p>{line}</p>' for line in self._predicted())}"


def progress() -> Progress:
    """What has been solved so far."""
    return Progress()
