"""Any tree that has the methods of PrefixCache (a student's, say), with all else that the engine asks for."""

from __future__ import annotations

import inspect
from typing import Any

from minirad.cache.prefix_cache import Prefix, PrefixCache, TreeHooks


def adapted(tree: Any) -> Any:
    """The tree, if all that the engine asks for is ours, else one that passes on to it."""
    if not isinstance(tree, TreeHooks) or not callable(getattr(tree, "find", None)):
        return AnyTree(tree)
    return tree if ours(tree, *CHANGING, *LOOKING) else Narrow(tree)


# A look is used again only where everything that changes the tree counts its changes.
CHANGING = ("match_prefix", "insert", "evict", "reset", "bump_version")
LOOKING = ("find", "peek", "locked", "_walk", "_cost")


def ours(tree: Any, *methods: str) -> bool:
    """These methods are RadixCache's or HiRadixCache's own, not a subclass's."""
    found = (inspect.getattr_static(type(tree), name, None) for name in methods)
    home = (getattr(each, "__module__", "") for each in found)
    return all(module.startswith(("minirad.cache.", "minirad.tiers.")) for module in home)


def known(method: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those of these options that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def tried(tree: Any, key: Any) -> int:
    """How much of a key's match is locked: what locking the match does not take from the evictable."""
    before, match = tree.evictable_size, tree.match_prefix(key)
    tree.inc_lock_ref(match.last_node)
    taken = before - tree.evictable_size
    tree.dec_lock_ref(match.last_node)
    return int(match.length) - int(taken)


class Narrow:
    """A RadixCache of a caller's own making: looked at anew each time, with the options it takes."""

    def __init__(self, tree: Any) -> None:
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tree, name, value)

    def find(self, key: Any, found: Prefix | None = None) -> Prefix:
        """What matches now; what locking costs is not known where the tree looks in its own way."""
        if ours(self._tree, *LOOKING):
            fresh: Prefix = self._tree.find(key)
            return fresh
        return Prefix(int(self._tree.peek(key)))

    def locked(self, key: Any) -> int:
        return tried(self._tree, key)

    def match_prefix(self, key: Any, found: Prefix | None = None, **options: Any) -> Any:
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
        return tried(self._tree, key)

    def namespace_number(self, namespace: Any) -> int:
        number = getattr(self._tree, "namespace_number", super().namespace_number)
        return int(number(namespace))

    def check(self) -> None:
        check = getattr(self._tree, "check", None)
        if check is not None:
            check()
