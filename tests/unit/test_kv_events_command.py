"""`python -m minirad kv-events`: what it refuses, and what it prints."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from test_follow import Publisher

from minirad.__main__ import main
from minirad.fleet.follow import Follower
from minirad.fleet.wire import Batch, Cleared, Removed, Stored, encode


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("", "an endpoint such as tcp://host:5557, --bind ENDPOINT or --server URL is needed"),
        ("tcp://h:1 --bind tcp://*:2", "an endpoint is connected to or listened at, not both"),
        ("tcp://h:1 --server http://h", "--server says what the endpoints and ranks are"),
        ("tcp://h", "an endpoint is tcp://host:port"),
        ("tcp://*:1", "name the server's host"),
        ("tcp://h:1 --replay tcp://h", "an endpoint is tcp://host:port"),
        ("tcp://h:65535 --ranks 2", "there are no 2 ports from 65535 on"),
        ("tcp://h:1 --ranks 300", "a server has 1 to 256 ranks, got 300"),
        ("--server nowhere", "a server is http://host:port"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], options: str, sentence: str) -> None:
    assert main(["kv-events", *options.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and sentence in said.err


@pytest.mark.parametrize(
    "options", ["tcp://h:1 --ranks 0", "tcp://h:1 --seconds nan", "tcp://h:1 --seconds 0"]
)
def test_numbers_are_looked_at(capsys: pytest.CaptureFixture[str], options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kv-events", *options.split()])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_line_for_each_batch_with_nothing_that_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str], publisher: Publisher
) -> None:
    evil = "\x1b]0;title\x07\u202e"
    stored = Stored((1, 2), None, ((1,), (2,)), 1, evil)
    for seq, events in enumerate([(stored,), (Removed((1,), evil),), (Cleared(),), ()]):
        publisher.buffer.append((seq, encode(Batch(1.0, events, 0))))
    publisher.buffer.append((4, b"\x93\x01\x91\xa3\x1b[m\x00"))
    (endpoint,), (replay,) = publisher.endpoints
    assert main(["kv-events", endpoint, "--replay", replay, "--seconds", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    medium = r"\x1b]0;title\x07\u202e"
    lines = out.splitlines()
    assert f"rank 0: batch 0 (replayed): 2 blocks stored in {medium}" in lines
    assert f"rank 0: batch 1 (replayed): 1 block removed from {medium}" in lines
    assert (
        "rank 0: batch 2 (replayed): all cleared" in lines and "rank 0: batch 3 (replayed): nothing" in lines
    )
    assert lines[-1] == "rank 0: blocks: none; 5 batches, 5 of them replayed"


def test_what_was_rebuilt_as_json(capsys: pytest.CaptureFixture[str], publisher: Publisher) -> None:
    publisher.buffer.append((3, encode(Batch(1.0, (Stored((1, 2), None, ((7, 8), (9, 9)), 2),), 0))))
    (endpoint,), (replay,) = publisher.endpoints
    assert main(["kv-events", endpoint, "--replay", replay, "--seconds", "0.5", "--json"]) == 0
    said = capsys.readouterr()
    (rank,) = json.loads(said.out)["ranks"]
    assert rank["blocks"] == {
        "1": {"parent": None, "tokens": [7, 8], "media": ["GPU"], "space": None},
        "2": {"parent": "1", "tokens": [9, 9], "media": ["GPU"], "space": None},
    }
    assert (rank["batches"], rank["replayed"], rank["gaps"], rank["lost"]) == (1, 1, 1, 3)
    assert "batches 0 to 2 are lost: the replay buffer no longer holds them" in said.err


def test_a_last_message_that_was_lost_is_asked_for_in_the_end(
    capsys: pytest.CaptureFixture[str], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, wait = threading.Event(), Follower.wait

    def send_when_asked() -> None:
        while not publisher.questions:
            time.sleep(0.005)
        time.sleep(0.1)  # the first answer is on its way, and holds nothing
        publisher.send(0, live=False)
        known.set()

    def waits(follower: Follower, seconds: float | None = None) -> bool:
        """The command's second begins when that is done: else what it asks in the end is all it asks."""
        return known.wait(60) and wait(follower, seconds)

    monkeypatch.setattr(Follower, "wait", waits)
    sender = threading.Thread(target=send_when_asked)
    sender.start()
    (endpoint,), (replay,) = publisher.endpoints
    assert main(["kv-events", endpoint, "--replay", replay, "--seconds", "1", "--json"]) == 0
    sender.join()
    assert json.loads(capsys.readouterr().out)["ranks"][0]["batches"] == 1
