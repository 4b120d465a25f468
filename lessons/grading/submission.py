"""What was handed in, read with care: where a lesson lies in it, its source, and a copy of its files.

A submission may hold links to anywhere, pipes, endless devices, a million files and names that are no
UTF-8. Whatever is read here is bounded, and what is not read is named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from lessons.grading.words import file_name

EXERCISE = "exercise.py"
MOST_BYTES = 4 << 20  # of exercise.py, and of all files that are copied
MOST_FILES = 200
MOST_SEEN = 4000  # entries that are looked at in search of files or of a lesson
DEEPEST = 5  # folders between a student's folder and a lesson's


class Refused(ValueError):
    """A submission's file that is not read; the text says which and why."""


def is_hidden(name: str) -> bool:
    """.git, .venv, and what macOS puts beside the files in a zip."""
    return name.startswith(".") or name in ("__MACOSX", "__pycache__")


def find_lesson(student: Path, lesson: str, alone: bool = False) -> tuple[Path, str]:
    """The folder of a submission that holds a lesson's exercise.py, and a remark if there are several ("").

    `lessons/NN_name/`, `NN_name/`, the folder itself, or one of these some folders deeper, as archives
    are packed, in capitals or not; of several the one nearest to the top. alone: no other lesson is asked
    for, so that a bare exercise.py is this one's.
    """
    itself = student.name.casefold() == lesson.casefold()
    found: dict[tuple[int, int], Path] = {}  # by the file's number: one folder may have two names
    for place in [student] * (itself or alone) + list(_places(student, lesson)):
        try:
            file = os.lstat(place / EXERCISE)  # a broken link is there, too, and will be refused by name
        except OSError:
            continue
        found.setdefault((file.st_dev, file.st_ino), place)
    if not found:
        return (student if itself else student / lesson), ""
    first, *others = found.values()
    if not others:
        return first, ""
    taken, *left = [file_name(place.relative_to(student.parent).as_posix()) for place in (first, *others)]
    more = f" and {len(left) - 2} more" if len(left) > 2 else ""
    return first, f"of several {lesson} {taken} was graded, not {', '.join(left[:2])}{more}"


def nothing_found(student: Path, places: Iterable[Path]) -> str:
    """A remark where none of the lessons' folders has an exercise.py: what is there instead. "" otherwise."""
    if any(os.path.lexists(place / EXERCISE) for place in places):
        return ""
    place = student
    for _ in range(DEEPEST):
        entries = [entry for entry in _entries(place, MOST_SEEN) if not is_hidden(entry.name)]
        if len(entries) != 1 or not _is_folder(entries[0]):
            break
        place = Path(entries[0].path)  # a folder around all says nothing
    names = [file_name(Path(entry.path).relative_to(student).as_posix()) for entry in entries]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    holds = ", ".join(names[:3]) or "nothing"
    return f"no lesson was found in {file_name(student.name)}, which holds {holds}{more}"


def _places(student: Path, lesson: str) -> Iterator[Path]:
    for folder in _folders(student):
        for lessons in _called(folder, "lessons"):
            yield from _called(lessons, lesson)
        yield from _called(folder, lesson)


def _called(folder: Path, name: str) -> Iterator[Path]:
    """What is called so in a folder, exactly or but for capitals."""
    yield folder / name
    for entry in _entries(folder, MOST_SEEN):
        if entry.name != name and entry.name.casefold() == name.casefold():
            yield Path(entry.path)


def _folders(top: Path) -> Iterator[Path]:
    """The folder and those in it, level by level, links and hidden ones left out."""
    level, seen = [top], 0
    for _ in range(DEEPEST):
        yield from level
        below: list[Path] = []
        for folder in level:
            entries = _entries(folder, MOST_SEEN - seen)
            seen += len(entries)
            below += [
                Path(entry.path) for entry in entries if not is_hidden(entry.name) and _is_folder(entry)
            ]
        level = below


def _entries(folder: Path, most: int) -> list[os.DirEntry[str]]:
    """The first entries of a folder, sorted; none where it cannot be read."""
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if len(found) >= most:
                    break
                found.append(entry)
    except OSError:
        pass
    return sorted(found, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def read_source(folder: Path, root: Path) -> bytes:
    """The bytes of `folder`/exercise.py. Refused says by name what is missing, too large or a link out."""
    return _read(folder / EXERCISE, folder, root)


def _read(file: Path, folder: Path, root: Path, most: int = MOST_BYTES) -> bytes:
    """root: what the submission is; a link that leads out of it is not followed."""
    name = file_name(str(file.relative_to(folder)))
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"there is no {name} in {file_name(folder.name)}") from None
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}") from None
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root)):
        raise Refused(f"{name} is a link out of the submission: hand in the file itself")
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # a pipe would wait for ever, a device never end
            raise Refused(f"{name} is no file")
        with open(file, "rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise Refused(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > most:
        together = "" if most == MOST_BYTES else " together with the files before it"
        raise Refused(f"{name} is too large: more than {MOST_BYTES >> 20} MB{together}")
    return data


def copy_submission(folder: Path, root: Path, target: Path, source: bytes) -> list[str]:
    """Copies exercise.py, which is `source`, and the Python files beside and below it.

    Returns what was left out and why, in words.
    """
    target.mkdir(parents=True)
    (target / EXERCISE).write_bytes(source)
    room, left_out = MOST_BYTES, []
    files = list(_python_files(folder))
    for file in files[:MOST_FILES]:
        try:
            data = _read(file, folder, root, room)
        except Refused as error:
            left_out.append(str(error))
            continue
        room -= len(data)
        place = target / file.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    if len(files) > MOST_FILES:
        left_out.append(f"of {len(files)} Python files only {MOST_FILES} were taken")
    return left_out


def _python_files(folder: Path) -> Iterator[Path]:
    seen = 0
    for place in _folders(folder):
        entries = _entries(place, MOST_SEEN - seen)
        seen += len(entries)
        for entry in entries:
            own = place == folder and entry.name == EXERCISE
            if entry.name.endswith(".py") and not is_hidden(entry.name) and not own:
                yield Path(entry.path)
