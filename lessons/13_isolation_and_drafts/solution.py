"""Lesson 13, solved in a few lines each. minirad/cache/node.py, config.py and speculative/ do the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise

PLAIN, ADAPTED = "plain", "adapted"


def space_of(salt: Hashable, adapter: str, loaded: Mapping[str, str]) -> Hashable:
    """The namespace of a request's KV."""
    if not adapter:
        return None if salt is None else (PLAIN, salt)
    if adapter not in loaded:
        raise ValueError(f"adapter {adapter!r} is not loaded")
    return (ADAPTED, salt, loaded[adapter])


def outdated(space: Hashable, loaded: Mapping[str, str]) -> bool:
    """Whether no request can ask for this namespace now."""
    return isinstance(space, tuple) and space[0] == ADAPTED and space[2] not in loaded.values()


def to_pairs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The units of a draft head's tree."""
    return list(pairwise(tokens))


def to_tokens(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The tokens that a run of pairs spells."""
    for (_, end), (begin, _) in pairwise(pairs):
        if end != begin:
            raise ValueError(f"a pair ends with {end}, the next one begins with {begin}")
    return [pair[0] for pair in pairs] + [pair[1] for pair in pairs[-1:]]


def commit(
    tokens: Sequence[int], row: Sequence[int], page_size: int
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """What a request passes on to a tree of pairs."""
    pairs = to_pairs(tokens)
    count = min(len(pairs), len(row)) // page_size * page_size
    return pairs[:count], list(row[:count]), list(row[count:])


def cached_tokens(common: int, length: int, page_size: int, pairs: bool) -> int:
    """How many tokens of a prompt are not computed again."""
    units = max(common - 1, 0) if pairs else common
    return min(units, length - 1) // page_size * page_size


def accept(
    draft: Sequence[int], chosen: Sequence[int], ends: Callable[[list[int]], bool]
) -> tuple[list[int], int]:
    """Which drafts hold, once the model has computed them all in one pass."""
    tokens = [chosen[0]]
    for guess, behind in zip(draft, chosen[1:], strict=True):
        if tokens[-1] != guess or ends(list(tokens)):
            break
        tokens.append(behind)
    return tokens, len(tokens) - 1


def room_for(wanted: int, left: int, length: int, free: int, page_size: int) -> int:
    """How many drafts get slots before a pass."""
    return min(wanted, left - 1, -length % page_size + free)


def roll_back(row: Sequence[int], length: int, kept: int, page_size: int) -> tuple[list[int], list[int]]:
    """After a pass: the row as it goes on, and the slots that are free again."""
    end = length + kept
    first = -(-end // page_size) * page_size
    return list(row[:end]), list(row[first:])
