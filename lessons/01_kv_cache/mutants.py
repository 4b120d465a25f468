"""Wrong solutions of lesson 01, as learners write them."""

from __future__ import annotations

from collections.abc import Sequence

from lessons.grading import Mutant


def _counts_alike_anywhere(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    same = sum(a == b for a, b in zip(cached, prompt, strict=False))
    return min(same, max(len(prompt) - 1, 0)) // page_size * page_size


def _as_a_set(cached: Sequence[int], prompt: Sequence[int], page_size: int = 1) -> int:
    same = len(set(cached) & set(prompt))
    return min(same, max(len(prompt) - 1, 0)) // page_size * page_size


def _only_the_one_before(prompts: Sequence[Sequence[int]], page_size: int = 1) -> tuple[int, float]:
    saved, before = 0, ()
    for prompt in prompts:
        saved += _prefix(before, prompt, page_size)
        before = tuple(prompt)
    total = sum(map(len, prompts))
    return saved, saved / total if total else 0.0


def _first_that_matches(prompts: Sequence[Sequence[int]], page_size: int = 1) -> tuple[int, float]:
    saved = 0
    for number, prompt in enumerate(prompts):
        found = (_prefix(before, prompt, page_size) for before in prompts[:number])
        saved += next((length for length in found if length), 0)
    total = sum(map(len, prompts))
    return saved, saved / total if total else 0.0


def _prefix(cached: Sequence[int], prompt: Sequence[int], page_size: int) -> int:
    same = 0
    while same < min(len(cached), len(prompt) - 1) and cached[same] == prompt[same]:
        same += 1
    return same // page_size * page_size


USABLE = "usable = min(same, max(len(prompt) - 1, 0))"
ROUNDED = "return usable // page_size * page_size"
BYTES = "return 2 * config["
LINE = "saved += max((reusable_prefix(before, prompt, page_size) for before in prompts[:number]), default=0)"
MUTANTS = [
    Mutant("reusable_prefix", "the last token is not computed", old=USABLE, new="usable = same"),
    Mutant("reusable_prefix", "one token less in any case", old=USABLE, new="usable = max(same - 1, 0)"),
    Mutant(
        "reusable_prefix",
        "one less of the cached, not of the prompt",
        old=USABLE,
        new="usable = min(same, max(len(cached) - 1, 0))",
    ),
    Mutant(
        "reusable_prefix", "an empty prompt gives -1", old=USABLE, new="usable = min(same, len(prompt) - 1)"
    ),
    Mutant("reusable_prefix", "not rounded to pages", old=ROUNDED, new="return usable"),
    Mutant(
        "reusable_prefix",
        "rounded up to pages",
        old=ROUNDED,
        new="return -(-usable // page_size) * page_size",
    ),
    Mutant("reusable_prefix", "counts pages, not tokens", old=ROUNDED, new="return usable // page_size"),
    Mutant(
        "reusable_prefix",
        "rounds first, then takes the last token away",
        old=USABLE + "\n    " + ROUNDED,
        new="return max(min(same // page_size * page_size, len(prompt) - 1), 0)",
    ),
    Mutant(
        "reusable_prefix",
        "always leaves a whole page to compute",
        old=ROUNDED,
        new="return max(min(usable, len(prompt) - page_size), 0) // page_size * page_size",
    ),
    Mutant(
        "reusable_prefix",
        "counts what is alike after a difference",
        replaces={"reusable_prefix": _counts_alike_anywhere},
    ),
    Mutant("reusable_prefix", "compares sets", replaces={"reusable_prefix": _as_a_set}),
    Mutant(
        "reusable_prefix",
        "uses up the cached row",
        old="usable = min",
        new="del cached[:1]\n    usable = min",
    ),
    Mutant("kv_bytes_per_token", "keys only, no values", old=BYTES, new="return config["),
    Mutant("kv_bytes_per_token", "all heads that ask", old="* kept * head_dim", new="* heads * head_dim"),
    Mutant(
        "kv_bytes_per_token",
        "head_dim worked out where it is given",
        old='config.get("head_dim") or config',
        new="config",
    ),
    Mutant(
        "kv_bytes_per_token",
        "head_dim worked out from the kept heads",
        old='config["hidden_size"] // heads',
        new='config["hidden_size"] // kept',
    ),
    Mutant(
        "kv_bytes_per_token",
        "one head where the key is missing",
        old='config.get("num_key_value_heads") or heads',
        new='config.get("num_key_value_heads") or 1',
    ),
    Mutant(
        "kv_bytes_per_token", "layers forgotten", old='2 * config["num_hidden_layers"] * kept', new="2 * kept"
    ),
    Mutant("kv_bytes_per_token", "two bytes whatever the type", old="DTYPE_BYTES[dtype]", new="2"),
    Mutant("kv_bytes_per_token", "bits", old="* DTYPE_BYTES[dtype]", new="* DTYPE_BYTES[dtype] * 8"),
    Mutant("kv_bytes_per_token", "numbers, not bytes", old=" * DTYPE_BYTES[dtype]", new=""),
    Mutant(
        "kv_bytes_per_token",
        "None is taken for a head_dim",
        old='config.get("head_dim") or config["hidden_size"] // heads',
        new='config.get("head_dim", config["hidden_size"] // heads)',
    ),
    Mutant(
        "kv_bytes_per_token",
        "the hidden size per layer",
        old="* kept * head_dim",
        new='* config["hidden_size"]',
    ),
    Mutant(
        "prefill_saved", "only the prompt just before helps", replaces={"prefill_saved": _only_the_one_before}
    ),
    Mutant(
        "prefill_saved",
        "the first prompt that matches is taken",
        replaces={"prefill_saved": _first_that_matches},
    ),
    Mutant(
        "prefill_saved",
        "the prompt itself is among those before",
        old="prompts[:number]",
        new="prompts[: number + 1]",
    ),
    Mutant(
        "prefill_saved",
        "later prompts help, too",
        old="prompts[:number]",
        new="[p for p in prompts if p is not prompt]",
    ),
    Mutant(
        "prefill_saved",
        "all that match are added up",
        old=LINE,
        new=LINE.replace("max(", "sum(")
        .replace(", default=0)", ")")
        .replace("sum((", "sum(")
        .replace("[:number])", "[:number]"),
    ),
    Mutant("prefill_saved", "page size forgotten", old="prompt, page_size) for", new="prompt) for"),
    Mutant(
        "prefill_saved",
        "a share of the saved and the computed",
        old="saved / total if total else 0.0",
        new="saved / (total - saved) if total else 0.0",
    ),
    Mutant("prefill_saved", "divides by nothing", old="saved / total if total else 0.0", new="saved / total"),
    Mutant(
        "prefill_saved",
        "per cent",
        old="saved / total if total else 0.0",
        new="100 * saved / total if total else 0.0",
    ),
    Mutant(
        "prefill_saved",
        "the mean of the prompts' own rates",
        replaces={"prefill_saved": lambda prompts, page_size=1: _mean_of_rates(prompts, page_size)},
    ),
    Mutant(
        "prefill_saved",
        "the first prompt is not counted",
        old="total += len(prompt)",
        new="total += len(prompt) if number else 0",
    ),
]


def _mean_of_rates(prompts: Sequence[Sequence[int]], page_size: int) -> tuple[int, float]:
    saved, rates = 0, []
    for number, prompt in enumerate(prompts):
        best = max((_prefix(before, prompt, page_size) for before in prompts[:number]), default=0)
        saved += best
        rates.append(best / len(prompt) if prompt else 0.0)
    return saved, sum(rates) / len(rates) if rates else 0.0
