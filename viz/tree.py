"""The picture of a tree, under the name that lessons and notebooks use; viz/draw/tree.py draws it."""

from viz.draw.tree import (
    DETAILS,
    STYLES,
    TIER_SIGNS,
    Options,
    Plan,
    Style,
    dot_text,
    plan,
    svg,
    tree_png,
    tree_svg,
)

__all__ = [
    "DETAILS", "STYLES", "TIER_SIGNS", "Options", "Plan", "Style", "dot_text", "plan", "svg", "tree_png",
    "tree_svg",
]  # fmt: skip
