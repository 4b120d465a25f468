"""Sessions turn by turn: what broke a prefix, what it cost, and the page that shows it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transcripts
from browsers import browser, tab  # noqa: F401

from minirad.__main__ import main
from minirad.logs import LogReader, PromptTokenizer, Tokenized, tokenized
from minirad.logs.request import OPENING, LoggedRequest, Part
from minirad.why.history import Cache, Entry, History
from minirad.why.turns import BREAKS, MOST_RUNS, MOST_TURNS, Turns
from viz.turns import session_dot
from viz.why import session_figure, write_html

TURNS, SIZE = 200, 500_000
EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'><b>"


def report_of(path: Path, capsys: Any, *options: str) -> dict[str, Any]:
    """What `minirad why` says of a log."""
    capsys.readouterr()
    assert main(["why", str(path), "--all", "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def breaks(session: dict[str, Any]) -> list[tuple[int, str]]:
    return [
        (at, turn["break"]["kind"]) for at, turn in enumerate(session["turns"], start=1) if "break" in turn
    ]


# ---------------------------------------------------------------------- transcripts


@pytest.mark.parametrize("kind", transcripts.MAKERS)
def test_a_transcript_of_200_turns_with_two_compactions(kind: str, tmp_path: Path, capsys: Any) -> None:
    path = transcripts.write(tmp_path / "session.jsonl", kind, turns=TURNS, size=SIZE)
    (session,) = report_of(path, capsys)["sessions"]
    assert len(session["turns"]) == TURNS
    assert breaks(session) == [(67, "compaction"), (134, "compaction")]
    for turn in session["turns"]:
        assert turn["cached"] + sum(turn["lost"].values()) == turn["tokens"]
    given = list(tokenized(LogReader(path), PromptTokenizer()))
    for at in (67, 134):
        _judge(session["turns"][at - 1], given[at - 2], given[at - 1])
    assert session["computed"] == sum(sum(turn["lost"].values()) for turn in session["turns"])
    _judge_tree(session, given)


def _judge(turn: dict[str, Any], before: Tokenized, now: Tokenized) -> None:
    """A break against both prompts, token by token."""
    one, other, told = _parts(before), _parts(now), turn["break"]
    common = 0
    while one[common][0] == other[common][0]:
        common += 1
    assert told["token"] == sum(size for _, size in other[:common])
    assert told["lost"] == sum(size for _, size in one[common:])
    assert told["token"] <= turn["cached"] < told["token"] + other[common][1]
    assert told["computed"] == turn["tokens"] - turn["cached"] == len(now.ids) - turn["cached"]
    left, again, place = [text for text, _ in one[common:]], 0, told["token"]
    for text, size in other[common:]:
        if text in left:
            left.remove(text)
            again += sum(at >= turn["cached"] for at in range(place, place + size))
        place += size
    assert told["again"] == again


def _parts(each: Tokenized) -> list[tuple[str, int]]:
    sizes = np.diff(each.ends, prepend=0).tolist()
    named = zip(each.request.parts, sizes, strict=True)
    return [(part.text, size) for part, size in named if part.name != OPENING]


def _judge_tree(session: dict[str, Any], given: Sequence[Tokenized]) -> None:
    """All beginnings of all prompts are in the tree, each once."""
    seen: set[int] = set()
    total = 0
    for each in given:
        path = 0
        for text, size in _parts(each):
            path = hash((path, text))
            total += size if path not in seen else 0
            seen.add(path)
    assert sum(run["tokens"] for run in session["runs"]) == total
    assert sum(run["parts"] for run in session["runs"]) == len(seen)
    leaves = {run["run"] for run in session["runs"]} - {run["parent"] for run in session["runs"]}
    assert len(leaves) == 3  # one for each time between compactions


# ---------------------------------------------------------------------- each kind of break


def prompt(*said: str, session: str | None = "S", number: int = 0, model: str = "m") -> Tokenized:
    """A request, a token for each character. said: "tools: [...]", "system: ...", or a message's text."""
    parts = []
    for at, text in enumerate(said, start=1):
        name = next((name for name in ("tools", "system", "response_format") if text.startswith(name)), None)
        role = "system" if name else "user" if at % 2 else "assistant"
        text = text.partition(": ")[2] if name else text
        label = " (user, compaction summary)" if text.startswith("Summary") else f" ({role})"
        parts.append(Part(name or f"message {at}{label}", f"<|im_start|>{role}\n{text}<|im_end|>\n"))
    parts.append(Part(OPENING, "<|im_start|>assistant\n"))
    ids = np.array([ord(character) for part in parts for character in part.text], dtype=np.int64)
    ends = np.cumsum([len(part.text) for part in parts])
    request = LoggedRequest(
        "log", number, f"line {number}", "chat", tuple(parts), session=session, namespace=(("model", model),)
    )
    return Tokenized(request, ids, ends)


def told(*given: Tokenized, capacity: int | None = None) -> list[dict[str, Any]]:
    """The report of some requests, one after another through a cache."""
    history, turns = History(Cache(capacity)), Turns()
    for at, each in enumerate(given, start=1):
        entry = Entry(
            f"line {at}", each.ids, each.request.extra_key, source=each, session=each.request.session
        )
        turns.add(each, history.serve(entry))
    return turns.report()


TOOLS = 'tools: [{"name": "read"}, {"name": "write"}]'
TALK = (
    "system: Be kind. Today is 2026-03-01. Be short.",
    "What?",
    "That.",
    "Why?",
    "So.",
    "Who?",
    "We.",
    "How?",
)
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "compaction": (TALK, (TALK[0], "Summary: all is well", "Next"), "7 messages became a summary"),
    "tools": ((TOOLS, *TALK), (TOOLS.replace("write", "run"), *TALK), "+run, -write"),
    "format": (("response_format: {}", *TALK), ("response_format: []", *TALK), "another one"),
    "date": (TALK, (TALK[0].replace("-01", "-02"), *TALK[1:]), "'2026-03-01.' became '2026-03-02.'"),
    "system": (TALK, (TALK[0].replace("kind", "rude"), *TALK[1:]), "'kind.' became 'rude.'"),
    "cleared": (TALK, (*TALK[:3], "[Old tool result content cleared]", *TALK[4:]), "message 4"),
    "reordered": (TALK, (*TALK[:3], TALK[5], TALK[4], TALK[3], *TALK[6:]), "message 6 (assistant) where"),
    "inserted": (TALK, (*TALK[:3], "Else?", "No.", *TALK[3:]), "message 4 (assistant), where"),
    "left out": (TALK, (*TALK[:3], *TALK[5:]), "message 4 (assistant) and what was behind it up to"),
    "back": (TALK, (*TALK[:-1], "Really?"), "by 1 message, to message 8 (assistant): 'Really?'"),
    "edited": (TALK, (*TALK[:3], "Why not?", *TALK[4:]), "'Why?' became 'Why not?'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_break_is_named(kind: str) -> None:
    before, now, what = KINDS[kind]
    (session,) = told(prompt(*before[:-2]), prompt(*before), prompt(*now), prompt(*now, "Thanks", "Welcome"))
    assert breaks(session) == [(3, kind)]
    broke = session["turns"][2]["break"]
    assert what in broke["what"]
    _judge(session["turns"][2], prompt(*before), prompt(*now))


def test_tools_in_another_order_and_messages_taken_back() -> None:
    other = 'tools: [{"name": "write"}, {"name": "read"}]'
    (session,) = told(prompt(TOOLS, *TALK), prompt(other, *TALK), prompt(other, *TALK[:-2]))
    assert [turn["break"]["what"] for turn in session["turns"][1:]] == [
        "another order",
        "by 2 messages",
    ]
    assert session["turns"][2]["break"]["again"] == 0  # nothing behind it was there before


def test_what_is_gone_and_another_model_break_a_prefix_that_is_the_same() -> None:
    long = "x" * 400
    (first, other) = told(
        prompt(*TALK),
        prompt(long, session="T"),
        prompt(*TALK, "More"),
        prompt(long, "more", session="T"),
        capacity=700,
    )
    for session in (first, other):
        assert breaks(session) == [(2, "gone")]
        broke = session["turns"][1]["break"]
        assert broke["what"] == "evicted" and 0 < broke["again"] < broke["computed"]
    (session,) = told(prompt(*TALK), prompt(*TALK, "More", model="n"))
    assert breaks(session) == [(2, "namespace")] and "now 'n'" in session["turns"][1]["break"]["what"]


def test_requests_without_a_session_are_held_against_the_one_that_they_part_from() -> None:
    hello = ("system: Be good at it.", "Hello")
    given = [
        prompt(*hello, session=None),
        prompt(*TALK, session=None),
        prompt(*KINDS["date"][1], session=None),
    ]
    (session,) = told(*given)
    assert breaks(session) == [(3, "date")]  # the second has nothing to do with the first


def test_of_many_breaks_some_are_named() -> None:
    said, given = ["Begin"], []
    for number in range(400):
        said = said[: number % 5 + 1] if number % 3 == 2 else said
        said = [*said, f"message number {number}"]
        given.append(prompt(*said))
    (session,) = told(*given)
    assert len(breaks(session)) > 60
    drawn = session_figure(session)
    assert len(drawn.layout.shapes) == len(breaks(session))
    assert 5 < len(drawn.layout.annotations) <= 21


def test_long_sessions_are_bounded_and_nothing_else_is_counted_for_them() -> None:
    rng, turns, said = random.Random(3), Turns(), ["Begin"]
    history = History(Cache())
    for number in range(MOST_TURNS + 20):
        if number % 9 == 8:  # goes back
            said = said[: rng.randrange(1, len(said) + 1)]
        said.append(f"{number}")
        each = prompt(*said[-60:])
        turns.add(each, history.serve(Entry(f"line {number}", each.ids, session="S")))
    (session,) = turns.report()
    assert (len(session["turns"]), session["more"]) == (MOST_TURNS, 20)
    assert session["runs_more"] > 0
    numbers = {run["run"] for run in session["runs"]}
    assert len(numbers) >= MOST_RUNS and all(run["parent"] in numbers | {0} for run in session["runs"])
    assert "left out" in session_dot(session)


def test_no_session_no_part() -> None:
    turns, history = Turns(), History(Cache())
    blocks = Tokenized(
        LoggedRequest("log", 1, "line 1", "mooncake", blocks=(1, 2)), np.array([1, 2]), np.array([])
    )
    turns.add(blocks, history.serve(Entry("line 1", blocks.ids)))
    assert turns.report() == []


# ---------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A transcript's page, and one of a log that wishes harm."""
    folder = tmp_path_factory.mktemp("why")
    found = {}
    for kind in transcripts.MAKERS:
        path = transcripts.write(folder / f"{kind}.jsonl", kind, turns=TURNS, size=SIZE)
        found[kind] = folder / f"{kind}.html"
        assert main(["why", str(path), "--all", "--html", str(found[kind])]) == 0
    tools = [{"name": EVIL}, {"name": "b"}]
    records = []
    for number in range(12):
        tools = tools[::-1] if number % 5 == 4 else tools
        messages = [{"role": "user", "content": f"{at} {EVIL}"} for at in range(number + 1)]
        records.append({"model": EVIL, "tools": tools, "messages": messages, "session_id": EVIL})
    path = folder / "evil.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    found["evil"] = folder / "evil.html"
    assert main(["why", str(path), "--all", "--html", str(found["evil"])]) == 0
    return found


BOXES = """selector => [...document.querySelectorAll(selector)].map(e => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom, e.textContent];
})"""


def _apart(boxes: Sequence[Sequence[float]]) -> bool:
    return all(
        a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        for number, a in enumerate(boxes)
        for b in boxes[:number]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", transcripts.MAKERS)
def test_a_session_is_read_on_the_first_screen(kind, pages, tab):  # noqa: F811
    tab.goto(pages[kind].as_uri())
    tab.wait_for_selector("section .annotation-text")
    names = tab.evaluate(BOXES, "section .annotation-text")
    assert {box[4].partition(":")[0] for box in names} == {"compactionturn 67", "compactionturn 134"}
    chart = tab.evaluate(BOXES, "section .plotly-graph-div")[0]
    assert chart[3] <= 800 and chart[0] >= 0 and chart[2] <= 1280
    assert all(chart[0] <= box[0] and box[2] <= chart[2] and chart[1] <= box[1] for box in names)
    assert _apart(names)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280
    cards = tab.evaluate(BOXES, "section .tree g.node")
    assert len(cards) >= 4 and _apart(cards)
    frame = tab.evaluate(BOXES, "section .tree")[0]
    assert all(frame[0] <= box[0] and box[2] <= frame[2] for box in cards)
    assert sum("compaction" in box[4] and "computed" in box[4] for box in cards) == 2


@pytest.mark.slow
def test_a_log_that_wishes_harm_is_text(pages, tab):  # noqa: F811
    tab.goto(pages["evil"].as_uri())
    tab.wait_for_selector("section .annotation-text")
    assert tab.evaluate("window.broken") is None
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in tab.evaluate("document.querySelector('section h2').textContent")
    assert any("the tools changed" in box[4] for box in tab.evaluate(BOXES, "section .tree g.node"))


def test_a_report_without_sessions_is_drawn(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n', encoding="utf-8")
    report = report_of(path, capsys)
    assert report["sessions"] == []
    write_html(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "nothing that was tried saves anything" in text and "<section>" not in text


@pytest.mark.parametrize("kind", BREAKS)
def test_every_kind_has_a_card(kind: str) -> None:
    broke = {"kind": kind, "what": EVIL * 3, "computed": 5, "again": 1}
    run = {"first": 2, "last": 4, "turns": 2, "tokens": 9, "parts": 9, "names": [EVIL, ""], "end": "\x00"}
    session = {"turns": [{}, {"break": broke}], "runs": [{"run": 1, "parent": 0, **run}], "runs_more": 0}
    text = session_dot(session)
    assert BREAKS[kind] in text and EVIL not in text and "<img" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", transcripts.MAKERS)
def test_ten_megabytes_are_read(kind: str, tmp_path: Path, capsys: Any) -> None:
    """How long that takes stands in minirad/bench/LOG.md."""
    path = transcripts.write(tmp_path / "session.jsonl", kind, turns=300, compactions=6, size=10_000_000)
    assert main(["why", str(path)]) == 0
    assert "compaction: " in capsys.readouterr().out
