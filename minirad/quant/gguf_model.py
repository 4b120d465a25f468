"""A Llama of a GGUF file: its shape and tokenizer as a Hugging Face directory, its weights from the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirad.model import smollm2
from minirad.model.config import LlamaConfig
from minirad.model.llama import Layer
from minirad.quant.gguf_file import GGUFFile
from minirad.quant.packed import PackedLlama

__all__ = ["directory", "load"]

TOKENIZERS = ("smollm",)  # how text is split before BPE: what smollm2.py writes
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3: by what each pair's frequency is divided


def directory(file: GGUFFile) -> Path:
    """The directory in the user's cache with the model's config.json and tokenizer; made if it is not there.

    Raises ValueError for a model that is no Llama, and for a tokenizer that this project cannot write.
    """

    def make(work: Path) -> None:
        smollm2.write_json(work / "config.json", hf_config(file))
        _write_tokenizer(work, file)

    return smollm2.made_once(smollm2.cache_dir() / f"{file.path.stem}-{file.fingerprint:08x}-gguf1", make)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's fields in config.json's words."""
    fields = file.fields
    if fields.get("general.architecture") != "llama":
        raise ValueError(
            f"{file.path} holds a {fields.get('general.architecture')!r}; only 'llama' is supported"
        )
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: llama.rope.scaling.type {scaling!r} is not supported")
    try:
        config = {**smollm2.hf_config(fields), "tie_word_embeddings": "output.weight" not in file.tensors}
        if scaling == "linear":
            config["rope_scaling"] = {"rope_type": "linear", "factor": fields["llama.rope.scaling.factor"]}
        LlamaConfig.from_dict(config)  # raises for what is no number
        return config
    except KeyError as missing:
        raise ValueError(f"{file.path}: the field {missing} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{file.path}: a field is not what it must be: {error}") from None


def _write_tokenizer(work: Path, file: GGUFFile) -> None:
    kind = file.fields.get("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in TOKENIZERS:
        raise ValueError(
            f"{file.path} has the tokenizer {' '.join(map(str, kind))}; only byte-level BPE that splits as "
            f"{', '.join(TOKENIZERS)} does is supported"
        )
    try:
        smollm2.write_tokenizer(work, file.fields)
    except Exception as error:  # what is wrong in the lists comes out as anything
        raise ValueError(f"{file.path}: its tokenizer cannot be read: {error!r}") from error


def load(file: GGUFFile) -> PackedLlama:
    """The model; ValueError names a tensor that is missing, too much, of another shape or cannot be read."""
    config = LlamaConfig.from_dict(hf_config(file))
    names = _names(config)
    shapes = config.tensor_shapes()
    for name in file.tensors:
        if name not in names and name != ROPE_FACTORS:
            raise ValueError(f"{file.path}: unexpected tensor {name}")

    def read(name: str) -> Tensor:
        found = file.tensors.get(name)
        if found is None or found.shape != shapes[names[name]]:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ValueError(f"{file.path}: tensor {name} {list(shapes[names[name]])} {what}")
        values = found.dequantized()
        for part, heads in (("attn_q", config.heads), ("attn_k", config.kv_heads)):
            if name.split(".")[-2] == part:
                values = smollm2.half_split(values, heads)
        return torch.from_numpy(values)

    def layers() -> Iterator[Layer]:
        for i in range(config.layers):
            mine = {names[name]: read(name) for name in names if name.startswith(f"blk.{i}.")}
            yield Layer.from_weights(config, mine, i)

    head = None if config.tied else read("output.weight")
    model = PackedLlama(config, read("token_embd.weight"), read("output_norm.weight"), head, layers())
    if ROPE_FACTORS in file.tensors:
        model.inv_freq = model.inv_freq / torch.from_numpy(file.tensors[ROPE_FACTORS].dequantized())
    return model


def _names(config: LlamaConfig) -> dict[str, str]:
    """transformers' names of all tensors by GGUF's."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in smollm2.OTHER_NAMES.items()}
    if not config.tied:
        names["output.weight"] = "lm_head.weight"
    for i in range(config.layers):
        for ours, theirs in smollm2.BLOCK_NAMES.items():
            names[f"blk.{i}.{ours}.weight"] = f"model.layers.{i}.{theirs}.weight"
    return names
