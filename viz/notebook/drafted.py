"""Drafts of a recording as a chart: what was guessed in each step, what held, and what the reply got."""

from __future__ import annotations

from typing import Any, NamedTuple

import plotly.graph_objects as go

from minirad.observe.draft_events import DraftVerified, TokensDrafted
from minirad.observe.events import SlotsFreed
from viz.draw.charts import KvFigure

ACCEPTED, REJECTED, OWN = "drafted and accepted", "drafted and (rejected)", "the model's own"
COLOURS = {ACCEPTED: "#9fdcc4", REJECTED: "#f3bfb3", OWN: "#b5d6ee"}
SHORT = (("<|im_end|>", "[end]"), ("<|im_start|>", "[start]"), ("\n", "\\n"))


class Drafted(NamedTuple):
    """One step's drafts of one request, what became of them, and the slots that went back for it."""

    step: int
    draft: TokensDrafted
    verified: DraftVerified
    back: list[int]


def drafted_steps(recording: Any) -> list[Drafted]:
    """Each step of a recording with drafts. For one request at a time: of several in a step, the last."""
    found = []
    for frame in recording:
        events = {type(event): event for event in frame.events}
        if TokensDrafted in events:
            freed = (event for event in frame.events if isinstance(event, SlotsFreed))
            back = [slot for event in freed if event.cause == "rejected" for slot in event.slots]
            found.append(Drafted(frame.step, events[TokensDrafted], events[DraftVerified], back))
    return found


def draft_chart(stepper: Any) -> KvFigure:
    """Two lines for each step of a Stepper's recording: what was drafted, and what the reply got."""
    boxes, lines, at = [], [], 1  # the reply's first token came with the prompt
    for step, draft, verified, _ in drafted_steps(stepper.recording):
        lines += [f"{step}: draft", f"{step}: reply"]
        for line, tokens, others in ((lines[-2], draft.tokens, REJECTED), (lines[-1], verified.tokens, OWN)):
            for place, token in enumerate(tokens):
                kind = ACCEPTED if place < verified.accepted else others
                text, slot = _shown(stepper.trace.decode([token])), draft.slots[place : place + 1]
                text = f"({text})" if kind == REJECTED else text
                boxes.append((kind, line, at + place, text, f"slot {slot}" if line == lines[-2] else ""))
        at += len(verified.tokens)
    traces: list[Any] = [_bars(kind, [box for box in boxes if box[0] == kind]) for kind in COLOURS]
    traces.append(
        go.Scatter(
            x=[place + 0.1 for _, _, place, _, _ in boxes], y=[line for _, line, *_ in boxes],
            text=[text for *_, text, _ in boxes], mode="text", showlegend=False,
            textposition="middle right", hoverinfo="skip",
        )
    )  # fmt: skip
    return KvFigure(go.Figure(traces, {
        "title": {"text": "Step by step: what was drafted, and what the reply got"}, "template": "none",
        "barmode": "overlay", "height": 120 + 28 * len(lines),
        "xaxis": {"title": {"text": "tokens of the reply so far"}},
        "yaxis": {"autorange": "reversed", "categoryorder": "array", "categoryarray": lines},
        "margin": {"l": 70},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    }))  # fmt: skip


def _bars(kind: str, boxes: list[Any]) -> go.Bar:
    return go.Bar(
        y=[line for _, line, *_ in boxes], base=[place for _, _, place, _, _ in boxes], x=[1] * len(boxes),
        name=kind, hovertext=[slot for *_, slot in boxes], orientation="h", marker={"color": COLOURS[kind]},
    )  # fmt: skip


def _shown(text: str) -> str:
    """A token's text, short."""
    for sign, short in SHORT:
        text = text.replace(sign, short)
    return "[space]" if text == " " else text
