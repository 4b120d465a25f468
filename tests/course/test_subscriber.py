"""A student's subscriber (lesson 15) in the engine's place: the same tree, and sentences where it breaks."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lessons.grading.spec import find_folder, load_file
from lessons.grading.subscriber import ORDER, PARTS, Block, Subscriber, SubscriberBroke, student_subscriber
from minirad.fleet import wire
from minirad.fleet.order import PATIENCE, SILENCE
from minirad.fleet.tree import FleetTree
from minirad.fleet.wire import Batch, Cleared, Removed, Stored, encode

LESSON = find_folder("15")
SOLUTIONS = ("solution.py", "alternative.py", "alternative_2.py")
hidden = load_file(LESSON / "hidden.py")


def written(tmp_path: Path, *names: str, source: str = "solution.py", old: str = "", new: str = "") -> Path:
    """A file in which these functions are written, with one change."""
    text = (LESSON / source).read_text(encoding="utf-8")
    assert old in text
    stubs = "".join(
        f"\n\ndef {name}(*a):\n    raise NotImplementedError('todo')\n" for name in PARTS if name not in names
    )
    path = tmp_path / "exercise.py"
    path.write_text(text.replace(old, new) + stubs, encoding="utf-8")
    return path


def server_events(seed: str, requests: int = 25) -> list[wire.Record]:
    rng = Random(seed)
    servers = [make(rng) for make in hidden.SERVERS]
    late = servers[1]
    for _ in range(4):
        late()
    return [event for _ in range(requests) for server in servers for event in server()]


# ---------------------------------------------------------------------- the tree


@pytest.mark.parametrize("source", SOLUTIONS)
@pytest.mark.parametrize("names", [("store", "remove"), ("store",), ("remove",)])
def test_the_tree_is_the_same_whoever_keeps_the_blocks(
    tmp_path: Path, source: str, names: tuple[str, ...]
) -> None:
    found = student_subscriber(written(tmp_path, *names, source=source))
    mine, ours = FleetTree(found.blocks), FleetTree()
    for tick, event in enumerate(server_events(source)):
        if not hidden.may_be_told(event, ours.rank(0)):
            continue
        for tree in (mine, ours):
            tree.take(0, event)
            tree.changes(tick)
            tree.check()
        assert held(mine) == held(ours)
    assert held(ours)
    for tree in (mine, ours):
        tree.clear(0)
        tree.changes(0)
    assert mine.nodes == {} == ours.nodes


def held(tree: FleetTree) -> set[tuple[Any, ...]]:
    """The blocks of rank 0: name, parent, tokens, namespace, media, whether it was told."""
    return {
        (block.hash, block.parent, block.tokens, block.space, block.media, block.seen)
        for block in tree.rank(0).blocks.values()
    }


def test_a_wrong_store_is_drawn_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, "store", "remove", old="        parent = name\n", new="")
    tree = FleetTree(student_subscriber(path).blocks)
    tree.take(0, Stored((1, 2, 3), None, ((1,), (2,), (3,)), 1))
    tree.changes(1)
    tree.check()
    assert sorted(node["parent"] for node in tree.snapshot()["nodes"]) == [0, 0, 0]


STORED = Stored((11, 12), None, ((1,), (2,)), 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("        block.media.add(event.medium)\n", "        block.median.add(1)\n",
         r"your store raised AttributeError: .*\(exercise.py, line \d+\), at BlockStored of 2 blocks in GPU"),
        ("block.media.add(event.medium)", "pass", "your store left block 12 as a hole that nothing follows"),
        ("set(), True)", "[], True)", "your store raised AttributeError: 'list' object"),
        ("Block(parent, event.tokens[at]", "Block(7, event.tokens[at]",
         "your store left block 11, which follows 7, and that is not in blocks"),
        ("Block(parent, event.tokens[at]", "Block(name, event.tokens[at]",
         "your store left blocks that follow themselves"),
        ("        block.media.add(event.medium)\n", "        blocks[name] = 3\n",
         r"your store raised AttributeError|your store left block 11 as 3"),
        ("block.media.add(event.medium)", "block.media.add(None)", "your store left block 11 as Block"),
    ],
)  # fmt: skip
def test_what_is_no_forest_is_a_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    forest = student_subscriber(written(tmp_path, "store", old=old, new=new)).blocks()
    with pytest.raises(SubscriberBroke, match=words):
        forest.take(STORED)


def test_what_the_lesson_leaves_out_the_engine_does(tmp_path: Path) -> None:
    """Pairs of tokens, and another cache group."""
    found = student_subscriber(written(tmp_path, *PARTS))
    batch = Batch(1.0, (Stored((1,), None, ((1, 2),), 1, pairs=True), Removed((5,), other_group=True)), 0)
    assert found.decoder().decode(encode(batch)) == wire.decode(encode(batch))
    forest = found.blocks()
    for event in (*batch.events, Removed((1,)), Cleared()):
        forest.take(event)
    assert not forest.blocks and forest.other_groups == 1


# ---------------------------------------------------------------------- reading


def test_a_message_is_read_by_the_student(tmp_path: Path) -> None:
    found = student_subscriber(written(tmp_path, "read_batch"))
    for seed in ("a", "b"):
        events = tuple(event for event in server_events(seed, 6))
        payload = encode(Batch(2.0, events, 1))
        assert found.decoder().decode(payload) == wire.decode(payload)
    with pytest.raises(wire.WireError):
        found.decoder().decode(b"\xc1")


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (
            "return None",
            r"returned None, which is no \(time, list\), at a message of \d+ bytes with 1 events",
        ),
        ("return 'now', []", "returned the time 'now'"),
        ("return 1.0, [3]", "returned 3: no Stored, Removed or Cleared"),
        ("return 1.0, [Removed([1])]", "hashes must be a tuple"),
        ("return 1.0, [Stored((1,), None, (1,), 1)]", "the tokens of a block must be a tuple of ints"),
        ("return 1.0, [Stored((1,), None, (), 1, None)]", "medium must be a text"),
        ("return 1.0, [Stored((1,), None, (), 1, spaces=('a',))]", "the space of a block"),
    ],
)
def test_what_is_no_record_is_a_sentence(tmp_path: Path, new: str, words: str) -> None:
    path = written(
        tmp_path, "read_batch", old="    sent = msgspec.msgpack.decode(payload)\n", new=f"    {new}\n"
    )
    with pytest.raises(SubscriberBroke, match=f"your read_batch .*{words}"):
        student_subscriber(path).decoder().decode(encode(Batch(1.0, (STORED,), 0)))


# ---------------------------------------------------------------------- order


class Told:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def deliver(self, seq: int, payload: bytes, replayed: bool) -> None:
        self.log.append(("deliver", seq, payload, replayed))

    def gap(self, first: int, last: int, why: str) -> None:
        self.log.append(("gap", first, last))

    def restart(self, why: str) -> None:
        self.log.append(("restart",))

    def trouble(self, why: str) -> None:
        self.log.append(("trouble",))

    def ask(self, start: int) -> None:
        self.log.append(("ask", start))


def played(found: Subscriber | None, seed: str) -> list[tuple[Any, ...]]:
    """A publisher that loses and forgets, with silences and answers that do not come."""
    from minirad.fleet.order import Order

    told, rng, now, sent, epoch = Told(), Random(seed), 0.0, 0, 0
    order = found.order(told, True) if found is not None else Order(told, True)
    order.connected(now)
    for _ in range(300):
        now += rng.choice((0.01, 0.1, SILENCE))
        move = rng.random()
        if move < 0.4:
            if rng.random() < 0.7:
                order.live(sent, b"%d of %d" % (sent, epoch), now)
            sent += 1
        elif move < 0.7 and order.asking:
            start = next(line[1] for line in reversed(told.log) if line[0] == "ask")
            for number in range(max(start, sent - 4), sent):
                if order.asking:
                    order.answer(number, b"%d of %d" % (number, epoch), now)
            order.answers_end(now)
        elif move < 0.73:
            sent, epoch = 0, epoch + 1
        elif move < 0.77:
            order.disconnected()
            order.connected(now)
        elif move < 0.8:
            now += PATIENCE
        order.tick(now)
    assert {line[0] for line in told.log} >= {"deliver", "gap", "restart", "trouble", "ask"}
    return [line for line in told.log if line[0] != "trouble"]


@pytest.mark.parametrize("source", SOLUTIONS)
def test_the_order_is_the_same_whoever_finds_it(tmp_path: Path, source: str) -> None:
    found = student_subscriber(written(tmp_path, *ORDER, source=source))
    for seed in "abc":
        assert played(found, seed) == played(None, seed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    rank.deliver(seq, payload)\n", "    rank.deliver(seq - 9, payload)\n",
         r"your live, at live message 0, called rank.deliver\(-9\) after message -1"),
        ("    rank.deliver(seq, payload)\n", "    rank.lost(3, 1)\n", r"called rank.lost\(3, 1\)"),
        ("    rank.ask(max(rank.last, 0))", "    rank.ask('all')",
         r"your connected, at a connection, called rank.ask\('all'\)"),
        ("    rank.ask(max(rank.last, 0))", "    rank.last = None", "your connected left rank.last None"),
        ("    rank.ask(max(rank.last, 0))", "    rank.query(0)", "your connected raised AttributeError"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_a_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    order = student_subscriber(written(tmp_path, *ORDER, old=old, new=new)).order(Told(), "ask" in old)
    with pytest.raises(SubscriberBroke, match=words):
        order.connected(0.0)
        order.live(0, b"", 0.0)


# ---------------------------------------------------------------------- the file, the page


def test_a_line_says_what_is_used_and_what_is_not_written(tmp_path: Path) -> None:
    line = student_subscriber(written(tmp_path, "store", "live")).line
    assert line == (
        "your subscriber: store; not written yet, so the engine's own: read_batch, remove, connected, "
        "answer, answered (of connected, live, answer, answered all are needed)"
    )
    assert student_subscriber(LESSON / "solution.py").line == f"your subscriber: {', '.join(PARTS)}"


def test_nothing_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from viz.live import main

    file = str(LESSON / "exercise.py")
    assert main(["--connect", "tcp://127.0.0.1:1", "--subscriber", file]) == 2
    assert "nothing is written yet that could follow a server" in capsys.readouterr().err
    assert main(["--connect", "tcp://127.0.0.1:1", "--subscriber", str(written(tmp_path, "live"))]) == 2
    assert "of connected, live, answer, answered all are needed" in capsys.readouterr().err
    assert main(["--subscriber", file]) == 2
    assert "goes with --connect, --bind or --server" in capsys.readouterr().err
    assert main(["--connect", "tcp://127.0.0.1:1", "--subscriber", "no/such.py"]) == 2
    assert "is not there" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("names", [PARTS, ("store", "remove"), ORDER])
def test_the_page_shows_what_the_engine_holds(
    tmp_path: Path, make_engine: Any, names: tuple[str, ...]
) -> None:
    """Our publisher, sockets, the page's source with a student's parts: the tree of the engine's follower."""
    from minirad.config import SamplingParams
    from minirad.fleet.endpoints import ServerInfo
    from minirad.fleet.publish import Publisher
    from viz.web.stream import FleetSource

    engine = make_engine(kv_tokens=40, page_size=2)
    with Publisher(engine, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        engine.generate([[5, 6, 7, 8, 9]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        info = ServerInfo([publisher.endpoint], [publisher.replay or ""], "", 0)
        found = student_subscriber(written(tmp_path, *names))
        sources = [FleetSource(info, subscriber=each) for each in (found, None)]
        for source in sources:
            source.start()
        for tokens in ([5, 6, 7, 20, 21, 22], [30] * 12, [40] * 14, [5, 6, 7, 8, 9, 10]):
            engine.generate([tokens], SamplingParams(max_new_tokens=3, ignore_eos=True))
        assert publisher.flush(60)
        until = time.monotonic() + 60
        while time.monotonic() < until and [s._flight.tree.ranks.get(0) is None for s in sources] != [
            False,
            False,
        ]:
            time.sleep(0.05)
        for source in sources:
            assert source._follower.catch_up(60)
            source.stop()
            source.join(60)
            assert not source.is_alive() and not source.error
    trees = [held(source._flight.tree) for source in sources]
    blocks = engine.cache.evictable_size // 2
    assert trees[0] == trees[1] and len(trees[0]) == blocks > 3
    assert any("your subscriber" in notice for notice in sources[0].run_now.notices)


@pytest.mark.slow
def test_the_page_ends_with_the_sentence(tmp_path: Path, make_engine: Any) -> None:
    from minirad.config import SamplingParams
    from minirad.fleet.endpoints import ServerInfo
    from minirad.fleet.publish import Publisher
    from viz.web.stream import FleetSource

    engine = make_engine(kv_tokens=40)
    found = student_subscriber(written(tmp_path, "store", old="block.media.add(event.medium)", new="1 / 0"))
    with Publisher(engine, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        engine.generate([[5, 6, 7, 8, 9]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        source = FleetSource(
            ServerInfo([publisher.endpoint], [publisher.replay or ""], "", 0), subscriber=found
        )
        source.start()
        source.join(60)
    assert source.error.startswith(
        "your store raised ZeroDivisionError: division by zero (exercise.py, line "
    )


def test_a_block_is_what_the_lesson_says() -> None:
    assert (
        repr(Block(None, (), (), set(), False))
        == "Block(parent=None, tokens=(), space=(), media=set(), seen=False)"
    )
