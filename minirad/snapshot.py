"""What an engine or a tree holds, as plain data: what a recording's keyframes hold and a test compares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minirad.schedule.request import Request

if TYPE_CHECKING:
    from minirad.engine import Engine

State = dict[str, Any]


def engine_snapshot(engine: Engine) -> State:
    """Tree, pool, queue and rows."""
    requests = sorted(engine.scheduler.everyone(), key=lambda r: (r.arrival, r.index))
    return {
        "step": engine.steps,
        "kv_tokens": engine.allocator.num_tokens,
        "free": engine.allocator.available,
        "tree": tree_snapshot(engine.cache),
        "waiting": [request.id for request in engine.scheduler.waiting],
        "requests": {request.id: _request(engine, request) for request in requests},
    }


def _request(engine: Engine, request: Request) -> State:
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
