"""A still PNG of the charts of viz/draw/charts.py, for viewers that run no JavaScript (GitHub, nbconvert).

Draws what those charts are made of (bars, stacked areas, lines, a grid of squares) with Pillow, and no
other kind of Plotly figure: it is a stand-in for a browser, not a renderer.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
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
        self.place: dict[Any, float] = {}  # where on its axis a name or number of the figure stands
        self.stack: list[float] = []  # how high stacked areas have come

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

    def png(self, scale: int) -> bytes:
        out, size = io.BytesIO(), (self.width * scale, self.height * scale)
        self.image.resize(size, Image.Resampling.LANCZOS).quantize(64).save(out, "PNG", optimize=True)
        return out.getvalue()


def still(figure: go.Figure, width: int = 760, scale: int = SCALE) -> bytes:
    """The figure as PNG, `scale` pixels a point. KeyError for a type of trace that is not in `_DRAW`."""
    canvas = _Canvas(width, int(figure.layout.height or 300))
    canvas.text(12, 16, figure.layout.title.text or "", size=13)
    if any(trace.type == "bar" and trace.orientation == "h" for trace in figure.data):
        _lay_out_lanes(canvas, figure)
    elif all(trace.type != "heatmap" for trace in figure.data):
        _lay_out_chart(canvas, figure)
    for trace in figure.data:
        _DRAW[trace.type](canvas, trace)
    if len(figure.data) > 1:
        _legend(canvas, [trace for trace in figure.data if trace.showlegend is not False])
    return canvas.png(scale)


def _lay_out_lanes(canvas: _Canvas, figure: go.Figure) -> None:
    """One lane per name, the first on top; on the right there is room for how each ended."""
    bars = [trace for trace in figure.data if trace.type == "bar"]
    spans = [(b, b + x) for trace in bars for b, x in zip(trace.base or (), trace.x or (), strict=True)]
    start, end = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=1)
    names = list(figure.layout.yaxis.categoryarray or ())
    canvas.x, canvas.y = (start, end + 46 / canvas.width * (end - start)), (len(names) or 1, 0)
    canvas.place = {name: lane + 0.5 for lane, name in enumerate(names)}
    _axes(canvas, figure, ticks_y=False)
    for name, lane in canvas.place.items():
        canvas.text(LEFT - 6, canvas.at(0, lane)[1], name, "rm")


def _lay_out_chart(canvas: _Canvas, figure: go.Figure) -> None:
    """Vertical bars, lines and stacked areas over one x axis, by number or by name."""
    given = figure.layout.xaxis.categoryarray or ()
    labels = list(given or dict.fromkeys(x for trace in figure.data for x in trace.x or ()))
    canvas.place = {x: float(i if isinstance(x, str) else x) for i, x in enumerate(labels)}
    xs = list(canvas.place.values()) or [0.0]
    canvas.x = (min(xs) - 0.5, max(xs) + 0.5)
    stacks = [trace for trace in figure.data if trace.type == "scatter" and trace.stackgroup]
    tops = [sum(each) for each in zip(*(trace.y for trace in stacks), strict=True)]
    for trace in figure.data:
        if trace not in stacks:
            tops += [1.12 * (y + base) for y, base in zip(trace.y or (), _bases(trace), strict=True)]
    given = figure.layout.yaxis.range
    canvas.y = (0, given[1] if given else max(tops, default=1) or 1)
    _axes(canvas, figure, names={canvas.place[x]: x for x in labels if isinstance(x, str)})


def _draw_cells(canvas: _Canvas, trace: Any) -> None:
    """A grid of squares, each with a colour of the scale and perhaps a label."""
    rows, columns = len(trace.z) or 1, len(trace.z[0]) if trace.z else 1
    side = min((canvas.width - 24) / columns, (canvas.height - 40) / rows)
    colours = [colour for _, colour in trace.colorscale[::2]]
    for r, row in enumerate(trace.z):
        for c, code in enumerate(row):
            if code is None:
                continue
            x, y, fill = 12 + c * side, 32 + r * side, colours[int(code)]
            canvas.box((x, y), (x + side - 1.5, y + side - 1.5), fill)
            ink = "#ffffff" if fill == INK else INK
            canvas.text(x + 1.5, y + side / 2 - 0.7, trace.text[r][c], size=7, ink=ink)


def _draw_bars(canvas: _Canvas, trace: Any) -> None:
    fill, shapes = _look(trace)
    flat = trace.orientation == "h"
    names, lengths = ((trace.y, trace.x) if flat else (trace.x, trace.y)) if trace.x else ((), ())
    patterns = [shapes] * len(names) if isinstance(shapes, str) else list(shapes)
    room = (canvas.width - LEFT - RIGHT) / max(len(names), 1)
    texts = trace.text or [""] * len(names)
    for name, base, length, text, pattern in zip(names, _bases(trace), lengths, texts, patterns, strict=True):
        at, end = canvas.place[name], base + length
        if flat:
            (x0, y0), (x1, y1) = canvas.at(base, at - 0.35), canvas.at(end, at + 0.35)
            canvas.box((x0, y0), (max(x1 - 1, x0 + 0.5), y1), fill, pattern)  # a gap between chunks
        else:
            canvas.box(canvas.at(at - 0.35, base), canvas.at(at + 0.35, end), fill, pattern)
            if room > 5 * len(str(text)):
                across, up = canvas.at(at, end)
                canvas.text(across, up - 7, text, "mm", size=9)


def _draw_scatter(canvas: _Canvas, trace: Any) -> None:
    """A line, with marks or words at its points; or one layer more on the stack of areas."""
    if trace.stackgroup:
        _draw_area(canvas, trace)
        return
    xs, ys = trace.x or (), trace.y or ()
    points = [canvas.at(canvas.place.get(x, x), canvas.place.get(y, y)) for x, y in zip(xs, ys, strict=True)]
    if "lines" in trace.mode:
        canvas.line(points, trace.line.color, 2)
    for x, y in points if "markers" in trace.mode else ():
        canvas.box((x - 3, y - 3), (x + 3, y + 3), trace.line.color)
    for (x, y), text in zip(points, trace.text or (), strict=True) if "text" in trace.mode else ():
        canvas.text(x, y, text, size=9, ink=INK)


def _draw_area(canvas: _Canvas, trace: Any) -> None:
    fill, pattern = _look(trace)
    base, highest = canvas.stack or [0.0] * len(trace.y), canvas.y[1]
    canvas.stack = [low + value for low, value in zip(base, trace.y, strict=True)]
    for x, low, top in zip(trace.x, base, canvas.stack, strict=True):
        low, top = min(low, highest), min(top, highest)  # nothing is drawn over the title
        canvas.box(canvas.at(x - 0.5, low), canvas.at(x + 0.5, top), fill, pattern)


_DRAW: dict[str, Callable[[_Canvas, Any], None]] = {
    "heatmap": _draw_cells, "bar": _draw_bars, "scatter": _draw_scatter,
}  # fmt: skip


def _bases(trace: Any) -> Sequence[float]:
    """Where each bar begins; the points of a line stand over zero."""
    base = trace.base if trace.type == "bar" else None
    return [0.0] * len(trace.y or ()) if base is None else list(base)


def _look(trace: Any) -> tuple[str, Any]:
    """Colour, and a pattern or (of bars that differ) one for each."""
    if trace.type == "bar":
        return trace.marker.color, trace.marker.pattern.shape or ""
    return trace.line.color or INK, trace.fillpattern.shape or "" if trace.stackgroup else ""


def _legend(canvas: _Canvas, traces: Sequence[Any]) -> None:
    x = canvas.width - RIGHT
    for trace in reversed(traces):
        x -= 6 * len(trace.name) + 8
        canvas.text(x, 34, trace.name, size=9)
        canvas.box((x - 14, 29), (x - 4, 39), *_look(trace))
        x -= 26


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
