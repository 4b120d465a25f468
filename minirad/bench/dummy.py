"""Random weights in the shape of known models: for measuring where the real weights are not at hand.

Time and memory depend on shapes, not on values, so a benchmark needs no download. The answers are
noise; but finite noise: every matrix keeps the size of what goes through it, so that logits are about
as large as those of a trained model's less certain tokens, in float16 as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minirad.model.llama import LlamaConfig, LlamaModel

__all__ = ["SHAPES", "dummy_config", "dummy_model"]

_COMMON: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
_LLAMA_3: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_STRETCHED: Mapping[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "rope_scaling": {**_STRETCHED, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "rope_scaling": {**_STRETCHED, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        **_COMMON,
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
}
"""What each model's `config.json` says of its shape."""


def dummy_config(name: str) -> LlamaConfig:
    """The configuration of a known shape; ValueError for a name that is not in `SHAPES`."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return LlamaConfig.from_dict(SHAPES[name])


def dummy_model(name: str, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> LlamaModel:
    """A model of a known shape, the same for equal seeds on the same kind of device."""
    config = dummy_config(name)
    return LlamaModel(config, dummy_weights(config, dtype, device, seed))


def dummy_weights(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> dict[str, Tensor]:
    """Normal with variance 1 / (inputs of the matrix); norms near one. Drawn where they will lie."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        noise = torch.randn(shape, generator=generator, device=device)
        if len(shape) == 2:
            weights[name] = noise.mul_(shape[1] ** -0.5).to(dtype)
        else:
            weights[name] = noise.mul_(0.02).add_(1.0 if "norm" in name else 0.0).to(dtype)
    return weights
