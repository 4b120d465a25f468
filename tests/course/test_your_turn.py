"""What a notebook invites to works: changing a cell, running one again, going on below the last one."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support import ROOT

from viz import predict as predictions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jupytext") is None, reason="the extra `test` brings jupytext"
    ),
]

FOLDER = ROOT / "notebooks"
NUMBERS = [path.name[:2] for path in sorted(FOLDER.glob("[0-9][0-9]_*.md"))]
Check = Callable[[SimpleNamespace, str], object]  # of all names, and of what was printed


class Invited(NamedTuple):
    """A change that a notebook's text invites.

    changes: (what stands in its code once, what stands there instead). below: a cell of the reader's own,
    at the end. holds: whether the names after all cells, and what the last changed cell and `below` printed,
    are what the exercise asks for.
    """

    notebook: str
    changes: tuple[tuple[str, str], ...] = ()
    below: str = ""
    holds: Check = lambda names, told: True


@cache
def cells(number: str) -> tuple[str, ...]:
    import jupytext

    (text,) = FOLDER.glob(f"{number}_*.md")
    return tuple(cell.source for cell in jupytext.read(text).cells if cell.cell_type == "code")


class Reached(ast.NodeTransformer):
    """Notes each assertion that is reached."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        note = ast.parse(f"_reached.add({node.lineno})").body[0]
        return [ast.copy_location(ast.fix_missing_locations(note), node), node]


class Kernel:
    """A fresh namespace in which a notebook's cells run, as in a kernel, but in this process."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.unreached: list[str] = []  # assertions, as cell and line

    def run(self, cell: str, number: int = 0) -> str:
        """What the cell prints."""
        told, tree = io.StringIO(), ast.parse(cell)
        lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)}
        self.names["_reached"] = reached = set()
        with contextlib.redirect_stdout(told):
            exec(compile(Reached().visit(tree), f"<cell {number}>", "exec"), self.names)
        self.unreached += [f"cell {number}, line {line}" for line in sorted(lines - reached)]
        return told.getvalue()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernel:
    monkeypatch.setenv("MINIRAD_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.chdir(FOLDER)  # streams/ lies there, and common.py
    monkeypatch.setattr(predictions, "_shown", set())
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return Kernel()


def changed(number: str, changes: tuple[tuple[str, str], ...]) -> tuple[list[str], int]:
    """The cells after the changes, and which was changed last."""
    found, at = list(cells(number)), -1
    for before, after in changes:
        assert sum(cell.count(before) for cell in found) == 1, f"{before!r} does not stand there once"
        at = next(place for place, cell in enumerate(found) if before in cell)
        found[at] = found[at].replace(before, after)
    return found, at


def drafted(count: int) -> Invited:
    passes = {1: 7, 8: 3}[count]
    return Invited(
        "13",
        (("draft_tokens=4", f"draft_tokens={count}"),),
        holds=lambda names, told: names.drafts.passes == passes and f"15 tokens, {passes} passes" in told,
    )


def parted(first: str, second: str) -> Invited:
    before = 'FORK = "What is the capital of France?", "What is the capital of Peru?"'
    return Invited(
        "13", ((before, f"FORK = {first!r}, {second!r}"),), holds=lambda names, told: names.plain[0][-1] > 1
    )


def tailed(page_size: int) -> Invited:
    """Three samples of 27 tokens."""
    return Invited(
        "09",
        (("page_size = 4\n", f"page_size = {page_size}\n"),),
        holds=lambda names, told: [each.copied for each in names.tails] == 2 * [27 % page_size],
    )


def paged(page_size: int, shared: int) -> Invited:
    lines = cells("04")[2].partition("\nfor ")[0]  # from `tour = ...` to `held = ...`
    return Invited(
        "04",
        below=lines.replace("kv_tokens=128, page_size=4", f"kv_tokens=112, page_size={page_size}"),
        holds=lambda names, told: len(set(names.held["R1"]) & set(names.held["R2"])) == shared,
    )


def scattered(page: int) -> Invited:
    return Invited(
        "05",
        (("length, page = 16_384, 16", f"length, page = 16_384, {page}"),),
        holds=lambda names, told: f"gathered, pages of {page} " in told,
    )


COUNTED = """
def counts(*kinds):
    return {pool: len(of(serve(pool)[0], *kinds)) for pool in (600, 700, 800)}
retractions, deferrals = counts(ev.RequestRetracted), counts(ev.RequestDeferred)
"""
SPLITS = '[each for frame in tour.recording for each in frame.events if type(each).__name__ == "NodeSplit"]'
INVITED = {
    "00: as text": Invited(
        "00", ((")\nguess", ')\nguess.commit("none")'),), holds=lambda names, told: "Committed: none" in told
    ),
    "01, 1": Invited(
        "01",
        below="tour.agent(), tour.agent(), tour.run()\nlast = kv.request_hits(tour.recording)[-1]",
        holds=lambda names, told: (names.last.cached_tokens, names.last.prompt_tokens) == (286, 296),
    ),
    "02, 1": Invited(
        "02",
        below=f'tour.submit("<|im_start|>", chat=False)\ntour.run()\nprint({SPLITS})',
        holds=lambda names, told: "at=1," in told,
    ),
    "03: another question": Invited(
        "03",
        (('    "What is the capital of Cuba?",\n', '    "Hello",\n'),),
        holds=lambda names, told: names.chart,
    ),
    "03: another order": Invited(
        "03", (("\nrates = ", "\nCIRCLE = random.Random(1).sample(CIRCLE, 15)\nrates = "),)
    ),
    "03: every second time": Invited(
        "03", (("\nrates = ", '\nCIRCLE = [q for each in CIRCLE for q in (each, "Hello")]\nrates = '),)
    ),
    "03, 1": Invited(
        "03",
        below='tour.submit("Tell me a story about a dog. " * 9, chat=False)\ntour.run()',
        holds=lambda names, told: [each["parent"] for each in names.tour.state["tree"]["nodes"]] == [0],
    ),
    **{f"04, 1: {size}": paged(size, shared) for size, shared in ((2, 14), (7, 14), (8, 8), (14, 14))},
    **{f"05, 1: {page}": scattered(page) for page in (1, 256)},
    "06, 1": Invited(
        "06",
        below='tour.submit(QUESTION)\ntour.run()\ncommon.number_lines(commits(tour.recording), "three")',
        holds=lambda names, told: names.kv.request_hits(names.tour.recording)[2].cached_tokens == 28,
    ),
    "06, 3": Invited(
        "06",
        below=COUNTED,
        holds=lambda names, told: (
            list(names.retractions.values()) == [0, 1, 0] and list(names.deferrals.values()) == [30, 26, 0]
        ),
    ),
    "07, 1": Invited(
        "07",
        (("ROOM = 360", "ROOM = 800"),),
        holds=lambda names, told: {round(row[0], 2) for row in names.rows.values()} == {0.89},
    ),
    "07, 2: at random": Invited("07", (("rng = random.Random(1)", "rng = random.Random(2)"),)),
    "07, 2: found": Invited(
        "07",
        (("\n\nROOM", "\nARRIVALS = [(0, 0), (0, 1), (5, 1), (10, 0)]\nROOM"),),
        holds=lambda names, told: names.rows["fcfs"][0] > names.rows["lpm"][0],
    ),
    **{f"09, 1: {size}": tailed(size) for size in (1, 3, 9, 16, 64)},
    "09, 2": Invited(
        "09",
        (("MORE = []", "MORE = [5, 6, 7]"),),
        holds=lambda names, told: told.count("30 prompt tokens, 6 computed") == 3,
    ),
    "10, 1": Invited(
        "10",
        (("kv_tokens=300", "kv_tokens=900"),),
        holds=lambda names, told: names.selective["computed"] == 1112,
    ),
    "11, 1": Invited(
        "11",
        (
            ("(corpus.AGENT_PROMPT)\n", '(corpus.AGENT_PROMPT)\n    s.user("What is the capital of")\n'),
            ("branch.user(question)", 'branch += question.removeprefix("What is the capital of")'),
        ),
        holds=lambda names, told: names.computed(names.hinted)[0] == 286,
    ),
    "11, 2": Invited(
        "11",
        (("kv_tokens=2048", "kv_tokens=2048, chunk_tokens=256"),),
        holds=lambda names, told: "[295, 41, " in told,
    ),
    "11, 2: below": Invited(
        "11",
        below="print(computed(play_all(hint=False, in_batch_prefix=False, chunk_tokens=256)[0]))",
        holds=lambda names, told: "[295, 41, " in told,
    ),
    "12: the first threshold": Invited(
        "12",
        (("(0.0, 0.05, 0.1, 0.5, 0.9, 0.99)", "(0.01, 0.2, 1.0)"),),
        holds=lambda names, told: "more than 20%" in told,
    ),
    **{f"13, 1: {count}": drafted(count) for count in (1, 8)},
    "13, 2: turned around": parted("What is the capital of Peru?", "What is the capital of France?"),
    "13, 2: the second word": parted("What is the capital of France?", "What color is grass?"),
    "13, 3": Invited(
        "13",
        below='texts, hits = answers("", QUESTIONS, adapted, True)',
        holds=lambda names, told: names.hits == 120 and "The capital of France is Paris." not in names.texts,
    ),
    "13, 4": Invited(
        "13",
        below="one, two = fresh(), fresh()\nfor engine in (one, two):\n    ask(engine)",
        holds=lambda names, told: "256 of 295 prompt tokens from the disk" in told,
    ),
    "14: own figures": Invited(
        "14",
        (
            ("tokens_per_second = 10_000", "tokens_per_second = 500"),
            ("gpu_hour, gigabyte_hour = 3.0, 0.004", "gpu_hour, gigabyte_hour = 1, 0.1"),
        ),
    ),
}


@pytest.mark.parametrize("what", INVITED)
def test_what_is_invited_works(what: str, kernel: Kernel) -> None:
    invited = INVITED[what]
    sources, at = changed(invited.notebook, invited.changes)
    told = [kernel.run(cell, number) for number, cell in enumerate(sources)]
    shown = (told[at] if invited.changes else "") + kernel.run(invited.below)
    assert invited.holds(SimpleNamespace(**kernel.names), shown), shown


def answers(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("The answer:")]


@pytest.mark.parametrize("number", NUMBERS)
def test_each_cell_can_be_run_again(number: str, kernel: Kernel) -> None:
    """At once; and what answers a prediction after all others, too: who predicts late is sent back there.

    What is asserted, or answered, only while a cell is as it stands there must not be skipped meanwhile.
    """
    first: dict[int, list[str]] = {}
    found = cells(number)
    for place, cell in enumerate(found):
        first[place] = answers(kernel.run(cell, place))
        assert answers(kernel.run(cell, place)) == first[place]
    asked = {each.key for each in kernel.names.values() if isinstance(each, predictions.Prediction)}
    assert kernel.unreached == [] and asked == predictions._shown
    for place, cell in enumerate(found):
        if ".answer(" in cell:
            assert answers(kernel.run(cell, place)) == first[place] != []


def test_events_are_numbered_as_the_picture_numbers_them(kernel: Kernel) -> None:
    told = [kernel.run(cell) for cell in cells("09")[:4]][-1]
    tour = kernel.names["tour"]
    tour.first()
    pictured = set()
    while tour.index < tour.count - 1:
        tour.forward()
        number = tour.view.title.split(", ")[-1].split(" of ")[0]  # of "step 1 (prefill), event 7 of 18"
        pictured.add(f"{number}: {tour.view.events[-1].describe()}")
    assert len(told.splitlines()) == 6 and set(told.splitlines()) <= pictured
