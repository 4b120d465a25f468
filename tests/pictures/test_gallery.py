"""The pages of a lecture: each policy's story has its own victim, every page is one file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import refuses_a_file_as_out

from minirad.cache.eviction import POLICIES
from minirad.observe import events as ev
from minirad.observe.recording import Recording
from viz import gallery, stories
from viz.draw.dot import DotError, find_dot
from viz.gallery import VISITS, Story, tell
from viz.trace import Trace

pytestmark = pytest.mark.slow

EXPECTED = {
    "lru": "Who are you?",
    "lfu": "Good morning",
    "fifo": "Hello",
    "mru": "Tell me a story about a cat.",
    "filo": "What day comes after Monday?",
    "priority": "Repeat: apple river",
    "slru": "Name a fruit.",
    "brrip": "Good morning",
}


@pytest.fixture(scope="module")
def told() -> dict[str, Story]:
    return {policy: tell(policy) for policy in POLICIES}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_dot()
    except DotError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("gallery") / "pages"
    gallery.write(out, ["fifo"])
    return out


def test_every_policy_has_its_victim(told: dict[str, Story]) -> None:
    assert set(told) == set(EXPECTED) == set(gallery.RULES)
    for policy, story in told.items():
        assert [text for text, _ in story.victims] == [EXPECTED[policy]], policy


def test_requests_and_pool_are_the_same(told: dict[str, Story]) -> None:
    lru = told["lru"]
    for policy, story in told.items():
        assert story.labels == lru.labels and story.kv_tokens == lru.kv_tokens
        config = story.recording.header["config"]
        assert (config["eviction_policy"], config["kv_tokens"]) == (policy, lru.kv_tokens)
    assert list(lru.labels.values()) == [v.question for v in VISITS for _ in range(v.times)]


def test_before_the_last_question_all_trees_are_equal(told: dict[str, Story]) -> None:
    trees = []
    for story in told.values():
        trace = Trace(story.recording)
        assert trace.count("scene") == len(VISITS) + 1
        view = trace.view("scene", len(VISITS) - 1)
        trees.append({trace.node_text(node): node["parent"] for node in view.nodes.values()})
    assert all(tree == trees[0] for tree in trees)
    assert len(trees[0]) == 1 + len({visit.question for visit in VISITS[:-1]})  # no leaf shares more than S


def test_each_policy_keeps_other_leaves_when_visitors_come_back() -> None:
    runs = {policy: stories.encore(policy) for policy in POLICIES}
    assert {policy: story.victims[0][0] for policy, story in runs.items()} == EXPECTED
    asked = {stories.returned(story)[1] for story in runs.values()}
    found = {policy: stories.returned(story)[0] for policy, story in runs.items()}
    assert found.pop("brrip") == found["lfu"]  # so few ticks are less than a lease: hits alone count
    assert len(asked) == 1 and len(set(found.values())) == len(found), found
    assert max(found, key=found.__getitem__) == "lfu" and min(found, key=found.__getitem__) == "lru"
    page = gallery.policies_html([runs["lru"], runs["lfu"]])
    assert 'class="first"' in page and page.count("✕ 1 ●") == 2
    assert "(boxed)" in page
    both = gallery.policies_html([runs["lfu"], runs["mru"], runs["brrip"]])
    assert "(boxed; lfu and brrip take the same)" in both
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two trees of one page share an id"


def test_the_host_tier_brings_back_what_was_demoted() -> None:
    trace = Trace(stories.host_tier().recording)
    events = [e for frame in trace.recording for e in frame.events]
    loads = [e for e in events if isinstance(e, ev.LoadStarted)]
    assert len(loads) == 2 and any(isinstance(e, ev.HostEvicted) for e in events)
    came_back = trace.view("scene", 6)
    assert [came_back.status[n] for n in loads[0].nodes] == ["loaded"]
    assert "host" in came_back.status.values() and "demoted" in came_back.status.values()


def test_a_changed_policy_has_other_victims() -> None:
    story = stories.policy_change()
    changes = [e for f in story.recording for e in f.events if isinstance(e, ev.PolicyChanged)]
    assert [(e.old, e.new) for e in changes] == [("lru", "lfu")]
    assert story.victims[0][0] == stories.ONE, "lru: who is asked for most"
    assert stories.ONE not in [text for text, _ in story.victims[2:]], "lfu keeps it"
    last = [e for f in story.recording for e in f.events if isinstance(e, ev.RequestAdmitted)][-1]
    assert last.matched == last.length


def test_new_weights_match_nothing_of_the_old_ones() -> None:
    trace = Trace(stories.new_weights().recording)
    before, bumped, after = (trace.view("scene", n) for n in (3, 4, 5))
    old = set(before.nodes)
    assert {bumped.status[n] for n in old} == {"stale"} and "stale" not in before.status.values()
    admitted = [e for e in bumped.events if isinstance(e, ev.RequestAdmitted)]
    assert [e.matched for e in admitted] == [0]
    assert {n for n, word in after.status.items() if word == "hit"}.isdisjoint(old)


def test_every_page_is_one_file(pages: Path) -> None:
    names = {path.name for path in pages.iterdir()}
    assert names == {
        "index.html", "nine_steps.html", "nine_steps.svg", "nine_steps.png", "policy_fifo.html",
        "policies.html", "host_tier.html", "policy_change.html", "new_weights.html",
    }  # fmt: skip
    for path in pages.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "Content-Security-Policy" in text and "default-src 'none'" in text
        fetched = re.findall(r'<(?:script|img|link|iframe)[^>]*\s(?:src|href)="([^"]*)"', text)
        assert [address for address in fetched if not address.startswith("data:")] == []


def test_the_index_leads_to_every_page(pages: Path) -> None:
    text = (pages / "index.html").read_text(encoding="utf-8")
    targets = {link.partition("#")[0] for link in re.findall(r'<a href="([^"]*)"', text)}
    assert targets == {path.name for path in pages.iterdir()} - {"index.html"}
    back = (pages / "policies.html").read_text(encoding="utf-8")
    assert 'href="index.html"' in back and 'href="policy_fifo.html#' in back
    assert "Hello</td>" in text and "first unlocked leaf to come in" in text  # the victim, and why


def test_the_index_escapes() -> None:
    story = Story("<lru>", Recording({}), {}, 9, (("<script>", "a & b"),))
    row = gallery._story_row(story)
    assert "<script>" not in row and "&lt;script&gt;" in row and "a &amp; b" in row and "<lru>" not in row


def test_without_dot_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_dot(*_: Any) -> Any:
        raise DotError("no Graphviz found")

    monkeypatch.setattr(gallery, "write", no_dot)
    assert gallery.main(["--out", str(tmp_path)]) == 2
    assert "no Graphviz found" in capsys.readouterr().err


# ---------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("MINIRAD_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("page", "node"),
    [
        ("index.html", "#step9-n1"),
        ("nine_steps.html#scene=9", "#n1"),
        ("policy_fifo.html#scene=10", "#n1"),
        ("host_tier.html#scene=7", "#n3.loaded"),
        ("policies.html", "#fifo-n1.evicted"),
        ("new_weights.html#scene=4", "#n1.stale"),
        ("policy_change.html#scene=8", "#n6"),
    ],
)
def test_pages_open_from_disk(pages: Path, browser: Any, page: str, node: str) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    problems: list[str] = []
    requests: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    name, _, place = page.partition("#")
    tab.goto((pages / name).as_uri() + (f"#{place}" if place else ""))
    tab.wait_for_selector(node, state="attached", timeout=60_000)
    assert problems == []
    assert [url for url in requests if not url.startswith("data:")] == [requests[0]]
    tab.close()


@pytest.mark.browser
def test_the_victim_is_shown(pages: Path, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto((pages / "index.html").as_uri())
    tab.click('a[href^="policy_fifo.html"]')
    tab.wait_for_selector("#n1", state="attached", timeout=60_000)
    assert "evicted" not in (tab.get_attribute("#n1", "class") or "")
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector("#n1.evicted", state="attached", timeout=60_000)  # Hello came first
    tab.close()


def test_an_out_that_is_a_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses_a_file_as_out(gallery.main, "viz.gallery", tmp_path, capsys)
