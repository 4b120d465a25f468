"""How many tokens of the pool are free, evictable, protected and private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State
from viz.trace import View, host_used


class Usage(NamedTuple):
    """Tokens. evictable, protected: in the tree, unlocked or locked; private: one request's alone."""

    free: int
    evictable: int
    protected: int
    private: int


def usage_of(state: State | ReplayState | View) -> Usage:
    """Counted from a state. A tree on its own has no pool: nothing is free or private."""
    if isinstance(state, View):
        table, rest = state.table, state.state
        total, protected = int(table.slots.sum()), int(table.slots[table.lock_ref > 0].sum())
        return _usage(rest, total, protected)
    if isinstance(state, ReplayState):
        rest, nodes = state.rest, list(state.nodes.all_to_look_at())
    else:
        rest, nodes = state, state["tree"]["nodes"]
    total = sum(len(node["slots"]) for node in nodes)
    protected = sum(len(node["slots"]) for node in nodes if node["lock_ref"])
    return _usage(rest, total, protected)


def _usage(rest: State, total: int, protected: int) -> Usage:
    free = int(rest["free"])
    return Usage(free, total - protected, protected, max(int(rest["kv_tokens"]) - free - total, 0))


def counted_usage(frame: Frame) -> Usage | None:
    """The engine's own count at the end of a frame; None where the frame ends between two steps."""
    ended = frame.events[-1] if frame.events else None
    if not isinstance(ended, ev.StepEnded):
        return None
    return Usage(ended.free, ended.evictable, ended.protected, ended.private)


@dataclass(frozen=True, slots=True)
class UsagePoint:
    """The pool's usage after one frame, in tokens. host: those with a copy in host memory."""

    frame: int
    step: int
    free: int
    evictable: int
    protected: int
    private: int
    host: int = 0


def usage_points(recording: Recording) -> list[UsagePoint]:
    """One point per frame."""
    return [
        UsagePoint(
            frame.index, frame.step, *(counted_usage(frame) or usage_of(replay)), host_used(replay.tree)
        )
        for frame, replay in recording.walk()
    ]
