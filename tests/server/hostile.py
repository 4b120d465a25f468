"""Clients of a server, honest and not, on bare sockets: what they send, and what they must be answered.

`HONEST` and `HOSTILE` are coroutines by name, each called with a `Client`. They fail (AssertionError) when
the answer is not one that such a client should get; those that hang up expect none.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

SMALL = 4096  # bytes that a client which stalls lets the server send ahead


@dataclass
class Known:
    """A request and what the engine itself says to it."""

    path: str
    body: dict[str, Any]
    texts: list[str]
    reasons: list[str]
    logprobs: list[list[float]]
    tokens: int


class Answer:
    """A parsed response."""

    def __init__(self, stream: io.BytesIO, method: str = "POST") -> None:
        class Socket:
            def makefile(self, mode: str) -> io.BytesIO:
                return stream

        stream.close = lambda: None  # type: ignore[method-assign]
        response = http.client.HTTPResponse(Socket(), method=method)  # type: ignore[arg-type]
        response.begin()
        self.status, self.body = response.status, response.read()
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What a stream said, without the [DONE] at its end."""
        found = [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]
        assert found and found[-1] == b"[DONE]", self.body[-300:]
        return [json.loads(each) for each in found[:-1]]


@dataclass
class Client:
    """One of many; counts: of all of them. Each has a random generator of its own."""

    host: str
    port: int
    key: str
    model: str
    most_body: int
    context: int
    known: list[Known]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    patience: float = 150.0

    def head(
        self, length: int | None, path: str = "/v1/completions", *more: str, method: str = "POST",
        key: str | None = None, version: str = "1.1",
    ) -> bytes:  # fmt: skip
        """The beginning of a request whose connection ends behind the answer."""
        lines = [f"{method} {path} HTTP/{version}", *more, f"Authorization: Bearer {key or self.key}"]
        lines += [] if any(line.lower().startswith("connection:") for line in more) else ["Connection: close"]
        lines += ["Host: test"] if version == "1.1" else []
        lines += [] if length is None else [f"Content-Length: {length}", "Content-Type: application/json"]
        return "\r\n".join([*lines, "", ""]).encode()

    def request(self, body: Any, path: str = "/v1/completions", *more: str, **how: Any) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(len(data), path, *more, **how) + data

    def long(self, **more: Any) -> dict[str, Any]:
        """A request that takes seconds."""
        prompt = [self.rng.randrange(10, 1000) for _ in range(5)]
        return {"model": self.model, "prompt": prompt, "max_tokens": 300, "ignore_eos": True, **more}

    async def connect(self, receive: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = socket.socket()
        if receive:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, (self.host, self.port))
        except BaseException:
            made.close()
            raise
        return await asyncio.open_connection(sock=made, limit=receive or 1 << 20)

    async def send(self, parts: Iterable[bytes], pause: float = 0.0) -> bytes:
        """All that comes back until the server closes the connection, also where it stops listening."""
        reader, writer = await self.connect()
        try:
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    if pause:
                        await asyncio.sleep(pause)
            except ConnectionError:
                pass  # it has answered already, or not: seen below
            found = b""
            try:
                while some := await asyncio.wait_for(reader.read(1 << 16), self.patience):
                    found += some
            except ConnectionError:
                pass
            return found
        finally:
            writer.close()

    async def ask(self, *parts: bytes, pause: float = 0.0, method: str = "POST") -> Answer:
        found = await self.send(parts, pause)
        assert found, f"no answer to {parts[0][:200]!r}"
        return Answer(io.BytesIO(found), method)

    async def refused(self, body: Any, *statuses: int, path: str = "/v1/completions", **how: Any) -> Any:
        """The error of a request that has to be refused with one of these statuses (400)."""
        answer = await self.ask(self.request(body, path, **how))
        return self.is_refusal(answer, *statuses, sent=body)

    def is_refusal(self, answer: Answer, *statuses: int, sent: Any = None) -> Any:
        assert answer.status in (statuses or (400,)), (answer.status, answer.body[:500], str(sent)[:300])
        error = answer.json["error"]
        assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
        return error

    async def hang_up(self, data: bytes, after: float = 0.0, reset: bool = False, read: int = 0) -> None:
        """Sends this, waits, perhaps reads some bytes, and is gone; reset: without a good-bye."""
        reader, writer = await self.connect(SMALL if read else 0)
        writer.write(data)
        try:
            if read:  # less comes where it was refused
                with contextlib.suppress(asyncio.IncompleteReadError):
                    await asyncio.wait_for(reader.readexactly(read), self.patience)
            await asyncio.sleep(after)
        finally:
            if reset:
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()


Kind = Callable[[Client], Awaitable[None]]
HONEST: dict[str, Kind] = {}
HOSTILE: dict[str, Kind] = {}


def honest(function: Kind) -> Kind:
    HONEST[function.__name__] = function
    return function


def hostile(function: Kind) -> Kind:
    HOSTILE[function.__name__] = function
    return function


# ---------------------------------------------------------------------- honest


def judge(known: Known, answer: Answer) -> None:
    """What came is what the engine says, token for token (their log-probabilities, where they were asked)."""
    assert answer.status == 200, (answer.status, answer.body[:500])
    chat = known.path.endswith("chat/completions")
    texts, reasons = [""] * len(known.texts), [""] * len(known.texts)
    logprobs: list[list[float]] = [[] for _ in known.texts]
    parts = answer.events if known.body.get("stream") else [answer.json]
    for part in parts:
        assert "error" not in part, part
        for choice in part["choices"]:
            at = choice["index"]
            said = (choice.get("delta") or choice.get("message")) if chat else choice
            texts[at] += (said.get("content") if chat else said.get("text")) or ""
            reasons[at] = choice["finish_reason"] or reasons[at]
            told = choice.get("logprobs") or {}
            content = [each["logprob"] for each in told.get("content") or []] if chat else None
            logprobs[at] += (told.get("token_logprobs") or []) if content is None else content
    assert texts == known.texts, (known.body, texts, known.texts)
    assert reasons == known.reasons, (known.body, reasons)
    if known.logprobs:
        for said, wanted in zip(logprobs, known.logprobs, strict=True):
            assert said == pytest.approx(wanted, abs=1e-3), known.body
    assert parts[-1]["usage"]["completion_tokens"] == known.tokens, (known.body, parts[-1])


async def until_taken(client: Client, send: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer, tried again where the queue is full. It says when to come back, which is not obeyed."""
    for _ in range(2000):
        answer = await send()
        if answer.status != 429:
            return answer
        client.counts["429, tried again"] += 1
        assert int(answer.headers["retry-after"]) >= 1
        client.is_refusal(answer, 429)
        await asyncio.sleep(client.rng.uniform(0.05, 0.4))
    raise AssertionError("the queue was full for ever")


async def _asked(client: Client, form: Callable[[Known], Iterable[bytes]], pause: float = 0.0) -> None:
    known = client.rng.choice(client.known)
    judge(known, await until_taken(client, lambda: client.ask(*form(known), pause=pause)))


@honest
async def plain(client: Client) -> None:
    await _asked(client, lambda known: [client.request(known.body, known.path)])


@honest
async def chunked(client: Client) -> None:
    def form(known: Known) -> Iterable[bytes]:
        data, size = json.dumps(known.body).encode(), client.rng.choice((1, 7, 50))
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        body = b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts)
        head = client.head(None, known.path, "Transfer-Encoding: chunked", "Content-Type: application/json")
        return [head, body, b"0\r\nTrailer: 1\r\n\r\n"]

    await _asked(client, form)


@honest
async def http_1_0(client: Client) -> None:
    await _asked(client, lambda known: [client.request(known.body, known.path, version="1.0")])


@honest
async def in_pieces(client: Client) -> None:
    def form(known: Known) -> Iterable[bytes]:
        data = client.request(known.body, known.path)
        step = client.rng.randrange(60, 200)
        return [data[at : at + step] for at in range(0, len(data), step)]

    await _asked(client, form, pause=0.03)


@honest
async def expects_100(client: Client) -> None:
    known = client.rng.choice(client.known)
    data = json.dumps(known.body).encode()

    async def send() -> Answer:
        head = client.head(len(data), known.path, "Expect: 100-continue")
        found = await client.send([head, data], pause=0.05)
        while found.startswith(b"HTTP/1.1 100"):
            found = found.partition(b"\r\n\r\n")[2]
        return Answer(io.BytesIO(found))

    judge(known, await until_taken(client, send))


@honest
async def pipelined(client: Client) -> None:
    """Three requests in one go: three answers, in order."""
    known, keep = client.rng.choice(client.known), "Connection: keep-alive"

    async def send() -> Answer:
        health = client.head(None, "/health", keep, method="GET")
        models = client.head(None, "/v1/models", method="GET")
        found = await client.send([health + client.request(known.body, known.path, keep) + models])
        stream = io.BytesIO(found)
        assert Answer(stream, "GET").status == 200
        answer = Answer(stream)
        assert Answer(stream, "GET").json["data"][0]["id"] == client.model
        assert not stream.read()
        return answer

    judge(known, await until_taken(client, send))


@honest
async def kept_alive(client: Client) -> None:
    """One connection for a few requests after one another."""
    reader, writer = await client.connect()
    try:
        for _ in range(3):
            known = client.rng.choice(client.known)
            if known.body.get("stream"):
                continue

            async def send(known: Known = known) -> Answer:
                writer.write(client.request(known.body, known.path, "Connection: keep-alive"))
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), client.patience)
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                )
                return Answer(io.BytesIO(head + await reader.readexactly(length)))

            judge(known, await until_taken(client, send))
    finally:
        writer.close()


# ---------------------------------------------------------------------- gone too early


@hostile
async def connects_and_goes(client: Client) -> None:
    await client.hang_up(b"", client.rng.uniform(0, 0.5), reset=client.rng.random() < 0.5)


@hostile
async def half_a_request(client: Client) -> None:
    data = client.request(client.long())
    await client.hang_up(data[: client.rng.randrange(1, len(data))], client.rng.uniform(0, 1))


@hostile
async def hangs_up_at_once(client: Client) -> None:
    await client.hang_up(client.request(client.long()), reset=client.rng.random() < 0.5)


@hostile
async def hangs_up_while_it_waits(client: Client) -> None:
    body = client.long(n=client.rng.choice((1, 3)))
    await client.hang_up(client.request(body), client.rng.uniform(0, 1), reset=client.rng.random() < 0.5)


@hostile
async def hangs_up_in_a_stream(client: Client) -> None:
    data = client.request(client.long(stream=True, n=client.rng.choice((1, 2))))
    await client.hang_up(data, read=client.rng.randrange(1, 900), reset=client.rng.random() < 0.5)


@hostile
async def says_only_half_a_goodbye(client: Client) -> None:
    """It will send nothing more, and waits for the answer: the server may answer or take it for gone."""
    known = client.rng.choice(client.known)
    reader, writer = await client.connect()
    try:
        writer.write(client.request(known.body, known.path))
        writer.write_eof()
        found = await asyncio.wait_for(reader.read(-1), client.patience)
    except ConnectionError:
        return
    finally:
        writer.close()
    if found and Answer(io.BytesIO(found)).status != 429:
        judge(known, Answer(io.BytesIO(found)))


@hostile
async def stalls(client: Client) -> None:
    """Asks for much and reads none of it for a while."""
    body = client.long(stream=True, n=client.rng.choice((1, 4)), logprobs=5)
    _, writer = await client.connect(SMALL)
    try:
        writer.write(client.request(body))
        writer.transport.pause_reading()
        await asyncio.sleep(client.rng.uniform(1, 6))
    finally:
        writer.close()


@hostile
async def sleeps_in_the_body(client: Client) -> None:
    """So slow a body that it never ends: given up here, or by the server with 408 before."""
    data = client.request(client.long())
    cut = len(data) - client.rng.randrange(5, 60)
    await client.hang_up(data[:cut], client.rng.uniform(0.5, 6))


@hostile
async def drips(client: Client) -> None:
    _, writer = await client.connect()
    try:
        for byte in client.request(client.long())[: client.rng.randrange(20, 60)]:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)
    except ConnectionError:
        pass
    finally:
        writer.close()


# ---------------------------------------------------------------------- no HTTP

GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # somebody speaks TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\r\n" * 5000, b"\0" * 9000,
    b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions\r\n\r\n", b"hello\n\n", b"A" * 300_000,
    b"GET / HTTP/1.1\r\nno colon here\r\n\r\n", b"GET / HTTP/1.1\r\n: empty\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 6\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhi",
)  # fmt: skip


@hostile
async def speaks_no_http(client: Client) -> None:
    """400 or 4xx or nothing at all; never a 5xx, and never 200."""
    sent = client.rng.choice(GARBAGE)
    if client.rng.random() < 0.3:
        sent = client.rng.randbytes(client.rng.randrange(1, 3000))
    reader, writer = await client.connect()
    try:
        writer.write(sent)
        try:
            found = await asyncio.wait_for(reader.read(1000), client.rng.uniform(0.5, 3))
        except asyncio.TimeoutError:
            found = b""  # it waits for the rest
        except ConnectionError:
            return
        assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (sent[:200], found)
    finally:
        writer.close()


@hostile
async def smuggles(client: Client) -> None:
    """Two lengths in one head: what lies behind the first must not become a request."""
    inner = client.head(None, "/health", method="GET")
    head = client.head(len(inner), "/v1/completions", "Transfer-Encoding: chunked", "Connection: keep-alive")
    found = await client.send([head + b"0\r\n\r\n" + inner])
    assert found.startswith(b"HTTP/1.1 4"), found[:300]


@hostile
async def floods_headers(client: Client) -> None:
    count, size = client.rng.choice(((2000, 20), (1, 200_000), (200, 2000)))
    more = [f"X-{number}: {'y' * size}" for number in range(count)]
    found = await client.send([client.head(None, "/health", *more, method="GET")])
    assert not found or found.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), found[:300]


@hostile
async def a_long_address(client: Client) -> None:
    found = await client.send([client.head(None, "/" + "a" * 30_000, method="GET")])
    assert not found or found.startswith(b"HTTP/1.1 4"), found[:300]


@hostile
async def another_method(client: Client) -> None:
    method = client.rng.choice(("GET", "DELETE", "PATCH", "PUT", "OPTIONS", "HEAD", "TRACE", "BREW"))
    answer = await client.ask(client.head(None, "/v1/completions", method=method), method=method)
    assert answer.status == 405, (method, answer.status)


@hostile
async def another_path(client: Client) -> None:
    path = client.rng.choice(
        ("/", "/v1", "/v1/completions/", "/v1/embeddings", "/../etc/passwd", "/%00", "//")
    )
    await client.refused({}, 404, 405, path=path)


# ---------------------------------------------------------------------- bodies

BODIES = (
    b"", b"{", b"[]", b"null", b"7", b'"x"', b"{}", b"[" * 90_000, b'{"a":' * 15_000, b"\xff\xfe{}", b"\x00",
    b'{"model": "\xc3\x28"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": NaN}', b'{"prompt": 1e999}',
    b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": "x", "seed": 99999999999999999999999999}',
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": -0.5}', b"prompt=x&n=1",
    b'{"prompt": "\\ud800"}', b'{"prompt": []}', b'{"prompt": [[]]}', b'{"prompt": [1, "x"]}',
    b'{"prompt": {}}', b'{"prompt": [1.5]}', b'{"prompt": [true]}', b'{"prompt": [-1]}',
    b'{"prompt": [99999999]}', b'{"prompt": [[1], "x"]}', b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "n": 1000000000}', b'{"prompt": "x", "n": "2"}',
    b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "x", "max_tokens": 1.5}',
    b'{"prompt": "x", "max_tokens": 1000000000}', b'{"prompt": "x", "stop": [1]}',
    b'{"prompt": "x", "stop": ""}', b'{"prompt": "x", "top_p": 0}', b'{"prompt": "x", "top_p": 1e308}',
    b'{"prompt": "x", "logprobs": 1000000}', b'{"prompt": "x", "stream": "yes"}',
    b'{"prompt": "x", "stream_options": 3}', b'{"prompt": "x", "logit_bias": {"1": 100}}',
    b'{"prompt": "x", "suffix": "y"}', b'{"prompt": "x", "wat": 1}',
    b'{"prompt": ' + json.dumps([[5]] * 5000).encode() + b"}",
    b'{"prompt": "x", "stop": ' + json.dumps(["a"] * 5000).encode() + b"}",
    b'{"prompt": ' + json.dumps([5] * 20_000).encode() + b"}", b'{"prompt": "' + b"word " * 18_000 + b'"}',
)  # fmt: skip


@hostile
async def a_bad_body(client: Client) -> None:
    error = await client.refused(client.rng.choice(BODIES), 400)
    assert len(error["message"]) < 3000


CHATS: tuple[dict[str, Any], ...] = (
    {"messages": []}, {"messages": "x"}, {"messages": [1]}, {"messages": [{}]}, {},
    {"messages": [{"role": "wat", "content": "x"}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 21, "logprobs": True},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "wat"}},
    {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
    {"messages": [{"role": "user", "content": "x"}] * 2000},
)  # fmt: skip


@hostile
async def a_bad_chat(client: Client) -> None:
    body = {"model": client.model, **client.rng.choice(CHATS)}
    await client.refused(body, 400, path="/v1/chat/completions")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


SCHEMAS: tuple[Any, ...] = (
    {"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/definitions/none"}, 7, [], "x",
    {"$ref": "http://127.0.0.1:1/x.json"}, {"type": "string", "pattern": "(a{1,999}){1,999}"},
    {"type": "string", "pattern": "(a*)*(b*)*(c*)*d"}, {"type": "array", "minItems": 10**9}, nested(60),
    {"$ref": "#"}, {"anyOf": [{"const": f"x{number}"} for number in range(2000)]}, {"enum": []}, False,
    {"type": "object", "properties": {f"k{number}": {"type": "integer"} for number in range(500)}},
    {"not": {}}, {"type": "string", "minLength": 10**9}, {"type": "integer", "minimum": 5, "maximum": 4},
)  # fmt: skip


@hostile
async def a_bad_schema(client: Client) -> None:
    """Some cannot be, some only cost much, some are fine: 400 or an answer, and soon."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": client.rng.choice(SCHEMAS)}}
    body = {
        "model": client.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8,
        "response_format": wanted,
    }  # fmt: skip
    answer = await client.ask(client.request(body, "/v1/chat/completions"))
    if answer.status != 200:
        client.is_refusal(answer, 400, 429, sent=wanted)


# ---------------------------------------------------------------------- limits


@hostile
async def too_large(client: Client) -> None:
    """413, told by its length or found out on the way, perhaps before all of it was sent."""
    size = client.most_body + client.rng.choice((1, 10_000, 3_000_000))
    if client.rng.random() < 0.5:
        parts = [client.head(size), b" " * size]
    else:
        kind = "Content-Type: application/json"
        head = client.head(None, "/v1/completions", "Transfer-Encoding: chunked", kind)
        parts = [head, b"%X\r\n%s\r\n" % (size, b" " * size), b"0\r\n\r\n"]
    found = await client.send(parts)
    if found:  # a reset may have overtaken it, or what follows its head
        with contextlib.suppress(http.client.IncompleteRead):
            client.is_refusal(Answer(io.BytesIO(found)), 413)


@hostile
async def claims_to_be_large(client: Client) -> None:
    """Says so and sends nothing: refused by its word."""
    reader, writer = await client.connect()
    try:
        writer.write(client.head(1 << 40))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), client.patience)
        assert head.startswith(b"HTTP/1.1 413"), head
    finally:
        writer.close()


@hostile
async def a_wrong_key(client: Client) -> None:
    key = client.rng.choice(("x", client.key + "x", client.key[:-1], "\u00e9", "Bearer", "a" * 5000))
    await client.refused(client.long(), 401, key=key)


@hostile
async def no_key(client: Client) -> None:
    data = client.request(client.long()).replace(f"Authorization: Bearer {client.key}\r\n".encode(), b"")
    client.is_refusal(await client.ask(data), 401)


@hostile
async def another_model(client: Client) -> None:
    await client.refused({**client.long(), "model": "gpt-9"}, 404)


@hostile
async def longer_than_the_context(client: Client) -> None:
    await client.refused({**client.long(), "max_tokens": client.context}, 400)


@hostile
async def many_prompts(client: Client) -> None:
    """More samples than may ever be here: refused, now or with "come back"; none of them stays."""
    body = {**client.long(), "prompt": [[5, 6, number] for number in range(10, 200)], "max_tokens": 1}
    answer = await client.ask(client.request(body))
    client.is_refusal(answer, 400, 429)


@hostile
async def flushes(client: Client) -> None:
    """Empties the cache while others run: refused, or done."""
    answer = await client.ask(client.request({}, "/flush_cache"))
    assert answer.status in (200, 400, 409, 503), (answer.status, answer.body)


@hostile
async def looks_around(client: Client) -> None:
    for path in ("/health", "/metrics", "/server_info", "/v1/models"):
        answer = await client.ask(client.head(None, path, method="GET"), method="GET")
        assert answer.status == 200 and answer.body, (path, answer.status)
