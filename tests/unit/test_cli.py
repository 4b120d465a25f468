"""The command line: what it prints, and that a mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minirad.__main__ import main
from minirad.engine import Engine
from minirad.observe.recorder import Recorder
from minirad.outputs import StreamToken
from minirad.tiers.disk_cache import DiskCache


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_generate_shows_text_and_hits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "Hello", "Hello", "--max-new-tokens", "4", "--ignore-eos")
    assert code == 0
    first, second = [line for line in out.splitlines() if "from the cache" in line]
    assert " 0 from the cache" in first
    prompt = int(second.split("prompt ")[1].split()[0])
    assert f"{prompt - 1} from the cache" in second  # all but the one token that is always computed


def test_generate_json_from_a_file_and_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n\nWhat can you do?\n", encoding="utf-8-sig")  # as editors on Windows save it
    record = tmp_path / "run.jsonl"
    code, out, _ = run(
        capsys, "generate", "--file", str(prompts), "--json", "--record", str(record), "--n", "2",
        "--max-new-tokens", "3", "--temperature", "1", "--together",
    )  # fmt: skip
    outputs = json.loads(out)
    assert code == 0
    assert [(o["prompt"], o["index"]) for o in outputs] == [
        ("Hello", 0), ("Hello", 1), ("What can you do?", 0), ("What can you do?", 1),
    ]  # fmt: skip
    assert all(len(o["token_ids"]) <= 3 for o in outputs)
    recording = Recorder.load(record)
    assert recording.state(len(recording) - 1)["requests"] == {}
    assert recording.header["config"]["kv_tokens"] == 4096


def test_prompts_are_answered_under_the_adapters_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "What is the capital of France?", "Hello", "--lora", "capitals", "--lora", "oneword"]
    code, out, _ = run(capsys, *words)
    asked = [line for line in out.splitlines() if line.startswith("> ")]
    assert code == 0 and asked == [
        f"> {prompt} (adapter {name})" for prompt in (words[1], words[2]) for name in ("capitals", "oneword")
    ]
    assert "PARIS" in out
    told = {}
    for adapters in ([], words[3:], words[3:5]):
        code, out, _ = run(capsys, *words[:2], *adapters, "--json", "--together")
        told.update({each["lora"]: each["text"] for each in json.loads(out)})
        assert code == 0 and len(json.loads(out)) == max(len(adapters) // 2, 1)
    assert set(told) == {"", "capitals", "oneword"} and told["capitals"] == told["capitals"].upper()
    assert told[""] != told["capitals"] and len(told["oneword"].split()) == 1


def test_what_is_wrong_on_a_disk_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    before_step = DiskCache.before_step

    def behind_the_writer(tree: DiskCache) -> None:  # it is told between two steps, when it is known
        assert tree.disk.flush(60)
        before_step(tree)

    monkeypatch.setattr(DiskCache, "before_step", behind_the_writer)
    monkeypatch.setattr(Path, "write_bytes", full)
    options = [
        "--host-kv-tokens",
        "1024",
        "--disk-dir",
        str(tmp_path),
        "--max-new-tokens",
        "2",
        "--device",
        "cpu",
    ]
    code, out, err = run(capsys, "generate", "word " * 70, "Hello", "Hello", *options)
    assert code == 0 and out.count("from the cache") == 3
    assert err.startswith(f"minirad: disk tier: {tmp_path} cannot be written to: ") and err.count("\n") == 1


def test_a_chat_is_under_one_adapter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["What is the capital of France?", "/new", "What is the capital of France?"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code, out, _ = run(capsys, "chat", "--lora", "mine=capitals")
    assert code == 0 and out.count("PARIS") == 2
    code, out, err = run(capsys, "chat", "--lora", "capitals", "--lora", "oneword")
    assert (code, out) == (2, "") and "a chat is under one adapter, got capitals, oneword" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate"], "no prompt given"),
        (["generate", "x", "--lora", "a\x1bb=capitals"], "an adapter's name is a printable text"),
        (["generate", "x", "--lora", "x" * 5000], "an adapter's name is a printable text"),
        (["generate", "x", "--lora", f"a={'x' * 5000}"], "is no directory"),
        (["generate", "x", "--lora", ".."], "no adapter_config.json"),
        (["generate", "x", "--lora", "none/here"], "is no directory"),
        (["generate", "--raw", ""], "empty"),
        (["generate", "x", "--temperature", "-1"], "-1"),
        (["generate", "x", "--max-new-tokens", "99999"], "2048"),
        (["generate", "x", "--kv-tokens", "10", "--page-size", "3"], "page_size 3"),
        (["generate", "x", "--eviction-policy", "lruu"], "lruu"),
        (["generate", "x", "--model", "./no-such-directory"], "no-such-directory"),
        (["generate", "--file", "no-such-file.txt"], "no-such-file.txt"),
        (["info", "--schedule-policy", "shortest"], "shortest"),
        (["generate", "x", "--draft-tokens", "9"], "--draft-tokens 9 goes with --speculative"),
        (["info", "--draft-ngram", "9"], "--draft-ngram 9 goes with --speculative"),
        (["generate", "x", "--draft-model", "d"], "--draft-model d goes with --speculative"),
        (["generate", "x", "--disk-mb", "9"], "--disk-mb 9 goes with --disk-dir"),
        (
            ["generate", "x", "--speculative", "eagle", "--draft-model", ""],
            "draft_model must be a path, got ''",
        ),
        (["info", "--disk-dir", " ", "--host-kv-tokens", "9"], "disk_dir must be a path, got ' '"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_one_bad_prompt_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "Hello", "word " * 2000)
    assert (code, out) == (2, "")
    assert "context" in err or "pool" in err


def test_a_line_that_is_no_text_is_named_and_the_others_are_generated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfHello\na\xff\nHi\n")
    code, out, err = run(capsys, "generate", "--file", str(path), "--max-new-tokens", "2")
    assert code == 2
    assert [line for line in out.splitlines() if line.startswith("> ")] == ["> Hello", "> Hi"]
    assert f"{path}, line 2 left out: no UTF-8" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "a\udcff"], ["generate", "--raw", "a\udcff"], ["generate", "Hi", "--system", "\udcff"],
        ["generate", "Hi", "--stop", "\udcff"], ["chat", "--system", "\udcff"],
    ],
)  # fmt: skip
def test_an_argument_that_is_no_text_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert "is no valid text: character" in err.splitlines()[-1]


def test_a_log_with_a_cut_emoji_is_simulated_and_the_line_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "cut \\ud83d"}\n', encoding="utf-8")
    code, _, err = run(capsys, "simulate", str(path))
    assert code == 0
    assert err.splitlines()[-1].startswith(f"minirad: left out: {path}, line 2: ")


def test_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "x", "--no-such-option"])
    assert stop.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json", "--page-size", "16")
    facts = json.loads(out)
    assert code == 0
    assert facts["pool"]["pages"] * 16 == facts["pool"]["tokens"] == 4096
    assert facts["model"]["head_dim"] == 64
    assert facts["attention"] == "torch"
    assert "draft_head" not in facts and "adapters" not in facts


def test_info_knows_what_computes_beside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speculative", "eagle", "--jump-forward", "--lora", "capitals", "--lora", "mine=oneword"]
    code, out, _ = run(capsys, "info", "--json", *words)
    facts = json.loads(out)
    assert code == 0 and facts["draft_head"]["parameters"] > 100_000
    assert set(facts["adapters"]) == {"capitals", "mine"}
    assert 0 < facts["adapters"]["mine"] < facts["adapters"]["capitals"]
    assert facts["config"]["bigram_keys"] is True


def test_chat_shows_hits_per_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nHello\n/new\nHello\n" + "x " * 4000 + "\n"))
    code, out, _ = run(capsys, "chat", "--max-new-tokens", "5")
    hits = [line for line in out.splitlines() if "prompt tokens from the cache" in line]
    assert code == 0
    assert hits[0].split("[")[1].startswith("0 of ")
    cached, total = (int(hits[1].split("[")[1].split()[i]) for i in (0, 2))
    first = int(hits[0].split("[")[1].split()[2])
    assert first < cached < total  # the second turn hits all of the first, reply included
    again = int(hits[2].split("[")[1].split()[0])
    assert again == first - 1  # /new: another conversation, the same cache
    assert "[not sent:" in out


def test_a_chat_goes_on_after_a_line_that_is_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"Hi\na\xff\nHello\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    code, out, _ = run(capsys, "chat", "--max-new-tokens", "3")
    assert code == 0
    turns = [line for line in out.splitlines() if "from the cache]" in line or "not sent" in line]
    assert ["not sent" in turn for turn in turns] == [False, True, False]


def test_a_chat_says_that_a_turn_was_not_answered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Engine, *args: Any, **more: Any) -> Any:
        yield StreamToken("R1", 0, None, "", "error", "the rest is pinned")

    monkeypatch.setattr(Engine, "stream", failing)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    code, out, _ = run(capsys, "chat")
    assert code == 0 and "[not answered: the rest is pinned]" in out


def test_bench_hooks_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hooks", "--reps", "0"]) == 2
    assert "--reps must be at least 1, got 0" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["bench", "hooks", "--device", "cuda"]) == 2
        assert "torch sees no NVIDIA GPU here" in capsys.readouterr().err


def test_bench_hooks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "bench", "hooks", "--requests", "3", "--new-tokens", "3", "--reps", "1", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert result["emit_sites_per_step"] > 1
    assert result["events"] > result["steps"]
