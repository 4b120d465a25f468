"""Page and OpenAI server over one engine: what comes by HTTP is seen, what the page does holds for both."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.request
from functools import lru_cache

import pytest
from test_live import Client, wait

from minirad.__main__ import main as minirad_main
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.fleet.endpoints import server_info
from minirad.fleet.publish import Publisher
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.server.settings import Limits
from minirad.workloads import Session, Turn, Workload
from viz.live import Live, Settings, _parser, main
from viz.web import asked, served
from viz.web.driver import Driver

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
NONE = Settings(workload="none", kv_tokens=400)
CHAT = "/v1/chat/completions"


class Asking:
    """A client of the server, which sends one request (greedy: the API's own default draws) and may leave."""

    def __init__(self, driver, path=CHAT, key=None, **body):
        port = int(driver.front.url.rpartition(":")[2])
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if path == CHAT and "messages" not in body:
            body["messages"] = [{"role": "user", "content": body.pop("text", "Who are you?")}]
        self.connection.request(
            "POST", path, json.dumps({"max_tokens": 12, "temperature": 0, **body}), headers
        )

    def answer(self):
        response = self.connection.getresponse()
        data = json.loads(response.read())
        self.connection.close()
        return response.status, data

    def text(self):
        status, data = self.answer()
        assert status == 200, data
        return data["choices"][0]["message"]["content"]

    def leave(self):
        self.connection.close()


@contextlib.contextmanager
def serving(settings=NONE, speed=0.0, key=None, kind=served.ServedDriver, **more):
    driver = kind(settings, speed, served.Front(0), served.Served(api_key=key), **more)
    with Live(driver) as live:
        wait(lambda: driver.run_now is not None and driver.service is not None, 60)
        yield driver, Client(live)
    driver.join(60)  # the page itself waits for no longer than `ending`
    assert not driver.is_alive()


@pytest.fixture(scope="module")
def page():
    """A served page that many tests share: each waits until it is idle again."""
    with serving() as found:
        yield found
        found[0].run_now.engine.check()


@pytest.fixture(autouse=True)
def whole(request):
    """After each test that shares the page, its engine's books are right."""
    yield
    if "page" in request.fixturenames:
        driver, client = request.getfixturevalue("page")
        client.do("play", on=True), client.do("speed", speed=0)
        wait(lambda: driver.run_now.idle)
        driver.run_now.engine.check()


@lru_cache
def alone():
    return Engine(NONE.config(400))


@lru_cache
def said_by_itself(text, new=12):
    """What an engine of its own says."""
    engine, message = alone(), [{"role": "user", "content": text}]
    prompt = engine.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return engine.generate(prompt, SamplingParams(max_new_tokens=new))[0].text


def lives(driver):
    return driver.run_now.page.requests()


def test_a_request_by_http_is_answered_and_seen(page):
    driver, client = page
    before = len(driver.run_now.trace)
    assert Asking(driver, text="What is the capital of France?").text() == said_by_itself(
        "What is the capital of France?"
    )
    wait(lambda: driver.run_now.idle)
    (name,) = [n for n, life in lives(driver).items() if "capital of France" in life["text"]]
    assert lives(driver)[name]["reason"] == "stop"
    end = len(driver.run_now.trace)
    assert end > before + 3
    middle = client.view(end - 3)  # steps later, and back
    assert list(middle["requests"]) == [name] and middle["usage"][2] > 0
    assert client.view(0)["frame"] == -1 and client.view(end)["requests"] == {}


def test_many_at_once_and_a_stream(page):
    driver, _ = page
    asked = [Asking(driver, text=f"What is {n} + 4?", stream=n == 2) for n in range(1, 6)]
    stream = asked.pop(1)
    assert [each.text() for each in asked] == [said_by_itself(f"What is {n} + 4?") for n in (1, 3, 4, 5)]
    events = stream.connection.getresponse().read().decode().split("\n\n")
    pieces = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert text == said_by_itself("What is 2 + 4?") and events[-2] == "data: [DONE]"


def test_a_paused_page_lets_requests_wait_and_says_so(page):
    driver, client = page
    assert "as fast as it goes" in driver.status()["serving"]["text"]
    client.do("play", on=False)
    assert "paused with this page: requests wait" in driver.status()["serving"]["text"]
    asked = Asking(driver, text="Hello")
    wait(lambda: client.view(len(driver.run_now.trace))["requests"])
    (live,) = client.view(len(driver.run_now.trace))["requests"].values()
    assert live["waiting"]
    gone = Asking(driver, text="Good morning")
    wait(lambda: len(client.view(len(driver.run_now.trace))["requests"]) == 2)
    gone.leave()
    wait(lambda: len(client.view(len(driver.run_now.trace))["requests"]) == 1)  # also while it is paused
    assert client.do("step")[0] == 200  # one step by hand computes the prompt
    client.do("play", on=True)
    assert asked.text() == said_by_itself("Hello")


def test_a_slow_page_makes_a_slow_server_and_says_so(page):
    driver, client = page
    client.do("speed", speed=20)
    assert "at most 20 steps per second" in driver.status()["serving"]["text"]
    start = time.monotonic()
    Asking(driver, text="What is the capital of Peru?", max_tokens=6).text()
    assert time.monotonic() - start > 5 / 20  # a prefill, made at once, and five decode steps
    client.do("speed", speed=0)
    Asking(driver, text="What is the capital of Italy?", max_tokens=6).text()
    assert "steps per second" not in driver.status()["serving"]["text"]


def test_who_asks_does_not_hurry_a_slow_page(page):
    """What comes while others run waits for the next step: it is no reason to make one."""
    driver, client = page
    client.do("speed", speed=4)
    first = Asking(driver, text="Tell me a story.", max_tokens=60, ignore_eos=True)  # a quarter of a minute
    wait(lambda: any("a story." in life["text"] for life in lives(driver).values()))
    start, asked = time.monotonic(), driver.asked
    clock = driver.run_now.clock  # in this order: a step between the two has its time
    rest = []
    for n in range(1, 7):  # one after the other, so that each could make a step of its own
        rest.append(Asking(driver, text=f"What is {n} + 1?", max_tokens=1))
        wait(lambda n=n: driver.asked == asked + n)
    wait(lambda: driver.run_now.clock > clock)
    steps = driver.run_now.clock - clock
    assert steps <= 2 + (time.monotonic() - start) * 4  # a late one and the next lie close together
    client.do("speed", speed=0)
    assert all(each.answer()[0] == 200 for each in (first, *rest))


def test_a_client_that_goes_away_aborts_its_request_within_a_step(page):
    driver, client = page
    client.do("speed", speed=50)
    asked = Asking(driver, text="Tell me a story about a cat.", max_tokens=300, ignore_eos=True)
    wait(lambda: driver.run_now.engine.scheduler.live)
    asked.leave()
    wait(lambda: driver.run_now.idle)
    (life,) = [life for life in lives(driver).values() if "about a cat" in life["text"]]
    assert life["reason"] == "abort"


def test_the_commands_of_the_page_go_on_working(page):
    driver, client = page
    client.do("speed", speed=0)
    Asking(driver, text="My name is Ada.").text()
    assert client.do("peek", text="My name is Ada.", **{"as": "chat"})[1]["tokens"] > 0
    name = client.do("submit", text="What color is snow?", **{"as": "chat"})[1]["request"]
    wait(lambda: driver.run_now.idle)
    assert lives(driver)[name]["label"].startswith("yours") and lives(driver)[name]["reason"] == "stop"
    assert client.do("policy", policy="lfu")[0] == 200 and client.do("policy", policy="lru")[0] == 200
    assert client.do("evict", tokens=3)[1]["freed"] >= 3
    assert client.do("flush")[0] == 200
    connection = Asking(driver, path="/flush_cache")  # the server's own way to it
    assert connection.answer()[0] == 200
    wait(lambda: client.view(len(driver.run_now.trace))["count"] == 0)  # its frame comes behind the answer
    assert any(isinstance(e, ev.CacheFlushed) for e in driver.run_now.recorder.frames[-1].events)


@pytest.mark.parametrize("name", ["restart", "fork"])
def test_the_engine_that_serves_is_not_replaced(page, name):
    driver, client = page
    Asking(driver).text()
    run = driver.run_now
    status, said = client.do(name, page_size=2)
    assert status == 400 and driver.front.url in said["error"]
    assert driver.run_now is run and Asking(driver).answer()[0] == 200


def test_a_key_is_asked_for_and_not_shown():
    with serving(key="secret") as (driver, client):
        assert Asking(driver).answer()[0] == 401
        assert Asking(driver, key="secret").answer()[0] == 200
        assert "secret" not in client.request("GET", "/")[1].decode()
        assert "secret" not in json.dumps([driver.status(), driver.hello(driver.run_now)])


def test_who_asks_the_server_can_follow_its_kv_events():
    with Publisher(None, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:

        class Publishing(served.ServedDriver):
            def __init__(self, *arguments, **more):
                super().__init__(*arguments, publisher=publisher, **more)
                self.begun = lambda run: publisher.attach(run.engine)

        with serving(kind=Publishing) as (driver, _):
            assert Asking(driver).answer()[0] == 200
            wait(lambda: publisher.batches > 0)
            info = server_info(driver.front.url)
            assert (info.endpoints, info.block_size) == ([publisher.endpoint], 1)


def test_the_command_line_on_the_page_works():
    with serving() as (driver, _):
        serving_now = driver.status()["serving"]
        assert serving_now["text"].startswith("Nobody has asked yet")
        line = ["sh", "-c", serving_now["example"]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        if done.returncode == 127:
            pytest.skip("there is no curl")
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        wait(lambda: driver.status()["serving"]["example"] == "")


def test_a_workload_runs_beside_it_and_all_is_recorded(tmp_path):
    path = tmp_path / "run.jsonl"
    settings = Settings(workload="few-shot", kv_tokens=400, record=str(path))
    with serving(settings) as (driver, _):
        texts = [Asking(driver, text=f"What is {n} + 2?").text() for n in range(3)]
        wait(lambda: driver.run_now.idle)
        assert driver.run_now.player.done and driver.run_now.refused == ""
        assert texts == [said_by_itself(f"What is {n} + 2?") for n in range(3)]
    recording = Recorder.load(path)
    added = [e for frame in recording.frames for e in frame.events if isinstance(e, ev.RequestAdded)]
    assert len(added) == 6 + 3 and len(recording.header["notes"]["labels"]) == 6


def test_who_waits_when_the_page_ends_is_told():
    with serving(paused=True) as (driver, _):
        asked = Asking(driver)
        wait(lambda: driver.service.open == 1)
        found = []
        thread = threading.Thread(target=lambda: found.append(asked.answer()))
        thread.start()
    thread.join(30)
    ((status, said),) = found
    assert status == 503 and "ending" in said["error"]["message"]


def test_an_engine_that_breaks_tells_page_and_clients(capfd):
    with serving(paused=True) as (driver, _):
        asked = Asking(driver)
        wait(lambda: driver.service.open == 1)

        def broken(batch):
            raise RuntimeError("the card is gone")

        driver.run_now.engine.runner.launch = broken
        driver.command("play", {"on": True})
        status, said = asked.answer()
        assert (
            status == 503 and said["error"]["message"] == "the engine broke: RuntimeError: the card is gone"
        )
        wait(lambda: driver.error)
        assert "the card is gone" in driver.status()["error"]
    assert "RuntimeError: the card is gone" in capfd.readouterr().err


def test_a_page_that_is_opened_when_the_engine_has_broken_is_told(capfd):
    with serving() as (driver, _):

        def broken(batch):
            raise RuntimeError("the card is gone")

        driver.run_now.engine.runner.launch = broken
        assert Asking(driver).answer()[0] == 503
        driver.join(60)
        with pytest.raises(OSError):  # nobody serves there any more
            urllib.request.urlopen(f"{driver.front.url}/health", timeout=30)
        told = driver.hello(driver.run_now)["status"]
        assert "the card is gone" in told["error"] and driver.front.url in told["serving"]["text"]
    assert "the card is gone" in capfd.readouterr().err


def test_what_came_before_a_pause_is_taken_in(monkeypatch):
    """Between two slow steps: they came while it played, and no step follows."""
    with serving(speed=0.05) as (driver, client):
        first = Asking(driver, max_tokens=30, ignore_eos=True)
        wait(lambda: driver.run_now.engine.scheduler.running)
        second = Asking(driver, text="Who are you?")
        wait(lambda: driver.asked == 2)
        answer = driver.service.call(lambda engine: len(engine.scheduler.waiting))
        assert not answer.done()
        client.do("play", on=False)
        assert answer.result(30) in (0, 1) and len(driver.run_now.engine.scheduler.waiting) == 1
        assert not driver.run_now.idle and not driver.playing
        client.do("speed", speed=0), client.do("play", on=True)
        assert first.answer()[0] == second.answer()[0] == 200


def test_a_long_recording_goes_on_in_a_new_one(monkeypatch):
    monkeypatch.setattr(served, "MOST_FRAMES", 20)
    with serving() as (driver, client):
        engine, keys = driver.run_now.engine, set()
        for number in range(8):
            asked = Asking(driver, text=f"What is {number} + 3?")
            assert asked.text() == said_by_itself(f"What is {number} + 3?")
            keys.add(client.run)
        wait(lambda: driver.run_now.idle)
        assert len(keys) >= 3 and driver.run_now.engine is engine
        assert len(driver.run_now.trace) <= 2 * 20 and client.view(0)["count"] > 0
        client.do("submit", text="Hello", **{"as": "chat"})
        wait(lambda: driver.run_now.idle)
        engine.check()
        assert Asking(driver).answer()[0] == 200


@pytest.mark.parametrize("record", [False, True])
def test_a_page_says_that_it_begins_anew(monkeypatch, tmp_path, record):
    """Of each new recording: from which step on, and where the one before is."""
    monkeypatch.setattr(served, "MOST_FRAMES", 5)
    file = tmp_path / "run.jsonl"
    runs = []

    class Own(served.ServedDriver):
        def _go_on(self, run):
            super()._go_on(run)
            runs.append(self.run_now)

    settings = dataclasses.replace(NONE, record=str(file) if record else None)
    with serving(settings, kind=Own) as (driver, _):
        for _ in range(2):
            assert Asking(driver).answer()[0] == 200
        wait(lambda: driver.run_now.idle and driver.status()["notices"] == runs[-1].notices)
    assert len(runs) >= 2
    files = [file, *(run.path for run in runs)]
    for run, before in zip(runs[:2], files, strict=False):
        start = run.recorder.header["start"]["step"]
        (notice,) = run.notices
        assert notice.startswith(f"This page begins anew after step {start}: the recording before, of ")
        assert notice.endswith(f" it is in {before}." if record else "; without --record it is gone.")
        assert not record or len(Recording.load(before).frames) > 5


def test_a_long_recording_does_not_end_a_workload(monkeypatch):
    monkeypatch.setattr(served, "MOST_FRAMES", 5)
    turns = tuple(Turn(f" {n}", max_new_tokens=3, ignore_eos=True) for n in range(4))
    workload = Workload("turns", "Four turns", (Session("one", turns),), kv_tokens=200)

    class Own(served.ServedDriver):
        def begin(self, settings, _):
            return super().begin(settings, workload)

    with serving(kind=Own) as (driver, _):
        wait(lambda: driver.run_now.number > 1)
        assert driver.run_now.number == 2 and driver.run_now.engine.steps >= 12


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--serve 70000", "a port is a number from 0 to 65535"),
        ("--serve 8321", "page and server need two ports"),
        ("--serve 0 --compare lru,lfu", "two engines run"),
        ("--serve 0 --replay run.jsonl", "nothing runs"),
        ("--serve 0 --export run.html", "a run that is over at once"),
        ("--serve 0 --connect tcp://h:5557", "--serve with --connect"),
        ("--api-key secret", "--api-key secret goes with --serve only"),
        ("--max-queue 3", "--max-queue 3 goes with --serve only"),
        ("--serve 0 --max-queue -1", "0 or more"),
        ("--serve 0 --api-key=", "--api-key"),
        ("--serve 0 --kv-tokens 0", "a pool of 0 tokens"),
        ("--serve 0 --workload nowhere", "nowhere"),
        ("--serve 0 --host nowhere.invalid", "nowhere.invalid"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("viz.live._serve_page", lambda *a, **k: pytest.fail("something was started"))
    try:
        code = main(arguments.split())
    except SystemExit as left:  # of the parser itself
        code = left.code
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and said in told


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (minirad_main, "serve"), (minirad_main, "route --workers 2"), (minirad_main, "bench serve"),
        (main, "--serve 0"), (main, "--workers 2"),
    ],
)  # fmt: skip
def test_without_the_extra_it_is_said_what_to_install(run, line, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(line.split()) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "needs starlette and uvicorn: pip install 'minirad[serve]'" in told


def test_limits_are_those_of_minirad_serve():
    line = "--serve 0 --max-queue 0 --max-body 9 --served-model-name x --api-key k"
    told = served.served_of(_parser().parse_args(line.split()))
    assert told == served.Served("x", "k", Limits(queue=0, body=9))


def test_it_is_said_that_anybody_can_ask(capsys, monkeypatch):
    monkeypatch.delenv("MINIRAD_API_KEY", raising=False)
    for arguments, said in (("", ""), ("--host 0.0.0.0", "no --api-key"), ("--host 0.0.0.0 --api-key k", "")):
        served.served_of(_parser().parse_args(["--serve", "0", *arguments.split()]))
        told = capsys.readouterr().out
        assert (said in told) and bool(told) == bool(said)


@pytest.mark.parametrize(
    ("arguments", "check"),
    [(["--serve", "0"], lambda options: asked.check_server(options)),
     (["--workers", "2"], lambda options: asked.check_workers(options, _parser()))],
)  # fmt: skip
def test_ranks_are_not_served_from_here(arguments, check):
    options = _parser().parse_args(arguments)
    options.tp = 2
    with pytest.raises(ValueError, match="with --tp"):
        check(options)


def test_a_taken_port_is_said_and_not_replaced(capsys):
    front = served.Front(0)
    try:
        assert main(["--serve", front.url.rpartition(":")[2], "--port", "0", "--no-open"]) == 2
    finally:
        front.stop()
    assert "cannot listen at 127.0.0.1" in capsys.readouterr().err


@pytest.mark.slow  # a process that imports all of it
def test_nothing_heavy_comes_without_it():
    """Who neither serves nor routes has no web server, no client and no metrics in the process."""
    heavy = ("starlette", "uvicorn", "httpx", "prometheus_client", "h11", "anyio")
    code = f"import sys, viz.live; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_page_without_a_server_has_no_word_of_it():
    assert "serving" not in Driver(NONE, 1.0).status()
