"""Numbers of a tree's nodes as arrays, kept up by what changed: what is asked of all nodes of large trees.

A look at each of 100,000 nodes takes longer than a view may, so a `Trace` keeps one `Columns` beside its
state and each view gets a `Table`. Does not know of time or drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import numpy.typing as npt

from minirad.observe.snapshot import State, rest_of, units

Ints = npt.NDArray[np.int64]
RESTS = ("cached", "host", "hole", "unseen")  # what rest_of says, by the number that stands for it
_FIELDS = ("id", "parent", "units", "slots", "last_access", "created", "lock_ref", "rest")


class Table:
    """The nodes of one moment by increasing id: arrays of equal length. slots: how many on the device."""

    def __init__(self, rows: Ints) -> None:
        if len(rows[0]) and (rows[0][1:] <= rows[0][:-1]).any():
            rows = rows[:, np.argsort(rows[0], kind="stable")]
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

    def with_ghosts(self, ghosts: Iterable[State]) -> Table:
        """The same with nodes that have left the tree."""
        more = [_row(node) for node in ghosts]
        return Table(np.concatenate([self.rows, np.array(more, np.int64).T], axis=1)) if more else self


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
        new = [number for number in there if number not in self._row_of]
        self._make_room(len(new))
        self._row_of.update(zip(new, range(self._used, self._used + len(new)), strict=True))
        self._used += len(new)
        if there:
            rows = [self._row_of[number] for number in there]
            self._rows[:, rows] = np.array([_row(nodes[number]) for number in there], np.int64).T

    def table(self) -> Table:
        """The present rows, which later changes leave alone."""
        rows = self._rows[:, : self._used]
        return Table(rows[:, rows[0] > 0] if len(self._row_of) < self._used else rows.copy())

    def _make_room(self, more: int) -> None:
        if self._used + more <= self._rows.shape[1]:
            return
        rows = self.table().rows
        self._used = rows.shape[1]
        self._rows = np.zeros((len(_FIELDS), 2 * (self._used + more)), np.int64)
        self._rows[:, : self._used] = rows
        self._row_of = dict(zip(rows[0].tolist(), range(self._used), strict=True))


def _row(node: State) -> tuple[int, ...]:
    return (
        node["id"], node["parent"], units(node), len(node["slots"]), node["last_access"], node["created"],
        node["lock_ref"], RESTS.index(rest_of(node)),
    )  # fmt: skip


def table_of(nodes: Mapping[int, State]) -> Table:
    """All nodes at once."""
    columns = Columns()
    columns.update(nodes, nodes)
    return columns.table()


def changes(old: Mapping[int, State], new: Mapping[int, State]) -> list[int]:
    """The numbers of nodes that are not one and the same in both."""
    gone = [number for number in old if number not in new]
    return gone + [number for number, node in new.items() if old.get(number) is not node]
