"""Why a request missed, on the live page and in its files: own answers, typed prompts, logs, streams."""

from __future__ import annotations

import dataclasses
import http.client
import json
import random
import time
from types import SimpleNamespace

import pytest

from minirad import workloads
from minirad.observe import events as ev
from minirad.observe.recording import Recording
from minirad.why.recorded import Recorded
from viz.live import Driver, Live, Settings, _replay, make_run
from viz.trace import Trace
from viz.web import told
from viz.web.ask import ask
from viz.web.export import page_data
from viz.web.fleet import FleetPage
from viz.web.page import Page

WEIGHTS = "minirad/model/classroom/weights"
SYSTEM = [1, 350, 201, 329, 341, 264, 313, 326, 75, 71, 273, 270, 431, 296, 16, 777]


@pytest.fixture(scope="module")
def run():
    """A small pool: prompts are evicted, and requests retracted."""
    run = make_run(1, Settings(workload="mixed", kv_tokens=400))
    while not run.idle:
        run.advance()
    return run


@pytest.fixture
def page(run):
    return Page(run.trace, run.player.labels)


@pytest.fixture(scope="module")
def stream(request):
    path = request.config.rootpath / "notebooks/streams/sglang_two_ranks.jsonl"
    return _replay(str(path), str(request.config.rootpath / WEIGHTS)).page


def asked(page, text, i=None, **more):
    return ask(page, {"text": text, "g": "step", "i": len(page.trace) if i is None else i, **more})


def hit(state, tokens, holds=lambda node: True):
    """Tokens of a prompt in a state's tree, by brute force (pages of one)."""
    at, parent = 0, 0
    while True:
        for node in state["tree"]["nodes"]:
            own = node["tokens"]
            shared = next((k for k, (a, b) in enumerate(zip(own, tokens[at:], strict=False)) if a != b),
                          min(len(own), len(tokens) - at))  # fmt: skip
            if node["parent"] == parent and node["namespace"] == 0 and shared and holds(node):
                break
        else:
            return at
        at, parent = at + shared, node["id"]
        if shared < len(own):
            return at


# ---------------------------------------------------------------------- the requests' own answers


def test_each_admission_says_why(run, page):
    recorded = Recorded.of(run.trace.recording)
    words, requests = told.words_for(run.trace.recording.header, run.trace.decode), page.requests()
    causes = {loss.cause for answer in recorded.answers.values() for loss in answer.losses}
    assert {"new", "differs", "evicted", "running", "retracted"} <= causes
    for name, answer in recorded.answers.items():
        main = words.clause(answer.main, answer).partition(" ")[2]
        if answer.main.cause == "last":
            assert "why" not in requests[name]
        elif "#" not in name:
            assert main in requests[name]["why"]
    for index, frame in enumerate(run.trace.recording.frames):
        admitted = [event for event in frame.events if isinstance(event, ev.RequestAdmitted)]
        for event in admitted:
            reason = page._answers.why(event.request, event.attempt)
            view = page.view("step", index + 1)
            told_of = [each["text"] for each in view["events"] if each["tag"] == ev.RequestAdmitted.word.tag]
            assert f"{event.describe()}: {reason}" in told_of if reason else event.describe() in told_of
            if len(admitted) == 1 and event.describe() in view["say"]:
                assert reason.replace("\n", "") in view["say"]
    assert page._answers.why("R22", 2) != page._answers.why("R22")


def test_a_file_has_the_same_answers(run):
    page = Page(run.trace)
    requests = page_data(page, "run")["requests"]
    assert requests == page.requests() and sum("why" in each for each in requests.values()) > 20


def test_tokens_that_are_computed_for_many_reasons_are_told_shortly(page):
    why = page.requests()["R31"]["why"]
    assert "276 that were evicted from the device in step 67 for R13" in why, "three runs of one eviction"
    assert why.endswith("; 3 for other reasons") and "►assistant" in why and len(why) < 300


def test_a_tree_that_tells_nothing_gets_no_answer():
    run = make_run(1, Settings(workload="mixed", kv_tokens=400, cache=("lessons/02_radix_tree/solution.py",)))
    for _ in range(12):
        run.advance()
    assert not any("why" in request for request in run.page.requests().values())
    with pytest.raises(ValueError, match="does not tell what it does"):
        asked(run.page, "hello")
    run.close()


def test_a_tree_that_did_not_do_what_it_told_gets_no_answer_from_there_on(run):
    """A request finds less than is there, as a tree would find that has a fault."""
    frames = list(run.trace.recording.frames)
    at = next(i for i, frame in enumerate(frames) if "R12" in [getattr(e, "request", "") for e in frame.events
              if isinstance(e, ev.RequestAdmitted)])  # fmt: skip
    events = [
        dataclasses.replace(event, matched=100, cached=100)
        if isinstance(event, ev.RequestAdmitted)
        else event
        for event in frames[at].events
    ]
    frames[at] = dataclasses.replace(frames[at], events=tuple(events))
    answers = told.Told(run.trace.recording.header, run.trace.decode)
    for frame in frames:
        answers.take(frame)
    assert "R10" in answers._answers and "R12" not in answers._answers and "R15" not in answers._answers
    moments = told.Moments(Recording(run.trace.recording.header, frames))
    assert moments.at(run.trace.view("step", at)).answers
    with pytest.raises(ValueError, match="found something else"):
        moments.at(run.trace.view("step", len(frames)))


# ---------------------------------------------------------------------- a prompt that is typed


def test_a_prompt_now_is_what_the_engine_would_find(run, page):
    for text in ("Tell me about the moon", "What is the capital of Italy?", "Hi"):
        found = asked(page, text, **{"as": "chat"})
        tokens = run.engine.encode(workloads.chat_prompt(text))
        (answer,) = found["answers"]
        assert answer["matched"] == run.engine.peek(tokens) and answer["tokens"] == len(tokens)
        assert found["as"] == "chat" and found["notes"] == []
        assert answer["cached"] + sum(loss["tokens"] for loss in answer["losses"]) == len(tokens)


@pytest.mark.parametrize(
    "kind", [{"page_size": 4, "bigram_keys": True}, {"page_size": 4, "host_kv_tokens": 1000}]
)
def test_other_kinds_of_trees(kind):
    """Pages, pairs of tokens and a host tier: as the engine would find it, step by step."""
    run = make_run(1, Settings(workload="mixed", kv_tokens=480, **kind))
    while not run.idle:
        run.advance()
        if run.clock % 20 == 0:
            run.recorder.cut()
            (answer,) = asked(run.page, "Hi", **{"as": "chat"})["answers"]
            tokens = run.engine.encode(workloads.chat_prompt("Hi"))
            assert answer["matched"] == run.engine.peek(tokens), run.clock
            slots = [
                len(run.trace.view("step", len(run.trace)).nodes[number]["slots"])
                for number in answer["path"]
            ]
            assert sum(slots) >= answer["matched"] > sum(slots[:-1]) or answer["matched"] == 0
    assert sum("why" in each for each in run.page.requests().values()) > 20
    run.engine.check()


def test_a_moment_in_the_past_to_and_fro(run, page):
    """Each against the tree on view, by step and by event, and the path that is lit against the answer."""
    rng = random.Random(5)
    names = ["R1", "R3", "R12", "R22"]
    for g in ("step", "event"):
        for _ in range(25):
            i, name = rng.randrange(page.trace.count(g)), rng.choice(names)
            found = ask(page, {"text": page.prompt_text(name), "from": name, "g": g, "i": i})
            (answer,), view = found["answers"], page.trace.view(g, i)
            assert answer["matched"] == hit(view.state, page.prompt(name)), (g, i, name)
            along = [token for number in answer["path"] for token in view.nodes[number]["tokens"]]
            assert tuple(along[: answer["matched"]]) == page.prompt(name)[: answer["matched"]]
            assert found["moment"] == view.title and "as it came" in found["notes"][0]
    assert len(page.moments._kept) <= told.KEPT


def test_a_long_way_is_gone_in_pieces(run, page, monkeypatch):
    wanted = asked(page, "Hi")
    waits, again, clock = 0, Page(run.trace), iter(range(10**6))
    monkeypatch.setattr(told, "PATIENCE", 40)
    monkeypatch.setattr(told, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    while "wait" in (found := asked(again, "Hi")):
        waits += 1
        assert "of 225 frames are replayed" in found["wait"] and waits < 400
    assert waits > 3 and found == wanted


def test_a_step_does_not_pay_for_those_before_it(run):
    """The memory of the page goes on; it does not begin again."""
    page, taken = Page(run.trace), []
    real = page._answers.take
    page._answers.take = lambda frame: (taken.append(frame.index), real(frame))
    for _ in range(3):
        page.frames()
        page.requests()
    assert taken == list(range(len(run.trace)))


# ---------------------------------------------------------------------- a log that is pasted

LOG = """{"messages":[{"role":"system","content":"You are a helpful assistant."}],"zork":3}
broken
{"prompt":"Question 1: what","extra_body":{"cache_salt":"me"}}
{"prompt":[1,350,201]}
"""


def test_a_pasted_log(page):
    found = asked(page, LOG)
    assert found["as"] == "log" and found["requests"] == ["line 1", "line 3", "line 4"]
    assert found["request"] == "line 4" and found["tokens"] == 3
    notes = "\n".join(found["notes"])
    assert "line 2" in notes and "zork (1)" in notes
    first = asked(page, LOG, 160, request="line 1")
    assert first["answers"][0]["matched"] >= 11, "the system prompt that every chat has"
    assert any("cache_salt" in note for note in asked(page, LOG, request="line 3")["notes"])
    assert asked(page, LOG, request="line 9")["request"] == "line 4"
    assert asked(page, LOG, **{"as": "prompt"})["as"] == "prompt", "as text, where that is meant"


@pytest.mark.parametrize(
    "body, reason",
    [
        ({"text": " "}, "nothing is asked"), ({"text": 3}, "nothing is asked"), ({}, "nothing is asked"),
        ({"text": "x", "as": "tree"}, "as must be one of"), ({"text": "x", "g": "year"}, "g must be one of"),
        ({"text": "x", "i": "1"}, "whole number"), ({"text": "x", "i": 10**9}, "position|not in|no step"),
        ({"text": "1 -2", "as": "ids"}, "-2"), ({"text": "[]", "as": "ids"}, "no token id"),
        ({"text": "9" * 30, "as": "ids"}, "whole numbers"), ({"text": "x", "from": "R999"}, "R999"),
        ({"text": '{"colour": 1}'}, "unknown format"), ({"text": "{"}, "what was pasted"),
        ({"text": '{"hash_ids": [1], "input_length": 9, "output_length": 1, "timestamp": 0}'}, "hashes"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(page, body, reason):
    with pytest.raises((ValueError, IndexError), match=reason):
        ask(page, {"i": 3, **body})


# ---------------------------------------------------------------------- a stream


def test_each_rank_of_a_stream(stream):
    count = len(stream.trace)
    for i in (0, 1, 5, 17, count):
        if not (ranks := {row["rank"] for row in stream.trace.view("step", i).state["tree"]["ranks"]}):
            continue
        found = asked(stream, " ".join(map(str, SYSTEM)), i, **{"as": "ids"})
        for answer in found["answers"]:
            state, rank = stream.trace.view("step", i).state, str(answer["rank"])
            held = hit(state, SYSTEM, lambda node, rank=rank: "GPU" in node["held"].get(rank, ""))
            assert answer["matched"] == held // 4 * 4, (i, rank)
            assert f"rank {rank} finds" in answer["say"]
        assert {answer["rank"] for answer in found["answers"]} <= ranks
    text = stream.trace.decode(SYSTEM) + " zebra"
    found = asked(stream, text, count)
    part = next(loss for loss in found["answers"][0]["losses"] if loss["cause"] == "differs")
    assert "zebra" in part["ours_text"] and found["as"] == "prompt"


def test_a_stream_without_a_tokenizer(stream):
    header = {**stream.trace.recording.header, "model": {"parameters": None, "tokenizer": ""}}
    bare = FleetPage(Trace(Recording(header, list(stream.trace.recording.frames))))
    assert "--tokenizer" in bare.meta()["no_text"] and stream.meta()["no_text"] == ""
    with pytest.raises(ValueError, match="--tokenizer"):
        asked(bare, "hello")
    with pytest.raises(ValueError, match="no tokenizer"):
        asked(bare, '{"prompt": "hello"}')
    ids = " ".join(map(str, SYSTEM))
    assert asked(bare, ids)["as"] == "ids", "by its looks"
    assert (
        asked(bare, ids)["answers"][0]["matched"]
        == asked(stream, ids, **{"as": "ids"})["answers"][0]["matched"]
    )
    assert asked(bare, json.dumps({"prompt": SYSTEM}))["tokens"] == len(SYSTEM)


def test_a_folder_that_holds_no_tokenizer(stream, tmp_path):
    page = FleetPage(Trace(stream.trace.recording))
    page.tokenizer = str(tmp_path)
    assert asked(page, "1 350 201", **{"as": "ids"})["tokens"] == 3
    with pytest.raises(ValueError, match="lacks"):
        asked(page, "hello")


def test_texts_of_a_stream_are_harmless(stream):
    found = asked(stream, stream.trace.decode(SYSTEM) + "\u202e<b>\x1b[31m" + "x" * 5000)
    text = json.dumps(found, ensure_ascii=False)
    assert "\u202e" not in text and "\x1b" not in text and len(text) < 10_000


# ---------------------------------------------------------------------- over HTTP


def post(live, run, **body):
    connection = http.client.HTTPConnection("127.0.0.1", live.server.port, timeout=30)
    body = json.dumps({"run": run, **body})
    connection.request("POST", "/why", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_the_route(stream):
    path = stream.trace.recording
    driver = Driver(Settings(), 3, replay=_replay_of(stream))
    with Live(driver) as live:
        key = driver.key(driver.run_now)
        status, found = post(live, key, text="hello", g="step", i=len(path.frames))
        assert status == 200 and [answer["rank"] for answer in found["answers"]] == [0, 1]
        assert post(live, "9.x", text="hello")[0] == 409
        status, found = post(live, key, text="")
        assert status == 400 and "nothing is asked" in found["error"]
        assert post(live, key, text="hello", i=10**6)[0] == 400
        assert post(live, key, text="x" * 1_000_000)[0] == 413


def _replay_of(stream):
    from viz.web.runs import Replay

    return Replay(stream.trace.recording, "a stream", stream.trace.decode, stream.tokenizer)


def test_two_engines_are_not_asked():
    driver = Driver(Settings(workload="chat", compare="lpm,fcfs"), speed=0)
    with Live(driver) as live:
        start = time.monotonic()
        while driver.run_now is None:
            assert time.monotonic() - start < 60
            time.sleep(0.01)
        status, found = post(live, driver.key(driver.run_now), text="hello")
        assert status == 400 and "two engines" in found["error"]
