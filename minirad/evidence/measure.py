"""Programs are played on an engine once, and everything is counted and timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirad.engine import Engine
from minirad.evidence.ablations import Setting
from minirad.evidence.kinds import Kind
from minirad.frontend import Asked, Job, Outcome, ProgramPlayer, play
from minirad.outputs import StepReport
from minirad.simulate import Served, one_by_one

Clock = Callable[[], int]  # nanoseconds


@dataclass(frozen=True, slots=True)
class Played:
    """What became of some jobs.

    requests: all, hints included. prompt_tokens: of what the programs asked for; hints, which are there only
    for others, left out. cached_tokens: of these, how many were not computed when they were first admitted,
    neither by their own request nor by a hint: what a hint finds is no gain, what it computes is a cost.
    computed_tokens: prompt tokens (and, after a retraction, reply tokens) that were computed, hints' as well.
    new_tokens: generated. endless_tokens: what an endless cache would have had of the same prompts, one after
    another, without hints. longest: of a request, prompt and reply. steps: that computed something; batch:
    requests in them, on average. ttft: median seconds from a program's asking to the first token, or until a
    choice of a `select` is computed; a hint that goes ahead is part of it.
    """

    outcomes: list[Outcome[Any]]
    seconds: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    new_tokens: int
    endless_tokens: int
    longest: int
    steps: int
    batch: float
    ttft: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def share(self) -> float | None:
        """Of what the endless cache would have had; None where there was nothing to have."""
        return self.cached_tokens / self.endless_tokens if self.endless_tokens else None


class _Watched(ProgramPlayer):
    """Remembers when each request was asked for, when its first token came, and its place in the order.

    A program that asks for branches or a choice waits for the hint, too: what is asked for as soon as a hint
    is done, and begins with it, was asked for when the hint was.
    """

    def __init__(self, jobs: Sequence[Job], engine: Engine, setting: Setting, clock: Clock) -> None:
        super().__init__(jobs, engine.encode, engine, hints=setting.hints, parallel=setting.parallel)
        self.clock = clock
        self.asked: dict[str, Asked] = {}
        self.asked_at: dict[Asked, int] = {}
        self.first_at: dict[Asked, int] = {}
        self.admitted: dict[str, Served] = {}
        self.batches: list[int] = []
        self._hints: list[Asked] = []  # that have just finished

    def due(self, step: int) -> list[Asked]:
        due = super().due(step)
        now = self.clock()
        for asked in (*due, *self.queue):
            before = [hint for hint in self._hints if hint.running is asked.running]
            before = [hint for hint in before if asked.prompt[: len(hint.prompt)] == hint.prompt]
            self.asked_at.setdefault(asked, min((self.asked_at[hint] for hint in before), default=now))
        self._hints = []
        return due

    def sent(self, asked: Asked, request_id: str) -> None:
        self.asked[request_id] = asked
        super().sent(asked, request_id)

    def watch(self, report: StepReport) -> None:
        """Takes a step's report."""
        assert self.engine is not None
        now = self.clock()
        if report.batch:
            self.batches.append(len(report.batch))
        for name in report.admitted:
            asked = self.asked[name]
            served = Served(self.engine.encode(asked.prompt), asked.running.job.extra_key, 0)
            self.admitted.setdefault(name, served)
        for request in self.engine.scheduler.requests():
            if request.output:
                self.first_at.setdefault(self.asked[request.id], now)
        for output in report.finished:
            asked = self.asked[output.request_id]
            self._hints += [asked] if _hint(asked) else []
            if output.finish_reason != "error":  # one without room beside pinned hints comes again
                self.first_at.setdefault(asked, now)
            if output.request_id in self.admitted:
                self.admitted[output.request_id].outputs.append(output.token_ids)

    @property
    def waits(self) -> list[int]:
        """Nanoseconds to the first token, of all but hints."""
        return [at - self.asked_at[asked] for asked, at in self.first_at.items() if not _hint(asked)]


def play_jobs(engine: Engine, jobs: Sequence[Job], setting: Setting, clock: Clock) -> Played:
    """Plays all jobs at once on a fresh engine; raises what a program raises.

    setting: what of it the player sees.
    """
    player = _Watched(jobs, engine, setting, clock)
    started = clock()
    play(engine, player, player.watch)
    seconds = (clock() - started) * 1e-9
    for outcome in player.outcomes:
        outcome.result()
    stats, waits = engine.stats, player.waits
    served = [each for name, each in player.admitted.items() if not _hint(player.asked[name])]
    prompts, computed = sum(len(each.prompt) for each in served), stats.first.tokens - stats.first.cached
    return Played(
        player.outcomes, seconds, len(player.asked), prompts, prompts - computed,
        stats.computed,
        sum(outcome.usage.new_tokens for outcome in player.outcomes),
        one_by_one(served, engine.config.page_size),
        max((len(asked.prompt) + asked.params.max_new_tokens for asked in player.asked.values()), default=1),
        len(player.batches), statistics.fmean(player.batches) if player.batches else 0.0,
        statistics.median(waits) * 1e-9 if waits else 0.0,
    )  # fmt: skip


def _hint(asked: Asked) -> bool:
    """A prefix that is computed for what comes after it: nobody waits for a token of it."""
    return asked.params.max_new_tokens == 0 and asked.params.logprob_start is None


def right(kind: Kind, jobs: Sequence[Job], outcomes: Sequence[Outcome[Any]]) -> tuple[int, int] | None:
    """How many values are right, of how many of which it is known; None where it is known of none."""
    judged = [kind.right(job, outcome.value) for job, outcome in zip(jobs, outcomes, strict=True)]
    known = [verdict for verdict in judged if verdict is not None]
    return (sum(known), len(known)) if known else None
