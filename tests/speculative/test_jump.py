"""Jump-forward: what a grammar forces is computed at once, and every reply is as without it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_support import (
    VOCAB,
    Game,
    Mask,
    breaking,
    engine_of,
    nobody_is_pushed_out,
    require_same,
    stepping_on,
    watch_ends,
    write_head,
)  # fmt: skip
from support import drive, listen

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import assemble as engine_parts
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from minirad.observe.reading import event_fields, parse_event
from minirad.observe.recorder import Recorder
from minirad.observe.replay import CheckedReplay
from minirad.outputs import GenerationOutput
from minirad.parts import NOT_A_NUMBER
from minirad.speculative.stats import DraftStats

WAYS = (None, "ngram", "eagle")  # jump-forward alone, and beside drafts


@pytest.fixture(scope="module")
def head(tiny_model: LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny_model)


class Rails(Mask):
    """Leaves no choice in runs of `run` places behind each of its forks, and knows it.

    A fork is where the reply so far says so (`free` of them in a hundred); between them one token is allowed,
    which depends on all that was said before.
    """

    def __init__(self, fails_at: int = -1, free: int = 25) -> None:
        super().__init__(fails_at)
        self.free, self.told = free, []

    def only(self, said: Sequence[int]) -> int:
        """The one token that may follow, or -1."""
        number = hash((*said, len(said))) % 10_007
        return 3 + number % (VOCAB - 3) if number % 100 >= self.free else -1

    def __call__(self, said: list[int]) -> Any:
        choice = super().__call__(said)
        only = self.only(said)
        return choice if only < 0 else torch.arange(VOCAB) == only

    def forced(self, said: list[int], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(said) + len(found) != self.fails_at:
            only = self.only([*said, *found])
            if only < 0:
                break
            found.append(only)
        self.told.append(len(found))
        return found


class RailsGame(Game):
    """A game all of whose requests have such a mask, some of which fail."""

    def __init__(self, seed: int, requests: int = 8, **fixed: Any) -> None:
        super().__init__(seed, requests, **fixed)
        self.fails = [self.rng.choice([-1, -1, -1, 3]) for _ in self.prompts]

    def play(self, engine: Any, look: Any = lambda engine: None, steps: int = 800) -> list[GenerationOutput]:
        self.rails = [Rails(fails_at) for fails_at in self.fails]
        self.masked = {}
        add, masks = engine.add_request, iter(self.rails)

        def masked(*asked: Any, token_mask: Any, **more: Any) -> str:
            return str(add(*asked, token_mask=next(masks), **more))

        engine.add_request = masked
        try:
            return super().play(engine, look, steps)
        finally:
            engine.add_request = add


PLAIN: dict[str, Any] = {}  # what a game's replies are, played once one token at a time


def played(game: RailsGame, model: LlamaModel, head: Path, way: str | None, **config: Any) -> Any:
    """A game without jump-forward and with it: the same outputs. Returns the engine that jumped."""
    name = repr((game.prompts, game.params, config))
    if name not in PLAIN:
        PLAIN[name] = game.play(engine_of(model, head, **config))
    engine = engine_of(model, head, jump_forward=True, speculative=way, **config)
    ended, forced = watch_ends(engine), listen(engine, TokensForced)
    parted = require_same(PLAIN[name], game.play(engine))
    assert ended and forced
    if not engine.stats.retractions:
        require_asked_where_there_was_a_choice(game, PLAIN[name], parted)
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens
    return engine


def require_asked_where_there_was_a_choice(game: RailsGame, plain: Any, parted: Any) -> None:
    """A mask is asked at most once a place, and seldom where it has said already what must come."""
    for at, mask in enumerate(game.rails):
        out = next(out for out in plain if out.request_id == f"R{at + 1}" and not out.index)
        if game.params[at].n == 1 and (f"R{at + 1}", 0) not in parted:
            assert len(set(mask.asked)) == len(mask.asked) <= len(out.token_ids) + bool(out.error)
            choices = [place for place in range(len(out.token_ids)) if mask.only(out.token_ids[:place]) < 0]
            assert set(choices) <= set(mask.asked)


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page", (1, 4, 16))
def test_replies_are_those_without_it(tiny_model: LlamaModel, head: Path, way: str | None, page: int) -> None:
    """Greedy and drawn, n > 1, prompt log-probabilities, stop tokens, priorities, masks that fail."""
    for seed in range(2):
        rng = random.Random(seed)
        config = {
            "page_size": page, "chunk_tokens": rng.choice([4, 16, 512]), "mixed": rng.random() < 0.5,
            "attention": rng.choice(["gather", "torch"]), "draft_tokens": rng.choice([1, 4, 7]),
        }  # fmt: skip
        engine = played(RailsGame(seed + 100 * page), tiny_model, head, way, **config)
        assert engine.drafts.forced > engine.drafts.tokens / 4 and engine.drafts.tokens_a_pass > 1.3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "config",
    [
        {"kv_tokens": 64, "page_size": 4, "mixed": True},
        {"kv_tokens": 64, "page_size": 4, "host_kv_tokens": 64, "load_back_threshold": 1},
        {"kv_tokens": 128, "radix_cache": False},
        {"kv_tokens": 64, "bigram_keys": True},
        {"kv_tokens": 64, "bigram_keys": False, "page_size": 4},
    ],
    ids=["tiny-mixed", "host", "no-tree", "pairs", "tokens"],
)
def test_replies_are_the_same_where_room_is_short(
    tiny_model: LlamaModel, head: Path, way: str | None, config: dict[str, Any]
) -> None:
    retracted = 0
    for seed in range(2):
        engine = played(RailsGame(seed, ignore_eos=True), tiny_model, head, way, **config)
        retracted += engine.stats.retractions + engine.stats.preemptions
    assert retracted or config["kv_tokens"] > 64


def test_a_mask_that_cannot_tell_is_asked_as_before(tiny_model: LlamaModel, head: Path) -> None:
    game = Game(5, ignore_eos=True)
    plain = game.play(engine_of(tiny_model, head))
    engine = engine_of(tiny_model, head, jump_forward=True)
    require_same(plain, game.play(engine))
    assert engine.drafts.forced == 0 and engine.drafts.tokens_a_pass == 1


# ---------------------------------------------------------------------- how many


class Straight(Mask):
    """One token after the other from the start, up to `length` of them; then anything."""

    def __init__(self, length: int = 10**6) -> None:
        super().__init__()
        self.length, self.most = length, []

    def __call__(self, said: list[int]) -> Any:
        self.asked.append(len(said))
        return torch.arange(VOCAB) == 3 + len(said) % 40 if len(said) < self.length else None

    def forced(self, said: list[int], most: int) -> list[int]:
        self.most.append(most)
        return [3 + at % 40 for at in range(len(said), min(len(said) + most, self.length))]


def said(engine: Engine, mask: Any, new: int = 60, prompt: Sequence[int] = (5, 6, 7), **more: Any) -> Any:
    """What the engine says under a mask, and what each of its steps forced."""
    forced = listen(engine, TokensForced)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, **more)
    engine.add_request(list(prompt), params, token_mask=mask)
    output = drive(engine)[0]
    return output, [len(event.tokens) for event in forced]


def test_as_many_as_are_forced_in_one_pass(tiny_model: LlamaModel, head: Path) -> None:
    """Neither `draft_tokens` nor anything else bounds them; the mask is asked behind them."""
    engine, mask = engine_of(tiny_model, head, jump_forward=True, draft_tokens=1), Straight(40)
    output, forced = said(engine, mask)
    assert forced == [39] and output.token_ids[:40] == [
        3 + at for at in range(40)
    ]  # one came with the prompt
    assert len(output.token_ids) == 60 and mask.asked == [0, *range(40, 60)]
    assert engine.steps == 1 + 1 + 19


def test_a_steps_forced_tokens_are_a_chunk_at_most(tiny_model: LlamaModel, head: Path) -> None:
    engine = engine_of(tiny_model, head, jump_forward=True, chunk_tokens=8)
    masks = [Straight(30) for _ in range(3)]
    forced = listen(engine, TokensForced, ev.StepEnded)
    for at, mask in enumerate(masks):
        engine.add_request([5, 6, at], SamplingParams(max_new_tokens=40, ignore_eos=True), token_mask=mask)
    drive(engine)
    sums = [0]
    for event in forced:
        if isinstance(event, ev.StepEnded):
            sums.append(0)
        else:
            sums[-1] += len(event.tokens)
    assert sums[2:10] == [8] * 8 and max(sums) == 8
    assert max(most for mask in masks for most in mask.most) == 8


@pytest.mark.parametrize("new", [1, 2, 3, 12])
def test_the_length_ends_a_forced_run(tiny_model: LlamaModel, head: Path, new: int) -> None:
    engine, mask = engine_of(tiny_model, head, jump_forward=True), Straight()
    output, forced = said(engine, mask, new)
    assert output.token_ids == [3 + at for at in range(new)] and output.finish_reason == "length"
    assert forced == ([new - 2] if new > 2 else [])  # one before with the prompt, and the last behind them


@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_a_stop_token_ends_a_forced_run(tiny_model: LlamaModel, head: Path, at: int) -> None:
    """Nothing is computed behind it, and it has no KV itself."""
    engine, mask = engine_of(tiny_model, head, jump_forward=True), Straight()
    ended = watch_ends(engine)
    output, forced = said(engine, mask, stop_token_ids=(3 + at,))
    assert output.token_ids == [3 + place for place in range(at + 1)] and output.finish_reason == "stop"
    assert forced == ([at - 1] if at > 1 else []) and ended == ["R1"]


@pytest.mark.parametrize("page", [1, 4])
def test_a_forced_run_takes_what_is_free_or_cached_and_pushes_nobody_out(
    tiny_model: LlamaModel, head: Path, page: int
) -> None:
    engine = engine_of(tiny_model, head, jump_forward=True, kv_tokens=64, page_size=page)
    engine.generate([[9] * 30], SamplingParams(max_new_tokens=1))  # cached: may be evicted
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    nobody_is_pushed_out(engine, "what is forced pushed a request out")
    forced = listen(engine, TokensForced)
    for prompt in ([5, 6, 7, 8], [9, 10, 11]):
        engine.add_request(prompt, params, token_mask=Straight())
    for out in drive(engine):
        assert out.token_ids == [3 + at for at in range(40)]
    sizes = [len(event.tokens) for event in forced]
    assert max(sizes) > 30 and min(sizes) < 20 and engine.cache_manager.evicted_tokens


def test_every_sample_is_forced_for_itself(tiny_model: LlamaModel, head: Path) -> None:
    params = SamplingParams(max_new_tokens=20, n=3, temperature=1.0, seed=5, ignore_eos=True)
    outputs = []
    for config in ({}, {"jump_forward": True}, {"jump_forward": True, "page_size": 4}):
        engine = engine_of(tiny_model, head, **config)
        engine.add_request([5, 6, 7], params, token_mask=Rails())
        outputs.append(drive(engine))
    for jumped in outputs[1:]:
        require_same(outputs[0], jumped)
    assert len({tuple(out.token_ids) for out in outputs[0]}) == 3 and engine.drafts.forced > 10


# ---------------------------------------------------------------------- what goes wrong


class Lying(Straight):
    """Says of one place something that is no token, or raises there."""

    def __init__(self, at: int, what: Any) -> None:
        super().__init__(20)
        self.at, self.what = at, what

    def forced(self, said: list[int], most: int) -> list[int]:
        found: list[Any] = super().forced(said, most)
        if len(said) <= self.at < len(said) + len(found):
            if isinstance(self.what, Exception):
                raise self.what
            found[self.at - len(said)] = self.what
        return found


@pytest.mark.parametrize("what", [-1, VOCAB, 10**9, "x", None, RuntimeError("as the test wishes")])
def test_a_mask_that_tells_nonsense_is_asked_instead(tiny_model: LlamaModel, head: Path, what: Any) -> None:
    engine, mask = engine_of(tiny_model, head, jump_forward=True), Lying(6, what)
    output, forced = said(engine, mask, 30)
    assert output.token_ids[:20] == [3 + at for at in range(20)] and not output.error
    assert forced[-1] == 13 and 6 in mask.asked  # the places behind it, and it alone


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_that_fails_behind_a_forced_run(tiny_model: LlamaModel, head: Path, way: str | None) -> None:
    """Its request ends there, with the tokens before; the other one does not notice."""
    params, outputs = SamplingParams(max_new_tokens=10, ignore_eos=True), []
    for config in ({}, {"jump_forward": True, "speculative": way}):
        engine = engine_of(tiny_model, head, **config)
        engine.add_request([5, 6, 7], params, token_mask=Rails(fails_at=6, free=0))
        engine.add_request([8, 9], params)
        outputs.append(drive(engine))
    require_same(*outputs)
    failed = next(out for out in outputs[1] if out.error)
    assert len(failed.token_ids) == 6 and "as the test wishes" in failed.error
    assert engine.drafts.forced == 5
    engine.flush_cache()


@pytest.mark.parametrize("at", [0, 3, 7])
def test_what_is_not_a_number_ends_a_forced_run(tiny_model: LlamaModel, head: Path, at: int) -> None:
    """At a forced place, or behind all of them: what came before it is said, as one token at a time would."""
    engine = engine_of(tiny_model, head, jump_forward=True)
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=30, ignore_eos=True), token_mask=Straight(8))
    engine.step()
    real = engine.runner.forward

    def forward(ids: Any, metadata: Any, index: Any) -> Any:
        hidden, logits = real(ids, metadata, index)
        logits = logits.clone()
        logits[at:] = float("nan")
        return hidden, logits

    engine.runner.forward = forward
    out = drive(engine)[0]
    assert NOT_A_NUMBER in out.error and out.token_ids == [3 + place for place in range(1 + at)]
    assert len(out.logprobs) == len(out.token_ids)
    engine.flush_cache()


@pytest.mark.parametrize("way", WAYS)
def test_aborts_take_a_forced_run_along(tiny_model: LlamaModel, head: Path, way: str | None) -> None:
    game = RailsGame(3, ignore_eos=True, max_new_tokens=20)
    game.fails = [-1] * len(game.prompts)
    plain = {(out.request_id, out.index): out.token_ids for out in game.play(engine_of(tiny_model, head))}
    engine = engine_of(tiny_model, head, jump_forward=True, speculative=way)
    rng = random.Random(1)

    def abort(engine: Any) -> None:
        live = [request.group for request in engine.scheduler.requests()]
        if live and rng.random() < 0.3:
            engine.abort(rng.choice(live))
            engine.check()

    outputs = game.play(engine, look=abort)
    assert any(out.finish_reason == "abort" for out in outputs) and engine.drafts.forced
    for out in outputs:
        whole = plain[out.request_id, out.index]
        assert out.token_ids == (whole[: len(out.token_ids)] if out.finish_reason == "abort" else whole)
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "forced": lambda engine: (Rails, "forced"),
    "room": lambda engine: (engine, "_room_for_drafts"),
    "compute": lambda engine: (engine.runner, "forward"),
    "draw": lambda engine: (engine.runner.computed, "_draw"),
    "tell": lambda engine: (engine, "_roll_back"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["before", "after", "ctrl-c"])
def test_a_fault_loses_nothing(
    tiny_model: LlamaModel, head: Path, way: str | None, place: str, how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    game = RailsGame(11, requests=4, ignore_eos=True, max_new_tokens=12, n=1)
    game.fails = [-1] * 4
    config = {"kv_tokens": 96, "page_size": 4, "mixed": True}
    if "faults" not in PLAIN:
        PLAIN["faults"] = game.play(engine_of(tiny_model, head, **config))
    engine = engine_of(tiny_model, head, jump_forward=True, speculative=way, **config)
    breaking(*PLACES[place](engine), how, monkeypatch)
    raised = stepping_on(engine)
    outputs = game.play(engine)
    swallowed = how != "ctrl-c" and place in ("forced", "draw")  # a request's own trouble, or none at all
    assert raised[0] or swallowed
    if place != "draw" or how == "ctrl-c":
        require_same(PLAIN["faults"], outputs)
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens


# ---------------------------------------------------------------------- asked for, refused


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tp": 2}, "tp=2: jump_forward is for one process"),
        ({"jump_forward": "yes"}, "jump_forward must be True or False, got 'yes'"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{"jump_forward": True, **config})


def test_parts_that_compute_one_token_a_pass_are_refused(tiny_model: LlamaModel) -> None:
    parts = engine_parts(EngineConfig(kv_tokens=64), None, tiny_model, None)
    with pytest.raises(ValueError, match=r"these parts have a .*, which does not draft"):
        Engine(EngineConfig(kv_tokens=64, jump_forward=True), parts=parts)


# ---------------------------------------------------------------------- told and read back


def test_numbers_add_up(tiny_model: LlamaModel, head: Path) -> None:
    engine = engine_of(tiny_model, head, jump_forward=True)
    said(engine, Straight(9), 12)
    drafts = engine.drafts
    assert (drafts.passes, drafts.tokens, drafts.forced) == (3, 11, 8)
    assert (drafts.verified, drafts.drafted, drafts.accepted, drafts.acceptance_length) == (0, 0, 0, 0)
    assert str(drafts) == "3.67 tokens a forward pass, 8 of 11 forced by a grammar"
    assert drafts.as_dict()["forced"] == 8
    drafts.add(4, 2, 3)
    assert str(drafts).startswith("3.50 tokens a forward pass, 8 of 14 forced by a grammar; 2 of 4 drafted")
    assert str(DraftStats(1, 1)) == "1.00 tokens a forward pass, nothing drafted"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page", (1, 4))
def test_a_recording_reads_back(
    tiny_model: LlamaModel, head: Path, way: str | None, page: int, tmp_path: Path
) -> None:
    path, game = tmp_path / "forced.jsonl", RailsGame(7, requests=5, ignore_eos=True)
    engine = engine_of(tiny_model, head, jump_forward=True, speculative=way, page_size=page, kv_tokens=64)
    with Recorder(engine, path, keyframe_every=1):
        game.play(engine)
    recording = Recorder.load(path)
    assert recording.missing == ""  # every keyframe is what the events before it lead to
    told = [event for frame in recording for event in frame.events]
    forced = [event for event in told if isinstance(event, TokensForced)]
    assert sum(len(event.tokens) for event in forced) == engine.drafts.forced > 0
    assert len([event for event in told if isinstance(event, DraftVerified)]) == engine.drafts.verified
    assert {event.source for event in told if isinstance(event, TokensDrafted)} <= {way}


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (["TokensForced", "R1", [7], [3]], "R1: 1 token forced by its grammar, not sampled"),
        (["TokensForced", "R1.2", [7, 8], [3, 4]], "R1.2: 2 tokens forced by its grammar, not sampled"),
    ],
)
def test_what_is_told_of_forced_tokens(held: list[Any], sentence: str) -> None:
    event = parse_event(held)
    assert event.describe() == sentence and json.loads(json.dumps(event_fields(event))) == held
    assert TokensForced.together([event, event])[1].startswith(
        f"{2 * len(event.tokens)} tokens forced for R1"
    )
    with pytest.raises(ValueError, match="fields"):
        parse_event(held[:-1])


@pytest.mark.parametrize(
    ("tokens", "slots", "problem"),
    [
        ((7,), (10**6,), "slot 1000000"),
        ((7, 8), (3,), "2 tokens and the slots"),
        ((), (), "0 tokens and the slots"),
        ((7,), (1,), "do not end its row"),
    ],
)
def test_a_strangers_file_cannot_say_what_does_not_follow(
    tiny_model: LlamaModel, head: Path, tokens: Any, slots: Any, problem: str
) -> None:
    engine = engine_of(tiny_model, head, jump_forward=True)
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=8))
    engine.step()
    with pytest.raises(ValueError, match=problem):
        CheckedReplay(engine.snapshot()).apply(TokensForced("R1", tokens, slots))
    with pytest.raises(ValueError, match="no request R9"):
        CheckedReplay(engine.snapshot()).apply(TokensForced("R9", (7,), (3,)))
