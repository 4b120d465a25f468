"""One list of commands: what exists is in it, what is in it exists and explains itself."""

from __future__ import annotations

import ast
import importlib
import runpy
import signal
import sys

import pytest
from architecture import ROOT, modules, tree_of

from minirad import command
from minirad.__main__ import main

OWN_LIST = "minirad", "minirad bench", "lessons"  # commands that have commands of their own
OTHERS = "venv", "pytest", "pip"  # not ours


def runnable() -> set[str]:
    """Modules that do something under `python -m`."""
    found = set()
    for name in modules():
        compared = [node for node in ast.walk(tree_of(name)) if isinstance(node, ast.Compare)]
        if any(ast.unparse(node) == "__name__ == '__main__'" for node in compared):
            found.add(name.removesuffix(".__main__"))
    return found


def subcommands(words: str) -> set[str]:
    """What the parser of these words takes as its first word."""
    module = "lessons.__main__" if words == "lessons" else "minirad.__main__"
    parser = importlib.import_module(module)._parser()
    for word in words.split()[1:]:
        parser = parser._subparsers._group_actions[0].choices[word]
    return {f"{words} {word}" for word in parser._subparsers._group_actions[0].choices}


def test_the_list_is_what_there_is() -> None:
    there = runnable().union(*map(subcommands, OWN_LIST))
    assert set(command.COMMANDS) == there - {"minirad", "minirad bench"}


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name, about in command.COMMANDS.items():
        assert f"  {name} " in said and about in said
    assert max(map(len, said.splitlines())) < 120


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", [*command.COMMANDS, "minirad", "minirad bench"])
def test_every_command_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = name.split()
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # both are restored: a command sets them
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith(f"usage: python -m {name}") or module != "minirad"
    assert f"usage: python -m {module}" in said


def test_documents_name_only_commands_that_there_are() -> None:
    for file in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "lessons/TEACHERS.md"):
        for words in commands_in((ROOT / file).read_text(encoding="utf-8")):
            assert words in command.COMMANDS or words in OWN_LIST or words in OTHERS, f"{file}: {words}"


def commands_in(text: str) -> set[str]:
    """`python -m WORDS`, as far as the words are a command's."""
    found = set()
    for line in text.split("python -m ")[1:]:
        words = line.replace("`", " ` ").split()
        known = [" ".join(words[:n]) for n in (3, 2, 1)]
        found.add(next((each for each in known if each in command.COMMANDS), words[0].rstrip("`,;.:)")))
    return found
