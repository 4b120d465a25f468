"""A log's requests, one after another through a cache, and why each of them missed.

The cache is minirad's own (simulate's replay: a radix tree of some capacity, one request at a time), and a
Memory listens to it. One without limit is the memory itself: nothing leaves it. A hit is what an engine would
use: whole pages, and the last token is always computed. Where the log has the reply, it is in the cache as
well; where it has not, but the next turn of the session repeats it, it is there from then on.

Does not read files (minirad.logs does).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minirad.cache.node import RadixKey, Slots
from minirad.cache.prefix_cache import usable
from minirad.errors import require
from minirad.simulate import Replay
from minirad.why.answer import Answer, Asked, Loss, held, why
from minirad.why.memory import Memory
from minirad.why.recorded import Listener

UNIT = 4  # bytes of a token in a key
MOST_SESSIONS = 10_000  # whose last turn is kept
MOST_REMEMBERED = 1 << 26  # tokens and records that are remembered of a log


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of a log. ids: its prompt. reply: what of its reply has KV; empty if that is unknown.

    name: its place in the log. session: its conversation's. source: where it comes from (logs.Tokenized), for
    those who change it.
    """

    name: str
    ids: Slots
    namespace: str | None = None
    reply: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    source: Any = None
    session: str | None = None

    def keys(self) -> list[RadixKey]:
        """The prompt's key, and where a reply is known that of both."""
        key = RadixKey(self.ids, self.namespace)
        if not len(self.reply):
            return [key]
        data = key.data + RadixKey(self.reply).data  # the prompt is long: it is looked through once
        return [key, RadixKey._from_bytes(data, key.namespace, key.width)]


@dataclass(frozen=True, slots=True)
class Cache:
    """What requests are replayed through. capacity: tokens, None for no limit. closes: see Replies."""

    capacity: int | None = None
    page_size: int = 1
    eviction_policy: str = "lru"
    closes: int | None = None

    def replay(self) -> Replay:
        """An empty one."""
        return Replay(self.capacity, self.page_size, self.eviction_policy)

    def used(self, matched: int | None, length: int) -> int:
        """Tokens that an engine would take from the cache, of those that match (None: it cannot run)."""
        return usable(matched or 0, length, self.page_size)


class Earlier(NamedTuple):
    """A prompt with its reply, and whose they are."""

    key: RadixKey
    name: str


class Replies:
    """Replies that a log does not have, as the next turn of their session repeats them.

    closes: the token that ends a message; None: replies are not looked for.
    """

    def __init__(self, closes: int | None) -> None:
        self._closes = closes
        self._last: OrderedDict[str, Entry] = OrderedDict()

    def before(self, entry: Entry) -> Earlier | None:
        """What the turn before left in the cache beside its prompt, if this one goes on from both."""
        if self._closes is None or entry.session is None:
            return None
        last = self._last.pop(entry.session, None)
        self._last[entry.session] = entry
        if len(self._last) > MOST_SESSIONS:
            self._last.popitem(last=False)
        size = 0 if last is None else len(last.ids)
        if last is None or len(last.reply) or not np.array_equal(entry.ids[:size], last.ids):
            return None
        ends = np.flatnonzero(entry.ids[size:] == self._closes)
        if not len(ends) or not ends[0]:
            return None
        return Earlier(RadixKey(entry.ids[: size + ends[0]], entry.namespace), last.name)


class Serving:
    """Requests through one cache, of which nothing is remembered."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._replay, self._replies = cache, cache.replay(), Replies(cache.closes)

    def serve(self, entry: Entry) -> int:
        """How many tokens of a prompt come from the cache; afterwards all of it is there."""
        earlier = self._replies.before(entry)
        if earlier is not None:
            self._replay.serve(earlier.key)
        return self._cache.used(self._replay.serve(*entry.keys()), len(entry.ids))


def hits(entries: Iterable[Entry], cache: Cache, progress: Callable[[], Any] | None = None) -> list[int]:
    """How many tokens of each request come from the cache."""
    serving, found = Serving(cache), []
    for entry in entries:
        found.append(serving.serve(entry))
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
        self._replay, self._replies = cache.replay(), Replies(cache.closes)
        self._listener = Listener(self.memory)
        self._named: dict[int, str | None] = {}
        for kind in self._listener.kinds if cache.capacity is not None else ():
            self._replay.cache.bus.subscribe(kind, self._listener.take)

    def ask(self, entry: Entry) -> Answer:
        """What would become of a request now, and why; changes nothing."""
        return self._ask(entry, entry.keys())

    def _ask(self, entry: Entry, keys: Sequence[RadixKey]) -> Answer:
        cache = self.cache
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
        earlier = self._replies.before(entry)
        if earlier is not None:
            self._run([earlier.key], earlier.name)
        keys = entry.keys()  # once: they are copies, and a prompt may have half a million tokens
        answer = self._ask(entry, keys)
        self.served += 1
        matched = self._run(keys, entry.name)
        cached = self.cache.used(matched, len(entry.ids))
        require(cached == answer.cached, f"{entry.name}: {cached} tokens hit, not {answer.cached}")
        return answer

    def _run(self, keys: Sequence[RadixKey], by: str) -> int | None:
        """Runs a request; how much of it matched, None for one that is larger than the cache."""
        now = float(self.served)
        self._listener.now, self._listener.by = now, by
        space, page = self._number(keys[0]), self.cache.page_size
        if self.cache.capacity is None:
            data = keys[-1].data[: len(keys[-1]) // page * page * UNIT]
            self.memory.used(space, data, when=now, by=by)
            found = held(self.memory, space, data, page)
            self.memory.came(space, data, found, when=now, by=by)
            matched: int | None = min(found, len(keys[0]) // page * page)
        else:
            matched = self._replay.serve(*keys)
        # What makes no whole page is not in the tree, nor is what is too large for it.
        self.memory.began(space, keys[-1].data, when=now, by=by)
        self.memory.ended(by, now, "finished" if matched is not None else "large")
        return matched

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
