"""What watching costs: emit sites without a listener, and the recorder.

Two figures. (1) How often a step asks `bus.wants(...)`, times what one such question costs, as a share
of the step: what every engine pays, always. (2) The same work with the recorder on and off, interleaved so
that both see the same machine: what a recording costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import timeit
from typing import Any

import torch
from tqdm import tqdm

from minirad import command
from minirad.bench.dummy import SHAPES, dummy_model
from minirad.bench.engine import make_prompts
from minirad.bench.tables import processor
from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import choose_device
from minirad.model.load import load_model, resolve_model
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the classroom Llama, whose steps are the shortest")
    parser.add_argument(
        "--dummy-weights", choices=tuple(SHAPES), metavar="SHAPE", help="random weights instead"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: with captured steps that run ahead"
    )
    parser.add_argument("--requests", type=command.positive, default=24)
    parser.add_argument("--new-tokens", type=command.positive, default=24)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--json", action="store_true")


class _CountingBus(ev.EventBus):
    asked = 0

    def wants(self, kind: type[ev.Event]) -> bool:
        self.asked += 1
        return super().wants(kind)


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    device = choose_device(args.device, None)
    if args.reps < 1:
        raise ValueError(f"--reps must be at least 1, got {args.reps}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if args.dummy_weights:
        model = dummy_model(args.dummy_weights, dtype, device)
    else:
        model = load_model(resolve_model(args.model), dtype, device)
    prompts = make_prompts(args.requests, 96, 24, model.config.vocab_size)
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)

    def engine(bus: ev.EventBus | None = None) -> Engine:
        # A pool too small for all, so that evictions and retractions are part of what is measured.
        config = EngineConfig(kv_tokens=1024, max_running=16, max_context=256)
        return Engine(config, RadixCache(bus=bus), model=model)

    bus = _CountingBus()
    counted = engine(bus)
    _warm_up(counted, prompts, params)
    before = bus.asked
    steps, _ = _run(counted, prompts, params)
    asked = (bus.asked - before) / steps
    idle = ev.EventBus()
    nanoseconds = min(timeit.repeat(lambda: idle.wants(ev.NodeSplit), number=100_000, repeat=5)) * 1e4
    off: list[float] = []
    on: list[float] = []
    for _ in tqdm(range(args.reps), desc="bench hooks", unit="pair", delay=2, leave=False):
        plain, recorded = engine(), engine()
        for each in (plain, recorded):
            _warm_up(each, prompts, params)
        off.append(_run(plain, prompts, params)[1])
        with Recorder(recorded) as recording:
            on.append(_run(recorded, prompts, params)[1])
    result: dict[str, Any] = {
        "processor": processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "steps": steps,
        "emit_sites_per_step": round(asked, 1),
        "nanoseconds_per_site": round(nanoseconds, 1),
        "share_of_step_without_listener": asked * steps * nanoseconds * 1e-9 / statistics.median(off),
        "seconds_recorder_off": statistics.median(off),
        "seconds_recorder_on": statistics.median(on),
        "recorder_overhead": statistics.median(on) / statistics.median(off) - 1,
        "events": sum(len(frame.events) for frame in recording),
    }
    print(json.dumps(result, indent=1) if args.json else _table(result))
    return 0


def _warm_up(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    """On a GPU: kernels are compiled and steps captured, which is not to be timed."""
    if engine.device.type == "cuda":
        engine.generate(prompts, params)
        engine.flush_cache()


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[int, float]:
    """Steps and seconds; through `generate`, which runs ahead where it can."""
    before, started = engine.snapshot()["step"], time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    return engine.snapshot()["step"] - before, seconds


def _table(result: dict[str, Any]) -> str:
    r = result
    return (
        f"on {r['processor']}, {r['steps']} steps, {r['events']} events\n"
        f"no listener: {r['emit_sites_per_step']} emit sites a step x {r['nanoseconds_per_site']} ns "
        f"= {r['share_of_step_without_listener']:.3%} of the step\n"
        f"recorder on: {r['seconds_recorder_on']:.3f} s against {r['seconds_recorder_off']:.3f} s, "
        f"{r['recorder_overhead']:+.1%} (medians of interleaved runs)"
    )
