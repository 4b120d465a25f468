"""Which leaf goes first: seven policies, one small class each, over one heap that is kept up lazily.

The textbook way (and that of most engines) collects all leaves and builds a heap at every call of
`evict`, which costs time in proportion to the tree for every single victim. Here the heap lives on
between calls, and an entry is corrected only when it comes to the top:

* `offer(node)` is called whenever a node became an evictable leaf, or its key may have got *smaller*.
  It pushes an entry only if the node has none, or only one with a larger key.
* Keys that got *larger* since (a leaf was used again) are noticed by `pop`: the entry is put back
  under its present key. So a hit costs nothing here, and an eviction O(log leaves).

Why that finds the true minimum: every evictable leaf has an entry whose stored key is at most its
present key. When the top entry's stored key *is* its present key, no other leaf's can be smaller.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Protocol


class Leaf(Protocol):
    """What a policy may look at. Times are clock ticks (one per match or insert), not seconds."""

    id: int
    last_access: int
    created: int
    hits: int
    priority: int
    lock_ref: int
    queued: Any

    @property
    def evictable(self) -> bool: ...
    @property
    def outdated(self) -> bool: ...


class EvictionPolicy(Protocol):
    """The smallest key is evicted first; ties go by node id. `reason` is for the event's sentence."""

    name: str

    def key(self, node: Leaf) -> Any: ...

    def reason(self, node: Leaf) -> str: ...


class LRU:
    """Least recently used."""

    name = "lru"

    def key(self, node: Leaf) -> int:
        return node.last_access

    def reason(self, node: Leaf) -> str:
        return f"oldest unlocked leaf (last used at tick {node.last_access})"


class LFU:
    """Least frequently used: fewest hits, then least recently used."""

    name = "lfu"

    def key(self, node: Leaf) -> tuple[int, int]:
        return node.hits, node.last_access

    def reason(self, node: Leaf) -> str:
        return f"unlocked leaf with the fewest hits ({node.hits}, last used at {node.last_access})"


class FIFO:
    """First in, first out: the earliest created, however often it was used."""

    name = "fifo"

    def key(self, node: Leaf) -> int:
        return node.created

    def reason(self, node: Leaf) -> str:
        return f"first unlocked leaf to come in (created at tick {node.created})"


class MRU:
    """Most recently used first: right for a scan that never comes back, wrong for chats."""

    name = "mru"

    def key(self, node: Leaf) -> int:
        return -node.last_access

    def reason(self, node: Leaf) -> str:
        return f"most recently used unlocked leaf (last used at tick {node.last_access})"


class FILO:
    """First in, last out: the latest created goes first."""

    name = "filo"

    def key(self, node: Leaf) -> int:
        return -node.created

    def reason(self, node: Leaf) -> str:
        return f"last unlocked leaf to come in (created at tick {node.created})"


class Priority:
    """Lowest request priority first, then least recently used."""

    name = "priority"

    def key(self, node: Leaf) -> tuple[int, int]:
        return node.priority, node.last_access

    def reason(self, node: Leaf) -> str:
        return f"unlocked leaf of lowest priority ({node.priority}, last used at tick {node.last_access})"


class SLRU:
    """Segmented LRU: leaves hit fewer than twice are on probation and go before the proven ones."""

    name = "slru"
    proven_hits = 2

    def key(self, node: Leaf) -> tuple[bool, int]:
        return node.hits >= self.proven_hits, node.last_access

    def reason(self, node: Leaf) -> str:
        segment = "proven" if node.hits >= self.proven_hits else "on probation"
        return f"oldest unlocked leaf {segment} ({node.hits} hits, last used at {node.last_access})"


class OutdatedFirst:
    """Any policy, but that leaves of old weights, which nothing can match, go before all others.

    Without it they stay for ever under any policy that keeps what was once worth keeping: well-used ones
    (lfu, slru), those of high priority, the oldest (mru, filo).
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy, self.name = policy, policy.name

    def key(self, node: Leaf) -> tuple[bool, Any]:
        return not node.outdated, self.policy.key(node)

    def reason(self, node: Leaf) -> str:
        return "computed by old weights, nothing can match it" if node.outdated else self.policy.reason(node)


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, MRU, FILO, Priority, SLRU)
}


def eviction_policy(name: str) -> EvictionPolicy:
    """A policy by its name; ValueError names the ones there are."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()


class EvictionQueue:
    """The evictable leaves by policy key. Does not touch the tree."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._heap: list[tuple[Any, int, Leaf]] = []
        self._superseded = 0  # entries that a later one of the same node made useless

    def offer(self, node: Leaf) -> None:
        """Makes sure that an evictable leaf is found in time; anything else is ignored."""
        if not node.evictable:
            return
        key = self.policy.key(node)
        if node.queued is None:
            node.queued = key
            heapq.heappush(self._heap, (key, node.id, node))
        elif key < node.queued:
            node.queued = key
            heapq.heappush(self._heap, (key, node.id, node))
            self._superseded += 1
            if self._superseded > 64 + len(self._heap) // 2:
                self._compact()
        # else an entry with a smaller key is there: `_settle` corrects it when it comes up.

    def pop(self) -> Leaf | None:
        """Takes out the next victim, or None if nothing can be evicted."""
        if not self._settle():
            return None
        node = heapq.heappop(self._heap)[2]
        node.queued = None
        return node

    def peek(self) -> Leaf | None:
        """The next victim, left where it is."""
        return self._heap[0][2] if self._settle() else None

    def verdict(self, victim: Leaf) -> tuple[str, str, int | None]:
        """What an event tells of a victim that was taken out: the policy, its reason, who is next."""
        following = self.peek()
        return self.policy.name, self.policy.reason(victim), following.id if following else None

    def rebuild(self, policy: EvictionPolicy, nodes: Iterable[Leaf]) -> None:
        """Starts anew, under another policy or another tree."""
        self.policy = policy
        self._heap = []
        self._superseded = 0
        for node in nodes:
            node.queued = None
            self.offer(node)

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
        heapq.heapify(self._heap)
        self._superseded = 0

    def _settle(self) -> bool:
        """Brings a true minimum to the top; False if there is none."""
        heap = self._heap
        while heap:
            key, _, node = heap[0]
            if node.queued != key:
                heapq.heappop(heap)
                self._superseded -= 1
            elif not node.evictable:  # locked, grown a child, or gone: offered again when it counts
                heapq.heappop(heap)
                node.queued = None
            else:
                current = self.policy.key(node)
                if current == key:
                    return True
                node.queued = current
                heapq.heapreplace(heap, (current, node.id, node))
        return False
