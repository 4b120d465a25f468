"""What goes through a recording frame by frame: the memory of an engine's, or of a stream's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State

Told = TypeVar("Told", bound="Follows")


class Follows:
    """Takes a recording's frames in order; `take` counts them."""

    _taken = 0

    def __init__(self, header: State, most: int | None = None) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls: type[Told], recording: Recording, frames: int | None = None, most: int | None = None) -> Told:
        """Of a recording's first frames (None: all that there are). most: see Memory."""
        told = cls(recording.header, most)
        told.catch_up(recording.frames if frames is None else recording.frames[:frames])
        return told

    def catch_up(self, frames: Sequence[Frame]) -> None:
        """Takes those of a growing list of frames that are new."""
        for frame in frames[self._taken :]:
            self.take(frame)

    def take(self, frame: Frame) -> None:
        """The next frame."""
        raise NotImplementedError
