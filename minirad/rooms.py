"""Rooms that the engine does not need: looked up by name, so that each can be deleted and nothing imports it.

fast      CUDA graphs, fused kernels, running ahead; without it all works, slowly
tiers     a second tier of the cache in host memory
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def room(name: str) -> Any:
    """The module `minirad.<name>` ("fast.choose"); None where its file is not there."""
    # Not asked of the import system: an editable install would find another copy's.
    path = Path(__file__).parent.joinpath(*name.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return import_module(f"minirad.{name}") if there else None
