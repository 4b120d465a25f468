"""Tensor parallel: one engine in several processes, each with a part of the model and a tree of its own.

    torchrun --nproc-per-node 2 -m minirad generate --tp 2 "..."

or any script with `Engine(EngineConfig(tp=2))` under torchrun. Rank 0 goes on with the script; on every other
rank `Engine(...)` does not return: it follows rank 0, and ends its process when rank 0's run is over.

Rank 0 tells what it was asked for (requests, aborts, pins, ...) in one broadcast at the beginning of each
step, never slots, tokens or decisions: each rank has its own tree, allocator, rows and scheduler, and they
agree because all that they do is decided by the same inputs. A digest of all that is compared in every step.

    group.py     the processes, and what becomes of them when one dies or hangs
    messages.py  what rank 0 says
    model.py     a Llama's part on one rank
    steps.py     what is the same on all ranks: compare, step, compare
    engine.py    rank 0; follower.py: the others
    copies.py    copies between the tiers: rank 0 says which have ended
    digest.py    all that must be equal, as 16 bytes, and the first difference in words
    watching.py  the other ranks' recordings, on rank 0

Importing this package brings neither torch nor torch.distributed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from minirad.errors import RankLost as RankLost
from minirad.errors import RanksDiffer as RanksDiffer

TIMEOUT_NAME = "MINIRAD_RANKS_TIMEOUT"
DEFAULT_TIMEOUT = 60.0

_HOME = {"follow": "follower", "watch": "watching", "unwatch": "watching", "leave": "group"}

__all__ = ["TIMEOUT", "RankLost", "RanksDiffer", "follow", "leave", "unwatch", "watch"]


def timeout() -> float:
    """Seconds after which a rank that does not answer is taken for lost; ValueError for what is none."""
    said = os.environ.get(TIMEOUT_NAME, "")
    try:
        seconds = float(said) if said else DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"{TIMEOUT_NAME} is a number of seconds above 0, not {said!r}")
    return seconds


def __getattr__(name: str) -> Any:
    """Loads a public name from its module at its first use; TIMEOUT is asked of the environment."""
    if name == "TIMEOUT":
        return timeout()
    if name not in _HOME:
        raise AttributeError(f"module 'minirad.ranks' has no attribute {name!r}")
    return getattr(import_module(f"minirad.ranks.{_HOME[name]}"), name)
