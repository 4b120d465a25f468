"""One rank's blocks, as it tells of them: which are where, and which block each one follows.

A block is named by its hash and follows another one (its parent), so a rank's blocks are a forest.
`RankBlocks` takes one event after the other and never finds fault with one: what cannot be so (a removal of
what is not known, a block told twice, one that would be its own ancestor) is counted.

Beside what is held, a forest has *holes*, blocks that were removed while something below them was not, and
*placeholders*, parents that were never told (`seen` is False). Both go when nothing is below them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from minirad.fleet.wire import Cleared, Hash, Record, Removed, Stored, hash_name

MOST_MAYBE = 100_000  # blocks that may be there
MOST_BLOCKS = 1 << 20  # of a rank
MOST_PARTS = 16  # of a namespace
NOWHERE: frozenset[str] = frozenset()

Space = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Block:
    """One block of a rank.

    above: the block that it follows, None for the first of a prompt; first, next, prev: its children, and its
    place among those of its parent. tokens: () where they are not told. size: positions, 0 where it is not
    `seen`. space: what names its namespace, its parent's parts first; own: what it was told itself. media:
    where it is; maybe: where it may be, as it was told twice and removed once. told: how often more it was
    told on a medium than removed, of media where it was told again. place: belongs to who listens.
    """

    hash: Hash
    above: Block | None = None
    tokens: tuple[int, ...] = ()
    size: int = 0
    pairs: bool = False
    own: Space = ()
    space: Space = ()
    seen: bool = False
    media: frozenset[str] = NOWHERE
    maybe: frozenset[str] = NOWHERE
    told: dict[str, int] | None = None
    first: Block | None = None
    next: Block | None = None
    prev: Block | None = None
    place: Any = None

    @property
    def parent(self) -> Hash | None:
        """The hash of the block that it follows."""
        return None if self.above is None else self.above.hash

    @property
    def ambiguous(self) -> bool:
        """It was told more often than it was removed: equal hashes of two tenants, perhaps."""
        return self.told is not None

    def children(self) -> Iterator[Block]:
        """The blocks that follow it, the last one told first."""
        child = self.first
        while child is not None:
            yield child
            child = child.next

    def below(self) -> Iterator[Block]:
        """All blocks below it, parents before their children."""
        todo = list(self.children())
        while todo:
            block = todo.pop()
            yield block
            todo.extend(block.children())

    @property
    def space_text(self) -> str:
        """Its namespace in words; "" for none."""
        return ", ".join(self.space)


class Listener(Protocol):
    """Who wants to know what changes in a forest (FleetTree)."""

    def placed(self, block: Block) -> None:
        """A block is new, or stands elsewhere, or has other tokens; then so does all that is below it."""

    def held(self, block: Block) -> None:
        """A block's media changed."""

    def gone(self, block: Block) -> None:
        """A block left the forest; nothing is below it."""

    def cleared(self, blocks: list[Block]) -> None:
        """All blocks of the forest are gone."""


class _Nobody:
    def placed(self, block: Block) -> None: ...

    def held(self, block: Block) -> None: ...

    def gone(self, block: Block) -> None: ...

    def cleared(self, blocks: list[Block]) -> None: ...


class RankBlocks:
    """One rank's forest of blocks. blocks: by hash, with holes and placeholders; maybe: what may be held.

    duplicates: blocks told again while they were there. unknown_removals: removals of what is not known.
    other_groups: blocks of other cache groups. conflicts: blocks told again as something else, which stay as
    they were. too_many: blocks beyond MOST_BLOCKS, left out. stored, removed: blocks as they were told.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self.blocks: dict[Hash, Block] = {}
        self.maybe: dict[Hash, Block] = {}  # the oldest first
        self.duplicates = self.unknown_removals = self.other_groups = self.conflicts = self.too_many = 0
        self.stored = self.removed = 0
        self._listener: Listener = listener if listener is not None else _Nobody()
        self._sets: dict[frozenset[str], frozenset[str]] = {NOWHERE: NOWHERE}

    @property
    def ignored(self) -> int:
        """How many blocks were told of without changing anything."""
        return self.duplicates + self.unknown_removals + self.other_groups + self.conflicts + self.too_many

    def take(self, event: Record) -> None:
        """Moves the forest on by one event."""
        if isinstance(event, Stored):
            self._take_stored(event)
        elif isinstance(event, Removed):
            self._take_removed(event)
        elif isinstance(event, Cleared):
            self.clear()

    def clear(self) -> None:
        """Nothing is left. What was counted stays."""
        blocks = list(self.blocks.values())
        self.blocks, self.maybe = {}, {}
        self._listener.cleared(blocks)
        for block in blocks:  # no circles of references are left behind
            block.above = block.first = block.next = block.prev = None

    # ------------------------------------------------------------ stored

    def _take_stored(self, event: Stored) -> None:
        self.stored += len(event.hashes)
        if event.other_group:
            self.other_groups += len(event.hashes)
            return
        before = event.parent
        for at, name in enumerate(event.hashes):
            block = self.blocks.get(name)
            if event.tokens:
                own = event.spaces[at] if event.spaces else ()
                block = self._told(block, name, before, event.tokens[at], event.pairs, own)
            elif block is None or not block.seen:
                size = event.block_size or 1  # a copy's size may be told as 0: it has a place nevertheless
                block = self._new(block, name, before, (), size, False, ())
            if block is None:  # no room: what follows would have no parent
                self.too_many += len(event.hashes) - at
                return
            self._put(block, event.medium)
            before = name

    def _told(
        self, block: Block | None, name: Hash, before: Hash | None, tokens: tuple[int, ...], pairs: bool,
        own: Space,
    ) -> Block | None:  # fmt: skip
        """The block with what was told of it; None where there is no room."""
        if block is not None and block.seen:
            same = block.tokens == tokens and block.pairs == pairs and block.parent == before
            if same and (own == block.own or _joined(block.above, own) == block.space):
                return block
            if block.tokens and (block.media or block.maybe):
                self.conflicts += 1
                return block
        return self._new(block, name, before, tokens, len(tokens) // (1 + pairs), pairs, own)

    def _new(
        self, block: Block | None, name: Hash, before: Hash | None, tokens: tuple[int, ...], size: int,
        pairs: bool, own: Space,
    ) -> Block | None:  # fmt: skip
        """A block that is new, or known as a placeholder or a hole only, gets content and a parent."""
        if block is None and len(self.blocks) >= MOST_BLOCKS - 1:
            return None
        above = None if before is None else self.blocks.get(before)
        if before == name:
            self.conflicts += 1
            above = None
        elif above is None and before is not None:
            above = self.blocks[before] = Block(before)
            self._listener.placed(above)
        left: Block | None = None
        if block is None:
            block = self.blocks[name] = Block(name)
        else:
            left = block.above
            if left is not None:
                _unlink(block)
            if above is not None and _is_above(block, above):
                self.conflicts += 1  # it would be its own ancestor
                above = None
        block.tokens, block.size, block.pairs, block.own, block.seen = tokens, size, pairs, own, True
        if above is not None:
            _link(block, above)
        self._name(block)
        self._listener.placed(block)
        if left is not None:
            self._drop(left)
        return block

    def _name(self, block: Block) -> None:
        """Namespaces of a block and, where it changed, of those below it."""
        was = block.space
        block.space = _joined(block.above, block.own)
        if block.space != was:
            todo = [block]
            while todo:
                for child in todo.pop().children():
                    space = _joined(child.above, child.own)
                    if space != child.space:
                        child.space = space
                        todo.append(child)

    def _put(self, block: Block, medium: str) -> None:
        """A block is in a medium from now on."""
        told = block.told
        if medium in block.media:
            self.duplicates += 1
            block.told = {**(told or {}), medium: (told or {}).get(medium, 1) + 1}
            return
        block.media = self._shared(block.media | {medium})
        if medium in block.maybe:
            block.maybe = self._shared(block.maybe - {medium})
            block.told = {**(told or {}), medium: (told or {}).get(medium, 1) + 1}
        if self.maybe:
            self.maybe.pop(block.hash, None)
        self._listener.held(block)

    def _shared(self, media: frozenset[str]) -> frozenset[str]:
        """An equal set that other blocks have, too: there are few of them, and many blocks."""
        if len(self._sets) > 1000:
            self._sets.clear()
        return self._sets.setdefault(media, media)

    # ------------------------------------------------------------ removed

    def _take_removed(self, event: Removed) -> None:
        self.removed += len(event.hashes)
        if event.other_group:
            self.other_groups += len(event.hashes)
            return
        for name in event.hashes:
            block = self.blocks.get(name)
            if block is None or (event.medium not in block.media and event.medium not in block.maybe):
                self.unknown_removals += 1
            else:
                self._remove(block, event.medium)

    def _remove(self, block: Block, medium: str) -> None:
        told = dict(block.told or {})
        left = told.pop(medium, 1) - 1
        block.media = self._shared(block.media - {medium})
        if left:
            told[medium] = left
            block.maybe = self._shared(block.maybe | {medium})
        elif block.maybe:
            block.maybe = self._shared(block.maybe - {medium})
        block.told = told or None
        if block.maybe and not block.media:
            self.maybe.setdefault(block.hash, block)
            self._listener.held(block)
            if len(self.maybe) > MOST_MAYBE:
                self._forget(next(iter(self.maybe.values())))
        else:
            self._settle(block)

    def _forget(self, block: Block) -> None:
        """What may be there is no longer remembered."""
        block.maybe, block.told = NOWHERE, None
        self._settle(block)

    def _settle(self, block: Block) -> None:
        """After a change of media: the block is still there, in fewer places, or it is not."""
        if not block.maybe:
            self.maybe.pop(block.hash, None)
        if block.media or block.maybe or block.first is not None:
            self._listener.held(block)
        else:
            self._drop(block)

    def _drop(self, block: Block | None) -> None:
        """A block that nobody holds and nothing follows leaves, and so do such above it."""
        while block is not None and block.first is None and not block.media and not block.maybe:
            above = block.above
            if above is not None:
                _unlink(block)
            del self.blocks[block.hash]
            self._listener.gone(block)
            block = above

    # ------------------------------------------------------------ as data

    def as_json(self) -> dict[str, Any]:
        """What is held, what may be held (`ambiguous`), and what was counted; hashes as texts."""
        return {
            "blocks": {hash_name(b.hash): _as_json(b, b.media) for b in self.blocks.values() if b.media},
            "ambiguous": {hash_name(b.hash): _as_json(b, b.maybe) for b in self.maybe.values()},
            "duplicates": self.duplicates, "unknown_removals": self.unknown_removals,
            "other_groups": self.other_groups, "conflicts": self.conflicts, "too_many": self.too_many,
        }  # fmt: skip


def _as_json(block: Block, media: frozenset[str]) -> dict[str, Any]:
    parent = block.parent
    return {
        "parent": None if parent is None else hash_name(parent), "tokens": list(block.tokens),
        "media": sorted(media), "space": block.space_text or None,
        **({"ambiguous": True} if block.ambiguous else {}),
    }  # fmt: skip


def _joined(above: Block | None, own: Space) -> Space:
    """A parent's parts and those of its own, each once."""
    if above is None or not above.space:
        return own[:MOST_PARTS]
    if not own or own == above.space:
        return above.space
    return tuple(dict.fromkeys((*above.space, *own)))[:MOST_PARTS]


def _is_above(block: Block, other: Block) -> bool:
    """Whether `block` is `other`, or one that it stands below."""
    at: Block | None = other if block.first is not None or block is other else None
    while at is not None and at is not block:
        at = at.above
    return at is not None


def _link(block: Block, above: Block) -> None:
    block.above, block.next = above, above.first
    if above.first is not None:
        above.first.prev = block
    above.first = block


def _unlink(block: Block) -> None:
    if block.prev is not None:
        block.prev.next = block.next
    elif block.above is not None:
        block.above.first = block.next
    if block.next is not None:
        block.next.prev = block.prev
    block.above = block.next = block.prev = None
