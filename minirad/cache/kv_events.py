"""The old name of minirad/observe/kv_events.py, for code that has it."""

import sys

from minirad.observe import kv_events

sys.modules[__name__] = kv_events
