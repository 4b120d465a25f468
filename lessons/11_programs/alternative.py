"""Lesson 11 once more, built otherwise: forks played step by step, a context manager, a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from minirad.frontend import State


def _play(
    prefix: int, own: Sequence[int], new_tokens: int, chunk: int, hint: bool, parallel: bool
) -> tuple[int, int]:
    """Computed tokens and steps, step by step."""
    cached, computed, taken = bool(hint), prefix * hint, int(hint)
    groups = [list(own)] if parallel else [[each] for each in own]
    for waiting in groups:
        rest = 0  # of the request that got a part only
        while waiting or rest:
            left, found = chunk, cached
            part = min(rest, left)
            rest, left = rest - part, left - part
            while waiting and left and not rest:
                need = waiting.pop(0) + (0 if found else prefix)
                part = min(need, left)
                rest, left = need - part, left - part
                computed += need
                cached = True
            taken += 1
        taken += new_tokens - 1
    return computed, taken


def computed_tokens(prefix: int, own: Sequence[int], chunk: int, hint: bool, parallel: bool) -> int:
    return _play(prefix, own, 1, chunk, hint, parallel)[0]


def steps(prefix: int, own: Sequence[int], new_tokens: int, chunk: int, hint: bool, parallel: bool) -> int:
    return _play(prefix, own, new_tokens, chunk, hint, parallel)[1]


@contextmanager
def _held(desk: Any, prefix: Sequence[int]) -> Iterator[None]:
    if not len(prefix):
        yield
        return
    name = desk.send(list(prefix), 0)
    desk.wait([name])
    pin = desk.pin(list(prefix))
    try:
        yield
    finally:
        desk.unpin(pin)


def fork(
    desk: Any, prefix: Sequence[int], branches: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    with _held(desk, prefix):
        names = [desk.send(list(prefix) + list(own), new_tokens) for own in branches]
        return [desk.wait([name])[0] for name in names]


def select(desk: Any, prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, list[float]]:
    seen: list[list[int]] = []
    for choice in choices:
        if not choice or list(choice) in seen:
            raise ValueError(f"the choices must be different and none empty: {choices}")
        seen.append(list(choice))
    if not seen or not len(prefix):
        raise ValueError("nothing to choose from, or nothing to choose by")
    with _held(desk, prefix):
        answers = desk.wait([desk.score(list(prefix) + choice, len(prefix)) for choice in seen])
    scores = [sum(answer) / len(choice) for answer, choice in zip(answers, seen, strict=True)]
    best = max(range(len(scores)), key=scores.__getitem__)
    return best, scores


async def explore(
    s: State, thought: Any, promising: Callable[[list[int]], bool], room: int
) -> list[list[int]]:
    s += thought.tokens
    await s.gen("thought", max_new_tokens=thought.new_tokens)
    ends = not thought.children or not promising(s.said("thought").token_ids)
    if ends:
        return [s.tokens[:]]
    needed, stack = 0, [thought]
    while stack:
        each = stack.pop()
        needed += len(each.tokens) + each.new_tokens
        stack += each.children
    room_below = room - len(thought.tokens) - thought.new_tokens
    found: list[list[int]] = []
    if needed > room:
        for child in thought.children:
            (branch,) = await s.fork(1, hint=False)
            found.extend(await explore(branch, child, promising, room_below))
        return found
    branches = await s.fork(len(thought.children))
    for ways in await branches.each(
        lambda branch, index: explore(branch, thought.children[index], promising, room_below)
    ):
        found.extend(ways)
    await branches.join()
    return found
