"""Random cases of lesson 01, compared with minirad's tree."""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import sibling
from minirad.cache.radix_cache import RadixCache, RadixKey

open_cases = sibling(__file__, "exercises")
solution = sibling(__file__, "solution")


def random_rows(impl: ModuleType, rng: Random) -> None:
    """Random rows with a known common beginning."""
    for _ in range(120):
        page = rng.choice((1, 1, 2, 3, 4, 16))
        head = [rng.randrange(100_000) for _ in range(rng.randrange(4 * page + 2))]
        cached = head + [rng.randrange(3) for _ in range(rng.randrange(2 * page))]
        prompt = head + [rng.randrange(3) for _ in range(rng.randrange(2 * page))]
        open_cases.check_prefix(impl, cached, prompt, page, open_cases.reusable(cached, prompt, page))


def random_configs(impl: ModuleType, rng: Random) -> None:
    """Random models, some without the newer keys."""
    for _ in range(60):
        kept = rng.choice((1, 2, 3, 4, 8))
        heads = kept * rng.choice((1, 2, 3, 4, 7))
        config: dict[str, Any] = {
            "num_hidden_layers": rng.randrange(1, 100),
            "num_attention_heads": heads,
            "hidden_size": heads * rng.choice((32, 40, 64, 128)),
        }
        if rng.random() < 0.7:
            config["num_key_value_heads"] = kept
        if rng.random() < 0.6:
            config["head_dim"] = rng.choice((64, 80, 96, 128, 256, None))
        dtype = rng.choice(sorted(solution.DTYPE_BYTES))
        wanted = solution.kv_bytes_per_token(config, dtype)
        open_cases.check_bytes(impl, "a made-up model", config, dtype, wanted)


def random_streams(impl: ModuleType, rng: Random) -> None:
    """Streams of chats, questions behind one header, and repetitions."""
    for _ in range(20):
        page = rng.choice((1, 1, 2, 3, 4))
        prompts: list[list[int]] = []
        for _ in range(rng.randrange(1, 12)):
            tail = [rng.randrange(3) for _ in range(rng.randrange(3 * page + 2))]
            head = list(rng.choice(prompts)) if prompts and rng.random() < 0.8 else []
            prompts.append(head[: rng.randrange(len(head) + 1)] + tail if rng.random() < 0.9 else head)
        tree, saved = RadixCache(page), 0
        for prompt in prompts:
            saved += open_cases.usable(tree, prompt)
            tree.insert(RadixKey(prompt), list(range(len(prompt))))
        open_cases.check_stream(impl, prompts, page, saved)


HIDDEN = {
    "reusable_prefix": [random_rows],
    "kv_bytes_per_token": [random_configs],
    "prefill_saved": [random_streams],
}
