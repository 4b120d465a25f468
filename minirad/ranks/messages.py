"""What rank 0 says to the others: inputs, in their order, and what to do then.

A message is one broadcast: 8 bytes of length, then a pickle that rank 0 of the same job wrote. Requests go
as they were checked; an `extra_key` that is not plain goes as a number, a token mask as a sign that there is
one (rank 0 sends its answers).
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.config import SamplingParams
from minirad.schedule.request import Request

# What is to be done when the inputs were taken.
STEP, AHEAD, NOTHING, NEW, BEAT, END = "step", "ahead", "nothing", "new", "beat", "end"


@dataclass(slots=True)
class Message:
    """inputs: (name, arguments) in their order. engine: its number. more: what only some actions need.

    ended: how many copies between the tiers have ended, since the engine began; decisions: what became of
    those that began or ended since the last message. dropped: engines that are gone on rank 0.
    """

    action: str
    engine: int = 0
    inputs: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    ended: int = 0
    dropped: list[int] = field(default_factory=list)
    decisions: list[bool] = field(default_factory=list)
    more: Any = None

    def to_bytes(self) -> bytes:
        return pickle.dumps(tuple(getattr(self, name) for name in Message.__slots__), protocol=5)

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        return cls(*pickle.loads(data))


@dataclass(frozen=True, slots=True)
class KeyElsewhere:
    """Stands for an extra_key that rank 0 alone has."""

    number: int


class MaskElsewhere:
    """Stands for a token mask that rank 0 alone has: its answers come when a batch is read."""

    def __init__(self, ends_reply: bool) -> None:
        self.ends_reply = ends_reply

    def __call__(self, output: list[int]) -> Any:
        raise RuntimeError("rank 0 did not say what a token mask answered")


class Keys:
    """extra_keys as they are sent. Keys that are equal are sent alike (1 and 1.0, say)."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {None: None}

    def sent(self, key: Hashable) -> Any:
        """The key itself if it is plain (None, str, int, tuples of these), else a number for it."""
        if key not in self._known:
            self._known[key] = key if is_plain(key) else KeyElsewhere(len(self._known))
        return self._known[key]


def is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(is_plain, key))
    return key is None or type(key) in (str, int, bool)


@dataclass(slots=True)
class AskedFor:
    """A request that was checked, as it is sent: enough to make it again."""

    prompt: bytes
    params: SamplingParams
    seed: int
    extra_key: Any
    priority: int
    mask: tuple[bool] | None
    is_bigram: bool

    @classmethod
    def of(cls, request: Request, keys: Keys, seed: int) -> AskedFor:
        """seed: what the request had before it got its number."""
        mask = request.token_mask
        return cls(
            request.prompt.astype(np.int32).tobytes(), request.params, seed, keys.sent(request.extra_key),
            request.priority, None if mask is None else (bool(getattr(mask, "ends_reply", False)),),
            request.is_bigram,
        )  # fmt: skip

    def request(self) -> Request:
        prompt = np.frombuffer(self.prompt, dtype=np.int32).astype(np.int64)
        return Request(
            "", prompt, self.params, self.seed, 0, self.extra_key, self.priority,
            token_mask=None if self.mask is None else MaskElsewhere(*self.mask), is_bigram=self.is_bigram,
        )  # fmt: skip
