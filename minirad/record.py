"""Recordings: every step of an engine as a frame, in memory or in a file, replayable to any moment.

A `Frame` holds one step's events (what happens between two steps belongs to the next frame). Every
`keyframe_every` frames it also holds the whole state, so that any step is a keyframe plus at most that
many frames of replay. `ReplayState` applies events one by one and arrives at exactly what
`Engine.snapshot()` said at each keyframe; the tests hold it to that.

A file is JSON lines: a header (schema version, config, model, the state at the start), then frames. A
file that was cut off anywhere gives all its whole frames.

Does not draw anything and does not need a model: viz/ does the one, and neither needs the other.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minirad import command
from minirad import events as ev
from minirad.errors import path as a_path
from minirad.errors import said, whole
from minirad.snapshot import State, bare_snapshot, nodes_by_id

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Frame:
    """One step. keyframe: the state after it, or None. scene: a title, if a new scene begins here."""

    index: int
    step: int
    events: tuple[ev.Event, ...]
    keyframe: State | None = None
    scene: str | None = None

    def to_json(self) -> str:
        """One line; events as [name, field, ...] to keep long recordings small."""
        line: dict[str, Any] = {"frame": self.index, "step": self.step}
        if self.scene is not None:
            line["scene"] = self.scene
        line["events"] = [_flat(event) for event in self.events]
        if self.keyframe is not None:
            line["keyframe"] = self.keyframe
        return _json(line)

    @classmethod
    def from_json(cls, text: str) -> Frame:
        """ValueError for a line that is not a whole frame."""
        from minirad.recording_file import parse_frame

        return parse_frame(text)


def _flat(event: ev.Event) -> list[Any]:
    fields = dataclasses.fields(event)
    return [type(event).__name__, *(getattr(event, field.name) for field in fields)]


def _plain(value: Any) -> Any:
    """For json: numpy's numbers and rows, as a tree of somebody's own may hold them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} cannot be written as JSON")


def _json(data: State) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, default=_plain)


class Recording:
    """Frames and what they start from. `state(i)` is the whole state after frame i (-1: the start).

    missing: one sentence on what of a file could not be read ("": nothing is missing).
    """

    missing = ""

    def __init__(self, header: State, frames: Iterable[Frame] = ()) -> None:
        self.header = header
        self.frames: list[Frame] = list(frames)

    def state(self, index: int) -> State:
        """The state after frame `index`; -1 is the start."""
        return self.replay_to(index).snapshot()

    def replay_to(self, index: int) -> ReplayState:
        """A fresh ReplayState after frame `index`, from the nearest keyframe before it."""
        if not -1 <= whole("a frame's index", index) < len(self.frames):
            raise ValueError(f"frame {index} is not in this recording of {len(self.frames)} frames")
        at = index
        while at >= 0 and self.frames[at].keyframe is None:
            at -= 1
        state = self.frames[at].keyframe if at >= 0 else self.header["start"]
        try:
            replay = ReplayState(state or {})
        except (LookupError, TypeError) as error:
            what = f"the keyframe of frame {at}" if at >= 0 else "the header's start"
            raise ValueError(f"{what} is not a whole state: {error!r}") from error
        for frame in self.frames[at + 1 : index + 1]:
            replay = apply_frame(replay, frame)
        return replay

    def walk(self, before: Callable[[ev.Event, ReplayState], Any] | None = None) -> Iterator[Walked]:
        """Each frame with the state after it (one object, moved on); `before` is called ahead of each event.

        Goes on from a keyframe where a frame of a silent tree does not replay.
        """
        replay = self.replay_to(-1)
        for frame in self.frames:
            replay = apply_frame(replay, frame, before)
            yield frame, replay

    def check(self) -> None:
        """Looks at every frame once. ValueError names the one that does not follow from those before it."""
        from minirad.recording_file import FrameCheck, check_state

        check_state(self.header["start"])
        check = FrameCheck(self.header["start"])
        for frame in self.frames:
            check.take(frame)

    def save(self, path: str | Path) -> None:
        """Writes header and frames as JSON lines."""
        path = a_path("path", path)
        with command.named(path), path.open("wb") as file:
            file.write(_encoded(_header_line(self.header)))
            file.writelines(_encoded(frame.to_json() + "\n") for frame in self.frames)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Reads a file up to its last whole frame, or the last before one that is lost or broken.

        Frames that could not be had are told by `missing`. ValueError names file and line when there is
        no whole header, the schema is another, or nothing whole follows.
        """
        from minirad.recording_file import read_recording

        return read_recording(a_path("a recording", path))

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self.frames)


Walked = tuple[Frame, "ReplayState"]


def apply_frame(
    replay: ReplayState, frame: Frame, before: Callable[[ev.Event, ReplayState], Any] | None = None
) -> ReplayState:
    """The state after a frame: `replay` moved on, or (if its events do not replay) its keyframe's.

    ValueError names a frame that does not follow and has no keyframe.
    """
    for event in frame.events:
        try:
            if before is not None:
                before(event, replay)
            replay.apply(event)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            if frame.keyframe is not None:
                return ReplayState(frame.keyframe)
            what = f"{type(event).__name__} does not fit the state: {error!r}"
            raise ValueError(f"frame {frame.index} does not follow from those before it: {what}") from error
    return replay


def _header_line(header: State) -> str:
    return _json(header) + "\n"


class _Lines:
    """The file of a recorder: a header and whole lines at any moment, however writing them ends."""

    def __init__(self, path: Path, header: str) -> None:
        self._path, self._file = path, path.open("wb", buffering=0)
        self._whole = 0  # bytes of whole lines
        self._owed: deque[Frame] = deque()
        self._torn = False  # part of a line may lie behind the whole ones
        try:
            self._write(header)
        except BaseException:
            self._file.close()
            raise

    def add(self, frame: Frame) -> None:
        """Writes a frame, and before it those that could not be written when it was their turn."""
        self._owed.append(frame)
        self.write_owed()

    def write_owed(self) -> None:
        """OSError if the file still cannot be written; nothing is lost by that."""
        while self._owed:
            self._write(self._owed[0].to_json() + "\n")
            self._owed.popleft()

    def _write(self, line: str) -> None:
        if self._torn:
            self._file.seek(self._whole)
            self._file.truncate()
        data = _encoded(line)
        self._torn = True
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._whole += len(data)
        self._torn = False

    def close(self) -> None:
        self._file.close()


def _encoded(line: str) -> bytes:
    """A text that is no valid Unicode must not keep its line out of the file: a sign stands for it."""
    return line.encode(errors="replace")


class Recorder(Recording):
    """Records an engine, or a cache on its own, while it is open.

        with Recorder(engine) as recording:
            engine.generate(...)
        recording.save("run.jsonl")

    path: written to as it goes (a crash loses at most the step in progress). A frame that cannot be written
    (a full disk) is raised as OSError, and written before the next one: the file has no holes.
    A cache on its own has no steps: `cut()` ends a frame. A tree that emits no events (a student's)
    is compared with what it was at each step's end, and gets a keyframe every time.
    notes: anything else worth knowing, as JSON, kept in header["notes"]. It may still change while the
    recorder is open (names of requests that come later): the file's header is brought up to date at its end.
    """

    def __init__(
        self, source: Any, path: str | Path | None = None, *, keyframe_every: int = 100,
        notes: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        whole("keyframe_every", keyframe_every, 1)
        path = None if path is None else a_path("path", path)
        if isinstance(source, type) or not (hasattr(source, "step") or hasattr(source, "walk")):
            raise ValueError(f"an engine or a tree can be recorded, not {said(source)}")
        if notes is not None and not isinstance(notes, dict):
            raise ValueError(f"notes must be a dict that JSON can hold, or None, got {said(notes)}")
        self._engine = source if hasattr(source, "step") else None
        self._cache = source.cache if self._engine is not None else source
        bus = getattr(source, "bus", None)
        self._bus: ev.EventBus = bus if bus is not None else ev.EventBus()
        self._silent = getattr(self._cache, "bus", None) is not self._bus
        self._every = 1 if self._silent else keyframe_every
        super().__init__(self._describe_source())
        if notes is not None:
            self.header["notes"] = notes
        self._events: list[ev.Event] = []
        self._step = int(self.header["start"]["step"])
        self._scene: str | None = None
        self._before = nodes_by_id(self._cache) if self._silent else {}
        self._path, self._first_line = path, _header_line(self.header)
        self._file = None if path is None else _Lines(Path(path), self._first_line)
        self._unsubscribe = self._bus.subscribe(None, self._take)

    def scene(self, title: str) -> None:
        """The next frame begins a new scene: a run of frames that is shown as one."""
        if not isinstance(title, str):
            raise ValueError(f"a scene's title is a text, got {said(title)}")
        self.cut()
        self._scene = title

    def cut(self) -> None:
        """Ends the frame in progress, if anything has happened in it."""
        self._derive()
        if self._events:
            self._end_frame()

    def close(self) -> None:
        """Stops recording; what happened since the last step becomes a last frame."""
        self._unsubscribe()
        file = self._file
        try:
            self.cut()
            if file is not None:
                file.write_owed()
        finally:
            self._file = None
            if file is not None:
                file.close()
                self._renew_header()

    def _renew_header(self) -> None:
        """Exchanges the file's first line if the notes have changed; the file is whole at any moment."""
        line = _header_line(self.header)
        if self._path is None or line == self._first_line:
            return
        old, new = Path(self._path), Path(f"{self._path}.new")
        try:
            with old.open("rb") as source, new.open("wb") as target:
                source.readline()
                target.write(_encoded(line))
                shutil.copyfileobj(source, target)
            new.replace(old)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, event: ev.Event) -> None:
        self._events.append(event)
        if isinstance(event, ev.StepEnded):
            self._step = event.step
            self._derive()
            self._end_frame()

    def _derive(self) -> None:
        if self._silent:
            after = nodes_by_id(self._cache)
            ends_step = bool(self._events) and isinstance(self._events[-1], ev.StepEnded)
            place = len(self._events) - ends_step
            self._events[place:place] = derive_events(self._before, after)
            self._before = after

    def _end_frame(self) -> None:
        keyframe = self._snapshot() if (len(self.frames) + 1) % self._every == 0 else None
        frame = Frame(len(self.frames), self._step, tuple(self._events), keyframe, self._scene)
        self._events, self._scene = [], None
        self.frames.append(frame)
        if self._file is not None:
            self._file.add(frame)

    def _snapshot(self) -> State:
        source = self._engine
        return source.snapshot() if source is not None else bare_snapshot(self._cache)

    def _describe_source(self) -> State:
        header: State = {"minirad": SCHEMA, "config": {}, "model": {}}
        engine = self._engine
        if engine is not None:
            config = dataclasses.asdict(engine.config)
            config["model"] = None if config["model"] is None else str(config["model"])
            header["config"] = config
            known = engine.model_path is not None
            source = (str(engine.model_path) if config["model"] is not None else None) if known else ""
            header["model"] = {
                "parameters": engine.model.config.num_parameters,
                # None: the classroom Llama's, which comes with the package; "": there is none to name
                "tokenizer": source,
            }
        header["start"] = self._snapshot()
        return header


# ---------------------------------------------------------------------- states


class ReplayState:
    """An engine's state, moved on by events. Starts from a snapshot, which it does not change."""

    def __init__(self, snapshot: State) -> None:
        copy: State = json.loads(json.dumps(snapshot))
        self.nodes: dict[int, State] = {node["id"]: node for node in copy["tree"].pop("nodes")}
        self.tree: State = copy.pop("tree")
        self.requests: dict[str, State] = copy.pop("requests")
        self.waiting: list[str] = copy.pop("waiting")
        self.rest: State = copy

    def snapshot(self) -> State:
        """The present state, in the shape of `Engine.snapshot()`; later events do not change it."""
        nodes = [_copied(self.nodes[number]) for number in sorted(self.nodes)]
        requests = sorted(self.requests.items(), key=lambda item: request_order(item[0]))
        return {
            **self.rest,
            "tree": {**self.tree, "nodes": nodes},
            "waiting": list(self.waiting),
            "requests": {name: _copied(request) for name, request in requests},
        }

    def path_slots(self, node: int) -> list[int]:
        """All slots from the root to the end of a node."""
        parts: list[list[int]] = []
        while node:
            parts.append(self.nodes[node]["slots"])
            node = self.nodes[node]["parent"]
            if len(parts) > len(self.nodes):
                raise ValueError(f"node {node} is its own ancestor")
        return [slot for part in reversed(parts) for slot in part]

    def apply(self, event: ev.Event) -> None:
        """Moves the state on by one event."""
        handler = getattr(self, f"_on_{type(event).__name__}", None)
        if handler is not None:  # some events only tell, and change nothing
            handler(event)

    # ------------------------------------------------------------ requests

    def _on_RequestAdded(self, event: ev.RequestAdded) -> None:
        count = len(event.token_ids)
        self.requests[event.request] = {
            "row": -1, "node": None, "slots": [], "protected": 0, "prompt_tokens": count,
            "length": count, "cached": 0, "attempts": 0, "priority": event.priority,
        }  # fmt: skip
        self.waiting.append(event.request)

    def _on_RequestAdmitted(self, event: ev.RequestAdmitted) -> None:
        request = self.requests[event.request]
        slots = self.path_slots(event.node)[: event.cached]
        request.update(row=event.row, node=event.node, slots=slots, protected=event.cached)
        request["attempts"] = event.attempt
        if event.attempt == 1:
            request["cached"] = event.cached
        self.waiting.remove(event.request)

    def _on_RequestForked(self, event: ev.RequestForked) -> None:
        leader = self.requests[event.leader]
        sample = {**leader, "length": leader["prompt_tokens"]}
        if event.row < 0:
            sample.update(row=-1, node=None, slots=[], protected=0)
            self.waiting.append(event.request)
        else:
            sample.update(row=event.row, slots=leader["slots"][: leader["protected"]])
        self.requests[event.request] = sample

    def _on_Committed(self, event: ev.Committed) -> None:
        request = self.requests[event.request]
        request["slots"][: event.aligned] = self.path_slots(event.node)[: event.aligned]
        request["protected"] = event.aligned
        request["node"] = event.node

    def _on_TokenSampled(self, event: ev.TokenSampled) -> None:
        self.requests[event.request]["length"] = event.position + 1

    def _on_RequestRetracted(self, event: ev.RequestRetracted) -> None:
        self.requests[event.request].update(row=-1, node=None, slots=[], protected=0)
        self.waiting.append(event.request)

    def _on_RequestFinished(self, event: ev.RequestFinished | ev.RequestAborted) -> None:
        del self.requests[event.request]
        if event.request in self.waiting:
            self.waiting.remove(event.request)

    _on_RequestAborted = _on_RequestFinished

    # ------------------------------------------------------------ pool

    def _on_SlotsAllocated(self, event: ev.SlotsAllocated) -> None:
        self.requests[event.request]["slots"] += event.slots
        page = self.tree["page_size"]
        self.rest["free"] -= page * sum(slot % page == 0 for slot in event.slots)

    def _on_SlotsFreed(self, event: ev.SlotsFreed) -> None:
        page = self.tree["page_size"]
        self.rest["free"] += page * len({slot // page for slot in event.slots})

    def _on_StepEnded(self, event: ev.StepEnded) -> None:
        self.rest["step"] = event.step

    # ------------------------------------------------------------ tree

    def _on_PrefixTouched(self, event: ev.PrefixTouched) -> None:
        self.tree["tick"] = event.tick
        for number in event.path:
            node = self.nodes[number]
            node["last_access"] = event.tick
            node["hits"] += event.hit
            if event.priority is not None:
                node["priority"] = max(node["priority"], event.priority)

    def _on_NodeInserted(self, event: ev.NodeInserted) -> None:
        self.tree["tick"] = event.tick
        self.nodes[event.node] = {
            "id": event.node, "parent": event.parent, "tokens": list(event.tokens),
            "slots": list(event.slots), "namespace": event.namespace, "lock_ref": 0,
            "last_access": event.tick, "created": event.tick, "hits": 0,
            "priority": event.priority,
            **({"host": [], "copying": False, "loading": False} if self.tiers else {}),
        }  # fmt: skip

    def _on_NodeGrown(self, event: ev.NodeGrown) -> None:
        node = self.nodes[event.node]
        node["tokens"] += event.tokens
        node["slots"] += event.slots

    def _on_NodeSplit(self, event: ev.NodeSplit) -> None:
        lower = self.nodes[event.lower]
        units = max(len(lower["slots"]), len(lower.get("host", ())))
        cut = event.at * (len(lower["tokens"]) // units)  # 2 ids a unit in a tree of bigram keys
        upper = {**lower, "id": event.upper, "last_access": event.tick}
        upper["tokens"], upper["slots"] = lower["tokens"][:cut], lower["slots"][: event.at]
        lower.update(
            parent=event.upper, last_access=event.tick, tokens=lower["tokens"][cut:],
            slots=lower["slots"][event.at :],
        )  # fmt: skip
        if self.tiers:
            upper["host"], lower["host"] = upper["host"][: event.at], lower["host"][event.at :]
        self.nodes[event.upper] = upper

    def _on_NodeLocked(self, event: ev.NodeLocked) -> None:
        for number in event.path:
            self.nodes[number]["lock_ref"] += 1

    def _on_NodeUnlocked(self, event: ev.NodeUnlocked) -> None:
        for number in event.path:
            self.nodes[number]["lock_ref"] -= 1

    def _on_NodeEvicted(self, event: ev.NodeEvicted) -> None:
        del self.nodes[event.node]

    def _on_VersionBumped(self, event: ev.VersionBumped) -> None:
        renamed = dict(zip(event.old, event.new, strict=True))
        for node in self.nodes.values():
            node["namespace"] = renamed.get(node["namespace"], node["namespace"])

    # ------------------------------------------------------------ the host's tier

    @property
    def tiers(self) -> bool:
        """The tree has a second tier in host memory."""
        return "host_tokens" in self.tree

    def _on_BackupStarted(self, event: ev.BackupStarted) -> None:
        self.nodes[event.node].update(host=list(event.host_slots), copying=True)
        self._host_taken(len(event.host_slots))

    def _on_BackupEnded(self, event: ev.BackupEnded) -> None:
        for number in event.nodes:
            node = self.nodes[number]
            node["copying"] = False
            if not event.ok:
                self._host_taken(-len(node["host"]))
                node["host"] = []

    def _on_NodeDemoted(self, event: ev.NodeDemoted) -> None:
        self.nodes[event.node]["slots"] = []

    def _on_LoadStarted(self, event: ev.LoadStarted) -> None:
        at = 0
        for number in event.nodes:
            node = self.nodes[number]
            size = len(node["host"])
            node.update(slots=list(event.slots[at : at + size]), loading=True)
            at += size
        self.rest["free"] -= len(event.slots)

    def _on_LoadEnded(self, event: ev.LoadEnded) -> None:
        for number in event.nodes:
            self.nodes[number]["loading"] = False

    def _on_NodeAdopted(self, event: ev.NodeAdopted) -> None:
        self.nodes[event.node]["slots"] = list(event.slots)

    def _on_HostEvicted(self, event: ev.HostEvicted) -> None:
        self._host_taken(-len(event.host_slots))
        del self.nodes[event.node]

    def _host_taken(self, num_tokens: int) -> None:
        self.tree["host_free"] -= num_tokens

    def _on_PolicyChanged(self, event: ev.PolicyChanged) -> None:
        self.tree["eviction_policy"] = event.new

    def _on_CacheFlushed(self, event: ev.CacheFlushed) -> None:
        self.nodes.clear()
        if self.tiers:
            self.tree["host_free"] = self.tree["host_tokens"]


def request_order(name: str) -> tuple[int, int]:
    """R3 before R10, samples R3.1 and R3.2 right after R3."""
    number, _, index = name[1:].partition(".")
    return int(number), int(index or 0)


def _copied(record: State) -> State:
    return {name: list(v) if isinstance(v, list) else v for name, v in record.items()}


# ---------------------------------------------------------------------- silent trees


def derive_events(before: dict[int, State], after: dict[int, State]) -> list[ev.Event]:
    """What must have happened between two looks at a tree that tells nothing itself.

    Exact in which nodes came, went, grew and were split; the order of things is not known.
    """
    found: list[ev.Event] = []
    for number in sorted(before.keys() - after.keys()):
        node = before[number]
        why = "gone since the step before"
        found.append(ev.NodeEvicted(number, node["parent"], tuple(node["slots"]), "its own", why, None))
    for number in sorted(after.keys() - before.keys()):
        found.append(_arrival(number, before, after))
    for number in sorted(after.keys() & before.keys()):
        old, new = before[number], after[number]
        size = len(old["tokens"])
        if len(new["tokens"]) > size and new["tokens"][:size] == old["tokens"]:
            found.append(
                ev.NodeGrown(
                    number, tuple(new["tokens"][size:]), tuple(new["slots"][len(old["slots"]) :]),
                    new["last_access"], new["priority"],
                )
            )  # fmt: skip
        moved = new["lock_ref"] - old["lock_ref"]
        if moved:
            kind = ev.NodeLocked if moved > 0 else ev.NodeUnlocked
            found.append(kind(number, (number,), len(new["slots"])))
    return found


def _arrival(number: int, before: dict[int, State], after: dict[int, State]) -> ev.Event:
    node = after[number]
    for other, old in before.items():
        new = after.get(other)
        shorter = new is not None and new["parent"] == number and new["tokens"] != old["tokens"]
        if shorter and old["tokens"][: len(node["tokens"])] == node["tokens"]:
            return ev.NodeSplit(number, other, len(node["slots"]), node["last_access"])
    return ev.NodeInserted(
        number, node["parent"], tuple(node["tokens"]), tuple(node["slots"]),
        node["last_access"], node["priority"], node["namespace"],
    )  # fmt: skip
