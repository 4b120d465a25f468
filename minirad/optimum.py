"""The best that eviction can do in a cache of finite size: a bound, and policies that know the future.

**What is bounded.** Requests come in a known order. A page (page_size units after one prefix, in one
namespace) is *held* while a request that needs it is served, and *idle* otherwise. It can be found by a
request only if it stayed in the pool from the last time it was held, because only a request that needs it
computes it. So each hit is an *interval* that was kept: it begins when a page becomes idle, ends when a
prompt asks for it again, and takes one page of room at each moment between. At each moment the intervals that
are kept fit into what the requests that are served then leave free: their own pages must be in the pool.
Nothing else is asked of the policy: it may evict page by page, from the middle, with or without need.

**The most intervals that fit.** Go through the moments in order, and where more intervals cross a moment
than there is room for, drop those that end last. No choice keeps more. Proof: suppose some best choice B
agrees with all drops so far, and now J, whose end is the furthest of the intervals that cross this moment, is
dropped. If B keeps J, it lacks another interval I that crosses it (they do not all fit). Put I in J's place:
from this moment on I needs room only where J did, as it ends no later; before this moment all intervals
that are not dropped yet fit together. So that choice is possible, as large as B, and agrees with this drop.

**It is reached** where prompts are replayed one after another and single pages can be evicted. Who asks for
a page asks for all pages before it: those are idle from the same moment or a later one, and end no later. So
dropping the furthest end, of equal ones the deepest page, always drops a leaf's last page, and what is kept
is a tree. (A hit is then a whole prefix, as a radix tree finds it.) What follows makes it a bound only:

* *Whole leaves.* The radix tree evicts nodes, not pages. `clairvoyant` evicts the leaf whose first page is
  needed last; it may stay below the bound, and need not be the best of all choices of leaves. (`dead-first`
  knows less: what will never be asked for again goes first, then what lru would take.)
* *Replies.* The page of a reply takes room and may be asked for later, but finding it while the reply is
  made saves nothing: an interval that ends so is worth nothing, and a page behind it may be kept without it.
* *Several requests admitted in one step* may find one page: its interval counts as often. The bound is then
  the sum, over k = 1, 2, ..., of the most intervals that are worth at least k: what any choice is worth is
  such a sum, and none of its terms can be larger.

**Over time** (the schedule drive) eviction changes what is computed, and so who runs when. Presence notes of
one run who held a row at each forward pass, and how much room all rows together left. The bound is of the
hits at first admissions, the computed last token left out: no eviction policy has more of them where requests
run in the same passes and leave the same room. It is the run's own: another policy's order has another one.

A request that is refused, larger than the whole cache, is not there at all: it asks for nothing, and holds
nothing.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from minirad.cache.eviction import EvictionPolicy, EvictionQueue
from minirad.cache.radix_cache import Node, RadixCache, RadixKey, Slots
from minirad.config import one_of
from minirad.engine import Engine
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

CLAIRVOYANT, DEAD_FIRST = FORESEEING = "clairvoyant", "dead-first"  # policies
NEVER = sys.maxsize


class Runs:
    """Keys cut where they part: a run is a row of pages that the same keys go through.

    pages: of each run, how many. number: of each unit of the tree of all keys, its run.
    """

    def __init__(self, keys: Iterable[RadixKey], page_size: int) -> None:
        self.page_size = page_size
        self._tree = tree = RadixCache(page_size)
        for key in keys:
            new = tree.total_size - tree.peek(key)
            tree.insert(key, np.arange(new, new + len(key)))
        nodes = [node for node in tree.walk() if node.parent is not None]
        self._index = {node.id: index for index, node in enumerate(nodes)}
        self.pages = [len(node) // page_size for node in nodes]
        self.number = np.zeros(tree.total_size, dtype=np.int64)
        for index, node in enumerate(nodes):
            self.number[node.slots] = index

    def path(self, key: RadixKey) -> list[int]:
        """The runs of one of the keys, from the root down: its whole pages."""
        return [self._index[node.id] for node in self._tree.find(key).walk[0]]

    def units(self, key: RadixKey) -> Slots:
        """A number for each unit of one of the keys, the same for the same prefix; 0 past its whole pages."""
        found = self._tree.match_prefix(key).slots
        return np.append(found, np.zeros(len(key) - len(found), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Stay:
    """From moment `first` to `last` a request holds the runs of a path.

    asked: of how many pages, from the root down, it is a hit to find them at `first`.
    """

    first: int
    last: int
    path: Sequence[int]
    asked: int


def most_hits(pages: Sequence[int], stays: Iterable[Stay], room: Sequence[int]) -> int:
    """How many pages can be found at most.

    pages: of each run. room: how many idle pages there can be at each moment.
    """
    free, levels = _intervals(pages, stays)
    return free + sum(most_kept(level, room) for level in levels)


Interval = tuple[int, int, int]  # idle after this moment, asked for at this one, pages


def _intervals(pages: Sequence[int], stays: Iterable[Stay]) -> tuple[int, list[list[Interval]]]:
    """Hits on pages that are never idle; and the intervals that are worth at least 1, 2, ..."""
    free = 0
    levels: list[list[Interval]] = []
    held_until: dict[int, int] = {}
    by_first = sorted(stays, key=lambda stay: stay.first)
    for first, together in groupby(by_first, key=lambda stay: stay.first):
        group = list(together)
        asked: dict[int, list[int]] = defaultdict(list)
        for stay in group:
            left = stay.asked
            for run in stay.path:
                if left <= 0 or run not in held_until:
                    break
                asked[run].append(min(left, pages[run]))
                left -= pages[run]
        for run, counts in asked.items():
            if held_until[run] >= first - 1:
                free += sum(counts)
                continue
            for level, count in enumerate(sorted(counts, reverse=True)):
                if level == len(levels):
                    levels.append([])
                levels[level].append((held_until[run], first, count))
        for stay in group:
            for run in stay.path:
                held_until[run] = max(held_until.get(run, stay.last), stay.last)
    return free, levels


def most_kept(intervals: Iterable[Interval], room: Sequence[int]) -> int:
    """How many pages' intervals can be kept: at each moment the furthest ends go (see the module's proof)."""
    beginning: dict[int, list[Interval]] = defaultdict(list)
    for interval in intervals:
        beginning[interval[0]].append(interval)
    ending: dict[int, int] = defaultdict(int)  # pages that are kept now, by their end
    ends: list[int] = []  # a heap of these ends, the furthest first
    crossing = kept = 0
    for moment, most in enumerate(room):
        done = ending.pop(moment, 0)
        kept, crossing = kept + done, crossing - done
        for _, end, count in beginning.get(moment - 1, ()):
            if end not in ending:
                heapq.heappush(ends, -end)
            ending[end] += count
            crossing += count
        while crossing > most:
            end = -ends[0]
            dropped = min(ending[end], crossing - most)
            ending[end] -= dropped
            crossing -= dropped
            if not ending[end]:
                del ending[end]
                heapq.heappop(ends)
    return kept + crossing


# ---------------------------------------------------------------------- one request after another


class Known:
    """The requests of a Replay, all known beforehand: what `serve` will be called with, in order."""

    def __init__(self, requests: Sequence[tuple[RadixKey, ...]], page_size: int = 1) -> None:
        self.page_size, self.requests = page_size, requests
        every = (
            key for keys in requests for key in (keys if len(keys) == 1 or keys[0] != keys[1] else keys[1:])
        )
        self.runs = Runs(every, page_size)
        self._asked = [self.runs.path(keys[0]) for keys in requests]
        self._put = [
            [(self._asked[at] if key == keys[0] else self.runs.path(key), -(-len(key) // page_size))
             for key in keys[1:] or keys]
            for at, keys in enumerate(requests)
        ]  # fmt: skip
        self._bounds: dict[int | None, int] = {}

    @property
    def distinct(self) -> int:
        """Units of a cache that keeps them all."""
        return sum(self.runs.pages) * self.page_size

    def bound(self, capacity: int | None) -> int:
        """Units that no policy passes in a cache of so many (None: no limit)."""
        if capacity not in self._bounds:
            self._bounds[capacity] = self._bound(NEVER if capacity is None else capacity // self.page_size)
        return self._bounds[capacity]

    def _bound(self, most: int) -> int:
        stays: list[Stay] = []
        room: list[int] = []
        for at in self.served(most):
            asked = sum(self.runs.pages[run] for run in self._asked[at])
            for path, held in self._put[at]:
                stays.append(Stay(len(room), len(room), path, asked))
                room.append(most - held)
                asked = 0  # its further keys ask for nothing
        return most_hits(self.runs.pages, stays, room) * self.page_size

    def served(self, most: int) -> list[int]:
        """The numbers of the requests that fit into a cache of so many pages."""
        return [at for at, put in enumerate(self._put) if max(held for _, held in put) <= most]

    def future(self, capacity: int | None) -> Future:
        """What a policy that knows it all has to know for a run at this capacity."""
        most = NEVER if capacity is None else capacity // self.page_size
        uses: list[list[int]] = [[] for _ in self.runs.pages]
        for at in self.served(most):
            for run in self._asked[at]:
                uses[run].append(at)
        return Future(self.runs, uses)


class Future:
    """When what a node holds will be asked for. now: the number of the request that is being served."""

    def __init__(self, runs: Runs, uses: Sequence[Sequence[int]]) -> None:
        self.runs, self._uses, self.now = runs, uses, -1

    def next_use(self, node: Node) -> int:
        """The number of the next request after this one that asks for the node's first page; NEVER for none.

        Who asks for any page of the node asks for that one.
        """
        uses = self._uses[self.runs.number[node.slots[0]]]
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER

    def policy(self, name: str = CLAIRVOYANT) -> EvictionPolicy:
        """The leaf that is needed last goes first; or one that is never needed again, and else by lru."""

        def reason(node: Node) -> str:
            coming = self.next_use(node)
            when = "never again" if coming == NEVER else f"next by request {coming + 1}"
            return f"unlocked leaf, needed {when} (last used at tick {node.last_access})"

        one_of("policy", name, FORESEEING)
        if name == DEAD_FIRST:
            return EvictionPolicy(name, lambda node: (self.next_use(node) < NEVER, node.last_access), reason)
        return EvictionPolicy(name, lambda node: -self.next_use(node), reason)


class ForeseeingCache(RadixCache):
    """A tree that evicts by what will be asked for. Its slots are the units' numbers in `future.runs`."""

    def __init__(self, future: Future, policy: str = CLAIRVOYANT) -> None:
        super().__init__(future.runs.page_size)
        self._queue = EvictionQueue(future.policy(policy))


# ---------------------------------------------------------------------- over time


@dataclass(slots=True)
class _Row:
    """A row of the pool from one forward pass to another, and how many of its tokens were computed."""

    request: Request
    first: int
    last: int
    asked: int
    tokens: int


class Presence:
    """Notes which requests had rows at each forward pass of an engine, and the room that they left.

    `launched` is called with each batch, from the engine's first on, when the batch has its slots. ValueError
    for what would make the bound wrong: KV that comes from another tier, and pins.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.host_tier is not None:
            raise ValueError("KV comes back from host memory: the bound is of an engine with one tier")
        self._engine = engine
        self._rows: list[_Row] = []
        self._now: dict[str, _Row] = {}
        self._room: list[int] = []

    def launched(self, batch: Batch) -> None:
        """From here to the commit nothing moves."""
        if self._engine._pins:
            raise ValueError(f"pins hold KV that no request holds: {sorted(self._engine._pins)}")
        scheduler, page = self._engine.scheduler, self._engine.config.page_size
        moment, before, self._now = len(self._room), self._now, {}
        self._room.append(self._engine.cache_manager.room // page)
        first = {request.id for request in batch.admitted if request.attempts == 1}
        for request in {each.id: each for each in (*scheduler.live, *batch.requests)}.values():
            row = before.get(request.id)
            if row is None:
                asked = request.usable_prefix // page if request.id in first else 0
                row = _Row(request, moment, moment, asked, 0)
                self._rows.append(row)
            row.last, row.tokens = moment, max(row.tokens, request.kv_len)
            self._now[request.id] = row

    def bound(self) -> int:
        """Prompt units that could be found at first admissions, in the same passes with the same room."""
        page = self._engine.config.page_size
        keys = [_key(row.request, row.tokens) for row in self._rows]
        runs = Runs(keys, page)
        stays = [
            Stay(row.first, row.last, runs.path(key), row.asked)
            for row, key in zip(self._rows, keys, strict=True)
        ]
        return most_hits(runs.pages, stays, self._room) * page


def _key(request: Request, computed: int) -> RadixKey:
    """What a request may have given the tree when so many of its tokens were computed."""
    pairs = request.is_bigram  # n tokens: n - 1 units
    return RadixKey(request.tokens[: computed + pairs], request.extra_key, pairs)
