"""Random programs against an engine that runs ahead: streams left and interleaved, requests that come and go,
new weights, recorders, steps that cannot be launched. Every request says what it says alone, once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support import ColdReference, one_slow
from test_ahead import EagerSteps

from minirad import Recorder
from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.outputs import GenerationOutput, StreamToken

MakeEngine = Callable[..., Engine]
Said = list[tuple[list[int], str]]


@dataclass(eq=False)
class Stream:
    tokens: Iterator[StreamToken]
    prompt: list[int]
    params: SamplingParams
    said: list[int] = field(default_factory=list)


def go_on(engine: Any) -> list[Any]:
    engine.advance()
    return engine.outbox.take()


class Program:
    """One engine, and what it owes to whom."""

    def __init__(self, seed: int, make: MakeEngine, alone: Callable[..., Said]) -> None:
        self.rng = rng = random.Random(seed)
        options: dict[str, Any] = {
            "page_size": rng.choice([1, 1, 2, 4]), "kv_tokens": rng.choice([40, 48, 64, 128]),
            "chunk_tokens": rng.choice([3, 8, 64]),
        }  # fmt: skip
        if rng.random() < 0.4:
            ways = ["write_through", "write_through_selective", "write_back"]
            options |= {"host_kv_tokens": rng.choice([32, 64, 128]), "host_write": rng.choice(ways)}
        self.engine = make(**options)
        self.graphs = EagerSteps(self.engine)
        self.graphs.before = self.maybe_fail
        self.engine.runner.graphs = self.graphs  # type: ignore[assignment]
        self.alone, self.fails_in = alone, 0
        self.texts = [[rng.randrange(3, 60) for _ in range(14)] for _ in range(3)]
        self.owed: dict[str, tuple[list[int], SamplingParams]] = {}
        self.got: dict[tuple[str, int], tuple[list[int], str]] = {}
        self.aborted: set[str] = set()
        self.streams: list[Stream] = []

    def maybe_fail(self) -> None:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise MemoryError("no memory left for one more graph")

    def prompt(self) -> list[int]:
        rng = self.rng
        return [*self.texts[rng.randrange(3)][: rng.randrange(1, 14)], rng.randrange(3, 60)]

    def params(self, most: int = 1) -> SamplingParams:
        rng, warm = self.rng, self.rng.random() < 0.4
        return SamplingParams(
            max_new_tokens=rng.randrange(1, 10), temperature=0.7 * warm, seed=rng.randrange(5) * warm,
            top_k=5 * warm, n=rng.randint(1, most), ignore_eos=rng.random() < 0.6,
        )  # fmt: skip

    def take(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            name = output.request_id, output.index
            assert name not in self.got, f"{name} came twice"
            self.got[name] = output.token_ids, output.finish_reason

    # -------------------------------------------------------------- what may happen

    def add(self) -> None:
        prompt, params = self.prompt(), self.params(2)
        self.owed[self.engine.add_request(prompt, params)] = prompt, params

    def step(self) -> None:
        if self.engine.has_work:
            self.take(self.engine.step().finished)

    def generate(self) -> None:
        prompts = [self.prompt() for _ in range(self.rng.randrange(1, 4))]
        params = [self.params(2) for _ in prompts]
        outputs = self.engine.generate(prompts, params)
        wanted = [each for pair in zip(prompts, params, strict=True) for each in self.alone(*pair)]
        assert [(output.token_ids, output.finish_reason) for output in outputs] == wanted

    def begin_stream(self) -> None:
        if len(self.streams) < 3:
            prompt, params = self.prompt(), self.params()
            self.streams.append(Stream(self.engine.stream(prompt, params), prompt, params))

    def read_stream(self) -> None:
        if not self.streams:
            return
        stream = self.rng.choice(self.streams)
        for _ in range(self.rng.randrange(1, 5)):
            try:
                stream.said.append(next(stream.tokens).token_id)
            except StopIteration:
                self.streams.remove(stream)
                assert stream.said == self.alone(stream.prompt, stream.params)[0][0]
                return
            except MemoryError:
                self.streams.remove(stream)
                raise

    def leave_stream(self) -> None:
        if self.streams:
            stream = self.streams.pop(self.rng.randrange(len(self.streams)))
            stream.tokens.close()  # type: ignore[attr-defined]

    def abort(self) -> None:
        if self.owed:
            name = self.rng.choice(list(self.owed))
            if self.engine.abort(name):
                self.aborted.add(name)

    def new_weights(self) -> None:
        self.engine.update_weights(self.engine.model)

    def record(self) -> None:
        with Recorder(self.engine):
            for _ in range(3):
                self.step()

    def fail_soon(self) -> None:
        self.fails_in = self.rng.randrange(1, 4)

    def look(self) -> None:
        self.engine.snapshot()

    def change_policy(self) -> None:
        self.engine.set_eviction_policy(self.rng.choice(["lru", "lfu", "fifo"]))

    def run(self) -> None:
        often = [self.add, self.step, self.read_stream, self.generate, self.begin_stream]
        everything = [
            self.leave_stream, self.abort, self.new_weights, self.record, self.fail_soon, self.look,
            self.change_policy, *often, *often, self.read_stream, self.read_stream,
        ]  # fmt: skip
        for _ in range(self.rng.randrange(10, 40)):
            with contextlib.suppress(MemoryError):
                self.rng.choice(everything)()
            self.engine.check()
        self.end()

    def end(self) -> None:
        engine, self.fails_in = self.engine, 0
        while self.streams:
            self.leave_stream()
        while engine.has_work:
            self.take(engine.step().finished if self.rng.random() < 0.5 else go_on(engine))
            engine.check()
        self.take(engine.step().finished)  # of those who were aborted last
        for name, (prompt, params) in self.owed.items():
            for index, wanted in enumerate(self.alone(prompt, params)):
                if name in self.aborted:  # its later samples may not have branched off yet
                    found = self.got[name, 0] if index == 0 else self.got.get((name, index), wanted)
                    assert found == wanted or (found[1] == "abort" and wanted[0][: len(found[0])] == found[0])
                else:
                    assert self.got[name, index] == wanted
        if engine.host_tier is not None:
            engine.cache.poll(wait=True)  # type: ignore[attr-defined]
        assert engine.cache.protected_size == 0
        engine.flush_cache()
        assert engine.allocator.available == engine.allocator.num_tokens


@pytest.mark.parametrize("first", one_slow(2, range(0, 40, 10)))
def test_everybody_gets_what_he_would_get_alone(
    make_engine: MakeEngine, tiny_model: LlamaModel, first: int
) -> None:
    cold = ColdReference(tiny_model)

    def alone(prompt: list[int], params: SamplingParams) -> Said:
        outputs = [cold(prompt, params, index) for index in range(params.n)]
        return [(output.token_ids, output.finish_reason) for output in outputs]

    steps = 0
    for seed in range(first, first + 10):
        program = Program(seed, make_engine, alone)
        program.run()
        steps += program.engine.overlap.steps
    assert steps > 20
