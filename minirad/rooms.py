"""Rooms behind engine.py, found by name: who reads how a request goes need not know them.

    machine        an engine's parts: device, weights, pool, attention (other parts: simulate.py)
    transaction    a public call happens whole or not at all: Ctrl-C and handlers' errors wait for its end
    serve          `generate` and `stream`, on top of `step`
    snapshot       what an engine holds, as plain data

These can be deleted, and the rest goes on working:

    fast           CUDA graphs, fused kernels, running ahead; without it all is slower
    tiers          a second tier of the cache in host memory
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
