"""Wrong input: a ValueError with the value and the limit, nothing queued, the others served. And imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CheckedEngine
from support import drive

import minirad
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.model.load import resolve_model

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)

# ---------------------------------------------------------------------- requests

WRONG_PROMPTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty ids": ([], {}, "prompt is empty: at least one token"),
    "empty array": (np.array([], dtype=np.int64), {}, "prompt is empty"),
    "negative id": ([5, -1], {}, "token id -1 is outside the vocabulary of 61"),
    "id too large": ([61], {}, "token id 61 is outside the vocabulary of 61"),
    "huge id": ([2**40], {}, f"token id {2**40} is outside the vocabulary of 61"),
    "beyond int64": ([2**70], {}, "must be one row of integers"),
    "fractions": ([1.5, 2.0], {}, "must be one row of integers, got float64"),
    "truth values": ([True, False], {}, "must be one row of integers, got bool"),
    "two rows": ([[1, 2], [3, 4]], {}, r"must be one row of integers, got int64 of shape \(2, 2\)"),
    "words": (["a", "b"], {}, "must be one row of integers"),
    "nothing": (None, {}, "a text or a row of token ids"),
    "text without a tokenizer": ("hello", {}, "no tokenizer: give token ids"),
    "beyond the context": ([5] * 30, {"max_new_tokens": 11}, "30 prompt .* 11 new .* = 41 .* context of 40"),
    "beyond the pool": ([5] * 30, {"max_new_tokens": 3}, "30 prompt .* 3 new .* = 33 .* KV pool of 32"),
    "more samples than rows": ([5], {"n": 5}, "n=5 samples need as many rows, there are 4"),
    "logprobs past the prompt": ([5, 6], {"logprob_start": 2}, "logprob_start 2 is past the prompt's 2"),
    "stop texts without a tokenizer": ([5], {"stop": "x"}, "no tokenizer"),
}


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_a_wrong_prompt_is_refused_and_the_others_are_served(make_engine: MakeEngine, case: str) -> None:
    prompt, how, message = WRONG_PROMPTS[case]
    params = SamplingParams(**how)
    engine = make_engine(kv_tokens=32, max_context=40)
    (wanted,) = make_engine().generate(PROMPT, FOUR)
    engine.add_request(PROMPT, FOUR)
    engine.step()
    before = engine.snapshot()
    for refused in (
        lambda: engine.add_request(prompt, params),
        lambda: engine.stream(prompt, params),
        lambda: engine.generate([PROMPT, prompt, PROMPT], [FOUR, params, FOUR]),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
        assert engine.snapshot() == before, "nothing was queued"
    (output,) = drive(engine)
    assert output.token_ids == wanted.token_ids


@pytest.mark.parametrize("number", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=repr)
def test_a_single_number_is_no_prompt(make_engine: MakeEngine, number: Any) -> None:
    engine = make_engine()
    for call in (engine.generate, engine.add_request, engine.peek, engine.pin, engine.encode):
        with pytest.raises(ValueError, match=r"prompt.*, got .*3"):
            call(number)
    (output,) = engine.generate([number, number], FOUR)
    assert output.prompt_tokens == 2, "a row of them is one"


@pytest.mark.parametrize("rows", [[[[1], [2, 3]]], [[5, 6], [[1], [2, 3]]], [[[1], []], [5]]], ids=repr)
def test_rows_of_different_lengths_are_no_prompt(make_engine: MakeEngine, rows: Any) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"a prompt must be one row of integers, got \[\["):
        engine.generate(rows, FOUR)
    assert not engine.has_work


NO_IDS: list[Any] = [
    None, 3, "", "ab", b"", b"ab", bytearray(b"a"), memoryview(b"a"), {}, {1: 2}, [1.5], [True], ["a"], [-1],
    [[1]], np.array(3), np.array([0.5]), torch.tensor(3),
]  # fmt: skip


@pytest.mark.parametrize("ids", NO_IDS, ids=lambda ids: type(ids).__name__)
def test_what_are_no_token_ids(ids: Any) -> None:
    engine = Engine(EngineConfig(device="cpu", kv_tokens=16))
    with pytest.raises(ValueError, match=r"^stop_token_ids must be a sequence of token ids, 0 or more, got "):
        SamplingParams(stop_token_ids=ids)
    with pytest.raises(ValueError, match=r"^token_ids must be a sequence of token ids, 0 or more, got "):
        engine.decode(ids)


def test_token_ids_in_any_row() -> None:
    engine = Engine(EngineConfig(device="cpu", kv_tokens=16))
    ids = engine.encode("One, two!").tolist()
    for row in (ids, tuple(ids), np.array(ids), torch.tensor(ids), iter(ids)):
        assert engine.decode(row) == "One, two!"  # type: ignore[arg-type]
    assert engine.decode([]) == "" == engine.decode([2**31 - 1])
    for beyond in (2**31, 2**32, 2**70):
        with pytest.raises(ValueError, match=rf"token_ids: {beyond} is out of range 0 to {2**31 - 1}"):
            engine.decode([*ids, beyond])


@pytest.mark.parametrize("lora", [None, 3, False, np.array(3), torch.tensor(3), EngineConfig], ids=repr)
def test_what_are_no_adapters(lora: Any) -> None:
    with pytest.raises(ValueError, match="lora must be adapters by name, got "):
        EngineConfig(lora=lora)


@pytest.mark.parametrize("where", [False, 0, [], np.array([1, 2]), torch.tensor([1, 2])], ids=repr)
def test_what_is_no_directory_of_an_adapter(where: Any) -> None:
    for lora in ({"one": where}, [("one", where)]):
        with pytest.raises(ValueError, match="the adapter one must be a path, got "):
            EngineConfig(lora=lora)


def test_generate_refuses_unequal_numbers_of_prompts_and_parameters(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="2 prompts but 3 sampling parameters"):
        engine.generate([[5], [6]], [FOUR] * 3)
    assert not engine.has_work


def test_what_is_no_priority_or_key_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for priority in (1.5, True, "high", None):
        with pytest.raises(ValueError, match="priority must be a whole number, got"):
            engine.add_request(PROMPT, FOUR, priority=priority)
    for key in (["a"], torch.tensor([1, 2]), np.zeros(2)):  # a tensor can be hashed, and is not equal or not
        with pytest.raises(ValueError, match=r"extra_key must be hashable, and equal to another or not, got"):
            engine.add_request(PROMPT, FOUR, extra_key=key)
    assert not engine.has_work


def test_unknown_requests_and_pins(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.abort("R1") is False
    pin = engine.pin(PROMPT)
    engine.unpin(pin)
    with pytest.raises(ValueError, match="pin 1 is not held"):
        engine.unpin(pin)
    for prompt in ([5, -1], [2**31]):
        with pytest.raises(ValueError, match="token id"):
            engine.peek(prompt)
        with pytest.raises(ValueError, match="token id"):
            engine.pin(prompt)


def test_a_prompt_of_just_the_limit_is_served(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=32, max_context=32)
    (output,) = engine.generate([5] * 28, FOUR)
    assert len(output.token_ids) == 4
    assert engine.generate([60, 0], FOUR)[0].prompt_tokens == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", -1, "max_new_tokens must be at least 0, got -1"),
        ("max_new_tokens", 2.5, "max_new_tokens must be a whole number, got 2.5"),
        ("max_new_tokens", True, "max_new_tokens must be a whole number, got True"),
        ("temperature", -0.5, "temperature must be 0 or more, got -0.5"),
        ("temperature", float("nan"), "temperature must be 0 or more, got nan"),
        ("temperature", float("inf"), "temperature must be 0 or more, got inf"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
        ("top_p", 1.1, "top_p must be above 0 and at most 1, got 1.1"),
        ("top_p", float("nan"), "top_p must be above 0 and at most 1, got nan"),
        ("top_k", -1, "top_k must be at least 0, got -1"),
        ("n", 0, "n must be at least 1, got 0"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("logprob_start", -1, "logprob_start must be at least 0, got -1"),
        ("stop", "", "stop must be non-empty texts, got ''"),
        ("stop", ("a", ""), r"stop must be non-empty texts, got \('a', ''\)"),
        ("stop", (1,), r"stop must be non-empty texts, got \(1,\)"),
    ],
)
def test_wrong_sampling_parameters(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_a_number_that_is_too_long_is_refused_by_name() -> None:
    for name in ("temperature", "top_p"):
        with pytest.raises(ValueError, match=f"{name} must fit into a float, got 1000.*000"):
            SamplingParams(**{name: 10**400})
    long = 10**5000
    for call, told in (
        (lambda: SamplingParams(temperature=-long), "temperature must fit into a float"),
        (lambda: SamplingParams(max_new_tokens=long), "max_new_tokens must fit into 64 bits"),
        (lambda: SamplingParams(stop=["a", long]), "stop must be non-empty texts"),  # type: ignore[list-item]
        (lambda: EngineConfig(new_token_ratio=long), "new_token_ratio must fit into a float"),
    ):
        with pytest.raises(ValueError, match=f"{told}, got .*digits"):
            call()


@pytest.mark.parametrize("temperature", [1, 2**63, 2**64, 10**30, np.uint64(2**64 - 1)])
def test_a_temperature_is_any_number_that_fits_a_float(make_engine: MakeEngine, temperature: Any) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=temperature, top_p=1, seed=5, ignore_eos=True)
    same = SamplingParams(max_new_tokens=4, temperature=float(temperature), seed=5, ignore_eos=True)
    assert params == same and (type(params.temperature), type(params.top_p)) == (float, float)
    outputs = make_engine().generate([PROMPT, PROMPT], [params, same])
    assert outputs[0].finish_reason == "length" and outputs[0].token_ids == outputs[1].token_ids


# ---------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule_policy": "best"}, "unknown schedule policy 'best'; known: fcfs, lpm"),
        ({"eviction_policy": "best"}, "unknown eviction policy 'best'; known: lru, lfu, "),
        ({"page_size": 3, "kv_tokens": 64}, "page_size 3 does not divide kv_tokens 64"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"page_size": 8, "kv_tokens": 4}, "kv_tokens must be at least 8, got 4"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1, got 0"),
        ({"kv_tokens": 1.5}, "kv_tokens must be a whole number, got 1.5"),
        ({"max_running": 0}, "max_running must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"max_context": 1}, "max_context must be at least 2, got 1"),
        ({"max_context": 129}, "max_context 129 is more than the model's 128"),
        ({"device": "abacus"}, "unknown device 'abacus'; known: auto, cpu, cuda"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; known: auto, float32"),
        ({"attention": "none"}, "unknown attention 'none'; known: auto, torch"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"host_kv_tokens": -1}, "host_kv_tokens must be at least 0, got -1"),
        ({"host_write": "never"}, "unknown host_write 'never'; known: write_through"),
    ],
)
def test_wrong_configurations(tiny_model: LlamaModel, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(EngineConfig(**changes), model=tiny_model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(ValueError, match="device 'cuda': torch sees no NVIDIA GPU here"):
        Engine(EngineConfig(device="cuda"))


def test_a_model_directory_that_lacks_something(tmp_path: Path) -> None:
    source = resolve_model(None)
    with pytest.raises(ValueError, match="'no/such/model' is no directory"):
        Engine(EngineConfig(model="no/such/model"))
    for name, missing in (("config.json", "a tokenizer"), ("tokenizer.json", "weights")):
        with pytest.raises(ValueError, match=f"{tmp_path.name} lacks .*{missing}"):
            Engine(EngineConfig(model=tmp_path))
        (tmp_path / name).write_bytes((source / name).read_bytes())
    with pytest.raises(ValueError, match=r"lacks weights \(model\.safetensors or .*\)$"):
        Engine(EngineConfig(model=tmp_path))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.update(model_type="gpt2", architectures=["GPT2LMHeadModel"])
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="gpt2"):
        Engine(EngineConfig(model=tmp_path))


# ---------------------------------------------------------------------- imports

SOURCES = sorted(Path(minirad.__file__).parent.rglob("*.py"))


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    root = Path(minirad.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import minirad",
        "from minirad import RadixCache, RadixKey",
        "from minirad import EngineConfig, SamplingParams, InvariantError",
        "from minirad import Recorder, Recording",
        "import minirad.schedule.scheduler, minirad.schedule.cache_manager",
    ],
)
def test_the_light_half_imports_no_torch(statement: str) -> None:
    heavy = {"torch", "transformers", "tokenizers", "plotly", "graphviz", "flashinfer", "IPython"}
    assert loaded_after(statement) & heavy == set()


def test_the_engine_imports_no_model_zoo_and_no_picture() -> None:
    heavy = {"transformers", "plotly", "graphviz", "flashinfer", "IPython", "ipywidgets", "viz"}
    assert loaded_after("from minirad import Engine, resolve_model") & heavy == set()


def imported(path: Path) -> set[str]:
    """Top-level modules that a source file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_minirad_imports_neither_pictures_nor_notebooks(path: Path) -> None:
    pictures = {"viz", "lessons", "plotly", "graphviz", "IPython", "ipywidgets", "anywidget", "jupyter"}
    assert imported(path) & pictures == set()


@pytest.mark.parametrize("package", ["cache", "schedule"])
def test_cache_and_schedule_import_no_torch(package: str) -> None:
    for path in SOURCES:
        if path.parent.name == package:
            assert "torch" not in imported(path), path.name


def test_public_names_are_there() -> None:
    assert set(minirad.__all__) <= set(dir(minirad))
    for name in minirad.__all__:
        assert getattr(minirad, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        minirad.nonsense  # noqa: B018
