"""Cascade attention for decoding: what all requests of a batch share is read once, not once per request.

A batch below one node of the tree has its first pages in common. Ordinary decoding reads them again for
every request; here all queries meet them in one kernel, as if they were one long prompt's (matrix products
instead of many passes over memory), and each request goes on from that answer with its own pages in
another. `SharedPages` says how many pages that is, `GraphCascade` computes. It is worth its further kernels a
layer only where much is shared: `worth_it` holds what was measured.

Does not look for several groups within a batch that share different beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minirad.attention.flashinfer import layer_pages
from minirad.attention.metadata import AttentionMetadata
from minirad.kv.kv_pool import KVPool
from minirad.schedule.req_to_token import ReqToTokenPool

if TYPE_CHECKING:
    from minirad.attention.small_decode import SmallDecode

__all__ = ["LEAST_REQUESTS", "GraphCascade", "SharedPages", "worth_it"]

# Tokens that need not be read again: for fewer, the two further kernels a layer cost more than they save.
# On an H100 with Llama 3.2 1B it was even at about 130,000 (256 requests x 512, 128 x 1,024, 64 x 2,000).
LEAST_SAVED = 1 << 17
LEAST_REQUESTS = 8  # and even if asked for, not for fewer
SCANNED = 128  # pages that are compared at a time


def worth_it(requests: int, shared: int) -> bool:
    """Whether reading `shared` tokens once instead of `requests` times is faster (measured on an H100)."""
    return requests >= LEAST_REQUESTS and (requests - 1) * shared >= LEAST_SAVED


class SharedPages:
    """How many first pages the rows of a batch have in common; kept from step to step.

    Only pages before each row's last token count, so that every request keeps a page of its own. Rows that
    were given out or rewritten have to be named with `forget`.
    """

    def __init__(self, rows: ReqToTokenPool, page_size: int) -> None:
        self._table, self._page = rows.rows, page_size
        self._known: set[int] = set()  # rows that agree on the first `_count` pages
        self._count = 0

    def forget(self, rows: Sequence[int]) -> None:
        """The slots in these rows have changed."""
        self._known.difference_update(rows)

    def count(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Pages that all these rows share; lengths: tokens of each, its newest included."""
        now, limit = set(rows), (min(lengths) - 1) // self._page
        fresh = now - self._known
        much = worth_it(len(now), self._count * self._page)
        if fresh and much and len(fresh) < len(now):
            one = next(iter(now - fresh))
            self._count = self._agree([one, *fresh], min(limit, self._count))
        elif fresh or (len(now) < len(self._known) and not much):
            # Without those who have gone it may be more. Where it is much already, that is left alone.
            self._count = self._agree(list(now), limit)
        self._known = now
        return min(self._count, limit)

    def _agree(self, rows: list[int], limit: int) -> int:
        """The first pages, up to `limit`, that are equal in all rows."""
        for begin in range(0, limit, SCANNED):
            end = min(begin + SCANNED, limit)
            slots = self._table[rows, begin * self._page : end * self._page : self._page]
            equal = (slots == slots[0]).all(axis=0)
            if not equal.all():
                return begin + int(equal.argmin())
        return limit


@dataclass(slots=True, eq=False)
class GraphCascade:
    """An `AttentionBackend` for captured decode steps whose requests share their first pages.

    own: attention to each request's own pages; only they are listed. wrapper: FlashInfer's prefill wrapper
    in graph mode, for one entry of as many queries as requests. pages: int32 on the device, the buffer that
    it reads the shared pages from.
    """

    own: SmallDecode
    wrapper: Any
    pages: Tensor
    size: int
    page_size: int = 1
    planned: int = 0

    @property
    def name(self) -> str:
        return "flashinfer"

    @property
    def reads_pool_only(self) -> bool:
        return True

    def plan_shared(self, pages: Tensor, page_size: int, pool: KVPool) -> None:
        """Once per step, before `plan_step`: the shared pages, int32 `[n]` on the device."""
        count = len(pages)
        self.pages[:count].copy_(pages)
        if count == self.planned:
            return
        own, self.planned = self.own, count
        self.wrapper.plan(
            _int32(0, self.size), _int32(0, count), self.pages[:count], _int32(page_size), own.num_heads,
            own.num_kv_heads, own.head_dim, page_size, causal=False, sm_scale=own.scale,
            q_data_type=pool.dtype, kv_data_type=pool.dtype,
        )  # fmt: skip

    def plan_step(
        self, indptr: Tensor, last_page_len: Tensor, kv_lens: Tensor, page_size: int, pool: KVPool
    ) -> None:
        """As SmallDecode's; the lists are of own pages only."""
        self.page_size = page_size
        self.own.plan_step(indptr, last_page_len, kv_lens, page_size, pool)

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        raise ValueError("a captured step is planned by plan_shared and plan_step")

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        raise ValueError("in a captured step the rotation writes keys and values")

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        cache = layer_pages(pool, layer_id, self.page_size)
        # Given a place for its answers, FlashInfer does not fill it with zeros first.
        shared = self.wrapper.run(q, cache, out=torch.empty_like(q), return_lse=True)
        return self.own.go_on(layer_id, q, pool, scale, shared)


def _int32(*numbers: int) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int32))
