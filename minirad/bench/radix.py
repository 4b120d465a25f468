"""The radix tree alone: no model, no engine, one thread.

Each workload (bench/streams.py) runs request by request as an engine would drive the cache:
match -> lock -> evict what is short -> insert -> free duplicates -> unlock. Only the cache's own calls
are on the clock, each by itself; `cache_s` is their sum. One run warms up, the rest are measured, and
the median run counts. Garbage collection is off meanwhile.

--no-cache runs the same requests with the page allocator alone, so that the table says what the tree
costs per request: its microseconds, and its share of tree and allocator together.
--scaling prints the cost table instead: how each operation grows, beside two textbook trees.

--json prints {clock, python, numpy, reps, workloads: [{workload, page, requests, hit, new, evicted,
evict_calls, skipped, total, cache_s, us: {match, lock, evict, insert, unlock: mean microseconds per call},
calls: {...}, per_request_us, allocator_us, no_cache_us, share}], evict_one: [{page, leaves, us}], full_hit:
[{page, tokens, nodes, us}]}; with --scaling {clock, python, numpy, reps, scaling: [{operation, by, n, radix,
per_token, trie}], memory: [...]}, microseconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from minirad.bench.operations import (
    RADIX,
    Index,
    Kind,
    Meter,
    cut,
    evict_one_us,
    full_hit_us,
    no_garbage_collection,
)
from minirad.bench.streams import STREAMS, Stream, stream
from minirad.bench.tables import Clock, cpu_clock, table
from minirad.cache.allocator import PageAllocator

OPERATIONS = ("match", "lock", "evict", "insert", "unlock")
LEAVES = (100, 1000, 5000, 20_000)
HIT_TOKENS, HIT_NODES = 4096, (1, 8, 64, 256)


@dataclass(slots=True)
class Run:
    """One pass over a stream. Tokens are counted; times are nanoseconds of each call."""

    hit: int = 0
    new: int = 0
    evicted: int = 0
    skipped: int = 0  # requests for which even eviction made no room
    total: int = 0  # tokens in the tree at the end
    nanoseconds: dict[str, list[int]] = field(default_factory=dict)
    allocator_ns: int = 0

    @property
    def cache_ns(self) -> int:
        return sum(sum(times) for times in self.nanoseconds.values())


def pool_for(requests: Stream, page: int) -> PageAllocator:
    size = requests.pool_tokens or requests.total_tokens + page
    return PageAllocator(size // page * page, page)


def run_stream(requests: Stream, page: int, kind: Kind, clock: Clock) -> Run:
    """Drives a fresh tree through a stream."""
    index, pool, run = kind.make(page), pool_for(requests, page), Run()
    rows = [(cut(prompt, page), cut(full, page)) for prompt, full in requests.requests]
    keyed = [(kind.key(prompt), kind.key(full), len(full)) for prompt, full in rows]
    tree, allocator = Meter(clock), Meter(clock)
    with no_garbage_collection():
        for prompt, full, length in keyed:
            _one_request(index, pool, run, tree, allocator, (prompt, full, length))
    run.total = index.evictable_size + index.protected_size
    run.nanoseconds = tree.nanoseconds
    run.allocator_ns = sum(sum(times) for times in allocator.nanoseconds.values())
    return run


def _one_request(
    index: Index, pool: PageAllocator, run: Run, tree: Meter, allocator: Meter, request: tuple[Any, Any, int]
) -> None:
    prompt, full, length = request
    match = tree("match", index.match_prefix, prompt)
    node = match.last_node
    tree("lock", index.inc_lock_ref, node)
    run.hit += match.length
    need = length - match.length
    if pool.available < need:
        freed = tree("evict", index.evict, need - pool.available)
        allocator("free", pool.free, freed.slots)
        run.evicted += len(freed.slots)
    fresh = allocator("alloc", pool.alloc, need)
    if fresh is None:
        run.skipped += 1
        index.dec_lock_ref(node)
        return
    slots = np.concatenate((match.slots, fresh))
    inserted = tree("insert", index.insert, full, slots)
    allocator("free", pool.free, slots[match.length : inserted.prefix_len])
    run.new += length - max(inserted.prefix_len, match.length)
    tree("unlock", index.dec_lock_ref, node)


def run_without_cache(requests: Stream, page: int, clock: Clock) -> int:
    """Nanoseconds that the page allocator alone takes for a stream in which nothing is remembered."""
    pool, meter = pool_for(requests, page), Meter(clock)
    with no_garbage_collection():
        for _, full in requests.requests:
            slots = meter("alloc", pool.alloc, len(cut(full, page)))
            meter("free", pool.free, slots)
    return sum(sum(times) for times in meter.nanoseconds.values())


def measure(requests: Stream, page: int, reps: int, clock: Clock, no_cache: bool) -> dict[str, Any]:
    """One workload at one page size: the median of `reps` runs after one that warms up."""
    runs = [run_stream(requests, page, RADIX, clock) for _ in range(1 + reps)][1:]
    last, count = runs[-1], len(requests.requests)
    result: dict[str, Any] = {"workload": requests.name, "page": page, "requests": count}
    calls = {name: len(last.nanoseconds.get(name, ())) for name in OPERATIONS}
    result.update(hit=last.hit, new=last.new, evicted=last.evicted, evict_calls=calls["evict"])
    result.update(skipped=last.skipped, total=last.total)
    result["cache_s"] = statistics.median(run.cache_ns for run in runs) / 1e9
    result["us"] = {
        name: statistics.median(statistics.fmean(run.nanoseconds[name]) for run in runs) / 1e3
        for name in OPERATIONS
        if calls[name]
    }
    result["calls"] = calls
    result["per_request_us"] = result["cache_s"] * 1e6 / count
    if no_cache:
        bare = [run_without_cache(requests, page, clock) for _ in range(1 + reps)][1:]
        allocator = statistics.median(run.allocator_ns for run in runs) / 1e3 / count
        tree = result["per_request_us"]
        result["allocator_us"] = allocator
        result["no_cache_us"] = statistics.median(bare) / 1e3 / count
        result["share"] = tree / (tree + allocator)
    return result


# ---------------------------------------------------------------------- command line


def numbers(text: str) -> list[int]:
    """A list of positive whole numbers with commas between."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers from 1 on, with commas between")
    return values


def names(text: str) -> list[str]:
    """Workload names with commas between."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in STREAMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown workload {unknown[0]!r}; known: {', '.join(STREAMS)}")
    return chosen


def positive(text: str) -> int:
    """One whole number from 1 on."""
    return numbers(text)[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench radix`."""
    parser.add_argument("--workloads", type=names, default=list(STREAMS), help=f"of {','.join(STREAMS)}")
    parser.add_argument("--pages", type=numbers, default=[1, 16], help="page sizes (default: 1,16)")
    parser.add_argument("--reps", type=positive, default=5, help="measured runs of each (default: 5)")
    parser.add_argument("--requests", type=positive, help="only so many requests of each workload")
    parser.add_argument(
        "--leaves", type=numbers, default=list(LEAVES), help="tree sizes for evicting one leaf"
    )
    parser.add_argument("--no-cache", action="store_true", help="the same requests without a tree beside it")
    parser.add_argument("--scaling", action="store_true", help="the cost table beside two textbook trees")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    if args.scaling:
        from minirad.bench.scaling import scaling, scaling_table

        result = header(args.reps) | scaling(args.reps, args.leaves, cpu_clock()[1])
        print(json.dumps(result, indent=1) if args.json else scaling_table(result))
        return 0
    result = header(args.reps) | run(args)
    print(json.dumps(result, indent=1) if args.json else report(result))
    return 0


def header(reps: int) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "clock": cpu_clock()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "reps": reps,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements but the scaling table, as plain data."""
    clock = cpu_clock()[1]
    parts = len(args.workloads) + len(args.leaves) + len(HIT_NODES)
    result: dict[str, Any] = {"workloads": [], "evict_one": [], "full_hit": []}
    with tqdm(total=parts * len(args.pages), desc="bench radix", disable=None, leave=False) as progress:
        for name in args.workloads:
            requests = stream(name).head(args.requests)
            for page in args.pages:
                result["workloads"].append(measure(requests, page, args.reps, clock, args.no_cache))
                progress.update()
        for page in args.pages:
            for leaves in args.leaves:
                us = _median(args.reps, evict_one_us, RADIX, page, leaves, clock)
                result["evict_one"].append({"page": page, "leaves": leaves, "us": us})
                progress.update()
            for nodes in HIT_NODES:
                us = _median(args.reps, full_hit_us, RADIX, page, HIT_TOKENS, nodes, clock)
                result["full_hit"].append({"page": page, "tokens": HIT_TOKENS, "nodes": nodes, "us": us})
                progress.update()
    return result


def _median(reps: int, function: Callable[..., float], *args: Any) -> float:
    return statistics.median(function(*args) for _ in range(min(reps, 3)))


def report(result: dict[str, Any]) -> str:
    """The result as tables to read."""
    head = ["workload", "page", "requests", "hit tokens", "new", "evicted"]
    head += [f"{name} us" for name in OPERATIONS] + ["cache s"]
    rows = [
        [row[name] for name in ("workload", "page", "requests", "hit", "new", "evicted")]
        + [row["us"].get(name) for name in OPERATIONS]
        + [f"{row['cache_s']:.4f}"]
        for row in result["workloads"]
    ]
    parts = [
        f"mean microseconds per call, median of {result['reps']} runs, clock {result['clock']}, "
        f"Python {result['python']}",
        table(head, rows),
    ]
    if any("share" in row for row in result["workloads"]):
        parts += ["", _no_cache_table(result["workloads"])]
    parts += ["", _grid("evict one leaf of", "leaves", result["evict_one"])]
    parts += ["", _grid(f"full hit of {HIT_TOKENS} tokens over", "nodes", result["full_hit"])]
    return "\n".join(parts)


def _no_cache_table(workloads: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            row["workload"], row["page"], row["no_cache_us"], row["allocator_us"], row["per_request_us"],
            f"{row['share']:.0%}",
        ]
        for row in workloads
    ]  # fmt: skip
    head = ["us per request", "page", "allocator alone", "allocator beside the tree", "tree", "tree's share"]
    return table(head, rows)


def _grid(title: str, by: str, rows: Sequence[dict[str, Any]]) -> str:
    pages = sorted({row["page"] for row in rows})
    found = {(row[by], row["page"]): row["us"] for row in rows}
    sizes = sorted({row[by] for row in rows})
    body = [[f"{size:,} {by}", *(found[size, page] for page in pages)] for size in sizes]
    return table([title, *(f"page {page}, us" for page in pages)], body)
