"""Lesson 06, solved on plain lists. schedule/cache_manager.py and scheduler.py do it for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:

    class Tree(Protocol):
        page_size: int

        def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Any]: ...
        def path_slots(self, node: Any) -> list[int]: ...
        def lock(self, node: Any) -> None: ...
        def unlock(self, node: Any) -> None: ...

    class Request(Protocol):
        tokens: list[int]
        row: list[int]
        protected: int
        node: Any


def commit_unfinished(tree: Tree, request: Request, freed: list[int]) -> None:
    """Passes what a request computed on to the tree; the request goes on running."""
    prefix_len, node = tree.insert(request.tokens, request.row)
    aligned = len(request.tokens) // tree.page_size * tree.page_size
    freed.extend(request.row[request.protected : prefix_len])
    request.row[:aligned] = tree.path_slots(node)
    tree.lock(node)  # before the old one is let go
    tree.unlock(request.node)
    request.protected, request.node = aligned, node


def commit_finished(tree: Tree, request: Request, freed: list[int]) -> None:
    """The same for the last time: the request ends here."""
    prefix_len, _ = tree.insert(request.tokens, request.row)
    whole = len(request.tokens) // tree.page_size * tree.page_size
    freed.extend(request.row[request.protected : prefix_len])
    freed.extend(request.row[whole:])
    tree.unlock(request.node)
    request.row.clear()
    request.protected, request.node = 0, None


def plan_chunks(
    lengths: Sequence[int], cached: Sequence[int], chunk_tokens: int, page_size: int = 1
) -> list[list[tuple[int, int, int]]]:
    """Which prompt tokens are computed in which step."""
    steps: list[list[tuple[int, int, int]]] = []
    left = 0
    for number, length in enumerate(lengths):
        start = min(cached[number], length - 1) // page_size * page_size
        while start < length:
            if left == 0:
                steps.append([])
                left = chunk_tokens
            stop = min(start + left, length)
            steps[-1].append((number, start, stop))
            left -= stop - start
            start = stop
    return steps


def page_owners(
    num_pages: int,
    page_size: int,
    free: Sequence[int],
    tree_slots: Sequence[int],
    rows: Mapping[str, tuple[Sequence[int], int]],
) -> dict[int, list[str]]:
    """Who claims each page, for pages 1 to num_pages."""
    claims: dict[int, set[str]] = {page: set() for page in range(1, num_pages + 1)}
    for page in free:
        claims[page].add("free")
    for slot in tree_slots:
        claims[slot // page_size].add("tree")
    for name, (row, protected) in rows.items():
        for slot in row[protected:]:
            claims[slot // page_size].add(name)
    return {page: sorted(names) for page, names in claims.items()}
