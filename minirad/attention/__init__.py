"""How tokens attend: the batch's metadata, the RadixAttention layer, and the backends behind it."""

from __future__ import annotations

from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import AttentionMetadata, BatchEntry, build_metadata
from minirad.attention.radix_attention import AttentionBackend, RadixAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "BatchEntry",
    "GatherAttention",
    "RadixAttention",
    "build_metadata",
]
