"""Reading the lines of a recording, which is data from a stranger: bounded, and every field typed.

Pictures of a recording, and an engine that is asked again what it asked, rely on this: every field has the
type that its event declares, and in a whole state every slot lies in the pool and parents form no circle.
Sizes are bounded, so that a short file cannot ask for much memory. Whether an event fits the state that it
meets is looked at in replay.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from minirad.config import EngineConfig
from minirad.observe import draft_events  # noqa: F401  (each kind registers itself there)
from minirad.observe.disk_events import check_disk, has_disk  # those of a disk tier register themselves, too
from minirad.observe.event import Event, check_host_slots, check_slots, event_type, expect
from minirad.observe.events import EVENT_TYPES as EVENT_TYPES  # each kind registers itself there
from minirad.observe.fleet_events import (  # and those of streams here
    LONGEST_TEXT,
    MOST_RANKS,
    MOST_SPACES,
    RANK_STATES,
    check_held,
    check_media,
    check_size,
    check_unseen,
    count_blocks,
)
from minirad.observe.rank_events import check_ranks  # and those of engines of several ranks
from minirad.observe.route_events import check_routes  # and those of a router
from minirad.observe.snapshot import State, is_fleet

SCHEMA = 1  # of recordings
LONGEST_LINE = 64 << 20  # bytes: a start of 100,000 blocks of 64 tokens has 45 MB
MOST_PARTS = 2_000_000  # lists and objects in a line: each of them takes many times what it takes in the file
MOST_TOKENS = 1 << 26  # of a pool
MOST_PAGES = 1 << 22  # of a pool: pictures have a place for each
MOST_ROWS = 1 << 22  # slots of all rows together: requests that branch off name their leader's once more
MOST_NUMBER = 1 << 63

_REQUEST = re.compile(r"R\d{1,15}(\.\d{1,9})?", re.ASCII)


class NotJson(ValueError):
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
    "tuple[int, ...]": (_ids, "a list of whole numbers, 0 or more"),
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


def _check_fields(record: Any, kinds: Mapping[str, tuple[Check, str]], what: str) -> None:
    """All of `kinds` are in the record (a dict) and are what they have to be."""
    if type(record) is not dict:
        raise ValueError(f"{what} must be an object, got {reprlib.repr(record)}")
    for name, (check, meaning) in kinds.items():
        expect(name in record, f"{what} has no {name!r}")
        if not check(record[name]):  # its sentence would take longer than all checks
            raise ValueError(f"{what}: {name} must be {meaning}, got {reprlib.repr(record[name])}")


_CHECKS: dict[type[Event], dict[str, tuple[Check, str]]] = {}


def _checks_of(kind: type[Event]) -> dict[str, tuple[Check, str]]:
    """What each field of an event type has to be. TypeError for a field that no recording can hold."""
    if kind not in _CHECKS:
        checks = {}
        for each in dataclasses.fields(kind):  # type: ignore[arg-type]
            declared = each.type if isinstance(each.type, str) else inspect.formatannotation(each.type)
            check = _FIELDS.get(each.name) or _KINDS.get(declared.removeprefix("ev."))
            if check is None:
                what = f"event {kind.__name__}: a recording cannot hold {each.name}: {declared}"
                raise TypeError(f"{what}; it can hold {', '.join(_KINDS)}")
            checks[each.name] = check
        _CHECKS[kind] = checks
    return _CHECKS[kind]


_CONFIG = {each.name: _KINDS.get(str(each.type), _KINDS["str"]) for each in dataclasses.fields(EngineConfig)}
_CONFIG["lora"] = _KINDS["tuple[str, ...]"]  # the adapters' names


def event_fields(event: Event) -> list[Any]:
    """An event as a recording holds it: [name, field, ...], which keeps long recordings small."""
    kind = type(event)
    return [kind.__name__, *(getattr(event, name) for name in _checks_of(kind))]


def _least_fields(kind: type[Event]) -> int:
    """How many fields a recording has at least: those with a default came later than some recordings."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return sum(each.default is dataclasses.MISSING for each in fields)


def parse_event(flat: Any) -> Event:
    """[name, field, ...] as an event, its types checked."""
    named = type(flat) is list and bool(flat) and type(flat[0]) is str
    kind = event_type(flat[0]) if named else None
    if kind is None:
        raise ValueError(f"there is no event {reprlib.repr(flat)}")
    checks, values = _checks_of(kind), flat[1:]
    fits = _least_fields(kind) <= len(values) <= len(checks)
    expect(fits, f"{flat[0]} has {len(checks)} fields, here there are {len(values)}")
    for value, (name, (check, meaning)) in zip(values, checks.items(), strict=False):
        if not check(value):
            raise ValueError(f"{flat[0]}: {name} must be {meaning}, got {reprlib.repr(value)}")
    return kind(*(tuple(value) if type(value) is list else value for value in values))


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


_SHORT_TEXT = (lambda v: _text(v) and len(v) <= LONGEST_TEXT, f"a text of at most {LONGEST_TEXT} characters")
_OBJECT = (lambda value: type(value) is dict, "an object")
_FLEET = {
    "spaces": (_many(_SHORT_TEXT[0]), "a list of texts"),
    "ranks": (_many(_OBJECT[0]), "a list of objects"),
}  # fmt: skip
_FLEET_NODE = {
    "units": _SIZE, "blocks": _SIZE, "pairs": _KINDS["bool"], "seen": _KINDS["bool"], "held": _OBJECT,
    "slots": (lambda value: value == [], "an empty list"),
}  # fmt: skip
_FLEET_RANK = {
    "rank": (_at_least(0, MOST_RANKS - 1), f"a number from 0 to {MOST_RANKS - 1}"), "where": _SHORT_TEXT,
    "state": (lambda value: value in RANK_STATES, " or ".join(RANK_STATES)),
    "seq": (_at_least(-1), "a whole number, -1 or more"), "media": _OBJECT,
    **dict.fromkeys(("batches", "replayed", "lost", "unknown", "maybe"), _SIZE),
}  # fmt: skip


def check_state(state: Any) -> None:
    """ValueError in one sentence unless this is a whole state in the shape of `Engine.snapshot()`."""
    _check_fields(state, {**_STATE, "tree": (lambda t: type(t) is dict, "an object")}, "the state")
    tree = state["tree"]
    tiers = "host_tokens" in tree
    fleet = is_fleet(state)
    _check_fields(tree, {**_TREE, **(_HOST_TREE if tiers else {}), **(_FLEET if fleet else {})}, "the tree")
    page = tree["page_size"]
    for what, size in (("kv_tokens", state["kv_tokens"]), ("host_tokens", tree.get("host_tokens", 0))):
        expect(size // page <= MOST_PAGES, f"{what} {size} are more than {MOST_PAGES} pages of {page}")
    seen: dict[int, State] = {}
    kinds = {**_TREE_NODE, **(_HOST_NODE if tiers else {}), **(_FLEET_NODE if fleet else {})}
    for node in tree["nodes"]:
        _check_fields(node, kinds, "a node")
        expect(node["id"] not in seen, f"node {node['id']} is there twice")
        seen[node["id"]] = node
        if fleet:
            _check_fleet_node(node, len(tree["spaces"]))
        else:
            _check_node(node, state["kv_tokens"], tree)
    _check_parents({number: node["parent"] for number, node in seen.items()})
    expect(type(state.get("requests")) is dict, "the state has no object of requests")
    if "ranks" in state:
        check_ranks(state["ranks"])
    if has_disk(state):
        check_disk(tree)
    if fleet:
        _check_fleet(state)
    for name, request in state["requests"].items():
        expect(_name(name), f"a request has a name such as R3 or R3.1, not {reprlib.repr(name)}")
        _check_fields(request, _STATE_REQUEST, f"request {name}")
        check_slots(request["slots"], state["kv_tokens"], page, f"request {name}")
        expect(
            request["node"] is None or request["node"] == 0 or request["node"] in seen,
            f"request {name} is at node {request['node']}, which is not there",
        )
    unknown = [name for name in state["waiting"] if name not in state["requests"]]
    expect(not unknown, f"{unknown[:1]} waits, but there is no such request")


def _check_node(node: State, tokens: int, tree: State) -> None:
    what, host = f"node {node['id']}", node.get("host", ())
    size = max(len(node["slots"]), len(host))
    check_slots(node["slots"], tokens, tree["page_size"], what)
    if host:
        check_host_slots(host, tree, what)
    fits = len(node["slots"]) in (0, size) and len(host) in (0, size)
    expect(
        fits and size > 0 and len(node["tokens"]) in (size, 2 * size),
        f"{what} has {len(node['tokens'])} tokens, {len(node['slots'])} slots and {len(host)} in host memory",
    )


def _check_fleet_node(node: State, spaces: int) -> None:
    what = f"node {node['id']}"
    check_held(node["held"])
    expect(0 <= node["namespace"] < spaces, f"{what}: namespace {node['namespace']} of {spaces}")
    size = len(node["tokens"]), node["units"], node["blocks"]
    if node["seen"]:
        check_size(what, *size, node["pairs"])
    else:
        check_unseen(what, *size, node["held"])


def _check_fleet(state: State) -> None:
    """Ranks and sums of a stream's state, whose nodes are checked."""
    tree = state["tree"]
    own = state["kv_tokens"], state["free"], len(state["requests"]), len(state["waiting"])
    expect(own == (0, 0, 0, 0) and "host_tokens" not in tree, "a stream has no pool, tiers or requests")
    expect(len(tree["spaces"]) <= MOST_SPACES, f"{len(tree['spaces'])} namespaces; at most {MOST_SPACES}")
    check_routes(tree)
    sums: dict[str, State] = {}
    for at, rank in enumerate(tree["ranks"]):
        _check_fields(rank, _FLEET_RANK, "a rank")
        what = f"rank {rank['rank']}"
        expect(at == 0 or tree["ranks"][at - 1]["rank"] < rank["rank"], f"{what} is not in its place")
        for medium, blocks in rank["media"].items():
            check_media(medium)
            expect("+" not in medium and medium != "?", f"{what}: {medium!r} is no medium")
            expect(_whole(blocks) and blocks > 0, f"{what} has {reprlib.repr(blocks)} blocks in {medium}")
        sums[str(rank["rank"])] = {"media": {}, "maybe": 0}
    for node in tree["nodes"]:
        for name, media in node["held"].items():
            expect(name in sums, f"node {node['id']} is held by rank {name}, which is not there")
            count_blocks(sums[name], media, node["blocks"])
    for rank in tree["ranks"]:
        found, told = sums[str(rank["rank"])], {name: rank[name] for name in ("media", "maybe")}
        expect(
            found == told,
            f"rank {rank['rank']} has {reprlib.repr(told)}, but nodes have {reprlib.repr(found)}",
        )


def _check_parents(parents: Mapping[int, int]) -> None:
    """Following parents from any node ends (at the root, or at a node that is not there)."""
    fine: set[int] = set()
    for start in parents:
        path: set[int] = set()
        node = start
        while node in parents and node not in fine:
            expect(node not in path, f"node {node} is its own ancestor")
            path.add(node)
            node = parents[node]
        fine |= path


# ---------------------------------------------------------------------- lines


def _parsed(line: bytes) -> Any:
    """The JSON of a line; ValueError."""
    parts = line.count(b"[") + line.count(b"{")
    expect(parts <= MOST_PARTS, f"{parts} lists and objects in one line; at most {MOST_PARTS} are read")
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise NotJson(f"no UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise NotJson(f"no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("no JSON of a recording: it is nested too deeply") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse_frame(line: bytes | str) -> tuple[int, int, tuple[Event, ...], State | None, str | None]:
    """The fields of a `replay.Frame` from its line, their types checked. ValueError says what is wrong."""
    read = _parsed(line.encode() if isinstance(line, str) else line)
    expect(type(read) is dict, f"not a frame: an object was expected, not {type(read).__name__}")
    kinds = {
        "frame": _SIZE, "step": _SIZE, "events": (lambda v: type(v) is list, "a list")
    }  # fmt: skip
    _check_fields(read, kinds, "not a frame: it")
    scene, keyframe = read.get("scene"), read.get("keyframe")
    expect(scene is None or _text(scene), f"scene must be a text, got {reprlib.repr(scene)}")
    expect(keyframe is None or type(keyframe) is dict, "keyframe must be an object")
    return read["frame"], read["step"], tuple(map(parse_event, read["events"])), keyframe, scene


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


def check_notes(line: bytes) -> None:
    """ValueError unless these notes, as JSON, are taken in a header."""
    _check_about({"notes": _parsed(line)})


def _check_about(header: State) -> None:
    """What the header says of engine, model and workload."""
    for name in ("config", "model", "notes"):
        expect(
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


def read_line(file: IO[bytes]) -> bytes:
    """The next line; b"" at the end. ValueError if it is longer than any frame."""
    line = file.readline(LONGEST_LINE + 1)
    expect(len(line) <= LONGEST_LINE, f"longer than {LONGEST_LINE >> 20} MiB, which no frame is")
    return line
