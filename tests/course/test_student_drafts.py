"""Lesson 13's functions in a real engine: right ones change nothing, of others it is said what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsers import browser, tab

from lessons.grading.drafting import PARTS, YourCode, Yours, is_drafting, student_engine
from lessons.grading.spec import find_folder
from minirad import Engine, EngineConfig, Recorder, SamplingParams
from minirad.errors import InvariantError
from minirad.observe.events import StepEnded
from minirad.workloads import chat_prompt

__all__ = ["browser", "tab"]  # fixtures

LESSON = find_folder("13")
SOLUTION = LESSON / "solution.py"
PROMPTS = [
    chat_prompt(text) for text in ("Repeat: apple river stone cloud", "Write JSON for Ada, age 42.", "Hello")
]


@pytest.fixture(scope="module")
def classroom() -> Any:
    engine = Engine(EngineConfig(kv_tokens=64, device="cpu"))
    return {"model": engine.model, "tokenizer": engine.tokenizer}


def config_of(**more: Any) -> EngineConfig:
    return EngineConfig(**{"device": "cpu", "kv_tokens": 256, "speculative": "ngram", **more})


def with_source(tmp_path: Path, source: str, name: str = "mine.py") -> Path:
    """A student's file that has just this."""
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    return path


def told(engine: Engine, prompts: list[str] = PROMPTS, **more: Any) -> tuple[list[str], list[Any]]:
    """Replies, and all events."""
    params = SamplingParams(max_new_tokens=16, **more)
    with Recorder(engine) as recording:
        texts = [out.text for lora in ("", *engine.config.lora) for out in say(engine, prompts, params, lora)]
    events = [event for frame in recording for event in frame.events]
    return texts, [replace(e, seconds=0.0) if isinstance(e, StepEnded) else e for e in events]


def say(engine: Engine, prompts: list[str], params: SamplingParams, lora: Any) -> list[Any]:
    return engine.generate(prompts, params, lora=lora[0] if lora else "")


@pytest.mark.parametrize("path", ["solution.py", "alternative.py"])
@pytest.mark.parametrize(
    "config",
    [
        {"page_size": 4},
        {"speculative": "eagle", "chunk_tokens": 20, "draft_tokens": 3},
        {"speculative": None, "bigram_keys": True, "page_size": 2, "kv_tokens": 96},
        {"lora": ["capitals", "oneword"], "kv_tokens": 128},
    ],
    ids=["ngram", "eagle", "pairs", "adapters"],
)
def test_right_functions_change_nothing(classroom: Any, path: str, config: dict[str, Any]) -> None:
    config = config_of(**config)
    yours = Yours.read([LESSON / path])
    assert set(yours.functions) == set(PARTS)
    own = told(Engine(config, **classroom))
    assert told(student_engine(config, yours, **classroom)) == own
    assert len(own[1]) > 100


def test_samples_of_one_prompt_have_the_students_pairs(classroom: Any) -> None:
    config = config_of(speculative=None, bigram_keys=True, page_size=2)
    params = {"n": 3, "temperature": 1.0, "seed": 4}
    own = told(Engine(config, **classroom), PROMPTS[:1], **params)
    assert told(student_engine(config, Yours.read([SOLUTION]), **classroom), PROMPTS[:1], **params) == own


def test_what_is_not_written_is_the_engines_own(tmp_path: Path, classroom: Any) -> None:
    stubs = LESSON / "exercise.py"
    assert is_drafting(stubs) and not is_drafting(find_folder("02") / "exercise.py")
    with pytest.raises(ValueError, match=r"nothing is written yet.*space_of, to_pairs"):
        Yours.read([stubs])
    with pytest.raises(ValueError, match="cannot be loaded: SyntaxError"):
        Yours.read([with_source(tmp_path, "def accept(")])
    todo = 'def to_pairs(tokens):\n    raise NotImplementedError("todo: to_pairs")\n'
    source = SOLUTION.read_text(encoding="utf-8").partition("def cached_tokens")[0]
    start, stop = source.index("def to_pairs"), source.index("def to_tokens")
    yours = Yours.read([with_source(tmp_path, source[:start] + todo + source[stop:])])
    config = config_of(speculative="eagle")
    written, missing = "driven by space_of, commit", "to_pairs, accept, room_for, roll_back"
    assert yours.note(config) == f"{written}; not written yet, so the engine's own: {missing}"
    assert yours.note(config_of(speculative=None)) == "driven by space_of"
    assert told(student_engine(config, yours, **classroom)) == told(Engine(config, **classroom))


def test_a_key_that_says_too_little_shares(classroom: Any, tmp_path: Path) -> None:
    """A wrong namespace is used, too: oneword answers with what capitals has computed."""
    config = config_of(lora=["capitals", "oneword"], speculative=None)
    for source, hits in (("return None", True), ("return (salt, loaded.get(adapter))", False)):
        yours = Yours.read([with_source(tmp_path, f"def space_of(salt, adapter, loaded):\n    {source}\n")])
        engine = student_engine(config, yours, **classroom)
        outs = [
            engine.generate([PROMPTS[2]], SamplingParams(max_new_tokens=8), lora=name)[0]
            for name in ("", "capitals", "oneword", "capitals")
        ]
        assert [bool(out.cached_tokens) for out in outs] == [False, hits, hits, True]


def test_a_wrong_accept_goes_on_and_is_heard(classroom: Any, tmp_path: Path) -> None:
    source = "def accept(draft, chosen, ends):\n    return [*draft, chosen[-1]], len(draft)\n"
    engine = student_engine(config_of(), Yours.read([with_source(tmp_path, source)]), **classroom)
    engine.runner.drafter.draft = lambda requests, counts: [[7] * count for count in counts]
    engine.runner.drafter.propose = lambda request, most: most
    (text,), _ = told(engine, PROMPTS[:1])
    assert engine.drafts.accepted == engine.drafts.drafted > 0
    assert engine.encode(text).tolist().count(7) > 4


WRONG = {
    "def accept(draft, chosen, ends): return 1 / 0": "your accept raised ZeroDivisionError",
    "def accept(draft, chosen, ends): pass": r"your accept returned None: not \(tokens, kept\)",
    "def accept(draft, chosen, ends): return list(chosen), 0": "your accept returned .* one token more joins",
    "def accept(draft, chosen, ends): return [10**6], 0": "tokens are 0 to ",
    "def room_for(wanted, *rest): return wanted + 1": "your room_for returned",
    "def room_for(*rest): return None": "your room_for returned None",
    "def roll_back(row, length, kept, page): return row": "your roll_back returned",
    "def roll_back(row, length, kept, page): return row, []": "of the row .* the first .* slots go on",
    "def roll_back(row, length, kept, page): return row[:length + kept], row": "can be given up",
    "def roll_back(row, length, kept, page): return row[:length + kept], []": "after your roll_back",
    "def space_of(*rest): return []": r"your space_of returned \[\]: it cannot be hashed",
    "def to_pairs(tokens): return tokens": "not a list of pairs",
    "def to_pairs(tokens): return [(t, -1) for t in tokens]": "tokens are 0 to",
    "def to_pairs(tokens): return list(zip(tokens, [*tokens[1:], 0]))": "slots have KV",
    "def commit(tokens, row, page): return []": r"not \(pairs, slots, tail\)",
    "def commit(tokens, row, page): return [(1, 1)], row, []": "these units have the slots",
    "def commit(tokens, row, page): n = 9 * (len(row) < 20); return p(tokens)[:n], row[:n], row[n:]": (
        "9 are the tree's already"
    ),
}


@pytest.mark.parametrize("source", WRONG)
def test_nonsense_ends_the_run_with_a_sentence(classroom: Any, tmp_path: Path, source: str) -> None:
    name = source.split("(")[0].removeprefix("def ")
    config = config_of(bigram_keys=name in ("to_pairs", "commit"), chunk_tokens=16)
    pairs = "def p(tokens): return list(zip(tokens, tokens[1:]))\n\n"
    yours = Yours.read([with_source(tmp_path, f"{pairs}{source}\n")])
    with pytest.raises(InvariantError, match=WRONG[source]) as caught:
        engine = student_engine(config, yours, **classroom)
        engine.runner.drafter.draft = lambda requests, counts: [[7] * count for count in counts]
        engine.runner.drafter.propose = lambda request, most: most
        for _ in range(2):
            told(engine, PROMPTS[:2])
    assert name in str(caught.value)
    assert isinstance(caught.value, YourCode) or "after your" in str(caught.value)
    assert "step" in str(caught.value)


def test_the_live_page_is_driven_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from viz.live import main

    text, page = SOLUTION.read_text(encoding="utf-8"), tmp_path / "run.html"
    tree = find_folder("02") / "solution.py"
    asked = ["--speculative", "ngram", "--export", str(page), "--steps", "12", "--cache"]
    assert main([*asked, str(SOLUTION), "--cache", str(tree)]) == 0 and page.exists()
    assert "driven by space_of, accept, room_for, roll_back\n" in capsys.readouterr().out
    broken = text.replace("return tokens, len(tokens) - 1", "return tokens")
    assert main([*asked, str(with_source(tmp_path, broken))]) == 1
    assert "your code broke: step 6, R1: your accept returned [" in capsys.readouterr().err
    assert main([*asked, str(LESSON / "exercise.py")]) == 2
    assert "nothing is written yet" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("broken", [False, True])
def test_the_page_says_what_drives_it_and_how_it_broke(tab: Any, tmp_path: Path, broken: bool) -> None:
    from viz.live import Driver, Live, Settings

    text = SOLUTION.read_text(encoding="utf-8")
    if broken:
        text = text.replace("return tokens, len(tokens) - 1", "return tokens, 1 // 0")
    path = with_source(tmp_path, text)
    settings = Settings(workload="drafts", speculative="ngram", cache=(str(path),))
    driver = Driver(settings, speed=0.0)
    with Live(driver) as live:
        tab.goto(live.url)
        sentence = "your accept raised ZeroDivisionError" if broken else "drafted tokens accepted"
        tab.get_by_text(sentence).first.wait_for(timeout=60_000)
        assert driver.status()["notices"] == ["driven by space_of, accept, room_for, roll_back"]
        assert driver.error.startswith("step ") if broken else not driver.error
        tab.goto("about:blank")  # it goes on asking otherwise, and complains that nobody answers
