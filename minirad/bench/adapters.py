"""What adapters in one batch cost: the same requests with none, with one for all, with several side by side.

Each token's matrix products are corrected by its own request's adapter, group by group, so a batch of many
adapters does more and smaller products than one of few. All adapters here are one directory under different
names: as many numbers, and the same rank. Prompts share nothing, so that what differs is what is computed,
not what hits (requests of different adapters share no KV). Rounds are interleaved; the first one warms up.
On a CPU it is the time that the engine's thread computed, on a GPU the clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minirad.bench.engine import make_prompts, print_rows
from minirad.bench.speculative import numbers
from minirad.bench.tables import cpu_clock, table
from minirad.command import positive
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import choose_device, choose_dtype
from minirad.model.classroom import ADAPTERS
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, resolve_model

PLAIN = "an engine without adapters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapters", default="1,2,4,8", help="side by side in one batch, a run for each number"
    )
    parser.add_argument("--lora", metavar="DIR", help="the adapter (default: the classroom's `capitals`)")
    parser.add_argument("--model", help="default: the classroom Llama; another one needs --lora")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--requests", type=positive, default=16, help="that run at a time")
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="of each request")
    parser.add_argument("--new-tokens", type=positive, default=32, help="of each request")
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    counts = numbers(args.adapters)
    if args.model and not args.lora:
        raise ValueError(f"model {args.model!r} needs --lora: the classroom's adapters do not fit it")
    device = choose_device(args.device, None)
    if device.type == "cpu":
        torch.set_num_threads(1)
    model = load_model(resolve_model(args.model), choose_dtype("auto", device), device)
    directory = Path(args.lora) if args.lora else ADAPTERS / "capitals"
    names = [f"a{number}" for number in range(max(counts))]
    runs: dict[str, tuple[list[str], list[str]]] = {PLAIN: ([], []), "none of them asked for": (names, [])}
    runs |= {f"{count} in a batch": (names, names[:count]) for count in counts}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for rep in tqdm(range(args.reps + 1), desc="bench adapters", unit="round", leave=False):
        for name, (known, asked) in runs.items():
            result = run_once(model, directory, known, asked, args)
            if rep:  # the first round warms up
                found[name].append(result)
    rows = [{"adapters": name, **summary(results, found[PLAIN])} for name, results in found.items()]
    about = f"{args.requests} requests of {args.prompt_tokens} tokens"
    print_rows(rows, str(device), args.json, about, as_table(rows))
    return 0


def run_once(
    model: LlamaModel, directory: Path, known: list[str], asked: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of prefill and of decoding. known: the engine's adapters; asked: the requests', in turn."""
    size = args.requests * (args.prompt_tokens + args.new_tokens)
    config = EngineConfig(
        kv_tokens=size, max_running=args.requests, chunk_tokens=size,
        lora=dict.fromkeys(known, directory),
    )  # fmt: skip
    engine = Engine(config, model=model)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    prompts = make_prompts(args.requests, 0, args.prompt_tokens, model.config.vocab_size)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params, lora=asked[number % len(asked)] if asked else "")
    clock = cpu_clock()[1] if engine.device.type == "cpu" else time.perf_counter_ns
    times = [clock()]
    while engine.has_work:
        engine.step()
        times.append(clock())
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {"prefill": steps[0] * 1e-9, "decode": sum(steps[1:]) * 1e-9, "steps": len(steps) - 1}


def summary(results: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; how many times as long as without adapters, within a round."""
    said: dict[str, Any] = {"steps": results[0]["steps"]}
    for name in ("prefill", "decode"):
        said[f"{name}_seconds"] = statistics.median(each[name] for each in results)
        said[f"{name}_times"] = statistics.median(
            mine[name] / theirs[name] for mine, theirs in zip(results, plain, strict=True)
        )
    return said


def as_table(rows: list[dict[str, Any]]) -> str:
    """One line for each number of adapters."""
    lines = [
        [
            row["adapters"], row["prefill_seconds"] * 1e3, row["prefill_times"],
            row["decode_seconds"] / row["steps"] * 1e3, row["decode_times"],
        ]
        for row in rows
    ]  # fmt: skip
    return table(["adapters", "prefill ms", "times as long", "decode ms a step", "times as long"], lines)
