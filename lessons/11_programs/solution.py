"""Lesson 11, solved in a few lines each. minirad/frontend/state.py does the same for every program."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from minirad.frontend import State

if TYPE_CHECKING:
    Desk = Thought = Any  # what exercise.py says of them


def computed_tokens(prefix: int, own: Sequence[int], chunk: int, hint: bool, parallel: bool) -> int:
    """How many prompt tokens does the engine compute for a fork?"""
    if hint or not parallel:
        return prefix + sum(own)
    times, filled = 0, 0
    for tokens in own:
        if filled >= chunk:
            break
        filled += prefix + tokens
        times += 1
    return times * prefix + sum(own)


def steps(prefix: int, own: Sequence[int], new_tokens: int, chunk: int, hint: bool, parallel: bool) -> int:
    """In how many steps is a fork done?"""
    if not parallel:
        return hint + len(own) * new_tokens
    behind_the_hint = computed_tokens(prefix, own, chunk, hint, parallel) - hint * prefix
    return hint + math.ceil(behind_the_hint / chunk) + new_tokens - 1


def fork(
    desk: Desk, prefix: Sequence[int], branches: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Runs branches side by side behind one prefix."""
    pin = _hint(desk, prefix) if prefix else None
    try:
        names = [desk.send([*prefix, *own], new_tokens) for own in branches]
        return list(desk.wait(names))
    finally:
        if pin is not None:
            desk.unpin(pin)


def _hint(desk: Desk, prefix: Sequence[int]) -> Any:
    """Computes a prefix and pins it."""
    desk.wait([desk.send(prefix, 0)])
    return desk.pin(prefix)


def select(desk: Desk, prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, list[float]]:
    """Which of several continuations does the model find likeliest?"""
    different = {tuple(choice) for choice in choices}
    if not prefix or not choices or () in different or len(different) < len(choices):
        raise ValueError(f"a prefix and different choices, none empty, are needed: {prefix}, {choices}")
    pin = _hint(desk, prefix)
    try:
        names = [desk.score([*prefix, *choice], len(prefix)) for choice in choices]
        scores = [fmean(logprobs) for logprobs in desk.wait(names)]
    finally:
        desk.unpin(pin)
    return scores.index(max(scores)), scores


async def explore(
    s: State, thought: Thought, promising: Callable[[list[int]], bool], room: int
) -> list[list[int]]:
    """Thinks a tree of thought: side by side where it fits, else one way after another."""
    s += thought.tokens
    await s.gen("thought", max_new_tokens=thought.new_tokens)
    if not thought.children or not promising(s.said("thought").token_ids):
        return [list(s.tokens)]
    left = room - len(thought.tokens) - thought.new_tokens
    branches = await s.fork(len(thought.children))

    async def child(branch: State, index: int) -> list[list[int]]:
        return await explore(branch, thought.children[index], promising, left)

    if _slots(thought) <= room:
        found = await branches.each(child)
    else:
        found = [await child(branch, index) for index, branch in enumerate(branches)]
    await branches.join()
    return [way for ways in found for way in ways]


def _slots(thought: Thought) -> int:
    """Of a thought and all below it."""
    below = sum(_slots(child) for child in thought.children)
    return len(thought.tokens) + thought.new_tokens + below
