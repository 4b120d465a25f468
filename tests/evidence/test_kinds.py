"""The paper's workloads: right answers, the same in any batch and with any cache; what they are made of."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from conftest import CheckedEngine

from minirad.config import EngineConfig
from minirad.evidence import agents, chats, choices, json_records, thoughts
from minirad.evidence.__main__ import main
from minirad.evidence.agents import MOST_STEPS, RECALLED, Errand, Memory, Resident, Tools, react
from minirad.evidence.kinds import KINDS
from minirad.evidence.retriever import Retriever
from minirad.frontend import Job, ProgramPlayer, run_many
from minirad.frontend.player import send_due
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.simulate import ModelFreeEngine

pytest.importorskip("llguidance")  # several kinds ask for replies of a form

SHARING = ("mmlu-like", "react", "rag", "documents")  # each of their jobs begins as another one does
NO_ANSWER_OF_THEIR_OWN = {"skeleton-of-thought"}  # its jobs differ by their seed alone


class Run:
    """Jobs on an engine of their own, and every request of theirs but prefix hints. options: the player's."""

    def __init__(
        self, jobs: Sequence[Job], model: Any = None, tokenizer: Any = None, options: Any = None,
        **config: Any,
    ) -> None:  # fmt: skip
        config = {"kv_tokens": 8192, **config}
        self.engine = CheckedEngine(EngineConfig(**config), model=model, tokenizer=tokenizer)
        self.requests: Counter[Any] = Counter()
        player = ProgramPlayer(jobs, self.engine.encode, self.engine, **(options or {}))
        sent: dict[str, Any] = {}
        step = 0
        while not player.done:
            for asked, error in send_due(self.engine, player, step):
                assert error is None, error
                sent[next(name for name, each in player._sent.items() if each is asked)] = asked
            step += 1
            for output in self.engine.step().finished:
                asked = sent.pop(output.request_id)
                if ": prefix hint" not in asked.label:
                    request = asked.running.job.name, tuple(asked.prompt), tuple(output.token_ids)
                    self.requests[request] += 1
                player.finished(output, step)
        assert not sent and self.engine.cache.protected_size == 0  # nothing is left pinned
        self.values = {job.name: outcome.result() for job, outcome in zip(jobs, player.outcomes, strict=True)}


@pytest.fixture(scope="module")
def classroom() -> dict[str, Any]:
    path = resolve_model(None)
    return {"model": load_model(path, torch.float32, "cpu"), "tokenizer": load_tokenizer(path)}


def _one(job: Job, *args: Any) -> Job:
    return replace(job, args=args)


SMALLER: dict[str, Callable[[random.Random], tuple[Job, ...]]] = {
    "hellaswag-like": lambda rng: choices.hellaswag_like(1, rng, shots=5),
    "react": lambda rng: agents.react_jobs(2, rng, examples=2),
    "generative-agents": lambda rng: tuple(
        _one(job, *job.args, 1) for job in agents.town_jobs(1, rng, people=3)
    ),
    "skeleton-of-thought": lambda rng: tuple(_one(job, 2) for job in thoughts.skeleton_jobs(1, rng)),
    "judge": lambda rng: tuple(_one(job, job.args[0][:3]) for job in thoughts.judge_jobs(1, rng)),
    "chat-short": lambda rng: tuple(
        _one(job, job.args[0][:2], job.args[1]) for job in chats.short_jobs(1, rng)
    ),
    "chat-long": lambda rng: tuple(
        _one(job, job.args[0][:2], job.args[1]) for job in chats.long_jobs(1, rng)
    ),
}


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Of each kind one or two, and where they are large, smaller ones of the same program."""
    found = []
    for name, kind in KINDS.items():
        rng = random.Random(name)
        made = SMALLER[name](rng) if name in SMALLER else kind.make(2 if name in SHARING else 1, rng)
        found += [replace(job, name=f"{name} {at}", seed=at) for at, job in enumerate(made)]
    return found


@pytest.fixture(scope="module")
def together(jobs: list[Job], classroom: dict[str, Any]) -> Run:
    return Run(jobs, **classroom)


# ---------------------------------------------------------------------- answers


def test_the_classroom_llama_gives_right_answers(jobs: list[Job], together: Run) -> None:
    wrong = [job.name for job in jobs if not _kind(job).right(job, together.values[job.name])]
    assert wrong == []


def test_another_jobs_answer_is_wrong(jobs: list[Job], together: Run) -> None:
    """Also what is nearly right: no check says yes to everything."""
    for name, kind in KINDS.items():
        job, value = next((each, together.values[each.name]) for each in jobs if _kind(each) is kind)
        assert kind.right(job, _spoilt(value)) is False, name
        if name not in NO_ANSWER_OF_THEIR_OWN:
            others = kind.make(12, random.Random(5))
            assert any(kind.right(other, value) is False for other in others), name


def test_what_is_missing_is_not_right(jobs: list[Job], together: Run) -> None:
    """A part of a right value is a wrong one, and so is JSON of another form."""
    for name, kind in KINDS.items():
        job, value = next((each, together.values[each.name]) for each in jobs if _kind(each) is kind)
        less: list[Any] = []
        if isinstance(value, dict):
            less = [{}, dict(list(value.items())[1:])]
        elif isinstance(value, list):
            less = [[], value[1:]]
        elif isinstance(value, str):
            less = ["", value[:-1], "[]", "{}", *(["5", "null"] if name.startswith("json") else [])]
        assert not any(kind.right(job, each) for each in less), name


def _spoilt(value: Any) -> Any:
    """The same with one mistake."""
    if isinstance(value, dict):
        return {key: _spoilt(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_spoilt(value[0]), *value[1:]])
    return value + 1 if isinstance(value, int) else f"x{value[2:]}"


def _kind(job: Job) -> Any:
    return KINDS[job.name.rpartition(" ")[0]]


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "no cache, few rows, small chunks": {"radix_cache": False, "max_running": 3, "chunk_tokens": 150},
    "a small pool of pages, any order": {
        "kv_tokens": 2048, "page_size": 16, "schedule_policy": "random", "mixed": True,
        "in_batch_prefix": False,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_programs_ask_and_say_the_same(
    way: str, jobs: list[Job], together: Run, classroom: dict[str, Any]
) -> None:
    other = Run(jobs, **classroom, **OTHER_WAYS[way])
    assert other.values == together.values
    assert other.requests == together.requests  # every prompt and every reply, token for token


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"hints": False}, {"parallel": False}])
def test_programs_say_the_same_without_hints_and_without_parallelism(
    options: dict[str, bool], jobs: list[Job], together: Run, classroom: dict[str, Any]
) -> None:
    branching = [job for job in jobs if not job.name.startswith(("json", "chat"))]
    other = Run(branching, **classroom, options=options)
    assert other.values == {job.name: together.values[job.name] for job in branching}
    names = set(other.values)
    assert other.requests == Counter({key: n for key, n in together.requests.items() if key[0] in names})


@pytest.mark.slow
def test_programs_say_alone_what_they_say_in_company(
    jobs: list[Job], together: Run, classroom: dict[str, Any]
) -> None:
    requests: Counter[Any] = Counter()
    for job in jobs:
        alone = Run([job], **classroom)
        assert alone.values[job.name] == together.values[job.name], job.name
        requests += alone.requests
    assert requests == together.requests


def test_what_programs_share_is_computed_once(jobs: list[Job], classroom: dict[str, Any]) -> None:
    """The second of two jobs of a kind finds what the first has left."""
    for name in SHARING:
        pair = [job for job in jobs if _kind(job) is KINDS[name]]
        outcomes = run_many(CheckedEngine(EngineConfig(kv_tokens=4096), **classroom), pair)
        used = [outcome.usage for outcome in outcomes]
        assert used[1].computed_tokens < used[1].prompt_tokens / 2, name


# ---------------------------------------------------------------------- what they are made of


@pytest.mark.parametrize("name", KINDS)
def test_jobs_depend_on_the_seed_alone(name: str) -> None:
    kind = KINDS[name]
    assert name == kind.name and kind.title and kind.paper
    first, again, other = (kind.make(3, random.Random(seed)) for seed in (1, 1, 2))
    assert len(first) == 3 and first == again and first != other
    assert len(kind.make(kind.jobs, random.Random(0))) == kind.jobs


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_fits_the_context(name: str, classroom: dict[str, Any]) -> None:
    """All texts of a job's arguments together, and room for what the program adds: 2,048 for every seed."""
    tokenizer = classroom["tokenizer"]
    kind = KINDS[name]
    for seed in range(15):
        for job in kind.make(2, random.Random(seed)):
            size = len(tokenizer.encode("\n".join(_texts(job.args))))
            if name in ("rag", "react"):
                continue  # a few pages of many are read: the programs themselves are run above
            assert size < 1850, f"seed {seed}: {size}"


def _texts(value: Any) -> list[str]:
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def test_programs_run_without_a_model() -> None:
    """A simulation's replies have no text: every program ends all the same."""
    for name, kind in KINDS.items():
        engine = ModelFreeEngine(16384)
        player = ProgramPlayer(kind.make(1, random.Random(0)), lambda text: [len(w) for w in text.split()])
        step = 0
        while not player.done:
            send_due(engine, player, step)
            step += 1
            for output in engine.step().finished:
                player.finished(output, step)
        engine.check()
        (outcome,) = player.outcomes
        assert outcome.error is None, f"{name}: {outcome.error}"
        assert kind.right(kind.make(1, random.Random(0))[0], outcome.value) in (True, False), name


# ---------------------------------------------------------------------- tools


def test_the_retriever_finds_rare_words_first() -> None:
    library = Retriever(
        ["a cat and a cat", "a dog", "a dog and a very long story of a cat", "a dog and a bee"]
    )
    assert library.search("Where is the BEE?", 1) == ["a dog and a bee"]
    assert library.search("cat", 2) == ["a cat and a cat", "a dog and a very long story of a cat"]
    assert library.search("nothing else", 2) == library.texts[:2]  # of equals the earlier one
    assert Retriever([]).search("x", 3) == [] and Retriever([""]).search("x", 3) == [""]


def test_tools_search_and_look_up() -> None:
    pages = ("Trees are green.\n\nTom has a kite. Ada has a lamp.", "The sea is blue.\n\nBob has a hat.")
    tools = Tools(pages)
    assert tools.use("Lookup", "Tom") == "There is nothing about Tom."  # no page is open yet
    assert tools.use("Search", "Ada") == "Trees are green."
    assert tools.use("Lookup", "Ada") == "Ada has a lamp."
    assert tools.use("Lookup", "Bob") == "There is nothing about Bob."
    assert tools.use("Search", "Bob") == "The sea is blue."


def test_an_agent_that_finds_nothing_finishes_in_time(classroom: dict[str, Any]) -> None:
    """What it thinks is on no page: it looks as often as it may, and then says what it thinks."""
    engine = CheckedEngine(EngineConfig(kv_tokens=4096), **classroom)
    errand = Errand("What does Tom have?", ("Trees are green.\n\nThe sea is blue.",), "kite")
    (outcome,) = run_many(engine, [Job(react, ((), errand))])
    actions = [outcome.state[f"action {step}"] for step in range(1, MOST_STEPS + 1)]
    assert [action.partition("[")[0] for action in actions] == ["Search", *["Lookup"] * 3, "Finish"]
    assert actions[-1] == f"Finish[{outcome.result()}]" and actions[0] == "Search[Tom]"


def test_memories_are_recalled_by_words_age_and_weight() -> None:
    old = [Memory(f"Day {day} was like every day.", 1, day) for day in range(RECALLED + 2)]
    person = Resident("Tom", [Memory("Ada has a kite.", 1, 0), *old])
    assert person.recall("What does Ada have?", 9).startswith("Ada has a kite.")  # relevant, though old
    assert "Day 0" not in person.recall("What does Ada have?", 9)
    assert f"Day {RECALLED + 1}" in person.recall("What does Ada have?", 9)
    heavy = Resident("Tom", [Memory("There was a wedding.", 9, 0), *old])
    assert "a wedding" in heavy.recall("nothing", 9)
    assert person.knows_of(["Ada", "Tom"]) == ["Ada"]


def test_records_match_their_regex_and_their_schema(together: Run) -> None:
    values = {name: value for name, value in together.values.items() if name.startswith("json")}
    assert len(values) == 2
    for value in values.values():
        assert re.fullmatch(json_records.REGEX, value)
        assert list(json.loads(value)) == json.loads(json_records.SCHEMA)["required"]


# ---------------------------------------------------------------------- the command


def test_the_command_prints_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", "mmlu-like,rag", "--jobs", "2"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["mmlu-like", "rag"]
    assert all("2/2" in row for row in rows)


@pytest.mark.slow
def test_most_answers_are_right_at_full_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    counts = {row.split()[0]: row.split()[-2].split("/") for row in rows}
    assert list(counts) == list(KINDS)
    assert all(int(right) >= 0.5 * int(of) for right, of in counts.values()), counts
    assert sum(int(right) for right, _ in counts.values()) >= 0.9 * sum(int(of) for _, of in counts.values())


def test_an_unknown_kind_is_refused_with_those_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--kinds", "mmlu"])
    assert ended.value.code == 2
    assert "unknown 'mmlu'; known: mmlu-like, " in capsys.readouterr().err
