"""`python -m lessons`: the lessons and what is solved; `--help` lists the commands."""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m lessons")  # before what takes its time to import

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lessons.grading.classroom import due_lessons, write_classroom
from lessons.grading.collect import collect, merge, students_of
from lessons.grading.gradescope import write_autograder
from lessons.grading.isolate import GraderError, Limits, check_unreadable, find_user, grade
from lessons.grading.progress import progress, remember
from lessons.grading.report import tell_github, text, total, write_gradescope
from lessons.grading.run import WORDS, Result
from lessons.grading.show import show
from lessons.grading.spec import Lesson, find_folder, lesson_folders, load_lesson
from lessons.grading.submission import EXERCISE, find_lesson, nothing_found
from lessons.grading.words import one_line
from minirad.command import may_be_written


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)} (--help says more)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lessons", description="The course: lessons and grades.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    added = {name: commands.add_parser(name, help=about) for name, about in command.below("lessons").items()}

    one = added["grade"]
    one.add_argument("lessons", nargs="*", metavar="NN", help="numbers, names or folders; none: all")
    one.add_argument("--json", metavar="FILE", help="write results.json as Gradescope reads it")
    one.add_argument("--show", action="store_true", help="draw what failed and open it in the browser")
    one.add_argument("--submission", metavar="DIR", help="grade what was handed in there, not lessons/")
    one.add_argument("--user", metavar="NAME", help="run the submission as this user (root only)")
    one.add_argument("--due", metavar="NN,NN", help="the exit code is about these lessons only")
    _common(one)

    many = added["collect"]
    many.add_argument("folder", metavar="DIR")
    many.add_argument("--csv", metavar="FILE", default="grades.csv")
    many.add_argument("--lessons", nargs="*", default=[], metavar="NN", help="none: all")
    many.add_argument("--user", metavar="NAME", help="run the submissions as this user (root only)")
    _common(many)

    tables = added["merge"]
    tables.add_argument("tables", nargs="+", metavar="FILE.csv")
    tables.add_argument("--csv", metavar="FILE", default="grades.csv")

    room = added["classroom"]
    room.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    room.add_argument("--due", metavar="NN,NN", help="the workflow is green when these lessons are done")
    scope = added["gradescope"]
    scope.add_argument("out", metavar="OUT.zip", help="a file that does not exist yet")
    scope.add_argument("--due", metavar="NN,NN", help="grade these lessons (default: all)")
    for out in (room, scope):
        out.add_argument(
            "--torch-index", metavar="URL", default="", help="install torch from this index (a smaller one)"
        )
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    text = "seeds the random cases (default: MINIRAD_STUDENT; collect: the folder's name)"
    parser.add_argument("--student", default=os.environ.get("MINIRAD_STUDENT", ""), metavar="ID", help=text)
    parser.add_argument("--patience", type=_factor, default=1.0, help="factor on the time limits")


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1000:
        raise argparse.ArgumentTypeError(f"takes a number above 0, up to 1000, not {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 passed, 1 not, 2 asked wrongly."""
    for stream in (sys.stdout, sys.stderr):  # names and messages may hold what a terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command.interruptible()
    options = _parser().parse_args(arguments)
    commands = {
        "grade": _grade, "collect": _collect, "merge": _merge, "classroom": _classroom,
        "gradescope": _gradescope,
    }  # fmt: skip
    told: list[int] = []
    try:
        with command.output_named(), command.told_to_end(told):  # else a child would go on without its parent
            return commands.get(options.command, _list)(options)
    except BrokenPipeError:  # `| head` has seen enough; no grade was told in full, so that the code is no 0
        command.forget_output()
        return 2
    except GraderError as error:
        print(f"python -m lessons: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"python -m lessons: {one_line(str(error), 1000)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return command.interrupted("python -m lessons", told)


def _list(options: argparse.Namespace) -> int:
    print(progress())
    print("\nGrade one with `python -m lessons grade 02` or `pytest lessons/02_radix_tree`.")
    return 0


def _lessons(names: Sequence[str]) -> list[Lesson]:
    """Lessons by number, name or folder, several also as "01,02"; all where none is named."""
    # A folder's own path may have a comma.
    parts = [part.strip() for name in names for part in ([name] if os.path.isdir(name) else name.split(","))]
    folders = [find_folder(part) for part in parts] if names else lesson_folders()
    return [load_lesson(folder) for folder in dict.fromkeys(folders)]


def _due(text: str | None) -> list[str]:
    """Names of lessons out of "01,02"; none where nothing is said."""
    if text is None:
        return []
    return list(dict.fromkeys(find_folder(part.strip()).name for part in text.split(",")))


def _limits(options: argparse.Namespace, lessons: Sequence[Lesson]) -> Limits:
    user = None
    if options.user is not None:
        user = find_user(options.user)
        for lesson in lessons:
            check_unreadable(lesson)
    return Limits(seconds=options.patience, user=user)


def _grade(options: argparse.Namespace) -> int:
    lessons = _lessons(options.lessons)
    due = due_lessons(lessons, _due(options.due))
    limits, root = _limits(options, lessons), None
    if options.submission is not None:
        root = Path(options.submission)
        if not root.is_dir():
            raise ValueError(f"{root} is no folder")
    found_in = [
        (each.folder, "") if root is None else find_lesson(root, each.name, alone=len(lessons) == 1)
        for each in lessons
    ]
    works = [work for work, _ in found_in]
    remarks = [remark for _, remark in found_in if remark]
    if root is not None and (nothing := nothing_found(root.resolve(), works)):
        remarks.append(nothing)
    for remark in remarks:
        _tell(remark)
    if options.json is not None:
        may_be_written("--json", options.json, (".json",), [work / EXERCISE for work in works])
    results: list[Result] = []
    for lesson, work in zip(lessons, works, strict=True):
        found = []
        for result in grade(lesson, work, options.student, limits, root=root):
            print(f"{lesson.name}  {result.exercise}: {WORDS[result.status]}", file=sys.stderr)
            found.append(result)
        results += found
        tell_github(found, work)
    print(text(results))
    if root is None:
        remember(results)
    if options.json is not None:
        write_gradescope(results, Path(options.json), remarks)
    if options.show and any(r.status not in ("passed", "todo") for r in results):
        print(f"\ndrawn: {show(results)}")
    asked = [r for r in results if not due or r.lesson in due]
    if due:
        print(f"\ndue: {', '.join(due)}: {'done' if all(r.passed for r in asked) else 'not done yet'}")
    return 0 if all(r.passed for r in asked) else 1


def _tell(remark: str) -> None:
    print(f"look at it: {remark}", file=sys.stderr)


def _collect(options: argparse.Namespace) -> int:
    lessons = _lessons(options.lessons)
    limits = _limits(options, lessons)
    students, others = students_of(Path(options.folder))
    may_be_written("--csv", options.csv, (".csv",))
    if others:
        print(f"left out: {', '.join(others)}", file=sys.stderr)
    for student, results in collect(students, Path(options.csv), lessons, limits, options.student, _tell):
        earned, possible = total(results)
        print(f"{student:24} {earned:g} of {possible:g}")
    print(f"written: {options.csv}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    may_be_written("--csv", options.csv, (".csv",), options.tables)
    count = merge([Path(table) for table in options.tables], Path(options.csv))
    print(f"written: {options.csv}, {count} students")
    return 0


def _classroom(options: argparse.Namespace) -> int:
    written = write_classroom(Path(options.out), _due(options.due), options.torch_index)
    for note in written.notes:
        print(note)
    print(f"{options.out}: {written.count} files. Next: git init there, and give it to your students.")
    return 0


def _gradescope(options: argparse.Namespace) -> int:
    count = write_autograder(Path(options.out), _due(options.due), options.torch_index)
    print(f"{options.out}: {count} files. Upload it as the autograder, on Ubuntu 22.04 or newer.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
