"""The publisher's sockets: what is sent, what can be asked for, and that no listener holds the engine up."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support import ROOT, PlainCache

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.engine import Engine
from minirad.fleet import publish
from minirad.fleet.publish import Publisher, as_record, beside, with_rank
from minirad.fleet.wire import Cleared, Removed, Stored, decode, encode
from minirad.observe import events as ev
from minirad.observe.kv_events import KVEventStream
from minirad.simulate import ModelFreeEngine
from viz import live
from viz.web.commands import COMMANDS, Session
from viz.web.settings import Settings

TREE = ROOT / "lessons" / "02_radix_tree" / "solution.py"
ANY = "tcp://127.0.0.1:0"
END = b"\xff" * 8


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture(autouse=True)
def publishers_hear_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPUB is a PUB whose owner can read who has subscribed."""
    monkeypatch.setattr(zmq, "PUB", zmq.XPUB)


@pytest.fixture
def engine() -> Engine:
    return ModelFreeEngine(400, page_size=2)


def run(engine: Engine, *prompts: list[int]) -> None:
    for prompt in prompts:
        engine.add_request(prompt)
    while engine.has_work:
        engine.step()


def subscriber(context: Any, publisher: Publisher, topic: bytes = b"", hwm: int = 1000) -> Any:
    """Connected, and the publisher has heard of it: PUB forgets what is sent before."""
    socket = context.socket(zmq.SUB)
    socket.rcvhwm = hwm
    socket.rcvtimeo = 30_000
    socket.subscribe(topic)
    socket.connect(publisher.endpoint)
    assert publisher.flush(60)  # its thread has nothing to send: its socket may be read in this one
    assert publisher._pub.poll(30_000) and publisher._pub.recv() == b"\1" + topic
    return socket


def ask(context: Any, publisher: Publisher, start: int) -> list[tuple[int, bytes]]:
    """What the ROUTER answers, without the end; frames as SGLang's."""
    with context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo = 30_000
        socket.connect(publisher.replay)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        answers = []
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(number, "big"), payload))


# ---------------------------------------------------------------------- what is sent


def test_messages_are_those_of_sglang(engine: Engine, context: Any) -> None:
    with Publisher(engine, ANY, ANY, topic="kv", rank=3) as publisher:
        socket = subscriber(context, publisher)
        before = time.time()
        run(engine, [5, 6, 7, 8, 9])
        engine.flush_cache()
        sent = []
        while not sent or not isinstance(decode(sent[-1][2]).events[-1], Cleared):
            sent.append(socket.recv_multipart())
        assert [message[:2] for message in sent] == [
            [b"kv", at.to_bytes(8, "big")] for at in range(len(sent))
        ]
        ts, (stored, *_), rank = msgspec.msgpack.decode(sent[0][2])
        assert before - 60 < ts < time.time() + 60 and rank == 3  # a clock may be set meanwhile
        names = stored.pop("block_hashes")
        assert len(names) == 2 and all(-(2**63) <= name < 2**63 for name in names)
        assert stored == {
            "type": "BlockStored", "parent_block_hash": None, "token_ids": [5, 6, 7, 8], "block_size": 2,
            "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        assert msgspec.msgpack.decode(sent[-1][2])[1][-1] == {"type": "AllBlocksCleared"}
        assert publisher.flush(60) and publisher.batches == len(sent)
        assert ask(context, publisher, 0) == [(at, message[2]) for at, message in enumerate(sent)]
        assert [at for at, _ in ask(context, publisher, 1)] == list(range(1, len(sent)))
        assert ask(context, publisher, len(sent)) == [] == ask(context, publisher, 2**64 - 1)


def test_a_topic_is_asked_for(engine: Engine, context: Any) -> None:
    with Publisher(engine, ANY, None, topic="kv@a") as publisher:
        mine, other = subscriber(context, publisher, b"kv@a"), subscriber(context, publisher, b"kv@b")
        run(engine, [5, 6, 7])
        assert mine.recv_multipart()[0] == b"kv@a"
        assert not other.poll(50)


def test_pairs_are_sent_as_pairs_and_namespaces_by_their_names() -> None:
    cache, heard = RadixCache(2), []
    KVEventStream(cache, heard.append)
    keys: list[Any] = ["lora", ("a", 1), None, "int:1", 1, "", "a(b"]
    for at, key in enumerate(keys):
        for pairs in (False, True):
            units = range(100 * at, 100 * at + 4)
            cache.insert(RadixKey([1, 2, 3, 4, 5][: 5 if pairs else 4], key, pairs), units)
    records = [as_record(event) for event in heard]
    assert all(isinstance(record, Stored) and len(record.hashes) == 2 for record in records)
    assert [record.pairs for record in records] == [False, True] * len(keys)  # type: ignore[union-attr]
    assert records[1].tokens == ((1, 2, 2, 3), (3, 4, 4, 5))  # type: ignore[union-attr]
    spaces = [record.spaces for record in records]  # type: ignore[union-attr]
    assert spaces[0] == (("lora",),) * 2 and spaces[2 * 2] == ()
    assert spaces[::2] == spaces[1::2] and len(set(spaces)) == len(keys)  # no two keys look alike
    cache.evict(2)
    assert isinstance(as_record(heard[-1]), Removed)


def test_a_batch_is_a_whole_call_and_what_waits_goes_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(engine, ANY, None) as publisher:
        steps: list[int] = []
        with publisher._changed:  # so that our thread cannot look
            for at in range(6):
                run(engine, [10 * at + n for n in range(4)])
                steps.append(publisher._behind)
        assert publisher.flush(60) and publisher.batches == 1 and steps[-1] > 5
        (batch,) = (decode(payload) for _, payload in publisher.kept)
        assert len(batch.events) == steps[-1]
        monkeypatch.setattr(publish, "MOST_TOGETHER", 2)
        with publisher._changed:
            for at in range(6):
                engine.cache.reset()  # two events in one call, as the engine does
                run(engine, [20 * at + n for n in range(4)])
        assert publisher.flush(60)
        assert all(len(decode(payload).events) <= 2 for _, payload in publisher.kept[1:])
        assert publisher.batches > 4


def test_a_change_by_hand_is_told_at_once(engine: Engine) -> None:
    with Publisher(engine, ANY, None) as publisher:
        run(engine, [1, 2, 3, 4, 5, 6])
        assert publisher.flush(60)
        before = publisher.batches
        engine.cache.evict(100)  # no call of the engine
        assert publisher.flush(60) and publisher.batches > before
        assert any(isinstance(each, Removed) for each in decode(publisher.kept[-1][1]).events)


# ---------------------------------------------------------------------- what is kept


def test_the_buffer_is_bounded_in_batches_and_in_bytes(
    engine: Engine, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(engine, ANY, ANY, buffer=5) as publisher:
        for at in range(9):
            run(engine, [10 * at + n for n in range(4)])
            assert publisher.flush(60)
        last = publisher.batches - 1
        assert [number for number, _ in publisher.kept] == list(range(last - 4, last + 1))
        assert [number for number, _ in ask(context, publisher, 0)] == list(range(last - 4, last + 1))
        monkeypatch.setattr(publish, "MOST_BYTES", 1000)
        for at in range(9, 25):
            run(engine, [10 * at + n for n in range(4)])
            assert publisher.flush(60) and publisher.kept[-1][0] == publisher.batches - 1
            assert sum(len(payload) for _, payload in publisher.kept) == publisher._bytes <= 1000
        monkeypatch.setattr(publish, "MOST_BYTES", 10)
        engine.flush_cache()
        assert publisher.flush(60)
        assert [number for number, _ in publisher.kept] == [publisher.batches - 1]  # the newest is kept


@pytest.mark.parametrize("frames", [(b"",), (b"", b"", b"1"), (b"0", b"x" * 9), (b"x" * 100_000,)])
def test_what_is_no_question_gets_no_answer(engine: Engine, context: Any, frames: tuple[bytes, ...]) -> None:
    with Publisher(engine, ANY, ANY) as publisher:
        run(engine, [1, 2, 3])
        publisher.flush(60)
        with context.socket(zmq.DEALER) as socket:
            socket.connect(publisher.replay)
            socket.send_multipart(frames)
            assert len(ask(context, publisher, 0)) == publisher.batches > 0
            assert not socket.poll(20)


# ---------------------------------------------------------------------- nobody holds the engine up


def test_who_does_not_read_holds_nobody_up(engine: Engine, context: Any) -> None:
    with Publisher(engine, ANY, ANY, buffer=20) as publisher:
        deaf = subscriber(context, publisher, hwm=1)  # and never reads
        asker = context.socket(zmq.DEALER)
        asker.rcvhwm = 1
        asker.connect(publisher.replay)
        for at in range(300):
            asker.send_multipart((b"", b"\0" * 8))  # and never reads
            run(engine, [at + n for n in range(0, 200, 2)])
            assert at % 10 or publisher.flush(60)  # what comes faster than the thread looks is one batch
        assert publisher.flush(60)
        assert publisher.batches >= 20 and not publisher.trouble and not deaf.closed


def test_the_engine_waits_for_our_own_thread_only_so_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MOST_BEHIND", 10)
    monkeypatch.setattr(publish, "encode", lambda batch: time.sleep(0.01) or encode(batch))
    most: list[int] = []
    with Publisher(engine, ANY, None) as publisher:
        wait_for = publisher._changed.wait_for  # it waits a second, in which our thread may have had no turn
        monkeypatch.setattr(publisher._changed, "wait_for", lambda done, timeout: wait_for(done, 60))
        for at in range(30):
            run(engine, [at * 7 + n for n in range(6)])
            most.append(publisher._behind)
        assert publisher.flush(60) and 0 < max(most) <= 10


def test_a_batch_that_cannot_be_sent_is_a_gap_that_is_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Publisher(engine, ANY, None) as publisher:
        monkeypatch.setattr(publish, "encode", lambda batch: 1 / 0)
        run(engine, [1, 2, 3])
        assert publisher.flush(60)
        failed = publisher.batches
        monkeypatch.undo()
        run(engine, [4, 5, 6])
        assert publisher.flush(60)
        assert failed and publisher.kept[0][0] == failed
        assert publisher.trouble.startswith("batch 0 could not be sent: ZeroDivisionError")
    assert capsys.readouterr().err.count("\n") == 1


# ---------------------------------------------------------------------- beginning and end


def test_a_port_that_is_taken_is_named(engine: Engine) -> None:
    with Publisher(engine, ANY, ANY) as publisher:
        for asked in ((publisher.endpoint, None), (ANY, publisher.replay)):
            (taken,) = (each for each in asked if each not in (None, ANY))
            with pytest.raises(ValueError, match=f"^cannot publish at {taken}: the port is taken$"):
                Publisher(engine, *asked)
        run(engine, [1, 2, 3])
        assert publisher.flush(60) and publisher.batches  # it goes on
    again = Publisher(engine, publisher.endpoint, publisher.replay)
    again.close()
    with pytest.raises(ValueError, match=f"need an endpoint each: both are {publisher.endpoint}$"):
        Publisher(engine, publisher.endpoint, publisher.endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "", "5557", "tcp://127.0.0.1", "tcp://:5557", "tcp://a b:1", "ipc:///tmp/kv", "tcp://h:5557/", 5557,
        None, "udp://127.0.0.1:1", "tcp://h:١", "tcp://**:1", "tcp://127.0.0.1:5557\n",
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_named(endpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"^endpoint must be tcp://HOST:PORT, such as .*, got ") as told:
        Publisher(None, endpoint, None)
    assert "\n" not in str(told.value)


def test_ranks_have_ports_of_their_own() -> None:
    assert with_rank("endpoint", "tcp://*:5557", 2) == "tcp://*:5559"
    assert with_rank("endpoint", "tcp://[::1]:1", 0) == "tcp://[::1]:1"
    assert with_rank("endpoint", ANY, 7) == ANY
    assert beside("tcp://*:5557") == "tcp://*:5558" and beside(ANY) == ANY
    with pytest.raises(ValueError, match=r"^tcp://\*:65535 has the last port, so the replay needs"):
        beside("tcp://*:65535")
    with pytest.raises(ValueError, match=r"^endpoint tcp://h:65530 with rank 6 is port 65536"):
        Publisher(None, "tcp://h:65530", rank=6)
    for name, value in (("rank", -1), ("rank", "a"), ("buffer", 0), ("topic", b"kv")):
        with pytest.raises(ValueError, match=name):
            Publisher(None, ANY, None, **{name: value})  # type: ignore[arg-type]


def test_what_has_nothing_to_tell_is_refused(make_engine: Any, engine: Engine) -> None:
    with pytest.raises(ValueError, match="PlainCache tells no events"):
        Publisher(make_engine(cache=PlainCache()), ANY, None)
    with pytest.raises(ValueError, match="an engine is needed, got 5"):
        Publisher(5, ANY, None)  # type: ignore[arg-type]
    publisher = Publisher(None, ANY, None)
    refused: list[str] = []

    def within(event: Any) -> None:
        with pytest.raises(ValueError) as told:
            publisher.attach(engine)
        refused.append(str(told.value))

    end = engine.bus.subscribe(ev.StepEnded, within)
    run(engine, [1, 2, 3])
    end()
    assert set(refused) == {"a publisher is attached between two steps, not within one"}
    publisher.close()
    with pytest.raises(ValueError, match="is closed"):
        publisher.attach(engine)
    assert engine.bus.settled and not engine.bus.wants(ev.NodeInserted)


def test_another_engine_goes_on_with_the_numbers(engine: Engine) -> None:
    other = ModelFreeEngine(400, page_size=4)
    run(other, [1, 2, 3, 4, 5])
    with Publisher(None, ANY, None) as publisher:
        publisher.attach(engine)
        run(engine, [1, 2, 3, 4])
        assert publisher.flush(60)
        before = publisher.batches
        publisher.attach(other)
        run(engine, [7, 8, 9])  # nobody listens any more
        run(other, [6, 7, 8, 9])
        assert publisher.flush(60)
        assert [number for number, _ in publisher.kept] == list(range(publisher.batches))
        told = [event for _, payload in publisher.kept[before:] for event in decode(payload).events]
        assert told[0] == Cleared() and {each.block_size for each in told[1:]} == {4}  # type: ignore[union-attr]
        assert [each.tokens[0] for each in told[1:3]] == [(1, 2, 3, 4), (6, 7, 8, 9)]  # type: ignore[union-attr]
    assert not engine.bus.wants(ev.NodeInserted) and not other.bus.wants(ev.NodeInserted)


def test_closing_sends_what_was_told(engine: Engine, context: Any) -> None:
    publisher = Publisher(engine, ANY, ANY)
    socket = subscriber(context, publisher)
    run(engine, [1, 2, 3, 4])
    publisher.close()
    publisher.close()
    publisher._thread.join(60)  # `close` itself waits some seconds only
    assert not publisher._thread.is_alive()
    assert isinstance(decode(socket.recv_multipart()[2]).events[0], Stored)
    run(engine, [5, 6, 7])  # goes on alone
    assert publisher.flush(60)


SCRIPT = """
import os, signal, sys, time
from minirad.fleet.publish import Publisher
from minirad.simulate import ModelFreeEngine
engine = ModelFreeEngine(400)
publisher = Publisher(engine, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
engine.add_request([1, 2, 3])
print("ready", flush=True)
while {forever} or engine.has_work:
    engine.step()
"""


@pytest.mark.parametrize("forever", [False, True])
def test_a_program_that_does_not_close_ends(forever: bool) -> None:
    if forever and sys.platform == "win32":
        pytest.skip("Ctrl-C cannot be sent to one process on Windows")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(forever=forever)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline().strip() == b"ready"
    if forever:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if forever:
        assert errors.count(b"Traceback") == 1 and errors.rstrip().endswith(b"KeyboardInterrupt")
    else:
        assert process.returncode == 0 and errors == b""


# ---------------------------------------------------------------------- the live page


@pytest.mark.slow
def test_the_page_publishes_one_engine_after_the_other() -> None:
    session = Session(Settings(workload="mixed"), 1, False, None)
    with Publisher(None, ANY, None) as publisher:
        session.begun = lambda run: publisher.attach(run.alone.engine)
        first = session.begin(session.settings, None)
        for _ in range(4):
            first.advance()
        assert publisher.flush(60)
        before = publisher.batches
        COMMANDS["restart"](session, {"page_size": 4})
        assert session.run_now is not first and session.run_now is not None
        for _ in range(4):
            session.run_now.advance()
        assert publisher.flush(60)
        batches = [decode(payload) for _, payload in publisher.kept]
        assert {each.block_size for batch in batches[:before] for each in batch.events} == {1}  # type: ignore[union-attr]
        cleared, *stored = (event for batch in batches[before:] for event in batch.events)
        assert cleared == Cleared() and {each.block_size for each in stored} == {4}  # type: ignore[union-attr]
        session.run_now.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--publish", "here"], "endpoint must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557, got 'here'"),
        (["--publish", "tcp://*:65535"], "tcp://*:65535 has the last port, so the replay needs one"),
        (["--publish", ANY, "--publish-replay", "x"], "replay must be tcp://HOST:PORT"),
        (["--publish-replay", ANY], f"--publish-replay {ANY} goes with --publish only"),
        (["--publish", ANY, "--compare", "lpm,fcfs"], "with --compare: two engines run"),
        (["--publish", ANY, "--replay", "a.jsonl"], "with --replay: nothing runs"),
        (["--publish", ANY, "--export", "a.html"], "with --export: nobody can follow"),
        (["--publish", ANY, "--cache", str(TREE)], "with --cache: a tree of your own tells no events"),
    ],
)
def test_what_cannot_be_published_is_said_in_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert live.main([*options, "--no-open", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C cannot be sent to one process on Windows")
def test_the_command_says_where_it_publishes(context: Any) -> None:
    command = [
        sys.executable,
        "-m",
        "viz.live",
        "--no-open",
        "--port",
        "0",
        "--publish",
        ANY,
        "--speed",
        "4",  # it still tells something when somebody listens
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = re.fullmatch(
            r"publishing KV events: (\S+)   \(missed ones: (\S+)\)\n", process.stdout.readline()
        )
        assert said is not None and "http://127.0.0.1:" in process.stdout.readline()
        with context.socket(zmq.SUB) as socket:
            socket.subscribe(b"")
            socket.connect(said[1])
            assert socket.poll(20_000)
            number = int.from_bytes(socket.recv_multipart()[1], "big")
        answers = ask(context, SimpleNamespace(replay=said[2]), 0)
        assert [at for at, _ in answers][: number + 1] == list(range(number + 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
