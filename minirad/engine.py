"""The engine: requests in, one visible step at a time, tokens out.

    step() = schedule -> forward -> commit

Everything that happens in a step is done, checkable and told (events) when `step` returns. Sizes come
from EngineConfig; which tokens run from schedule/; where KV lies from cache/ and kv/; what is computed
from model/ and attention/. This file joins them and holds no policy of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from minirad import checks
from minirad import events as ev
from minirad.ahead import RunAhead
from minirad.attention.flashinfer import FlashInferAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.cache.allocator import PageAllocator
from minirad.cache.hiradix_cache import HiRadixCache
from minirad.cache.radix_cache import MAX_TOKEN, IntSequence, RadixCache, RadixKey, Slots, as_int64
from minirad.config import EngineConfig, SamplingParams, ScheduleOptions
from minirad.interrupts import HeldInterrupts
from minirad.kv.host_tier import HostTier
from minirad.machine import choose_attention, choose_device, choose_dtype, filled_in
from minirad.model.dummy import dummy_model
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.model.sampler import position_uniform, prompt_logprobs, sample
from minirad.outputs import GenerationOutput, Pin, StepReport, StreamText, StreamToken
from minirad.runner import DecodeGraphs
from minirad.schedule.admission import Books
from minirad.schedule.ownership import PrefixCache, SlotOwnership
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request, TokenMask
from minirad.schedule.scheduler import Batch, Scheduler

Prompt = str | IntSequence


class Engine:
    """Serves one Llama through one radix cache.

    cache: any object with RadixCache's methods (a student's tree, say); None makes a RadixCache.
    model, tokenizer: ready-made ones instead of those that `config.model` names.
    attention_note: one sentence if "auto" could not have the GPU or its fast attention, else "".
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        cache: PrefixCache | None = None,
        *,
        model: LlamaModel | None = None,
        tokenizer: Any = None,
    ) -> None:
        checks.engine(config, cache, model)
        config = config or EngineConfig()
        ready = model is not None or config.dummy_weights is not None
        self.model_path = None if ready else resolve_model(config.model)
        self.device = choose_device(config.device, model)
        if model is None:
            dtype = choose_dtype(config.dtype, self.device)
            if config.dummy_weights is not None:
                model = dummy_model(config.dummy_weights, dtype, self.device)
            else:
                assert self.model_path is not None
                model = load_model(self.model_path, dtype, self.device)
        self.model = model
        self._tokenizer = tokenizer
        self.attention, self.attention_note = choose_attention(config, model, self.device)
        self.config = config = filled_in(config, model, self.device, self.attention.name)
        assert config.kv_tokens is not None and config.max_context is not None

        self.pool = model.new_pool(config.kv_tokens + config.page_size)
        self.host_tier = HostTier(self.pool, config) if config.host_kv_tokens else None
        self.cache: PrefixCache = _checked_cache(cache, config, self.host_tier)
        self.bus: ev.EventBus = getattr(self.cache, "bus", None) or ev.EventBus()
        self.rows = ReqToTokenPool(config.max_running, config.max_context)
        self.allocator = PageAllocator(config.kv_tokens, config.page_size)
        self.ownership = SlotOwnership(
            self.cache, self.allocator, self.rows, self.bus, keep=config.radix_cache,
            on_free=self._poison if config.poison_freed else None,
            load_back_threshold=config.load_back_threshold,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.ownership, config.schedule_policy, config.chunk_tokens, self.bus, ScheduleOptions.of(config)
        )
        self.graphs = self._new_graphs()
        self._greedy: torch.Tensor | None = None  # of a captured step: likeliest tokens, log-probabilities
        self.ahead = RunAhead(self)
        self._steps = 0
        self._arrivals = 0
        self._pins: dict[int, Any] = {}
        self._next_pin = 1
        self._namespaces: dict[Hashable, int] = {(None, False): 0, (None, True): 0}
        self._stepping = False
        self._interrupts = HeldInterrupts()  # of the step that is running
        self._held: list[GenerationOutput] = []  # finished while somebody else was driving
        self._streams: dict[str, dict[int, GenerationOutput]] = {}  # what each stream waits for
        self._left: list[str] = []  # streams that were left while a step was running
        self._watchers: list[Callable[[str, int], None]] = []  # of streams: told each token as it is sampled

    # ------------------------------------------------------------ the loop

    def step(self) -> StepReport:
        """Schedules, computes and commits one batch; "idle" when there is nothing to do.

        What goes wrong in the forward pass (Ctrl-C, no memory left) is raised after the batch's requests
        have been put back into the queue. What an event handler raises is raised when the step is
        committed, and so is Ctrl-C pressed outside the forward pass; the step's outputs are then in the
        next report. Handlers watch: one that drives the engine gets a ValueError.
        """
        if self._stepping:
            raise ValueError("a step is running: an event handler must not drive the engine")
        self.ahead.settle()
        self._end_those_left()
        with HeldInterrupts() as interrupts:
            self._stepping, self._interrupts = True, interrupts
            self.bus.hold_failures()
            try:
                report = self._step()
            finally:
                self._stepping = False
                failures = self.bus.release_failures()
        try:
            interrupts.deliver()
            if failures:
                raise failures[0]
        except BaseException:
            self._held = report.finished + self._held
            raise
        return report

    def _step(self) -> StepReport:
        started = time.perf_counter()
        self._steps += 1
        evicted = self.ownership.evicted_tokens
        again = dataclasses.replace(self.books.again)
        batch = self._next_batch()
        if batch is None:
            finished = self._give_up(self.scheduler.stuck)
        else:
            finished = self._commit(batch, self._computed(batch))
        finished, self._held = self._held + finished, []
        first = [r for r in batch.admitted if r.attempts == 1] if batch else []
        report = StepReport(
            index=self._steps,
            kind=batch.kind if batch else "idle",
            admitted=[r.id for r in batch.admitted] if batch else [],
            batch=[r.id for r in batch.requests] if batch else [],
            finished=finished,
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

    def _next_batch(self) -> Batch | None:
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

    def _computed(self, batch: Batch) -> torch.Tensor:
        try:
            with self._interrupts.let_through():
                return self._forward(batch)
        except BaseException:  # Ctrl-C above all: most of a step's time is spent here
            self.scheduler.put_back(batch.requests)
            self._steps -= 1  # it was none: no report and no event tells of it
            raise

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits [N, vocab] of the positions that `_wanted_logits` lists, request by request."""
        self._greedy = None
        if self.graphs is not None:
            if batch.kind == "decode" and self.graphs.fits(batch.requests):
                output = self.graphs.run(batch.requests)
                self._greedy = output.greedy
                return output.logits
            self.rows.rewritten.update(request.row for request in batch.requests)
        entries, tokens, wanted, offset = [], [], [], 0
        for request, start in zip(batch.requests, batch.starts, strict=True):
            stop = request.kv_len
            entries.append(BatchEntry(request.row, start, stop))
            tokens.append(request.tokens[start:stop])
            wanted += [offset + position - start for position in self._wanted_logits(request, start)]
            offset += stop - start
        metadata = build_metadata(self.rows.rows, entries, self.config.page_size, self.device)
        return self.model.forward(
            torch.from_numpy(np.concatenate(tokens)).to(self.device), metadata, self.pool,
            self.attention, torch.tensor(wanted, dtype=torch.int64, device=self.device),
        )  # fmt: skip

    def _wanted_logits(self, request: Request, start: int) -> list[int]:
        """Positions of the request whose logits are needed: for prompt log-probabilities, and the
        last one when the next token can be sampled."""
        positions: list[int] = []
        if _wants_prompt_logprobs(request):
            first = max(request.next_logprob - 1, 0)  # what predicts that token; never before `start`
            positions += range(first, min(request.kv_len, len(request.prompt) - 1))
        if request.computed and request.params.max_new_tokens > 0:
            positions.append(request.kv_len - 1)
        return positions

    def _commit(self, batch: Batch, logits: torch.Tensor) -> list[GenerationOutput]:
        """Gives computed KV to the tree, samples, branches n > 1, and finishes who is done."""
        if batch.kind == "decode":  # one row of logits each, and nothing for the tree until the end
            self._sample(batch.requests, list(range(len(batch.requests))), logits)
            return [self._finish(r, reason) for r in batch.requests if (reason := self._finish_reason(r))]
        ready: list[Request] = []
        rows: list[int] = []
        offset = 0
        for at, (request, start) in enumerate(zip(batch.requests, batch.starts, strict=True)):
            offset += self._take_prompt_logprobs(request, start, logits, offset)
            prefill = at < batch.prefills
            if prefill:
                self.ownership.commit(request, finished=False)
            if not request.computed:
                continue
            if prefill:
                self.scheduler.prefilled(request)
            samples = [request, *self._branches(request)]
            wanted = request.params.max_new_tokens > 0
            ready += samples
            rows += [offset if wanted else -1] * len(samples)
            offset += wanted
        self._sample(ready, rows, logits)
        return [self._finish(r, reason) for r in ready if (reason := self._finish_reason(r))]

    def _take_prompt_logprobs(self, request: Request, start: int, logits: torch.Tensor, offset: int) -> int:
        """Reads a chunk's prompt log-probabilities; returns how many rows of logits they took."""
        if not _wants_prompt_logprobs(request):
            return 0
        positions = self._wanted_logits(request, start)
        if request.computed and request.params.max_new_tokens > 0:
            positions = positions[:-1]
        if request.params.logprob_start == 0 and not request.prompt_logprobs:
            request.prompt_logprobs.append(None)  # nothing comes before the first token
        if positions:
            following = torch.from_numpy(request.prompt[np.array(positions) + 1]).to(self.device)
            rows = logits[offset : offset + len(positions)]
            request.prompt_logprobs += prompt_logprobs(rows, following)
        return len(positions)

    def _branches(self, leader: Request) -> list[Request]:
        """The further samples of an n > 1 request, when its prompt has just been computed."""
        samples = []
        for index in range(1, leader.unbranched + 1):
            each = Request(
                f"{leader.group}.{index}", leader.prompt, leader.params, leader.seed,
                leader.arrival, leader.extra_key, leader.priority, index, leader.group,
                leader.token_mask, leader.is_bigram,
            )  # fmt: skip
            each.added_at, each.attempts = leader.added_at, leader.attempts
            each.cached_tokens, each.prompt_logprobs = leader.cached_tokens, list(leader.prompt_logprobs)
            tail = self.ownership.fork(leader, each)
            if tail is None:
                self.scheduler.requeue(each)
                if self.bus.wants(ev.RequestForked):
                    self.bus.emit(ev.RequestForked(each.id, leader.id, -1, 0))
            else:
                self._copy_tail(tail, each)
                self.scheduler.prefilled(each)
            samples.append(each)
        return samples

    def _copy_tail(self, source: Slots, sample_: Request) -> None:
        if len(source):
            own = self.rows.rows[sample_.row, sample_.protected_len : sample_.kv_len]
            device = self.device
            self.pool.copy(torch.from_numpy(source).to(device), torch.from_numpy(own).to(device))

    def _sample(self, ready: list[Request], rows: list[int], logits: torch.Tensor) -> None:
        masked = [(r, row, self._mask(r)) for r, row in zip(ready, rows, strict=True) if row >= 0]
        who = [(request, row) for request, row, _ in masked if not request.error]
        masks = [mask for request, _, mask in masked if not request.error]
        if not who:
            return
        wanted = [row for _, row in who]
        whole = wanted == list(range(len(logits)))  # as in every decode step: nothing to pick out
        chosen, logprobs = sample(
            logits if whole else logits[torch.tensor(wanted, device=self.device)],
            [r.params for r, _ in who],
            [position_uniform(r.seed, r.index, r.length) if r.params.temperature else 0.0 for r, _ in who],
            masks if any(mask is not None for mask in masks) else None,
            self._greedy if whole else None,
        )
        now = time.perf_counter()
        for (request, _), token, logprob in zip(who, chosen, logprobs, strict=True):
            request.first_token_at = request.first_token_at or now
            self.take_token(request, token, logprob)

    @property
    def is_watched(self) -> bool:
        """Somebody wants to be told of sampled tokens."""
        return bool(self._watchers) or self.bus.wants(ev.TokenSampled)

    def take_token(self, request: Request, token: int, logprob: float) -> None:
        """A sampled token joins its request, and whoever wants to know is told."""
        request.append(token, logprob)
        if self.bus.wants(ev.TokenSampled):
            self.bus.emit(ev.TokenSampled(request.id, token, request.length - 1))
        for watch in tuple(self._watchers):
            watch(request.id, token)

    def _mask(self, request: Request) -> torch.Tensor | None:
        """Which tokens may come next, None for all. A mask that fails ends its own request, no other."""
        if request.token_mask is None:
            return None
        try:
            allowed = request.token_mask(list(request.output))
            return None if allowed is None else _checked_mask(allowed, self.model.config.vocab_size)
        except Exception as error:  # the caller's code: anything may come out of it
            request.error = f"{request.id}: its token mask failed: {error!r}"
            return None

    # ------------------------------------------------------------ ending a request

    def _finish_reason(self, request: Request) -> str:
        params, output = request.params, request.output
        if request.error:
            return "error"
        if output and not params.ignore_eos and output[-1] in self.model.config.eos_ids:
            return "stop"
        if params.stop and self._stop_position(request) is not None:
            return "stop"
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

    def _finish(self, request: Request, reason: str) -> GenerationOutput:
        """Commits (or, on an abort, drops) what a request holds and takes it off the books."""
        freed = 0
        if request.row >= 0:
            if reason in ("abort", "error"):
                freed = self.ownership.release(request, "released")
            else:
                self.ownership.commit(request, finished=True)
        self.scheduler.finish(request)
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
        now = time.perf_counter()
        output = GenerationOutput(
            request_id=request.group,
            index=request.index,
            text=self._final_text(request),
            token_ids=list(request.output),
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            finish_reason=reason,
            ttft=(request.first_token_at or now) - request.added_at,
            seconds=now - request.added_at,
            logprobs=request.output_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            error=request.error,
        )
        if request.group in self._streams:
            self._streams[request.group][request.index] = output
        return output

    def _final_text(self, request: Request) -> str:
        stop = self._stop_position(request) if request.params.stop and request.output else None
        return self.reply_text(request.output)[:stop]

    def _give_up(self, request: Request | None) -> list[GenerationOutput]:
        """Nothing can run and nothing will change by itself: pins hold what this request needs."""
        if request is None:
            return []
        request.error = (
            f"{request.id} needs {request.length} slots, but of {self.allocator.num_tokens} only "
            f"{self.ownership.room} are free or evictable: the rest is pinned"
        )
        return [self._finish(request, "error")]

    def _poison(self, slots: Slots) -> None:
        page = self.config.page_size
        pages = np.unique(slots // page)
        whole = (pages[:, None] * page + np.arange(page)).reshape(-1)
        self.pool.poison(torch.from_numpy(whole).to(self.device))

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
        checks.mask(token_mask)
        request = self._new_request(prompt, params, extra_key, priority)
        request.token_mask = token_mask
        return self._enqueue(request)

    def check_prompt(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises the ValueError that `add_request` would raise; changes nothing."""
        self._checked_prompt(self.encode(prompt), checks.sampling(params))

    def _new_request(
        self, prompt: Prompt, params: SamplingParams | None, extra_key: Hashable, priority: int
    ) -> Request:
        params, priority = checks.sampling(params), checks.whole("priority", priority)
        tokens = self._checked_prompt(self.encode(prompt), params)
        self._key((), extra_key)  # refuses what cannot be hashed
        seed = params.seed if params.seed is not None else self.config.seed * 1_000_003
        bigram = self.config.bigram_keys
        return Request("", tokens, params, seed, 0, extra_key, priority, is_bigram=bigram)

    def _key(self, tokens: IntSequence, extra_key: Hashable) -> RadixKey:
        return RadixKey(tokens, checks.extra_key(extra_key), self.config.bigram_keys)

    def _enqueue(self, request: Request) -> str:
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
        return request.id

    def _namespace_number(self, namespace: Hashable) -> int:
        return self._namespaces.setdefault(namespace, len(self._namespaces) - 1)

    def _checked_prompt(self, tokens: Slots, params: SamplingParams) -> Slots:
        config, vocab = self.config, self.model.config.vocab_size
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
            params = [checks.sampling(params)] * len(many)
        if not isinstance(params, Sequence) or isinstance(params, str):
            checks.sampling(params)  # says what it should have been
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} sampling parameters")
        requests = [
            self._new_request(prompt, param, extra_key, 0) for prompt, param in zip(many, params, strict=True)
        ]
        order = {self._enqueue(request): at for at, request in enumerate(requests)}
        outputs: list[GenerationOutput] = []
        try:
            while any(request.group in order for request in self.scheduler.everyone()):
                outputs += self._go_on()
        finally:
            # Also when interrupted: nothing of ours is left running, nothing of others' is lost.
            try:
                self._leave(order)
            finally:
                outputs += self._held
                self._held = [output for output in outputs if output.request_id not in order]
        mine = [output for output in outputs if output.request_id in order]
        return sorted(mine, key=lambda output: (order[output.request_id], output.index))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, extra_key: Hashable = None
    ) -> Iterator[StreamToken]:
        """Yields each token of one prompt as soon as it is sampled. Leaving the loop aborts it."""
        request = self._new_request(prompt, params, extra_key, 0)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[StreamToken]:
        fresh: deque[tuple[str, int]] = deque()

        def listen(name: str, token: int) -> None:
            if name.split(".")[0] == rid:
                fresh.append((name, token))

        # No subscription: while somebody listens on the bus, nothing runs ahead.
        self._watchers.append(listen)
        rid = self._enqueue(request)
        # Somebody else may drive the engine between two of our tokens and get our outputs in his
        # reports; so they are noted here as well.
        finished = self._streams[rid] = {}
        texts = [StreamText(self.reply_text, request.params.stop) for _ in range(request.params.n)]
        try:
            while fresh or any(each.group == rid for each in self.scheduler.everyone()):
                if not fresh:
                    outputs = self._go_on()
                    self._held += [output for output in outputs if output.request_id != rid]
                    continue
                name, token = fresh.popleft()
                index = int(name.partition(".")[2] or 0)
                text, done = texts[index].add(token, finished.get(index))
                yield StreamToken(rid, index, token, text, done.finish_reason if done else None)
        finally:
            try:
                self._leave([rid])
            finally:
                self._watchers.remove(listen)
                del self._streams[rid]
                self._held = [output for output in self._held if output.request_id != rid]

    def _leave(self, request_ids: Iterable[str]) -> None:
        """None of these is left running, even if reading what is in flight fails or is interrupted.

        A stream may be left in the middle of a step, namely when Python collects it: then at the next one.
        """
        if self._stepping or self.ahead.busy:
            self._left += request_ids
            return
        try:
            self.ahead.settle()
        finally:
            for rid in request_ids:
                self.abort(rid)

    def _end_those_left(self) -> None:
        while self._left:
            rid = self._left.pop()
            self.abort(rid)
            self._held = [output for output in self._held if output.request_id != rid]

    def _go_on(self) -> list[GenerationOutput]:
        """One step, for `generate` and `stream`: launched ahead of the last one's end where possible."""
        self._end_those_left()
        if self.config.overlap and self.ahead.possible():
            finished = self.ahead.advance()
            if finished is not None:
                return finished
        return self.step().finished

    def abort(self, request_id: str) -> bool:
        """Cancels a request with all its samples; False if it is not here (any more).

        Its outputs, finish_reason "abort", are in the next step's report.
        """
        checks.request_id(request_id)
        self.ahead.settle()
        mine = [r for r in self.scheduler.everyone() if r.group == request_id]
        self._held += [self._finish(request, "abort") for request in mine]
        return bool(mine)

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
        match = self.cache.match_prefix(key, **uncounted)
        self.cache.inc_lock_ref(match.last_node)
        pin = Pin(self._next_pin, int(match.length), self)
        self._pins[pin.id] = match.last_node
        self._next_pin += 1
        return pin

    def unpin(self, pin: Pin) -> None:
        """Lets a pinned prefix go; ValueError if that was done before."""
        if not isinstance(pin, Pin) or pin.engine is not self:
            raise ValueError(f"a pin that this engine's pin() returned is needed, got {checks.said(pin)}")
        if pin.id not in self._pins:
            raise ValueError(f"pin {pin.id} is not held")
        self.cache.dec_lock_ref(self._pins.pop(pin.id))

    def flush_cache(self) -> None:
        """Empties the tree; ValueError while requests live or pins hold."""
        if self.scheduler.has_work or self._pins:
            live = [request.id for request in self.scheduler.everyone()]
            raise ValueError(f"cannot flush: live requests {live}, pins {sorted(self._pins)}")
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
        self.cache.eviction_policy = name

    def update_weights(self, model: LlamaModel) -> None:
        """Goes on with other weights of the same shape: nothing that the old ones computed is used again.

        Running requests are retracted and compute their prompt and reply so far anew; what is in the tree
        matches nothing any more, in any tier, and is evicted in time.

        Raises ValueError, and changes nothing, for a model of another shape, type or place.
        """
        if not isinstance(model, LlamaModel):
            raise ValueError(f"the new weights must be a LlamaModel, got {checks.said(model)}")
        new, old = (
            (model.config, model.dtype, model.device),
            (self.model.config, self.model.dtype, self.device),
        )
        if self._stepping:
            raise ValueError("a step is running: an event handler must not change the weights")
        if new != old:
            raise ValueError(f"the new weights are of another model: {new}, this engine serves {old}")
        self.ahead.settle()
        bump = getattr(self.cache, "bump_version", None)
        if bump is None and self._pins:
            raise ValueError(f"pins {sorted(self._pins)} hold KV of the old weights: unpin them first")
        if bump is not None:
            bump()  # first, so that nothing of the old ones is copied to the host any more
        self.scheduler.put_back(self.scheduler.live)
        if bump is None:
            self.ownership.flush()
        self.model = model
        self.graphs = self._new_graphs()

    def _new_graphs(self) -> DecodeGraphs | None:
        """Captured decode steps, where they are possible and not switched off."""
        possible = DecodeGraphs.possible(self.model, self.attention)
        if self.config.cuda_graphs and not possible:
            raise ValueError("cuda_graphs=True: FlashInfer and fused kernels (Triton) are needed, on a GPU")
        if not possible or self.config.cuda_graphs is False:
            return None
        attention = cast(FlashInferAttention, self.attention)
        config = self.config
        return DecodeGraphs(self.model, self.pool, attention, self.rows, config.page_size, config.cascade)

    # ------------------------------------------------------------ looking at it

    @property
    def books(self) -> Books:
        """Running totals: prompt tokens and hits, first attempts and later ones apart; retractions."""
        return self.scheduler.books

    @property
    def has_work(self) -> bool:
        """Requests are waiting or running, or an output has not been in a step's report yet."""
        return self.scheduler.has_work or bool(self._held)

    def check(self) -> None:
        """All invariants, recomputed; InvariantError names the node or request and both numbers."""
        check_tree = getattr(self.cache, "check", None)
        if check_tree is not None:
            check_tree()
        self.ownership.check(self.scheduler.everyone(), self._pins)

    def snapshot(self) -> dict[str, Any]:
        """Tree, pool, queue and rows as plain data; what a recording's keyframes hold."""
        from minirad.record import tree_snapshot

        self.ahead.settle()
        requests = sorted(self.scheduler.everyone(), key=lambda r: (r.arrival, r.index))
        return {
            "step": self._steps,
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
        checks.prompt(prompt)
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


def _wants_prompt_logprobs(request: Request) -> bool:
    return request.next_logprob < len(request.prompt)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a text is one, and so is a row of ids."""
    checks.prompts(prompts)
    if isinstance(prompts, str) or (
        len(prompts) and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    ):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _checked_mask(allowed: Any, vocab: int) -> torch.Tensor:
    mask = torch.as_tensor(allowed)
    if mask.dtype != torch.bool or mask.shape != (vocab,):
        raise ValueError(f"a mask is bool [{vocab}], got {mask.dtype} {list(mask.shape)}")
    if not bool(mask.any()):
        raise ValueError("the mask allows no token")
    return mask


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
