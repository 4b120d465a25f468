"""What a learner has solved, kept in one small file beside the folder lessons/ (not committed).

MINIRAD_PROGRESS names another file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from lessons.grading.run import WORDS, Result
from lessons.grading.spec import ROOT, lesson_folders, lesson_title, load_lesson

FILE = ".minirad-progress.json"


def progress_file() -> Path:
    return Path(os.environ.get("MINIRAD_PROGRESS") or ROOT.parent / FILE)


def _read() -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(progress_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def remember(results: Iterable[Result]) -> None:
    """Notes the newest result of each exercise. A file that cannot be written is no reason to fail."""
    data = _read()
    for result in results:
        data.setdefault(result.lesson, {})[result.exercise] = {
            "points": result.points,
            "of": result.max_points,
            "status": result.status,
            "when": time.strftime("%Y-%m-%d %H:%M"),
        }
    path = progress_file()
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass


class Progress:
    """Lesson -> exercise -> its newest result ({"points", "of", "status", "when"}); reads well when shown."""

    def __init__(self) -> None:
        noted = _read()
        self.titles: dict[str, str] = {}
        self.lessons: dict[str, dict[str, dict[str, Any]]] = {}
        for folder in lesson_folders():
            self.titles[folder.name] = lesson_title(folder)
            known = noted.get(folder.name, {})
            self.lessons[folder.name] = {
                each.name: known.get(each.name)
                or {"points": 0.0, "of": each.points, "status": "todo", "when": ""}
                for each in load_lesson(folder).exercises
            }

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
        return "\n".join(lines) or "no lesson with exercises was found"

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
        return f"<table>{''.join(rows)}</table>"


def progress() -> Progress:
    """What has been solved so far."""
    return Progress()
