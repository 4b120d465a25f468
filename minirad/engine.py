"""The engine: requests in, one visible step at a time, tokens out.

    step() = schedule -> launch -> read -> commit

Everything that happens in a step is done, checkable and told (events) when `step` returns. Sizes come
from EngineConfig; which tokens run from schedule/; where KV lies from cache/ and kv/; what is computed
from a runner (runner.py, launch.py). This file joins them and holds no policy of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from minirad import events as ev
from minirad import serve
from minirad.attention.radix_attention import AttentionBackend
from minirad.cache.allocator import PageAllocator
from minirad.cache.hiradix_cache import HiRadixCache
from minirad.cache.radix_cache import MAX_TOKEN, IntSequence, RadixCache, RadixKey, Slots, as_int64
from minirad.config import EngineConfig, SamplingParams, ScheduleOptions
from minirad.errors import InvariantError
from minirad.kv.host_tier import HostTier
from minirad.kv.kv_pool import KVPool
from minirad.launch import Result
from minirad.machine import assemble
from minirad.model.llama import LlamaModel
from minirad.model.load import load_tokenizer
from minirad.outputs import GenerationOutput, Pin, StepReport, StreamToken
from minirad.schedule.admission import Books
from minirad.schedule.ownership import PrefixCache, SlotOwnership
from minirad.schedule.request import Request, TokenMask
from minirad.schedule.scheduler import Batch, Scheduler
from minirad.transaction import Transaction

Prompt = str | IntSequence


class Engine:
    """Serves one Llama through one radix cache.

    cache: any object with RadixCache's methods (a student's tree, say); None makes a RadixCache.
    model, tokenizer: ready-made ones instead of those that `config.model` names.
    attention_note: one sentence if "auto" could not have the GPU or its fast attention, else "".

    Every public call that changes something is one transaction: what comes from outside meanwhile (Ctrl-C,
    the error of an event handler) is raised when the books are right. A call that raises and would have
    returned a handle (`add_request`, `pin`) did nothing; `generate` and `stream` leave no request behind.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        cache: PrefixCache | None = None,
        *,
        model: LlamaModel | None = None,
        tokenizer: Any = None,
    ) -> None:
        machine = assemble(config or EngineConfig(), model)
        self.config = config = machine.config
        self.runner, self.model_path, self.attention_note = machine.runner, machine.model_path, machine.note
        assert config.kv_tokens is not None
        self._tokenizer = tokenizer
        self.host_tier = HostTier(self.pool, config) if config.host_kv_tokens else None
        self.cache: PrefixCache = _checked_cache(cache, config, self.host_tier)
        self.bus: ev.EventBus = getattr(self.cache, "bus", None) or ev.EventBus()
        self.rows = self.runner.rows
        self.allocator = PageAllocator(config.kv_tokens, config.page_size)
        self.ownership = SlotOwnership(
            self.cache, self.allocator, self.rows, self.bus, keep=config.radix_cache,
            on_free=self.runner.poison if config.poison_freed else None,
            load_back_threshold=config.load_back_threshold,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.ownership, config.schedule_policy, config.chunk_tokens, self.bus, ScheduleOptions.of(config)
        )
        self.overlap = self.runner.overlap(self)
        self.transaction = Transaction(self.bus)
        self.outbox = serve.Outbox()
        self.steps = 0
        self._arrivals = 0
        self._pins: dict[int, Any] = {}
        self._next_pin = 1
        self._namespaces: dict[Hashable, int] = {(None, False): 0, (None, True): 0}
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
                self._settle()
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
                self._settle()
                self._step()

    def _settle(self) -> None:
        """Reads what is in flight and ends what was left, so that the books are those of whole steps."""
        try:
            if self.overlap is not None:
                self.overlap.settle()
        finally:
            self._end_those_left()

    def _step(self) -> StepReport:
        started = time.perf_counter()
        evicted, again = self.ownership.evicted_tokens, dataclasses.replace(self.books.again)
        batch = self._schedule()
        if batch is None:
            self.steps += 1
            self._give_up(self.scheduler.stuck)
        else:
            self.commit(batch, self._compute(batch))
        first = [r for r in batch.admitted if r.attempts == 1] if batch else []
        report = StepReport(
            index=self.steps,
            kind=batch.kind if batch else "idle",
            admitted=[r.id for r in batch.admitted] if batch else [],
            batch=[r.id for r in batch.requests] if batch else [],
            finished=[],
            retracted=[r.id for r in self.scheduler.retracted],
            evicted_tokens=self.ownership.evicted_tokens - evicted,
            hit_tokens=sum(r.cached_tokens for r in first),
            prompt_tokens=sum(len(r.prompt) for r in first),
            seconds=time.perf_counter() - started,
            again_hit_tokens=self.books.again.cached - again.cached,
            again_tokens=self.books.again.tokens - again.tokens,
            new_token_ratio=self.scheduler.future.ratio,
        )
        if self.bus.wants(ev.StepEnded):
            self.bus.emit(self._step_ended(report))
        return report

    def _schedule(self) -> Batch | None:
        """The scheduler's next batch, once it is known which copies between the tiers have ended."""
        if not isinstance(self.cache, HiRadixCache):
            return self.scheduler.next_batch()
        self.cache.poll()
        batch = self.scheduler.next_batch()
        if batch is None and self.scheduler.stuck and self.cache.copy_locks:
            self.cache.poll(wait=True)  # what copies lock may be all that was missing
            batch = self.scheduler.next_batch()
        if self.host_tier is not None:
            self.host_tier.fence()
        return batch

    def _compute(self, batch: Batch) -> list[Result]:
        """Launches a batch and reads it. Most of a step's time is spent here: Ctrl-C comes through."""
        try:
            with self.transaction.let_through():
                pending = self.runner.launch(batch)
            return pending.read()
        except BaseException:
            self.scheduler.put_back(batch.requests)
            raise

    def commit(self, batch: Batch, results: Sequence[Result]) -> None:
        """Gives computed KV to the tree, takes the new tokens on, branches n > 1, finishes who is done.

        What fails for one request ends that request.
        """
        self.steps += 1
        pairs = list(zip(batch.requests, results, strict=True))
        if batch.kind != "decode":  # whose KV stays private until the end
            nested = [self._prefilled(*pair, at < batch.prefills) for at, pair in enumerate(pairs)]
            pairs = [pair for some in nested for pair in some]
        now = time.perf_counter()
        for request, result in pairs:
            if result.tokens:
                request.first_token_at = request.first_token_at or now
                self._take(request, result)
        for request, result in pairs:
            reason = self._finish_reason(request, result.error)
            if reason:
                self._finish(request, reason)

    def _prefilled(self, request: Request, result: Result, prefill: bool) -> list[tuple[Request, Result]]:
        """Commits a chunk. Returns who samples now or has failed: nobody, or the request and its branches."""
        if result.error:
            return [(request, result)]
        try:
            if request.params.logprob_start == 0 and not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # nothing comes before the first token
            request.prompt_logprobs += result.prompt_logprobs
            if prefill:
                self.ownership.commit(request, finished=False)
            if not request.computed:
                return []
            if prefill:
                self.scheduler.prefilled(request)
        except InvariantError:
            raise
        except Exception as error:
            return [(request, Result(error=f"it could not be committed: {error!r}"))]
        branches = [self._branch(request, i, each) for i, each in enumerate(result.branches, start=1)]
        request.branched = True
        return [(request, result), *branches]

    def _branch(self, leader: Request, index: int, result: Result) -> tuple[Request, Result]:
        """A further sample of an n > 1 request, whose prompt has just been computed."""
        sample = leader.branch(index)
        try:
            tail = self.ownership.fork(leader, sample)
            if tail is None:
                self.scheduler.requeue(sample)
                if self.bus.wants(ev.RequestForked):
                    self.bus.emit(ev.RequestForked(sample.id, leader.id, -1, 0))
            else:
                if len(tail):
                    own = self.rows.rows[sample.row, sample.protected_len : sample.kv_len]
                    self.runner.copy_slots(tail, own)
                self.scheduler.prefilled(sample)
        except InvariantError:
            raise
        except Exception as error:
            result = Result(error=f"it could not branch off: {error!r}")
        return sample, result

    def _take(self, request: Request, result: Result) -> None:
        """New tokens join their request, and whoever wants to know is told."""
        for token, logprob in result.tokens:
            request.append(token, logprob)
            if self.bus.wants(ev.TokenSampled):
                self.bus.emit(ev.TokenSampled(request.id, token, request.length - 1))
            if request.listener is not None:
                request.listener.token(request, token)

    # ------------------------------------------------------------ ending a request

    def _finish_reason(self, request: Request, error: str) -> str:
        """Why it ends now; "" if it goes on."""
        params, output = request.params, request.output
        if error:
            request.error = f"{request.id}: {error}"
            return "error"
        if output and not params.ignore_eos and output[-1] in self.runner.eos_ids:
            return "stop"
        try:
            if params.stop and self._stop_position(request) is not None:
                return "stop"
        except Exception as problem:
            request.error = f"{request.id}: its text could not be made: {problem!r}"
            return "error"
        return "length" if len(output) >= params.max_new_tokens else ""

    def _stop_position(self, request: Request) -> int | None:
        """Where in the reply's text a stop text begins."""
        # A token is at least one byte (but for special ones, which are no text), a character at most
        # four: older text cannot be part of it.
        special = self.tokenizer.all_special_ids
        size = 4 * max(len(text) for text in request.params.stop) + 4
        recent = list(islice((t for t in reversed(request.output) if t not in special), size))
        tail = self.decode(recent[::-1])
        if not any(text in tail for text in request.params.stop):
            return None
        whole = self.decode(request.output)
        found = [whole.find(text) for text in request.params.stop if text in whole]
        return min(found) if found else None

    def _finish(self, request: Request, reason: str) -> None:
        """Commits (or, on an abort or error, drops) what a request holds and takes it off the books."""
        freed = 0
        if request.row >= 0:
            for _ in range(request.ahead):
                self.ownership.take_back_one(request)
            request.ahead = 0
            if reason not in ("abort", "error"):
                reason = self._give_to_tree(request, reason)
            if request.row >= 0:
                freed = self.ownership.release(request, "released")
        self.scheduler.finish(request)
        text, reason = self._final_text(request, reason)
        request.finish_reason = reason
        if reason == "abort":
            if self.bus.wants(ev.RequestAborted):
                self.bus.emit(ev.RequestAborted(request.id, freed))
        elif self.bus.wants(ev.RequestFinished):
            self.bus.emit(
                ev.RequestFinished(
                    request.id, reason, len(request.prompt), request.cached_tokens,
                    len(request.output),
                )
            )  # fmt: skip
        for index in range(request.index, request.index + 1 + request.unbranched):  # its samples end with it
            output = self._output(request, index, text)
            self.outbox.put(output)
            if request.listener is not None:
                request.listener.ended(output)

    def _give_to_tree(self, request: Request, reason: str) -> str:
        """The last commit, which gives its row back; an error if the tree does not take it."""
        try:
            self.ownership.commit(request, finished=True)
            return reason
        except InvariantError:
            raise
        except Exception as problem:
            request.error = f"{request.id}: its KV could not be kept: {problem!r}"
            return "error"

    def _final_text(self, request: Request, reason: str) -> tuple[str, str]:
        """The reply's text, and how it ended: an error, if there is no text of these tokens."""
        try:
            stop = self._stop_position(request) if request.params.stop and request.output else None
            return self.reply_text(request.output)[:stop], reason
        except Exception as problem:
            request.error = request.error or f"{request.id}: its text could not be made: {problem!r}"
            return "", reason if reason == "abort" else "error"

    def _output(self, request: Request, index: int, text: str) -> GenerationOutput:
        now = time.perf_counter()
        return GenerationOutput(
            request_id=request.group,
            index=index,
            text=text,
            token_ids=list(request.output),
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            finish_reason=request.finish_reason,
            ttft=(request.first_token_at or now) - request.added_at,
            seconds=now - request.added_at,
            logprobs=request.output_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            error=request.error,
        )

    def _give_up(self, request: Request | None) -> None:
        """Nothing can run and nothing will change by itself: pins hold what this request needs."""
        if request is not None:
            request.error = (
                f"{request.id} needs {request.length} slots, but of {self.allocator.num_tokens} only "
                f"{self.ownership.room} are free or evictable: the rest is pinned"
            )
            self._finish(request, "error")

    def _step_ended(self, report: StepReport) -> ev.StepEnded:
        free, tree = self.allocator.available, self.cache
        evictable, protected = int(tree.evictable_size), int(tree.protected_size)
        private = self.allocator.num_tokens - free - evictable - protected
        return ev.StepEnded(report.index, report.kind, free, evictable, protected, private, report.seconds)

    # ------------------------------------------------------------ taking requests on

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        extra_key: Hashable = None,
        priority: int = 0,
        *,
        token_mask: TokenMask | None = None,
    ) -> str:
        """Queues a prompt (text or token ids) and returns its id; `step` does the work.

        extra_key: requests share KV only with requests of an equal key (any hashable).
        priority: larger is served sooner and kept longer.
        token_mask: called with the ids generated so far, returns a bool row of allowed ids or None.

        Raises ValueError, and changes nothing, for an empty prompt, ids outside the vocabulary, or
        a prompt that with its reply is longer than the context or the pool.
        """
        request = self._new_request(prompt, params or SamplingParams(), extra_key, priority)
        request.token_mask = token_mask
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
            params = request.params
            number = getattr(self.cache, "namespace_number", self._namespace_number)
            space = number((request.extra_key, self.config.bigram_keys))
            self.bus.emit(
                ev.RequestAdded(
                    request.id, tuple(request.prompt.tolist()), params.max_new_tokens,
                    params.temperature, params.n, request.priority, space, params.top_p, params.top_k,
                    tuple(params.stop), params.ignore_eos, params.seed, params.logprob_start,
                )
            )  # fmt: skip

    def _namespace_number(self, namespace: Hashable) -> int:
        return self._namespaces.setdefault(namespace, len(self._namespaces) - 1)

    def _new_request(
        self, prompt: Prompt, params: SamplingParams, extra_key: Hashable, priority: int
    ) -> Request:
        tokens = self._checked_prompt(self.encode(prompt), params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be a whole number, got {priority!r}")
        self._key((), extra_key)  # refuses what cannot be hashed
        seed = params.seed if params.seed is not None else self.config.seed * 1_000_003
        bigram = self.config.bigram_keys
        return Request("", tokens, params, seed, 0, extra_key, priority, is_bigram=bigram)

    def _key(self, tokens: IntSequence, extra_key: Hashable) -> RadixKey:
        return RadixKey(tokens, extra_key, self.config.bigram_keys)

    def check_prompt(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises the ValueError that `add_request` would raise; changes nothing."""
        self._checked_prompt(self.encode(prompt), params or SamplingParams())

    def _checked_prompt(self, tokens: Slots, params: SamplingParams) -> Slots:
        config, vocab = self.config, self.runner.vocab_size
        assert config.max_context is not None
        if len(tokens) == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        outside = tokens[(tokens < 0) | (tokens >= min(vocab, MAX_TOKEN))]
        if len(outside):
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab}")
        total, sizes = len(tokens) + params.max_new_tokens, (len(tokens), params.max_new_tokens)
        if total > config.max_context:
            raise ValueError(
                f"{sizes[0]} prompt + {sizes[1]} new tokens = {total} are more than the context of "
                f"{config.max_context}"
            )
        if total > self.allocator.num_tokens:
            raise ValueError(
                f"{sizes[0]} prompt + {sizes[1]} new tokens = {total} are more than the KV pool of "
                f"{self.allocator.num_tokens}"
            )
        if params.n > config.max_running:
            raise ValueError(f"n={params.n} samples need as many rows, there are {config.max_running}")
        start = params.logprob_start
        if start is not None and start >= len(tokens):
            raise ValueError(f"logprob_start {start} is past the prompt's {len(tokens)} tokens")
        if params.stop:
            self.tokenizer  # noqa: B018  (stop texts need one: better refused now than in the loop)
        return tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        extra_key: Hashable = None,
    ) -> list[GenerationOutput]:
        """Runs prompts to their end; outputs in the order of the prompts, samples by index.

        All prompts are checked before any is queued. Requests added before go on meanwhile; what
        of them finishes is in the next step's report.
        """
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} sampling parameters")
        pairs = zip(many, params, strict=True)
        return serve.generate(self, [self._new_request(each, param, extra_key, 0) for each, param in pairs])

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, extra_key: Hashable = None
    ) -> Iterator[StreamToken]:
        """Yields each token of one prompt as soon as it is sampled. Leaving the loop aborts it."""
        return serve.stream(self, self._new_request(prompt, params or SamplingParams(), extra_key, 0))

    def abort(self, request_id: str) -> bool:
        """Cancels a request with all its samples; False if it is not here (any more).

        Its outputs, finish_reason "abort", are in the next step's report.
        """
        with self.transaction:
            self._settle()
            return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        mine = [request for request in self.scheduler.everyone() if request.group == request_id]
        for request in mine:
            self._finish(request, "abort")
        return bool(mine)

    def leave(self, request_ids: Iterable[str]) -> None:
        """None of these is left running, and nobody is told of them.

        In the middle of a step (Python collects a stream when it wants) that is done by the next one.
        """
        self._left += request_ids
        if not self.transaction.running:
            with self.transaction:
                self._settle()

    def _end_those_left(self) -> None:
        if self._left:
            for request_id in self._left:
                self._abort(request_id)
            self.outbox.take_of(self._left)
            self._left = []

    # ------------------------------------------------------------ prefixes

    def peek(self, prompt: Prompt, extra_key: Hashable = None) -> int:
        """How many tokens of a prompt the tree would match now. Changes nothing.

        The match, not the slots that would be used: one token at least is always computed.
        """
        return int(self.cache.peek(self._key(self.encode(prompt), extra_key)))

    def pin(self, prefix: Prompt, extra_key: Hashable = None) -> Pin:
        """Holds what of a prefix is in the tree, so that it is not evicted, until `unpin`."""
        key = self._key(self.encode(prefix), extra_key)
        uncounted = {"count_hit": False} if isinstance(self.cache, RadixCache) else {}
        number = self._next_pin
        try:
            with self.transaction:
                match = self.cache.match_prefix(key, **uncounted)
                self.cache.inc_lock_ref(match.last_node)
                self._pins[number] = match.last_node
                self._next_pin += 1
            return Pin(number, int(match.length))
        except BaseException:
            if number in self._pins:
                with self.transaction:
                    self._unpin(number)
            raise

    def unpin(self, pin: Pin) -> None:
        """Lets a pinned prefix go; ValueError if that was done before."""
        if pin.id not in self._pins:
            raise ValueError(f"pin {pin.id} is not held")
        with self.transaction:
            self._unpin(pin.id)

    def _unpin(self, number: int) -> None:
        self.cache.dec_lock_ref(self._pins.pop(number))

    def flush_cache(self) -> None:
        """Empties the tree; ValueError while requests live or pins hold."""
        if self.scheduler.has_work or self._pins:
            live = [request.id for request in self.scheduler.everyone()]
            raise ValueError(f"cannot flush: live requests {live}, pins {sorted(self._pins)}")
        with self.transaction:
            self.ownership.flush()

    # ------------------------------------------------------------ changes while it runs

    def set_eviction_policy(self, name: str) -> None:
        """Who is evicted from now on.

        ValueError names the policies that there are, or the tree that decides itself (a student's).
        """
        if not isinstance(self.cache, RadixCache):
            raise ValueError(
                f"{type(self.cache).__name__} decides itself who is evicted: its policy cannot be changed"
            )
        with self.transaction:
            self.cache.eviction_policy = name

    def update_weights(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape: nothing that the old ones computed is used again.

        Running requests are retracted and compute their prompt and reply so far anew; what is in the tree
        matches nothing any more, in any tier, and is evicted in time.

        Raises ValueError, and changes nothing, for a model of another shape, type or place.
        """
        new, old = ((each.config, each.dtype, each.device) for each in (model, self.model))
        if new != old:
            raise ValueError(f"the new weights are of another model: {new}, this engine serves {old}")
        bump = getattr(self.cache, "bump_version", None)
        if bump is None and self._pins:
            raise ValueError(f"pins {sorted(self._pins)} hold KV of the old weights: unpin them first")
        with self.transaction:
            self._settle()
            if bump is not None:
                bump()  # first, so that nothing of the old ones is copied to the host any more
            self.scheduler.put_back(self.scheduler.live)
            if bump is None:
                self.ownership.flush()
            self.runner.use(model)

    # ------------------------------------------------------------ looking at it

    @property
    def model(self) -> LlamaModel:
        return self.runner.model

    @property
    def pool(self) -> KVPool:
        return self.runner.pool

    @property
    def attention(self) -> AttentionBackend:
        return self.runner.attention

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def books(self) -> Books:
        """Running totals: prompt tokens and hits, first attempts and later ones apart; retractions."""
        return self.scheduler.books

    @property
    def has_work(self) -> bool:
        """Requests are waiting or running, or an output has not been in a step's report yet."""
        return self.scheduler.has_work or bool(self.outbox)

    def check(self) -> None:
        """All invariants, recomputed; InvariantError names the node or request and both numbers."""
        check_tree = getattr(self.cache, "check", None)
        if check_tree is not None:
            check_tree()
        self.ownership.check(self.scheduler.everyone(), self._pins)

    def snapshot(self) -> dict[str, Any]:
        """Tree, pool, queue and rows as plain data; what a recording's keyframes hold."""
        from minirad.record import tree_snapshot

        if not self.transaction.running:  # a recorder asks in the middle of a step
            with self.transaction:
                self._settle()
        requests = sorted(self.scheduler.everyone(), key=lambda r: (r.arrival, r.index))
        return {
            "step": self.steps,
            "kv_tokens": self.allocator.num_tokens,
            "free": self.allocator.available,
            "tree": tree_snapshot(self.cache),
            "waiting": [request.id for request in self.scheduler.waiting],
            "requests": {request.id: self._describe(request) for request in requests},
        }

    def _describe(self, request: Request) -> dict[str, Any]:
        holds = request.row >= 0
        return {
            "row": request.row,
            "node": request.node.id if holds else None,
            "slots": self.rows.rows[request.row, : request.kv_len].tolist() if holds else [],
            "protected": request.protected_len,
            "prompt_tokens": len(request.prompt),
            "length": request.length,
            "cached": request.cached_tokens,
            "attempts": request.attempts,
            "priority": request.priority,
        }

    # ------------------------------------------------------------ text

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            if self.model_path is None:
                raise ValueError("this engine has no tokenizer: give token ids, not text")
            self._tokenizer = load_tokenizer(self.model_path)
        return self._tokenizer

    def encode(self, prompt: Prompt) -> Slots:
        """Text to token ids; ids are passed on."""
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the prompt is no valid text: {error}") from error
            prompt = self.tokenizer.encode(prompt)
        tokens: Slots = as_int64(prompt, "a prompt").copy()
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text, special tokens left out."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Like `decode`; but a bare model has no texts: ids in, ids out."""
        return "" if self._tokenizer is None and self.model_path is None else self.decode(token_ids)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a text is one, and so is a row of ids."""
    if isinstance(prompts, str) or (
        len(prompts) and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    ):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _checked_cache(cache: PrefixCache | None, config: EngineConfig, tier: HostTier | None) -> PrefixCache:
    if cache is None and tier is not None:
        return HiRadixCache(
            config.page_size, config.eviction_policy, host_tokens=config.host_kv_tokens,
            host_write=config.host_write, copier=tier,
        )  # fmt: skip
    if cache is None:
        return RadixCache(config.page_size, config.eviction_policy)
    if tier is not None:
        raise ValueError(
            f"host_kv_tokens={config.host_kv_tokens}: a cache of your own cannot use a host tier"
        )
    if cache.page_size != config.page_size:
        raise ValueError(f"the cache has pages of {cache.page_size}, the engine {config.page_size}")
    held = int(cache.evictable_size) + int(cache.protected_size)
    if held:
        raise ValueError(f"the cache holds {held} tokens already: an engine begins with an empty one")
    return cache
