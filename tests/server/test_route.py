"""The router in front of doubles: what passes, is refused, is told; then in front of real servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from route_double import EVENTS, PATIENT, Double, Doubles

from minirad.fleet.endpoints import free_ports, server_info
from minirad.fleet.follow import State, Trouble
from minirad.observe.recording import Recording
from minirad.observe.route_events import RequestRouted, RouteFinished, WorkerChanged
from minirad.route.command import add_arguments, settings_of
from minirad.route.proxy import Limits
from minirad.route.router import Router, Settings, engine_of
from minirad.route.workers import CannotStart, ServerProcess
from minirad.server.connections import Connection


@pytest.fixture
def doubles() -> Iterator[Doubles]:
    with Doubles() as made:
        yield made


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.005)


CLIENT = httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def body_of(prompt: list[int], plan: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "user": json.dumps(plan or {}), **more}


def ask(router: Router, prompt: list[int], plan: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return CLIENT.post(f"{router.url}/v1/completions", json=body_of(prompt, plan, **more))


def get(router: Router, path: str, **more: Any) -> httpx.Response:
    return CLIENT.get(router.url + path, **more)


def events_of(answer: httpx.Response | str) -> list[Any]:
    """What a stream says, event by event; "[DONE]" as it is."""
    text = answer if isinstance(answer, str) else answer.text
    assert text.endswith("\n\n")
    said = [each.removeprefix("data: ") for each in text.split("\n\n")[:-1]]
    return [each if each == "[DONE]" else json.loads(each) for each in said]


def text_of(rank: int, prompt: list[int]) -> str:
    return "".join(f"w{rank}:{sum(prompt)}:{number} " for number in range(EVENTS))


def is_whole(answer: httpx.Response, prompt: list[int], stream: bool) -> bool:
    """It is all of one worker's answer, and nothing else."""
    if answer.status_code != 200:
        return False
    rank = int(answer.headers["x-minirad-worker"][1:])
    if not stream:
        return bool(answer.json()["choices"][0]["text"] == text_of(rank, prompt))
    *pieces, end = events_of(answer)
    return end == "[DONE]" and "".join(map(piece_of, pieces)) == text_of(rank, prompt)


def piece_of(event: Any) -> str:
    """The text that an event of a stream brings; something that no worker says where it brings none."""
    choices = event.get("choices") if isinstance(event, dict) else None
    return str(choices[0]["text"]) if choices else repr(event)


# ------------------------------------------------------------------ what passes


def test_answers_pass_through_whole_and_as_a_stream(doubles: Doubles) -> None:
    with doubles.router() as router:
        router.start()
        for number in range(6):
            prompt = [1, 2, number]
            answer = ask(router, prompt, stream=bool(number % 2))
            assert is_whole(answer, prompt, bool(number % 2))
        assert [worker.routed for worker in router.workers] == [2, 2, 2]
        until(lambda: [worker.load for worker in router.workers] == [0, 0, 0])
        assert [worker.queued_tokens for worker in router.workers] == [0, 0, 0]


def test_what_was_cached_is_known_of_streams_too_and_not_shown_to_who_did_not_ask(doubles: Doubles) -> None:
    with doubles.router(workers=1) as router:
        router.start()
        text = '"usage":null, "choices":[] '
        shown = ask(router, [1, 2, 3, 4], stream=True, stop=text)
        assert "usage" not in shown.text and is_whole(shown, [1, 2, 3, 4], stream=True)
        assert doubles.of(0).seen[-1]["stop"] == text
        asked = ask(router, [1, 2, 3, 4], stream=True, stream_options={"include_usage": True})
        assert events_of(asked)[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert events_of(asked)[0]["usage"] is None
        until(lambda: [route["cached"] for route in router.routes] == [2, 2])


def test_each_event_passes_before_the_next_one_is_made(doubles: Doubles) -> None:
    doubles.asked = asyncio.Semaphore(0)
    with doubles.router(workers=1) as router:
        router.start()
        said = ""
        body = body_of([1], {"0": "dribble"}, stream=True)
        with CLIENT.stream("POST", f"{router.url}/v1/completions", json=body) as answer:
            for piece in answer.iter_text():  # a router that kept one back would wait here for ever
                for _ in range((said + piece).count("\n\n") - said.count("\n\n")):
                    doubles.ask_one_more()
                said += piece
        assert len(events_of(said)) == EVENTS + 2 and events_of(said)[-1] == "[DONE]"


def test_what_is_wrong_with_a_request_is_said_without_asking_a_worker(doubles: Doubles) -> None:
    with doubles.router(limits=Limits(body=1000)) as router:
        router.start()
        answer = ask(router, [1], temperature="hot", tools=[{}])
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "temperature" in error["message"] and "tools" in error["message"]
        large = ask(router, list(range(1000)))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
        url = f"{router.url}/v1/completions"
        pieces = (b" " * 100 for _ in range(20))  # its length is not said before
        kind = {"content-type": "application/json"}
        assert CLIENT.post(url, content=pieces, headers=kind).status_code == 413
        assert CLIENT.post(url, content=b"{", headers=kind).status_code == 400
        assert CLIENT.get(url).status_code == 405
        assert get(router, "/v2").status_code == 404
        assert not any(double.seen for double in doubles.made)


def test_a_body_that_does_not_come_is_not_waited_for(doubles: Doubles) -> None:
    with doubles.router(limits=Limits(body_seconds=0.3)) as router:
        router.start()
        with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port or 0)) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: 50\r\n\r\n{"
            )
            assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert not any(double.seen for double in doubles.made)


def test_refusals_of_a_worker_pass_through(doubles: Doubles) -> None:
    with doubles.router() as router:
        router.start()
        for stream in (False, True):
            answer = ask(router, [1], {"*": "404"}, stream=stream)
            assert answer.status_code == 404 and "says 404" in answer.json()["error"]["message"]
        assert sum(len(double.seen) for double in doubles.made) == 2  # nobody else was asked


def test_no_more_requests_are_taken_than_may_be_in_flight(doubles: Doubles) -> None:
    limits = Limits(requests=2, quiet=30.0)
    with doubles.router(limits=limits) as router:
        router.start()
        bodies = [body_of([1], {"*": "hang"}, stream=True)] * 2
        sockets = [_posted(router, body) for body in bodies]
        until(lambda: router.proxy.in_flight == 2)
        answer = ask(router, [1])
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for each in sockets:
            each.close()
        until(lambda: router.proxy.in_flight == 0)
        assert ask(router, [1]).status_code == 200


def _posted(router: Router, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent, and nothing is read."""
    data = json.dumps(body).encode()
    sent = socket.create_connection(("127.0.0.1", httpx.URL(router.url).port or 0))
    sent.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        + f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return sent


def test_the_key_is_asked_for_and_passed_on(doubles: Doubles) -> None:
    with doubles.router(key="sesame!") as router:
        router.start()
        assert ask(router, [1]).status_code == 401
        wrong = {"authorization": "Bearer sesame"}
        for path in ("/workers", "/v1/models", "/server_info"):
            assert get(router, path).status_code == get(router, path, headers=wrong).status_code == 401
        assert get(router, "/health").status_code == 200
        right = {"authorization": "Bearer sesame!"}
        url = f"{router.url}/v1/completions"
        answer = CLIENT.post(url, json=body_of([1]), headers=right)
        assert answer.status_code == 200
        assert get(router, "/workers", headers=right).status_code == 200
        keys = {key for double in doubles.made for key in double.keys}
        assert keys == {"bearer sesame!"}


# ------------------------------------------------------------------ what is told


def test_what_the_router_says_of_itself(doubles: Doubles) -> None:
    with doubles.router() as router:
        assert Settings(engine=["--page-size", "4"]).engine
        router.start()
        ask(router, [1, 2, 3, 4], {"0": "500"})
        assert get(router, "/health").json() == {"status": "ok", "alive": 3, "workers": 3}
        assert get(router, "/v1/models").json()["data"][0]["id"] == "double"
        until(lambda: router.proxy.in_flight == 0)
        told = get(router, "/workers").json()
        assert [row["state"] for row in told["workers"]] == ["ready"] * 3
        assert [route["outcome"] for route in told["routes"]] == ["moved", "finished"]
        assert told["routes"][1]["cached"] == 2 and "turn" in told["routes"][1]["reason"]
        text = get(router, "/metrics").text
        for line in (
            'minirad_route_answers_total{status="200"} 1.0', 'minirad_route_retries_total{worker="w0"} 1.0',
            'minirad_route_worker_state{state="ready",worker="w2"} 1.0',
            'minirad_route_cached_tokens_total{worker="w1"} 2.0',
        ):  # fmt: skip
            assert line in text
        assert CLIENT.post(router.url + "/flush_cache").json() == {
            "w0": 200,
            "w1": 200,
            "w2": 200,
        }
        with pytest.raises(ValueError, match="publishes no KV events"):
            server_info(router.url)


def test_events_tell_each_request_to_its_end(doubles: Doubles) -> None:
    told: list[Any] = []
    with doubles.router() as router:
        router.listen(told.append)
        end = router.listen(lambda event: 1 / 0)  # a page's mistake
        router.start()
        ask(router, [1, 2, 3], {"0": "die", "1": "429"})
        until(lambda: router.workers.all[0].restarts == 1 and router.workers.all[0].alive)
        end()
    requests = [event for event in told if not isinstance(event, WorkerChanged)]
    names = [(type(event).__name__, event.request, event.worker) for event in requests]
    assert names == [(kind, "R1", w) for w in range(3) for kind in ("RequestRouted", "RouteFinished")]
    outcomes = [event.outcome for event in requests if isinstance(event, RouteFinished)]
    assert outcomes == ["moved", "moved", "finished"]
    states = [event.state for event in told if isinstance(event, WorkerChanged) and event.worker == 0]
    assert states[:5] == ["starting", "ready", "dead", "starting", "ready"]


@pytest.mark.parametrize("policy", ["cache-aware", "events"])
def test_stream_and_routes_are_one_recording(doubles: Doubles, tmp_path: Path, policy: str) -> None:
    """Of workers with KV events: prefixes stay where they are, regret is known, a dead worker's tree goes."""
    file = tmp_path / "fleet.jsonl"
    told: list[Any] = []
    with doubles.router(follow=True, record=file, policy=policy) as router:
        router.listen(told.append)
        router.start()
        found = server_info(router.url)
        assert found.endpoints == router.endpoints and found.replays == router.replays
        first, second = list(range(100, 140)), list(range(200, 240))
        ask(router, first)
        until(lambda: router.trees[0].tokens == 40)
        ask(router, second)
        until(lambda: router.trees[1].tokens == 40)
        assert [ask(router, [*first, n]).headers["x-minirad-worker"] for n in range(3)] == ["w0"] * 3
        assert ask(router, [*second, 5]).headers["x-minirad-worker"] == "w1"
        until(lambda: router.trees[0].tokens == 43)  # nothing of w0 is on its way when it dies
        doubles.of(0).kill()
        until(lambda: router.workers.all[0].restarts == 1)  # how long it is dead, nobody may have looked
        assert router.trees[0].tokens == 0 and router.trees[1].tokens > 0
        until(lambda: all(worker.alive for worker in router.workers))
        assert ask(router, [*first, 7], {"2": "500"}).headers["x-minirad-worker"] in ("w0", "w1")
        until(lambda: any(tree.match(_ids(first)) == 40 for tree in router.trees))
    routed = [event for event in told if isinstance(event, RequestRouted)]
    assert routed[2].matches[0] == 40 and (routed[2].best, routed[2].regret) == (40, 0)
    recording = Recording.load(file)
    events = [event for frame in recording.frames for event in frame.events]
    assert [
        event for event in events if isinstance(event, RequestRouted | RouteFinished | WorkerChanged)
    ] == told
    state = recording.state(len(recording.frames) - 1)
    assert [worker["requests"] for worker in state["tree"]["workers"]] == [w.routed for w in router.workers]
    assert {row["rank"] for row in state["tree"]["ranks"]} == {0, 1, 2}


def _ids(tokens: list[int]) -> Any:
    import numpy as np

    return np.array(tokens, dtype=np.int64)


# ------------------------------------------------------------------ how it begins and ends


def test_settings_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for settings, said in (
        ({"workers": 0}, "workers"), ({"workers": 65}, "64"), ({"policy": "best"}, "'best'"),
        ({"kv_port": 65534}, "65534"), ({"key": "a\nb"}, "API key"),
        ({"follow": False, "policy": "events"}, "KV events"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Settings(**settings)
    for options, said in (
        (["--page-sise", "4"], "--page-sise"), (["--page-size", "0"], "page_size"),
        (["--kv-tokens"], "kv-tokens"),
        (["--model", "nowhere/at/all/x"], "nowhere"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Router(Settings(engine=options))
    assert engine_of(["--page-size", "4"]).page_size == 4
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="listen"):
        Router(Settings(port=taken.getsockname()[1])).start()


def test_a_worker_that_cannot_start_ends_the_router_with_its_last_words(doubles: Doubles) -> None:
    doubles.unborn[1] = 3
    router = doubles.router()
    with pytest.raises(CannotStart, match="w1 cannot start: its process ended with code 3: no memory left"):
        router.start()
    until(lambda: all(double.code is not None for double in doubles.made))
    with pytest.raises(httpx.ConnectError):
        get(router, "/health")


@pytest.mark.slow
def test_the_end_lets_requests_finish_and_tells_the_others(doubles: Doubles) -> None:
    doubles.asked = asyncio.Semaphore(0)  # the one that can finish does so once the router is ending
    router = doubles.router(limits=Limits(quiet=30.0)).start()
    hung = [_posted(router, body_of([1], {"*": what}, stream=True)) for what in ("hang", "hang-in")]
    soon = _posted(router, body_of([1], {"*": "dribble"}, stream=True))
    until(lambda: sum(double.busy for double in doubles.made) == 3)
    router.end_soon()
    until(lambda: router.proxy.closing)
    for _ in range(EVENTS):
        doubles.ask_one_more()
    router.stop()
    without, within, whole = (_read(each) for each in (*hung, soon))
    assert without.startswith("HTTP/1.1 503") and "the router is ending" in without
    assert within.startswith("HTTP/1.1 200") and within.count('"error"') == 1 and "DONE" not in within
    assert '"the router is ending, after a part of the answer was sent"' in within  # and no worker failed
    assert '"code":"ending"' in within
    assert "[DONE]" in whole and "error" not in whole
    until(lambda: all(double.code is not None for double in doubles.made))
    router.stop()
    assert router.wait(0)


def _read(sent: socket.socket) -> str:
    with sent:
        sent.settimeout(10)
        data = b""
        while part := sent.recv(1 << 16):
            data += part
    return data.decode()


def test_workers_are_asked_to_end_before_they_are_ended(doubles: Doubles) -> None:
    """They may hold what is to be written: a recording, the blocks of a disk tier."""
    with doubles.router() as router:
        router.start()
    until(lambda: None not in [double.code for double in doubles.made])
    assert [double.code for double in doubles.made] == [0, 0, 0]


def test_workers_that_write_to_a_disk_have_the_time_for_it() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for words, grace in (([], 4.0), (["--disk-dir", "kv", "--host-kv-tokens", "64"], 26.0)):
        assert settings_of(parser.parse_args(words)).patience.grace == grace


def test_workers_that_do_not_end_are_ended(doubles: Doubles) -> None:
    doubles.stubborn = True
    router = doubles.router().start()
    router.stop()
    until(lambda: [double.code for double in doubles.made] == [-9, -9, -9])


def test_ports_in_a_row_are_free() -> None:
    first = free_ports(5)
    for port in range(first, first + 5):
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_double_is_a_worker() -> None:
    """What the tests rest on: a double answers as our servers do, where anybody looks."""
    double = Double.__new__(Double)
    double.rank = 1
    reply = double.reply({"prompt": [1, 2]})
    assert reply["choices"][0]["text"] == text_of(1, [1, 2])
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


def test_head_and_body_of_an_answer_do_not_wait_for_each_other(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without TCP_NODELAY each answer on a connection that is kept takes 40 ms, also on an idle machine."""
    delays: list[int] = []

    def data_received(self: Connection, data: bytes, usual: Any = Connection.data_received) -> None:
        opened = self.transport.get_extra_info("socket")
        delays.append(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        usual(self, data)

    monkeypatch.setattr(Connection, "data_received", data_received)
    with doubles.router(workers=1) as router:
        router.start()
        assert get(router, "/health").status_code == 200
    assert delays and all(delays)


def test_a_worker_without_work_is_not_called_silent() -> None:
    """Its health is asked for; that it stores nothing just now says nothing of it. All else is told."""
    router = Router(Settings(workers=2))
    told = [State(0, "live"), State(0, "silent"), State(1, "live"), State(0, "live"), State(0, "lost")]
    told += [State(0, "live"), State(1, "silent"), State(1, "lost"), State(1, "live")]
    kept = [(each.rank, each.state) for each in told if not router._is_idle(each)]
    assert kept == [(0, "live"), (1, "live"), (0, "lost"), (0, "live"), (1, "lost"), (1, "live")]
    late = Trouble(1, "nothing has answered so far")
    for state, is_idle in (("starting", True), ("dead", True), ("ready", False), ("slow", False)):
        router.workers.all[1].state = state
        assert router._is_idle(late) is is_idle


def test_what_all_workers_say_is_passed_on_once(capfd: pytest.CaptureFixture[str]) -> None:
    told: dict[str, str] = {}
    code = "import sys; sys.stderr.write('the same\\nthe same\\nof {}\\n')"
    for name in ("w0", "w1"):
        ended = threading.Event()
        process = ServerProcess(name, [sys.executable, "-S", "-c", code.format(name)], ended.set, {}, told)
        assert ended.wait(20)
        for reader in process._readers:  # all was passed on
            reader.join(20)
        assert process.last_words() == f"of {name}"
    said = capfd.readouterr().err.splitlines()
    assert said == ["w0: the same", "w0: the same", "w0: of w0", "w1: of w1"]


def test_what_a_worker_said_before_it_served_is_not_why_it_ended(tmp_path: Path) -> None:
    """Two threads read what it says: it serves, or ends, once the one of its notes has read them."""
    code = """if 1:
        import os, sys, time
        print("a note", file=sys.stderr, flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        {}
        print("at http://a:1")
    """
    for number, (then, last) in enumerate((("pass", ""), ("sys.exit(3)", "a note"))):
        ended, read = threading.Event(), tmp_path / str(number)
        process = ServerProcess(
            "w0", [sys.executable, "-S", "-c", code.format(then), str(read)], ended.set, {}
        )
        until(lambda process=process: process.last_words() == "a note")
        read.touch()
        assert ended.wait(20)
        for reader in process._readers:
            reader.join(20)
        assert process.last_words() == last


def test_no_more_workers_start_at_once_than_there_are_processors(
    doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others follow as those are ready; one that does not come up is not waited for for ever."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    at_once: list[int] = []

    def launch(rank: int, ended: Callable[[], None]) -> Double:
        at_once.append(len(doubles.made) + 1 - sum(worker.alive for worker in router.workers))
        double = doubles.launch(rank, ended)
        double.url = "" if hangs and rank in (0, 1) else double.url
        return double

    for hangs, ready in ((False, 5), (True, 3)):
        doubles.made.clear()
        patience = replace(PATIENT, turn=0.2 if hangs else 60.0)
        with doubles.router(workers=5, patience=patience, launch=launch) as router:
            router.start(wait=False)
            until(lambda router=router, ready=ready: sum(each.alive for each in router.workers) == ready)
            assert hangs or max(at_once) <= 2
