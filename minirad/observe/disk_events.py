"""What a tree with a disk tier tells: blocks of KV that were written, read, or are not there any more.

Blocks are read inside a step, as a node that lives in host memory. What the disk's threads do beside is told
at the beginning of the next step; when it happened is not known to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirad.observe.event import (
    CPU,
    BlockStream,
    Event,
    Headline,
    Ints,
    ReplayState,
    Word,
    check_host_slots,
    expect,
)
from minirad.observe.events import listed, node_name
from minirad.observe.snapshot import State

LONGEST_WHY = 500  # characters of why blocks were dropped


def has_disk(state: State) -> bool:
    """There is a third tier on a disk."""
    return "disk_bytes" in state["tree"]


def check_disk(tree: Any) -> None:
    """ValueError unless this is what a tree's snapshot can say of a disk (in a file from a stranger)."""
    expect("host_tokens" in tree, "a tree with a disk tier has a host tier, too")
    said = tree["disk_bytes"]
    expect(type(said) is int and 0 <= said < 1 << 63, "disk_bytes must be a whole number, 0 or more")


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _blocks(count: int) -> str:
    return f"{count:,} block{'s' * (count != 1)}"


def _time(microseconds: int) -> str:
    return f"{microseconds / 1000:,.1f} ms"


class _OfDisk:
    """What all these kinds have in common: they need a disk."""

    __slots__ = ()

    def check(self, state: ReplayState) -> None:
        expect("disk_bytes" in state.tree, f"{type(self).__name__}: this tree has no disk tier")
        for name in ("blocks", "bytes", "microseconds", "tokens", "files", "folder_bytes"):
            value = getattr(self, name, 0)
            expect(type(value) is not int or value >= 0, f"{type(self).__name__}: {name} is {value}")


@dataclass(frozen=True, slots=True)
class BlocksRead(_OfDisk, Event):
    """KV came from the disk: a new node that lives in host memory only, at the end of a request's match.

    tokens: its key units, flattened. blocks, bytes: of the files; microseconds: that the step waited.
    """

    node: int
    parent: int
    request: str
    tokens: Ints
    host_slots: Ints
    tick: int
    namespace: int
    blocks: int
    bytes: int
    microseconds: int

    word, headline = Word("disk", "hit"), Headline(145, "hit")
    status, colour, is_turn = "loaded", "hit", True

    def describe(self) -> str:
        return (
            f"{_tokens(len(self.host_slots))} of {self.request} read from the disk as {node_name(self.node)} "
            f"below {node_name(self.parent)}: {_blocks(self.blocks)}, {_time(self.microseconds)}"
        )

    def apply(self, state: ReplayState) -> None:
        state.nodes[self.node] = {
            "id": self.node, "parent": self.parent, "tokens": list(self.tokens), "slots": [],
            "namespace": self.namespace, "lock_ref": 0, "last_access": self.tick, "created": self.tick,
            "hits": 1, "priority": 0, "host": list(self.host_slots), "copying": False, "loading": False,
        }  # fmt: skip
        state.take_host(len(self.host_slots))

    def check(self, state: ReplayState) -> None:
        _OfDisk.check(self, state)
        expect(self.node > 0 and self.node not in state.nodes, f"node {self.node} is read twice")
        expect(self.request in state.requests, f"there is no request {self.request}")
        state.expect_node(self.parent)
        size = len(self.host_slots)
        fits = size > 0 and len(self.tokens) in (size, 2 * size)
        expect(fits, f"node {self.node} gets {len(self.tokens)} tokens and {size} host slots")
        check_host_slots(self.host_slots, state.tree, f"node {self.node}")

    def to_blocks(self, stream: BlockStream) -> None:
        stream.insert(self.node, self.parent, self.namespace, self.tokens, len(self.host_slots), CPU)

    @classmethod
    def several(cls, events: Sequence[BlocksRead]) -> str:
        names = listed([node_name(event.node) for event in events])
        return f"{_tokens(sum(len(event.host_slots) for event in events))} read from the disk as {names}"


@dataclass(frozen=True, slots=True)
class BlocksLate(_OfDisk, Event):
    """A step waited long enough for blocks from the disk; what did not come is computed."""

    request: str
    blocks: int
    microseconds: int

    word, headline = Word("late", "retract"), Headline(65, "retract")

    def describe(self) -> str:
        late = f"{_blocks(self.blocks)} from the disk {'are' if self.blocks != 1 else 'is'} late"
        return f"{late}: {self.request} computes instead, after {_time(self.microseconds)}"

    def check(self, state: ReplayState) -> None:
        _OfDisk.check(self, state)
        expect(self.request in state.requests, f"there is no request {self.request}")

    @classmethod
    def together(cls, events: Sequence[BlocksLate]) -> tuple[str, str]:
        names = list(dict.fromkeys(event.request for event in events))
        text = events[-1].describe()
        if len(names) > 1:
            late = _blocks(sum(event.blocks for event in events))
            text = f"{late} from the disk are late: {listed(names)} compute instead"
        return cls.headline.tone, text


@dataclass(frozen=True, slots=True)
class BlocksWritten(_OfDisk, Event):
    """Blocks were written to the disk, beside the steps. files, folder_bytes: what is in the folder now."""

    blocks: int
    tokens: int
    bytes: int
    microseconds: int
    files: int
    folder_bytes: int

    word, headline = Word("to disk", "host"), Headline(30)

    def describe(self) -> str:
        there = f"{self.files:,} file{'s' * (self.files != 1)} there now"
        what = f"{_tokens(self.tokens)} in {_blocks(self.blocks)}"
        return f"{what} written to the disk in {_time(self.microseconds)}: {there}"

    @classmethod
    def together(cls, events: Sequence[BlocksWritten]) -> tuple[str, str]:
        tokens, blocks = sum(e.tokens for e in events), sum(e.blocks for e in events)
        return cls.headline.tone, f"{_tokens(tokens)} in {_blocks(blocks)} written to the disk"


@dataclass(frozen=True, slots=True)
class BlocksDropped(_OfDisk, Event):
    """Blocks are not on the disk, or not any more. what: "dropped" or "broken"; why: in words."""

    blocks: int
    bytes: int
    what: str
    why: str
    files: int
    folder_bytes: int

    word, headline, colour = Word("off disk", "evict"), Headline(35, "evict"), "evict"

    def describe(self) -> str:
        if self.what == "broken":
            return f"{_blocks(self.blocks)} on the disk skipped: {self.why}"
        kind = "deleted from" if self.bytes else "not written to"
        return f"{_blocks(self.blocks)} {kind} the disk: {self.why}"

    def check(self, state: ReplayState) -> None:
        _OfDisk.check(self, state)
        expect(self.what in ("dropped", "broken"), f"blocks are dropped or broken, not {self.what!r:.40}")
        expect(len(self.why) <= LONGEST_WHY, f"why blocks were dropped is told in {len(self.why)} characters")

    @classmethod
    def several(cls, events: Sequence[BlocksDropped]) -> str:
        blocks = _blocks(sum(event.blocks for event in events))
        return f"{blocks} left the disk or were not written"
