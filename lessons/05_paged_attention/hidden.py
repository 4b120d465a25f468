"""Hidden cases of lesson 05, compared with minirad's attention and metadata.

First some that are the same for every student, then random ones.
"""

from __future__ import annotations

import math
from random import Random
from types import ModuleType

import numpy as np
import torch

from lessons.grading import sibling

open_cases = sibling(__file__, "exercises")


# ---------------------------------------------------------------------- the same for everybody


def large_scores_of_all_signs(impl: ModuleType) -> None:
    """Scores of hundreds and of tens of thousands, positive and negative, for several queries at once."""
    for scale in (-0.5, 3.0, 300.0, -300.0, 4e4, -4e4):
        words = f"scale {scale:g}: a hidden key must not weigh anything, however low the others' scores are"
        open_cases.check_attention(impl, open_cases.scene(6, 6, [2, 1], 3, scale=scale, seed=1), words)


def far_pages(impl: ModuleType) -> None:
    """Page numbers above 255, slots above 32,767."""
    words = "page numbers and slots may be large"
    open_cases.check_attention(impl, open_cases.scene(2, 40, [300, 2, 2100], 16, kept=1, dim=4), words)


def many_keys(impl: ModuleType) -> None:
    """A request of 150 tokens, the last two of which are new; pages of 3."""
    pages = [*range(2, 52), 1]
    open_cases.check_attention(impl, open_cases.scene(2, 150, pages, 3), "every token before is seen")


def one_after_the_other(impl: ModuleType) -> None:
    """Two layers: the same pages, other keys and values. And a smaller request after a larger one."""
    for seed in (1, 2):
        s = open_cases.scene(2, 6, [3, 1], 4, seed=seed)
        open_cases.check_attention(impl, s, "the same pages, but another layer's keys and values")
    open_cases.check_attention(impl, open_cases.scene(1, 5, [3, 1], 4, seed=3), "a shorter request")


def lines_of_large_numbers(impl: ModuleType) -> None:
    """Page numbers beyond what 8, 16 or 24 bits hold; pages of 1, 3, 4 and 256."""
    for page in (1, 3, 4, 256):
        pages = [300, 2, 70_001, 33_000, 5, 2**24 + 1, 257]
        rows = open_cases.rows_of([3 * page, page + 1, 2 * page], page, pages, 7)
        open_cases.check_ragged(impl, rows, [2, 0, 1], [2 * page, 3 * page - (page > 1), 1], page)
        open_cases.check_ragged(impl, rows, [0, 2, 0], [1, page + 1, 3 * page], page)


def many_pages(impl: ModuleType) -> None:
    """A batch of more than 32,767 pages, and one with other rows after it."""
    rows = np.arange(1, 20_001, dtype=np.int64).reshape(1, -1)
    open_cases.check_ragged(impl, rows, [0, 0, 0], [20_000, 150, 20_000], 1)
    open_cases.check_ragged(impl, rows[:, ::-1].copy(), [0, 0, 0], [20_000, 150, 20_000], 1)


def some_queries_without_keys(impl: ModuleType) -> None:
    """Each query for itself: no keys on the left, none on the right, or some on both sides."""
    nothing = -math.inf
    lse_a = torch.tensor([[nothing, 0.5], [2.0, nothing], [-300.0, 1000.0]])
    lse_b = torch.tensor([[1.5, nothing], [nothing, -900.0], [-301.0, -1000.0]])
    random = torch.Generator().manual_seed(7)
    out_a, out_b = (torch.randn((3, 2, 4), generator=random) for _ in range(2))
    weight = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    whole = weight * out_a + (1 - weight) * out_b, torch.logaddexp(lse_a, lse_b)
    sides = [(out_a, lse_a), (out_b, lse_b)]
    open_cases.check_merge(impl, sides, whole, f"lse_a {lse_a.tolist()}, lse_b {lse_b.tolist()}")
    open_cases.check_merge(impl, sides[::-1], whole, "the same with a and b exchanged")


def weights_of_all_sizes(impl: ModuleType) -> None:
    """Two keys whose scores differ by 0 to 12, and one query after the other."""
    gap = torch.arange(13.0).reshape(13, 1)
    out_a, out_b = torch.ones((13, 1, 1)), torch.zeros((13, 1, 1))
    for level in (0.0, 100.0, -100.0):
        lse_a, lse_b = torch.full((13, 1), level), level - gap
        whole = torch.sigmoid(gap).unsqueeze(-1), torch.logaddexp(lse_a, lse_b)
        open_cases.check_merge(impl, [(out_a, lse_a), (out_b, lse_b)], whole, f"lse_a {level:g}, lse_b lower")


# ---------------------------------------------------------------------- random


def random_requests(impl: ModuleType, rng: Random) -> None:
    """Prefills, chunks and decodes of random requests."""
    for _ in range(5):
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
    for _ in range(8):
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
    for _ in range(5):
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
    "gather_attention": [
        large_scores_of_all_signs,
        far_pages,
        many_keys,
        one_after_the_other,
        random_requests,
    ],
    "ragged_pages": [lines_of_large_numbers, many_pages, random_lines],
    "merge": [some_queries_without_keys, weights_of_all_sizes, random_parts],
}
