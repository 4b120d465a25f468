"""Lesson 12, solved otherwise: a list of paths, recursion, numpy, tries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SLACK = 4
FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")


def digest(root: Any) -> bytes:
    """Every node as a line that says which edges lead to it; the lines sorted."""
    lines, todo = [], [("", root)]
    while todo:
        above, node = todo.pop()
        path = f"{above}/{node.namespace!r}{list(map(int, node.tokens))}"
        own = ",".join(str(number) for number in (*node.slots, node.lock_ref, node.hits, node.last_access))
        lines.append(f"{path}={own}")
        todo += [(path, child) for child in node.children]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).digest()[:16]


def find_divergence(
    mine: Any, ask: Callable[[Any], Any], digest: Callable[[Any], bytes]
) -> tuple[Any, str] | None:
    """Recursion into the first child that differs."""

    def search(path: Any, node: Any) -> tuple[Any, str] | None:
        told = ask(path)
        if told.digest == digest(node):
            return None
        differ = [name for name in FIELDS if getattr(node, name) != getattr(told, name)]
        if differ:
            return path, differ[0]
        ours = {(child.namespace, child.tokens[0]): child for child in node.children}
        stamps = {step: digest(child) for step, child in ours.items()}
        unlike = {
            step for step in stamps.keys() | told.children if stamps.get(step) != told.children.get(step)
        }
        first = min(unlike)
        if first not in told.children:
            return (*path, first), "only here"
        return search((*path, first), ours[first]) if first in ours else ((*path, first), "only there")

    return search((), mine)


def account(routes: Sequence[Any], workers: int) -> dict[str, Any]:
    """With arrays."""
    worker = np.array([route.worker for route in routes], dtype=np.int64)
    tokens = np.array([route.tokens for route in routes], dtype=np.int64)
    cached = np.array([route.cached for route in routes], dtype=np.int64)
    computed = np.zeros(workers, dtype=np.int64)
    np.add.at(computed, worker, tokens - cached)
    best = [max(-1 if each is None else each for each in route.held) for route in routes]
    had = [route.held[route.worker] for route in routes]
    return {
        "hit_rate": float(cached.sum() / tokens.sum()) if tokens.sum() else 0.0,
        "computed": computed.tolist(),
        "imbalance": float(computed.max() / computed.mean()) if computed.any() else 1.0,
        "regret": sum(best) - sum(had),
    }


class Router:
    """A trie of what was sent to each worker; whose turn it is among equals."""

    def __init__(self) -> None:
        self.tries: dict[int, dict[int, Any]] = {}
        self.turn = 0

    def choose(self, tokens: Sequence[int], workers: Sequence[Any]) -> tuple[int, str]:
        low = min(worker.load for worker in workers if worker.alive)

        def rank(at: int) -> tuple[int, int]:
            return workers[at].load, (at - self.turn) % len(workers)

        found = [
            (self.depth(at, tokens), at)
            for at, worker in enumerate(workers)
            if worker.alive and worker.load - low <= SLACK
        ]
        most = max(depth for depth, _ in found)
        if most > 0.4 * len(tokens):
            worker = min((at for depth, at in found if depth == most), key=rank)
            why = f"{most} of {len(tokens)} tokens"
        else:
            worker = min((at for _, at in found), key=rank)
            why = f"load {workers[worker].load}"
        self.turn = worker + 1
        return worker, why

    def depth(self, worker: int, tokens: Sequence[int]) -> int:
        trie, depth = self.tries.get(worker, {}), 0
        for token in tokens:
            if token not in trie:
                break
            trie, depth = trie[token], depth + 1
        return depth

    def sent(self, worker: int, tokens: Sequence[int]) -> None:
        trie = self.tries.setdefault(worker, {})
        for token in tokens:
            trie = trie.setdefault(token, {})

    def forget(self, worker: int) -> None:
        self.tries[worker] = {}
