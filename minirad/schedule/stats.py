"""Running totals of what was admitted, and of what the cache saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from minirad.schedule.request import Request


@dataclass(slots=True)
class Tally:
    """Tokens of admitted requests, and how many of them came from the cache."""

    requests: int = 0
    tokens: int = 0
    cached: int = 0


@dataclass(slots=True)
class Stats:
    """Running totals since the engine started.

    first: prompt tokens at each request's first admission. again: at its later ones, after a retraction
    (or, a sample of an n > 1 request, when there was no room to branch off): prompt and generated
    tokens, both of which have to be in the pool once more. Kept apart, because a request that is
    retracted hits its own prompt, and thrashing would look like a good cache. Samples that branch off
    at once count for nothing.
    retractions: of running requests for lack of room; preemptions: for a request of larger priority;
    deferrals: for a prefix that another request was computing.
    """

    first: Tally = field(default_factory=Tally)
    again: Tally = field(default_factory=Tally)
    retractions: int = 0
    preemptions: int = 0
    deferrals: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached prompt tokens / prompt tokens, first attempts only; None before there are any."""
        return self.first.cached / self.first.tokens if self.first.tokens else None

    @property
    def computed(self) -> int:
        """Tokens of admitted requests that did not come from the cache, at first and later admissions."""
        return sum(tally.tokens - tally.cached for tally in (self.first, self.again))

    def admitted(self, request: Request, cached: int) -> None:
        """Counts an admission; cached: tokens that came from the cache."""
        tally = self.first if request.attempts == 1 else self.again
        tally.requests += 1
        tally.tokens += request.length
        tally.cached += cached
