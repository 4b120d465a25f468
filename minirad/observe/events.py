"""Every kind of event that the engine tells, all that is known about each in one place.

An event holds ids, integers and tuples, never a live node or tensor, so it can be kept, compared, written
to a file and replayed. Each class has its fields (the order is that of recordings: a new field comes last
and has a default), its sentence (`describe`, which the terminal, the event lists and screen readers use),
what it does to a state (`apply`), what must hold before that in a file from a stranger (`check`), what it
says to a router (`to_blocks`), and how it is drawn. event.py says what each of these is and what a kind
that says nothing gets.

A new kind of event is a class here and the line that emits it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from minirad.observe.bus import EventBus as EventBus
from minirad.observe.event import CPU, GPU, BlockStream, ReplayState, check_host_slots, expect, request_order
from minirad.observe.event import EVENT_TYPES as EVENT_TYPES
from minirad.observe.event import Event as Event
from minirad.observe.event import Headline as Headline
from minirad.observe.event import Ints as Ints
from minirad.observe.event import Word as Word
from minirad.observe.snapshot import State, path_of, units


def _n(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def node_name(node: int | None) -> str:
    """How sentences and pictures call a node: n7; the root is called root."""
    return "the root" if not node else f"n{node}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """R1, R2 and R3; where there are more than `most`: R1, R2, R3 and 4 more."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _next(runner_up: int | None) -> str:
    """The node that an eviction would have taken next."""
    return f", next would be {node_name(runner_up)}" if runner_up else ""


def nodes_named(events: Sequence[Any]) -> str:
    """Their nodes, each once, as a list in words."""
    return listed(list(dict.fromkeys(node_name(event.node) for event in events)))


def _names_and_slots(events: Sequence[Any]) -> tuple[str, int]:
    return nodes_named(events), sum(len(event.slots) for event in events)


def _requests(events: Sequence[Any]) -> tuple[str, int]:
    """Their requests, each once, as a list in words; and how many these are."""
    names = list(dict.fromkeys(event.request for event in events))
    return listed(names), len(names)


def _forget_request(state: ReplayState, request: str) -> None:
    del state.requests[request]
    if request in state.waiting:
        state.waiting.remove(request)


def _check_units(event: NodeInserted | NodeGrown, state: ReplayState) -> None:
    """Its tokens are one id or two (bigram keys) for each slot."""
    size = len(event.slots)
    state.expect_slots(event, event.slots)
    expect(
        size > 0 and len(event.tokens) in (size, 2 * size),
        f"node {event.node} gets {len(event.tokens)} tokens and {size} slots",
    )


def _check_tier(event: Event, state: ReplayState, nodes: Ints) -> None:
    """There is a second tier, and the nodes are there."""
    expect(state.tiers, f"{type(event).__name__}: this tree has no host tier")
    for number in nodes:
        expect(number in state.nodes, f"there is no node {number}")
    state.expect_slots(event, getattr(event, "slots", ()))


def _check_count(event: Event, wanted: int, found: int) -> None:
    expect(wanted == found, f"{type(event).__name__} brings {found} slots for {wanted} tokens")


# ------------------------------------------------------------------ requests


@dataclass(frozen=True, slots=True)
class RequestAdded(Event):
    """A request joined the waiting queue; enough to submit it again elsewhere.

    `namespace` 0 is the default one (extra_key None). lora: the adapter that it runs under, "" for none.
    masked: a grammar, or another function that no event can hold, says which tokens its reply may have.
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
    lora: str = ""
    masked: bool = False

    word, headline = Word("queue"), Headline(20)

    @classmethod
    def of(cls, request: Any, namespace: int) -> RequestAdded:
        """Of a schedule.request.Request and its namespace's number."""
        asked = request.params
        return cls(
            request.id, tuple(request.prompt.tolist()), asked.max_new_tokens, asked.temperature, asked.n,
            request.priority, namespace, asked.top_p, asked.top_k, tuple(asked.stop), asked.ignore_eos,
            asked.seed, asked.logprob_start, asked.stop_token_ids, getattr(request.extra_key, "adapter", ""),
            request.token_mask is not None,
        )  # fmt: skip

    def describe(self) -> str:
        space = f" in namespace {self.namespace}" if self.namespace else ""
        space = f" under adapter {self.lora}" if self.lora else space
        samples = f", {self.n} samples" if self.n > 1 else ""
        return (
            f"{self.request} waits: {_n(len(self.token_ids), 'prompt token')}, "
            f"up to {self.max_new_tokens} new{samples}{space}"
        )

    def apply(self, state: ReplayState) -> None:
        count = len(self.token_ids)
        state.requests[self.request] = {
            "row": -1, "node": None, "slots": [], "protected": 0, "prompt_tokens": count,
            "length": count, "cached": 0, "attempts": 0, "priority": self.priority,
        }  # fmt: skip
        state.waiting.append(self.request)

    def check(self, state: ReplayState) -> None:
        expect(self.request not in state.requests, f"request {self.request} is added twice")
        expect(bool(self.token_ids), f"request {self.request} has an empty prompt")

    @classmethod
    def together(cls, events: Sequence[RequestAdded]) -> tuple[str, str]:
        names, count = _requests(events)
        return cls.headline.tone, f"{names} wait" if count > 1 else events[-1].describe()


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

    word, headline, status = Word("admit", "hit"), Headline(120), "hit"
    begins_scene = is_turn = True

    @classmethod
    def of(cls, request: Any, matched: int, cached: int) -> RequestAdmitted:
        place = request.id, request.row, request.node.id
        return cls(*place, matched, cached, request.length, request.attempts)

    def describe(self) -> str:
        again = f" (attempt {self.attempt})" if self.attempt > 1 else ""
        return (
            f"{self.request} matched {self.matched} of {_n(self.length, 'token')}, "
            f"{self.length - self.cached} to compute{again}"
        )

    def apply(self, state: ReplayState) -> None:
        request = state.requests[self.request]
        slots = state.path_slots(self.node)[: self.cached]
        request.update(row=self.row, node=self.node, slots=slots, protected=self.cached)
        request["attempts"] = self.attempt
        if self.attempt == 1:
            request["cached"] = self.cached
        state.waiting.remove(self.request)

    def check(self, state: ReplayState) -> None:
        Event.check(self, state)
        expect(
            0 <= self.cached <= self.length and self.length > 0,
            f"{self.request} is admitted with {self.cached} of {self.length} tokens cached",
        )

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return path_of(nodes, self.node) if self.matched else ()

    def tone(self) -> str:
        return "hit" if self.cached else "new"

    @classmethod
    def together(cls, events: Sequence[RequestAdmitted]) -> tuple[str, str]:
        if len(events) == 1:
            return events[0].tone(), events[0].describe()
        cached, length = sum(e.cached for e in events), sum(e.length for e in events)
        names = listed([e.request for e in events])
        text = f"{names} admitted: {cached} of {length} tokens from the cache, {length - cached} to compute"
        return "hit" if cached else "new", text


@dataclass(frozen=True, slots=True)
class RequestDeferred(Event):
    """A waiting request was looked at and left waiting."""

    request: str
    reason: str

    word, headline = Word("defer", "wait"), Headline(30)

    def describe(self) -> str:
        return f"{self.request} has to wait: {self.reason}"

    @classmethod
    def together(cls, events: Sequence[RequestDeferred]) -> tuple[str, str]:
        names, count = _requests(events)
        return cls.headline.tone, f"{names} have to wait" if count > 1 else events[-1].describe()


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

    word = Word("fork", "commit")

    def describe(self) -> str:
        if self.row < 0:
            return f"{self.request} branches off {self.leader} and has to wait for room"
        tail = f", {_n(self.copied, 'tail slot')} copied" if self.copied else ""
        return f"{self.request} branches off {self.leader} in row {self.row}{tail}"

    def apply(self, state: ReplayState) -> None:
        leader = state.requests[self.leader]
        sample = {**leader, "length": leader["prompt_tokens"]}
        if self.row < 0:
            sample.update(row=-1, node=None, slots=[], protected=0)
            state.waiting.append(self.request)
        else:
            sample.update(row=self.row, slots=leader["slots"][: leader["protected"]])
        state.requests[self.request] = sample

    def check(self, state: ReplayState) -> None:
        expect(self.leader in state.requests, f"there is no request {self.leader}")
        expect(self.request not in state.requests, f"request {self.request} is added twice")

    def about(self) -> tuple[str, ...]:
        return self.request, self.leader


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

    word = Word("commit", "commit")

    def describe(self) -> str:
        new = self.aligned - self.prefix_len
        tail = self.committed - self.aligned
        rest = f", tail of {tail} {'freed' if self.finished else 'kept private'}" if tail else ""
        return (
            f"{self.request} committed {_n(self.committed, 'token')} up to "
            f"{node_name(self.node)}: {self.prefix_len} were there, {max(new, 0)} new{rest}"
        )

    def apply(self, state: ReplayState) -> None:
        request = state.requests[self.request]
        request["slots"][: self.aligned] = state.path_slots(self.node)[: self.aligned]
        request["protected"] = self.aligned
        request["node"] = self.node


@dataclass(frozen=True, slots=True)
class TokenSampled(Event):
    """A new token of a request. It has no KV yet: that is computed when it is fed back."""

    request: str
    token: int
    position: int

    word, colour = Word("sample", small=True), "decode"

    def describe(self) -> str:
        return f"{self.request} sampled token {self.token} at position {self.position}"

    def apply(self, state: ReplayState) -> None:
        state.requests[self.request]["length"] = self.position + 1

    def says(self) -> Ints:
        return (self.token,)


@dataclass(frozen=True, slots=True)
class RequestRetracted(Event):
    """A running request gave its private slots back, and waits again.

    by: the request of larger priority that pushed it out; "": there was no room for all to decode.
    """

    request: str
    freed: int
    generated: int
    by: str = ""

    word, headline, mark = Word("retract", "evict"), Headline(130, "retract"), "retract"

    def describe(self) -> str:
        why = f" for {self.by}, which has priority," if self.by else ""
        return (
            f"{self.request} retracted{why} after {_n(self.generated, 'new token')}: "
            f"{_n(self.freed, 'private slot')} back to the pool"
        )

    def apply(self, state: ReplayState) -> None:
        state.requests[self.request].update(row=-1, node=None, slots=[], protected=0)
        state.waiting.append(self.request)

    @classmethod
    def together(cls, events: Sequence[RequestRetracted]) -> tuple[str, str]:
        return cls.headline.tone, "; ".join(e.describe() for e in events[:2])


@dataclass(frozen=True, slots=True)
class RequestAborted(Event):
    """A request was cancelled; its part that was in the tree stays there."""

    request: str
    freed: int

    word, headline, by_caller = Word("abort", "evict"), Headline(10), "aborts"

    def describe(self) -> str:
        return f"{self.request} aborted, {_n(self.freed, 'private slot')} freed"

    def apply(self, state: ReplayState) -> None:
        _forget_request(state, self.request)

    @classmethod
    def together(cls, events: Sequence[RequestAborted]) -> tuple[str, str]:
        names, freed = _requests(events)[0], sum(e.freed for e in events)
        return cls.headline.tone, f"{names} aborted, {_n(freed, 'private slot')} freed"


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request is done. reason: "stop", "length" or "error"."""

    request: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int

    word, headline, colour = Word("finish", "new"), Headline(100, "finish"), "finish"

    @classmethod
    def of(cls, request: Any, reason: str) -> RequestFinished:
        """Of a schedule.request.Request."""
        sizes = len(request.prompt), request.cached_tokens, len(request.output)
        return cls(request.id, reason, *sizes)

    def describe(self) -> str:
        return (
            f"{self.request} finished ({self.reason}): {_n(self.new_tokens, 'new token')}, "
            f"{self.cached_tokens} of {_n(self.prompt_tokens, 'prompt token')} from the cache"
        )

    def apply(self, state: ReplayState) -> None:
        _forget_request(state, self.request)

    @classmethod
    def together(cls, events: Sequence[RequestFinished]) -> tuple[str, str]:
        reasons = ", ".join(sorted({e.reason for e in events}))
        return cls.headline.tone, f"{listed([e.request for e in events])} finished ({reasons})"


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

    word, status = Word("touch", "hit", small=True), "hit"

    def describe(self) -> str:
        if not self.path:
            return f"nothing of the key is in the tree (tick {self.tick})"
        walk = " → ".join(node_name(node) for node in self.path)
        return f"{walk} {'hit' if self.hit else 'touched'} at tick {self.tick}"

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        for number in self.path:
            node = state.nodes[number]
            node["last_access"] = self.tick
            node["hits"] += self.hit
            if self.priority is not None:
                node["priority"] = max(node["priority"], self.priority)

    def touches(self) -> Ints:
        return self.path

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return self.path if self.hit else ()

    def tone(self) -> str:
        return "hit" if self.hit else ""


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

    word, status, colour = Word("insert", "new"), "new", "new"

    def describe(self) -> str:
        return (
            f"{_n(len(self.slots), 'token')} inserted as {node_name(self.node)} "
            f"below {node_name(self.parent)}"
        )

    def apply(self, state: ReplayState) -> None:
        state.tree["tick"] = self.tick
        state.nodes[self.node] = {
            "id": self.node, "parent": self.parent, "tokens": list(self.tokens),
            "slots": list(self.slots), "namespace": self.namespace, "lock_ref": 0,
            "last_access": self.tick, "created": self.tick, "hits": 0,
            "priority": self.priority,
            **({"host": [], "copying": False, "loading": False} if state.tiers else {}),
        }  # fmt: skip

    def check(self, state: ReplayState) -> None:
        expect(self.node > 0 and self.node not in state.nodes, f"node {self.node} is inserted twice")
        state.expect_node(self.parent)
        _check_units(self, state)

    def to_blocks(self, stream: BlockStream) -> None:
        stream.insert(self.node, self.parent, self.namespace, self.tokens, len(self.slots))

    @classmethod
    def several(cls, events: Sequence[NodeInserted]) -> str:
        names, slots = _names_and_slots(events)
        return f"{_n(slots, 'token')} inserted as {names}"


@dataclass(frozen=True, slots=True)
class NodeGrown(Event):
    """A leaf was made longer by the request that had inserted it."""

    node: int
    tokens: Ints
    slots: Ints
    tick: int
    priority: int

    word, status, colour = Word("grow", "grown"), "grown", "new"

    def describe(self) -> str:
        return f"{node_name(self.node)} grew by {_n(len(self.slots), 'token')}"

    def apply(self, state: ReplayState) -> None:
        node = state.nodes[self.node]
        node["tokens"] += self.tokens
        node["slots"] += self.slots

    def check(self, state: ReplayState) -> None:
        expect(self.node in state.nodes, f"there is no node {self.node}")
        _check_units(self, state)

    def to_blocks(self, stream: BlockStream) -> None:
        stream.grow(self.node, self.tokens, len(self.slots))

    @classmethod
    def together(cls, events: Sequence[NodeGrown]) -> tuple[str, str]:
        names, slots = _names_and_slots(events)
        return cls.headline.tone, f"{names} grew by {_n(slots, 'token')}"


@dataclass(frozen=True, slots=True)
class NodeSplit(Event):
    """A node became two: `upper` is new and holds the first `at` tokens, `lower` kept its id."""

    upper: int
    lower: int
    at: int
    tick: int

    word, headline = Word("split", "split"), Headline(110, "split")
    mark, status = "split", "split"

    def describe(self) -> str:
        return f"{node_name(self.lower)} split at {self.at}: {node_name(self.upper)} is its upper half"

    def apply(self, state: ReplayState) -> None:
        lower = state.nodes[self.lower]
        cut = self.at * (len(lower["tokens"]) // units(lower))  # 2 ids a unit in a tree of bigram keys
        upper = {**lower, "id": self.upper, "last_access": self.tick}
        upper["tokens"], upper["slots"] = lower["tokens"][:cut], lower["slots"][: self.at]
        lower.update(
            parent=self.upper, last_access=self.tick, tokens=lower["tokens"][cut:],
            slots=lower["slots"][self.at :],
        )  # fmt: skip
        if state.tiers:
            upper["host"], lower["host"] = upper["host"][: self.at], lower["host"][self.at :]
        state.nodes[self.upper] = upper

    def check(self, state: ReplayState) -> None:
        expect(self.lower in state.nodes, f"there is no node {self.lower}")
        expect(self.upper not in state.nodes, f"node {self.upper} is made twice")
        size = units(state.nodes[self.lower])
        expect(0 < self.at < size, f"node {self.lower} of {size} tokens is split at {self.at}")

    def to_blocks(self, stream: BlockStream) -> None:
        stream.split(self.upper, self.lower, self.at)

    def touches(self) -> Ints:
        return self.upper, self.lower

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return (self.upper,)

    def split_off(self) -> tuple[int, int] | None:
        return self.upper, self.lower

    @classmethod
    def together(cls, events: Sequence[NodeSplit]) -> tuple[str, str]:
        return cls.headline.tone, "; ".join(e.describe() for e in events[:2])


@dataclass(frozen=True, slots=True)
class NodeLocked(Event):
    """`node` and all above it were locked once; `moved` tokens became protected."""

    node: int
    path: Ints
    moved: int

    word = Word("lock", "lock", small=True)

    def describe(self) -> str:
        return f"path to {node_name(self.node)} locked: {_n(self.moved, 'token')} more protected"

    def apply(self, state: ReplayState) -> None:
        for number in self.path:
            state.nodes[number]["lock_ref"] += 1

    def touches(self) -> Ints:
        return self.path


@dataclass(frozen=True, slots=True)
class NodeUnlocked(Event):
    """`node` and all above it were unlocked once; `moved` tokens became evictable."""

    node: int
    path: Ints
    moved: int

    word = Word("unlock", "lock", small=True)

    def describe(self) -> str:
        return f"path to {node_name(self.node)} unlocked: {_n(self.moved, 'token')} more evictable"

    def apply(self, state: ReplayState) -> None:
        for number in self.path:
            state.nodes[number]["lock_ref"] -= 1

    def touches(self) -> Ints:
        return self.path


@dataclass(frozen=True, slots=True)
class NodeEvicted(Event):
    """A leaf left the tree. `reason` says the policy's key in words; `runner_up` would be next."""

    node: int
    parent: int
    slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    word, headline = Word("evict", "evict"), Headline(160, "evict")
    mark, status, victim = "evict", "evicted", "evicted"

    def describe(self) -> str:
        freed = _n(len(self.slots), "slot")
        return f"{node_name(self.node)} evicted, {freed} freed: {self.reason}{_next(self.runner_up)}"

    def apply(self, state: ReplayState) -> None:
        del state.nodes[self.node]

    def to_blocks(self, stream: BlockStream) -> None:
        stream.remove(self.node, GPU, forget=True)

    @classmethod
    def several(cls, events: Sequence[NodeEvicted]) -> str:
        names, slots = _names_and_slots(events)
        each = f"each the {events[-1].policy} policy's next unlocked leaf"
        return f"{names} evicted, {slots} slots freed: {each}"


@dataclass(frozen=True, slots=True)
class BackupStarted(Event):
    """A copy of `node` to host memory is under way; until it is done the node is locked."""

    node: int
    host_slots: Ints

    word, headline, tier_sum = Word("copy", "host"), Headline(50), "copied"

    def describe(self) -> str:
        return f"copy of {node_name(self.node)} to the host begins: {_n(len(self.host_slots), 'token')}"

    def apply(self, state: ReplayState) -> None:
        state.nodes[self.node].update(host=list(self.host_slots), copying=True)
        state.take_host(len(self.host_slots))

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, (self.node,))
        _check_count(self, len(state.nodes[self.node]["slots"]), len(self.host_slots))
        if self.host_slots:
            check_host_slots(self.host_slots, state.tree, f"node {self.node}")

    @classmethod
    def several(cls, events: Sequence[BackupStarted]) -> str:
        names, tokens = nodes_named(events), sum(len(e.host_slots) for e in events)
        return f"copies of {names} to the host begin: {_n(tokens, 'token')}"


@dataclass(frozen=True, slots=True)
class BackupEnded(Event):
    """The copy of `nodes` (one, or the parts that it was split into meanwhile) is done, or failed.

    What failed is no copy: its host slots are free again.
    """

    nodes: Ints
    ok: bool

    word, headline = Word("copied", "host", small=True), Headline(40)

    def describe(self) -> str:
        names = ", ".join(map(node_name, self.nodes))
        return f"{names} copied to the host" if self.ok else f"copy of {names} failed: no copy is kept"

    def apply(self, state: ReplayState) -> None:
        for number in self.nodes:
            node = state.nodes[number]
            node["copying"] = False
            if not self.ok:
                state.take_host(-len(node["host"]))
                node["host"] = []

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, self.nodes)

    def to_blocks(self, stream: BlockStream) -> None:
        if self.ok:
            stream.store(self.nodes, CPU)

    def touches(self) -> Ints:
        return self.nodes

    @classmethod
    def together(cls, events: Sequence[BackupEnded]) -> tuple[str, str]:
        ends = {ok: tuple(node for e in events if e.ok == ok for node in e.nodes) for ok in (True, False)}
        return cls.headline.tone, "; ".join(cls(nodes, ok).describe() for ok, nodes in ends.items() if nodes)


@dataclass(frozen=True, slots=True)
class NodeDemoted(Event):
    """A node's device slots were evicted; its KV stays in host memory and the node in the tree."""

    node: int
    slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    word, headline = Word("demote", "evict"), Headline(150, "evict")
    mark, status, victim, tier_sum = "evict", "demoted", "demoted", "demoted"

    def describe(self) -> str:
        return (
            f"{node_name(self.node)} lives on the host only, {_n(len(self.slots), 'slot')} freed: "
            f"{self.reason}{_next(self.runner_up)}"
        )

    def apply(self, state: ReplayState) -> None:
        state.nodes[self.node]["slots"] = []

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, (self.node,))

    def to_blocks(self, stream: BlockStream) -> None:
        stream.remove(self.node, GPU, forget=False)

    @classmethod
    def several(cls, events: Sequence[NodeDemoted]) -> str:
        names, slots = _names_and_slots(events)
        each = f"each the {events[-1].policy} policy's next"
        return f"{names} live on the host only, {slots} slots freed: {each}"


@dataclass(frozen=True, slots=True)
class LoadStarted(Event):
    """The KV of `nodes` (top first) is coming back from the host into `slots`, which they own now."""

    nodes: Ints
    slots: Ints

    word, headline = Word("load", "hit"), Headline(140, "hit")
    status, colour, tier_sum, is_turn = "loaded", "hit", "loaded", True

    def describe(self) -> str:
        names = " → ".join(map(node_name, self.nodes))
        return f"{names} loaded back from the host: {_n(len(self.slots), 'token')} not computed again"

    def apply(self, state: ReplayState) -> None:
        at = 0
        for number in self.nodes:
            node = state.nodes[number]
            size = len(node["host"])
            node.update(slots=list(self.slots[at : at + size]), loading=True)
            at += size
        state.take_free(len(self.slots))

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, self.nodes)
        _check_count(self, sum(len(state.nodes[n]["host"]) for n in self.nodes), len(self.slots))

    def to_blocks(self, stream: BlockStream) -> None:
        stream.store(self.nodes, GPU)

    def touches(self) -> Ints:
        return self.nodes

    @classmethod
    def several(cls, events: Sequence[LoadStarted]) -> str:
        names = listed([node_name(node) for e in events for node in e.nodes])
        tokens = sum(len(e.slots) for e in events)
        return f"{names} loaded back from the host: {tokens} tokens not computed again"


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """The KV of `nodes` has arrived; their host copies may go again."""

    nodes: Ints

    word = Word("loaded", "host", small=True)

    def describe(self) -> str:
        return f"{', '.join(map(node_name, self.nodes))} arrived from the host"

    def apply(self, state: ReplayState) -> None:
        for number in self.nodes:
            state.nodes[number]["loading"] = False

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, self.nodes)

    def touches(self) -> Ints:
        return self.nodes


@dataclass(frozen=True, slots=True)
class NodeAdopted(Event):
    """A node that lived on the host only was computed again: an insert gave it slots."""

    node: int
    slots: Ints

    word, headline = Word("again", "new"), Headline(70)
    status, colour, tier_sum = "again", "new", "again"

    def describe(self) -> str:
        return f"{node_name(self.node)} was computed again and has {_n(len(self.slots), 'slot')} again"

    def apply(self, state: ReplayState) -> None:
        state.nodes[self.node]["slots"] = list(self.slots)

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, (self.node,))
        _check_count(self, len(state.nodes[self.node]["host"]), len(self.slots))

    def to_blocks(self, stream: BlockStream) -> None:
        stream.store((self.node,), GPU)

    @classmethod
    def several(cls, events: Sequence[NodeAdopted]) -> str:
        names, slots = _names_and_slots(events)
        return f"{names} were computed again and have {_n(slots, 'slot')} again"


@dataclass(frozen=True, slots=True)
class HostEvicted(Event):
    """A node that lived on the host only left the tree."""

    node: int
    parent: int
    host_slots: Ints
    policy: str
    reason: str
    runner_up: int | None

    word, headline = Word("h-evict", "evict"), Headline(60)
    mark, status, victim, tier_sum = "evict", "evicted", "host", "host_evicted"

    def describe(self) -> str:
        return (
            f"{node_name(self.node)} evicted from the host, {_n(len(self.host_slots), 'host slot')} freed: "
            f"{self.reason}{_next(self.runner_up)}"
        )

    def apply(self, state: ReplayState) -> None:
        state.take_host(-len(self.host_slots))
        del state.nodes[self.node]

    def check(self, state: ReplayState) -> None:
        _check_tier(self, state, (self.node,))

    def to_blocks(self, stream: BlockStream) -> None:
        stream.remove(self.node, CPU, forget=True)

    @classmethod
    def several(cls, events: Sequence[HostEvicted]) -> str:
        names, slots = nodes_named(events), sum(len(e.host_slots) for e in events)
        each = f"each the {events[-1].policy} policy's next"
        return f"{names} evicted from the host, {_n(slots, 'host slot')} freed: {each}"


@dataclass(frozen=True, slots=True)
class VersionBumped(Event):
    """The model's weights changed: nodes of the old ones moved to namespaces that no request can name.

    old, new: the number of each namespace that had nodes, and the one that they are in now.
    """

    version: int
    old: Ints
    new: Ints

    word, headline, colour = Word("weights", "evict"), Headline(170, "evict"), "evict"
    by_caller, is_turn = "new weights", True

    def describe(self) -> str:
        return f"weights version {self.version}: nothing that was cached before matches any more"

    def apply(self, state: ReplayState) -> None:
        renamed = dict(zip(self.old, self.new, strict=True))
        for node in state.nodes.values():
            node["namespace"] = renamed.get(node["namespace"], node["namespace"])

    def check(self, state: ReplayState) -> None:
        expect(len(self.old) == len(self.new), "VersionBumped names other namespaces than it renames")

    def to_blocks(self, stream: BlockStream) -> None:
        stream.clear(forget=False)

    def stale(self) -> Ints:
        return self.new


@dataclass(frozen=True, slots=True)
class PolicyChanged(Event):
    """From now on victims are chosen by another policy."""

    old: str
    new: str

    word, headline = Word("policy"), Headline(80)
    by_caller, is_turn = "policy changes", True

    def describe(self) -> str:
        return f"eviction policy changed from {self.old} to {self.new}"

    def apply(self, state: ReplayState) -> None:
        state.tree["eviction_policy"] = self.new

    @classmethod
    def together(cls, events: Sequence[PolicyChanged]) -> tuple[str, str]:
        then = "".join(f", then to {e.new}" for e in events[1:])
        return cls.headline.tone, events[0].describe() + then


@dataclass(frozen=True, slots=True)
class CacheFlushed(Event):
    """The tree was emptied."""

    tokens: int

    word, headline = Word("flush", "evict"), Headline(180, "evict")
    status, colour, by_caller = "evicted", "evict", "flushes"

    def describe(self) -> str:
        return f"cache flushed: {_n(self.tokens, 'token')} forgotten"

    def apply(self, state: ReplayState) -> None:
        state.nodes.clear()
        if state.tiers:
            state.tree["host_free"] = state.tree["host_tokens"]

    def to_blocks(self, stream: BlockStream) -> None:
        stream.clear(forget=True)

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        return tuple(nodes)

    @classmethod
    def together(cls, events: Sequence[CacheFlushed]) -> tuple[str, str]:
        return cls.headline.tone, cls(sum(e.tokens for e in events)).describe()


# ------------------------------------------------------------------ pool and batch


@dataclass(frozen=True, slots=True)
class SlotsAllocated(Event):
    """A request's row was made longer by these slots, which it owns until a commit.

    A page that is entered is owned whole; only the slots in use are listed.
    """

    request: str
    slots: Ints

    word = Word("alloc", small=True)

    def describe(self) -> str:
        return f"{_n(len(self.slots), 'slot')} allocated for {self.request}"

    def apply(self, state: ReplayState) -> None:
        state.requests[self.request]["slots"] += self.slots
        page = state.page_size
        state.take_free(page * sum(slot % page == 0 for slot in self.slots))


@dataclass(frozen=True, slots=True)
class SlotsFreed(Event):
    """Slots went back to the free list. cause: evicted, duplicate, tail, released,
    rejected (drafts) or flushed.
    """

    slots: Ints
    cause: str

    word = Word("free", small=True)

    def describe(self) -> str:
        return f"{_n(len(self.slots), 'slot')} freed ({self.cause})"

    def apply(self, state: ReplayState) -> None:
        page = state.page_size
        state.take_free(-page * len({slot // page for slot in self.slots}))


@dataclass(frozen=True, slots=True)
class BatchScheduled(Event):
    """What the next forward pass computes: `tokens[i]` new tokens of `requests[i]`."""

    kind: str
    requests: tuple[str, ...]
    tokens: Ints

    word, headline = Word("batch"), Headline(90, "decode")

    @classmethod
    def of(cls, batch: Any) -> BatchScheduled:
        counts = tuple(r.kv_len - start for r, start in zip(batch.requests, batch.starts, strict=True))
        return cls(batch.kind, tuple(request.id for request in batch.requests), counts)

    def describe(self) -> str:
        who = ", ".join(self.requests)
        return f"{self.kind} batch of {_n(sum(self.tokens), 'token')}: {who}"

    def check(self, state: ReplayState) -> None:
        expect(len(self.requests) == len(self.tokens), "BatchScheduled has not one count for each request")

    def about(self) -> tuple[str, ...]:
        return self.requests

    @classmethod
    def together(cls, events: Sequence[BatchScheduled]) -> tuple[str, str]:
        who = listed(sorted({name for e in events for name in e.requests}, key=request_order))
        tokens = sum(sum(e.tokens) for e in events)
        what = {"decode": "decoded", "mixed": "prefilled and decoded"}.get(events[-1].kind, "prefilled")
        return cls.headline.tone, f"{tokens} token{'s' * (tokens != 1)} {what} for {who}"


@dataclass(frozen=True, slots=True)
class StepEnded(Event):
    """The pool at the end of a step, counted in tokens; `seconds` is wall-clock time."""

    step: int
    kind: str
    free: int
    evictable: int
    protected: int
    private: int
    seconds: float

    word, ends_frame = Word("step", small=True), True

    @classmethod
    def of(cls, report: Any, allocator: Any, tree: Any) -> StepEnded:
        """Of an outputs.StepReport; the pool's pages that are neither free nor the tree's are private."""
        free, evictable, protected = allocator.available, int(tree.evictable_size), int(tree.protected_size)
        private = allocator.num_tokens - free - evictable - protected
        return cls(report.index, report.kind, free, evictable, protected, private, report.seconds)

    def describe(self) -> str:
        return (
            f"step {self.step} ({self.kind}): {self.protected} protected, {self.evictable} "
            f"evictable, {self.private} private, {self.free} free"
        )

    def apply(self, state: ReplayState) -> None:
        state.rest["step"] = self.step


# To be asked for by `isinstance`: each has a node, a policy, a reason and a runner-up.
VICTIMS = (NodeEvicted, NodeDemoted, HostEvicted)
AnyEviction = NodeEvicted | NodeDemoted | HostEvicted


def eviction(event: Event) -> AnyEviction | None:
    """The event, if a node lost its KV in some tier by it (its `victim` says how), else None."""
    return cast("AnyEviction", event) if event.victim else None


def device_eviction(event: Event) -> NodeEvicted | NodeDemoted | None:
    """The event, if slots of the device became free by it, else None."""
    return cast("NodeEvicted | NodeDemoted", event) if event.victim in ("evicted", "demoted") else None
