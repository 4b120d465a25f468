"""Namespaces: what must not share KV although the tokens are equal never does, in any tier."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import CheckedEngine
from support import ColdReference, LateCopier, drive, listen, one_slow

from minirad import RadixCache, RadixKey
from minirad.config import HOST_WRITE, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.observe.kv_events import namespace_of
from minirad.tiers.hiradix_cache import HiRadixCache

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@dataclass(frozen=True)
class Adapter:
    name: str
    rank: int = 8


class Point(NamedTuple):
    x: int
    y: int


class Same:
    """All of one hash; equal where the names are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.name == other.name


# No two of these are equal; many look alike, or are when joined as texts.
SPACES: list[Hashable] = [
    None, "None", "", "x", ("x",), (("x",),), ("lora", "x"), ("key", "x"), "lorax", "lora/x",
    ("bc", "a"), ("c", "ab"), ("b", "ca"), "bca", ("a", None), ("a",), ("a", ""), (), 0, "0", b"0", 1, "1",
    1.5, frozenset({"a", "b"}), ("a", "b"), Adapter("a"), Adapter("a", 16), Same("a"), Same("b"),
    (None, False),
]  # fmt: skip
TREES = [None, *HOST_WRITE]


def tree(write: str | None, page: int = 1, host: int = 512) -> RadixCache:
    return HiRadixCache(page, host_tokens=host, host_write=write) if write else RadixCache(page)


def put(cache: RadixCache, tokens: list[int], at: int, space: Hashable, **how: Any) -> Any:
    inserted = cache.insert(RadixKey(tokens, space), range(at, at + len(tokens)), **how)
    if isinstance(cache, HiRadixCache):
        cache.seal(inserted.last_node)
        cache.poll(wait=True)
    return inserted


def require_apart(cache: Any) -> None:
    """Below the root every subtree is of one namespace, and no slot of either tier is of two."""
    owner: dict[tuple[str, int], Any] = {}
    for node in cache.walk():
        if node.parent is None:
            continue
        assert node.parent is cache.root or node.namespace == node.parent.namespace
        for tier, slots in (("device", node.slots), ("host", getattr(node, "host_slots", ()))):
            for slot in slots:
                assert owner.setdefault((tier, int(slot)), node.namespace) == node.namespace
    cache.check()


# ---------------------------------------------------------------------- the tree


def test_the_examples_are_of_use() -> None:
    assert all(one != other for one, other in itertools.combinations(SPACES, 2))


@pytest.mark.parametrize("write", TREES)
@pytest.mark.parametrize("page", [1, 2, 4])
def test_equal_tokens_of_different_namespaces_never_meet(write: str | None, page: int) -> None:
    cache = tree(write, page)
    for number, space in enumerate(SPACES, start=1):
        assert cache.peek(RadixKey(PROMPT, space)) == 0, "nobody has put anything there yet"
        inserted = put(cache, PROMPT, 8 * number, space)
        assert inserted.prefix_len == 0 and inserted.last_node.parent is cache.root
    assert len(cache.root.children) == len(SPACES)
    require_apart(cache)
    for number, space in enumerate(SPACES, start=1):
        match = cache.match_prefix(RadixKey([*PROMPT[:4], 50], space))  # splits in this namespace alone
        assert match.slots.tolist() == list(range(8 * number, 8 * number + 4))
        assert len(cache.root.children) == len(SPACES)
    require_apart(cache)


@pytest.mark.parametrize("write", TREES)
def test_they_part_below_the_root_and_nowhere_else(write: str | None) -> None:
    cache = tree(write)
    for at, space in ((10, "a"), (20, "b")):
        put(cache, [1, 2, 3], at, space)
        put(cache, [1, 2, 4], at + 5, space)
    tops = list(cache.root.children.values())
    assert [(top.namespace, top.units, len(top.children)) for top in tops] == [
        (("a", False), 2, 2), (("b", False), 2, 2),
    ]  # fmt: skip
    # Deeper down an edge is found by its tokens: what is above has said which namespace it is.
    assert all(isinstance(first, bytes) for top in tops for first in top.children)


@pytest.mark.parametrize("write", TREES)
@pytest.mark.parametrize("space", ["unknown", ("a",), None])
def test_an_unknown_one_matches_nothing_and_leaves_no_trace(write: str | None, space: Hashable) -> None:
    cache = tree(write)
    put(cache, PROMPT, 10, "a")
    cache.evict(8)
    if write is None:
        put(cache, PROMPT, 10, "a")
    before = cache.snapshot()
    key = RadixKey(PROMPT, space)
    assert (cache.find(key).length, cache.find(key).cost) == (0, 0)
    assert cache.snapshot() == before
    match = cache.match_prefix(key)
    assert (match.length, match.host_length, match.last_node) == (0, 0, cache.root)
    assert cache.snapshot()["nodes"] == before["nodes"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("lora", "x"), ("lo" + "ra", "x")), (1, 1.0), (1, True), (1, np.int64(1)),
        (frozenset("ab"), frozenset("ba")), (Adapter("a"), Adapter("a", 8)),
        (Same("a"), Same("a")), (Point(1, 2), (1, 2)), (10**30, 10**30),
    ],
)  # fmt: skip
def test_equal_values_are_one_namespace_whatever_object_they_are(one: Hashable, other: Hashable) -> None:
    cache = RadixCache()
    put(cache, PROMPT, 10, one)
    assert cache.peek(RadixKey(PROMPT, other)) == len(PROMPT)
    assert put(cache, PROMPT, 30, other).prefix_len == len(PROMPT)
    assert len(cache.root.children) == 1
    assert RadixKey(PROMPT, one) == RadixKey(PROMPT, other)
    cache.check()


@pytest.mark.parametrize("space", [[], {}, {1}, ([],), np.zeros(2)])
def test_what_cannot_be_hashed_is_refused_at_once(space: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        RadixKey([1], space)


@pytest.mark.parametrize("write", TREES)
def test_a_leaf_of_another_namespace_does_not_grow(write: str | None) -> None:
    cache = tree(write)
    leaf = cache.insert(RadixKey([1, 2], "a"), [10, 11]).last_node
    inserted = cache.insert(RadixKey([1, 2, 3], "b"), [20, 21, 22], grow=leaf)
    assert inserted.prefix_len == 0 and inserted.last_node is not leaf and leaf.units == 2
    require_apart(cache)


@pytest.mark.parametrize("write", TREES)
def test_locks_and_evictions_do_not_reach_over(write: str | None) -> None:
    cache = tree(write)
    nodes = {
        space: put(cache, PROMPT, at, space).last_node for at, space in ((10, "a"), (20, "b"), (30, None))
    }
    cache.inc_lock_ref(nodes["b"])
    assert cache.protected_size == 8 and cache.evictable_size == 16
    assert sorted(cache.evict(99).slots.tolist()) == [*range(10, 18), *range(30, 38)]
    assert [cache.peek(RadixKey(PROMPT, space)) for space in nodes] == [0, 8, 0]
    require_apart(cache)
    cache.dec_lock_ref(nodes["b"])
    cache.check()


def test_numbers_stand_for_namespaces_in_events() -> None:
    cache, heard = RadixCache(), []
    cache.bus.subscribe(ev.NodeInserted, heard.append)
    for at, space in enumerate(SPACES):
        put(cache, [1], 10 + at, space)
        put(cache, [2], 100 + at, space)
    numbers = [event.namespace for event in heard]
    assert numbers[::2] == numbers[1::2] and len(set(numbers)) == len(SPACES) and numbers[0] == 0
    assert [namespace_of(cache, number)[0] for number in numbers[::2]] == SPACES
    assert {node["namespace"] for node in cache.snapshot()["nodes"]} == set(numbers)
    with pytest.raises(KeyError, match="999"):
        namespace_of(cache, 999)


@pytest.mark.parametrize("page", [1, 2])
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_one_tree_with_namespaces_is_as_many_trees(page: int, bigram: bool, seed: int) -> None:
    rng = random.Random(f"{page} {bigram} {seed}")
    spaces = rng.sample(SPACES, 6)
    together, alone = RadixCache(page), {space: RadixCache(page) for space in spaces}
    fresh = page
    for _ in range(120):
        space = rng.choice(spaces)
        tokens = [rng.choice([1, 2]) for _ in range(rng.randrange(12))]
        key, own = RadixKey(tokens, space, bigram), RadixKey(tokens, None, bigram)
        assert together.peek(key) == alone[space].peek(own)
        if rng.random() < 0.5:
            assert together.match_prefix(key).slots.tolist() == alone[space].match_prefix(own).slots.tolist()
        else:
            slots = range(fresh, fresh + len(key))
            fresh += -(-len(key) // page) * page
            found = together.insert(key, slots).prefix_len
            assert found == alone[space].insert(own, slots).prefix_len
    require_apart(together)
    assert together.total_size == sum(cache.total_size for cache in alone.values())
    count = sum(1 for _ in together.walk()) - 1
    assert count == sum(sum(1 for _ in cache.walk()) - 1 for cache in alone.values())


# ---------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def reference(tiny_model: LlamaModel) -> ColdReference:
    return ColdReference(tiny_model)


WAYS: list[dict[str, Any]] = [
    {"page_size": page, "bigram_keys": bigram, **tier}
    for page, bigram in ((1, False), (4, False), (2, True))
    for tier in ({}, *({"host_kv_tokens": 64, "host_write": w, "load_back_threshold": 1} for w in HOST_WRITE))
]


def require_own(engine: Engine) -> None:
    """Every row's locked path is of the request's own namespace."""
    require_apart(engine.cache)
    for request in engine.scheduler.live:
        if request.protected_len:
            assert request.node.namespace == (request.extra_key, request.is_bigram)


@pytest.mark.parametrize("options", one_slow(3, WAYS), ids=lambda way: "-".join(map(str, way.values())))
def test_requests_share_within_their_namespace_only(
    make_engine: MakeEngine, reference: ColdReference, options: dict[str, Any]
) -> None:
    """Random tenants with the same few texts: nobody hits what only others have computed."""
    rng = random.Random(str(options))
    engine = make_engine(kv_tokens=48, chunk_tokens=8, new_token_ratio=0.0, **options)
    if isinstance(engine.cache, HiRadixCache):
        engine.cache.copier = LateCopier(engine.cache.copier, 7)
    loads, spaces = listen(engine, ev.LoadStarted), [None, ("lora", "x"), ("key", "x"), "x"]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    known: dict[Hashable, list[list[int]]] = {space: [] for space in spaces}
    outputs, hits = [], 0
    for _ in range(40):
        space = rng.choice(spaces)
        prompt = [*[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16][: rng.randrange(1, 13)], rng.randrange(20, 24)]
        params = SamplingParams(max_new_tokens=rng.randrange(1, 6), n=rng.choice([1, 1, 2]), ignore_eos=True)
        rid = engine.add_request(prompt, params, space)
        asked[rid] = prompt, params
        known[space].append(prompt)
        for _ in range(rng.randrange(6)):
            outputs += engine.step().finished
            require_own(engine)
        for other in spaces:
            # What an earlier prompt of the same namespace begins with, with its reply, is all that can match.
            most = max((common(prompt, each) for each in known[other]), default=0)
            assert engine.peek(prompt, other) <= most
    outputs += drive(engine)
    for output in outputs:
        reference.require_equal(*asked[output.request_id], output)
        hits += output.cached_tokens
    assert hits > 50 and bool(loads) == bool(engine.host_tier)
    require_own(engine)


def common(one: list[int], other: list[int]) -> int:
    """Tokens in common; all of `one` if the other's reply may go on with it."""
    alike = sum(
        1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    )
    return len(one) if alike == len(other) else alike


@pytest.mark.parametrize("options", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_what_the_host_keeps_is_found_by_its_own_namespace(
    make_engine: MakeEngine, tiny_model: LlamaModel, options: dict[str, Any]
) -> None:
    engine, reply = make_engine(kv_tokens=24, **options), SamplingParams(max_new_tokens=1, ignore_eos=True)
    page, bigram = options["page_size"], options["bigram_keys"]
    for space in "aaabbb":  # two hits each, so that write_through_selective copies it, too
        engine.generate([[*PROMPT, *PROMPT]], reply, extra_key=space)
    (strange,) = engine.generate([[*PROMPT, *PROMPT]], reply, extra_key="c")
    assert strange.cached_tokens == 0
    (known,) = engine.generate([[*PROMPT, *PROMPT]], reply, extra_key="a")
    assert known.cached_tokens == (15 // page * page if engine.host_tier else 0)
    assert engine.cache_manager.loaded_tokens == ((16 - bigram) // page * page if engine.host_tier else 0)
    require_own(engine)


def test_a_pin_holds_in_its_namespace(make_engine: MakeEngine) -> None:
    engine, none = make_engine(kv_tokens=32), SamplingParams(max_new_tokens=0)
    for space in ("a", "b"):
        engine.generate([PROMPT], none, extra_key=space)
    pin, nothing = engine.pin(PROMPT, "a"), engine.pin(PROMPT, "c")
    assert (pin.length, nothing.length) == (8, 0)
    engine.generate([list(range(20, 44))], none)
    assert [engine.peek(PROMPT, space) for space in ("a", "b", "c", None)] == [8, 0, 0, 0]
    engine.unpin(pin)
    engine.unpin(nothing)


def test_who_was_retracted_comes_back_to_its_own(make_engine: MakeEngine, reference: ColdReference) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine = make_engine(kv_tokens=40, max_running=4, new_token_ratio=0.0)
    gone = listen(engine, ev.RequestRetracted)
    for space in ("a", "b", "a", "b"):
        engine.add_request(PROMPT, params, space)
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
        require_own(engine)
    assert gone and len(outputs) == 4
    for output in outputs:
        reference.require_equal(PROMPT, params, output)
