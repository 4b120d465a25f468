"""Each part switched off in turn: the answers stay, and what it costs has the sign that it should have.

Counted in tokens and steps, which are the same on every machine; never in seconds.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import CheckedEngine

from minirad import RadixCache, RadixKey
from minirad.__main__ import main
from minirad.bench import programs as bench
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.evidence.ablations import FULL, SETTINGS
from minirad.evidence.dictionary import DictionaryCache
from minirad.evidence.kinds import KINDS
from minirad.evidence.measure import Played, play_jobs, right
from minirad.evidence.paper import PAPER
from minirad.frontend import Job, ProgramPlayer, State, play, run_many
from minirad.model.classroom import corpus
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.outputs import StepReport
from minirad.programs import tree_of_thought

Classroom = tuple[LlamaModel, Any]
KIND = KINDS["mmlu-like"]


@pytest.fixture(scope="module")
def classroom() -> Classroom:
    path = resolve_model(None)
    return load_model(path, torch.float32, "cpu"), load_tokenizer(path)


def engine_for(classroom: Classroom, name: str = FULL, **config: Any) -> CheckedEngine:
    setting = SETTINGS[name]
    cache = None if setting.cache is None else setting.cache()
    config = {"kv_tokens": 2048, **setting.config, **config}
    return CheckedEngine(EngineConfig(**config), cache, model=classroom[0], tokenizer=classroom[1])


# ---------------------------------------------------------------------- the signs


@pytest.fixture(scope="module")
def jobs() -> tuple[Job, ...]:
    """Questions of five subjects in turn, each behind its subject's examples: about 200 of 230 tokens."""
    return KIND.make(10, random.Random("signs"))


@pytest.fixture(scope="module")
def played(classroom: Classroom, jobs: tuple[Job, ...]) -> dict[str, Played]:
    """Under every setting, in a pool that has room for all, once they share."""
    return {
        name: play_jobs(engine_for(classroom, name), jobs, setting, time.perf_counter_ns)
        for name, setting in SETTINGS.items()
    }


@pytest.mark.slow
def test_no_setting_changes_an_answer(played: dict[str, Played], jobs: tuple[Job, ...]) -> None:
    values = {name: [outcome.value for outcome in each.outcomes] for name, each in played.items()}
    assert all(each == values[FULL] for each in values.values())
    assert right(KIND, jobs, played[FULL].outcomes) == (len(jobs), len(jobs))


@pytest.mark.slow
def test_without_a_cache_every_prompt_token_is_computed(played: dict[str, Played]) -> None:
    full, none = played[FULL], played["no-cache"]
    assert none.prompt_tokens == full.prompt_tokens <= none.computed_tokens
    assert none.cached_tokens == 0 and none.share == 0
    assert full.computed_tokens * 5 < none.computed_tokens
    assert full.steps < none.steps and full.batch > none.batch  # what is shared takes room once


@pytest.mark.parametrize("name", ["dictionary", "no-in-batch-prefix"])
def test_the_tree_and_waiting_for_a_prefix_save_tokens(played: dict[str, Played], name: str) -> None:
    full, less = played[FULL], played[name]
    assert full.prompt_tokens == less.prompt_tokens
    assert full.computed_tokens * 1.2 < less.computed_tokens < played["no-cache"].computed_tokens
    assert full.share is not None and less.share is not None and 1 >= full.share > less.share > 0


def test_hints_save_tokens_although_they_are_requests_themselves(played: dict[str, Played]) -> None:
    full, none, neither = (played[name] for name in (FULL, "no-hint", "neither"))
    assert full.requests == none.requests + len(full.outcomes)  # one for each choice that is made
    assert full.computed_tokens * 1.2 < none.computed_tokens <= neither.computed_tokens


def test_a_hint_is_not_counted_twice(classroom: Classroom) -> None:
    """What it finds is no gain, what it computes a cost: by the engine's own outputs, of every request."""
    jobs = [Job(tree_of_thought, (corpus.PROBLEMS[0], 2))]
    for name in (FULL, "no-hint", "no-cache"):
        engine, outputs, prompts = engine_for(classroom, name), [], {}
        add, step = engine.add_request, engine.step

        def noted(prompt: Any, *rest: Any, add: Any = add, prompts: Any = prompts, **more: Any) -> str:
            request = add(prompt, *rest, **more)
            prompts[request] = len(prompt)
            return str(request)

        def stepped(step: Any = step, outputs: Any = outputs) -> StepReport:
            report: StepReport = step()
            outputs += report.finished
            return report

        engine.add_request, engine.step = noted, stepped  # type: ignore[method-assign,assignment]
        found = play_jobs(engine, jobs, SETTINGS[name], time.perf_counter_ns)
        computed = sum(prompts[out.request_id] - out.cached_tokens for out in outputs)
        asked = sum(prompts[out.request_id] for out in outputs if out.token_ids)  # a hint says nothing
        assert len(outputs) == found.requests and computed == found.computed_tokens
        assert found.prompt_tokens == asked and found.cached_tokens == asked - computed
        assert (found.requests == sum(bool(out.token_ids) for out in outputs)) == (name != FULL)


def test_a_program_that_asks_for_one_thing_at_a_time_needs_more_steps(played: dict[str, Played]) -> None:
    full, serial = played[FULL], played["no-parallelism"]
    assert full.requests == serial.requests and full.prompt_tokens == serial.prompt_tokens
    assert full.steps < serial.steps and full.batch > serial.batch


@pytest.mark.slow
def test_an_order_that_looks_at_the_cache_saves_tokens_in_a_small_pool(classroom: Classroom) -> None:
    """Two subjects' examples fit, of five: who comes next decides whether they are there."""
    jobs = KIND.make(40, random.Random("order"))
    full, *others = (
        play_jobs(engine_for(classroom, name, kv_tokens=640), jobs, SETTINGS[name], time.perf_counter_ns)
        for name in (FULL, "fcfs", "random")
    )
    for other in others:
        assert full.prompt_tokens == other.prompt_tokens
        assert full.computed_tokens * 1.1 < other.computed_tokens and full.steps < other.steps
        assert [each.value for each in full.outcomes] == [each.value for each in other.outcomes]


def test_branches_side_by_side_save_steps(classroom: Classroom) -> None:
    """Three ways on at each of two levels; the tokens are the same."""
    jobs = [Job(tree_of_thought, (corpus.PROBLEMS[0], 2))]
    full, serial = (
        play_jobs(engine_for(classroom, each), jobs, SETTINGS[each], time.perf_counter_ns)
        for each in (FULL, "no-parallelism")
    )
    assert full.outcomes[0].value == serial.outcomes[0].value
    assert full.new_tokens == serial.new_tokens and full.steps * 2 < serial.steps
    assert serial.batch == 1 < full.batch


def test_what_an_endless_cache_would_have_had_is_a_bound(played: dict[str, Played]) -> None:
    for each in played.values():
        assert 0 <= each.cached_tokens <= each.endless_tokens < each.prompt_tokens
        assert each.share is not None and 0 <= each.share <= 1 and each.hit_rate < 1
        assert each.ttft > 0 and each.seconds > 0


def test_the_paper_is_quoted_for_every_setting_that_it_has() -> None:
    assert PAPER.keys() == SETTINGS.keys()
    for name, said in PAPER.items():
        assert ("read off the plot" in said.size) == (said.sign == "lower"), name
        assert said.note or said.sign == "1", name


# ---------------------------------------------------------------------- the player's options


async def forks(s: State) -> list[str]:
    """Two levels of branches, several calls in each, and a choice."""
    s.system(corpus.SYSTEM_PROMPT)
    s.user("Name an animal.")
    s.assistant()
    outer = await s.fork(2)
    await outer.each(name_it)
    await outer.join()
    return [str(s["animal"]), str(s["sound"]), str(s["blue"])]


async def name_it(s: State, index: int) -> None:
    await s.gen("animal", max_new_tokens=8, temperature=1.0)
    inner = await s.fork(2)
    await inner.each(ask)
    await inner.join()


async def ask(s: State, index: int) -> None:
    s.user("What does a dog say?")
    await s.gen("sound", max_new_tokens=12, temperature=0.9)
    s.user("Is the sky blue?")
    await s.select("blue", ("yes", "no"))


def busy(player: ProgramPlayer) -> list[int]:
    """How many requests of each program are on their way."""
    running = [asked.running for asked in player._sent.values()]
    return [running.count(each) for each in set(running)]


@pytest.mark.parametrize("hints", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_neither_hints_nor_parallelism_change_what_is_said(
    classroom: Classroom, hints: bool, parallel: bool
) -> None:
    engine, plain = engine_for(classroom), engine_for(classroom)
    player = ProgramPlayer([Job(forks, seed=at) for at in range(2)], engine.encode, engine,
                           hints=hints, parallel=parallel)  # fmt: skip
    most, labels = [], player.labels

    def watch(report: StepReport) -> None:
        most.append(max(busy(player), default=0))

    play(engine, player, watch)
    expected = [outcome.result() for outcome in run_many(plain, [Job(forks, seed=at) for at in range(2)])]
    assert [outcome.result() for outcome in player.outcomes] == expected
    assert any("prefix hint" in label for label in labels.values()) == hints
    assert (max(most) == 1) == (not parallel)
    engine.flush_cache()  # refused while anything is pinned


def test_what_is_held_back_is_not_due(classroom: Classroom) -> None:
    async def two(s: State) -> None:
        s += "Hello"
        branches = await s.fork(2, hint=False)
        for branch in branches:
            branch.gen("reply", max_new_tokens=2)
        await branches.join()

    player = ProgramPlayer([Job(two)], engine_for(classroom).encode, parallel=False)
    (first,) = player.due(0)
    assert player.next_due == 0  # it has not been said yet that the first one was sent
    player.sent(first, "R1")
    assert player.next_due is None and player.due(1) == [] and len(player.queue) == 1
    player.refused(first, "no")
    player.close()


@pytest.mark.parametrize("policy", ["fcfs", "random", "lpm"])
def test_hints_of_many_programs_do_not_take_each_others_room(classroom: Classroom, policy: str) -> None:
    """Each pins its prefix; together these are more than the pool, and none could go on beside the others."""

    async def choose(s: State, number: int) -> str:
        s += f"Number {number}. " + "The sky is blue. " * 9
        return await s.select("answer", (" Yes, it is.", " No, it is not."))

    engine = engine_for(classroom, kv_tokens=120, schedule_policy=policy)
    outcomes = run_many(engine, [Job(choose, (number,)) for number in range(6)])
    assert [outcome.error for outcome in outcomes] == [None] * 6
    engine.flush_cache()


# ---------------------------------------------------------------------- the dictionary


def test_an_entry_is_found_whole_or_not_at_all() -> None:
    cache = DictionaryCache()
    cache.insert(RadixKey([1, 2, 3, 4]), [10, 11, 12, 13])
    assert cache.peek(RadixKey([1, 2, 3])) == 0  # a tree would split
    assert cache.match_prefix(RadixKey([1, 2, 3, 9])).length == 0
    assert cache.match_prefix(RadixKey([1, 2, 3, 4, 5])).slots.tolist() == [10, 11, 12, 13]
    cache.insert(RadixKey([1, 2, 3]), [20, 21, 22])  # beside it, with slots of its own
    assert cache.match_prefix(RadixKey([1, 2, 3, 9])).slots.tolist() == [20, 21, 22]
    assert cache.match_prefix(RadixKey([1, 2, 3, 4])).slots.tolist() == [10, 11, 12, 13]
    assert cache.peek(RadixKey([1, 2, 3, 4], extra_key="other")) == 0
    assert cache.total_size == 7
    cache.check()


def test_an_insert_goes_on_where_the_row_reads() -> None:
    """Of two nodes that spell one beginning, it is the one whose slots the request has locked."""
    cache = DictionaryCache()
    cache.insert(RadixKey([1, 2, 3]), [10, 11, 12])
    short = cache.insert(RadixKey([1, 2]), [20, 21]).last_node
    longer = cache.insert(RadixKey([1, 2, 3, 4]), [20, 21, 32, 33])
    assert longer.prefix_len == 2 and longer.last_node.parent is short
    cache.check()


def said_by(model: LlamaModel, cache: Any, prompts: list[list[int]], **config: Any) -> list[list[int]]:
    engine = CheckedEngine(EngineConfig(poison_freed=True, **config), cache, model=model)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    said = {}
    while engine.has_work:
        said.update({out.request_id: out.token_ids for out in engine.step().finished})
    engine.flush_cache()
    return [said[name] for name in names]


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(5, 7), min_size=1, max_size=14), min_size=1, max_size=9),
    page=st.sampled_from([1, 2]), chunk=st.integers(1, 9), rows=st.integers(1, 4),
    pool=st.integers(10, 20),
)  # fmt: skip
def test_the_dictionary_serves_as_the_tree_does(
    tiny_model: LlamaModel, prompts: list[list[int]], page: int, chunk: int, rows: int, pool: int
) -> None:
    """Small alphabets make entries that begin and end alike; freed slots are poisoned: a read would show."""
    config = {"page_size": page, "chunk_tokens": chunk, "max_running": rows, "kv_tokens": pool * 2}
    expected = said_by(tiny_model, RadixCache(page), prompts, **config)
    assert said_by(tiny_model, DictionaryCache(page), prompts, **config) == expected


@pytest.mark.parametrize("chunk", [512, 5])
def test_a_prompt_in_chunks_is_an_entry_when_it_is_whole(tiny_model: LlamaModel, chunk: int) -> None:
    """Two that begin alike come together: neither finds the other's chunks; the third finds the first."""
    engine = Engine(EngineConfig(kv_tokens=128, chunk_tokens=chunk), DictionaryCache(), model=tiny_model)
    shared, none = list(range(5, 25)), SamplingParams(max_new_tokens=0)
    for end in ([30], [31]):
        engine.add_request(shared + end, none)
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
        engine.check()
    assert [out.cached_tokens for out in outputs] == [0, 0]
    (third,) = engine.generate([[*shared, 30, 40]], none)
    assert third.cached_tokens == 21
    (fourth,) = engine.generate([[*shared, 32]], none)
    assert fourth.cached_tokens == 0


def test_entries_of_old_weights_are_not_found_and_none_is_lost(make_engine: Any) -> None:
    engine = make_engine(DictionaryCache())
    reply = SamplingParams(max_new_tokens=2, ignore_eos=True)
    engine.generate([[5, 6, 7], [8, 9], [5, 6, 7, 8]], reply)
    size = engine.cache.total_size
    engine.update_weights(engine.model)
    engine.check()
    assert engine.cache.total_size == size and engine.peek([5, 6, 7]) == 0
    (again,) = engine.generate([[5, 6, 7]], reply)
    assert again.cached_tokens == 0 and engine.peek([5, 6, 7, 9]) == 3
    assert not engine.cache._asked  # nothing is kept of a request that has left
    engine.flush_cache()


# ---------------------------------------------------------------------- the command


def test_the_command_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "programs.json"
    words = ["--kinds", "mmlu-like", "--settings", "no-cache,dictionary", "--jobs", "2", "--reps", "2"]
    assert main(["bench", "programs", *words, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text(encoding="utf-8"))
    (kind,) = found["kinds"]
    assert list(kind["runs"]) == list(found["ablations"]) == [FULL, "no-cache", "dictionary"]
    assert kind["jobs"] == 2 and kind["right"] == [2, 2] and 0 < kind["optimum_hit_rate"] < 1
    for run in kind["runs"].values():
        assert len(run["seconds"]) == 2 and run["right"] == [2, 2] and run["other"] == 0
        for name in ("programs_per_s", "tokens_per_s", "ttft_ms", "latency_s"):
            assert run[name]["low"] <= run[name]["median"] <= run[name]["high"]
    assert {"processor", "cores", "threads", "load", "python", "torch", "minirad", "date"} <= set(
        found["machine"]
    )
    text = bench.as_text(found).splitlines()
    assert sum(line.startswith("mmlu-like") for line in text) == 3
    assert any(line.startswith("no-cache") and "read off the plot" in line for line in text)


def test_a_sweep_adds_two_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some = {"median": 2.0, "low": 1.0, "high": 3.0}
    row = {"kept": 0.5, "hit_rate": 0.4, "tokens_per_s": some, "ttft_ms": some, "batch": some}
    cost = {"tree_seconds": 0.01, "seconds": 2.0, "share": 0.005}
    monkeypatch.setattr(bench, "sweep", lambda model, tokenizer, reps: [row])
    monkeypatch.setattr(bench, "overhead", lambda model, reps: cost)
    words = ["--kinds", "mmlu-like", "--settings", "full", "--jobs", "1", "--reps", "1", "--sweep"]
    assert main(["bench", "programs", *words]) == 0
    text = capsys.readouterr().out
    assert "kept of a match" in text and "0.010 of 2.00 s in the tree's calls (0.50%)" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "unknown device 'tpu'; known: "),
        (["--threads", "99999"], "--threads 99999: this machine has"),
        (["--kinds", "mmlu-like", "--kv-tokens", "30"], "--kv-tokens 30: few shot choice"),
        (["--out", "result.txt"], "--out: a file's name must end in .json"),
    ],
)
def test_the_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["bench", "programs", "--jobs", "1", "--reps", "1", *words]) == 2
    error = capsys.readouterr().err.split("\r")[-1].strip()  # behind a progress bar that is wiped out
    assert said in error and len(error.splitlines()) == 1
