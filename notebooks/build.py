"""Makes the notebooks from their texts: `python notebooks/build.py` (needs the extra `test`).

Files or numbers behind it are all that is made: `python notebooks/build.py 09 notebooks/12_many_workers.md`.

Each NN_name.md (jupytext's Markdown) is run in a fresh kernel and written to NN_name.ipynb with
its outputs as text and PNG only: no widget state, no Plotly data, so that the files stay small and show
their pictures where nothing runs. Edit the text, not the notebook.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import plotly.graph_objects as go
from nbclient import NotebookClient
from PIL import Image

from viz.draw.still import still

HERE = Path(__file__).parent
KEPT = ("image/png", "text/plain")
PLOTLY = "application/vnd.plotly.v1+json"


def texts(names: Sequence[str] = ()) -> list[Path]:
    """The texts that notebooks are made from: all, or those named ("09", "09_x", or a file).

    ValueError for a name that is none of them.
    """
    found = sorted(HERE.glob("[0-9][0-9]_*.md"))
    if not names:
        return found
    chosen = {}
    for name in names:
        stem = Path(name).name.removesuffix(".md").removesuffix(".ipynb")
        text = next((each for each in found if stem in (each.stem, each.stem[:2])), None)
        if text is None:
            raise ValueError(f"{name!r} is no notebook; there are: {' '.join(each.stem for each in found)}")
        chosen[text] = None
    return list(chosen)


def execute(notebook: Any, seconds: int = 300) -> Any:
    """Runs all cells in a fresh kernel of this Python, and returns the notebook.

    Nothing is predicted or solved there: a learner's progress is neither shown nor changed.
    """
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    client = NotebookClient(notebook, timeout=seconds, kernel_name="python3", store_widget_state=False)
    client.create_kernel_manager()
    # The kernel named python3 may belong to another Python: this one knows the packages.
    client.km.kernel_spec.argv[0] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "MINIRAD_PROGRESS": f"{folder}/progress.json"}
        client.execute(env={**os.environ, **own}, cwd=str(HERE))
    return notebook


def light(png: bytes) -> bytes:
    """The same picture, opaque and in 256 colours: trees are text and boxes, and take half the bytes so."""
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "P":
        return png
    paper = Image.new("RGBA", picture.size, "white")
    paper.alpha_composite(picture.convert("RGBA"))
    out = io.BytesIO()
    few = paper.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(out, "PNG", optimize=True)
    return min(png, out.getvalue(), key=len)


def slim(notebook: Any) -> Any:
    """Leaves of each output its text and picture, and of the metadata the kernel."""
    for number, cell in enumerate(notebook.cells):
        cell.metadata.clear()
        cell["id"] = f"cell-{number:02}"
        for output in cell.get("outputs", ()):
            output.pop("metadata", None)
            if "data" in output:
                output["metadata"] = {}
                if PLOTLY in output["data"]:  # sharper than in a cell at work, which shows it pixel for pixel
                    figure = go.Figure(output["data"][PLOTLY])
                    output["data"]["image/png"] = base64.b64encode(still(figure)).decode()
                data = {kind: output["data"][kind] for kind in KEPT if kind in output["data"]}
                if "image/png" in data:
                    data["image/png"] = base64.b64encode(light(base64.b64decode(data["image/png"]))).decode()
                output["data"] = data
    kernel = notebook.metadata.get("kernelspec", {})
    notebook.metadata.clear()
    notebook.metadata.update({"kernelspec": kernel, "language_info": {"name": "python"}})
    return notebook


def build(text: Path) -> Path:
    """Runs a text's cells and writes its notebook beside it."""
    notebook = slim(execute(jupytext.read(text)))
    target = text.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    return target


if __name__ == "__main__":
    try:
        chosen = texts(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    for each in chosen:
        made = build(each)
        print(f"{made.name}: {made.stat().st_size // 1000} kB")
