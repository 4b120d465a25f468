"""Faults that other radix caches had, one test for the whole kind of each; and proof that most can fail.

Where a fault can be put back (`broken`), the same check must find it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from mutants import Make, Mutant, after, instead, nothing, says, while_in
from support import ColdReference, drive, listen
from test_mutants import FREED_TWICE, LOCK, LOCK_KEPT, NO_PAGES, NOT_REMAPPED, RELEASE, SPLIT_FORGETS_LOCKS
from test_ownership import World

from minirad import RadixCache, RadixKey
from minirad.cache.allocator import PageAllocator
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import Node
from minirad.config import HOST_WRITE, SamplingParams
from minirad.errors import HostCopyError, InvariantError
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.scheduler import Scheduler
from minirad.tiers.hiradix_cache import HiRadixCache, HostNode

MakeEngine = Callable[..., CheckedEngine]
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True)
PAGES = (1, 2, 4)
FOUND = (AssertionError, ValueError)  # InvariantError is an AssertionError


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Whatever runs inside has to object."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        with pytest.raises(FOUND):
            yield


def texts(seed: int, count: int = 30, longest: int = 16) -> list[list[int]]:
    """Token lists over two letters: they share beginnings of every length."""
    rng = random.Random(seed)
    return [[rng.choice([5, 6]) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def grown(page: int, seed: int, policy: str = "lru") -> RadixCache:
    """A tree from many inserts and matches, with a slot of its own for every token."""
    cache, slot = RadixCache(page, policy), page
    for tokens in texts(seed):
        cache.insert(RadixKey(tokens), range(slot, slot + len(tokens)))
        slot += -(-len(tokens) // page) * page
        cache.match_prefix(RadixKey(tokens[: len(tokens) // 2]))
    return cache


def run_all(
    make_engine: MakeEngine, model: LlamaModel, prompts: list[list[int]], new: int = 6, **options: Any
) -> CheckedEngine:
    """All prompts at once through one engine; every reply must be a cold engine's."""
    reference, engine = ColdReference(model), make_engine(**options)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    asked = {engine.add_request(prompt, params): prompt for prompt in prompts}
    for output in drive(engine):
        reference.require_equal(asked[output.request_id], params, output)
    return engine


# ---------------------------------------------------------------------- locks and eviction


def no_locked_node_goes(page: int, seed: int) -> None:
    ids = [node.id for node in grown(page, seed).walk() if node.id]
    for number in random.Random(seed).sample(ids, min(8, len(ids))):
        cache = grown(page, seed)  # the same tree once more
        (node,) = (node for node in cache.walk() if node.id == number)
        path = cache.path_up(node)
        cache.inc_lock_ref(node)
        rest = cache.total_size - sum(map(len, path))
        assert cache.evictable_size == rest
        assert cache.evict(10**6).num_tokens == rest
        assert [step for step in cache.walk() if step is not cache.root] == path[::-1]
        cache.check()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(5))
def test_a_lock_holds_the_node_itself_and_all_above_it(page: int, seed: int) -> None:
    """A lock that skips the node itself lets eviction take a node in use."""
    no_locked_node_goes(page, seed)


def test_a_lock_that_skips_the_node_is_found() -> None:
    with broken(
        instead("above it only", LOCK, lambda lock: lambda self, node: lock(self, node.parent or node))
    ):
        no_locked_node_goes(1, 0)


def nothing_is_orphaned(policy: str, page: int, seed: int) -> None:
    cache = grown(page, seed, policy)
    heard: list[Any] = []
    cache.bus.subscribe(ev.NodeEvicted, heard.append)
    while cache.evictable_size:
        leaves = {node.id for node in cache.walk() if not node.children and node is not cache.root}
        del heard[:]
        before = cache.total_size
        freed = cache.evict(1)
        assert heard[0].node in leaves and len(heard) == 1
        assert cache.total_size == before - freed.num_tokens
        cache.check()  # every node is reached from the root
    assert cache.total_size == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("page", PAGES)
def test_eviction_takes_leaves_whatever_the_policy(policy: str, page: int) -> None:
    """Going by time (or any key) alone makes orphans of what hangs below."""
    for seed in range(3):
        nothing_is_orphaned(policy, page, seed)


def test_orphans_are_found() -> None:
    inner = instead(
        "also inner nodes", (Node, "evictable"), lambda _: lambda self: self.lock_ref == 0 and self.parent
    )
    with broken(inner):
        nothing_is_orphaned("fifo", 1, 0)


def sizes_are_sums(page: int, seed: int) -> None:
    """Random locks, splits and unlocks."""
    rng, cache, held = random.Random(seed), grown(page, seed), []
    for tokens in texts(seed + 100, 40):
        match = cache.match_prefix(RadixKey(tokens))
        cache.inc_lock_ref(match.last_node)
        held.append(match.last_node)
        if rng.random() < 0.5:
            cache.dec_lock_ref(held.pop(rng.randrange(len(held))))
        assert cache.evictable_size >= 0 and cache.protected_size >= 0
        cache.check()
    for node in held:
        cache.dec_lock_ref(node)
    cache.check()
    assert cache.protected_size == 0


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(5))
def test_sizes_stay_sums_whatever_is_split_while_locked(page: int, seed: int) -> None:
    """After a split of a locked node the evictable size went negative."""
    sizes_are_sums(page, seed)


def test_sizes_that_go_wrong_at_a_split_are_found() -> None:
    with broken(SPLIT_FORGETS_LOCKS):
        sizes_are_sums(1, 0)


def only_the_shortfall_goes(page: int) -> None:
    for pages in range(1, 9):
        world = World(page, pages=16)
        for text in range(5):  # five leaves of two pages: six pages are free
            request = world.run([10 + text] * 2 * page)
            world.own.commit(request, True)
            world.live.remove(request)
        before = world.own.evicted_tokens
        assert world.own.make_room(pages * page)
        shortfall = max(pages - 6, 0)
        assert world.own.evicted_tokens - before == -(-shortfall // 2) * 2 * page


@pytest.mark.parametrize("page", PAGES)
def test_only_the_shortfall_is_evicted(page: int) -> None:
    """The full need is evicted although some slots are free."""
    only_the_shortfall_goes(page)


def test_evicting_the_full_need_is_found() -> None:
    def full_need(make_room: Callable[..., Any]) -> Callable[..., Any]:
        def evicts(self: CacheManager, num_tokens: int) -> bool:
            make_room(self, num_tokens + self.allocator.available)
            return self.allocator.available >= num_tokens

        return evicts

    with broken(instead("the full need goes", (CacheManager, "make_room"), full_need)):
        only_the_shortfall_goes(1)


# ---------------------------------------------------------------------- splits and values


def both_halves_are_fresh(page: int, seed: int) -> None:
    cache = grown(page, seed)
    heard: list[Any] = []
    cache.bus.subscribe(ev.NodeSplit, heard.append)
    for tokens in texts(seed + 7, 40, 20):
        before = {node.id: (node.created, node.hits) for node in cache.walk()}
        cache.match_prefix(RadixKey(tokens))
        nodes = {node.id: node for node in cache.walk()}
        for split in heard:
            upper, lower = nodes[split.upper], nodes[split.lower]
            assert upper.last_access == lower.last_access == split.tick
            assert upper.created == lower.created == before[split.lower][0]
            assert lower.hits == before[split.lower][1] == upper.hits - 1  # the upper half was hit just now
        del heard[:]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(4))
def test_both_halves_of_a_split_count_as_just_used(page: int, seed: int) -> None:
    """The split-off prefix had another time stamp than what it was split from."""
    both_halves_are_fresh(page, seed)


def test_a_stale_half_is_found() -> None:
    def stale(found: Any, cache: RadixCache, key: RadixKey) -> None:
        found.last_node.last_access = 0

    with broken(instead("a stale upper half", (RadixCache, "match_prefix"), after(stale))):
        both_halves_are_fresh(1, 0)


@pytest.mark.parametrize("kind", [RadixCache, lambda: HiRadixCache(host_tokens=64)])
def test_nodes_keep_copies_and_no_large_array_alive(kind: Callable[[], RadixCache]) -> None:
    """Node values that are views into a big array keep all of it alive (and change with it)."""
    cache, big = kind(), np.arange(1_000_000)
    node = cache.insert(RadixKey([1, 2, 3, 4]), big[100:104]).last_node
    cache.match_prefix(RadixKey([1, 2]))
    big[:] = 0
    assert cache.match_prefix(RadixKey([1, 2, 3, 4])).slots.tolist() == [100, 101, 102, 103]
    for each in (node, node.parent):
        assert len(each.packed) == 8 * len(each)  # type: ignore[union-attr]
    match = cache.match_prefix(RadixKey([1, 2, 3, 4]))
    match.slots[:] = 7  # the caller's own
    cache.check()
    assert cache.match_prefix(RadixKey([1, 2, 3, 4])).slots.tolist() == [100, 101, 102, 103]


@pytest.mark.parametrize("page", [2, 4, 16])
def test_what_is_shorter_than_a_page_is_nothing(make_engine: MakeEngine, page: int) -> None:
    """A key that is empty after page alignment made an empty node, or a look-up of the whole tree."""
    cache = RadixCache(page)
    for size in range(page):
        key = RadixKey([5] * size)
        assert cache.insert(key, range(page, page + size)).last_node is cache.root
        assert cache.match_prefix(key)[:3] == (pytest.approx([]), 0, cache.root)
        assert cache.peek(key) == 0
        cache.check()
    engine = make_engine(page_size=page, kv_tokens=64)
    for size in range(1, page):
        engine.generate([[5] * size], SamplingParams(max_new_tokens=0))
        assert engine.cache.total_size == 0 and engine.allocator.available == 64
        assert engine.pin([5] * size).length == 0


def test_one_page_in_two_places_is_found() -> None:
    """Two places of the tree count one page."""
    for cache in (RadixCache(2), HiRadixCache(2, host_tokens=8)):
        cache.insert(RadixKey([1, 2, 3, 4]), [2, 3, 4, 5])
        cache.insert(RadixKey([1, 2, 7, 8]), [8, 9, 4, 5])
        with pytest.raises(InvariantError, match=r"page 2 is in n[13] and in n[13]"):
            cache.check()


def test_what_is_equal_by_hash_alone_is_not_equal(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tiny_model: LlamaModel
) -> None:
    """A hash as the only identity: with one hash for everything, nothing may change."""

    class Tenant:
        def __init__(self, name: str) -> None:
            self.name = name

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Tenant) and other.name == self.name

    monkeypatch.setattr(RadixKey, "__hash__", lambda self: 7)
    run_all(make_engine, tiny_model, texts(3, 12), max_running=4)
    engine = make_engine()
    engine.generate([[5, 6, 7, 8]], GREEDY, extra_key=Tenant("a"))
    assert engine.peek([5, 6, 7, 8], Tenant("a")) == 4 and engine.peek([5, 6, 7, 8], Tenant("b")) == 0


# ---------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", [2, 4])
def test_a_page_is_freed_once_whichever_of_its_slots_is_named(page: int) -> None:
    """One token of a page is freed, then its neighbour: the page was on the free list twice."""
    for first, second in itertools.product(range(page), repeat=2):
        allocator = PageAllocator(4 * page, page)
        slots = allocator.alloc(2 * page)
        assert slots is not None
        allocator.free(slots[first : first + 1])
        before = allocator.available
        for again in ([slots[second]], [slots[second], slots[page]]):
            with pytest.raises(InvariantError, match="is free already"):
                allocator.free(again)
            assert allocator.available == before
        allocator.check()


def every_slot_is_freed_once(make_engine: MakeEngine, page: int, seed: int) -> None:
    """Requests end in every way; what is freed was in use until then, and nothing is left."""
    rng = random.Random(seed)
    engine = make_engine(page_size=page, kv_tokens=32, chunk_tokens=5, max_running=3)
    used: set[int] = set()

    def allocated(event: ev.SlotsAllocated) -> None:
        assert not used & set(event.slots)
        used.update(event.slots)

    def freed(event: ev.SlotsFreed) -> None:
        assert set(event.slots) <= used and len(set(event.slots)) == len(event.slots)
        used.difference_update(event.slots)

    engine.bus.subscribe(ev.SlotsAllocated, allocated)
    engine.bus.subscribe(ev.SlotsFreed, freed)
    names: list[str] = []
    for tokens in texts(seed, 25, 12):
        names.append(
            engine.add_request(tokens, SamplingParams(max_new_tokens=rng.randint(0, 6), n=rng.choice([1, 2])))
        )
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if rng.random() < 0.3:
            engine.abort(rng.choice(names))
    drive(engine)
    engine.flush_cache()
    assert used == set() and engine.allocator.available == 32


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(3))
def test_every_slot_is_freed_once_however_its_request_ends(
    make_engine: MakeEngine, page: int, seed: int
) -> None:
    """One decode slot was freed by two paths: at the end of the request and by an abort or a retraction."""
    every_slot_is_freed_once(make_engine, page, seed)


def test_a_slot_freed_twice_is_found(make_engine: MakeEngine) -> None:
    with broken(FREED_TWICE):
        every_slot_is_freed_once(make_engine, 4, 0)


# ---------------------------------------------------------------------- commit


def equal_prompts_together(make_engine: MakeEngine, model: LlamaModel, page: int) -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12]] * 3
    run_all(make_engine, model, prompts, page_size=page, in_batch_prefix=False, kv_tokens=96)


@pytest.mark.parametrize("page", PAGES)
def test_a_row_points_at_the_trees_slots_when_its_duplicates_are_freed(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int
) -> None:
    """Duplicates are freed while a row still points at them."""
    equal_prompts_together(make_engine, tiny_model, page)


def test_a_row_that_is_not_remapped_is_found(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    with broken(NOT_REMAPPED):
        equal_prompts_together(make_engine, tiny_model, 1)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("size", range(1, 10))
def test_a_commit_made_twice_changes_nothing(page: int, size: int) -> None:
    """The unfinished commit is called twice for one chunk with an unaligned tail."""
    world = World(page)
    request = world.run(list(range(20, 20 + size)))
    row = world.rows.rows[request.row].copy()
    before = world.cache.snapshot()["nodes"], world.allocator.available, request.protected_len
    world.own.commit(request, False)
    world.check()
    nodes, *sizes = world.cache.snapshot()["nodes"], world.allocator.available, request.protected_len
    assert sizes == list(before[1:]) and np.array_equal(world.rows.rows[request.row], row)
    strip = [{k: v for k, v in node.items() if k != "last_access"} for node in nodes]
    assert strip == [{k: v for k, v in node.items() if k != "last_access"} for node in before[0]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{"radix_cache": False}, {"page_size": 16}, {}])
def test_every_prompt_token_is_computed_once_in_chunks(
    make_engine: MakeEngine, chunk: int, options: dict[str, Any]
) -> None:
    """A request that inserts nothing begins every chunk at zero."""
    engine = make_engine(chunk_tokens=chunk, **options)
    batches = listen(engine, ev.BatchScheduled)
    engine.generate([[5, 6, 7, 8, 9, 10, 11]], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert [batch.tokens[0] for batch in batches] == [
        *([chunk] * (7 // chunk)), *([7 % chunk] if 7 % chunk else [])
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_nobody_hits_what_is_computed_in_the_same_step(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int
) -> None:
    """A hit on KV that is not computed yet: freed slots are poisoned here, so reading them shows."""
    engine = make_engine(page_size=page, in_batch_prefix=False, kv_tokens=96)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    admitted = listen(engine, ev.RequestAdmitted)
    ids = [engine.add_request(prompt, GREEDY) for _ in range(3)]
    report = engine.step()
    assert report.admitted == ids and [event.cached for event in admitted] == [0, 0, 0]
    for output in drive(engine):
        ColdReference(tiny_model).require_equal(prompt, GREEDY, output)


# ---------------------------------------------------------------------- abort, retraction


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("steps", range(9))
def test_an_abort_leaves_the_tree_what_is_the_trees(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int, steps: int
) -> None:
    """An abort freed pages that the tree referenced: the next hit read somebody else's KV."""
    engine = make_engine(page_size=page, chunk_tokens=3, kv_tokens=48)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    doomed = engine.add_request(prompt, GREEDY)
    for _ in range(steps):
        engine.step()
    engine.abort(doomed)
    engine.check()
    assert engine.cache.protected_size == 0
    engine.generate([[30 + i] * 6 for i in range(3)], GREEDY)  # takes whatever is free
    (output,) = engine.generate([prompt], GREEDY)
    ColdReference(tiny_model).require_equal(prompt, GREEDY, output)


def retraction_gives_back(make_engine: MakeEngine, model: LlamaModel, page: int) -> None:
    prompts = [[10 + i] * 3 for i in range(4)]
    engine = run_all(make_engine, model, prompts, 12, page_size=page, kv_tokens=24)
    assert engine.stats.retractions > 0
    assert engine.cache.protected_size == 0 and engine.rows.available == 4


@pytest.mark.parametrize("page", PAGES)
def test_a_retracted_request_that_resumes_unlocks_what_it_locked(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int
) -> None:
    """Resuming after a retraction unlocked nothing: the tree filled up with locked nodes."""
    retraction_gives_back(make_engine, tiny_model, page)


def test_a_lock_that_outlives_a_retraction_is_found(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    with broken(LOCK_KEPT):
        retraction_gives_back(make_engine, tiny_model, 1)


# ---------------------------------------------------------------------- the second tier


class Memory:
    """Two memories with what was written where, and a Copier between them that copies when a copy ends.

    Content is a token and all before it, so that KV of the wrong place is told from that of the right one.
    """

    def __init__(self, seed: int) -> None:
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.rng = random.Random(seed)

    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        return self._copy(self.device, device_slots.tolist(), self.host, host_slots.tolist(), may_fail=True)

    def load(self, host_slots: Any, device_slots: Any) -> Any:
        return self._copy(self.host, host_slots.tolist(), self.device, device_slots.tolist(), may_fail=False)

    def _copy(self, source: Any, read: Any, target: Any, write: Any, may_fail: bool) -> Any:
        if self.rng.random() < 0.1:
            raise HostCopyError("no")
        for slot in write:
            target[slot] = "under way"
        return _Slow(self, (source, read, target, write), may_fail and self.rng.random() < 0.2)


class _Slow:
    """Reads its source only when it ends: whoever gave the source away meanwhile is found out."""

    def __init__(self, memory: Memory, work: Any, fails: bool) -> None:
        self.work, self.fails, self.polls = work, fails, memory.rng.randrange(4)

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> bool:
        source, read, target, write = self.work
        for a, b in zip(read, write, strict=True):
            target[b] = "garbage" if self.fails else source[a]
        return not self.fails


def tiers_hold_what_they_say(write: str, page: int, seed: int) -> None:
    """Random requests over a tiny device and host: each node's slots hold its own tokens, in both tiers."""
    rng, memory = random.Random(seed), Memory(seed)
    cache = HiRadixCache(page, host_tokens=12 * page, host_write=write, copier=memory)
    world = World(page, pages=10, cache=cache)
    running: list[Any] = []

    def check() -> None:
        world.live = running
        world.check()
        for node in cache.walk():
            assert isinstance(node, HostNode)
            before: list[int] = [t for step in reversed(cache.path_up(node)[1:]) for t in step.key.tokens]
            own = node.key.tokens.tolist()
            expected = [(*before, *own[: i + 1]) for i in range(len(own))]
            loading = node.host_locks > 0
            if node.packed and not loading:
                assert [memory.device[slot] for slot in node.slots.tolist()] == expected
            if node.backed_up:
                assert [memory.host[slot] for slot in node.host_slots.tolist()] == expected

    def compute(request: Any, start: int) -> None:
        tokens = request.tokens.tolist()
        for at, slot in enumerate(world.rows.rows[request.row, start : request.kv_len].tolist(), start):
            memory.device[slot] = tuple(tokens[: at + 1])

    def decode(request: Any, count: int) -> None:
        for _ in range(count):
            request.append(rng.choice([5, 6]), 0.0)
            if world.own.extend(request, request.length):
                compute(request, request.length - 1)
            else:
                return

    for tokens in texts(seed, 60, 4 * page):
        if len(running) == 2 or (running and rng.random() < 0.3):
            done = running.pop(0)
            decode(done, rng.randint(0, 3))
            world.own.commit(done, True) if rng.random() < 0.7 else world.own.release(done, "released")
        cache.poll()
        check()
        request = world.request(tokens)
        match = cache.match_prefix(request.key())
        cache.inc_lock_ref(match.last_node)
        match = world.own.load_back(request, match, spare=page)
        world.own.attach(request, match, world.own.cached(request, match.length))
        if not world.own.extend(request, request.length):
            world.own.release(request, "released")
            check()
            continue
        compute(request, request.protected_len)
        world.own.commit(request, False)
        running.append(request)
        check()
    while running:
        world.own.commit(running.pop(), True)
    cache.poll(wait=True)
    check()


@pytest.mark.parametrize("write", HOST_WRITE)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seed", range(4))
def test_each_tier_holds_what_the_tree_says(write: str, page: int, seed: int) -> None:
    """A split during a pending copy; a load from pages already released; slots handed out before their
    copy was done; a failed copy taken for a success; a backed-up child under an unbacked parent."""
    tiers_hold_what_they_say(write, page, seed)


SPLIT = (HiRadixCache, "_split")


def of_the_upper(then: Callable[[HostNode], None]) -> Make:
    return after(lambda upper, *_: then(upper))


def no_copy(upper: HostNode) -> None:
    upper.copying = None


def no_longer_in_its_copy(upper: HostNode) -> None:
    if upper.copying:
        upper.copying.nodes.remove(upper)


class Believed:
    """A Copier, and a copy, of which every wait says that it arrived."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def backup(self, *slots: Any) -> Believed:
        return Believed(self.inner.backup(*slots))

    def load(self, *slots: Any) -> Believed:
        return Believed(self.inner.load(*slots))

    def done(self) -> bool:
        return bool(self.inner.done())

    def wait(self) -> bool:
        self.inner.wait()
        return True


def all_copies_believed(_: None, cache: HiRadixCache, *args: Any, **named: Any) -> None:
    cache.copier = Believed(cache.copier)


def parents_not_told(evict: Callable[..., Any]) -> Callable[..., Any]:
    def evicts(self: HiRadixCache, num_tokens: int) -> Any:
        before: list[Any] = [node for node in self.walk() if len(node)]
        result = evict(self, num_tokens)
        for node in before:
            if not len(node) and isinstance(node.parent, HostNode):
                node.parent.resident += 1
        return result

    return evicts


def adopts_nothing(insert: Callable[..., Any]) -> Callable[..., Any]:
    def inserts(self: HiRadixCache, *args: Any, **named: Any) -> Any:
        hollow = [node for node in self.walk() if not node.packed]
        result = insert(self, *args, **named)
        for node in hollow:
            node.packed = b""
        return result

    return inserts


@pytest.mark.parametrize(
    ("write", "mutant"),
    [
        ("write_through", instead("a half forgets its copy", SPLIT, of_the_upper(no_copy))),
        ("write_through", instead("a copy forgets a half", SPLIT, of_the_upper(no_longer_in_its_copy))),
        (
            "write_back",
            while_in((HiRadixCache, "_evict"), (HiRadixCache, "poll"), nothing, "no wait for a copy"),
        ),
        (
            "write_through",
            instead("failed copies count", (HiRadixCache, "__init__"), after(all_copies_believed)),
        ),
        ("write_through", while_in((HiRadixCache, "seal"), LOCK, nothing, "a copy does not lock")),
        (
            "write_back",
            while_in((HiRadixCache, "evict"), (PageAllocator, "free"), says(NO_PAGES), "host copies stay"),
        ),
        ("write_through", while_in((HiRadixCache, "load_back"), LOCK, nothing, "a load does not lock")),
        ("write_through", instead("computed again, not adopted", (HiRadixCache, "insert"), adopts_nothing)),
        ("write_through_selective", instead("grows while copied", (HiRadixCache, "_open"), says(True))),
        ("write_through", instead("parents are not told", (HiRadixCache, "evict"), parents_not_told)),
    ],
    ids=lambda each: each.about if isinstance(each, Mutant) else each,
)
def test_a_tier_that_forgets_is_found(write: str, mutant: Mutant) -> None:
    with broken(mutant):
        for page, seed in itertools.product(PAGES, range(12)):
            tiers_hold_what_they_say(write, page, seed)


# ---------------------------------------------------------------------- weights


def new_weights_in_the_middle(make_engine: MakeEngine, new: LlamaModel, steps: int, **options: Any) -> None:
    """What comes after the update is what a fresh engine of the new weights says after the same tokens."""
    engine = make_engine(chunk_tokens=4, kv_tokens=48, **options)
    prompts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [20, 21, 22]]
    asked = {engine.add_request(prompt, GREEDY): prompt for prompt in prompts}
    outputs = [output for _ in range(steps) for output in engine.step().finished]
    said = {request.id: list(request.output) for request in engine.scheduler.requests()}
    engine.update_weights(new)
    engine.check()
    assert all(engine.peek(prompt) == 0 for prompt in prompts)
    asked |= {engine.add_request(prompt, GREEDY): prompt for prompt in prompts}
    outputs += drive(engine)
    assert len(outputs) == 6
    fresh = ColdReference(new)
    for output in outputs:
        before = said.get(output.request_id)
        if output.request_id in ("R1", "R2", "R3") and before is None:
            continue  # finished under the old weights
        before = before or []
        rest = SamplingParams(max_new_tokens=6 - len(before), ignore_eos=True)
        wanted = fresh([*asked[output.request_id], *before], rest).token_ids
        assert output.token_ids == [*before, *wanted]


@pytest.mark.parametrize("steps", range(0, 12, 2))
@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"host_kv_tokens": 48, "load_back_threshold": 1}])
def test_kv_of_old_weights_is_not_used_after_an_update(
    make_engine: MakeEngine, tiny_model: LlamaModel, steps: int, options: dict[str, Any]
) -> None:
    """Old weights' KV is used after an update: by a hit, or by who was running."""
    config = tiny_model.config
    new = LlamaModel(config, random_weights(config, 9, dtype=tiny_model.dtype, device="cpu"))
    new_weights_in_the_middle(make_engine, new, steps, **options)


def old_names_match(bump_version: Callable[..., Any]) -> Callable[..., Any]:
    def bumps(self: RadixCache) -> None:
        before = dict(self.root.children)
        bump_version(self)
        self.root.children = before

    return bumps


PUT_BACK = (Scheduler, "put_back")


@pytest.mark.parametrize(
    "mutant",
    [
        instead("the tree is not told", (RadixCache, "bump_version"), nothing),
        instead("who runs goes on", PUT_BACK, nothing),
        instead("old names match", (RadixCache, "bump_version"), old_names_match),
        while_in(PUT_BACK, RELEASE, says(0), "who runs keeps its row"),
    ],
    ids=lambda mutant: mutant.about,
)
def test_kv_of_old_weights_in_use_is_found(
    make_engine: MakeEngine, tiny_model: LlamaModel, mutant: Mutant
) -> None:
    config = tiny_model.config
    other = LlamaModel(config, random_weights(config, 9, dtype=tiny_model.dtype, device="cpu"))
    with broken(mutant):
        for steps in (2, 5):
            new_weights_in_the_middle(make_engine, other, steps)
