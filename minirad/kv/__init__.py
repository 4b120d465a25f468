"""Where KV lies: the pool of key/value slots and the device's copy of the request rows."""

from __future__ import annotations

from minirad.kv.device_rows import DeviceRows
from minirad.kv.kv_pool import KVPool

__all__ = ["DeviceRows", "KVPool"]
