"""The third tier: a folder's blocks as the engine's thread sees it, which never waits long for a disk.

What is to be written is copied and put into a queue of bounded size; one thread writes it, and what finds no
room in the queue is not written. What is to be read is read by another thread, for which the engine's waits
`READ_WAIT` seconds at most: what has not arrived by then is computed, and is there for the next who asks.
While a reading is late nobody waits again.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from minirad.tiers.disk_files import BlockFiles, Note, NotWritten, Reading, Worker
from minirad.tiers.disk_names import Block, Layout

READ_WAIT = 0.5  # seconds that a step waits for one request's blocks
CLOSE_WAIT = 20.0  # seconds that an end waits for what is queued
QUEUE_BYTES = 256 << 20  # of blocks that wait to be written; one block always may
MOST_READ = 1 << 30  # bytes of one reading


@dataclass(slots=True)
class DiskStats:
    """Running totals of this engine. read: tokens that came from the disk into host memory.

    late: readings that were not waited for; broken: files that were skipped; dropped: blocks that were not
    written, or that were deleted to make room. Seconds: of waiting for what was read, of writing.
    """

    read: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    written_seconds: float = 0.0
    dropped: int = 0
    broken: int = 0
    late: int = 0

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Arrived(NamedTuple):
    """What a reading brought. late: blocks that were not waited for."""

    kv: list[Tensor]
    microseconds: int
    late: int = 0


class DiskTier:
    """Blocks of KV in a folder.

    folder, most_bytes: where, and how much may lie there. layout: of a block's KV.

    Attributes:
        stats: what was read and written so far.
        files: the folder itself; `files.files` and `files.nbytes` say what is in it.

    Raises:
        ValueError: if there cannot be such a folder.
    """

    read_wait = READ_WAIT
    queue_bytes = QUEUE_BYTES

    def __init__(self, folder: Path, most_bytes: int, layout: Layout) -> None:
        self.layout = layout
        self.files = BlockFiles(folder, most_bytes, layout)
        self.stats = DiskStats()
        self.closed = False
        self._writer, self._reader = Worker("minirad disk writer"), Worker("minirad disk reader")
        self._queued: dict[str, None] = {}  # names of blocks in the queue, oldest first
        self._late: Reading | None = None
        self._end_with_this()
        self._writer.submit(self.files.scan)

    def _end_with_this(self) -> None:
        """Nothing that a thread holds leads back here, so an engine that is let go ends its threads."""
        weakref.finalize(self, _stop, self._writer, self._reader).atexit = False  # what is queued is written
        _writers.add(self._writer)

    def last_words(self) -> None:
        """Whoever is being let go may still put something: its own thread may have been told to end."""
        self._writer = Worker("minirad disk writer")
        self._end_with_this()

    # ------------------------------------------------------------ writing

    @property
    def writes(self) -> bool:
        """Something that is put would be written."""
        return not (self.closed or self.files.off)

    def has(self, block: Block) -> bool:
        """It is there already, or on its way."""
        return self.files.has(block.name) or block.name in self._queued

    def room(self) -> int:
        """How many blocks more the queue takes: one at least while it is empty."""
        free = self.queue_bytes // self.layout.nbytes - len(self._queued)
        return max(free, 0 if self._queued else 1)

    def put(self, path: Sequence[Block], blocks: Sequence[tuple[Block, Tensor]]) -> None:
        """Writes blocks of a path in time. path: from its beginning to the last of them. KV: copies."""
        self._queued.update((block.name, None) for block, _ in blocks)
        files, queued, names = self.files, self._queued, [block.name for block in path]
        self._writer.submit(lambda: _write(files, queued, names, blocks))

    def refuse(self, blocks: int, why: str) -> None:
        """These are not written."""
        self.files.notes.append(Note("dropped", why, blocks))

    @property
    def queued(self) -> int:
        """Blocks that are not written yet."""
        return len(self._queued)

    def flush(self, seconds: float = CLOSE_WAIT) -> bool:
        """Waits until all that was put is written; False if that takes longer."""
        return self._writer.idle(seconds)

    # ------------------------------------------------------------ reading

    def read(self, before: Sequence[Block], blocks: Sequence[Block]) -> Arrived:
        """The KV of the first of `blocks` that are there; they follow the path of `before`.

        Waits `read_wait` seconds at most, and not at all while an earlier reading is late.
        """
        started = time.perf_counter()
        late = self._late
        if late is not None and late.done.is_set():
            self._late = None
        if late is not None and blocks and late.blocks[0].name == blocks[0].name:
            arrived = list(late.arrived)  # perhaps only now, perhaps not all of it yet
            if arrived or not late.done.is_set():
                return self._told(arrived[: len(blocks)], started, 0)
        if self.closed or self._late is not None:
            return self._told([], started, 0)
        reading = Reading(self.files, before, blocks[: max(MOST_READ // self.layout.nbytes, 1)])
        self._reader.submit(reading.run)
        if reading.done.wait(self.read_wait):
            return self._told(reading.arrived, started, 0)
        self._late = reading
        arrived = list(reading.arrived)
        return self._told(arrived, started, len(reading.blocks) - len(arrived))

    def _told(self, arrived: list[Tensor], started: float, late: int) -> Arrived:
        seconds = time.perf_counter() - started
        self.stats.late += late > 0
        self.stats.read_seconds += seconds
        return Arrived(arrived, int(seconds * 1e6), late)

    # ------------------------------------------------------------ what happened meanwhile

    def notes(self) -> list[Note]:
        """What the threads did since the last time, counted in `stats`."""
        notes: list[Note] = []
        while self.files.notes:
            notes.append(note := self.files.notes.popleft())
            if note.what == "written":
                self.stats.written_blocks += note.blocks
                self.stats.written += note.blocks * self.layout.shape[0]
                self.stats.written_bytes += note.bytes
                self.stats.written_seconds += note.microseconds / 1e6
            elif note.what == "dropped":
                self.stats.dropped += note.blocks
            else:
                self.stats.broken += note.blocks
        return notes

    def warnings(self) -> list[str]:
        """Sentences that nobody was warned with yet."""
        for worker in (self._writer, self._reader):
            if worker.failed:
                self.files.turn_off(f"a thread of it failed: {worker.failed.popleft()!r}")
        return [self.files.warnings.popleft() for _ in range(len(self.files.warnings))]

    def close(self, seconds: float = CLOSE_WAIT) -> bool:
        """Writes what is queued and ends the threads; False if that takes longer, and the rest is lost."""
        if self.closed:
            return True
        self.closed = True
        if self._queued and not self.files.off:
            self._writer.submit(self.files.trim)
        self._reader.end()
        return self._writer.stop(seconds)


def _write(
    files: BlockFiles, queued: dict[str, None], path: list[str], blocks: Sequence[tuple[Block, Tensor]]
) -> None:
    """On the writer's thread. The path is touched before, so that all others make room for it first."""
    started, keep, sizes = time.perf_counter(), frozenset(path), []
    try:
        files.touch(path)
        for block, kv in blocks:
            sizes.append(files.write(block, kv, keep))
    except NotWritten as error:  # what follows it would not be found without it
        files.notes.append(Note("dropped", str(error), len(blocks) - len(sizes)))
    finally:
        for block, _ in blocks:
            queued.pop(block.name, None)
    written = [size for size in sizes if size]
    if written:
        files.touch(path)
        micros = int((time.perf_counter() - started) * 1e6)
        files.notes.append(Note("written", "", len(written), sum(written), micros))


_writers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _stop(*workers: Worker) -> None:
    for worker in workers:
        worker.end()


@atexit.register
def _at_exit() -> None:
    """Waits for the writers of tiers that were let go; those of open trees are closed: see disk_cache.py."""
    deadline = time.monotonic() + CLOSE_WAIT
    for writer in list(_writers):
        writer.stop(max(deadline - time.monotonic(), 0.0))
