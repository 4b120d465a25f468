"""Each row of figures that the README states has a command that prints it, and a test of its sign.

Signs are counted: in tokens, steps, calls, bytes, lines of Python. Seconds are never looked at.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CheckedEngine
from support import ROOT

from minirad import command
from minirad.adapters import model as adapters
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.attention.torch_paged import shared_segments
from minirad.bench import engine as bench_engine
from minirad.bench import eviction, learn, scaling, speculative
from minirad.collector import no_collections
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.evidence.ablations import FULL, SETTINGS
from minirad.evidence.kinds import KINDS
from minirad.evidence.measure import Played, play_jobs
from minirad.frontend import Job
from minirad.model.classroom import ADAPTERS, corpus
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.programs import tree_of_thought
from minirad.simulate import Plan, from_workload, read_source, simulate
from minirad.traces import tokenizer
from minirad.workloads import chat_prompt, load

MakeEngine = Callable[..., CheckedEngine]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# How each row of figures in the README's chapters "Speed" and "Evidence" begins, and the test of its sign.
HERE = "tests/unit/test_stated_rows.py"
ENGINE, UNEQUAL = "tests/unit/test_bench_engine.py", "tests/unit/test_bench_unequal.py"
CACHE = "tests/property/test_cache_properties.py"
ROWS = {
    "look up 4,096 cached tokens on 1 node":
        f"{HERE}::test_a_look_up_grows_with_nodes_and_not_with_tokens",
    "evict one leaf of 20,000":
        f"{HERE}::test_a_kept_heap_does_not_grow_with_the_tree",
    "chat, 64 sessions of 16 turns":
        f"{HERE}::test_a_turn_costs_as_much_in_a_large_tree",
    "**minirad**":
        f"{ENGINE}::test_rows_say_what_hit_and_where_they_were_taken",
    "minirad, radix cache off":
        f"{ENGINE}::test_rows_say_what_hit_and_where_they_were_taken",
    "transformers `generate`, batches of 8":
        f"{HERE}::test_what_transformers_computes",
    "transformers `generate`, one prefix cache":
        f"{HERE}::test_what_transformers_computes",
    "transformers `generate_batch`":
        f"{ENGINE}::test_transformers_stands_beside_it",
    "1 request, 256 tokens":
        f"{HERE}::test_a_captured_step_is_one_launch_for_any_batch",
    "16 / 128 requests, 256 tokens":
        f"{HERE}::test_many_requests_take_the_passes_of_one",
    "256 requests, 100 to 1,024 tokens":
        "tests/gpu/test_bench_gpu.py::test_requests_are_as_long_and_share_as_much_as_said",
    "256 requests that share 2,000":
        f"{HERE}::test_shared_keys_are_read_once",
    "the same with transformers `generate_batch`":
        f"{ENGINE}::test_transformers_stands_beside_it",
    "the cache":
        "tests/evidence/test_ablations.py::test_without_a_cache_every_prompt_token_is_computed",
    "the tree (whole prompts":
        f"{HERE}::test_whole_prompts_help_where_they_are_what_is_shared",
    "the order (first come":
        f"{HERE}::test_the_order_matters_where_the_pool_is_small",
    "parallelism in a program":
        f"{HERE}::test_branches_want_parallelism_and_chains_do_not",
    "hints of a prefix":
        f"{HERE}::test_a_hint_helps_a_choice_and_costs_a_tree_of_thought_steps",
    "* **Where nothing can hit**":
        f"{ENGINE}::test_where_nothing_can_hit_the_tree_is_called_and_finds_nothing",
    "* **Hits make batches larger**":
        f"{ENGINE}::test_less_kept_is_less_hit_and_smaller_batches",
    "* **Eviction**":
        f"{HERE}::test_policies_on_the_trace_in_the_order_that_is_stated",
}  # fmt: skip
# The same for figures in running text: words that stand there.
SENTENCES = {
    "The time to the first token of a prompt of 512 tokens falls":
        f"{HERE}::test_a_hit_leaves_the_rest_to_be_computed",
    "the slot that the request is given":
        f"{ENGINE}::test_llama_cpp_says_what_we_say",
    "have kernels of their own":
        "tests/gpu/test_interpreted.py::test_a_few_tokens_are_torchs",
    "not while a recorder listens":
        "tests/engine/test_ahead.py::test_whoever_begins_to_listen_gets_whole_steps",
    "with one 5,340 (15,444 are loaded back)":
        "tests/unit/test_bench_tiers.py::test_a_second_tier_saves_what_it_loads",
    "an engine that is started anew computes 732":
        f"{UNEQUAL}::test_a_second_engine_reads_what_the_first_one_wrote",
    "3.0 to 4.4 tokens a forward pass from the head":
        f"{HERE}::test_a_head_guesses_more_than_a_look_up",
    "Jump-forward gives JSON 4.4 tokens a pass":
        f"{UNEQUAL}::test_jump_forward_saves_passes_where_a_grammar_forces_much",
    "with one adapter for all, 1.22 with two":
        f"{HERE}::test_more_adapters_in_a_batch_are_more_products",
    "with no listener the emit sites are 0.02% of a step":
        f"{CACHE}::test_nothing_is_emitted_to_a_bus_that_wants_nothing",
    "a recording about 4%":
        "tests/unit/test_cli.py::test_bench_hooks_runs",
    "nearly all its guesses are rejected":
        f"{HERE}::test_under_an_adapter_the_head_guesses_wrong",
    "within 0.035 of the logits":
        "tests/unit/test_quant.py::test_smollm2_says_what_its_float32_model_says",
    "1.3 to 1.6 times as fast":
        "tests/unit/test_quant.py::test_what_is_multiplied_is_what_gguf_reads_rounded_to_float16",
    "a Llama of 1.5 million parameters":
        f"{HERE}::test_the_size_of_the_classroom_llama",
    "loses where prefixes come back at once":
        f"{HERE}::test_leases_lose_where_prefixes_come_back_at_once",
}  # fmt: skip


# ---------------------------------------------------------------------- rows, commands and tests


def chapter(name: str) -> str:
    return README.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def stated() -> Iterator[str]:
    """The rows with a figure in the tables and lists of "Speed" and "Evidence", without their first bar."""
    for line in (chapter("Speed") + chapter("Evidence")).splitlines():
        cells = line.removeprefix("| ")
        if line.startswith(("| ", "* ")) and re.search(r"\d", cells.partition("|")[2] or cells):
            yield cells


def test_every_row_of_the_readme_has_a_test_of_its_sign() -> None:
    rows = list(stated())
    assert len(rows) == len(ROWS) and len(rows) > 15
    for row, known in zip(rows, ROWS, strict=True):
        assert row.startswith(known), f"say in {HERE} which test looks at the sign of: {row}"
    text = " ".join(README.split())
    assert [words for words in SENTENCES if words not in text] == []


def test_the_tests_that_are_named_are_there() -> None:
    for name in {*ROWS.values(), *SENTENCES.values()}:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in [each.name for each in tree.body if isinstance(each, ast.FunctionDef)], name


def benches() -> list[str]:
    """`bench NAME ...` as the README has it, with its options or without."""
    text = " ".join(README.split())
    return sorted(set(re.findall(r"`(?:python -m minirad )?bench ([^`]+)`", text)))


@pytest.mark.parametrize("line", benches())
def test_every_benchmark_of_the_readme_takes_the_options_that_it_names(line: str) -> None:
    name, *words = shlex.split(line)
    assert f"minirad bench {name}" in command.COMMANDS
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module(f"minirad.bench.{name}").add_arguments(parser)
    parser.parse_args(words)


def test_both_chapters_name_a_command_in_front_of_each_table() -> None:
    for name in ("Speed", "Evidence"):
        parts = re.split(r"\n\|---\|[-|]*\n", "\n" + chapter(name))
        for before in parts[:-1]:
            assert "python -m minirad bench " in " ".join(before.split()), before[-300:]


# ---------------------------------------------------------------------- the tree


@contextmanager
def lines() -> Iterator[Callable[[], int]]:
    """A clock that counts lines of Python: a thousand nanoseconds each, so that a microsecond is a line.

    The collector rests meanwhile: it has callbacks (Hypothesis's), and ends what other tests left.
    """
    seen, before = 0, sys.gettrace()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        return line

    with no_collections():
        sys.settrace(line)
        try:
            yield lambda: 1000 * seen
        finally:
            sys.settrace(before)


@pytest.mark.slow
def test_a_look_up_grows_with_nodes_and_not_with_tokens() -> None:
    with lines() as clock:
        short, long = (scaling.look_up_long(scaling.KINDS["radix"], n, clock) for n in (64, 4096))
        one, many = (scaling.look_up_deep(scaling.KINDS["radix"], n, clock) for n in (1, 256))
        loop = scaling.look_up_long(scaling.KINDS["per_token"], 512, clock)
    assert 0 < short == long == one and 20 * one < many
    assert loop > 512 and 10 * long < loop, "a loop over tokens goes over tokens"


@pytest.mark.slow
def test_a_kept_heap_does_not_grow_with_the_tree() -> None:
    with lines() as clock:
        kept = [scaling.evict(scaling.KINDS["radix"], leaves, clock) for leaves in (50, 400)]
        collected = [scaling.evict(scaling.KINDS["per_token"], leaves, clock) for leaves in (50, 400)]
    assert kept[1] < 1.5 * kept[0] and 4 * collected[0] < collected[1] and 4 * kept[1] < collected[1]


def test_a_turn_costs_as_much_in_a_large_tree() -> None:
    """Match, lock, insert, unlock of a turn that goes on below a long prompt: few sessions, and many."""
    cost = []
    for sessions in (4, 64):
        index, system = scaling.KINDS["radix"].make(1), list(range(1, 200))
        for session in range(sessions):
            tokens = [*system, 1000 + session, *range(300, 340)]
            index.insert(scaling.RADIX.key(tokens), range(len(tokens)))
        turn = [*system, 1000, *range(300, 340), *range(400, 420)]
        with lines() as clock:
            started = clock()
            node = index.match_prefix(scaling.RADIX.key(turn)).last_node
            index.inc_lock_ref(node)
            index.insert(scaling.RADIX.key(turn), range(len(turn)))
            index.dec_lock_ref(node)
            cost.append(clock() - started)
    assert 0 < cost[1] <= 1.1 * cost[0]


def test_a_node_for_each_token_takes_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "MEMORY_PROMPTS", 30)
    used = {name: scaling.memory(kind, 64) for name, kind in scaling.KINDS.items()}
    assert used["radix"] < used["per_token"] < used["trie"] and 5 * used["radix"] < used["trie"]


def test_policies_on_the_trace_in_the_order_that_is_stated() -> None:
    """Read off by hit rates in 3,003 blocks, which is three hundredths of all."""
    order = ("lru", "slru", "lfu", "brrip", "clairvoyant")
    source = read_source("mooncake")
    report = simulate(source, Plan("replay", (3003,), eviction_policies=order))
    shares = {row.eviction_policy: row.bound_share for row in report.rows}
    assert all(shares[a] < shares[b] for a, b in pairwise(order))
    assert 0.9 < shares["clairvoyant"] < 1 and shares["brrip"] < shares["clairvoyant"] / 2
    assert learn.sizes_of([prompt.key for prompt in source.prompts])[1] == 3003


def test_leases_lose_where_prefixes_come_back_at_once() -> None:
    rates = eviction.hit_rates(from_workload(load("multi-turn"), tokenizer()))["rates"]
    assert sum(rates["brrip"]) < sum(rates["lru"])


# ---------------------------------------------------------------------- the engine


Classroom = tuple[LlamaModel, Any]


@pytest.fixture(scope="module")
def classroom() -> Classroom:
    path = resolve_model(None)
    return load_model(path, torch.float32, "cpu"), load_tokenizer(path)


def engine_of(classroom: Classroom, **config: Any) -> CheckedEngine:
    return CheckedEngine(
        EngineConfig(**{"kv_tokens": 1024, **config}), model=classroom[0], tokenizer=classroom[1]
    )


def test_the_size_of_the_classroom_llama(classroom: Classroom) -> None:
    shapes = classroom[0].config.tensor_shapes().values()
    assert 1.4e6 < sum(torch.Size(shape).numel() for shape in shapes) < 1.6e6


def test_a_hit_leaves_the_rest_to_be_computed(make_engine: MakeEngine) -> None:
    """As `bench engine` measures it: the more of a prompt is there, the fewer tokens its first step has."""
    prompt, computed = [5 + n % 50 for n in range(40)], []
    for hit in (0, 10, 30, 39):
        engine = make_engine(kv_tokens=96)
        if hit:
            engine.generate([prompt[:hit]], SamplingParams(max_new_tokens=0))
        engine.add_request(prompt, SamplingParams(max_new_tokens=1))
        report = engine.step()
        computed.append(report.prompt_tokens - report.hit_tokens)
    assert computed == [40, 30, 10, 1]


def test_many_requests_take_the_passes_of_one(make_engine: MakeEngine) -> None:
    """A pass reads the weights once, for however many: that is why many are faster than one."""
    passes: dict[int, int] = {}
    for requests in (1, 16):
        engine = make_engine(kv_tokens=512, max_running=16)
        prompts = [[5 + n, 6, 7, 8] for n in range(requests)]
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True))
        assert all(len(out.token_ids) == 9 for out in outs)
        passes[requests] = engine.snapshot()["step"]
    assert passes[1] == passes[16] == 9


def test_shared_keys_are_read_once() -> None:
    """What a batch shares, as the engine finds it: by equal page numbers."""
    rows = torch.arange(1, 1 + 8 * 40).reshape(8, 40).numpy().astype("int32")
    rows[:, :32] = rows[0, :32]
    batch = build_metadata(rows, [BatchEntry(row, 35, 36) for row in range(8)], 1, "cpu")
    (segment,) = shared_segments(batch)
    assert (segment.begin, segment.end, len(segment.entries)) == (0, 32, 8)
    assert int(batch.kv_lens.sum()) - 7 * 32 == 32 + 8 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_captured_step_is_one_launch_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    replays, plain = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(1) or plain(graph))
    counts = []
    for requests in (1, 16):
        engine = Engine(EngineConfig(device="cuda", kv_tokens=4096, max_running=16))
        prompts = [[5 + n, 6, 7, 8] for n in range(requests)]
        engine.generate(prompts, SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.flush_cache()
        replays.clear()
        engine.generate(prompts, SamplingParams(max_new_tokens=9, ignore_eos=True))
        counts.append(len(replays))
    assert 0 < counts[0] == counts[1] < 20


@pytest.mark.slow  # transformers' models take their time to be imported
def test_what_transformers_computes() -> None:
    """In batches of 8 every prompt; with a cache by hand the shared part once, as the tree does."""
    pytest.importorskip("transformers")
    args = SimpleNamespace(new_tokens=2, shared=20)
    prompts = bench_engine.make_prompts(4, args.shared, 5, 1000)
    computed: dict[str, int] = {}

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            computed[name] = computed.get(name, 0) + inputs[0].numel()

    runs = bench_engine.transformers_runs(resolve_model(None), prompts, args)  # type: ignore[arg-type]
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        for name in (
            "transformers generate, batches of 8",
            "transformers generate, one prefix cache by hand",
        ):
            runs[name]()
    finally:
        hook.remove()
    new = len(prompts) * (args.new_tokens - 1)
    assert list(computed.values()) == [4 * 25 + new, 20 + 4 * 5 + new]


def test_a_head_guesses_more_than_a_look_up(classroom: Classroom) -> None:
    asked = [prompt for kind in ("facts", "lists") for prompt in speculative.prompts(kind, 2)]
    passes, said = {}, []
    for way in (None, "ngram", "eagle"):
        engine = engine_of(classroom, speculative=way, draft_tokens=4)
        outs = engine.generate(asked, SamplingParams(max_new_tokens=24))
        said.append([out.token_ids for out in outs])
        passes[way] = engine.drafts.tokens_a_pass if way else 1.0  # type: ignore[attr-defined]
    assert said[0] == said[1] == said[2]
    assert 1 < passes["ngram"] < passes["eagle"] and 2 < passes["eagle"] <= 5


def test_under_an_adapter_the_head_guesses_wrong(classroom: Classroom) -> None:
    engine = engine_of(classroom, speculative="eagle", lora=["capitals"])
    accepted = []
    for adapter in ("", "capitals"):
        before = engine.drafts.accepted, engine.drafts.drafted  # type: ignore[attr-defined]
        prompts = [chat_prompt(question) for question in ("What color is grass?", "Who are you?")]
        engine.generate(prompts, SamplingParams(max_new_tokens=24), lora=adapter)
        after = engine.drafts.accepted, engine.drafts.drafted  # type: ignore[attr-defined]
        accepted.append((after[0] - before[0]) / (after[1] - before[1]))
    assert accepted[1] < 0.2 < accepted[0]


def test_more_adapters_in_a_batch_are_more_products(
    classroom: Classroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one for all a correction of each matrix, with two or eight so many; not asked for, none."""
    products = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal products
        products += 1
        return torch.nn.functional.linear(*args)

    names = [f"a{number}" for number in range(8)]
    engine = engine_of(classroom, lora=dict.fromkeys(names, ADAPTERS / "capitals"), max_running=8)
    monkeypatch.setattr(adapters, "F", SimpleNamespace(linear=counted))
    found = {}
    for asked in (0, 1, 2, 8):
        engine.flush_cache()
        for number in range(8):
            engine.add_request([10 + number] * 4, SamplingParams(max_new_tokens=3, ignore_eos=True),
                               lora=names[number % asked] if asked else "")  # fmt: skip
        engine.step()
        products = 0
        engine.step()  # a decode step
        found[asked] = products
        while engine.has_work:
            engine.step()
    assert found[0] == 0 < found[1] and found[2] == 2 * found[1] and found[8] == 8 * found[1]


# ---------------------------------------------------------------------- the evidence


def play(classroom: Classroom, jobs: list[Job] | tuple[Job, ...], name: str, kv_tokens: int) -> Played:
    setting = SETTINGS[name]
    cache = None if setting.cache is None else setting.cache()
    config = EngineConfig(kv_tokens=kv_tokens, **setting.config)
    engine = CheckedEngine(config, cache, model=classroom[0], tokenizer=classroom[1])
    return play_jobs(engine, jobs, setting, time.perf_counter_ns)


def jobs_of(kind: str, count: int) -> tuple[Job, ...]:
    return KINDS[kind].make(count, random.Random(kind))


@pytest.fixture(scope="module")
def rag(classroom: Classroom) -> dict[str, Played]:
    """Four questions behind one context, in a pool that holds two of them without sharing."""
    jobs = jobs_of("rag", 4)
    return {
        name: play(classroom, jobs, name, 1850) for name in (FULL, "dictionary", "fcfs", "no-parallelism")
    }


@pytest.fixture(scope="module")
def tree(classroom: Classroom) -> dict[str, Played]:
    """Two trees of thought."""
    jobs = [Job(tree_of_thought, (problem, 2)) for problem in corpus.PROBLEMS[:2]]
    names = (FULL, "dictionary", "fcfs", "no-parallelism", "no-hint")
    return {name: play(classroom, jobs, name, 770) for name in names}


@pytest.mark.slow
def test_whole_prompts_help_where_they_are_what_is_shared(
    rag: dict[str, Played], tree: dict[str, Played]
) -> None:
    assert 1.5 * rag[FULL].computed_tokens < rag["dictionary"].computed_tokens
    assert tree["dictionary"].computed_tokens < 1.4 * tree[FULL].computed_tokens
    assert tree["dictionary"].hit_rate > 0.9 * tree[FULL].hit_rate


@pytest.mark.slow
def test_the_order_matters_where_the_pool_is_small(
    classroom: Classroom, rag: dict[str, Played], tree: dict[str, Played]
) -> None:
    assert rag["fcfs"].computed_tokens < 1.1 * rag[FULL].computed_tokens
    assert tree["fcfs"].steps < 1.1 * tree[FULL].steps
    jobs = jobs_of("mmlu-like", 30)
    found = {name: play(classroom, jobs, name, 626) for name in (FULL, "fcfs")}
    assert 1.2 * found[FULL].computed_tokens < found["fcfs"].computed_tokens


def test_branches_want_parallelism_and_chains_do_not(rag: dict[str, Played], tree: dict[str, Played]) -> None:
    assert rag[FULL].steps == rag["no-parallelism"].steps
    assert 1.3 * tree[FULL].steps < tree["no-parallelism"].steps
    assert tree[FULL].new_tokens == tree["no-parallelism"].new_tokens


def test_a_hint_helps_a_choice_and_costs_a_tree_of_thought_steps(
    classroom: Classroom, tree: dict[str, Played]
) -> None:
    assert tree["no-hint"].steps < tree[FULL].steps and tree["no-hint"].new_tokens == tree[FULL].new_tokens
    jobs = jobs_of("mmlu-like", 10)
    found = {name: play(classroom, jobs, name, 626) for name in (FULL, "no-hint")}
    assert 1.2 * found[FULL].computed_tokens < found["no-hint"].computed_tokens
