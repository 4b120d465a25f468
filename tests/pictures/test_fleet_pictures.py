"""The page of a stream of other servers: cards with a strip of ranks, one rank alone, hostile texts."""

from __future__ import annotations

import json
import random
import re

import pytest

from minirad.fleet import wire
from minirad.fleet.endpoints import ServerInfo
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered
from minirad.fleet.tree import FleetTree
from minirad.observe import fleet_events as fe
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from viz.draw import fleet as cards
from viz.draw import tree
from viz.live import Replay, main
from viz.notebook.stepper import Stepper
from viz.trace import Trace, ids_as_text
from viz.view import fleet
from viz.web import stream
from viz.web.export import page_data
from viz.web.fleet import FleetPage, short, told_still
from viz.web.routes import _position

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
    return Recording({"minirad": 1, "config": {}, "model": {}, "start": start}, frames)


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
    [fe.NodeHeld(2, 1, "GPU", "CPU+GPU", 1, 3),
     stored(3, 0, ids(40, 8), "0:GPU", tick=3, namespace=1, space="lora-a")],
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


def card(text, node):
    """A node's line of DOT text, as words: fonts and tables left out."""
    line = next(line for line in text.splitlines() if line.startswith(f"n{node} ["))
    return re.sub(r"(<[^>]*>|\s)+", " ", line.partition("label=")[2][1:-2]).strip()


def test_cards_say_who_holds_them(page):
    assert card(dot(page, 3, detail="full"), 2) == "n2 · STORED t 3 8 9 10 11 4 tokens 1 block 0 – 1 D+H"
    assert (
        card(dot(page, 3, detail="compact"), 3)
        == "n3 · NEW 8 tokens 40 41 42 43 4…46 47 space lora-a 0 D 1 –"
    )
    assert card(dot(page, 5, detail="full"), 1) == (
        "n1 · REMOVED t 2 0 1 2 3 4 5 6 7 8 tokens 2 blocks HOLE: nothing below can be hit"
    )
    assert (
        card(dot(page, 6, detail="compact"), 4)
        == "n4 · NEW (tokens not told) NOT SEEN: only told as a parent"
    )
    assert (
        card(dot(page, 6, detail="compact"), 5)
        == "n5 · NEW 4 tokens 80 81 82 83 ?: may be there, told twice 0 ? 1 –"
    )
    assert card(dot(page, 7, detail="full"), 3).startswith("n3 · EVICTED t 3 40 41 42")


def test_a_strip_has_its_colours_and_letters():
    told = ("GPU", "CPU", "CPU+CPU_PINNED+GPU", "DISK", "EXTERNAL", "NFS", "?", "")
    assert [fleet.sign(media) for media in told] == ["D", "H", "D+H", "K", "X", "X", "?", ""]
    assert len({cards.colour(media) for media in ("GPU", "CPU", "CPU+GPU", "DISK", "EXTERNAL", "?", "")}) == 7
    assert cards.grouped({"0": "GPU", "1": "GPU", "2": "GPU", "5": "CPU"}, 8) == "D 0–2 · H 5"
    assert cards.grouped({str(rank): "GPU" for rank in range(17)}, 20) == "D ×17"


@pytest.mark.parametrize("detail", tree.DETAILS)
def test_a_state_that_knows_no_ranks_is_drawn(detail):
    state = started(0)
    state["tree"]["nodes"] = grown_nodes({1: (0, [1, 2, 3, 4], 0, {"0": "GPU"})})
    assert tree.svg(tree.dot_text(view_of(state), ids_as_text, tree.Options(detail=detail)))


@pytest.mark.parametrize(("ranks", "cells"), [(1, 1), (2, 2), (8, 8), (16, 16), (20, 2)])
def test_more_ranks_than_can_be_read_are_counted(ranks, cells):
    state = started(ranks)
    state["tree"]["nodes"] = grown_nodes(
        {1: (0, [1, 2, 3, 4], 0, {str(r): "GPU" for r in range(0, ranks, 2)})}
    )
    text = tree.dot_text(view_of(state), ids_as_text, tree.Options(detail="full"))
    assert text.count("BGCOLOR=") - 1 == cells  # the card's own is one, too
    assert ("×10" in text) == (ranks == 20)
    assert tree.svg(text)


def test_what_is_wrong_is_one_sentence(page):
    def said(step):
        return page.view("step", step)["fleet"]["wrong"]

    assert said(4) == ""
    assert said(7) == "batches 5 to 7 of rank 0 are lost: the replay buffer no longer holds them"
    state = started(2)
    state["tree"]["ranks"][1].update(state="lost", batches=3)
    assert fleet.wrong(state) == "the connection to rank 1 is lost and is tried again"
    state["tree"]["ranks"][0].update(lost=1)
    assert fleet.wrong(state).endswith("1 batch was lost of rank 0: what they told is not in this picture")
    for row in state["tree"]["ranks"]:
        row.update(state="connecting", batches=0, lost=0)
    assert fleet.wrong(state).startswith("Nothing answers at tcp://h:5557 (and 1 more) yet")


def test_a_stepper_jumps_to_gaps():
    stepper = Stepper(recorded(STORY))
    stepper.first()
    assert stepper.jump("gap") and isinstance(stepper.view.events[1], fe.GapSeen)
    assert not stepper.jump("gap") and stepper.message == "There is no further gap."
    with pytest.raises(ValueError, match="to jump to: split, evict, retract, gap"):
        stepper.jump("foo")


def test_trouble_is_over_when_the_connection_is_there_again():
    away, trouble, gap = fe.RankStateSeen(0, "", "lost"), fe.TroubleSeen(0, "nobody"), fe.GapSeen(0, 1, 2, "")
    here, other = fe.RankStateSeen(0, "", "replaying"), fe.TroubleSeen(1, "nobody")
    assert told_still([away, trouble, gap, other]) == [trouble, gap, other]
    assert told_still([away, trouble, gap, other, here]) == [gap, other]
    assert told_still([here, trouble, fe.RankStateSeen(0, "", "silent")]) == [trouble]


def test_a_page_is_told_of_ranks_in_place_of_a_pool(page):
    meta, view = page.meta("a stream"), page.view("step", 3)
    assert (meta["model"], meta["page_size"], meta["fleet"]["media"]["D"]) == ("", 4, "GPU")
    rows = view["fleet"]["ranks"]
    assert [(row["rank"], row["where"], row["media"]) for row in rows] == [
        (0, "tcp://h:5557", {"D": [4, 16]}), (1, "tcp://h:5558", {"D": [3, 12], "H": [1, 4]}),
    ]  # fmt: skip
    assert view["fleet"]["shares"] == [12, 8]
    assert view["nodes"][2]["held"] == {"1": "D+H"} and view["nodes"][3]["named"] == "lora-a"
    assert (view["pool"], view["requests"], view["quiz"]) == ([], {}, None)
    assert [record["m"] for record in page.frames()][4] == ["evict", "gap"]
    assert [record["v"] for record in page.frames()] == [0, 0, 0, 8, 8, 0, 8]
    with pytest.raises(ValueError, match="there is no rank 7 in this stream: its ranks are 0, 1"):
        page.view("step", 3, rank=7)


def test_one_rank_is_told_of_its_own_alone(page):
    assert page.view("step", 6, rank=1)["say"] == "Nothing of rank 1 changed here"
    lost = page.trace.view("step", 4)
    alone = fleet.alone(lost, 1)
    assert alone.status == {1: "hole", 2: "cached"} and [e.rank for e in alone.events] == [1]
    gone = fleet.alone(page.trace.view("step", 5), 0)
    assert gone.status == {3: "cached", 1: "evicted"} and set(gone.ghosts) == {
        1
    }  # rank 1 needs it: a hole there


def test_nothing_of_a_stream_is_more_than_text(page):
    text = HOSTILE[:1900]
    steps = [
        [fe.TroubleSeen(0, text), stored(1, 0, ids(0, 8), "0:GPU", namespace=1, space=text)],
        [fe.RankStateSeen(1, text, "lost")],
    ]
    hostile = FleetPage(Trace(recorded(steps), lambda tokens: HOSTILE))
    for index in (1, 2):
        view = hostile.view("step", index)
        assert "failed" not in view
        assert "<script" not in view["svg"]
        plain = json.dumps({**view, "svg": ""}, ensure_ascii=False)
        assert not any(sign in plain for sign in "\u202e\x00\x1b")
        assert len(plain) < 20_000
    assert short("a\u202eb" * 900, 20) == "a□ba□ba□ba□ba□ba□ba…"


def test_a_rank_is_asked_for_by_its_number():
    assert _position({"rank": "3"})[-1] == 3
    assert _position({"rank": ""})[-1] is None
    with pytest.raises(ValueError):
        _position({"rank": "3; drop"})


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--connect tcp://h:5557 --workload agents", "--workload with --connect: no engine runs here"),
        ("--connect tcp://h:5557 --bind tcp://*:5557", "--connect and --bind name two streams"),
        ("--connect tcp://h:5557 --replay run.jsonl", "an endpoint is tcp://host:port"),
        ("--connect tcp://*:5557", "one can listen at"),
        ("--connect tcp://h:5557 --steps 3", "--steps 3 goes with --export only"),
        ("--connect tcp://h:5557 --record run.txt", "a file's name must end in .jsonl"),
        ("--connect tcp://h:5557 --tokenizer no/such", "no tokenizer is in such a folder"),
        ("--server http://h --ranks 3", "the server says how many there are"),
        ("--replay tcp://h:5558", "is an endpoint: it goes with --connect"),
        ("--ranks 2", "--ranks 2 goes with --connect"),
        ("--tokenizer x", "--tokenizer x goes with a stream"),
    ],
)
def test_what_does_not_go_together_is_refused(line, sentence, capsys, monkeypatch):
    monkeypatch.setattr(stream, "FleetSource", None)  # no socket is opened
    assert main([*line.split(), "--no-open"]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


def test_a_recorded_stream_is_shown_and_exported(tmp_path, capsys):
    recorded(STORY).save(tmp_path / "run.jsonl")
    assert main(["--replay", str(tmp_path / "run.jsonl"), "--export", str(tmp_path / "run.html")]) == 0
    assert "7 steps" in capsys.readouterr().out
    replay = Replay(Recording.load(tmp_path / "run.jsonl"), "run.jsonl")
    data = page_data(replay.page)
    assert sorted(data["alone"]) == [0, 1] and len(data["alone"][1]["step"]) == 8
    assert {view["rank"] for view in data["alone"][1]["step"].values()} == {1}


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
        leaves = [*[leaf for leaf in leaves if leaf != parent][-20:], number]
    return blocks


def grown_nodes(blocks, size=4):
    """The nodes of these blocks, as a stream's state has them: maximal runs of only children held alike."""
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
            "namespace": blocks[number][2], "lock_ref": 0, "last_access": run[0], "created": run[0],
            "hits": 0, "priority": 0, "held": dict(blocks[number][3]), "seen": True,
        })  # fmt: skip
    return nodes


def state_of(blocks, ranks):
    state = started(ranks)
    state["tree"].update(nodes=grown_nodes(blocks), spaces=["", "lora-a"])
    return state


def view_of(state):
    return Trace(Recording({"minirad": 1, "config": {}, "model": {}, "start": state}), ids_as_text).view(
        "step", 0
    )


def shape(nodes, rank):
    """What matters of nodes: where each run begins and ends, and how this rank holds it."""
    names = ("id", "parent", "tokens", "units", "blocks")
    return sorted([*(node[name] for name in names), node["held"].get(str(rank), "")] for node in nodes)


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
    return Recording({"minirad": 1, "config": {}, "model": {}, "start": start}, frames), own


def paths(nodes, rank):
    """Nodes by the tokens from the root on, wherever they are numbered: with how this rank holds them."""
    by = {node["id"]: node for node in nodes}

    def path(node):
        above = by.get(node["parent"])
        return (*(path(above) if above else ()), tuple(node["tokens"]))

    return sorted((path(node), node["held"].get(str(rank), ""), node["blocks"]) for node in nodes)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_by_chance_is_counted_and_cut_down_as_from_scratch(seed):
    recording, own = streamed(seed)
    page = FleetPage(Trace(recording, ids_as_text))
    records = page.frames()
    for index, record in enumerate(records, start=1):
        anew = fleet.sums(page.trace.view("step", index).state)
        shown = page._fleet(page.trace.view("step", index))
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


def test_a_fold_that_is_opened_shows_its_own_nodes_first():
    view = view_of(state_of(blocks_by_chance(3, 6000, 4), 4))
    folds = tree.plan(view).folds
    lightest = min(folds, key=lambda fold: fold[1])
    for parent in {lightest[0], folds[-1][0]}:
        below = {node["id"] for node in view.nodes.values() if node["parent"] == parent}
        opened = tree.plan(view, tree.Options(opened=frozenset({parent})))
        shown = {node["id"] for node in opened.nodes}
        assert below <= shown if len(below) < 30 else len(below & shown) >= 30
    left = tree.plan(view, tree.Options(opened=frozenset({lightest[0]}))).folds
    assert lightest[1] < 30 and lightest[0] not in {parent for parent, *_ in left}


class Words(stream.FlightSource):
    """A source whose words change while no frame comes."""

    def __init__(self):
        super().__init__("words", "words", ids_as_text)
        self._flight, self.more = Flight(["a"], block_size=4), {"state": "1 of 2 here"}
        self._begin()

    def _wait(self):
        raise AssertionError("its thread is not started")

    def _state(self):
        return self.more["state"], "on"

    def status(self):
        return {**super().status(), **self.more}


@pytest.mark.parametrize(
    "word", [{"state": "2 of 2 here"}, {"serving": {"text": "All is answered."}}, {"route": {"ready": True}}]
)
def test_what_changes_without_a_frame_is_told_once(word):
    source, told = Words(), []
    source._look()
    source.listen(lambda: told.append(source.status()))
    source._look()
    assert told == []
    source.more |= word
    source._look()
    source._look()
    assert told == [source.status()]
    source.run_now.notices.append("R1 was not answered")
    source._look()
    assert [each["notices"] for each in told] == [[], ["R1 was not answered"]]


def test_a_new_chapter_is_a_run_of_its_own():
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    source = stream.FleetSource(ServerInfo(["tcp://127.0.0.1:9"], [], "", 4))  # nobody is there
    source._follower.close()  # which it would tell, whenever its thread has its turn
    try:
        source._flight = flight = Flight(["a"], block_size=4, most_numbers=4000)
        first = source.run_now = source._run_of(1)
        told = []
        source.listen(lambda: told.append(source.status()["run"]))
        for seq in range(300):
            blocks = wire.Stored((seq + 1,), None, (tuple(ids(4 * seq, 4)),), 4)
            batch = wire.Batch(1.0, (blocks, wire.Removed((seq,))), 0)
            flight.take(Delivered(0, seq, batch, False), now=0.2 * seq)
            source._look()
        last = source.run_now
        assert last.number > 2 and len(set(told)) == last.number
        assert told[0] == source.key(first) and told[-1] == source.key(last)
        assert len(first.page.frames()) == len(first.trace)  # who looks at it still can
        view = last.page.view("step", 0)
        assert view["say"] == "What was known when this part of the recording began: 1 node"
        assert [row["batches"] for row in view["fleet"]["ranks"]] == [300 - len(last.trace)]
        assert source.command("step", {}).exception() is not None
    finally:
        source._follower.close()


def test_what_left_hangs_from_the_node_that_its_parent_became_part_of() -> None:
    """Two children of a node; one leaves, so the node and the other become one."""
    flight = Flight(["a"])
    flight.take(
        Delivered(0, 0, wire.Batch(1.0, (wire.Stored((1, 2), None, ((1,), (2,)), 1),), 0), False), 0.0
    )
    flight.take(Delivered(0, 1, wire.Batch(1.0, (wire.Stored((3,), 1, ((3,),), 1),), 0), False), 1.0)
    flight.take(Delivered(0, 2, wire.Batch(1.0, (wire.Removed((3,)),), 0), False), 2.0)
    view = Trace(flight.recording).view()
    (ghost,), (node,) = view.ghosts.values(), view.nodes.values()
    assert (ghost["parent"], node["tokens"], node["parent"]) == (node["id"], [1, 2], 0)
