"""The page of a stream in a real browser, fed by a publisher in this process: ranks, gaps, an export."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from browsers import browser, cards_lie_apart, leaving, tab, until

from minirad.fleet import wire
from minirad.fleet.endpoints import ServerInfo, free_ports
from viz.live import Live, main
from viz.web.export import export
from viz.web.stream import FleetSource

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

HOSTILE = "<script>document.title = 'x'</script>\u202e\x1b[31m" + "x" * 10_000


class Publisher:
    """PUB and replay ROUTER of some ranks, as a server has them."""

    def __init__(self, ranks=2, kept=10_000):
        self._context, self._kept = zmq.Context(), kept
        self._pubs, self._replays = [], []
        self.endpoints, self.replays = [], []
        for sockets, found, kind in (
            (self._pubs, self.endpoints, zmq.PUB), (self._replays, self.replays, zmq.ROUTER)
        ):  # fmt: skip
            for _ in range(ranks):
                socket = self._context.socket(kind)
                port = socket.bind_to_random_port("tcp://127.0.0.1")
                sockets.append(socket)
                found.append(f"tcp://127.0.0.1:{port}")
        self._sent = [[] for _ in range(ranks)]
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def send(self, rank, *events, live=True):
        """One batch; live False: it is in the replay buffer only."""
        payload = wire.encode(wire.Batch(time.time(), tuple(events), rank))
        self.send_bytes(rank, payload, live)

    def send_bytes(self, rank, payload, live=True):
        with self._lock:
            seq = len(self._sent[rank])
            self._sent[rank].append(payload)
            if live:
                self._pubs[rank].send_multipart((b"", seq.to_bytes(8, "big"), payload))

    def lose(self, rank, count):
        """So many batches that nobody got, and that nobody can have any more."""
        with self._lock:
            self._sent[rank] += [None] * count

    def _answer(self):
        while not self._ending.is_set():
            for rank, replay in enumerate(self._replays):
                if not replay.poll(10):
                    continue
                who, *_, start = replay.recv_multipart()
                with self._lock:
                    for seq, payload in enumerate(self._sent[rank]):
                        if seq >= int.from_bytes(start, "big") and payload is not None:
                            replay.send_multipart((who, b"", seq.to_bytes(8, "big"), payload))
                replay.send_multipart((who, b"", b"\xff" * 8, b""))

    def close(self):
        self._ending.set()
        self._thread.join()
        self._context.destroy(linger=0)


def chain(tokens, size=4, medium="GPU", spaces=()):
    """A chain of blocks as one event: the hash of each says all that is before it."""
    hashes, parent = [], None
    for at in range(0, len(tokens), size):
        parent = hash((parent, *tokens[at : at + size], *spaces)) % (1 << 60)
        hashes.append(parent)
    blocks = tuple(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size))
    return wire.Stored(
        tuple(hashes), None, blocks, size, medium, False, tuple(spaces for _ in blocks) if spaces else ()
    )


@pytest.fixture
def publisher():
    found = Publisher()
    yield found
    found.close()


def following(publisher, **more):
    return FleetSource(ServerInfo(publisher.endpoints, publisher.replays, "", 4), **more)


SHARED, OWN = chain(list(range(16))), chain([*range(8), *range(40, 48)])


def test_two_ranks_one_alone_and_a_gap(tab, publisher, tmp_path):
    publisher.send(0, SHARED)
    publisher.send(1, OWN)
    source = following(publisher)
    with leaving(tab, Live(source)) as live:
        tab.goto(live.url)
        until(tab, "document.querySelectorAll('.mr-tree g.node').length >= 4")
        assert tab.inner_text("h1") == "minirad live"
        assert tab.locator(".ranktable tr").count() == 3
        for gone in (".requests", ".poolcard", ".go.main", ".jump.retract"):
            assert not tab.locator(gone).first.is_visible()
        assert "8 of 24 tokens are held by more than one rank" in tab.inner_text(".shares")
        assert not tab.locator(".banner.wrong").is_visible()
        whole = tab.locator(".mr-tree g.node").count()
        tab.locator("tr[data-rank='1']").press("Space")  # which is not the page's, too: it goes on following
        until(tab, "document.querySelector('.strips .alone').textContent === 'rank 1 alone'")
        assert tab.locator(".mr-tree g.node").count() == 2 < whole  # the root, and one run
        assert "16 tokens" in tab.locator(".mr-tree").text_content()
        publisher.send(1, wire.Removed(OWN.hashes[-1:]))
        until(tab, "document.querySelector('.mr-tree').textContent.includes('12 tokens')")
        tab.keyboard.press("a")
        until(tab, "document.querySelector('.strips .alone').textContent === ''")
        publisher.lose(0, 2)
        publisher.send(0, live=False)
        publisher.send(0, wire.Removed(SHARED.hashes[-1:]))
        until(tab, "document.querySelector('.banner.wrong')?.hidden === false")
        assert "batches 1 to 2 of rank 0 are lost" in tab.inner_text(".banner.wrong")
        cards_lie_apart(tab, (1280, 800))
        until(tab, "document.querySelector('.marks line[stroke=\"#1864ab\"]') !== null")
        file = tmp_path / "run.html"
        export(source.run_now.page, file, title="a stream")
    tab.goto(file.as_uri())
    until(tab, "document.body.dataset.position")
    tab.keyboard.press("End")
    until(tab, "document.querySelector('.banner.wrong')?.hidden === false")
    assert tab.inner_text("h1") == "minirad recording"
    assert tab.locator(".growth path").count() >= 2
    tab.locator("tr[data-rank='1']").click()
    until(tab, "document.querySelector('.mr-tree').textContent.includes('12 tokens')")
    assert not tab.locator("button:has-text('quiz')").is_visible()


def test_a_rank_alone_is_not_looked_for_at_another_server(tab, publisher):
    """The one before had it; this one, at the same port, has not."""
    tab.allowed_complaints += ["ERR_", "Failed to load"]
    port, alone = free_ports(1), "document.querySelector('.strips .alone')?.textContent"
    publisher.send(0, SHARED)
    publisher.send(1, OWN)
    with Live(following(publisher), port) as live:
        tab.goto(live.url)
        tab.locator("tr[data-rank='1']").click()
        until(tab, f"{alone} === 'rank 1 alone'")
    until(tab, "document.querySelector('.status').innerText.includes('lost')")
    one = ServerInfo(publisher.endpoints[:1], publisher.replays[:1], "", 4)
    with leaving(tab, Live(FleetSource(one), port)):
        until(tab, f"document.querySelectorAll('.ranktable tr').length === 2 && {alone} === ''")
        publisher.send(0, chain(list(range(60, 72))))
        until(tab, "document.querySelector('.mr-tree').textContent.includes('12 tokens')")


def test_nothing_of_a_stream_is_taken_for_more_than_text(tab, publisher):
    publisher.send(0, chain(list(range(8)), spaces=(HOSTILE,)))
    publisher.send(0, chain(list(range(8)), medium="</text><script>1</script>"))
    publisher.send_bytes(1, b"\xc1 this is no batch")
    with leaving(tab, Live(following(publisher))) as live:
        tab.goto(live.url)
        until(tab, "document.querySelectorAll('.mr-tree g.node').length >= 2")
        until(tab, "document.querySelector('.banner.wrong')?.hidden === false")
        assert "rank 1" in tab.inner_text(".banner.wrong")
        assert tab.evaluate("document.title").startswith("minirad live")
        assert tab.evaluate("document.querySelectorAll('#app script, .mr-tree script').length") == 0
        assert "\u202e" not in tab.evaluate("document.body.textContent")
        cards_lie_apart(tab, (1280, 800))


def test_a_server_that_is_not_there_is_said(tab):
    gone = Publisher(1)
    endpoints, replays = gone.endpoints, gone.replays
    gone.close()
    with leaving(tab, Live(FleetSource(ServerInfo(endpoints, replays, "", 16)))) as live:
        tab.goto(live.url)
        until(tab, "document.querySelector('.banner.wrong')?.hidden === false")
        assert f"Nothing answers at {endpoints[0]} yet" in tab.inner_text(".banner.wrong")
        assert "not connected" in tab.inner_text(".status")


def test_an_export_of_a_live_stream(publisher, tmp_path, capsys):
    publisher.send(0, SHARED)
    publisher.send(1, OWN)
    publisher.send(1, OWN)
    first, replay = publisher.endpoints[0], publisher.replays[0]
    file = tmp_path / "run.html"
    assert main(["--connect", first, "--replay", replay, "--export", str(file), "--steps", "2"]) == 0
    assert 'id="recording"' in file.read_text()


class Info(BaseHTTPRequestHandler):
    """What SGLang's server says of its events."""

    events: ClassVar[dict] = {}

    def do_GET(self):
        body = json.dumps({"kv_events": self.events}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Says nothing."""


def test_a_server_says_where_its_stream_is(tmp_path):
    publisher = Publisher(1)
    port, replay = (int(each[0].rpartition(":")[2]) for each in (publisher.endpoints, publisher.replays))
    Info.events = {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "", "block_size": 4,
        "dp_size": 1, "replay_endpoint_port_base": replay,
    }  # fmt: skip
    server = HTTPServer(("127.0.0.1", 0), Info)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    publisher.send(0, SHARED)
    try:
        url, file = f"http://127.0.0.1:{server.server_port}", tmp_path / "run.html"
        assert main(["--server", url, "--export", str(file), "--steps", "3"]) == 0
        assert f"tcp://127.0.0.1:{port}" in file.read_text()
    finally:
        server.shutdown()
        publisher.close()


def test_a_publisher_that_connects_is_listened_to(tmp_path, capsys):
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.setsockopt(zmq.LINGER, 0)
    port = free_ports(1)
    pub.connect(f"tcp://127.0.0.1:{port}")
    over = threading.Event()

    def publish():
        for seq in range(400):
            payload = wire.encode(wire.Batch(time.time(), (SHARED if seq % 2 else OWN,), 0))
            pub.send_multipart((b"", seq.to_bytes(8, "big"), payload))
            if over.wait(0.05):
                return

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        file = tmp_path / "run.html"
        assert main(["--bind", f"tcp://127.0.0.1:{port}", "--export", str(file), "--steps", "4"]) == 0
        assert "steps" in capsys.readouterr().out and 'id="recording"' in file.read_text()
    finally:
        over.set()
        thread.join()
        context.destroy(linger=0)
