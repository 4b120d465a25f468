"""Reads an adapter as Hugging Face's PEFT saves it: adapter_config.json and adapter_model.safetensors.

What this project would compute otherwise than PEFT does is refused, and so is every field that is not known
here and says something: a forgotten one would silently give other logits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minirad.adapters.lora import Adapter, Factors
from minirad.adapters.where import CONFIG
from minirad.errors import MOST, said
from minirad.model.config import LlamaConfig

WEIGHTS = "adapter_model.safetensors"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."

# Fields that say how it was made, or are looked at below. All others have to be empty.
_ABOUT = (
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config", "ensure_weight_tying",
)  # fmt: skip
_READ = (
    "peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "bias",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights",
)  # fmt: skip
_WHY = {
    "use_dora": "DoRA also scales the model's own weights",
    "modules_to_save": "whole matrices are not replaced, only corrected",
    "fan_in_fan_out": "a Llama's matrices lie the other way",
    "trainable_token_indices": "embeddings are not adapted",
    "lora_bias": "biases are not adapted",
    "alora_invocation_tokens": "an adapter holds for all of a prompt or none of it",
}
# Others begin with changed weights of the model itself, which the adapter does not hold.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


def read_adapter(name: str, path: Path, config: LlamaConfig, dtype: torch.dtype, device: Any) -> Adapter:
    """An adapter for a model of this shape, as numbers of this type.

    Raises ValueError, naming the adapter and what is wrong, for what cannot be read, fits another model, or
    would be computed otherwise here than by PEFT.
    """
    try:
        if not path.is_dir():
            raise ValueError(f"{path} is no directory")
        settings = _settings(path / CONFIG)
        shapes = {
            key.removesuffix(".weight"): (shape[0], shape[1])
            for key, shape in config.tensor_shapes().items()
            if key.endswith(tuple(f".{matrix}.weight" for matrix in MATRICES))
        }
        targets = _targets(settings, shapes)
        tensors = _tensors(path)
        factors = {
            target: _factors(settings, target, shapes[target], tensors, dtype, device) for target in targets
        }
        if tensors:
            raise ValueError(_surplus(next(iter(tensors))))
        return Adapter(name, factors, path)
    except ValueError as error:
        raise ValueError(f"adapter {said(name)}: {error}") from error


# ---------------------------------------------------------------------- the configuration


def _settings(file: Path) -> dict[str, Any]:
    """The checked content of adapter_config.json."""
    if not file.is_file():
        raise ValueError(f"no {CONFIG} in {file.parent}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {said(found)}")
    if found.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {said(found.get('peft_type'))}; only 'LORA' is supported")
    if found.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"task_type is {said(found['task_type'])}; only 'CAUSAL_LM' is supported")
    for field, value in found.items():
        if field not in _ABOUT + _READ and value:
            raise ValueError(f"{field} is {said(value)}: {_WHY.get(field, 'this is not supported')}")
    if found.get("bias", "none") != "none":
        raise ValueError(f"bias is {said(found['bias'])}: biases are not adapted, only 'none' is supported")
    beginning = found.get("init_lora_weights")
    if not any(beginning is each or beginning == each for each in _PLAIN_BEGINNINGS):
        raise ValueError(f"init_lora_weights is {said(beginning)}: the model's own weights were changed, too")
    _check_kinds(found)
    return found


def _check_kinds(found: Mapping[str, Any]) -> None:
    """ValueError for fields whose values are of another kind than PEFT writes."""

    def check(field: str, what: str, good: Callable[[Any], bool]) -> None:
        value = found.get(field)
        if value is not None and not good(value):
            raise ValueError(f"{field} must be {what}, got {said(value)}")

    check("use_rslora", "true or false", lambda value: isinstance(value, bool))
    check("r", "a whole number above 0", _is_rank)
    check("lora_alpha", "a number", _is_number)
    check("rank_pattern", "patterns with ranks", lambda value: _is_pattern(value, _is_rank))
    check("alpha_pattern", "patterns with numbers", lambda value: _is_pattern(value, _is_number))
    for field in ("target_modules", "exclude_modules", "layers_pattern"):
        check(field, "a text or a list of texts", _is_texts)
    check("layers_to_transform", "layer numbers", _is_layers)
    for field in ("target_modules", "exclude_modules"):
        if isinstance(found.get(field), str):
            _pattern(field, found[field])
    for field in ("rank_pattern", "alpha_pattern"):
        for key in found.get(field) or ():
            _pattern(field, key)
    layers, targets = found.get("layers_to_transform"), found.get("target_modules")
    if not targets:
        raise ValueError(f"target_modules is {said(targets)}: it names no module")
    if isinstance(targets, str) and (layers is not None or found.get("layers_pattern") is not None):
        raise ValueError(
            f"layers_to_transform does not go with the pattern {said(targets)} as target_modules"
        )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _is_pattern(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(good, value.values()))


def _is_texts(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(each, str) for each in value)
    )


def _is_layers(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) for each in many)


def _pattern(field: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{field}: {said(pattern)} is no regular expression: {error}") from error


# ---------------------------------------------------------------------- which matrices


def _targets(settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """The matrices that the configuration names, as PEFT understands it."""
    wanted = settings["target_modules"]
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
        named: Callable[[str], bool] = lambda key: True  # noqa: E731
    else:
        named = lambda key: _is_named(wanted, key)  # noqa: E731
        for other in ("model.embed_tokens", "lm_head"):
            if named(other):
                raise ValueError(f"target_modules names {other}: embeddings and the head are not adapted")
    excluded = settings.get("exclude_modules") or ()
    found = [key for key in shapes if named(key) and not _is_named(excluded, key)]
    found = [key for key in found if _is_in_layers(settings, key)]
    if not found:
        raise ValueError(
            f"target_modules {said(wanted)} names none of this model's matrices ({', '.join(MATRICES)} of "
            f"{len(shapes) // len(MATRICES)} layers)"
        )
    return found


def _is_named(wanted: str | Iterable[str], key: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, key) is not None
    return any(key == name or key.endswith(f".{name}") for name in wanted)


def _is_in_layers(settings: Mapping[str, Any], key: str) -> bool:
    layers, patterns = settings.get("layers_to_transform"), settings.get("layers_pattern") or r"[^.]*"
    if layers is None or layers == []:
        return True
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", key)
        if match is not None:
            return int(match["index"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _of_pattern(patterns: Mapping[str, Any] | None, key: str, usual: Any) -> Any:
    """What the first pattern that fits a module's name says; `usual` where none does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", key):
            return value
    return usual


# ---------------------------------------------------------------------- the numbers


def _tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of adapter_model.safetensors."""
    file = path / WEIGHTS
    if not file.is_file():
        other = "; adapter_model.bin may run code when it is read: save it again with safetensors"
        raise ValueError(f"no {WEIGHTS} in {path}" + (other if (path / "adapter_model.bin").exists() else ""))
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _factors(
    settings: Mapping[str, Any], target: str, shape: tuple[int, int], tensors: dict[str, Tensor],
    dtype: torch.dtype, device: Any,
) -> Factors:  # fmt: skip
    """One matrix' factors, which are taken out of `tensors`."""
    rank: int = _of_pattern(settings.get("rank_pattern"), target, settings.get("r", 8))
    alpha: float = _of_pattern(settings.get("alpha_pattern"), target, settings.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    factors = []
    for letter, wanted in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
        key = f"{PREFIX}{target}.lora_{letter}.weight"
        if key not in tensors:
            raise ValueError(f"tensor {key} {list(wanted)} is missing")
        tensor = tensors.pop(key)
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"tensor {key} has shape {list(tensor.shape)}, but rank {rank} and a matrix {list(shape)} of "
                f"this model want {list(wanted)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {key} is {tensor.dtype}: quantized adapters do not work")
        tensor = tensor.to(device=device, dtype=dtype)
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"tensor {key} holds what is no number (NaN or infinite)")
        factors.append(tensor)
    if not bool((factors[1] * scale).isfinite().all()):
        raise ValueError(f"{target}: lora_alpha {alpha} with rank {rank} makes numbers too large for {dtype}")
    return Factors(factors[0], factors[1], scale)


def _surplus(key: str) -> str:
    """Why a tensor that nobody asked for is refused."""
    matrix = re.fullmatch(rf"{re.escape(PREFIX)}model\.layers\.\d+\.\w+\.(\w+)\.lora_[AB]\.weight", key)
    if matrix is not None and matrix[1] in MATRICES:
        return f"tensor {key} is of a matrix that this model does not have, or target_modules does not name"
    return f"tensor {key} is not a factor of one of {', '.join(MATRICES)}: nothing else is adapted"
