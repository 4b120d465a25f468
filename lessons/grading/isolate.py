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

from lessons.grading.run import WORDS, Result, add_line, verdict
from lessons.grading.spec import ROOT, Exercise, Lesson
from lessons.grading.submission import Refused, copy_submission, read_source
from lessons.grading.words import plain

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
START = "import sys; sys.path[:1] = [{root!r}]; from lessons.grading.child import main; main()"
MARK_SECONDS = 5.0  # until a mark must have come that the child says it has written
LONGEST_LINE = 4 << 20  # of what the child writes


class GraderError(RuntimeError):
    """The grader's own process did not start: no submission's fault."""


@dataclass(frozen=True)
class Limits:
    """seconds: factor on every exercise's time; output: bytes per exercise; memory_mb None: the lesson's.

    user: (uid, gid) as which submissions run; None: as this process does.
    """

    seconds: float = 1.0
    starting: float = 90.0
    memory_mb: int | None = None
    file_mb: int = 16
    output: int = 1 << 20
    user: tuple[int, int] | None = None


def grade(
    lesson: Lesson,
    folder: Path,
    student: str = "",
    limits: Limits | None = None,
    only: Sequence[str] | None = None,
    root: Path | None = None,
) -> Iterator[Result]:
    """Results of the exercises of `folder`/exercise.py, each as soon as it is known.

    only: names of exercises; None: all of the lesson. root: the whole submission, out of which no link
    is followed; None: `folder`. Nothing in `folder` is changed.
    """
    limits = limits or Limits()
    left = [each for each in lesson.exercises if only is None or each.name in only]
    root = folder if root is None else root
    try:
        source = read_source(folder, root)
    except Refused as error:
        yield from about_the_file(lesson, left, "failed", str(error))
        return
    while left:
        with _temporary() as temporary:
            left_out = copy_submission(folder, root, temporary / "work", source)
            _give(temporary, limits.user)
            with _Child(lesson, temporary / "work", left, student, limits) as child:
                for result in child.results():
                    if result.whole_file and left_out:
                        result.words += f" (not taken: {'; '.join(left_out[:3])})"
                    elif not result.whole_file:
                        add_line(result, lesson, source)
                    yield result
                    left = [each for each in left if each.name != result.exercise]


def about_the_file(
    lesson: Lesson, exercises: Sequence[Exercise], status: str, words: str, line: int = 1
) -> Iterator[Result]:
    """The same for every exercise: what is wrong is the file's, and none was tried."""
    for exercise in exercises:
        yield verdict(lesson, exercise, status, words, whole_file=True, line=line)


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """A folder for one process, removed with whatever was made of it."""
    path = Path(tempfile.mkdtemp(prefix="minirad-"))
    try:
        yield path
    finally:
        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(path, ignore_errors=True)
        if path.exists() and os.name == "posix":  # folders in folders, a thousand deep
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["rm", "-rf", "--", path], timeout=60, stderr=subprocess.DEVNULL, check=False)


def _give(folder: Path, user: tuple[int, int] | None) -> None:
    """The folder and all in it become the user's."""
    if user is None:
        return
    for place in [folder, *folder.rglob("*")]:
        os.chown(place, *user)


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
        self.ended = threading.Event()
        group: dict[str, Any] = {}
        if os.name == "posix":
            group["start_new_session"] = True
        self.process = subprocess.Popen(
            [sys.executable, "-B", "-c", START.format(root=str(ROOT.parent))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=copy, env=_environment(copy, limits.user), **group,
        )  # fmt: skip
        job = {
            "secret": self.secret, "lesson": str(lesson.folder), "file": str(copy / "exercise.py"),
            "exercises": [each.name for each in exercises], "student": student,
            "memory_mb": limits.memory_mb, "file_mb": limits.file_mb, "user": limits.user,
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
        if self.ended.is_set():
            return
        self.ended.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":  # the whole group, also when its first process is gone
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        if self.limits.user is not None:
            _end_all(self.limits.user)
        self.process.wait()
        for reader in self.readers:
            reader.join(timeout=1)  # a process that got away may hold the pipe open

    # ------------------------------------------------------------ reading

    def _lines(self) -> None:
        """What the child says, line by line; what is no message of its own is dropped."""
        assert self.process.stdout is not None
        secret = self.secret.encode()
        with self.process.stdout as stream:
            while not self.ended.is_set() and (line := stream.readline(LONGEST_LINE)):
                if secret not in line:
                    continue
                with contextlib.suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, dict) and message.get("secret") == self.secret:
                        self.lines.put(message)
        self.lines.put(None)

    def _output(self) -> None:
        """Counts what is printed, up to each mark; keeps the beginning of it."""
        assert self.process.stderr is not None
        mark, unmarked = self.secret.encode(), b""
        with self.process.stderr as stream:
            while not self.ended.is_set() and (chunk := os.read(stream.fileno(), 1 << 16)):
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
        """What was printed up to the next mark (it comes by another pipe, and may be later, unless the
        submission has closed that)."""
        _, reader = self.readers
        deadline = time.monotonic() + MARK_SECONDS
        while True:
            reads = reader.is_alive()  # before the look: what came last is there
            try:
                return self.outputs.get(timeout=0.05)
            except queue.Empty:
                if not reads or time.monotonic() > deadline:
                    return self.count, bytes(self.printed)

    # ------------------------------------------------------------ judging

    def results(self) -> Iterator[Result]:
        """Results until the child is done or has to be ended.

        What it says may be forged or in disorder: a result counts for the exercise that runs, once, and
        its points are this process's to give.
        """
        left, current, seconds = list(self.exercises), None, self.limits.starting
        stage, began = "starting", time.monotonic()
        while left:
            message = self._next(seconds)
            if not isinstance(message, dict):
                if current is not None:
                    yield self._broken_off(current, message, seconds)
                elif stage != "running":  # else it ended between two exercises: a new one goes on
                    yield from self._failed_import(left, message, stage)
                return
            kind = message.get("kind")
            if kind == "ready" and stage == "starting":
                stage, seconds = "importing", 10.0 * self.limits.seconds
            elif kind == "unreadable" and stage == "importing":
                words, line = str(message.get("words")), message.get("line")
                yield from about_the_file(
                    self.lesson, left, "failed", words, line if isinstance(line, int) else 1
                )
                return
            elif kind == "start" and stage != "starting" and current is None:
                current = next((each for each in left if each.name == message.get("exercise")), None)
                if current is None:
                    continue
                seconds, began = current.seconds * self.limits.seconds, time.monotonic()
                if stage == "importing":
                    self._output_so_far()
                stage = "running"
            elif kind == "result" and current is not None and message.get("exercise") == current.name:
                result = self._checked(current, message, time.monotonic() - began)
                left.remove(current)
                current = None
                yield result
                if result.status not in ("passed", "failed", "todo"):
                    return  # what did that may do more: the rest gets a fresh process

    def _checked(self, exercise: Exercise, message: dict[str, Any], seconds: float) -> Result:
        count, text = self._output_so_far()
        if count > self.limits.output:
            return verdict(self.lesson, exercise, "output", self._too_much(), seconds=seconds)
        status, words = (str(message.get(name)) for name in ("status", "words"))
        if status not in WORDS:
            status, words = "tampered", f"the submission changed the grader: its result is {status[:200]!r}"
        pictures = [
            (plain(pair[0], 200), pair[1])
            for pair in message.get("pictures") or ()
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        ]
        told = message.get("which")
        which = told if isinstance(told, int) and 0 <= told < len(exercise.hints) else 0
        more: dict[str, Any] = {"pictures": pictures, "output": _decoded(text), "seconds": seconds}
        return verdict(self.lesson, exercise, status, words, which, **more)

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

    def _failed_import(self, left: list[Exercise], why: str | None, stage: str) -> Iterator[Result]:
        self.end(patience=5.0 if why is None else 0.0)
        if stage == "starting":
            text = self._text().strip() or f"it said nothing within {self.limits.starting:g} seconds"
            raise GraderError(f"the grader's own process did not start:\n{text}")
        words = {
            "stuck": "exercise.py did not come to its end when it was imported: does a loop never end?",
            "output": "exercise.py prints without end when it is imported",
        }.get(
            why or "",
            f"exercise.py ended the process when it was imported (exit code {self.process.returncode})",
        )
        yield from about_the_file(self.lesson, left, why or "ended", words)

    def _too_much(self) -> str:
        return f"it printed more than {self.limits.output >> 20 or 1} MB"

    def _text(self) -> str:
        return _decoded(bytes(self.printed))


def _decoded(text: bytes) -> str:
    return plain(text[-2000:].decode("utf-8", errors="replace").replace("\r\n", "\n"))


def _environment(home: Path, user: tuple[int, int] | None = None) -> dict[str, str]:
    """This process's environment without what looks like a secret, or tells CI what to believe."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.upper() for word in SECRET_WORDS)
        and not name.startswith(("GITHUB_", "ACTIONS_", "PYTEST_"))
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own = {"TMPDIR": str(home)} if user is None else {"TMPDIR": str(home), "HOME": str(home)}
    return {**kept, **threads, "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", **own}


# ---------------------------------------------------------------------- as another user

_BECOME = "import os, sys; u, g = map(int, sys.argv[1:]); os.setgroups([]); os.setgid(g); os.setuid(u); "


def _end_all(user: tuple[int, int]) -> None:
    """Ends every process of the user: also those that have left their group."""
    command = [sys.executable, "-I", "-S", "-c", _BECOME + "os.kill(-1, 9)", *map(str, user)]
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(command, timeout=30, stderr=subprocess.DEVNULL, check=False)


def find_user(name: str) -> tuple[int, int]:
    """(uid, gid) of a user by name or number. ValueError where this process cannot become that one."""
    if os.name != "posix" or os.geteuid() != 0:
        raise ValueError(f"--user {name}: only root can run submissions as somebody else")
    import pwd

    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        found = entry.pw_uid, entry.pw_gid
    except (KeyError, OverflowError):
        raise ValueError(
            f"--user {name}: there is no such user (useradd --system {name} makes one)"
        ) from None
    if 0 in found:
        raise ValueError(f"--user {name}: that is root; name a user who owns nothing")
    needed = f"sys.path.insert(0, {str(ROOT.parent)!r}); import subprocess, numpy, lessons.grading.run"
    command = [sys.executable, "-B", "-c", _BECOME + needed, *map(str, found)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        told = done.stderr.strip().split("\n")[-1]
        raise ValueError(f"--user {name}: that user cannot run {sys.executable}: {told}")
    return found


def check_unreadable(lesson: Lesson) -> None:
    """ValueError unless nobody but the owner can read a lesson's solutions and hidden cases."""
    for name in ("solution.py", "alternative.py", "mutants.py", "hidden.py"):
        file = lesson.folder / name
        if file.exists() and file.stat().st_mode & 0o077:
            raise ValueError(f"--user: {lesson.name}/{name} can be read by others: chmod 600 it first")
