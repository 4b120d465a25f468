"""A lecture without an install: pages that open from disk or from any static host.

    python -m viz.gallery --out DIR

Writes index.html (what there is, the figure of nine steps, which policy evicts whom), nine_steps.html
(the nine steps to step through) and policy_NAME.html for each eviction policy: one story of the same
requests in a pool of the same size, made so that each policy takes another victim at its end. The
stories are recordings of the real engine; each page is one file that fetches nothing.

Does not serve anything: viz/live.py does.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minirad import events as ev
from minirad import figure3
from minirad.cache.eviction import POLICIES
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.classroom.corpus import chat_text, message
from minirad.model.load import load_tokenizer, resolve_model
from minirad.record import Recorder, Recording
from viz import figure3 as nine
from viz.dot import DotError
from viz.export import export_html
from viz.page import Page
from viz.trace import Trace


@dataclass(frozen=True, slots=True)
class Visit:
    """One scene: a question, asked `times` times in a row."""

    question: str
    times: int = 1
    priority: int = 1


VISITS = (
    Visit("Hello"),
    Visit("Who are you?", times=3),
    Visit("Name a fruit.", times=2),
    Visit("Good morning"),
    Visit("Repeat: apple river", times=3, priority=0),
    Visit("Tell me a story about a cat."),
    Visit("What day comes after Monday?", times=3),
    Visit("Hello", times=2),
    Visit("Tell me a story about a cat.", times=2),
    Visit("Bye"),
)
"""Who came when, how often, and how important: for each policy another leaf is the one to lose.

first in: Hello. Last in: What day. Longest unused: Who are you. Just used: Tell me. Never asked again:
Good morning. Longest unused of those asked again at most once: Name a fruit. Least priority: Repeat.
"""
SPARE = 4  # slots left when all leaves are in: the last question needs a few more

RULES = {
    "lru": "least recently used goes first",
    "lfu": "fewest hits goes first",
    "fifo": "first in, first out",
    "mru": "most recently used goes first",
    "filo": "first in, last out",
    "priority": "lowest priority goes first",
    "slru": "what was hit fewer than twice goes first",
}


@dataclass(frozen=True, slots=True)
class Story:
    """A recorded run of VISITS. victims: the text of each node that was evicted, and the event's reason."""

    policy: str
    recording: Recording
    labels: dict[str, str]
    kv_tokens: int
    victims: tuple[tuple[str, str], ...]


def tell(policy: str) -> Story:
    """Runs VISITS under an eviction policy. Only an answer's first token is asked for, and that has no
    KV: a leaf is exactly one question."""
    tokenizer = load_tokenizer(resolve_model(None))
    prompts = {visit.question: _prompt(tokenizer, visit.question) for visit in VISITS}
    first, *others = prompts.values()
    shared = min(_common(first, other) for other in others)
    *leaves, _ = prompts.values()
    room = shared + sum(len(prompt) - shared for prompt in leaves) + SPARE
    engine = Engine(EngineConfig(device="cpu", eviction_policy=policy, kv_tokens=room), tokenizer=tokenizer)
    labels: dict[str, str] = {}
    with figure3.one_thread(), Recorder(engine) as recording:
        for visit in VISITS:
            recording.scene(f"{visit.question} {f'({visit.times} times)' if visit.times > 1 else ''}".strip())
            for _ in range(visit.times):
                params = SamplingParams(max_new_tokens=1)
                name = engine.add_request(prompts[visit.question], params, priority=visit.priority)
                labels[name] = visit.question
                while engine.has_work:
                    engine.step()
                    engine.check()
    return Story(policy, recording, labels, room, _victims(recording))


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [message("system", figure3.SYSTEM), message("user", question)]
    ids: list[int] = tokenizer.encode(chat_text(messages, add_generation_prompt=True))
    return ids


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two prompts share; no prompt is the beginning of another one."""
    return next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


def _victims(recording: Recording) -> tuple[tuple[str, str], ...]:
    trace = Trace(recording)
    found = []
    for scene in range(1, trace.count("scene")):
        view = trace.view("scene", scene)
        for event in view.so_far:
            if isinstance(event, ev.NodeEvicted):
                text = trace.node_text(view.ghosts[event.node]) if event.node in view.ghosts else ""
                found.append((text.partition("<|im_end|>")[0], event.reason))
    return tuple(found)


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
<h2>Seven policies, seven victims</h2>
<p>{story_text}</p>
<div class="scroll"><table>
<thead><tr><th>policy</th><th>rule</th><th>victim</th><th>in the engine's words</th><th></th></tr></thead>
<tbody>
{stories}
</tbody></table></div>
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
    parser = argparse.ArgumentParser(prog="python -m viz.gallery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pages go")
    args = parser.parse_args(arguments)
    try:
        paths = write(args.out)
    except DotError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(path)
    print(f"Open {paths[0]} in a browser, or put the folder on any web server.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
