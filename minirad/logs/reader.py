"""One log file as requests, streamed: which format it is, what was left out, what was not understood.

    reader = LogReader("requests.jsonl.gz")
    for request in reader: ...
    print(*reader.summary(), sep="\\n")

A file's format is told by its first records; records of APIs are then read by their own keys, so that a
gateway's log may hold several kinds. Memory is bounded by what a later line may go on from: see apis.py and
claude_code.py. Tokenises nothing (tokens.py does).
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tqdm import tqdm

from minirad.errors import said
from minirad.logs import apis, claude_code, codex, fields
from minirad.logs.apis import Apis
from minirad.logs.claude_code import ClaudeCode
from minirad.logs.codex import Codex
from minirad.logs.records import Record, opened, peeked, records
from minirad.logs.request import LeftOut, LoggedRequest
from minirad.text import InvalidTextError, escaped

FORMATS = (
    "mooncake", "openai", "anthropic", "responses", "sharegpt", "claude-code", "codex", "workload",
)  # fmt: skip
# What LoggedRequest.kind may be.
KINDS = ("chat", "completions", "responses", "anthropic", "sharegpt", "mooncake", "claude-code", "codex")
MALFORMED = ("skip", "stop")
MOST_NAMED = 1000  # records left out, and names not understood, that are kept; all are counted
LOOKED_AT = 50  # records that may come before one that tells the format
_API = {"chat": "openai", "completions": "openai", "anthropic": "anthropic", "responses": "responses"}
_FORCED = {"openai": None, "anthropic": "anthropic", "responses": "responses"}
# Traces of lengths: the first columns by which their headings are known.
_LENGTHS = {
    "BurstGPT": {"request tokens", "response tokens"},
    "Azure": {"contexttokens", "generatedtokens"},
}


class UnknownFormatError(ValueError):
    """The first records of a file are none that can be read."""


class _Turner(Protocol):
    """Turns records into requests."""

    def requests(self, record: Record, odd: list[str]) -> Iterator[LoggedRequest]: ...


class LogReader:
    """The requests of one log, in file order; each iteration reads the file from its beginning.

    source: a path, "-" for standard input, or a binary stream (read once). format: one of FORMATS, None: by
    the first records. malformed: "skip" (left out, named and counted) or "stop" (ValueError with the line).
    outputs: output files of batches, whose replies belong to this file's requests by custom_id.

    left_out: records that became no request, the first MOST_NAMED of left_out_count. not_understood: names,
    and how often. notes: what the file cannot say, and how often it mattered. All of them as far as it is
    read.
    """

    def __init__(
        self,
        source: str | Path | BinaryIO,
        format: str | None = None,
        malformed: str = "skip",
        outputs: Iterable[str | Path] = (),
    ) -> None:
        if format is not None and format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
        if malformed not in MALFORMED:
            raise ValueError(f"malformed must be one of {', '.join(MALFORMED)}, not {malformed!r}")
        if source == "-" and sys.stdin is None:
            raise ValueError("the standard input is closed")
        self._source: Path | BinaryIO = (
            sys.stdin.buffer if source == "-" else Path(source) if isinstance(source, (str, Path)) else source
        )
        self.name = (
            str(source) if isinstance(source, (str, Path)) else str(getattr(source, "name", "a stream"))
        )
        self._wanted, self._malformed = format, malformed
        self._replies = {key: each for path in outputs for key, each in batch_replies(path)}
        self.format = format
        self._bar: Any = None
        self._clear()

    def _clear(self) -> None:
        self.left_out: list[LeftOut] = []
        self.left_out_count = 0
        self.requests = 0
        self.not_understood: Counter[str] = Counter()
        self.notes: dict[str, int] = {}
        self._cut = ""

    @property
    def size(self) -> int | None:
        """Bytes of the file as it lies there; None for a stream."""
        return self._source.stat().st_size if isinstance(self._source, Path) else None

    def __iter__(self) -> Iterator[LoggedRequest]:
        self._clear()
        with opened(self._source) as (stream, counted):
            head = peeked(stream) if self._wanted is None else b""
            _not_of_lengths(head, self.name)
            found = _Ahead(records(stream))
            self.format = self._wanted or _format(found, self.name)
            if self.format is None:
                return
            if self.format == "workload":
                raise ValueError(f"{self.name} is a workload or a recording, not a trace or a log")
            turner = self._turner(self.format)
            for record in found:
                if self._bar is not None:
                    self._bar.update(counted.position - self._bar.n)
                yield from self._of(record, turner)
            if isinstance(turner, (ClaudeCode, Codex)):
                yield from map(self._counted, turner.finish())

    def _turner(self, format: str) -> _Turner:
        if format == "claude-code":
            return ClaudeCode(self.name, self.notes)
        if format == "codex":
            return Codex(self.name, self.notes)
        forced = _FORCED.get(format, format) if self._wanted or format not in _FORCED else None
        return Apis(self.name, forced, self._replies, self.notes)

    def _of(self, record: Record, turner: _Turner) -> Iterator[LoggedRequest]:
        odd: list[str] = []
        try:
            if record.why:
                raise InvalidTextError(record.why) if record.text else ValueError(record.why)
            yield from map(self._counted, turner.requests(record, odd))
        except RecursionError:
            self._leave_out(record, ValueError("nested too deeply to be read"))
        except ValueError as error:
            self._leave_out(record, error)
        finally:
            for name in odd:
                known = name in self.not_understood or len(self.not_understood) < MOST_NAMED
                self.not_understood[name if known else "other names"] += 1

    def _counted(self, request: LoggedRequest) -> LoggedRequest:
        """One more; what is missing of its prompt is a note, for it makes every count of it too small."""
        self.requests += 1
        if request.incomplete and request.incomplete not in self.notes:
            self._cut = (
                self._cut or f"a prompt is not all here, first in {request.where}: {request.incomplete}"
            )
            self.notes[self._cut] = self.notes.get(self._cut, 0) + 1
        return request

    def _leave_out(self, record: Record, error: ValueError) -> None:
        if self._malformed == "stop" and (
            self.format == "mooncake" or not isinstance(error, InvalidTextError)
        ):
            raise ValueError(f"{self.name}, {record.where}: {escaped(str(error))}") from error
        self.left_out_count += 1
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append(LeftOut(record.line, record.where, escaped(str(error))))

    def with_progress(self, about: str | None = None) -> Iterator[LoggedRequest]:
        """The same, with a bar of the bytes read; only on a terminal, and only if it takes a second."""
        with tqdm(
            desc=about or f"reading {self.name}", total=self.size, unit="B", unit_scale=True, delay=1,
            leave=False, disable=None,
        ) as bar:  # fmt: skip
            self._bar = bar
            try:
                yield from self
            finally:
                self._bar = None

    def summary(self, most: int = 10) -> list[str]:
        """What was left out, what was not understood and what the file cannot say, a line each."""
        lines = [
            f"{self.name}: {note} ({'once' if count == 1 else f'{count:,} times'})"
            for note, count in self.notes.items()
        ]
        for record in self.left_out[:most]:
            lines.append(f"left out: {self.name}, {record.where}: {record.why}")
        rest = self.left_out_count - min(most, len(self.left_out))
        if rest:
            lines.append(f"left out: {rest:,} more of {self.left_out_count:,} in all")
        if self.not_understood:
            named = [f"{name} ({count:,})" for name, count in self.not_understood.most_common(most)]
            rest = len(self.not_understood) - len(named)
            lines.append(f"not understood: {', '.join(named)}{f' and {rest:,} other names' if rest else ''}")
        return [escaped(line) for line in lines]  # a log's names may say anything


class _Ahead:
    """Records, some of which may be looked at before they are taken."""

    def __init__(self, found: Iterator[Record]) -> None:
        self._found = found
        self._seen: list[Record] = []

    def look(self, most: int) -> Iterator[Record]:
        for record in islice(self._found, most):
            self._seen.append(record)
            yield record

    def __iter__(self) -> Iterator[Record]:
        while self._seen:
            yield self._seen.pop(0)
        yield from self._found


# ---------------------------------------------------------------------- which format


def detect(source: str | Path) -> str | None:
    """One of FORMATS by the first records; None for an empty file. ValueError if it is none of them."""
    path = Path(source)
    with opened(path) as (stream, _):
        _not_of_lengths(peeked(stream), str(path))
        return _format(_Ahead(records(stream)), str(path))


def _format(found: _Ahead, name: str) -> str | None:
    first: Record | None = None
    unknown: Record | None = None
    for record in found.look(LOOKED_AT):
        first = first or record
        if record.why:
            continue
        kind = format_of(record.value)
        if kind is not None:
            return kind
        unknown = unknown or record
    if first is None:
        return None
    if unknown is None:
        raise ValueError(f"{name}, {first.where}: {first.why}")
    value = unknown.value
    keys = ", ".join(map(said, list(value)[:20])) if isinstance(value, dict) else ""
    raise UnknownFormatError(
        f"{name}, {unknown.where}: unknown format ({keys or type(value).__name__}); it has neither hash_ids "
        "(mooncake), messages, prompt or input (openai, anthropic, responses), conversations (sharegpt) nor "
        "the lines of a session (claude-code, codex); --format says which it is meant to be"
    )


def format_of(value: Any) -> str | None:
    """Which format a record is of; None if it does not say."""
    if not isinstance(value, dict):
        return None
    if "sessions" in value or "minirad" in value:
        return "workload"
    if "hash_ids" in value or "input_length" in value:
        return "mooncake"
    if "conversations" in value or ("conversation" in value and not any(key in value for key in apis.BODY)):
        return "sharegpt"
    kind = value.get("type")
    if (isinstance(kind, str) and kind in codex.TYPES and "payload" in value) or codex.is_bare_head(value):
        return "codex"
    linked = {"uuid", "parentUuid", "sessionId", "leafUuid", "messageId", "snapshot"} & set(value)
    if isinstance(kind, str) and kind in claude_code.TYPES and linked:
        return "claude-code"
    if any(key in value for key in (*apis.BODY, *apis.WRAPPERS)):
        try:
            return _API[apis.kind_of(apis.unwrapped(value))]
        except ValueError:
            return "openai"  # meant to be one: reading it will say what is wrong
    if apis.is_batch_output(value):
        return "openai"
    return None


def _not_of_lengths(head: bytes, name: str) -> None:
    """ValueError, naming the file, for a trace that has lengths only."""
    line = (
        b"".join(head.lstrip().splitlines()[:1]).decode("utf-8-sig", "replace").strip()
    )  # an old Mac's, too
    if not line or line[0] in "[{" or "," not in line:
        return
    try:
        columns = {each.strip().lower() for each in next(csv.reader([line]), [])}
    except csv.Error:  # a column too large for one
        return
    for trace, needed in _LENGTHS.items():
        if needed <= columns:
            raise ValueError(
                f"{name} is a trace as {trace}'s: it holds lengths only ({line[:80]}), no texts and hashes: "
                "which prompts begin alike is not in it and nothing can be matched"
            )


def batch_replies(path: str | Path) -> Iterator[tuple[str, Any]]:
    """custom_id and answer of each line of a batch's output file."""
    with opened(Path(path)) as (stream, _):
        for record in records(stream):
            value = record.value
            if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
                yield value["custom_id"], fields.response_of(value)
