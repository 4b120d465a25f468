"""Lesson 14 once more: a Fenwick tree over time, numpy for the counts, a key of two parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Trie = dict[int, Any]  # id -> (number of the block, what stands behind it)


class Marks:
    """How many of the moments from one on are marked (a Fenwick tree that grows)."""

    def __init__(self) -> None:
        self.sums = [0]

    def push(self) -> int:
        """A new moment, marked; returns its number."""
        at = len(self.sums)
        self.sums.append(1 + sum(self.sums[at - step] for step in self._below(at)))
        return at

    def _below(self, at: int) -> list[int]:
        """How far back the parts begin that a new sum covers."""
        return [1 << bit for bit in range((at & -at).bit_length() - 1)]

    def take(self, at: int) -> None:
        while at < len(self.sums):
            self.sums[at] -= 1
            at += at & -at

    def upto(self, at: int) -> int:
        total = 0
        while at:
            total += self.sums[at]
            at -= at & -at
        return total


def needed_sizes(requests: Iterable[Sequence[int]]) -> list[list[int | None]]:
    """A trie gives each block its cell, in which its last moment is noted."""
    root: dict[int, Any] = {}
    marks = Marks()
    found: list[list[int | None]] = []
    for request in requests:
        below, cells = root, []
        for number in request:
            cell, below = below.setdefault(number, ([0], {}))
            cells.append(cell)
        alive = marks.upto(len(marks.sums) - 1)
        found.append([alive - marks.upto(cell[0] - 1) if cell[0] else None for cell in cells])
        for cell in reversed(cells):
            if cell[0]:
                marks.take(cell[0])
            cell[0] = marks.push()
    return found


def _numbers(needed: Sequence[Sequence[int | None]]) -> Any:
    flat = [number for row in needed for number in row if number is not None]
    return np.sort(np.array(flat, dtype=np.int64))


def hit_curve(needed: Sequence[Sequence[int | None]], sizes: Sequence[int]) -> list[int]:
    """numpy's search in the sorted numbers."""
    lengths = [len(row) for row in needed]
    too_small = [size for size in sizes if lengths and size < max(lengths)]
    if too_small:
        raise ValueError(f"too small for the longest request: {too_small[0]}")
    return [int(each) for each in np.searchsorted(_numbers(needed), sizes, side="right")]


def claim_inclusion() -> tuple[list[list[int]], int, int]:
    """Other ids, and a gap between the sizes that does not matter."""
    return [[7, 8, 9], [1, 2], [7, 5], [1, 2]], 4, 5


def victim_key(node: Any) -> Any:
    """lfu, but every third request's newcomers count as hit once already."""
    return node.hits + (node.created % 3 == 0), node.last_access


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """By way of numpy's shapes."""
    heads = config["num_attention_heads"]
    shape = (
        2,
        config["num_hidden_layers"],
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
    )
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float16}
    kind = kinds[config.get("dtype") or config.get("torch_dtype") or "float32"]
    return int(np.prod(shape)) * np.dtype(kind).itemsize


def gigabytes_deserved(
    needed: Sequence[Sequence[int | None]], block_bytes: int, block_worth: int, gigabyte_price: int
) -> int:
    """All gains at once; argmax takes the first of equal ones."""
    numbers = _numbers(needed)
    most = int(numbers[-1]) * block_bytes // 10**9 + 1 if len(numbers) else 0
    gigabytes = np.arange(most + 1, dtype=np.int64)
    found = np.searchsorted(numbers, gigabytes * 10**9 // block_bytes, side="right")
    return int(np.argmax(found * block_worth - gigabytes * gigabyte_price))
