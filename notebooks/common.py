"""Helpers that several notebooks share: `import common` in a notebook beside this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from torch import Tensor

from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.attention.radix_attention import AttentionBackend
from minirad.kv.kv_pool import KVPool
from viz import kv

LOOKS = (("#0072b2", ""), ("#e69f00", "/"), ("#cc79a7", "x"), ("#56b4e9", "."))  # colour and pattern
ABOVE = {"textposition": "outside", "cliponaxis": False}  # what is written belongs above its bar
DASHES = (("solid", "circle"), ("dash", "square"), ("dot", "diamond"), ("dashdot", "x"))


def told_apart(series: Mapping[str, Any], looks: Iterable[Any]) -> list[tuple[tuple[str, Any], Any]]:
    """Each named series with a look of its own. ValueError for more than four."""
    if len(series) > len(LOOKS):
        raise ValueError(f"{len(series)} series cannot be told apart; at most {len(LOOKS)}")
    return list(zip(series.items(), looks, strict=False))


def chart(traces: Sequence[Any], title: str, height: int, **layout: Any) -> kv.KvFigure:
    """A figure that looks like those of viz. Plotly's own margins would leave a low picture no room."""
    figure = kv.KvFigure(list(traces))
    figure.update_layout(
        template="none",
        title={"text": title, "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 12}, "font": {"size": 14}},
        height=height,
        margin={
            "l": 56,
            "r": 24,
            "t": 60 if len(figure.data) > 1 else 44,
            "b": 44,
        },  # title, and legend below it
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 11, "color": "#343a40"},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        yaxis={"automargin": True},
        **layout,
    )
    return figure


def bars(
    title: str, heights: Mapping[str, float], words: Sequence[str], percent: bool = False, x: str = ""
) -> kv.KvFigure:
    """One bar for each name, with words above it. percent: heights are shares, 0 to 1; x: what the names are."""
    bar = go.Bar(
        x=list(heights),
        y=list(heights.values()),
        text=list(words),
        name="",
        **ABOVE,
        marker={"color": "#8fc1e3", "pattern": {"shape": ""}},
    )
    figure = chart([bar], title, 280)
    figure.update_xaxes(title={"text": x}, type="category")
    if percent:
        figure.update_yaxes(tickformat=".0%", range=[0, 1.12])
    return figure


def groups(
    title: str, series: Mapping[str, Mapping[str, float]], words: str = "{:g}", percent: bool = False
) -> kv.KvFigure:
    """Several series of bars beside each other, name -> where -> height. words: how a height is written above its bar.

    ValueError: for more than four series, which one could not tell apart.
    """
    bars = [
        go.Bar(
            x=[where + " " * at for where in heights],  # each bar has its own place
            y=list(heights.values()),
            name=name,
            text=[words.format(height) for height in heights.values()],
            **ABOVE,
            marker={"color": colour, "pattern": {"shape": pattern}},
        )
        for at, ((name, heights), (colour, pattern)) in enumerate(told_apart(series, LOOKS))
    ]
    figure = chart(bars, title, 300, barmode="overlay")
    places = [place for together in zip(*(bar.x for bar in bars), strict=True) for place in together]
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=places)
    if percent:
        figure.update_yaxes(tickformat=".0%")
    return figure


def stairs(
    title: str, x: Sequence[float], series: Mapping[str, Sequence[float]], across: str = "", up: str = ""
) -> kv.KvFigure:
    """A line for each name that keeps its height from one place to the next; at most four. across, up: axes."""
    ends = [end for at, after in pairwise(x) for end in (at, after)]
    drawn = [
        go.Scatter(
            x=[*ends, x[-1]],  # the last height is a point: nothing follows that would keep it
            y=[*(y for y in list(ys)[:-1] for _ in range(2)), ys[-1]],
            name=name,
            mode="lines",
            line={"color": colour},
        )
        for (name, ys), (colour, _) in told_apart(series, LOOKS)
    ]
    figure = chart(drawn, title, 320)
    figure.update_xaxes(title={"text": across})
    figure.update_yaxes(title={"text": up}, rangemode="tozero")
    return figure


def same_or_not(title: str, words: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> kv.KvFigure:
    """A square per token and row: equal up to rounding, or not (then marked with an x).

    words: one per token. rows: a name, and how far each token's vectors differ, as a share of their size.
    """
    grid = go.Heatmap(
        z=[[int(x > 1e-4) for x in row] for _, row in rows],
        text=[[("x " if x > 1e-4 else "") + w for x, w in zip(row, words, strict=True)] for _, row in rows],
        y=[name for name, _ in rows],
        texttemplate="%{text}",
        textfont={"size": 8},  # by itself, the longest word would make all of them smaller
        xgap=1.5,
        ygap=1.5,
        showscale=False,
        colorscale=[(0, "#a8d8b9"), (0.5, "#a8d8b9"), (0.5, "#f2a9a0"), (1, "#f2a9a0")],
        zmin=0,
        zmax=1,
    )
    return _squares(grid, title, len(rows))


def _squares(grid: go.Heatmap, title: str, rows: int) -> kv.KvFigure:
    figure = chart([grid], title, 60 + 30 * rows)
    figure.update_layout(margin={"b": 12})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(autorange="reversed")
    return figure


PARTS = (
    ("the tree's already", "#8fc1e3", ""),
    ("duplicates, freed", "#cc3311", "x"),
    ("new in the tree", "#009e73", ""),
    ("tail", "#e69f00", "/"),
)


def number_lines(commits: Sequence[tuple[str, Sequence[int]]], title: str) -> kv.KvFigure:
    """Each commit as a bar. commits: a name, and the ends of its parts: protected, prefix_len, aligned, committed."""
    bars = []
    for at, (part, colour, pattern) in enumerate(PARTS):
        found = [(name, ([0, *ends])[at], ends[at]) for name, ends in commits]
        found = [(name, start, stop) for name, start, stop in found if start < stop]
        bars.append(
            go.Bar(
                y=[name for name, _, _ in found],
                base=[start for _, start, _ in found],
                x=[stop - start for _, start, stop in found],
                name=part,
                orientation="h",
                marker={"color": colour, "pattern": {"shape": pattern}},
            )
        )
    names = [name for name, _ in commits]
    figure = chart(bars, title, 120 + 26 * len(names), barmode="overlay")
    figure.update_xaxes(title={"text": "token of the row"})
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names)
    return figure


def curves(title: str, lines: Mapping[str, Mapping[int, float]], x: str = "") -> kv.KvFigure:
    """Shares over sizes, name -> size -> share, told apart by colour, dash and marker. x: what the sizes are of.

    The sizes stand at equal distances, as they are given: every line has the same.
    ValueError: for more than four lines, which one could not tell apart.
    """
    drawn = [
        go.Scatter(
            x=[f"{size:,}" for size in shares],
            y=list(shares.values()),
            name=name,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol, "size": 7},
        )
        for (name, shares), ((colour, _), (dash, symbol)) in told_apart(
            lines, zip(LOOKS, DASHES, strict=True)
        )
    ]
    figure = chart(drawn, title, 320)
    figure.update_xaxes(title={"text": x}, type="category")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure


KINDS = {"tree": "#a8d8b9", "private": "#e69f00", "freed": "#f2a9a0"}


def slots(title: str, rows: Sequence[tuple[str, Sequence[int]]], kind: Mapping[int, str]) -> kv.KvFigure:
    """A square with its slot's number for each token of several rows. kind: slot -> a name of KINDS, its colour."""
    names = list(KINDS)
    steps = [(each / len(names), colour) for at, colour in enumerate(KINDS.values()) for each in (at, at + 1)]
    grid = go.Heatmap(
        z=[[names.index(kind[slot]) for slot in row] for _, row in rows],
        text=[[("x" if kind[slot] == "freed" else "") + str(slot) for slot in row] for _, row in rows],
        y=[name for name, _ in rows],
        texttemplate="%{text}",
        xgap=1.5,
        ygap=1.5,
        showscale=False,
        colorscale=steps,
        zmin=-0.5,
        zmax=len(names) - 0.5,
    )
    return _squares(grid, title, len(rows))


def attention(
    backend: AttentionBackend, pool: KVPool, q: Tensor, rows: Sequence[Sequence[int]], page_size: int
) -> Callable[[], Tensor]:
    """The engine's attention in layer 0 as a function to call, planned for requests that decode one token each.

    q: float [requests, heads, head_dim]. rows: the slots of each request's tokens, in their order.
    """
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    entries = [BatchEntry(number, len(row) - 1, len(row)) for number, row in enumerate(rows)]
    backend.plan(build_metadata(table, entries, page_size, "cpu"), pool)
    return lambda: backend.run(0, q, pool, q.shape[-1] ** -0.5)
