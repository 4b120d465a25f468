"""What stands around the tree, as plain data for a browser: pool map, requests, events of a position.

Everything is text and numbers (JSON); the browser sets them as text, never as HTML. Pages are given as
ranges [first, last]. Nothing of the future is in it, so that a quiz cannot be read off the screen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirad import events as ev
from minirad.record import Recording
from viz import kv
from viz.trace import (
    Decode,
    Trace,
    View,
    has_tiers,
    host_used,
    key_tokens,
    nodes_of,
    path_of,
    requests_of,
    summary,
    tier_of,
    tier_sums,
    units,
)
from viz.tree import pretty, visible
from viz.words import word_of

TEXTS_UP_TO = 2048  # pages; a larger pool's map does not say what each page holds
MOST_EVENTS = 200
MOST_REQUESTS = 60


@dataclass(slots=True)
class _Life:
    """What is known of a request so far."""

    text: str
    prompt: int
    cached: int = -1
    admitted: int = -1  # frame
    frames: list[int] = field(default_factory=list)  # of its commits
    ends: list[int] = field(default_factory=list)  # the node at which each of them ended


class Ledger:
    """Requests through the frames, kept up as the recording grows."""

    def __init__(self, recording: Recording, decode: Decode) -> None:
        self._recording, self._decode = recording, decode
        self._frames = 0
        self._lives: dict[str, _Life] = {}
        self._spans = kv.Lives(recording.header["start"])

    def _catch_up(self) -> None:
        for frame in self._recording.frames[self._frames :]:
            for event in frame.events:
                self._note(frame.index, event)
            self._spans.frame(frame.step, frame.events)
            self._frames += 1

    def _note(self, frame: int, event: ev.Event) -> None:
        if isinstance(event, ev.RequestAdded):
            text = pretty(self._decode(event.token_ids))
            self._lives[event.request] = _Life(visible(text), len(event.token_ids))
        elif isinstance(event, ev.RequestForked):
            leader = self._lives[event.leader] if event.leader in self._lives else _Life("", 0)
            self._lives[event.request] = _Life(leader.text, leader.prompt)
        elif isinstance(event, ev.RequestAdmitted) and event.attempt == 1:
            life = self._lives.setdefault(event.request, _Life("", event.length))
            life.cached, life.admitted = event.cached, frame
        elif isinstance(event, ev.Committed):
            life = self._lives.setdefault(event.request, _Life("", 0))
            life.frames.append(frame)
            life.ends.append(event.node)

    def requests(self, view: View) -> list[dict[str, Any]]:
        """Every request that was there by the moment on view, the latest `MOST_REQUESTS` of them."""
        self._catch_up()
        step = self.step_of(view)
        started = {
            name: past
            for name, all_spans in self._spans.spans.items()
            if (past := _until(all_spans, step)) and self._was_there(name, view)
        }
        return [self._request(name, past, view) for name, past in list(started.items())[-MOST_REQUESTS:]]

    def step_of(self, view: View) -> int:
        """The step that a position lies in: `view.step` only counts it once it has ended."""
        return self._recording.frames[view.frame].step if view.frame >= 0 else view.step

    def _was_there(self, name: str, view: View) -> bool:
        """Within a step, a request that is added or forked later in it is not there yet."""
        return name in view.state["requests"] or not any(
            isinstance(event, ev.RequestAdded | ev.RequestForked) and event.request == name
            for event in self._recording.frames[view.frame].events
            if view.frame >= 0
        )

    def _request(self, name: str, past: Sequence[kv.Span], view: View) -> dict[str, Any]:
        life = self._lives.get(name) or _Life("", 0)
        live = view.state["requests"].get(name)
        page = int(view.state["tree"]["page_size"])
        node = live["node"] if live else self._end(life, view.frame)
        ended = past[-1].ending if not live else ""
        return {
            "id": name,
            "text": life.text[:400],
            "prompt": life.prompt,
            "cached": life.cached if 0 <= life.admitted <= view.frame else -1,
            "spans": [[span.phase, span.start, span.end] for span in past],
            "ended": ended,
            "path": path_of(view.nodes, node),
            "pages": ranges(slot // page for slot in live["slots"]) if live else [],
        }

    def _end(self, life: _Life, frame: int) -> int | None:
        at = bisect_right(life.frames, frame) - 1
        return life.ends[at] if at >= 0 else None


def _until(spans: Sequence[kv.Span], step: int) -> list[kv.Span]:
    """Spans up to a step; the one in progress is cut there and its ending left out."""
    past = [span for span in spans if span.start <= step]
    if past and past[-1].end > step:
        last = past[-1]
        past[-1] = kv.Span(last.request, last.phase, last.start, step)
    return past


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as sorted ranges: 1 2 3 7 -> [[1, 3], [7, 7]]."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def payload(trace: Trace, view: View, ledger: Ledger) -> dict[str, Any]:
    """All that the picture of a position needs besides its SVG."""
    kind, sentence = summary(view.events)
    tiers = {"host": host_cells(view, trace.decode)} if has_tiers(view.state) else {}
    return {
        **tiers,
        "granularity": view.granularity, "index": view.index, "title": view.title,
        "step": ledger.step_of(view),
        "kind": kind, "sentence": visible(sentence), "pool": pool_cells(view, trace.decode),
        "requests": ledger.requests(view), "events": event_lines(view),
    }  # fmt: skip


def pool_cells(view: View, decode: Decode) -> dict[str, Any]:
    """The pool, page by page from page 1. cells: a node's id, 0 for free, -1, -2, ... for `names`.

    locked: a string of 0 and 1. texts: what each page says, or nothing for a large pool.
    """
    page, total = int(view.state["tree"]["page_size"]), int(view.state["kv_tokens"])
    owner: dict[int, int] = {}
    names: list[str] = []
    for name, request in view.state["requests"].items():
        private = request["slots"][request["protected"] :]
        if private:
            names.append(name)
            owner.update({slot // page: -len(names) for slot in private})
    locked_nodes, texts = set(), {}
    last = total // page
    for node in view.state["tree"]["nodes"]:
        numbers = [slot // page for slot in node["slots"][::page]]
        last = max(last, *numbers, 0) if not total else last
        owner.update(dict.fromkeys(numbers, node["id"]))
        if node["lock_ref"]:
            locked_nodes.add(node["id"])
        if last <= TEXTS_UP_TO:
            tokens = key_tokens(node)
            for at, number in enumerate(numbers):
                texts[number] = visible(decode(tokens[at * page : (at + 1) * page]))
    every = range(1, last + 1)
    locked = {number for number, who in owner.items() if who < 0 or who in locked_nodes}
    return {
        "page_size": page, "names": names, "cells": [owner.get(number, 0) for number in every],
        "locked": "".join("1" if number in locked else "0" for number in every),
        "texts": [texts.get(number, "") for number in every] if last <= TEXTS_UP_TO else [],
        "books": _books(view), "colours": list(kv.OWNERS),
    }  # fmt: skip


def host_cells(view: View, decode: Decode) -> dict[str, Any]:
    """Host memory, page by page. cells: a node's id or 0; tiers: what each page is (viz.trace.TIERS)."""
    found = kv.host_pages(view, decode)
    tree = view.state["tree"]
    only = sum(units(node) for node in tree["nodes"] if tier_of(node) == "host")
    pending = sum(len(node["host"]) for node in tree["nodes"] if tier_of(node) in ("copying", "loading"))
    used = host_used(tree)
    sums = tier_sums(view.events)
    told = [f"{sums[name]} {word}" for name, word in _SUMS.items() if sums[name]]
    return {
        "cells": [page.node for page in found], "tiers": [page.tier for page in found],
        "texts": [visible(page.text) for page in found] if len(found) <= TEXTS_UP_TO else [],
        "books": f"{used} of {tree['host_tokens']} slots · {only} only here · {pending} pending",
        "sums": f"tokens in this {view.granularity}: {', '.join(told)}" if told else "",
        "mode": tree["host_write"],
    }  # fmt: skip


_SUMS = {
    "copied": "copied to the host", "demoted": "demoted", "loaded": "loaded back", "again": "computed again",
    "host_evicted": "evicted from the host",
}  # fmt: skip


def _books(view: View) -> str:
    total, free = int(view.state["kv_tokens"]), int(view.state["free"])
    nodes = view.state["tree"]["nodes"]
    protected = sum(len(node["slots"]) for node in nodes if node["lock_ref"])
    evictable = sum(len(node["slots"]) for node in nodes if not node["lock_ref"])
    if not total:
        return f"{protected} protected · {evictable} evictable"
    private = total - free - protected - evictable
    return (
        f"{total - free} of {total} slots · {protected} protected · {evictable} evictable · {private} private"
    )


def _host_part(event: ev.Event, page: int) -> dict[str, Any]:
    """Pages of host memory that an event is about; nothing for most."""
    slots = getattr(event, "host_slots", ())
    return {"host": ranges(slot // page for slot in slots)} if slots else {}


def event_lines(view: View) -> list[dict[str, Any]]:
    """The latest events of the position (by event: of its step so far), with what each points at."""
    events = view.so_far if view.granularity == "event" else view.events
    page = int(view.state["tree"]["page_size"])
    lines = []
    for event in events[-MOST_EVENTS:]:
        word = word_of(event)
        lines.append(
            {
                "tag": word.tag, "kind": word.kind, "text": visible(event.describe()),
                "nodes": list(nodes_of(event)), "requests": list(requests_of(event)),
                "pages": ranges(slot // page for slot in getattr(event, "slots", ())),
                **_host_part(event, page),
            }
        )  # fmt: skip
    return lines
