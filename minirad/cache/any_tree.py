"""Any tree that has the methods of PrefixCache (a student's, say), with all else that the engine asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from minirad.cache.prefix_cache import Prefix, PrefixCache, TreeHooks

# A look is used again only where everything that changes the tree counts its changes.
CHANGING = ("match_prefix", "insert", "evict", "reset", "bump_version")
LOOKING = ("find", "peek", "locked", "_walk", "_cost")


def adapted(tree: Any) -> Any:
    """The tree, if all that the engine asks for is ours, else one that passes on to it."""
    return tree if ours(tree, *CHANGING, *LOOKING) else AnyTree(tree)


def ours(tree: Any, *methods: str) -> bool:
    """These methods are RadixCache's or HiRadixCache's own, not a subclass's or a student's."""
    found = (inspect.getattr_static(type(tree), name, None) for name in methods)
    home = (getattr(each, "__module__", "") for each in found)
    return all(module.startswith(("minirad.cache.", "minirad.tiers.")) for module in home)


class AnyTree:
    """Passes on what the tree has, with the options that it takes; the rest is left out, or found by trying.

    It is looked at anew each time: nothing says whether it has changed.
    """

    def __init__(self, tree: PrefixCache) -> None:
        self._tree: Any = tree
        self._hooks = tree if isinstance(tree, TreeHooks) else TreeHooks()
        self._looks = ours(tree, *LOOKING)
        self._match_options = _options(self._tree.match_prefix, "count_hit")
        self._insert_options = _options(self._tree.insert, "priority", "grow")
        self.check: Callable[[], Any] = getattr(tree, "check", None) or (lambda: None)
        own: Callable[[Any], Any] | None = getattr(tree, "namespace_number", None)
        self.namespace_number = self._hooks.namespace_number if own is None else own

    def __getattr__(self, name: str) -> Any:  # what TreeHooks has
        return getattr(self._hooks, name)

    def find(self, key: Any, found: Prefix | None = None) -> Prefix:
        """What matches now; a tree that looks in its own way cannot say what locking that costs."""
        if self._looks:
            fresh: Prefix = self._tree.find(key)
            return fresh
        return Prefix(int(self._tree.peek(key)))

    def match_prefix(self, key: Any, *, found: Prefix | None = None, count_hit: bool = True) -> Any:
        options = {"count_hit": count_hit}
        return self._tree.match_prefix(key, **{name: options[name] for name in self._match_options})

    def insert(self, key: Any, slots: Any, *, priority: int = 0, grow: Any = None) -> Any:
        options = {"priority": priority, "grow": grow}
        return self._tree.insert(key, slots, **{name: options[name] for name in self._insert_options})

    def locked(self, key: Any) -> int:
        """How much of a key's match is locked: what locking the match does not take from the evictable."""
        tree = self._tree
        if self._looks:
            return int(tree.locked(key))
        before, match = tree.evictable_size, tree.match_prefix(key)
        tree.inc_lock_ref(match.last_node)
        taken = before - tree.evictable_size
        tree.dec_lock_ref(match.last_node)
        return int(match.length) - int(taken)


def _options(method: Any, *names: str) -> tuple[str, ...]:
    """Those of these options that a method takes."""
    parameters = inspect.signature(method).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return names if takes_all else tuple(name for name in names if name in parameters)
