"""Which eviction policy is right for what: the hit rate of each one, on each workload, at three pool sizes.

Model-free. The classroom's workloads run over time through the engine's own tree, scheduler and bookkeeping
with scripted replies (simulate.py). The large streams (`bench radix` times the tree with them) go through
the tree one request after another. The pool sizes are shares of what each would fill without a limit; but a
pool has to hold the longest request, and where that is much of a small workload the sizes are 1, 1.25 and
1.5 times its length.

Beside the policies stand `clairvoyant`, which knows the requests to come (in a stream, whose order is known),
the bound that no eviction policy passes at that size (minirad/optimum.py), and a cache without a limit. Over
time each policy makes an order of its own and has its own bound: the table says from where to where they go.
The second table is each policy's share of its bound.

`priority` looks like `lru` where all requests have the same priority.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

from tqdm import tqdm

from minirad.bench.streams import STREAMS, Stream, stream
from minirad.bench.tables import table
from minirad.cache.eviction import POLICIES
from minirad.cache.radix_cache import RadixKey
from minirad.config import one_of
from minirad.optimum import CLAIRVOYANT, Known
from minirad.simulate import (
    ForeseeingReplay,
    Plan,
    Replay,
    Source,
    endless,
    read_source,
    simulate,
)
from minirad.workloads import WORKLOADS

SHARES = (0.1, 0.25, 0.5)
LEAST = (1.0, 1.25, 1.5)  # and at least so many times the longest request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = [name for name in WORKLOADS if name != "none"]
    parser.add_argument("--workloads", default=",".join(known), help=f"of {','.join(known)}; or trace files")
    parser.add_argument("--streams", default=",".join(STREAMS), help=f"of {','.join(STREAMS)}")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    streams = _names(args.streams)
    for name in streams:  # what is not there is said before minutes are spent on what is
        one_of("stream", name, tuple(STREAMS))
    sources = [read_source(name) for name in _names(args.workloads)]
    if not streams and not sources:
        raise ValueError("nothing to measure: name a workload or a stream")
    measured = chain((hit_rates_of_stream(stream(name)) for name in streams), map(hit_rates, sources))
    total = len(streams) + len(sources)
    reports = list(tqdm(measured, "bench eviction", total, unit="workload", leave=False))
    print(json.dumps(reports, indent=1) if args.json else as_table(reports))
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def hit_rates_of_stream(work: Stream) -> dict[str, Any]:
    """The same as `hit_rates`, one request after another."""
    known = Known([(RadixKey(prompt), RadixKey(full)) for prompt, full in work.requests])
    sizes = tuple(int(known.distinct * share) for share in SHARES)
    asked = sum(len(prompt) for prompt, _ in work.requests)

    def rates(replays: Iterable[Replay]) -> list[float | None]:
        return [sum(replay.serve(*keys) or 0 for keys in known.requests) / asked for replay in replays]

    (optimum,) = rates([Replay()])
    bounds = [known.bound(size) / asked for size in sizes]
    return {
        "workload": f"stream {work.name}", "distinct": known.distinct, "sizes": sizes, "optimum": optimum,
        "rates": {name: rates(Replay(size, eviction_policy=name) for size in sizes) for name in POLICIES},
        "bounds": dict.fromkeys(POLICIES, bounds),
        CLAIRVOYANT: rates(ForeseeingReplay(known, size) for size in sizes),
    }  # fmt: skip


def hit_rates(source: Source) -> dict[str, Any]:
    """{workload, distinct, sizes, optimum, rates: {policy: [at each size]}, bounds, clairvoyant}.

    bounds: like rates, by optimum.py; over time each policy has its own. clairvoyant: rates; over time None.
    """
    distinct = endless(source).cache.total_size
    longest = max((prompt.longest for prompt in source.prompts), default=0) + 1
    sizes = tuple(
        max(int(distinct * share), int(longest * least)) for share, least in zip(SHARES, LEAST, strict=True)
    )
    foreseeing = [CLAIRVOYANT] if Plan().drive_of(source) == "replay" else []
    rows = simulate(source, Plan(capacities=sizes, eviction_policies=(*POLICIES, *foreseeing))).rows
    at = {(row.eviction_policy, row.capacity): row for row in rows}
    foreseen = [at[name, size].hit_rate for name in foreseeing for size in sizes]
    return {
        "workload": source.name, "distinct": distinct, "sizes": sizes,
        "optimum": next((row.optimum_rate for row in rows), None),
        "rates": {name: [at[name, size].hit_rate for size in sizes] for name in POLICIES},
        "bounds": {name: [at[name, size].bound_rate for size in sizes] for name in POLICIES},
        CLAIRVOYANT: foreseen or None,
    }  # fmt: skip


def as_table(reports: list[dict[str, Any]]) -> str:
    """A line for each workload and size: hit rates, then shares; a star marks the best policies of a line."""
    rates, shares = [], []
    for report in reports:
        for at, size in enumerate(report["sizes"]):
            reached = [report["rates"][policy][at] or 0.0 for policy in POLICIES]
            bounds = [report["bounds"][policy][at] or 0.0 for policy in POLICIES]
            foreseen = None if report[CLAIRVOYANT] is None else report[CLAIRVOYANT][at]
            line = [report["workload"], size, f"{size / max(report['distinct'], 1):.0%}"]
            least, most = f"{min(bounds):.1%}", f"{max(bounds):.1%}"
            rates.append(
                [*line, *_starred(reached), _cell(foreseen), most if least == most else f"{least} to {most}",
                 _cell(report["optimum"])]
            )  # fmt: skip
            of_bounds = [_share(*pair) for pair in zip(reached, bounds, strict=True)]
            shares.append([*line, *_starred(of_bounds), _cell(foreseen and _share(foreseen, max(bounds)))])
    head = ["workload", "pool", "of all", *POLICIES, CLAIRVOYANT]
    return "\n".join([
        "Hit rates", table([*head, "bound", "no limit"], rates), "",
        "Share of the bound: of what no eviction policy passes", table(head, shares),
    ])  # fmt: skip


def _share(rate: float, bound: float) -> float:
    return rate / bound if bound else 1.0  # nothing can be found, and nothing was


def _starred(values: list[float]) -> list[str]:
    best = f"{max(values):.1%}"  # what looks equal counts as equal
    return [f"{value:.1%}{'*' if f'{value:.1%}' == best else ' '}" for value in values]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
