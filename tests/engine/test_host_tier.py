"""The host tier with real tensors: what comes back is bit for bit what went, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CheckedEngine
from support import ColdReference, drive

from minirad import RadixCache
from minirad.config import HOST_WRITE, EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.tiers.host_tier import HostTier, _runs

MakeEngine = Callable[..., CheckedEngine]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
    ]),
]  # fmt: skip
REPLY = SamplingParams(max_new_tokens=5, ignore_eos=True)


def filled(device: str, dtype: torch.dtype = torch.float32, layers: int = 3) -> KVPool:
    pool = KVPool(layers, 40, 2, 4, dtype=dtype, device=device)
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(tensor.shape).to(dtype))
    return pool


def tier_of(pool: KVPool, host_tokens: int = 40, page: int = 1) -> HostTier:
    return HostTier(pool, EngineConfig(host_kv_tokens=host_tokens, page_size=page))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_what_comes_back_is_what_went(device: str, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = filled(device, dtype)
    tier = tier_of(pool)
    device_slots = rng.permutation(np.arange(1, 40))[:17]
    host_slots = rng.permutation(np.arange(1, 40))[:17] if seed % 2 else np.arange(5, 22)
    before = [t[torch.from_numpy(device_slots)].clone() for t in (*pool.k, *pool.v)]
    copy = tier.backup(device_slots, host_slots)
    assert copy.wait() and copy.done()
    pool.poison(torch.from_numpy(np.arange(1, 40)).to(device))
    back = rng.permutation(np.arange(1, 40))[:17]
    copy = tier.load(host_slots, back)
    tier.fence()
    for t, wanted in zip((*pool.k, *pool.v), before, strict=True):
        assert torch.equal(t[torch.from_numpy(back)], wanted)
        rest = np.setdiff1d(np.arange(1, 40), back)
        assert bool(t[torch.from_numpy(rest)].isnan().all())  # nothing else was touched
    assert copy.wait()


def test_runs_of_neighbours_are_one_copy_each() -> None:
    assert _runs(np.array([3, 4, 5, 9, 7, 8])) == [(0, 3, 3), (3, 4, 9), (4, 6, 7)]
    assert _runs(np.array([2])) == [(0, 1, 2)]


def test_the_host_pool_has_a_dummy_page_and_knows_its_size() -> None:
    tier = tier_of(filled("cpu"), 8, 4)
    assert tier.kv.shape == (12, 3, 2, 2, 4) and tier.nbytes == 12 * 3 * 2 * 2 * 4 * 4


@pytest.mark.parametrize("write", HOST_WRITE)
@pytest.mark.parametrize(("page", "bigram"), [(1, False), (4, True)])
def test_no_answer_changes(
    make_engine: MakeEngine, tiny_model: LlamaModel, write: str, page: int, bigram: bool
) -> None:
    """Three long texts take turns in a pool that holds one of them; freed slots are NaN."""
    rng, reference = random.Random(1), ColdReference(tiny_model)
    engine = make_engine(
        kv_tokens=32, page_size=page, host_kv_tokens=96, host_write=write, load_back_threshold=2,
        bigram_keys=bigram,
    )  # fmt: skip
    prompts = [[rng.randrange(5, 60) for _ in range(20)] for _ in range(3)]
    asked: dict[str, list[int]] = {}
    cached: list[int] = []
    for turn in range(18):
        prompt = [*prompts[turn // 3 % 3], rng.randrange(5, 60)]
        asked[engine.add_request(prompt, REPLY)] = prompt
        for output in drive(engine):
            reference.require_equal(asked[output.request_id], REPLY, output)
            cached.append(output.cached_tokens)
    assert engine.cache_manager.loaded_tokens > 0
    assert min(cached[9:]) >= 16 and cached[0] == 0  # the second time around nothing is computed again


def test_fewer_than_the_threshold_are_computed_again(make_engine: MakeEngine) -> None:
    for threshold, loaded in ((20, 20), (21, 0)):
        engine = make_engine(kv_tokens=32, host_kv_tokens=64, load_back_threshold=threshold)
        for prompt in ([5] * 20, [6] * 27, [5] * 20 + [7]):
            (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=0))
        assert engine.cache_manager.loaded_tokens == loaded == output.cached_tokens


def test_without_room_on_the_device_nothing_is_loaded(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=32, page_size=4, host_kv_tokens=64, load_back_threshold=1)
    engine.generate([[5] * 24, [6] * 28], SamplingParams(max_new_tokens=0))
    pin = engine.pin([6] * 8)
    (output,) = engine.generate([[5] * 24], SamplingParams(max_new_tokens=0))
    engine.check()
    assert output.finish_reason == "length"  # 24 of 24 slots: the last page would have to be there twice
    engine.unpin(pin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_tokens": 10, "page_size": 4}, "page_size 4 does not divide host_kv_tokens 10"),
        ({"host_kv_tokens": -1}, "host_kv_tokens must be at least 0, got -1"),
        ({"host_kv_tokens": 8, "radix_cache": False}, "host_kv_tokens=8 without a radix cache"),
        ({"host_write": "never"}, "unknown host_write 'never'"),
        ({"load_back_threshold": 0}, "load_back_threshold must be at least 1, got 0"),
        ({"bigram_keys": 2}, "bigram_keys must be True, False or None, got 2"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_a_tree_of_ones_own_has_no_host_tier(tiny_model: LlamaModel) -> None:
    with pytest.raises(ValueError, match="host_kv_tokens=8: a cache of your own cannot use a host tier"):
        Engine(EngineConfig(kv_tokens=16, host_kv_tokens=8), RadixCache(), model=tiny_model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("write", HOST_WRITE)
def test_on_a_gpu_copies_run_beside_the_computing_and_no_answer_changes(write: str) -> None:
    from minirad.bench.dummy import dummy_model

    model = dummy_model("smollm2-135m", torch.float32, "cuda")
    rng = random.Random(2)
    prompts = [[rng.randrange(100, 40000) for _ in range(300)] for _ in range(4)]
    plain = Engine(EngineConfig(kv_tokens=4096, attention="torch"), model=model)
    tiered = Engine(
        EngineConfig(
            kv_tokens=512, host_kv_tokens=4096, host_write=write, attention="torch", poison_freed=True
        ),
        model=model,
    )  # fmt: skip
    for turn in range(24):
        prompt = prompts[turn // 3 % 4]
        wanted, found = (engine.generate([prompt], REPLY)[0] for engine in (plain, tiered))
        tiered.check()
        assert found.token_ids == wanted.token_ids
        assert np.allclose(found.logprobs, wanted.logprobs, atol=1e-3)
    assert tiered.cache_manager.loaded_tokens > 1000


@pytest.mark.parametrize("host", [0, 40])
def test_a_flush_tells_of_all_that_it_forgets(make_engine: MakeEngine, host: int) -> None:
    """What lies on the host only is forgotten, too."""
    engine = make_engine(kv_tokens=24, host_kv_tokens=host, max_running=1)
    told: list[ev.CacheFlushed] = []
    engine.bus.subscribe(ev.CacheFlushed, told.append)
    for first in range(3):
        engine.generate([10 * first + token for token in range(1, 10)], REPLY)
    kept = sum(node.units for node in engine.cache.walk())
    assert (kept > engine.cache.total_size) == (host > 0)
    engine.flush_cache()
    assert [event.tokens for event in told] == [kept]
