"""The same moves on a student's tree and on one of the grader's own, compared at every node after every move.

A game has no seed but its own: what it catches, it catches for every student.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading.cases import laid, node_at, pictures, spelled, whole
from lessons.grading.spec import Failure
from lessons.grading.tree import Node, Tree, name_of, snapshot

FIELDS = ("lock_ref", "hits", "priority", "created", "last_access")
LISTED = 12  # longer lists are shortened in words
Move = tuple[Any, ...]  # its name, and what the method of `Twins` with that name takes


class Twins:
    """Two trees that must stay alike.

    names: functions of `impl` that the first tree works with; all others, and the second, are the grader's.
    A node is known by its path, the tokens from the root to its end; so ids may differ between the trees.
    """

    def __init__(
        self, impl: ModuleType, names: Sequence[str], page_size: int = 1,
        key: Callable[[Any], Any] | None = None, theirs: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        self.ours = laid(Tree(page_size, key=key), impl, *names)
        self.theirs = Tree(page_size, key=theirs or key)
        self.story: list[str] = []
        self.known: dict[tuple[int, ...], Node] = {}
        self.ids: dict[int, Node] = {0: self.ours.root}
        self.slot = page_size

    def play(self, moves: Iterable[Move], compare: bool = True) -> None:
        """One move after the other; a Failure at the first node that differs.

        compare False: only what the calls return is compared (for large trees).
        """
        for name, *arguments in moves:
            before = snapshot(self.ours) if compare else None
            getattr(self, name)(before, *arguments)
            if compare:
                self._compare(before)

    # -------------------------------------------------------------- moves

    def insert(self, before: Any, tokens: Sequence[int], priority: int = 0) -> None:
        self._tell(f"insert {said(tokens)}" + (f" with priority {priority}" if priority else ""))
        slots = range(self.slot, self.slot + len(tokens))
        self.slot += -(-len(tokens) // self.ours.page_size) * self.ours.page_size
        got, end = self.ours.insert(tokens, slots, priority)
        wanted, _ = self.theirs.insert(tokens, slots, priority)
        self._same("tokens that were there before", got, wanted, before)
        self._ends(end, tokens[: len(tokens) // self.ours.page_size * self.ours.page_size], before)

    def match(self, before: Any, tokens: Sequence[int]) -> None:
        self._tell(f"look up {said(tokens)}")
        got, end = self.ours.match(tokens)
        wanted, _ = self.theirs.match(tokens)
        self._same("slots found", got, wanted, before)
        self._ends(end, tokens[: len(wanted)], before)

    def lock(self, before: Any, path: Sequence[int]) -> None:
        self._tell(f"lock {said(path)}")
        got = self.ours.lock(node_at(self.ours, path))
        self._same("tokens that moved", got, self.theirs.lock(node_at(self.theirs, path)), before)

    def unlock(self, before: Any, path: Sequence[int]) -> None:
        self._tell(f"unlock {said(path)}")
        got = self.ours.unlock(node_at(self.ours, path))
        self._same("tokens that moved", got, self.theirs.unlock(node_at(self.theirs, path)), before)

    def refuse(self, before: Any, path: Sequence[int]) -> None:
        """An unlock of what is not locked: ValueError, and nothing has changed."""
        self._tell(f"unlock {said(path)}, which is not locked")
        try:
            self.ours.unlock(node_at(self.ours, path))
        except ValueError:
            return
        raise Failure(f"{self._where}: a ValueError should come, and none came", pictures(self.ours, before))

    def evict(self, before: Any, num_tokens: int) -> None:
        self._tell(f"evict({num_tokens})")
        self.ours.freed = []
        returned = self.ours.parts["evict"](self.ours, num_tokens)
        wanted = self.theirs.evict(num_tokens)
        self._same("slots freed, in this order,", self.ours.freed, wanted, before)
        if "evict" in self.ours.parts and self.theirs.parts["evict"] is not self.ours.parts["evict"]:
            self._same("returned", returned, len(wanted), before)

    def remove(self, before: Any, path: Sequence[int]) -> None:
        """The grader takes this leaf out, as an eviction would."""
        self._tell(f"{said(path)} is evicted")
        for tree in (self.ours, self.theirs):
            leaf = node_at(tree, path)
            tree.evictable_size -= len(leaf.tokens)
            tree.remove(leaf)

    def mark(self, before: Any, path: Sequence[int], numbers: dict[str, int]) -> None:
        """Sets numbers of a node by hand, in both trees."""
        self._tell(f"{said(path)} gets {', '.join(f'{name} {n}' for name, n in numbers.items())}")
        for tree in (self.ours, self.theirs):
            for name, number in numbers.items():
                setattr(node_at(tree, path), name, number)

    # -------------------------------------------------------------- comparing

    @property
    def _where(self) -> str:
        pages = f"with pages of {self.ours.page_size}: " if self.ours.page_size > 1 else ""
        before = "..., " if len(self.story) > 6 else ""
        return pages + before + ", ".join(self.story[-6:])

    def _tell(self, words: str) -> None:
        self.story.append(words)

    def _same(self, what: str, got: Any, wanted: Any, before: Any) -> None:
        if got != wanted:
            words = f"{self._where}: {what} should be {said(wanted)}, found: {said(got)}"
            raise Failure(words, pictures(self.ours, before))

    def _ends(self, node: Any, wanted: Sequence[int], before: Any) -> None:
        if not isinstance(node, Node):
            raise Failure(f"{self._where}: {node!r} came in the place of a node", pictures(self.ours, before))
        self._same("the path of the node that came back", spelled(node), list(wanted), before)

    def _compare(self, before: Any) -> None:
        ours, theirs = by_path(self.ours), by_path(self.theirs)
        for path, twin in theirs.items():
            if path not in ours:
                words = f"{self._where}: a node should end after {said(path)}, and none does"
                raise Failure(words, pictures(self.ours, before))
            self._compare_node(path, ours[path], twin, before)
        extra = [path for path in ours if path not in theirs]
        if extra:
            words = f"{self._where}: no node should end after {said(extra[0])}, and one does"
            raise Failure(words, pictures(self.ours, before))
        for name in ("evictable_size", "protected_size"):
            self._same(name, getattr(self.ours, name), getattr(self.theirs, name), before)
        whole(self.ours, self._where, before)
        self.known = ours

    def _compare_node(self, path: tuple[int, ...], node: Node, twin: Node, before: Any) -> None:
        name = name_of(node)
        for field in ("tokens", "slots"):
            got, wanted = ([int(number) for number in getattr(each, field)] for each in (node, twin))
            self._same(f"{field} of {name}", got, wanted, before)
        for field in FIELDS:
            got, wanted = getattr(node, field), getattr(twin, field)
            if got != wanted:
                now = f" (now is {self.ours.now})" if field in ("created", "last_access") else ""
                self._same(f"{field} of {name}{now}", got, wanted, before)
        if self.known.get(path, node) is not node:
            words = f"{self._where}: the node that ended after {said(path)} should be the same one still"
            raise Failure(f"{words}, another one is there now", pictures(self.ours, before))
        if self.ids.setdefault(node.id, node) is not node:
            words = f"{self._where}: {name} has id {node.id}, which was another node's: no id comes twice"
            raise Failure(words, pictures(self.ours, before))


def by_path(tree: Tree) -> dict[tuple[int, ...], Node]:
    """Every node with the tokens from the root to its end; the root has ()."""
    found: dict[int, tuple[int, ...]] = {}
    paths: dict[tuple[int, ...], Node] = {}
    for node in tree.nodes():
        above = () if node.parent is None else found.get(id(node.parent), ())
        path = found[id(node)] = (*above, *map(int, node.tokens))
        paths[path] = node
    return paths


def said(values: Any) -> str:
    """A value in words; long lists shortened."""
    if not isinstance(values, list | tuple | range):
        return repr(values)
    numbers = list(values)
    if len(numbers) <= LISTED:
        return repr(numbers)
    return f"[{', '.join(map(repr, numbers[:4]))}, ... {len(numbers)} numbers ..., {numbers[-1]!r}]"


# ---------------------------------------------------------------------- sequences


def spell(letters: str, page_size: int = 1, ids: Callable[[int], int] = int) -> list[int]:
    """A page for each letter; pages differ in their last token only. A dot: one token, less than a page."""
    tokens: list[int] = []
    for letter in letters:
        if letter == ".":
            tokens += [ids(90)]
        else:
            tokens += [ids(90)] * (page_size - 1) + [ids(ord(letter) - ord("a"))]
    return tokens


def spelled_out(moves: Iterable[Move], page_size: int = 1, ids: Callable[[int], int] = int) -> Iterable[Move]:
    """Moves whose sequences are written in letters."""
    for name, *rest in moves:
        yield (name, *(spell(part, page_size, ids) if isinstance(part, str) else part for part in rest))


@cache
def random_moves(
    seed: str, moves: int, page_size: int, kinds: tuple[str, ...], key: Callable[[Any], Any] | None = None
) -> list[Move]:
    """Moves that a game of the grader's own could make: always the same for the same seed."""
    rng, plan = Random(seed), Twins(ModuleType("nobody"), (), page_size, key)
    held: list[list[int]] = []
    known: list[list[int]] = []
    made: list[Move] = []
    for _ in range(moves):
        kind = rng.choice(kinds)
        move: Move
        if kind in ("insert", "match"):
            tokens = _sequence(rng, known, page_size)
            known.append(tokens)
            move = (kind, tokens, rng.choice((0, 0, 1, 5))) if kind == "insert" else (kind, tokens)
        elif kind == "evict":
            move = (kind, rng.choice((1, 2, 5)) * page_size)
        else:
            paths = [
                list(path) for path, node in by_path(plan.theirs).items() if node is not plan.theirs.root
            ]
            free = [path for path in paths if not node_at(plan.theirs, path).lock_ref]
            leaves = [path for path in free if not node_at(plan.theirs, path).children]
            choice = {"lock": paths, "unlock": held, "refuse": free, "remove": leaves}[kind]
            if not choice:
                continue
            move = (kind, rng.choice(choice))
            if kind == "lock":
                held.append(move[1])
            elif kind == "unlock":
                held.remove(move[1])
        if kind != "refuse":
            plan.play([move])
        made.append(move)
    return made


def _sequence(rng: Random, known: Sequence[Sequence[int]], page_size: int) -> list[int]:
    tail = [rng.randrange(3) for _ in range(rng.randrange(4 * page_size))]
    if not known or rng.random() < 0.2:
        return tail
    head = list(rng.choice(known))
    return head[: rng.randrange(len(head) + 1)] + (tail if rng.random() < 0.8 else [])
