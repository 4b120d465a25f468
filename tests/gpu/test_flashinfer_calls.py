"""What FlashInfer is told, without a GPU: a stand-in with FlashInfer's own signatures records every call.

The stand-in also computes, slowly and by the book, what the lists that it was given ask for. So a wrong
indptr, page count, mask or target shows as a wrong answer, and a wrong argument name as a TypeError. What
it cannot show is that the kernels themselves are right: tests/gpu/test_gpu.py does that on a card.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minirad import EngineConfig, SamplingParams
from minirad.attention import BatchEntry, RadixAttention, build_metadata
from minirad.bench.gpu import AttentionCase
from minirad.engine import Engine
from minirad.fast import flashinfer as backend_module
from minirad.fast.flashinfer import FlashInferAttention, what_is_missing, workspace_bytes
from minirad.kv import KVPool

# ---------------------------------------------------------------------- the stand-in (FlashInfer 0.6.13)

LOG2E = 1.4426950408889634  # FlashInfer's log-sum-exps are to the base 2


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [n, heads, d], k and v [m, kv_heads, d]; the last query sees all keys. Answers and lse, float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if causal:
        seen = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + len(k) - len(q)
        scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).T * LOG2E


class Wrapper:
    """What the three wrappers have in common."""

    def _begin(self, calls: list[tuple[str, dict[str, Any]]], workspace: Tensor, arguments: dict) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20
        assert not workspace.any(), "FlashInfer's workspace must be zeroed before its first use"
        self.calls, self.planned = calls, {}
        self._record("init", arguments)

    def _record(self, what: str, arguments: dict[str, Any]) -> None:
        arguments = {name: value for name, value in arguments.items() if name != "self"}
        self.calls.append((f"{type(self).__name__}.{what}", arguments))
        if what == "plan":
            self.planned = arguments

    def _check_lists(self, lists: list[Tensor]) -> None:
        assert all(t.dtype == torch.int32 and t.is_contiguous() and t.dim() == 1 for t in lists)

    def _answer(self, q: Tensor, keys: list[tuple[Tensor, Tensor]], q_indptr: list[int], causal: bool) -> Any:
        assert q.dtype == self.planned["q_data_type"] and q.stride(-1) == 1
        assert len(q) == q_indptr[-1], "queries"
        parts = [
            attend(q[begin:end], k, v, self.planned["sm_scale"], causal)
            for begin, end, (k, v) in zip(q_indptr[:-1], q_indptr[1:], keys, strict=True)
        ]
        return torch.cat([out for out, _ in parts]).to(q.dtype), torch.cat([lse for _, lse in parts])

    def _paged(self, cache: tuple[Tensor, Tensor], indptr: Tensor, indices: Tensor, last: Tensor) -> Any:
        assert all(t.dim() == 4 and t.shape[1] == self.planned["page_size"] for t in cache)
        assert cache[0].stride() == cache[1].stride()
        assert cache[0].dtype == self.planned["kv_data_type"]
        pages = np.diff(indptr.numpy())
        assert (pages > 0).all(), "an entry without keys"
        lengths = (pages - 1) * cache[0].shape[1] + last.numpy()
        assert ((last >= 1) & (last <= cache[0].shape[1])).all()
        result = []
        for begin, end, length in zip(indptr[:-1].tolist(), indptr[1:].tolist(), lengths, strict=True):
            here = indices[begin:end].long()
            result.append(tuple(t[here].flatten(0, 1)[:length] for t in cache))
        return result


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        self._begin(self.recorder, float_workspace_buffer, locals())

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None,
        max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        self._check_lists([qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len])
        self._record("plan", locals())

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        self._record("run", locals())
        p = self.planned
        keys = self._paged(
            paged_kv_cache, p["paged_kv_indptr"], p["paged_kv_indices"], p["paged_kv_last_page_len"]
        )
        result = self._answer(q, keys, p["qo_indptr"].tolist(), p["causal"])
        return result if return_lse else result[0]


class Kernels:
    """Stands in for the module `flashinfer`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        wrapper = BatchPrefillWithPagedKVCacheWrapper
        setattr(self, wrapper.__name__, type(wrapper.__name__, (wrapper,), {"recorder": self.calls}))

    def names(self) -> list[str]:
        """The calls so far, but for the constructors'."""
        return [name for name, _ in self.calls if not name.endswith(".init")]

    def last(self, name: str) -> dict[str, Any]:
        return next(arguments for called, arguments in reversed(self.calls) if called == name)


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed here")
def test_the_stand_in_has_flashinfers_signatures() -> None:
    ours = BatchPrefillWithPagedKVCacheWrapper
    real = getattr(pytest.importorskip("flashinfer"), ours.__name__)
    for method in ("__init__", "plan", "run"):
        assert signature(getattr(ours, method)) == signature(getattr(real, method)), method


# ---------------------------------------------------------------------- answers

MIXED = [(0, 37), (20, 52), (25, 50), (0, 1), (5, 8), (48, 80), (63, 64), (99, 100), (17, 18)]
DECODE = [(0, 1), (63, 64), (57, 58), (15, 16), (99, 100)]


def case(spans: list[tuple[int, int]], **shape: Any) -> AttentionCase:
    return AttentionCase(spans, **{"device": "cpu", "dtype": torch.float32, **shape})


def backend_for(case: AttentionCase) -> tuple[FlashInferAttention, Kernels]:
    kernels = Kernels()
    made = FlashInferAttention(case.heads, case.kv_heads, case.head_dim, device="cpu", kernels=kernels)
    return made, kernels


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spans", [MIXED, DECODE], ids=["mixed", "decode"])
def test_the_lists_ask_for_the_right_attention(page_size: int, spans: list[tuple[int, int]]) -> None:
    attention = case(spans, page_size=page_size, group=3, seed=page_size)
    backend, _ = backend_for(attention)
    got = attention.answer(backend)
    assert not got.isnan().any(), "a slot that is not the batch's own was read"
    assert (got - attention.reference()).abs().max().item() < 2e-6


@pytest.mark.parametrize("group", range(1, 9))
def test_any_group_of_query_heads(group: int) -> None:
    attention = case(DECODE, group=group)
    backend, kernels = backend_for(attention)
    said = kernels.last("BatchPrefillWithPagedKVCacheWrapper.init")
    assert said["kv_layout"] == "NHD" and said["backend"] == "fa2"
    assert (attention.answer(backend) - attention.reference()).abs().max().item() < 2e-6


def test_half_precision_and_another_scale() -> None:
    attention = case(MIXED, dtype=torch.bfloat16, head_dim=64)
    backend, kernels = backend_for(attention)
    got, wanted = attention.answer(backend), attention.reference()
    assert got.dtype == torch.bfloat16
    assert ((got.float() - wanted).norm() / wanted.norm()).item() < 5e-3
    assert kernels.last("BatchPrefillWithPagedKVCacheWrapper.plan")["sm_scale"] == 64**-0.5


def test_only_the_batchs_own_slots_are_written() -> None:
    attention = case(MIXED, page_size=4)
    backend, _ = backend_for(attention)
    attention.prepare()
    before = [t.clone() for t in (attention.pool.k[0], attention.pool.v[0])]
    attention.answer(backend)
    slots = attention.metadata().out_slots
    for old, now, truth in zip(
        before, (attention.pool.k[0], attention.pool.v[0]), (attention.k, attention.v), strict=True
    ):
        assert torch.equal(now[slots], truth[slots])
        other = torch.ones(len(now), dtype=torch.bool)
        other[slots] = False
        assert torch.equal(now[other].nan_to_num(7.0), old[other].nan_to_num(7.0))


# ---------------------------------------------------------------------- calls


def small_batch(entries: list[BatchEntry]) -> tuple[Any, KVPool]:
    """Pages of 4: row 0 in pages 5, 2, 7; row 2 in pages 5, 3, 9."""
    rows = np.zeros((3, 12), dtype=np.int64)
    for row, pages in ((0, (5, 2, 7)), (2, (5, 3, 9))):
        rows[row] = np.concatenate([page * 4 + np.arange(4) for page in pages])
    return build_metadata(rows, entries, 4, "cpu"), KVPool(2, 40, 2, 8, dtype=torch.float32, device="cpu")


def told_word_for_word(
    meta: Any, pool: KVPool, heads: int, starts: list[int], last: list[int]
) -> FlashInferAttention:
    """Plans this batch, and looks at all that FlashInfer is told: queries begin at `starts`."""
    kernels = Kernels()
    backend = FlashInferAttention(heads, 2, 8, device="cpu", kernels=kernels)
    backend.plan(meta, pool)
    told = kernels.last("BatchPrefillWithPagedKVCacheWrapper.plan")
    assert told["qo_indptr"].tolist() == starts
    assert told["paged_kv_indptr"].tolist() == [0, 2, 5]
    assert told["paged_kv_indices"].tolist() == [5, 3, 5, 2, 7]
    assert told["paged_kv_last_page_len"].tolist() == last
    assert (told["num_qo_heads"], told["num_kv_heads"], told["head_dim_qk"]) == (heads, 2, 8)
    assert (told["page_size"], told["causal"]) == (4, True)
    assert told["q_data_type"] == told["kv_data_type"] == torch.float32
    return backend


def test_a_mixed_batch_word_for_word() -> None:
    meta, pool = small_batch([BatchEntry(2, 4, 7), BatchEntry(0, 8, 9)])
    backend = told_word_for_word(meta, pool, 4, starts=[0, 3, 4], last=[3, 1])
    k, v = torch.rand(4, 2, 8), torch.rand(4, 2, 8)
    backend.write(1, meta, k, v, pool)
    assert torch.equal(pool.k[1][[12, 13, 14, 28]], k) and torch.equal(pool.v[1][[12, 13, 14, 28]], v)
    assert not pool.k[0].any()


def test_a_decode_batch_word_for_word() -> None:
    meta, pool = small_batch([BatchEntry(2, 6, 7), BatchEntry(0, 11, 12)])
    told_word_for_word(meta, pool, 8, starts=[0, 1, 2], last=[3, 4])


def test_plan_once_per_batch_and_run_once_per_layer(tiny_model: Any) -> None:
    config = tiny_model.config
    kernels = Kernels()
    backend = FlashInferAttention(
        config.heads, config.kv_heads, config.head_dim, device="cpu", kernels=kernels
    )
    pool = tiny_model.new_pool(40)
    rows = np.arange(1, 33, dtype=np.int64).reshape(2, 16)
    for entries in ([BatchEntry(0, 0, 5), BatchEntry(1, 0, 3)], [BatchEntry(0, 5, 6), BatchEntry(1, 3, 4)]):
        meta = build_metadata(rows, entries, 1, "cpu")
        kernels.calls.clear()
        tokens = torch.arange(meta.num_tokens)
        tiny_model.forward(tokens, meta, pool, backend, torch.tensor([0]))
        names = kernels.names()
        assert sum(name.endswith(".plan") for name in names) == 1
        assert sum(name.endswith(".run") for name in names) == config.layers


def test_misuse_is_told() -> None:
    meta, pool = small_batch([BatchEntry(0, 0, 3)])
    q = torch.rand(3, 4, 8)
    backend = FlashInferAttention(4, 2, 8, device="cpu", kernels=Kernels())
    with pytest.raises(ValueError, match="3 queries, but 0 were planned"):
        backend.run(0, q, pool, 8**-0.5)
    backend.plan(meta, pool)
    with pytest.raises(ValueError, match="scale is 1"):
        backend.run(0, q, pool, 1.0)
    with pytest.raises(ValueError, match="2 queries"):
        backend.run(0, q[:2], pool, 8**-0.5)
    with pytest.raises(ValueError, match="2 kv heads of 16"):
        backend.plan(meta, KVPool(1, 40, 2, 16, dtype=torch.float32, device="cpu"))
    with pytest.raises(ValueError, match="41 slots"):
        backend.plan(meta, KVPool(1, 41, 2, 8, dtype=torch.float32, device="cpu"))


def test_the_layer_writes_through_the_backend() -> None:
    meta, pool = small_batch([BatchEntry(0, 0, 3)])
    kernels = Kernels()
    backend = FlashInferAttention(4, 2, 8, device="cpu", kernels=kernels)
    backend.plan(meta, pool)
    layer = RadixAttention(1, 4, 2, 8, 8**-0.5)
    layer(torch.rand(3, 32), torch.rand(3, 16), torch.rand(3, 16), meta, pool, backend)
    assert kernels.names()[-1] == "BatchPrefillWithPagedKVCacheWrapper.run"
    assert pool.k[1][meta.out_slots].all() and not pool.k[0].any()


# ---------------------------------------------------------------------- the engine on top


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_engine_says_the_same_with_both_backends(make_engine: Any, page_size: int) -> None:
    """Hits, chunks, evictions and retractions included: both compute the same tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 61, 11).tolist()
    prompts = [shared + rng.integers(3, 61, n).tolist() for n in (3, 9, 1, 6, 14, 2)]
    answers = []
    for name in ("torch", "flashinfer"):
        engine = make_engine(page_size=page_size, chunk_tokens=7)
        c = engine.model.config
        if name == "flashinfer":
            engine.runner.attention = FlashInferAttention(
                c.heads, c.kv_heads, c.head_dim, device="cpu", kernels=Kernels()
            )
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True))
        answers.append([(out.token_ids, out.cached_tokens) for out in outs])
    assert answers[0] == answers[1]
    assert sum(cached for _, cached in answers[0]) > 0


# ---------------------------------------------------------------------- what is missing


def test_without_a_gpu_one_sentence_says_so(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = Engine(EngineConfig(), model=tiny_model)
    assert engine.attention.name == engine.config.attention == "torch"
    assert engine.attention_note == (
        "No NVIDIA GPU is visible to torch, so attention runs in plain torch on the CPU."
    )
    for chosen in ({"device": "cpu"}, {"attention": "torch"}):
        assert Engine(EngineConfig(**chosen), model=tiny_model).attention_note == ""
    with pytest.raises(ValueError, match="'flashinfer' cannot run: no NVIDIA GPU"):
        Engine(EngineConfig(attention="flashinfer"), model=tiny_model)


def test_a_ready_model_stays_where_it_is(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = Engine(EngineConfig(), model=tiny_model)
    assert engine.device.type == "cpu"
    assert "the model lies on 'cpu'" in engine.attention_note
    with pytest.raises(ValueError, match="lies on 'cpu'"):
        Engine(EngineConfig(device="cuda"), model=tiny_model)


def test_each_thing_that_may_be_missing_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda")
    have = {"flashinfer": object()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(backend_module, "find_spec", lambda name: have.get(name))
    monkeypatch.setattr(backend_module, "_has_compiler", lambda: False)

    def broken(name: str) -> None:
        raise OSError("libcuda is of another century")

    monkeypatch.setattr(backend_module, "import_module", broken)
    assert "the model is in float32" in what_is_missing(card, torch.float32, 64)
    assert "the model's have 80" in what_is_missing(card, torch.bfloat16, 80)
    assert "this one has 7.5" in what_is_missing(card, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "nvcc" in what_is_missing(card, torch.bfloat16, 64)
    monkeypatch.setattr(backend_module, "_has_compiler", lambda: True)
    assert "another century" in what_is_missing(card, torch.bfloat16, 64)
    monkeypatch.setattr(backend_module, "import_module", lambda name: None)
    assert what_is_missing(card, torch.float16, 128) == ""
    have.clear()
    assert "not installed" in what_is_missing(card, torch.bfloat16, 64)


def test_the_workspace_grows_with_group_and_head_size() -> None:
    cpu = torch.device("cpu")
    assert workspace_bytes(32, 8, 64, cpu) == 128 << 20
    assert workspace_bytes(8, 1, 128, cpu) > 8 * 264 * 128 * 128 * 4
