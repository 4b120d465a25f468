"""A lecture without an install: pages that open from disk or from any static host.

    python -m viz.gallery --out DIR

Writes index.html (what there is, the figure of nine steps, which policy evicts whom), nine_steps.html
(the nine steps to step through), policy_NAME.html for each eviction policy (one story of the same
requests in a pool of the same size, made so that nearly each policy takes another victim at its end),
policies.html (all of them side by side), and a story each of the host tier, of a policy that is changed in
the middle, and of new weights. They are recordings of the real engine; each page is one file that fetches
nothing.

Serves nothing: viz/live.py does. The stories themselves are viz/stories.py.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.gallery")  # before what takes its time to import

import html
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minirad import figure3
from minirad.cache.eviction import POLICIES
from minirad.observe import events as ev
from minirad.observe.recording import Recording
from viz import figure3 as nine
from viz.draw import tree
from viz.draw.dot import DotError
from viz.stories import (
    ENCORE,
    VISITS,
    Story,
    Visit,
    encore,
    host_tier,
    kept,
    new_weights,
    policy_change,
    returned,
    tell,
)
from viz.trace import Trace
from viz.web.export import export_html
from viz.web.page import Page

RULES = {
    "lru": "least recently used goes first",
    "lfu": "fewest hits goes first",
    "fifo": "first in, first out",
    "mru": "most recently used goes first",
    "filo": "first in, last out",
    "priority": "lowest priority goes first",
    "slru": "what was hit fewer than twice goes first",
    "brrip": "whose lease ends first goes first; hits make it longer, and so does luck",
}


# ---------------------------------------------------------------------- the index


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>minirad: RadixAttention to look at</title>
<style>
body {{ font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #212529; margin: 0; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }}
h1 {{ font-size: 28px; margin: 0 0 4px; }}
h2 {{ font-size: 21px; margin: 36px 0 6px; }}
p {{ max-width: 76ch; margin: 6px 0 12px; }}
a {{ color: #1864ab; }}
figure {{ margin: 12px 0; overflow-x: auto; }}
figure > svg {{ width: 100%; min-width: 900px; height: auto; display: block; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0; }}
th, td {{ text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid #dee2e6; vertical-align: top; }}
th {{ color: #495057; font-weight: 600; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
.victim {{ color: #c92a2a; font-weight: 600; white-space: nowrap; }}
.watch {{ white-space: nowrap; }}
.start {{ font-size: 18px; font-weight: 600; }}
</style>
</head>
<body>
<main>
<h1>RadixAttention to look at</h1>
<p>Recordings of minirad, a small serving engine that runs a real (very small) Llama. Nothing here is
acted: trees, hits and victims are what the engine did. Every page is one file and works offline.</p>
<h2>Nine steps</h2>
<p class="start"><a href="nine_steps.html#scene=1">Step through them →</a></p>
<p>Two chats share a system prompt, four questions share their examples, and one pool of {pool} KV slots
has to do for all. The figure below is the same run on one sheet
(<a href="nine_steps.svg">SVG</a>, <a href="nine_steps.png">PNG</a>). Straight to a step: {links}.</p>
<figure>{figure}</figure>
<h2>What each policy evicts</h2>
<p>{story_text}</p>
<div class="scroll"><table>
<thead><tr><th>policy</th><th>rule</th><th>victim</th><th>in the engine's words</th><th></th></tr></thead>
<tbody>
{stories}
</tbody></table></div>
<p><a href="policies.html">All policies side by side →</a> which leaves each of them keeps when old visitors
come back, and how much of their prompts it finds.</p>
<h2>More to watch</h2>
<ul>
{more}
</ul>
<h2>The nine steps under other policies</h2>
<p>The same requests and the same pool; what is evicted too early has to be computed again.</p>
<div class="scroll"><table>
<thead><tr><th>policy</th><th>prompt tokens from the cache</th><th>steps that differ</th></tr></thead>
<tbody>
{others}
</tbody></table></div>
</main>
</body>
</html>
"""


def index_html(
    figure_svg: str, kv_tokens: int, stories: Sequence[Story], runs: dict[str, list[figure3.Panel]]
) -> str:
    """The page that leads to the others. runs: the nine panels by policy."""
    visits = ", ".join(
        f"“{visit.question}”" + (f" ({visit.times} times)" if visit.times > 1 else "")
        for visit in VISITS[:-1]
    )
    background = next(visit.question for visit in VISITS if visit.priority == 0)
    room = stories[0].kv_tokens if stories else 0
    text = (
        f"The same questions in the same order, in a pool of {room} KV slots: {visits}. Then comes "
        f"“{VISITS[-1].question}”, and one leaf has to go. Which one? All questions have priority 1, only "
        f"“{background}” has 0."
    )
    return _PAGE.format(
        pool=kv_tokens,
        figure=figure_svg,
        links=" · ".join(
            f'<a href="nine_steps.html#scene={n}">{n}</a>' for n in range(1, len(figure3.STEPS) + 1)
        ),
        story_text=html.escape(text),
        stories="\n".join(_story_row(story) for story in stories),
        more="\n".join(
            f'<li><a href="{name}.html#scene=1">{html.escape(title)} →</a> {html.escape(note)}</li>'
            for name, (title, note, _) in MORE.items()
        ),
        others="\n".join(_run_row(policy, panels) for policy, panels in runs.items()),
    )


def _story_row(story: Story) -> str:
    cells = {
        "policy": html.escape(story.policy),
        "rule": html.escape(RULES.get(story.policy, "")),
        "victims": "<br>".join(html.escape(text) for text, _ in story.victims),
        "reasons": "<br>".join(html.escape(reason) for _, reason in story.victims),
    }
    return (
        '<tr><td>{policy}</td><td>{rule}</td><td class="victim">{victims}</td><td>{reasons}</td>'
        f'<td class="watch"><a href="policy_{{policy}}.html#scene={len(VISITS) - 1}">watch →</a></td></tr>'
    ).format(**cells)


def _run_row(policy: str, panels: list[figure3.Panel]) -> str:
    cached = sum(panel["cached_tokens"] for panel in panels)
    asked = sum(panel["prompt_tokens"] for panel in panels)
    broken = figure3.check_story(panels)
    steps = [str(panel["step"]) for panel in panels if not figure3.holds(panel, broken)]
    return (
        f'<tr><td>{html.escape(policy)}</td><td class="n">{cached} of {asked} ({cached / asked:.0%})</td>'
        f"<td>{', '.join(steps) or 'none'}</td></tr>"
    )


# ---------------------------------------------------------------------- policies side by side


_POLICIES_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>minirad: eviction policies side by side</title>
<style>
body {{ font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #212529; margin: 0; }}
main {{ max-width: 1320px; margin: 0 auto; padding: 20px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }}
h2 {{ font-size: 17px; margin: 0; }}
p {{ max-width: 90ch; margin: 6px 0 12px; }}
a {{ color: #1864ab; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 8px 0 22px; }}
th, td {{ padding: 4px 14px; border-bottom: 1px solid #dee2e6; text-align: center; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
td.first {{ background: #fff5f5; color: #c92a2a; font-weight: 700; outline: 2px dashed #c92a2a;
  outline-offset: -3px; }}
td.gone {{ color: #c92a2a; }}
td.kept {{ color: #495057; }}
tfoot td {{ font-variant-numeric: tabular-nums; }}
.bar {{ display: block; height: 9px; background: #e9ecef; border-radius: 3px; overflow: hidden; }}
.bar i {{ display: block; height: 9px; background: #1c7ed6; }}
.best {{ font-weight: 700; background: #ebfbee; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(560px, 1fr)); gap: 14px; }}
section {{ border: 1px solid #dee2e6; border-radius: 10px; padding: 10px 14px; min-width: 0; }}
section p {{ margin: 2px 0 6px; color: #495057; }}
section svg {{ width: 100%; height: auto; max-height: 380px; display: block; }}
</style>
</head>
<body>
<main>
<h1>Eviction policies side by side</h1>
<p>The same questions in the same order and the same pool of {room} KV slots, on the real engine. Up to
“{bye}” all trees are equal; then one leaf has to go: which one, the policy says (boxed{alike}). After that
{returns} visitors come back: what was evicted is computed again, and takes the place of something else.
✕ 1 is the first leaf to be evicted, ● is in the tree at the end.</p>
<div class="scroll"><table>
<thead><tr><th>question</th>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
<tfoot>
<tr><td>found of the prompts that come back</td>{rates}</tr>
</tfoot></table></div>
<p>The trees when “{bye}” has come. Dashed and red: what was evicted for it.</p>
<div class="grid">
{trees}
</div>
<p><a href="index.html">back to the index</a></p>
</main>
</body>
</html>
"""


def policies_html(stories: Sequence[Story], links: Sequence[str] = ()) -> str:
    """Stories of viz.stories.encore side by side. links: the policies that have a page of their own."""
    found = {story.policy: returned(story) for story in stories}
    best = max((cached / asked for cached, asked in found.values()), default=0.0)
    names = [html.escape(story.policy) for story in stories]
    ends = [kept(story) for story in stories]
    return _POLICIES_PAGE.format(
        room=stories[0].kv_tokens if stories else 0,
        bye=html.escape(VISITS[-1].question),
        alike=html.escape(_alike(stories)),
        returns=len(ENCORE),
        heads="".join(f"<th>{name}</th>" for name in names),
        rows="\n".join(_fate_row(visit.question, stories, ends) for visit in _distinct(VISITS)),
        rates="".join(_rate_cell(*found[story.policy], best) for story in stories),
        trees="\n".join(_tree_card(story, story.policy in links) for story in stories),
    )


def _alike(stories: Sequence[Story]) -> str:
    """Which policies take the same leaf first; "" if each takes another one."""
    by: dict[str, list[str]] = {}
    for story in stories:
        by.setdefault(story.victims[0][0], []).append(story.policy)
    return "".join(f"; {' and '.join(names)} take the same" for names in by.values() if len(names) > 1)


def _distinct(visits: Sequence[Visit]) -> list[Visit]:
    return list({visit.question: visit for visit in visits}.values())


def _fate_row(question: str, stories: Sequence[Story], ends: Sequence[set[str]]) -> str:
    """What became of one question's leaf under each policy. ends: the questions that each story kept."""
    cells = []
    for story, end in zip(stories, ends, strict=True):
        when = [at for at, (text, _) in enumerate(story.victims, start=1) if text == question]
        kind = "first" if 1 in when else "gone" if when else "kept"
        words = [f"✕ {', '.join(map(str, when))}"] if when else []
        why = html.escape("; ".join(story.victims[at - 1][1] for at in when))
        cells.append(
            f'<td class="{kind}" title="{why}">{" ".join([*words, *(["●"] if question in end else [])])}</td>'
        )
    return f"<tr><td>{html.escape(question)}</td>{''.join(cells)}</tr>"


def _rate_cell(cached: int, asked: int, best: float) -> str:
    rate = cached / asked
    bar = f'<span class="bar"><i style="width:{rate:.0%}"></i></span>'
    return f"<td{' class=best' if rate == best else ''}>{rate:.1%}{bar}</td>"


def _tree_card(story: Story, linked: bool) -> str:
    trace, policy = Trace(story.recording), html.escape(story.policy)
    drawn = tree.tree_svg(trace.view("scene", len(VISITS)), trace.decode, tree.Options(detail="compact"))
    drawn = re.sub(r' id="([a-z]+\d+)"', rf' id="{policy}-\1"', drawn)  # many trees in one page
    watch = f' · <a href="policy_{policy}.html#scene={len(VISITS) - 1}">watch</a>' if linked else ""
    victim, reason = story.victims[0]
    told = html.escape(f"evicted: “{victim}”, {reason}")
    rule = html.escape(RULES.get(story.policy, ""))
    return f"<section><h2>{policy}: {rule}</h2><p>{told}{watch}</p>{drawn}</section>"


MORE: dict[str, tuple[str, str, Callable[[], Story]]] = {
    "host_tier": (
        "A second tier in host memory",
        "What is evicted from the device stays on the host, and comes back without being computed again.",
        host_tier,
    ),
    "policy_change": (
        "Another policy in the middle of a run",
        "lru forgets the question that is asked most; from then on lfu keeps it.",
        policy_change,
    ),
    "new_weights": (
        "New weights",
        "What the old weights computed matches nothing any more, and goes in time.",
        new_weights,
    ),
}
"""Further stories: file name, title, what to look for, and how it is run."""


# ---------------------------------------------------------------------- the command


def write(out: Path, policies: Sequence[str] = tuple(POLICIES)) -> list[Path]:
    """Writes all pages and returns their paths, the index first. ValueError for an unknown policy."""
    out.mkdir(parents=True, exist_ok=True)
    recording, panels = figure3.run()
    page = nine.lay_out(recording, panels)
    drawn = nine.page_svg(page)
    (out / "nine_steps.svg").write_text(drawn, encoding="utf-8")
    (out / "nine_steps.png").write_bytes(nine.page_png(page))
    note = "The nine steps of the RadixAttention paper's figure 3, as the engine takes them."
    export_html(
        Page(Trace(recording), nine_step_labels(recording)), out / "nine_steps.html", "Nine steps", note
    )
    stories = [tell(policy) for policy in policies]
    paths = [out / "index.html", out / "nine_steps.html", out / "nine_steps.svg", out / "nine_steps.png"]
    for story in stories:
        path = out / f"policy_{story.policy}.html"
        note = f"Eviction policy {story.policy}: {RULES.get(story.policy, '')}. Who goes when “Bye” comes?"
        export_html(Page(Trace(story.recording), story.labels), path, f"Eviction: {story.policy}", note)
        paths.append(path)
    for name, (title, note, play) in MORE.items():
        story = play()
        paths.append(out / f"{name}.html")
        export_html(Page(Trace(story.recording), story.labels), paths[-1], title, note)
    paths.append(out / "policies.html")
    side_by_side = policies_html([encore(policy) for policy in policies], policies)
    paths[-1].write_text(side_by_side, encoding="utf-8")
    runs = {
        policy: panels if policy == "lru" else figure3.run(eviction_policy=policy)[1] for policy in policies
    }
    index = index_html(drawn, panels[0]["kv_capacity"], stories, runs)
    paths[0].write_text(index, encoding="utf-8")
    return paths


def nine_step_labels(recording: Recording) -> dict[str, str]:
    """Request id -> whose it is and what it asks (requests are added in that order)."""
    added = [e.request for frame in recording for e in frame.events if isinstance(e, ev.RequestAdded)]
    asks = [ask for step in figure3.STEPS for ask in step.asks]
    return {name: f"{ask.of}: {_question(ask)}" for name, ask in zip(added, asks, strict=True)}


def _question(ask: figure3.Ask) -> str:
    """A chat's message, or the last question of a few-shot prompt."""
    return ask.text.splitlines()[-2].partition(": ")[2] if ask.of == "few-shot" else ask.text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.Parser(prog="python -m viz.gallery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pages go")
    args = parser.parse_args(arguments)

    def work() -> int:
        with command.named(args.out):
            paths = write(args.out)
        for path in paths:
            print(path)
        print(f"Open {paths[0]} in a browser, or put the folder on any web server.")
        return 0

    return command.run(parser.prog, work, DotError)


if __name__ == "__main__":
    sys.exit(main())
