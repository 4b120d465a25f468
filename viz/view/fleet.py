"""A stream of other servers: which ranks hold what, one of them alone, who shares, and how it grows.

The state of a stream (minirad/fleet) is a tree in which each node says which ranks hold it, in which media.
Here that is counted, and a view is cut down to what one rank holds: its runs joined again as that rank alone
has them, its own holes. Draws nothing and asks nobody.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from minirad.observe import fleet_events as fe
from minirad.observe.event import Event
from minirad.observe.snapshot import State, rest_of
from viz.trace import View

# A letter for each kind of medium: device, host, disk, external (as all of another name); "?": may be there.
LETTERS: Mapping[str, str] = {"GPU": "D", "CPU": "H", "CPU_PINNED": "H", "DISK": "K", "?": "?"}
SIGNS = "DHKX?"
_WORDS = ("split", "grown", "stored", "removed", "new")  # what a joined run is called: the last of these


@lru_cache(maxsize=1024)
def letters(held: str) -> str:
    """The media "CPU+GPU" in which a rank holds a node as letters in the order of SIGNS, "DH"; "": none."""
    found = {LETTERS.get(medium, "X") for medium in held.split("+")} if held else set()
    return "".join(letter for letter in SIGNS if letter in found)


def sign(held: str) -> str:
    """The same to be read: D, H, D+H, K, X, ?."""
    return "+".join(letters(held))


# ---------------------------------------------------------------------- sums of one position


class Sums(NamedTuple):
    """What ranks hold at a position, in blocks and tokens.

    ranks: by rank and letter (blocks, tokens). shares: tokens that exactly 1, 2, ... ranks hold ("?" is not
    held). tokens: of all nodes that a rank holds, each counted once.
    """

    ranks: dict[int, dict[str, tuple[int, int]]]
    shares: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.shares)


def sums(state: State) -> Sums:
    """Counted from all nodes; those that are held alike, which are most, together."""
    together: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for node in state["tree"]["nodes"]:
        own = together.setdefault(tuple(node["held"].items()), [0, 0])
        own[0] += node["blocks"]
        own[1] += node["units"]
    found: dict[int, dict[str, tuple[int, int]]] = {int(row["rank"]): {} for row in state["tree"]["ranks"]}
    shared: Counter[int] = Counter()
    for held, (blocks, tokens) in together.items():
        shared[_holders(media for _, media in held)] += tokens
        for rank, media in held:
            rows = found.setdefault(int(rank), {})
            for letter in letters(media):
                before = rows.get(letter, (0, 0))
                rows[letter] = before[0] + blocks, before[1] + tokens
    most = max((count for count, tokens in shared.items() if tokens), default=0)
    return Sums(found, [shared[count] for count in range(1, most + 1)])


def _holders(media: Iterable[str]) -> int:
    return sum(each not in ("", "?") for each in media)


# ---------------------------------------------------------------------- growth over time


class Grown(NamedTuple):
    """After one frame, in tokens. media: by letter, copies in several ranks counted each. tokens: of all
    nodes that a rank holds, each counted once. lost: what left a rank's medium within the frame."""

    media: dict[str, int]
    tokens: int
    lost: int


class Growth:
    """Follows a recording's events with sums alone: takes the time of what changes, not of what is there."""

    def __init__(self, start: State) -> None:
        self._nodes: dict[int, tuple[int, dict[str, str]]] = {}  # units, held
        self._media: Counter[str] = Counter()
        self._tokens = self._lost = 0
        for node in start["tree"]["nodes"]:
            self._put(node["id"], node["units"], dict(node["held"]))

    def take(self, events: Iterable[Event]) -> Grown:
        """Moves on by the events of one frame."""
        self._lost = 0
        for event in events:
            self._take(event)
        return Grown({k: self._media[k] for k in SIGNS if self._media[k]}, self._tokens, self._lost)

    def _take(self, event: Event) -> None:
        if isinstance(event, fe.NodeStored):
            self._put(event.node, event.units, fe.held_of(event.held))
        elif isinstance(event, fe.NodeExtended):
            units, held = self._drop(event.node)
            self._put(event.node, units + event.units, held)
        elif isinstance(event, fe.NodeDivided):
            units, held = self._drop(event.lower)
            self._put(event.upper, event.units, held)
            self._put(event.lower, units - event.units, held)
        elif isinstance(event, fe.NodesJoined):
            (units, held), (more, _) = self._drop(event.lower), self._drop(event.upper)
            self._put(event.lower, units + more, held)
        elif isinstance(event, fe.NodeHeld):
            units, held = self._drop(event.node)
            self._lost += units * len(set(letters(event.was)) - set(letters(event.now)) - {"?"})
            rest = {rank: media for rank, media in held.items() if rank != str(event.rank)}
            self._put(event.node, units, {**rest, str(event.rank): event.now} if event.now else rest)
        elif isinstance(event, fe.NodeLeft):
            units, held = self._drop(event.node)
            self._lost += units * sum(len(letters(media).strip("?")) for media in held.values())

    def _put(self, node: int, units: int, held: dict[str, str]) -> None:
        self._nodes[node] = units, held
        self._count(units, held, 1)

    def _drop(self, node: int) -> tuple[int, dict[str, str]]:
        units, held = self._nodes.pop(node, (0, {}))
        self._count(units, held, -1)
        return units, held

    def _count(self, units: int, held: Mapping[str, str], sense: int) -> None:
        for media in held.values():
            for letter in letters(media):
                self._media[letter] += sense * units
        if _holders(held.values()):
            self._tokens += sense * units


# ---------------------------------------------------------------------- one rank alone


def alone(view: View, rank: int) -> View:
    """The view of what one rank holds.

    A run of nodes that this rank holds alike, with nothing of its own branching off, is one node again, with
    the name of its last part. What only leads to a node that it holds is its hole.
    """
    tree, name = view.state["tree"], str(rank)
    rows = [row for row in tree["ranks"] if row["rank"] == rank] or [fe.new_rank(rank)]
    nodes: dict[int, State] = {node["id"]: node for node in tree["nodes"]}
    kept = _kept(nodes, name)
    only, ends = _ends(nodes, kept, name)
    words = _happened(view, rank, kept)
    joined, status = [], {}
    for number in ends:
        run = _run(nodes, only, number, kept, name)
        node = nodes[number] if len(run) == 1 else _joined([nodes[part] for part in reversed(run)])
        joined.append(node)
        own = {word for part in run for word in words.get(part, ())}
        best = max(own, key=_WORDS.index, default="")
        status[number] = best if name in node["held"] and best else rest_of({**node, "held": _of(node, name)})
    ghosts = _ghosts(view, rank, nodes, kept, ends, only)
    status.update(dict.fromkeys(ghosts, "evicted"))
    mine = tuple(event for event in view.events if concerns(event, rank, kept))
    return dataclasses.replace(
        view, state={**view.state, "tree": {**tree, "nodes": joined, "ranks": rows}}, events=mine,
        so_far=tuple(event for event in view.so_far if concerns(event, rank, kept)), status=status, also={},
        ghosts=ghosts, focus=view.focus & status.keys(),
    )  # fmt: skip


def _kept(nodes: Mapping[int, State], name: str) -> set[int]:
    """What the rank holds, and all above it."""
    kept = {number for number, node in nodes.items() if name in node["held"]}
    for number in tuple(kept):
        parent = nodes[number]["parent"]
        while parent in nodes and parent not in kept:
            kept.add(parent)
            parent = nodes[parent]["parent"]
    return kept


def _of(node: State, name: str) -> dict[str, str]:
    media = node["held"].get(name, "")
    return {name: media} if media else {}


def _alike(upper: State, lower: State, name: str) -> bool:
    return bool(
        upper["held"].get(name) == lower["held"].get(name)
        and upper["namespace"] == lower["namespace"]
        and upper["pairs"] == lower["pairs"]
        and upper["seen"]
        and lower["seen"]
        and bool(upper["tokens"]) == bool(lower["tokens"])
    )


def _ends(nodes: Mapping[int, State], kept: set[int], name: str) -> tuple[dict[int, int], dict[int, None]]:
    """Of each node its only child (0: there are several), and the nodes with which runs end."""
    only: dict[int, int] = {}
    for number in kept:
        parent = nodes[number]["parent"]
        only[parent] = 0 if parent in only else number
    ends = {
        number: None
        for number in sorted(kept)
        if not only.get(number) or not _alike(nodes[number], nodes[only[number]], name)
    }
    return only, ends


def _run(
    nodes: Mapping[int, State], only: Mapping[int, int], end: int, kept: Collection[int], name: str
) -> list[int]:
    """The run that ends with a node, from there up."""
    run = [end]
    while True:
        parent = nodes[run[-1]]["parent"]
        if parent not in kept or only[parent] != run[-1] or not _alike(nodes[parent], nodes[run[-1]], name):
            return run
        run.append(parent)


def _joined(parts: list[State]) -> State:
    """Nodes of a run, from the top, as one."""
    return {
        **parts[-1],
        "parent": parts[0]["parent"],
        "tokens": [token for part in parts for token in part["tokens"]],
        "units": sum(part["units"] for part in parts),
        "blocks": sum(part["blocks"] for part in parts),
        "created": min(part["created"] for part in parts),
        "last_access": max(part["last_access"] for part in parts),
    }


def concerns(event: Event, rank: int, kept: Collection[int]) -> bool:
    """It is about this rank: it says so, or it is about a node that the rank holds."""
    own = getattr(event, "rank", None)
    if own is not None:
        return bool(own == rank)
    if isinstance(event, fe.NodeStored | fe.NodeLeft):
        return str(rank) in fe.held_of(event.held)
    if isinstance(event, fe.BatchesTaken):
        return rank in event.ranks
    return any(number in kept for number in event.touches())


def _happened(view: View, rank: int, kept: Collection[int]) -> dict[int, set[str]]:
    """What happened to this rank's nodes in the stretch on view."""
    words: dict[int, set[str]] = {}
    for event in view.so_far:
        if event.status in _WORDS and concerns(event, rank, kept):
            for number in event.with_status({}):
                words.setdefault(number, set()).add(event.status)
        if parts := event.split_off():
            words.setdefault(parts[0], set()).update(words.get(parts[1], set()) - {"split"})
    return words


def _ghosts(
    view: View, rank: int, nodes: Mapping[int, State], kept: Collection[int], ends: Collection[int],
    only: Mapping[int, int],
) -> dict[int, State]:  # fmt: skip
    """What this rank lost in the stretch on view, as it last was: others may hold it still."""
    gone: dict[int, State] = {}
    for event in view.so_far:
        lost = isinstance(event, fe.NodeHeld) and event.rank == rank and not event.now
        if lost or (isinstance(event, fe.NodeLeft) and str(rank) in fe.held_of(event.held)):
            number = event.touches()[0]
            node = nodes.get(number) or view.ghosts.get(number)
            if node is not None and number not in kept:
                gone[number] = _below_a_run(node, kept, ends, only)
    return gone


def _below_a_run(node: State, kept: Collection[int], ends: Collection[int], only: Mapping[int, int]) -> State:
    """A ghost whose parent became part of a joined run hangs below that run."""
    parent = node["parent"]
    while parent in kept and parent not in ends:
        parent = only[parent]
    return {**node, "parent": parent}


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
