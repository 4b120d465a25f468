"""How much a step may take on: the budget, what running requests will still need, what a victim gives.

Admission follows Algorithm 1 of the SGLang paper (appendix): match all waiting requests, sort them,
admit one after another while it fits, count what locking a match takes from the evictable, then evict
and allocate. Two slips of the algorithm as printed are repaired:

* it never adds an admitted request to `current_size`, so that every request is held against the same
  room: here each admission takes its slots at once and what it will need next is added to `reserve`;
* it evicts the need where only the shortfall is missing: `SlotOwnership.make_room` evicts what the free
  list lacks, and cached prefixes that are not in the way stay.

Does not decide who comes first (policies.py) and changes nothing but its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import ScheduleOptions
from minirad.schedule.request import Request

RETRACT_MARGIN = 20  # tokens that each who stays is to be able to generate after a retraction (SGLang)


@dataclass(slots=True)
class PrefillBudget:
    """What this step may still take on. Made afresh each step.

    tokens: prompt tokens left to compute. reserve: slots that those who run now will need next, to
    be left over so that admitting somebody does not at once retract somebody else. rows: free rows,
    less those that samples of this batch's requests are about to take. above: a priority; nobody of
    it or less is admitted any more, because such a one was pushed out in this step.
    """

    tokens: int
    reserve: int
    rows: int
    above: int | None = None


class FutureTokens:
    """Estimates how much of what running requests may still generate they will (`ratio`, 0 to 1).

    Too low and running requests are retracted later, too high and rows stay empty: most replies end
    before `max_new_tokens`. So it starts low, a retraction raises it to what would have been right, and
    it decays from step to step (SGLang's new_token_ratio; there it starts high).
    """

    def __init__(self, options: ScheduleOptions, page_size: int) -> None:
        self._options, self._page = options, page_size
        self.ratio = options.new_token_ratio

    def slots(self, request: Request) -> int:
        """Slots to keep free for what a request will generate, samples included; a page each at least."""
        coming = request.params.max_new_tokens - len(request.output)
        pages = max(math.ceil(self.ratio * coming / self._page), 1)
        return pages * self._page * (1 + request.unbranched)

    def step(self, idle: bool) -> None:
        """Called before each step. An engine with nobody in a row begins anew."""
        if idle:
            self.ratio = self._options.new_token_ratio
        else:
            self.ratio = max(self.ratio - self._options.new_token_decay, self._options.new_token_ratio_min)

    def retracted(self, running: Sequence[Request]) -> None:
        """There was too little room: raised to what those who stay have needed so far, and a margin."""
        asked = sum(request.params.max_new_tokens for request in running)
        made = sum(len(request.output) + RETRACT_MARGIN for request in running)
        if asked:
            self.ratio = max(self.ratio, min(made / asked, 1.0))


class InBatchPrefixes:
    """What is being computed in this step, as a tree of its own: the simulated tree of the queue.

    Of several cold requests with one beginning the first is admitted and put in here; the others find
    it here and wait a step for it. What is not computed in this step (the rest of a long prompt, a
    request without room) is not put in, so nobody waits for what does not come.
    """

    def __init__(self, page_size: int) -> None:
        self._tree = RadixCache(page_size)
        self._by: list[str] = []

    def computing(self, request: Request) -> None:
        """Takes on the tokens of a request that have KV after this step."""
        key = request.key(request.kv_len)
        # The "slots" are no slots here: they say who computes the token.
        self._tree.insert(key, np.full(len(key), len(self._by), dtype=np.int64))
        self._by.append(request.id)

    def shared(self, key: RadixKey) -> tuple[int, str]:
        """How many of a key's tokens are being computed, and by whom (the last of them)."""
        match = self._tree.match_prefix(key, count_hit=False)
        return match.length, self._by[int(match.slots[-1])] if match.length else ""


@dataclass(slots=True)
class Tally:
    """Tokens of admitted requests, and how many of them came from the cache."""

    requests: int = 0
    tokens: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float | None:
        """cached / tokens; None before there are any."""
        return self.cached / self.tokens if self.tokens else None

    def add(self, tokens: int, cached: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.cached += cached


@dataclass(slots=True)
class Books:
    """Running totals since the engine started.

    first: prompt tokens at each request's first admission. again: at its later ones, after a retraction
    (or, a sample of an n > 1 request, when there was no room to branch off): prompt and generated
    tokens, both of which have to be in the pool once more. Kept apart, because a request that is
    retracted hits its own prompt, and thrashing would look like a good cache. Samples that branch off
    at once count for nothing.
    retractions: of running requests for lack of room; preemptions: for somebody of larger priority.
    """

    first: Tally = field(default_factory=Tally)
    again: Tally = field(default_factory=Tally)
    retractions: int = 0
    preemptions: int = 0
    deferrals: int = 0  # for a prefix that another request was computing

    @property
    def hit_rate(self) -> float | None:
        """Cached prompt tokens / prompt tokens, first attempts only."""
        return self.first.hit_rate


def slots_given_up(victims: Sequence[Request], request: Request, page: int) -> int:
    """Slots that would become free or evictable if `victims` gave up theirs, and `request` not lock them.

    Their private pages, and the nodes that only they lock, less what of these is on the path that
    `request` matches (it would be locked again at once).
    """
    total = 0
    holds: dict[int, int] = {}
    nodes: dict[int, tuple[Any, int]] = {}  # a node, and how much of it `request` would lock again
    for victim in victims:
        total += -(-(victim.kv_len - victim.protected_len) // page) * page
        common = _common(victim, request) // page * page
        path, start = _path(victim.node), 0
        for node in path:
            size = len(node.slots)
            holds[node.id] = holds.get(node.id, 0) + 1
            nodes[node.id] = node, min(max(common - start, 0), size)
            start += size
    unlocked = [(node, again) for node, again in nodes.values() if node.lock_ref == holds[node.id]]
    return total + sum(len(node.slots) - again for node, again in unlocked)


def _path(node: Any) -> list[Any]:
    """From below the root down to `node`; works on anybody's nodes."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _common(one: Request, other: Request) -> int:
    """How many units of the tree two requests begin with alike: of pairs one less than of tokens."""
    if one.extra_key != other.extra_key:
        return 0
    size = min(one.length, other.length)
    differ = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
    alike = int(differ[0]) if len(differ) else size
    return max(alike - one.is_bigram, 0)
