"""The tree of an engine with more than one tier; machine.py finds this by name."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

from minirad.config import AdapterKey, EngineConfig
from minirad.errors import expanded
from minirad.kv.kv_pool import KVPool
from minirad.tiers.disk import DiskTier
from minirad.tiers.disk_cache import DiskCache
from minirad.tiers.disk_names import Layout, block_units, namespace_digest, weights_digest
from minirad.tiers.hiradix_cache import HiRadixCache
from minirad.tiers.host_tier import HostTier


def choose_cache(config: EngineConfig, pool: KVPool, runner: Any) -> HiRadixCache:
    """A tree whose second tier is `config.host_kv_tokens` slots of host memory, and perhaps a disk below.

    runner: says which weights compute, now and when it is asked again.

    Raises:
        ValueError: if there is not that much memory, or no such folder.
    """
    size = config.page_size, config.eviction_policy
    more: dict[str, Any] = {
        "host_tokens": config.host_kv_tokens, "host_write": config.host_write,
        "copier": HostTier(pool, config), "load_back_threshold": config.load_back_threshold,
    }  # fmt: skip
    if config.disk_dir is None:
        return HiRadixCache(*size, **more)
    shape = block_units(config.page_size), pool.num_layers, 2, pool.num_kv_heads, pool.head_dim
    disk = DiskTier(
        expanded(config.disk_dir), config.disk_mb * 1_000_000,
        Layout(shape, pool.dtype, bool(config.bigram_keys)),
    )  # fmt: skip
    weights = Weights(runner, pool)
    return DiskCache(*size, disk=disk, weights=weights.digest, namespace_digest=weights.namespace, **more)


class Weights:
    """What KV depends on beside tokens, as other processes see it: weights of model, head, adapters."""

    def __init__(self, runner: Any, pool: KVPool) -> None:
        self._runner, self._layers = runner, pool.num_layers

    def digest(self) -> bytes:
        """Of all weights that write into the pool; reads each of them."""
        model, head = self._runner.model, getattr(getattr(self._runner, "drafter", None), "head", None)
        heads = () if head is None else (head,)
        if len(model.layers) + len(heads) != self._layers:
            raise ValueError(f"{len(model.layers)} layers and {len(heads)} heads, a pool of {self._layers}")
        return weights_digest(model, *heads)

    def namespace(self, extra_key: Hashable) -> bytes | None:
        """As disk_names.namespace_digest; of an adapter's namespace by its weights, whatever its name."""
        if not isinstance(extra_key, AdapterKey):
            return namespace_digest(extra_key)
        adapter = self._runner.model.adapters[extra_key.adapter]
        inner = namespace_digest(extra_key.extra_key)
        if inner is None:
            return None
        return hashlib.sha256(f"adapter {adapter.digest} ".encode() + inner).digest()
