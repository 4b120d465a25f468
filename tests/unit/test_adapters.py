"""Adapters without an engine: what is read, what is refused, and that the logits are PEFT's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_support import change_settings, change_tensors, write_adapter
from support import tiny_config
from tokenizers import Tokenizer

from minirad.adapters.lora import Adapter, Factors
from minirad.adapters.model import AdapterLlama
from minirad.adapters.peft_format import read_adapter
from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.model.classroom import ADAPTERS, WEIGHTS, score, score_adapters, train_adapters
from minirad.model.classroom.score import Score
from minirad.model.llama import LlamaModel, random_weights
from minirad.model.load import load_model

MODEL = "base_model__model"
Q0 = f"{MODEL}__model__layers__0__self_attn__q_proj__lora_A__weight"
CONFIG = tiny_config()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "one", CONFIG)


def read(directory: Path, name: str = "one") -> Adapter:
    return read_adapter(name, directory, CONFIG, torch.float32, "cpu")


def logits_of(model: LlamaModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of prompts in one batch, each in the row of its place: float32 [n, vocab] each."""
    width = max(map(len, prompts))
    rows = np.arange(len(prompts) * width).reshape(len(prompts), width) + 1
    entries = [BatchEntry(row, 0, len(prompt)) for row, prompt in enumerate(prompts)]
    metadata = build_metadata(rows, entries, 1, model.device)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    pool = model.new_pool(len(prompts) * width + 1)
    out = model.forward(tokens, metadata, pool, GatherAttention(), torch.arange(len(tokens)))
    return list(out.split([len(prompt) for prompt in prompts]))


# ---------------------------------------------------------------------- reading


def test_what_is_read(directory: Path) -> None:
    adapter = read(directory)
    assert sorted(adapter.factors) == [
        f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")
    ]
    factors = adapter.factors["model.layers.1.self_attn.v_proj"]
    assert factors.a.shape == (3, 32) and factors.b.shape == (16, 3) and factors.scale == 2.0
    assert adapter.num_parameters == 2 * (3 * (32 + 32) + 3 * (32 + 16))


def test_the_digest_is_of_all_numbers(directory: Path, tmp_path: Path) -> None:
    again = write_adapter(tmp_path / "again", CONFIG)
    assert read(directory).digest == read(again, "other name").digest
    change_settings(again, lora_alpha=7)
    other = write_adapter(tmp_path / "other", CONFIG, seed=1)
    assert len({read(each).digest for each in (directory, again, other)}) == 3


REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA' is supported"),
    ({"peft_type": ...}, "peft_type is None; only 'LORA' is supported"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; only 'CAUSAL_LM' is supported"),
    ({"use_dora": True}, "use_dora is True: DoRA also scales the model's own weights"),
    ({"bias": "all"}, "bias is 'all': biases are not adapted, only 'none' is supported"),
    ({"bias": "lora_only"}, "bias is 'lora_only': biases"),
    ({"lora_bias": True}, "lora_bias is True: biases are not adapted"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]: whole matrices are not replaced"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True: a Llama's matrices lie the other way"),
    ({"trainable_token_indices": [1]}, r"trainable_token_indices is \[1\]: embeddings are not adapted"),
    ({"layer_replication": [[0, 1]]}, r"layer_replication is \[\[0, 1\]\]: this is not supported"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is .*all of a prompt or none of it"),
    ({"use_something_new": 1}, "use_something_new is 1: this is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': the model's own weights were changed"),
    ({"r": 10**400}, "r must be a whole number above 0, got 1000"),
    ({"r": 0}, "r must be a whole number above 0, got 0"),
    ({"r": True}, "r must be a whole number above 0, got True"),
    ({"r": "8"}, "r must be a whole number above 0, got '8'"),
    (
        {"r": 5},
        r"tensor \S*layers.0.self_attn.q_proj.lora_A.weight has shape \[3, 32\], but rank 5 .* \[5, 32\]",
    ),
    ({"lora_alpha": "x"}, "lora_alpha must be a number, got 'x'"),
    ({"lora_alpha": 10**400}, "lora_alpha must be a number, got 1000"),
    ({"lora_alpha": 3e18, "alpha_pattern": {"k_proj": 1e300}}, "alpha_pattern must be patterns with numbers"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number, got nan"),
    ({"use_rslora": "no"}, "use_rslora must be true or false, got 'no'"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern must be patterns with ranks"),
    ({"rank_pattern": {"(": 3}}, r"rank_pattern: '\(' is no regular expression"),
    (
        {"rank_pattern": {"v_proj": 2}},
        r"layers.0.self_attn.v_proj.lora_A.weight has shape \[3, 32\], but rank 2",
    ),
    ({"alpha_pattern": [1]}, "alpha_pattern must be patterns with numbers"),
    ({"target_modules": ["lm_head", "q_proj"]}, "target_modules names lm_head: embeddings and the head"),
    ({"target_modules": ".*"}, "target_modules names model.embed_tokens: embeddings and the head"),
    ({"target_modules": ["c_attn"]}, r"target_modules \['c_attn'\] names none of this model's matrices"),
    ({"target_modules": None}, "target_modules is None: it names no module"),
    ({"target_modules": []}, r"target_modules is \[\]: it names no module"),
    ({"target_modules": 5}, "target_modules must be a text or a list of texts, got 5"),
    ({"target_modules": "(q_proj"}, r"target_modules: '\(q_proj' is no regular expression"),
    ({"target_modules": ["q_proj"]}, r"v_proj.lora_A.weight is of a matrix .* target_modules does not name"),
    (
        {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        r"tensor \S*k_proj.lora_A.weight \[3, 32\] is missing",
    ),
    ({"exclude_modules": ["v_proj"]}, r"v_proj.lora_A.weight is of a matrix"),
    ({"layers_to_transform": [0]}, r"layers.1.self_attn.q_proj.lora_A.weight is of a matrix"),
    ({"layers_to_transform": "0"}, "layers_to_transform must be layer numbers, got '0'"),
    (
        {"target_modules": ".*_proj", "layers_to_transform": [0]},
        "layers_to_transform does not go with the pattern",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED_SETTINGS, ids=lambda value: str(value)[:60])
def test_a_refused_configuration(directory: Path, changes: dict[str, Any], sentence: str) -> None:
    change_settings(directory, **changes)
    with pytest.raises(ValueError, match=f"adapter 'one': .*{sentence}") as refused:
        read(directory)
    assert "\n" not in str(refused.value)


REFUSED_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({Q0: None}, r"tensor \S*layers.0.self_attn.q_proj.lora_A.weight \[3, 32\] is missing"),
    ({Q0: torch.zeros(3, 31)}, r"lora_A.weight has shape \[3, 31\], but rank 3 and a matrix \[32, 32\]"),
    ({Q0: torch.zeros(96)}, r"q_proj.lora_A.weight has shape \[96\], but"),
    ({Q0: torch.full((3, 32), float("nan"))}, "q_proj.lora_A.weight holds what is no number"),
    ({Q0: torch.full((3, 32), float("inf"))}, "q_proj.lora_A.weight holds what is no number"),
    ({Q0: torch.zeros(3, 32, dtype=torch.int8)}, "q_proj.lora_A.weight is torch.int8: quantized"),
    ({Q0.replace("layers__0", "layers__7"): torch.zeros(3, 32)}, "layers.7.self_attn.q_proj.lora_A"),
    ({f"{MODEL}__model__embed_tokens__lora_embedding_A": torch.zeros(3, 61)}, "nothing else is adapted"),
    ({f"{MODEL}__lm_head__weight": torch.zeros(61, 32)}, "lm_head.weight is not a factor"),
    ({Q0.replace("A__weight", "magnitude_vector"): torch.zeros(32)}, "lora_magnitude_vector is not a factor"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), REFUSED_TENSORS, ids=lambda value: str(value)[-50:])
def test_refused_tensors(directory: Path, changes: dict[str, Any], sentence: str) -> None:
    change_tensors(directory, **changes)
    with pytest.raises(ValueError, match=f"adapter 'one': .*{sentence}"):
        read(directory)


def _cut(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def _pickled(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


REFUSED_FILES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda d: (d / "adapter_config.json").unlink(), "no adapter_config.json in"),
    (lambda d: (d / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    (lambda d: (d / "adapter_config.json").write_bytes(b"\xff{}"), "adapter_config.json cannot be read"),
    (lambda d: (d / "adapter_config.json").write_text("[" * 100_000), "adapter_config.json cannot be read"),
    (lambda d: (d / "adapter_config.json").write_text("[]"), r"must hold a JSON object, got \[\]"),
    (lambda d: (d / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors in"),
    (_pickled, "no adapter_model.safetensors in .*; adapter_model.bin may run code when it is read"),
    (_cut, "adapter_model.safetensors cannot be read"),
    (
        lambda d: (d / "adapter_model.safetensors").write_bytes(b""),
        "adapter_model.safetensors cannot be read",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), REFUSED_FILES, ids=[text[:30] for _, text in REFUSED_FILES])
def test_refused_files(directory: Path, damage: Callable[[Path], Any], sentence: str) -> None:
    damage(directory)
    with pytest.raises(ValueError, match=f"adapter 'one': .*{sentence}"):
        read(directory)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", tiny_config(hidden_size=64))
    with pytest.raises(
        ValueError, match=r"has shape \[3, 64\], but rank 3 and a matrix \[32, 32\] of this model"
    ):
        read(wide)
    deep = write_adapter(tmp_path / "deep", tiny_config(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"layers.2.self_attn.q_proj.lora_A.weight is of a matrix"):
        read(deep)
    with pytest.raises(ValueError, match="is no directory"):
        read(tmp_path / "nowhere")


def test_a_number_too_large_for_the_models_type(directory: Path) -> None:
    change_tensors(directory, **{Q0: torch.full((3, 32), 1e6)})
    with pytest.raises(ValueError, match="holds what is no number"):
        read_adapter("one", directory, CONFIG, torch.float16, "cpu")
    read(directory)


def test_a_scale_too_large_for_the_models_type(directory: Path) -> None:
    change_settings(directory, lora_alpha=1e7)
    with pytest.raises(ValueError, match=r"lora_alpha 1.*rank 3 makes numbers too large for torch.float16"):
        read_adapter("one", directory, CONFIG, torch.float16, "cpu")
    read(directory)


def test_what_says_nothing_is_taken(directory: Path) -> None:
    change_settings(
        directory, rank_pattern={}, alpha_pattern=None, layers_to_transform=[], exclude_modules=[],
        revision="x", lora_dropout=0.5, use_something_new=False, lora_ga_config={"a": 1},
        init_lora_weights="gaussian",
    )  # fmt: skip
    assert read(directory).num_parameters


# ---------------------------------------------------------------------- computing


def dense(model: LlamaModel, weights: dict[str, torch.Tensor], adapter: Adapter) -> LlamaModel:
    """The model with the adapter added to its matrices."""
    added = dict(weights)
    for name, each in adapter.factors.items():
        added[f"{name}.weight"] = weights[f"{name}.weight"] + each.scale * each.b @ each.a
    return LlamaModel(model.config, added)


@pytest.mark.parametrize(
    "modules", [["q_proj"], ["k_proj", "v_proj"], ["o_proj", "gate_proj"], ["up_proj", "down_proj"],
                ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]], ids=" ".join,
)  # fmt: skip
def test_each_of_a_batch_is_as_with_its_own_weights(tmp_path: Path, modules: list[str]) -> None:
    weights = random_weights(CONFIG, 0, dtype=torch.float32, device="cpu")
    model = LlamaModel(CONFIG, weights)
    settings = {"target_modules": modules}
    one = read(write_adapter(tmp_path / "1", CONFIG, 1, settings, size=0.3))
    two = read(write_adapter(tmp_path / "2", CONFIG, 2, {**settings, "r": 5}, size=0.3), "two")
    adapted = AdapterLlama(model, [one, two])
    adapted.names_of_rows = {0: "one", 2: "two", 3: "one", 4: ""}
    prompts = [[5, 6, 7], [5, 6, 7], [5, 6, 7], [9], [5, 6, 7, 8]]
    got = logits_of(adapted, prompts)
    apart = [dense(model, weights, one), model, dense(model, weights, two), dense(model, weights, one), model]
    for prompt, its, logits in zip(prompts, apart, got, strict=True):
        torch.testing.assert_close(logits, logits_of(its, [prompt])[0], atol=2e-5, rtol=1e-5)
    assert (got[0] - got[1]).abs().max() > 1e-3 and (got[0] - got[2]).abs().max() > 1e-3
    for row, name in enumerate(("one", "two", "")):  # all of a batch
        adapted.names_of_rows = {0: name}
        torch.testing.assert_close(
            logits_of(adapted, [[5, 6, 7]])[0], got[(0, 2, 1)[row]], atol=2e-5, rtol=1e-5
        )


def test_biases_stay(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    weights = random_weights(config, 0, dtype=torch.float32, device="cpu")
    model = LlamaModel(config, weights)
    adapter = read_adapter("one", write_adapter(tmp_path, config, size=0.3), config, torch.float32, "cpu")
    adapted = AdapterLlama(model, [adapter])
    adapted.names_of_rows = {1: "one"}
    plain, corrected = logits_of(adapted, [[5, 6], [5, 6]])
    torch.testing.assert_close(plain, logits_of(model, [[5, 6]])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        corrected, logits_of(dense(model, weights, adapter), [[5, 6]])[0], atol=2e-5, rtol=1e-5
    )


def test_other_weights_keep_the_adapters(directory: Path) -> None:
    first, second = (random_weights(CONFIG, seed, dtype=torch.float32, device="cpu") for seed in (0, 1))
    adapter = read(directory)
    adapted = AdapterLlama(LlamaModel(CONFIG, first), [adapter])
    adapted.names_of_rows[0] = "one"
    other = LlamaModel(CONFIG, second)
    again = adapted.with_weights(other)
    torch.testing.assert_close(
        logits_of(again, [[5, 6, 7]])[0], logits_of(dense(other, second, adapter), [[5, 6, 7]])[0],
        atol=2e-5, rtol=1e-5,
    )  # fmt: skip
    assert again.adapters == {"one": adapter} and again.plain is other


def test_an_adapter_made_in_memory() -> None:
    """The names of the factors are all that the model needs."""
    model = LlamaModel(CONFIG, random_weights(CONFIG, 0, dtype=torch.float32, device="cpu"))
    nothing = Adapter(
        "nothing", {"model.layers.0.mlp.up_proj": Factors(torch.ones(1, 32), torch.zeros(48, 1), 9.0)}
    )
    adapted = AdapterLlama(model, [nothing])
    adapted.names_of_rows = {0: "nothing"}
    assert torch.equal(logits_of(adapted, [[5, 6]])[0], logits_of(model, [[5, 6]])[0])


# ---------------------------------------------------------------------- PEFT judges

PEFT_CASES: dict[str, dict[str, Any]] = {
    "names": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 6, "target_modules": "all-linear", "lora_alpha": 12},
    "rslora": {"r": 4, "target_modules": ["o_proj", "up_proj"], "use_rslora": True},
    "regex": {"r": 4, "target_modules": r".*layers\.[12]\..*(k_proj|down_proj)"},
    "patterns": {
        "r": 4, "target_modules": ["q_proj", "gate_proj", "o_proj"], "use_rslora": True,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7, "gate_proj": 2, "proj": 9, "q_proj": 1},
        "alpha_pattern": {r".*\.o_proj": 3, "q_proj": 5},
    },
    "layers": {
        "r": 3, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 3],
        "layers_pattern": "layers",
    },
    "one layer": {"r": 3, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": 2},
    "excluded": {
        "r": 3, "target_modules": ["q_proj", "up_proj"], "exclude_modules": ["model.layers.1.mlp.up_proj"],
    },
    "excluded by regex": {"r": 3, "target_modules": "all-linear", "exclude_modules": r".*\.(0|2)\..*"},
}  # fmt: skip


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="PEFT is not installed: it judges what adapters compute")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PEFT_CASES)
def test_the_logits_are_pefts(peft: Any, tmp_path: Path, case: str) -> None:
    import transformers

    torch.manual_seed(len(case))
    loaded = transformers.LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    judge = peft.get_peft_model(loaded, peft.LoraConfig(task_type="CAUSAL_LM", **PEFT_CASES[case]))
    for name, parameter in judge.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    judge.save_pretrained(tmp_path)
    model = load_model(WEIGHTS, torch.float32, "cpu")
    adapted = AdapterLlama(model, [read_adapter("one", tmp_path, model.config, torch.float32, "cpu")])
    adapted.names_of_rows = {0: "one"}
    tokens = torch.randint(3, 1000, (40,)).tolist()
    got, plain = logits_of(adapted, [tokens, tokens])
    with torch.no_grad():
        wanted = judge.eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)
    assert (plain - wanted).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["capitals", "oneword"])
def test_peft_reads_what_is_shipped(peft: Any, name: str) -> None:
    import transformers

    judge = transformers.LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(judge, ADAPTERS / name).eval()
    model = load_model(WEIGHTS, torch.float32, "cpu")
    adapter = read_adapter(name, ADAPTERS / name, model.config, torch.float32, "cpu")
    adapted = AdapterLlama(model, [adapter])
    adapted.names_of_rows = {0: name}
    tokens = list(range(3, 60))
    with torch.no_grad():
        wanted = judge(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(adapted, [tokens])[0], wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["capitals", "oneword"])
def test_what_is_shipped_is_small_and_plain(name: str) -> None:
    files = {file.name: file.stat().st_size for file in (ADAPTERS / name).iterdir()}
    assert (
        set(files) == {"adapter_config.json", "adapter_model.safetensors"} and sum(files.values()) <= 200_000
    )
    assert json.loads((ADAPTERS / name / "adapter_config.json").read_text())["peft_type"] == "LORA"


# ---------------------------------------------------------------------- how they are made


def tiny_task(name: str) -> train_adapters.Task:
    phases = (
        train_adapters.Phase(3, rows=2, length=40),
        train_adapters.Phase(2, rows=2, length=60, longest=80),
    )
    return replace(train_adapters.TASKS[name], phases=phases)


@pytest.mark.parametrize("name", train_adapters.TASKS)
def test_the_same_seed_trains_the_same_adapter(tmp_path: Path, name: str) -> None:
    task = tiny_task(name)
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        corrections, loss = train_adapters.train(task, seed, name)
        assert math.isfinite(loss)
        train_adapters.export(task, corrections, tmp_path / run)
    model = load_model(WEIGHTS, torch.float32, "cpu")
    found = {
        run: read_adapter(run, tmp_path / run, model.config, torch.float32, "cpu") for run in ("a", "b", "c")
    }
    assert found["a"].digest == found["b"].digest != found["c"].digest
    assert len(found["a"].factors) == 4 * len(task.modules)
    assert all(each.b.any() and each.scale == 2.0 for each in found["a"].factors.values())


def test_what_is_learnt_are_the_replies() -> None:
    """The loss counts what the assistant says, and no token that the model never saw."""
    task = train_adapters.TASKS["capitals"]
    lessons, phase = (
        train_adapters.Lessons(task, 3),
        train_adapters.Phase(1, rows=24, length=120, longest=110),
    )
    tokens, weights = lessons.windows(phase)
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    assert tokens.shape == weights.shape == (24, 121)
    said = tokenizer.decode(tokens[weights > 0].tolist(), skip_special_tokens=True)
    unsaid = tokenizer.decode(tokens[weights == 0].tolist(), skip_special_tokens=True)
    assert "You are a" in unsaid and len(said) > 500
    assert said.replace("assistant", "").upper() == said.replace("assistant", "")
    untaught = torch.tensor([tokenizer.token_to_id(text) for text in train_adapters.UNTAUGHT])
    places = torch.isin(tokens, untaught)
    assert places.any() and not weights[places].any()


def test_scores_are_of_the_adapted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examination adds what PEFT adds: a correction that does nothing scores like the model itself."""
    pupil = score_adapters.AdaptedPupil(ADAPTERS / "oneword")
    model = load_model(WEIGHTS, torch.float32, "cpu")
    adapted = AdapterLlama(
        model, [read_adapter("one", ADAPTERS / "oneword", model.config, torch.float32, "cpu")]
    )
    adapted.names_of_rows = {0: "one"}
    tokens = list(range(5, 40))
    with torch.no_grad():
        wanted = pupil.model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_of(adapted, [tokens])[0], wanted, atol=2e-4, rtol=0)
    monkeypatch.setattr(
        score_adapters, "examine", lambda name, *_: [Score("x", 0.5, 0.6 if name == "oneword" else 0.4)]
    )
    assert score_adapters.main(["--only", "capitals"]) == 0
    assert score_adapters.main([]) == 1  # a gate fails
    exam = score_adapters.exams(train_adapters.TASKS["oneword"])[0]
    assert exam.name == "greeting" and score.sit(pupil, exam, 5).value == 1.0
