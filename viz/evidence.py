"""The paper's programs, each part of the engine switched off in turn, drawn from what was measured.

    python -m minirad bench programs --sweep --out mine.json         # half an hour on one quiet core
    python -m viz.evidence mine.json --out evidence.html
    python -m viz.evidence --out evidence.html                       # the measurement that comes with minirad

A bar is the throughput of a kind of program with a part switched off, as a share of that with everything on:
what is left of the line at 1 is what the part is worth there. It is the median of the rounds; whiskers reach
from the lowest round to the highest. The grey band is the SGLang paper's own range, roughly, since it is read
off a plot (Zheng et al. 2024, Figure 8c: other programs, a model of 7 billion weights, a GPU).

The measurement that comes with minirad is made anew, on a quiet machine, by
`python -m minirad bench programs --sweep --out viz/static/evidence.json`.

Reads plain data and measures nothing. The file holds Plotly's own JavaScript: it opens without a network.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.evidence")  # before what takes its time to import

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from minirad.errors import said
from viz.simulate import COLOURS, DASHES, MARKERS
from viz.view.text import short, visible

MEASURED = Path(__file__).parent / "static" / "evidence.json"
FULL = "full"
# A sign is told by its word and its pattern as well as by its colour.
LOOKS = {"lower": ("#0072b2", ""), "even": ("#868e96", "."), "higher": ("#d55e00", "/")}
BAND = "rgba(134,142,150,.22)"
PATTERNS = ("", "/", ".", "x", "\\", "-", "|")
FONT = {"family": "Inter, Helvetica, Arial, sans-serif", "size": 12}
MOST_NAME = 22  # characters of a kind's name on an axis
MOST_CALLS = 6  # of the tree, in the bar of what they take
PAPER_TREE, PAPER_SECONDS = 0.2, 74.3  # section 6.3: upkeep of the tree, and all of 100 requests of ShareGPT
GOAL = 0.01  # what the tree may take where nothing can hit

Data = dict[str, Any]

# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Is:
    """One value. what: as the sentence says it."""

    what: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Maybe:
    """That, or null."""

    form: Any


@dataclass(frozen=True, slots=True)
class Named:
    """An object with any names, at least one; each value is that."""

    form: Any


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15


TEXT = Is("a text", lambda value: isinstance(value, str))
SIZE = Is("a number, 0 or more", _number)
ABOVE = Is("a number above 0", lambda value: _number(value) and value > 1e-12)
SHARE = Is("a share from 0 to 1", lambda value: _number(value) and value <= 1)
OF = Is("two numbers, how many of how many", lambda value: isinstance(value, list) and len(value) == 2
        and all(map(_number, value)) and value[0] <= value[1])  # fmt: skip
SPREAD = Is("an object with low, median and high, in this order", lambda value: isinstance(value, dict)
            and all(_number(value.get(name)) for name in ("low", "median", "high"))
            and value["low"] <= value["median"] <= value["high"])  # fmt: skip
RUN = {
    "seconds": [ABOVE], "programs_per_s": SPREAD, "tokens_per_s": SPREAD, "ttft_ms": SPREAD,
    "latency_s": SPREAD, "hit_rate": SHARE, "share": Maybe(SIZE), "batch": SIZE, "computed_tokens": SIZE,
    "right": Maybe(OF),
}  # fmt: skip
KIND = {
    "name": TEXT, "title": TEXT, "paper": TEXT, "scaled": TEXT, "jobs": SIZE, "requests": SIZE,
    "prompt_tokens": SIZE, "kv_tokens": SIZE, "optimum_hit_rate": SHARE, "runs": Named(RUN),
}  # fmt: skip
RESULT = {
    "machine": {
        "processor": TEXT, "cores": SIZE, "threads": SIZE, "load": Maybe(SIZE), "python": TEXT,
        "torch": TEXT, "minirad": TEXT, "date": TEXT,
    },
    "model": TEXT,
    "kinds": [KIND],
    "hit_rate": Maybe([{"kept": SHARE, "hit_rate": SHARE, "tokens_per_s": SPREAD, "ttft_ms": SPREAD,
                        "batch": SPREAD}]),
    "overhead": Maybe({"tree_seconds": SIZE, "seconds": ABOVE, "share": SHARE}),
    "ablations": Named({"title": TEXT, "paper_sign": TEXT, "paper_size": TEXT, "note": TEXT}),
}  # fmt: skip
# Beside what every overhead has, where the measurement says it.
MORE_OVERHEAD = {
    "with_commit": SHARE, "hit_rate": SHARE, "calls": Named({"count": SIZE, "seconds": SIZE}),
}  # fmt: skip


def read(path: Path) -> Data:
    """The JSON of `bench programs`; ValueError names the value that is none of it."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(result, dict) or "kinds" not in result:
        raise ValueError(f"{path} has no list 'kinds': it is what `minirad bench programs --json` prints")
    try:
        _check("", result, RESULT)
        cost = result["overhead"] or {}
        _check("overhead", cost, {name: form for name, form in MORE_OVERHEAD.items() if name in cost})
        _check_runs(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return result


def _check(place: str, value: Any, form: Any) -> None:
    """ValueError if a value is not of that form."""
    if isinstance(form, Maybe):
        return None if value is None else _check(place, value, form.form)
    if isinstance(form, Is):
        if not form.holds(value):
            raise ValueError(f"{place} must be {form.what}, got {said(value)}")
    elif isinstance(form, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{place} must be a list with something in it, got {said(value)}")
        for number, each in enumerate(value):
            _check(f"{place}[{number}]", each, form[0])
    elif not isinstance(value, dict) or (isinstance(form, Named) and not value):
        raise ValueError(f"{place} must be an object with something in it, got {said(value)}")
    else:
        forms = dict.fromkeys(value, form.form) if isinstance(form, Named) else form
        for name, each in forms.items():
            where = f"{place}.{name}" if place else name
            if name not in value:
                raise ValueError(f"{where} is missing")
            _check(where, value[name], each)


def _check_runs(result: Data) -> None:
    """ValueError if bars could not be told apart, or have nothing to be a share of."""
    names = [_label(kind["name"]) for kind in result["kinds"]]
    for number, kind in enumerate(result["kinds"]):
        if names[number] in names[:number]:
            raise ValueError(f"kinds[{number}].name reads as that of another kind: {said(kind['name'])}")
        if FULL not in kind["runs"]:
            raise ValueError(f"kinds[{number}].runs.{FULL} is missing")
        rounds = len(kind["runs"][FULL]["seconds"])
        for name, run in kind["runs"].items():
            if name not in result["ablations"]:
                raise ValueError(
                    f"kinds[{number}].runs.{name} is a setting of which 'ablations' says nothing"
                )
            if len(run["seconds"]) != rounds:
                raise ValueError(
                    f"kinds[{number}].runs.{name}.seconds has {len(run['seconds'])} rounds, that of {FULL} "
                    f"{rounds}"
                )


# ---------------------------------------------------------------------- each part switched off


class OfFull(NamedTuple):
    """Throughput as a share of that with everything on: of the rounds' own shares."""

    low: float
    median: float
    high: float

    @property
    def sign(self) -> str:
        """Lower or higher in every round, or even."""
        return "lower" if self.high < 1 else "higher" if self.low > 1 else "even"


def of_full(kind: Data, name: str) -> OfFull:
    """What is left of a kind's throughput with that part switched off."""
    full, others = kind["runs"][FULL]["seconds"], kind["runs"][name]["seconds"]
    shares = [mine / other for mine, other in zip(full, others, strict=True)]
    return OfFull(min(shares), statistics.median(shares), max(shares))


def measured(result: Data, name: str) -> dict[str, OfFull]:
    """By kind, in their order: of all kinds that were run with that setting."""
    return {kind["name"]: of_full(kind, name) for kind in result["kinds"] if name in kind["runs"]}


def switched_off(result: Data) -> list[str]:
    """All settings but "full" that anything was run with, in their order."""
    return [name for name in result["ablations"] if name != FULL and measured(result, name)]


def paper_range(size: str) -> tuple[float, float] | None:
    """The numbers of a rough size such as "0.15 (MMLU) to 0.5 (chats)"; None if it names no two."""
    found = re.match(r"(\d+(?:\.\d+)?)(?: \([^)]*\))? to (\d+(?:\.\d+)?)", size)
    return (float(found[1]), float(found[2])) if found else None


def ablation_bars(result: Data, name: str) -> go.Bar:
    """A bar for each kind of program, with whiskers from the lowest round to the highest."""
    shares = measured(result, name)
    runs = [kind["runs"][name] for kind in result["kinds"] if name in kind["runs"]]
    looks = [LOOKS[each.sign] for each in shares.values()]
    return go.Bar(
        y=[_label(each) for each in shares], x=[each.median for each in shares.values()], orientation="h",
        error_x={
            "type": "data", "symmetric": False, "thickness": 1.3, "width": 4, "color": "#212529",
            "array": [each.high - each.median for each in shares.values()],
            "arrayminus": [each.median - each.low for each in shares.values()],
        },
        marker={"color": [colour for colour, _ in looks],
                "pattern": {"shape": [shape for _, shape in looks]}, "line": {"width": 0}},
        customdata=[_hover(*each, run) for each, run in zip(shares.items(), runs, strict=True)],
        hovertemplate="%{customdata}<extra></extra>", showlegend=False,
    )  # fmt: skip


def _hover(kind: str, share: OfFull, run: Data) -> str:
    spread = f"{share.low:.2f} to {share.high:.2f}"
    parts = [
        f"<b>{_plain(kind)}</b>: {share.median:.2f} of full ({spread}), {share.sign}",
        f"hit rate {run['hit_rate']:.1%}, {_best(run)} of the best possible",
        f"{run['programs_per_s']['median']:,.2f} programs/s, {run['tokens_per_s']['median']:,.0f} tokens/s",
        f"first token {run['ttft_ms']['median']:,.0f} ms, a program alone {run['latency_s']['median']:.2f} s",
        f"{run['computed_tokens']:,} prompt tokens computed, batch {run['batch']:.1f}",
        f"right: {_right(run)}",
    ]
    return "<br>".join(parts)


def ablation_figure(result: Data, name: str) -> go.Figure:
    """The bars of one setting, over the paper's range. All settings have the same axis."""
    shares = measured(result, name)
    drawn = go.Figure(ablation_bars(result, name))
    band = paper_range(result["ablations"][name]["paper_size"])
    if band:
        drawn.add_vrect(
            *band, fillcolor=BAND, line_width=0, layer="below", annotation_text="the paper's",
            annotation_position="top left", annotation_yshift=17, annotation_font_color="#495057",
        )  # fmt: skip
    drawn.add_vline(1, line={"color": "#212529", "width": 1, "dash": "dot"})
    drawn.update_xaxes(range=[0, _widest(result)], title_text="throughput, of full", title_standoff=4)
    drawn.update_yaxes(
        autorange="reversed", tickmode="array", tickvals=[_label(each) for each in shares],
        ticktext=[f"{_label(each)} <b>{share.median:.2f}</b>" for each, share in shares.items()],
    )  # fmt: skip
    drawn.update_layout(
        template="plotly_white", height=80 + 17 * len(shares), font=FONT, bargap=0.25,
        margin={"l": 170, "r": 12, "t": 24, "b": 38},
    )  # fmt: skip
    return drawn


def _widest(result: Data) -> float:
    """Where the axis of all settings ends."""
    highs = [each.high for name in switched_off(result) for each in measured(result, name).values()]
    return max([1.1, *(1.03 * each for each in highs)])


def ours(result: Data, name: str) -> str:
    """What became of a setting here, as a sentence: its signs, and its range."""
    shares = measured(result, name)
    kinds = {sign: [each for each in shares if shares[each].sign == sign] for sign in LOOKS}
    found = [f"lower in {len(kinds['lower'])} of {len(shares)} kinds"]
    found += [f"{sign} in {', '.join(kinds[sign])}" for sign in ("even", "higher") if kinds[sign]]
    least, most = (pick(shares, key=lambda each: shares[each].median) for pick in (min, max))
    middle = statistics.median(each.median for each in shares.values())
    return (
        f"{'; '.join(found)}. From {shares[least].median:.2f} ({least}) to {shares[most].median:.2f} "
        f"({most}), median {middle:.2f}."
    )


# ---------------------------------------------------------------------- hit rate, and what the tree costs

SPEEDS = (
    ("tokens_per_s", "throughput (new tokens/s)"), ("ttft_ms", "time to the first token (ms)"),
    ("batch", "requests in a step"),
)  # fmt: skip


def hit_rate_lines(rows: Sequence[Data]) -> list[go.Scatter]:
    """Throughput, time to the first token and batch over the hit rate, with whiskers."""
    rows = sorted(rows, key=lambda row: row["hit_rate"])
    return [
        go.Scatter(
            x=[row["hit_rate"] for row in rows], y=[row[name]["median"] for row in rows],
            error_y={
                "type": "data", "symmetric": False, "thickness": 1.3, "width": 4,
                "array": [row[name]["high"] - row[name]["median"] for row in rows],
                "arrayminus": [row[name]["median"] - row[name]["low"] for row in rows],
            },
            customdata=[row["kept"] for row in rows], mode="lines+markers", name=title, showlegend=False,
            hovertemplate="hit rate %{x:.1%} (%{customdata:.0%} of a match kept): %{y:,.1f}<extra></extra>",
            line={"color": COLOURS[number], "dash": DASHES[number]},
            marker={"symbol": MARKERS[number], "size": 8},
        )
        for number, (name, title) in enumerate(SPEEDS)
    ]  # fmt: skip


def hit_rate_figure(rows: Sequence[Data]) -> go.Figure:
    """Three charts side by side."""
    drawn = make_subplots(
        rows=1, cols=3, subplot_titles=[title for _, title in SPEEDS], horizontal_spacing=0.08
    )
    for column, line in enumerate(hit_rate_lines(rows), start=1):
        drawn.add_trace(line, row=1, col=column)
    drawn.update_xaxes(title_text="hit rate", tickformat=".0%", range=[-0.04, 1.04])
    drawn.update_yaxes(rangemode="tozero")
    drawn.update_annotations(font_size=12)
    margin = {"l": 50, "r": 12, "t": 36, "b": 48}
    drawn.update_layout(template="plotly_white", height=330, font=FONT, margin=margin)
    return drawn


def cost_bars(cost: Data) -> list[go.Bar]:
    """Of all seconds, those in calls of the tree, by call, beside the paper's."""
    calls = {name: each["seconds"] for name, each in cost.get("calls", {}).items()}
    calls = calls or {"the tree": cost["tree_seconds"]}
    most = sorted(calls, key=calls.__getitem__, reverse=True)
    parts = {_plain(name): calls[name] / cost["seconds"] for name in most[:MOST_CALLS]}
    if most[MOST_CALLS:]:
        parts["other calls"] = sum(calls[name] for name in most[MOST_CALLS:]) / cost["seconds"]
    rows = [("here", name, share) for name, share in parts.items()]
    rows.append(("the paper", "the paper's tree", PAPER_TREE / PAPER_SECONDS))
    return [
        go.Bar(
            y=[whose], x=[share], name=name, orientation="h",
            hovertemplate="%{x:.2%}<extra>" + name + "</extra>",
            marker={"color": COLOURS[number % len(COLOURS)] if whose == "here" else "#868e96",
                    "pattern": {"shape": PATTERNS[number % len(PATTERNS)] if whose == "here" else ""}},
            showlegend=whose == "here",
        )
        for number, (whose, name, share) in enumerate(rows)
    ]  # fmt: skip


def cost_figure(cost: Data) -> go.Figure:
    """Two bars, and the most that the tree may take."""
    drawn = go.Figure(cost_bars(cost))
    drawn.add_vline(
        GOAL, line={"color": "#212529", "width": 1, "dash": "dot"},
        annotation_text=f"goal: at most {GOAL:.0%}", annotation_position="top",
    )  # fmt: skip
    widest = max(1.2 * GOAL, 1.1 * cost["share"])
    drawn.update_xaxes(tickformat=".1%", range=[0, widest], title_text="of all seconds")
    drawn.update_yaxes(categoryorder="array", categoryarray=["the paper", "here"], automargin=True)
    drawn.update_layout(
        template="plotly_white", barmode="stack", height=230, font=FONT,
        legend={"orientation": "h", "y": -0.45, "traceorder": "normal"},
        margin={"l": 80, "r": 12, "t": 30, "b": 40},
    )  # fmt: skip
    return drawn


# ---------------------------------------------------------------------- the page


def page(result: Data) -> str:
    """The whole page; it opens without a network (about 5 MB: Plotly's JavaScript is inside)."""
    doc = (__doc__ or "").split("\n\n")
    swatches = " ".join(
        f'<span class="swatch {sign}"></span> {word}'
        for sign, word in (
            ("lower", "lower in every round"), ("even", "even: the rounds reach 1 (dotted)"),
            ("higher", "higher in every round (hatched)"),
        )
    )  # fmt: skip
    return PAGE.format(
        script=get_plotlyjs(), about=_plain(about(result)), swatches=swatches,
        text=_plain(" ".join(doc[2].split())), spread=_plain(_rounds(result)), glance=_glance(result),
        ablations="".join(_ablation(result, name) for name in switched_off(result)),
        hit_rate=_hit_rate(result["hit_rate"]), cost=_cost(result["overhead"]),
        programs=_programs(result["kinds"]), numbers=_numbers(result["kinds"]),
    )  # fmt: skip


def about(result: Data) -> str:
    """Where and when it was measured, with what, and how busy that was, in words."""
    place = result["machine"]
    load, cores = place["load"], place["cores"]
    busy = "an unknown load" if load is None else f"a load average of {load:.1f} before it began"
    if load is not None and load > cores:
        busy += " (more than it has cores, so others ran beside it: not a quiet machine)"
    on = place.get("gpu") or place["processor"]
    clock = (
        "Seconds of the bars are those of the engine's own thread: other processes' time is not in them."
        if place.get("clock") == "thread_time_ns"
        else "Seconds are those of the clock on the wall."
    )
    return (
        f"Measured on {place['date']} with the model {result['model']} on {on}, {cores} cores, "
        f"{place['threads']} of them used, under {busy}. Python {place['python']}, torch {place['torch']}, "
        f"minirad {place['minirad']}. {clock}"
    )


def _rounds(result: Data) -> str:
    counts = sorted({len(kind["runs"][FULL]["seconds"]) for kind in result["kinds"]})
    if counts == [1]:
        return "It was measured in one round: there is no spread, and a bar near 1 says nothing of the sign."
    return f"Whiskers: {' or '.join(map(str, counts))} rounds, in turn."


def _glance(result: Data) -> str:
    """All medians at a glance: a row for each kind, a column for each setting, and the paper's range."""
    names = switched_off(result)
    lines = ["<table><tr><th></th>" + "".join(f"<th class=n>{_plain(name)}</th>" for name in names) + "</tr>"]
    for kind in result["kinds"]:
        cells = [f"<td>{_plain(kind['name'])}</td>"]
        for name in names:
            share = of_full(kind, name) if name in kind["runs"] else None
            told = "-" if share is None else f"{share.median:.2f}{' ↑' if share.sign == 'higher' else ''}"
            cells.append(f'<td class="n {share.sign if share else ""}">{told}</td>')
        lines.append("<tr>" + "".join(cells) + "</tr>")
    bands = [paper_range(result["ablations"][name]["paper_size"]) for name in names]
    said_there = ["{:g} to {:g}".format(*band) if band else "-" for band in bands]
    paper = "".join(f"<td class=n>{each}</td>" for each in said_there)
    return "\n".join([*lines, f"<tr><td>the paper</td>{paper}</tr></table>"])


def _ablation(result: Data, name: str) -> str:
    """One setting: its bars, and beside them the paper's sign and size, ours, and why they differ."""
    paper = result["ablations"][name]
    size = f", {paper['paper_size']}" if paper["paper_size"] else ""
    note = f"<p>{_plain(paper['note'])}</p>" if paper["note"] else ""
    return (
        f'<section class="pair"><div>{_html(ablation_figure(result, name))}</div><div>'
        f"<h3>{_plain(name)}: {_plain(paper['title'])}</h3>"
        f"<p><b>The paper:</b> {_plain(paper['paper_sign'] + size)}.</p>"
        f"<p><b>Here:</b> {_plain(ours(result, name))}</p>{note}</div></section>"
    )


def _hit_rate(rows: Sequence[Data] | None) -> str:
    if rows is None:
        return "<p>Not measured in this run: <code>bench programs --sweep</code> does.</p>"
    low, high = (pick(rows, key=lambda row: row["hit_rate"]) for pick in (min, max))
    grown = [
        f"{title} from {_figure(low[name]['median'])} to {_figure(high[name]['median'])}"
        for name, title in SPEEDS
    ]
    return (
        f"<p>Here, from a hit rate of {low['hit_rate']:.0%} to {high['hit_rate']:.0%}: {', '.join(grown)}. "
        "The paper (Figures 8a and 8b, read off the plots), from near 0 to near 1: throughput triples, the "
        "time to the first token halves, the batch about doubles, since what is shared leaves room for more "
        f"requests. These seconds are those of the clock on the wall.</p>{_html(hit_rate_figure(rows))}"
    )


def _cost(cost: Data | None) -> str:
    if cost is None:
        return "<p>Not measured in this run: <code>bench programs --sweep</code> does.</p>"
    parts = [
        f"{cost['tree_seconds']:.3f} of {cost['seconds']:.2f} s were spent in calls of the tree: "
        f"{cost['share']:.2%}."
    ]
    if "hit_rate" in cost:
        parts.append(f"The hit rate was {cost['hit_rate']:.1%}.")
    if "with_commit" in cost:
        parts.append(
            f"With all that an engine does beside them at the end of a step, because it has a tree: "
            f"{cost['with_commit']:.2%}."
        )
    parts.append(
        f"The paper (ShareGPT, 100 requests): {PAPER_TREE} of {PAPER_SECONDS} s, "
        f"{PAPER_TREE / PAPER_SECONDS:.1%}."
    )
    return f"<p>{' '.join(parts)}</p>{_html(cost_figure(cost))}"


def _programs(kinds: Sequence[Data]) -> str:
    head = ("program", "", "in the paper", "smaller here", "programs", "requests", "prompt tokens", "pool",
            "best possible hit rate", "right")  # fmt: skip
    rows = [
        (kind["name"], kind["title"], kind["paper"], kind["scaled"] or "nothing", f"{kind['jobs']:,}",
         f"{kind['requests']:,}", f"{kind['prompt_tokens']:,}", f"{kind['kv_tokens']:,}",
         f"{kind['optimum_hit_rate']:.1%}", _right(kind["runs"][FULL]))
        for kind in kinds
    ]  # fmt: skip
    return table(head, rows, words=4)


def _numbers(kinds: Sequence[Data]) -> str:
    """Every figure that is drawn or in a hover, for screen readers and for copying."""
    head = ("program", "setting", "of full", "low to high", "programs/s", "new tokens/s", "first token ms",
            "latency s", "hit rate", "of best", "batch", "computed", "right")  # fmt: skip
    rows = [
        (kind["name"], name, f"{of_full(kind, name).median:.2f}",
         "{0.low:.2f} to {0.high:.2f}".format(of_full(kind, name)), f"{run['programs_per_s']['median']:,.2f}",
         f"{run['tokens_per_s']['median']:,.0f}", f"{run['ttft_ms']['median']:,.0f}",
         f"{run['latency_s']['median']:.2f}", f"{run['hit_rate']:.1%}", _best(run), f"{run['batch']:.1f}",
         f"{run['computed_tokens']:,}", _right(run))
        for kind in kinds for name, run in kind["runs"].items()
    ]  # fmt: skip
    return table(head, rows, words=2)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """An HTML table. words: columns of text, before those of figures."""
    lines = []
    for tag, row in (("th", head), *(("td", row) for row in rows)):
        cells = [f"<{tag}>{_plain(cell)}</{tag}>" for cell in row[:words]]
        cells += [f"<{tag} class=n>{_plain(cell)}</{tag}>" for cell in row[words:]]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join(["<table>", *lines, "</table>"])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _best(run: Data) -> str:
    return "-" if run["share"] is None else f"{run['share']:.1%}"


def _right(run: Data) -> str:
    return "not known" if run["right"] is None else "{:,} of {:,}".format(*run["right"])


def _plain(text: str) -> str:
    """A text of the file, as HTML and as Plotly's labels show it."""
    return escape(visible(text))


def _label(kind: str) -> str:
    """A kind's name on an axis."""
    return _plain(short(kind, MOST_NAME))


def _html(drawn: go.Figure) -> str:
    config = {"responsive": True, "displayModeBar": False}
    return str(drawn.to_html(include_plotlyjs=False, full_html=False, config=config))


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What each part is worth</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 15px/1.45 Inter, Helvetica, Arial, sans-serif; color: #212529; max-width: 1240px;
  margin: 1.2em auto; padding: 0 16px; }}
h1 {{ font-size: 22px; }} h2 {{ font-size: 18px; margin: 1.4em 0 .3em; }} h3 {{ font-size: 15px; margin: 0; }}
p {{ margin: .4em 0; }}
.pair {{ display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 0 18px; padding: 8px 0;
  border-top: 1px solid #e9ecef; align-items: start; font-size: 14px; }}
.pair > div, td {{ overflow-wrap: anywhere; }}
.swatch {{ display: inline-block; width: 1em; height: 1em; vertical-align: -2px; margin-left: .8em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 12px; }}
td, th {{ padding: 2px 10px 2px 0; text-align: left; border-bottom: 1px solid #e9ecef; vertical-align: top; }}
.n {{ text-align: right; }} td.n {{ white-space: nowrap; }}
.swatch.lower {{ background: #0072b2; }}
.swatch.even {{ background: radial-gradient(#fff 25%, #868e96 30%); }}
.swatch.higher {{ background: repeating-linear-gradient(135deg, #d55e00 0 4px, #7a3600 4px 6px); }}
td.even {{ color: #868e96; }} td.higher {{ background: #fbe3d3; }}
summary {{ cursor: pointer; }}
@media (max-width: 760px) {{ .pair {{ grid-template-columns: minmax(0, 1fr); }} }}
</style><script>{script}</script></head><body>
<h1>What each part of the engine is worth</h1>
<p>{about}</p>
<h2>Each part switched off in turn</h2>
<p>{text} {spread}</p>
<div class="wide">{glance}</div>
<p>{swatches}</p>
{ablations}
<h2>Hit rate against speed</h2>
{hit_rate}
<h2>What the cache costs where nothing can hit</h2>
{cost}
<h2>The programs</h2>
<div class="wide">{programs}</div>
<h2>All figures</h2>
<details><summary>as a table</summary><div class="wide">{numbers}</div></details>
</body></html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.Parser(prog="python -m viz.evidence", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "file", nargs="?", type=Path, default=MEASURED, help="JSON of `minirad bench programs`"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="the page")
    args = parser.parse_args(arguments)

    def work() -> int:
        command.may_be_written("--out", args.out, (".html",), (args.file,))
        text = page(read(args.file))
        command.write_whole(args.out, text, errors="replace")
        print(f"Open {args.out} in a browser.")
        return 0

    return command.run(parser.prog, work)


if __name__ == "__main__":
    sys.exit(main())
