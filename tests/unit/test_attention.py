"""Paged attention against a naive float64 reference; its metadata, pool and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minirad.attention import (
    AttentionBackend,
    AttentionMetadata,
    BatchEntry,
    GatherAttention,
    RadixAttention,
    build_metadata,
)
from minirad.config import SamplingParams
from minirad.fast.paged import SharedSegment, TorchPagedAttention, shared_segments
from minirad.kv import KVPool

torch.set_num_threads(1)

# the one to read, and the fast one
BACKENDS = [GatherAttention, TorchPagedAttention]

# several entries of similar size each, so that queries and keys are padded
MIXED = [
    *[(0, 37), (20, 52), (25, 50), (0, 1), (5, 8), (0, 16), (48, 80)],
    *[(63, 64), (57, 58), (50, 51), (99, 100), (17, 18)],
]


class Scene:
    """Request rows with pages in random order, and what every token's K and V truly are."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        page_size: int = 1,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 32,
        shared: int = 0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.page_size, self.heads, self.scale = page_size, kv_heads * group, head_dim**-0.5
        width = max(stop for _, stop in spans)
        pages = -(-width // page_size)
        numbers = 1 + rng.permutation(len(spans) * pages).reshape(len(spans), pages)
        numbers[:, : shared // page_size] = numbers[0, : shared // page_size]
        slots = numbers[:, :, None] * page_size + np.arange(page_size)
        self.rows = np.ascontiguousarray(slots.reshape(len(spans), -1)).astype(np.int64)
        num_slots = (numbers.max() + 1) * page_size
        self.pool = KVPool(1, int(num_slots), kv_heads, head_dim, dtype=dtype, device="cpu")
        self.truth_k = torch.from_numpy(rng.standard_normal((num_slots, kv_heads, head_dim)))
        self.truth_v = torch.from_numpy(rng.standard_normal((num_slots, kv_heads, head_dim)))
        self.truth_k, self.truth_v = self.truth_k.to(dtype), self.truth_v.to(dtype)
        self.entries = [BatchEntry(row, *span) for row, span in enumerate(spans)]
        self.q = torch.from_numpy(
            rng.standard_normal((sum(stop - start for start, stop in spans), self.heads, head_dim))
        ).to(dtype)

    def run(self, backend: AttentionBackend) -> Tensor:
        """What the layer answers when all slots that are not the batch's past hold NaN."""
        self.pool.poison(torch.arange(1, self.pool.num_slots))
        for e in self.entries:
            past = torch.from_numpy(self.rows[e.row, : e.start])
            self.pool.write(0, past, self.truth_k[past], self.truth_v[past])
        meta = self.metadata()
        layer = RadixAttention(0, self.heads, self.pool.num_kv_heads, self.pool.head_dim, self.scale)
        k, v = self.truth_k[meta.out_slots], self.truth_v[meta.out_slots]
        backend.plan(meta, self.pool)
        return layer(self.q, k, v, meta, self.pool, backend).view_as(self.q)

    def metadata(self) -> AttentionMetadata:
        return build_metadata(self.rows, self.entries, self.page_size, "cpu")

    def naive(self) -> Tensor:
        """Token by token, head by head, in float64, without pages."""
        out = torch.zeros_like(self.q, dtype=torch.float64)
        group = self.heads // self.pool.num_kv_heads
        t = 0
        for e in self.entries:
            for position in range(e.start, e.stop):
                slots = torch.from_numpy(self.rows[e.row, : position + 1])
                for h in range(self.heads):
                    k = self.truth_k[slots, h // group].double()
                    v = self.truth_v[slots, h // group].double()
                    out[t, h] = torch.softmax(k @ self.q[t, h].double() * self.scale, 0) @ v
                t += 1
        return out


def assert_parity(scene: Scene, tolerance: float = 2e-6) -> None:
    wanted = scene.naive()
    for backend in BACKENDS:
        got = scene.run(backend())
        assert not got.isnan().any(), f"{backend.name}: a slot that is not the request's own was read"
        assert (got.double() - wanted).abs().max().item() < tolerance, backend.name


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_mixed_batch_equals_naive_attention(page_size: int, head_dim: int) -> None:
    assert_parity(Scene(MIXED, page_size=page_size, head_dim=head_dim, seed=page_size))


@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_per_kv_head(group: int) -> None:
    spans = [(0, 9), (30, 31), (12, 20)]
    assert_parity(Scene(spans, group=group, kv_heads=3, head_dim=64, page_size=4, seed=group))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_shared_prefix_is_attended_once_and_merged_exactly(page_size: int) -> None:
    spans = [(70, 71), (64, 65), (130, 131), (64, 80), (90, 97), (200, 201)]
    scene = Scene(spans, page_size=page_size, shared=64, group=3)
    pages = 64 // page_size
    assert shared_segments(scene.metadata()) == [SharedSegment((0, 1, 2, 3, 4, 5), 0, pages)]
    assert_parity(scene)


def test_nested_shared_prefixes_form_a_tree() -> None:
    scene = Scene([(300, 301), (310, 311), (305, 306), (320, 321), (50, 51)])
    scene.rows[1:4, :100] = scene.rows[0, :100]  # four share 100 tokens
    scene.rows[3, 100:300] = scene.rows[2, 100:300]  # two of them 200 more
    assert shared_segments(scene.metadata()) == [
        SharedSegment((0, 1, 2, 3), 0, 100),
        SharedSegment((2, 3), 100, 300),
    ]
    assert_parity(scene)


def test_a_short_common_start_does_not_hide_a_longer_one() -> None:
    scene = Scene([(300, 301), (310, 311), (305, 306), (320, 321)])
    scene.rows[1:, :5] = scene.rows[0, :5]
    scene.rows[1, :200] = scene.rows[0, :200]
    scene.rows[3, :150] = scene.rows[2, :150]
    assert shared_segments(scene.metadata()) == [
        SharedSegment((0, 1), 0, 200),
        SharedSegment((2, 3), 0, 150),
    ]
    assert_parity(scene)


def test_a_page_that_some_query_does_not_see_whole_is_not_shared() -> None:
    scene = Scene([(130, 140), (138, 139), (250, 251)], page_size=16, shared=128)
    assert {s.end for s in shared_segments(scene.metadata())} == {8}
    whole = Scene([(128, 129), (127, 144)], page_size=16, shared=128)
    assert {s.end for s in shared_segments(whole.metadata())} <= {7}
    assert_parity(scene)


@pytest.mark.parametrize("kind", BACKENDS)
def test_sharing_gives_the_same_numbers_as_not_sharing(kind: type[AttentionBackend]) -> None:
    together = Scene([(520, 521), (530, 531), (540, 541)], shared=512)
    both = together.run(kind())
    for i, entry in enumerate(together.entries):
        meta = build_metadata(together.rows, [entry], 1, "cpu")
        backend = kind()
        backend.plan(meta, together.pool)
        alone = backend.run(0, together.q[i : i + 1], together.pool, together.scale)
        assert (alone - both[i]).abs().max().item() < 2e-6


def test_long_query_runs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirad.fast.paged.MAX_SCORES", 300)
    monkeypatch.setattr("minirad.fast.paged.MIN_QUERIES", 3)
    scene = Scene([(128, 170), (140, 160), (0, 45)], shared=128, page_size=4)
    backend = TorchPagedAttention()
    backend.plan(scene.metadata(), scene.pool)
    assert len(backend._parts) > 10
    assert_parity(scene)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_close(backend: type[AttentionBackend]) -> None:
    scene = Scene(MIXED, dtype=torch.bfloat16, head_dim=64)
    got = scene.run(backend())
    assert got.dtype == torch.bfloat16
    reference = scene.naive()
    error = (got.double() - reference).norm() / reference.norm()
    assert error.item() < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_page_changes_the_answer(backend: type[AttentionBackend]) -> None:
    """The parity tests could not fail if the page table were ignored."""
    scene = Scene([(40, 41), (40, 41)], page_size=4)
    right = scene.run(backend())
    scene.rows[0, :4], scene.rows[1, :4] = scene.rows[1, :4].copy(), scene.rows[0, :4].copy()
    assert (scene.run(backend()) - right).abs().max().item() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_refuses_a_batch_that_it_did_not_plan(backend: type[AttentionBackend]) -> None:
    scene = Scene([(0, 3)])
    with pytest.raises(ValueError, match="3 queries, but 0 were planned"):
        backend().run(0, scene.q, scene.pool, 1.0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_engine_says_the_same_with_the_attention_to_read(make_engine: Any, page_size: int) -> None:
    """Hits, chunks, evictions and retractions included."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 61, 11).tolist()
    prompts = [shared + rng.integers(3, 61, n).tolist() for n in (3, 9, 1, 6, 14, 2)]
    answers = []
    for name in ("torch", "gather"):
        engine = make_engine(page_size=page_size, chunk_tokens=7, attention=name)
        assert engine.attention.name == engine.config.attention == name
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True))
        answers.append([(out.token_ids, out.cached_tokens) for out in outs])
    assert answers[0] == answers[1]
    assert sum(cached for _, cached in answers[0]) > 0


def test_metadata_of_a_small_batch() -> None:
    page = np.arange(4)
    rows = np.zeros((3, 12), dtype=np.int64)
    rows[0] = np.concatenate([5 * 4 + page, 2 * 4 + page, 7 * 4 + page])
    rows[2] = np.concatenate([5 * 4 + page, 3 * 4 + page, 9 * 4 + page])
    meta = build_metadata(rows, [BatchEntry(2, 4, 7), BatchEntry(0, 8, 9)], 4, "cpu")
    assert meta.num_tokens == 4
    assert meta.positions.tolist() == [4, 5, 6, 8]
    assert meta.out_slots.tolist() == [12, 13, 14, 28]
    assert meta.q_indptr.tolist() == [0, 3, 4]
    assert meta.kv_lens.tolist() == [7, 9]
    assert meta.page_table.tolist() == [[5, 3, 0], [5, 2, 7]]
    assert meta.kv_indptr.tolist() == [0, 2, 5]
    assert meta.kv_indices.tolist() == [5, 3, 5, 2, 7]
    assert meta.last_page_len.tolist() == [3, 1]
    assert {a.dtype for a in (meta.q_indptr, meta.kv_lens, meta.page_table)} == {np.dtype("int32")}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one entry"),
        ([BatchEntry(3, 0, 1)], "outside the table of 3 rows"),
        ([BatchEntry(0, 2, 2)], "start < stop"),
        ([BatchEntry(0, -1, 2)], "start < stop"),
        ([BatchEntry(0, 0, 13)], "12 tokens per row"),
    ],
)
def test_metadata_refuses_impossible_batches(entries: list[BatchEntry], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_metadata(np.zeros((3, 12), dtype=np.int64), entries, 4, "cpu")


def test_layer_refuses_uneven_groups() -> None:
    with pytest.raises(ValueError, match="num_heads is 5"):
        RadixAttention(0, 5, 2, 8, 1.0)


def test_pool_writes_copies_poisons_and_counts() -> None:
    pool = KVPool(2, 10, 3, 4, dtype=torch.float32, device="cpu")
    assert all(not t.any() for t in (*pool.k, *pool.v))
    k, v = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    pool.write(1, torch.tensor([7, 3]), k, v)
    assert torch.equal(pool.k[1][3], k[1]) and torch.equal(pool.v[1][7], v[0])
    assert not pool.k[0].any()
    pool.copy(torch.tensor([7, 3]), torch.tensor([8, 9]))
    assert torch.equal(pool.v[1][9], v[1]) and torch.equal(pool.k[1][8], k[0])
    pool.poison(torch.tensor([7]))
    assert pool.k[0][7].isnan().all() and pool.v[1][7].isnan().all()
    assert not pool.k[1][8].isnan().any()
    assert pool.bytes_per_token == 2 * 2 * 3 * 4 * 4
    assert pool.nbytes == 10 * pool.bytes_per_token
    with pytest.raises(ValueError, match="slot 0"):
        pool.poison(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="num_slots is 0"):
        KVPool(1, 0, 1, 1, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="2 sources, 1 targets"):
        pool.copy(torch.tensor([1, 2]), torch.tensor([3]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", BACKENDS)
def test_gpu_equals_cpu(kind: type[AttentionBackend]) -> None:
    scene = Scene(MIXED, shared=16, page_size=4)
    expected = scene.run(kind())
    pool = KVPool(1, scene.pool.num_slots, 2, scene.pool.head_dim, dtype=torch.float32, device="cuda")
    pool.k[0].copy_(scene.pool.k[0])
    pool.v[0].copy_(scene.pool.v[0])
    meta = build_metadata(scene.rows, scene.entries, 4, "cuda")
    backend = kind()
    backend.plan(meta, pool)
    got = backend.run(0, scene.q.cuda(), pool, scene.scale).cpu()
    assert (got - expected).abs().max().item() < 1e-4
