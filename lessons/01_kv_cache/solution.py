"""Lesson 01, solved. In the engine: `Request.usable_prefix` and `KVPool.bytes_per_token`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def reusable_prefix(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    """How many tokens of `prompt` need not be computed, when the KV of `cached` is kept."""
    same = 0
    while same < min(len(cached), len(prompt)) and cached[same] == prompt[same]:
        same += 1
    usable = min(same, max(len(prompt) - 1, 0))
    return usable // page_size * page_size


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes that the keys and values of one token take, in all layers."""
    heads = config["num_attention_heads"]
    kept = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * kept * head_dim * DTYPE_BYTES[dtype]


def prefill_saved(prompts: Sequence[Sequence[int]], page_size: int = 1) -> tuple[int, float]:
    """What a cache saves over a stream of prompts, and which share of all prompt tokens that is."""
    saved = total = 0
    for number, prompt in enumerate(prompts):
        saved += max((reusable_prefix(before, prompt, page_size) for before in prompts[:number]), default=0)
        total += len(prompt)
    return saved, saved / total if total else 0.0
