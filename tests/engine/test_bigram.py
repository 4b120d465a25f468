"""Keys of token pairs (EAGLE): a tree's unit is a token *and* the one after it.

A draft head computes its KV at a token from the next token as well, so two prompts that part after three
tokens have only two such units in common.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest import CheckedEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ColdReference, drive, listen, one_slow
from test_preemption import foresees, reply

from minirad import RadixCache, RadixKey
from minirad.config import HOST_WRITE, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev

MakeEngine = Callable[..., CheckedEngine]
PAGES = (1, 2, 4)
A, B, C, D, E = 5, 6, 7, 8, 9


def pairs(tokens: list[int]) -> RadixKey:
    return RadixKey(tokens, is_bigram=True)


@pytest.fixture(scope="module")
def reference(tiny_model: LlamaModel) -> ColdReference:
    return ColdReference(tiny_model)


# ---------------------------------------------------------------------- the tree


def test_three_tokens_in_common_are_two_units() -> None:
    cache = RadixCache()
    cache.insert(pairs([A, B, C, D]), [1, 2, 3])
    assert cache.peek(pairs([A, B, C, E])) == 2
    assert cache.insert(pairs([A, B, C, E]), [11, 12, 13]).prefix_len == 2
    assert cache.match_prefix(pairs([A, B, C, E])).slots.tolist() == [1, 2, 13]
    assert cache.match_prefix(pairs([A, B, C, D])).slots.tolist() == [1, 2, 3]
    assert cache.total_size == 4  # AB, BC, CD, CE
    cache.check()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_unit_less_is_shared_than_tokens(page: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        cache = RadixCache(page)
        one, other = ([rng.choice([A, B]) for _ in range(rng.randrange(14))] for _ in range(2))
        size = max(len(one) - 1, 0)
        cache.insert(pairs(one), range(page, page + size))
        assert cache.total_size == size // page * page
        alike = sum(
            1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
        )
        assert cache.peek(pairs(other)) == max(alike - 1, 0) // page * page
        cache.match_prefix(pairs(other))
        cache.check()


@pytest.mark.parametrize("tokens", [[], [A]])
def test_what_has_no_pair_leaves_nothing(tokens: list[int]) -> None:
    cache = RadixCache()
    found = cache.insert(pairs(tokens), [])
    assert (found.prefix_len, found.last_node, cache.total_size) == (0, cache.root, 0)
    assert cache.match_prefix(pairs(tokens)).last_node is cache.root
    cache.check()


# ---------------------------------------------------------------------- what the engine keeps


class Slots:
    """Follows every slot by the engine's events: nothing is handed out, or freed, twice."""

    def __init__(self, engine: Engine) -> None:
        self.used: set[int] = set()
        engine.bus.subscribe(ev.SlotsAllocated, self.allocated)
        engine.bus.subscribe(ev.SlotsFreed, self.freed)

    def allocated(self, event: ev.SlotsAllocated) -> None:
        assert not self.used & set(event.slots), f"handed out twice: {event}"
        self.used |= set(event.slots)

    def freed(self, event: ev.SlotsFreed) -> None:
        assert len(set(event.slots)) == len(event.slots) and set(event.slots) <= self.used, event
        self.used -= set(event.slots)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_exact_multiples_of_the_page_leak_nothing(make_engine: MakeEngine, page: int, chunk: int) -> None:
    engine = make_engine(page_size=page, chunk_tokens=chunk, bigram_keys=True)
    slots = Slots(engine)
    for length, new in itertools.product(range(1, 2 * page + 3), range(page + 2)):
        prompt = list(range(10, 10 + length))
        for turn in range(2):
            (output,) = engine.generate([prompt], reply(new))
            units = length + max(new - 1, 0)  # what has KV
            units -= new == 0  # without a reply nothing comes after the last token
            kept = units // page * page
            assert engine.cache.total_size == engine.cache.evictable_size == kept
            assert engine.allocator.available == engine.allocator.num_tokens - kept
            assert len(slots.used) == kept
            assert output.cached_tokens == ((length - 1) // page * page if turn else 0)
        engine.flush_cache()
        assert slots.used == set()


@pytest.mark.parametrize("page", PAGES)
def test_what_is_cached_is_what_both_tokens_of_each_pair_agree_on(make_engine: MakeEngine, page: int) -> None:
    engine = make_engine(page_size=page, bigram_keys=True, kv_tokens=256)
    base = list(range(10, 22))
    engine.generate([base], reply(0))
    for common in range(1, 12):
        (output,) = engine.generate([[*base[:common], 50, 51]], reply(0))
        # (Among themselves these prompts share no more than with the base.)
        assert output.cached_tokens == (common - 1) // page * page


def require_pairs(engine: Engine) -> None:
    """Each row's part of the tree was filed under the very pairs that the row's tokens make."""
    for request in engine.scheduler.live:
        node, units = request.node, []
        while node.parent is not None:
            units = node.key.tokens.tolist() + units
            node = node.parent
        wanted = [list(pair) for pair in itertools.pairwise(request.tokens.tolist())]
        assert units[: request.protected_len] == wanted[: request.protected_len], request.id
        assert request.protected_len <= request.length - 1


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"mixed": True, "schedule_policy": "fcfs"},
    *({"host_kv_tokens": 32, "host_write": write, "load_back_threshold": 1} for write in HOST_WRITE),
]
# Every page size with every schedule and tier; short and long chunks by turns.
WAYS = [
    {"page_size": page, "chunk_tokens": (64, chunk)[(turn + page) % 2], **more}
    for page, chunk in ((1, 3), (2, 5), (4, 7))
    for turn, more in enumerate(SCHEDULES)
]


@pytest.mark.parametrize("options", one_slow(2, WAYS), ids=lambda way: "-".join(map(str, way.values())))
def test_an_engine_of_pairs_says_what_one_of_tokens_says(
    make_engine: MakeEngine, reference: ColdReference, options: dict[str, Any]
) -> None:
    """Chunks, samples, aborts, retractions in a pool that is too small for all."""
    rng = random.Random(str(options))
    engine = make_engine(kv_tokens=40, max_running=5, bigram_keys=True, new_token_ratio=0.0, **options)
    slots, gone = Slots(engine), listen(engine, ev.RequestRetracted)
    if engine.host_tier is not None:
        engine.bus.subscribe(ev.LoadStarted, lambda event: slots.used.update(event.slots))
    texts = [[rng.randrange(5, 60) for _ in range(18)] for _ in range(3)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs = []

    def step() -> None:
        outputs.extend(engine.step().finished)
        require_pairs(engine)

    for turn in range(30):
        prompt = texts[rng.randrange(3)][: rng.randrange(1, 19)] + [rng.randrange(5, 60)] * rng.randrange(2)
        how = {"n": rng.choice([1, 1, 3]), "logprob_start": rng.choice([None, None, 0, len(prompt) // 2])}
        params = reply(rng.randrange(12), temperature=rng.choice([0.0, 1.0]), seed=3, **how)
        asked[engine.add_request(prompt, params, priority=rng.randrange(2))] = prompt, params
        for _ in range(rng.randrange(5)):
            step()
        if turn % 6 == 5:
            engine.abort(rng.choice(sorted(asked)))
    while engine.has_work:
        step()
    for output in outputs:
        if output.finish_reason != "abort":
            reference.require_equal(*asked[output.request_id], output)
    assert len(outputs) > 30 and gone
    engine.cache_manager.wait_for_copies()
    engine.check()
    assert engine.cache.protected_size == 0
    assert len(slots.used) == engine.cache.total_size


# ---------------------------------------------------------------------- what admission foresees


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    running=st.lists(st.lists(st.sampled_from([A, B]), min_size=1, max_size=9), min_size=1, max_size=4),
    newcomer=st.lists(st.sampled_from([A, B]), min_size=1, max_size=9),
    page=st.sampled_from(PAGES),
    steps=st.integers(1, 9),
    count=st.integers(1, 4),
)
def test_what_victims_give_up_is_foreseen_exactly(
    tiny_model: LlamaModel, running: list[list[int]], newcomer: list[int], page: int, steps: int, count: int
) -> None:
    foresees(tiny_model, running, newcomer, page, steps, count, bigram_keys=True)


def test_a_smaller_priority_gives_way_wherever_that_makes_the_room(make_engine: MakeEngine) -> None:
    """R2 gives way to R3, which begins as it does; R1 stays. With pairs as with tokens, for as long an R3."""
    longest = []
    for bigram in (False, True):
        gave_way = []
        for length in range(5, 14):
            engine = make_engine(kv_tokens=20, bigram_keys=bigram)
            engine.add_request([30, 31, 32], reply(4), priority=1)
            engine.add_request([A, B, C, D, E], reply(5))
            engine.step()
            engine.add_request([A, B, C, D, *range(40, 40 + length)], reply(2), priority=1)
            if engine.step().retracted == ["R2"]:
                gave_way.append(length)
            drive(engine)
        longest.append(gave_way[-1])
    assert longest[0] == longest[1] < 13


def test_alone_in_a_tight_pool_no_more_is_computed_again_than_with_tokens(make_engine: MakeEngine) -> None:
    cached = []
    for bigram in (False, True):
        engine = make_engine(kv_tokens=8, bigram_keys=bigram)
        prompt = [A, B, C, D, E, 20, 21]
        engine.generate([prompt], reply(1))
        (output,) = engine.generate([prompt], reply(1, logprob_start=3))
        cached.append(output.cached_tokens)
    assert cached == [2, 2]
