"""Streams of several ranks, in any order: forests and the merged tree equal what is put together naively."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.fleet import blocks as blocks_module
from minirad.fleet.blocks import Block, RankBlocks
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered, Gap, Restart
from minirad.fleet.tree import FleetTree
from minirad.fleet.wire import Batch, Cleared, Hash, Record, Removed, Stored
from minirad.observe.event import Event
from minirad.observe.fleet_events import (
    empty_state,
)
from minirad.observe.reading import check_state
from minirad.observe.replay import CheckedReplay, Frame
from minirad.observe.snapshot import State

RANKS = 3
SPACES: tuple[tuple[str, ...], ...] = ((), ("a",), ("b", "a"))
MEDIA = ("GPU", "CPU")
Path = tuple[int, ...]


def name_of(rank: int, path: Path, space: int) -> int:
    """Ranks 0 and 1 hash alike, rank 2 with a seed of its own; -1 is what rank 0 has for an empty path."""
    number = 1
    for digit in path:
        number = number * 4 + digit + 1
    return number * 10 + space + (5 if rank == 2 else 0)


def tokens_of(digit: int, pairs: bool) -> tuple[int, ...]:
    return (digit, 7, digit, 8) if pairs else (digit, 7)


# ------------------------------------------------------------------ streams

# Few prompts, so that streams meet: a long one, and others that leave it or have nothing of it.
PROMPTS: tuple[Path, ...] = ((0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 2), (0, 1), (1, 0, 0))
paths = st.builds(
    lambda prompt, size: prompt[:size], st.sampled_from(PROMPTS[:1] * 4 + PROMPTS), st.integers(1, 6)
)
ranks, spaces = st.integers(0, RANKS - 1), st.sampled_from((0, 0, 0, 0, 0, 0, 0, 1, 2))
media = st.sampled_from((*MEDIA, "GPU", "GPU"))


def stored(
    rank: int, path: Path, start: int, space: int, medium: str, pairs: bool, silent: bool
) -> tuple[int, Record]:
    """Blocks path[start:] of a prompt; silent: a copy without its tokens."""
    start = min(start, len(path) - 1)
    names = [name_of(rank, path[: at + 1], space) for at in range(start, len(path))]
    parent = name_of(rank, path[:start], space) if start else None
    tokens = tuple(tokens_of(digit, pairs) for digit in path[start:])
    own = (SPACES[space],) * len(names) if space != 2 or not start else ((),) * len(names)
    return rank, Stored(
        tuple(names), None if silent else parent, () if silent else tokens, 2, medium, pairs and not silent,
        own if any(own) else (),
    )  # fmt: skip


def removed(rank: int, several: list[Path], space: int, medium: str) -> tuple[int, Record]:
    return rank, Removed(tuple(name_of(rank, path, space) for path in several), medium)


def odd(rank: int, path: Path, other: Path, digit: int) -> tuple[int, Record]:
    """A block told as something else, perhaps below one that is below itself."""
    return rank, Stored((name_of(rank, path, 0),), name_of(rank, other, 0), (tokens_of(digit, False),), 2)


def one_of(many: int) -> st.SearchStrategy[bool]:
    """True once in so many times."""
    return st.sampled_from((False,) * (many - 1) + (True,))


told = st.one_of(
    st.builds(
        stored, ranks, paths, st.sampled_from((0, 0, 0, 1, 2, 3, 4, 5)), spaces, media, one_of(12), one_of(6)
    ),
    st.builds(removed, ranks, st.lists(paths, min_size=1, max_size=4), spaces, media),
    st.one_of(
        st.builds(removed, ranks, st.lists(paths, min_size=1, max_size=2), spaces, media),
        st.builds(odd, ranks, paths, paths, st.integers(0, 2)),
        st.builds(lambda rank: (rank, Cleared()), ranks),
    ),
)  # fmt: skip
frames = st.lists(st.lists(told, min_size=1, max_size=5), min_size=1, max_size=12)


# ------------------------------------------------------------------ naive oracles


class NaiveRank:
    """A rank's blocks in dictionaries; what is of no use any more is looked for after each event."""

    def __init__(self) -> None:
        self.content: dict[Hash, tuple[Hash | None, tuple[int, ...], int, bool, tuple[str, ...]]] = {}
        self.sure: set[tuple[Hash, str]] = set()
        self.left: dict[tuple[Hash, str], int] = {}  # told, and not removed

    def parent(self, name: Hash) -> Hash | None:
        return self.content[name][0] if name in self.content else None

    def line(self, name: Hash | None) -> list[Hash]:
        """A block and all above it, the first of the prompt first."""
        found: list[Hash] = []
        while name is not None:
            assert name not in found, "a circle"
            found.append(name)
            name = self.parent(name)
        return found[::-1]

    def space(self, name: Hash) -> tuple[str, ...]:
        parts: dict[str, None] = {}
        for each in self.line(name):
            parts.update(dict.fromkeys(self.content[each][4] if each in self.content else ()))
        return tuple(parts)

    def is_there(self, name: Hash) -> bool:
        return any(count for (each, _), count in self.left.items() if each == name)

    def take(self, event: Record) -> None:
        if isinstance(event, Cleared):
            self.__init__()  # type: ignore[misc]
        elif isinstance(event, Removed):
            for name in event.hashes:
                if self.left.get((name, event.medium)):
                    self.left[name, event.medium] -= 1
                    self.sure.discard((name, event.medium))
                self.tidy()
        else:
            before = event.parent
            for at, name in enumerate(event.hashes):
                self.tell(event, at, name, before)
                self.sure.add((name, event.medium))
                self.left[name, event.medium] = self.left.get((name, event.medium), 0) + 1
                self.tidy()
                before = name

    def tell(self, event: Stored, at: int, name: Hash, before: Hash | None) -> None:
        own = event.spaces[at] if event.spaces else ()
        known = self.content.get(name)
        if not event.tokens:
            if known is None:
                self.set(name, (before, (), event.block_size, False, ()))
            return
        tokens = event.tokens[at]
        if known is not None and known[1] and self.is_there(name):
            return
        if known is not None and (known[0], known[1], known[3]) == (before, tokens, event.pairs):
            was = self.space(name)
            above = () if before is None else self.space(before)
            if was == tuple(dict.fromkeys((*above, *own))):
                return
        self.set(name, (before, tokens, len(tokens) // (2 if event.pairs else 1), event.pairs, own))

    def set(self, name: Hash, content: Any) -> None:
        before = content[0]
        if before is not None and name in self.line(before):
            content = (None, *content[1:])
        self.content[name] = content

    def tidy(self) -> None:
        self.left = {key: count for key, count in self.left.items() if count}
        needed = {each for name, _ in self.left for each in self.line(name)}
        self.content = {name: content for name, content in self.content.items() if name in needed}

    def everything(self) -> dict[Hash, Any]:
        """All blocks, holes and placeholders: parent, tokens, size, pairs, space, seen, media, maybe."""
        names = {each for name, _ in self.left for each in self.line(name)}
        none = (None, (), 0, False, ())
        return {
            name: (
                *self.content.get(name, none)[:4], self.space(name), name in self.content,
                {medium for each, medium in self.sure if each == name},
                {medium for each, medium in self.left if each == name and (name, medium) not in self.sure},
            )
            for name in names
        }  # fmt: skip


def forest(blocks: RankBlocks) -> dict[Hash, Any]:
    return {
        b.hash: (b.parent, b.tokens, b.size, b.pairs, b.space, b.seen, set(b.media), set(b.maybe))
        for b in blocks.blocks.values()
    }


def content_of(block: Block) -> tuple[Any, ...]:
    """What makes two ranks' blocks the same one, below the same parent."""
    known = (block.tokens, block.pairs) if block.tokens else (block.hash, block.seen, block.size)
    return (*known, block.space)


def compressed(ranks: dict[int, RankBlocks]) -> list[Any]:
    """The merged tree put together from nothing, as comparable nodes."""
    users: dict[tuple[Any, ...], dict[int, list[Block]]] = {}
    for rank, known in ranks.items():
        for block in known.blocks.values():
            path: list[Any] = []
            at: Block | None = block
            while at is not None:
                path.append(content_of(at))
                at = at.above
            users.setdefault(tuple(reversed(path)), {}).setdefault(rank, []).append(block)
    below: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path_ in users:
        below.setdefault(path_[:-1], []).append(path_)

    def held(path: tuple[Any, ...]) -> dict[str, str]:
        found = {}
        for rank in sorted(users[path]):
            sure = {m for block in users[path][rank] for m in block.media}
            maybe = {m for block in users[path][rank] for m in block.maybe}
            if sure or maybe:
                found[str(rank)] = "+".join(sorted(sure)) or "?"
        return found

    def kind(path: tuple[Any, ...]) -> Any:
        block = next(iter(users[path].values()))[0]
        return held(path), block.seen, block.space, block.pairs, bool(block.tokens)

    def node(path: tuple[Any, ...], above: Any) -> Iterable[Any]:
        run = [path]
        while kind(path)[1] and len(below.get(run[-1], ())) == 1 and kind(below[run[-1]][0]) == kind(path):
            run.append(below[run[-1]][0])
        whole = [next(iter(users[each].values()))[0] for each in run]
        own = (
            above, [t for block in whole for t in block.tokens], sum(block.size for block in whole), len(run),
            whole[0].pairs, whole[0].space_text, held(path), whole[0].seen,
        )  # fmt: skip
        yield own
        for each in below.get(run[-1], ()):
            yield from node(each, own)

    return sorted((each for path in below.get((), ()) for each in node(path, None)), key=repr)


def comparable(tree: State) -> list[Any]:
    """The nodes of a state's tree without their numbers and ticks."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    found: dict[int, Any] = {0: None}

    def of(number: int) -> Any:
        if number not in found:
            n = nodes[number]
            found[number] = (
                of(n["parent"]), n["tokens"], n["units"], n["blocks"], n["pairs"],
                tree["spaces"][n["namespace"]], n["held"], n["seen"],
            )  # fmt: skip
        return found[number]

    return sorted((of(number) for number in nodes), key=repr)


def sums_of(tree: State) -> dict[int, Any]:
    sums: dict[int, Any] = {rank: {"media": {}, "maybe": 0} for rank in range(RANKS)}
    for node in tree["nodes"]:
        for rank, media in node["held"].items():
            own = sums[int(rank)]
            if media == "?":
                own["maybe"] += node["blocks"]
                continue
            for medium in media.split("+"):
                own["media"][medium] = own["media"].get(medium, 0) + node["blocks"]
    return sums


# ------------------------------------------------------------------ everything together


class Stream:
    """A FleetTree with a replay that is moved on by its events, and naive forests beside them."""

    def __init__(self) -> None:
        self.tree, self.replay = FleetTree(), CheckedReplay(empty_state(2))
        self.naive = [NaiveRank() for _ in range(RANKS)]
        self.tick = 0
        for rank in range(RANKS):
            self.tree.rank(rank)

    def take(self, frame: list[tuple[int, Record]]) -> list[Event]:
        for rank, event in frame:
            self.tree.take(rank, event)
            self.naive[rank].take(event)
            assert forest(self.tree.ranks[rank]) == self.naive[rank].everything()
        self.tick += 1
        events = self.tree.changes(self.tick)
        for event in events:
            assert event.describe()
            self.replay.apply(event)
        self.check()
        return events

    def check(self) -> None:
        self.tree.check()
        state, own = self.replay.snapshot(), self.tree.snapshot()
        check_state(state)
        assert state["tree"]["nodes"] == own["nodes"] and state["tree"]["spaces"] == own["spaces"]
        assert comparable(state["tree"]) == compressed(self.tree.ranks)
        kept = {rank["rank"]: {n: rank[n] for n in ("media", "maybe")} for rank in state["tree"]["ranks"]}
        assert own["sums"] == sums_of(state["tree"])
        assert all(own["sums"][rank] == sums for rank, sums in kept.items())
        assert all(
            list(each.maybe) == [b.hash for b in each.maybe.values()]
            and set(each.maybe) == {b.hash for b in each.blocks.values() if b.maybe and not b.media}
            for each in self.tree.ranks.values()
        )

    def is_empty(self) -> bool:
        """Nothing is kept of what was."""
        tree = self.tree
        forests = [blocks.blocks or blocks.maybe for blocks in tree.ranks.values()]
        return not any((*forests, tree.nodes, tree._top, tree._dirty, tree._space_of[()][1])) and (
            len(tree._space_of) == 1 and not self.replay.snapshot()["tree"]["nodes"]
        )


@settings(max_examples=100, deadline=None)
@given(frames)
def test_forests_and_the_merged_tree_equal_naive_ones(stream: list[list[tuple[int, Record]]]) -> None:
    told = Stream()
    for frame in stream:
        told.take(frame)
    told.take([(rank, Cleared()) for rank in range(RANKS)])
    assert told.is_empty()


batches = st.lists(
    st.one_of(
        st.lists(told, max_size=5),
        st.builds(Restart, ranks, st.just("it came back")),
        st.builds(lambda rank, first: Gap(rank, first, first + 2, "lost"), ranks, st.integers(0, 9)),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(batches, st.floats(0, 0.3))
def test_a_flight_of_any_stream_is_a_recording(stream: list[Any], step: float) -> None:
    flight, now, trees = Flight(block_size=2), 0.0, [NaiveRank() for _ in range(RANKS)]
    for seq, each in enumerate(stream):
        now += step
        if isinstance(each, Restart):
            trees[each.rank] = NaiveRank()
        if not isinstance(each, list):
            flight.take(each, now)
            continue
        for rank in range(RANKS):
            own = tuple(event for other, event in each if other == rank)
            flight.take(Delivered(rank, seq, Batch(0.0, own, rank), False), now)
            for event in own:
                trees[rank].take(event)
    flight.close(now)
    recording = flight.recording
    recording.check()
    assert [Frame.from_json(frame.to_json()) for frame in recording] == recording.frames
    state = recording.state(len(recording) - 1)
    assert state["tree"]["nodes"] == flight.tree.snapshot()["nodes"]
    assert [forest(flight.tree.rank(rank)) for rank in range(RANKS)] == [t.everything() for t in trees]


# ------------------------------------------------------------------ large and odd streams


def chain_of(first: int, size: int) -> Stored:
    names = range(first, first + size)
    return Stored(tuple(names), first - 1 if first else None, tuple((name % 9, 7) for name in names), 2)


def told_by(tree: FleetTree, replay: CheckedReplay, *events: Record, rank: int = 0) -> list[str]:
    """The kinds of events of one frame, which the replay takes."""
    for event in events:
        tree.take(rank, event)
    found = tree.changes(1)
    for each in found:
        replay.apply(each)
    tree.check()
    assert replay.snapshot()["tree"]["nodes"] == tree.snapshot()["nodes"]
    return [type(each).__name__ for each in found]


def test_a_deep_chain_is_one_node_whatever_becomes_of_it() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    size = 10_000
    assert told_by(tree, replay, chain_of(0, size)) == ["NodeStored"]
    assert told_by(tree, replay, chain_of(0, size), rank=1) == ["NodeHeld"]
    assert told_by(tree, replay, chain_of(size, 5)) == ["NodeStored"]  # only one of them has it
    assert told_by(tree, replay, chain_of(size, 5), rank=1) == ["NodeHeld", "NodesJoined"]
    assert told_by(tree, replay, Removed((size + 4,))) == ["NodeDivided", "NodeLost"]
    assert told_by(tree, replay, Removed((5000,))) == ["NodeDivided", "NodeDivided", "NodeLost"]
    assert told_by(tree, replay, Removed((size + 4,)), rank=1) == ["NodeLeft"]
    assert told_by(tree, replay, Cleared(), rank=1).count("NodeLost") == 3
    node = tree.nodes[next(iter(tree.nodes))]
    assert [n.held for n in tree.nodes.values()].count(()) == 1 and node.blocks > 1  # a hole in its middle
    assert told_by(tree, replay, Removed(tuple(range(size + 4)))) == ["NodeLeft"] * 3
    assert not tree.nodes and not tree.ranks[0].blocks and tree.ranks[0].unknown_removals == 1


def test_a_run_is_divided_and_joined_at_every_second_block_with_its_snapshots_as_they_were() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    told_by(tree, replay, chain_of(0, 12))
    whole = replay.snapshot()["tree"]["nodes"]
    kept = [(whole, [list(node["tokens"]) for node in whole])]
    removals: list[Record] = [Removed((name,)) for name in range(0, 12, 2)]
    again: list[Record] = [
        Stored((name,), name - 1 if name else None, ((name % 9, 7),), 2) for name in range(10, -1, -2)
    ]
    for event in (*removals, *again):
        told_by(tree, replay, event)
        nodes = replay.snapshot()["tree"]["nodes"]
        kept.append((nodes, [list(node["tokens"]) for node in nodes]))
    assert [node["tokens"] for node in nodes] == kept[0][1]
    assert all([node["tokens"] for node in nodes] == tokens for nodes, tokens in kept)


def test_a_node_whose_end_leaves_keeps_its_number() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    told_by(tree, replay, chain_of(0, 10), Stored((100,), 9, ((8, 7),), 2), Stored((101,), 9, ((9, 7),), 2))
    (chain,) = (node.id for node in tree.nodes.values() if node.blocks == 10)
    kinds = told_by(tree, replay, Removed((100, 101, 9, 8)))
    assert kinds == ["NodeLeft", "NodeLeft", "NodeShortened"]
    assert [(node.id, node.blocks, node.units) for node in tree.nodes.values()] == [(chain, 8, 16)]
    assert told_by(tree, replay, Removed((7,)), Stored((200,), 6, ((3, 8),), 2)) == [
        "NodeShortened",
        "NodeExtended",
    ]
    assert told_by(tree, replay, chain_of(0, 7), rank=1) == ["NodeDivided", "NodeHeld"]
    assert list(replay.tree["ranks"][0]["media"].items()) == [("GPU", 8)]


def test_a_chain_that_is_told_from_its_end_is_moved_and_not_told_anew() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    size = 300
    for at in range(size - 1, -1, -1):
        kinds = told_by(tree, replay, chain_of(at, 1))
        if 0 < at < size - 1:  # a placeholder above, the block below it, what is known below that
            assert kinds == ["NodeStored", "NodeStored", "NodeMoved", "NodeLeft", "NodesJoined"]
    (node,) = tree.nodes.values()
    assert node.blocks == size and len(replay.nodes) == 1


def test_orphans_of_two_ranks_meet_under_one_place_and_leave_it_one_by_one() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    assert told_by(tree, replay, chain_of(5, 3)) == ["NodeStored", "NodeStored"]
    assert told_by(tree, replay, chain_of(5, 3), rank=1) == ["NodeHeld"]
    kinds = told_by(tree, replay, Stored((4,), None, ((4, 7),), 2))
    assert sorted(kinds) == ["NodeLost", "NodeStored"], "one run of four blocks; the other rank waits"
    kinds = told_by(tree, replay, Stored((4,), None, ((4, 7),), 2), rank=1)
    assert sorted(kinds) == ["NodeHeld", "NodeLeft", "NodeLeft"] and len(tree.nodes) == 1


def test_a_rank_that_clears_much_is_told_by_runs() -> None:
    tree = FleetTree()
    for first in range(0, 40_000, 100):
        names = range(first, first + 100)
        tree.take(0, Stored(tuple(names), None, tuple((name, 7) for name in names), 2))
    assert len(tree.changes(1)) == 400
    tree.clear(0)
    assert [type(each).__name__ for each in tree.changes(2)] == ["NodeLeft"] * 400
    tree.check()
    assert not tree._top and not tree.sums[0]["media"]


def test_namespaces_give_their_numbers_back() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    for at in range(20):
        told_by(tree, replay, Stored((at,), None, ((1, 7),), 2, spaces=((f"tenant {at}",),)))
        if at >= 3:
            told_by(tree, replay, Removed((at - 3,)))
    assert len(tree.spaces) == 5 and set(tree.spaces) > {f"tenant {at}" for at in (17, 18, 19)}
    names = {replay.tree["spaces"][node["namespace"]] for node in replay.nodes.values()}
    assert names == {f"tenant {at}" for at in (17, 18, 19)}


def test_what_may_be_there_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_MAYBE", 10)
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    for at in range(30):
        told_by(
            tree, replay, *(Stored((at,), None, ((at, 7),), 2),) * 2, Removed((at,))
        )  # told twice, removed once
    rank = tree.ranks[0]
    assert list(rank.maybe) == list(range(20, 30)) == list(rank.blocks)
    assert {text for node in tree.nodes.values() for _, text in node.held} == {"?"}
    assert sorted(rank.as_json()["ambiguous"]) == [str(at) for at in range(20, 30)]
    assert not rank.as_json()["blocks"] and rank.as_json()["duplicates"] == 30
    told_by(tree, replay, Stored((25,), None, ((25, 7),), 2))
    assert rank.as_json()["blocks"]["25"]["ambiguous"] and len(rank.maybe) == 9


def test_blocks_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MOST_BLOCKS", 50)
    blocks = RankBlocks()
    blocks.take(chain_of(0, 80))
    blocks.take(chain_of(1000, 2))
    assert len(blocks.blocks) <= 50 and blocks.too_many > 30
    blocks.take(Removed(tuple(range(80))))
    assert not blocks.blocks


def test_blocks_that_would_be_their_own_ancestors_are_not() -> None:
    blocks = RankBlocks()
    blocks.take(Stored((1, 2, 1), None, ((1, 7),) * 3, 2))
    blocks.take(Stored((5,), 5, ((5, 7),), 2))
    blocks.take(Stored((6,), 7, ((6, 7),), 2))
    blocks.take(Stored((7,), 6, ((7, 7),), 2))
    parents = {name: block["parent"] for name, block in blocks.as_json()["blocks"].items()}
    assert parents == {"1": None, "2": "1", "5": None, "6": "7", "7": None} and blocks.conflicts == 3


def test_a_block_of_other_names_and_equal_tokens_is_one_with_the_first() -> None:
    """Older servers tell no adapter's name: two hashes, one content."""
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    one, two = Stored((1,), None, ((3, 7),), 2), Stored((2,), None, ((3, 7),), 2, "CPU")
    assert told_by(tree, replay, one) == ["NodeStored"]
    assert told_by(tree, replay, two) == ["NodeHeld"]
    assert told_by(tree, replay, Removed((1,))) == ["NodeLost"]
    assert told_by(tree, replay, Removed((2,), "CPU")) == ["NodeLeft"]


def test_media_of_any_name_are_told_in_letters() -> None:
    tree, replay = FleetTree(), CheckedReplay(empty_state(2))
    told_by(tree, replay, Stored((1,), None, ((3, 7),), 2, "<b>+0:?\n" + "x" * 90))
    (node,) = replay.snapshot()["tree"]["nodes"]
    assert node["held"] == {"0": "_b__0___" + "x" * 24}
    check_state(replay.snapshot())
