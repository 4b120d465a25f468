"""What a prompt would find in an engine's cache if a request came with it now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minirad.cache.radix_cache import RadixCache
from minirad.engine import Engine


class Found(NamedTuple):
    """Tokens of a prompt that need not be computed: `hit` lie on the device, `back` behind them are loaded
    back from host memory, if there is room. What a disk has is not looked for."""

    hit: int
    back: int


def what_if(engine: Engine, tokens: Sequence[int], lora: str = "") -> Found:
    """What would be used, not all that matches: whole pages, and one token at least is always computed.

    Changes nothing. A tree of another kind than ours says what is on the device only.
    """
    if not len(tokens):
        return Found(0, 0)
    page = engine.config.page_size

    def used(matched: int) -> int:
        return min(matched, len(tokens) - 1) // page * page

    matched, tree = engine.peek(tokens, lora=lora), engine.cache
    hit = used(matched)
    if not isinstance(tree, RadixCache):
        return Found(hit, 0)
    key = engine.intake.key(engine.encode(tokens), None, lora)
    back = used(RadixCache.find(tree, key).length) - hit  # which tells no tier from another
    return Found(hit, back if back >= getattr(tree, "load_back_threshold", 1) else 0)
