"""The client of `bench serve`: sends each completion at its moment, and notes when each piece of it came.

Written on asyncio's streams, without a library: a client shares the machine with the server that it measures,
and what it takes of the processor would be measured with it. Each request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from minirad.bench.latency import Timeline

LONGEST = 600.0  # seconds that one answer may take


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. path: what comes before /v1."""

    host: str
    port: int
    tls: bool
    path: str
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Address:
        """ValueError for what is no http address."""
        parts = urlsplit(url)
        try:
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (KeyError, ValueError):
            raise ValueError(
                f"--url: an address such as http://127.0.0.1:8000 is needed, not {url!r}"
            ) from None
        if not parts.hostname:
            raise ValueError(f"--url: {url!r} names no host")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", path, key)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"

    def ask(self, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """One small JSON request, done by the time this returns; ValueError says what the server refused."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace")
            raise ValueError(f"{self}{path} answered {error.code}: {said}") from None
        try:
            return json.loads(text)
        except ValueError:
            return None

    def head(self, path: str, length: int) -> bytes:
        """The beginning of a POST with a body of `length` bytes."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Piece(msgspec.Struct):
    """What is read of a message of the stream; all else in it is passed over."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


_read = msgspec.json.Decoder(_Piece).decode


async def _line(reader: asyncio.StreamReader) -> bytes:
    if not (line := await reader.readline()):
        raise ConnectionError("the server hung up")
    return line


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The bytes of a response as they come, whatever way their length is told."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await _line(reader)).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers.get("content-length", -1))
    while left and (some := await reader.read(min(left, 65536) if left > 0 else 65536)):
        left -= len(some) if left > 0 else 0
        yield some
    if left > 0:
        raise ConnectionError(f"the server hung up {left} bytes before the end")


async def _messages(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for some in body:
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status, headers = (await _line(reader)).split(), {}
    if len(status) < 2 or not status[0].startswith(b"HTTP/"):
        raise ValueError(f"no answer of an HTTP server: {status}")
    while (line := await _line(reader)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status[1]), headers


async def _complete(address: Address, body: bytes, line: Timeline, began: float) -> None:
    line.sent = time.perf_counter() - began
    tls = True if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=1 << 20)
    try:
        writer.write(address.head("/v1/completions", len(body)) + body)
        status, headers = await _head(reader)
        if status != 200:
            said = b"".join([some async for some in _body(reader, headers)])
            line.error = f"{status} {said[:300].decode(errors='replace')}"
            return
        line.error = "the stream ended before [DONE]"
        async for message in _messages(_body(reader, headers)):
            now = time.perf_counter() - began
            if message == b"[DONE]":
                line.error = "" if line.pieces else "no output came"
                return
            piece = _read(message)
            if piece.error is not None:
                line.error = str(piece.error)
                return
            if piece.choices:
                line.pieces.append(now)
            if piece.usage is not None:
                line.prompt_tokens, line.new_tokens = piece.usage.prompt_tokens, piece.usage.completion_tokens
                details = piece.usage.prompt_tokens_details
                line.cached_tokens = (details.cached_tokens or 0) if details else 0
    finally:
        writer.close()


async def _at_its_moment(address: Address, body: bytes, line: Timeline, began: float) -> None:
    await asyncio.sleep(line.due - (time.perf_counter() - began))
    try:
        await asyncio.wait_for(_complete(address, body, line, began), LONGEST)
    except asyncio.TimeoutError:
        line.error = f"no whole answer within {LONGEST:.0f} s"
    except (OSError, ValueError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
        line.error = f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one run. busy: seconds of processor time that this process, the client, took."""

    lines: list[Timeline]
    seconds: float
    busy: float

    @property
    def late(self) -> float:
        """99th percentile of the seconds by which a request was sent after its moment."""
        late = sorted(line.sent - line.due for line in self.lines)
        return late[min(int(0.99 * len(late)), len(late) - 1)]


def run(address: Address, bodies: Sequence[dict[str, Any]], moments: Sequence[float]) -> Run:
    """Sends each body to /v1/completions at its moment, whatever became of those before (an open loop)."""
    encoded = [json.dumps(body).encode() for body in bodies]
    lines = [Timeline(due=moment) for moment in moments]

    async def all_of_them() -> Run:
        began, busy = time.perf_counter(), time.process_time()
        tasks = (_at_its_moment(address, *each, began) for each in zip(encoded, lines, strict=True))
        await asyncio.gather(*tasks)
        return Run(lines, time.perf_counter() - began, time.process_time() - busy)

    return asyncio.run(all_of_them())
