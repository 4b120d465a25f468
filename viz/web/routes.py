"""What the live page asks its server for: itself, pictures, commands, and news over a WebSocket.

    GET  /             the page            GET /static/NAME     its scripts and style sheets
    GET  /view         one position        POST /do/COMMAND     something for the engine's thread
    POST /why          what a prompt would find at a position, and why not more
    GET  /stream       a WebSocket: the history first, then whatever comes, as it comes

All addresses in the page are relative, so that it works behind a proxy's path. A browser opens at most six
HTTP connections to one host, and each tab would hold one for its news; WebSockets are not counted.

Nothing here waits on the event loop: commands are futures of the engine's thread, pictures are drawn in
threads, and windows that ask for the same picture at once share one drawing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from minirad import own_code
from viz.trace import GRANULARITIES
from viz.web.compare import AnyPage, Shown
from viz.web.export import page_html
from viz.web.page import Page
from viz.web.server import Answer, Json, Refused, Socket

STATIC = Path(__file__).parents[1] / "static"
STATIC_TYPES = {".js": "text/javascript", ".css": "text/css"}
LARGEST_BODY = 64 * 1024
LARGEST_LOG = 1_000_000  # bytes of a request log that is pasted
LONGEST_WAIT = 30.0  # seconds that a page's command may wait for the engine
QUIET = 10.0  # seconds after which a page hears that we are still here
MOST_OPENED = 200  # folds that a page has clicked on
PIECE = 2000  # frames that are sent at a time: a long history shows while it still loads


class Source(Protocol):
    """What has a live page: driver.Driver."""

    @property
    def run_now(self) -> Shown | None: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def page_kind(self) -> str: ...
    def key(self, run: Shown) -> str: ...
    def hello(self, run: Shown) -> Json: ...
    def status(self) -> Json: ...
    def command(self, name: str, arguments: Json) -> Future[Any]: ...
    def listen(self, listener: Callable[[], None]) -> Callable[[], None]: ...


def rules(source: Source) -> list[Any]:
    """The page's addresses, for viz.web.Server."""
    return [
        (r"/", Index, {"source": source}),
        (r"/favicon\.ico", Icon),  # some browsers ask, whatever the page says
        (r"/static/([\w.-]+)", Static),
        (r"/view", View, {"source": source, "drawing": {}}),
        (r"/do/(\w+)", Command, {"source": source}),
        (r"/why", Why, {"source": source, "turn": asyncio.Lock()}),
        (r"/stream", Stream, {"source": source}),
    ]


class Index(Answer):
    LINK = True

    def initialize(self, source: Source) -> None:
        self.source = source

    def get(self) -> None:
        self.send(page_html(kind=self.source.page_kind).encode("utf-8"), "text/html; charset=utf-8")


class Icon(Answer):
    LINK = True

    def get(self) -> None:
        self.send(b"", "image/x-icon")


class Static(Answer):
    def get(self, name: str) -> None:
        files = {file.name: file for file in STATIC.iterdir() if file.suffix in STATIC_TYPES}
        if name not in files:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no {name}")
        self.send(files[name].read_bytes(), f"{STATIC_TYPES[files[name].suffix]}; charset=utf-8")


class View(Answer):
    """One position of the present run. drawing: what is being drawn for whom, by what was asked."""

    def initialize(self, source: Source, drawing: dict[Any, asyncio.Future[bytes]]) -> None:
        self.source, self.drawing = source, drawing

    async def get(self) -> None:
        asked = self.query()
        run = self.source.run_now
        if run is None or self.source.key(run) != asked.get("run"):
            raise Refused(HTTPStatus.CONFLICT, "that run is over")
        try:
            wanted = _position(asked)
            key = (asked["run"], len(run.trace), *wanted)
            if key not in self.drawing:
                self.drawing[key] = asyncio.ensure_future(asyncio.to_thread(_drawn, run.page, wanted))
                self.drawing[key].add_done_callback(lambda _: self.drawing.pop(key, None))
            self.send(await asyncio.shield(self.drawing[key]), "application/json")
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error


Wanted = tuple[str, int, tuple[int, ...], int, int | None]


def _position(asked: dict[str, str]) -> Wanted:
    """Granularity, index, opened nodes, height and rank that a query names. ValueError for nonsense."""
    granularity = asked.get("g", "step")
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}")
    opened = tuple(
        _whole("open", number) for number in asked.get("open", "").split(",")[:MOST_OPENED] if number
    )
    height = min(max(_whole("height", asked.get("height", "400")), 100), 4000)
    rank = _whole("rank", asked["rank"]) if asked.get("rank") else None
    return granularity, _whole("i", asked.get("i", "0")), opened, height, rank


def _whole(name: str, text: str) -> int:
    if not is_number(text.removeprefix("-")):
        raise ValueError(f"{name}={text:.40} is no number")
    return int(text)


def _drawn(page: AnyPage, wanted: Wanted) -> bytes:
    return json.dumps(page.view(*wanted), separators=(",", ":")).encode()


class Command(Answer):
    def initialize(self, source: Source) -> None:
        self.source = source

    async def post(self, name: str) -> None:
        arguments = self.body(LARGEST_BODY)
        try:
            answer = asyncio.wrap_future(self.source.command(name, arguments))
            self.json(await asyncio.wait_for(answer, LONGEST_WAIT))
        except asyncio.TimeoutError:
            why = own_code.slow() or "the engine is busy"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, why) from None
        except (ValueError, TypeError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error


class Why(Answer):
    """What a prompt would find in the present run. One question at a time, in a thread of its own."""

    def initialize(self, source: Source, turn: asyncio.Lock) -> None:
        self.source, self.turn = source, turn

    async def post(self) -> None:
        asked = self.body(LARGEST_LOG)
        run = self.source.run_now
        if run is None or self.source.key(run) != asked.get("run"):
            raise Refused(HTTPStatus.CONFLICT, "that run is over")
        page = run.page if isinstance(run.page, Page) else run.single_page
        if page is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "two engines are compared here: one can be asked about")
        from viz.web.ask import ask

        try:
            async with self.turn:
                self.json(await asyncio.to_thread(ask, page, asked))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error


# ---------------------------------------------------------------------- news


class Stream(Socket):
    """Messages {"event", "id", "data"}: "run", "frames", "status", and "here" when nothing happens.

    An id is `run:frames`: a page that lost its connection asks with ?since=id and goes on where it was.
    """

    def initialize(self, source: Source) -> None:
        self.source = source
        self.since, self.sent = "", 0

    async def get(self, *args: Any, **kwargs: Any) -> None:
        since = self.query().get("since", "")
        key, _, sent = since.partition(":")
        if since and not is_number(sent):
            raise Refused(HTTPStatus.BAD_REQUEST, f"{since!r} is not the id of an event")
        self.since, self.sent = key, int(sent or 0)
        await super().get(*args, **kwargs)

    async def tell(self) -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        forget = self.source.listen(lambda: _ring(loop, news))
        status: Json | None = None
        try:
            while True:
                news.clear()  # before looking: what comes while we look rings again
                ending = self.source.stopping
                run = self.source.run_now
                if run is not None:
                    await self._tell_run(run)
                now = {**self.source.status(), "slow": own_code.slow()}
                if now != status:
                    await self._event("status", now)
                    status = now
                if ending:
                    return
                await self._wait(news, now["slow"])
        finally:
            forget()

    async def _wait(self, news: asyncio.Event, slow: str) -> None:
        """Until something happens, be it in a learner's file that rings nobody's bell (slow: what was told of
        it); in between the page hears that the connection still stands."""
        looks = 0
        while not news.is_set() and own_code.slow() == slow:
            try:
                await asyncio.wait_for(news.wait(), own_code.LOOK)
            except asyncio.TimeoutError:
                looks += 1
                if looks * own_code.LOOK % QUIET == 0:
                    await self._event("here", None)

    async def _tell_run(self, run: Shown) -> None:
        if self.source.key(run) != self.since:
            self.since, self.sent = self.source.key(run), 0
            await self._event("run", self.source.hello(run))
        while (known := len(run.trace)) > self.sent:
            stop = min(known, self.sent + PIECE)
            text = await asyncio.to_thread(_frames, run.page, self.since, self.sent, stop)
            self.sent = stop
            await self.send(text)

    async def _event(self, name: str, data: Any) -> None:
        await self.send(_message(name, f"{self.since}:{self.sent}", data))


def _ring(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    """From any thread; a loop that has ended needs no news."""
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _frames(page: AnyPage, key: str, start: int, stop: int) -> str:
    frames = page.frames(start)[: stop - start]
    news = {"run": key, "from": start, "frames": frames, "requests": page.requests(start)}
    return _message("frames", f"{key}:{stop}", news)


def _message(name: str, number: str, data: Any) -> str:
    return json.dumps({"event": name, "id": number, "data": data}, separators=(",", ":"))


def is_number(text: str) -> bool:
    """Digits that int() takes, and not too many of them; "²".isdigit() is true, too."""
    return text.isascii() and text.isdigit() and len(text) < 16
