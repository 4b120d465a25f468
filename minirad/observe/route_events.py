"""What a router tells: where each request went and why, what became of it, and how the workers are.

They stand in the recording of a stream of KV events (fleet_events.py), so that one recording holds what the
workers hold and where requests went; worker 2 of the router is rank 2 of the stream. A state has them as two
more lists of its tree, from the first such event on: "workers", with sums, and "routes", the last ROUTES_KEPT
of them. They are kept, replayed and drawn as all others are, and no engine of ours tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minirad.observe.event import Event, Headline, Ints, ReplayState, Word, expect
from minirad.observe.events import listed
from minirad.observe.fleet_events import check_text, counted
from minirad.observe.snapshot import State

MOST_WORKERS = 256
ROUTES_KEPT = 32
MOST_COUNTED = 1 << 40  # tokens of one request, and requests of a worker
MOST_SUM = 1 << 62
WORKER_STATES = ("starting", "ready", "slow", "dead", "back")
# What became of a request: its answer is whole; its worker was lost before any of it was sent on, and it goes
# elsewhere; its client went away; an error was told to its client.
OUTCOMES = ("finished", "moved", "cancelled", "failed")

_SUMS = ("load", "requests", "tokens", "cached", "regret")


def new_worker(worker: int) -> State:
    """What a state says of a worker of which nothing was told yet.

    load: requests in flight. Sums: requests that were sent there, and of those that were answered, their
    prompt tokens and how many of them were cached; regret: of all choices, when they were made.
    """
    return {"worker": worker, "where": "", "state": "starting", "why": "", **dict.fromkeys(_SUMS, 0)}


def has_routes(state: State) -> bool:
    """Whether a router's workers are in a state."""
    return "workers" in state["tree"]


def judged_in_the_end(best: int | None, regret: int | None, found: int) -> tuple[int | None, int | None]:
    """best and regret of a choice, which the oracle said when the request was sent, now that it is answered:
    `found` tokens were cached. What the chosen worker got until it began was no loss. None: nobody knew."""
    if best is None or regret is None:
        return best, regret
    best = max(best, found)
    return best, min(regret, best - found)


class _OfRouter:
    """What all these kinds have in common: no engine of ours tells them."""

    __slots__ = ()
    by_engine: ClassVar[bool] = False

    def about(self) -> tuple[str, ...]:
        """A router's requests are not those of an engine: no state has them by name."""
        return ()


@dataclass(frozen=True, slots=True)
class WorkerChanged(_OfRouter, Event):
    """How a worker is from now on: one of WORKER_STATES. The first one of each worker comes in their order.

    Only "ready", "slow" (late to answer, and used nevertheless) and "back" (ready after it was dead; it holds
    nothing) get requests. where: its address, "" where it is as before.
    """

    worker: int
    state: str
    why: str
    where: str = ""

    word, headline = Word("worker"), Headline(175, "retract")

    def describe(self) -> str:
        where = f" at {self.where}" if self.where else ""
        why = f": {self.why}" if self.why else ""
        return f"{worker_name(self.worker)}{where} {_STATE_WORDS.get(self.state, self.state)}{why}"

    def tone(self) -> str:
        return {"dead": "evict", "slow": "retract", "back": "new", "ready": "new"}.get(self.state, "")

    def apply(self, state: ReplayState) -> None:
        workers: list[State] = state.tree.setdefault("workers", [])
        state.tree.setdefault("routes", [])
        if self.worker == len(workers):
            workers.append(new_worker(self.worker))
        record = workers[self.worker]
        record.update(state=self.state, why=self.why, where=self.where or record["where"])

    def check(self, state: ReplayState) -> None:
        _check_stream(self, state)
        known = len(state.tree.get("workers", ()))
        most = min(known, MOST_WORKERS - 1)
        expect(0 <= self.worker <= most, f"worker {self.worker} comes after {counted(known, 'worker')}")
        expect(self.state in WORKER_STATES, f"a worker is {', '.join(WORKER_STATES)}, not {self.state!r:.40}")
        check_text(self.why, "why a worker changed")
        check_text(self.where, "a worker's address")

    @classmethod
    def together(cls, events: Sequence[WorkerChanged]) -> tuple[str, str]:
        states = {event.state for event in events}
        if len(events) == 1 or len(states) > 1:
            return cls.headline.tone, events[-1].describe()
        names = list(dict.fromkeys(worker_name(event.worker) for event in events))
        words = _STATE_WORDS.get(events[0].state, events[0].state)
        return cls.headline.tone, f"{listed(names)} {words if len(names) == 1 else _plural(words)}"


@dataclass(frozen=True, slots=True)
class RequestRouted(_OfRouter, Event):
    """A request goes to a worker.

    reason: the policy's sentence. matches, loads: of all workers, as the policy saw them: prompt tokens that
    it believed to be there, requests in flight before this one. best: the most tokens that a worker really
    held; regret: how many more than this worker, both at this moment, and None where nobody knows. tokens: of
    the prompt.
    """

    request: str
    worker: int
    policy: str
    reason: str
    matches: Ints
    loads: Ints
    best: int | None
    regret: int | None
    tokens: int

    word, headline, colour = Word("route", "hit"), Headline(165, "hit"), "hit"

    def describe(self) -> str:
        return f"{self.request} goes to {worker_name(self.worker)}: {self.reason}{self._judged()}"

    def _judged(self) -> str:
        if not self.regret:
            return ""
        return f" ({self.regret:,} tokens fewer than the best worker holds)"

    def apply(self, state: ReplayState) -> None:
        record = state.tree["workers"][self.worker]
        record["load"] += 1
        record["requests"] += 1
        record["regret"] += self.regret or 0
        routes: list[State] = state.tree["routes"]
        routes.append(
            {
                "request": self.request, "worker": self.worker, "policy": self.policy, "reason": self.reason,
                "matches": list(self.matches), "loads": list(self.loads), "best": self.best,
                "regret": self.regret, "tokens": self.tokens, "outcome": "", "cached": 0,
            }
        )  # fmt: skip
        del routes[:-ROUTES_KEPT]

    def check(self, state: ReplayState) -> None:
        workers = _check_worker(self, state, self.worker)
        check_text(self.policy, "a routing policy")
        check_text(self.reason, "why a request went somewhere")
        fits = len(self.matches) == len(self.loads) == len(workers)
        told = f"{len(self.matches)} matches and {len(self.loads)} loads of {len(workers)} workers"
        expect(fits, f"{self.request} has {told}")
        _check_numbers(self, self.tokens, *self.loads, self.best or 0, self.regret or 0)
        expect(max(self.matches) <= self.tokens, f"{self.request} has {self.tokens} tokens, and more matched")
        _check_judged(self.best, self.regret, self.tokens)
        _check_sums(workers[self.worker], requests=1, regret=self.regret or 0)

    @classmethod
    def several(cls, events: Sequence[RequestRouted]) -> str:
        names = list(dict.fromkeys(worker_name(event.worker) for event in events))
        requests = len({event.request for event in events})  # one that moved is sent again
        return f"{counted(requests, 'request')} went to {listed(names)}"


@dataclass(frozen=True, slots=True)
class RouteFinished(_OfRouter, Event):
    """What became of a request at a worker: one of OUTCOMES. Each RequestRouted is followed by one.

    tokens: of its prompt; cached: how many of them the worker did not compute, as it says; 0 where it does
    not.
    """

    request: str
    worker: int
    cached: int
    tokens: int
    outcome: str

    word, headline = Word("answer", "new", small=True), Headline(45, "new")

    def describe(self) -> str:
        who = f"{self.request} at {worker_name(self.worker)}"
        if self.outcome != "finished":
            return f"{who} {_OUTCOME_WORDS.get(self.outcome, self.outcome)}"
        return f"{who} is answered: {self.cached:,} of {counted(self.tokens, 'prompt token')} were cached"

    def tone(self) -> str:
        return "finish" if self.outcome == "finished" else "retract"

    def apply(self, state: ReplayState) -> None:
        record = state.tree["workers"][self.worker]
        record["load"] -= 1
        if self.outcome == "finished":
            record["tokens"] += self.tokens
            record["cached"] += self.cached
        for route in reversed(state.tree["routes"]):
            if (route["request"], route["worker"], route["outcome"]) == (self.request, self.worker, ""):
                route.update(outcome=self.outcome, cached=self.cached)
                break

    def check(self, state: ReplayState) -> None:
        workers = _check_worker(self, state, self.worker)
        expect(self.outcome in OUTCOMES, f"a request is {', '.join(OUTCOMES)}, not {self.outcome!r:.40}")
        _check_numbers(self, self.tokens, self.cached)
        expect(self.cached <= self.tokens, f"{self.cached} of {self.tokens} prompt tokens were cached")
        expect(workers[self.worker]["load"] > 0, f"no request is at {worker_name(self.worker)}")
        _check_sums(workers[self.worker], tokens=self.tokens)

    @classmethod
    def several(cls, events: Sequence[RouteFinished]) -> str:
        done = [event for event in events if event.outcome == "finished"]
        cached, tokens = sum(e.cached for e in done), sum(e.tokens for e in done)
        others = len({event.request for event in events} - {event.request for event in done})
        rest = f", {counted(others, 'other')} {'is' if others == 1 else 'are'} not" if others else ""
        answered = f"{counted(len(done), 'request')} {'is' if len(done) == 1 else 'are'} answered{rest}"
        return f"{answered}: {cached:,} of {counted(tokens, 'prompt token')} were cached"


def worker_name(worker: int) -> str:
    """How a worker is called in sentences: w2."""
    return f"w{worker}"


_STATE_WORDS = {
    "starting": "is starting", "ready": "is ready", "slow": "is slow", "dead": "is dead", "back": "is back",
}  # fmt: skip
_OUTCOME_WORDS = {
    "moved": "was not answered: it goes elsewhere", "cancelled": "is cancelled: its client went away",
    "failed": "failed: its client was told",
}  # fmt: skip


def _plural(words: str) -> str:
    return words.replace("is ", "are ", 1)


# ------------------------------------------------------------------ what a stranger's file may say


def _check_stream(event: Event, state: ReplayState) -> None:
    expect("ranks" in state.tree, f"{type(event).__name__}: this is no stream of KV events")


def _check_worker(event: Event, state: ReplayState, worker: int) -> Sequence[State]:
    """The workers, of which this is one."""
    _check_stream(event, state)
    workers: Sequence[State] = state.tree.get("workers", ())
    expect(0 <= worker < len(workers), f"there is no worker {worker}")
    return workers


def _check_numbers(event: Event, *numbers: int) -> None:
    fits = all(0 <= number < MOST_COUNTED for number in numbers)
    expect(fits, f"{type(event).__name__}: a number is too large, or below 0")


def _check_sums(worker: State, **more: int) -> None:
    for name, number in more.items():
        expect(worker[name] + number < MOST_SUM, f"more {name} of a worker than can be counted")


def _check_judged(best: int | None, regret: int | None, tokens: int) -> None:
    fits = (best is None) == (regret is None)
    fits = fits and (best is None or regret is None or 0 <= regret <= best <= tokens)
    expect(fits, f"of {tokens} tokens the best worker held {best}, {regret} of them more than the chosen one")


def check_routes(tree: State) -> None:
    """ValueError in one sentence unless a stream's state says of workers and routes what it may say."""
    if "workers" not in tree and "routes" not in tree:
        return
    for name in ("workers", "routes"):
        fits = type(tree.get(name)) is list and all(type(each) is dict for each in tree[name])
        expect(fits, f"the tree: {name} must be a list of objects")
    workers, routes = tree["workers"], tree["routes"]
    expect(0 < len(workers) <= MOST_WORKERS, f"{len(workers)} workers; at least 1, at most {MOST_WORKERS}")
    expect(len(routes) <= ROUTES_KEPT, f"{len(routes)} routes; at most {ROUTES_KEPT} are kept")
    for at, worker in enumerate(workers):
        _check_record(worker, _WORKER, f"worker {at}")
        expect(worker["worker"] == at, f"worker {at} is not in its place")
        expect(worker["cached"] <= worker["tokens"], f"worker {at} has more cached tokens than tokens")
        expect(worker["load"] <= worker["requests"], f"worker {at} has more requests than were sent there")
    for route in routes:
        _check_record(route, _ROUTE, "a route")
        expect(route["worker"] < len(workers), f"a route to worker {route['worker']}, which is not there")
        fits = len(route["matches"]) <= len(workers) and len(route["loads"]) == len(route["matches"])
        expect(fits, f"a route has {len(route['matches'])} matches of {len(workers)} workers")
        most = max([*route["matches"], route["cached"]])
        expect(most <= route["tokens"], f"a route of {route['tokens']} tokens has {most} of them")
        _check_judged(route["best"], route["regret"], route["tokens"])


def _size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_COUNTED


def _sum(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_SUM


def _short(value: Any) -> bool:
    if type(value) is not str:
        return False
    check_text(value, "a text of a route")
    return value.isascii() or value.encode(errors="replace").decode() == value


def _sizes(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(map(_size, value))


def _size_or_none(value: Any) -> bool:
    return value is None or _size(value)


_WORKER: Mapping[str, Callable[[Any], bool]] = {
    "worker": _size, "where": _short, "state": WORKER_STATES.__contains__, "why": _short,
    "load": _size, "requests": _sum, "tokens": _sum, "cached": _sum, "regret": _sum,
}  # fmt: skip
_ROUTE: Mapping[str, Callable[[Any], bool]] = {
    "request": _short, "worker": _size, "policy": _short, "reason": _short, "matches": _sizes,
    "loads": _sizes, "best": _size_or_none, "regret": _size_or_none, "tokens": _size,
    "outcome": ("", *OUTCOMES).__contains__, "cached": _size,
}  # fmt: skip


def _check_record(record: State, kinds: Mapping[str, Callable[[Any], bool]], what: str) -> None:
    expect(record.keys() == kinds.keys(), f"{what} has not just the fields {', '.join(kinds)}")
    for name, check in kinds.items():
        expect(check(record[name]), f"{what}: its {name} cannot be {record[name]!r:.60}")
