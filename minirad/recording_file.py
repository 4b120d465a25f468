"""Reading a recording file, which is data from a stranger: bounded, typed, and replayed once before use.

Whoever draws a recording, or asks an engine what it asked, relies on this: every field has the type that its
event declares, every slot lies in the pool, every node, request and path is there when an event names it,
parents form no circle, and each keyframe is what the events before it lead to. Sizes are bounded, so that a
short file cannot ask for much memory.

What is wrong in the header refuses the file. What is wrong further on ends the reading there: the frames
before it are whole, and `Recording.missing` says what is not to be had, with file and line.

Nothing is fetched, and no name in a file is looked up here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from minirad import events as ev
from minirad.config import EngineConfig
from minirad.record import SCHEMA, Frame, Recording, ReplayState
from minirad.snapshot import State

LONGEST_LINE = 32 << 20  # bytes
MOST_PARTS = 2_000_000  # lists and objects in a line: each of them takes many times what it takes in the file
MOST_TOKENS = 1 << 26  # of a pool
MOST_PAGES = 1 << 22  # of a pool: pictures have a place for each
MOST_ROWS = 1 << 22  # slots of all rows together: requests that branch off name their leader's once more
MOST_NUMBER = 1 << 63

_REQUEST = re.compile(r"R\d{1,15}(\.\d{1,9})?", re.ASCII)


class _NoJson(ValueError):
    """A line that is no JSON; the last one of a file may have been cut off while it was written."""


# ---------------------------------------------------------------------- what a value may be


def _whole(value: Any) -> bool:
    return type(value) is int and -MOST_NUMBER < value < MOST_NUMBER


def _number(value: Any) -> bool:
    return _whole(value) or (type(value) is float and math.isfinite(value))


def _truth(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _many(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) in (list, tuple) and all(map(kind, value))


def _ids(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(v) is int and 0 <= v < MOST_NUMBER for v in value)


def _slots(value: Any) -> bool:
    return _ids(value) and all(slot < MOST_TOKENS for slot in value)


def _name(value: Any) -> bool:
    return type(value) is str and _REQUEST.fullmatch(value) is not None


def _or_none(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or kind(value)


def _at_least(least: int, most: int = MOST_NUMBER) -> Callable[[Any], bool]:
    return lambda value: _whole(value) and least <= value <= most


Check = Callable[[Any], bool]
# By the annotation of an event's or a configuration's field, and what to call it in a sentence.
_KINDS: dict[str, tuple[Check, str]] = {
    "int": (_whole, "a whole number of at most 64 bits"),
    "float": (_number, "a number"),
    "bool": (_truth, "true or false"),
    "str": (_text, "a text"),
    "Ints": (_ids, "a list of whole numbers, 0 or more"),
    "tuple[str, ...]": (_many(_text), "a list of texts"),
    "int | None": (_or_none(_whole), "a whole number or null"),
    "str | None": (_or_none(_text), "a text or null"),
    "bool | None": (_or_none(_truth), "true, false or null"),
    "str | Path | None": (_or_none(_text), "a text or null"),
}
_SLOTS = (_slots, f"a list of slots, 0 to {MOST_TOKENS - 1}")
_NODE = (_at_least(1), "a node's number, 1 or more")
_REQUEST_NAME = (_name, "a request's name such as R3 or R3.1")
# By the name of an event's field, where that says more than its annotation.
_FIELDS: dict[str, tuple[Check, str]] = {
    "slots": _SLOTS, "host_slots": _SLOTS, "request": _REQUEST_NAME, "leader": _REQUEST_NAME,
    "requests": (_many(_name), "a list of requests' names"), "upper": _NODE, "lower": _NODE,
}  # fmt: skip


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_fields(record: Any, kinds: Mapping[str, tuple[Check, str]], what: str) -> None:
    """All of `kinds` are in the record (a dict) and are what they have to be."""
    _require(type(record) is dict, f"{what} must be an object, got {reprlib.repr(record)}")
    for name, (check, meaning) in kinds.items():
        _require(name in record, f"{what} has no {name!r}")
        _require(check(record[name]), f"{what}: {name} must be {meaning}, got {reprlib.repr(record[name])}")


def _checks_of(kind: type) -> dict[str, tuple[Check, str]]:
    fields = dataclasses.fields(kind)
    return {each.name: _FIELDS.get(each.name) or _KINDS[str(each.type)] for each in fields}


_EVENTS = {kind.__name__: (kind, _checks_of(kind)) for kind in ev.EVENT_TYPES}
_CONFIG = {each.name: _KINDS.get(str(each.type), _KINDS["str"]) for each in dataclasses.fields(EngineConfig)}


def _event(flat: Any) -> ev.Event:
    """[name, field, ...] as an event, its types checked."""
    _require(
        type(flat) is list and bool(flat) and type(flat[0]) is str and flat[0] in _EVENTS,
        f"there is no event {reprlib.repr(flat)}",
    )
    kind, checks = _EVENTS[flat[0]]
    found = len(flat) - 1
    _require(found == len(checks), f"{flat[0]} has {len(checks)} fields, here there are {found}")
    for value, (name, (check, meaning)) in zip(flat[1:], checks.items(), strict=True):
        _require(check(value), f"{flat[0]}: {name} must be {meaning}, got {reprlib.repr(value)}")
    event: ev.Event = kind(*(tuple(value) if type(value) is list else value for value in flat[1:]))
    return event


# ---------------------------------------------------------------------- whole states


_WHOLE, _SIZE, _TEXT = _KINDS["int"], (_at_least(0), "a whole number, 0 or more"), _KINDS["str"]
_STATE = {
    "step": _SIZE, "kv_tokens": (_at_least(0, MOST_TOKENS), f"a whole number from 0 to {MOST_TOKENS}"),
    "free": _WHOLE, "waiting": (_many(_name), "a list of requests' names"),
}  # fmt: skip
_TREE = {
    "page_size": (_at_least(1, MOST_TOKENS), f"a whole number from 1 to {MOST_TOKENS}"),
    "eviction_policy": _TEXT, "tick": _WHOLE,
    "nodes": (_many(lambda node: type(node) is dict), "a list of objects"),
}  # fmt: skip
_HOST_TREE = {"host_tokens": _STATE["kv_tokens"], "host_free": _WHOLE, "host_write": _TEXT}
_TREE_NODE = {
    "id": _NODE, "parent": _SIZE, "tokens": _KINDS["Ints"], "slots": _SLOTS,
    **dict.fromkeys(("namespace", "lock_ref", "last_access", "created", "hits", "priority"), _WHOLE),
}  # fmt: skip
_HOST_NODE = {"host": _SLOTS, "copying": _KINDS["bool"], "loading": _KINDS["bool"]}
_STATE_REQUEST = {
    "row": _WHOLE, "node": (_or_none(_at_least(0)), "a node's number or null"), "slots": _SLOTS,
    **dict.fromkeys(("protected", "prompt_tokens", "length", "cached"), _SIZE),
    "attempts": _WHOLE, "priority": _WHOLE,
}  # fmt: skip


def check_state(state: Any) -> None:
    """ValueError in one sentence unless this is a whole state in the shape of `Engine.snapshot()`."""
    _check_fields(state, {**_STATE, "tree": (lambda t: type(t) is dict, "an object")}, "the state")
    tree = state["tree"]
    tiers = "host_tokens" in tree
    _check_fields(tree, {**_TREE, **(_HOST_TREE if tiers else {})}, "the tree")
    page = tree["page_size"]
    for what, size in (("kv_tokens", state["kv_tokens"]), ("host_tokens", tree.get("host_tokens", 0))):
        _require(size // page <= MOST_PAGES, f"{what} {size} are more than {MOST_PAGES} pages of {page}")
    seen: dict[int, State] = {}
    for node in tree["nodes"]:
        _check_fields(node, {**_TREE_NODE, **(_HOST_NODE if tiers else {})}, "a node")
        _require(node["id"] not in seen, f"node {node['id']} is there twice")
        seen[node["id"]] = node
        _check_node(node, state["kv_tokens"], tree)
    _check_parents({number: node["parent"] for number, node in seen.items()})
    _require(type(state.get("requests")) is dict, "the state has no object of requests")
    for name, request in state["requests"].items():
        _require(_name(name), f"a request has a name such as R3 or R3.1, not {reprlib.repr(name)}")
        _check_fields(request, _STATE_REQUEST, f"request {name}")
        _check_slots(request["slots"], state["kv_tokens"], page, f"request {name}")
        _require(
            request["node"] is None or request["node"] == 0 or request["node"] in seen,
            f"request {name} is at node {request['node']}, which is not there",
        )
    unknown = [name for name in state["waiting"] if name not in state["requests"]]
    _require(not unknown, f"{unknown[:1]} waits, but there is no such request")


def _check_slots(slots: Any, tokens: int, page: int, what: str) -> None:
    """Slots lie in a pool of so many tokens behind its dummy page; a tree on its own has none (0)."""
    if tokens and slots and max(slots) >= tokens + page:
        raise ValueError(f"{what}: slot {max(slots)} is not in a pool of {tokens} tokens")


def _check_node(node: State, tokens: int, tree: State) -> None:
    what, host = f"node {node['id']}", node.get("host", ())
    size = max(len(node["slots"]), len(host))
    _check_slots(node["slots"], tokens, tree["page_size"], what)
    if host:
        _check_host(host, tree, what)
    fits = len(node["slots"]) in (0, size) and len(host) in (0, size)
    _require(
        fits and size > 0 and len(node["tokens"]) in (size, 2 * size),
        f"{what} has {len(node['tokens'])} tokens, {len(node['slots'])} slots and {len(host)} in host memory",
    )


def _check_host(slots: Any, tree: State, what: str) -> None:
    page, tokens = tree["page_size"], tree["host_tokens"]
    if min(slots) < page or max(slots) >= tokens + page:
        raise ValueError(f"{what}: its host slots are not in a host tier of {tokens} tokens")


def _check_parents(parents: Mapping[int, int]) -> None:
    """Following parents from any node ends (at the root, or at a node that is not there)."""
    fine: set[int] = set()
    for start in parents:
        path: set[int] = set()
        node = start
        while node in parents and node not in fine:
            _require(node not in path, f"node {node} is its own ancestor")
            path.add(node)
            node = parents[node]
        fine |= path


# ---------------------------------------------------------------------- one event after another


class CheckedReplay(ReplayState):
    """A ReplayState that takes no event that does not follow from what was before: ValueError."""

    def apply(self, event: ev.Event) -> None:
        """Moves the state on by one event, if it fits."""
        handler = getattr(self, f"_check_{type(event).__name__}", self._check_named)
        handler(event)
        try:
            super().apply(event)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it does not fit the state: {error!r}") from error
        if isinstance(event, ev.RequestForked | ev.RequestAdmitted | ev.Committed | ev.SlotsAllocated):
            held = sum(len(request["slots"]) for request in self.requests.values())
            _require(held <= MOST_ROWS, f"{held} slots in the rows of requests; at most {MOST_ROWS} are read")

    def _known(self, *nodes: int) -> None:
        for number in nodes:
            _require(number == 0 or number in self.nodes, f"there is no node {number}")

    def _check_named(self, event: Any) -> None:
        """What an event names is there."""
        request = getattr(event, "request", None)
        _require(request is None or request in self.requests, f"there is no request {request}")
        for name in ("path", "nodes"):
            for number in getattr(event, name, ()):
                _require(number in self.nodes, f"there is no node {number}")
        self._known(getattr(event, "node", 0))
        self._in_pool(getattr(event, "slots", ()), event)

    def _in_pool(self, slots: Any, event: Any) -> None:
        tokens = self.rest["kv_tokens"]
        _check_slots(slots, tokens, self.tree["page_size"], type(event).__name__)

    def _check_RequestAdded(self, event: ev.RequestAdded) -> None:
        _require(event.request not in self.requests, f"request {event.request} is added twice")
        _require(bool(event.token_ids), f"request {event.request} has an empty prompt")

    def _check_RequestForked(self, event: ev.RequestForked) -> None:
        _require(event.leader in self.requests, f"there is no request {event.leader}")
        _require(event.request not in self.requests, f"request {event.request} is added twice")

    def _check_RequestAdmitted(self, event: ev.RequestAdmitted) -> None:
        self._check_named(event)
        _require(
            0 <= event.cached <= event.length and event.length > 0,
            f"{event.request} is admitted with {event.cached} of {event.length} tokens cached",
        )

    def _check_NodeInserted(self, event: ev.NodeInserted) -> None:
        _require(event.node > 0 and event.node not in self.nodes, f"node {event.node} is inserted twice")
        self._known(event.parent)
        self._check_units(event)

    def _check_NodeGrown(self, event: ev.NodeGrown) -> None:
        _require(event.node in self.nodes, f"there is no node {event.node}")
        self._check_units(event)

    def _check_units(self, event: ev.NodeInserted | ev.NodeGrown) -> None:
        size = len(event.slots)
        self._in_pool(event.slots, event)
        _require(
            size > 0 and len(event.tokens) in (size, 2 * size),
            f"node {event.node} gets {len(event.tokens)} tokens and {size} slots",
        )

    def _check_NodeSplit(self, event: ev.NodeSplit) -> None:
        _require(event.lower in self.nodes, f"there is no node {event.lower}")
        _require(event.upper not in self.nodes, f"node {event.upper} is made twice")
        node = self.nodes[event.lower]
        size = max(len(node["slots"]), len(node.get("host", ())))
        _require(0 < event.at < size, f"node {event.lower} of {size} tokens is split at {event.at}")

    def _check_VersionBumped(self, event: ev.VersionBumped) -> None:
        _require(len(event.old) == len(event.new), "VersionBumped names other namespaces than it renames")

    def _check_BatchScheduled(self, event: ev.BatchScheduled) -> None:
        _require(
            len(event.requests) == len(event.tokens), "BatchScheduled has not one count for each request"
        )

    # ------------------------------------------------------------ the host's tier

    def _check_tier(self, event: Any) -> None:
        _require(self.tiers, f"{type(event).__name__}: this tree has no host tier")
        numbers = event.nodes if hasattr(event, "nodes") else (event.node,)
        for number in numbers:
            _require(number in self.nodes, f"there is no node {number}")
        self._in_pool(getattr(event, "slots", ()), event)

    _check_BackupEnded = _check_LoadEnded = _check_NodeDemoted = _check_HostEvicted = _check_tier

    def _check_NodeAdopted(self, event: ev.NodeAdopted) -> None:
        self._check_tier(event)
        self._check_count(event, len(self.nodes[event.node]["host"]), len(event.slots))

    def _check_BackupStarted(self, event: ev.BackupStarted) -> None:
        self._check_tier(event)
        self._check_count(event, len(self.nodes[event.node]["slots"]), len(event.host_slots))
        if event.host_slots:
            _check_host(event.host_slots, self.tree, f"node {event.node}")

    def _check_LoadStarted(self, event: ev.LoadStarted) -> None:
        self._check_tier(event)
        self._check_count(event, sum(len(self.nodes[n]["host"]) for n in event.nodes), len(event.slots))

    @staticmethod
    def _check_count(event: ev.Event, wanted: int, found: int) -> None:
        _require(wanted == found, f"{type(event).__name__} brings {found} slots for {wanted} tokens")


class FrameCheck:
    """Takes frames in order; ValueError for one that does not follow from those before it.

    What a frame tells of a silent tree was put together afterwards and need not replay: there each frame
    has a keyframe, which says how it ended.
    """

    def __init__(self, start: State) -> None:
        self._replay = CheckedReplay(start)
        self._silent = False

    def take(self, frame: Frame) -> None:
        """The next frame."""
        if frame.index == 0:
            self._silent = frame.keyframe is not None
        if frame.keyframe is not None:
            try:
                check_state(frame.keyframe)
            except ValueError as error:
                raise ValueError(f"the keyframe of frame {frame.index} is no whole state: {error}") from error
        try:
            for event in frame.events:
                self._replay.apply(event)
        except ValueError as error:
            if not self._silent or frame.keyframe is None:
                told = f"frame {frame.index} does not follow from those before it"
                raise ValueError(f"{told}: {type(event).__name__}: {error}") from error
        if frame.keyframe is not None:
            if not self._silent and self._replay.snapshot() != frame.keyframe:
                raise ValueError(f"the keyframe of frame {frame.index} is not what its events lead to")
            self._replay = CheckedReplay(frame.keyframe) if self._silent else self._replay


# ---------------------------------------------------------------------- lines


def _parsed(line: bytes) -> Any:
    """The JSON of a line; ValueError."""
    parts = line.count(b"[") + line.count(b"{")
    _require(parts <= MOST_PARTS, f"{parts} lists and objects in one line; at most {MOST_PARTS} are read")
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise _NoJson(f"no UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise _NoJson(f"no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("no JSON of a recording: it is nested too deeply") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse_frame(line: bytes | str) -> Frame:
    """One line as a frame, the types of all its fields checked. ValueError says what is wrong."""
    read = _parsed(line.encode() if isinstance(line, str) else line)
    _require(type(read) is dict, f"not a frame: an object was expected, not {type(read).__name__}")
    kinds = {
        "frame": _SIZE, "step": _SIZE, "events": (lambda v: type(v) is list, "a list")
    }  # fmt: skip
    _check_fields(read, kinds, "not a frame: it")
    scene, keyframe = read.get("scene"), read.get("keyframe")
    _require(scene is None or _text(scene), f"scene must be a text, got {reprlib.repr(scene)}")
    _require(keyframe is None or type(keyframe) is dict, "keyframe must be an object")
    return Frame(read["frame"], read["step"], tuple(map(_event, read["events"])), keyframe, scene)


def parse_header(line: bytes, path: Path | str) -> State:
    """The first line; ValueError names the file."""
    try:
        header = _parsed(line.removeprefix(b"\xef\xbb\xbf"))
        schema = header["minirad"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} does not begin with the header of a recording") from error
    if schema != SCHEMA or type(schema) is not int:
        raise ValueError(f"{path} has schema {reprlib.repr(schema)}, this version reads {SCHEMA}")
    start = header.get("start")
    if not isinstance(start, dict) or not isinstance(start.get("tree"), dict):
        raise ValueError(f'{path}: the header has no "start" with a "tree" to start from')
    try:
        check_state(start)
        _check_about(header)
    except ValueError as error:
        raise ValueError(f"{path}, line 1: {error}") from error
    result: State = header
    return result


def _check_about(header: State) -> None:
    """What the header says of engine, model and workload."""
    for name in ("config", "model", "notes"):
        _require(
            name not in header or type(header[name]) is dict,
            f"{name} must be an object, got {reprlib.repr(header.get(name))}",
        )
    config, notes = header.get("config", {}), header.get("notes", {})
    _check_fields(config, {name: kind for name, kind in _CONFIG.items() if name in config}, "config")
    _check_fields(
        header.get("model", {}),
        {n: _KINDS[k] for n, k in _MODEL.items() if n in header.get("model", {})},
        "model",
    )
    _check_fields(notes, {name: kind for name, kind in _NOTES.items() if name in notes}, "notes")


_MODEL = {"parameters": "int | None", "tokenizer": "str | None"}
_NOTES = {
    "title": _TEXT, "workload": _TEXT, "refused": _TEXT,
    "labels": (lambda v: type(v) is dict and all(map(_text, [*v, *v.values()])), "texts by name"),
}  # fmt: skip


def _line(file: IO[bytes]) -> bytes:
    line = file.readline(LONGEST_LINE + 1)
    _require(len(line) <= LONGEST_LINE, f"longer than {LONGEST_LINE >> 20} MiB, which no frame is")
    return line


def read_recording(path: str | Path) -> Recording:
    """A file's header and its frames up to the first that is broken, missing or does not follow.

    ValueError for a file that has no whole header, or nothing whole behind it. `missing` of the result is
    one sentence on what was not read and why; "" for a whole file. A last line that was cut off (or is being
    written) is told by it, too, and is no reason to refuse a file.
    """
    with Path(path).open("rb") as file:
        try:
            first = _line(file)
        except ValueError as error:
            raise ValueError(f"{path} does not begin with the header of a recording") from error
        recording = Recording(parse_header(first, path))
        check = FrameCheck(recording.header["start"])
        number = 1
        while True:
            number += 1
            line = b""
            try:
                line = _line(file)
                if not line:
                    break
                if line.strip():
                    recording.frames.append(_next_frame(line, len(recording), check))
            except ValueError as error:
                if isinstance(error, _NoJson) and not line.endswith(b"\n"):
                    recording.missing = f"{path}, line {number}: the last line is cut off"
                    break
                recording.missing = f"{path}, line {number}: {error}"
                if not recording.frames:
                    raise ValueError(recording.missing) from error
                break
    if recording.missing:
        recording.missing += f"; what was before it can be seen ({len(recording)} steps)"
    return recording


def _next_frame(line: bytes, due: int, check: FrameCheck) -> Frame:
    frame = parse_frame(line)
    if frame.index != due:
        raise ValueError(f"this is frame {frame.index}, but frame {due} is due (a line was lost or moved)")
    check.take(frame)
    return frame
