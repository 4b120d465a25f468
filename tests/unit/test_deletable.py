"""Without the folders that may be deleted all goes on: the package is copied without them, and used."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from minirad import Engine, EngineConfig
from minirad.model.llama import LlamaModel

DELETABLE = ("fast", "tiers", "speculative", "adapters", "quant")  # folders of minirad
# Lessons that are about a folder go with it.
LESSON_ON = {"tiers": "10_host_tier", "speculative": "13_isolation_and_drafts"}
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
TIERED = """
drafts = {"speculative": "ngram"}, {"jump_forward": True}
for wanted in ({"lora": "capitals"}, *drafts, {"host_kv_tokens": 64}):
    try:
        Engine(EngineConfig(device="cpu", **wanted))
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module", params=[("tiers",), DELETABLE], ids="-".join)
def copied(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    for name in ("minirad", "viz", "lessons"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in request.param:
        shutil.rmtree(folder / "minirad" / name)
        if name in LESSON_ON:
            shutil.rmtree(folder / "lessons" / LESSON_ON[name])
    return folder


PARTS = {
    "generate": GENERATE + "print(engine.attention.name, said, engine.attention_note)" + TIERED,
    "steps": "from minirad.figure3 import main\nassert main([]) == 0",
    "page": """
from viz.live import main
assert main(["--workload", "chat", "--steps", "12", "--export", "page.html"]) == 0
""",
    "lesson": "from lessons.__main__ import main\nassert main(['grade', '05']) == 0",
}
ALL_PARTS = """
import contextlib, io, json, sys, traceback
said = {}
for name, code in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
    said[name] = out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def told(copied: Path) -> dict[str, str]:
    """What each of the parts prints in the copy; one process for all, which imports torch once."""
    lesson = copied / "lessons" / "05_paged_attention"
    shutil.copy(lesson / "solution.py", lesson / "exercise.py")
    environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", ALL_PARTS, json.dumps(PARTS)], cwd=copied, env=environment,
        capture_output=True, text=True, encoding="utf-8", timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


@pytest.mark.slow
def test_generate_says_the_same(copied: Path, told: dict[str, str]) -> None:
    here: dict[str, Any] = {}
    exec(GENERATE, here)
    assert here["engine"].attention.name != "gather"
    fast = (copied / "minirad" / "fast").is_dir()
    name, note = (here["engine"].attention.name, "") if fast else ("gather", "minirad/fast/ is not here")
    assert told["generate"].startswith(f"{name} {here['said']} {note}"), told["generate"]
    assert told["generate"].endswith("host_kv_tokens=64 needs minirad/tiers/, which is not here\n")
    adapters = (copied / "minirad" / "adapters").is_dir()
    assert ("lora needs minirad/adapters/, which is not here" in told["generate"]) is not adapters
    drafts = (copied / "minirad" / "speculative").is_dir()
    for wanted in ("speculative='ngram'", "jump_forward=True"):
        refused = f"{wanted} needs minirad/speculative/, which is not here"
        assert (refused in told["generate"]) is not drafts


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


@pytest.mark.slow
def test_the_nine_steps(told: dict[str, str]) -> None:
    assert "All nine" in told["steps"], told["steps"]


@pytest.mark.slow
def test_the_page(copied: Path, told: dict[str, str]) -> None:
    assert "page.html: 12 steps" in told["page"], told["page"]
    assert (copied / "page.html").stat().st_size > 50_000


@pytest.mark.slow
def test_a_lesson_is_graded(told: dict[str, str]) -> None:
    assert "10/10" in told["lesson"], told["lesson"]


@pytest.mark.slow
def test_all_lessons_are_graded(copied: Path) -> None:
    lessons = sorted((copied / "lessons").glob("[0-9]*"))
    assert len(lessons) >= 8
    for lesson in lessons:
        shutil.copy(lesson / "solution.py", lesson / "exercise.py")
    environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "lessons", "grade"], cwd=copied, env=environment, capture_output=True,
        text=True, encoding="utf-8", timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(lesson.name in done.stdout for lesson in lessons)


# ---------------------------------------------------------------------- who imports whom

MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "minirad").rglob("*.py")
}


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of minirad that this one names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return frozenset(found & set(MODULES))


def test_only_the_folders_and_their_benchmarks_import_them() -> None:
    old_names = ("minirad.attention.torch_paged", "minirad.cache.hiradix_cache", "minirad.kv.host_tier")
    for folder in (f"minirad.{name}" for name in DELETABLE):
        for module in MODULES:
            if not module.startswith((folder, "minirad.bench")) and module not in old_names:
                assert not any(each.startswith(folder) for each in imports(module)), module


def test_no_circle_among_what_computes() -> None:
    rooms = ("minirad.fast.", "minirad.model.", "minirad.attention.", "minirad.kv.kv_pool")
    names = [
        each for each in MODULES if each.startswith(rooms) or each in ("minirad.runner", "minirad.machine")
    ]
    TopologicalSorter({each: imports(each) & set(names) for each in names}).prepare()  # CycleError names it
