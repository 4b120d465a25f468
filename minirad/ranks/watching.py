"""The other ranks' recordings, on rank 0: each records its own engine and sends frames after each step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from minirad.errors import said
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.ranks.messages import NOTHING

if TYPE_CHECKING:
    from minirad.ranks.group import Group


def watch(engine: Any) -> list[Recording]:
    """One recording for each other rank, in their order; they grow with each step until `unwatch`.

    Frame n of each is the same step; of one in which ranks differ it is what came before
    that was found. The engine does not run ahead meanwhile, as with any recorder.
    ValueError for an engine that is not rank 0's of several.
    """
    if not hasattr(engine, "recordings"):
        raise ValueError(
            f"an engine of several ranks (tp > 1), on rank 0, can be watched, not {said(engine)}"
        )
    with engine.transaction, engine.together():
        if not engine.recordings:
            engine.tell(NOTHING, more=("watch", None))
            headers = engine.group.gather_any(None)[1:]
            engine.recordings += [Recording(header) for header in headers]
            engine.stop_watching = engine.bus.subscribe(ev.StepEnded, _nothing)
    recordings: list[Recording] = engine.recordings
    return recordings


def unwatch(engine: Any) -> None:
    """The recordings are whole, with what happened since the last step, and grow no more."""
    with engine.transaction, engine.together():
        if engine.recordings:
            engine.tell(NOTHING, more=("unwatch", None))
            receive(engine.group, engine.recordings)
            engine.stop_watching()
            engine.recordings = []


def receive(group: Group, recordings: list[Recording]) -> None:
    """Rank 0: what the others have recorded since the last time."""
    for recording, frames in zip(recordings, group.gather_any(None)[1:], strict=True):
        recording.frames += frames


class Sender:
    """Another rank's recorder."""

    def __init__(self, engine: Any, group: Group) -> None:
        self._group, self._recorder, self._sent = group, Recorder(engine), 0
        group.gather_any(self._recorder.header)

    def send(self) -> None:
        """The frames since the last time."""
        frames: list[Frame] = self._recorder.frames[self._sent :]
        self._sent += len(frames)
        self._group.gather_any(frames)

    def close(self) -> None:
        self._recorder.close()
        self.send()

    def differ(self) -> None:
        """The frames up to where the ranks differ. Nothing comes behind them."""
        with contextlib.suppress(Exception):  # in the middle of a step, after who knows what
            self._recorder.close()
        self.send()


def _nothing(event: ev.Event) -> None:
    """A handler that needs whole steps, and nothing else."""
