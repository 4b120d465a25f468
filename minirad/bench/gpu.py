"""All that a run on a GPU should show, as one table: is attention right, how fast is it, what limits it.

    python -m minirad bench gpu [--json] [--quick]
    torchrun --nproc-per-node 2 -m minirad bench gpu --tp 2      the model on several GPUs

- parity: relative error of the attention backend against float32, for pages and heads of several sizes;
- output tokens per second for five workloads (random weights in the shape of Llama 3.2 1B; page sizes 1
  and 16, radix cache on and off), and of the decode steps the share of the memory bandwidth: each reads
  all weights and all live keys and values once, so that a copy's speed, measured in the same run, is the
  limit;
- time to the first token by length of the hit.

The prompts are random tokens that arrive all at once. Each workload runs twice: step by step, where the
decode steps are timed, and through `generate`, which prepares a step while one is computed and whose
throughput counts. Does not compare words (`bench parity`).

With --tp each rank reads its part of the weights, and its heads' keys and values: the limit is what one of
them reads, at the speed of a copy on its own GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minirad import command
from minirad.attention.metadata import AttentionMetadata, BatchEntry, build_metadata
from minirad.attention.radix_attention import AttentionBackend, RadixAttention
from minirad.bench.dummy import SHAPES, dummy_model
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.fast.flashinfer import FlashInferAttention, what_is_missing
from minirad.fast.paged import TorchPagedAttention
from minirad.kv.kv_pool import KVPool
from minirad.machine import kv_tokens_that_fit
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, resolve_model

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of random tokens. prompt and new: shortest and longest; shared: prompt tokens in common."""

    name: str
    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    shared: int = 0

    def scaled(self, share: float) -> Workload:
        """The same with a share of the requests and of all lengths."""

        def less(count: int) -> int:
            return max(1, round(count * share)) if count else 0

        return replace(
            self,
            requests=less(self.requests),
            prompt=(less(self.prompt[0]), less(self.prompt[1])),
            new=(less(self.new[0]), less(self.new[1])),
            shared=less(self.shared),
        )


WORKLOADS = (
    Workload("1 request, 256 tokens", 1, (32, 32), (256, 256)),
    Workload("16 requests, 256 tokens", 16, (32, 32), (256, 256)),
    Workload("128 requests, 256 tokens", 128, (32, 32), (256, 256)),
    Workload("256 requests, 100-1024 in, 100-1024 out", 256, (100, 1024), (100, 1024)),
    Workload("256 requests sharing 2000 of 2100, 128 out", 256, (2100, 2100), (128, 128), shared=2000),
)
QUICK = 0.25
CHUNK_TOKENS = 8192
TTFT_PROMPT = 16384
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT = 6.0  # seconds: what takes less is run again, the host being noisy, and the faster run counts
TTFT_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dummy-weights", default="llama-3.2-1b", choices=tuple(SHAPES), metavar="SHAPE")
    parser.add_argument("--model", help="real weights instead: a directory, a hub id, or classroom")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of requests and lengths, one page size"
    )
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--device", default="cuda", help="cpu: only to try the program")
    parser.add_argument("--tp", type=command.positive, default=1, metavar="N",
                        help="the model on N GPUs, under torchrun --nproc-per-node N")  # fmt: skip
    parser.add_argument(
        "--with-transformers", action="store_true",
        help="run transformers' generate_batch on the workload with a shared prefix, too (about two minutes)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON into a file, part by part")


def main(args: argparse.Namespace) -> int:
    """Runs everything; 1 if an attention kernel is wrong."""
    if args.device != "cpu" and not torch.cuda.is_available():
        raise ValueError("bench gpu needs an NVIDIA GPU, and torch sees none here")
    if args.tp > 1 and args.with_transformers:
        raise ValueError(f"--with-transformers with --tp {args.tp}: it runs on one GPU")
    if args.out is not None:
        command.may_be_written("--out", args.out, (".json",))
    device = torch.device(args.device)
    scale = QUICK if args.quick else 1.0
    pages = args.page_sizes[:1] if args.quick else args.page_sizes
    started = time.perf_counter()
    subject = Subject.of(args, device)
    model = subject.model
    bandwidth = copy_bandwidth(model.device)
    result: Row = {
        "machine": machine(model.device),
        "model": args.model or f"{args.dummy_weights}, random weights",
        "tp": args.tp,
        "quick": args.quick,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
    }

    def keep(**part: Any) -> None:
        """A part that has been measured is not lost with those to come."""
        result.update(part)
        if args.out is not None:
            command.write_whole(args.out, json.dumps(result, indent=1))

    keep(parity=parity(model, model.device, scale))
    keep(parity_seconds=round(time.perf_counter() - started, 1))  # with weights drawn and kernels compiled
    rows = run_all(subject, WORKLOADS, pages, bandwidth, scale)
    keep(attention=rows[0]["attention"], note=rows[0]["note"], workloads=rows)
    keep(roofline=roofline(subject, bandwidth, scale))
    keep(ttft_ms_by_hit=ttft_by_hit(subject, scale))
    if args.with_transformers:
        keep(transformers_tokens_per_s=transformers_rate(model, scale))
    keep(seconds=round(time.perf_counter() - started, 1))
    print(json.dumps(result, indent=1) if args.json else table(result))
    return 0 if all(each["right"] for each in result["parity"]) else 1


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured. model: all of it, or rank 0's part. config: of all engines, which differ in sizes.

    ready: the model to give to each engine; None where each rank makes (and keeps) its own part.
    """

    model: LlamaModel
    config: EngineConfig
    ready: LlamaModel | None
    first: Engine | None = None  # holds the parts of all ranks while other engines come and go

    @classmethod
    def of(cls, args: argparse.Namespace, device: torch.device) -> Subject:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        if args.tp > 1:
            weights = {"dummy_weights": args.dummy_weights} if args.model is None else {"model": args.model}
            config = EngineConfig(device=device.type, tp=args.tp, **weights)
            first = Engine(replace(config, kv_tokens=64, max_running=1, max_context=64, cuda_graphs=False))
            return cls(first.model, config, None, first)
        if args.model is None:
            model = dummy_model(args.dummy_weights, dtype, device)
        else:
            model = load_model(resolve_model(args.model), dtype, device)
        return cls(model, EngineConfig(), model)

    def engine(self, **sizes: Any) -> Engine:
        return Engine(replace(self.config, **sizes), model=self.ready)


def machine(device: torch.device) -> Row:
    """Which card and which versions the numbers belong to."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        if on_gpu
        else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flashinfer": _version("flashinfer-python"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that is far larger than any cache."""
    size = 1 << (31 if device.type == "cuda" else 24)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device, 10)


def _seconds(call: Callable[[], Any], device: torch.device, count: int) -> float:
    """The fastest of `count` calls, each waited for."""
    best = float("inf")
    for _ in range(count + 1):  # the first one may have to compile or allocate
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------- is attention right?


class AttentionCase:
    """One batch of attention over pages in random order, with random q, k and v.

    All slots that do not hold the batch's own past are NaN: a read of one shows in the answer.

    Args:
        spans: (start, stop) of each entry: tokens [start, stop) are computed now.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        *,
        page_size: int = 1,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.page_size, self.kv_heads, self.heads = page_size, kv_heads, kv_heads * group
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        pages = -(-max(stop for _, stop in spans) // page_size)
        numbers = 1 + rng.permutation(len(spans) * pages).reshape(len(spans), pages)
        slots = numbers[:, :, None] * page_size + np.arange(page_size)
        self.rows = np.ascontiguousarray(slots.reshape(len(spans), -1)).astype(np.int64)
        self.entries = [BatchEntry(row, *span) for row, span in enumerate(spans)]
        num_slots = (len(spans) * pages + 1) * page_size
        self.pool = KVPool(1, num_slots, kv_heads, head_dim, dtype=dtype, device=device)
        generator = torch.Generator(device=device).manual_seed(seed)

        def noise(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, head_dim, generator=generator, device=device).to(dtype)

        self.k, self.v = noise(num_slots, kv_heads), noise(num_slots, kv_heads)
        self.q = noise(sum(stop - start for start, stop in spans), self.heads)

    def metadata(self) -> AttentionMetadata:
        return build_metadata(self.rows, self.entries, self.page_size, self.pool.device)

    def prepare(self) -> None:
        """Put the batch's past into the pool, and NaN everywhere else."""
        self.pool.poison(torch.arange(1, self.pool.num_slots, device=self.pool.device))
        past = np.concatenate([self.rows[e.row, : e.start] for e in self.entries])
        slots = torch.from_numpy(past).to(self.pool.device)
        self.pool.write(0, slots, self.k[slots], self.v[slots])

    def answer(self, backend: AttentionBackend) -> Tensor:
        """What a layer answers with this backend: `[T, heads, head_dim]`."""
        self.prepare()
        meta = self.metadata()
        new_k, new_v = self.k[meta.out_slots], self.v[meta.out_slots]
        # as in the model: q, k and v are slices of one tensor
        fused = torch.cat((self.q, new_k, new_v), dim=1)
        q, k, v = torch.split(fused, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        backend.plan(meta, self.pool)
        layer = RadixAttention(0, self.heads, self.kv_heads, self.head_dim, self.scale)
        return layer(q, k, v, meta, self.pool, backend).view_as(self.q)

    def reference(self) -> Tensor:
        """The same in float32, entry by entry, without pages: float32 `[T, heads, head_dim]`."""
        group, answers, at = self.heads // self.kv_heads, [], 0
        for e in self.entries:
            count = e.stop - e.start
            slots = torch.from_numpy(self.rows[e.row, : e.stop]).to(self.pool.device)
            k = self.k[slots].float().repeat_interleave(group, dim=1).permute(1, 2, 0)
            v = self.v[slots].float().repeat_interleave(group, dim=1).permute(1, 0, 2)
            q = self.q[at : at + count].float().permute(1, 0, 2)
            hidden = torch.ones(count, e.stop, dtype=torch.bool, device=q.device).triu(e.start + 1)
            weights = (q @ k * self.scale).masked_fill_(hidden, float("-inf")).softmax(-1)
            answers.append((weights @ v).permute(1, 0, 2))
            at += count
        return torch.cat(answers)

    def error(self, backend: AttentionBackend) -> float:
        """Relative error, |answer - reference| / |reference|; NaN if a foreign slot was read."""
        wanted = self.reference()
        return float((self.answer(backend).float() - wanted).norm() / wanted.norm())


MIXED = ((0, 333), (700, 1000), (64, 65), (1500, 1516), (0, 1), (2047, 2048))
DECODES = ((0, 1), (63, 64), (500, 501), (1023, 1024), (2047, 2048), (1, 2))
LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def parity(model: LlamaModel, device: torch.device, scale: float) -> list[Row]:
    """Errors of the backend that this machine gets, by head size, group, page size and kind of batch."""
    rows = []
    own = (model.config.kv_heads, model.config.heads // model.config.kv_heads, model.config.head_dim)
    shapes = [own] if scale < 1 else [*dict.fromkeys((own, (3, 3, 64), (8, 4, 128)))]
    for kv_heads, group, head_dim in tqdm(shapes, desc="parity", unit="shape", leave=False):
        for page_size in (1, 16):
            for kind, spans in (("mixed", MIXED), ("decode", DECODES)):
                case = AttentionCase(
                    spans, page_size=page_size, kv_heads=kv_heads, group=group, head_dim=head_dim,
                    dtype=model.dtype, device=device,
                )  # fmt: skip
                backend = backend_for(case)
                error = case.error(backend)
                rows.append(
                    {
                        "backend": backend.name,
                        "heads": f"{case.heads}/{kv_heads} x {head_dim}",
                        "page_size": page_size,
                        "batch": kind,
                        "relative_error": float(f"{error:.2e}"),
                        "right": error < LIMITS[model.dtype],
                    }
                )
    return rows


def backend_for(case: AttentionCase) -> AttentionBackend:
    """FlashInfer where it can run, else plain torch."""
    if what_is_missing(case.pool.device, case.pool.dtype, case.head_dim):
        return TorchPagedAttention()
    return FlashInferAttention(case.heads, case.kv_heads, case.head_dim, device=case.pool.device)


# ---------------------------------------------------------------------- how fast is the engine?


def run_all(
    subject: Subject, workloads: Sequence[Workload], pages: Sequence[int], bandwidth: float, scale: float
) -> list[Row]:
    """All workloads with the cache on, at each page size; and off, at the first one."""
    ways = [(page, True) for page in pages] + [(pages[0], False)]
    runs = [(work.scaled(scale), *way) for way in ways for work in workloads]
    rows = []
    bar = tqdm(runs, desc="workloads", unit="run", leave=False)
    for work, page, cache in bar:
        row = run_workload(subject, work, page, cache, bandwidth)
        if row["seconds"] < SHORT:
            again = run_workload(subject, work, page, cache, bandwidth)
            row = min(row, again, key=lambda each: each["seconds"])
        rows.append(row)
        bar.set_postfix_str(f"{rows[-1]['output_tokens_per_s']:.0f} tokens/s")
    return rows


def make_requests(work: Workload, vocab: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts of random token ids with the number of tokens to generate."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab, work.shared).tolist()
    requests = []
    for _ in range(work.requests):
        own = int(rng.integers(work.prompt[0], work.prompt[1] + 1)) - work.shared
        new = int(rng.integers(work.new[0], work.new[1] + 1))
        requests.append((prefix + rng.integers(0, vocab, own).tolist(), new))
    return requests


def make_engine(subject: Subject, lengths: Sequence[int], page: int, cache: bool) -> Engine:
    """An engine with room for requests of these lengths, warmed up and empty."""
    gc.collect()  # the pool of one run makes room for the next one's
    spare = 2  # pages per request: the last one in part, and one that admission wants to be left over
    need = sum(-(-length // page) + spare for length in lengths) * page
    model = subject.model
    if model.device.type == "cuda":
        need = min(need, kv_tokens_that_fit(model, model.device) // page * page)
    engine = subject.engine(
        kv_tokens=need, page_size=page, max_running=len(lengths), max_context=max(*lengths, 16),
        chunk_tokens=CHUNK_TOKENS, radix_cache=cache,
    )  # fmt: skip
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    engine.flush_cache()
    return engine


def run_workload(subject: Subject, work: Workload, page: int, cache: bool, bandwidth: float) -> Row:
    """One workload from an empty cache to the last token. Of its decode steps the median counts: in some of
    them a graph is captured."""
    model = subject.model
    requests = make_requests(work, model.config.vocab_size)
    engine = make_engine(subject, [len(prompt) + new for prompt, new in requests], page, cache)
    _wait(engine.device)
    started = time.perf_counter()
    for prompt, new in requests:
        engine.add_request(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))
    decodes: list[tuple[float, float]] = []  # seconds, bytes read per second
    prefill, computed, hits, retracted = 0.0, 0, 0, 0
    while engine.has_work:
        report = engine.step()
        hits += report.hit_tokens
        computed += report.prompt_tokens - report.hit_tokens
        retracted += len(report.retracted)
        if report.kind == "decode":
            live = sum(request.kv_len for request in engine.scheduler.running)
            read = weight_bytes(model) + live * engine.pool.bytes_per_token
            decodes.append((report.seconds, read / report.seconds))
        else:
            prefill += report.seconds
    stepwise = time.perf_counter() - started
    engine.flush_cache()
    seconds = generate_all(engine, requests)
    new_tokens = sum(new for _, new in requests)
    step, speed = map(statistics.median, zip(*decodes, strict=True)) if decodes else (None, None)
    return {
        "workload": work.name if work in WORKLOADS else f"{work.name} (scaled: {work.requests})",
        "page_size": page,
        "radix_cache": cache,
        "attention": engine.attention.name,
        "note": engine.attention_note,
        "output_tokens_per_s": round(new_tokens / seconds, 1),
        "stepwise_tokens_per_s": round(new_tokens / stepwise, 1),
        "seconds": round(seconds, 3),
        "hit_share": round(hits / (hits + computed), 4),
        "prompt_tokens_computed": computed,
        "prefill_tokens_per_s": round(computed / prefill) if prefill else None,
        "decode_ms_per_step": None if step is None else round(step * 1e3, 3),
        "decode_bandwidth_share": None if speed is None else round(speed / bandwidth, 4),
        "retracted": retracted,
    }


def generate_all(engine: Engine, requests: Sequence[tuple[list[int], int]]) -> float:
    """Seconds that `generate` takes for all requests: it may prepare a step while one is computed."""
    params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in requests]
    _wait(engine.device)
    started = time.perf_counter()
    engine.generate([prompt for prompt, _ in requests], params)
    return time.perf_counter() - started


def roofline(subject: Subject, bandwidth: float, scale: float) -> list[Row]:
    """Decoding alone, by batch size: what reading must take, what a step takes (viz/roofline.py draws it).

    weight_ms, kv_ms: the weights, and the mean keys and values, at the speed of a copy. host_ms: the
    host's work for a step, which may lie beside the device's.
    """
    rows, model = [], subject.model
    new = max(8, round(128 * scale))
    for batch in BATCHES if scale == 1 else BATCHES[:4]:
        requests = make_requests(Workload("", batch, (32, 32), (new, new)), model.config.vocab_size)
        engine = make_engine(subject, [32 + new] * batch, 16, cache=True)
        for _ in range(2):  # the first time graphs are captured
            engine.flush_cache()
            engine.overlap.steps, engine.overlap.waited = 0, 0.0
            prompts_only = generate_all(engine, [(prompt, 1) for prompt, _ in requests])
            engine.flush_cache()
            seconds = generate_all(engine, requests) - prompts_only
        steps = new - 1
        kv = batch * (32 + new / 2) * engine.pool.bytes_per_token
        rows.append(
            {
                "batch": batch,
                "weight_ms": weight_bytes(model) / bandwidth * 1e3,
                "kv_ms": kv / bandwidth * 1e3,
                "host_ms": max(seconds - engine.overlap.waited, 0.0) / steps * 1e3,
                "step_ms": seconds / steps * 1e3,
                "tokens_per_s": batch * steps / seconds,
            }
        )
        del engine
    return rows


def transformers_rate(model: LlamaModel, scale: float) -> float:
    """Output tokens per second of transformers' generate_batch (continuous batching, paged attention) on the
    workload with a shared prefix; a model of the same shape with random weights."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden, intermediate_size=c.intermediate,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=c.tied,
    )  # fmt: skip
    with torch.device(model.device):
        theirs: Any = LlamaForCausalLM._from_config(config, dtype=model.dtype, attn_implementation="sdpa")
    requests = make_requests(WORKLOADS[-1].scaled(scale), c.vocab_size)
    options = GenerationConfig(
        max_new_tokens=max(new for _, new in requests), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    _wait(model.device)
    started = time.perf_counter()
    outputs = theirs.eval().generate_batch(
        inputs=[prompt for prompt, _ in requests], generation_config=options, progress_bar=False
    )
    made = sum(len(output.generated_tokens) for output in outputs.values())
    return round(made / (time.perf_counter() - started), 1)


def weight_bytes(model: LlamaModel) -> int:
    """What one step reads of the weights, or of one rank's part of them; of an embedding that is not the head
    as well, next to nothing."""
    read = [model.norm, model.head]
    for layer in model.layers:
        read += [value for name in layer.__slots__ if isinstance(value := getattr(layer, name), Tensor)]
    return sum(tensor.numel() for tensor in read) * model.dtype.itemsize


def ttft_by_hit(subject: Subject, scale: float, repeats: int = 5) -> Row:
    """Milliseconds to the first token of one long prompt, by how many of its tokens hit."""
    model = subject.model
    length = min(max(16, round(TTFT_PROMPT * scale)), model.config.max_position_embeddings - 1)
    engine = make_engine(subject, [length + 1] * 3, 1, cache=True)
    rng = np.random.default_rng(1)
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    result: Row = {}
    for share in TTFT_SHARES:
        hit = int((length - 1) * share)
        times = []
        for _ in range(repeats):
            prompt = rng.integers(0, model.config.vocab_size, length).tolist()
            if hit:
                engine.generate([prompt[:hit]], one)
            times.append(engine.generate([prompt], one)[0].ttft)
            engine.flush_cache()
        result[f"{hit} of {length}"] = round(statistics.median(times) * 1e3, 2)
    return result


# ---------------------------------------------------------------------- showing


def table(result: Row) -> str:
    """The result as text."""
    m = result["machine"]
    worst = max(result["parity"], key=lambda each: each["relative_error"])
    lines = [
        f"{m['gpu'] or 'CPU'}, torch {m['torch']}, FlashInfer {m['flashinfer']}: {result['model']}"
        + (f", on {result['tp']} ranks" if result["tp"] > 1 else ""),
        *([result["note"]] if result["note"] else []),
        f"copy: {result['copy_gb_per_s']:.0f} GB/s. Attention: {result['attention']}, largest error "
        f"{worst['relative_error']:.1e} ({worst['heads']}, page {worst['page_size']}, {worst['batch']}), "
        f"{'all right' if all(each['right'] for each in result['parity']) else 'WRONG'}",
        "",
        f"{'workload':46} {'page':>4} {'cache':>5} {'tokens/s':>9} {'seconds':>8} {'hit':>6} "
        f"{'prefill/s':>9} {'ms/step':>8} {'of copy':>8}",
    ]
    for row in result["workloads"]:
        ms, share = row["decode_ms_per_step"], row["decode_bandwidth_share"]
        lines.append(
            f"{row['workload']:46} {row['page_size']:4} {'on' if row['radix_cache'] else 'off':>5} "
            f"{row['output_tokens_per_s']:9.0f} {row['seconds']:8.2f} {row['hit_share']:6.1%} "
            f"{row['prefill_tokens_per_s'] or 0:9} {ms or 0:8.2f} {share or 0:8.1%}"
        )
    if result.get("transformers_tokens_per_s"):
        lines += [
            "",
            f"transformers' generate_batch, shared prefix: {result['transformers_tokens_per_s']} tokens/s",
        ]
    lines += ["", "hit                  ms to the first token"]
    lines += [f"{hit:20} {ms:22.2f}" for hit, ms in result["ttft_ms_by_hit"].items()]
    seconds = (
        f"{result['seconds']:.0f} s, {result['parity_seconds']:.0f} s of it to compile and check attention"
    )
    return "\n".join([*lines, "", f"all of it took {seconds}"])
