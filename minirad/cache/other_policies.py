"""The other eviction policies, beside lru: name, key, and the reason that an event gives (see eviction.py).

Leaves are looked at through their counters only; eviction.py finds this file by name. A key may change only
when its leaf is used: the heap hears of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Leaf = Any  # cache.node.Node
Row = tuple[str, Callable[[Leaf], Any], Callable[[Leaf], str]]


def brrip(lease: int = 600, hit: int = 2, most: int = 4, every: int = 5) -> Row:
    """Bimodal re-reference interval prediction (after Jaleel et al., 2010): the lease that ends first.

    A leaf's lease begins at its last use: `lease` ticks times `hit` for each of its first `most` hits, and
    once more if it came in at an `every`-th tick. Where most newcomers are needed again later than any of
    them could stay under lru, so some stay long enough. The numbers: `python -m minirad bench learn`.
    """

    def ends(node: Leaf) -> int:
        leases = hit * min(node.hits, most) + (node.created % every == 0)
        return int(node.last_access + lease * leases)

    def reason(node: Leaf) -> str:
        kept = f"{node.hits} hits, last used at {node.last_access}"
        return f"unlocked leaf with the lease that ends first (at tick {ends(node)}: {kept})"

    return "brrip", ends, reason


POLICIES: tuple[Row, ...] = (
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
    brrip(),
)
