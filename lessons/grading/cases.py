"""What the cases of lessons 02 and 03 have in common: trees to begin with, and comparisons in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading.spec import Failure, expect
from lessons.grading.tree import Node, Tree, name_of, path_up, snapshot
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.errors import InvariantError


def tree_of(*sequences: Sequence[int], page_size: int = 1, **more: Any) -> Tree:
    """A tree with these sequences in it, put in by the grader; token t of sequence i has slot 100 i + ..."""
    tree = Tree(page_size, **more)
    for number, tokens in enumerate(sequences, start=1):
        first = 1000 * number
        tree.insert(tokens, range(first, first + len(tokens)))
    return tree


def laid(tree: Tree, impl: ModuleType, *names: str) -> Tree:
    """The same tree, working from now on with these functions of `impl`."""
    tree.parts = {**tree.parts, **{name: getattr(impl, name) for name in names}}
    return tree


def node_at(tree: Tree, tokens: Sequence[int]) -> Node:
    """The node whose path spells `tokens`."""
    for node in tree.nodes():
        if spelled(node) == list(tokens):
            return node
    raise Failure(
        f"no node ends after {list(tokens)}: it should be a node's end", [("the tree", snapshot(tree))]
    )


def spelled(node: Node) -> list[int]:
    """All tokens from the root to the end of a node."""
    return [int(token) for step in reversed(path_up(node)) for token in step.tokens]


def whole(tree: Tree, where: str, before: dict[str, Any] | None = None, hint: int = 0) -> None:
    """The tree's invariants hold, or a Failure says which does not. hint: as a Failure's."""
    try:
        tree.check()
    except InvariantError as error:
        raise Failure(f"{where}: {error}", pictures(tree, before), hint) from error


def pictures(tree: Tree, before: dict[str, Any] | None = None) -> list[tuple[str, Any]]:
    """Before (if known) and after."""
    first = [("before", before)] if before is not None else []
    return [*first, ("after your code" if first else "the tree then", snapshot(tree))]


def outline(tree: Tree | RadixCache) -> list[tuple[list[int], list[int], list[int]]]:
    """What a tree holds, node by node, whatever its nodes are called: path, own tokens, slots."""
    nodes = tree.nodes() if isinstance(tree, Tree) else tree.walk()
    found = []
    for node in nodes:
        if node.parent is not None:
            found.append((_path(node), _own(node), [int(slot) for slot in node.slots]))
    return sorted(found)


def _own(node: Any) -> list[int]:
    return [int(token) for token in (node.tokens if isinstance(node, Node) else node.key.tokens)]


def _path(node: Any) -> list[int]:
    path: list[int] = []
    while node.parent is not None:
        path = _own(node) + path
        node = node.parent
    return path


def same_outline(tree: Tree, reference: RadixCache, where: str, before: dict[str, Any]) -> None:
    """Node for node the tree of the engine; the first difference in words."""
    ours, theirs = outline(tree), outline(reference)
    if ours == theirs:
        return
    for path, own, slots in theirs:
        found = next((entry for entry in ours if entry[0] == path), None)
        expect(
            found is not None,
            f"{where}: a node should end after {path}, and none does",
            pictures(tree, before),
        )
        assert found is not None
        words = f"{where}: the node that ends after {path} should hold {own}, it holds {found[1]}"
        expect(found[1] == own, words, pictures(tree, before))
        words = f"{where}: the node {own} should keep slots {slots}, it has {found[2]}"
        expect(found[2] == slots, words, pictures(tree, before))
    extra = [path for path, _, _ in ours if path not in [entry[0] for entry in theirs]]
    expect(not extra, f"{where}: no node should end after {extra[:1]}", pictures(tree, before))


def same_times(tree: Tree, reference: RadixCache, where: str, before: dict[str, Any]) -> None:
    """Every node was last used when the engine says so; both clocks tick alike."""
    theirs = {tuple(_path(node)): node.last_access for node in reference.walk()}
    for node in tree.nodes():
        wanted = theirs[tuple(spelled(node))]
        if node is not tree.root and node.last_access != wanted:
            raise Failure(
                f"{where}: last_access of {name_of(node)} should be {wanted} (now is {tree.now}), "
                f"it is {node.last_access}",
                pictures(tree, before),
            )


# ---------------------------------------------------------------------- random sequences


def random_tokens(rng: Random, known: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """A new sequence, often the beginning of a known one with something else behind it."""
    longest = 6 * page_size
    tail = [rng.randrange(3) for _ in range(rng.randrange(longest))]
    if not known or rng.random() < 0.25:
        return tail
    head = list(rng.choice(known))
    return head[: rng.randrange(len(head) + 1)] + (tail if rng.random() < 0.8 else [])


def key(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(list(tokens))


def rounds(rng: Random, play: Callable[[Random, int], None], pages: Sequence[int] = (1, 1, 2, 3, 4)) -> None:
    """The same game on each page size."""
    for page_size in pages:
        play(rng, page_size)
