"""Grades for a folder of submissions, and one table out of many."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lessons.grading.isolate import GraderError, Limits, about_the_file, grade
from lessons.grading.report import explanation, total
from lessons.grading.run import WORDS, Result
from lessons.grading.spec import Lesson, lesson_folders
from lessons.grading.submission import find_lesson, is_hidden, nothing_found
from lessons.grading.words import file_name, one_line, said
from minirad import command

LARGEST_TABLE = 64 << 20
ENCODING = "utf-8-sig"  # with its mark, without which Excel shows "Ã¶" for "ö"


def students_of(folder: Path) -> tuple[list[Path], list[str]]:
    """The students' folders, and what lies beside them and is none, in words."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    students, others = [], []
    ours = {"lessons", *(each.name.casefold() for each in lesson_folders())}
    for path in sorted(folder.iterdir()):
        if is_hidden(path.name):
            continue
        if path.is_symlink():
            others.append(f"{file_name(path.name)} (a link)")
        elif path.is_dir():
            if path.name.casefold() in ours:
                raise ValueError(
                    f"{folder} is one student's folder: it holds {file_name(path.name)}. "
                    "Take the folder above it, or `grade --submission` for this one"
                )
            students.append(path)
        else:
            others.append(f"{file_name(path.name)} (no folder)")
    if not students:
        raise ValueError(f"{folder} holds no folders: one per student is expected")
    return students, others


def collect(
    students: Sequence[Path],
    target: Path,
    lessons: Sequence[Lesson],
    limits: Limits | None = None,
    student: str = "",
    tell: Callable[[str], object] = lambda remark: None,
) -> Iterator[tuple[str, list[Result]]]:
    """Grades every student's folder and writes one CSV, a row per student as soon as it is known.

    student: a common seed for all; "": each folder's name. tell: gets what is to be remarked on a
    submission, which is in its row, too. Whatever a submission does, it has its row;
    GraderError only where the first one's process does not start.
    """
    with command.named(target), target.open("w", newline="", encoding=ENCODING) as file:
        writer = csv.writer(file)
        writer.writerow(_header(lessons))
        for number, path in enumerate(students):
            results: list[Result] = []
            remarks: list[str] = []
            name = file_name(path.name)
            found = [find_lesson(path, lesson.name, alone=len(lessons) == 1) for lesson in lessons]
            for remark in [*(each for _, each in found), nothing_found(path, (place for place, _ in found))]:
                if remark:
                    remarks.append(remark)
                    tell(remark)
            for lesson, (place, _) in zip(lessons, found, strict=True):
                results += _graded(lesson, place, path, student or path.name, limits, first=number == 0)
            writer.writerow(_row(name, results, remarks))
            file.flush()
            yield name, results


def _graded(
    lesson: Lesson, place: Path, root: Path, student: str, limits: Limits | None, first: bool
) -> Iterator[Result]:
    """A lesson's results; what ends the grader itself is written down, and the next one has his turn."""
    left = list(lesson.exercises)
    try:
        for result in grade(lesson, place, student, limits, root=root):
            left = [each for each in left if each.name != result.exercise]
            yield result
    except Exception as error:
        if first and isinstance(error, GraderError):
            raise  # it is this machine, and every row would say so
        yield from about_the_file(lesson, left, "failed", f"NOT GRADED, look at it yourself: {said(error)}")


def _header(lessons: Iterable[Lesson]) -> list[str]:
    exercises = [
        f"{lesson.name[:2]} {each.name} ({each.points:g})" for lesson in lessons for each in lesson.exercises
    ]
    return ["student", "points", "of", *exercises, "remarks"]


def _row(student: str, results: Sequence[Result], remarked: Sequence[str]) -> list[str]:
    earned, possible = total(results)
    remarks = list(remarked)
    known: set[tuple[str, str]] = set()
    for r in results:
        if r.status not in ("passed", "todo") and (r.lesson, r.words) not in known:
            known.add((r.lesson, r.words))
            what = r.lesson[:2] if r.whole_file else f"{r.lesson[:2]} {r.exercise}"
            remarks.append(f"{what}: {WORDS[r.status]}: {one_line(explanation(r).split(chr(10))[0])}")
    cells = [student, f"{earned:g}", f"{possible:g}", *(f"{r.points:g}" for r in results), "; ".join(remarks)]
    return [_harmless(cell) for cell in cells]


def _harmless(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    risky = cell.lstrip()[:1] in ("=", "+", "-", "@") or cell[:1] in ("\t", "\r", "\n")
    return f"'{cell}" if risky else cell


# ---------------------------------------------------------------------- merging


def merge(tables: Sequence[Path], target: Path) -> int:
    """Writes the rows of many tables of `collect` into one, by student; returns how many.

    ValueError, before anything is written, for a table that is none, has other columns, or a student
    who was there before.
    """
    header: list[str] = []
    rows: dict[str, tuple[Path, list[str]]] = {}
    for table in tables:
        if target.exists() and os.path.samefile(table, target):
            raise ValueError(f"{target} is to be written and is one of the tables to read: name another one")
        first, *found = _read_table(table)
        if header and first != header:
            raise ValueError(f"{table} has other columns than {tables[0]}: grade the same lessons everywhere")
        header = first
        for row in found:
            if row[0] in rows:
                raise ValueError(f"{row[0]} is in {rows[row[0]][0]} and in {table}")
            rows[row[0]] = table, row
    made = io.StringIO(newline="")
    writer = csv.writer(made)
    writer.writerow(header)
    writer.writerows([_harmless(cell) for cell in rows[name][1]] for name in sorted(rows))
    command.write_whole(target, f"\ufeff{made.getvalue()}")  # its mark, as in ENCODING
    return len(rows)


def _read_table(path: Path) -> list[list[str]]:
    """Header and rows of one of our tables; a submission may have written over it."""
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(f"{path} is too large for a table of grades")
    try:
        with path.open(newline="", encoding=ENCODING) as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no table of grades: {error}") from None
    if not rows or rows[0][:3] != ["student", "points", "of"] or rows[0][-1] != "remarks":
        raise ValueError(f"{path} is no table of `collect`: its first line is not student, points, of, ...")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]) or not _adds_up(row[1:-1]):
            raise ValueError(f"{path}, row {number}: its points do not add up")
    return rows


def _adds_up(cells: Sequence[str]) -> bool:
    try:
        points, possible, *each = map(float, cells)
    except ValueError:
        return False
    return 0 <= points <= possible and abs(points - sum(each)) < 1e-6
