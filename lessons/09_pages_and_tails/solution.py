"""Lesson 09, solved in a few lines each. minirad/schedule/cache_manager.py does the same for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirad.config import SamplingParams
    from minirad.engine import Engine

Tokens = Sequence[int]


def match_pages(index: dict[Any, Any], tokens: Tokens, page_size: int) -> list[int]:
    """Page by page: each is found under its tokens and the page before it."""
    found: list[int] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        before = found[-1] if found else 0
        page = index.get((before, tuple(tokens[start : start + page_size])))
        if page is None:
            break
        found.append(page)
    return found


def insert_pages(index: dict[Any, Any], tokens: Tokens, pages: Sequence[int], page_size: int) -> list[int]:
    """The chain goes on from the index's page, also where the request computed one of its own."""
    free = []
    before = 0
    for j in range(len(tokens) // page_size):
        key = (before, tuple(tokens[j * page_size : (j + 1) * page_size]))
        before = index.setdefault(key, pages[j])
        if before != pages[j]:
            free.append(pages[j])
    return free + list(pages[len(tokens) // page_size :])


def page_account(page_size: int, requests: Sequence[tuple[Tokens, Tokens]]) -> list[dict[str, int]]:
    """Every request is compared with what has KV of all earlier ones."""
    account, known = [], list[list[int]]()
    for prompt, reply in requests:
        alike = max((_alike(prompt, earlier) for earlier in known), default=0)
        usable = min(alike, len(prompt) - 1)
        cached = usable // page_size * page_size
        with_kv = [*prompt, *reply[:-1]]
        entries = -(-len(with_kv) // page_size)
        account.append(
            {
                "cached": cached,
                "lost": usable - cached,
                "entries": entries,
                "idle": entries * page_size - len(with_kv),
            }
        )
        known.append(with_kv)
    return account


def _alike(one: Tokens, other: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def fork_tail(
    row: Sequence[int], page_size: int, alloc: Callable[[int], list[int] | None]
) -> tuple[list[int], list[tuple[int, int]]] | None:
    """The tail moves into a page of the sample's own, token by token at the same offset."""
    whole = len(row) // page_size * page_size
    shared, tail = list(row[:whole]), list(row[whole:])
    if not tail:
        return shared, []
    pages = alloc(1)
    if pages is None:
        return None
    own = [pages[0] * page_size + offset for offset in range(len(tail))]
    return shared + own, list(zip(tail, own, strict=True))


def fork_pages(prompt_tokens: int, samples: int, new_tokens: int, page_size: int) -> int:
    """Whole pages of the prompt once; the tail and what was generated for each."""
    whole, tail = divmod(prompt_tokens, page_size)
    return whole + samples * -(-(tail + new_tokens - 1) // page_size)


def measure_samples(engine: Engine, prompt: Tokens, params: SamplingParams) -> dict[str, Any]:
    """Copies are told by RequestForked; who wrote nothing has no token that was fed back."""
    from minirad import Recorder
    from minirad.events import RequestForked

    with Recorder(engine) as recording:
        outputs = engine.generate(list(prompt), params)
    forked = [event for frame in recording for event in frame.events if isinstance(event, RequestForked)]
    silent = {f"{output.request_id}.{output.index}" for output in outputs if len(output.token_ids) < 2}
    parted = [event for event in forked if event.row >= 0]
    return {
        "copied": [event.copied for event in parted],
        "waited": len(forked) - len(parted),
        "in_vain": sum(event.copied for event in parted if event.request in silent),
    }


def measure_branches(engine: Engine, prefix: Tokens, ends: Sequence[Tokens]) -> dict[str, Any]:
    """What a branch did not find is computed: first what is missing of the prefix, then its own end."""
    from minirad import SamplingParams

    (hint,) = engine.generate(list(prefix), SamplingParams(max_new_tokens=0))
    pin = engine.pin(list(prefix))
    prompts = [[*prefix, *end] for end in ends]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=1))
    engine.unpin(pin)
    again = [max(len(prefix) - output.cached_tokens, 0) for output in outputs]
    return {
        "hint": len(prefix) - hint.cached_tokens,
        "again": again,
        "own": [
            output.prompt_tokens - output.cached_tokens - lost
            for output, lost in zip(outputs, again, strict=True)
        ],
    }


def claims_tried() -> dict[str, tuple[int, int, int, int]]:
    """A prompt of 11 tokens has a tail of 3 in pages of 4; one of 8 has none."""
    return {"three_twice": (4, 11, 3, 4), "nobody_wrote": (4, 11, 3, 1), "no_copy": (4, 8, 3, 4)}
