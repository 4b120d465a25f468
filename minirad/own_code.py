"""Learners' files at work: which of them does not come back, for how long, and where in it Python is.

The engine calls a learner's file from deep inside; a loop in it that never ends looks like an engine that has
gone silent. Who loads such a file names it here first (`watch`). From then on a thread looks twice a second
at what the threads of Python are doing; calls cost nothing. A call that is seen for PATIENCE seconds is told
in the terminal, and by `slow()` to a page.

What holds Python's own lock all the while (`sum(range(10**12))`) lets no thread look.
"""

from __future__ import annotations

import codecs
import contextlib
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from minirad.collector import no_collections

LOOK = 0.5  # seconds between two looks
PATIENCE = 5  # seconds: then it is told, and the seconds are told in steps of so many
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32's other one begins so


@dataclass
class _Call:
    """A call into a learner's file that was seen."""

    frame: FrameType  # the same one in two looks: the same call
    since: float
    told: int = 0  # seconds that the terminal has been told


class _Watcher:
    """What the threads are doing in some files. said: the sentence on the longest call, or ""."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.said = ""
        self._calls: dict[int, _Call] = {}  # by thread
        self._thread: threading.Thread | None = None

    def add(self, file: str) -> None:
        self.files.add(file)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="learner's files", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Notes what runs at this moment, and tells what has run for long, or has come back after that."""
        before, self._calls = self._calls, {}
        longest, said = 0, ""
        for thread, mine in self._inside().items():
            call = before.get(thread)
            if call is None or call.frame is not mine[-1]:
                call = _Call(mine[-1], now)
            else:
                del before[thread]
            self._calls[thread] = call
            seconds = int(now - call.since) // PATIENCE * PATIENCE
            if seconds > longest:
                longest, said = seconds, _sentence(mine, seconds)
            if seconds and seconds >= 2 * call.told:
                call.told = seconds
                _tell(_sentence(mine, seconds))
        self.said = said
        for call in before.values():
            if call.told:
                _tell(f"{call.frame.f_code.co_filename} came back after {now - call.since:.0f} seconds")

    def _inside(self) -> dict[int, list[FrameType]]:
        """By thread: its frames in these files, the innermost first.

        Before Python 3.12 `f_back` may begin a collection. What that runs (a finalizer) lets the other thread
        go on, and the frame that was asked for is no more: Python crashes, or takes a variable for a frame.
        """
        with no_collections():
            inside = {
                thread: [each for each in _stack(frame) if each.f_code.co_filename in self.files]
                for thread, frame in sys._current_frames().items()
            }
        return {thread: mine for thread, mine in inside.items() if mine}


def _stack(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that called it, the innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _sentence(mine: list[FrameType], seconds: int) -> str:
    """mine: frames of a file, the innermost first."""
    line, names = mine[0].f_lineno, [each.f_code.co_name for each in mine]
    function = next((name for name in names if not name.startswith("<")), "")  # no "<listcomp>"
    where = f"in {function} (line {line})" if function else f"at line {line}, while it is loaded"
    file = mine[-1].f_code.co_filename
    return f"{file} has been running for {seconds} seconds, {where}; everything else waits for it"


def _tell(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, or closed
        print(sentence, file=sys.stderr, flush=True)


_watcher = _Watcher()


def watch(path: str | Path) -> None:
    """A learner's file will be loaded and called: from now on it is watched."""
    _watcher.add(str(Path(path)))


def source(path: Path) -> bytes:
    """A learner's file as it is, for `compile`. ValueError where an editor saved it as UTF-16 or UTF-32, or
    left a NUL in it."""
    text = path.read_bytes()
    nuls = text.count(0)
    if nuls and (text.startswith(UTF_16) or 10 * nuls > len(text)):  # of ASCII every second byte
        raise ValueError(
            "it is not saved as UTF-8 (but as UTF-16?), which is what Python reads: save it as UTF-8"
        )
    if nuls:
        line = text[: text.index(0)].count(b"\n") + 1
        raise ValueError(f"a NUL character is in line {line}, and Python reads none: delete it")
    return text


def last_line(error: BaseException, file: str) -> tuple[str, int] | None:
    """Function and line of the last place in a file that an exception went through; None if it did not."""
    steps = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [(code.co_name, line) for code, line in steps if code.co_filename == file]
    return mine[-1] if mine else None


def slow() -> str:
    """One sentence on the call that has not come back for longest; "" if all have."""
    return _watcher.said
