"""Tunes the eviction policy `brrip` on the first part of a trace, and judges it on the rest of it.

Each choice of its numbers replays the first part (requests one after another, prompts only) at every pool
size; sizes are shares of the distinct units of that part. Its gain is its hit rate over that of the best of
lru, lfu and slru, as a geometric mean over the sizes; `least` is the gain where it is smallest. Of the
choices that lose nowhere the one that gains most is then replayed over the rest, which it has not seen,
beside the numbers that the engine has: from an empty pool (cold), and from one that the first part has been
through, whose hits do not count (warm).

By default on the trace that is part of the project, half and half. The engine's numbers were tuned on all of
it and judged on the second half of the published file, which is not (--split 6015); LOG.md has both.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from tqdm import tqdm

from minirad.bench.tables import table
from minirad.cache.eviction import POLICIES, EvictionPolicy
from minirad.cache.other_policies import brrip
from minirad.cache.radix_cache import RadixKey
from minirad.simulate import Replay, read_source

SHARES = (1 / 64, 0.03, 1 / 16, 0.1, 1 / 4)
RIVALS = ("lru", "lfu", "slru")
LEASES, HITS, MOST, EVERY = (200, 400, 600, 800), (1, 2, 3), (1, 2, 4), (3, 5, 7, 9)
SHOWN = 5
TUNED = "tuned here"


class Numbers(NamedTuple):
    """The numbers of brrip, by the names that it has for them."""

    lease: int
    hit: int
    most: int
    every: int

    def policy(self) -> EvictionPolicy:
        return EvictionPolicy(*brrip(**self._asdict()))


CHOICES = tuple(Numbers(*each) for each in product(LEASES, HITS, MOST, EVERY))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", default="mooncake", help="a trace: its name, or a file")
    parser.add_argument("--split", type=int, help="requests to tune on (default: the first half)")
    parser.add_argument("--choices", type=int, help="try so many choices, spread over all (default: all)")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    keys = [prompt.key for prompt in read_source(args.source).prompts]
    split = (len(keys) + 1) // 2 if args.split is None else args.split
    if len(keys) < 2:
        raise ValueError(f"{args.source}: a trace of {len(keys)} request cannot be split")
    if not 1 <= split < len(keys):
        raise ValueError(
            f"--split must leave requests on both sides: 1 to {len(keys) - 1} of {len(keys)}, not {split}"
        )
    if args.choices is not None and not 1 <= args.choices <= len(CHOICES):
        raise ValueError(f"--choices must be 1 to {len(CHOICES)}, not {args.choices}")
    step = len(CHOICES) // (args.choices or len(CHOICES))
    choices = CHOICES[::step][: args.choices]
    with tqdm(choices, desc="bench learn", unit="choice", leave=False) as bar:
        found = report(keys, split, bar)
    print(json.dumps(found, indent=1) if args.json else as_text(found))
    return 0


def hit_rates(
    keys: Sequence[RadixKey], sizes: Iterable[int], policy: EvictionPolicy, before: Sequence[RadixKey] = ()
) -> list[float]:
    """Cached share of the prompt units of `keys`, for each pool size. before: are replayed first."""
    asked, rates = sum(map(len, keys)), []
    for size in sizes:
        replay = Replay(size)
        replay.cache._queue.rebuild(policy, ())
        for key in before:
            replay.serve(key)
        rates.append(sum(replay.serve(key) or 0 for key in keys) / asked)
    return rates


def sizes_of(keys: Sequence[RadixKey]) -> list[int]:
    """The pool sizes: shares of the distinct units."""
    whole = Replay()
    for key in keys:
        whole.serve(key)
    return [max(1, int(whole.cache.total_size * share)) for share in SHARES]


def gains(rates: Sequence[float], rivals: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Rate over best rival's rate, less one: the geometric mean over the sizes, and the least.

    Sizes where no rival has hits are left out; where none is left, both are 0.
    """
    best = [max(each) for each in zip(*rivals, strict=True)]
    ratios = [max(rate, 1e-9) / other for rate, other in zip(rates, best, strict=True) if other] or [1.0]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1, min(ratios) - 1


def report(keys: Sequence[RadixKey], split: int, choices: Iterable[Numbers]) -> dict[str, Any]:
    """What is printed: all choices with their gains, the best first, and how the best does on the rest.

    {requests: [tuned on, judged on], tuned: [{numbers, gain, least}], judged: {start: {sizes, rates, gains}}}
    """
    first, rest = keys[:split], keys[split:]
    sizes = sizes_of(first)
    rivals = [hit_rates(first, sizes, POLICIES[name]) for name in RIVALS]
    tried = [(*gains(hit_rates(first, sizes, each.policy()), rivals), each) for each in choices]
    tried.sort(key=lambda row: (row[1] < 0, -row[0]))
    policies = {name: POLICIES[name] for name in (*RIVALS, "brrip")} | {TUNED: tried[0][2].policy()}
    judged = {}
    others = sizes_of(rest)
    for start, before in (("cold", keys[:0]), ("warm", first)):
        rates = {name: hit_rates(rest, others, policy, before) for name, policy in policies.items()}
        rivals = [rates[name] for name in RIVALS]
        won = {name: gains(rates[name], rivals) for name in ("brrip", TUNED)}
        judged[start] = {"sizes": others, "rates": rates, "gains": won}
    tuned = [{"numbers": each._asdict(), "gain": won, "least": least} for won, least, each in tried]
    return {"requests": [len(first), len(rest)], "tuned": tuned, "judged": judged}


def as_text(found: dict[str, Any]) -> str:
    """The report as tables."""
    tuned_on, judged_on = found["requests"]
    rows = [
        [*each["numbers"].values(), f"{each['gain']:+.1%}", f"{each['least']:+.1%}"]
        for each in found["tuned"][:SHOWN]
    ]
    lines = [
        f"tuned on {tuned_on:,} requests; choices: {len(found['tuned'])}; the best, and what they gain on "
        f"the best of {', '.join(RIVALS)}",
        table([*Numbers._fields, "gain", "least"], rows),
    ]
    for start, each in found["judged"].items():
        rows = [
            [f"{size:,}", f"{share:.1%}", *(f"{rates[at]:.2%}" for rates in each["rates"].values())]
            for at, (size, share) in enumerate(zip(each["sizes"], SHARES, strict=True))
        ]
        won = ", ".join(
            f"{name} {mean:+.1%}, at least {least:+.1%}" for name, (mean, least) in each["gains"].items()
        )
        lines += [
            "", f"judged on the other {judged_on:,}, {start}: {won}",
            table(["pool", "of all", *each["rates"]], rows),
        ]  # fmt: skip
    return "\n".join(lines)
