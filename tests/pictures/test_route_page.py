"""The page of workers behind a router, from recordings made by hand: where requests went, and why."""

from __future__ import annotations

import random

from minirad.fleet import wire
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered
from minirad.fleet.follow import State as RankState
from minirad.observe.route_events import RequestRouted, RouteFinished, WorkerChanged
from minirad.route.oracle import Oracle
from minirad.route.policies import RouteOptions, WorkerView, make_policy
from minirad.route.trees import SentTree

OPTIONS = RouteOptions(match_threshold=0.5, balance_abs=2, balance_rel=1.5)
NOTES = {
    "title": "four workers",
    "route": {name: getattr(OPTIONS, name) for name in ("match_threshold", "balance_abs", "balance_rel")},
}


def blocks(tokens, size=4):
    """A prompt as a worker stores it."""
    hashes, parent = [], None
    for at in range(0, len(tokens), size):
        parent = hash((parent, *tokens[at : at + size])) % (1 << 60)
        hashes.append(parent)
    parts = tuple(tuple(tokens[at : at + size]) for at in range(0, len(tokens), size))
    return wire.Stored(tuple(hashes), None, parts, size, "GPU", False, ())


class Fleet:
    """Workers made by hand: a policy chooses, an oracle judges, a flight records both, and time is a number."""

    def __init__(self, policy="cache-aware", workers=4, path=None, notes=NOTES):
        where = [f"tcp://127.0.0.1:{25557 + rank}" for rank in range(workers)]
        self.flight = Flight(where, block_size=4, path=path, notes=notes)
        self.policy = make_policy(policy, OPTIONS)
        self.true = [SentTree(page_size=4) for _ in range(workers)]
        self.load, self.batches, self.now, self.open = [0] * workers, [0] * workers, 0.0, []
        self.states = ["starting"] * workers
        self.requests = 0
        for worker in range(workers):
            self.note(WorkerChanged(worker, "starting", ""))
        for worker in range(workers):
            self.change(worker, "ready", f"at http://127.0.0.1:{30000 + worker}")
            self.flight.take(RankState(worker, "live"), self.now)

    def note(self, event):
        self.now += 0.2
        self.flight.note(event, self.now)

    def change(self, worker, state, why=""):
        self.states[worker] = state
        self.note(WorkerChanged(worker, state, why))

    def use(self, policy):
        self.policy = make_policy(policy, OPTIONS)

    def send(self, tokens, name=None):
        views = [
            WorkerView(f"w{at}", state in ("ready", "slow", "back"), self.load[at])
            for at, state in enumerate(self.states)
        ]
        choice = self.policy.choose(tokens, views)
        judged = Oracle(self.true).judge(tokens, [view.alive for view in views], choice.worker)
        self.policy.sent(choice.worker, tokens)
        if name is None:
            self.requests += 1
            name = f"R{self.requests}"
        self.note(RequestRouted(
            name, choice.worker, self.policy.name, choice.reason, choice.matches, choice.loads, judged.best,
            judged.regret, len(tokens),
        ))  # fmt: skip
        self.load[choice.worker] += 1
        self.open.append((name, choice.worker, tokens))
        return choice.worker

    def answer(self, nth=0, outcome="finished"):
        name, worker, tokens = self.open.pop(nth)
        cached = self.true[worker].match(tokens) if outcome == "finished" else 0
        if outcome == "finished":
            self.true[worker].add(tokens)
            batch = wire.Batch(1e9 + self.now, (blocks(list(tokens)),), worker)
            self.flight.take(Delivered(worker, self.batches[worker], batch, False), self.now)
            self.batches[worker] += 1
        self.load[worker] -= 1
        self.note(RouteFinished(name, worker, cached, len(tokens), outcome))


def document(number, length=24):
    """The tokens of one of several texts that prompts begin with."""
    return list(range(1000 * number, 1000 * number + length))


def story(requests=24, **more):
    """Requests about five texts, two policies, a worker that dies and comes back."""
    fleet, chance = Fleet(**more), random.Random(1)
    for number in range(requests):
        if number == requests // 2:
            fleet.use("round-robin")
        prompt = document(chance.randrange(5)) + [90_000 + 4 * number + at for at in range(4)]
        fleet.send(prompt)
        if number == requests // 3:
            name, worker, tokens = fleet.open[-1]
            fleet.change(worker, "dead", "its process was ended by SIGKILL")
            fleet.policy.forget(worker)
            fleet.answer(-1, "moved")
            fleet.send(tokens, name)
        if number == requests - 4:
            fleet.change(fleet.states.index("dead"), "back", "it answers again, and its cache is empty")
        while len(fleet.open) > 3:
            fleet.answer(chance.randrange(3))
    fleet.answer(0)
    fleet.flight.tick(fleet.now + 1)
    return fleet
