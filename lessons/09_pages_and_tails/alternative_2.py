"""Lesson 09 with other data: whole beginnings as keys, a sorted list, the engine's own runner watched."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, takewhile
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirad.config import SamplingParams
    from minirad.engine import Engine

Tokens = Sequence[int]


def match_pages(index: dict[Any, Any], tokens: Tokens, page_size: int) -> list[int]:
    """A page is filed under everything up to its end."""
    ends = takewhile(lambda end: tuple(tokens[:end]) in index, range(page_size, len(tokens) + 1, page_size))
    return [index[tuple(tokens[:end])] for end in ends]


def insert_pages(index: dict[Any, Any], tokens: Tokens, pages: Sequence[int], page_size: int) -> list[int]:
    """From the end to the beginning: no page asks what was done with the one before."""
    free: list[int] = []
    for j in reversed(range(len(pages))):
        end = (j + 1) * page_size
        if end > len(tokens):
            free.insert(0, pages[j])
            continue
        if tuple(tokens[:end]) not in index:
            index[tuple(tokens[:end])] = pages[j]
        elif index[tuple(tokens[:end])] != pages[j]:
            free.insert(0, pages[j])
    return free


def page_account(page_size: int, requests: Sequence[tuple[Tokens, Tokens]]) -> list[dict[str, int]]:
    """In a sorted list, the longest beginning in common is with a neighbour."""
    line: list[list[int]] = []
    account = []
    for prompt, reply in requests:
        at = bisect(line, list(prompt))
        usable = 0
        for neighbour in line[max(at - 1, 0) : at + 1]:
            pairs = zip(prompt, neighbour, strict=False)
            alike = sum(
                accumulate((one == other for one, other in pairs), lambda so_far, same: so_far and same)
            )
            usable = max(usable, min(alike, len(prompt) - 1))
        tokens = [*prompt, *reply]
        if reply:
            tokens.pop()
        pages, rest = divmod(len(tokens), page_size)
        entries, idle = (pages + 1, page_size - rest) if rest else (pages, 0)
        lost = usable % page_size
        account.append({"idle": idle, "entries": entries, "lost": lost, "cached": usable - lost})
        insort(line, tokens)
    return account


def fork_tail(
    row: Sequence[int], page_size: int, alloc: Callable[[int], list[int] | None]
) -> tuple[list[int], list[tuple[int, int]]] | None:
    """Page by page: a page that is full is taken as it is."""
    mine: list[int] = []
    copies: list[tuple[int, int]] = []
    for first in range(0, len(row), page_size):
        page = list(row[first : first + page_size])
        if len(page) < page_size:
            taken = alloc(1)
            if taken is None:
                return None
            fresh = count(taken[0] * page_size)
            copies = [(slot, next(fresh)) for slot in page]
            page = [target for _, target in copies]
        mine.extend(page)
    return mine, copies


def fork_pages(prompt_tokens: int, samples: int, new_tokens: int, page_size: int) -> int:
    """All pages as if nothing were shared, less what is."""
    each = ceil((prompt_tokens + new_tokens - 1) / page_size)
    return samples * each - (samples - 1) * (prompt_tokens // page_size)


@contextmanager
def _recorded(engine: Engine) -> Iterator[list[Any]]:
    heard: list[Any] = []
    end = engine.bus.subscribe(None, heard.append)
    try:
        yield heard
    finally:
        end()


def measure_samples(engine: Engine, prompt: Tokens, params: SamplingParams) -> dict[str, Any]:
    """What it says of itself at the end: a sample with less than two tokens wrote nothing."""
    with _recorded(engine) as heard:
        engine.generate([list(prompt)], params)
    by_kind: dict[str, list[Any]] = {}
    for event in heard:
        by_kind.setdefault(type(event).__name__, []).append(event)
    forked = by_kind.get("RequestForked", [])
    tokens = {event.request: event.new_tokens for event in by_kind["RequestFinished"]}
    copied = {event.request: event.copied for event in forked if event.row != -1}
    return {
        "waited": sum(event.row == -1 for event in forked),
        "copied": [*copied.values()],
        "in_vain": sum(copied[name] for name in copied if tokens[name] <= 1),
    }


def measure_branches(engine: Engine, prefix: Tokens, ends: Sequence[Tokens]) -> dict[str, Any]:
    """From the admissions: how much was cached when each began."""
    from minirad import SamplingParams
    from minirad.observe.events import RequestAdmitted

    with _recorded(engine) as heard:
        hint = engine.add_request(list(prefix), SamplingParams(max_new_tokens=0))
        while engine.has_work:
            engine.step()
        pin = engine.pin(list(prefix))
        names = [engine.add_request([*prefix, *end], SamplingParams(max_new_tokens=1)) for end in ends]
        while engine.has_work:
            engine.step()
        engine.unpin(pin)
    cached = {event.request: event.cached for event in reversed(heard) if isinstance(event, RequestAdmitted)}
    size = len(prefix)
    computed = [
        (max(size - cached[name], 0), size + len(end) - max(cached[name], size))
        for name, end in zip(names, ends, strict=True)
    ]
    return {
        "hint": size - cached[hint],
        "again": [again for again, _ in computed],
        "own": [own for _, own in computed],
    }


def claims_tried() -> dict[str, tuple[int, int, int, int]]:
    """The leader and two others; no tail in pages of 16."""
    return {"no_copy": (16, 16, 2, 3), "three_twice": (4, 63, 3, 8), "nobody_wrote": (4, 63, 8, 1)}
