"""The bound of optimum.py against brute force: 2,000 small games, every choice of what to evict tried.

The searches here know nothing of runs, intervals or heaps: a page is the tuple of all tokens up to its end, a
cache a set of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import EvictResult, Node, RadixCache, RadixKey
from minirad.optimum import Known
from minirad.simulate import ClairvoyantReplay, Replay

GAMES = 2_000
Page = tuple[Any, ...]  # namespace, and all tokens up to the page's end
Request = tuple[RadixKey, ...]  # a prompt, and the prompt with each of its replies


def pages_of(key: RadixKey, page: int) -> tuple[Page, ...]:
    tokens = key.tokens.tolist()
    return tuple((key.extra_key, *tokens[: end + page]) for end in range(0, len(tokens) - page + 1, page))


def game(seed: int, replies: int = 0) -> tuple[list[Request], int, int]:
    """Requests, page size, capacity in units (not always whole pages); some do not fit at all."""
    rng = random.Random(seed)
    page = rng.choice((1, 1, 2, 3))
    letters, spaces = rng.choice((2, 3)), rng.choice((1, 1, 2))
    requests: list[Request] = []
    for _ in range(rng.randint(4, 9)):
        space = rng.randrange(spaces) or None

        def some(most: int) -> list[int]:
            return [rng.randrange(letters) for _ in range(rng.randint(0, most) * page)]

        prompt = rng.choice(requests)[-1].tokens.tolist() if requests and rng.random() < 0.5 else some(2)
        prompt = [*prompt, *some(1)][: rng.randint(1, 3) * page]
        prompt += [0] * rng.randrange(page)  # a last page that is not whole
        longer = [prompt + some(2) + [1] * rng.randrange(page) for _ in range(rng.randint(0, replies))]
        requests.append(tuple(RadixKey(np.array(each, dtype=np.int64), space) for each in (prompt, *longer)))
    most = max(-(-len(key) // page) for keys in requests for key in keys)
    return requests, page, page * max(1, most + rng.choice((-1, 0, 0, 1, 1, 2))) + rng.randrange(page)


def puts(request: Request) -> Request:
    return request[1:] or request


def fits(request: Request, page: int, capacity: int) -> bool:
    return all(-(-len(key) // page) * page <= capacity for key in puts(request))


def best_of_pages(requests: list[Request], page: int, capacity: int) -> int:
    """The most hits of any tree of pages: all sets that may be kept at each request are tried."""
    steps = [
        (pages_of(keys[0], page) if key is puts(keys)[0] else (), frozenset(pages_of(key, page)), len(key))
        for keys in requests
        if fits(keys, page, capacity)
        for key in puts(keys)
    ]

    @cache
    def best(at: int, held: frozenset[Page]) -> int:
        if at == len(steps):
            return 0
        prompt, needed, length = steps[at]
        found = next((i for i, each in enumerate(prompt) if each not in held), len(prompt))
        room = capacity // page - -(-length // page)
        return found + max(best(at + 1, needed | kept) for kept in trees(held - needed, needed, room, page))

    return page * best(0, frozenset())


def trees(idle: frozenset[Page], needed: frozenset[Page], room: int, page: int) -> Iterator[frozenset[Page]]:
    """All sets of at most `room` idle pages that are a tree together with the needed ones."""
    for size in range(min(len(idle), room) + 1):
        for chosen in combinations(idle, size):
            kept = frozenset(chosen)
            if all(len(each) == 1 + page or each[:-page] in kept or each[:-page] in needed for each in kept):
                yield kept


class Choosing(RadixCache):
    """A tree that evicts the leaf that it is told to, of all that can be."""

    def __init__(self, page: int, choose: Callable[[list[Node]], Node]) -> None:
        super().__init__(page)
        self._choose = choose

    def evict(self, num_tokens: int) -> EvictResult:
        total = 0
        while total < num_tokens and (leaves := [node for node in self.walk() if node.evictable]):
            victim = self._choose(leaves)
            self._remove(victim)
            total += len(victim)
            self.evictable_size -= len(victim)
        return EvictResult(total, np.empty(0, dtype=np.int64))


class Choices:
    """Goes through every series of choices, the last one changed first."""

    def __init__(self) -> None:
        self._script: list[int] = []
        self._among: list[int] = []

    def choose(self, among: list[Any]) -> Any:
        at = len(self._among)
        self._among.append(len(among))
        if at == len(self._script):
            self._script.append(0)
        return among[self._script[at]]

    def again(self) -> bool:
        """Begins the next series; False after the last one."""
        script = self._script
        while script and script[-1] == self._among[len(script) - 1] - 1:
            script.pop()
        self._among = []
        if script:
            script[-1] += 1
        return bool(script)


def hits(replay: Replay, requests: list[Request]) -> int:
    found = 0
    for keys in requests:
        found += replay.serve(*keys) or 0
        assert replay.capacity is None or replay.cache.total_size <= replay.capacity
    replay.cache.check()
    return found


def best_of_leaves(requests: list[Request], page: int, capacity: int) -> int:
    """The most hits of a radix tree, by every choice of whole leaves."""
    choices, best, more = Choices(), 0, True
    while more:
        replay = Replay(capacity, page)
        replay.cache = Choosing(page, choices.choose)
        best = max(best, hits(replay, requests))
        more = choices.again()
    return best


@pytest.mark.parametrize("part", range(4))
def test_the_bound_against_every_choice_and_every_policy(part: int) -> None:
    """Of prompts it is what the best choice of pages reaches, exactly; no choice of leaves passes it."""
    met = below = tight = 0
    for seed in range(part * GAMES // 4, (part + 1) * GAMES // 4):
        requests, page, capacity = game(seed)
        known = Known(requests, page)
        bound = known.bound(capacity)
        assert bound == best_of_pages(requests, page, capacity), seed
        leaves = best_of_leaves(requests, page, capacity)
        assert leaves <= bound <= known.bound(None) == hits(Replay(None, page), requests), seed
        clairvoyant = hits(ClairvoyantReplay(known, capacity), requests)
        policies = {name: hits(Replay(capacity, page, name), requests) for name in POLICIES}
        assert max(clairvoyant, *policies.values()) <= leaves, (seed, policies)
        met += clairvoyant == bound
        tight += leaves < bound
        below += policies["lru"] < clairvoyant
    # The games are worth playing: policies differ from the bound, and whole leaves from pages.
    assert below > 30 and tight > 20 and met > 300, (below, tight, met)
