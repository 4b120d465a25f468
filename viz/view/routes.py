"""Where a router sent requests, to be drawn: the last ones with what it saw of each worker, sums by policy.

A state has the last routes and the workers (minirad/observe/route_events.py); what is summed by policy is
followed here, event by event, and known again after each frame. Draws nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from minirad.observe.event import Event
from minirad.observe.route_events import (
    RequestRouted,
    RouteFinished,
    WorkerChanged,
    judged_in_the_end,
    worker_name,
)
from minirad.observe.snapshot import State

MOST = 1e12  # that a threshold may be, in a file from a stranger
ALIVE = ("ready", "slow", "back")  # states in which a worker gets requests
WITH_THRESHOLDS = ("cache-aware", "events")  # policies that weigh matches against loads


@dataclass(frozen=True, slots=True)
class Limits:
    """The thresholds of minirad/route/policies.py, as a recording's notes have them."""

    match_threshold: float
    balance_abs: float
    balance_rel: float

    @classmethod
    def of(cls, notes: object) -> Limits | None:
        """Those of a recording's notes; None where they say nothing that can be drawn."""
        found = notes.get("route") if isinstance(notes, dict) else None
        values: list[Any] = [
            found.get(each.name) if isinstance(found, dict) else None for each in fields(cls)
        ]
        fits = all(isinstance(value, int | float) and 0 <= value < MOST for value in values)
        return cls(*map(float, values)) if fits else None

    def match(self, tokens: int) -> float:
        """More tokens than this have to be expected at a worker for its match to count."""
        return self.match_threshold * tokens

    def load(self, loads: Sequence[int]) -> float:
        """With more requests in flight than this the workers are out of balance."""
        low = min(loads, default=0)
        return max(low + self.balance_abs, low * self.balance_rel)


def dead(workers: Iterable[State]) -> str:
    """Which workers get no requests, and why, in one sentence; "" where there are none."""
    told = []
    for row in workers:
        if row["state"] == "dead":
            why = f": {row['why']}" if row["why"] else ""
            told.append(f"{worker_name(row['worker'])} is dead{why}")
    return "; ".join(told)


class PolicySum(NamedTuple):
    """What came of a policy's choices. tries: how often it sent a request; one that moved is sent again.

    tokens, cached: of those that were answered. moved: tries that a worker did not take or end, after which
    the request went elsewhere (if there was another worker). failed: tries that were the last, without an
    answer. regret, judged: of the choices of which an oracle knew all trees, less what was found after all.
    computed: by worker, prompt tokens that it had to compute.
    """

    tries: int = 0
    tokens: int = 0
    cached: int = 0
    moved: int = 0
    failed: int = 0
    regret: int = 0
    judged: int = 0
    computed: tuple[int, ...] = ()

    def balance(self, workers: int) -> float | None:
        """The most that a worker had to compute over the mean of all workers; None where nothing was."""
        total = sum(self.computed)
        return max(self.computed) * max(workers, len(self.computed)) / total if total else None


Sums = Mapping[str, PolicySum]


class Followed:
    """What a recording's events say beyond its states: who sent a request, and who was alive at that time.

    limits: the thresholds; None: they are not known.
    """

    def __init__(self, start: State, limits: Limits | None = None) -> None:
        self.limits = limits
        self._alive = {row["worker"]: row["state"] in ALIVE for row in start["tree"].get("workers", ())}
        self._sent: dict[tuple[str, int], tuple[RequestRouted, float | None]] = {}  # and the limit of loads

    def take(self, events: Iterable[Event]) -> None:
        """Follows on; each event once, in their order."""
        for event in events:
            if isinstance(event, WorkerChanged):
                self._alive[event.worker] = event.state in ALIVE
            elif isinstance(event, RequestRouted):
                self._sent[event.request, event.worker] = event, self._load_limit(event)

    def _load_limit(self, event: RequestRouted) -> float | None:
        if self.limits is None or event.policy not in WITH_THRESHOLDS:
            return None
        return self.limits.load([load for at, load in enumerate(event.loads) if self._alive.get(at, False)])

    def load_limit(self, request: str, worker: int) -> float | None:
        """With more requests in flight than this the workers were out of balance when it was sent."""
        sent = self._sent.get((request, worker))
        return None if sent is None else sent[1]

    def sums(self, sums: Sums, events: Iterable[Event]) -> Sums:
        """The sums after these events, which were followed; `sums` are those before, and stay as they are.

        What was sent before the recording began is not counted when it is answered.
        """
        for event in events:
            if isinstance(event, RequestRouted):
                sums = {**sums, event.policy: _routed(sums.get(event.policy, PolicySum()), event)}
            elif isinstance(event, RouteFinished):
                sent = self._sent.get((event.request, event.worker))
                if sent is not None:
                    policy = sent[0].policy
                    sums = {**sums, policy: _finished(sums.get(policy, PolicySum()), sent[0], event)}
        return sums


def _routed(was: PolicySum, event: RequestRouted) -> PolicySum:
    return was._replace(
        tries=was.tries + 1, regret=was.regret + (event.regret or 0),
        judged=was.judged + (event.regret is not None),
    )  # fmt: skip


def _finished(was: PolicySum, sent: RequestRouted, event: RouteFinished) -> PolicySum:
    if event.outcome == "moved":
        return was._replace(moved=was.moved + 1)
    if event.outcome != "finished":
        return was._replace(failed=was.failed + 1)
    computed = Counter(dict(enumerate(was.computed)))
    computed[event.worker] += event.tokens - event.cached
    _, regret = judged_in_the_end(sent.best, sent.regret, event.cached)
    return was._replace(
        tokens=was.tokens + event.tokens, cached=was.cached + event.cached,
        regret=was.regret - (sent.regret or 0) + (regret or 0),
        computed=tuple(computed[worker] for worker in range(max(computed) + 1)),
    )  # fmt: skip
