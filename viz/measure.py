"""How long a view of a large tree takes: the state, the plan of the picture, its drawing, page and stepper.

No engine and no model: trees of so many nodes, each 16 tokens, are put together from events as a recording
has them, and then gone through. `wide`: 10 subtrees with most of their nodes right below them; `deep`: chains
of 1,000; `mixed`: eight children each. `stream`: the same as `mixed`, in the shape that another server's KV
events lead to. Milliseconds, medians: one step forward, one step back, and a jump of half the way; the page
and the stepper with all that they send, drawing included.

--start measures something else: from `python -m viz.live` to its first tree (viz/start.py).

--json prints [{shape, nodes, state, plan, draw, page: {forward, back, jump}, stepper: {...}, bytes}].
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.measure")  # before what takes its time to import

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from minirad.bench.tables import table
from minirad.config import one_of
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame, apply_frame
from minirad.observe.snapshot import State
from viz import start
from viz.draw.tree import dot_text, plan, svg
from viz.notebook.stepper import Stepper
from viz.trace import Trace, ids_as_text
from viz.web.page import Page

TOKENS = 16  # of a node: one page
SIZES = (6302, 20_000, 100_000)
SHAPES = ("wide", "deep", "mixed", "stream")
INSERTED = 2000  # nodes in each frame in which the tree grows
KEYFRAME_EVENTS = 4000  # at most so many events lie between two keyframes
STEPS = 40  # short frames at the end, through which is stepped


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(command.positive, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    about = (__doc__ or "").split("\n")[0]
    parser = command.Parser(prog="python -m viz.measure", description=about)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="N,N,...", help="nodes")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--reps", type=command.positive, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--start", action="store_true", help="from `python -m viz.live` to the first tree")
    parser.add_argument("--browser", action="store_true", help="with --start: as a Chromium draws it, too")
    args = parser.parse_args(arguments)

    def work() -> int:
        if args.start:
            rows = start.measured(args.reps, args.browser)
            print(json.dumps(rows, indent=1) if args.json else start.as_table(rows))
            return 0
        if args.browser:
            raise ValueError("--browser goes with --start only")
        shapes = args.shapes.split(",")
        for shape in shapes:
            one_of("shape", shape, SHAPES)
        wanted = [(shape, size) for size in args.sizes for shape in shapes]
        each = tqdm(wanted, desc="measure", unit="tree", leave=False)
        reports = [measured(shape, size, args.reps) for shape, size in each]
        print(json.dumps(reports, indent=1) if args.json else as_table(reports))
        return 0

    return command.run(parser.prog, work)


# ---------------------------------------------------------------------- the trees


def parent_of(shape: str, number: int) -> int:
    """The parent of the node that is inserted as `number`; 0 is the root."""
    if shape == "wide":
        return 0 if number <= 10 else 1 + number % 10
    if shape == "deep":
        return 0 if number % 1000 == 1 else number - 1
    return number // 8


def grown(shape: str, nodes: int) -> Recording:
    """A recording in which a tree of so many nodes grows, and is then used for `STEPS` short steps.

    A stream's is there from the start.
    """
    theirs = shape == "stream"
    pool = 0 if theirs else nodes * TOKENS + 64 * STEPS * TOKENS
    tree: State = {"page_size": TOKENS, "eviction_policy": "lru", "tick": 0, "nodes": []}
    start: State = {"step": 0, "kv_tokens": pool, "free": pool, "tree": tree, "waiting": [], "requests": {}}
    steps = list(_steps(shape, nodes))
    if theirs:
        start = _of_stream(start, [event for events in steps[:-STEPS] for event in events])
        steps = [[e for e in events if not isinstance(e, ev.NodeInserted)] for events in steps[-STEPS:]]
    recording, state, owed = Recording({"minirad": 1, "config": {}, "model": {}, "start": start}), None, 0
    for step, events in enumerate(steps, start=1):
        frame = Frame(len(recording.frames), step, (*events, _ended(step)))
        state = apply_frame(state or ReplayState(start), frame)
        owed += len(events)
        if owed >= KEYFRAME_EVENTS:
            frame, owed = Frame(frame.index, step, frame.events, state.snapshot()), 0
        recording.frames.append(frame)
    return recording


def _of_stream(start: State, events: list[ev.Event]) -> State:
    """The state after these events, in the shape of a stream's."""
    state = ReplayState(start)
    more = {"units": TOKENS, "blocks": 1, "pairs": False, "seen": True}
    for event in events:
        state.apply(event)
    for node in state.nodes.values():
        node.update(more, held={"0": "GPU"})
    rank = {"rank": 0, "where": "tcp://x:1", "state": "live", "seq": 9, "batches": 9, "replayed": 0}
    ranks = [{**rank, "lost": 0, "unknown": 0, "media": {"GPU": len(state.nodes)}, "maybe": 0}]
    state.tree.update(eviction_policy="theirs", spaces=[""], ranks=ranks)
    return state.snapshot()


def _steps(shape: str, nodes: int) -> Iterator[list[ev.Event]]:
    made = 0
    while made < nodes:
        until = min(made + INSERTED, nodes)
        yield [_inserted(shape, number) for number in range(made + 1, until + 1)]
        made = until
    for step in range(STEPS):
        new = [_inserted(shape, nodes + 1 + 3 * step + extra, parent=1 + step % 9) for extra in range(3)]
        path = (*range(1, 3), nodes // 2)
        gone = [] if shape == "deep" else [_evicted(shape, nodes - step)]
        yield [ev.PrefixTouched(path, nodes + step, True, None), *new, *gone]


def _inserted(shape: str, number: int, parent: int | None = None) -> ev.Event:
    first = number * TOKENS
    tokens = tuple(token % 512 for token in range(first, first + TOKENS))
    slots = () if shape == "stream" else tuple(range(first, first + TOKENS))
    above = parent_of(shape, number) if parent is None else parent
    return ev.NodeInserted(number, above, tokens, slots, number, 0, 0)


def _evicted(shape: str, number: int) -> ev.Event:
    slots = () if shape == "stream" else tuple(range(number * TOKENS, (number + 1) * TOKENS))
    return ev.NodeEvicted(number, parent_of(shape, number), slots, "lru", "oldest", number - 1)


def _ended(step: int) -> ev.Event:
    return ev.StepEnded(step, "prefill", 0, 0, 0, 0, 0.0)


# ---------------------------------------------------------------------- the measurements


def measured(shape: str, nodes: int, reps: int) -> dict[str, Any]:
    """All figures of one tree, in milliseconds."""
    recording = grown(shape, nodes)
    end = len(recording.frames)
    trace = Trace(recording, ids_as_text)
    trace.view("step", end - STEPS)
    forward = iter(range(end - STEPS + 1, end + 1))
    state, planned, drawn = [], [], []
    for _ in range(reps):
        spent, view = _timed(lambda: trace.view("step", next(forward)))
        state.append(spent)
        planned.append(_timed(lambda view=view: plan(view))[0])  # type: ignore[misc]
        drawn.append(_timed(lambda view=view: svg(dot_text(view, ids_as_text)))[0])  # type: ignore[misc]
    page = Page(Trace(recording, ids_as_text))
    sent = page.view("step", end)
    if failed := sent.get("failed"):
        raise RuntimeError(f"a part of the page failed: {failed}")
    stepper = Stepper(recording, decode=ids_as_text)

    def shown(index: int) -> None:
        stepper.go(index)
        _ = json.dumps(stepper.shown)

    return {
        "shape": shape, "nodes": nodes, "state": _median(state), "plan": _median(planned),
        "draw": _median(drawn),
        "page": _moves(lambda index: json.dumps(page.view("step", index)), end, reps),
        "stepper": _moves(shown, end, reps),
        "bytes": len(json.dumps(sent)),
    }  # fmt: skip


def _moves(show: Callable[[int], Any], end: int, reps: int) -> dict[str, float]:
    """Medians of a step forward, a step back, and a jump back and forth over half the recording."""
    at = end - STEPS + 2
    show(at)
    forward = [_timed(lambda: show(at + move))[0] for move in range(1, reps + 1)]  # noqa: B023
    top = end - 2
    show(top)
    back = [_timed(lambda: show(top - move))[0] for move in range(1, reps + 1)]  # noqa: B023
    jumps = []
    for rep in range(reps):
        jumps.append(_timed(lambda: show(end // 2 - 2 * rep))[0])  # noqa: B023
        jumps.append(_timed(lambda: show(end - 5 - 2 * rep))[0])  # noqa: B023
    return {"forward": _median(forward), "back": _median(back), "jump": _median(jumps)}


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    made = act()
    return 1000 * (time.perf_counter() - begin), made


def _median(times: list[float]) -> float:
    return round(statistics.median(times), 1)


def as_table(reports: list[dict[str, Any]]) -> str:
    head = ["shape", "nodes", "state", "plan", "draw"]
    head += [f"{who} {move}" for who in ("page", "stepper") for move in ("forward", "back", "jump")]
    rows: list[list[object]] = []
    for each in reports:
        moves = [each[who][move] for who in ("page", "stepper") for move in ("forward", "back", "jump")]
        named = [each[name] for name in ("shape", "nodes", "state", "plan", "draw")]
        rows.append([*named, *moves, each["bytes"]])
    return table([*head, "bytes"], rows)


if __name__ == "__main__":
    sys.exit(main())
