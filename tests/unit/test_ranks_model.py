"""A Llama cut into ranks: the parts together compute what the whole one does. Ranks are threads here."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support import TINY, tiny_config

from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.model.llama import LlamaConfig, LlamaModel, random_weights
from minirad.ranks.model import ShardedLlama, cutter, local_config, named_weights


class Threads:
    """What a model asks of its group (ranks/group.py), among threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._tensors = size, threading.Barrier(size), [torch.empty(0)] * size

    def of(self, rank: int) -> Any:
        return _Member(self, rank)

    def meet(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[rank] = tensor.clone()
        self._barrier.wait(300)
        everyone = list(self._tensors)
        self._barrier.wait(300)
        return everyone


class _Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._threads.meet(self._rank, tensor)).sum(0))

    def join(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._threads.meet(self._rank, tensor)


def shapes() -> dict[str, LlamaConfig]:
    tiny = tiny_config()
    return {
        "two": tiny,
        "kv heads on two ranks each": tiny,
        "biases": dataclasses.replace(tiny, attention_bias=True, mlp_bias=True),
        "head of its own": dataclasses.replace(tiny, tied=False),
        "many heads": dataclasses.replace(tiny, heads=8, kv_heads=8, head_dim=4),
    }


@pytest.mark.parametrize(("name", "size"), [
    ("two", 2), ("kv heads on two ranks each", 4), ("biases", 2), ("head of its own", 2),
    ("head of its own", 4), ("many heads", 8), ("biases", 4),
])  # fmt: skip
def test_the_parts_together_say_what_the_whole_model_says(name: str, size: int) -> None:
    config = shapes()[name]
    weights = random_weights(config, 3, dtype=torch.float32, device="cpu")
    whole = LlamaModel(config, weights)
    tokens = torch.tensor([5, 9, 5, 60, 0, 7, 7])
    wanted = logits(whole, tokens)
    threads = Threads(size)

    def rank(number: int) -> torch.Tensor:
        cut = cutter(config, number, size)
        parts = {name: cut(name, tensor) for name, tensor in weights.items()}
        return logits(ShardedLlama(config, parts, number, size, threads.of(number)), tokens)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(rank, range(size)))
    assert all(torch.equal(each, found[0]) for each in found), "the same bits on every rank"
    assert found[0].shape == wanted.shape
    assert torch.allclose(found[0], wanted, atol=1e-5), (found[0] - wanted).abs().max()


def logits(model: LlamaModel, tokens: torch.Tensor) -> torch.Tensor:
    rows = np.arange(1, len(tokens) + 1)[None]
    metadata = build_metadata(rows, [BatchEntry(0, 0, len(tokens))], 1, model.device)
    pool = model.new_pool(len(tokens) + 1)
    assert pool.k[0].shape[1] == model.config.kv_heads
    return model.forward(tokens, metadata, pool, GatherAttention(), torch.arange(len(tokens)))


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_are_the_whole(size: int) -> None:
    """Nothing is lost, and only KV heads are there twice."""
    config = dataclasses.replace(tiny_config(), attention_bias=True, mlp_bias=True, tied=False)
    weights = random_weights(config, 1, dtype=torch.float32, device="cpu")
    parts = [{n: cutter(config, rank, size)(n, w) for n, w in weights.items()} for rank in range(size)]
    local = local_config(config, size)
    for name, shape in local.tensor_shapes().items():
        if name == "lm_head.weight":
            shape = (-(-config.vocab_size // size), config.hidden)
        if name != "model.embed_tokens.weight":
            assert all(part[name].shape == shape for part in parts), name
    for name, dim in (
        ("q_proj.weight", 0),
        ("gate_proj.bias", 0),
        ("o_proj.weight", 1),
        ("down_proj.weight", 1),
    ):
        full = next(key for key in weights if key.endswith(name))
        assert torch.equal(torch.cat([part[full] for part in parts], dim), weights[full])
    head = torch.cat([part["lm_head.weight"] for part in parts])
    assert torch.equal(head[: config.vocab_size], weights["lm_head.weight"])
    assert not head[config.vocab_size :].any()
    key = "model.layers.0.self_attn.k_proj.weight"
    kept = [parts[rank][key] for rank in range(0, size, size // 2)]
    assert torch.equal(torch.cat(kept), weights[key])


@pytest.mark.parametrize("change", [{}, {"attention_bias": True, "mlp_bias": True}, {"tied": False}])
def test_the_names_of_a_ready_models_weights(change: dict[str, Any]) -> None:
    config = dataclasses.replace(tiny_config(), **change)
    weights = random_weights(config, 2, dtype=torch.float32, device="cpu")
    named = named_weights(LlamaModel(config, weights))
    assert named.keys() == weights.keys()
    assert all(torch.equal(named[name], weights[name]) for name in weights)


TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4}


@pytest.mark.parametrize(("change", "size", "sentence"), [
    ({}, 3, r"tp=3 does not divide the model's heads, 4"),
    ({"intermediate_size": 47}, 2, r"tp=2 does not divide the model's intermediate, 47"),
    (TWELVE, 4, r"tp=4 and the model's 3 kv heads: one must divide the other"),
    (TWELVE, 2, r"tp=2 and the model's 3 kv heads: one must divide the other"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(change: dict[str, Any], size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        local_config(LlamaConfig.from_dict({**TINY, **change}), size)
