"""KV events: what a router rebuilds from them is what the tree holds, in every tier, after every step."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import LateCopier

from minirad import RadixCache, RadixKey
from minirad.cache.hiradix_cache import HOST_WRITE, HiRadixCache, HostNode
from minirad.cache.kv_events import (
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
)
from minirad.config import SamplingParams
from minirad.engine import Engine

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
            (_extra_keys(node.namespace), tuple(before + own[: end + size]))
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


def test_old_weights_are_removed_once_and_their_eviction_says_nothing_more() -> None:
    cache, heard = streamed()
    put(cache, [1, 2])
    cache.bump_version()
    stored, removed = heard
    assert isinstance(stored, BlockStored) and removed == BlockRemoved(stored.block_hashes)
    put(cache, [1, 2], 200)  # computed by the new weights: a block of the same name, and of other KV
    cache.evict(2)  # the old one goes first
    assert len(heard) == 3 and cache.peek(RadixKey([1, 2])) == 2


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


def test_pairs_are_told_as_pairs() -> None:
    cache, heard = streamed(2)
    cache.insert(RadixKey([1, 2, 3, 4, 5], is_bigram=True), [10, 11, 12, 13])
    (event,) = heard
    assert isinstance(event, BlockStored)
    assert event.token_ids == (1, 2, 2, 3, 3, 4, 4, 5) and len(event.block_hashes) == 2


def test_hashes_are_the_same_in_every_process() -> None:
    code = "from minirad.cache.kv_events import block_hash; print(block_hash(b'', b'abcd'))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{block_hash(b'', b'abcd')}\n"}


def test_an_event_as_the_engines_send_it() -> None:
    cache, heard = streamed()
    put(cache, [7])
    sent = json.loads(json.dumps(as_dict(heard[0])))
    assert sent["type"] == "BlockStored" and sent["token_ids"] == [7] and "lora_id" not in sent
    assert sent["block_hashes"] == list(heard[0].block_hashes)  # type: ignore[union-attr]
    assert as_dict(AllBlocksCleared()) == {"type": "AllBlocksCleared"}


def test_a_stream_begins_with_an_empty_tree() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    with pytest.raises(ValueError, match="holds 2 tokens already"):
        KVEventStream(cache, print)


def test_a_closed_stream_is_silent() -> None:
    cache, heard = RadixCache(), []
    stream = KVEventStream(cache, heard.append)
    stream.close()
    put(cache, [1, 2])
    assert heard == []


# ---------------------------------------------------------------------- the whole story

WAYS = [
    {"page_size": page, **tier, "bigram_keys": bigram}
    for page in (1, 2, 4)
    for tier in ({}, *({"host_kv_tokens": 48, "host_write": write} for write in HOST_WRITE))
    for bigram in (False, True)
]


@pytest.mark.parametrize("options", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_what_a_router_rebuilds_is_what_the_tree_holds(
    make_engine: MakeEngine, tiny_model: Any, options: dict[str, Any]
) -> None:
    rng = random.Random(str(options))
    engine = make_engine(**options, load_back_threshold=1)
    cache: Any = engine.cache
    if isinstance(cache, HiRadixCache):
        cache.copier = LateCopier(cache.copier, 5)
    table, heard = BlockTable(), []
    KVEventStream(cache, lambda event: (heard.append(type(event)), table.take(event)))
    for turn in range(60):
        prompt = [rng.choice([5, 6]) for _ in range(rng.randrange(1, 24))]
        engine.add_request(
            prompt, SamplingParams(max_new_tokens=rng.randrange(6)), rng.choice([None, None, "x"])
        )
        for _ in range(rng.randrange(4)):
            engine.step()
            require_same(table, cache)
        if turn == 40:
            engine.update_weights(tiny_model)
            require_same(table, cache)
    while engine.has_work:
        engine.step()
        require_same(table, cache)
    assert {BlockStored, BlockRemoved} <= set(heard)
    engine.flush_cache()
    require_same(table, cache)
    assert table.prefixes(GPU) == set()


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
