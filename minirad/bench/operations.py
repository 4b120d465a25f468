"""One operation of a tree at a time: trees of several sorts, a meter for their calls, what one call takes.

What `bench radix` and its cost table (scaling.py) share.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minirad.bench.tables import Clock
from minirad.cache.radix_cache import RadixCache, RadixKey, Slots
from minirad.collector import no_collections


class Index(Protocol):
    """What a prefix tree must offer to be measured here; see RadixCache for what each does."""

    def match_prefix(self, key: Any) -> Any: ...
    def insert(self, key: Any, slots: Slots) -> Any: ...
    def inc_lock_ref(self, node: Any) -> Any: ...
    def dec_lock_ref(self, node: Any) -> Any: ...
    def evict(self, num_tokens: int) -> Any: ...
    @property
    def evictable_size(self) -> int: ...
    @property
    def protected_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of tree: how to make one for a page size, and a key for it out of tokens."""

    make: Callable[[int], Index]
    key: Callable[[Slots], Any]


RADIX = Kind(RadixCache, RadixKey)


class Meter:
    """Calls functions and notes how long each took, by name."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nanoseconds: dict[str, list[int]] = {}

    def __call__(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        clock = self.clock
        start = clock()
        result = function(*args)
        stop = clock()
        self.nanoseconds.setdefault(name, []).append(stop - start)
        return result


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a call would be counted as the call's own time."""
    gc.collect()
    with no_collections():
        yield


def cut(tokens: Slots, page: int) -> Slots:
    """Whole pages only: the rest of a prompt is never in the tree."""
    return tokens[: len(tokens) // page * page]


def tree_of_leaves(kind: Kind, page: int, leaves: int) -> tuple[Index, int]:
    """`leaves` leaves below 64 shared prefixes of 64 tokens; returns the tree and a leaf's tokens."""
    rng, index, size = np.random.default_rng(7), kind.make(page), max(page, 16)
    prefixes = [rng.integers(1, 128_000, 64) for _ in range(64)]
    slots = np.arange(64 + size, dtype=np.int64)
    for number in range(leaves):
        tokens = np.concatenate((prefixes[number % 64], rng.integers(1, 128_000, size)))
        index.insert(kind.key(tokens), slots + number * (64 + size))
    return index, size


def evict_one_us(kind: Kind, page: int, leaves: int, clock: Clock, calls: int = 30) -> float:
    """Median microseconds for evicting one leaf out of `leaves`."""
    index, size = tree_of_leaves(kind, page, leaves)
    meter = Meter(clock)
    with no_garbage_collection():
        for _ in range(min(calls, leaves)):
            meter("evict", index.evict, size)
    return statistics.median(meter.nanoseconds["evict"]) / 1e3


def chain(kind: Kind, page: int, tokens: int, nodes: int) -> tuple[Index, Any]:
    """A tree that is one path of `tokens` tokens over `nodes` nodes, and the key of all of it."""
    rng, index = np.random.default_rng(3), kind.make(page)
    text = rng.integers(1, 128_000, tokens)
    step = tokens // nodes // page * page
    for number in range(1, nodes + 1):
        part = text[: step * number] if number < nodes else cut(text, page)
        index.insert(kind.key(part), np.arange(len(part), dtype=np.int64))
    return index, kind.key(text)


def full_hit_us(kind: Kind, page: int, tokens: int, nodes: int, clock: Clock, calls: int = 200) -> float:
    """Median microseconds for looking up a key that is all there."""
    index, key = chain(kind, page, tokens, nodes)
    meter = Meter(clock)
    with no_garbage_collection():
        for _ in range(calls):
            meter("match", index.match_prefix, key)
    return statistics.median(meter.nanoseconds["match"]) / 1e3
