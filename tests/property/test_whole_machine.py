"""The whole cache at once, with a second tier at its worst: copies end when told, fail when told, and move
their data as late as they may; forward passes are interrupted; each sampled token and its log-probability
are compared with transformers in the very step that sampled it.

test_engine_machine.py plays the engine's schedule; this machine has its rules, and more of what only tiers
make hard. MINIRAD_WHOLE_EXAMPLES sets how many games are played; tests marked slow play thousands.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from conftest import TINY, tiny_config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from support import ToldTier, TransformersReference
from test_engine_machine import EngineMachine, Watch, check_recording, options

from minirad.cache.eviction import POLICIES as EVICTION
from minirad.cache.radix_cache import RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.outputs import GenerationOutput, StepReport
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.schedule.request import Request
from minirad.tiers.hiradix_cache import HOST_WRITE, HiRadixCache

EXAMPLES = int(os.environ.get("MINIRAD_WHOLE_EXAMPLES", "30"))
STEPS = 40  # rules in a game

# Two layers: in the first one, keys and values know their token and position only, not what came before.
# Weights ten times as large as usual, and a head of its own: else the model says its last token again
# whatever it read, and a wrong slot would show in the fourth digit only.
SHAPE: dict[str, Any] = {
    **TINY, "vocab_size": 10, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
TOLERANCE = 1e-4


def bold_weights(seed: int, shape: dict[str, Any] = SHAPE) -> dict[str, torch.Tensor]:
    weights = random_weights(tiny_config(**shape), seed, dtype=torch.float32, device="cpu")
    return {name: each if each.dim() == 1 else each * 10 for name, each in weights.items()}


WEIGHTS = [bold_weights(seed) for seed in (0, 1)]
MODELS = [LlamaModel(tiny_config(**SHAPE), weights) for weights in WEIGHTS]
JUDGES = [TransformersReference(SHAPE, weights) for weights in WEIGHTS]
HAPPENED: Counter[str] = Counter()  # over all games: what the machine reaches
REACHED = (
    "BackupStarted", "NodeDemoted", "LoadStarted", "LoadEnded", "NodeAdopted", "HostEvicted", "NodeEvicted",
    "VersionBumped", "PolicyChanged", "RequestRetracted", "RequestForked", "(backup refused)",
    "(backup failed at its end)", "(backup ended after a split)", "(load refused)", "(preemption)",
    "(load of several nodes ended)", "(split while copied)", "(split while loaded)", "(split with a copy)",
    "(split with a copy, on the host only)", "(forward interrupted)",
)  # fmt: skip


# Few texts, mostly long ones, in few namespaces: what was evicted is soon asked for again. Greedy for the
# most part; what is drawn by chance makes the samples of one prompt part.
prompts = st.builds(
    lambda text, length, ending: (text[:length] + ending) or [5],
    st.sampled_from(([5, 6, 7, 8, 9] * 4, [5, 6, 7, 8, 9, 9, 5, 5] * 3, [8, 6] * 9)),
    st.sampled_from([0, 3, 5, 8, 8, 9, 12, 12, 13, 16, 16, 17]),
    st.lists(st.sampled_from([5, 6, 7]), max_size=2),
)
extra_keys = st.sampled_from([None] * 9 + ["adapter", ("bc", "a"), ("c", "ab")])
parameters = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(0, 6),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    logprob_start=st.sampled_from([None, None, None, 0, 3]),
    seed=st.just(11),
)
requests = st.tuples(prompts, parameters, extra_keys, st.integers(-1, 1)).map(
    lambda drawn: (
        drawn if (drawn[1].logprob_start or 0) < len(drawn[0]) else ([*drawn[0], 6, 7, 8], *drawn[1:])
    )
)

sizes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 1, 2, 4]),
        "kv_tokens": st.sampled_from([16, 24, 24, 24, 32, 48]),
        "chunk_tokens": st.sampled_from([1, 2, 3, 5, 8, 16, 32]),
        "max_running": st.integers(1, 4),
        "schedule_policy": st.sampled_from(sorted(SCHEDULE)),
        "eviction_policy": st.sampled_from(sorted(EVICTION)),
        "host_write": st.sampled_from(HOST_WRITE),
        "host_kv_tokens": st.sampled_from([0, 8, 16, 32, 64, 64, 128, 128]),
        "load_back_threshold": st.sampled_from([1, 1, 1, 2, 6]),
        "bigram_keys": st.sampled_from([False, False, True]),
    }
)


class WholeMachine(EngineMachine):
    """The engine's machine with tiers that do as told, interrupted forward passes, and a judge each step."""

    models, judges = MODELS, JUDGES

    @initialize(sizes=sizes, options=options)
    def start(self, sizes: dict[str, Any], options: dict[str, Any]) -> None:
        HAPPENED["(game)"] += 1
        self.engine = engine = self.make_engine(EngineConfig(poison_freed=True, **sizes, **options))
        self.tier = None
        if isinstance(engine.cache, HiRadixCache):
            self.tier = self.make_tier()
        self.weights = 0
        engine.bus.subscribe(None, self.note)
        self.watch = Watch(engine)
        self.recorder = Recorder(engine, keyframe_every=7)
        self.replay = ReplayState(engine.snapshot())
        engine.bus.subscribe(None, self.replay.apply)
        self.asked, self.done, self.added_with = {}, {}, {}
        self.aborted, self.changed, self.excused = set(), set(), set()
        self.pins = []
        self.judged: Counter[str] = Counter()  # by sample: how many of its tokens were looked at

    def make_tier(self) -> ToldTier:
        """Puts it between the engine's tree and its second tier."""
        assert self.engine.host_tier is not None
        self.engine.cache.copier = self.engine.host_tier = ToldTier(self.engine.host_tier, HAPPENED)
        return self.engine.host_tier

    def note(self, event: ev.Event) -> None:
        """Counts what happens, and some things by what they happened to."""
        HAPPENED[type(event).__name__] += 1
        if isinstance(event, ev.BackupEnded) and not event.ok:
            HAPPENED["(backup failed at its end)"] += 1
        elif isinstance(event, ev.BackupEnded) and len(event.nodes) > 1:
            HAPPENED["(backup ended after a split)"] += 1
        elif isinstance(event, ev.LoadEnded) and len(event.nodes) > 1:
            HAPPENED["(load of several nodes ended)"] += 1
        elif isinstance(event, ev.RequestRetracted) and event.by:
            HAPPENED["(preemption)"] += 1
        elif isinstance(event, ev.NodeSplit) and self.tier is not None:
            [lower] = [node for node in self.engine.cache.walk() if node.id == event.lower]
            state = "while copied" if lower.copying else "while loaded" if lower.host_locks else ""
            state = state or ("with a copy" if lower.host else "")
            if state:
                HAPPENED[f"(split {state}{'' if lower.packed else ', on the host only'})"] += 1

    # ------------------------------------------------------------ what may happen

    @rule(several=st.lists(requests, min_size=1, max_size=4))
    def add(self, several: list[tuple[list[int], SamplingParams, Any, int]]) -> None:
        super().add(several)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), parameters=parameters, extra_key=extra_keys)
    def ask_again(self, data: Any, parameters: SamplingParams, extra_key: Any) -> None:
        """The next turn of a chat: an earlier prompt, its reply if there is one, and something new."""
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        prompt, _ = self.asked[rid]
        replies = [output.token_ids for output in self.done.values() if output.request_id == rid]
        turn = data.draw(st.sampled_from([*replies, []]))
        ending = data.draw(st.sampled_from([[], [5], [6, 7, 8]]))
        if len(prompt) > (parameters.logprob_start or 0):
            super().add([([*prompt, *turn, *ending], parameters, extra_key, 0)])

    @rule(count=st.integers(1, 4), ended=st.sampled_from([0, 0, 1, 3]))
    def step(self, count: int, ended: int) -> None:
        for _ in range(count):
            if self.tier is not None:
                self.tier.tell(ended)
            self.take(self.watch.step())

    @precondition(lambda self: self.tier is not None)
    @rule(what=st.sampled_from(["refuse_backups", "lose_backups", "refuse_loads"]), count=st.integers(1, 2))
    def copies_fail(self, what: str, count: int) -> None:
        setattr(self.tier, what, count)

    @rule(error=st.sampled_from([KeyboardInterrupt, MemoryError]))
    def interrupted_step(self, error: type[BaseException]) -> None:
        with patch.object(self.engine.model, "forward", side_effect=error("as the test wishes")):
            try:
                self.take(self.watch.step())  # there may be nothing to compute
                return
            except error as raised:
                assert str(raised) == "as the test wishes"
        HAPPENED["(forward interrupted)"] += 1
        for event in self.watch.events:  # the report that would tell of them does not come
            if isinstance(event, (ev.RequestAdmitted, ev.RequestRetracted)):
                self.watch.waited.discard(event.request)

    # ------------------------------------------------------------ what must hold

    def take(self, report: StepReport) -> None:
        super().take(report)
        for request in self.engine.scheduler.live:
            self.look_at_path(request)
        for request in self.engine.scheduler.requests():
            self.judge_reply(request.id, request.group, request.output, request.output_logprobs)
        for output in report.finished:
            name = f"{output.request_id}.{output.index}" if output.index else output.request_id
            self.judge_reply(name, output.request_id, output.token_ids, output.logprobs)
            if output.request_id not in self.changed:
                self.judge_prompt(output)

    def look_at_path(self, request: Request) -> None:
        """What a request holds in the tree spells its own tokens, in its own namespace.

        (Of two namespaces the keys and values are equal here: outputs would not tell.)
        """
        path = self.engine.cache.path_up(request.node)[::-1]
        key = RadixKey(request.tokens, request.extra_key, self.engine.config.bigram_keys)
        assert key.data.startswith(b"".join(node.edge for node in path)), (request.id, key, path)
        assert {node.namespace for node in path} <= {key.namespace}, (request.id, key, path)

    def judge_reply(self, name: str, group: str, said: list[int], logprobs: list[float]) -> None:
        """The tokens that this step sampled: transformers would say them too, as surely."""
        prompt, params = self.asked[group]
        for at in range(self.judged[name], len(said)):
            after = self.judges[self.weights].logits([*prompt, *said[:at]])[-1].log_softmax(-1)
            chance = float(after[said[at]])
            told = (name, prompt, said, at, logprobs[at], chance)
            assert abs(logprobs[at] - chance) <= TOLERANCE, told
            assert params.temperature > 0 or chance >= float(after.max()) - TOLERANCE, told
        self.judged[name] = len(said)

    def judge_prompt(self, output: GenerationOutput) -> None:
        prompt, params = self.asked[output.request_id]
        found, first = output.prompt_logprobs, params.logprob_start or 0
        if params.logprob_start is None or len(prompt) < 2:
            return
        # An output that nobody fetched may be older than the weights of today.
        expected = self.judges[self.added_with[output.request_id]].logits(prompt).log_softmax(-1)
        for position, chance in enumerate(found, start=first):
            if position == 0:
                assert chance is None
            else:
                assert chance is not None
                wanted = float(expected[position - 1, prompt[position]])
                assert abs(chance - wanted) <= TOLERANCE, (prompt, position, chance, wanted)
        if output.finish_reason in ("stop", "length"):
            assert len(found) == len(prompt) - first

    def judge_tokens(self, prompt: list[int], params: SamplingParams, output: GenerationOutput) -> None:
        """At the end: every token of the reply was looked at, and the reply ends where it should."""
        name = f"{output.request_id}.{output.index}" if output.index else output.request_id
        assert self.judged[name] == len(output.token_ids)
        stopped = bool(output.token_ids) and output.token_ids[-1] == SHAPE["eos_token_id"]
        assert output.finish_reason == ("stop" if stopped else "length")
        assert SHAPE["eos_token_id"] not in output.token_ids[:-1]
        assert stopped or len(output.token_ids) == params.max_new_tokens


def play(examples: int, derandomize: bool = True) -> None:
    run_state_machine_as_test(
        WholeMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=derandomize,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_tiers_that_do_their_worst_change_no_token() -> None:
    play(EXAMPLES)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_thousands_of_games_reach_all_that_can_happen() -> None:
    """20,000 games (about an hour), or MINIRAD_WHOLE_EXAMPLES if those are more."""
    HAPPENED.clear()
    for _ in range(max(20_000, EXAMPLES) // 250):
        play(250, derandomize=False)
    assert set(REACHED) <= set(HAPPENED), set(REACHED) - set(HAPPENED)


def test_a_step_that_was_interrupted_is_no_step() -> None:
    """No report and no event tells of it: a keyframe that counted it would not follow from the events."""
    engine = Engine(EngineConfig(kv_tokens=16, max_running=2), model=MODELS[0])
    recorder = Recorder(engine, keyframe_every=1)
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=2))
    with patch.object(engine.model, "forward", side_effect=MemoryError), pytest.raises(MemoryError):
        engine.step()
    recorder.close()
    check_recording(recorder)
