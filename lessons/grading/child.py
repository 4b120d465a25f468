"""The process in which a submission runs. Started by isolate.py, never by hand.

It reads one JSON line (the job) and writes JSON lines: "ready", then for every exercise "start" and
"result". They go through a copy of standard output made at the start; what the submission prints goes
to standard error, where the parent counts it. Each line carries the job's secret number, so that
nothing printed by accident is taken for a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

WATCHED = ("lessons.", "lessons_file.", "minirad.")
WATCHED_TOO = ("builtins", "random", "inspect", "json", "lessons")
MOST_PROCESSES = 256  # threads count; only where submissions run as a user of their own
LARGEST_PICTURES = 1 << 20  # characters


def main() -> None:
    """Grades what the job names, and leaves without any tidying up that a submission could hook into."""
    leave = os._exit
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    secret = job["secret"]

    def send(kind: str, write: Any = channel.write, dumps: Any = json.dumps, **data: Any) -> None:
        write(dumps({"secret": secret, "kind": kind, **data}) + "\n")
        channel.flush()

    _grade(job, send)
    leave(0)


def _grade(job: dict[str, Any], send: Callable[..., None]) -> None:
    from lessons.grading.run import run_exercise
    from lessons.grading.spec import load_file, load_lesson
    from lessons.grading.words import said

    lesson = load_lesson(Path(job["lesson"]))
    file = Path(job["file"])
    sys.path.append(str(file.parent))  # last, so that no file of a student's hides another module
    changed = watch(file)
    _limit(lesson.memory_mb if job["memory_mb"] is None else job["memory_mb"], job["file_mb"])
    if job["user"] is not None:
        _become(*job["user"])
    send("ready")
    try:
        impl = load_file(file)
    except BaseException as error:  # also sys.exit at the top of the file
        return send("unreadable", **_import_error(error, file))
    flush_output(job["secret"])
    own, leave, process = os.getpid(), os._exit, os.getpid
    for name in job["exercises"]:
        exercise = lesson.exercise(name)
        send("start", exercise=name)
        try:
            result = run_exercise(lesson, exercise, impl, job["student"])
            status, words, pictures = result.status, result.words, _drawable(result.pictures)
            which = result.which
        except BaseException as error:  # the grader itself failed: it was patched, or interrupted
            status, words, pictures, which = "ended", f"the grader could not go on: {said(error)}", [], 0
        if process() != own:
            leave(0)  # the submission has forked, and this is not the process that is listened to
        what = changed()
        if what:
            status, words, pictures = "tampered", f"the submission changed {what}", []
        flush_output(job["secret"])
        send("result", exercise=name, status=status, words=words, pictures=pictures, which=which)
        if what:
            return  # the parent begins anew with the rest
    return None


def _become(uid: int, gid: int) -> None:
    """From now on another user, who can read neither solutions nor hidden cases.

    They are loaded already; their modules are taken out of the way of a simple `import`. (Who digs in
    the memory of his own process finds them still.)
    """
    import resource

    resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    for name in [name for name in sys.modules if name.startswith("lessons_file.")]:
        del sys.modules[name]


def _drawable(pictures: Any) -> list[Any]:
    """Pictures as plain data, or none: they are made of what the submission made."""
    try:
        text = json.dumps(pictures)
    except Exception:
        return []
    return pictures if len(text) <= LARGEST_PICTURES else [("no picture", "it would be too large")]


def _import_error(error: BaseException, file: Path) -> dict[str, Any]:
    """Words, and the line of this file. A SyntaxError's own text says where: maybe in another file."""
    from lessons.grading.words import said
    from minirad.own_code import last_line

    at = last_line(error, str(file))
    line, where = (at[1], f", line {at[1]}") if at else (1, "")
    if isinstance(error, SyntaxError) and not at:
        line = error.lineno if type(error.lineno) is int else 1
    return {"words": f"{file.name}{where} cannot be imported: {said(error)}", "line": line}


def flush_output(mark: str, write: Callable[[int, bytes], int] = os.write) -> None:
    """Ends the output of the import, or of an exercise, with a mark: so the parent knows whose it is.

    A submission may have closed or replaced its output: then there is none.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be anything by now
            stream.flush()
    with contextlib.suppress(OSError):
        write(2, mark.encode())


def _limit(memory_mb: int, file_mb: int) -> None:
    """Memory and file size, where the system can limit them (not on Windows; macOS ignores memory)."""
    try:
        import resource
    except ImportError:
        return
    limits = {
        "RLIMIT_AS": _address_space() + (memory_mb << 20),
        "RLIMIT_FSIZE": file_mb << 20,
        "RLIMIT_CORE": 0,
    }
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _address_space() -> int:
    """Bytes that are mapped already: libraries take many, and differ from machine to machine."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 4 << 30


# ---------------------------------------------------------------------- a patched grader


def watch(file: Path) -> Callable[[], str]:
    """A function that says what of the grader (or of the submission's own file) is not as it was now."""
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name.startswith(WATCHED) or name in WATCHED_TOO)
    }
    before = {name: _inside(module) for name, module in modules.items()}
    text = file.read_bytes()
    inside, read = _inside, Path.read_bytes

    def changed() -> str:
        for name, module in modules.items():
            now = inside(module)
            for key, value in before[name].items():
                if now.get(key, now) is not value:
                    return f"{name}.{key}"
        try:
            same = read(file) == text
        except OSError:
            return "or deleted its own folder"
        return "" if same else "its own file"

    return changed


def _inside(module: ModuleType) -> dict[str, Any]:
    """Everything a module holds by name; of functions and classes also what they are made of."""
    found: dict[str, Any] = {}
    for name, value in list(vars(module).items()):
        if name in ("_", "__builtins__", "__warningregistry__"):
            continue
        found[name] = value
        if isinstance(value, FunctionType):
            found[f"{name}.__code__"] = value.__code__
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, part in list(vars(value).items()):
                if inner.startswith("__") and not isinstance(part, FunctionType):
                    continue
                found[f"{name}.{inner}"] = part
                if isinstance(part, FunctionType):
                    found[f"{name}.{inner}.__code__"] = part.__code__
    return found
