"""A position of a recording as a picture of the tree: View -> DOT text -> SVG or PNG.

`dot_text` is a pure function of the view and a few options, so golden tests can hold it. Nodes are
cards, left to right: name and status word, locks and last access, the text they hold (its middle left
out), tokens and slots. Ids stay (`n7`, its edge `e7`), siblings stand in order of creation: nothing
jumps when the tree changes. Colours follow the paper (green new, blue hit, red evicted), and every
status also has its own word and outline.

In a tree with a host tier a card says where its KV lies: D (device), D→H (being copied), D+H (both), H→D
(being loaded), H (host only). What has a copy stands on a second floor, a violet strip with its host
slots; what is on its way has a dashed outline; what is on the host only has square corners, a dotted
outline and a dotted edge. What was read from the disk has K behind that, and "from disk" on an orange strip.

Where an engine has adapters, the cards below the root have a tag with the adapter's name.

Past `fold_above` nodes, cold subtrees are folded into one stub per parent, "+12 nodes, 340 tokens";
`opened` names the parents whose children are to be shown all the same.

Does not follow time (trace.py does) and moves nothing (static/tree.js does).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from minirad.observe.disk_events import BlocksRead
from minirad.observe.snapshot import State
from viz.draw import fleet
from viz.draw.dot import run_dot
from viz.draw.fold import CARDS, LARGE, Heaviest
from viz.draw.label import MONO, SANS
from viz.draw.label import escape as escape
from viz.draw.label import font as _font
from viz.trace import Decode, View, has_tiers, is_fleet, text_tokens, tier_of, units
from viz.view.text import pretty, visible

# Layout needs fonts whose widths Graphviz knows; the SVG then asks for what readers' systems have,
# in fonts of (nearly) the same widths.
_INK, _SOFT, _FAINT = "#212529", "#495057", "#5c636a"
_HOST, _HOST_FILL = "#5f3dc4", "#e5dbff"
_DISK_INK = "#7c4a03"
_SYSTEM_FONTS = {
    SANS: "Helvetica,Arial,Liberation Sans,sans-serif",
    MONO: "Menlo,DejaVu Sans Mono,Liberation Mono,Courier New,monospace",
}
FOLD_ABOVE = 150
DETAILS = ("full", "compact", "tiny")
NO_ADAPTER = "#5c636a"
ADAPTERS = ("#0b7285", "#9c36b5", "#8f5b00", "#364fc7", "#a61e4d", "#495057")  # their tags, in order
_TAG = 24  # characters of an adapter's name
DISK = "K"
FROM_DISK = "FROM DISK"
_LEAF = {"full": 70, "compact": 40}  # pixels that a leaf takes, at a scale that can still be read
_LINE = {"full": 21, "compact": 20, "tiny": 16}
_WIDTH = {"full": 140, "compact": 132, "tiny": 168}  # of all cards alike, so that columns stay put
_LINES = {"full": 3, "compact": 1, "tiny": 1}
_STRIP = 17  # pixels more where a full card has a second floor
_ENDS = 60  # tokens decoded at either end of a long node
NO_TEXT = "∅"  # on the card of tokens that decode to nothing: a lone "▁" of some tokenizers
HOST_ONLY = "DOTTED"  # the outline of what has no slots: square, whatever happened to it
_OUTLINES = {"host": HOST_ONLY, "copying": "ROUNDED,DASHED", "loading": "ROUNDED,DASHED"}
TIER_SIGNS: Mapping[str, str] = {
    "": "",
    "device": "D",
    "copying": "D→H",
    "both": "D+H",
    "loading": "H→D",
    "host": "H",
}
_TIER_WORDS: Mapping[str, str] = {
    "copying": "being copied to", "both": "a copy on", "loading": "coming from", "host": "only on",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Style:
    """How a status is drawn; the word and the outline tell it without colour."""

    word: str
    stroke: str
    fill: str
    width: int
    outline: str  # Graphviz' table style
    edge: str


STYLES: Mapping[str, Style] = {
    "new": Style("NEW", "#2b8a3e", "#ebfbee", 2, "ROUNDED", "#2f9e44"),
    "hit": Style("HIT", "#1864ab", "#e7f5ff", 3, "ROUNDED", "#1c7ed6"),
    "split": Style("SPLIT", "#b35c00", "#fff4e0", 2, "ROUNDED,DOTTED", "#e8890c"),
    "grown": Style("GROWN", "#087f5b", "#e6fcf5", 2, "ROUNDED", "#12b886"),
    "locked": Style("LOCK", "#343a40", "#f1f3f5", 2, "ROUNDED", "#868e96"),
    "cached": Style("", "#868e96", "#f8f9fa", 1, "ROUNDED", "#ced4da"),
    "evicted": Style("EVICTED", "#c92a2a", "#fff5f5", 2, "ROUNDED,DASHED", "#ff8787"),
    "host": Style("ON HOST", "#6741d9", "#f8f6ff", 1, HOST_ONLY, "#9775fa"),
    "demoted": Style("DEMOTED", "#a61e4d", "#fff0f6", 2, HOST_ONLY, "#e64980"),
    "loaded": Style("LOADED BACK", "#1864ab", "#e7f5ff", 3, "ROUNDED", "#1c7ed6"),
    "again": Style("COMPUTED AGAIN", "#2b8a3e", "#ebfbee", 2, "ROUNDED", "#2f9e44"),
    "stale": Style("OLD WEIGHTS", "#5c636a", "#e9ecef", 1, "ROUNDED,DASHED", "#adb5bd"),
    "stored": Style("STORED", "#1864ab", "#e7f5ff", 2, "ROUNDED", "#1c7ed6"),
    "removed": Style("REMOVED", "#c2255c", "#fff0f6", 2, "ROUNDED,DASHED", "#e64980"),
    "hole": Style("HOLE", "#862e2e", "#fff8f8", 2, "ROUNDED,DASHED", "#c92a2a"),
    "unseen": Style("NOT SEEN", "#868e96", "#ffffff", 1, "ROUNDED,DOTTED", "#ced4da"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a picture depends on besides the view.

    letters: (node id, the letter shown instead of its name) pairs. detail: one of DETAILS, or "auto":
    as much as `height` pixels have room for. opened: node ids (0: the root) whose folded children are
    shown all the same; of a large tree a part of them, and more for one that is named again.
    """

    letters: tuple[tuple[int, str], ...] = ()
    detail: str = "auto"
    opened: Collection[int] = frozenset()
    fold_above: int = FOLD_ABOVE
    height: int = 560

    def letter(self, node: int) -> str:
        return dict(self.letters).get(node, "")


DEFAULT = Options()


# ---------------------------------------------------------------------- what is drawn


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes to draw (ghosts among them), in order, and what is folded below which parent."""

    nodes: tuple[State, ...]
    folds: tuple[tuple[int, int, int], ...]  # parent, nodes, tokens
    hanging: Mapping[int, int] = field(default_factory=dict)  # node -> the parent from whose fold it hangs

    @property
    def leaves(self) -> int:
        parents = {node["parent"] for node in self.nodes}
        return sum(node["id"] not in parents for node in self.nodes) + len(self.folds)


def plan(view: View, options: Options = DEFAULT) -> Plan:
    """Which nodes a picture shows: all, or past `fold_above` the warmest and what was opened.

    Of a large tree and of a stream's: the heaviest subtrees, what happened just now, and what was opened.
    """
    if by_weight(view, options):
        asked = f"plan {sorted(options.opened)} {options.fold_above}"
        return view.once(asked, lambda: _heaviest(view, options))
    nodes = {**{node["id"]: node for node in view.state["tree"]["nodes"]}, **view.ghosts}
    children = _children(nodes)
    order = _parents_first(children)
    shown = set(order)
    if len(order) > options.fold_above:
        shown = _warmest(view, nodes, children, order, options)
    folds = []
    for parent in [0, *order]:
        hidden = [number for number in children.get(parent, ()) if number not in shown]
        if hidden and (parent == 0 or parent in shown):
            everything = _parents_first(children, hidden)
            folds.append((parent, len(everything), sum(units(nodes[n]) for n in everything)))
    return Plan(tuple(nodes[number] for number in order if number in shown), tuple(folds))


def by_weight(view: View, options: Options = DEFAULT) -> bool:
    """It is a large tree, or a stream's that does not fit: what is heaviest is drawn, not what is warmest."""
    size = len(view.nodes) + len(view.ghosts)
    return size > (options.fold_above if is_fleet(view.state) else LARGE)


def _heaviest(view: View, options: Options) -> Plan:
    made = Heaviest(view, options.opened, min(options.fold_above, CARDS))
    numbers = [made.id(place) for place in made.shown]
    nodes = {number: view.ghosts.get(number) or view.nodes[number] for number in numbers if number}
    order = _parents_first(_children(nodes))
    folds = tuple((made.id(place), count, tokens) for place, count, tokens in made.folds)
    hanging = {made.id(place): made.id(parent) for place, parent in made.hanging.items()}
    return Plan(tuple(nodes[number] for number in order), folds, hanging)


def _children(nodes: Mapping[int, State]) -> dict[int, list[int]]:
    """Siblings in order of creation: a picture's order must not depend on what was used last."""
    below: dict[int, list[int]] = {}
    for node in sorted(nodes.values(), key=lambda node: (node["created"], node["id"])):
        parent = node["parent"]
        below.setdefault(parent if parent in nodes else 0, []).append(node["id"])
    return below


def _parents_first(children: Mapping[int, Sequence[int]], roots: Sequence[int] | None = None) -> list[int]:
    """Depth first, without recursion: a chain may be longer than Python's stack."""
    stack = list(reversed(children.get(0, ()) if roots is None else roots))
    order: list[int] = []
    while stack:
        order.append(stack.pop())
        stack += reversed(children.get(order[-1], ()))
    return order


def _warmest(
    view: View,
    nodes: Mapping[int, State],
    children: Mapping[int, Sequence[int]],
    order: Sequence[int],
    options: Options,
) -> set[int]:
    """From the root down, next always the child below which something happened most recently."""
    warmth: dict[int, tuple[bool, int]] = {}
    for number in reversed(order):
        calm = view.status.get(number, "cached") in ("cached", "host", "stale")
        own = (not calm, int(nodes[number]["last_access"]))
        warmth[number] = max([own, *(warmth[child] for child in children.get(number, ()))])
    shown: set[int] = set()
    heap: list[tuple[bool, bool, int, int]] = []
    parent = 0
    while True:
        for child in children.get(parent, ()):
            hot, access = warmth[child]
            heapq.heappush(heap, (parent not in options.opened, not hot, -access, child))
        if not heap or (heap[0][0] and len(shown) >= options.fold_above):
            return shown
        parent = heapq.heappop(heap)[-1]
        shown.add(parent)


# ---------------------------------------------------------------------- DOT text


def dot_text(view: View, decode: Decode, options: Options = DEFAULT) -> str:
    """The tree of a view as DOT: same view, same options, same text."""
    picture = plan(view, options)
    detail = (
        options.detail if options.detail in DETAILS else detail_for(picture, options.height, _floors(view))
    )
    page = int(view.state["tree"].get("page_size", 1))
    nodesep, ranksep = {"full": (0.18, 0.38), "compact": (0.12, 0.34), "tiny": (0.07, 0.3)}[detail]
    lines = [
        "digraph tree {",
        'graph [rankdir=LR, bgcolor="transparent", ordering=out, pad=0.1, '
        f"nodesep={nodesep}, ranksep={ranksep}]",
        f'node [shape=plain, fontname="{SANS}"]',
        "edge [arrowhead=none]",
        'n0 [id="n0", class="root", shape=circle, style=filled, fillcolor="#f1f3f5", color="#adb5bd", '
        'width=0.5, fixedsize=true, label="root", fontsize=11, fontcolor="#495057"]',
    ]
    for node in picture.nodes:
        hangs = picture.hanging.get(node["id"])
        lines += _node_lines(node, view, decode, options, detail, page, hangs)
    for parent, count, tokens in picture.folds:
        lines += _fold_lines(parent, count, tokens)
    return "\n".join([*lines, "}", ""])


def detail_for(picture: Plan, height: int, floors: Mapping[str, int] | None = None) -> str:
    """How much a card can say: all, one line of text, or all in one. floors: strips under it, by detail."""
    for detail, each in _LEAF.items():
        if picture.leaves * (each + _STRIP * (floors or {}).get(detail, 0)) <= height:
            return detail
    return "tiny"


def _floors(view: View) -> dict[str, int]:
    if is_fleet(view.state):
        return {detail: fleet.floors(view.state, detail) for detail in DETAILS}
    return {"full": has_tiers(view.state) + 2 * bool(view.origins.adapters)}


def _node_lines(
    node: State, view: View, decode: Decode, options: Options, detail: str, page: int, hangs: int | None
) -> list[str]:
    """A card and its edge. hangs: the parent from whose fold it hangs, if its own is not drawn."""
    number = node["id"]
    status = view.status.get(number, "cached")
    style = STYLES[status]
    ghost = number in view.ghosts
    classes = [status, *sorted(view.also.get(number, ()))]
    if node["lock_ref"] and not ghost and "locked" not in classes:
        classes.append("locked")
    tier = tier_of(node)
    if tier and not ghost:
        classes.append(f"tier-{tier}")
    if view.granularity == "event" and number in view.focus:
        classes.append("focus")
    above = f"n{node['parent'] if (node['parent'] in view.status) else 0}" if hangs is None else f"f{hangs}"
    label = _card(node, view, decode, options, detail, page)
    thick = 2.4 if status in ("new", "hit", "loaded") else 1.5
    dotted = tier == "host" or hangs is not None
    dashed = ", style=dashed" if ghost else ", style=dotted" if dotted else ""
    return [
        f'n{number} [id="n{number}", class="{" ".join(dict.fromkeys(classes))}", label=<{label}>]',
        f'{above} -> n{number} [id="e{number}", class="{status}", color="{style.edge}", '
        f"penwidth={thick}{dashed}]",
    ]


def _card(node: State, view: View, decode: Decode, options: Options, detail: str, page: int) -> str:
    """The HTML-like label of a node."""
    number, status, size = node["id"], view.status.get(node["id"], "cached"), units(node)
    tier = "" if number in view.ghosts else tier_of(node)
    style = STYLES[status]
    if tier in _OUTLINES:
        style = replace(style, outline=_OUTLINES[tier])
    from_disk = number in view.origins.disk
    sign = f"{TIER_SIGNS[tier]}{f' {DISK}' * from_disk} · " if tier else ""
    if "held" in node and detail == "tiny":
        sign = escape(f"{who} · ") if (who := fleet.summed(node, view)) else ""
    name = options.letter(number) or f"n{number}"
    words, more = _words(node, view), _extra_rows(node, view, detail, page)
    tag = _adapter_tag(node, view)
    title = _font(9, style.stroke, escape(" · ".join([name, *words])), bold=True)
    told = _tokens(size) if size or "held" not in node else ""  # of a block that was never told: nothing
    shown = text_lines(shown_text(node, decode), _LINE[detail], _LINES[detail])
    lines = [escape(line) or NO_TEXT for line in shown]
    if detail == "tiny":
        title = _font(9, style.stroke, escape(" · ".join([name, *words[:1]])), bold=True)
        text = f"{_font(10, _INK, lines[0], face=MONO)} {_font(9, _SOFT, f'{sign}{size}')}"
        return _table(style, 3, _row(_tagged(title, tag), text), *more)
    locks = node["lock_ref"] if number not in view.ghosts and status != "locked" else 0
    lock = f"lock {locks} · " if locks else ""
    body = _font(11, _INK, "".join(f'{line}<BR ALIGN="LEFT"/>' for line in lines), face=MONO)
    text = f'<TR><TD COLSPAN="2" ALIGN="LEFT" WIDTH="{_WIDTH[detail]}">{body}</TD></TR>'
    if detail == "compact":
        right = _font(9, _SOFT, f"{lock}{sign}{told}")
        return _table(style, 4, _row(_tagged(title, tag), right), text, *more)
    top = _row(title, _font(9, _SOFT, f"{lock}{sign}t {node['last_access']}"))
    bottom = _row(_font(9, _SOFT, told), _font(9, _FAINT, _where(node, page)))
    return _table(style, 4, *([_tag_row(*tag)] if tag else []), top, text, bottom, *more)


def _adapter_tag(node: State, view: View) -> tuple[str, str] | None:
    """Name and colour of what computed a node below the root; None where the engine has no adapters."""
    names = view.origins.adapters
    if not names or node["parent"] or "held" in node:
        return None
    name = view.origins.adapter(node)
    return (visible(name), adapter_colour(name, names)) if name else ("no adapter", NO_ADAPTER)


def adapter_colour(name: str, names: Sequence[str]) -> str:
    """An adapter's colour among those of its engine; of "" that of requests without one."""
    return ADAPTERS[names.index(name) % len(ADAPTERS)] if name in names else NO_ADAPTER


def _tag_row(name: str, colour: str) -> str:
    """The tag of a card of several lines."""
    inner = _font(10, "#ffffff", escape(_clipped(name, _TAG)), bold=True)
    return f'<TR><TD COLSPAN="2" ALIGN="LEFT" BGCOLOR="{colour}">{inner}</TD></TR>'


def _tagged(title: str, tag: tuple[str, str] | None) -> str:
    """The title of a card of one or two lines, behind its tag if it has one."""
    if tag is None:
        return title
    cell = f'<TD BGCOLOR="{tag[1]}">{_font(9, "#ffffff", escape(_clipped(tag[0], _TAG)), bold=True)}</TD>'
    return f'<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2"><TR>{cell}<TD>{title}</TD></TR></TABLE>'


def _where(node: State, page: int) -> str:
    """In which slots a node lies; of a stream's, which has none, how many blocks it is."""
    if "blocks" in node:
        return f"{node['blocks']} block{'s' * (node['blocks'] != 1)}"
    return places(node["slots"], page) or "no slots"


def _extra_rows(node: State, view: View, detail: str, page: int) -> list[str]:
    """What stands under a card's own rows: its copy in host memory; of a stream's, who holds it."""
    if "held" in node:
        return fleet.rows(node, view, detail)
    tier = "" if node["id"] in view.ghosts else tier_of(node)
    return _second_floor(node, tier, page, node["id"] in view.origins.disk) if detail == "full" else []


def _second_floor(node: State, tier: str, page: int, from_disk: bool) -> list[str]:
    """The strip under a card that has host slots: the copy, and how far it is. It is orange, and says so,
    where that came from the disk."""
    ink, fill = (_DISK_INK, fleet.COLOURS[DISK]) if from_disk else (_HOST, _HOST_FILL)
    if tier not in _TIER_WORDS:
        words, where = (_font(9, ink, "from disk, once"), "") if from_disk and tier else ("", "")
    else:
        told = f"from disk, {_TIER_WORDS[tier]}" if from_disk else f"{_TIER_WORDS[tier]} the"
        words = _font(9, ink, f"{told} host")
        where = _font(9, ink, places(node["host"], page).partition(" ")[2])
    cells = [("LEFT", words), ("RIGHT", where)]
    tds = "".join(f'<TD ALIGN="{side}" BGCOLOR="{fill}">{inner}</TD>' for side, inner in cells)
    return [f"<TR>{tds}</TR>"] if words else []


def _words(node: State, view: View) -> list[str]:
    """What a card says of its node's status besides the colour."""
    number = node["id"]
    status = view.status.get(number, "cached")
    word = STYLES[status].word
    if status == "loaded" and number in view.once("read", lambda: _read_now(view)):
        word = FROM_DISK
    words = [f"{word} {node['lock_ref']}" if status == "locked" else word] if word else []
    if status != "new":  # that a new node grew on is no news
        lesser = ("split", "grown", *(("stale",) if status != "stale" else ()))
        words += [STYLES[more].word for more in lesser if more in view.also.get(number, ())]
    return words


def _read_now(view: View) -> frozenset[int]:
    """Nodes that came from the disk in this step or scene."""
    return frozenset(event.node for event in view.so_far if isinstance(event, BlocksRead))


def _table(style: Style, padding: int, *rows: str) -> str:
    return (
        f'<TABLE BORDER="{style.width}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="{padding}" '
        f'STYLE="{style.outline}" COLOR="{style.stroke}" BGCOLOR="{style.fill}">{"".join(rows)}</TABLE>'
    )


def _fold_lines(parent: int, count: int, tokens: int) -> list[str]:
    word = "node" if count == 1 else "nodes"
    label = (
        '<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="4" STYLE="ROUNDED,DOTTED" '
        f'COLOR="#868e96" BGCOLOR="#ffffff"><TR><TD>'
        f"{_font(10, '#495057', f'+{short(count)} {word}, {_tokens(tokens)}')}</TD></TR></TABLE>"
    )
    return [
        f'f{parent} [id="f{parent}", class="fold", label=<{label}>]',
        f'n{parent} -> f{parent} [id="ef{parent}", class="fold", color="#ced4da", style=dotted]',
    ]


def _row(left: str, right: str) -> str:
    return f'<TR><TD ALIGN="LEFT">{left}</TD><TD ALIGN="RIGHT">{right}</TD></TR>'


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{short(count)} tokens"


def short(count: int) -> str:
    """A number as it is below 10,000, else 340 k, 1.2 M."""
    if count < 10_000:
        return str(count)
    if count < 999_500:
        return f"{count / 1000:.0f} k"
    return f"{count / 1e6:.1f} M" if count < 99_950_000 else f"{count / 1e6:.0f} M"


# ---------------------------------------------------------------------- the text on a card


def shown_text(node: Mapping[str, Any], decode: Decode) -> str:
    """A node's text; of a long one only both ends are decoded, the gap shown as …."""
    tokens = text_tokens(node)
    if not tokens and node.get("held") is not None:
        return "(tokens not told)"  # by a stream; its hashes say nothing to a reader
    if len(tokens) <= 2 * _ENDS:
        return decode(tokens)
    return f"{decode(tokens[:_ENDS])}…{decode(tokens[-_ENDS:])}"


def text_lines(text: str, width: int, count: int) -> list[str]:
    """Text cut to `count` lines of `width`: the first ones and the last, middles left out."""
    lines = [visible(line).strip() for line in pretty(text).split("\n")]
    lines = [line for line in lines if line] or ["¶" if text else ""]
    if len(lines) > 1 and lines[0] == "■":  # the end of what the parent holds: no line of its own
        lines[:2] = [f"■ {lines[1]}"]
    if len(lines) == 1 and count > 1:
        lines = _wrapped(lines[0], width)
    if len(lines) > count:
        first = lines[: count - 1] if count > 1 else []
        if count == 1:
            return [_elided(" ¶ ".join(lines), width)]
        end = first[-1] if len(first[-1]) > width - 2 else f"{first[-1]} …"
        lines = [*first[:-1], _clipped(end, width), lines[-1]]
    return [_elided(line, width) for line in lines]


def _wrapped(line: str, width: int) -> list[str]:
    lines = []
    while len(line) > width:
        cut = line.rfind(" ", width // 2, width + 1)
        cut = cut if cut > 0 else width
        lines.append(line[:cut].rstrip())
        line = line[cut:].lstrip()
    return [*lines, line]


def _elided(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    tail = (width - 1) // 3
    return f"{line[: width - 1 - tail].rstrip()}…{line[-tail:].lstrip()}"


def _clipped(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1].rstrip()}…"


def places(slots: Sequence[int], page_size: int = 1) -> str:
    """Where a node lies: "slots 1–20" or, with larger pages, "pages 3–7 +2"."""
    if not slots:
        return ""
    units = sorted({slot // page_size for slot in slots})
    end = next((i for i in range(1, len(units)) if units[i] - units[i - 1] != 1), len(units)) - 1
    word = "slot" if page_size == 1 else "page"
    first = f"{units[0]}" if end == 0 else f"{units[0]}–{units[end]}"
    more = f", +{len(units) - end - 1}" if end + 1 < len(units) else ""
    return f"{word}{'s' * (len(units) > 1)} {first}{more}"


# ---------------------------------------------------------------------- pictures


def svg(text: str) -> str:
    """DOT text as an SVG element, remembered by its text. DotError when there is no dot."""
    return _svg(text)


@lru_cache(maxsize=512)
def _svg(text: str) -> str:
    drawn = run_dot(text, "svg").decode("utf-8")
    drawn = drawn[drawn.index("<svg") :]
    # Titles would pop up as "n7"; comments only take room.
    drawn = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", drawn, flags=re.DOTALL)
    for font, families in _SYSTEM_FONTS.items():
        drawn = re.sub(f'font-family="{font}[^"]*"', f'font-family="{families}"', drawn)
    return drawn


def tree_svg(view: View, decode: Decode, options: Options = DEFAULT) -> str:
    """View -> SVG text, with an id on every node and edge and the status among its classes."""
    return svg(dot_text(view, decode, options))


def tree_png(view: View, decode: Decode, options: Options = DEFAULT, dpi: int = 96) -> bytes:
    """View -> PNG, for where no script runs."""
    text = dot_text(view, decode, options)
    return _png(text.replace('bgcolor="transparent"', f'bgcolor="white", dpi={dpi}', 1))


@lru_cache(maxsize=16)
def _png(text: str) -> bytes:
    return run_dot(text, "png")
