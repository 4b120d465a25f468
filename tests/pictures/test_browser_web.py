"""The live page in a real browser as people reach it: many windows, forwarded ports, proxies with a path; and
what a page of another origin, or a name made to mean 127.0.0.1, gets."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from browsers import at, chromium, until
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler, websocket_connect

from minirad.fleet.endpoints import free_ports
from viz.live import Driver, Live, Settings

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PREFIX = "/user/ada/proxy/8321"


@pytest.fixture(scope="module")
def browser():
    """For this browser every name is this machine."""
    with chromium("--host-resolver-rules=MAP * 127.0.0.1") as started:
        yield started


@pytest.fixture
def context(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture(scope="module")
def live():
    """Two steps of a chat, and an engine that waits for more."""
    driver = Driver(Settings(workload="chat"), speed=0, paused=True)
    allowed = ("hub.example.org", "bare.example.org:7321")
    with Live(driver, allowed=allowed) as server:
        start = time.monotonic()
        while driver.run_now is None:
            assert time.monotonic() - start < 60
            time.sleep(0.01)
        for _ in range(2):
            driver.command("step", {}).result(timeout=30)
        yield server


# ---------------------------------------------------------------------- a small reverse proxy


class Proxy:
    """Passes HTTP and WebSockets at PREFIX on to a port. headers: what it makes of those that came."""

    def __init__(self, port: int, headers) -> None:
        self._loop, self._target, self._headers = asyncio.new_event_loop(), f"127.0.0.1:{port}", headers
        self._sockets = bind_sockets(0, "127.0.0.1")
        self.port = self._sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop, proxy = asyncio.Event(), self

        class Http(RequestHandler):
            async def get(self, path):
                address, asked = f"http://{proxy._target}{path}?{self.request.query}", self.request
                headers = proxy._headers(asked.headers)
                sent = HTTPRequest(address, asked.method, headers, asked.body or None)
                answer = await AsyncHTTPClient().fetch(sent, raise_error=False)
                self.set_status(answer.code)
                for name in ("Content-Type", "Content-Security-Policy", "Cross-Origin-Resource-Policy"):
                    if name in answer.headers:
                        self.set_header(name, answer.headers[name])
                self.finish(answer.body)

            post = get

        class Sockets(WebSocketHandler):
            def check_origin(self, origin):
                return True

            async def open(self):
                headers = proxy._headers(self.request.headers)
                for name in [name for name in headers if name.startswith("Sec-Websocket")]:
                    del headers[name]
                address = f"ws://{proxy._target}/stream?{self.request.query}"
                self.behind = await websocket_connect(HTTPRequest(address, headers=headers))
                self.passing = asyncio.ensure_future(self.down())

            async def down(self):
                while (message := await self.behind.read_message()) is not None:
                    await self.write_message(message)
                self.close()

            def on_close(self):
                self.passing.cancel()
                self.behind.close()

        server = HTTPServer(Application([(f"{PREFIX}/stream", Sockets), (f"{PREFIX}(/.*)", Http)]))
        server.add_sockets(self._sockets)
        await self._stop.wait()
        server.stop()
        await server.close_all_connections()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)


def as_it_came(headers):
    """jupyter-server-proxy."""
    return headers.copy()


def with_the_host_beside(headers):
    """Codespaces, and nginx as its manuals advise."""
    changed = headers.copy()
    changed["X-Forwarded-Host"], changed["Host"] = headers["Host"], "localhost:8321"
    return changed


def without_a_word(headers):
    """nginx as it comes."""
    changed = headers.copy()
    changed["Host"] = "localhost:8321"
    return changed


def drives(page, url: str, live: Live) -> None:
    """The page shows what there is, steps the engine, shows what comes, and asks it something."""
    page.goto(url)
    frames = len(live.driver.run_now.trace)
    at(page, f"step {frames}")
    page.keyboard.press("ArrowLeft")
    at(page, f"step {frames - 1}")
    page.keyboard.press("End")
    at(page, f"step {frames}")
    page.keyboard.press("ArrowRight")
    at(page, f"step {frames + 1}")
    assert page.locator(".mr-tree g.node").count() > 1
    page.fill(".prompt", "Hello")
    until(page, "document.querySelector('.whatif').innerText.includes('would hit')")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        (as_it_came, "localhost"),
        (as_it_came, "hub.example.org"),
        (with_the_host_beside, "127.0.0.1"),
        (with_the_host_beside, "hub.example.org"),
        (without_a_word, "bare.example.org"),
    ],
)
def test_behind_a_proxy_with_a_path_and_another_port(context, live, headers, name):
    with Proxy(live.server.port, headers) as proxy:
        if headers is without_a_word:  # only the person who started it can say under which port it is seen
            gate = live.server.gate
            object.__setattr__(gate, "allowed", (*gate.allowed, f"{name}:{proxy.port}"))
        page = context.new_page()
        complaints = []
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else 0)
        drives(page, f"http://{name}:{proxy.port}{PREFIX}/", live)
        assert complaints == []
        page.goto("about:blank")


@pytest.mark.parametrize("headers", [as_it_came, with_the_host_beside])
def test_a_proxy_opens_no_door_to_other_names(context, live, headers):
    """A rebound name in front of a proxy: the proxy itself may not look."""
    with Proxy(live.server.port, headers) as proxy:
        answer = context.new_page().goto(f"http://evil.example:{proxy.port}{PREFIX}/")
        assert answer.status == 403 and "is not this server" in answer.text()


def test_a_name_made_to_mean_this_machine_is_refused(context, live):
    answer = context.new_page().goto(f"http://evil.example:{live.server.port}/")
    assert answer.status == 403 and "is not this server" in answer.text()


ATTACK = """async url => {
    const reached = [];
    const tried = (how, promise) => promise.then(() => reached.push(how), () => {});
    const json = { "Content-Type": "application/json" };
    await tried("post", fetch(url + "do/step", { method: "POST", headers: json, body: "{}" }));
    await tried("forwarded", fetch(url, { headers: { "X-Forwarded-Host": location.host } }));
    await tried("read", fetch(url + "view?i=1").then((answer) => answer.text()));
    await tried("script", new Promise((good, bad) => {
        const script = document.createElement("script");
        Object.assign(script, { src: url + "static/tree.js", onload: good, onerror: bad });
        document.head.append(script);
    }));
    await tried("socket", new Promise((good, bad) => {
        const socket = new WebSocket(url.replace("http", "ws") + "stream");
        socket.onopen = good; socket.onerror = bad;
    }));
    await fetch(url + "do/step", { method: "POST", mode: "no-cors", body: "{}" }).catch(() => {});
    return reached;
}"""


@pytest.mark.parametrize("name", ["127.0.0.1", "evil.example"])
def test_a_page_of_another_origin_reaches_nothing(context, live, name):
    """Even one of another port of this machine."""
    frames = len(live.driver.run_now.trace)
    with Proxy(live.server.port, as_it_came) as elsewhere:
        page = context.new_page()
        page.goto(f"http://{name}:{elsewhere.port}/")  # that server's own "not found"
        assert page.evaluate(ATTACK, f"http://127.0.0.1:{live.server.port}/") == []
    assert len(live.driver.run_now.trace) == frames


# ---------------------------------------------------------------------- many windows


def test_twelve_windows_at_once(context):
    """All visible, all following, and each can drive: none waits for another's connection."""
    driver = Driver(Settings(workload="chat"), speed=1.0, paused=True)
    with Live(driver) as live:
        windows = []
        for _ in range(12):
            windows.append(context.new_page())
            windows[-1].goto(live.url)
            at(windows[-1], "step 0")
        for n, window in enumerate((windows[0], windows[11], windows[6]), start=1):
            window.keyboard.press("ArrowRight")
            for each in windows:
                at(each, f"step {n}")
        for each in windows:
            assert each.locator(".status").inner_text() == "engine paused at step 3"
            each.goto("about:blank")


def test_a_window_comes_back_after_the_server(context):
    """The same address, another server: the page shows its run from the start."""
    page, port = context.new_page(), free_ports(1)
    with Live(Driver(Settings(workload="chat"), speed=0, paused=True), port) as first:
        assert first.server.port == port
        page.goto(first.url)
        at(page, "step 0")
        page.keyboard.press("ArrowRight")
        at(page, "step 1")
    until(page, "document.querySelector('.status').innerText.includes('connection lost')")
    with Live(Driver(Settings(workload="raw"), speed=0, paused=True), port) as second:
        assert second.server.port == port
        until(page, "document.querySelector('.chips').innerText.includes('nothing shared')")
        at(page, "step 0")
        page.keyboard.press("ArrowRight")
        at(page, "step 1")
        page.goto("about:blank")
