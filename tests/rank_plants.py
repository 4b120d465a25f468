"""Differences that tests plant on another rank, behind every event and past every book.

Each changes one thing in an engine that runs, as a stray write would, and says what a sentence about it must
name. They are put in just before the digest of a step is taken (`before_digest`), or between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minirad.cache.node import RadixKey
from minirad.ranks import digest

Plant = Callable[[Any], "tuple[str, ...]"]
PLANTS: dict[str, Plant] = {}
_of_engine = digest.of_engine
_said: dict[str, tuple[str, ...]] = {}


def plant(make: Plant) -> Plant:
    PLANTS[make.__name__] = make
    return make


def now(engine: Any, name: str) -> tuple[str, ...]:
    """Plants it between two steps."""
    return PLANTS[name](engine)


def before_digest(engine: Any, name: str) -> None:
    """Plants it at the end of the next step, when the batch is committed."""

    def planted(which: Any) -> bytes:
        if which is engine:
            digest.of_engine = _of_engine
            _said[name] = PLANTS[name](engine)
        return _of_engine(which)

    digest.of_engine = planted


def words(engine: Any, name: str) -> tuple[str, ...]:
    """What the sentence must name, of a difference that `before_digest` planted."""
    return _said.pop(name)


def _leaf(engine: Any) -> Any:
    """The newest leaf that has KV on the device."""
    return max(
        (n for n in engine.cache.walk() if n.parent and n.packed and not n.children), key=lambda n: n.id
    )


def _inner(engine: Any) -> Any:
    return min((n for n in engine.cache.walk() if n.parent is not None and n.children), key=lambda n: n.id)


def _copied(engine: Any) -> Any:
    return min((n for n in engine.cache.walk() if getattr(n, "host", b"")), key=lambda n: n.id)


def _decoding(engine: Any) -> Any:
    return engine.scheduler.running[-1]


# ---------------------------------------------------------------------- nodes


@plant
def lock_ref(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    node.lock_ref += 1
    return f"n{node.id}", f"lock_ref {node.lock_ref}", f"rank 0 has {node.lock_ref - 1}"


@plant
def hits(engine: Any) -> tuple[str, ...]:
    node = _inner(engine)
    node.hits += 1
    return f"n{node.id}", f"hits {node.hits}"


@plant
def a_slot(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    slots = node.slots.copy()
    slots[-1] += 1
    node.packed = slots.tobytes()
    return f"n{node.id}", "slots", str(slots[-1])


@plant
def two_slots_swapped(engine: Any) -> tuple[str, ...]:
    node = max((n for n in engine.cache.walk() if len(n) > 1), key=lambda n: n.id)
    node.packed = node.slots[::-1].tobytes()
    return f"n{node.id}", "slots"


@plant
def a_token_of_a_key(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    tokens = np.frombuffer(node.edge, dtype=np.int32).copy()
    tokens[-1] ^= 1
    node.edge = tokens.tobytes()
    return f"n{node.id}", "tokens", str(tokens[-1])


@plant
def a_namespace(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    node.namespace = ("somebody else's", False)
    return f"n{node.id}", "namespace"


@plant
def a_known_namespace(engine: Any) -> tuple[str, ...]:
    """As `a_namespace`, but one that other nodes have."""
    node = next(n for n in engine.cache.walk() if n.parent is not None and n.namespace == (None, False))
    node.namespace = ("tenant", False)
    return f"n{node.id}", "namespace"


@plant
def last_access(engine: Any) -> tuple[str, ...]:
    node = _inner(engine)
    node.last_access -= 1
    return f"n{node.id}", "last_access"


@plant
def created(engine: Any) -> tuple[str, ...]:
    node = _inner(engine)
    node.created += 1
    return f"n{node.id}", "created"


@plant
def priority_of_a_node(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    node.priority = 7
    return f"n{node.id}", "priority 7", "rank 0 has 0"


@plant
def a_node_more(engine: Any) -> tuple[str, ...]:
    key = RadixKey([50, 51, 52, 53])
    node = engine.cache._add_leaf(engine.cache.root, key, key.data, np.arange(4).tobytes(), 0)
    return f"n{node.id}", "rank 1 has a node", "rank 0 has none"


@plant
def a_node_less(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    del node.parent.children[node.first]
    return f"n{node.id}", "rank 0 has a node", "rank 1 has none"


@plant
def another_parent(engine: Any) -> tuple[str, ...]:
    node = _leaf(engine)
    node.parent = engine.cache.root if node.parent is not engine.cache.root else _inner(engine)
    return f"n{node.id}", f"parent {node.parent.id}"


@plant
def children_in_another_order(engine: Any) -> tuple[str, ...]:
    """Eviction goes by heap and ties by number, but walks, and so much else, go by this order."""
    node = next(n for n in engine.cache.walk() if len(n.children) > 1)
    node.children = dict(reversed(node.children.items()))
    return (f"n{node.id}" if node.id else "the root", "first child")


# ---------------------------------------------------------------------- the second tier


@plant
def a_host_slot(engine: Any) -> tuple[str, ...]:
    node = _copied(engine)
    slots = np.frombuffer(node.host, dtype=np.int64).copy()
    slots[0] += 1
    node.host = slots.tobytes()
    return f"n{node.id}", "host slots", str(slots[0])


@plant
def no_copy_any_more(engine: Any) -> tuple[str, ...]:
    node = _copied(engine)
    node.host = b""
    return f"n{node.id}", "host slots"


@plant
def a_load_that_reads(engine: Any) -> tuple[str, ...]:
    node = _copied(engine)
    node.host_locks += 1
    return f"n{node.id}", "host locks 1"


@plant
def children_on_the_device(engine: Any) -> tuple[str, ...]:
    node = _copied(engine)
    node.resident += 1
    return f"n{node.id}", "resident children"


@plant
def a_free_host_page(engine: Any) -> tuple[str, ...]:
    engine.cache.host_allocator._top -= 1
    return "rank 1", "free host pages"


# ---------------------------------------------------------------------- pages, rows, books


@plant
def a_free_page_less(engine: Any) -> tuple[str, ...]:
    engine.allocator._top -= 1
    return "rank 1", "free pages"


@plant
def free_pages_in_another_order(engine: Any) -> tuple[str, ...]:
    stack, top = engine.allocator._stack, engine.allocator._top
    stack[top - 2 : top] = stack[top - 2 : top][::-1].copy()
    return "rank 1", "free pages"


@plant
def a_row_entry(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    engine.rows.rows[request.row, 1] += 1
    return request.id, "slots", "rank 1"


@plant
def a_free_row(engine: Any) -> tuple[str, ...]:
    engine.rows._free.append(engine.rows._free[-1] if engine.rows._free else 0)
    return "rank 1", "free rows"


@plant
def evictable_size(engine: Any) -> tuple[str, ...]:
    engine.cache.evictable_size += 1
    return "rank 1", "evictable"


@plant
def the_clock(engine: Any) -> tuple[str, ...]:
    engine.cache._tick += 1
    return "rank 1", "clock"


@plant
def version_of_the_weights(engine: Any) -> tuple[str, ...]:
    engine.cache.version += 1
    return "rank 1", "version", "1"


@plant
def the_eviction_policy(engine: Any) -> tuple[str, ...]:
    engine.cache.eviction_policy = "mru"
    return "rank 1", "eviction policy", "mru", "lru"


@plant
def a_pin(engine: Any) -> tuple[str, ...]:
    [number] = engine._pins
    engine._pins[number] = engine.cache.root
    return "rank 1", "pins"


@plant
def the_next_node_number(engine: Any) -> tuple[str, ...]:
    next(engine.cache._ids)
    return "rank 1", "next node"


@plant
def the_steps(engine: Any) -> tuple[str, ...]:
    engine.steps += 1
    return "rank 1", "steps"


@plant
def the_new_token_ratio(engine: Any) -> tuple[str, ...]:
    engine.scheduler.future.ratio += 0.125
    return "rank 1", "ratio"


# ---------------------------------------------------------------------- queue and requests


@plant
def the_order_of_the_queue(engine: Any) -> tuple[str, ...]:
    engine.scheduler.waiting.reverse()
    return "rank 1", "waiting"


@plant
def a_waiting_request_less(engine: Any) -> tuple[str, ...]:
    request = engine.scheduler.waiting.pop()
    return f"request {request.id}", "rank 0 has a request", "rank 1 has none"


@plant
def the_order_of_the_running(engine: Any) -> tuple[str, ...]:
    engine.scheduler.running.reverse()
    return "rank 1", "running"


@plant
def a_generated_token(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request._buffer[request.length - 1] ^= 1
    return request.id, "tokens", str(request.last_token)


@plant
def an_output_token(engine: Any) -> tuple[str, ...]:
    """What its client is given, beside the tokens that are computed with."""
    request = _decoding(engine)
    request.output[0] ^= 1
    return request.id, "output", str(request.output[0])


@plant
def a_prompt_token(engine: Any) -> tuple[str, ...]:
    request = engine.scheduler.waiting[-1]
    request._buffer[0] ^= 1
    return request.id, "tokens", str(request._buffer[0])


@plant
def status_of_a_request(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.status = "waiting"
    return request.id, "status waiting"


@plant
def kv_length(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.kv_len -= 1
    return request.id, f"{request.kv_len}"


@plant
def protected_length(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.protected_len -= 1
    return request.id, "protected tokens"


@plant
def priority_of_a_request(engine: Any) -> tuple[str, ...]:
    request = engine.scheduler.waiting[-1]
    request.priority += 1
    return request.id, "priority"


@plant
def seed_of_a_request(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.seed += 1
    return request.id, "seed"


@plant
def arrival_of_a_request(engine: Any) -> tuple[str, ...]:
    request = engine.scheduler.waiting[-1]
    request.arrival += 10
    return request.id, "arrival"


@plant
def times_passed(engine: Any) -> tuple[str, ...]:
    request = engine.scheduler.waiting[-1]
    request.passes += 1
    return request.id, "passed"


@plant
def attempts(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.attempts += 1
    return request.id, "attempts"


@plant
def the_leaf_it_may_grow(engine: Any) -> tuple[str, ...]:
    request = next(each for each in engine.scheduler.running if each.leaf is not None)
    request.leaf = None
    return request.id, "leaf"


@plant
def the_node_it_locks(engine: Any) -> tuple[str, ...]:
    request = _decoding(engine)
    request.node = request.node.parent
    return request.id, "node"
