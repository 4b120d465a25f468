"""Who is evicted: each policy's order against brute force, and a queue that never overlooks a leaf."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support import EVICTION_KEYS as KEYS

from minirad.cache.eviction import POLICIES, EvictionQueue, eviction_policy
from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.observe import events as ev


def put(cache: RadixCache, tokens: list[int], first: int = 0, **options: object) -> Node:
    return cache.insert(RadixKey(tokens), range(first, first + len(tokens)), **options).last_node


def match(cache: RadixCache, tokens: list[int]) -> Node:
    return cache.match_prefix(RadixKey(tokens)).last_node


def evicted_ids(cache: RadixCache, num_tokens: int) -> list[int]:
    told: list[int] = []
    stop = cache.bus.subscribe(ev.NodeEvicted, lambda event: told.append(event.node))
    cache.evict(num_tokens)
    stop()
    cache.check()
    return told


# ------------------------------------------------------------------ evict


@pytest.mark.parametrize("page", [1, 2, 4, 16])
def test_evict_frees_at_least_what_was_asked_in_whole_leaves(page: int) -> None:
    cache = RadixCache(page)
    put(cache, list(range(2 * page)))
    put(cache, list(range(100, 100 + 2 * page)), 10 * page)
    result = cache.evict(page + 1)
    assert result.num_tokens == 2 * page and result.slots.tolist() == list(range(2 * page))
    assert result.slots.dtype == np.int64
    assert cache.total_size == cache.evictable_size == 2 * page
    assert cache.evict(3 * page).num_tokens == 2 * page
    assert cache.total_size == 0
    cache.check()


def test_two_leaves_of_two_tokens() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    put(cache, [3, 4], 10)
    result = cache.evict(2)
    assert result.num_tokens >= 2 and len(result.slots) == result.num_tokens
    assert cache.total_size == 4 - result.num_tokens


@pytest.mark.parametrize("page", [1, 4])
def test_evict_on_an_empty_tree(page: int) -> None:
    cache = RadixCache(page)
    result = cache.evict(10)
    assert result.num_tokens == 0 and result.slots.tolist() == [] and result.slots.dtype == np.int64
    assert cache.evict(0).num_tokens == 0


def test_evicting_nothing_takes_nothing() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3])
    assert cache.evict(0).num_tokens == 0 and cache.total_size == 3


def test_a_locked_path_survives() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3, 4])
    locked = match(cache, [1, 2])
    cache.inc_lock_ref(locked)
    assert cache.evict(100).slots.tolist() == [2, 3]
    assert match(cache, [1, 2]) is locked and cache.protected_size == 2
    assert cache.evict(1).num_tokens == 0
    cache.dec_lock_ref(locked)
    assert cache.evict(1).slots.tolist() == [0, 1]
    assert cache.total_size == 0
    cache.check()


def test_lru_keeps_what_was_touched() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    put(cache, [3, 4], 10)
    match(cache, [1, 2])
    assert cache.evict(1).slots.tolist() == [10, 11]
    assert cache.peek(RadixKey([1, 2])) == 2 and cache.peek(RadixKey([3, 4])) == 0


def test_a_peek_keeps_nothing_alive() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    put(cache, [3, 4], 10)
    cache.peek(RadixKey([1, 2]))
    assert cache.evict(1).slots.tolist() == [0, 1]


def test_a_parent_follows_its_last_child() -> None:
    cache = RadixCache()
    lower = put(cache, [1, 2, 3, 4])
    upper = match(cache, [1, 2])
    assert evicted_ids(cache, 4) == [lower.id, upper.id]
    assert cache.total_size == 0


def test_a_parent_does_not_go_before_its_last_child() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    young = [put(cache, [1, 2, token], 10 * token) for token in (5, 6, 7)]
    cache.inc_lock_ref(young[1])
    assert evicted_ids(cache, 100) == [young[0].id, young[2].id]
    assert cache.total_size == cache.protected_size == 3


def test_a_node_above_a_lock_may_go_once_unlocked_and_bare() -> None:
    """The lock sits on the parent; its child goes first, the parent only after the unlock."""
    cache = RadixCache()
    parent = put(cache, [1])
    child = put(cache, [1, 2])
    cache.inc_lock_ref(parent)
    assert evicted_ids(cache, 100) == [child.id]
    cache.dec_lock_ref(parent)
    assert evicted_ids(cache, 100) == [parent.id]


def test_evicted_slots_come_in_order_of_the_victims() -> None:
    cache = RadixCache()
    for number in range(4):
        put(cache, [number, number], 10 * number)
    match(cache, [1, 1])
    assert cache.evict(8).slots.tolist() == [0, 1, 20, 21, 30, 31, 10, 11]


def test_the_event_names_reason_and_runner_up() -> None:
    cache = RadixCache()
    first, second = put(cache, [1, 2]), put(cache, [3, 4], 10)
    told: list[ev.NodeEvicted] = []
    cache.bus.subscribe(ev.NodeEvicted, told.append)
    cache.evict(4)
    assert [(e.node, e.runner_up) for e in told] == [(first.id, second.id), (second.id, None)]
    assert told[0].policy == "lru" and told[0].slots == (0, 1) and told[0].parent == 0
    assert told[0].describe() == (
        f"n{first.id} evicted, 2 slots freed: oldest unlocked leaf (last used at tick 1), "
        f"next would be n{second.id}"
    )
    assert "next" not in told[1].describe()


# ------------------------------------------------------------------ policies


def planted(policy: str) -> tuple[RadixCache, dict[str, int]]:
    """Leaves a, b, c, d: created in that order, used so that every policy has its own opinion."""
    cache = RadixCache(1, policy)
    names = {}
    for number, (name, priority) in enumerate([("a", 2), ("b", 0), ("c", 1), ("d", 0)]):
        names[put(cache, [number], number, priority=priority).id] = name
    for token in (0, 0, 2, 2, 1, 0):  # hits: a 3, b 1, c 2, d 0; last used: d, c, b, a
        match(cache, [token])
    return cache, names


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "dcba"), ("lfu", "dbca"), ("fifo", "abcd"), ("mru", "abcd"), ("filo", "dcba"),
        ("priority", "dbca"), ("slru", "dbca"),
        ("brrip", "dbca"),
    ],
)  # fmt: skip
def test_the_order_of_each_policy(policy: str, order: str) -> None:
    cache, names = planted(policy)
    assert cache.eviction_policy == policy
    assert "".join(names[number] for number in evicted_ids(cache, 4)) == order


def test_a_later_priority_counts() -> None:
    cache, names = planted("priority")
    put(cache, [3], 3, priority=9)
    assert "".join(names[number] for number in evicted_ids(cache, 4)) == "bcad"


@pytest.mark.parametrize("policy", POLICIES)
def test_ties_go_by_node_id(policy: str) -> None:
    cache = RadixCache(1, policy)
    nodes = [put(cache, [number], number) for number in range(9)]
    for node in nodes:  # cannot happen by itself: one tick ends at one leaf
        node.last_access = node.created = 1
    cache.eviction_policy = policy
    assert evicted_ids(cache, 9) == [node.id for node in nodes]


@pytest.mark.parametrize("old", POLICIES)
@pytest.mark.parametrize("new", POLICIES)
def test_changing_the_policy_counts_from_then_on(old: str, new: str) -> None:
    changed, _ = planted(old)
    told: list[ev.Event] = []
    changed.bus.subscribe(ev.PolicyChanged, told.append)
    changed.eviction_policy = new
    changed.check()
    assert told == [ev.PolicyChanged(old, new)]
    straight, _ = planted(new)
    assert evicted_ids(changed, 4) == evicted_ids(straight, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_reasons_are_words_with_the_numbers_in(policy: str) -> None:
    node = put(RadixCache(), [1])
    node.last_access, node.created, node.hits, node.priority = 41, 42, 43, 44
    reason = eviction_policy(policy).reason(node)
    assert "unlocked leaf" in reason
    numbers = {
        "lru": "41",
        "lfu": "43",
        "fifo": "42",
        "mru": "41",
        "filo": "42",
        "priority": "44",
        "slru": "43",
        "brrip": "43",
    }
    assert numbers[policy] in reason


def test_the_policies() -> None:
    assert sorted(POLICIES) == sorted(KEYS)
    for name, key in KEYS.items():
        policy = eviction_policy(name)
        low, high = (put(RadixCache(), [1]) for _ in range(2))
        low.last_access, high.last_access, low.created, high.created = 3, 4, 8, 9
        assert (policy.key(low) < policy.key(high)) == (key(low) < key(high))
    with pytest.raises(ValueError, match="unknown eviction policy 'LRU'; known: lru, lfu"):
        eviction_policy("LRU")


# ------------------------------------------------------------------ the queue


@dataclass(eq=False)
class FakeLeaf:
    """What the queue may look at, free to be set at will."""

    id: int
    last_access: int = 0
    created: int = 0
    hits: int = 0
    priority: int = 0
    lock_ref: int = 0
    queued: Any = None
    alive: bool = field(default=True)

    @property
    def evictable(self) -> bool:
        return self.alive and self.lock_ref == 0


def touch_at_random(rng: np.random.Generator, leaf: FakeLeaf, tick: int) -> None:
    leaf.last_access = tick
    leaf.hits += int(rng.integers(0, 2))
    leaf.priority = max(leaf.priority, int(rng.integers(0, 6)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_queue_against_brute_force(policy: str) -> None:
    """Thousands of touches, locks and pops; the offers are exactly those that the tree makes."""
    rng = np.random.default_rng(5)
    queue = EvictionQueue(eviction_policy(policy))
    leaves: dict[int, FakeLeaf] = {}
    for tick in range(4000):
        what, chosen = rng.random(), int(rng.integers(0, 1 << 30))
        some = list(leaves.values())[chosen % len(leaves)] if leaves else None
        if what < 0.15 or some is None:
            leaf = leaves[tick] = FakeLeaf(tick, last_access=tick, created=tick)
            queue.offer(leaf)
        elif what < 0.7:
            touch_at_random(rng, some, tick)
            queue.offer(some)
        elif what < 0.8:
            some.lock_ref += 1
        elif what < 0.9:
            some.lock_ref = max(some.lock_ref - 1, 0)
            queue.offer(some)
        else:
            free = [leaf for leaf in leaves.values() if leaf.evictable]
            expected = min(free, key=lambda n: (KEYS[policy](n), n.id)) if free else None
            assert queue.peek() is expected
            assert queue.pop() is expected
            if expected is not None:
                expected.alive = False
                del leaves[expected.id]
    assert len(queue._heap) < 4 * len(leaves) + 200


def test_superseded_entries_do_not_pile_up() -> None:
    """Under mru every touch makes a key smaller, so each leaves a useless entry behind."""
    queue = EvictionQueue(eviction_policy("mru"))
    leaves = [FakeLeaf(number) for number in range(10)]
    for tick in range(10_000):
        leaf = leaves[tick % 10]
        leaf.last_access = tick
        queue.offer(leaf)
        assert len(queue._heap) <= 10 + 64 + 64 + 10
    assert [queue.pop().id for _ in range(10)] == list(range(9, -1, -1))
    assert queue.pop() is None and len(queue._heap) == 0


def test_hits_cost_the_lru_queue_nothing() -> None:
    queue = EvictionQueue(eviction_policy("lru"))
    leaves = [FakeLeaf(number) for number in range(10)]
    for tick in range(1000):
        leaf = leaves[tick % 10]
        leaf.last_access = tick
        queue.offer(leaf)
    assert len(queue._heap) == 10


def test_what_is_not_evictable_is_not_queued() -> None:
    queue = EvictionQueue(eviction_policy("lru"))
    queue.offer(FakeLeaf(1, lock_ref=1))
    assert len(queue._heap) == 0 and queue.peek() is None and queue.pop() is None
    later = FakeLeaf(2)
    queue.offer(later)
    later.lock_ref = 1
    assert queue.pop() is None and later.queued is None
    later.lock_ref = 0
    queue.offer(later)
    assert queue.peek() is later and queue.pop() is later


def test_rebuild_starts_anew() -> None:
    queue = EvictionQueue(eviction_policy("lru"))
    gone, old, new = FakeLeaf(1), FakeLeaf(2, last_access=5), FakeLeaf(3, last_access=9)
    for leaf in (gone, old, new):
        queue.offer(leaf)
    queue.rebuild(eviction_policy("mru"), [old, new, FakeLeaf(4, lock_ref=1)])
    assert [queue.pop(), queue.pop(), queue.pop()] == [new, old, None]


BROKEN = {  # by what is wrong with a key
    "raises": lambda node: 1 // (node.id != 2),
    "is of another kind": lambda node: "two" if node.id == 2 else node.id,
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_policy_that_cannot_order_the_leaves_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Neither the policy nor who is queued: all keys are had before anything is changed."""
    monkeypatch.setitem(POLICIES, "own", replace(POLICIES["fifo"], name="own", key=BROKEN[wrong]))
    cache = RadixCache()
    for number in range(5):
        put(cache, [number], number)
    match(cache, [0])
    heard: list[ev.Event] = []
    cache.bus.subscribe(None, heard.append)
    with pytest.raises((ZeroDivisionError, TypeError)):
        cache.eviction_policy = "own"
    assert cache.eviction_policy == "lru" and not heard
    assert evicted_ids(cache, 5) == [2, 3, 4, 5, 1]


def test_one_eviction_does_not_walk_the_tree() -> None:
    """Policy keys are asked for a handful of leaves per victim, however many there are."""
    cache = RadixCache()
    for number in range(2000):
        put(cache, [number], number)
    policy, asked = cache._queue.policy, []
    counted = lambda node: (asked.append(node.id), policy.key(node))[1]  # noqa: E731
    cache._queue.policy = replace(policy, key=counted)
    cache.evict(10)
    assert len(asked) <= 40
