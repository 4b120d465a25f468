"""What machine.py asks this folder for, by name: a model with the adapters that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minirad.adapters.model import AdapterLlama
from minirad.adapters.peft_format import read_adapter
from minirad.adapters.runner import AdapterRunner
from minirad.adapters.where import directory
from minirad.config import EngineConfig
from minirad.errors import said
from minirad.model.llama import LlamaModel
from minirad.rooms import room

__all__ = ["Adapted", "adapters"]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model with adapters, for a runner that is then put into `around`."""

    model: AdapterLlama

    def around(self, runner: Any) -> AdapterRunner:
        """The runner that computes with this model, which is told whose rows are whose."""
        return AdapterRunner(runner)


def adapters(config: EngineConfig, model: LlamaModel) -> Adapted:
    """The model with the adapters that the configuration names.

    Raises ValueError for an adapter that cannot be had or does not fit the model, and for what cannot go on
    with adapters.
    """
    if type(model) is not LlamaModel and not _is_packed(model):
        raise ValueError(f"adapters correct a plain LlamaModel, not {said(type(model))}")
    if config.cuda_graphs:
        raise ValueError("cuda_graphs=True: captured steps have no adapters; leave it away, or the adapters")
    found = [
        read_adapter(name, directory(name, path), model.config, model.dtype, model.device)
        for name, path in config.lora
    ]
    return Adapted(AdapterLlama(model, found, _product(model)))


def _product(model: LlamaModel) -> Any:
    """How the model's own matrices are multiplied fastest: on a CPU fast/ knows, elsewhere torch."""
    fast = room("fast.fused_llama") if model.device.type == "cpu" else None
    return (model if fast is None else fast.faster(model)).linear


def _is_packed(model: LlamaModel) -> bool:
    """Whether it is a Llama that multiplies its matrices in a way of its own (quant/)."""
    return bool(getattr(model, "packed_matrices", False))
