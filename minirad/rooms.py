"""Rooms behind engine.py, found by name: who reads how a request goes need not know them.

    machine        an engine's parts: device, weights, pool, attention (other parts: simulate.py)
    transaction    a public call happens whole or not at all: Ctrl-C and handlers' errors wait for its end
    generate       `generate` and `stream`, on top of `step`
    observe        what watches: snapshots, and checks of every invariant
    cache.any_tree, cache.versions, the other policies of cache/ and schedule/, kv.poison: special cases

These can be deleted, and the rest goes on working:

    fast           CUDA graphs, fused kernels, running ahead; without it all is slower
    tiers          a second tier of the cache in host memory, a third one on a disk
    speculative    drafts of several tokens, verified in one pass
    adapters       LoRA: several fine-tuned models that share one set of weights
    quant          quantised weights, read straight from GGUF files
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def room(name: str) -> Any:
    """The module `minirad.<name>` ("fast.choose"); None where its file is not there."""
    # Not asked of the import system: an editable install would find another copy's.
    file = Path(__file__).parent.joinpath(*name.split(".")).with_suffix(".py")
    return import_module(f"minirad.{name}") if file.is_file() else None
