"""A tiny random Llama in a directory of its own, with a Llama-2-style tokenizer, and replies by script.

The tokenizer falls back on bytes, puts a space before every text and takes it away when decoding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from minirad.model.llama import LlamaConfig, random_weights

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = [
    *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁", *map(chr, range(33, 127)), "é", "▁the", "▁stop", "好", "▁a", "▁b",
]  # fmt: skip
VOCAB = {word: number for number, word in enumerate(WORDS)}
BOS, EOS = VOCAB["<s>"], VOCAB["</s>"]


def make_model(path: Path, *, tokenizer: dict[str, Any] | None = None, **config: Any) -> Path:
    """Writes the model to `path`. tokenizer, config: further fields of their configuration files."""
    path.mkdir(parents=True, exist_ok=True)
    fast = Tokenizer(models.BPE(VOCAB, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    fast.save(str(path / "tokenizer.json"))
    _write(
        path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        **(tokenizer or {}),
    )  # fmt: skip
    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(WORDS),
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "bos_token_id": BOS, "eos_token_id": EOS, **config,
    }  # fmt: skip
    _write(path / "config.json", **raw)
    weights = random_weights(LlamaConfig.from_dict(raw), 0, dtype=torch.float32, device="cpu")
    save_file(weights, str(path / "model.safetensors"))
    return path


def _write(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def byte_tokens(text: str) -> list[int]:
    """A text as byte tokens alone."""
    return [VOCAB[f"<0x{byte:02X}>"] for byte in text.encode()]


def scripted(ids: Sequence[int], vocab: int = len(WORDS)) -> Callable[[list[int]], Any]:
    """A token mask under which a reply is these ids, the last of them again and again."""

    def mask(output: list[int]) -> Any:
        allowed = np.zeros(vocab, dtype=bool)
        allowed[ids[min(len(output), len(ids) - 1)]] = True
        return allowed

    return mask
