"""The nine panels as a picture: what is in the SVG, that all text is escaped, that files are written."""

from __future__ import annotations

import copy
import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support import refuses_a_file_as_out

from minirad.figure3 import Panel, run
from minirad.observe.recording import Recording
from viz import figure3
from viz.draw.dot import DotError, find_dot
from viz.trace import Trace

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "<script>alert(\"1\")</script> & 'x' \x00\x1b\u202e]]> 🎈 שלום\n<|im_end|>"


@pytest.fixture(scope="module", autouse=True)
def dot() -> None:
    try:
        find_dot()
    except DotError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def story() -> tuple[Recording, list[Panel]]:
    return run()


@pytest.fixture(scope="module")
def page(story: tuple[Recording, list[Panel]]) -> figure3.Sheet:
    return figure3.lay_out(*story)


@pytest.fixture(scope="module")
def drawn(page: figure3.Sheet) -> ET.Element:
    return ET.fromstring(figure3.page_svg(page))


def groups(drawn: ET.Element) -> dict[str, set[str]]:
    """Id of every drawn node and edge -> its classes."""
    return {
        group.attrib["id"]: set(group.attrib.get("class", "").split())
        for group in drawn.iter(f"{SVG}g")
        if "id" in group.attrib
    }


def test_every_node_is_drawn_in_its_state(drawn: ET.Element, story: tuple[Recording, list[Panel]]) -> None:
    found = groups(drawn)
    for panel in story[1]:
        step = f"step{panel['step']}"
        for node in panel["nodes"]:
            assert node["state"] in found[f"{step}-n{node['id']}"]
        for node in panel["evicted"]:
            assert "evicted" in found[f"{step}-n{node['id']}"]
        here = [name for name in found if re.fullmatch(rf"{step}-n[1-9]\d*", name)]
        assert len(here) == len(panel["nodes"]) + len(panel["evicted"])


def test_ids_are_unique_and_sizes_fit(drawn: ET.Element, page: figure3.Sheet) -> None:
    ids = [element.attrib["id"] for element in drawn.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert len(page.boxes) == 9
    for block in page.blocks:
        width, height = figure3.size(block.dot)
        assert block.x + width <= figure3.PAGE and block.y + height <= page.height
    trees = page.blocks[2:-1:2]
    for box, tree in zip(page.boxes, trees, strict=True):
        width, height = figure3.size(tree.dot)
        assert tree.x >= box.x and tree.x + width <= box.x + box.width
        assert tree.y >= box.y and tree.y + height <= box.y + box.height


def test_letters_titles_and_counts_are_there(drawn: ET.Element, story: tuple[Recording, list[Panel]]) -> None:
    words = [(text.text or "").strip("\u00a0 ") for text in drawn.iter(f"{SVG}text")]
    letters = [n["label"] for p in story[1] for n in [*p["nodes"], *p["evicted"]] if n["label"]]
    for letter in "bcdeghijkl":
        assert words.count(letter) == letters.count(letter) > 0
    everything = " ".join(words)
    for panel in story[1]:
        assert f"({panel['step']}) {panel['title']}" in everything
        assert f"{panel['kv_used']} of {panel['kv_capacity']} KV slots" in everything


def test_victims_hang_where_they_hung(story: tuple[Recording, list[Panel]]) -> None:
    recording, panels = story
    view = Trace(recording).view("scene", 8)
    dot = figure3.tree_dot(panels[7], view.ghosts, {})
    h, g = (node["id"] for node in panels[7]["evicted"])
    s = panels[7]["nodes"][0]["id"]
    assert f"n{s} -> n{g} " in dot and f"n{g} -> n{h} " in dot


def test_the_same_panel_gives_the_same_text(story: tuple[Recording, list[Panel]]) -> None:
    panel = story[1][6]
    assert figure3.tree_dot(panel, {}, {}) == figure3.tree_dot(copy.deepcopy(panel), {}, {})


def test_all_text_is_escaped(story: tuple[Recording, list[Panel]]) -> None:
    recording, panels = story[0], copy.deepcopy(story[1])
    for panel in panels:
        panel["title"] = NASTY
        for node in [*panel["nodes"], *panel["evicted"]]:
            node["text"], node["label"] = NASTY, "<b>"
    text = figure3.page_svg(figure3.lay_out(recording, panels))
    drawn = ET.fromstring(text)
    assert not list(drawn.iter(f"{SVG}script")) and "<script" not in text and "\u202e" not in text
    assert any("<script>" in (element.text or "") for element in drawn.iter(f"{SVG}text"))


def test_it_fetches_nothing(page: figure3.Sheet) -> None:
    text = figure3.page_svg(page)
    assert not re.search(r"href=|url\(|src=|@import", text)


def test_a_deep_tree_is_made_to_fit() -> None:
    page = figure3.lay_out(*run(kv_tokens=1024))  # nothing is evicted: chat 1 is four nodes deep
    scales = [block.scale for block in page.blocks]
    assert min(scales) < 1 and scales.count(1.0) > 12
    for block in page.blocks:
        assert block.x + figure3.size(block.dot)[0] * block.scale <= figure3.PAGE
    ET.fromstring(figure3.page_svg(page))


def test_card_lines() -> None:
    assert figure3.card_lines("Hello", 20, 2) == ["Hello"]
    assert figure3.card_lines("\n", 20, 2) == ["¶"]
    assert figure3.card_lines("<|im_end|>\n<|im_start|>user\nHi", 20, 3) == ["■ ►user: Hi"]
    assert figure3.card_lines("a\nb\nc\nd", 20, 2) == ["a…", "d"]
    assert figure3.card_lines("a\nb\nc\nd", 20, 1) == ["d"]
    for count in (1, 2, 3):
        lines = figure3.card_lines("many words " * 9 + "\n" + "and more " * 9 + "\nx\ny", 20, count)
        assert len(lines) == count and all(len(line) <= 20 for line in lines)


def test_png(page: figure3.Sheet) -> None:
    image = Image.open(io.BytesIO(figure3.page_png(page, dpi=72)))
    assert abs(image.width - figure3.PAGE) <= 1 and abs(image.height - page.height) <= 1
    colours = image.convert("RGB").getcolors(1 << 20)
    assert colours is not None and len(colours) > 20


@pytest.mark.parametrize(
    "options", [["--eviction-policy", "mru", "--page-size", "4"], ["--kv-tokens", "100"]]
)
def test_files_of_other_stories(options: list[str], tmp_path: Path) -> None:
    assert figure3.main(["--out", str(tmp_path / "new" / "folder"), "--record", *options]) == 0
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"nine_steps.svg", "nine_steps.png", "nine_steps.jsonl"}
    recording = Recording.load(tmp_path / "new" / "folder" / "nine_steps.jsonl")
    assert sum(frame.scene is not None for frame in recording) == 9
    ET.parse(tmp_path / "new" / "folder" / "nine_steps.svg")


def test_a_story_in_which_all_is_refused_is_no_success(tmp_path: Path) -> None:
    assert figure3.main(["--out", str(tmp_path), "--kv-tokens", "10"]) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_bad_setting_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figure3.main(["--out", str(tmp_path / "x"), "--kv-tokens", "0"]) == 2
    assert "kv_tokens" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_without_dot_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_dot(*_: Any) -> Any:
        raise DotError("no Graphviz found")

    monkeypatch.setattr(figure3, "run", no_dot)
    assert figure3.main(["--out", str(tmp_path)]) == 2
    assert "no Graphviz found" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses_a_file_as_out(figure3.main, "viz.figure3", tmp_path, capsys)
