"""The paper's nine steps as one figure: nine small trees with captions of our own, SVG and PNG.

    python -m viz.figure3 --out DIR [--record] [--page-size 4] [--eviction-policy fifo] [--kv-tokens 300]

Every tree is what the engine's recording says after that step (minirad/figure3.py runs it). All pieces
(trees, captions, legend) are laid out by Graphviz at one scale, so that letters are equally large
everywhere, and put side by side here: nested in the SVG, pasted in the PNG.

Does not run anything but those nine steps; viz/draw/tree.py draws any other recording.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.figure3")  # before what takes its time to import

import io
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from minirad.figure3 import Panel, add_options, caption, check_story, holds, run, served_none
from minirad.observe.recording import Recording
from minirad.observe.snapshot import State
from viz.draw.dot import DotError, run_dot
from viz.draw.label import SANS, escape
from viz.draw.tree import STYLES, svg
from viz.trace import Trace
from viz.view.text import pretty, visible

# Points. Fits A4 landscape (8 points here are 6 there) and, a little wider than high, a projector.
PAGE, MARGIN, GAP, PAD = 1150, 14, 10, 8
COLUMN = (PAGE - 2 * MARGIN - 2 * GAP) / 3
CARDS = {1: (196, 46), 2: (138, 33), 3: (84, 20)}  # by depth: a card's width, characters in its line
INK, MUTED, RULE, PAPER = "#212529", "#495057", "#ced4da", "#ffffff"
WRAP = 80  # characters of a caption's line


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the figure: its DOT text, and where it lies on the page. Points, from the top left.

    scale: below 1 only for a tree that is too deep for its panel (in other stories than the table's).
    """

    dot: str
    x: float
    y: float
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Box:
    """A panel's frame."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Sheet:
    """Everything that is drawn."""

    height: float
    boxes: tuple[Box, ...]
    blocks: tuple[Block, ...]


# ---------------------------------------------------------------------- the pieces, as DOT text


def tree_dot(panel: Panel, ghosts: dict[int, State], created: dict[int, int]) -> str:
    """One panel's tree. ghosts: evicted nodes as they last were; created: siblings stand in this order."""
    cards = [{**node, "parent": node["parent"] or 0} for node in panel["nodes"]]
    for node in panel["evicted"]:
        if node["id"] in ghosts:  # what came and went within the step never was anywhere
            cards.append({**node, "parent": ghosts[node["id"]]["parent"], "state": "evicted"})
    known = {card["id"] for card in cards}
    above = {card["id"]: card["parent"] for card in cards}
    parents = set(above.values())
    leaves = sum(card["id"] not in parents for card in cards)
    depth = max((_depth(card["id"], above) for card in cards), default=1)
    width, characters = CARDS[min(depth, 3)]
    lines = 3 if leaves <= 3 else 2 if leaves <= 8 else 1
    shape = (width, characters, lines)
    prefix = f"step{panel['step']}-"
    text = [
        "digraph step {",
        'graph [rankdir=LR, bgcolor="transparent", ordering=out, splines=line, nodesep=0.09, ranksep=0.18, '
        "pad=0.02]",
        f'node [shape=plain, fontname="{SANS}"]',
        "edge [arrowhead=none, tailport=e, headport=w]",
        f'n0 [id="{prefix}n0", class="root", shape=circle, style=filled, fillcolor="#f1f3f5", '
        f'color="#adb5bd", width=0.28, fixedsize=true, label="root", fontsize=7, fontcolor="{MUTED}"]',
    ]
    for card in sorted(cards, key=lambda card: (created.get(card["id"], 0), card["id"])):
        parent = card["parent"] if card["parent"] in known else 0
        text += _card(card, parent, prefix, shape)
    return "\n".join([*text, "}", ""])


def _depth(number: int, above: dict[int, int]) -> int:
    depth = 0
    while number in above:
        number, depth = above[number], depth + 1
    return depth


def _card(card: dict[str, Any], parent: int, prefix: str, shape: tuple[int, int, int]) -> list[str]:
    width, characters, lines = shape
    number, status = card["id"], card["state"]
    style = STYLES[status]
    name = f"{card['label']}  " if card["label"] else ""
    body = _lines(card_lines(card["text"], characters, lines))
    label = (
        f'<TABLE BORDER="{min(style.width, 2)}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3.5" '
        f'STYLE="{style.outline}" COLOR="{style.stroke}" BGCOLOR="{style.fill}"><TR><TD>'
        '<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0">'
        f'<TR><TD ALIGN="LEFT">{_font(9.5, INK, safe(name), bold=True) if name else ""}'
        f"{_font(8, style.stroke, style.word or 'cached', bold=bool(style.word))}</TD>"
        f'<TD ALIGN="RIGHT">{_font(8, MUTED, str(card["tokens"]))}</TD></TR>'
        f'<TR><TD COLSPAN="2" ALIGN="LEFT" WIDTH="{width}">{_font(8.5, INK, body)}</TD></TR>'
        "</TABLE></TD></TR></TABLE>"
    )
    thick = 2.2 if status in ("new", "hit") else 1.2
    dashed = ", style=dashed" if status == "evicted" else ""
    return [
        f'n{number} [id="{prefix}n{number}", class="{status}", label=<{label}>]',
        f'n{parent} -> n{number} [id="{prefix}e{number}", class="{status}", color="{style.edge}", '
        f"penwidth={thick}{dashed}]",
    ]


def card_lines(text: str, characters: int, count: int) -> list[str]:
    """The first lines and the last one of a node's text, each cut to so many characters.

    viz.tree's cards have room to wrap a long line; these have not.
    """
    # A turn begins by closing the one before: that sign needs no line of its own.
    text = text.replace("<|im_end|>\n", "<|im_end|> ", text.startswith("<|im_end|>"))
    lines = [line.strip() for line in pretty(text).split("\n")]
    lines = [line for line in lines if line] or ["¶"]
    left_out = len(lines) > count
    if left_out:
        lines = [*lines[: count - 1], lines[-1]]
    short = []
    for at, line in enumerate(lines):
        if left_out and at == count - 2:
            line = line if len(line) < characters else line[: characters - 1].rstrip()
            short.append(f"{line}…")
        elif len(line) > characters:
            tail = (characters - 1) // 3
            short.append(f"{line[: characters - 1 - tail].rstrip()}…{line[-tail:].lstrip()}")
        else:
            short.append(line)
    return short


def head_dot(panel: Panel, told: bool) -> str:
    """A panel's number, title and caption. told: the row holds, so that the caption may say what it
    teaches."""
    width = int(COLUMN - 2 * PAD)
    pool = f"{panel['kv_used']} of {panel['kv_capacity']} KV slots"
    title = textwrap.shorten(f"({panel['step']}) {panel['title']}", 64, placeholder="…")
    wrapped = textwrap.wrap(caption(panel, told), WRAP)
    rows = [
        f'<TR><TD ALIGN="LEFT" WIDTH="{width - 90}">{_font(12, INK, safe(title), bold=True)}</TD>'
        f'<TD ALIGN="RIGHT" WIDTH="90">{_font(8, MUTED, pool)}</TD></TR>',
        f'<TR><TD COLSPAN="2" ALIGN="LEFT">{_font(9, INK, _lines(wrapped))}</TD></TR>',
    ]
    return _plain("".join(rows), f"step{panel['step']}-caption")


def title_dot(config: State) -> str:
    """What the figure shows, and under which settings."""
    settings = (
        f"{config['eviction_policy'].upper()} eviction, page size {config['page_size']}, "
        f"one pool of {config['kv_tokens']} KV slots throughout"
    )
    big = _font(16, INK, "RadixAttention in nine steps", bold=True)
    small = _font(10, MUTED, f"recorded from minirad serving the classroom Llama: {settings}")
    return _plain(f'<TR><TD ALIGN="LEFT">{big}</TD><TD ALIGN="LEFT">   {small}</TD></TR>', "title")


def legend_dot() -> str:
    """The four colours, and what letters and signs on the cards mean."""
    cells = []
    for status, words in (
        ("new", "inserted in this step"),
        ("hit", "matched in this step"),
        ("cached", "there from before"),
        ("evicted", "removed in this step"),
    ):
        style = STYLES[status]
        cells.append(
            f'<TD><TABLE BORDER="{min(style.width, 2)}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2" '
            f'STYLE="{style.outline}" COLOR="{style.stroke}" BGCOLOR="{style.fill}"><TR><TD>'
            f"{_font(8, style.stroke, style.word or 'cached', bold=bool(style.word))}</TD></TR></TABLE></TD>"
            f'<TD ALIGN="LEFT">{_font(9, MUTED, words + "   ")}</TD>'
        )
    signs = "number of tokens at the right · letters b to l as in the paper · ► begins a message, ■ ends it"
    cells.append(f'<TD ALIGN="LEFT">{_font(9, MUTED, signs)}</TD>')
    return _plain(f"<TR>{''.join(cells)}</TR>", "legend")


def _plain(rows: str, name: str) -> str:
    table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1.5">{rows}</TABLE>'
    return (
        'digraph text {\ngraph [bgcolor="transparent", pad=0]\nnode [shape=plain, margin=0]\n'
        f'text [id="{name}", label=<{table}>]\n}}\n'
    )


def _font(size: float, color: str, inner: str, bold: bool = False) -> str:
    if bold:
        inner = f"<B>{inner}</B>"
    return f'<FONT FACE="{SANS}" POINT-SIZE="{size}" COLOR="{color}">{inner}</FONT>'


def safe(text: str) -> str:
    """Any text for a label: control characters shown as signs, the rest escaped."""
    return escape(visible(text))


def _lines(lines: Sequence[str]) -> str:
    return "".join(f'{safe(line)}<BR ALIGN="LEFT"/>' for line in lines) or " "


# ---------------------------------------------------------------------- where they go


def lay_out(recording: Recording, panels: Sequence[Panel]) -> Sheet:
    """Three by three; a row is as high as its highest tree."""
    trace, broken = Trace(recording), check_story(panels)
    heads = [head_dot(panel, holds(panel, broken)) for panel in panels]
    trees = []
    for at, panel in enumerate(panels, start=1):
        view = trace.view("scene", at)
        drawn = {**view.nodes, **view.ghosts}
        created = {number: node["created"] for number, node in drawn.items()}
        trees.append(tree_dot(panel, view.ghosts, created))
    blocks = [Block(title_dot(recording.header["config"]), MARGIN, MARGIN - 4)]
    sizes = [size(tree) for tree in trees]
    scales = [min(1.0, (COLUMN - 2 * PAD) / width) for width, _ in sizes]
    boxes = []
    y = MARGIN + size(blocks[0].dot)[1] + 4
    for row in range(0, len(panels), 3):
        these = range(row, min(row + 3, len(panels)))
        top = max(size(heads[at])[1] for at in these)
        height = top + max(sizes[at][1] * scales[at] for at in these) + 2 * PAD + 4
        for column, at in enumerate(these):
            x = MARGIN + column * (COLUMN + GAP)
            boxes.append(Box(x, y, COLUMN, height))
            blocks.append(Block(heads[at], x + PAD, y + PAD - 2))
            middle = (height - top - 2 * PAD - sizes[at][1] * scales[at]) / 2
            blocks.append(Block(trees[at], x + PAD, y + PAD + top + middle, scales[at]))
        y += height + GAP
    blocks.append(Block(legend_dot(), MARGIN, y))
    return Sheet(y + size(blocks[-1].dot)[1] + MARGIN / 2, tuple(boxes), tuple(blocks))


def size(dot: str) -> tuple[float, float]:
    """Width and height of a piece, in points."""
    found = re.search(r'<svg width="([\d.]+)pt" height="([\d.]+)pt"', svg(dot))
    if found is None:
        raise DotError("Graphviz' answer has no size")
    return float(found[1]), float(found[2])


def page_svg(page: Sheet) -> str:
    """The whole figure as one SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {PAGE} {page.height:.1f}" width="{PAGE}" height="{page.height:.1f}" role="img" '
        'aria-label="RadixAttention in nine steps">',
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    parts += [
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="5" '
        f'fill="none" stroke="{RULE}"/>'
        for box in page.boxes
    ]
    for block in page.blocks:
        drawn, (width, height) = svg(block.dot), size(block.dot)
        drawn = re.sub(r' id="(?:graph|node|edge)\d+"', "", drawn)  # Graphviz' own, the same in each piece
        width, height = width * block.scale, height * block.scale
        placed = f'<svg x="{block.x:.1f}" y="{block.y:.1f}" width="{width:.2f}" height="{height:.2f}"'
        parts.append(re.sub(r'<svg width="[^"]*" height="[^"]*"', placed, drawn, count=1))
    return "\n".join([*parts, "</svg>", ""])


def page_png(page: Sheet, dpi: int = 192) -> bytes:
    """The same as a PNG. dpi: per 72 points of the page."""
    scale = dpi / 72
    image = Image.new("RGB", (round(PAGE * scale), round(page.height * scale)), PAPER)
    pen = ImageDraw.Draw(image)
    for box in page.boxes:
        corners = [box.x, box.y, box.x + box.width, box.y + box.height]
        pen.rounded_rectangle(
            [round(c * scale) for c in corners], 5 * scale, outline=RULE, width=round(scale)
        )
    for block in page.blocks:
        opaque = block.dot.replace(
            'bgcolor="transparent"', f'bgcolor="{PAPER}", dpi={dpi * block.scale:.1f}', 1
        )
        piece = Image.open(io.BytesIO(run_dot(opaque, "png"))).convert("RGB")
        image.paste(piece, (round(block.x * scale), round(block.y * scale)))
    out = io.BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes nine_steps.svg and nine_steps.png (and nine_steps.jsonl); returns the exit code."""
    parser = command.Parser(prog="python -m viz.figure3", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--record", action="store_true", help="write the recording as well")
    add_options(parser)
    args = parser.parse_args(arguments)

    def work() -> int:
        recording, panels = run(args.page_size, args.eviction_policy, args.kv_tokens)
        page = lay_out(recording, panels)
        files = {"nine_steps.svg": page_svg(page).encode("utf-8"), "nine_steps.png": page_png(page)}
        _write(args.out, files, recording if args.record else None)
        return 1 if served_none(panels) else 0

    return command.run(parser.prog, work, DotError)


def _write(out: Path, files: dict[str, bytes], recording: Recording | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with command.named(out / name):
            (out / name).write_bytes(data)
        print(out / name)
    if recording is not None:
        recording.save(out / "nine_steps.jsonl")
        print(out / "nine_steps.jsonl")


if __name__ == "__main__":
    sys.exit(main())
