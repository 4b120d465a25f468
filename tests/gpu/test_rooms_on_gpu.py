"""Drafts, adapters, the host tier and the disk on an NVIDIA GPU: the tokens that the CPU, or no draft, gives.

In float32 tokens are compared. In half precision a pass over several tokens is computed by other kernels
than one token's, so there the log-probabilities of the text that was said are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.fast.flashinfer import what_is_missing

CARD = torch.device("cuda")
MISSING = what_is_missing(CARD if torch.cuda.is_available() else torch.device("cpu"), torch.bfloat16, 64)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
flashinfer = pytest.mark.skipif(bool(MISSING), reason=f"needs FlashInfer on an NVIDIA GPU: {MISSING}")

SHOTS = "Question 1: What is the capital of France?\nAnswer 1: Paris\nQuestion 2:"
PROMPTS = [
    f"{SHOTS} What is the capital of Peru?\nAnswer 2:", f"{SHOTS} What color is snow?\nAnswer 2:",
    "one two three one two three one two three one",
]  # fmt: skip
REPLY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SIZES: dict[str, Any] = {"kv_tokens": 2048, "max_running": 4, "dtype": "float32", "poison_freed": True}


def said(
    loras: Any = ("",), prompts: Any = PROMPTS, reply: SamplingParams = REPLY, **config: Any
) -> list[Any]:
    """Outputs of each prompt under each adapter, in order; the engine is checked after every step."""
    engine = Engine(EngineConfig(**{**SIZES, **config}))
    ids = [engine.add_request(prompt, reply, lora=lora) for prompt in prompts for lora in loras]
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step().finished}
        engine.check()
    return [done[name] for name in ids]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("drafts", ["ngram", "eagle"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_change_no_token(drafts: str, page_size: int) -> None:
    plain = said(device="cpu")
    assert tokens(said(device="cuda", page_size=page_size, speculative=drafts)) == tokens(plain)


@flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
def test_verified_in_half_precision(page_size: int) -> None:
    sizes: dict[str, Any] = {
        "dummy_weights": "llama-3.2-1b", "device": "cuda", "dtype": "bfloat16", "page_size": page_size,
        "max_context": 512, "poison_freed": False,
    }  # fmt: skip
    prompts = [[*range(100, 140)] * 3, [7, 8, 9] * 20, [*range(500, 620)]]
    drafted = said(prompts=prompts, speculative="ngram", **sizes)
    whole = [prompt + each.token_ids for prompt, each in zip(prompts, drafted, strict=True)]
    told = said(prompts=whole, reply=SamplingParams(max_new_tokens=0, logprob_start=1), **sizes)
    for prompt, mine, plain in zip(prompts, drafted, told, strict=True):
        assert np.abs(np.array(mine.logprobs) - plain.prompt_logprobs[-len(mine.logprobs) :]).max() < 0.1
        assert len(plain.prompt_logprobs) == len(prompt) + len(mine.token_ids) - 1


@pytest.mark.parametrize("drafts", [None, "ngram", "eagle"])
def test_adapters_say_what_they_say_on_a_cpu(drafts: str | None) -> None:
    several: dict[str, Any] = {"loras": ("", "capitals", "oneword"), "lora": ["capitals", "oneword"]}
    several["max_running"] = 9
    assert tokens(said(device="cuda", speculative=drafts, **several)) == tokens(said(device="cpu", **several))


def test_a_second_engine_reads_what_the_first_left(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "lora": ["oneword"],
        "loras": ("", "oneword"),
        "host_kv_tokens": 2048,
        "disk_dir": tmp_path,
    }
    config |= {"device": "cuda"}
    long = [f"{SHOTS * 6} What is the capital of Peru?\nAnswer 2:"]
    first, second = said(prompts=long, **config), said(prompts=long, **config)
    assert tokens(first) == tokens(second)
    assert all(each.cached_tokens == 0 for each in first)
    assert all(each.cached_tokens >= 64 for each in second)
