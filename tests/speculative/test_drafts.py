"""Drafts decide how many tokens a pass yields, never which: every reply is that of an engine without them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_support import (
    SOURCES,
    Game,
    Guide,
    Mask,
    engine_of,
    nobody_is_pushed_out,
    replies,
    require_same,
    watch_ends,
    write_head,
)
from support import drive, listen, tiny_config

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.machine import assemble as engine_parts
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.draft_events import DraftVerified, TokensDrafted
from minirad.observe.reading import event_fields, parse_event
from minirad.observe.recorder import Recorder
from minirad.observe.replay import CheckedReplay
from minirad.speculative.ngram import look_up


@pytest.fixture(scope="module")
def head(tiny_model: LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny_model)


PLAIN: dict[
    str, Any
] = {}  # outputs without drafts, by game and config: each is played against by both sources


def played(game: Game, model: LlamaModel, head: Path, source: str, right: float = 0.8, **config: Any) -> Any:
    """A game without drafts and with them: the same outputs. Returns the engine with drafts."""
    name = repr((game.prompts, game.params, config))
    if name not in PLAIN:
        PLAIN[name] = game.play(engine_of(model, head, **config))
    plain = PLAIN[name]
    engine = engine_of(model, head, speculative=source, **config)
    Guide(engine, replies(game.prompts, plain), right)
    ended = watch_ends(engine)
    parted = require_same(plain, game.play(engine))
    assert ended
    for at, mask in game.masks.items():  # asked once a place, in order, and for none behind the end
        if game.params[at].n == 1 and (f"R{at + 1}", 0) not in parted:
            out = next(out for out in plain if out.request_id == f"R{at + 1}")
            assert mask.asked == list(range(len(out.token_ids) + bool(out.error)))
    return engine


# ---------------------------------------------------------------------- looking up


def test_looked_up_is_what_followed_last() -> None:
    assert look_up(np.array([1, 2, 3, 9, 1, 2, 4, 1, 2]), 3, 3) == [4, 1, 2]  # the last of two places
    assert look_up(np.array([7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2]), 2, 3) == [8, 5]  # three alike before two
    assert look_up(np.array([4, 5, 4, 5]), 5, 3) == [4, 5, 4, 5, 4]  # the copy goes on with itself
    assert look_up(np.array([6, 6, 6]), 3, 3) == [6, 6, 6]
    assert look_up(np.array([1, 2, 3, 4, 3]), 3, 3) == []  # one token alone says too little
    assert look_up(np.array([1, 2, 3, 4, 3]), 3, 1) == [4, 3, 4]  # unless that is what was asked for
    assert look_up(np.array([1]), 3, 3) == []


def test_looked_up_as_by_hand() -> None:
    rng = random.Random(0)
    for _ in range(500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        longest, most = rng.randrange(1, 5), rng.randrange(1, 6)
        wanted: list[int] = []
        for n in range(longest, min(2, longest) - 1, -1):
            places = [at for at in range(len(tokens) - n) if tokens[at : at + n] == tokens[len(tokens) - n :]]
            if places and n < len(tokens):
                copy = list(tokens)
                for at in range(most):
                    copy.append(copy[places[-1] + n + at])
                wanted = copy[len(tokens) :]
                break
        assert look_up(np.array(tokens), most, longest) == wanted, (tokens, longest, most)


class Counted(np.ndarray):
    """An array that knows how many of its numbers were asked for."""

    looked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counted.looked += np.size(found)
        return found


def test_a_long_look_up_takes_no_longer() -> None:
    """As many last tokens as anybody likes: it is a look at each place, not at each place for each length.

    A place is looked at once more for each token by which it fits: where all are alike, once for each length
    that there is.
    """
    for tokens, looks in (
        (np.random.default_rng(0).integers(0, 3, 4000), 2 * 4000),
        (np.zeros(500, dtype=np.int64), 500 * 500 // 2 + 4 * 500),
    ):
        Counted.looked = 0
        assert len(look_up(tokens.view(Counted), 4, 10**9)) == 4
        assert 4 < Counted.looked <= looks


# ---------------------------------------------------------------------- the same tokens


def test_near_ties_are_counted_apart_and_nothing_else_is(tiny_model: LlamaModel, head: Path) -> None:
    plain = engine_of(tiny_model, head).generate(
        [[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=6, ignore_eos=True)
    )

    def parted(at: int, by: float, count: int = 1) -> Any:
        changed = list(plain)
        for number, out in enumerate(plain[:count]):
            tokens, logprobs = list(out.token_ids), list(out.logprobs)
            tokens[at] = (tokens[at] + 1) % 61
            logprobs[at:] = [each - by for each in logprobs[at:]]
            changed[number] = replace(out, token_ids=tokens, logprobs=logprobs)
        return require_same(plain, changed)

    assert require_same(plain, plain) == set() and parted(3, 9e-5) == {("R1", 0)}
    for wrong in (lambda: parted(3, 1e-3), lambda: parted(0, -1e-2), lambda: parted(3, 9e-5, count=2)):
        with pytest.raises(AssertionError):
            wrong()
    for fewer in (replace(plain[0], token_ids=plain[0].token_ids[:-1]), replace(plain[0], text="other")):
        with pytest.raises(AssertionError):
            require_same(plain, [fewer, plain[1]])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("page", (1, 4, 16))
def test_replies_are_those_without_drafts(tiny_model: LlamaModel, head: Path, source: str, page: int) -> None:
    verified = accepted = 0
    for seed in range(2):
        rng = random.Random(seed)
        config = {
            "page_size": page, "chunk_tokens": rng.choice([4, 16, 512]), "mixed": rng.random() < 0.5,
            "attention": rng.choice(["gather", "torch"]), "draft_tokens": rng.choice([1, 4, 7]),
        }  # fmt: skip
        game = Game(seed + 100 * page)
        engine = played(game, tiny_model, head, source, **config)
        verified, accepted = verified + engine.drafts.verified, accepted + engine.drafts.accepted
    assert verified > 20 < accepted


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "config",
    [
        {"kv_tokens": 64, "page_size": 1},
        {"kv_tokens": 64, "page_size": 4, "mixed": True},
        {"kv_tokens": 64, "page_size": 4, "host_kv_tokens": 64, "load_back_threshold": 1},
        {"kv_tokens": 64, "host_kv_tokens": 32, "host_write": "write_back", "load_back_threshold": 1},
        {"kv_tokens": 128, "radix_cache": False},
        {"kv_tokens": 64, "bigram_keys": True},
        {"kv_tokens": 64, "bigram_keys": False, "page_size": 4},
    ],
    ids=["tiny", "tiny-mixed", "host", "host-write-back", "no-tree", "pairs", "tokens"],
)
def test_replies_are_the_same_where_room_is_short(
    tiny_model: LlamaModel, head: Path, source: str, config: dict[str, Any]
) -> None:
    retracted = 0
    for seed in range(2):
        game = Game(seed, ignore_eos=True)
        engine = played(game, tiny_model, head, source, **config)
        retracted += engine.stats.retractions + engine.stats.preemptions
    assert retracted or config["kv_tokens"] > 64


@pytest.mark.parametrize("source", SOURCES)
def test_a_draft_pushes_nobody_out(tiny_model: LlamaModel, head: Path, source: str) -> None:
    """It takes what is free or cached, fewer where that is less, and none where there is nothing."""
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    plain = engine_of(tiny_model, head).generate(prompts, params)
    engine = engine_of(tiny_model, head, speculative=source, kv_tokens=24, draft_tokens=6)
    Guide(engine, replies(prompts, plain), 0.5)
    nobody_is_pushed_out(engine, "a draft pushed a request out")
    heard = listen(engine, TokensDrafted)
    for prompt in prompts:
        engine.add_request(prompt, params)
    require_same(plain, drive(engine))
    sizes = {len(event.tokens) for event in heard}
    assert max(sizes) == 6 and len(sizes) > 1  # and some that had less room


@pytest.mark.parametrize("source", SOURCES)
def test_rejected_slots_are_free_in_the_same_step(tiny_model: LlamaModel, head: Path, source: str) -> None:
    for page in (1, 4):
        engine = engine_of(tiny_model, head, speculative=source, page_size=page)
        Guide(engine, {}, 0.0)
        rejected = 0
        heard = listen(engine, ev.SlotsAllocated, ev.SlotsFreed, DraftVerified)
        engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=12, ignore_eos=True))
        while engine.has_work:
            heard.clear()
            engine.step()
            freed = [
                s for e in heard if isinstance(e, ev.SlotsFreed) and e.cause == "rejected" for s in e.slots
            ]
            for event in heard:
                if isinstance(event, DraftVerified):
                    rejected += event.drafted - event.accepted
                    assert page > 1 or len(freed) == event.drafted - event.accepted
            for request in engine.scheduler.running:
                held = -(-(request.kv_len - request.protected_len) // page) * page
                tree = engine.cache.evictable_size + engine.cache.protected_size
                assert engine.allocator.available == engine.allocator.num_tokens - held - tree
        assert rejected > 3


def test_none_is_drafted_that_could_not_come(tiny_model: LlamaModel, head: Path) -> None:
    """One token always comes without a draft; the last places of a context are never exceeded."""
    engine = engine_of(tiny_model, head, speculative="eagle", max_context=20, draft_tokens=9)
    heard = listen(engine, TokensDrafted)
    for new, prompt in ((0, 5), (1, 5), (2, 5), (3, 5), (10, 10)):
        prompts = [[3 + at for at in range(prompt)]]
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        plain = engine_of(tiny_model, head).generate(prompts, params)
        out = engine.generate(prompts, params)
        assert out[0].token_ids == plain[0].token_ids and len(out[0].token_ids) == new
        drafted = [len(event.tokens) for event in heard]
        assert max(drafted, default=0) <= max(new - 2, 0)
        heard.clear()


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_that_fails_behind_accepted_drafts(tiny_model: LlamaModel, head: Path, source: str) -> None:
    """Its request ends there, with the tokens before; the other one does not notice."""
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    outputs = []
    for speculative in (None, source):
        engine = engine_of(tiny_model, head, speculative=speculative)
        if speculative:
            Guide(engine, replies(prompts, outputs[0]), 1.0)
        engine.add_request(prompts[0], params, token_mask=Mask(fails_at=3))
        engine.add_request(prompts[1], params)
        outputs.append(drive(engine))
    require_same(*outputs)
    failed = next(out for out in outputs[1] if out.error)
    assert len(failed.token_ids) == 3 and "as the test wishes" in failed.error


@pytest.mark.parametrize("source", SOURCES)
def test_aborts_take_drafts_along(tiny_model: LlamaModel, head: Path, source: str) -> None:
    game = Game(3, ignore_eos=True, max_new_tokens=12)
    plain = replies(game.prompts, game.play(engine_of(tiny_model, head)))
    engine = engine_of(tiny_model, head, speculative=source)
    Guide(engine, plain, 0.7)
    rng = random.Random(1)

    def abort(engine: Any) -> None:
        live = [request.group for request in engine.scheduler.requests()]
        if live and rng.random() < 0.2:
            engine.abort(rng.choice(live))
            engine.check()

    outputs = game.play(engine, look=abort)
    aborted = [out for out in outputs if out.finish_reason == "abort"]
    assert aborted
    for out in outputs:
        whole = plain[tuple(game.prompts[int(out.request_id[1:]) - 1]), out.index]
        assert out.token_ids == (whole[: len(out.token_ids)] if out in aborted else whole)
    engine.flush_cache()
    assert engine.allocator.available == engine.allocator.num_tokens


# ---------------------------------------------------------------------- weights, heads, parts


def test_new_weights_are_used_by_the_next_pass(tiny_model: LlamaModel, head: Path) -> None:
    other = LlamaModel(tiny_config(), random_weights(tiny_config(), 5, dtype=torch.float32, device="cpu"))
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    outputs = []
    for speculative in (None, *SOURCES):
        engine = engine_of(tiny_model, head, speculative=speculative, draft_tokens=3)
        engine.generate([[5, 6, 7, 8, 9]], params)
        engine.update_weights(other)
        assert engine.model is other
        outputs.append(engine.generate([[5, 6, 7, 8, 9]], params))
        if speculative == "eagle":
            assert engine.runner.drafter.head.target is other
    for drafted in outputs[1:]:
        require_same(outputs[0], drafted)


@pytest.mark.parametrize(("name", "size"), [("hidden_size", 16), ("head_dim", 4), ("num_key_value_heads", 1)])
def test_a_head_of_another_size_is_refused(
    tiny_model: LlamaModel, tmp_path: Path, name: str, size: int
) -> None:
    folder = write_head(tmp_path / "other", tiny_model, **{name: size})
    with pytest.raises(ValueError, match=rf"{name}.*{size}"):
        engine_of(tiny_model, folder, speculative="eagle")


def test_a_model_without_a_head_of_its_own_is_refused(tiny_model: LlamaModel) -> None:
    with pytest.raises(ValueError, match="draft head has hidden_size"):
        Engine(EngineConfig(kv_tokens=64, speculative="eagle"), model=tiny_model)


def test_a_heads_kv_takes_memory_as_well(
    tiny_model: LlamaModel, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = tiny_model.config
    of_a_layer = 2 * c.kv_heads * c.head_dim * 4 * 1001
    monkeypatch.setattr("minirad.machine.memory_of", lambda device: (c.layers + 0.5) * of_a_layer)
    config = {"kv_tokens": 1000, "page_size": 1, "max_running": 1, "max_context": 9}
    for source in (None, "ngram"):
        engine_of(tiny_model, head, speculative=source, **config)
    with pytest.raises(ValueError, match=r"kv_tokens 1000 takes .* of memory"):
        engine_of(tiny_model, head, speculative="eagle", **config)


def test_parts_that_do_not_draft_are_refused(tiny_model: LlamaModel) -> None:
    parts = engine_parts(EngineConfig(kv_tokens=64), None, tiny_model, None)
    with pytest.raises(ValueError, match=r"speculative: these parts have a .*, which does not draft"):
        Engine(EngineConfig(kv_tokens=64, speculative="ngram"), parts=parts)


def test_numbers_add_up(tiny_model: LlamaModel, head: Path) -> None:
    engine = engine_of(tiny_model, head, speculative="eagle")
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    reply = engine.generate([[5, 6, 7]], params)[0].token_ids
    assert (
        engine.drafts.acceptance_length >= 1 and engine.drafts.tokens == 8
    )  # the first came with the prompt
    guided = engine_of(tiny_model, head, speculative="eagle")
    Guide(guided, {((5, 6, 7), 0): reply}, 1.0)
    guided.generate([[5, 6, 7]], params)
    drafts = guided.drafts
    assert (drafts.passes, drafts.tokens, drafts.drafted, drafts.accepted) == (2, 8, 6, 6)
    assert drafts.acceptance_length == 4.0 and "4.00 tokens a forward pass" in str(drafts)


# ---------------------------------------------------------------------- told and read back


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("page", (1, 4))
def test_a_recording_with_drafts_reads_back(
    tiny_model: LlamaModel, head: Path, source: str, page: int, tmp_path: Path
) -> None:
    path = tmp_path / "drafts.jsonl"
    game = Game(7, requests=5, ignore_eos=True)
    plain = game.play(engine_of(tiny_model, head))
    engine = engine_of(tiny_model, head, speculative=source, page_size=page, kv_tokens=64)
    Guide(engine, replies(game.prompts, plain), 0.6)
    with Recorder(engine, path, keyframe_every=1):
        game.play(engine)
    recording = Recorder.load(path)
    assert recording.missing == ""  # every keyframe is what the events before it lead to
    told = [event for frame in recording for event in frame.events]
    drafted = [event for event in told if isinstance(event, TokensDrafted)]
    verified = [event for event in told if isinstance(event, DraftVerified)]
    assert len(drafted) == len(verified) == engine.drafts.verified > 0
    assert sum(event.accepted for event in verified) == engine.drafts.accepted > 0
    assert drafted[0].describe().endswith(f"drafted ({source})")
    assert f"of {verified[0].drafted} drafted tokens accepted" in verified[0].describe()


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (["TokensDrafted", "R1", [7], [3], "eagle"], "R1: 1 token drafted (eagle)"),
        (["TokensDrafted", "R1.2", [7, 8], [3, 4], "ngram"], "R1.2: 2 tokens drafted (ngram)"),
        (["DraftVerified", "R1", 3, 2, [7, 8, 9]], "R1: 2 of 3 drafted tokens accepted"),
    ],
)
def test_what_is_told_of_drafts(held: list[Any], sentence: str) -> None:
    event = parse_event(held)
    assert event.describe() == sentence and json.loads(json.dumps(event_fields(event))) == held
    with pytest.raises(ValueError, match="fields"):
        parse_event(held[:-1])


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (TokensDrafted("R9", (7,), (3,), "eagle"), "no request R9"),
        (TokensDrafted("R1", (7, 8), (3,), "eagle"), "2 tokens and 1 slots"),
        (TokensDrafted("R1", (7,), (10**6,), "eagle"), "slot 1000000"),
        (DraftVerified("R1", 2, 3, (7,)), "3 of 2 drafts"),
        (DraftVerified("R1", 99, 0, (7,)), "0 of 99 drafts"),
        (DraftVerified("R1", 2, -1, (7,)), "-1 of 2 drafts"),
    ],
)
def test_a_strangers_file_cannot_say_what_does_not_follow(
    tiny_model: LlamaModel, head: Path, wrong: Any, problem: str
) -> None:
    engine = engine_of(tiny_model, head, speculative="ngram")
    engine.add_request([5, 6, 7], SamplingParams(max_new_tokens=8))
    engine.step()
    with pytest.raises(ValueError, match=problem):
        CheckedReplay(engine.snapshot()).apply(wrong)
