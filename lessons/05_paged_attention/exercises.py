"""What lesson 05 asks for, and its open cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lessons.grading import Exercise, expect
from lessons.grading.game import said
from lessons.grading.shared import expect_answers, rows_of
from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.kv.kv_pool import KVPool

TOLERANCE = 1e-4
MEMORY_MB = 2048

# ---------------------------------------------------------------------- gather_attention


@dataclass(frozen=True)
class Scene:
    """One request in a pool: what it asks, and where its keys and values lie."""

    q: Tensor
    pool: KVPool
    pages: list[int]
    kv_len: int
    page_size: int
    scale: float

    @property
    def where(self) -> str:
        heads = f"{self.q.shape[1]} query and {self.pool.num_kv_heads} key/value heads"
        asked = f"{self.q.shape[0]} queries, kv_len {self.kv_len}"
        return f"{asked}, pages {self.pages} of {self.page_size} tokens, {heads}"


def scene(
    queries: int, kv_len: int, pages: Sequence[int], page_size: int, heads: int = 2, kept: int = 2,
    seed: int = 0, scale: float | None = None, waste: float = float("nan"), dim: int = 8,
) -> Scene:  # fmt: skip
    """Random keys and values at the request's slots; all other slots of the pool hold `waste`."""
    random = torch.Generator().manual_seed(seed)
    pool = KVPool(1, (max(pages) + 2) * page_size, kept, dim, dtype=torch.float32, device="cpu")
    position = torch.arange(kv_len)
    slots = torch.tensor(list(pages))[position // page_size] * page_size + position % page_size
    for tensor in (pool.k[0], pool.v[0]):
        tensor.fill_(waste)
        tensor[slots] = torch.randn((kv_len, kept, dim), generator=random)
    q = torch.randn((queries, heads, dim), generator=random)
    return Scene(q, pool, list(pages), kv_len, page_size, scale if scale is not None else dim**-0.5)


def engines_answer(s: Scene) -> Tensor:
    """What minirad's own attention makes of it."""
    rows = np.zeros((1, s.kv_len), dtype=np.int64)
    for i in range(s.kv_len):
        rows[0, i] = s.pages[i // s.page_size] * s.page_size + i % s.page_size
    entries = [BatchEntry(0, s.kv_len - len(s.q), s.kv_len)]
    metadata = build_metadata(rows, entries, s.page_size, "cpu")
    clean = KVPool(1, s.pool.num_slots, s.pool.num_kv_heads, s.q.shape[2], dtype=torch.float32, device="cpu")
    for theirs, ours in ((clean.k[0], s.pool.k[0]), (clean.v[0], s.pool.v[0])):
        theirs.copy_(torch.nan_to_num(ours, nan=0.0))
    backend = GatherAttention()
    backend.plan(metadata, clean)
    return backend.run(0, s.q, clean, s.scale)


def log_sums(s: Scene) -> Tensor:
    """lse, query by query."""
    lse = torch.empty(s.q.shape[:2])
    group = s.q.shape[1] // s.pool.num_kv_heads
    for t in range(len(s.q)):
        seen = [
            s.pages[i // s.page_size] * s.page_size + i % s.page_size
            for i in range(s.kv_len - len(s.q) + t + 1)
        ]
        for h in range(s.q.shape[1]):
            scores = (s.pool.k[0][seen, h // group] @ s.q[t, h] * s.scale).double()
            lse[t, h] = scores.logsumexp(0)
    return lse


def check_attention(impl: ModuleType, s: Scene, words: str = "", hint: int = 0) -> None:
    kept = [tensor.clone() for tensor in (s.q, s.pool.k[0], s.pool.v[0])]
    answer = impl.gather_attention(
        s.q, s.pool.k[0], s.pool.v[0], list(s.pages), s.kv_len, s.page_size, s.scale
    )
    unchanged = zip(kept, (s.q, s.pool.k[0], s.pool.v[0]), strict=True)
    same = all(torch.equal(torch.nan_to_num(a, nan=7.0), torch.nan_to_num(b, nan=7.0)) for a, b in unchanged)
    expect(same, f"{s.where}: q or the pool was changed")
    two = isinstance(answer, tuple) and len(answer) == 2
    expect(two, f"{s.where}: it returned {type(answer).__name__}; it should be (out, lse)")
    close(answer[0], engines_answer(s), f"{s.where}: out", words, hint)
    close(answer[1], log_sums(s), f"{s.where}: lse", words, hint)


def close(got: Any, wanted: Tensor, where: str, words: str = "", hint: int = 0) -> None:
    """Equal up to rounding, or a Failure that names the first query and head that differ."""
    tensor = torch.as_tensor(got).to(torch.float32)
    shapes = list(tensor.shape), list(wanted.shape)
    expect(shapes[0] == shapes[1], f"{where} has shape {shapes[0]} instead of {shapes[1]}", hint=hint)
    behind = f" ({words})" if words else ""
    if torch.isnan(tensor).any() and not torch.isnan(wanted).any():
        expect(False, f"{where} holds NaN{behind}", hint=hint)
    wrong = ~torch.isclose(tensor, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    if wrong.any():
        at = [int(i) for i in wrong.nonzero()[0]]
        names = ", ".join(f"{name} {i}" for name, i in zip(("query", "head", "number"), at, strict=False))
        numbers = f"{tensor[tuple(at)].item():.4f} instead of {wanted[tuple(at)].item():.4f}"
        expect(False, f"{where} is wrong at {names}: {numbers}{behind}", hint=hint)


def one_key(impl: ModuleType) -> None:
    """One token that sees itself: the answer is its value."""
    words = "a softmax over one key gives that key's value; all slots but the request's hold NaN here"
    check_attention(impl, scene(1, 1, [3], 4), words)


def decode_through_pages_in_order(impl: ModuleType) -> None:
    """One query, pages one after the other."""
    check_attention(impl, scene(1, 8, [1, 2], 4))
    check_attention(impl, scene(1, 5, [1, 2, 3, 4, 5], 1))


def decode_through_scattered_pages(impl: ModuleType) -> None:
    """One query, pages out of order."""
    check_attention(impl, scene(1, 12, [5, 1, 3], 4), "token i lies in page pages[i // page_size]")
    check_attention(impl, scene(1, 4, [9, 2, 7, 1], 1))


def last_page_not_full(impl: ModuleType) -> None:
    """The unused slots of the last page, and of pages that are not this request's, hold anything."""
    check_attention(impl, scene(1, 9, [5, 1, 3], 4), "slots that are not the request's hold NaN here")
    check_attention(
        impl, scene(1, 9, [5, 1, 3], 4, waste=50.0), "the slots behind the end hold old numbers here"
    )


def longer_page_table(impl: ModuleType) -> None:
    """A line of a page table is padded with page 0."""
    check_attention(impl, scene(1, 6, [4, 2, 0, 0], 4), "the entries that are not needed are 0")


def several_queries_are_causal(impl: ModuleType) -> None:
    """A prefill from the beginning: no query sees what comes after it."""
    check_attention(impl, scene(6, 6, [2, 1], 4), "a query at position p sees the tokens 0 to p", 2)


def a_chunk_behind_a_cached_prefix(impl: ModuleType) -> None:
    """The last 3 of 10 tokens: the first query is at position 7."""
    check_attention(impl, scene(3, 10, [2, 7, 4], 4), "the first of T queries is at position kv_len - T", 2)


def grouped_heads(impl: ModuleType) -> None:
    """4 query heads on 2 key/value heads, and 6 on 2."""
    check_attention(impl, scene(1, 5, [2, 1], 4, heads=4), "query head h reads key/value head h // 2", 1)
    check_attention(impl, scene(2, 5, [2, 1], 4, heads=6), "query head h reads key/value head h // 3", 1)
    check_attention(impl, scene(2, 5, [2, 1], 4, heads=3, kept=1), hint=1)


def another_scale(impl: ModuleType) -> None:
    """A scale that is not 1 / sqrt(D), and large scores."""
    check_attention(impl, scene(2, 5, [2, 1], 4, scale=1.0), "use the scale that is given", 2)
    check_attention(
        impl, scene(1, 5, [2, 1], 4, scale=60.0), "scores of a hundred: exp of them is too large a number", 2
    )


# ---------------------------------------------------------------------- ragged_pages


def check_ragged(
    impl: ModuleType, rows: npt.NDArray[np.int64], row_ids: list[int], lengths: list[int], page: int
) -> None:
    kept = rows.copy()
    answer = impl.ragged_pages(rows, list(row_ids), list(lengths), page)
    where = f"row_ids {row_ids}, lengths {lengths}, pages of {page}"
    expect(bool((rows == kept).all()), f"{where}: the rows were changed")
    three = isinstance(answer, tuple) and len(answer) == 3
    expect(
        three, f"{where}: it returned {type(answer).__name__}; it should be (indptr, indices, last_page_len)"
    )
    entries = [BatchEntry(row, length - 1, length) for row, length in zip(row_ids, lengths, strict=True)]
    engine = build_metadata(rows, entries, page, "cpu")
    truth = (engine.kv_indptr, engine.kv_indices.numpy(), engine.last_page_len)
    parts = ("indptr", "indices", "last_page_len")  # each with its hint
    for hint, (name, got, wanted) in enumerate(zip(parts, answer, truth, strict=True)):
        array = np.asarray(got)
        whole = np.issubdtype(array.dtype, np.integer)
        expect(whole, f"{where}: {name} holds {array.dtype}, not integers", hint=hint)
        same = array.tolist() == wanted.tolist()
        words = f"{where}: {name} should be {said(wanted.tolist())}, it is {said(array.tolist())}"
        expect(same, words, hint=hint)


def one_line(impl: ModuleType) -> None:
    """One request."""
    rows = rows_of([10], 4, [3, 1, 7], 0)
    check_ragged(impl, rows, [0], [10], 4)
    check_ragged(impl, rows, [0], [8], 4)
    check_ragged(impl, rows, [0], [1], 4)


def three_lines(impl: ModuleType) -> None:
    """Three requests of different lengths, in rows out of order, with old numbers behind their ends."""
    rows = rows_of([9, 2, 5, 4], 4, [9, 8, 7, 6, 5, 4, 3], 399)
    check_ragged(impl, rows, [2, 0, 3], [5, 9, 4], 4)
    check_ragged(impl, rows, [1, 1], [2, 1], 4)


def lines_of_slots(impl: ModuleType) -> None:
    """Pages of one token: every last page is full."""
    check_ragged(impl, rows_of([4, 2], 1, [6, 2, 9, 4, 1, 3], 7), [0, 1], [4, 2], 1)


# ---------------------------------------------------------------------- merge


def part(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q [T, H, D] over all of k, v [S, H, D]."""
    scores = torch.einsum("thd,shd->ths", q, k).double()
    return torch.einsum("ths,shd->thd", scores.softmax(-1).float(), v), scores.logsumexp(-1).float()


def check_merge(
    impl: ModuleType,
    sides: Sequence[tuple[Tensor, Tensor]],
    whole: tuple[Tensor, Tensor],
    what: str,
    hint: int = 0,
) -> None:
    (out_a, lse_a), (out_b, lse_b) = sides
    given = [tensor.clone() for tensor in (out_a, lse_a, out_b, lse_b)]
    answer = impl.merge(out_a, lse_a, out_b, lse_b)
    same = all(torch.equal(a, b) for a, b in zip(given, (out_a, lse_a, out_b, lse_b), strict=True))
    expect(same, f"{what}: one of the tensors that were given was changed")
    two = isinstance(answer, tuple) and len(answer) == 2
    expect(two, f"{what}: it returned {type(answer).__name__}; it should be (out, lse)")
    close(answer[0], whole[0], f"{what}: out", hint=hint)
    close(answer[1], whole[1], f"{what}: lse", hint=hint)


def split_keys(
    impl: ModuleType, seed: int, tokens: int, keys: int, cut: int, size: float = 1.0, heads: int = 2
) -> None:
    random = torch.Generator().manual_seed(seed)
    q = torch.randn((tokens, heads, 8), generator=random) * size
    k, v = (torch.randn((keys, heads, 8), generator=random) for _ in range(2))
    sides = part(q, k[:cut], v[:cut]), part(q, k[cut:], v[cut:])
    what = f"{keys} keys in parts of {cut} and {keys - cut}"
    if size > 1:
        what += f", with scores up to {float(torch.einsum('thd,shd->ths', q, k).abs().max()):.0f}"
    check_merge(impl, sides, part(q, k, v), what, int(size > 1))


def two_halves(impl: ModuleType) -> None:
    """Keys in two parts of the same size."""
    split_keys(impl, 1, tokens=3, keys=8, cut=4)


def a_large_and_a_small_part(impl: ModuleType) -> None:
    """A long prefix and one key behind it."""
    split_keys(impl, 2, tokens=2, keys=40, cut=39)
    split_keys(impl, 3, tokens=2, keys=40, cut=1)


def by_numbers(impl: ModuleType) -> None:
    """One key with weight 3 and one with weight 1."""
    out = torch.tensor([[[8.0]]]), torch.tensor([[[4.0]]])
    lse = torch.tensor([[math.log(3.0)]]), torch.tensor([[0.0]])
    whole = torch.tensor([[[7.0]]]), torch.tensor([[math.log(4.0)]])
    check_merge(impl, list(zip(out, lse, strict=True)), whole, "8 with weight 3 and 4 with weight 1")


def large_scores(impl: ModuleType) -> None:
    """Scores whose exp is infinite, or nothing."""
    split_keys(impl, 4, tokens=3, keys=8, cut=4, size=200.0)
    out = torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])
    for level in (1000.0, -1000.0):
        lse = torch.tensor([[level]])
        whole = torch.tensor([[[2.0]]]), lse + math.log(2.0)
        check_merge(impl, [(out[0], lse), (out[1], lse.clone())], whole, f"both lse are {level:g}", 1)


def one_side_is_empty(impl: ModuleType) -> None:
    """No keys on one side: lse is -inf there, and the other side is the answer."""
    random = torch.Generator().manual_seed(5)
    out, lse = torch.randn((2, 2, 4), generator=random), torch.randn((2, 2), generator=random)
    nothing = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    check_merge(impl, [(out, lse), nothing], (out, lse), "the second part has no keys", 2)
    check_merge(impl, [nothing, (out, lse)], (out, lse), "the first part has no keys", 2)


# ---------------------------------------------------------------------- a claim


def ask_the_engine() -> dict[str, Any]:
    """What minirad's tree does with the two prompts of the claim."""
    cache, first = RadixCache(page_size=16), list(range(40))
    cache.insert(RadixKey(first), first)
    used = cache.peek(RadixKey([*first[:20], *range(100, 120)]))
    return {
        "tokens_from_cache": used,
        "pages_from_cache": used // 16,
        "tokens_computed": 40 - used,
        "pages_of_its_own": -(-40 // 16) - used // 16,
        "claim_holds": used == 20,
    }


def the_engine_decides(impl: ModuleType) -> None:
    """Your numbers beside those of RadixCache(page_size=16)."""
    expect_answers("claim_of_the_tail", impl.claim_of_the_tail(), ask_the_engine(), WHY)


WHY = {
    "tokens_from_cache": "only whole pages are shared",
    "pages_from_cache": "how many whole pages are within 20 tokens?",
    "tokens_computed": "all that is not taken from the cache",
    "pages_of_its_own": "40 tokens need three pages in all",
    "claim_holds": "a page whose tokens differ from some point on belongs to one of the two, whole",
}
"""What to think of, without the number."""

EXERCISES = [
    Exercise(
        "gather_attention", 4,
        [one_key, decode_through_pages_in_order, decode_through_scattered_pages, last_page_not_full,
         longer_page_table, several_queries_are_causal, a_chunk_behind_a_cached_prefix, grouped_heads,
         another_scale],
        hints=(
            "`position = torch.arange(kv_len)`, then `torch.as_tensor(pages)[position // page_size] * "
            "page_size + position % page_size`. `k_pool[slots]` is `[kv_len, K, D]`, in order, and nothing "
            "of anybody else's: from there on it is attention as always.",
            "`k.repeat_interleave(H // K, dim=1)`: 0 0 1 1, not 0 1 0 1.",
            "It is at position `kv_len - T + t`, and sees the positions up to and including that one. The "
            "scale is the one that is given, and with large scores only a softmax that takes out the "
            "maximum survives.",
        ),
        seconds=20,
    ),
    Exercise(
        "ragged_pages", 2, [one_line, three_lines, lines_of_slots],
        hints=(
            "Pages of a request: its length divided by `page_size`, rounded up. `indptr` is their running "
            "sum with a 0 in front.",
            "The page numbers of all requests, one behind the other: a request's are `rows[r, "
            ":length:page_size] // page_size`.",
            "Length 8 with pages of 4: two full pages, and the last one has 4 used slots, not 0. `(length - "
            "1) % page_size + 1`.",
        ),
        seconds=20,
    ),
    Exercise(
        "merge", 3, [two_halves, by_numbers, a_large_and_a_small_part, large_scores, one_side_is_empty],
        hints=(
            "Each `out` is a mean with the weights exp(score), and exp(lse) is the sum of these weights. So "
            "the two sides weigh `exp(lse_a)` and `exp(lse_b)`.",
            "`exp(1000)` is infinite. The lse of both together is `torch.logaddexp(lse_a, lse_b)`: take it "
            "out of the exponents before you take exp.",
            "`exp(lse_a - lse)` and `exp(lse_b - lse)` are between 0 and 1 and add up to 1. To multiply "
            "`out`, they need one dimension more at the end.",
        ),
        seconds=20,
    ),
    Exercise(
        "claim_of_the_tail", 1, [the_engine_decides],
        hints=(
            "Only whole pages are shared. In which page of 16 is the 20th token, and what follows it in "
            "each of the two prompts?",
            "`RadixCache(page_size=16)`, `insert` the first prompt, `peek` the second.",
        ),
    ),
]  # fmt: skip
