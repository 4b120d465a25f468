"""Lesson 05, solved. In the engine: attention/gather.py, attention/metadata.py; `merge` in fast/paged.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def gather_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Sequence[int],
    kv_len: int,
    page_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one request whose keys and values lie in scattered pages."""
    tokens, heads = q.shape[:2]
    position = torch.arange(kv_len)
    slots = torch.as_tensor(pages)[position // page_size] * page_size + position % page_size
    group = heads // k_pool.shape[1]
    k = k_pool[slots].repeat_interleave(group, dim=1)
    v = v_pool[slots].repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->ths", q, k) * scale
    asking = torch.arange(kv_len - tokens, kv_len)
    scores = scores.masked_fill((position > asking[:, None])[:, None, :], float("-inf"))
    return torch.einsum("ths,shd->thd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)


def ragged_pages(
    rows: npt.NDArray[np.int64], row_ids: Sequence[int], lengths: Sequence[int], page_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The page table without padding, as FlashInfer wants it."""
    length = np.asarray(lengths)
    count = -(-length // page_size)
    indptr = np.concatenate(([0], np.cumsum(count)))
    lines = [rows[row, :stop:page_size] // page_size for row, stop in zip(row_ids, lengths, strict=True)]
    last = length - (count - 1) * page_size
    return indptr.astype(np.int32), np.concatenate(lines).astype(np.int32), last.astype(np.int32)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two results of attention over different keys into the one over all keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = (lse_a - lse).exp().unsqueeze(-1)
    weight_b = (lse_b - lse).exp().unsqueeze(-1)
    return weight_a * out_a + weight_b * out_b, lse


def claim_of_the_tail() -> dict[str, int | bool]:
    """A published claim, and what the engine says."""
    used = 20 // 16 * 16
    return {
        "tokens_from_cache": used,
        "pages_from_cache": used // 16,
        "tokens_computed": 40 - used,
        "pages_of_its_own": 2,
        "claim_holds": False,
    }
