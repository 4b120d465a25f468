"""A radix tree that keeps to itself a part of what it has: hit rate as a dial, all else as it is.

The SGLang paper's Figure 8 (a, b) plots speed over the hit rate "by partially disabling matched tokens at
runtime". So here: of each match the first `kept` of its tokens are given, the rest is computed again. What
was computed twice is freed when it is committed, as any duplicate (schedule/cache_manager.py).
"""

from __future__ import annotations

from typing import Any

from minirad.cache.prefix_cache import Prefix
from minirad.cache.radix_cache import MatchResult, RadixCache, RadixKey
from minirad.config import share


class PartialCache(RadixCache):
    """kept: which share of each match is given, 0 to 1, whole pages of it; may be changed while it runs.

    Nothing else differs: all is inserted, locked and evicted as in a RadixCache.
    """

    def __init__(self, kept: float, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.kept = kept

    @property
    def kept(self) -> float:
        return self._kept

    @kept.setter
    def kept(self, kept: float) -> None:
        share("kept", kept)
        self._kept = float(kept)
        self._changes += 1  # a look from before does not hold any more

    def find(self, key: RadixKey, found: Prefix | None = None) -> Prefix:
        """What is given of a key's match. A look is never used again: it is of the part, not of the key."""
        return super().find(self._part(key))

    def peek(self, key: RadixKey) -> int:
        return self.find(key).length

    def match_prefix(
        self, key: RadixKey, *, count_hit: bool = True, found: Prefix | None = None
    ) -> MatchResult:
        return super().match_prefix(self._part(key), count_hit=count_hit)

    def _part(self, key: RadixKey) -> RadixKey:
        """The beginning of a key that its match is cut down to."""
        matched = super().find(key).length
        units = int(matched * self._kept + 1e-9) // self.page_size * self.page_size  # 0.7 x 10 is 7
        return RadixKey._from_bytes(key.data[: units * key.width], key.namespace, key.width)
