"""What the documents say is so: each block of code runs, and each name that they give can be imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import architecture
import pytest
from support import ROOT
from test_recipes import BLOCK

from minirad.__main__ import main

FENCE = re.compile(r"^```(\w*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[tuple[str, str]]:
    """Kind and code of each block of a document. ARCHITECTURE.md's recipes are test_recipes.py's."""
    text = text_of(name).partition("\n## Recipes\n")[0] if name == "ARCHITECTURE.md" else text_of(name)
    return FENCE.findall(text)


def commands(name: str) -> list[str]:
    """The commands of a document's shell blocks, one by one."""
    lines = [line for kind, code in blocks(name) if kind == "" for line in code.splitlines()]
    return [each.strip() for line in lines for each in line.partition("  #")[0].split("&&") if each.strip()]


# ------------------------------------------------------------------ blocks of code


def test_every_block_is_one_of_those_that_run() -> None:
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for kind, _ in blocks(name):
            drawn = kind == "mermaid" and name == "ARCHITECTURE.md"  # test_architecture.py draws it again
            assert kind in ("", "python") or drawn, f"{name}: {kind}"
        assert text_of(name).count("```") == 2 * len(FENCE.findall(text_of(name)))
    assert len(BLOCK.findall(text_of("ARCHITECTURE.md").partition("\n## Recipes\n")[2])) > 10


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_python_blocks_run(name: str) -> None:
    codes = [code for kind, code in blocks(name) if kind == "python"]
    assert codes
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        if "print(" in code:
            assert said.getvalue().strip()


def test_the_readme_prints_what_its_comments_promise() -> None:
    (first, second) = [code for kind, code in blocks("README.md") if kind == "python"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(first, {})
    hits, *sentences = said.getvalue().splitlines()
    cached, of = (int(word) for word in hits.split() if word.isdigit())
    assert 0 < cached < of
    assert any(re.fullmatch(r"n\d+ split at \d+: n\d+ is its upper half", each) for each in sentences)
    names: dict[str, object] = {}
    exec(second, names)
    match, cache = names["match"], names["cache"]
    assert match.slots.tolist() == [10, 11]  # type: ignore[attr-defined]
    assert (cache.evictable_size, cache.protected_size) == (0, 2)  # type: ignore[attr-defined]


ALL_COMMANDS = [(name, each) for name in ("README.md", "CONTRIBUTING.md") for each in commands(name)]


def is_installing(command: str) -> bool:
    return command.startswith(("pip install", "python -m venv", ". .venv", "git clone", "cd "))


@pytest.mark.parametrize(("name", "command"), [each for each in ALL_COMMANDS if is_installing(each[1])])
def test_what_is_installed_is_what_the_project_declares(name: str, command: str) -> None:
    """Installing again is for .ci/run: here its words are looked at."""
    extras = re.findall(r"^(\w+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    words = shlex.split(command)
    if words[0] == "pip":
        assert words[:3] == ["pip", "install", "-e"]
        for extra in re.findall(r"\[([\w,]+)\]", words[3]):
            assert set(extra.split(",")) <= set(extras)
        assert words[3].split("[")[0] == "."
        assert f"pip install -q -e '{words[3]}'" in text_of(".ci/run") or words[3] == "."
    elif words[0] == "python":
        assert words[3] == ".venv" and importlib.util.find_spec("venv") is not None
    elif words[0] == ".":
        assert words[1] == ".venv/bin/activate"


@pytest.mark.parametrize(("name", "command"), [each for each in ALL_COMMANDS if not is_installing(each[1])])
def test_every_command_is_known_to_a_test(name: str, command: str) -> None:
    known = (
        "python -m viz.live",
        "python -m pytest",
        "ruff ",
        "mypy",
        "python tests/architecture.py",
        ".ci/run",
    )
    assert command.startswith(known), f"{name}: say in tests/unit/test_documents.py how `{command}` is tried"


def test_the_readme_has_two_commands() -> None:
    see = "python -m venv .venv && . .venv/bin/activate && pip install -e . && python -m viz.live"
    check = "pip install -e '.[test]' && python -m pytest -n auto"
    assert [code for kind, code in blocks("README.md") if kind == ""] == [see, check]


def test_the_test_command_is_what_ci_runs() -> None:
    assert "python -m pytest -q -n auto\n" in text_of(".ci/run")
    assert importlib.metadata.version("pytest-xdist")  # -n is its option
    for command in ("ruff check .", "ruff format --check .", "mypy"):
        assert f"\n{command}\n" in text_of(".ci/run")


@pytest.mark.slow
def test_the_first_command_shows_the_page() -> None:
    """`python -m viz.live`, started as it stands in the README: a tree that grows, on a page that answers."""
    words = [sys.executable, "-u", "-m", "viz.live", "--port", "0", "--no-open"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if found := re.search(r"http://[\w.:]+\S*", said):
                break
        assert found is not None, said
        with urllib.request.urlopen(found[0], timeout=30) as answer:
            page = answer.read().decode()
        assert answer.status == 200 and "<html" in page
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["ruff", "check", "."], ["ruff", "format", "--check", "."]])
def test_the_checks_of_contributing_pass(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------ commands in the table of the README


def told() -> Iterator[str]:
    """`python -m minirad ...` and the like in the README, but for what other tests run."""
    elsewhere = (
        "viz.live", "viz.gallery", "minirad bench", "minirad.model.classroom.train",
        "minirad serve", "minirad route", "minirad.evidence",
    )  # fmt: skip
    for line in re.findall(
        r"`python -m ((?:minirad|viz|lessons)[^`]*)`", " ".join(text_of("README.md").split())
    ):
        if not line.startswith(elsewhere):
            yield line


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(set(told())))
def test_commands_of_the_readme_do_something(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    Path("mine.txt").write_text("You are a helpful assistant. Today is Monday.")
    Path("other.txt").write_text("You are a helpful assistant. Today is Friday.")
    shutil.copy(ROOT / "tests" / "logs" / "claude_code.jsonl", "SESSION.jsonl")
    module, *words = shlex.split(line)
    if module == "minirad":
        run = main
    elif module == "lessons":
        run = importlib.import_module("lessons.__main__").main
    else:
        run = importlib.import_module(module).main
    try:
        code = run(words)
    except SystemExit as ended:  # --help
        code = ended.code
    assert code == 0
    assert capsys.readouterr().out.strip() or any(tmp_path.iterdir())
    for option, name in itertools.pairwise(words):
        if option == "--out":
            assert (tmp_path / name).exists()


# ------------------------------------------------------------------ nothing is lost

# What the project's plans, fault programs and lessons named when the code was put into rooms (November 2026).
NAMED = """
minirad Engine EngineConfig InvariantError RadixCache RadixKey Recorder SamplingParams events resolve_model
minirad.attention.gather GatherAttention
minirad.attention.metadata BatchEntry build_metadata
minirad.attention.torch_paged
minirad.bench.scaling
minirad.bench.textbook TokenTrie
minirad.cache.allocator PageAllocator
minirad.cache.eviction
minirad.cache.hiradix_cache HiRadixCache
minirad.cache.kv_events BlockTable from_dict
minirad.cache.radix_cache RadixCache RadixKey
minirad.config EngineConfig SamplingParams ScheduleOptions
minirad.doctor
minirad.engine Engine
minirad.errors InvariantError
minirad.events EventBus EVENT_TYPES NodeSplit StepEnded
minirad.figure3 Ask Panel STEPS Step check_story one_thread
minirad.frontend ChatSession run
minirad.grammar regex_mask
minirad.kv.host_tier HostTier
minirad.kv.kv_pool KVPool
minirad.model.classroom.corpus
minirad.model.classroom.score
minirad.model.classroom.train
minirad.model.llama LlamaConfig LlamaModel random_weights
minirad.model.load load_model load_tokenizer resolve_model
minirad.model.sampler sample
minirad.outputs GenerationOutput StepReport
minirad.programs
minirad.record Recorder Recording
minirad.runner
minirad.schedule.admission
minirad.schedule.cache_manager CacheManager path_slots
minirad.schedule.policies POLICIES
minirad.schedule.req_to_token ReqToTokenPool
minirad.schedule.request Request
minirad.schedule.scheduler Scheduler
minirad.simulate
minirad.snapshot
minirad.text StreamText
minirad.theorem
minirad.traces
minirad.workloads Player agent_prompt chat_prompt few_shot load raw_prompt
viz.figure3
viz.gallery
viz.kv request_hits
viz.live COMMANDS Driver Live Settings
viz.page Page
viz.roofline
viz.stepper Stepper
viz.trace Trace decoder_of
viz.tree tree_svg
lessons.grading Exercise Failure Mutant expect exercise_tests sibling student_cache
"""


def has(name: str) -> bool:
    """True if a dotted name is a module, or something that a module has."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[size:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("line", NAMED.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_what_was_named_can_still_be_imported(line: str) -> None:
    module, *names = line.split()
    found = importlib.import_module(module)
    for name in names:
        assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def readers() -> list[Path]:
    """What people read and run: the documents, the notebooks in both forms, the lessons."""
    found = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    found += [*ROOT.glob("notebooks/*.md"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("lessons/**/*.md")]
    return sorted([*found, *ROOT.glob("lessons/[0-9]*/*.py")])


def source(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text.partition("\n## Recipes\n")[0] if file.name == "ARCHITECTURE.md" else text


def names_in(text: str) -> set[str]:
    """Dotted names of the project, and what is imported by `from ... import`."""
    found = set(re.findall(r"(?<![\w/.-])((?:minirad|viz|lessons)(?:\.[A-Za-z_]\w*)+)", text))
    for module, names in re.findall(r"from ((?:minirad|viz|lessons)[\w.]*) import (\([^)]*\)|[\w ,]+)", text):
        found |= {f"{module}.{each.split(' as ')[0].strip()}" for each in names.strip("()").split(",")}
    return {name.rstrip(".") for name in found}


def test_every_name_that_is_written_somewhere_can_be_imported() -> None:
    lost = {(file.name, name) for file in readers() for name in names_in(source(file)) if not has(name)}
    assert lost == set()
    assert len({name for file in readers() for name in names_in(source(file))}) > 80


def test_every_file_that_is_linked_is_there() -> None:
    for file in (each for each in readers() if each.suffix == ".md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", source(file)):
            assert (file.parent / link).exists(), f"{file.relative_to(ROOT)}: {link}"


def test_the_rosetta_table_names_what_there_is() -> None:
    """Its first column is ours: `cache/radix_cache.py` `RadixCache`, `RadixCache.match_prefix`."""
    text = text_of(architecture.ROSETTA)
    renewed, lost = architecture.with_rosetta(text)
    assert lost == []
    assert renewed == text, "run: python tests/architecture.py"
    files = [cell.split("`")[1] for line in text.splitlines() if (cell := line[:80]).startswith("| `")]
    files = [path for path in files if path.endswith(".py")]
    assert len(files) > 15 and all((ROOT / "minirad" / path).is_file() for path in files)


def test_a_wrong_row_of_the_rosetta_table_is_noticed() -> None:
    row = "| `kv/radix_cache.py` `RadixCache`, `RadixCache.matched` | `other.py` `Other` |"
    after, lost = architecture.with_rosetta(row)
    assert after.startswith("| `cache/radix_cache.py` `RadixCache`") and after.endswith(
        "| `other.py` `Other` |"
    )
    assert lost == ["`RadixCache.matched` is defined nowhere"]


# ------------------------------------------------------------------ plain English


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_plain_english(name: str) -> None:
    text = re.sub(r"```.*?```|<!-- drawn.*?<!-- end -->", "", text_of(name), flags=re.DOTALL)
    found = re.findall(r"(?i)\b(?:somebody|nobody|whoever|whomever|what of|who of)\b", text)
    assert found == []
