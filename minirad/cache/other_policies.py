"""The other eviction policies, beside lru: name, key, and the reason that an event gives (see eviction.py).

Leaves are looked at through their counters only; eviction.py finds this file by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Leaf = Any  # cache.node.Node

POLICIES: tuple[tuple[str, Callable[[Leaf], Any], Callable[[Leaf], str]], ...] = (
    (  # least frequently used: fewest hits, then least recently used
        "lfu",
        lambda node: (node.hits, node.last_access),
        lambda node: f"unlocked leaf with the fewest hits ({node.hits}, last used at {node.last_access})",
    ),
    (  # first in, first out: the earliest created, however often it was used
        "fifo",
        lambda node: node.created,
        lambda node: f"first unlocked leaf to come in (created at tick {node.created})",
    ),
    (  # most recently used first: right for a scan that never comes back, wrong for chats
        "mru",
        lambda node: -node.last_access,
        lambda node: f"most recently used unlocked leaf (last used at tick {node.last_access})",
    ),
    (  # first in, last out: the latest created goes first
        "filo",
        lambda node: -node.created,
        lambda node: f"last unlocked leaf to come in (created at tick {node.created})",
    ),
    (  # lowest request priority first, then least recently used
        "priority",
        lambda node: (node.priority, node.last_access),
        lambda node: (
            f"unlocked leaf of lowest priority ({node.priority}, last used at tick {node.last_access})"
        ),
    ),
    (  # segmented LRU: leaves hit fewer than twice go before the proven ones
        "slru",
        lambda node: (node.hits >= 2, node.last_access),
        lambda node: (
            f"oldest unlocked leaf {'proven' if node.hits >= 2 else 'on probation'} "
            f"({node.hits} hits, last used at {node.last_access})"
        ),
    ),
)
