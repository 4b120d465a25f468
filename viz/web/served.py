"""Page and OpenAI server over one engine: `python -m viz.live --serve 8000`.

The page's driver is the engine's one thread, as ever. Where it would make a step it lets the server's
`Service` (minirad/server/service.py) take in what has come by HTTP, make that step and hand out what is new.
So the page's pace is the server's: as fast as it goes, unless the page is slowed or paused; then it says so.

Only with --serve are starlette and uvicorn imported.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirad import workloads
from minirad.fleet.publish import Publisher
from minirad.server.command import api_key, is_loopback
from minirad.server.service import Piece, Service, Spec, Ticket
from minirad.server.settings import Limits, limits_of
from minirad.server.settings import Settings as Served
from viz.web.commands import Command, Session
from viz.web.compare import Shown
from viz.web.driver import Driver
from viz.web.runs import Run
from viz.web.server import HOST
from viz.web.settings import Settings

if TYPE_CHECKING:
    from minirad.engine import Engine
    from minirad.outputs import GenerationOutput

Json = dict[str, Any]
MOST_FRAMES = 20_000  # of a recording in memory; then a new one begins, with the same engine
ENDING = 6.0  # seconds that the end may take: what is open is told
ASKED = "Who are you?"  # by the request that the page shows how to send
NONE = workloads.Workload("none", "Requests by HTTP", ())


# ---------------------------------------------------------------------- what is asked for


def served_of(options: argparse.Namespace) -> Served:
    """As what, to whom and how much is served. ValueError for a key that is none."""
    name = options.served_model_name or Path(options.model or "classroom").name
    return Served(name, key_of(options), limits_of(options))


def key_of(options: argparse.Namespace) -> str | None:
    """The key that is asked for; it is said where other machines could ask without one.

    ValueError for what is no key.
    """
    key = api_key(options.api_key)
    if key is None and not is_loopback(options.host):
        where = f"every machine that reaches {options.host}"
        print(f"{where} can ask the server: it has no --api-key", flush=True)
    return key


# ---------------------------------------------------------------------- the server's thread


def example(url: str, key: str | None) -> str:
    """A command line that sends a request. The key itself is not shown."""
    said = ' -H "Authorization: Bearer KEY"' if key else ""
    body = json.dumps({"messages": [{"role": "user", "content": ASKED}]}, separators=(",", ":"))
    quoted = json.dumps(body) if os.name == "nt" else f"'{body}'"
    return f'curl {url}/v1/chat/completions -H "Content-Type: application/json"{said} -d {quoted}'


class Front:
    """A server's socket, bound when it is made, and its thread, once there is something to serve.

    url: where a program of this machine finds it, without a slash at its end; also when it has ended.
    ValueError for a port that cannot be had: another one would not be what was asked for.
    """

    def __init__(self, port: int, host: str = HOST) -> None:
        from minirad.server.connections import Server, listening

        self._socket = listening(host, port)  # who comes before the engine is there waits
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        address, number = self._socket.getsockname()[:2]
        name = {"0.0.0.0": HOST, "::": "::1"}.get(address, address)
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{number}"

    def start(self, app: Any, service: Service) -> None:
        """Serves from a thread of its own."""
        from minirad.server.connections import Server

        server = self._server = Server(app, service, lambda: None, grace=0.0)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[self._socket])), name="serve", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """No more connections; those that are open have a moment for their last words."""
        if self._server is None or self._thread is None:
            self._socket.close()
            return
        self._server.end_soon()
        self._thread.join(timeout=ENDING)


# ---------------------------------------------------------------------- the engine's thread


class _Heard(Service):
    """The service of a page's engine: says when something has come.

    came: called in any thread, with True for a request.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Any, came: Callable[[bool], None]) -> None:
        self._came = came
        super().__init__(engine, limits, metrics)

    def submit(self, spec: Spec, on_pieces: Callable[[list[Piece]], None]) -> Ticket:
        ticket = super().submit(spec, on_pieces)
        self._came(True)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        super().cancel(ticket)
        self._came(False)

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        answer = super().call(function)
        self._came(False)
        return answer


class ServedRun(Run):
    """A run whose steps are the server's turns.

    came: set while something waits to be taken in. before: the run whose engine and server this one goes on
    with; the server of a first run is set when it is there.
    """

    def __init__(
        self, number: int, settings: Settings, workload: workloads.Workload | None,
        before: ServedRun | None = None,
    ) -> None:  # fmt: skip
        self.service: Service | None = before.service if before else None
        self.came: threading.Event = before.came if before else threading.Event()
        super().__init__(number, settings, workload, before.engine if before else None)

    def note_idle(self) -> None:
        """As Run's. What comes is told before it is looked whether this is idle: so one of both is seen."""
        super().note_idle()
        if self.came.is_set():
            self.idle = False

    def _step(self) -> list[GenerationOutput]:
        assert self.service is not None
        finished: list[GenerationOutput] = []
        self.came.clear()
        self.service.turn(lambda: finished.extend(self.engine.step().finished))
        return finished + self.engine.outbox.take()  # of what was aborted, and no step followed

    def take_in(self) -> None:
        """What has come waits in the engine's queue, and is seen there; no step is made."""
        assert self.service is not None
        self.came.clear()
        self.service.turn(lambda: None)
        self.recorder.cut()
        self.note_idle()


class ServedDriver(Driver):
    """A page's driver that serves, too. front: where. served: as what, to whom, and how much.

    publisher: of the engine's KV events, of which /server_info tells.
    """

    ending = ENDING

    def __init__(
        self, settings: Settings, speed: float, front: Front, served: Served, *, paused: bool = False,
        publisher: Publisher | None = None,
    ) -> None:  # fmt: skip
        super().__init__(settings, speed, paused=paused)
        self.front, self.served = front, served
        self._publisher = publisher
        self._news = threading.Event()
        self.service: Service | None = None
        self.asked = 0  # requests that came by HTTP

    def begin(self, settings: Settings, workload: workloads.Workload | None) -> Shown:
        """The one run; ValueError where a page asks for another one."""
        if self.run_now is not None:
            raise ValueError(
                f"this engine serves at {self.front.url}: start the page anew for other settings"
            )
        if workload is None and settings.workload == NONE.name:
            workload = NONE
        run = ServedRun(1, settings, workload)
        self.run_now, self._news = run, run.came
        self._serve(run)
        self.begun(run)
        return run

    def _serve(self, run: ServedRun) -> None:
        """The server takes requests from now on."""
        from minirad.server.app import make_app
        from minirad.server.command import server_info
        from minirad.server.metrics import Metrics

        metrics = Metrics()
        service = self.service = run.service = _Heard(run.engine, self.served.limits, metrics, self._came)
        told = partial(server_info, run.engine, self._publisher)
        self.front.start(make_app(service, self.served, info=told, metrics=metrics), service)

    # ------------------------------------------------------------ from other threads

    def _came(self, asks: bool) -> None:
        """Something has come by HTTP (asks: a request): it is taken in with the next step, or at once where
        no step is to come."""
        self.asked += asks
        self._news.set()  # and only then it is looked which run there is, and whether that waits
        if (self.run_now is not None and self.run_now.idle) or not self.playing:
            self._commands.put((_take_in, {}, Future()))

    def status(self) -> Json:
        """As Driver's, and where the server is."""
        return {**super().status(), "serving": self._serving()}

    def _serving(self) -> Json:
        where = f"{self.front.url}/v1"
        if not self.playing:
            text = f"{where} is paused with this page: requests wait until play is pressed."
        elif self.speed:
            pace = f"{self.speed:g} step{'s' * (self.speed != 1)} per second"
            text = f"{where} is as slow as this page, at most {pace}: with max it is as fast as it can."
        elif self.asked:
            text = f"Serving at {where}, as fast as it goes; requests so far: {self.asked:,}"
        else:
            text = "Nobody has asked yet. Ask it:"
        shown = "" if self.asked else example(self.front.url, self.served.api_key)
        return {"text": text, "example": shown}

    # ------------------------------------------------------------ in the engine's thread

    def _end(self) -> None:
        """Whoever waits for an answer is told, before the page is."""
        if self.service is not None:
            if self.failure is not None:
                self.service.broke(self.failure)
            else:
                self.service.end()
                self.service.end_all("the server is ending")
                self.service.turn(lambda: None)
            self.service.finish()
        super()._end()
        self.front.stop()

    def _obey(self, command: Command, arguments: Json, answer: Future[Json]) -> bool:
        done = super()._obey(command, arguments, answer)
        if not self.playing and self._news.is_set():  # it was to be taken in with a step that does not follow
            super()._obey(_take_in, {}, Future())
        return done

    def _turn(self) -> None:
        super()._turn()
        run = self.run_now
        if isinstance(run, ServedRun) and len(run.trace) > MOST_FRAMES and run.player.done:
            self._go_on(run)

    def _go_on(self, run: ServedRun) -> None:
        """The recording has grown long: a new one of the same engine takes its place."""
        run.close()
        settings = dataclasses.replace(self.settings, workload=NONE.name)
        after = ServedRun(run.number + 1, settings, NONE, run)
        after.notices.append(_anew(run))
        self.run_now = after
        after.note_idle()  # once more: what came while it was made found the run before it at work
        self._announce()


def _anew(before: ServedRun) -> str:
    """Why a page begins anew, and where what it showed can be looked at."""
    first, last = before.recorder.header["start"]["step"], before.engine.steps
    kept = f"it is in {before.path}" if before.path else "without --record it is gone"
    return (
        f"This page begins anew after step {last:,}: the recording before, of {last - first:,} steps, "
        f"had grown long; {kept}."
    )


def _take_in(session: Session, arguments: Json) -> Json:
    run = session.run_now
    if isinstance(run, ServedRun) and run.came.is_set():
        run.take_in()
    return {}
