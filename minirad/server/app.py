"""The API over HTTP: routes, keys, limits and streams.

Everything here runs in one event loop, which never waits for the engine: pieces come from the engine's thread
by `call_soon_threadsafe`, prompts are tokenised in a thread of their own. A client that goes away is noticed
while its answer is streamed and while it is made, and its request is cancelled at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minirad.server import protocol
from minirad.server.asked import chat_spec, completion_spec
from minirad.server.protocol import ApiError, Chat, Completion
from minirad.server.replies import DONE, Writer, event
from minirad.server.service import Busy, Ended, Piece, Service, Spec, Ticket
from minirad.server.settings import Limits, Settings

OPEN_TO_ALL = ("/health", "/metrics")  # without a key, as SGLang has it
MORE_CONNECTIONS = 64  # requests that may be read and refused beside those that have a place
GONE = 499  # what is noted of a client that went away; nobody is sent it


def make_app(
    service: Service, settings: Settings | None = None, *, info: Callable[[], dict[str, Any]] | None = None,
    metrics: Any = None,
) -> ASGIApp:  # fmt: skip
    """The ASGI app in front of a service. info: what /server_info adds; metrics: a metrics.Metrics, for
    /metrics."""
    settings = settings or Settings()
    api = _Api(service, settings, info or dict, metrics)
    return Door(api.app, settings.api_key, None if metrics is None else metrics.answered)


class _Api:
    """The routes."""

    def __init__(self, service: Service, settings: Settings, info: Callable[[], Any], metrics: Any) -> None:
        self.service, self.settings, self.info, self.metrics = service, settings, info, metrics
        if settings.model in dict(service.engine.config.lora):
            raise ValueError(f"the model is served as {settings.model!r}, but an adapter has that name")
        self.created = int(time.time())
        self.reading = 0  # requests between their first byte and the end of their answer
        self.workers = ThreadPoolExecutor(2, thread_name_prefix="prompts")
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.model, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.told, methods=["GET"]),
                Route("/server_info", self.server_info, methods=["GET"]),
                Route("/flush_cache", self.flush_cache, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        )
        self.app.state.api = self  # for who looks from outside
        self.app.router.redirect_slashes = False  # what is not here is not here

    # ------------------------------------------------------------ generating

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, protocol.completion, completion_spec)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, protocol.chat, chat_spec)

    async def _generate(self, request: Request, parse: Any, spec_of: Any) -> Response:
        self.reading += 1
        try:
            if self.reading > self.service.capacity + MORE_CONNECTIONS:
                raise _busy(f"{self.reading} requests are being read or answered", 1)
            data = await body_of(request, self.settings.limits)
            loop = asyncio.get_running_loop()
            body, spec = await loop.run_in_executor(
                self.workers, partial(self._understand, data, parse, spec_of)
            )
            writer = Writer(body, spec, spec.lora or self.settings.model, self.service.engine.tokenizing)
            answer = _Answer(self.service, spec, writer)
            answer.submit()
        except BaseException:
            self.reading -= 1
            raise
        return _Reply(answer, self._answered)

    def _answered(self) -> None:
        self.reading -= 1

    def _understand(self, data: bytes, parse: Any, spec_of: Any) -> tuple[Completion | Chat, Spec]:
        """In a thread of its own: a long prompt takes a while."""
        body = parse(data)
        if body.model is not None and body.model not in self._names():
            raise _no_model(body.model)
        return body, spec_of(body, self.service)

    # ------------------------------------------------------------ everything else

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: the model, and each of its adapters as another one."""
        return _json({"object": "list", "data": [self._model(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        name = request.path_params["name"]
        if name not in self._names():
            raise _no_model(name)
        return _json(self._model(name))

    def _names(self) -> list[str]:
        return [self.settings.model, *dict(self.service.engine.config.lora)]

    def _model(self, name: str) -> dict[str, Any]:
        config = self.service.engine.config
        assert config.max_context is not None and config.kv_tokens is not None
        return {
            "id": name, "object": "model", "created": self.created, "owned_by": "minirad",
            "max_model_len": min(config.max_context, config.kv_tokens),
            **({} if name == self.settings.model else {"parent": self.settings.model}),
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while requests are taken and steps end."""
        service, limit = self.service, self.settings.limits.hang
        trouble = service.error or ("the server is ending" if service.ending else "")
        if not trouble and service.hangs > limit:
            trouble = f"a step has been running for {service.hangs:.0f} seconds"
        state = {"status": trouble or "ok", "open": service.open, "turns": service.turns}
        return _json(state, 503 if trouble else 200)

    async def told(self, request: Request) -> Response:
        """`GET /metrics`."""
        if self.metrics is None:
            raise ApiError("this server keeps no metrics", 404, code="not_found")
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    async def server_info(self, request: Request) -> Response:
        """`GET /server_info`: how it was started, and where its KV events can be had."""
        return _json({"model": self.settings.model, **self.info()})

    async def flush_cache(self, request: Request) -> Response:
        """`POST /flush_cache`: empties the tree; refused while requests are here."""
        try:
            await asyncio.wrap_future(self.service.call(lambda engine: engine.flush_cache()))
        except ValueError as error:
            raise ApiError(str(error), 409) from None
        except Ended as error:
            raise _ended(error) from None
        return _json({"status": "the cache is empty"})


class Door:
    """In front of the routes: who may come in, and what is noted of each request.

    key: None lets everybody in. answered: told the path and the status of each answer.
    """

    def __init__(
        self, app: Starlette, key: str | None, answered: Callable[[str, int], None] | None = None
    ) -> None:  # fmt: skip
        self._app, self._key, self._answered, self.state = app, key, answered, app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = GONE

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refused = self._refusal(scope)
            await (refused or self._app)(scope, receive, noting)
        except Exception:
            traceback.print_exc()
            if status != 500:
                raise  # an answer has begun: the connection is closed
        finally:
            if self._answered is not None:
                self._answered(scope["path"], status)

    def _refusal(self, scope: Scope) -> Response | None:
        request, key = Request(scope), self._key
        origin = request.headers.get("origin")
        if origin is not None and not _same_site(origin, request.headers.get("host", "")):
            said = "a page of another site may not ask this server"
            return _refused(ApiError(said, 403, code="forbidden_origin"))
        if key is None or scope["path"] in OPEN_TO_ALL:
            return None
        given = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(given, f"Bearer {key}".encode()):
            return None
        said = "Incorrect API key provided." if given else "You didn't provide an API key."
        headers = {"WWW-Authenticate": "Bearer"}
        return _refused(ApiError(said, 401, code="invalid_api_key", headers=headers))


def _same_site(origin: str, host: str) -> bool:
    """A browser says which page asks. One that reaches us by a name made for that is another site, too."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return parts.netloc == host and (name == "localhost" or name.replace(".", "").isdigit() or ":" in name)


# ---------------------------------------------------------------------- one answer


class _Answer:
    """One request between the engine's thread and the event loop."""

    def __init__(self, service: Service, spec: Spec, writer: Writer) -> None:
        self.service, self.spec, self.writer = service, spec, writer
        self.ticket: Ticket | None = None
        self.left = spec.samples
        self.on_stalled = self.cancel  # the client does not read what it is sent
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[Piece] = deque()
        self._news = asyncio.Event()

    def submit(self) -> None:
        """ApiError where the service does not take it."""
        try:
            self.ticket = self.service.submit(self.spec, self._from_engine)
        except Busy as busy:
            raise _busy(str(busy), busy.seconds) from None
        except Ended as error:
            raise _ended(error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self.ticket is not None:
            self.service.cancel(self.ticket)
        self._news.set()

    def _from_engine(self, pieces: list[Piece]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every client
            self._loop.call_soon_threadsafe(self._take, pieces)

    def _take(self, pieces: list[Piece]) -> None:
        self._pieces += pieces
        if len(self._pieces) > self.service.limits.unread * self.spec.samples:
            self.on_stalled()
        self._news.set()

    async def news(self) -> list[Piece]:
        """Waits for what is new; ApiError where there will be no more."""
        assert self.ticket is not None
        while not self._pieces:
            if self.ticket.reason:
                raise ApiError(self.ticket.reason, 503, "server_error", code="unavailable")
            self._news.clear()
            await self._news.wait()
            if self.ticket.cancelled:
                return []
        found = [*self._pieces]
        self._pieces.clear()
        self.left -= sum(piece.output is not None for piece in found)
        for piece in found:
            self._check(piece)
        return found

    def _check(self, piece: Piece) -> None:
        """ApiError for a reply that did not come to its end."""
        output = piece.output
        trouble = "".join(getattr(mask, "trouble", "") for mask in self.spec.masks)
        if output is not None and output.finish_reason == "error" and trouble:  # the schema was too much
            raise ApiError(f"response_format: {trouble}", param="response_format")
        if output is not None and output.finish_reason == "error":
            said = output.error or "the engine could not answer"
            raise ApiError(said, 500, "server_error", code="engine_error")
        if output is not None and output.finish_reason == "abort":
            raise ApiError("the request was aborted", 503, "server_error", code="aborted")


class _Reply(Response):
    """Sends an answer, whole or as a stream, and looks whether its client is there meanwhile."""

    def __init__(self, answer: _Answer, over: Callable[[], None]) -> None:
        self._answer, self._over = answer, over
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        answer.on_stalled = partial(self._hang_up, scope)
        watch = asyncio.ensure_future(self._until_gone(receive))
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # its client is gone
                answer.cancel()
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled() and work.exception() is not None:
                raise work.exception()  # type: ignore[misc]
        finally:
            answer.cancel()  # does nothing where it has ended
            for task in (watch, work):
                task.cancel()
            self._over()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._stream if self._answer.spec.stream else self._whole)(scope, receive, send)
        except (TimeoutError, asyncio.TimeoutError):
            self._answer.on_stalled()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        try:
            while answer.left:
                pieces = await answer.news()
                if not pieces:
                    return
                answer.writer.take(pieces)
            response = _json(answer.writer.whole())
        except ApiError as error:
            response = _refused(error)
        await self._in_time(response(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the first piece, so that what fails before it has a status of its own."""
        answer = self._answer
        try:
            pieces = await answer.news()
        except ApiError as error:
            return await self._in_time(_refused(error)(scope, receive, send))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        try:
            await self._in_time(send(start))
            await self._events(pieces, send)
        except ApiError as error:
            await self._send(send, event({"error": error.error()}), more=False)

    async def _events(self, pieces: list[Piece], send: Send) -> None:
        answer = self._answer
        while pieces:
            data = b"".join(event(chunk) for chunk in answer.writer.chunks(pieces))
            if data:
                await self._send(send, data)
            if not answer.left:
                last = event(answer.writer.usage_chunk()) if answer.writer.body.include_usage else b""
                return await self._send(send, last + DONE, more=False)
            pieces = await answer.news()

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        await self._in_time(send({"type": "http.response.body", "body": data, "more_body": more}))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        """TimeoutError where the client reads nothing for too long."""
        await asyncio.wait_for(sending, self._answer.service.limits.stalled)

    def _hang_up(self, scope: Scope) -> None:
        """The client does not read: its request ends, and so does the connection, with what waits in it."""
        self._answer.cancel()
        print(f"minirad serve: {self._answer.writer.id} aborted: its client does not read", file=sys.stderr)
        connection = scope.get("state", {}).get("connection")
        if connection is not None:
            connection.transport.abort()


# ---------------------------------------------------------------------- words


async def body_of(request: Request, limits: Limits) -> bytes:
    """A body of JSON, of bounded size and in bounded time; else ApiError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("the body must be JSON: Content-Type: application/json", 415)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and len(length) < 20 and int(length) > limits.body:
        raise _too_large(limits.body)
    try:
        return await asyncio.wait_for(_read(request, limits.body), limits.body_seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(f"the body did not come within {limits.body_seconds:g} seconds", 408) from None
    except ClientDisconnect:
        raise ApiError("the client went away", GONE) from None


async def _read(request: Request, most: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise _too_large(most)
    return bytes(data)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _refused(error: ApiError) -> Response:
    headers = {**error.headers, **({"Connection": "close"} if error.status == 408 else {})}
    return Response(error.body(), error.status, headers, "application/json")


async def _on_refusal(request: Request, error: Any) -> Response:
    return _refused(error)


async def _on_error(request: Request, error: Exception) -> Response:
    """A mistake of ours. Starlette raises it again when this is sent."""
    return _refused(ApiError(f"{type(error).__name__}: {error}", 500, "server_error"))


async def _not_here(request: Request, error: Any) -> Response:
    """404 and 405 of the router, in OpenAI's form."""
    said = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return _refused(ApiError(said, error.status_code, code=code, headers=dict(error.headers or {})))


HANDLERS: Any = {ApiError: _on_refusal, HTTPException: _not_here, Exception: _on_error}


def _no_model(name: str) -> ApiError:
    return ApiError(
        f"The model {name[:200]!r} does not exist; /v1/models lists what there is.", 404, param="model",
        code="model_not_found",
    )  # fmt: skip


def _busy(said: str, seconds: int) -> ApiError:
    headers = {"Retry-After": str(seconds)}
    return ApiError(f"{said}: try again in {seconds} s", 429, "rate_limit_error", None, "queue_full", headers)


def _ended(error: Ended) -> ApiError:
    return ApiError(str(error), 503, "server_error", code="unavailable")


def _too_large(most: int) -> ApiError:
    return ApiError(f"the body is larger than {most:,} bytes", 413, code="body_too_large")
