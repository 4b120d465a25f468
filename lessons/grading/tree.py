"""The tree that lessons 02 and 03 work on: lists and plain loops, easy to read and to draw.

`Tree` gives what the exercises do not ask for: nodes, a clock, the two sizes, the calls in the right
order. The functions themselves (`PARTS`) are laid in: a student's where written, else those of
underlay.py. `minirad.RadixCache` is the same thing with bytes for lists, and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lessons.grading import underlay
from minirad.errors import InvariantError, require

PARTS = ("common_prefix", "split_node", "match_prefix", "insert",
         "inc_lock_ref", "dec_lock_ref", "offer", "evict")  # fmt: skip
POLICY_KEYS: dict[str, Callable[[Any], Any]] = {
    "lru": lambda node: node.last_access,
    "lfu": lambda node: (node.hits, node.last_access),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.last_access,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: (node.hits >= 2, node.last_access),
}


class Node:
    """One edge of the tree and what hangs below it.

    tokens, slots: lists of equal length, whole pages; slots[i] holds the KV of tokens[i].
    parent: the node above; None for the root and for a node that was removed.
    children: dict from a child's first page, `tuple(child.tokens[:page_size])`, to the child.
    lock_ref: how many running requests need this node. last_access, created: clock ticks.
    hits: how often a request's prompt ran through it. id: a number that is never used again.
    """

    namespace_number = 0

    def __init__(self, id: int, tokens: Sequence[int], slots: Sequence[int], parent: Node | None) -> None:
        self.id = id
        self.tokens: Any = list(tokens)
        self.slots: Any = list(slots)
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.lock_ref = 0
        self.last_access = self.created = 0
        self.hits = self.priority = 0

    @property
    def key(self) -> list[int]:
        """The tokens as the recorder asks for them."""
        return [int(unit) & 0xFFFFFFFF for unit in self.tokens]

    def __repr__(self) -> str:
        return f"Node(n{self.id}, {list(self.tokens)}, lock_ref={self.lock_ref})"


class Tree:
    """A radix tree whose eight functions are laid in.

    page_size, root. now: the clock; it has moved on before your function is called. key(node): by
    which the eviction policy orders leaves, smallest first; ties go to the smaller id. heap: an empty
    list at first, and yours (lesson 03). evictable_size, protected_size: tokens in unlocked and in
    locked nodes. freed: what `remove` has taken out since the last eviction began, slot by slot.
    """

    def __init__(
        self,
        page_size: int = 1,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        key: Callable[[Any], Any] | None = None,
    ) -> None:
        self.page_size = page_size
        self.key = key or POLICY_KEYS["lru"]
        self.parts = {name: getattr(underlay, name) for name in PARTS} | dict(parts or {})
        self.name: Callable[[Any], str] = name_of  # what nodes are called in errors
        self.words: dict[str, str] = {}  # token id (as text) -> how a picture shows it
        self.now = 0
        self._next_id = 1
        self.plant()

    def plant(self) -> None:
        """Starts anew with a bare root; ids and clock go on."""
        self.root = Node(0, (), (), None)
        self.heap: list[Any] = []
        self.freed: list[int] = []
        self.evictable_size = self.protected_size = 0

    # -------------------------------------------------------------- for the student's functions

    def new_node(self, tokens: Sequence[int], slots: Sequence[int], parent: Node) -> Node:
        """A node that knows its parent; `created` and `last_access` are now.

        Its parent does not know it yet.
        """
        node = Node(self._next_id, tokens, slots, parent)
        self._next_id += 1
        node.created = node.last_access = self.now
        return node

    def remove(self, leaf: Node) -> None:
        """Takes a leaf out of the tree and frees its slots.

        Its parent forgets it, its own `parent` becomes None.
        """
        parent = leaf.parent
        require(parent is not None, f"{self.name(leaf)} is the root or was removed before")
        require(not leaf.children, f"{self.name(leaf)} was removed although nodes hang below it")
        assert parent is not None
        found = [first for first, child in parent.children.items() if child is leaf]
        require(bool(found), f"the parent of {self.name(leaf)} does not know it")
        del parent.children[found[0]]
        leaf.parent = None
        self.freed += [int(slot) for slot in leaf.slots]

    def nodes(self) -> Iterator[Node]:
        """All nodes, the root first, parents before children. A loop in the tree is an InvariantError."""
        todo, seen = [self.root], {id(self.root)}
        while todo:
            node = todo.pop()
            yield node
            for child in reversed(list(node.children.values())):
                if id(child) in seen:
                    raise InvariantError(f"{self.name(child)} hangs in the tree twice")
                seen.add(id(child))
                todo.append(child)

    # -------------------------------------------------------------- the calls, in the right order

    def match(self, tokens: Sequence[int]) -> tuple[list[int], Node]:
        """A look-up of a request's prompt: counts a hit on the path that matched."""
        self.now += 1
        slots, node = self.parts["match_prefix"](self, list(tokens))
        for step in path_up(node):
            step.hits += 1
        self._offer_around(node)
        return [int(slot) for slot in slots], node

    def insert(self, tokens: Sequence[int], slots: Sequence[int], priority: int = 0) -> tuple[int, Node]:
        """Puts a sequence into the tree; keeps the books of the sizes."""
        self.now += 1
        prefix_len, node = self.parts["insert"](self, list(tokens), list(slots))
        self.evictable_size += len(tokens) // self.page_size * self.page_size - prefix_len
        for step in path_up(node):
            step.priority = max(step.priority, priority)
        self._offer_around(node)
        return int(prefix_len), node

    def lock(self, node: Node) -> int:
        return int(self.parts["inc_lock_ref"](self, node))

    def unlock(self, node: Node) -> int:
        moved = int(self.parts["dec_lock_ref"](self, node))
        if node is not self.root and not node.children:
            self.parts["offer"](self, node)
        return moved

    def evict(self, num_tokens: int) -> list[int]:
        """The slots that an eviction freed, victim by victim."""
        self.freed = []
        self.parts["evict"](self, num_tokens)
        return self.freed

    def _offer_around(self, end: Node) -> None:
        """The leaves that an operation touched: its end, and the lower half of a node that it split,
        which hangs below the end (a match) or beside it (an insert)."""
        near = [*end.children.values(), *(end.parent.children.values() if end.parent else ())]
        leaves = {leaf.id: leaf for leaf in [end, *near] if leaf is end or leaf.last_access == self.now}
        for _, leaf in sorted(leaves.items()):
            if leaf is not self.root and not leaf.children:
                self.parts["offer"](self, leaf)

    # -------------------------------------------------------------- looking at it

    def peek(self, tokens: Sequence[int]) -> int:
        """How much would match. Changes nothing; uses none of the laid-in functions."""
        node, done = self.root, 0
        while True:
            child, shared = underlay.best_child(node, tokens[done:], self.page_size)
            done += shared
            if child is None or shared < len(child.tokens):
                return done
            node = child

    def check(self) -> None:
        """What must hold; InvariantError says where it does not."""
        sizes = [0, 0]
        holders: dict[int, Node] = {}
        for node in self.nodes():
            for first, child in node.children.items():
                self._check_link(node, first, child)
            if node is self.root:
                continue
            self._check_node(node)
            for slot in node.slots:
                other = holders.setdefault(int(slot), node)
                if other is not node:
                    raise InvariantError(f"slot {slot} is in {self.name(other)} and in {self.name(node)}")
            sizes[node.lock_ref > 0] += len(node.tokens)
        for name, counted in zip(("evictable_size", "protected_size"), sizes, strict=True):
            noted = getattr(self, name)
            require(noted == counted, f"{name} is {noted}, but the nodes add up to {counted}")

    def _check_link(self, node: Node, first: Any, child: Node) -> None:
        page = tuple(int(token) for token in child.tokens[: self.page_size])
        if page != first:
            raise InvariantError(f"{self.name(child)} begins with {page}, but is filed under {first}")
        if child.parent is not node:
            raise InvariantError(f"the parent of {self.name(child)} should be {self.name(node)}")

    def _check_node(self, node: Node) -> None:
        size = len(node.tokens)
        below = sum(child.lock_ref for child in node.children.values())
        wrong = ""
        if size != len(node.slots):
            wrong = f"has {size} tokens, but {len(node.slots)} slots"
        elif size == 0 or size % self.page_size:
            wrong = f"holds {size} tokens: not whole pages of {self.page_size}"
        elif node.lock_ref < below:
            wrong = f"has lock_ref {node.lock_ref}, its children {below} together"
        if wrong:
            raise InvariantError(f"{self.name(node)} {wrong}")


def name_of(node: Any) -> str:
    """A node in words: its name, and what it holds if that is short."""
    if node.parent is None and len(node.tokens) == 0:
        return "the root"
    tokens = [int(token) for token in node.tokens]
    text = " ".join(map(str, tokens[:6])) + (" ..." if len(tokens) > 6 else "")
    return f"node [{text}]"


def path_up(node: Any) -> list[Any]:
    """The node and all above it, the root left out. InvariantError for a chain that does not end."""
    path: list[Any] = []
    while node.parent is not None:
        require(len(path) < 100_000, f"the way up from {name_of(node)} does not end")
        path.append(node)
        node = node.parent
    return path


def snapshot(tree: Tree) -> dict[str, Any]:
    """The tree as plain data, in the shape that viz.tree draws. A broken tree gives what can be reached."""
    nodes = []
    try:
        for node in tree.nodes():
            if node is not tree.root:
                nodes.append(_described(node))
    except InvariantError:
        pass
    return {
        "page_size": tree.page_size,
        "eviction_policy": "its own",
        "tick": tree.now,
        "nodes": nodes,
        "words": tree.words,
    }


def _described(node: Any) -> dict[str, Any]:
    numbers = {
        name: int(getattr(node, name, 0))
        for name in ("id", "lock_ref", "last_access", "created", "hits", "priority")
    }
    return {
        **numbers,
        "parent": getattr(node.parent, "id", 0),
        "tokens": [int(token) for token in node.tokens],
        "slots": [int(slot) for slot in node.slots],
        "namespace": int(getattr(node, "namespace_number", 0)),
    }
