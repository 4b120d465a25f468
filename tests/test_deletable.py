"""Without minirad/fast/ all goes on, only slower: the package is copied without it, and used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from minirad import Engine, EngineConfig
from minirad.model.llama import LlamaModel

ROOT = Path(__file__).parent.parent
LEFT_OUT = ["fast"]  # folders of minirad that may be deleted
GENERATE = """
from minirad import Engine, EngineConfig, SamplingParams
from minirad.workloads import chat_prompt
engine = Engine(EngineConfig(device="cpu"))
start = chat_prompt("Hello! What is your name?")  # as it was trained on: the likeliest tokens lead by far
chance = SamplingParams(max_new_tokens=3, temperature=0.9, n=2, seed=1)
outputs = engine.generate([start, start + " "], [SamplingParams(max_new_tokens=6), chance])
engine.check()
said = outputs[0].token_ids
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    for name in ("minirad", "viz", "lessons"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LEFT_OUT:
        shutil.rmtree(folder / "minirad" / name)
    return folder


def ask(folder: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        encoding="utf-8", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generate_says_the_same_with_the_attention_to_read(copied: Path) -> None:
    here: dict[str, object] = {}
    exec(GENERATE, here)
    assert here["engine"].attention.name != "gather"  # type: ignore[attr-defined]
    answer = ask(copied, "-c", GENERATE + "print(engine.attention.name, said, engine.attention_note)")
    assert answer.startswith(f"gather {here['said']} minirad/fast/ is not here")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"attention": "torch"}, "attention 'torch' needs minirad/fast/"),
        ({"attention": "flashinfer"}, "attention 'flashinfer' needs minirad/fast/"),
        ({"cuda_graphs": True}, "cuda_graphs=True needs minirad/fast/"),
    ],
)
def test_what_needs_the_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_model: LlamaModel, asked: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("minirad.machine.fast_parts", lambda: None)
    with pytest.raises(ValueError, match=said):
        Engine(EngineConfig(kv_tokens=16, **asked), model=tiny_model)


def test_the_nine_steps(copied: Path) -> None:
    assert "All nine" in ask(copied, "-m", "minirad.figure3")


def test_the_page(copied: Path) -> None:
    said = ask(copied, "-m", "viz.live", "--workload", "chat", "--steps", "12", "--export", "page.html")
    assert "page.html: 12 steps" in said and (copied / "page.html").stat().st_size > 50_000


def test_a_lesson_is_graded(copied: Path) -> None:
    lesson = copied / "lessons" / "05_paged_attention"
    shutil.copy(lesson / "solution.py", lesson / "exercise.py")
    assert "10/10" in ask(copied, "-m", "lessons", "grade", "05")


# ---------------------------------------------------------------------- who imports whom

MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "minirad").rglob("*.py")
}


def imports(module: str) -> set[str]:
    """Modules of minirad that this one names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & set(MODULES)


def test_only_the_folder_and_its_benchmarks_import_it() -> None:
    old_name = "minirad.attention.torch_paged"
    for module in MODULES:
        if not module.startswith(("minirad.fast", "minirad.bench")) and module != old_name:
            assert not any(each.startswith("minirad.fast") for each in imports(module)), module


def test_no_circle_among_what_computes() -> None:
    rooms = ("minirad.fast.", "minirad.model.", "minirad.attention.", "minirad.kv.kv_pool")
    names = [
        each for each in MODULES if each.startswith(rooms) or each in ("minirad.runner", "minirad.machine")
    ]
    TopologicalSorter({each: imports(each) & set(names) for each in names}).prepare()  # CycleError names it
