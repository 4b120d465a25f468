"""The tree of an engine with a host tier; machine.py finds this by name."""

from __future__ import annotations

from minirad.config import EngineConfig
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.tiers.hiradix_cache import HiRadixCache
from minirad.tiers.host_tier import HostTier


def choose_cache(config: EngineConfig, pool: KVPool, model: LlamaModel) -> HiRadixCache:
    """A tree whose second tier is `config.host_kv_tokens` slots of host memory."""
    return HiRadixCache(
        config.page_size, config.eviction_policy, host_tokens=config.host_kv_tokens,
        host_write=config.host_write, copier=HostTier(pool, config),
        load_back_threshold=config.load_back_threshold,
    )  # fmt: skip
