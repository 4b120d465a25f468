"""Workers that fail in every way, clients that go away: each request gets one answer, and nothing is held.

The workers are doubles (tests/server/route_double.py) and fail within milliseconds; at the end of this file
real servers are killed, stopped and continued.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from route_double import BEFORE, FINE, MIDDLE, PATIENT, QUICK, Doubles
from test_route import CLIENT, _posted, ask, body_of, events_of, get, is_whole, piece_of, until

import minirad
from minirad.observe.recording import Recording
from minirad.observe.route_events import RequestRouted, RouteFinished, WorkerChanged
from minirad.route.proxy import Limits
from minirad.route.router import Router
from minirad.route.workers import CannotStart, Worker


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Doubles, Router]]:
    """Three doubles behind a router; a test waits until all are well. However many tests kill one of them."""
    patience = replace(PATIENT, restarts=1000)
    with Doubles() as doubles, doubles.router(patience=patience) as router:
        yield doubles, router.start()


@pytest.fixture(scope="module")
def impatient() -> Iterator[tuple[Doubles, Router]]:
    """The same with a router that waits for a worker's next word no longer than machines stand still."""
    with Doubles() as doubles, doubles.router(limits=Limits(quiet=2.0)) as router:
        yield doubles, router.start()


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[tuple[Doubles, Router]]:
    hangs = "hang" in str(getattr(request.node, "callspec", ""))
    doubles, router = request.getfixturevalue("impatient" if hangs else "shared")
    until(lambda: all(is_present(doubles, worker) for worker in router.workers))
    yield doubles, router
    nothing_is_held(doubles, router)


def is_present(doubles: Doubles, worker: Worker) -> bool:
    """It is well, and not by what was known of a process that an earlier test ended a moment ago."""
    double = doubles.of(worker.rank)
    return worker.alive and double.code is None and worker.pid == double.pid


@pytest.fixture
def doubles() -> Iterator[Doubles]:
    with Doubles() as made:
        yield made


def nothing_is_held(doubles: Doubles, router: Router) -> None:
    """No request is in flight anywhere, and nobody waits for one."""
    until(lambda: router.proxy.in_flight == 0)
    until(lambda: [worker.load for worker in router.workers] == [0] * len(router.workers))
    assert [worker.queued_tokens for worker in router.workers] == [0] * len(router.workers)
    assert not any(worker.attempts for worker in router.workers)
    until(lambda: not any(double.busy for double in doubles.made))


def turn(router: Router) -> int:
    """The worker whose turn it is, of a router that goes round."""
    return router.policy._turn % len(router.workers)


# ------------------------------------------------------------------ a worker fails

# Who hangs is waited for: seconds in which nothing happens.
HANGS = ("hang", "hang-in")


def hangs_slow(ways: Iterable[str]) -> list[Any]:
    return [pytest.param(what, marks=pytest.mark.slow) if what in HANGS else what for what in ways]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", hangs_slow(BEFORE))
def test_a_worker_that_fails_before_any_output_costs_only_time(
    fleet: tuple[Doubles, Router], what: str, stream: bool
) -> None:
    _, router = fleet
    first, prompt = turn(router), [3, 4, 5]
    answer = ask(router, prompt, {str(first): what}, stream=stream)
    assert is_whole(answer, prompt, stream)
    assert answer.headers["x-minirad-worker"] != f"w{first}"


@pytest.mark.parametrize("what", hangs_slow(MIDDLE))
def test_an_answer_of_one_piece_is_never_torn(fleet: tuple[Doubles, Router], what: str) -> None:
    _, router = fleet
    answer = ask(router, [7, 8], {str(turn(router)): what})
    assert is_whole(answer, [7, 8], stream=False)


@pytest.mark.parametrize("what", MIDDLE)
def test_a_stream_that_breaks_ends_with_one_clear_error(fleet: tuple[Doubles, Router], what: str) -> None:
    doubles, router = fleet
    first = turn(router)
    answer = ask(router, [7, 8], {str(first): what}, stream=True)
    *pieces, last = events_of(answer)
    assert [piece["choices"][0]["text"] for piece in pieces] == [f"w{first}:15:0 ", f"w{first}:15:1 "]
    error = last["error"]
    assert error["type"] == "server_error"
    told = (
        "the engine broke" if what == "error-in" else f"w{first} failed after a part of the answer was sent"
    )
    assert told in error["message"]
    assert sum(bool(double.seen) and double.seen[-1]["prompt"] == [7, 8] for double in doubles.made) >= 1


def test_all_workers_are_tried_once_and_all_failures_are_named(fleet: tuple[Doubles, Router]) -> None:
    doubles, router = fleet
    for double in doubles.made:
        double.seen.clear()
    answer = ask(router, [1], {"0": "500", "1": "drop", "2": "429"}, stream=True)
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    message = answer.json()["error"]["message"]
    assert all(f"w{rank}: " in message for rank in range(3)) and "w0 says 500" in message
    assert sum(len(double.seen) for double in doubles.made) == 3


def test_one_that_is_full_is_passed_over_and_all_full_is_429(fleet: tuple[Doubles, Router]) -> None:
    _, router = fleet
    first = turn(router)
    assert is_whole(ask(router, [1], {str(first): "429"}), [1], stream=False)
    answer = ask(router, [1], {"*": "429"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["code"] == "queue_full"


def test_a_failure_is_never_a_reason_to_ask_twice(fleet: tuple[Doubles, Router]) -> None:
    """What came whole is not asked for again although the connection is then cut."""
    doubles, router = fleet
    before = sum(len(double.seen) for double in doubles.made)
    assert is_whole(ask(router, [9], {"*": "answer"}, stream=True), [9], stream=True)
    assert sum(len(double.seen) for double in doubles.made) == before + 1


# ------------------------------------------------------------------ a client goes away


@pytest.mark.parametrize("what", ["hang", "hang-in", "dribble"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_workers_request_is_cancelled_when_its_client_goes_away(
    doubles: Doubles, what: str, stream: bool
) -> None:
    if what == "dribble" and not stream:
        what = "hang-in"
    doubles.asked = asyncio.Semaphore(0)  # one that dribbles is not over before its client is gone
    with doubles.router(limits=Limits(quiet=1000.0)) as router:
        told: list[Any] = []
        router.start()
        router.listen(told.append)
        sent = _posted(router, body_of([1, 2], {"*": what}, stream=stream))
        until(lambda: doubles.of(0).busy == 1)
        if stream and what != "hang":
            assert sent.recv(1000)
        sent.close()
        until(lambda: doubles.of(0).dropped == 1)  # long before it would be given up for its silence
        nothing_is_held(doubles, router)
        assert [e.outcome for e in told if isinstance(e, RouteFinished)] == ["cancelled"]
        assert all(worker.alive and not worker.failed for worker in router.workers)


def test_a_client_that_does_not_read_is_not_waited_for(doubles: Doubles) -> None:
    with doubles.router(limits=Limits(stalled=0.3)) as router:
        router.start()
        sent = _posted(router, body_of([1], {"*": "flood"}, stream=True))
        sent.settimeout(60)
        until(lambda: doubles.of(0).seen)  # it may be cut off already
        nothing_is_held(doubles, router)
        size = 0
        with sent:  # the connection was cut: its end comes, and not all of the answer
            try:
                while part := sent.recv(1 << 20):
                    size += len(part)
            except ConnectionError:
                pass
        assert 0 < size < 15 << 20


# ------------------------------------------------------------------ a worker dies, hangs, comes back


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up_and_taken_back_empty(doubles: Doubles) -> None:
    told: list[Any] = []
    # So long that the others are not taken for dead where the machine stands still.
    patience = replace(QUICK, deadline=4.0, hung=60.0)
    with doubles.router(patience=patience, policy="cache-aware") as router:
        router.listen(told.append)
        router.start()
        prompt = list(range(30))
        assert ask(router, prompt).headers["x-minirad-worker"] == "w0"
        doubles.of(0).unflushable = 3
        doubles.of(0).freeze()
        answer = ask(router, prompt, stream=True)  # goes to w0, which holds it, and from there elsewhere
        assert is_whole(answer, prompt, stream=True) and answer.headers["x-minirad-worker"] != "w0"
        assert router.workers.all[0].state == "dead" and "/health" in router.workers.all[0].why
        assert ask(router, [5, 6]).status_code == 200
        doubles.of(0).thaw()
        until(lambda: router.workers.all[0].state == "back")
        assert doubles.of(0).flushed >= 3 and len([d for d in doubles.made if d.rank == 0]) == 1
        routed = [event for event in told if isinstance(event, RequestRouted)]
        assert routed[1].worker == 0 and routed[1].matches[0] == 30
        assert ask(router, prompt).status_code == 200
        last = [event for event in told if isinstance(event, RequestRouted)][-1]
        assert last.matches[0] == 0 and max(last.matches) == 30  # what w0 had is forgotten
        nothing_is_held(doubles, router)
    states = [event.state for event in told if isinstance(event, WorkerChanged) and event.worker == 0]
    assert states[:2] == ["starting", "ready"] and "back" in states
    assert states[states.index("dead") - 1] == "slow"  # and it may have been before


@pytest.mark.slow
def test_a_worker_that_hangs_for_long_is_started_again(doubles: Doubles) -> None:
    with doubles.router(workers=2, patience=replace(QUICK, hung=0.4)) as router:
        router.start()
        hung = doubles.of(1)
        hung.freeze()
        until(lambda: hung.code == -9)
        until(lambda: router.workers.all[1].alive and doubles.of(1) is not hung)
        assert router.workers.all[1].restarts == 1


def test_a_worker_that_is_late_is_slow_and_not_dead(doubles: Doubles) -> None:
    with doubles.router() as router:
        router.start()
        doubles.of(2).ill = 503
        until(lambda: router.workers.all[2].state == "slow")
        assert "503" in router.workers.all[2].why
        doubles.of(2).ill = 200
        until(lambda: router.workers.all[2].state == "ready")
        assert [worker.restarts for worker in router.workers] == [0, 0, 0]


def test_requests_in_flight_at_a_worker_that_dies_go_elsewhere(doubles: Doubles) -> None:
    with doubles.router() as router:
        router.start()
        answers: list[httpx.Response] = []
        plan = {"0": "hang"}
        threads = [
            threading.Thread(target=lambda n=n: answers.append(ask(router, [n], plan, stream=n % 2 == 0)))
            for n in range(9)
        ]
        for thread in threads:
            thread.start()
        until(lambda: doubles.of(0).busy == 3)
        doubles.of(0).kill()
        for thread in threads:
            thread.join(60)
        assert len(answers) == 9 and all(answer.status_code == 200 for answer in answers)
        nothing_is_held(doubles, router)


def test_when_all_are_dead_it_is_said_and_when_one_is_back_it_goes_on(doubles: Doubles) -> None:
    with doubles.router(patience=replace(QUICK, hung=60.0)) as router:
        router.start()
        for double in doubles.made[:3]:
            double.freeze()
        until(lambda: not any(worker.alive for worker in router.workers))
        answer = ask(router, [1])
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_worker"
        health = get(router, "/health")
        assert health.status_code == 503 and health.json()["alive"] == 0
        doubles.of(1).thaw()
        until(lambda: router.workers.all[1].alive)
        until(lambda: is_whole(ask(router, [1]), [1], stream=False))


def test_workers_that_fail_again_and_again_are_given_up_and_the_router_ends(doubles: Doubles) -> None:
    with doubles.router(workers=2) as router:
        router.start()
        doubles.unborn.update({0: 1, 1: 1})
        began = len(doubles.made)
        for double in doubles.made[:2]:
            double.kill(-11)
        with pytest.raises(CannotStart, match=r"no worker is left: w1 .*no memory left.* in a row"):
            assert router.wait(120)
        each = QUICK.restarts
        assert len(doubles.made) == began + 2 * each
        assert all(double.code is not None for double in doubles.made)


def test_the_others_go_on_while_one_cannot_come_back(doubles: Doubles) -> None:
    with doubles.router() as router:
        router.start()
        doubles.unborn[2] = 1
        doubles.of(2).kill()
        until(lambda: "given up" in router.workers.all[2].why)
        for number in range(4):
            assert is_whole(ask(router, [number]), [number], stream=False)
        assert not router.wait(0)


# ------------------------------------------------------------------ all of it at once


class Player:
    """A client that asks again and again, at times goes away, and judges each answer."""

    def __init__(self, router: Router, seed: int, requests: int) -> None:
        self.router, self.chance, self.requests = router, random.Random(seed), requests
        self.whole = self.errors = self.left = 0
        self.wrong: list[str] = []
        self.thread = threading.Thread(target=self._play)
        self.thread.start()

    def _play(self) -> None:
        for number in range(self.requests):
            try:
                self._one(number)
            except Exception as error:
                self.wrong.append(repr(error))

    def _one(self, number: int) -> None:
        chance = self.chance
        plan = {
            str(rank): chance.choice(BEFORE + MIDDLE + FINE[:3]) if chance.random() < 0.4 else "answer"
            for rank in range(3)
        }  # fmt: skip
        prompt, stream = [chance.randrange(50) for _ in range(4)], chance.random() < 0.6
        if chance.random() < 0.2:
            sent = _posted(self.router, body_of(prompt, plan, stream=stream))
            time.sleep(chance.random() * 0.05)
            sent.close()
            self.left += 1
            return
        answer = ask(self.router, prompt, plan, stream=stream)
        if is_whole(answer, prompt, stream):
            self.whole += 1
        elif is_one_error(answer, prompt):
            self.errors += 1
        else:
            self.wrong.append(f"{plan} {stream}: {answer.status_code} {answer.text[-300:]}")


def is_one_error(answer: httpx.Response, prompt: list[int]) -> bool:
    """An error in OpenAI's form, at once or at the end of a stream whose pieces are one worker's."""
    if answer.status_code in (429, 503):
        return bool(answer.json()["error"]["message"])
    if answer.status_code != 200 or not answer.headers["content-type"].startswith("text/event-stream"):
        return False
    *pieces, last = events_of(answer)
    rank = answer.headers["x-minirad-worker"]
    texts = [piece_of(piece) for piece in pieces]
    expected = [f"{rank}:{sum(prompt)}:{number} " for number in range(len(texts))]
    told = last["error"]["message"] if isinstance(last, dict) and "error" in last else ""
    return texts == expected and bool(texts) and bool(told)


def _harm(doubles: Doubles, seed: int, over: Callable[[], bool]) -> None:
    """Kills and freezes workers now and then."""
    chance = random.Random(seed)
    while not over():
        time.sleep(chance.random() * 0.3)
        victim = doubles.of(chance.randrange(3))
        kind = chance.randrange(4)
        if kind == 0:
            victim.kill(-9)
        elif kind == 1:
            victim.freeze()
        elif kind == 2:
            victim.ill = 503
        for other in list(doubles.made):
            if chance.random() < 0.5:
                other.ill = 200
                other.thaw()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_fails_each_request_gets_one_answer(doubles: Doubles, seed: int) -> None:
    told: list[Any] = []
    limits = Limits(quiet=0.8)
    patience = replace(QUICK, deadline=1.0, restarts=1000)
    policy = ("cache-aware", "least-loaded")[seed % 2]
    with doubles.router(limits=limits, policy=policy, patience=patience) as router:
        router.listen(told.append)
        router.start()
        players = [Player(router, 100 * seed + number, requests=8) for number in range(8)]
        _harm(doubles, seed, lambda: not any(player.thread.is_alive() for player in players))
        for player in players:
            player.thread.join(60)
            assert not player.thread.is_alive() and not player.wrong
        for double in list(doubles.made):
            double.thaw()
        nothing_is_held(doubles, router)
    assert sum(player.whole for player in players) > 0
    check_events(told)


def check_events(told: list[Any]) -> None:
    """Each attempt has an end, one after the other, each worker at most once, nothing after an answer."""
    attempts: dict[str, list[Any]] = {}
    for event in told:
        if isinstance(event, RequestRouted | RouteFinished):
            attempts.setdefault(event.request, []).append(event)
    for events in attempts.values():
        begun, ended = events[::2], events[1::2]
        assert all(isinstance(event, RequestRouted) for event in begun)
        assert all(isinstance(event, RouteFinished) for event in ended)
        assert [e.worker for e in begun] == [e.worker for e in ended]
        assert len({event.worker for event in begun}) == len(begun)
        assert all(event.outcome == "moved" for event in ended[:-1])


def test_the_judges_of_these_tests_see_what_is_wrong(fleet: tuple[Doubles, Router]) -> None:
    _, router = fleet
    answer = ask(router, [1, 2], stream=True)
    broken = ask(router, [1, 2], {"*": "short-in"}, stream=True)
    assert is_whole(answer, [1, 2], True) and not is_one_error(answer, [1, 2])
    assert is_one_error(broken, [1, 2]) and not is_whole(broken, [1, 2], True)
    assert not is_whole(answer, [1, 3], True) and not is_one_error(broken, [1, 3])
    end = "data: [DONE]\n\n"
    for text in (answer.text * 2, answer.text + broken.text, answer.text.replace(end, ""), broken.text + end):
        mixed = httpx.Response(200, headers=answer.headers, text=text)
        assert not is_whole(mixed, [1, 2], True) and not is_one_error(mixed, [1, 2])


# ------------------------------------------------------------------ real servers


class Command:
    """`python -m minirad route` as somebody runs it: two classroom Llamas behind one port."""

    def __init__(self, *options: str) -> None:
        words = [sys.executable, "-m", "minirad", "route", "--port", "0", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self.errors: list[str] = []
        for lines, kept in ((self.process.stdout, self.said), (self.process.stderr, self.errors)):
            threading.Thread(target=lambda lines=lines, kept=kept: kept.extend(lines), daemon=True).start()

    def ready(self) -> str:
        until(lambda: self.said or self.process.poll() is not None, seconds=240)
        assert self.said, self.errors
        return self.said[0].split()[2]

    def end(self, by: int) -> int:
        self.process.send_signal(by)
        return self.process.wait(60)


def rows(url: str) -> list[dict[str, Any]]:
    return list(CLIENT.get(f"{url}/workers").json()["workers"])


def is_running(pid: int) -> bool:
    """A process is there, and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def question(url: str, text: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}
    return CLIENT.post(f"{url}/v1/chat/completions", json=body)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="SIGSTOP, and processes looked up in /proc")


@pytest.mark.slow
@LINUX
def test_servers_are_killed_stopped_and_continued_under_requests(tmp_path: Path) -> None:
    file = tmp_path / "fleet.jsonl"
    router = Command("--workers", "2", "--health-seconds", "6", "--record", str(file), "--policy", "events")
    try:
        url = router.ready()
        text = "What is the capital of France?"
        said = question(url, text).json()["choices"][0]["message"]["content"]
        first = question(url, text)
        assert first.json()["choices"][0]["message"]["content"] == said
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
        rank = int(first.headers["x-minirad-worker"][1:])
        victim, other = rows(url)[rank]["pid"], rows(url)[1 - rank]["pid"]

        os.kill(victim, signal.SIGSTOP)  # the worker that holds it hangs: the other one answers
        moved = question(url, text)
        assert moved.json()["choices"][0]["message"]["content"] == said
        assert moved.headers["x-minirad-worker"] == f"w{1 - rank}"
        assert rows(url)[rank]["state"] == "dead" and rows(url)[rank]["holds_tokens"] == 0
        os.kill(victim, signal.SIGCONT)
        until(lambda: rows(url)[rank]["state"] == "back", seconds=60)
        assert rows(url)[rank]["pid"] == victim

        body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            broken = int(answer.headers["x-minirad-worker"][1:])
            os.kill(rows(url)[broken]["pid"], signal.SIGKILL)  # in the middle of a stream
            rest = [line for line in lines if line]
        assert "failed after a part of the answer" in rest[-1] and "[DONE]" not in rest[-1]
        assert question(url, text).json()["choices"][0]["message"]["content"] == said
        until(lambda: all(row["state"] in ("ready", "back") for row in rows(url)), seconds=240)
        assert rows(url)[broken]["restarts"] == 1
        left = [row["pid"] for row in rows(url)] + [victim, other]
        assert router.end(signal.SIGINT) == 0
        assert not any(map(is_running, left))
    finally:
        router.process.kill()
    recording = Recording.load(file)
    assert not recording.missing
    events = [event for frame in recording.frames for event in frame.events]
    states = {event.state for event in events if isinstance(event, WorkerChanged)}
    assert {"starting", "ready", "slow", "dead", "back"} <= states
    check_events(events)


@pytest.mark.slow
@LINUX
def test_no_server_outlives_a_router_that_is_killed() -> None:
    router = Command("--workers", "1")
    url = router.ready()
    pids = [row["pid"] for row in rows(url)]
    assert all(map(is_running, pids))
    assert router.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_servers_that_cannot_start_end_the_command_with_their_last_words(tmp_path: Path) -> None:
    folder = Path(minirad.__file__).parent / "model" / "classroom" / "weights"
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    router = Command("--workers", "2", "--model", str(tmp_path))
    assert router.process.wait(240) == 1
    until(lambda: router.errors and "cannot start" in router.errors[-1])
    assert "cannot be read" in router.errors[-1] and router.errors[-1].startswith("minirad route: w")
