"""Faster ways to the same numbers: the fused kernels against plain torch, tokens chosen on the device."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_config
from torch import Tensor

from minirad.__main__ import main
from minirad.attention import BatchEntry, build_metadata
from minirad.bench import kernels
from minirad.fast.few_tokens import CUTS, Cut, Cuts, FewTokens
from minirad.fast.fused_llama import FusedLlama, fused_runs
from minirad.fast.one_token import OneToken, Tile, Tiles
from minirad.fast.paged import TorchPagedAttention
from minirad.fast.sampling import next_tokens
from minirad.kv import KVPool
from minirad.model.llama import LlamaModel, random_weights
from minirad.model.sampler import position_uniform, sample

torch.set_num_threads(1)

CARD = torch.device("cuda")
FUSED = torch.cuda.is_available() and fused_runs(CARD, torch.bfloat16, 64)


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not FUSED, reason="needs an NVIDIA GPU and Triton")(test))


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


KINDS = [Params(0), Params(), Params(0.7, top_k=5), Params(1.3, 0.8), Params(0.9, 0.7, 12), Params(5.0, 0.1)]


# ---------------------------------------------------------------------- tokens chosen on the device


def test_next_tokens_is_sample() -> None:
    """More rows than are drawn at once, every combination of limits, equal logits among them."""
    logits = torch.randn(90, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[40:] = logits[40:].round()  # many equals: top_k must keep the lowest ids
    logits[5, :200] = -math.inf
    params = [KINDS[row % len(KINDS)] for row in range(90)]
    for seed in range(3):
        uniforms = [position_uniform(seed, 0, row) for row in range(90)]
        tokens, logprobs = sample(logits, params, uniforms)
        for known in (None, next_tokens(logits, [Params(0)] * 90, uniforms)):
            chosen = next_tokens(logits, params, uniforms, known)
            assert chosen[0].tolist() == tokens
            assert chosen[1].tolist() == pytest.approx(logprobs, abs=1e-6)


def test_next_tokens_at_the_ends() -> None:
    logits = torch.zeros(4, 8)
    logits[:, [0, 7]] = -math.inf
    uniforms = [0.0, 1 - 2**-53, 0.0, 1 - 2**-53]
    params = [Params(), Params(), Params(top_k=3), Params(top_k=3)]
    assert next_tokens(logits, params, uniforms)[0].tolist() == [1, 6, 1, 3]
    with pytest.raises(ValueError, match="4 rows of logits, 1 params, 4 uniforms"):
        next_tokens(logits, params[:1], uniforms)


def test_nan_stays_to_be_seen() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, math.nan, 0.0]])
    found = next_tokens(logits, [Params(0), Params(0), Params(0)], [0.0] * 3)
    assert found[0, :2].tolist() == [1, 0]
    assert found[1].isnan().tolist() == [False, False, True]
    assert next_tokens(logits, [Params()] * 3, [0.5] * 3)[1].isnan().tolist() == [False, False, True]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_on_the_gpu_the_same_tokens(rows: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, 128256, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype)
    logits[0, [77, 100000]] = 50.0  # equals, far apart
    params = [KINDS[row % len(KINDS)] for row in range(rows)]
    uniforms = [position_uniform(1, 0, row) for row in range(rows)]
    found = next_tokens(logits.to(CARD), params, uniforms).tolist()
    wanted, logprobs = sample(logits, params, uniforms)
    assert found[0] == wanted
    assert found[1] == pytest.approx(logprobs, abs=1e-4)
    assert sample(logits.to(CARD), params, uniforms)[0] == wanted


@on_gpu
def test_on_the_gpu_nan_is_told() -> None:
    logits = torch.zeros(3, 5000, device=CARD)
    logits[1] = math.nan
    assert next_tokens(logits, [Params()] * 3, [0.5] * 3)[1].isnan().tolist() == [False, True, False]


# ---------------------------------------------------------------------- the model's arithmetic

# batches of a few tokens, of one, and of many
SPANS = [(0, 5), (5, 6), (6, 7), (7, 40), (40, 41), (41, 57), (57, 59)]
SMALL = Cuts(Cut(1, 64, 64, 2), Cut(4, 32, 32, 2), Cut(1, 64, 64, 3), Cut(2, 32, 32, 2), Cut(1, 64, 32, 3))
SHAPES: dict[str, dict[str, object]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 200, "num_attention_heads": 9,
                  "num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": False},
    "few": {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64},
    "few, biases": {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 1, "vocab_size": 64,
                    "num_key_value_heads": 1, "head_dim": 128, "attention_bias": True, "mlp_bias": True},
    "stretched": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip


def model_of(shape: str, dtype: torch.dtype, device: torch.device | str) -> LlamaModel:
    config = tiny_config(**SHAPES[shape])
    weights = random_weights(config, 3, dtype=torch.float32, device="cpu")
    larger = {name: w * 5 if w.dim() == 2 else w for name, w in weights.items()}  # let layers matter
    return LlamaModel(config, {name: w.to(device, dtype) for name, w in larger.items()})


def answers(model: LlamaModel, spans: list[tuple[int, int]] = SPANS) -> Tensor:
    """Logits of every token of one sequence, computed in these batches through a shuffled, poisoned pool."""
    rows = np.random.default_rng(0).permutation(np.arange(1, 65))[None]
    pool, backend = model.new_pool(65), TorchPagedAttention()
    pool.poison(torch.arange(1, 65, device=model.device))
    logits = []
    for start, stop in spans:
        meta = build_metadata(rows, [BatchEntry(0, start, stop)], 1, model.device)
        tokens = torch.arange(start, stop, device=model.device) * 7 % 61
        every = torch.arange(stop - start, device=model.device)
        logits.append(model.forward(tokens, meta, pool, backend, every))
    return torch.cat(logits).cpu()


@on_gpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.bfloat16) for shape in SHAPES), ("plain", torch.float16)]
)
def test_one_token_is_as_near_to_float32_as_torchs(shape: str, dtype: torch.dtype) -> None:
    exact = answers(model_of(shape, torch.float32, "cpu"))
    plain = model_of(shape, dtype, CARD)
    rounding = float((answers(plain) - exact).norm() / exact.norm())
    model = FusedLlama(plain)
    tiles = [None, Tiles(Tile(2), Tile(4, 4), Tile(2, 4, 4), Tile(1), Tile(4, 8, 3))]
    for some in tiles if shape == "plain" else tiles[:1]:
        model.one_token = OneToken(model.inv_freq, 128, model.config.rms_eps, some)
        error = float((answers(model) - exact).norm() / exact.norm())
        print(f"{shape} {dtype}: {error:.2e}, torch {rounding:.2e}")
        assert error < 1.25 * rounding + 1e-3
    model.one_token = None
    assert float((answers(model) - exact).norm() / exact.norm()) < 1.25 * rounding + 1e-3


def with_few(plain: LlamaModel) -> FusedLlama:
    """Cut so that a small model fits, with stretches of its own for every product that may have them."""
    model = FusedLlama(plain)
    assert model.one_token is not None
    model.few_tokens = (FewTokens(plain.config, model.one_token, cuts=SMALL),)
    return model


@on_gpu
@pytest.mark.parametrize(
    "sizes",
    [(2048, 8192, 32, 8, 64), (4096, 14336, 32, 8, 128), (3072, 8192, 24, 8, 128), (8192, 28672, 64, 8, 128)],
    ids=["1B", "8B", "3B", "70B"],
)
def test_a_layer_of_any_usual_size_is_cut_for_this_card(sizes: tuple[int, ...]) -> None:
    """As FusedLlama comes, cuts and all: what does not lie in shared memory would not be launched."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = tiny_config(**dict(zip(names, sizes, strict=True)), num_hidden_layers=1, vocab_size=256)
    weights = random_weights(config, 3, dtype=torch.bfloat16, device=CARD)
    model = FusedLlama(LlamaModel(config, weights))
    assert model.few_tokens
    found = answers(model, [(0, 2), (2, 22), (22, 62)])
    model.few_tokens = ()
    wanted = answers(model, [(0, 2), (2, 22), (22, 62)])
    assert torch.allclose(found, wanted, atol=0.03 * float(wanted.abs().max()))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["few", "few, biases"])
def test_a_few_tokens_are_as_near_to_float32_as_torchs(shape: str, dtype: torch.dtype) -> None:
    exact = answers(model_of(shape, torch.float32, "cpu"))
    plain = model_of(shape, dtype, CARD)
    rounding = float((answers(plain) - exact).norm() / exact.norm())
    model = with_few(plain)
    error = float((answers(model) - exact).norm() / exact.norm())
    print(f"{shape} {dtype}: {error:.2e}, torch {rounding:.2e}")
    assert error < 1.25 * rounding + 1e-3
    assert model.few_tokens and not model.few_tokens[0]._arrived.any()


@on_gpu
def test_a_real_size_of_a_few_tokens() -> None:
    """The cuts that are used: of Llama 3.2 1B's sizes, two layers, each of a batch as alone, bit by bit."""
    config = tiny_config(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        num_hidden_layers=2, vocab_size=4096,
    )  # fmt: skip
    plain = LlamaModel(config, random_weights(config, 5, dtype=torch.bfloat16, device=CARD))
    model = FusedLlama(plain)
    assert len(model.few_tokens) == len(CUTS)
    rows = np.arange(1, 257).reshape(128, 2)
    tokens = (torch.arange(128, device=CARD) * 61 + 7) % 4096
    found = {}
    for count in (2, 3, 16, 17, 32, 40, 64, 70, 128):
        meta = build_metadata(rows, [BatchEntry(row, 0, 1) for row in range(count)], 1, CARD)
        every = torch.arange(count, device=CARD)
        backend = (
            kernels.NoAttention()
        )  # a batch's attention is another matter: torch's differs with its size
        found[count] = model.forward(tokens[:count], meta, model.new_pool(257), backend, every)
        wanted = plain.forward(tokens[:count], meta, plain.new_pool(257), backend, every)
        assert (found[count] - wanted).abs().max() < 0.03 * wanted.abs().max()
    for count, more in ((2, 16), (3, 16), (17, 32), (40, 64), (70, 128)):
        assert torch.equal(found[count], found[more][:count]), (count, more)


@on_gpu
def test_an_early_start_changes_nothing() -> None:
    """Kernels that begin before the one in front has ended would read what is half written."""
    model = with_few(model_of("few", torch.bfloat16, CARD))
    one = model.one_token
    assert one is not None
    early = answers(model)
    for _ in range(20):
        assert torch.equal(answers(model), early)
    one.launch = {"EARLY": False}
    assert torch.equal(answers(model), early)


@on_gpu
@pytest.mark.parametrize("count", [1, 5])
def test_a_captured_step_equals_the_launched_one(count: int) -> None:
    model = FusedLlama(model_of("plain", torch.bfloat16, CARD))
    pool, backend = model.new_pool(129), TorchPagedAttention()
    rows = np.arange(1, 33).reshape(-1, 4)
    meta = build_metadata(rows, [BatchEntry(row, 2, 3) for row in range(count)], 1, CARD)
    backend.plan(meta, pool)
    tokens = torch.arange(count, device=CARD)
    model.compute(tokens, meta, pool, backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.compute(tokens, meta, pool, backend)
    for shift in range(3):
        tokens.copy_(torch.arange(count) + shift)
        graph.replay()
        assert torch.equal(captured, model.compute(tokens, meta, pool, backend))


def attend_to(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One query `[heads, dim]` in float32: its answer, and log2 of the sums of exponentials `[heads]`."""
    group = len(q) // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", q.float(), keys) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values), scores.logsumexp(-1) / math.log(2)


@on_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (9, 3, 64), (4, 2, 128), (4, 2, 256)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_of_short_requests(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    from minirad.fast.short_decode import Cut, ShortDecode

    lengths = [1, 17, 300, 2049]
    longest = -(-max(lengths) // page_size) * page_size
    pages = np.random.default_rng(1).permutation(len(lengths) * longest // page_size) + 1
    rows = (pages[:, None] * page_size + np.arange(page_size)).reshape(len(lengths), longest)
    meta = build_metadata(rows, [BatchEntry(i, n - 1, n) for i, n in enumerate(lengths)], page_size, CARD)
    generator = torch.Generator(CARD).manual_seed(0)
    shape = (int(rows.max()) + 1, kv_heads, dim)
    pool = KVPool(1, *shape, dtype=torch.bfloat16, device=CARD)
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(shape, generator=generator, device=CARD))
    q = torch.randn((len(lengths), heads, dim), generator=generator, device=CARD).bfloat16()
    lists = (torch.from_numpy(meta.kv_indptr).to(CARD), meta.kv_indices)
    last = torch.from_numpy(meta.last_page_len).to(CARD)
    more = torch.randn((2, 700, kv_heads, dim), generator=generator, device=CARD)
    # as three stretches of tokens answered, the second one empty
    met = [[attend_to(one, *part) for one in q] for part in (more[:, :200], more[:, 200:])]
    met.insert(1, [(a * torch.nan, torch.full_like(b, -math.inf)) for a, b in met[0]])
    answers, lse = (torch.stack([torch.stack([p[at] for p in part]) for part in met]) for at in (0, 1))
    others = answers, lse, *more
    cuts = {Cut.best(requests, tokens, dim) for requests in (1, 20, 100) for tokens in (128, 256, 0)}
    for cut in cuts | {Cut(4, 64, 2, 4, 1, True), Cut(4, 64, 16, 4, 3, False)}:
        short = ShortDecode(heads, kv_heads, dim, dim**-0.5, *lists, last, page_size, cut=cut)
        for before in (None, None, others):  # and the counters are as they were
            out = short.go_on(0, q, pool, dim**-0.5, before and before[:2])
            for i, n in enumerate(lengths):
                slots = torch.from_numpy(rows[i, :n]).to(CARD)
                keys, values = (t[slots].float() for t in (pool.k[0], pool.v[0]))
                if before:
                    keys, values = torch.cat((keys, others[2])), torch.cat((values, others[3]))
                wanted, _ = attend_to(q[i], keys, values)
                assert (out[i].float() - wanted).norm() < 5e-3 * wanted.norm()


def test_cuts_for_short_requests_and_for_any() -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    from minirad.fast.short_decode import FEW_REQUESTS, Cut, cut_until

    few, many = (1, 2, 16), (17, 32, 33, 64, 65, 256)
    assert Cut.best(1, 0, 64) != Cut.best(FEW_REQUESTS + 1, 0, 64)
    for requests, limits in ((16, (128, 256, 2048, 16384)), (17, (128, 256, 4096)), (33, (256, 4096))):
        assert [cut_until(requests, limit) for limit in limits] == list(limits)
        assert [cut_until(requests, limit + 1) for limit in limits] == [*limits[1:], 0]
    for requests, dim in product((*few, *many), (64, 128, 256)):
        for tokens in {cut_until(requests, n) for n in range(1, 5000)}:
            cut = Cut.best(requests, tokens, dim)
            assert cut.splits & (cut.splits - 1) == cut.block & (cut.block - 1) == 0
            assert 1 <= cut.warps <= 16 and cut.block >= 16
            if tokens and tokens <= 256 and (dim == 64 or requests > FEW_REQUESTS):  # nothing to merge
                assert cut.splits == 1


@pytest.mark.parametrize(("requests", "early", "shares"), [(1, True, 0), (2, True, 1), (2, False, 0)])
def test_who_shares_most_of_a_processor(
    requests: int, early: bool, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a batch whose next kernel may begin beside it; and one request has a kernel of its own."""
    pytest.importorskip("triton", reason="needs the package triton")
    from minirad.fast import short_decode

    alone: list[bool] = []

    def launched(*args: Any, ALONE: bool, **rest: Any) -> Any:
        alone.append(ALONE)
        return SimpleNamespace(function=7)

    shared: list[int] = []
    monkeypatch.setattr(short_decode, "decode_attention", defaultdict(lambda: launched))
    monkeypatch.setattr(short_decode, "share_most", shared.append)
    numbers = torch.arange(requests + 1, dtype=torch.int32)
    attention = short_decode.ShortDecode(2, 1, 16, 0.25, numbers, numbers, numbers[1:], 1)
    attention.launch = {"EARLY": early}
    attention.run(
        0, torch.zeros(requests, 2, 16), KVPool(1, 4, 1, 16, dtype=torch.float32, device="cpu"), 0.25
    )
    assert shared == [7] * shares and alone == [requests == 1]


@on_gpu
def test_a_card_takes_that_on() -> None:
    """The share of a processor's memory that is not cache, as the driver tells it; -1 is as it likes."""
    from minirad.fast import short_decode

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels begin early on Hopper and later")
    pool, found = KVPool(1, 64, 2, 64, dtype=torch.bfloat16, device=CARD), []
    for requests in (1, 3):
        before = set(_functions(short_decode.decode_attention))
        numbers = torch.arange(requests + 1, dtype=torch.int32, device=CARD)
        cut = short_decode.Cut(1, 16, 1, 8, 3, ahead=False)  # as no other test's
        own = short_decode.ShortDecode(4, 2, 64, 0.125, numbers, numbers, numbers[1:] * 0 + 1, 1, cut=cut)
        own.run(0, torch.zeros(requests, 4, 64, dtype=torch.bfloat16, device=CARD), pool, 0.125)
        own.run(0, torch.zeros(requests, 4, 64, dtype=torch.bfloat16, device=CARD), pool, 0.125)
        (function,) = set(_functions(short_decode.decode_attention)) - before
        value = ctypes.c_int()
        assert ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(
            ctypes.byref(value), 9, ctypes.c_void_p(function)
        ) == 0  # fmt: skip
        found.append(value.value)
    assert found == [-1, 100]


def _functions(kernel: Any) -> list[int]:
    return [each.function for cache in kernel.device_caches.values() for each in cache[0].values()]


@pytest.mark.slow
def test_the_benchmark_of_kernels_counts_every_way(
    tiny_model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.setattr(kernels, "BATCHES", (1, 3))

    def measured(call: Any) -> float:
        assert call().shape[1] == tiny_model.config.vocab_size
        return 2.0

    rows = kernels.steps(tiny_model, 1.0, measured)
    assert [(row["batch"], row["short_ms"], row["share"]) for row in rows] == [
        (1, 2.0, 0.5),
        (3, None, 0.5),
    ]
    cuts = list(kernels.cuts_to_try(Cut(4, 512, 128, 3), (2048, 2048), 64, 100 << 10, (1, 4)))
    assert {(cut.splits, cut.tokens) for cut in cuts} == set(product((1, 4), (16, 32, 64)))
    for cut in cuts:
        assert cut.fits(2048, 2048)
        assert 2 * (64 + cut.tokens) * (cut.first + cut.stages * cut.block) <= 100 << 10
    for tile in kernels.tiles_to_try(2048, 2, (1, 2)):
        assert 16 <= tile.rows * 2 * 2048 / (32 * tile.warps) <= 128


def test_the_search_for_cuts_keeps_the_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix after the other, the others as found so far; the clock here prefers few stages."""
    pytest.importorskip("triton", reason="needs the package triton")
    monkeypatch.setitem(CUTS, 16, SMALL)
    for name, some in (("SPLITS", (2,)), ("FIRST", (32,)), ("BLOCKS", (32,)), ("STAGES", (2, 3))):
        monkeypatch.setattr(kernels, name, some)
    seen: list[Cuts] = []
    made = FewTokens.__init__

    def noted(self: FewTokens, *args: Any) -> None:
        seen.extend(arg for arg in args if isinstance(arg, Cuts))
        made(self, *args)

    model = model_of("few", torch.float32, "cpu")
    monkeypatch.setattr(FewTokens, "__init__", noted)
    order = ("gate_up", "down", "o", "qkv", "head")
    best, tried = kernels.best_cuts(
        model, 16, lambda call: float(sum(getattr(seen[-1], name).stages for name in order))
    )
    assert [getattr(best, name).stages for name in order] == [2] * 5
    assert list(dict.fromkeys(row["matrix"] for row in tried)) == list(order)
    assert tried[0]["step_ms"] == 12 and min(row["step_ms"] for row in tried) == 10


@pytest.mark.skipif(FUSED, reason="says what is missing where there is no GPU")
def test_the_benchmark_of_kernels_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    assert "needs an NVIDIA GPU and Triton" in capsys.readouterr().err
