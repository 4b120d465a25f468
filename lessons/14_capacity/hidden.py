"""Hidden cases of lesson 14: the trace's second half, games that are the same for all, then random ones."""

from __future__ import annotations

from random import Random
from types import ModuleType

import torch

from lessons.grading import expect, sibling
from lessons.grading.policy import found, found_block_by_block, random_requests, trace

open_cases = sibling(__file__, "exercises")

# ---------------------------------------------------------------------- needed_sizes


def more_sizes(impl: ModuleType) -> None:
    """Small games, the engine's tree at every size."""
    for seed, longest, alphabet in ((1, 1, 4), (2, 3, 2), (3, 6, 3), (4, 2, 6)):
        open_cases.play_sizes(impl, random_requests(Random(seed), 14, longest, alphabet))


def sizes_of_the_trace(impl: ModuleType) -> None:
    """The first 450 requests of the public trace: a loop over sizes gets stuck here."""
    keys = trace()[:450]
    needed = impl.needed_sizes(iter([key.tokens.tolist() for key in keys]))
    hits = sum(number is not None for row in needed for number in row)
    wanted = found(keys, 10**6)
    expect(hits == wanted, f"{hits} blocks of the trace have a number: a cache without limit finds {wanted}")
    short = [key.tokens.tolist()[:9] for key in trace()[1_000:1_200]]
    needed = impl.needed_sizes([list(request) for request in short])
    for size in (20, 60):
        wanted = sum(found_block_by_block(short, size))
        hits = sum(number is not None and number <= size for row in needed for number in row)
        words = f"the beginnings of 200 requests of the trace, a cache of {size} blocks"
        expect(hits == wanted, f"{words}: by your numbers it finds {hits}, the engine {wanted}", hint=1)


def random_sizes(impl: ModuleType, rng: Random) -> None:
    """Random games, the engine's tree at every size."""
    for _ in range(3):
        requests = random_requests(rng, rng.randrange(2, 16), rng.randrange(1, 6), rng.randrange(2, 6))
        open_cases.play_sizes(impl, requests)


# ---------------------------------------------------------------------- hit_curve


def more_curves(impl: ModuleType) -> None:
    """Small games, the engine's tree at every size."""
    for seed, longest in ((1, 1), (2, 3), (3, 5)):
        open_cases.play_curve(impl, random_requests(Random(seed), 12, longest), Random(seed))


def random_curves(impl: ModuleType, rng: Random) -> None:
    """Random games, the engine's tree at every size."""
    for _ in range(2):
        open_cases.play_curve(impl, random_requests(rng, rng.randrange(1, 14), rng.randrange(1, 6)), rng)


# ---------------------------------------------------------------------- victim_key


def key_on_the_second_half(impl: ModuleType) -> None:
    """The second half of the public trace, in a cache of 3,000 blocks, and in one of 6,000."""
    first, last = open_cases.SECOND_HALF
    open_cases.beats_lru(impl, first, last, 3_000, 0.25)
    open_cases.beats_lru(impl, first, last, 6_000, -0.03)


def random_leaves(impl: ModuleType, rng: Random) -> None:
    """Random leaves: a key is made of a leaf's five numbers alone."""
    for _ in range(12):
        came = 2 * rng.randrange(1, 5_000)
        open_cases.play_key(
            impl, rng, rng.randrange(1, 20_000), rng.randrange(1, 60), came + rng.randrange(2_000), came,
            rng.randrange(6),
        )  # fmt: skip


# ---------------------------------------------------------------------- gigabytes


def more_gigabytes(impl: ModuleType) -> None:
    """Small games, the engine's tree with each number of gigabytes."""
    for seed, block in ((5, 310_000_000), (6, 120_000_001), (7, 240_000_000)):
        rng = Random(seed)
        open_cases.play_gigabytes(impl, random_requests(rng, 14, 3, 4), block, rng)


def random_gigabytes(impl: ModuleType, rng: Random) -> None:
    """Random games and random models."""
    requests = random_requests(rng, rng.randrange(8, 18), 3, rng.randrange(2, 6))
    open_cases.play_gigabytes(impl, requests, rng.randrange(90_000_000, 330_000_000), rng)
    layers, heads = rng.randrange(1, 5), rng.choice((2, 4, 6, 8))
    kv_heads, head_dim = rng.choice((None, 1, 2)), rng.choice((None, 4, 6))
    name, dtype = rng.choice(("dtype", "torch_dtype")), rng.choice(("float32", "float16", "bfloat16"))
    more = {name: dtype, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = open_cases.config(layers, heads, 8 * heads, **more)
    kind = getattr(torch, dtype)
    open_cases.play_bytes(impl, open_cases.Model(config, layers, kv_heads or heads, head_dim or 8, kind))


HIDDEN = {
    "needed_sizes": [more_sizes, sizes_of_the_trace, random_sizes],
    "hit_curve": [more_curves, random_curves],
    "victim_key": [key_on_the_second_half, random_leaves],
    "gigabytes": [more_gigabytes, random_gigabytes],
}
