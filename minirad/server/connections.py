"""Around the app: connections that say nothing, Ctrl-C, and a parent that is gone.

uvicorn speaks HTTP. What it leaves open is closed here: a connection on which no whole request comes, one
whose client does not read. And the end is ours: first no more requests, then a few seconds for those that are
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from minirad.server.protocol import ApiError
from minirad.server.service import Service

HEADER_SECONDS = 20.0  # in which the head of a request has to come
MOST_CONNECTIONS = 900  # of the 1,024 files that a process may have open where nobody changed that
LOOK = 0.5  # seconds between two looks for the parent
SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Connection(H11Protocol):
    """One connection. Its app finds it in the scope's state, to cut it off."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MOST_CONNECTIONS:
            transport.abort()
        # asyncio leaves it out for a socket of create_server; head and body then wait 40 ms for each other.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered in OpenAI's form, too; behind a good head by nobody else."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.transport.abort()  # an answer has begun
        body = ApiError(msg).body()
        head = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=400, headers=head, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's, with an end in two steps. ready: called when connections are taken."""

    def __init__(self, app: Any, service: Service, ready: Callable[[], None], grace: float) -> None:
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            log_level="critical", server_header=False, timeout_graceful_shutdown=int(grace) + 3,
            timeout_keep_alive=15,
        )  # fmt: skip
        super().__init__(config)
        self._service, self._ready, self._grace = service, ready, grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the server, and are not raised again when it has ended. Only the main thread
        gets them: in another one somebody else says when to end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self._signalled) for each in SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _signalled(self, number: int, frame: Any) -> None:
        self.end_soon()

    def end_soon(self) -> None:
        """From any thread: no more requests, and those that are here have a few seconds; at the second call
        none."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        grace = 0.0 if self.should_exit else self._grace
        self.should_exit = True
        self._service.end()
        asyncio.get_running_loop().call_later(grace, self._service.end_all, "the server is ending")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; ValueError, naming the place, where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        said = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # the place, once more
        raise ValueError(f"cannot listen at {host}:{port}: {said}") from None


class ParentWatch(threading.Thread):
    """Sees when the process that started this one is gone, however it ended.

    on_gone: called then; at first it ends this process at once, which nobody needs any more.
    """

    def __init__(self, parent: int) -> None:
        super().__init__(name="parent", daemon=True)
        self._parent = parent
        self.on_gone: Callable[[], None] = lambda: os._exit(1)

    def run(self) -> None:
        _wait_for_end(self._parent)
        with contextlib.suppress(OSError, ValueError):  # stderr may have been a pipe to it
            print("minirad serve: the process that started it is gone", file=sys.stderr, flush=True)
        self.on_gone()
        time.sleep(30)  # a step that never ends must not keep an orphan alive
        os._exit(1)


def _wait_for_end(parent: int) -> None:
    if sys.platform == "win32":
        import ctypes

        kernel = ctypes.windll.kernel32
        handle = kernel.OpenProcess(0x00100000, False, parent)  # SYNCHRONIZE
        if handle:
            kernel.WaitForSingleObject(handle, -1)
        return
    while os.getppid() == parent:
        time.sleep(LOOK)
