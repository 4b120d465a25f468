"""`select`: log-probabilities against transformers, the choice, and what it costs in tokens."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from conftest import CheckedEngine

from minirad.config import EngineConfig
from minirad.frontend import State, run
from minirad.model.classroom import corpus
from minirad.model.load import resolve_model

CASES = {
    "chat": ("What is the capital of France?", "The capital of France is", [" Paris", " Rome", " a city"]),
    "sounds": ("What does a dog say?", "A dog says", [f" {sound}." for sound in corpus.SOUNDS.values()]),
    "one beginning": ("Name a color.", "One color", [" is red.", " is blue.", " is the best color of all."]),
}


@pytest.fixture(scope="module")
def engine() -> CheckedEngine:
    return CheckedEngine(EngineConfig(kv_tokens=1024))


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(resolve_model(None), dtype=torch.float32).eval()


async def pick(s: State, question: str, beginning: str, choices: list[str]) -> list[int]:
    s.system(corpus.SYSTEM_PROMPT)
    s.user(question)
    s.assistant(beginning)
    prefix = list(s.tokens)
    await s.select("pick", choices)
    return prefix


def expected(reference: Any, prefix: list[int], choice: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = reference(torch.tensor([prefix + choice])).logits[0]
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(prefix) - 1 + at, token]) for at, token in enumerate(choice)]


@pytest.mark.parametrize("case", CASES)
def test_scores_are_transformers_mean_log_probabilities(
    engine: CheckedEngine, reference: Any, case: str
) -> None:
    question, beginning, choices = CASES[case]
    outcome = run(engine, pick, question, beginning, choices)
    prefix, said = outcome.result(), outcome.state.said("pick")
    ids = {choice: engine.tokenizer.encode(choice, add_special_tokens=False) for choice in choices}
    wanted = {choice: expected(reference, prefix, ids[choice]) for choice in choices}
    means = {choice: statistics.fmean(values) for choice, values in wanted.items()}
    assert said.scores == pytest.approx(means, abs=1e-4)
    assert said.text == max(means, key=means.__getitem__)
    assert said.logprobs == pytest.approx(wanted[said.text], abs=1e-4)
    assert outcome.state.tokens == prefix + ids[said.text]
    engine.check()


def test_the_prefix_is_computed_once_for_all_choices(engine: CheckedEngine) -> None:
    engine.flush_cache()
    question, beginning, choices = CASES["sounds"]
    more = sum(len(engine.tokenizer.encode(choice, add_special_tokens=False)) for choice in choices)
    first, second = (run(engine, pick, question, beginning, choices) for _ in range(2))
    prefix = len(first.result())
    # Each choice computes its own tokens, and the prefix's last one again for its first log-probability.
    assert first.usage.computed_tokens == prefix + len(choices) + more
    assert second.usage.computed_tokens == 1 + len(choices) + more
    engine.flush_cache()  # nothing is pinned any more


def test_the_model_goes_on_from_its_choice(engine: CheckedEngine) -> None:
    async def story(s: State) -> str:
        s.user("What is the capital of Italy?")
        s.assistant("The capital of Italy is")
        await s.select("city", [" Rome", " Oslo"])
        return await s.gen("end", max_new_tokens=4)

    outcome = run(engine, story)
    assert outcome.state["city"] == " Rome" and outcome.value == "."


@pytest.mark.parametrize("choices", [[], [""], ["a", "a"]])
def test_choices_that_are_none_are_refused(engine: CheckedEngine, choices: list[str]) -> None:
    with pytest.raises(ValueError, match="must be different texts, none empty"):
        run(engine, pick, "Hello", "", choices)


def test_an_empty_state_has_nothing_to_go_by(engine: CheckedEngine) -> None:
    async def bare(s: State) -> None:
        await s.select("first", ["a", "b"])

    with pytest.raises(ValueError, match="an empty state"):
        run(engine, bare)
