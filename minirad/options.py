"""Command-line options that several commands share, and how they become an EngineConfig."""

from __future__ import annotations

import argparse
from typing import Any

from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import ATTENTION, DTYPES, QUANTIZATION, SPECULATIVE, EngineConfig, SamplingParams
from minirad.schedule.policies import POLICIES as SCHEDULE

ADAPTER = "an adapter in PEFT's format, or the name of one that is shipped; repeatable"
GOES_WITH = dict.fromkeys(("draft_tokens", "draft_ngram", "draft_model"), "speculative")
GOES_WITH |= {"disk_mb": "disk_dir"}
"""Options that say something only beside another one: alone they are a mistake."""


def add_engine_options(parser: argparse.ArgumentParser, adapter: str = ADAPTER) -> None:
    """--model, --kv-tokens, --page-size and so on; defaults are EngineConfig's. adapter: what --lora does."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", help="directory, hub id, NAME.gguf or smollm2-135m (default: the classroom's)"
    )
    group.add_argument(
        "--dummy-weights", metavar="SHAPE", help="random weights: llama-3.2-1b, llama-3.1-8b, smollm2-135m"
    )
    group.add_argument("--device", help="auto, cpu, cuda (default: auto)")
    group.add_argument("--dtype", help=", ".join(DTYPES))
    group.add_argument(
        "--quantization", help=f"{', '.join(QUANTIZATION)}: the numbers of the model's GGUF file as they are"
    )
    group.add_argument("--attention", help=", ".join(ATTENTION))
    group.add_argument("--kv-tokens", type=int, help="size of the KV pool (default: 4096; GPU: what fits)")
    group.add_argument("--page-size", type=int, help="tokens per page (default: 1)")
    group.add_argument("--max-running", type=int, help="requests that run at a time (default: 32)")
    group.add_argument("--chunk-tokens", type=int, help="prompt tokens computed per step (default: 512)")
    group.add_argument("--schedule-policy", help=f"{', '.join(SCHEDULE)} (default: lpm)")
    group.add_argument("--fair-passes", type=int, help="policy fair: how often a request may be passed over")
    group.add_argument("--mixed", action="store_true", default=None, help="prefill and decode in one batch")
    group.add_argument("--no-preemption", dest="preemption", action="store_false", default=None)
    group.add_argument("--no-in-batch-prefix", dest="in_batch_prefix", action="store_false", default=None)
    group.add_argument("--eviction-policy", help=f"{', '.join(EVICTION)} (default: lru)")
    group.add_argument("--host-kv-tokens", type=int, help="second tier in host memory (default: 0, none)")
    group.add_argument("--host-write", help="write_through, write_through_selective, write_back")
    group.add_argument("--load-back-threshold", type=int, help="fewer are computed again (default: 10)")
    group.add_argument("--disk-dir", metavar="DIR", help="third tier, in files that outlive the process")
    group.add_argument("--disk-mb", type=int, help="megabytes of files there at most (default: 1024)")
    group.add_argument("--bigram-keys", action="store_true", default=None, help="a tree of pairs (EAGLE)")
    group.add_argument("--speculative", help=f"drafts, verified in one pass: {', '.join(SPECULATIVE)}")
    group.add_argument("--draft-tokens", type=int, help="drafted at most before a pass (default: 4)")
    group.add_argument("--draft-ngram", type=int, help="ngram looks up so many tokens (default: 3)")
    group.add_argument("--draft-model", metavar="DIR", help="eagle: the head (default: the classroom's)")
    group.add_argument(
        "--jump-forward", action="store_true", default=None, help="what a grammar forces is not sampled"
    )
    group.add_argument("--lora", action="append", metavar="NAME=DIR", help=adapter)
    group.add_argument("--no-radix-cache", dest="radix_cache", action="store_false", default=None)
    group.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false", default=None)
    group.add_argument("--seed", type=int, help="for sampling (default: 0)")
    group.add_argument("--tp", type=int, help="ranks that share the model, under torchrun (default: 1)")
    group.add_argument("--no-rank-digest", dest="rank_digest", action="store_false", default=None)


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """An EngineConfig from what was said on the command line, over a command's own defaults."""
    names = (
        "model", "device", "dtype", "quantization", "attention", "kv_tokens", "page_size", "max_running",
        "chunk_tokens", "schedule_policy", "eviction_policy", "radix_cache", "seed",
        "dummy_weights", "fair_passes", "mixed", "preemption", "in_batch_prefix", "host_kv_tokens",
        "host_write", "load_back_threshold", "bigram_keys", "cuda_graphs", "tp", "rank_digest",
        "disk_dir", "disk_mb", "speculative", "draft_tokens", "draft_ngram", "draft_model", "lora",
        "jump_forward",
    )  # fmt: skip
    said = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    config = {**defaults, **said}
    for name, other in GOES_WITH.items():
        if name in said and config.get(other) is None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {said[name]} goes with --{other.replace('_', '-')}")
    return EngineConfig(**config)


def add_sampling_options(parser: argparse.ArgumentParser, max_new_tokens: int = 64) -> None:
    """--max-new-tokens, --temperature and so on."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--stop", action="append", default=[], help="text that ends a reply; repeatable")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--n", type=int, default=1, help="samples per prompt")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams from the command line."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        n=getattr(args, "n", 1),
    )


def engine_words(args: argparse.Namespace) -> list[str]:
    """The engine's options as they were typed, for a server that is started with them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_options(parser)
    words: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                words.append(action.option_strings[0])
                words += [] if action.nargs == 0 else [str(each)]
    return words
