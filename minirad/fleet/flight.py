"""The flight recorder of a stream: what a follower tells becomes frames of a recording, for days.

    flight = Flight(endpoints, block_size=16, path="fleet.jsonl")
    with Follower(endpoints, replays, tell=flight.take):
        ...                            # flight.tick() every 0.1 s or so; flight.recording is to be drawn
    flight.close()

A frame is one batch while there are few, and all that came within a tenth of a second while there are many.

In memory a recording is bounded. Past the bound its older half goes: `flight.recording` is another one from
then on, a new *chapter*, which starts with the state at the cut; who draws the old one may go on with it.
On disk there are FILE.jsonl, FILE-2.jsonl and so on, each a whole recording of at most so many bytes that
starts with the state at its beginning, of which the newest are kept. A disk that is full stops neither: it is
said, and when there is room again a new file begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from minirad.errors import path as a_path
from minirad.fleet.blocks import MOST_BLOCKS
from minirad.fleet.follow import Delivered, Gap, Restart, Told
from minirad.fleet.follow import State as RankState
from minirad.fleet.tree import FleetTree
from minirad.fleet.wire import Cleared, Stored
from minirad.observe.event import Event, ReplayState
from minirad.observe.fleet_events import (
    LONGEST_TEXT,
    BatchesTaken,
    GapSeen,
    RankCleared,
    RankRestarted,
    RankStateSeen,
    TroubleSeen,
    empty_state,
)
from minirad.observe.reading import LONGEST_LINE, SCHEMA
from minirad.observe.recording import Recording, encoded, header_line
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State

TOGETHER = 0.1  # seconds of which the batches are one frame
MOST_NUMBERS = 12_000_000  # of a chapter; a number takes 8 to 40 bytes
SILENCES = 5.0  # seconds after which it is told that a rank is silent, where nothing else is to be told
LARGEST_FRAME = 2_000_000  # numbers in messages that are waited for to be one frame
LARGEST_FILE = 64 << 20  # bytes
MOST_FILES = 16
KEYFRAME_EVERY = 4 << 20  # bytes of a file at least
TRY_AGAIN = 5.0  # seconds after a file could not be written
MOST_TROUBLES = 3  # of a rank in a frame
_NUMBERS_OF_AN_EVENT = 16
_NUMBERS_OF_A_NODE = 32


class FlightRecording(Recording):
    """A chapter of a stream's recording, which grows. chapter: counted from 1.

    numbers: about how many numbers it keeps.
    """

    def __init__(self, header: State, chapter: int) -> None:
        super().__init__(header)
        self.chapter = chapter
        self.numbers = self.numbers_of_start = _numbers_of_state(header["start"])
        self.ends: list[int] = []  # numbers up to the end of each frame
        self._since, self._due = 0, 1000  # numbers since the last keyframe, and when there is to be one

    def add(self, step: int, events: tuple[Event, ...], state: ReplayState) -> None:
        """The next frame; state: the one after it, of which a keyframe is made now and then."""
        added = _numbers_of_events(events)
        self._since += added
        keyframe = None
        if (
            self._since >= self._due and self.frames
        ):  # with one at the first frame it would be a silent tree's
            changed = [n for n in state.nodes.changed() if n in state.nodes]
            tokens = sum(len(state.nodes.look(number)["tokens"]) for number in changed)
            keyframe = state.snapshot()
            cost = len(state.nodes) + tokens + _NUMBERS_OF_A_NODE * len(changed)
            added += cost
            self._since, self._due = 0, max(1000, cost)
        self.numbers += added
        self.frames.append(Frame(len(self.frames), step, events, keyframe))
        self.ends.append(self.numbers)

    def newer_half(self) -> FlightRecording:
        """The next chapter: the frames after the first keyframe behind the middle of this one."""
        middle = (self.numbers + self.numbers_of_start) // 2
        last = len(self.frames) - 2  # something is left
        first = min(bisect_left(self.ends, middle), last)
        marked = (at for at in range(first, last + 1) if self.frames[at].keyframe is not None)
        cut = next(marked, first)
        state = self.frames[cut].keyframe or self.state(cut)
        chapter = FlightRecording({**self.header, "start": state}, self.chapter + 1)
        for frame in self.frames[cut + 1 :]:
            # The first frame of a recording has no keyframe, as it would tell that there is one in each.
            keyframe = frame.keyframe if chapter.frames else None
            chapter.numbers += self.ends[frame.index] - self.ends[frame.index - 1]
            chapter.frames.append(replace(frame, index=len(chapter.frames), keyframe=keyframe))
            chapter.ends.append(chapter.numbers)
        chapter._since, chapter._due = self._since, self._due
        return chapter


@dataclass(slots=True)
class _Pending:
    """What came since the last frame, of one rank."""

    seq: int = -1
    batches: int = 0
    replayed: int = 0
    unknown: int = 0
    troubles: int = 0


@dataclass(slots=True)
class _Frame:
    """What came since the last frame. since: when the first of it did; batch: when the first batch did.

    states: of ranks. waits: nothing came but that ranks are silent, or no longer.
    """

    since: float
    waits: bool = True
    batch: float | None = None
    states: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ranks: dict[int, _Pending] = field(default_factory=dict)
    cleared: set[int] = field(default_factory=set)
    restarted: set[int] = field(default_factory=set)
    numbers: int = 0
    at: float = 0.0


class Flight:
    """Turns what a follower tells into a recording in memory, and in files if there is a path.

    endpoints: of each rank, as they are shown. block_size: None or 0: that of the first block that is told.
    path: of the first file (replaced if it is there; later ones never replace one). tokenizer: a folder, or
    None. notes: texts for the header (title, workload). most_numbers: of a chapter. most_bytes: of a file.
    tree: an empty one, in the place of our own.
    trouble: one sentence while nothing can be written, else "". files: those that are kept, the oldest first.

    OSError if the first file cannot be written. May be used from several threads.
    """

    def __init__(
        self, endpoints: Sequence[str] = (), *, block_size: int | None = None, path: str | Path | None = None,
        tokenizer: str | None = None, notes: State | None = None, most_numbers: int = MOST_NUMBERS,
        most_bytes: int = LARGEST_FILE, most_files: int = MOST_FILES, tree: FleetTree | None = None,
    ) -> None:  # fmt: skip
        self.tree = FleetTree() if tree is None else tree
        self._endpoints, self._most = list(endpoints), most_numbers
        self._state = ReplayState(empty_state(block_size or 1))
        self._size_known = bool(block_size)
        header = {
            "minirad": SCHEMA, "config": {}, "model": {"parameters": None, "tokenizer": tokenizer or ""},
            "notes": dict(notes or {}), "start": self._state.snapshot(),
        }  # fmt: skip
        self.recording = FlightRecording(header, 1)
        self._lock = threading.RLock()
        self._frame: _Frame | None = None
        self._ended = self._begun_anew = float("-inf")  # the last frame; the last one that a restart ended
        self._counted = [0, 0, 0]
        self._full: set[int] = set()  # ranks that hold more than is kept
        self._files: _Files | None = None
        if path is not None:
            self._files = _Files(Path(a_path("path", path)), header, most_bytes, most_files)

    @property
    def trouble(self) -> str:
        """Why nothing is written at present, in one sentence; "": it is."""
        return self._files.trouble if self._files is not None else ""

    @property
    def files(self) -> list[Path]:
        """The files that are kept, the oldest first."""
        return list(self._files.kept) if self._files is not None else []

    def take(self, told: Told, now: float | None = None) -> None:
        """What a follower tells; now: time.monotonic()."""
        with self._lock:
            now = time.monotonic() if now is None else now
            if isinstance(told, Restart) and now - self._begun_anew >= TOGETHER:
                self._begun_anew = now
                self._cut(now)  # a rank's numbers before and after it are of two frames
            if self._frame is None:
                self._frame = _Frame(now)
            frame = self._frame
            self._note(told, frame, now)
            if (now - self._ended >= TOGETHER and not frame.waits) or frame.numbers > LARGEST_FRAME:
                self._cut(now)

    def note(self, event: Event, now: float | None = None) -> None:
        """An event of somebody else (a router's, observe/route_events.py) for the frame in progress.

        It has to fit the state: a worker is told before its first request.
        """
        with self._lock:
            now = time.monotonic() if now is None else now
            if self._frame is None:
                self._frame = _Frame(now)
            self._frame.waits = False
            self._frame.events.append(event)
            if now - self._ended >= TOGETHER:
                self._cut(now)

    def tick(self, now: float | None = None) -> None:
        """Ends a frame for which nothing more is waited; to be called every 0.1 s or so."""
        with self._lock:
            now = time.monotonic() if now is None else now
            frame = self._frame
            if frame is not None and now - frame.since >= (SILENCES if frame.waits else TOGETHER):
                self._cut(now)

    def close(self, now: float | None = None) -> None:
        """Ends the frame in progress, and writing."""
        with self._lock:
            self._cut(time.monotonic() if now is None else now)
            if self._files is not None:
                self._files.close()

    # ------------------------------------------------------------ a frame

    def _note(self, told: Told, frame: _Frame, now: float) -> None:
        rank, events = told.rank, frame.events
        if isinstance(told, RankState):
            was = self._known_state(rank)
            frame.states[rank] = told.state
            frame.waits = frame.waits and {was, told.state} <= {"live", "silent"}
            return
        frame.waits = False
        if isinstance(told, Delivered):
            frame.batch = now if frame.batch is None else frame.batch
            self._take_batch(told, frame)
        elif isinstance(told, Gap):
            last = events[-1] if events else None
            if isinstance(last, GapSeen) and (last.rank, last.last + 1) == (rank, told.first):
                events[-1] = replace(last, last=told.last)
            else:
                events.append(GapSeen(rank, told.first, told.last, _short(told.why)))
        elif isinstance(told, Restart):
            if rank not in frame.restarted:
                frame.restarted.add(rank)
                events.append(RankRestarted(rank, _short(told.why)))
            self.tree.clear(rank)
        else:
            self._note_trouble(rank, told.text, frame)

    def _known_state(self, rank: int) -> str:
        """How a rank is, as of the last frame; "": nothing was told of it."""
        return next((each["state"] for each in self._state.tree["ranks"] if each["rank"] == rank), "")

    def _states(self, frame: _Frame) -> list[Event]:
        """What became of the ranks' connections since the last frame."""
        found: list[Event] = []
        for rank, state in frame.states.items():
            if state != self._known_state(rank):
                where = self._endpoints[rank] if rank < len(self._endpoints) else ""
                found.append(RankStateSeen(rank, _short(where), state))
        return found

    def _note_trouble(self, rank: int, text: str, frame: _Frame) -> None:
        known = frame.ranks.setdefault(rank, _Pending())
        known.troubles += 1
        if known.troubles <= MOST_TROUBLES:
            frame.events.append(TroubleSeen(rank, _short(text)))

    def _take_batch(self, told: Delivered, frame: _Frame) -> None:
        batch, rank = told.batch, told.rank
        known = frame.ranks.setdefault(rank, _Pending())
        known.seq = told.seq
        known.batches += 1
        known.replayed += told.replayed
        known.unknown += batch.unknown
        frame.at = batch.ts if batch.ts > 0 else 0.0
        if batch.trouble:
            self._note_trouble(rank, batch.trouble, frame)
        for event in batch.events:
            if isinstance(event, Cleared):
                if rank not in frame.cleared:
                    frame.cleared.add(rank)
                    frame.events.append(RankCleared(rank))
            else:
                frame.numbers += len(event.hashes)
                if isinstance(event, Stored):
                    frame.numbers += len(event.tokens) * event.block_size
                    if not self._size_known and event.tokens and not event.other_group:
                        self._know_size(event.block_size)
            self.tree.take(rank, event)
        if self.tree.rank(rank).too_many and rank not in self._full:
            self._full.add(rank)
            self._note_trouble(
                rank, f"it holds more than {MOST_BLOCKS:,} blocks: the others are left out", frame
            )

    def _know_size(self, size: int) -> None:
        """The first block tells how large blocks are: what is recorded starts anew with it."""
        self._size_known = True
        self._state.tree["page_size"] = size
        header = {**self.recording.header, "start": self._state.snapshot()}
        self.recording = FlightRecording(header, self.recording.chapter + 1)
        if self._files is not None:
            self._files.begin_anew(header)

    def _cut(self, now: float) -> None:
        """Ends the frame in progress, if there is one."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        states = self._states(frame)
        if frame.waits and not states:  # a rank that was silent, and no longer is
            return
        self._ended = now
        step = self._state.rest["step"] + sum(known.batches for known in frame.ranks.values())
        events = (*states, *frame.events, *self.tree.changes(step), self._sums(frame, step, now))
        if self._files is not None:
            self._files.before(step, events, self._state, now)
        for event in events:
            self._state.apply(event)
        if self._files is not None:
            self._files.after(self._state, now)
        self.recording.add(step, events, self._state)
        most = max(self._most, 4 * self.recording.numbers_of_start)
        if self.recording.numbers > most and len(self.recording) > 1:
            self.recording = self.recording.newer_half()

    def _sums(self, frame: _Frame, step: int, now: float) -> BatchesTaken:
        came = sorted((rank, known) for rank, known in frame.ranks.items() if known.batches)
        forests = self.tree.ranks.values()
        totals = [sum(getattr(each, name) for each in forests) for name in ("stored", "removed", "ignored")]
        stored, removed, ignored = (total - was for total, was in zip(totals, self._counted, strict=True))
        self._counted = totals
        return BatchesTaken(
            step, tuple(rank for rank, _ in came), tuple(known.seq for _, known in came),
            tuple(known.batches for _, known in came), tuple(known.replayed for _, known in came),
            tuple(known.unknown for _, known in came), stored, removed, ignored,
            0.0 if frame.batch is None else round(now - frame.batch, 6), frame.at,
        )  # fmt: skip


# ---------------------------------------------------------------------- files


class _Files:
    """The files of a flight: each holds a header and whole lines at any moment, however writing them ends."""

    def __init__(self, path: Path, header: State, most_bytes: int, most_files: int) -> None:
        self.kept: list[Path] = []
        self.trouble = ""
        self._path, self._most, self._most_files = path, most_bytes, most_files
        self._header = header
        self._file: IO[bytes] | None = None
        self._number = 1
        self._whole = 0  # bytes of whole lines
        self._index = 0  # of the next frame in this file
        self._again = float("-inf")  # when to try again
        self._next: tuple[int, tuple[Event, ...], bytes] | None = None
        self._state_size = self._since_state = 0  # bytes of the last state in the file, and after it
        self._begin(header, path.open("wb", buffering=0), path)

    def begin_anew(self, header: State) -> None:
        """What was written so far has nothing in it: the first file begins again with another state."""
        self._header = header
        if self._file is None or len(self.kept) != 1:
            return
        try:
            self._file.seek(0)
            self._file.truncate()
            self._write_header(header)
        except OSError as error:
            self._fail(error, time.monotonic())

    def before(self, step: int, events: tuple[Event, ...], state: ReplayState, now: float) -> None:
        """A frame is to be written; state: the one before it, with which a new file may have to begin."""
        line = encoded(Frame(self._index, step, events).to_json() + "\n")
        if self._file is not None and self._index and self._whole + len(line) > self._most:
            self._close()
        if self._file is None and now >= self._again:
            self._go_on(state, now)
            line = encoded(Frame(self._index, step, events).to_json() + "\n")
        self._next = step, events, line

    def after(self, state: ReplayState, now: float) -> None:
        """The frame is written; state: the one after it."""
        assert self._next is not None
        (step, events, line), self._next = self._next, None
        if self._file is None:
            return
        if len(line) > LONGEST_LINE:  # nobody would read it: the next file begins with what it led to
            self._close()
            return
        keyframe = b""
        if self._index and self._since_state > max(KEYFRAME_EVERY, 8 * self._state_size):
            keyframe = encoded(Frame(self._index, step, events, state.snapshot()).to_json() + "\n")
            fits = len(keyframe) <= LONGEST_LINE and self._whole + len(keyframe) <= self._most
            self._state_size, self._since_state = len(keyframe), 0
            keyframe = keyframe if fits else b""
        try:
            self._write(keyframe or line)
        except OSError as error:
            self._fail(error, now)
            return
        self._index += 1
        self._since_state += len(line)

    def close(self) -> None:
        """Ends writing."""
        self._again = float("inf")
        self._close()

    def _go_on(self, state: ReplayState, now: float) -> None:
        """A new file begins with this state."""
        header = {**self._header, "start": state.snapshot()}
        while self._file is None:
            self._number += 1
            path = self._path.with_name(f"{self._path.stem}-{self._number}{self._path.suffix}")
            try:
                file = path.open("xb", buffering=0)
            except FileExistsError:
                continue
            except OSError as error:
                self._number -= 1
                return self._fail(error, now)
            try:
                self._begin(header, file, path)
            except OSError as error:
                self._number -= 1
                return self._fail(error, now)
        self.trouble = ""
        while len(self.kept) > self._most_files:
            self._delete(self.kept.pop(0))

    def _begin(self, header: State, file: IO[bytes], path: Path) -> None:
        """Writes the first line; OSError, and no file, if that fails."""
        self._file = file
        try:
            self._write_header(header)
        except OSError:
            self._close()
            self._delete(path)
            raise
        self.kept.append(path)

    def _write_header(self, header: State) -> None:
        line = encoded(header_line(header))
        if len(line) > LONGEST_LINE:
            raise OSError(0, f"the state takes {len(line) >> 20} MiB, more than a line of it may have")
        self._whole = self._index = 0
        self._write(line)
        self._state_size, self._since_state = len(line), 0

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        done = 0
        while done < len(data):
            done += self._file.write(data[done:])
        self._whole += done

    def _fail(self, error: OSError, now: float) -> None:
        """Writing ends for now. Of a line of which a part may be written nothing is left, if that can be."""
        why = error.strerror or str(error)
        self.trouble = (
            f"{self._path} cannot be written ({why}): what comes is kept in memory, "
            "and a new file begins when there is room again"
        )
        self._again = now + (TRY_AGAIN if error.errno else 12 * TRY_AGAIN)  # a large state stays so for long
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @staticmethod
    def _delete(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"


def _numbers_of_events(events: Sequence[Event]) -> int:
    rows = [getattr(event, name, ()) for event in events for name in ("tokens", "matches", "loads")]
    return _NUMBERS_OF_AN_EVENT * len(events) + sum(len(row) for row in rows if isinstance(row, tuple))


def _numbers_of_state(state: State) -> int:
    return sum(_NUMBERS_OF_A_NODE + len(node["tokens"]) for node in state["tree"]["nodes"])
