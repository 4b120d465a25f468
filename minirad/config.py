"""Every size of an engine in one frozen place, checked before anything is built.

Does not look at the model or the machine: what depends on them (`None` and "auto") is filled in by
the engine, which then shows the result as `engine.config`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minirad import errors
from minirad.errors import path, plain, said, truth, whole
from minirad.rooms import room
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.text import valid_text

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SPECULATIVE = ("ngram", "eagle")
QUANTIZATION = ("gguf",)
HOST_WRITE = ("write_through", "write_through_selective", "write_back")
ATTENTION = ("auto", "torch", "flashinfer", "gather")
DEFAULT_KV_TOKENS = 4096  # on a CPU
MOST_KV_TOKENS = 1 << 22  # that a GPU's free memory is turned into unasked


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """ValueError naming the value and the known ones, unless it is one of them."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {name} {said(value)}; known: {', '.join(known)}")


def at_least(name: str, value: int, least: int) -> None:
    """ValueError naming the value and its limit; also for what is no whole number."""
    whole(name, value, least)


def share(name: str, value: float) -> None:
    """ValueError naming the value, unless it is a number from 0 to 1."""
    number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {said(value)}")


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A sequence of ids as plain integers; ValueError naming what is none."""
    try:
        ids = tuple(-1 if isinstance(each, bool) else operator.index(each) for each in value)
    except TypeError:
        ids = (-1,)
    if min(ids, default=0) < 0 or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise ValueError(f"{name} must be a sequence of token ids, 0 or more, got {said(value)}")
    return ids


def number(name: str, value: float) -> float:
    """A number as a float; ValueError naming the value for anything else, and for one that none can be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {said(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit into a float, got {said(value)}") from None


def _simple(config: Any) -> None:
    """Numpy's scalars become numbers, and what is declared as a bool is one."""
    for each in fields(config):
        value = plain(getattr(config, each.name))
        object.__setattr__(config, each.name, value)
        if each.type in ("bool", "bool | None"):
            truth(each.name, value, or_none=each.type != "bool")


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What the scheduler can be told beside its policy. EngineConfig has the same names.

    mixed: running requests decode in the steps that compute prompts, too; else they wait meanwhile.
    preemption: a waiting request of strictly larger priority may push running ones out.
    in_batch_prefix: of several waiting requests with one beginning only the first is computed now, the
        others wait a step and then find it in the tree. Only for policies that look at the tree.
    in_batch_cached, in_batch_shared: it applies to requests with at most so many tokens in the tree, and
        at least so many in common with what is being computed (32 and 32, as in SGLang).
    fair_passes: policy "fair": in how many steps others may be admitted past a waiting request.
    new_token_ratio: what share of the tokens that running requests may still generate is kept free when
        others are admitted (one page each at least); to begin with, and again after an idle moment.
    new_token_ratio_min, new_token_decay: a retraction raises the ratio to what it should have been;
        it then falls by `new_token_decay` a step, down to `new_token_ratio_min`.
    seed: of the policy "random".
    """

    mixed: bool = False
    preemption: bool = True
    in_batch_prefix: bool = True
    in_batch_cached: int = 32
    in_batch_shared: int = 32
    fair_passes: int = 32
    new_token_ratio: float = 0.0
    new_token_ratio_min: float = 0.0
    new_token_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _simple(self)
        at_least("in_batch_cached", self.in_batch_cached, 0)
        at_least("in_batch_shared", self.in_batch_shared, 1)
        at_least("fair_passes", self.fair_passes, 0)
        at_least("seed", self.seed, 0)
        share("new_token_ratio", self.new_token_ratio)
        share("new_token_ratio_min", self.new_token_ratio_min)
        share("new_token_decay", self.new_token_decay)
        if self.new_token_ratio_min > self.new_token_ratio:
            raise ValueError(
                f"new_token_ratio_min {self.new_token_ratio_min} is above new_token_ratio "
                f"{self.new_token_ratio}"
            )

    @classmethod
    def of(cls, config: EngineConfig) -> ScheduleOptions:
        """The part of a configuration that the scheduler needs."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is made of. Token counts are KV slots; one token's keys and values fill one slot.

    model: None (the classroom Llama), a Hugging Face directory, a hub id, "smollm2-135m", or NAME.gguf.
    dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
    quantization: "gguf" takes the quantised numbers straight from the model's GGUF file (quant/); None, with
        a file NAME.gguf as the model, is the same. On the CPU.
    attention: "gather" is the one to read; "torch" and "flashinfer" are faster (minirad/fast/); "auto" takes
        the fastest that runs here.
    kv_tokens: size of the KV pool; None is 4096 on a CPU and taken from free memory on a GPU.
    page_size: tokens per page; sharing and eviction go by whole pages.
    max_running: requests (samples) that may hold a row at a time.
    max_context: longest prompt plus reply; None is the model's own limit.
    chunk_tokens: prompt tokens computed per step at most; longer prompts are prefilled in chunks.
    host_kv_tokens: size of a second tier in host memory that evicted KV can be loaded back from; 0: none.
    host_write: when copies are made: write_through (as soon as a node is complete), write_through_selective
        (at its second hit), write_back (when it is evicted).
    load_back_threshold: fewer tokens than this are computed again rather than loaded.
    disk_dir: a folder for a third tier below the host's, which outlives the process; None: none.
    disk_mb: how many megabytes of files it holds at most.
    bigram_keys: the tree's units are pairs of tokens, as draft models need it whose KV at a token depends
        on the next one (EAGLE): n tokens in common are n - 1 units in common. None: with "eagle".
    speculative: "ngram" (drafts looked up in the request's own tokens) or "eagle" (from a draft head); None.
    draft_tokens: how many tokens are drafted at most before the model looks at them.
    draft_ngram: "ngram" looks up the last so many tokens, or fewer.
    draft_model: "eagle": the head's directory; None is that of the classroom Llama.
    jump_forward: what a token mask forces (a grammar's braces and names) is computed in one pass, not one
        token after another.
    lora: adapters in PEFT's format by name: a dict of directories, or texts "name=DIR".
    radix_cache: False forgets every request's KV when it finishes (for comparison).
    cuda_graphs: decode steps are captured and replayed; None: where FlashInfer runs with fused kernels.
    cascade: captured steps read what all requests share once for all; None: where that was measured faster.
    overlap: `generate` prepares a captured step while the one before is computed.
    tp: processes (ranks) that share the model, each with a tree of its own; more than 1 under torchrun only.
    rank_digest: their trees, pools and queues are compared in every step.
    poison_freed: a debugging aid: freed slots are filled with NaN, so that any read of them shows.
    dummy_weights: random weights in the shape of a known model, instead of `model`, for measuring.
    mixed, preemption, in_batch_*, fair_passes, new_token_*: see ScheduleOptions.
    """

    model: str | Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    attention: str = "auto"
    kv_tokens: int | None = None
    page_size: int = 1
    max_running: int = 32
    max_context: int | None = None
    chunk_tokens: int = 512
    schedule_policy: str = "lpm"
    eviction_policy: str = "lru"
    radix_cache: bool = True
    host_kv_tokens: int = 0
    host_write: str = "write_through"
    load_back_threshold: int = 10
    disk_dir: str | Path | None = None
    disk_mb: int = 1024
    bigram_keys: bool | None = None
    speculative: str | None = None
    draft_tokens: int = 4
    draft_ngram: int = 3
    draft_model: str | Path | None = None
    jump_forward: bool = False
    lora: Any = ()
    seed: int = 0
    cuda_graphs: bool | None = None
    cascade: bool | None = None
    overlap: bool = True
    poison_freed: bool = False
    dummy_weights: str | None = None
    mixed: bool = False
    preemption: bool = True
    in_batch_prefix: bool = True
    in_batch_cached: int = 32
    in_batch_shared: int = 32
    fair_passes: int = 32
    new_token_ratio: float = 0.0
    new_token_ratio_min: float = 0.0
    new_token_decay: float = 0.01
    tp: int = 1
    rank_digest: bool = True

    def __post_init__(self) -> None:
        # Imported here: these packages are large, and the tables of names belong to them.
        from minirad.cache.eviction import POLICIES as EVICTION

        _simple(self)
        if not (isinstance(self.device, str) and re.fullmatch(r"cuda:\d{1,3}", self.device)):
            one_of("device", self.device, DEVICES)
        if not (self.model is None or (isinstance(self.model, str | Path) and str(self.model).strip())):
            raise ValueError(f"model must be a name, a directory or None, got {said(self.model)}")
        one_of("dtype", self.dtype, DTYPES)
        one_of("attention", self.attention, ATTENTION)
        one_of("eviction policy", self.eviction_policy, tuple(EVICTION))
        one_of("schedule policy", self.schedule_policy, tuple(SCHEDULE))
        one_of("host_write", self.host_write, HOST_WRITE)
        at_least("page_size", self.page_size, 1)
        at_least("max_running", self.max_running, 1)
        at_least("chunk_tokens", self.chunk_tokens, 1)
        at_least("host_kv_tokens", self.host_kv_tokens, 0)
        at_least("load_back_threshold", self.load_back_threshold, 1)
        at_least("seed", self.seed, 0)
        at_least("tp", self.tp, 1)
        self._check_more()
        ScheduleOptions.of(self)
        if self.max_context is not None:
            at_least("max_context", self.max_context, 2)
        if self.dummy_weights is not None:
            one_of("shape for dummy weights", self.dummy_weights, tuple(room("bench.dummy").SHAPES))
            if self.model is not None:
                raise ValueError(f"model {str(self.model)!r} and dummy weights: only one of the two")
        if self.host_kv_tokens % self.page_size:
            raise ValueError(
                f"page_size {self.page_size} does not divide host_kv_tokens {self.host_kv_tokens}"
            )
        if self.host_kv_tokens and not self.radix_cache:
            raise ValueError(f"host_kv_tokens={self.host_kv_tokens} without a radix cache: nothing to copy")
        if self.kv_tokens is not None:
            at_least("kv_tokens", self.kv_tokens, self.page_size)
            if self.kv_tokens % self.page_size:
                raise ValueError(f"page_size {self.page_size} does not divide kv_tokens {self.kv_tokens}")

    def _check_more(self) -> None:
        """Drafts, adapters, quantised weights and the disk."""
        if self.speculative is not None:
            one_of("speculative", self.speculative, SPECULATIVE)
        for name in ("speculative", "jump_forward"):
            if getattr(self, name) and room("speculative.engine") is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs minirad/speculative/, which is not here"
                )
        if self.bigram_keys is None:
            object.__setattr__(self, "bigram_keys", self.speculative == "eagle")
        if self.quantization is None and str(self.model).endswith(".gguf"):
            object.__setattr__(self, "quantization", "gguf")
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATION)
            if room("quant.choose") is None:
                raise ValueError("GGUF files need minirad/quant/, which is not here")
            if self.dummy_weights is not None:
                raise ValueError(
                    f"dummy weights {self.dummy_weights!r} are not quantised: only one of the two"
                )
        at_least("draft_tokens", self.draft_tokens, 1)
        at_least("draft_ngram", self.draft_ngram, 1)
        at_least("disk_mb", self.disk_mb, 1)
        object.__setattr__(self, "lora", adapters_by_name(self.lora))
        if self.draft_model is not None:
            path("draft_model", self.draft_model)
            if self.speculative != "eagle":
                raise ValueError(f"draft_model {str(self.draft_model)!r} is for speculative='eagle'")
        if self.disk_dir is not None:
            path("disk_dir", self.disk_dir)
            if not self.host_kv_tokens:
                raise ValueError(f"disk_dir {str(self.disk_dir)!r} needs host_kv_tokens: the tier above it")
        for name in ("speculative", "jump_forward", "lora", "disk_dir", "quantization"):
            if self.tp > 1 and getattr(self, name):
                raise ValueError(f"tp={self.tp}: {name} is for one process")

    @property
    def drafting(self) -> bool:
        """A pass may yield several tokens of a request."""
        return self.speculative is not None or self.jump_forward


def adapters_by_name(lora: Any) -> tuple[tuple[str, str], ...]:
    """Adapters as pairs of name and directory, of a dict, of pairs, or of texts "name=DIR" and "name"."""
    given = lora.items() if isinstance(lora, Mapping) else [lora] if isinstance(lora, str) else lora
    try:
        given = list(given)
    except TypeError:  # an array of no dimension has an iterator, too
        raise ValueError(f"lora must be adapters by name, got {said(lora)}") from None
    pairs: dict[str, str] = {}
    for each in given:
        pair = each.partition("=")[::2] if isinstance(each, str) else each
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"an adapter is 'name=DIR' or a pair of both, got {said(each)}")
        name = errors.adapter_name(pair[0])
        if name in pairs:
            raise ValueError(f"two adapters have the name {name!r}")
        where = name if pair[1] is None or (isinstance(pair[1], str) and not pair[1]) else pair[1]
        pairs[name] = str(path(f"the adapter {name}", where))
    return tuple(pairs.items())


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """The namespace of an adapter's requests: what another adapter computed is not theirs.

    A type of its own, and no tuple: that would be equal to a caller's extra_key that is a tuple of both.
    """

    adapter: str
    extra_key: Hashable


def namespace(config: EngineConfig, extra_key: Hashable, lora: str = "") -> Hashable:
    """The tree's key for requests with this extra_key under this adapter ("": none).

    ValueError for what cannot be hashed, and for an adapter that the config does not name.
    """
    known = dict(config.lora)
    if isinstance(extra_key, AdapterKey):
        raise ValueError(f"extra_key {extra_key!r}: an adapter is asked for with lora={extra_key.adapter!r}")
    if isinstance(lora, str) and not lora:
        return errors.extra_key(extra_key)
    if not isinstance(lora, str) or lora not in known:
        raise ValueError(f"unknown adapter {said(lora)}; known: {', '.join(known) or 'none'}")
    return AdapterKey(lora, errors.extra_key(extra_key))


def adapter_of(extra_key: Hashable) -> str:
    """The adapter under whose namespace a request runs; "" for none."""
    return extra_key.adapter if isinstance(extra_key, AdapterKey) else ""


def drawn_seed(engine_seed: int, number: int = 0) -> int:
    """The seed of an engine's request `number` (counted from 1) that came without one of its own."""
    return engine_seed * 1_000_003 + number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt.

    max_new_tokens: 0 computes the prompt only (a prefix hint).
    temperature: 0 takes the likeliest token; top_k 0 and top_p 1.0 leave the distribution whole.
    stop: texts that end the reply (they are cut off); also special tokens, by name. stop_token_ids: tokens
    that end it like an end token (the id is kept, its text left out); ignore_eos: go on past the end token,
    unless a regex has matched with it.
    n: samples, sharing one prefill. seed: None draws one from the engine's own.
    logprob_start: position of the first prompt token whose log-probability is wanted.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] | str = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprob_start: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _simple(self)
        at_least("max_new_tokens", self.max_new_tokens, 0)
        at_least("top_k", self.top_k, 0)
        at_least("n", self.n, 1)
        for name in ("temperature", "top_p"):  # torch takes no whole number of more than 64 bits
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            at_least("seed", self.seed, 0)
        if self.logprob_start is not None:
            at_least("logprob_start", self.logprob_start, 0)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list | tuple) or any(
            not isinstance(text, str) or not text for text in stops
        ):
            raise ValueError(f"stop must be non-empty texts, got {said(self.stop)}")
        object.__setattr__(self, "stop", tuple(valid_text(text, "a stop text") for text in stops))
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))


def sampling(params: Any, name: str = "params") -> SamplingParams:
    """SamplingParams as they are; None is the default ones."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        hint = " (SamplingParams(**it) makes them of a dict)" if isinstance(params, dict) else ""
        raise ValueError(f"{name} must be SamplingParams or None, got {said(params)}{hint}")
    return params


def require_fits(tokens: Any, params: SamplingParams, config: EngineConfig, vocab: int) -> None:
    """ValueError, naming the numbers, if a prompt of these ids and its reply cannot run.

    config: an engine's, filled in; vocab: the number of ids that its model has.
    """
    assert config.max_context is not None and config.kv_tokens is not None
    if len(tokens) == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    outside = tokens[(tokens < 0) | (tokens >= vocab)]
    if len(outside):
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab}")
    new = params.max_new_tokens
    for limit, of in ((config.max_context, "context"), (config.kv_tokens, "KV pool")):
        if len(tokens) + new > limit:
            raise ValueError(
                f"{len(tokens)} prompt + {new} new tokens = {len(tokens) + new} are more than the {of} "
                f"of {limit}"
            )
    if params.n > config.max_running:
        raise ValueError(f"n={params.n} samples need as many rows, there are {config.max_running}")
    start = params.logprob_start
    if start is not None and start >= len(tokens):
        raise ValueError(f"logprob_start {start} is past the prompt's {len(tokens)} tokens")
    unknown = [token for token in params.stop_token_ids if token >= vocab]
    if unknown:
        raise ValueError(f"stop_token_ids: token id {unknown[0]} is outside the vocabulary of {vocab}")
