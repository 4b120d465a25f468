"""viz/live.py: its routes, whom it refuses, what it streams, and that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support import ROOT
from tornado.websocket import websocket_connect

from lessons.grading.spec import find_folder
from minirad import own_code, workloads
from minirad.fleet.endpoints import free_ports
from minirad.observe.events import RequestAdded
from minirad.observe.recorder import Recorder
from viz import live
from viz.draw import tree
from viz.live import Driver, Live, Replay, Settings
from viz.web import commands, export, page, routes
from viz.web import server as web


class Client:
    def __init__(self, server: Live) -> None:
        self.port = server.server.port
        self.driver = server.driver

    def request(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response, data

    def do(self, name, **arguments):
        body = json.dumps(arguments)
        response, data = self.request("POST", f"/do/{name}", body, Content_Type="application/json")
        return response.status, json.loads(data)

    @property
    def run(self):
        return self.driver.key(self.driver.run_now)

    def view(self, i, g="step"):
        return json.loads(self.request("GET", f"/view?run={self.run}&g={g}&i={i}")[1])

    def stream(self, until, since=""):
        """Events [(id, name, data)] up to the first for which `until` holds, or until the server ends."""
        return asyncio.run(self._stream(until, since))

    async def _stream(self, until, since):
        socket = await websocket_connect(f"ws://127.0.0.1:{self.port}/stream?since={since}")
        found = []
        while (text := await asyncio.wait_for(socket.read_message(), 60)) is not None:
            event = json.loads(text)
            found.append((event["id"], event["event"], event["data"]))
            if until(found[-1]):
                break
        socket.close()
        return found


def wait(condition, seconds=120.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served():
    """A chat workload, run to its end."""
    driver = Driver(Settings(workload="chat"), speed=0)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None and driver.run_now.idle, 60)
        yield server, Client(server)
    driver.join(30)
    assert not driver.is_alive() and not driver.error


@pytest.fixture
def own():
    """An engine of one's own, waiting for prompts."""
    driver = Driver(Settings(workload="none", kv_tokens=400), speed=0, paused=True)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None)
        yield driver, Client(server)


def test_routes(served):
    _, client = served
    response, page = client.request("GET", "/")
    assert response.status == 200 and b'id="app"' in page
    assert "default-src 'none'" in response.getheader("Content-Security-Policy")
    for name, kind in (
        ("tree.js", "javascript"),
        ("page.js", "javascript"),
        ("style.css", "css"),
        ("tree.css", "css"),
    ):
        response, data = client.request("GET", f"/static/{name}")
        assert response.status == 200 and kind in response.getheader("Content-Type") and data
    for path in ("/nothing", "/static/../live.py", "/static/%2e%2e/live.py", "/static/", "/static"):
        assert client.request("GET", path)[0].status == 404
    assert client.request("PUT", "/")[0].status == 405


def test_nothing_on_the_page_is_from_elsewhere():
    for file in routes.STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert (
            "http:" not in text and "https:" not in text and "@import" not in text and "innerHTML" not in text
        )


def test_bodies_are_limited(served):
    _, client = served
    large = b"x" * (routes.LARGEST_BODY + 1)
    assert client.request("POST", "/do/peek", large, Content_Type="application/json")[0].status == 413
    with pytest.raises((ConnectionError, AssertionError)):  # not even read
        assert client.request("POST", "/do/peek", bytes(web.LARGEST_REQUEST + 1))[0].status == 200
    assert client.request("POST", "/do/peek", b"{}", Content_Type="text/plain")[0].status == 415
    assert client.request("POST", "/do/peek", b"[1]", Content_Type="application/json")[0].status == 400
    assert client.request("POST", "/do/peek", b"{", Content_Type="application/json")[0].status == 400
    deep = b"[" * 30_000
    assert client.request("POST", "/do/peek", deep, Content_Type="application/json")[0].status == 400
    assert client.do("format_disk") == (400, {"error": "unknown command 'format_disk'"})


def test_the_stream_replays_history_and_goes_on_where_it_was(served):
    server, client = served
    frames = len(server.driver.run_now.recorder.frames)
    events = client.stream(lambda event: event[1] == "status")
    assert events[0][1] == "run" and events[0][2]["meta"]["kv_tokens"] == 220
    history = [event for event in events if event[1] == "frames"]
    assert sum(len(data["frames"]) for _, _, data in history) == frames
    assert set(history[0][2]["requests"]) == {f"R{i}" for i in range(1, 14)}
    assert history[0][2]["requests"]["R1"]["label"] == "chat 1 · turn 1"
    assert history[-1][0] == f"{client.run}:{frames}"
    again = client.stream(lambda event: event[1] == "status", since=f"{client.run}:{frames - 3}")
    assert [name for _, name, _ in again] == ["frames", "status"]
    assert again[0][2]["from"] == frames - 3 and len(again[0][2]["frames"]) == 3
    other_run = client.stream(lambda event: event[1] == "status", since="1.another:2")
    assert other_run[0][1] == "run"


def test_views(served):
    server, client = served
    trace = server.driver.run_now.trace
    for index in (0, 1, 40, trace.count() - 1):
        view = client.view(index)
        state = trace.state("step", index)
        assert view["svg"].startswith("<svg") and view["i"] == index
        in_tree = {number for number, node in view["nodes"].items() if node["status"] != "evicted"}
        assert in_tree == {str(node["id"]) for node in state["tree"]["nodes"]}
        assert sum(length for _, length in view["pool"]) == 220
        free = sum(length for owner, length in view["pool"] if owner == "" or owner[0] == "x")
        assert free == state["free"] == view["usage"][0]
        assert sum(view["usage"]) == 220
    assert client.request("GET", f"/view?run={client.run}&g=step&i=99999")[0].status == 400
    assert client.request("GET", f"/view?run={client.run}&g=eon&i=1")[0].status == 400
    for wrong in ("i=x", "i=1&rank=1e3", "i=1&open=2,x", "i=1&height=tall", "i=1&open=" + "9" * 5000):
        response, data = client.request("GET", f"/view?run={client.run}&g=step&{wrong}")
        assert response.status == 400 and "is no number" in json.loads(data)["error"]
    assert client.request("GET", "/view?run=2&g=step&i=1")[0].status == 409


PARTS = {
    "svg": (tree, "tree_svg"), "pool": (page, "pool_runs"), "usage": (page, "usage_of"),
    "requests": (page, "_requests"), "nodes": (page.Page, "_node"), "left": (page.Page, "_left"),
    "events": (page.Page, "_events"), "why": (page.Page, "_why"), "quiz": (page.Page, "_quiz"),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_cannot_be_made_is_named_and_the_others_are_there(served, monkeypatch, capfd, part):
    server, client = served
    index = server.driver.run_now.trace.marks()["evict"][0] + 1
    whole = client.view(index)

    def broken(*_):
        raise ZeroDivisionError("of no use")

    monkeypatch.setattr(*PARTS[part], broken)
    for _ in range(2):
        shown = client.view(index)
        assert shown.pop("failed") == {part: "ZeroDivisionError: of no use"}
    assert not shown.pop(part) or part == "usage"
    assert shown == {name: value for name, value in whole.items() if name != part}
    err = capfd.readouterr().err
    assert err.count("ZeroDivisionError: of no use") == 1, "told once in the terminal"
    server.driver.run_now.page._failures.clear()


def test_an_eviction_says_why(served):
    server, client = served
    trace = server.driver.run_now.trace
    view = client.view(trace.marks()["evict"][0] + 1)
    (victim, *_) = view["why"]
    assert view["kind"] == "evict" and f"n{victim['node']} evicted" in view["say"]
    assert victim["policy"] == "lru" and victim["candidates"][0]["id"] == victim["node"]
    oldest = min(c["last_access"] for c in victim["candidates"])
    assert victim["candidates"][0]["last_access"] == oldest, "lru: nobody was older"


def test_usage_and_requests_agree_with_the_events(served):
    server, _ = served
    shown = server.driver.run_now.page
    frames, requests = shown.frames(), shown.requests()
    for record in frames:
        assert sum(record["u"]) == 220
    for request in requests.values():
        assert request["end"] is not None and request["reason"] in ("stop", "length")
        kinds = [kind for kind, _, _ in request["segs"]]
        assert kinds[:3] == ["waiting", "prefill", "decode"]
        ends = [part for segment in request["segs"] for part in segment[1:]]
        assert ends == sorted(ends), "one stretch ends where the next begins"


def test_who_was_passed_over_is_what_the_scheduler_counts():
    """Under "fair" the scheduler counts; the page reads the same from the events, under every policy."""
    run = live.Run(1, Settings(workload="mixed", schedule_policy="fair"), None)
    passes = 0
    while not run.idle:
        run.advance()
        requests = run.page.requests()
        for request in run.engine.scheduler.waiting:
            counted = len(requests[request.id]["passed"])
            assert counted == request.passes, request.id
            passes += counted
    assert passes > 20
    run.close()


def test_deferrals_are_told_with_their_reason():
    run = live.Run(1, Settings(workload="mixed", schedule_policy="lpm"), None)
    while not run.idle:
        run.advance()
    requests = run.page.requests()
    told = [stretch for request in requests.values() for stretch in request["defers"]]
    assert any("slots needed" in reason for _, _, reason in told)
    assert all(a < b for a, b, _ in told)
    name, record = max(requests.items(), key=lambda item: len(item[1]["passed"]))
    frame, by = record["passed"][-1]
    events = run.page.view("step", frame + 1)["events"]
    (line,) = (event for event in events if event["tag"] == "passed" and event["requests"] == [name])
    assert f"{name} is passed over: {by[0]}" in line["text"] and "so far" in line["text"]
    run.close()


def test_who_sees_that_a_run_is_over_sees_its_last_frame(monkeypatch):
    """Others look at `idle` from threads of their own."""
    run, seen = live.Run(1, Settings(workload="vote"), None), []
    cut = run.recorder.cut
    monkeypatch.setattr(run.recorder, "cut", lambda: (seen.append(run.idle), cut()))
    while not run.idle:
        run.advance()
    assert seen and not any(seen)
    run.close()


def test_waiting_for_a_prefix_that_another_one_computes_is_told():
    shots = live.workloads.few_shot()
    together = tuple(dataclasses.replace(session, arrival=0) for session in shots.sessions[:3])
    run = live.Run(1, Settings(chunk_tokens=512), dataclasses.replace(shots, sessions=together))
    run.advance()
    requests = run.page.requests()
    assert requests["R1"]["defers"] == []
    assert all("which computes them now" in requests[name]["defers"][0][2] for name in ("R2", "R3"))
    run.close()


def test_peek_leaves_the_engine_alone(own):
    driver, client = own
    client.do("submit", text="Hello", **{"as": "chat"})
    for _ in range(30):
        client.do("step")
    before, frames = driver.run_now.engine.snapshot(), len(driver.run_now.recorder.frames)
    status, found = client.do("peek", text="Hello", **{"as": "chat"})
    assert status == 200 and found["hit"] == found["tokens"] - 1 > 10 and found["back"] == 0
    assert found["hit_text"].endswith("assistant") and found["rest_text"] == "\n"  # the last one is computed
    status, found = client.do("peek", text="Hey there", **{"as": "chat"})
    assert 0 < found["hit"] < found["tokens"]
    assert found["hit_text"] + found["rest_text"] == commands._composed({"text": "Hey there", "as": "chat"})
    assert client.do("peek", text="", **{"as": "raw"})[1]["tokens"] == 0
    assert driver.run_now.engine.snapshot() == before
    assert len(driver.run_now.recorder.frames) == frames


def test_bad_prompts_are_refused_with_the_reason(own):
    driver, client = own
    before = driver.run_now.engine.snapshot()
    status, answer = client.do("submit", text="word " * 900, **{"as": "raw"})
    assert status == 400 and "are more than the KV pool of 400" in answer["error"]
    assert client.do("peek", text="word " * 900, **{"as": "raw"})[1]["too_long"]
    assert client.do("submit", text="  ")[0] == 400
    assert client.do("submit", text=["a"])[0] == 400
    assert driver.run_now.engine.snapshot() == before and not driver.error


def test_driving(own):
    driver, client = own
    assert client.do("step")[0] == 400
    status, answer = client.do("submit", text="<script>alert(1)</script>", **{"as": "raw"})
    assert (status, answer) == (200, {"request": "R1"})
    assert client.view(1)["requests"]["R1"]["waiting"]
    assert client.do("flush")[0] == 400, "refused while requests live"
    client.do("play", on=True)
    wait(lambda: driver.run_now.idle)
    view = client.view(driver.run_now.trace.count() - 1)
    assert "<script>" not in view["svg"] and "&lt;script&gt;" in "".join(view["svg"].split("¶"))
    assert client.do("evict", tokens=0)[0] == 400
    status, answer = client.do("evict", tokens=5)
    assert status == 200 and answer["freed"] >= 5
    assert client.view(driver.run_now.trace.count() - 1)["kind"] == "evict"
    client.do("submit", text="again", **{"as": "raw"})
    wait(lambda: driver.run_now.idle)
    assert client.do("flush")[0] == 200
    assert client.view(driver.run_now.trace.count() - 1)["usage"] == [400, 0, 0, 0]
    driver.run_now.engine.check()


def test_restart_and_fork(own):
    driver, client = own
    first = client.run
    client.do("submit", text="Hello", **{"as": "chat"})
    client.do("play", on=True)
    wait(lambda: driver.run_now.idle)
    status, _ = client.do(
        "fork", frame=len(driver.run_now.recorder.frames) - 1, eviction_policy="fifo", page_size=4
    )
    assert status == 200 and driver.run_now.number == 2
    wait(lambda: driver.run_now.idle)
    config = driver.run_now.engine.config
    assert (config.eviction_policy, config.page_size, config.kv_tokens) == ("fifo", 4, 400)
    assert driver.run_now.recorder.frames[0].events[0].request == "R1"
    assert driver.hello(driver.run_now)["settings"]["workload"] == driver.settings.workload, "what restarts"
    assert client.request("GET", f"/view?run={first}&g=step&i=0")[0].status == 409
    assert client.do("restart", eviction_policy="nonsense")[0] == 400
    for bad in ({"page_size": 0}, {"kv_tokens": -5}, {"page_size": "many"}, {"kv_tokens": 2, "page_size": 4}):
        assert client.do("restart", **bad)[0] == 400
    assert not driver.error and driver.run_now.number == 2
    assert client.do("restart", workload="raw", eviction_policy="lfu", page_size="2")[0] == 200
    assert driver.run_now.workload.name == "raw" and driver.run_now.engine.config.kv_tokens == 256
    assert client.do("restart", workload="")[0] == 200 and driver.run_now.workload.name == "raw"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"workload": "nix"}, "no workload 'nix': there are mixed, "),
        ({"workload": "/etc/passwd"}, "no workload '/etc/passwd': there are "),  # pages name no files
        ({"workload": "."}, "no workload '.': there are "),
        ({"page_sizes": 2}, "no setting 'page_sizes': there are workload, "),
    ],
)
def test_a_restart_with_what_there_is_not_loses_nothing(own, asked, said):
    """The run that was there was thrown away, and the answer was 200."""
    driver, client = own
    first = driver.run_now
    status, answer = client.do("restart", **asked)
    assert status == 400 and answer["error"].startswith(said)
    assert driver.run_now is first and driver.settings == first.settings


def test_a_restart_keeps_a_workload_from_a_file(tmp_path):
    """A page knows the end of its name only, and sends that."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kv_tokens": 320, "sessions": [{"turns": [{"text": "Hello"}]}]}))
    driver = Driver(Settings(workload=str(file)), speed=0)
    with Live(driver) as server:
        client = Client(server)
        wait(lambda: driver.run_now is not None and driver.run_now.idle)
        named = driver.hello(driver.run_now)["settings"]["workload"]
        assert client.do("restart", workload=named, page_size=2)[0] == 200 and named == "mine.json"
        assert driver.run_now.workload.sessions == workloads.load(str(file)).sessions
        assert client.do("restart", workload="other.json")[0] == 400 and driver.run_now.number == 2


BAD_COMMANDS = [
    ("evict", '{"tokens": null}'), ("evict", '{"tokens": 1e999}'), ("evict", '{"tokens": [3]}'),
    ("evict", '{"tokens": 1.5}'), ("speed", '{"speed": []}'), ("speed", '{"speed": NaN}'),
    ("restart", '{"page_size": {}}'), ("restart", '{"kv_tokens": 99999999999999}'),
    ("restart", '{"eviction_policy": []}'), ("restart", '{"schedule_policy": 3}'),
    ("fork", '{"frame": null}'), ("fork", '{"frame": -5}'), ("fork", '{"frame": 9999}'),
    ("prompt", '{"request": {}}'), ("submit", '{"text": {}}'), ("doctor", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body"), BAD_COMMANDS)
def test_an_odd_command_does_not_end_the_run(own, name, body):
    driver, client = own
    first = driver.run_now
    response, data = client.request("POST", f"/do/{name}", body, Content_Type="application/json")
    assert response.status == 400 and json.loads(data)["error"]
    assert not driver.error and driver.run_now is first and driver.speed == 0
    assert client.do("submit", text="Hello")[0] == 200 and client.do("step")[0] == 200


def test_a_restart_that_fails_leaves_the_old_run(own, monkeypatch):
    driver, client = own
    first = driver.run_now

    def no_memory(*_):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(commands, "make_run", no_memory)
    assert client.do("restart", kv_tokens=500) == (400, {"error": "RuntimeError: not enough memory"})
    status, answer = client.do("restart", kv_tokens=2_000_000)
    assert status == 400 and "at most 1,000,000" in answer["error"]
    assert driver.run_now is first and client.do("submit", text="Hello")[0] == 200
    assert client.do("step")[0] == 200 and not driver.error


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_what_breaks_within_the_run_ends_it_even_if_a_command_asked(own, monkeypatch, capfd, kind):
    driver, client = own

    def broken(self):
        raise kind("broken inside")

    client.do("submit", text="Hello")
    monkeypatch.setattr(live.Run, "advance", broken)
    status, answer = client.do("step")
    assert status == 400 and answer["error"] == f"{kind.__name__}: broken inside"
    driver.join(timeout=30)
    assert driver.error == f"{kind.__name__}: broken inside"
    assert "broken inside" in capfd.readouterr().err


def raw(client, text):
    """A request as bytes, for what http.client would not send; the status line."""
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
        connection.sendall(text.encode("latin-1"))
        return connection.makefile("rb").readline().decode()


def test_odd_numbers_and_addresses_are_answered(served, capfd):
    _, client = served
    host = f"Host: 127.0.0.1:{client.port}\r\n"
    json_type = "Content-Type: application/json\r\n"
    for request in (
        f"POST /do/peek HTTP/1.1\r\n{host}{json_type}Content-Length: \u00b2\r\n\r\n",
        f"POST /do/peek HTTP/1.1\r\n{host}{json_type}Content-Length: -1\r\n\r\n",
        f"POST http://[ HTTP/1.1\r\n{host}Content-Length: 2\r\n\r\n{{}}",
        f"GET /stream?since=a:%C2%B2 HTTP/1.1\r\n{host}\r\n",
        f"GET /stream HTTP/1.1\r\n{host}\r\n",  # no WebSocket
        f"GET /view?i=%ff HTTP/1.1\r\n{host}\r\n",
        f"GET http://[ HTTP/1.1\r\n{host}\r\n",
        f"GET / HTTP/1.1\r\n{host}{host}\r\n",
        "GET / HTTP/1.1\r\n\r\n",
    ):
        assert re.match(r"HTTP/1.1 4\d\d ", raw(client, request)), request
    assert client.request("GET", "/")[0].status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_engine_never_blocks_the_server(own, monkeypatch):
    """While a command runs all else is answered; what is waited for too long is told, and not done later."""
    driver, client = own
    began, go_on, ran = threading.Event(), threading.Event(), []

    def long(driver, arguments):
        ran.append(arguments["text"])
        began.set()
        assert go_on.wait(30)
        return {}

    monkeypatch.setitem(live.COMMANDS, "play", long)
    monkeypatch.setattr(routes, "LONGEST_WAIT", 0.2)
    first = driver.command("play", {"text": "first"})
    assert began.wait(30)
    try:
        assert client.do("play", text="given up") == (503, {"error": "the engine is busy"})
        assert client.view(0)["svg"].startswith("<svg")
        assert client.stream(lambda event: event[1] == "status")[-1][2]["drivable"]
    finally:
        go_on.set()
    assert first.result(30) == {}
    monkeypatch.setattr(routes, "LONGEST_WAIT", 30)
    assert client.do("submit", text="Hello")[0] == 200
    assert ran == ["first"] and not driver.error


def test_whoever_waits_for_an_engine_that_ends_is_told(own, monkeypatch, capfd):
    driver, client = own
    began, go_on = threading.Event(), threading.Event()

    def breaks(self):
        began.set()
        assert go_on.wait(30)
        raise RuntimeError("broken inside")

    client.do("submit", text="Hello")
    monkeypatch.setattr(live.Run, "advance", breaks)
    first = driver.command("step", {})
    assert began.wait(30)
    second = driver.command("peek", {"text": "Hello"})
    go_on.set()
    for answer, told in ((first, "broken inside"), (second, "the engine has stopped")):
        with pytest.raises(ValueError, match=told):
            answer.result(timeout=30)
    assert "broken inside" in capfd.readouterr().err


def test_a_command_that_comes_in_the_moment_of_the_end_is_answered(monkeypatch):
    """Between the look whether the thread has ended and the queue, it ends."""
    driver = Driver(Settings(workload="none"), speed=0)
    put = driver._commands.put
    monkeypatch.setattr(driver._commands, "put", lambda asked: (driver._end(), put(asked)))
    answer = driver.command("step", {})
    assert answer.done()
    with pytest.raises(ValueError, match="the engine has stopped"):
        answer.result()


def test_windows_that_ask_for_the_same_picture_share_one_drawing(served, monkeypatch):
    server, client = served
    drawn, answers, asked, position = [], [], [], routes._position
    view = server.driver.run_now.page.view

    def slow(*wanted):
        drawn.append(wanted)
        wait(lambda: len(asked) == 12)
        return view(*wanted)

    def counted(query):  # in the server's one thread, which looks for a drawing right after it
        asked.append(query)
        return position(query)

    monkeypatch.setattr(server.driver.run_now.page, "view", slow, raising=False)
    monkeypatch.setattr(routes, "_position", counted)
    windows = [threading.Thread(target=lambda: answers.append(client.view(33))) for _ in range(12)]
    for window in windows:
        window.start()
    for window in windows:
        window.join()
    assert len(answers) == 12 and all(answer == answers[0] for answer in answers) and len(drawn) == 1


def test_refused_requests_are_told(tmp_path, capsys):
    run = live.Run(1, Settings(workload="chat", kv_tokens=40), None)
    while not run.idle:
        run.advance()
    assert run.refused.startswith("4 of 4 requests refused: ") and "KV pool of 40" in run.refused
    assert run.page.meta()["refused"] == run.refused and run.served_none
    run.close()
    page, record = tmp_path / "x.html", tmp_path / "x.jsonl"
    code = live.main(
        ["--workload", "chat", "--kv-tokens", "5", "--export", str(page), "--record", str(record)]
    )
    assert code == 1, "there is nothing to see in that file"
    assert capsys.readouterr().err.startswith("4 of 4 requests refused: ")
    assert Replay(Recorder.load(record), "x").refused.startswith("4 of 4 requests refused: ")
    driver = Driver(Settings(workload="chat", kv_tokens=40), speed=0)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None and driver.run_now.idle)
        events = Client(server).stream(lambda event: event[1] == "status" and event[2]["refused"])
        assert events[-1][2]["refused"].startswith("4 of 4")


def test_a_recording_changed_by_hand_is_refused_in_one_line(tmp_path, served, capsys):
    server, _ = served
    good = tmp_path / "good.jsonl"
    server.driver.run_now.recorder.save(good)
    lines = good.read_text(encoding="utf-8").splitlines(keepends=True)
    insertion = next(i for i, line in enumerate(lines) if '"NodeInserted"' in line)
    frame = json.loads(lines[insertion])
    frame["events"] = [event for event in frame["events"] if event[0] != "NodeInserted"]
    renamed = [*lines[:insertion], json.dumps(frame) + "\n", *lines[insertion + 1 :]]
    bad, page = tmp_path / "bad.jsonl", tmp_path / "page.html"
    for text, code, told in (
        ([*lines[:4], *lines[5:]], 0, "line 5: this is frame 4, but frame 3 is due"),
        ([*lines[:4], lines[5], lines[4], *lines[6:]], 0, "line 5: this is frame 4, but frame 3 is due"),
        (renamed, 0 if insertion > 1 else 2, "does not follow from those before it"),
        ([lines[0].replace('"start"', '"stop"'), *lines[1:]], 2, 'no "start"'),
    ):
        bad.write_text("".join(text), encoding="utf-8")
        page.unlink(missing_ok=True)
        assert live.main(["--replay", str(bad), "--export", str(page)]) == code
        err = capsys.readouterr().err
        assert told in err and str(bad) in err and err.count("\n") == 1
        assert page.exists() == (code == 0), "what is whole before a hole can be seen"
    replay = live._replay(str(good))
    assert replay.notices == []


@pytest.mark.parametrize(
    "bad", [["--port", "70000"], ["--port", "-1"], ["--speed", "-1"], ["--speed", "nan"], ["--speed", "inf"]]
)
def test_numbers_on_the_command_line(bad, capsys):
    with pytest.raises(SystemExit) as left:
        live.main([bad[0] + "=" + bad[1], "--no-open"])
    assert left.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_programs_run_live_and_are_dropped_midway():
    driver = Driver(Settings(workload="vote"), speed=0, paused=True)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None)
        client = Client(server)
        for _ in range(8):
            client.do("step")
        first = driver.run_now
        assert any("way" in label for label in first.player.labels.values())
        recorded = len(first.recorder.frames)
        assert client.do("restart", workload="skeleton-of-thought")[0] == 200
        assert not first.engine.scheduler.has_work and len(first.recorder.frames) == recorded
        wait(lambda: driver.run_now.idle and driver.run_now is not first, 60)
        last = driver.run_now
        assert last.player.done and last.notices == []
        state = last.trace.state("step")
        assert all(node["lock_ref"] == 0 for node in state["tree"]["nodes"]), "the last frame lets go"
        last.engine.check()
    assert not driver.error


def test_a_program_that_fails_is_told():
    run = live.Run(1, Settings(workload="agent-team-long"), None)
    while not run.idle:
        run.advance()
    assert any("was refused" in notice for notice in run.notices)
    assert any("failed" in notice for notice in run.notices)
    run.close()


def test_the_doctor(served):
    server, client = served
    page = server.driver.run_now.page
    prompts = [client.do("prompt", request=name)[1]["text"] for name in ("R1", "R5")]
    assert prompts[0] == page.trace.decode(page.prompt("R1"))
    steps = len(server.driver.run_now.trace)
    asked = {"a": prompts[0], "b": prompts[1], "from_a": "R1", "from_b": "R5"}
    status, found = client.do("doctor", **asked)
    assert status == 200 and len(server.driver.run_now.trace) == steps
    assert found["tokens"] == [len(page.prompt("R1")), len(page.prompt("R5"))]
    first, second = page.prompt("R1"), page.prompt("R5")
    alike = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    assert found["position"] == alike and found["shared"] <= alike
    clock = [
        "It is 09:14.\nBe brief. Be kind. Never guess.\nWho are you?",
        "It is 09:15.\nBe brief. Be kind. Never guess.\nWho am I?",
    ]
    found = client.do("doctor", a=clock[0], b=clock[1])[1]
    assert found["token"] == ["4", "5"] and found["lost"] > 8
    assert found["better"]["saved"] > 8 and "It is 09:15." in found["better"]["moved"][0]
    assert "B would find" in found["outcome"] and found["loss"].startswith(f"{found['lost']} tokens of B")
    found = client.do("doctor", a="same", b="same")[1]
    assert found["equal"] and found["verdict"] in found["say"] and found["outcome"] == ""
    for bad in ({"a": "", "b": "x"}, {"a": "x"}, {"a": "x", "b": 3}, {"a": "x" * 30_000, "b": "x"}):
        assert client.do("doctor", **bad)[0] == 400
    assert client.do("doctor", a="x", b="y", from_a="R999")[0] == 400
    assert client.do("prompt", request="R999")[0] == 400


def test_the_doctor_takes_a_picked_prompt_as_it_came():
    """Generated text may be written in other tokens than a tokenizer would choose."""
    from minirad.traces import tokenizer
    from viz.web.consult import _Exact

    text = tokenizer()
    odd = _Exact(text, {"ab": [7, 8, 9]})
    assert odd.encode("ab") == [7, 8, 9] and odd.encode("abc") == text.encode("abc")


def broken(self):
    """An engine's step."""
    raise AssertionError("page 3 has two owners")


def test_an_error_in_the_engine_reaches_the_page(monkeypatch, capfd):
    monkeypatch.setattr(live.Run, "advance", broken)
    driver = Driver(Settings(workload="chat"), speed=0)
    with Live(driver) as server:
        events = Client(server).stream(lambda event: event[1] == "status" and event[2]["error"])
        assert "page 3 has two owners" in events[-1][2]["error"]
        assert Client(server).do("step")[0] == 400
    assert "page 3 has two owners" in capfd.readouterr().err
    assert live.main(["--workload", "chat", "--no-open", "--port", "0", "--speed", "0"]) == 1


def test_a_page_that_is_open_hears_why_the_command_ends(monkeypatch, capfd):
    """Which does not wait for it: who serves the page does."""
    port, there, heard = free_ports(1), threading.Event(), []

    def breaks(self):
        assert there.wait(60)
        broken(self)

    def listens():
        client = Client(SimpleNamespace(server=SimpleNamespace(port=port), driver=None))
        while not there.is_set():
            time.sleep(0.01)
            with contextlib.suppress(OSError):
                heard.extend(client.stream(lambda event: there.set()))

    monkeypatch.setattr(live.Run, "advance", breaks)
    page = threading.Thread(target=listens, daemon=True)
    page.start()
    assert live.main(["--workload", "chat", "--no-open", "--port", str(port), "--speed", "0"]) == 1
    page.join(60)
    _, name, status = heard[-1]
    assert name == "status" and "page 3 has two owners" in status["error"]
    assert "page 3 has two owners" in capfd.readouterr().err


def test_the_last_frame_of_what_broke_is_there_before_pages_are_let_go(monkeypatch, capfd):
    """It is told as the run is closed, and that is behind the error."""
    stopped, in_time, stop, close = threading.Event(), [], Driver.stop, live.Run.close

    def closes(self, broken=False):
        in_time.append(not stopped.wait(1))
        close(self, broken)

    monkeypatch.setattr(Driver, "ending", 60.0)
    monkeypatch.setattr(Driver, "stop", lambda self: (stopped.set(), stop(self)))
    monkeypatch.setattr(live.Run, "advance", broken)
    monkeypatch.setattr(live.Run, "close", closes)
    assert live.main(["--workload", "chat", "--no-open", "--port", "0", "--speed", "0"]) == 1
    assert in_time == [True]


def test_what_only_the_engine_finds_wrong_is_one_line_as_well(tmp_path, capfd):
    (tmp_path / "nosuch").write_text("a file")
    wrong = ["--host-kv-tokens", "99", "--disk-dir", str(tmp_path / "nosuch")]
    assert live.main([*wrong, "--no-open", "--port", "0"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "nosuch" in line


def test_it_stops_at_once_even_with_open_streams(monkeypatch):
    """Nobody's patience has to end for it: all of them are too long to be waited for."""
    monkeypatch.setattr(web, "LAST_NEWS", 3600.0)
    driver = Driver(Settings(workload="mixed"), speed=5)
    server = Live(driver).__enter__()
    client = Client(server)
    listening = threading.Thread(target=lambda: client.stream(lambda event: False), daemon=True)
    listening.start()
    wait(lambda: driver.run_now is not None and len(driver.run_now.trace) > 2)
    driver.ending = 3600.0
    server.__exit__(None, None, None)
    driver.join(timeout=30)
    listening.join(timeout=30)
    assert not driver.is_alive() and not listening.is_alive()


def test_a_taken_port_gives_way():
    first = Live(Driver(Settings(workload="none"), speed=0))
    with first, Live(Driver(Settings(workload="none"), speed=0), port=first.server.port) as second:
        assert second.server.port != first.server.port
        assert second.server.address == "127.0.0.1"


def test_command_line(tmp_path, capsys):
    record, page, movie = tmp_path / "run.jsonl", tmp_path / "run.html", tmp_path / "run.gif"
    shared = ["--export", str(page), "--export", str(movie)]
    code = live.main(["--workload", "few-shot", "--record", str(record), *shared])
    assert code == 0
    assert "run.html" in capsys.readouterr().out
    recording = Recorder.load(record)
    assert len(recording) > 5
    assert movie.read_bytes().startswith(b"GIF89a")
    text = page.read_text(encoding="utf-8")
    assert 'id="recording"' in text and "/static/" not in text and "import {" not in text
    assert live.main(["--replay", str(record), "--export", str(tmp_path / "again.html")]) == 0
    for bad in (
        ["--workload", "nonsense"],
        ["--page-size", "0"],
        ["--kv-tokens", "0"],
        ["--model", "nowhere"],
        ["--allow-host", "https://hub.example.org"],
        ["--host", ""],
        ["--host", "192.0.2.1", "--no-open"],
    ):
        assert live.main(bad) == 2
    assert live.main(["--replay", str(tmp_path / "none.jsonl")]) == 2
    assert live.main(["--workload", "raw", "--export", str(tmp_path / "x.pdf"), "--steps", "3"]) == 2
    assert "must end in .html or .gif" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        "--workload chat", "--model x", "--kv-tokens 5", "--page-size 2", "--schedule-policy fcfs",
        "--eviction-policy lfu", "--host-kv-tokens 9", "--host-write write_back", "--disk-dir d",
        "--disk-mb 3", "--lora a=b", "--bigram-keys", "--speculative ngram", "--jump-forward", "--tp 2",
        "--compare lru,lfu", "--cache x.py", "--serve 8000", "--publish tcp://127.0.0.1:1",
        "--record new.jsonl", "--steps 5",
    ],
)  # fmt: skip
def test_a_replay_takes_nothing_of_an_engine(option, tmp_path, monkeypatch, capsys):
    """It was dropped in silence."""
    monkeypatch.chdir(tmp_path)
    assert live.main(["--replay", "run.jsonl", *option.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and option.split()[0] in err and "--replay" in err
    assert "No such file" not in err and list(tmp_path.iterdir()) == []


def test_a_restart_records_beside_what_is_there(tmp_path):
    old = tmp_path / "run-2.jsonl"
    old.write_text("yesterday's", encoding="utf-8")
    driver = Driver(Settings(workload="none", record=str(tmp_path / "run.jsonl")), speed=0, paused=True)
    with Live(driver) as server:
        wait(lambda: driver.run_now is not None)
        assert Client(server).do("restart", eviction_policy="fifo")[0] == 200
    driver.join(timeout=30)
    assert old.read_text(encoding="utf-8") == "yesterday's"
    assert Recorder.load(tmp_path / "run-3.jsonl").header["config"]["eviction_policy"] == "fifo"


def test_a_replay_cannot_be_driven(tmp_path, served):
    server, _ = served
    server.driver.run_now.recorder.save(tmp_path / "run.jsonl")
    replay = Replay(Recorder.load(tmp_path / "run.jsonl"), "run.jsonl")
    driver = Driver(Settings(), speed=3, replay=replay)
    with Live(driver) as other:
        client = Client(other)
        assert client.do("submit", text="x")[0] == 400
        events = client.stream(lambda event: event[1] == "frames")
        assert events[-1][2]["requests"]["R1"]["label"] == "chat 1 · turn 1", "from the header's notes"
        assert events[0][2]["meta"]["title"] == "Chat sessions"
        status, found = client.do("doctor", a="Hello there", b="Hello you")
        assert status == 200 and found["shared"] == found["position"] > 0, "needs no engine"
        assert client.view(20)["svg"] == Client(server).view(20)["svg"]
        status = client.stream(lambda event: event[1] == "status")[-1][2]
        assert not status["drivable"]


@pytest.mark.slow  # a process of its own
def test_ctrl_c_ends_it():
    import signal

    if sys.platform == "win32":
        pytest.skip("no SIGINT to send to a child there")
    process = subprocess.Popen(
        [sys.executable, "-m", "viz.live", "--no-open", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        time.sleep(2.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0  # 0.1 s on a quiet machine, 0.6 while the model still loads
    finally:
        process.kill()


def test_a_long_recording_is_thinned_out(monkeypatch, served, tmp_path):
    server, _ = served
    page = server.driver.run_now.page
    monkeypatch.setattr(export, "MOST_VIEWS", 20)
    monkeypatch.setattr(export, "MOST_EVENTS", 10)
    data = export.page_data(page, "thin")
    assert "event" not in data["views"]
    kept = data["views"]["step"]
    assert len(kept) <= 60 and 0 in kept and page.trace.count() - 1 in kept


def test_steps_without_an_export_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert live.main(["--no-open", "--steps", "5"]) == 2
    assert "--export" in capsys.readouterr().err


def test_the_policy_of_the_running_engine_can_be_changed(own):
    driver, client = own
    client.do("submit", text="Hello", **{"as": "chat"})
    assert client.do("policy", policy="lfu") == (200, {"policy": "lfu"})
    assert driver.status()["policy"] == "lfu" == driver.run_now.engine.cache.eviction_policy
    last = client.view(len(driver.run_now.trace))
    assert last["policy"] == "lfu"
    assert "eviction policy changed from lru to lfu" in [event["text"] for event in last["events"]]
    for name, reason in (("lfu", "lfu already"), ("best", "unknown eviction policy 'best'"), (3, "not 3")):
        status, answer = client.do("policy", policy=name)
        assert status == 400 and reason in answer["error"]
    assert not driver.error and driver.is_alive()


def test_only_an_engine_with_our_tree_has_a_policy_to_change(tmp_path):
    record = tmp_path / "run.jsonl"
    live.main(
        ["--workload", "chat", "--steps", "3", "--record", str(record), "--export", str(tmp_path / "a.html")]
    )
    driver = Driver(Settings(), speed=0, replay=Replay(Recorder.load(record), "run"))
    with Live(driver) as server:
        assert driver.status()["policy"] == ""
        status, answer = Client(server).do("policy", policy="lfu")
    assert status == 400 and "no engine to drive" in answer["error"]


def test_a_page_restarts_with_a_host_tier(own):
    driver, client = own
    assert client.do("restart", workload="none", host_kv_tokens="160", host_write="write_back")[0] == 200
    config = driver.run_now.engine.config
    assert (config.host_kv_tokens, config.host_write) == (160, "write_back")
    assert driver.run_now.page.meta()["host_tokens"] == 160
    status, answer = client.do("restart", host_kv_tokens=2_000_000)
    assert status == 400 and "a host tier of 2,000,000 tokens" in answer["error"]


@pytest.mark.parametrize(
    "more", ["", "--serve 0", "--compare lru,lfu", "--workers 2", "--cache MINE", "--export OUT"]
)
def test_an_adapter_that_is_not_there_is_said_once_and_before_anything_begins(more, tmp_path, capfd):
    """Whatever engine was to have it: no page, no server and no worker was started."""
    options = more.replace("MINE", str(find_folder("02") / "solution.py")).replace(
        "OUT", f"{tmp_path}/x.html"
    )
    assert live.main(["--lora", "nosuch", "--no-open", "--port", "0", *options.split()]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("nosuch is no directory") == 1 and said.err.count("\n") == 1


def test_a_callers_mistake_is_not_laid_on_a_learners_file(tmp_path, capfd):
    """Where only the engine finds it, the command ends as without the file, and the file did not break."""
    mine = str(find_folder("02") / "solution.py")
    assert live.main(["--lora", f"a={tmp_path}", "--cache", mine, "--no-open", "--port", "0"]) == 2
    said = capfd.readouterr()
    assert "broke" not in said.out and said.err.count("no adapter_config.json") == 1


def test_a_learners_file_that_does_not_come_back_is_told(monkeypatch, tmp_path):
    """On the stream, though nothing happens; a command that waits in vain hears it; then it is gone."""
    monkeypatch.setattr(own_code, "PATIENCE", 1)
    monkeypatch.setattr("viz.web.routes.LONGEST_WAIT", 0.1)
    go = threading.Event()
    monkeypatch.setattr("builtins.go", go, raising=False)
    file = tmp_path / "mine.py"
    body = "    while not go.wait(0.01):\n        pass\n    return 0\n"
    file.write_text(f"def space_of(salt, adapter, loaded):\n{body}", encoding="utf-8")
    driver = Driver(Settings(workload="chat", cache=(str(file),)), speed=0)
    try:
        with Live(driver) as server:
            client = Client(server)
            *_, (_, _, status) = client.stream(lambda event: event[1] == "status" and event[2]["slow"])
            assert status["slow"].startswith(f"{file} has been running for ") and not status["error"]
            assert " seconds, in space_of (line " in status["slow"]
            code, refused = client.do("step")
            assert code == 503 and refused["error"].startswith(f"{file} has been running for ")
            assert client.view(0)["g"] == "step"  # the page itself is there
            go.set()
            client.stream(lambda event: event[1] == "status" and not event[2]["slow"] and event[2]["idle"])
    finally:
        go.set()
    assert not driver.error


def only(*tokens):
    """A mask that allows these tokens, in their order and again and again."""

    def mask(output):
        row = [False] * 1024
        row[tokens[len(output) % len(tokens)]] = True
        return row

    return mask


def test_a_fork_of_a_live_run_has_its_requests_masks(tmp_path):
    """A grammar, say: the fork's replies are those of the run, and a fork of the fork's as well."""
    turn = workloads.Turn(token_ids=(5, 6, 7), max_new_tokens=6, ignore_eos=True)
    free = workloads.Session("free", (turn,))
    masked = dataclasses.replace(free, name="masked", arrival=2, token_mask=only(40, 41, 42))
    session = commands.Session(Settings("raw"), 0, False, None)
    run = session.begin(Settings("raw"), workloads.Workload("two", "Two", (free, masked)))
    said, last = [], run
    for _ in range(3):
        last = run
        while not run.idle:
            run.advance()
        events = [event for frame in run.recorder.frames for event in frame.events]
        said.append([(e.request, e.token) for e in events if type(e).__name__ == "TokenSampled"])
        assert [e.masked for e in events if isinstance(e, RequestAdded)] == [False, True]
        assert run.notices == []
        commands.COMMANDS["fork"](session, {})
        run = session.run_now
    assert said[0] == said[1] == said[2]
    assert [token for name, token in said[0] if name == "R2"] == [40, 41, 42] * 2
    Recorder.save(last.recorder, tmp_path / "run.jsonl")
    replay = Replay(Recorder.load(tmp_path / "run.jsonl"), "run")
    session = commands.Session(Settings(), 0, False, replay)
    commands.COMMANDS["fork"](session, {})
    (said,) = session.run_now.notices
    assert said == "A recording holds no grammars: in this fork the replies of R2 are free."
