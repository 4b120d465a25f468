"""Shared by the server's tests: an engine that checks itself behind the app, by hand or in its thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from support import CheckedEngine

from minirad.config import EngineConfig
from minirad.server.app import make_app
from minirad.server.metrics import Metrics
from minirad.server.service import EngineThread, Piece, Service, Spec, Ticket
from minirad.server.settings import Limits, Settings

MODEL = "classroom"
ASK = "Question 1: What is the capital of France?\nAnswer 1:"


def new_engine(model: Any = None, tokenizer: Any = None, **config: Any) -> CheckedEngine:
    return CheckedEngine(EngineConfig(device="cpu", **config), model=model, tokenizer=tokenizer)


class Desk:
    """A service and its app. Turned by hand (`turns`), or by a thread while `running`."""

    def __init__(self, engine: Any, limits: Limits | None = None, key: str | None = None) -> None:
        self.engine, self.metrics = engine, Metrics()
        settings = Settings(MODEL, key, limits or Limits())
        self.service = Service(engine, settings.limits, self.metrics)
        self.app = make_app(self.service, settings, metrics=self.metrics, info=lambda: {"kv_events": None})

    @contextmanager
    def running(self) -> Iterator[Desk]:
        thread = EngineThread(self.service)
        thread.start()
        try:
            yield self
        finally:
            self.service.end()
            self.service.end_all("the test is over")
            thread.join(30)
            assert not thread.is_alive()

    def ask(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """One request, answered whole; body: JSON, bytes as they are, or None for a GET."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                if body is None:
                    return await client.request(more.pop("method", "GET"), path, **more)
                if isinstance(body, bytes):
                    more.setdefault("headers", {"content-type": "application/json"})
                    return await client.post(path, content=body, **more)
                return await client.post(path, json=body, **more)

        return asyncio.run(asked())

    def complete(self, **body: Any) -> Any:
        answer = self.ask("/v1/completions", {"prompt": ASK, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return events(answer.text) if body.get("stream") else answer.json()

    def chat(self, *messages: Any, **body: Any) -> Any:
        asked = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
        answer = self.ask("/v1/chat/completions", {"messages": asked, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return events(answer.text) if body.get("stream") else answer.json()

    def turns(self, most: int = 3000) -> int:
        """Turns until there is nothing to do."""
        for count in range(most):
            if not self.service.turn():
                return count
        raise AssertionError("still at work")


def events(text: str) -> list[Any]:
    """The data of server-sent events; "[DONE]" stays a text."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in found]


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    assert answer.headers["content-type"] == "application/json", answer.text
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"} and told["message"]
    return dict(told)


class Collected:
    """Takes a ticket's pieces."""

    def __init__(self, service: Service, spec: Spec) -> None:
        self.pieces: list[Piece] = []
        self.calls = 0
        self.ticket: Ticket = service.submit(spec, self._take)

    def _take(self, pieces: list[Piece]) -> None:
        self.calls += 1
        self.pieces += pieces

    def of(self, index: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.index == index]


class Client:
    """One ASGI request of a client that may go away, or not read: its messages as they come."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "query_string": b"", "scheme": "http", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1:8000")],
            "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000), "state": {},
        }  # fmt: skip
        self.messages: list[Any] = []
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self._body: bytes | None = data
        self.task = asyncio.ensure_future(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            data, self._body = self._body, None
            return {"type": "http.request", "body": data, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        return self.messages[0]["status"] if self.messages else None

    @property
    def text(self) -> str:
        return b"".join(each.get("body", b"") for each in self.messages).decode()


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Lets others run until something is so."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come to be"
        await asyncio.sleep(0.001)


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())
