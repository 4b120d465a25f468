"""Paged attention on an NVIDIA GPU: FlashInfer's kernels over the pool and page tables of every backend.

FlashInfer takes the pool as it lies (`[pages, page_size, kv_heads, head_dim]` is a view of a layer) and a
batch as three lists: where each entry's queries begin (`qo_indptr`), where its pages begin (`kv_indptr`),
and how full its last page is. `plan` hands these over once per batch and FlashInfer cuts the work into
pieces for the card's processors; `run` then is one kernel per layer. Which kernel:

- all entries have one token: the decode wrapper;
- anything else, chunks and decodes mixed: the prefill wrapper, causal.

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
from typing import Any

import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
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


class FlashInferAttention:
    """An `AttentionBackend` made of FlashInfer's batch wrappers.

    Args:
        num_heads, num_kv_heads, head_dim: the model's shape. FlashInfer plans with it.
        device: where the pool lies. The workspace is allocated there at once.
        scale: the factor of q.k before the softmax; None is `head_dim ** -0.5`.
        kernels: the module `flashinfer`; tests pass a stand-in.
    """

    name = "flashinfer"
    reads_pool_only = True

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str,
        scale: float | None = None,
        kernels: Any = None,
    ) -> None:
        self._kernels = fi = import_module("flashinfer") if kernels is None else kernels
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self.tensor_cores = num_heads // num_kv_heads >= TENSOR_CORES_FROM_GROUP
        # One for all wrappers: they run one after another. FlashInfer wants it zeroed before its first use.
        size = workspace_bytes(num_heads, num_kv_heads, head_dim, torch.device(device))
        self._work = work = torch.zeros(size, dtype=torch.uint8, device=device)
        self._decode = fi.BatchDecodeWithPagedKVCacheWrapper(
            work, "NHD", use_tensor_cores=self.tensor_cores, backend=KERNELS
        )
        self._paged = fi.BatchPrefillWithPagedKVCacheWrapper(work, "NHD", backend=KERNELS)
        self._batch: AttentionMetadata | None = None

    # ------------------------------------------------------------ once per batch

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Hand the batch's lists to FlashInfer; they serve all layers.

        Raises:
            ValueError: if the pool is of another shape than the model that this backend was made for,
                or does not hold whole pages.
        """
        self._check_pool(metadata, pool)
        self._batch = metadata
        # FlashInfer reads these lists on the host and copies them itself; the pages lie on the device.
        indptr, last = torch.from_numpy(metadata.kv_indptr), torch.from_numpy(metadata.last_page_len)
        shape = (self._heads, self._kv_heads, self._head_dim, metadata.page_size)
        types = {"q_data_type": pool.dtype, "kv_data_type": pool.dtype, "sm_scale": self._scale}
        if metadata.is_decode_only:
            self._decode.plan(indptr, metadata.kv_indices, last, *shape, **types)
        else:
            starts = torch.from_numpy(metadata.q_indptr)
            self._paged.plan(starts, indptr, metadata.kv_indices, last, *shape, causal=True, **types)

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
        """Store k and v `[T, num_kv_heads, head_dim]` of one layer at the batch's slots."""
        pool.write(layer_id, metadata.out_slots, k, v)

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend in one layer: q `[T, num_heads, head_dim]` gives the same shape."""
        planned = self._batch.num_tokens if self._batch is not None else 0
        if self._batch is None or q.shape[0] != planned:
            raise ValueError(f"run: {q.shape[0]} queries, but {planned} were planned")
        if scale != self._scale:
            raise ValueError(f"run: the scale is {scale}, but {self._scale} was planned")
        cache = _layer(pool, layer_id, self._batch.page_size)
        wrapper = self._decode if self._batch.is_decode_only else self._paged
        out: Tensor = wrapper.run(q, cache)
        return out


class StepAttention:
    """An `AttentionBackend` of captured decode steps: each is planned by `plan_step`, outside the graph."""

    name: str
    reads_pool_only = True
    page_size = 1

    def plan_step(
        self, indptr: Tensor, last_page_len: Tensor, kv_lens: Tensor, page_size: int, pool: KVPool
    ) -> None:
        """Once per step. The lists are those of the host; the device has them already."""
        self.page_size = page_size

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Refused: the lists are the step's."""
        raise ValueError("a captured step is planned by plan_step")

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Refused: the kernel that rotates keys also stores them."""
        raise ValueError("in a captured step the rotation writes keys and values")

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend: q `[B, heads, head_dim]`, one token of each request, gives the same shape."""
        raise NotImplementedError


@dataclass(eq=False)
class GraphDecode(StepAttention):
    """FlashInfer's, for one batch size; see FlashInferAttention."""

    wrapper: Any
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    planned: bool = False
    name = "flashinfer"

    def plan_step(
        self, indptr: Tensor, last_page_len: Tensor, kv_lens: Tensor, page_size: int, pool: KVPool
    ) -> None:
        """By FlashInfer."""
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

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        out: Tensor = self.wrapper.run(q, _layer(pool, layer_id, self.page_size))
        return out


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
