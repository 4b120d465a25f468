"""Paged attention on an NVIDIA GPU: FlashInfer's kernels over the pool and page tables of every backend.

FlashInfer takes the pool as it lies (`[pages, page_size, kv_heads, head_dim]` is a view of a layer) and a
batch as three lists: where each entry's queries begin (`qo_indptr`), where its pages begin (`kv_indptr`),
and how full its last page is. `plan` hands these over once per batch and FlashInfer cuts the work into
pieces for the card's processors; `run` then is one kernel per layer: the causal prefill wrapper's, which
takes prompts, chunks and decodes mixed. (Captured steps, which only decode, have kernels of their own.)

The package `flashinfer-python` is imported when a backend is made, and compiles its kernels at their
first use (about half a minute, kept in a cache on disk). This module does not choose slots and does not
run on a CPU; `what_is_missing` says why it cannot run somewhere.
"""

from __future__ import annotations

import os
import shutil
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
# "auto" would take fa3 on Hopper, which compiles for a minute longer (bench/LOG.md).
KERNELS = "fa2"
MIB = 1 << 20


class FlashInferAttention:
    """An `AttentionBackend` made of FlashInfer's batch wrapper for prompts.

    Args:
        num_heads, num_kv_heads, head_dim: the model's shape. FlashInfer plans with it.
        device: where the pool lies. The workspace is allocated there at once.
        scale: the factor of q.k before the softmax; None is `head_dim ** -0.5`.
        kernels: the module `flashinfer`; tests pass a stand-in.
    """

    name = "flashinfer"
    reads_pool_only = True

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, device: torch.device | str,
        scale: float | None = None, kernels: Any = None,
    ) -> None:  # fmt: skip
        fi = import_module("flashinfer") if kernels is None else kernels
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        # FlashInfer wants it zeroed before its first use.
        size = workspace_bytes(num_heads, num_kv_heads, head_dim, torch.device(device))
        work = torch.zeros(size, dtype=torch.uint8, device=device)
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
        lists = metadata.q_indptr, metadata.kv_indptr, metadata.last_page_len
        starts, indptr, last = map(torch.from_numpy, lists)
        shape = (self._heads, self._kv_heads, self._head_dim, metadata.page_size)
        types = {"q_data_type": pool.dtype, "kv_data_type": pool.dtype, "sm_scale": self._scale}
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
        shape = (-1, self._batch.page_size, pool.num_kv_heads, pool.head_dim)
        # a layer's keys and values as pages: views, nothing is copied
        out: Tensor = self._paged.run(q, (pool.k[layer_id].view(shape), pool.v[layer_id].view(shape)))
        return out


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
