"""`bench gpu`, random weights and the one sentence, as far as they go without a GPU."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minirad.__main__ import main
from minirad.attention import BatchEntry, build_metadata
from minirad.bench import gpu
from minirad.bench.dummy import SHAPES, dummy_config, dummy_model
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.fast.paged import TorchPagedAttention
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, resolve_model
from minirad.outputs import StepReport

pytestmark = pytest.mark.slow

# of the real models, on their pages
PARAMETERS = {"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "smollm2-135m": 134_515_008}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def classroom() -> LlamaModel:
    return load_model(resolve_model(None), torch.float32, "cpu")


@pytest.fixture(scope="module")
def subject(classroom: LlamaModel) -> gpu.Subject:
    return gpu.Subject(classroom, EngineConfig(), classroom)


def test_shapes_are_those_of_the_real_models() -> None:
    assert {name: dummy_config(name).num_parameters for name in SHAPES} == PARAMETERS
    with pytest.raises(ValueError, match=r"llama-3\.2-1b"):
        dummy_config("llama-4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_give_finite_logits_of_a_usual_size(dtype: torch.dtype) -> None:
    model = dummy_model("smollm2-135m", dtype, "cpu")
    pool = model.new_pool(9)
    rows = torch.arange(1, 9)[None].numpy()
    meta = build_metadata(rows, [BatchEntry(0, 0, 8)], 1, "cpu")
    logits = model.forward(torch.arange(8), meta, pool, TorchPagedAttention(), torch.arange(8))
    assert logits.isfinite().all() and 0.3 < logits.std().item() < 3


def test_dummy_weights_and_a_model_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="only one of the two"):
        EngineConfig(model="classroom", dummy_weights="smollm2-135m")
    with pytest.raises(ValueError, match="smollm2-135m"):
        EngineConfig(dummy_weights="gpt-2")


def test_token_ids_in_and_out_without_a_tokenizer(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    dummy = ["generate", "--dummy-weights", "smollm2-135m", "--max-new-tokens", "2", "--json"]
    assert main([*dummy, "5 6 7"]) == 0
    said = capsys.readouterr()
    (output,) = json.loads(said.out)
    assert len(output["token_ids"]) == 2 and output["prompt_tokens"] == 3 and output["text"] == ""
    assert said.err.count("No NVIDIA GPU is visible to torch, so attention runs in plain torch") == 1
    assert main([*dummy, "Hello"]) == 2
    assert "token ids such as '1 2 3'" in capsys.readouterr().err


def test_info_says_once_what_is_missing(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["info"]) == 0
    assert capsys.readouterr().err.count("No NVIDIA GPU") == 1
    assert main(["info", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["info", "--attention", "flashinfer"]) == 2
    assert "'flashinfer' cannot run: no NVIDIA GPU" in capsys.readouterr().err


def test_bench_gpu_needs_a_gpu(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    assert main(["bench", "gpu", "--json"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_every_workload_runs_with_and_without_the_cache(subject: gpu.Subject) -> None:
    rows = gpu.run_all(subject, gpu.WORKLOADS, [1, 4], 1e11, 0.03)
    assert [(row["page_size"], row["radix_cache"]) for row in rows] == (
        [(1, True)] * 5 + [(4, True)] * 5 + [(1, False)] * 5
    )
    for row in rows:
        assert row["output_tokens_per_s"] > 0 and row["retracted"] == 0
        assert row["decode_bandwidth_share"] is None or 0 < row["decode_bandwidth_share"] < 10
    assert {row["hit_share"] for row in rows if not row["radix_cache"]} == {0.0}


def test_a_step_in_which_a_graph_is_captured_does_not_count(
    subject: gpu.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, slow = Engine.step, [0.001, 5.0, 0.001, 0.001, 0.001, 0.001, 4.0]

    def timed(engine: Engine) -> StepReport:
        report = step(engine)
        return replace(report, seconds=slow.pop() if report.kind == "decode" else 1.0)

    monkeypatch.setattr(Engine, "step", timed)
    row = gpu.run_workload(subject, gpu.Workload("", 2, (6, 6), (8, 8)), 1, True, 1e9)
    assert not slow and row["decode_ms_per_step"] == 1.0
    weights, kv = gpu.weight_bytes(subject.model), 2 * subject.model.new_pool(2).bytes_per_token
    assert weights + kv * 7 < row["decode_bandwidth_share"] * 1e6 < weights + kv * 14


def test_what_was_measured_before_it_was_cut_short_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "roofline", cut_short)
    monkeypatch.setattr(gpu, "WORKLOADS", gpu.WORKLOADS[:1])
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    file = tmp_path / "out.json"
    words = ["bench", "gpu", "--device", "cpu", "--model", "classroom", "--quick", "--out", str(file)]
    with contextlib.suppress(KeyboardInterrupt):  # or it is an exit code
        main(words)
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert all(row["right"] for row in kept["parity"]) and len(kept["workloads"]) == 2
    assert "roofline" not in kept


def test_requests_are_as_long_and_share_as_much_as_said() -> None:
    work = gpu.WORKLOADS[-1]
    requests = gpu.make_requests(work, 1000)
    assert len(requests) == 256
    assert {(len(prompt), new) for prompt, new in requests} == {(2100, 128)}
    assert len({tuple(prompt[:2000]) for prompt, _ in requests}) == 1
    assert len({tuple(prompt[:2001]) for prompt, _ in requests}) > 200
    mixed = gpu.make_requests(gpu.WORKLOADS[3], 1000)
    assert all(100 <= len(prompt) <= 1024 and 100 <= new <= 1024 for prompt, new in mixed)


def test_the_table_shows_every_row(classroom: LlamaModel, subject: gpu.Subject) -> None:
    rows = gpu.run_all(subject, gpu.WORKLOADS[:2], [1], 1e11, 0.03)
    result = {
        "machine": gpu.machine(torch.device("cpu")),
        "model": "classroom",
        "tp": 1,
        "attention": "torch",
        "note": "",
        "copy_gb_per_s": 100.0,
        "parity": gpu.parity(classroom, torch.device("cpu"), 0.03),
        "parity_seconds": 1.0,
        "workloads": rows,
        "ttft_ms_by_hit": gpu.ttft_by_hit(subject, 0.001, repeats=1),
        "seconds": 2.0,
    }
    text = gpu.table(result)
    assert all(row["workload"] in text for row in rows)
    assert "all right" in text and "15 of 16" in text
    assert json.loads(json.dumps(result)) == result
