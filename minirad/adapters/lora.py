"""An adapter: for some of a Llama's matrices the two factors of what is added to them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What is added to one matrix `[out, in]`: scale * b @ a, with a `[rank, in]` and b `[out, rank]`."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter as it was read.

    factors: by the matrix' name, such as "model.layers.0.self_attn.q_proj". path: where it came from.
    """

    name: str
    factors: Mapping[str, Factors]
    path: Path | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all numbers: the same for equal adapters of any name, in any process."""
        found = hashlib.sha256()
        for name, each in sorted(self.factors.items()):
            found.update(f"{name} {each.scale!r}".encode())
            for factor in (each.a, each.b):
                found.update(f" {factor.dtype} {tuple(factor.shape)} ".encode())
                found.update(factor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    @property
    def num_parameters(self) -> int:
        """Numbers in all factors."""
        return sum(each.a.numel() + each.b.numel() for each in self.factors.values())
