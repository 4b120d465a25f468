"""Paged attention, to be read: gather each request's keys and values through its page table, then attend.

Lesson 05 asks for this. Requests are computed one after another, and what they share is read by each of them:
fast/paged.py and fast/flashinfer.py give the same answers sooner.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.kv.kv_pool import KVPool


class GatherAttention:
    """An `AttentionBackend` of one gather, two matrix products, a causal mask and a softmax per request."""

    name = "gather"

    def __init__(self) -> None:
        self._slots: list[Tensor] = []  # of each request: its tokens' slots
        self._spans = [0]  # where its queries begin, and the end of all

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Looks the slots of each request's tokens up in its page table; they serve all layers."""
        size, table = metadata.page_size, torch.from_numpy(metadata.page_table).long()
        positions = [torch.arange(kv_len) for kv_len in metadata.kv_lens.tolist()]
        slots = [pages[at // size] * size + at % size for pages, at in zip(table, positions, strict=True)]
        self._slots = [each.to(pool.device) for each in slots]
        self._spans = metadata.q_indptr.tolist()

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Stores k and v `[T, num_kv_heads, head_dim]` of one layer at the batch's slots."""
        pool.write(layer_id, metadata.out_slots, k, v)

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attends in one layer: q `[T, num_heads, head_dim]` gives the same shape."""
        if len(q) != self._spans[-1]:
            raise ValueError(f"run: {len(q)} queries, but {self._spans[-1]} were planned")
        group = q.shape[1] // pool.num_kv_heads  # query heads that share a kv head
        out = torch.empty_like(q)
        for slots, (start, stop) in zip(self._slots, pairwise(self._spans), strict=True):
            k = pool.k[layer_id][slots].repeat_interleave(group, dim=1)
            v = pool.v[layer_id][slots].repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,shd->hts", q[start:stop], k).float() * scale
            later = torch.ones_like(scores[0], dtype=torch.bool).triu(len(slots) - (stop - start) + 1)
            weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
            out[start:stop] = torch.einsum("hts,shd->thd", weights.to(v.dtype), v)
        return out
