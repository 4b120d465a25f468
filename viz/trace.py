"""A recording with random access to any position, by event, by step or by scene.

A position is a moment (the whole state then) and the stretch of events that led to it: one event, one
step, or one scene (a run of steps shown as one). Position 0 is the start, position k the moment after
the k-th event, step or scene. Each node has a drawing status for the position:

    new      inserted in this step (or scene)         hit      matched by an admitted request
    split    the upper half that a split just made    grown    made longer by its own request
    locked   none of these, but a running request     cached   in the tree, and nothing happened
             holds it                                  evicted  gone: a ghost until the step ends

and where evicted KV is kept in host memory, or weights were changed:

    demoted  evicted, but its copy stays               loaded   came back from the host
    again    was on the host only, computed anew       host     on the host only, and nothing happened
    stale    of older weights: matches nothing any more

Over a scene these add up: a node inserted and then hit within it stays new. By event they add up
from the beginning of the step, so that the last event of a step shows what the step shows. In which
tier a node's KV lies is another question than what happened to it: `tier_of` answers it.

Works on a finished Recording and on a Recorder that is still growing, and may be asked from several
threads. Does not draw (tree.py, kv.py do) and keeps no picture.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from minirad import events as ev
from minirad.record import Frame, Recording, ReplayState
from minirad.snapshot import State

GRANULARITIES = ("event", "step", "scene")
STATUSES = (
    "new", "hit", "split", "grown", "locked", "cached", "evicted", "host", "demoted", "loaded", "again",
    "stale",
)  # fmt: skip
# What a node is called when several things happened to it in one scene.
_RANK = {name: rank for rank, name in enumerate(
    ("cached", "host", "stale", "locked", "grown", "split", "hit", "again", "loaded", "new", "demoted",
     "evicted"))}  # fmt: skip
# Where a node's KV is: on the device alone, on its way to the host, in both, on its way back, on the host.
TIERS = ("device", "copying", "both", "loading", "host")
# Events that deserve a mark on the time line, and a button to jump to the next of them.
MARKS: dict[type[ev.Event], str] = {
    ev.NodeSplit: "split",
    ev.NodeEvicted: "evict",
    ev.NodeDemoted: "evict",
    ev.HostEvicted: "evict",
    ev.RequestRetracted: "retract",
}
# Evictions: each has a node, a policy, a reason and a runner-up.
VICTIMS = (ev.NodeEvicted, ev.NodeDemoted, ev.HostEvicted)

_CACHED_VIEWS = 64

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class View:
    """One position: the state, what happened, and how each node is to be drawn.

    frame: index of the frame it lies in (-1 at the start); step: the engine's step number.
    events: of this position alone; so_far: since the step (or scene) began, up to this position.
    state: in the shape of `Engine.snapshot()`.
    status: node id -> one of STATUSES, ghosts included; also: node id -> the lesser things that
    happened to it ("split" on a node that is hit, ...). ghosts: node id -> the node as it last was.
    focus: the nodes that `events` are about.
    """

    granularity: str
    index: int
    frame: int
    step: int
    title: str
    events: tuple[ev.Event, ...]
    so_far: tuple[ev.Event, ...]
    state: State
    status: dict[int, str]
    also: dict[int, frozenset[str]]
    ghosts: dict[int, State]
    focus: frozenset[int]

    @property
    def nodes(self) -> dict[int, State]:
        """Nodes in the tree by id, ghosts left out."""
        return {node["id"]: node for node in self.state["tree"]["nodes"]}


class Trace:
    """Random access to a recording. decode: token ids -> text; None finds the recording's own."""

    def __init__(self, recording: Recording, decode: Decode | None = None) -> None:
        self.recording = recording
        self.decode: Decode = decode if decode is not None else decoder_for(recording.header)
        self._lock = threading.RLock()
        self._offsets = [0]  # events before frame i; one more entry than frames
        self._scenes: list[int] = []  # first frame of each scene
        self._titled = False
        self._marks: dict[str, list[int]] = {kind: [] for kind in MARKS.values()}
        self._bumps: list[tuple[int, tuple[int, ...]]] = []  # events before it, dead namespaces from then on
        self._walk: _Walk | None = None
        self._views: OrderedDict[tuple[str, int], View] = OrderedDict()

    # ------------------------------------------------------------ positions

    def __len__(self) -> int:
        """How many frames there are by now."""
        with self._lock:
            self._catch_up()
            return len(self._offsets) - 1

    def count(self, granularity: str = "step") -> int:
        """How many positions there are, the start included: valid indices are below this."""
        with self._lock:
            frames = len(self)
            _check_granularity(granularity)
            if granularity == "event":
                return self._offsets[-1] + 1
            return (frames if granularity == "step" else len(self._scenes)) + 1

    def frame_at(self, granularity: str, index: int) -> int:
        """The frame in which a position lies; -1 for the start."""
        with self._lock:
            self._check_index(granularity, index)
            if index == 0:
                return -1
            if granularity == "step":
                return index - 1
            if granularity == "event":
                return bisect_left(self._offsets, index) - 1
            return self._scene_end(index - 1) - 1

    def position_of(self, granularity: str, frame: int) -> int:
        """The position that shows the end of a frame (by scene: the scene it belongs to)."""
        with self._lock:
            if not -1 <= frame < len(self):
                raise ValueError(f"frame {frame} is not among {len(self)}")
            _check_granularity(granularity)
            if frame < 0:
                return 0
            if granularity == "step":
                return frame + 1
            if granularity == "event":
                return self._offsets[frame + 1]
            return bisect_right(self._scenes, frame)

    def convert(self, granularity: str, index: int, to: str) -> int:
        """The same moment, or the nearest one after it, in another granularity."""
        with self._lock:
            return index if granularity == to else self.position_of(to, self.frame_at(granularity, index))

    def marks(self) -> dict[str, list[int]]:
        """Frames with a split, an eviction, a retraction: {"split": [...], "evict", "retract"}."""
        with self._lock:
            self._catch_up()
            return {kind: list(frames) for kind, frames in self._marks.items()}

    def next_mark(self, granularity: str, index: int, kind: str, direction: int = 1) -> int | None:
        """The position of the next (direction -1: previous) mark of a kind, or None."""
        with self._lock:
            frame = self.frame_at(granularity, index)
            frames = self._marks[kind]
            if direction > 0:
                at = bisect_right(frames, frame)
                return self.position_of(granularity, frames[at]) if at < len(frames) else None
            first = self._first_frame(granularity, index)
            at = bisect_left(frames, first) - 1
            return self.position_of(granularity, frames[at]) if at >= 0 else None

    # ------------------------------------------------------------ what is there

    def view(self, granularity: str = "step", index: int | None = None) -> View:
        """Everything about a position; index None is the latest. Views are kept: do not change them."""
        with self._lock:
            index = self.count(granularity) - 1 if index is None else index
            self._check_index(granularity, index)
            key = (granularity, index)
            # A scene at the growing end is not over yet: its view may change.
            growing = granularity == "scene" and index == len(self._scenes)
            if key in self._views and not growing:
                self._views.move_to_end(key)
                return self._views[key]
            view = self._make_view(granularity, index)
            if growing:
                return view
            self._views[key] = view
            while len(self._views) > _CACHED_VIEWS:
                self._views.popitem(last=False)
            return view

    def state(self, granularity: str = "step", index: int | None = None) -> State:
        """The engine's whole state at a position, in the shape of `Engine.snapshot()`."""
        return self.view(granularity, index).state

    def frame_events(self, frame: int) -> tuple[ev.Event, ...]:
        """All events of a frame; none for the start (-1)."""
        return self.recording.frames[frame].events if frame >= 0 else ()

    def scene_title(self, scene: int) -> str:
        """The title of a scene, counted from 0."""
        with self._lock:
            self._catch_up()
            frame = self.recording.frames[self._scenes[scene]]
            if frame.scene is not None:
                return frame.scene
            who = [e.request for e in frame.events if isinstance(e, ev.RequestAdmitted)]
            return f"{_listed(who)} served" if who else f"from step {frame.step}"

    def node_text(self, node: Mapping[str, Any]) -> str:
        """The text that a node of `view.state` holds (of bigram keys: that of all its pairs together)."""
        return self.decode(text_tokens(node))

    # ------------------------------------------------------------ how

    def _catch_up(self) -> None:
        frames = self.recording.frames
        for index in range(len(self._offsets) - 1, len(frames)):
            frame = frames[index]
            for at, event in enumerate(frame.events, start=self._offsets[-1]):
                if isinstance(event, ev.VersionBumped):
                    self._bumps.append((at, event.new))
            self._offsets.append(self._offsets[-1] + len(frame.events))
            self._note_scene(index, frame)
            for kind in {MARKS[type(event)] for event in frame.events if type(event) in MARKS}:
                self._marks[kind].append(index)

    def _note_scene(self, index: int, frame: Frame) -> None:
        """Titled scenes if the recording has titles; else one from each admission to the next."""
        if frame.scene is not None and not self._titled:
            self._titled = True
            self._scenes = [0] if index else []
            self._views.clear()
        admits = any(isinstance(event, ev.RequestAdmitted) for event in frame.events)
        begins = frame.scene is not None if self._titled else admits
        if begins or not self._scenes:
            self._scenes.append(index)

    def _scene_end(self, scene: int) -> int:
        after = scene + 1
        return self._scenes[after] if after < len(self._scenes) else len(self._offsets) - 1

    def _first_frame(self, granularity: str, index: int) -> int:
        """The frame with which the step or scene of a position begins."""
        if granularity == "scene" and index > 0:
            return self._scenes[index - 1]
        return self.frame_at(granularity, index)

    def _check_index(self, granularity: str, index: int) -> None:
        count = self.count(granularity)
        if not 0 <= index < count:
            raise ValueError(f"there is no {granularity} {index}: positions go from 0 to {count - 1}")

    def _make_view(self, granularity: str, index: int) -> View:
        frame = self.frame_at(granularity, index)
        first = max(self._first_frame(granularity, index), 0)
        begin = self._offsets[first] if frame >= 0 else 0
        end = index if granularity == "event" else self._offsets[frame + 1]
        walk = self._walk_to(first, begin, end)
        so_far = tuple(e for f in range(first, frame + 1) for e in self.frame_events(f))[: end - begin]
        events = so_far[-1:] if granularity == "event" else so_far
        stale = frozenset(number for at, new in self._bumps if at < end for number in new)
        status, also = walk.statuses(stale)
        return View(
            granularity, index, frame, int(walk.state.rest.get("step", 0)),
            self._title(granularity, index, frame), events, so_far, walk.state.snapshot(), status,
            also, dict(walk.ghosts), frozenset(n for e in events for n in nodes_of(e)),
        )  # fmt: skip

    def _title(self, granularity: str, index: int, frame: int) -> str:
        if frame < 0:
            return "the start"
        if granularity == "scene":
            return self.scene_title(index - 1)
        step = self.recording.frames[frame].step
        ended = self.recording.frames[frame].events[-1:]
        kind = f" ({ended[0].kind})" if ended and isinstance(ended[0], ev.StepEnded) else ""
        if granularity == "step":
            return f"step {step}{kind}" if kind else f"after step {step}"
        within = index - self._offsets[frame]
        return f"step {step}{kind}, event {within} of {len(self.frame_events(frame))}"

    def _walk_to(self, first: int, begin: int, end: int) -> _Walk:
        """A walk that began its step or scene at event `begin` and stands at event `end`."""
        walk = self._walk
        if walk is None or not (walk.at == begin or (walk.begin == begin and walk.at <= end)):
            keyframed = first < len(self.recording.frames) and self.recording.frames[0].keyframe is not None
            walk = _Walk(self.recording.replay_to(first - 1), begin, keyframed)
        elif walk.begin != begin:
            walk.begin_anew()
        self._walk = None  # should the walk fail half-way, it is not used again
        frame = max(bisect_right(self._offsets, walk.at) - 1, 0)
        while walk.at < end:
            events = self.recording.frames[frame].events
            inside = walk.at - self._offsets[frame]
            walk.advance(self.recording.frames[frame], inside, min(len(events), inside + end - walk.at))
            frame += 1
        self._walk = walk
        return walk


@dataclass(slots=True)
class _Walk:
    """A state being moved on, with what happened to each node since `begin`.

    keyframed: every frame has a keyframe, so the tree may be a silent one (a student's).
    """

    state: ReplayState
    begin: int
    keyframed: bool
    at: int = field(init=False)
    stumbled: int = field(init=False, default=-1)  # the frame whose keyframe was taken before its end
    happened: dict[int, set[str]] = field(init=False, default_factory=dict)
    ghosts: dict[int, State] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.at = self.begin

    def begin_anew(self) -> None:
        self.begin = self.at
        self.happened, self.ghosts = {}, {}

    def advance(self, frame: Frame, start: int, stop: int) -> None:
        """Applies events [start, stop) of a frame.

        What a frame tells of a silent tree was put together afterwards: its events are right, their
        order is not, so replay may stumble. The keyframe of each such frame says how it ended.
        """
        if self.stumbled == frame.index:  # how it ended is known: the rest must not happen twice
            self.at += stop - start
            return
        known = dict(self.state.nodes) if self.keyframed else {}
        try:
            for event in frame.events[start:stop]:
                self._note(event)
                self.state.apply(event)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            if frame.keyframe is None:
                raise
            self._take_keyframe(frame, known)
            self.stumbled = frame.index
        else:
            if self.keyframed and frame.keyframe is not None and stop == len(frame.events):
                self._take_keyframe(frame, known)
        self.at += stop - start

    def _take_keyframe(self, frame: Frame, before: dict[int, State]) -> None:
        assert frame.keyframe is not None
        self.state = ReplayState(frame.keyframe)
        for event in frame.events:
            if isinstance(event, ev.NodeEvicted) and event.node in before:
                self.ghosts.setdefault(event.node, _copy(before[event.node]))
                self._mark(event.node, "evicted")
            elif isinstance(event, ev.NodeInserted):
                self._mark(event.node, "new")
            elif isinstance(event, ev.NodeGrown):
                self._mark(event.node, "grown")
            elif isinstance(event, ev.NodeSplit):
                self._mark(event.upper, "split")
            elif isinstance(event, ev.RequestAdmitted) and event.matched:
                for number in path_of(self.state.nodes, event.node):
                    self._mark(number, "hit")

    def _mark(self, node: int, word: str) -> None:
        self.happened.setdefault(node, set()).add(word)

    def _note(self, event: ev.Event) -> None:
        """Remembers what an event means for the drawing, before the state moves on."""
        if isinstance(event, ev.NodeInserted):
            self.ghosts.pop(event.node, None)
            self._mark(event.node, "new")
        elif isinstance(event, ev.NodeGrown):
            self._mark(event.node, "grown")
        elif isinstance(event, ev.NodeSplit):
            # The upper half is what the node was: new tokens stay new, hit ones hit.
            inherited = self.happened.get(event.lower, set()) & {"new", "hit", "demoted", "loaded", "again"}
            self.happened.setdefault(event.upper, set()).update(inherited | {"split"})
        elif isinstance(event, ev.PrefixTouched) and event.hit:
            for number in event.path:
                self._mark(number, "hit")
        elif isinstance(event, ev.NodeEvicted | ev.HostEvicted):
            self.ghosts[event.node] = _copy(self.state.nodes[event.node])
            self._mark(event.node, "evicted")
        elif isinstance(event, ev.NodeDemoted | ev.LoadStarted | ev.NodeAdopted):
            self._note_tier(event)
        elif isinstance(event, ev.CacheFlushed):
            for number, node in self.state.nodes.items():
                self.ghosts[number] = _copy(node)
                self._mark(number, "evicted")

    def _note_tier(self, event: ev.NodeDemoted | ev.LoadStarted | ev.NodeAdopted) -> None:
        """A node that leaves the device and comes back in one scene is drawn as what it did last."""
        words = {ev.NodeDemoted: "demoted", ev.LoadStarted: "loaded", ev.NodeAdopted: "again"}
        for number in nodes_of(event):
            self.happened.setdefault(number, set()).difference_update(words.values())
            self._mark(number, words[type(event)])

    def statuses(
        self, stale: frozenset[int] = frozenset()
    ) -> tuple[dict[int, str], dict[int, frozenset[str]]]:
        """stale: numbers of the namespaces whose nodes are of older weights."""
        status: dict[int, str] = {}
        also: dict[int, frozenset[str]] = {}
        for number, node in [*self.state.nodes.items(), *self.ghosts.items()]:
            words = set(self.happened.get(number, ()))
            if node["lock_ref"] and number not in self.ghosts:
                words.add("locked")
            if node["namespace"] in stale:
                words.add("stale")
            at_rest = "host" if tier_of(node) == "host" else "cached"
            best = max(words, key=_RANK.__getitem__, default=at_rest)
            status[number] = best
            if len(words) > 1:
                also[number] = frozenset(words - {best})
        return status, also


def nodes_of(event: ev.Event) -> tuple[int, ...]:
    """The nodes that an event names, the root left out."""
    if isinstance(event, ev.PrefixTouched | ev.NodeLocked | ev.NodeUnlocked):
        return event.path
    if isinstance(event, ev.NodeSplit):
        return event.upper, event.lower
    if isinstance(event, ev.BackupEnded | ev.LoadStarted | ev.LoadEnded):
        return event.nodes
    node = getattr(event, "node", 0)
    return (node,) if node else ()


def requests_of(event: ev.Event) -> tuple[str, ...]:
    """The requests that an event names."""
    if isinstance(event, ev.BatchScheduled):
        return event.requests
    if isinstance(event, ev.RequestForked):
        return event.request, event.leader
    request = getattr(event, "request", None)
    return (request,) if request else ()


def path_of(nodes: Mapping[int, State], node: int | None) -> list[int]:
    """Ids from below the root down to a node; none for the root and for a node that is not there."""
    path: list[int] = []
    while node and node in nodes and len(path) <= len(nodes):  # in a file it may be its own ancestor
        path.append(node)
        node = nodes[node]["parent"]
    return path[::-1]


def units(node: Mapping[str, Any]) -> int:
    """How many slots a node's KV takes, in whichever tier it lies."""
    return max(len(node["slots"]), len(node.get("host", ())))


def is_bigram(node: Mapping[str, Any]) -> bool:
    """Its tokens are pairs, flattened: two ids a unit."""
    return len(node["tokens"]) == 2 * units(node) > 0


def key_tokens(node: Mapping[str, Any]) -> list[int]:
    """One token id per unit of a node: of bigram keys the first of each pair."""
    return list(node["tokens"][::2] if is_bigram(node) else node["tokens"])


def text_tokens(node: Mapping[str, Any]) -> list[int]:
    """The tokens that a node's key is about: of bigram keys also the second one of the last pair."""
    return [*key_tokens(node), node["tokens"][-1]] if is_bigram(node) else list(node["tokens"])


def tier_of(node: Mapping[str, Any]) -> str:
    """Where a node's KV lies, one of TIERS; "" in a tree without a host tier."""
    if "host" not in node:
        return ""
    if node["copying"]:
        return "copying"
    if node["loading"]:
        return "loading"
    if not node["slots"]:
        return "host"
    return "both" if node["host"] else "device"


def has_tiers(state: State) -> bool:
    """There is a second tier in host memory."""
    return "host_tokens" in state["tree"]


def host_used(tree: State) -> int:
    """Slots of host memory in use, those of copies under way among them; 0 without a host tier."""
    return int(tree["host_tokens"]) - int(tree["host_free"]) if "host_tokens" in tree else 0


def evictable_leaves(nodes: Mapping[int, State], host: bool = False) -> list[State]:
    """Whom a policy chooses from: unlocked nodes on the device that have no child there.

    host: those of the host tier instead, which are leaves that lie there alone.
    """
    parents = {node["parent"] for node in nodes.values() if host or node["slots"]}
    if host:
        return [n for n in nodes.values() if n["id"] not in parents and tier_of(n) == "host"]
    return [n for n in nodes.values() if n["id"] not in parents and n["slots"] and not n["lock_ref"]]


def _copy(node: State) -> State:
    return {name: list(value) if isinstance(value, list) else value for name, value in node.items()}


def _check_granularity(granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")


def _listed(names: Sequence[str], most: int = 3) -> str:
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# ---------------------------------------------------------------------- in words


def summary(events: Iterable[ev.Event]) -> tuple[str, str]:
    """What a stretch of events comes to: (kind, one plain sentence).

    kind: "evict", "retract", "split", "hit", "new", "finish", "decode" or "", for its colour.
    """
    events = tuple(events)
    if len(events) == 1:
        return _kind(events[0]), events[0].describe()
    by = _by_type(events)
    parts: list[tuple[str, str]] = []
    if flushed := by.get(ev.CacheFlushed):
        parts.append(("evict", flushed[-1].describe()))
    if bumped := by.get(ev.VersionBumped):
        parts.append(("evict", bumped[-1].describe()))
    if evicted := by.get(ev.NodeEvicted):
        parts.append(("evict", _evictions(evicted)))
    if demoted := by.get(ev.NodeDemoted):
        parts.append(("evict", _demotions(demoted)))
    if loaded := by.get(ev.LoadStarted):
        parts.append(("hit", _loads(loaded)))
    if retracted := by.get(ev.RequestRetracted):
        parts.append(("retract", "; ".join(e.describe() for e in retracted[:2])))
    if admitted := by.get(ev.RequestAdmitted):
        parts.append(_admissions(admitted))
    if split := by.get(ev.NodeSplit):
        parts.append(("split", "; ".join(e.describe() for e in split[:2])))
    if finished := by.get(ev.RequestFinished):
        reasons = sorted({e.reason for e in finished})
        parts.append(("finish", f"{_listed([e.request for e in finished])} finished ({', '.join(reasons)})"))
    parts += _minor(by)
    if not parts:
        return "", events[-1].describe() if events else "Nothing has happened yet: the tree is empty"
    return parts[0][0], "; ".join(text for _, text in parts[:2])


def _kind(event: ev.Event) -> str:
    kinds = {
        ev.NodeInserted: "new", ev.NodeGrown: "new", ev.RequestFinished: "finish", ev.CacheFlushed: "evict",
        ev.TokenSampled: "decode", ev.LoadStarted: "hit", ev.NodeAdopted: "new", ev.VersionBumped: "evict",
        **MARKS,
    }  # fmt: skip
    if isinstance(event, ev.PrefixTouched) and event.hit:
        return "hit"
    if isinstance(event, ev.RequestAdmitted):
        return "hit" if event.cached else "new"
    return kinds.get(type(event), "")


def _by_type(events: Iterable[ev.Event]) -> dict[type[ev.Event], list[Any]]:
    by: dict[type[ev.Event], list[Any]] = {}
    for event in events:
        by.setdefault(type(event), []).append(event)
    return by


def _evictions(evicted: list[ev.NodeEvicted]) -> str:
    if len(evicted) == 1:
        return evicted[0].describe()
    slots = sum(len(e.slots) for e in evicted)
    names = _listed([ev.node_name(e.node) for e in evicted])
    return f"{names} evicted, {slots} slots free: each the {evicted[-1].policy} policy's next unlocked leaf"


def _demotions(demoted: list[ev.NodeDemoted]) -> str:
    if len(demoted) == 1:
        return demoted[0].describe()
    slots = sum(len(e.slots) for e in demoted)
    names = _listed([ev.node_name(e.node) for e in demoted])
    return f"{names} live on the host only, {slots} slots free: each the {demoted[-1].policy} policy's next"


def _loads(loaded: list[ev.LoadStarted]) -> str:
    if len(loaded) == 1:
        return loaded[0].describe()
    tokens = sum(len(e.slots) for e in loaded)
    names = _listed([ev.node_name(node) for e in loaded for node in e.nodes])
    return f"{names} loaded back from the host: {tokens} tokens not computed again"


def tier_sums(events: Iterable[ev.Event]) -> dict[str, int]:
    """Tokens that a stretch of events copied to the host, demoted, loaded back, computed again although the
    host had them, and evicted from the host."""
    sums = {"copied": 0, "demoted": 0, "loaded": 0, "again": 0, "host_evicted": 0}
    counted: dict[type[ev.Event], tuple[str, str]] = {
        ev.BackupStarted: ("copied", "host_slots"), ev.NodeDemoted: ("demoted", "slots"),
        ev.LoadStarted: ("loaded", "slots"), ev.NodeAdopted: ("again", "slots"),
        ev.HostEvicted: ("host_evicted", "host_slots"),
    }  # fmt: skip
    for event in events:
        if type(event) in counted:
            name, field = counted[type(event)]
            sums[name] += len(getattr(event, field))
    return sums


def _admissions(admitted: list[ev.RequestAdmitted]) -> tuple[str, str]:
    if len(admitted) == 1:
        return ("hit" if admitted[0].cached else "new"), admitted[0].describe()
    cached, length = sum(e.cached for e in admitted), sum(e.length for e in admitted)
    names = _listed([e.request for e in admitted])
    text = f"{names} admitted: {cached} of {length} tokens from the cache, {length - cached} to compute"
    return ("hit" if cached else "new"), text


def _minor(by: dict[type[ev.Event], list[Any]]) -> list[tuple[str, str]]:
    """What is worth a sentence only where nothing greater happened."""
    parts: list[tuple[str, str]] = []
    if batch := by.get(ev.BatchScheduled):
        who = _listed(sorted({name for e in batch for name in e.requests}, key=_by_number))
        tokens = sum(sum(e.tokens) for e in batch)
        what = {"decode": "decoded", "mixed": "prefilled and decoded"}.get(batch[-1].kind, "prefilled")
        parts.append(("decode", f"{tokens} token{'s' * (tokens != 1)} {what} for {who}"))
    for kind in (ev.PolicyChanged, ev.NodeAdopted, ev.HostEvicted, ev.BackupStarted, ev.BackupEnded,
                 ev.RequestDeferred, ev.RequestAdded, ev.RequestAborted):  # fmt: skip
        if found := by.get(kind):
            parts.append(("", found[-1].describe()))
    return parts


def _by_number(name: str) -> tuple[int, int]:
    number, _, index = name[1:].partition(".")
    return (int(number) if number.isdigit() else 0), (int(index) if index.isdigit() else 0)


# ---------------------------------------------------------------------- token ids to text


def ids_as_text(tokens: Sequence[int]) -> str:
    """Where there is no tokenizer: the ids themselves."""
    return " ".join(str(token) for token in tokens)


def decoder_for(header: State) -> Decode:
    """The decoder that a recording's header names; ids as text where there is none to be had."""
    model = header.get("model") or {}
    if not model:
        return ids_as_text  # a cache on its own knows no text
    return decoder_from(model.get("tokenizer"))


@lru_cache(maxsize=8)
def decoder_from(source: str | None) -> Decode:
    """Token ids -> text, special tokens visible.

    source: a model directory; None: the classroom's; "": there is none, ids are shown as numbers.
    """
    folder = local_folder(source)
    if folder is None:
        return ids_as_text
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises plain Exception for what is no tokenizer
            return ids_as_text
        return _careful(lambda ids: str(fast.decode(ids, skip_special_tokens=False)), fast.get_vocab_size())
    try:
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return ids_as_text
    return decoder_of(slow)


def local_folder(source: str | None) -> Path | None:
    """The folder of the tokenizer that a recording names, if it is one here: no name of a file is fetched.

    source: None: the classroom's, which comes with the package.
    """
    if source is None:
        import minirad.model

        return Path(minirad.model.__file__).parent / "classroom" / "weights"
    if not source or source.startswith(("//", "\\\\")):  # on Windows that is another machine's disk
        return None
    try:
        return Path(source) if Path(source).is_dir() else None
    except (OSError, ValueError):  # longer than a path may be, or with a zero in it
        return None


def decoder_of(tokenizer: Any) -> Decode:
    """The decoder of a transformers tokenizer, special tokens visible."""
    return _careful(
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        len(tokenizer),
    )


def _careful(decode: Callable[[list[int]], str], size: int) -> Decode:
    """Remembers what was decoded, and shows ids outside the vocabulary as numbers."""

    @lru_cache(maxsize=4096)
    def remembered(tokens: tuple[int, ...]) -> str:
        if all(0 <= token < size for token in tokens):
            return decode(list(tokens))
        return "".join(decode([t]) if 0 <= t < size else f"⟨{t}⟩" for t in tokens)

    return lambda tokens: remembered(tuple(tokens))
