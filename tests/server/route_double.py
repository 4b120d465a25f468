"""A worker's double: a server that answers as told, and fails in every way a worker can, within milliseconds.

    with Doubles() as doubles, doubles.router(workers=3) as router: ...

All doubles of a test live in one thread, each on a port of its own. What it does with a request stands in the
request: its field `user` (which the API passes over) is JSON, `{"0": "die"}` for worker 0, "*" for all. With
KV events (`follow=True`) a double has a tree of its own, of all prompts that it was asked, and publishes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.fleet.publish import Publisher
from minirad.route.proxy import Limits
from minirad.route.router import Router, Settings
from minirad.route.workers import Patience

# No answer, half a head, half an event, a stream that ends too early (with or without its own words), ...
BEFORE = (
    "die",
    "drop",
    "garbage",
    "half-head",
    "empty",
    "short",
    "500",
    "502",
    "503",
    "429",
    "error",
    "hang",
)
MIDDLE = ("die-in", "drop-in", "half-in", "short-in", "error-in", "hang-in")
FINE = ("answer", "slow", "dribble", "flood")
EVENTS = 5  # of a stream, before the last one
# A busy machine stands still for a second at times: only who waits for a deadline takes a short one.
PATIENT = Patience(
    starting=30.0, every=0.05, deadline=10.0, hung=30.0, again=0.05, longest=0.2, restarts=3, grace=0.5
)  # fmt: skip
QUICK = replace(PATIENT, deadline=1.5, hung=0.8)


class Double:
    """One incarnation of a worker; also its own process, as far as a router can see.

    seen: bodies of the requests that came. dropped: how many were given up by who asked. thawed: unset, it
    takes connections and says nothing (as after SIGSTOP). ill: status of /health. unflushable: how often it
    refuses to empty its cache.
    """

    def __init__(self, doubles: Doubles, rank: int, ended: Callable[[], None]) -> None:
        self.doubles, self.rank, self._ended = doubles, rank, ended
        self.url, self.pid, self.code = "", 1000 + len(doubles.made), None
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.dropped = self.flushed = self.busy = 0
        self.ill, self.unflushable = 200, 0
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._words = ""
        self.cache: RadixCache | None = None
        self.publisher: Publisher | None = None

    # ------------------------------------------------------------ as a process

    async def open(self) -> None:
        router = self.doubles.owner
        if router is not None and router.kv_port:
            self.cache = RadixCache(router.engine.page_size)
            engine: Any = SimpleNamespace(cache=self.cache, bus=self.cache.bus)
            where = router.endpoints[self.rank], router.replays[self.rank]
            self.publisher = Publisher(engine, *where)
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def poll(self) -> int | None:
        return self.code

    def last_words(self) -> str:
        return self._words

    def end(self) -> None:
        if not self.doubles.stubborn:
            self.kill(0)

    def kill(self, code: int = -9, words: str = "") -> None:
        self.doubles.loop.call_soon_threadsafe(self._die, code, words)

    def _die(self, code: int, words: str = "") -> None:
        if self.code is None:
            self.code, self._words = code, words
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            for task in self._tasks:
                task.cancel()
            if self.publisher is not None:
                self.publisher.close()
            self._ended()

    # ------------------------------------------------------------ from the test's thread

    def freeze(self) -> None:
        self.doubles.call(self.thawed.clear)

    def thaw(self) -> None:
        self.doubles.call(self.thawed.set)

    # ------------------------------------------------------------ as a server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.thawed.wait()
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            await self.thawed.wait()
            method, path, _ = head.split(" ", 2)
            lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(lines.get("content-length", 0)))
            self.keys.append(lines.get("authorization", ""))
            if method == "GET":
                await self._asked(path, writer)
            elif path == "/flush_cache":
                self.flushed += 1
                self.unflushable -= self.unflushable > 0
                if self.cache is not None and not self.unflushable:
                    self.cache.reset()
                await _whole(writer, 409 if self.unflushable else 200, {})
            else:
                await self._request(json.loads(body), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _asked(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            return await _whole(writer, self.ill, {"status": "so so"})
        model = {"id": "double", "object": "model", "created": 0, "owned_by": f"w{self.rank}"}
        await _whole(writer, 200, {"object": "list", "data": [model]})

    async def _request(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.seen.append(body)
        if self.cache is not None:
            key = RadixKey(np.array(body["prompt"]))
            self.cache.insert(key, np.zeros(len(key), dtype=np.int64))
        plan = json.loads(body.get("user") or "{}")
        what = plan.get(str(self.rank), plan.get("*", "answer"))
        gone = asyncio.ensure_future(reader.read(1))
        work = asyncio.ensure_future(self._do(what, body, writer))
        self.busy += 1
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            self.dropped += not work.done()
        finally:
            self.busy -= 1
            for task in (gone, work):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await work

    async def _do(self, what: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        stream = bool(body.get("stream"))
        if what == "slow":
            await asyncio.sleep(0.15)
        elif what == "hang":
            await asyncio.sleep(1000)
        elif what == "die":
            self._die(-9)
            await asyncio.sleep(1)
        elif what == "drop":
            writer.transport.abort()
        elif what == "garbage":
            writer.write(b"I do not speak HTTP\r\n\r\n")
        elif what == "half-head":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
        elif what in ("500", "502", "503", "429", "400", "404"):
            kind = "invalid_request_error" if what in ("400", "404") else "server_error"
            said = {"message": f"w{self.rank} says {what}", "type": kind, "param": None, "code": None}
            await _whole(writer, int(what), {"error": said}, "7" if what == "429" else "")
        if what in ("empty", "short", "error", *FINE, *MIDDLE):
            await (self._stream if stream else self._answer)(what, body, writer)

    async def _answer(self, what: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if what in ("error", "error-in"):  # of an answer that is no stream they are a status
            return await _whole(writer, 500, {"error": {"message": "broken", "type": "server_error"}})
        data = json.dumps(self.reply(body)).encode()
        writer.write(_head(200, "application/json", len(data)))
        if what in FINE:
            writer.write(data)
            return await writer.drain()
        writer.write(data[: len(data) // 2 if what.endswith("-in") else 0])
        await writer.drain()
        await self._break(what, writer)

    async def _stream(self, what: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(_head(200, "text/event-stream; charset=utf-8"))
        if what == "error":
            _chunk(writer, _event({"error": {"message": "broken", "type": "server_error"}}))
        elif what not in ("empty", "short"):
            for number in range(EVENTS if what in FINE else EVENTS // 2):
                if what == "dribble" and number and self.doubles.asked is not None:
                    await self.doubles.asked.acquire()
                more = {"more": "x" * (4 << 20)} if what == "flood" else {}
                nothing = {"usage": None} if body.get("stream_options") else {}
                _chunk(writer, _event({**nothing, **self.piece(body, number), **more}))
                await writer.drain()
                await asyncio.sleep(0.02 if what == "dribble" else 0.001)
        if what in FINE:
            usage = {"choices": [], "usage": self.reply(body)["usage"]}
            asked = (body.get("stream_options") or {}).get("include_usage")
            _chunk(writer, _event(self.last(body)) + (_event(usage) if asked else b"") + b"data: [DONE]\n\n")
        elif what.endswith("-in"):
            await self._break(what, writer)
        if what != "empty":
            _chunk(writer, b"")
        await writer.drain()

    async def _break(self, what: str, writer: asyncio.StreamWriter) -> None:
        if what == "die-in":
            await asyncio.sleep(0.02)  # what was written has arrived
            self._die(-9)
            await asyncio.sleep(1)
        elif what == "drop-in":
            await asyncio.sleep(0.02)
            writer.transport.abort()
        elif what == "half-in":
            _chunk(writer, b'data: {"half')
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
        elif what == "error-in":
            _chunk(writer, _event({"error": {"message": "the engine broke", "type": "server_error"}}))
        elif what == "hang-in":
            await asyncio.sleep(1000)

    # ------------------------------------------------------------ what it says

    def text(self, body: dict[str, Any], number: int) -> str:
        return f"w{self.rank}:{sum(body['prompt'])}:{number} "

    def piece(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": self.text(body, number), "finish_reason": None}]}

    def last(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self.text(body, number) for number in range(EVENTS))
        prompt = len(body["prompt"])
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": prompt // 2}}
        return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}


class Doubles:
    """Starts doubles in the place of workers. made: all of them, the oldest first.

    unborn: ranks whose processes end at once, with that code. stubborn: `end` ends none. asked: where there
    is one, a stream that dribbles waits for it before each event but the first (`ask_one_more`).
    """

    def __init__(self) -> None:
        self.made: list[Double] = []
        self.unborn: dict[int, int] = {}
        self.asked: asyncio.Semaphore | None = None
        self.owner: Router | None = None
        self.stubborn = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Doubles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for double in self.made:
            double.kill()
        time.sleep(0.01)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()

    def launch(self, rank: int, ended: Callable[[], None]) -> Double:
        double = Double(self, rank, ended)
        self.made.append(double)
        asyncio.run_coroutine_threadsafe(double.open(), self.loop).result(20)
        if rank in self.unborn:
            double.url = ""
            double.kill(self.unborn[rank], "no memory left")
        return double

    def router(self, workers: int = 3, **more: Any) -> Router:
        """A router, not yet started, whose workers are doubles; without KV events unless told otherwise."""
        usual = {
            "policy": "round-robin", "patience": PATIENT, "follow": False, "limits": Limits(quiet=30.0),
        }  # fmt: skip
        self.owner = Router(Settings(workers=workers, **{**usual, "launch": self.launch, **more}))
        return self.owner

    def ask_one_more(self) -> None:
        """A stream that dribbles may go on by one event."""
        assert self.asked is not None
        self.loop.call_soon_threadsafe(self.asked.release)

    def call(self, what: Callable[[], Any]) -> None:
        """Calls this in the doubles' thread, and waits for it."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (what(), done.set()))
        assert done.wait(20)

    def of(self, rank: int) -> Double:
        """The worker's present process."""
        return [double for double in self.made if double.rank == rank][-1]


def _head(status: int, kind: str, length: int | None = None, retry: str = "") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    wait = f"retry-after: {retry}\r\n" if retry else ""
    return f"HTTP/1.1 {status} So\r\ncontent-type: {kind}\r\n{wait}{size}\r\n\r\n".encode()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


async def _whole(writer: asyncio.StreamWriter, status: int, said: dict[str, Any], retry: str = "") -> None:
    data = json.dumps(said).encode()
    writer.write(_head(status, "application/json", len(data), retry) + data)
    await writer.drain()
