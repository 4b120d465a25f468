"""Frames, and the states that they lead to.

A `Frame` holds one step's events (what happens between two steps belongs to the next frame). Every so
many frames one also holds a **keyframe**: the whole state after it, so that the state after any frame is
a keyframe and at most so many frames of replay from there (event.ReplayState takes the events one by
one). A keyframe says nothing new: it is what the events before it lead to. Only where a tree tells no
events (a student's) is it the keyframe that counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minirad.observe.event import Event, ReplayState, expect
from minirad.observe.reading import MOST_ROWS, check_state, event_fields, parse_frame
from minirad.observe.snapshot import State


@dataclass(frozen=True, slots=True)
class Frame:
    """One step. keyframe: the state after it, or None. scene: a title, if a new scene begins here."""

    index: int
    step: int
    events: tuple[Event, ...]
    keyframe: State | None = None
    scene: str | None = None

    def to_json(self) -> str:
        """One line; events as [name, field, ...] to keep long recordings small."""
        line: dict[str, Any] = {"frame": self.index, "step": self.step}
        if self.scene is not None:
            line["scene"] = self.scene
        line["events"] = [event_fields(event) for event in self.events]
        if self.keyframe is not None:
            line["keyframe"] = self.keyframe
        return json_line(line)

    @classmethod
    def from_json(cls, text: str) -> Frame:
        """ValueError for a line that is not a whole frame."""
        return cls(*parse_frame(text))


def _for_json(value: Any) -> Any:
    """For json: numpy's numbers and rows, as a student's tree may hold them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} cannot be written as JSON")


def json_line(data: State) -> str:
    """Data as one line of JSON, without its line break; ValueError for numbers that JSON has not (NaN)."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_for_json)


def apply_frame(
    replay: ReplayState, frame: Frame, before: Callable[[Event, ReplayState], Any] | None = None
) -> ReplayState:
    """The state after a frame: `replay` moved on, or (if its events do not replay) its keyframe's.

    ValueError names a frame that does not follow and has no keyframe.
    """
    for event in frame.events:
        try:
            if before is not None:
                before(event, replay)
            replay.apply(event)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            if frame.keyframe is not None:
                return ReplayState(frame.keyframe)
            what = f"{type(event).__name__} does not fit the state: {error!r}"
            raise ValueError(f"frame {frame.index} does not follow from those before it: {what}") from error
    return replay


class CheckedReplay(ReplayState):
    """A ReplayState that takes no event that does not follow from what was before: ValueError."""

    def __init__(self, snapshot: State) -> None:
        super().__init__(snapshot)
        self._rows = {name: len(request["slots"]) for name, request in self.requests.items()}
        self._held = sum(self._rows.values())

    def apply(self, event: Event) -> None:
        """Moves the state on by one event, if it fits."""
        event.check(self)
        try:
            super().apply(event)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it does not fit the state: {error!r}") from error
        for name in event.about():
            size = len(self.requests[name]["slots"]) if name in self.requests else 0
            self._held += size - self._rows.get(name, 0)
            self._rows[name] = size
        expect(
            self._held <= MOST_ROWS,
            f"{self._held} slots in the rows of requests; at most {MOST_ROWS} are read",
        )


class FrameCheck:
    """Takes frames in order; ValueError for one that does not follow from those before it.

    What a frame tells of a silent tree was put together afterwards and need not replay: there each frame
    has a keyframe, which says how it ended.
    """

    def __init__(self, start: State) -> None:
        self._replay = CheckedReplay(start)
        self._silent = False

    def take(self, frame: Frame) -> Frame:
        """The next frame; its keyframe shares the nodes that are as in the one before it."""
        if frame.index == 0:
            self._silent = frame.keyframe is not None
        if frame.keyframe is not None:
            try:
                check_state(frame.keyframe)
            except ValueError as error:
                raise ValueError(f"the keyframe of frame {frame.index} is no whole state: {error}") from error
        try:
            for event in frame.events:
                self._replay.apply(event)
        except ValueError as error:
            if not self._silent or frame.keyframe is None:
                told = f"frame {frame.index} does not follow from those before it"
                raise ValueError(f"{told}: {type(event).__name__}: {error}") from error
        if frame.keyframe is not None:
            if self._silent:
                self._replay = CheckedReplay(frame.keyframe)
                return frame
            state = self._replay.snapshot()
            if state != frame.keyframe:
                raise ValueError(f"the keyframe of frame {frame.index} is not what its events lead to")
            return replace(frame, keyframe=state)
        return frame


def sharing(state: State, before: State) -> State:
    """A state in which nodes that are equal in one before it are that one's: it takes little memory then."""
    known = {node["id"]: node for node in before["tree"]["nodes"]}
    nodes = [old if (old := known.get(node["id"])) == node else node for node in state["tree"]["nodes"]]
    return {**state, "tree": {**state["tree"], "nodes": nodes}}
