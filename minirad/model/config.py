"""The shape of a Llama, read from a Hugging Face `config.json`; what would be computed wrongly is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LlamaConfig", "RopeScaling"]


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
            ValueError: if the file is missing, or asks for something that llama.py does not compute; the
                message names the field and its value.
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
