"""What a Llama layer does between its matrix products, in torch or in fused kernels.

`TorchOps` is the plain arithmetic, to be read and compared with; it runs everywhere. `FusedOps` is the
same on a GPU with Triton (model/kernels.py): fewer launches. (For one token even the products have kernels of
their own: model/one_token.py.) A model chooses by where its weights lie; both can be had anywhere they
run, to compare.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FusedOps", "Ops", "TorchOps", "best_ops"]


class Ops(Protocol):
    """Shapes: x `[T, width]`."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class TorchOps:
    """Plain torch."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32 whatever x's type."""
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        return weight * h.to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x `[T, in]` times weight `[out, in]` transposed: `[T, out]`.

        For float32 on a CPU torch asks MKL, which takes its slower path on processors that are not
        Intel's; oneDNN, which torch also brings, was 1.8 to 2.2 times as fast there. Handing over costs
        about 20 microseconds, so small products stay where they are.
        """
        large = len(x) * weight.numel() >= 1 << 20
        if large and _onednn_takes(x):
            return F.linear(x.to_mkldnn(), weight, bias).to_dense()
        return F.linear(x, weight, bias)


class FusedOps:
    """Triton's kernels; x and gate_up have to be contiguous. `add_rms_norm` adds in place."""

    name = "fused"

    def __init__(self) -> None:
        self.kernels: Any = import_module("minirad.model.kernels")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self.kernels.rms_norm(x, weight, eps)
        return normed

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x, self.kernels.add_rms_norm(x, delta, weight, eps)

    def rotate_and_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Rotated queries; keys and values are in the pool's layer afterwards (see kernels.py)."""
        q: Tensor = self.kernels.rotate_and_write(qkv, cos, sin, slots, k, v)
        return q

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self.kernels.silu_mul(gate_up)
        return product

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)


def best_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> Ops:
    """Fused kernels on a GPU in half precision, where Triton is installed; else torch."""
    half = dtype in (torch.bfloat16, torch.float16)
    power_of_two = head_dim & (head_dim - 1) == 0
    if device.type != "cuda" or not half or not power_of_two or find_spec("triton") is None:
        return TorchOps()
    return FusedOps() if torch.cuda.get_device_capability(device) >= (8, 0) else TorchOps()


def _onednn_takes(x: Tensor) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and x.device.type == "cpu" and x.dtype == torch.float32
