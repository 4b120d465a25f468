"""What stands around the tree, as plain data for a browser: pool map, requests, events of a position.

Everything is text and numbers (JSON); the browser sets them as text, never as HTML. Pages are given as
ranges [first, last]. Nothing of the future is in it, so that a quiz cannot be read off the screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minirad.observe import events as ev
from minirad.observe.fleet_events import counted
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz.draw.charts import OWNERS
from viz.draw.fleet import in_words
from viz.notebook.reasons import Reasons
from viz.trace import (
    Decode,
    Trace,
    View,
    has_tiers,
    host_used,
    is_fleet,
    nodes_of,
    path_of,
    requests_of,
    summary_of,
    tier_of,
    tier_sums,
    units,
)
from viz.view.fleet import letters
from viz.view.pool import device_pool, host_pages, page_map, ranges
from viz.view.requests import Life, Lives, Span
from viz.view.text import pretty, visible
from viz.view.usage import usage_of
from viz.words import word_of

TEXTS_UP_TO = 2048  # pages; a larger pool's map does not say what each page holds
MOST_EVENTS = 200
MOST_REQUESTS = 60
MOST_RANKS = 16


class Ledger:
    """Requests through the frames, kept up as the recording grows. reasons: why each of them missed."""

    def __init__(self, recording: Recording, decode: Decode) -> None:
        self._recording, self._decode = recording, decode
        self.reasons = Reasons(recording, decode)
        self._lives = Lives(recording.header["start"])
        self._texts: dict[str, str] = {}  # of each prompt, by the request that came with it

    def requests(self, view: View) -> list[dict[str, Any]]:
        """Every request that was there by the moment on view, the latest `MOST_REQUESTS` of them."""
        self._lives.catch_up(self._recording.frames)
        step = self.step_of(view)
        started = [
            (life, past)
            for life in self._lives.by_id.values()
            if (past := life.spans_until(step)) and self._was_there(life, view)
        ]
        return [self._request(life, past, view) for life, past in started[-MOST_REQUESTS:]]

    def step_of(self, view: View) -> int:
        """The step that a position lies in: `view.step` only counts it once it has ended."""
        return self._recording.frames[view.frame].step if view.frame >= 0 else view.step

    def _was_there(self, life: Life, view: View) -> bool:
        """Within a step, a request that is added or forked later in it is not there yet."""
        return life.added < max(view.frame, 0) or any(life.id in requests_of(e) for e in view.so_far)

    def _request(self, life: Life, past: Sequence[Span], view: View) -> dict[str, Any]:
        live = view.state["requests"].get(life.id)
        page = int(view.state["tree"]["page_size"])
        admitted = life.admitted is not None and life.admitted <= view.frame
        return {
            "id": life.id,
            "text": self._text(life)[:400],
            "prompt": life.prompt,
            "cached": life.hit if admitted else -1,
            "spans": [[span.phase, span.start, span.end] for span in past],
            "ended": past[-1].ending if not live else "",
            "path": path_of(view.nodes, live["node"] if live else life.node_at(view.frame)),
            "pages": ranges([slot // page for slot in live["slots"]]) if live else [],
        }

    def _text(self, life: Life) -> str:
        if life.leader not in self._texts:
            self._texts[life.leader] = visible(pretty(self._decode(life.tokens))) if life.tokens else ""
        return self._texts[life.leader]


def payload(trace: Trace, view: View, ledger: Ledger) -> dict[str, Any]:
    """All that the picture of a position needs besides its SVG."""
    kind, sentence = summary_of(view)
    tiers = {"host": host_cells(view, trace.decode)} if has_tiers(view.state) else {}
    if is_fleet(view.state):
        tiers["ranks"] = ranks_told(view.state)
    return {
        **tiers,
        "granularity": view.granularity, "index": view.index, "title": view.title,
        "step": ledger.step_of(view),
        "kind": kind, "sentence": visible(sentence), "pool": pool_cells(view, trace.decode),
        "requests": ledger.requests(view), "events": event_lines(view, ledger.reasons),
    }  # fmt: skip


def ranks_told(state: State) -> dict[str, Any]:
    """Of a stream, which has no pool: a line for each rank, and how many there are."""
    rows = state["tree"]["ranks"]
    lines = [_rank_told(row) for row in rows[:MOST_RANKS]]
    if len(rows) > MOST_RANKS:
        lines.append(f"and {len(rows) - MOST_RANKS} more")
    return {"books": f"{len(rows)} in this stream", "lines": lines}


def _rank_told(row: State) -> str:
    media = [f"{letters(name)} {counted(blocks, 'block')}" for name, blocks in row["media"].items() if blocks]
    held = " · ".join(media) or "no blocks"
    lost = f" · {row['lost']:,} batch{'es' * (row['lost'] != 1)} lost" if row["lost"] else ""
    return f"rank {row['rank']} ({row['state']}): {held}{lost}"


def nodes_told(view: View, drawn: Iterable[int]) -> dict[int, str]:
    """Of a stream's nodes in the picture: how much each is, and which ranks hold it."""
    there = ((number, view.ghosts.get(number) or view.nodes.get(number)) for number in drawn)
    return {number: in_words(node, view) for number, node in there if node is not None}


def pool_cells(view: View, decode: Decode) -> dict[str, Any]:
    """The pool, page by page from page 1. cells: a node's id, 0 for free, -1, -2, ... for `names`.

    locked: a string of 0 and 1. texts: what each page says, or nothing for a large pool.
    """
    pool, page = page_map(view, with_ghosts=False), int(view.state["tree"]["page_size"])
    last, texts = len(pool.cells), dict[int, str]()
    if 0 < last <= TEXTS_UP_TO:
        for owner in device_pool(view.state).owners:
            texts.update(owner.texts(decode, page))
    return {
        "page_size": page, "names": list(pool.names),
        "cells": pool.cells.tolist(),
        "locked": (pool.locked + ord("0")).astype(np.uint8).tobytes().decode(),
        "texts": [visible(texts.get(n, "")) for n in range(1, last + 1)] if last <= TEXTS_UP_TO else [],
        "books": _told(view), "colours": list(OWNERS),
    }  # fmt: skip


def host_cells(view: View, decode: Decode) -> dict[str, Any]:
    """Host memory, page by page. cells: a node's id or 0; tiers: what each page is (viz.trace.TIERS)."""
    found = host_pages(view, decode)
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


def _told(view: View) -> str:
    """The pool's usage in words."""
    total, used = int(view.state["kv_tokens"]), usage_of(view)
    cached = f"{used.protected} protected · {used.evictable} evictable"
    if not total:
        return cached
    return f"{total - used.free} of {total} slots · {cached} · {used.private} private"


def _host_part(event: ev.Event, page: int) -> dict[str, Any]:
    """Pages of host memory that an event is about; nothing for most."""
    slots = getattr(event, "host_slots", ())
    return {"host": ranges([slot // page for slot in slots])} if slots else {}


def event_text(event: ev.Event, reasons: Reasons | None = None) -> str:
    """An event in words; of an admission also why it hit no further."""
    more = reasons.sentence(event) if reasons and isinstance(event, ev.RequestAdmitted) else ""
    return f"{event.describe()}; {more}" if more else event.describe()


def event_lines(view: View, reasons: Reasons | None = None) -> list[dict[str, Any]]:
    """The latest events of the position (by event: of its step so far), with what each points at."""
    events = view.so_far if view.granularity == "event" else view.events
    page = int(view.state["tree"]["page_size"])
    lines = []
    for event in events[-MOST_EVENTS:]:
        word = word_of(event)
        lines.append(
            {
                "tag": word.tag, "kind": word.kind, "text": visible(event_text(event, reasons)),
                "nodes": list(nodes_of(event)), "requests": list(requests_of(event)),
                "pages": ranges([slot // page for slot in getattr(event, "slots", ())]),
                **_host_part(event, page),
            }
        )  # fmt: skip
    return lines
