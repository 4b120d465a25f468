"""Real sockets and a real process: garbage, silence, hanging up, the graceful end, a parent that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import ASK, Desk, new_engine
from support import ROOT

from minirad.__main__ import main
from minirad.fleet.endpoints import free_ports, server_info
from minirad.observe.recorder import Recorder
from minirad.server import connections
from minirad.server.connections import Server, listening

LONG = {"prompt": ASK, "max_tokens": 900, "ignore_eos": True}


class Served:
    """A desk behind a real socket, its loop and its engine each in a thread of their own."""

    def __init__(self, engine: Any, grace: float = 0.2) -> None:
        self.desk, self.socket, ready = Desk(engine), listening("127.0.0.1", 0), threading.Event()
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(self.desk.app, self.desk.service, ready.set, grace)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])))
        self.thread.start()
        assert ready.wait(20)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def post(self, body: Any) -> socket.socket:
        data = json.dumps(body).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json",
                f"Content-Length: {len(data)}", "", ""]  # fmt: skip
        opened = self.connect()
        opened.sendall("\r\n".join(head).encode() + data)
        return opened


@pytest.fixture(scope="module")
def engine() -> Any:
    return new_engine(kv_tokens=2048, max_running=4)


@pytest.fixture
def served(engine: Any) -> Iterator[Served]:
    made = Served(engine)
    with made.desk.running():
        yield made
        made.server.end_soon()
        made.thread.join(20)
        assert not made.thread.is_alive()
    assert made.desk.service.open == 0
    engine.check()


def everything(opened: socket.socket) -> bytes:
    with opened:
        return b"".join(iter(lambda: opened.recv(1 << 16), b""))


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


def test_what_is_no_http_is_answered_in_openais_form(served: Served) -> None:
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\r\n" * 40_000,
    ):
        opened = served.connect()
        opened.sendall(garbage)
        said = everything(opened)
        assert said.startswith(b"HTTP/1.1 400") and b'"invalid_request_error"' in said
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_bad_chunk_behind_a_good_head_is_answered_once(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the app has an answer at once: to a path that is not here."""
    for path in ("/v1/completions", "/nothing"):
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json",
                "Transfer-Encoding: chunked", "", "ZZ", "hello", ""]  # fmt: skip
        opened = served.connect()
        opened.sendall("\r\n".join(head).encode())
        assert everything(opened).count(b"HTTP/1.1") == 1
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert capsys.readouterr().err == "" and served.desk.app.state.api.reading == 0


def test_who_says_nothing_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.1)
    silent, half = served.connect(), served.connect()
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    for opened in (silent, half):
        with contextlib.suppress(ConnectionResetError):
            assert everything(opened) == b""


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_aborted(served: Served, stream: bool) -> None:
    service = served.desk.service
    opened = served.post({**LONG, "stream": stream})
    wait_for(lambda: service.turns)  # it runs, and has made a step
    opened.close()
    wait_for(lambda: service.open == 0)
    # however long that took: it did not come to its end
    assert b'minirad_replies_total{finish_reason="abort"} 1.0' in served.desk.metrics.text()


def test_a_request_too_large_is_answered_although_it_is_still_coming(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a" * (9 << 20)}, timeout=30)
    assert answer.status_code == 413


def test_the_end_lets_those_that_run_finish_and_tells_those_that_cannot(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine makes as many steps as it may: the long replies do not end before they are told to."""
    may, advance = threading.Semaphore(3), engine.advance

    def one_step() -> None:
        while not may.acquire(timeout=0.01):
            if made.desk.service._calls:  # these come between two steps
                return
        advance()

    monkeypatch.setattr(engine, "advance", one_step)
    made = Served(engine, grace=60.0)
    with made.desk.running():
        long = made.post({**LONG, "stream": True, "n": 2})
        wait_for(lambda: len(engine.scheduler.live) == 2)
        short = made.post({**LONG, "max_tokens": 20})
        wait_for(lambda: made.desk.service.open == 3)
        made.server.end_soon()
        may.release(40)
        assert b'"finish_reason":"length"' in everything(short)
        made.server.end_soon()  # a second time: nobody is waited for any more
        assert b"the server is ending" in everything(long)
        made.thread.join(20)
        assert not made.thread.is_alive()


def test_a_port_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "/nowhere"]) == 2  # before a model is loaded
        said = capsys.readouterr().err
        assert said.startswith(f"minirad: cannot listen at 127.0.0.1:{port}: ") and said.count(str(port)) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port 70000", "--port must be from 0 to 65535"),
        ("--host=", "--host takes an address"),
        ("--api-key=", "--api-key must be"),
        ("--max-queue -1", "0 or more"),
        ("--max-body 0", "a whole number, 1 or more"),
        ("--kv-events nowhere", "--kv-events must be tcp://HOST:PORT"),
        ("--record x.txt", "--record: a file's name must end in .jsonl"),
        ("--model /nowhere", "/nowhere"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["serve", *words.split()])
    except SystemExit as end:
        code = int(end.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals to others")
def test_the_command_serves_publishes_records_and_ends_at_a_signal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, whose main thread it needs: Ctrl-C ends it, with code 0 and nothing left open."""
    port = free_ports(1)
    said: list[Any] = []

    def ask() -> None:
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=20) as client:
                wait_for(lambda: _answers(client))
                said.append(client.post("/v1/completions", json={"prompt": ASK, "temperature": 0}).json())
                said.append(client.get("/server_info").json())
            with pytest.raises(ValueError, match="401"):
                server_info(url)
        finally:
            signal.raise_signal(signal.SIGINT)

    words = ["--port", str(port), "--device", "cpu", "--record", str(tmp_path / "run.jsonl"),
             "--api-key", "k", "--kv-events", "tcp://127.0.0.1:0"]  # fmt: skip
    asking = threading.Thread(target=ask)
    asking.start()
    code = main(["serve", *words])
    asking.join()
    reply, info = said
    assert code == 0 and reply["choices"][0]["text"].startswith(" Paris.")
    assert info["kv_events"]["block_size"] == 1 and info["kv_tokens"] == 4096
    assert f"minirad serve: http://127.0.0.1:{port}" in capfd.readouterr().out
    assert "RequestFinished" in _recorded(tmp_path)


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def _recorded(folder: Path) -> list[str]:
    frames = Recorder.load(folder / "run.jsonl")
    return [type(event).__name__ for frame in frames for event in frame.events]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals to others")
def test_a_process_serves_publishes_records_and_ends(tmp_path: Path) -> None:
    """The command as it is run. Its parent dies, and it goes as well."""
    starter = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'minirad', *sys.argv[1:]]);"
        "print(p.pid, flush=True); p.wait()"
    )
    words = ["serve", "--port", "0", "--kv-events", "tcp://127.0.0.1:0", "--device", "cpu", "--grace", "0.2",
             "--record", str(tmp_path / "run.jsonl"), "--exit-with-parent", "--api-key", "k"]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-c", starter, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert parent.stdout is not None and parent.stderr is not None
        pid, line = int(parent.stdout.readline()), parent.stdout.readline()
        url = line.removeprefix("minirad serve: ").strip()
        client = httpx.Client(base_url=url, headers={"authorization": "Bearer k"}, timeout=20)
        answer = client.post("/v1/completions", json={"prompt": ASK, "temperature": 0, "model": "classroom"})
        assert answer.json()["choices"][0]["text"].startswith(" Paris.")
        info = client.get("/server_info").json()
        assert info["kv_events"]["block_size"] == 1 and info["kv_tokens"] == 4096
        with pytest.raises(ValueError, match="401"):
            server_info(url)
        os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: not _runs(pid))
    finally:
        parent.kill()
        parent.wait()
    assert "RequestFinished" in _recorded(tmp_path)


def _runs(pid: int) -> bool:
    """Neither gone nor a corpse that nobody fetched."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
