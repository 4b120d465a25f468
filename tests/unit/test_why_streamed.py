"""Why a prompt would miss on each rank of a stream of KV events, against what is put together naively."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from minirad.__main__ import main
from minirad.observe.reading import SCHEMA
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.why.streamed import Streamed
from minirad.why.words import Words

tree = pytest.importorskip("minirad.fleet.tree")
wire = pytest.importorskip("minirad.fleet.wire")
fleet_events = pytest.importorskip("minirad.observe.fleet_events")

BLOCK = 2
Key = tuple[Any, ...]  # rank, space, tokens


class Fleet:
    """Three ranks that store and remove blocks as they like, and what is told of them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.tree = random.Random(seed), tree.FleetTree()
        self.recording = Recording({"start": fleet_events.empty_state(BLOCK)})
        self.held: dict[Key, set[str]] = {}
        self.seen: dict[Key, str] = {}  # why it is not there any more
        self.step = 0

    def store(self, rank: int, space: str, tokens: list[int], medium: str) -> None:
        """All of a prompt's blocks that are not there."""
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = (rank, space, *tokens[:end])
            if medium not in self.held.setdefault(key, set()):
                self.held[key].add(medium)
                before = hash(key[: len(key) - BLOCK]) if end > BLOCK else None
                spaces = ((space,),) if space else ()
                block = tuple(tokens[end - BLOCK : end])
                told = wire.Stored((hash(key),), before, (block,), BLOCK, medium, False, spaces)
                self.tree.take(rank, told)

    def remove(self) -> None:
        key = self.rng.choice([key for key, media in self.held.items() if media] or [()])
        if key:
            medium = self.rng.choice(sorted(self.held[key]))
            self.held[key].remove(medium)
            self.tree.take(key[0], wire.Removed((hash(key),), medium))

    def end_frame(self, *before: Any) -> None:
        self.step += 1
        for key, media in self.held.items():
            if media:
                self.seen[key] = "evicted"
        events = (*before, *self.tree.changes(self.step))
        self.recording.frames.append(Frame(self.step - 1, self.step, events))

    def clear(self, rank: int) -> None:
        self.tree.take(rank, wire.Cleared())
        for key in self.held:
            if key[0] == rank and self.held[key]:
                self.held[key], self.seen[key] = set(), "flushed"
        self.end_frame(fleet_events.RankCleared(rank))

    def causes(self, rank: int, space: str, tokens: list[int]) -> list[str]:
        keys = [(rank, space, *tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]

        def hit(other: tuple[int, str]) -> int:
            at = 0
            while at < len(keys) and "GPU" in self.held.get((*other, *keys[at][2:]), ()):
                at += 1
            return at

        mine = hit((rank, space))
        known = max([at + 1 for at, key in enumerate(keys) if key in self.seen], default=0)
        elsewhere = max(
            hit(other) for other in {key[:2] for key in self.held} | {(9, "")} if other != (rank, space)
        )
        found = []
        for at in range(mine, len(keys)):
            media = self.held.get(keys[at])
            if media:
                host = all(
                    "GPU" not in self.held.get(k, ()) and self.held.get(k) for k in keys[mine : at + 1]
                )
                found.append("host" if host else "hole")
            elif keys[at] in self.seen:
                found.append(self.seen[keys[at]])
            else:
                found.append("namespace" if known < elsewhere and at < elsewhere else "not here")
        return found


@pytest.mark.parametrize("seed", range(6))
def test_every_rank_is_answered_for(seed: int) -> None:
    fleet = Fleet(seed)
    rng = fleet.rng
    texts = [[rng.randrange(3) for _ in range(12)] for _ in range(2)]
    told = Streamed(fleet.recording.header)
    causes: set[str] = set()
    for _ in range(60):
        for _ in range(rng.randrange(1, 4)):
            tokens = rng.choice(texts)[: 2 * rng.randrange(1, 7)]
            fleet.store(
                rng.randrange(3), rng.choice(["", "", "a"]), tokens, rng.choice(["GPU", "GPU", "CPU"])
            )
        fleet.end_frame()
        for _ in range(rng.randrange(4)):
            fleet.remove()
        fleet.end_frame()
        if rng.random() < 0.1:
            fleet.clear(rng.randrange(3))
        told.catch_up(fleet.recording.frames)
        tokens = rng.choice(texts)[: rng.randrange(2, 13)] + [
            rng.randrange(3) for _ in range(rng.randrange(3))
        ]
        space = rng.choice(["", "a"])
        for rank, answer in told.why(tokens, space).items():
            wanted = fleet.causes(rank, space, tokens)
            got = [loss.cause for loss in answer.losses for _ in range(loss.tokens)]
            assert answer.cached == (len(tokens) - 1) // BLOCK * BLOCK - BLOCK * len(wanted)
            for at, cause in enumerate(wanted):
                fine = {"new", "differs", "page", "last"} if cause == "not here" else {cause}
                assert set(got[at * BLOCK : (at + 1) * BLOCK]) <= fine, (rank, tokens, answer, wanted)
            causes |= set(wanted)
            assert Words(named=told.named).sentence(answer).startswith(f"rank {rank} finds ")
    assert {"hole", "evicted", "namespace"} <= causes
    again = Streamed.of(fleet.recording).why(tokens, space)
    assert again == told.why(tokens, space)


def test_the_command_asks_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(0)
    fleet.store(0, "", [1, 2, 3, 4], "GPU")
    fleet.store(2, "", [1, 2], "GPU")
    fleet.end_frame()
    fleet.recording.header = {"minirad": SCHEMA, "config": {}, "model": {}, **fleet.recording.header}
    stream, asked = tmp_path / "stream.jsonl", tmp_path / "asked.jsonl"
    fleet.recording.save(stream)
    asked.write_text(json.dumps({"prompt": [1, 2, 3, 4, 5]}), encoding="utf-8")
    assert main(["why", str(asked), "--log", str(stream), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["request"], each["cached"], each["cause"]) for each in report["answers"]] == [
        ("line 1 on rank 2", 2, "namespace"), ("line 1 on rank 0", 4, "new"),
    ]  # fmt: skip
    assert "2 there for rank 0 only" in report["answers"][0]["say"]
    assert main(["why", str(asked), "--log", str(stream)]) == 0
    said = f"{asked}, on each of 2 ranks of {stream}: 2 answers of 1 request, 10 tokens, 6 from the cache"
    assert said in capsys.readouterr().out
    assert main(["why", str(stream)]) == 2
    assert "does not tell what was asked" in capsys.readouterr().err


def test_a_recording_of_an_engine_is_another_thing() -> None:
    with pytest.raises(ValueError, match="of an engine"):
        Streamed({"start": {"step": 0, "tree": {"page_size": 1, "nodes": []}}})
