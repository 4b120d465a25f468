"""Ctrl-C and errors while drafts are made, verified, rolled back: no slot is lost, and all go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_support import (
    SOURCES,
    Fault,
    Game,
    Guide,
    breaking,
    engine_of,
    replies,
    require_same,
    stepping_on,
    write_head,
)  # fmt: skip
from support import drive

from minirad.config import SamplingParams
from minirad.model.llama import LlamaModel
from minirad.parts import NOT_A_NUMBER
from minirad.speculative.runner import Verified


@pytest.fixture(scope="module")
def head(tiny_model: LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny_model)


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "propose": lambda engine: (engine.runner.drafter, "propose"),
    "room": lambda engine: (engine, "_room_for_drafts"),
    "draft": lambda engine: (engine.runner.drafter, "draft"),
    "verify": lambda engine: (engine.runner, "forward"),
    "accept": lambda engine: (Verified, "_accept"),
    "learn": lambda engine: (engine.runner.drafter, "learn"),
    "roll-back": lambda engine: (engine, "_roll_back"),
    "take-back": lambda engine: (engine.cache_manager, "take_back"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["before", "after", "ctrl-c"])
def test_a_fault_loses_nothing(
    tiny_model: LlamaModel, head: Path, source: str, place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = Game(11, requests=4, ignore_eos=True, max_new_tokens=9, n=1)
    config = {"kv_tokens": 96, "page_size": 4, "mixed": True}
    plain = game.play(engine_of(tiny_model, head, **config))
    engine = engine_of(tiny_model, head, speculative=source, **config)
    Guide(engine, replies(game.prompts, plain), 0.6)
    breaking(*PLACES[place](engine), how, monkeypatch)
    raised = stepping_on(engine)
    outputs = game.play(engine)
    assert raised[0]
    require_same(plain, outputs)
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens


def test_a_sample_that_cannot_part_ends_alone(tiny_model: LlamaModel, head: Path) -> None:
    params = SamplingParams(max_new_tokens=6, n=3, temperature=1.0, seed=1, ignore_eos=True)
    plain = engine_of(tiny_model, head).generate([[5, 6, 7]], params)
    engine = engine_of(tiny_model, head, speculative="eagle")
    real = engine.runner.drafter.branched

    def branched(sample: Any, result: Any) -> None:
        if sample.index == 1:
            raise Fault("no head for this one")
        real(sample, result)

    engine.runner.drafter.branched = branched
    outputs = engine.generate([[5, 6, 7]], params)
    assert "no head for this one" in outputs[1].error and outputs[1].finish_reason == "error"
    require_same([plain[0], plain[2]], [outputs[0], outputs[2]])
    engine.flush_cache()


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_not_a_number_ends_its_request_where_it_is_read(
    tiny_model: LlamaModel, head: Path, source: str
) -> None:
    """Behind accepted drafts: what came before it is said. Behind a rejected one nobody looks."""
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=12, ignore_eos=True)
    reply = engine_of(tiny_model, head).generate([prompt], params)[0].token_ids
    for right in (1.0, 0.0):
        engine = engine_of(tiny_model, head, speculative=source, draft_tokens=4)
        Guide(engine, {(tuple(prompt), 0): reply}, right)
        engine.add_request(prompt, params)
        engine.step()
        real = engine.runner.forward

        def forward(ids: Any, metadata: Any, index: Any, real: Any = real) -> Any:
            hidden, logits = real(ids, metadata, index)
            logits = logits.clone()
            if len(logits) > 2:
                logits[2] = float("nan")
            return hidden, logits

        engine.runner.forward = forward
        out = drive(engine)[0]
        if right:
            assert NOT_A_NUMBER in out.error and out.token_ids == reply[:3]
        else:
            assert not out.error and out.token_ids == reply
        engine.flush_cache()
