"""Lesson 14, built otherwise: the row itself as a list, counting, a key that looks at length and hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any


def needed_sizes(requests: Iterable[Sequence[int]]) -> list[list[int | None]]:
    """The row of lru, the block that was used last at its end; a block is known by all that it needs."""
    row: list[int] = []
    known: dict[tuple[int, ...], int] = {}
    found = []
    for request in requests:
        beginnings = [tuple(request[:end]) for end in range(1, len(request) + 1)]
        blocks = [known.setdefault(each, len(known)) for each in beginnings]
        place = {block: len(row) - at for at, block in enumerate(row)} if blocks else {}
        found.append([place.get(block) for block in blocks])
        used = set(blocks)
        row = [block for block in row if block not in used] + blocks[::-1]
    return found


def hit_curve(needed: Sequence[Sequence[int | None]], sizes: Sequence[int]) -> list[int]:
    """Counts once for each number; a running sum answers all sizes."""
    counts = Counter(number for row in needed for number in row if number is not None)
    most = max(counts, default=0)
    upto = list(accumulate(counts[number] for number in range(most + 1)))
    hits = []
    for size in sizes:
        if any(len(row) > size for row in needed):
            raise ValueError(f"size {size}: not every request fits")
        hits.append(upto[min(size, most)])
    return hits


def claim_inclusion() -> tuple[list[list[int]], int, int]:
    """A split again, with a longer story."""
    return [[0, 0], [1, 1, 3], [0, 0, 0], [1, 3, 2], [0, 0, 2]], 5, 6


def victim_key(node: Any) -> Any:
    """Long leaves take much room; a hit counts as a use 600 ticks later."""
    return node.last_access + 600 * min(node.hits, 4) - 20 * len(node)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """With names."""
    query_heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if kv_heads is None:
        kv_heads = query_heads
    if head_dim is None:
        head_dim = config["hidden_size"] // query_heads
    name = config.get("dtype")
    if name is None:
        name = config.get("torch_dtype")
    numbers = config["num_hidden_layers"] * kv_heads * head_dim * 2
    return int(numbers) * (2 if str(name).endswith("16") else 4)


def gigabytes_deserved(
    needed: Sequence[Sequence[int | None]], block_bytes: int, block_worth: int, gigabyte_price: int
) -> int:
    """For each block the gigabytes that find it; then what each number of gigabytes adds."""
    gains = Counter(
        max(1, -(-number * block_bytes // 10**9)) for row in needed for number in row if number is not None
    )
    best = best_at = gain = 0
    for gigabytes in range(1, max(gains, default=0) + 1):
        gain += gains[gigabytes] * block_worth - gigabyte_price
        if gain > best:
            best, best_at = gain, gigabytes
    return best_at
