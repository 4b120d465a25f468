"""Grades a submission in a child process, on a temporary copy, with limits.

The parent reads a heartbeat per exercise. A child that is stuck, prints without end, ends itself or
changes the grader is ended, costs the exercise it was in, and a new child goes on with the rest.

Protects against accidents, not against malice: see TEACHERS.md. No fork, nothing but pipes, threads
and `subprocess`, so that it runs on Windows and macOS, too (there without the limit on memory).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons.grading.run import Result, add_lines, verdict
from lessons.grading.spec import ROOT, Exercise, Lesson

COPIED_FILES, COPIED_BYTES = 200, 4 << 20
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
START = "import sys; sys.path[:1] = [{root!r}]; from lessons.grading.child import main; main()"


@dataclass(frozen=True)
class Limits:
    """seconds: factor on every exercise's time; output: bytes per exercise; memory_mb None: the lesson's."""

    seconds: float = 1.0
    starting: float = 90.0
    memory_mb: int | None = None
    file_mb: int = 16
    output: int = 1 << 20


def grade(
    lesson: Lesson,
    folder: Path,
    student: str = "",
    limits: Limits | None = None,
    only: Sequence[str] | None = None,
) -> Iterator[Result]:
    """Results of the exercises of `folder`/exercise.py, each as soon as it is known.

    only: names of exercises; None: all of the lesson. Nothing in `folder` is changed.
    """
    limits = limits or Limits()
    left = [each for each in lesson.exercises if only is None or each.name in only]
    source = _source(folder)
    if source is None:
        yield from _all_failed(lesson, left, "failed", f"there is no exercise.py in {folder.name}")
        return
    while left:
        with tempfile.TemporaryDirectory(prefix="minirad-", ignore_cleanup_errors=True) as temporary:
            copy = copy_submission(folder, Path(temporary) / "work")
            with _Child(lesson, copy, left, student, limits) as child:
                for result in child.results():
                    add_lines([result], lesson, source)
                    yield result
                    left = [each for each in left if each.name != result.exercise]


def _source(folder: Path) -> str | None:
    try:
        return (folder / "exercise.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _all_failed(lesson: Lesson, exercises: Sequence[Exercise], status: str, words: str) -> Iterator[Result]:
    for exercise in exercises:
        yield verdict(lesson, exercise, status, words)


def copy_submission(folder: Path, target: Path) -> Path:
    """Copies the Python files of a submission (no links, not too many, not too large)."""
    target.mkdir(parents=True)
    files = [path for path in sorted(folder.rglob("*.py")) if path.is_file() and not path.is_symlink()]
    size = 0
    for path in [folder / "exercise.py", *files][:COPIED_FILES]:
        size += path.stat().st_size
        if size > COPIED_BYTES:
            break
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return target


class _Child:
    """One child process and the threads that read from it."""

    def __init__(
        self, lesson: Lesson, copy: Path, exercises: Sequence[Exercise], student: str, limits: Limits
    ) -> None:
        self.lesson, self.exercises, self.limits = lesson, list(exercises), limits
        self.secret = secrets.token_hex(8)
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.printed = bytearray()  # what is kept of the output since the last mark
        self.count = 0
        self.outputs: queue.Queue[tuple[int, bytes]] = queue.Queue()  # up to each mark: bytes, beginning
        self.ended = False
        group: dict[str, Any] = {}
        if os.name == "posix":
            group["start_new_session"] = True
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-c", START.format(root=str(ROOT.parent))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=copy, env=_environment(copy), **group,
        )  # fmt: skip
        job = {
            "secret": self.secret, "lesson": str(lesson.folder), "file": str(copy / "exercise.py"),
            "exercises": [each.name for each in exercises], "student": student,
            "memory_mb": limits.memory_mb, "file_mb": limits.file_mb,
        }  # fmt: skip
        with contextlib.suppress(OSError):  # it may have ended already
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.close()
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._lines, self._output)]
        for reader in self.readers:
            reader.start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self, patience: float = 0.0) -> None:
        """Ends the child with all that it has started (on Windows: the child)."""
        if patience:  # it is ending by itself, and its exit code is of interest
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":  # the whole group, also when its first process is gone
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()
        for reader, stream in zip(self.readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(timeout=1)
            if not reader.is_alive() and stream is not None:
                stream.close()

    # ------------------------------------------------------------ reading

    def _lines(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while line := stream.readline(8 << 20):
            with contextlib.suppress(ValueError, AttributeError):
                message = json.loads(line)
                if message.get("secret") == self.secret:
                    self.lines.put(message)
        self.lines.put(None)

    def _output(self) -> None:
        """Counts what is printed, up to each mark; keeps the beginning of it."""
        stream, mark = self.process.stderr, self.secret.encode()
        assert stream is not None
        unmarked = b""
        while chunk := os.read(stream.fileno(), 1 << 16):
            *ended, unmarked = (unmarked + chunk).split(mark)
            for piece in ended:
                self._count(piece)
                self.outputs.put((self.count, bytes(self.printed)))
                self.count, self.printed = 0, bytearray()
            kept = len(mark) - 1  # the mark may come in two pieces
            self._count(unmarked[:-kept])
            unmarked = unmarked[-kept:]
        self._count(unmarked)

    def _count(self, piece: bytes) -> None:
        self.count += len(piece)
        if len(self.printed) < 1 << 16:
            self.printed += piece

    def _next(self, seconds: float) -> dict[str, Any] | str | None:
        """The next message, None at the end, "stuck" or "output" when a limit was reached."""
        deadline = time.monotonic() + seconds
        too_much = 0
        while True:
            try:
                return self.lines.get(timeout=0.05)
            except queue.Empty:
                # More than once, as the message before this output may still be on its way.
                too_much += self.count > self.limits.output
                if too_much > 3:
                    return "output"
                if time.monotonic() > deadline:
                    return "stuck"

    def _output_so_far(self) -> tuple[int, bytes]:
        """What was printed up to the next mark (it comes by another pipe, and may be later)."""
        try:
            return self.outputs.get(timeout=1.0)
        except queue.Empty:
            return self.count, bytes(self.printed)

    # ------------------------------------------------------------ judging

    def results(self) -> Iterator[Result]:
        """Results until the child is done or has to be ended."""
        left, current, seconds = list(self.exercises), None, self.limits.starting
        importing = False
        while left:
            message = self._next(seconds)
            if not isinstance(message, dict):
                if current is None:
                    yield from self._failed_import(left, message, importing)
                    return
                yield self._broken_off(current, message, seconds)
                return
            kind = message["kind"]
            if kind == "ready":
                importing, seconds = True, 10.0 * self.limits.seconds
            elif kind == "unreadable":
                yield from _all_failed(self.lesson, left, "failed", str(message["words"]))
                return
            elif kind == "start":
                current = self.lesson.exercise(str(message["exercise"]))
                seconds = current.seconds * self.limits.seconds
                if not importing:
                    continue
                importing = False
                self._output_so_far()
            elif kind == "result":
                result = self._checked(Result.from_json(message["result"]))
                left = [each for each in left if each.name != result.exercise]
                current = None
                yield result
                if result.status not in ("passed", "failed", "todo"):
                    return  # what did that may do more: the rest gets a fresh process

    def _checked(self, result: Result) -> Result:
        exercise = self.lesson.exercise(result.exercise)
        count, text = self._output_so_far()
        if count > self.limits.output:
            return verdict(self.lesson, exercise, "output", self._too_much(), seconds=result.seconds)
        result.output = _decoded(text)
        return result

    def _broken_off(self, exercise: Exercise, why: str | None, seconds: float) -> Result:
        self.end(patience=5.0 if why is None else 0.0)
        if why == "stuck":
            words = f"{exercise.name} did not come back within {seconds:g} seconds: does a loop never end?"
        elif why == "output" or self.count > self.limits.output:
            why, words = "output", self._too_much()
        else:
            code = self.process.returncode
            why, words = "ended", f"{exercise.name} ended the process (exit code {code})"
        return verdict(self.lesson, exercise, why, words, output=self._text())

    def _failed_import(self, left: list[Exercise], why: str | None, importing: bool) -> Iterator[Result]:
        self.end(patience=5.0 if why is None else 0.0)
        if not importing:
            raise RuntimeError(f"the grader's own process did not start:\n{self._text()}")
        words = {
            "stuck": "exercise.py did not come to its end when it was imported: does a loop never end?",
            "output": "exercise.py prints without end when it is imported",
        }.get(
            why or "",
            f"exercise.py ended the process when it was imported (exit code {self.process.returncode})",
        )
        yield from _all_failed(self.lesson, left, why or "ended", words)

    def _too_much(self) -> str:
        return f"it printed more than {self.limits.output >> 20 or 1} MB"

    def _text(self) -> str:
        return _decoded(bytes(self.printed))


def _decoded(text: bytes) -> str:
    return text[-2000:].decode("utf-8", errors="replace")


def _environment(home: Path) -> dict[str, str]:
    """This process's environment without what looks like a secret, or tells CI what to believe."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.upper() for word in SECRET_WORDS)
        and not name.startswith(("GITHUB_", "ACTIONS_", "PYTEST_"))
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**kept, **threads, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "TMPDIR": str(home)}
