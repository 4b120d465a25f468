"""Ctrl-C in a forward pass, handlers that fail or drive the engine: nothing is lost, everything goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.observe import events as ev

MakeEngine = Callable[..., Engine]
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 12], [20, 21, 22]]
REPLY = SamplingParams(max_new_tokens=6, ignore_eos=True)


def fail_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """The `at`-th forward pass from now raises."""
    real, calls = engine.model.forward, [0]

    def forward(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise error
        return real(*args)

    monkeypatch.setattr(engine.model, "forward", forward)


@pytest.mark.parametrize(
    "options", [{}, {"page_size": 4}, {"chunk_tokens": 2}, {"mixed": True, "chunk_tokens": 2}]
)
@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory left")])
def test_a_forward_pass_that_fails_puts_its_requests_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, options: dict, at: int, error: BaseException
) -> None:
    expected = [out.token_ids for out in make_engine(**options).generate(PROMPTS, REPLY)]
    engine = make_engine(**options)
    ids = [engine.add_request(prompt, REPLY) for prompt in PROMPTS]
    fail_once(engine, monkeypatch, at, error)
    found: dict[str, list[int]] = {}
    raised = 0
    while engine.has_work:
        try:
            found |= {out.request_id: out.token_ids for out in engine.step().finished}
        except type(error):
            raised += 1
            engine.check()
    assert raised == 1
    assert [found[rid] for rid in ids] == expected
    assert engine.cache.protected_size == 0 and engine.rows.available == 4


def test_generate_that_is_interrupted_leaves_nothing_running_and_loses_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    other = engine.add_request([30, 31, 32], SamplingParams(max_new_tokens=2, ignore_eos=True))
    fail_once(engine, monkeypatch, 5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[0], REPLY)
    engine.check()
    outputs = engine.step().finished
    assert [out.request_id for out in outputs] == [other]
    assert not engine.has_work
    engine.flush_cache()
    assert engine.generate(PROMPTS[0], REPLY)[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ev.EVENT_TYPES)
def test_a_handler_that_fails_is_reported_and_breaks_nothing(
    make_engine: MakeEngine, kind: type[ev.Event]
) -> None:
    expected = [out.token_ids for out in make_engine(kv_tokens=24).generate(PROMPTS, REPLY)]
    engine = make_engine(kv_tokens=24)
    ids = [engine.add_request(prompt, REPLY) for prompt in PROMPTS]
    seen: list[ev.Event] = []

    def fail(event: ev.Event) -> None:
        seen.append(event)
        if len(seen) < 4:
            raise RuntimeError(f"handler of {type(event).__name__}")

    engine.bus.subscribe(kind, fail)
    found: dict[str, list[int]] = {}
    raised = 0
    while engine.has_work:
        try:
            found |= {out.request_id: out.token_ids for out in engine.step().finished}
        except RuntimeError as error:
            assert str(error) == f"handler of {kind.__name__}"
            raised += 1
            engine.check()
    assert [found[rid] for rid in ids] == expected
    assert (raised > 0) == bool(seen)


@pytest.mark.parametrize("kind", [ev.TokenSampled, ev.RequestFinished, ev.NodeInserted, ev.StepEnded])
def test_a_handler_that_drives_the_engine_is_refused(make_engine: MakeEngine, kind: type[ev.Event]) -> None:
    engine = make_engine()
    stop = engine.bus.subscribe(kind, lambda event: engine.step())
    with pytest.raises(ValueError, match="must not drive"):
        engine.generate(PROMPTS[0], REPLY)
    stop()
    engine.check()
    assert len(engine.generate(PROMPTS[0], REPLY)[0].token_ids) == 6


def test_text_that_cannot_be_encoded_is_refused() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="no valid text"):
        engine.add_request("\ud83d")
    assert not engine.has_work


# ---------------------------------------------------------------------- Ctrl-C outside the forward pass


def press(_: object = None) -> None:
    signal.raise_signal(signal.SIGINT)


class PressAt:
    """A listener that presses Ctrl-C at the n-th event: somewhere inside scheduling or committing."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, event: ev.Event) -> None:
        self.left -= 1
        if self.left == 0:
            press()


MANY_WAYS = [{}, {"page_size": 4, "kv_tokens": 24}, {"chunk_tokens": 2, "mixed": True}]


@pytest.mark.parametrize("options", MANY_WAYS)
@pytest.mark.parametrize("at", range(4, 44, 3))
def test_ctrl_c_anywhere_in_a_step_loses_nothing(make_engine: MakeEngine, options: dict, at: int) -> None:
    expected = [out.token_ids for out in make_engine(**options).generate(PROMPTS, REPLY)]
    engine = make_engine(**options)
    engine.bus.subscribe(None, PressAt(at))
    ids = [engine.add_request(prompt, REPLY) for prompt in PROMPTS]
    found: dict[str, list[int]] = {}
    pressed = 0
    while engine.has_work:
        try:
            found |= {out.request_id: out.token_ids for out in engine.step().finished}
        except KeyboardInterrupt:
            pressed += 1
        engine.check()
    assert pressed == 1
    assert [found[rid] for rid in ids] == expected


def test_ctrl_c_is_raised_by_the_step_in_which_it_was_pressed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.bus.subscribe(ev.BatchScheduled, press)
    engine.add_request(PROMPTS[0], REPLY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and all is as it was
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_handler_of_the_callers_own_is_called_once_and_put_back(make_engine: MakeEngine) -> None:
    engine, calls = make_engine(), []

    def mine(number: int, frame: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGINT, mine)
    try:
        unsubscribe = engine.bus.subscribe(ev.Committed, press)
        engine.add_request(PROMPTS[0], REPLY)
        engine.step()
        unsubscribe()
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_there_is_nothing_to_hold(make_engine: MakeEngine) -> None:
    engine, outputs = make_engine(), []
    worker = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS, REPLY)))
    worker.start()
    worker.join()
    assert len(outputs) == 3
