"""The engine's whole game on several ranks, in processes: what one rank promises, each of them keeps.

The rules are those of test_whole_machine.py, with masks, stop texts, streams that are left, `generate` and
Ctrl-C beside them. Every greedy token is judged by transformers; every token, drawn ones included, is what
one rank says alone. All ranks check their invariants at the end of every step, and compare digests there; and
all of what they hold is compared here, too, which asks nothing of the digest.
MINIRAD_RANK_EXAMPLES sets how many games are played; the longest plays hundreds.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import rank_moves
from conftest import tiny_config
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from rank_moves import EveryOther, FailsAt, Letters, Moves
from support import ColdReference, ToldTier, TransformersReference
from test_engine_machine import options
from test_whole_machine import SHAPE, STEPS, TOLERANCE, WholeMachine, bold_weights, requests, sizes

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, StepReport, StreamToken

EXAMPLES = int(os.environ.get("MINIRAD_RANK_EXAMPLES", "8"))
HAPPENED: Counter[str] = Counter()  # over all games: what these rules reach
REACHED = (
    "NodeDemoted", "LoadEnded", "VersionBumped", "PolicyChanged", "RequestRetracted", "RequestForked",
    "(Ctrl-C)", "(mask failed)", "(masked)", "(stop text)", "(stream ended)", "(stream left)",
    "(stream left in a step)", "(generated)", "(no radix cache)",
)  # fmt: skip

# By the number of ranks: KV heads split; all ranks with the one there is; two ranks with each of the two.
# Where the vocabulary of 10 is not divided evenly, it is filled up.
SHAPES: dict[int, dict[str, Any]] = {
    2: {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2},
    3: {
        **SHAPE,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "hidden_size": 24,
        "intermediate_size": 18,
    },
    4: {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2},
}
ENDINGS = st.sampled_from([{}] * 6 + [{"stop": ("fg",)}, {"stop": ("h", "ij")}, {"stop_token_ids": (6, 8)}])
MASKS = st.sampled_from([None] * 6 + ["alternating", "alternating", "raises", "no mask", "nothing allowed"])

LEFT = st.sampled_from(["closed", "let go of", "let go of in a step", "not"])  # how streams are left


class RankMachine(WholeMachine):
    """The whole game, on the ranks of `pair`."""

    pair: Moves

    def make_engine(self, config: EngineConfig) -> Engine:
        tp = self.pair.all_here().tp
        return Engine(replace(config, tp=tp), model=self.models[0], tokenizer=Letters())

    @property
    def others(self) -> range:
        return range(1, self.pair.tp)

    @initialize(
        sizes=st.builds(
            lambda sizes, cache: sizes if cache else {**sizes, "host_kv_tokens": 0, "radix_cache": False},
            sizes,
            st.sampled_from([True] * 7 + [False]),
        ),
        options=options,
    )
    def start(self, sizes: dict[str, Any], options: dict[str, Any]) -> None:
        super().start(sizes, options)
        HAPPENED["(no radix cache)"] += not self.engine.config.radix_cache
        for rank in self.others:
            self.pair.on(rank, self.engine, rank_moves.begin)
        self.said_with = {}
        self.engine.bus.subscribe(ev.TokenSampled, self.note_weights)
        self.masks: dict[str, EveryOther] = {}
        self.streams: dict[str, Iterator[StreamToken]] = {}
        self.streamed: set[str] = set()  # requests whose outputs no report owes
        self.pieces: dict[tuple[str, int], list[int]] = {}
        self.texts: dict[tuple[str, int], str] = {}

    def make_tier(self) -> ToldTier:
        return rank_moves.slow_tier(self.engine, Counter())

    def note(self, event: ev.Event) -> None:
        super().note(event)
        HAPPENED[type(event).__name__] += 1

    # ------------------------------------------------------------ what may happen

    @rule(several=st.lists(st.tuples(requests, ENDINGS, MASKS), min_size=1, max_size=4))
    def add(self, several: list[tuple[Any, dict[str, Any], str | None]]) -> None:
        for (prompt, params, extra_key, priority), ending, mask in several:
            params = replace(params, **ending)
            if mask is None:
                super().add([(prompt, params, extra_key, priority)])
            else:
                self.add_masked(prompt, params, mask)

    def add_masked(self, prompt: list[int], params: SamplingParams, kind: str) -> None:
        config = self.engine.config
        if len(prompt) + params.max_new_tokens > config.kv_tokens or params.n > config.max_running:
            return
        wrong = {"raises": OSError("as the test wishes"), "no mask": [1, 2], "nothing allowed": [False] * 10}
        mask = FailsAt(10, 2, wrong[kind]) if kind in wrong else EveryOther(10, 5)
        rid = self.engine.add_request(prompt, params, token_mask=mask)
        self.expect(rid, prompt, params)
        self.masks[rid] = mask
        if kind in wrong:
            self.excused.add(rid)

    def expect(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        self.asked[rid], self.added_with[rid] = (prompt, params), self.weights
        if self.pins:
            self.excused.add(rid)

    @rule(several=st.lists(st.tuples(requests, ENDINGS), min_size=1, max_size=3))
    def generate(self, several: list[tuple[Any, dict[str, Any]]]) -> None:
        prompts = [prompt for (prompt, *_), _ in several]
        params = [replace(params, **ending) for (_, params, *_), ending in several]
        first = self.engine._arrivals + 1
        rids = [f"R{first + at}" for at in range(len(several))]
        try:
            for each in zip(prompts, params, strict=True):
                self.engine.check_prompt(*each)
        except ValueError as refused:
            with pytest.raises(ValueError) as again:
                self.engine.generate(prompts, params)
            assert str(again.value) == str(refused)
            return
        for rid, prompt, param in zip(rids, prompts, params, strict=True):
            self.expect(rid, prompt, param)
        outputs = self.engine.generate(prompts, params)
        self.look()
        HAPPENED["(generated)"] += 1
        for output in outputs:
            assert output.request_id in rids
            self.take_output(output)

    @precondition(lambda self: len(self.streams) < 3)
    @rule(request=requests, ending=ENDINGS, pieces=st.integers(1, 3), then=LEFT)
    def open_stream(self, request: Any, ending: dict[str, Any], pieces: int, then: str) -> None:
        prompt, params = request[0], replace(request[1], **ending)
        try:
            stream = self.engine.stream(prompt, params)
        except ValueError:
            return
        rid = f"R{self.engine._arrivals + 1}"
        self.expect(rid, prompt, params)
        self.streamed.add(rid)
        self.streams[rid] = stream
        del stream
        self.listen_to(rid, pieces)  # from now on it is a request
        self.leave_stream(rid, then)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), pieces=st.integers(0, 3), then=LEFT)
    def hear_stream(self, data: Any, pieces: int, then: str) -> None:
        rid = data.draw(st.sampled_from(sorted(self.streams)))
        self.listen_to(rid, pieces)
        self.leave_stream(rid, then)

    def listen_to(self, rid: str, pieces: int) -> None:
        for _ in range(pieces):
            piece = next(self.streams[rid], None)
            self.look()
            if piece is None:
                HAPPENED["(stream ended)"] += 1
                del self.streams[rid]
                return
            assert piece.request_id == rid
            key = (rid, piece.index)
            self.pieces.setdefault(key, []).extend([] if piece.token_id is None else [piece.token_id])
            self.texts[key] = self.texts.get(key, "") + piece.text
            if piece.finish_reason in ("stop", "length"):
                assert self.texts[key] == said(self.asked[rid][1], self.pieces[key])

    def leave_stream(self, rid: str, how: str) -> None:
        if how == "not" or rid not in self.streams:
            return
        self.aborted.add(rid)
        HAPPENED["(stream left)"] += 1
        if how == "closed":
            self.streams.pop(rid).close()
        elif how == "let go of":
            del self.streams[rid]
        else:
            HAPPENED["(stream left in a step)"] += 1
            done = self.engine.bus.subscribe(ev.StepEnded, lambda event: self.streams.pop(rid, None))
            report = self.watch.step()
            done()
            self.engine.snapshot()  # ends it
            self.take(report)
        self.look()

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def ctrl_c(self) -> None:
        """Pressed before a forward pass: others wait in it, so the step is made whole before it is raised."""
        done = self.engine.bus.subscribe(ev.BatchScheduled, lambda event: signal.raise_signal(signal.SIGINT))
        steps = self.engine.steps
        try:
            self.take(self.watch.step())
        except KeyboardInterrupt:
            HAPPENED["(Ctrl-C)"] += 1
            assert self.engine.steps == steps + 1, "the step was torn"
        finally:
            done()
        self.look()

    def interrupted_step(self) -> None:
        """No rule here: a rank that fails in a forward pass, in which others wait, ends the run."""

    # ------------------------------------------------------------ what must hold

    def take(self, report: StepReport) -> None:
        super().take(report)
        if self.engine._inputs:
            return  # asked for since the last step, and not told yet
        for rank in self.others:
            assert self.pair.on(rank, self.engine, rank_moves.held) == rank_moves.held(self.engine)

    def look(self) -> None:
        """After steps that gave no report: what finished in them is in the next one's."""
        self.take(StepReport(0, "idle", [], [], [], [], 0, 0, 0, 0.0))
        for output in self.engine.outbox._outputs:
            name = f"{output.request_id}.{output.index}" if output.index else output.request_id
            self.judge_reply(name, output.request_id, output.token_ids, output.logprobs)

    def take_output(self, output: GenerationOutput) -> None:
        key = (output.request_id, output.index)
        assert key not in self.done
        self.done[key] = output
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        self.judge_reply(name, output.request_id, output.token_ids, output.logprobs)

    def judge_reply(self, name: str, group: str, said: list[int], logprobs: list[float]) -> None:
        if group not in self.masks:
            super().judge_reply(name, group, said, logprobs)
            return
        HAPPENED["(masked)"] += len(said) > 0
        prompt, params = self.asked[group]
        for at in range(self.judged[name], len(said)):
            after = self.judges[self.weights].logits([*prompt, *said[:at]])[-1].log_softmax(-1)
            allowed = self.masks[group].allowed(at)
            told = (name, prompt, said, at, logprobs[at], after)
            assert said[at] in allowed, told
            assert abs(logprobs[at] - float(after[said[at]])) <= TOLERANCE, told
            best = float(after[allowed].max())
            assert params.temperature > 0 or float(after[said[at]]) >= best - TOLERANCE, told
        self.judged[name] = len(said)

    def judge(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        if rid not in self.streamed:
            super().judge(rid, prompt, params)
        elif rid not in self.aborted | self.excused:
            for index in range(params.n):
                tokens = self.pieces.get((rid, index), [])
                assert len(tokens) == params.max_new_tokens or ended(params, tokens)

    def judge_mask(self, mask: Any, replies: list[list[int]], forced: list[tuple[int, ...]]) -> None:
        """`judge_reply` knows what these masks allow; who asked them on which rank is masks.py's business."""

    def judge_tokens(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        assert self.judged[name] == len(output.token_ids)
        tokens = output.token_ids
        assert not any(ended(params, tokens[:count]) for count in range(len(tokens))), output
        reason = "stop" if ended(params, tokens) else "length"
        assert output.finish_reason == reason and (reason == "stop" or len(tokens) == params.max_new_tokens)
        assert output.text == said(params, tokens), output
        HAPPENED["(stop text)"] += bool(params.stop) and reason == "stop"
        if not params.stop and output.request_id not in self.masks | dict.fromkeys(self.changed):
            self.require_as_alone(prompt, params, output)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            while self.streams:
                self.listen_to(min(self.streams), 1)
            super().teardown()
            self.look_once_more()
        finally:
            self.engine = None  # the other ranks let go of theirs, too

    def look_once_more(self) -> None:
        """What was done last (flush, unpin) is told in the next step."""
        self.engine.step()
        for rank in self.others:
            assert self.pair.on(rank, self.engine, rank_moves.held) == rank_moves.held(self.engine)
        HAPPENED["(mask failed)"] += any("token mask" in output.error for output in self.done.values())


def ended(params: SamplingParams, tokens: list[int]) -> bool:
    """What was said ends with the last of these tokens."""
    text = Letters().decode(tokens)
    ends = {SHAPE["eos_token_id"], *params.stop_token_ids}
    return bool(tokens) and (tokens[-1] in ends or any(stop in text for stop in params.stop))


def said(params: SamplingParams, tokens: list[int]) -> str:
    """The text of a whole reply: what ended it is no part of it."""
    text = Letters().decode(tokens)
    found = [text.index(stop) for stop in params.stop if stop in text]
    if found:
        return text[: min(found)]
    return text[:-1] if ended(params, tokens) else text


def machine(ranks: int, pair: Moves) -> type[RankMachine]:
    """The machine for as many ranks."""
    shape = SHAPES[ranks]
    weights = [bold_weights(seed, shape) for seed in (0, 1)]
    models = [LlamaModel(tiny_config(**shape), each) for each in weights]
    parts = {
        "pair": pair,
        "models": models,
        "cold": [ColdReference(model, within=TOLERANCE) for model in models],
        "judges": [TransformersReference(shape, each) for each in weights],
    }
    return type("RankMachine", (RankMachine,), parts)


def play(ranks: int, pair: Moves, examples: int, steps: int = STEPS // 2, number: int | None = None) -> None:
    """So many games; number: others than those that are played always."""
    made = machine(ranks, pair)
    run_state_machine_as_test(
        made if number is None else seed(number)(made),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=number is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(scope="module")
def two() -> Iterator[Moves]:
    with Moves(2) as pair:
        yield pair


@pytest.mark.slow
def test_two_ranks_play_the_whole_game(two: Moves) -> None:
    play(2, two, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_play_it_too(ranks: int) -> None:
    """KV heads that several ranks keep, and a vocabulary that cannot be divided."""
    with Moves(ranks) as pair:
        play(ranks, pair, max(EXAMPLES // 8, 3))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(max(300, EXAMPLES) // 100))
def test_a_hundred_games_reach_all_that_can_happen(number: int) -> None:
    """300 games, or MINIRAD_RANK_EXAMPLES if those are more; longer ones."""
    HAPPENED.clear()
    with Moves(2) as pair:
        play(2, pair, 100, STEPS, number)
    assert set(REACHED) <= set(+HAPPENED), set(REACHED) - set(+HAPPENED)
