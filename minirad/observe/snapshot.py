"""What an engine or a tree holds, as plain data: what a recording's keyframes hold and a test compares.

At the end, questions to such data that every picture asks: where a node's KV lies, which path leads to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

State = dict[str, Any]
# Where a node's KV is: on the device alone, on its way to the host, in both, on its way back, on the host.
TIERS = ("device", "copying", "both", "loading", "host")


def engine_snapshot(engine: Any) -> State:
    """Tree, pool, queue and rows of an Engine (any object that has these: nothing of it is imported here)."""
    requests = sorted(engine.scheduler.requests(), key=lambda r: (r.arrival, r.index))
    return {
        "step": engine.steps,
        "kv_tokens": engine.allocator.num_tokens,
        "free": engine.allocator.available,
        "tree": tree_snapshot(engine.cache),
        "waiting": [request.id for request in engine.scheduler.waiting],
        "requests": {request.id: _request(engine, request) for request in requests},
    }


def _request(engine: Any, request: Any) -> State:
    holds = request.row >= 0
    return {
        "row": request.row,
        "node": request.node.id if holds else None,
        "slots": engine.rows.rows[request.row, : request.kv_len].tolist() if holds else [],
        "protected": request.protected_len,
        "prompt_tokens": len(request.prompt),
        "length": request.length,
        "cached": request.cached_tokens,
        "attempts": request.attempts,
        "priority": request.priority,
    }


def tree_snapshot(cache: Any) -> State:
    """Any tree as plain data, in the shape of RadixCache.snapshot()."""
    if hasattr(cache, "snapshot"):
        own: State = cache.snapshot()
        return own
    nodes = nodes_by_id(cache)
    return {
        "page_size": cache.page_size,
        "eviction_policy": getattr(cache, "eviction_policy", "its own"),
        "tick": max((node["last_access"] for node in nodes.values()), default=0),
        "nodes": [nodes[number] for number in sorted(nodes)],
    }


def bare_snapshot(cache: Any) -> State:
    """A cache on its own in the shape of Engine.snapshot()."""
    return {
        "step": 0,
        "kv_tokens": 0,
        "free": 0,
        "tree": tree_snapshot(cache),
        "waiting": [],
        "requests": {},
    }


def nodes_by_id(cache: Any) -> dict[int, State]:
    """Any tree's nodes but the root, as plain data."""
    nodes = {}
    for node in cache.walk():
        if node.parent is None:
            continue
        tokens = node.key.tokens if hasattr(node.key, "tokens") else node.key
        nodes[node.id] = {
            "id": node.id,
            "parent": node.parent.id,
            "tokens": np.asarray(tokens).reshape(-1).tolist(),
            "slots": np.asarray(node.slots).tolist(),
            "namespace": int(getattr(node, "namespace_number", 0)),
            "lock_ref": int(node.lock_ref),
            "last_access": int(getattr(node, "last_access", 0)),
            "created": int(getattr(node, "created", 0)),
            "hits": int(getattr(node, "hits", 0)),
            "priority": int(getattr(node, "priority", 0)),
        }
    return nodes


# ---------------------------------------------------------------------- questions to a state


def path_of(nodes: Mapping[int, State], node: int | None) -> list[int]:
    """Ids from below the root down to a node; none for the root and for a node that is not there."""
    path: list[int] = []
    while node and node in nodes and len(path) <= len(nodes):  # in a file it may be its own ancestor
        path.append(node)
        node = nodes[node]["parent"]
    return path[::-1]


def units(node: Mapping[str, Any]) -> int:
    """How many slots a node's KV takes, in whichever tier it lies; in a stream's tree what was told."""
    told = node.get("units")
    return int(told) if told is not None else max(len(node["slots"]), len(node.get("host", ())))


def is_bigram(node: Mapping[str, Any]) -> bool:
    """Its tokens are pairs, flattened: two ids a unit."""
    return len(node["tokens"]) == 2 * units(node) > 0


def key_tokens(node: Mapping[str, Any]) -> list[int]:
    """One token id per unit of a node: of bigram keys the first of each pair."""
    return list(node["tokens"][::2] if is_bigram(node) else node["tokens"])


def text_tokens(node: Mapping[str, Any]) -> list[int]:
    """The tokens that a node's key is about: of bigram keys also the second one of the last pair."""
    return [*key_tokens(node), node["tokens"][-1]] if is_bigram(node) else list(node["tokens"])


def tier_of(node: Mapping[str, Any]) -> str:
    """Where a node's KV lies, one of TIERS; "" in a tree without a host tier."""
    if "host" not in node:
        return ""
    if node["copying"]:
        return "copying"
    if node["loading"]:
        return "loading"
    if not node["slots"]:
        return "host"
    return "both" if node["host"] else "device"


def has_tiers(state: State) -> bool:
    """There is a second tier in host memory."""
    return "host_tokens" in state["tree"]


def is_fleet(state: State) -> bool:
    """Put together from KV events of other servers: nodes have no slots, and say which ranks hold them."""
    return "ranks" in state["tree"]


def rest_of(node: Mapping[str, Any]) -> str:
    """The status of a node to which nothing happened and that nobody runs on.

    "cached"; "host": it lies in host memory alone. In a stream's tree "hole" (no rank holds it, so nothing
    below can be hit) and "unseen" (something was told below it, but never what it is).
    """
    if "held" in node:
        return "unseen" if not node["seen"] else "cached" if node["held"] else "hole"
    return "host" if tier_of(node) == "host" else "cached"


def host_used(tree: State) -> int:
    """Slots of host memory in use, those of copies under way among them; 0 without a host tier."""
    return int(tree["host_tokens"]) - int(tree["host_free"]) if "host_tokens" in tree else 0


def evictable_leaves(nodes: Mapping[int, State], host: bool = False) -> list[State]:
    """What a policy chooses from: unlocked nodes on the device that have no child there.

    host: those of the host tier instead, which are leaves that lie there alone.
    """
    parents = {node["parent"] for node in nodes.values() if host or node["slots"]}
    if host:
        return [n for n in nodes.values() if n["id"] not in parents and tier_of(n) == "host"]
    return [n for n in nodes.values() if n["id"] not in parents and n["slots"] and not n["lock_ref"]]
