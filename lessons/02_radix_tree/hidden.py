"""Hidden cases of lesson 02: first games that are the same for every student, then random ones.

The fixed ones compare every node with a tree of the grader's own; the random ones, with minirad's RadixCache.
"""

from __future__ import annotations

from random import Random
from types import ModuleType

from lessons.grading import Failure, expect, underlay
from lessons.grading.cases import key, laid, pictures, random_tokens, rounds, same_outline, same_times, whole
from lessons.grading.game import Move, Twins, random_moves, said, spelled_out
from lessons.grading.tree import Tree, snapshot
from minirad.cache.radix_cache import RadixCache

# ---------------------------------------------------------------------- the same for everybody

FAR = (256, 2**16, 2**24, 2**31, 2**32)  # ids that are alike in their last bits
LONG = 3000  # deeper than Python lets a function call itself


def prefixes_of_all_kinds(impl: ModuleType) -> None:
    """Ids of any size, differences in every place, pages of every size."""
    pairs = [([5, 1], [5 + far, 1]) for far in FAR]
    pairs += [([far, 1], [far + 1, 1]) for far in (2**24, 2**31, 2**53)]
    pairs += [([7, far, 2**53 + 1, 9], [7, far, 2**53 + 1, 8]) for far in (300, 70_000, 1_114_112, 2**31 + 5)]
    pairs += [([1, 23], [12, 3]), ([1, 2], [12]), ([0, 1, 0, 1], [0, 1, 1, 1])]
    for at in range(8):
        a = [1, 2, 3, 4, 5, 6, 7, 8]
        pairs.append((a, [*a[:at], 9, *a[at + 1 :]]))
    for a, b in pairs:
        for page in (1, 2, 3, 4):
            for one, two in ((a, b), (b, a)):
                _prefix(impl, one, two, page)


def long_prefixes(impl: ModuleType) -> None:
    """Two prompts of thousands of tokens."""
    a = [token + 10**6 for token in range(LONG)]
    for same in (65, 300, LONG - 2, LONG):
        for page in (1, 3, 16):
            _prefix(impl, a, [*(int(str(token)) for token in a[:same]), 7, 8], page)


def _prefix(impl: ModuleType, a: list[int], b: list[int], page: int) -> None:
    wanted, given = underlay.common_prefix(a, b, page), (list(a), list(b))
    got = impl.common_prefix(*given, page)
    call = f"common_prefix({said(a)}, {said(b)}, page_size={page})"
    expect(got == wanted, f"{call} should give {wanted}, it gave {got!r}")
    expect(given == (a, b), f"{call} should leave both lists as they are; one of them has changed")


# What a split must pass on, each in a story of its own: so that a failure's words are short.
SMALL: list[list[Move]] = [
    [("insert", "abcd"), ("lock", "abcd"), ("lock", "abcd"), ("match", "ab")],
    [("insert", "abcd"), ("lock", "abcd"), ("lock", "abcd"), ("insert", "abx")],
    [("insert", "abcd"), ("match", "abcd"), ("match", "ab")],
    [("insert", "abcd"), ("match", "abcd"), ("insert", "abx")],
    [("insert", "abcd", 3), ("match", "ab")],
    [("insert", "abcd", 3), ("insert", "abx")],
    [("insert", "abcd"), ("lock", "abcd"), ("match", "abcd"), ("insert", "abcdef", 2)],
    [("insert", "ab"), ("insert", "abc"), ("insert", "abcd"), ("insert", "abcd")],
    [("insert", "ab"), ("remove", "ab"), ("insert", "ac")],
]
# Locks, hits and priorities first, so that every split has something to pass on.
LIFE: list[Move] = [
    ("insert", "abcd"), ("match", "abc"), ("match", "abcd"), ("lock", "abcd"), ("lock", "abcd"),
    ("mark", "abc", {"priority": -2}), ("match", "a"), ("insert", "abx"), ("mark", "abx", {"hits": 4}),
    ("insert", "abcdef", 3), ("match", "abcde"), ("match", "abcdefg."), ("unlock", "abcd"),
    ("insert", "abcdef"), ("insert", "pqrs", 5), ("match", "pq"), ("lock", "pqrs"), ("insert", "pqrt"),
    ("match", "p"), ("insert", "abcdefgh"), ("lock", "abcdef"), ("match", "abcdefghi"), ("insert", "abcdefz"),
    ("remove", "abcdefz"), ("insert", "abcdefy"), ("insert", "z."), ("match", "zz"), ("insert", "zy"),
    ("insert", "abcd."), ("insert", "pqrs"), ("match", "ab"), ("insert", "."), ("insert", ""), ("match", ""),
    ("match", "."), ("match", "x"), ("unlock", "abcd"), ("insert", "abuv", 1), ("match", "abu"),
    ("insert", "mnop"), ("lock", "mnop"), ("insert", "mx"), ("insert", "mno"),
]  # fmt: skip
CHAIN = "abcdefghijklmno"


def lives(impl: ModuleType, name: str) -> None:
    """One life of a tree on pages of 1, 2 and 3; a deep path; and ids of all sizes."""
    for moves in SMALL:
        Twins(impl, [name]).play(spelled_out(moves))
    for page in (1, 2, 3):
        Twins(impl, [name], page).play(spelled_out(LIFE, page))
    chain: list[Move] = [("insert", CHAIN[:end]) for end in range(1, len(CHAIN))]
    Twins(impl, [name]).play(spelled_out([*chain, ("match", CHAIN), ("insert", CHAIN), ("match", CHAIN)]))
    for far in (*FAR, 300 - 44):
        Twins(impl, [name]).play(_far_apart(far))
    Twins(impl, [name]).play(_far_apart(1, first=2**53))
    _long(impl, name)
    for page in (1, 3):
        moves = random_moves(f"lesson 02, {page}", 70, page, KINDS)
        Twins(impl, [name], page).play(moves)


KINDS = ("insert", "insert", "insert", "match", "match", "match", "lock", "lock", "unlock", "remove")


def _far_apart(far: int, first: int = 44) -> list[Move]:
    a, b = first, first + far
    return [
        ("insert", [a, a, 1]), ("match", [b, a]), ("match", [a, b]), ("insert", [b, 1, a]),
        ("insert", [b, 1, b]), ("match", [b, 1, b, 1]), ("match", [a, a]), ("insert", [a, b, 1]),
    ]  # fmt: skip


def _long(impl: ModuleType, name: str) -> None:
    game, prompt = Twins(impl, [name]), list(range(LONG))
    game.slot = 70_000
    game.play([("insert", prompt), ("match", [*prompt[: LONG - 9], 1]), ("insert", [*prompt[:700], 1, 2])])


def two_trees(impl: ModuleType, name: str) -> None:
    """Two trees in turn: nothing of one may be found in the other."""
    games = [Twins(impl, [name]), Twins(impl, [name])]
    for number, move in enumerate([("insert", "abc"), ("match", "abc"), ("insert", "abd"), ("match", "abc")]):
        for game in games if number else games[:1]:
            game.play(spelled_out([move]))


def split_in_all_lives(impl: ModuleType) -> None:
    """Trees whose nodes are locked, hit and important, and are split."""
    lives(impl, "split_node")


def match_in_all_lives(impl: ModuleType) -> None:
    """Look-ups among nodes that are locked, hit and important."""
    lives(impl, "match_prefix")
    two_trees(impl, "match_prefix")


def insert_in_all_lives(impl: ModuleType) -> None:
    """Inserts among nodes that are locked, hit and important."""
    lives(impl, "insert")
    two_trees(impl, "insert")


# ---------------------------------------------------------------------- random


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
        _play(laid(Tree(page), impl, "split_node"), rng, inserts=20, matches=8, what="split_node")

    rounds(rng, play, (1, 2, 3))


def random_matches(impl: ModuleType, rng: Random) -> None:
    """Random look-ups in random trees."""

    def play(rng: Random, page: int) -> None:
        _play(laid(Tree(page), impl, "match_prefix"), rng, inserts=12, matches=20, what="match_prefix")

    rounds(rng, play, (1, 2, 3))


def random_inserts(impl: ModuleType, rng: Random) -> None:
    """Random inserts, one after the other."""

    def play(rng: Random, page: int) -> None:
        _play(laid(Tree(page), impl, "insert"), rng, inserts=25, matches=3, what="insert")

    rounds(rng, play, (1, 2, 3))


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
    "common_prefix": [prefixes_of_all_kinds, long_prefixes, random_prefixes],
    "split_node": [split_in_all_lives, random_splits],
    "match_prefix": [match_in_all_lives, random_matches],
    "insert": [insert_in_all_lives, random_inserts],
}
