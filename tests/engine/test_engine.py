"""The engine's crossings by name: sharing, hits, chunks, samples, aborts, pins, stops, streams."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CheckedEngine, tiny_config
from support import ColdReference, PlainCache, ScriptedModel, drive, listen

from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.model.llama import LlamaModel, random_weights
from minirad.model.load import load_tokenizer, resolve_model
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)
HINT = SamplingParams(max_new_tokens=0)
PAGES = pytest.mark.parametrize("page", [1, 4])


@pytest.fixture(scope="module")
def reference(tiny_model: LlamaModel) -> ColdReference:
    return ColdReference(tiny_model)


def by_id(outputs: list[GenerationOutput]) -> dict[str, GenerationOutput]:
    assert len({(out.request_id, out.index) for out in outputs}) == len(outputs)
    return {f"{out.request_id}.{out.index}" if out.index else out.request_id: out for out in outputs}


def assert_all_given_back(engine: CheckedEngine) -> None:
    assert engine.cache.protected_size == 0
    assert engine.allocator.available + engine.cache.evictable_size == engine.config.kv_tokens
    assert engine.rows.available == engine.config.max_running


# ---------------------------------------------------------------------- sharing and hits


@PAGES
def test_equal_cold_prompts_in_one_batch_do_not_hit_each_other(
    make_engine: MakeEngine, reference: ColdReference, page: int
) -> None:
    engine = make_engine(page_size=page)
    freed = listen(engine, ev.SlotsFreed)
    for _ in range(3):
        engine.add_request(PROMPT, FOUR)
    report = engine.step()
    assert report.hit_tokens == 0
    assert report.batch == ["R1", "R2", "R3"]
    assert [event.cause for event in freed] == ["duplicate", "duplicate"]
    rows = engine.rows.rows[:3, : len(PROMPT)]
    assert (rows == rows[0]).all(), "the rows of the later ones point at the tree's slots"
    for output in drive(engine):
        reference.require_equal(PROMPT, FOUR, output)
    assert_all_given_back(engine)


def test_equal_prompts_chunked_one_after_the_other_share(
    make_engine: MakeEngine, reference: ColdReference
) -> None:
    engine = make_engine(chunk_tokens=3)
    ids = [engine.add_request(PROMPT, FOUR) for _ in range(2)]
    outputs = by_id(drive(engine))
    for rid in ids:
        reference.require_equal(PROMPT, FOUR, outputs[rid])
    assert outputs["R2"].cached_tokens >= 6, "what the first one's chunks had put into the tree"


@PAGES
@pytest.mark.parametrize("length", [7, 8])
def test_a_full_hit_computes_the_last_token_again(
    make_engine: MakeEngine, reference: ColdReference, page: int, length: int
) -> None:
    engine, prompt = make_engine(page_size=page), PROMPT[:length]
    engine.generate(prompt, HINT)
    tree = length // page * page
    assert engine.peek(prompt) == tree
    admitted = listen(engine, ev.RequestAdmitted)
    (output,) = engine.generate(prompt, FOUR)
    reference.require_equal(prompt, FOUR, output)
    assert output.cached_tokens == (length - 1) // page * page
    assert admitted[0].matched == tree
    assert admitted[0].cached == output.cached_tokens


@PAGES
def test_a_prompt_that_ends_with_a_page_leaves_no_tail(make_engine: MakeEngine, page: int) -> None:
    engine = make_engine(page_size=page)
    freed = listen(engine, ev.SlotsFreed)
    engine.generate(PROMPT, HINT)
    assert freed == []
    assert engine.cache.total_size == len(PROMPT)


@pytest.mark.parametrize("plain", [False, True], ids=["RadixCache", "without lock_cost"])
@PAGES
def test_a_prompt_as_large_as_the_pool_runs_twice(
    make_engine: MakeEngine, reference: ColdReference, page: int, plain: bool
) -> None:
    engine = make_engine(PlainCache(page) if plain else None, page_size=page, kv_tokens=16)
    for prompt in ([5] * 16, [5] * 16, [5] * 16, [6] * 16, [5] * 16):
        (output,) = engine.generate(prompt, HINT)
        assert output.finish_reason == "length", output.error
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for _ in range(3):
        (output,) = engine.generate([5] * 10, params)
        reference.require_equal([5] * 10, params, output)


def test_the_reply_is_in_the_tree_but_for_its_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (output,) = engine.generate(PROMPT, FOUR)
    assert engine.peek(PROMPT + output.token_ids) == len(PROMPT) + 3
    assert len([n for n in engine.cache.walk() if n.parent is not None]) == 1, "one node per request and turn"


def test_a_prefix_hint_computes_the_prompt_and_says_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=3)
    sampled = listen(engine, ev.TokenSampled)
    (output,) = engine.generate(PROMPT, HINT)
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([], [], "length")
    assert sampled == []
    assert engine.peek(PROMPT) == len(PROMPT)
    assert [(t.token_id, t.text, t.finish_reason) for t in engine.stream([9, 9], HINT)] == [
        (None, "", "length")
    ]


def test_extra_keys_share_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for key in (None, "a", ("a",), 1):
        (output,) = engine.generate(PROMPT, FOUR, extra_key=key)
        assert output.cached_tokens == 0
        assert engine.peek(PROMPT, key) == len(PROMPT)
    engine.check()


def test_without_a_radix_cache_the_tree_stays_empty_and_outputs_are_equal(
    make_engine: MakeEngine, reference: ColdReference
) -> None:
    engine = make_engine(radix_cache=False, kv_tokens=32, chunk_tokens=5)
    params = SamplingParams(max_new_tokens=6, n=2, ignore_eos=True)
    for output in engine.generate([PROMPT, PROMPT, [7] * 9], params):
        prompt = PROMPT if output.request_id != "R3" else [7] * 9
        reference.require_equal(prompt, params, output)
        assert output.cached_tokens == 0
        assert engine.cache.total_size == 0
    assert engine.allocator.available == 32


@PAGES
def test_a_tree_of_somebody_elses_drives_the_engine(
    make_engine: MakeEngine, reference: ColdReference, page: int
) -> None:
    engine = make_engine(PlainCache(page), page_size=page, kv_tokens=32, chunk_tokens=5)
    params = SamplingParams(max_new_tokens=6, n=2, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT[:5], 20, 21], [7] * 9, [*PROMPT, 9]]
    for _ in range(2):
        for output in engine.generate(prompts, params):
            at = (int(output.request_id[1:]) - 1) % len(prompts)
            reference.require_equal(prompts[at], params, output)
    assert_all_given_back(engine)


def test_a_cache_of_another_page_size_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="pages of 2, the engine 4"):
        make_engine(PlainCache(2), page_size=4)


def test_a_cache_that_holds_somebody_elses_slots_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(PROMPT, HINT)
    with pytest.raises(ValueError, match="the cache holds 8 tokens already"):
        make_engine(engine.cache)


class Slotted:
    """A tree with no place for a mark: nothing can be noted on it, and it cannot be referred to weakly."""

    __slots__ = ("_inner",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._inner = PlainCache()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", [RadixCache, PlainCache, Slotted])
def test_two_engines_cannot_have_one_tree(
    make_engine: MakeEngine, reference: ColdReference, kind: Callable[[], Any]
) -> None:
    """Also while it is empty; and again when it is. An equal one is another one."""
    tree = kind()
    first, other = make_engine(tree), make_engine()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the cache .{kind.__name__}. is another engine's: each needs"):
            make_engine(tree)
        make_engine(kind())
        first.generate(PROMPT, HINT)
        first.flush_cache()
    with pytest.raises(ValueError, match="another engine's"):
        make_engine(other.cache)  # its own, which no caller gave
    reference.require_equal(PROMPT, FOUR, first.generate(PROMPT, FOUR)[0])


@pytest.mark.parametrize("kind", [RadixCache, PlainCache, Slotted])
def test_the_tree_of_an_engine_that_is_gone_may_have_another(
    make_engine: MakeEngine, reference: ColdReference, kind: Callable[[], Any]
) -> None:
    """If it is empty. An engine is gone when nobody has it, whether Python has noticed or not."""
    tree = kind()
    engine = make_engine(tree)
    ring = [engine]
    ring.append(ring)  # type: ignore[arg-type]  # freed by the collector only
    engine.generate(PROMPT, HINT)
    del engine, ring
    with pytest.raises(ValueError, match="the cache holds 8 tokens already"):
        make_engine(tree)
    tree.reset()
    reference.require_equal(PROMPT, FOUR, make_engine(tree).generate(PROMPT, FOUR)[0])


# ---------------------------------------------------------------------- eviction, retraction, chunks


def test_a_retracted_request_hits_what_it_left_in_the_tree(
    make_engine: MakeEngine, reference: ColdReference
) -> None:
    engine = make_engine(kv_tokens=24)
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    admitted, prompts = listen(engine, ev.RequestAdmitted), ([5, 6, 7, 8, 9], [15, 16, 17, 18])
    for prompt in prompts:
        engine.add_request(prompt, params)
    retracted: list[str] = []
    outputs = []
    while engine.has_work:
        report = engine.step()
        retracted += report.retracted
        outputs += report.finished
    assert retracted == ["R2"]
    (again,) = (event for event in admitted if event.attempt == 2)
    assert again.request == "R2"
    assert again.cached > 0
    for output, prompt in zip(sorted(outputs, key=lambda out: out.request_id), prompts, strict=True):
        reference.require_equal(prompt, params, output)
        assert output.cached_tokens == 0, "counted at the first admission only"


@PAGES
def test_slots_are_used_again_after_eviction(
    make_engine: MakeEngine, reference: ColdReference, page: int
) -> None:
    engine = make_engine(kv_tokens=16, page_size=page)
    evicted = 0
    for start in (5, 20, 35, 5, 20):
        prompt = list(range(start, start + 9))
        engine.add_request(prompt, FOUR)
        while engine.has_work:
            report = engine.step()
            evicted += report.evicted_tokens
            for output in report.finished:
                reference.require_equal(prompt, FOUR, output)
    assert evicted > 0


def test_a_match_that_is_evicted_before_admission_is_computed_again(
    make_engine: MakeEngine, reference: ColdReference
) -> None:
    engine = make_engine(kv_tokens=16, max_running=1, schedule_policy="fcfs")
    engine.generate(PROMPT, HINT)
    other = list(range(20, 32))
    engine.add_request(other, FOUR)
    late = engine.add_request(PROMPT, FOUR)
    assert engine.peek(PROMPT) == len(PROMPT)
    output = by_id(drive(engine))[late]
    assert output.cached_tokens < len(PROMPT) - 1
    reference.require_equal(PROMPT, FOUR, output)


@PAGES
@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_chunks_after_a_partial_hit(
    make_engine: MakeEngine, reference: ColdReference, page: int, chunk: int
) -> None:
    engine = make_engine(page_size=page, chunk_tokens=chunk)
    engine.generate(PROMPT, HINT)
    prompt = [*PROMPT[:6], 30, 31, 32, 33, 34, 35, 36]
    (output,) = engine.generate(prompt, FOUR)
    assert output.cached_tokens == 6 // page * page
    reference.require_equal(prompt, FOUR, output)


def test_a_chunked_prompt_enters_the_tree_chunk_by_chunk_as_one_node(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=3)
    engine.add_request(PROMPT, HINT)
    for expected in (3, 6, 8):
        engine.step()
        assert engine.peek(PROMPT) == expected
    assert len([n for n in engine.cache.walk() if n.parent is not None]) == 1


# ---------------------------------------------------------------------- aborts


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@PAGES
def test_abort_while_waiting_between_chunks_and_while_decoding(
    make_engine: MakeEngine, reference: ColdReference, page: int, steps: int
) -> None:
    engine = make_engine(page_size=page, chunk_tokens=4)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    other = engine.add_request([20, 21], params)
    doomed = engine.add_request(PROMPT, params)
    for _ in range(steps):
        engine.step()
    tree = engine.peek(PROMPT)
    assert engine.abort(doomed)
    engine.check()
    assert not engine.abort(doomed)
    assert engine.peek(PROMPT) == tree, "an abort inserts nothing"
    report = engine.step()
    assert [(out.request_id, out.finish_reason) for out in report.finished] == [(doomed, "abort")]
    (output,) = drive(engine)
    assert output.request_id == other
    reference.require_equal([20, 21], params, output)
    assert_all_given_back(engine)


def test_the_last_abort_is_still_reported(make_engine: MakeEngine) -> None:
    engine = make_engine()
    rid = engine.add_request(PROMPT, FOUR)
    engine.step()
    engine.abort(rid)
    assert engine.has_work, "its output has not been handed out"
    assert engine.scheduler.has_work is False
    (output,) = drive(engine)
    assert output.finish_reason == "abort"
    engine.flush_cache()
    assert engine.allocator.available == engine.config.kv_tokens


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_of_several_samples_before_and_after_branching(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(chunk_tokens=4, page_size=4)
    rid = engine.add_request([*PROMPT, 3], SamplingParams(max_new_tokens=8, n=3, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    assert engine.abort(rid)
    engine.check()
    finished = engine.step().finished
    assert sorted(out.index for out in finished) == [0, 1, 2]
    assert {out.finish_reason for out in finished} == {"abort"}
    assert not engine.has_work
    assert_all_given_back(engine)


# ---------------------------------------------------------------------- several samples


@pytest.mark.parametrize("length", [6, 8, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@PAGES
def test_samples_share_the_prompt_and_copy_a_partial_page(
    make_engine: MakeEngine, reference: ColdReference, page: int, temperature: float, length: int
) -> None:
    engine, prompt = make_engine(page_size=page), ([*PROMPT, 13])[:length]
    forked = listen(engine, ev.RequestForked)
    params = SamplingParams(max_new_tokens=6, temperature=temperature, n=3, seed=5, ignore_eos=True)
    outputs = engine.generate(prompt, params)
    assert [out.index for out in outputs] == [0, 1, 2]
    assert [event.copied for event in forked] == [length % page] * 2
    for output in outputs:
        reference.require_equal(prompt, params, output)
    different = len({tuple(out.token_ids) for out in outputs})
    assert different == 1 if temperature == 0 else different > 1
    assert {out.cached_tokens for out in outputs} == {0}
    assert_all_given_back(engine)


def test_a_seed_gives_the_same_samples_alone_in_a_crowd_and_after_retraction(
    make_engine: MakeEngine,
) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, n=2, seed=3, ignore_eos=True)
    alone = [out.token_ids for out in make_engine().generate(PROMPT, params)]
    assert alone[0] != alone[1]
    for kv_tokens in (64, 28):
        engine = make_engine(kv_tokens=kv_tokens, chunk_tokens=5)
        for start in (20, 30):
            other = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
            engine.add_request(range(start, start + 6), other, priority=1)
        rid = engine.add_request(PROMPT, params)
        retracted, outputs = 0, []
        while engine.has_work:
            report = engine.step()
            retracted += len(report.retracted)
            outputs += report.finished
        mine = sorted((out for out in outputs if out.request_id == rid), key=lambda out: out.index)
        assert [out.token_ids for out in mine] == alone
        assert (retracted > 0) == (kv_tokens == 28)


def test_requests_without_a_seed_draw_from_the_engines(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    first, second = ([o.token_ids for o in make_engine().generate([PROMPT] * 2, params)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    assert [o.token_ids for o in make_engine(seed=1).generate([PROMPT] * 2, params)] != first


@PAGES
def test_samples_wait_when_there_is_no_room_to_branch(
    make_engine: MakeEngine, reference: ColdReference, page: int
) -> None:
    engine = make_engine(kv_tokens=16, page_size=page)
    forked = listen(engine, ev.RequestForked)
    prompt, params = [*PROMPT, 13, 14, 15], SamplingParams(max_new_tokens=5, n=4, ignore_eos=True)
    outputs = engine.generate(prompt, params)
    if page > 1:
        assert any(event.row < 0 for event in forked), "this pool has no page for each copy"
    assert [out.index for out in outputs] == [0, 1, 2, 3]
    for output in outputs:
        reference.require_equal(prompt, params, output)
    assert_all_given_back(engine)


def test_rows_are_kept_for_the_samples_to_come(make_engine: MakeEngine) -> None:
    for chunk in (512, 5):
        engine = make_engine(max_running=4, schedule_policy="fcfs", chunk_tokens=chunk)
        forked = listen(engine, ev.RequestForked)
        engine.add_request(PROMPT, SamplingParams(max_new_tokens=3, n=3))
        for start in (20, 30):
            engine.add_request([start, start + 1], FOUR)
        drive(engine)
        assert len(forked) == 2
        assert all(event.row >= 0 for event in forked), "no later request may take a sample's row"


def test_each_of_several_samples_of_a_prefix_hint_is_an_output(make_engine: MakeEngine) -> None:
    for kv_tokens in (64, 12):
        engine = make_engine(kv_tokens=kv_tokens, page_size=4)
        outputs = engine.generate([*PROMPT, 13], SamplingParams(max_new_tokens=0, n=3))
        assert [(out.index, out.token_ids, out.finish_reason) for out in outputs] == [
            (index, [], "length") for index in range(3)
        ]
        assert_all_given_back(engine)


# ---------------------------------------------------------------------- pins


def test_a_pinned_prefix_survives_eviction_and_refuses_a_flush(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=24)
    engine.generate([*PROMPT, 20, 21], HINT)
    pin = engine.pin(PROMPT)
    assert pin.length == len(PROMPT)
    engine.check()
    for start in (20, 35):
        engine.generate(range(start, start + 12), FOUR)
    assert engine.peek([*PROMPT, 20, 21]) == len(PROMPT)
    with pytest.raises(ValueError, match=r"pins \[1\]"):
        engine.flush_cache()
    engine.unpin(pin)
    with pytest.raises(ValueError, match="pin 1 is not held"):
        engine.unpin(pin)
    engine.flush_cache()
    assert engine.peek(PROMPT) == 0
    assert engine.allocator.available == 24


def test_a_pin_counts_no_hit(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate(PROMPT, HINT)
    engine.pin(PROMPT)
    assert [node["hits"] for node in engine.snapshot()["tree"]["nodes"]] == [0]


@pytest.mark.parametrize("when", ["waiting", "chunking", "decoding"])
def test_what_pins_leave_no_room_for_ends_with_an_error_and_others_go_on(
    make_engine: MakeEngine, reference: ColdReference, when: str
) -> None:
    engine = make_engine(kv_tokens=24, chunk_tokens=4, schedule_policy="fcfs")
    long, new = list(range(30, 42)), 8
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    pins = []
    if when == "waiting":
        engine.generate(PROMPT + [20] * 6, HINT)
        pins.append(engine.pin(PROMPT + [20] * 6))
    doomed = engine.add_request(long, params)
    if when != "waiting":
        for _ in range(1 if when == "chunking" else 4):
            engine.step()
        engine.add_request(PROMPT, HINT, priority=1)
        while engine.peek(PROMPT) < len(PROMPT):
            engine.step()
        pins.append(engine.pin(PROMPT))
    outputs = by_id(drive(engine))
    assert outputs[doomed].finish_reason == "error"
    assert "pinned" in outputs[doomed].error
    (output,) = engine.generate([5, 6], FOUR)
    reference.require_equal([5, 6], FOUR, output)
    engine.unpin(pins[0])
    (output,) = engine.generate(long, params)
    reference.require_equal(long, params, output)
    assert_all_given_back(engine)


def test_generate_returns_errors_and_never_hangs(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=16)
    engine.generate(PROMPT, HINT)
    pin = engine.pin(PROMPT)
    many = SamplingParams(max_new_tokens=2, n=3)
    outputs = engine.generate([[20] * 12, [21] * 2, [22] * 10], many)
    reasons = [(out.request_id, out.index, out.finish_reason) for out in outputs]
    each = [0, 1, 2]
    assert [r for r in reasons if r[0] != "R3"] == [(rid, at, "error") for rid in ("R2", "R4") for at in each]
    assert [(index, reason) for rid, index, reason in reasons if rid == "R3"] == [
        (index, "length") for index in range(3)
    ]
    ends = list(engine.stream([20] * 12, many))
    assert [(end.index, end.token_id, end.finish_reason) for end in ends] == [
        (at, None, "error") for at in each
    ]
    assert all("pinned" in end.error for end in ends)
    engine.unpin(pin)
    assert len(engine.generate([20] * 12, many)) == 3


# ---------------------------------------------------------------------- prompt log-probabilities, masks


def logprobs_by_hand(model: LlamaModel, prompt: list[int]) -> list[float]:
    """One cold forward over the whole prompt, read off its logits."""
    engine = CheckedEngine(EngineConfig(kv_tokens=64, radix_cache=False), model=model)
    (output,) = engine.generate(prompt, SamplingParams(max_new_tokens=0, logprob_start=0))
    assert output.prompt_logprobs[0] is None
    return [float(value) for value in output.prompt_logprobs[1:] if value is not None]


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chunk", [3, 512])
@PAGES
def test_prompt_logprobs_chunked_cached_and_with_samples(
    make_engine: MakeEngine, tiny_model: LlamaModel, page: int, chunk: int, n: int, new: int
) -> None:
    engine = make_engine(page_size=page, chunk_tokens=chunk)
    wanted = [None, *logprobs_by_hand(tiny_model, PROMPT)]
    for start in (0, 1, 5, 7):
        params = SamplingParams(max_new_tokens=new, n=n, logprob_start=start)
        outputs = engine.generate(PROMPT, params)
        assert len(outputs) == n
        for output in outputs:
            assert len(output.prompt_logprobs) == len(PROMPT) - start
            for ours, theirs in zip(output.prompt_logprobs, wanted[start:], strict=True):
                assert ours is theirs is None or abs(ours - theirs) < 1e-5
            assert output.cached_tokens <= max(start - 1, 0)
    (output,) = engine.generate([5], SamplingParams(max_new_tokens=1, logprob_start=0))
    assert output.prompt_logprobs == [None]


def test_a_request_retracted_between_chunks_keeps_its_prompt_logprobs_whole(
    make_engine: MakeEngine, tiny_model: LlamaModel
) -> None:
    engine = make_engine(kv_tokens=24, chunk_tokens=3)
    params = SamplingParams(max_new_tokens=2, logprob_start=0)
    rid = engine.add_request(PROMPT, params)
    for _ in range(2):
        engine.step()
    engine.scheduler.retract(engine.scheduler.chunking)
    engine.check()
    engine.generate(range(20, 38), HINT)  # evicts part of what it left
    output = by_id(drive(engine)).get(rid)
    assert output is not None
    found = output.prompt_logprobs
    assert found[0] is None
    assert found[1:] == pytest.approx(logprobs_by_hand(tiny_model, PROMPT), abs=1e-5)


def allow(*tokens: int) -> np.ndarray:
    mask = np.zeros(61, dtype=bool)
    mask[list(tokens)] = True
    return mask


def test_a_token_mask_sees_the_reply_so_far_and_decides_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seen: list[list[int]] = []

    def mask(output: list[int]) -> Any:
        seen.append(list(output))
        output.append(-1)  # a copy: nothing of the engine's
        return torch.from_numpy(allow(30 + len(seen))) if len(seen) < 4 else None

    free = engine.add_request(PROMPT, FOUR)
    rid = engine.add_request([20, 21], FOUR, token_mask=mask)
    outputs = by_id(drive(engine))
    assert outputs[rid].token_ids[:3] == [31, 32, 33]
    assert seen == [outputs[rid].token_ids[:length] for length in range(4)]
    assert outputs[free].token_ids == make_engine().generate(PROMPT, FOUR)[0].token_ids


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda output: allow(), "allows no token"),
        (lambda output: np.ones(60, dtype=bool), r"bool \[61\]"),
        (lambda output: np.ones(61), r"bool \[61\]"),
        (lambda output: 1 / 0, "ZeroDivisionError"),
        (lambda output: None if len(output) < 2 else allow(), "allows no token"),
    ],
)
def test_a_mask_that_fails_ends_its_own_request_only(
    make_engine: MakeEngine, reference: ColdReference, wrong: Callable[[list[int]], Any], what: str
) -> None:
    engine = make_engine()
    good = engine.add_request(PROMPT, FOUR)
    params = SamplingParams(max_new_tokens=4, n=2, ignore_eos=True)
    bad = engine.add_request([20, 21], params, token_mask=wrong)
    outputs = drive(engine)
    mine = [out for out in outputs if out.request_id == bad]
    assert [out.finish_reason for out in mine] == ["error", "error"]
    assert all(re.search(what, out.error) for out in mine)
    reference.require_equal(PROMPT, FOUR, by_id(outputs)[good])
    assert_all_given_back(engine)


@pytest.mark.parametrize("how", [{}, {"speculative": "ngram"}, {"jump_forward": True}], ids=str)
@pytest.mark.parametrize("wrapped", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_mask_may_use_its_memory_again(
    make_engine: MakeEngine, wrapped: Callable[[np.ndarray], Any], how: dict[str, Any]
) -> None:
    """All masks of a batch are asked before any of its tokens is drawn."""
    memory = np.zeros(61, dtype=bool)

    def mask(output: list[int]) -> Any:
        memory[:] = allow(30 + len(output))
        return wrapped(memory)

    engine = make_engine(**how)
    params = SamplingParams(max_new_tokens=4, n=2, ignore_eos=True)
    engine.add_request(PROMPT, params, token_mask=mask)
    engine.step()
    engine.step()
    engine.add_request([8, 9, 10], FOUR, token_mask=mask)
    outputs = drive(engine)
    assert [out.token_ids for out in outputs] == [[30, 31, 32, 33]] * 3


# ---------------------------------------------------------------------- text: stops and streams

BODY = "One, two! Ünïcödé 🙂🚀 and 漢字, then more. "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model(None))


@pytest.fixture
def speaker(tokenizer: Any) -> Callable[..., CheckedEngine]:
    """An engine whose every reply to the prompt [1, 2, 3] is a given text (or given ids)."""

    def make(reply: str | list[int]) -> CheckedEngine:
        ids = tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else reply
        config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=256)
        weights = random_weights(config, 0, dtype=torch.float32, device="cpu")
        model = ScriptedModel(config, weights, dict(enumerate(ids, start=3)))
        engine = CheckedEngine(EngineConfig(kv_tokens=512), model=model, tokenizer=tokenizer)
        engine.reply_ids = ids
        return engine

    return make


def say(engine: CheckedEngine, **how: Any) -> tuple[GenerationOutput, str]:
    """The reply by `generate`, and the same one's streamed pieces joined."""
    params = SamplingParams(**{"max_new_tokens": len(engine.reply_ids), "ignore_eos": True, **how})
    (output,) = engine.generate([1, 2, 3], params)
    pieces = list(engine.stream([1, 2, 3], params))
    assert [piece.token_id for piece in pieces] == output.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == output.finish_reason
    return output, "".join(piece.text for piece in pieces)


def test_streamed_pieces_join_to_the_outputs_text(speaker: Callable[..., CheckedEngine]) -> None:
    engine = speaker(BODY * 2)
    output, streamed = say(engine)
    assert output.text == streamed == BODY * 2
    assert output.finish_reason == "length"
    params = SamplingParams(max_new_tokens=len(engine.reply_ids), ignore_eos=True)
    assert not any("\ufffd" in piece.text for piece in engine.stream([1, 2, 3], params))


def test_a_reply_that_ends_inside_a_character_streams_as_it_reads(
    speaker: Callable[..., CheckedEngine], tokenizer: Any
) -> None:
    ids = tokenizer.encode("Hi 🚀", add_special_tokens=False)
    for end in range(1, len(ids) + 1):
        output, streamed = say(speaker(ids[:end]))
        assert streamed == output.text == tokenizer.decode(ids[:end])


def all_stops(text: str) -> list[str]:
    """Every substring of one to five characters, each once."""
    return sorted({text[i : i + n] for n in range(1, 6) for i in range(len(text) - n + 1)})


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("stop", "stop_ids", "text"),
    [("ab", ("b",), "x"), ("b", ("b",), "xa"), ("xab", ("b",), ""), ("c", ("b",), "xa"), ((), ("b",), "xa"),
     ("b<|im_end|>", (), "xa"), ("<|im_end|>", (), "xab"), ("zz", (), "xab")],
)  # fmt: skip
def test_a_stop_text_may_hold_the_token_that_ends_the_reply(
    stop: Any, stop_ids: tuple[str, ...], text: str, ignore_eos: bool
) -> None:
    engine = CheckedEngine(EngineConfig(kv_tokens=64, device="cpu"))

    def encode(letters: str) -> list[int]:
        return engine.tokenizer.encode(letters, add_special_tokens=False)

    ids = [*encode("x"), *encode("a"), *encode("b"), *encode("<|im_end|>")]
    assert len(ids) == 4

    def mask(output: list[int]) -> Any:
        return torch.arange(engine.model.config.vocab_size) == ids[min(len(output), 3)]

    params = SamplingParams(
        max_new_tokens=4, stop=stop, ignore_eos=ignore_eos,
        stop_token_ids=tuple(token for letter in stop_ids for token in encode(letter)),
    )  # fmt: skip
    engine.add_request([5], params, token_mask=mask)
    (output,) = drive(engine)
    assert output.text == text


def test_a_stop_text_anywhere_is_cut_also_across_tokens_and_inside_characters(
    speaker: Callable[..., CheckedEngine],
) -> None:
    engine = speaker(BODY)
    for stop in all_stops(BODY)[::9]:
        output, streamed = say(engine, stop=stop)
        assert output.finish_reason == "stop" or BODY.endswith(stop)
        assert output.text == streamed == BODY[: BODY.index(stop)], repr(stop)


def test_the_first_of_several_stop_texts_counts(speaker: Callable[..., CheckedEngine]) -> None:
    output, streamed = say(speaker(BODY), stop=("then", "🚀", "two! Ü"))
    assert output.text == streamed == "One, "
    assert output.finish_reason == "stop"


def test_what_only_begins_a_stop_text_is_said_after_all(speaker: Callable[..., CheckedEngine]) -> None:
    output, streamed = say(speaker("aab aab aab aac"), stop=("aab aab aac", "aac!"))
    assert output.text == streamed == "aab aab aab aac"[: "aab aab aab aac".index("aab aab aac")]


def test_a_stop_text_is_found_across_special_tokens(
    speaker: Callable[..., CheckedEngine], tokenizer: Any
) -> None:
    a, b = (tokenizer.encode(part, add_special_tokens=False) for part in ("ab", "cd"))
    special = tokenizer.all_special_ids[0]
    output, streamed = say(speaker([*a, *[special] * 40, *b, *a]), stop="bc")
    assert (output.text, streamed, output.finish_reason) == ("a", "a", "stop")


def test_the_end_token_stops_unless_ignored(make_engine: MakeEngine, tiny_model: LlamaModel) -> None:
    model = ScriptedModel(
        tiny_model.config, random_weights(tiny_model.config, 0, dtype=torch.float32, device="cpu"), {5: 2}
    )
    for ignore, length, reason in ((False, 3, "stop"), (True, 6, "length")):
        engine = CheckedEngine(EngineConfig(kv_tokens=32), model=model)
        (output,) = engine.generate([7, 8, 9], SamplingParams(max_new_tokens=6, ignore_eos=ignore))
        assert output.token_ids[2] == 2
        assert (len(output.token_ids), output.finish_reason) == (length, reason)


def test_leaving_a_stream_aborts_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    other = engine.add_request([20, 21], SamplingParams(max_new_tokens=6, ignore_eos=True))
    aborted = listen(engine, ev.RequestAborted)
    for piece in engine.stream(PROMPT, FOUR):
        assert piece.index == 0
        break
    assert [event.request for event in aborted] == ["R2"]
    assert [out.request_id for out in drive(engine)] == [other]
    assert not engine.bus.wants(ev.TokenSampled)
    assert_all_given_back(engine)


def test_a_stream_that_is_never_begun_queues_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.stream(PROMPT, FOUR)
    assert not engine.has_work
    with pytest.raises(ValueError, match="empty"):
        engine.stream([], FOUR)


@pytest.mark.parametrize("who", ["generate", "step", "stream"])
def test_a_stream_survives_somebody_else_driving(
    make_engine: MakeEngine, reference: ColdReference, who: str
) -> None:
    engine = make_engine()
    params = SamplingParams(max_new_tokens=6, n=2, ignore_eos=True)
    stream = engine.stream(PROMPT, params)
    pieces = [next(stream)]
    if who == "generate":
        engine.generate([20, 21], SamplingParams(max_new_tokens=12))
    elif who == "stream":
        list(engine.stream([20, 21], SamplingParams(max_new_tokens=12)))
    else:
        drive(engine)
    pieces += stream
    for index in range(2):
        mine = [piece for piece in pieces if piece.index == index]
        assert [piece.token_id for piece in mine] == reference(PROMPT, params, index).token_ids
        assert [piece.finish_reason for piece in mine] == [None] * 5 + ["length"]
    drive(engine)
    assert_all_given_back(engine)


def test_a_stream_ends_when_its_request_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True))
    next(stream)
    engine.abort("R1")
    (end,) = stream
    assert (end.index, end.token_id, end.finish_reason) == (0, None, "abort")


@pytest.mark.parametrize("steps", [1, 3, 5])  # in the prompt's computation, at its end, and after it
def test_a_stream_of_several_samples_that_is_aborted_ends_each(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    engine = make_engine(chunk_tokens=4)
    made, advance = [0], engine.advance

    def advance_and_abort() -> None:
        advance()
        made[0] += 1
        if made[0] == steps:
            engine.abort("R1")

    monkeypatch.setattr(engine, "advance", advance_and_abort)
    pieces = list(engine.stream([*PROMPT, 3], SamplingParams(max_new_tokens=20, n=3, ignore_eos=True)))
    ends = [(piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason]
    assert sorted(ends) == [(index, "abort") for index in range(3)]
    assert all(piece.token_id is not None for piece in pieces if not piece.finish_reason)
    assert not engine.has_work
    assert_all_given_back(engine)


# ---------------------------------------------------------------------- generate and step


def test_generate_keeps_the_order_of_prompts_and_leaves_others_outputs_to_them(
    make_engine: MakeEngine, reference: ColdReference
) -> None:
    engine = make_engine(schedule_policy="lpm", max_running=2)
    early = engine.add_request([30, 31], SamplingParams(max_new_tokens=1, ignore_eos=True))
    prompts = [PROMPT, [20] * 3, PROMPT[:4], [21]]
    outputs = engine.generate(
        prompts, [SamplingParams(max_new_tokens=k, ignore_eos=True) for k in (1, 5, 2, 3)]
    )
    assert [len(out.token_ids) for out in outputs] == [1, 5, 2, 3]
    assert engine.has_work
    (other,) = drive(engine)
    assert other.request_id == early


def test_ids_may_be_any_integer_sequence(make_engine: MakeEngine) -> None:
    wanted = make_engine().generate(PROMPT, FOUR)[0].token_ids
    for prompt in (
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, dtype=np.int32),
        torch.tensor(PROMPT),
        range(5, 13),
    ):
        assert [out.token_ids for out in make_engine().generate(prompt, FOUR)] == [wanted]
        assert [out.token_ids for out in make_engine().generate([prompt, prompt], FOUR)] == [wanted] * 2
    assert make_engine().generate([], FOUR) == []


def test_reports_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=5)
    engine.generate(PROMPT, HINT)
    for prompt in (PROMPT, [20] * 4, [*PROMPT, 3, 4]):
        engine.add_request(prompt, FOUR)
    reports = []
    while engine.has_work:
        reports.append(engine.step())
    assert [report.index for report in reports] == list(range(reports[0].index, reports[-1].index + 1))
    assert sum(report.prompt_tokens for report in reports) == 8 + 4 + 10
    outputs = [out for report in reports for out in report.finished]
    assert sum(report.hit_tokens for report in reports) == sum(out.cached_tokens for out in outputs) == 7 + 8
    assert {report.kind for report in reports} == {"prefill", "decode"}
    assert engine.step().kind == "idle"


def test_with_nobody_listening_no_event_is_built(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(kv_tokens=24, chunk_tokens=3)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("an event was built although nobody listens")

    for kind in ev.EVENT_TYPES:
        monkeypatch.setattr(kind, "__init__", refuse)
    params = SamplingParams(max_new_tokens=6, n=2)
    rid = engine.add_request(PROMPT, params)
    engine.generate([PROMPT, [20] * 10, [21] * 12], params)
    engine.abort(rid)
    engine.unpin(engine.pin(PROMPT))
    engine.flush_cache()
