"""The radix tree: which prefixes have their KV in the pool, and in which slots.

An edge carries a run of tokens and the slots that hold their keys and values; a path from the root
spells a prefix. This is an index only: it knows no model, no tensors and no allocator. Slots
come in through `insert` and go out through `match_prefix` and `evict`; the caller owns the rest.

Four choices make plain Python fast here:

* **Tokens are compared as bytes.** `data[pos:end] != edge` compares a whole edge at memory speed, and
  cuts no more than that edge's length out of the key (cutting off all the rest at every node would
  cost depth x length). Where an edge is left in the middle, bisection finds the page.
* **Slots are kept as bytes, too** (`node.packed`, read as numbers through `node.slots`). Cutting and
  joining bytes takes a fraction of the time of the same on small numpy arrays, and the pieces are
  copies by nature: a view would keep a large array alive for as long as any small part of it.
* **One clock tick per operation.** All nodes that a match or insert touched share it, so "least
  recently used" needs no time stamps that must be compared node by node, and two runs are alike.
* **Eviction keeps its heap** between calls (eviction.py).

Watching the tree (`check`, `snapshot`) is done from observe/. Does not do: locking against threads.
`lock_ref` is no mutex: it counts the running requests whose rows point into a node's slots, so that
eviction leaves them alone. One thread drives the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from minirad.cache.eviction import POLICIES, EvictionPolicy, EvictionQueue
from minirad.cache.eviction import eviction_policy as policy_named
from minirad.cache.node import SLOT_BYTES, Node, RadixKey, Slots
from minirad.cache.prefix_cache import Prefix, TreeHooks
from minirad.errors import InvariantError, as_int64, said, whole
from minirad.observe import events as ev
from minirad.rooms import room

__all__ = [
    "EvictResult", "InsertResult", "MatchResult", "Node", "RadixCache", "RadixKey", "Slots", "as_int64",
]  # fmt: skip

NO_PRIORITY = -(2**63)  # what a look-up adds to a node's priority: nothing


class MatchResult(NamedTuple):
    """`length` matched units in `slots` (a copy), ending at `last_node` (the root for none).

    `host_length` further units match, up to `host_node`, whose KV lies in host memory only
    (hiradix_cache.py).
    """

    slots: Slots
    length: int
    last_node: Node
    host_length: int = 0
    host_node: Node | None = None


class InsertResult(NamedTuple):
    """`prefix_len` units were in the tree before, with slots of their own; the path ends at `last_node`."""

    prefix_len: int
    last_node: Node


class EvictResult(NamedTuple):
    """`slots` of whole leaves, `num_tokens` of them, no longer in the tree."""

    num_tokens: int
    slots: Slots


# The nodes that match whole, the bytes they hold, and, if the walk ends inside a further node, that node
# with the bytes of whole pages that match in it (else None, 0).
Walk = tuple[list[Node], int, Node | None, int]


class RadixCache(TreeHooks):
    """A radix tree over KV slots with locks and eviction.

    page_size: units per page; only whole pages are matched, split off, stored.
    eviction_policy: lru, lfu, fifo, mru, filo, priority, slru or brrip.
    bus: where events go; a cache of its own gets a bus of its own.

    Attributes:
        evictable_size, protected_size: tokens in unlocked and in locked nodes.
        version: of the model's weights: see `bump_version`.
        changes: a number that grows whenever a walk may go another way than before.
    """

    _Node: type[Node] = Node  # what nodes are made of
    eviction_policies = tuple(POLICIES)

    def __init__(
        self, page_size: int = 1, eviction_policy: str = "lru", bus: ev.EventBus | None = None
    ) -> None:
        super().__init__()
        self.page_size = whole("page_size", page_size, 1)
        if bus is not None and not isinstance(bus, ev.EventBus):
            raise ValueError(f"bus must be an EventBus or None, got {said(bus)}")
        self.bus = bus if bus is not None else ev.EventBus()
        self._queue = EvictionQueue(policy_named(eviction_policy))
        self._ids = count(1)  # never used again, also not after a reset
        self._tick = 0
        self.version = self._changes = 0
        self._plant()

    def _plant(self) -> None:
        self.root = self._Node(0, None, None, b"", b"", RadixKey(()))
        self.evictable_size = self.protected_size = 0
        self._changes += 1

    # -------------------------------------------------------------- looking up

    def _walk(self, key: RadixKey) -> Walk:
        """Follows the key as far as the tree goes, changing nothing."""
        if type(key) is not RadixKey and not isinstance(key, RadixKey):  # quicker to ask than the second
            raise ValueError(f"a RadixKey is needed, got {said(key)}")
        data, page = key.data, key.width * self.page_size
        path: list[Node] = []
        pos = 0
        child = self.root.children.get((key.namespace, data[:page]))
        while child is not None:
            edge = child.edge
            end = pos + len(edge)
            if data[pos:end] != edge:
                return path, pos, child, _shared_pages(edge, data, pos, page) * page
            path.append(child)
            pos = end
            # What is left over after the last whole page is shorter than a page: it finds no child.
            child = child.children.get(data[pos : pos + page])
        return path, pos, None, 0

    def find(self, key: RadixKey, found: Prefix | None = None) -> Prefix:
        """What would match of a key. Changes nothing, says nothing.

        found: an earlier answer, which still holds if it is of this key and the tree is as it was.
        """
        if found is not None and (found.tree, found.changes) == (self, self._changes) and found.key == key:
            return found
        walk = self._walk(key)
        return Prefix((walk[1] + walk[3]) // key.width, self, key, self._changes, walk)

    def lock_cost(self, key: RadixKey) -> int:
        """How many evictable tokens would become protected if this key's match were locked."""
        return self.find(key).cost

    def _cost(self, found: Prefix) -> int:
        path, _, child, shared = found.walk
        inside = shared if child is not None and child.lock_ref == 0 else 0
        cost: int = inside + sum(len(node.edge) for node in path if node.lock_ref == 0)
        return cost // int(found.key.width)

    def locked(self, key: RadixKey) -> int:
        """How much of a key's match is locked, and so costs no room."""
        found = self.find(key)
        return found.length - found.cost

    def peek(self, key: RadixKey) -> int:
        """How many units would match, rounded down to whole pages. Changes nothing, says nothing."""
        return RadixCache.find(self, key).length

    def match_prefix(
        self, key: RadixKey, *, count_hit: bool = True, found: Prefix | None = None
    ) -> MatchResult:
        """The longest prefix of `key` that is in the tree, in whole pages.

        A match that ends inside a node splits it, so that the end of the match is the end of a node
        and can be locked. Touches the path; counts a hit on it unless told not to.
        found: what `find` said of this key.
        """
        walk = self._walk(key) if found is None else self.find(key, found).walk
        path, end = self._touch(walk, count_hit, NO_PRIORITY)
        if not path:
            return MatchResult(np.empty(0, dtype=np.int64), 0, self.root)
        return MatchResult(_unpack([node.packed for node in path]), end // key.width, path[-1])

    def _touch(self, walk: Walk, hit: bool, priority: int) -> tuple[list[Node], int]:
        """Splits where a walk ends inside a node, and marks the path as just used."""
        path, pos, child, shared = walk
        self._tick = tick = self._tick + 1
        if shared and child is not None:
            path = [*path, self._split(child, shared, tick)]  # the walk may be a look that is kept
            pos += shared
        if hit:
            for node in path:
                node.last_access = tick
                node.hits += 1
        else:
            for node in path:
                node.last_access = tick
                if node.priority < priority:
                    node.priority = priority
        # Only the end can be a leaf. Policies like mru put it nearer to eviction by this touch.
        if path and not path[-1].children:
            self._queue.offer(path[-1])
        if self.bus.wants(ev.PrefixTouched):
            least = None if priority == NO_PRIORITY else priority
            self.bus.emit(ev.PrefixTouched(tuple(node.id for node in path), tick, hit, least))
        return path, pos

    def _split(self, lower: Node, at: int, tick: int) -> Node:
        """Cuts a node after `at` bytes and returns the new upper half.

        The lower half keeps its id, so what holds the node (a lock, a row) still holds the END of its
        path. Both halves count as just used.
        """
        edge, packed, parent = lower.edge, lower.packed, lower.parent
        assert parent is not None
        units = at // lower.width
        cut = units * SLOT_BYTES
        upper = self._Node(next(self._ids), parent, lower.first, edge[:at], packed[:cut], lower)
        upper.lock_ref, upper.hits, upper.priority = lower.lock_ref, lower.hits, lower.priority
        upper.created = lower.created
        parent.children[lower.first] = upper
        lower.first = edge[at : at + self.page_size * lower.width]
        lower.edge, lower.packed, lower.parent = edge[at:], packed[cut:], upper
        upper.children[lower.first] = lower
        upper.last_access = lower.last_access = tick
        self._changes += 1
        self._queue.offer(lower)
        if self.bus.wants(ev.NodeSplit):
            self.bus.emit(ev.NodeSplit(upper.id, lower.id, units, tick))
        return upper

    # -------------------------------------------------------------- putting in

    def insert(self, key: RadixKey, slots: Any, priority: int = 0, grow: Node | None = None) -> InsertResult:
        """Puts a key into the tree; units past the last whole page are ignored.

        slots: one per unit of the key; copied. For the first `prefix_len` units the tree keeps the
        slots that it had: the caller's are duplicates, the caller's to free. Above that the tree owns them.
        grow: the leaf that this request inserted earlier. It is made longer instead of getting a
        child iff the walk ends exactly there, nothing hangs below it and no other request locks it.
        """
        walk = self._walk(key)
        slots = as_int64(slots, "slots")
        if type(priority) is not int:
            priority = whole("priority", priority)
        if len(slots) != len(key):
            raise ValueError(f"{len(slots)} slots for a key of {len(key)} units")
        path, pos = self._touch(walk, False, priority)
        node = path[-1] if path else self.root
        page = key.width * self.page_size
        end = len(key.data) // page * page
        there = pos // key.width
        prefix_len = self._resident(path, slots, there)
        if pos < end:
            rest, fresh = key.data[pos:end], slots[there : end // key.width].tobytes()
            if grow is node and node.lock_ref <= 1 and not node.children and path and self._open(node):
                self._grow(node, rest, fresh, priority)
            else:
                node = self._add_leaf(node, key, rest, fresh, priority)
        return InsertResult(prefix_len, node)

    def _resident(self, path: list[Node], slots: Slots, there: int) -> int:
        """How many of the `there` units on an insert's path have slots already: here, all."""
        return there

    def _open(self, leaf: Node) -> bool:
        """Whether the request that inserted a leaf may still make it longer."""
        return True

    def _add_leaf(self, parent: Node, key: RadixKey, edge: bytes, packed: bytes, priority: int) -> Node:
        first: Any = edge[: key.width * self.page_size]
        if parent is self.root:
            first = (key.namespace, first)
        leaf = self._Node(next(self._ids), parent, first, edge, packed, key)
        leaf.created = leaf.last_access = self._tick
        leaf.priority = priority
        parent.children[first] = leaf
        self.evictable_size += len(leaf)
        self._changes += 1
        self._queue.offer(leaf)
        if self.bus.wants(ev.NodeInserted):
            space = self.namespace_number(key.namespace)
            what = _numbers(edge, np.int32), _numbers(packed, np.int64)
            self.bus.emit(ev.NodeInserted(leaf.id, parent.id, *what, self._tick, priority, space))
        return leaf

    def _grow(self, leaf: Node, edge: bytes, packed: bytes, priority: int) -> None:
        leaf.edge += edge
        leaf.packed += packed
        self._changes += 1
        if leaf.lock_ref:
            self.protected_size += len(packed) // SLOT_BYTES
        else:
            self.evictable_size += len(packed) // SLOT_BYTES
        if self.bus.wants(ev.NodeGrown):
            what = _numbers(edge, np.int32), _numbers(packed, np.int64)
            self.bus.emit(ev.NodeGrown(leaf.id, *what, self._tick, leaf.priority))

    # -------------------------------------------------------------- holding on

    def path_up(self, node: Node) -> list[Node]:
        """The node and all above it, nearest first, the root left out.

        ValueError unless the node is in this tree: not evicted, and not another tree's.
        """
        if not isinstance(node, Node):
            raise _no_node(node)
        path: list[Node] = []
        step = node
        while (parent := step.parent) is not None:
            path.append(step)
            step = parent
        if step is not self.root:
            raise ValueError(f"n{node.id} is not in this tree: evicted, or a node of another one")
        return path

    def path_slots(self, node: Node) -> Slots:
        """All slots from the root down to the end of `node` (a copy)."""
        return _unpack([step.packed for step in reversed(self.path_up(node))])

    def inc_lock_ref(self, node: Node) -> int:
        """Protects a node and all above it; returns how many tokens that took from the evictable.

        Locking the root does nothing. Every call needs its own `dec_lock_ref`.
        """
        if not isinstance(node, Node):
            raise _no_node(node)
        moved, step = 0, node
        while (parent := step.parent) is not None:
            if step.lock_ref == 0:
                moved += len(step.edge)  # bytes: quicker to ask than units
            step.lock_ref += 1
            step = parent
        if step is not self.root:
            self._undo(node, -1)
        moved //= node.width
        self.evictable_size -= moved
        self.protected_size += moved
        if step is not node and self.bus.wants(ev.NodeLocked):
            path = tuple(step.id for step in self.path_up(node))
            self.bus.emit(ev.NodeLocked(node.id, path, moved))
        return moved

    def dec_lock_ref(self, node: Node) -> int:
        """Takes one lock back; returns how many tokens became evictable by it."""
        if not isinstance(node, Node):
            raise _no_node(node)
        moved, step = 0, node
        # Above it every node is locked at least as often: this one look is enough for all.
        if node.lock_ref == 0 and self.path_up(node):
            raise InvariantError(f"n{node.id} is unlocked more often than it was locked")
        while (parent := step.parent) is not None:
            step.lock_ref = left = step.lock_ref - 1
            if left == 0:
                moved += len(step.edge)
            step = parent
        if step is not self.root:
            self._undo(node, 1)
        moved //= node.width
        self.evictable_size += moved
        self.protected_size -= moved
        self._queue.offer(node)
        if step is not node and self.bus.wants(ev.NodeUnlocked):
            path = tuple(step.id for step in self.path_up(node))
            self.bus.emit(ev.NodeUnlocked(node.id, path, moved))
        return moved

    def _undo(self, node: Node, count: int) -> None:
        """Only at the top it shows that a node is another tree's: it gets its locks back, and ValueError."""
        step = node
        while step.parent is not None:
            step.lock_ref += count
            step = step.parent
        self.path_up(node)

    # -------------------------------------------------------------- letting go

    def evict(self, num_tokens: int) -> EvictResult:
        """Takes whole unlocked leaves out, by policy, until at least `num_tokens` are free.

        A parent becomes a leaf, and a candidate, when its last child has gone. Stops early when
        nothing evictable is left.
        """
        if whole("num_tokens", num_tokens) < 0:
            raise ValueError(f"cannot evict {num_tokens} tokens")
        freed: list[bytes] = []
        total = 0
        while total < num_tokens and (victim := self._queue.pop()) is not None:
            self._remove(victim)
            freed.append(victim.packed)
            total += len(victim)
        self.evictable_size -= total
        return EvictResult(total, _unpack(freed))

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.first]
        leaf.parent = None
        self._changes += 1
        if not parent.children:
            self._queue.offer(parent)
        if self.bus.wants(ev.NodeEvicted):
            slots = _numbers(leaf.packed, np.int64)
            self.bus.emit(ev.NodeEvicted(leaf.id, parent.id, slots, *self._queue.verdict(leaf)))

    def reset(self) -> None:
        """Forgets everything. The caller frees the slots (see `walk`); locks are forgotten too."""
        total = sum(node.units for node in self.walk())
        for node in self.walk():
            node.parent = None
        self._plant()
        self._queue.rebuild(self._queue.policy, ())
        if self.bus.wants(ev.CacheFlushed):
            self.bus.emit(ev.CacheFlushed(total))

    def bump_version(self) -> None:
        """The model's weights changed: what is in the tree matches nothing from now on (versions.py)."""
        room("cache.versions").bump(self)

    @property
    def eviction_policy(self) -> str:
        """The policy's name; assigning another changes who is evicted from now on."""
        return self._queue.policy.name

    @eviction_policy.setter
    def eviction_policy(self, name: str) -> None:
        old = self.eviction_policy
        self.change_policy(name)
        if self.bus.wants(ev.PolicyChanged):
            self.bus.emit(ev.PolicyChanged(old, name))

    def change_policy(self, name: str) -> EvictionPolicy:
        """Orders the leaves by another policy, and returns it."""
        policy = policy_named(name)
        if self.version:
            policy = room("cache.versions").outdated_first(policy)
        self._queue.rebuild(policy, self.walk())
        return policy

    # -------------------------------------------------------------- looking at it

    @property
    def total_size(self) -> int:
        """Tokens in the tree."""
        return self.evictable_size + self.protected_size

    def walk(self) -> Iterator[Node]:
        """All nodes, the root first, parents before children, siblings in order of creation."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(reversed(node.children.values()))

    def snapshot(self) -> dict[str, Any]:
        """The whole tree as plain data, nodes by id, the root left out (observe/describe.py)."""
        return dict(room("observe.describe").radix_cache(self))

    def check(self) -> None:
        """Recomputes what must hold; InvariantError names the node (observe/check.py)."""
        room("observe.check").radix_cache(self)


def _no_node(value: Any) -> ValueError:
    return ValueError(f"a node of this tree is needed, got {said(value)}")


def _unpack(packed: list[bytes]) -> Slots:
    """The slots of several nodes in one new array."""
    # A bytearray, not bytes: the array on top of it can be written to, as its new owner may wish.
    return np.frombuffer(bytearray().join(packed), dtype=np.int64)


def _numbers(packed: bytes, kind: type[np.integer[Any]]) -> tuple[int, ...]:
    """Packed tokens or slots as an event tells them."""
    return tuple(np.frombuffer(packed, dtype=kind).tolist())


def _shared_pages(edge: bytes, data: bytes, pos: int, page: int) -> int:
    """How many whole pages (of `page` bytes) `edge` and `data` from `pos` on begin with alike."""
    low, high = 0, min(len(edge), len(data) - pos) // page
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(edge[low * page : middle * page], pos + low * page):
            low = middle
        else:
            high = middle - 1
    return low
