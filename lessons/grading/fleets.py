"""Simulated workers for lesson 12: games, what comes of them, and what must hold of a student's Router.

A game is played before a policy by minirad.route.simulated: engines without a model, real schedulers, pools
and trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from lessons.grading.shared import whole
from lessons.grading.spec import Failure, expect
from lessons.grading.words import shown
from minirad.config import SamplingParams
from minirad.route.policies import Choice, Policy, WorkerView
from minirad.route.simulated import SimulatedFleet
from minirad.route.trees import SentTree
from minirad.simulate import ModelFreeEngine, Served

WORKERS = 4
SLACK = 4  # as in exercise.py


@dataclass(frozen=True)
class Game:
    """Requests: (step, tokens, how many are generated). capacity: tokens of each worker's pool."""

    name: str
    requests: list[tuple[int, list[int], int]]
    capacity: int


@dataclass(frozen=True)
class Run:
    """What came of a game. served: (worker, tokens, cached) in order. regret: tokens."""

    served: list[tuple[int, int, int]]
    regret: int

    @property
    def hit_rate(self) -> float:
        return sum(cached for *_, cached in self.served) / sum(tokens for _, tokens, _ in self.served)

    @property
    def largest_share(self) -> float:
        """Of the requests, at the worker that got most."""
        at = [worker for worker, *_ in self.served]
        return max(map(at.count, at)) / len(at)


def texts(rng: Random, requests: int = 45, common: int = 0, hot: float = 0.2) -> Game:
    """Questions about seven texts, some at once; all begin with `common` tokens, one text is asked most."""
    fresh = iter(range(100, 10**6))
    head = [next(fresh) for _ in range(common)]
    openings = [[*head, *(next(fresh) for _ in range(30))] for _ in range(2 * WORKERS - 1)]
    found, step = [], 0
    for _ in range(requests):
        text = 0 if rng.random() < hot else rng.randrange(len(openings))
        ids = [*openings[text], *(next(fresh) for _ in range(5))]
        found.append((step, ids, rng.randint(2, 8)))
        step += rng.choice((0, 0, 2, 5))
    return Game(f"questions about 7 texts, {common} tokens in common", found, 3 * (common + 50))


def chats(rng: Random, requests: int = 45) -> Game:
    """Conversations that grow; all begin with the same four tokens."""
    fresh = iter(range(100, 10**6))
    head = [next(fresh) for _ in range(4)]
    known: list[list[int]] = []
    found, step = [], 0
    for _ in range(requests):
        if known and rng.random() < 0.75:
            at = rng.randrange(len(known))
            known[at] = [*known[at], *(next(fresh) for _ in range(rng.randint(4, 10)))]
        else:
            at = len(known)
            known.append([*head, *(next(fresh) for _ in range(rng.randint(12, 26)))])
        found.append((step, list(known[at]), rng.randint(2, 8)))
        step += rng.choice((0, 1, 2, 5))
    return Game("chats that begin alike", found, 400)


def play(policy: Policy, game: Game) -> Run:
    """A game before a policy: engines without a model, real trees."""
    longest = 1 + max(len(tokens) + new for _, tokens, new in game.requests)
    engines = [ModelFreeEngine(game.capacity, max_context=longest, max_running=8) for _ in range(WORKERS)]
    fleet = SimulatedFleet(engines, policy)
    if isinstance(policy, Watched):
        policy.engines = engines
    coming, sent = deque(game.requests), list[tuple[int, Served]]()
    while coming or fleet.has_work:
        while coming and coming[0][0] <= fleet.now:
            _, tokens, new = coming.popleft()
            loads = list(fleet.loads)
            fleet.add_request(tokens, SamplingParams(max_new_tokens=new))
            at = next(at for at, load in enumerate(fleet.loads) if load > loads[at])
            sent.append((at, next(reversed(engines[at].served.values()))))  # it knows later what was cached
        fleet.step()
    return Run([(at, len(each.prompt), each.cached) for at, each in sent], sum(fleet.regrets))


class Watched(Policy):
    """Another policy, and what its choices were: routes as the student's account gets them."""

    name = "watched"

    def __init__(self, inner: Policy) -> None:
        super().__init__()
        self.inner = inner
        self.engines: Sequence[ModelFreeEngine] = ()
        self.held: list[list[int | None]] = []

    def choose(self, tokens: Any, workers: Sequence[WorkerView], space: Any = None) -> Choice:
        self.held.append([engine.peek(tokens, space) for engine in self.engines])
        return self.inner.choose(tokens, workers, space)

    def sent(self, worker: int, tokens: Any, space: Any = None) -> None:
        self.inner.sent(worker, tokens, space)


class Held:
    """A student's Router, and what must hold of each of its choices. what: the game, in words."""

    def __init__(self, impl: ModuleType, what: str) -> None:
        self.inner, self.what = impl.Router(), what
        self.trees: dict[int, SentTree] = {}
        self.row: list[int] = []  # the last choices, while nobody knew the prompts and all loads were equal
        self.row_of: Any = None
        self.calls = 0

    def choose(self, tokens: list[int], workers: list[Any]) -> tuple[int, str]:
        before = list(tokens), list(workers)
        answer = self.inner.choose(tokens, workers)
        self.calls += 1
        same = (tokens, workers) == before
        expect(same, f"{self.what}: choose changed what it was given; it must stay as it is")
        known = isinstance(answer, tuple) and len(answer) == 2
        expect(known, f"{self.what}: choose returned {shown(answer)}; it should be (worker, why)")
        worker, why = whole(answer[0]), answer[1]
        if worker is None or isinstance(answer[0], bool) or not 0 <= worker < len(workers):
            raise Failure(f"{self.what}: choose chose worker {shown(answer[0])} of {len(workers)}")
        line = isinstance(why, str) and any(map(str.isdigit, why)) and "\n" not in why
        expect(line, f"{self.what}: the reason is {shown(why)}; it should be a line of text with numbers")
        self._look(tokens, workers, worker)
        return worker, why

    def sent(self, worker: int, tokens: list[int]) -> None:
        before = list(tokens)
        self.inner.sent(worker, tokens)
        expect(tokens == before, f"{self.what}: sent changed the tokens; they must stay as they are")
        self.trees.setdefault(worker, SentTree()).add(np.array(tokens))

    def forget(self, worker: int) -> None:
        self.inner.forget(worker)
        self.trees.pop(worker, None)

    def _look(self, tokens: list[int], workers: Sequence[Any], chosen: int) -> None:
        """The three rules of exercise.py."""
        alive = [at for at, each in enumerate(workers) if each.alive]
        low = min(workers[at].load for at in alive)
        free = [at for at in alive if workers[at].load <= low + SLACK]
        ids = np.array(tokens)
        was = {at: self.trees[at].match(ids) if at in self.trees else 0 for at in range(len(workers))}
        says = (
            f"{self.what}, choice {self.calls}: {len(tokens)} tokens went to worker {chosen} (loads "
            f"{[each.load if each.alive else None for each in workers]}, sent before {list(was.values())})"
        )
        expect(chosen in alive, f"{says}: it is not alive", hint=1)
        expect(chosen in free, f"{says}: more than {SLACK} above the lowest", hint=1)
        least = [at for at in alive if workers[at].load == low]
        sure = [at for at in free if 4 * was[at] >= 3 * len(tokens)]
        if len(sure) == 1 and all(2 * was[at] < len(tokens) for at in free if at not in sure):
            more = any(was[at] > was[sure[0]] for at in alive)  # at one that is not free: leave it out first
            words = f"{says}: worker {sure[0]} is free, and was sent three quarters or more"
            expect(chosen in sure, words, hint=int(more))
        unknown = all(10 * was[at] < len(tokens) for at in free)
        if unknown:
            expect(chosen in least, f"{says}: nobody free was sent a tenth, others have less to do", hint=1)
        self._take_turns(chosen, alive, unknown and len(least) == len(alive), says)

    def _take_turns(self, chosen: int, alive: list[int], counts: bool, says: str) -> None:
        if not counts or self.row_of != alive or len(self.row) == len(alive):
            self.row = []
        self.row_of = alive
        if counts:
            turn = f"{says}: such prompts in a row, equal loads, and not everybody was chosen before"
            expect(chosen not in self.row, turn, hint=2)
            self.row.append(chosen)
