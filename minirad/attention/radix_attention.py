"""The attention layer of a model whose keys and values live in a shared, paged pool.

The layer itself is two lines: have this batch's keys and values stored at the slots that the scheduler
chose, then attend through the page tables. A backend does both. That is all that "RadixAttention" asks of
a model: whether a page was computed just now, earlier by this request, or by another one with the
same prefix makes no difference here. The layer has no weights and does not know the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.kv.kv_pool import KVPool


class AttentionBackend(Protocol):
    """How a batch's queries meet the pool's keys and values."""

    @property
    def name(self) -> str:
        """The word that selects this backend in the configuration."""
        ...

    def plan(self, metadata: AttentionMetadata, pool: KVPool) -> None:
        """Prepare for one batch: called once, before its first layer."""
        ...

    def write(self, layer_id: int, metadata: AttentionMetadata, k: Tensor, v: Tensor, pool: KVPool) -> None:
        """Store the planned batch's k and v `[T, num_kv_heads, head_dim]` in one layer of the pool."""
        ...

    def run(self, layer_id: int, q: Tensor, pool: KVPool, scale: float) -> Tensor:
        """Attend in one layer of the planned batch, after its K and V were written.

        Args:
            q: `[T, num_heads, head_dim]`, positions already rotated in.
            scale: the factor of q.k before the softmax.

        Returns:
            `[T, num_heads, head_dim]`, q's dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class RadixAttention:
    """One attention layer.

    Raises:
        ValueError: if `num_heads` is no multiple of `num_kv_heads`.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, no multiple of num_kv_heads {self.num_kv_heads}"
            )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """Write k and v into the pool, attend, and return `[T, num_heads * head_dim]`.

        Args:
            q: `[T, num_heads * head_dim]` or `[T, num_heads, head_dim]`.
            k, v: `[T, num_kv_heads * head_dim]` or `[T, num_kv_heads, head_dim]`.
        """
        kv_shape = (-1, self.num_kv_heads, self.head_dim)
        backend.write(self.layer_id, metadata, k.view(kv_shape), v.view(kv_shape), pool)
        out = backend.run(self.layer_id, q.view(-1, self.num_heads, self.head_dim), pool, self.scale)
        return out.reshape(-1, self.num_heads * self.head_dim)
