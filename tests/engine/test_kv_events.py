"""KV events: what a router rebuilds from them is what the tree holds, in every tier, after every step."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import LateCopier, one_slow

from minirad import RadixCache, RadixKey
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.observe import events as ev
from minirad.observe.kv_events import (
    CPU,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    BlockTable,
    KVEvent,
    KVEventStream,
    _extra_keys,
    as_dict,
    block_hash,
    from_dict,
    rebuild,
)
from minirad.tiers.hiradix_cache import HOST_WRITE, HiRadixCache, HostNode

MakeEngine = Callable[..., Engine]


def streamed(page_size: int = 1, **options: Any) -> tuple[RadixCache, list[KVEvent]]:
    cache = RadixCache(page_size)
    heard: list[KVEvent] = []
    KVEventStream(cache, heard.append, **options)
    return cache, heard


def put(cache: RadixCache, tokens: list[int], at: int = 100, extra_key: Any = None) -> Any:
    return cache.insert(RadixKey(tokens, extra_key), range(at, at + len(tokens)))


def held(cache: RadixCache) -> dict[str, set[Any]]:
    """(namespace, all tokens up to a block's end) of every block, per medium, read from the tree itself."""
    found: dict[str, set[Any]] = {GPU: set(), CPU: set()}
    for node in cache.walk():
        if node is cache.root or len(node.namespace) == 3:
            continue
        above = reversed(cache.path_up(node)[1:])
        before = [token for step in above for token in step.key.tokens.reshape(-1).tolist()]
        own, ids = node.key.tokens.reshape(-1).tolist(), 2 if node.key.is_bigram else 1
        size = cache.page_size * ids
        names = {
            (_extra_keys(*node.namespace), tuple(before + own[: end + size]))
            for end in range(0, len(own), size)
        }
        if node.packed:
            found[GPU] |= names
        if isinstance(node, HostNode) and node.backed_up:
            found[CPU] |= names
    return found


def require_same(table: BlockTable, cache: RadixCache) -> None:
    tree = held(cache)
    assert {medium: table.prefixes(medium) for medium in tree} == tree


# ---------------------------------------------------------------------- one by one


def test_a_first_insert_stores_its_blocks() -> None:
    cache, heard = streamed(2)
    put(cache, [1, 2, 3, 4, 5])
    (event,) = heard
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None and event.token_ids == (1, 2, 3, 4)
    assert event.block_size == 2 and event.medium == GPU and len(event.block_hashes) == 2
    assert event.lora_id is None and event.extra_keys is None


def test_equal_tokens_at_another_place_are_another_block() -> None:
    cache, heard = streamed(4)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 3, 4, 1, 2, 3, 4], 200)
    first, second = heard
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert first.parent_block_hash is None and second.parent_block_hash == first.block_hashes[0]
    assert first.token_ids == second.token_ids and first.block_hashes != second.block_hashes


def test_a_split_says_nothing_and_the_new_store_hangs_below_the_upper_half() -> None:
    cache, heard = streamed(2)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6], 200)
    first, second = heard
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0] and second.token_ids == (5, 6)
    assert cache.evict(2).num_tokens == 2
    assert heard[2] == BlockRemoved((first.block_hashes[1],))


def test_a_hit_without_new_data_says_nothing() -> None:
    cache, heard = streamed()
    put(cache, [1, 2, 3])
    del heard[:]
    put(cache, [1, 2, 3], 200)
    cache.match_prefix(RadixKey([1, 2, 9]))
    assert heard == []


def test_growth_goes_on_from_the_last_block() -> None:
    cache, heard = streamed(2)
    leaf = put(cache, [1, 2]).last_node
    cache.insert(RadixKey([1, 2, 3, 4]), [100, 101, 102, 103], grow=leaf)
    first, second = heard
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0] and second.token_ids == (3, 4)


def test_what_is_removed_was_stored() -> None:
    cache, heard = streamed()
    put(cache, [1, 2, 3])
    cache.evict(3)
    stored, removed = heard
    assert isinstance(stored, BlockStored)
    assert removed == BlockRemoved(stored.block_hashes)


def test_a_flush_clears_everything() -> None:
    cache, heard = streamed()
    put(cache, [1, 2])
    cache.reset()
    assert heard[-1] == AllBlocksCleared()
    put(cache, [1, 2], 7)
    assert isinstance(heard[-1], BlockStored) and heard[-1].block_hashes == heard[0].block_hashes


def test_new_weights_clear_everything_and_the_eviction_of_the_old_says_nothing_more() -> None:
    cache, heard = streamed()
    put(cache, [1, 2])
    cache.bump_version()
    stored, cleared = heard
    assert isinstance(stored, BlockStored) and cleared == AllBlocksCleared()
    put(cache, [1, 2], 200)  # computed by the new weights: a block of the same name, and of other KV
    assert heard[2] == stored
    cache.evict(2)  # the old one goes first
    assert len(heard) == 3 and cache.peek(RadixKey([1, 2])) == 2
    cache.evict(2)
    assert heard[3:] == [BlockRemoved(stored.block_hashes)]


def test_a_copy_that_ends_after_new_weights_came_says_nothing() -> None:
    cache, heard = HiRadixCache(host_tokens=8), []
    cache.copier = LateCopier(cache.copier, 0, failing=0)
    KVEventStream(cache, heard.append)
    cache.seal(put(cache, [1, 2]).last_node)  # its copy is under way
    cache.bump_version()
    del heard[:]
    cache.poll(wait=True)
    assert cache.host_size == 2 and heard == []
    cache.evict(2)
    cache.check()
    assert heard == []


@pytest.mark.parametrize(
    ("one", "other"), [("1", 1), (("bc", "a"), ("c", "ab")), (None, "None"), ("a", ("a",)), (None, "")]
)
def test_namespaces_have_hashes_of_their_own(one: Any, other: Any) -> None:
    cache, heard = streamed()
    put(cache, [1, 2], 100, one)
    put(cache, [1, 2], 200, other)
    first, second = heard
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert not set(first.block_hashes) & set(second.block_hashes)
    assert (first.extra_keys or ((),))[0] != (second.extra_keys or ((),))[0]
    for event, extra_key in ((first, one), (second, other)):
        assert event.lora_name == (extra_key if isinstance(extra_key, str) else None)


class Tenant:
    """Values that look alike and are not equal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "Tenant"


def test_namespaces_that_look_alike_are_told_apart() -> None:
    cache, heard = streamed()
    for number in range(3):
        put(cache, [1, 2], 100 * number + 100, Tenant(number))
    names = {name for event in heard if isinstance(event, BlockStored) for name in event.block_hashes}
    assert len(names) == 6
    cache.evict(2)
    assert len(rebuild(heard).prefixes(GPU)) == 4


def test_the_same_namespace_has_the_same_hashes_whoever_came_before() -> None:
    (one, first), (other, second) = streamed(), streamed()
    put(one, [1, 2], extra_key="b")
    for key in ("a", "b"):
        put(other, [1, 2], ord(key), extra_key=key)
    assert first[0] == second[1]


def test_pairs_are_told_as_pairs() -> None:
    cache, heard = streamed(2)
    cache.insert(RadixKey([1, 2, 3, 4, 5], is_bigram=True), [10, 11, 12, 13])
    (event,) = heard
    assert isinstance(event, BlockStored)
    assert event.token_ids == (1, 2, 2, 3, 3, 4, 4, 5) and len(event.block_hashes) == 2


SAID_ELSEWHERE = """
from minirad import RadixCache, RadixKey
from minirad.observe.kv_events import KVEventStream, block_hash
print(block_hash(b"", b"abcd"))
cache = RadixCache(2)
KVEventStream(cache, print)
cache.insert(RadixKey([1, 2, 3, 4], ("lora", frozenset({"a", "b", "c", 5}))), range(8, 12))
"""


def test_hashes_are_the_same_in_every_process() -> None:
    command = [sys.executable, "-c", SAID_ELSEWHERE]
    runs = {
        subprocess.run(command, capture_output=True, text=True, check=True, env=here).stdout
        for here in ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2", "3"))
    }
    (said,) = runs
    assert said.startswith(f"{block_hash(b'', b'abcd')}\nBlockStored(block_hashes=(")


def test_an_event_as_the_engines_send_it() -> None:
    cache, heard = streamed()
    put(cache, [7])
    put(cache, [7, 8], 200, "adapter")
    cache.evict(3)
    cache.reset()
    plain = as_dict(heard[0])
    # What has no default there is sent also if it is None.
    assert list(plain) == [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size",
        "lora_id", "medium", "lora_name",
    ]  # fmt: skip
    assert plain["type"] == "BlockStored" and plain["token_ids"] == (7,) and plain["lora_name"] is None
    named = as_dict(heard[1])
    assert named["lora_name"] == "adapter" and named["extra_keys"] == (("str:'adapter'",),) * 2
    assert as_dict(AllBlocksCleared()) == {"type": "AllBlocksCleared"}
    assert [from_dict(json.loads(json.dumps(as_dict(event)))) for event in heard] == heard


@pytest.mark.parametrize("sent", [{}, {"type": "BlockMoved"}, {"type": "BlockRemoved", "size": 3}])
def test_what_is_no_event_is_named(sent: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no KV event: "):
        from_dict(sent)


def test_a_stream_begins_with_what_is_there() -> None:
    cache, heard = RadixCache(2), []
    put(cache, [1, 2, 3, 4])
    cache.bump_version()  # of old weights: never told
    put(cache, [1, 2, 3, 4], 200, "x")
    put(cache, [1, 2, 5, 6], 300, "x")
    KVEventStream(cache, heard.append)
    assert [event.token_ids for event in heard] == [(1, 2), (3, 4), (5, 6)]
    assert {event.lora_name for event in heard} == {"x"}
    cache.evict(4)
    assert len(heard) == 3
    cache.evict(2)
    assert heard[3] == BlockRemoved(heard[1].block_hashes)


def test_a_stream_begins_with_what_lies_on_the_host() -> None:
    tiers, heard = HiRadixCache(host_tokens=8), []
    tiers.seal(put(tiers, [1, 2]).last_node)
    tiers.poll(wait=True)
    tiers.evict(2)
    tiers.copier = LateCopier(tiers.copier, 0, failing=0)
    tiers.seal(put(tiers, [5, 6]).last_node)  # its copy is under way
    KVEventStream(tiers, heard.append)
    assert [(event.medium, event.token_ids) for event in heard] == [(CPU, (1, 2)), (GPU, (5, 6))]
    tiers.poll(wait=True)
    assert [(event.medium, event.token_ids) for event in heard[2:]] == [(CPU, (5, 6))]


def test_a_closed_stream_is_silent() -> None:
    cache, heard = RadixCache(), []
    stream = KVEventStream(cache, heard.append)
    assert cache.bus.wants(ev.NodeInserted) and not cache.bus.wants(ev.NodeLocked)
    stream.close()
    stream.close()
    put(cache, [1, 2])
    assert heard == [] and not cache.bus.wants(ev.NodeInserted)


# ---------------------------------------------------------------------- the whole story


class Router:
    """Holds every event to what came before it, and reads it from JSON as a router would."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.heard: list[KVEvent] = []
        self.parents: dict[str, dict[int, int | None]] = {GPU: {}, CPU: {}}

    def take(self, event: KVEvent) -> None:
        sent = from_dict(json.loads(json.dumps(as_dict(event))))
        self.heard.append(sent)
        self.table.take(sent)
        if isinstance(sent, BlockStored):
            self._stored(sent)
        elif isinstance(sent, BlockRemoved):
            for name in sent.block_hashes:
                del self.parents[sent.medium][name]
            left = self.parents[GPU].keys() | self.parents[CPU].keys()
            for medium in self.parents.values():
                assert {parent for parent in medium.values() if parent is not None} <= left, "orphans"
        else:
            self.parents = {GPU: {}, CPU: {}}

    def _stored(self, event: BlockStored) -> None:
        before = event.parent_block_hash
        for name in event.block_hashes:
            assert name not in self.parents[event.medium], "stored twice"
            assert before is None or any(before in medium for medium in self.parents.values())
            self.parents[event.medium][name] = before
            before = name


TIERS: list[dict[str, Any]] = [{}, *({"host_kv_tokens": 48, "host_write": write} for write in HOST_WRITE)]
# Every page size with every tier; pairs of tokens by turns, so that each page size and each tier has both.
WAYS = [
    {"page_size": page, **tier, "bigram_keys": (page // 2 + at) % 2 == 1}
    for page in (1, 2, 4)
    for at, tier in enumerate(TIERS)
]


def whole_story(engine: Engine, model: Any, turns: int) -> Router:
    """Requests come, run, are aborted, weights change, prefixes are pinned, the tree is flushed."""
    rng = random.Random(str(engine.config))
    cache: Any = engine.cache
    if isinstance(cache, HiRadixCache):
        cache.copier = LateCopier(cache.copier, 5)
    router, pins = Router(), []
    KVEventStream(cache, router.take)
    for turn in range(turns):
        prompt = [rng.choice([5, 6]) for _ in range(rng.randrange(1, 24))]
        params = SamplingParams(max_new_tokens=rng.randrange(6), n=rng.choice([1, 1, 2]))
        rid = engine.add_request(prompt, params, rng.choice([None, None, "x", ("x",)]), rng.randrange(2))
        for _ in range(rng.randrange(4)):
            engine.step()
            require_same(router.table, cache)
        if turn % 7 == 3:
            engine.abort(rid)
        if turn % 10 == 5:
            pins.append(engine.pin(prompt[:6]))
        elif turn % 10 == 8:
            engine.unpin(pins.pop())
        if turn % 25 == 20:
            engine.update_weights(model)
            assert all(not router.table.prefixes(medium) for medium in (GPU, CPU))
        require_same(router.table, cache)
    while engine.has_work:
        engine.step()
        require_same(router.table, cache)
    engine.flush_cache()
    require_same(router.table, cache)
    assert rebuild(router.heard).prefixes(GPU) == set()
    return router


@pytest.mark.parametrize("options", one_slow(3, WAYS), ids=lambda way: "-".join(map(str, way.values())))
def test_what_a_router_rebuilds_is_what_the_tree_holds(
    make_engine: MakeEngine, tiny_model: Any, options: dict[str, Any]
) -> None:
    threshold = 1 if options["page_size"] < 4 else 8  # what is not loaded back is computed again, and adopted
    router = whole_story(make_engine(**options, load_back_threshold=threshold), tiny_model, 60)
    kinds = {type(event) for event in router.heard}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}


def random_tree(write: str | None, page: int, seed: int) -> None:
    """A bare tree, without an engine's discipline: keys of any kind, growth, new policies, resets."""
    rng = random.Random(f"{write} {page} {seed}")
    tiers = HiRadixCache(page, host_tokens=12, host_write=write) if write else None
    cache: Any = tiers or RadixCache(page)
    if tiers is not None:
        tiers.copier = LateCopier(tiers.copier, seed)
    router, fresh, mine = Router(), page, None
    tokens: list[int] = []
    late = rng.choice([0, 0, 50, 100])  # what is there by then is told first
    for turn in range(150):
        if turn == late:
            KVEventStream(cache, router.take)
        begin = tokens if rng.random() < 0.3 and len(tokens) < 12 else []
        tokens = begin + [rng.choice([1, 1, 1, 1, 2]) for _ in range(rng.randrange(12 - len(begin)))]
        key = RadixKey(tokens, rng.choice([None, None, None, "x", ("x", 1)]), rng.random() < 0.2)
        what = rng.choices(["insert", "match", "evict", "load", "rare"], [10, 8, 6, 8, 1])[0]
        if what == "insert":
            slots = range(fresh, fresh + len(key))
            fresh += len(key) // page * page + page
            mine = cache.insert(key, slots, rng.randrange(3), grow=mine).last_node
            if tiers is not None and rng.random() < 0.8:
                tiers.seal(mine)
        elif what == "match":
            cache.match_prefix(key)
        elif what == "evict":
            cache.evict(rng.randrange(8))
        elif what == "load" and tiers is not None:
            match = tiers.match_prefix(key)
            if match.host_length:
                chain = tiers.hold_host(match)
                tiers.load_back(chain, range(fresh, fresh + match.host_length))
                tiers.release_host(chain)
                fresh += match.host_length
            tiers.poll()
        elif what == "rare":
            rng.choice([cache.bump_version, cache.reset, lambda: setattr(cache, "eviction_policy", "mru")])()
            mine = None
        cache.check()
        if turn >= late:
            require_same(router.table, cache)


@pytest.mark.parametrize("write", [None, *HOST_WRITE])
@pytest.mark.parametrize("page", [1, 2])
def test_a_tree_of_its_own_is_rebuilt_as_well(write: str | None, page: int) -> None:
    for seed in range(4):
        random_tree(write, page, seed)


@pytest.mark.parametrize(
    "kind",
    [
        ev.NodeInserted, ev.NodeGrown, ev.NodeSplit, ev.NodeEvicted, ev.NodeDemoted, ev.HostEvicted,
        ev.BackupEnded, ev.LoadStarted, ev.NodeAdopted, ev.VersionBumped, ev.CacheFlushed,
    ],
)  # fmt: skip
@pytest.mark.parametrize("write", HOST_WRITE)
def test_a_stream_that_overhears_an_event_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: Any, write: str
) -> None:
    monkeypatch.setattr(kind, "to_blocks", lambda event, stream: None)
    with pytest.raises((AssertionError, LookupError)):
        for page, seed in itertools.product((1, 2), range(4)):
            random_tree(write, page, seed)


def test_a_hash_is_no_identity(make_engine: MakeEngine) -> None:
    """With one hash for everything a router is lost; the engine's answers are what they were."""
    prompts = [[5, 6, 7, 8], [5, 6, 9, 8], [8, 7, 6, 5], [5, 6, 7, 9]]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    expected = [out.token_ids for out in make_engine(radix_cache=False).generate(prompts, params)]
    engine, heard = make_engine(), []
    KVEventStream(engine.cache, heard.append, hash_block=lambda before, tokens: 7)  # type: ignore[arg-type]
    found = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert found == expected
    assert {name for event in heard if isinstance(event, BlockStored) for name in event.block_hashes} == {7}


# ---------------------------------------------------------------------- what others send

SENT: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": [5, 6, 7, 8],
    "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "sent",
    [
        {**SENT, "extra_keys": [None, None]},
        {**SENT, "group_idx": 0},
        {**SENT, "block_hashes": "ab"},
        ["BlockStored", [11], None, [5, 6], 2, None, "GPU"],
        {**SENT, "block_size": 0},
        {**SENT, "token_ids": [5]},
        {**SENT, "parent_block_hash": [1]},
        {**SENT, "medium": ["GPU"]},
        {**SENT, "type": ["BlockStored"]},
        {**SENT, "extra_keys": [["a"]]},
        {**SENT, "token_ids": [[5], 6, 7, 8]},
        None,
        "BlockStored",
        {},
        {"type": 1},
        {"type": "BlockStored"},
        {"type": "BlockRemoved", "block_hashes": 11},
        {"type": "AllBlocksCleared", "x": 1},
    ],
)
def test_what_is_no_event_of_ours_is_a_value_error(sent: Any) -> None:
    with pytest.raises(ValueError, match="no KV event"):
        from_dict(sent)


def test_a_table_that_hears_of_half_of_it_says_so() -> None:
    late = rebuild([from_dict({**SENT, "parent_block_hash": 9})])
    with pytest.raises(ValueError, match=r"block 1[12] stands behind block 9, which was never stored"):
        late.prefixes("GPU")
    circle = rebuild([from_dict({**SENT, "parent_block_hash": 12})])
    with pytest.raises(ValueError, match="stands behind itself"):
        circle.prefixes("GPU")
    assert rebuild([from_dict({**SENT, "block_hashes": [], "token_ids": []})]).prefixes("GPU") == set()
    table = rebuild([from_dict(SENT)])
    for medium, name in (("GPU", 13), ("CPU", 11)):
        with pytest.raises(ValueError, match=f"block {name} is removed from {medium}, but it is not there"):
            table.take(from_dict({"type": "BlockRemoved", "block_hashes": [11, name], "medium": medium}))
    assert {tokens for _, tokens in table.prefixes("GPU")} == {(5, 6), (5, 6, 7, 8)}
