"""Recordings as files: one self-contained HTML page that plays from disk, or an animated GIF.

The page is the live page with all its data inside (compressed), so it looks and works the same, save
that there is no engine to drive. A long recording is thinned out: past `MOST_VIEWS` positions only
those with a split, an eviction, an admission or a retraction and every k-th other one are kept.

Fetches nothing and needs no server; the module scripts are put into the page as they are.
"""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirad import command
from viz.draw import tree
from viz.draw.dot import find_dot
from viz.trace import Trace, summary_of
from viz.web.compare import AnyPage
from viz.web.page import Page

if TYPE_CHECKING:
    from viz.web.fleet import FleetPage

STATIC = Path(__file__).parents[1] / "static"
MOST_VIEWS = 1200
MOST_EVENTS = 1500
# Pixels that trees are drawn for in a window of 1280x800.
TREE_HEIGHTS = {"page": 304, "compare": 232, "ranks": 232}
GIF_SIZE = (1100, 620)
GIF_PACE = 700  # milliseconds per picture

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
{head}
</head>
<body>
<div id="app" data-page="{kind}"></div>
<noscript>This page needs JavaScript to draw the tree.</noscript>
{data}
{script}
</body>
</html>
"""


def page_html(data: Any = None, title: str = "minirad live", kind: str = "page") -> str:
    """The page: with `data` a self-contained file, without it the live one that loads static/NAME.

    kind: "page", or "compare" and "ranks" for several engines side by side.
    """
    if data is None:
        links = "".join(f'<link rel="stylesheet" href="static/{n}">' for n in ("tree.css", "style.css"))
        script = f'<script type="module" src="static/{kind}.js"></script>'
        return _HEAD.format(title=html.escape(title), head=links, data="", script=script, kind=kind)
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    style = "\n".join(_static(name) for name in ("tree.css", "style.css"))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{style}</style>'
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0))
    return _HEAD.format(
        title=html.escape(title), head=head, kind=kind,
        data=f'<script type="application/octet-stream" id="recording">{packed.decode()}</script>',
        script=f'<script type="module">\n{one_script(kind)}</script>',
    )  # fmt: skip


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def one_script(kind: str = "page") -> str:
    """The page's script and all that it imports as one module: files on disk may not import one another."""
    own = ("route.js", "fleet.js", "why.js", "drafts.js") if kind == "page" else ("sides.js",)
    names = ("tree.js", "parts.js", *own)
    shared = "\n".join(_alone(_static(name)) for name in names)
    return f"{shared}\n{{\n{_alone(_static(f'{kind}.js'))}\n}}\n".replace("</script", "<\\/script")


def _alone(script: str) -> str:
    """A module without its imports and exports."""
    script = re.sub(r"^(import .*|export default .*)$", "", script, flags=re.MULTILINE)
    return re.sub(r"^export (async function|function|const|class)", r"\1", script, flags=re.MULTILINE)


# ---------------------------------------------------------------------- HTML


def export(page: AnyPage, path: str | Path, title: str = "", note: str = "") -> int:
    """Writes what the file's ending asks for (.html or .gif) and returns its size in bytes."""
    ending = Path(path).suffix.lower()
    if ending in (".html", ".htm"):
        return export_html(page, path, title, note)
    if ending != ".gif":
        raise ValueError(f"cannot export to {str(path)!r}: the name must end in .html or .gif")
    if not isinstance(page, Page):
        raise ValueError(f"cannot export to {str(path)!r}: engines side by side need a .html file")
    return export_gif(page, path, title, note)


def export_html(page: AnyPage, path: str | Path, title: str = "", note: str = "") -> int:
    """One file with every position of a recording (of a long one: those that matter)."""
    find_dot()  # DotError rather than a file without trees
    text = page_html(page_data(page, title, note), f"minirad: {title}" if title else "minirad", page.kind)
    data = text.encode("utf-8")
    with command.named(path):
        Path(path).write_bytes(data)
    return len(data)


def page_data(page: AnyPage, title: str = "", note: str = "") -> dict[str, Any]:
    """All that the page would ask a server for; equal pictures and node texts are kept once."""
    from viz.web.fleet import FleetPage

    pool, height = _Pool(), TREE_HEIGHTS[page.kind]
    kept = _kept(page) if isinstance(page, Page) else {"step": _evenly(len(page) + 1)}
    views = {
        granularity: {index: pool.pack(page.view(granularity, index, height=height)) for index in wanted}
        for granularity, wanted in kept.items()
    }
    alone = _alone_views(page, kept["step"], pool, height) if isinstance(page, FleetPage) else {}
    return {
        "meta": page.meta(title, note),
        "frames": page.frames(),
        "requests": page.requests(),
        "views": views,
        "alone": alone,
        "shared": pool.shared,
    }


def _alone_views(page: FleetPage, wanted: Sequence[int], pool: _Pool, height: int) -> dict[int, Any]:
    """Of a stream's ranks that are there from the start on, each one alone, by step; none where that would be
    more views than a file has of all together."""
    ranks = page.ranks()
    if len(ranks) < 2 or len(ranks) * len(wanted) > MOST_VIEWS:
        return {}
    return {
        rank: {"step": {i: pool.pack(page.view("step", i, height=height, rank=rank)) for i in wanted}}
        for rank in ranks
    }


def _kept(page: Page) -> dict[str, Sequence[int]]:
    """The positions of each granularity that a file has."""
    counts = {granularity: page.trace.count(granularity) for granularity in ("step", "scene", "event")}
    return {
        granularity: _telling(page.trace, granularity, count)
        for granularity, count in counts.items()
        if granularity != "event" or count <= MOST_EVENTS
    }


def _evenly(count: int) -> Sequence[int]:
    return sorted({*range(0, count, -(-count // MOST_VIEWS)), count - 1})


def _telling(trace: Trace, granularity: str, count: int) -> Sequence[int]:
    """All positions; of very many those at which something happens, and some in between."""
    if count <= MOST_VIEWS:
        return range(count)
    telling = {0, count - 1}
    for index, frame in enumerate(trace.recording.frames):
        if any(event.mark or event.is_turn for event in frame.events):
            telling.add(trace.position_of(granularity, index))
    ordered = sorted(telling)
    if len(ordered) > MOST_VIEWS:
        ordered = ordered[:: -(-len(ordered) // MOST_VIEWS)]
    every = range(0, count, max(count // max(MOST_VIEWS - len(ordered), 1), 1))
    return sorted({*ordered, *every, count - 1})


class _Pool:
    """Things that many views have in common, each stored once."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        self._known: dict[str, int] = {}

    def _place(self, thing: Any) -> int:
        key = thing if isinstance(thing, str) else json.dumps(thing, separators=(",", ":"))
        if key not in self._known:
            self._known[key] = len(self.shared)
            self.shared.append(thing)
        return self._known[key]

    def pack(self, view: dict[str, Any]) -> dict[str, Any]:
        if "sides" in view:
            return {**view, "sides": [self.pack(side) for side in view["sides"]]}
        nodes = {
            number: {**node, "body": self._place(node["body"])} for number, node in view["nodes"].items()
        }
        return {**view, "svg": self._place(view["svg"]), "nodes": nodes}


# ---------------------------------------------------------------------- GIF


def export_gif(page: Page, path: str | Path, title: str = "", note: str = "") -> int:
    """The tree step by step, equal pictures left out, each with its sentence."""
    from PIL import Image

    trace = page.trace
    pictures: list[Any] = []
    last = ""
    for index in range(trace.count("step")):
        view = trace.view("step", index)
        text = tree.dot_text(view, trace.decode)
        outline = re.sub(r"\bt \d+", "", text)  # a new access tick alone is no new picture
        if outline == last:
            continue
        last = outline
        drawn = Image.open(io.BytesIO(tree.tree_png(view, trace.decode, dpi=110)))
        pictures.append(_framed(drawn.convert("RGB"), title, view.title, summary_of(view)[1]))
    if not pictures:
        raise ValueError("there is nothing to draw: the recording is empty")
    durations = [GIF_PACE] * (len(pictures) - 1) + [3 * GIF_PACE]
    with command.named(path):
        pictures[0].save(
            path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=False
        )
    return Path(path).stat().st_size


def _framed(drawn: Any, title: str, step: str, sentence: str) -> Any:
    """A tree picture, made to fit, under a line of text."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = GIF_SIZE
    top = 64
    canvas = Image.new("RGB", GIF_SIZE, "white")
    scale = min((width - 30) / drawn.width, (height - top - 15) / drawn.height, 1.0)
    size = (max(int(drawn.width * scale), 1), max(int(drawn.height * scale), 1))
    drawn = drawn.resize(size, Image.Resampling.LANCZOS)
    canvas.paste(drawn, ((width - size[0]) // 2, top + (height - top - size[1]) // 2))
    pen = ImageDraw.Draw(canvas)
    plain = sentence.replace("→", "->").encode("latin-1", "replace").decode("latin-1")
    plain = plain if len(plain) <= 120 else f"{plain[:117]}..."
    pen.text((16, 10), f"{title}   {step}".strip(), fill="#868e96", font=ImageFont.load_default(14))
    pen.text((16, 32), plain, fill="#212529", font=ImageFont.load_default(17))
    return canvas.quantize(48)
