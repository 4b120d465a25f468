"""Cascade attention: what is shared is found, read once, and answered as ordinary attention answers."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_flashinfer_calls import Kernels, attend
from test_runner import close, engine_of, prompts, with_marks

from minirad.config import EngineConfig, SamplingParams
from minirad.fast.cascade import LEAST_REQUESTS, LEAST_SAVED, SharedPages, worth_it
from minirad.fast.flashinfer import FlashInferAttention
from minirad.fast.graphs import DecodeGraphs, _Numbers
from minirad.kv import KVPool
from minirad.schedule.req_to_token import ReqToTokenPool

# ---------------------------------------------------------------------- what is shared


def agreed(table: np.ndarray, rows: list[int], lengths: list[int], page: int) -> int:
    """By the book: first pages that are equal in all rows, the last token's page left out."""
    limit, count = (min(lengths) - 1) // page, 0
    while count < limit and len(np.unique(table[rows, count * page])) == 1:
        count += 1
    return count


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_shared_pages_are_found_as_requests_come_and_go(page: int, seed: int) -> None:
    rng = random.Random(seed)
    rows = ReqToTokenPool(40, 4000)
    texts = [np.arange(4000) + 5000 * n for n in range(2)]
    shared, lengths, live = SharedPages(rows, page), {}, []
    for _ in range(120):
        for row in rng.sample(live, min(len(live), rng.randrange(3))):
            live.remove(row)
        while len(live) < 40 and rng.random() < 0.7:
            row = rng.choice([each for each in range(40) if each not in live])
            cut = rng.choice([0, 8, 2000, 2000, 3000]) // page * page
            text = texts[0] if rng.random() < 0.98 else texts[1]
            rows.rows[row] = np.concatenate([text[:cut], 20_000 + 4000 * row + np.arange(4000 - cut)])
            lengths[row] = cut + rng.randrange(1, 50)
            shared.forget([row])
            live.append(row)
        rng.shuffle(live)
        if live:
            found = shared.count(live, [lengths[row] for row in live])
            wanted = agreed(rows.rows, live, [lengths[row] for row in live], page)
            assert found == wanted or (found < wanted and worth_it(len(live), found * page))
        for row in live:
            lengths[row] += 1


def test_it_is_worth_it_for_many_who_share_much() -> None:
    assert worth_it(256, 256) and worth_it(16, 4000)
    assert not worth_it(256, 100) and not worth_it(16, 2000) and not worth_it(1, 1 << 20)
    assert worth_it(LEAST_REQUESTS, LEAST_SAVED) and not worth_it(LEAST_REQUESTS - 1, LEAST_SAVED)


def test_the_switch_is_checked() -> None:
    with pytest.raises(ValueError, match="cascade must be True, False or None, got 1"):
        EngineConfig(cascade=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what is computed, with a stand-in


def list_pages(table, rows, indptr, slots, out, page, longest, skip, chosen, token_ids) -> None:
    """What kernels.fill_pages does."""
    if chosen is not None:
        token_ids[: len(chosen)] = chosen
    for entry, row in enumerate(rows.tolist()):
        begin, end = indptr[entry : entry + 2].tolist()
        table[row, skip + end - begin - 1] = slots[entry] // page
        out[begin:end] = table[row, skip : skip + end - begin]


class OwnPages:
    """What ShortDecode does, in torch: each entry's listed pages, from what was answered before."""

    def __init__(
        self, heads, kv_heads, head_dim, scale, indptr, indices, last_page_len, page_size, tokens
    ) -> None:
        self.lists, self.page, self.tokens = (indptr, indices, last_page_len), page_size, tokens

    def listed(self, entry: int) -> torch.Tensor:
        indptr, indices, last = (each.numpy() for each in self.lists)
        pages = indices[indptr[entry] : indptr[entry + 1]]
        slots = (pages[:, None] * self.page + np.arange(self.page)).ravel()
        return torch.from_numpy(slots[: (len(pages) - 1) * self.page + last[entry]])

    def run(self, layer_id, q, pool, scale, shared=None) -> torch.Tensor:
        found = []
        for entry in range(len(q)):
            slots = self.listed(entry) if shared is None else torch.cat((shared, self.listed(entry)))
            one = q[entry : entry + 1]
            found.append(attend(one, pool.k[0][slots], pool.v[0][slots], scale, causal=False)[0])
        return torch.cat(found)


class WithShared(OwnPages):
    """What CascadeDecode does: the first row's first tokens, then each entry's listed ones."""

    def __init__(self, own, table, rows, shared) -> None:
        self.own, self.table, self.rows, self.shared = own, table, rows, shared

    def run(self, layer_id, q, pool, scale) -> torch.Tensor:
        page = self.own.page
        pages = self.table[int(self.rows[0]), : int(self.shared) // page]
        return self.own.run(
            layer_id, q, pool, scale, (pages[:, None] * page + torch.arange(page, dtype=torch.int32)).ravel()
        )


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cascade", [True, False])
def test_a_captured_steps_lists_give_everybodys_own_answer(
    monkeypatch: pytest.MonkeyPatch, page: int, cascade: bool
) -> None:
    rng, heads, kv_heads, dim, count, size = np.random.default_rng(page), 4, 2, 8, 11, 16
    pool = KVPool(1, 2000 * page, kv_heads, dim, dtype=torch.float32, device="cpu")
    pool.k[0].normal_(generator=torch.Generator().manual_seed(1))
    pool.v[0].normal_(generator=torch.Generator().manual_seed(2))
    rows = ReqToTokenPool(size, 200)
    pages = 1 + rng.permutation(1999)
    first, requests = 13 * page, []
    for row in range(count):
        own = pages[100 + 60 * row : 160 + 60 * row]
        slots = (np.concatenate([pages[:13], own])[:, None] * page + np.arange(page)).ravel()
        rows.rows[row] = slots[:200] if len(slots) >= 200 else np.resize(slots, 200)
        length = first + int(rng.integers(1, 40))
        requests.append(SimpleNamespace(row=row, kv_len=length, last_token=7 + row))
    attention = FlashInferAttention(heads, kv_heads, dim, device="cpu", kernels=Kernels())
    short = SimpleNamespace(ShortDecode=OwnPages, cut_until=lambda requests, longest: (requests, longest))
    monkeypatch.setitem(sys.modules, "minirad.fast.short_decode", short)
    monkeypatch.setitem(sys.modules, "minirad.fast.cascade_decode", SimpleNamespace(CascadeDecode=WithShared))
    model = SimpleNamespace(kernels=SimpleNamespace(fill_pages=list_pages))
    graphs = DecodeGraphs(model, pool, attention, rows, page, cascade=cascade)
    numbers = _Numbers.of(size, torch.device("cpu"))
    skip = 13 if cascade else 0
    longest = max(request.kv_len for request in requests) - skip * page
    assert graphs._kind(requests, size, skip) == (cascade, (size, longest))
    made = graphs._new_attention(numbers, cascade, 128)
    assert (made.own if cascade else made).tokens == 128
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        graphs._take_over(requests)
        assert graphs._pages_to_share(requests) == skip
        chosen = torch.arange(len(requests), dtype=torch.float64) if step % 2 else None
        graphs._prepare(numbers, requests, skip, chosen)
        tokens = [r.last_token for r in requests] if chosen is None else list(range(len(requests)))
        assert numbers.token_ids.tolist() == tokens + [0] * (size - len(requests))
        q = torch.randn(size, heads, dim, generator=generator)
        found = made.run(0, q, pool, dim**-0.5)
        for at, request in enumerate(requests):
            slots = torch.from_numpy(rows.rows[request.row, : request.kv_len])
            wanted, _ = attend(q[at : at + 1], pool.k[0][slots], pool.v[0][slots], dim**-0.5, causal=False)
            assert torch.allclose(found[at], wanted[0], atol=1e-5), (step, at)
            request.kv_len += 1
        if step == 3:
            requests.pop(4)  # the lists move up


# ---------------------------------------------------------------------- on a GPU


@with_marks
@pytest.mark.parametrize("page", [1, 16])
def test_a_cascade_says_what_ordinary_decoding_says(page: int) -> None:
    from minirad.bench.dummy import dummy_model

    model = dummy_model("smollm2-135m", torch.bfloat16, "cuda")
    many = [list(range(1000, 1250)) + prompt for prompt in prompts(14)]
    params = [SamplingParams(max_new_tokens=5 + n, ignore_eos=True) for n in range(14)]
    found = {}
    for cascade in (True, False):
        engine = engine_of(model, page, cascade=cascade, max_running=16, kv_tokens=8192)
        found[cascade] = engine.generate(many, params)
        engine.check()
        assert engine.runner.graphs is not None
        engine.runner.graphs.check()
        assert any(shared for _, shared, _ in engine.runner.graphs._captured) == cascade
    assert all(map(close, found[True], found[False]))
