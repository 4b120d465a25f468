"""All that must be equal on every rank, as 16 bytes; and the first difference, in words.

It is computed anew from the objects themselves at every step: what was changed behind the engine's back is
found, too. Python's own `hash` has no part in it: it differs from process to process.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from minirad.schedule.scheduler import Batch

SIZE = 16
MOST_PAGES = 1 << 16  # free pages that are looked at one by one: those that are handed out next

NODE = (
    "parent", "namespace", "lock_ref", "hits", "last_access", "created", "priority", "first child",
    "tokens", "slots", "host slots", "host locks", "resident children", "copy under way",
)  # fmt: skip
REQUEST = (
    "status", "row", "node", "leaf", "protected tokens", "tokens with KV", "tokens ahead", "cached tokens",
    "attempts", "times passed", "has waited", "arrival", "index", "samples to branch", "priority", "seed",
    "namespace", "tokens", "slots",
)  # fmt: skip


def of_text(text: str) -> bytes:
    return blake2b(text.encode(errors="replace"), digest_size=SIZE).digest()


def of_batch(batch: Batch) -> bytes:
    """Which requests, and which of their tokens, are about to be computed."""
    rows = [(each.id, each.row, each.kv_len, each.length, each.computed) for each in batch.requests]
    return of_text(repr((rows, batch.starts, batch.prefills)))


def of_engine(engine: Any) -> bytes:
    """Of tree, allocators, rows, queue and running requests."""
    whole = blake2b(digest_size=SIZE)
    whole.update(repr(_books(engine)).encode())
    for node in engine.cache.walk():
        for value in _node(engine, node):
            whole.update(value if isinstance(value, bytes) else b"%d," % value)
    for request in engine.scheduler.requests():
        for value in _request(engine, request):
            whole.update(value if isinstance(value, bytes) else f"{value},".encode())
    return whole.digest()


def parts_of(engine: Any) -> dict[str, Any]:
    """The same by names: "books", "nodes" by number and "requests" by id."""
    return {
        "books": _books(engine),
        "nodes": {node.id: dict(zip(NODE, _node(engine, node), strict=True)) for node in engine.cache.walk()},
        "requests": {
            request.id: dict(zip(REQUEST, _request(engine, request), strict=True))
            for request in engine.scheduler.requests()
        },
    }


def _books(engine: Any) -> dict[str, Any]:
    tree, scheduler = engine.cache, engine.scheduler
    free, rest = _free(engine.allocator)
    books = {
        "steps": engine.steps,
        "requests so far": engine._arrivals,
        "pins": {number: node.id for number, node in engine._pins.items()},
        "next pin": engine._next_pin,
        "free pages": free,
        "sum of the free pages below": rest,
        "free rows": list(engine.rows._free),
        "evictable tokens": tree.evictable_size,
        "protected tokens": tree.protected_size,
        "clock of the tree": tree._tick,
        "version of the weights": tree.version,
        "eviction policy": tree.eviction_policy,
        "evicted tokens": engine.cache_manager.evicted_tokens,
        "waiting": [request.id for request in scheduler.waiting],
        "running": [request.id for request in scheduler.running],
        "between chunks": scheduler.chunking.id if scheduler.chunking else None,
        "new token ratio": scheduler.future.ratio,
        "in flight": getattr(engine.overlap, "in_flight", None) is not None,
    }
    host = getattr(tree, "host_allocator", None)
    if host is not None:
        books["free host pages"], books["sum of the free host pages below"] = _free(host)
        books["copies under way"] = [
            (type(each).__name__, [node.id for node in each.nodes]) for each in tree._under_way
        ]
    return books


def _free(allocator: Any) -> tuple[list[int], int]:
    """The pages that are handed out next, one by one; of a large pool's others the sum."""
    stack = allocator._stack[: allocator._top]
    return stack[-MOST_PAGES:].tolist(), int(stack[:-MOST_PAGES].sum())


def _node(engine: Any, node: Any) -> tuple[Any, ...]:
    """Numbers and bytes, as NODE names them."""
    parent = -1 if node.parent is None else node.parent.id
    first = next(iter(node.children.values()), None)
    return (
        parent, engine.cache.namespaces.get(node.namespace, -1), node.lock_ref, node.hits, node.last_access,
        node.created, node.priority, -1 if first is None else first.id, node.edge, node.packed,
        getattr(node, "host", b""), getattr(node, "host_locks", 0), getattr(node, "resident", 0),
        int(getattr(node, "copying", None) is not None),
    )  # fmt: skip


def _request(engine: Any, request: Any) -> tuple[Any, ...]:
    """Texts, numbers and bytes, as REQUEST names them."""
    slots = engine.rows.rows[request.row, : request.kv_len] if request.row >= 0 else np.empty(0, np.int64)
    return (
        request.status, request.row, request.node.id if request.node is not None else -1,
        request.leaf.id if request.leaf is not None else -1, request.protected_len, request.kv_len,
        request.ahead, request.cached_tokens, request.attempts, request.passes, request.has_waited,
        request.arrival, request.index, request.unbranched, request.priority, request.seed,
        engine.cache.namespaces.get((request.extra_key, request.is_bigram), -1),
        request.tokens.astype(np.int32).tobytes(), slots.tobytes(),
    )  # fmt: skip


# ------------------------------------------------------------------ in words


def difference(texts: Any, mine: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """The first thing in which a rank is not as rank 0, in one sentence; "" if there is none.

    Nodes first: what is wrong there shows in the books as well. texts: what each token says.
    """
    for number in sorted({*mine["nodes"], *other["nodes"]}):
        here, there = mine["nodes"].get(number), other["nodes"].get(number)
        if here != there:
            name = "the root" if number == 0 else f"n{number}{_quoted(texts, here or there)}"
            if here is None or there is None:
                have, lack = (rank, 0) if here is None else (0, rank)
                return f"rank {have} has a node {name}, rank {lack} has none"
            return _first(NODE, here, there, rank, f" at {name}")
    for name in sorted({*mine["requests"], *other["requests"]}):
        here, there = mine["requests"].get(name), other["requests"].get(name)
        if here is None or there is None:
            have, lack = (rank, 0) if here is None else (0, rank)
            return f"rank {have} has a request {name}, rank {lack} has none"
        if here != there:
            return _first(REQUEST, here, there, rank, f" in {name}")
    if mine["books"] != other["books"]:
        return _first(tuple(mine["books"]), mine["books"], other["books"], rank, "")
    return ""


def _first(names: tuple[str, ...], mine: Any, other: Any, rank: int, where: str) -> str:
    name = next(name for name in names if mine[name] != other.get(name))
    here, there = mine[name], other.get(name)
    if isinstance(here, bytes) and isinstance(there, bytes):
        here, there = _numbers(name, here), _numbers(name, there)
    if isinstance(here, list) and isinstance(there, list):
        return f"rank {rank} has {name} {_around(there, here)}{where}, rank 0 has {_around(here, there)}"
    return f"rank {rank} has {name} {there}{where}, rank 0 has {here}"


def _numbers(name: str, data: bytes) -> list[int]:
    kind = np.int64 if len(data) % 8 == 0 and "slots" in name else np.int32
    numbers: list[int] = np.frombuffer(data, dtype=kind).tolist()
    return numbers


def _around(numbers: list[Any], other: list[Any], most: int = 6) -> str:
    """A list around the first place where it is not as the other."""
    at = next((at for at, pair in enumerate(zip(numbers, other, strict=False)) if pair[0] != pair[1]), None)
    first = max((min(len(numbers), len(other)) if at is None else at) - 1, 0)
    part = ", ".join(map(str, numbers[first : first + most]))
    return f"[{'... ' if first else ''}{part}{' ...' if first + most < len(numbers) else ''}]"


def _quoted(texts: Any, node: dict[str, Any]) -> str:
    """What a node's first tokens say, or their numbers."""
    tokens = _numbers("tokens", node["tokens"])[:8]
    try:
        said = texts.whole(tokens) if texts is not None else ""
    except Exception:  # a tokenizer that cannot: the difference is what is to be told
        said = ""
    return f" ({said!r})" if said else f" (tokens {', '.join(map(str, tokens))})"
