"""A draft head (EAGLE-1): one decoder layer that guesses the model's next hidden state from its last one.

Unit i of the draft has two inputs: the hidden state of token i, which the model has computed, and token
i + 1, which is known by then. What it gives is a guess at the hidden state of token i + 1, and the model's
own norm and head make of it a guess at token i + 2. So the draft's key and value of token i depend on token
i + 1 as well: they may be shared where pairs of tokens are equal, not where only tokens are (bigram keys).

EAGLE-1 puts its two inputs into the matrix as they are; here each is normed first, as in EAGLE-3, because the
classroom Llama's hidden states are a hundred times as large as its embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad import errors
from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend, RadixAttention
from minirad.kv.kv_pool import KVPool
from minirad.model.config import LlamaConfig
from minirad.model.llama import Layer, LlamaModel, rms_norm
from minirad.model.load import load_weights

__all__ = ["ARCHITECTURE", "DraftHead", "HeadConfig"]

ARCHITECTURE = "EagleDraftHead"
SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
"""What a head's `config.json` must say, and the names of it in LlamaConfig."""
AS_THE_TARGET = ("hidden_size", "num_key_value_heads", "head_dim")
"""Sizes that must be the target's: hidden states go in and out, keys and values lie in its pool."""


class HeadConfig(LlamaConfig):
    """A Llama's shape, of which a head has one layer, and before it two norms and a matrix."""

    __slots__ = ()

    @classmethod
    def read(cls, file: Path, target: LlamaConfig) -> HeadConfig:
        """Reads and checks a head's `config.json`; all that it does not say is as in `target`.

        Raises:
            ValueError: if it is missing or no head's, or the head does not fit the target; the message names
                both sizes.
        """
        sizes = _sizes(file)
        for name in AS_THE_TARGET:
            wanted = getattr(target, SIZES[name])
            if sizes[name] != wanted:
                raise ValueError(
                    f"{file}: the draft head has {name} {sizes[name]}, but the model has {wanted}: "
                    "a head works for the model that it was trained for"
                )
        shape: dict[str, Any] = {field.name: getattr(target, field.name) for field in fields(target)}
        shape.update({SIZES[name]: size for name, size in sizes.items()})
        return cls(**{**shape, "layers": 1, "attention_bias": False, "mlp_bias": False})

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the head's own weights; embedding, last norm and output are the target's."""
        layer = {
            name.removeprefix("model."): shape
            for name, shape in super().tensor_shapes().items()
            if name.startswith("model.layers.")
        }
        h = self.hidden
        return {"embed_norm.weight": (h,), "hidden_norm.weight": (h,), "fc.weight": (h, 2 * h), **layer}


class DraftHead:
    """A head with the model that it drafts for.

    Attributes:
        target: the model; its embedding, last norm and output are the head's as well.
        config: the head's own shape.
        layers: how many layers of keys and values it needs in the pool, behind the target's.

    Args:
        weights: tensors by the names of `HeadConfig.tensor_shapes`, of the target's type, on its device.
    """

    layers = 1

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor], target: LlamaModel) -> None:
        self.config, self.target = config, target
        self.embed_norm, self.hidden_norm = weights["embed_norm.weight"], weights["hidden_norm.weight"]
        self.fc = weights["fc.weight"]
        layer = Layer.from_weights(config, {f"model.{name}": tensor for name, tensor in weights.items()}, 0)
        attention = RadixAttention(
            target.config.layers, config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self.layer = replace(layer, attention=attention)

    @classmethod
    def load(cls, directory: Path | str, target: LlamaModel) -> DraftHead:
        """Reads a head from its directory (`config.json`, `model.safetensors`), in the target's type.

        Raises:
            ValueError: if there is none, a file is truncated or a stranger's, a tensor is missing, one too
                many, of another shape or not finite, or the head does not fit the target.
        """
        path = errors.expanded(errors.path("a draft head", directory))
        if not path.is_dir():
            raise ValueError(f"no draft head in {path}: there is no such directory")
        config = HeadConfig.read(path / "config.json", target.config)
        weights = load_weights(path, config, target.dtype, target.device)
        for name, tensor in weights.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{path}: tensor {name} of the draft head is not finite in {tensor.dtype}")
        return cls(config, weights, target)

    @property
    def num_parameters(self) -> int:
        """Number of the head's own weights."""
        return self.config.num_parameters

    @torch.inference_mode()
    def forward(
        self, next_tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """Computes the batch's units; their keys and values end up in the pool, in the layer behind the
        target's.

        Args:
            next_tokens: int64 `[T]`, the token behind each token of the batch.
            hidden: `[T, hidden]`, each token's hidden state: the target's, before its last norm, or what this
                function gave for the token before.

        Returns:
            `[T, hidden]`, guesses at the hidden states of the next tokens: `logits` of them guess at the
            tokens behind those.

        Raises:
            ValueError: if tokens, hidden states, metadata and pool do not fit together.
        """
        self._check(next_tokens, hidden, metadata, pool)
        target, layer, eps = self.target, self.layer, self.target.config.rms_eps
        backend.plan(metadata, pool)
        cos, sin = target.rotation(metadata.positions)
        embedded = rms_norm(F.embedding(next_tokens, target.embed), self.embed_norm, eps)
        x = target.linear(torch.cat((embedded, rms_norm(hidden, self.hidden_norm, eps)), dim=-1), self.fc)
        x = x + target.attend(layer, rms_norm(x, layer.input_norm, eps), cos, sin, metadata, pool, backend)
        return x + target.mlp(layer, rms_norm(x, layer.post_norm, eps))

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """float32 `[N, vocab_size]` of features `[N, hidden]`: which token comes behind the next."""
        return self.target.logits(features)

    def _check(self, next_tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata, pool: KVPool) -> None:
        wanted = (metadata.num_tokens, self.config.hidden)
        if tuple(hidden.shape) != wanted or next_tokens.shape != wanted[:1]:
            raise ValueError(
                f"draft head: {len(next_tokens)} next tokens and hidden states {list(hidden.shape)}, but the "
                f"batch wants {wanted[0]} and {list(wanted)}"
            )
        layers = self.target.config.layers + self.layers
        if pool.num_layers < layers:
            raise ValueError(
                f"draft head: the KV pool has {pool.num_layers} layers, model and head need {layers}"
            )


def _sizes(file: Path) -> dict[str, int]:
    """The sizes that a head's `config.json` says."""
    if not file.is_file():
        raise ValueError(f"no config.json in the draft head's directory {file.parent}")
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("architectures") != [ARCHITECTURE]:
        found = raw.get("architectures") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"{file} is no draft head's: architectures is {found!r}, must be [{ARCHITECTURE!r}]")
    for name in SIZES:
        size = raw.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{file}: {name} is {size!r}, must be a positive number")
    return {name: raw[name] for name in SIZES}
