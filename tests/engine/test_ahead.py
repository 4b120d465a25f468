"""Running ahead on a CPU: a stand-in takes the place of captured graphs, so that everything else can be
watched: tokens, books, Ctrl-C, memory that ends, streams, and who may look at the engine meanwhile."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minirad import Recorder
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.fast import graphs
from minirad.observe import events as ev
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

MakeEngine = Callable[..., Engine]
LONG = SamplingParams(max_new_tokens=9, ignore_eos=True)


class EagerSteps:
    """What DecodeGraphs does, without a GPU: the last tokens of all requests, whose tokens may be given."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.runs, self.before = engine, 0, lambda: None

    def fits(self, requests: Sequence[Request]) -> bool:
        return True

    def run(self, requests: Sequence[Request], token_ids: torch.Tensor | None = None) -> Any:
        self.runs += 1
        self.before()
        engine = self.engine
        entries = [BatchEntry(r.row, r.kv_len - 1, r.kv_len) for r in requests]
        tokens = torch.tensor([r.last_token for r in requests]) if token_ids is None else token_ids.long()
        metadata = build_metadata(engine.rows.rows, entries, engine.config.page_size, engine.device)
        logits = engine.model.forward(
            tokens, metadata, engine.pool, engine.attention, torch.arange(len(requests))
        )
        best = logits.log_softmax(-1).max(-1)
        return SimpleNamespace(
            logits=logits, greedy=torch.stack((best.indices.double(), best.values.double()))
        )

    def to_host(self, chosen: torch.Tensor, arriving: torch.Tensor) -> None:
        arriving.copy_(chosen)


@pytest.fixture
def make_ahead(make_engine: MakeEngine) -> MakeEngine:
    def make(**config: Any) -> Engine:
        engine = make_engine(**config)
        engine.runner.graphs = EagerSteps(engine)  # type: ignore[assignment]
        return engine

    return make


def some_prompts(count: int = 14, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    texts = [[rng.randrange(3, 60) for _ in range(20)] for _ in range(3)]
    return [[*texts[n % 3][: rng.randrange(1, 16)], 3 + n] for n in range(count)]


def said(outputs: Sequence[Any]) -> list[tuple[list[int], str]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def end_tokens(engine: Engine) -> tuple[int, ...]:
    """Tokens that some replies hold in their middle, so that requests stop at different times."""
    outputs = engine.generate(some_prompts(), LONG)
    return tuple({output.token_ids[2 + at % 5] for at, output in enumerate(outputs) if at % 3 == 1})


@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"kv_tokens": 40}, {"chunk_tokens": 3}])
def test_the_same_tokens_and_the_same_books(
    make_engine: MakeEngine, make_ahead: MakeEngine, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    config = dataclasses.replace(make_engine().model.config, eos_ids=end_tokens(make_engine()))
    monkeypatch.setattr(make_engine().model, "config", config)
    params = [SamplingParams(max_new_tokens=2 + n, ignore_eos=n % 3 == 0) for n in range(14)]
    plain, ahead = make_engine(**options), make_ahead(**options)
    expected, found = plain.generate(some_prompts(), params), ahead.generate(some_prompts(), params)
    assert said(found) == said(expected)
    assert {output.finish_reason for output in found} == {"stop", "length"}
    assert ahead.overlap.steps > 10
    ahead.check()
    assert ahead.cache.protected_size == 0 and ahead.allocator.available == plain.allocator.available
    assert ahead.overlap.drain() is None
    ahead.flush_cache()
    assert ahead.allocator.available == ahead.allocator.num_tokens


def test_a_stream_runs_ahead_and_says_the_same(make_engine: MakeEngine, make_ahead: MakeEngine) -> None:
    params = SamplingParams(max_new_tokens=8, n=2, ignore_eos=True)
    tokens = [[(t.index, t.token_id, t.finish_reason) for t in make().stream([5, 6, 7], params)]
              for make in (make_engine, make_ahead)]  # fmt: skip
    assert sorted(tokens[0], key=str) == sorted(tokens[1], key=str) and len(tokens[0]) == 16
    engine = make_ahead()
    assert len(list(engine.stream([5, 6, 7], params))) == 16
    assert engine.overlap.steps > 0 and not engine.has_work


def test_between_two_tokens_of_a_stream_the_engine_is_anybodys(make_ahead: MakeEngine) -> None:
    alone = [token.token_id for token in make_ahead().stream([5, 6, 7], LONG)]
    for meddle in (
        lambda engine: engine.check(),
        lambda engine: engine.snapshot(),
        lambda engine: engine.step(),
        lambda engine: engine.abort("R9"),
        lambda engine: engine.add_request([9, 8, 7], LONG),
        lambda engine: engine.generate([8, 8, 8], LONG),
        lambda engine: list(engine.stream([8, 8, 8], LONG)),
    ):
        engine = make_ahead(kv_tokens=128)
        tokens = []
        for token in engine.stream([5, 6, 7], LONG):
            tokens.append(token.token_id)
            if len(tokens) in (3, 5):
                meddle(engine)
                engine.check()
        assert tokens == alone
        while engine.has_work:
            engine.step()
        engine.flush_cache()


def test_leaving_a_stream_early_leaves_nothing(make_ahead: MakeEngine) -> None:
    engine = make_ahead()
    for _ in engine.stream([5, 6, 7], LONG):
        if engine.overlap.steps == 2:
            break
    engine.check()
    assert not engine.has_work and engine.cache.protected_size == 0
    engine.flush_cache()


def test_whoever_begins_to_listen_gets_whole_steps(make_ahead: MakeEngine) -> None:
    engine = make_ahead()
    stream = engine.stream([5, 6, 7], LONG)
    for _ in range(4):
        next(stream)
    steps = engine.overlap.steps
    assert steps > 0
    with Recorder(engine) as recording:
        rest = list(stream)
    assert engine.overlap.steps == steps + 1  # what was in flight, and no more
    assert len(rest) == 5
    assert all(isinstance(frame.events[-1], ev.StepEnded) for frame in recording.frames[:-1])
    recording.check()


def only_this_is_left(engine: Engine, request_id: str, expected: list[int]) -> None:
    """Step by step, to the end; nobody else gets anything, and nothing stays behind."""
    engine.check()
    found = []
    while engine.has_work:
        found += engine.step().finished
        engine.check()
    assert [(output.request_id, output.token_ids) for output in found] == [(request_id, expected)]
    engine.flush_cache()


@pytest.mark.parametrize("at", [2, 3, 6])
def test_ctrl_c_comes_when_the_books_are_right(make_ahead: MakeEngine, at: int) -> None:
    engine = make_ahead()
    other = engine.add_request([30, 31, 32], LONG)
    expected = make_ahead().generate([[30, 31, 32]], LONG)[0].token_ids

    def press() -> None:
        if engine.runner.graphs.runs == at:
            signal.raise_signal(signal.SIGINT)

    engine.runner.graphs.before = press
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5, 6, 7], [8, 9]], LONG)
    only_this_is_left(engine, other, expected)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_step_that_cannot_be_launched_loses_nothing(make_ahead: MakeEngine, at: int) -> None:
    engine = make_ahead(page_size=4)
    other = engine.add_request([30, 31, 32], LONG)
    expected = make_ahead(page_size=4).generate([[30, 31, 32]], LONG)[0].token_ids

    def fail() -> None:
        if engine.runner.graphs.runs == at:
            raise MemoryError("no memory left")

    engine.runner.graphs.before = fail
    with pytest.raises(MemoryError):
        engine.generate([[5, 6, 7], [8, 9]], LONG)
    only_this_is_left(engine, other, expected)


def test_nan_ends_its_request_and_no_other(make_ahead: MakeEngine) -> None:
    engine = make_ahead()
    expected = make_ahead().generate([[8, 9]], LONG)[0].token_ids
    real = engine.runner.graphs.run

    def spoilt(requests: Any, tokens: Any = None) -> Any:
        output = real(requests, tokens)
        if engine.runner.graphs.runs == 3:
            output.greedy[1, 0] = float("nan")
        return output

    engine.runner.graphs.run = spoilt
    rid, other = engine.add_request([5, 6, 7], LONG), engine.add_request([8, 9], LONG)
    outputs = []
    while engine.has_work:
        engine.advance()
        outputs += engine.outbox.take()
    engine.check()
    (bad, good) = outputs
    assert (bad.request_id, bad.finish_reason, len(bad.token_ids)) == (rid, "error", 3)
    assert "NaN" in bad.error and rid in bad.error
    assert (good.request_id, good.token_ids) == (other, expected)


def test_what_is_drawn_by_chance_is_drawn_the_same(make_engine: MakeEngine, make_ahead: MakeEngine) -> None:
    params = [
        SamplingParams(max_new_tokens=3 + n, temperature=0.4 * (n % 3), top_k=n % 2 * 7, n=1 + n % 2,
                       top_p=1 - 0.1 * (n % 4), ignore_eos=n % 5 > 0) for n in range(14)
    ]  # fmt: skip
    ahead = make_ahead(page_size=2)
    found = said(ahead.generate(some_prompts(), params))
    assert found == said(make_engine(page_size=2).generate(some_prompts(), params))
    assert ahead.overlap.steps > 10
    ahead.check()


def test_what_the_host_decides_is_not_run_ahead(make_ahead: MakeEngine) -> None:
    engine = make_ahead()
    every = torch.ones(61, dtype=torch.bool)
    for mask in (None, lambda output: every):
        engine.overlap.steps = 0
        rid = engine.add_request([5, 6, 7], LONG, token_mask=mask)
        while not engine.outbox.take_of([rid]):
            engine.advance()
        assert (engine.overlap.steps > 0) == (mask is None)
    engine = make_ahead(overlap=False)
    engine.generate([5, 6, 7], LONG)
    assert engine.overlap.steps == 0
    for whole_steps in (True, False):
        engine = make_ahead()
        end = engine.bus.subscribe(ev.StepEnded, lambda event: None, whole_steps=whole_steps)
        engine.generate([5, 6, 7], LONG)
        assert (engine.overlap.steps == 0) == whole_steps
        end()
        end()
        engine.generate([5, 6, 7], LONG)
        assert engine.overlap.steps > 0


def test_each_call_is_settled_once_at_its_end(make_ahead: MakeEngine) -> None:
    engine, heard = make_ahead(), []
    engine.bus.subscribe(ev.NodeInserted, lambda event: heard.append(engine.bus.settled), whole_steps=False)
    end = engine.bus.when_settled(lambda: heard.append("settled"))
    engine.generate([5, 6, 7], LONG)
    inserted = heard.index(False)
    assert set(heard) == {False, "settled"} and heard.count(False) == 1 and engine.bus.settled
    assert heard[inserted + 1] == "settled" and heard.count("settled") >= engine.steps - 1
    count = len(heard)
    engine.flush_cache()
    assert heard[count:] == ["settled"]
    engine.bus.when_settled(lambda: 1 / 0)  # as a handler's: raised when the books are right
    with pytest.raises(ZeroDivisionError):
        engine.generate([5, 6, 7], LONG)
    assert not engine.has_work and heard.count("settled") > count
    end()
    end()


# -------------------------------------------------------------------- what may go wrong with a step in flight


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_handler_of_ctrl_c_that_returns_gets_nothing_twice(
    make_engine: MakeEngine, make_ahead: MakeEngine, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        for at in range(1, 10):
            engine = make_ahead() if runs_ahead else make_engine()
            finish, count = engine.results._finish_reason, [0]

            def press(*args: Any, finish: Any = finish, count: list[int] = count, at: int = at) -> Any:
                count[0] += 1
                if count[0] == at:
                    signal.raise_signal(signal.SIGINT)
                return finish(*args)

            monkeypatch.setattr(engine.results, "_finish_reason", press)
            other = engine.add_request([30, 31, 32], SamplingParams(max_new_tokens=3, ignore_eos=True))
            outputs = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=6, ignore_eos=True))
            assert len(outputs) == 1
            rest = [output.request_id for output in engine.step().finished]
            assert rest == [other] and not engine.has_work
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(pressed) == 9


@pytest.mark.parametrize("at", range(1, 8))
def test_a_step_that_cannot_be_read_loses_nothing(make_ahead: MakeEngine, at: int) -> None:
    engine = make_ahead(host_kv_tokens=64)
    poll, count = engine.cache.poll, [0]

    def fail(wait: bool = False) -> None:
        count[0] += 1
        if count[0] == at:
            raise RuntimeError("the copy cannot be asked for")
        poll(wait)

    engine.cache.poll = fail
    params = dataclasses.replace(LONG, temperature=1.5, seed=3)
    engine.add_request([5, 6, 7], params)
    outputs, failures = [], 0
    while engine.has_work:
        try:
            engine.advance()
        except RuntimeError:
            failures += 1
        outputs += engine.outbox.take()
        engine.check()
    assert failures == 1
    assert said(outputs) == said(make_ahead().generate([[5, 6, 7]], params))


def test_what_generate_leaves_behind_when_nan_comes(make_ahead: MakeEngine) -> None:
    """NaN shows when generate, stopped, reads what is in flight: all of its requests go all the same."""
    engine = make_ahead(max_running=8)
    other = engine.add_request([30, 31, 32], LONG)
    real = engine.runner.graphs.run

    def spoilt(requests: Any, tokens: Any = None) -> Any:
        output = real(requests, tokens)
        if engine.runner.graphs.runs == 3:
            output.greedy[1, 1:] = float("nan")  # not the other one's
        if engine.runner.graphs.runs == 4:
            raise MemoryError("no memory left")
        return output

    engine.runner.graphs.run = spoilt
    with pytest.raises(MemoryError):
        engine.generate([[5, 6, 7], [8, 9]], LONG)
    assert [request.id for request in engine.scheduler.requests()] == [other]
    engine.check()
    engine.runner.graphs.run = real
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
    assert said(outputs) == said(make_ahead().generate([[30, 31, 32]], LONG))


def test_a_stream_that_is_interrupted_while_it_is_left_leaves_nothing(
    make_ahead: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_ahead()
    stream = engine.stream([5, 6, 7], LONG)
    while engine.overlap.steps < 2:
        next(stream)
    drain = engine.overlap.drain

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        drain()

    monkeypatch.setattr(engine.overlap, "drain", press)
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    assert not engine.has_work
    engine.check()


@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("at", range(1, 9))
def test_a_stream_that_python_collects_in_the_middle_of_a_step(
    make_engine: MakeEngine, make_ahead: MakeEngine, runs_ahead: bool, at: int
) -> None:
    """Its end comes with the next step: no token of others is lost or comes twice."""
    engine = make_ahead() if runs_ahead else make_engine()
    stream = engine.stream([5, 6, 7], LONG)
    for _ in range(3):
        next(stream)
    steps, count = engine.model.forward, [0]

    def collect(*args: Any) -> Any:
        count[0] += 1
        if count[0] == at:
            stream.close()
        return steps(*args)

    try:
        engine.model.forward = collect  # type: ignore[method-assign]
        outputs = engine.generate([[8, 9], [10, 11, 12]], LONG)
    finally:
        del engine.model.forward
    assert said(outputs) == said(make_engine().generate([[8, 9], [10, 11, 12]], LONG))
    late = []
    while engine.has_work:
        late += engine.step().finished
    assert late == []  # nobody is told of it, also if it came to its end in that very step
    engine.check()
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens


def test_steps_are_captured_only_if_padding_and_growth_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_PAGES", 1000)
    rows = ReqToTokenPool(32, 128)
    pool: Any = SimpleNamespace(device=torch.device("cpu"))
    captured = graphs.DecodeGraphs(SimpleNamespace(), pool, SimpleNamespace(), rows, 2)  # type: ignore[arg-type]
    for lengths, fits in (([116] * 17, False), ([112] * 17, True), ([115] * 16, True), ([128] * 16, False)):
        requests: Any = [SimpleNamespace(row=row, kv_len=length) for row, length in enumerate(lengths)]
        assert captured.fits(requests) == fits
        size = next(size for size in graphs.batch_sizes(32) if size >= len(lengths))
        written = sum(length // 2 + 1 for length in lengths) + size - len(lengths)
        assert fits == (written <= len(captured._indices))
