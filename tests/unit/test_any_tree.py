"""cache/any_tree.py: trees of a caller's own: what they lack is left out, no look of theirs is kept."""

from __future__ import annotations

from typing import Any

import pytest
from support import PlainCache

from minirad import Engine, EngineConfig, RadixCache, RadixKey, SamplingParams
from minirad.cache.any_tree import adapted
from minirad.cache.radix_cache import EvictResult, InsertResult
from minirad.model.llama import LlamaModel
from minirad.tiers.hiradix_cache import HiRadixCache


class OwnEvict(RadixCache):
    """Takes leaves out by hand, and counts no change."""

    def evict(self, num_tokens: int) -> EvictResult:
        freed: list[int] = []
        while len(freed) < num_tokens and (victim := self._queue.pop()) is not None:
            del victim.parent.children[victim.first]
            self._queue.offer(victim.parent)
            victim.parent = None
            self.evictable_size -= len(victim)
            freed += victim.slots.tolist()
        return EvictResult(len(freed), RadixKey(freed).tokens)


class OwnFind(RadixCache):
    def find(self, key: RadixKey) -> int:  # type: ignore[override]
        return -1


class OwnLockCost(RadixCache):
    def lock_cost(self, key: RadixKey) -> int:
        return super().lock_cost(RadixKey(key.tokens))


class OwnInsert(RadixCache):
    def insert(self, key: RadixKey, slots: Any) -> InsertResult:  # type: ignore[override]
        return super().insert(key, slots)


class OwnChanges(RadixCache):
    def __init__(self) -> None:
        super().__init__()
        self.changes: list[str] = []


TREES = [OwnEvict, OwnFind, OwnLockCost, OwnInsert, OwnChanges, RadixCache, lambda: PlainCache(1)]


@pytest.mark.parametrize("make", TREES, ids=lambda make: make.__name__)
def test_an_engine_serves_on_it_under_pressure(tiny_model: LlamaModel, make: Any) -> None:
    config = EngineConfig(kv_tokens=40, max_running=3, chunk_tokens=7, device="cpu", poison_freed=True)
    engines = [Engine(config, make(), model=tiny_model), Engine(config, model=tiny_model)]
    said = []
    for engine in engines:
        prompts = [[5 + at % 4, *range(6, 14), 20 + at, *range(7)] for at in range(8)]
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=5, ignore_eos=True))
        finished = []
        while engine.has_work:
            finished += engine.step().finished
            engine.check()
        said.append(sorted((out.request_id, out.token_ids) for out in finished))
    assert said[0] == said[1] and len(said[0]) == 8


def test_ours_are_taken_as_they_are() -> None:
    for tree in (RadixCache(), HiRadixCache(host_tokens=4), OwnLockCost(), OwnChanges()):
        assert adapted(tree) is tree


def test_no_look_is_kept_where_a_change_is_not_counted() -> None:
    tree, key = OwnEvict(), RadixKey([1, 2, 3])
    manager = adapted(tree)
    tree.insert(key, [7, 8, 9])
    found = manager.find(key)
    assert (found.length, found.cost) == (3, 3)
    tree.evict(3)
    assert manager.find(key, found).length == 0
    assert manager.match_prefix(key, found=found).length == 0


def test_the_look_of_another_tree_is_none_of_this_one() -> None:
    one, other, key = RadixCache(), RadixCache(), RadixKey([5])
    one.insert(key, [3])
    other.insert(key, [9])
    match = other.match_prefix(key, found=one.find(key))
    assert match.slots.tolist() == [9] and other.inc_lock_ref(match.last_node) == 1
