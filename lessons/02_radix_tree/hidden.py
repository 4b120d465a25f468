"""Random cases of lesson 02: the same calls to the student's functions and to minirad's RadixCache."""

from __future__ import annotations

from random import Random
from types import ModuleType

from lessons.grading import Failure, expect
from lessons.grading.cases import key, laid, pictures, random_tokens, rounds, same_outline, same_times, whole
from lessons.grading.tree import Tree, snapshot
from minirad.cache.radix_cache import RadixCache


def random_prefixes(impl: ModuleType, rng: Random) -> None:
    """Random sequences with a known common beginning."""
    for _ in range(150):
        page = rng.choice((1, 1, 2, 3, 4, 8))
        head = [rng.randrange(200_000) for _ in range(rng.randrange(5 * page))]
        a, b = ([*head, *([rng.randrange(5)] * rng.randrange(4)), *tail] for tail in ([7], [8]))
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        wanted = same // page * page
        got = impl.common_prefix(a, b, page)
        expect(got == wanted, f"common_prefix({a}, {b}, page_size={page}) gave {got!r} instead of {wanted}")


def random_splits(impl: ModuleType, rng: Random) -> None:
    """Trees that grow by inserts whose splits are the student's."""

    def play(rng: Random, page: int) -> None:
        _play(laid(Tree(page), impl, "split_node"), rng, inserts=25, matches=10, what="split_node")

    rounds(rng, play)


def random_matches(impl: ModuleType, rng: Random) -> None:
    """Random look-ups in random trees."""

    def play(rng: Random, page: int) -> None:
        _play(laid(Tree(page), impl, "match_prefix"), rng, inserts=15, matches=30, what="match_prefix")

    rounds(rng, play)


def random_inserts(impl: ModuleType, rng: Random) -> None:
    """Random inserts, one after the other."""

    def play(rng: Random, page: int) -> None:
        _play(laid(Tree(page), impl, "insert"), rng, inserts=40, matches=5, what="insert")

    rounds(rng, play)


def _play(tree: Tree, rng: Random, inserts: int, matches: int, what: str) -> None:
    reference = RadixCache(tree.page_size)
    known: list[list[int]] = []
    steps = ["insert"] * inserts + ["match"] * matches
    rng.shuffle(steps)
    slot = tree.page_size
    for step in steps:
        tokens = random_tokens(rng, known, tree.page_size)
        before = snapshot(tree)
        where = f"{what}, random tree with pages of {tree.page_size}, {step} of {tokens}"
        if step == "insert":
            slots = list(range(slot, slot + len(tokens)))
            slot += -(-len(tokens) // tree.page_size) * tree.page_size
            got, _ = tree.insert(tokens, slots)
            wanted = reference.insert(key(tokens), slots).prefix_len
            words = f"{where}: {got} tokens were there before, it says; it was {wanted}"
            known.append(tokens)
        else:
            found, _ = tree.match(tokens)
            theirs = reference.match_prefix(key(tokens)).slots.tolist()
            got, wanted = len(found), len(theirs)
            words = f"{where}: slots {found} instead of {theirs}"
            if found != theirs:
                got = -1
        if got != wanted:
            raise Failure(words, pictures(tree, before))
        whole(tree, where, before)
        same_outline(tree, reference, where, before)
        same_times(tree, reference, where, before)


HIDDEN = {
    "common_prefix": [random_prefixes],
    "split_node": [random_splits],
    "match_prefix": [random_matches],
    "insert": [random_inserts],
}
