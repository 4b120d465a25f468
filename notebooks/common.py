"""Drawing helpers that several notebooks share: `import common` in a notebook beside this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from viz import kv

if TYPE_CHECKING:
    from minirad import Recording
    from minirad.fleet.blocks import Block, RankBlocks
    from minirad.fleet.wire import Hash
    from minirad.observe.snapshot import State


def bars(
    title: str, heights: Mapping[str, float], words: Sequence[str], percent: bool = False, x: str = ""
) -> kv.KvFigure:
    """One bar for each name, with words above it. percent: heights are shares, 0 to 1; x: what the names are."""
    bar = go.Bar(
        x=list(heights),
        y=list(heights.values()),
        text=list(words),
        name="",
        marker={"color": "#8fc1e3", "pattern": {"shape": ""}},
    )
    chart = go.Figure(bar, {"title": {"text": title}, "height": 280, "template": "none"})
    chart.update_xaxes(title={"text": x})
    if percent:
        chart.update_yaxes(tickformat=".0%", range=[0, 1.12])
    return kv.KvFigure(chart)


LOOKS = (("#0072b2", ""), ("#e69f00", "/"), ("#cc79a7", "x"), ("#56b4e9", "."))  # colour and pattern


def groups(
    title: str, series: Mapping[str, Mapping[str, float]], words: str = "{:g}", percent: bool = False
) -> kv.KvFigure:
    """Several series of bars beside each other, name -> where -> height. words: how a height is written above its bar.

    ValueError: for more than four series, which one could not tell apart.
    """
    if len(series) > len(LOOKS):
        raise ValueError(f"{len(series)} series of bars cannot be told apart; at most {len(LOOKS)}")
    bars = [
        go.Bar(
            x=[f"{name} {where}" for where in heights],  # in the still picture each needs its place
            y=list(heights.values()),
            name=name,
            text=[words.format(height) for height in heights.values()],
            marker={"color": colour, "pattern": {"shape": pattern}},
        )
        for (name, heights), (colour, pattern) in zip(series.items(), LOOKS, strict=False)
    ]
    chart = go.Figure(bars, {"title": {"text": title}, "height": 300, "template": "none"})
    if percent:
        chart.update_yaxes(tickformat=".0%")
    return kv.KvFigure(chart)


# ---------------------------------------------------------------------- other servers' trees (notebook 15)


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
    from minirad import Engine, EngineConfig
    from minirad.fleet.publish import as_record
    from minirad.fleet.wire import Batch, encode
    from minirad.observe.kv_events import KVEvent, KVEventStream
    from minirad.workloads import Player, load

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
    from minirad.fleet.blocks import RankBlocks
    from minirad.fleet.wire import decode

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
