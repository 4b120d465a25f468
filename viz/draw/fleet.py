"""What a card of a stream's node says beside its text: which ranks hold it, and what is wrong with it.

The strip has a cell for each rank: its number, and below it the letter of the tier (D device, H host, K disk,
X external, ? may be there), in the tier's colour. Of more ranks than can be read it counts how many have each
letter. tree.py draws the rest of the card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from minirad.observe.fleet_events import counted
from minirad.observe.snapshot import State
from viz.draw.label import escape
from viz.draw.label import font as _font
from viz.trace import View
from viz.view.fleet import letters, sign
from viz.view.text import visible

MOST_CELLS = 16  # ranks that get a cell each
_A_ROW = 8  # cells beside one another: as wide as a card is anyway
_FEW = 40  # nodes of a tree whose cards all have a strip
_SPACE = 26  # characters of a namespace's name
COLOURS: Mapping[str, str] = {
    "D": "#a5d8ff", "H": "#d0bfff", "DH": "#91a7ff", "K": "#ffd8a8", "X": "#ced4da", "?": "#fff3bf",
    "": "#ffffff",
}  # fmt: skip
_INK, _SOFT, _FAINT, _BAD = "#212529", "#495057", "#868e96", "#862e2e"
SENTENCES = {
    "hole": "HOLE: nothing below can be hit",
    "unseen": "NOT SEEN: only told as a parent",
    "maybe": "?: may be there, told twice",
}
_SINGLE_LINE = 4  # ranks whose cells are wide enough for number and letter beside one another


def colour(held: str) -> str:
    """The colour of a cell."""
    found = letters(held)
    return COLOURS.get(found) or COLOURS["DH" if "D" in found else found[:1]]


def floors(state: State, detail: str) -> int:
    """How many rows of cells stand under a card."""
    ranks = len(state["tree"]["ranks"])
    if detail == "tiny":
        return 0
    return 1 if ranks > MOST_CELLS else -(-ranks // _A_ROW)


def rows(node: State, view: View, detail: str) -> list[str]:
    """The rows of a card's table under its own."""
    tree = view.state["tree"]
    ranks = [str(row["rank"]) for row in tree["ranks"]]
    held = held_on_view(node, view)
    strip = [_row(_strip(held, ranks))] if held and ranks else []
    if detail == "tiny":
        return strip if has_strips(view) else []
    lines = []
    space = space_name(tree, node)
    if space:
        lines.append(_font(9, _SOFT, f"space {escape(space)}"))
    told = sentence(node, held, view)
    if told:
        lines.append(_font(9, _BAD, told))
    found = [_row(line) for line in lines]
    return [*found, *strip]


def held_on_view(node: State, view: View) -> dict[str, str]:
    """Which ranks of a view hold a node: of one that shows a rank alone, that one or none."""
    ranks = view.state["tree"]["ranks"]
    if len(ranks) == 1:
        rank = str(ranks[0]["rank"])
        return {rank: node["held"][rank]} if rank in node["held"] else {}
    return dict(node["held"])


def has_strips(view: View) -> bool:
    """Cards of one line have a strip, too: there are so few that the picture stays one to be read."""
    return len(view.nodes) <= _FEW and len(view.state["tree"]["ranks"]) > 1


def summed(node: State, view: View) -> str:
    """Who holds a node, for a card of one line; nothing where it has a strip."""
    if has_strips(view):
        return ""
    return grouped(held_on_view(node, view), len(view.state["tree"]["ranks"]))


def space_name(tree: State, node: State) -> str:
    """The namespace of a node by its name, harmless and short; "" for the default one."""
    spaces = tree.get("spaces", ())
    number = node["namespace"]
    name = visible(str(spaces[number])) if 0 <= number < len(spaces) else str(number)
    return name if len(name) <= _SPACE else f"{name[: _SPACE - 1]}…"


def sentence(node: State, held: Mapping[str, str], view: View) -> str:
    """What must be said of a node beyond its status's word."""
    if node["id"] in view.ghosts:
        return ""
    if not node["seen"]:
        return SENTENCES["unseen"]
    if not held:
        return SENTENCES["hole"]
    return SENTENCES["maybe"] if any("?" in media for media in held.values()) else ""


def in_words(node: State, view: View) -> str:
    """How much a node is and who holds it: "64 tokens, D 0–1 · H 4"."""
    if node["id"] in view.ghosts:
        return "no rank holds it any more"
    held = held_on_view(node, view)
    size = [counted(node["units"], "token")] if node["seen"] else []
    told = sentence(node, held, view)
    who = grouped(held, len(view.state["tree"]["ranks"]))
    return ", ".join([*size, *(part for part in (who, told) if part)])


def grouped(held: Mapping[str, str], ranks: int) -> str:
    """Who holds it in one line: "D 0-3,6 · H 4"; of many ranks how many: "D x12"."""
    by: dict[str, list[int]] = {}
    for rank, media in held.items():
        by.setdefault(sign(media), []).append(int(rank))
    if ranks == 1:
        return next(iter(by), "")
    if ranks > MOST_CELLS:
        return " · ".join(f"{letter} ×{len(own)}" for letter, own in sorted(by.items()))
    return " · ".join(f"{letter} {','.join(spans(own))}" for letter, own in sorted(by.items()))


def spans(numbers: Sequence[int]) -> Iterator[str]:
    """[0, 1, 2, 5] as "0-2", "5"."""
    ordered = sorted(numbers)
    start = 0
    for at in range(1, len(ordered) + 1):
        if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
            first, last = ordered[start], ordered[at - 1]
            yield str(first) if first == last else f"{first}–{last}"
            start = at


def _strip(held: Mapping[str, str], ranks: Sequence[str]) -> str:
    if len(ranks) > MOST_CELLS:
        count = Counter(held.values())
        cells = [(f"×{count[media]}", media) for media in sorted(count, key=lambda m: (-count[m], m))[:5]]
        rest = len(ranks) - sum(count.values())
        cells += [(f"×{rest}", "")] if rest else []
        return _table([cells], 30)
    if len(ranks) == 1:
        return _one(held.get(ranks[0], ""))
    cells = [(rank, held.get(rank, "")) for rank in ranks]
    if len(cells) <= _SINGLE_LINE:
        return _table([cells], 17, " ")
    return _table([cells[at : at + _A_ROW] for at in range(0, len(cells), _A_ROW)], 17)


def _table(rows_of_cells: list[list[tuple[str, str]]], width: int, between: str = "<BR/>") -> str:
    """One cell a (text, media), text above letter."""
    lines = ["".join(_cell(text, media, width, between) for text, media in cells) for cells in rows_of_cells]
    inner = "".join(f"<TR>{line}</TR>" for line in lines)
    return f'<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="1" CELLPADDING="0" COLOR="#adb5bd">{inner}</TABLE>'


def _cell(text: str, media: str, width: int, between: str) -> str:
    letter = sign(media)
    if len(letter) > 3:  # D+H+K would make its cell wider than the others
        letter = letter.replace("+", "")
    ink = _INK if media else _FAINT
    size, height = (7, 19) if between == "<BR/>" else (8, 12)
    letters_there = _font(size, ink, letter or "–", bold=bool(letter))
    inner = f"{_font(size, ink, text)}{between}{letters_there}"
    return f'<TD WIDTH="{width}" HEIGHT="{height}" BGCOLOR="{colour(media)}">{inner}</TD>'


def _one(media: str) -> str:
    """Of a single rank: the letter, and the media by name."""
    names = ", ".join(visible(each)[:16] for each in media.split("+"))
    words = " may be there" if media == "?" else f" in {names}"
    inner = _font(8, _INK, sign(media), bold=True) + _font(8, _SOFT, escape(words))
    return (
        '<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="2" COLOR="#adb5bd"><TR>'
        f'<TD ALIGN="LEFT" BGCOLOR="{colour(media)}">{inner}</TD></TR></TABLE>'
    )


def _row(inner: str) -> str:
    return f'<TR><TD COLSPAN="2" ALIGN="LEFT">{inner}</TD></TR>' if inner else ""
