"""The page's panel of drafts as plain data: a line for each decoding request, the pool's pages, the sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viz.trace import Decode, Trace, View
from viz.view.drafts import Draft, DraftBook, draft_pages, told
from viz.view.pool import runs
from viz.view.text import pretty, visible

Json = dict[str, Any]
NOTHING: Json = {"lines": [], "pages": [], "sums": {}, "now": ""}  # where it cannot be made
_NOW = {"slots": "draft", "drafted": "draft", "verified": "verify", "returned": "return"}
_TOKEN = 24  # characters of a token that are shown


def drafts_part(book: DraftBook, trace: Trace, view: View) -> Json:
    """What the panel shows of a position. now: of single events, which of the stages it is."""
    drafts, sums = book.of(trace, view)
    latest = [draft for draft in drafts if draft.frame == view.frame]
    pages = draft_pages(latest, int(view.state["tree"]["page_size"]))
    what = "drafted" if trace.recording.header["config"].get("speculative") else "forced"
    return {
        "lines": [_line(draft, trace, what) for draft in drafts],
        "pages": [[fate, request, runs(numbers)] for fate, request, numbers in pages],
        "sums": {
            "drafted": sums.drafted,
            "accepted": sums.accepted,
            "length": sums.length,
            "a_pass": sums.a_pass,
            "tokens": sums.tokens,
            "forced": sums.forced,
        },
        "now": _stage(drafts, view),
    }


def _stage(drafts: Sequence[Draft], view: View) -> str:
    present = next((draft for draft in drafts if draft.now), None)
    if present is None:
        return ""
    if type(view.events[-1]).__name__ == "DraftVerified":  # also where there is nothing to give back
        return "verify"
    return "force" if present.forced else _NOW.get(present.stage, "")


def _line(draft: Draft, trace: Trace, what: str) -> Json:
    fates = draft.fates() if draft.tokens or draft.forced else ["held"] * len(draft.slots)
    said = [_said(trace.decode, token) for token in draft.tokens] or ["?"] * len(draft.slots)
    return {
        "request": draft.request,
        "step": trace.recording.frames[draft.frame].step,
        "stage": draft.stage,
        "tokens": [[text, fate] for text, fate in zip(said, fates, strict=True)],
        "own": [_said(trace.decode, token) for token in draft.own],
        "say": told(draft, what),
        "now": draft.now,
    }


def _said(decode: Decode, token: int) -> str:
    text = visible(pretty(decode([token])))
    text = text.replace(" ", "␣") if text.isspace() else text
    return text if len(text) <= _TOKEN else f"{text[: _TOKEN - 1]}…"
