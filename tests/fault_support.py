"""Shared by the tests of faults: a small Llama whose replies hang on the whole prompt."""

from __future__ import annotations

import functools

import torch
from game_support import merged
from support import TINY, ColdReference, tiny_config

from minirad.bench.dummy import dummy_weights
from minirad.engine import Engine
from minirad.model.llama import LlamaModel

VOCAB = TINY["vocab_size"]
UNSAID = (58, 59, 60)  # ids that the model never finds likeliest
Expected = functools.partial(ColdReference, within=1e-4)  # this model is surer than the tiny one


def small_model(seed: int = 0, of: type[LlamaModel] = LlamaModel, lora: str = "") -> LlamaModel:
    """A model with weights of its own: a test may poison them. (Tied ones would poison every logit.)

    lora: an adapter of game_support.py that is merged into them.
    """
    config = tiny_config(num_hidden_layers=1, tie_word_embeddings=False)
    model = of(config, merged(config, dict(dummy_weights(config, torch.float32, "cpu", seed)), lora))
    model.head[list(UNSAID)] = 0.0
    return model


def require_nothing_held(engine: Engine) -> None:
    """With no request and no pin left, the tree can be emptied, and then every slot is free."""
    engine.check()
    assert not engine.has_work
    engine.flush_cache()
    engine.check()
    state = engine.snapshot()
    assert state["requests"] == {} and state["free"] == state["kv_tokens"]
