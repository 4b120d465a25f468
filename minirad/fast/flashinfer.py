"""Paged attention on an NVIDIA GPU: FlashInfer's kernels over the pool and page tables of every backend.

FlashInfer takes the pool as it lies (`[pages, page_size, kv_heads, head_dim]` is a view of a layer) and a
batch as three lists: where each entry's queries begin (`qo_indptr`), where its pages begin (`kv_indptr`),
and how full its last page is. `plan` hands these over once per batch and FlashInfer cuts the work into
pieces for the card's processors; `run` then is one kernel per layer. Which kernel:

- all entries have one token: the decode wrapper;
- anything else, chunks and decodes mixed: the prefill wrapper, causal;
- the same in *two parts*, on request: the new tokens among themselves (ragged, causal: their keys need
  not go through the pool), the cached prefix apart (paged, nothing hidden), and both merged by their
  logs of sums of exponentials. This is how a hit looks from below: the prefix part is all that the cache
  saved from being computed. One kernel is simpler and the default.

The package `flashinfer-python` is imported when a backend is made, and compiles its kernels at their
first use (about half a minute, kept in a cache on disk). This module does not choose slots and does not
run on a CPU; `what_is_missing` says why it cannot run somewhere.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.kv.kv_pool import KVPool

__all__ = ["FlashInferAttention", "what_is_missing", "workspace_bytes"]

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)  # what FlashInfer's kernel for writing to the pool is made for
OLDEST_GPU = (8, 0)  # compute capability: bfloat16 in the matrix units
# From this many query heads per kv head on, the matrix units are faster at decoding. It is also a must:
# the decode kernel without them knows the groups 1, 2, 3, 4 and 8 only.
TENSOR_CORES_FROM_GROUP = 4
# "auto" would take fa3 on Hopper, which compiles for a minute longer (bench/LOG.md).
KERNELS = "fa2"
# Captured steps whose longest request has no more tokens than this: short_decode.py is faster (bench/LOG.md).
FEW_REQUESTS = 16
SHORT_IF_FEW, SHORT_IF_MANY = 2048, 4096
MIB = 1 << 20

Int32Array = npt.NDArray[np.int32]


class FlashInferAttention:
    """An `AttentionBackend` made of FlashInfer's batch wrappers.

    Args:
        num_heads, num_kv_heads, head_dim: the model's shape. FlashInfer plans with it.
        device: where the pool lies. The workspace is allocated there at once.
        scale: the factor of q.k before the softmax; None is `head_dim ** -0.5`.
        two_part: attend to new tokens and to the cached prefix apart, and merge.
        kernels: the module `flashinfer`; tests pass a stand-in.
    """

    name = "flashinfer"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str,
        scale: float | None = None,
        two_part: bool = False,
        kernels: Any = None,
    ) -> None:
        self._kernels = fi = import_module("flashinfer") if kernels is None else kernels
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self.two_part = two_part
        self.tensor_cores = num_heads // num_kv_heads >= TENSOR_CORES_FROM_GROUP
        # One for all wrappers: they run one after another. FlashInfer wants it zeroed before its first use.
        size = workspace_bytes(num_heads, num_kv_heads, head_dim, torch.device(device))
        self._work = work = torch.zeros(size, dtype=torch.uint8, device=device)
        self._decode = fi.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", use_tensor_cores=self.tensor_cores, backend=KERNELS
        )
        self._paged = fi.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend=KERNELS)
        self._ragged = (
            fi.BatchPrefillWithRaggedKVCacheWrapper(work, "NHD", backend=KERNELS) if two_part else None
        )
        self._batch: AttentionMetadata | None = None
        self._targets: _Targets | None = None
        self._prefixed: Tensor | None = None  # two parts: the queries with a cached prefix, by index
        self._fresh: tuple[Tensor, Tensor] | None = None  # two parts: this layer's new k and v

    @property
    def reads_pool_only(self) -> bool:
        return not self.two_part

    # ------------------------------------------------------------ once per batch

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Hand the batch's lists to FlashInfer; they serve all layers.

        Raises:
            ValueError: if the pool is of another shape than the model that this backend was made for,
                or does not hold whole pages.
        """
        self._check_pool(metadata, pool)
        self._batch, self._fresh = metadata, None
        self._targets = _Targets.of(metadata, pool.device)
        own = _Pages(metadata.kv_indptr, metadata.kv_indices, metadata.last_page_len)
        if metadata.is_decode_only:
            self._decode.plan(
                _host(own.indptr), own.indices, _host(own.last_page_len),
                self._heads, self._kv_heads, self._head_dim, metadata.page_size, **self._types(pool),
            )  # fmt: skip
        elif self._ragged is None:
            self._plan_paged(metadata.q_indptr, own, metadata.page_size, pool, causal=True)
        else:
            self._plan_two_parts(metadata, pool)

    def _plan_paged(
        self, q_indptr: Int32Array, pages: _Pages, page_size: int, pool: KVPool, causal: bool
    ) -> None:
        self._paged.plan(
            _host(q_indptr), _host(pages.indptr), pages.indices, _host(pages.last_page_len),
            self._heads, self._kv_heads, self._head_dim, page_size, causal=causal, **self._types(pool),
        )  # fmt: skip

    def _plan_two_parts(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """New tokens among themselves; and, for those entries that have one, the prefix before them."""
        assert self._ragged is not None
        q_indptr = metadata.q_indptr
        self._ragged.plan(
            _host(q_indptr), _host(q_indptr), self._heads, self._kv_heads, self._head_dim,
            causal=True, **self._types(pool),
        )  # fmt: skip
        starts = np.array([entry.start for entry in metadata.entries], dtype=np.int32)
        old = np.flatnonzero(starts)  # an entry without keys has no softmax: it is left out
        self._prefixed = None
        if len(old):
            lengths = np.diff(q_indptr)
            tokens = np.arange(metadata.num_tokens)[np.repeat(starts > 0, lengths)]
            self._prefixed = torch.from_numpy(tokens).to(pool.device)
            pages = _prefix_pages(metadata, old, starts[old], pool.device)
            self._plan_paged(_indptr(lengths[old]), pages, metadata.page_size, pool, causal=False)

    def _types(self, pool: KVPool) -> dict[str, Any]:
        # The scale goes here, not to `run`: the ragged wrapper's `run` takes a q_scale and ignores it.
        return {"q_data_type": pool.dtype, "kv_data_type": pool.dtype, "sm_scale": self._scale}

    def _check_pool(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        if (pool.num_kv_heads, pool.head_dim) != (self._kv_heads, self._head_dim):
            raise ValueError(
                f"plan: the pool has {pool.num_kv_heads} kv heads of {pool.head_dim}, "
                f"the model {self._kv_heads} of {self._head_dim}"
            )
        if pool.num_slots % metadata.page_size:
            raise ValueError(
                f"plan: {pool.num_slots} slots of the pool are not whole pages of {metadata.page_size}"
            )

    @property
    def heads(self) -> tuple[int, int, int, float]:
        """Query heads, kv heads, head_dim, and the factor of q.k before the softmax."""
        return self._heads, self._kv_heads, self._head_dim, self._scale

    @property
    def has_short_kernels(self) -> bool:
        """Whether such heads are what short_decode.py and cascade_decode.py are made for."""
        return self._heads // self._kv_heads <= 16 and self._head_dim in HEAD_DIMS

    def is_short(self, requests: int, longest: int) -> bool:
        """Whether a captured step of so many requests, the longest of so many tokens, is better off with
        short_decode.py."""
        limit = SHORT_IF_FEW if requests <= FEW_REQUESTS else SHORT_IF_MANY
        return self.has_short_kernels and longest <= limit

    def graph_decode(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> GraphDecode:
        """Attention of decoding requests for a CUDA graph, which reads their pages from these buffers."""
        wrapper = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._work, "NHD", use_cuda_graph=True, use_tensor_cores=self.tensor_cores,
            paged_kv_indptr_buffer=indptr, paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend=KERNELS,
        )  # fmt: skip
        return GraphDecode(wrapper, *self.heads)

    # ------------------------------------------------------------ once per layer

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Store the planned batch's keys and values `[T, num_kv_heads, head_dim]` of one layer."""
        if metadata is not self._batch or self._targets is None:
            raise ValueError("write: this batch was not planned")
        to = self._targets
        self._kernels.append_paged_kv_cache(
            k, v, to.entry, to.position, _layer(pool, layer_id, metadata.page_size),
            metadata.kv_indices, to.kv_indptr, to.last_page_len, kv_layout="NHD",
        )  # fmt: skip
        if self.two_part:
            self._fresh = k, v

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend in one layer: q `[T, num_heads, head_dim]` gives the same shape."""
        planned = self._batch.num_tokens if self._batch is not None else 0
        if self._batch is None or q.shape[0] != planned:
            raise ValueError(f"run: {q.shape[0]} queries, but {planned} were planned")
        if scale != self._scale:
            raise ValueError(f"run: the scale is {scale}, but {self._scale} was planned")
        cache = _layer(pool, layer_id, self._batch.page_size)
        out: Tensor
        if self._batch.is_decode_only:
            out = self._decode.run(q, cache)
        elif self._ragged is None:
            out = self._paged.run(q, cache)
        else:
            out = self._run_two_parts(q, cache)
        return out

    def _run_two_parts(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        if self._fresh is None:
            raise ValueError("run: in two parts, this layer's keys and values must be written before")
        (k, v), self._fresh = self._fresh, None
        assert self._ragged is not None
        out: Tensor
        out, lse = self._ragged.run(q, k, v, return_lse=True)
        old = self._prefixed
        if old is None:
            return out
        before, before_lse = self._paged.run(q.index_select(0, old), cache, return_lse=True)
        merged, _ = self._kernels.merge_state(
            out.index_select(0, old), lse.index_select(0, old), before, before_lse
        )
        return out.index_copy_(0, old, merged)


class StepAttention(AttentionBackend, Protocol):
    """Attention of captured decode steps."""

    def plan_step(
        self, indptr: Tensor, last_page_len: Tensor, kv_lens: Tensor, page_size: int, pool: KVPool
    ) -> None:
        """Once per step, outside the graph. The lists are those of the host; the device has them already."""
        ...


@dataclass(slots=True, eq=False)
class GraphDecode:
    """An `AttentionBackend` for the captured decode steps of one batch size; see FlashInferAttention."""

    wrapper: Any
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    page_size: int = 1
    planned: bool = False

    @property
    def name(self) -> str:
        return "flashinfer"

    @property
    def reads_pool_only(self) -> bool:
        return True

    def plan_step(
        self, indptr: Tensor, last_page_len: Tensor, kv_lens: Tensor, page_size: int, pool: KVPool
    ) -> None:
        """Once per step, outside the graph. The lists are those of the host; the device has them already."""
        wrapper = self.wrapper
        again = self.planned and wrapper.use_tensor_cores and hasattr(wrapper, "_cached_module")
        self.page_size, self.planned = page_size, True
        if not again:
            wrapper.plan(
                indptr, wrapper._paged_kv_indices_buf[: int(indptr[-1])], last_page_len, self.heads,
                self.kv_heads, self.head_dim, page_size, q_data_type=pool.dtype, kv_data_type=pool.dtype,
                sm_scale=self.scale,
            )  # fmt: skip
            return
        # The same once more, without what does not change: `plan` copies the lists to the device, where they
        # are, and asks Python for the longest of them, which takes a millisecond for 256 requests.
        size = len(last_page_len)
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer, torch.arange(size + 1, dtype=torch.int32), indptr,
            kv_lens, size, size, self.heads, self.kv_heads, page_size, True, self.head_dim, self.head_dim,
            False, -1, -1, False, 0,
        )  # fmt: skip

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        raise ValueError("a captured step is planned by plan_step")

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        raise ValueError("in a captured step the rotation writes keys and values")

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        out: Tensor = self.wrapper.run(q, _layer(pool, layer_id, self.page_size))
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """The pages of B entries; see AttentionMetadata. `indices` lie on the device."""

    indptr: Int32Array  # [B + 1]
    indices: Tensor  # [sum of pages]
    last_page_len: Int32Array  # [B]


@dataclass(frozen=True, slots=True, eq=False)
class _Targets:
    """Where T new tokens of B entries go, as int32 tensors on the device."""

    entry: Tensor  # [T], which entry of the batch a token belongs to
    position: Tensor  # [T], its position there
    kv_indptr: Tensor  # [B + 1]
    last_page_len: Tensor  # [B]

    @classmethod
    def of(cls, metadata: AttentionMetadata, device: torch.device) -> _Targets:
        # FlashInfer has a kernel for the first two (get_batch_indices_positions), but needs its input on
        # the device: one transfer of all four lists costs less, and no second compiler at run time.
        count, lengths = len(metadata.entries), np.diff(metadata.q_indptr)
        entry = np.repeat(np.arange(count), lengths)
        starts = metadata.kv_lens - lengths
        position = np.arange(metadata.num_tokens) - (metadata.q_indptr[:-1] - starts)[entry]
        parts = (entry, position, metadata.kv_indptr, metadata.last_page_len)
        packed = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
        return cls(*torch.split(packed, [len(part) for part in parts]))


def _prefix_pages(
    metadata: AttentionMetadata, entries: npt.NDArray[np.int64], starts: Int32Array, device: torch.device
) -> _Pages:
    """The pages that hold tokens `[0, start)` of some entries; the last one may go on with new tokens."""
    size = metadata.page_size
    count = -(-starts // size)
    table = metadata.page_table[entries]
    indices = table[np.arange(table.shape[1]) < count[:, None]]
    last = (starts - (count - 1) * size).astype(np.int32)
    return _Pages(_indptr(count), torch.from_numpy(indices).to(device), last)


def _indptr(lengths: npt.NDArray[Any]) -> Int32Array:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _host(array: Int32Array) -> Tensor:
    """FlashInfer reads these lists on the host and copies them itself."""
    return torch.from_numpy(array)


def _layer(pool: KVPool, layer_id: int, page_size: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values as pages: views, nothing is copied."""
    shape = (-1, page_size, pool.num_kv_heads, pool.head_dim)
    return pool.k[layer_id].view(shape), pool.v[layer_id].view(shape)


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> int:
    """What FlashInfer may need to keep partial results when it splits long sequences.

    128 MiB is the recommended size; large groups of wide heads need more. Its scheduler keeps float32
    rows of at most 2 x processors / num_kv_heads pieces, each of 128 rows for every query head.
    """
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = 2 * processors * 128 * num_heads // num_kv_heads
    return max(128 * MIB, rows * (head_dim + 1) * 4 + MIB)


def what_is_missing(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why FlashInfer cannot run a model here, as a clause without its full stop; "" if it can."""
    if device.type != "cuda":
        if not torch.cuda.is_available():
            return "no NVIDIA GPU is visible to torch"
        return f"FlashInfer needs a GPU, and the model lies on {device.type!r}"
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashInfer computes in bfloat16 or float16, and the model is in {name}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of {', '.join(map(str, HEAD_DIMS))}, and the model's have {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        has = ".".join(map(str, capability))
        return f"FlashInfer needs a GPU of compute capability 8.0, and this one has {has}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'minirad[gpu]')"
    if not _has_compiler():
        return "FlashInfer compiles its kernels with nvcc, and there is no CUDA toolkit here"
    try:
        import_module("flashinfer")
    except Exception as error:  # whatever a broken installation throws
        return f"FlashInfer cannot be imported ({type(error).__name__}: {error})"
    return ""


def _has_compiler() -> bool:
    """Whether FlashInfer will find nvcc (it looks in these places), or brings its kernels compiled."""
    return (
        any(name in os.environ for name in ("CUDA_HOME", "CUDA_PATH"))
        or shutil.which("nvcc") is not None
        or Path("/usr/local/cuda").exists()
        or find_spec("flashinfer_jit_cache") is not None
    )
