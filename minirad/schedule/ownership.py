"""The old name of minirad/schedule/cache_manager.py."""

from minirad.cache.prefix_cache import Prefix, PrefixCache, path_slots
from minirad.schedule.cache_manager import DUMMY, FREE, TREE, CacheManager

SlotOwnership = CacheManager

__all__ = ["DUMMY", "FREE", "TREE", "CacheManager", "Prefix", "PrefixCache", "SlotOwnership", "path_slots"]
