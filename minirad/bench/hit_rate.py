"""Speed over the hit rate, and what the cache costs where nothing can hit.

`sweep` is the SGLang paper's Figure 8 (a, b): a part of each match is disabled while it runs
(evidence/partial.py), in a pool in which hits leave room for larger batches. `overhead` is the other
end: prompts that share nothing, and how much of the time the tree's calls take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minirad.bench.tables import cpu_clock, spread
from minirad.cache.prefix_cache import PrefixCache
from minirad.config import EngineConfig, SamplingParams, share
from minirad.engine import Engine
from minirad.evidence.partial import PartialCache
from minirad.frontend import Job, run_many
from minirad.model.classroom import corpus
from minirad.outputs import GenerationOutput, StepReport
from minirad.programs import tree_of_thought

KEPT = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
TREES = 8  # trees of thought that grow at the same time
POOL = 1_100  # slots: what runs at once without sharing is a third less than with it
# What the engine asks of its tree in a step. What these call in turn is theirs.
TREE_CALLS = (
    "find", "match_prefix", "insert", "inc_lock_ref", "dec_lock_ref", "evict", "locked", "peek", "seal",
    "before_step", "before_launch", "init_load_back", "wait_for_copies",
)  # fmt: skip


class WatchedEngine(Engine):
    """Keeps the reports of its steps."""

    reports: list[StepReport]

    def step(self) -> StepReport:
        report = super().step()
        self.reports.append(report)
        return report


def engine_of(
    model: Any, cache: PrefixCache | None = None, tokenizer: Any = None, **config: Any
) -> WatchedEngine:
    """An engine on the CPU. model: a name or directory (None: the classroom Llama), or a ready LlamaModel."""
    named = model is None or isinstance(model, str | Path)
    config = {"device": "cpu", **config, **({"model": model} if named else {})}
    ready = None if named else model
    engine = WatchedEngine(EngineConfig(**config), cache, model=ready, tokenizer=tokenizer)
    engine.reports = []
    return engine


# ---------------------------------------------------------------------- hit rate against speed


def sweep(
    model: Any = None, tokenizer: Any = None, *, jobs: Sequence[Job] | None = None,
    kept: Sequence[float] = KEPT, kv_tokens: int = POOL, max_running: int = 48, reps: int = 3,
    done: Callable[[], Any] = lambda: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs some programs with a part of each match disabled: a row for each share in `kept`, in this order.

    jobs: None is eight trees of thought (the paper's workload for it). model, tokenizer: see `engine_of`.
    kv_tokens: slots of the pool. done: called after each run; there are reps x len(kept), and one to warm up.

    Returns rows {"kept", "hit_rate", "tokens_per_s", "ttft_ms", "batch"}: the share of each match that was
    given; the share of prompt tokens that came from the tree (of the first run); and, as median, low and high
    of the runs: new tokens a second, milliseconds to the first token (mean of the requests), requests in
    a step (mean of the steps). The runs take turns, so that all see the same machine.

    Raises ValueError if a program ended in an error: the pool is too small for it.
    """
    jobs = trees_of_thought() if jobs is None else jobs
    if not jobs or not kept or reps < 1:
        raise ValueError(f"nothing to run: {len(jobs)} jobs, {len(kept)} shares, {reps} runs of each")
    for part in kept:
        share("kept", part)
    engine = engine_of(model, PartialCache(1.0), tokenizer, kv_tokens=kv_tokens, max_running=max_running)
    _played(engine, jobs, 1.0)  # the first run of all pays for what is loaded and compiled
    done()
    runs: dict[float, list[dict[str, float]]] = {part: [] for part in kept}
    for _ in range(reps):
        for part, rows in runs.items():
            rows.append(_played(engine, jobs, part))
            done()
    return [_row(part, rows) for part, rows in runs.items()]


def trees_of_thought(trees: int = TREES) -> list[Job]:
    """So many problems, each thought about in ways that branch."""
    return [Job(tree_of_thought, (corpus.PROBLEMS[at % len(corpus.PROBLEMS)],)) for at in range(trees)]


def _played(engine: WatchedEngine, jobs: Sequence[Job], kept: float) -> dict[str, float]:
    """One run from an empty tree."""
    cache = engine.cache
    assert isinstance(cache, PartialCache)
    engine.flush_cache()
    cache.kept, engine.reports = kept, []
    started = time.perf_counter()
    outcomes = run_many(engine, jobs, hints=False)  # they would count twice, and cost where nothing is kept
    seconds = time.perf_counter() - started
    for outcome in outcomes:
        if outcome.error is not None:
            raise ValueError(
                f"{outcome.name} ended in an error with {engine.config.kv_tokens} slots and {kept:g} of each "
                f"match kept: {outcome.error}"
            )
    worked = [report for report in engine.reports if report.batch]
    said: list[GenerationOutput] = [out for report in engine.reports for out in report.finished]
    said = [out for out in said if out.token_ids]  # a choice of a `select` says nothing
    return {
        "hit_rate": _share(sum(r.hit_tokens for r in worked), sum(r.prompt_tokens for r in worked)),
        "tokens_per_s": sum(len(out.token_ids) for out in said) / seconds,
        "ttft_ms": statistics.mean(out.ttft for out in said) * 1e3,
        "batch": statistics.mean(len(report.batch) for report in worked),
    }


def _row(kept: float, runs: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"kept": kept, "hit_rate": runs[0]["hit_rate"]}
    return row | {name: spread([run[name] for run in runs]) for name in ("tokens_per_s", "ttft_ms", "batch")}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---------------------------------------------------------------------- the cost where nothing can hit


class TreeWatch:
    """Takes the time of an engine's tree calls: seconds and counts by name.

    commit_seconds: of `CacheManager.commit`, with the tree calls in it: what a tree needs beside its own
    calls (rows are pointed at its slots, pages change owner) is there.

    Only the outermost call is timed, in this thread's processor time: on a busy machine the rest of a step
    would seem longer, these short calls would not. Reading the clock is part of it, half a microsecond or so.
    """

    def __init__(self, engine: Engine) -> None:
        self.clear()
        self.clock = cpu_clock()[1]
        self._within = self._commits = False
        manager: Any = engine.cache_manager
        for name in TREE_CALLS:
            setattr(manager.tree, name, self._timed(name, getattr(manager.tree, name)))
        manager.commit = self._timed_commit(manager.commit)

    def clear(self) -> None:
        self.seconds = dict.fromkeys(TREE_CALLS, 0.0)
        self.counts = dict.fromkeys(TREE_CALLS, 0)
        self.commit_seconds = self._in_commit = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def with_commit(self) -> float:
        """Seconds in tree calls, and in all else that `commit` does."""
        return self.total - self._in_commit + self.commit_seconds

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = self.clock

        def timed(*args: Any, **more: Any) -> Any:
            if self._within:
                return call(*args, **more)
            self._within, started = True, clock()
            try:
                return call(*args, **more)
            finally:
                took = (clock() - started) * 1e-9
                self.seconds[name] += took
                self.counts[name] += 1
                self._in_commit += took * self._commits
                self._within = False

        return timed

    def _timed_commit(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            self._commits, started = True, self.clock()
            try:
                return call(*args, **more)
            finally:
                self.commit_seconds += (self.clock() - started) * 1e-9
                self._commits = False

        return timed


def overhead(
    model: Any = None, *, prompts: Sequence[Sequence[int]] | None = None, requests: int = 32,
    prompt_tokens: int = 128, new_tokens: int = 32, reps: int = 3, **config: Any,
) -> dict[str, Any]:  # fmt: skip
    """What the cache costs where nothing can hit: processor seconds in the tree's calls, and in all.

    prompts: token ids; None makes `requests` random ones that share nothing. model, config: of the engine;
    unless `kv_tokens` is said the pool holds half of it all, so that evictions are part of what is timed.

    Returns {"tree_seconds", "seconds", "share", "with_commit", "hit_rate", "calls"} of the run with the
    median share. with_commit: the share with all of `CacheManager.commit`, not only the tree's part of it.
    calls: {name: {"count", "seconds"}} of the tree's calls.

    Raises ValueError for prompts or sizes that make no run.
    """
    if reps < 1:
        raise ValueError(f"reps must be at least 1, got {reps}")
    if prompts is None:
        prompts = unlike_prompts(requests, prompt_tokens)
    longest = max(map(len, prompts), default=0) + new_tokens
    page = int(config.get("page_size", 1))
    half = max(len(prompts) * longest // 2, longest + page, 5)
    sizes = {"kv_tokens": -(-half // page) * page, "max_running": 16, "max_context": max(longest, 5)}
    engine = engine_of(model, **(sizes | config))
    watch = TreeWatch(engine)
    engine.generate([prompts[0][:3]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    runs = [_watched(engine, watch, prompts, new_tokens) for _ in range(reps)]
    runs.sort(key=lambda run: run["share"])
    return runs[len(runs) // 2]


def unlike_prompts(requests: int, tokens: int, vocab: int = 1_000, seed: int = 0) -> list[list[int]]:
    """Random token ids; no two prompts begin with the same one, as long as there are enough ids.

    ValueError if there are not.
    """
    if not 0 < requests <= vocab - 1:
        raise ValueError(f"{requests} prompts that begin differently need as many ids; there are {vocab - 1}")
    rng = np.random.default_rng(seed)
    first = 1 + rng.permutation(vocab - 1)[:requests]
    return [[int(one), *rng.integers(1, vocab, tokens - 1).tolist()] for one in first]


def _watched(
    engine: WatchedEngine, watch: TreeWatch, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """One run from an empty tree."""
    engine.flush_cache()
    watch.clear()
    engine.reports = []
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    started = watch.clock()
    for prompt in prompts:
        engine.add_request(list(prompt), params)
    while engine.has_work:
        engine.step()
    seconds = (watch.clock() - started) * 1e-9
    reports = engine.reports
    calls = {
        name: {"count": count, "seconds": watch.seconds[name]}
        for name, count in watch.counts.items()
        if count
    }
    return {
        "tree_seconds": watch.total,
        "seconds": seconds,
        "share": watch.total / seconds,
        "with_commit": watch.with_commit / seconds,
        "hit_rate": _share(sum(r.hit_tokens for r in reports), sum(r.prompt_tokens for r in reports)),
        "calls": calls,
    }
