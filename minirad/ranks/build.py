"""An engine's parts on one rank: its part of the model, and a pool for its heads."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from minirad import machine
from minirad.bench.dummy import dummy_config, dummy_weights
from minirad.config import EngineConfig
from minirad.model.config import LlamaConfig
from minirad.model.llama import LlamaModel
from minirad.model.load import load_weights, resolve_model
from minirad.parts import Parts
from minirad.ranks.group import Group
from minirad.ranks.model import ShardedLlama, cutter, local_config, named_weights

Sent = tuple[LlamaConfig, torch.dtype]  # what is said of a ready model before its weights


def rank_device(config: EngineConfig, group: Group, ready: bool) -> torch.device:
    """Where this rank computes: on a GPU of its own (LOCAL_RANK), or on the CPU."""
    if ":" in config.device:
        raise ValueError(
            f"device {config.device!r} with tp={config.tp}: each rank takes a GPU of its own, say 'cuda'"
        )
    device = machine.choose_device("cpu" if ready else config.device, None)
    if device.type != "cuda":
        return device
    local, there = int(os.environ.get("LOCAL_RANK", group.rank)), torch.cuda.device_count()
    if local >= there:
        raise ValueError(f"tp={config.tp}: rank {group.rank} needs GPU {local}, here are {there}")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def send_weights(group: Group, model: LlamaModel | None, sent: Sent) -> dict[str, torch.Tensor]:
    """This rank's part of a model that only rank 0 has, on the host."""
    config, dtype = sent
    cut = cutter(config, group.rank, group.size)
    whole = {} if model is None else named_weights(model)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        tensor = whole[name].detach().cpu().contiguous() if whole else torch.empty(shape, dtype=dtype)
        group.share_tensor(tensor)
        weights[name] = cut(name, tensor)
    return weights


def shard(
    group: Group, config: LlamaConfig, weights: dict[str, torch.Tensor], device: torch.device
) -> ShardedLlama:
    """The model of cut weights, where this rank computes."""
    placed = {name: tensor.to(device) for name, tensor in weights.items()}
    group.model_group(device)
    return ShardedLlama(config, placed, group.rank, group.size, group)


def read_weights(
    group: Group, config: EngineConfig, path: Any, device: torch.device
) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """The shape of the model that the configuration names, and this rank's part of its weights."""
    dtype = machine.choose_dtype(config.dtype, device)
    if config.dummy_weights is not None:
        shape = dummy_config(config.dummy_weights)
        cut = cutter(shape, group.rank, group.size)
        return shape, {n: cut(n, w) for n, w in dummy_weights(shape, dtype, device).items()}
    shape = LlamaConfig.from_dir(path)
    cut = cutter(shape, group.rank, group.size)
    return shape, load_weights(path, shape, dtype, device, cut)


def build(
    group: Group, config: EngineConfig, sent: Sent | None, model: LlamaModel | None, tokenizer: Any
) -> Parts:
    """The parts of an engine of which the ranks agreed that each could make them; else ValueError, on all.

    sent: says that a ready model comes, which is `model` on rank 0.
    """
    problem, path, sharded, own = "", None, None, config
    device = torch.device("cpu")
    weights = {} if sent is None else send_weights(group, model, sent)
    try:
        ready = sent is not None and (model is None or model.device.type == "cpu")
        device = rank_device(config, group, ready)
        if sent is None:
            path = None if config.dummy_weights is not None else resolve_model(config.model)
            shape, weights = read_weights(group, config, path, device)
        else:
            shape = sent[0]
        local_config(shape, group.size)
        problem = ""
    except Exception as error:
        problem = str(error) or type(error).__name__
    _require_all(group, problem)
    sharded = shard(group, shape, weights, device)
    own = dataclasses.replace(config, device=str(device), kv_tokens=_kv_tokens(group, config, sharded))
    try:
        parts = machine.put_together(own, None, sharded, tokenizer, path)
    except Exception as error:
        problem = str(error) or type(error).__name__
    _require_all(group, problem)
    return parts


def _kv_tokens(group: Group, config: EngineConfig, model: ShardedLlama) -> int | None:
    """As many as fit on every rank, where the configuration leaves it to the machine."""
    if config.kv_tokens is not None or model.device.type != "cuda":
        return config.kv_tokens
    page = config.page_size
    fit: int = min(group.gather_any(machine.kv_tokens_that_fit(model, model.device)))
    return max(fit // page, 1) * page


def _require_all(group: Group, problem: str) -> None:
    """ValueError, on every rank, if one of them has a problem."""
    problems = group.gather_any(problem, patient=True)
    if problem:
        raise ValueError(problem)
    for rank, other in enumerate(problems):
        if other:
            raise ValueError(f"rank {rank} could not make its part of the engine: {other}")
