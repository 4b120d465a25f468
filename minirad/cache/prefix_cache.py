"""What the engine asks of a tree: methods that it must have (PrefixCache), and others (TreeHooks)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from minirad.cache.node import Slots


class PrefixCache(Protocol):
    """The methods that a tree must have: RadixCache, or a student's own."""

    page_size: int

    def peek(self, key: Any) -> int: ...
    def match_prefix(self, key: Any) -> Any: ...
    def insert(self, key: Any, slots: Any, priority: int = 0) -> Any: ...
    def inc_lock_ref(self, node: Any) -> Any: ...
    def dec_lock_ref(self, node: Any) -> Any: ...
    def evict(self, num_tokens: int) -> Any: ...
    def walk(self) -> Iterable[Any]: ...
    def reset(self) -> None: ...
    @property
    def evictable_size(self) -> int: ...
    @property
    def protected_size(self) -> int: ...


class Prefix:
    """What a tree would match of a key: a look that changes nothing.

    length: matched units, whole pages. The rest is the tree's own: its walk along the key, which it uses
    again while its own `changes` is the same.
    """

    __slots__ = ("changes", "key", "length", "tree", "walk")

    def __init__(
        self, length: int, tree: Any = None, key: Any = None, changes: int = -1, walk: Any = None
    ) -> None:
        self.length, self.tree, self.key, self.changes, self.walk = length, tree, key, changes, walk

    @property
    def cost(self) -> int:
        """How many evictable tokens locking it would protect now; 0 where the tree cannot say."""
        return 0 if self.tree is None else int(self.tree._cost(self))


def usable(matched: int, length: int, page_size: int) -> int:
    """Of a prompt's `matched` first units those that a request takes: whole pages, never its last unit."""
    return max(min(matched, length - 1), 0) // page_size * page_size


class TreeHooks:
    """What a tree may do at certain moments; one without a second tier does nothing.

    What the engine asks of any tree beside this (find, locked, check) is in RadixCache, and for a tree that
    has no more than PrefixCache's methods in any_tree.py.

    eviction_policies: names that `eviction_policy` may be set to; none: the tree decides itself.
    """

    eviction_policies: tuple[str, ...] = ()
    eviction_policy = ""

    def __init__(self) -> None:
        self.namespaces: dict[tuple[Hashable, ...], int] = {(None, False): 0, (None, True): 0}

    def namespace_number(self, namespace: Any) -> int:
        """A small number for a namespace (any hashable does not fit into events and files)."""
        return self.namespaces.setdefault(namespace, len(self.namespaces) - 1)

    @property
    def copy_locks(self) -> Sequence[Any]:
        """Nodes that copies between tiers lock now, one entry a lock."""
        return ()

    def before_step(self) -> None:
        """A step begins: the tree may note which copies have ended."""

    def before_launch(self) -> None:
        """A batch is about to be computed, and has to wait for what is being loaded."""

    def seal(self, node: Any) -> None:
        """The request that inserted `node` will not make it longer any more (None: it inserted none)."""

    def init_load_back(self, manager: Any, request: Any, match: Any, spare: int) -> Any:
        """Loads the part of a locked match that lies in another tier; returns the match as it is then."""
        return match

    def wait_for_copies(self) -> bool:
        """Returns when no copy is under way any more; False if there was none."""
        return False


def path_slots(node: Any) -> Slots:
    """All slots from the root down to the end of `node`; works on the nodes of any tree."""
    parts = []
    while node.parent is not None:
        parts.append(np.asarray(node.slots, dtype=np.int64))
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)
