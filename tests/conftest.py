"""Shared by all tests: a tiny random Llama, engines that check themselves, and one torch thread."""

from __future__ import annotations

import os
import signal
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():  # where there is Triton but no GPU, its interpreter runs the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.model.llama import LlamaConfig, LlamaModel, random_weights
from minirad.outputs import StepReport

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in the background like this
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and some tests press Ctrl-C

torch.set_num_threads(1)  # two threads beside another busy process are slower than one


TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "eos_token_id": 2, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu",
}  # fmt: skip


def tiny_config(**changes: object) -> LlamaConfig:
    return LlamaConfig.from_dict({**TINY, **changes})


@pytest.fixture(scope="session")
def tiny_model() -> LlamaModel:
    config = tiny_config()
    return LlamaModel(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))


class CheckedEngine(Engine):
    """An engine that checks every invariant after every step."""

    def step(self) -> StepReport:
        report = super().step()
        self.check()
        return report

    def advance(self) -> None:
        super().advance()
        if self.overlap is None or self.overlap.in_flight is None:
            self.check()


@pytest.fixture
def make_engine(tiny_model: LlamaModel):
    def make(cache=None, **config: object) -> CheckedEngine:
        config = {"kv_tokens": 64, "max_running": 4, "poison_freed": True, **config}
        return CheckedEngine(EngineConfig(**config), cache, model=tiny_model)

    return make
