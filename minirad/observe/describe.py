"""A radix tree as plain data: what `RadixCache.snapshot()` returns."""

from __future__ import annotations

from typing import Any

import numpy as np

from minirad.cache.node import Node
from minirad.cache.radix_cache import RadixCache


def radix_cache(tree: RadixCache) -> dict[str, Any]:
    """The whole tree, nodes by id, the root left out."""
    nodes = sorted((node for node in tree.walk() if node is not tree.root), key=lambda node: node.id)
    return {
        "page_size": tree.page_size,
        "eviction_policy": tree.eviction_policy,
        "tick": tree._tick,
        "nodes": [_node(tree, node) for node in nodes],
    }


def _node(tree: RadixCache, node: Node) -> dict[str, Any]:
    assert node.parent is not None
    return {
        "id": node.id,
        "parent": node.parent.id,
        "tokens": np.frombuffer(node.edge, dtype=np.int32).tolist(),
        "slots": node.slots.tolist(),
        "namespace": tree.namespace_number(node.namespace),
        "lock_ref": node.lock_ref,
        "last_access": node.last_access,
        "created": node.created,
        "hits": node.hits,
        "priority": node.priority,
    }
