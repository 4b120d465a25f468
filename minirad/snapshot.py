"""The old name of minirad/observe/snapshot.py, for code that has it."""

from minirad.observe.snapshot import *  # noqa: F403
