"""Our Llama against transformers' on random weights: whole, in chunks, token by token, mixed."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minirad.attention import BatchEntry, build_metadata
from minirad.fast.paged import TorchPagedAttention
from minirad.kv import KVPool
from minirad.model.llama import (
    LlamaConfig,
    LlamaModel,
    random_weights,
    rms_norm,
    rope_frequencies,
)
from minirad.model.load import load_model

torch.set_num_threads(1)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
RAW = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LlamaModel]:
    """transformers' model and ours, loaded from the directory that it saved."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, **VARIANTS[request.param]})
    reference = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in reference.named_parameters():
        if name.endswith("bias") or "norm" in name:  # constant at first: would hide errors
            torch.nn.init.normal_(parameter, 0.5, 0.1)
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return reference, load_model(path, torch.float32, "cpu")


def reference_logits(reference: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(tokens[None]).logits[0]
    return logits


class Runner:
    """Drives a model over a pool whose pages lie in random order."""

    def __init__(self, model: LlamaModel, num_rows: int, context: int, page_size: int) -> None:
        self.model, self.page_size = model, page_size
        pages = -(-context // page_size)
        numbers = 1 + np.random.default_rng(1).permutation(num_rows * pages)
        slots = numbers.reshape(num_rows, pages, 1) * page_size + np.arange(page_size)
        self.rows = slots.reshape(num_rows, -1).astype(np.int64)
        self.pool: KVPool = model.new_pool((num_rows * pages + 1) * page_size)
        self.pool.poison(torch.arange(page_size, self.pool.num_slots))
        self.backend = TorchPagedAttention()

    def run(self, batch: list[tuple[BatchEntry, Tensor]]) -> Tensor:
        """Logits of every token of the batch; each entry comes with its request's tokens."""
        meta = build_metadata(self.rows, [e for e, _ in batch], self.page_size, "cpu")
        tokens = torch.cat([tokens[e.start : e.stop] for e, tokens in batch])
        every = torch.arange(meta.num_tokens)
        return self.model.forward(tokens, meta, self.pool, self.backend, every)


def some_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cuts", ["whole", "chunks", "token by token"])
def test_logits_equal_transformers(pair: tuple[Any, LlamaModel], cuts: str) -> None:
    reference, model = pair
    tokens = some_tokens(90, seed=3)
    bounds = {
        "whole": [0, 90],
        "chunks": [0, 32, 33, 64, 90],
        "token by token": list(range(91)),
    }[cuts]
    runner = Runner(model, 1, 90, page_size=4)
    entries = [BatchEntry(0, a, b) for a, b in pairwise(bounds)]
    logits = torch.cat([runner.run([(entry, tokens)]) for entry in entries])
    assert logits.dtype == torch.float32
    assert (logits - reference_logits(reference, tokens)).abs().max().item() <= 1e-5


def test_mixed_batches_equal_transformers(pair: tuple[Any, LlamaModel]) -> None:
    reference, model = pair
    prompts = [some_tokens(n, seed=n) for n in (70, 40, 55)]
    runner = Runner(model, 3, 80, page_size=16)
    runner.run([(BatchEntry(0, 0, 69), prompts[0]), (BatchEntry(1, 0, 20), prompts[1])])
    logits = runner.run(
        [
            (BatchEntry(0, 69, 70), prompts[0]),
            (BatchEntry(2, 0, 55), prompts[2]),
            (BatchEntry(1, 20, 40), prompts[1]),
        ]
    )
    expected = [
        reference_logits(reference, prompts[0])[69:],
        reference_logits(reference, prompts[2]),
        reference_logits(reference, prompts[1])[20:],
    ]
    assert (logits - torch.cat(expected)).abs().max().item() <= 1e-5


def test_a_shared_prefix_is_read_from_another_rows_pages() -> None:
    """The point of it all: row 1 uses row 0's pages and computes only what is new."""
    config = LlamaConfig.from_dict(RAW)
    model = LlamaModel(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))
    first, second = some_tokens(60, 1), some_tokens(50, 2)
    second[:48] = first[:48]
    runner = Runner(model, 2, 64, page_size=4)
    cold = runner.run([(BatchEntry(1, 0, 50), second)])[48:]
    runner.run([(BatchEntry(0, 0, 60), first)])
    runner.rows[1, :48] = runner.rows[0, :48]
    hit = runner.run([(BatchEntry(1, 48, 50), second)])
    assert (hit - cold).abs().max().item() <= 1e-5


def test_logits_only_where_asked() -> None:
    config = LlamaConfig.from_dict(RAW)
    model = LlamaModel(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))
    runner = Runner(model, 1, 16, page_size=1)
    tokens = some_tokens(9, 0)
    every = runner.run([(BatchEntry(0, 0, 9), tokens)])
    meta = build_metadata(runner.rows, [BatchEntry(0, 0, 9)], 1, "cpu")
    some = model.forward(tokens, meta, runner.pool, runner.backend, torch.tensor([8, 2]))
    assert some.shape == (2, 97)
    assert (some - every[[8, 2]]).abs().max().item() <= 1e-6
    none = model.forward(tokens, meta, runner.pool, runner.backend, torch.tensor([], dtype=int))
    assert none.shape == (0, 97)
    with pytest.raises(ValueError, match="3 token ids, but metadata for 9"):
        model.forward(tokens[:3], meta, runner.pool, runner.backend, torch.tensor([0]))


def test_pool_has_the_models_shape() -> None:
    config = LlamaConfig.from_dict(RAW)
    model = LlamaModel(config, random_weights(config, 0, dtype=torch.bfloat16, device="cpu"))
    pool = model.new_pool(33)
    assert (len(pool.k), pool.k[0].shape, pool.dtype) == (3, (33, 2, 16), torch.bfloat16)
    weights = random_weights(config, 0, dtype=torch.float32, device="cpu")
    assert sum(w.numel() for w in weights.values()) == config.num_parameters


def test_bfloat16_is_close_to_float32() -> None:
    config = LlamaConfig.from_dict(RAW)
    weights = random_weights(config, 0, dtype=torch.bfloat16, device="cpu")
    exact = LlamaModel(config, {name: w.float() for name, w in weights.items()})
    tokens = some_tokens(40, 5)
    entry = [(BatchEntry(0, 0, 40), tokens)]
    low = Runner(LlamaModel(config, weights), 1, 40, 4).run(entry)
    high = Runner(exact, 1, 40, 4).run(entry)
    assert low.dtype == torch.float32
    assert ((low - high).norm() / high.norm()).item() < 2e-2


def test_rms_norm_is_computed_in_float32() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16() * 30
    norm = llama.LlamaRMSNorm(64, eps=1e-5).bfloat16()
    torch.nn.init.normal_(norm.weight, 1.0, 0.2, generator=generator)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


def test_config_reads_both_spellings_of_rope() -> None:
    old = {**RAW, "rope_theta": 500000.0, "rope_scaling": {**LLAMA3_ROPE}}
    del old["rope_scaling"]["rope_theta"]
    new = {**RAW, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}}
    assert LlamaConfig.from_dict(old) == LlamaConfig.from_dict(new)
    oldest = {**RAW, "rope_scaling": {"type": "linear", "factor": 4}}
    scaling = LlamaConfig.from_dict(oldest).rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 4.0)
    both = {
        **RAW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        "rope_scaling": oldest["rope_scaling"],
    }
    config = LlamaConfig.from_dict(both)  # the older field wins, as in transformers
    assert config.rope_scaling == scaling and config.rope_theta == 5e4
    plain = LlamaConfig.from_dict({**RAW, "rope_scaling": None})
    assert plain.rope_scaling is None and plain.rope_theta == 10000.0
    assert rope_frequencies(plain)[0] == 1.0


def test_config_defaults_and_end_tokens(tmp_path: Path) -> None:
    raw = {k: v for k, v in RAW.items() if k not in ("num_key_value_heads", "head_dim")}
    config = LlamaConfig.from_dict(raw, more_eos=[7, 2])
    assert (config.kv_heads, config.head_dim, config.eos_ids, config.bos_id) == (4, 12, (2, 7), 1)
    assert not config.tied and config.torch_dtype == "float32"
    assert LlamaConfig.from_dict({**RAW, "eos_token_id": None}).eos_ids == ()
    assert LlamaConfig.from_dict({**RAW, "torch_dtype": "bfloat16"}).torch_dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"no config\.json"):
        LlamaConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures is \['Qwen2ForCausalLM'\]"),
        ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 512}, "sliding_window is 512"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*fp8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_attention_heads": 3}, "3 heads are no multiple of 2 kv heads"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
    ],
)
def test_config_refuses_what_it_would_compute_wrongly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_dict({**RAW, **change})


def test_llama3_frequencies_keep_fast_waves_and_stretch_slow_ones() -> None:
    scaled = rope_frequencies(LlamaConfig.from_dict({**RAW, "rope_parameters": LLAMA3_ROPE}))
    plain = rope_frequencies(LlamaConfig.from_dict(RAW))
    ratio = plain / scaled
    assert ratio[0] == 1.0 and math.isclose(ratio[-1].item(), 8.0, rel_tol=1e-6)
    assert (ratio.diff() >= 0).all()
