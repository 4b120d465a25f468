"""The recipes of ARCHITECTURE.md are followed in a copy of the project, as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support import ROOT

RECIPES = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("\n## Recipes\n")[2]
BLOCK = re.compile(r"(?P<before>[^\n]*(?:\n[^\n]+)*)\n\n```(?P<kind>\w*)\n(?P<code>.*?)\n```", re.DOTALL)


class Block(NamedTuple):
    """A block of code, and the paragraph before it, which says what to do with it."""

    before: str
    kind: str
    code: str


def recipes() -> dict[str, list[Block]]:
    parts = RECIPES.split("\n### ")[1:]
    return {
        p.partition("\n")[0]: [Block(*each) for each in BLOCK.findall(p.partition("\n")[2])] for p in parts
    }


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which every recipe's changes were made, one after the other."""
    folder = tmp_path_factory.mktemp("copied")
    for name in ("minirad", "viz", "lessons"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for blocks in recipes().values():
        for block in blocks[:-1]:
            change(block, folder)
    return folder


@pytest.fixture(scope="module")
def seen(copied: Path) -> dict[str, str]:
    """For each recipe in Python what its last block raised, "" for nothing; all in one process."""
    return see(copied, copied)


def change(block: Block, folder: Path) -> None:
    """Does what the paragraph before a block says."""
    if block.kind == "diff":
        for part in re.split(r"^--- ", block.code, flags=re.MULTILINE)[1:]:
            name, _, lines = part.partition("\n")
            patch(folder / name, lines.rstrip("\n").split("\n"))
        return
    (name,) = re.findall(r"`([\w./]+\.\w+)`", block.before.splitlines()[-1])
    file = folder / name
    if "new file" in block.before:
        assert not file.exists(), f"{name} is there already"
        file.parent.mkdir(exist_ok=True)
        file.write_text(block.code + "\n", encoding="utf-8")
    else:
        assert "Add to" in block.before, block.before
        file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{block.code}\n", encoding="utf-8")


def patch(file: Path, lines: list[str]) -> None:
    """Replaces lines that begin with - by those that begin with +; they must stand there once."""
    old = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    new = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {text.count(old)} times:\n{old}"
    file.write_text(text.replace(old, new), encoding="utf-8")


TRY = """
import json, sys, traceback
raised = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, {"__name__": "__main__"})
        raised[name] = ""
    except Exception:
        raised[name] = traceback.format_exc()
print(json.dumps(raised))
"""


def see(project: Path, folder: Path) -> dict[str, str]:
    """Runs the last block of each recipe in Python, with this project's modules, in a folder."""
    codes = {name: blocks[-1].code for name, blocks in recipes().items() if blocks[-1].kind == "python"}
    raised: dict[str, str] = json.loads(run(project, folder, "-c", TRY, given=json.dumps(codes)))
    return raised


def run(project: Path, folder: Path, *arguments: str, given: str = "") -> str:
    """What `python ARGUMENTS` prints."""
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, input=given, capture_output=True,
        text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_these_are_the_recipes() -> None:
    names = ["An eviction policy", "A scheduling policy", "An event", "An attention backend", "A lesson"]
    assert list(recipes()) == names
    for name, blocks in recipes().items():
        assert len(blocks) >= 2 and "See it:" in blocks[-1].before, name
        assert blocks[-1].kind != "python" or "assert " in blocks[-1].code, name
    assert RECIPES.count("```") == 2 * sum(map(len, recipes().values()))


@pytest.mark.slow
def test_nothing_works_before(tmp_path: Path) -> None:
    """It is the change that makes it work."""
    assert all(see(ROOT, tmp_path).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes() if name != "A lesson"])
def test_it_works_as_it_is_written(name: str, seen: dict[str, str]) -> None:
    assert seen[name] == ""


@pytest.mark.slow
def test_a_lesson_is_graded(copied: Path) -> None:
    said = []
    for line in recipes()["A lesson"][-1].code.splitlines():
        words = shlex.split(line)
        if words[0] == "cp":
            shutil.copy(copied / words[1], copied / words[2])
        else:
            assert words[0] == "python", line
            said.append(run(copied, copied, *words[1:]))
    before, after = said
    assert "16_pages" in before and "1/1" not in before
    assert "1/1" in after


@pytest.mark.slow
def test_a_new_eviction_policy_is_known_to_commands(copied: Path) -> None:
    words = "-m minirad simulate chat --capacity 300 --eviction-policy unhit"
    assert "unhit" in run(copied, copied, *words.split())
    words = "-m viz.live --eviction-policy unhit --steps 3 --export page.html"
    assert "page.html" in run(copied, copied, *words.split())
