"""The old name of the recorder, recordings and replay in minirad/observe/, for code that has it."""

from minirad.observe.event import ReplayState, request_order
from minirad.observe.reading import SCHEMA
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording, Walked
from minirad.observe.replay import Frame, apply_frame
from minirad.observe.silent import derive_events
from minirad.observe.snapshot import State, bare_snapshot, nodes_by_id

__all__ = [
    "SCHEMA",
    "Frame",
    "Recorder",
    "Recording",
    "ReplayState",
    "State",
    "Walked",
    "apply_frame",
    "bare_snapshot",
    "derive_events",
    "nodes_by_id",
    "request_order",
]
