"""A small web server on one port of this machine: what is let in, how answers look, and its thread.

    with Server(rules, port=8321) as server: server.url

`rules` are tornado's: (path, handler class, arguments). Handlers derive from `Answer` (or, for a
WebSocket, from `Socket`), which check each request and give errors as JSON. The server runs in a thread of
its own on one event loop: a handler hands whatever takes time to `asyncio.to_thread`.

What is let in (`Gate`). There is no password: what protects the engine is that only its own page, in a
browser of the person who started it, may speak to it.

* The NAME in `Host` must be localhost, 127.0.0.1, [::1], the address listened on, or one of --allow-host,
  so that a foreign name that is made to resolve to 127.0.0.1 (DNS rebinding) is refused. The port may be
  any: behind `ssh -L 9000:localhost:8321` or an editor's port forwarding the browser sees another one.
* `X-Forwarded-Host`, where a proxy sends it, says how the browser sees us: each of its names must be
  allowed, too. It never replaces the check of `Host`, and no page of another origin can set it (a browser
  asks first, and this server never says yes).
* `Origin`, which browsers send with each POST and each WebSocket, must be the host AND port of one of
  these two, or exactly one of --allow-host, for proxies that pass neither on. So another port of the same
  machine is another origin, as it is to the browser.

Knows nothing of engines or recordings: routes.py does.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler
from tornado.websocket import WebSocketClosedError, WebSocketHandler

Json = dict[str, Any]
HOST = "127.0.0.1"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
LARGEST_REQUEST = 1024 * 1024  # bytes that are read at all
LAST_NEWS = 5.0  # seconds that open pages have to hear how it ended
PING_SECONDS = 20  # proxies close a connection that is silent for a minute or so
_HOST_FORM = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(\d{1,5}))?")
SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'{sockets}; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


# ---------------------------------------------------------------------- what is let in


def host_parts(text: str) -> tuple[str, str] | None:
    """ "Hub.example.org:8443" as ("hub.example.org", "8443"); no port: ""; None if it is no host."""
    found = _HOST_FORM.fullmatch(text.strip().lower())
    return (found[1], found[2] or "") if found else None


@dataclass(frozen=True, slots=True)
class Gate:
    """Which requests are answered; the module's text says why. allowed: names, each with or without port.

    ValueError names an address, or an entry of `allowed`, that is none.
    """

    address: str = HOST
    allowed: tuple[str, ...] = ()
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        if not self.address:  # to tornado it would mean: every address
            raise ValueError("--host takes an address such as 127.0.0.1 or 0.0.0.0, not ''")
        for text in self.allowed:
            if host_parts(text) is None:
                raise ValueError(f"--allow-host takes a name such as hub.example.org, not {text!r}")
        given = [self.address if ":" not in self.address else f"[{self.address}]", *self.allowed]
        names = {parts[0] for text in given if (parts := host_parts(text))}
        object.__setattr__(self, "names", LOOPBACK | names)

    def asked(self, headers: HTTPHeaders) -> list[str]:
        """The hosts that a request was asked under: by us, and by the browser in front of a proxy."""
        forwarded = headers.get("X-Forwarded-Host", "")
        return [headers.get("Host", ""), *(forwarded.split(",") if forwarded else ())]

    def refusal(self, headers: HTTPHeaders, link: bool = False) -> str:
        """Why a request is not answered, or "". link: it may be followed from any page, as it only shows."""
        for host in self.asked(headers):
            parts = host_parts(host)
            if parts is None or parts[0] not in self.names:
                return (
                    f"host {host!r} is not this server: if it is, start it with --allow-host {host or 'NAME'}"
                )
        origin = headers.get("Origin")
        if origin is not None and not self._own(origin, headers):
            return f"requests from {origin!r} are refused: the page was asked for under another host or port"
        if not link and headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return "requests from other sites are refused"
        return ""

    def _own(self, origin: str, headers: HTTPHeaders) -> bool:
        scheme, _, host = origin.partition("://")
        default = {"http": "80", "https": "443"}.get(scheme)
        parts = host_parts(host)
        if default is None or parts is None:
            return False
        known = [host_parts(text) for text in (*self.asked(headers), *self.allowed)]
        full = (parts[0], parts[1] or default)
        return any(each is not None and (each[0], each[1] or default) == full for each in known)


# ---------------------------------------------------------------------- answers


class Refused(HTTPError):
    """Ends a request with a status and one sentence."""

    def __init__(self, code: HTTPStatus, sentence: str) -> None:
        super().__init__(code)
        self.sentence = sentence


class Checked(RequestHandler):
    """What answers and sockets have in common: the gate, the headers, and errors as {"error": sentence}."""

    LINK = False  # may be followed from any page

    def set_default_headers(self) -> None:
        gate: Gate = self.application.settings["gate"]
        asked = [host.strip() for host in gate.asked(self.request.headers) if host_parts(host)]
        # Not every browser counts ws: as 'self'.
        sockets = "".join(f" ws://{host} wss://{host}" for host in dict.fromkeys(asked))
        for name, value in {
            "Cache-Control": "no-store",
            "Content-Security-Policy": SECURITY.format(sockets=sockets),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.set_header(name, value)
        self.clear_header("Server")

    def prepare(self) -> None:
        refusal = self.application.settings["gate"].refusal(self.request.headers, self.LINK)
        if refusal:
            raise Refused(HTTPStatus.FORBIDDEN, refusal)

    def query(self) -> dict[str, str]:
        return {
            name: values[-1].decode("utf-8", "replace")
            for name, values in self.request.query_arguments.items()
        }

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        """What a caller did wrong is told to the caller; the terminal shows our own faults only."""
        if not isinstance(value, HTTPError):
            super().log_exception(typ, value, tb)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, Refused):
            sentence = error.sentence
        elif isinstance(error, HTTPError) or error is None:
            sentence = HTTPStatus(status_code).phrase
        else:
            sentence = f"{type(error).__name__}: {error}"
        self.finish({"error": sentence})


class Answer(Checked):
    """A request that is answered at once."""

    def send(self, body: bytes, kind: str) -> None:
        self.set_header("Content-Type", kind)
        self.finish(body)

    def json(self, data: Any) -> None:
        self.send(json.dumps(data, separators=(",", ":")).encode(), "application/json")

    def body(self, largest: int) -> Json:
        """The JSON object that was sent, of `largest` bytes at most."""
        if len(self.request.body) > largest:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {largest} bytes are taken")
        if self.request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "JSON only")
        try:
            data = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
        if not isinstance(data, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
        return data


class Missing(Answer):
    """Where there is nothing."""

    def prepare(self) -> None:
        super().prepare()
        raise Refused(HTTPStatus.NOT_FOUND, f"there is nothing at {self.request.path}")


class Socket(Checked, WebSocketHandler):
    """A WebSocket to our page. `tell` runs until the page is gone, and may send as it likes. Where it returns
    by itself once all is over, a server that ends waits for it: the page hears the last of it, however busy
    the machine."""

    def check_origin(self, origin: str) -> bool:
        return True  # the gate has looked, in prepare

    def open(self, *args: str, **kwargs: str) -> None:
        self.application.settings["open"].add(self)
        self.telling = asyncio.ensure_future(self._told())

    async def _told(self) -> None:
        try:
            await self.tell()
        except WebSocketClosedError:
            pass
        finally:
            self.close()

    async def tell(self) -> None:
        raise NotImplementedError

    async def send(self, text: str) -> None:
        """Waits until the other end takes it: a slow page is sent less often, not more and more."""
        await self.write_message(text)

    def on_message(self, message: str | bytes) -> None:
        """Nothing is expected."""

    def on_close(self) -> None:
        self.application.settings["open"].discard(self)
        self.telling.cancel()


# ---------------------------------------------------------------------- the server


class Server:
    """Serves `rules` from a thread of its own. port 0: any free one; a taken one: another free one."""

    def __init__(
        self, rules: Sequence[Any], port: int = 0, address: str = HOST, allowed: Sequence[str] = ()
    ) -> None:
        self.gate = Gate(address, tuple(allowed))
        self._sockets = _bound(port, address)
        self._application = Application(
            list(rules), default_handler_class=Missing, gate=self.gate, open=set(), log_function=_quiet,
            websocket_ping_interval=PING_SECONDS, websocket_max_message_size=4096,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()

    @property
    def address(self) -> str:
        return str(self._sockets[0].getsockname()[0])

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Where a browser of this machine finds it."""
        name = {"0.0.0.0": HOST, "::": "[::1]"}.get(self.address, self.address)
        return f"http://{name if ':' not in name or name[0] == '[' else f'[{name}]'}:{self.port}/"

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Closes all connections and ends the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        http = HTTPServer(self._application, max_body_size=LARGEST_REQUEST)
        http.add_sockets(self._sockets)
        self._ready.set()
        await self._stopping.wait()
        http.stop()
        if pages := [page.telling for page in self._application.settings["open"]]:
            await asyncio.wait(pages, timeout=LAST_NEWS)
        for page in list(self._application.settings["open"]):
            page.close(1001, "the server ends")
        await http.close_all_connections()
        await asyncio.sleep(0)  # so that the closing frames leave
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def _bound(port: int, address: str) -> list[socket.socket]:
    """Listening sockets; another port where this one is taken. ValueError: no address of this machine."""
    try:
        return bind_sockets(port, address)
    except OSError:
        try:
            return bind_sockets(0, address)
        except OSError as error:
            raise ValueError(f"cannot listen on {address!r}: {error.strerror or error}") from error


def _quiet(handler: RequestHandler) -> None:
    """The terminal is for the engine."""
