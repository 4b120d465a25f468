"""What raises while a batch is chosen (a caller's tree, policy or key) loses no request and no slot.

The tree's and the policy's calls are made to fail, each once, at each moment of a run with chunks, evictions,
preemption and decoding beside prompts. The call raises what they raised; the books are right; what had begun
waits again; and in the end everybody has said what they say alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault_support import require_nothing_held, small_model

from minirad import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.schedule.policies import POLICIES

MODEL = small_model()
PROMPTS = ([7, 8, 9, 10] * 5, list(range(5, 25)), [7, 8, 9, 10, 11, 12], [30] * 11, [*range(5, 20), 3])
REPLY = SamplingParams(max_new_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {
    "kv_tokens": 52, "page_size": 1, "chunk_tokens": 8, "max_running": 3, "max_context": 40, "device": "cpu",
}  # fmt: skip


class Slip(Exception):
    """What the caller's code raises."""


class Slips:
    """Counts calls of one kind; the call of that number raises."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Slip(f"call {self.at}")


def tree_that_slips(method: str, slips: Slips) -> RadixCache:
    def slipping(self: RadixCache, *args: Any, **more: Any) -> Any:
        slips()
        return getattr(RadixCache, method)(self, *args, **more)

    return type("Slipping", (RadixCache,), {method: slipping})()


def alone(prompt: list[int]) -> list[int]:
    engine = Engine(EngineConfig(**{**SIZES, "kv_tokens": 256}, radix_cache=False), model=MODEL)
    return engine.generate([prompt], REPLY)[0].token_ids


WANTED = [alone(prompt) for prompt in PROMPTS]


def run(engine: Engine, slips: Slips) -> bool:
    """Whether something slipped; all whom it did not end are served all the same."""
    names = [engine.add_request(prompt, REPLY, priority=at % 2) for at, prompt in enumerate(PROMPTS)]
    said, slipped = {}, 0
    while engine.has_work:
        before = {request.id for request in engine.scheduler.requests()}
        try:
            said.update({output.request_id: output for output in engine.step().finished})
        except Slip:
            slipped += 1
            assert {request.id for request in engine.scheduler.requests()} == before, "nobody is lost"
        engine.check()
    ended = [name for name in names if said[name].finish_reason == "error"]  # what slips in a commit ends one
    for name, wanted in zip(names, WANTED, strict=True):
        assert name in ended or said[name].token_ids == wanted
    require_nothing_held(engine)
    tried = slips.calls >= slips.at
    assert len(ended) + slipped == tried
    return tried


def tried_at_every_call(engine_of: Callable[[Slips], Engine], least: int) -> None:
    at = 1
    while run(engine_of(slips := Slips(at)), slips):
        at += 1
    assert at > least, "there were enough moments to try"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("method", ["match_prefix", "inc_lock_ref", "evict"])
def test_a_tree_that_raises_once(method: str, mixed: bool) -> None:
    config = EngineConfig(**SIZES, mixed=mixed, preemption=True)
    tried_at_every_call(
        lambda slips: Engine(config, cache=tree_that_slips(method, slips), model=MODEL),
        3 if method == "evict" else 5,
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_a_schedule_policy_that_raises_once(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_of(slips: Slips) -> Engine:
        def order(waiting: list[Any], matched: Any) -> list[Any]:
            slips()
            return sorted(waiting, key=lambda request: request.arrival)

        monkeypatch.setitem(POLICIES, "slips", lambda options: order)
        return Engine(EngineConfig(**SIZES, mixed=mixed, schedule_policy="slips"), model=MODEL)

    tried_at_every_call(engine_of, 4)
