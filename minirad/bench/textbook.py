"""Two textbook prefix trees with the methods of RadixCache that a benchmark needs, for comparison.

* `TokenTrie`: one node per page (with page size 1: per token). Nothing to split, but a look-up costs a
  dictionary access and a node per page, and memory a node per page.
* `PerTokenRadixTree`: edges of many tokens, compared one token after the other in a loop.

Both choose victims the way most engines do: at every call of `evict` all leaves are collected and a
heap is built. All three choices are what cache/radix_cache.py does not do; otherwise the rules are the
same (splits leave both halves fresh, ties go by id), so the trees agree on every hit and, the radix
tree, on every eviction. Only lru; no namespaces, no events, no growing of leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from minirad.cache.radix_cache import Slots

Tokens = tuple[int, ...]


class TextbookNode:
    """Tokens and slots as plain Python lists."""

    __slots__ = ("children", "id", "last_access", "lock_ref", "parent", "slots", "tokens")

    def __init__(self, id: int, parent: TextbookNode | None, tokens: Tokens, slots: list[int]) -> None:
        self.id, self.parent, self.tokens, self.slots = id, parent, tokens, slots
        self.children: dict[Tokens, TextbookNode] = {}
        self.lock_ref = self.last_access = 0


class Matched(NamedTuple):
    """`length` matched tokens in `slots`, ending at `last_node`."""

    slots: Slots
    length: int
    last_node: TextbookNode


class Inserted(NamedTuple):
    """`prefix_len` tokens were there before; the path ends at `last_node`."""

    prefix_len: int
    last_node: TextbookNode


class Evicted(NamedTuple):
    """`num_tokens` tokens are gone, their KV was in `slots`."""

    num_tokens: int
    slots: Slots


class TextbookTree:
    """Locks and eviction, which do not care how long an edge is."""

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.root = TextbookNode(0, None, (), [])
        self.evictable_size = self.protected_size = 0
        self._next_id = 1
        self._tick = 0

    @staticmethod
    def key(tokens: Sequence[int] | Slots) -> Tokens:
        """Tokens in the form in which this tree compares them quickest."""
        return tuple(np.asarray(tokens).tolist())

    def walk(self) -> Iterator[TextbookNode]:
        """All nodes, parents first."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def inc_lock_ref(self, node: TextbookNode) -> None:
        """Protects a node and all above it."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_size -= len(node.tokens)
                self.protected_size += len(node.tokens)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TextbookNode) -> None:
        """Takes one lock back."""
        while node.parent is not None:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size += len(node.tokens)
                self.protected_size -= len(node.tokens)
            node = node.parent

    def evict(self, num_tokens: int) -> Evicted:
        """Collects all unlocked leaves, builds a heap, and takes the least recently used until enough."""
        heap = [(n.last_access, n.id, n) for n in self.walk() if _evictable(n)]
        heapq.heapify(heap)
        freed: list[int] = []
        while heap and len(freed) < num_tokens:
            leaf = heapq.heappop(heap)[2]
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.tokens[: self.page_size]]
            freed += leaf.slots
            if _evictable(parent):
                heapq.heappush(heap, (parent.last_access, parent.id, parent))
        self.evictable_size -= len(freed)
        return Evicted(len(freed), np.array(freed, dtype=np.int64))

    def _add(self, parent: TextbookNode, tokens: Tokens, slots: list[int]) -> TextbookNode:
        node = TextbookNode(self._next_id, parent, tokens, slots)
        self._next_id += 1
        node.last_access = self._tick
        parent.children[tokens[: self.page_size]] = node
        return node


def _evictable(node: TextbookNode) -> bool:
    return node.lock_ref == 0 and not node.children and node.parent is not None


class TokenTrie(TextbookTree):
    """One node per page."""

    def match_prefix(self, key: Tokens) -> Matched:
        """The longest prefix in whole pages; touches its path."""
        node, slots = self._follow(key)
        return Matched(np.array(slots, dtype=np.int64), len(slots), node)

    def insert(self, key: Tokens, slots: Slots) -> Inserted:
        """Adds a node for every page that is not there; units past the last whole page are ignored."""
        node, there = self._follow(key)
        prefix_len, page = len(there), self.page_size
        new = slots.tolist()
        for start in range(prefix_len, len(key) - page + 1, page):
            node = self._add(node, key[start : start + page], new[start : start + page])
            self.evictable_size += page
        return Inserted(prefix_len, node)

    def _follow(self, key: Tokens) -> tuple[TextbookNode, list[int]]:
        node, page = self.root, self.page_size
        slots: list[int] = []
        self._tick += 1
        for start in range(0, len(key) - page + 1, page):
            child = node.children.get(key[start : start + page])
            if child is None:
                break
            node = child
            node.last_access = self._tick
            slots += node.slots
        return node, slots


class PerTokenRadixTree(TextbookTree):
    """Long edges, compared token by token."""

    def match_prefix(self, key: Tokens) -> Matched:
        """The longest prefix in whole pages; splits where it ends inside a node."""
        node, slots = self._follow(key)
        return Matched(np.array(slots, dtype=np.int64), len(slots), node)

    def insert(self, key: Tokens, slots: Slots) -> Inserted:
        """Adds what is not there as one leaf; units past the last whole page are ignored."""
        node, there = self._follow(key)
        prefix_len, end = len(there), len(key) // self.page_size * self.page_size
        if prefix_len < end:
            node = self._add(node, key[prefix_len:end], slots[prefix_len:end].tolist())
            self.evictable_size += end - prefix_len
        return Inserted(prefix_len, node)

    def _follow(self, key: Tokens) -> tuple[TextbookNode, list[int]]:
        node, page = self.root, self.page_size
        slots: list[int] = []
        self._tick += 1
        while child := node.children.get(key[len(slots) : len(slots) + page]):
            shared = self._shared(child.tokens, key, len(slots))
            if shared < len(child.tokens):
                child = self._split(child, shared)
            node = child
            node.last_access = self._tick
            slots += node.slots
        return node, slots

    def _shared(self, edge: Tokens, key: Tokens, start: int) -> int:
        count, most = 0, min(len(edge), len(key) - start)
        while count < most and edge[count] == key[start + count]:
            count += 1
        return count // self.page_size * self.page_size

    def _split(self, lower: TextbookNode, at: int) -> TextbookNode:
        assert lower.parent is not None
        upper = self._add(lower.parent, lower.tokens[:at], lower.slots[:at])
        upper.lock_ref = lower.lock_ref
        lower.tokens, lower.slots, lower.parent = lower.tokens[at:], lower.slots[at:], upper
        lower.last_access = self._tick
        upper.children[lower.tokens[: self.page_size]] = lower
        return upper
