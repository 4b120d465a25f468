"""A Llama over a paged KV pool, to be read.

One forward pass takes the tokens of any batch (prefill, chunks, decode, mixed) as one flat list; only
attention knows which request a token belongs to. The arithmetic is that of transformers' LlamaForCausalLM, so
that logits agree to rounding. fast/fused_llama.py computes the same with fewer and faster kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend, RadixAttention
from minirad.kv.kv_pool import KVPool
from minirad.model.config import LlamaConfig, RopeScaling

__all__ = ["Layer", "LlamaConfig", "LlamaModel", "RopeScaling", "random_weights"]


class LlamaModel:
    """A Llama whose keys and values live in a `KVPool`.

    Args:
        config: its shape.
        weights: tensors by their transformers names, all of one dtype on one device; see
            `LlamaConfig.tensor_shapes`.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = self.embed if config.tied else weights["lm_head.weight"]
        self.layers = [Layer.from_weights(config, weights, i) for i in range(config.layers)]
        self.inv_freq = rope_frequencies(config).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type, which is also that of the keys and values."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed.device

    def new_pool(self, num_slots: int, more_layers: int = 0) -> KVPool:
        """A KV pool of this model's shape with `num_slots` slots (the dummy page's included).

        more_layers: beside its own, those of a draft head.
        """
        c, layers = self.config, self.config.layers + more_layers
        return KVPool(layers, num_slots, c.kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend,
        logit_index: Tensor,
    ) -> Tensor:  # fmt: skip
        """Computes one batch; its keys and values end up in the pool.

        Args:
            token_ids: int64 `[T]`, the batch's tokens in the order of the metadata.
            logit_index: int64 `[N]`, the tokens (indices into T) whose next-token logits are
                wanted.

        Returns:
            float32 `[N, vocab_size]`.

        Raises:
            ValueError: if the number of tokens differs from the metadata's.
        """
        if len(token_ids) != metadata.num_tokens:
            raise ValueError(f"forward: {len(token_ids)} token ids, but metadata for {metadata.num_tokens}")
        backend.plan(metadata, pool)
        x = self.through_layers(F.embedding(token_ids, self.embed), metadata, pool, backend)
        return self.logits(x[logit_index])

    def through_layers(
        self, x: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """Embedded tokens x `[T, hidden]` through all layers."""
        eps = self.config.rms_eps
        cos, sin = self.rotation(metadata.positions)
        for layer in self.layers:
            h = rms_norm(x, layer.input_norm, eps)
            x = x + self.attend(layer, h, cos, sin, metadata, pool, backend)
            x = x + self.mlp(layer, rms_norm(x, layer.post_norm, eps))
        return x

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[T, 1, head_dim / 2]` of the angles by which these positions are rotated."""
        angles = positions[:, None, None].float() * self.inv_freq
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def attend(
        self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """The attention block of normed h `[T, hidden]`."""
        a = layer.attention
        qkv = self.linear(h, layer.qkv, layer.qkv_bias).view(len(h), -1, a.head_dim)
        qk, v = torch.split(qkv, [a.num_heads + a.num_kv_heads, a.num_kv_heads], dim=1)
        q, k = torch.split(rotate(qk, cos, sin), [a.num_heads, a.num_kv_heads], dim=1)
        return self.row_linear(a(q, k, v, metadata, pool, backend), layer.o, layer.o_bias)

    def mlp(self, layer: Layer, h: Tensor) -> Tensor:
        """The gated block of normed h `[T, hidden]`."""
        gate, up = self.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return self.row_linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def logits(self, x: Tensor) -> Tensor:
        """What comes after each of these tokens: float32 `[N, vocab_size]` for x `[N, hidden]`."""
        return self.all_scores(self.linear(rms_norm(x, self.norm, self.config.rms_eps), self.head)).float()

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`linear` whose inputs may lie on several ranks, which add up what each has (ranks/model.py)."""
        return self.linear(x, weight, bias)

    def all_scores(self, scores: Tensor) -> Tensor:
        """Scores `[N, vocab_size]` of which each of several ranks has some columns."""
        return scores

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x `[T, in]` times weight `[out, in]` transposed, plus bias: `[T, out]`."""
        return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One transformer block; q, k, v and gate, up are fused into one matrix each."""

    attention: RadixAttention
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def from_weights(cls, config: LlamaConfig, weights: Mapping[str, Tensor], i: int) -> Layer:
        prefix = f"model.layers.{i}."

        def fused(block: str, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
            keys = [f"{prefix}{block}.{name}" for name in names]
            matrix = torch.cat([weights[f"{key}.weight"] for key in keys])
            if f"{keys[0]}.bias" not in weights:
                return matrix, None
            return matrix, torch.cat([weights[f"{key}.bias"] for key in keys])

        attention = RadixAttention(i, config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5)
        return cls(
            attention,
            weights[prefix + "input_layernorm.weight"],
            *fused("self_attn", ("q_proj", "k_proj", "v_proj")),
            *fused("self_attn", ("o_proj",)),
            weights[prefix + "post_attention_layernorm.weight"],
            *fused("mlp", ("gate_proj", "up_proj")),
            *fused("mlp", ("down_proj",)),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 whatever x's type."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for x `[T, heads, head_dim]`; dimension i is paired with i + half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians per position of each rotated pair: float32 `[head_dim / 2]`, scaled as configured."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    # llama3: waves longer than the original context are stretched by the factor, short ones kept,
    # those between are blended
    turns = scaling.original_max_position * freq / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * freq / scaling.factor + keep * freq


def random_weights(
    config: LlamaConfig, seed: int, *, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Small random weights of the configured shape, for tests and benchmarks."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        w = torch.randn(shape, generator=generator) * 0.02
        weights[name] = (w + 1 if "norm" in name else w).to(device=device, dtype=dtype)
    return weights
