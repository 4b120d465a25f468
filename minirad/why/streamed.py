"""A memory of a stream of KV events: what each rank of other engines held, and why a prompt would miss there.

    told = Streamed.of(recording)          # of a stream (minirad kv-events), or take frames as they come
    for rank, answer in told.why(tokens).items(): print(Words(named=told.named).sentence(answer))

One memory for all ranks: what the memory calls a namespace is a rank with its own namespace, so that what
another rank holds is found as well. A stream tells of blocks only: not who asked for them, and not for whom
they had to go. What is behind a block that was never told, or without tokens, is not known by its content.

Follows the tree by its events alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.observe import fleet_events as fe
from minirad.observe.event import Event
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State
from minirad.why.answer import Answer, Asked, why
from minirad.why.follows import Follows
from minirad.why.memory import Departure, Memory


@dataclass(slots=True)
class _Node:
    """A node of the stream's tree. told: its tokens are known; held: rank -> media."""

    parent: int
    edge: bytes
    pairs: bool
    space: str
    told: bool
    held: dict[int, frozenset[str]]
    below: set[int] = field(default_factory=set)


class Streamed(Follows):
    """A stream's memory; `take` its frames in order.

    Attributes:
        ranks: those that were told of. spaces: the namespaces, by their number in the recording.
    """

    def __init__(self, header: State, most: int | None = None) -> None:
        tree = header["start"]["tree"]
        if "ranks" not in tree:
            raise ValueError("this recording is of an engine, and not of a stream of KV events")
        self.block_size = int(tree["page_size"])
        self.ranks: set[int] = {int(each["rank"]) for each in tree["ranks"]}
        self.spaces: list[str] = list(tree["spaces"])
        self._memories = {False: Memory(1, most), True: Memory(2, most)}  # of pairs of tokens
        self._nodes: dict[int, _Node] = {0: _Node(0, b"", False, "", True, {})}
        self._now = float(header["start"]["step"])
        self._cleared: set[int] = set()  # ranks that lose everything in this frame
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            fe.NodeStored: self._store, fe.NodeExtended: self._extend, fe.NodeShortened: self._shorten,
            fe.NodeDivided: self._split, fe.NodesJoined: self._join, fe.NodeHeld: self._hold,
            fe.NodeLost: self._hold, fe.NodeLeft: self._leave, fe.NodeMoved: self._move,
            fe.RankRestarted: self._clear, fe.RankCleared: self._clear,
        }  # fmt: skip
        for node in sorted(tree["nodes"], key=_depth(tree["nodes"])):
            self._add(
                node["id"], node["parent"], node["tokens"], node["pairs"], self.spaces[node["namespace"]],
                node["seen"] and bool(node["tokens"]), node["held"],
            )  # fmt: skip

    def take(self, frame: Frame) -> None:
        """The next frame."""
        self._now = float(frame.step)
        for event in frame.events:
            self.hear(event)
        self._cleared.clear()
        self._taken += 1

    def hear(self, event: Event) -> None:
        """The next event, of the moment of the frame that is being taken."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def why(self, tokens: Any, space: str = "") -> dict[int, Answer]:
        """What would become of a prompt now, on each rank. space: its namespace's name."""
        found = {}
        for rank in sorted(self.ranks):
            pairs = bool(self._memories[True].kept)
            asked = Asked.of(tokens, (rank, space), self.block_size, f"rank {rank}", pairs=pairs)
            found[rank] = why(self._memories[pairs], asked, self._now)
        return found

    @staticmethod
    def named(namespace: Hashable) -> str:
        """What the namespace of a loss is called."""
        rank, space = namespace if isinstance(namespace, tuple) else (namespace, "")
        return f"rank {rank}, {space}" if space else f"rank {rank}"

    # ------------------------------------------------------------ nodes

    def _add(
        self, number: int, parent: int, tokens: Any, pairs: bool, space: str, told: bool, held: dict[str, str]
    ) -> None:
        edge = np.asarray(tokens, dtype="<i4").tobytes()
        media = {int(rank): _media(text) for rank, text in held.items()}
        self._nodes[number] = _Node(parent, edge, pairs, space, told, media)
        self._nodes[parent].below.add(number)
        self.ranks |= media.keys()
        self._tell(number)

    def _path(self, number: int) -> bytes | None:
        """All tokens to a node's end; None where some of them are not known."""
        parts: list[bytes] = []
        while number:
            node = self._nodes[number]
            if not node.told:
                return None
            parts.append(node.edge)
            number = node.parent
        return b"".join(reversed(parts))

    def _tell(self, number: int, size: int | None = None) -> None:
        """What holds a node's last `size` bytes (None: all of it) is told to the memory."""
        node, path = self._nodes[number], self._path(number)
        if path is not None:
            for rank, media in node.held.items():
                for medium in sorted(media):
                    self._came(node, path, len(node.edge) if size is None else size, rank, medium)

    def _came(self, node: _Node, path: bytes, size: int, rank: int, medium: str) -> None:
        memory = self._memories[node.pairs]
        start = (len(path) - size) // memory.unit
        memory.came((rank, node.space), path, start, when=self._now, medium=medium)

    def _gone(self, number: int, size: int, lost: Iterator[tuple[int, str]]) -> None:
        node, path = self._nodes[number], self._path(number)
        for rank, medium in lost:
            if path is not None:
                memory = self._memories[node.pairs]
                left = Departure(self._now, "flushed" if rank in self._cleared else "evicted", medium)
                memory.left((rank, node.space), path, (len(path) - size) // memory.unit, left)

    # ------------------------------------------------------------ events

    def _store(self, event: fe.NodeStored) -> None:
        self.spaces[event.namespace : event.namespace + 1] = [event.space]
        told = event.seen and bool(event.tokens)
        held = fe.held_of(event.held)
        self._add(event.node, event.parent, event.tokens, event.pairs, event.space, told, held)

    def _extend(self, event: fe.NodeExtended) -> None:
        more = np.asarray(event.tokens, dtype="<i4").tobytes()
        node = self._nodes[event.node]
        node.edge += more
        node.told = node.told and bool(more)
        self._tell(event.node, len(more))

    def _shorten(self, event: fe.NodeShortened) -> None:
        node = self._nodes[event.node]
        if node.told:
            size = event.units * self._memories[node.pairs].unit
            self._gone(event.node, size, _pairs(node.held))
            node.edge = node.edge[: len(node.edge) - size]

    def _split(self, event: fe.NodeDivided) -> None:
        lower = self._nodes[event.lower]
        cut = event.units * self._memories[lower.pairs].unit
        upper = _Node(
            lower.parent, lower.edge[:cut], lower.pairs, lower.space, lower.told, dict(lower.held),
            {event.lower},
        )  # fmt: skip
        above = self._nodes[lower.parent].below
        above.discard(event.lower)
        above.add(event.upper)
        self._nodes[event.upper] = upper
        lower.parent, lower.edge = event.upper, lower.edge[cut:]

    def _join(self, event: fe.NodesJoined) -> None:
        upper, lower = self._nodes.pop(event.upper), self._nodes[event.lower]
        lower.parent, lower.edge = upper.parent, upper.edge + lower.edge
        above = self._nodes[upper.parent].below
        above.discard(event.upper)
        above.add(event.lower)

    def _hold(self, event: fe.NodeHeld) -> None:
        node, was, now = self._nodes[event.node], _media(event.was), _media(event.now)
        node.held[event.rank] = now
        self.ranks.add(event.rank)
        path = self._path(event.node)
        for medium in sorted(now - was) if path is not None else ():
            self._came(node, path or b"", len(node.edge), event.rank, medium)
        self._gone(event.node, len(node.edge), ((event.rank, medium) for medium in sorted(was - now)))

    def _leave(self, event: fe.NodeLeft) -> None:
        node = self._nodes[event.node]
        self._gone(event.node, len(node.edge), _pairs(node.held))
        del self._nodes[event.node]
        self._nodes[node.parent].below.discard(event.node)

    def _move(self, event: fe.NodeMoved) -> None:
        """Now it is known what its tokens, and those below it, stand behind."""
        node = self._nodes[event.node]
        self._nodes[node.parent].below.discard(event.node)
        node.parent = event.parent
        self._nodes[event.parent].below.add(event.node)
        todo = [event.node]
        while todo:
            self._tell(todo[-1])
            todo.extend(self._nodes[todo.pop()].below)

    def _clear(self, event: fe.RankRestarted | fe.RankCleared) -> None:
        self._cleared.add(event.rank)


def _media(text: str) -> frozenset[str]:
    return frozenset(text.split("+")) - {fe.MAYBE, ""}  # told twice and removed once: not counted on


def _pairs(held: dict[int, frozenset[str]]) -> Iterator[tuple[int, str]]:
    return ((rank, medium) for rank, media in held.items() for medium in sorted(media))


def _depth(nodes: list[State]) -> Any:
    parents = {node["id"]: node["parent"] for node in nodes}

    def depth(node: State) -> int:
        found, step = 0, node["id"]
        while step and found <= len(parents):
            found, step = found + 1, parents.get(step, 0)
        return found

    return depth
