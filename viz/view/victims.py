"""Evictions: which node went, by which rule, and which others could have gone in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz.trace import Decode, Trace, View, decoder_for, evictable_leaves, text_tokens, units


@dataclass(frozen=True, slots=True)
class Victim:
    """An eviction, with the state just before it.

    nodes: all of the tree by id, good until the next victim is asked for. choices: those of them that could
    have gone (the victim first, then the runner-up, then by last access).
    """

    event: ev.AnyEviction
    nodes: dict[int, State]
    choices: list[State]

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
    state = trace.recording.replay_to(first - 1)
    for frame in range(first, view.frame + 1):
        for event in trace.frame_events(frame):
            gone = ev.eviction(event)
            if gone is not None and id(event) in on_view:
                yield _victim(gone, state.nodes)
            try:
                state.apply(event)
            except (KeyError, ValueError):
                return


def _victim(event: ev.AnyEviction, nodes: dict[int, State]) -> Victim:
    choices = evictable_leaves(nodes, host=event.victim == "host")
    choices.sort(key=lambda n: (n["id"] != event.node, n["id"] != event.runner_up, n["last_access"], n["id"]))
    return Victim(event, nodes, choices)


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
