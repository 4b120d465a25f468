"""Lesson 05 solved otherwise: loops over queries and heads, Python lists, one softmax of two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minirad.cache.radix_cache import RadixCache, RadixKey


def gather_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Sequence[int],
    kv_len: int,
    page_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    slots = [int(pages[i // page_size]) * page_size + i % page_size for i in range(kv_len)]
    group = q.shape[1] // k_pool.shape[1]
    for t in range(q.shape[0]):
        seen = slots[: kv_len - q.shape[0] + t + 1]
        for h in range(q.shape[1]):
            scores = k_pool[seen, h // group] @ q[t, h] * scale
            out[t, h] = scores.softmax(0) @ v_pool[seen, h // group]
            lse[t, h] = scores.logsumexp(0)
    return out, lse


def ragged_pages(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    indptr, indices, last = [0], [], []
    for row, length in zip(row_ids, lengths, strict=True):
        for first in range(0, length, page_size):
            indices.append(int(rows[row][first]) // page_size)
        indptr.append(len(indices))
        last.append((length - 1) % page_size + 1)
    return np.array(indptr, np.int32), np.array(indices, np.int32), np.array(last, np.int32)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack((lse_a, lse_b))
    weights = both.softmax(0)
    return (weights.unsqueeze(-1) * torch.stack((out_a, out_b))).sum(0), both.logsumexp(0)


def claim_of_the_tail() -> dict[str, int | bool]:
    cache, first = RadixCache(page_size=16), list(range(40))
    cache.insert(RadixKey(first), first)
    used = cache.peek(RadixKey([*first[:20], *range(100, 120)]))
    return {
        "tokens_from_cache": used,
        "pages_from_cache": used // 16,
        "tokens_computed": 40 - used,
        "pages_of_its_own": -(-40 // 16) - used // 16,
        "claim_holds": used == 20,
    }
