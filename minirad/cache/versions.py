"""The model's weights change: what the old ones computed matches nothing any more, and is evicted first.

Found by name (rooms.py) from RadixCache.bump_version: only `Engine.update_weights` needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minirad.cache.eviction import EvictionPolicy
from minirad.cache.node import Namespace, Node
from minirad.observe import events as ev

if TYPE_CHECKING:
    from minirad.cache.radix_cache import RadixCache


def bump(tree: RadixCache) -> None:
    """Moves all nodes into namespaces that no key can name.

    They stay until they are evicted (rows may still point at them), but go before all others.
    """
    tree.version += 1
    tree._changes += 1
    moved: dict[Namespace, Namespace] = {}
    for node in tree.walk():
        if node is not tree.root and not node.outdated:
            node.namespace = moved.setdefault(node.namespace, (*node.namespace, tree.version))
    children = list(tree.root.children.values())
    for child in children:
        child.first = (child.namespace, child.first[1])
    tree.root.children = {child.first: child for child in children}
    tree.change_policy(tree.eviction_policy)
    numbers = {tree.namespace_number(old): tree.namespace_number(new) for old, new in moved.items()}
    if tree.bus.wants(ev.VersionBumped):
        tree.bus.emit(ev.VersionBumped(tree.version, tuple(numbers), tuple(numbers.values())))


def outdated_first(policy: EvictionPolicy) -> EvictionPolicy:
    """Any policy, but that leaves of old weights, which nothing can match, go before all others.

    Without it they stay for ever under any policy that keeps what was once worth keeping: well-used ones
    (lfu, slru), those of high priority, the oldest (mru, filo).
    """

    def reason(node: Node) -> str:
        return "computed by old weights, nothing can match it" if node.outdated else policy.reason(node)

    return EvictionPolicy(policy.name, lambda node: (not node.outdated, policy.key(node)), reason)
