"""The Triton kernels without a GPU: Triton's interpreter runs them, program by program, on small shapes.

It says nothing of speed, of reading ahead or of programs that run at once: on a GPU, others do (see
tests/gpu/test_ops.py). Skipped where the package triton is not installed.
"""

from __future__ import annotations

import dataclasses
import math
import os
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config
from test_flashinfer_calls import Kernels
from test_ops import KINDS, SHAPES, SMALL, Params, attend_to, model_of
from torch import Tensor

from minirad.attention import BatchEntry, GatherAttention, build_metadata
from minirad.fast.few_tokens import CUTS, FEW, Cut, Cuts, FewTokens
from minirad.fast.flashinfer import FlashInferAttention
from minirad.fast.fused_llama import FusedLlama
from minirad.fast.graphs import DecodeGraphs
from minirad.fast.paged import TorchPagedAttention
from minirad.fast.sampling import next_tokens
from minirad.kv import KVPool
from minirad.model.llama import LlamaModel
from minirad.model.sampler import position_uniform, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs the package triton, and no GPU",
    ),
    # numpy's, where padding is computed that nobody stores
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|All-NaN):RuntimeWarning"),
]


def kernels_of(name: str) -> Any:
    return import_module(f"minirad.fast.{name}")


# ---------------------------------------------------------------------- a model's arithmetic


def answer(model: LlamaModel, spans: list[tuple[int, int]], backend: Any = None) -> Tensor:
    """The logits of the last tokens of a prompt that is computed in pieces."""
    pool, backend = model.new_pool(64), backend or TorchPagedAttention()
    rows = np.arange(1, 61).reshape(1, -1)
    found = []
    for start, stop in spans:
        metadata = build_metadata(rows, [BatchEntry(0, start, stop)], 1, torch.device("cpu"))
        tokens = (torch.arange(start, stop) * 7 + 3) % model.config.vocab_size
        found.append(model.forward(tokens, metadata, pool, backend, torch.tensor([stop - start - 1])))
    return torch.cat(found)


@pytest.mark.parametrize("shape", ["plain", "odd sizes", "biases"])
def test_fused_is_torch(shape: str) -> None:
    """Pieces of many tokens and of one: the two paths through the fused kernels."""
    spans = [(0, 3), (3, 4), (4, 6)]
    assert shape in SHAPES
    plain = model_of(shape, torch.float32, "cpu")
    fused = FusedLlama(plain)
    wanted, found = answer(plain, spans), answer(fused, spans)
    assert wanted.abs().max() > 0.1
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("shape", ["few", "few, biases"])
def test_a_few_tokens_are_torchs(shape: str) -> None:
    """Three and sixteen at a time, and what a short prompt leaves for one that follows."""
    plain = model_of(shape, torch.float32, "cpu")
    fused = FusedLlama(plain)
    assert fused.one_token is not None
    fused.few_tokens = (FewTokens(plain.config, fused.one_token, cuts=SMALL),)
    spans = [(0, 3), (3, 19), (19, 20)]
    wanted, found = answer(plain, spans), answer(fused, spans)
    assert wanted.abs().max() > 0.1
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))
    assert not fused.few_tokens[0]._arrived.any()
    fused.few_tokens = ()  # as without: the comparison compares two ways
    assert torch.allclose(answer(fused, spans), wanted, atol=2e-4 * float(wanted.abs().max()))


def test_ids_alone_give_what_layers_and_scores_give() -> None:
    """`compute` of a few tokens, where looking up and the last norm are not kernels of their own."""
    fused = FusedLlama(model_of("few", torch.float32, "cpu"))
    assert fused.one_token is not None
    fused.few_tokens = (FewTokens(fused.config, fused.one_token, cuts=SMALL),)
    pool, backend, tokens = fused.new_pool(9), TorchPagedAttention(), torch.arange(7) * 5 + 2
    meta = build_metadata(np.arange(1, 9)[None], [BatchEntry(0, 0, 7)], 1, "cpu")
    whole = fused.forward(tokens, meta, pool, backend, torch.arange(7))
    assert torch.allclose(fused.compute(tokens, meta, pool, backend), whole, atol=1e-5)


@pytest.mark.parametrize("count", [FEW, FEW + 1, 128])
def test_tokens_in_blocks_are_torchs(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of another size for every matrix; the last one full or not; programs in any order."""
    shuffle_programs(monkeypatch)
    plain = model_of("few, biases", torch.float32, "cpu")
    fused = FusedLlama(plain)
    names = [each.name for each in dataclasses.fields(SMALL)]
    cuts = Cuts(
        *(dataclasses.replace(getattr(SMALL, name), tokens=16 << at % 3) for at, name in enumerate(names))
    )
    assert fused.one_token is not None
    fused.few_tokens = (FewTokens(plain.config, fused.one_token, FEW if count <= FEW else 128, cuts),)
    meta = build_metadata(np.arange(1, count + 1)[None], [BatchEntry(0, 0, count)], 1, "cpu")
    tokens, every = torch.arange(count) * 7 % plain.config.vocab_size, torch.arange(count)
    wanted, found = (
        model.forward(tokens, meta, model.new_pool(count + 1), TorchPagedAttention(), every)
        for model in (plain, fused)
    )
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))
    assert not fused.few_tokens[0]._arrived.any()


def shuffle_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where those that add up one sum do not follow each other."""
    from triton.runtime.interpreter import interpreter_builder as builder

    order, sizes = np.arange(0), (1, 1, 1)
    set_sizes, set_place = builder.set_grid_dim, builder.set_grid_idx

    def sized(*grid: int) -> None:
        nonlocal order, sizes
        order, sizes = np.random.default_rng(0).permutation(math.prod(grid)), grid
        set_sizes(*grid)

    def placed(*place: int) -> None:
        at = order[np.ravel_multi_index(place, sizes)]
        set_place(*(int(each) for each in np.unravel_index(at, sizes)))

    monkeypatch.setattr(builder, "set_grid_dim", sized)
    monkeypatch.setattr(builder, "set_grid_idx", placed)


def test_which_batches_are_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 128 go through the layers together; the scores of more than FEW are the library's."""
    fused = FusedLlama(model_of("few", torch.float32, "cpu"))
    assert fused.one_token is not None
    fused.few_tokens = tuple(FewTokens(fused.config, fused.one_token, most, SMALL) for most in (16, 64, 128))
    calls: list[tuple[str, int, int]] = []
    for name in ("_through", "_scores"):
        real = getattr(FewTokens, name)

        def noted(self: FewTokens, x: torch.Tensor, *rest: Any, name: str = name, real: Any = real) -> Any:
            calls.append((name, self.most, len(x)))
            return real(self, x, *rest)

        monkeypatch.setattr(FewTokens, name, noted)
    pool, backend = fused.new_pool(130), TorchPagedAttention()

    def compute(*counts: int) -> None:
        for count in counts:
            meta = build_metadata(np.arange(1, 130)[None], [BatchEntry(0, 0, count)], 1, "cpu")
            backend.plan(meta, pool)
            fused.compute(torch.zeros(count, dtype=torch.int64), meta, pool, backend)

    compute(2, 17, FEW, FEW + 1, 128, 129)
    through = [
        ("_through", most, count) for most, count in ((16, 2), (64, 17), (64, 64), (128, 65), (128, 128))
    ]
    assert [call for call in calls if call[0] == "_through"] == through
    scores = [("_scores", *call[1:]) for call in through[:3]]
    assert [call for call in calls if call[0] == "_scores"] == scores
    calls.clear()
    fused.few_tokens = fused.few_tokens[2:]  # of a model that the cuts for fewer do not fit
    compute(2, FEW, FEW + 1)
    assert calls == [("_through", 128, FEW + 1)]


def test_which_models_can_be_cut() -> None:
    usual = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 128256}
    fitting = tiny_config(**usual, num_key_value_heads=8, head_dim=64)
    assert all(FewTokens.fits(fitting, cuts) for cuts in CUTS.values())
    few = [cuts for tokens, cuts in CUTS.items() if tokens <= FEW]
    for name, size, not_for in (
        ("hidden", 2048 + 64, few),
        ("intermediate", 8192 + 64, few),
        ("hidden", 2048 + 32, CUTS.values()),
        ("intermediate", 8192 + 32, CUTS.values()),
        ("vocab_size", 61, CUTS.values()),
        ("head_dim", 32, CUTS.values()),
    ):
        other = dataclasses.replace(fitting, **{name: size})
        assert not any(FewTokens.fits(other, cuts) for cuts in not_for), name
    alone = FusedLlama(model_of("plain", torch.float32, "cpu"))
    assert alone.few_tokens == () and alone.one_token is not None
    with pytest.raises(ValueError, match="cannot be cut so"):
        FewTokens(alone.config, alone.one_token)


def test_a_cut_lies_in_the_cards_shared_memory() -> None:
    """Of the largest card, of one that is a few years old, and of one for games."""
    for rows, tokens, kilobytes in product((64, 128), CUTS, (227, 163, 99)):
        cut = Cut(1, 512, 64 if tokens > FEW else 128, 6, rows=rows).within(kilobytes << 10, tokens)
        assert 2 * (rows + tokens) * (cut.first + cut.stages * cut.block) <= kilobytes << 10
        assert cut.stages >= 1 and cut.fits(6144, 4096) and cut.fits(3072, 2048)
    for tokens, cuts in CUTS.items():
        for usual in (cuts.qkv, cuts.o, cuts.gate_up, cuts.down, cuts.head):
            assert usual.within(227 << 10, tokens) == usual


def test_compute_is_forward_without_the_plan() -> None:
    """What a captured step does: the logits of all tokens, in the type of the weights."""
    model = FusedLlama(model_of("plain", torch.float32, "cpu"))
    pool, backend = model.new_pool(9), TorchPagedAttention()
    tokens, rows = torch.arange(8), np.arange(1, 9)[None]
    for start, stop in ((0, 7), (7, 8)):
        meta = build_metadata(rows, [BatchEntry(0, start, stop)], 1, "cpu")
        every = torch.arange(stop - start)
        whole = model.forward(tokens[start:stop], meta, pool, backend, every)
        assert torch.equal(model.compute(tokens[start:stop], meta, pool, backend), whole)


def test_attention_that_writes_by_itself_is_left_to_it() -> None:
    """GatherAttention does not say that it reads the pool only: keys go through its `write`."""
    model = FusedLlama(model_of("plain", torch.float32, "cpu"))
    spans = [(0, 3), (3, 4), (4, 6)]
    assert torch.allclose(answer(model, spans, GatherAttention()), answer(model, spans), atol=1e-4)


def test_the_greedy_choice() -> None:
    logits = torch.randn(3, 10000, generator=torch.Generator().manual_seed(0))
    logits[1, [9000, 77]] = 9.0  # the lower id of equals
    found = kernels_of("kernels").greedy(logits)
    wanted = next_tokens(logits, [Params(0)] * 3, [0.0] * 3)
    assert found[0].tolist() == wanted[0].tolist() and int(found[0, 1]) == 77
    assert torch.allclose(found[1], wanted[1], atol=1e-5)


@pytest.mark.parametrize("vocab", [61, 9000])
def test_where_there_is_nan_the_greedy_token_can_still_be_looked_up(vocab: int) -> None:
    """Running ahead does so, before the host is told."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, 5], logits[2, -1] = math.nan, math.nan, math.nan
    tokens, logprobs = kernels_of("kernels").greedy(logits)
    assert ((tokens >= 0) & (tokens < vocab)).all() and tokens[3] == logits[3].argmax()
    assert logprobs.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("skip", [0, 2])
def test_pages_are_listed_and_the_newest_is_entered(skip: int) -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10).clone()
    rows, slots = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([403, 77], dtype=torch.int32)
    indptr, out = torch.tensor([0, 5, 7], dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    kernels_of("kernels").fill_pages(table, rows, indptr, slots, out, 4, 5, skip)
    assert out.tolist() == [*range(20 + skip, 24 + skip), 100, skip, 19, 0, 0]
    assert table[2, skip + 4] == 100 and table[0, skip + 1] == 19
    table[2, skip + 4], table[0, skip + 1] = 24 + skip, skip + 1
    assert table.flatten().tolist() == list(range(40))


def test_what_a_step_chose_is_taken_over_and_sent() -> None:
    """Of three requests two have tokens that the host has not seen yet."""
    numbers = torch.arange(12, dtype=torch.int32)
    table, rows, indptr = (
        numbers.view(3, 4).clone(),
        numbers[:3],
        torch.tensor([0, 1, 2, 3], dtype=torch.int32),
    )
    token_ids = torch.full((3,), 9, dtype=torch.int32)
    chosen = torch.tensor([[41.0, 0.0, 128255.0, 0.0], [-0.25, 1.0, -1e-9, 1.0]], dtype=torch.float64)[:, ::2]
    chosen = torch.cat((chosen, torch.zeros(2, 3, dtype=torch.float64)), 1)[:, :2]  # cut from a larger batch
    kernels_of("kernels").fill_pages(
        table, rows, indptr, rows, torch.zeros(9, dtype=torch.int32), 4, 1, 0, chosen[0], token_ids
    )
    assert token_ids.tolist() == [41, 128255, 9]
    sent = torch.zeros(2, 2, dtype=torch.float64)
    kernels_of("kernels").to_host(chosen, sent)
    assert torch.equal(sent, chosen)


# ---------------------------------------------------------------------- attention


def test_which_heads_are_captured() -> None:
    fused = FusedLlama(model_of("plain", torch.float32, "cpu"))
    for heads, kv_heads, possible in ((32, 8, True), (9, 3, True), (16, 1, True), (32, 1, False)):
        attention = FlashInferAttention(heads, kv_heads, 64, device="cpu", kernels=Kernels())
        assert DecodeGraphs.possible(fused, attention) == possible
        assert not DecodeGraphs.possible(fused, TorchPagedAttention())
        assert not DecodeGraphs.possible(model_of("plain", torch.float32, "cpu"), attention)


LENGTHS = (1, 23, 150)


class Pages:
    """Some requests in a random pool, with `shared` first tokens in common."""

    def __init__(self, heads: int, kv_heads: int, dim: int, page: int, shared: int = 0) -> None:
        rng = np.random.default_rng(page)
        longest = -(-max(LENGTHS) // page)
        pages = 1 + rng.permutation(len(LENGTHS) * longest + shared // page)
        own = pages[: len(LENGTHS) * longest].reshape(len(LENGTHS), -1)
        self.common = np.tile(pages[len(LENGTHS) * longest :], (len(LENGTHS), 1))
        self.table = torch.from_numpy(np.concatenate((self.common, own), 1)).int()
        counts = [-(-length // page) for length in LENGTHS]
        self.indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        self.indices = torch.from_numpy(
            np.concatenate([o[:c] for o, c in zip(own, counts, strict=True)])
        ).int()
        last = [length - (c - 1) * page for length, c in zip(LENGTHS, counts, strict=True)]
        self.last = torch.tensor(last, dtype=torch.int32)
        self.pool = KVPool(1, (len(pages) + 1) * page, kv_heads, dim, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(0)
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.q = torch.randn((len(LENGTHS), heads, dim), generator=generator)
        self.page, self.shared = page, shared

    def wanted(self) -> Tensor:
        found = []
        for row, length in enumerate(LENGTHS):
            slots = self.table[row].long()[:, None] * self.page + torch.arange(self.page)
            slots = slots.flatten()[: self.shared + length]
            found.append(attend_to(self.q[row], self.pool.k[0][slots], self.pool.v[0][slots])[0])
        return torch.stack(found)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("page", [1, 4])
def test_short_decode(heads: int, kv_heads: int, page: int) -> None:
    short = kernels_of("short_decode")
    case, scale = Pages(heads, kv_heads, 16, page), 16**-0.5
    cuts = {short.Cut.best(*sizes, 64) for sizes in product((3, 20, 100), (0, 100, 200, 300))}
    others = product(((2, 16, 4, 4, 2), (4, 16, 2, 4, 1)), (False, True))
    cuts |= {short.Cut(*some, ahead) for some, ahead in others}
    for cut in cuts:
        lists = case.indptr, case.indices, case.last
        made = short.ShortDecode(heads, kv_heads, 16, scale, *lists, page, cut=cut)
        for _ in range(2):  # the counters are as they were
            assert torch.allclose(made.run(0, case.q, case.pool, scale), case.wanted(), atol=1e-5)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("splits", [1, 3])
def test_cascade_decode(page: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short, cascade = kernels_of("short_decode"), kernels_of("cascade_decode")
    monkeypatch.setattr(cascade, "TILE", 16)
    monkeypatch.setattr(cascade, "BLOCK", 16 * 16)
    monkeypatch.setattr(cascade, "PROGRAMS", 2 * splits)
    for shared in (4, 20, 100):  # with three splits some are empty
        case, scale = Pages(4, 2, 16, page, shared), 16**-0.5
        own = short.ShortDecode(4, 2, 16, scale, case.indptr, case.indices, case.last, page)
        rows, count = torch.arange(3, dtype=torch.int32), torch.tensor([shared], dtype=torch.int32)
        made = cascade.CascadeDecode(own, case.table, rows, count)
        assert made.splits == splits
        made._answer.fill_(math.nan)  # of empty stretches nothing may be read
        assert torch.allclose(made.run(0, case.q, case.pool, scale), case.wanted(), atol=1e-5)


# ---------------------------------------------------------------------- chance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_without_a_sort(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sampler.py's sort: every combination of limits, equals, and the ends of the range."""
    drawing = kernels_of("sampling_kernels")
    monkeypatch.setattr(drawing, "CHUNK", 128)
    monkeypatch.setattr(drawing, "PART", 64)
    count = 2 * len(KINDS)
    logits = torch.randn(count, 300, generator=torch.Generator().manual_seed(1)) * 3
    logits[len(KINDS) :] = logits[len(KINDS) :].round()
    logits[5, :200] = -math.inf
    logits = logits.to(dtype)
    params = [KINDS[row % len(KINDS)] for row in range(count)]
    uniforms = [0.0, 1 - 2**-53, *(position_uniform(0, 0, row) for row in range(count - 2))]
    rows = [row for row in range(count) if params[row].temperature > 0]
    numbers = [(params[r].temperature, params[r].top_k, params[r].top_p, uniforms[r]) for r in rows]
    four, greedy = (
        torch.tensor(numbers, dtype=torch.float64),
        next_tokens(logits, [Params(0)] * count, uniforms),
    )
    tokens, logprobs = sample(logits, params, uniforms)
    found = drawing.draw(logits, torch.tensor(rows), four, greedy)
    assert found[0].tolist() == [tokens[row] for row in rows]
    assert found[1].tolist() == pytest.approx([logprobs[row] for row in rows], abs=1e-5)
    free = [at for at, row in enumerate(rows) if params[row].top_k == 0 and params[row].top_p == 1]
    alone = drawing.draw(logits, torch.tensor(rows)[free], four[free], greedy, top_k=False, top_p=False)
    assert torch.equal(alone, found[:, free])
