"""The old name of minirad/fast/paged.py, for code that has it."""

import sys

from minirad.fast import paged

sys.modules[__name__] = paged
