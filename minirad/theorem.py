"""Theorem 3.1 of the SGLang paper (Zheng et al., 2024), run on the real RadixCache.

The theorem: with requests served one at a time, ranked again each time, no replies in the tree, and a
cache that holds at least the longest request, *longest shared prefix first* is a depth-first order of
the requests' radix tree. It computes each edge once, so no order computes less than that:

    C = sum of the lengths of the tree's edges

`check_tree` runs it. `counter_examples` drops one assumption at a time and finds the smallest requests
for which C is not what is computed, and the smallest for which another order computes less. They are
enumerated by size, so the first one found is the smallest there is. `online` is what remains in
practice: arrivals over time, batches, replies, small pools, as a share of the optimum.

Does not prove anything: it runs, and what it finds can be followed by hand.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations, product
from typing import Any

from tqdm import tqdm

from minirad.cache.radix_cache import RadixKey
from minirad.config import at_least
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.simulate import Replay, Row, from_workload, run_schedule
from minirad.traces import tokenizer
from minirad.workloads import WORKLOADS, load

PAPER_SHARE = 0.96  # of the optimal hit rate, on average over the paper's workloads (section 6)
LARGEST = (3, 5)  # counter-examples are looked for up to so many requests, and tokens together
POOLS = (1, 2, 4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt's tokens, the reply (if replies count), the time at which it comes."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...] = ()
    arrival: int = 0

    def describe(self) -> str:
        """`abc`, `abc>d` with a reply, `abc@2` when it comes later than at the start."""
        reply = f">{_letters(self.reply)}" if self.reply else ""
        return _letters(self.prompt) + reply + (f"@{self.arrival}" if self.arrival else "")


def _letters(tokens: Sequence[int]) -> str:
    if any(token >= len(LETTERS) for token in tokens):
        return str(list(tokens))
    return "".join(LETTERS[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Rules:
    """The theorem's assumptions; each field drops one. The cache holds the longest request, or batch.

    one_computed: the last token of a prompt is always computed (an engine needs its logits).
    replies: the tree keeps replies, too. batch: requests served at once, ranked once.
    missing: tokens that the cache is smaller; of a longer request, what fits is kept.
    """

    one_computed: bool = False
    replies: bool = False
    batch: int = 1
    missing: int = 0
    eviction_policy: str = "lru"

    def capacity(self, jobs: Sequence[Job]) -> int:
        """Tokens of cache: the longest requests that may run at once."""
        sizes = sorted(len(job.prompt) + len(job.reply) * self.replies for job in jobs)
        return max(sum(sizes[-self.batch :]) - self.missing, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """computed: prompt tokens that were not in the cache. order: jobs by number, as they were served."""

    computed: int
    order: tuple[int, ...]


def run(jobs: Sequence[Job], rules: Rules | None = None, order: Sequence[int] | None = None) -> Outcome:
    """Serves all jobs; order None: longest shared prefix first, ranked before each batch.

    Ties go by position in `jobs`. A given order waits for a job that has not come yet.
    """
    rules = rules or Rules()
    capacity = rules.capacity(jobs)
    replay = Replay(capacity, 1, rules.eviction_policy)
    keys = [_keys(job, rules, capacity) for job in jobs]
    left = list(range(len(jobs)) if order is None else order)
    now = computed = 0
    served: list[int] = []
    while left:
        now = max(now, min(jobs[number].arrival for number in (left if order is None else left[:1])))
        ready = [number for number in left if jobs[number].arrival <= now]
        if order is None:
            ready.sort(key=lambda number: (-replay.cache.peek(keys[number][0]), number))
        elif ready != left:
            ready = left[: next(i for i, number in enumerate(left) if jobs[number].arrival > now)]
        batch = ready[: rules.batch]
        for number, matched in zip(batch, replay.serve_together([keys[n] for n in batch]), strict=True):
            size = len(jobs[number].prompt)
            computed += size - (min(matched, size - 1) if rules.one_computed else matched)
            left.remove(number)
        served += batch
        now += 1
    return Outcome(computed, tuple(served))


def _keys(job: Job, rules: Rules, capacity: int) -> tuple[RadixKey, ...]:
    prompt = RadixKey(job.prompt[:capacity])
    return (prompt, RadixKey(job.prompt + job.reply)) if rules.replies and job.reply else (prompt,)


def bound(jobs: Sequence[Job]) -> int:
    """C: the edges of the prompts' radix tree, added up; what must be computed at least once."""
    replay = Replay()
    for job in jobs:
        replay.serve(RadixKey(job.prompt))
    return replay.cache.total_size


def is_depth_first(prompts: Sequence[tuple[int, ...]]) -> bool:
    """Whether an order of prompts is a depth-first order of their tree: no subtree is entered twice."""
    left_behind: set[tuple[int, ...]] = set()
    current: set[tuple[int, ...]] = set()
    for prompt in prompts:
        path = {prompt[:size] for size in range(1, len(prompt) + 1)}
        left_behind |= current - path
        if path & left_behind:
            return False
        current = path
    return True


# ---------------------------------------------------------------------- random trees


@dataclass(frozen=True, slots=True)
class Checked:
    """The theorem on one tree: requests, all their tokens, C, what was computed, and the order."""

    requests: int
    tokens: int
    bound: int
    computed: int
    depth_first: bool

    @property
    def holds(self) -> bool:
        return self.computed == self.bound and self.depth_first


def check_tree(prompts: Sequence[tuple[int, ...]], rules: Rules | None = None) -> Checked:
    """Runs longest shared prefix first over these prompts, as the theorem has it."""
    jobs = [Job(prompt) for prompt in prompts]
    outcome = run(jobs, rules)
    order = [prompts[number] for number in outcome.order]
    return Checked(
        len(jobs), sum(map(len, prompts)), bound(jobs), outcome.computed, is_depth_first(order)
    )  # fmt: skip


def random_tree(rng: random.Random, requests: int) -> list[tuple[int, ...]]:
    """Prompts that branch off each other at random places, shuffled; some are equal, some are prefixes."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(requests):
        stem = rng.choice(prompts) if prompts and rng.random() < 0.8 else ()
        kept = stem[: rng.randint(0, len(stem))]
        new = tuple(rng.randrange(4) for _ in range(rng.randint(0 if kept else 1, 8)))
        prompts.append(kept + new)
    rng.shuffle(prompts)
    return prompts


# ---------------------------------------------------------------------- counter-examples


@dataclass(frozen=True, slots=True)
class Dropped:
    """One assumption less; replies, arrivals: whether the cases to look at have them."""

    name: str
    rules: Rules
    replies: bool = False
    arrivals: bool = False


DROPPED = (
    Dropped("one token is always computed", Rules(one_computed=True)),
    Dropped("replies enter the tree", Rules(replies=True), replies=True),
    Dropped("batches of 2", Rules(batch=2)),
    Dropped("arrivals over time", Rules(), arrivals=True),
    Dropped("the cache is 1 token smaller", Rules(missing=1)),
)


@dataclass(frozen=True, slots=True)
class CounterExample:
    """The smallest jobs for which something fails. best: by the order that computes least."""

    jobs: tuple[Job, ...]
    capacity: int
    bound: int
    computed: int
    order: tuple[int, ...]
    best: int
    best_order: tuple[int, ...]

    def describe(self) -> str:
        """One line of text."""
        said = " ".join(job.describe() for job in self.jobs)
        ours = " ".join(_letters(self.jobs[number].prompt) for number in self.order)
        text = (
            f"requests {said}; cache {self.capacity}; C = {self.bound}; longest prefix first ({ours}) "
            f"computes {self.computed}"
        )
        if self.best == self.computed:
            return f"{text}, no order less"
        theirs = " ".join(_letters(self.jobs[number].prompt) for number in self.best_order)
        return f"{text}, the order {theirs} only {self.best}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What happens without one assumption: the smallest case that does not compute C (more, or with
    replies less), and the smallest where another order is better; None: not in `looked_at` cases."""

    dropped: str
    not_c: CounterExample | None
    beaten: CounterExample | None
    looked_at: int


def cases(dropped: Dropped, largest: tuple[int, int] = LARGEST) -> Iterator[tuple[Job, ...]]:
    """Jobs by size: fewest requests first, then fewest tokens, then fewest reply tokens and waits.

    Tokens are numbered as they first appear, so that no two cases differ in names only.
    """
    most_requests, most_tokens = largest
    for requests in range(1, most_requests + 1):
        for tokens in range(requests, most_tokens + 1):
            for sizes in _compositions(tokens, requests):
                yield from _named(sizes, dropped)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _named(sizes: tuple[int, ...], dropped: Dropped) -> Iterator[tuple[Job, ...]]:
    """All ways to fill prompts of these sizes, with replies of at most one token, and arrivals."""
    count = len(sizes)
    with_reply = sorted(product((0, 1), repeat=count), key=sum) if dropped.replies else [(0,) * count]
    waits = [w for w in product(range(count + 1), repeat=count - 1) if list(w) == sorted(w)]
    arrivals = [(0, *w) for w in sorted(waits, key=sum)] if dropped.arrivals else [(0,) * count]
    for replies in with_reply:
        for tokens in _canonical(sum(sizes) + sum(replies)):
            for times in arrivals:
                rest = iter(tokens)
                prompts = [tuple(next(rest) for _ in range(size)) for size in sizes]
                said = [tuple(next(rest) for _ in range(size)) for size in replies]
                yield tuple(map(Job, prompts, said, times))


def _canonical(length: int) -> Iterator[tuple[int, ...]]:
    """Rows of tokens in which each new one is the smallest not used yet."""
    if length == 0:
        yield ()
        return
    for head in _canonical(length - 1):
        for token in range(max(head, default=-1) + 2):
            yield (*head, token)


def counter_examples(
    dropped: Dropped,
    largest: tuple[int, int] = LARGEST,
    progress: Callable[[], Any] | None = None,
) -> Finding:
    """The smallest cases that fail without one assumption."""
    not_c = beaten = None
    looked_at = 0
    for jobs in cases(dropped, largest):
        looked_at += 1
        if progress:
            progress()
        ours, least = run(jobs, dropped.rules), bound(jobs)
        # Without replies nothing is better than C: where it is reached, no order computes less.
        if ours.computed == least and not dropped.replies:
            continue
        found = _example(jobs, dropped.rules, ours, least)
        if ours.computed != least:
            not_c = not_c or found
        if found.best < ours.computed:
            beaten = beaten or found
        if not_c and beaten:
            break
    return Finding(dropped.name, not_c, beaten, looked_at)


def _example(jobs: tuple[Job, ...], rules: Rules, ours: Outcome, least: int) -> CounterExample:
    orders = [run(jobs, rules, order) for order in permutations(range(len(jobs)))]
    best = min(orders, key=lambda outcome: outcome.computed)
    return CounterExample(
        jobs, rules.capacity(jobs), least, ours.computed, ours.order, best.computed, best.order
    )


# ---------------------------------------------------------------------- online


def online(policies: Sequence[str], progress: Callable[[], Any] | None = None) -> list[Row]:
    """Every built-in workload over time, in pools of POOLS times its own, under each scheduling policy."""
    text = tokenizer()
    rows = []
    for name in WORKLOADS:
        source = from_workload(load(name), text)
        for factor, policy in product(POOLS if source.prompts else (), policies):
            rows.append(run_schedule(source, factor * (source.capacity or 0), 1, "lru", policy))
            if progress:
                progress()
    return rows


# ---------------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Result:
    """All that the command finds."""

    trees: list[Checked]
    findings: list[Finding]
    online: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "trees": {
                "checked": len(self.trees), "holds": sum(each.holds for each in self.trees),
                "requests": sum(each.requests for each in self.trees),
                "tokens": sum(each.tokens for each in self.trees),
                "bound": sum(each.bound for each in self.trees),
                "computed": sum(each.computed for each in self.trees),
            },
            "without": [asdict(finding) for finding in self.findings],
            "online": [row.as_dict() for row in self.online],
            "paper_share": PAPER_SHARE,
        }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad theorem`."""
    parser.add_argument("--trees", type=int, default=200, help="random trees to check")
    parser.add_argument("--requests", type=int, default=12, help="requests per tree, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-online", action="store_true", help="leave the workloads over time out")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    """Runs the command. Exit code 1 if the theorem failed somewhere: then the tree is broken."""
    for name, least in (("trees", 0), ("requests", 1)):
        at_least(name, getattr(args, name), least)
    rng = random.Random(args.seed)
    trees = [
        check_tree(random_tree(rng, rng.randint(1, args.requests)))
        for _ in tqdm(range(args.trees), desc="theorem", unit=" trees", delay=1, leave=False, disable=None)
    ]
    with tqdm(desc="counter-examples", unit=" cases", delay=1, leave=False, disable=None) as bar:
        findings = [counter_examples(each, progress=bar.update) for each in DROPPED]
    with tqdm(desc="workloads", unit=" runs", delay=1, leave=False, disable=None) as bar:
        rows = [] if args.skip_online else online(tuple(SCHEDULE), bar.update)
    result = Result(trees, findings, rows)
    print(json.dumps(result.as_dict(), indent=1) if args.json else text(result))
    return 0 if all(each.holds for each in trees) else 1


def text(result: Result) -> str:
    """The result for people."""
    facts = result.as_dict()["trees"]
    lines = [
        "Theorem 3.1: one request at a time, ranked again each time, no replies, cache >= longest request",
        f"  {facts['holds']} of {facts['checked']} random trees: longest shared prefix first is depth-first "
        "and reaches the bound",
        f"  {facts['requests']:,} requests of {facts['tokens']:,} tokens; C = {facts['bound']:,}, computed "
        f"{facts['computed']:,}",
        "",
        "Without one assumption, the smallest requests for which it fails (a letter is a token; x>y: y is",
        "the reply to x; x@2: x comes at time 2; equal ranks go in the order written)",
    ]
    largest = f"{LARGEST[0]} requests and {LARGEST[1]} tokens"
    for finding in result.findings:
        lines.append(f"  {finding.dropped}")
        for what, example in (("not C", finding.not_c), ("is beaten", finding.beaten)):
            none = f"never, in all {finding.looked_at:,} cases of up to {largest}"
            lines.append(f"    {what:9}  {example.describe() if example else none}")
    if result.online:
        lines += ["", *_online_table(result.online)]
    return "\n".join(lines)


def _online_table(rows: Sequence[Row]) -> list[str]:
    policies = list(dict.fromkeys(row.schedule_policy for row in rows))
    lines = [
        "Online, with made-up replies: hit rate as a share of the optimum (the paper: "
        f"{PAPER_SHARE:.0%} on average)",
        f"  {'workload':18} {'pool':>7} {'optimum':>8}" + "".join(f"{policy!s:>12}" for policy in policies),
    ]
    for name, pool in dict.fromkeys((row.source, row.capacity) for row in rows):
        mine = [row for row in rows if (row.source, row.capacity) == (name, pool)]
        shares = "".join(_share([row]) for row in mine)
        lines.append(f"  {name:18} {pool or 0:7,} {mine[0].optimum_rate or 0:8.1%}{shares}")
    for at, factor in enumerate(POOLS):
        together = [rows[first :: len(policies)] for first in range(len(policies))]
        shares = "".join(_share(mine[at :: len(POOLS)]) for mine in together)
        lines.append(f"  {'all together':18} {f'x {factor}':>7} {'':8}{shares}")
    return lines


def _share(rows: Sequence[Row]) -> str:
    """Cached tokens of all these runs as a share of the optimum's."""
    optimum = sum(row.optimum for row in rows)
    return f"{sum(row.cached for row in rows) / optimum:12.1%}" if optimum else f"{'-':>12}"
