"""Numbers of a tree's nodes as arrays, kept up by what changed: what is asked of all nodes of large trees.

A look at each of 100,000 nodes takes longer than a view may, so a `Trace` keeps one `Columns` beside its
state and each view gets a `Table`. Does not know of time or drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, filterfalse
from operator import is_not, itemgetter

import numpy as np
import numpy.typing as npt

from minirad.observe.snapshot import State, rest_of, units

Ints = npt.NDArray[np.int64]
RESTS = ("cached", "host", "hole", "unseen")  # what rest_of says, by the number that stands for it
_LEVELS = 2000  # a deeper tree is added up node by node
_FIELDS = ("id", "parent", "units", "slots", "last_access", "created", "lock_ref", "rest")


class Table:
    """The nodes of one moment by increasing id: arrays of equal length. slots: how many on the device."""

    def __init__(self, rows: Ints) -> None:
        if (rows[0][1:] <= rows[0][:-1]).any():
            rows = rows.take(np.argsort(rows[0], kind="stable"), axis=1)
        self.rows = rows
        self.id, self.parent, self.units, self.slots, self.last_access, self.created, self.lock_ref = rows[:7]
        self.rest = rows[7]

    def __len__(self) -> int:
        return len(self.id)

    def places(self, numbers: Ints) -> Ints:
        """Where nodes stand, `len(self)` for one that is not there."""
        if not len(self):
            return np.zeros_like(numbers)
        found = np.minimum(np.searchsorted(self.id, numbers), len(self) - 1)
        return np.where(self.id[found] == numbers, found, len(self))

    @cached_property
    def above(self) -> Ints:
        """The place of each node's parent; `len(self)` for the root, and for one that is not there."""
        return self.places(self.parent)

    @cached_property
    def below(self) -> Below:
        """What lies below each node."""
        return Below(self)

    def with_ghosts(self, ghosts: Iterable[State]) -> Table:
        """The same with nodes that have left the tree."""
        more = list(ghosts)
        return Table(np.concatenate([self.rows, _rows(more)], axis=1)) if more else self


class Below:
    """Children and subtrees. nodes, tokens: of each node's subtree, itself included; last: those of all.

    A node that is its own ancestor (in a file it may be) is below nothing.
    """

    def __init__(self, table: Table) -> None:
        size, above = len(table), table.above
        self._order = np.argsort(above, kind="stable")
        self._starts = np.searchsorted(above[self._order], np.arange(size + 2))
        self.nodes = np.append(np.ones(size, np.int64), 0)
        self.tokens = np.append(table.units, 0)
        depth = _depths(above)
        order = np.argsort(depth, kind="stable")
        order = order[np.searchsorted(depth[order], 1) :]
        if len(order) and depth[order[-1]] <= _LEVELS:
            self._by_level(above, order, depth)
        else:
            self._one_by_one(above, order)

    def children(self, place: int) -> Ints:
        """The places of a node's children; those of the root are `children(len(table))`."""
        return self._order[self._starts[place] : self._starts[place + 1]]

    def _by_level(self, above: Ints, order: Ints, depth: Ints) -> None:
        ends = np.searchsorted(depth[order], np.arange(1, depth[order[-1]] + 2))
        for begin, end in zip(ends[-2::-1].tolist(), ends[:0:-1].tolist(), strict=True):
            level = order[begin:end]
            np.add.at(self.nodes, above[level], self.nodes[level])
            np.add.at(self.tokens, above[level], self.tokens[level])

    def _one_by_one(self, above: Ints, order: Ints) -> None:
        nodes, tokens, parents = self.nodes.tolist(), self.tokens.tolist(), above.tolist()
        for place in reversed(order.tolist()):
            parent = parents[place]
            nodes[parent] += nodes[place]
            tokens[parent] += tokens[place]
        self.nodes, self.tokens = np.array(nodes, np.int64), np.array(tokens, np.int64)


def _depths(above: Ints) -> Ints:
    """How many nodes lie on the way from the root to each node, itself included; 0: no way leads there."""
    size = len(above)
    depth, far = np.append(np.ones(size, np.int64), 0), np.append(above, size)
    for _ in range(size.bit_length() + 1):
        if (far == size).all():
            break
        depth, far = depth + depth[far], far[far]
    depth[far != size] = 0
    return depth[:size]


class Columns:
    """The same of a tree that changes. Rows of nodes that went stay empty until there are too many."""

    def __init__(self, table: Table | None = None) -> None:
        self._rows: Ints = np.zeros((len(_FIELDS), 1024), np.int64) if table is None else table.rows.copy()
        self._used = 0 if table is None else len(table)
        self._row_of = dict(zip(self._rows[0, : self._used].tolist(), range(self._used), strict=True))

    def update(self, nodes: Mapping[int, State], changed: Iterable[int]) -> None:
        """Brings up to date what is said of the nodes `changed`, of which some may be gone."""
        there = [number for number in changed if number in nodes]
        for number in changed:
            if number not in nodes and (row := self._row_of.pop(number, None)) is not None:
                self._rows[0, row] = 0
        new = sorted(number for number in there if number not in self._row_of)
        self._make_room(len(new))
        self._row_of.update(zip(new, range(self._used, self._used + len(new)), strict=True))
        self._used += len(new)
        if there:
            rows = [self._row_of[number] for number in there]
            self._rows[:, rows] = _rows([nodes[number] for number in there])

    def table(self) -> Table:
        """The present rows, which later changes leave alone."""
        rows = self._rows[:, : self._used]
        holes = len(self._row_of) < self._used
        return Table(rows.take(rows[0].nonzero()[0], axis=1) if holes else rows.copy())

    def _make_room(self, more: int) -> None:
        if self._used + more <= self._rows.shape[1]:
            return
        rows = self.table().rows
        self._used = rows.shape[1]
        self._rows = np.zeros((len(_FIELDS), 2 * (self._used + more)), np.int64)
        self._rows[:, : self._used] = rows
        self._row_of = dict(zip(rows[0].tolist(), range(self._used), strict=True))


def _rows(nodes: Sequence[State]) -> Ints:
    made = np.zeros((len(_FIELDS), len(nodes)), np.int64)
    for at, name in enumerate(_FIELDS):
        if name in ("id", "parent", "last_access", "created", "lock_ref"):
            made[at] = np.fromiter(map(itemgetter(name), nodes), np.int64, len(nodes))
    made[2] = made[3] = np.fromiter(map(len, map(itemgetter("slots"), nodes)), np.int64, len(nodes))
    special = [at for at, node in enumerate(nodes) if "units" in node or "host" in node]
    made[2, special] = [units(nodes[at]) for at in special]
    made[7, special] = [RESTS.index(rest_of(nodes[at])) for at in special]
    return made


class PageOwners:
    """Which node has each page of the pool (0: none), kept up like `Columns`."""

    def __init__(self, page_size: int) -> None:
        self._size, self.cells = page_size, np.zeros(1024, np.int64)

    def update(self, before: Mapping[int, State], nodes: Mapping[int, State], changed: Sequence[int]) -> None:
        """`changed` nodes have other slots than `before`, or may have."""
        self._paint([before[number] for number in changed if number in before], clear=True)
        self._paint([nodes[number] for number in changed if number in nodes], clear=False)

    def _paint(self, nodes: Sequence[State], clear: bool) -> None:
        parts = [node["slots"][:: self._size] for node in nodes]
        pages = np.fromiter(chain.from_iterable(parts), np.int64) // self._size
        if not len(pages):
            return
        if (most := int(pages.max())) >= len(self.cells):
            self.cells = np.append(self.cells, np.zeros(most + 1, np.int64))
        owner = np.fromiter(map(itemgetter("id"), nodes), np.int64, len(nodes))
        owners = np.repeat(owner, np.fromiter(map(len, parts), np.int64, len(nodes)))
        if clear:
            pages, owners = pages[self.cells[pages] == owners], np.int64(0)
        self.cells[pages] = owners


def table_of(nodes: Mapping[int, State]) -> Table:
    """All nodes at once."""
    columns = Columns()
    columns.update(nodes, nodes)
    return columns.table()


def changes(old: Mapping[int, State], new: Mapping[int, State]) -> list[int]:
    """The numbers of nodes that are not one and the same in both."""
    gone = filterfalse(new.__contains__, old)
    return [*gone, *compress(new, map(is_not, new.values(), map(old.get, new)))]
