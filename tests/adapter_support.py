"""Shared by the tests of adapters: directories as PEFT writes them, with random factors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minirad.model.llama import LlamaConfig

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6,
    "target_modules": ["q_proj", "v_proj"], "bias": "none", "use_dora": False,
    "modules_to_save": None, "inference_mode": True,
}  # fmt: skip


def factors_for(
    config: LlamaConfig, modules: Sequence[str], rank: int, seed: int, size: float = 0.1
) -> dict[str, Tensor]:
    """Random factors of all layers' matrices of these names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, shape in config.tensor_shapes().items():
        name = key.removesuffix(".weight")
        if name.rpartition(".")[2] in modules:
            for letter, wanted in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                factor = torch.randn(wanted, generator=generator) * size
                found[f"base_model.model.{name}.lora_{letter}.weight"] = factor
    return found


def write_adapter(
    directory: Path, config: LlamaConfig, seed: int = 0, settings: Mapping[str, Any] | None = None,
    size: float = 0.1,
) -> Path:  # fmt: skip
    """A directory in PEFT's format; settings: over PLAIN."""
    said = {**PLAIN, **(settings or {})}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    tensors = factors_for(config, said["target_modules"], said["r"], seed, size)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def change_settings(directory: Path, **changes: Any) -> None:
    """Other fields in adapter_config.json; None of `...` takes a field away."""
    file = directory / "adapter_config.json"
    said = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    kept = {name: value for name, value in said.items() if value is not ...}
    file.write_text(json.dumps(kept), encoding="utf-8")


def change_tensors(directory: Path, **changes: Tensor | None) -> None:
    """Other tensors, by their names with "__" for "."; None takes one away."""
    file = directory / "adapter_model.safetensors"
    tensors = {**load_file(file)}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file)
