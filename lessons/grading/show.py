"""Draws what failed: trees by viz.tree, on one page that the browser opens."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lessons.grading.report import explanation, said_once
from lessons.grading.run import Result
from lessons.grading.words import said, shown

STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#212529}"
    "h2{margin-top:2em}figure{margin:1em 0;overflow-x:auto}figcaption{color:#495057}"
    "pre{white-space:pre-wrap;background:#f8f9fa;padding:1em}"
)


def tree_svg(state: dict[str, Any]) -> str:
    """A tree's snapshot as SVG; token ids are shown as numbers, or as its "words" say."""
    from viz.draw.tree import tree_svg as draw
    from viz.trace import View

    status = {node["id"]: "locked" if node["lock_ref"] else "cached" for node in state["nodes"]}
    view = View(
        granularity="step", index=0, frame=-1, step=0, title="", events=(), so_far=(),
        state={"tree": state}, status=status, also={}, ghosts={}, focus=frozenset(),
    )  # fmt: skip
    words = state.get("words", {})
    return draw(view, lambda tokens: " ".join(words.get(str(token), str(token)) for token in tokens))


def page(results: Sequence[Result]) -> str:
    """All failures in words and pictures."""
    parts = []
    for result in said_once(results):
        if result.status in ("passed", "todo"):
            continue
        what = result.lesson if result.whole_file else f"{result.lesson}: {result.exercise}"
        parts.append(f"<h2>{escape(what)}</h2>")
        parts.append(f"<pre>{escape(explanation(result))}</pre>")
        parts += [_figure(title, picture) for title, picture in result.pictures]
    body = "\n".join(parts) or "<p>Nothing failed.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What failed</title>'
        f"<style>{STYLE}</style></head><body><h1>What failed</h1>{body}</body></html>"
    )


def _figure(title: str, picture: Any) -> str:
    try:
        if isinstance(picture, dict):
            drawn = tree_svg(picture)
        elif isinstance(picture, str) and picture.lstrip().startswith("<svg"):
            drawn = f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{_base64(picture)}">'
        else:
            drawn = f"<pre>{escape(str(picture))}</pre>"
    except Exception as error:  # a submission's tree may be anything, and dot may be missing
        drawn = f"<pre>no picture: {escape(said(error))}\n{escape(shown(picture))}</pre>"
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _base64(text: str) -> str:
    from base64 import b64encode

    return b64encode(text.encode("utf-8")).decode("ascii")  # as an image, its scripts do not run


def show(results: Sequence[Result], open_browser: bool = True) -> Path:
    """Writes the page to a temporary file, opens it, and returns where it is."""
    path = Path(tempfile.mkdtemp(prefix="minirad-failed-")) / "failed.html"
    path.write_text(page(results), encoding="utf-8", errors="backslashreplace")
    if open_browser:
        webbrowser.open(path.as_uri())
    return path
