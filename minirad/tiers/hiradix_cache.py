"""A radix tree over two tiers: slots on the device, and copies of their KV in host memory.

Evicted KV need not be computed again if a copy lies in the (larger, slower) host memory. A node is

    on the device          slots, no copy        may be evicted, and is forgotten then
    on both                slots and a copy      may be evicted: it is *demoted*, the copy stays
    on the host only       a copy, no slots      is still found, and can be *loaded back*

When copies are made is the `host_write` policy (the words are SGLang's): `write_through` when the request
that inserted a node stops growing it, `write_through_selective` when the node is hit a second time,
`write_back` when it is evicted. The first two evict at once; the last writes only what it must, but every
eviction waits for a copy.

What must hold, and `check` recomputes:

* A node on the device has its parent on the device: the device's part of any path is a prefix of it. So
  eviction takes nodes without a child on the device, whatever hangs below them on the host.
* With the two write_throughs a node with a copy has a parent with a copy: copies are begun from the root
  downwards and end in the order in which they began. Under write_back a child may be on the host while
  its parent is on the device alone; if the parent then cannot be copied either, it takes what hangs below
  it along, since no walk could reach that any more.
* While a copy is under way its node is locked and closed to growth, and its source is held; a node that
  is split meanwhile passes its part of the copy on to the new half. What failed is no copy.

This is an index still: it knows host slots by number, and a `Copier` (host_tier.py) moves the tensors. One
thread drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from minirad.cache.allocator import PageAllocator
from minirad.cache.eviction import EvictionPolicy, EvictionQueue
from minirad.cache.eviction import eviction_policy as policy_named
from minirad.cache.node import SLOT_BYTES, Node, RadixKey, Slots
from minirad.cache.prefix_cache import Prefix
from minirad.cache.radix_cache import NO_PRIORITY, EvictResult, MatchResult, RadixCache, Walk
from minirad.config import HOST_WRITE
from minirad.errors import as_int64, require, whole
from minirad.observe import events as ev
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.request import Request

SECOND_HIT = 2  # from which on write_through_selective copies


class Copy(Protocol):
    """A copy between the tiers that was begun."""

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> bool:
        """Returns when it is over: True if the data has arrived."""
        ...


class Copier(Protocol):
    """Moves keys and values between the tiers. Copies end in the order in which they began.

    Both raise (HostCopyError, but anything will do), with nothing begun, when they cannot. A load that was
    begun succeeds; a backup whose `wait` raises has not arrived. What is computed after `fence` waits for
    the loads that were begun before it.
    """

    def backup(self, device_slots: Slots, host_slots: Slots) -> Copy: ...
    def load(self, host_slots: Slots, device_slots: Slots) -> Copy: ...
    def fence(self) -> None: ...


class NothingToCopy:
    """The Copier, and the Copy, of an index that has no tensors: all is done at once."""

    def backup(self, device_slots: Slots, host_slots: Slots) -> Copy:
        return self

    def load(self, host_slots: Slots, device_slots: Slots) -> Copy:
        return self

    def fence(self) -> None:
        """There is nothing to wait for."""

    def done(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class HostNode(Node):
    """A node that may have a copy: `host` is the bytes of its host slots, b"" for none."""

    __slots__ = ("copying", "entry", "host", "host_locks", "resident")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host = b""
        self.copying: _Backup | None = None  # the copy that `host` is being filled by
        self.host_locks = 0  # loads that read from `host`
        self.resident = 0  # children with slots
        self.entry: Any = _HostEntry(self)  # for the host's queue, a node like others

    @property
    def host_slots(self) -> Slots:
        """Where the copy of each unit lies in host memory; read-only."""
        slots: Slots = np.frombuffer(self.host, dtype=np.int64)
        return slots

    @property
    def backed_up(self) -> bool:
        """It has a copy, and the copy is whole."""
        return bool(self.host) and self.copying is None

    @property
    def evictable(self) -> bool:
        """On the device, unlocked, and no child is on the device."""
        free = self.lock_ref == 0 and self.resident == 0
        return free and bool(self.packed) and self.parent is not None

    @property
    def host_evictable(self) -> bool:
        """On the host only, a leaf, and no load reads from it."""
        idle = not self.packed and self.host_locks == 0 and self.copying is None
        return idle and not self.children and self.parent is not None


class _HostEntry:
    """A node as the host's eviction queue sees it: `queued` and `evictable` are those of that tier."""

    __slots__ = ("node", "queued")

    def __init__(self, node: HostNode) -> None:
        self.node = node
        self.queued: Any = None

    @property
    def evictable(self) -> bool:
        return self.node.host_evictable

    def __getattr__(self, name: str) -> Any:  # id, last_access, created, hits, priority, lock_ref
        return getattr(self.node, name)


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A copy that has begun, of `nodes`, top first. The last of them, `node`, is locked until it is over."""

    node: HostNode
    nodes: list[HostNode]  # halves that are split off meanwhile join them
    copy: Copy


class _Backup(_UnderWay):
    """A copy to the host."""

    __slots__ = ()


class _Load(_UnderWay):
    """A copy from the host into the slots of its nodes."""

    __slots__ = ()


class HiRadixCache(RadixCache):
    """RadixCache with a second tier.

    host_tokens: slots in host memory (page 0 not counted); whole pages.
    host_write: write_through, write_through_selective or write_back.
    copier: what moves the tensors; None for an index without any.
    load_back_threshold: the fewest tokens that are loaded back rather than computed again.
    """

    _Node = HostNode
    parents_are_copied = True  # of nodes with a copy, with the two write_throughs

    def __init__(
        self,
        page_size: int = 1,
        eviction_policy: str = "lru",
        bus: ev.EventBus | None = None,
        *,
        host_tokens: int,
        host_write: str = "write_through",
        copier: Copier | None = None,
        load_back_threshold: int = 1,
    ) -> None:
        if host_write not in HOST_WRITE:
            raise ValueError(f"unknown host_write {host_write!r}; known: {', '.join(HOST_WRITE)}")
        self.host_write = host_write
        self.host_allocator = PageAllocator(host_tokens, page_size)
        self.copier: Copier = copier if copier is not None else NothingToCopy()
        self.load_back_threshold = load_back_threshold
        self._under_way: deque[_UnderWay] = deque()
        self._host_queue = EvictionQueue(policy_named(eviction_policy))
        super().__init__(page_size, eviction_policy, bus)

    # -------------------------------------------------------------- looking up

    def find(self, key: RadixKey, found: Prefix | None = None) -> Prefix:
        """What would match of a key *on the device*. Changes nothing, says nothing."""
        known, found = found, super().find(key, found)
        if found is not known:
            path, _, child, shared = found.walk
            inside = child is not None and child.packed
            found.length = sum(len(node) for node in path) + (shared // key.width if inside else 0)
        return found

    def peek(self, key: RadixKey) -> int:
        """How many units would match on the device, rounded down to whole pages."""
        return HiRadixCache.find(self, key).length

    def _cost(self, found: Prefix) -> int:
        path, _, child, shared = found.walk
        cost = sum(len(node) for node in path if node.lock_ref == 0)
        inside = child is not None and child.packed and child.lock_ref == 0
        return int(cost) + (int(shared) // int(found.key.width) if inside else 0)

    def peek_tiers(self, key: RadixKey) -> tuple[int, int]:
        """How many units match on the device, and how many more after them on the host."""
        found = self.find(key)
        _, pos, _, shared = found.walk
        return found.length, (pos + shared) // key.width - found.length

    def match_prefix(
        self, key: RadixKey, *, count_hit: bool = True, found: Prefix | None = None
    ) -> MatchResult:
        """The longest prefix that is in the tree, in whole pages: first on the device, then on the host.

        Under write_through_selective, nodes hit for the second time begin to be copied.
        """
        walk = self._walk(key) if found is None else self.find(key, found).walk
        path, end = self._touch(walk, count_hit, NO_PRIORITY)
        nodes = cast("list[HostNode]", path)
        device = [node for node in nodes if node.packed]
        below = nodes[len(device) :]
        if count_hit and self.host_write == "write_through_selective":
            # Room for a copy is made by evicting from the host: not what this very match is to return.
            _hold(below, 1)
            self._back_up([node for node in device if node.hits >= SECOND_HIT])
            _hold(below, -1)
        slots = np.frombuffer(bytearray().join([node.packed for node in device]), dtype=np.int64)
        last = device[-1] if device else self.root
        return MatchResult(
            slots, len(slots), last, end // key.width - len(slots), below[-1] if below else None
        )

    def _touch(self, walk: Walk, hit: bool, priority: int) -> tuple[list[Node], int]:
        path, pos = super()._touch(walk, hit, priority)
        # With children on the host alone, also a node in the middle of the path can be next to go.
        for node in reversed(path):
            if node.packed:
                self._queue.offer(node)
                break
            self._host_queue.offer(cast(HostNode, node).entry)
        return path, pos

    def _split(self, lower: Node, at: int, tick: int) -> Node:
        upper = super()._split(lower, at, tick)
        assert isinstance(lower, HostNode) and isinstance(upper, HostNode)
        cut = at // lower.width * SLOT_BYTES
        upper.host, lower.host = lower.host[:cut], lower.host[cut:]
        upper.resident = 1 if lower.packed else 0
        upper.host_locks = lower.host_locks
        upper.copying = lower.copying
        for operation in self._under_way:
            if lower in operation.nodes:
                operation.nodes.insert(operation.nodes.index(lower), upper)
        self._host_queue.offer(lower.entry)
        return upper

    # -------------------------------------------------------------- putting in

    def _resident(self, path: list[Node], slots: Slots, there: int) -> int:
        """Nodes that were on the host only take the slots over that the caller computed again."""
        at = sum(len(node) for node in path)
        prefix_len = at
        for node in path:
            if not node.packed:
                units = node.units
                self._give_slots(cast(HostNode, node), slots[at : at + units])
                at += units
                if self.bus.wants(ev.NodeAdopted):
                    self.bus.emit(ev.NodeAdopted(node.id, tuple(node.slots.tolist())))
        return prefix_len

    def _give_slots(self, node: HostNode, slots: Slots) -> None:
        assert isinstance(node.parent, HostNode)
        node.packed = slots.tobytes()
        node.parent.resident += 1
        self.evictable_size += len(slots)
        self._changes += 1
        self._queue.offer(node)

    def _add_leaf(self, parent: Node, key: RadixKey, edge: bytes, packed: bytes, priority: int) -> Node:
        leaf = super()._add_leaf(parent, key, edge, packed, priority)
        cast(HostNode, parent).resident += 1
        return leaf

    def _open(self, leaf: Node) -> bool:
        return not cast(HostNode, leaf).host

    # -------------------------------------------------------------- copying to the host

    def seal(self, node: Node | None) -> None:
        """The request that inserted `node` will not grow it any more: write_through copies it now.

        Also what is above it and has no copy yet (its copy failed, or it was split off): parents first.
        """
        if node is None:
            return
        if self.host_write == "write_through" and (node is self.root or node.parent is not None):
            self._back_up([cast(HostNode, step) for step in reversed(self.path_up(node))])

    def _back_up(self, path: Sequence[HostNode]) -> None:
        """Begins copies of the nodes of a path from the root that have none, as far as there is room."""
        for node in path:
            if not node.host and node.packed and not self._begin_backup(node):
                return  # what is below an uncopied node is not copied either

    def _begin_backup(self, node: HostNode) -> bool:
        if node.outdated:
            return False  # its copy would take room from those that can be matched
        host = self._host_room(len(node))
        if host is None:
            return False
        try:
            copy = self.copier.backup(node.slots, host)
        except BaseException as error:
            self.host_allocator.free(host)
            if isinstance(error, Exception):  # whatever goes wrong with a copy: there is none
                return False
            raise
        node.host = host.tobytes()
        node.copying = _Backup(node, [node], copy)
        self._under_way.append(node.copying)
        if self.bus.wants(ev.BackupStarted):
            self.bus.emit(ev.BackupStarted(node.id, tuple(host.tolist())))
        self.inc_lock_ref(node)
        return True

    def _host_room(self, num_tokens: int) -> Slots | None:
        """Host slots for a copy, evicting the shortfall from the host; None if there are too few."""
        if num_tokens > self.host_allocator.num_tokens:
            return None
        while self.host_allocator.available < num_tokens:
            entry = self._host_queue.pop()
            if entry is None:
                return None
            self._remove_from_host(entry.node)
        return self.host_allocator.alloc(num_tokens)

    def poll(self, wait: bool = False) -> None:
        """Notes which copies have ended, in their order; with `wait`, waits for all that are under way."""
        while self._under_way:
            first = self._under_way[0]
            if not wait and not first.copy.done():
                return
            try:
                arrived = first.copy.wait()
            except Exception:
                arrived = False
            self._under_way.popleft()
            end = self._end_backup if isinstance(first, _Backup) else self._end_load
            end(first, arrived)

    def _end_backup(self, backup: _UnderWay, arrived: bool) -> None:
        if self.host_write != "write_back":
            # The parent's copy ended before. If it failed, a second one may be under way, and fail as well.
            above = backup.nodes[0].parent
            arrived = arrived and (above is self.root or cast(HostNode, above).backed_up)
        for node in backup.nodes:
            node.copying = None
            if not arrived:
                self.host_allocator.free(node.host_slots)
                node.host = b""
        if self.bus.wants(ev.BackupEnded):
            self.bus.emit(ev.BackupEnded(tuple(node.id for node in backup.nodes), arrived))
        self.dec_lock_ref(backup.node)

    # -------------------------------------------------------------- the engine's hooks

    def before_step(self) -> None:
        """Notes which copies have ended."""
        self.poll()

    def before_launch(self) -> None:
        """The batch waits for what is being loaded."""
        self.copier.fence()

    def wait_for_copies(self) -> bool:
        """Returns when no copy is under way any more; False if there was none.

        What was just given up may be locked by its own copy.
        """
        if not self._under_way:
            return False
        self.poll(wait=True)
        return True

    def init_load_back(self, manager: CacheManager, request: Request, match: MatchResult, spare: int) -> Any:
        """Loads the part of a locked match that lies on the host only: all of it or nothing.

        Returns the match as it is then; the lock has moved along with its end. Nothing is loaded where it
        would save less than the threshold, and when there is no room even after evicting.
        spare: slots that there are beside those that the request needs anyway. What is loaded takes the
        place of what would be computed, but for the end that has to be computed once more.
        """
        length = match.host_length
        if length == 0:
            return match
        total = match.length + length
        usable = manager.cached(request, total)
        saved = usable - manager.cached(request, match.length)
        if saved < self.load_back_threshold or total - usable > spare:
            return match
        chain = self.hold_host(match)  # so that making room on the device does not cost the host its copy
        slots, loaded = None, False
        try:
            slots = manager.allocator.alloc(length) if manager.make_room(length) else None
            loaded = slots is not None and self.load_back(chain, slots)
        finally:  # whatever the copying raises
            self.release_host(chain)
            if slots is not None and not loaded:
                manager.allocator.free(slots)
        if slots is None or not loaded:
            return match
        manager.adopt(slots)
        manager.loaded_tokens += length
        self.inc_lock_ref(chain[-1])
        self.dec_lock_ref(match.last_node)
        whole = np.concatenate((match.slots, slots))
        return MatchResult(whole, len(whole), chain[-1])

    # -------------------------------------------------------------- loading back

    def hold_host(self, match: MatchResult) -> list[HostNode]:
        """Protects the part of a match that lies on the host only; `release_host` ends that."""
        chain: list[HostNode] = []
        node: Any = match.host_node
        while node is not None and not node.packed and node.parent is not None:
            chain.insert(0, node)
            node = node.parent
        _hold(chain, 1)
        return chain

    def release_host(self, chain: list[HostNode]) -> None:
        """Ends `hold_host`."""
        _hold(chain, -1)
        for node in chain:
            self._host_queue.offer(node.entry)

    def load_back(self, chain: list[HostNode], slots: Any) -> bool:
        """Begins to load the nodes of a held chain into these slots; False, with nothing done, if it fails.

        All of the chain or nothing. What computes with the slots next waits for the copy (the Copier
        sees to that). Until it is over the source is held and the path is locked.
        """
        slots = as_int64(slots, "slots")
        host = [node.host_slots for node in chain]
        total = sum(len(part) for part in host)
        if not chain or len(slots) != total:
            raise ValueError(f"{len(slots)} slots to load {total} tokens of {len(chain)} nodes")
        require(all(node.backed_up for node in chain), "a node without a whole copy cannot be loaded")
        try:
            copy = self.copier.load(np.concatenate(host), slots)
        except Exception:  # whatever goes wrong with a copy: what was to be loaded is computed again
            return False
        at = 0
        for node in chain:
            self._give_slots(node, slots[at : at + node.units])
            at += node.units
        _hold(chain, 1)
        self._under_way.append(_Load(chain[-1], list(chain), copy))
        if self.bus.wants(ev.LoadStarted):
            names = tuple(node.id for node in chain)
            self.bus.emit(ev.LoadStarted(names, tuple(slots.tolist())))
        self.inc_lock_ref(chain[-1])
        return True

    def _end_load(self, load: _UnderWay, arrived: bool) -> None:
        require(arrived, f"n{load.node.id}: its KV did not arrive from the host")
        _hold(load.nodes, -1)
        if self.bus.wants(ev.LoadEnded):
            self.bus.emit(ev.LoadEnded(tuple(node.id for node in load.nodes)))
        self.dec_lock_ref(load.node)

    # -------------------------------------------------------------- letting go

    def evict(self, num_tokens: int) -> EvictResult:
        """Frees device slots, by policy, until at least `num_tokens` are free or nothing is evictable.

        What has a copy is demoted; under write_back a copy is made first, and the slots are handed out
        when it is there. What has none leaves the tree.
        """
        if whole("num_tokens", num_tokens) < 0:
            raise ValueError(f"cannot evict {num_tokens} tokens")
        freed: list[bytes] = []
        total = 0
        while total < num_tokens:
            victim: HostNode | None = self._queue.pop()
            if victim is None:
                if not self._under_way:
                    break
                self.poll(wait=True)  # copies hold locks: perhaps they were all that was missing
                continue
            total += len(victim)
            freed.append(self._evict(victim))
        return EvictResult(total, np.frombuffer(bytearray().join(freed), dtype=np.int64))

    def _evict(self, victim: HostNode) -> bytes:
        """Takes a node's slots away, after copying it if that is the policy; returns them."""
        if self.host_write == "write_back" and not victim.host:
            try:
                if self._begin_backup(victim):
                    self.poll(wait=True)
            except BaseException:  # interrupted: it is as evictable as before
                self._queue.offer(victim)
                raise
        packed = victim.packed
        self.evictable_size -= len(victim)
        if victim.host:
            self._demote(victim)
        else:
            self._remove_with_all_below(victim)
        return packed

    def _demote(self, node: HostNode) -> None:
        slots, node.packed = node.slots, b""
        self._changes += 1
        self._lost_child(node)
        self._host_queue.offer(node.entry)
        if self.bus.wants(ev.NodeDemoted):
            self.bus.emit(ev.NodeDemoted(node.id, tuple(slots.tolist()), *self._queue.verdict(node)))

    def _lost_child(self, node: HostNode) -> None:
        """A node on the device is one no longer: its parent may be next."""
        parent = node.parent
        assert isinstance(parent, HostNode)
        parent.resident -= 1
        self._queue.offer(parent)

    def _remove_with_all_below(self, node: HostNode) -> None:
        """Takes a node on the device out of the tree, and what only the host holds below it."""
        below: list[HostNode] = []
        todo: list[Any] = list(node.children.values())
        while todo:
            below.append(todo.pop())
            todo.extend(below[-1].children.values())
        for child in reversed(below):
            self._remove_from_host(child)
        self._lost_child(node)
        self._remove(node)

    def _remove_from_host(self, leaf: HostNode) -> None:
        parent = leaf.parent
        assert isinstance(parent, HostNode)
        require(leaf.host_locks == 0, f"n{leaf.id} is being loaded and cannot leave the host")
        del parent.children[leaf.first]
        leaf.parent = None
        self._changes += 1
        self.host_allocator.free(leaf.host_slots)
        self._host_queue.offer(parent.entry)
        if self.bus.wants(ev.HostEvicted):
            host_slots = tuple(leaf.host_slots.tolist())
            self.bus.emit(ev.HostEvicted(leaf.id, parent.id, host_slots, *self._host_queue.verdict(leaf)))

    def reset(self) -> None:
        """Forgets everything, in both tiers, when the copies that are under way have ended."""
        self.poll(wait=True)
        super().reset()
        self._host_queue.rebuild(self._host_queue.policy, ())
        self.host_allocator = PageAllocator(self.host_allocator.num_tokens, self.page_size)

    def change_policy(self, name: str) -> EvictionPolicy:
        """Orders the leaves of both tiers by another policy, and returns it; both or neither."""
        old = self._queue.policy
        policy = super().change_policy(name)
        try:
            self._host_queue.rebuild(policy, [cast(Any, node).entry for node in self.walk()])
        except BaseException:
            self._queue.rebuild(old, self.walk())
            raise
        return policy

    # -------------------------------------------------------------- looking at it

    @property
    def host_size(self) -> int:
        """Tokens with a copy in host memory, or one under way."""
        return self.host_allocator.num_tokens - self.host_allocator.available

    @property
    def copy_locks(self) -> Sequence[Node]:
        """Nodes that a copy under way locks, one entry a lock."""
        return [operation.node for operation in self._under_way]

    def snapshot(self) -> dict[str, Any]:
        """As of RadixCache, with each node's host slots, and the size and use of the host tier."""
        state, nodes = super().snapshot(), {node.id: cast(HostNode, node) for node in self.walk()}
        loading = {node.id for each in self._under_way if isinstance(each, _Load) for node in each.nodes}
        for told in state["nodes"]:
            node = nodes[told["id"]]
            told["host"] = node.host_slots.tolist()
            told["copying"], told["loading"] = node.copying is not None, node.id in loading
        return {
            **state,
            "host_write": self.host_write,
            "host_tokens": self.host_allocator.num_tokens,
            "host_free": self.host_allocator.available,
        }

    def check(self) -> None:
        """What RadixCache checks, and the rules of the two tiers at the top of this file."""
        super().check()
        self.host_allocator.check()
        used: list[int] = []
        for node in self.walk():
            assert isinstance(node, HostNode)
            resident = sum(1 for child in node.children.values() if child.packed)
            require(node.resident == resident, f"n{node.id}: {node.resident} resident, counted {resident}")
            if node is not self.root:
                self._check_tiers(node)
                used += node.host_slots.tolist()
            if node.host_evictable:
                known = node.entry.queued
                fine = known is not None and known <= self._host_queue.policy.key(node)
                require(fine, f"n{node.id} would be overlooked by the host's eviction queue")
        require(len(set(used)) == len(used), "two nodes share a host slot")
        require(len(used) == self.host_size, f"{self.host_size} host slots in use, nodes hold {len(used)}")

    def _check_tiers(self, node: HostNode) -> None:
        name, parent = f"n{node.id}", node.parent
        assert isinstance(parent, HostNode)
        top = parent is self.root
        require(bool(node.packed or node.host), f"{name} is in neither tier")
        require(not node.packed or top or bool(parent.packed), f"{name} is on the device, its parent is not")
        if self.host_write != "write_back" and self.parents_are_copied:
            # (While its own copy is under way it may not have heard yet that its parent's has failed.)
            fine = not node.backed_up or top or bool(parent.host)
            require(fine, f"{name} has a copy, its parent has none")
        copied = len(node.host) // SLOT_BYTES
        require(copied in (0, node.units), f"{name}: {node.units} units but {copied} host slots")
        require(bool(node.packed) or node.lock_ref == 0, f"{name} is locked but not on the device")
        mine = [o for o in self._under_way if isinstance(o, _Backup) and node in o.nodes]
        require(mine == ([node.copying] if node.copying else []), f"{name}: its copy is not under way")
        loads = sum(1 for o in self._under_way if isinstance(o, _Load) and node in o.nodes)
        require(node.host_locks == loads, f"{name}: {node.host_locks} host locks, {loads} loads")


def _hold(nodes: Sequence[HostNode], by: int) -> None:
    for node in nodes:
        node.host_locks += by
