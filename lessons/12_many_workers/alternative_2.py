"""Lesson 12, solved a third time: JSON, levels, the engine's tree, a sum of match and load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import md5
from typing import Any

import numpy as np

from minirad.route.trees import SentTree

SLACK = 4
FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")


def plain(node: Any) -> list[Any]:
    """A node and all below it, in a fixed order: no two children of a node begin alike."""
    below = sorted(node.children, key=lambda child: (str(child.namespace), child.tokens[:1]))
    return [str(node.namespace), *(getattr(node, name) for name in FIELDS), [plain(child) for child in below]]


def digest(root: Any) -> bytes:
    return md5(json.dumps(plain(root)).encode()).digest()


def find_divergence(
    mine: Any, ask: Callable[[Any], Any], digest: Callable[[Any], bytes]
) -> tuple[Any, str] | None:
    path: tuple[Any, ...] = ()
    told = ask(path)
    while digest(mine) != told.digest:
        for name in FIELDS:
            if getattr(mine, name) != getattr(told, name):
                return path, name
        ours = sorted(((child.namespace, child.tokens[0]), digest(child)) for child in mine.children)
        theirs = sorted(told.children.items())
        at = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        here, there = (each[at][0] if at < len(each) else None for each in (ours, theirs))
        if there is None or (here is not None and here < there):
            return (*path, here), "only here"
        if here is None or there < here:
            return (*path, there), "only there"
        path = (*path, here)
        mine = next(child for child in mine.children if (child.namespace, child.tokens[0]) == here)
        told = ask(path)
    return None


def account(routes: Sequence[Any], workers: int) -> dict[str, Any]:
    computed = dict.fromkeys(range(workers), 0)
    prompt = hits = regret = 0
    for route in routes:
        prompt, hits = prompt + route.tokens, hits + route.cached
        computed[route.worker] += route.tokens - route.cached
        regret += max(each or 0 for each in route.held) - route.held[route.worker]
    total = sum(computed.values())
    return {
        "hit_rate": hits / (prompt or 1),
        "computed": list(computed.values()),
        "imbalance": workers * max(computed.values()) / total if total else 1.0,
        "regret": regret,
    }


class Router:
    """What is saved, less what has to be waited for."""

    def __init__(self) -> None:
        self.trees: dict[int, SentTree] = {}
        self.queue: list[int] = []  # workers, the one that was chosen last at the end

    def choose(self, tokens: Sequence[int], workers: Sequence[Any]) -> tuple[int, str]:
        ids = np.array(tokens) % 2**31
        low = min(worker.load for worker in workers if worker.alive)
        best, worker = (-9.0, 0), -1
        for at, each in enumerate(workers):
            if not each.alive or each.load > low + SLACK:
                continue
            share = self.trees[at].match(ids) / len(tokens) if at in self.trees else 0.0
            worth = (share if share > 0.35 else 0.0) - 0.02 * (each.load - low)
            age = len(self.queue) - self.queue.index(at) if at in self.queue else 10**6
            if (worth, age) > best:
                best, worker = (worth, age), at
        if worker in self.queue:
            self.queue.remove(worker)
        self.queue.append(worker)
        return worker, f"{best[0]:.2f} is the largest of share less 0.02 for each request more than {low}"

    def sent(self, worker: int, tokens: Sequence[int]) -> None:
        self.trees.setdefault(worker, SentTree(5000)).add(np.array(tokens) % 2**31)

    def forget(self, worker: int) -> None:
        self.trees.pop(worker, None)
