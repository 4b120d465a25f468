"""Going backwards: a recording with random access to any position, by event, by step or by scene.

What an event does to the state and to the look of nodes is told by the event itself (minirad/observe). Here
are the positions, the nearest keyframe to start from, and the views that are kept. A `Trace` is always a
recording that can be gone through to and fro, a `View` what it shows of one position.

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

and of the tree of other servers (minirad/fleet):

    stored   a further rank or medium got it           hole     no rank holds it: what is below cannot
    removed  a rank lost it, others hold it            unseen   be hit; told only as a parent

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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from minirad.observe.disk_events import BlocksRead
from minirad.observe.event import EVENT_TYPES, MARKS_OF_TIME, STATUSES, Event, Nodes, ReplayState
from minirad.observe.events import VICTIMS, NodeSplit, RequestAdded, VersionBumped, listed
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame, apply_frame
from minirad.observe.snapshot import (
    TIERS,
    State,
    evictable_leaves,
    has_tiers,
    host_used,
    is_bigram,
    is_fleet,
    key_tokens,
    path_of,
    rest_of,
    text_tokens,
    tier_of,
    units,
)
from viz.view.columns import RESTS, Columns, Ints, PageOwners, Table, changes, table_of
from viz.words import (
    Decode,
    beginning,
    decoder_for,
    decoder_from,
    decoder_of,
    ids_as_text,
    local_folder,
    summary,
    tier_sums,
)

# With its own names, those that pictures ask for together with them.
__all__ = [
    "GRANULARITIES", "MARKS", "STATUSES", "TIERS", "VICTIMS", "Decode", "Origins", "Trace", "View",
    "decoder_for", "decoder_from", "decoder_of", "evictable_leaves", "has_tiers", "host_used", "ids_as_text",
    "is_bigram", "is_fleet", "key_tokens", "local_folder", "nodes_of", "path_of", "requests_of", "summary",
    "summary_of", "text_tokens", "tier_of", "tier_sums", "units",
]  # fmt: skip

GRANULARITIES = ("event", "step", "scene")
Made = TypeVar("Made")
# What a node is called when several things happened to it in one scene.
_RANK = {name: rank for rank, name in enumerate(
    ("cached", "host", "hole", "unseen", "stale", "locked", "grown", "split", "hit", "stored", "removed",
     "again", "loaded", "new", "demoted", "evicted"))}  # fmt: skip
# A node that leaves the device (a rank) and comes back in one scene is drawn as what it did last.
_TIER_MOVES = frozenset(("demoted", "loaded", "again", "stored", "removed"))
# What a node that is divided hands on to its new upper half: new tokens stay new, hit ones hit.
_INHERITED = _TIER_MOVES | {"new", "hit"}
# Events that deserve a mark on the time line, and a button to jump to the next of them.
MARKS: dict[type[Event], str] = {kind: kind.mark for kind in EVENT_TYPES if kind.mark}

# How much the views that are kept may hold together, in numbers (tokens, slots, fields of nodes). A number
# takes some 8 bytes, so these are tens of megabytes, however large the tree.
KEPT_NUMBERS = 8_000_000
_NUMBERS_OF_A_NODE = 64  # what a node that no other view shares takes beside its tokens and slots
_NUMBERS_OF_A_PLACE = 24  # what a node takes in the lists of each view
# Going back, about so many events are replayed: a longer replay leaves states behind, so many of them.
_LANDMARK_EVENTS, _LANDMARKS = 2000, 24


@dataclass(frozen=True, slots=True)
class Origins:
    """Where KV comes from: what is true of a node or a namespace as long as it is there, whatever the moment.

    adapters: names of the engine's adapters, in order. spaces: the adapter of each namespace that has one.
    disk: nodes that were read from the disk, and what they were divided into.
    """

    adapters: list[str] = field(default_factory=list)
    spaces: dict[int, str] = field(default_factory=dict)
    disk: set[int] = field(default_factory=set)

    @staticmethod
    def of(header: State) -> Origins:
        """Those that a recording names at its beginning."""
        names = (header.get("config") or {}).get("lora") or ()
        return Origins([name for name in names if isinstance(name, str)])

    def take(self, event: Event) -> None:
        """The next event."""
        if isinstance(event, RequestAdded):
            if event.lora:
                self.spaces[event.namespace] = event.lora
                if event.lora not in self.adapters:
                    self.adapters.append(event.lora)
        elif isinstance(event, BlocksRead):
            self.disk.add(event.node)
        elif isinstance(event, NodeSplit):
            if event.lower in self.disk:
                self.disk.add(event.upper)
        elif isinstance(event, VersionBumped):
            pairs = zip(event.old, event.new, strict=True)
            self.spaces.update({new: self.spaces[old] for old, new in pairs if old in self.spaces})

    def adapter(self, node: State) -> str:
        """The adapter that computed a node; "" for none."""
        return self.spaces.get(node["namespace"], "")


_OF_ORIGIN = frozenset((RequestAdded, BlocksRead, NodeSplit, VersionBumped))


@dataclass(frozen=True, slots=True)
class View:
    """One position: the state, what happened, and how each node is to be drawn.

    frame: index of the frame it lies in (-1 at the start); step: the engine's step number.
    events: of this position alone; so_far: since the step (or scene) began, up to this position.
    state: in the shape of `Engine.snapshot()`.
    status: node id -> one of STATUSES, ghosts included; also: node id -> the lesser things that
    happened to it ("split" on a node that is hit, ...). ghosts: node id -> the node as it last was.
    focus: the nodes that `events` are about.
    origins: which adapter or disk nodes come from.
    """

    granularity: str
    index: int
    frame: int
    step: int
    title: str
    events: tuple[Event, ...]
    so_far: tuple[Event, ...]
    state: State
    status: dict[int, str]
    also: dict[int, frozenset[str]]
    ghosts: dict[int, State]
    focus: frozenset[int]
    origins: Origins = field(default_factory=Origins, repr=False, compare=False)
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nodes(self) -> dict[int, State]:
        """Nodes in the tree by id, ghosts left out."""
        return self.once("nodes", lambda: {node["id"]: node for node in self.state["tree"]["nodes"]})

    @property
    def table(self) -> Table:
        """Numbers of these nodes as arrays."""
        return self.once("table", lambda: table_of(self.nodes))

    @property
    def marked(self) -> list[int]:
        """The nodes that do not look as at rest, ghosts included."""
        return self.once("marked", lambda: [n for n, status in self.status.items() if status != "cached"])

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What is worked out from the view once and kept with it, by its name."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made


def summary_of(view: View) -> tuple[str, str]:
    """Tone and sentence of a position (words.summary); where no event is yet, how the recording begins."""
    if view.events:
        return summary(view.events)
    return "", beginning(view.state) if view.frame < 0 else "Nothing happened here"


class Trace:
    """Random access to a recording (minirad.traces.Trace is another thing: a log of requests).

    decode: token ids -> text; None finds the recording's own.
    kept: how many numbers the views that are kept for the next asking may hold; the latest is always kept.
    """

    def __init__(self, recording: Recording, decode: Decode | None = None, kept: int = KEPT_NUMBERS) -> None:
        self.recording = recording
        self.decode: Decode = decode if decode is not None else decoder_for(recording.header)
        self._lock = threading.RLock()
        self._offsets = [0]  # events before frame i; one more entry than frames
        self._scenes: list[int] = []  # first frame of each scene
        self._titled = False
        theirs = is_fleet(recording.header["start"])
        self._marks: dict[str, list[int]] = {kind: [] for kind in MARKS_OF_TIME if kind != "gap" or theirs}
        self._bumps: list[tuple[int, tuple[int, ...]]] = []  # events before it, dead namespaces from then on
        self.origins = Origins.of(recording.header)
        self._walk: _Walk | None = None
        self._views = _KeptViews(kept)
        self._columns, self._owners = Columns(), PageOwners(1)
        self._tabled: tuple[ReplayState | None, dict[int, State]] = None, {}  # which nodes stand in them
        self._landmarks: OrderedDict[int, tuple[State, dict[int, State]]] = OrderedDict()  # after frames

    @property
    def numbers_kept(self) -> int:
        """How many numbers the kept views hold."""
        return self._views.held

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
        """Frames with a mark by its kind: {"split": [...], "evict", "retract"}; in a stream also "gap"."""
        with self._lock:
            self._catch_up()
            return {kind: list(frames) for kind, frames in self._marks.items()}

    def next_mark(self, granularity: str, index: int, kind: str, direction: int = 1) -> int | None:
        """The position of the next (direction -1: previous) mark of a kind, or None."""
        with self._lock:
            frame = self.frame_at(granularity, index)
            frames = self._marks.get(kind, [])
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
            view = None if growing else self._views.get(key)
            if view is None:
                view = self._make_view(granularity, index)
                if not growing:
                    self._views.put(key, view)
            return view

    def state(self, granularity: str = "step", index: int | None = None) -> State:
        """The engine's whole state at a position, in the shape of `Engine.snapshot()`."""
        return self.view(granularity, index).state

    def frame_events(self, frame: int) -> tuple[Event, ...]:
        """All events of a frame; none for the start (-1)."""
        return self.recording.frames[frame].events if frame >= 0 else ()

    def scene_title(self, scene: int) -> str:
        """The title of a scene, counted from 0."""
        with self._lock:
            self._catch_up()
            frame = self.recording.frames[self._scenes[scene]]
            if frame.scene is not None:
                return frame.scene
            who = [name for event in frame.events if event.begins_scene for name in event.about()]
            return f"{listed(who)} served" if who else f"from step {frame.step}"

    def node_text(self, node: Mapping[str, Any]) -> str:
        """The text that a node of `view.state` holds (of bigram keys: that of all its pairs together)."""
        return self.decode(text_tokens(node))

    # ------------------------------------------------------------ how

    def _catch_up(self) -> None:
        frames = self.recording.frames
        for index in range(len(self._offsets) - 1, len(frames)):
            frame = frames[index]
            for at, event in enumerate(frame.events, start=self._offsets[-1]):
                if stale := event.stale():
                    self._bumps.append((at, stale))
                if type(event) in _OF_ORIGIN:
                    self.origins.take(event)
            self._offsets.append(self._offsets[-1] + len(frame.events))
            self._note_scene(index, frame)
            for kind in {event.mark for event in frame.events if event.mark}:
                self._marks.setdefault(kind, []).append(index)

    def _note_scene(self, index: int, frame: Frame) -> None:
        """Titled scenes if the recording has titles; else one from each admission to the next."""
        if frame.scene is not None and not self._titled:
            self._titled = True
            self._scenes = [0] if index else []
            self._views.clear()
        admits = any(event.begins_scene for event in frame.events)
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
        changed = walk.state.nodes.changed()
        nodes = walk.state.nodes.keep_all()
        table, cells = self._arrays(walk, nodes, changed)
        status, also, marked = walk.statuses(nodes, table, stale)
        own = sum(_numbers_of(nodes[number]) for number in changed if number in nodes)
        return View(
            granularity, index, frame, int(walk.state.rest.get("step", 0)),
            self._title(granularity, index, frame), events, so_far, walk.state.snapshot(nodes), status,
            also, dict(walk.ghosts), frozenset(n for e in events for n in e.touches()), self.origins,
            {"own": own, "nodes": nodes, "table": table, "marked": marked, "cells": cells},
        )  # fmt: skip

    def _arrays(self, walk: _Walk, nodes: dict[int, State], changed: Collection[int]) -> tuple[Table, Ints]:
        """Nodes, and which of them has each page. After a jump most nodes are the very same objects."""
        (state, before), columns, owners = self._tabled, self._columns, self._owners
        if state is None:
            columns, owners, changed = Columns(), PageOwners(walk.state.page_size), list(nodes)
        elif state is not walk.state:
            changed = changes(before, nodes)
        self._tabled = None, {}  # should it fail, all is read anew
        columns.update(nodes, changed)
        owners.update(before, nodes, list(changed))
        self._tabled, self._columns, self._owners = (walk.state, nodes), columns, owners
        return columns.table(), owners.cells.copy()

    def _title(self, granularity: str, index: int, frame: int) -> str:
        if frame < 0:
            return "the start"
        if granularity == "scene":
            return self.scene_title(index - 1)
        step = self.recording.frames[frame].step
        ended = self.recording.frames[frame].events[-1:]
        is_step = bool(ended) and ended[0].ends_frame
        kind = f" ({getattr(ended[0], 'kind', '')})" if is_step else ""
        if granularity == "step":
            return f"step {step}{kind}" if kind else f"after step {step}"
        within = index - self._offsets[frame]
        return f"step {step}{kind}, event {within} of {len(self.frame_events(frame))}"

    def _walk_to(self, first: int, begin: int, end: int) -> _Walk:
        """A walk that began its step or scene at event `begin` and stands at event `end`."""
        walk = self._walk
        if walk is None or not (walk.at == begin or (walk.begin == begin and walk.at <= end)):
            keyframed = first < len(self.recording.frames) and self.recording.frames[0].keyframe is not None
            walk = _Walk(self._state_after(first - 1), begin, keyframed)
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

    def _state_after(self, frame: int) -> ReplayState:
        """A fresh state after a frame, from the nearest keyframe or landmark; a long way leaves landmarks."""
        frames, at = self.recording.frames, frame
        while at >= 0 and frames[at].keyframe is None and at not in self._landmarks:
            at -= 1
        mark = self._landmarks.get(at)
        replay = self.recording.replay_to(at) if mark is None else ReplayState(*mark)
        walked = 0
        for index in range(at + 1, frame + 1):
            replay = apply_frame(replay, frames[index])
            walked += len(frames[index].events)
            if walked >= _LANDMARK_EVENTS and len(frames[index].events) < _LANDMARK_EVENTS:
                nodes = replay.nodes.keep_all()
                self._landmarks[index], walked = (replay.snapshot(nodes), nodes), 0
                while len(self._landmarks) > _LANDMARKS:
                    self._landmarks.popitem(last=False)
        return replay


class _KeptViews:
    """The views that were asked for last, as long as they hold at most `most` numbers together."""

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0
        self._views: OrderedDict[tuple[str, int], tuple[View, int]] = OrderedDict()

    def get(self, key: tuple[str, int]) -> View | None:
        if key not in self._views:
            return None
        self._views.move_to_end(key)
        return self._views[key][0]

    def put(self, key: tuple[str, int], view: View) -> None:
        numbers = _numbers(view)
        self._views[key] = view, numbers
        self.held += numbers
        while self.held > self._most and len(self._views) > 1:
            _, (_, gone) = self._views.popitem(last=False)
            self.held -= gone

    def clear(self) -> None:
        self._views.clear()
        self.held = 0


def _numbers(view: View) -> int:
    """About how many numbers a view holds that no view before it shares."""
    own = view.once("own", lambda: 0) + sum(map(_numbers_of, view.state["requests"].values()))
    places = _NUMBERS_OF_A_PLACE * (len(view.state["tree"]["nodes"]) + len(view.ghosts))
    places += len(view.once("cells", lambda: ()))
    return own + places + _NUMBERS_OF_A_NODE + len(view.events) + len(view.so_far)


def _numbers_of(node: State) -> int:
    lists = len(node.get("tokens", ())) + len(node["slots"]) + len(node.get("host", ()))
    return _NUMBERS_OF_A_NODE + lists


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
        known = dict.copy(self.state.nodes) if self.keyframed else {}
        try:
            for event in frame.events[start:stop]:
                self._note(event, self.state.nodes)
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
        for event in frame.events:  # some nodes are only there now, and those that left only were
            self._note(event, before if event.status == "evicted" else self.state.nodes)

    def _note(self, event: Event, nodes: Mapping[int, State]) -> None:
        """Remembers what an event means for the drawing. nodes: those of the tree, before it happened."""
        if not event.status:
            return
        for number in event.with_status(nodes):
            words = self.happened.setdefault(number, set())
            if event.status in _TIER_MOVES:
                words -= _TIER_MOVES
            elif event.status == "new":
                self.ghosts.pop(number, None)
            elif event.status == "evicted" and number in nodes and number not in self.ghosts:
                self.ghosts[number] = nodes.keep(number) if isinstance(nodes, Nodes) else nodes[number]
            words.add(event.status)
        if parts := event.split_off():
            upper, lower = parts
            self.happened.setdefault(upper, set()).update(self.happened.get(lower, set()) & _INHERITED)
        if parts := event.joined():  # what is gone hangs from the node that goes on
            upper, lower = parts
            for number, ghost in self.ghosts.items():
                if ghost["parent"] == upper:
                    self.ghosts[number] = {**ghost, "parent": lower}

    def statuses(
        self, nodes: dict[int, State], table: Table, stale: frozenset[int]
    ) -> tuple[dict[int, str], dict[int, frozenset[str]], list[int]]:
        """Status and the lesser things by node, and which nodes do not look as at rest.

        nodes, table: those in the tree. stale: namespaces whose nodes are of older weights.
        Nearly all nodes are "cached", and only the others are looked at.
        """
        ghosts = self.ghosts
        status = dict.fromkeys(nodes, "cached")
        for place in table.rest.nonzero()[0].tolist():
            status[int(table.id[place])] = RESTS[table.rest[place]]
        status.update((number, rest_of(node)) for number, node in ghosts.items())
        words = {number: set(said) for number, said in self.happened.items() if said and number in status}
        for number in table.id[table.lock_ref > 0].tolist():
            if number not in ghosts:
                words.setdefault(number, set()).add("locked")
        for number in _of_spaces({**nodes, **ghosts}, stale) if stale else ():
            words.setdefault(number, set()).add("stale")
        also: dict[int, frozenset[str]] = {}
        for number, said in words.items():
            best = status[number] = max(said, key=_RANK.__getitem__)
            if len(said) > 1:
                also[number] = frozenset(said - {best})
        return status, also, list(words)


def _of_spaces(nodes: Mapping[int, State], namespaces: frozenset[int]) -> list[int]:
    return [number for number, node in nodes.items() if node["namespace"] in namespaces]


def nodes_of(event: Event) -> tuple[int, ...]:
    """The nodes that an event names, the root left out."""
    return event.touches()


def requests_of(event: Event) -> tuple[str, ...]:
    """The requests that an event names."""
    return event.about()


def _check_granularity(granularity: str) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")
