"""Jump-forward under real grammars, with the classroom Llama: regexes, schemas, stop texts, the server."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs the extra 'grammar'")

from draft_support import require_same, watch_ends
from server_support import Desk, new_engine
from support import drive, listen

from minirad.__main__ import main
from minirad.config import SamplingParams
from minirad.frontend import State, run_many
from minirad.grammar import MOST_LOOKED, json_mask, regex_mask
from minirad.model.classroom import corpus
from minirad.observe.draft_events import TokensForced

PERSON = (
    r'\{"name": "[A-Z][a-z]{1,9}", "age": \d{1,2}, "lives in": "(Paris|Rome|Lima)", '
    r'"says": "it\'s (a|the) end"\}'
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "continent": {"enum": ["Europe", "Asia", "Africa"]},
            "address": {
                "type": "object",
                "properties": {"street": {"const": "the long and winding road"}, "no": {"type": "boolean"}},
                "required": ["street", "no"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "continent", "address"],
        "additionalProperties": False,
    }
)
GRAMMARS = {
    "person": ("regex", PERSON),
    "schema": ("json", SCHEMA),
    "all": ("regex", r"The capital of France is Paris\."),  # nothing is left to choose
    "quotes": ("regex", r"(\d{1,3}|-|\\){1,2}('singname|'s end|\"é日本 \" x){1,2}!"),
    "none": ("regex", r"[a-z]{3,8}( [a-z]{1,9}){2}\."),
}
QUESTIONS = ("Write JSON for Ada, age 42.", "What is the capital of France?", "Hello")


@pytest.fixture(scope="module")
def plain() -> Any:
    return new_engine(kv_tokens=2048, max_running=8)


DRAFTS = [None, "ngram", "eagle"]
BY_ITSELF = [None, *(pytest.param(source, marks=pytest.mark.slow) for source in DRAFTS[1:])]


@pytest.fixture(scope="module", params=DRAFTS)
def jumping(request: pytest.FixtureRequest, plain: Any) -> Any:
    engine = new_engine(
        plain.model, plain.tokenizer, kv_tokens=2048, max_running=8, speculative=request.param, page_size=4,
        jump_forward=True,
    )  # fmt: skip
    watch_ends(engine)
    return engine


def mask_of(engine: Any, name: str) -> Any:
    kind, grammar = GRAMMARS[name]
    make = regex_mask if kind == "regex" else json_mask
    return make(grammar, engine.tokenizer, engine.eos_ids, engine.runner.vocab_size)


def asked(engine: Any, name: str, params: SamplingParams) -> Any:
    """Replies to all questions under a grammar, by the number of the question."""
    ids = {}
    for at, question in enumerate(QUESTIONS):
        prompt = corpus.chat_text([corpus.message("user", question)], add_generation_prompt=True)
        ids[engine.add_request(prompt, params, token_mask=mask_of(engine, name))] = f"R{at}"
    return [replace(out, request_id=ids[out.request_id]) for out in drive(engine)]


ASKED: dict[Any, Any] = {}


def asked_before(plain: Any, name: str, params: SamplingParams) -> Any:
    """The same of the engine that takes one token at a time, which is asked once."""
    if (name, params) not in ASKED:
        ASKED[name, params] = asked(plain, name, params)
    return ASKED[name, params]


# ---------------------------------------------------------------------- what is forced


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_forced_is_all_that_the_mask_allows(plain: Any, name: str) -> None:
    """Along random replies: each forced token is the only one allowed, and behind them there is a choice."""
    told = 0
    for seed in range(6):
        rng, reply = random.Random(seed), []
        mask, other = mask_of(plain, name), mask_of(plain, name)
        while True:
            forced = mask.forced(reply, 100)
            assert forced[:3] == mask.forced(reply, 3) and not mask.forced(reply, 0)
            for token in forced:
                assert other(reply).nonzero()[0].tolist() == [token]
                reply.append(token)
            allowed = mask(reply).nonzero()[0].tolist()
            assert allowed == other(reply).nonzero()[0].tolist()
            assert len(allowed) > 1 or set(allowed) <= set(plain.eos_ids), "more was forced"
            told += len(forced)
            reply.append(rng.choice(allowed))
            if reply[-1] in plain.eos_ids or len(reply) > 90:
                break
    assert told > 20 or name == "none"


def test_where_llguidance_would_cut_otherwise_it_is_asked_again(plain: Any) -> None:
    """Behind "-" the bytes "-'singname" are cut otherwise than behind "'": the reply is as masks have it."""
    pattern = r"x-'singname"
    more = (plain.tokenizer, plain.eos_ids, plain.runner.vocab_size)
    mask, other = regex_mask(pattern, *more), regex_mask(pattern, *more)
    at_once = regex_mask(pattern, *more)._matcher.compute_ff_tokens()
    by_masks: list[int] = []
    while (token := int(other(by_masks).argmax())) not in plain.eos_ids:
        by_masks.append(token)
    assert mask.forced([], 100) == by_masks
    assert plain.tokenizer.decode(at_once) == plain.tokenizer.decode(by_masks) == "x-'singname"


def test_a_mask_goes_back_and_forth_between_replies(plain: Any) -> None:
    mask = mask_of(plain, "person")
    begin = mask.forced([], 100)
    assert plain.tokenizer.decode(begin) == '{"name": "'
    assert mask.forced(begin[:2], 100) == begin[2:] and mask(begin).sum() > 10
    assert mask.forced([], 2) == begin[:2]
    with pytest.raises(ValueError, match="cannot begin a match"):
        mask.forced([*begin[:2], begin[0]], 5)
    for _ in range(2):  # it has given up for good, and says so each time
        with pytest.raises(ValueError, match="cannot begin a match"):
            mask([])


def test_a_very_long_run_is_told_in_parts(plain: Any) -> None:
    rng = random.Random(0)
    text = "".join(rng.choice("abcdefg hij klm") for _ in range(4000))
    mask = regex_mask(text, plain.tokenizer, plain.eos_ids, plain.runner.vocab_size)
    forced = mask.forced([], 10**6)
    assert 5 < len(forced) < 100 and text.startswith(plain.tokenizer.decode(forced))
    left = len(plain.tokenizer.tokenize(text)) - len(forced)  # each look cuts as many as this, at least
    assert (len(forced) - 1) * left < MOST_LOOKED < 2 * len(forced) * left


# ---------------------------------------------------------------------- the same replies


GREEDY = SamplingParams(max_new_tokens=72)
TWO = SamplingParams(max_new_tokens=60, temperature=0.9, seed=4, n=2, logprob_start=0)
CUT = SamplingParams(max_new_tokens=23, temperature=1.5, top_k=20, seed=2, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "params"),
    [("person", GREEDY), ("person", TWO), ("person", CUT), ("schema", GREEDY), ("schema", TWO), ("all", TWO),
     ("quotes", GREEDY), ("quotes", CUT), ("none", TWO)],
)  # fmt: skip
def test_replies_are_those_without_it(plain: Any, jumping: Any, name: str, params: SamplingParams) -> None:
    forced, passes = jumping.drafts.forced, jumping.drafts.passes
    wanted, outputs = asked_before(plain, name, params), asked(jumping, name, params)
    require_same(wanted, outputs)
    assert not any(out.error for out in outputs)
    if name != "none":
        assert jumping.drafts.forced - forced > 24
        assert jumping.drafts.passes - passes < 0.7 * sum(len(out.token_ids) - 1 for out in outputs)


def test_a_wholly_forced_reply_takes_two_passes(plain: Any, jumping: Any) -> None:
    """One over the prompt, which brings its first token; one over all others, which brings the end."""
    before = jumping.steps
    outputs = asked(jumping, "all", SamplingParams(max_new_tokens=40))
    assert jumping.steps - before == 2
    assert {out.text for out in outputs} == {"The capital of France is Paris."}
    assert {out.finish_reason for out in outputs} == {"stop"}


@pytest.mark.parametrize(
    ("name", "stop"),
    [("person", "lives"), ("person", ("it's", '", "age"')), ("schema", '":"'), ("schema", "road"),
     ("schema", "never said")],
)  # fmt: skip
def test_stop_texts_end_inside_a_forced_run(plain: Any, jumping: Any, name: str, stop: Any) -> None:
    params = SamplingParams(max_new_tokens=80, temperature=0.8, seed=6, stop=stop)
    wanted, outputs = asked_before(plain, name, params), asked(jumping, name, params)
    require_same(wanted, outputs)
    assert stop == "never said" or all(out.finish_reason == "stop" for out in outputs)


@pytest.mark.parametrize("config", [{}, {"speculative": "ngram"}], ids=["alone", "ngram"])
def test_stop_texts_where_room_is_short(plain: Any, config: dict[str, Any]) -> None:
    """What is forced is looked through for the stop text, and then does not all come at once."""
    params = SamplingParams(max_new_tokens=60, stop=("says",), ignore_eos=True)
    wanted = asked_before(plain, "person", params)
    for page in (1, 4):
        engine = new_engine(
            plain.model, plain.tokenizer, kv_tokens=80, max_running=3, page_size=page, jump_forward=True,
            poison_freed=True, **config,
        )  # fmt: skip
        forced = listen(engine, TokensForced)
        require_same(wanted, asked(engine, "person", params))
        assert engine.stats.retractions and min(len(event.tokens) for event in forced) < 4
        engine.flush_cache()


def test_a_grammar_that_becomes_too_large_ends_its_request_where_it_would_without(
    plain: Any, jumping: Any
) -> None:
    """Found too large by its mask at some place, whatever was forced before."""

    class Limited:
        """A grammar's mask that gives up at a place."""

        def __init__(self, mask: Any, at: int) -> None:
            self.mask, self.at = mask, at

        def __call__(self, output: list[int]) -> Any:
            if len(output) >= self.at:
                raise ValueError("too large, as the test wishes")
            return self.mask(output)

        def forced(self, output: list[int], most: int) -> list[int]:
            return self.mask.forced(output, min(most, self.at - len(output)))  # type: ignore[no-any-return]

    for at in (1, 4, 12):
        outputs = []
        for engine in (plain, jumping):
            engine.add_request("Hello", SamplingParams(max_new_tokens=30),
                               token_mask=Limited(mask_of(engine, "person"), at))  # fmt: skip
            outputs.append(drive(engine)[0])
        assert outputs[0].token_ids == outputs[1].token_ids and len(outputs[1].token_ids) == at
        assert all("too large, as the test wishes" in out.error for out in outputs)


# ---------------------------------------------------------------------- where masks are made


async def record(s: State, question: str, temperature: float) -> str:
    s.user(question)
    first = await s.gen("record", regex=PERSON, max_new_tokens=80, temperature=temperature)
    s.user("Hello")
    await s.gen("again", regex=r"(Hi|Hello), I am an? [a-z]+\.", max_new_tokens=30)
    return first


@pytest.mark.parametrize("jumping", BY_ITSELF, indirect=True)
def test_programs_say_the_same(plain: Any, jumping: Any) -> None:
    forced = jumping.drafts.forced
    jobs = [(record, question, temperature) for question in QUESTIONS for temperature in (0.0, 0.8)]
    said = [run_many(engine, jobs) for engine in (plain, jumping)]
    assert [out.result() for out in said[0]] == [out.result() for out in said[1]]
    assert [out.state["again"] for out in said[0]] == [out.state["again"] for out in said[1]]
    assert jumping.drafts.forced - forced > 6 * 20


@pytest.mark.parametrize("jumping", BY_ITSELF, indirect=True)
def test_the_server_answers_the_same(plain: Any, jumping: Any) -> None:
    """response_format, with the likeliest tokens of each place, streamed and whole."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": json.loads(SCHEMA)}}
    answers: list[Any] = []
    for engine in (plain, jumping):
        desk = Desk(engine)
        with desk.running():
            body = {"response_format": schema, "seed": 3, "max_tokens": 80}
            more = [
                {"logprobs": True, "top_logprobs": 3}, {"temperature": 1.0, "n": 2},
                {"stop": ["winding"], "stream": True},
                {"response_format": {"type": "json_object"}, "max_tokens": 20},
            ]  # fmt: skip
            answers.append([])
            for each in more:
                forced = getattr(engine, "drafts", jumping.drafts).forced
                answers[-1].append(desk.chat("Write JSON for Ada, age 42.", **{**body, **each}))
                if engine is jumping and "max_tokens" not in each:
                    assert engine.drafts.forced - forced > 15, each
    for one, other in zip(*answers, strict=True):
        assert simple(one) == simple(other)
    text = answers[1][0]["choices"][0]["message"]["content"]
    assert json.loads(text)["address"]["street"] == "the long and winding road"


def test_the_servers_metrics_count_forced_tokens(jumping: Any) -> None:
    asked(jumping, "all", GREEDY)
    said = Desk(jumping).ask("/metrics").text
    assert f"minirad_forced_tokens_total {float(jumping.drafts.forced)}" in said and jumping.drafts.forced


def test_generate_takes_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--regex", PERSON, "--max-new-tokens", "80", "Write JSON for Ada, age 42."]
    said = []
    for more in ([], ["--jump-forward"], ["--jump-forward", "--speculative", "ngram"]):
        assert main([*words, *more, "--json"]) == 0
        out, err = capsys.readouterr()
        said.append(json.loads(out)[0]["text"])
        assert ("forced by a grammar" in err) == bool(more)
    assert json.loads(said[0])["name"] == "Ada" and said[1:] == said[:1] * 2
    assert main(["generate", "--regex", "(", "Hello"]) == 2
    assert "regex '(' cannot be used" in capsys.readouterr().err.splitlines()[-1]
    assert main(["generate", "--dummy-weights", "smollm2-135m", "--regex", "a", "1 2 3"]) == 2
    assert "--regex needs a tokenizer" in capsys.readouterr().err.splitlines()[-1]


def simple(answer: Any) -> Any:
    """An answer without its id and times, numbers rounded: one pass over many tokens rounds otherwise."""
    if isinstance(answer, list):
        return [simple(each) for each in answer]
    if isinstance(answer, dict):
        gone = ("id", "created", "logprob", "prompt_tokens_details")
        return {name: simple(each) for name, each in answer.items() if name not in gone}
    return answer
