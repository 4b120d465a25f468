"""Lesson 15, solved another way: fields are looked up by name or place, leaves go in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lessons.grading.subscriber import Block, Rank
from minirad.fleet.wire import Cleared, Hash, Record, Removed, Stored

Get = Callable[[str, int], Any]  # a field by its name, or by its place in a list


def read_batch(payload: bytes) -> tuple[float, list[Record]]:
    """Asks for each field where it would be in a list, and by its name in a map."""
    batch = msgspec.msgpack.decode(payload)
    get = _getter(batch)
    records = []
    for event in get("events", 1):
        field = _getter(event)
        kind = field("type", 0)
        if kind == "AllBlocksCleared":
            records.append(Cleared())
        elif kind == "BlockRemoved":
            records.append(Removed(tuple(field("block_hashes", 1)), _medium(field("medium", 2))))
        elif kind == "BlockStored" and _is_whole(field):
            records.append(_stored(field))
    return get("ts", 0), records


def _getter(sent: Any) -> Get:
    def get(name: str, place: int) -> Any:
        if isinstance(sent, dict):
            return sent.get(name)
        return sent[place] if 0 <= place < len(sent) else None

    return get


def _medium(sent: str | None) -> str:
    return "GPU" if sent is None else sent


def _is_whole(field: Get) -> bool:
    tokens = field("token_ids", 3)
    return not tokens or len(tokens) == len(field("block_hashes", 1)) * field("block_size", 4)


def _stored(field: Get) -> Stored:
    hashes = field("block_hashes", 1)
    size, tokens = field("block_size", 4), field("token_ids", 3)
    name, salt = field("lora_name", 7), field("cache_salt", -1)
    if isinstance(name, dict):
        name, salt = None, name["cache_salt"]
    rows: list[tuple[int, ...]] = []
    spaces: list[tuple[str, ...]] = []
    for number in range(len(hashes)):
        if tokens:
            rows.append(tuple(tokens[number * size : (number + 1) * size]))
        space: list[str] = []
        keys = field("extra_keys", 8)
        for part in [name, salt, *((keys and keys[number]) or [])]:
            if part and part not in space:
                space.append(part)
        spaces.append(tuple(space))
    if not any(spaces):
        spaces = []
    parent, medium = field("parent_block_hash", 2), _medium(field("medium", 6))
    return Stored(tuple(hashes), parent, tuple(rows), size, medium, spaces=tuple(spaces))


def store(blocks: dict[Hash, Block], event: Stored) -> None:
    """Copies and new blocks are told apart first."""
    if not event.tokens:
        for name in event.hashes:
            if name in blocks and blocks[name].seen:
                blocks[name].media.add(event.medium)
        return
    spaces = event.spaces or ((),) * len(event.hashes)
    parents = (event.parent, *event.hashes)
    for name, parent, tokens, space in zip(event.hashes, parents, event.tokens, spaces, strict=False):
        if parent is not None:
            blocks.setdefault(parent, Block(None, (), (), set(), False))
        block = blocks.setdefault(name, Block(None, (), (), set(), False))
        if not block.seen:
            block.parent, block.tokens, block.space, block.seen = parent, tokens, space, True
        block.media |= {event.medium}


def remove(blocks: dict[Hash, Block], event: Removed | Cleared) -> None:
    """All media first; then leaves go as long as there are some that nobody holds."""
    if isinstance(event, Cleared):
        for name in list(blocks):
            del blocks[name]
        return
    for name in event.hashes:
        if name in blocks:
            blocks[name].media -= {event.medium}
    while True:
        parents = {block.parent for block in blocks.values()}
        gone = [name for name, block in blocks.items() if not block.media and name not in parents]
        if not gone:
            return
        for name in gone:
            del blocks[name]


def connected(rank: Rank) -> None:
    """Asks, if anybody can be asked."""
    if rank.replay:
        rank.held = []
        _ask(rank)


def live(rank: Rank, seq: int, payload: bytes) -> None:
    """A message alone is taken like one that is held and whose turn it is."""
    if seq <= rank.newest:
        rank.held = []
        _anew(rank)
    expected, rank.newest = rank.newest + 1, seq
    if rank.asking and seq != expected:
        rank.again = True
    rank.held.append((seq, payload))
    if rank.asking:
        return
    if rank.replay and seq > rank.last + 1:
        _ask(rank)
        return
    _flush(rank, seq)


def answer(rank: Rank, seq: int, payload: bytes) -> None:
    """Puts it between those that are held, and takes all up to it."""
    if seq > rank.top:
        rank.top = seq
    if seq == rank.last and payload != rank.payload:
        _anew(rank)
        return
    new = seq > rank.last
    older = [each for each in rank.held if each[0] < seq]
    newer = [each for each in rank.held if each[0] >= seq]
    rank.held = [*older, (seq, payload), *newer]
    _flush(rank, seq)
    rank.again = rank.again or new


def answered(rank: Rank) -> None:
    """Takes what is held as long as nothing is missing that could be had."""
    if rank.top < rank.last:
        _anew(rank)
        return
    for seq, _ in list(rank.held):
        if seq > rank.last + 1 and rank.again:
            _ask(rank)
            return
        _flush(rank, seq)
    rank.asking = False


def _flush(rank: Rank, end: int) -> None:
    """All that is held up to number `end` has its turn (the first of two with that number)."""
    for seq, payload in [each for each in rank.held if each[0] <= end]:
        if seq > rank.last:
            if seq != rank.last + 1:
                rank.lost(rank.last + 1, seq - 1)
            rank.deliver(seq, payload)
            rank.last, rank.payload = seq, payload
    rank.held = [each for each in rank.held if each[0] > end]


def _ask(rank: Rank) -> None:
    rank.asking = True
    rank.top, rank.again = -1, False
    rank.ask(0 if rank.last < 0 else rank.last)


def _anew(rank: Rank) -> None:
    rank.restart()
    rank.last, rank.payload, rank.newest = -1, b"", max((seq for seq, _ in rank.held), default=-1)
    if rank.replay:
        _ask(rank)


def hit(blocks: dict[Hash, Block], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """By a table of what follows what."""
    table = {
        (block.parent, block.tokens): name
        for name, block in blocks.items()
        if block.seen and block.media and block.space == space
    }
    sizes = {len(block.tokens) for block in blocks.values() if block.tokens}
    parent: Hash | None = None
    done, going = 0, True
    while going:
        going = False
        for size in sizes:
            name = table.get((parent, tuple(tokens[done : done + size])))
            if name is not None:
                parent, done, going = name, done + size, True
                break
    return done
