"""Llama's layers for 2 to 128 tokens, in four kernels and attention's each: a classroom on one card.

The kernels are in few_tokens_kernels.py; here is how their work is cut up and launched: figures are in
bench/LOG.md. `FusedLlama` comes here whenever a batch has so many tokens, also a short prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.fast.one_token import OneToken, or_other, padded
from minirad.kv.kv_pool import KVPool
from minirad.model.config import LlamaConfig
from minirad.model.llama import Layer, LlamaModel

__all__ = ["CUTS", "FEW", "Cut", "Cuts", "FewTokens", "room"]

ROWS = 64  # of a program: the matrix units' least
FEW = 64  # tokens; the head's product with more is the library's, which is quicker (CUTS[128]'s is not used)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: stretches of columns, columns fetched before the kernel in front has ended,
    columns of a block after that, blocks on their way at a time, rows of a program, its warps, and its tokens
    at most (a power of two)."""

    splits: int
    first: int
    block: int
    stages: int
    rows: int = ROWS
    warps: int = 4
    tokens: int = 128

    def fits(self, rows: int, inputs: int) -> bool:
        """Whether a matrix `[rows, inputs]` can be cut so."""
        each, left = divmod(inputs, self.splits)
        return not left and each >= self.first and (each - self.first) % self.block == 0 == rows % self.rows

    def within(self, room: int, tokens: int) -> Cut:
        """With fewer columns on their way, where so many do not lie in `room` bytes of shared memory."""
        column = 2 * (self.rows + min(tokens, self.tokens))  # bytes: weights' and tokens'
        stages = min(self.stages, (room // column - self.first) // self.block)
        if stages >= 2 or self.first <= self.block:
            return replace(self, stages=max(stages, 1))
        return replace(self, first=self.first // 2).within(room, tokens)


@dataclass(frozen=True, slots=True)
class Cuts:
    """One for each matrix."""

    qkv: Cut
    o: Cut
    gate_up: Cut
    down: Cut
    head: Cut

    @classmethod
    def of(cls, config: LlamaConfig, tokens: int, device: torch.device, usual: Cuts | None = None) -> Cuts:
        """For a model on a card: a program of qkv takes a whole head, and cards differ in shared memory."""
        usual = usual or CUTS[tokens]
        cuts = replace(usual, qkv=replace(usual.qkv, rows=config.head_dim))
        return cls(*(getattr(cuts, each.name).within(room(device), tokens) for each in fields(cuts)))


def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; no limit in Triton's interpreter."""
    if device.type != "cuda":
        return 1 << 30
    card: Any = torch.cuda.get_device_properties(device)
    return int(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))


# By tokens, padded: the quickest that were measured for Llama 3.2 1B on an H200 (bench/LOG.md).
CUTS = {
    16: Cuts(
        Cut(1, 512, 128, 6), Cut(4, 512, 128, 3), Cut(1, 256, 128, 3), Cut(8, 256, 128, 3), Cut(1, 128, 64, 3)
    ),
    32: Cuts(
        Cut(1, 256, 128, 4, tokens=16), Cut(4, 512, 128, 4), Cut(1, 128, 128, 3),
        Cut(4, 256, 128, 4), Cut(1, 64, 64, 5),
    ),
    64: Cuts(
        Cut(1, 256, 128, 4, tokens=32), Cut(4, 256, 64, 4, tokens=32), Cut(1, 64, 64, 5),
        Cut(4, 256, 128, 4), Cut(1, 64, 64, 6),
    ),
    128: Cuts(
        Cut(1, 256, 64, 10, tokens=64), Cut(1, 256, 128, 6, tokens=32), Cut(1, 64, 64, 5, 128, 8),
        Cut(4, 256, 64, 5), Cut(1, 64, 64, 6),
    ),
}  # fmt: skip


class FewTokens:
    """The path of a few tokens through a model.

    Args:
        config: of a model that `fits`.
        one: its path for one token, whose tables of cosines and sines are taken.
        most: tokens, one of `CUTS`.
    """

    def __init__(self, config: LlamaConfig, one: OneToken, most: int = 16, cuts: Cuts | None = None) -> None:
        self._kernels: Any = import_module("minirad.fast.few_tokens_kernels")
        self.most, device = most, one.cos.device
        self._one, self._eps = one, config.rms_eps
        self._cuts = cuts = Cuts.of(config, most, device, cuts)
        if not self.fits(config, cuts):
            raise ValueError(f"FewTokens: {config} cannot be cut so: {cuts}")
        added = cuts.o, cuts.down
        self._tiles = config.hidden // min(cut.rows for cut in added)
        sums = config.hidden * most * max(cut.splits for cut in added)
        places = self._tiles * -(-most // min(cut.tokens for cut in added))
        self._parts = torch.empty(sums, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(places, dtype=torch.int32, device=device)

    @staticmethod
    def fits(config: LlamaConfig, cuts: Cuts) -> bool:
        """Whether the kernels take a model of such sizes."""
        c = config
        wide, qkv = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
        return (
            c.head_dim in (64, 128)
            and cuts.qkv.fits(qkv, c.hidden)
            and cuts.o.fits(c.hidden, wide)
            and cuts.gate_up.fits(2 * c.intermediate, c.hidden)
            and cuts.down.fits(c.hidden, c.intermediate)
            and cuts.head.fits(c.vocab_size, c.hidden)
        )

    def compute(
        self, model: LlamaModel, token_ids: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """Logits of M <= FEW tokens from their ids: `layers` and `logits` without the kernels in between."""
        x = model.embed.new_empty((len(token_ids), model.config.hidden))
        first = self._gained(x, model.layers[0].input_norm, model.embed, token_ids)
        last = self._through(x, first, model.layers, model.norm, metadata, pool, backend)
        return self._scores(*last, model.head)

    def layers(
        self, x: Tensor, layers: Sequence[Layer], metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """x `[M, hidden]` through all layers, as OneToken.layers; M at most `most`."""
        norm = layers[0].input_norm
        self._through(x, self._gained(x, norm), layers, norm, metadata, pool, backend)
        return x

    def logits(self, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """The norm of x `[M, hidden]` times head `[vocab, hidden]`: float32 `[M, vocab]`, never rounded."""
        return self._scores(*self._gained(x, norm), 1, head)

    def _through(
        self, x: Tensor, first: tuple[Tensor, Tensor], layers: Sequence[Layer], norm: Tensor,
        metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """Writes over x. first: what `_gained` gave for the first layer; returns the same for `norm`,
        with the sums of squares by tile, and how many those are."""
        (h, squares), tiles = first, 1
        found = torch.empty((self._tiles, len(x)), dtype=torch.float32, device=x.device)
        gains = [*(layer.input_norm for layer in layers[1:]), norm]
        for layer, gain in zip(layers, gains, strict=True):
            a = layer.attention
            q = self._stored(layer, h, squares, tiles, metadata, pool.k[a.layer_id], pool.v[a.layer_id])
            attended = backend.run(a.layer_id, q, pool, a.scale).reshape(len(x), -1)
            cut = self._cuts.o
            self._add(x, attended, layer.o, layer.o_bias, layer.post_norm, h, found, cut)
            gated = self._gated(layer, h, found, len(layer.o) // cut.rows)
            cut, squares = self._cuts.down, found
            self._add(x, gated, layer.down, layer.down_bias, gain, h, found, cut)
            tiles = len(layer.down) // cut.rows
        return h, squares, tiles

    def _scores(self, h: Tensor, squares: Tensor, tiles: int, head: Tensor) -> Tensor:
        out = torch.empty((len(h), len(head)), dtype=torch.float32, device=h.device)
        self._launch(
            self._kernels.head_products, self._cuts.head, h, head, squares, tiles, out,
            len(h), len(head), self._eps, MOST=padded(self._tiles),
        )  # fmt: skip
        return out

    def _gained(
        self, x: Tensor, norm: Tensor, table: Tensor | None = None, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x times the norm's gain, and its sums of squares `[1, M]`; x is looked up first, given a table."""
        h, squares = torch.empty_like(x), torch.empty((1, len(x)), dtype=torch.float32, device=x.device)
        self._kernels.gained[(len(x),)](
            x, or_other(table, x), or_other(token_ids, x), norm, h, squares,
            K=x.shape[1], BLOCK_K=padded(x.shape[1]), LOOK_UP=table is not None, **self._one.launch,
        )  # fmt: skip
        return h, squares

    def _stored(
        self, layer: Layer, h: Tensor, squares: Tensor, tiles: int, metadata: AttentionMetadata,
        k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        """q `[M, heads, head_dim]`, rotated; keys and values go to their slots of `k` and `v`."""
        a = layer.attention
        q = h.new_empty((len(h), a.num_heads, a.head_dim))
        self._launch(
            self._kernels.qkv_stored_each, self._cuts.qkv, h, layer.qkv, squares, tiles,
            or_other(layer.qkv_bias, h), self._one.cos, self._one.sin,
            metadata.positions, metadata.out_slots, q, k, v, len(h), self._eps, HEADS=a.num_heads,
            KV_HEADS=a.num_kv_heads, MOST=padded(self._tiles), HAS_BIAS=layer.qkv_bias is not None,
        )  # fmt: skip
        return q

    def _gated(self, layer: Layer, h: Tensor, squares: Tensor, tiles: int) -> Tensor:
        """silu(gate) * up `[M, intermediate]`."""
        out = h.new_empty((len(h), layer.down.shape[1]))
        self._launch(
            self._kernels.gated_products, self._cuts.gate_up, h, layer.gate_up, squares, tiles,
            or_other(layer.gate_up_bias, h), out, *out.shape, self._eps, MOST=padded(self._tiles),
            HAS_BIAS=layer.gate_up_bias is not None,
        )  # fmt: skip
        return out

    def _add(
        self, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor, out: Tensor,
        squares: Tensor, cut: Cut,
    ) -> None:  # fmt: skip
        """x += weight times h (+ bias); out = x * gain; squares: the sums of x's, by tile."""
        self._launch(
            self._kernels.products_added, cut, h, weight, or_other(bias, x), x, gain, out, squares,
            self._parts, self._arrived, *x.shape, SPLITS=cut.splits, HAS_BIAS=bias is not None,
        )  # fmt: skip

    def _launch(self, kernel: Any, cut: Cut, h: Tensor, weight: Tensor, *more: Any, **constants: Any) -> None:
        """A program for each tile of rows, block of tokens and stretch of columns."""
        block = min(cut.tokens, self.most)
        kernel[(len(weight) // cut.rows, -(-len(h) // block), cut.splits)](
            h, weight, *more, **constants, K=weight.shape[1], FIRST=cut.first, BLOCK=cut.block,
            STAGES=cut.stages, R=cut.rows, MP=block, num_warps=cut.warps, **self._one.launch,
        )  # fmt: skip
