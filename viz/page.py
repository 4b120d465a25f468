"""The data of the live page, under its public name; viz/web/page.py makes it."""

from viz.web.page import Page

__all__ = ["Page"]
