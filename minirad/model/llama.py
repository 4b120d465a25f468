"""The Llama architecture: configuration and forward pass over a paged KV pool.

One forward takes the tokens of any batch (prefill, chunks, decode, mixed) as one flat list; only
attention knows which request a token belongs to. The arithmetic follows transformers'
LlamaForCausalLM, so that logits agree to rounding. This module does not read weights from disk,
sample, or train, and refuses every configuration that it would compute wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend, RadixAttention
from minirad.kv.kv_pool import KVPool
from minirad.model.one_token import OneToken
from minirad.model.ops import FusedOps, Ops, best_ops

__all__ = ["Layer", "LlamaConfig", "LlamaModel", "RopeScaling", "random_weights"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; `kind` is "linear" or "llama3".

    The last three fields are used by "llama3" only.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape and constants of a Llama, as read from a Hugging Face `config.json`."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    torch_dtype: str

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "intermediate", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} is {getattr(self, name)}, must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(f"model config: {self.heads} heads are no multiple of {self.kv_heads} kv heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"model config: head_dim is {self.head_dim}, must be even and positive")

    @classmethod
    def from_dir(cls, path: Path | str) -> LlamaConfig:
        """Read and check `config.json` (and the end tokens of `generation_config.json`) in `path`.

        Raises:
            ValueError: if the file is missing or asks for something that this module does not
            compute;
                the message names the field and its value.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"no config.json in the model directory {Path(path)}")
        raw = _json_object(file)
        generation = Path(path) / "generation_config.json"
        extra = _json_object(generation) if generation.is_file() else {}
        return cls.from_dict(raw, more_eos=extra.get("eos_token_id"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], more_eos: int | list[int] | None = None) -> LlamaConfig:
        """The same from the parsed JSON; `more_eos` are end tokens named elsewhere."""
        _refuse_what_is_not_llama(raw)
        missing = [k for k in _REQUIRED if raw.get(k) is None]
        if missing:
            raise ValueError(f"model config: the field {missing[0]!r} is missing")
        heads = int(raw["num_attention_heads"])
        # Where both are there, the older field wins, as in transformers.
        rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
        theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden=int(raw["hidden_size"]),
            intermediate=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // max(heads, 1)),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=_parse_rope_scaling(rope),
            max_position_embeddings=int(raw.get("max_position_embeddings") or 2048),
            tied=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            bos_id=raw.get("bos_token_id"),
            eos_ids=tuple(sorted({*_as_ids(raw.get("eos_token_id")), *_as_ids(more_eos)})),
            torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights, as transformers saves them."""
        h, m, d = self.hidden, self.intermediate, self.head_dim
        q, kv = self.heads * d, self.kv_heads * d
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for i in range(self.layers):
            attention = {"q_proj": (q, h), "k_proj": (kv, h), "v_proj": (kv, h), "o_proj": (h, q)}
            mlp = {"gate_proj": (m, h), "up_proj": (m, h), "down_proj": (h, m)}
            for block, linears, bias in (
                ("self_attn", attention, self.attention_bias),
                ("mlp", mlp, self.mlp_bias),
            ):
                for name, shape in linears.items():
                    shapes[f"model.layers.{i}.{block}.{name}.weight"] = shape
                    if bias:
                        shapes[f"model.layers.{i}.{block}.{name}.bias"] = shape[:1]
            shapes[f"model.layers.{i}.input_layernorm.weight"] = (h,)
            shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (h,)
        shapes["model.norm.weight"] = (h,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of weights (a tied head counts once)."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _json_object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(read).__name__}")
    return read


def _refuse_what_is_not_llama(raw: Mapping[str, Any]) -> None:
    def refuse(field: str, why: str) -> None:
        raise ValueError(f"model config: {field} is {raw[field]!r}; {why}")

    if not raw.get("model_type") and not raw.get("architectures"):
        raise ValueError("model config: neither model_type nor architectures says what it is")
    if raw.get("model_type") not in (None, "llama"):
        refuse("model_type", "only 'llama' is supported")
    if raw.get("architectures") and list(raw["architectures"]) != ["LlamaForCausalLM"]:
        refuse("architectures", "only ['LlamaForCausalLM'] is supported")
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "only 'silu' is supported")
    for field in ("sliding_window", "quantization_config"):
        if raw.get(field) is not None:
            refuse(field, "this is not supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "only whole heads are rotated")


def _parse_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("type") or rope.get("rope_type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"model config: rope type is {kind!r}; only 'default', 'linear', 'llama3' are supported"
        )
    names = ["factor"]
    if kind == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in names if rope.get(name) is None]
    if missing:
        raise ValueError(f"model config: rope type {kind!r} needs the field {missing[0]!r}")
    return RopeScaling(kind, *(rope[name] for name in names))


class LlamaModel:
    """A Llama whose keys and values live in a `KVPool`.

    Args:
        config: its shape.
        weights: tensors by their transformers names, all of one dtype on one device; see
            `LlamaConfig.tensor_shapes`.
        ops: what is done between the matrix products; None: the best for that device and dtype.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor], ops: Ops | None = None) -> None:
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = self.embed if config.tied else weights["lm_head.weight"]
        self.layers = [Layer.from_weights(config, weights, i) for i in range(config.layers)]
        self.inv_freq = rope_frequencies(config).to(self.embed.device)
        self.ops = ops or best_ops(self.device, self.dtype, config.head_dim)
        # None to compute one token like many, for comparing.
        self.one_token: OneToken | None = None
        if isinstance(self.ops, FusedOps):
            self.one_token = OneToken(self.inv_freq, config.max_position_embeddings, config.rms_eps)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type, which is also that of the keys and values."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embed.device

    def new_pool(self, num_slots: int) -> KVPool:
        """A KV pool of this model's shape with `num_slots` slots (the dummy page's included)."""
        c = self.config
        return KVPool(c.layers, num_slots, c.kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        pool: KVPool,
        backend: AttentionBackend,
        logit_index: Tensor,
    ) -> Tensor:
        """Compute one batch; its keys and values end up in the pool.

        Args:
            token_ids: int64 `[T]`, the batch's tokens in the order of the metadata.
            logit_index: int64 `[N]`, the tokens (indices into T) whose next-token logits are
                wanted.

        Returns:
            float32 `[N, vocab_size]`.

        Raises:
            ValueError: if the number of tokens differs from the metadata's.
        """
        if token_ids.shape[0] != metadata.num_tokens:
            raise ValueError(
                f"forward: {token_ids.shape[0]} token ids, but metadata for {metadata.num_tokens}"
            )
        backend.plan(metadata, pool)
        return self.compute(token_ids, metadata, pool, backend, logit_index)

    @torch.inference_mode()
    def compute(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        pool: KVPool,
        backend: AttentionBackend,
        logit_index: Tensor | None,
        as_float: bool = True,
    ) -> Tensor:
        """`forward` without planning: nothing here waits for the device or copies from the host.

        So it can be captured in a CUDA graph. logit_index None: the logits of all tokens. as_float False:
        in the type of the weights, but for a single token's, which are float32 always.
        """
        x, one = F.embedding(token_ids, self.embed), self.one_token
        if one is not None and len(x) == 1 and backend.reads_pool_only:
            x = one.layers(x, self.layers, metadata, pool, backend)
        else:
            x = self._through_layers(x, metadata, pool, backend)
        if logit_index is not None:
            x = x[logit_index]
        if one is not None and len(x) == 1:
            return one.logits(x, self.norm, self.head)
        logits = self.ops.linear(self.ops.rms_norm(x, self.norm, self.config.rms_eps), self.head)
        return logits.float() if as_float else logits

    def _through_layers(
        self, x: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """x `[T, hidden]` through all layers; fused ops write over it."""
        ops, eps = self.ops, self.config.rms_eps
        angles = metadata.positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        h = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            attended = layer.attend(h, cos, sin, metadata, pool, backend, ops)
            x, h = ops.add_rms_norm(x, attended, layer.post_norm, eps)
            delta = layer.mlp(h, ops)
            if following is not None:
                x, h = ops.add_rms_norm(x, delta, following.input_norm, eps)
        return x + delta


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

    def attend(
        self,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        metadata: AttentionMetadata,
        pool: KVPool,
        backend: AttentionBackend,
        ops: Ops,
    ) -> Tensor:
        """The attention block of normed h `[T, hidden]`; cos and sin `[T, 1, head_dim / 2]`."""
        a = self.attention
        qkv = ops.linear(h, self.qkv, self.qkv_bias).view(len(h), -1, a.head_dim)
        if isinstance(ops, FusedOps) and backend.reads_pool_only:
            layer = a.layer_id
            q = ops.rotate_and_write(qkv, cos, sin, metadata.out_slots, pool.k[layer], pool.v[layer])
            attended = backend.run(layer, q, pool, a.scale).reshape(len(h), -1)
        else:
            qk = rotate(qkv[:, : a.num_heads + a.num_kv_heads], cos, sin)
            q, k = qk[:, : a.num_heads], qk[:, a.num_heads :]
            attended = a(q, k, qkv[:, a.num_heads + a.num_kv_heads :], metadata, pool, backend)
        return ops.linear(attended, self.o, self.o_bias)

    def mlp(self, h: Tensor, ops: Ops) -> Tensor:
        """The gated block of normed h `[T, hidden]`."""
        gate_up = ops.linear(h, self.gate_up, self.gate_up_bias)
        return ops.linear(ops.silu_mul(gate_up), self.down, self.down_bias)


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
