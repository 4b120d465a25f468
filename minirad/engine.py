"""The engine: requests in, one visible step at a time, tokens out.

    step() = schedule -> launch -> read -> commit

Everything that happens in a step is done, checkable and told (events) when `step` returns. Sizes come
from EngineConfig; which tokens run from schedule/; where KV lies from cache/ and kv/; what is computed
from a runner (runner.py, parts.py). This file joins them and holds no policy of its own.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

from minirad import errors
from minirad.cache.allocator import PageAllocator
from minirad.cache.node import RadixKey, Slots
from minirad.cache.prefix_cache import PrefixCache, TreeHooks
from minirad.config import EngineConfig, SamplingParams, ScheduleOptions
from minirad.intake import Intake
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, Outbox, Pin, StepReport, StreamToken
from minirad.parts import Parts, Prompt, Result
from minirad.process_result import ResultProcessor
from minirad.rooms import room
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.request import Request, TokenMask
from minirad.schedule.scheduler import Batch, Scheduler
from minirad.schedule.stats import Stats


class Engine:
    """Serves one Llama through one radix cache.

    cache: any object with RadixCache's methods (a student's tree, say); None makes a RadixCache.
    model, tokenizer: ready-made ones instead of those that `config.model` names. parts: all of that and a
    runner, instead of what machine.py puts together.
    attention_note: one sentence if "auto" could not have the GPU or its fast attention, else "".

    Every public call that changes something is one transaction: what comes from outside meanwhile (Ctrl-C,
    the error of an event handler) is raised when the books are right. A call that raises and would have
    returned a handle (`add_request`, `pin`) did nothing; `generate` and `stream` leave no request behind.
    An engine serves one thread at a time.
    """

    def __new__(cls, config: Any = None, *rest: Any, **more: Any) -> Any:
        """One of several ranks, or with drafts, is another class (ranks/, speculative/)."""
        if getattr(config, "tp", 1) > 1:
            cls = room("ranks.engine").ranked(cls, config.tp)
        elif getattr(config, "drafting", False):
            cls = room("speculative.engine").drafting(cls)
        return super().__new__(cls)

    def __init__(
        self, config: EngineConfig | None = None, cache: PrefixCache | None = None, *,
        model: Any = None, tokenizer: Any = None, parts: Parts | None = None,
    ) -> None:  # fmt: skip
        parts = parts or room("machine").assemble(config, cache, model, tokenizer)
        self.config = config = parts.config
        self.runner, self.rows, self.tokenizing = parts.runner, parts.rows, parts.texts
        self.cache: PrefixCache = parts.cache
        self.host_tier = getattr(parts.cache, "copier", None)
        self.model_path, self.attention_note = parts.model_path, parts.note
        self.bus: ev.EventBus = getattr(self.cache, "bus", None) or ev.EventBus()
        assert config.kv_tokens is not None
        self.allocator = PageAllocator(config.kv_tokens, config.page_size)
        freed = room("kv.poison").freed_pages(self.pool, config.page_size) if config.poison_freed else None
        self.cache_manager = CacheManager(
            self.cache, self.allocator, self.rows, self.bus, keep=config.radix_cache, on_free=freed
        )
        self.scheduler = Scheduler(
            self.cache_manager,
            config.schedule_policy,
            config.chunk_tokens,
            self.bus,
            ScheduleOptions.of(config),
        )
        self.overlap = self.runner.overlap(self)
        self.transaction = room("transaction").Transaction(self.bus)
        self.outbox = Outbox()
        self.intake = Intake(config, self.runner.vocab_size, self.tokenizing)
        self.results = ResultProcessor(
            self.scheduler, self.cache_manager, self.runner, self.tokenizing, self.bus, self.outbox
        )
        self.steps = 0
        self._arrivals = 0
        self._pins: dict[int, Any] = {}
        self._next_pin = 1
        self._left: list[str] = []  # requests of streams that were left while a step was running

    # ------------------------------------------------------------ the loop

    def step(self) -> StepReport:
        """Schedules, computes and commits one batch; "idle" when there is nothing to do.

        What goes wrong in the forward pass (Ctrl-C, no memory left) is raised after the batch's requests
        have been put back into the queue. What comes from outside at another moment is raised when the
        step is committed; its outputs are then in the next report.
        """
        finished: list[GenerationOutput] = []
        try:
            with self.transaction:
                self._drain()
                report = self._step()
                finished = self.outbox.take()
                report.finished.extend(finished)
            return report
        except BaseException:
            self.outbox.put_back(finished)
            raise

    def advance(self) -> None:
        """A step for `generate` and `stream`, launched before the last one was read where possible.

        What finishes waits in the outbox.
        """
        with self.transaction:
            overlap = self.overlap if self.config.overlap and not self._left else None
            if overlap is None or not overlap.advance():
                self._drain()
                self._step()

    def _drain(self) -> None:
        """Reads what is in flight and ends what was left, so that the books are those of whole steps."""
        try:
            if self.overlap is not None:
                self.overlap.drain()
        finally:
            self._end_those_left()

    def _step(self) -> StepReport:
        started, before = time.perf_counter(), self._totals()
        batch = self._schedule()
        if batch is not None:
            try:
                with self.transaction.let_through():  # most of a step's time is spent here
                    pending = self.runner.launch(batch)
                results = pending.read()
            except BaseException:
                self.scheduler.put_back(batch.requests)
                raise
            self.commit(batch, results)
        else:
            self.steps += 1
            if self.scheduler.stuck is not None:
                self.results.give_up(self.scheduler.stuck)
        report = self._report(batch or Batch(), time.perf_counter() - started, before)
        if self.bus.wants(ev.StepEnded):
            self.bus.emit(ev.StepEnded.of(report, self.allocator, self.cache))
        return report

    def _schedule(self) -> Batch | None:
        """The scheduler's next batch, once it is known which copies between the tiers have ended."""
        self.cache_manager.tree.before_step()
        batch = self.scheduler.next_batch()
        self.cache_manager.tree.before_launch()
        return batch

    def commit(self, batch: Batch, results: Sequence[Result]) -> None:
        """Takes on what a launched batch said (process_result.py)."""
        self.steps += 1
        self.results.process(batch, results)

    def _totals(self) -> tuple[int, int, int]:
        again = self.stats.again
        return self.cache_manager.evicted_tokens, again.cached, again.tokens

    def _report(self, batch: Batch, seconds: float, before: tuple[int, int, int]) -> StepReport:
        first = [request for request in batch.admitted if request.attempts == 1]
        evicted, again_hit, again = (now - then for now, then in zip(self._totals(), before, strict=True))
        return StepReport(
            self.steps, batch.kind if batch.requests else "idle", [request.id for request in batch.admitted],
            [request.id for request in batch.requests], [], [r.id for r in self.scheduler.retracted], evicted,
            sum(request.cached_tokens for request in first), sum(len(request.prompt) for request in first),
            seconds, again_hit, again, self.scheduler.future.ratio,
        )  # fmt: skip

    # ------------------------------------------------------------ taking requests on

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, extra_key: Hashable = None,
        priority: int = 0, *, token_mask: TokenMask | None = None, lora: str = "",
    ) -> str:  # fmt: skip
        """Queues a prompt (text or token ids) and returns its id; `step` does the work.

        extra_key: requests share KV only with requests of an equal key (any hashable).
        priority: larger is served sooner and kept longer.
        token_mask: called with the ids generated so far, returns a bool row of allowed ids or None.
        lora: one of the config's adapters; its KV is shared among its own requests only.

        Raises ValueError, and changes nothing, for an empty prompt, ids outside the vocabulary, or
        a prompt that with its reply is longer than the context or the pool.
        """
        request = self.intake.request(prompt, params, extra_key, priority, token_mask, lora)
        try:
            self.enqueue([request])
            return request.id
        except BaseException:
            self.leave([request.id])
            raise

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Queues new requests and gives them their ids."""
        with self.transaction:
            for request in requests:
                self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        request.id = request.group = f"R{self._arrivals}"
        if request.params.seed is None:
            request.seed += self._arrivals
        request.added_at = time.perf_counter()
        self.scheduler.waiting.append(request)
        if self.bus.wants(ev.RequestAdded):
            space = self.cache_manager.tree.namespace_number((request.extra_key, self.config.bigram_keys))
            self.bus.emit(ev.RequestAdded.of(request, space))

    def check_prompt(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises the ValueError that `add_request` would raise; changes nothing."""
        self.intake.request(prompt, params)

    def generate(
        self, prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None, *, extra_key: Hashable = None,
        lora: str = "",
    ) -> list[GenerationOutput]:  # fmt: skip
        """Runs prompts to their end; outputs in the order of the prompts, samples by index.

        All prompts are checked before any is queued. Requests added before go on meanwhile; what
        of them finishes is in the next step's report.
        """
        outputs: list[GenerationOutput] = room("generate").generate(self, prompts, params, extra_key, lora)
        return outputs

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, extra_key: Hashable = None,
        lora: str = "",
    ) -> Iterator[StreamToken]:  # fmt: skip
        """Yields each token of one prompt as soon as it is sampled. Leaving the loop aborts it."""
        request = self.intake.request(prompt, params, extra_key, lora=lora)
        tokens: Iterator[StreamToken] = room("generate").stream(self, request)
        return tokens

    def abort(self, request_id: str) -> bool:
        """Cancels a request with all its samples; False if it is not here (any more).

        Its outputs, finish_reason "abort", are in the next step's report.
        """
        errors.request_id(request_id)
        with self.transaction:
            self._drain()
            return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        mine = [request for request in self.scheduler.requests() if request.group == request_id]
        for request in mine:
            self.results.finish(request, "abort")
        return bool(mine)

    def leave(self, request_ids: Iterable[str]) -> None:
        """None of these is left running, and no report tells of them.

        In the middle of a step (Python collects a stream when it wants) that is done by the next one.
        """
        self._left += request_ids
        if not self.transaction.running:
            with self.transaction:
                self._drain()

    def _end_those_left(self) -> None:
        while self._left:  # another stream may be collected, and join them, meanwhile
            left, self._left = self._left, []
            for request_id in left:
                self._abort(request_id)
            self.outbox.take_of(left)

    # ------------------------------------------------------------ prefixes

    def peek(self, prompt: Prompt, extra_key: Hashable = None, lora: str = "") -> int:
        """How many tokens of a prompt the tree would match now. Changes nothing.

        The match, not the slots that would be used: one token at least is always computed.
        """
        return int(self.cache.peek(self.intake.key(self.encode(prompt), extra_key, lora)))

    def pin(self, prefix: Prompt, extra_key: Hashable = None, lora: str = "") -> Pin:
        """Holds the part of a prefix that is in the tree, so that it is not evicted, until `unpin`."""
        key = self.intake.key(self.encode(prefix), extra_key, lora)
        number = self._next_pin
        try:
            with self.transaction:
                match = self._pin(number, key)
            return Pin(number, int(match.length), self)
        except BaseException:
            if number in self._pins:
                with self.transaction:
                    self._unpin(number)
            raise

    def _pin(self, number: int, key: RadixKey) -> Any:
        match = self.cache_manager.lock(key, count_hit=False)
        self._pins[number] = match.last_node
        self._next_pin += 1
        return match

    def unpin(self, pin: Pin) -> None:
        """Lets a pinned prefix go; ValueError if that was done before."""
        if not isinstance(pin, Pin) or pin.engine is not self:
            raise ValueError(f"a pin that this engine's pin() returned is needed, got {errors.said(pin)}")
        if pin.id not in self._pins:
            raise ValueError(f"pin {pin.id} is not held")
        with self.transaction:
            self._unpin(pin.id)

    def _unpin(self, number: int) -> None:
        self.cache.dec_lock_ref(self._pins.pop(number))

    def flush_cache(self) -> None:
        """Empties the tree; ValueError while requests live or pins hold."""
        if self.scheduler.has_work or self._pins:
            live = [request.id for request in self.scheduler.requests()]
            raise ValueError(f"cannot flush: live requests {live}, pins {sorted(self._pins)}")
        with self.transaction:
            self._flush()

    def _flush(self) -> None:
        self.cache_manager.flush()

    # ------------------------------------------------------------ changes while it runs

    def set_eviction_policy(self, name: str) -> None:
        """Who is evicted from now on.

        ValueError names the policies that there are, or the tree that decides itself (a student's).
        """
        if not (isinstance(self.cache, TreeHooks) and self.cache.eviction_policies):
            raise ValueError(
                f"{type(self.cache).__name__} decides itself who is evicted: its policy cannot be changed"
            )
        with self.transaction:
            self._evict_by(name)

    def _evict_by(self, policy: str) -> None:
        cast(Any, self.cache).eviction_policy = policy

    def update_weights(self, model: Any) -> None:
        """Goes on with other weights of the same shape: nothing that the old ones computed is used again.

        Running requests are retracted and compute their prompt and reply so far anew; what is in the tree
        matches nothing any more, in any tier, and is evicted in time.

        Raises ValueError, and changes nothing, for a model of another shape, type or place.
        """
        room("machine").check_weights(model, self.model)
        if not hasattr(self.cache, "bump_version") and self._pins:
            raise ValueError(f"pins {sorted(self._pins)} hold KV of the old weights: unpin them first")
        with self.transaction:
            self._drain()
            self._use_weights(model)

    def _use_weights(self, model: Any) -> None:
        bump = getattr(self.cache, "bump_version", None)
        if bump is not None:
            bump()  # first, so that nothing of the old ones is copied to the host any more
        self.scheduler.put_back(self.scheduler.live)
        if bump is None:
            self.cache_manager.flush()
        self.runner.use(model)

    # ------------------------------------------------------------ looking at it

    model = property(lambda self: self.runner.model, doc="The runner's LlamaModel.")
    pool = property(lambda self: self.runner.pool, doc="The runner's KVPool.")
    attention = property(lambda self: self.runner.attention, doc="The runner's AttentionBackend.")
    device = property(lambda self: self.runner.device, doc="The torch.device on which the runner computes.")

    @property
    def stats(self) -> Stats:
        """Running totals: prompt tokens and hits, first attempts and later ones apart; retractions."""
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        """Requests are waiting or running, or an output has not been in a step's report yet."""
        return self.scheduler.has_work or bool(self.outbox)

    def check(self) -> None:
        """All invariants, recomputed; InvariantError names the node or request and both numbers."""
        self.cache_manager.tree.check()
        self.cache_manager.check(self.scheduler.requests(), self._pins)

    def snapshot(self) -> dict[str, Any]:
        """Tree, pool, queue and rows as plain data; what a recording's keyframes hold."""
        if not self.transaction.running:  # a recorder asks in the middle of a step
            with self.transaction:
                self._drain()
        state: dict[str, Any] = room("observe.snapshot").engine_snapshot(self)
        return state

    # ------------------------------------------------------------ text

    tokenizer = property(
        lambda self: self.tokenizing.tokenizer,
        doc="The model's tokenizer, loaded when first asked for; ValueError for a bare model.",
    )
    texts = property(lambda self: self.tokenizing.texts, doc="What each token says (text.TokenTexts).")
    eos_ids = property(
        lambda self: self.tokenizing.eos_ids, doc="End tokens: the model's and the tokenizer's."
    )

    def encode(self, prompt: Prompt) -> Slots:
        """Text to token ids; ids are passed on."""
        return self.tokenizing.encode(prompt)  # type: ignore[no-any-return]  # of any tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text, special tokens left out."""
        return str(self.tokenizing.decode(token_ids))
