"""A log's requests, one after another through a cache, and why each of them missed.

The cache is minirad's own (simulate's replay: a radix tree of some capacity, one request at a time), and a
Memory listens to it. One without limit is the memory itself: nothing leaves it. A hit is what an engine would
use: whole pages, and the last token is always computed. Where the log has the reply, it is in the cache as
well.

Does not read files (minirad.logs does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.cache.node import RadixKey, Slots
from minirad.errors import require
from minirad.simulate import Replay
from minirad.why.answer import Answer, Asked, Loss, held, why
from minirad.why.memory import Memory
from minirad.why.recorded import Listener

UNIT = 4  # bytes of a token in a key
MOST_REMEMBERED = 1 << 26  # tokens and records that are remembered of a log


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of a log. ids: its prompt. reply: what of its reply has KV; empty if that is unknown.

    name: its place in the log. source: where it comes from (logs.Tokenized), for those who change it.
    """

    name: str
    ids: Slots
    namespace: str | None = None
    reply: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    source: Any = None

    def keys(self) -> list[RadixKey]:
        """The prompt's key, and where a reply is known that of both."""
        keys = [RadixKey(self.ids, self.namespace)]
        if len(self.reply):
            keys.append(RadixKey(np.concatenate((self.ids, self.reply)), self.namespace))
        return keys


@dataclass(frozen=True, slots=True)
class Cache:
    """What requests are replayed through. capacity: tokens, None for no limit."""

    capacity: int | None = None
    page_size: int = 1
    eviction_policy: str = "lru"

    def replay(self) -> Replay:
        """An empty one."""
        return Replay(self.capacity, self.page_size, self.eviction_policy)

    def used(self, matched: int | None, length: int) -> int:
        """Tokens that an engine would take from the cache, of those that match (None: it cannot run)."""
        return min(matched or 0, (length - 1) // self.page_size * self.page_size)


def hits(entries: Iterable[Entry], cache: Cache, progress: Callable[[], Any] | None = None) -> list[int]:
    """How many tokens of each request come from the cache; nothing is remembered."""
    replay, found = cache.replay(), []
    for entry in entries:
        found.append(cache.used(replay.serve(*entry.keys()), len(entry.ids)))
        if progress is not None:
            progress()
    return found


class History:
    """Requests through one cache, with a memory of it.

    Attributes:
        served: how many. memory: everything that ever was in the cache.
    """

    def __init__(self, cache: Cache, most: int | None = MOST_REMEMBERED) -> None:
        self.cache = cache
        self.memory = Memory(1, most)
        self.served = 0
        self._replay = cache.replay()
        self._listener = Listener(self.memory)
        self._named: dict[int, str | None] = {}
        for kind in self._listener.kinds if cache.capacity is not None else ():
            self._replay.cache.bus.subscribe(kind, self._listener.take)

    def ask(self, entry: Entry) -> Answer:
        """What would become of a request now, and why; changes nothing."""
        cache, keys = self.cache, entry.keys()
        now, size = float(self.served + 1), -(-len(keys[-1]) // cache.page_size) * cache.page_size
        if cache.capacity is not None and size > cache.capacity:
            loss = Loss("large", 0, len(entry.ids))
            return Answer(entry.name, len(entry.ids), 0, 0, 0, cache.page_size, entry.namespace, (loss,), now)
        asked = Asked(
            keys[0].data,
            len(entry.ids),
            len(entry.ids) - 1,
            self._number(keys[0]),
            cache.page_size,
            entry.name,
        )
        return why(self.memory, asked, now)

    def serve(self, entry: Entry) -> Answer:
        """The answer to a request, which is then run."""
        answer, keys = self.ask(entry), entry.keys()
        self.served += 1
        self._listener.now, self._listener.by = now, by = float(self.served), entry.name
        space, end = self._number(keys[0]), "finished"
        if self.cache.capacity is None:
            size = len(keys[-1]) // self.cache.page_size * self.cache.page_size
            data = keys[-1].data[: size * UNIT]
            self.memory.used(space, data, when=now, by=by)
            found = held(self.memory, space, data, self.cache.page_size)
            self.memory.came(space, data, found, when=now, by=by)
        else:
            matched = self._replay.serve(*keys)
            cached = self.cache.used(matched, len(entry.ids))
            require(cached == answer.cached, f"{by}: {cached} tokens hit, {answer.cached} were expected")
            end = "finished" if matched is not None else "large"
        # What makes no whole page is not in the tree, nor is what is too large for it.
        self.memory.began(space, keys[-1].data, when=now, by=by)
        self.memory.ended(by, now, end)
        return answer

    def _number(self, key: RadixKey) -> int:
        number = self._replay.cache.namespace_number(key.namespace)
        self._named[number] = key.namespace[0]  # type: ignore[assignment]  # entries' are texts
        return number

    def namespace(self, number: Any) -> str:
        """What the namespace of a loss is called."""
        name = self._named.get(number)
        return "no salt" if name is None else f"namespace {name!r}"


def answers(
    entries: Sequence[Entry], cache: Cache, progress: Callable[[], Any] | None = None
) -> list[Answer]:
    """Why each request of a log missed."""
    history, found = History(cache), []
    for entry in entries:
        found.append(history.serve(entry))
        if progress is not None:
            progress()
    return found
