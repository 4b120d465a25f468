"""The picture of a tree, under the name that lessons and notebooks use; viz/draw/tree.py draws it."""

from viz.draw.tree import STYLES, Options, dot_text, svg, tree_png, tree_svg

__all__ = ["STYLES", "Options", "dot_text", "svg", "tree_png", "tree_svg"]
