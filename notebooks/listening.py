"""What somebody knows of a server who hears its KV events: helpers of notebook 15, beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minirad import Engine, EngineConfig, Recording
from minirad.fleet.blocks import Block, RankBlocks
from minirad.fleet.publish import as_record
from minirad.fleet.wire import Batch, Hash, decode, encode
from minirad.observe.kv_events import KVEvent, KVEventStream
from minirad.observe.snapshot import State
from minirad.workloads import Player, load


def held_by(state: State, rank: int) -> set[tuple[int, tuple[int, ...]]]:
    """The blocks that a rank holds, each spelled out from its beginning: (namespace, tokens up to its end)."""
    nodes, found = {node["id"]: node for node in state["tree"]["nodes"]}, set()
    size = state["tree"]["page_size"]
    for node in nodes.values():
        path = [node]
        while path[0]["parent"]:
            path.insert(0, nodes[path[0]["parent"]])
        if all(each["seen"] for each in path) and str(rank) in node["held"]:
            tokens = [token for each in path for token in each["tokens"]]
            for end in range(len(tokens), len(tokens) - node["units"], -size):
                found.add((node["namespace"], tuple(tokens[:end])))
    return found


def stored_again(recording: Recording, rank: int) -> tuple[int, int]:
    """Tokens that a rank stored, and those of them that it had held before."""
    before: set[tuple[int, tuple[int, ...]]] = set()
    known: set[tuple[int, tuple[int, ...]]] = set()
    stored = twice = size = 0
    for _, replay in recording.walk():
        state = replay.snapshot()
        now, size = held_by(state, rank), state["tree"]["page_size"]
        stored += len(now - before)
        twice += len((now - before) & known)
        known |= now
        before = now
    return stored * size, twice * size


def told_by_an_engine(workload: str, **config: Any) -> list[bytes]:
    """Runs a workload on an engine of ours; the messages that its publisher would send, packed, in order."""
    engine = Engine(EngineConfig(**config))
    told: list[KVEvent] = []
    KVEventStream(engine.cache, told.append)
    player, messages, step = Player(load(workload), engine.encode), [], 0
    while not player.done:
        for asked in player.due(step):
            player.sent(asked, engine.add_request(asked.prompt, asked.params))
        for out in engine.step().finished:
            player.finished(out, step)
        if told:
            messages.append(encode(Batch(float(step), tuple(map(as_record, told)), 0)))
            told.clear()
        step += 1
    return messages


def heard(messages: Iterable[bytes]) -> RankBlocks:
    """What somebody knows of a server who has heard these messages."""
    forest = RankBlocks()
    for message in messages:
        for event in decode(message).events:
            forest.take(event)
    return forest


def named(forest: RankBlocks) -> set[Hash]:
    """The blocks that are somewhere, as far as one has heard."""
    return {block.hash for block in forest.blocks.values() if block.media}


def hanging_together(forest: RankBlocks) -> set[Hash]:
    """Those of them that a prompt can hit: all before them, from its first block on, is there as well."""
    found = set()
    for block in forest.blocks.values():
        at: Block | None = block
        while at is not None and at.seen and at.media:
            at = at.above
        if at is None:
            found.add(block.hash)
    return found
