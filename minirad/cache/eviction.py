"""Which leaf goes first: lru and other policies, over one heap that is kept up lazily.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minirad.cache.node import Node
from minirad.rooms import room


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """The leaf with the smallest `key` is evicted first; ties go by node id.

    reason: for the event's sentence. Times are clock ticks (one for each match or insert), not seconds.
    """

    name: str
    key: Callable[[Node], Any]
    reason: Callable[[Node], str]


LRU = EvictionPolicy(  # least recently used
    "lru",
    lambda node: node.last_access,
    lambda node: f"oldest unlocked leaf (last used at tick {node.last_access})",
)
POLICIES = {"lru": LRU}
POLICIES |= {row[0]: EvictionPolicy(*row) for row in room("cache.other_policies").POLICIES}


def eviction_policy(name: str) -> EvictionPolicy:
    """A policy by its name; ValueError names the ones there are."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """The evictable leaves by policy key. Does not touch the tree."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.rebuild(policy, ())

    def rebuild(self, policy: EvictionPolicy, nodes: Iterable[Node]) -> None:
        """Starts anew, under another policy or another tree. A key that cannot be had changes nothing."""
        keys = [(node, policy.key(node) if node.evictable else None) for node in nodes]
        heap: list[tuple[Any, int, Any]] = [(key, node.id, node) for node, key in keys if node.evictable]
        heapq.heapify(heap)  # keys that cannot be compared show here
        # _superseded: entries that a later one of the same node made useless
        self.policy, self._heap, self._superseded = policy, heap, 0
        for node, key in keys:
            node.queued = key

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
