"""A whole Llama for one token, in four kernels a layer and attention's, at the speed of the memory.

The kernels are in one_token_kernels.py; here is how their work is cut up and launched: figures are in
bench/LOG.md. `FusedLlama` comes here whenever a batch has a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import Layer

__all__ = ["OneToken", "Tile", "Tiles"]

ELEMENTS = 32768  # of a matrix for a program of 16 warps at most: its registers do not suffice for more


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel's work is cut: results (rows, or pairs of rows that make one) which a program takes at a
    time, its warps, and how many times it does so."""

    rows: int
    warps: int = 8
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Tiles:
    """One tile for each matrix. The defaults are the quickest that were measured (bench/LOG.md)."""

    qkv: Tile = Tile(8, 16)
    o: Tile = Tile(4, 8)
    gate_up: Tile = Tile(1, 4, 2)
    down: Tile = Tile(4, 16)
    head: Tile = Tile(2, 4)


class OneToken:
    """The one-token path of a model.

    Args:
        frequencies: float32 `[head_dim / 2]` on the device, radians per position of each rotated pair.
        positions: how many there are; cosines and sines of all are worked out here, in float32.
        eps: of the norms.
    """

    def __init__(self, frequencies: Tensor, positions: int, eps: float, tiles: Tiles | None = None) -> None:
        self._kernels: Any = import_module("minirad.fast.one_token_kernels")
        angles = torch.arange(positions, device=frequencies.device)[:, None].float() * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()
        self._eps, self._tiles = eps, Tiles() if tiles is None else tiles
        overlap: Any = import_module("minirad.fast.early_launch")
        self.launch = overlap.launch_options(frequencies.device)

    def layers(
        self, x: Tensor, layers: Sequence[Layer], metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """x `[1, hidden]` through all layers; it is written over. Keys and values go into the pool.

        Of the metadata `positions` and `out_slots` are read, and `backend.run` what it planned.
        """
        for layer in layers:
            a = layer.attention
            q = self._stored(layer, x, metadata, pool.k[a.layer_id], pool.v[a.layer_id])
            attended = backend.run(a.layer_id, q, pool, a.scale)
            self._add(x, attended.reshape(1, -1), layer.o, layer.o_bias, self._tiles.o)
            self._add(x, self._gated(layer, x), layer.down, layer.down_bias, self._tiles.down)
        return x

    def logits(self, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """The norm of x `[1, hidden]` times head `[vocab, hidden]`: float32 `[1, vocab]`, never rounded."""
        size, inputs = head.shape
        tile = _fitted(self._tiles.head, inputs, 1)
        out = torch.empty((1, size), dtype=torch.float32, device=x.device)
        self._launch(
            self._kernels.head_product, size, tile, x, norm, head, out, size, self._eps,
            **_columns(inputs), ROWS=tile.rows, TURNS=tile.turns,
        )  # fmt: skip
        return out

    def _stored(self, layer: Layer, x: Tensor, metadata: AttentionMetadata, k: Tensor, v: Tensor) -> Tensor:
        """q `[1, heads, head_dim]`, rotated; the key and value go to their slot of `k` and `v`."""
        a, inputs = layer.attention, x.shape[1]
        half = a.head_dim // 2
        tile = _fitted(self._tiles.qkv, inputs, 2, most=half & -half)  # one head's rows to a program
        q = x.new_empty((1, a.num_heads, a.head_dim))
        self._launch(
            self._kernels.qkv_stored, (a.num_heads + 2 * a.num_kv_heads) * half, tile,
            x, layer.input_norm, layer.qkv, or_other(layer.qkv_bias, x), self.cos, self.sin,
            metadata.positions, metadata.out_slots, q, k, v, self._eps,
            **_columns(inputs), HEADS=a.num_heads, KV_HEADS=a.num_kv_heads, HALF=half,
            PAIRS=tile.rows, HAS_BIAS=layer.qkv_bias is not None,
        )  # fmt: skip
        return q

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        """silu(gate) * up `[1, intermediate]`."""
        size, inputs = layer.down.shape[1], x.shape[1]
        tile = _fitted(self._tiles.gate_up, inputs, 2)
        out = x.new_empty((1, size))
        self._launch(
            self._kernels.gated_product, size, tile,
            x, layer.post_norm, layer.gate_up, or_other(layer.gate_up_bias, x), out, size, self._eps,
            **_columns(inputs), ROWS=tile.rows, TURNS=tile.turns, HAS_BIAS=layer.gate_up_bias is not None,
        )  # fmt: skip
        return out

    def _add(self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> None:
        """x += weight times h (+ bias)."""
        size, inputs = weight.shape
        tile = _fitted(tile, inputs, 1)
        self._launch(
            self._kernels.product_added, size, tile, h, weight, or_other(bias, x), x, size,
            **_columns(inputs), ROWS=tile.rows, HAS_BIAS=bias is not None,
        )  # fmt: skip

    def _launch(self, kernel: Any, results: int, tile: Tile, *args: Any, **constants: Any) -> None:
        programs = -(-results // (tile.rows * tile.turns))
        kernel[(programs,)](*args, **constants, num_warps=tile.warps, **self.launch)


def _fitted(tile: Tile, inputs: int, rows_per_result: int, most: int = 1 << 30) -> Tile:
    """The tile with fewer rows where rows of so many inputs would be too much for a program."""
    rows = min(tile.rows, most, max(1, ELEMENTS * tile.warps // 16 // (padded(inputs) * rows_per_result)))
    return Tile(rows, tile.warps, tile.turns)


def or_other(bias: Tensor | None, other: Tensor) -> Tensor:
    """What is passed for a bias that is not there; nothing reads it."""
    return other if bias is None else bias


def _columns(inputs: int) -> dict[str, int]:
    return {"K": inputs, "BLOCK_K": padded(inputs)}


def padded(size: int) -> int:
    """The next power of two: Triton's blocks have no other sizes."""
    return 1 << (size - 1).bit_length()
