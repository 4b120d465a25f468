"""The old name of minirad/tiers/host_tier.py, for code that has it."""

import sys

from minirad.tiers import host_tier

sys.modules[__name__] = host_tier
