"""One request through the router: to a worker, from there to the next if it fails, and its answer back.

    client -> Proxy -> a worker that the policy chose -> client

An answer passes through as it comes, event by event. Until the first of it was sent to the client, a worker
that fails costs nothing but time: the request goes to another one, to each at most once. After that the
stream ends with an error of its own. Either way the client gets one answer: a whole one, or one clear error.

All runs in the router's event loop. Each attempt has an inbox, and only what comes out of it decides: the
worker's answer piece by piece, that the worker is dead, that the client is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from minirad.cache.node import Slots
from minirad.command import one_line
from minirad.errors import whole
from minirad.route.workers import Worker
from minirad.server.app import body_of
from minirad.server.protocol import INVALID, ApiError
from minirad.server.settings import Limits as ServerLimits

MOST_PIECES = 256  # of an answer that wait for a slow client; then the worker waits
MOST_ANSWER = 64 << 20  # bytes of an answer that is no stream
LONGEST_EVENT = 8 << 20  # bytes of an event of a stream
FAILURES = (500, 502, 503, 504)  # a worker that answers so has failed
FULL = 429
STREAM = "text/event-stream"
ENDING = "the router is ending"  # what attempts are told then
_DONE = b"[DONE]"
_ENDS = (b"\n\n", b"\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the front takes. requests: in flight. body: bytes of one.

    Seconds in which something has to come: body_seconds: a request's body; quiet: the next piece of a
    worker's answer; stalled: a client that takes one.
    """

    requests: int = 1024
    body: int = 4 << 20
    body_seconds: float = 30.0
    quiet: float = 300.0
    stalled: float = 30.0

    def __post_init__(self) -> None:
        for name in ("requests", "body"):
            whole(name, getattr(self, name), 1)


def refusal(status: int, message: str, code: str | None = None, retry_after: int | None = None) -> ApiError:
    """An answer that is an error, in OpenAI's form. retry_after: seconds."""
    kind = "rate_limit_error" if status == FULL else "server_error"
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return ApiError(message, status, kind, None, code, headers)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a request before it is sent on.

    tokens: ids of its first prompt, int64 [n]. prompt_tokens: of all its prompts. space: its namespace.
    hides_usage: it is a stream that does not ask for its usage. A worker is asked for it all the same, as
    that is where it says what was cached; the client does not see it.
    """

    tokens: Slots
    prompt_tokens: int
    space: Hashable = None
    hides_usage: bool = False


# What comes into an attempt's inbox: of the worker's answer a _Head, bytes, then _End; or that it is over.


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    kind: str
    retry_after: str | None


@dataclass(frozen=True, slots=True)
class _End:
    """failed: why there is no more; "" where the answer is whole."""

    failed: str = ""


class _Gone:
    """The client went away."""


_In = _Head | bytes | _End | _Gone


class ClientGone(Exception):
    """Nobody waits for this answer any more."""


class Client:
    """Who asked: what was sent to it, and whether it is still there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.gone = False
        self._tell: Callable[[], None] = lambda: None
        self._watching: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def watched(self) -> Any:
        """Within, it is noticed when the client goes away. To be entered when the body was read."""
        self._watching = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def tell(self, call: Callable[[], None]) -> None:
        """Calls this when the client is gone, now if it is."""
        self._tell = call
        if self.gone:
            call()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._tell()

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        coded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": coded})

    async def piece(self, body: bytes, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.piece(body, more=False)

    async def _put(self, message: Message) -> None:
        """Sends; ClientGone for a client that is gone, or has not read for too long: it is cut off then."""
        if self.gone:
            raise ClientGone
        try:
            await asyncio.wait_for(self._send(message), self._limits.stalled)
        except OSError:
            raise ClientGone from None
        except asyncio.TimeoutError:
            connection = self._scope.get("state", {}).get("connection")
            if connection is not None:
                connection.transport.abort()
            raise ClientGone from None


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way."""

    number: int
    path: str
    body: bytes
    client: Client
    asked: Asked
    tried: dict[str, str] = field(default_factory=dict)  # worker: why it did not answer
    full: dict[str, int] = field(default_factory=dict)  # worker: when to ask again
    begun: bool = False  # something of an answer was sent
    cached: int | None = None  # tokens, where the worker told

    @property
    def name(self) -> str:
        """How events call it."""
        return f"R{self.number}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended: answered, refused (the client is to blame), failed, full, broken (after output
    was sent on) or gone (the client, or the router ends).
    """

    outcome: str
    why: str = ""


class Proxy:
    """The ASGI application that passes requests on.

    read: what a path and a body ask for; ApiError for what is no request. choose: a worker for a job, None
    where none is left. over: told how each attempt ended. closing: set once nothing new is taken.
    """

    def __init__(
        self, read: Callable[[str, bytes], Awaitable[Asked]], choose: Callable[[Job], Worker | None],
        over: Callable[[Job, Worker, Ended], None], limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.closing = limits or Limits(), False
        self.in_flight = 0  # requests whose answers are not over
        self._read, self._choose, self._over = read, choose, over
        self._numbers = itertools.count(1)
        self._front = ServerLimits(body=self.limits.body, body_seconds=self.limits.body_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request for a completion; ApiError where it gets no answer of a worker."""
        body = await body_of(Request(scope, receive), self._front)
        self._take_one_more()
        self.in_flight += 1
        client = Client(scope, receive, send, self.limits)
        try:
            async with client.watched():
                asked = await self._read(scope["path"], body)
                sent = _with_usage(body) if asked.hides_usage else body
                await self._place(Job(next(self._numbers), scope["path"], sent, client, asked))
        except ClientGone:
            pass
        finally:
            self.in_flight -= 1

    @staticmethod
    def _ended() -> ApiError:
        return refusal(503, ENDING, "ending", 5)

    def _take_one_more(self) -> None:
        most = self.limits.requests
        if self.closing:
            raise self._ended()
        if self.in_flight >= most:
            raise refusal(FULL, f"{most:,} requests are in flight, and no more are taken", "queue_full", 1)

    # ------------------------------------------------------------ from worker to worker

    async def _place(self, job: Job) -> None:
        while True:
            worker = self._choose(job)
            if worker is None:
                raise self._ended() if self.closing else _nobody(job)
            worker.load += 1
            worker.queued_tokens += job.asked.prompt_tokens
            waiting = [job.asked.prompt_tokens]

            def has_begun(worker: Worker = worker, waiting: list[int] = waiting) -> None:
                worker.queued_tokens -= waiting.pop() if waiting else 0

            ended = Ended("failed", "the router broke")
            try:
                ended = await _Attempt(job, worker, self.limits, has_begun).run()
            except ClientGone:
                ended = Ended("gone", "the client went away")
            except asyncio.CancelledError:
                ended = Ended("gone", ENDING)
                raise
            finally:
                has_begun()
                worker.load -= 1
                self._over(job, worker, ended)
            if ended.outcome == "gone":
                raise ClientGone
            if ended.outcome in ("answered", "refused", "broken"):
                return
            job.tried[worker.name] = ended.why


def _nobody(job: Job) -> ApiError:
    """What a client is told whose request no worker has answered."""
    if not job.tried:
        return refusal(503, "no worker is alive", "no_worker", 5)
    if len(job.full) == len(job.tried):
        wait = max(1, min(job.full.values()))
        return refusal(FULL, f"all {len(job.full)} workers that are alive are full", "queue_full", wait)
    why = "; ".join(f"{name}: {why}" for name, why in job.tried.items())
    return refusal(503, one_line(f"no worker could answer: {why}"), "workers_failed", 5)


class _Attempt:
    """One worker is asked, and what it answers is passed on."""

    def __init__(self, job: Job, worker: Worker, limits: Limits, has_begun: Callable[[], None]) -> None:
        self._job, self._worker, self._limits, self._has_begun = job, worker, limits, has_begun
        self._inbox: asyncio.Queue[_In] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_PIECES)

    async def run(self) -> Ended:
        """ClientGone where nobody waits any more; the worker's part of the request is then cancelled."""
        worker, client = self._worker, self._job.client
        reader = asyncio.ensure_future(self._read())
        worker.attempts.add(self._lost)
        client.tell(self._gone)
        try:
            head = await self._next()
            if isinstance(head, _End):
                return Ended("failed", head.failed)
            assert isinstance(head, _Head)
            stream = head.status == 200 and head.kind.startswith(STREAM)
            return await (self._stream(head) if stream else self._whole(head))
        finally:
            client.tell(lambda: None)
            worker.attempts.discard(self._lost)
            reader.cancel()  # closes the connection, by which the worker knows
            await asyncio.wait([reader])

    def _lost(self, why: str) -> None:
        self._inbox.put_nowait(_End(why))

    def _gone(self) -> None:
        self._inbox.put_nowait(_Gone())

    async def _read(self) -> None:
        """Puts the worker's answer into the inbox."""
        job, inbox, client = self._job, self._inbox, self._worker.client
        if client is None:
            return inbox.put_nowait(_End("it is not there any more"))
        try:
            headers = {"content-type": "application/json"}
            async with client.stream("POST", job.path, content=job.body, headers=headers) as answer:
                said = answer.headers
                kind = said.get("content-type", "application/json")
                inbox.put_nowait(_Head(answer.status_code, kind, said.get("retry-after")))
                async for piece in answer.aiter_raw():
                    await self._room.acquire()
                    inbox.put_nowait(piece)
            inbox.put_nowait(_End())
        except httpx.HTTPError as error:
            self._worker.doubt.set()
            inbox.put_nowait(_End(one_line(error)))
        except Exception as error:  # of the client library's own making; the request must not wait for ever
            inbox.put_nowait(_End(one_line(repr(error))))

    async def _next(self) -> _Head | bytes | _End:
        quiet = self._limits.quiet
        try:
            came = await asyncio.wait_for(self._inbox.get(), quiet)
        except asyncio.TimeoutError:
            return _End(f"nothing came from it for {quiet:g} s")
        if isinstance(came, _Gone):
            raise ClientGone
        if isinstance(came, bytes):
            self._room.release()
        return came

    # ------------------------------------------------------------ an answer that is one piece

    async def _whole(self, head: _Head) -> Ended:
        job, parts, size = self._job, [], 0
        while isinstance(came := await self._next(), bytes):
            parts.append(came)
            size += len(came)
            if size > MOST_ANSWER:
                return Ended("failed", f"its answer has more than {MOST_ANSWER:,} bytes")
        assert isinstance(came, _End)
        if came.failed:
            return Ended("failed", came.failed)
        body = b"".join(parts)
        if head.status == FULL:
            job.full[self._worker.name] = _seconds(head.retry_after)
            return Ended("full", "it is full")
        if head.status in FAILURES:
            self._worker.doubt.set()
            return Ended("failed", f"it answered with {head.status}{_said(body)}")
        job.cached = _cached(body) if head.status == 200 else None
        self._has_begun()
        job.begun = True
        headers = {"content-type": head.kind, "x-minirad-worker": self._worker.name}
        if head.retry_after is not None:
            headers["retry-after"] = head.retry_after
        await job.client.whole(head.status, headers, body)
        return Ended("answered") if head.status == 200 else Ended("refused", f"{head.status}{_said(body)}")

    # ------------------------------------------------------------ a stream

    async def _stream(self, head: _Head) -> Ended:
        """Passes on whole events only, so that an error of ours can follow at any time."""
        rest, last = b"", b""
        while True:
            seen = max(0, len(rest) - 3)  # before that there is no end of an event
            came = await self._next()
            if isinstance(came, _End):
                return await self._stream_end(came.failed, last)
            assert isinstance(came, bytes)
            rest += came
            ends = [(rest.rfind(each, seen), len(each)) for each in _ENDS]
            end = max(at + length if at >= 0 else 0 for at, length in ends)
            if len(rest) - end > LONGEST_EVENT:
                return await self._stream_end(f"an event has more than {LONGEST_EVENT:,} bytes", last)
            if not end:
                continue
            events, rest = rest[:end], rest[end:]
            said = _events(events)
            if not self._job.begun and (failed := _failure(said[:1])):
                return Ended("failed", failed)
            last = said[-1] if said else last
            if b'"cached_tokens"' in events:
                self._job.cached = next((n for each in said if (n := _cached(each)) is not None), None)
            await self._pass_on(head, _without_usage(events) if self._job.asked.hides_usage else events)

    async def _pass_on(self, head: _Head, events: bytes) -> None:
        job = self._job
        if not events:
            return
        if not job.begun:
            job.begun = True
            self._has_begun()
            headers = {"content-type": head.kind, "x-minirad-worker": self._worker.name}
            await job.client.begin(200, {**headers, "cache-control": "no-cache"})
        await job.client.piece(events)

    async def _stream_end(self, failed: str, last: bytes) -> Ended:
        """The worker sends no more. last: its last whole event. What has not come whole is left out."""
        job = self._job
        failed = failed or "its stream ended before it was whole"
        if not job.begun:
            return Ended("failed", failed)
        error = _failure([last], anybody=True)
        if last == _DONE or error:  # an error is an end as well: the worker has said it itself
            await job.client.piece(b"", more=False)
            return Ended("broken", error) if error else Ended("answered")
        part = "after a part of the answer was sent"
        if failed == ENDING:  # no fault of the worker's
            told = refusal(503, f"{failed}, {part}", "ending").body()
        else:
            message = f"{self._worker.name} failed {part}: {failed}"
            told = refusal(500, one_line(message), "worker_failed").body()
        await job.client.piece(b"data: " + told + b"\n\n", more=False)
        return Ended("gone" if failed == ENDING else "broken", failed)


# ---------------------------------------------------------------------- what a worker is told, and says


def _with_usage(body: bytes) -> bytes:
    """The same request, which also asks for its usage."""
    asked = json.loads(body)
    asked["stream_options"] = {**(asked.get("stream_options") or {}), "include_usage": True}
    return json.dumps(asked).encode()


def _without_usage(events: bytes) -> bytes:
    """The same events as somebody gets them who does not ask for the usage."""
    whole = [each for each in events.split(b"\n\n") if not _is_usage(each)]
    return b"\n\n".join(whole).replace(b'"usage":null,', b"")  # in a text the quotes would be escaped


def _is_usage(event: bytes) -> bool:
    found = _json(event.removeprefix(b"data: ")) if b'"usage":{' in event else None
    return isinstance(found, dict) and not found.get("choices")


def _seconds(retry_after: str | None) -> int:
    return min(int(retry_after), 3600) if retry_after and retry_after.isdigit() else 1


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _said(body: bytes) -> str:
    """The message of an error in OpenAI's form, as the end of a sentence; "" where there is none."""
    found = _json(body)
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {one_line(message)}" if isinstance(message, str) else ""


def _cached(answer: bytes | Any) -> int | None:
    """usage.prompt_tokens_details.cached_tokens of an answer; None where it does not say."""
    found = _json(answer) if isinstance(answer, bytes) else answer
    for name in ("usage", "prompt_tokens_details", "cached_tokens"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if type(found) is int and found >= 0 else None


def _events(data: bytes) -> list[bytes]:
    """The data of each event."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _failure(events: Sequence[bytes], anybody: bool = False) -> str:
    """Why a worker failed, if the first of these events says so, else "".

    anybody: an error for which its client is to blame counts as well.
    """
    found = _json(events[0]) if events and events[0].startswith(b'{"error"') else None
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict) or (error.get("type") == INVALID and not anybody):
        return ""
    return one_line(error.get("message") or "it failed")
