"""The page of a stream of other servers: cards with a strip of ranks, one rank alone, growth, hostile texts."""

from __future__ import annotations

import json
import random

import pytest

from minirad.fleet import wire
from minirad.fleet.tree import FleetTree
from minirad.observe import fleet_events as fe
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import rest_of
from viz.draw import fleet as cards
from viz.draw import tree
from viz.trace import Trace, View, ids_as_text
from viz.view import fleet
from viz.web.fleet import FleetPage, short

HOSTILE = "<script>alert('x')</script> \u202eabc\u202c \x00\x1b[31m " + "long " * 2000


def started(ranks=2):
    """The state of a stream whose ranks are known, and nothing else."""
    state = fe.empty_state(4)
    state["tree"]["ranks"] = [
        {**fe.new_rank(rank, f"tcp://h:{5557 + rank}"), "state": "live"} for rank in range(ranks)
    ]
    return state


def recorded(steps, ranks=2, start=None):
    """A recording of these frames of events; each is checked as one that was read from a file is."""
    start = start or started(ranks)
    state, frames = ReplayState(start), []
    for events in steps:
        step = state.rest["step"] + 1
        end = fe.BatchesTaken(step, (0,), (step - 1,), (1,), (0,), (0,), 0, 0, 0, 0.01)
        for event in (*events, end):
            event.check(state)
            state.apply(event)
        frames.append(Frame(len(frames), step, (*events, end)))
    return Recording({"schema": 1, "config": {}, "model": None, "start": start}, frames)


def stored(node, parent, tokens, *held, tick=1, namespace=0, space="", seen=True):
    blocks = max(len(tokens) // 4, 1)
    return fe.NodeStored(
        node, parent, tuple(tokens), len(tokens), blocks, False, namespace, space, seen, held, tick
    )


def ids(first, count):
    return range(first, first + count)


STORY = (
    [stored(1, 0, ids(0, 8), "0:GPU")],
    [fe.NodeHeld(1, 1, "", "GPU", 2, 2), stored(2, 1, ids(8, 4), "1:GPU", tick=2)],
    [fe.NodeHeld(2, 1, "GPU", "CPU+GPU", 1, 3), stored(3, 0, ids(40, 8), "0:GPU", tick=3, namespace=1, space="lora-a")],
    [fe.NodeLost(1, 1, "GPU", "", 2, 4)],
    [fe.NodeLost(1, 0, "GPU", "", 2, 5), fe.GapSeen(0, 5, 7, "the replay buffer no longer holds them")],
    [stored(4, 0, (), seen=False, tick=6), stored(5, 4, ids(80, 4), "0:?", tick=6)],
    [fe.NodeLeft(3, ("0:GPU",), 2, 7)],
)  # fmt: skip


@pytest.fixture(scope="module")
def page():
    return FleetPage(Trace(recorded(STORY), ids_as_text))


def dot(page, index, **options):
    return tree.dot_text(page.trace.view("step", index), ids_as_text, tree.Options(**options))


def test_look(page):
    print(dot(page, 3))
    print(json.dumps(page.view("step", 5), indent=1)[:3000])


# ---------------------------------------------------------------------- a tree by chance, from blocks


def blocks_by_chance(seed, count, ranks, size=4):
    """Blocks {number: (parent, tokens, namespace, held)} as a stream may leave them, holes among them."""
    rng = random.Random(seed)
    blocks, leaves = {}, []
    for number in range(1, count + 1):
        longer = leaves and rng.random() < 0.6
        parent = rng.choice(leaves) if longer else rng.randrange(0, number)
        space = blocks[parent][2] if parent else rng.choice([0, 0, 1])
        above = blocks[parent][3] if parent else {}
        held = dict(above) if above and rng.random() < 0.75 else {}
        for rank in range(ranks):
            if rng.random() < (0.3 if not held else 0.04):
                held[str(rank)] = rng.choice(["GPU", "GPU", "CPU+GPU", "CPU", "?"])
        if rng.random() < 0.05:
            held = {}
        held = dict(sorted(held.items(), key=lambda item: int(item[0])))
        blocks[number] = (parent, [rng.randrange(900) for _ in range(size)], space, held)
        leaves = [leaf for leaf in leaves if leaf != parent][-20:] + [number]
    return blocks


def grown_nodes(blocks, size=4):
    """The nodes of these blocks: maximal runs of only children that are held alike, as a stream's state has them."""
    alive = {number for number, block in blocks.items() if block[3]}
    for number in sorted(blocks, reverse=True):
        if number in alive and blocks[number][0]:
            alive.add(blocks[number][0])
    below = {}
    for number in sorted(alive):
        below.setdefault(blocks[number][0], []).append(number)
    nodes = []

    def alike(a, b):
        return blocks[a][2:] == blocks[b][2:]

    for number in sorted(alive):
        parent = blocks[number][0]
        if parent and below[parent] == [number] and alike(parent, number):
            continue
        run = [number]
        while len(below.get(run[-1], ())) == 1 and alike(run[-1], below[run[-1]][0]):
            run.append(below[run[-1]][0])
        nodes.append({
            "id": run[-1], "parent": parent, "tokens": [t for b in run for t in blocks[b][1]],
            "units": size * len(run), "blocks": len(run), "pairs": False, "slots": [],
            "namespace": blocks[number][2], "lock_ref": 0, "last_access": run[0], "created": run[0], "hits": 0,
            "priority": 0, "held": dict(blocks[number][3]), "seen": True,
        })  # fmt: skip
    return nodes


def state_of(blocks, ranks):
    state = started(ranks)
    state["tree"].update(nodes=grown_nodes(blocks), spaces=["", "lora-a"])
    return state


def view_of(state):
    return Trace(Recording({"schema": 1, "config": {}, "model": None, "start": state}), ids_as_text).view(
        "step", 0
    )


def shape(nodes, rank):
    """What matters of nodes: where each run begins and ends, and how this rank holds it."""
    return sorted(
        (node["id"], node["parent"], tuple(node["tokens"]), node["units"], node["blocks"], node["held"].get(str(rank), ""))
        for node in nodes
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_one_rank_alone_is_the_tree_of_its_own_blocks(seed):
    ranks = 1 + seed % 4
    blocks = blocks_by_chance(seed, 150, ranks)
    view = view_of(state_of(blocks, ranks))
    for rank in range(ranks):
        held = lambda own: {r: m for r, m in own.items() if r == str(rank)}  # noqa: E731, B023
        own = {
            n: (parent, tokens, space, held(media)) for n, (parent, tokens, space, media) in blocks.items()
        }
        found = fleet.alone(view, rank)
        assert shape(found.state["tree"]["nodes"], rank) == shape(grown_nodes(own), rank)
        assert set(found.status) == {node["id"] for node in found.state["tree"]["nodes"]}
        holes = {n["id"] for n in found.state["tree"]["nodes"] if str(rank) not in n["held"]}
        assert holes == {number for number, status in found.status.items() if status == "hole"}
        assert tree.dot_text(found, ids_as_text, tree.Options(fold_above=10_000)).count(
            'class="hole"'
        ) == 2 * len(holes)


# ---------------------------------------------------------------------- streams by chance


def streamed(seed, steps=60, ranks=3):
    """Frames of what these ranks tell, and for each rank the tree of all ranks' own events alone."""
    rng = random.Random(seed)
    whole, own = FleetTree(), [FleetTree() for _ in range(ranks)]
    start = started(ranks)
    state, frames, chats, known = (
        ReplayState(start),
        [],
        [[], [rng.randrange(9) for _ in range(8)]],
        [{} for _ in range(ranks)],
    )
    for step in range(1, steps + 1):
        rank = rng.randrange(ranks)
        chat = rng.choice(chats) + [rng.randrange(9) for _ in range(4 * rng.randrange(1, 5))]
        chats = [*chats[-12:], chat]
        told, parent = [], None
        for at in range(0, len(chat), 4):
            number = hash((parent, *chat[at : at + 4])) % (1 << 60)
            if number not in known[rank] or rng.random() < 0.05:
                medium = rng.choice(["GPU", "GPU", "GPU", "CPU"])
                told.append(wire.Stored((number,), parent, (tuple(chat[at : at + 4]),), 4, medium))
                known[rank][number] = medium
            parent = number
        while len(known[rank]) > 14:
            number = rng.choice(list(known[rank]))
            told.append(wire.Removed((number,), known[rank].pop(number)))
        if rng.random() < 0.03:
            known[rank] = {}
            told.append(wire.Cleared())
        for event in told:
            whole.take(rank, event)
            own[rank].take(rank, event)
        end = fe.BatchesTaken(step, (rank,), (step,), (1,), (0,), (0,), 0, 0, 0, 0.01)
        events = (*whole.changes(step), end)
        for each in own:
            each.changes(step)
        for event in events:
            event.check(state)
            state.apply(event)
        frames.append(Frame(len(frames), step, events))
    return Recording({"schema": 1, "config": {}, "model": None, "start": start}, frames), own


def paths(nodes, rank):
    """Nodes by the tokens from the root on, wherever they are numbered: with how this rank holds them."""
    by = {node["id"]: node for node in nodes}

    def path(node):
        above = by.get(node["parent"])
        return (path(above) if above else ()) + (tuple(node["tokens"]),)

    return sorted((path(node), node["held"].get(str(rank), ""), node["blocks"]) for node in nodes)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_by_chance_is_counted_and_cut_down_as_from_scratch(seed):
    recording, own = streamed(seed)
    page = FleetPage(Trace(recording, ids_as_text))
    records = page.frames()
    for index, record in enumerate(records, start=1):
        anew = fleet.sums(page.trace.view("step", index).state)
        shown = page.view("step", index)["fleet"]
        assert record["b"] == anew.media and record["d"] == anew.tokens
        assert {row["rank"]: row["media"] for row in shown["ranks"]} == {
            r: {k: list(v) for k, v in media.items()} for r, media in anew.ranks.items()
        }
        assert shown["shares"] == list(anew.shares)
    view = page.trace.view("step")
    for rank, alone in enumerate(own):
        assert paths(fleet.alone(view, rank).state["tree"]["nodes"], rank) == paths(
            alone.snapshot()["nodes"], rank
        )
    assert any(record["v"] for record in records)
