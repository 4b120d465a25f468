"""Results for readers: a table, Gradescope's results.json, GitHub's annotations and summary."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lessons.grading.run import WORDS, Result
from lessons.grading.spec import ROOT
from lessons.grading.words import file_name
from minirad import command

NOT_TRIED = "not tried: see the first exercise of this lesson"


def total(results: Sequence[Result]) -> tuple[float, float]:
    """(earned, possible)."""
    return sum(r.points for r in results), sum(r.max_points for r in results)


def table(results: Sequence[Result]) -> str:
    """One line per exercise, by lesson, and the sum."""
    width = max([len(r.exercise) for r in results] + [10])
    lines, lesson = [], ""
    for result in results:
        if result.lesson != lesson:
            lesson = result.lesson
            lines.append(lesson)
        points = f"{result.points:g}/{result.max_points:g}"
        lines.append(f"  {result.exercise:{width}} {points:>7}  {WORDS[result.status]}")
    earned, possible = total(results)
    lines.append(f"  {'total':{width}} {f'{earned:g}/{possible:g}':>7}")
    return "\n".join(lines)


def explanation(result: Result) -> str:
    """What went wrong with one exercise, and the hint."""
    lines = [result.words or WORDS[result.status]]
    if result.hint:
        lines.append(f"Hint: {result.hint}")
    if result.output.strip() and not result.passed:
        lines += ["It printed (the end):", *(f"  | {line}" for line in result.output.splitlines()[-10:])]
    return "\n".join(lines)


def said_once(results: Sequence[Result]) -> list[Result]:
    """The results that need words of their own: what is wrong with a whole file is said once."""
    first: dict[tuple[str, str], Result] = {}
    for result in results:
        if result.whole_file:
            first.setdefault((result.lesson, result.words), result)
    own = {id(result) for result in first.values()}
    return [result for result in results if not result.whole_file or id(result) in own]


def text(results: Sequence[Result]) -> str:
    """The table, and below it every exercise that was tried and failed."""
    parts = [table(results)]
    for result in said_once(results):
        if result.status not in ("passed", "todo"):
            what = result.lesson if result.whole_file else f"{result.lesson}, {result.exercise}"
            parts.append(f"{what}: {explanation(result)}")
    return "\n\n".join(parts)


def gradescope(results: Sequence[Result], remarks: Sequence[str] = ()) -> dict[str, Any]:
    """The shape that Gradescope reads from results.json."""
    earned, possible = total(results)
    with_words = {id(result) for result in said_once(results)}
    return {
        "score": earned,
        "execution_time": round(sum(r.seconds for r in results), 2),
        "output": "\n".join([f"{earned:g} of {possible:g} points", *remarks]),
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": f"{r.lesson}: {r.exercise}",
                "score": r.points,
                "max_score": r.max_points,
                "status": "passed" if r.passed else "failed",
                "output": "" if r.passed else explanation(r) if id(r) in with_words else NOT_TRIED,
                "output_format": "text",
                "visibility": "visible",
            }
            for r in results
        ],
    }


def write_gradescope(results: Sequence[Result], path: Path, remarks: Sequence[str] = ()) -> None:
    command.write_whole(path, json.dumps(gradescope(results, remarks), indent=1))


# ---------------------------------------------------------------------- GitHub


def on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def github_annotations(results: Sequence[Result], folder: Path | None = None) -> list[str]:
    """Workflow commands that put each failure beside its function."""
    lines = []
    for r in said_once(results):
        if not r.passed:
            file = _relative((folder or ROOT / r.lesson) / "exercise.py")
            level = "notice" if r.status == "todo" else "error"
            words = _escaped(explanation(r))
            title = _property(f"{r.lesson if r.whole_file else r.exercise}: {WORDS[r.status]}")
            lines.append(f"::{level} file={_property(file)},line={r.line},title={title}::{words}")
    return lines


def _relative(path: Path) -> str:
    try:
        return file_name(path.resolve().relative_to(ROOT.parent).as_posix())
    except (ValueError, OSError, RuntimeError):  # elsewhere, or a link to itself
        return path.name


def _escaped(words: str) -> str:
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    return _escaped(words).replace(",", "%2C").replace(":", "%3A")


def summary(results: Sequence[Result]) -> str:
    """Markdown for the job's summary page."""
    earned, possible = total(results)
    lines = [
        f"### {earned:g} of {possible:g} points",
        "",
        "| lesson | exercise | points | |",
        "|---|---|---|---|",
    ]
    with_words = {id(result) for result in said_once(results)}
    for r in results:
        words = (
            ""
            if r.passed or id(r) not in with_words
            else r.words.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
        )
        status = f"{WORDS[r.status]}: {words}" if words else WORDS[r.status]
        lines.append(f"| {r.lesson} | {r.exercise} | {r.points:g}/{r.max_points:g} | {status} |")
    return "\n".join(lines) + "\n"


def tell_github(results: Sequence[Result], folder: Path | None = None) -> None:
    """Annotations and the summary, when this runs on GitHub."""
    if not on_github():
        return
    print("\n".join(github_annotations(results, folder)))
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(summary(results))
