"""Greedy output against transformers' LlamaForCausalLM, token for token, on the same weights in float32.

The reference computes each prompt alone, with its own cache. The engine computes all of them together
in several ways (page sizes, chunk sizes, cold and as hits, a pool so small that requests are retracted
and cached prefixes evicted, no cache at all), and every logit that a token was chosen by is compared.
Where the reference's two best logits lie closer together than the tolerance, either token is right: the
two may part there, and the comparison of that prompt stops.

Does not measure speed (`bench engine` does).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minirad.command import above_zero, positive
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.parts import Pending, Result
from minirad.schedule.scheduler import Batch

CLASSROOM_TOLERANCE = 2e-4
OTHER_TOLERANCE = 1e-3
LONGEST_PROMPT = 160


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run all prompts. rows x (longest sequence) x share is the size of the pool."""

    name: str
    page_size: int
    chunk_tokens: int
    max_running: int
    share: float = 1.5
    passes: int = 2  # in the second one every prompt is in the tree
    radix_cache: bool = True


WAYS = (
    Way("page 1", 1, 512, 32),
    Way("page 4, chunks of 7", 4, 7, 8),
    Way("page 16", 16, 512, 32),
    Way("page 16, chunks of 24, tight pool", 16, 24, 8, share=0.4),
    Way("page 1, tight pool", 1, 64, 16, share=0.25),
    Way("one at a time", 1, 512, 1, passes=1),
    Way("radix cache off", 1, 512, 32, passes=1, radix_cache=False),
)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The reference's greedy continuation of one prompt: tokens [N] and their logits [N, vocab]."""

    tokens: list[int]
    logits: Tensor


@dataclass(slots=True)
class Outcome:
    """What comparing one way found. The counters of the cache show that it was put to use."""

    way: str
    prompts: int = 0
    tokens: int = 0  # compared
    stops: int = 0  # prompts whose comparison ended early, at a near tie of the reference
    mismatches: list[str] = field(default_factory=list)
    max_difference: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    retracted: int = 0
    evicted_tokens: int = 0

    def passed(self, tolerance: float) -> bool:
        return self.tokens > 0 and not self.mismatches and self.max_difference <= tolerance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the classroom Llama")
    parser.add_argument("--prompts", type=positive, default=200)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--tolerance", type=above_zero, help="of a logit; default 2e-4 (classroom) or 1e-3")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    """Runs all ways; 1 if any output differs."""
    torch.set_num_threads(args.threads)
    path = resolve_model(args.model)
    tolerance = args.tolerance or (CLASSROOM_TOLERANCE if args.model is None else OTHER_TOLERANCE)
    prompts = lesson_prompts(path, args.prompts)
    model, reference = load_model(path, torch.float32, "cpu"), reference_model(path)
    bar = tqdm(prompts, desc="transformers", unit="prompt", delay=2, leave=False)
    expected = [greedy(reference, prompt, args.new_tokens) for prompt in bar]
    outcomes = [compare(model, prompts, expected, way, tolerance) for way in WAYS]
    passed = all(outcome.passed(tolerance) for outcome in outcomes)
    if args.json:
        result = {
            "model": str(args.model or "classroom"),
            "tolerance": tolerance,
            "passed": passed,
            "ways": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        print(json.dumps(result, indent=1))
    else:
        print(table(outcomes, tolerance))
    return 0 if passed else 1


def table(outcomes: Sequence[Outcome], tolerance: float) -> str:
    """The outcomes as text, with the mismatches below."""
    lines = [f"{'way':36}{'tokens':>8}{'stops':>7}{'wrong':>7}{'max diff':>10}{'hit':>6}{'retracted':>11}"]
    for each in outcomes:
        hit = each.hit_tokens / max(each.prompt_tokens, 1)
        lines.append(
            f"{each.way:36}{each.tokens:8}{each.stops:7}{len(each.mismatches):7}"
            f"{each.max_difference:10.1e}{hit:6.0%}{each.retracted:11}"
        )
    lines += [f"{each.way}: {wrong}" for each in outcomes for wrong in each.mismatches[:3]]
    passed = all(each.passed(tolerance) for each in outcomes)
    return "\n".join([*lines, f"{'equal' if passed else 'DIFFERENT'} (logits within {tolerance:g})"])


# ---------------------------------------------------------------------- the two sides


def lesson_prompts(path: Path, count: int, longest: int = LONGEST_PROMPT, seed: int = 0) -> list[list[int]]:
    """`count` beginnings of lesson documents as token ids: chats and few-shot texts that share openings."""
    from minirad.model.classroom.corpus import documents

    tokenizer = load_tokenizer(path)
    rng = random.Random(seed)
    prompts = []
    for document in documents(f"parity {seed}", count):
        ids = tokenizer.encode(document[: 8 * longest], add_special_tokens=False)
        prompts.append(ids[: rng.randint(min(8, len(ids)), min(len(ids), longest))])
    return prompts


def reference_model(path: Path) -> Any:
    """transformers' model of a directory, in float32."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading, which takes no time
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    model.generation_config = GenerationConfig()  # a model's own may change what is likeliest
    return model.eval()


@torch.inference_mode()
def greedy(reference: Any, prompt: Sequence[int], new_tokens: int) -> Expected:
    """Continues one prompt by the likeliest tokens, past any end token."""
    ids = torch.tensor([list(prompt)])
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens: list[int] = output.sequences[0, len(prompt) :].tolist()
    return Expected(tokens, torch.cat(output.logits).float())


class ProbedEngine(Engine):
    """An engine that compares the logits of each token with the reference's as it samples it."""

    judge: Judge

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.runner = _Probe(self, self.runner)


class _Probe:
    """A runner, and what it reads looked at."""

    def __init__(self, engine: ProbedEngine, runner: Any) -> None:
        self._engine, self._runner = engine, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Pending:
        return _Probed(self._engine.judge, batch, self._runner.launch(batch))


class _Probed:
    """A launched batch whose tokens the judge sees with their logits."""

    def __init__(self, judge: Judge, batch: Batch, pending: Any) -> None:
        self._judge, self._batch, self._pending = judge, batch, pending

    def read(self) -> list[Result]:
        results: list[Result] = self._pending.read()
        for request, result, row in zip(self._batch.requests, results, self._pending.last, strict=True):
            for token, _ in result.tokens:
                self._judge.look(request.id, len(request.output), token, self._pending.logits[row])
        return results


class Judge:
    """Holds one outcome up to the expectations, token by token."""

    def __init__(self, outcome: Outcome, tolerance: float) -> None:
        self.outcome, self.tolerance = outcome, tolerance
        self.expected: dict[str, Expected] = {}
        self.parted: set[str] = set()

    def look(self, request: str, position: int, token: int, logits: Tensor) -> None:
        """Compares one token and the logits that it was chosen by."""
        if request in self.parted:
            return
        expected, outcome = self.expected[request], self.outcome
        wanted = expected.logits[position]
        outcome.tokens += 1
        difference = float((logits.cpu() - wanted).abs().max())
        # NaN must not pass for small.
        outcome.max_difference = max(outcome.max_difference, difference if difference >= 0 else float("inf"))
        if token == expected.tokens[position]:
            return
        self.parted.add(request)
        best = wanted.topk(2).values
        if float(best[0] - best[1]) <= self.tolerance and float(best[0] - wanted[token]) <= self.tolerance:
            outcome.stops += 1
        else:
            gap, right = float(best[0] - wanted[token]), expected.tokens[position]
            outcome.mismatches.append(
                f"{request}: token {position} is {token}, not {right}, {gap:.1e} less likely"
            )


def compare(
    model: LlamaModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Expected],
    way: Way,
    tolerance: float,
    *,
    check: bool = False,
) -> Outcome:
    """Runs all prompts one way and compares. check: also every invariant after every step."""
    new_tokens = len(expected[0].tokens)
    longest = max(map(len, prompts)) + new_tokens
    size = max(int(longest * way.max_running * way.share), longest)
    config = EngineConfig(
        device="cpu", dtype="float32", kv_tokens=-(-size // way.page_size) * way.page_size,
        page_size=way.page_size, max_running=way.max_running, max_context=longest,
        chunk_tokens=way.chunk_tokens, radix_cache=way.radix_cache, poison_freed=True,
    )  # fmt: skip
    engine = ProbedEngine(config, model=model)
    outcome = Outcome(way.name)
    engine.judge = Judge(outcome, tolerance)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    total = len(prompts) * way.passes
    with tqdm(total=total, desc=way.name, unit="prompt", delay=2, leave=False) as bar:
        for _ in range(way.passes):
            for prompt, one in zip(prompts, expected, strict=True):
                engine.judge.expected[engine.add_request(prompt, params)] = one
            for report in _steps(engine):
                if check:
                    engine.check()
                outcome.retracted += len(report.retracted)
                outcome.evicted_tokens += report.evicted_tokens
                for output in report.finished:
                    outcome.prompts += 1
                    outcome.hit_tokens += output.cached_tokens
                    outcome.prompt_tokens += output.prompt_tokens
                    bar.update()
    return outcome


def _steps(engine: Engine) -> Iterable[Any]:
    while engine.has_work:
        yield engine.step()
