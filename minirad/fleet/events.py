"""The kinds of event of a stream, which are read with every recording (minirad/observe/fleet_events.py)."""

from minirad.observe.fleet_events import *  # noqa: F403
