"""Which leaf goes first: seven policies, one small class each, over one heap that is kept up lazily.

The heap lives on between calls of `evict` (building one from all leaves each time, as textbooks do, takes
time in proportion to the tree for every victim), and an entry is corrected only when it comes to the top:

* `offer(node)` is called whenever a node became an evictable leaf, or its key may have got *smaller*.
  It pushes an entry only if the node has none, or only one with a larger key.
* Keys that got *larger* since (a leaf was used again) are noticed by `peek`: the entry is put back
  under its present key. So a hit costs nothing here, and an eviction O(log leaves).

Why that finds the true minimum: every evictable leaf has an entry whose stored key is at most its
present key. When the top entry's stored key *is* its present key, no other leaf's can be smaller.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from minirad.cache.node import Node


class EvictionPolicy:
    """The smallest key is evicted first; ties go by node id. `why` is for the event's sentence."""

    name = ""
    why = ""  # a leaf goes first; {0} is the leaf. (Its times are clock ticks, one per match or insert.)

    def key(self, node: Node) -> Any:
        raise NotImplementedError

    def reason(self, node: Node) -> str:
        return self.why.format(node)


class LRU(EvictionPolicy):
    """Least recently used."""

    name = "lru"
    why = "oldest unlocked leaf (last used at tick {0.last_access})"

    def key(self, node: Node) -> int:
        return node.last_access


class LFU(EvictionPolicy):
    """Least frequently used: fewest hits, then least recently used."""

    name = "lfu"
    why = "unlocked leaf with the fewest hits ({0.hits}, last used at {0.last_access})"

    def key(self, node: Node) -> tuple[int, int]:
        return node.hits, node.last_access


class FIFO(EvictionPolicy):
    """First in, first out: the earliest created, however often it was used."""

    name = "fifo"
    why = "first unlocked leaf to come in (created at tick {0.created})"

    def key(self, node: Node) -> int:
        return node.created


class MRU(EvictionPolicy):
    """Most recently used first: right for a scan that never comes back, wrong for chats."""

    name = "mru"
    why = "most recently used unlocked leaf (last used at tick {0.last_access})"

    def key(self, node: Node) -> int:
        return -node.last_access


class FILO(EvictionPolicy):
    """First in, last out: the latest created goes first."""

    name = "filo"
    why = "last unlocked leaf to come in (created at tick {0.created})"

    def key(self, node: Node) -> int:
        return -node.created


class Priority(EvictionPolicy):
    """Lowest request priority first, then least recently used."""

    name = "priority"
    why = "unlocked leaf of lowest priority ({0.priority}, last used at tick {0.last_access})"

    def key(self, node: Node) -> tuple[int, int]:
        return node.priority, node.last_access


class SLRU(EvictionPolicy):
    """Segmented LRU: leaves hit fewer than twice are on probation and go before the proven ones."""

    name = "slru"
    proven_hits = 2

    def key(self, node: Node) -> tuple[bool, int]:
        return node.hits >= self.proven_hits, node.last_access

    def reason(self, node: Node) -> str:
        segment = "proven" if node.hits >= self.proven_hits else "on probation"
        return f"oldest unlocked leaf {segment} ({node.hits} hits, last used at {node.last_access})"


class OutdatedFirst(EvictionPolicy):
    """Any policy, but that leaves of old weights, which nothing can match, go before all others.

    Without it they stay for ever under any policy that keeps what was once worth keeping: well-used ones
    (lfu, slru), those of high priority, the oldest (mru, filo).
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy, self.name = policy, policy.name

    def key(self, node: Node) -> tuple[bool, Any]:
        return not node.outdated, self.policy.key(node)

    def reason(self, node: Node) -> str:
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
        self.rebuild(policy, ())

    def rebuild(self, policy: EvictionPolicy, nodes: Iterable[Node]) -> None:
        """Starts anew, under another policy or another tree."""
        self.policy = policy
        self._heap: list[tuple[Any, int, Any]] = []
        self._superseded = 0  # entries that a later one of the same node made useless
        for node in nodes:
            node.queued = None
            self.offer(node)

    def offer(self, node: Node) -> None:
        """Makes sure that an evictable leaf is found in time; anything else is ignored."""
        if not node.evictable:
            return
        key, known = self.policy.key(node), node.queued
        if known is not None and key >= known:
            return  # `peek` corrects the entry that is there when it comes up
        node.queued = key
        heapq.heappush(self._heap, (key, node.id, node))
        if known is not None:
            self._superseded += 1
            if self._superseded > 64 + len(self._heap) // 2:
                self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
                heapq.heapify(self._heap)
                self._superseded = 0

    def pop(self) -> Any:
        """Takes out the next victim, or None if nothing can be evicted."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            node.queued = None
        return node

    def peek(self) -> Any:
        """The next victim, left where it is; None if nothing can be evicted."""
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
                    return node
                node.queued = current
                heapq.heapreplace(heap, (current, node.id, node))
        return None

    def verdict(self, victim: Node) -> tuple[str, str, int | None]:
        """What an event tells of a victim that was taken out: the policy, its reason, who is next."""
        following = self.peek()
        return self.policy.name, self.policy.reason(victim), following.id if following else None
