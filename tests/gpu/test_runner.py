"""Decode steps as CUDA graphs, and running ahead: the same tokens as step by step without either."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from conftest import CheckedEngine

from minirad import Recorder
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.fast.fused_llama import CpuLlama, FusedLlama, faster, fused_runs, onednn_linear
from minirad.fast.graphs import batch_sizes
from minirad.model.llama import LlamaModel, rms_norm
from minirad.observe import events as ev

MakeEngine = Callable[..., CheckedEngine]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def with_marks(test: Any) -> Any:
    for mark in gpu:
        test = mark(test)
    return test


# ---------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("most", [1, 2, 3, 8, 32, 100, 256])
def test_the_captured_sizes_reach_every_batch(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    for count in range(1, most + 1):
        assert any(size >= count for size in sizes)


def test_on_a_cpu_there_are_no_graphs_and_no_kernels(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    engine = make_engine()
    assert engine.runner.graphs is None and not engine.overlap.possible()
    assert engine.model is tiny_model and not isinstance(engine.runner.faster, FusedLlama)
    assert not fused_runs(tiny_model.device, torch.bfloat16, 64)
    assert vars(engine.runner.faster) is vars(tiny_model)  # whatever computes it, the weights are there once


def test_a_model_of_ones_own_is_left_alone(tiny_model: LlamaModel) -> None:
    class Own(LlamaModel):
        def __init__(self) -> None:
            vars(self).update(vars(tiny_model))

    own, chosen = Own(), faster(tiny_model)
    assert faster(own) is own and faster(chosen) is chosen


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_onednn_multiplies_as_torch_does(tiny_model: LlamaModel) -> None:
    assert isinstance(faster(tiny_model), CpuLlama)
    generator = torch.Generator().manual_seed(0)
    for tokens, width in ((3, 64), (300, 1024)):  # a small product, and one that is handed over
        x, weight = (torch.randn(n, width, generator=generator) for n in (tokens, 512))
        bias = torch.randn(512, generator=generator)
        for one in (None, bias):
            wanted = LlamaModel.linear(x, weight, one)
            assert torch.allclose(onednn_linear(x, weight, one), wanted, atol=1e-3)


def test_graphs_that_cannot_be_are_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True: FlashInfer and fused kernels"):
        Engine(EngineConfig(kv_tokens=16, cuda_graphs=True), model=tiny_model)
    with pytest.raises(ValueError, match="cuda_graphs must be True, False or None, got 'yes'"):
        EngineConfig(cuda_graphs="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap must be True or False, got 1"):
        EngineConfig(overlap=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [1, 4])
def test_a_slot_taken_back_is_as_if_it_had_never_been_given(make_engine: MakeEngine, page: int) -> None:
    """What running ahead does for a request that turns out to have stopped."""
    engine = make_engine(page_size=page)
    for length in range(4, 10):
        engine.add_request([7] * length, SamplingParams(max_new_tokens=9, ignore_eos=True))
        engine.step()
        (request,) = engine.scheduler.running
        before = engine.allocator.available, request.kv_len
        engine.cache_manager.make_room(page)
        engine.cache_manager.extend_by_one([request])
        engine.cache_manager.take_back(request, request.kv_len - 1)
        assert (engine.allocator.available, request.kv_len) == before
        engine.check()
        while engine.has_work:
            engine.step()


def test_many_are_extended_as_one_by_one(make_engine: MakeEngine) -> None:
    rng = random.Random(0)
    for page in (1, 2, 4):
        engines = [make_engine(page_size=page, kv_tokens=96, max_running=4) for _ in range(2)]
        for engine in engines:
            rng.seed(page)
            for _ in range(4):
                engine.add_request([rng.randrange(5, 60) for _ in range(rng.randint(1, 9))])
            while engine.scheduler.waiting:
                engine.step()
        one, many = (engine.scheduler.running for engine in engines)
        for _ in range(6):
            for request in one:
                assert engines[0].cache_manager.extend(request, request.kv_len + 1)
            engines[1].cache_manager.extend_by_one(many)
            assert (engines[0].rows.rows == engines[1].rows.rows).all()


# ---------------------------------------------------------------------- with one


@pytest.fixture(scope="module")
def model() -> Any:
    from minirad.bench.dummy import dummy_model

    return dummy_model("smollm2-135m", torch.bfloat16, "cuda")


def prompts(count: int = 24, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    texts = [[rng.randrange(100, 40000) for _ in range(120)] for _ in range(3)]
    return [[*texts[n % 3][: rng.randrange(1, 120)], n] for n in range(count)]


def engine_of(model: Any, page: int, **options: Any) -> Engine:
    sizes = {"kv_tokens": 4096, "max_running": 12, "max_context": 512, "chunk_tokens": 200}
    return Engine(EngineConfig(page_size=page, **{**sizes, **options}), model=model)


def close(one: Any, other: Any) -> bool:
    """Equal tokens; where they part, the two were about as likely (bf16 rounds by batch size)."""
    for a, b, p, q in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False):
        if a != b:
            return abs(p - q) < 0.1
    return len(one.token_ids) == len(other.token_ids)


@with_marks
@pytest.mark.parametrize("page", [1, 16])
def test_ahead_is_step_by_step_is_eager(model: Any, page: int) -> None:
    params = [SamplingParams(max_new_tokens=n % 9 + 1 + 2 * n, ignore_eos=n % 2 == 0) for n in range(24)]
    eos = engine_of(model, page).generate(prompts(), SamplingParams(max_new_tokens=20, ignore_eos=True))
    said = tuple({output.token_ids[5 + at % 12] for at, output in enumerate(eos) if at % 3 == 0})
    before, model.config = model.config, dataclasses.replace(model.config, eos_ids=said)
    try:
        found = {}
        for name, options in (
            ("ahead", {}),
            ("steps", {"overlap": False}),
            ("eager", {"cuda_graphs": False}),
        ):
            engine = engine_of(model, page, **options)
            found[name] = engine.generate(prompts(), params)
            engine.check()
            assert engine.cache.protected_size == 0
            if engine.runner.graphs is not None:
                engine.runner.graphs.check()
            assert (engine.overlap.steps > 0) == (name == "ahead")
    finally:
        model.config = before
    assert {output.finish_reason for output in found["ahead"]} == {"stop", "length"}
    # Batches part where a request ends a step later, so that bf16 rounds differently here and there.
    for name in ("steps", "eager"):
        assert all(map(close, found["ahead"], found[name]))
    assert sum(a.token_ids == b.token_ids for a, b in zip(found["ahead"], found["steps"], strict=True)) >= 20


@with_marks
def test_by_chance_the_same_is_drawn_ahead_and_in_streams(model: Any) -> None:
    params = [
        SamplingParams(max_new_tokens=12, temperature=n % 3 / 2, top_k=n % 2 * 20, top_p=1 - n % 4 / 10,
                       seed=n, ignore_eos=True) for n in range(12)
    ]  # fmt: skip
    ahead, steps = engine_of(model, 16), engine_of(model, 16, overlap=False)
    found, wanted = (engine.generate(prompts(12), params) for engine in (ahead, steps))
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert ahead.overlap.steps > 8 and steps.overlap.steps == 0
    for engine in (ahead, steps):
        engine.flush_cache()
    for n in (0, 5):
        (whole,) = steps.generate([prompts(12)[n]], params[n])
        assert [token.token_id for token in ahead.stream(prompts(12)[n], params[n])] == whole.token_ids
    ahead.check()


@with_marks
@pytest.mark.parametrize("page", [1, 16])
def test_the_devices_table_follows_the_hosts(model: Any, page: int) -> None:
    """Admissions, remaps, samples, retraction in a small pool; checked after every step."""
    engine = engine_of(model, page, kv_tokens=512, poison_freed=True)
    for n, prompt in enumerate(prompts(20, 1)):
        engine.add_request(prompt, SamplingParams(max_new_tokens=20, n=1 + n % 3, ignore_eos=True))
    while engine.has_work:
        engine.step()
        engine.check()
        assert engine.runner.graphs is not None
        engine.runner.graphs.check()


@with_marks
def test_whoever_listens_sees_whole_steps(model: Any) -> None:
    engine = engine_of(model, 1)
    with Recorder(engine) as recording:
        engine.generate(prompts(4), SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert engine.overlap.steps == 0
    assert all(isinstance(frame.events[-1], ev.StepEnded) for frame in recording.frames)
    recording.check()


@with_marks
def test_new_weights_have_new_graphs(model: Any) -> None:
    from minirad.bench.dummy import dummy_model

    other = dummy_model("smollm2-135m", torch.bfloat16, "cuda", seed=5)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine = engine_of(model, 1)
    engine.generate(prompts(3), params)
    engine.update_weights(other)
    found, wanted = engine.generate(prompts(3), params), engine_of(other, 1).generate(prompts(3), params)
    assert all(map(close, found, wanted))


@with_marks
def test_fused_kernels_are_torch_to_rounding() -> None:
    kernels = import_module("minirad.fast.kernels")
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    for tokens, width in ((1, 576), (7, 2048), (33, 100)):
        x, delta, weight = noise(tokens, width), noise(tokens, width), noise(width)
        wanted = rms_norm(x, weight, 1e-5)
        assert torch.allclose(kernels.rms_norm(x, weight, 1e-5), wanted, atol=0, rtol=0.01)
        added = x.clone()  # which becomes the sum
        found = kernels.add_rms_norm(added, delta, weight, 1e-5)
        assert torch.equal(added, x + delta)
        assert torch.allclose(found, rms_norm(x + delta, weight, 1e-5), atol=0, rtol=0.01)
        gate, up = noise(tokens, width), noise(tokens, width)
        found = kernels.silu_mul(torch.cat((gate, up), 1))
        assert torch.allclose(found, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=0.01)
    logits = noise(5, 50_001)
    found = kernels.greedy(logits)
    assert torch.equal(found[0].long(), logits.float().argmax(-1))
    wanted = logits.float().log_softmax(-1).max(-1).values
    assert torch.allclose(found[1].float(), wanted, atol=1e-4)
    logits[3, 17] = float("nan")
    assert kernels.greedy(logits)[1].isnan().tolist() == [False, False, False, True, False]
