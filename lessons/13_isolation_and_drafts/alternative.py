"""Lesson 13, right in another way: keys of types of their own, loops instead of lengths."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    """The namespace of a salt alone."""

    salt: Hashable


@dataclass(frozen=True)
class Adapted:
    """The namespace of an adapter's weights, for one salt."""

    digest: str
    salt: Hashable


def space_of(salt: Hashable, adapter: str, loaded: Mapping[str, str]) -> Hashable:
    if adapter:
        try:
            return Adapted(loaded[adapter], salt)
        except KeyError:
            raise ValueError(f"unknown adapter {adapter}; known: {', '.join(loaded)}") from None
    return salt if salt is None else Tenant(salt)


def outdated(space: Hashable, loaded: Mapping[str, str]) -> bool:
    if not isinstance(space, Adapted):
        return False
    return all(digest != space.digest for digest in loaded.values())


def to_pairs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    pairs = []
    for at in range(1, len(tokens)):
        pairs.append((tokens[at - 1], tokens[at]))
    return pairs


def to_tokens(pairs: Sequence[tuple[int, int]]) -> list[int]:
    tokens: list[int] = []
    for first, second in pairs:
        if not tokens:
            tokens.append(first)
        elif tokens[-1] != first:
            raise ValueError(f"{tokens[-1]} and {first} do not meet")
        tokens.append(second)
    return tokens


def commit(
    tokens: Sequence[int], row: Sequence[int], page_size: int
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    pairs: list[tuple[int, int]] = []
    slots: list[int] = []
    page: list[tuple[tuple[int, int], int]] = []
    for pair, slot in zip(to_pairs(tokens), row, strict=False):
        page.append((pair, slot))
        if len(page) == page_size:
            pairs += [each for each, _ in page]
            slots += [each for _, each in page]
            page = []
    return pairs, slots, [row[at] for at in range(len(slots), len(row))]


def cached_tokens(common: int, length: int, page_size: int, pairs: bool) -> int:
    found = 0
    while found + page_size < length and found + page_size <= common - pairs:
        found += page_size
    return found


def accept(
    draft: Sequence[int], chosen: Sequence[int], ends: Callable[[list[int]], bool]
) -> tuple[list[int], int]:
    kept = 0
    while kept < len(draft) and draft[kept] == chosen[kept] and not ends(list(chosen[: kept + 1])):
        kept += 1
    return list(chosen[: kept + 1]), kept


def room_for(wanted: int, left: int, length: int, free: int, page_size: int) -> int:
    begun = length % page_size
    room = free + (page_size - begun if begun else 0)
    count = 0
    while count < wanted and count + 1 < left and count < room:
        count += 1
    return count


def roll_back(row: Sequence[int], length: int, kept: int, page_size: int) -> tuple[list[int], list[int]]:
    goes_on = list(row)[: length + kept]
    pages_needed = {at // page_size for at in range(length + kept)}
    freed = [slot for at, slot in enumerate(row) if at // page_size not in pages_needed]
    return goes_on, freed
