"""Lesson 13, right in a third way: nested tuples for keys, recursion and slices for the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence


def space_of(salt: Hashable, adapter: str, loaded: Mapping[str, str]) -> Hashable:
    if adapter and adapter not in loaded:
        raise ValueError("no such adapter: " + adapter)
    weights = (loaded[adapter],) if adapter else ()
    if not weights and salt is None:
        return None
    return weights, (salt,)


def outdated(space: Hashable, loaded: Mapping[str, str]) -> bool:
    if space is None:
        return False
    weights: tuple[str, ...] = space[0]  # type: ignore[index]
    return bool(set(weights) - set(loaded.values()))


def to_pairs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    return [(tokens[at], tokens[at + 1]) for at in range(len(tokens) - 1)]


def to_tokens(pairs: Sequence[tuple[int, int]]) -> list[int]:
    if not pairs:
        return []
    tokens = [pairs[0][0]] + [second for _, second in pairs]
    if to_pairs(tokens) != [tuple(pair) for pair in pairs]:
        raise ValueError(f"{pairs} are no run of pairs")
    return tokens


def commit(
    tokens: Sequence[int], row: Sequence[int], page_size: int
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    known = tokens[: len(row) + 1]
    pages = max(len(known) - 1, 0) // page_size
    cut = pages * page_size
    return to_pairs(known[: cut + 1]) if cut else [], list(row)[:cut], list(row)[cut:]


def cached_tokens(common: int, length: int, page_size: int, pairs: bool) -> int:
    if pairs:
        return max(common - 1, 0) // page_size * page_size
    return min(common, length - 1) // page_size * page_size


def accept(
    draft: Sequence[int], chosen: Sequence[int], ends: Callable[[list[int]], bool]
) -> tuple[list[int], int]:
    def after(tokens: list[int]) -> list[int]:
        place = len(tokens)
        if place > len(draft) or tokens[-1] != draft[place - 1] or ends(tokens):
            return tokens
        return after([*tokens, chosen[place]])

    tokens = after([chosen[0]])
    return tokens, len(tokens) - 1


def room_for(wanted: int, left: int, length: int, free: int, page_size: int) -> int:
    last_page_ends = (length + page_size - 1) // page_size * page_size
    return max(0, min(wanted, left - 1, last_page_ends + free - length))


def roll_back(row: Sequence[int], length: int, kept: int, page_size: int) -> tuple[list[int], list[int]]:
    end = length + kept
    first = end + (page_size - end % page_size) % page_size
    return [*row[:end]], [*row[first:]]
