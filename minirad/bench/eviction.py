"""Which eviction policy is right for what: the hit rate of each one, on each workload, at three pool sizes.

Model-free. The classroom's workloads run over time through the engine's own tree, scheduler and bookkeeping
with scripted replies (simulate.py). The large streams (`bench radix` times the tree with them) go through
the tree one request after another. The pool sizes are shares of what each would fill without a limit; but a
pool has to hold the longest request, and where that is much of a small workload the sizes are 1, 1.25 and
1.5 times its length. The last column is a cache without a limit: no policy can do better.

`priority` looks like `lru` where all requests have the same priority.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from minirad.bench.streams import STREAMS, Stream, stream
from minirad.bench.tables import table
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixKey
from minirad.simulate import Plan, Replay, Source, endless, read_source, simulate
from minirad.workloads import WORKLOADS

SHARES = (0.1, 0.25, 0.5)
LEAST = (1.0, 1.25, 1.5)  # and at least so many times the longest request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = [name for name in WORKLOADS if name != "none"]
    parser.add_argument("--workloads", default=",".join(known), help=f"of {','.join(known)}; or trace files")
    parser.add_argument("--streams", default=",".join(STREAMS), help=f"of {','.join(STREAMS)}")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    runs: list[tuple[Callable[[Any], dict[str, Any]], Callable[[str], Any], str]]
    runs = [(hit_rates_of_stream, stream, name) for name in _names(args.streams)]
    runs += [(hit_rates, read_source, name) for name in _names(args.workloads)]
    reports = []
    for measure, read, name in tqdm(runs, desc="bench eviction", unit="workload", leave=False):
        reports.append(measure(read(name)))
    print(json.dumps(reports, indent=1) if args.json else as_table(reports))
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def hit_rates_of_stream(work: Stream) -> dict[str, Any]:
    """The same as `hit_rates`, one request after another."""
    keys = [(RadixKey(prompt), RadixKey(full)) for prompt, full in work.requests]
    asked = sum(len(prompt) for prompt, _ in keys)
    whole = Replay()
    optimum = sum(whole.serve(*each) or 0 for each in keys) / asked
    distinct = whole.cache.total_size
    sizes = tuple(int(distinct * share) for share in SHARES)
    rates: dict[str, list[float | None]] = {policy: [] for policy in POLICIES}
    for policy in POLICIES:
        for size in sizes:
            replay = Replay(size, eviction_policy=policy)
            rates[policy].append(sum(replay.serve(*each) or 0 for each in keys) / asked)
    return {
        "workload": f"stream {work.name}", "distinct": distinct, "sizes": sizes, "optimum": optimum,
        "rates": rates,
    }  # fmt: skip


def hit_rates(source: Source) -> dict[str, Any]:
    """{workload, distinct, sizes, optimum, rates: {policy: [hit rate at each size]}}."""
    distinct = endless(source).cache.total_size
    longest = max((prompt.longest for prompt in source.prompts), default=0) + 1
    sizes = tuple(
        max(int(distinct * share), int(longest * least)) for share, least in zip(SHARES, LEAST, strict=True)
    )
    rows = simulate(source, Plan(capacities=sizes, eviction_policies=tuple(POLICIES))).rows
    rates = {
        policy: [
            next(row.hit_rate for row in rows if (row.eviction_policy, row.capacity) == (policy, size))
            for size in sizes
        ]
        for policy in POLICIES
    }
    optimum = next((row.optimum_rate for row in rows), None)
    return {
        "workload": source.name, "distinct": distinct, "sizes": sizes, "optimum": optimum, "rates": rates
    }  # fmt: skip


def as_table(reports: list[dict[str, Any]]) -> str:
    """One line for each workload and size; a star marks the best policies of a line."""
    lines = []
    for report in reports:
        for at, size in enumerate(report["sizes"]):
            rates = [report["rates"][policy][at] or 0.0 for policy in POLICIES]
            best = f"{max(rates):.1%}"  # what looks equal counts as equal
            cells = [f"{rate:.1%}{'*' if f'{rate:.1%}' == best else ' '}" for rate in rates]
            share = f"{size / max(report['distinct'], 1):.0%}"
            lines.append([report["workload"], size, share, *cells, f"{report['optimum'] or 0.0:.1%}"])
    return table(["workload", "pool", "of all", *POLICIES, "no limit"], lines)
