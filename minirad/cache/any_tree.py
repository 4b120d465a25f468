"""Any tree that has the methods of PrefixCache (a student's, say), with all else that the engine asks for."""

from __future__ import annotations

import inspect
from typing import Any

from minirad.cache.prefix_cache import Prefix, PrefixCache, TreeHooks


class AnyTree(TreeHooks):
    """Passes on what the tree has; the rest is left out, or found out by trying."""

    def __init__(self, tree: PrefixCache) -> None:
        super().__init__()
        self._tree: Any = tree
        self._options = {
            name: inspect.signature(getattr(tree, name)).parameters for name in ("match_prefix", "insert")
        }

    def find(self, key: Any, found: Prefix | None = None) -> Prefix:
        """What matches now; the tree cannot say what locking that costs."""
        return Prefix(int(self._tree.peek(key)))

    def match_prefix(self, key: Any, **options: Any) -> Any:
        return self._tree.match_prefix(key, **self._known("match_prefix", options))

    def insert(self, key: Any, slots: Any, **options: Any) -> Any:
        return self._tree.insert(key, slots, **self._known("insert", options))

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

    def _known(self, method: str, options: dict[str, Any]) -> dict[str, Any]:
        known = self._options[method]
        takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
        return {name: value for name, value in options.items() if takes_all or name in known}
