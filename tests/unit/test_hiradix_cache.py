"""The second tier, rule by rule, with copies that end when the test says so and may fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from minirad import RadixKey
from minirad.cache.eviction import POLICIES
from minirad.errors import HostCopyError, InvariantError
from minirad.observe import events as ev
from minirad.tiers.hiradix_cache import HiRadixCache, HostNode


@dataclasses.dataclass
class Copy:
    """Ends when `end` is called; whoever waits for it ends it well."""

    device: list[int]
    host: list[int]
    over: bool = False
    arrives: bool = True
    waited: bool = False

    def end(self, arrives: bool = True) -> None:
        self.over, self.arrives = True, arrives

    def done(self) -> bool:
        return self.over

    def wait(self) -> bool:
        self.over = self.waited = True
        return self.arrives


class ByHand:
    """A Copier that notes what it was asked for. `refuse`: what the next call raises."""

    def __init__(self) -> None:
        self.backups: list[Copy] = []
        self.loads: list[Copy] = []
        self.refuse: BaseException | None = None
        self.arrives = True

    def _copy(self, kept: list[Copy], device: Any, host: Any) -> Copy:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        kept.append(Copy(device.tolist(), host.tolist(), arrives=self.arrives))
        return kept[-1]

    def backup(self, device_slots: Any, host_slots: Any) -> Copy:
        return self._copy(self.backups, device_slots, host_slots)

    def load(self, host_slots: Any, device_slots: Any) -> Copy:
        return self._copy(self.loads, device_slots, host_slots)


class Tree:
    """A HiRadixCache with fresh slots for every insert, checked after everything that is done to it."""

    def __init__(
        self, write: str = "write_through", page: int = 1, host: int = 16, policy: str = "lru"
    ) -> None:
        self.copier, self.page, self.next = ByHand(), page, page
        self.cache = HiRadixCache(page, policy, host_tokens=host, host_write=write, copier=self.copier)
        self.heard: list[ev.Event] = []
        self.cache.bus.subscribe(None, self.heard.append)

    def key(self, text: str) -> RadixKey:
        return RadixKey([ord(letter) for letter in text])

    def put(self, text: str, seal: bool = True, grow: Any = None) -> HostNode:
        size = len(text)
        slots = range(self.next, self.next + size)
        self.next += -(-size // self.page) * self.page
        node: Any = self.cache.insert(self.key(text), slots, grow=grow).last_node
        if seal:
            self.cache.seal(node)
        self.cache.check()
        return node

    def hit(self, text: str) -> Any:
        match = self.cache.match_prefix(self.key(text))
        self.cache.check()
        return match

    def end(self, arrives: bool = True) -> None:
        """The oldest copy that is under way ends."""
        next(copy for copy in self.copier.backups + self.copier.loads if not copy.over).end(arrives)
        self.cache.poll()
        self.cache.check()

    def copied(self, text: str) -> HostNode:
        node = self.put(text)
        while node.copying:
            self.end()
        return node

    def evict(self, tokens: int) -> list[int]:
        slots: list[int] = self.cache.evict(tokens).slots.tolist()
        self.cache.check()
        return slots

    def load(self, text: str) -> bool:
        """As the engine does it: match, lock, hold, load, release."""
        match = self.hit(text)
        self.cache.inc_lock_ref(match.last_node)
        chain = self.cache.hold_host(match)
        slots = range(self.next, self.next + match.host_length)
        self.next += match.host_length
        loaded = self.cache.load_back(chain, list(slots))
        self.cache.release_host(chain)
        self.cache.dec_lock_ref(match.last_node)
        self.cache.check()
        return loaded

    def tiers(self, node: HostNode) -> str:
        assert node.parent is not None, "it left the tree"
        return "+".join(name for name, there in (("device", node.packed), ("host", node.host)) if there)


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    made = Tree(page=request.param)
    yield made
    made.cache.poll(wait=True)
    made.cache.check()


# ---------------------------------------------------------------------- when copies are made


def test_write_through_copies_when_the_request_stops_growing_the_node(tree: Tree) -> None:
    leaf = tree.put("abcd", seal=False)
    assert tree.copier.backups == []
    assert tree.put("abcdef", seal=False, grow=leaf) is leaf and len(leaf) == 6
    tree.cache.seal(leaf)
    (copy,) = tree.copier.backups
    assert copy.device == leaf.slots.tolist() and copy.host == leaf.host_slots.tolist()


def test_selective_copies_at_the_second_hit() -> None:
    tree = Tree("write_through_selective")
    leaf = tree.put("abcd")
    tree.hit("abcd")
    assert tree.copier.backups == []
    tree.hit("abcd")
    assert len(tree.copier.backups) == 1 and leaf.copying is not None
    tree.hit("abcd")
    assert len(tree.copier.backups) == 1


def test_a_look_that_counts_no_hit_copies_nothing() -> None:
    tree = Tree("write_through_selective")
    tree.put("abcd")
    for _ in range(5):
        tree.cache.match_prefix(tree.key("abcd"), count_hit=False)
        tree.cache.peek(tree.key("abcd"))
    assert tree.copier.backups == []


def test_write_back_copies_at_eviction_and_hands_slots_out_when_the_copy_is_there() -> None:
    tree = Tree("write_back")
    leaf = tree.put("abcd")
    assert tree.copier.backups == []
    slots = leaf.slots.tolist()
    assert tree.evict(1) == slots
    (copy,) = tree.copier.backups
    assert copy.waited and copy.device == slots and tree.tiers(leaf) == "host"


def test_write_back_writes_once_what_comes_and_goes() -> None:
    tree = Tree("write_back")
    leaf = tree.put("abcd")
    for _ in range(3):
        tree.evict(4)
        assert tree.load("abcd")
        tree.cache.poll(wait=True)
        assert tree.tiers(leaf) == "device+host"
    assert len(tree.copier.backups) == 1


def test_parents_are_copied_before_children(tree: Tree) -> None:
    tree.copier.refuse = HostCopyError("no")
    tree.put("abcd")
    assert tree.copier.backups == []
    leaf = tree.put("abcdef")  # its path is copied from the top
    assert [len(copy.device) for copy in tree.copier.backups] == [4, 2]
    assert leaf.parent.copying is not None  # type: ignore[union-attr]


def test_below_an_uncopied_node_nothing_is_copied() -> None:
    tree = Tree(host=4)
    tree.put("abcdefgh")  # more than the host can take
    tree.put("abcdefghi")
    assert tree.copier.backups == []


# ---------------------------------------------------------------------- while a copy is under way


def test_a_node_whose_copy_has_begun_is_locked_and_closed_to_growth(tree: Tree) -> None:
    leaf = tree.put("abcd")
    assert leaf.lock_ref == 1 and tree.cache.copy_locks == [leaf]
    child = tree.put("abcdef", seal=False, grow=leaf)
    assert child is not leaf and len(leaf) == 4
    tree.end()
    assert leaf.lock_ref == 0 and leaf.backed_up


def test_eviction_waits_for_copies_only_when_there_is_nothing_else(tree: Tree) -> None:
    first = tree.copied("abcd")
    second = tree.put("wxyz")
    assert tree.evict(1) == first.slots.tolist() or tree.tiers(first) == "host"
    assert second.copying is not None and not tree.copier.backups[1].waited
    tree.evict(8)
    assert tree.copier.backups[1].waited and tree.tiers(second) == "host"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_split_while_the_copy_is_under_way_keeps_both_halves_right(tree: Tree, arrives: bool) -> None:
    leaf = tree.put("abcdef")
    (copy,) = tree.copier.backups
    tree.hit("abcdxx")
    upper: Any = leaf.parent
    assert [*upper.host_slots, *leaf.host_slots] == copy.host
    assert [*upper.slots, *leaf.slots] == copy.device
    tree.end(arrives)
    assert (upper.backed_up, leaf.backed_up) == (arrives, arrives)
    assert tree.cache.host_size == (6 if arrives else 0)
    assert ev.BackupEnded((upper.id, leaf.id), arrives) in tree.heard


def test_a_split_after_the_copy_keeps_both_halves_right(tree: Tree) -> None:
    leaf = tree.copied("abcdef")
    tree.hit("abcdxx")
    upper: Any = leaf.parent
    assert upper.backed_up and leaf.backed_up
    assert [*upper.host_slots, *leaf.host_slots] == tree.copier.backups[0].host
    tree.evict(6)
    assert (tree.tiers(upper), tree.tiers(leaf)) == ("host", "host")
    assert tree.hit("abcdef").host_length == 6


def test_a_split_on_the_host_only_keeps_both_halves_right(tree: Tree) -> None:
    leaf = tree.copied("abcdef")
    tree.evict(6)
    match = tree.hit("abcdxx")
    assert (match.length, match.host_length) == (0, 4) and match.host_node is leaf.parent
    assert tree.tiers(match.host_node) == tree.tiers(leaf) == "host"


def test_a_split_while_loading_keeps_both_halves_held(tree: Tree) -> None:
    leaf = tree.copied("abcdef")
    tree.evict(6)
    assert tree.load("abcdef")
    tree.hit("abcdxx")
    upper: Any = leaf.parent
    assert (upper.host_locks, leaf.host_locks) == (1, 1) and leaf.lock_ref == 1
    tree.end()
    assert (upper.host_locks, leaf.host_locks, leaf.lock_ref) == (0, 0, 0)


# ---------------------------------------------------------------------- what fails is no copy


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_copy_that_cannot_begin_is_none(write: str) -> None:
    tree = Tree(write)
    leaf = tree.put("abcd", seal=False)
    tree.copier.refuse = HostCopyError("no")
    tree.cache.seal(leaf)
    tree.copier.refuse = tree.copier.refuse or (HostCopyError("no") if write == "write_back" else None)
    tree.evict(4)
    assert leaf.parent is None and tree.cache.host_size == 0 and tree.hit("abcd").host_length == 0


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_a_copy_that_fails_at_its_end_is_none(write: str) -> None:
    tree = Tree(write)
    tree.copier.arrives = False
    leaf = tree.put("abcd")
    assert len(tree.evict(4)) == 4  # the slots are free all the same: what was in them is forgotten
    assert leaf.parent is None and tree.cache.host_size == 0


def test_a_child_is_not_kept_when_its_parents_copy_fails(tree: Tree) -> None:
    parent = tree.put("abcd")
    child = tree.put("abcdef")
    tree.copier.backups[1].end()  # the child's data have arrived before anybody asks
    tree.end(arrives=False)
    assert not parent.host and not child.host and tree.cache.host_size == 0
    tree.put("abcdefgh")  # and the next one tries again, from the top
    assert [len(copy.device) for copy in tree.copier.backups[2:]] == [4, 2, 2]


def test_a_child_is_not_kept_by_its_parents_second_try(tree: Tree) -> None:
    parent = tree.put("abcd")
    child = tree.put("abcdef")
    tree.end(arrives=False)  # of the parent
    tree.put("abcdefgh")  # which begins its second copy while the child's first is under way
    assert parent.copying is not None and child.copying is not None
    tree.end()  # of the child
    tree.end(arrives=False)  # of the parent, again
    assert not parent.host and not child.host


def test_between_the_ends_of_two_copies_all_is_well(tree: Tree) -> None:
    tree.put("abcd")
    child = tree.put("abcdef")
    tree.end(arrives=False)  # of the parent; the child's goes on
    assert child.copying is not None
    tree.end()
    assert not child.host


def test_write_back_takes_along_what_nobody_could_reach() -> None:
    tree = Tree("write_back", host=4)
    parent = tree.put("abcd")
    child = tree.put("abcdef")
    tree.evict(2)
    assert tree.tiers(child) == "host"
    tree.copier.arrives = False
    tree.evict(4)
    assert parent.parent is None and child.parent is None and tree.cache.host_size == 0
    assert isinstance(tree.heard[-2], ev.HostEvicted) or isinstance(tree.heard[-1], ev.NodeEvicted)


def test_an_interrupted_copy_leaves_the_node_as_evictable_as_it_was() -> None:
    tree = Tree("write_back")
    tree.put("abcd")
    tree.copier.refuse = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tree.cache.evict(4)
    tree.cache.check()
    assert tree.cache.evictable_size == 4 and len(tree.evict(4)) == 4


# ---------------------------------------------------------------------- finding and loading


def test_a_match_walks_through_nodes_on_the_host(tree: Tree) -> None:
    tree.copied("abcd")
    leaf = tree.copied("abcdefgh")
    tree.evict(4)  # the leaf's
    match = tree.hit("abcdefgh")
    assert (match.length, match.host_length, match.host_node) == (4, 4, leaf)
    assert match.last_node is leaf.parent and len(match.slots) == 4
    assert tree.cache.peek(tree.key("abcdefgh")) == 4 and tree.cache.peek_tiers(tree.key("abcdefgh")) == (
        4,
        4,
    )
    tree.evict(4)
    assert tree.hit("abcdefgh")[1:4] == (0, tree.cache.root, 8)


def test_a_load_brings_all_of_it_back_and_holds_its_source(tree: Tree) -> None:
    tree.copied("abcd")
    leaf = tree.copied("abcdefgh")
    tree.evict(8)
    assert tree.load("abcdefgh")
    (copy,) = tree.copier.loads
    assert copy.device == tree.hit("abcdefgh").slots.tolist() and len(copy.host) == 8
    assert (leaf.host_locks, leaf.lock_ref) == (1, 1)
    assert tree.cache.evict(8).num_tokens == 8 and copy.waited  # not before it is over
    assert tree.tiers(leaf) == "host"


def test_a_load_that_cannot_begin_changes_nothing(tree: Tree) -> None:
    leaf = tree.copied("abcd")
    tree.evict(4)
    tree.copier.refuse = HostCopyError("no")
    assert not tree.load("abcd")
    assert tree.tiers(leaf) == "host" and leaf.host_locks == 0 and tree.cache.total_size == 0


def test_a_load_wants_a_slot_for_every_token(tree: Tree) -> None:
    tree.copied("abcd")
    tree.evict(4)
    chain = tree.cache.hold_host(tree.hit("abcd"))
    with pytest.raises(ValueError, match="3 slots to load 4 tokens of 1 nodes"):
        tree.cache.load_back(chain, [1, 2, 3])
    tree.cache.release_host(chain)
    tree.cache.check()


def test_what_is_held_does_not_leave_the_host() -> None:
    tree = Tree(host=4)
    tree.copied("abcd")
    tree.evict(4)
    chain = tree.cache.hold_host(tree.hit("abcd"))
    tree.cache.seal(tree.cache.insert(tree.key("wxyz"), range(40, 44)).last_node)  # its copy has no room
    assert [node.host_evictable for node in chain] == [False] and len(tree.copier.backups) == 1
    tree.cache.release_host(chain)
    tree.put("wxyz")  # the same again
    assert len(tree.copier.backups) == 2 and chain[0].parent is None


def test_a_selective_copy_does_not_cost_the_match_that_began_it_its_end() -> None:
    tree = Tree("write_through_selective", host=6)
    for _ in range(3):
        tree.put("abcd")
        tree.hit("abcd")
    tree.cache.poll(wait=True)
    tree.put("abcdef")
    for _ in range(2):
        tree.hit("abcdef")
    tree.cache.poll(wait=True)
    tree.evict(2)
    match = tree.hit("abcdef")
    assert match.host_length == 2 and match.host_node.parent is not None


def test_an_insert_over_the_host_counts_what_the_device_has_and_gives_the_rest_its_slots(tree: Tree) -> None:
    parent = tree.copied("abcd")
    child = tree.copied("abcdefgh")
    tree.evict(4)
    result = tree.cache.insert(tree.key("abcdefghij"), range(40, 50))
    tree.cache.check()
    assert result.prefix_len == 4
    assert child.slots.tolist() == [44, 45, 46, 47] and child.backed_up and parent.slots[0] != 40
    assert result.last_node.slots.tolist() == [48, 49] and result.last_node.parent is child


def test_an_insert_that_ends_inside_a_node_on_the_host_gives_slots_to_the_upper_half(tree: Tree) -> None:
    leaf = tree.copied("abcdef")
    tree.evict(6)
    result = tree.cache.insert(tree.key("abcd"), range(40, 44))
    tree.cache.check()
    assert result.prefix_len == 0 and tree.tiers(result.last_node) == "device+host"  # type: ignore[arg-type]
    assert tree.tiers(leaf) == "host"


# ---------------------------------------------------------------------- who leaves the host


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_host_gives_up_leaves_that_are_nowhere_else(policy: str) -> None:
    tree = Tree(host=12, policy=policy)
    kept = tree.copied("abcd")
    for text in ("efgh", "ijkl"):
        tree.copied(text)
    tree.cache.inc_lock_ref(kept)
    tree.evict(8)
    tree.put("mnop")  # room for its copy: one of the two, not what the device holds as well
    assert tree.tiers(kept) == "device+host"
    assert sum(isinstance(event, ev.HostEvicted) for event in tree.heard) == 1
    tree.cache.dec_lock_ref(kept)


@pytest.mark.parametrize(
    ("policy", "goes"), [("lru", "efgh"), ("mru", "abcd"), ("fifo", "abcd"), ("filo", "ijkl")]
)
def test_a_changed_policy_is_the_hosts_too(policy: str, goes: str) -> None:
    tree = Tree(host=12)
    texts = ("abcd", "efgh", "ijkl")
    for text in texts:
        tree.copied(text)
    tree.evict(12)
    for text in ("efgh", "ijkl", "abcd"):
        tree.hit(text)
    tree.cache.eviction_policy = policy
    tree.cache.check()
    tree.put("mnop")
    gone = [text for text in texts if tree.cache.peek_tiers(tree.key(text)) == (0, 0)]
    assert gone == [goes]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_policy_that_fails_for_one_tier_is_neithers(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    tree = Tree(host=8)
    texts = ("abcd", "efgh", "ijkl", "mnop")
    nodes = [tree.copied(text) for text in texts[:2]]
    tree.evict(8)
    nodes += [tree.put(text, seal=False) for text in texts[2:]]
    bad = nodes[3].id if tier == "device" else nodes[1].id
    policy = dataclasses.replace(POLICIES["filo"], name="own", key=lambda node: -node.id // (node.id != bad))
    monkeypatch.setitem(POLICIES, "own", policy)
    with pytest.raises(ZeroDivisionError):
        tree.cache.eviction_policy = "own"
    assert tree.cache.eviction_policy == "lru"
    tree.cache.check()
    assert tree.evict(4) == list(range(9, 13))  # the older of the two on the device
    tree.copied("qrst")
    assert [tree.cache.peek_tiers(tree.key(text)) for text in texts[:2]] == [(0, 0), (0, 4)]


def test_new_weights_find_nothing_in_either_tier(tree: Tree) -> None:
    tree.copied("abcd")
    tree.evict(4)
    tree.put("wxyz")
    tree.cache.bump_version()
    tree.cache.check()
    for text in ("abcd", "wxyz"):
        assert tree.cache.peek_tiers(tree.key(text)) == (0, 0)
    assert tree.put("abcd").parent is tree.cache.root
    tree.evict(8)  # the old nodes go like any others
    assert tree.cache.total_size == 0


def test_a_reset_waits_for_copies_and_empties_both_tiers(tree: Tree) -> None:
    tree.put("abcd")
    tree.copied("wxyz")
    tree.put("wxyzab")
    tree.cache.reset()
    tree.cache.check()
    assert all(copy.over for copy in tree.copier.backups)
    assert (tree.cache.total_size, tree.cache.host_size, tree.cache.copy_locks) == (0, 0, [])


# ---------------------------------------------------------------------- wrong input


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="unknown host_write 'sometimes'; known: write_through"):
        HiRadixCache(host_tokens=8, host_write="sometimes")
    with pytest.raises(ValueError, match="page_size 3 does not divide 8 tokens"):
        HiRadixCache(3, host_tokens=8)


def test_a_load_without_a_whole_copy_is_a_broken_promise(tree: Tree) -> None:
    leaf = tree.put("abcd")
    with pytest.raises(InvariantError, match="without a whole copy"):
        tree.cache.load_back([leaf], [1, 2, 3, 4])


def test_an_old_look_does_not_outlive_a_move_between_the_tiers() -> None:
    """Demotion, adoption and loading back change what is on the device, not the tree's shape."""
    cache, key = HiRadixCache(host_tokens=10), RadixKey(list(range(10)))
    cache.seal(cache.insert(key, list(range(1, 11))).last_node)
    cache.poll(wait=True)

    def looked(found: Any) -> Any:
        again, fresh = cache.find(key, found), cache.find(key)
        assert (again.length, again.cost) == (fresh.length, fresh.cost)
        assert fresh.length == cache.peek(key) == cache.match_prefix(key, count_hit=False).length
        assert fresh.cost == cache.lock_cost(key)
        return again

    found = looked(None)
    cache.evict(10)
    found = looked(found)
    assert found.length == 0
    cache.insert(key, list(range(11, 21)))  # computed again: adopted
    found = looked(found)
    assert found.length == 10
    cache.evict(10)
    found = looked(found)
    chain = cache.hold_host(cache.match_prefix(key))
    assert cache.load_back(chain, list(range(31, 41)))
    cache.release_host(chain)
    assert looked(found).length == 10
    cache.poll(wait=True)
    cache.check()
