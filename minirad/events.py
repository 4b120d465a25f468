"""What the engine tells the world: one small immutable record per decision, and the bus that carries it.

An event holds ids, integers and tuples, never a live node or tensor, so it can be kept, compared,
written to a file and replayed. Each one says itself in one plain sentence (`describe()`), which the
terminal, the event list of the viewer and screen readers all use. The emit sites ask first:

    if bus.wants(NodeSplit):
        bus.emit(NodeSplit(...))

so that with nobody listening nothing is built.

Handlers run at once, in order of subscription, inside the engine's step. They must not change the
engine: they watch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Ints = tuple[int, ...]


def _n(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def node_name(node: int | None) -> str:
    """How sentences and pictures call a node: n7; the root is called root."""
    return "the root" if not node else f"n{node}"


def _next(runner_up: int | None) -> str:
    """Whom an eviction would have taken next."""
    return f", next would be {node_name(runner_up)}" if runner_up else ""


@dataclass(frozen=True, slots=True)
class Event:
    """Base class: every event is one immutable record with a sentence."""

    def describe(self) -> str:
        """One plain English sentence, without a final full stop."""
        raise NotImplementedError


# ------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True)
class RequestAdded(Event):
    """A request joined the waiting queue; enough to submit it again elsewhere.

    `namespace` 0 is the default one (extra_key None).
    """

    request: str
    token_ids: Ints
    max_new_tokens: int
    temperature: float
    n: int
    priority: int
    namespace: int
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    ignore_eos: bool
    seed: int | None
    logprob_start: int | None
    stop_token_ids: Ints = ()  # last: recordings from before it are shorter

    def describe(self) -> str:
        space = f" in namespace {self.namespace}" if self.namespace else ""
        samples = f", {self.n} samples" if self.n > 1 else ""
        return (
            f"{self.request} waits: {_n(len(self.token_ids), 'prompt token')}, "
            f"up to {self.max_new_tokens} new{samples}{space}"
        )


@dataclass(frozen=True, slots=True)
class RequestAdmitted(Event):
    """A request got a row. `matched` tokens are in the tree, of which `cached` slots are used.

    The two differ because one token at least is always computed, and by the floor to whole pages.
    `length` is what has to be in the pool before the next token can be sampled: the prompt, and
    after a retraction also the tokens generated before it. `attempt` counts admissions from 1.
    """

    request: str
    row: int
    node: int
    matched: int
    cached: int
    length: int
    attempt: int

    def describe(self) -> str:
        again = f" (attempt {self.attempt})" if self.attempt > 1 else ""
        return (
            f"{self.request} matched {self.matched} of {_n(self.length, 'token')}, "
            f"{self.length - self.cached} to compute{again}"
        )


@dataclass(frozen=True, slots=True)
class RequestDeferred(Event):
    """A waiting request was looked at and left waiting."""

    request: str
    reason: str

    def describe(self) -> str:
        return f"{self.request} has to wait: {self.reason}"


@dataclass(frozen=True, slots=True)
class RequestForked(Event):
    """A sample of an `n > 1` request took its own row, sharing its leader's tree path.

    `copied`: how many slots of a partial last page had to be copied (none where the prompt ends with
    its page). row -1: there was no room, the sample waits for it.
    """

    request: str
    leader: str
    row: int
    copied: int

    def describe(self) -> str:
        if self.row < 0:
            return f"{self.request} branches off {self.leader} and has to wait for room"
        tail = f", {_n(self.copied, 'tail slot')} copied" if self.copied else ""
        return f"{self.request} branches off {self.leader} in row {self.row}{tail}"


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """KV that was computed became the tree's: the number line of schedule/ownership.py.

    Of the request's first `committed` tokens, `prefix_len` were in the tree already (those computed
    twice are freed and the row points at the tree's slots), the rest up to the last whole page is
    new in the tree and ends at `node`. With `finished` the row is given up, tail and all.
    """

    request: str
    node: int
    prefix_len: int
    aligned: int
    committed: int
    finished: bool

    def describe(self) -> str:
        new = self.aligned - self.prefix_len
        tail = self.committed - self.aligned
        rest = f", tail of {tail} {'freed' if self.finished else 'kept private'}" if tail else ""
        return (
            f"{self.request} committed {_n(self.committed, 'token')} up to "
            f"{node_name(self.node)}: {self.prefix_len} were there, {max(new, 0)} new{rest}"
        )


@dataclass(frozen=True, slots=True)
class TokenSampled(Event):
    """A new token of a request. It has no KV yet: that is computed when it is fed back."""

    request: str
    token: int
    position: int

    def describe(self) -> str:
        return f"{self.request} sampled token {self.token} at position {self.position}"


@dataclass(frozen=True, slots=True)
class RequestRetracted(Event):
    """A running request gave its private slots back, and waits again.

    by: the request of larger priority that pushed it out; "": there was no room for all to decode.
    """

    request: str
    freed: int
    generated: int
    by: str = ""

    def describe(self) -> str:
        why = f" for {self.by}, which has priority," if self.by else ""
        return (
            f"{self.request} retracted{why} after {_n(self.generated, 'new token')}: "
            f"{_n(self.freed, 'private slot')} back to the pool"
        )


@dataclass(frozen=True, slots=True)
class RequestAborted(Event):
    """A request was cancelled; what of it was in the tree stays there."""

    request: str
    freed: int

    def describe(self) -> str:
        return f"{self.request} aborted, {_n(self.freed, 'private slot')} freed"


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request is done. reason: "stop", "length" or "error"."""

    request: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    def describe(self) -> str:
        return (
            f"{self.request} finished ({self.reason}): {_n(self.new_tokens, 'new token')}, "
            f"{self.cached_tokens} of {_n(self.prompt_tokens, 'prompt token')} from the cache"
        )


# ------------------------------------------------------------------ the tree


@dataclass(frozen=True, slots=True)
class PrefixTouched(Event):
    """A match (hit=True where it counts as one) or an insert walked `path` at clock `tick`.

    `priority`: an insert's, which its path has at least from now on; None for a match.
    """

    path: Ints
    tick: int
    hit: bool
    priority: int | None

    def describe(self) -> str:
        if not self.path:
            return f"nothing of the key is in the tree (tick {self.tick})"
        walk = " → ".join(node_name(node) for node in self.path)
        return f"{walk} {'hit' if self.hit else 'touched'} at tick {self.tick}"


@dataclass(frozen=True, slots=True)
class NodeInserted(Event):
    """A new leaf. `tokens` are its key units, flattened (pairs in a tree of bigram keys)."""

    node: int
    parent: int
    tokens: Ints
    slots: Ints
    tick: int
    priority: int
    namespace: int

    def describe(self) -> str:
        return (
            f"{_n(len(self.slots), 'token')} inserted as {node_name(self.node)} "
            f"below {node_name(self.parent)}"
        )


@dataclass(frozen=True, slots=True)
class NodeGrown(Event):
    """A leaf was made longer by the request that had inserted it."""

    node: int
    tokens: Ints
    slots: Ints
    tick: int
    priority: int

    def describe(self) -> str:
        return f"{node_name(self.node)} grew by {_n(len(self.slots), 'token')}"


@dataclass(frozen=True, slots=True)
class NodeSplit(Event):
    """A node became two: `upper` is new and holds the first `at` tokens, `lower` kept its id."""

    upper: int
    lower: int
    at: int
    tick: int

    def describe(self) -> str:
        return f"{node_name(self.lower)} split at {self.at}: {node_name(self.upper)} is its upper half"


@dataclass(frozen=True, slots=True)
class NodeLocked(Event):
    """`node` and all above it were locked once; `moved` tokens became protected."""

    node: int
    path: Ints
    moved: int

    def describe(self) -> str:
        return f"path to {node_name(self.node)} locked: {_n(self.moved, 'token')} more protected"


@dataclass(frozen=True, slots=True)
class NodeUnlocked(Event):
    """`node` and all above it were unlocked once; `moved` tokens became evictable."""

    node: int
    path: Ints
    moved: int

    def describe(self) -> str:
        return f"path to {node_name(self.node)} unlocked: {_n(self.moved, 'token')} more evictable"


@dataclass(frozen=True, slots=True)
class NodeEvicted(Event):
    """A leaf left the tree. `reason` says the policy's key in words; `runner_up` would be next."""

    node: int
    parent: int
    slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    def describe(self) -> str:
        free = _n(len(self.slots), "slot")
        return f"{node_name(self.node)} evicted, {free} free: {self.reason}{_next(self.runner_up)}"


@dataclass(frozen=True, slots=True)
class BackupStarted(Event):
    """A copy of `node` to host memory is under way; until it is done the node is locked."""

    node: int
    host_slots: Ints

    def describe(self) -> str:
        return f"copy of {node_name(self.node)} to the host begins: {_n(len(self.host_slots), 'token')}"


@dataclass(frozen=True, slots=True)
class BackupEnded(Event):
    """The copy of `nodes` (one, or the parts that it was split into meanwhile) is done, or failed.

    What failed is no copy: its host slots are free again.
    """

    nodes: Ints
    ok: bool

    def describe(self) -> str:
        names = ", ".join(map(node_name, self.nodes))
        return f"{names} copied to the host" if self.ok else f"copy of {names} failed: no copy is kept"


@dataclass(frozen=True, slots=True)
class NodeDemoted(Event):
    """A node's device slots were evicted; its KV stays in host memory and the node in the tree."""

    node: int
    slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    def describe(self) -> str:
        return (
            f"{node_name(self.node)} lives on the host only, {_n(len(self.slots), 'slot')} free: "
            f"{self.reason}{_next(self.runner_up)}"
        )


@dataclass(frozen=True, slots=True)
class LoadStarted(Event):
    """The KV of `nodes` (top first) is coming back from the host into `slots`, which they own now."""

    nodes: Ints
    slots: Ints

    def describe(self) -> str:
        names = " → ".join(map(node_name, self.nodes))
        return f"{names} loaded back from the host: {_n(len(self.slots), 'token')} not computed again"


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """The KV of `nodes` has arrived; their host copies may go again."""

    nodes: Ints

    def describe(self) -> str:
        return f"{', '.join(map(node_name, self.nodes))} arrived from the host"


@dataclass(frozen=True, slots=True)
class NodeAdopted(Event):
    """A node that lived on the host only was computed again: an insert gave it slots."""

    node: int
    slots: Ints

    def describe(self) -> str:
        return f"{node_name(self.node)} was computed again and has {_n(len(self.slots), 'slot')} again"


@dataclass(frozen=True, slots=True)
class HostEvicted(Event):
    """A node that lived on the host only left the tree."""

    node: int
    parent: int
    host_slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    def describe(self) -> str:
        return (
            f"{node_name(self.node)} evicted from the host, {_n(len(self.host_slots), 'host slot')} free: "
            f"{self.reason}{_next(self.runner_up)}"
        )


@dataclass(frozen=True, slots=True)
class VersionBumped(Event):
    """The model's weights changed: nodes of the old ones moved to namespaces that nobody can name.

    old, new: the number of each namespace that had nodes, and the one that they are in now.
    """

    version: int
    old: Ints
    new: Ints

    def describe(self) -> str:
        return f"weights version {self.version}: nothing that was cached before matches any more"


@dataclass(frozen=True, slots=True)
class PolicyChanged(Event):
    """From now on victims are chosen by another policy."""

    old: str
    new: str

    def describe(self) -> str:
        return f"eviction policy changed from {self.old} to {self.new}"


@dataclass(frozen=True, slots=True)
class CacheFlushed(Event):
    """The tree was emptied."""

    tokens: int

    def describe(self) -> str:
        return f"cache flushed: {_n(self.tokens, 'token')} forgotten"


# ------------------------------------------------------------------ pool and batch


@dataclass(frozen=True, slots=True)
class SlotsAllocated(Event):
    """A request's row was made longer by these slots, which it owns until a commit.

    A page that is entered is owned whole; only the slots in use are listed.
    """

    request: str
    slots: Ints

    def describe(self) -> str:
        return f"{_n(len(self.slots), 'slot')} allocated for {self.request}"


@dataclass(frozen=True, slots=True)
class SlotsFreed(Event):
    """Slots went back to the free list. cause: evicted, duplicate, tail, released or flushed."""

    slots: Ints
    cause: str

    def describe(self) -> str:
        return f"{_n(len(self.slots), 'slot')} freed ({self.cause})"


@dataclass(frozen=True, slots=True)
class BatchScheduled(Event):
    """What the next forward pass computes: `tokens[i]` new tokens of `requests[i]`."""

    kind: str
    requests: tuple[str, ...]
    tokens: Ints

    def describe(self) -> str:
        who = ", ".join(self.requests)
        return f"{self.kind} batch of {_n(sum(self.tokens), 'token')}: {who}"


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The books of the step. Token counts are of the pool; `seconds` is wall-clock time."""

    step: int
    kind: str
    free: int
    evictable: int
    protected: int
    private: int
    seconds: float

    def describe(self) -> str:
        return (
            f"step {self.step} ({self.kind}): {self.protected} protected, {self.evictable} "
            f"evictable, {self.private} private, {self.free} free"
        )


EVENT_TYPES: tuple[type[Event], ...] = (
    RequestAdded, RequestAdmitted, RequestDeferred, RequestForked, Committed, TokenSampled,
    RequestRetracted, RequestAborted, RequestFinished, PrefixTouched, NodeInserted, NodeGrown,
    NodeSplit, NodeLocked, NodeUnlocked, NodeEvicted, BackupStarted, BackupEnded, NodeDemoted,
    LoadStarted, LoadEnded, NodeAdopted, HostEvicted, VersionBumped, PolicyChanged, CacheFlushed,
    SlotsAllocated, SlotsFreed, BatchScheduled, StepEnded,
)  # fmt: skip

Handler = Callable[[Any], None]


class EventBus:
    """Carries events from the engine to whoever subscribed. Synchronous and in order."""

    def __init__(self) -> None:
        self._all: list[Handler] = []
        self._by_type: dict[type[Event], list[Handler]] = {}
        # What `wants` asks: one set look-up, so that an idle emit site costs tens of nanoseconds.
        self._wanted: set[type[Event]] = set()
        self._failures: list[BaseException] | None = None  # None: a handler's error is raised at once

    def wants(self, kind: type[Event]) -> bool:
        """True when somebody listens to events of this type."""
        return kind in self._wanted

    @property
    def quiet(self) -> bool:
        """Nobody listens to anything."""
        return not self._wanted

    def emit(self, event: Event) -> None:
        """Hands one event to its listeners, those of its own type first."""
        for handler in (*self._by_type.get(type(event), ()), *self._all):
            try:
                handler(event)
            except BaseException as error:
                if self._failures is None:
                    raise
                self._failures.append(error)

    def hold_failures(self) -> None:
        """From now on a handler's error is kept: whoever emits is in the middle of something."""
        self._failures = []

    def release_failures(self) -> list[BaseException]:
        """Ends `hold_failures`; returns what handlers raised meanwhile."""
        failures, self._failures = self._failures or [], None
        return failures

    def subscribe(self, kind: type[Event] | None, handler: Handler) -> Callable[[], None]:
        """Calls `handler(event)` for each event of `kind` (None: of every kind).

        Returns a function that ends the subscription; calling it twice does no harm.
        """
        if kind is not None and not any(kind is known for known in EVENT_TYPES):
            raise ValueError(f"{kind!r} is no event type: one of minirad.events.EVENT_TYPES, or None for all")
        if not callable(handler):
            raise ValueError(f"a handler is called with each event, and {handler!r} cannot be called")
        handlers = self._all if kind is None else self._by_type.setdefault(kind, [])
        handlers.append(handler)
        self._refresh()
        active = True

        def unsubscribe() -> None:
            nonlocal active
            if active:  # one handler may be subscribed twice: each subscription ends by itself
                active = False
                handlers.remove(handler)
                self._refresh()

        return unsubscribe

    def _refresh(self) -> None:
        listened = {kind for kind, handlers in self._by_type.items() if handlers}
        self._wanted = set(EVENT_TYPES) if self._all else listened
