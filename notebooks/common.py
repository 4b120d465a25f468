"""Drawing helpers that several notebooks share: `import common` in a notebook beside this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import plotly.graph_objects as go

from viz import kv


def bars(
    title: str, heights: Mapping[str, float], words: Sequence[str], percent: bool = False, x: str = ""
) -> kv.KvFigure:
    """One bar for each name, with words above it. percent: heights are shares, 0 to 1; x: what the names are."""
    bar = go.Bar(
        x=list(heights),
        y=list(heights.values()),
        text=list(words),
        name="",
        marker={"color": "#8fc1e3", "pattern": {"shape": ""}},
    )
    chart = go.Figure(bar, {"title": {"text": title}, "height": 280, "template": "none"})
    chart.update_xaxes(title={"text": x})
    if percent:
        chart.update_yaxes(tickformat=".0%", range=[0, 1.12])
    return kv.KvFigure(chart)


LOOKS = (("#0072b2", ""), ("#e69f00", "/"), ("#cc79a7", "x"), ("#56b4e9", "."))  # colour and pattern


def groups(
    title: str, series: Mapping[str, Mapping[str, float]], words: str = "{:g}", percent: bool = False
) -> kv.KvFigure:
    """Several series of bars beside each other, name -> where -> height. words: how a height is written above its bar.

    ValueError: for more than four series, which one could not tell apart.
    """
    if len(series) > len(LOOKS):
        raise ValueError(f"{len(series)} series of bars cannot be told apart; at most {len(LOOKS)}")
    bars = [
        go.Bar(
            x=[f"{name} {where}" for where in heights],  # in the still picture each needs its place
            y=list(heights.values()),
            name=name,
            text=[words.format(height) for height in heights.values()],
            marker={"color": colour, "pattern": {"shape": pattern}},
        )
        for (name, heights), (colour, pattern) in zip(series.items(), LOOKS, strict=False)
    ]
    chart = go.Figure(bars, {"title": {"text": title}, "height": 300, "template": "none"})
    if percent:
        chart.update_yaxes(tickformat=".0%")
    return kv.KvFigure(chart)


def stairs(
    title: str, x: Sequence[float], series: Mapping[str, Sequence[float]], across: str = "", up: str = ""
) -> kv.KvFigure:
    """A line for each name that keeps its height from one place to the next; at most four. across, up: axes."""
    ends = [end for at, after in pairwise(x) for end in (at, after)]
    drawn = [
        go.Scatter(
            x=ends,
            y=[y for y in list(ys)[:-1] for _ in range(2)],
            name=name,
            mode="lines",
            line={"color": colour},
        )
        for (name, ys), (colour, _) in zip(series.items(), LOOKS, strict=False)
    ]
    chart = go.Figure(drawn, {"title": {"text": title}, "height": 320, "template": "none"})
    chart.update_xaxes(title={"text": across})
    chart.update_yaxes(title={"text": up})
    return kv.KvFigure(chart)
