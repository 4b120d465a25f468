"""A tree with a memory: everything that ever was in a cache, by content, and what became of it.

A radix tree as the cache's own, but nothing leaves it: an edge is a run of tokens that always were together,
and for each namespace a `Record` says in which media the run lies, who brought it, who used it last, and of
what has left: when, and why. It is told in terms that every cache has, and knows no engine:

    came     tokens lie in a medium from now on         used     a request found them there
    left     they do not any more, and why              gone     all of a namespace's, or everybody's, at once
    began    a request is about to compute tokens       ended    it is not any more

Positions are key units: tokens, or pairs of them (`width` 2). A path is the tokens from the beginning, as
int32 bytes or numbers. A cache that holds whole pages knows a page by its last unit: the record there is the
page's (two pages that begin alike share the records before).

Records may be forgotten, oldest first, where `most` bounds them; a place remembers that something was there.

Does not ask why a request missed: answer.py does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.errors import as_int64, whole
from minirad.observe.event import CPU as CPU
from minirad.observe.event import GPU as GPU

RECORD_COST = 16  # what a record takes beside its run's tokens, in numbers
SLACK = 8  # an eighth of the bound is forgotten at once, so that it is rarely due
NEVER = float("-inf")

Path = bytes | Sequence[int] | np.ndarray[Any, Any]


@dataclass(slots=True)
class Departure:
    """Something left a medium. why: "evicted", "flushed" or "weights".

    by: the requests that needed the room (they may be told later). policy, reason: of the choice.
    along: it could not stay without what was before it, which had to go.
    """

    when: float
    why: str
    medium: str = GPU
    by: tuple[str, ...] = ()
    policy: str = ""
    reason: str = field(default="", compare=False)
    along: bool = False


@dataclass(slots=True, eq=False)
class Computation:
    """A request that computes a path. end: "" while it does, then "finished", "aborted", "retracted", ..."""

    by: str
    namespace: Hashable
    data: bytearray
    when: float
    end: str = ""
    ended: float = 0.0


class Record:
    """What one namespace's tokens of a run went through.

    held: media in which they lie. came, by: when they were last computed, by whom ("" if that is unknown).
    used, user: when they were last found or computed, by whom. left: what they left and have not come back
    to, in that order. computing: the last request that set out to compute them.
    below: how many runs right below have a record of this namespace, latest: one of them, the last to get it
    (None: not known). forgot: some had, and were forgotten.
    """

    __slots__ = (
        "below", "by", "came", "computing", "forgot", "held", "latest", "left", "used", "user",
    )  # fmt: skip

    def __init__(self) -> None:
        self.held: tuple[str, ...] = ()
        self.left: tuple[Departure, ...] = ()
        self.came = self.used = NEVER
        self.by = self.user = ""
        self.computing: Computation | None = None
        self.below = 0
        self.latest: Run | None = None
        self.forgot = False

    def upper_half(self) -> Record:
        """The same, for the first part of a run that is divided."""
        other = Record()
        other.held, other.left, other.came, other.used = self.held, self.left, self.came, self.used
        other.by, other.user, other.computing = self.by, self.user, self.computing
        other.below = 1
        return other

    @property
    def age(self) -> float:
        """When something last happened to it."""
        times = [self.came, self.used, *(each.when for each in self.left)]
        if self.computing is not None:
            times += [self.computing.when, self.computing.ended]
        return max(times)

    @property
    def may_go(self) -> bool:
        """Nothing lies in a medium or is being computed, and nothing below is remembered."""
        computed = self.computing is not None and not self.computing.end
        return not self.held and not self.below and not computed


class Run:
    """An edge of the tree. children: by the bytes of their first unit. spaces: namespace -> Record."""

    __slots__ = ("children", "edge", "parent", "spaces")

    def __init__(self, parent: Run | None, edge: bytes) -> None:
        self.parent, self.edge = parent, edge
        self.children: dict[bytes, Run] = {}
        self.spaces: dict[Hashable, Record] = {}


class Memory:
    """Everything that ever was in a cache.

    width: ids of a key unit, 2 for pairs. most: tokens and records that are kept at most, None: all; what is
    still in the cache is kept anyhow.

    Attributes:
        kept: tokens (and records, RECORD_COST each) in memory now. forgotten: records that were given up.
        running: by name, the computations that have not ended.
    """

    def __init__(self, width: int = 1, most: int | None = None) -> None:
        self.unit = 4 * whole("width", width, 1)
        self._bound = None if most is None else whole("most", most, 1)
        self.root = Run(None, b"")
        self.kept = self.forgotten = 0
        self.running: dict[str, Computation] = {}
        self.forgot_beginning = False  # something was forgotten of which not even the first token is known
        self._look_at = self._bound  # from so many kept on it is looked for what can be forgotten

    # ------------------------------------------------------------ what a cache tells

    def came(
        self, namespace: Hashable, path: Path, start: int = 0, *, when: float, by: str = "", medium: str = GPU
    ) -> None:
        """The units of a path from `start` on lie in a medium from now on.

        by: the request that computed them; "" where it is not known (then whoever is known stays).
        """
        for record in self._records(namespace, self.data_of(path), start):
            if medium not in record.held:
                record.held = (*record.held, medium)
            record.left = tuple(each for each in record.left if each.medium != medium)
            if medium == GPU or record.came == NEVER:
                record.came, record.by = when, by or record.by
                record.used, record.user = when, by or record.user
        self._keep_bound()

    def left(self, namespace: Hashable, path: Path, start: int, departure: Departure) -> None:
        """The units of a path from `start` on are not in the departure's medium any more.

        What was not there (of older weights, of before this memory) is left out.
        """
        medium = departure.medium
        for record in self._known(namespace, self.data_of(path), start):
            if medium in record.held:
                record.held = tuple(each for each in record.held if each != medium)
                record.left = (*record.left, departure)

    def used(self, namespace: Hashable, path: Path, *, when: float, by: str = "") -> None:
        """A request found the units of a path."""
        for record in self._known(namespace, self.data_of(path), 0):
            record.used, record.user = when, by or record.user

    def gone(self, when: float, why: str, namespaces: Sequence[Hashable] | None = None) -> None:
        """All of these namespaces' (None: everybody's) has left every medium. why: a Departure's."""
        departures: dict[str, Departure] = {}
        for run in self._runs():
            for name in run.spaces if namespaces is None else set(namespaces) & run.spaces.keys():
                record = run.spaces[name]
                for medium in sorted(record.held, reverse=True):  # the device first
                    left = departures.setdefault(medium, Departure(when, why, medium))
                    record.left = (*record.left, left)
                record.held = ()

    def began(self, namespace: Hashable, path: Path, *, when: float, by: str) -> Computation:
        """A request computes a path from now on (or what of it is not in the cache)."""
        data = self.data_of(path)
        computing = self.running[by] = Computation(by, namespace, bytearray(data), when)
        for record in self._records(namespace, data, 0):
            record.computing = computing
        self._keep_bound()
        return computing

    def ended(self, by: str, when: float, end: str, path: Path | None = None) -> None:
        """It does not any more. path: what it has computed by now, if that is more than it began with."""
        computing = self.running.pop(by, None)
        if computing is None:
            return
        computing.end, computing.ended = end, when
        if path is not None:
            for record in self._records(computing.namespace, self.data_of(path), 0):
                record.computing = computing
        computing.data = bytearray()  # it is in the tree

    # ------------------------------------------------------------ what is known

    def data_of(self, path: Path) -> bytes:
        """A path as bytes; ValueError for what is no row of token ids or no whole number of units."""
        data = path if isinstance(path, bytes) else as_int64(path, "tokens").astype("<i4").tobytes()
        if len(data) % self.unit:
            raise ValueError(f"{len(data)} bytes are no whole number of units of {self.unit}")
        return data

    def trail(self, data: bytes) -> list[tuple[Run, int]]:
        """The runs along a path, each with the unit at which it ends there (the last one may go on)."""
        found: list[tuple[Run, int]] = []
        run, pos = self.root, 0
        while (child := run.children.get(data[pos : pos + self.unit])) is not None:
            end = pos + len(child.edge)
            if data[pos:end] != child.edge:
                alike = common_units(child.edge, data[pos:end], self.unit)
                return [*found, (child, pos // self.unit + alike)]
            found.append((child, end // self.unit))
            run, pos = child, end
        return found

    def record(self, namespace: Hashable, path: Path) -> Record | None:
        """What is known of the last unit of a path; None for nothing."""
        data = self.data_of(path)
        trail = self.trail(data)
        whole_path = trail and trail[-1][1] * self.unit == len(data)
        return trail[-1][0].spaces.get(namespace) if whole_path else None

    def goes_on(self, namespace: Hashable, run: Run, inside: int) -> tuple[Record, bytes] | None:
        """What a namespace had last behind the first `inside` bytes of a run: record and first bytes."""
        record = run.spaces[namespace]
        if inside < len(run.edge):
            return record, run.edge[inside:]
        child = record.latest
        if child is None and record.below:
            child = next(each for each in reversed(run.children.values()) if namespace in each.spaces)
        return None if child is None else (child.spaces[namespace], child.edge)

    # ------------------------------------------------------------ paths

    def _records(self, namespace: Hashable, data: bytes, start: int) -> list[Record]:
        """The records of a path from `start` on, made where there are none; runs are divided to fit."""
        found: list[Record] = []
        run, pos, begin = self.root, 0, start * self.unit
        while pos < len(data):
            child = run.children.get(data[pos : pos + self.unit])
            if child is None:
                child = self._add(run, data[pos:])
            child, end = self._fitted(child, data, pos, begin)
            if namespace not in child.spaces:
                child.spaces[namespace] = Record()
                self.kept += RECORD_COST
                if run is not self.root:
                    run.spaces[namespace].below += 1
                    run.spaces[namespace].latest = child
            if pos >= begin:
                found.append(child.spaces[namespace])
            run, pos = child, end
        return found

    def _known(self, namespace: Hashable, data: bytes, start: int) -> Iterator[Record]:
        """The records that there are of a path from `start` on."""
        run, pos, begin = self.root, 0, start * self.unit
        while pos < len(data):
            child = run.children.get(data[pos : pos + self.unit])
            if child is None or namespace not in child.spaces:
                return
            child, end = self._fitted(child, data, pos, begin)
            if pos >= begin:
                yield child.spaces[namespace]
            run, pos = child, end

    def _fitted(self, child: Run, data: bytes, pos: int, begin: int) -> tuple[Run, int]:
        """The run at `pos` of a path and its end; divided where the path parts from it, and at `begin`."""
        end = pos + len(child.edge)
        if data[pos:end] != child.edge:
            at = common_units(child.edge, data[pos:end], self.unit) * self.unit
            child, end = self._divide(child, at), pos + at
        if pos < begin < end:
            child, end = self._divide(child, begin - pos), begin
        return child, end

    def _add(self, parent: Run, edge: bytes) -> Run:
        child = Run(parent, edge)
        parent.children[edge[: self.unit]] = child
        self.kept += len(edge) // self.unit
        return child

    def _divide(self, lower: Run, at: int) -> Run:
        """Cuts a run after `at` bytes; returns the new upper half."""
        parent = lower.parent
        assert parent is not None
        upper = Run(parent, lower.edge[:at])
        parent.children[upper.edge[: self.unit]] = upper
        lower.edge, lower.parent = lower.edge[at:], upper
        upper.children[lower.edge[: self.unit]] = lower
        for name, record in lower.spaces.items():
            upper.spaces[name] = half = record.upper_half()
            half.latest = lower
            if parent is not self.root and parent.spaces[name].latest is lower:
                parent.spaces[name].latest = upper
        self.kept += RECORD_COST * len(upper.spaces)
        return upper

    # ------------------------------------------------------------ forgetting

    def _keep_bound(self) -> None:
        if self._bound is not None and self._look_at is not None and self.kept > self._look_at:
            slack = self._bound // SLACK
            self._forget(self._bound - slack)
            self._look_at = max(self._bound, self.kept + slack)  # what is in the cache cannot go

    def _forget(self, target: int) -> None:
        """The records that nothing happened to for longest go, leaves first, until `target` is kept."""
        while self.kept > target:
            leaves = [
                (record.age, run, name)
                for run in self._runs()
                for name, record in run.spaces.items() if record.may_go
            ]  # fmt: skip
            if not leaves:
                return
            leaves.sort(key=lambda leaf: leaf[0])
            for _, run, name in leaves:
                if self.kept <= target:
                    return
                self._drop(run, name)

    def _runs(self) -> Iterator[Run]:
        todo = [self.root]
        while todo:
            run = todo.pop()
            todo.extend(run.children.values())
            yield run

    def _drop(self, run: Run, namespace: Hashable) -> None:
        parent = run.parent
        assert parent is not None
        del run.spaces[namespace]
        self.kept -= RECORD_COST
        self.forgotten += 1
        if parent is self.root:
            self.forgot_beginning = True
        else:
            above = parent.spaces[namespace]
            above.below -= 1
            above.forgot = True
            if above.latest is run:
                above.latest = None
        if not run.spaces:
            del parent.children[run.edge[: self.unit]]
            self.kept -= len(run.edge) // self.unit


def common_units(one: bytes, other: bytes | bytearray, unit: int) -> int:
    """How many units two rows of bytes begin with alike."""
    size = min(len(one), len(other)) // unit * unit
    if one[:size] == other[:size]:
        return size // unit
    kind = np.dtype(f"V{unit}") if unit not in (4, 8) else np.dtype(f"<i{unit}")
    first, second = (np.frombuffer(each[:size], dtype=kind) for each in (one, other))
    return int(np.argmax(first != second))
