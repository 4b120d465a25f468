"""Lesson 12, solved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

Step = tuple[str, int]
Path = tuple[Step, ...]
FIELDS = ("tokens", "slots", "lock_ref", "hits", "last_access")


class Node(Protocol):
    namespace: str
    tokens: list[int]
    slots: list[int]
    lock_ref: int
    hits: int
    last_access: int
    children: list[Any]
    name: str


class Told(Protocol):
    namespace: str
    tokens: list[int]
    slots: list[int]
    lock_ref: int
    hits: int
    last_access: int
    digest: bytes
    children: dict[Step, bytes]


class Route(Protocol):
    worker: int
    tokens: int
    cached: int
    held: list[int | None]


class Worker(Protocol):
    name: str
    alive: bool
    load: int


SLACK = 4


def digest(root: Node) -> bytes:
    """Of a node's own fields, and of its children's digests in an order of their own."""
    whole = blake2b(digest_size=16)
    own = (root.namespace, list(root.tokens), list(root.slots), root.lock_ref, root.hits, root.last_access)
    whole.update(repr(own).encode())
    for below in sorted(digest(child) for child in root.children):
        whole.update(below)
    return whole.digest()


def find_divergence(
    mine: Node, ask: Callable[[Path], Told], digest: Callable[[Node], bytes]
) -> tuple[Path, str] | None:
    """Goes down where the digests differ, and asks for nothing beside that path."""
    path: Path = ()
    while True:
        told = ask(path)
        if not path and digest(mine) == told.digest:
            return None
        for name in FIELDS:
            if getattr(mine, name) != getattr(told, name):
                return path, name
        here = {(child.namespace, child.tokens[0]): child for child in mine.children}
        for step in sorted(here.keys() | told.children.keys()):
            if step not in told.children:
                return (*path, step), "only here"
            if step not in here:
                return (*path, step), "only there"
            if digest(here[step]) != told.children[step]:
                path, mine = (*path, step), here[step]
                break


def account(routes: Sequence[Route], workers: int) -> dict[str, Any]:
    """Sums over all requests; shares are made of the sums."""
    tokens = sum(route.tokens for route in routes)
    computed = [0] * workers
    regret = 0
    for route in routes:
        computed[route.worker] += route.tokens - route.cached
        held = [each for each in route.held if each is not None]
        regret += max(held) - route.held[route.worker]
    return {
        "hit_rate": sum(route.cached for route in routes) / tokens if tokens else 0.0,
        "computed": computed,
        "imbalance": max(computed) * workers / sum(computed) if any(computed) else 1.0,
        "regret": regret,
    }


class Router:
    """The free worker that was sent most, if that is half of the prompt; else the least loaded."""

    def __init__(self) -> None:
        self._prompts: dict[int, set[tuple[int, ...]]] = {}
        self._chosen: dict[int, int] = {}  # of each worker its last choice's number
        self._choices = 0

    def choose(self, tokens: Sequence[int], workers: Sequence[Worker]) -> tuple[int, str]:
        low = min(worker.load for worker in workers if worker.alive)
        free = [at for at, worker in enumerate(workers) if worker.alive and worker.load <= low + SLACK]
        sent = {at: self._longest(at, tokens) for at in free}
        best = max(sent.values())
        if 2 * best > len(tokens):
            among = [at for at in free if sent[at] == best]
            why = f"was sent {best} of {len(tokens)} tokens"
        else:
            among = free
            why = f"is the least loaded, and nobody was sent more than {best} of {len(tokens)} tokens"
        worker = min(among, key=lambda at: (workers[at].load, self._chosen.get(at, -1)))
        self._choices += 1
        self._chosen[worker] = self._choices
        return worker, f"{workers[worker].name} {why} (load {workers[worker].load}, the lowest is {low})"

    def sent(self, worker: int, tokens: Sequence[int]) -> None:
        self._prompts.setdefault(worker, set()).add(tuple(tokens))

    def forget(self, worker: int) -> None:
        self._prompts.pop(worker, None)

    def _longest(self, worker: int, tokens: Sequence[int]) -> int:
        """How many tokens from the beginning were sent to a worker, as the beginning of one prompt."""
        return max((_shared(tokens, each) for each in self._prompts.get(worker, ())), default=0)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))
