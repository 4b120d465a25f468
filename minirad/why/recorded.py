"""A memory of a recording: an engine's events, told to the memory in its own terms, and its answers.

    told = Recorded.of(recording)          # or take frames as they come
    told.answers["R7"].describe()          # of its first admission; "R7#2" of its second, after a retraction
    told.why([1, 2, 3])                    # what would become of a prompt now

Follows the tree by its events alone: of each node its tokens and its parent. Who an eviction made room for is
told afterwards, by the event that takes the slots; so is whose tokens were inserted, by the commit.

Does not replay an engine and reads no states, but for the one at the start (and those of a tree that tells no
events itself).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minirad.observe import events as ev
from minirad.observe.disk_events import BlocksRead
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State, units
from minirad.why.answer import Answer, Asked, fitted, unit_bytes, why
from minirad.why.follows import Follows
from minirad.why.memory import CPU, GPU, Departure, Memory


@dataclass(slots=True)
class _Node:
    """A node of the engine's tree: the bytes of its edge."""

    parent: int
    edge: bytes
    namespace: Hashable


@dataclass(slots=True)
class _Request:
    """What is known of a request. wanted: the first prompt token whose log-probability is asked for still.
    slots: of its row."""

    tokens: list[int]
    prompt: int
    namespace: int
    wanted: int | None = None
    slots: int = 0


class Listener:
    """Tells a memory what a tree's events say. `now` is the moment; `by` whose tokens are put in, if known.

    namespaces: number -> what the memory calls it; numbers that are not in it are called by themselves.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.now: float = 0
        self.by = ""
        self.nodes: dict[int, _Node] = {}
        self._takers = {
            ev.NodeInserted: self._insert, ev.NodeGrown: self._grow, ev.NodeSplit: self._split,
            ev.PrefixTouched: self._touch, ev.NodeEvicted: self._evict, ev.NodeDemoted: self._demote,
            ev.HostEvicted: self._evict_from_host, ev.BackupStarted: self._backup,
            ev.BackupEnded: self._backed_up, ev.LoadStarted: self._load, ev.NodeAdopted: self._adopt,
            ev.VersionBumped: self._bump, ev.CacheFlushed: self._flush, BlocksRead: self._read,
        }  # fmt: skip
        self._fresh: list[tuple[Hashable, bytes, int]] = []  # put in, by a request that is told later
        self._room: list[Departure] = []  # evictions from the device, of which it is told later for whom
        self._host_room: list[tuple[Departure, bytes]] = []  # the last ones from the host, with their paths

    @property
    def kinds(self) -> tuple[type[ev.Event], ...]:
        """The events that it listens to."""
        return tuple(self._takers)

    def take(self, event: ev.Event) -> None:
        """The next event."""
        taker: Any = self._takers.get(type(event))
        if taker is not None:
            taker(event)
        if self._host_room and type(event) is not ev.HostEvicted:
            self._host_room.clear()

    def start(self, state: State) -> None:
        """What a tree holds before the first event, in the shape of its snapshot."""
        for node in sorted(state["nodes"], key=lambda node: int(node["id"])):
            edge = np.asarray(node["tokens"], dtype="<i4").tobytes()
            self.nodes[node["id"]] = _Node(node["parent"], edge, node["namespace"])
        for node in state["nodes"]:
            data, start = self.path(node["id"])
            for medium, slots in ((GPU, node["slots"]), (CPU, node.get("host", ()))):
                if slots and not (medium == CPU and node.get("copying")):
                    self.memory.came(node["namespace"], data, start, when=self.now, medium=medium)

    def path(self, number: int) -> tuple[bytes, int]:
        """The bytes from the root to a node's end, and the unit at which the node begins."""
        parts: list[bytes] = []
        step = number
        while step:
            node = self.nodes[step]
            parts.append(node.edge)
            step = node.parent
        data = b"".join(reversed(parts))
        own = len(parts[0]) if parts else 0
        return data, (len(data) - own) // self.memory.unit

    # ------------------------------------------------------------ the tree

    def _came(self, number: int, medium: str = GPU, start: int | None = None) -> None:
        data, begin = self.path(number)
        begin = begin if start is None else start
        space = self.nodes[number].namespace
        self.memory.came(space, data, begin, when=self.now, by=self.by, medium=medium)
        if medium == GPU and not self.by:
            self._fresh.append((space, data, begin))

    def _insert(self, event: ev.NodeInserted) -> None:
        edge = np.asarray(event.tokens, dtype="<i4").tobytes()
        self.nodes[event.node] = _Node(event.parent, edge, event.namespace)
        self._came(event.node)

    def _grow(self, event: ev.NodeGrown) -> None:
        data, _ = self.path(event.node)
        self.nodes[event.node].edge += np.asarray(event.tokens, dtype="<i4").tobytes()
        self._came(event.node, start=len(data) // self.memory.unit)

    def _split(self, event: ev.NodeSplit) -> None:
        lower = self.nodes[event.lower]
        at = event.at * self.memory.unit
        self.nodes[event.upper] = _Node(lower.parent, lower.edge[:at], lower.namespace)
        lower.parent, lower.edge = event.upper, lower.edge[at:]

    def _touch(self, event: ev.PrefixTouched) -> None:
        self._fresh.clear()  # every match and insert begins with it
        if event.path:
            node = self.nodes[event.path[-1]]
            self.memory.used(node.namespace, self.path(event.path[-1])[0], when=self.now, by=self.by)

    def _left(self, event: Any, medium: str) -> tuple[Departure, bytes]:
        data, start = self.path(event.node)
        by = (self.by,) if self.by else ()
        left = Departure(self.now, "evicted", medium, by, event.policy, event.reason)
        self.memory.left(self.nodes[event.node].namespace, data, start, left)
        return left, data

    def _evict(self, event: ev.NodeEvicted) -> None:
        left, data = self._left(event, GPU)
        self._room.append(left)
        for other, path in self._host_room:
            if path.startswith(data):  # it hung below, on the host alone
                other.along = True
                self._room.append(other)
        del self.nodes[event.node]

    def _demote(self, event: ev.NodeDemoted) -> None:
        self._room.append(self._left(event, GPU)[0])

    def _evict_from_host(self, event: ev.HostEvicted) -> None:
        self._host_room.append(self._left(event, CPU))
        del self.nodes[event.node]

    def _backup(self, event: ev.BackupStarted) -> None:
        """What was evicted from the host made room for this copy, and so for whoever computed it."""
        if self._host_room:
            record = self.memory.record(self.nodes[event.node].namespace, self.path(event.node)[0])
            if record is not None and record.by:
                for left, _ in self._host_room:
                    left.by = (record.by,)

    def _backed_up(self, event: ev.BackupEnded) -> None:
        for number in event.nodes if event.ok else ():
            self._came(number, CPU)

    def _read(self, event: BlocksRead) -> None:
        edge = np.asarray(event.tokens, dtype="<i4").tobytes()
        self.nodes[event.node] = _Node(event.parent, edge, event.namespace)
        self._came(event.node, CPU)

    def _load(self, event: ev.LoadStarted) -> None:
        for number in event.nodes:
            self._came(number)  # whoever computed it stays: no commit follows

    def _adopt(self, event: ev.NodeAdopted) -> None:
        self._came(event.node)

    def _bump(self, event: ev.VersionBumped) -> None:
        self.memory.gone(self.now, "weights", event.old)
        renamed = dict(zip(event.old, event.new, strict=True))
        for node in self.nodes.values():
            node.namespace = renamed.get(node.namespace, node.namespace)  # type: ignore[call-overload]

    def _flush(self, event: ev.CacheFlushed) -> None:
        self.memory.gone(self.now, "flushed")
        self.nodes.clear()

    # ------------------------------------------------------------ what is told afterwards

    def credit(self, by: str) -> None:
        """What was put in last was computed by this request."""
        for space, data, start in self._fresh:
            self.memory.came(space, data, start, when=self.now, by=by)
        self._fresh.clear()

    def needed(self, by: str) -> None:
        """What was evicted last made room for this request."""
        for left in self._room:
            left.by = (*left.by, by)

    def needed_no_more(self) -> None:
        """What is taken from now on is not what was made room for."""
        self._room.clear()


def admission(request: str, attempt: int) -> str:
    """What an admission is called in `answers`: R7, and from the second one on R7#2."""
    return request if attempt == 1 else f"{request}#{attempt}"


class Recorded(Follows):
    """A recording's memory and answers; `take` its frames in order. ValueError for one of a foreign stream.

    most: see Memory.

    Attributes:
        memory: everything that ever was in the tree.
        answers: of each admission, by request; from the second on "R7#2".
        adapters: of each adapter the namespace of its first request, of "" that of those without one.
        unknown: requests of which the recording does not tell the tokens.
        misfits: those in `answers` that the memory did not foresee: the tree changed without telling (or is
            wrong, a student's may be). What was found is the engine's number then, and the rest "unknown".
    """

    def __init__(self, header: State, most: int | None = None) -> None:
        start = header["start"]
        if "ranks" in start["tree"]:
            raise ValueError("this recording is of a stream of KV events: it does not tell what was asked")
        self.page_size = int(start["tree"]["page_size"])
        self.pairs = bool(header.get("config", {}).get("bigram_keys")) or _has_pairs(start["tree"])
        self.memory = Memory(2 if self.pairs else 1, most)
        self.answers: dict[str, Answer] = {}
        self.unknown: list[str] = []
        self.misfits: list[str] = []
        self.requests: dict[str, _Request] = {}
        self.adapters = {"": 0}
        self._names: dict[Hashable, str] = {}  # the adapter of each namespace that has one
        self._tree = Listener(self.memory)
        self._tree.now = float(start["step"])
        self._tree.start(start["tree"])
        self._taking = False  # the last event told of slots that were taken
        self._handlers = {
            ev.RequestAdded: self._add, ev.RequestAdmitted: self._admit, ev.RequestForked: self._fork,
            ev.TokenSampled: self._sample, ev.Committed: self._commit, ev.RequestRetracted: self._retract,
            ev.RequestAborted: self._abort, ev.RequestFinished: self._finish, ev.StepEnded: self._end_step,
            ev.SlotsAllocated: self._take_slots,
        }  # fmt: skip

    def take(self, frame: Frame) -> None:
        """The next frame."""
        self._tree.now = float(frame.step)
        try:
            for event in frame.events:
                self.hear(event)
        except LookupError:  # put together from two looks at a tree that tells nothing itself
            if frame.keyframe is None:
                raise ValueError(f"frame {frame.index} does not follow from those before it") from None
            self._resume(frame.keyframe)
        self._taken += 1

    def hear(self, event: ev.Event) -> None:
        """The next event, of the moment of the frame that is being taken."""
        if self._taking and type(event) is not ev.SlotsAllocated:
            self._taking = False
            self._tree.needed_no_more()
        self._tree.take(event)
        handler: Any = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def why(self, tokens: Any, namespace: int = 0, name: str = "", lora: str = "") -> Answer:
        """What would become of a prompt now. namespace: its number in the recording; or lora: its adapter."""
        if lora:
            namespace = self.space_of(lora)
        asked = Asked.of(tokens, namespace, self.page_size, name, pairs=self.pairs)
        return self._told(why(self.memory, asked, self._tree.now), lora)

    def space_of(self, lora: str) -> int:
        """The namespace of an adapter's requests; one that nothing is in, before the first."""
        return self.adapters.get(lora, -1)

    def _told(self, answer: Answer, lora: str = "") -> Answer:
        """The answer, with what is there under another adapter told as that. lora: its own, if known."""
        if not (self._names or lora):
            return answer
        own, losses = lora or self._names.get(answer.namespace, ""), []
        for loss in answer.losses:
            other = self._names.get(loss.namespace, "") if loss.cause == "namespace" else own
            losses.append(loss if other == own else replace(loss, cause="adapter", namespace=other))
        return replace(answer, losses=tuple(losses))

    # ------------------------------------------------------------ requests

    def _take_slots(self, event: ev.SlotsAllocated) -> None:
        """Of many that decode only those needed room that enter a page."""
        self._taking = True
        if event.request in self.requests:
            self.requests[event.request].slots += len(event.slots)
        if any(slot % self.page_size == 0 for slot in event.slots):
            self._tree.needed(event.request)

    def _add(self, event: ev.RequestAdded) -> None:
        self.requests[event.request] = _Request(
            list(event.token_ids), len(event.token_ids), event.namespace, event.logprob_start
        )
        if event.lora:
            self.adapters.setdefault(event.lora, event.namespace)
            self._names[event.namespace] = event.lora

    def _admit(self, event: ev.RequestAdmitted) -> None:
        self._tree.needed(event.request)  # for what it loaded back
        self._tree.needed_no_more()
        request = self.requests.get(event.request)
        if request is None or len(request.tokens) < event.length:
            self.unknown.append(event.request)
            return
        name = admission(event.request, event.attempt)
        asked = self._asked(request, event)
        answer = self._told(why(self.memory, asked, self._tree.now))
        self.answers[name] = fitted(answer, event.matched, event.cached)
        if answer.cached != event.cached:
            self.misfits.append(name)
        if event.node:
            data, _ = self._tree.path(event.node)
            self.memory.used(request.namespace, data, when=self._tree.now, by=event.request)
        self.memory.began(request.namespace, asked.data, when=self._tree.now, by=event.request)
        request.slots = event.cached

    def _asked(self, request: _Request, event: ev.RequestAdmitted) -> Asked:
        tokens = np.asarray(request.tokens[: event.length], dtype=np.int64)
        wants = request.wanted is not None and request.wanted < request.prompt
        usable = max((request.wanted or 0) - 1, 0) if wants else None
        return Asked.of(
            tokens, request.namespace, self.page_size, event.request, usable=usable, pairs=self.pairs
        )

    def _fork(self, event: ev.RequestForked) -> None:
        leader = self.requests.get(event.leader)
        if leader is not None:
            prompt = leader.tokens[: leader.prompt]
            self.requests[event.request] = _Request(prompt, leader.prompt, leader.namespace)
            if event.row >= 0:
                data = unit_bytes(prompt, self.pairs)
                self.memory.began(leader.namespace, data, when=self._tree.now, by=event.request)

    def _sample(self, event: ev.TokenSampled) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            del request.tokens[event.position :]
            request.tokens.append(event.token)
            computing = self.memory.running.get(event.request)
            if computing is not None:
                computing.data += self._computed(request, len(computing.data) // self.memory.unit)

    def _computed(self, request: _Request, start: int = 0) -> bytes:
        """What has KV, from a unit on: all but the token drawn last (which makes the last pair whole)."""
        if self.pairs:
            return unit_bytes(request.tokens[start:], True)
        return unit_bytes(request.tokens[start : max(len(request.tokens) - 1, request.prompt)])

    def _commit(self, event: ev.Committed) -> None:
        self._tree.credit(event.request)
        data, _ = self._tree.path(event.node) if event.node else (b"", 0)
        node = self._tree.nodes.get(event.node)
        if node is not None:
            self.memory.used(node.namespace, data, when=self._tree.now, by=event.request)

    def _end(self, name: str, end: str) -> None:
        """What it computed and has not given to the tree is lost."""
        request = self.requests.get(name)
        if request is not None:
            self.memory.ended(name, self._tree.now, end, self._computed(request))

    def _retract(self, event: ev.RequestRetracted) -> None:
        self._end(event.request, "retracted")

    def _abort(self, event: ev.RequestAborted) -> None:
        self._end(event.request, "aborted")
        self.requests.pop(event.request, None)

    def _finish(self, event: ev.RequestFinished) -> None:
        self._end(event.request, "failed" if event.reason == "error" else "finished")
        self.requests.pop(event.request, None)

    def _end_step(self, event: ev.StepEnded) -> None:
        self._tree.needed_no_more()
        for name in self.memory.running:  # what has KV now says how likely the next token was
            request = self.requests.get(name)
            if request is not None and request.wanted is not None:
                request.wanted = max(request.wanted, min(request.slots + 1, request.prompt))

    def _resume(self, state: State) -> None:
        """Goes on from a whole state, where events do not lead to it."""
        self._tree.nodes.clear()
        self.memory.gone(self._tree.now, "evicted")
        self._tree.start(state["tree"])


def _has_pairs(tree: State) -> bool:
    return any(len(node["tokens"]) == 2 * units(node) > 0 for node in tree["nodes"])
