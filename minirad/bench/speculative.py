"""What drafts save: the same requests without, with drafts looked up (ngram), and from a draft head (eagle).

Two figures for each kind of prompt. Tokens a forward pass: what a model saves whose pass takes as long for
seven tokens as for one, as a large one's does that is read from memory. And time, here and now, drafting
and rejected tokens included: against a run without drafts in the same round. Rounds are interleaved; the
first warms up. On a CPU it is the time that the engine's thread computed (others do not count), on a GPU
the clock. Prompts are lessons of the classroom Llama, of a seed that it was not trained on.

Greedy replies must be those of the run without drafts; how many are not is in the last column.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from minirad.bench.engine import print_rows
from minirad.bench.tables import cpu_clock, table
from minirad.command import positive
from minirad.config import SPECULATIVE, EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import choose_device, choose_dtype
from minirad.model.classroom import corpus
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model

NONE = "none"


def _asked(turn: corpus.Turn) -> str:
    messages = [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", turn.user)]
    return corpus.chat_text(messages, add_generation_prompt=True)


def _last_question(messages: list[dict[str, str]]) -> str:
    return corpus.chat_text(messages[:-1], add_generation_prompt=True)


def _examples(rng: random.Random) -> str:
    return corpus.few_shot_header(corpus.few_shot_examples(6, rng)) + "Question 7:"


KINDS: dict[str, Callable[[random.Random], str]] = {
    "facts": lambda rng: _asked(corpus.fact_turn(rng)),
    "stories": lambda rng: _asked(corpus.story_turn(rng)),
    "copies": lambda rng: _asked(corpus.repeat_turn(rng, longest=8)),
    "look-ups": lambda rng: _last_question(corpus.lookup_messages(rng, 6)),
    "chats": lambda rng: _last_question(corpus.chat_messages(rng, 4, corpus.SYSTEM_PROMPT)),
    "lists": _examples,
}
"""Kinds of prompts. Lists are plain text: the model goes on with further questions and answers of its own."""


class Way(NamedTuple):
    """How tokens are drafted ("none", "ngram", "eagle"), and how many at most."""

    drafts: str
    most: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of prompts: {', '.join(KINDS)}")
    parser.add_argument("--draft-tokens", default="2,4,6", help="drafted at most, a run for each")
    parser.add_argument("--at-once", default="1,8", help="requests that run at a time, a run for each")
    parser.add_argument("--prompts", type=positive, default=8, help="of each kind")
    parser.add_argument("--new-tokens", type=positive, default=48, help="of a reply at most")
    parser.add_argument("--model", help="default: the classroom Llama")
    parser.add_argument("--draft-model", help="another model's draft head; without one, ngram only")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", default="auto", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--reps", type=positive, default=5)
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    kinds = args.kinds.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of prompts {kind!r}; known: {', '.join(KINDS)}")
    device = choose_device(args.device, None)
    if device.type == "cpu":
        torch.set_num_threads(1)
    path = resolve_model(args.model)
    model, text = load_model(path, choose_dtype(args.dtype, device), device), load_tokenizer(path)
    drafters = [name for name in SPECULATIVE if name != "eagle" or args.draft_model or not args.model]
    ways = [Way(NONE, 0), *(Way(name, most) for name in drafters for most in numbers(args.draft_tokens))]
    runs = [(kind, at_once, way) for kind in kinds for at_once in numbers(args.at_once) for way in ways]
    found: dict[Any, list[dict[str, Any]]] = {run: [] for run in runs}
    for rep in tqdm(range(args.reps + 1), desc="bench speculative", unit="round", leave=False):
        for kind, at_once, way in runs:
            result = run_once(model, text, prompts(kind, args.prompts), at_once, way, args)
            if rep:  # the first round warms up
                found[kind, at_once, way].append(result)
    rows = [summary(run, results, found[run[0], run[1], ways[0]]) for run, results in found.items()]
    about = f"{model.dtype}, {args.prompts} prompts of each kind"
    print_rows(rows, str(device), args.json, about, as_table(rows))
    return 0


def numbers(text: str) -> list[int]:
    """Whole numbers, 1 or more, with commas between them; ValueError for anything else."""
    try:
        return [positive(word) for word in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def prompts(kind: str, count: int) -> list[str]:
    """So many prompts of a kind, always the same."""
    rng = random.Random(f"bench speculative {kind}")
    return [KINDS[kind](rng) for _ in range(count)]


def run_once(
    model: LlamaModel, text: Any, asked: list[str], at_once: int, way: Way, args: argparse.Namespace
) -> dict[str, Any]:
    """All prompts from an empty cache to the last reply; making the engine is not counted."""
    more: dict[str, Any] = {} if way.drafts == NONE else {
        "speculative": way.drafts, "draft_tokens": way.most,
        "draft_model": args.draft_model if way.drafts == "eagle" else None,
    }  # fmt: skip
    config = EngineConfig(
        model=args.model, kv_tokens=8192, max_running=at_once, attention=args.attention, **more
    )
    engine = Engine(config, model=model, tokenizer=text)
    ids = [engine.encode(prompt) for prompt in asked]
    params = SamplingParams(max_new_tokens=args.new_tokens)
    clock = cpu_clock()[1] if engine.device.type == "cpu" else time.perf_counter_ns
    started = clock()
    outputs = engine.generate(ids, params)
    seconds = (clock() - started) * 1e-9
    tokens = sum(len(output.token_ids) for output in outputs)
    drafts = getattr(engine, "drafts", None)
    return {
        "tokens": tokens, "seconds": seconds, "replies": [output.token_ids for output in outputs],
        "tokens_a_pass": drafts.tokens_a_pass if drafts else 1.0,
        "drafted": drafts.drafted if drafts else 0, "accepted": drafts.accepted if drafts else 0,
    }  # fmt: skip


def summary(
    run: tuple[str, int, Way], results: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """Counts are the same in every round; times are medians, and so is the ratio within a round."""
    kind, at_once, way = run
    first = results[0]
    faster = statistics.median(p["seconds"] / r["seconds"] for p, r in zip(plain, results, strict=True))
    other = sum(mine != theirs for mine, theirs in zip(first["replies"], plain[0]["replies"], strict=True))
    return {
        "prompts": kind, "at_once": at_once, "drafts": way.drafts, "most": way.most,
        "tokens": first["tokens"], "tokens_a_pass": first["tokens_a_pass"], "drafted": first["drafted"],
        "accepted": first["accepted"], "seconds": statistics.median(r["seconds"] for r in results),
        "times_as_fast": faster, "other_replies": other,
    }  # fmt: skip


def as_table(rows: list[dict[str, Any]]) -> str:
    """One line for each way."""
    lines = []
    for row in rows:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        name = row["drafts"] + (f" {row['most']}" if row["most"] else "")
        lines.append([
            row["prompts"], row["at_once"], name, row["tokens"], row["tokens_a_pass"], share,
            row["seconds"] * 1e3, row["times_as_fast"], row["other_replies"],
        ])  # fmt: skip
    head = ["prompts", "at once", "drafts", "tokens", "a pass", "accepted", "ms", "times as fast", "other"]
    return table(head, lines)
