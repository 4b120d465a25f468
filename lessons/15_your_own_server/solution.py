"""Lesson 15, solved. minirad/fleet/wire.py, blocks.py and order.py believe less of what they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lessons.grading.subscriber import Block, Rank
from minirad.fleet.wire import Cleared, Hash, Record, Removed, Stored

FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


def read_batch(payload: bytes) -> tuple[float, list[Record]]:
    """Lists become maps first; after that there is one shape only."""
    sent = msgspec.msgpack.decode(payload)
    time, events = (sent["ts"], sent["events"]) if isinstance(sent, dict) else sent[:2]
    records = [_record(_as_map(event)) for event in events]
    return float(time), [record for record in records if record is not None]


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    names = FIELDS.get(event[0], ())
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _record(event: dict[str, Any]) -> Record | None:
    medium = event.get("medium") or "GPU"
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    if event["type"] == "BlockRemoved":
        return Removed(tuple(event["block_hashes"]), medium)
    if event["type"] != "BlockStored":
        return None
    if isinstance(event.get("lora_name"), dict):
        event = {**event, "lora_name": None, **event["lora_name"]}
    hashes, size, flat = tuple(event["block_hashes"]), event["block_size"], event.get("token_ids") or []
    if flat and len(flat) != size * len(hashes):
        return None
    tokens = tuple(tuple(flat[at : at + size]) for at in range(0, len(flat), size)) if flat else ()
    spaces = tuple(_space(event, at) for at in range(len(hashes)))
    return Stored(
        hashes, event.get("parent_block_hash"), tokens, size, medium, spaces=spaces if any(spaces) else ()
    )


def _space(event: dict[str, Any], at: int) -> tuple[str, ...]:
    keys = event.get("extra_keys")
    own = (keys[at] or []) if keys else []
    parts = [event.get("lora_name"), event.get("cache_salt"), *own]
    return tuple(dict.fromkeys(part for part in parts if part))


def store(blocks: dict[Hash, Block], event: Stored) -> None:
    """Each block follows the one before it."""
    parent = event.parent
    for at, name in enumerate(event.hashes):
        block = blocks.get(name)
        if block is None or not block.seen:
            if not event.tokens:
                continue
            if parent is not None and parent not in blocks:
                blocks[parent] = Block(None, (), (), set(), False)
            space = event.spaces[at] if event.spaces else ()
            block = blocks[name] = Block(parent, event.tokens[at], space, set(), True)
        block.media.add(event.medium)
        parent = name


def remove(blocks: dict[Hash, Block], event: Removed | Cleared) -> None:
    """Whoever leaves may be the last one for whose sake the one above it stayed."""
    if isinstance(event, Cleared):
        blocks.clear()
        return
    for name in event.hashes:
        if name in blocks and event.medium in blocks[name].media:
            blocks[name].media.remove(event.medium)
            _drop(blocks, name)


def _drop(blocks: dict[Hash, Block], name: Hash | None) -> None:
    while name is not None and not blocks[name].media:
        if any(block.parent == name for block in blocks.values()):
            return
        name = blocks.pop(name).parent


def _ask(rank: Rank) -> None:
    rank.asking, rank.top, rank.again = True, -1, False
    rank.ask(max(rank.last, 0))


def _begin_anew(rank: Rank) -> None:
    rank.restart()
    rank.last, rank.payload = -1, b""
    rank.newest = rank.held[-1][0] if rank.held else -1
    if rank.replay:
        _ask(rank)


def _next(rank: Rank, seq: int, payload: bytes) -> None:
    """Delivers a message if it is new; what is missing before it is lost."""
    if seq <= rank.last:
        return
    if seq > rank.last + 1:
        rank.lost(rank.last + 1, seq - 1)
    rank.last, rank.payload = seq, payload
    rank.deliver(seq, payload)


def connected(rank: Rank) -> None:
    """Behind the connection may be another publisher: what is held may be of the old one."""
    if rank.replay:
        rank.held.clear()
        _ask(rank)


def live(rank: Rank, seq: int, payload: bytes) -> None:
    """Holds, asks, or delivers."""
    if seq <= rank.newest:
        rank.held.clear()
        _begin_anew(rank)
    skipped, rank.newest = seq > rank.newest + 1, seq
    if rank.asking:
        rank.again = rank.again or skipped
        rank.held.append((seq, payload))
    elif seq > rank.last + 1 and rank.replay:
        rank.held.append((seq, payload))
        _ask(rank)
    else:
        _next(rank, seq, payload)


def answer(rank: Rank, seq: int, payload: bytes) -> None:
    """Live messages that the buffer no longer has come before it."""
    rank.top = max(rank.top, seq)
    if seq == rank.last and payload != rank.payload:
        _begin_anew(rank)
        return
    for held in _held_before(rank, seq):
        _next(rank, *held)
    if seq > rank.last:
        _next(rank, seq, payload)
        rank.again = True


def _held_before(rank: Rank, seq: int) -> Iterator[tuple[int, bytes]]:
    while rank.held and rank.held[0][0] < seq:
        yield rank.held.pop(0)


def answered(rank: Rank) -> None:
    """What was held comes last, unless something is missing that can still be had."""
    if rank.top < rank.last:
        _begin_anew(rank)
        return
    while rank.held:
        if rank.held[0][0] > rank.last + 1 and rank.again:
            _ask(rank)
            return
        _next(rank, *rank.held.pop(0))
    rank.asking = False


def hit(blocks: dict[Hash, Block], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """Down from the beginning, one block after the other."""
    done, at = 0, _following(blocks, None, tokens, space)
    while at is not None:
        done += len(blocks[at].tokens)
        at = _following(blocks, at, tokens[done:], space)
    return done


def _following(
    blocks: dict[Hash, Block], parent: Hash | None, tokens: Sequence[int], space: tuple[str, ...]
) -> Hash | None:
    for name, block in blocks.items():
        size = len(block.tokens)
        if (
            block.parent == parent and block.seen and block.media and block.space == space
            and 0 < size <= len(tokens) and tuple(tokens[:size]) == block.tokens
        ):  # fmt: skip
            return name
    return None
