"""Two ranks for lesson 12: their trees as plain data, engines that take the same requests, and plants.

A rank's tree is a tree of `Node`s; `plain` makes one of an engine's. `Rank0` answers about a tree, and counts
the messages. A plant changes one thing in an engine's tree behind its back, as a stray write would.
"""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from lessons.grading.spec import expect
from lessons.grading.words import shown
from minirad.cache.radix_cache import RadixCache
from minirad.config import SamplingParams
from minirad.simulate import ModelFreeEngine

FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")
Step = tuple[str, int]
Path = tuple[Step, ...]
MOST_ASKED = 200  # messages: whoever sends more goes round in a circle


@dataclass(eq=False)
class Node:
    """A node as exercise.py describes it."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    namespace: str = ""
    lock_ref: int = 0
    hits: int = 0
    last_access: int = 0
    name: str = ""

    def __repr__(self) -> str:
        return f"node {self.name or self.tokens}"


@dataclass(frozen=True)
class Told:
    """What rank 0 answers."""

    namespace: str
    tokens: list[int]
    slots: list[int]
    lock_ref: int
    hits: int
    last_access: int
    digest: bytes
    children: dict[Step, bytes]


def everyone(root: Node) -> list[Node]:
    """A node, and all below it."""
    return [root, *(each for child in root.children for each in everyone(child))]


def written(root: Node) -> Any:
    """A tree as plain data, with its order and its names: what must stay as it is."""
    own = [getattr(root, name) for name in ("namespace", *FIELDS, "name")]
    return copy.deepcopy(own), [written(child) for child in root.children]


def alike(root: Node) -> Any:
    """Equal for trees that are alike, and only for those."""
    own = (root.namespace, tuple(root.tokens), tuple(root.slots), root.lock_ref, root.hits, root.last_access)
    return own, frozenset(alike(child) for child in root.children)


def described(root: Node) -> str:
    """A tree in one line: what is 0 or empty is left out."""
    own = f"{root.tokens} in slots {root.slots}" if root.tokens else "a root"
    own += f" of {root.namespace!r}" * bool(root.namespace)
    own += "".join(f", {name} {value}" for name in FIELDS[2:] if (value := getattr(root, name)))
    below = "; ".join(map(described, root.children))
    return f"{own}, below it ({below})" if below else own


def shuffled(root: Node, rng: Random) -> Node:
    """The same tree with its children in another order, and other names."""
    found = copy.deepcopy(root)
    for number, each in enumerate(everyone(found)):
        rng.shuffle(each.children)
        each.name = f"n{97 - number}"
    return found


# ---------------------------------------------------------------------- as in another process


class Salted(str):
    """A text whose hash is another one in each process, as Python's texts' are."""

    salt = 0

    def __hash__(self) -> int:
        return _salted_hash(self.salt, str.__str__(self))


class SaltedBytes(bytes):
    """The same for bytes."""

    salt = 0

    def __hash__(self) -> int:
        return _salted_hash(self.salt, bytes(self))


def _salted_hash(salt: int, value: str | bytes) -> int:
    return int.from_bytes(blake2b(repr((salt, value)).encode(), digest_size=7).digest(), "big")


def _has_text(value: Any) -> bool:
    return isinstance(value, str | bytes) or (
        isinstance(value, tuple | frozenset) and any(map(_has_text, value))
    )


@contextmanager
def another_process(impl: Any, salt: int) -> Iterator[type[Salted]]:
    """Texts and digests have other hashes, as far as a student's module sees them. Gives a type of texts.

    Nearly as a process with another PYTHONHASHSEED, and a thousand times cheaper: a digest in which `hash`
    has a part, or the order of a set of digests, comes out as another one.
    """
    module = impl if isinstance(impl, ModuleType) else impl.impl  # cases are given it wrapped (run.Called)
    names, own, digest = vars(module), "hash" in vars(module), module.digest
    text = type("Salted", (Salted,), {"salt": salt})
    kind = type("SaltedBytes", (SaltedBytes,), {"salt": salt})

    def of_tree(root: Node) -> Any:
        found = digest(root)
        return kind(found) if isinstance(found, bytes) else found

    if not own:
        names["hash"] = lambda value: (
            _salted_hash(salt, repr(value)) if _has_text(value) else builtins.hash(value)
        )
    names["digest"] = of_tree
    try:
        yield text
    finally:
        names["digest"] = digest
        if not own:
            del names["hash"]


# ---------------------------------------------------------------------- engines that took the same requests

PROMPTS = (([5, 6, 7, 8, 9], None), ([5, 6, 7, 10, 11], None), ([20, 21, 22], None), ([5, 6, 30], "ada"),
           ([20, 21, 22, 23], None), ([5, 6, 31, 32], "ada"), ([5, 6, 7, 8, 40], None))  # fmt: skip


def rank(prompts: Sequence[tuple[list[int], str | None]] = PROMPTS, steps: int = 9) -> ModelFreeEngine:
    """An engine without a model that took these requests; the last of them still run."""
    engine = ModelFreeEngine(96, max_running=4)
    for tokens, space in prompts:
        engine.add_request(tokens, SamplingParams(max_new_tokens=4, ignore_eos=True), space)
    for _ in range(steps):
        engine.step()
    return engine


def plain(tree: RadixCache) -> Node:
    """An engine's tree as the student is given one."""
    made: dict[int, Node] = {}
    for each in tree.walk():
        own = Node(
            each.key.tokens.tolist(), each.slots.tolist(), [], str(each.namespace[0] or ""), each.lock_ref,
            each.hits, each.last_access, f"n{each.id}",
        )  # fmt: skip
        made[each.id] = own
        if each.parent is not None:
            made[each.parent.id].children.append(own)
    return made[tree.root.id]


def a_leaf(tree: RadixCache) -> Any:
    return max((each for each in tree.walk() if each.parent and not each.children), key=lambda each: each.id)


def an_inner(tree: RadixCache) -> Any:
    nodes = [each for each in tree.walk() if each.parent]
    return min(nodes, key=lambda each: (not each.children, each.id))


def plant_hits(tree: RadixCache) -> None:
    an_inner(tree).hits += 1


def plant_a_lock(tree: RadixCache) -> None:
    a_leaf(tree).lock_ref += 1


def plant_a_slot(tree: RadixCache) -> None:
    slots = a_leaf(tree).slots.copy()
    slots[-1] += 1
    a_leaf(tree).packed = slots.tobytes()


def plant_swapped_slots(tree: RadixCache) -> None:
    longest = max(tree.walk(), key=len)
    longest.packed = longest.slots[::-1].tobytes()


def plant_a_token(tree: RadixCache) -> None:
    leaf = max((each for each in tree.walk() if not each.children), key=lambda each: (each.units, each.id))
    tokens = np.frombuffer(leaf.edge, dtype=np.int32).copy()
    tokens[-1] ^= 1
    leaf.edge = tokens.tobytes()


def plant_an_access(tree: RadixCache) -> None:
    an_inner(tree).last_access -= 1


def plant_a_missing_node(tree: RadixCache) -> None:
    leaf = a_leaf(tree)
    del leaf.parent.children[leaf.first]


PLANTS: dict[str, Callable[[RadixCache], None]] = {
    "hits": plant_hits, "lock_ref": plant_a_lock, "a slot": plant_a_slot,
    "slots that changed places": plant_swapped_slots, "a token": plant_a_token,
    "last_access": plant_an_access, "a node that is missing": plant_a_missing_node,
}  # fmt: skip


# ---------------------------------------------------------------------- rank 0


class Stamps:
    """A right digest of trees: the same bytes for those that are alike, others for all others."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def __call__(self, root: Node) -> bytes:
        return (self.known.setdefault(alike(root), len(self.known)) * 0x9E3779B97F4A7C15 % 2**128).to_bytes(
            16, "big"
        )


class Rank0:
    """Answers about its tree, and counts the messages."""

    def __init__(self, root: Node, digest: Stamps, rng: Random | None = None) -> None:
        self.root, self.digest, self.rng = root, digest, rng or Random(0)
        self.asked: list[Path] = []

    def __call__(self, path: Path) -> Told:
        expect(isinstance(path, tuple), f"ask({shown(path)}): a path is a tuple of steps")
        self.asked.append(path)
        expect(
            len(self.asked) < MOST_ASKED, f"rank 0 was sent {MOST_ASKED} messages: when does it end?", hint=2
        )
        here = self.root
        for step in path:
            below = {(child.namespace, child.tokens[0]): child for child in here.children}
            expect(step in below, f"ask({shown(path)}): rank 0 has no node there", hint=2)
            here = below[step]
        told = [((child.namespace, child.tokens[0]), self.digest(child)) for child in here.children]
        self.rng.shuffle(told)
        return Told(
            here.namespace, list(here.tokens), list(here.slots), here.lock_ref, here.hits, here.last_access,
            self.digest(here), dict(told),
        )  # fmt: skip


def first_difference(mine: Node, theirs: Node, path: Path = ()) -> tuple[Path, str] | None:
    """By looking at both trees, which a rank cannot."""
    for name in FIELDS:
        if getattr(mine, name) != getattr(theirs, name):
            return path, name
    here, there = ({(c.namespace, c.tokens[0]): c for c in each.children} for each in (mine, theirs))
    for step in sorted({*here, *there}):
        if step not in there or step not in here:
            return (*path, step), "only here" if step in here else "only there"
        found = first_difference(here[step], there[step], (*path, step))
        if found is not None:
            return found
    return None
