"""The pool of key/value slots: plain tensors, one K and one V per layer, addressed by slot number.

A slot is the home of one token's keys and values in every layer. The pool stores and copies; it
does not know which slots are free, whose they are, or how long a page is (the allocator, the tree
and the request rows do). Slots of page 0 are a dummy: padding reads them and may be written to
them, so they must stay finite, and no request is ever given one.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of `num_slots` tokens in `num_layers` layers, all zero at first.

    Attributes:
        k, v: one tensor `[num_slots, num_kv_heads, head_dim]` per layer.

    Args:
        num_slots: all slots, those of the dummy page 0 included.
        dtype: the type of the stored keys and values.
        device: where they lie ("cpu", "cuda", ...).

    Raises:
        ValueError: if a size is below 1, or there is no memory for it.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str,
    ) -> None:  # fmt: skip
        self.num_layers, self.num_slots = num_layers, num_slots
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        for name in ("num_layers", "num_slots", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVPool: {name} is {getattr(self, name)}, but must be at least 1")
        shape = (num_slots, num_kv_heads, head_dim)
        try:
            self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except RuntimeError as error:  # torch's words for "no memory" differ from device to device
            needs = f"{num_slots} slots ({self.nbytes / 1e9:,.1f} GB)"
            raise ValueError(f"a KV pool of {needs} cannot be had: {error}") from error

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k` and `v` `[T, num_kv_heads, head_dim]` of one layer at `slots` `[T]` (int64)."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def copy(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy whole slots, in all layers: `src_slots` `[N]` to `dst_slots` `[N]` (int64).

        A sample that branches off in the middle of a page gets its own copy of that page's tokens.
        """
        if src_slots.shape != dst_slots.shape:
            raise ValueError(f"KVPool.copy: {len(src_slots)} sources, {len(dst_slots)} targets")
        for tensor in (*self.k, *self.v):
            tensor.index_copy_(0, dst_slots, tensor.index_select(0, src_slots))

    def poison(self, slots: Tensor) -> None:
        """Fill `slots` `[N]` with NaN in all layers: a debug aid.

        Poison what was freed: a request that still reads it gets NaN logits instead of a plausible wrong
        word.

        Raises:
            ValueError: if slot 0 is among them (padding reads it).
        """
        if bool((slots == 0).any()):
            raise ValueError("KVPool.poison: slot 0 is the dummy that padding reads; keep it finite")
        for tensor in (*self.k, *self.v):
            tensor.index_fill_(0, slots, float("nan"))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes: keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, the dummy page included."""
        return self.num_slots * self.bytes_per_token
