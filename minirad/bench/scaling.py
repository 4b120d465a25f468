"""How the cost of each operation grows: the radix tree beside two textbook trees (bench/textbook.py).

Page size 1. To be seen: what grows with the tokens of a prompt, what with the nodes on its path, and what
with the whole tree. bench/LOG.md says what was measured.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from minirad.bench.operations import (
    RADIX,
    Kind,
    Meter,
    chain,
    evict_one_us,
    full_hit_us,
    no_garbage_collection,
)
from minirad.bench.tables import Clock, table
from minirad.bench.textbook import PerTokenRadixTree, TokenTrie

KINDS = {
    "radix": RADIX,
    "per_token": Kind(PerTokenRadixTree, PerTokenRadixTree.key),
    "trie": Kind(TokenTrie, TokenTrie.key),
}
TOKENS = (64, 512, 4096, 32_768)
NODES = (1, 8, 64, 256)
DEEP_TOKENS = 4096
MEMORY_PROMPTS = 1000
Measure = Callable[[Kind, int, Clock], float]


def look_up_long(kind: Kind, tokens: int, clock: Clock) -> float:
    """Median microseconds for a full hit of so many tokens in one node (a trie: one node each)."""
    return full_hit_us(kind, 1, tokens, 1, clock, calls=20)


def look_up_deep(kind: Kind, nodes: int, clock: Clock) -> float:
    """The same for a fixed number of tokens over so many nodes."""
    return full_hit_us(kind, 1, DEEP_TOKENS, nodes, clock, calls=20)


def insert(kind: Kind, tokens: int, clock: Clock) -> float:
    """Median microseconds for inserting a prompt of which nothing is there."""
    rng, index, meter = np.random.default_rng(5), kind.make(1), Meter(clock)
    keys = [kind.key(rng.integers(1, 128_000, tokens)) for _ in range(10)]
    slots = np.arange(tokens, dtype=np.int64)
    with no_garbage_collection():
        for key in keys:
            meter("insert", index.insert, key, slots)
    return statistics.median(meter.nanoseconds["insert"]) / 1e3


def lock(kind: Kind, nodes: int, clock: Clock) -> float:
    """Median microseconds for locking a path of so many nodes (a trie's are its tokens)."""
    index, key = chain(kind, 1, DEEP_TOKENS, nodes)
    node, meter = index.match_prefix(key).last_node, Meter(clock)
    with no_garbage_collection():
        for _ in range(50):
            meter("lock", index.inc_lock_ref, node)
            index.dec_lock_ref(node)
    return statistics.median(meter.nanoseconds["lock"]) / 1e3


def evict(kind: Kind, leaves: int, clock: Clock) -> float:
    """Median microseconds for evicting 16 tokens: one leaf, or 16 of a trie's."""
    return evict_one_us(kind, 1, leaves, clock, calls=5)


def memory(kind: Kind, tokens_each: int) -> float:
    """Bytes per prompt of so many tokens with nothing in common: one node each (a trie: one per token)."""
    rng = np.random.default_rng(9)
    slots = np.arange(tokens_each, dtype=np.int64)
    tracemalloc.start()
    index = kind.make(1)
    empty, _ = tracemalloc.get_traced_memory()
    for number in range(MEMORY_PROMPTS):
        index.insert(kind.key(rng.integers(1, 128_000, tokens_each)), slots + number * tokens_each)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (used - empty) / MEMORY_PROMPTS


def scaling(reps: int, leaves: Sequence[int], clock: Clock) -> dict[str, Any]:
    """All rows of the cost table: microseconds per call, and bytes per prompt."""
    deep = f"nodes of {DEEP_TOKENS:,} tokens together"
    plans: list[tuple[str, str, Sequence[int], Measure]] = [
        ("look-up", "tokens in one node", TOKENS, look_up_long),
        ("look-up", deep, NODES, look_up_deep),
        ("insert", "tokens", TOKENS, insert),
        ("lock", deep, NODES, lock),
        ("evict", "leaves", leaves, evict),
    ]
    rows: list[dict[str, Any]] = []
    steps = len(KINDS) * sum(len(sizes) for _, _, sizes, _ in plans)
    with tqdm(total=steps, desc="bench radix", disable=None, leave=False) as progress:
        for operation, by, sizes, measure in plans:
            for n in sizes:
                row: dict[str, Any] = {"operation": operation, "by": by, "n": n}
                for name, kind in KINDS.items():
                    row[name] = statistics.median(measure(kind, n, clock) for _ in range(min(reps, 3)))
                    progress.update()
                rows.append(row)
    used = [{"tokens_each": n} | {name: memory(kind, n) for name, kind in KINDS.items()} for n in (16, 256)]
    return {"scaling": rows, "memory": used}


def scaling_table(result: dict[str, Any]) -> str:
    """The result as a table to read."""
    names = list(KINDS)
    rows: list[list[object]] = [
        [row["operation"], f"{row['n']:,} {row['by']}", *(row[name] for name in names)]
        for row in result["scaling"]
    ]
    rows += [
        ["memory, bytes", f"per prompt of {row['tokens_each']} tokens", *(row[name] for name in names)]
        for row in result["memory"]
    ]
    head = ["microseconds", "at", "radix tree", "compared per token", "token trie"]
    return f"page size 1, clock {result['clock']}, Python {result['python']}\n" + table(head, rows)
