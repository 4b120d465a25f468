"""viz/web/server.py: what is let in and what is not, and that a server begins and ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading

import pytest
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.httputil import HTTPHeaders
from tornado.websocket import websocket_connect

from viz.web.server import Answer, Gate, Server, Socket


def refused(gate: Gate, link: bool = False, **headers: str) -> str:
    return gate.refusal(HTTPHeaders({name.replace("_", "-"): value for name, value in headers.items()}), link)


OWN = Gate()
HUB = Gate(allowed=("hub.example.org", "lab.example.org:8443"))


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8321"},
        {"Host": "localhost"},
        {"Host": "LocalHost:9000"},  # ssh -L 9000:localhost:8321
        {"Host": "[::1]:8321", "Origin": "http://[::1]:8321"},
        {"Host": "localhost:9000", "Origin": "http://localhost:9000"},
        {"Host": "localhost:80", "Origin": "http://localhost"},
        {"Host": "localhost:443", "Origin": "https://localhost"},  # behind something that speaks TLS
        {"Host": "localhost:9000", "Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:9000", "Sec-Fetch-Site": "none"},
        {"Host": "127.0.0.1:8321", "X-Forwarded-Host": "localhost:9000", "Origin": "http://localhost:9000"},
    ],
)
def test_our_own_page_is_answered(headers):
    assert refused(OWN, **headers) == ""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": ""},
        {"Host": "evil.example"},
        {"Host": "evil.example:8321", "Origin": "http://evil.example:8321"},  # a name made to mean 127.0.0.1
        {"Host": "localhost.evil.example:8321"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": "localhost:8321,evil.example"},
        {"Host": "localhost:8321:8321"},
        {"Host": "localhost:8321", "Origin": "http://evil.example"},
        {"Host": "localhost:8321", "Origin": "http://localhost:3000"},  # another server of this machine
        {"Host": "localhost:8321", "Origin": "http://127.0.0.1:8321"},  # another origin to the browser, too
        {"Host": "localhost:8321", "Origin": "http://localhost"},
        {"Host": "localhost:8321", "Origin": "null"},
        {"Host": "localhost:8321", "Origin": ""},
        {"Host": "localhost:8321", "Origin": "file://localhost:8321"},
        {"Host": "localhost:8321", "Origin": "http://localhost:8321.evil.example"},
        {"Host": "localhost:8321", "Sec-Fetch-Site": "cross-site"},
        {"Host": "localhost:8321", "Sec-Fetch-Site": "same-site"},  # localhost:3000 again
        # A proxy's word on the host is checked like the host itself, and does not stand in for it.
        {"Host": "localhost:8321", "X-Forwarded-Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "evil.example", "X-Forwarded-Host": "localhost:8321", "Origin": "http://localhost:8321"},
        {"Host": "localhost:8321", "X-Forwarded-Host": "localhost:8321, evil.example"},
        {"Host": "localhost:8321", "X-Forwarded-Host": "hub.example.org"},
        {"Host": "hub.example.org"},
    ],
)
def test_others_are_refused(headers):
    assert refused(OWN, **headers)
    if headers.get("Sec-Fetch-Site") is None:
        assert refused(OWN, link=True, **headers), "a link changes nothing about names and origins"


def test_a_link_from_anywhere_leads_to_the_page():
    assert refused(OWN, link=True, Host="localhost:8321", Sec_Fetch_Site="cross-site") == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "hub.example.org", "Origin": "https://hub.example.org"},  # passed on as it came
        {
            "Host": "localhost:8321",
            "X-Forwarded-Host": "hub.example.org",
            "Origin": "https://hub.example.org",
        },
        {"Host": "localhost:8321", "Origin": "https://hub.example.org"},  # nginx as it comes: no word of it
        {"Host": "localhost:8321", "Origin": "https://lab.example.org:8443"},
        {"Host": "hub.example.org:9000", "Origin": "http://hub.example.org:9000"},
        {"Host": "localhost:8321", "Origin": "http://localhost:8321"},
    ],
)
def test_a_name_that_was_allowed(headers):
    assert refused(HUB, **headers) == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "hub.example.org", "Origin": "https://evil.example.org"},
        {"Host": "hub.example.org", "Origin": "https://hub.example.org:8444"},  # another server there
        {"Host": "localhost:8321", "Origin": "https://lab.example.org"},
        {"Host": "sub.hub.example.org"},
    ],
)
def test_no_more_than_that_name(headers):
    assert refused(HUB, **headers)


def test_the_address_that_is_listened_on_is_a_name():
    assert refused(Gate("192.168.7.9"), Host="192.168.7.9:8321") == ""
    assert refused(Gate("fe80::1"), Host="[fe80::1]:8321") == ""
    assert refused(Gate("0.0.0.0"), Host="192.168.7.9:8321")
    for bad in ("", "https://hub.example.org", "hub example", "*"):
        with pytest.raises(ValueError, match="--allow-host"):
            Gate(allowed=(bad,))
    with pytest.raises(ValueError, match="--host"):
        Gate("")
    with pytest.raises(ValueError, match=r"cannot listen on '192\.0\.2\.1'"):
        Server([], 0, "192.0.2.1")


# ---------------------------------------------------------------------- a server


class Echo(Answer):
    def post(self) -> None:
        self.json(self.body(1000))

    def get(self) -> None:
        raise KeyError("broken")


class Clock(Socket):
    async def tell(self) -> None:
        for number in range(3):
            await self.send(str(number))


@pytest.fixture(scope="module")
def server():
    with Server([("/echo", Echo), ("/clock", Clock)]) as started:
        yield started


class LastWord(Socket):
    """Says one word more when all is over, which takes it a moment."""

    over = threading.Event()

    async def tell(self) -> None:
        await self.send("first")
        while not self.over.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await self.send("last")


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    found = response.status, json.loads(response.read() or b"null"), response.headers
    connection.close()
    return found


def test_answers_and_errors_are_json(server, caplog):
    status, data, headers = ask(server, "POST", "/echo", '{"a": 1}', Content_Type="application/json")
    assert (status, data) == (200, {"a": 1}) and "Server" not in headers
    for status, body, kind in ((400, "[1]", "application/json"), (400, "{", "application/json"),
                               (413, " " * 1001, "application/json"), (415, "{}", "text/plain")):  # fmt: skip
        found, data, headers = ask(server, "POST", "/echo", body, Content_Type=kind)
        assert (
            found == status
            and data["error"]
            and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        )
    assert ask(server, "GET", "/none")[:2] == (404, {"error": "there is nothing at /none"})
    assert ask(server, "GET", "/none", Host="evil.example")[0] == 403
    assert not caplog.records, "a caller's mistakes are not this terminal's"
    assert ask(server, "GET", "/echo")[:2] == (500, {"error": "KeyError: 'broken'"})
    assert "broken" in caplog.text


def test_the_policy_of_the_page_names_its_own_socket_only(server):
    def policy(**headers):
        return ask(server, "GET", "/none", **headers)[2]["Content-Security-Policy"]

    assert "connect-src 'self' ws://localhost:9000 wss://localhost:9000;" in policy(Host="localhost:9000")
    assert "connect-src 'self';" in policy(Host="localhost:x")


async def messages(server, path="/clock", heard=lambda message: None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    socket = await websocket_connect(HTTPRequest(f"ws://127.0.0.1:{server.port}{path}", headers=named))
    found = []
    while (message := await asyncio.wait_for(socket.read_message(), 30)) is not None:
        found.append(message)
        heard(message)
    return found


def test_a_server_that_ends_lets_its_pages_hear_the_last_of_it():
    ending = []

    def heard(message):
        if not ending:
            LastWord.over.set()
            ending.append(threading.Thread(target=server.stop))
            ending[0].start()

    server = Server([("/last", LastWord)])
    server.start()
    assert asyncio.run(messages(server, "/last", heard)) == ["first", "last"]
    ending[0].join(30)
    assert not ending[0].is_alive()


def test_a_socket_tells_and_is_guarded(server):
    assert asyncio.run(messages(server)) == ["0", "1", "2"]
    own = f"http://127.0.0.1:{server.port}"
    assert asyncio.run(messages(server, Origin=own)) == ["0", "1", "2"]
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": own + "1"}):
        with pytest.raises(HTTPClientError, match="403"):
            asyncio.run(messages(server, **headers))
