"""What drafts save: the same requests without, with drafts looked up (ngram), and from a draft head (eagle);
and what jump-forward saves where replies are JSON by a regular expression or a schema.

Three figures for each kind of prompt. Tokens a forward pass: what a model saves whose pass takes as long for
seven tokens as for one, as a large one's does that is read from memory. Steps: the engine's passes in all,
each over all that run, prompts too. And time, here and now, drafting, rejected tokens and what masks take
included: against a run without in the same round. Rounds are interleaved; the first warms up. On a CPU it is
the time that the engine's thread computed (others do not count), on a GPU the clock. Prompts are lessons of
the classroom Llama, of a seed that it was not trained on.

Replies are greedy, and must be those of the run without drafts; how many are not is in the last column.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
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
from minirad.outputs import GenerationOutput
from minirad.programs import RECORD

NONE = "none"


def _asked(turn: corpus.Turn) -> str:
    messages = [corpus.message("system", corpus.SYSTEM_PROMPT), corpus.message("user", turn.user)]
    return corpus.chat_text(messages, add_generation_prompt=True)


def _last_question(messages: list[dict[str, str]]) -> str:
    return corpus.chat_text(messages[:-1], add_generation_prompt=True)


def _examples(rng: random.Random) -> str:
    return corpus.few_shot_header(corpus.few_shot_examples(6, rng)) + "Question 7:"


def _record(rng: random.Random) -> str:
    return _asked(corpus.json_turn(rng))


KINDS: dict[str, Callable[[random.Random], str]] = {
    "facts": lambda rng: _asked(corpus.fact_turn(rng)),
    "stories": lambda rng: _asked(corpus.story_turn(rng)),
    "copies": lambda rng: _asked(corpus.repeat_turn(rng, longest=8)),
    "look-ups": lambda rng: _last_question(corpus.lookup_messages(rng, 6)),
    "chats": lambda rng: _last_question(corpus.chat_messages(rng, 4, corpus.SYSTEM_PROMPT)),
    "lists": _examples,
    "records": _record,
    "schema": _record,
}
"""Kinds of prompts. Lists are plain text: the model goes on with further questions and answers of its own.
Records and schema ask for JSON, which has to match (GRAMMARS)."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "species": {"enum": ["human", "robot"]},
        "address": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Lima"]}, "permanent": {"type": "boolean"}},
            "required": ["city", "permanent"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "species", "address"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, tuple[str, str]] = {
    "records": ("regex_mask", RECORD), "schema": ("json_mask", json.dumps(SCHEMA)),
}  # fmt: skip
"""What replies to these kinds match: a function of minirad.grammar, and what it is told."""


class Way(NamedTuple):
    """How tokens are drafted ("none", "ngram", "eagle"), and how many at most; with jump-forward or not."""

    drafts: str
    most: int
    jump: bool = False

    @property
    def name(self) -> str:
        drafted = self.drafts + (f" {self.most}" if self.most else "")
        return drafted if not self.jump else "jump" if self.drafts == NONE else f"{drafted} + jump"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = [kind for kind in KINDS if kind not in GRAMMARS or find_spec("llguidance")]
    parser.add_argument("--kinds", default=",".join(kinds), help=f"of prompts: {', '.join(KINDS)}")
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
    runs = [
        (kind, at_once, way)
        for kind in kinds
        for at_once in numbers(args.at_once)
        for way in [*ways, *(way._replace(jump=True) for way in ways if kind in GRAMMARS)]
    ]
    found: dict[Any, list[dict[str, Any]]] = {run: [] for run in runs}
    for rep in tqdm(range(args.reps + 1), desc="bench speculative", unit="round", leave=False):
        for kind, at_once, way in runs:
            result = run_once(model, text, kind, at_once, way, args)
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
    model: LlamaModel, text: Any, kind: str, at_once: int, way: Way, args: argparse.Namespace
) -> dict[str, Any]:
    """All prompts of a kind from an empty cache to the last reply; making the engine is not counted."""
    more: dict[str, Any] = {} if way.drafts == NONE else {
        "speculative": way.drafts, "draft_tokens": way.most,
        "draft_model": args.draft_model if way.drafts == "eagle" else None,
    }  # fmt: skip
    config = EngineConfig(
        model=args.model, kv_tokens=8192, max_running=at_once, attention=args.attention,
        jump_forward=way.jump, **more
    )  # fmt: skip
    engine = Engine(config, model=model, tokenizer=text)
    ids = [engine.encode(prompt) for prompt in prompts(kind, args.prompts)]
    params = SamplingParams(max_new_tokens=args.new_tokens)
    masks = [mask_of(kind, engine) for _ in ids]
    clock = cpu_clock()[1] if engine.device.type == "cpu" else time.perf_counter_ns
    started = clock()
    outputs = said(engine, ids, params, masks) if kind in GRAMMARS else engine.generate(ids, params)
    seconds = (clock() - started) * 1e-9
    tokens = sum(len(output.token_ids) for output in outputs)
    drafts = getattr(engine, "drafts", None)
    return {
        "tokens": tokens, "seconds": seconds, "replies": [output.token_ids for output in outputs],
        "tokens_a_pass": drafts.tokens_a_pass if drafts else 1.0,
        "drafted": drafts.drafted if drafts else 0, "accepted": drafts.accepted if drafts else 0,
        "forced": drafts.forced if drafts else 0, "steps": engine.steps,
    }  # fmt: skip


def mask_of(kind: str, engine: Engine) -> Any:
    """A fresh mask for a reply of this kind, None where any will do. ModuleNotFoundError: no llguidance."""
    if kind not in GRAMMARS:
        return None
    from minirad import grammar

    make, told = GRAMMARS[kind]
    return getattr(grammar, make)(told, engine.tokenizer, engine.eos_ids, engine.runner.vocab_size)


def said(engine: Engine, ids: list[Any], params: SamplingParams, masks: list[Any]) -> list[GenerationOutput]:
    """What `generate` gives, each reply under its mask."""
    names = [engine.add_request(each, params, token_mask=mask) for each, mask in zip(ids, masks, strict=True)]
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        outputs += engine.step().finished
    return sorted(outputs, key=lambda output: names.index(output.request_id))


def summary(
    run: tuple[str, int, Way], results: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """Counts are the same in every round; times are medians, and so is the ratio within a round."""
    kind, at_once, way = run
    times = [r["seconds"] for r in results]
    first = results[0]
    faster = statistics.median(p["seconds"] / r["seconds"] for p, r in zip(plain, results, strict=True))
    other = sum(mine != theirs for mine, theirs in zip(first["replies"], plain[0]["replies"], strict=True))
    return {
        "prompts": kind, "at_once": at_once, "drafts": way.drafts, "most": way.most, "jump": way.jump,
        "tokens": first["tokens"], "tokens_a_pass": first["tokens_a_pass"], "drafted": first["drafted"],
        "accepted": first["accepted"], "forced": first["forced"], "steps": first["steps"],
        "steps_saved": plain[0]["steps"] - first["steps"], "seconds": statistics.median(times),
        "seconds_low": min(times), "seconds_high": max(times), "times_as_fast": faster,
        "other_replies": other,
    }  # fmt: skip


def as_table(rows: list[dict[str, Any]]) -> str:
    """One line for each way."""
    lines = []
    for row in rows:
        share = f"{row['accepted'] / row['drafted']:.0%}" if row["drafted"] else "-"
        forced = f"{row['forced'] / row['tokens']:.0%}" if row["forced"] else "-"
        name = Way(row["drafts"], row["most"], row["jump"]).name
        lines.append([
            row["prompts"], row["at_once"], name, row["tokens"], row["tokens_a_pass"], forced, share,
            row["steps"], row["seconds"] * 1e3, row["seconds_low"] * 1e3, row["seconds_high"] * 1e3,
            row["times_as_fast"], row["other_replies"],
        ])  # fmt: skip
    head = [
        "prompts", "at once", "drafts", "tokens", "a pass", "forced", "accepted", "steps", "ms", "low",
        "high", "times as fast", "other",
    ]  # fmt: skip
    return table(head, lines)
