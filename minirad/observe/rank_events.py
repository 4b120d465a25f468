"""What an engine of several ranks tells: what rank 0 told the others, and whether all agree.

They are told on rank 0 only; that a difference was planted there, by who did it. No recording of one rank has
any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirad.observe.event import Event, Headline, ReplayState, Word, expect
from minirad.observe.events import listed, node_name
from minirad.observe.snapshot import State

MOST_RANKS = 4096
LONGEST_TEXT = 2000  # characters of a sentence on how ranks differ
_NUMBERS, _LISTS, _TEXTS = (
    ("ranks", "step", "told_in", "bytes"), ("requests", "aborts", "other"), ("digest", "differ"),
)  # fmt: skip


def new_ranks(ranks: int) -> State:
    """What a snapshot says of so many ranks before anything was told.

    step, digest: when they agreed last, and on what. told_in, bytes, requests, aborts, other: what was told
    last. differ: how they differ, "" while they do not.
    """
    return {
        **dict.fromkeys(_NUMBERS, 0), **{name: [] for name in _LISTS}, **dict.fromkeys(_TEXTS, ""),
        "ranks": ranks,
    }  # fmt: skip


def check_ranks(said: Any) -> None:
    """ValueError unless this is what a snapshot can say of ranks (in a file from a stranger)."""
    fields = {*_NUMBERS, *_LISTS, *_TEXTS}
    expect(type(said) is dict and set(said) == fields, f"ranks must be an object of {sorted(fields)}")
    for name in _NUMBERS:
        expect(type(said[name]) is int and 0 <= said[name] < 1 << 63, f"ranks: {name} is no number")
    for name in _TEXTS:
        expect(type(said[name]) is str and len(said[name]) <= LONGEST_TEXT, f"ranks: {name} is no short text")
    for name in _LISTS:
        fits = type(said[name]) is list and all(type(each) is str for each in said[name])
        expect(fits, f"ranks: {name} is no list of texts")


def _check(step: int, ranks: int) -> None:
    expect(step >= 0 and 2 <= ranks <= MOST_RANKS, f"{ranks} ranks in step {step}")


@dataclass(frozen=True, slots=True)
class RanksTold(Event):
    """Rank 0 told the others what it was asked for since the last time; never slots, never tokens.

    requests, aborts: ids. other: what else, in words. bytes: of the one broadcast.
    """

    step: int
    requests: tuple[str, ...]
    aborts: tuple[str, ...]
    other: tuple[str, ...]
    bytes: int
    ranks: int

    word, of_ranks = Word("told", small=True), True

    def describe(self) -> str:
        parts = []
        if self.requests:
            parts.append(f"{listed(self.requests)} came")
        if self.aborts:
            parts.append(f"{listed(self.aborts)} aborted")
        parts += self.other
        what = ", ".join(parts) or "nothing new"
        return f"rank 0 tells {self.ranks - 1} other{'s' * (self.ranks > 2)}: {what} ({self.bytes} bytes)"

    def state(self, before: State) -> State:
        """What a snapshot says of the ranks after it, and said before it."""
        told = {"requests": list(self.requests), "aborts": list(self.aborts), "other": list(self.other)}
        return {**before, "ranks": self.ranks, "told_in": self.step, "bytes": self.bytes, **told}

    def apply(self, state: ReplayState) -> None:
        state.rest["ranks"] = self.state(state.rest.get("ranks") or new_ranks(self.ranks))

    def check(self, state: ReplayState) -> None:
        _check(self.step, self.ranks)


@dataclass(frozen=True, slots=True)
class RanksAgreed(Event):
    """At the end of a step all ranks have the same tree, pools, queue and requests. digest: of these, hex."""

    step: int
    digest: str
    ranks: int

    word, of_ranks = Word("agree", small=True), True

    def describe(self) -> str:
        return f"all {self.ranks} ranks agree: {self.digest[:8]}"

    def apply(self, state: ReplayState) -> None:
        state.rest["ranks"] = self.state(state.rest.get("ranks") or new_ranks(self.ranks))

    def state(self, before: State) -> State:
        """What a snapshot says of the ranks after it, and said before it."""
        return {**before, "ranks": self.ranks, "step": self.step, "digest": self.digest}

    def check(self, state: ReplayState) -> None:
        _check(self.step, self.ranks)


@dataclass(frozen=True, slots=True)
class RanksDiffered(Event):
    """A rank is not as rank 0: what, in one sentence. The engine goes no further."""

    step: int
    rank: int
    what: str

    word, headline, colour = Word("differ", "evict"), Headline(100, "evict"), "evict"
    of_ranks = True

    def describe(self) -> str:
        return f"the ranks differ: {self.what}"

    def apply(self, state: ReplayState) -> None:
        state.rest["ranks"] = self.state(state.rest.get("ranks") or new_ranks(self.rank + 1))

    def state(self, before: State) -> State:
        """What a snapshot says of the ranks after it, and said before it."""
        return {**before, "differ": self.what}

    def check(self, state: ReplayState) -> None:
        _check(self.step, self.rank + 1)
        expect(len(self.what) <= LONGEST_TEXT, f"how ranks differ is told in {len(self.what)} characters")


@dataclass(frozen=True, slots=True)
class LockPlanted(Event):
    """Somebody changed a node's lock_ref by hand, and told no other rank: the next digests must differ."""

    node: int
    lock_ref: int

    word, headline, colour = Word("plant", "evict"), Headline(90, "evict"), "evict"
    of_ranks, by_caller = True, "planted differences"

    def describe(self) -> str:
        return f"lock_ref of {node_name(self.node)} was made {self.lock_ref} by hand, no other rank is told"

    def apply(self, state: ReplayState) -> None:
        state.nodes[self.node]["lock_ref"] = self.lock_ref

    def check(self, state: ReplayState) -> None:
        Event.check(self, state)
        expect(0 <= self.lock_ref < 1 << 31, f"a lock_ref of {self.lock_ref} is planted")

    @classmethod
    def together(cls, events: Sequence[LockPlanted]) -> tuple[str, str]:
        last = {event.node: event for event in events}  # of a node, what it is now
        return cls.headline.tone, "; ".join(event.describe() for event in list(last.values())[-2:])


def told(
    step: int, inputs: Sequence[tuple[str, tuple[Any, ...]]], requests: Sequence[str], size: int, ranks: int
) -> RanksTold:
    """The event of a message with these inputs. requests: the ids that the new ones got."""
    aborts = tuple(arguments[0] for name, arguments in inputs if name == "abort")
    other = tuple(WORDS[name].format(*arguments) for name, arguments in inputs if name in WORDS)
    return RanksTold(step, tuple(requests), aborts, other, size, ranks)


WORDS = {
    "pin": "pin {0}", "unpin": "unpin {0}", "flush": "flush", "evict_by": "eviction policy {0}",
    "make_room": "make room for {0}", "poll": "look at the copies", "weights": "new weights",
    "wait_for_copies": "wait for the copies", "watch": "send recordings", "unwatch": "no recordings",
}  # fmt: skip
