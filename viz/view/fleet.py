"""A stream of other servers: which ranks hold what, one of them alone, who shares, and how it grows.

The state of a stream (minirad/fleet) is a tree in which each node says which ranks hold it, in which media.
Here that is counted, and a view is cut down to what one rank holds: its runs joined again as that rank alone
has them, its own holes. Draws nothing and asks nobody.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minirad.observe import fleet_events as fe
from minirad.observe.event import Event
from minirad.observe.snapshot import State
from viz.trace import View
from viz.view.columns import Columns, Ints, Table

Flags = npt.NDArray[np.bool_]

# A letter for each kind of medium: device, host, disk, external (as all of another name); "?": may be there.
LETTERS: Mapping[str, str] = {"GPU": "D", "CPU": "H", "CPU_PINNED": "H", "DISK": "K", "?": "?"}
SIGNS = "DHKX?"
# What a joined run is called: the last of these that fits one of its parts.
_WORDS = ("cached", "split", "grown", "stored", "removed", "new")


@lru_cache(maxsize=1024)
def letters(held: str) -> str:
    """The media "CPU+GPU" in which a rank holds a node as letters in the order of SIGNS, "DH"; "": none."""
    found = {LETTERS.get(medium, "X") for medium in held.split("+")} if held else set()
    return "".join(letter for letter in SIGNS if letter in found)


def sign(held: str) -> str:
    """The same to be read: D, H, D+H, K, X, ?."""
    return "+".join(letters(held))


# ---------------------------------------------------------------------- sums, and how they grow


class Sums(NamedTuple):
    """What is held after a frame.

    ranks: by rank and letter (blocks, tokens). shares: tokens that exactly 1, 2, ... ranks hold ("?" is not
    held). lost: tokens that left a rank's medium within the frame.
    """

    ranks: dict[int, dict[str, tuple[int, int]]]
    shares: tuple[int, ...]
    lost: int

    @property
    def tokens(self) -> int:
        """Tokens that a rank holds, each counted once."""
        return sum(self.shares)

    @property
    def media(self) -> dict[str, int]:
        """Tokens by letter, the copies in several ranks counted each."""
        found: Counter[str] = Counter()
        for media in self.ranks.values():
            found.update({letter: tokens for letter, (_, tokens) in media.items()})
        return {letter: found[letter] for letter in SIGNS if found[letter]}


class _Node(NamedTuple):
    blocks: int
    units: int
    held: dict[str, str]


class Growth:
    """Follows a recording's events with sums alone: takes the time of what changes, not of what is there.

    now: the sums at present.
    """

    def __init__(self, start: State) -> None:
        self._nodes: dict[int, _Node] = {}
        self._sums: dict[int, dict[str, list[int]]] = {int(row["rank"]): {} for row in start["tree"]["ranks"]}
        self._changed = set(self._sums)
        self._shares: Counter[int] = Counter()
        self._lost = 0
        for node in start["tree"]["nodes"]:
            self._put(node["id"], _Node(node["blocks"], node["units"], node["held"]))
        self.now = Sums({}, (), 0)
        self.take(())

    def take(self, events: Iterable[Event]) -> Sums:
        """Moves on by the events of one frame."""
        self._lost = 0
        for event in events:
            self._take(event)
        ranks = dict(self.now.ranks)  # what did not change is shared with the frames before
        for rank in self._changed:
            media = self._sums[rank]
            ranks[rank] = {k: (media[k][0], media[k][1]) for k in SIGNS if k in media and media[k][0]}
        self._changed.clear()
        most = max((count for count, tokens in self._shares.items() if tokens), default=0)
        self.now = Sums(ranks, tuple(self._shares[count] for count in range(1, most + 1)), self._lost)
        return self.now

    def _take(self, event: Event) -> None:
        if isinstance(event, fe.NodeStored):
            self._put(event.node, _Node(event.blocks, event.units, fe.held_of(event.held)))
        elif isinstance(event, fe.NodeExtended):
            node = self._drop(event.node)
            self._put(event.node, _Node(node.blocks + event.blocks, node.units + event.units, node.held))
        elif isinstance(event, fe.NodeShortened):
            node = self._drop(event.node)
            self._lost += event.units * sum(len(letters(media).strip("?")) for media in node.held.values())
            self._put(event.node, _Node(node.blocks - event.blocks, node.units - event.units, node.held))
        elif isinstance(event, fe.NodeDivided):
            node = self._drop(event.lower)
            self._put(event.upper, _Node(event.blocks, event.units, node.held))
            self._put(event.lower, _Node(node.blocks - event.blocks, node.units - event.units, node.held))
        elif isinstance(event, fe.NodesJoined):
            upper, lower = self._drop(event.upper), self._drop(event.lower)
            self._put(event.lower, _Node(upper.blocks + lower.blocks, upper.units + lower.units, lower.held))
        elif isinstance(event, fe.NodeHeld):
            node, rank = self._drop(event.node), str(event.rank)
            self._lost += node.units * len(set(letters(event.was)) - set(letters(event.now)) - {"?"})
            rest = {each: media for each, media in node.held.items() if each != rank}
            held = {**rest, rank: event.now} if event.now else rest
            self._put(event.node, _Node(node.blocks, node.units, held))
        elif isinstance(event, fe.NodeLeft):
            node = self._drop(event.node)
            self._lost += node.units * sum(len(letters(media).strip("?")) for media in node.held.values())
        elif isinstance(event, fe.RankStateSeen):
            self._sums.setdefault(event.rank, {})
            self._changed.add(event.rank)

    def _put(self, number: int, node: _Node) -> None:
        self._nodes[number] = node
        self._count(node, 1)

    def _drop(self, number: int) -> _Node:
        node = self._nodes.pop(number, _Node(0, 0, {}))
        self._count(node, -1)
        return node

    def _count(self, node: _Node, sense: int) -> None:
        for name, media in node.held.items():
            rank = int(name)
            self._changed.add(rank)
            own = self._sums.setdefault(rank, {})
            for letter in letters(media):
                sums = own.setdefault(letter, [0, 0])
                sums[0] += sense * node.blocks
                sums[1] += sense * node.units
        holders = sum(media != "?" for media in node.held.values())
        self._shares[holders] += sense * node.units


def sums(state: State) -> Sums:
    """The sums of one state, counted anew."""
    return Growth(state).now


# ---------------------------------------------------------------------- one rank alone


def alone(view: View, rank: int) -> View:
    """The view of what one rank holds.

    A run of nodes that this rank holds alike, with nothing of its own branching off, is one node again, with
    the name of its last part. What only leads to a node that it holds is its hole.
    """
    tree, name = view.state["tree"], str(rank)
    rows = [row for row in tree["ranks"] if row["rank"] == rank] or [fe.new_rank(rank)]
    nodes, table = view.nodes, view.table
    mine = _media_codes(nodes, table, name)
    kept = _kept(table, mine > 0)
    goes_on = _runs(nodes, table, mine, kept)
    above = {lower: upper for upper, lower in goes_on.items()}
    kept[table.places(np.fromiter(goes_on, np.int64, len(goes_on)))] = False
    ends = np.flatnonzero(kept)
    numbers: list[int] = table.id[ends].tolist()
    own = dict(zip(numbers, map(nodes.__getitem__, numbers), strict=True))
    runs = {number: _joined(nodes, above, number) for number in own.keys() & above.keys()}
    own.update(runs)
    status = dict.fromkeys(numbers, "cached")
    for number in table.id[ends[mine[ends] == 0]].tolist():
        status[number] = "hole" if own[number]["seen"] else "unseen"
    for number, told in _happened(view, rank).items():
        while number in goes_on:
            number = goes_on[number]
        if number in own and name in own[number]["held"]:
            status[number] = max({*told, status[number]}, key=_WORDS.index)
    ghosts = _ghosts(view, rank, own, goes_on)
    status.update(dict.fromkeys(ghosts, "evicted"))
    columns = Columns(Table(table.rows.take(ends, axis=1)))
    columns.update(runs, runs)
    return dataclasses.replace(
        view, state={**view.state, "tree": {**tree, "nodes": list(own.values()), "ranks": rows}},
        events=tuple(event for event in view.events if concerns(event, rank, nodes)),
        so_far=tuple(event for event in view.so_far if concerns(event, rank, nodes)), status=status, also={},
        ghosts=ghosts, focus=view.focus & status.keys(), _made={"nodes": own, "table": columns.table()},
    )  # fmt: skip


def _media_codes(nodes: Mapping[int, State], table: Table, name: str) -> Ints:
    """In which media a rank holds the nodes of a table, as numbers; 0: in none (the root, last)."""
    held = [node["held"].get(name, "") for node in map(nodes.__getitem__, table.id.tolist())]
    codes = {media: code for code, media in enumerate(sorted({"", *held}))}
    return np.array([*map(codes.__getitem__, held), 0], np.int64)


def _kept(table: Table, mine: Flags) -> Flags:
    """What the rank holds, and all above it."""
    above, kept = np.append(table.above, len(table)), np.array(mine, np.bool_)
    kept[-1] = True  # the root, where every way ends
    new = np.flatnonzero(mine)
    while len(new := np.unique(above[new])) and len(new := new[~kept[new]]):
        kept[new] = True
    kept[-1] = False
    return kept


def _runs(nodes: Mapping[int, State], table: Table, mine: Ints, kept: Flags) -> dict[int, int]:
    """Of those nodes whose run goes on the next one in it: an only child that this rank holds alike."""
    places = np.flatnonzero(kept)
    above = table.above[places]
    alone = (np.bincount(above, minlength=len(table) + 1)[above] == 1) & (above < len(table))
    lower, upper = places[alone], above[alone]
    same = mine[lower] == mine[upper]
    pairs = zip(table.id[upper[same]].tolist(), table.id[lower[same]].tolist(), strict=True)
    return {above: below for above, below in pairs if _alike(nodes[above], nodes[below])}


def _alike(upper: State, lower: State) -> bool:
    """Apart from who holds them they could be one node."""
    return bool(
        upper["namespace"] == lower["namespace"]
        and upper["pairs"] == lower["pairs"]
        and upper["seen"]
        and lower["seen"]
        and bool(upper["tokens"]) == bool(lower["tokens"])
    )


def _joined(nodes: Mapping[int, State], above: Mapping[int, int], end: int) -> State:
    """The run that ends with a node, as one."""
    parts = [nodes[end]]
    while parts[-1]["id"] in above:
        parts.append(nodes[above[parts[-1]["id"]]])
    parts.reverse()
    return {
        **parts[-1],
        "parent": parts[0]["parent"],
        "tokens": list(chain.from_iterable([part["tokens"] for part in parts])),
        "units": sum(part["units"] for part in parts),
        "blocks": sum(part["blocks"] for part in parts),
        "created": min(part["created"] for part in parts),
        "last_access": max(part["last_access"] for part in parts),
    }


def concerns(event: Event, rank: int, nodes: Mapping[int, State]) -> bool:
    """It is about this rank: it says so, or it is about a node that the rank holds."""
    own = getattr(event, "rank", getattr(event, "worker", None))  # worker 2 of a router is rank 2
    if own is not None:
        return bool(own == rank)
    if isinstance(event, fe.NodeStored | fe.NodeLeft):
        return str(rank) in fe.held_of(event.held)
    if isinstance(event, fe.BatchesTaken):
        return rank in event.ranks
    name = str(rank)
    return any(name in nodes[number]["held"] for number in event.touches() if number in nodes)


def _happened(view: View, rank: int) -> dict[int, set[str]]:
    """What happened to this rank's nodes in the stretch on view."""
    words: dict[int, set[str]] = {}
    for event in view.so_far:
        if event.status in _WORDS and concerns(event, rank, view.nodes):
            for number in event.with_status({}):
                words.setdefault(number, set()).add(event.status)
        if parts := event.split_off():
            words.setdefault(parts[0], set()).update(words.get(parts[1], set()) - {"split"})
    return words


def _ghosts(view: View, rank: int, own: Mapping[int, State], goes_on: Mapping[int, int]) -> dict[int, State]:
    """What this rank lost in the stretch on view, as it last was: others may hold it still."""
    gone: dict[int, State] = {}
    for event in view.so_far:
        lost = isinstance(event, fe.NodeHeld) and event.rank == rank and not event.now
        if lost or (isinstance(event, fe.NodeLeft) and str(rank) in fe.held_of(event.held)):
            number = event.touches()[0]
            node = view.nodes.get(number) or view.ghosts.get(number)
            if node is not None and number not in own and number not in goes_on:
                parent = node["parent"]
                while parent in goes_on:  # it became part of a joined run
                    parent = goes_on[parent]
                gone[number] = {**node, "parent": parent}
    return gone


# ---------------------------------------------------------------------- what is wrong


def wrong(state: State, events: Iterable[Event] = ()) -> str:
    """What the reader of a position must know, in one sentence; "" where all is well.

    events: the troubles, restarts and gaps that are still news.
    """
    rows = state["tree"]["ranks"]
    told = [event.describe() for event in events]
    away = [row for row in rows if row["state"] in ("connecting", "lost")]
    if away and len(away) == len(rows) and not any(row["batches"] for row in rows):
        return f"Nothing answers at {_places(away)} yet: it is tried again until something does"
    parts = [_away(away)] if away else []
    parts += told[-1:]
    lost = [row for row in rows if row["lost"]]
    if lost and not told:
        count = sum(row["lost"] for row in lost)
        batches = "batch was" if count == 1 else "batches were"
        parts.append(f"{count:,} {batches} lost of {_ranks(lost)}: what they told is not in this picture")
    return "; ".join(parts)


def _ranks(rows: list[State]) -> str:
    numbers = [str(row["rank"]) for row in rows]
    if len(numbers) > 6:
        return f"{len(numbers)} ranks"
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {' and '.join([', '.join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)}"


def _away(rows: list[State]) -> str:
    lost = [row for row in rows if row["state"] == "lost"]
    new = [row for row in rows if row["state"] != "lost"]
    parts = [f"the connection to {_ranks(lost)} is lost and is tried again"] if lost else []
    parts += [f"{_ranks(new)} {'does' if len(new) == 1 else 'do'} not answer yet"] if new else []
    return ", ".join(parts)


def _places(rows: list[State]) -> str:
    where = str(rows[0]["where"])
    return where if len(rows) == 1 else f"{where} (and {len(rows) - 1} more)"
