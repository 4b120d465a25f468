"""The old name of minirad/tiers/hiradix_cache.py, for code that has it."""

import sys

from minirad.tiers import hiradix_cache

sys.modules[__name__] = hiradix_cache
