"""What an exercise is, and where lessons are found.

A lesson is a folder lessons/NN_name/. Its exercises.py holds `EXERCISES`, a list of `Exercise`. A case
is a function `case(impl)` or `case(impl, rng)`: it calls the functions of the module `impl` (a
student's, the reference's or a mutant's) and raises `Failure("what was wrong, in words")`. Its
docstring says what is tried; it is shown when the student's code raises something. Where there is a
hidden.py beside it, its `HIDDEN` (exercise name -> list of cases) is tried after the open cases.

A case must not depend on anything but its arguments: `rng` is a `random.Random` seeded by lesson,
exercise, case and student id. All cases of an exercise must pass for its points.

Folders that begin with a digit are no packages: everything in them is loaded by its path.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from lessons.grading.words import said
from minirad import own_code

ROOT = Path(__file__).resolve().parents[1]  # the folder lessons/

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Case = Callable[..., None]
Picture = tuple[str, Any]  # a title, and a tree's snapshot, SVG text or plain text


class Failure(AssertionError):
    """A case failed: `words` say how; `pictures` are drawn on request (`--show`).

    hint: which of the exercise's hints answers just this mistake (0: the nudge; past the end: the last).
    """

    def __init__(self, words: str, pictures: Sequence[Picture] = (), hint: int = 0) -> None:
        super().__init__(words)
        self.words = words
        self.pictures = list(pictures)
        self.hint = hint


def expect(condition: bool, words: str, pictures: Sequence[Picture] = (), hint: int = 0) -> None:
    """Raises Failure(words) unless the condition holds."""
    if not condition:
        raise Failure(words, pictures, hint)


@dataclass(frozen=True)
class Exercise:
    """One row of the table.

    name: what it is called, and the function it asks for; functions: these, where it is not just that
    one. hints: two or three, from a nudge to nearly there, one or two sentences each; one of them is shown
    with a failure (Failure says which). seconds: after which it counts as stuck.
    show: pictures of a failed case, made from the student's module, for a lesson whose Failures carry
    none of their own. stands_on: functions of earlier exercises that this one's are likely to call, by
    name, with the grader's own: these take the student's place, so that a fault costs points only once.
    (Where that does not pass, the student's file is tried as it is, too.)
    """

    name: str
    points: float
    cases: Sequence[Case]
    hints: tuple[str, ...] = ()
    show: Callable[[ModuleType], Sequence[Picture]] | None = None
    functions: tuple[str, ...] = ()
    seconds: float = 10.0
    stands_on: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def asks_for(self) -> tuple[str, ...]:
        return self.functions or (self.name,)


@dataclass(frozen=True)
class Lesson:
    """A lesson folder with exercises. memory_mb: what its exercises may take on top of the start."""

    folder: Path
    title: str
    exercises: tuple[Exercise, ...]
    memory_mb: int = 1024

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def points(self) -> float:
        return sum(exercise.points for exercise in self.exercises)

    def exercise(self, name: str) -> Exercise:
        return next(exercise for exercise in self.exercises if exercise.name == name)


# ---------------------------------------------------------------------- finding and loading


def lesson_folders() -> list[Path]:
    """Folders of lessons that have exercises, in order."""
    return sorted(path.parent for path in ROOT.glob("[0-9][0-9]_*/exercises.py"))


def find_folder(text: str) -> Path:
    """A lesson's folder by its number ("03", "3"), name or path; ValueError lists what there is."""
    asked = Path(text).name or text
    for folder in lesson_folders():
        number = folder.name[:2]
        if asked in (folder.name, number, number.lstrip("0")):
            return folder
    names = ", ".join(folder.name for folder in lesson_folders())
    raise ValueError(f"there is no lesson {text!r} with exercises; there are: {names}")


def load_lesson(folder: Path) -> Lesson:
    """Reads exercises.py and, where it is there, hidden.py."""
    spec = load_file(folder / "exercises.py")
    exercises: list[Exercise] = list(spec.EXERCISES)
    if (folder / "hidden.py").exists():
        hidden = load_file(folder / "hidden.py").HIDDEN
        unknown = set(hidden) - {exercise.name for exercise in exercises}
        if unknown:
            raise ValueError(f"{folder.name}/hidden.py names unknown exercises: {sorted(unknown)}")
        exercises = [
            dataclasses.replace(each, cases=[*each.cases, *hidden.get(each.name, ())]) for each in exercises
        ]
    memory = int(getattr(spec, "MEMORY_MB", 1024))
    return Lesson(folder, lesson_title(folder), tuple(exercises), memory)


def lesson_title(folder: Path) -> str:
    """The heading of its README.md, or its name."""
    readme = folder / "README.md"
    if readme.exists():
        found = re.search(r"^# +(.+)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found.group(1)
    return folder.name


def load_file(path: Path, source: str | bytes | None = None) -> ModuleType:
    """A fresh module from a file by its path, each time anew. source: text to use instead of the file's.

    The file is read as Python reads it: a byte-order mark and a coding line count.
    """
    name = f"lessons_file.{path.resolve().parent.name}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    text = own_code.source(path) if source is None else source
    code = compile(text, str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def sibling(file: str, stem: str) -> ModuleType:
    """Another file of the same lesson: `solution = sibling(__file__, "solution")`."""
    return load_file(Path(file).resolve().parent / f"{stem}.py")


def students_file(path: str | Path) -> tuple[dict[str, Any], set[str]]:
    """What a learner's file defines, and which functions are stubs. ValueError: it cannot be loaded."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file} is not there")
    try:
        source = own_code.source(file)
        todo = todo_functions(source)
        own_code.watch(file)
        return vars(load_file(file, source)), todo
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{file} cannot be loaded: {said(error)}") from error


# ---------------------------------------------------------------------- stubs


def todo_functions(source: str | bytes) -> set[str]:
    """Functions whose body is nothing but a docstring and `raise NotImplementedError(...)`."""
    return {
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTION) and _is_stub(node)
    }


def solved_functions(source: bytes, names: Sequence[str]) -> list[str]:
    """Those of these functions, or classes, of a file that are not stubs (any more)."""
    found = []
    for node in ast.parse(source).body:
        name = getattr(node, "name", "")
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        own = [part for part in parts if isinstance(part, FUNCTION)]
        if name in names and own and not all(map(_is_stub, own)):
            found.append(name)
    return found


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [part for part in node.body if not _is_text(part)]
    if len(body) != 1 or not isinstance(body[0], ast.Raise):
        return False
    raised = body[0].exc
    name = raised.func if isinstance(raised, ast.Call) else raised
    return isinstance(name, ast.Name) and name.id == "NotImplementedError"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def signature_drift(lesson: Lesson) -> list[str]:
    """Where the stubs of exercise.py and the functions of solution.py are not called alike."""
    stub, solution = (load_file(lesson.folder / f"{stem}.py") for stem in ("exercise", "solution"))
    found = []
    for exercise in lesson.exercises:
        for name in exercise.asks_for:
            ours, theirs = getattr(stub, name, None), getattr(solution, name, None)
            if ours is None or theirs is None:
                missing = "exercise.py" if ours is None else "solution.py"
                found.append(f"{lesson.name}: {missing} has no {name}")
            elif inspect.signature(ours) != inspect.signature(theirs):
                found.append(
                    f"{lesson.name}: {name}{inspect.signature(ours)} in exercise.py, "
                    f"{name}{inspect.signature(theirs)} in solution.py"
                )
    return found
