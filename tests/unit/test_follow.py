"""Sockets: publishers in this process that lose messages, send garbage, die and come back."""

from __future__ import annotations

import http.server
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from minirad.fleet import endpoints, follow, order
from minirad.fleet.endpoints import check_endpoint, free_ports, rank_endpoints, server_info
from minirad.fleet.follow import Delivered, Follower, Gap, Restart, State, Told, Trouble
from minirad.fleet.wire import Batch, Removed, encode

END = (-1).to_bytes(8, "big", signed=True)


def number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


def payload(seq: int, epoch: int = 0) -> bytes:
    return encode(Batch(float(epoch), (Removed((seq,)),), 0))


class Publisher:
    """PUB and replay ROUTER in a thread. with_topic: answers carry a topic, as SGLang's newer ones."""

    def __init__(self, first: int | None = None, *, with_topic: bool = False, epoch: int = 0) -> None:
        self.context = zmq.Context()
        # XPUB is a PUB that says who has subscribed (`_live`).
        self.pub, self.replay = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        first = free_ports(2) if first is None else first
        self.ports = first, first + 1
        for each, port in zip((self.pub, self.replay), self.ports, strict=True):
            each.setsockopt(zmq.LINGER, 0)
            each.bind(f"tcp://127.0.0.1:{port}")
        self.extra, self.epoch = [b"topic"] * with_topic, epoch
        self.buffer: list[tuple[int, bytes]] = []
        self.questions = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def endpoints(self) -> tuple[list[str], list[str]]:
        return [f"tcp://127.0.0.1:{self.ports[0]}"], [f"tcp://127.0.0.1:{self.ports[1]}"]

    def send(self, *numbers: int, live: bool = True) -> None:
        for seq in numbers:
            self.buffer.append((seq, payload(seq, self.epoch)))
            if live:
                self.pub.send_multipart([b"topic", number(seq), payload(seq, self.epoch)])

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self.replay.poll(20):
                who, empty, start = self.replay.recv_multipart()
                self.questions += 1
                for seq, sent in list(self.buffer):
                    if seq >= int.from_bytes(start, "big"):
                        self.replay.send_multipart([who, empty, *self.extra, number(seq), sent])
                self.replay.send_multipart([who, empty, *([b""] if self.extra else []), END, b""])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.context.destroy(linger=0)


class Heard:
    """What a follower tells, and waiting for it."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def __call__(self, told: Told) -> None:
        self.told.append(told)

    def of(self, *kinds: type) -> list[Any]:
        return [told for told in self.told if isinstance(told, kinds)]

    @property
    def numbers(self) -> list[int]:
        return [told.seq for told in self.of(Delivered)]

    def until(self, condition: Callable[[], object], what: str, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}; told: {self.told[-20:]}"
            time.sleep(0.01)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """Nothing is given up because this machine is slow; who waits for that sets it anew."""
    monkeypatch.setattr(order, "PATIENCE", 60.0)
    monkeypatch.setattr(follow, "PATIENCE", 60.0)
    return Heard()


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    made = Publisher(with_topic=getattr(request, "param", False))
    yield made
    made.close()


def _live(follower: Follower, heard: Heard, publisher: Publisher) -> None:
    """Waits until live messages arrive: publishers take a subscription in their own time."""
    heard.until(lambda: publisher.pub.poll(0), "the subscription")
    heard.until(lambda: publisher.questions and not follower.ranks[0].order.asking, "the first answer")
    first = len(publisher.buffer)
    publisher.send(first)
    heard.until(lambda: first in heard.numbers, "a live message")


@pytest.mark.parametrize("publisher", [False, True], indirect=True, ids=["older replay", "newer replay"])
def test_what_was_before_what_is_lost_and_what_is_live(publisher: Publisher, heard: Heard) -> None:
    publisher.send(0, 1, 2)
    ends, replays = publisher.endpoints
    with Follower(ends, replays, "topic", tell=heard) as follower:
        _live(follower, heard, publisher)
        publisher.send(4, 5, live=False)
        publisher.send(6, 7)
        heard.until(lambda: len(heard.numbers) == 8, "all messages")
        assert heard.numbers == list(range(8)) and not heard.of(Gap, Restart, Trouble)
        assert [told.replayed for told in heard.of(Delivered)][:3] == [True] * 3
        publisher.send(8, live=False)
        assert follower.catch_up(60) and heard.numbers[-1] == 8
    states = [told.state for told in heard.of(State)]
    assert states[:2] == ["connecting", "replaying"] and "live" in states


@pytest.mark.slow
def test_a_lost_last_message_is_found_in_silence(publisher: Publisher, heard: Heard) -> None:
    with Follower(*publisher.endpoints, tell=heard) as follower:
        asked = lambda: publisher.questions and not follower.ranks[0].order.asking  # noqa: E731
        heard.until(asked, "the answer to the first question")  # which has nothing of what comes now
        publisher.send(0, live=False)
        heard.until(lambda: heard.numbers == [0], "the message")
    assert "silent" in [told.state for told in heard.of(State)]


def test_a_publisher_that_dies_and_comes_back_with_0(heard: Heard) -> None:
    first = Publisher()
    with Follower(*first.endpoints, tell=heard) as follower:
        _live(follower, heard, first)
        first.send(*range(1, 4))
        heard.until(lambda: heard.numbers == [0, 1, 2, 3], "the first publisher's")
        first.close()
        heard.until(lambda: "lost" in [told.state for told in heard.of(State)], "the loss")
        second = Publisher(first.ports[0], epoch=1)
        second.send(*range(6), live=False)  # more than before: no live number shows that it began anew
        heard.until(lambda: len(heard.numbers) == 10, "the second publisher's")
        second.close()
    assert heard.numbers[4:] == list(range(6))
    assert {told.batch.ts for told in heard.of(Delivered)[4:]} == {1.0}
    after = heard.told.index(heard.of(Restart)[0])
    assert len(heard.of(Restart)) == 1 and not heard.of(Gap)
    assert [told.seq for told in heard.told[:after] if isinstance(told, Delivered)] == [0, 1, 2, 3]


def test_garbage_is_told_and_does_no_harm(publisher: Publisher, heard: Heard) -> None:
    with Follower(*publisher.endpoints, tell=heard) as follower:
        _live(follower, heard, publisher)
        for frames in ([b""], [b"topic", number(1)], [b"topic", b"1", payload(1)], [b"", number(1), b"", b""],
                       [b"", END, payload(1)], [b"", number(1 << 60), payload(1)]):  # fmt: skip
            publisher.pub.send_multipart(frames)
        publisher.buffer.append((1, b"\xc1\x00"))
        publisher.pub.send_multipart([b"", number(1), b"\xc1\x00"])
        publisher.send(2)
        heard.until(lambda: 2 in heard.numbers, "the message behind the garbage")
        assert follower.ranks[0].refused == 6
    assert "not a topic, a number of 8 bytes and a payload" in heard.of(Trouble)[0].text
    assert [(told.first, told.last) for told in heard.of(Gap)] == [(1, 1)] and not heard.of(Restart)
    assert "no msgpack" in heard.of(Gap)[0].why and heard.numbers == [0, 2]


def test_a_message_that_is_too_large_is_a_gap(
    publisher: Publisher, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "LARGEST", 1000)
    with Follower(*publisher.endpoints, tell=heard) as follower:
        _live(follower, heard, publisher)
        publisher.pub.send_multipart([b"", number(1), b"x" * 1001])
        publisher.send(2)
        heard.until(lambda: 2 in heard.numbers, "the message behind it")
        publisher.buffer.insert(1, (1, b"x" * 1001))
        assert follower.catch_up(60)
    (gap,) = heard.of(Gap)
    assert (gap.first, gap.last) == (1, 1) and "1,001 bytes is larger than the 1,000" in gap.why


def _send_until(publisher: Publisher, heard: Heard, first: int) -> Callable[[], bool]:
    """Sends one more message at each call, until one arrives."""

    def sent() -> bool:
        publisher.send(max(first, publisher.buffer[-1][0] + 1))
        time.sleep(0.05)
        return heard.numbers[-1] >= first

    return sent


@pytest.mark.parametrize("largest", [1000, 1 << 20], ids=["too large for ZeroMQ", "too large for us"])
def test_it_goes_on_behind_a_message_that_is_far_too_large(
    publisher: Publisher, heard: Heard, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """ZeroMQ ends the connection, live and in the replay, and would not come back."""
    monkeypatch.setattr(follow, "LARGEST", 1000)
    monkeypatch.setattr(follow, "LARGEST_FRAME", largest)
    with Follower(*publisher.endpoints, tell=heard) as follower:
        _live(follower, heard, publisher)
        monkeypatch.setattr(order, "PATIENCE", 0.5)
        publisher.buffer.append((1, b"x" * 2000))
        publisher.pub.send_multipart([b"", number(1), b"x" * 2000])
        heard.until(_send_until(publisher, heard, 2), "a message behind it")
    assert heard.of(Gap)[0].first == 1 and not heard.of(Restart)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [100, 200])
def test_messages_of_100_mb(
    publisher: Publisher, heard: Heard, monkeypatch: pytest.MonkeyPatch, megabytes: int
) -> None:
    """The larger ones no socket takes, and what was asked for is waited for in vain."""
    monkeypatch.setattr(order, "PATIENCE", 5.0)
    monkeypatch.setattr(follow, "PATIENCE", 5.0)
    with Follower(*publisher.endpoints, tell=heard) as follower:
        _live(follower, heard, publisher)
        publisher.buffer.append((1, b"x" * (megabytes << 20)))
        publisher.pub.send_multipart([b"", number(1), publisher.buffer[1][1]])
        heard.until(_send_until(publisher, heard, 2), "a message behind it")
    assert heard.of(Gap)[0].first == 1 and not heard.of(Restart)


def test_a_publisher_that_connects(heard: Heard) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        port = free_ports(1)
        with Follower([f"tcp://127.0.0.1:{port}"], bind=True, tell=heard):
            with pytest.raises(ValueError, match=f"{port} cannot be listened at: Address already in use"):
                Follower([f"tcp://127.0.0.1:{port}"], bind=True, tell=heard)
            pub.connect(f"tcp://127.0.0.1:{port}")
            seq = 5

            def sent() -> bool:
                nonlocal seq
                pub.send_multipart([b"", number(seq), payload(seq)])
                seq += 1
                return bool(heard.numbers)

            heard.until(sent, "a message")
    gap = heard.of(Gap)[0]
    assert gap.first == 0 and "before this began to listen" in gap.why


def test_each_rank_has_its_sockets(heard: Heard) -> None:
    both = [Publisher(), Publisher(with_topic=True)]
    for rank, each in enumerate(both):
        each.send(*range(2 + rank), live=False)
    ends, replays = zip(*(each.endpoints for each in both), strict=True)
    with Follower([*ends[0], *ends[1]], [*replays[0], *replays[1]], tell=heard):
        heard.until(lambda: len(heard.numbers) == 5, "both ranks")
    for each in both:
        each.close()
    assert sorted((told.rank, told.seq) for told in heard.of(Delivered)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_it_ends_and_says_what_the_listener_raised(publisher: Publisher, heard: Heard) -> None:
    Follower(["tcp://127.0.0.1:9"], ["tcp://127.0.0.1:9"], tell=heard).close()

    def fail(told: Told) -> None:
        raise KeyError("of the listener")

    follower = Follower(*publisher.endpoints, tell=fail)
    with pytest.raises(KeyError, match="of the listener"):
        follower.wait(60)
    assert not follower.catch_up()


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one thread on Windows")
def test_ctrl_c_while_it_is_waited_for_does_not_end_it(
    publisher: Publisher, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `kv-events` does: it stops waiting, and asks for what was missed."""
    with Follower(*publisher.endpoints, tell=heard) as follower:
        _live(follower, heard, publisher)
        publisher.send(1, live=False)
        main, wait = threading.main_thread().ident, follower._over.wait

        def pressed(seconds: float | None) -> bool:
            """Once it waits, and no sooner, somebody presses."""
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
            return wait(seconds)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(follower._over, "wait", pressed)
            follower.wait(60)
        assert follower.catch_up(60) and heard.numbers == [0, 1]


def test_who_is_no_publisher_is_told_and_may_become_one(heard: Heard) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as other, context.socket(zmq.PUB) as pub:
        port = free_ports(1)
        other.bind(f"tcp://127.0.0.1:{port}")
        with Follower([f"tcp://127.0.0.1:{port}"], tell=heard):
            heard.until(lambda: heard.of(Trouble), "the sentence")
            other.close(linger=0)
            heard.until(lambda: _bound(pub, port), "the port")
            heard.until(lambda: State(0, "live") in heard.told, "the connection")  # soon it is silent
    assert heard.of(Trouble)[0].text == f"what listens at tcp://127.0.0.1:{port} is no publisher of events"


def test_an_endpoint_where_nobody_is(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "PATIENCE", 0.2)
    with Follower(["tcp://127.0.0.1:9"], tell=heard):
        heard.until(lambda: heard.of(Trouble), "the sentence")
    assert heard.of(Trouble)[0].text == "nothing has answered at tcp://127.0.0.1:9 so far"


def _bound(socket: zmq.Socket[bytes], port: int) -> bool:
    try:
        socket.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True


@pytest.mark.slow
def test_who_does_not_speak_zeromq_is_told(heard: Heard) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with Follower([f"tcp://127.0.0.1:{mute.getsockname()[1]}"], tell=heard):
            heard.until(lambda: heard.of(Trouble), "the sentence")


# ------------------------------------------------------------ endpoints


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://:5557",
     "host:5557", "http://host:1", "inproc://x", "pgm://x:1", "tcp://a b:1", "tcp://host:1;tcp://x:2",
     "tcp://::1:5557", "tcp://host:1\n", "ipc://", "ipc://" + "x" * 200, "tcp://*:5557", "tcp://0.0.0.0:5557",
     "tcp://[::]:5557"],
)  # fmt: skip
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_endpoint(endpoint)
    assert "\n" not in str(caught.value)


def test_ports_of_ranks() -> None:
    assert rank_endpoints("tcp://[::1]:65534", 2) == ["tcp://[::1]:65534", "tcp://[::1]:65535"]
    assert rank_endpoints("tcp://*:1", 1, bind=True) == ["tcp://*:1"]
    assert rank_endpoints("ipc:///tmp/x", 1) == ["ipc:///tmp/x"]
    for bad in (("tcp://h:65535", 2), ("ipc:///tmp/x", 2), ("tcp://h:1", 0), ("tcp://h:1", 257)):
        with pytest.raises(ValueError):
            rank_endpoints(*bad)


class _Server(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, bytes] = (200, b"{}")

    def do_GET(self) -> None:
        code, body = self.answer
        self.send_response(code)
        if code == 302:
            self.send_header("Location", body.decode())
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


EVENTS = {
    "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv", "block_size": 16,
    "dp_size": 2, "replay_endpoint_port_base": 6557,
}  # fmt: skip


def _info(monkeypatch: pytest.MonkeyPatch, url: str, body: Any, code: int = 200) -> endpoints.ServerInfo:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    monkeypatch.setattr(_Server, "answer", (code, sent))
    return server_info(url)


def test_a_server_says_where_it_publishes(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    found = _info(monkeypatch, f"{url}/", {"version": "x", "kv_events": EVENTS})
    assert found.endpoints == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"] and found.notices == ()
    assert found.replays == ["tcp://127.0.0.1:6557", "tcp://127.0.0.1:6558"]
    assert (found.topic, found.block_size) == ("kv", 16)
    named = _info(monkeypatch, url, {"kv_events": {**EVENTS, "endpoint_host": "10.0.0.7", "dp_size": 1}})
    assert named.endpoints == ["tcp://10.0.0.7:5557"] and "--bind tcp://*:5557" in named.notices[0]
    mute = {name: value for name, value in EVENTS.items() if "replay" not in name}
    assert "no replay endpoint" in _info(monkeypatch, url, {"kv_events": mute}).notices[0]


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        ({"kv_events": None}, 200, "publishes no KV events: start it with --kv-events-config"),
        ({}, 200, "publishes no KV events"),
        ({"kv_events": {"publisher": "null"}}, 200, "publishes no KV events"),
        ({"kv_events": {**EVENTS, "publisher": "kafka"}}, 200, "by 'kafka', not by zmq"),
        ({"kv_events": {**EVENTS, "dp_size": 1 << 40}}, 200, "kv_events has dp_size 1099511627776"),
        ({"kv_events": {**EVENTS, "endpoint_port_base": "5557"}}, 200, "endpoint_port_base '5557'"),
        ({"kv_events": {**EVENTS, "endpoint_host": "a b"}}, 200, "an endpoint is tcp://host:port"),
        ({"kv_events": {**EVENTS, "topic": 3}}, 200, "topic 3"),
        (b"<html>", 200, "answers with no JSON"),
        (b"[" * 100_000, 200, "answers with no JSON"),
        (b"[1]", 200, "no JSON object"),
        (b"x" * (5 << 20), 200, "more than 4,194,304 bytes"),
        (b"gone", 404, "answers with 404"),
        (b"http://example.org/server_info", 302, "sends elsewhere"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_server_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, url: str, body: Any, code: int, sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        _info(monkeypatch, url, body, code)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "bad", ["", "host:3000", "ftp://host", "http://", "http://a@b", "http://h:x", "http://h:99999"]
)
def test_what_is_no_server(bad: str) -> None:
    with pytest.raises(ValueError, match="a server is http://host:port"):
        server_info(bad)


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/server_info does not answer"):
        server_info("http://127.0.0.1:9")
