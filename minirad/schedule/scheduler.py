"""Which tokens the next forward pass computes: admission, chunks, decoding, retraction, preemption.

Prefill goes first (it is what makes prefixes shareable); at most `chunk_tokens` prompt tokens per
step, and at most one request is between chunks at a time. When decoding runs out of room, cached
tokens are evicted first and running requests retracted after that. With `mixed` those who run decode
in the same step; a chunk then leaves them the room for it.

Whoever is first in the policy's order is waited for: nobody smaller passes. Two things move it aside
for one step at most: a request that another one computes the beginning of (in-batch prefix) waits for
it, and one that was pushed out by a larger priority waits again. And a request that has no room even
alone, because of pins, lets those go first that have: the pins may be held until these are done.

Nothing is given up while anything can change: running requests end, copies between the tiers arrive, who
runs can go back to the queue. `stuck` is what is left then: with nobody in a row, nobody who waits fits.

Does not compute anything and does not commit: the engine does, and both work on SlotOwnership.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minirad import events as ev
from minirad.cache.radix_cache import RadixKey
from minirad.config import ScheduleOptions
from minirad.schedule.admission import Books, FutureTokens, InBatchPrefixes, PrefillBudget, slots_given_up
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.policies import CACHE_AWARE, POLICIES, is_behind
from minirad.schedule.request import FINISHED, RUNNING, WAITING, Request


@dataclass(slots=True)
class Batch:
    """What one forward pass computes: tokens [starts[i], kv_len) of each request.

    The first `prefills` of them are computing their prompts (or what a retraction made them compute
    again), the others decode: one token each, whose KV stays private until they finish.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefills: int = 0

    @property
    def kind(self) -> str:
        """ "prefill", "decode" or "mixed"."""
        if self.prefills == len(self.requests):
            return "prefill"
        return "mixed" if self.prefills else "decode"

    def add(self, request: Request, start: int, prefill: bool) -> None:
        """Appends; prefills have to come first."""
        self.requests.append(request)
        self.starts.append(start)
        self.prefills += prefill


class Scheduler:
    """Keeps the waiting queue and the running requests of one engine.

    policy: a name of policies.POLICIES. chunk_tokens: prompt tokens per step at most.
    """

    def __init__(
        self,
        ownership: SlotOwnership,
        policy: str,
        chunk_tokens: int,
        bus: ev.EventBus,
        options: ScheduleOptions | None = None,
    ) -> None:
        self.ownership = ownership
        self.policy = policy
        self.options = options = options or ScheduleOptions()
        self.order = POLICIES[policy](options)
        self.chunk_tokens = chunk_tokens
        self.bus = bus
        self.future = FutureTokens(options, ownership.allocator.page_size)
        self.books = Books()
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # decoding: all but the last token have KV
        self.chunking: Request | None = None  # admitted, prompt not computed to its end
        self.retracted: list[Request] = []  # in this step
        self.stuck: Request | None = None  # has no room even alone, and neither has anybody else
        self._tree_state: tuple[int, int, int] | None = None
        self._tree_version = 0
        self._last_order: tuple[int, list[Request], list[Request]] | None = None

    @property
    def live(self) -> list[Request]:
        """Requests that hold a row."""
        return self.running + ([self.chunking] if self.chunking else [])

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.chunking)

    @property
    def decodes_only(self) -> bool:
        """The next batch computes no prompt: nobody is between chunks, and nobody can be admitted."""
        can_admit = bool(self.waiting) and (self.ownership.rows.available > 0 or self._outranked())
        return not self.chunking and not can_admit

    def everyone(self) -> Iterable[Request]:
        return [*self.live, *self.waiting]

    def next_batch(self) -> Batch | None:
        """The next batch: prompts if there are any to compute, else decoding (or, with `mixed`, both);
        None when nothing can run."""
        self.retracted, self.stuck = [], None
        self.future.step(idle=not self.live)
        batch = Batch()
        while self.has_work and not batch.requests:
            before = len(self.retracted)
            self._prefill(batch)
            if self.options.mixed or not batch.requests:
                self._decode(batch)
            if not (batch.requests or len(self.retracted) > before or self._let_go()):
                self.stuck = self.ordered()[0]
                break
        if not batch.requests:
            return None
        if self.bus.wants(ev.BatchScheduled):
            names = tuple(request.id for request in batch.requests)
            counts = tuple(r.kv_len - s for r, s in zip(batch.requests, batch.starts, strict=True))
            self.bus.emit(ev.BatchScheduled(batch.kind, names, counts))
        return batch

    def _let_go(self) -> bool:
        """What can still make room when nothing fits a batch; False if there is nothing.

        A copy under way locks what it copies. And a request between chunks began beside others: alone it
        may need less, and others may be able to run in its place.
        """
        if self.ownership.settle():
            return True
        if self.chunking:
            self.retract(self.chunking)
            return True
        return False

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
        request.status = RUNNING  # a sample that has just branched off was none of those admitted
        self.running.append(request)

    # ------------------------------------------------------------ order

    def ordered(self) -> list[Request]:
        """The queue in the policy's order. What was peeked is used again as long as the tree holds the
        same tokens, and the whole order as long as the queue is the same, too."""
        version, known = self._version(), self._last_order
        if known is not None and known[0] == version and known[1] == self.waiting:
            return known[2]
        tree = self.ownership.cache

        def peek(request: Request) -> int:
            if request.peeked_at != version:
                request.peeked, request.peeked_at = tree.peek(request.key()), version
            return request.peeked

        order = self.order(self.waiting, peek)
        self._last_order = version, list(self.waiting), order
        return order

    def _version(self) -> int:
        """A number that changes whenever tokens come into the tree or go.

        Of any tree its size and what was evicted are known: while somebody waits it cannot be flushed,
        so both are as before only if nothing came and nothing went. (Splits change no match.) New weights
        leave all tokens where they are, and none of them match.
        """
        tree = self.ownership.cache
        size = tree.evictable_size + tree.protected_size
        state = (size, self.ownership.evicted_tokens, getattr(tree, "version", 0))
        if state != self._tree_state:
            self._tree_state, self._tree_version = state, self._tree_version + 1
        return self._tree_version

    # ------------------------------------------------------------ prefill

    def _prefill(self, batch: Batch) -> None:
        """Puts the next chunk and newly admitted requests into the batch."""
        if not (self.chunking or self.waiting):
            return
        budget = PrefillBudget(
            self.chunk_tokens,
            reserve=sum(map(self.future.slots, self.running)),
            rows=self.ownership.rows.available,
        )
        if self.chunking:
            self._next_chunk(self.chunking, batch, budget)
        if self.chunking or not self.waiting or not (budget.rows > 0 or self._outranked()):
            return
        computing = self._in_batch_prefixes(batch)
        for request in self.ordered():
            if budget.tokens == 0 or self.chunking:
                break
            if budget.above is not None and request.priority <= budget.above:
                break
            if computing is not None and self._wait_for_prefix(request, computing):
                continue
            reason = self._admit(request, batch, budget)
            if reason and self._make_way(request, batch, budget):
                reason = self._admit(request, batch, budget)
            if reason:
                self._deferred(request, reason)
                if self.live or batch.requests or self.ownership.copying:
                    # Whoever is first in order stays first: letting smaller ones pass would starve it.
                    break
                continue  # not even alone: whoever can run may be what its pins are held for
            if computing is not None:
                computing.computing(request)
        self._count_passes(batch)

    def _deferred(self, request: Request, reason: str) -> None:
        if self.bus.wants(ev.RequestDeferred):
            self.bus.emit(ev.RequestDeferred(request.id, reason))

    def _count_passes(self, batch: Batch) -> None:
        """Notes who was left waiting while somebody behind it was admitted. Only "fair" asks."""
        if self.policy != "fair" or not batch.admitted:
            return
        last = batch.admitted[0]
        for request in batch.admitted:
            last = request if is_behind(request, last) else last
        for request in self.waiting:
            request.passes += is_behind(last, request)

    def _next_chunk(self, request: Request, batch: Batch, budget: PrefillBudget) -> None:
        """As many further prompt tokens as budget and room allow (none: decoding may free some)."""
        if self._extend(request, batch, budget) and request.computed:
            self.chunking = None
            budget.reserve += self.future.slots(request)
            budget.rows -= request.unbranched

    def _extend(self, request: Request, batch: Batch, budget: PrefillBudget) -> bool:
        """Puts the next prompt tokens into the batch, as many as budget and room allow; False for none."""
        ownership, page = self.ownership, self.ownership.allocator.page_size
        start = request.kv_len
        room = ownership.room - (ownership.need_by_one(self.running) if self.options.mixed else 0)
        room = -start % page + room // page * page
        stop = min(start + budget.tokens, request.length, start + room)
        if stop <= start or not ownership.extend(request, stop):
            return False
        budget.tokens -= stop - start
        batch.add(request, start, prefill=True)
        return True

    def _admit(self, request: Request, batch: Batch, budget: PrefillBudget) -> str:
        """Admits a request into the batch, or says why not (and leaves no trace in the tree).

        What an earlier attempt matched is never used again, and neither is what was peeked for the
        order: between two attempts the match may have been evicted.
        """
        alone = not self.live and not batch.requests
        samples = 1 + request.unbranched
        if budget.rows < samples:
            return f"{max(budget.rows, 0)} of {samples} rows free"
        reason = self._admit_by(request.key(), request, batch, budget, alone)
        if reason and alone:
            # Locking the part of the match that is computed again anyway could make the difference: then
            # leave it out, but for what pins lock.
            kept = max(request.usable_prefix, self.ownership.locked(request.key()))
            key = request.key(kept + request.is_bigram)  # n tokens: n - 1 pairs
            reason = self._admit_by(key, request, batch, budget, alone)
        return reason

    def _admit_by(
        self, key: RadixKey, request: Request, batch: Batch, budget: PrefillBudget, alone: bool
    ) -> str:
        """Admits a request that locks what `key` matches, or says why not."""
        ownership, cache = self.ownership, self.ownership.cache
        need = self._need(request, cache.peek(key), budget.reserve, alone)
        room = ownership.room - ownership.lock_cost(key)
        if room < need:
            return f"{need} slots needed, {room} free or evictable beside its match"
        match = cache.match_prefix(key)
        cache.inc_lock_ref(match.last_node)
        # The lock took the match out of what can be evicted. With our own tree that was foreseen above; a
        # tree without `lock_cost` is found out here.
        need, room = self._need(request, match.length, budget.reserve, alone), ownership.room
        if room < need:
            cache.dec_lock_ref(match.last_node)
            return f"{need} slots needed, {room} left after locking the match"
        try:
            match = ownership.load_back(request, match, spare=room - need)
        except BaseException:  # whatever the copying raises
            cache.dec_lock_ref(match.last_node)
            raise
        self._enter(request, match, batch, budget)
        return ""

    def _need(self, request: Request, matched: int, reserve: int, alone: bool) -> int:
        """Slots to have before admitting, beside a match that is locked.

        All of the prompt counts, not only the next chunk. Alone in the engine, nothing need be left for
        others or for later, and what is computed although it is in the tree can come a page at a time:
        each chunk's duplicates are freed when it is committed.
        """
        ownership, page = self.ownership, self.ownership.allocator.page_size
        if alone:
            return max(ownership.allocator.pages_needed(matched, request.length), 1) * page
        cached = ownership.cached(request, matched)
        need = ownership.allocator.pages_needed(cached, request.length) * page
        return need + reserve + self.future.slots(request)

    def shortage(self, request: Request) -> tuple[int, int]:
        """Slots that a request needs when alone, beside those of its tokens that pins hold; and these."""
        shared = self.ownership.locked(request.key())
        return self._need(request, shared, 0, alone=True), shared

    def _enter(self, request: Request, match: object, batch: Batch, budget: PrefillBudget) -> None:
        ownership = self.ownership
        matched: int = match.length  # type: ignore[attr-defined]
        cached = ownership.cached(request, matched)
        ownership.attach(request, match, cached)
        request.status = RUNNING
        request.attempts += 1
        if request.attempts == 1:
            request.cached_tokens = cached
        tally = self.books.first if request.attempts == 1 else self.books.again
        tally.add(request.length, cached)
        self.waiting.remove(request)
        batch.admitted.append(request)
        if self.bus.wants(ev.RequestAdmitted):
            self.bus.emit(
                ev.RequestAdmitted(
                    request.id, request.row, request.node.id, matched, cached, request.length,
                    request.attempts,
                )
            )  # fmt: skip
        extended = self._extend(request, batch, budget)
        assert extended, f"{request.id} was admitted without room"
        budget.reserve += self.future.slots(request)
        budget.rows -= 1 + request.unbranched
        if not request.computed:
            self.chunking = request

    # ------------------------------------------------------------ in-batch prefix

    def _in_batch_prefixes(self, batch: Batch) -> InBatchPrefixes | None:
        """A tree of what this step computes so far; None where nobody is to wait for it.

        Only under policies that look at the tree: under the others the order is all that counts.
        """
        if not (self.options.in_batch_prefix and self.policy in CACHE_AWARE and self.ownership.keep):
            return None
        computing = InBatchPrefixes(self.ownership.allocator.page_size)
        for request in batch.requests:
            computing.computing(request)
        return computing

    def _wait_for_prefix(self, request: Request, computing: InBatchPrefixes) -> bool:
        """True, once for each stay in the queue, where another request computes its beginning now."""
        options = self.options
        due = self.policy == "fair" and request.passes >= options.fair_passes
        if request.has_waited or due:
            return False
        key = request.key()
        if self.ownership.cache.peek(key) > options.in_batch_cached:
            return False
        shared, other = computing.shared(key)
        if shared < options.in_batch_shared:
            return False
        request.has_waited = True  # whatever comes of it, next time it is tried
        self.books.deferrals += 1
        self._deferred(request, f"shares {shared} tokens with {other}, which computes them now")
        return True

    # ------------------------------------------------------------ preemption

    def _outranked(self) -> bool:
        """Somebody who waits has a larger priority than somebody who runs."""
        if not (self.options.preemption and self.running and self.waiting):
            return False
        return max(r.priority for r in self.waiting) > min(r.priority for r in self.running)

    def _make_way(self, request: Request, batch: Batch, budget: PrefillBudget) -> bool:
        """Pushes out running requests of strictly smaller priority, if that makes the room for `request`.

        The lowest priority goes first, then who has least to lose, and no more than are needed. They
        are waiting again, so none of them is taken twice in a step; those who finished are not in
        `running` any more, and those whose prompt is in this batch not yet.
        """
        lower = [r for r in self.running if r.priority < request.priority] if self.options.preemption else []
        victims = self._fewest(request, sorted(lower, key=_loss), batch, budget)
        for victim in victims:
            budget.rows += 1
            budget.reserve -= self.future.slots(victim)
            budget.above = max(victim.priority, victim.priority if budget.above is None else budget.above)
            self.books.preemptions += 1
            self.retract(victim, by=request)
        if victims:
            self.ownership.settle()
        return bool(victims)

    def _fewest(
        self, request: Request, lower: Sequence[Request], batch: Batch, budget: PrefillBudget
    ) -> Sequence[Request]:
        """The first few of `lower` whose slots and rows are enough; none where all would not be."""
        ownership, key = self.ownership, request.key()
        matched, samples = ownership.cache.peek(key), 1 + request.unbranched
        room = ownership.room - ownership.lock_cost(key)
        reserve = budget.reserve
        for count, victim in enumerate(lower, start=1):
            reserve -= self.future.slots(victim)
            alone = count == len(self.live) and not batch.requests
            given = slots_given_up(lower[:count], request, ownership.allocator.page_size)
            enough = room + given >= self._need(request, matched, reserve, alone)
            if enough and budget.rows + count >= samples:
                return lower[:count]
        return ()

    # ------------------------------------------------------------ decode

    def _decode(self, batch: Batch) -> None:
        """One more slot for every running request; retracts some when there is not enough room.

        The lowest priority goes first, then who has the least to lose, then the last to come. Even the only
        one goes, since pins may hold what it needs: admitted again it shares with the tree what it had for
        itself, and if that is not enough somebody else may be able to run.

        Beside prompts (`mixed`) there is room: they left it. A tree whose numbers are off would have the
        decoding wait for a step.
        """
        ownership = self.ownership
        if batch.requests and not ownership.make_room(ownership.need_by_one(self.running)):
            return
        while not ownership.make_room(ownership.need_by_one(self.running)):
            self.retract(min(self.live, key=_loss))
        starts = [request.kv_len for request in self.running]
        if starts:
            ownership.extend_by_one(self.running)
        for request, start in zip(self.running, starts, strict=True):
            batch.add(request, start, prefill=False)

    def retract(self, request: Request, by: Request | None = None) -> None:
        """Puts a running request back into the queue; what it gave the tree stays, evictable.

        by: for whom; None: there was no room to decode, so the estimate was too low.
        """
        self._put_back(request, by.id if by else "")
        if by is None:
            self.books.retractions += 1
            self.future.retracted(self.running)

    def put_back(self, requests: Iterable[Request]) -> None:
        """These wait again, with all they had generated: what they computed did not come or is of no use."""
        for request in requests:
            self._put_back(request, "")

    def _put_back(self, request: Request, by: str) -> None:
        freed = self.ownership.release(request, "released")
        self.requeue(request)
        self.retracted.append(request)
        if self.bus.wants(ev.RequestRetracted):
            self.bus.emit(ev.RequestRetracted(request.id, freed, len(request.output), by))

    def requeue(self, request: Request) -> None:
        """Back to waiting, generated tokens kept."""
        if request is self.chunking:
            self.chunking = None
        if request in self.running:
            self.running.remove(request)
        request.status = WAITING
        request.has_waited = False
        request.peeked_at = -1  # it is longer now than when it was looked up
        self._last_order = None
        self.waiting.append(request)


def _loss(request: Request) -> tuple[int, int, int, int]:
    """Sorts by what is lost with a running request: the smallest goes first."""
    return (request.priority, len(request.output), -request.arrival, -request.index)
