"""A recording: every step of an engine as a frame, in memory or in a file, replayable to any moment.

A file is JSON lines: a header (schema version, config, model, the state at the start), then frames. A
file that was cut off anywhere gives all its whole frames. One from a stranger is checked while it is
read: every field has the type that its event declares, every slot lies in the pool, what an event names
is there, and each keyframe is what the events before it lead to (reading.py, replay.py).

What is wrong in the header refuses the file. What is wrong further on ends the reading there: the frames
before it are whole, and `Recording.missing` says what is not to be had, with file and line. Nothing is
fetched, and no name in a file is looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from minirad.command import named
from minirad.errors import path as a_path
from minirad.errors import whole
from minirad.observe.event import Event, ReplayState
from minirad.observe.reading import NotJson, check_notes, check_state, parse_frame, parse_header, read_line
from minirad.observe.replay import Frame, FrameCheck, apply_frame, json_line
from minirad.observe.snapshot import State

Walked = tuple[Frame, ReplayState]


class Recording:
    """Frames and what they start from. `state(i)` is the whole state after frame i (-1: the start).

    missing: one sentence on the part of a file that could not be read ("": nothing is missing).
    """

    missing = ""

    def __init__(self, header: State, frames: Iterable[Frame] = ()) -> None:
        self.header = header
        self.frames: list[Frame] = list(frames)

    def state(self, index: int) -> State:
        """The state after frame `index`; -1 is the start. Keyframes share its nodes: do not change them."""
        return self.replay_to(index).snapshot()

    def replay_to(self, index: int) -> ReplayState:
        """A fresh ReplayState after frame `index`, from the nearest keyframe before it."""
        if not -1 <= whole("a frame's index", index) < len(self.frames):
            raise ValueError(f"frame {index} is not in this recording of {len(self.frames)} frames")
        at = index
        while at >= 0 and self.frames[at].keyframe is None:
            at -= 1
        state = self.frames[at].keyframe if at >= 0 else self.header["start"]
        try:
            replay = ReplayState(state or {})
        except (LookupError, TypeError) as error:
            what = f"the keyframe of frame {at}" if at >= 0 else "the header's start"
            raise ValueError(f"{what} is not a whole state: {error!r}") from error
        for frame in self.frames[at + 1 : index + 1]:
            replay = apply_frame(replay, frame)
        return replay

    def walk(self, before: Callable[[Event, ReplayState], Any] | None = None) -> Iterator[Walked]:
        """Each frame with the state after it (one object, moved on); `before` is called ahead of each event.

        Goes on from a keyframe where a frame of a silent tree does not replay.
        """
        replay = self.replay_to(-1)
        for frame in self.frames:
            replay = apply_frame(replay, frame, before)
            yield frame, replay

    def check(self) -> None:
        """Looks at every frame once. ValueError names the one that does not follow from those before it."""
        check_state(self.header["start"])
        check = FrameCheck(self.header["start"])
        for frame in self.frames:
            check.take(frame)

    def save(self, path: str | Path) -> None:
        """Writes header and frames as JSON lines."""
        path = a_path("path", path)
        first = encoded(header_line(self.header))  # before a file that is there is emptied
        with named(path), path.open("wb") as file:
            file.write(first)
            file.writelines(encoded(frame.to_json() + "\n") for frame in self.frames)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Reads a file up to its last whole frame, or the last before one that is lost or broken.

        Frames that could not be had are told by `missing`. ValueError names file and line when there is
        no whole header, the schema is another, or nothing whole follows.
        """
        return read_recording(a_path("a recording", path))

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)


def read_recording(path: str | Path) -> Recording:
    """A file's header and its frames up to the first that is broken, missing or does not follow.

    ValueError for a file that has no whole header, or nothing whole behind it. `missing` of the result is
    one sentence on what was not read and why; "" for a whole file. A last line that was cut off (or is being
    written) is told by it, too, and is no reason to refuse a file.
    """
    with Path(path).open("rb") as file:
        try:
            first = read_line(file)
        except ValueError as error:
            raise ValueError(f"{path} does not begin with the header of a recording") from error
        recording = Recording(parse_header(first, path))
        check = FrameCheck(recording.header["start"])
        number = 1
        while True:
            number += 1
            line = b""
            try:
                line = read_line(file)
                if not line:
                    break
                if line.strip():
                    recording.frames.append(_next_frame(line, len(recording), check))
            except ValueError as error:
                if isinstance(error, NotJson) and not line.endswith(b"\n"):
                    recording.missing = f"{path}, line {number}: the last line is cut off"
                    break
                recording.missing = f"{path}, line {number}: {error}"
                if not recording.frames:
                    raise ValueError(recording.missing) from error
                break
    if recording.missing:
        recording.missing += f"; what was before it can be seen ({len(recording)} steps)"
    return recording


def _next_frame(line: bytes, due: int, check: FrameCheck) -> Frame:
    frame = Frame(*parse_frame(line))
    if frame.index != due:
        raise ValueError(f"this is frame {frame.index}, but frame {due} is due (a line was lost or moved)")
    return check.take(frame)


def header_line(header: State) -> str:
    """The first line of a file. ValueError for notes that could not be read again."""
    if "notes" in header:
        try:
            check_notes(encoded(json_line(header["notes"])))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"notes must be a dict that JSON can hold: {error}") from error
    return json_line(header) + "\n"


def encoded(line: str) -> bytes:
    """A text that is no valid Unicode must not keep its line out of the file: a sign stands for it."""
    return line.encode(errors="replace")
