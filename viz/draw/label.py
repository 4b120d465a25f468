"""Pieces of an HTML-like label, which Graphviz lays out."""

from __future__ import annotations

SANS, MONO = "Helvetica", "Courier New"


def font(size: int, color: str, inner: str, bold: bool = False, face: str = SANS) -> str:
    """Text in a size and colour; `inner` is a label already."""
    if not inner:
        return ""  # Graphviz refuses an element without text, and with it the whole picture
    if bold:
        inner = f"<B>{inner}</B>"
    return f'<FONT FACE="{face}" POINT-SIZE="{size}" COLOR="{color}">{inner}</FONT>'


def escape(text: str) -> str:
    """Text for an HTML-like label."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace('"', "&quot;").replace("'", "&#39;")
