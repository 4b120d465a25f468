"""Lesson 14, solved: a sorted list of last uses; sorting for the curve; leases, some of them gifts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

GIGABYTE = 10**9


def needed_sizes(requests: Iterable[Sequence[int]]) -> list[list[int | None]]:
    """How many blocks were used since a block's last use, itself included: its place in the stack of lru."""
    names: dict[tuple[int, int], int] = {}  # (the block before, id) -> number of this block
    last: dict[int, int] = {}  # when a block was used last
    times: list[int] = []  # the same, of all blocks, in order
    now = 0
    found = []
    for request in requests:
        path = []
        block = 0
        for number in request:
            block = names.setdefault((block, number), len(names) + 1)
            path.append(block)
        found.append([len(times) - bisect_left(times, last[each]) if each in last else None for each in path])
        for each in reversed(path):
            if each in last:
                del times[bisect_left(times, last[each])]
            now += 1
            last[each] = now
            times.append(now)
    return found


def hit_curve(needed: Sequence[Sequence[int | None]], sizes: Sequence[int]) -> list[int]:
    """Of the sorted numbers, those up to each size."""
    longest = max(map(len, needed), default=0)
    for size in sizes:
        if size < longest:
            raise ValueError(f"a cache of {size} blocks refuses a request of {longest}")
    numbers = _numbers(needed)
    return [bisect_right(numbers, size) for size in sizes]


def _numbers(needed: Sequence[Sequence[int | None]]) -> list[int]:
    return sorted(number for row in needed for number in row if number is not None)


def claim_inclusion() -> tuple[list[list[int]], int, int]:
    """The look-up of [1, 3] cuts [1, 1, 1] in two; the half that nobody asked for counts as used, too.

    With 5 blocks it is still there, and outlives [0, 0], which is asked for next. With 4 it went before.
    """
    return [[1, 1, 1], [0, 0], [1, 3], [0, 0]], 4, 5


def victim_key(node: Any) -> Any:
    """The lease that ends first: 1,200 ticks for each hit, and 600 for every third request's newcomers."""
    leases = 2 * min(node.hits, 4) + (node.created % 3 == 0)
    return node.last_access + 600 * leases


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Keys and values, of all layers and KV heads."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    size = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    kv_heads = config.get("num_key_value_heads") or heads
    return int(2 * config["num_hidden_layers"] * kv_heads * width * size)


def gigabytes_deserved(
    needed: Sequence[Sequence[int | None]], block_bytes: int, block_worth: int, gigabyte_price: int
) -> int:
    """Every number of gigabytes up to the one that finds all: a curve may rise again where it looked flat."""
    numbers = _numbers(needed)
    most = -(-numbers[-1] * block_bytes // GIGABYTE) if numbers else 0
    best, best_gain = 0, 0
    for gigabytes in range(1, most + 1):
        found = bisect_right(numbers, gigabytes * GIGABYTE // block_bytes)
        gain = found * block_worth - gigabytes * gigabyte_price
        if gain > best_gain:
            best, best_gain = gigabytes, gain
    return best
