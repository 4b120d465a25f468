"""A session's prompts as a tree of runs, drawn by Graphviz: report["sessions"][n] -> DOT text.

A card is a run: parts of prompts that always stood together. Where the prefix broke there is a branch, and
the card that begins there names the break. Labels are escaped; texts of the log are cut, and never markup.
"""

from __future__ import annotations

from typing import Any

from minirad.why.turns import BREAKS
from viz.draw.label import MONO, SANS, escape, font
from viz.view.text import short

INK, SOFT, BROKE, FIRST, FILL, BROKE_FILL = "#212529", "#495057", "#c92a2a", "#2b8a3e", "#f8f9fa", "#fff5f5"
WIDTH = 42  # characters of a line on a card


def session_dot(session: dict[str, Any], unit: str = "token") -> str:
    """A session's tree as DOT, left to right: cards in order of the turns that began them."""
    broke = {
        number: turn["break"] for number, turn in enumerate(session["turns"], start=1) if "break" in turn
    }
    lines = [
        "digraph session {",
        'graph [rankdir=LR, bgcolor="transparent", ordering=out, pad=0.1, nodesep=0.16, ranksep=0.5]',
        f'node [shape=plain, fontname="{SANS}"]',
        "edge [arrowhead=none]",
        'n0 [shape=circle, style=filled, fillcolor="#f1f3f5", color="#adb5bd", width=0.6, fixedsize=true, '
        'label="start", fontsize=10, fontcolor="#495057"]',
    ]
    named: set[int] = set()  # breaks that have their card: the run nearest to the root that began with them
    for run in session["runs"]:
        found = None if run["first"] in named else broke.get(run["first"])
        named.add(run["first"])
        lines += _card(run, found, unit)
    if session["runs_more"]:
        label = font(10, SOFT, f"{session['runs_more']:,} smaller runs are left out")
        lines.append(f"more [label=<{label}>]")
    return "\n".join([*lines, "}", ""])


def _card(run: dict[str, Any], broke: dict[str, Any] | None, unit: str) -> list[str]:
    colour = SOFT if broke is None else BROKE
    first, last = run["first"], run["last"]
    turns = f"turn {first}" if first == last else f"turns {first} to {last}"
    alone = "" if run["turns"] == last - first + 1 else f" ({run['turns']:,} of them)"
    rows = []
    if broke is not None:
        rows.append(_row(font(11, BROKE, escape(_short(BREAKS[broke["kind"]])), bold=True)))
        rows.append(_row(font(9, BROKE, escape(_short(broke["what"])))))
    rows.append(_row(font(10, INK, f"{turns}{alone}", bold=True)))
    parts = f"{run['parts']:,} part{'s' * (run['parts'] != 1)}"
    rows.append(_row(font(10, SOFT, f"{run['tokens']:,} {unit}s in {parts}")))
    names = [*run["names"], *(["…"] if run["parts"] > len(run["names"]) + 1 else [])]
    if run["parts"] > len(run["names"]):
        names.append(run["end"])
    rows += [_row(font(10, INK, escape(_short(name)) or "?", face=MONO)) for name in names]
    if broke is not None:
        cost = f"{broke['computed']:,} computed, {broke['again']:,} of them again"
        rows.append(_row(font(10, BROKE, cost)))
    style = f'STYLE="ROUNDED" COLOR="{colour}" BGCOLOR="{FILL if broke is None else BROKE_FILL}"'
    table = (
        f'<TABLE BORDER="{1 if broke is None else 2}" CELLBORDER="0" CELLSPACING="3" CELLPADDING="0" {style}>'
    )
    number = run["run"]
    return [
        f'n{number} [id="run{number}", label=<{table}{"".join(rows)}</TABLE>>]',
        f'n{run["parent"]} -> n{number} [color="{colour}", penwidth={1.5 if broke is None else 2.4}'
        f"{'' if broke is None else ', style=dashed'}]",
    ]


def _row(label: str) -> str:
    return f'<TR><TD ALIGN="LEFT">{label}</TD></TR>'


def _short(text: str) -> str:
    return short(" ".join(text.split()), WIDTH)
