"""What is told of a stream of KV events: the kinds of event from which the picture of a fleet is made.

An engine of others tells of blocks, and not what became of the nodes of its tree. `FleetTree`
(minirad/fleet/tree.py) draws all ranks as one radix tree and says, in these events, how that tree changes;
each rank's own words (a batch, a gap, a restart) are events beside them. They are kept, replayed and drawn as
our own engine's are, and no engine of ours tells them: they are not in EVENT_TYPES.

A node is a run of blocks of which each has one successor only, and which the same ranks hold in the same
media. `held`: which rank holds it where, as texts "0:GPU", "3:CPU+GPU", "5:?" (it may be there: told twice,
and removed once). Nobody holds a hole: it was removed, and something below it was not. A node that is not
`seen` stands for a parent that was never told: one block of unknown size (`units` 0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minirad.observe.event import Event, Headline, Ints, ReplayState, Word, expect
from minirad.observe.events import listed, node_name, nodes_named
from minirad.observe.snapshot import State

MOST_RANKS = 4096
MOST_UNITS = 1 << 41  # positions of a node: where tokens are not told, no picture has a place for each
MOST_SPACES = 1 << 20
LONGEST_TEXT = 2000  # characters of what a rank, a namespace or a trouble is called
RANK_STATES = ("connecting", "replaying", "live", "silent", "lost")
MAYBE = "?"

_MEDIA = re.compile(r"\?|[A-Za-z0-9_.-]{1,32}(\+[A-Za-z0-9_.-]{1,32}){0,15}", re.ASCII)
_RANK = re.compile(r"0|[1-9]\d{0,3}", re.ASCII)


def counted(count: int, word: str) -> str:
    """1 block, 2 blocks, 1,200 blocks."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def blocks_of(blocks: int, units: int) -> str:
    """3 blocks (48 tokens)."""
    return f"{counted(blocks, 'block')} ({counted(units, 'token')})"


def held_of(texts: Iterable[str]) -> dict[str, str]:
    """ "0:GPU", "3:CPU+GPU" as {"0": "GPU", "3": "CPU+GPU"}."""
    return dict(text.split(":", 1) for text in texts)


def held_texts(held: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """(0, "GPU"), (3, "CPU+GPU") as "0:GPU", "3:CPU+GPU"."""
    return tuple(f"{rank}:{media}" for rank, media in held)


def is_lost(was: str, now: str) -> bool:
    """A medium in which a rank held a node is not among those in which it does now."""
    return not now or (was not in ("", MAYBE) and not set(was.split("+")) <= set(now.split("+")))


def _ranks(numbers: Iterable[int]) -> str:
    """rank 2; ranks 0, 3 and 5."""
    names = [str(number) for number in sorted(set(numbers))]
    return f"rank{'s' * (len(names) != 1)} {listed(names)}"


def _holders(held: Sequence[str]) -> list[int]:
    return [int(text.split(":", 1)[0]) for text in held]


# ------------------------------------------------------------------ the ranks in a state


def new_rank(rank: int, where: str = "") -> State:
    """What a state says of a rank of which nothing was told yet."""
    return {
        "rank": rank, "where": where, "state": "connecting", "seq": -1, "batches": 0, "replayed": 0,
        "lost": 0, "unknown": 0, "media": {}, "maybe": 0,
    }  # fmt: skip


def rank_state(state: ReplayState, rank: int) -> State:
    """A state's record of a rank, to be changed; a new one is made where nothing was told of it yet."""
    ranks: list[State] = state.tree["ranks"]
    at = next((at for at, known in enumerate(ranks) if known["rank"] >= rank), len(ranks))
    if at == len(ranks) or ranks[at]["rank"] != rank:
        ranks.insert(at, new_rank(rank))
    return ranks[at]


def count_blocks(record: State, media: str, blocks: int) -> None:
    """So many blocks more (negative: fewer) are in these media of a rank."""
    if media == MAYBE:
        record["maybe"] += blocks
    elif media:
        sums = record["media"]
        for medium in media.split("+"):
            sums[medium] = sums.get(medium, 0) + blocks
            if not sums[medium]:
                del sums[medium]


def _count(state: ReplayState, held: Mapping[str, str], blocks: int) -> None:
    for rank, media in held.items():
        count_blocks(rank_state(state, int(rank)), media, blocks)


# ------------------------------------------------------------------ what a stranger's file may say


def check_rank(rank: Any) -> None:
    """ValueError unless it can be a rank's number."""
    expect(type(rank) is int and 0 <= rank < MOST_RANKS, f"a rank is 0 to {MOST_RANKS - 1}, not {rank!r:.40}")


def check_text(text: str, what: str) -> None:
    """ValueError for a text that is too long to be read."""
    expect(len(text) <= LONGEST_TEXT, f"{what} has {len(text)} characters; at most {LONGEST_TEXT} are read")


def check_media(media: Any) -> None:
    """ValueError unless it says in which media a rank holds something."""
    fits = type(media) is str and _MEDIA.fullmatch(media) is not None
    expect(fits, f'media are a text such as "GPU", "CPU+GPU" or "?", not {media!r:.60}')
    parts = media.split("+")
    expect(parts == sorted(set(parts)), f"media {media!r:.60} are not in order, each once")


def check_held(held: Any) -> None:
    """ValueError unless it says which ranks hold a node: {"0": "GPU"}."""
    expect(type(held) is dict, f"held must be an object, not {held!r:.60}")
    for rank, media in held.items():
        fits = type(rank) is str and _RANK.fullmatch(rank) is not None
        expect(fits and int(rank) < MOST_RANKS, f"a rank is 0 to {MOST_RANKS - 1}, not {rank!r:.40}")
        check_media(media)
    expect(sorted(held, key=int) == list(held), "held does not name the ranks in their order")


def check_size(what: str, tokens: int, units: int, blocks: int, pairs: bool) -> None:
    """ValueError unless so many token ids, positions and blocks fit each other."""
    fits = 0 < blocks <= units <= MOST_UNITS and tokens in (0, units * (1 + pairs))
    expect(fits, f"{what} has {tokens} tokens, {units} positions and {blocks} blocks, which do not fit")


def check_unseen(what: str, tokens: int, units: int, blocks: int, held: object) -> None:
    """ValueError unless this is the one block of unknown size that stands for what was never told."""
    expect(
        (tokens, units, blocks) == (0, 0, 1) and not held, f"{what} is not seen, and has more than a place"
    )


def _check_texts(held: Sequence[str]) -> dict[str, str]:
    for text in held:
        expect(":" in text, f'held is told as "0:GPU", not {text!r:.40}')
    found = held_of(held)
    expect(len(found) == len(held), "held names a rank twice")
    check_held(found)
    return found


# ------------------------------------------------------------------ nodes


class _OfFleet:
    """What all these kinds have in common: no engine of ours tells them."""

    __slots__ = ()
    by_engine: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class NodeStored(_OfFleet, Event):
    """A node came into the picture: blocks that a rank stored, or "not seen" above what a rank stored.

    tokens: flat, () where they are not told. units: positions. namespace: an index into the tree's spaces,
    which is called `space` from now on.
    """

    node: int
    parent: int
    tokens: Ints
    units: int
    blocks: int
    pairs: bool
    namespace: int
    space: str
    seen: bool
    held: tuple[str, ...]
    tick: int

    word, headline, status, colour = Word("store", "new"), Headline(140, "new"), "new", "new"

    def describe(self) -> str:
        name, below = node_name(self.node), f"below {node_name(self.parent)}"
        if not self.seen:
            return f"{name} {below} stands for a block that was never told: what follows on it was"
        space = f" in namespace {self.space}" if self.space else ""
        size = blocks_of(self.blocks, self.units)
        if not self.held:
            return f"{size} came as {name} {below}{space}, which no rank holds: a hole"
        where = sorted({m for media in held_of(self.held).values() for m in media.split("+")})
        media = "" if where == ["GPU"] else f" in {listed(where)}"
        return f"{_ranks(_holders(self.held))} stored {size}{media} as {name} {below}{space}"

    def apply(self, state: ReplayState) -> None:
        state.tree["spaces"][self.namespace : self.namespace + 1] = [self.space]
        state.tree["tick"] = self.tick
        held = held_of(self.held)
        state.nodes[self.node] = {
            "id": self.node, "parent": self.parent, "tokens": list(self.tokens), "units": self.units,
            "blocks": self.blocks, "pairs": self.pairs, "slots": [], "namespace": self.namespace,
            "lock_ref": 0, "last_access": self.tick, "created": self.tick, "hits": 0, "priority": 0,
            "held": held, "seen": self.seen,
        }  # fmt: skip
        _count(state, held, self.blocks)

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        expect(self.node > 0 and self.node not in state.nodes, f"node {self.node} is stored twice")
        state.expect_node(self.parent)
        check_text(self.space, "a namespace")
        spaces = len(state.tree["spaces"])
        expect(0 <= self.namespace <= min(spaces, MOST_SPACES), f"namespace {self.namespace} of {spaces}")
        held, what = _check_texts(self.held), f"node {self.node}"
        if self.seen:
            check_size(what, len(self.tokens), self.units, self.blocks, self.pairs)
        else:
            check_unseen(what, len(self.tokens), self.units, self.blocks, held)

    def says(self) -> Ints:
        return self.tokens[:: 1 + self.pairs]

    @classmethod
    def together(cls, events: Sequence[NodeStored]) -> tuple[str, str]:
        seen = [event for event in events if event.seen]
        if len(events) == 1 or not seen:
            return cls.headline.tone, events[-1].describe()
        who = [rank for event in seen for rank in _holders(event.held)]
        size = blocks_of(sum(e.blocks for e in seen), sum(e.units for e in seen))
        names = listed([node_name(event.node) for event in seen])
        return cls.headline.tone, f"{_ranks(who) if who else 'nobody'} stored {size} as {names}"


@dataclass(frozen=True, slots=True)
class NodeExtended(_OfFleet, Event):
    """A node was made longer by what the same ranks hold in the same media."""

    node: int
    tokens: Ints
    units: int
    blocks: int
    tick: int

    word, headline, status, colour = Word("extend", "grown"), Headline(130, "new"), "grown", "new"

    def describe(self) -> str:
        return f"{node_name(self.node)} grew by {blocks_of(self.blocks, self.units)}"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        node = state.nodes[self.node]
        node["tokens"] += self.tokens  # a list of its own, see event.Nodes
        node["units"] += self.units
        node["blocks"] += self.blocks
        node["last_access"] = self.tick
        _count(state, node["held"], self.blocks)

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.node)
        node = state.nodes[self.node]
        check_size(f"node {self.node}", len(self.tokens), self.units, self.blocks, node["pairs"])
        sizes = len(node["tokens"]) + len(self.tokens), node["units"] + self.units
        check_size(f"node {self.node}", *sizes, node["blocks"] + self.blocks, node["pairs"])
        expect(node["seen"], f"node {self.node} is not seen and cannot grow")

    def says(self) -> Ints:
        return self.tokens[:: max(len(self.tokens) // self.units, 1)]

    @classmethod
    def together(cls, events: Sequence[NodeExtended]) -> tuple[str, str]:
        size = blocks_of(sum(e.blocks for e in events), sum(e.units for e in events))
        names = nodes_named(events)
        return cls.headline.tone, f"{names} grew by {size}"


@dataclass(frozen=True, slots=True)
class NodeShortened(_OfFleet, Event):
    """The last blocks of a node left: nobody holds them any more, and nothing is below it."""

    node: int
    units: int
    blocks: int
    tick: int

    word, headline = Word("shorten", "evict"), Headline(155, "evict")
    mark, status = "evict", "removed"

    def describe(self) -> str:
        one = self.blocks == 1
        which = f"the last {'block' if one else f'{self.blocks:,} blocks'} of {node_name(self.node)}"
        return (
            f"{which} ({counted(self.units, 'token')}) left: no rank holds {'it' if one else 'them'} any more"
        )

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        node = state.nodes[self.node]
        left = node["units"] - self.units
        del node["tokens"][left * (len(node["tokens"]) // node["units"]) :]
        node["units"], node["blocks"] = left, node["blocks"] - self.blocks
        _count(state, node["held"], -self.blocks)

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.node)
        node = state.nodes[self.node]
        units, blocks = node["units"] - self.units, node["blocks"] - self.blocks
        fits = 0 < self.blocks <= self.units and 0 < blocks <= units
        expect(fits, f"{self.blocks} of {node['blocks']} blocks of node {self.node} cannot leave so")

    @classmethod
    def several(cls, events: Sequence[NodeShortened]) -> str:
        names = nodes_named(events)
        size = blocks_of(sum(e.blocks for e in events), sum(e.units for e in events))
        return f"{names} lost {size} at their ends"


@dataclass(frozen=True, slots=True)
class NodeDivided(_OfFleet, Event):
    """A node became two: `upper` is new and holds the first `blocks` blocks, `lower` kept its id.

    A rank holds only one of the parts, or something else follows on the upper one.
    """

    upper: int
    lower: int
    units: int
    blocks: int
    tick: int

    word, headline = Word("divide", "split"), Headline(50, "split")
    mark, status = "split", "split"

    def describe(self) -> str:
        first = counted(self.blocks, "block")
        return f"{node_name(self.lower)} divided after {first}: {node_name(self.upper)} is its upper part"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        lower = state.nodes[self.lower]
        tokens: list[int] = lower["tokens"]  # a list of its own, see event.Nodes
        cut = self.units * (len(tokens) // lower["units"])
        if 2 * cut <= len(tokens):  # the smaller part is copied: a long run may be divided again and again
            first, rest = tokens[:cut], tokens
            del tokens[:cut]
        else:
            first, rest = tokens, tokens[cut:]
            del tokens[cut:]
        state.nodes[self.upper] = {
            **lower, "id": self.upper, "tokens": first, "units": self.units, "blocks": self.blocks,
            "held": dict(lower["held"]), "slots": [],
        }  # fmt: skip
        lower.update(
            parent=self.upper, tokens=rest, units=lower["units"] - self.units,
            blocks=lower["blocks"] - self.blocks,
        )  # fmt: skip

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.lower)
        expect(self.upper > 0 and self.upper not in state.nodes, f"node {self.upper} is made twice")
        lower = state.nodes[self.lower]
        units, blocks = lower["units"] - self.units, lower["blocks"] - self.blocks
        fits = 0 < self.blocks <= self.units and 0 < blocks <= units
        at = f"{self.blocks} blocks ({self.units} positions)"
        expect(fits, f"node {self.lower} of {lower['blocks']} blocks is divided at {at}")

    def touches(self) -> Ints:
        return self.upper, self.lower

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return (self.upper,)

    def split_off(self) -> tuple[int, int] | None:
        return self.upper, self.lower

    @classmethod
    def several(cls, events: Sequence[NodeDivided]) -> str:
        return f"{listed([node_name(e.lower) for e in events])} divided"


@dataclass(frozen=True, slots=True)
class NodesJoined(_OfFleet, Event):
    """Two nodes became one again: `lower` begins with what was `upper`, which is gone.

    The contrary of NodeDivided: what is below `lower` stays there.
    """

    upper: int
    lower: int
    tick: int

    word, status = Word("join", "split", small=True), "grown"

    def describe(self) -> str:
        return f"{node_name(self.upper)} and {node_name(self.lower)} are one node, {node_name(self.lower)}"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        upper, lower = state.nodes[self.upper], state.nodes[self.lower]
        tokens: list[int] = upper["tokens"]  # a list of its own, as that of `lower`: see event.Nodes
        tokens += lower["tokens"]
        lower.update(
            parent=upper["parent"], tokens=tokens,
            units=upper["units"] + lower["units"], blocks=upper["blocks"] + lower["blocks"],
            created=min(upper["created"], lower["created"]),
            last_access=max(upper["last_access"], lower["last_access"]),
        )  # fmt: skip
        del state.nodes[self.upper]

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.upper, self.lower)
        upper, lower = state.nodes[self.upper], state.nodes[self.lower]
        expect(lower["parent"] == self.upper, f"node {self.lower} is not below node {self.upper}")
        same = all(upper[name] == lower[name] for name in ("held", "namespace", "seen", "pairs"))
        same = same and upper["seen"] and bool(upper["tokens"]) == bool(lower["tokens"])
        expect(same, f"nodes {self.upper} and {self.lower} differ and cannot be one")
        expect(upper["units"] + lower["units"] <= MOST_UNITS, f"node {self.lower} would be too long")

    def touches(self) -> Ints:
        return self.upper, self.lower

    def joined(self) -> tuple[int, int]:
        return self.upper, self.lower

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return (self.lower,)


@dataclass(frozen=True, slots=True)
class NodeHeld(_OfFleet, Event):
    """A rank holds a node in more media than before. was, now: "", "GPU", "CPU+GPU", "?"."""

    node: int
    rank: int
    was: str
    now: str
    blocks: int
    tick: int

    word, headline, status, colour = Word("hold", "hit"), Headline(120, "hit"), "stored", "hit"

    def describe(self) -> str:
        what = f"{node_name(self.node)} ({counted(self.blocks, 'block')})"
        if self.now == MAYBE:
            return f"rank {self.rank} may hold {what}: it was told twice, and removed once"
        media = listed(sorted(set(self.now.split("+")) - set(self.was.split("+"))))
        stays = f": it stays on {listed(self.was.split('+'))}" if self.was not in ("", MAYBE) else ""
        return f"rank {self.rank} stored {what} in {media}{stays}"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        node = state.nodes[self.node]
        held = {**node["held"], str(self.rank): self.now}
        if not self.now:
            del held[str(self.rank)]
        node["held"] = dict(sorted(held.items(), key=lambda item: int(item[0])))
        if not is_lost(self.was, self.now):
            node["last_access"] = self.tick
        record = rank_state(state, self.rank)
        count_blocks(record, self.was, -node["blocks"])
        count_blocks(record, self.now, node["blocks"])

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.node)
        check_rank(self.rank)
        for media in (self.was, self.now):
            if media:
                check_media(media)
        node, what = state.nodes[self.node], f"node {self.node}"
        expect(node["seen"], f"{what} is not seen, so no rank holds it")
        found = node["held"].get(str(self.rank), "")
        expect(found == self.was, f"rank {self.rank} holds {what} in {found!r}, not in {self.was!r}")
        expect(node["blocks"] == self.blocks, f"{what} has {node['blocks']} blocks, not {self.blocks}")
        lost = is_lost(self.was, self.now)
        right = self.was != self.now and lost == isinstance(self, NodeLost)
        expect(right, f"{type(self).__name__} cannot tell {self.was!r} to {self.now!r}")

    @classmethod
    def several(cls, events: Sequence[NodeHeld]) -> str:
        names = nodes_named(events)
        return f"{_ranks(e.rank for e in events)} {cls._done(events)} {names}"

    @staticmethod
    def _done(events: Sequence[NodeHeld]) -> str:
        return "stored"


@dataclass(frozen=True, slots=True)
class NodeLost(NodeHeld):
    """A rank removed a node from a medium. Others may hold it; a hole is left where something is below it."""

    word, headline = Word("remove", "evict"), Headline(150, "evict")
    mark, status, colour = "evict", "removed", "evict"

    def describe(self) -> str:
        what = f"rank {self.rank} removed {node_name(self.node)} ({counted(self.blocks, 'block')})"
        if self.was == MAYBE:
            return f"{what}, which may have been there"
        gone = listed(sorted(set(self.was.split("+")) - set(self.now.split("+"))))
        if self.now == MAYBE:
            return f"{what} from {gone}: it may be there still, as it was told twice"
        stays = f": it is on {listed(self.now.split('+'))}" if self.now else ""
        return f"{what} from {gone}{stays}"

    @staticmethod
    def _done(events: Sequence[NodeHeld]) -> str:
        return "removed"


@dataclass(frozen=True, slots=True)
class NodeLeft(_OfFleet, Event):
    """Nobody holds a node any more, and nothing is below it. held: as it last was."""

    node: int
    held: tuple[str, ...]
    blocks: int
    tick: int

    word, headline = Word("leave", "evict"), Headline(160, "evict")
    mark, status = "evict", "evicted"

    def describe(self) -> str:
        what = f"{node_name(self.node)} ({counted(self.blocks, 'block')})"
        if not self.held:
            return f"{what} left: nothing is below it any more"
        return f"{_ranks(_holders(self.held))} removed {what}: no rank holds it any more"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        node = state.nodes[self.node]
        _count(state, node["held"], -node["blocks"])
        del state.nodes[self.node]

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.node)
        node = state.nodes[self.node]
        held = _check_texts(self.held)
        expect(held == node["held"], f"node {self.node} was held by {node['held']}, not by {held}")
        expect(node["blocks"] == self.blocks, f"node {self.node} has {node['blocks']} blocks")

    @classmethod
    def several(cls, events: Sequence[NodeLeft]) -> str:
        names = listed([node_name(event.node) for event in events])
        blocks = counted(sum(event.blocks for event in events), "block")
        return f"{names} left ({blocks}): no rank holds them any more"


@dataclass(frozen=True, slots=True)
class NodeMoved(_OfFleet, Event):
    """What hung below "not seen" found its parent."""

    node: int
    parent: int
    tick: int

    word, headline, status, colour = Word("move", "hit"), Headline(100, "hit"), "stored", "hit"

    def describe(self) -> str:
        return f"{node_name(self.node)} and what is below it found its parent: {node_name(self.parent)}"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        state.nodes[self.node]["parent"] = self.parent

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state, self.node)
        state.expect_node(self.parent)
        at = self.parent
        for _ in range(len(state.nodes) + 1):
            expect(at != self.node, f"node {self.node} would be its own ancestor")
            if at not in state.nodes:
                break
            at = state.nodes.look(at)["parent"]

    @classmethod
    def several(cls, events: Sequence[NodeMoved]) -> str:
        return f"{listed([node_name(e.node) for e in events])} found their parents"


# ------------------------------------------------------------------ ranks


@dataclass(frozen=True, slots=True)
class GapSeen(_OfFleet, Event):
    """Batches `first` to `last` of a rank will never come. why: what came of asking for them again."""

    rank: int
    first: int
    last: int
    why: str

    word, headline = Word("gap", "wait"), Headline(200, "retract")
    mark, colour = "gap", "retract"

    def describe(self) -> str:
        one = self.first == self.last
        which = f"batch {self.first}" if one else f"batches {self.first} to {self.last}"
        why = f": {self.why}" if self.why else ""
        return f"{which} of rank {self.rank} {'is' if one else 'are'} lost{why}"

    def apply(self, state: ReplayState) -> None:
        rank_state(state, self.rank)["lost"] += self.last - self.first + 1

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        check_rank(self.rank)
        check_text(self.why, "why a gap is one")
        expect(0 <= self.first <= self.last, f"a gap from batch {self.first} to {self.last}")
        lost = sum(each["lost"] for each in state.tree["ranks"])
        expect(lost + self.last - self.first < 1 << 62, "more batches are lost than can be counted")

    @classmethod
    def several(cls, events: Sequence[GapSeen]) -> str:
        lost = sum(event.last - event.first + 1 for event in events)
        return f"{lost:,} batches of {_ranks(event.rank for event in events)} are lost"


@dataclass(frozen=True, slots=True)
class RankRestarted(_OfFleet, Event):
    """A rank counts its batches from 0 again: what it held is dropped (events of nodes follow)."""

    rank: int
    why: str

    word, headline = Word("restart", "evict"), Headline(190, "evict")
    mark, colour = "gap", "evict"

    def describe(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"rank {self.rank} began anew{why}: what it held is dropped"

    def apply(self, state: ReplayState) -> None:
        rank_state(state, self.rank)["seq"] = -1

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        check_rank(self.rank)
        check_text(self.why, "why a rank began anew")

    @classmethod
    def together(cls, events: Sequence[RankRestarted]) -> tuple[str, str]:
        ranks = {event.rank for event in events}
        text = f"{_ranks(ranks)} began anew: what they held is dropped"
        return cls.headline.tone, text if len(ranks) > 1 else events[-1].describe()


@dataclass(frozen=True, slots=True)
class RankCleared(_OfFleet, Event):
    """A rank said that it cleared all its blocks (events of nodes follow)."""

    rank: int

    word, headline, colour = Word("cleared", "evict"), Headline(180, "evict"), "evict"

    def describe(self) -> str:
        return f"rank {self.rank} cleared all its blocks"

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        check_rank(self.rank)

    @classmethod
    def together(cls, events: Sequence[RankCleared]) -> tuple[str, str]:
        return cls.headline.tone, f"{_ranks(event.rank for event in events)} cleared all blocks"


@dataclass(frozen=True, slots=True)
class RankStateSeen(_OfFleet, Event):
    """How the connection to a rank is from now on: one of RANK_STATES."""

    rank: int
    where: str
    now: str

    word, headline = Word("rank"), Headline(60)

    def describe(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"rank {self.rank}{where} is {_STATE_WORDS.get(self.now, self.now)}"

    def apply(self, state: ReplayState) -> None:
        rank_state(state, self.rank).update(where=self.where, state=self.now)

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        check_rank(self.rank)
        check_text(self.where, "a rank's address")
        expect(self.now in RANK_STATES, f"a rank is {', '.join(RANK_STATES)}, not {self.now!r:.40}")

    @classmethod
    def together(cls, events: Sequence[RankStateSeen]) -> tuple[str, str]:
        states = {event.now for event in events}
        if len(events) > 1 and len(states) == 1:
            number = {event.rank for event in events}
            verb = "is" if len(number) == 1 else "are"
            now = _STATE_WORDS.get(events[0].now, events[0].now)
            return cls.headline.tone, f"{_ranks(number)} {verb} {now}"
        return cls.headline.tone, events[-1].describe()


_STATE_WORDS = {
    "connecting": "being connected to", "replaying": "telling what it told before", "live": "followed live",
    "silent": "silent", "lost": "lost",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TroubleSeen(_OfFleet, Event):
    """Something that cannot be understood came from a rank, and is left out."""

    rank: int
    text: str

    word, headline, colour = Word("trouble", "wait"), Headline(170, "retract"), "retract"

    def describe(self) -> str:
        return f"rank {self.rank}: {self.text}"

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        check_rank(self.rank)
        check_text(self.text, "a trouble")

    @classmethod
    def together(cls, events: Sequence[TroubleSeen]) -> tuple[str, str]:
        more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
        return cls.headline.tone, events[0].describe() + more


@dataclass(frozen=True, slots=True)
class BatchesTaken(_OfFleet, Event):
    """Ends a frame: what came, in sums.

    step: batches so far, of all ranks. Of each of `ranks`, those of which batches came: the last sequence
    number, how many batches, how many of them were asked for again, and events and fields that are not known.
    stored, removed: blocks as the ranks told them. ignored: told twice, removed unknown, of other cache
    groups. seconds: from the first batch of the frame to its end. at: when, in seconds since 1970, as the
    sender of the last batch says; 0.0 where that is no time.
    """

    step: int
    ranks: Ints
    seqs: Ints
    batches: Ints
    replayed: Ints
    unknown: Ints
    stored: int
    removed: int
    ignored: int
    seconds: float
    at: float = 0.0

    word, headline, ends_frame = Word("batches", small=True), Headline(10), True

    @property
    def kind(self) -> str:
        """Which batches: "rank 0, batch 17", "32 batches of 4 ranks"."""
        count = sum(self.batches)
        if not count:
            return "no batch"
        came = [at for at, number in enumerate(self.batches) if number]
        if count == 1:
            return f"rank {self.ranks[came[0]]}, batch {self.seqs[came[0]]}"
        if len(came) == 1:
            return f"{count:,} batches of rank {self.ranks[came[0]]}"
        return f"{count:,} batches of {len(came)} ranks"

    def describe(self) -> str:
        told = f"{counted(self.stored, 'block')} stored, {self.removed:,} removed"
        replayed, unknown = sum(self.replayed), sum(self.unknown)
        parts = [
            f"{replayed:,} replayed" if replayed else "", f"{self.ignored:,} ignored" if self.ignored else "",
            f"{unknown:,} not known" if unknown else "",
        ]  # fmt: skip
        return ", ".join([f"{self.kind}: {told}", *filter(None, parts)])

    def apply(self, state: ReplayState) -> None:
        state.rest["step"] = self.step
        state.tree["tick"] = self.step
        rows = zip(self.ranks, self.seqs, self.batches, self.replayed, self.unknown, strict=True)
        for rank, seq, batches, replayed, unknown in rows:
            record = rank_state(state, rank)
            record["seq"] = seq
            record["batches"] += batches
            record["replayed"] += replayed
            record["unknown"] += unknown

    def check(self, state: ReplayState) -> None:
        _check_fleet(self, state)
        for rank in self.ranks:
            check_rank(rank)
        columns = (self.seqs, self.batches, self.replayed, self.unknown)
        fits = all(len(column) == len(self.ranks) for column in columns)
        expect(fits and len(set(self.ranks)) == len(self.ranks), "BatchesTaken has not one row for each rank")
        small = (self.stored, self.removed, self.ignored, *self.batches, *self.replayed, *self.unknown)
        expect(all(0 <= number < 1 << 40 for number in small), "BatchesTaken: a number is too large")
        expect(self.step == state.rest["step"] + sum(self.batches), f"step {self.step} does not follow")
        expect(self.seconds >= 0 and self.at >= 0, "BatchesTaken: it took less than no time")

    @classmethod
    def several(cls, events: Sequence[BatchesTaken]) -> str:
        batches = sum(sum(event.batches) for event in events)
        stored, removed = sum(e.stored for e in events), sum(e.removed for e in events)
        told = f"{counted(stored, 'block')} stored, {removed:,} removed"
        return f"{batches:,} batches: {told}"


def _check_fleet(event: Event, state: ReplayState, *nodes: int) -> None:
    """The state is a stream's, and these nodes are in it."""
    expect("ranks" in state.tree, f"{type(event).__name__}: this is no stream of KV events")
    for number in nodes:
        expect(number in state.nodes, f"there is no node {number}")


def empty_state(block_size: int) -> State:
    """The state of a stream of which nothing was told yet."""
    return {
        "step": 0, "kv_tokens": 0, "free": 0, "waiting": [], "requests": {},
        "tree": {
            "page_size": block_size, "eviction_policy": "theirs", "tick": 0, "spaces": [""], "ranks": [],
            "nodes": [],
        },
    }  # fmt: skip
