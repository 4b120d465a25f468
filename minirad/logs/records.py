"""The records of a log file, one at a time: JSON lines, one JSON list, or JSON objects one after another.

Compressed (.gz) files are known by their first bytes. What cannot be read is a record, too: it says why, and
the lines after it are read. A list that breaks cannot be picked up again; its last record says so.

Does not know what a record means.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

MOST_BYTES = 1 << 28  # of one line or entry: what is longer is left out, memory stays bounded
CHUNK = 1 << 20
_DAMAGED = (OSError, EOFError, zlib.error)  # what reading a damaged archive raises
_NEAR = 16  # characters: an error so near to the end may only mean that there is more to read


Bytes: TypeAlias = "io.BufferedReader[Any]"


class Record(NamedTuple):
    """line: from 1, where it begins. why: "" or why there is no value; text: because it is no UTF-8."""

    line: int
    where: str
    value: Any = None
    why: str = ""
    text: bool = False


class Counted(io.RawIOBase):
    """A stream that knows how many bytes were taken from it, for a progress bar; cannot be searched."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class _Unpacked(io.RawIOBase):
    """What a .gz holds, as far as it can be read: in the pieces that come, or a damaged end would take whole
    buffers before it along."""

    def __init__(self, stream: Bytes) -> None:
        self._gzip = gzip.GzipFile(fileobj=stream)
        self._damage: Exception | None = None  # said at each look: behind a cut header gzip sees a mere end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._damage is not None:
            raise self._damage
        try:
            data = self._gzip.read1(len(buffer))
        except _DAMAGED as error:
            self._damage = error
            raise
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def opened(source: Path | BinaryIO) -> Iterator[tuple[Bytes, Counted]]:
    """The bytes of a log, unpacked, and what counts how many were read. A stream is not closed."""
    file = source.open("rb") if isinstance(source, Path) else source
    try:
        counted = Counted(file)
        stream: Bytes = io.BufferedReader(counted, CHUNK)
        if stream.peek(2)[:2] == b"\x1f\x8b":
            stream = io.BufferedReader(_Unpacked(stream), CHUNK)
        yield stream, counted
    finally:
        if isinstance(source, Path):
            file.close()


def first_line(stream: Bytes) -> tuple[int, bytes]:
    """The first line that is not blank and its number; (number, b"") at the end of the file."""
    number = 0
    while True:
        number += 1
        raw = stream.readline(MOST_BYTES)
        if not raw:
            return number, b""
        stripped = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if stripped.strip():
            return number, stripped


def peeked(stream: Bytes) -> bytes:
    """What comes next, some of it; nothing where it cannot be read."""
    try:
        return stream.peek(CHUNK)[:CHUNK]
    except _DAMAGED:
        return b""


def records(stream: Bytes) -> Iterator[Record]:
    """All records. A damaged .gz ends them with a record that says so."""
    try:
        number, line = first_line(stream)
        opening = line.strip()
        if opening.startswith(b"[") and not _is_a_line(opening, stream):
            yield from _Values(stream, line.lstrip()[1:], number, "entry").values()
        elif opening == b"{":
            yield from _Values(stream, line, number, "object").values()
        else:
            yield from _lines(stream, line, number)
    except _DAMAGED as error:
        yield Record(0, "the end", why=f"it cannot be read on: {error}")


def _is_a_line(opening: bytes, stream: Bytes) -> bool:
    """Whether a list is only the first of many lines: it ends in its line, and another follows."""
    if len(opening) >= CHUNK:
        return False
    following = peeked(stream).strip()
    try:
        return bool(following) and isinstance(json.loads(opening), list)
    except (ValueError, RecursionError):
        return False


def _lines(stream: Bytes, raw: bytes, number: int) -> Iterator[Record]:
    while raw:
        if len(raw) >= MOST_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(CHUNK)
            yield Record(number, f"line {number}", why=f"longer than {MOST_BYTES >> 20} MiB")
        else:
            record = _parsed(raw, number)
            if record is not None:
                yield record
        raw = stream.readline(MOST_BYTES)
        number += 1


def _parsed(raw: bytes, number: int) -> Record | None:
    where = f"line {number}"
    try:
        line = raw.decode().strip()
        return Record(number, where, json.loads(line)) if line else None
    except UnicodeDecodeError as error:
        return Record(number, where, why=f"no UTF-8 text: {error.reason}", text=True)
    except json.JSONDecodeError as error:
        return Record(number, where, why=f"no JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 100,000 brackets
        told = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return Record(number, where, why=f"no JSON that can be read: {told}")


class _Values:
    """JSON values one after another, with or without commas, read in pieces."""

    def __init__(self, stream: Bytes, start: bytes, line: int, called: str) -> None:
        self._stream, self._called, self._line = stream, called, line
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self._decode = json.JSONDecoder().raw_decode
        self._start = start

    def _more(self, data: bytes) -> None:
        text = self._utf8.decode(data, final=not data)
        self._ended = not data
        self._line += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :] + text, 0

    def _skip(self) -> bool:
        """On to the next value; False at the end of the list or of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n,":
                self._at += 1
            if self._at < len(self._text):
                return self._called == "object" or self._text[self._at] != "]"
            if self._ended:
                return False
            self._more(self._stream.read(CHUNK))

    def values(self) -> Iterator[Record]:
        number = 0
        while True:
            number += 1
            try:
                if number == 1:
                    self._more(self._start)
                if not self._skip():
                    yield from self._end(number)
                    return
                line = self._line + self._text.count("\n", 0, self._at)
                yield Record(line, f"{self._called} {number}", self._next())
            except UnicodeDecodeError as error:
                yield self._broken(number, f"no UTF-8 text: {error.reason}", text=True)
                return
            except json.JSONDecodeError as error:
                line = self._line + self._text.count("\n", 0, error.pos)
                yield self._broken(number, f"no JSON: {error.msg}", line)
                return
            except (ValueError, RecursionError) as error:
                told = "it is nested too deeply" if isinstance(error, RecursionError) else error
                yield self._broken(number, f"no JSON that can be read: {told}")
                return

    def _end(self, number: int) -> Iterator[Record]:
        """Nothing may follow a list, nor may its end be missing."""
        if self._called == "object":
            return
        if self._at >= len(self._text):
            yield self._broken(number, "no JSON: the list has no end")
            return
        self._at += 1
        while self._at < len(self._text) or not self._ended:
            rest = self._text[self._at :].lstrip()
            if rest:
                line = self._line + self._text.count("\n", 0, len(self._text) - len(rest))
                yield Record(
                    line, f"line {line}", why="it stands behind the end of a list, with all after it"
                )
                return
            self._at = len(self._text)
            self._more(self._stream.read(CHUNK))

    def _broken(self, number: int, why: str, line: int | None = None, text: bool = False) -> Record:
        line = line or self._line
        return Record(
            line, f"line {line}", why=f"{why} ({self._called} {number}, and all after it)", text=text
        )

    def _next(self) -> Any:
        size = CHUNK
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                cut = (
                    isinstance(value, (int, float)) and end >= len(self._text) - _NEAR
                )  # perhaps "1." of 1.5
                if self._ended or (end < len(self._text) and not cut):
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                open_end = error.pos >= len(self._text) - _NEAR or error.msg.startswith("Unterminated")
                if self._ended or not open_end:
                    raise
            if len(self._text) - self._at > MOST_BYTES:
                raise ValueError(f"longer than {MOST_BYTES >> 20} MiB")
            self._more(self._stream.read(size))
            size *= 2  # else a long value would be begun again for each of its pieces
