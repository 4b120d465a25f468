"""`python -m lessons`: the lessons and what is solved; `grade`, `classroom` and `collect` do the rest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lessons.grading.classroom import collect, write_classroom
from lessons.grading.isolate import Limits, grade
from lessons.grading.progress import progress, remember
from lessons.grading.report import tell_github, text, total, write_gradescope
from lessons.grading.run import WORDS, Result
from lessons.grading.show import show
from lessons.grading.spec import find_folder, lesson_folders, load_lesson


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lessons", description="The course: lessons and grades.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="the lessons and what is solved (what you get without a command)")

    one = commands.add_parser("grade", help="grade lessons; the exit code says whether all passed")
    one.add_argument("lessons", nargs="*", metavar="NN", help="numbers, names or folders; none: all")
    one.add_argument("--json", metavar="FILE", help="write results.json as Gradescope reads it")
    one.add_argument("--show", action="store_true", help="draw what failed and open it in the browser")
    one.add_argument("--submission", metavar="DIR", help="grade DIR/NN_name/exercise.py instead of lessons/")
    _common(one)

    room = commands.add_parser(
        "classroom", help="write a repository for students: no solutions, no hidden cases"
    )
    room.add_argument("out", metavar="OUT", help="a folder that does not exist yet")

    many = commands.add_parser("collect", help="grade a folder of submissions, one folder per student")
    many.add_argument("folder", metavar="DIR")
    many.add_argument("--csv", metavar="FILE", default="grades.csv")
    many.add_argument("--lessons", nargs="*", default=[], metavar="NN", help="none: all")
    _common(many)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    text = "seeds the random cases (default: MINIRAD_STUDENT; collect: the folder's name)"
    parser.add_argument("--student", default=os.environ.get("MINIRAD_STUDENT", ""), metavar="ID", help=text)
    parser.add_argument("--patience", type=float, default=1.0, help="factor on the time limits")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 passed, 1 not, 2 asked wrongly."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "grade":
            return _grade(options)
        if options.command == "classroom":
            count = write_classroom(Path(options.out))
            print(f"{options.out}: {count} files. Next: git init there, and give it to your students.")
            return 0
        if options.command == "collect":
            return _collect(options)
    except (ValueError, OSError) as error:
        print(f"python -m lessons: {error}", file=sys.stderr)
        return 2
    print(progress())
    print("\nGrade one with `python -m lessons grade 02` or `pytest lessons/02_radix_tree`.")
    return 0


def _folders(names: Sequence[str]) -> list[Path]:
    return [find_folder(name) for name in names] if names else lesson_folders()


def _grade(options: argparse.Namespace) -> int:
    results: list[Result] = []
    limits = Limits(seconds=options.patience)
    own = options.submission is None
    for folder in _folders(options.lessons):
        lesson = load_lesson(folder)
        work = folder if own else Path(options.submission) / folder.name
        found = []
        for result in grade(lesson, work, options.student, limits):
            print(f"{lesson.name}  {result.exercise}: {WORDS[result.status]}", file=sys.stderr)
            found.append(result)
        results += found
        tell_github(found, work)
    print(text(results))
    if own:
        remember(results)
    if options.json:
        write_gradescope(results, Path(options.json))
    if options.show and any(r.status not in ("passed", "todo") for r in results):
        print(f"\ndrawn: {show(results)}")
    earned, possible = total(results)
    return 0 if earned == possible else 1


def _collect(options: argparse.Namespace) -> int:
    lessons = [load_lesson(folder) for folder in _folders(options.lessons)]
    limits = Limits(seconds=options.patience)
    for student, results in collect(
        Path(options.folder), Path(options.csv), lessons, limits, options.student
    ):
        earned, possible = total(results)
        print(f"{student:24} {earned:g} of {possible:g}")
    print(f"written: {options.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
