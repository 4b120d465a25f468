"""Greedy output and logits equal transformers', however the cache, the pages and the batches fall."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CheckedEngine

from minirad.bench import parity
from minirad.bench.parity import WAYS, Way
from minirad.config import EngineConfig, SamplingParams
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, resolve_model

CLASSROOM, RANDOM = 2e-4, 1e-5  # of a logit; random weights' logits span only +-1
PROMPTS, NEW_TOKENS = 8, 20


class Side:
    """One model, its prompts, and what transformers says to them."""

    def __init__(self, path: Path, prompts: list[list[int]], new_tokens: int, tolerance: float) -> None:
        self.model, self.reference = load_model(path, torch.float32, "cpu"), parity.reference_model(path)
        self.path, self.prompts, self.tolerance = path, prompts, tolerance
        self.expected = [parity.greedy(self.reference, prompt, new_tokens) for prompt in prompts]

    def compare(self, way: Way, model: LlamaModel | None = None) -> parity.Outcome:
        return parity.compare(
            model or self.model, self.prompts, self.expected, way, self.tolerance, check=True
        )


@pytest.fixture(scope="module")
def classroom() -> Side:
    path = resolve_model(None)
    return Side(path, parity.lesson_prompts(path, PROMPTS, longest=80), NEW_TOKENS, CLASSROOM)


@pytest.fixture(scope="module")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Side:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("random")
    LlamaForCausalLM(config).save_pretrained(path)
    return Side(path, shared_prompts(), 14, RANDOM)


def shared_prompts() -> list[list[int]]:
    """Prompts of 1 to 40 ids: equal ones, beginnings of others, and others that part late."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 61, 40).tolist()
    prompts = [trunk[:length] for length in (40, 33, 32, 17, 16, 1)] + [trunk[:32]]
    for kept in (31, 20, 16, 4, 0):
        prompts.append(trunk[:kept] + rng.integers(3, 61, 6).tolist())
    return prompts


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_classroom_llama_equals_transformers(classroom: Side, way: Way) -> None:
    outcome = classroom.compare(way)
    assert outcome.passed(CLASSROOM), outcome
    assert outcome.prompts == PROMPTS * way.passes
    assert outcome.stops or outcome.tokens == PROMPTS * way.passes * NEW_TOKENS
    assert (outcome.hit_tokens > 0) == way.radix_cache


# Every chunk with every page size, in a large and a small pool by turns: each page size and chunk meets both.
@pytest.mark.parametrize(
    ("page", "chunk", "pool"),
    [
        (page, chunk, (1.5, 0.5)[(row + column) % 2])
        for row, page in enumerate((1, 4, 16))
        for column, chunk in enumerate((1, 5, 16, 512))
    ],
)
def test_random_llama_equals_transformers(random_llama: Side, page: int, chunk: int, pool: float) -> None:
    way = Way("", page, chunk, max_running=6, share=pool)
    outcome = random_llama.compare(way)
    assert outcome.passed(RANDOM), outcome
    assert outcome.hit_tokens > outcome.prompt_tokens / 4
    if pool < 1:
        assert outcome.evicted_tokens > 0


def test_random_llama_equals_transformers_after_retraction(random_llama: Side) -> None:
    for page in (1, 4):
        outcome = random_llama.compare(Way("", page, 64, max_running=10, share=0.2))
        assert outcome.retracted > 0
        assert outcome.passed(RANDOM), outcome


def test_the_comparison_notices_other_weights(random_llama: Side) -> None:
    model = load_model(random_llama.path, torch.float32, "cpu")
    assert random_llama.compare(WAYS[0], model).passed(RANDOM)
    model.layers[0].qkv.mul_(1.01)
    assert not random_llama.compare(WAYS[0], model).passed(RANDOM)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("page", "chunk"), [(1, 512), (4, 7), (16, 5)])
def test_prompt_logprobs_equal_transformers(
    random_llama: Side, classroom: Side, page: int, chunk: int, n: int
) -> None:
    for side in (random_llama, classroom):
        config = EngineConfig(kv_tokens=512, page_size=page, chunk_tokens=chunk, poison_freed=True)
        engine = CheckedEngine(config, model=side.model)
        longest = max(side.prompts, key=len)
        with torch.inference_mode():
            logits = side.reference(torch.tensor([longest])).logits[0, :-1]
        following = torch.tensor(longest[1:])[:, None]
        wanted = [None, *logits.log_softmax(-1).gather(1, following).squeeze(1).tolist()]
        engine.generate(longest[:21], SamplingParams(max_new_tokens=0))
        for start in (25, 9, 0):
            params = SamplingParams(max_new_tokens=2, n=n, logprob_start=start)
            for output in engine.generate(longest, params):
                assert output.cached_tokens <= max(start - 1, 0)
                assert output.prompt_logprobs[0] == (
                    None if start == 0 else pytest.approx(wanted[start], abs=1e-4)
                )
                assert output.prompt_logprobs[1:] == pytest.approx(
                    wanted[start + 1 :], abs=2 * side.tolerance
                )


def test_the_command_says_equal_or_different_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        parity.add_arguments(parser)
        code = parity.main(parser.parse_args(["--prompts", "2", "--new-tokens", "3", *options]))
        return code, capsys.readouterr().out

    code, out = run("--json")
    result: dict[str, Any] = json.loads(out)
    assert (code, result["passed"], result["model"]) == (0, True, "classroom")
    assert len(result["ways"]) == len(WAYS)
    code, out = run("--tolerance", "1e-30")
    assert code == 1
    assert out.rstrip().endswith("DIFFERENT (logits within 1e-30)")


def test_near_ties_stop_a_comparison_and_nothing_else_does() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 5e-5], [0.0, 1.0, 0.9]])
    expected = parity.Expected([1, 1], logits)

    def judged(*tokens: int, shift: float = 0.0) -> parity.Outcome:
        judge = parity.Judge(parity.Outcome("way"), 2e-4)
        judge.expected["R1"] = expected
        for position, token in enumerate(tokens):
            judge.look("R1", position, token, logits[position] + shift)
        return judge.outcome

    assert (judged(1, 1).tokens, judged(1, 1).stops, judged(1, 1).passed(2e-4)) == (2, 0, True)
    assert (judged(2, 0).tokens, judged(2, 0).stops, judged(2, 0).passed(2e-4)) == (1, 1, True)
    assert judged(0).mismatches and not judged(0).passed(2e-4)
    assert judged(1, 2).mismatches == ["R1: token 1 is 2, not 1, 1.0e-01 less likely"]
    assert not judged(1, 1, shift=1e-3).passed(2e-4)
    assert not judged(1, 1, shift=float("nan")).passed(2e-4)
    assert not replace(judged(), tokens=0).passed(2e-4), "nothing compared proves nothing"
