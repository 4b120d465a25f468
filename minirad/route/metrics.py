"""The router's numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minirad.observe.route_events import (
    WORKER_STATES,
    RequestRouted,
    RouteFinished,
    WorkerChanged,
    worker_name,
)

if TYPE_CHECKING:
    from minirad.route.workers import Worker

REGRETS = (0, 8, 32, 128, 512, 2048, 8192)  # tokens


class Metrics:
    """Counts what the router tells."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, said: str, *labels: str) -> Counter:
            return Counter(f"minirad_route_{name}", said, labels, registry=registry)

        self.answers = counter("answers", "Completions by HTTP status; 499: the client left.", "status")
        self.requests = counter("requests", "Requests that were sent to a worker.", "worker")
        self.outcomes = counter("outcomes", "What became of requests at a worker.", "worker", "outcome")
        self.retries = counter("retries", "Requests that went on to another worker, by the first.", "worker")
        self.prompt = counter("prompt_tokens", "Prompt tokens of answered requests.", "worker")
        self.cached = counter("cached_tokens", "Of them those that the worker had, as it says.", "worker")
        self.changes = counter("worker_changes", "New states of a worker.", "worker", "state")
        self.regret = Histogram(
            "minirad_route_regret_tokens",
            "Prompt tokens that the best worker held and the chosen one not, when it was chosen.",
            buckets=REGRETS, registry=registry,
        )  # fmt: skip
        self._state = Gauge(
            "minirad_route_worker_state", "1 for the state that a worker is in.", ("worker", "state"),
            registry=registry,
        )  # fmt: skip
        self._load = Gauge("minirad_route_load", "Requests in flight.", ("worker",), registry=registry)
        self._queued = Gauge(
            "minirad_route_queued_tokens", "Prompt tokens of requests without any output yet.", ("worker",),
            registry=registry,
        )  # fmt: skip

    def answered(self, path: str, status: int) -> None:
        """The front has answered."""
        if path.endswith("/completions"):
            self.answers.labels(str(status)).inc()

    def take(self, event: RequestRouted | RouteFinished | WorkerChanged) -> None:
        """Counts one event."""
        name = worker_name(event.worker)
        if isinstance(event, RequestRouted):
            self.requests.labels(name).inc()
            if event.regret is not None:
                self.regret.observe(event.regret)
        elif isinstance(event, WorkerChanged):
            self.changes.labels(name, event.state).inc()
        else:
            self.outcomes.labels(name, event.outcome).inc()
            if event.outcome == "moved":
                self.retries.labels(name).inc()
            elif event.outcome == "finished":
                self.prompt.labels(name).inc(event.tokens)
                self.cached.labels(name).inc(event.cached)

    def text(self, workers: Iterable[Worker]) -> bytes:
        """All of it, as Prometheus reads it."""
        for worker in workers:
            for state in WORKER_STATES:
                self._state.labels(worker.name, state).set(state == worker.state)
            self._load.labels(worker.name).set(worker.load)
            self._queued.labels(worker.name).set(worker.queued_tokens)
        return generate_latest(self.registry)
