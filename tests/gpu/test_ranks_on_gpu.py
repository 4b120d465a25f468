"""Tensor parallel on NVIDIA GPUs: fused kernels over parts of a model, and NCCL's sums in captured steps.

NCCL takes one process a GPU. Where there is one GPU only, two ranks share it by gloo (which no graph can
capture), and the capturing is tried with a single rank. Words are not compared between ways of computing in
half precision, but where the same kernels run; else log-probabilities of a given text are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT

from minirad.fast.flashinfer import what_is_missing

CARD = torch.device("cuda")
MISSING = what_is_missing(CARD if torch.cuda.is_available() else torch.device("cpu"), torch.bfloat16, 64)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
flashinfer = pytest.mark.skipif(bool(MISSING), reason=f"needs FlashInfer on an NVIDIA GPU: {MISSING}")
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

PROGRAM = """
import json, os, sys
import torch
from minirad.ranks import build, group
asked = json.loads(sys.argv[1])
if asked["share"]:  # one GPU for all ranks: gloo copies by way of the host
    build.rank_device = lambda config, group, ready: torch.device("cuda", 0)
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda backend, **more: new_group(backend="gloo", **more)
from minirad import EngineConfig, SamplingParams
from minirad.engine import Engine
config = EngineConfig(**asked["config"])
if asked["alone"]:  # an engine of ranks that has but one
    from minirad.ranks.engine import RankedEngine as Engine
engine = Engine(config)
if asked["plain"] and hasattr(engine.runner, "faster"):
    faster = engine.runner.faster
    faster.one_token, faster.few_tokens = None, ()  # the kernels that a part of a model is computed with
params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprob_start=0)
outputs = engine.generate(asked["prompts"], params)
again = engine.generate(asked["prompts"], params)
engine.check()
graphs = engine.runner.graphs
if graphs is not None:
    graphs.check()
said = {
    "tokens": [each.token_ids for each in outputs], "again": [each.token_ids for each in again],
    "prompt": [each.prompt_logprobs for each in outputs],
    "captured": 0 if graphs is None else len(graphs._captured), "heads": engine.model.config.heads,
}
print("SAID " + json.dumps(said), flush=True)
"""
SIZES: dict[str, Any] = {
    "dummy_weights": "llama-3.2-1b", "device": "cuda", "kv_tokens": 4096, "page_size": 16, "max_running": 8,
    "max_context": 512,
}  # fmt: skip
PROMPTS = [[*range(100, 140)], [*range(100, 130), 7, 8, 9], [*range(500, 620)]]


def said(ranks: int = 0, share: bool = False, plain: bool = False, **config: Any) -> dict[str, Any]:
    """What an engine in processes of its own answers. ranks 0: an ordinary one; 1: one of ranks, alone."""
    asked = {
        "config": {**SIZES, **config, **({"tp": ranks} if ranks > 1 else {})}, "prompts": PROMPTS,
        "share": share, "alone": ranks == 1, "plain": plain,
    }  # fmt: skip
    start = [sys.executable]
    if ranks:
        start += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--no-python",
        ]
        start += [sys.executable]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(
        [*start, "-c", PROGRAM, json.dumps(asked)], cwd=ROOT, env=env, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    answer: dict[str, Any] = json.loads(line.removeprefix("SAID "))
    return answer


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """An ordinary engine, computing one token as it computes many."""
    return said(plain=True)


def close(these: dict[str, Any], those: dict[str, Any]) -> None:
    """Log-probabilities of the same prompts, to what half precision leaves."""
    for mine, others in zip(these["prompt"], those["prompt"], strict=True):
        assert np.abs(np.array(mine[1:]) - np.array(others[1:])).max() < 0.1


@flashinfer
def test_one_rank_captures_its_sums_and_says_the_same(one: dict[str, Any]) -> None:
    alone = said(1)
    assert alone["captured"] > 0 and one["captured"] > 0
    assert alone["tokens"] == one["tokens"] == alone["again"]
    assert alone["prompt"] == one["prompt"]


def test_two_ranks_that_share_a_card_compute_the_same(one: dict[str, Any]) -> None:
    both = said(2, share=True, cuda_graphs=False)
    assert both["heads"] == 16 and both["captured"] == 0
    assert both["tokens"] == both["again"]
    close(both, one)


@two_cards
@flashinfer
@pytest.mark.parametrize("graphs", [False, True])
def test_two_cards(one: dict[str, Any], graphs: bool) -> None:
    both = said(2, cuda_graphs=graphs)
    assert (both["captured"] > 0) == graphs
    close(both, one)


@two_cards
@flashinfer
def test_captured_steps_on_two_cards_say_what_the_same_kernels_say_one_by_one() -> None:
    assert said(2, cuda_graphs=True)["tokens"] == said(2, cuda_graphs=False)["tokens"]
