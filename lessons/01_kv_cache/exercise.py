"""Lesson 01: the KV cache in numbers. Fill in the three functions; README.md says what and why.

pytest lessons/01_kv_cache        grades this file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def reusable_prefix(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    """How many tokens of `prompt` need not be computed, when the KV of `cached` is kept.

    cached, prompt: token ids, of any lengths, also empty. Neither is changed.

    Three things limit it:
    - from the first token that differs, nothing can be used (also not what is alike further on);
    - the last token of the prompt is always computed: the model's answer to it is not kept;
    - KV is shared in whole pages of page_size tokens: the result is a multiple of page_size.

    reusable_prefix([1, 2, 3, 4], [1, 2, 3, 9, 9]) == 3
    reusable_prefix([1, 2, 3, 4], [1, 2, 3, 4]) == 3
    reusable_prefix([1, 2, 3, 4], [1, 2, 3, 4], page_size=2) == 2
    """
    raise NotImplementedError("todo: reusable_prefix")


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes that the keys and values of one token take, in all layers.

    config: a model's config.json as a dictionary, with these keys:
        num_hidden_layers      layers
        num_attention_heads    heads that ask (queries)
        num_key_value_heads    heads that are kept; where the key is missing: as many as ask
        head_dim               numbers per head; where it is missing: hidden_size // num_attention_heads
        hidden_size
    A key whose value is None counts as missing.
    dtype: a name in DTYPE_BYTES, how one number is stored.
    """
    raise NotImplementedError("todo: kv_bytes_per_token")


def prefill_saved(prompts: Sequence[Sequence[int]], page_size: int = 1) -> tuple[int, float]:
    """What a cache saves over a stream of prompts, and which share of all prompt tokens that is.

    The prompts come one after the other. Each may use any one of the prompts before it, the one that
    helps most, by the rules of `reusable_prefix`. Nothing is ever forgotten.

    Returns (saved, share): tokens that were not computed, and saved / all prompt tokens: the hit rate
    of the stream. (0, 0.0) for a stream without tokens.

    prefill_saved([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]]) == (5, 0.5)
    """
    raise NotImplementedError("todo: prefill_saved")
