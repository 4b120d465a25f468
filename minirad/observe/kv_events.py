"""The tree's story told page by page, in the words that SGLang and vLLM tell it to their routers.

A router that spreads requests over several engines wants to know which prefixes each of them holds. It
does not care for nodes, splits or locks; it knows *blocks* (our pages), each named by a hash of its
tokens and of the block before it. So equal prefixes have equal chains of hashes, on every engine, and a
block's name says where it stands: the same four tokens twice in a row are two different blocks.

`KVEventStream` listens to a tree's own events, of which each says what it means for blocks (`to_blocks` in
minirad/observe/events.py), and tells it as

    BlockStored        blocks came into a tier: their hashes, the one before them, their tokens
    BlockRemoved       blocks left a tier
    AllBlocksCleared   the tree was flushed

with the fields of vLLM's (SGLang's are the first few of them), and `BlockTable` is the other side: it
listens to these three and knows at any time what the tree holds. A split, a lock or a hit says nothing
here, and neither does whatever happens to blocks of old weights: new weights clear everything, since
nothing that was there can be matched any more, though its slots are evicted only in time. A block that is
loaded back is in the device's pool from the moment the load begins: a batch that needs it waits for it.

    with open("events.jsonl", "w") as file:
        stream = KVEventStream(engine.cache, lambda event: print(json.dumps(as_dict(event)), file=file))

writes them down; `rebuild(from_dict(json.loads(line)) for line in file)` is what the tree held at the end.

A hash is a label and nothing else. Our tree compares tokens, so two blocks whose hashes collide stay two
blocks there; only a router that knows no more than the hash would take one for the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from minirad.cache.node import Namespace, Node
from minirad.cache.radix_cache import RadixCache
from minirad.config import AdapterKey, adapter_of
from minirad.errors import said
from minirad.observe.event import CPU as CPU  # the media of these events
from minirad.observe.event import EVENT_TYPES, Event, Ints
from minirad.observe.event import GPU as GPU

HASH_BYTES, TOKEN_BYTES = 8, 4
ADAPTER = "adapter"  # behind its name: no other key has a text without a colon or a bracket

BlockHash = Callable[[bytes, bytes], int]  # (hash of the block before or the namespace's seed, tokens)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that follow each other are in `medium` from now on.

    parent_block_hash: of the block before the first one; None where it begins a prompt.
    token_ids: block_size for each block; in a tree of bigram keys two for each unit.
    lora_id: always None, as in the newest vLLM. lora_name: the namespace's adapter, else its extra_key where
        that is a text.
    extra_keys: the part of the namespace that is in the hashes, for each block; None outside any.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str = GPU
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks are not in `medium` any more."""

    block_hashes: tuple[int, ...]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is left, in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, Callable[..., KVEvent]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def block_hash(before: bytes, tokens: bytes) -> int:
    """The first 64 bits of SHA-256 over what comes before and a block's tokens (int32, little-endian)."""
    return int.from_bytes(hashlib.sha256(before + tokens).digest()[:HASH_BYTES], "big", signed=True)


def as_dict(event: KVEvent) -> dict[str, Any]:
    """An event as the tagged map that vLLM sends: `type` and the fields, `extra_keys` left out if None."""
    fields = {name: value for name, value in asdict(event).items() if (name, value) != ("extra_keys", None)}
    return {"type": type(event).__name__, **fields}


def from_dict(sent: dict[str, Any]) -> KVEvent:
    """The event that `as_dict` made this of, also by way of JSON; ValueError if there is no such."""
    kind = sent.get("type") if isinstance(sent, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"no KV event: {said(sent)}")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in sent.items()
    }
    del fields["type"]
    for name, value in fields.items():
        if name in _FIELDS and not _FIELDS[name](value):
            raise ValueError(f"no KV event: {kind} with {name} {said(value)}")
    if fields.get("extra_keys") is not None:
        fields["extra_keys"] = tuple(map(tuple, fields["extra_keys"]))
    try:
        event = _KINDS[kind](**fields)
    except TypeError as error:
        raise ValueError(f"no KV event: {error}") from error
    if isinstance(event, BlockStored):
        _check_sizes(event)
    return event


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple | list) and all(map(check, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "block_hashes": lambda value: _all(value, _is_number),
    "parent_block_hash": lambda value: value is None or _is_number(value),
    "token_ids": lambda value: _all(value, _is_number),
    "block_size": lambda value: _is_number(value) and value > 0,
    "lora_id": lambda value: value is None or _is_number(value),
    "medium": _is_text,
    "lora_name": lambda value: value is None or _is_text(value),
    "extra_keys": lambda value: value is None or _all(value, lambda keys: _all(keys, _is_text)),
}


def _check_sizes(event: BlockStored) -> None:
    blocks, tokens = len(event.block_hashes), len(event.token_ids)
    if tokens not in (blocks * event.block_size, 2 * blocks * event.block_size):
        raise ValueError(f"no KV event: {tokens} tokens in {blocks} blocks of {event.block_size}")
    if event.extra_keys is not None and len(event.extra_keys) != blocks:
        raise ValueError(f"no KV event: extra_keys of {len(event.extra_keys)} blocks, but there are {blocks}")


class _Space(NamedTuple):
    """A namespace, as blocks show it. `seed`: what the first block of a prompt is hashed with."""

    extra_keys: tuple[str, ...] | None
    lora_name: str | None
    seed: bytes


@dataclass(slots=True)
class _Blocks:
    """The blocks of one node. `dead`: of old weights."""

    parent: int | None
    space: _Space
    hashes: list[int]
    tokens: list[tuple[int, ...]]
    dead: bool = False


class KVEventStream:
    """Calls `publish` with the KV events of a tree, as its own events come; first with what is there already.

    cache: a RadixCache (or HiRadixCache), between two calls that change it. hash_block: for tests;
    block_hash. `close` ends it. A tree without a stream pays nothing; the engine of one with a stream may
    run ahead.
    """

    def __init__(
        self, cache: RadixCache, publish: Callable[[KVEvent], Any], hash_block: BlockHash = block_hash
    ) -> None:
        self._cache, self._publish, self._hash = cache, publish, hash_block
        self._nodes: dict[int, _Blocks] = {}
        self._spaces: dict[tuple[int, bool], _Space] = {}
        # Only what says something here: locks and hits are not even built for this.
        telling = [kind for kind in EVENT_TYPES if kind.to_blocks is not Event.to_blocks]
        self._ends = [cache.bus.subscribe(kind, self._take, whole_steps=False) for kind in telling]
        for node in cache.walk():
            if node.parent is not None:
                self._begin_with(node)

    def _begin_with(self, node: Node) -> None:
        """Tells a node that was there before the stream, in each tier that holds it."""
        is_bigram = bool(node.namespace[1])
        # A node of old weights is known, so that its split or end can follow, and never told.
        number = self._cache.namespace_number(node.namespace[:2])
        blocks = _Blocks(_parent(node), self._space(number, is_bigram), [], [], node.outdated)
        self._nodes[node.id] = blocks
        tokens = tuple(np.frombuffer(node.edge, dtype=np.int32).tolist())
        self._append(blocks, tokens, node.units)
        if node.packed:
            self._stored(blocks, GPU)
        if getattr(node, "backed_up", False):  # a copy that is under way is told when it has ended
            self._stored(blocks, CPU)

    def _take(self, event: Event) -> None:
        event.to_blocks(self)

    def close(self) -> None:
        """Ends the stream; calling it twice does no harm."""
        for end in self._ends:
            end()

    # ------------------------------------------------------------ what events say (event.BlockStream)

    def insert(
        self, node: int, parent: int, namespace: int, tokens: Ints, units: int, medium: str = GPU
    ) -> None:
        """A new node below `parent`, `units` tokens long, in a medium."""
        # (None, pairs or not) are both number 0: how many ids a token has tells them apart.
        space = self._space(namespace, len(tokens) > units)
        self._nodes[node] = _Blocks(parent or None, space, [], [])
        self.grow(node, tokens, units, medium)

    def grow(self, node: int, tokens: Ints, units: int, medium: str = GPU) -> None:
        """A node was made longer."""
        blocks = self._nodes[node]
        at = len(blocks.hashes)
        self._append(blocks, tokens, units)
        self._stored(blocks, medium, at)

    def split(self, upper: int, lower: int, at: int) -> None:
        """The first `at` tokens of `lower` are `upper` from now on."""
        below, at = self._nodes[lower], at // self._cache.page_size
        self._nodes[upper] = _Blocks(
            below.parent, below.space, below.hashes[:at], below.tokens[:at], below.dead
        )
        below.parent, below.hashes, below.tokens = upper, below.hashes[at:], below.tokens[at:]

    def store(self, nodes: Ints, medium: str) -> None:
        """The blocks of nodes came into a medium."""
        for node in nodes:
            self._stored(self._nodes[node], medium)

    def remove(self, node: int, medium: str, *, forget: bool) -> None:
        """A node's blocks left a medium; forget: and the node the tree."""
        blocks = self._nodes[node]
        if forget:
            del self._nodes[node]
        if not blocks.dead:
            self._publish(BlockRemoved(tuple(blocks.hashes), medium))

    def clear(self, *, forget: bool) -> None:
        """Nothing that was there matches any more; forget: and no node is left."""
        for blocks in self._nodes.values():
            blocks.dead = True
        if forget:
            self._nodes.clear()
        self._publish(AllBlocksCleared())

    # ------------------------------------------------------------ blocks

    def _append(self, node: _Blocks, tokens: tuple[int, ...], units: int) -> None:
        size = len(tokens) // units * self._cache.page_size
        before = self._before(node, len(node.hashes))
        seed = _bytes(before) if before is not None else node.space.seed
        data = np.array(tokens, dtype="<i4").tobytes()  # at once: an array a block costs more than its hash
        for at in range(0, len(tokens), size):
            name = self._hash(seed, data[TOKEN_BYTES * at : TOKEN_BYTES * (at + size)])
            node.hashes.append(name)
            node.tokens.append(tokens[at : at + size])
            seed = _bytes(name)

    def _before(self, node: _Blocks, at: int) -> int | None:
        """The hash of the block before a node's `at`-th one."""
        if at:
            return node.hashes[at - 1]
        return self._nodes[node.parent].hashes[-1] if node.parent is not None else None

    def _space(self, number: int, is_bigram: bool) -> _Space:
        if (number, is_bigram) not in self._spaces:
            extra_key = namespace_of(self._cache, number)[0]
            keys = _extra_keys(extra_key, is_bigram)
            if any(keys == known.extra_keys for known in self._spaces.values()):
                assert keys is not None  # values of the caller's own type that look alike
                keys = (*keys, f"namespace {number}")
            seed = b"" if keys is None else hashlib.sha256("\0".join(keys).encode(errors="replace")).digest()
            name = adapter_of(extra_key) or (extra_key if isinstance(extra_key, str) else None)
            self._spaces[number, is_bigram] = _Space(keys, name, seed)
        return self._spaces[number, is_bigram]

    def _stored(self, node: _Blocks, medium: str, at: int = 0) -> None:
        if node.dead:
            return
        keys, name, _ = node.space
        self._publish(
            BlockStored(
                tuple(node.hashes[at:]), self._before(node, at), tuple(chain(*node.tokens[at:])),
                self._cache.page_size, None, medium, name,
                None if keys is None else (keys,) * len(node.hashes[at:]),
            )
        )  # fmt: skip


class BlockTable:
    """What a router knows from KV events: which blocks lie where. Feed it with `take`.

    A block's name there is its hash; `prefixes` spells out what each one stands for.
    """

    def __init__(self) -> None:
        self._stored: dict[str, dict[int, tuple[int | None, tuple[int, ...], Any]]] = {}

    def take(self, event: KVEvent) -> None:
        """Moves the table on by one event; ValueError for the removal of a block that is not there."""
        if isinstance(event, AllBlocksCleared):
            self._stored.clear()
        elif isinstance(event, BlockRemoved):
            table = self._stored.get(event.medium, {})
            unknown = [name for name in event.block_hashes if name not in table]
            if unknown:
                raise ValueError(f"block {unknown[0]} is removed from {event.medium}, but it is not there")
            for name in event.block_hashes:
                table.pop(name, None)
        elif event.block_hashes:
            self._take_stored(event)

    def _take_stored(self, event: BlockStored) -> None:
        table, before = self._stored.setdefault(event.medium, {}), event.parent_block_hash
        size = len(event.token_ids) // len(event.block_hashes)
        for at, name in enumerate(event.block_hashes):
            keys = event.extra_keys[at] if event.extra_keys is not None else None
            table[name] = before, event.token_ids[at * size : (at + 1) * size], keys
            before = name

    def prefixes(self, medium: str) -> set[tuple[Any, tuple[int, ...]]]:
        """(extra key, all tokens from the beginning to the end of a block) for each block in a medium.

        ValueError where a block stands behind one that was never told: the table listens since later.
        """
        known: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        for table in self._stored.values():  # what comes before a block may lie in the other medium
            known.update(table)
        return {(known[name][2], self._spell(name, known)) for name in self._stored.get(medium, {})}

    @staticmethod
    def _spell(name: int, known: dict[int, tuple[int | None, tuple[int, ...], Any]]) -> tuple[int, ...]:
        parts: list[tuple[int, ...]] = []
        step: int | None = name
        while step is not None:
            if step not in known:
                raise ValueError(f"block {name} stands behind block {step}, which was never stored")
            if len(parts) > len(known):
                raise ValueError(f"block {name} stands behind itself")
            step, tokens, _ = known[step]
            parts.append(tokens)
        return tuple(chain(*reversed(parts)))


def namespace_of(cache: RadixCache, number: int) -> Namespace:
    """The namespace that events tell by this number; KeyError for one that was never given out."""
    for namespace, known in cache.namespaces.items():
        if known == number:
            return namespace
    raise KeyError(number)


def rebuild(events: Iterable[KVEvent]) -> BlockTable:
    """What a tree holds after these events, told from its beginning."""
    table = BlockTable()
    for event in events:
        table.take(event)
    return table


def _parent(node: Node) -> int | None:
    """The number of the node above; None for the root."""
    assert node.parent is not None
    return node.parent.id or None


def _bytes(name: int) -> bytes:
    return name.to_bytes(HASH_BYTES, "big", signed=True)


def _extra_keys(extra_key: Hashable, is_bigram: bool) -> tuple[str, ...] | None:
    """What sets a namespace apart, as texts; None for the default one.

    They differ where values of Python's own types do, and are the same in every process. (Of values that
    are equal and look different, like 1 and True, the tree knows the one that came first.)
    """
    if extra_key is None and not is_bigram:
        return None
    return (*key_parts(extra_key), *(("bigram",) if is_bigram else ()))


def key_parts(extra_key: Hashable) -> tuple[str, ...]:
    """A namespace's key as it stands in `extra_keys`; of an adapter's requests its name and their own key."""
    if not isinstance(extra_key, AdapterKey):
        return (key_text(extra_key),)
    own = extra_key.extra_key
    return (extra_key.adapter, ADAPTER, *(() if own is None else (key_text(own),)))


def key_text(value: Hashable) -> str:
    """Any key as one text."""
    kind = type(value).__name__
    if isinstance(value, tuple):
        return f"{kind}({', '.join(map(key_text, value))})"
    if isinstance(value, frozenset):  # its own order changes from process to process
        return f"{kind}({', '.join(sorted(map(key_text, value)))})"
    return f"{kind}:{value!r}"
