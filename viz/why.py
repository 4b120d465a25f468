"""What `minirad why` found, as one Plotly page: sessions turn by turn, what each cause cost, what saves it.

Of a session: a bar for each turn, the places where its prefix broke, named, and its prompts as a tree.

Reads plain data (the command's report), so that a saved JSON draws the same page. The file holds Plotly's own
JavaScript: it opens without a network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from minirad import command
from minirad.observe.recording import Recording
from minirad.why.answer import CAUSES
from minirad.why.recorded import Recorded
from minirad.why.report import Totals, asked_for
from minirad.why.turns import BREAKS
from viz.draw.charts import KvFigure
from viz.draw.dot import DotError
from viz.draw.tree import svg
from viz.simulate import COLOURS
from viz.turns import session_dot
from viz.view.text import visible

HIT, OTHER = "#009e73", "#adb5bd"
PATTERNS = ("", "/", ".", "x")  # a cause is told from another by its pattern as well
MOST_LINES = 10  # of a kind, in the tables
MOST_BREAKS = 20  # of a session, in its table
NAMES_ABREAST, NAME_ROWS, NAME_HEIGHT = 7, 3, 29  # names of breaks above a session's bars
WIDTH = 52  # characters of a name on an axis
FITS = 1300  # points: a tree so wide is shown smaller, and not cut
BROKE = "#c92a2a"
FONT = {"family": "Inter, Helvetica, Arial, sans-serif", "size": 12}
STYLE = (
    "body{font:14px Inter,Helvetica,Arial,sans-serif;color:#212529;max-width:1240px;"
    "margin:0 auto;padding:0 16px}"
    "h1{font-size:18px;margin:12px 0 4px}h2{font-size:15px;margin:14px 0 2px}"
    "h3{font-size:13px;margin:10px 0 2px}"
    "h1,h2,td,li{overflow-wrap:anywhere}"
    "table{border-collapse:collapse;font-size:12px}td,th{padding:2px 10px 2px 0;text-align:left;"
    "border-bottom:1px solid #e9ecef;vertical-align:top}td.n{text-align:right}"
    ".tree{overflow:auto;max-height:880px;border:1px solid #e9ecef}"
    ".fits svg{max-width:100%;height:auto}"
)

Report = dict[str, Any]


def figure(report: Report) -> go.Figure:
    """Tokens lost by cause, worst first; what changes save; hits and losses in the order of the requests."""
    drawn = make_subplots(
        rows=2, cols=2, specs=[[{}, {}], [{"colspan": 2}, None]], vertical_spacing=0.2,
        horizontal_spacing=0.3,
        subplot_titles=[f"computed {report['unit']}s, by cause", "saved, if it were so (replayed)",
                        _series_title(report)],
    )  # fmt: skip
    drawn.add_trace(cause_bars(report), row=1, col=1)
    drawn.add_trace(repair_bars(report), row=1, col=2)
    if not any(each["saved"] > 0 for each in report["repairs"]):
        drawn.add_annotation(
            text="nothing that was tried saves anything", x=0.5, y=0.5, xref="x2 domain", yref="y2 domain",
            showarrow=False,
        )  # fmt: skip
        drawn.update_xaxes(showticklabels=False, row=1, col=2)
        drawn.update_yaxes(showticklabels=False, row=1, col=2)
    for bars in request_bars(report):
        drawn.add_trace(bars, row=2, col=1)
    for column in (1, 2):
        drawn.update_yaxes(autorange="reversed", automargin=True, row=1, col=column)
        drawn.update_xaxes(title_text=f"{report['unit']}s", rangemode="tozero", row=1, col=column)
    drawn.update_xaxes(title_text=f"{report['each']}s, in order", row=2, col=1)
    drawn.update_yaxes(title_text=f"{report['unit']}s", row=2, col=1)
    drawn.update_layout(
        template="plotly_white", height=780, barmode="stack", bargap=0.1, font=FONT,
        legend={"orientation": "h", "y": -0.12},
    )  # fmt: skip
    return drawn


def write_html(report: Report, path: str | Path) -> None:
    """A page that opens anywhere, without a network (about 5 MB: Plotly's JavaScript is inside)."""
    sessions = "".join(map(partial(_session, report), report.get("sessions", ())))
    chart = figure(report).to_html(include_plotlyjs=False, full_html=False)
    said = _items([answer["say"] for answer in report["answers"]], report["left"])
    notes = _items(report["notes"])
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Why did it miss?</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script>"
        f"<body><h1>{_title(report)}</h1>{sessions}"
        f"<h2>The whole log</h2>{chart}<h2>The requests asked about</h2><ul>{said}</ul>"
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + "</body></html>"
    )
    command.write_whole(path, page, errors="replace")


def _items(lines: Sequence[str], left: int = 0) -> str:
    """The first lines as a list's, and how many more there are; left: that many are not in it."""
    left += max(len(lines) - MOST_LINES, 0)
    more = [f"... and {left:,} more"] if left else []
    return "".join(f"<li>{_plain(line)}</li>" for line in [*lines[:MOST_LINES], *more])


# ---------------------------------------------------------------------- a session


def _session(report: Report, session: dict[str, Any]) -> str:
    """A session's part of the page."""
    try:
        tree = svg(session_dot(session, report["unit"]))
    except DotError as error:
        tree = f"<p>{_plain(str(error))}</p>"
    chart = session_figure(session, report["unit"]).to_html(include_plotlyjs=False, full_html=False)
    name = _plain(session["session"]) or "requests without a session"
    turns = len(session["turns"])
    more = f", the first {turns:,} shown" if session["more"] else ""
    head = (
        f"{name}: {turns + session['more']:,} turns{more}, {session['computed']:,} {report['unit']}s computed"
    )
    return (
        f"<section><h2>{head}</h2>{chart}{_break_table(session)}"
        f"<h3>Its prompts as a tree: a branch is where a prefix broke</h3>"
        f'<div class="tree{_fits(tree)}">{tree}</div></section>'
    )


def _fits(tree: str) -> str:
    """A picture a little wider than the page is made smaller; one that is much wider is scrolled."""
    width = re.search(r'<svg width="(\d+)pt"', tree)
    return " fits" if width and int(width[1]) <= FITS else ""


def session_figure(session: dict[str, Any], unit: str = "token") -> go.Figure:
    """Two rows over the turns: each prompt (hit and computed), and what was computed alone, by cause."""
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.62, 0.38])
    turns = session["turns"]
    places = list(range(1, len(turns) + 1))
    names = [_plain(turn["name"]) for turn in turns]
    causes = sorted({cause for turn in turns for cause in turn["lost"]}, key=list(CAUSES).index)
    hits = [turn["cached"] for turn in turns]
    drawn.add_trace(_turn_bars(places, hits, names, "cached", True), row=1, col=1)
    for cause in causes:
        lost = [turn["lost"].get(cause, 0) for turn in turns]
        drawn.add_trace(_turn_bars(places, lost, names, cause, True), row=1, col=1)
        drawn.add_trace(_turn_bars(places, lost, names, cause, False), row=2, col=1)
    drawn.update_yaxes(title_text=f"prompt, {unit}s", rangemode="tozero", row=1, col=1)
    drawn.update_yaxes(title_text="computed", rangemode="tozero", row=2, col=1)
    drawn.update_xaxes(title_text="turns, in order", row=2, col=1, range=[0.2, len(turns) + 0.8])
    rows = _mark_breaks(drawn, session)
    drawn.update_layout(
        template="plotly_white", height=326 + NAME_HEIGHT * rows, barmode="stack", bargap=0, font=FONT,
        legend={"orientation": "h", "y": -0.24, "traceorder": "normal"},
        margin={"l": 70, "r": 20, "t": 12 + NAME_HEIGHT * rows, "b": 20},
    )  # fmt: skip
    return drawn


def _turn_bars(places: list[int], heights: list[int], names: list[str], kind: str, whole: bool) -> go.Bar:
    return go.Bar(
        x=places, y=heights, customdata=names, name=_kind(kind), legendgroup=kind, showlegend=whole,
        hovertemplate="turn %{x} (%{customdata}): %{y:,}<extra>" + _kind(kind) + "</extra>",
        marker={"color": _colour(kind), "pattern": {"shape": _pattern(kind)}, "line": {"width": 0}},
    )  # fmt: skip


def _mark_breaks(drawn: go.Figure, session: dict[str, Any]) -> int:
    """A line at each break, named if there is room: compactions, then what cost most. Rows of names."""
    broke = [(at, turn["break"]) for at, turn in enumerate(session["turns"], start=1) if "break" in turn]
    count = len(session["turns"])
    wide = count / NAMES_ABREAST
    names: list[dict[str, Any]] = []
    taken: list[list[float]] = [[] for _ in range(NAME_ROWS)]  # where names begin, in turns
    for at, each in sorted(broke, key=lambda item: (item[1]["kind"] != "compaction", -item[1]["computed"])):
        right = at > count - wide
        begin = at - wide if right else at
        row = next((n for n in range(NAME_ROWS) if all(abs(begin - x) >= wide for x in taken[n])), None)
        if row is not None:
            taken[row].append(begin)
            side = "right" if right else "left"
            names.append({
                "x": at - 0.5, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "showarrow": False,
                "yshift": NAME_HEIGHT * row, "xanchor": side, "align": side,
                "font": {"size": 11, "color": BROKE},
                "text": f"<b>{BREAKS[each['kind']]}</b><br>turn {at}: {each['computed']:,} computed",
            })  # fmt: skip
    line = {"color": BROKE, "width": 1.5, "dash": "dash"}
    lines = [
        {"type": "line", "x0": at - 0.5, "x1": at - 0.5, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        for at, _ in broke
    ]
    drawn.update_layout(
        shapes=lines, annotations=names
    )  # all at once: Plotly looks at all for each one added
    return max(1, sum(map(bool, taken)))


def _break_table(session: dict[str, Any]) -> str:
    """The breaks, what cost most first."""
    broke = [(at, turn) for at, turn in enumerate(session["turns"], start=1) if "break" in turn]
    if not broke:
        return "<p>Every turn goes on from all that the one before was asked.</p>"
    broke.sort(key=lambda item: -item[1]["break"]["computed"])
    rows = "".join(
        f"<tr><td>{at:,}</td><td>{_plain(turn['name'])}</td><td>{BREAKS[turn['break']['kind']]}</td>"
        f"<td>{_plain(turn['break']['what'])}</td><td>{_plain(turn['break']['part'])}</td>"
        + "".join(f"<td class=n>{turn['break'][each]:,}</td>" for each in ("computed", "again", "lost"))
        + "</tr>"
        for at, turn in broke[:MOST_BREAKS]
    )
    more = f"<p>and {len(broke) - MOST_BREAKS:,} more</p>" if len(broke) > MOST_BREAKS else ""
    head = "".join(f"<th>{each}</th>" for each in (
        "turn", "in the log", "what broke the prefix", "", "from here on", "computed", "of them again",
        "given up",
    ))  # fmt: skip
    return f"<table><tr>{head}</tr>{rows}</table>{more}"


# ---------------------------------------------------------------------- the whole log


def misses(recording: Recording) -> KvFigure:
    """Each admission of a recording, in order: how much came from the cache, and why the rest did not."""
    told, totals = Recorded.of(recording), Totals()
    for answer in told.answers.values():
        totals.add(answer)
    report = totals.report("", "token", {})
    bars, base = request_bars(report), [0] * len(report["series"]["bars"])
    for trace in bars:  # stacked by hand: the still picture knows no barmode
        if report["series"]["width"] == 1:
            trace.x, trace.width = list(told.answers), None
        trace.base = list(base)
        base = [low + more for low, more in zip(base, trace.y, strict=True)]
    drawn = KvFigure(bars)
    drawn.update_layout(
        template="none", barmode="overlay", bargap=0.15, font=FONT, height=320,
        title="Prompt tokens of each request, by what became of them", legend={"orientation": "h", "y": -0.2},
    )  # fmt: skip
    return drawn


def cause_bars(report: Report) -> go.Bar:
    """What each cause cost, worst first."""
    causes = report["causes"]
    return go.Bar(
        y=[each["what"] for each in causes], x=[each["tokens"] for each in causes], orientation="h",
        customdata=[each["requests"] for each in causes], showlegend=False,
        hovertemplate=f"%{{x:,}} in %{{customdata:,}} {report['each']}s<extra>%{{y}}</extra>",
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
            name=_kind(name),
            marker={"color": _colour(name), "pattern": {"shape": _pattern(name)}, "line": {"width": 0}},
        )
        for name in names
    ]  # fmt: skip


def _kind(cause: str) -> str:
    return "from the cache" if cause == "cached" else CAUSES[cause]


def _plain(text: str) -> str:
    """A text of the log, as HTML and as Plotly's labels show it."""
    return escape(visible(text))


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
    return f"{escape(str(report['log']))}: {asked_for(report)}, {share:.1%} from the cache"


def _series_title(report: Report) -> str:
    width = report["series"]["width"]
    return f"each {report['each']}" if width == 1 else f"each {width:,} {report['each']}s"
