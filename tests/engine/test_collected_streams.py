"""Streams that Python collects at any moment, other threads: nothing stays, Ctrl-C is what it was."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minirad.config import SamplingParams
from minirad.engine import Engine

MakeEngine = Callable[..., Engine]
LONG = SamplingParams(max_new_tokens=50, ignore_eos=True)


@pytest.fixture(autouse=True)
def collected_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def lose_a_stream(engine: Engine, prompt: list[int]) -> None:
    """Begun, and then only part of a cycle: it ends when the collector comes."""
    stream = engine.stream(prompt, LONG)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)


def collect_before(owner: Any, name: str) -> None:
    """The next call of `owner.name` is preceded by a collection, once."""
    usual = getattr(owner, name)

    def call(*args: Any) -> Any:
        setattr(owner, name, usual)
        gc.collect()
        return usual(*args)

    setattr(owner, name, call)


@pytest.mark.parametrize("moment", ["hold_failures", "release_failures"])
def test_ctrl_c_is_what_it_was_wherever_the_collector_comes(make_engine: MakeEngine, moment: str) -> None:
    engine = make_engine(kv_tokens=128)
    usual = signal.getsignal(signal.SIGINT)
    other = engine.add_request([9, 8, 7], LONG)
    lose_a_stream(engine, [5, 6, 7])
    collect_before(engine.bus, moment)
    engine.step()
    assert signal.getsignal(signal.SIGINT) is usual
    engine.step()
    assert signal.getsignal(signal.SIGINT) is usual
    assert [request.id for request in engine.scheduler.requests()] == [other]


def test_ctrl_c_is_what_it_was_if_a_call_begins_while_another_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of the books and the old handler's return a stream's end may be a call of its own."""
    engine = make_engine(kv_tokens=128)
    usual, install = signal.getsignal(signal.SIGINT), signal.signal
    other = engine.add_request([9, 8, 7], LONG)
    lose_a_stream(engine, [5, 6, 7])
    calls = [0]

    def collecting(number: int, handler: Any) -> Any:
        if handler is usual and not engine.transaction.running:
            calls[0] += 1
            if calls[0] == 1:
                gc.collect()
        return install(number, handler)

    monkeypatch.setattr(signal, "signal", collecting)
    engine.step()
    monkeypatch.undo()
    assert calls[0] >= 1 and signal.getsignal(signal.SIGINT) is usual
    assert [request.id for request in engine.scheduler.requests()] == [other]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_stream_collected_while_another_is_left_is_ended_too(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=128)
    stream = engine.stream([5, 6, 7, 1], LONG)
    next(stream)
    lose_a_stream(engine, [5, 6, 7, 2])
    collect_before(engine.outbox, "take_of")
    stream.close()
    assert not engine.has_work
    engine.check()


def test_another_thread_is_told_that_it_is_one_too_many(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=128)
    engine.add_request([5, 6, 7], LONG)
    forward, said = engine.model.forward, []

    def meanwhile(*args: Any) -> Any:
        def call() -> None:
            try:
                engine.abort("R1")
            except ValueError as error:
                said.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return forward(*args)

    engine.model.forward = meanwhile  # type: ignore[method-assign]
    try:
        engine.step()
    finally:
        del engine.model.forward
    assert said == ["an engine serves one thread at a time: another one is in it"]
    engine.step()
    engine.check()
