"""A Llama's part on one rank of several, as Megatron-LM cuts it.

    q, k, v, gate, up     by their outputs (whole heads): each rank computes some, nobody waits
    o, down               by their inputs: each rank computes a summand, `all_reduce` adds them up
    lm_head               by its outputs: each rank scores some of the vocabulary, `all_gather` joins them
    embedding, norms      on every rank

So the ranks meet twice a layer and once at the end. Where there are fewer KV heads than ranks, neighbouring
ranks keep the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirad.model.llama import LlamaConfig, LlamaModel

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def local_config(config: LlamaConfig, size: int) -> LlamaConfig:
    """The shape of one rank's part; ValueError, in one sentence, where a model cannot be cut like that."""
    for name, count in (("heads", config.heads), ("intermediate", config.intermediate)):
        if count % size:
            raise ValueError(f"tp={size} does not divide the model's {name}, {count}")
    if config.kv_heads % size and size % config.kv_heads:
        raise ValueError(
            f"tp={size} and the model's {config.kv_heads} kv heads: one must divide the other, so that every "
            "rank has as many"
        )
    return dataclasses.replace(
        config, heads=config.heads // size, kv_heads=max(config.kv_heads // size, 1),
        intermediate=config.intermediate // size,
    )  # fmt: skip


def cutter(config: LlamaConfig, rank: int, size: int) -> Callable[[str, Tensor], Tensor]:
    """What cuts a rank's part out of a weight of the whole model, by its name."""
    local, depth = local_config(config, size), config.head_dim
    copies = max(size // config.kv_heads, 1)  # ranks that keep the same KV heads

    def cut(name: str, tensor: Tensor) -> Tensor:
        block = name.split(".")[-2]
        if block in ("k_proj", "v_proj"):
            return _part(tensor, rank // copies, local.kv_heads * depth, 0)
        if block in COLUMNS:
            return _part(tensor, rank, tensor.shape[0] // size, 0)
        if block in ROWS and name.endswith(".weight"):
            return _part(tensor, rank, tensor.shape[1] // size, 1)
        if block == "lm_head":
            return head_part(tensor, rank, size)
        return tensor

    return cut


def _part(tensor: Tensor, at: int, length: int, dim: int) -> Tensor:
    return tensor.narrow(dim, at * length, length).clone(memory_format=torch.contiguous_format)


def head_part(head: Tensor, rank: int, size: int) -> Tensor:
    """One rank's rows of the output matrix; the last rank's are filled up with zeros."""
    rows = -(-head.shape[0] // size)
    part = head[rank * rows : (rank + 1) * rows]
    return F.pad(part, (0, 0, 0, rows - len(part))) if len(part) < rows else part.clone()


class ShardedLlama(LlamaModel):
    """One rank's part of a Llama. `config` is the part's shape (its heads are this rank's), `whole` all.

    weights: already cut (`cutter`), by their transformers names.
    group: adds up and joins what the ranks have (group.py).
    """

    def __init__(
        self, whole: LlamaConfig, weights: Mapping[str, Tensor], rank: int, size: int, group: Any
    ) -> None:
        super().__init__(local_config(whole, size), weights)
        self.whole, self.group = whole, group
        if whole.tied:
            self.head = head_part(self.embed, rank, size)
        # Found in the object, not in its class: a faster model of the same tensors shares its attributes.
        self.__dict__["row_linear"] = self._row_linear
        self.__dict__["all_scores"] = self._all_scores

    def _row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum over all ranks of x `[T, in / size]` times weight `[out, in / size]`, plus bias once."""
        y = self.linear(x, weight)
        self.group.add_up(y)
        return y if bias is None else y + bias

    def _all_scores(self, scores: Tensor) -> Tensor:
        """All ranks' columns `[N, rows]` side by side: `[N, vocab_size]`."""
        parts: list[Tensor] = self.group.join(scores.contiguous())
        return torch.cat(parts, dim=-1)[:, : self.whole.vocab_size]


def named_weights(model: LlamaModel) -> dict[str, Tensor]:
    """A whole model's weights by their transformers names: what `LlamaModel` was made of."""
    c = model.config
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    if not c.tied:
        weights["lm_head.weight"] = model.head
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        weights[prefix + "input_layernorm.weight"] = layer.input_norm
        weights[prefix + "post_attention_layernorm.weight"] = layer.post_norm
        for kind in ("weight", "bias"):
            bias = "_bias" if kind == "bias" else ""
            fused = {name: getattr(layer, name + bias) for name in ("qkv", "o", "gate_up", "down")}
            if fused["qkv"] is not None:
                for name, part in zip("qkv", fused["qkv"].split([q, kv, kv]), strict=True):
                    weights[f"{prefix}self_attn.{name}_proj.{kind}"] = part
                weights[f"{prefix}self_attn.o_proj.{kind}"] = fused["o"]
            if fused["gate_up"] is not None:
                for name, part in zip(("gate", "up"), fused["gate_up"].chunk(2), strict=True):
                    weights[f"{prefix}mlp.{name}_proj.{kind}"] = part
                weights[f"{prefix}mlp.down_proj.{kind}"] = fused["down"]
    return weights
