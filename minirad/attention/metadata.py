"""What attention must know about one batch, worked out once, before the first layer runs.

A batch is a list of entries; each says "tokens [start, stop) of this row are computed now". Prefill
(start = 0), a chunk or a prompt with a cached prefix (start > 0), and decode (stop = start + 1) are
the same thing with different numbers, so they mix freely. Everything here is index arithmetic on
the host's request rows; this module does not touch keys, values or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """Tokens `[start, stop)` of request row `row` are computed in this batch.

    Keys and values of `[0, start)` already lie in the pool; after the batch those of `[0, stop)`
    do.
    """

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One batch of B entries and T tokens in all. Tensors lie on the device, arrays on the host.

    Attributes:
        entries: the batch, in order; tokens follow each other in that order.
        page_size: slots of a page.
        num_tokens: T.
        positions: int64 `[T]`, each token's position in its request.
        out_slots: int64 `[T]`, where each token's K and V are written.
        q_indptr: int32 `[B + 1]`; entry b has tokens `q_indptr[b]:q_indptr[b + 1]`.
        kv_lens: int32 `[B]`, tokens that can be attended to after the batch (= stop).
        page_table: int32 `[B, max_pages]`; token i of entry b lies in slot
            `page_table[b, i // page_size] * page_size + i % page_size`. Unused places hold page 0.
        kv_indptr: int32 `[B + 1]`; entry b's pages are `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
        kv_indices: int32 `[sum of pages]`, page numbers (FlashInfer's convention).
        last_page_len: int32 `[B]`, used slots of each entry's last page, 1 to page_size.
    """

    entries: tuple[BatchEntry, ...]
    page_size: int
    num_tokens: int
    positions: Tensor
    out_slots: Tensor
    q_indptr: Int32Array
    kv_lens: Int32Array
    page_table: Int32Array
    kv_indptr: Int32Array
    kv_indices: Tensor
    last_page_len: Int32Array


def build_metadata(
    rows: Int64Array, entries: Sequence[BatchEntry], page_size: int, device: torch.device | str
) -> AttentionMetadata:
    """Work out a batch's metadata from the request rows.

    Args:
        rows: int64 `[max_rows, max_context]`; `rows[r, i]` is the slot of token i. Pages are
            contiguous: `rows[r, i] % page_size == i % page_size`.
        entries: the batch; the slots of `[0, stop)` of each are already in `rows`.
        page_size: slots of a page.
        device: where the tensors go.

    Raises:
        ValueError: if the batch is empty, or an entry is empty or outside the table.
    """
    _check(rows, entries, page_size)
    row_ids = np.array([e.row for e in entries], dtype=np.int64)
    starts = np.array([e.start for e in entries], dtype=np.int64)
    stops = np.array([e.stop for e in entries], dtype=np.int64)
    lengths = stops - starts
    q_indptr = _indptr(lengths)
    num_tokens = int(q_indptr[-1])

    # token t of the batch is token t - (its entry's first t) + start of its row
    positions = np.arange(num_tokens) - np.repeat(q_indptr[:-1] - starts, lengths)
    out_slots = rows[np.repeat(row_ids, lengths), positions]

    num_pages = -(-stops // page_size)
    first_tokens = np.arange(int(num_pages.max())) * page_size
    page_table = (rows[row_ids[:, None], first_tokens] // page_size).astype(np.int32)
    used = np.arange(page_table.shape[1]) < num_pages[:, None]
    page_table[~used] = 0

    return AttentionMetadata(
        entries=tuple(entries),
        page_size=page_size,
        num_tokens=num_tokens,
        positions=torch.from_numpy(positions).to(device),
        out_slots=torch.from_numpy(out_slots).to(device),
        q_indptr=q_indptr,
        kv_lens=stops.astype(np.int32),
        page_table=page_table,
        kv_indptr=_indptr(num_pages),
        kv_indices=torch.from_numpy(page_table[used]).to(device),
        last_page_len=(stops - (num_pages - 1) * page_size).astype(np.int32),
    )


def _indptr(lengths: Int64Array) -> Int32Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _check(rows: Int64Array, entries: Sequence[BatchEntry], page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, but must be at least 1")
    if not entries:
        raise ValueError("a batch needs at least one entry, got none")
    max_rows, max_context = rows.shape
    for e in entries:
        if not 0 <= e.row < max_rows:
            raise ValueError(f"{e}: the row is outside the table of {max_rows} rows")
        if not 0 <= e.start < e.stop:
            raise ValueError(f"{e}: needs 0 <= start < stop (at least one token is computed)")
        if e.stop > max_context:
            raise ValueError(f"{e}: stop is beyond the table's {max_context} tokens per row")
