"""The repository for students: stubs and known files, as git's last commit has them."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from lessons.grading.spec import ROOT, Lesson, lesson_folders, load_lesson, solved_functions
from lessons.grading.words import file_name, one_line, said

GIVEN = ("minirad", "viz", "lessons", "notebooks", "pyproject.toml", "LICENSE", ".gitignore")
WITHHELD = {"solution.py", "mutants.py", "hidden.py", "teacher.md", "TEACHERS.md"} | {
    f"alternative{number}.py" for number in ("", "_2", "_3")
}
TOUR = "00_tour"  # the notebook of no lesson
BESIDE_NOTEBOOKS = ("build.py", "common.py", "listening.py")
IN_A_LESSON = {"README.md", "exercise.py", "exercises.py", "test_lesson.py"}
BESIDE_LESSONS = {"__init__.py", "__main__.py", "conftest.py", "ROSETTA.md"}
MACHINERY = {
    f"{name}.py"
    for name in (
        "__init__", "cache", "cases", "child", "classroom", "collect", "desk", "drafting", "fleets", "game",
        "gradescope", "isolate", "mutants", "policy", "progress", "ranks", "report", "router", "run",
        "shared", "show", "spec", "submission", "subscriber", "testing", "tiers", "tree", "underlay",
        "words",
    )
}  # fmt: skip

README = """# minirad: the course

Install once (Python 3.10 or newer), in this folder:

```
python -m venv .venv && . .venv/bin/activate
{torch}pip install -e . pytest
```

(On Windows: `python -m venv .venv`, then `.venv\\Scripts\\activate`, then the rest.)

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
{torch}      - run: pip install -e . pytest
      - run: python -m lessons grade --json results.json{due}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: results
          path: results.json
"""


# ---------------------------------------------------------------------- what git holds


def from_git(source: Path, names: Sequence[str]) -> dict[PurePosixPath, bytes]:
    """The files of the last commit below these names. ValueError says why there are none."""
    why = "what is given out is taken from git's last commit, so that no solution of yours is among it"
    try:
        packed = _git(source, "archive", "--format=tar", "HEAD")
    except FileNotFoundError:
        raise ValueError(f"there is no git on this machine: {why}") from None
    except subprocess.CalledProcessError as error:
        told = one_line(error.stderr.decode("utf-8", "replace").strip())
        raise ValueError(f"{source} is no git checkout with a commit ({told}): {why}") from None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            stream = archive.extractfile(entry) if entry.isfile() and path.parts[0] in names else None
            if stream is not None:
                files[path] = stream.read()
    if not any(path.parts[0] == "lessons" for path in files):
        raise ValueError(f"git's last commit has no lessons in {source}: {why}")
    return files


def _git(source: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(source), *words], capture_output=True, check=True).stdout


def _changed(source: Path, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files that differ from the last commit, and files that git does not know."""
    said = _git(source, "status", "--porcelain", "-z", "--no-renames", "-uall", "--", *names)
    entries = [entry.decode("utf-8", "surrogateescape") for entry in said.split(b"\0") if entry]
    new = [entry[3:] for entry in entries if entry.startswith("??")]
    return [entry[3:] for entry in entries if not entry.startswith("??")], new


# ---------------------------------------------------------------------- what is given


@dataclass
class Written:
    """How many files were written, and notes on what was not."""

    count: int
    notes: list[str] = field(default_factory=list)


def write_classroom(
    out: Path, due: Sequence[str] = (), torch_index: str = "", source: Path | None = None
) -> Written:
    """Writes the students' repository into a new folder.

    due: names of lessons; the workflow is green when these are done. torch_index: a package index for
    torch, for the generated files. source: the checkout. ValueError says what stands in the way.
    """
    source = (source or ROOT.parent).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already: name a new folder")
    if any(out.resolve().is_relative_to(source / name) for name in GIVEN):
        raise ValueError(f"{out} lies inside what is copied: name a folder elsewhere")
    files = from_git(source, GIVEN)
    given = {path: data for path, data in files.items() if _is_known(path)}
    _must_be_stubs(given)
    torch = torch_command(torch_index, files)
    extra = {
        "README.md": README.format(torch=f"{torch}\n" if torch else ""),
        ".github/workflows/grade.yml": WORKFLOW.format(
            torch=f"      - run: {torch}\n" if torch else "", due=f" --due {numbers(due)}" if due else ""
        ),
    }
    given.update({PurePosixPath(name): words.encode() for name, words in extra.items()})
    for path, data in given.items():
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return Written(len(given), _notes(files, source))


def _notes(files: Iterable[PurePosixPath], source: Path) -> list[str]:
    changed, new = _changed(source, GIVEN)
    withheld = sorted({path.name for path in files if _is_withheld(path)})
    unknown = [str(path) for path in files if not _is_known(path) and not _is_withheld(path)]
    found = {
        "left out, for teachers only": withheld,
        "left out, no part of the course": unknown,
        "left out, not in git": new,
        "as in git's last commit, without your changes": [name for name in changed if name not in withheld],
    }
    return [f"{what}: {_some(names)}" for what, names in found.items() if names]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(map(file_name, names[:20])) + more


def _is_withheld(path: PurePosixPath) -> bool:
    return _kind(path) in ("lesson", "beside") and path.name in WITHHELD


def _is_known(path: PurePosixPath) -> bool:
    kind = _kind(path)
    if kind == "lesson":
        return path.name in IN_A_LESSON
    if kind == "beside":
        return path.name in BESIDE_LESSONS
    if kind == "machinery":
        return path.name in MACHINERY
    if kind == "notebook":
        notebooks = {TOUR, *(each.name for each in lesson_folders())}
        return path.name in BESIDE_NOTEBOOKS or path.stem in notebooks
    if kind == "stream":
        return path.suffix == ".jsonl"
    return kind == ""


def _kind(path: PurePosixPath) -> str:
    """Where a file lies: "lesson", "beside" it, "machinery", "notebook", "stream", "unknown", or ""."""
    top, *rest = path.parts
    if top == "notebooks":
        if len(rest) == 2 and rest[0] == "streams":
            return "stream"
        return "notebook" if len(rest) == 1 else "unknown"
    if top != "lessons":
        return ""
    if len(rest) == 1:
        return "beside"
    if len(rest) == 2 and rest[0] == "grading":
        return "machinery"
    return "lesson" if len(rest) == 2 and re.fullmatch(r"\d\d_\w+", rest[0]) else "unknown"


def _must_be_stubs(files: dict[PurePosixPath, bytes]) -> None:
    """ValueError if a solved exercise has been committed."""
    for lesson in map(load_lesson, lesson_folders()):
        path = PurePosixPath("lessons", lesson.name, "exercise.py")
        names = [name for exercise in lesson.exercises for name in exercise.asks_for]
        try:
            solved = solved_functions(files.get(path, b""), names)
        except SyntaxError as error:
            raise ValueError(f"{path} in git's last commit is no Python: {said(error)}") from None
        if solved:
            raise ValueError(
                f"{path} is solved in git's last commit ({', '.join(solved)}): commit the stubs first"
            )


# ---------------------------------------------------------------------- for the generated files


def numbers(lessons: Iterable[str]) -> str:
    """Lessons' names as the command line takes them: "01,02"."""
    return ",".join(name[:2] for name in lessons)


def torch_command(index: str, files: dict[PurePosixPath, bytes]) -> str:
    """The line that installs torch from an index of its own; "" where none is asked for."""
    if not index:
        return ""
    parts = urlsplit(index)
    plain = re.fullmatch(r"[A-Za-z0-9:/._~%+-]+", index)
    if parts.scheme not in ("http", "https") or not parts.netloc or not plain:
        raise ValueError(
            f"--torch-index takes an address as https://host/path, without a password: {index!r}"
        )
    project = files.get(PurePosixPath("pyproject.toml"), b"").decode("utf-8")
    wanted = re.search(r'"(torch[<>=!~][^"]*)"', project)
    return f"pip install '{wanted[1] if wanted else 'torch'}' --index-url {index}"


def due_lessons(lessons: Sequence[Lesson], due: Sequence[str]) -> list[str]:
    """Names of what is due. ValueError where it is not among what is graded."""
    graded = [lesson.name for lesson in lessons]
    missing = [name for name in due if name not in graded]
    if missing:
        raise ValueError(f"due, but not among what is graded: {', '.join(missing)}")
    return list(due)
