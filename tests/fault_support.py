"""Shared by the tests of faults: a small Llama whose replies hang on the whole prompt, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minirad.bench.dummy import dummy_weights
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaConfig, LlamaModel
from minirad.outputs import GenerationOutput

VOCAB = 61
UNSAID = (58, 59, 60)  # ids that the model never finds likeliest
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "eos_token_id": 2, "model_type": "llama",
}  # fmt: skip


def small_model(seed: int = 0, of: type[LlamaModel] = LlamaModel) -> LlamaModel:
    """A model with weights of its own: a test may poison them. (Tied ones would poison every logit.)"""
    config = LlamaConfig.from_dict(SHAPE)
    model = of(config, dummy_weights(config, torch.float32, "cpu", seed))
    model.head[list(UNSAID)] = 0.0
    return model


class Expected:
    """What a model says to a prompt alone, in an engine that shares nothing; remembered."""

    def __init__(self, model: LlamaModel) -> None:
        self._engine = Engine(EngineConfig(kv_tokens=128, radix_cache=False), model=model)
        self._known: dict[Any, list[GenerationOutput]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> GenerationOutput:
        key = (tuple(prompt), params)
        if key not in self._known:
            self._known[key] = self._engine.generate([list(prompt)], params)
        return self._known[key][index]

    def require(self, prompt: Sequence[int], params: SamplingParams, output: GenerationOutput) -> None:
        """The output's tokens are equal, its log-probabilities within float32's reach."""
        wanted = self(prompt, params, output.index)
        assert output.token_ids == wanted.token_ids, (list(prompt), params, output, wanted)
        assert (output.finish_reason, output.error) == (wanted.finish_reason, ""), (output, wanted)
        for ours, theirs in (
            (output.logprobs, wanted.logprobs),
            (output.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert len(ours) == len(theirs), (output, wanted)
            for a, b in zip(ours, theirs, strict=True):
                same = a is b if a is None or b is None else abs(a - b) <= 1e-4
                assert same, (list(prompt), params, output, wanted)


def require_nothing_held(engine: Engine) -> None:
    """With no request and no pin left, the tree can be emptied, and then every slot is free."""
    engine.check()
    assert not engine.has_work
    engine.flush_cache()
    engine.check()
    state = engine.snapshot()
    assert state["requests"] == {} and state["free"] == state["kv_tokens"]
