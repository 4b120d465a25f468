"""What lesson 01 asks for, and its open cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, expect
from minirad.cache.radix_cache import RadixCache, RadixKey


def reusable(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    """The grader's own: what minirad's tree says, with `cached` in it."""
    tree = RadixCache(page_size)
    tree.insert(RadixKey(list(cached)), list(range(len(cached))))
    return usable(tree, prompt)


def usable(tree: RadixCache, prompt: Sequence[int]) -> int:
    """What the engine takes from a tree: at most all but the prompt's last token, in whole pages."""
    found = min(tree.peek(RadixKey(list(prompt))), max(len(prompt) - 1, 0))
    return found // tree.page_size * tree.page_size


# ---------------------------------------------------------------------- reusable_prefix


def check_prefix(impl: ModuleType, cached: list[int], prompt: list[int], page: int, wanted: int) -> None:
    kept = list(cached), list(prompt)
    got = impl.reusable_prefix(cached, prompt, page)
    asked = f"reusable_prefix({short(kept[0])}, {short(kept[1])}, page_size={page})"
    hint = 2 if page > 1 else int(wanted == len(prompt) - 1 or not prompt)
    expect(got == wanted, f"{asked} gave {got!r} instead of {wanted}{reason(*kept, page, wanted)}", hint=hint)
    expect((cached, prompt) == kept, f"{asked} must not change the lists that it compares")


def reason(cached: list[int], prompt: list[int], page: int, wanted: int) -> str:
    """Why: the words that belong behind a wrong number."""
    pairs = zip(cached, prompt, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(cached), len(prompt)))
    words = f": {same} tokens are alike"
    if prompt and same == len(prompt):
        words += ", the prompt's last one is always computed"
    if page > 1:
        words += f", and only whole pages of {page} are shared"
    return words


def short(tokens: Sequence[int]) -> str:
    """A list in words, not more than a line of it."""
    inside = ", ".join(map(str, tokens[:12]))
    return f"[{inside}, ... {len(tokens)} in all]" if len(tokens) > 12 else f"[{inside}]"


def two_short_rows(impl: ModuleType) -> None:
    """A cached row and a prompt, one token per page."""
    for cached, prompt, wanted in [
        ([1, 2, 3, 4], [1, 2, 3, 9, 9], 3),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        ([5], [6], 0),
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([], [], 0),
        ([0, 0, 0], [0, 0, 0, 0], 3),
    ]:
        check_prefix(impl, cached, prompt, 1, wanted)


def the_same_again(impl: ModuleType) -> None:
    """A prompt that is cached from end to end: one token is computed all the same."""
    check_prefix(impl, [1, 2, 3, 4], [1, 2, 3, 4], 1, 3)
    check_prefix(impl, [7], [7], 1, 0)


def one_token_inserted(impl: ModuleType) -> None:
    """One token inserted: all that follows has moved, and cannot be used."""
    check_prefix(impl, [1, 2, 3, 4, 5, 6], [1, 2, 99, 3, 4, 5, 6], 1, 2)
    check_prefix(impl, [1, 2, 3, 4, 5, 6], [99, 1, 2, 3, 4, 5, 6], 1, 0)
    check_prefix(impl, [1, 2, 3, 4, 5, 6], [1, 2, 99, 4, 5, 6], 1, 2)


def pages_of_several_tokens(impl: ModuleType) -> None:
    """Pages of 2 and of 4 tokens."""
    for cached, prompt, page, wanted in [
        ([1, 2, 3, 4], [1, 2, 3, 4], 2, 2),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 2, 4),
        ([1, 2, 3, 4], [1, 2, 3, 9], 2, 2),
        ([1, 2, 3], [1, 2, 3, 4, 5], 2, 2),
        ([1, 2, 3], [1, 2, 3, 4, 5], 4, 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], 4, 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, 8),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], 4, 0),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7], 3, 6),
    ]:
        check_prefix(impl, cached, prompt, page, wanted)


def page_size_is_one_unless_said(impl: ModuleType) -> None:
    """Called without a page size."""
    got = impl.reusable_prefix([7, 8, 9], [7, 8, 1])
    words = f"reusable_prefix([7, 8, 9], [7, 8, 1]) gave {got!r}; without a page size a page is one token"
    expect(got == 2, words)


# ---------------------------------------------------------------------- kv_bytes_per_token


def config_json(**numbers: int | None) -> dict[str, Any]:
    """A model's config.json, as far as it matters here."""
    return numbers


MODELS: dict[str, dict[str, Any]] = {
    "the classroom Llama": config_json(
        hidden_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    ),
    "SmolLM2-135M": config_json(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    ),
    "Llama 2 7B": config_json(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32),
    "Llama 3.1 8B": config_json(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=None
    ),
    "Llama 3.1 70B": config_json(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    ),
}


def check_bytes(impl: ModuleType, name: str, config: dict[str, Any], dtype: str, wanted: int) -> None:
    kept = dict(config)
    got = impl.kv_bytes_per_token(config, dtype)
    words = f"{name} ({kept}) in {dtype}: {got!r} bytes per token instead of {wanted:,}"
    expect(got == wanted, words, hint=_wrong_heads(kept, got, wanted))
    whole = isinstance(got, int) or getattr(got, "dtype", None) is not None
    expect(whole, f"{name} in {dtype}: bytes are counted in whole numbers, this is {got!r}")
    expect(config == kept, "kv_bytes_per_token must not change the config")


def _wrong_heads(config: dict[str, Any], got: Any, wanted: int) -> int:
    """Which hint: 1 where all query heads were counted, 2 where head_dim was not taken, else 0."""
    heads = config["num_attention_heads"]
    kept = config.get("num_key_value_heads") or heads
    plain = config["hidden_size"] // heads
    if got == wanted * heads // kept != wanted:
        return 1
    return 2 if got == wanted * plain // (config.get("head_dim") or plain) != wanted else 0


def real_models(impl: ModuleType) -> None:
    """Models that you may have met."""
    for name, dtype, wanted in [
        ("the classroom Llama", "float32", 4096),
        ("the classroom Llama", "bfloat16", 2048),
        ("SmolLM2-135M", "bfloat16", 23_040),
        ("Llama 3.1 8B", "bfloat16", 131_072),
        ("Llama 3.1 8B", "float8_e4m3fn", 65_536),
        ("Llama 3.1 70B", "float16", 327_680),
        ("Llama 2 7B", "float16", 524_288),
    ]:
        check_bytes(impl, name, dict(MODELS[name]), dtype, wanted)


# ---------------------------------------------------------------------- prefill_saved


def check_stream(
    impl: ModuleType, prompts: list[list[int]], page: int, wanted: int, what: str = "", hint: int = 0
) -> None:
    kept = [list(prompt) for prompt in prompts]
    answer = impl.prefill_saved(prompts, page)
    where = f"{what or 'the stream ' + '; '.join(map(short, kept))}, page_size={page}"
    expect(
        isinstance(answer, tuple) and len(answer) == 2,
        f"{where}: it returned {answer!r}; it should be (saved, share)",
    )
    saved, share = answer
    total = sum(map(len, kept))
    expect(saved == wanted, f"{where}: {saved!r} tokens saved instead of {wanted} of {total}", hint=hint)
    part = wanted / total if total else 0.0
    right = isinstance(share, (int, float)) and math.isclose(share, part, abs_tol=1e-9)
    expect(right, f"{where}: the share is {share!r} instead of {wanted} / {total} = {part:.4f}", hint=2)
    expect(prompts == kept, f"{where}: the prompts must not be changed")


def three_prompts(impl: ModuleType) -> None:
    """Three prompts, two of them chats that go on."""
    check_stream(impl, [[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]], 1, 5)
    check_stream(impl, [[1, 2, 3]], 1, 0)
    check_stream(impl, [[1, 2, 3], [4, 5, 6]], 1, 0)


def any_earlier_prompt_helps(impl: ModuleType) -> None:
    """The prompt that helps is not always the one just before, and only one of them can."""
    check_stream(impl, [[1, 2, 3, 4], [9, 9], [1, 2, 3, 5]], 1, 3, hint=1)
    check_stream(impl, [[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4, 5]], 1, 2 + 4, hint=1)
    check_stream(impl, [[1, 2, 9], [1, 2, 3, 8], [1, 2, 3, 4]], 1, 2 + 3, hint=1)
    # alike in what one prompt has at the beginning and the other at the end: no prefix
    check_stream(impl, [[1, 2], [3, 4], [1, 2, 3, 4]], 1, 2, hint=1)


def equal_prompts(impl: ModuleType) -> None:
    """The same prompt over and over: each time one token is computed."""
    check_stream(impl, [[5, 6, 7]] * 4, 1, 6)
    check_stream(impl, [[5, 6, 7, 8]] * 3, 2, 4)
    check_stream(impl, [[5]] * 3, 1, 0)


def streams_of_nothing(impl: ModuleType) -> None:
    """No prompts, or empty ones."""
    check_stream(impl, [], 1, 0, "no prompt at all", hint=2)
    check_stream(impl, [[], []], 1, 0, "two empty prompts", hint=2)


def saved_in_pages(impl: ModuleType) -> None:
    """Pages of 4 tokens."""
    check_stream(impl, [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]], 4, 4)
    check_stream(impl, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]], 4, 4)
    check_stream(impl, [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5]], 4, 0)
    answer = impl.prefill_saved([[1, 2, 3], [1, 2, 3]])
    expect(tuple(answer) == (2, 2 / 6), f"without a page size a page is one token; it gave {answer!r}")


EXERCISES = [
    Exercise(
        "reusable_prefix", 3,
        [two_short_rows, the_same_again, one_token_inserted, pages_of_several_tokens,
         page_size_is_one_unless_said],
        hints=(
            "Three steps: count what is alike, leave the prompt's last token to be computed, keep whole "
            "pages. In which order?",
            "Keys and values are kept, the model's last answer is not: take at most `len(prompt) - 1` of "
            "what is alike. For an empty prompt that would be -1, and there is no such number of tokens.",
            "Rounding comes last: `min(alike, len(prompt) - 1) // page_size * page_size`. With 4 equal "
            "tokens and pages of 2, what would the other order give?",
        ),
    ),
    Exercise(
        "kv_bytes_per_token", 2, [real_models],
        hints=(
            "A key and a value, in every layer, for every head that is kept, with so many numbers to a "
            "head. The result is in bytes.",
            "Many models let several query heads share one key/value head (grouped-query attention). Only "
            "the shared ones are kept: `num_key_value_heads`. Older models do not have that key, and keep "
            "one for each query head.",
            "`hidden_size // num_attention_heads` is only what holds where the config does not say, or says "
            "None. The classroom Llama has hidden size 160 and 4 heads of 64.",
        ),
    ),
    Exercise(
        "prefill_saved", 3,
        [three_prompts, any_earlier_prompt_helps, equal_prompts, streams_of_nothing, saved_in_pages],
        hints=(
            "Each prompt is helped by those that came before it, and `reusable_prefix` says how much. "
            "Nobody helps the first one.",
            "A prompt has one beginning. The earlier prompt with the longest match serves it, whichever "
            "that is; the others add nothing.",
            "Add up, over all prompts, the largest `reusable_prefix(earlier, prompt, page_size)`, or 0 "
            "where there is none. The share is that divided by all prompt tokens, and 0.0 where there are "
            "no tokens.",
        ),
        stands_on={"reusable_prefix": reusable},
    ),
]  # fmt: skip
