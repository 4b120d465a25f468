"""Lesson 09, built otherwise: nested dictionaries, numpy, a listener on the engine's bus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from minirad.config import SamplingParams
    from minirad.engine import Engine

Tokens = Sequence[int]


def _whole(tokens: Tokens, page_size: int) -> list[tuple[int, ...]]:
    """The tokens of each whole page."""
    ends = range(page_size, len(tokens) + 1, page_size)
    return [tuple(tokens[end - page_size : end]) for end in ends]


def match_pages(index: dict[Any, Any], tokens: Tokens, page_size: int) -> list[int]:
    """Down a trie: tokens of a page -> (its number, what follows it)."""
    found, level = [], index
    for page in _whole(tokens, page_size):
        if page not in level:
            break
        number, level = level[page]
        found.append(number)
    return found


def insert_pages(index: dict[Any, Any], tokens: Tokens, pages: Sequence[int], page_size: int) -> list[int]:
    """Down the same trie; who is not in it afterwards is free."""
    kept, level = [], index
    for own, page in zip(pages, _whole(tokens, page_size), strict=False):
        if page not in level:
            level[page] = (own, {})
        number, level = level[page]
        kept.append(number)
    kept += [-1] * (len(pages) - len(kept))
    return [own for own, number in zip(pages, kept, strict=True) if own != number]


def page_account(page_size: int, requests: Sequence[tuple[Tokens, Tokens]]) -> list[dict[str, int]]:
    """A set of all beginnings seen, of any length; pages are counted one by one."""
    seen: set[tuple[int, ...]] = set()
    account = []
    for prompt, reply in requests:
        usable = max((n for n in range(1, len(prompt)) if tuple(prompt[:n]) in seen), default=0)
        with_kv = tuple(prompt) + tuple(reply)[: max(len(reply) - 1, 0)]
        touched = {position // page_size for position in range(len(with_kv))}
        account.append(
            {
                "cached": usable - usable % page_size,
                "lost": usable % page_size,
                "entries": len(touched),
                "idle": -len(with_kv) % page_size,
            }
        )
        seen |= {with_kv[:n] for n in range(1, len(with_kv) + 1)}
    return account


def fork_tail(
    row: Sequence[int], page_size: int, alloc: Callable[[int], list[int] | None]
) -> tuple[list[int], list[tuple[int, int]]] | None:
    """An array of slots, of which the tail moves by one distance."""
    slots = np.array(row, dtype=np.int64)
    tail = len(slots) % page_size
    pages = alloc(1 if tail else 0)
    if pages is None:
        return None
    if tail:
        slots[-tail:] += pages[0] * page_size - slots[-tail]
    moved = [(int(one), int(other)) for one, other in zip(row, slots, strict=True) if one != other]
    return slots.tolist(), moved


def fork_pages(prompt_tokens: int, samples: int, new_tokens: int, page_size: int) -> int:
    """Position by position: who is the first on its page?"""
    shared = prompt_tokens - prompt_tokens % page_size
    with_kv = range(prompt_tokens + new_tokens - 1)
    begins = [position for position in with_kv if position % page_size == 0]
    return sum(1 if position < shared else samples for position in begins)


def measure_samples(engine: Engine, prompt: Tokens, params: SamplingParams) -> dict[str, Any]:
    """Step by step, with listeners: a sample wrote if it got a slot after it had parted."""
    from minirad.observe import events as ev

    copied: dict[str, int] = {}
    slots: dict[str, int] = {}
    waited: list[str] = []

    def forked(event: ev.RequestForked) -> None:
        if event.row < 0:
            waited.append(event.request)
        else:
            copied[event.request] = event.copied

    def allocated(event: ev.SlotsAllocated) -> None:
        slots[event.request] = slots.get(event.request, 0) + len(event.slots)

    ends = [
        engine.bus.subscribe(ev.RequestForked, forked),
        engine.bus.subscribe(ev.SlotsAllocated, allocated),
    ]
    try:
        engine.add_request(list(prompt), params)
        while engine.has_work:
            engine.step()
    finally:
        for end in ends:
            end()
    in_vain = sum(count for name, count in copied.items() if slots.get(name, 0) == count)
    return {"copied": list(copied.values()), "waited": len(waited), "in_vain": in_vain}


def measure_branches(engine: Engine, prefix: Tokens, ends: Sequence[Tokens]) -> dict[str, Any]:
    """What is cached is told at the end of each request."""
    from minirad import SamplingParams
    from minirad.observe import events as ev

    done: dict[str, ev.RequestFinished] = {}
    quiet = engine.bus.subscribe(ev.RequestFinished, lambda event: done.update({event.request: event}))

    def run(prompts: list[list[int]], new: int) -> list[int]:
        names = [engine.add_request(each, SamplingParams(max_new_tokens=new)) for each in prompts]
        while engine.has_work:
            engine.step()
        return [done[name].cached_tokens for name in names]

    (cached,) = run([list(prefix)], 0)
    pin = engine.pin(list(prefix))
    try:
        found = run([[*prefix, *end] for end in ends], 1)
    finally:
        engine.unpin(pin)
        quiet()
    return {
        "hint": len(prefix) - cached,
        "again": [len(prefix) - min(each, len(prefix)) for each in found],
        "own": [len(end) - max(each - len(prefix), 0) for end, each in zip(ends, found, strict=True)],
    }


def claims_tried() -> dict[str, tuple[int, int, int, int]]:
    """Other numbers; two samples are enough to see that nobody wrote."""
    return {"three_twice": (4, 3, 3, 1), "nobody_wrote": (16, 1, 2, 1), "no_copy": (2, 64, 8, 8)}
