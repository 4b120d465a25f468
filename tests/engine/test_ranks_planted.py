"""A difference between ranks that nobody told of is found in the step in which it is there, and named."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import rank_moves
import rank_plants
import torch
from conftest import tiny_config
from rank_moves import Moves, held
from rank_plants import PLANTS

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import InvariantError
from minirad.model.llama import LlamaModel, random_weights
from minirad.ranks import RanksDiffer, digest
from minirad.ranks.group import Group

TENANT = "tenant"


@pytest.fixture(scope="module")
def pair() -> Iterator[Moves]:
    with Moves(2, timeout=20, checks=False) as pair:
        yield pair


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    config = tiny_config()
    return LlamaModel(config, random_weights(config, 3, dtype=torch.float32, device="cpu"))


def busy(pair: Moves, model: LlamaModel, **options: Any) -> Engine:
    """An engine with all that can differ: nodes of two namespaces with copies on the host, a pin, requests
    that decode, one between chunks, and two that wait."""
    pair.all_here()
    config = {
        "kv_tokens": 96, "host_kv_tokens": 96, "max_running": 4, "chunk_tokens": 6, "schedule_policy": "lpm",
        "mixed": True, "load_back_threshold": 1, **options,
    }  # fmt: skip
    engine = Engine(EngineConfig(tp=pair.tp, **config), model=model)
    some, more = (
        SamplingParams(max_new_tokens=4, ignore_eos=True),
        SamplingParams(max_new_tokens=20, ignore_eos=True),
    )
    engine.generate([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11, 12], [20, 21, 22]], some)
    engine.generate([[30, 31, 32, 33], [30, 31, 40]], some, extra_key=TENANT)
    engine.pin([5, 6, 7, 8])
    for prompt in ([5, 6, 7, 8, 9, 10], [20, 21, 50]):
        engine.add_request(prompt, more)
    engine.step()
    engine.step()
    engine.add_request([7] * 20, some)
    engine.step()
    engine.add_request([44, 45, 46], some)
    engine.add_request([54, 55], some, priority=-1)
    engine.step()
    assert len(engine.scheduler.running) == 2 and engine.scheduler.chunking is not None
    assert len(engine.scheduler.waiting) == 2 and engine._pins
    return engine


def require_named(error: RanksDiffer, step: int, rank: int, words: tuple[str, ...]) -> None:
    said = str(error)
    assert said.startswith(f"step {step}: "), said
    assert f"rank {rank} " in said and "\n" not in said
    for word in words:
        assert re.search(rf"(?<![\w]){re.escape(word)}(?!\w)", said), (word, said)


# One of each kind in the default run: tests/unit/test_ranks_digest.py changes the others in one process. And
# what the engine itself looks at before its step is over: between two steps it can do harm of its own.
SOME = ("lock_ref", "a_free_page_less", "the_order_of_the_queue", "a_node_less", "kv_length", "a_row_entry")
ALL = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in PLANTS]


@pytest.mark.parametrize("name", ALL)
def test_a_planted_difference_is_found_in_that_step(pair: Moves, model: LlamaModel, name: str) -> None:
    engine = busy(pair, model)
    step = engine.steps + 1
    pair.on(1, engine, rank_plants.before_digest, name)
    with pytest.raises(RanksDiffer) as raised:
        engine.step()
    require_named(raised.value, step, 1, pair.on(1, engine, rank_plants.words, name))
    with pytest.raises(RanksDiffer, match=re.escape(str(raised.value))):  # it goes no further
        engine.step()


@pytest.mark.parametrize("name", ALL)
def test_a_difference_between_two_steps_is_found_in_the_next(
    pair: Moves, model: LlamaModel, name: str
) -> None:
    """It may be another by then, to which it led; nothing waits for ever, and only this engine ends."""
    engine = busy(pair, model)
    step = engine.steps + 1
    pair.on(1, engine, rank_plants.now, name)
    with pytest.raises(RanksDiffer) as raised:
        engine.step()
    require_named(raised.value, step, 1, ())
    other = Engine(EngineConfig(tp=2, kv_tokens=32), model=model)
    assert len(other.generate([[5, 6]], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_nothing_planted_nothing_found(pair: Moves, model: LlamaModel) -> None:
    """What the tests above plant into goes to its end, and all is let go of."""
    engine = busy(pair, model)
    while engine.has_work:
        engine.step()
        engine.check()
        assert pair.on(1, engine, held) == held(engine)


def calls_of_a_step(engine: Engine) -> Counter[str]:
    """What rank 0 sends and gathers in one step, by the group's methods."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        usual = getattr(Group, name)

        def call(self: Group, *arguments: Any, **named: Any) -> Any:
            # (Another thread may say that there is nothing to say.)
            calls[name] += threading.current_thread() is threading.main_thread()
            return usual(self, *arguments, **named)

        return patch.object(Group, name, call)

    with counted("tell"), counted("share"), counted("gather"), counted("gather_any"):
        engine.step()
    return calls


def test_without_the_digest_nothing_is_compared_and_nothing_costs(pair: Moves, model: LlamaModel) -> None:
    engine = busy(pair, model, rank_digest=False)
    with (
        patch.object(digest, "of_engine", side_effect=AssertionError),
        patch.object(digest, "of_batch", side_effect=AssertionError),
    ):
        assert calls_of_a_step(engine) == {"tell": 1}
    pair.on(1, engine, rank_plants.now, "hits")
    engine.step()
    assert pair.on(1, engine, held) != held(engine)
    compared = busy(pair, model)
    assert calls_of_a_step(compared) == {"tell": 1, "gather": 2}


def test_a_difference_is_an_event_and_a_broken_invariant(pair: Moves, model: LlamaModel) -> None:
    engine = busy(pair, model)
    heard: list[Any] = []
    engine.bus.subscribe(None, heard.append)
    pair.on(1, engine, rank_plants.before_digest, "lock_ref")
    with pytest.raises(InvariantError) as raised:
        engine.step()
    [told] = [event for event in heard if type(event).__name__ == "RanksDiffered"]
    assert str(raised.value) == f"step {told.step}: {told.what}" and told.rank == 1
    assert told.what in told.describe()
    assert not any(type(event).__name__ == "RanksAgreed" for event in heard)
    pair.on(1, engine, rank_plants.words, "lock_ref")


def test_a_copy_that_fails_on_one_rank_alone_is_found(pair: Moves, model: LlamaModel) -> None:
    """Rank 0 says which copies begin; a rank that cannot make one has another tree from then on."""
    engine = busy(pair, model)
    pair.on(1, engine, rank_moves.copies_fail_here)
    with pytest.raises(RanksDiffer, match=r"rank 1 has .* n\d"):
        for _ in range(50):
            engine.step()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), OSError("as the test wishes")])
def test_a_mask_that_raises_anything_ends_its_request_on_all_ranks(
    pair: Moves, model: LlamaModel, error: BaseException
) -> None:
    engine = busy(pair, model)

    def mask(output: list[int]) -> None:
        if output:
            raise error

    rid = engine.add_request([9, 8, 7], SamplingParams(max_new_tokens=4), token_mask=mask)
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
        engine.check()
        assert pair.on(1, engine, held) == held(engine)
    ends = {output.request_id: output for output in outputs}
    assert "its token mask failed" in ends[rid].error and repr(error) in ends[rid].error
    assert {output.finish_reason for name, output in ends.items() if name != rid} == {"length"}
