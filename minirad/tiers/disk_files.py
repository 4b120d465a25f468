"""Blocks of KV as files of one folder, which several processes may share; and threads that read and write it.

A file is whole or not there: it is written under a temporary name and then renamed. What is read is looked
at before it is believed: size, shapes, types, tokens, the parent's name, a checksum of the KV, and that it is
all numbers. Files are read, not mapped: one that is cut off meanwhile would end the process.

The folder holds at most so many bytes of blocks, whoever wrote them; the least recently used goes first.
"Used" is a file's time of modification: a hit sets it, the end of a path first, so that none is older than
those behind it, which are of no use without it. Times only rise, also where the clock goes back.

The folder may hold other things: what is not named as a block is, or is no file of its own (a link), is not
counted, read or deleted. One that cannot be written to (full, read-only, gone) is read only from then on.
Nothing here raises for what lies on a disk; `notes` tells it, and the tree passes it on (disk_cache.py).
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as as_safetensors
from torch import Tensor

from minirad.tiers.disk_names import FORMAT, Block, Layout

ENDED = "nothing is written any more"
MOST_HEADER = 4096  # bytes of a file beside its tensors
SCAN_EVERY = 1.0  # seconds: from then on a look at the folder is too old to keep its bound by
SCAN_SHARE = 0.05  # of the writer's time, for looks at a folder of very many files
OLD = 3600.0  # seconds after which a temporary file is nobody's any more
STEP_NS = 1000  # between the times of two blocks of one path; coarser clocks have them alike

# Other programs name files by a hash, too: these two say whose they are.
ENDING = ".minirad.safetensors"
_BLOCK = re.compile(r"[0-9a-f]{64}\.minirad\.safetensors", re.ASCII)
_HALF = re.compile(r"[0-9a-f]{64}\.minirad\.\d+-\d+\.tmp", re.ASCII)
_numbers = count(1)  # of temporary files, also of two stores in one process


class NotWritten(Exception):
    """A block was not written; the sentence says why."""


class Note(NamedTuple):
    """What happened on the disk: "written", "dropped" (why says it) or "broken" blocks."""

    what: str
    why: str
    blocks: int
    bytes: int = 0
    microseconds: int = 0


class BlockFiles:
    """The blocks of a folder. Every method may be called on any thread, and `has` takes no time.

    folder: made where it is not there. most_bytes: of all blocks in it.
    off: why nothing is written any more, "" while it is.

    Raises:
        ValueError: if there cannot be such a folder, or no block fits into it.
    """

    def __init__(self, folder: Path, most_bytes: int, layout: Layout) -> None:
        self.folder, self.most_bytes, self.layout = folder, most_bytes, layout
        self._largest = layout.nbytes + 8 * layout.tokens + MOST_HEADER
        if most_bytes < layout.nbytes:
            raise ValueError(
                f"disk_mb: {most_bytes:,} bytes have no room for one block of {layout.shape[0]} tokens, "
                f"which takes {layout.nbytes:,}"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"disk_dir {str(folder)!r} cannot be a folder: {error}") from error
        self.off = ""
        self.notes: deque[Note] = deque()
        self.warnings: deque[str] = deque()
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._index: dict[str, tuple[int, int]] = {}  # by name: bytes, and when it was used (ns)
        self._oldest: list[tuple[int, str]] = []  # a heap; an entry that is not as in the index is stale
        self._bad: set[str] = set()  # names whose file is not to be believed: it may be written over
        self._newest, self._bytes, self._scan_next = 0, 0, float("-inf")

    # ------------------------------------------------------------ what is there

    def has(self, name: str) -> bool:
        """Whether a block was there when the folder was last looked at."""
        return name in self._index and name not in self._bad

    def is_bad(self, name: str) -> bool:
        """Whether its file is not to be believed."""
        return name in self._bad

    @property
    def files(self) -> int:
        """Blocks in the folder, as far as is known."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of these."""
        return self._bytes

    def path(self, name: str) -> Path:
        """The file of a block."""
        return self.folder / f"{name}{ENDING}"

    def scan(self) -> None:
        """Looks at the whole folder; temporary files that somebody left behind long ago go."""
        found: dict[str, tuple[int, int]] = {}
        now, started = time.time(), time.monotonic()
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # gone meanwhile
                        if not entry.is_file(follow_symlinks=False):
                            continue
                        if _BLOCK.fullmatch(entry.name):
                            known = entry.stat()
                            found[entry.name[:64]] = known.st_size, known.st_mtime_ns
                        elif _HALF.fullmatch(entry.name) and abs(now - entry.stat().st_mtime) > OLD:
                            os.unlink(entry.path)
        except OSError:
            found = {}
        with self._lock:
            self._index, self._bad = found, self._bad & found.keys()
            self._bytes = sum(size for size, _ in found.values())
            self._newest = max([self._newest, *(stamp for _, stamp in found.values())])
            self._oldest = [(stamp, name) for name, (_, stamp) in found.items()]
            heapq.heapify(self._oldest)
            ended = time.monotonic()
            self._scan_next = ended + max(SCAN_EVERY, (ended - started) / SCAN_SHARE)

    def _note_file(self, name: str, size: int, stamp: int) -> None:
        with self._lock:
            self._bytes += size - self._index.get(name, (0, 0))[0]
            self._index[name] = size, stamp
            self._newest = max(self._newest, stamp)
            heapq.heappush(self._oldest, (stamp, name))
            if len(self._oldest) > 4 * len(self._index) + 1000:  # most entries are stale
                self._oldest = [(used, name) for name, (_, used) in self._index.items()]
                heapq.heapify(self._oldest)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._index.pop(name, (0, 0))[0]
            self._bad.discard(name)

    def touch(self, path: Sequence[str]) -> None:
        """The blocks of a path, first to last, are in use now. Those that are not there are left out."""
        with self._lock:
            now = max(time.time_ns(), self._newest + STEP_NS)
            self._newest = now + len(path) * STEP_NS
        for place, name in reversed(list(enumerate(path))):
            stamp = now + (len(path) - place) * STEP_NS
            try:
                os.utime(self.path(name), ns=(stamp, stamp))
            except FileNotFoundError:
                self._forget(name)
                continue
            except OSError:  # read-only: in this process it counts nevertheless
                pass
            size = self._index.get(name)
            if size is not None:
                self._note_file(name, size[0], stamp)

    # ------------------------------------------------------------ reading

    def read(self, block: Block) -> Tensor | None:
        """A block's KV, `layout.shape`; None if it is not there, or not what it should be."""
        try:
            with self.path(block.name).open("rb") as file:
                data = file.read(self._largest + 1)
        except (FileNotFoundError, NotADirectoryError):
            self._forget(block.name)
            return None
        except OSError as error:
            if not (os.name == "nt" and isinstance(error, PermissionError)):  # it is just being replaced
                self._broken(block.name, f"it cannot be read: {error}")
            return None
        try:
            kv = self._believed(data, block)
        except Exception as error:  # a stranger's file: whatever a reader of it may raise
            self._broken(block.name, str(error) or type(error).__name__)
            return None
        if block.name not in self._index:  # another process's
            self._note_file(block.name, len(data), self._newest)
        return kv

    def _believed(self, data: bytes, block: Block) -> Tensor:
        """The KV of a file's bytes; any exception if they are not this block's."""
        layout = self.layout
        _expect(len(data) <= self._largest, f"it has more than {self._largest} bytes")
        size = int.from_bytes(data[:8], "little")
        _expect(8 + size <= len(data), f"it is cut off after {len(data)} bytes")
        said = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        _expect(said.get("format") == FORMAT, f"its format is {said.get('format')!r:.40}")
        _expect(said.get("parent") == block.parent, "it has another parent")
        tensors: dict[str, Tensor] = tensors_of(data)
        _expect(set(tensors) == {"tokens", "kv"}, f"it holds {sorted(tensors)!r:.80}")
        tokens, kv = tensors["tokens"], tensors["kv"]
        _expect(tokens.dtype == torch.int64 and kv.dtype == layout.dtype, f"its KV is {kv.dtype}")
        _expect(tuple(kv.shape) == layout.shape, f"its KV has the shape {tuple(kv.shape)}")
        _expect(np.array_equal(tokens.numpy(), block.tokens), "it has other tokens")
        _expect(said.get("crc32") == _checksum(kv), "its checksum is wrong")
        _expect(_all_finite(kv), "not all of it are numbers")
        return kv

    def _broken(self, name: str, why: str) -> None:
        with self._lock:
            self._bad.add(name)
        self.notes.append(Note("broken", why, 1))
        self._warn(
            "broken", f"{self.path(name)} is skipped: {why}. (Others like it are skipped without a word.)"
        )

    # ------------------------------------------------------------ writing

    def write(self, block: Block, kv: Tensor, keep: Container[str] = ()) -> int:
        """Puts a block into the folder; the bytes that were written, 0 if it is there already.

        keep: names of blocks that are not to be deleted for it.

        Raises:
            NotWritten: saying why.
        """
        if self.off:
            raise NotWritten(ENDED)
        if self._is_there(block.name):
            return 0
        if not _all_finite(kv):
            raise NotWritten("not all of it are numbers")
        metadata = {"format": FORMAT, "parent": block.parent, "crc32": _checksum(kv)}
        tokens = torch.from_numpy(block.tokens)
        data = as_safetensors({"tokens": tokens, "kv": kv.contiguous()}, metadata)
        if not self._make_room(len(data), keep):
            raise NotWritten(
                ENDED if self.off else f"a folder of {self.most_bytes:,} bytes has no room for it"
            )
        half = self.folder / f"{block.name}.minirad.{os.getpid()}-{next(_numbers)}.tmp"
        try:
            half.write_bytes(data)
            return self._put(block.name, half, len(data))
        except OSError as error:
            with contextlib.suppress(OSError):
                half.unlink()
            self.turn_off(f"{self.folder} cannot be written to: {error}")
            raise NotWritten(ENDED) from error

    def _put(self, name: str, half: Path, size: int) -> int:
        try:
            os.replace(half, self.path(name))
        except PermissionError:
            if not self.path(name).exists():
                raise
            half.unlink()  # Windows: another process has it open, so it is there
            return 0
        stamp = max(time.time_ns(), self._newest + STEP_NS)
        with contextlib.suppress(OSError):
            os.utime(self.path(name), ns=(stamp, stamp))
        self._note_file(name, size, stamp)
        with self._lock:
            self._bad.discard(name)
        return size

    def _is_there(self, name: str) -> bool:
        """Another process may have written it meanwhile."""
        if name in self._bad:
            return False
        try:
            known = self.path(name).stat()
        except OSError:
            self._forget(name)
            return False
        if name not in self._index:
            self._note_file(name, known.st_size, known.st_mtime_ns)
        return True

    def _make_room(self, size: int, keep: Container[str] = ()) -> bool:
        """Deletes the least recently used until so many bytes more fit."""
        if time.monotonic() > self._scan_next:
            self.scan()
        undeleted = ""
        if size > self.most_bytes:
            return False
        while self._bytes + size > self.most_bytes and not self.off:
            with self._lock:
                stamp, name = heapq.heappop(self._oldest) if self._oldest else (0, "")
                if not name:
                    break
                known = self._index.get(name)
                if known is None or known[1] != stamp:
                    continue
                if name in keep:  # all that are less recently used are gone
                    heapq.heappush(self._oldest, (stamp, name))
                    return False
            undeleted = self._delete(name, known[0], stamp) or undeleted
        if undeleted and self._bytes + size > self.most_bytes:
            self.turn_off(f"{self.folder} is too full, and nothing in it can be deleted: {undeleted}")
        return not self.off and self._bytes + size <= self.most_bytes

    def _delete(self, name: str, size: int, stamp: int) -> str:
        """Deletes a block, unless another process hit it; why it cannot be deleted, or "".

        One that cannot is no candidate until the next scan: on Windows somebody reads it now.
        """
        try:
            used = self.path(name).stat().st_mtime_ns
            if used > stamp:  # another process hit it
                self._note_file(name, size, used)
                return ""
            self.path(name).unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            return "" if os.name == "nt" else str(error)
        else:
            self.notes.append(Note("dropped", "the least recently used make room", 1, size))
        self._forget(name)
        return ""

    def trim(self) -> None:
        """Keeps the bound, whatever other processes wrote meanwhile."""
        self.scan()
        if not self.off:
            self._make_room(0)

    def turn_off(self, why: str) -> None:
        """From now on nothing is written."""
        if not self.off:
            self.off = why
            self._warn("off", f"{why}; what is there is still read")

    def _warn(self, kind: str, sentence: str) -> None:
        with self._lock:
            if kind not in self._warned:
                self._warned.add(kind)
                self.warnings.append(sentence)


def _checksum(kv: Tensor) -> str:
    flat: Any = kv.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(flat):08x}"


def _all_finite(kv: Tensor) -> bool:
    """No NaN and no infinity: any of these would be in the sum, too, which is quicker to have."""
    return bool(kv.sum(dtype=torch.float32).isfinite()) or bool(kv.isfinite().all())


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class Worker:
    """A thread that does jobs one after another, and ends with the interpreter. It begins with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Callable[[], Any]] = deque()
        self._changed = threading.Condition()
        self._busy = self._stopped = False
        self._thread: threading.Thread | None = None
        self.failed: deque[Exception] = deque()

    def submit(self, job: Callable[[], Any]) -> None:
        """Does a job after all others; never after `stop`."""
        with self._changed:
            if self._stopped:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def idle(self, seconds: float) -> bool:
        """Waits until nothing is to be done; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs or self._busy), seconds)

    def stop(self, seconds: float) -> bool:
        """Takes no job any more, and waits so long for those that there are; the rest is left out."""
        self.end()
        done = self.idle(seconds)
        with self._changed:
            self._jobs.clear()
        return done

    def end(self) -> None:
        """Takes no job any more; the thread ends after those that there are."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopped)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Exception as error:  # a defect of ours, told by `failed`: the thread goes on
                self.failed.append(error)
            del job
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class Reading:
    """Blocks of a path that are being read, in their order, up to the first that is not to be had."""

    def __init__(self, files: BlockFiles, before: Iterable[Block], blocks: Sequence[Block]) -> None:
        """before: the blocks above them, which are in use, too."""
        self._files, self._before, self.blocks = files, list(before), list(blocks)
        self.arrived: list[Tensor] = []
        self.done = threading.Event()

    def run(self) -> None:
        """On the reader's thread."""
        try:
            for block in self.blocks:
                kv = self._files.read(block)
                if kv is None:
                    break
                self.arrived.append(kv)
        finally:
            self.done.set()
        missing = self.blocks[len(self.arrived) :]
        if missing and self._files.is_bad(missing[0].name):
            for block in missing[1:]:  # what spoilt it may have spoilt these: then they are written anew, too
                self._files.read(block)
        if self.arrived:
            hit = self._before + self.blocks[: len(self.arrived)]
            self._files.touch([block.name for block in hit])
