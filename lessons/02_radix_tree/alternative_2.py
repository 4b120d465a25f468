"""Lesson 02 with other data: tuples in the nodes, bisection for the prefix and for the children.

The longest common prefix of two sequences is found by bisection over equal slices, a child by bisection
over the sorted first pages. A match looks at the whole way first and changes something only then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lessons.grading.tree import Node, Tree


def common_prefix(a: Sequence[int], b: Sequence[int], page_size: int = 1) -> int:
    """Bisects: are the first `middle` pages equal as tuples?"""
    one, two = tuple(map(int, a)), tuple(map(int, b))
    low, high = 0, min(len(one), len(two)) // page_size
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * page_size] == two[: middle * page_size]:
            low = middle
        else:
            high = middle - 1
    return low * page_size


def _page(tree: Tree, tokens: Any) -> tuple[int, ...]:
    return tuple(map(int, tokens[: tree.page_size]))


def _hang(tree: Tree, parent: Any, child: Any) -> None:
    """Files a child under its first page; the children lie in the order of their pages."""
    pairs = {**parent.children, _page(tree, child.tokens): child}
    parent.children, child.parent = dict(sorted(pairs.items())), parent


def _look_up(tree: Tree, node: Any, tokens: Any) -> Any:
    """The child that begins with these tokens' first page, found in the sorted list of first pages."""
    wanted, pages = _page(tree, tokens), sorted(node.children)
    place = bisect_left(pages, wanted)
    return node.children[pages[place]] if place < len(pages) and pages[place] == wanted else None


def split_node(tree: Tree, node: Node, at: int) -> Node:
    """The upper half gets a copy of all that the node knows, and then what is its own."""
    upper: Any = tree.new_node((), (), node.parent)  # type: ignore[arg-type]
    number = upper.id
    vars(upper).update(vars(node))
    upper.id, upper.children = number, {}
    upper.tokens, upper.slots = tuple(node.tokens[:at]), tuple(node.slots[:at])
    node.tokens, node.slots = tuple(node.tokens[at:]), tuple(node.slots[at:])
    _hang(tree, node.parent, upper)
    _hang(tree, upper, node)
    upper.last_access = node.last_access = tree.now
    return upper


def _walk(tree: Tree, tokens: Sequence[int]) -> list[tuple[Any, int]]:
    """The nodes on the way down, each with how much of it is alike."""
    way: list[tuple[Any, int]] = []
    node, done = tree.root, 0
    while (child := _look_up(tree, node, tokens[done:])) is not None:
        shared = common_prefix(child.tokens, tokens[done:], tree.page_size)
        way.append((child, shared))
        if shared < len(child.tokens):
            break
        node, done = child, done + shared
    return way


def match_prefix(tree: Tree, tokens: Sequence[int]) -> tuple[list[int], Node]:
    """First looks without touching anything, then splits the last one, then notes the time."""
    way = _walk(tree, tokens)
    nodes = [node for node, _ in way]
    if way and way[-1][1] < len(way[-1][0].tokens):
        nodes[-1] = split_node(tree, *way[-1])
    for node in nodes:
        node.last_access = tree.now
    return [int(slot) for node in nodes for slot in node.slots], nodes[-1] if nodes else tree.root


def insert(tree: Tree, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Node]:
    """What is left behind the match, cut to pages, becomes a leaf of tuples."""
    whole = len(tokens) - len(tokens) % tree.page_size
    found, end = match_prefix(tree, tokens[:whole])
    if len(found) < whole:
        above: Any = end
        end = tree.new_node((), (), above)
        end.tokens, end.slots = tuple(tokens[len(found) : whole]), tuple(slots[len(found) : whole])
        _hang(tree, above, end)
    return len(found), end


def claim_two_subtrees() -> list[list[int]]:
    """Three prompts, each one longer by a token: a chain."""
    return [[7], [7, 7], [7, 7, 7]]
