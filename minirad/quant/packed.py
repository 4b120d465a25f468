"""A Llama whose matrices are kept as float16 and multiplied by float32: half of the bytes a step reads.

FBGEMM, which torch brings for x86, widens the weights on the way, so that all sums are float32. A number of a
GGUF file (a scale times a few bits) loses at most 2^-11 of itself in float16; keys, values, norms and what
goes from layer to layer are float32. torch's products of 4 and 8 bits are not quicker (bench/LOG.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.model.llama import Layer, LlamaConfig, LlamaModel, rope_frequencies

__all__ = ["PackedLlama", "PackedMatrix", "can_pack", "packed"]

_PRODUCT: Any = getattr(torch.ops.quantized, "linear_dynamic_fp16", None)
if _PRODUCT is not None:  # the operator itself, without a tracer's questions, which take longer than a row
    _PRODUCT = getattr(_PRODUCT.default, "_op", _PRODUCT)

MOST = 65504.0  # of float16
MATRICES = ("qkv", "o", "gate_up", "down")


class PackedMatrix:
    """One matrix as FBGEMM keeps it, float16. shape: `[out, in]`."""

    __slots__ = ("data", "shape")

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self.data: Any = torch.ops.quantized.linear_prepack_fp16(weight, None)


def can_pack() -> bool:
    """Whether torch has FBGEMM here: on x86 with AVX2 it does."""
    return _PRODUCT is not None and "fbgemm" in torch.backends.quantized.supported_engines


def packed(weight: Tensor) -> Any:
    """A matrix float32 `[out, in]`, packed; itself where that cannot be, or float16 does not hold it."""
    fits = can_pack() and bool(weight.abs().max() <= MOST)  # False for NaN as well
    return PackedMatrix(weight) if fits else weight


class PackedLlama(LlamaModel):
    """A Llama on the CPU, float32 but for its matrices.

    layers: one by one, so that only one of them is in memory as float32. head: `[vocab, hidden]`, None for
    the embedding itself.
    """

    packed_matrices = True  # adapters/ and fast/ leave the products to this class

    def __init__(
        self, config: LlamaConfig, embed: Tensor, norm: Tensor, head: Tensor | None, layers: Iterable[Layer]
    ) -> None:
        self.config, self.embed, self.norm = config, embed, norm
        self.head = packed(embed if head is None else head)
        self.layers = [
            replace(layer, **{name: packed(getattr(layer, name)) for name in MATRICES}) for layer in layers
        ]
        self.inv_freq = rope_frequencies(config)

    @staticmethod
    def linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x float32 `[T, in]` times a packed matrix (or a plain one), plus bias: `[T, out]`.

        How many rows there are decides in which order a row is summed up: its last bits may differ.
        """
        if not isinstance(weight, PackedMatrix):
            return F.linear(x, weight, bias)
        y: Tensor = _PRODUCT(x, weight.data)
        return y if bias is None else y + bias
