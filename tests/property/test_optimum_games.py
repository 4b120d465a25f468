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
from minirad.config import SamplingParams, ScheduleOptions
from minirad.optimum import Known, Presence, Stay, most_hits
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.simulate import ForeseeingReplay, ModelFreeEngine, Replay, one_by_one

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
    letters, spaces = rng.choice((2, 3, 6)), rng.choice((1, 1, 1, 2))

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(letters) for _ in range(rng.randint(least, most) * page)]

    requests: list[Request] = []
    for _ in range(rng.randint(5, 9)):
        space = rng.randrange(spaces) or None
        goes_on = bool(requests) and rng.random() < 0.6
        prompt = [*rng.choice(requests)[-1].tokens.tolist(), *some(0, 1)] if goes_on else some(1, 4)
        prompt = prompt[: rng.randint(1, 4) * page]
        prompt += [0] * rng.randrange(page)  # a last page that is not whole
        longer = [prompt + some(0, 2) + [1] * rng.randrange(page) for _ in range(rng.randint(0, replies))]
        requests.append(tuple(RadixKey(np.array(each, dtype=np.int64), space) for each in (prompt, *longer)))
    most = max(-(-len(key) // page) for keys in requests for key in keys)
    return requests, page, page * max(1, most + rng.choice((-1, 0, 0, 1, 1, 2, 3))) + rng.randrange(page)


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


def let_choose(tree: RadixCache, choose: Callable[[list[Node]], Node]) -> RadixCache:
    """The tree evicts the leaf that it is told to, of all that can be."""

    def evict(num_tokens: int) -> EvictResult:
        slots: list[int] = []
        while len(slots) < num_tokens and (leaves := [node for node in tree.walk() if node.evictable]):
            victim = choose(leaves)
            tree._remove(victim)
            tree.evictable_size -= len(victim)
            slots += victim.slots.tolist()
        return EvictResult(len(slots), np.array(slots, dtype=np.int64))

    tree.evict = evict  # type: ignore[method-assign]
    return tree


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
        let_choose(replay.cache, choices.choose)
        best = max(best, hits(replay, requests))
        more = choices.again()
    return best


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
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
        clairvoyant = hits(ForeseeingReplay(known, capacity), requests)
        policies = {name: hits(Replay(capacity, page, name), requests) for name in POLICIES}
        policies["dead-first"] = hits(ForeseeingReplay(known, capacity, "dead-first"), requests)
        assert max(clairvoyant, *policies.values()) <= leaves, (seed, policies)
        met += clairvoyant == bound
        below += policies["lru"] < clairvoyant
        tight += leaves < bound
    # The games are worth playing: lru does worse, and whole leaves cannot do what pages can.
    assert met > 300 and below > 50 and tight > 50, (met, below, tight)


@pytest.mark.slow
def test_with_replies_no_choice_passes_it() -> None:
    met = []
    for seed in range(200):
        requests, page, capacity = game(seed, replies=2)
        known = Known(requests, page)
        bound, pages = known.bound(capacity), best_of_pages(requests, page, capacity)
        clairvoyant = hits(ForeseeingReplay(known, capacity), requests)
        policies = [hits(Replay(capacity, page, name), requests) for name in POLICIES]
        assert max(clairvoyant, *policies) <= pages <= bound <= known.bound(None), seed
        assert known.bound(None) == hits(Replay(None, page), requests)
        if len(requests) < 7:
            assert best_of_leaves(requests, page, capacity) <= pages, seed
        met.append(pages == bound)
    assert sum(met) > 0.9 * len(met)


def test_with_replies_it_may_lie_above_the_best() -> None:
    """A reply brings 2 back: page 3 behind it is counted as kept without it, which no tree can do."""
    prompts: list[tuple[list[int], ...]] = [([1, 2, 3],), ([9],), ([1], [1, 2]), ([1, 2, 3],)]
    requests = [tuple(RadixKey(each) for each in keys) for keys in prompts]
    assert (Known(requests).bound(3), best_of_pages(requests, 1, 3)) == (4, 3)


# ---------------------------------------------------------------------- several at a time


Table = tuple[list[int], list[Stay], list[int]]  # pages of each run, stays, room at each moment


def stays(seed: int, alone: bool) -> Table:
    """Paths of a small tree of runs, held for a while; alone: no page is asked for by two at one moment."""
    rng = random.Random(seed)
    above = [None, None, 0, 0, 1, 2]  # of each run, the one before it
    pages = [rng.randint(1, 2) for _ in above]
    moments = rng.randint(3, 7)
    made: list[Stay] = []
    for first in range(moments):
        for _ in range(1 if alone else rng.randint(0, 3)):
            run: int | None = rng.randrange(len(above))
            path: list[int] = []
            while run is not None:
                path, run = [run, *path], above[run]
            asked = rng.randint(0, sum(pages[run] for run in path))
            last = min(first + rng.choice((0, 0, 1, 3)), moments - 1)
            made.append(Stay(first, last, path, asked))
    return pages, made, [rng.randint(0, 3) for _ in range(moments)]


def best_of_stays(pages: list[int], made: list[Stay], room: list[int]) -> int:
    """What can be found at most: all sets of idle pages that may be kept from moment to moment are tried."""

    def of(stay: Stay) -> list[tuple[int, int]]:
        return [(run, at) for run in stay.path for at in range(pages[run])]

    @cache
    def best(moment: int, there: frozenset[tuple[int, int]]) -> int:
        if moment == len(room):
            return 0
        held = frozenset(page for stay in made if stay.first <= moment <= stay.last for page in of(stay))
        found = sum(page in there for stay in made if stay.first == moment for page in of(stay)[: stay.asked])
        idle = sorted(there - held)
        kept = (
            set(some) for size in range(min(room[moment], len(idle)) + 1) for some in combinations(idle, size)
        )
        return found + max(best(moment + 1, held | some) for some in kept)

    return best(0, frozenset())


def test_most_hits_against_every_set_of_pages_that_may_be_kept() -> None:
    """Exact where no page is asked for by two requests at one moment; never too low."""
    exact = [
        most_hits(*stays(seed, alone=True)) == best_of_stays(*stays(seed, alone=True)) for seed in range(300)
    ]
    assert all(exact)
    pairs = [
        (most_hits(*stays(seed, alone=False)), best_of_stays(*stays(seed, alone=False)))
        for seed in range(600)
    ]
    assert all(bound >= best for bound, best in pairs)
    assert sum(bound == best for bound, best in pairs) > 500
    assert sum(best for _, best in pairs) > 1000


# ---------------------------------------------------------------------- over time


def over_time(
    seed: int, policy: str, choose: Callable[[list[Node]], Node] | None = None
) -> tuple[int, int, int]:
    """A small game through the engine without a model: cached, bound and optimum.

    Everything in it is small, so that requests wait, share, branch, are retracted and evict each other.
    """
    rng = random.Random(seed)
    page, letters = rng.choice((1, 1, 2)), rng.choice((2, 3, 5))
    engine = ModelFreeEngine(
        page * rng.randint(8, 20), page, policy, rng.choice(list(SCHEDULE)), rng.randint(1, 4),
        chunk=rng.choice((3, 5, 50)),
        options=ScheduleOptions(
            mixed=rng.random() < 0.3, new_token_ratio=rng.choice((0.0, 0.3)), new_token_ratio_min=0.0,
            in_batch_shared=rng.choice((1, 3, 32)), preemption=rng.random() < 0.3,
        ),
    )  # fmt: skip
    if choose is not None:
        assert isinstance(engine.cache, RadixCache)
        let_choose(engine.cache, choose)
    presence = Presence(engine)
    engine.script.watch = presence.launched
    asked: list[list[int]] = []
    for _ in range(rng.randint(4, 12)):
        tokens = list(rng.choice(asked))[: rng.randint(1, 12)] if asked and rng.random() < 0.6 else []
        tokens += [rng.randrange(letters) for _ in range(rng.randint(1, 5))]
        params = SamplingParams(max_new_tokens=rng.randint(1, 5), n=rng.choice((1, 1, 1, 2)), temperature=1.0)
        try:
            name = engine.add_request(tokens, params, rng.choice((None, None, 1)), rng.choice((0, 0, 1)))
        except ValueError:
            continue  # larger than this pool
        asked.append(
            [*tokens, *engine.script.reply(next(r for r in engine.scheduler.waiting if r.id == name))]
        )
        for _ in range(rng.choice((0, 1, 1, 2, 6))):
            engine.step()
            engine.check()
    while engine.has_work:
        engine.step()
        engine.check()
    served = [engine.served[name] for name in engine.order]
    assert sum(each.cached for each in served) == engine.stats.first.cached
    return engine.stats.first.cached, presence.bound(), one_by_one(served, page)


@pytest.mark.slow
def test_over_time_no_policy_and_no_choice_passes_the_bound_of_its_own_run() -> None:
    reached = less = below = 0
    for seed in range(60):
        rng = random.Random(seed)
        runs = [over_time(seed, name) for name in rng.sample(list(POLICIES), 3)]
        runs += [over_time(seed, "lru", rng.choice) for _ in range(2)]
        for cached, bound, optimum in runs:
            assert cached <= bound <= optimum, seed
            reached += 0 < cached == bound
            below += cached < bound
            less += bound < optimum
    assert reached > 60 and below > 20 and less > 20, (reached, below, less)
