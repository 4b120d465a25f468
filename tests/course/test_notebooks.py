"""Every notebook runs from a fresh kernel, is in step with its text, and is small and visible as saved."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image, ImageChops
from support import ROOT

NEEDED = ("nbclient", "jupytext", "nbformat")  # imported where they are used: every worker reads this file
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra `test` brings {', '.join(MISSING)}"),
]

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 400_000  # bytes
LEARNT = {"guess": "1", "right": None, "when": "2026-11-29 18:00"}  # a prediction as it is kept
PICTURES = ("kv.", "tour", "small", "roofline.", "chart")  # how the last line of a cell with a picture begins


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def shows_a_picture(cell: Any) -> bool:
    lines = cell.source.strip().splitlines()
    return (
        cell.cell_type == "code" and bool(lines) and lines[-1].startswith(PICTURES) and "=" not in lines[-1]
    )


def pictures(cell: Any) -> list[bytes]:
    bundles = [output.get("data", {}) for output in cell.outputs]
    return [base64.b64decode(bundle["image/png"]) for bundle in bundles if "image/png" in bundle]


def test_there_is_a_tour() -> None:
    assert "00_tour.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_pictures_take_no_more_than_they_need(path: Path, builder: ModuleType) -> None:
    for cell in load(path).cells:
        for png in pictures(cell) if cell.cell_type == "code" else ():
            assert builder.light(png) == png, cell.id


def test_a_light_picture_is_the_same_to_the_eye(builder: ModuleType) -> None:
    """A tree with all its colours: each within a few levels of 255; what was see-through is white."""
    from minirad import Engine, EngineConfig
    from viz.notebook.stepper import Stepper

    tour = Stepper(Engine(EngineConfig(device="cpu", kv_tokens=200)))
    tour.submit("Question 1: What is the capital of France?")
    tour.run()
    png = tour.png()
    found, was = (Image.open(io.BytesIO(each)) for each in (builder.light(png), png))
    paper = Image.new("RGBA", was.size, "white")
    paper.alpha_composite(was.convert("RGBA"))
    differs = ImageChops.difference(found.convert("RGB"), paper.convert("RGB"))
    assert found.size == was.size and max(top for _, top in differs.getextrema()) <= 8
    assert len(builder.light(png)) < 0.7 * len(png)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_as_saved_it_is_small_and_shows_its_pictures(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    notebook = load(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    text = path.read_text(encoding="utf-8")
    for word in ("widget-view", "widget-state", "vnd.plotly", "plotly.js", "<script"):
        assert word not in text
    shown = 0
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type != "code":
            continue
        assert all(output.output_type != "error" for output in cell.outputs)
        assert all(set(o.get("data", {})) <= {"image/png", "text/plain"} for o in cell.outputs)
        if shows_a_picture(cell):
            (png,) = pictures(cell)
            assert Image.open(io.BytesIO(png)).width > 200
            shown += 1
    assert shown >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_in_step_with_its_text(path: Path) -> None:
    import jupytext

    written = jupytext.read(path.with_suffix(".md"))
    saved = load(path)
    assert [(c.cell_type, c.source) for c in written.cells] == [(c.cell_type, c.source) for c in saved.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_a_fresh_kernel(path: Path, builder: ModuleType, monkeypatch, tmp_path: Path) -> None:
    """And a learner's progress, which may hold predictions, is neither read nor written."""
    progress = tmp_path / "progress.json"
    progress.write_text(json.dumps({"predictions": {path.stem[:2]: LEARNT}}), encoding="utf-8")
    learnt = progress.read_bytes()
    monkeypatch.setenv("MINIRAD_PROGRESS", str(progress))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    before = path.read_bytes()
    notebook = builder.execute(load(path))
    for cell in notebook.cells:
        if shows_a_picture(cell):
            assert len(pictures(cell)) == 1
    assert any(
        "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert path.read_bytes() == before and progress.read_bytes() == learnt
    import nbformat

    slim = nbformat.writes(builder.slim(notebook))
    assert len(slim) < LARGEST and "vnd." not in slim and "You committed to" not in slim


def test_only_what_is_named_is_built(builder: ModuleType) -> None:
    assert [text.with_suffix(".ipynb") for text in builder.texts()] == NOTEBOOKS
    named = builder.texts(["09", "notebooks/12_many_workers.md", "09_pages_and_tails.ipynb"])
    assert [text.name for text in named] == ["09_pages_and_tails.md", "12_many_workers.md"]
    for wrong in ("99", "", "9", "notebooks/12_many.md"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no notebook; there are: 00_tour 01_kv_cache"):
            builder.texts([wrong])
