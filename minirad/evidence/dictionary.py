"""A dictionary of whole prompts instead of a tree: what RadixAttention is without its tree.

A sequence is found whole or not at all: a prompt hits iff something that was asked before (or asked and
answered) is a beginning of it, to its last token. Two prompts that only begin alike share nothing, for no
entry is ever split; so a chat finds its last turn, and a fork the prefix that was sent as a hint, but a
question behind solved examples finds nothing. This is how the SGLang paper's "No Tree-Structure" (a "simple
table-based cache", section 6.3) is understood here; it says no more about it.

Everything else is the tree's: an entry that goes on where another one ends holds only its own part, entries
are locked by who uses them, the least recently used goes first. Made for keys of tokens, not of pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minirad.cache.node import Node, RadixKey, Slots
from minirad.cache.radix_cache import InsertResult, RadixCache, Walk
from minirad.errors import as_int64, require
from minirad.observe import events as ev
from minirad.observe.bus import EventBus


class DictionaryCache(RadixCache):
    """A RadixCache that matches whole entries only, for an engine: `Engine(config, DictionaryCache())`.

    An entry is a node whose path is a whole prompt, or a prompt with its reply. What a prompt's first chunks
    have computed is none yet.
    """

    def __init__(self, page_size: int = 1, eviction_policy: str = "lru", bus: EventBus | None = None) -> None:
        super().__init__(page_size, eviction_policy, bus)
        self._asked: dict[str, int] = {}  # tokens of each request's prompt
        self._unfinished: set[int] = set()  # nodes that end within a prompt
        self._row: Slots | None = None  # while inserting: the slots that a request has
        self.bus.subscribe(ev.RequestAdded, self._added)
        self.bus.subscribe(ev.Committed, self._committed)
        self.bus.subscribe(ev.RequestFinished, self._left)
        self.bus.subscribe(ev.RequestAborted, self._left)

    def _added(self, event: ev.RequestAdded) -> None:
        self._asked[event.request] = len(event.token_ids)

    def _left(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        self._asked.pop(event.request, None)

    def _committed(self, event: ev.Committed) -> None:
        """Whether what a request has put in is an entry."""
        if event.finished or event.committed >= self._asked.get(event.request, 0):
            self._unfinished.discard(event.node)
            self._changes += 1  # a look from before did not find it
        elif event.prefix_len < event.aligned:
            self._unfinished.add(event.node)

    def _walk(self, key: RadixKey) -> Walk:
        """The longest entry that the key begins with; for a request's insert, the node that it goes on from.

        That is where it reads already: of its path the slots are the request's own for as far as possible.
        Two nodes may spell one beginning in different slots, and those that a row reads must stay locked.
        """
        best: tuple[tuple[int, int], list[Node]] = ((0, 0), [])
        todo: list[tuple[list[Node], int]] = [([], 0)]
        while todo:
            path, pos = todo.pop()
            if self._row is not None or not path or path[-1].id not in self._unfinished:
                best = max(best, ((self._read_by_row(path), pos), path), key=lambda found: found[0])
            for child in (path[-1] if path else self.root).children.values():
                if child.namespace == key.namespace and key.data.startswith(child.edge, pos):
                    todo.append(([*path, child], pos + len(child.edge)))
        return best[1], best[0][1], None, 0

    def _read_by_row(self, path: list[Node]) -> int:
        """How many of the path's first slots are those of the request that inserts; 0 for a look-up."""
        if self._row is None or not path:
            return 0
        slots = np.concatenate([node.slots for node in path])
        differ = np.flatnonzero(slots != self._row[: len(slots)])
        return int(differ[0]) if len(differ) else len(slots)

    def insert(self, key: RadixKey, slots: Any, priority: int = 0, grow: Node | None = None) -> InsertResult:
        """As the tree's; but an entry is not made longer, so that it can be found again."""
        if grow is not None and not self._may_grow(grow, key):
            grow = None
        self._row = as_int64(slots, "slots")
        try:
            return super().insert(key, slots, priority, grow)
        finally:
            self._row = None

    def _may_grow(self, leaf: Node, key: RadixKey) -> bool:
        """No entry, and not into what stands beside it already."""
        above = sum(len(each.edge) for each in self.path_up(leaf))
        page = key.width * self.page_size
        longer = leaf.edge + key.data[above : len(key.data) // page * page]
        beside = leaf.parent.children if leaf.parent is not None else {}
        return leaf.id in self._unfinished and _filed(leaf, longer) not in beside

    # A node is filed under its whole edge: two that begin alike stand beside each other.

    def _add_leaf(self, parent: Node, key: RadixKey, edge: bytes, packed: bytes, priority: int) -> Node:
        leaf = super()._add_leaf(parent, key, edge, packed, priority)
        self._file(leaf)
        return leaf

    def _grow(self, leaf: Node, edge: bytes, packed: bytes, priority: int) -> None:
        super()._grow(leaf, edge, packed, priority)
        self._file(leaf)

    def _file(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        if parent.children.get(leaf.first) is leaf:
            del parent.children[leaf.first]
        leaf.first = _filed(leaf, leaf.edge)
        parent.children[leaf.first] = leaf

    def check(self) -> None:
        """Sizes are sums over the nodes, and every node is filed under its edge; InvariantError names it."""
        sizes = {True: 0, False: 0}
        for node in self.walk():
            for first, child in node.children.items():
                require(first == child.first == _filed(child, child.edge), f"n{child.id} is misfiled")
                require(child.parent is node, f"n{child.id} does not know its parent n{node.id}")
                below = sum(each.lock_ref for each in child.children.values())
                require(child.lock_ref >= below, f"n{child.id}: lock_ref {child.lock_ref}, below {below}")
                sizes[child.lock_ref > 0] += len(child)
        counted, known = (sizes[False], sizes[True]), (self.evictable_size, self.protected_size)
        require(counted == known, f"evictable and protected are {known}, counted {counted}")


def _filed(node: Node, edge: bytes) -> Any:
    """Under what its parent has a node with this edge: as the tree has it, but for the whole edge.

    In a tuple, so that no edge is taken for another node's first page.
    """
    assert node.parent is not None
    return (edge,) if node.parent.parent is not None else (node.namespace, (edge,))
