"""What `minirad why` found, as one Plotly page: what each cause cost, what changes save, each request.

Reads plain data (the command's report), so that a saved JSON draws the same page. The file holds Plotly's own
JavaScript: it opens without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minirad import command
from minirad.why.answer import CAUSES
from viz.simulate import COLOURS

HIT, OTHER = "#009e73", "#adb5bd"
PATTERNS = ("", "/", ".", "x")  # a cause is told from another by its pattern as well
MOST_LINES = 10  # of a kind, in the tables
WIDTH = 60  # characters of a name on an axis

Report = dict[str, Any]


def figure(report: Report) -> go.Figure:
    """Tokens lost by cause, worst first; what changes save; hits and losses in the order of the requests."""
    drawn = make_subplots(
        rows=2, cols=2, specs=[[{}, {}], [{"colspan": 2}, None]], vertical_spacing=0.2,
        subplot_titles=[f"computed {report['unit']}s, by cause", "saved, if it were so (replayed)",
                        _series_title(report)],
    )  # fmt: skip
    drawn.add_trace(cause_bars(report), row=1, col=1)
    drawn.add_trace(repair_bars(report), row=1, col=2)
    for bars in request_bars(report):
        drawn.add_trace(bars, row=2, col=1)
    for column in (1, 2):
        drawn.update_yaxes(autorange="reversed", automargin=True, row=1, col=column)
        drawn.update_xaxes(title_text=f"{report['unit']}s", rangemode="tozero", row=1, col=column)
    drawn.update_xaxes(title_text="requests, in order", row=2, col=1)
    drawn.update_yaxes(title_text=f"{report['unit']}s", row=2, col=1)
    drawn.update_layout(
        template="plotly_white", height=860, barmode="stack", bargap=0.1, title=_title(report),
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 12},
        legend={"orientation": "h", "y": -0.12},
    )  # fmt: skip
    return drawn


def write_html(report: Report, path: str | Path) -> None:
    """A page that opens anywhere, without a network (about 5 MB: Plotly's JavaScript is inside)."""
    chart = figure(report).to_html(include_plotlyjs=True, full_html=False)
    said = "".join(f"<li>{escape(answer['say'])}</li>" for answer in report["answers"][:MOST_LINES])
    notes = "".join(f"<li>{escape(note)}</li>" for note in report["notes"][:MOST_LINES])
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Why did it miss?</title>'
        '<body style="font-family: Inter, Helvetica, Arial, sans-serif; max-width: 1200px; margin: 1em auto">'
        f"{chart}<h2>The requests asked about</h2><ul>{said}</ul>"
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + "</body></html>"
    )
    with command.named(path):
        Path(path).write_text(page, encoding="utf-8", errors="replace")


def cause_bars(report: Report) -> go.Bar:
    """What each cause cost, worst first."""
    causes = report["causes"]
    return go.Bar(
        y=[each["what"] for each in causes], x=[each["tokens"] for each in causes], orientation="h",
        customdata=[each["requests"] for each in causes], showlegend=False,
        hovertemplate="%{x:,} in %{customdata:,} requests<extra>%{y}</extra>",
        marker={"color": [_colour(each["cause"]) for each in causes]},
        text=[f"{each['tokens']:,}" for each in causes],
    )  # fmt: skip


def repair_bars(report: Report) -> go.Bar:
    """What each change saves, most first; none that saves nothing."""
    repairs = [each for each in report["repairs"] if each["saved"] > 0]
    return go.Bar(
        y=[_short(each["what"]) for each in repairs], x=[each["saved"] for each in repairs], orientation="h",
        showlegend=False, hovertemplate="%{x:,}<extra>%{y}</extra>", marker={"color": HIT},
        text=[f"{each['saved']:,}" for each in repairs],
    )  # fmt: skip


def request_bars(report: Report) -> list[go.Bar]:
    """Hits and each cause's losses, over the requests in their order."""
    bars, width = report["series"]["bars"], report["series"]["width"]
    places = [1 + number * width for number in range(len(bars))]
    names = ["cached", *(each["cause"] for each in report["causes"])]
    return [
        go.Bar(
            x=places, y=[bar.get(name, 0) for bar in bars], width=width,
            name="from the cache" if name == "cached" else CAUSES[name],
            marker={"color": _colour(name), "pattern": {"shape": _pattern(name)}, "line": {"width": 0}},
        )
        for name in names
    ]  # fmt: skip


def _colour(cause: str) -> str:
    if cause == "cached":
        return HIT
    kinds: Sequence[str] = [each for each in COLOURS if each != HIT]
    number = list(CAUSES).index(cause)
    return kinds[number % len(kinds)] if cause != "new" else OTHER


def _pattern(cause: str) -> str:
    return "" if cause == "cached" else PATTERNS[list(CAUSES).index(cause) // len(COLOURS) % len(PATTERNS)]


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _title(report: Report) -> str:
    share = report["cached"] / max(report["tokens"], 1)
    return (
        f"{escape(str(report['log']))}: {report['requests']:,} requests, {report['tokens']:,} prompt "
        f"{report['unit']}s, {share:.1%} from the cache"
    )


def _series_title(report: Report) -> str:
    width = report["series"]["width"]
    return "each request" if width == 1 else f"each {width:,} requests"
