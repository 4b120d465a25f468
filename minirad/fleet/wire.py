"""KV events as SGLang, vLLM and Dynamo send them, read into records; and our own written the same way.

A message's payload is msgpack: a batch, `[time, events, rank]` or a map with these names. An event is a map
with a `type`, or an array that begins with it and has the fields in _STORED's order (vLLM up to 0.23, older
SGLang). `Decoder` reads what it knows of them, one rank's: unknown fields and events are counted, a malformed
event is left out with one sentence, and only a payload that is no batch at all is a WireError.

Nothing that was sent is believed: a size is one that the tokens beside it have, and texts are bounded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from minirad.errors import said
from minirad.observe.kv_events import ADAPTER

Hash = int | bytes  # as it came: signed or unsigned 64 bits, or bytes

GPU = "GPU"
LARGEST_BLOCK = 1 << 20  # tokens of a block
LARGEST_TOKEN = (1 << 53) - 1  # what a page's numbers can hold
LONGEST_HASH = 64  # bytes
LONGEST_TEXT = 200  # characters of an adapter's name, a salt, a key
MOST_MEDIA = 16  # of one rank
MOST_GROUPS = 1024
LATEST = 1e14  # of the times, also where they are milliseconds

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}
_KNOWN = {name: {"type", *fields} for name, fields in _FIELDS.items()}
_KNOWN["BlockStored"] |= {"cache_salt", "session_id"}  # SGLang's, never positional
_RANKS = ("data_parallel_rank", "attn_dp_rank", "dp_rank")
# Words of the kinds of groups that do not keep every block of a prefix: they are no radix tree.
_NO_TREE = ("sliding", "chunked", "local", "mamba", "linear", "cross", "encoder", "window")


class WireError(ValueError):
    """A payload in which nothing can be read; the message is one sentence."""


class _Malformed(ValueError):
    """An event that is left out."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks came into a medium, each behind the one before it; where tokens are not told, they are copies.

    parent: of the first block; None where it begins a prompt. tokens: the ids of each block, pairs of bigram
    keys one after the other; () where they are not told. spaces: of each block, what names its namespace
    (adapter, salt, extra keys); () for none. other_group: of a cache group that is not drawn.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[tuple[int, ...], ...]
    block_size: int
    medium: str = GPU
    pairs: bool = False
    spaces: tuple[tuple[str, ...], ...] = ()
    other_group: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a medium."""

    hashes: tuple[Hash, ...]
    medium: str = GPU
    other_group: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left in any medium."""


Record = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One message: what happened between two of them.

    ts: seconds as the sender counts them, 0.0 where that is no time. rank: as the sender says, or None.
    unknown: fields and events that are not known, and events that are malformed.
    trouble: a sentence on the first malformed thing, or "".
    """

    ts: float
    events: tuple[Record, ...]
    rank: int | None = None
    unknown: int = 0
    trouble: str = ""


def hash_name(name: Hash) -> str:
    """A block's hash as a text: decimal, or hex where it is bytes."""
    return name.hex() if isinstance(name, bytes) else str(name)


def decode(payload: bytes) -> Batch:
    """One payload that stands alone; WireError, in one sentence, where nothing can be read in it."""
    return Decoder().decode(payload)


def encode(batch: Batch) -> bytes:
    """A batch as SGLang sends it by default: `[time, [maps], rank]`; `decode` gives an equal one back."""
    import msgspec

    payload: bytes = msgspec.msgpack.encode(
        [batch.ts, [_as_map(event) for event in batch.events], batch.rank]
    )
    return payload


class Decoder:
    """Reads one rank's payloads in their order.

    It remembers what was told of the rank's cache groups, since removals name a group by its number only. Of
    several groups that keep whole prefixes the first one told is drawn. A rank that begins anew needs a new
    Decoder.
    """

    def __init__(self) -> None:
        import msgspec

        self._unpack = msgspec.msgpack.Decoder().decode
        self._failures = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, MemoryError)
        self._groups: dict[int, bool] = {}  # by number: whether it keeps whole prefixes
        self._drawn: int | None = None
        self._media: set[str] = set()

    def decode(self, payload: bytes) -> Batch:
        """The next payload; WireError, in one sentence, where nothing can be read in it."""
        ts, sent, rank, unknown = self._batch(payload)
        troubles: list[str] = []
        events: list[Record] = []
        for event in sent:
            try:
                record, more = self._event(event)
            except _Malformed as error:
                troubles.append(str(error))
                continue
            unknown += more
            if record is not None:
                events.append(record)
        time = _time(ts)
        if time is None:
            troubles.append(f"the batch's time is {said(ts)}")
        trouble = troubles[0] if troubles else ""
        return Batch(time or 0.0, tuple(events), rank, unknown + len(troubles), trouble)

    def _batch(self, payload: bytes) -> tuple[Any, list[Any], int | None, int]:
        """Time, events, rank, number of unknown fields."""
        try:
            sent = self._unpack(payload)
        except RecursionError:
            raise WireError("a payload is nested too deeply") from None
        except self._failures as error:
            raise WireError(f"a payload of {len(payload)} bytes is no msgpack: {said(str(error))}") from None
        if isinstance(sent, dict):
            ts, events = sent.get("ts"), sent.get("events")
            rank = next((sent[name] for name in _RANKS if sent.get(name) is not None), None)
            unknown = len(sent.keys() - {"ts", "events", *_RANKS})
        elif isinstance(sent, list) and len(sent) >= 2:
            ts, events, rank, unknown = (
                sent[0],
                sent[1],
                sent[2] if len(sent) > 2 else None,
                max(len(sent) - 3, 0),
            )
        else:
            raise WireError(f"a payload is no batch of events: {said(sent)}")
        if not isinstance(events, list):
            raise WireError(f"a batch's events are no list: {said(events)}")
        if rank is not None and not (type(rank) is int and 0 <= rank < 1 << 31):
            rank, unknown = None, unknown + 1
        return ts, events, rank, unknown

    def _event(self, sent: Any) -> tuple[Record | None, int]:
        """The record of an event, None for one that is not known or names no block; and what is unknown."""
        if isinstance(sent, dict):
            kind, fields = sent.get("type"), sent
            known = _KNOWN.get(kind) if isinstance(kind, str) else None
            unknown = len(sent) - sum(map(known.__contains__, sent)) if known else 0
        elif isinstance(sent, list) and sent:
            kind = sent[0]
            names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
            fields = dict(zip(names, sent[1:], strict=False))
            unknown = max(len(sent) - 1 - len(names), 0)
        else:
            raise _Malformed(f"an event is {said(sent)}")
        if kind == "BlockStored":
            return self._stored(fields), unknown
        if kind == "BlockRemoved":
            return self._removed(fields), unknown
        if kind == "AllBlocksCleared":
            return Cleared(), unknown
        if isinstance(kind, str):
            return None, 1
        raise _Malformed(f"an event's type is {said(kind)}")

    def _stored(self, sent: dict[str, Any]) -> Stored | None:
        hashes, parent = _hashes(sent), sent.get("parent_block_hash")
        if not hashes:
            return None
        medium, size = self._medium(sent), sent.get("block_size")
        if parent is not None:
            _check_hashes([parent])
        if self._is_other(sent.get("group_idx"), sent.get("kv_cache_spec_kind")):
            return Stored(
                hashes, parent, (), 0, medium, other_group=True
            )  # its tokens are not one row a block
        if type(size) is not int or not 0 <= size <= LARGEST_BLOCK:
            raise _Malformed(f"BlockStored with block_size {said(size)}")
        tokens, pairs = _tokens(sent.get("token_ids"), len(hashes), size)
        if not tokens:
            hashes = tuple(dict.fromkeys(hashes))  # copies of blocks that need not follow each other
        elif len(set(hashes)) < len(hashes) or parent in hashes:
            raise _Malformed(f"BlockStored with a block behind itself: {said(hashes)}")
        return Stored(hashes, parent, tokens, size, medium, pairs, _spaces(sent, len(hashes)))

    def _removed(self, sent: dict[str, Any]) -> Removed | None:
        hashes = _hashes(sent)
        other = self._is_other(sent.get("group_idx"), None)
        return Removed(hashes, self._medium(sent), other) if hashes else None

    def _medium(self, sent: dict[str, Any]) -> str:
        medium = sent.get("medium")
        if medium is None:
            return GPU
        if medium not in self._media if isinstance(medium, str) else True:
            if not isinstance(medium, str) or not 0 < len(medium) <= LONGEST_TEXT:
                raise _Malformed(f"an event's medium is {said(medium)}")
            if len(self._media) >= MOST_MEDIA:
                raise _Malformed(
                    f"medium {said(medium)} is one more than the {MOST_MEDIA} that a rank may have"
                )
            self._media.add(medium)
        text: str = medium
        return text

    def _is_other(self, index: Any, kind: Any) -> bool:
        """Whether an event is of a cache group that is not drawn."""
        if index is None and kind is None:
            return False
        if index is not None and not (type(index) is int and 0 <= index < MOST_GROUPS):
            raise _Malformed(f"an event's group_idx is {said(index)}")
        if isinstance(kind, str) and kind != "unknown":
            keeps = not any(word in kind for word in _NO_TREE)
            if index is None:
                return not keeps
            self._groups[index] = keeps
            if keeps and self._drawn is None:
                self._drawn = index
        if index is None:
            return False
        if self._drawn is not None:
            return bool(index != self._drawn)
        return not self._groups.get(index, index == 0)


def _time(ts: Any) -> float | None:
    if type(ts) not in (int, float) or not math.isfinite(ts) or not 0 <= ts <= LATEST:
        return None
    return float(ts)


def _hashes(sent: dict[str, Any]) -> tuple[Hash, ...]:
    hashes = sent.get("block_hashes")
    if type(hashes) is not list:
        raise _Malformed(f"an event's block_hashes are {said(hashes)}")
    _check_hashes(hashes)
    return tuple(hashes)


def _check_hashes(hashes: list[Any]) -> None:
    kinds = set(map(type, hashes))
    if not kinds <= {int, bytes}:
        wrong = next(each for each in hashes if type(each) not in (int, bytes))
        raise _Malformed(f"a block's hash is {said(wrong)}")
    if bytes in kinds:
        for each in hashes:
            if type(each) is bytes and not 0 < len(each) <= LONGEST_HASH:
                raise _Malformed(f"a block's hash has {len(each)} bytes, of at most {LONGEST_HASH}")


def _tokens(sent: Any, blocks: int, size: int) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """The ids of each block, and whether they are pairs; () where none are told."""
    if sent is None or sent == []:
        return (), False
    if type(sent) is not list:
        raise _Malformed(f"BlockStored with token_ids {said(sent)}")
    flat, kinds, width = sent, set(map(type, sent)), size
    pairs = kinds == {list}
    if pairs:
        if set(map(len, sent)) != {2}:
            raise _Malformed(
                f"BlockStored with token_ids {said(sent)}, which are neither ids nor pairs of ids"
            )
        flat, width = list(chain.from_iterable(sent)), 2 * size
        kinds = set(map(type, flat))
    if kinds != {int} or min(flat) < 0 or max(flat) > LARGEST_TOKEN:
        raise _Malformed(f"BlockStored with token_ids {said(sent)}, of which some are no token's id")
    if len(flat) != blocks * width:
        raise _Malformed(f"BlockStored with {len(sent)} tokens in {blocks} blocks of {said(size)}")
    return tuple(tuple(flat[at : at + width]) for at in range(0, len(flat), width)), pairs


def _spaces(sent: dict[str, Any], blocks: int) -> tuple[tuple[str, ...], ...]:
    """What names the namespace of each block: adapter, salt and extra keys, each once; () for none."""
    name: Any = sent.get("lora_name")
    salt, keys = sent.get("cache_salt"), sent.get("extra_keys")
    if isinstance(name, dict):  # SGLang 0.5.18 and 0.5.19, whose events are positional: {"cache_salt": ...}
        name, salt = None, name.get("cache_salt")
    lora = sent.get("lora_id")
    if name is None and lora is not None:
        name = f"lora {said(lora)}"
    common = [_text(part) for part in (name, salt) if part is not None and part != ""]
    if keys is None:
        return (tuple(dict.fromkeys(common)),) * blocks if common else ()
    if type(keys) is not list or len(keys) != blocks:
        raise _Malformed(f"BlockStored with extra_keys {said(keys)} for {blocks} blocks")
    spaces = tuple(tuple(dict.fromkeys([*common, *_keys(each)])) for each in keys)
    return spaces if any(spaces) else ()


def _keys(sent: Any) -> Iterable[str]:
    if sent is None:
        return ()
    if type(sent) is not list:
        raise _Malformed(f"BlockStored with extra_keys {said(sent)} for a block")
    return map(_text, sent)


def _text(part: Any) -> str:
    """What is in a block's hash beside its tokens, as a text of bounded length; different ones differ."""
    if isinstance(part, str):
        text = part
    elif isinstance(part, bytes):
        text = part.hex()
    elif (
        isinstance(part, list) and len(part) == 2 and not any(isinstance(each, list | dict) for each in part)
    ):
        text = f"{_text(part[0])}@{_text(part[1])}"  # an image's hash, and where it begins in the block
    elif part is None or isinstance(part, int | float):
        text = str(part)
    else:
        raise _Malformed(f"BlockStored with an extra key {said(part)}")
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT // 2]}…{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return text


def _as_map(event: Record) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    group: dict[str, Any] = {"group_idx": 1} if event.other_group else {}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.medium, **group}
    tokens: list[Any] = list(chain.from_iterable(event.tokens))
    if event.pairs:
        tokens = list(zip(tokens[::2], tokens[1::2], strict=True))
    first = set(event.spaces)
    sent = {
        "type": "BlockStored", "block_hashes": event.hashes, "parent_block_hash": event.parent,
        "token_ids": tokens, "block_size": event.block_size, "lora_id": None, "medium": event.medium, **group,
    }  # fmt: skip
    if event.spaces:
        sent["extra_keys"] = [space or None for space in event.spaces]
        if len(first) == 1 and (len(event.spaces[0]) == 1 or event.spaces[0][1:2] == (ADAPTER,)):
            sent["lora_name"] = event.spaces[0][0]  # routers that hash anew look at this one only
    return sent
