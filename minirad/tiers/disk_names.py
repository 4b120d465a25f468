"""What a block of KV on disk is called: a hash of everything that its keys and values depend on.

A block is B units (tokens, or pairs of bigram keys) of a path from the root, B the least multiple of the page
size that is at least 64. Its name is a link of a chain,

    name[i] = SHA-256(name[i - 1], tokens of block i)

so that it says all tokens before it as well. The chain begins with what else the values depend on: this
format, the weights, the namespace, the page size, the kind of keys, the numbers' type and shape. Nothing else
of a process goes in, so that another one finds the same names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirad.cache.node import Slots

FORMAT = "minirad-disk-1"
LEAST_UNITS = 64  # of a block: a file for fewer costs more than computing them
MOST_DEEP = 16  # tuples within tuples of a namespace's key


def block_units(page_size: int) -> int:
    """Units of a block: whole pages, 64 at least."""
    return -(-LEAST_UNITS // page_size) * page_size


class Block(NamedTuple):
    """Which block of KV: its name and its parent's (hex), its own tokens (int64; B, of pairs B + 1)."""

    name: str
    parent: str
    tokens: Slots


@dataclass(frozen=True, slots=True)
class Layout:
    """What a block's KV looks like: `[units, layers, 2, kv_heads, head_dim]` of one dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_bigram: bool = False

    @property
    def tokens(self) -> int:
        """Token ids of a block."""
        return self.shape[0] + self.is_bigram

    @property
    def nbytes(self) -> int:
        """Bytes of a block's KV."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def namespace_digest(extra_key: Hashable) -> bytes | None:
    """The same for an equal `extra_key` in any process; None for one of which that cannot be said.

    None, texts, whole numbers, bytes and tuples of these can. (True and 1 are one key, as in the tree.)
    """
    written = _written(extra_key, MOST_DEEP)
    return None if written is None else hashlib.sha256(written).digest()


def _written(key: Hashable, deep: int) -> bytes | None:
    """A key as bytes, different keys differently: kind, length, value."""
    if type(key) is tuple and deep:
        parts = [_written(each, deep - 1) for each in key]
        known = [each for each in parts if each is not None]
        return _piece(b"t", b"".join(known)) if len(known) == len(parts) else None
    if key is None:
        return _piece(b"n", b"")
    if type(key) is str:
        return _piece(b"s", key.encode("utf-8", "surrogatepass"))
    if isinstance(key, int) and type(key) in (int, bool):
        return _piece(b"i", b"%d" % key)
    return _piece(b"b", key) if type(key) is bytes else None


def _piece(kind: bytes, value: bytes) -> bytes:
    return b"%s%d:%s" % (kind, len(value), value)


def weights_digest(model: Any, *heads: Any) -> bytes:
    """SHA-256 of all weights that keys and values come from: a Llama's, and of draft heads behind it.

    All of them say their shape (`config`); a head has its tensors in attributes, lists and dataclasses.
    """
    digest = hashlib.sha256()
    for each, names in ((model, ("embed", "norm", "head", "layers")), *((h, sorted(vars(h))) for h in heads)):
        digest.update(repr(each.config).encode())
        for name in names:
            _add(digest, name, getattr(each, name))
    return digest.digest()


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        shown: Any = flat.view(torch.uint8).numpy()
        digest.update(shown)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _add(digest, f"{name}.{number}", each)
    elif hasattr(value, "__dataclass_fields__"):
        for each in fields(value):
            _add(digest, f"{name}.{each.name}", getattr(value, each.name))


def chain_start(weights: bytes, namespace: bytes, page_size: int, layout: Layout) -> bytes:
    """What the first block of a path has instead of a parent's hash."""
    what = f"{FORMAT} page {page_size} pairs {layout.is_bigram} {layout.dtype} {layout.shape}"
    return hashlib.sha256(what.encode() + weights + namespace).digest()


def blocks_of(start: bytes, data: bytes, units: int, is_bigram: bool, count: int) -> list[Block]:
    """The first `count` blocks of a path. data: its key's bytes; units: of a block."""
    tokens = np.frombuffer(data, dtype=np.int32).astype("<i8")
    if is_bigram:  # pairs overlap: the first of each, and the second one of the last
        tokens = np.append(tokens[::2], tokens[-1:])
    size, blocks = units + is_bigram, []
    parent = start
    for first in range(0, count * units, units):
        own = tokens[first : first + size]
        name = hashlib.sha256(parent + own.tobytes()).digest()
        blocks.append(Block(name.hex(), parent.hex(), own.astype(np.int64)))
        parent = name
    return blocks
