"""The seam between threads: what is submitted comes back as the engine says it, what is cancelled is gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from server_support import ASK, Collected, new_engine
from support import ColdReference
from test_ahead import EagerSteps

from minirad.config import SamplingParams
from minirad.grammar import regex_mask
from minirad.server.likeliest import likeliest
from minirad.server.service import Busy, Ended, EngineThread, Service, Spec
from minirad.server.settings import Limits


@pytest.fixture(scope="module")
def engine() -> Any:
    return new_engine(kv_tokens=1024, max_running=4)


@pytest.fixture
def service(engine: Any) -> Any:
    made = Service(engine, Limits(queue=4))
    yield made
    assert not engine.scheduler.has_work and made.open == 0
    assert "launch" not in vars(engine.runner)  # nobody asks for the likeliest tokens any more
    engine.check()


def spec(engine: Any, *texts: str, **more: Any) -> Spec:
    params = more.pop("params", SamplingParams(max_new_tokens=8))
    prompts = tuple(engine.encode(text) for text in texts)
    return Spec(prompts, (params,) * len(prompts), **more)


def turns(service: Service) -> int:
    count = 0
    while service.turn():
        count += 1
        assert count < 3000
    return count


def test_it_says_what_generate_says(engine: Any, service: Service) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.8, n=2, seed=7)
    asked = spec(engine, ASK, "Count: 1 2 3", params=params)
    got = Collected(service, asked)
    turns(service)
    wanted = engine.generate(list(asked.prompts), params)
    outputs = [got.of(index)[-1].output for index in range(4)]
    assert [out.token_ids for out in outputs] == [out.token_ids for out in wanted]
    assert [out.text for out in outputs] == [out.text for out in wanted]
    assert len(got.pieces) == 4  # nobody asked for more


@pytest.mark.parametrize("stop", [(), ("is",), ("\n\nQ", "zz")])
def test_the_pieces_of_a_stream_join_to_the_text(engine: Any, service: Service, stop: Any) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.9, n=3, seed=3, stop=stop)
    got = Collected(service, spec(engine, ASK, ASK + " ", params=params, stream=True))
    turns(service)
    for index in range(6):
        pieces, output = got.of(index), got.of(index)[-1].output
        assert "".join(piece.text for piece in pieces) == output.text
        assert [piece.token for piece in pieces if piece.token is not None] == output.token_ids
        assert [piece.logprob for piece in pieces if piece.token is not None] == output.logprobs
        assert [piece.output for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_a_cancelled_request_is_gone_before_the_next_step(engine: Any, service: Service) -> None:
    long = SamplingParams(max_new_tokens=500, ignore_eos=True)
    first, second = (Collected(service, spec(engine, text, params=long, stream=True)) for text in ("a", "b"))
    for _ in range(5):
        service.turn()
    told = first.calls
    service.cancel(first.ticket)
    steps = engine.steps
    service.turn()
    assert engine.steps == steps + 1 and len(engine.scheduler.requests()) == 1 and first.calls == told
    service.cancel(second.ticket)
    service.cancel(second.ticket)
    assert not service.turn() and not engine.outbox


def test_one_that_is_cancelled_before_it_began_never_begins(engine: Any, service: Service) -> None:
    steps = engine.steps
    got = Collected(service, spec(engine, ASK))
    service.cancel(got.ticket)
    assert not service.turn() and engine.steps == steps and got.calls == 0


def test_more_than_there_is_place_for_is_refused(engine: Any, service: Service) -> None:
    params = SamplingParams(max_new_tokens=2, n=3)
    got = [Collected(service, spec(engine, ASK, params=params)) for _ in range(2)]
    with pytest.raises(Busy, match="6 replies wait or run, and with 3 more they are over 8") as busy:
        service.submit(spec(engine, ASK, params=params), lambda pieces: None)
    assert 1 <= busy.value.seconds <= 60
    got.append(Collected(service, spec(engine, ASK, params=SamplingParams(max_new_tokens=2, n=2))))
    turns(service)
    assert [each.ticket.left for each in got] == [0, 0, 0]
    turns(service)


def test_what_could_never_run_is_refused_and_leaves_nothing(engine: Any, service: Service) -> None:
    with pytest.raises(ValueError, match="more than the context of 2048"):
        service.submit(spec(engine, ASK, params=SamplingParams(max_new_tokens=5000)), lambda pieces: None)
    assert service.open == 0 and not service.turn()


def test_others_outputs_stay_for_whoever_asked(engine: Any, service: Service) -> None:
    name = engine.add_request(ASK, SamplingParams(max_new_tokens=2))
    Collected(service, spec(engine, ASK))
    turns(service)
    assert [output.request_id for output in engine.step().finished] == [name]


def test_the_likeliest_tokens_are_those_of_a_cold_forward_pass(engine: Any, service: Service) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=0.7, n=2, seed=5, logprob_start=0)
    asked = spec(engine, ASK, params=params, stream=True, tops=3)
    others = Collected(service, spec(engine, ASK, params=params))
    got = Collected(service, asked)
    turns(service)
    reference, prompt = ColdReference(engine.model), asked.prompts[0].tolist()
    for index in range(2):
        output = got.of(index)[-1].output
        logits = reference.logits([*prompt, *output.token_ids])
        wanted = likeliest(logits, 3)
        said = [piece.top for piece in got.of(index) if piece.token is not None]
        for ours, cold in zip(said, wanted[len(prompt) - 1 :], strict=False):
            assert [token for token, _ in ours] == [token for token, _ in cold]
            assert [known for _, known in ours] == pytest.approx([known for _, known in cold], abs=1e-4)
        tops = got.of(index)[-1].prompt_tops
        assert sorted(tops) == list(range(1, len(prompt)))
        for at, top in tops.items():
            assert [token for token, _ in top] == [token for token, _ in wanted[at - 1]]
    assert others.of(0)[-1].output.token_ids == got.of(0)[-1].output.token_ids


def test_the_likeliest_tokens_survive_chunks_and_retractions() -> None:
    """A pool so small that requests are put back: each token drawn once has its own."""
    engine = new_engine(kv_tokens=96, max_running=4, chunk_tokens=7)
    service = Service(engine)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, logprob_start=0)
    got = [
        Collected(service, spec(engine, text + ASK[:40], params=params, stream=True, tops=2))
        for text in "abc"
    ]
    turns(service)
    assert engine.stats.retractions > 0
    reference = ColdReference(engine.model)
    for each in got:
        output, prompt = each.of(0)[-1].output, each.ticket.spec.prompts[0].tolist()
        wanted = likeliest(reference.logits([*prompt, *output.token_ids]), 2)
        tokens = [piece for piece in each.of(0) if piece.token is not None]
        assert [piece.token for piece in tokens] == output.token_ids
        assert [[token for token, _ in piece.top] for piece in tokens] == [
            [token for token, _ in top] for top in wanted[len(prompt) - 1 : -1]
        ]
        assert sorted(each.of(0)[-1].prompt_tops) == list(range(1, len(prompt)))
    assert "launch" not in vars(engine.runner)


def test_an_engine_that_runs_ahead_waits_for_who_asks_and_for_nobody_else(engine: Any) -> None:
    """A step is launched before the last was read, but for those whose likeliest tokens are wanted; also
    where a client goes away between the two."""
    ahead = new_engine(engine.model, engine.tokenizer, kv_tokens=512, max_running=4)
    ahead.runner.graphs = EagerSteps(ahead)
    service, params = Service(ahead), SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = [Collected(service, spec(ahead, text, params=params, stream=True)) for text in ("a b", "c d")]
    turns(service)
    ran_ahead = ahead.overlap.steps
    assert ran_ahead > 5
    asking = Collected(service, spec(ahead, ASK, params=params, stream=True, tops=2))
    beside, gone = (
        Collected(service, spec(ahead, text, params=params, stream=True)) for text in ("a b", "x")
    )
    for _ in range(4):
        service.turn()
    service.cancel(gone.ticket)
    turns(service)
    assert ahead.overlap.steps == ran_ahead  # all four ended together
    last = Collected(service, spec(ahead, "c d", params=params, stream=True))
    for _ in range(5):
        service.turn()
    service.cancel(last.ticket)
    turns(service)
    assert ahead.overlap.steps > ran_ahead and ahead.overlap.in_flight is None
    assert [piece.token for piece in beside.pieces] == [piece.token for piece in plain[0].pieces]
    prompt, output = asking.ticket.spec.prompts[0].tolist(), asking.of(0)[-1].output
    wanted = likeliest(ColdReference(engine.model).logits([*prompt, *output.token_ids]), 2)
    assert [[token for token, _ in piece.top] for piece in asking.pieces] == [
        [token for token, _ in top] for top in wanted[len(prompt) - 1 : -1]
    ]
    ahead.check()


def test_what_stood_in_front_of_the_runner_stands_there_again(engine: Any, service: Service) -> None:
    """As ranks put something there, around what is computed."""

    class Around:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def read(self) -> Any:
            return self._inner.read()

    own = engine.runner.launch
    engine.runner.launch = around = lambda batch: Around(own(batch))
    try:
        for _ in range(2):
            got = Collected(service, spec(engine, ASK, tops=2))
            turns(service)
            assert all(len(piece.top) == 2 for piece in got.pieces if piece.token is not None)
            assert vars(engine.runner)["launch"] is around
    finally:
        del engine.runner.launch


def test_a_mask_and_the_likeliest_tokens_go_together(engine: Any, service: Service) -> None:
    mask = regex_mask("[0-9]{3}", engine.tokenizer, engine.eos_ids, engine.runner.vocab_size)
    got = Collected(service, spec(engine, ASK, tops=2, masks=(mask,)))
    turns(service)
    output = got.of(0)[-1].output
    assert output.text.isdigit() and len(output.text) == 3 and output.finish_reason == "stop"
    assert any(piece.token not in dict(piece.top) for piece in got.of(0) if piece.token is not None)


def test_a_request_that_fails_alone_ends_alone(engine: Any, service: Service) -> None:
    def broken(output: list[int]) -> Any:
        raise RuntimeError("no idea")

    bad = Collected(service, spec(engine, ASK, masks=(broken,)))
    good = Collected(service, spec(engine, ASK))
    turns(service)
    assert bad.of(0)[-1].output.finish_reason == "error" and "no idea" in bad.of(0)[-1].output.error
    assert good.of(0)[-1].output.finish_reason in ("stop", "length")


def test_a_call_runs_between_two_steps(engine: Any, service: Service) -> None:
    seen, wrong = service.call(lambda each: each.bus.settled), service.call(lambda each: each.unpin(None))
    service.turn()
    assert seen.result(0) is True
    with pytest.raises(ValueError, match="a pin"):
        wrong.result(0)


def test_another_engine_goes_on_and_says_so_to_who_was_open(engine: Any, service: Service) -> None:
    got = Collected(service, spec(engine, ASK, params=SamplingParams(max_new_tokens=100), tops=1))
    service.turn()
    other = new_engine(kv_tokens=64)
    service.use(other)
    assert "replaced" in got.ticket.reason and not engine.scheduler.has_work
    again = Collected(service, spec(other, ASK))
    turns(service)
    assert again.of(0)[-1].output is not None and service.engine is other


def test_a_step_of_another_kind_can_be_driven(engine: Any, service: Service) -> None:
    """As the live page does: its own step, whose report has the outputs, too."""
    got, reports = Collected(service, spec(engine, ASK)), []
    while service.turn(lambda: reports.append(engine.step())):
        pass
    assert got.of(0)[-1].output is not None
    assert [output.request_id for report in reports for output in report.finished] == got.ticket.names


def test_an_engine_that_breaks_ends_all_that_is_open(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken = new_engine(kv_tokens=64, max_running=1)
    service, ended = Service(broken), threading.Event()
    got = [Collected(service, spec(broken, ASK)) for _ in range(2)]
    broken.runner.forward = lambda *args: 1 / 0
    thread = EngineThread(service, ended.set)
    thread.start()
    assert ended.wait(20)
    thread.join()
    assert service.error == "the engine broke: ZeroDivisionError: division by zero"
    assert [each.ticket.reason for each in got] == [service.error] * 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(Ended, match="division"):
        service.submit(spec(broken, ASK), lambda pieces: None)
    with pytest.raises(Ended):
        service.call(lambda each: None).result(1)


def test_many_threads_submit_and_cancel_and_nothing_is_left() -> None:
    engine = new_engine(kv_tokens=512, max_running=8)
    service = Service(engine, Limits(queue=1000))
    thread = EngineThread(service)
    thread.start()
    answered, gone = [], []

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(6):
            params = SamplingParams(
                max_new_tokens=int(rng.integers(1, 12)), ignore_eos=True, n=int(rng.integers(1, 3))
            )
            got = Collected(
                service, spec(engine, ASK[: int(rng.integers(5, 30))], params=params, stream=True)
            )
            if rng.random() < 0.4:
                time.sleep(float(rng.random()) * 0.02)
                service.cancel(got.ticket)
                gone.append(got)
            else:
                answered.append(got)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    service.end()
    thread.join(60)
    assert not thread.is_alive() and service.open == 0 and len(answered) + len(gone) == 48
    assert all(got.ticket.left == 0 and not got.ticket.reason for got in answered)
    engine.check()
