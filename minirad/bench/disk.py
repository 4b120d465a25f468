"""What a disk tier saves an engine that is started anew: one workload by a first engine, and by a second.

The two share nothing but the folder: each has a tree, a pool and a host tier of its own, empty at first, as
two processes have. In the same round this runs with no second tier, with a host tier only, and with a disk
tier below it. Saved are prompt tokens that were not computed: found on the device, loaded back from the
host, or read from the disk before that. Paid is what writing takes beside the steps, and reading within
them. Seconds are the clock's, and the processor's (all threads of this process; what else runs on the
machine does not count): medians of interleaved rounds after one that warms up. Closing, when the last files
are written, is counted beside.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minirad.bench.engine import print_rows
from minirad.bench.tables import table
from minirad.bench.tiers import DOCUMENTS, add_load_arguments, documents, play, pool_size
from minirad.command import positive
from minirad.config import HOST_WRITE, EngineConfig
from minirad.engine import Engine
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.workloads import Workload, load

NONE, HOST, DISK = "none", "host", "host, disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser, f"{DOCUMENTS},agents")
    parser.add_argument("--host-write", choices=HOST_WRITE, default="write_through")
    parser.add_argument("--disk-mb", type=positive, default=1024)
    parser.add_argument("--folder", type=Path, help="where the files go for a while (default: the system's)")
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        torch.set_num_threads(1)
    path = resolve_model(args.model)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    ready = load_model(path, dtype, args.device), load_tokenizer(path)
    names = args.workloads.split(",")
    works = {name: documents() if name == DOCUMENTS else load(name) for name in names}
    pools = {name: pool_size(work, args.share) for name, work in works.items()}
    runs = [(name, tiers) for name in names for tiers in (NONE, HOST, DISK)]
    found: dict[tuple[str, str], list[list[dict[str, Any]]]] = {run: [] for run in runs}
    for rep in tqdm(range(args.reps + 1), desc="bench disk", unit="round", leave=False):
        for name, tiers in runs:
            pair = two_engines(ready, works[name], tiers, pools[name], args)
            if rep:  # the first round warms up
                found[name, tiers].append(pair)
    rows = [
        {"workload": name, "kv_tokens": pools[name], "tiers": tiers, "engine": at, **_median(results)}
        for (name, tiers), pairs in found.items()
        for at, results in zip(("first", "second"), zip(*pairs, strict=True), strict=True)
    ]
    about = f"{args.host_kv_tokens} host slots, {args.host_write}"
    print_rows(rows, args.device, args.json, about, as_table(rows))
    return 0


def two_engines(
    ready: tuple[Any, Any], work: Workload, tiers: str, kv_tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """What a first engine did, and what a second one that is made after it was closed."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        more: dict[str, Any] = {}
        if tiers != NONE:
            more |= {"host_kv_tokens": args.host_kv_tokens, "host_write": args.host_write}
        if tiers == DISK:
            more |= {"disk_dir": folder, "disk_mb": args.disk_mb}
        config = EngineConfig(kv_tokens=kv_tokens, device=args.device, **more)
        return [_run(Engine(config, model=ready[0], tokenizer=ready[1]), work) for _ in range(2)]


def _run(engine: Engine, work: Workload) -> dict[str, Any]:
    """One workload, and the end of its engine."""
    started, busy = time.perf_counter(), time.process_time()
    play(engine, work)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    disk: Any = getattr(engine.cache, "disk", None)
    closing = 0.0
    if disk is not None:
        started = time.perf_counter()
        engine.cache.close()  # type: ignore[attr-defined]  # a DiskCache
        closing = time.perf_counter() - started
    said = {} if disk is None else disk.stats.as_dict()
    stats = engine.stats
    return {
        "prompt_tokens": stats.first.tokens + stats.again.tokens,
        "computed": sum(tally.tokens - tally.cached for tally in (stats.first, stats.again)),
        "loaded": engine.cache_manager.loaded_tokens,
        **{name: said.get(name, 0) for name in ("read", "written", "written_bytes", "late")},
        "reading": said.get("read_seconds", 0.0), "seconds": seconds, "processor_seconds": busy,
        "closing": closing,
    }  # fmt: skip


def _median(results: Any) -> dict[str, Any]:
    """Counts of the first round; times are medians."""
    names = ("seconds", "processor_seconds", "closing", "reading")
    return {**results[0], **{name: statistics.median(r[name] for r in results) for name in names}}


def as_table(rows: list[dict[str, Any]]) -> str:
    """The first and the second engine of each, one below the other."""
    lines = [
        [
            row["workload"], row["kv_tokens"], row["tiers"], row["engine"], row["computed"], row["loaded"],
            row["read"], row["written"], row["written_bytes"] / 1e6, row["seconds"], row["processor_seconds"],
            row["reading"] * 1e3, row["closing"] * 1e3,
        ]
        for row in rows
    ]  # fmt: skip
    head = ["workload", "pool", "tiers", "engine", "computed", "loaded", "read", "written", "MB", "seconds",
            "processor s", "reading ms", "closing ms"]  # fmt: skip
    return table(head, lines)
