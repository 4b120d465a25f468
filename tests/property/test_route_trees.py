"""What a router knows of a worker: both trees against plain models, and against a real tree."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.fleet.publish import as_record
from minirad.fleet.wire import Batch, Cleared, Decoder, Hash, Record, Removed, Stored, encode
from minirad.observe.kv_events import KVEvent, KVEventStream
from minirad.route.trees import EventTree, SentTree

SPACES: tuple[Hashable, ...] = (None, "a", "b:c", 7, ("t", 1))
prompts = st.lists(st.integers(0, 2), max_size=14).map(tuple)
spaces = st.sampled_from(SPACES)


def row(tokens: Iterable[int]) -> Any:
    return np.array(tuple(tokens), dtype=np.int64)


def common(first: Sequence[int], second: Sequence[int], page: int) -> int:
    """Tokens that two prompts begin with, in whole pages."""
    length = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return length // page * page


# ------------------------------------------------------------------ what was sent


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(prompts, spaces), max_size=25), st.tuples(prompts, spaces), st.integers(1, 4))
def test_sent_prompts_match_as_far_as_any_of_them_does(
    sent: list[tuple[Any, ...]], asked: tuple[Any, ...], page: int
) -> None:
    tree = SentTree(10_000, page)
    for tokens, space in sent:
        tree.add(row(tokens), space)
    best = max((common(asked[0], tokens, page) for tokens, space in sent if space == asked[1]), default=0)
    assert tree.match(row(asked[0]), asked[1]) == best
    pages = {
        (space, tokens[:end]) for tokens, space in sent for end in range(page, len(tokens) + 1, page)
    }  # fmt: skip
    assert tree.tokens == len(pages) * page


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(prompts, spaces), max_size=40), st.integers(1, 30), st.integers(1, 3))
def test_a_bound_holds_and_the_last_prompt_is_remembered(
    sent: list[tuple[Any, ...]], most: int, page: int
) -> None:
    tree, endless = SentTree(most, page), SentTree(10_000, page)
    for tokens, space in sent:
        tree.add(row(tokens), space)
        endless.add(row(tokens), space)
        assert tree.tokens <= most
        assert tree.match(row(tokens), space) == min(len(tokens), most) // page * page
    for tokens, space in sent:
        assert tree.match(row(tokens), space) <= endless.match(row(tokens), space)


def test_what_was_sent_least_recently_is_forgotten_first() -> None:
    tree = SentTree(20)
    first, second, third = row(range(10)), row(range(100, 110)), row(range(200, 210))
    for tokens in (first, second, first, third):
        tree.add(tokens)
    assert [tree.match(tokens) for tokens in (first, second, third)] == [10, 0, 10]


@pytest.mark.parametrize("most", [0, -1, 1.5, True])
def test_a_bound_is_a_number(most: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens must be"):
        SentTree(most)


# ------------------------------------------------------------------ what a worker tells

inserts = st.tuples(st.just("insert"), prompts, spaces)
evictions = st.tuples(st.just("evict"), st.integers(1, 12), st.none())
flushes = st.tuples(st.just("reset"), st.none(), st.none())


@settings(max_examples=80, deadline=None)
@given(
    st.lists(inserts | inserts | inserts | evictions | flushes, max_size=25), st.integers(1, 3), st.booleans()
)
def test_events_say_what_a_real_tree_holds(story: list[tuple[Any, ...]], page: int, pairs: bool) -> None:
    """Each event as it comes over a wire: what is known is what `peek` says."""
    cache, tree, told = RadixCache(page), EventTree(), Decoder()

    def take(event: KVEvent) -> None:
        (record,) = told.decode(encode(Batch(0.0, (as_record(event),)))).events
        tree.take(record)

    KVEventStream(cache, take)
    asked: list[tuple[Any, Hashable]] = []
    for what, value, space in story:
        if what == "insert":
            key = RadixKey(row(value), space, pairs)
            cache.insert(key, np.zeros(len(key), dtype=np.int64))
            asked.append((row(value), space))
        elif what == "evict":
            cache.evict(value)
        else:
            cache.reset()
        for tokens, of in asked:
            for also in {of, None}:
                assert tree.match(tokens, also) == cache.peek(RadixKey(tokens, also, pairs))
        assert tree.tokens == cache.total_size
    tree.clear()
    assert tree.tokens == 0 and all(tree.match(tokens, of) == 0 for tokens, of in asked)


@dataclass
class Plain:
    """What is told of blocks, kept as it is told: hash -> (parent, tokens), and who is where."""

    blocks: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = field(default_factory=dict)
    media: dict[Hash, set[str]] = field(default_factory=dict)

    def take(self, event: Record) -> None:
        if isinstance(event, Cleared):
            self.blocks.clear()
            self.media.clear()
        elif isinstance(event, Removed):
            for name in event.hashes:
                self.media.get(name, set()).discard(event.medium)
        else:
            before = event.parent
            for name, tokens in zip(event.hashes, event.tokens, strict=True):
                self.blocks[name] = before, tokens
                self.media.setdefault(name, set()).add(event.medium)
                before = name

    def match(self, tokens: Sequence[int], size: int) -> int:
        at: set[Hash | None] = {None}
        length = 0
        while length + size <= len(tokens):
            page = tuple(tokens[length : length + size])
            at = {n for n, (p, told) in self.blocks.items() if p in at and told == page and self.media[n]}
            if not at:
                break
            length += size
        return length


SIZE = 2


def name_of(path: tuple[int, ...], salt: int) -> int:
    """A block's hash: of all tokens up to its end; salt: two may have the same content."""
    return hash((path, salt)) & 0xFFFF_FFFF


@st.composite
def told_events(draw: st.DrawFn) -> list[Record]:
    """Prompts stored from anywhere on their path, blocks removed anywhere, so that there are holes."""
    events: list[Record] = []
    known: dict[Hash, set[str]] = {}
    for _ in range(draw(st.integers(1, 20))):
        what, medium = draw(st.integers(0, 7)), draw(st.sampled_from(["GPU", "CPU"]))
        if what == 7:
            events.append(Cleared())
            known = {}
        elif what >= 5 and known:
            name = draw(st.sampled_from(sorted(known)))
            if known[name]:
                events.append(Removed((name,), gone := draw(st.sampled_from(sorted(known[name])))))
                known[name].discard(gone)
        else:
            path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
            pages = tuple((n, 9) for n in path)
            salt, first = draw(st.integers(0, 1)), draw(st.integers(0, len(path) - 1))
            names = [name_of(tuple(path[: end + 1]), salt) for end in range(len(path))]
            fresh = [at for at in range(first, len(path)) if medium not in known.get(names[at], set())]
            if not fresh or fresh != list(range(fresh[0], len(path))):
                continue  # nothing is told twice: what that would mean, test_fleet_tree.py looks at
            start = fresh[0]
            parent = names[start - 1] if start else None
            events.append(Stored(tuple(names[start:]), parent, pages[start:], SIZE, medium))
            for name in names[start:]:
                known.setdefault(name, set()).add(medium)
    return events


@settings(max_examples=150, deadline=None)
@given(told_events())
def test_holes_and_what_was_never_told_match_nothing(events: list[Record]) -> None:
    tree, plain = EventTree(), Plain()
    for event in events:
        tree.take(event)
        plain.take(event)
        for number in range(16):
            tokens = [each for bit in range(4) for each in (number >> bit & 1, 9)]
            assert tree.match(row(tokens)) == plain.match(tokens, SIZE)
        assert tree.tokens == SIZE * sum(map(bool, plain.media.values()))


def test_a_parent_that_is_told_later_joins_what_was_below_it() -> None:
    tree = EventTree()
    tree.take(Stored((2, 3), 1, ((3, 4), (5, 6)), 2))
    assert tree.match(row([1, 2, 3, 4, 5, 6])) == 0 and tree.tokens == 4
    tree.take(Stored((1,), None, ((1, 2),), 2))
    assert tree.match(row([1, 2, 3, 4, 5, 6, 7])) == 6
    tree.take(Removed((2,)))
    assert tree.match(row([1, 2, 3, 4, 5, 6])) == 2
    tree.take(Stored((2,), 1, ((3, 4),), 2, "CPU"))
    assert tree.match(row([1, 2, 3, 4, 5, 6])) == 6


def test_blocks_of_pairs_match_pairs_and_those_of_other_groups_nothing() -> None:
    tree = EventTree()
    assert tree.match(row([1, 2])) == 0
    tree.take(Stored((1,), None, ((1, 2, 2, 3),), 2, pairs=True))
    assert [tree.match(row(ids)) for ids in ([1, 2, 3, 4], [1, 2, 3], [1, 2], [1, 2, 2, 3], [1], [])] == [
        2, 2, 0, 0, 0, 0,
    ]  # fmt: skip
    tree.clear()  # it began anew, with other keys
    tree.take(Stored((1,), None, ((1,),), 1, other_group=True))
    assert tree.match(row([1, 2])) == 0 and tree.tokens == 0
    tree.clear()
    tree.take(Stored((1,), None, ((1, 2),), 2))
    assert tree.match(row([1, 2, 3])) == 2


def test_a_hole_that_is_told_as_something_else_is_that_from_then_on() -> None:
    tree = EventTree()
    tree.take(Stored((1, 2), None, ((1, 2), (3, 4)), 2))
    tree.take(Removed((1,)))
    tree.take(Stored((1,), None, ((7, 8),), 2))
    assert tree.match(row([1, 2, 3, 4])) == 0
    assert tree.match(row([7, 8, 3, 4])) == 4
