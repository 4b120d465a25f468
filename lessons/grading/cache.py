"""A student's functions as a cache that the engine takes: `Engine(config, cache=student_cache(path))`.

    python -m viz.live --cache lessons/02_radix_tree/exercise.py

The functions of one file or several are laid over those of underlay.py; stubs are left out, so that a
match without an evict is enough to start. After every call the tree is checked: the first invariant
that does not hold ends the run with an InvariantError that names the call and the node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lessons.grading import underlay
from lessons.grading.spec import students_file
from lessons.grading.tree import PARTS, POLICY_KEYS, Node, Tree, path_up
from lessons.grading.words import said
from minirad.cache.radix_cache import EvictResult, InsertResult, MatchResult, RadixKey
from minirad.errors import InvariantError, require


class StudentCache:
    """RadixCache's interface over a `Tree`; silent: the recorder finds out what happened by looking.

    parts: which of `PARTS` are the student's; policy: a key function for the eviction order, or the
    name of one of the engine's.
    """

    def __init__(
        self,
        page_size: int = 1,
        eviction_policy: str = "lru",
        parts: dict[str, Callable[..., Any]] | None = None,
        keys: dict[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        known = {**POLICY_KEYS, **(keys or {})}
        if eviction_policy not in known:
            raise ValueError(f"unknown eviction policy {eviction_policy!r}; known: {', '.join(known)}")
        self.page_size, self.eviction_policy = page_size, eviction_policy
        self.parts = dict(parts or {})
        self.broken = ""  # the first invariant that did not hold
        self._namespaces: dict[Hashable, int] = {(None, False): 0}
        self._bigrams: dict[Any, int] = {}
        self.tree = Tree(page_size, self.parts, known[eviction_policy])
        self.tree.name = lambda node: f"n{node.id}"  # as in the pictures

    # -------------------------------------------------------------- what the engine asks

    def peek(self, key: RadixKey) -> int:
        return self.tree.peek(self._units(key))

    def match_prefix(self, key: RadixKey) -> MatchResult:
        units = self._units(key)
        expected = self.tree.peek(units)
        slots, node = self._guarded("match_prefix", lambda: self.tree.match(units))
        self._mark(node, key)
        found = f"match_prefix found {len(slots)} tokens, but {expected} of this prompt are in the tree"
        self._require(len(slots) == expected, found)
        path = [int(slot) for step in reversed(path_up(node)) for slot in step.slots]
        self._require(path == slots, "the slots of match_prefix are not those on the path to its node")
        return MatchResult(np.array(slots, dtype=np.int64), len(slots), node)

    def insert(self, key: RadixKey, slots: Any, priority: int = 0) -> InsertResult:
        units, numbers = self._units(key), [int(slot) for slot in slots]
        expected = self.tree.peek(units)
        done, node = self._guarded("insert", lambda: self.tree.insert(units, numbers, priority))
        self._mark(node, key)
        said = f"insert says that {done} tokens were there before; it was {expected}"
        self._require(done == expected, said)
        whole = len(units) // self.page_size * self.page_size
        length = sum(len(step.tokens) for step in path_up(node))
        ends = f"insert returned a node whose path holds {length} tokens instead of {whole}"
        self._require(length == whole, ends)
        return InsertResult(done, node)

    def inc_lock_ref(self, node: Any) -> int:
        return int(self._guarded("inc_lock_ref", lambda: self.tree.lock(node)))

    def dec_lock_ref(self, node: Any) -> int:
        return int(self._guarded("dec_lock_ref", lambda: self.tree.unlock(node)))

    def evict(self, num_tokens: int) -> EvictResult:
        locked = [node for node in self.tree.nodes() if node.lock_ref]
        slots = self._guarded("evict", lambda: self.tree.evict(num_tokens))
        gone = [node.id for node in locked if node.parent is None]
        self._require(not gone, f"evict removed n{gone[:1]}, which a running request needs")
        return EvictResult(len(slots), np.array(slots, dtype=np.int64))

    def walk(self) -> Iterator[Node]:
        """All nodes, as far as the tree is in order: a broken one must be drawn, too."""
        try:
            yield from self.tree.nodes()
        except InvariantError as error:
            self.broken = self.broken or str(error)

    def reset(self) -> None:
        self.tree.plant()

    def check(self) -> None:
        self.tree.check()

    @property
    def evictable_size(self) -> int:
        return self.tree.evictable_size

    @property
    def protected_size(self) -> int:
        return self.tree.protected_size

    def namespace_number(self, namespace: Hashable) -> int:
        return self._namespaces.setdefault(namespace, len(self._namespaces))

    # -------------------------------------------------------------- in between

    def _units(self, key: RadixKey) -> list[int]:
        """Tokens as numbers that differ between namespaces; so a student need not know of these."""
        space = self.namespace_number(key.namespace) << 32
        if not key.is_bigram:
            return [space + int(token) for token in key.tokens]
        pairs = [tuple(pair) for pair in key.tokens.tolist()]
        return [space + self._bigrams.setdefault(pair, len(self._bigrams)) for pair in pairs]

    def _mark(self, node: Any, key: RadixKey) -> None:
        space = self.namespace_number(key.namespace)
        if space:
            for step in path_up(node):
                step.namespace_number = space

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
        """Runs one call and then checks the tree. Words for what is wrong, whoever finds it."""
        whose = "your" if name in self.parts else "the reference's"
        try:
            result = call()
            self.tree.check()
        except InvariantError as error:
            self.broken = self.broken or f"after {whose} {name}: {error}"
            raise InvariantError(self.broken) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.broken = self.broken or f"{whose} {name} raised {said(error)}"
            raise InvariantError(self.broken) from error
        return result

    def _require(self, condition: bool, words: str) -> None:
        if not condition:
            self.broken = self.broken or words
        require(condition, words)


def student_cache(
    path: str | Path | Sequence[str | Path], page_size: int = 1, eviction_policy: str = "lru"
) -> StudentCache:
    """A cache that runs the functions of one exercise file, or of several laid over each other.

    ValueError for a file that cannot be loaded, or in which everything is still to do.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    parts: dict[str, Callable[..., Any]] = {}
    keys: dict[str, Callable[[Any], Any]] = {}
    for file in map(Path, paths):
        for name, function in _functions(file).items():
            if name in PARTS:
                parts[name] = function
            elif name.endswith("_key"):
                keys[name.removesuffix("_key")] = function
    if ("offer" in parts) != ("evict" in parts):  # one heap, one author
        parts = {name: part for name, part in parts.items() if name not in ("offer", "evict")}
    if not parts and not keys:
        names = ", ".join(str(file) for file in paths)
        raise ValueError(f"{names}: nothing is written yet that the engine could run ({', '.join(PARTS)})")
    return StudentCache(page_size, eviction_policy, parts, keys)


def _functions(file: Path) -> dict[str, Callable[..., Any]]:
    """The functions of a file that are not stubs any more; these find the underlay's where stubs were."""
    own, todo = students_file(file)
    own.update({name: getattr(underlay, name) for name in todo.intersection(PARTS)})
    return {name: value for name, value in own.items() if callable(value) and name not in todo}
