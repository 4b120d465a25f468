"""On an NVIDIA GPU: FlashInfer's attention against float32, and the same engine on top of it.

Never compares words in bfloat16 between backends: greedy tokens flip where two are nearly as likely.
Logits are compared teacher-forced instead, against the same weights in float32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minirad import EngineConfig, SamplingParams, figure3
from minirad.attention import AttentionBackend, BatchEntry, build_metadata
from minirad.bench.dummy import dummy_config, dummy_model, dummy_weights
from minirad.bench.gpu import AttentionCase, backend_for
from minirad.engine import Engine
from minirad.fast.flashinfer import FlashInferAttention, what_is_missing
from minirad.fast.fused_llama import faster
from minirad.fast.paged import TorchPagedAttention
from minirad.machine import kv_tokens_that_fit
from minirad.model.classroom.corpus import documents
from minirad.model.classroom.score import EXAMS
from minirad.model.llama import LlamaConfig, LlamaModel
from minirad.model.load import load_tokenizer, load_weights, resolve_model
from minirad.observe import events as ev

CARD = torch.device("cuda")
MISSING = what_is_missing(CARD if torch.cuda.is_available() else torch.device("cpu"), torch.bfloat16, 64)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
flashinfer = pytest.mark.skipif(bool(MISSING), reason=f"needs FlashInfer on an NVIDIA GPU: {MISSING}")

MIXED = [(0, 333), (700, 1000), (25, 50), (64, 65), (500, 516), (0, 1), (0, 64), (1023, 1024), (17, 18)]
DECODES = [(0, 1), (63, 64), (57, 58), (500, 501), (1023, 1024), (1, 2), (15, 16)]
LONG = [(0, 1024), (4000, 4500), (8191, 8192), (7000, 8192), (1, 2)]


# ---------------------------------------------------------------------- attention


@flashinfer
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 9))
def test_attention_equals_float32(page_size: int, head_dim: int, group: int) -> None:
    """Errors of single batches lie near 2.5e-3; foreign slots hold NaN, and one read of them shows."""
    for spans in (MIXED, DECODES):
        case = AttentionCase(spans, page_size=page_size, head_dim=head_dim, group=group, seed=group)
        assert case.error(backend_for(case)) < 5e-3


@flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_sequences(page_size: int) -> None:
    case = AttentionCase(LONG, page_size=page_size, group=4)
    assert case.error(backend_for(case)) < 5e-3


@flashinfer
def test_float16() -> None:
    for spans in (MIXED, DECODES):
        case = AttentionCase(spans, dtype=torch.float16, page_size=4)
        assert case.error(backend_for(case)) < 1e-3


@flashinfer
def test_new_keys_go_to_the_batchs_own_slots_only() -> None:
    case = AttentionCase(MIXED, page_size=4)
    case.prepare()
    before = case.pool.k[0].clone()
    case.answer(backend_for(case))
    slots = case.metadata().out_slots
    assert torch.equal(case.pool.k[0][slots], case.k[slots])
    assert torch.equal(case.pool.v[0][slots], case.v[slots])
    other = torch.ones(len(before), dtype=torch.bool, device=CARD)
    other[slots] = False
    assert torch.equal(case.pool.k[0][other].nan_to_num(7.0), before[other].nan_to_num(7.0))


@flashinfer
def test_a_wrong_page_shows() -> None:
    """The tests above could not fail if the page table were ignored."""
    case = AttentionCase([(40, 41), (40, 41)], page_size=4)
    wanted = case.reference()
    case.rows[0, :4], case.rows[1, :4] = case.rows[1, :4].copy(), case.rows[0, :4].copy()
    got = case.answer(backend_for(case)).float()
    assert not ((got - wanted).norm() / wanted.norm()).item() < 5e-2


# ---------------------------------------------------------------------- the model: logits, teacher-forced


def weights_of(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LlamaConfig, dict[str, Tensor]]:
    if name == "classroom":
        path = resolve_model(None)
        config = LlamaConfig.from_dir(path)
        return config, load_weights(path, config, dtype, device)
    config = dummy_config(name)
    return config, dummy_weights(config, dtype, device)


def forced_logits(
    model: LlamaModel, backend: AttentionBackend, sequences: Sequence[Sequence[int]], page_size: int
) -> Tensor:
    """Logits of all positions of three sequences, computed in chunks, in mixed batches and by decoding."""
    longest = -(-max(map(len, sequences)) // page_size) * page_size
    rows = page_size + np.arange(len(sequences) * longest, dtype=np.int64).reshape(len(sequences), -1)
    pool = model.new_pool(page_size * (1 + rows.size // page_size))
    a, b, c = map(len, sequences)
    plan = [[(0, 0, a - 30), (1, 0, b - 20)], [(0, a - 30, a - 12), (1, b - 20, b - 19), (2, 0, c - 12)]]
    plan += [[(0, a - i, a - i + 1), (1, b - i, b - i + 1), (2, c - i, c - i + 1)] for i in range(12, 0, -1)]
    plan.insert(2, [(1, b - 19, b - 12)])
    logits = [torch.empty(0, device=model.device)] * 0
    for batch in plan:
        entries = [BatchEntry(*span) for span in batch]
        tokens = np.concatenate([sequences[row][start:stop] for row, start, stop in batch])
        meta = build_metadata(rows, entries, page_size, model.device)
        every = torch.arange(len(tokens), device=model.device)
        logits.append(model.forward(torch.from_numpy(tokens).to(model.device), meta, pool, backend, every))
    return torch.cat(logits)


def lessons(count: int, shortest: int) -> list[list[int]]:
    """Token ids of lesson documents, of several lengths."""
    tokenizer = load_tokenizer(resolve_model(None))
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in documents("gpu", 40)]
    long = [ids for ids in texts if len(ids) >= shortest]
    return [ids[: shortest - 7 * at] for at, ids in enumerate(long[:count])]


def compare_logits(
    name: str, device: torch.device, backend: Any, page_size: int
) -> tuple[float, float, float]:
    """Relative error of the bfloat16 logits with `backend(config)`, of those with plain torch, both against
    float32; and the largest lead, in float32, of a token that the first ranks behind another."""
    config, weights = weights_of(name, torch.bfloat16, device)
    if name == "classroom":
        sequences = lessons(3, 140)
    else:
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, config.vocab_size, n).tolist() for n in (300, 200, 100)]
    exact = LlamaModel(config, {key: value.float() for key, value in weights.items()})
    half = faster(LlamaModel(config, weights))
    wanted = forced_logits(exact, TorchPagedAttention(), sequences, page_size)
    plain = forced_logits(half, TorchPagedAttention(), sequences, page_size)
    got = forced_logits(half, backend(config), sequences, page_size)
    size = wanted.norm()
    best = wanted.max(-1).values
    lead = best - wanted.gather(1, got.argmax(-1, keepdim=True)).squeeze(1)
    return float((got - wanted).norm() / size), float((plain - wanted).norm() / size), float(lead.max())


@flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["classroom", "smollm2-135m", "llama-3.2-1b"])
def test_logits_are_as_good_as_with_the_torch_backend(name: str, page_size: int) -> None:
    def backend(config: LlamaConfig) -> FlashInferAttention:
        return FlashInferAttention(config.heads, config.kv_heads, config.head_dim, device=CARD)

    error, with_torch, lead = compare_logits(name, CARD, backend, page_size)
    print(f"{name}: {error:.2e}, torch {with_torch:.2e}, lead {lead:.3f}")
    assert error < 1.25 * with_torch + 1e-3
    assert lead < 0.5  # a token is only passed over for one that is nearly as likely


# ---------------------------------------------------------------------- the engine


class Watched(Engine):
    """Checks itself after every step, and keeps the logits of the last one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        launch = self.runner.launch

        def noted(batch: Any) -> Any:
            pending = launch(batch)
            self.logits = pending.logits
            return pending

        self.runner.launch = noted

    def advance(self) -> None:
        super().advance()
        if self.overlap is None or self.overlap.in_flight is None:
            self.check()


def engine_on_gpu(**config: Any) -> Watched:
    return Watched(EngineConfig(**{"device": "cuda", "kv_tokens": 4096, "poison_freed": True, **config}))


def exam(engine: Engine, name: str, count: int) -> float:
    """The share of right answers, all questions in one batch."""
    questions = next(exam for exam in EXAMS if exam.name == name)
    items = questions.items(count)
    prompts = [engine.tokenizer.encode(item.prompt, add_special_tokens=False) for item in items]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=questions.new_tokens))
    texts = [output.text.split("\n")[0] for output in outputs]
    return sum(text == item.answer for text, item in zip(texts, items, strict=True)) / count


@flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_classroom_llama_knows_its_lessons(page_size: int, dtype: str) -> None:
    """A wrong page would show as a wrong name. Freed slots are NaN: a read of one would end the run."""
    engine = engine_on_gpu(page_size=page_size, dtype=dtype, kv_tokens=2048, chunk_tokens=100)
    assert engine.attention.name == engine.config.attention == "flashinfer"
    assert engine.attention_note == ""
    assert exam(engine, "greeting", 40) >= 0.95
    assert exam(engine, "name recall", 40) >= 0.9
    assert engine.cache_manager.evicted_tokens > 0 or page_size == 1


@flashinfer
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_hit_gives_the_logits_of_a_cold_start(page_size: int) -> None:
    """Both are as near to float32's; a hit on the wrong page would be off by about 1."""
    prompts = lessons(8, 130)
    exact = cold_and_hit(engine_on_gpu(page_size=page_size, dtype="float32"), prompts)
    assert (exact[0] - exact[1]).abs().max().item() < 2e-4
    half = cold_and_hit(engine_on_gpu(page_size=page_size), prompts)
    cold, hit = ((logits - exact[0]).norm(dim=-1) / exact[0].norm(dim=-1) for logits in half)
    print(f"cold {cold.mean().item():.2e}, hit {hit.mean().item():.2e}")
    assert hit.mean() < 1.25 * cold.mean() + 2e-3
    assert hit.max() < 5e-2


def cold_and_hit(engine: Watched, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Logits after each prompt `[N, vocab]`: computed from nothing, and again from its own cache."""
    one, page = SamplingParams(max_new_tokens=1, ignore_eos=True), engine.config.page_size
    logits: tuple[list[Tensor], list[Tensor]] = ([], [])
    for prompt in prompts:
        engine.flush_cache()
        for which, cached in zip(logits, (0, (len(prompt) - 1) // page * page), strict=True):
            assert engine.generate([prompt], one)[0].cached_tokens == cached
            which.append(engine.logits[-1])
    return torch.stack(logits[0]), torch.stack(logits[1])


@flashinfer
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_poisoned_slots_are_never_read_under_pressure(page_size: int) -> None:
    """Evictions, retractions, chunks, samples that branch off: NaN logits would raise InvariantError."""
    engine = engine_on_gpu(kv_tokens=32 * 16, page_size=page_size, chunk_tokens=37, max_running=8)
    rng = np.random.default_rng(page_size)
    vocab = engine.model.config.vocab_size
    starts = [rng.integers(3, vocab, 40).tolist() for _ in range(3)]
    prompts = [starts[i % 3] + rng.integers(3, vocab, int(rng.integers(1, 60))).tolist() for i in range(24)]
    some = SamplingParams(max_new_tokens=40, ignore_eos=True)
    two = SamplingParams(max_new_tokens=24, ignore_eos=True, n=2, temperature=1.0)
    outputs = engine.generate(prompts, [two if i % 5 == 0 else some for i in range(24)])
    assert {output.finish_reason for output in outputs} == {"length"}
    assert engine.cache_manager.evicted_tokens > 0


def test_float32_on_the_gpu_gives_the_cpus_tokens() -> None:
    prompts = lessons(12, 120)
    params = SamplingParams(max_new_tokens=40)
    answers = []
    for device in ("cpu", "cuda"):
        engine = Watched(EngineConfig(device=device, dtype="float32", attention="torch", kv_tokens=2048))
        answers.append([(out.token_ids, out.cached_tokens) for out in engine.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_float32_falls_back_to_torch_and_says_why() -> None:
    engine = engine_on_gpu(dtype="float32")
    assert engine.attention.name == "torch"
    assert "float32" in engine.attention_note and engine.attention_note.endswith("torch on the GPU.")


def test_the_pool_takes_what_is_free() -> None:
    model = dummy_model("llama-3.2-1b", torch.bfloat16, CARD)
    fits = kv_tokens_that_fit(model, CARD)
    engine = Engine(EngineConfig(page_size=16), model=model)
    free, total = torch.cuda.mem_get_info()
    assert engine.config.kv_tokens is not None and engine.config.kv_tokens % 16 == 0
    assert 0.98 * fits < engine.config.kv_tokens <= fits
    assert free < total / 2 or engine.config.kv_tokens == 1 << 22
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))[0].token_ids) <= 2


# ---------------------------------------------------------------------- the nine steps


def story(monkeypatch: pytest.MonkeyPatch, device: str, page_size: int, lengths: dict[str, int]) -> list[Any]:
    """The panels of figure3 on a device, without the words: structure, lengths, states, hits, victims.
    And which events each frame has."""

    def config(**given: Any) -> EngineConfig:
        return EngineConfig(**{**given, "device": device})

    monkeypatch.setattr(figure3, "EngineConfig", config)
    recording, panels = figure3.run(page_size=page_size, forced_lengths=lengths)
    events = [[type(event).__name__ for event in frame.events] for frame in recording.frames]
    evicted = [
        event for frame in recording.frames for event in frame.events if isinstance(event, ev.NodeEvicted)
    ]
    shape = [
        {
            **{key: panel[key] for key in ("prompt_tokens", "cached_tokens", "kv_used", "kv_capacity")},
            "nodes": [
                [n[key] for key in ("id", "parent", "tokens", "state", "label")] for n in panel["nodes"]
            ],
            "evicted": [[n[key] for key in ("id", "tokens", "label")] for n in panel["evicted"]],
        }
        for panel in panels
    ]
    return [shape, [event.node for event in evicted], events]


LENGTHS = {"U1": 8, "U2": 90, "V1": 60, "V2": 90, "Q1": 5, "Q2": 5, "Q3": 5, "Q4": 5, "U3": 8, "A": 12}


@flashinfer
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_nine_steps_are_the_same_on_the_gpu(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    on_cpu = story(monkeypatch, "cpu", page_size, LENGTHS)
    on_gpu = story(monkeypatch, "cuda", page_size, LENGTHS)
    assert on_cpu == on_gpu


# ---------------------------------------------------------------------- memory


@flashinfer
@pytest.mark.slow
def test_compute_sanitizer_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed here")
    short = ["generate", "Hello", "Hello", "--device", "cuda", "--attention", "flashinfer"]
    short += ["--no-cuda-graphs"]  # which need torch's cache of memory
    short += ["--kv-tokens", "256", "--page-size", "4", "--max-new-tokens", "3", "--ignore-eos"]
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "minirad", *short],
        # torch's own cache of memory would hide what lies outside one tensor and inside another
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this machine's device")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
