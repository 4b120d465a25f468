"""A Llama with adapters: each token's matrix products are corrected by its own request's adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.adapters.lora import Adapter
from minirad.attention.metadata import AttentionMetadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_FUSED = (  # which matrices of which block lie in which tensor of a layer, one below the other
    ("qkv", "self_attn", ("q_proj", "k_proj", "v_proj")),
    ("o", "self_attn", ("o_proj",)),
    ("gate_up", "mlp", ("gate_proj", "up_proj")),
    ("down", "mlp", ("down_proj",)),
)


class AdapterLlama(LlamaModel):
    """A plain Llama's weights, and adapters by their names. plain: the model without them.

    names_of_rows: which adapter the request in each row has; a row that is not there has none. (runner.py
    keeps it.) product: how the model's own matrices are multiplied (fast/ has another way).
    """

    def __init__(
        self, model: LlamaModel, adapters: Sequence[Adapter], product: Product = LlamaModel.linear
    ) -> None:
        self.__dict__.update(model.__dict__)  # the same tensors
        self.plain = model
        self.adapters = {adapter.name: adapter for adapter in adapters}
        self.names_of_rows: dict[int, str] = {}
        self._product = product
        self._groups: list[tuple[str, Tensor | None]] = []
        # By the tensor itself: a layer's fields do not know their names when they are multiplied.
        self._corrections: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        for index, layer in enumerate(self.layers):
            for field, block, parts in _FUSED:
                names = [f"model.layers.{index}.{block}.{part}" for part in parts]
                heights = self._heights(parts)
                found = {each.name: _fused(each, names, heights) for each in adapters if _has(each, names)}
                if found:
                    self._corrections[id(getattr(layer, field))] = found

    def with_weights(self, model: LlamaModel) -> AdapterLlama:
        """The same adapters over other weights of the same shape."""
        other = AdapterLlama(model, list(self.adapters.values()), self._product)
        other.names_of_rows = self.names_of_rows
        return other

    def through_layers(
        self, x: Tensor, metadata: AttentionMetadata, pool: KVPool, backend: AttentionBackend
    ) -> Tensor:
        self._groups = self._groups_of(metadata)
        return super().through_layers(x, metadata, pool, backend)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """The plain product, and for the tokens of each adapter that corrects this matrix B (A x) added."""
        y = self._product(x, weight, bias)
        corrections = self._corrections.get(id(weight), {}) if self._groups else {}
        for name, places in self._groups:
            if name not in corrections:
                continue
            a, b = corrections[name]
            if places is None:
                y.addmm_(F.linear(x, a), b)
            else:
                y.index_add_(0, places, F.linear(x[places], a) @ b)
        return y

    def _groups_of(self, metadata: AttentionMetadata) -> list[tuple[str, Tensor | None]]:
        """For each adapter in a batch its tokens: int64 `[T']`, or None for all of them."""
        places: dict[str, list[int]] = {}
        for at, entry in enumerate(metadata.entries):
            name = self.names_of_rows.get(entry.row, "")
            if name:
                start, stop = metadata.q_indptr[at : at + 2].tolist()
                places.setdefault(name, []).extend(range(start, stop))
        return [
            (name, None if len(at) == metadata.num_tokens else torch.tensor(at, device=self.device))
            for name, at in places.items()
        ]

    def _heights(self, parts: Sequence[str]) -> list[int]:
        shapes = self.config.tensor_shapes()
        block = "self_attn" if parts[0] in ("q_proj", "o_proj") else "mlp"
        return [shapes[f"model.layers.0.{block}.{part}.weight"][0] for part in parts]


def _has(adapter: Adapter, names: Sequence[str]) -> bool:
    return any(name in adapter.factors for name in names)


def _fused(adapter: Adapter, names: Sequence[str], heights: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The factors of matrices that lie one below the other: a `[R, in]`, b `[R, out]` with the scale in it.

    Each of the R ranks adds to its own matrix' outputs only: b is 0 elsewhere.
    """
    found = [adapter.factors.get(name) for name in names]
    blocks = []
    for at, (factors, height) in enumerate(zip(found, heights, strict=True)):
        if factors is not None:
            before, behind = sum(heights[:at]), sum(heights[at + 1 :])
            blocks.append(F.pad((factors.b * factors.scale).t(), (before, behind)))
            assert blocks[-1].shape[1] == before + height + behind
    return torch.cat([each.a for each in found if each is not None]), torch.cat(blocks).contiguous()
