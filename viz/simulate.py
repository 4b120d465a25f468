"""The results of `minirad simulate` as one Plotly figure: hit rate over cache size, its bound, and waiting.

Reads plain data (`Report.as_dict()`), so that a saved JSON draws the same figure. The HTML file holds
Plotly's own JavaScript: it opens without a network. Lines differ by marker and dash as well as by colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minirad import command
from viz import routes

# Okabe and Ito's colours, told apart by almost all viewers.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
# One more than colours: what shares a colour differs by its marker.
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
OPTIMUM = "#868e96"

Report = dict[str, Any]
Row = dict[str, Any]


def figure(reports: Sequence[Report]) -> go.Figure:
    """One row of charts per report: hit rate over cache size; where requests waited, how long."""
    waits = any(row["mean_wait"] is not None for report in reports for row in report["rows"])
    titles = [title for report in reports for title in _titles(report, waits)]
    drawn = make_subplots(
        rows=max(len(reports), 1), cols=1 + waits, subplot_titles=titles, horizontal_spacing=0.1,
        column_widths=[0.62, 0.38] if waits else None,
    )  # fmt: skip
    for number, report in enumerate(reports, start=1):
        whose = f"{report['source']}: " if len(reports) > 1 else ""
        for trace in [
            *optimum_lines(report, whose), *bound_lines(report, whose), *hit_rate_lines(report, whose)
        ]:  # fmt: skip
            drawn.add_trace(trace, row=number, col=1)
        drawn.update_xaxes(
            title_text=f"cache ({_unit(report)}s)", type="category", categoryorder="array",
            categoryarray=_labels(report), row=number, col=1,
        )  # fmt: skip
        drawn.update_yaxes(title_text="hit rate", tickformat=".0%", rangemode="tozero", row=number, col=1)
        if waits:
            for trace in wait_bars(report, whose):
                drawn.add_trace(trace, row=number, col=2)
            drawn.update_yaxes(title_text="wait (steps)", rangemode="tozero", row=number, col=2)
    drawn.update_layout(
        template="plotly_white", height=120 + 380 * max(len(reports), 1), title="minirad simulate",
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 12}, barmode="group",
    )  # fmt: skip
    return drawn


def write_html(reports: Sequence[Report], path: str | Path) -> None:
    """A file that opens anywhere, without a network (about 5 MB: Plotly's JavaScript is inside)."""
    routed = any("policy" in row for report in reports for row in report["rows"])
    drawn = routes.figure(reports) if routed else figure(reports)
    text = drawn.to_html(include_plotlyjs=True, full_html=True)
    command.write_whole(path, text)


def hit_rate_lines(report: Report, whose: str = "") -> list[go.Scatter]:
    """One line per page size, eviction and scheduling policy that was run."""
    lines = []
    for number, (name, rows) in enumerate(_series(report).items()):
        lines.append(
            go.Scatter(
                x=[_label(row["capacity"]) for row in rows], y=[row["hit_rate"] for row in rows],
                customdata=[
                    [*(row[what] for what in ("cached", "prompt", "evicted", "refused")),
                     _percent(row.get("bound_share"))]
                    for row in rows
                ],
                hovertemplate="%{y:.2%}: %{customdata[0]:,} of %{customdata[1]:,}, %{customdata[4]} of the "
                "bound, evicted %{customdata[2]:,}, refused %{customdata[3]:,}",
                name=f"{whose}{name}", mode="lines+markers", legendgroup=report["source"],
                line={
                    "color": COLOURS[number % len(COLOURS)],
                    "dash": DASHES[number // len(COLOURS) % len(DASHES)],
                },
                marker={"symbol": MARKERS[number % len(MARKERS)], "size": 8},
            )
        )  # fmt: skip
    return lines


def optimum_lines(report: Report, whose: str = "") -> list[go.Scatter]:
    """What a cache without limit reaches, per page size."""
    lines = []
    for page in dict.fromkeys(row["page_size"] for row in report["rows"]):
        best = {_label(r["capacity"]): r["optimum_rate"] for r in report["rows"] if r["page_size"] == page}
        lines.append(
            go.Scatter(
                x=list(best), y=list(best.values()), mode="lines", legendgroup=report["source"],
                name=f"{whose}optimum{_paged(page)}",
                line={"color": OPTIMUM, "dash": "dot", "width": 2}, hovertemplate="%{y:.2%}",
            )
        )  # fmt: skip
    return lines


def bound_lines(report: Report, whose: str = "") -> list[go.Scatter]:
    """What no eviction policy passes at each cache size.

    One after another all policies of a page size share a line; over time each has that of its own order.
    """
    series = _series(report)
    shared: dict[tuple[Any, ...], list[str]] = {}
    for name, rows in series.items():
        points = tuple((_label(row["capacity"]), row.get("bound_rate")) for row in rows)
        shared.setdefault((rows[0]["page_size"], points), []).append(name)
    replay = all(row["drive"] == "replay" for row in report["rows"])
    lines = []
    for (page, points), names in shared.items():
        own = len(names) == 1 and len(series) > 1
        of = _paged(page) if replay or len(shared) == 1 else f" ({_some(names)})"
        colour = COLOURS[list(series).index(names[0]) % len(COLOURS)] if own else OPTIMUM
        lines.append(
            go.Scatter(
                x=[label for label, _ in points], y=[rate for _, rate in points], mode="lines",
                legendgroup=report["source"], name=f"{whose}bound{of}",
                line={"color": colour, "dash": "dash", "width": 1.5}, hovertemplate="%{y:.2%}",
            )
        )  # fmt: skip
    return lines


def _some(names: Sequence[str]) -> str:
    """Names for a legend, which stands beside the charts and takes its width from them."""
    return "; ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def wait_bars(report: Report, whose: str = "") -> list[go.Bar]:
    """Mean and worst wait of every run in a limited cache (or, where there is none, without a limit)."""
    waited = [row for row in report["rows"] if row["mean_wait"] is not None]
    rows = [row for row in waited if row["capacity"] is not None] or waited
    names = [f"{_label(row['capacity'])}, {_name(row)}" for row in rows]
    kinds = (("mean_wait", "mean wait", COLOURS[0], ""), ("worst_wait", "worst wait", COLOURS[5], "/"))
    return [
        go.Bar(
            x=names, y=[row[key] for row in rows], name=f"{whose}{title}",
            legendgroup=report["source"], marker={"color": colour, "pattern": {"shape": pattern}},
        )
        for key, title, colour, pattern in kinds
    ]  # fmt: skip


def _series(report: Report) -> dict[str, list[Row]]:
    """Rows of one line each. Without a limit nothing is evicted, so that run belongs to every policy."""
    lines: dict[str, list[Row]] = {}
    for row in report["rows"]:
        if row["capacity"] is not None:
            lines.setdefault(_name(row), []).append(row)
    for row in report["rows"]:
        if row["capacity"] is None:
            same = [
                rows for rows in lines.values()
                if (rows[0]["page_size"], rows[0]["schedule_policy"])
                == (row["page_size"], row["schedule_policy"])
            ]  # fmt: skip
            for rows in same or [lines.setdefault(_name(row), [])]:
                rows.append(row)
    return lines


def _name(row: Row) -> str:
    parts = [row["eviction_policy"], row["schedule_policy"]]
    return ", ".join(part for part in parts if part) + _paged(row["page_size"])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _paged(size: int) -> str:
    return f", page {size}" if size > 1 else ""


def _label(capacity: int | None) -> str:
    return "unlimited" if capacity is None else f"{capacity:,}"


def _labels(report: Report) -> list[str]:
    sizes = {row["capacity"] for row in report["rows"]}
    limited = sorted(size for size in sizes if size is not None)
    return [_label(size) for size in [*limited, *([None] if None in sizes else [])]]


def _unit(report: Report) -> str:
    return "token" if report["unit_tokens"] == 1 else "block"


def _titles(report: Report, waits: bool) -> list[str]:
    title = f"{report['source']}: {report['requests']:,} requests"
    return [title, "wait until first admission"] if waits else [title]
