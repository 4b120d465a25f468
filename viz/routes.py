"""The results of `minirad simulate --workers ...` as one Plotly figure: hit rate, balance, regret.

Reads plain data (`RouteReport.as_dict()`). A row of charts per source; bars are grouped by the number of
workers, and differ by pattern as well as by colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

Report = dict[str, Any]

COLOURS = ("#868e96", "#56b4e9", "#e69f00", "#0072b2", "#009e73")
PATTERNS = ("", "/", "x", "\\", ".")
CHARTS = (
    ("hit_rate", "hit rate"),
    ("computed_max_of_mean", "computed, max/mean"),
    ("regret_per_request", "regret"),
)


def figure(reports: Sequence[Report]) -> go.Figure:
    """One row of charts per report: hit rate, how uneven the work is, regret per request."""
    titles = [f"{report['source']}: {title}" for report in reports for _, title in CHARTS]
    drawn = make_subplots(
        rows=max(len(reports), 1), cols=len(CHARTS), subplot_titles=titles, horizontal_spacing=0.08
    )
    for number, report in enumerate(reports, start=1):
        for column, (name, _) in enumerate(CHARTS, start=1):
            for bars in bars_of(report, name, number == column == 1):
                drawn.add_trace(bars, row=number, col=column)
            drawn.update_xaxes(title_text="workers", type="category", row=number, col=column)
        drawn.update_yaxes(tickformat=".0%", rangemode="tozero", row=number, col=1)
        drawn.update_yaxes(title_text=_unit(report), rangemode="tozero", row=number, col=3)
        best = max((row["optimum_rate"] or 0.0 for row in report["rows"]), default=0.0)
        drawn.add_hline(best, line={"dash": "dot", "color": COLOURS[0]}, row=number, col=1)
    drawn.update_layout(
        template="plotly_white", height=120 + 340 * max(len(reports), 1), barmode="group",
        title="minirad simulate: workers behind a router (dotted: one endless cache for all)",
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 12},
    )  # fmt: skip
    return drawn


def bars_of(report: Report, name: str, named: bool = True) -> list[go.Bar]:
    """One series per policy of a report: a bar for each number of workers. named: in the legend."""
    found = []
    for number, policy in enumerate(dict.fromkeys(row["policy"] for row in report["rows"])):
        rows = [row for row in report["rows"] if row["policy"] == policy]
        found.append(
            go.Bar(
                x=[str(row["workers"]) for row in rows], y=[row[name] for row in rows], name=policy,
                legendgroup=policy, showlegend=named,
                marker={"color": COLOURS[number % 5], "pattern": {"shape": PATTERNS[number % 5]}},
            )
        )  # fmt: skip
    return found


def _unit(report: Report) -> str:
    return "tokens per request" if report["unit_tokens"] == 1 else "blocks per request"
