"""Faster Llamas with the weights of a plain one (model/llama.py): the same numbers, to rounding.

`FusedLlama` runs on an NVIDIA GPU in half precision: between matrix products it launches one Triton kernel
(kernels.py) instead of five to ten of torch's, and the products of one token (one_token.py) and of up to
a hundred and twenty-eight (few_tokens.py) are kernels, too.
`CpuLlama` makes fewer calls of torch, and hands the large products of a CPU to oneDNN. `faster` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.fast.few_tokens import CUTS, FEW, FewTokens
from minirad.fast.one_token import OneToken
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import Layer, LlamaModel

__all__ = ["CpuLlama", "FusedLlama", "faster", "fused_runs"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

ONEDNN_FROM = 1 << 20  # multiplications; smaller products are not worth handing over (bench/LOG.md)


def faster(model: LlamaModel) -> LlamaModel:
    """The fastest that there is for a plain model, with the same tensors; any other model is left alone."""
    if getattr(model, "packed_matrices", False):  # multiplied in a way of their own (quant/)
        return CpuLlama(model, type(model).linear)
    if type(model) is not LlamaModel and not is_part(model):  # chosen before, or a caller's own
        return model
    if fused_runs(model.device, model.dtype, model.config.head_dim):
        return FusedLlama(model)
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return model
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return CpuLlama(model, onednn_linear if onednn else LlamaModel.linear)


def is_part(model: LlamaModel) -> bool:
    """Whether it is one rank's part of a model (ranks/model.py): its sums and scores come from all ranks."""
    return hasattr(model, "whole")


def fused_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the fused kernels run there: a GPU, half precision, Triton, heads of 2, 4, 8, ..."""
    half = dtype in (torch.bfloat16, torch.float16)
    power_of_two = head_dim & (head_dim - 1) == 0
    if device.type != "cuda" or not half or not power_of_two or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


class _SameModel(LlamaModel):
    """Another way to compute a given model: its attributes are that model's, also when they change later."""

    def __init__(self, model: LlamaModel) -> None:
        self.__dict__ = model.__dict__


class CpuLlama(_SameModel):
    """On a CPU in float32: for a few tokens a call costs as much as what it computes, so fewer calls.

    product: how matrices are multiplied.
    """

    __slots__ = ("product",)  # not the given model's

    def __init__(self, model: LlamaModel, product: Product) -> None:
        super().__init__(model)
        self.product = product

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.product(x, weight, bias)

    def through_layers(
        self, x: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        size, eps = (self.config.hidden,), self.config.rms_eps
        cos, sin = self.rotation(metadata.positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        for layer in self.layers:
            h = torch.rms_norm(x, size, layer.input_norm, eps)
            x = x + self.attend(layer, h, cos, sin, metadata, pool, backend)
            x = x + self.mlp(layer, torch.rms_norm(x, size, layer.post_norm, eps))
        return x

    def attend(
        self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        """As in the plain model; cos, sin `[T, 1, head_dim]`, as `rotated` takes them."""
        a = layer.attention
        qkv = self.linear(h, layer.qkv, layer.qkv_bias).view(h.shape[0], -1, a.head_dim)
        rotating = a.num_heads + a.num_kv_heads
        qk = rotated(qkv[:, :rotating], cos, sin)
        q, k = qk[:, : a.num_heads], qk[:, a.num_heads :]
        return self.row_linear(a(q, k, qkv[:, rotating:], metadata, pool, backend), layer.o, layer.o_bias)

    def logits(self, x: Tensor) -> Tensor:
        h = torch.rms_norm(x, (self.config.hidden,), self.norm, self.config.rms_eps)
        return self.all_scores(self.linear(h, self.head))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in three calls: cos `[T, 1, head_dim]` twice one after the other, sin first with a minus."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Large products by oneDNN: torch asks MKL, which is slower on processors that are not Intel's."""
    if len(x) * weight.numel() >= ONEDNN_FROM:
        return F.linear(x.to_mkldnn(), weight, bias).to_dense()
    return F.linear(x, weight, bias)


class FusedLlama(_SameModel):
    """On a GPU with Triton, in half precision.

    one_token, few_tokens: compute batches of one token and of a few; None, () to compute them like many: for
        comparing, and for a part of a model, whose sums over the ranks lie where those kernels add to the
        residual at once; and where few_tokens.py cannot cut a model of these sizes.
    """

    __slots__ = ("few_tokens", "kernels", "one_token")  # not the given model's

    def __init__(self, model: LlamaModel) -> None:
        super().__init__(model)
        self.kernels: Any = import_module("minirad.fast.kernels")
        c = self.config
        alone = OneToken(self.inv_freq, c.max_position_embeddings, c.rms_eps) if not is_part(model) else None
        self.one_token: OneToken | None = alone
        sizes = [most for most, cuts in CUTS.items() if FewTokens.fits(c, cuts)]
        self.few_tokens = () if alone is None else tuple(FewTokens(c, alone, most) for most in sizes)

    @torch.inference_mode()
    def compute(
        self, token_ids: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """`forward` without planning: the logits `[T, vocab_size]` of all tokens, in the type of the weights
        (of up to FEW tokens in float32).

        Nothing here waits for the device or copies from the host, so it can be captured in a CUDA graph.
        """
        short = self._short(len(token_ids))
        if isinstance(short, FewTokens) and len(token_ids) <= FEW and reads_pool_only(backend):
            return short.compute(self, token_ids, metadata, pool, backend)
        return self._scores(self.through_layers(F.embedding(token_ids, self.embed), metadata, pool, backend))

    def logits(self, x: Tensor) -> Tensor:
        return self._scores(x).float()

    def _short(self, tokens: int) -> OneToken | FewTokens | None:
        """What computes so few tokens."""
        if tokens == 1:
            return self.one_token
        paths = (few for few in self.few_tokens if (few.most > FEW) == (tokens > FEW))
        return next((few for few in paths if tokens <= few.most), None)

    def _scores(self, x: Tensor) -> Tensor:
        short = self._short(len(x))
        if short is not None and len(x) <= FEW:
            return short.logits(x, self.norm, self.head)
        return self.all_scores(
            self.linear(self.kernels.rms_norm(x, self.norm, self.config.rms_eps), self.head)
        )

    def through_layers(
        self, x: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        """As in the plain model; x is written over."""
        short = self._short(len(x))
        if short is not None and reads_pool_only(backend):
            return short.layers(x, self.layers, metadata, pool, backend)
        eps, add_norm = self.config.rms_eps, self.kernels.add_rms_norm
        cos, sin = self.rotation(metadata.positions)
        h = self.kernels.rms_norm(x, self.layers[0].input_norm, eps)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            h = add_norm(x, self.attend(layer, h, cos, sin, metadata, pool, backend), layer.post_norm, eps)
            delta = self.mlp(layer, h)
            if following is not None:
                h = add_norm(x, delta, following.input_norm, eps)
        return x + delta

    def attend(
        self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, pool: KVPool,
        backend: AttentionBackend,
    ) -> Tensor:  # fmt: skip
        if not reads_pool_only(backend):
            return super().attend(layer, h, cos, sin, metadata, pool, backend)
        a = layer.attention
        qkv = self.linear(h, layer.qkv, layer.qkv_bias).view(len(h), -1, a.head_dim)
        k, v = pool.k[a.layer_id], pool.v[a.layer_id]
        q = self.kernels.rotate_and_write(qkv, cos, sin, metadata.out_slots, k, v)
        attended = backend.run(a.layer_id, q, pool, a.scale).reshape(len(h), -1)
        return self.row_linear(attended, layer.o, layer.o_bias)

    def mlp(self, layer: Layer, h: Tensor) -> Tensor:
        gated = self.kernels.silu_mul(self.linear(h, layer.gate_up, layer.gate_up_bias))
        return self.row_linear(gated, layer.down, layer.down_bias)


def reads_pool_only(backend: AttentionBackend) -> bool:
    """Whether `backend.run` finds keys and values in the pool, so that a kernel may put them there instead
    of `backend.write`."""
    return bool(getattr(backend, "reads_pool_only", False))
