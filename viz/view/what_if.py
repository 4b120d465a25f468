"""What a prompt would find in an engine's cache if a request came with it now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from minirad.engine import Engine


class Found(NamedTuple):
    """Tokens of a prompt that need not be computed: `hit` lie on the device, `back` behind them are loaded
    back from host memory, if there is room. What a disk has is not looked for."""

    hit: int
    back: int


def what_if(engine: Engine, tokens: Sequence[int], lora: str = "") -> Found:
    """What would be used, not all that matches: whole pages, and one token at least is always computed.

    Changes nothing.
    """
    if not len(tokens):
        return Found(0, 0)
    page = engine.config.page_size

    def used(matched: int) -> int:
        return min(matched, len(tokens) - 1) // page * page

    tree: Any = engine.cache
    hit = used(engine.peek(tokens, lora=lora))
    if not hasattr(tree, "peek_tiers"):
        return Found(hit, 0)
    back = used(sum(tree.peek_tiers(engine.intake.key(engine.encode(tokens), None, lora)))) - hit
    return Found(hit, back if back >= tree.load_back_threshold else 0)
