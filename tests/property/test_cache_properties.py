"""The tree against models that are too simple to be wrong, after every step of random programs.

Four models run beside one cache: a dict of prefixes (what matches, in which slots), a brute-force choice
of victims, a count of locks, and a replay of the emitted events, which must give the tree's snapshot
exactly. MINIRAD_EXAMPLES sets how many random programs are tried (default 80 per page size).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import typing
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import EVICTION_KEYS as KEYS

from minirad.cache.eviction import POLICIES
from minirad.cache.prefix_cache import Prefix
from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.snapshot import bare_snapshot

EXAMPLES = int(os.environ.get("MINIRAD_EXAMPLES", "80"))


Prompt = tuple[tuple[int, ...], str | None, bool]  # tokens, extra_key, is_bigram

# Made of few different blocks, so that prompts are long, share much and part at odd places.
blocks = st.sampled_from([(0,), (1,), (0, 1), (1, 1, 0), (0, 0, 0, 1), (1, 0, 1, 0, 1, 1)])
prompts = st.tuples(
    st.lists(blocks, min_size=1, max_size=4).map(lambda parts: tuple(itertools.chain(*parts))),
    st.sampled_from([None, None, None, "other"]),
    st.sampled_from([False, False, False, True]),
)


def units_of(prompt: Prompt) -> list[Any]:
    tokens, _, is_bigram = prompt
    return list(itertools.pairwise(tokens)) if is_bigram else list(tokens)


def said(found: Any) -> tuple[int, int]:
    """What a look at the tree says."""
    return found.length, found.cost


class PrefixModel:
    """Every whole-page prefix in the tree, with the slots of its last page. No nodes, no edges."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.pages: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def prefixes(self, prompt: Prompt) -> list[tuple[Any, ...]]:
        units = units_of(prompt)
        ends = range(self.page, len(units) + 1, self.page)
        return [(prompt[1], prompt[2], *units[:end]) for end in ends]

    def match(self, prompt: Prompt) -> list[int]:
        slots: list[int] = []
        for prefix in self.prefixes(prompt):
            if prefix not in self.pages:
                break
            slots += self.pages[prefix]
        return slots

    def insert(self, prompt: Prompt, slots: list[int]) -> None:
        for number, prefix in enumerate(self.prefixes(prompt)):
            own = tuple(slots[number * self.page : (number + 1) * self.page])
            self.pages.setdefault(prefix, own)

    def drop(self, slots: set[int]) -> None:
        self.pages = {p: own for p, own in self.pages.items() if not slots & set(own)}


def brute_force_victims(cache: RadixCache, num_tokens: int) -> list[int]:
    """Collect all evictable leaves, take the smallest key, remove it, and begin again."""
    nodes = {node.id: node for node in cache.walk() if node is not cache.root}
    victims: list[int] = []
    freed = 0
    while freed < num_tokens:
        parents = {node.parent.id for node in nodes.values() if node.parent is not None}
        leaves = [n for n in nodes.values() if n.id not in parents and n.lock_ref == 0]
        if not leaves:
            break
        victim = min(leaves, key=lambda n: (KEYS[cache.eviction_policy](n), n.id))
        victims.append(victim.id)
        freed += len(victim.slots)
        del nodes[victim.id]
    return victims


class CacheMachine(RuleBasedStateMachine):
    page = 1

    @initialize(policy=st.sampled_from(sorted(POLICIES)), first=st.lists(prompts, min_size=2, max_size=10))
    def plant(self, policy: str, first: list[Prompt]) -> None:
        self.cache = RadixCache(self.page, policy)
        self.model = PrefixModel(self.page)
        self.replay = ReplayState(bare_snapshot(self.cache))
        self.events: list[ev.Event] = []
        self.cache.bus.subscribe(None, self.events.append)
        self.held: list[Node] = []
        self.leaves: list[tuple[Node, Prompt]] = []  # who inserted what: candidates for growing
        self.alive: set[int] = set()
        self.gone: set[int] = set()
        self.next_page = 1
        self.tick = 0
        for number, prompt in enumerate(first):
            self.put(prompt, number % 3 - 1, None)

    def new_slots(self, prompt: Prompt) -> list[int]:
        count = len(units_of(prompt))
        first = self.next_page * self.page
        self.next_page += -(-count // self.page)
        return list(range(first, first + count))

    def key(self, prompt: Prompt) -> RadixKey:
        return RadixKey(prompt[0], prompt[1], prompt[2])

    # -------------------------------------------------------------- rules

    @rule(prompt=prompts, count_hit=st.booleans())
    def match_anything(self, prompt: Prompt, count_hit: bool) -> None:
        self.match(prompt, count_hit)

    @precondition(lambda self: self.leaves)
    @rule(data=st.data(), change=st.sampled_from(["match", "insert", "grow", "evict", "lock"]), other=prompts)
    def look_twice(self, data: st.DataObject, change: str, other: Prompt) -> None:
        """What `find` said before something else was done is no harm when it is used afterwards."""
        leaf, (tokens, *space) = data.draw(st.sampled_from(self.leaves))
        cut, more = data.draw(st.integers(0, 4)), tuple(data.draw(st.lists(st.integers(0, 1), max_size=5)))
        prompt = ((tokens + more)[: len(tokens + more) - cut], *space)
        look = self.cache.find(self.key(prompt))
        if change == "match":
            self.match(prompt, True, look)
        elif change == "evict":
            self.evict(self.page)
        elif change == "lock":
            self.lock_node(self.cache.match_prefix(self.key(prompt), found=look).last_node)
            self.tick += 1
        else:
            self.put((tokens + more, *space), 0, leaf if change == "grow" else None)
        known = self.cache.find(self.key(prompt), look)
        assert said(known) == said(self.cache.find(self.key(prompt)))
        assert said(self.cache.find(self.key(other), look)) == said(self.cache.find(self.key(other)))
        self.match(prompt, True, data.draw(st.sampled_from([look, known])))

    def match(self, prompt: Prompt, count_hit: bool, look: Prefix | None = None) -> None:
        expected = self.model.match(prompt)
        found = self.cache.match_prefix(self.key(prompt), count_hit=count_hit, found=look)
        self.tick += 1
        assert found.slots.tolist() == expected and found.length == len(expected)
        assert self.cache.path_slots(found.last_node).tolist() == expected  # ends where the match ends

    @precondition(lambda self: self.leaves)
    @rule(data=st.data(), cut=st.integers(0, 4), times=st.integers(1, 3))
    def match_what_was_put_in(self, data: st.DataObject, cut: int, times: int) -> None:
        tokens, *space = data.draw(st.sampled_from(self.leaves))[1]
        for _ in range(times):
            self.match((tokens[: len(tokens) - cut], *space), True)

    @rule(prompt=prompts)
    def peek(self, prompt: Prompt) -> None:
        before, told = self.cache.snapshot(), len(self.events)
        assert self.cache.peek(self.key(prompt)) == len(self.model.match(prompt))
        cost = self.cache.find(self.key(prompt)).cost
        assert self.cache.snapshot() == before and len(self.events) == told
        found = self.cache.match_prefix(self.key(prompt), count_hit=False)
        self.tick += 1
        assert self.cache.inc_lock_ref(found.last_node) == cost
        self.held.append(found.last_node)

    @rule(prompt=prompts, priority=st.integers(-2, 2))
    def insert(self, prompt: Prompt, priority: int) -> None:
        self.put(prompt, priority, None)

    @precondition(lambda self: self.leaves)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5), hold=st.booleans())
    def grow(self, data: st.DataObject, more: list[int], hold: bool) -> None:
        leaf, prompt = data.draw(st.sampled_from(self.leaves))
        if hold and leaf.parent is not None:
            self.lock_node(leaf)
        self.put((prompt[0] + tuple(more), *prompt[1:]), 0, leaf)

    def put(self, prompt: Prompt, priority: int, grow: Node | None) -> None:
        matched = self.model.match(prompt)
        slots = self.new_slots(prompt)
        may_grow = (
            grow is not None
            and grow.parent is not None
            and not grow.children
            and grow.lock_ref <= 1
            and self.cache.path_slots(grow).tolist() == matched
            and bool(matched)
        )
        before = (grow.created, grow.hits, grow.priority) if grow is not None else ()
        inserted = self.cache.insert(self.key(prompt), slots, priority, grow)
        self.tick += 1
        self.model.insert(prompt, slots)
        node = inserted.last_node
        assert inserted.prefix_len == len(matched)
        assert self.cache.path_slots(node).tolist() == self.model.match(prompt)
        if len(self.model.match(prompt)) > len(matched):
            assert (node is grow) == may_grow
            if not may_grow:
                assert (node.created, node.hits, node.priority) == (self.tick, 0, priority)
                assert node.id not in self.alive
            self.leaves.append((node, prompt))
        if may_grow and grow is not None:
            assert (grow.created, grow.hits, grow.priority) == (*before[:2], max(before[2], priority))
            assert grow.last_access == self.tick

    def lock_node(self, node: Node) -> None:
        moved = sum(len(n) for n in self.cache.path_up(node) if n.lock_ref == 0)
        assert self.cache.inc_lock_ref(node) == moved
        self.held.append(node)

    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        nodes = {node.id: node for node in self.cache.walk()}
        self.lock_node(nodes[data.draw(st.sampled_from(sorted(nodes)))])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        moved = sum(len(n) for n in self.cache.path_up(node) if n.lock_ref == 1)
        assert self.cache.dec_lock_ref(node) == moved

    @rule(num_tokens=st.integers(0, 6))
    def evict(self, num_tokens: int) -> None:
        expected = brute_force_victims(self.cache, num_tokens)
        nodes = {node.id: node for node in self.cache.walk()}
        slots = [slot for number in expected for slot in nodes[number].slots.tolist()]
        told = len(self.events)
        result = self.cache.evict(num_tokens)
        victims = [event.node for event in self.events[told:] if isinstance(event, ev.NodeEvicted)]
        assert victims == expected
        assert result.slots.tolist() == slots and result.num_tokens == len(slots)
        self.model.drop(set(slots))

    @precondition(lambda self: self.cache.evictable_size)
    @rule()
    def evict_tells_who_is_next(self) -> None:
        expected = brute_force_victims(self.cache, 10**6)[:2]
        told = len(self.events)
        self.model.drop(set(self.cache.evict(1).slots.tolist()))
        event = self.events[told]
        assert isinstance(event, ev.NodeEvicted)
        assert [event.node, event.runner_up] == [*expected, None][:2]

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def change_policy(self, policy: str) -> None:
        self.cache.eviction_policy = policy

    @rule(chance=st.integers(0, 19))
    def reset(self, chance: int) -> None:
        if chance == 7:  # now and then
            self.cache.reset()
            self.model.pages.clear()
            self.held.clear()

    # -------------------------------------------------------------- after every step

    @invariant()
    def holds_together(self) -> None:
        self.cache.check()
        sizes = self.cache.evictable_size, self.cache.protected_size
        assert min(sizes) >= 0 and sum(sizes) == self.cache.total_size
        assert self.cache.total_size == len(self.model.pages) * self.page

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        in_tree = sorted(slot for node in self.cache.walk() for slot in node.slots.tolist())
        assert in_tree == sorted(slot for own in self.model.pages.values() for slot in own)

    @invariant()
    def locks_are_those_taken(self) -> None:
        for node in self.cache.walk():
            if node is self.cache.root:
                assert node.lock_ref == 0
                continue
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref - below == sum(held is node for held in self.held)

    @invariant()
    def events_tell_everything(self) -> None:
        for event in self.events:
            self.replay.apply(event)
            assert event.describe()
        self.events.clear()
        assert self.replay.snapshot() == bare_snapshot(self.cache)
        assert self.cache.snapshot()["tick"] == self.tick

    @invariant()
    def ids_are_never_used_again(self) -> None:
        alive = {node.id for node in self.cache.walk()} - {0}
        assert not alive & self.gone
        new = alive - self.alive
        assert not new or min(new) > max(self.alive | self.gone, default=0)
        self.gone |= self.alive - alive
        self.alive = alive


def machine(page: int) -> Any:
    case = type(f"Page{page}", (CacheMachine,), {"page": page}).TestCase
    case.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=50, derandomize=True, deadline=None, database=None
    )
    return case


TestPage1, TestPage2, TestPage3 = machine(1), pytest.mark.slow(machine(2)), machine(3)


# ------------------------------------------------------------------ events


def sample(kind: type[ev.Event]) -> ev.Event:
    """An event with plausible values, made from its fields' types."""
    values = {
        str: "R1",
        int: 3,
        bool: True,
        float: 0.5,
        tuple[int, ...]: (1, 2),
        tuple[str, ...]: ("R1", "R2"),
    }
    hints = typing.get_type_hints(kind)
    fields = [hints[field.name] for field in dataclasses.fields(kind)]
    return kind(*(values[int if hint == int | None else hint] for hint in fields))


@pytest.mark.parametrize("kind", ev.EVENT_TYPES)
def test_every_event_says_itself_in_one_plain_sentence(kind: type[ev.Event]) -> None:
    sentence = sample(kind).describe()
    assert sentence and sentence.strip() == sentence and "\n" not in sentence
    assert not sentence.endswith(".") and "None" not in sentence
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
        sample(kind).anything = 1  # type: ignore[attr-defined]
    assert hash(sample(kind)) == hash(sample(kind)) and sample(kind) == sample(kind)


def test_all_event_types_are_listed() -> None:
    # By name: a dataclass with slots leaves its slotless draft behind among the subclasses.
    # Other tests declare events of their own.
    every = [kind for kind in ev.Event.__subclasses__() if kind.__module__.startswith("minirad.")]
    ours = {kind.__name__ for kind in every if kind.by_engine}
    assert ours == {kind.__name__ for kind in ev.EVENT_TYPES}


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (ev.NodeInserted(2, 0, (7,), (1,), 1, 0, 0), "1 token inserted as n2 below the root"),
        (ev.NodeSplit(4, 2, 20, 1), "n2 split at 20: n4 is its upper half"),
        (ev.PrefixTouched((), 5, True, None), "nothing of the key is in the tree (tick 5)"),
        (ev.PrefixTouched((1, 4), 5, True, None), "n1 → n4 hit at tick 5"),
        (ev.PrefixTouched((1,), 6, False, 0), "n1 touched at tick 6"),
        (ev.NodeGrown(3, (1, 2), (8, 9), 4, 0), "n3 grew by 2 tokens"),
        (ev.NodeEvicted(3, 0, (1, 2), "lru", "why", None), "n3 evicted, 2 slots freed: why"),
        (ev.NodeEvicted(3, 0, (1,), "lru", "why", 9), "n3 evicted, 1 slot freed: why, next would be n9"),
        (ev.CacheFlushed(1), "cache flushed: 1 token forgotten"),
        (ev.RequestForked("R1.1", "R1", -1, 0), "R1.1 branches off R1 and has to wait for room"),
    ],
)
def test_sentences(event: ev.Event, sentence: str) -> None:
    assert event.describe() == sentence


def test_subscribing_by_type_and_to_all() -> None:
    bus = ev.EventBus()
    order: list[tuple[str, ev.Event]] = []
    assert not bus.wants(ev.CacheFlushed)
    stop_all = bus.subscribe(None, lambda event: order.append(("all", event)))
    stop_one = bus.subscribe(ev.CacheFlushed, lambda event: order.append(("one", event)))
    flushed, split = ev.CacheFlushed(3), ev.NodeSplit(1, 2, 3, 4)
    bus.emit(flushed)
    bus.emit(split)
    assert order == [("one", flushed), ("all", flushed), ("all", split)]
    stop_all()
    stop_all()  # twice does no harm
    assert bus.wants(ev.CacheFlushed) and not bus.wants(ev.NodeSplit)
    stop_one()
    assert not any(bus.wants(kind) for kind in ev.EVENT_TYPES)
    bus.emit(flushed)
    assert len(order) == 3


def test_one_handler_twice_is_called_twice_and_leaves_one_by_one() -> None:
    bus, seen = ev.EventBus(), []
    stops = [bus.subscribe(ev.CacheFlushed, seen.append) for _ in range(2)]
    bus.emit(ev.CacheFlushed(1))
    assert len(seen) == 2
    stops[0]()
    stops[0]()
    bus.emit(ev.CacheFlushed(1))
    assert len(seen) == 3, "ending one subscription twice must not end the other"


@pytest.mark.parametrize("kind", [ev.Event, int, "NodeSplit"])
def test_unknown_event_types_are_refused(kind: Any) -> None:
    bus = ev.EventBus()
    with pytest.raises(ValueError, match=r"is no event type: one of minirad.events.EVENT_TYPES"):
        bus.subscribe(kind, print)
    assert not bus.wants(ev.NodeSplit)


def exercise(cache: RadixCache) -> None:
    """Every emit site of the tree, once at least."""
    leaf = cache.insert(RadixKey([1, 2, 3, 4]), [1, 2, 3, 4]).last_node
    cache.inc_lock_ref(leaf)
    cache.insert(RadixKey([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], grow=leaf)
    cache.match_prefix(RadixKey([1, 2, 9]))
    cache.insert(RadixKey([1, 2, 8]), [1, 2, 8])
    cache.dec_lock_ref(leaf)
    cache.evict(2)
    cache.eviction_policy = "lfu"
    cache.reset()


TREE_EVENTS = {
    "PrefixTouched", "NodeInserted", "NodeGrown", "NodeSplit", "NodeLocked", "NodeUnlocked",
    "NodeEvicted", "PolicyChanged", "CacheFlushed",
}  # fmt: skip


class DeafBus(ev.EventBus):
    def wants(self, kind: type[ev.Event]) -> bool:
        return False

    def emit(self, event: ev.Event) -> None:
        raise AssertionError(f"{event} was emitted although nobody wants it")


def test_nothing_is_emitted_to_a_bus_that_wants_nothing() -> None:
    exercise(RadixCache(bus=DeafBus()))


def test_every_emit_site_is_exercised() -> None:
    cache, told = RadixCache(), []
    cache.bus.subscribe(None, told.append)
    exercise(cache)
    assert {type(event).__name__ for event in told} == TREE_EVENTS


@pytest.mark.parametrize("listened", [None, *sorted(TREE_EVENTS)])
def test_only_what_is_listened_to_is_built(listened: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def counted(kind: type[ev.Event]) -> None:
        real = kind.__init__

        def init(self: ev.Event, *args: Any, **kwargs: Any) -> None:
            built.append(kind.__name__)
            real(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", init)

    for kind in ev.EVENT_TYPES:
        counted(kind)
    cache = RadixCache()
    if listened is not None:
        cache.bus.subscribe(getattr(ev, listened), lambda event: None)
    exercise(cache)
    assert set(built) == ({listened} if listened else set())


def test_listening_changes_nothing() -> None:
    loud, silent = RadixCache(), RadixCache()
    loud.bus.subscribe(None, lambda event: None)
    for cache in (loud, silent):
        exercise(cache)
        cache.insert(RadixKey([5, 6], "space"), [1, 2])
    assert loud.snapshot() == silent.snapshot()


# ------------------------------------------------------------------ a cache on its own, recorded


def test_a_recorded_cache_replays_to_every_frame(tmp_path: Any) -> None:
    cache = RadixCache(2)
    states = []
    with Recorder(cache, tmp_path / "run.jsonl", keyframe_every=3) as recorder:
        for number in range(8):
            key = RadixKey([1, 2, 3, 4, number % 3, 6], None if number % 2 else "b")
            found = cache.match_prefix(key)
            cache.inc_lock_ref(found.last_node)
            cache.insert(key, range(10 * number, 10 * number + 6), grow=found.last_node)
            cache.dec_lock_ref(found.last_node)
            if number == 5:
                cache.evict(3)
            recorder.cut()
            states.append(bare_snapshot(cache))
        cache.reset()
    states.append(bare_snapshot(cache))  # closing the recorder writes a last frame
    for recording in (recorder, Recorder.load(tmp_path / "run.jsonl")):
        assert len(recording) == len(states)
        for number, state in enumerate(states):
            assert recording.state(number) == state
