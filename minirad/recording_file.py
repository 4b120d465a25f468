"""The old name of what reads recordings in minirad/observe/, for code that has it."""

from minirad.observe.reading import *  # noqa: F403
from minirad.observe.recording import read_recording as read_recording
from minirad.observe.replay import CheckedReplay as CheckedReplay
from minirad.observe.replay import FrameCheck as FrameCheck
