"""Where an adapter lies: looked at before anything is loaded, so this imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from minirad.config import adapters_by_name
from minirad.errors import expanded, said
from minirad.model.classroom import ADAPTERS

CONFIG = "adapter_config.json"


def shipped() -> list[str]:
    """The names of the classroom Llama's own adapters."""
    return sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir()) if ADAPTERS.is_dir() else []


def directory(name: str, path: str) -> Path:
    """Where an adapter lies: a directory, or the name of one that is shipped."""
    found, known = expanded(path), shipped()
    if path in known and not os.path.isfile(found / CONFIG):  # some folder of that name may lie about
        return ADAPTERS / path
    if not os.path.isdir(found):
        raise ValueError(
            f"adapter {said(name)}: {path} is no directory, and none of those that are shipped "
            f"({', '.join(known)})"
        )
    return found


def check(lora: Any) -> None:
    """ValueError for an adapter that is not there. lora: as EngineConfig takes it."""
    for name, path in adapters_by_name(lora):
        directory(name, path)
