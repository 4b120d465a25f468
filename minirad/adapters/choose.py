"""What machine.py asks this folder for, by name: a model with the adapters that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minirad.adapters.lora import Adapter
from minirad.adapters.model import AdapterLlama
from minirad.adapters.peft_format import read_adapter
from minirad.adapters.runner import AdapterRunner
from minirad.config import EngineConfig
from minirad.errors import said
from minirad.model.classroom import ADAPTERS
from minirad.model.llama import LlamaModel
from minirad.rooms import room

__all__ = ["AdapterRunner", "adapted", "directory", "shipped"]


def shipped() -> list[str]:
    """The names of the classroom Llama's own adapters."""
    return sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir()) if ADAPTERS.is_dir() else []


def directory(path: str | Path) -> Path:
    """Where an adapter lies: a directory, or the name of one that is shipped."""
    found = Path(path).expanduser()
    return ADAPTERS / str(path) if str(path) in shipped() and not found.is_dir() else found


def adapted(config: EngineConfig, model: LlamaModel) -> AdapterLlama:
    """The model with the adapters that the configuration names; around it belongs an AdapterRunner.

    Raises ValueError for an adapter that cannot be had or does not fit the model, and for what cannot go on
    with adapters.
    """
    if type(model) is not LlamaModel:
        raise ValueError(f"adapters correct a plain LlamaModel, not {said(type(model))}")
    if config.cuda_graphs:
        raise ValueError("cuda_graphs=True: captured steps have no adapters; leave it away, or the adapters")
    pairs: Iterable[tuple[str, str | Path]] = config.lora
    adapters: list[Adapter] = [
        read_adapter(name, directory(path), model.config, model.dtype, model.device) for name, path in pairs
    ]
    return AdapterLlama(model, adapters, _product(model))


def _product(model: LlamaModel) -> Any:
    """How the model's own matrices are multiplied fastest: on a CPU fast/ knows, elsewhere torch."""
    fast = room("fast.fused_llama") if model.device.type == "cpu" else None
    return LlamaModel.linear if fast is None else type(fast.faster(model)).linear
