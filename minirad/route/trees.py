"""What a router knows of a worker's cache: by what it sent there, or by the KV events that the worker tells.

Both answer one question (`PrefixView`): how much of a prompt does this worker hold? `SentTree` believes that
the worker still has what was sent to it; it cannot see what was evicted there, so it is bounded and forgets
what was sent least recently. `EventTree` knows what the worker says, as late as its events come.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np

from minirad.cache.radix_cache import RadixCache, RadixKey, Slots
from minirad.config import AdapterKey
from minirad.errors import whole
from minirad.fleet.blocks import Block, RankBlocks, Space
from minirad.fleet.wire import Hash, Record, Stored
from minirad.observe.kv_events import key_parts, key_text

MOST_SENT = 1 << 22  # tokens that a SentTree remembers unless told otherwise
NOTHING: Mapping[Hash, Block] = {}


class PrefixView(Protocol):
    """What somebody believes that a worker's cache holds."""

    @property
    def tokens(self) -> int:
        """How many tokens it holds in all."""

    def match(self, tokens: Slots, space: Hashable = None) -> int:
        """How many tokens from the beginning of a prompt it holds, in whole pages.

        tokens: shape [n], int64. space: the namespace (`extra_key`) of the request.
        """


class SentTree:
    """What was sent to a worker: a radix tree of prompts, at most `max_tokens` of them, the oldest forgotten.

    page_size: of the worker, as it keeps whole pages only.
    """

    def __init__(self, max_tokens: int = MOST_SENT, page_size: int = 1) -> None:
        self.max_tokens = whole("max_tokens", max_tokens, least=1)
        self._cache = RadixCache(page_size, "lru")

    @property
    def tokens(self) -> int:
        """How many tokens are remembered."""
        return self._cache.total_size

    def match(self, tokens: Slots, space: Hashable = None) -> int:
        """How many tokens from the beginning of a prompt were sent before, in whole pages."""
        return self._cache.peek(RadixKey(tokens, space))

    def add(self, tokens: Slots, space: Hashable = None) -> None:
        """A prompt was sent. Of one that is longer than the bound its beginning is remembered."""
        key = RadixKey(tokens[: self.max_tokens], space)
        self._cache.insert(key, np.zeros(len(key), dtype=np.int64))  # where the worker keeps it, it knows
        excess = self.tokens - self.max_tokens
        if excess > 0:
            self._cache.evict(excess)


class EventTree:
    """What a worker says that it holds: fed with its KV events (fleet.wire records), one after the other.

    page_size: of its blocks; None until the first one told it. pairs: they are of bigram keys. A block counts
    while it is in any medium, and matches only if all blocks before it are held, too.
    """

    def __init__(self) -> None:
        self.page_size: int | None = None
        self.pairs = False
        self._blocks = RankBlocks(self)
        self._held: set[Hash] = set()
        # (block before or None, tokens): nearly always one block; of equal ones in other namespaces several
        self._at: dict[tuple[Hash | None, tuple[int, ...]], dict[Hash, Block]] = {}

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self._held) * (self.page_size or 0)

    def take(self, event: Record) -> None:
        """Moves on by one event."""
        if self.page_size is None and isinstance(event, Stored) and event.tokens:
            self.page_size, self.pairs = event.block_size, event.pairs
        self._blocks.take(event)

    def clear(self) -> None:
        """The worker began anew, or is lost: nothing is known of it."""
        self._blocks.clear()
        self.page_size = None

    def match(self, tokens: Slots, space: Hashable = None) -> int:
        """How many tokens from the beginning of a prompt it holds, in whole pages."""
        size, wanted = self.page_size, space_of(space)
        if size is None:
            return 0
        if self.pairs:  # a block says (t0, t1), (t1, t2), ... one behind the other
            tokens, size = np.repeat(tokens, 2)[1:-1], 2 * size
        ids, at = tuple(tokens.tolist()), self._at
        before: list[Hash | None] = [None]
        for length in range(0, len(ids) - size + 1, size):
            page, blocks, before = ids[length : length + size], before, []
            for each in blocks:
                for block in at.get((each, page), NOTHING).values():
                    if block.media and block.space == wanted:
                        before.append(block.hash)
            if not before:
                return length // (1 + self.pairs)
        return len(ids) // size * size // (1 + self.pairs)

    # ------------------------------------------------------------ what the forest tells (blocks.Listener)

    def placed(self, block: Block) -> None:
        """A block is new, or stands elsewhere, or has other tokens."""
        self._leave(block)
        if block.tokens:
            block.place = block.parent, block.tokens
            self._at.setdefault(block.place, {})[block.hash] = block

    def held(self, block: Block) -> None:
        """A block's media changed."""
        if block.media:
            self._held.add(block.hash)
        else:
            self._held.discard(block.hash)

    def gone(self, block: Block) -> None:
        """A block left the forest."""
        self._leave(block)
        self._held.discard(block.hash)

    def cleared(self, blocks: list[Block]) -> None:
        """All blocks are gone."""
        self._at.clear()
        self._held.clear()

    def _leave(self, block: Block) -> None:
        if block.place is not None:
            there = self._at[block.place]
            del there[block.hash]
            if not there:
                del self._at[block.place]
            block.place = None


def space_of(extra_key: Hashable) -> Space:
    """A namespace as our workers' KV events name it (fleet.publish); () for none."""
    if extra_key is None:
        return ()
    if isinstance(extra_key, AdapterKey):
        return key_parts(extra_key)
    if isinstance(extra_key, str) and extra_key and not set(":(") & set(extra_key):
        return (extra_key,)
    return (key_text(extra_key),)
