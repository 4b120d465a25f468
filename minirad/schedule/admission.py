"""Which waiting request may begin: room and rows, for it and for what runs already.

Admission follows Algorithm 1 of the SGLang paper (appendix): match all waiting requests, sort them,
admit one after another while it fits, count what locking a match takes from the evictable, then evict
and allocate. Two slips of the algorithm as printed are repaired:

* it never adds an admitted request to `current_size`, so that every request is compared with the same
  room: here each admission takes its slots at once and what it will need next is added to `reserve`;
* it evicts the need where only the shortfall is missing: `CacheManager.make_room` evicts what the free
  list lacks, and cached prefixes that are not in the way stay.

Does not decide which request is tried first (policies.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minirad.cache.prefix_cache import Prefix
from minirad.cache.radix_cache import RadixKey
from minirad.config import ScheduleOptions
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.request import Request

RETRACT_MARGIN = 20  # tokens that each request that stays can generate after a retraction (SGLang)


class Admission(NamedTuple):
    """A request may begin. match: what the tree holds of it, locked."""

    match: Any


class Refusal(NamedTuple):
    """A request has to wait, and the tree is as it was.

    for_room: until there is more room, or a row; else for what another request computes.
    """

    reason: str
    for_room: bool = True


class FutureTokens:
    """Estimates the share of `max_new_tokens` that running requests will still generate (`ratio`, 0 to 1).

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
        """Called before each step. idle: no request has a row, so the estimate begins anew."""
        decayed = max(self.ratio - self._options.new_token_decay, self._options.new_token_ratio_min)
        self.ratio = self._options.new_token_ratio if idle else decayed

    def retracted(self, running: Sequence[Request]) -> None:
        """There was too little room: raised to what the requests that stay needed so far, and a margin."""
        asked = sum(request.params.max_new_tokens for request in running)
        made = sum(len(request.output) + RETRACT_MARGIN for request in running)
        if asked:
            self.ratio = max(self.ratio, min(made / asked, 1.0))


@dataclass(slots=True)
class PrefillBudget:
    """What this step may still take on. Made afresh each step.

    tokens: prompt tokens left to compute. rows: free rows, less those that samples of this batch's
    requests are about to take. reserve: slots that running requests will need next, left over so that
    an admission does not at once lead to a retraction. above: only larger priorities are admitted,
    because a request of this one was preempted in this step.
    """

    cache_manager: CacheManager
    future: FutureTokens
    tokens: int
    rows: int
    reserve: int
    above: float = -math.inf

    @property
    def alone(self) -> bool:
        """No request has a row."""
        return self.rows == len(self.cache_manager.rows.rows)

    def take(self, request: Request, tokens: int) -> None:
        """So many of a request's prompt tokens are in the batch."""
        self.tokens -= tokens
        if request.computed:
            self.reserve += self.future.slots(request)
            self.rows -= request.unbranched

    def preempted(self, victims: Sequence[Request]) -> None:
        """Running requests, smallest priority first, give up their rows and what was left over for them."""
        self.rows += len(victims)
        self.reserve -= sum(map(self.future.slots, victims))
        self.above = max(self.above, victims[-1].priority)

    def need(self, request: Request, matched: int) -> int:
        """Slots to have before admitting, beside a match that is locked: for all of the prompt.

        Alone, nothing need be left for others or for later, and what is computed although the tree has it
        can come a page at a time: each chunk's duplicates are freed when it is committed.
        """
        allocator = self.cache_manager.allocator
        if self.alone:
            return max(allocator.pages_needed(matched, request.length), 1) * allocator.page_size
        cached = self.cache_manager.cached(request, matched)
        need = allocator.pages_needed(cached, request.length) * allocator.page_size
        return need + self.reserve + self.future.slots(request)

    def try_admit(self, request: Request, found: Prefix) -> Admission | Refusal:
        """Locks what the tree holds of a request, if there is room and a row for it.

        found: what the tree would match.
        """
        if self.rows < 1 + request.unbranched:
            return Refusal(f"{max(self.rows, 0)} of {1 + request.unbranched} rows free")
        outcome = self._lock(request, request.key(), found)
        if self.alone and isinstance(outcome, Refusal):
            # Locking the part of the match that is computed again anyway could make the difference: then
            # leave it out, but for what pins lock.
            kept = max(request.usable_prefix, self.cache_manager.locked(request.key()))
            key = request.key(kept + request.is_bigram)  # n tokens: n - 1 pairs
            outcome = self._lock(request, key, self.cache_manager.find(key))
        return outcome

    def _lock(self, request: Request, key: RadixKey, found: Prefix) -> Admission | Refusal:
        """Locks what `key` matches, if there is room for the rest of the request beside it."""
        need, room = self.need(request, found.length), self.cache_manager.room - found.cost
        if room < need:
            return Refusal(f"{need} slots needed, {room} free or evictable beside its match")
        match = self.cache_manager.lock(key, found)
        # A tree that cannot say what a lock costs (a student's) said 0: only now the room is known.
        need, room = self.need(request, match.length), self.cache_manager.room
        if room < need:
            self.cache_manager.unlock(match)
            return Refusal(f"{need} slots needed, {room} left after locking the match")
        try:
            return Admission(self.cache_manager.load_back(request, match, spare=room - need))
        except BaseException:  # whatever the copying raises
            self.cache_manager.unlock(match)
            raise


def shared_units(one: Request, other: Request, tokens: int) -> int:
    """How many units of the tree (tokens or pairs) two requests have in common in their first `tokens`."""
    size = min(one.length, other.length, tokens) if one.extra_key == other.extra_key else 0
    differ = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
    alike = int(differ[0]) if len(differ) else size
    return max(alike - one.is_bigram, 0)


def in_batch_prefix(request: Request, batch: Iterable[Request], page: int, least: int) -> tuple[int, str]:
    """How many units of a request a batch computes in this step, in whole pages, and the request that does.

    Only where the first `least` units are alike, which the first bytes of most pairs deny at once.

    Of several cold requests with one beginning the first is admitted; the others find it here and wait a
    step for it. What is not computed in this step (the rest of a long prompt, a request without room) is
    in no batch, so no request waits for what does not come.
    """
    head = request.key().data[: least * request.key().width]
    alike = [each for each in batch if each.key().data.startswith(head)]
    shared = [(shared_units(request, each, each.kv_len) // page * page, each.id) for each in alike]
    return max(shared, key=lambda each: each[0], default=(0, ""))  # of equals, the first computes the end
