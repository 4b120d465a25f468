"""What a second tier saves and what it costs: one workload through the engine, once for each host_write.

The device's pool is small, so that prefixes are evicted before they are asked for again. The same
requests run without a host tier, and with one under each policy. Saved are prompt tokens that were not
computed: found on the device, or loaded back from the host. Paid are copies. Times are wall clock, the
median of several runs, interleaved so that all see the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from minirad.bench.tables import processor, table
from minirad.command import above_zero, positive
from minirad.config import HOST_WRITE, EngineConfig
from minirad.engine import Engine
from minirad.frontend.player import send_due
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.observe import events as ev
from minirad.simulate import endless, from_workload
from minirad.traces import tokenizer
from minirad.workloads import Player, Session, Turn, Workload, load

NONE, DOCUMENTS = "none", "documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, f"{DOCUMENTS},mixed,chat,agents")
    parser.add_argument("--threshold", type=positive, default=10, help="fewer tokens are computed again")
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument("--json", action="store_true")


def add_load_arguments(parser: argparse.ArgumentParser, workloads: str) -> None:
    """What is played, on which model, in which sizes; workloads: the default. Also for bench/disk.py."""
    parser.add_argument(
        "--workloads", default=workloads,
        help=f"{DOCUMENTS} (long texts that are asked about again and again), of minirad.workloads, or files",
    )  # fmt: skip
    parser.add_argument("--model", help="default: the classroom Llama")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument(
        "--share", type=above_zero, default=0.3, help="pool, as a share of all distinct tokens"
    )
    parser.add_argument("--host-kv-tokens", type=int, default=20000)


def main(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        torch.set_num_threads(1)
    path = resolve_model(args.model)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model, text = load_model(path, dtype, args.device), load_tokenizer(path)
    works = {name: documents() if name == DOCUMENTS else load(name) for name in args.workloads.split(",")}
    pools = {name: pool_size(work, args.share) for name, work in works.items()}
    runs = [(name, write) for name in args.workloads.split(",") for write in (NONE, *HOST_WRITE)]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {run: [] for run in runs}
    for rep in tqdm(range(args.reps + 1), desc="bench tiers", unit="round", leave=False):
        for name, write in runs:
            result = run_once(model, text, works[name], write, pools[name], args)
            if rep:  # the first round warms up
                found[name, write].append(result)
    rows = [_median(results) for results in found.values()]
    if args.json:
        print(json.dumps({"processor": processor(), "runs": rows}, indent=1))
    else:
        print(f"on {processor() if args.device == 'cpu' else torch.cuda.get_device_name()}, "
              f"{args.host_kv_tokens} host slots\n{as_table(rows)}")  # fmt: skip
    return 0


def documents(count: int = 12, length: int = 400, rounds: int = 4) -> Workload:
    """Sessions of random tokens, a document each, that come back when all the others had their turn."""
    rng = np.random.default_rng(0)

    def turn(size: int) -> Turn:
        ids = tuple(rng.integers(300, 700, size).tolist())
        return Turn(token_ids=ids, max_new_tokens=8, ignore_eos=True, wait=12 * count)

    sessions = [
        Session(f"document {n}", tuple(turn(length if at == 0 else 12) for at in range(rounds)), 12 * n)
        for n in range(count)
    ]
    return Workload(DOCUMENTS, "long documents, asked about again and again", tuple(sessions))


def pool_size(workload: Workload, share: float) -> int:
    """Slots for a share of a workload's distinct tokens; at least for its longest request, and a margin."""
    source = from_workload(workload, tokenizer(None))
    longest = max(prompt.longest for prompt in source.prompts)
    return max(int(endless(source).cache.total_size * share), longest + 64)


def run_once(
    model: LlamaModel, text: Any, work: Workload, write: str, kv_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One workload from an empty cache to its last reply."""
    tier = {} if write == NONE else {"host_kv_tokens": args.host_kv_tokens, "host_write": write}
    config = EngineConfig(kv_tokens=kv_tokens, load_back_threshold=args.threshold, **tier)
    engine = Engine(config, model=model, tokenizer=text)
    copied = {"out": 0, "copies": 0}

    def count(event: ev.BackupStarted) -> None:
        copied["out"] += len(event.host_slots)
        copied["copies"] += 1

    engine.bus.subscribe(ev.BackupStarted, count)
    clock = _Clock()
    if engine.host_tier is not None:
        clock.watch(engine.host_tier, "backup", "load")
    started = time.perf_counter()
    play(engine, work)
    seconds = time.perf_counter() - started
    stats = engine.stats
    return {
        "workload": work.name, "kv_tokens": kv_tokens, "host_write": write,
        "prompt_tokens": stats.first.tokens + stats.again.tokens,
        "computed": stats.computed, "hit_rate": (stats.first.cached / stats.first.tokens),
        "loaded": engine.cache_manager.loaded_tokens, "copied_out": copied["out"], "copies": copied["copies"],
        "seconds": seconds, "copy_seconds": clock.seconds,
    }  # fmt: skip


def play(engine: Engine, work: Workload) -> None:
    """A whole workload, as its sessions go on."""
    player = Player(work, lambda text: engine.encode(text).tolist(), engine)
    step = 0
    while not player.done or engine.has_work:
        send_due(engine, player, step)
        for output in engine.step().finished:
            player.finished(output, step)
        step += 1
    player.close()


class _Clock:
    """Adds up what some methods of an object take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, target: Any, *names: str) -> None:
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts are the same in every run; times are medians."""
    times = {name: statistics.median(r[name] for r in results) for name in ("seconds", "copy_seconds")}
    return {**results[0], **times}


def as_table(rows: list[dict[str, Any]]) -> str:
    """Computed tokens beside those of the run without a tier, and what was copied for it."""
    lines = []
    for row in rows:
        (plain,) = (r for r in rows if (r["workload"], r["host_write"]) == (row["workload"], NONE))
        saved = plain["computed"] - row["computed"]
        lines.append([
            row["workload"], row["kv_tokens"], row["host_write"], f"{row['hit_rate']:.1%}", row["computed"],
            saved, row["loaded"], row["copied_out"], row["copies"], row["seconds"], row["copy_seconds"] * 1e3,
        ])  # fmt: skip
    head = ["workload", "pool", "host_write", "hit rate", "computed", "saved", "loaded", "copied out",
            "copies", "seconds", "copying ms"]  # fmt: skip
    return table(head, lines)
