"""A reply under a regular expression matches it, or, where it was cut off, begins a match."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import regex as partial  # a dependency of transformers'; `re` cannot tell what begins a match
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="needs the extra 'grammar'")

from minirad import grammar
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.frontend import Outcome, State, run, run_many
from minirad.grammar import RegexMask, regex_mask
from minirad.model.classroom import corpus

PATTERNS = (
    r"[A-Z][a-z]+",
    r"(yes|no|maybe)",
    r"\d{1,3}( [+-] \d{1,3}){0,2} = \d+\.",
    r"One animal is the (cat|dog|horse)\.",
    r'\{"name": "[A-Z][a-z]{1,9}", "age": \d{1,2}\}',
    r"(ab|abc)*d?",
    r"[^\n]{5,12}",
    r"(é|ü|日本)+!",
    r"a*",
)
QUESTIONS = ("Name an animal.", "What is 3 + 4?", "Write JSON for Ada, age 7.", "Hello")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(kv_tokens=1024))


async def constrained(s: State, question: str, pattern: str, max_new_tokens: int, temperature: float) -> str:
    s.system(corpus.SYSTEM_PROMPT)
    s.user(question)
    return await s.gen("reply", regex=pattern, max_new_tokens=max_new_tokens, temperature=temperature)


def require_match(outcome: Outcome[str], pattern: str) -> None:
    said = outcome.state.said("reply")
    assert said.text == outcome.value
    if said.finish_reason == "stop":
        assert partial.fullmatch(pattern, said.text), said
    else:
        assert said.finish_reason == "length"
        text = said.text.rstrip("\ufffd")  # a character that was cut
        assert partial.fullmatch(pattern, text, partial=True), said


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pattern=st.sampled_from(PATTERNS), question=st.sampled_from(QUESTIONS),
    max_new_tokens=st.integers(1, 24), temperature=st.sampled_from((0.0, 0.8, 3.0)),
    seed=st.integers(0, 99),
)  # fmt: skip
@example(pattern=PATTERNS[4], question=QUESTIONS[2], max_new_tokens=40, temperature=0.0, seed=0)
@example(pattern=PATTERNS[7], question=QUESTIONS[3], max_new_tokens=2, temperature=3.0, seed=1)
def test_a_reply_matches_or_begins_a_match(
    engine: Engine, pattern: str, question: str, max_new_tokens: int, temperature: float, seed: int
) -> None:
    args = (question, pattern, max_new_tokens, temperature)
    require_match(run(engine, constrained, *args, seed=seed), pattern)
    engine.check()


def test_the_mask_leads_to_what_the_model_knows(engine: Engine) -> None:
    json = run(engine, constrained, QUESTIONS[2], PATTERNS[4], 40, 0.0)
    assert json.value == '{"name": "Ada", "age": 7}'
    assert run(engine, constrained, QUESTIONS[0], PATTERNS[3], 24, 0.0).value in {
        f"One animal is the {animal}." for animal in ("cat", "dog", "horse")
    }


def test_masks_in_one_batch_do_not_mix_and_survive_retraction() -> None:
    engine = Engine(EngineConfig(kv_tokens=96, max_running=8))
    retracted: list[str] = []
    step = engine.step

    def watched():  # type: ignore[no-untyped-def]
        report = step()
        retracted.extend(report.retracted)
        return report

    engine.step = watched  # type: ignore[method-assign]
    pattern = r"[^\n]{30,60}"
    patterns = [*[pattern] * 3, PATTERNS[0], PATTERNS[1]]
    asked = zip((*QUESTIONS, "Bye"), patterns, strict=True)
    outcomes = run_many(engine, [(constrained, question, each, 40, 0.9) for question, each in asked])
    for outcome, each in zip(outcomes, patterns, strict=True):
        require_match(outcome, each)
    assert retracted
    engine.check()


@pytest.mark.parametrize("pattern", ["(yes|no)", "[0-9]{2}", "[a-z]+", "a*"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_match_to_the_end_is_an_end_also_where_end_tokens_are_ignored(
    engine: Engine, pattern: str, ignore_eos: bool
) -> None:
    mask = regex_mask(pattern, engine.tokenizer, engine.eos_ids, engine.model.config.vocab_size)
    params = SamplingParams(max_new_tokens=24, ignore_eos=ignore_eos, n=2, temperature=1.0, seed=1)
    engine.add_request("Hello", params, token_mask=mask)
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
        engine.check()
    assert [output.error for output in outputs] == ["", ""]
    for output in outputs:
        assert output.finish_reason == ("stop" if output.token_ids[-1] in engine.eos_ids else "length")
        assert partial.fullmatch(pattern, output.text)


def test_one_mask_serves_several_samples(engine: Engine) -> None:
    """It goes back to what two samples have in common."""
    mask = RegexMask(r"\d{2}-[a-z]{2}", engine.tokenizer, (2,), 1024)
    request = engine.add_request(
        "Hello", SamplingParams(max_new_tokens=16, temperature=2.0, n=4, seed=3), token_mask=mask
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
    texts = [output.text for output in outputs if output.request_id == request]
    assert len(texts) == 4 and len(set(texts)) > 1
    assert all(partial.fullmatch(r"\d{2}-[a-z]{2}", text) for text in texts)


def test_the_end_is_allowed_exactly_where_the_reply_matches(engine: Engine) -> None:
    mask = RegexMask("ab?", engine.tokenizer, (2, 7), 1024)
    a, b = (engine.tokenizer.encode(letter)[0] for letter in "ab")
    assert not mask([])[[2, 7]].any() and mask([])[a]
    assert mask([a])[[2, 7, b]].all()
    assert mask([a, b]).nonzero()[0].tolist() == [2, 7]
    with pytest.raises(ValueError, match="cannot begin a match"):
        mask([b])


@pytest.mark.parametrize("pattern", ["(a", r"(a)\1", "a(?=b)"])
def test_a_pattern_that_cannot_be_is_refused_by_name(engine: Engine, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"regex .* cannot be used: "):
        run(engine, constrained, "Hello", pattern, 4, 0.0)


def test_without_the_extra_the_program_is_told_what_to_install(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"minirad\[grammar\]"):
        run(engine, constrained, "Hello", "a", 4, 0.0)


@pytest.mark.parametrize("words", [["--jump-forward"], ["--workload", "records"]])
def test_without_the_extra_no_empty_page_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    from viz.live import main

    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert main([*words, "--export", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert "pip install 'minirad[grammar]'" in said and said.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_page_whose_programs_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from viz.web.runs import Run
    from viz.web.settings import Settings

    monkeypatch.setitem(sys.modules, "llguidance", None)
    shown = Run(1, Settings("records"), None)
    while not shown.idle:
        shown.advance()
    assert shown.refused.startswith("programs that failed: 6; json record 1 failed: regex needs llguidance")
    assert shown.page.refused == shown.recorder.header["notes"]["refused"] == shown.refused
    shown.close()


@pytest.mark.parametrize(
    ("found", "fine"), [("1.6.1", False), ("1.8.0", False), ("1.10.2", True), ("2.0", True)]
)
def test_one_that_a_short_schema_makes_fill_the_memory_is_not_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, found: str, fine: bool
) -> None:
    monkeypatch.setattr(grammar, "version", lambda name: found)
    with (
        contextlib.nullcontext()
        if fine
        else pytest.raises(ModuleNotFoundError, match=f"newer .* than {found}")
    ):
        run(engine, constrained, "Hello", "a", 4, 0.0)


@pytest.mark.parametrize(
    "bound", ["minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"]
)
def test_large_bounds_of_a_schema_cost_nothing(engine: Engine, bound: str) -> None:
    kind = {"Items": "array", "Length": "string", "Properties": "object"}[bound[3:]]
    tokenizer, vocab = engine.tokenizer, engine.runner.vocab_size
    mask = grammar.json_mask(json.dumps({"type": kind, bound: 10**9}), tokenizer, engine.eos_ids, vocab)
    assert mask([]).any()
