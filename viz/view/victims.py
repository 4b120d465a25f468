"""Evictions: which node went, by which rule, and which others could have gone in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz.trace import Decode, Trace, View, decoder_for, evictable_leaves, text_tokens, tier_of, units
from viz.view.columns import RESTS, Table

LARGE = 3000  # nodes; of a larger tree only so many choices are told
MOST_CHOICES = 50


@dataclass(frozen=True, slots=True)
class Victim:
    """An eviction, with the state just before it.

    nodes: all of the tree by id, good until the next victim is asked for. choices: those of them that could
    have gone (the victim first, then the runner-up, then by last access); of a large tree the first ones of
    so many as `count` says.
    """

    event: ev.AnyEviction
    nodes: dict[int, State]
    choices: list[State]
    count: int

    @property
    def what(self) -> str:
        """What became of the node: see Eviction."""
        return self.event.victim


def first_frame(trace: Trace, view: View) -> int:
    """The frame with which a position's step or scene begins."""
    in_scene = view.granularity == "scene" and view.index > 0
    return trace.frame_at("scene", view.index - 1) + 1 if in_scene else view.frame


def victims(trace: Trace, view: View) -> Iterator[Victim]:
    """Each eviction of a position in order. Fewer for a silent tree, where what led to them is not known."""
    if not any(event.victim for event in view.events):
        return
    on_view = {id(event) for event in view.events}
    first = first_frame(trace, view)
    before = trace.view("step", first)
    state = ReplayState(before.state, before.nodes)
    leaves = _Leaves(state, before.table)
    for frame in range(first, view.frame + 1):
        for event in trace.frame_events(frame):
            gone = ev.eviction(event)
            if gone is not None and id(event) in on_view:
                yield _victim(gone, leaves.nodes(), leaves)
            try:
                state.apply(event)
            except (KeyError, ValueError):
                return


def _victim(event: ev.AnyEviction, nodes: dict[int, State], leaves: _Leaves) -> Victim:
    host = event.victim == "host"
    if len(nodes) > LARGE:
        choices, count = leaves.oldest(host, {event.node, event.runner_up or 0})
    else:
        choices = evictable_leaves(nodes, host)
        count = len(choices)
    choices.sort(key=lambda n: (n["id"] != event.node, n["id"] != event.runner_up, n["last_access"], n["id"]))
    return Victim(event, nodes, choices, count)


class _Leaves:
    """The evictable leaves of a large tree, from its arrays before the step and what has changed since."""

    def __init__(self, state: ReplayState, before: Table) -> None:
        self._state, self._before = state, before
        self._sorted: dict[bool, list[int]] = {}

    def nodes(self) -> dict[int, State]:
        """All nodes, to look at."""
        return dict.copy(self._state.nodes)

    def oldest(self, host: bool, wanted: set[int]) -> tuple[list[State], int]:
        """Those that were used least recently (and the `wanted` ones), and how many leaves there are."""
        table, nodes = self._before, self._state.nodes
        changed = self._state.nodes.changed()
        places = table.places(np.array(sorted(changed), np.int64))
        parents = set(table.parent[places[places < len(table)]].tolist())
        parents |= {nodes.look(number)["parent"] for number in changed if number in nodes}
        unsure = changed | parents | wanted
        before = self._leaves_before(host)
        at_all = len(before) - len(unsure.intersection(before))
        found = list(islice((number for number in before if number not in unsure), MOST_CHOICES))
        now = [number for number in unsure if number in nodes and self._is_leaf(number, host, changed)]
        return [nodes.look(number) for number in (*found, *now)], at_all + len(now)

    def _leaves_before(self, host: bool) -> list[int]:
        """Before the step, by last access."""
        if host not in self._sorted:
            table = self._before
            there = table.slots > 0
            with_child = np.zeros(len(table) + 1, bool)
            with_child[table.above[slice(None) if host else there]] = True
            alone = table.rest == RESTS.index("host") if host else there & (table.lock_ref == 0)
            leaves = np.flatnonzero(alone & ~with_child[:-1])
            order = np.lexsort((table.id[leaves], table.last_access[leaves]))
            self._sorted[host] = table.id[leaves[order]].tolist()
        return self._sorted[host]

    def _is_leaf(self, number: int, host: bool, changed: set[int]) -> bool:
        nodes, table = self._state.nodes, self._before
        node, place = nodes.look(number), int(table.places(np.array([number]))[0])
        if tier_of(node) != "host" if host else not node["slots"] or node["lock_ref"]:
            return False
        same = table.below.children(place).tolist() if place < len(table) else []
        below = [child for at in same if (child := int(table.id[at])) not in changed]
        below += [child for child in changed if child in nodes and nodes.look(child)["parent"] == number]
        return not any(host or nodes.look(child)["slots"] for child in below)


# ---------------------------------------------------------------------- of a whole recording


@dataclass(frozen=True, slots=True)
class Eviction:
    """A node that left the tree, or a tier. age: clock ticks since it was last used; life: since it was made.

    what: "evicted" (gone), "demoted" (gone from the device, its copy stays) or "host" (gone from the host).
    """

    step: int
    node: int
    tokens: int
    age: int
    life: int
    hits: int
    policy: str
    reason: str
    runner_up: int | None
    text: str
    what: str = "evicted"


def evictions(recording: Recording, decode: Decode | None = None) -> list[Eviction]:
    """Evicted nodes in the order in which they went."""
    decode = decode or decoder_for(recording.header)
    found: list[Eviction] = []
    step = 0

    def note(event: ev.Event, replay: ReplayState) -> None:
        gone = ev.eviction(event)
        if gone is not None and gone.node in replay.nodes:
            found.append(_eviction(step, gone, replay, decode))

    frames = recording.walk(note)
    for step in [frame.step for frame in recording]:  # noqa: B007  (`note` reads it)
        next(frames)
    return found


def _eviction(step: int, event: ev.AnyEviction, replay: ReplayState, decode: Decode) -> Eviction:
    node, now = replay.nodes[event.node], int(replay.tree["tick"])
    return Eviction(
        step, event.node, units(node), now - node["last_access"], now - node["created"],
        node["hits"], event.policy, event.reason, event.runner_up, decode(text_tokens(node)),
        event.victim,
    )  # fmt: skip
