"""The roofline of decoding, drawn from what `python -m minirad bench gpu --json` measured.

    python -m minirad bench gpu --json > mine.json      # on a machine with a GPU
    python -m viz.roofline mine.json --out roofline.html
    python -m viz.roofline --out roofline.html           # the measurement that comes with minirad

A decode step reads every weight once, whatever the batch, and the keys and values of every running
request once. Divided by the speed of a copy on that card, both are times that no engine can go below:
the roof. What a step takes beyond it is launching, waiting for the host, and kernels that do not reach
the copy's speed. One request pays for the weights alone; a batch shares them; long contexts make the
keys and values the larger part, and a shared prefix is read once where attention knows of it.

Reads plain data and measures nothing.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.roofline")  # before what takes its time to import

import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from minirad.errors import said
from viz.draw.charts import KvFigure

# Okabe and Ito's colours, told apart by almost all viewers; bars differ by pattern, too.
WEIGHTS, KV, REST, HOST = "#0072b2", "#e69f00", "#dddddd", "#d55e00"
MEASURED = Path(__file__).parent / "static" / "roofline.json"
NEEDED = ("batch", "weight_ms", "kv_ms", "host_ms", "step_ms", "tokens_per_s")

Row = dict[str, Any]


def read(path: Path) -> Row:
    """The JSON of `bench gpu`; ValueError names what is missing."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    rows = result.get("roofline") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} has no list 'roofline': it is what `minirad bench gpu --json` prints")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} of 'roofline' must be an object, got {said(row)}")
        missing = [name for name in NEEDED if not _is_size(row.get(name))]
        if missing:
            raise ValueError(f"{path}: row {number} of 'roofline' lacks the number {missing[0]!r}")
        if not row["weight_ms"] + row["kv_ms"] > 0:
            raise ValueError(f"{path}: row {number} of 'roofline' reads its weights in no time")
    return dict(result)


def _is_size(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < 1e15


def figure(result: Row) -> go.Figure:
    """Left: what a step's time is made of. Right: tokens per second under the roof."""
    rows = sorted(result["roofline"], key=lambda row: row["batch"])
    names = [_name(row) for row in rows]
    drawn = make_subplots(
        rows=1, cols=2, column_widths=[0.55, 0.45], horizontal_spacing=0.09,
        subplot_titles=["One decode step (ms)", "Output tokens per second"],
    )  # fmt: skip
    for trace in step_bars(rows, names):
        drawn.add_trace(trace, row=1, col=1)
    for trace in rate_lines(rows):
        drawn.add_trace(trace, row=1, col=2)
    drawn.update_xaxes(title_text="requests in the batch", type="category", row=1, col=1)
    drawn.update_xaxes(title_text="requests in the batch", type="log", row=1, col=2)
    drawn.update_yaxes(title_text="ms", rangemode="tozero", row=1, col=1)
    drawn.update_yaxes(title_text="tokens/s", type="log", row=1, col=2)
    drawn.update_layout(
        template="plotly_white", barmode="stack", height=520, legend={"orientation": "h", "y": -0.2},
        font={"family": "Inter, Helvetica, Arial, sans-serif", "size": 13},
    )  # fmt: skip
    return drawn


def step_bars(rows: Sequence[Row], names: Sequence[str]) -> list[Any]:
    """Weights, keys and values, and the rest, stacked up to the measured step; the host's time as a mark."""
    rest = [max(row["step_ms"] - row["weight_ms"] - row["kv_ms"], 0.0) for row in rows]
    parts = (
        ("reading the weights at copy speed", [row["weight_ms"] for row in rows], WEIGHTS, ""),
        ("reading keys and values at copy speed", [row["kv_ms"] for row in rows], KV, "/"),
        ("the rest of the step", rest, REST, "."),
    )
    bars: list[Any] = [
        go.Bar(x=names, y=values, name=name, marker={"color": colour, "pattern": {"shape": shape}})
        for name, values, colour, shape in parts
    ]
    bars.append(
        go.Scatter(
            x=names, y=[row["host_ms"] for row in rows], name="the host's work for a step", mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": HOST, "line": {"width": 1, "color": "black"}},
        )
    )  # fmt: skip
    return bars


def steps(result: Row) -> KvFigure:
    """What a step is made of, as one small chart for notebooks."""
    rows = sorted(result["roofline"], key=lambda row: row["batch"])
    bars = step_bars(rows, [_name(row) for row in rows])[:-1]
    base = [0.0] * len(rows)
    for bar in bars:
        bar.base = base
        base = [low + part for low, part in zip(base, bar.y, strict=True)]
    drawn = KvFigure(bars)
    gpu = (result.get("machine") or {}).get("gpu") or "unknown card"
    title = f"One decode step: {result.get('model')}, {gpu}"
    drawn.update_layout(template="none", barmode="overlay", height=320, title={"text": title, "x": 0.01})
    drawn.update_xaxes(title_text="requests in the batch", type="category")
    drawn.update_yaxes(title_text="ms")
    return drawn


def rate_lines(rows: Sequence[Row]) -> list[Any]:
    """The roof (batch over the time of reading), and what was reached."""
    batches = [row["batch"] for row in rows]
    shares = [row["tokens_per_s"] / roof(row) for row in rows]
    return [
        go.Scatter(
            x=batches, y=[roof(row) for row in rows], name="roof: nothing but reading, at copy speed",
            mode="lines+markers", line={"dash": "dash", "color": "black"}, marker={"symbol": "line-ew-open"},
        ),
        go.Scatter(
            x=batches, y=[row["tokens_per_s"] for row in rows], name="measured", mode="lines+markers+text",
            text=[f"{share:.0%}" for share in shares], textposition="bottom center",
            line={"color": WEIGHTS}, marker={"symbol": "circle", "size": 9},
        ),
    ]  # fmt: skip


def roof(row: Row) -> float:
    """Tokens per second if a step took no longer than reading weights, keys and values takes."""
    return float(row["batch"] / (row["weight_ms"] + row["kv_ms"]) * 1e3)


def table(rows: Sequence[Row]) -> str:
    """The same numbers as an HTML table, for screen readers and for copying."""
    head = ("batch", "weights ms", "KV ms", "host ms", "step ms", "tokens/s", "roof", "share")
    lines = ["<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for row in sorted(rows, key=lambda row: row["batch"]):
        times = [f"{row[name]:.3f}" for name in ("weight_ms", "kv_ms", "host_ms", "step_ms")]
        reached, limit = row["tokens_per_s"], roof(row)
        rates = [f"{reached:,.0f}", f"{limit:,.0f}", f"{reached / limit:.0%}"]
        cells = [html.escape(_name(row)), *times, *rates]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def page(result: Row) -> str:
    """The whole page; it opens without a network (Plotly's JavaScript is inside)."""
    machine = result.get("machine") or {}
    about = (
        f"{machine.get('gpu') or 'unknown card'}, torch {machine.get('torch')}, FlashInfer "
        f"{machine.get('flashinfer')}: {result.get('model')}. "
        f"A copy moves {result.get('copy_gb_per_s')} GB/s there."
    )
    doc = (__doc__ or "").split("\n\n")
    return PAGE.format(
        about=html.escape(about),
        text=html.escape(doc[2]),
        chart=figure(result).to_html(include_plotlyjs=True, full_html=False),
        table=table(result["roofline"]),
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Roofline of decoding</title>
<style>
body {{ font: 16px/1.5 Inter, Helvetica, Arial, sans-serif; max-width: 1200px; margin: 2em auto;
  padding: 0 1em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .3em .9em; text-align: right; border-bottom: 1px solid #ccc; }}
</style></head><body>
<h1>How fast could decoding be, and how fast is it?</h1>
<p>{text}</p>
<p>{about}</p>
{chart}
{table}
</body></html>
"""


def _name(row: Row) -> str:
    """A batch size; with the page size where a file has several."""
    return f"{row['batch']}" if "label" not in row else f"{row['batch']} ({row['label']})"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.Parser(prog="python -m viz.roofline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=MEASURED, help="JSON of `minirad bench gpu`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page (HTML)")
    args = parser.parse_args(arguments)

    def work() -> int:
        command.may_be_written("--out", args.out, (".html",), (args.file,))
        command.write_whole(args.out, page(read(args.file)))
        print(f"Open {args.out} in a browser.")
        return 0

    return command.run(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
