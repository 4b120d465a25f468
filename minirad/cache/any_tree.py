"""Any tree that has the methods of PrefixCache (a student's, say), with all else that the engine asks for."""

from __future__ import annotations

import inspect
from typing import Any

from minirad.cache.prefix_cache import Prefix, PrefixCache, TreeHooks


def adapted(tree: Any) -> Any:
    """The tree, if it has all that the engine asks for, else one that passes on to it."""
    if not isinstance(tree, TreeHooks) or not callable(getattr(tree, "find", None)):
        return AnyTree(tree)
    asked: dict[str, dict[str, Any]] = {
        "match_prefix": {"found": None, "count_hit": True},
        "insert": {"priority": 0, "grow": None},
    }
    whole = all(known(getattr(tree, name), options) == options for name, options in asked.items())
    return tree if whole else Narrow(tree)


def known(method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those of these options that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


class Narrow:
    """A RadixCache of a caller's own making whose methods take fewer options."""

    def __init__(self, tree: Any) -> None:
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tree, name, value)

    def match_prefix(self, key: Any, **options: Any) -> Any:
        return self._tree.match_prefix(key, **known(self._tree.match_prefix, options))

    def insert(self, key: Any, slots: Any, **options: Any) -> Any:
        return self._tree.insert(key, slots, **known(self._tree.insert, options))


class AnyTree(TreeHooks):
    """Passes on what the tree has; the rest is left out, or found out by trying."""

    def __init__(self, tree: PrefixCache) -> None:
        super().__init__()
        self._tree: Any = tree

    def find(self, key: Any, found: Prefix | None = None) -> Prefix:
        """What matches now; the tree cannot say what locking that costs."""
        return Prefix(int(self._tree.peek(key)))

    def match_prefix(self, key: Any, found: Prefix | None = None, **options: Any) -> Any:
        return self._tree.match_prefix(key, **known(self._tree.match_prefix, options))

    def insert(self, key: Any, slots: Any, **options: Any) -> Any:
        return self._tree.insert(key, slots, **known(self._tree.insert, options))

    def locked(self, key: Any) -> int:
        """How much of a key's match is locked: what locking the match does not take from the evictable."""
        tree = self._tree
        before, match = tree.evictable_size, tree.match_prefix(key)
        tree.inc_lock_ref(match.last_node)
        taken = before - tree.evictable_size
        tree.dec_lock_ref(match.last_node)
        return int(match.length) - int(taken)

    def namespace_number(self, namespace: Any) -> int:
        number = getattr(self._tree, "namespace_number", super().namespace_number)
        return int(number(namespace))

    def check(self) -> None:
        check = getattr(self._tree, "check", None)
        if check is not None:
            check()
