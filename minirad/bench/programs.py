"""The paper's workloads as programs, with each part of the engine switched off in turn.

For each kind of program and each setting:

* programs a second, new tokens a second, and the first as a share of that with everything on (of full);
* time to the first token: median over requests that wait for one, all programs at once;
* latency: seconds of a program, the mean of the first few, one after another on an engine of their own, as
  the paper measures it;
* hit rate: of the programs' prompt tokens those that nobody computed for them; a hint has no prompt of its
  own, and what it computes counts (below 0 where hints are computed for nothing);
* its share of what an endless cache would have had of the same prompts, one after another;
* requests in a step (batch), steps, tokens of prompts that were computed;
* right answers, and how many answers are other ones than with everything on (rounding: a batch of another
  shape adds in another order, and a draw at a temperature can fall the other way).

Turns are interleaved: one round plays every setting once, the next one in the other order, on fresh engines
that share the model; a first run warms up. Figures are medians, with the lowest and the highest of the
rounds. On a CPU with one thread the time is that of the engine's thread (what else the machine does, does not
count), else that of the clock.

The pool is small, as the paper's is for its workloads: a quarter of the tokens that the jobs have in all, and
twice the longest request at least; or --kv-tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minirad.bench.hit_rate import overhead, sweep
from minirad.bench.tables import check_threads, cpu_clock, machine, spread, table
from minirad.command import may_be_written, positive, some_of, write_whole
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.evidence.ablations import FULL, SETTINGS, Setting
from minirad.evidence.kinds import KINDS, Kind
from minirad.evidence.measure import Clock, Played, play_jobs, right
from minirad.evidence.paper import PAPER
from minirad.frontend import Job, ProgramError
from minirad.machine import choose_device, choose_dtype
from minirad.model.load import load_model, load_tokenizer, resolve_model

ALONE = 2  # programs that are run one after another, for latency
FIRST_POOL = 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, known in (("--kinds", KINDS), ("--settings", SETTINGS)):
        parser.add_argument(
            option, type=some_of(known), default=tuple(known),
            help=f"with commas between them: {', '.join(known)} (default: all)",
        )  # fmt: skip
    parser.add_argument("--model", help="default: the classroom Llama")
    parser.add_argument("--jobs", type=positive, help="programs of each kind (default: as many as it has)")
    parser.add_argument("--kv-tokens", type=positive, help="pool size (default: see above)")
    parser.add_argument("--max-running", type=positive, default=32)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="hit rate against speed, and what the tree costs where nothing can hit, as well (on a CPU)",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON to this .json file as well")


def main(args: argparse.Namespace) -> int:
    chosen = [KINDS[name] for name in args.kinds]
    settings = [SETTINGS[name] for name in dict.fromkeys((FULL, *args.settings))]
    if args.out is not None:
        may_be_written("--out", args.out, (".json",))
    bench = Bench.of(args)
    place = _place(args, bench)
    # First: a model that cannot do it is refused before anything has been measured for nothing.
    speed = swept(bench, args) if args.sweep else {"hit_rate": None, "overhead": None}
    rows = []
    with tqdm(total=len(chosen) * args.reps * len(settings), desc="bench programs", leave=False) as bar:
        for kind in chosen:
            bar.set_postfix_str(kind.name)
            rows.append(bench.kind(kind, settings, args.jobs, args.reps, bar))
    result = {
        "machine": place, "model": args.model or "classroom", "kinds": rows,
        **speed,
        "ablations": {
            each.name: {
                "title": each.title, "paper_sign": PAPER[each.name].sign,
                "paper_size": PAPER[each.name].size, "note": PAPER[each.name].note,
            }
            for each in settings
        },
    }  # fmt: skip
    if args.out is not None:
        write_whole(args.out, json.dumps(result, indent=1))
    print(json.dumps(result, indent=1) if args.json else as_text(result))
    return 0


def _place(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Where it is measured, and how busy that is before it begins."""
    place = {**machine(), "threads": args.threads, "clock": bench.clock_name}
    return place if bench.device.type == "cpu" else {**place, "gpu": torch.cuda.get_device_name(bench.device)}


# ---------------------------------------------------------------------- measuring


@dataclass(slots=True)
class Round:
    """One setting, once: all jobs at once, and a few of them one after another."""

    together: Played
    alone: float  # seconds of a program


@dataclass(slots=True)
class Bench:
    """A model on a device, and fresh engines around it."""

    model: Any
    tokenizer: Any
    device: torch.device
    max_running: int
    kv_tokens: int | None
    clock: Clock
    clock_name: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> Bench:
        """Loads the model."""
        device = choose_device(args.device, None)
        check_threads(args.threads)
        torch.set_num_threads(args.threads)
        path = resolve_model(args.model)
        one = device.type == "cpu" and args.threads == 1
        name, clock = cpu_clock() if one else ("perf_counter_ns", time.perf_counter_ns)
        model = load_model(path, choose_dtype("auto", device), device)
        return cls(model, load_tokenizer(path), device, args.max_running, args.kv_tokens, clock, name)

    def engine(self, setting: Setting, kv_tokens: int) -> Engine:
        config = EngineConfig(
            device=str(self.device), kv_tokens=kv_tokens, max_running=self.max_running, **setting.config
        )
        cache = None if setting.cache is None else setting.cache()
        return Engine(config, cache, model=self.model, tokenizer=self.tokenizer)

    def play(self, jobs: Sequence[Job], setting: Setting, kv_tokens: int) -> Played:
        try:
            return play_jobs(self.engine(setting, kv_tokens), jobs, setting, self.clock)
        except ProgramError as error:
            raise ValueError(f"--kv-tokens {kv_tokens}: {error}") from None

    def round(self, jobs: Sequence[Job], setting: Setting, kv_tokens: int) -> Round:
        together = self.play(jobs, setting, kv_tokens)
        engine = self.engine(setting, kv_tokens)
        alone = [play_jobs(engine, [job], setting, self.clock).seconds for job in jobs[:ALONE]]
        return Round(together, statistics.fmean(alone))

    def kind(
        self, kind: Kind, settings: Sequence[Setting], count: int | None, reps: int, bar: Any
    ) -> dict[str, Any]:
        """All that is said of one kind."""
        jobs = kind.make(count or kind.jobs, random.Random(kind.name))
        enough = self.pool_for(jobs)  # this run warms up, too
        pool = self.kv_tokens or enough
        rounds: dict[str, list[Round]] = {setting.name: [] for setting in settings}
        for turn in range(reps):
            for setting in settings if turn % 2 else reversed(settings):  # a drift falls on all alike
                rounds[setting.name].append(self.round(jobs, setting, pool))
                bar.update()
        full = rounds[FULL][0].together
        said = [repr(outcome.value) for outcome in full.outcomes]
        runs = {
            name: {
                **summary(each, len(jobs)),
                "right": right(kind, jobs, each[0].together.outcomes),
                "other": sum(
                    repr(outcome.value) != value
                    for outcome, value in zip(each[0].together.outcomes, said, strict=True)
                ),
            }
            for name, each in rounds.items()
        }
        return {
            "name": kind.name, "title": kind.title, "paper": kind.paper, "scaled": kind.scaled,
            "jobs": len(jobs), "requests": full.requests, "prompt_tokens": full.prompt_tokens,
            "kv_tokens": pool,
            "optimum_hit_rate": full.endless_tokens / full.prompt_tokens if full.prompt_tokens else 0.0,
            "right": runs[FULL]["right"], "runs": runs,
        }  # fmt: skip

    def pool_for(self, jobs: Sequence[Job]) -> int:
        """A quarter of the tokens that all requests have in all, twice the longest at least."""
        played = self.play(jobs, SETTINGS[FULL], FIRST_POOL)
        distinct = played.prompt_tokens - played.endless_tokens + played.new_tokens
        return min(max(2 * played.longest, distinct // 4), FIRST_POOL)


def summary(rounds: Sequence[Round], jobs: int) -> dict[str, Any]:
    """Of times the median, the lowest and the highest; counts are the same in every round."""
    first = rounds[0].together
    seconds = [each.together.seconds for each in rounds]
    return {
        "seconds": seconds,
        "programs_per_s": spread([jobs / each for each in seconds]),
        "tokens_per_s": spread([each.together.new_tokens / each.together.seconds for each in rounds]),
        "ttft_ms": spread([each.together.ttft * 1e3 for each in rounds]),
        "latency_s": spread([each.alone for each in rounds]),
        "hit_rate": first.hit_rate, "share": first.share, "batch": first.batch, "steps": first.steps,
        "requests": first.requests, "prompt_tokens": first.prompt_tokens,
        "computed_tokens": first.computed_tokens, "new_tokens": first.new_tokens,
    }  # fmt: skip


def swept(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Speed over the hit rate on trees of thought, and the tree's part of the time where nothing can hit."""
    if bench.device.type != "cpu":
        raise ValueError(f"--sweep is measured on a CPU, not on {bench.device}")
    return {
        "hit_rate": sweep(bench.model, bench.tokenizer, reps=args.reps),
        "overhead": overhead(bench.model, reps=args.reps),
    }


# ---------------------------------------------------------------------- showing


def as_text(result: dict[str, Any]) -> str:
    """A line for each kind and setting, then one for each setting over all kinds."""
    place = result["machine"]
    about = (
        f"{result['model']} on {place.get('gpu', place['processor'])}, {place['threads']} thread(s), load "
        f"{place['load']}, Python {place['python']}, torch {place['torch']}, minirad {place['minirad']}, "
        f"{place['date']}"
    )
    rows = [_row(kind, name, run) for kind in result["kinds"] for name, run in kind["runs"].items()]
    head = [
        "programs", "pool", "setting", "programs/s", "low-high", "of full", "tokens/s", "TTFT ms",
        "latency s", "hit rate", "share", "batch", "steps", "computed", "right", "other",
    ]  # fmt: skip
    notes = [f"{name}: {said['note']}" for name, said in result["ablations"].items() if said["note"]]
    parts = [about, table(head, rows), table(*_ablations(result)), "\n".join(notes)]
    return "\n\n".join(parts + (_swept(result) if result["hit_rate"] else []))


def _swept(result: dict[str, Any]) -> list[str]:
    rows = [
        [f"{row['kept']:.0%}", f"{row['hit_rate']:.1%}",
         *(row[name]["median"] for name in ("tokens_per_s", "ttft_ms", "batch"))]
        for row in result["hit_rate"]
    ]  # fmt: skip
    cost = result["overhead"]
    return [
        table(["kept of a match", "hit rate", "tokens/s", "TTFT ms", "batch"], rows),
        f"nothing can hit: {cost['tree_seconds']:.3f} of {cost['seconds']:.2f} s in the tree's calls "
        f"({cost['share']:.2%}); the paper: 0.2 of 74.3 s",
    ]


def _row(kind: dict[str, Any], name: str, run: dict[str, Any]) -> list[Any]:
    rate = run["programs_per_s"]
    right_of = "-" if run["right"] is None else "{} of {}".format(*run["right"])
    return [
        kind["name"], kind["kv_tokens"], name, rate["median"], f"{rate['low']:.2f}-{rate['high']:.2f}",
        _of_full(kind, name), run["tokens_per_s"]["median"], run["ttft_ms"]["median"],
        run["latency_s"]["median"], f"{run['hit_rate']:.1%}",
        "-" if run["share"] is None else f"{run['share']:.1%}", run["batch"], run["steps"],
        run["computed_tokens"], right_of, run["other"],
    ]  # fmt: skip


def _of_full(kind: dict[str, Any], name: str) -> float:
    """Throughput as a share of that with everything on: the median of the rounds' own ratios."""
    full, others = kind["runs"][FULL]["seconds"], kind["runs"][name]["seconds"]
    return float(statistics.median(mine / other for mine, other in zip(full, others, strict=True)))


def _ablations(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for name, said in result["ablations"].items():
        shares = {kind["name"]: _of_full(kind, name) for kind in result["kinds"]}
        least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        rows.append([
            name, statistics.median(shares.values()), f"{shares[least]:.2f} {least}",
            f"{shares[most]:.2f} {most}", sum(share < 1 for share in shares.values()), said["paper_sign"],
            said["paper_size"],
        ])  # fmt: skip
    head = ["setting", "of full", "lowest", "highest", "kinds below 1", "the paper's", "its size"]
    return head, rows
