"""What Prometheus reads at /metrics: the engine's own counters as they stand, and times as clients see them.

A registry of its own, so that two servers in one process do not mix. The engine's counters are read when
somebody asks (whole numbers, which another thread may read); only times and ends are told while it runs.

No `model_name` label as theirs: a server has one model, and Prometheus' own `instance` says which server.

For who has a dashboard of vLLM (`vllm:`) or SGLang (`sglang:`), what comes nearest there:

    minirad_                     vllm:                                   sglang:
    time_to_first_token_seconds  time_to_first_token_seconds             time_to_first_token_seconds
    inter_token_seconds          inter_token_latency_seconds             inter_token_latency_seconds
    reply_seconds                e2e_request_latency_seconds             e2e_request_latency_seconds
    prompt_tokens_total          prompt_tokens_total                     prompt_tokens_total
    generated_tokens_total       generation_tokens_total                 generation_tokens_total
    cached_tokens_total          prefix_cache_hits_total                 cached_tokens_total
    requests_running             num_requests_running                    num_running_reqs
    requests_waiting             num_requests_waiting                    num_queue_reqs
    kv_usage                     kv_cache_usage_perc                     token_usage
    drafted_tokens_total         spec_decode_num_draft_tokens_total
    accepted_tokens_total        spec_decode_num_accepted_tokens_total
    acceptance_length                                                    spec_accept_length
    cache_hit_rate               prefix_cache_hits / _queries            cache_hit_rate
    replies_total                request_success_total
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minirad.observe import events as ev
from minirad.observe.disk_events import BlocksRead
from minirad.outputs import GenerationOutput
from minirad.server.service import NoMetrics, Ticket

if TYPE_CHECKING:
    from minirad.engine import Engine

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/server_info",
    "/flush_cache",
)  # fmt: skip


class Metrics(NoMetrics):
    """Of one server. open: how many replies are open, waiting or running (`Service.open`)."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._loading = self._loaded = self._host_evicted = self._reading = self._read = 0
        self._ends: list[Callable[[], None]] = []
        made: dict[str, Any] = {"registry": self._registry}
        self._first = Histogram(
            "minirad_time_to_first_token_seconds", "From a request's arrival to each reply's first token",
            buckets=FIRST, **made,
        )  # fmt: skip
        self._between = Histogram(
            "minirad_inter_token_seconds", "Between two tokens of a reply", buckets=BETWEEN, **made
        )
        self._whole = Histogram(
            "minirad_reply_seconds", "From a request's arrival to a reply's end", buckets=WHOLE, **made
        )
        self._tokens = Counter("minirad_generated_tokens", "Tokens of replies", **made)
        self._replies = Counter("minirad_replies", "Replies, by how they ended", ["finish_reason"], **made)
        self._http = Counter("minirad_http_requests", "By path and status", ["path", "status"], **made)
        self._registry.register(self)  # has `collect`, which is all that is asked for

    def text(self) -> bytes:
        """What a scrape gets."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------ told

    def attach(self, engine: Engine) -> None:
        """From now on this engine's counters are read."""
        for end in self._ends:
            end()
        self._engine, self._ends = engine, []
        self._loading = self._loaded = self._host_evicted = self._reading = self._read = 0
        if engine.config.host_kv_tokens:
            told: dict[type[ev.Event], Callable[[Any], None]] = {
                ev.LoadStarted: self._load,
                ev.RequestAdmitted: self._admit,
                ev.HostEvicted: self._evict,
                BlocksRead: self._from_disk,
            }
            for kind, handler in told.items():
                self._ends.append(engine.bus.subscribe(kind, handler, whole_steps=False))

    def _load(self, event: ev.LoadStarted) -> None:
        self._loading += len(event.slots)

    def _from_disk(self, event: BlocksRead) -> None:
        self._reading += len(event.host_slots)

    def _admit(self, event: ev.RequestAdmitted) -> None:
        """Whom the load before was for; of what was loaded one token may have to be computed."""
        if event.attempt == 1:
            loaded = min(self._loading, event.cached)
            read = min(self._reading, loaded)  # a disk's part ends what is loaded
            self._loaded += loaded - read
            self._read += read
        self._loading = self._reading = 0

    def _evict(self, event: ev.HostEvicted) -> None:
        self._host_evicted += len(event.host_slots)

    def token(self, ticket: Ticket, index: int, now: float) -> None:
        before = ticket.told.get(index)
        ticket.told[index] = now
        self._tokens.inc()
        if before is None:
            self._first.observe(now - ticket.submitted)
        else:
            self._between.observe(now - before)

    def ended(self, ticket: Ticket, output: GenerationOutput) -> None:
        self._replies.labels(output.finish_reason).inc()
        self._whole.observe(time.perf_counter() - ticket.submitted)

    def answered(self, path: str, status: int) -> None:
        """A request over HTTP was answered; 499: its client went away before."""
        known = "/v1/models" if path.startswith("/v1/models/") else path
        self._http.labels(known if known in PATHS else "other", str(status)).inc()

    # ------------------------------------------------------------ read when asked

    def collect(self) -> Iterator[Metric]:
        """The engine's own numbers; called by the registry."""
        engine = self._engine
        if engine is None:
            return
        stats, tree, pool = engine.stats, engine.cache, engine.allocator
        yield _counter("prompt_tokens", "Prompt tokens at first admission", stats.first.tokens)
        cached = CounterMetricFamily(
            "minirad_cached_tokens",
            "Prompt tokens that were not computed, by where their KV lay",
            labels=["tier"],
        )
        cached.add_metric(["device"], max(stats.first.cached - self._loaded - self._read, 0))
        if engine.config.host_kv_tokens:
            cached.add_metric(["host"], self._loaded)
        if engine.config.disk_dir is not None:
            cached.add_metric(["disk"], self._read)
            yield from _disk(cast(Any, tree).disk)
        yield cached
        if stats.hit_rate is not None:
            yield _gauge("cache_hit_rate", "Cached prompt tokens / prompt tokens", stats.hit_rate)
        evicted = CounterMetricFamily("minirad_evicted_tokens", "Tokens evicted, by tier", labels=["tier"])
        evicted.add_metric(["device"], engine.cache_manager.evicted_tokens)
        if engine.config.host_kv_tokens:
            evicted.add_metric(["host"], self._host_evicted)
        yield evicted
        yield _counter("retractions", "Running requests put back for lack of room", stats.retractions)
        yield _counter("preemptions", "Running requests put back for larger priority", stats.preemptions)
        yield _counter("deferrals", "Waits for a prefix that another request computes", stats.deferrals)
        yield _counter("steps", "Steps of the engine", engine.steps)
        yield from _drafts(getattr(engine, "drafts", None))
        yield _gauge("requests_waiting", "Requests in the queue", len(engine.scheduler.waiting))
        yield _gauge("requests_running", "Requests that have a row", len(engine.scheduler.live))
        yield from _pool(pool.num_tokens, pool.available, tree.evictable_size)


def _drafts(drafts: Any) -> Iterator[Metric]:
    """Of an engine with drafts (speculative/stats.py)."""
    if drafts is not None:
        yield _counter("drafted_tokens", "Tokens drafted", drafts.drafted)
        yield _counter("accepted_tokens", "Drafted tokens that the model chose itself", drafts.accepted)
        yield _counter("forced_tokens", "Tokens that a grammar forced, and nobody drew", drafts.forced)
        yield _counter("decode_passes", "Forward passes over a decoding request", drafts.passes)
        yield _gauge("acceptance_length", "Tokens that a pass with drafts yields", drafts.acceptance_length)
        yield _gauge("tokens_per_pass", "Tokens that a pass over a request yields", drafts.tokens_a_pass)


def _pool(size: int, free: int, evictable: int) -> Iterator[Metric]:
    kinds = {"free": free, "evictable": evictable, "in_use": size - free - evictable}
    tokens = GaugeMetricFamily("minirad_kv_tokens", "Slots of the KV pool, by state", labels=["state"])
    for state, count in kinds.items():
        tokens.add_metric([state], max(count, 0))
    yield tokens
    yield _gauge("kv_usage", "Slots that running requests need / all slots", max(kinds["in_use"], 0) / size)


def _disk(disk: Any) -> Iterator[Metric]:
    yield _counter("disk_written_tokens", "Tokens written to the disk tier", disk.stats.written)
    yield _counter("disk_dropped_blocks", "Blocks not written to it, or deleted there", disk.stats.dropped)
    yield _gauge("disk_bytes", "Bytes in the disk tier's folder, whoever wrote them", disk.files.nbytes)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"minirad_{name}", about, value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"minirad_{name}", about, value)
