"""Programs: how they read and fail, what a fork's hint saves, and the library as workloads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CheckedEngine

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.frontend import Job, ProgramError, ProgramPlayer, State, run, run_many
from minirad.model.classroom import corpus
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.programs import long_agent_prompt, programs, self_consistency
from minirad.simulate import ModelFreeEngine


@pytest.fixture(scope="module")
def classroom() -> tuple[LlamaModel, Any]:
    path = resolve_model(None)
    return load_model(path, torch.float32, "cpu"), load_tokenizer(path)


@pytest.fixture
def engine(classroom: tuple[LlamaModel, Any]) -> CheckedEngine:
    model, tokenizer = classroom
    return CheckedEngine(EngineConfig(kv_tokens=2048), model=model, tokenizer=tokenizer)


def is_clean(engine: Engine) -> bool:
    """Nothing lives, nothing is pinned; everything the tree holds could be evicted."""
    engine.check()
    engine.flush_cache()  # refused otherwise
    return not engine.has_work and engine.cache.protected_size == 0


async def capital(s: State, country: str) -> str:
    s.system(corpus.SYSTEM_PROMPT)
    s.user(f"What is the capital of {country}?")
    return await s.gen("answer")


async def too_long(s: State) -> None:
    s.user("word " * 1500)
    await s.gen("never", max_new_tokens=700)


# ---------------------------------------------------------------------- joining


@pytest.mark.parametrize("answers", [(" Is", " Is"), (" no no no no", " Is")])
def test_a_join_makes_a_list_also_where_all_branches_chose_what_the_parent_had(
    engine: CheckedEngine, answers: tuple[str, str]
) -> None:
    async def program(s: State) -> tuple[list[Any], Any, Any]:
        s.user("Is the sky blue?")
        await s.select("ok", ("yes", "no"))
        s["kept"] = before = s["ok"]
        branches = await s.fork(2)
        for branch, prompt in zip(branches, answers, strict=True):
            branch += prompt
            await branch.select("ok", ("yes", "no"))
        branches[1]["alone"] = before
        each = [branch["ok"] for branch in branches]
        await branches.join()
        return each, s["ok"], (s["kept"], s["alone"])

    each, joined, (kept, alone) = run(engine, program).result()
    assert joined == each
    assert (kept, alone) == (kept, [None, kept]) and isinstance(kept, str)  # nobody named it; one did


def test_a_join_within_a_join_gives_lists_of_lists(engine: CheckedEngine) -> None:
    async def program(s: State) -> Any:
        s["x"] = s["y"] = same = "same"
        branches = await s.fork(2)
        for branch in branches:
            inner = await branch.fork(2)
            for each in inner:
                each["x"] = same
            await inner.join()
        await branches.join()
        return s["x"], s["y"]

    assert run(engine, program).result() == ([["same"] * 2] * 2, "same")


# ---------------------------------------------------------------------- reading and failing


def test_a_program_reads_as_it_runs(engine: CheckedEngine) -> None:
    outcome = run(engine, capital, "France")
    assert outcome.value == outcome.state["answer"] == "The capital of France is Paris."
    assert outcome.state.text.endswith("assistant\nThe capital of France is Paris.")
    assert is_clean(engine)


def test_the_history_is_what_was_sampled_and_hits_whole(engine: CheckedEngine) -> None:
    async def chat(s: State) -> list[int]:
        s.system(corpus.SYSTEM_PROMPT)
        known = []
        for question in ("Hello", "My name is Ada.", "What is my name?"):
            s.user(question)
            await s.gen("reply", max_new_tokens=3 if question == "Hello" else 40)  # cut, and whole ones
            known.append(len(s.tokens))
        assert s["reply"] == "Your name is Ada."
        messages = s.text.split("<|im_start|>")
        assert all(text.endswith("<|im_end|>\n") for text in messages[1:-1])
        return known

    outcome = run(engine, chat)
    assert outcome.value is not None
    # A reply that was cut has a last token without KV; the end token of a whole one is not in the history.
    assert outcome.usage.cached_tokens == (outcome.value[0] - 1) + outcome.value[1]


def test_plain_text_keeps_the_stop_text_that_was_sampled(engine: CheckedEngine) -> None:
    async def shots(s: State) -> str:
        s += corpus.few_shot_header(corpus.few_shot_examples(4, random.Random(1)))
        s += corpus.few_shot_question(5, "What is the capital of Peru?")
        await s.gen("answer", stop="\n", max_new_tokens=8)
        return s.text

    outcome = run(engine, shots)
    assert outcome.state["answer"].strip() == "Lima."
    assert outcome.value is not None and outcome.value.rstrip("\n").endswith("Lima.")


def test_one_programs_error_stays_its_own(engine: CheckedEngine) -> None:
    async def clumsy(s: State) -> None:
        branches = await s.fork(2)
        raise KeyError(f"after {len(branches)} branches")

    async def forgetful(s: State) -> None:
        s.user("Hello")
        s.gen("reply")

    async def impatient(s: State) -> str:
        s.user("Hello")
        s.gen("reply")
        return str(s["reply"])

    async def prefixed(s: State) -> None:
        s += "Some text to pin"
        await clumsy(s)

    jobs = [(capital, "Italy"), too_long, prefixed, forgetful, impatient, (capital, "Peru")]
    outcomes = run_many(engine, jobs)
    assert [o.value for o in outcomes] == [
        "The capital of Italy is Rome.", *[None] * 4, "The capital of Peru is Lima.",
    ]  # fmt: skip
    errors = [str(o.error) for o in outcomes]
    assert isinstance(outcomes[1].error, ProgramError) and "are more than the" in errors[1]
    assert isinstance(outcomes[2].error, KeyError)
    assert "did not await the call 'reply'" in errors[3]
    assert "the call 'reply' is not done: await it first" in errors[4]
    assert is_clean(engine)


def test_a_refusal_takes_back_what_the_program_was_about_to_send(engine: CheckedEngine) -> None:
    async def hasty(s: State) -> None:
        s.user("Write a story about a cat.")
        branches = await s.fork(2)
        branches[0] += "word " * 1500
        calls = [branch.gen("reply", max_new_tokens=700) for branch in branches]
        await calls[0]

    with pytest.raises(ProgramError, match=r"hasty · reply in branch 1: .* are more than the"):
        run(engine, hasty)
    assert is_clean(engine)


def test_a_program_may_catch_what_it_caused(engine: CheckedEngine) -> None:
    async def second_try(s: State) -> str:
        branches = await s.fork(2)
        for branch in branches:
            branch.user("word " * 1500 if branch is branches[0] else "Hello")
            branch.gen("reply", max_new_tokens=700)
        with pytest.raises(ProgramError, match="are more than the"):
            await branches.join()
        assert branches[1]["reply"].startswith("Hello!")
        return await capital(s, "Cuba")

    assert run(engine, second_try).value == "The capital of Cuba is Havana."
    assert is_clean(engine)


def test_an_engines_error_reaches_its_program(engine: CheckedEngine) -> None:
    """Pins of somebody else hold what the second program needs."""
    pinned = [5 + at % 900 for at in range(1500)]
    engine.generate([pinned], SamplingParams(max_new_tokens=0))
    pin = engine.pin(pinned)

    async def large(s: State) -> None:
        s += [7] * 600
        await s.gen("reply", max_new_tokens=4)

    outcomes = run_many(engine, [large, (capital, "Kenya")])
    assert "the rest is pinned" in str(outcomes[0].error)
    assert outcomes[1].value == "The capital of Kenya is Nairobi."
    engine.unpin(pin)
    assert is_clean(engine)


@pytest.mark.parametrize("wrong", [lambda s: None, 3, (capital, "Peru", "and more")])
def test_what_is_no_program_harms_no_other(engine: CheckedEngine, wrong: Any) -> None:
    outcomes = run_many(engine, [wrong, (capital, "Greece")])
    with pytest.raises(TypeError, match=r"async def|not callable|positional"):
        outcomes[0].result()
    assert outcomes[1].value == "The capital of Greece is Athens."
    assert is_clean(engine)


def test_wrong_turns_are_named(engine: CheckedEngine) -> None:
    async def check(s: State) -> None:
        with pytest.raises(ValueError, match="follows a user's"):
            s.assistant("Hi")
        s.user("Hello")
        with pytest.raises(ValueError, match="cannot follow another user turn"):
            s.user("Hello")
        with pytest.raises(ValueError, match="can only come first"):
            s.system("Be kind.")
        with pytest.raises(ValueError, match="at least one branch"):
            s.fork(0)
        with pytest.raises(ValueError, match="may not match"):
            s.gen("x", regex="a", stop="b")

    async def mixed(s: State) -> None:
        s += "text"
        with pytest.raises(ValueError, match="cannot follow plain text"):
            s.user("Hello")

    async def sleepy(s: State) -> None:
        class Never:
            def __await__(self) -> Any:
                yield "a clock"

        await Never()

    outcomes = run_many(engine, [check, mixed, sleepy])
    assert [type(outcome.error) for outcome in outcomes] == [type(None), type(None), TypeError]


def test_requests_of_others_go_on_and_are_reported_later(engine: CheckedEngine) -> None:
    mine = engine.add_request("Answer 1:", SamplingParams(max_new_tokens=2))
    run(engine, capital, "Spain")
    assert [output.request_id for output in engine.step().finished] == [mine]
    assert is_clean(engine)


def test_a_run_that_is_left_gives_everything_back(engine: CheckedEngine) -> None:
    player = ProgramPlayer([Job(self_consistency, (corpus.PROBLEMS[0],))], engine.encode, engine)
    for step in range(6):
        for asked in player.due(step):
            player.sent(asked, engine.add_request(asked.prompt, asked.params))
        for output in engine.step().finished:
            player.finished(output, step + 1)
    assert engine.has_work and engine.cache.protected_size > 0
    player.close()
    engine.step()  # reports the aborted ones
    assert "was ended" in str(player.outcomes[0].error)
    assert is_clean(engine)


# ---------------------------------------------------------------------- order


async def two_animals(s: State) -> list[str]:
    s.user("Name an animal.")
    branches = await s.fork(2)

    async def ask(branch: State, index: int) -> str:
        animal = await branch.gen("animal", temperature=1.0)
        branch.user("Name a color.")
        return animal + await branch.gen("color", temperature=1.0)

    pairs = await branches.each(ask)
    await branches.join()
    assert [a + b for a, b in zip(s["animal"], s["color"], strict=True)] == pairs
    return pairs


@pytest.mark.parametrize("options", [{}, {"hints": False, "parallel": False}])
def test_what_branches_run_is_named_if_it_cannot_run(engine: CheckedEngine, options: dict[str, bool]) -> None:
    async def branched(s: State, each: Any) -> Any:
        s.user("Name an animal.")
        branches = await s.fork(2)
        found = await branches.each(each)
        await branches.join()
        return found

    wrong, task = run_many(
        engine,
        [(branched, lambda branch, index: 5), (branched, lambda branch, index: branch.gen("animal"))],
        **options,
    )
    with pytest.raises(TypeError, match="what branches run is an `async def` function, not <function"):
        wrong.result()
    assert task.result() == task.state["animal"] and len(task.result()) == 2
    assert is_clean(engine)


@pytest.mark.parametrize("schema", ["", "{", "false", '{"type": "nonsense"}', {"type": "integer"}])
def test_a_schema_that_is_none_is_named(engine: CheckedEngine, schema: Any) -> None:
    async def record(s: State) -> str:
        s.user("Write JSON for Tom, age 12.")
        return await s.gen("record", json_schema=schema)

    (outcome,) = run_many(engine, [record])
    with pytest.raises(ValueError, match=r"the (JSON )?schema .*(cannot be used|must be a text)"):
        outcome.result()
    assert is_clean(engine)


def test_company_changes_nothing_and_the_same_run_gives_the_same_schedule(
    engine: CheckedEngine, classroom: tuple[LlamaModel, Any]
) -> None:
    jobs = [Job(two_animals, seed=seed) for seed in (3, 4, 3)]
    together = [outcome.value for outcome in run_many(engine, jobs)]
    assert together[0] == together[2] != together[1]
    assert together == [run(engine, two_animals, seed=seed).value for seed in (3, 4, 3)]

    def schedule() -> list[Any]:
        fresh = CheckedEngine(EngineConfig(kv_tokens=300), model=classroom[0], tokenizer=classroom[1])
        batches: list[Any] = []
        from minirad.observe.events import BatchScheduled

        fresh.bus.subscribe(BatchScheduled, batches.append)
        run_many(fresh, [*jobs, (capital, "Chile"), (self_consistency, "Name a fruit.")])
        return batches

    assert schedule() == schedule()


# ---------------------------------------------------------------------- fork, counted in tokens


def counting(
    make_engine: Callable[..., CheckedEngine], n: int, prefix: int, more: int, hint: bool, **config: Any
) -> tuple[int, CheckedEngine]:
    """Prompt tokens computed by a fork of n branches that add `more` tokens each."""

    async def fork(s: State) -> None:
        s += list(range(3, 3 + prefix))
        branches = await s.fork(n, hint=hint)
        for index, branch in enumerate(branches):
            branch += [40 + index] * more
            branch.gen("x", max_new_tokens=2)
        await branches.join()

    sizes = {"kv_tokens": 512, "max_running": 16, "in_batch_prefix": False, **config}
    engine = make_engine(**sizes)
    return run(engine, fork).usage.computed_tokens, engine


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize(("n", "prefix", "more"), [(5, 20, 3), (8, 33, 1), (5, 20, 0), (1, 9, 2)])
def test_with_a_hint_the_prefix_is_computed_once(
    make_engine: Any, policy: str, n: int, prefix: int, more: int
) -> None:
    computed, engine = counting(make_engine, n, prefix, more, True, schedule_policy=policy)
    # A branch that adds nothing computes the prefix's last token again: its logits are needed.
    assert computed == prefix + n * max(more, 1)
    assert is_clean(engine)


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize(
    ("n", "prefix", "more", "chunk"), [(5, 20, 3, 512), (8, 33, 1, 512), (5, 20, 3, 40), (6, 30, 2, 64)]
)
def test_without_it_as_many_times_as_branches_enter_one_step(
    make_engine: Any, policy: str, n: int, prefix: int, more: int, chunk: int
) -> None:
    config = {"schedule_policy": policy, "chunk_tokens": chunk}
    computed, _ = counting(make_engine, n, prefix, more, False, **config)
    times = min(n, math.ceil(chunk / (prefix + more)))
    assert computed == times * prefix + n * more
    assert (n, times) in {(5, 5), (8, 8), (5, 2), (6, 2)}


def test_the_schedulers_in_batch_prefix_does_without_the_hint(make_engine: Any) -> None:
    computed, _ = counting(make_engine, 4, 36, 2, False, in_batch_prefix=True, schedule_policy="lpm")
    assert computed == 36 + 4 * 2


def test_a_hint_goes_by_whole_pages(make_engine: Any) -> None:
    computed, _ = counting(make_engine, 4, 22, 3, True, page_size=8)
    assert computed == 22 + 4 * (22 - 16 + 3)


def test_the_prefix_is_pinned_until_the_join(make_engine: Any) -> None:
    engine = make_engine(kv_tokens=64)
    held = []

    async def fork(s: State) -> None:
        s += list(range(3, 23))
        branches = await s.fork(2)
        held.append(engine.cache.protected_size)
        await branches.join()
        held.append(engine.cache.protected_size)
        again = await s.fork(2)
        held.append(engine.cache.protected_size)
        del again  # not joined: given back when the program ends

    run(engine, fork)
    assert held == [20, 0, 20]
    assert is_clean(engine)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("room", [12, 20, 23, 24, 40])
def test_a_hint_that_is_refused_changes_nothing(make_engine: Any, room: int, asks: bool) -> None:
    """A prefix that does not fit: with hints a program ends as without them, be it well or in an error."""

    async def program(s: State) -> list[int]:
        s += list(range(3, 23))
        branches = await s.fork(2)
        for branch in branches:
            branch += [30]
            if asks:
                branch.gen("reply", max_new_tokens=3)
        await branches.join()
        return [len(branch.tokens) for branch in branches]

    ends = []
    for hints in (True, False):
        engine = make_engine(kv_tokens=room)
        (outcome,) = run_many(engine, [program], hints=hints)
        ends.append((outcome.value, str(outcome.error)))
        assert is_clean(engine)
    assert ends[0] == ends[1] and (ends[0][0] is None) == (asks and room < 24)


# ---------------------------------------------------------------------- the library


@pytest.mark.parametrize("name", [name for name in programs() if name != "agent-team-long"])
def test_each_program_runs_in_the_pool_of_its_workload(name: str, classroom: tuple[LlamaModel, Any]) -> None:
    program = programs()[name]
    assert program.name == name
    config = EngineConfig(kv_tokens=program.kv_tokens)
    engine = CheckedEngine(config, model=classroom[0], tokenizer=classroom[1])
    outcomes = run_many(engine, program.jobs)
    text = " ".join(str(outcome.result()) for outcome in outcomes)
    expected = {
        "multi-turn": "Your name is Ada.", "few-shot-batch": "'Rome.'", "vote": "2",
        "tree-of-thought": "So the answer is", "skeleton-of-thought": " says ",
        "agent-team": "The capital of Japan is Tokyo.", "records": '{"name": "Bob", "age": 29, "species": ',
    }  # fmt: skip
    assert expected[name] in text
    assert sum(outcome.usage.cached_tokens for outcome in outcomes) > 0
    assert is_clean(engine)


def test_the_long_prompt_is_long_and_refused_where_it_does_not_fit(engine: CheckedEngine) -> None:
    assert len(engine.encode(corpus.AGENT_PROMPT)) == pytest.approx(250, rel=0.1)
    assert len(engine.encode(long_agent_prompt())) == pytest.approx(2500, rel=0.1)
    outcomes = run_many(engine, programs()["agent-team-long"].jobs)
    assert all("more than the context of 2048" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("name", list(programs()))
def test_each_program_runs_without_a_model(name: str, classroom: tuple[LlamaModel, Any]) -> None:
    """As `simulate` drives workloads: no engine, no pins, replies of ids without text."""
    program = programs()[name]
    encode = classroom[1].encode
    player = program.player(encode)
    engine = ModelFreeEngine(max(program.kv_tokens, 700))
    step = 0
    while not player.done:
        assert engine.has_work or player.next_due is not None
        step = step if engine.has_work else max(step, player.next_due or 0)
        for asked in player.due(step):
            player.sent(asked, engine.add_request(asked.prompt, asked.params))
        step += 1
        for output in engine.step().finished:
            player.finished(output, step)
        engine.check()
    assert [outcome.error for outcome in player.outcomes] == [None] * len(program.jobs)
    assert sum(served.cached for served in engine.served.values()) > 0
