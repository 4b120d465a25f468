"""Who imports whom: no circles, and only what tests/architecture.py allows.

Imports inside functions count, too; those under TYPE_CHECKING do not, because they do not run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import architecture
import pytest
from architecture import ROOMS, breaches, brings_torch, circles, modules, room_of


def test_every_module_is_in_a_room() -> None:
    for module in modules():
        room_of(module)


def test_a_room_imports_only_rooms_above_it_in_the_table() -> None:
    above: list[str] = []
    for name, room in ROOMS.items():
        assert set(room.may) <= set(above), name
        above.append(name)


def test_what_may_be_deleted_is_imported_by_measurements_and_its_lesson_only() -> None:
    for name, importers in {"fast": ["bench"], "tiers": ["bench", "grading"]}.items():
        assert [room for room, each in ROOMS.items() if name in each.may] == importers


def test_no_circle() -> None:
    assert circles() == []


def test_no_breach() -> None:
    assert breaches() == [], "see ROOMS in tests/architecture.py"


def test_what_is_loaded_by_name_is_listed_with_its_reason() -> None:
    assert architecture.looked_up() <= set(architecture.LOOKED_UP)


def test_minirad_does_not_import_viz_or_lessons() -> None:
    found = [each for name in modules() if name.startswith("minirad") for each in architecture.imports(name)]
    assert [each for each in found if not each.imported.startswith("minirad")] == []


def without_torch() -> list[str]:
    return [name for name in modules() if not ROOMS[room_of(name)].torch]


@pytest.mark.parametrize("room", [name for name, room in ROOMS.items() if not room.torch])
def test_a_room_without_torch_does_not_bring_it(room: str) -> None:
    for module in without_torch():
        if room_of(module) == room:
            assert brings_torch(module) == [], " > ".join(brings_torch(module))


def test_python_says_so_too() -> None:
    """What is read from the source is what Python does: none of these imports brings torch."""
    names = [name for name in without_torch() if not brings_torch(name) and not name.endswith("__main__")]
    assert len(names) > 30
    names += [
        "minirad.model.load",
        "viz.live",
    ]  # a router and its page start workers: those need it, not they
    code = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=architecture.ROOT)
    assert done.returncode == 0, done.stderr


def test_the_project_uses_the_new_paths_itself() -> None:
    assert architecture.uses_of_old_paths() == []


# ------------------------------------------------------------------ the reader of imports itself


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes modules into a project of their own, which is then the one that is read."""
    caches = [each for each in vars(architecture).values() if hasattr(each, "cache_clear")]

    def write(**files: str) -> None:
        for name, text in {"__init__": "", **files}.items():
            file = tmp_path / "minirad" / f"{name if name == '__init__' else name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for each in caches:
            each.cache_clear()

    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    yield write
    monkeypatch.undo()
    for each in caches:
        each.cache_clear()


def test_a_circle_through_a_function_is_found_and_one_for_types_only_is_none(
    made: Callable[..., None],
) -> None:
    made(errors="def f():\n    from minirad.text import g\n", text="import minirad.errors\n")
    assert circles() == [["minirad.errors", "minirad.text"]]
    made(text="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import minirad.errors\n")
    assert circles() == []
    made(text="errors = import_module('minirad.errors')\n")
    assert circles() == [] and architecture.looked_up() == {"minirad.errors"}


def test_an_import_against_the_rules_is_found(made: Callable[..., None]) -> None:
    made(cache__tree="from minirad.schedule import queue\nx = 1\n", schedule__queue="import minirad.cache\n")
    assert [(each.importer, each.imported) for each in breaches()] == [
        ("minirad.cache.tree", "minirad.schedule.queue")
    ]
    old = '"""The old name."""\n\nfrom minirad.schedule import queue\n'  # passes a name on, and is no breach
    made(cache__tree=old, engine="from minirad.cache.tree import queue\nx = 1\n")
    assert breaches() == []
    assert [each.importer for each in architecture.uses_of_old_paths()] == ["minirad.engine"]


def test_torch_is_found_behind_others(made: Callable[..., None]) -> None:
    made(engine="import minirad.runner\n", runner="import torch\n", generate="def f():\n    import torch\n")
    assert brings_torch("minirad.engine") == ["minirad.engine", "minirad.runner", "torch"]
    assert brings_torch("minirad.generate") == []
