"""Paged attention in plain torch: any mix of prefill, chunks and decode, on any device.

Every batch is cut into *parts*. A part is a set of queries and the keys that they all may look at,
given as index tensors; its result is a softmax over those keys only. Two such results over
different keys of the same query merge exactly, given the log of each one's sum of exponentials
(lse), so the order of parts is free:

- *shared* parts: where several entries' page tables begin with the same pages, all their queries
  meet those keys in one matrix product, read once instead of once per request. The tree is not
  asked: equal page numbers are proof enough that the keys are the same.
- *own* parts: what is left of each entry, batched with entries of similar size and padded.

Padding reads slot 0 and is masked. Masking alone would not do (0 * NaN = NaN): slots that are not
the request's own are never gathered at all. This module is not the fast path of a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.kv.kv_pool import KVPool

__all__ = ["SharedSegment", "TorchPagedAttention", "shared_segments"]

Int64Array = npt.NDArray[np.int64]

# A shared part costs a few small kernels per layer; it must save this many key reads to pay.
MIN_SAVED_KEYS = 128
# Most scores of one query head that a part may hold. Longer runs of queries are cut: the scores
# stay in a processor's cache, and early queries skip the keys that only later ones see.
MAX_SCORES = 1 << 16
# But each cut gathers its keys again, so it must serve at least this many queries.
MIN_QUERIES = 64


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Entries (indices into the batch) whose page tables agree on pages `[begin, end)`."""

    entries: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class _Part:
    """Queries against keys, as index tensors; P problems of n queries and L keys each.

    Padding queries repeat a real one (`q_index`) and answer into a row that is thrown away (`out_index`).
    """

    q_index: Tensor  # [P, n]
    out_index: Tensor  # [P, n]
    slots: Tensor  # [P, L]
    run: slice | None  # the slots as a range, where P is 1 and they follow each other: nothing to gather
    hidden: Tensor | None  # bool [P, 1, 1, n, L]: keys that a query must not see
    whole: bool  # its queries are the batch's, each once and in their order
    mask: Tensor | None = None  # `hidden` as the kernel of a CPU wants it, once a layer has asked for it


class TorchPagedAttention:
    """An `AttentionBackend` made of gathers, matrix products and softmax."""

    name = "torch"
    reads_pool_only = True

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._num_tokens = 0

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Cut the batch into parts; the index tensors serve all layers."""
        segments = shared_segments(metadata)
        own_begin = np.zeros(len(metadata.entries), dtype=np.int64)
        for segment in segments:  # outer segments come first, so the innermost end stays
            own_begin[list(segment.entries)] = segment.end * metadata.page_size
        planner = _Planner(metadata, pool)
        self._parts = []
        for segment in segments:
            self._parts += planner.shared(segment)
        for ids in _buckets(metadata, own_begin):
            self._parts += planner.own(ids, own_begin)
        self._num_tokens = metadata.num_tokens

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Store k and v `[T, num_kv_heads, head_dim]` of one layer at the batch's slots."""
        pool.write(layer_id, metadata.out_slots, k, v)

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend in one layer: q `[T, num_heads, head_dim]` gives the same shape."""
        if q.shape[0] != self._num_tokens:
            raise ValueError(f"run: {q.shape[0]} queries, but {self._num_tokens} were planned")
        keys, values = pool.k[layer_id], pool.v[layer_id]
        answers = (_attend(part, q, keys, values, scale) for part in self._parts)
        if all(part.whole for part in self._parts):
            out, lse = next(answers)
            for answer in answers:
                out, lse = _merged(out, lse, *answer)
        else:
            out, lse = _nothing(q)
            for part, answer in zip(self._parts, answers, strict=True):
                _merge(out, lse, part.out_index.flatten(), *answer)
        return out[: self._num_tokens].to(q.dtype)


_Answer = tuple[Tensor, Tensor]
"""out `[N, num_heads, head_dim]` and lse `[N, num_heads]`, both float32."""


def _attend(part: _Part, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> _Answer:
    """Softmax attention of a part's queries over its keys, for N = P * n.

    Args:
        q: `[T, num_heads, head_dim]`.
        keys, values: `[num_slots, num_kv_heads, head_dim]`.
    """
    (problems, n), (kv_heads, head_dim) = part.q_index.shape, keys.shape[1:]
    group = q.shape[1] // kv_heads  # query heads of one kv head: more queries, not copied keys

    def of_part(x: Tensor) -> Tensor:
        x = x.index_select(0, part.slots.flatten()) if part.run is None else x[part.run]
        return x.view(problems, -1, kv_heads, head_dim).transpose(1, 2)

    q = q if part.whole else q.index_select(0, part.q_index.flatten())
    q = q.view(problems, n, kv_heads, group, head_dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(problems, kv_heads, group * n, head_dim)
    softmax = _cpu_softmax if _on_cpu(q) else _softmax
    out, lse = softmax(part, q, of_part(keys), of_part(values), scale)
    out = out.view(problems, kv_heads, group, n, head_dim).permute(0, 3, 1, 2, 4)
    lse = lse.reshape(problems, kv_heads, group, n).permute(0, 3, 1, 2)
    heads = kv_heads * group
    return out.reshape(problems * n, heads, head_dim), lse.reshape(problems * n, heads)


def _softmax(part: _Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Answer:
    """q `[P, num_kv_heads, group * n, head_dim]`, k and v `[P, num_kv_heads, L, head_dim]`."""
    scores = ((q * scale) @ k.mT).float()
    if part.hidden is not None:
        n = part.q_index.shape[1]
        scores.view(*q.shape[:2], -1, n, k.shape[2]).masked_fill_(part.hidden, float("-inf"))
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.to(v.dtype) @ v).float() / total
    return out, (highest + total.log()).squeeze(-1)


def _cpu_softmax(part: _Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Answer:
    """The same in one call."""
    if part.hidden is not None and part.mask is None:  # float32 [P, 1, group * n, L], 0 or -inf
        shape, (n, num_keys) = q.shape, part.hidden.shape[-2:]
        hidden = part.hidden.expand(-1, -1, shape[2] // n, -1, -1).reshape(len(q), 1, shape[2], num_keys)
        part.mask = q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    answer: _Answer = _CPU_KERNEL(q, k, v, attn_mask=part.mask, scale=scale)
    return answer


_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # the public one has no lse


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _nothing(q: Tensor) -> _Answer:
    """The answers of T queries that saw no key yet, and a row that takes those of padding queries."""
    shape = (len(q) + 1, *q.shape[1:])
    return q.new_zeros(shape, dtype=torch.float32), q.new_full(shape[:2], float("-inf"), dtype=torch.float32)


def _merged(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> _Answer:
    """Answers of the same queries over further keys, folded into one.

    Each side is a mean over its keys, weighted by exp(score); exp(lse) is the sum of those weights.
    """
    share = torch.sigmoid(lse - new_lse).unsqueeze(-1)  # exp(lse) / (exp(lse) + exp(new_lse))
    return torch.lerp(new_out, out, share), torch.logaddexp(lse, new_lse)


def _merge(out: Tensor, lse: Tensor, index: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """The same for rows `index` of out and lse, in place."""
    merged_out, merged_lse = _merged(out[index], lse[index], new_out, new_lse)
    out.index_copy_(0, index, merged_out)
    lse.index_copy_(0, index, merged_lse)


def shared_segments(metadata: AttentionMetadata) -> list[SharedSegment]:
    """Runs of pages that several entries share, read off the page table; outer runs come first.

    Only pages that lie wholly before an entry's first query count: all its queries see all of such
    a page, so no mask is needed. Segments of one entry follow each other without a gap from page 0.
    """
    table = metadata.page_table
    limits = [entry.start // metadata.page_size for entry in metadata.entries]
    segments: list[SharedSegment] = []

    def descend(ids: Sequence[int], begin: int, at: int) -> None:
        """`ids` agree on pages [begin, at), which no segment covers yet; look further."""
        branches: dict[int, list[int]] = defaultdict(list)
        for i in ids:
            if limits[i] > at:
                branches[int(table[i, at])].append(i)
        for branch in branches.values():
            if len(branch) == 1:
                continue
            end = min(limits[i] for i in branch)
            equal = (table[branch, at:end] == table[branch[0], at:end]).all(axis=0)
            end = at + int(equal.argmin()) if not equal.all() else end
            saved_keys = (len(branch) - 1) * (end - begin) * metadata.page_size
            if saved_keys >= MIN_SAVED_KEYS:
                segments.append(SharedSegment(tuple(branch), begin, end))
                descend(branch, end, end)
            else:  # too short for all of them; part of them may share more
                descend(branch, begin, end)

    descend(range(len(limits)), 0, 0)
    return segments


def _buckets(metadata: AttentionMetadata, own_begin: Int64Array) -> Iterator[list[int]]:
    """Entries of similar size: neither queries nor keys more than double within a bucket."""
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, entry in enumerate(metadata.entries):
        queries = entry.stop - entry.start
        keys = entry.stop - int(own_begin[i])
        buckets[(queries - 1).bit_length(), (keys - 1).bit_length()].append(i)
    yield from buckets.values()


class _Planner:
    """Turns segments and buckets of one batch into parts on the pool's device."""

    def __init__(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        self._meta = metadata
        self._pool = pool

    def shared(self, segment: SharedSegment) -> Iterator[_Part]:
        """All tokens of the segment's entries against its pages, nothing hidden."""
        indptr, size = self._meta.q_indptr, self._meta.page_size
        tokens = np.concatenate([np.arange(indptr[i], indptr[i + 1]) for i in segment.entries])
        positions = np.arange(segment.begin * size, segment.end * size)[None]
        slots = self._slots(np.array(segment.entries[:1]), positions)
        for queries in self._cut(len(tokens), slots):
            yield self._part(tokens[None, queries], tokens[None, queries], slots, None)

    def own(self, ids: Sequence[int], own_begin: Int64Array) -> Iterator[_Part]:
        """Each entry's tokens against its keys `[own_begin, stop)`, causal and padded."""
        meta, rows = self._meta, np.array(ids)
        first = meta.q_indptr[rows].astype(np.int64)
        count = meta.q_indptr[rows + 1] - first
        stop = meta.kv_lens[rows].astype(np.int64)

        column = np.arange(count.max())
        nth = np.minimum(column, count[:, None] - 1)  # padding repeats the entry's last query
        q_index = first[:, None] + nth
        out_index = np.where(column < count[:, None], q_index, meta.num_tokens)
        q_positions = (stop - count)[:, None] + nth

        k_positions = own_begin[rows][:, None] + np.arange((stop - own_begin[rows]).max())
        slots = self._slots(rows, k_positions)
        slots[k_positions >= stop[:, None]] = 0
        for queries in self._cut(len(column), slots):
            asking = q_positions[:, queries]
            seen = int((asking.max(axis=1) - own_begin[rows]).max()) + 1
            hidden = k_positions[:, None, :seen] > asking[:, :, None]
            yield self._part(q_index[:, queries], out_index[:, queries], slots[:, :seen], hidden)

    def _slots(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Slots `[P, L]` of the tokens at `positions` `[P, L]` of batch entries `rows` `[P]`."""
        table, size = self._meta.page_table, self._meta.page_size
        page = np.minimum(positions // size, table.shape[1] - 1)  # beyond the end: masked later
        slots: Int64Array = table[rows[:, None], page].astype(np.int64) * size + positions % size
        return slots

    def _cut(self, num_queries: int, slots: Int64Array) -> Iterator[slice]:
        step = max(MIN_QUERIES, MAX_SCORES // slots.size)
        return (slice(i, i + step) for i in range(0, num_queries, step))

    def _part(
        self,
        q_index: Int64Array,
        out_index: Int64Array,
        slots: Int64Array,
        hidden: npt.NDArray[np.bool_] | None,
    ) -> _Part:
        mask = None
        if hidden is not None and hidden.any():
            mask = self._tensor(hidden[:, None, None])
        every = np.arange(self._meta.num_tokens)
        follows = len(slots) == 1 and bool((np.diff(slots[0]) == 1).all())
        return _Part(
            self._tensor(q_index),
            self._tensor(out_index),
            self._tensor(slots),
            slice(int(slots[0, 0]), int(slots[0, -1]) + 1) if follows else None,
            mask,
            np.array_equal(q_index.ravel(), every) and np.array_equal(out_index.ravel(), every),
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.device)
