"""The radix tree: which prefixes have their KV in the pool, and in which slots.

An edge carries a run of tokens and the slots that hold their keys and values; a path from the root
spells a prefix. This is an index only: it knows no model, no tensors and no allocator. Slots
come in through `insert` and go out through `match_prefix` and `evict`; whoever calls owns the rest.

Four choices make plain Python fast here:

* **Tokens are compared as bytes.** `data[pos:end] != edge` compares a whole edge at memory speed, and
  cuts no more than that edge's length out of the key (cutting off all the rest at every node would
  cost depth x length). Where an edge is left in the middle, bisection finds the page. A loop over
  tokens costs a thousand times more.
* **Slots are kept as bytes, too** (`node.packed`, read as numbers through `node.slots`). Cutting and
  joining bytes takes a fraction of the time of the same on small numpy arrays, and the pieces are
  copies by nature: a view would keep a large array alive for as long as any small part of it.
* **One clock tick per operation.** All nodes that a match or insert touched share it, so "least
  recently used" needs no time stamps that must be compared node by node. (Rejected: `time.monotonic`
  per node: slower, and two runs of one program would differ.)
* **Eviction keeps its heap** between calls (eviction.py).

Rejected, after measuring: joining chains of single children again when evictions have left them. Where
almost every prompt splits a node (`bench radix`, "split") it left a tenth of the nodes and took 0.11 s
instead of 0.27, but a joined leaf is evicted whole: the hit rate fell, from 76.2% to 71.2% under lfu in a
pool of a twentieth, from 44.8% to 44.1% with Zipf's law ("evict"), and there it saved no time at all. The
place where a chain is cut is where the well-used part ends. One token computed again costs more than all
the microseconds of its walk. (Measured was joining every unlocked chain. Not tried: joining only above nodes
with children, so that no leaf grows, or only halves that the policy cannot tell apart.)

Does not do: locking against threads. `lock_ref` is no mutex: it counts the running requests whose
rows point into a node's slots, so that eviction leaves them alone. One thread drives the engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from minirad import events as ev
from minirad.cache.eviction import EvictionPolicy, EvictionQueue, OutdatedFirst, eviction_policy
from minirad.errors import InvariantError, require, said, truth, whole

Slots = npt.NDArray[np.int64]
Namespace = tuple[Hashable, ...]  # (extra_key, is_bigram), and of old weights the version, too
IntSequence = Sequence[int] | npt.NDArray[Any]  # torch tensors work too: anything numpy can read

MAX_TOKEN, MAX_INT64 = 2**31 - 1, 2**63 - 1
SLOT_BYTES = 8
NO_PRIORITY = -(2**63)  # what a look-up adds to a node's priority: nothing


def as_int64(values: Any, what: str) -> Slots:
    """Any one-dimensional integer sequence as a numpy int64 array; ValueError names what is off."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # rows of different lengths, say
        raise ValueError(f"{what} must be one row of integers, got {said(values)}") from error
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    kind = array.dtype.kind
    if array.ndim != 1 or kind not in "iu":
        shown = said(values) if array.ndim == 0 or kind == "O" else f"of shape {array.shape}"
        raise ValueError(f"{what} must be one row of integers, got {array.dtype} {shown}")
    if kind == "u" and array.max() > MAX_INT64:
        raise ValueError(f"{what}: {array.max()} does not fit into a signed 64-bit integer")
    return array.astype(np.int64, copy=False)


class RadixKey:
    """What is looked up: tokens, and the namespace they belong to.

    `extra_key` (any hashable, compared as a value) keeps apart what must not share KV although the
    tokens are equal: two LoRA adapters, two tenants. With `is_bigram` the units are the pairs
    (t0,t1), (t1,t2), ...: n tokens give n-1 units, as draft models that see the next token need it.
    """

    __slots__ = ("data", "is_bigram", "namespace", "width")

    def __init__(self, token_ids: Any, extra_key: Hashable = None, is_bigram: bool = False) -> None:
        tokens = as_int64(token_ids, "token ids")
        if tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN):
            bad = int(tokens[(tokens < 0) | (tokens > MAX_TOKEN)][0])
            raise ValueError(f"token id {bad} is out of range 0 to {MAX_TOKEN}")
        hash(extra_key)  # a TypeError here names the type; later it would be far from its cause
        if type(is_bigram) is not bool:
            truth("is_bigram", is_bigram)
        units = tokens.astype(np.int32)
        if is_bigram:
            units = np.stack((units[:-1], units[1:]), axis=1)
        self.data: bytes = units.tobytes()
        self.width = 8 if is_bigram else 4  # bytes per unit
        self.is_bigram = is_bigram
        self.namespace: Namespace = (extra_key, is_bigram)

    @classmethod
    def _from_bytes(cls, data: bytes, namespace: Namespace, width: int) -> RadixKey:
        key = object.__new__(cls)
        key.data, key.namespace, key.width, key.is_bigram = data, namespace, width, width == 8
        return key

    @property
    def extra_key(self) -> Hashable:
        return self.namespace[0]

    @property
    def tokens(self) -> Slots:
        """The units as int64: shape [n], or [n, 2] for bigrams."""
        flat = np.frombuffer(self.data, dtype=np.int32).astype(np.int64)
        return flat.reshape(-1, 2) if self.is_bigram else flat

    def __len__(self) -> int:
        return len(self.data) // self.width

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self.data == other.data and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.data, self.namespace))

    def __repr__(self) -> str:
        extra = f", extra_key={self.extra_key!r}" if self.extra_key is not None else ""
        return f"RadixKey({self.tokens.tolist()}{extra}{', is_bigram=True' * self.is_bigram})"


class MatchResult(NamedTuple):
    """`length` matched units in `slots` (a copy), ending at `last_node` (the root for none).

    `host_length` further units match, up to `host_node`, whose KV lies in host memory only
    (hiradix_cache.py).
    """

    slots: Slots
    length: int
    last_node: Node
    host_length: int = 0
    host_node: Node | None = None


class InsertResult(NamedTuple):
    """`prefix_len` units were in the tree before, with slots of their own; the path ends at `last_node`."""

    prefix_len: int
    last_node: Node


class EvictResult(NamedTuple):
    """`slots` of whole leaves, `num_tokens` of them, no longer in the tree."""

    num_tokens: int
    slots: Slots


class Node:
    """One edge and what hangs below it. `edge` is the key's bytes; `slots[i]` holds its i-th unit.

    `packed` is the bytes of the slots (int64). `children` are found by the bytes of their first page
    (below the root: with their namespace).
    """

    __slots__ = (
        "children", "created", "edge", "first", "hits", "id", "last_access", "lock_ref",
        "namespace", "packed", "parent", "priority", "queued", "width",
    )  # fmt: skip

    def __init__(
        self, id: int, parent: Node | None, first: Any, edge: bytes, packed: bytes, like: RadixKey | Node
    ) -> None:
        self.id = id
        self.parent = parent
        self.first = first
        self.edge = edge
        self.packed = packed
        self.namespace: Namespace = like.namespace
        self.width: int = like.width
        self.children: dict[Any, Node] = {}
        self.lock_ref = 0
        self.hits = 0
        self.priority = 0
        self.created = self.last_access = 0
        self.queued: Any = None  # the key under which the eviction queue knows this node

    @property
    def key(self) -> RadixKey:
        return RadixKey._from_bytes(self.edge, self.namespace, self.width)

    @property
    def slots(self) -> Slots:
        """Where the KV of each unit lies; read-only."""
        slots: Slots = np.frombuffer(self.packed, dtype=np.int64)
        return slots

    @property
    def units(self) -> int:
        """Tokens (or pairs) on the edge, wherever their KV lies."""
        return len(self.edge) // self.width

    @property
    def outdated(self) -> bool:
        """Its KV is of old weights: no key can name its namespace."""
        return len(self.namespace) == 3

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that is still in the tree; never the root."""
        return self.lock_ref == 0 and not self.children and self.parent is not None

    def __len__(self) -> int:
        return len(self.packed) // SLOT_BYTES

    def __bool__(self) -> bool:
        return True  # also the root, which holds nothing: a node is never "false"

    def __repr__(self) -> str:
        return f"Node(n{self.id}, {len(self)} tokens, lock_ref={self.lock_ref})"


def _no_node(value: Any) -> ValueError:
    return ValueError(f"a node of this tree is needed, got {said(value)}")


class RadixCache:
    """A radix tree over KV slots with locks and eviction.

    page_size: units per page; only whole pages are matched, split off, stored.
    eviction_policy: lru, lfu, fifo, mru, filo, priority or slru.
    bus: where events go; a cache of its own gets a bus of its own.
    """

    _Node: type[Node] = Node  # what nodes are made of

    def __init__(
        self, page_size: int = 1, eviction_policy: str = "lru", bus: ev.EventBus | None = None
    ) -> None:
        self.page_size = whole("page_size", page_size, 1)
        if bus is not None and not isinstance(bus, ev.EventBus):
            raise ValueError(f"bus must be an EventBus or None, got {said(bus)}")
        self.bus = bus if bus is not None else ev.EventBus()
        self._queue = EvictionQueue(_policy(eviction_policy))
        self._next_id = 1  # ids are never used again, also not after a reset
        self._tick = 0
        self._namespaces: dict[Hashable, int] = {(None, False): 0, (None, True): 0}
        self.version = 0  # of the model's weights: see `bump_version`
        self._plant()

    def _plant(self) -> None:
        self.root = self._Node(0, None, None, b"", b"", RadixKey(()))
        self._evictable = 0
        self._protected = 0

    # -------------------------------------------------------------- looking up

    def _walk(self, key: RadixKey) -> tuple[list[Node], int, Node | None, int]:
        """Follows the key as far as the tree goes, changing nothing.

        Returns the nodes that match whole, the bytes they hold, and, if the walk ended inside a
        further node, that node with the bytes of whole pages that match in it (else None, 0).
        """
        try:
            data, page = key.data, key.width * self.page_size
        except AttributeError:
            raise ValueError(f"a RadixKey is needed, got {said(key)}") from None
        path: list[Node] = []
        pos = 0
        child = self.root.children.get((key.namespace, data[:page]))
        while child is not None:
            edge = child.edge
            end = pos + len(edge)
            if data[pos:end] != edge:
                return path, pos, child, _shared_pages(edge, data, pos, page) * page
            path.append(child)
            pos = end
            # What is left over after the last whole page is shorter than a page: it finds no child.
            child = child.children.get(data[pos : pos + page])
        return path, pos, None, 0

    def peek(self, key: RadixKey) -> int:
        """How many units would match, rounded down to whole pages. Changes nothing, says nothing."""
        _, pos, _, shared = self._walk(key)
        return (pos + shared) // key.width

    def lock_cost(self, key: RadixKey) -> int:
        """How many evictable tokens would become protected if this key's match were locked."""
        path, _, child, shared = self._walk(key)
        cost = sum(len(node) for node in path if node.lock_ref == 0)
        ends_inside = child is not None and child.lock_ref == 0 and child.packed  # else it has no slots here
        return cost + (shared // key.width if ends_inside else 0)

    def match_prefix(self, key: RadixKey, *, count_hit: bool = True) -> MatchResult:
        """The longest prefix of `key` that is in the tree, in whole pages.

        A match that ends inside a node splits it, so that the end of the match is the end of a node
        and can be locked. Touches the path; counts a hit on it unless told not to.
        """
        path, end = self._touch(key, count_hit, NO_PRIORITY)
        if not path:
            return MatchResult(np.empty(0, dtype=np.int64), 0, self.root)
        slots = _unpack([node.packed for node in path])
        return MatchResult(slots, end // key.width, path[-1])

    def path_slots(self, node: Node) -> Slots:
        """All slots from the root down to the end of `node` (a copy)."""
        return _unpack([step.packed for step in reversed(self.path_up(node))])

    def _touch(self, key: RadixKey, hit: bool, priority: int) -> tuple[list[Node], int]:
        """Walks, splits where the walk ends inside a node, and marks the path as just used."""
        path, pos, child, shared = self._walk(key)
        self._tick = tick = self._tick + 1
        if shared and child is not None:
            path.append(self._split(child, shared, tick))
            pos += shared
        if hit:
            for node in path:
                node.last_access = tick
                node.hits += 1
        else:
            for node in path:
                node.last_access = tick
                if node.priority < priority:
                    node.priority = priority
        # Only the end can be a leaf. Policies like mru put it nearer to eviction by this touch.
        if path and not path[-1].children:
            self._queue.offer(path[-1])
        if self.bus.wants(ev.PrefixTouched):
            least = None if priority == NO_PRIORITY else priority
            self.bus.emit(ev.PrefixTouched(tuple(node.id for node in path), tick, hit, least))
        return path, pos

    def _split(self, lower: Node, at: int, tick: int) -> Node:
        """Cuts a node after `at` bytes and returns the new upper half.

        The lower half keeps its id, so whoever holds the node (a lock, a row) still holds the END of
        its path. Both halves count as just used.
        """
        edge, packed, parent = lower.edge, lower.packed, lower.parent
        assert parent is not None
        units = at // lower.width
        cut = units * SLOT_BYTES
        upper = self._Node(self._new_id(), parent, lower.first, edge[:at], packed[:cut], lower)
        upper.lock_ref, upper.hits, upper.priority = lower.lock_ref, lower.hits, lower.priority
        upper.created = lower.created
        parent.children[lower.first] = upper
        lower.first = edge[at : at + self.page_size * lower.width]
        lower.edge, lower.packed, lower.parent = edge[at:], packed[cut:], upper
        upper.children[lower.first] = lower
        upper.last_access = lower.last_access = tick
        self._queue.offer(lower)
        if self.bus.wants(ev.NodeSplit):
            self.bus.emit(ev.NodeSplit(upper.id, lower.id, units, tick))
        return upper

    # -------------------------------------------------------------- putting in

    def insert(self, key: RadixKey, slots: Any, priority: int = 0, grow: Node | None = None) -> InsertResult:
        """Puts a key into the tree; units past the last whole page are ignored.

        slots: one per unit of the key; copied. For the first `prefix_len` units the tree keeps the
        slots that it had: the caller's are duplicates, his to free. Above that the tree owns them.
        grow: the leaf that this request inserted earlier. It is made longer instead of getting a
        child iff the walk ends exactly there, nothing hangs below it and nobody else locks it.
        """
        if not isinstance(key, RadixKey):
            raise ValueError(f"a RadixKey is needed, got {said(key)}")
        slots = as_int64(slots, "slots")
        if type(priority) is not int:
            priority = whole("priority", priority)
        if len(slots) != len(key):
            raise ValueError(f"{len(slots)} slots for a key of {len(key)} units")
        path, pos = self._touch(key, False, priority)
        node = path[-1] if path else self.root
        page = key.width * self.page_size
        end = len(key.data) // page * page
        there = pos // key.width
        prefix_len = self._resident(path, slots, there)
        if pos < end:
            rest, fresh = key.data[pos:end], slots[there : end // key.width].tobytes()
            if grow is node and node.lock_ref <= 1 and not node.children and path and self._open(node):
                self._grow(node, rest, fresh, priority)
            else:
                node = self._add_leaf(node, key, rest, fresh, priority)
        return InsertResult(prefix_len, node)

    def _resident(self, path: list[Node], slots: Slots, there: int) -> int:
        """How many of the `there` units on an insert's path have slots already: here, all."""
        return there

    def _open(self, leaf: Node) -> bool:
        """Whether the request that inserted a leaf may still make it longer."""
        return True

    def _add_leaf(self, parent: Node, key: RadixKey, edge: bytes, packed: bytes, priority: int) -> Node:
        first: Any = edge[: key.width * self.page_size]
        if parent is self.root:
            first = (key.namespace, first)
        leaf = self._Node(self._new_id(), parent, first, edge, packed, key)
        leaf.created = leaf.last_access = self._tick
        leaf.priority = priority
        parent.children[first] = leaf
        self._evictable += len(leaf)
        self._queue.offer(leaf)
        if self.bus.wants(ev.NodeInserted):
            space = self.namespace_number(key.namespace)
            tokens = tuple(np.frombuffer(edge, dtype=np.int32).tolist())
            self.bus.emit(
                ev.NodeInserted(
                    leaf.id, parent.id, tokens, tuple(leaf.slots.tolist()), self._tick, priority, space
                )
            )
        return leaf

    def _grow(self, leaf: Node, edge: bytes, packed: bytes, priority: int) -> None:
        leaf.edge += edge
        leaf.packed += packed
        if leaf.lock_ref:
            self._protected += len(packed) // SLOT_BYTES
        else:
            self._evictable += len(packed) // SLOT_BYTES
        if self.bus.wants(ev.NodeGrown):
            tokens = tuple(np.frombuffer(edge, dtype=np.int32).tolist())
            slots = tuple(np.frombuffer(packed, dtype=np.int64).tolist())
            self.bus.emit(ev.NodeGrown(leaf.id, tokens, slots, self._tick, leaf.priority))

    # -------------------------------------------------------------- holding on

    def _undo(self, node: Node, by: int) -> NoReturn:
        """Only at the top it shows that a node is another tree's: it gets its locks back."""
        step = node
        while step.parent is not None:
            step.lock_ref += by
            step = step.parent
        self._require_mine(node)
        raise AssertionError("unreachable")

    def _require_mine(self, node: Node) -> None:
        """ValueError unless the node is in this tree: not evicted, and not another tree's."""
        step = node
        while isinstance(step, Node) and step.parent is not None:
            step = step.parent
        if step is not self.root:
            name = f"n{node.id}" if isinstance(node, Node) else said(node)
            raise ValueError(f"{name} is not in this tree: evicted, or a node of another one")

    def path_up(self, node: Node) -> list[Node]:
        """The node and all above it, nearest first, the root left out."""
        self._require_mine(node)
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def inc_lock_ref(self, node: Node) -> int:
        """Protects a node and all above it; returns how many tokens that took from the evictable.

        Locking the root does nothing. Every call needs its own `dec_lock_ref`.
        """
        if not isinstance(node, Node):
            raise _no_node(node)
        moved, step = 0, node
        while (parent := step.parent) is not None:
            if step.lock_ref == 0:
                moved += len(step.edge)  # bytes: quicker to ask than the length of an array
            step.lock_ref += 1
            step = parent
        if step is not self.root:
            self._undo(node, -1)
        moved //= node.width
        self._evictable -= moved
        self._protected += moved
        if step is not node and self.bus.wants(ev.NodeLocked):
            path = tuple(step.id for step in self.path_up(node))
            self.bus.emit(ev.NodeLocked(node.id, path, moved))
        return moved

    def dec_lock_ref(self, node: Node) -> int:
        """Takes one lock back; returns how many tokens became evictable by it."""
        if not isinstance(node, Node):
            raise _no_node(node)
        # Above it every node is locked at least as often: this one look is enough for all.
        if node.lock_ref == 0 and node is not self.root:
            self._require_mine(node)
            raise InvariantError(f"n{node.id} is unlocked more often than it was locked")
        moved, step = 0, node
        while (parent := step.parent) is not None:
            step.lock_ref = left = step.lock_ref - 1
            if left == 0:
                moved += len(step.edge)
            step = parent
        if step is not self.root:
            self._undo(node, 1)
        moved //= node.width
        self._evictable += moved
        self._protected -= moved
        self._queue.offer(node)
        if step is not node and self.bus.wants(ev.NodeUnlocked):
            path = tuple(step.id for step in self.path_up(node))
            self.bus.emit(ev.NodeUnlocked(node.id, path, moved))
        return moved

    # -------------------------------------------------------------- letting go

    def evict(self, num_tokens: int) -> EvictResult:
        """Takes whole unlocked leaves out, by policy, until at least `num_tokens` are free.

        A parent becomes a leaf, and a candidate, when its last child has gone. Stops early when
        nothing evictable is left.
        """
        if type(num_tokens) is not int:
            num_tokens = whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise ValueError(f"cannot evict {num_tokens} tokens")
        freed: list[bytes] = []
        total = 0
        while total < num_tokens:
            victim = self._queue.pop()
            if victim is None:
                break
            assert isinstance(victim, Node)
            self._remove(victim)
            freed.append(victim.packed)
            total += len(victim)
        self._evictable -= total
        return EvictResult(total, _unpack(freed))

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.first]
        leaf.parent = None
        if not parent.children:
            self._queue.offer(parent)
        if self.bus.wants(ev.NodeEvicted):
            slots = tuple(leaf.slots.tolist())
            self.bus.emit(ev.NodeEvicted(leaf.id, parent.id, slots, *self._queue.verdict(leaf)))

    def reset(self) -> None:
        """Forgets everything. The caller frees the slots (see `walk`); locks are forgotten too."""
        total = self.total_size
        for node in self.walk():
            node.parent = None
        self._plant()
        self._queue.rebuild(self._queue.policy, ())
        if self.bus.wants(ev.CacheFlushed):
            self.bus.emit(ev.CacheFlushed(total))

    def bump_version(self) -> None:
        """The model's weights changed: whatever is in the tree matches nothing from now on.

        Old nodes stay until they are evicted (rows may still point at them), but go before all others; they
        move into namespaces that no key can name.
        """
        self.version += 1
        numbers: dict[int, int] = {}
        for node in self.walk():
            if node is self.root or node.outdated:
                continue
            old, node.namespace = node.namespace, (*node.namespace, self.version)
            numbers[self.namespace_number(old)] = self.namespace_number(node.namespace)
        children: dict[Any, Node] = {}
        for child in self.root.children.values():
            child.first = (child.namespace, child.first[1])
            children[child.first] = child
        self.root.children = children
        self._change_policy(self.eviction_policy)
        if self.bus.wants(ev.VersionBumped):
            self.bus.emit(ev.VersionBumped(self.version, tuple(numbers), tuple(numbers.values())))

    @property
    def eviction_policy(self) -> str:
        """The policy's name; assigning another changes who is evicted from now on."""
        return self._queue.policy.name

    @eviction_policy.setter
    def eviction_policy(self, name: str) -> None:
        old = self.eviction_policy
        self._change_policy(name)
        if self.bus.wants(ev.PolicyChanged):
            self.bus.emit(ev.PolicyChanged(old, name))

    def _change_policy(self, name: str) -> None:
        self._queue.rebuild(self._policy_now(name), self.walk())

    def _policy_now(self, name: str) -> EvictionPolicy:
        return OutdatedFirst(_policy(name)) if self.version else _policy(name)

    # -------------------------------------------------------------- looking at it

    @property
    def evictable_size(self) -> int:
        """Tokens in unlocked nodes."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Tokens in locked nodes."""
        return self._protected

    @property
    def total_size(self) -> int:
        """Tokens in the tree."""
        return self._evictable + self._protected

    def namespace_number(self, namespace: Hashable) -> int:
        """A small number for a namespace (any hashable does not fit into events and files)."""
        return self._namespaces.setdefault(namespace, len(self._namespaces) - 1)

    def namespace_of(self, number: int) -> Namespace:
        """The namespace with a number; KeyError for one that was never given out."""
        for namespace, known in self._namespaces.items():
            if known == number:
                return namespace  # type: ignore[return-value]
        raise KeyError(number)

    def walk(self) -> Iterator[Node]:
        """All nodes, the root first, parents before children, siblings in order of creation."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(reversed(node.children.values()))

    def snapshot(self) -> dict[str, Any]:
        """The whole tree as plain data, nodes by id, the root left out."""
        nodes = sorted((n for n in self.walk() if n is not self.root), key=lambda n: n.id)
        return {
            "page_size": self.page_size,
            "eviction_policy": self.eviction_policy,
            "tick": self._tick,
            "nodes": [self._describe(node) for node in nodes],
        }

    def _describe(self, node: Node) -> dict[str, Any]:
        assert node.parent is not None
        return {
            "id": node.id,
            "parent": node.parent.id,
            "tokens": np.frombuffer(node.edge, dtype=np.int32).tolist(),
            "slots": node.slots.tolist(),
            "namespace": self.namespace_number(node.namespace),
            "lock_ref": node.lock_ref,
            "last_access": node.last_access,
            "created": node.created,
            "hits": node.hits,
            "priority": node.priority,
        }

    def check(self) -> None:
        """Recomputes what must hold; InvariantError names the node.

        Sizes are sums over the nodes; locks are at least the children's sum; every child is found under
        its first page and namespace; no page is in two nodes; nodes hold whole pages; no evictable leaf
        would be overlooked.
        """
        evictable = protected = 0
        seen: dict[int, int] = {}
        leaves = []
        for node in self.walk():
            for first, child in node.children.items():
                self._check_link(node, first, child)
            if node is self.root:
                continue
            self._check_node(node)
            for page in (node.slots[:: self.page_size] // self.page_size).tolist():
                require(page not in seen, f"page {page} is in n{seen.get(page)} and in n{node.id}")
                seen[page] = node.id
            if node.lock_ref:
                protected += len(node)
            else:
                evictable += len(node)
            if node.evictable:
                leaves.append(node)
        require(evictable == self._evictable, f"evictable is {self._evictable}, counted {evictable}")
        require(protected == self._protected, f"protected is {self._protected}, counted {protected}")
        for leaf in leaves:
            known = leaf.queued is not None and leaf.queued <= self._queue.policy.key(leaf)
            require(known, f"evictable leaf n{leaf.id} would be overlooked by the eviction queue")

    def _check_link(self, node: Node, first: Any, child: Node) -> None:
        page = child.edge[: self.page_size * child.width]
        expected = (child.namespace, page) if node is self.root else page
        require(first == expected == child.first, f"n{child.id} is filed under a wrong first page")
        require(child.parent is node, f"n{child.id} does not know its parent n{node.id}")
        same = node is self.root or child.namespace == node.namespace
        require(same, f"n{child.id} left the namespace of its parent n{node.id}")

    def _check_node(self, node: Node) -> None:
        name, units = f"n{node.id}", node.units
        self._check_units(node)
        whole = units > 0 and units % self.page_size == 0
        require(whole, f"{name} holds {units} units, not whole pages of {self.page_size}")
        below = sum(child.lock_ref for child in node.children.values())
        require(node.lock_ref >= below, f"{name}: lock_ref {node.lock_ref}, children's sum {below}")

    def _check_units(self, node: Node) -> None:
        units, slots = node.units, len(node.slots)
        require(units == slots, f"n{node.id}: {units} units but {slots} slots")

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


_policy = eviction_policy  # the property of the same name hides the function inside the class


def _unpack(packed: list[bytes]) -> Slots:
    """The slots of several nodes in one new array."""
    # A bytearray, not bytes: the array on top of it can be written to, as its new owner may wish.
    slots: Slots = np.frombuffer(bytearray().join(packed), dtype=np.int64)
    return slots


def _shared_pages(edge: bytes, data: bytes, pos: int, page: int) -> int:
    """How many whole pages (of `page` bytes) `edge` and `data` from `pos` on begin with alike."""
    low, high = 0, min(len(edge), len(data) - pos) // page
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(edge[low * page : middle * page], pos + low * page):
            low = middle
        else:
            high = middle - 1
    return low
