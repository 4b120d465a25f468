"""Where KV lies: the pool of key/value slots, in tensors."""

from __future__ import annotations

from minirad.kv.kv_pool import KVPool

__all__ = ["KVPool"]
