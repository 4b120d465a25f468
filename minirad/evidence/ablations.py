"""Each part switched off in turn, as in the SGLang paper's ablation (section 6.3, Figure 8c)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from minirad.cache.prefix_cache import PrefixCache
from minirad.evidence.dictionary import DictionaryCache

FULL = "full"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is switched off. config: changes to an EngineConfig; hints, parallel: as ProgramPlayer takes them.

    cache: makes what stands in the tree's place; None: the tree.
    """

    name: str
    title: str
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    hints: bool = True
    parallel: bool = True
    cache: Callable[[], PrefixCache] | None = None


SETTINGS: dict[str, Setting] = {
    each.name: each
    for each in (
        Setting(FULL, "all of it"),
        Setting("no-cache", "no cache, and so no hint", {"radix_cache": False}, hints=False),
        Setting("dictionary", "whole prompts in a dictionary, no tree", cache=DictionaryCache),
        Setting("fcfs", "first come, first served", {"schedule_policy": "fcfs"}),
        Setting("random", "random order", {"schedule_policy": "random"}),
        Setting("no-parallelism", "one request of a program at a time", parallel=False),
        Setting("no-hint", "no hint of a prefix", hints=False),
        Setting("no-in-batch-prefix", "no waiting for another's prefix", {"in_batch_prefix": False}),
        Setting(
            "neither", "no hint, no waiting for another's prefix",
            {"in_batch_prefix": False}, hints=False,
        ),
    )
}  # fmt: skip
"""By name, in the order in which the paper's figure has them; the last two it does not have."""
