"""Lesson 15, solved a third way: typed by msgspec, trees of sets, a queue that is worked off."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from lessons.grading.subscriber import Block, Rank
from minirad.fleet.wire import Cleared, Hash, Record, Removed, Stored


class Told(msgspec.Struct):
    """A BlockStored or BlockRemoved, whatever it came as."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None
    lora_name: str | dict[str, str] | None = None
    extra_keys: list[list[str] | None] | None = None
    cache_salt: str | None = None


def read_batch(payload: bytes) -> tuple[float, list[Record]]:
    """Every event becomes a Told."""
    sent = msgspec.msgpack.decode(payload)
    if isinstance(sent, list):
        sent = {"ts": sent[0], "events": sent[1]}
    return sent["ts"], [record for event in sent["events"] for record in _records(event)]


def _records(event: Any) -> list[Record]:
    listed = isinstance(event, list)
    kind = event[0] if listed else event["type"]
    if kind == "AllBlocksCleared":
        return [Cleared()]
    if kind not in ("BlockStored", "BlockRemoved"):
        return []
    if listed and kind == "BlockRemoved":
        told = Told(event[1], medium=event[2] if len(event) > 2 else None)
    elif listed:
        told = Told(*event[1:9])
    else:
        told = Told(**{name: event[name] for name in Told.__struct_fields__ if name in event})
    if isinstance(told.lora_name, dict):
        told.lora_name, told.cache_salt = None, told.lora_name["cache_salt"]
    hashes, medium = tuple(told.block_hashes), told.medium or "GPU"
    if kind == "BlockRemoved":
        return [Removed(hashes, medium)]
    flat = iter(told.token_ids or [])
    size = told.block_size
    rows = tuple(zip(*[flat] * size, strict=False)) if told.token_ids else ()
    if told.token_ids and (len(rows), size * len(rows)) != (len(hashes), len(told.token_ids)):
        return []
    keys = told.extra_keys or [None] * len(hashes)
    spaces = tuple(
        tuple({part: 0 for part in (told.lora_name, told.cache_salt, *(own or ())) if part}) for own in keys
    )
    spaces = spaces if spaces.count(()) < len(spaces) else ()
    return [Stored(hashes, told.parent_block_hash, rows, size, medium, spaces=spaces)]


def store(blocks: dict[Hash, Block], event: Stored) -> None:
    """From the last block to the first: each one makes a place for the one before it."""
    for at in reversed(range(len(event.hashes))):
        name = event.hashes[at]
        known = blocks.get(name)
        if known is not None and known.seen:
            known.media.add(event.medium)
        elif event.tokens:
            parent = event.hashes[at - 1] if at else event.parent
            space = event.spaces[at] if event.spaces else ()
            blocks[name] = Block(parent, event.tokens[at], space, {event.medium}, True)
            if parent is not None and parent not in blocks:
                blocks[parent] = Block(None, (), (), set(), False)


def remove(blocks: dict[Hash, Block], event: Removed | Cleared) -> None:
    """Counts who follows whom once, and works a queue off."""
    if isinstance(event, Cleared):
        return blocks.clear()
    followers: defaultdict[Hash | None, int] = defaultdict(int)
    for block in blocks.values():
        followers[block.parent] += 1
    queue = deque(name for name in event.hashes if name in blocks)
    for name in queue:
        blocks[name].media.discard(event.medium)
    while queue:
        name = queue.popleft()
        if name in blocks and not blocks[name].media and not followers[name]:
            parent = blocks.pop(name).parent
            followers[parent] -= 1
            if parent is not None:
                queue.append(parent)
    return None


def _question(rank: Rank) -> None:
    rank.asking, rank.again, rank.top = True, False, -1
    rank.ask(rank.last if rank.last >= 0 else 0)


def _forget(rank: Rank) -> None:
    rank.restart()
    rank.payload, rank.last = b"", -1
    rank.newest = ([-1] + [seq for seq, _ in rank.held])[-1]
    if rank.replay:
        _question(rank)


def _turn(rank: Rank, seq: int, payload: bytes) -> bool:
    """True if it was new."""
    missing = seq - rank.last - 1
    if missing < 0:
        return False
    if missing > 0:
        rank.lost(seq - missing, seq - 1)
    rank.deliver(seq, payload)
    rank.last, rank.payload = seq, payload
    return True


def connected(rank: Rank) -> None:
    """What was held is not worth keeping."""
    if rank.replay:
        del rank.held[:]
        _question(rank)


def live(rank: Rank, seq: int, payload: bytes) -> None:
    """Decides what a number means, then what to do."""
    if seq <= rank.newest:
        del rank.held[:]
        _forget(rank)
    gap = seq - rank.newest > 1
    rank.newest = seq
    missing = seq - rank.last > 1
    if not rank.asking and not (missing and rank.replay):
        _turn(rank, seq, payload)
        return
    rank.held += [(seq, payload)]
    if not rank.asking:
        _question(rank)
    elif gap:
        rank.again = True


def answer(rank: Rank, seq: int, payload: bytes) -> None:
    """First the held ones that are older."""
    rank.top = max(seq, rank.top)
    if (seq, payload) != (rank.last, rank.payload) and seq == rank.last:
        return _forget(rank)
    while rank.held and rank.held[0][0] < seq:
        _turn(rank, *rank.held.pop(0))
    if _turn(rank, seq, payload):
        rank.again = True
    return None


def answered(rank: Rank) -> None:
    """Ends the question, or puts it again."""
    if rank.top < rank.last:
        return _forget(rank)
    rank.asking = False
    while rank.held and not rank.asking:
        if rank.again and rank.held[0][0] - rank.last > 1:
            _question(rank)
        else:
            _turn(rank, *rank.held.pop(0))
    return None


def hit(blocks: dict[Hash, Block], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """Calls itself for what follows."""
    return _below(blocks, None, tuple(tokens), space)


def _below(
    blocks: dict[Hash, Block], parent: Hash | None, tokens: tuple[int, ...], space: tuple[str, ...]
) -> int:
    best = 0
    for name, block in blocks.items():
        size = len(block.tokens)
        if block.media and (block.parent, block.space, block.tokens) == (parent, space, tokens[:size]):
            best = max(best, size + _below(blocks, name, tokens[size:], space))
    return best
