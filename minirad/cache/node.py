"""What a radix tree is made of: keys (tokens, as bytes) and nodes (an edge of a key, and its slots)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minirad.errors import as_int64, truth

Slots = npt.NDArray[np.int64]
Namespace = tuple[Hashable, ...]  # (extra_key, is_bigram), and of old weights the version, too
IntSequence = Sequence[int] | npt.NDArray[Any]  # torch tensors work too: anything numpy can read

SLOT_BYTES = 8
MAX_TOKEN = 2**31 - 1


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
        self.lock_ref = self.hits = self.priority = 0
        self.created = self.last_access = 0
        self.queued: Any = None  # the key under which the eviction queue knows this node

    @property
    def key(self) -> RadixKey:
        return RadixKey._from_bytes(self.edge, self.namespace, self.width)

    @property
    def slots(self) -> Slots:
        """Where the KV of each unit lies; read-only."""
        return np.frombuffer(self.packed, dtype=np.int64)

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
