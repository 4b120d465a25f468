"""The old name of minirad/observe/events.py, for code that has it."""

from minirad.observe.bus import Handler as Handler
from minirad.observe.events import *  # noqa: F403
