"""Lesson 01 solved otherwise: pages as tuples, a set of all prefixes, numbers multiplied in a loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def reusable_prefix(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    """Tries the longest candidate first."""
    most = min(len(cached), len(prompt) - 1) // page_size * page_size
    for length in range(most, 0, -page_size):
        if list(cached[:length]) == list(prompt[:length]):
            return length
    return 0


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """The product of all that is stored: K and V, layers, heads, numbers, bytes."""
    known = {name: value for name, value in config.items() if value is not None}
    queries = known["num_attention_heads"]
    shape = (2, known["num_hidden_layers"], known.get("num_key_value_heads", queries),
             known["head_dim"] if "head_dim" in known else known["hidden_size"] // queries)  # fmt: skip
    return math.prod(shape) * DTYPE_BYTES[dtype]


def prefill_saved(prompts: Sequence[Sequence[int]], page_size: int = 1) -> tuple[int, float]:
    """Remembers every whole-page prefix that was seen."""
    seen: set[tuple[int, ...]] = set()
    saved = 0
    for prompt in prompts:
        ends = range(page_size, len(prompt) + 1, page_size)
        saved += max((end for end in ends if end < len(prompt) and tuple(prompt[:end]) in seen), default=0)
        seen.update(tuple(prompt[:end]) for end in ends)
    return saved, saved / max(sum(map(len, prompts)), 1)
