"""The panel of drafts in a real browser: stage after stage, back again, and beside the other cards."""

from __future__ import annotations

import pytest
from browsers import at, browser, cards_lie_apart, open_at, run_to_its_end, tab

from minirad.observe import events as ev
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from viz.live import Settings

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

FATES = """[...document.querySelectorAll('.draftline.on .tok')].map(t => t.dataset.fate ?? 'own')"""
MARKED = "[...document.querySelectorAll('.pool i[data-draft]')]"
CELLS = f"{MARKED}.map(c => [Number(c.dataset.page), c.dataset.draft])"
LIT = "[...document.querySelectorAll('.pool i.lit')].map(c => Number(c.dataset.page))"
STAGE = "document.querySelector('.stages .on')?.dataset.stage ?? ''"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    with run_to_its_end(Settings(workload="drafts", speculative="eagle"), folder) as both:
        yield both


@pytest.fixture(scope="module")
def drafted(served):
    """(position by event, step, event) of the first draft of which some tokens hold and some do not."""
    trace, offset = served[0].driver.run_now.trace, 0
    for index, frame in enumerate(trace.recording.frames):
        for place, event in enumerate(frame.events):
            if isinstance(event, DraftVerified) and 0 < event.accepted < event.drafted:
                assert isinstance(frame.events[place - 1], TokensDrafted)
                assert isinstance(frame.events[place + 1], ev.SlotsFreed)
                return offset + place, index + 1, frame.events[place - 1]
        offset += len(frame.events)
    raise AssertionError("no draft was accepted in part")


def test_stage_after_stage_and_back(tab, served, drafted):
    position, _, event = drafted
    open_at(tab, served[0].url, f"event {position - 1}")
    seen = []
    for place in range(position - 1, position + 3):
        at(tab, f"event {place}")
        mine = {page: fate for page, fate in tab.evaluate(CELLS) if page in event.slots}
        seen.append((tab.evaluate(STAGE), tab.evaluate(FATES), mine, tab.inner_text(".draftsums")))
        tab.keyboard.press("ArrowRight")
    count, (_, judged, cells, _) = len(event.slots), seen[2]
    assert seen[1][:3] == ("draft", ["held"] * count, dict.fromkeys(event.slots, "held"))
    accepted = judged.count("accepted")
    assert seen[2][0] == "verify" and 0 < accepted < count and judged[-1] == "own"
    assert list(cells.values()).count("accepted") == accepted
    assert {cells[slot] for slot in event.slots[accepted:]} == {"rejected"}
    assert seen[3][0] == "return" and {seen[3][2][slot] for slot in event.slots[accepted:]} == {"returned"}
    struck = tab.locator(".draftline .tok[data-fate=rejected]").first
    assert "line-through" in struck.evaluate("e => getComputedStyle(e).textDecorationLine")
    at(tab, f"event {position + 3}")
    for place in range(position + 2, position - 2, -1):
        tab.keyboard.press("ArrowLeft")
        at(tab, f"event {place}")
        mine = {page: fate for page, fate in tab.evaluate(CELLS) if page in event.slots}
        again = tab.evaluate(STAGE), tab.evaluate(FATES), mine, tab.inner_text(".draftsums")
        assert again == seen[place - position + 1]


def test_a_cell_says_whose_draft_it_is_and_a_line_lights_its_cells(tab, served, drafted):
    position, _, event = drafted
    open_at(tab, served[0].url, f"event {position + 1}")
    tab.locator(f".pool i[data-page='{event.slots[-1]}']").dispatch_event("pointerover")
    assert f"{event.request}: a rejected draft" in tab.inner_text(".tip")
    tab.locator(".draftline.on").dispatch_event("pointerenter")
    assert set(event.slots) <= set(tab.evaluate(LIT))


@pytest.mark.parametrize("size", [(1280, 800), (800, 900)])
def test_it_lies_beside_the_other_cards(tab, served, drafted, size):
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    open_at(tab, served[1].as_uri(), f"step {drafted[1]}")  # the file has it, too
    assert tab.locator(".draftline").count() >= 1 and "acceptance length" in tab.inner_text(".draftsums")
    if size[0] > 900:
        cards_lie_apart(tab, size)
        tab.keyboard.press("p")
        cards_lie_apart(tab, size)
    else:
        assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    line, card = (tab.locator(name).first.bounding_box() for name in (".draftline", ".draftcard"))
    assert line["x"] >= card["x"] and line["x"] + line["width"] <= card["x"] + card["width"]


def test_a_page_without_drafts_is_as_it_was(tab, tmp_path):
    with run_to_its_end(Settings(workload="raw"), tmp_path) as (_, file):
        open_at(tab, file.as_uri(), "step 3")
        assert not tab.locator(".draftcard, .poolkeys").first.is_visible()
        assert not tab.evaluate("document.body.classList.contains('drafting')")


def test_forced_tokens_are_marked_in_the_panel_the_pool_and_the_lane(tab, tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    with run_to_its_end(Settings(workload="records", jump_forward=True), tmp_path) as (served, file):
        trace, offset = served.driver.run_now.trace, 0
        for index, frame in enumerate(trace.recording.frames):
            for place, event in enumerate(frame.events):
                if isinstance(event, TokensForced) and len(event.tokens) > 5:
                    found = offset + place + 1, index + 1, event
            offset += len(frame.events)
        position, step, event = found
        open_at(tab, served.url, f"event {position}")
        assert tab.inner_text(".draftcard h2 span") == "Forced tokens" and tab.evaluate(STAGE) == "force"
        assert set(tab.evaluate(FATES)) == {"forced"}
        mine = {page: fate for page, fate in tab.evaluate(CELLS) if page in event.slots}
        assert mine == dict.fromkeys(event.slots, "forced")
        tab.locator(f".pool i[data-page='{event.slots[0]}']").dispatch_event("pointerover")
        assert f"{event.request}: forced by the grammar" in tab.inner_text(".tip")
        visible = tab.locator(".draftkeys .tok:visible, .poolkeys .key:visible").all_inner_texts()
        assert visible == ["forced", "the model's own", "forced"]  # of drafts nothing is said
        open_at(tab, file.as_uri(), f"step {step}")
        assert "tokens forced" in tab.inner_text(".draftsums") and "drafted" not in tab.inner_text(
            ".draftsums"
        )
        assert tab.locator(f".lane[data-request='{event.request}'] .force").count() >= 1
        assert "nothing forced" in tab.inner_text(".draftlines") or tab.locator(".draftline").count() == 1
        cards_lie_apart(tab, (1280, 800))
