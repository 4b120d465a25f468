"""Lesson 14: the engine's own tree on requests one after another, under a student's policy or lru.

What runs a student's file in the live page and in `minirad simulate` is minirad/own_policy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

from minirad.cache.eviction import LRU, EvictionPolicy
from minirad.cache.radix_cache import RadixKey
from minirad.simulate import Replay, read_source

Request = Sequence[int]


@cache
def trace() -> tuple[RadixKey, ...]:
    """The public trace, a key for each request."""
    return tuple(prompt.key for prompt in read_source("mooncake").prompts)


def replay(capacity: int, key: Callable[[Any], Any] | None = None) -> Replay:
    """An empty cache of the engine's own; key: orders its leaves instead of lru's."""
    made = Replay(capacity)
    if key is not None:
        policy = EvictionPolicy("a student's", key, LRU.reason)
        made.cache._queue.rebuild(policy, ())  # as `bench learn` tries its choices
    return made


def found(keys: Iterable[RadixKey], capacity: int, key: Callable[[Any], Any] | None = None) -> int:
    """How many blocks the engine's tree finds in all."""
    made = replay(capacity, key)
    return sum(made.serve(each) or 0 for each in keys)


@cache
def found_by_lru(first: int, last: int, capacity: int) -> int:
    """The same of the trace's requests from number `first` to `last` under lru, counted once."""
    return found(trace()[first - 1 : last], capacity)


def found_block_by_block(requests: Iterable[Request], capacity: int) -> list[int]:
    """How many blocks of each request the engine's tree finds where each of its nodes holds one block.

    A request is looked up as a whole, and then put in with each of its beginnings: so no node is ever longer,
    no look-up splits one, and whole leaves are single blocks.
    """
    made = replay(capacity)
    hits = []
    for request in requests:
        beginnings = [RadixKey(request[:end]) for end in range(1, len(request) + 1)]
        hit = made.serve(RadixKey(request), *beginnings) if beginnings else 0
        if hit is None:
            raise ValueError(f"a cache of {capacity} blocks refuses a request of {len(request)}")
        hits.append(hit)
    return hits


def random_requests(rng: Random, count: int, longest: int, alphabet: int = 4) -> list[list[int]]:
    """Requests that often begin as an earlier one does."""
    requests: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(requests) if requests and rng.random() < 0.7 else []
        tail = [rng.randrange(alphabet) for _ in range(rng.randrange(longest + 1))]
        requests.append((head[: rng.randrange(len(head) + 1)] + tail)[: rng.randrange(longest + 1)])
    return requests
