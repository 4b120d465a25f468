"""Which tokens the next forward pass computes: admission, chunks, decoding, retraction.

Prefill goes first (it is what makes prefixes shareable); at most `chunk_tokens` prompt tokens per
step, and at most one request is between chunks at a time. When decoding runs out of room, cached
tokens are evicted first and running requests retracted after that.

Does not compute anything and does not commit: the engine does, and both work on SlotOwnership.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minirad import events as ev
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.policies import POLICIES
from minirad.schedule.request import FINISHED, RUNNING, WAITING, Request


@dataclass(slots=True)
class Batch:
    """What one forward pass computes: tokens [starts[i], kv_len) of each request."""

    kind: str  # "prefill" or "decode"
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def add(self, request: Request, start: int) -> None:
        self.requests.append(request)
        self.starts.append(start)


@dataclass(slots=True)
class PrefillBudget:
    """What this step may still take on. Made afresh each step.

    tokens: prompt tokens left to compute. reserve: slots that those who run now will need next, to
    be left over so that admitting somebody does not at once retract somebody else. rows: free rows,
    less those that samples of this batch's requests are about to take.
    """

    tokens: int
    reserve: int
    rows: int


class Scheduler:
    """Keeps the waiting queue and the running requests of one engine."""

    def __init__(self, ownership: SlotOwnership, policy: str, chunk_tokens: int, bus: ev.EventBus) -> None:
        self.ownership = ownership
        self.order = POLICIES[policy]
        self.chunk_tokens = chunk_tokens
        self.bus = bus
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # decoding: all but the last token have KV
        self.chunking: Request | None = None  # admitted, prompt not computed to its end
        self.retracted: list[Request] = []  # in this step
        self.stuck: Request | None = None  # what can never run as things stand (pins hold the pool)

    @property
    def live(self) -> list[Request]:
        """Requests that hold a row."""
        return self.running + ([self.chunking] if self.chunking else [])

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.chunking)

    def everyone(self) -> Iterable[Request]:
        return [*self.live, *self.waiting]

    def next_batch(self) -> Batch | None:
        """The next prefill batch, else the next decode batch, else None (nothing can run)."""
        self.retracted, self.stuck = [], None
        batch = self._prefill_batch()
        if not batch.requests:
            batch = self._decode_batch()
        if not batch.requests:
            self.stuck = self.stuck or self.chunking or next(iter(self._ordered()), None)
            return None
        if self.bus.wants(ev.BatchScheduled):
            names = tuple(request.id for request in batch.requests)
            counts = tuple(r.kv_len - s for r, s in zip(batch.requests, batch.starts, strict=True))
            self.bus.emit(ev.BatchScheduled(batch.kind, names, counts))
        return batch

    def finish(self, request: Request) -> None:
        """Takes a request off the books; its slots are given back already."""
        request.status = FINISHED
        if request is self.chunking:
            self.chunking = None
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def prefilled(self, request: Request) -> None:
        """The prompt is computed to its end: from now on the request decodes."""
        if request is self.chunking:
            self.chunking = None
        self.running.append(request)

    # ------------------------------------------------------------ prefill

    def _ordered(self) -> list[Request]:
        peek = self.ownership.cache.peek
        return self.order(self.waiting, lambda request: peek(request.key()))

    def _prefill_batch(self) -> Batch:
        batch = Batch("prefill")
        page = self.ownership.allocator.page_size
        budget = PrefillBudget(
            self.chunk_tokens, reserve=page * len(self.running), rows=self.ownership.rows.available
        )
        if self.chunking:
            self._next_chunk(self.chunking, batch, budget)
        if self.chunking or not self.waiting or budget.rows <= 0:
            return batch
        for request in self._ordered():
            if budget.tokens == 0 or self.chunking:
                break
            reason = self._admit(request, batch, budget)
            if reason:
                # Whoever is first in order stays first: letting smaller ones pass would starve it.
                if self.bus.wants(ev.RequestDeferred):
                    self.bus.emit(ev.RequestDeferred(request.id, reason))
                break
        return batch

    def _next_chunk(self, request: Request, batch: Batch, budget: PrefillBudget) -> None:
        """As many further prompt tokens as budget and room allow (none: decoding may free some)."""
        ownership, page = self.ownership, self.ownership.allocator.page_size
        start = request.kv_len
        room = -start % page + ownership.room // page * page
        stop = min(start + budget.tokens, request.length, start + room)
        if stop > start and ownership.extend(request, stop):
            budget.tokens -= stop - start
            batch.add(request, start)
            if request.computed:
                self.chunking = None
                budget.reserve += page * (1 + request.unbranched)
                budget.rows -= request.unbranched

    def _admit(self, request: Request, batch: Batch, budget: PrefillBudget) -> str:
        """Admits a request into the batch, or says why not (and leaves no trace in the tree)."""
        ownership, cache = self.ownership, self.ownership.cache
        alone = not self.live and not batch.requests
        samples = 1 + request.unbranched
        if budget.rows < samples:
            return f"{max(budget.rows, 0)} of {samples} rows free"
        keys = [request.key()]
        if alone:
            # Nobody else holds anything. Locking the part of the match that is computed again anyway
            # could make the difference: then leave it out.
            keys.append(request.key(request.usable_prefix))
        reason = ""
        for key in keys:
            need, room = self._need(request, cache.peek(key), samples, budget, alone)
            room -= ownership.lock_cost(key)
            if room < need:
                reason = f"{need} slots needed, {room} free or evictable beside its match"
                continue
            match = cache.match_prefix(key)
            cache.inc_lock_ref(match.last_node)
            # The lock took the match out of what can be evicted. With our own tree that was foreseen
            # above; a tree without `lock_cost` is found out here.
            need, room = self._need(request, match.length, samples, budget, alone)
            if room >= need:
                self._enter(request, match, batch, budget, samples)
                return ""
            cache.dec_lock_ref(match.last_node)
            reason = f"{need} slots needed, {room} left after locking the match"
        return reason

    def _need(
        self, request: Request, matched: int, samples: int, budget: PrefillBudget, alone: bool
    ) -> tuple[int, int]:
        """Slots to have before admitting, and slots to be had. All of the prompt counts, not only
        the next chunk; alone in the engine, nothing need be left for others."""
        ownership = self.ownership
        page = ownership.allocator.page_size
        need = ownership.allocator.pages_needed(self._cached(request, matched), request.length) * page
        if not alone:
            need += budget.reserve + page * samples
        return need, ownership.room

    def _cached(self, request: Request, matched: int) -> int:
        page = self.ownership.allocator.page_size
        return min(matched, request.usable_prefix) // page * page

    def _enter(
        self, request: Request, match: object, batch: Batch, budget: PrefillBudget, samples: int
    ) -> None:
        ownership, page = self.ownership, self.ownership.allocator.page_size
        matched: int = match.length  # type: ignore[attr-defined]
        cached = self._cached(request, matched)
        ownership.attach(request, match, cached)
        request.status = RUNNING
        request.attempts += 1
        if request.attempts == 1:
            request.cached_tokens = cached
        self.waiting.remove(request)
        batch.admitted.append(request)
        if self.bus.wants(ev.RequestAdmitted):
            self.bus.emit(
                ev.RequestAdmitted(
                    request.id, request.row, request.node.id, matched, cached, request.length,
                    request.attempts,
                )
            )  # fmt: skip
        stop = min(cached + budget.tokens, request.length)
        extended = ownership.extend(request, stop)
        assert extended, f"{request.id} was admitted without room"
        batch.add(request, cached)
        budget.tokens -= stop - cached
        budget.reserve += page * samples
        budget.rows -= samples
        if not request.computed:
            self.chunking = request

    # ------------------------------------------------------------ decode

    def _decode_batch(self) -> Batch:
        """One more slot for every running request; retracts some when there is not enough room."""
        while not self._room_to_decode():
            victim = self._victim()
            if victim is None:
                self.stuck = self.running[0]
                return Batch("decode")
            self.retract(victim)
        batch = Batch("decode")
        for request in self.running:
            start = request.kv_len
            extended = self.ownership.extend(request, start + 1)
            assert extended, f"{request.id} cannot decode although room was made"
            batch.add(request, start)
        return batch

    def _room_to_decode(self) -> bool:
        allocator = self.ownership.allocator
        pages = sum(allocator.pages_needed(r.kv_len, r.kv_len + 1) for r in self.running)
        return self.ownership.make_room(pages * allocator.page_size)

    def _victim(self) -> Request | None:
        """Lowest priority, then the least to lose, then the last to come; never the only one."""
        if len(self.live) < 2:
            return None
        return min(self.live, key=lambda r: (r.priority, len(r.output), -r.arrival, -r.index))

    def retract(self, request: Request) -> None:
        """Puts a running request back into the queue; what it gave the tree stays, evictable."""
        freed = self.ownership.release(request, "released")
        self.requeue(request)
        self.retracted.append(request)
        if self.bus.wants(ev.RequestRetracted):
            self.bus.emit(ev.RequestRetracted(request.id, freed, len(request.output)))

    def requeue(self, request: Request) -> None:
        """Back to waiting, generated tokens kept."""
        if request is self.chunking:
            self.chunking = None
        if request in self.running:
            self.running.remove(request)
        request.status = WAITING
        self.waiting.append(request)
