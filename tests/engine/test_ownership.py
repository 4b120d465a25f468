"""Who owns which slot: commit, release, fork and admission with a real tree, allocator and row table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.config import SamplingParams
from minirad.errors import InvariantError
from minirad.observe import events as ev
from minirad.schedule.cache_manager import CacheManager, path_slots
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler

PAGES = (1, 2, 4, 16)


class World:
    """One pool with everybody who may own a page of it."""

    def __init__(self, page: int, pages: int = 64, cache: RadixCache | None = None, **options: Any) -> None:
        bus = ev.EventBus()
        self.page = page
        self.cache = RadixCache(page, bus=bus) if cache is None else cache
        self.allocator = PageAllocator(pages * page, page)
        self.rows = ReqToTokenPool(4, 64 * page)
        self.own = CacheManager(self.cache, self.allocator, self.rows, bus, **options)
        self.live: list[Request] = []
        self.pins: dict[int, Any] = {}
        self.count = 0

    def request(self, tokens: list[int], max_new_tokens: int = 64, **options: Any) -> Request:
        self.count += 1
        params = SamplingParams(max_new_tokens=max_new_tokens)
        return Request(f"R{self.count}", np.array(tokens), params, 0, self.count, **options)

    def admit(self, tokens: list[int], **options: Any) -> Request:
        """Match, lock, attach: what the scheduler does with room to spare."""
        request = self.request(tokens, **options)
        match = self.cache.match_prefix(request.key())
        self.cache.inc_lock_ref(match.last_node)
        self.own.attach(request, match, min(match.length, request.usable_prefix) // self.page * self.page)
        self.live.append(request)
        return request

    def run(self, tokens: list[int], **options: Any) -> Request:
        """Admits, computes and commits a whole prompt."""
        request = self.admit(tokens, **options)
        assert self.own.extend(request, request.length)
        self.own.commit(request, False)
        self.check()
        return request

    def decode(self, request: Request, tokens: list[int]) -> None:
        for token in tokens:
            request.append(token, 0.0)
            assert self.own.extend(request, request.length)

    def end(self, request: Request, *, abort: bool = False) -> None:
        if abort:
            self.own.release(request, "released")
        else:
            self.own.commit(request, True)
        self.live.remove(request)
        self.check()

    def line(self, request: Request) -> list[int]:
        slots: list[int] = self.rows.rows[request.row, : request.kv_len].tolist()
        return slots

    def check(self) -> None:
        self.cache.check()
        self.own.check(self.live, self.pins)

    @property
    def stats(self) -> tuple[int, int, int]:
        return self.allocator.available, self.cache.evictable_size, self.cache.protected_size


@pytest.fixture(params=PAGES)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def prompt(world: World, pages: float, first: int = 0) -> list[int]:
    return list(range(first, first + int(pages * world.page)))


# ------------------------------------------------------------------ commit


def test_commit_unfinished(world: World) -> None:
    request = world.run(prompt(world, 3))
    page = world.page
    assert (request.protected_len, request.kv_len) == (3 * page, 3 * page)
    assert world.line(request) == path_slots(request.node).tolist() == list(range(page, 4 * page))
    assert request.node.lock_ref == 1 and request.leaf is request.node
    assert world.stats == (61 * page, 0, 3 * page)


@pytest.mark.parametrize("page", [2, 4, 16])
def test_commit_finished_with_a_tail(page: int) -> None:
    world = World(page)
    request = world.admit(prompt(world, 1.5))
    assert world.own.extend(request, request.length)
    assert world.allocator.available == 62 * page
    world.end(request)
    assert world.stats == (63 * page, page, 0)  # the tail's page is free again
    assert world.cache.peek(RadixKey(prompt(world, 1.5))) == page
    assert request.row == -1 and request.node is None and world.rows.available == 4


@pytest.mark.parametrize("page", [2, 4, 16])
def test_the_tail_of_an_unfinished_request_stays_its_own(page: int) -> None:
    world = World(page)
    request = world.run(prompt(world, 1.5))
    assert request.protected_len == page and request.kv_len == page + page // 2
    assert world.stats == (62 * page, 0, page)
    world.decode(request, list(range(500, 500 + page)))
    assert world.stats == (61 * page, 0, page)  # the tail was filled up first
    world.own.commit(request, False)
    world.check()
    assert request.protected_len == 2 * page and len(list(world.cache.walk())) == 2


def test_a_hit_uses_the_trees_slots_but_computes_one_token(world: World) -> None:
    page = world.page
    world.end(world.run(prompt(world, 3)))
    before = path_slots(next(n for n in world.cache.walk() if n.id)).tolist()
    request = world.admit(prompt(world, 3))
    assert request.kv_len == request.protected_len == 2 * page  # 3 pages less one token, floored
    assert world.own.extend(request, request.length)
    private = world.line(request)[2 * page :]
    assert not set(private) & set(before)
    world.own.commit(request, False)
    world.check()
    assert world.line(request) == before  # the duplicates are freed and the row points at the tree's
    assert world.stats == (61 * page, 0, 3 * page)
    world.end(request)
    assert world.stats == (61 * page, 3 * page, 0)


def test_equal_prompts_side_by_side_are_remapped(world: World) -> None:
    """Both computed the same prompt before either committed: the second's copy is freed."""
    page = world.page
    first, second = world.admit(prompt(world, 3)), world.admit(prompt(world, 3))
    for request in (first, second):
        assert world.own.extend(request, request.length)
    assert world.allocator.available == 58 * page
    freed: list[int] = []
    world.own.bus.subscribe(ev.SlotsFreed, lambda event: freed.extend(event.slots))
    own = world.line(second)
    world.own.commit(first, False)
    world.own.commit(second, False)
    world.check()
    assert world.line(first) == world.line(second) != own
    assert freed == own
    assert second.leaf is None  # who inserted nothing may grow nothing
    assert world.stats == (61 * page, 0, 3 * page)
    assert first.node.lock_ref == 2
    for request in (first, second):
        world.end(request)
    assert world.stats == (61 * page, 3 * page, 0)


def test_one_node_per_request_and_turn(world: World) -> None:
    """Chunks and decoded tokens grow the leaf that the request inserted."""
    page = world.page
    request = world.admit(prompt(world, 4))
    for stop in (page, 3 * page, 4 * page):
        assert world.own.extend(request, stop)
        world.own.commit(request, False)
        world.check()
    world.decode(request, list(range(900, 900 + 2 * page)))
    world.end(request)
    nodes = [node for node in world.cache.walk() if node.id]
    assert len(nodes) == 1 and len(nodes[0]) == 6 * page


def test_no_growth_over_somebody_elses_lock(world: World) -> None:
    page = world.page
    request = world.run(prompt(world, 2))
    other = world.admit([*prompt(world, 2), *range(700, 700 + page)])
    assert other.node is request.node and request.node.lock_ref == 2
    world.decode(request, list(range(900, 900 + page)))
    world.own.commit(request, False)
    world.check()
    assert len(request.leaf) == page and request.leaf.parent is other.node
    world.end(other)
    world.end(request)
    assert world.stats == (61 * page, 3 * page, 0)


def test_a_tree_without_grow_gets_children(world: World) -> None:
    class Plain(RadixCache):
        def insert(self, key: RadixKey, slots: Any, priority: int = 0) -> Any:  # type: ignore[override]
            return super().insert(key, slots, priority)

    plain = World(world.page, cache=Plain(world.page))
    request = plain.run(prompt(plain, 2))
    plain.decode(request, prompt(plain, 1, 900))
    plain.end(request)
    assert [len(node) // plain.page for node in plain.cache.walk()] == [0, 2, 1]


def test_without_a_tree_a_finished_request_frees_everything(world: World) -> None:
    forgetful = World(world.page, keep=False)
    request = forgetful.admit(prompt(world, 2))
    assert forgetful.own.extend(request, request.length)
    forgetful.own.commit(request, False)
    assert forgetful.line(request) and forgetful.cache.total_size == 0
    forgetful.check()
    forgetful.end(request)
    assert forgetful.stats == (64 * world.page, 0, 0)


def test_priority_reaches_the_node(world: World) -> None:
    assert world.run(prompt(world, 1), priority=3).node.priority == 3


def test_namespaces_never_share_a_page(world: World) -> None:
    first = world.run(prompt(world, 2), extra_key="a")
    second = world.run(prompt(world, 2), extra_key="b")
    assert not set(world.line(first)) & set(world.line(second))
    assert world.cache.peek(RadixKey(prompt(world, 2))) == 0


# ------------------------------------------------------------------ balance and leaks


@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("abort", [False, True])
def test_locks_balance_over_five_rounds(world: World, hit: bool, abort: bool) -> None:
    page = world.page
    if hit:
        world.end(world.run(prompt(world, 2)))
    for number in range(5):
        tokens = prompt(world, 3) if hit else prompt(world, 3, 1000 * (number + 1))
        request = world.run(tokens)
        world.decode(request, [7, 8, 9])
        world.end(request, abort=abort)
        assert world.cache.protected_size == 0
        assert world.rows.available == 4
    free, evictable, _ = world.stats
    assert free + evictable == 64 * page
    decoded = 0 if abort else 3 // page * page
    assert evictable == (3 * page + decoded if hit else 5 * (3 * page + decoded))
    assert world.own.make_room(64 * page) and world.stats == (64 * page, 0, 0)
    world.check()


def test_abort_before_anything_was_committed(world: World) -> None:
    request = world.admit(prompt(world, 2.5))
    assert world.own.extend(request, request.length)
    world.end(request, abort=True)
    assert world.stats == (64 * world.page, 0, 0)


def test_what_was_in_the_tree_stays_after_an_abort(world: World) -> None:
    request = world.run(prompt(world, 2))
    world.decode(request, [5] * world.page)
    world.end(request, abort=True)
    assert world.stats == (62 * world.page, 2 * world.page, 0)


def test_release_says_how_many_private_slots_it_freed(world: World) -> None:
    request = world.run(prompt(world, 2))
    world.decode(request, [5] * world.page)
    assert world.own.release(request, "released") == world.page
    assert (request.row, request.node, request.leaf) == (-1, None, None)
    world.live.clear()
    world.check()


def test_nothing_is_handed_out_when_there_is_too_little(world: World) -> None:
    held = world.run(prompt(world, 60))
    request = world.admit(prompt(world, 5, 2000))
    before = (world.stats, world.line(held), request.kv_len)
    assert not world.own.extend(request, request.length)
    assert (world.stats, world.line(held), request.kv_len) == before
    world.check()


def test_only_the_shortfall_is_evicted(world: World) -> None:
    page = world.page
    for number in range(20):
        world.end(world.run(prompt(world, 3, 1000 * number)))
    assert world.stats == (4 * page, 60 * page, 0)
    assert world.own.make_room(5 * page)
    assert world.stats == (7 * page, 57 * page, 0)  # one leaf of three pages
    assert world.own.evicted_tokens == 3 * page
    assert not world.own.make_room(65 * page)
    world.check()


@pytest.mark.parametrize("page", [2, 4, 16])
def test_an_unused_tail_between_chunks_is_no_leak(page: int) -> None:
    world = World(page)
    request = world.admit(prompt(world, 4))
    for stop in (1, page + 1, 2 * page + 1, 4 * page):
        assert world.own.extend(request, stop)
        world.check()
        world.own.commit(request, False)
        world.check()
    world.end(request)
    assert world.stats == (60 * page, 4 * page, 0)


def lose_a_page(world: World, busy: bool) -> tuple[int, str]:
    """A page that nobody owns, and what the check says about it."""
    if busy:
        world.run(prompt(world, 1.5))
    lost = int(world.allocator.alloc(world.page)[0]) // world.page
    with pytest.raises(InvariantError, match="owned by nobody") as caught:
        world.own.check(world.live, {})
    return lost, str(caught.value)


@pytest.mark.parametrize("busy", [False, True])
def test_a_page_of_nobody_is_reported(world: World, busy: bool) -> None:
    lose_a_page(world, busy)


def test_a_page_of_nobody_is_reported_with_its_number(world: World) -> None:
    lost, message = lose_a_page(world, busy=False)
    assert f"page {lost} " in message or f"page [{lost}]" in message


def test_a_page_that_is_free_and_in_use(world: World) -> None:
    request = world.run(prompt(world, 1))
    world.allocator.free(world.line(request))
    with pytest.raises(InvariantError, match=r"page \[1\] is free and in use"):
        world.own.check(world.live, {})


def test_a_page_may_not_be_given_up_by_another(world: World) -> None:
    first, second = world.run(prompt(world, 1)), world.admit(prompt(world, 1, 500))
    assert world.own.extend(second, second.length)
    before = world.stats
    for slots, owner, message in [
        (world.line(first), second.row, "page 1 belongs to the tree, not to row 1"),
        (world.line(second), first.row, "page 2 belongs to row 1, not to row 0"),
        ([9 * world.page], second.row, r"page 9 belongs to nobody \(free\), not to row 1"),
        ([0], second.row, "page 0 belongs to the dummy page, not to row 1"),
    ]:
        with pytest.raises(InvariantError, match=message):
            world.own._release(np.array(slots), owner, "test")
    assert world.stats == before
    world.check()


def test_the_classic_silent_bug_is_found(world: World) -> None:
    """A row that keeps pointing at its freed duplicates."""
    first, second = world.admit(prompt(world, 2)), world.admit(prompt(world, 2))
    for request in (first, second):
        assert world.own.extend(request, request.length)
    stale = world.line(second)
    world.own.commit(first, False)
    world.own.commit(second, False)
    world.rows.rows[second.row, : len(stale)] = stale
    with pytest.raises(InvariantError, match=f"{second.id}: its row does not point at its locked path"):
        world.check()


def test_a_lock_of_nobody_is_found(world: World) -> None:
    request = world.run(prompt(world, 1))
    world.cache.inc_lock_ref(request.node)
    with pytest.raises(
        InvariantError, match=f"n{request.node.id}: 2 locks of its own, 1 rows, pins and copies hold"
    ):
        world.check()
    world.pins[1] = request.node
    world.check()


def test_flush_empties_the_tree_and_frees_its_pages(world: World) -> None:
    for number in range(3):
        world.end(world.run(prompt(world, 2, 100 * number)))
    freed: list[ev.SlotsFreed] = []
    world.own.bus.subscribe(ev.SlotsFreed, freed.append)
    world.own.flush()
    world.check()
    assert world.stats == (64 * world.page, 0, 0)
    assert [(len(event.slots), event.cause) for event in freed] == [(6 * world.page, "flushed")]
    world.own.flush()
    assert len(freed) == 1


def test_freed_slots_are_told(world: World) -> None:
    told: list[int] = []
    teller = World(world.page, on_free=lambda slots: told.extend(slots.tolist()))
    request = teller.admit(prompt(world, 2))
    assert teller.own.extend(request, request.length)
    line = teller.line(request)
    teller.end(request, abort=True)
    assert told == line


# ------------------------------------------------------------------ forks


@pytest.mark.parametrize("tail", [0, 1])
def test_a_fork_shares_the_path_and_owns_its_tail(world: World, tail: int) -> None:
    page = world.page
    tail = min(tail, page - 1)
    leader = world.run([*prompt(world, 2), *range(800, 800 + tail)])
    sample = world.request(leader.prompt.tolist())
    source = world.own.fork(leader, sample)
    assert source is not None
    world.live.append(sample)
    world.check()
    assert source.tolist() == world.line(leader)[2 * page :]
    assert world.line(sample)[: 2 * page] == world.line(leader)[: 2 * page]
    assert not set(world.line(sample)[2 * page :]) & set(world.line(leader)[2 * page :])
    assert sample.kv_len == leader.kv_len and leader.node.lock_ref == 2 and sample.leaf is None
    for request in (leader, sample):
        world.decode(request, [request.row + 50] * page)
        world.end(request)
    assert world.cache.protected_size == 0
    assert sum(world.stats) == 64 * page


def test_a_fork_without_room_changes_nothing() -> None:
    world = World(4, pages=3)
    leader = world.run(list(range(9)))
    before = world.stats
    sample = world.request(list(range(9)))
    assert world.own.fork(leader, sample) is None
    assert world.stats == before and sample.row == -1 and leader.node.lock_ref == 1
    world.check()


def test_a_fork_without_a_row_changes_nothing(world: World) -> None:
    requests = [world.run(prompt(world, 1, 100 * number)) for number in range(4)]
    assert world.own.fork(requests[0], world.request(prompt(world, 1))) is None
    world.check()


# ------------------------------------------------------------------ admission


class Counting(RadixCache):
    """Counts locks, and cannot say beforehand what a lock costs (as a student's tree)."""

    find = None  # type: ignore[assignment]

    def peek(self, key: RadixKey) -> int:
        return RadixCache.find(self, key).length

    def __init__(self, page: int) -> None:
        super().__init__(page)
        self.locked: list[Node] = []
        self.unlocked: list[Node] = []

    def inc_lock_ref(self, node: Node) -> int:
        self.locked.append(node)
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: Node) -> int:
        self.unlocked.append(node)
        return super().dec_lock_ref(node)


def admission_world(cache: RadixCache | None = None) -> tuple[World, Scheduler, Request]:
    """Room 8 of 16 (5 evictable, 3 free), of which locking the newcomer's match takes 5."""
    world = World(1, pages=16, cache=cache)
    world.run(list(range(100, 108)))  # somebody holds 8 slots
    world.end(world.run([1, 2, 3, 4, 5]))
    own = CacheManager(world.cache, world.allocator, world.rows, ev.EventBus())
    own._owner = world.own._owner
    scheduler = Scheduler(own, "fcfs", 512, own.bus)
    scheduler.running = list(world.live)
    newcomer = world.request([1, 2, 3, 4, 5, 11, 12, 13, 14], max_new_tokens=1)
    scheduler.waiting.append(newcomer)
    return world, scheduler, newcomer


@pytest.mark.parametrize("make", [None, Counting])
def test_the_budget_is_checked_again_after_locking(make: Callable[[int], RadixCache] | None) -> None:
    cache = None if make is None else make(1)
    world, scheduler, newcomer = admission_world(cache)
    assert scheduler.cache_manager.room == 8
    assert world.cache.evictable_size == 5
    if isinstance(cache, Counting):
        cache.locked.clear()
        cache.unlocked.clear()
    before = world.stats
    told: list[str] = []
    scheduler.bus.subscribe(ev.RequestDeferred, lambda event: told.append(event.reason))
    batch = scheduler.next_batch()
    assert batch is None or newcomer not in batch.requests
    assert newcomer.row == -1 and scheduler.waiting == [newcomer]
    assert world.cache.protected_size == before[2]
    assert len(told) == 1
    if isinstance(cache, Counting):
        assert cache.locked == cache.unlocked and len(cache.locked) == 1  # locked and released once
        assert "left after locking the match" in told[0]
    else:
        assert "slots needed" in told[0]


def test_with_more_room_the_same_request_is_admitted() -> None:
    world, scheduler, newcomer = admission_world(Counting(1))
    world.end(world.live[0])
    scheduler.running.clear()
    batch = scheduler.next_batch()
    assert batch is not None and batch.admitted == [newcomer]
    world.live.append(newcomer)
    world.check()


def test_what_is_found_says_what_room_loses(world: World) -> None:
    world.end(world.run(prompt(world, 4)))
    for pages in (0, 1, 2, 4, 5):
        key = RadixKey(prompt(world, pages))
        room, cost = world.own.room, world.own.find(key).cost
        node = world.cache.match_prefix(key).last_node
        world.cache.inc_lock_ref(node)
        assert world.own.room == room - cost == room - min(pages, 4) * world.page
        world.cache.dec_lock_ref(node)


# ------------------------------------------------------------------ rows and events


def test_rows_are_handed_out_lowest_first_and_zeroed() -> None:
    rows = ReqToTokenPool(3, 4)
    assert [rows.alloc(), rows.alloc(), rows.alloc()] == [0, 1, 2]
    with pytest.raises(ValueError, match="all 3 rows are held"):
        rows.alloc()
    rows.rows[1] = 7
    rows.free(1)
    assert rows.rows[1].tolist() == [0, 0, 0, 0] and rows.available == 1
    for bad in (1, 3, -1):
        with pytest.raises(ValueError, match=f"row {bad} is not held"):
            rows.free(bad)
    assert rows.alloc() == 1


def test_a_request_is_three_lengths_in_order(world: World) -> None:
    request = world.run(prompt(world, 2))
    request.kv_len = request.length + 1
    with pytest.raises(InvariantError, match=f"{request.id}: "):
        world.check()


def test_commit_tells_the_number_line(world: World) -> None:
    told: list[ev.Committed] = []
    world.own.bus.subscribe(ev.Committed, told.append)
    page = world.page
    world.end(world.run(prompt(world, 2)))
    request = world.admit([*prompt(world, 2), *prompt(world, 1.5, 600)])
    assert world.own.extend(request, request.length)
    world.end(request)
    length = 2 * page + int(1.5 * page)
    assert [(e.prefix_len, e.aligned, e.committed, e.finished) for e in told] == [
        (0, 2 * page, 2 * page, False),
        (2 * page, 2 * page, 2 * page, True),
        (2 * page, length // page * page, length, True),
    ]


def test_nothing_is_built_when_nobody_listens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(kind: type[ev.Event]) -> None:
        def init(self: ev.Event, *args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"{kind.__name__} was built for nobody")

        monkeypatch.setattr(kind, "__init__", init)

    for kind in ev.EVENT_TYPES:
        forbid(kind)
    first = world.run(prompt(world, 2))
    world.decode(first, [1, 2, 3])
    world.end(world.run(prompt(world, 2)))
    world.end(first)
    world.own.make_room(64 * world.page)
    world.own.flush()
