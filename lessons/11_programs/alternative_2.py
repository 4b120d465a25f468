"""Lesson 11 a third time: sums and bisection, flags instead of helpers, a decision made once for a tree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from minirad.frontend import State


def _alone(prefix: int, own: Sequence[int], chunk: int) -> int:
    """How many branches the first step takes on."""
    filled = list(accumulate(prefix + tokens for tokens in own))
    return min(bisect_left(filled, chunk) + 1, len(filled))


def computed_tokens(prefix: int, own: Sequence[int], chunk: int, hint: bool, parallel: bool) -> int:
    many = parallel and not hint
    return sum(own) + prefix * (_alone(prefix, own, chunk) if many else 1)


def steps(prefix: int, own: Sequence[int], new_tokens: int, chunk: int, hint: bool, parallel: bool) -> int:
    if hint:
        below = -(-sum(own) // chunk) + new_tokens - 1 if parallel else len(own) * new_tokens
        return 1 + below
    if not parallel:
        return len(own) * new_tokens
    every = sum(own) + prefix * _alone(prefix, own, chunk)
    return (every + chunk - 1) // chunk - 1 + new_tokens


def fork(
    desk: Any, prefix: Sequence[int], branches: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    pins = []
    try:
        if prefix:
            desk.wait((desk.send(tuple(prefix), 0),))
            pins.append(desk.pin(tuple(prefix)))
        names = []
        for own in branches:
            names.append(desk.send(tuple(prefix) + tuple(own), new_tokens))
        replies = dict(zip(names, desk.wait(names), strict=True))
    except BaseException:
        for pin in pins:
            desk.unpin(pin)
        raise
    for pin in pins:
        desk.unpin(pin)
    return [replies[name] for name in names]


def select(desk: Any, prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, list[float]]:
    given = [tuple(choice) for choice in choices]
    if not (prefix and given and all(given) and len(set(given)) == len(given)):
        raise ValueError(f"select from {choices} behind {prefix}")
    start = len(prefix)
    desk.wait([desk.send(prefix, 0)])
    pin = desk.pin(prefix)
    scores: list[float] = []
    place = 0
    try:
        asked = {choice: desk.score((*prefix, *choice), start) for choice in given}
        desk.wait(list(asked.values()))
        for number, choice in enumerate(given):
            (logprobs,) = desk.wait([asked[choice]])
            scores.append(sum(logprobs) / len(logprobs))
            if scores[number] > scores[place]:
                place = number
    finally:
        desk.unpin(pin)
    return place, scores


async def explore(
    s: State, thought: Any, promising: Callable[[list[int]], bool], room: int
) -> list[list[int]]:
    ways: dict[tuple[int, ...], list[int]] = {}
    await _go(s, 0, (thought,), room, promising, (), ways)
    return [ways[place] for place in sorted(ways)]


async def _go(
    s: State, index: int, family: Sequence[Any], room: int, promising: Callable[[list[int]], bool],
    place: tuple[int, ...], ways: dict[tuple[int, ...], list[int]],
) -> None:  # fmt: skip
    """Explores one of a family, and notes where its ways end."""
    thought, place = family[index], (*place, index)
    s += list(thought.tokens)
    await s.gen("thought", max_new_tokens=thought.new_tokens)
    if not (promising(s.said("thought").token_ids) and thought.children):
        ways[place] = list(s.tokens)
        return
    below = room - len(thought.tokens) - thought.new_tokens
    go = partial(_go, family=thought.children, room=below, promising=promising, place=place, ways=ways)
    branches = await s.fork(len(thought.children))
    if sum(map(_size, thought.children)) <= below:
        await branches.each(go)
    else:
        for number, branch in enumerate(branches):
            await go(branch, number)
    await branches.join()


def _size(thought: Any) -> int:
    return len(thought.tokens) + int(thought.new_tokens) + sum(map(_size, thought.children))
