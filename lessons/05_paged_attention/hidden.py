"""Random cases of lesson 05, compared with minirad's attention and metadata."""

from __future__ import annotations

from random import Random
from types import ModuleType

import torch

from lessons.grading import sibling

open_cases = sibling(__file__, "exercises")


def random_requests(impl: ModuleType, rng: Random) -> None:
    """Prefills, chunks and decodes of random requests."""
    for _ in range(12):
        page = rng.choice((1, 2, 3, 4, 16))
        kv_len = rng.randrange(1, 4 * page + 8)
        count = -(-kv_len // page)
        pages = rng.sample(range(1, count + 6), count) + [0] * rng.randrange(3)
        kept = rng.choice((1, 2, 3))
        scene = open_cases.scene(
            rng.choice((1, kv_len, rng.randrange(1, kv_len + 1))), kv_len, pages, page,
            heads=kept * rng.choice((1, 2, 3)), kept=kept, seed=rng.randrange(10**6),
            waste=rng.choice((float("nan"), 30.0, 0.0)),
        )  # fmt: skip
        open_cases.check_attention(impl, scene)


def random_lines(impl: ModuleType, rng: Random) -> None:
    """Batches of random rows."""
    for _ in range(20):
        page, count = rng.choice((1, 2, 3, 4, 16)), rng.randrange(1, 6)
        lengths = [rng.randrange(1, 5 * page + 2) for _ in range(count)]
        order = list(range(1, sum(-(-length // page) for length in lengths) + 1))
        rng.shuffle(order)
        rows = open_cases.rows_of(lengths, page, order, rng.choice((0, 5 * page)))
        batch = [rng.randrange(count) for _ in range(rng.randrange(1, 5))]
        open_cases.check_ragged(
            impl, rows, batch, [rng.randrange(1, lengths[row] + 1) for row in batch], page
        )


def random_parts(impl: ModuleType, rng: Random) -> None:
    """Random sets of keys, cut anywhere; and random results, each weighted by its share."""
    for _ in range(10):
        keys = rng.randrange(2, 40)
        open_cases.split_keys(
            impl, rng.randrange(10**6), tokens=rng.randrange(1, 5), keys=keys, cut=rng.randrange(1, keys),
            size=rng.choice((1.0, 1.0, 100.0)), heads=rng.randrange(1, 4),
        )  # fmt: skip
    for _ in range(5):
        random = torch.Generator().manual_seed(rng.randrange(10**6))
        shape = (rng.randrange(1, 5), rng.randrange(1, 4), 4)
        out = [torch.randn(shape, generator=random) for _ in range(2)]
        lse = [torch.randn(shape[:2], generator=random) * rng.choice((1.0, 300.0)) for _ in range(2)]
        total = torch.logaddexp(*lse)
        whole = sum(one * (its - total).exp()[..., None] for one, its in zip(out, lse, strict=True)), total
        open_cases.check_merge(impl, list(zip(out, lse, strict=True)), whole, f"random results {shape}")


HIDDEN = {
    "gather_attention": [random_requests],
    "ragged_pages": [random_lines],
    "merge": [random_parts],
}
