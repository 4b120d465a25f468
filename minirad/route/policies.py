"""Which worker a request goes to: five policies, each of which says why, with the numbers that decided.

    policy = make_policy("cache-aware", RouteOptions(match_threshold=0.5))
    choice = policy.choose(tokens, workers)  # .worker is an index into workers, .reason a sentence
    policy.sent(choice.worker, tokens)       # it was sent there
    policy.finished(choice.worker, tokens)   # and was answered
    policy.forget(worker)                    # that worker died, or began anew

Both cache-aware policies weigh match against load by thresholds, as SGLang's router does:

1. The loads are out of balance (they differ by more than `balance_abs` requests, and the highest is more than
   `balance_rel` times the lowest): the least loaded worker, whatever it holds.
2. Else a worker holds more than `match_threshold` of the prompt: the one that holds most.
3. Else nobody knows the prompt: the least loaded worker.

They differ in what they know: "cache-aware" what it sent itself (trees.SentTree), "events" what the workers
say that they hold (trees.EventTree), which is right about evictions, and late.

Pure: no clock, no network, no torch. The same calls with the same seed lead to the same choices.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minirad.cache.radix_cache import Slots
from minirad.errors import said, whole
from minirad.route.trees import MOST_SENT, PrefixView, SentTree


class NoWorker(RuntimeError):
    """There is no worker that is alive, so a request cannot go anywhere."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the router sees it at this moment.

    name: in sentences. alive: requests may be sent to it. load: requests in flight there. queued_tokens:
    prompt tokens that wait there to be computed, as far as is known. tree: what it says that it holds; None
    where it says nothing.
    """

    name: str
    alive: bool
    load: int
    queued_tokens: int = 0
    tree: PrefixView | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """worker: an index into the workers. reason: one sentence, without a final full stop.

    matches: prompt tokens that each worker holds, as far as the policy knows (0 where it does not, and of
    those that are not alive). loads: requests in flight at each.
    """

    worker: int
    reason: str
    matches: tuple[int, ...]
    loads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Thresholds: see above. tree_tokens: what a SentTree remembers of a worker. page_size: of the workers.

    seed: of the policy random.
    """

    match_threshold: float = 0.5
    balance_abs: int = 4
    balance_rel: float = 1.5
    tree_tokens: int = MOST_SENT
    page_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("match_threshold", 0.0, 1.0), ("balance_rel", 1.0, 1e9)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {said(value)}")
        for name, least_int in (("balance_abs", 0), ("tree_tokens", 1), ("page_size", 1), ("seed", 0)):
            whole(name, getattr(self, name), least_int)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy decides by. alive: the indices of those that are alive, at least one."""

    tokens: int
    workers: Sequence[WorkerView]
    alive: Sequence[int]
    matches: tuple[int, ...]
    loads: tuple[int, ...]

    def name(self, worker: int) -> str:
        return self.workers[worker].name


class Policy:
    """What all policies have in common: one overrides `pick`, and `match` if it knows more."""

    name: ClassVar[str] = ""
    reads_events: ClassVar[bool] = False  # it goes by `WorkerView.tree`

    def __init__(self, options: RouteOptions | None = None) -> None:
        self.options = options or RouteOptions()
        self._turn = 0  # whose turn it is where all else is equal: the worker after the last one chosen

    def choose(self, tokens: Slots, workers: Sequence[WorkerView], space: Hashable = None) -> Choice:
        """The worker that a request goes to. NoWorker if none is alive.

        tokens: its prompt, shape [n]. workers: all of them, always in the same order, also those that are
        not alive. space: its namespace (`extra_key`).
        """
        alive = [at for at, worker in enumerate(workers) if worker.alive]
        if not alive:
            raise NoWorker(f"none of the {len(workers)} workers is alive")
        matches = tuple(self.match(at, each, tokens, space) for at, each in enumerate(workers))
        seen = Seen(len(tokens), workers, alive, matches, tuple(worker.load for worker in workers))
        worker, reason = self.pick(seen)
        self._turn = worker + 1
        return Choice(worker, reason, seen.matches, seen.loads)

    def match(self, at: int, worker: WorkerView, tokens: Slots, space: Hashable) -> int:
        """What is known of how many of the tokens a worker holds."""
        return worker.tree.match(tokens, space) if worker.alive and worker.tree is not None else 0

    def pick(self, seen: Seen) -> tuple[int, str]:
        """Index and reason of the choice."""
        raise NotImplementedError

    def sent(self, worker: int, tokens: Slots, space: Hashable = None) -> None:
        """A request was sent to a worker."""

    def finished(self, worker: int, tokens: Slots, space: Hashable = None) -> None:
        """A request was answered. tokens: its prompt, with the reply's where the router knows them."""

    def forget(self, worker: int) -> None:
        """A worker is lost, or began anew: it holds nothing of what it held."""

    def least_loaded(self, seen: Seen, among: Sequence[int] | None = None) -> int:
        """Fewest requests in flight, then fewest tokens that wait, then the next in turn."""

        def rank(at: int) -> tuple[int, int, int]:
            turn = (at - self._turn) % len(seen.workers)
            return seen.loads[at], seen.workers[at].queued_tokens, turn

        return min(seen.alive if among is None else among, key=rank)


class RoundRobin(Policy):
    """One after the other."""

    name = "round-robin"

    def pick(self, seen: Seen) -> tuple[int, str]:
        worker = min(seen.alive, key=lambda at: (at - self._turn) % len(seen.workers))
        return worker, f"it is the turn of {seen.name(worker)}, one of {_workers(seen)}"


class LeastLoaded(Policy):
    """Fewest requests in flight."""

    name = "least-loaded"

    def pick(self, seen: Seen) -> tuple[int, str]:
        worker = self.least_loaded(seen)
        return worker, f"{_has_fewest(seen, worker)}; {_workers(seen)} with {_spread(seen)}"


class Random(Policy):
    """Drawn from those that are alive, by the options' seed."""

    name = "random"

    def __init__(self, options: RouteOptions | None = None) -> None:
        super().__init__(options)
        self._random = random.Random(self.options.seed)

    def pick(self, seen: Seen) -> tuple[int, str]:
        worker = seen.alive[self._random.randrange(len(seen.alive))]
        return worker, f"{seen.name(worker)} was drawn from {_workers(seen)}"


class FromEvents(Policy):
    """Match against load, by what the workers say that they hold (`WorkerView.tree`)."""

    name, reads_events = "events", True

    def pick(self, seen: Seen) -> tuple[int, str]:
        options = self.options
        loads = [seen.loads[at] for at in seen.alive]
        low, high = min(loads), max(loads)
        best = max(seen.matches[at] for at in seen.alive)
        holders = [at for at in seen.alive if seen.matches[at] == best]
        if high - low > options.balance_abs and high > options.balance_rel * low:
            worker = self.least_loaded(seen)
            return worker, (
                f"{_has_fewest(seen, worker)}: {_spread(seen)} are more than {options.balance_abs} and more "
                f"than {options.balance_rel:g} times apart, so no match counts ({_most(seen, holders, best)})"
            )
        if best > options.match_threshold * seen.tokens:
            worker = self.least_loaded(seen, holders)
            return worker, (
                f"{seen.name(worker)} holds {_share(best, seen.tokens)}, more than "
                f"{options.match_threshold:.0%}{_of_several(seen, holders)}; {_spread(seen)}"
            )
        worker = self.least_loaded(seen)
        return worker, (
            f"nobody holds more than {options.match_threshold:.0%} ({_most(seen, holders, best)}), and "
            f"{_has_fewest(seen, worker)} ({_spread(seen)})"
        )


class CacheAware(FromEvents):
    """The same by what was sent to each worker, which is all that a router knows by itself."""

    name, reads_events = "cache-aware", False

    def __init__(self, options: RouteOptions | None = None) -> None:
        super().__init__(options)
        self.trees: dict[int, SentTree] = {}

    def match(self, at: int, worker: WorkerView, tokens: Slots, space: Hashable) -> int:
        tree = self.trees.get(at)
        return tree.match(tokens, space) if worker.alive and tree is not None else 0

    def sent(self, worker: int, tokens: Slots, space: Hashable = None) -> None:
        if worker not in self.trees:
            self.trees[worker] = SentTree(self.options.tree_tokens, self.options.page_size)
        self.trees[worker].add(tokens, space)

    def finished(self, worker: int, tokens: Slots, space: Hashable = None) -> None:
        if worker in self.trees:  # it was forgotten meanwhile: what it holds now, nobody knows
            self.trees[worker].add(tokens, space)

    def forget(self, worker: int) -> None:
        self.trees.pop(worker, None)


POLICIES: dict[str, type[Policy]] = {
    kind.name: kind for kind in (RoundRobin, LeastLoaded, Random, CacheAware, FromEvents)
}


def make_policy(name: str, options: RouteOptions | None = None) -> Policy:
    """A policy by its name; ValueError names those that there are."""
    if name not in POLICIES:
        raise ValueError(f"unknown routing policy {said(name)}; known: {', '.join(POLICIES)}")
    return POLICIES[name](options)


# ------------------------------------------------------------------ sentences


def _workers(seen: Seen) -> str:
    count = len(seen.alive)
    return f"{count} worker{'s' * (count != 1)}"


def _has_fewest(seen: Seen, worker: int) -> str:
    return f"{seen.name(worker)} has the fewest requests in flight, {seen.loads[worker]:,}"


def _spread(seen: Seen) -> str:
    """The loads, in few words."""
    loads = [seen.loads[at] for at in seen.alive]
    low, high = min(loads), max(loads)
    return f"loads of {low:,} to {high:,}" if low != high else f"a load of {low:,} each"


def _share(tokens: int, of: int) -> str:
    return f"{tokens:,} of {of:,} tokens ({tokens / of:.0%})" if of else "0 tokens"


def _most(seen: Seen, holders: Sequence[int], best: int) -> str:
    if not best:
        return "nobody holds any of it"
    return f"the most is {_share(best, seen.tokens)} at {seen.name(holders[0])}"


def _of_several(seen: Seen, holders: Sequence[int]) -> str:
    count = len(holders)
    return f", as {count} workers do, and has the fewest requests in flight of them" if count > 1 else ""


# ------------------------------------------------------------------ options of commands


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """The thresholds as options of a command (or a group of them); `options_of` reads them."""
    default = RouteOptions()
    parser.add_argument(
        "--match-threshold", type=float, default=default.match_threshold,
        help="share of a prompt that a worker has to hold to be chosen for it",
    )  # fmt: skip
    parser.add_argument(
        "--balance-abs", type=int, default=default.balance_abs,
        help="loads that differ by more requests than this are out of balance, ...",
    )  # fmt: skip
    parser.add_argument(
        "--balance-rel", type=float, default=default.balance_rel,
        help="... if the highest is also more than so many times the lowest",
    )  # fmt: skip
    parser.add_argument(
        "--tree-tokens", type=int, default=default.tree_tokens,
        help="tokens that the policy cache-aware remembers of each worker",
    )  # fmt: skip


def options_of(args: argparse.Namespace, page_size: int = 1, seed: int = 0) -> RouteOptions:
    """What `add_arguments` asked for; ValueError names what cannot be."""
    return RouteOptions(
        args.match_threshold, args.balance_abs, args.balance_rel, args.tree_tokens, page_size, seed
    )
