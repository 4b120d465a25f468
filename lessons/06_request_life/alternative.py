"""Lesson 06 once more, built otherwise: one function for both commits, numpy rows, a queue of pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def _give(tree: Any, request: Any, freed: list[int]) -> None:
    """The request's whole pages go to the tree, its duplicates back; the new end is locked."""
    whole = len(request.tokens) - len(request.tokens) % tree.page_size
    known, node = tree.insert(request.tokens[:whole], request.row[:whole])
    tree.lock(node)
    tree.unlock(request.node)
    line, theirs = np.array(request.row), np.array(tree.path_slots(node))
    for position in range(request.protected, known):
        freed.append(int(line[position]))
        line[position] = theirs[position]
    request.row = [int(slot) for slot in line]
    request.protected, request.node = whole, node


def commit_unfinished(tree: Any, request: Any, freed: list[int]) -> None:
    _give(tree, request, freed)


def commit_finished(tree: Any, request: Any, freed: list[int]) -> None:
    _give(tree, request, freed)
    freed += request.row[request.protected :]
    tree.unlock(request.node)
    request.row, request.protected, request.node = [], 0, None


def plan_chunks(
    lengths: Sequence[int], cached: Sequence[int], chunk_tokens: int, page_size: int = 1
) -> list[list[tuple[int, int, int]]]:
    begins = [min(hit, size - 1) // page_size * page_size for hit, size in zip(cached, lengths, strict=True)]
    todo = deque((i, start, stop) for i, (start, stop) in enumerate(zip(begins, lengths, strict=True)))
    steps = []
    while todo:
        budget, step = chunk_tokens, []
        while todo and budget:
            number, start, stop = todo.popleft()
            size = min(budget, stop - start)
            step.append((number, start, start + size))
            budget -= size
            if start + size < stop:
                todo.appendleft((number, start + size, stop))
        steps.append(step)
    return steps


def page_owners(
    num_pages: int,
    page_size: int,
    free: Sequence[int],
    tree_slots: Sequence[int],
    rows: Mapping[str, tuple[Sequence[int], int]],
) -> dict[int, list[str]]:
    def pages(slots: Sequence[int]) -> frozenset[int]:
        return frozenset(slot // page_size for slot in slots)

    parties = {"free": frozenset(free), "tree": pages(tree_slots)}
    held = [*parties.items(), *((name, pages(row[protected:])) for name, (row, protected) in rows.items())]
    return {page: sorted(n for n, mine in held if page in mine) for page in range(1, num_pages + 1)}
