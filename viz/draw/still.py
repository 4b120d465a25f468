"""A still PNG of the charts of viz/kv.py, for viewers that run no JavaScript (GitHub, nbconvert).

Draws what those charts are made of (bars, stacked areas, lines, a grid of squares) with Pillow, and no
other kind of Plotly figure: it is a stand-in for a browser, not a renderer.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from PIL import Image, ImageDraw, ImageFont

SCALE = 2  # pixels per point: sharp on a projector
LEFT, RIGHT, TOP, BOTTOM = 50, 20, 48, 38
INK, MUTED, RULE = "#343a40", "#868e96", "#e9ecef"


class _Canvas:
    """An image with a plot area; points, not pixels, go in."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), "white")
        self.draw = ImageDraw.Draw(self.image)
        self.x: tuple[float, float] = (0, 1)
        self.y: tuple[float, float] = (0, 1)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Data to points."""
        (x0, x1), (y0, y1) = self.x, self.y
        across, up = (x - x0) / ((x1 - x0) or 1), (y - y0) / ((y1 - y0) or 1)
        return (
            LEFT + across * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - up * (self.height - TOP - BOTTOM),
        )

    def box(self, a: tuple[float, float], b: tuple[float, float], fill: str, pattern: str = "") -> None:
        (x0, x1), (y0, y1) = sorted((a[0], b[0])), sorted((a[1], b[1]))
        pixels = [value * SCALE for value in (x0, y0, x1, y1)]
        if pixels[2] - pixels[0] < 1 or pixels[3] - pixels[1] < 1:
            return
        self.draw.rectangle(pixels, fill=fill)
        if pattern:
            self._hatch(pixels, pattern)

    def _hatch(self, box: list[float], pattern: str) -> None:
        """Lines over a part of the picture, clipped to it: "/" one way, "x" both, "." dots."""
        x0, y0, x1, y1 = (round(value) for value in box)
        if x1 - x0 < 2 or y1 - y0 < 2:
            return
        tile = self.image.crop((x0, y0, x1, y1))
        pen, gap, size = ImageDraw.Draw(tile), 7 * SCALE // 2, tile.size
        if pattern == ".":
            for x in range(gap // 2, size[0], gap):
                for y in range(gap // 2, size[1], gap):
                    pen.rectangle((x, y, x + 1, y + 1), fill=INK)
        for shift in range(-size[1], size[0] + size[1], gap) if pattern in "/x" else ():
            pen.line((shift, size[1], shift + size[1], 0), fill=INK)
            if pattern == "x":
                pen.line((shift, 0, shift + size[1], size[1]), fill=INK)
        self.image.paste(tile, (x0, y0))

    def text(
        self, x: float, y: float, text: object, anchor: str = "lm", size: int = 10, ink: str = INK
    ) -> None:
        font = ImageFont.load_default(size * SCALE)
        self.draw.text((x * SCALE, y * SCALE), str(text), fill=ink, font=font, anchor=anchor)

    def line(self, points: Sequence[tuple[float, float]], ink: str, width: float = 1) -> None:
        if len(points) > 1:
            flat = [(x * SCALE, y * SCALE) for x, y in points]
            self.draw.line(flat, fill=ink, width=max(1, round(width * SCALE)))

    def png(self) -> bytes:
        out = io.BytesIO()
        self.image.quantize(64).save(out, "PNG", optimize=True)
        return out.getvalue()


def still(figure: go.Figure, width: int = 760) -> bytes:
    """The figure as PNG bytes."""
    canvas = _Canvas(width, int(figure.layout.height or 300))
    canvas.text(12, 16, figure.layout.title.text or "", size=13)
    kinds = {trace.type for trace in figure.data}
    if "heatmap" in kinds:
        _grid(canvas, figure.data[0])
    elif any(trace.type == "bar" and trace.orientation == "h" for trace in figure.data):
        _lanes(canvas, figure)
    else:
        _chart(canvas, figure)
    return canvas.png()


def _grid(canvas: _Canvas, trace: Any) -> None:
    rows, columns = len(trace.z) or 1, len(trace.z[0]) if trace.z else 1
    side = min((canvas.width - 24) / columns, (canvas.height - 40) / rows)
    colours = [colour for _, colour in trace.colorscale[::2]]
    for r, row in enumerate(trace.z):
        for c, code in enumerate(row):
            if code is None:
                continue
            x, y = 12 + c * side, 32 + r * side
            canvas.box((x, y), (x + side - 1.5, y + side - 1.5), colours[int(code)])
            label = trace.text[r][c]
            if label:
                ink = "#ffffff" if colours[int(code)] == "#343a40" else INK
                canvas.text(x + 1.5, y + side / 2 - 0.7, label, size=7, ink=ink)


def _legend(canvas: _Canvas, traces: Sequence[Any]) -> None:
    x = canvas.width - RIGHT
    for trace in reversed([t for t in traces if t.showlegend is not False]):
        x -= 6 * len(trace.name) + 8
        canvas.text(x, 34, trace.name, size=9)
        fill, pattern = _look(trace)
        canvas.box((x - 14, 29), (x - 4, 39), fill, pattern)
        x -= 26


def _look(trace: Any) -> tuple[str, Any]:
    """Colour, and a pattern or (of bars that differ) one for each."""
    if trace.type == "bar":
        return trace.marker.color, trace.marker.pattern.shape or ""
    return trace.line.color or INK, trace.fillpattern.shape or "" if trace.stackgroup else ""


def _lanes(canvas: _Canvas, figure: go.Figure) -> None:
    """Horizontal bars, one lane per name, the first on top."""
    names = list(figure.layout.yaxis.categoryarray or ())
    bars = [trace for trace in figure.data if trace.type == "bar"]
    ends = [b + x for trace in bars for b, x in zip(trace.base or (), trace.x or (), strict=True)]
    starts = [b for trace in bars for b in trace.base or ()]
    room = 46 / max(canvas.width, 1) * (max(ends, default=1) - min(starts, default=0))
    canvas.x = (min(starts, default=0), max(ends, default=1) + room)
    canvas.y = (len(names) or 1, 0)
    _axes(canvas, figure, ticks_y=False)
    for trace in bars:
        fill, pattern = _look(trace)
        for name, base, length in zip(trace.y or (), trace.base or (), trace.x or (), strict=True):
            lane = names.index(name)
            (x0, y0), (x1, y1) = canvas.at(base, lane + 0.15), canvas.at(base + length, lane + 0.85)
            canvas.box((x0, y0), (max(x1 - 1, x0 + 0.5), y1), fill, pattern)  # a gap between chunks
    for lane, name in enumerate(names):
        canvas.text(LEFT - 6, canvas.at(0, lane + 0.5)[1], name, "rm")
    for trace in figure.data:
        if trace.type == "scatter":
            for x, name, text in zip(trace.x or (), trace.y or (), trace.text or (), strict=True):
                point = canvas.at(x, names.index(name) + 0.5)
                canvas.text(*point, text, size=9, ink=MUTED)
    _legend(canvas, bars)


def _chart(canvas: _Canvas, figure: go.Figure) -> None:
    """Vertical bars, lines and stacked areas over one x axis."""
    traces = figure.data
    labels = list(dict.fromkeys(x for trace in traces for x in trace.x or ()))
    place = {x: float(i if isinstance(x, str) else x) for i, x in enumerate(labels)}
    xs = list(place.values()) or [0.0]
    canvas.x = (min(xs) - 0.5, max(xs) + 0.5)
    stacks = [trace for trace in traces if trace.type == "scatter" and trace.stackgroup]
    tops = [sum(each) for each in zip(*(trace.y for trace in stacks), strict=True)]
    plain = [
        value + base for trace in traces if trace not in stacks
        for value, base in zip(trace.y or (), _bases(trace), strict=True)
    ]  # fmt: skip
    given = figure.layout.yaxis.range
    canvas.y = (0, given[1] if given else max([*tops, *(v * 1.12 for v in plain)], default=1) or 1)
    _axes(canvas, figure, names={place[x]: x for x in labels if isinstance(x, str)})
    base = [0.0] * len(tops)
    for trace in stacks:
        base = _area(canvas, trace, base)
    for trace in traces:
        points = [(place[x], y) for x, y in zip(trace.x or (), trace.y or (), strict=True)]
        if trace.type == "bar":
            _bars(canvas, trace, points)
        elif trace not in stacks:
            canvas.line([canvas.at(*point) for point in points], trace.line.color, 2)
            for x, y in (canvas.at(*point) for point in points if "markers" in trace.mode):
                canvas.box((x - 3, y - 3), (x + 3, y + 3), trace.line.color)
    _legend(canvas, traces if len(traces) > 1 else ())


def _area(canvas: _Canvas, trace: Any, base: list[float]) -> list[float]:
    fill, pattern = _look(trace)
    tops = [low + value for low, value in zip(base, trace.y, strict=True)]
    highest = canvas.y[1]  # what an axis leaves out is not drawn over the title
    for x, low, top in zip(trace.x, base, tops, strict=True):
        low, top = min(low, highest), min(top, highest)
        canvas.box(canvas.at(x - 0.5, low), canvas.at(x + 0.5, top), fill, pattern)
    return tops


def _bases(trace: Any) -> Sequence[float]:
    """Where each vertical bar begins."""
    base = trace.base if trace.type == "bar" else None
    return [0.0] * len(trace.y or ()) if base is None else list(base)


def _bars(canvas: _Canvas, trace: Any, points: list[tuple[float, float]]) -> None:
    fill, shapes = _look(trace)
    patterns = [shapes] * len(points) if isinstance(shapes, str) else list(shapes)
    room = (canvas.width - LEFT - RIGHT) / max(len(points), 1)
    texts = trace.text or [""] * len(points)
    for (x, y), base, text, pattern in zip(points, _bases(trace), texts, patterns, strict=True):
        canvas.box(canvas.at(x - 0.35, base), canvas.at(x + 0.35, base + y), fill, pattern)
        if room > 5 * len(str(text)):
            across, up = canvas.at(x, base + y)
            canvas.text(across, up - 7, text, "mm", size=9)


def _axes(
    canvas: _Canvas, figure: go.Figure, ticks_y: bool = True, names: dict[float, str] | None = None
) -> None:
    low, right = canvas.height - BOTTOM, canvas.width - RIGHT
    percent = "%" in (figure.layout.yaxis.tickformat or "")
    for value in _ticks(*canvas.y) if ticks_y else ():
        y = canvas.at(0, value)[1]
        canvas.line([(LEFT, y), (right, y)], RULE)
        canvas.text(LEFT - 6, y, f"{value:.0%}" if percent else f"{value:g}", "rm", ink=MUTED)
    canvas.line([(LEFT, low), (right, low)], MUTED)
    marks: dict[float, object] = dict(names or {})
    marks = marks or {value: f"{value:g}" for value in _ticks(*canvas.x) if value == int(value)}
    skip = math.ceil(len(marks) * 34 / (right - LEFT))
    for value in sorted(marks)[:: max(skip, 1)]:
        canvas.text(canvas.at(value, 0)[0], low + 11, marks[value], "mm", ink=MUTED)
    canvas.text((LEFT + right) / 2, low + 28, figure.layout.xaxis.title.text or "", "mm", ink=MUTED)
    canvas.text(12, 34, figure.layout.yaxis.title.text or "", ink=MUTED, size=9)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two others."""
    low, high = min(low, high), max(low, high)
    raw = (high - low) / 5 or 1
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]
