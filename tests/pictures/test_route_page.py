"""The page of workers behind a router: where requests went and why, from recordings and with doubles."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
from test_live import Client, wait
from tokenizers import Tokenizer

from lessons.grading.router import add_policy
from lessons.grading.spec import find_folder
from minirad import workloads
from minirad.fleet import wire
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered
from minirad.fleet.follow import State as RankState
from minirad.observe.recorder import Recorder
from minirad.observe.route_events import RequestRouted, RouteFinished, WorkerChanged
from minirad.route.oracle import Oracle
from minirad.route.policies import POLICIES, RouteOptions, WorkerView, make_policy
from minirad.route.trees import SentTree
from minirad.route.workers import Patience
from minirad.workloads import Session, Turn, Workload
from viz.live import Live, Replay, main
from viz.live import _parser as parser_of
from viz.trace import Trace, ids_as_text
from viz.view.routes import Followed, Limits, PolicySum
from viz.web import routed
from viz.web.fleet import FleetPage
from viz.words import local_folder

OPTIONS = RouteOptions(match_threshold=0.5, balance_abs=2, balance_rel=1.5)
NOTES = {
    "title": "four workers",
    "route": {name: getattr(OPTIONS, name) for name in ("match_threshold", "balance_abs", "balance_rel")},
}


def blocks(tokens, size=4):
    """A prompt as a worker stores it."""
    hashes, parent = [], None
    for at in range(0, len(tokens), size):
        parent = hash((parent, *tokens[at : at + size])) % (1 << 60)
        hashes.append(parent)
    parts = tuple(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size))
    return wire.Stored(tuple(hashes), None, parts, size, "GPU", False, ())


class Fleet:
    """Workers made by hand: a policy chooses, an oracle judges, a flight records; time is a number."""

    def __init__(self, policy="cache-aware", workers=4, path=None, notes=NOTES):
        where = [f"tcp://127.0.0.1:{25557 + rank}" for rank in range(workers)]
        self.flight = Flight(where, block_size=4, path=path, notes=notes)
        self.policy = make_policy(policy, OPTIONS)
        self.true = [SentTree(page_size=4) for _ in range(workers)]
        self.load, self.batches, self.now, self.open = [0] * workers, [0] * workers, 0.0, []
        self.states = ["starting"] * workers
        self.requests = 0
        for worker in range(workers):
            self.note(WorkerChanged(worker, "starting", ""))
        for worker in range(workers):
            self.change(worker, "ready", f"at http://127.0.0.1:{30000 + worker}")
            self.flight.take(RankState(worker, "live"), self.now)

    def note(self, event):
        self.now += 0.2
        self.flight.note(event, self.now)

    def change(self, worker, state, why=""):
        self.states[worker] = state
        self.note(WorkerChanged(worker, state, why))

    def use(self, policy):
        self.policy = make_policy(policy, OPTIONS)

    def send(self, tokens, name=None):
        views = [
            WorkerView(f"w{at}", state in ("ready", "slow", "back"), self.load[at])
            for at, state in enumerate(self.states)
        ]
        choice = self.policy.choose(tokens, views)
        judged = Oracle(self.true).judge(tokens, [view.alive for view in views], choice.worker)
        self.policy.sent(choice.worker, tokens)
        if name is None:
            self.requests += 1
            name = f"R{self.requests}"
        self.note(RequestRouted(
            name, choice.worker, self.policy.name, choice.reason, choice.matches, choice.loads, judged.best,
            judged.regret, len(tokens),
        ))  # fmt: skip
        self.load[choice.worker] += 1
        self.open.append((name, choice.worker, tokens))
        return choice.worker

    def answer(self, nth=0, outcome="finished"):
        name, worker, tokens = self.open.pop(nth)
        cached = self.true[worker].match(tokens) if outcome == "finished" else 0
        if outcome == "finished":
            self.true[worker].add(tokens)
            batch = wire.Batch(1e9 + self.now, (blocks(list(tokens)),), worker)
            self.flight.take(Delivered(worker, self.batches[worker], batch, False), self.now)
            self.batches[worker] += 1
        self.load[worker] -= 1
        self.note(RouteFinished(name, worker, cached, len(tokens), outcome))


def document(number, length=24):
    """The tokens of one of several texts that prompts begin with."""
    return list(range(1000 * number, 1000 * number + length))


def story(requests=24, **more):
    """Requests about five texts, two policies, a worker that dies and comes back."""
    fleet, chance = Fleet(**more), random.Random(1)
    for number in range(requests):
        if number == requests // 2:
            fleet.use("round-robin")
        prompt = document(chance.randrange(5)) + [90_000 + 4 * number + at for at in range(4)]
        fleet.send(prompt)
        if number == requests // 3:
            name, worker, tokens = fleet.open[-1]
            fleet.change(worker, "dead", "its process was ended by SIGKILL")
            fleet.policy.forget(worker)
            fleet.answer(-1, "moved")
            fleet.send(tokens, name)
        if number == requests - 4:
            fleet.change(fleet.states.index("dead"), "back", "it answers again, and its cache is empty")
        while len(fleet.open) > 3:
            fleet.answer(chance.randrange(3))
    fleet.answer(0)
    fleet.flight.tick(fleet.now + 1)
    return fleet


@pytest.fixture(scope="module")
def page():
    return FleetPage(Trace(story().flight.recording, ids_as_text))


def positions(page, granularity="step"):
    """What the page shows at every position, but for the picture of the tree."""
    with mock.patch("viz.draw.tree.tree_svg", return_value=""):
        return [page.view(granularity, at) for at in range(page.trace.count(granularity))]


# ---------------------------------------------------------------------- a position


def test_each_request_says_what_the_router_saw(page):
    last = positions(page)[-1]["routes"]["last"]
    assert [row["id"] for row in last[:3]] == ["R24", "R23", "R22"]
    routed = [e for f in page.trace.recording.frames for e in f.events if isinstance(e, RequestRouted)]
    for row, event in zip(last, reversed(routed), strict=False):
        told = (row["worker"], row["reason"], row["matches"], row["loads"])
        assert told == (event.worker, event.reason, list(event.matches), list(event.loads))
        assert row["best"] >= event.best and row["regret"] <= event.regret
        if row["outcome"] != "finished":
            assert (row["best"], row["regret"]) == (event.best, event.regret)
        elif event.best >= row["cached"]:
            assert row["best"] == event.best
        assert max(row["matches"]) <= row["tokens"] and len(row["loads"]) == 4


def test_thresholds_are_drawn_where_they_decide(page):
    views = positions(page)
    rows = views[-1]["routes"]["last"]
    died = {}  # by request, who was dead when it was sent
    for view in views:
        for row in view["routes"]["last"][:1]:
            dead = [each["name"] for each in view["routes"]["workers"] if each["state"] == "dead"]
            died.setdefault(row["id"], dead)
    aware = [row for row in rows if row["policy"] == "cache-aware"]
    assert aware and all(row["match_limit"] == 14 for row in aware)  # half of 28 tokens
    for row in aware:
        seen = [load for at, load in enumerate(row["loads"]) if f"w{at}" not in died[row["id"]]]
        low, high = min(seen), max(seen)
        out_of_balance = high - low > OPTIONS.balance_abs and high > OPTIONS.balance_rel * low
        assert (high > row["load_limit"]) == out_of_balance
        assert out_of_balance == ("differ by more" in row["reason"])
        held = re.match(r"w\d holds", row["reason"]) is not None
        assert held == (max(row["matches"]) > row["match_limit"] and not out_of_balance)
    turns = [row for row in rows if row["policy"] == "round-robin"]
    assert turns and all(row["match_limit"] is row["load_limit"] is None for row in turns)


def test_sums_are_those_of_the_events_so_far(page):
    """At every position, forwards and backwards: counted anew from all events up to it."""
    for granularity in ("step", "event"):
        views = positions(page, granularity)
        events = []
        for at, view in reversed(list(enumerate(views))):
            frames = page.trace.recording.frames
            if granularity == "step":
                events = [event for frame in frames[:at] for event in frame.events]
            else:
                events = [event for frame in frames for event in frame.events][:at]
            expected = counted(events)
            assert {row["policy"]: row for row in view["routes"]["sums"]} == expected


def counted(events):
    """The sums by policy, in the plain way."""
    routed = [event for event in events if isinstance(event, RequestRouted)]
    workers = len({event.worker for event in events if isinstance(event, WorkerChanged)})
    found = {}
    for policy in dict.fromkeys(event.policy for event in routed):
        mine = {(event.request, event.worker) for event in routed if event.policy == policy}
        ends = [e for e in events if isinstance(e, RouteFinished) and (e.request, e.worker) in mine]
        done = [event for event in ends if event.outcome == "finished"]
        got = {(event.request, event.worker): event.cached for event in done}
        computed = {}
        for event in done:
            computed[event.worker] = computed.get(event.worker, 0) + event.tokens - event.cached
        total = sum(computed.values())
        found[policy] = {
            "policy": policy, "tries": len(mine), "tokens": sum(e.tokens for e in done),
            "cached": sum(e.cached for e in done), "moved": sum(e.outcome == "moved" for e in ends),
            "failed": sum(e.outcome in ("cancelled", "failed") for e in ends),
            "regret": sum(
                min(event.regret, max(event.best - got.get((event.request, event.worker), 0), 0))
                for event in routed
                if event.policy == policy
            ),
            "balance": round(max(computed.values()) * workers / total, 3) if total else None,
        }  # fmt: skip
    return found


def test_a_try_that_moved_is_no_request_without_an_answer():
    """It was counted as one, though another worker had answered it."""
    fleet = Fleet(workers=2)
    for worker, outcome in ((0, "moved"), (1, "finished")):
        fleet.note(RequestRouted("R1", worker, "round-robin", "its turn", (0, 0), (0, 0), 0, 0, 152))
        fleet.note(RouteFinished("R1", worker, 0, 152, outcome))
    for name, outcome in (("R2", "failed"), ("R3", "cancelled")):
        fleet.note(RequestRouted(name, 0, "round-robin", "its turn", (0, 0), (0, 0), 0, 0, 152))
        fleet.note(RouteFinished(name, 0, 0, 152, outcome))
    fleet.flight.tick(fleet.now + 1)
    page = FleetPage(Trace(fleet.flight.recording, ids_as_text))
    view = page.view("step", len(page.trace))
    (row,) = view["routes"]["sums"]
    assert (row["tries"], row["moved"], row["failed"]) == (4, 1, 2)


def test_cache_aware_regrets_less_than_taking_turns(page):
    sums = {row["policy"]: row for row in positions(page)[-1]["routes"]["sums"]}
    assert sums["cache-aware"]["regret"] < sums["round-robin"]["regret"]


def test_workers_come_up_die_and_come_back(page):
    views = positions(page)
    states = [[worker["state"] for worker in view["routes"]["workers"]] for view in views]
    assert states[0] == [] and states[1] == ["starting"] and states[4] == ["starting"] * 4
    assert states[-1].count("back") == 1 and ["ready"] * 4 in states
    dead = next(view for view, each in zip(views, states, strict=True) if "dead" in each)
    name = next(w["name"] for w in dead["routes"]["workers"] if w["state"] == "dead")
    assert dead["fleet"]["wrong"] == f"{name} is dead: its process was ended by SIGKILL"
    assert views[1]["fleet"]["wrong"] == views[-1]["fleet"]["wrong"] == ""  # to start is nothing wrong
    moved = [row for row in views[-1]["routes"]["last"] if row["outcome"] == "moved"]
    assert len(moved) == 1
    again = [row for row in views[-1]["routes"]["last"] if row["id"] == moved[0]["id"]]
    assert [row["worker"] for row in again][1] == moved[0]["worker"] != again[0]["worker"]
    for view in views[8:]:
        loads = [worker["load"] for worker in view["routes"]["workers"]]
        sent = [worker["requests"] for worker in view["routes"]["workers"]]
        assert all(0 <= load <= count for load, count in zip(loads, sent, strict=True))


def test_one_worker_alone_is_shown_with_the_routes(page):
    alone = page.view("step", page.trace.count("step") - 1, rank=1)
    assert alone["rank"] == 1 and len(alone["routes"]["workers"]) == 4 and "failed" not in alone
    frames = page.trace.recording.frames
    at = next(
        at
        for at, f in enumerate(frames)
        if any(isinstance(e, RequestRouted) and e.worker == 1 for e in f.events)
    )
    assert any(row["tag"] == "route" for row in page.view("step", at + 1, rank=1)["events"])
    assert not any(row["tag"] == "route" for row in page.view("step", at + 1, rank=0)["events"])
    place = page.trace.position_of("event", at)
    assert page.view("event", place, rank=3)["say"] == "Nothing of rank 3 changed here"


def test_a_stream_without_a_router_has_none_of_it():
    flight = Flight(["tcp://127.0.0.1:25557"], block_size=4)
    flight.take(RankState(0, "live"), 1.0)
    flight.take(Delivered(0, 0, wire.Batch(1e9, (blocks(document(1)),), 0), False), 2.0)
    flight.tick(9.0)
    page = FleetPage(Trace(flight.recording, ids_as_text))
    assert page.meta()["fleet"]["routed"] is False
    assert "routes" not in page.view("step", len(page.trace)) and len(page.trace) > 0


@pytest.mark.parametrize(
    ("sent", "found", "outcome", "best", "regret"),
    [
        ((141, 130), 151, "finished", 151, 0),  # it came between the sending and the admission
        ((141, 130), 50, "finished", 141, 91),
        ((141, 130), 11, "finished", 141, 130),
        ((152, 0), 151, "finished", 152, 0),  # the last token is always computed
        ((141, 130), 0, "failed", 141, 130),
        ((None, None), 151, "finished", None, None),
    ],
)
def test_what_the_chosen_worker_found_is_not_regretted(sent, found, outcome, best, regret):
    """The oracle looks when a request is sent; when it is admitted, its worker may hold more than any did."""
    fleet = Fleet(workers=2)
    fleet.note(RequestRouted("R1", 1, "round-robin", "its turn", (0, 11), (0, 3), *sent, 152))
    fleet.flight.tick(fleet.now + 1)
    before = len(fleet.flight.recording)
    fleet.note(RouteFinished("R1", 1, found, 152, outcome))
    fleet.flight.tick(fleet.now + 2)
    page = FleetPage(Trace(fleet.flight.recording, ids_as_text))
    for index, wanted in ((before, sent), (len(page.trace), (best, regret)), (before, sent)):
        routes = page.view("step", index)["routes"]
        assert (routes["last"][0]["best"], routes["last"][0]["regret"]) == wanted
        assert routes["sums"][0]["regret"] == wanted[1]
    fleet.flight.recording.check()  # what was told, and recorded before, stays as it was


def test_an_oracle_that_knows_nothing_is_no_regret_of_zero():
    fleet = Fleet(workers=2)
    fleet.note(RequestRouted("R1", 0, "random", "drawn", (0, 0), (0, 0), None, None, 7))
    fleet.flight.tick(99.0)
    page = FleetPage(Trace(fleet.flight.recording, ids_as_text))
    routes = page.view("step", len(page.trace))["routes"]
    assert routes["last"][0]["regret"] is routes["last"][0]["best"] is routes["sums"][0]["regret"] is None


@pytest.mark.parametrize(
    "notes",
    [None, {}, {"route": 3}, {"route": {"match_threshold": 0.5}},
     {"route": {"match_threshold": "x", "balance_abs": 1, "balance_rel": 1}},
     {"route": {"match_threshold": float("nan"), "balance_abs": 1, "balance_rel": 1}},
     {"route": {"match_threshold": 1e300, "balance_abs": 1, "balance_rel": 1}}],
)  # fmt: skip
def test_notes_that_say_no_thresholds_leave_them_out(notes):
    assert Limits.of(notes) is None
    fleet = Fleet(workers=2, notes=notes if isinstance(notes, dict) else None)
    fleet.send(document(1))
    fleet.flight.tick(99.0)
    page = FleetPage(Trace(fleet.flight.recording, ids_as_text))
    (row,) = page.view("step", len(page.trace))["routes"]["last"]
    assert row["match_limit"] is row["load_limit"] is None


def test_thresholds():
    limits = Limits(0.5, 4, 1.5)
    assert limits.match(30) == 15 and limits.load((2, 3, 9)) == 6 and limits.load((20, 31)) == 30


def test_texts_from_a_file_are_shortened():
    fleet = Fleet(workers=2)
    fleet.note(RequestRouted("R" * 300, 0, "p" * 300, "\u202e<b>" + "x" * 1900, (0, 0), (0, 0), 0, 0, 7))
    fleet.flight.tick(99.0)
    page = FleetPage(Trace(fleet.flight.recording, ids_as_text))
    row = page.view("step", len(page.trace))["routes"]["last"][0]
    assert len(row["id"]) <= 41 and len(row["policy"]) <= 41 and len(row["reason"]) < 500
    assert "\u202e" not in row["reason"]


def test_sums_do_not_count_what_was_sent_before():
    """A recording that begins in the midst of it (the second file of a flight)."""
    followed = Followed(Fleet(workers=2).flight.recording.state(1))
    event = RouteFinished("R1", 0, 3, 7, "finished")
    followed.take([event])
    assert followed.sums({}, [event]) == {} and followed.load_limit("R1", 0) is None
    assert PolicySum().balance(4) is None and PolicySum(computed=(6, 2)).balance(4) == 3.0


# ---------------------------------------------------------------------- files


def test_a_recording_is_shown_again_and_exported(tmp_path, monkeypatch):
    fleet = story(requests=6, workers=2, path=tmp_path / "fleet.jsonl")
    fleet.flight.close()
    shown = positions(FleetPage(Trace(fleet.flight.recording, ids_as_text)))
    replay = Replay(Recorder.load(tmp_path / "fleet.jsonl"), "fleet.jsonl")
    assert replay.page.meta()["fleet"]["routed"] is True
    assert [view["routes"] for view in positions(replay.page)] == [view["routes"] for view in shown]
    monkeypatch.chdir(tmp_path)
    assert main(["--replay", "fleet.jsonl", "--export", "fleet.html"]) == 0
    text = (tmp_path / "fleet.html").read_text(encoding="utf-8")
    assert "function makeRoutes(" in text and "import {" not in text
    data = json.loads(gzip.decompress(base64.b64decode(re.search(r'id="recording">([^<]+)<', text)[1])))
    assert data["meta"]["fleet"]["routed"] is True
    assert data["views"]["step"][str(len(shown) - 1)]["routes"] == shown[-1]["routes"]


# ---------------------------------------------------------------------- the client


class Fake(BaseHTTPRequestHandler):
    """A server that says yes; the second request is told to come again, one is refused."""

    asked: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers.get("Authorization"), body))
        status, said = 200, {"choices": [{"text": " yes", "finish_reason": "stop"}]}
        if len(self.asked) == 2:
            status, said = 429, {"error": {"message": "full"}}
        elif "refuse me" in str(body["prompt"]):
            status, said = 400, {"error": {"message": "no"}}
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_workload_is_sent_as_texts_turn_by_turn():
    Fake.asked = []
    server = HTTPServer(("127.0.0.1", 0), Fake)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sessions = (
        Session(
            "talk", (Turn("Hello", max_new_tokens=5, stop=("\n",)), Turn("again", seed=4)), extra_key="own"
        ),
        Session("ids", (Turn(token_ids=(7, 8, 9)),), 2),
        Session("wrong", (Turn("refuse me"), Turn("never")), 3),
    )
    traffic = routed.Traffic(
        f"http://127.0.0.1:{server.server_port}", "k", Workload("w", "W", sessions), step=0.01
    )
    traffic.start()
    traffic.join(60)
    server.shutdown()
    server.server_close()
    assert traffic.done and traffic.sent == 4
    prompts = [body["prompt"] for _, _, body in Fake.asked]
    assert "Hello" in prompts and [7, 8, 9] in prompts  # which of them comes first, threads decide
    assert "Hello yes\nagain" in prompts  # its history, as a client has it
    assert not any("never" in str(prompt) for prompt in prompts)  # a talk ends where it is refused
    assert len(Fake.asked) == 5  # one was asked again
    first = Fake.asked[prompts.index("Hello")]
    assert first[:2] == ("/v1/completions", "Bearer k")
    assert (first[2]["max_tokens"], first[2]["stop"], first[2]["cache_salt"]) == (5, ["\n"], "own")
    seeds = [(body["seed"], body["prompt"]) for _, _, body in Fake.asked if "seed" in body]
    assert set(seeds) == {(4, "Hello yes\nagain")}
    (failure,) = traffic.failures
    assert "wrong" in failure and "400 no" in failure


def test_a_server_that_is_gone_does_not_hold_the_client():
    traffic = routed.Traffic("http://127.0.0.1:9", "", routed.texts(2, requests=5), step=0.001)
    traffic.start()
    traffic.join(60)
    assert traffic.done and len(traffic.failures) == 5


def test_the_texts_fit_the_workers_together_and_none_alone():
    workload, texts = routed.texts(4), Tokenizer.from_file(str(local_folder(None) / "tokenizer.json"))
    shared = {}
    for session in workload.sessions:
        text, tokens = session.name.partition(",")[0], texts.encode(session.turns[0].text).ids
        first = shared.setdefault(text, tokens)
        pairs = enumerate(zip(first, tokens, strict=False))
        shared[text] = first[: next((n for n, (a, b) in pairs if a != b), len(first))]
        longest = len(tokens) + session.turns[0].max_new_tokens
        assert longest < workload.kv_tokens
    sizes = [len(tokens) for tokens in shared.values()]
    assert len(sizes) == 7 and min(sizes) > 100
    assert 2 * max(sizes) < workload.kv_tokens < 3 * min(sizes)  # two texts and some answers
    assert [s.arrival for s in workload.sessions] == sorted(s.arrival for s in workload.sessions)
    assert routed.texts(4) == workload


# ---------------------------------------------------------------------- a router with doubles


@pytest.fixture
def doubles():
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    pytest.importorskip("httpx", reason="the extra serve is not installed")
    from route_double import Doubles

    with Doubles() as found:
        yield found


# A machine that is busy with other things is no reason to give a worker up.
WATCHED = {
    "follow": True, "keep": True,
    "patience": Patience(starting=30, every=0.1, deadline=20, again=0.4, longest=0.4, grace=0.5),
}  # fmt: skip


def sessions(count=12):
    """As ids, which the doubles understand: three beginnings in turn."""
    return tuple(
        Session(f"s{n}", (Turn(token_ids=(*document(n % 3), 50_000 + n), max_new_tokens=2),), n // 4)
        for n in range(count)
    )


def test_the_page_of_a_router_and_its_workers(doubles, monkeypatch):
    monkeypatch.setattr(routed, "STEP", 0.02)
    workload = Workload("ids", "Three beginnings", sessions(), kv_tokens=400)
    router = doubles.router(workers=3, **WATCHED, policy="cache-aware")
    source = routed.RoutedSource(router, workload)
    with Live(source) as live:
        client = Client(live)
        assert source.run_now.page.meta()["fleet"]["routed"] is True
        wait(lambda: source.over)
        wait(lambda: source.run_now.trace.state()["tree"]["nodes"])
        wait(lambda: sum(w["requests"] for w in source.run_now.trace.state()["tree"]["workers"]) == 12)
        at = len(source.run_now.trace)
        routes = client.view(at)["routes"]
        assert [row["policy"] for row in routes["sums"]] == ["cache-aware"]
        assert routes["sums"][0]["tries"] == 12 and len(routes["last"]) == 12
        assert all(row["match_limit"] for row in routes["last"])
        assert client.view(1)["routes"]["last"] == []  # and back in time
        status = source.status()
        assert status["route"] == {
            "policies": ["round-robin", "least-loaded", "random", "cache-aware", "events"],
            "policy": "cache-aware", "sending": False, "ready": True,
        }  # fmt: skip
        assert router.url in status["serving"]["example"] and status["stream"]["kind"] == "on"
        assert client.do("route", policy="round-robin")[0] == 200
        assert client.do("send")[1] == {"requests": 12}
        wait(lambda: source.over)
        page, trace = source.run_now.page, source.run_now.trace
        wait(lambda: len(page.view("step", len(trace))["routes"]["sums"]) == 2)
        assert client.do("flush")[0] == 200
        assert {double.flushed for double in doubles.made} == {1}
    source.join(60)
    assert not source.is_alive() and source.error == "" and source.traffic.failures == []
    wait(lambda: all(double.poll() is not None for double in doubles.made))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("route", {"policy": "cache-aware"}, "is cache-aware already"),
        ("route", {"policy": "fastest"}, "unknown routing policy 'fastest'"),
        ("route", {}, "unknown routing policy"),
        ("evict", {"tokens": 3}, "not driven from here"),
        ("send", {}, "no worker is there yet"),
    ],
)
def test_what_cannot_be_asked_of_a_router_is_refused(doubles, name, arguments, said):
    doubles.unborn = {0: 1, 1: 1}
    router = doubles.router(workers=2, **WATCHED, policy="cache-aware")
    source = routed.RoutedSource(router, workloads.load("none"))
    with pytest.raises(ValueError, match=said):
        source.command(name, arguments).result(30)
    told = source.status()
    assert "its 2 workers are starting" in told["serving"]["text"] and told["route"]["sending"]
    source.stop()
    assert source.status()["serving"] == {"text": "The router has ended.", "example": ""}
    source.start()
    source.join(60)
    assert not source.is_alive()


@mock.patch.dict(POLICIES)  # what is added is gone afterwards
def test_a_learners_router_that_errs_is_told_and_the_page_goes_on(doubles, monkeypatch, tmp_path):
    """`--route FILE.py`: the file's Router decides; where it raises, the least loaded worker is taken."""
    monkeypatch.setattr(routed, "STEP", 0.02)
    solved = (find_folder("12") / "solution.py").read_text(encoding="utf-8")
    file, errs = tmp_path / "mine.py", "    low = 1 // (5 - self._choices) and min("
    file.write_text(solved.replace("    low = min(", errs), encoding="utf-8")
    add_policy(str(file))
    router = doubles.router(workers=3, **WATCHED, policy=str(file))
    source = routed.RoutedSource(router, Workload("ids", "Ids", sessions(), kv_tokens=400))
    with Live(source):
        wait(lambda: source.over)
        wait(lambda: source.run_now.notices)
        (said,) = source.run_now.notices
        assert said.startswith("at request 6 your choose raised ZeroDivisionError")
        wait(lambda: sum(w["requests"] for w in source.run_now.trace.state()["tree"]["workers"]) == 12)
        assert source.traffic.failures == [] and source.status()["route"]["policies"][-1] == str(file)
        assert source.status()["serving"]["text"].startswith("At request 6 your choose raised ZeroDivision")


def test_the_first_worker_that_is_ready_waits_for_the_others(monkeypatch):
    """However long all of them take to start: seconds count from the moment in which one is ready."""
    now, workers = [100.0], [SimpleNamespace(alive=False) for _ in range(3)]
    monkeypatch.setattr(routed.time, "monotonic", lambda: now[0])
    source = SimpleNamespace(router=SimpleNamespace(workers=workers), _first_ready=0.0)

    def begins(at, *alive):
        now[0] = at
        for worker, is_alive in zip(workers, alive, strict=True):
            worker.alive = is_alive
        return routed.RoutedSource._may_begin(source)

    assert not begins(100.0 + 3 * routed.PATIENCE, False, False, False)
    assert not begins(200.0, False, True, False)
    assert not begins(200.0 + routed.PATIENCE, False, True, True)
    assert begins(200.1 + routed.PATIENCE, False, True, True)
    assert begins(200.0, True, True, True)


def test_nobody_is_asked_to_send_before_all_workers_are_there(doubles, monkeypatch):
    """The first ones would keep what they are sent; and where none is ready, nothing can be asked."""
    monkeypatch.setattr(routed.RoutedSource, "_may_begin", lambda self: False)
    router = doubles.router(workers=2, **WATCHED)
    source = routed.RoutedSource(router, Workload("ids", "Ids", sessions(1), kv_tokens=400))
    with Live(source):
        wait(lambda: all(worker.alive for worker in router.workers))
        told = source.status()
        assert told["serving"]["example"] == "" and "2 of its 2 workers are" in told["serving"]["text"]
        assert told["route"]["ready"] and told["route"]["sending"]
        source.command("send", {}).result(30)
        wait(lambda: source.status()["serving"]["example"])
        for number in (0, 1):
            doubles.of(number).kill(-9, "out of memory")
        wait(lambda: "but no worker is ready" in source.status()["serving"]["text"])


def test_a_workload_is_not_over_before_it_is_sent(monkeypatch):
    """Also not in the moment between a client that is made and one that runs."""
    seen, over = [], routed.RoutedSource.over.fget
    settings, workers = SimpleNamespace(key=""), [SimpleNamespace(alive=True)]
    router = SimpleNamespace(url="http://127.0.0.1:9", settings=settings, workers=workers)
    source = SimpleNamespace(router=router, workload=routed.texts(2, requests=1), traffic=None)
    monkeypatch.setattr(routed.Traffic, "start", lambda self: seen.append(over(source)))
    assert routed.RoutedSource._send(source, {}) == {"requests": 1}
    assert seen == [False] and source.traffic is not None


def test_workers_that_cannot_start_end_it_with_a_sentence(doubles, capfd):
    doubles.unborn = {0: 1, 1: 1}
    router = doubles.router(workers=2, **WATCHED)
    source = routed.RoutedSource(router, workloads.load("none"))
    with Live(source):
        wait(lambda: source.error)
    assert "cannot start" in source.error and "no memory left" in source.error
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_dies_is_told_while_others_answer(doubles, monkeypatch):
    monkeypatch.setattr(routed, "STEP", 0.02)
    router = doubles.router(workers=2, **WATCHED, policy="round-robin")
    source = routed.RoutedSource(router, Workload("ids", "Ids", sessions(8), kv_tokens=400))
    with Live(source):
        wait(lambda: source.over)
        doubles.of(1).kill(-9, "out of memory")
        page = source.run_now.page
        wait(lambda: any("dead" in view["fleet"]["wrong"] for view in positions(page)))
        wait(lambda: router.workers.all[1].alive)
        assert source.command("send", {}).result(30) == {"requests": 8}
        wait(lambda: source.over)
        states = {
            w["state"] for at in range(len(page.trace)) for w in page.view("step", at)["routes"]["workers"]
        }
        assert {"starting", "ready", "dead"} <= states
        assert source.traffic.failures == []


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--route random", "--route random goes with --workers"),
        ("--workers 0", "1 or more"),
        ("--workers 65", "1 to 64 workers"),
        ("--workers 2 --route fastest", "unknown routing policy 'fastest'"),
        ("--workers 2 --compare lru,lfu", "--workers 2 with --compare"),
        ("--workers 2 --replay run.jsonl", "--workers 2 with --replay"),
        ("--workers 2 --cache tree.py", "trees of their own"),
        ("--workers 2 --publish tcp://127.0.0.1:5557", "publishes already"),
        ("--workers 2 --connect tcp://h:5557", "--workers"),
        ("--workers 2 --paused", "their own pace"),
        ("--workers 2 --speed 3", "their own pace"),
        ("--workers 2 --steps 5", "goes with --export only"),
        ("--workers 2 --max-queue 5", "its own queue"),
        ("--workers 2 --served-model-name x", "one name"),
        ("--workers 2 --serve 8321", "page and server need two ports"),
        ("--workers 2 --kv-tokens 3 --page-size 8", "3"),
        ("--workers 2 --kv-tokens 0", "kv_tokens must be at least 1, got 0"),
        ("--workers 2 --kv-tokens -5", "got -5"),
        ("--workers 2 --page-size 0", "page_size must be at least 1, got 0"),
        ("--workers 2 --host-kv-tokens -1", "got -1"),
        ("--workers 2 --workload tree-of-thought", "an engine of its own"),
        ("--workers 2 --workload nowhere", "nowhere"),
        ("--workers 2 --model nowhere/at-all", "nowhere"),
        ("--workers 2 --record run.txt", ".jsonl"),
        ("--workers 2 --host nowhere.invalid", "nowhere.invalid"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, said, capsys, monkeypatch):
    def started(*_, **__):
        pytest.fail("a worker was started")

    monkeypatch.setattr("minirad.route.workers.ServerProcess.__init__", started)
    try:
        code = main(arguments.split())
    except SystemExit as left:  # of the parser itself
        code = left.code
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and said in told, told


def test_the_workers_engines_are_those_asked_for():
    workload = routed.texts(2)
    asked = parser_of().parse_args(
        ["--workers", "2", "--page-size", "8", "--eviction-policy", "lfu", "--bigram-keys"]
    )
    router = routed.router_of(asked, workload)
    assert (router.engine.page_size, router.engine.eviction_policy) == (8, "lfu")
    assert router.engine.bigram_keys and router.engine.kv_tokens == 384
    asked = parser_of().parse_args(
        [
            "--workers",
            "3",
            "--route",
            "events",
            "--kv-tokens",
            "900",
            "--api-key",
            "k",
            "--host-kv-tokens",
            "64",
        ]
    )
    router = routed.router_of(asked, workload)
    assert (router.policy.name, router.settings.key, router.engine.kv_tokens) == ("events", "k", 900)
    assert router.engine.host_kv_tokens == 64 and len(router.workers) == 3
