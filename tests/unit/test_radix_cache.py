"""The radix tree by itself: what matches, what is split, what is locked, and what leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest

from minirad.cache.radix_cache import InsertResult, MatchResult, Node, RadixCache, RadixKey, as_int64
from minirad.errors import InvariantError
from minirad.observe import events as ev

PAGES = (1, 2, 4, 16)
A, B, C, D, E = 11, 12, 13, 14, 15


def put(cache: RadixCache, tokens: list[int], first: int = 0, **options: object) -> InsertResult:
    """Inserts tokens with the slots first, first+1, ... (`first` begins a page in paged caches)."""
    key = RadixKey(tokens, options.pop("extra_key", None))
    return cache.insert(key, range(first, first + len(tokens)), **options)


def match(cache: RadixCache, tokens: list[int], extra_key: object = None) -> MatchResult:
    return cache.match_prefix(RadixKey(tokens, extra_key))


def sizes(cache: RadixCache) -> tuple[int, int, int]:
    return cache.evictable_size, cache.protected_size, cache.total_size


def by_id(cache: RadixCache) -> dict[int, Node]:
    return {node.id: node for node in cache.walk()}


def parents(cache: RadixCache) -> dict[int, int]:
    return {node.id: node.parent.id for node in cache.walk() if node.parent is not None}


# ------------------------------------------------------------------ insert and match


def test_reset_empties_all_three_sizes() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3])
    cache.inc_lock_ref(put(cache, [1, 2, 4], 10).last_node)
    cache.reset()
    cache.check()
    assert sizes(cache) == (0, 0, 0)
    assert [node.id for node in cache.walk()] == [0]
    assert match(cache, [1, 2, 3]).length == 0


def test_insert_then_full_and_partial_match() -> None:
    cache = RadixCache()
    inserted = cache.insert(RadixKey([1, 2, 3]), [10, 20, 30])
    assert inserted.prefix_len == 0
    assert sizes(cache) == (3, 0, 3)
    full = match(cache, [1, 2, 3])
    assert full.slots.tolist() == [10, 20, 30] and full.length == 3 and full.host_length == 0
    assert full.last_node is inserted.last_node
    assert match(cache, [1, 2]).slots.tolist() == [10, 20]
    assert full.slots.dtype == np.int64
    cache.check()


def test_a_longer_query_matches_what_is_there() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3], 5)
    found = match(cache, [1, 2, 3, 4, 5])
    assert found.length == 3 and found.slots.tolist() == [5, 6, 7]
    assert len(list(cache.walk())) == 2  # nothing was split for it


def test_total_over_branches() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3])
    assert cache.total_size == 3
    put(cache, [4, 5], 10)
    assert cache.total_size == 5


def test_inserting_again_keeps_the_old_slots() -> None:
    cache = RadixCache()
    tokens = list(range(8))
    first = put(cache, tokens)
    again = put(cache, tokens, 100)
    assert again.prefix_len == 8 and again.last_node is first.last_node
    assert cache.total_size == 8
    assert match(cache, tokens).slots.tolist() == list(range(8))


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_key(page: int) -> None:
    cache = RadixCache(page)
    put(cache, list(range(page)))
    found, inserted = match(cache, []), put(cache, [])
    assert found.length == 0 and found.slots.size == 0 and found.last_node is cache.root
    assert inserted == InsertResult(0, cache.root)
    assert cache.total_size == page


def test_slots_are_copied_on_the_way_in_and_out() -> None:
    cache = RadixCache()
    slots = np.arange(4)
    cache.insert(RadixKey([1, 2, 3, 4]), slots)
    slots[:] = 99
    out = match(cache, [1, 2, 3, 4]).slots
    assert out.tolist() == [0, 1, 2, 3]
    out[:] = 77
    assert match(cache, [1, 2, 3, 4]).slots.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        next(n for n in cache.walk() if n.id).slots[0] = 5


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint8, np.uint64, "torch"])
def test_any_integer_sequence_will_do(kind: object) -> None:
    def of(values: list[int]) -> object:
        if kind == "torch":
            import torch

            return torch.tensor(values)
        return kind(values) if kind in (list, tuple) else np.array(values, dtype=kind)

    cache = RadixCache()
    cache.insert(RadixKey(of([1, 2, 3])), of([7, 8, 9]))
    found = cache.match_prefix(RadixKey(of([1, 2, 3])))
    assert found.slots.tolist() == [7, 8, 9] and found.slots.dtype == np.int64


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("length", [5, 6, 15, 16, 17, 33])
def test_matches_are_whole_pages(page: int, length: int) -> None:
    cache = RadixCache(page)
    whole = length // page * page
    assert put(cache, list(range(length))).prefix_len == 0
    assert cache.total_size == whole  # units past the last whole page are ignored
    for query in range(length + 1):
        assert cache.peek(RadixKey(range(query))) == query // page * page
        found = match(cache, list(range(query)))
        assert found.length == query // page * page
        assert found.slots.tolist() == list(range(found.length))
        cache.check()
    assert cache.total_size == whole


@pytest.mark.parametrize("page", [2, 4, 16])
def test_unaligned_queries(page: int) -> None:
    cache = RadixCache(page)
    tokens = list(range(3 * page))
    put(cache, tokens)
    assert match(cache, tokens[: 3 * page - 1]).length == 2 * page
    assert match(cache, tokens[: page - 1]).length == 0


@pytest.mark.parametrize("page", [2, 4, 16])
def test_a_mismatch_costs_its_whole_page(page: int) -> None:
    tokens = list(range(1, 3 * page + 1))
    for wrong, expected in [(page, page), (2 * page - 1, page), (2 * page, 2 * page), (0, 0), (1, 0)]:
        cache = RadixCache(page)
        put(cache, tokens)
        query = [*tokens[:wrong], 999, *tokens[wrong + 1 :]]
        assert match(cache, query).length == expected, wrong
        cache.check()


@pytest.mark.parametrize("page", [1, 2])
def test_a_match_that_splits_changes_no_data(page: int) -> None:
    cache = RadixCache(page)
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    put(cache, [1, 2, 9, 10], 20)
    assert match(cache, [1, 2, 3, 4, 99]).slots.tolist() == [0, 1, 2, 3]
    assert match(cache, [1, 2, 3, 4, 5, 6, 77]).slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.total_size == 10
    assert match(cache, [1, 2, 9, 10]).slots.tolist() == [0, 1, 22, 23]
    assert match(cache, [1, 2, 3, 4, 5, 6, 7, 8]).slots.tolist() == list(range(8))
    cache.check()


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_part_after_every_page(page: int) -> None:
    """A long key cut anywhere, at every depth of chain: bisection and chains give the same answer."""
    cache = RadixCache(page)
    base = np.arange(8 * page)
    put(cache, base.tolist())
    for cut in (5, 2, 7, 1, 3, 6, 4):
        tokens = [*base[: cut * page].tolist(), *range(1000 * cut, 1000 * cut + page)]
        assert put(cache, tokens, 1000 * page * cut).prefix_len == cut * page
        cache.check()
        found = match(cache, tokens)
        assert found.slots[: cut * page].tolist() == base[: cut * page].tolist()
        assert found.slots[cut * page] == 1000 * page * cut + cut * page
    assert match(cache, base.tolist()).slots.tolist() == base.tolist()
    assert cache.total_size == 15 * page


# ------------------------------------------------------------------ splitting


@pytest.mark.parametrize("page", [1, 2, 4])
def test_the_matched_node_after_a_split_ends_where_the_match_ends(page: int) -> None:
    cache = RadixCache(page)
    tokens = list(range(8))
    put(cache, tokens)
    found = match(cache, [*tokens[:4], 91, 92, 93, 94])
    assert len(found.last_node.key) == 4 and len(found.last_node) == 4
    inserted = put(cache, [*tokens[:4], 91, 92, 93, 94], 20)
    assert inserted.prefix_len == 4 and cache.total_size == 12
    assert inserted.last_node.parent is found.last_node
    cache.check()


def test_a_split_leaves_the_lower_half_its_id() -> None:
    cache = RadixCache()
    whole = put(cache, [1, 2, 3, 4, 5], priority=3).last_node
    for _ in range(2):
        match(cache, [1, 2, 3, 4, 5])
    cache.inc_lock_ref(whole)
    before, tick = by_id(cache)[whole.id], cache.snapshot()["tick"]
    created, hits = whole.created, whole.hits
    upper = match(cache, [1, 2, 9]).last_node

    lower = by_id(cache)[whole.id]
    assert lower is whole is before and lower.parent is upper and upper.parent is cache.root
    assert upper.id == whole.id + 1
    assert (upper.key.tokens.tolist(), lower.key.tokens.tolist()) == ([1, 2], [3, 4, 5])
    assert (upper.slots.tolist(), lower.slots.tolist()) == ([0, 1], [2, 3, 4])
    assert upper.created == lower.created == created
    assert upper.priority == lower.priority == 3
    assert upper.lock_ref == lower.lock_ref == 1
    assert upper.last_access == lower.last_access == tick + 1  # both halves are fresh
    assert (upper.hits, lower.hits) == (hits + 1, hits)  # copied; then the match hit the upper one
    assert sizes(cache) == (0, 5, 5)
    cache.check()
    cache.dec_lock_ref(whole)  # the lock was taken on the whole: it holds the whole
    assert sizes(cache) == (5, 0, 5)
    cache.check()


def test_a_split_keeps_no_view_of_the_old_arrays() -> None:
    cache = RadixCache()
    put(cache, list(range(100)))
    match(cache, list(range(50)))
    pieces = [node.packed for node in cache.walk() if node.id]
    assert [len(piece) for piece in pieces] == [400, 400]  # 50 slots of 8 bytes each


def test_an_insert_that_splits_is_fresh_as_well() -> None:
    cache = RadixCache()
    whole = put(cache, [1, 2, 3, 4]).last_node
    inserted = put(cache, [1, 2, 8], 10)
    tick = cache.snapshot()["tick"]
    assert inserted.prefix_len == 2
    assert {whole.last_access, inserted.last_node.last_access, whole.parent.last_access} == {tick}


# ------------------------------------------------------------------ time, hits, identity


def test_one_tick_per_match_or_insert() -> None:
    cache = RadixCache()
    for count, operation in enumerate(
        [
            lambda: put(cache, [1, 2, 3, 4]),
            lambda: match(cache, [1, 2, 9]),  # splits
            lambda: put(cache, [1, 2, 3, 5], 10),  # splits and inserts
            lambda: match(cache, [7]),  # finds nothing
            lambda: put(cache, [1, 2, 3, 4]),  # adds nothing
        ],
        start=1,
    ):
        operation()
        assert cache.snapshot()["tick"] == count
    cache.evict(1)
    cache.inc_lock_ref(cache.root)
    assert cache.snapshot()["tick"] == 5


def test_all_of_a_path_shares_the_tick_and_the_hit() -> None:
    cache = RadixCache()
    put(cache, [1, 2])
    put(cache, [1, 2, 3], 0)
    other = put(cache, [1, 2, 4], 10).last_node
    end = match(cache, [1, 2, 3]).last_node
    assert end.last_access == end.parent.last_access == 4 > other.last_access
    assert end.hits == end.parent.hits == 1 and other.hits == 0
    put(cache, [1, 2, 3, 5], 0)
    assert end.hits == 1  # an insert counts no hit
    cache.match_prefix(RadixKey([1, 2, 3]), count_hit=False)
    assert end.hits == 1 and end.last_access == 6


def test_an_insert_raises_the_priority_of_its_path_and_never_lowers_it() -> None:
    cache = RadixCache()
    end = put(cache, [1, 2, 3], priority=1).last_node
    child = put(cache, [1, 2, 3, 4], priority=5).last_node
    assert (end.priority, child.priority) == (5, 5)
    put(cache, [1, 2, 3, 4], priority=-2)
    match(cache, [1, 2, 3, 4])
    assert (end.priority, child.priority) == (5, 5)
    assert put(cache, [8], 50, priority=-7).last_node.priority == -7


def test_ids_are_never_used_again() -> None:
    cache = RadixCache()
    first = put(cache, [1, 2, 3]).last_node
    cache.evict(3)
    second = put(cache, [1, 2, 3]).last_node
    cache.reset()
    third = put(cache, [1, 2, 3]).last_node
    assert first.id < second.id < third.id
    assert cache.snapshot()["tick"] == 3  # the clock goes on, too


def test_a_dead_node_is_refused_by_name() -> None:
    cache = RadixCache()
    node = put(cache, [1, 2]).last_node
    old_root = cache.root
    cache.reset()
    for dead in (node, old_root):
        for operation in (cache.inc_lock_ref, cache.dec_lock_ref, cache.path_slots):
            with pytest.raises(ValueError, match=f"n{dead.id} is not in this tree: evicted"):
                operation(dead)


# ------------------------------------------------------------------ what leaves no trace


@pytest.mark.parametrize("page", [1, 2, 4])
def test_a_look_leaves_no_trace(page: int) -> None:
    cache = RadixCache(page)
    put(cache, list(range(8)))
    locked = put(cache, [*range(4), *range(50, 54)], 20).last_node
    cache.inc_lock_ref(locked)
    told: list[ev.Event] = []
    cache.bus.subscribe(None, told.append)
    before = cache.snapshot()
    for query in ([], [0], list(range(6)), list(range(8)), [*range(4), 50, 51, 9], [77], list(range(20))):
        key = RadixKey(query)
        cache.peek(key)
        cache.find(key, cache.find(key))
        cache.peek(RadixKey(query, "elsewhere"))
    assert cache.snapshot() == before and told == []


@pytest.mark.parametrize("page", [1, 2, 4])
def test_what_is_found_says_what_locking_the_match_takes(page: int) -> None:
    def planted() -> RadixCache:
        cache = RadixCache(page)
        put(cache, list(range(16)))
        cache.inc_lock_ref(put(cache, [*range(8), *range(50, 58)], 40).last_node)
        put(cache, list(range(90, 98)), 80)
        return cache

    queries = [
        list(range(16)), list(range(13)), list(range(8)), list(range(5)), list(range(94, 98)),
        [*range(8), *range(50, 55)], list(range(90, 97)), [],
    ]  # fmt: skip
    for query in queries:
        cache = planted()
        foreseen = cache.find(RadixKey(query))
        length, cost = foreseen.length, foreseen.cost
        found = match(cache, query)
        assert found.length == length == cache.peek(RadixKey(query))
        before = cache.evictable_size
        assert cache.inc_lock_ref(found.last_node) == cost == before - cache.evictable_size
        cache.check()


def test_one_walk_is_enough_for_looking_and_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, walks, real = RadixCache(), [], RadixCache._walk
    put(cache, [1, 2, 3, 4])
    monkeypatch.setattr(RadixCache, "_walk", lambda self, key: walks.append(key) or real(self, key))
    key = RadixKey([1, 2, 3, 9])
    found = cache.find(key)
    assert (found.length, found.cost) == (3, 3) and len(walks) == 1
    cache.inc_lock_ref(cache.root.children[(None, False), RadixKey([1]).data])  # locks change the cost only
    again = cache.find(RadixKey([1, 2, 3, 9]), found)
    assert (again.length, again.cost) == (3, 0) and len(walks) == 1
    other = cache.find(RadixKey([1, 2]), found)
    assert (other.length, other.cost) == (2, 0) and len(walks) == 2, "another key"
    end = cache.match_prefix(key, found=found).last_node  # splits
    assert len(end) == 3 and len(walks) == 2
    assert cache.match_prefix(key, found=found).last_node is end and len(walks) == 3, "the tree has changed"
    found = cache.find(key)
    assert cache.match_prefix(key, found=found).last_node is end and len(walks) == 4
    cache.check()


# ------------------------------------------------------------------ namespaces and pairs


def test_namespaces_share_nothing() -> None:
    cache = RadixCache()
    spaces = [None, "key1", "key2", ("bc", "a"), ("c", "ab"), "None", 0]
    for number, space in enumerate(spaces):
        assert put(cache, [1, 2, 3], 10 * number, extra_key=space).prefix_len == 0
    for number, space in enumerate(spaces):
        assert match(cache, [1, 2, 3], space).slots.tolist() == [10 * number + i for i in range(3)]
        assert match(cache, [1, 9], space).length == 1  # split inside the namespace
    assert match(cache, [1, 2, 3], "unknown").length == 0
    cache.check()
    assert cache.total_size == 3 * len(spaces)
    numbers = {node.namespace: cache.namespace_number(node.namespace) for node in cache.walk() if node.id}
    assert sorted(numbers.values()) == list(range(len(spaces)))
    assert numbers[(None, False)] == 0


@pytest.mark.parametrize("page", [1, 2])
def test_pairs_as_units(page: int) -> None:
    cache = RadixCache(page)
    first, second = RadixKey([A, B, C, D], is_bigram=True), RadixKey([A, B, C, E], is_bigram=True)
    assert len(first) == 3 and first.tokens.tolist() == [[A, B], [B, C], [C, D]]
    cache.insert(first, [2, 3, 4])
    assert cache.peek(second) == 2  # AB, BC
    found = cache.match_prefix(second)
    assert found.length == 2 and found.slots.tolist() == [2, 3]
    assert cache.insert(second, [12, 13, 14]).prefix_len == 2
    cache.check()
    assert cache.total_size == (4 if page == 1 else 2)
    if page == 1:
        assert cache.match_prefix(second).slots.tolist() == [2, 3, 14]


def test_pairs_and_tokens_do_not_meet() -> None:
    cache = RadixCache()
    cache.insert(RadixKey([1, 2, 2, 3], is_bigram=True), [1, 2, 3])
    assert cache.peek(RadixKey([1, 2, 2, 3])) == 0  # the same bytes, but units of another kind
    assert cache.insert(RadixKey([1, 2]), [8, 9]).prefix_len == 0
    cache.check()


@pytest.mark.parametrize("tokens", [[], [5]])
def test_fewer_than_two_tokens_are_no_pair(tokens: list[int]) -> None:
    assert len(RadixKey(tokens, is_bigram=True)) == 0


def test_keys_are_values() -> None:
    assert RadixKey([1, 2]) == RadixKey(np.array([1, 2])) and RadixKey([1, 2]) != RadixKey([1, 2], "a")
    assert hash(RadixKey([1, 2], "a")) == hash(RadixKey((1, 2), "a"))
    assert RadixKey([1]) != [1]
    assert repr(RadixKey([1, 2], "a")) == "RadixKey([1, 2], extra_key='a')"
    assert "is_bigram" in repr(RadixKey([1, 2], is_bigram=True))
    assert RadixKey([3], ("x", 1)).extra_key == ("x", 1)


# ------------------------------------------------------------------ growing a leaf


@pytest.mark.parametrize("page", PAGES)
def test_growing_makes_the_leaf_longer(page: int) -> None:
    cache = RadixCache(page)
    tokens = list(range(4 * page))
    leaf = put(cache, tokens[: 2 * page], priority=2).last_node
    cache.inc_lock_ref(leaf)
    match(cache, tokens[: 2 * page])
    created, hits = leaf.created, leaf.hits
    grown = put(cache, tokens, priority=7, grow=leaf)
    assert grown == InsertResult(2 * page, leaf)
    assert leaf.key.tokens.tolist() == tokens and leaf.slots.tolist() == tokens
    assert (leaf.created, leaf.hits) == (created, hits)
    assert leaf.last_access == cache.snapshot()["tick"]
    assert leaf.priority == 7
    assert put(cache, tokens, priority=1, grow=leaf).last_node is leaf and leaf.priority == 7
    assert sizes(cache) == (0, 4 * page, 4 * page)
    cache.check()
    cache.dec_lock_ref(leaf)
    assert sizes(cache) == (4 * page, 0, 4 * page)
    put(cache, [*tokens, *range(500, 500 + page)], grow=leaf)  # nobody holds it: it may grow as well
    assert sizes(cache) == (5 * page, 0, 5 * page)
    assert len(list(cache.walk())) == 2
    cache.check()


def test_no_growth_unless_the_walk_ends_exactly_there() -> None:
    cache = RadixCache()
    leaf = put(cache, [1, 2, 3]).last_node
    assert put(cache, [1, 2, 8, 9], 10, grow=leaf).last_node is not leaf  # parts inside the leaf
    assert leaf.key.tokens.tolist() == [3]
    other = put(cache, [7, 7], 20).last_node
    assert put(cache, [7, 7, 7], 20, grow=leaf).last_node is not other  # ends at another node
    assert put(cache, [5, 5], 30, grow=leaf).last_node.parent is cache.root  # nothing matches
    cache.check()


def test_the_right_to_grow_stays_with_the_lower_half() -> None:
    cache = RadixCache()
    leaf = put(cache, [1, 2, 3, 4]).last_node
    cache.inc_lock_ref(leaf)
    match(cache, [1, 2])
    assert put(cache, [1, 2, 3, 4, 5], 0, grow=leaf).last_node is leaf
    assert leaf.key.tokens.tolist() == [3, 4, 5]
    cache.check()


def test_no_growth_with_something_below() -> None:
    cache = RadixCache()
    leaf = put(cache, [1, 2]).last_node
    below = put(cache, [1, 2, 3], 0).last_node
    added = put(cache, [1, 2, 4], 10, grow=leaf).last_node
    assert added.parent is leaf and below.parent is leaf
    assert leaf.key.tokens.tolist() == [1, 2]
    cache.check()


def test_no_growth_while_somebody_else_locks_it() -> None:
    cache = RadixCache()
    leaf = put(cache, [1, 2]).last_node
    cache.inc_lock_ref(leaf)  # ours
    cache.inc_lock_ref(leaf)  # theirs
    child = put(cache, [1, 2, 3], 0, grow=leaf).last_node
    assert child.parent is leaf and child.lock_ref == 0
    cache.check()


def test_the_root_and_dead_nodes_do_not_grow() -> None:
    cache = RadixCache()
    node = put(cache, [1, 2], 0, grow=cache.root).last_node
    assert node.parent is cache.root and len(cache.root) == 0
    cache.evict(2)
    assert put(cache, [1, 2, 3], 10, grow=node).last_node is not node
    cache.check()


def test_growth_needs_a_whole_page() -> None:
    cache = RadixCache(4)
    leaf = put(cache, list(range(4))).last_node
    assert put(cache, list(range(7)), grow=leaf) == InsertResult(4, leaf)
    assert len(leaf) == 4


# ------------------------------------------------------------------ locks


@pytest.mark.parametrize("page", [1, 2, 4])
def test_a_lock_moves_size(page: int) -> None:
    cache = RadixCache(page)
    node = put(cache, list(range(3 * page))).last_node
    assert cache.inc_lock_ref(node) == 3 * page
    assert sizes(cache) == (0, 3 * page, 3 * page)
    assert cache.inc_lock_ref(node) == 0  # locked twice counts its tokens once
    assert cache.dec_lock_ref(node) == 0
    assert cache.dec_lock_ref(node) == 3 * page
    assert sizes(cache) == (3 * page, 0, 3 * page)


def test_a_lock_holds_the_whole_path_and_nothing_beside_it() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3, 4])
    end = put(cache, [1, 2, 5], 10).last_node
    assert cache.inc_lock_ref(end) == 3
    assert sizes(cache) == (2, 3, 5)
    assert {n.id: n.lock_ref for n in cache.walk()}[end.parent.id] == 1
    cache.check()
    cache.dec_lock_ref(end)
    assert sizes(cache) == (5, 0, 5)


def test_locking_the_root_does_nothing() -> None:
    cache = RadixCache()
    put(cache, [1])
    before = cache.snapshot()
    assert cache.inc_lock_ref(cache.root) == cache.dec_lock_ref(cache.root) == 0
    assert cache.dec_lock_ref(cache.root) == 0
    assert cache.snapshot() == before and cache.root.lock_ref == 0


def test_unlocking_too_often_is_refused_and_changes_nothing() -> None:
    cache = RadixCache()
    upper = put(cache, [1, 2]).last_node
    lower = put(cache, [1, 2, 3], 0).last_node
    cache.inc_lock_ref(upper)
    before = cache.snapshot()
    with pytest.raises(InvariantError, match=f"n{lower.id} is unlocked more often"):
        cache.dec_lock_ref(lower)
    assert cache.snapshot() == before
    cache.check()


def test_taking_back_somebody_elses_lock_is_found_by_check() -> None:
    cache = RadixCache()
    upper = put(cache, [1, 2]).last_node
    cache.inc_lock_ref(put(cache, [1, 2, 3], 0).last_node)
    cache.dec_lock_ref(upper)  # the lock up there is the lower node's
    with pytest.raises(InvariantError, match=f"n{upper.id}: lock_ref 0, children's sum 1"):
        cache.check()


# ------------------------------------------------------------------ looking at it, and bad input


def test_walk_gives_parents_first() -> None:
    cache = RadixCache()
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 5], [6]):
        put(cache, tokens, 10 * tokens[-1])
    seen: set[int] = set()
    for node in cache.walk():
        assert node.parent is None or node.parent.id in seen
        seen.add(node.id)
    assert len(seen) == 7
    assert parents(cache).keys() == seen - {0}
    assert len(cache.root.children) == 2 and "lock_ref=0" in repr(node)


def test_path_slots_is_the_matched_line() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3, 4])
    end = put(cache, [1, 2, 9], 20).last_node
    assert cache.path_slots(end).tolist() == [0, 1, 22]
    assert cache.path_slots(cache.root).tolist() == []
    assert [node.id for node in cache.path_up(end)] == [end.id, end.parent.id]


def test_snapshot_is_plain_data_that_stays_what_it_was() -> None:
    import json

    cache = RadixCache(2, "lfu")
    put(cache, [1, 2, 3, 4], extra_key=("any", "hashable"))
    before = cache.snapshot()
    text = json.dumps(before)
    put(cache, [1, 2, 9, 9], 10, extra_key=("any", "hashable"))
    assert json.loads(text) == before != cache.snapshot()
    assert before["nodes"][0]["tokens"] == [1, 2, 3, 4] and before["eviction_policy"] == "lfu"


def test_bad_input_is_named_and_changes_nothing() -> None:
    cache = RadixCache()
    put(cache, [1, 2, 3])
    told: list[ev.Event] = []
    cache.bus.subscribe(None, told.append)
    before = cache.snapshot()
    wrong = [
        (lambda: cache.insert(RadixKey([1, 2, 9]), [1, 2]), "2 slots for a key of 3 units"),
        (lambda: cache.insert(RadixKey([1, 2, 9]), [1.5, 2, 3]), "float64"),
        (lambda: cache.insert(RadixKey([1]), [[1]]), r"shape \(1, 1\)"),
        (lambda: cache.insert(RadixKey([1]), np.array([2**63], dtype=np.uint64)), "9223372036854775808"),
        (lambda: RadixKey([1, -2, 3]), "token id -2 is out of range"),
        (lambda: RadixKey([2**31]), f"token id {2**31} is out of range"),
        (lambda: RadixKey([2**64]), "object"),
        (lambda: RadixKey(np.array([2**63], dtype=np.uint64)), "9223372036854775808"),
        (lambda: RadixKey([True]), "bool"),
        (lambda: RadixKey([[1, 2]]), r"shape \(1, 2\)"),
        (lambda: RadixKey("text"), "token ids"),
        (lambda: cache.evict(-1), "cannot evict -1"),
        (lambda: setattr(cache, "eviction_policy", "random"), "'random'; known: lru, lfu"),
        (lambda: RadixCache(0), "page_size must be at least 1, got 0"),
        (lambda: RadixCache(1, "best"), "'best'"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        RadixKey([1], ["a list"])
    assert cache.snapshot() == before and told == []
    cache.check()


def test_as_int64_takes_no_copy_of_what_is_right_already() -> None:
    array = np.arange(3)
    assert as_int64(array, "x") is array
    assert as_int64([], "x").dtype == np.int64


def test_check_finds_what_is_broken() -> None:
    def planted() -> tuple[RadixCache, Node]:
        cache = RadixCache(2)
        put(cache, [1, 2, 3, 4])
        return cache, put(cache, [1, 2, 5, 6], 10).last_node

    def refuse(cache: RadixCache, message: str) -> None:
        with pytest.raises(InvariantError, match=message):
            cache.check()

    cache, node = planted()
    cache.evictable_size += 1
    refuse(cache, "evictable is 7, counted 6")
    cache, node = planted()
    cache.protected_size -= 1
    refuse(cache, "protected is -1, counted 0")
    cache, node = planted()
    node.edge = node.edge[:4]
    refuse(cache, f"n{node.id} is filed under a wrong first page")
    cache, node = planted()
    node.packed = node.packed[:8]
    refuse(cache, f"n{node.id}: 2 units but 1 slots")
    cache, node = planted()
    node.edge, node.packed = node.edge + b"xxxx", node.packed + b"xxxxxxxx"
    refuse(cache, f"n{node.id} holds 3 units, not whole pages of 2")
    cache, node = planted()
    node.packed = node.parent.packed
    refuse(cache, "page 0 is in")
    cache, node = planted()
    node.parent = cache.root
    refuse(cache, f"n{node.id} does not know its parent")
    cache, node = planted()
    node.namespace = ("other", False)
    refuse(cache, f"n{node.id} left the namespace")
    cache, node = planted()
    node.queued = None
    refuse(cache, f"evictable leaf n{node.id} would be overlooked")


def test_every_node_counts_as_true_also_the_root() -> None:
    cache = RadixCache()
    leaf = cache.insert(RadixKey([1]), [5]).last_node
    assert leaf.parent and len(leaf.parent) == 0
