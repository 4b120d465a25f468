"""Which tokens the next forward pass computes: admission, chunks, decoding, retraction, preemption.

Prefill goes first (it is what makes prefixes shareable); at most `chunk_tokens` prompt tokens per
step, and at most one request is between chunks at a time. When decoding runs out of room, cached
tokens are evicted first and running requests retracted after that. With `mixed`, running requests decode
in the same step; a chunk then leaves them the room for it.

The first request in the policy's order is waited for: no smaller one passes. Two things move it aside
for one step at most: a request that another one computes the beginning of (in-batch prefix) waits for
it, and one that was preempted waits again. And a request that has no room even alone, because of pins,
lets others go first that have: the pins may be held until these are done.

No request is given up while anything can change: running requests end, copies between the tiers arrive,
running requests can go back to the queue. `stuck` is what is left then: no request has a row, and none of
the waiting ones fits.

Does not compute anything and does not commit: the engine does, and both work on the CacheManager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minirad.cache.prefix_cache import Prefix
from minirad.config import ScheduleOptions
from minirad.errors import require
from minirad.observe import events as ev
from minirad.schedule import preemption
from minirad.schedule.admission import Admission, FutureTokens, PrefillBudget, Refusal, in_batch_prefix
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.policies import CACHE_AWARE, POLICIES, rank
from minirad.schedule.request import FINISHED, RUNNING, WAITING, Request
from minirad.schedule.stats import Stats


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
        self, cache_manager: CacheManager, policy: str, chunk_tokens: int, bus: ev.EventBus,
        options: ScheduleOptions | None = None,
    ) -> None:  # fmt: skip
        self.cache_manager, self.bus = cache_manager, bus
        self.policy, self.chunk_tokens = policy, chunk_tokens
        self.options = options = options or ScheduleOptions()
        self.order = POLICIES[policy](options)
        # Under policies that do not look at the tree the order is all that counts.
        self._in_batch = options.in_batch_prefix and policy in CACHE_AWARE and cache_manager.keep
        self.future = FutureTokens(options, cache_manager.allocator.page_size)
        self.stats = Stats()
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # decoding: all but the last token have KV
        self.chunking: Request | None = None  # admitted, prompt not computed to its end
        self.retracted: list[Request] = []  # in this step
        self.stuck: Request | None = None  # has no room even alone, and neither has any other
        self._last_order: tuple[Any, list[Request], list[Request]] = (None, [], [])

    @property
    def live(self) -> list[Request]:
        """Requests that have a row."""
        return self.running + ([self.chunking] if self.chunking else [])

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.chunking)

    @property
    def decodes_only(self) -> bool:
        """The next batch computes no prompt: no request is between chunks, and none can be admitted."""
        return not self.chunking and not self._can_admit(self.cache_manager.rows.available)

    def _can_admit(self, rows: int) -> bool:
        """A request waits, and there is a row for it, or one that preemption could give it."""
        preemptible = self.running if self.options.preemption else []
        return bool(self.waiting) and (rows > 0 or preemption.outranked(preemptible, self.waiting))

    def requests(self) -> list[Request]:
        """All that have not finished."""
        return [*self.live, *self.waiting]

    everyone = requests  # the name that programs from before know

    def next_batch(self) -> Batch | None:
        """The next batch: prompts if there are any to compute, else decoding (or, with `mixed`, both);
        None when nothing can run."""
        self.retracted, self.stuck = [], None
        self.future.step(idle=not self.live)
        batch = Batch()
        try:
            while self.has_work and not batch.requests and self.stuck is None:
                before = len(self.retracted)
                self._prefill(batch)
                if self.options.mixed or not batch.requests:
                    self._decode(batch)
                if batch.requests or len(self.retracted) > before or self.cache_manager.wait_for_copies():
                    continue  # what was retracted made room, and what was copied is not locked any more
                if self.chunking:  # it began beside others: alone it may need less, or others may run instead
                    self.retract(self.chunking)
                else:
                    self.stuck = self.ordered()[0]
        except BaseException:  # of a tree or a policy of a caller's: nothing of what was begun is computed
            self.put_back([*batch.requests, *(r for r in batch.admitted if r not in batch.requests)])
            raise
        if batch.requests and self.bus.wants(ev.BatchScheduled):
            self.bus.emit(ev.BatchScheduled.of(batch))
        return batch if batch.requests else None

    # ------------------------------------------------------------ order

    def ordered(self) -> list[Request]:
        """The queue in the policy's order. What was found is used again as long as the tree holds the
        same tokens, and the whole order as long as the queue is the same, too."""
        state, find = self._tree_state(), self.cache_manager.find

        def matched(request: Request) -> int:
            if request.found_at != state:
                request.found, request.found_at = find(request.key(), request.found), state
            return int(request.found.length)

        if self._last_order[:2] != (state, self.waiting):
            self._last_order = state, list(self.waiting), self.order(self.waiting, matched)
        return self._last_order[2]

    def _find(self, request: Request) -> Prefix:
        """What the tree would match of a request now: the last look, unless the tree has changed since."""
        found = request.found = self.cache_manager.find(request.key(), request.found)
        return found

    def _tree_state(self) -> tuple[int, int, int]:
        """Differs from what it was whenever tokens came into the tree or left it.

        Of any tree its size and what was evicted are known: while a request waits it cannot be flushed,
        so both are as before only if nothing came and nothing went. (Splits change no match.) New weights
        leave all tokens where they are, and none of them match.
        """
        tree = self.cache_manager.cache
        size = tree.evictable_size + tree.protected_size
        return size, self.cache_manager.evicted_tokens, getattr(tree, "version", 0)

    # ------------------------------------------------------------ prefill

    def _prefill(self, batch: Batch) -> None:
        """Puts the next chunk and newly admitted requests into the batch."""
        if self.decodes_only:
            return
        budget = self._budget()
        if self.chunking:
            self._extend(self.chunking, batch, budget)
        if self.chunking or not self._can_admit(budget.rows):
            return
        for request in self.ordered():
            if budget.tokens == 0 or self.chunking or request.priority <= budget.above:
                break
            outcome = self._wait_for_prefix(request, batch) or self._try_admit(request, budget)
            if isinstance(outcome, Admission):
                self._begin(request, outcome.match, batch, budget)
                continue
            if self.bus.wants(ev.RequestDeferred):
                self.bus.emit(ev.RequestDeferred(request.id, outcome.reason))
            # The first in order stays first: letting smaller ones pass would starve it. But without room even
            # alone it is passed: the pins may be held for a request that can run.
            if outcome.for_room and (not budget.alone or self.cache_manager.copying):
                break
        if self.policy == "fair" and batch.admitted:  # no other policy asks who was passed
            last = max(map(rank, batch.admitted))
            for request in self.waiting:
                request.passes += rank(request) < last

    def _budget(self) -> PrefillBudget:
        rows, reserve = self.cache_manager.rows.available, sum(map(self.future.slots, self.running))
        return PrefillBudget(self.cache_manager, self.future, self.chunk_tokens, rows, reserve)

    def _try_admit(self, request: Request, budget: PrefillBudget) -> Admission | Refusal:
        """Admits a request, if need be by preempting running ones of smaller priority."""
        outcome = budget.try_admit(request, self._find(request))
        may = isinstance(outcome, Refusal) and self.options.preemption
        if may and (victims := preemption.choose_victims(request, self.running, budget)):
            budget.preempted(victims)
            self.stats.preemptions += len(victims)
            self.put_back(victims, by=request.id)
            self.cache_manager.wait_for_copies()
            return budget.try_admit(request, self._find(request))
        return outcome

    def _begin(self, request: Request, match: Any, batch: Batch, budget: PrefillBudget) -> None:
        """Gives an admitted request a row, and puts as much of its prompt as may be into the batch."""
        cached = self.cache_manager.cached(request, match.length)
        self.cache_manager.attach(request, match, cached)
        self.waiting.remove(request)
        batch.admitted.append(request)
        request.status = RUNNING
        request.attempts += 1
        if request.attempts == 1:
            request.cached_tokens = cached
        self.stats.admitted(request, cached)
        if self.bus.wants(ev.RequestAdmitted):
            self.bus.emit(ev.RequestAdmitted.of(request, match.length, cached))
        budget.rows -= 1
        require(self._extend(request, batch, budget), f"{request.id} was admitted without room")

    def _extend(self, request: Request, batch: Batch, budget: PrefillBudget) -> bool:
        """Puts the next prompt tokens into the batch, as many as budget and room allow; False for none."""
        cache_manager, page = self.cache_manager, self.cache_manager.allocator.page_size
        start = request.kv_len
        room = cache_manager.room - (cache_manager.need_by_one(self.running) if self.options.mixed else 0)
        room = -start % page + room // page * page
        stop = min(start + budget.tokens, request.length, start + room)
        if stop <= start or not cache_manager.extend(request, stop):
            return False
        batch.add(request, start, prefill=True)
        budget.take(request, stop - start)
        self.chunking = None if request.computed else request
        return True

    def _wait_for_prefix(self, request: Request, batch: Batch) -> Refusal | None:
        """Once for each stay in the queue: another request computes its beginning now."""
        options = self.options
        if not self._in_batch or request.has_waited:
            return None
        due = self.policy == "fair" and request.passes >= options.fair_passes
        if due or self._find(request).length > options.in_batch_cached:
            return None
        page, least = self.cache_manager.allocator.page_size, options.in_batch_shared
        shared, other = in_batch_prefix(request, batch.requests, page, least)
        if shared < least:
            return None
        request.has_waited = True  # whatever comes of it, next time it is tried
        self.stats.deferrals += 1
        return Refusal(f"shares {shared} tokens with {other}, which computes them now", for_room=False)

    def shortage(self, request: Request) -> tuple[int, int]:
        """Slots that `stuck` lacks room for, beside those of its tokens that pins hold; and these."""
        shared = self.cache_manager.locked(request.key())
        return self._budget().need(request, shared), shared

    # ------------------------------------------------------------ decode

    def _decode(self, batch: Batch) -> None:
        """One more slot for every running request; retracts some when there is not enough room.

        The lowest priority goes first, then the one with least to lose, then the last to come. Even the only
        one goes, since pins may hold what it needs: admitted again it shares with the tree what it had for
        itself, and if that is not enough another request may be able to run.

        Beside prompts (`mixed`) there is room: they left it. A tree whose numbers are off would have the
        decoding wait for a step.
        """
        while not self.cache_manager.make_room(self.cache_manager.need_by_one(self.running)):
            if batch.requests:
                return
            self.retract(min(self.live, key=preemption.loss))
        if self.running:
            self.cache_manager.extend_by_one(self.running)
        for request in self.running:
            batch.add(request, request.kv_len - 1, prefill=False)

    def prefilled(self, request: Request) -> None:
        """The prompt is computed to its end: from now on the request decodes."""
        request.status = RUNNING  # a sample that has just branched off was none of those admitted
        self.running.append(request)

    # ------------------------------------------------------------ leaving

    def retract(self, request: Request) -> None:
        """There was no room to decode: puts a running request back into the queue.

        What it gave the tree stays, evictable. The estimate was too low, and is raised.
        """
        self.put_back([request])
        self.stats.retractions += 1
        self.future.retracted(self.running)

    def put_back(self, requests: list[Request], by: str = "") -> None:
        """These wait again, with all that they generated; their rows and slots are given back.

        by: the request that they are preempted for. Else what they computed did not come or is of no use.
        """
        for request in requests:
            freed = self.cache_manager.release(request, "released")
            self.requeue(request)
            self.retracted.append(request)
            if self.bus.wants(ev.RequestRetracted):
                self.bus.emit(ev.RequestRetracted(request.id, freed, len(request.output), by))

    def requeue(self, request: Request) -> None:
        """Back to waiting, generated tokens kept."""
        self._remove(request)
        request.status, request.has_waited = WAITING, False
        request.found_at = None  # it is longer now than when it was looked up
        self._last_order = (None, [], [])
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Takes a request out of the queues; its slots are given back already."""
        self._remove(request)
        request.status = FINISHED

    def _remove(self, request: Request) -> None:
        if request is self.chunking:
            self.chunking = None
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
