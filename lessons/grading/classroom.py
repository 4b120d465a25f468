"""A teacher's two commands: a repository for students, and grades for a folder of submissions."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lessons.grading.isolate import Limits, grade
from lessons.grading.report import explanation, total
from lessons.grading.run import WORDS, Result
from lessons.grading.spec import ROOT, Lesson

GIVEN = ("minirad", "viz", "lessons", "notebooks", "pyproject.toml", "LICENSE", ".gitignore")
WITHHELD = {"solution.py", "mutants.py", "hidden.py", "teacher.md", "TEACHERS.md"} | {
    f"alternative{number}.py" for number in ("", "_2", "_3")
}
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}

README = """# minirad: the course

Install once (Python 3.10 or newer), in this folder:

```
python -m venv .venv && . .venv/bin/activate && pip install -e . pytest
```

(On Windows: `python -m venv .venv`, then `.venv\\Scripts\\activate`, then `pip install -e . pytest`.)

Begin with `jupyter lab notebooks/00_tour.ipynb`. Then, for each lesson: read `lessons/NN_name/README.md`,
write in `lessons/NN_name/exercise.py`, and see how far you are:

```
pytest lessons/02_radix_tree
python -m lessons
```

Hand in your folder `lessons/`. It will be graded with more cases than you have here: random ones, compared
with the engine's own tree. They test what the docstrings promise, and nothing else.
"""

WORKFLOW = """name: grade
on: [push, workflow_dispatch]
permissions:
  contents: read
jobs:
  grade:
    runs-on: ubuntu-latest
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
          cache: pip
      - run: pip install -e . pytest
      - run: python -m lessons grade --json results.json
"""


# ---------------------------------------------------------------------- classroom


def write_classroom(out: Path) -> int:
    """Writes the students' repository into a new folder; returns how many files."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: name a new folder")
    source = ROOT.parent
    if out.resolve().is_relative_to(source) and any(
        out.resolve().is_relative_to(source / name) for name in GIVEN
    ):
        raise ValueError(f"{out} lies inside what is copied: name a folder elsewhere")
    files = [file for name in GIVEN for file in _files(source / name)]
    for file in files:
        target = out / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    extra = {"README.md": README, ".github/workflows/grade.yml": WORKFLOW}
    for name, words in extra.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(words, encoding="utf-8")
    return len(files) + len(extra)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if inner.name not in LEFT_OUT and not inner.name.endswith(".egg-info"):
                yield from _files(inner)
    elif path.is_file() and not path.is_symlink() and not _is_withheld(path):
        yield path


def _is_withheld(path: Path) -> bool:
    own = path.parent == ROOT or (path.parent.parent == ROOT and path.parent.name != "grading")
    return own and path.name in WITHHELD


# ---------------------------------------------------------------------- collect


def collect(
    folder: Path, target: Path, lessons: Sequence[Lesson], limits: Limits | None = None, student: str = ""
) -> Iterator[tuple[str, list[Result]]]:
    """Grades every student's folder and writes one CSV, a row per student as soon as it is known.

    folder: one folder per student, which holds lessons/NN_name/exercise.py or NN_name/exercise.py.
    student: a common seed for all; "": each folder's name.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    students = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not students:
        raise ValueError(f"{folder} holds no folders: one per student is expected")
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_header(lessons))
        for path in students:
            results = [
                result
                for lesson in lessons
                for result in grade(lesson, _place(path, lesson.name), student or path.name, limits)
            ]
            writer.writerow(_row(path.name, results))
            file.flush()
            yield path.name, results


def _place(student: Path, lesson: str) -> Path:
    """Where a submission keeps a lesson; the first place that is there."""
    places = [student / "lessons" / lesson, student / lesson, *sorted(student.glob(f"*/lessons/{lesson}"))]
    return next((place for place in places if (place / "exercise.py").is_file()), places[0])


def _header(lessons: Iterable[Lesson]) -> list[str]:
    exercises = [
        f"{lesson.name[:2]} {each.name} ({each.points:g})" for lesson in lessons for each in lesson.exercises
    ]
    return ["student", "points", "of", *exercises, "remarks"]


def _row(student: str, results: Sequence[Result]) -> list[str]:
    earned, possible = total(results)
    remarks: list[str] = []
    for number, r in enumerate(results):
        said_before = number and (r.lesson, r.words) == (
            results[number - 1].lesson,
            results[number - 1].words,
        )
        if r.status not in ("passed", "todo") and not said_before:
            remarks.append(f"{r.lesson[:2]} {r.exercise}: {WORDS[r.status]}: {_one_line(r)}")
    cells = [student, f"{earned:g}", f"{possible:g}", *(f"{r.points:g}" for r in results), "; ".join(remarks)]
    return [_plain(cell) for cell in cells]


def _one_line(result: Result) -> str:
    words = explanation(result).split("\n")[0]
    return words if len(words) <= 200 else f"{words[:200]}..."


def _plain(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
