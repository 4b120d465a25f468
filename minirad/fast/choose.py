"""What machine.py asks this folder for, by name: the runner, and the fastest attention that runs here."""

from __future__ import annotations

import torch

from minirad.attention.radix_attention import AttentionBackend
from minirad.config import EngineConfig
from minirad.fast.flashinfer import FlashInferAttention, what_is_missing
from minirad.fast.paged import TorchPagedAttention
from minirad.fast.runner import GraphRunner
from minirad.model.llama import LlamaModel

__all__ = ["Runner", "choose_attention"]

Runner = GraphRunner


def choose_attention(
    config: EngineConfig, model: LlamaModel, device: torch.device
) -> tuple[AttentionBackend, str]:
    """The backend that the config names; and what is missing, in one sentence, if "auto" fell back."""
    if config.attention == "torch":
        return TorchPagedAttention(), ""
    shape = model.config
    missing = what_is_missing(device, model.dtype, shape.head_dim)
    if not missing:
        return FlashInferAttention(shape.heads, shape.kv_heads, shape.head_dim, device=device), ""
    if config.attention == "flashinfer":
        raise ValueError(f"attention 'flashinfer' cannot run: {missing}; 'auto' and 'torch' run anywhere")
    if config.device == "cpu":  # a caller who asked for the CPU misses nothing
        return TorchPagedAttention(), ""
    where = "GPU" if device.type == "cuda" else "CPU"
    note = f"{missing}, so attention runs in plain torch on the {where}."
    return TorchPagedAttention(), note[:1].upper() + note[1:]
