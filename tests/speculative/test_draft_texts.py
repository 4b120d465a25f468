"""Drafts where replies are texts: stop texts, grammars, streams, the server's likeliest tokens.

The classroom Llama with its own head and with what is looked up, and drafts that are as good as a test wants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draft_support import SOURCES, Guide, require_same, watch_ends
from prometheus_client.parser import text_string_to_metric_families
from server_support import ASK, Collected, Desk, new_engine
from support import ColdReference, drive

from minirad.config import SamplingParams
from minirad.grammar import json_mask, regex_mask
from minirad.server.likeliest import likeliest
from minirad.server.service import Service, Spec

TEXTS = (
    ASK,
    "user\nWhat does a pig say?\nassistant\n",
    "user\nRepeat: red fox blue bird red fox blue\nassistant\n",
    "one two three four one two three four one two",
)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}'


@pytest.fixture(scope="module")
def plain() -> Any:
    return new_engine(kv_tokens=1024, max_running=8)


@pytest.fixture(scope="module", params=SOURCES)
def drafted(request: pytest.FixtureRequest, plain: Any) -> Any:
    return new_engine(
        plain.model, plain.tokenizer, kv_tokens=1024, max_running=8, speculative=request.param, page_size=4
    )


@pytest.fixture
def guided(drafted: Any) -> Any:
    """Called with what the replies will be; the drafter is its old self again afterwards."""
    drafter = drafted.runner.drafter
    watch_ends(drafted)
    yield lambda known, right=0.9: Guide(drafted, known, right)
    for name in ("draft", "propose"):
        vars(drafter).pop(name, None)
    del drafted.results.finish


def known(engine: Any, outputs: Any, texts: Any = TEXTS) -> Any:
    """What a Guide knows, of outputs of `generate` in the order of the texts."""
    prompts = [tuple(engine.encode(text).tolist()) for text in texts]
    first = min(int(out.request_id[1:]) for out in outputs)
    return {(prompts[int(out.request_id[1:]) - first], out.index): list(out.token_ids) for out in outputs}


def named_alike(outputs: Any) -> list[Any]:
    """Two engines have given their requests other names: counted from the first one."""
    first = min(int(out.request_id[1:]) for out in outputs)
    return [replace(out, request_id=f"R{int(out.request_id[1:]) - first}") for out in outputs]


def test_real_drafts_change_no_reply(plain: Any, drafted: Any) -> None:
    before = drafted.drafts.accepted
    for params in (
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=30, temperature=0.7, seed=3, n=2, ignore_eos=True),
    ):
        outputs = [named_alike(engine.generate(list(TEXTS), params)) for engine in (plain, drafted)]
        require_same(*outputs)
        drafted.check()
    assert drafted.drafts.accepted > before
    assert drafted.drafts.tokens_a_pass > (1.5 if drafted.config.speculative == "eagle" else 1)


def test_stop_texts_end_inside_an_accepted_run(plain: Any, drafted: Any, guided: Any) -> None:
    long = SamplingParams(max_new_tokens=24, ignore_eos=True)
    replies = plain.generate(list(TEXTS), long)
    guided(known(plain, replies), 1.0)  # as if no stop text were there: drafts go on behind it
    stops = [out.text[at : at + 3] for out in replies for at in (9,) if out.text[at : at + 3].strip()]
    ended = 0
    for stop in dict.fromkeys(stops):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop, "never said"))
        outputs = [named_alike(engine.generate(list(TEXTS), params)) for engine in (plain, drafted)]
        require_same(*outputs)
        drafted.check()
        ended += sum(out.finish_reason == "stop" for out in outputs[1])
    assert ended >= len(stops) > 2


def test_end_tokens_and_stop_tokens_end_inside_an_accepted_run(plain: Any, drafted: Any, guided: Any) -> None:
    long = SamplingParams(max_new_tokens=16, ignore_eos=True)
    replies = plain.generate(list(TEXTS), long)
    guided(known(plain, replies), 1.0)
    for at in (2, 7):
        stop = tuple({out.token_ids[at] for out in replies})
        for params in (
            SamplingParams(max_new_tokens=16, stop_token_ids=stop, ignore_eos=True),
            SamplingParams(max_new_tokens=16, stop_token_ids=stop[:1]),
        ):
            require_same(*(named_alike(each.generate(list(TEXTS), params)) for each in (plain, drafted)))
            drafted.check()


def test_a_stream_says_each_token_and_ends(plain: Any, drafted: Any, guided: Any) -> None:
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, n=2, temperature=0.9, seed=4)
    guided(known(plain, plain.generate([ASK], params), [ASK]))
    said = [[], []]
    for at, engine in enumerate((plain, drafted)):
        for token in engine.stream(ASK, params):
            said[at].append((token.index, token.token_id, token.text, token.finish_reason))
    assert len(said[0]) == len(said[1])
    for index in range(2):
        assert [each for each in said[0] if each[0] == index] == [
            each for each in said[1] if each[0] == index
        ]
    for _ in zip(range(3), drafted.stream(ASK, params), strict=False):
        pass  # left in the middle of an accepted run
    drafted.check()
    assert not drafted.has_work


@pytest.mark.parametrize("kind", ["regex", "json"])
def test_a_grammar_is_asked_for_each_token(plain: Any, drafted: Any, guided: Any, kind: str) -> None:
    def mask() -> Any:
        more = plain.tokenizer, plain.eos_ids, plain.model.config.vocab_size
        return (
            regex_mask(r"[a-z]{3,8}( [a-z]{1,9}){2}\.", *more)
            if kind == "regex"
            else json_mask(SCHEMA, *more)
        )

    params = SamplingParams(max_new_tokens=40)
    outputs: list[Any] = []
    for engine in (plain, drafted):
        if outputs:
            guided(known(plain, outputs[0]))
        for text in TEXTS:
            engine.add_request(engine.encode(text), params, token_mask=mask())
        outputs.append(named_alike(drive(engine)))
        engine.check()
    require_same(*outputs)
    assert any(out.finish_reason == "stop" for out in outputs[1]) and not any(out.error for out in outputs[1])


def test_the_servers_likeliest_tokens_are_told_for_each_token(plain: Any, drafted: Any, guided: Any) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0.7, n=2, seed=5, logprob_start=0, ignore_eos=True)
    guided(known(plain, plain.generate([ASK], params), [ASK]))
    before, service = drafted.drafts.accepted, Service(drafted)
    prompt = drafted.encode(ASK)
    got = Collected(service, Spec((prompt,), (params,), stream=True, tops=3))
    other = Collected(service, Spec((prompt,), (params,), stream=True))
    while service.turn():
        pass
    assert drafted.drafts.accepted > before
    reference = ColdReference(plain.model)
    for index in range(2):
        output = got.of(index)[-1].output
        wanted = likeliest(reference.logits([*prompt.tolist(), *output.token_ids]), 3)
        pieces = [piece for piece in got.of(index) if piece.token is not None]
        assert [piece.token for piece in pieces] == output.token_ids == other.of(index)[-1].output.token_ids
        assert [[token for token, _ in piece.top] for piece in pieces] == [
            [token for token, _ in top] for top in wanted[len(prompt) - 1 : -1]
        ]
        for at, top in got.of(index)[-1].prompt_tops.items():
            assert [token for token, _ in top] == [token for token, _ in wanted[at - 1]]
    drafted.check()


def test_metrics_say_what_drafts_yield(drafted: Any) -> None:
    desk = Desk(drafted)
    Collected(desk.service, Spec((drafted.encode(TEXTS[1]),), (SamplingParams(max_new_tokens=8),)))
    desk.turns()
    said = {
        sample.name: sample.value
        for family in text_string_to_metric_families(desk.ask("/metrics").text)
        for sample in family.samples
        if not sample.labels
    }
    drafts = drafted.drafts
    assert said["minirad_drafted_tokens_total"] == drafts.drafted > 0
    assert said["minirad_accepted_tokens_total"] == drafts.accepted
    assert said["minirad_decode_passes_total"] == drafts.passes
    assert said["minirad_acceptance_length"] == pytest.approx(drafts.acceptance_length)
    assert said["minirad_tokens_per_pass"] == pytest.approx(drafts.tokens_a_pass)


def test_generate_prints_what_drafts_yield(capsys: pytest.CaptureFixture[str]) -> None:
    from minirad.__main__ import main

    words = ["generate", "--speculative", "eagle", "--max-new-tokens", "8", "What does a pig say?"]
    assert main(words) == 0
    assert " tokens a forward pass; " in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("[\n") and " tokens a forward pass; " in err
