"""Charts of the KV pool from a recording: pool map, host map, usage, hit rate, timeline, age at eviction.

Each draws numbers of viz/view (`pages`, `usage_points`, `request_hits`, `spans`, `evictions`), which the
tests hold to the engine's own, as a Plotly figure. Where a colour means something, a letter, a pattern or
a word means it too.

A figure shown in a notebook is saved as a small still picture beside its numbers: Plotly's own 5 MB of
JavaScript never enters the file. Nothing here looks at a live engine or changes anything.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.utils import PlotlyJSONEncoder

from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz.draw.still import still
from viz.trace import Decode, View, decoder_for, has_tiers
from viz.view.pool import HostPage, PoolPage, host_pages, pages
from viz.view.requests import Span, prompts, request_hits, spans
from viz.view.text import visible
from viz.view.usage import usage_points
from viz.view.victims import Eviction, evictions

FREE, PRIVATE = "#eef0f3", "#343a40"
OWNERS = (
    "#9ecbf0", "#f6c177", "#a8d8b9", "#d7b8e8", "#f2a9a0", "#b8c4ff", "#e3d37a", "#8fd3d1",
    "#e6b3c8", "#c9d48c", "#b7cbd6", "#d9bd9c",
)  # fmt: skip
"""Light tints that dark text can be read on; neighbours differ in lightness as well as in hue."""

USAGE = (
    ("protected", "#0072b2", ""), ("evictable", "#8fc1e3", "/"), ("private", "#e69f00", "x"),
    ("free", "#eef0f3", ""),
)  # fmt: skip
PHASES = (
    ("waiting", "#ced4da", "."), ("prefill", "#e69f00", ""), ("decode", "#009e73", ""),
    ("paused", "#a8d8b9", "/"), ("retracted", "#cc3311", "x"),
)  # fmt: skip
"""What a request does in a step, with colour and pattern. paused: it holds a row, others compute."""


def owner_colour(node: int) -> str:
    """The tint of a node's pages, the same in every picture."""
    return OWNERS[(node - 1) % len(OWNERS)]


# ---------------------------------------------------------------------- pool map


HOST_LOOKS: Mapping[str, tuple[str, str]] = {
    "both": ("#c5b6f2", ""), "host": ("#9775fa", ""), "copying": ("#ffd8a8", "→"),
    "loading": ("#a5d8ff", "←"), "free": (FREE, ""),
}  # fmt: skip
"""A page of host memory: colour, and the sign that stands on it. By the tier of the node whose copy it is."""


def pool_map(state: State | ReplayState | View, decode: Decode | None = None) -> go.Figure:
    """Every page as a square in the colour of its owner; n7 or R3 is written where a run begins."""
    cells = pages(state, decode)
    codes = {"": 0, **{cell.label: i for i, cell in enumerate(_owners(cells), start=1)}}
    colours = [FREE, *(_page_colour(cell) for cell in _owners(cells))]
    labels = ["" if i and cells[i - 1].label == c.label else c.label for i, c in enumerate(cells)]
    count = {kind: sum(c.owner == kind for c in cells) for kind in ("node", "private", "free")}
    return _grid(
        f"KV pool: {count['node']} pages cached, {count['private']} private, {count['free']} free",
        [codes[cell.label] for cell in cells], labels, [_page_hover(cell) for cell in cells], colours,
    )  # fmt: skip


def _grid(
    title: str, codes: list[int], labels: list[str], hovers: list[str], colours: Sequence[str]
) -> go.Figure:
    """Squares in rows: of each the number of its colour, what is written on it, and what is said of it."""
    columns = _columns(len(codes))

    def rows(cells: list[Any], empty: str | None = "") -> list[list[Any]]:
        parts = [cells[at : at + columns] for at in range(0, len(cells), columns)]
        return [part + [empty] * (columns - len(part)) for part in parts]

    squares = go.Heatmap(
        z=rows(codes, None), text=rows(labels), customdata=rows(hovers), colorscale=_steps(colours),
        zmin=-0.5, zmax=len(colours) - 0.5, showscale=False, xgap=1.5, ygap=1.5,
        texttemplate="%{text}" if len(codes) <= 1200 else None, textfont={"size": 9},
        hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
    )  # fmt: skip
    figure = _figure(title, [squares])
    figure.update_xaxes(visible=False, constrain="domain")
    figure.update_yaxes(visible=False, autorange="reversed", scaleanchor="x", constrain="domain")
    height = round(60 + len(rows(codes)) * 720 / columns)
    figure.update_layout(height=height, margin={"l": 12, "r": 12, "b": 8})
    return figure


def host_map(state: State | ReplayState | View, decode: Decode | None = None) -> go.Figure:
    """Host memory as squares: copies of what is also on the device, what is only here, copies under way.

    ValueError for a recording without a host tier.
    """
    cells = host_pages(state, decode)
    if not cells:
        raise ValueError("this recording has no host tier: its host_kv_tokens is 0")
    kinds = list(HOST_LOOKS)
    labels = ["" if i and cells[i - 1].node == c.node else _host_label(c) for i, c in enumerate(cells)]
    count = {kind: sum(c.tier == kind for c in cells) for kind in kinds}
    told = f"{count['both']} pages also on the device, {count['host']} only here, {count['copying']} pending"
    return _grid(
        f"Host memory: {told}, {count['free']} free", [kinds.index(cell.tier) for cell in cells], labels,
        [_host_hover(cell) for cell in cells], [colour for colour, _ in HOST_LOOKS.values()],
    )  # fmt: skip


def _host_label(cell: HostPage) -> str:
    return f"{HOST_LOOKS[cell.tier][1]}n{cell.node}" if cell.node else ""


def _host_hover(cell: HostPage) -> str:
    if not cell.node:
        return f"host page {cell.number}: free"
    what = {
        "both": "a copy",
        "host": "the only copy",
        "copying": "a copy under way",
        "loading": "being loaded",
    }
    return f"host page {cell.number}: {what[cell.tier]} of n{cell.node}<br>{shown(cell.text, 60)}"


def _owners(cells: Iterable[PoolPage]) -> list[PoolPage]:
    return list({cell.label: cell for cell in cells if cell.owner != "free"}.values())


def _page_colour(cell: PoolPage) -> str:
    return PRIVATE if cell.node is None else owner_colour(cell.node)


def _page_hover(cell: PoolPage) -> str:
    if cell.owner == "free":
        return f"page {cell.number}: free"
    lock = " (protected)" if cell.locked else " (evictable)"
    who = f"node n{cell.node}{lock}" if cell.owner == "node" else f"private to {cell.request}"
    lines = [f"page {cell.number}: {who}"]
    if cell.text:
        lines.append(shown(cell.text, 60))
    if cell.users:
        lines.append("read by " + ", ".join(cell.users))
    return "<br>".join(lines)


def _columns(count: int) -> int:
    return max(1, min(count, 16 * math.ceil(math.sqrt(count * 2.6) / 16)))


def _steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """A colour scale of equal flat steps."""
    n = len(colours)
    return [(edge / n, colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]


# ---------------------------------------------------------------------- usage


def usage(recording: Recording) -> go.Figure:
    """The pool over time: protected, evictable, private and free tokens, stacked.

    A pool of which a small part is ever used is cut off above that part, or nothing would be seen of it.
    With a host tier a line says how many tokens have a copy there.
    """
    points = usage_points(recording)
    steps = [point.step for point in points]
    pool = int(recording.header["start"]["kv_tokens"])
    used = max((p.evictable + p.protected + p.private for p in points), default=0)
    cut = bool(pool and used and max(used, *(p.host for p in points)) < pool / 8)
    traces = [
        go.Scatter(
            x=steps, y=[getattr(point, name) for point in points], name=name, stackgroup="pool",
            mode="lines", line={"shape": "hvh", "width": 0.7, "color": colour}, fillcolor=colour,
            fillpattern={
                "shape": pattern, "size": 6, "solidity": 0.2, "fillmode": "overlay",
                "fgcolor": "#495057",
            },
            hovertemplate="%{y} " + name + "<extra></extra>",
        )
        for name, colour, pattern in USAGE
    ]  # fmt: skip
    if has_tiers(recording.header["start"]):
        copies = go.Scatter(
            x=steps, y=[point.host for point in points], name="on the host", mode="lines",
            line={"shape": "hv", "width": 2, "color": "#5f3dc4", "dash": "dash"},
            hovertemplate="%{y} on the host<extra></extra>",
        )  # fmt: skip
        traces.append(copies)
    title = f"Pool usage (at most {used} of {pool} slots: the rest is cut off)" if cut else "Pool usage"
    figure = _figure(title, traces, "step", "tokens")
    if cut:
        figure.update_yaxes(range=[0, 1.15 * max(used, *(p.host for p in points))])
    figure.update_layout(hovermode="x unified")
    return figure


# ---------------------------------------------------------------------- hit rate


def hit_rate(recording: Recording, decode: Decode | None = None) -> go.Figure:
    """A bar per request (share of its prompt that was cached) and the cumulative rate as a line."""
    hits = request_hits(recording, decode)
    names = [hit.request for hit in hits]
    bars = go.Bar(
        x=names, y=[hit.rate for hit in hits], name="per request",
        marker={"color": "#8fc1e3", "line": {"color": "#0072b2", "width": 1}},
        text=[f"{hit.cached_tokens}/{hit.prompt_tokens}" for hit in hits], textposition="outside",
        customdata=[shown(hit.text, 120) for hit in hits], cliponaxis=False,
        hovertemplate="%{x}: %{text} prompt tokens cached (%{y:.0%})<br>%{customdata}<extra></extra>",
    )  # fmt: skip
    line = go.Scatter(
        x=names, y=[hit.cumulative for hit in hits], name="cumulative H", mode="lines+markers",
        line={"color": "#d55e00", "width": 2, "dash": "dot"},
        hovertemplate="up to %{x}: H = %{y:.1%}<extra></extra>",
    )  # fmt: skip
    total = hits[-1].cumulative if hits else 0.0
    figure = _figure(f"Hit rate: H = {total:.0%}", [bars, line], "request, in order of admission", "")
    figure.update_yaxes(range=[0, 1.12], tickformat=".0%")
    return figure


# ---------------------------------------------------------------------- timeline


def timeline(recording: Recording, decode: Decode | None = None) -> go.Figure:
    """A lane per request: waiting, prefill chunks, decoding, paused, retracted; its end on the right."""
    decode = decode or decoder_for(recording.header)
    found = spans(recording)
    texts = {name: shown(decode(tokens), 90) for name, tokens in prompts(recording).items()}
    traces: list[Any] = [_lane_bars(found, phase, texts) for phase in PHASES]
    last = [span for span in found if span.ending]
    traces.append(
        go.Scatter(
            x=[span.end + 0.5 for span in last], y=[span.request for span in last], mode="text",
            text=[f" {span.ending}" for span in last], textposition="middle right",
            showlegend=False, hoverinfo="skip", textfont={"size": 10, "color": "#495057"},
            cliponaxis=False,
        )
    )  # fmt: skip
    figure = _figure("Requests", traces, "step", "")
    names = list(dict.fromkeys(span.request for span in found))
    figure.update_layout(barmode="overlay", bargap=0.3, height=max(240, 90 + 22 * len(names)))
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names)
    return figure


def _lane_bars(found: list[Span], phase: tuple[str, str, str], texts: dict[str, str]) -> go.Bar:
    name, colour, pattern = phase
    mine = [span for span in found if span.phase == name]
    return go.Bar(
        y=[span.request for span in mine], base=[span.start - 0.5 for span in mine],
        x=[span.end - span.start + 1 for span in mine], orientation="h", name=name,
        marker={
            "color": colour, "line": {"color": "#ffffff", "width": 1},
            "pattern": {
                "shape": pattern, "size": 5, "solidity": 0.25, "fillmode": "overlay",
                "fgcolor": "#495057",
            },
        },
        customdata=[_span_hover(span, texts.get(span.request.split(".")[0], "")) for span in mine],
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _span_hover(span: Span, text: str) -> str:
    when = f"step {span.start}" if span.start == span.end else f"steps {span.start} to {span.end}"
    computed = f", {span.tokens} tokens computed" if span.tokens else ""
    ending = f", then finished ({span.ending})" if span.ending else ""
    return f"{span.request}: {span.phase}, {when}{computed}{ending}<br>{text}"


# ---------------------------------------------------------------------- evictions


def age_at_eviction(recording: Recording, decode: Decode | None = None) -> go.Figure:
    """How long each evicted node had not been used: a bar per eviction, in order."""
    gone = evictions(recording, decode)
    bars = go.Bar(
        x=list(range(1, len(gone) + 1)), y=[e.age for e in gone], name="age",
        text=[f"n{e.node}" for e in gone], textposition="outside", cliponaxis=False,
        marker={"color": "#f2a9a0", "line": {"color": "#cc3311", "width": 1}},
        customdata=[_eviction_hover(e) for e in gone], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    if any(e.what != "evicted" for e in gone):
        bars.marker.pattern.shape = [{"demoted": "/", "host": "x"}.get(e.what, "") for e in gone]
    tokens = sum(e.tokens for e in gone)
    return _figure(
        f"Age at eviction: {len(gone)} nodes, {tokens} tokens{_told(gone)}", [bars], "evictions, in order",
        "ticks since last use",
    )  # fmt: skip


def _told(gone: Sequence[Eviction]) -> str:
    """How many of the evictions were none for good."""
    demoted, host = (sum(e.what == what for e in gone) for what in ("demoted", "host"))
    return f" ({demoted} demoted: /, {host} from the host: x)" if demoted or host else ""


def _eviction_hover(gone: Eviction) -> str:
    then = f", next would have been n{gone.runner_up}" if gone.runner_up else ""
    return (
        f"n{gone.node}, {gone.tokens} tokens, {_WHAT[gone.what]} in step {gone.step}<br>"
        f"{html.escape(gone.policy)}: {html.escape(gone.reason)}{then}<br>"
        f"unused for {gone.age} ticks, {gone.hits} hits in a life of {gone.life}<br>"
        f"{shown(gone.text, 90)}"
    )


_WHAT = {"evicted": "evicted", "demoted": "demoted to the host", "host": "evicted from the host"}


# ---------------------------------------------------------------------- shared


def shown(text: str, width: int) -> str:
    """Any text as one line that is safe in a hover box: escaped, elided, its direction kept inside."""
    line = visible(text)
    if len(line) > width:
        line = line[: width // 2] + " … " + line[-(width // 2) :]
    return f"\u2068{html.escape(line)}\u2069" if line else ""


class KvFigure(go.Figure):  # type: ignore[misc]  # Plotly has no types
    """A Plotly figure that is saved small: its data for viewers that know Plotly, a still PNG for others.

    Plotly's own choice would put its JavaScript, or the address of a server that has it, into the file.
    """

    _ipython_display_ = None

    def _repr_mimebundle_(self, *args: object, **kwargs: object) -> dict[str, Any]:
        figure = self.to_plotly_json()
        return {
            "application/vnd.plotly.v1+json": json.loads(json.dumps(figure, cls=PlotlyJSONEncoder)),
            # JupyterLab shows this one, pixel for pixel, until the pointer comes: it has to fit into a cell
            "image/png": still(self, scale=1),
            "text/plain": f"{self.layout.title.text}",
        }

    def _repr_html_(self) -> None:
        return None


def _figure(title: str, traces: Sequence[Any], x: str = "", y: str = "") -> KvFigure:
    figure = KvFigure(list(traces))
    grid = {"gridcolor": "#eef0f3", "zeroline": False, "linecolor": "#ced4da"}
    figure.update_layout(
        template="none", title={"text": title, "x": 0.01, "font": {"size": 14}},
        height=300, margin={"l": 56, "r": 24, "t": 44, "b": 44},
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 11, "color": "#343a40"},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        paper_bgcolor="#ffffff", plot_bgcolor="#ffffff", hoverlabel={"align": "left"},
        xaxis={"title": {"text": x}, **grid}, yaxis={"title": {"text": y}, **grid},
    )  # fmt: skip
    return figure
