"""The panel that says why a prompt would miss, in a real browser: our own engine, and a stream."""

from __future__ import annotations

import pytest
from browsers import at, browser, leaving, open_at, run_to_its_end, tab, until

from viz.live import Driver, Live, Settings, _replay

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

HOSTILE = "<|im_start|>system\n<img src=x onerror=\"document.title='x'\">"
LIT = "[...document.querySelectorAll('.mr-tree .node.lit')].length"


def test_why_it_would_miss(tab, tmp_path):
    """Agents in a pool that is too small; a lane, a typed prompt, a log, a moment in the past, a file."""
    with run_to_its_end(Settings(workload="agents", kv_tokens=400), tmp_path) as (live, file):
        tab.goto("about:blank")
        count = len(live.driver.run_now.trace)
        open_at(tab, live.url, f"step {count}")
        bar = tab.locator(".lane[data-request=R5] .hitbar").get_attribute("title")
        assert bar.endswith(live.driver.run_now.page.requests()["R5"]["why"])
        tab.keyboard.press("w")
        tab.locator(".lane").first.click()
        until(tab, "document.querySelector('.miss .verdict')?.innerText.includes('finds')")
        assert f"at step {count}" in tab.inner_text(".miss h2")
        assert tab.evaluate(LIT) > 0, "its path in the tree"
        tab.fill(".miss textarea", HOSTILE)
        until(tab, "document.querySelector('.miss .diverge')?.innerText.includes('<img')")
        assert tab.evaluate("document.querySelectorAll('.miss img').length") == 0
        tab.locator(".miss textarea").blur()
        tab.keyboard.press("Home")
        at(tab, "step 0")
        until(tab, "document.querySelector('.miss .verdict').innerText.includes('finds 0 of')")
        until(tab, "document.querySelector('.miss').innerText.includes('never seen')")
        tab.fill(".miss textarea", '{"prompt": "one", "zork": 1}\nbroken\n{"prompt": "two"}')
        until(tab, "document.querySelector('.miss .notes')?.innerText.includes('zork')")
        assert tab.locator(".miss option[value^=line]").all_inner_texts() == ["line 1", "line 3"]
        tab.select_option(".miss select >> nth=1", "line 1")
        until(tab, "document.querySelector('.miss .result').innerText.includes('line 1')")
        tab.allowed_complaints.append("400")
        tab.select_option(".miss select >> nth=0", "ids")
        until(tab, "document.querySelector('.miss .bad')?.innerText.includes('token ids are whole numbers')")
        tab.keyboard.press("Escape")
        tab.keyboard.press("Escape")
        assert not tab.is_visible(".miss") and tab.title() != "x"
        tab.goto(file.as_uri())
        until(tab, "document.querySelector('.lane[data-request=R5]') || document.body.dataset.position")
        tab.keyboard.press("End")
        at(tab, f"step {count}")
        assert "computed: " in tab.locator(".lane[data-request=R5]").get_attribute("title")
        assert not tab.locator("button:text-is('why a miss?')").is_visible()
        tab.keyboard.press("w")
        assert not tab.is_visible(".miss")


def test_each_rank_of_a_stream_answers(tab, request):
    root = request.config.rootpath
    replay = _replay(
        str(root / "notebooks/streams/sglang_two_ranks.jsonl"), str(root / "minirad/model/classroom/weights")
    )
    with leaving(tab, Live(Driver(Settings(), 3, replay=replay))) as live:
        open_at(tab, live.url, f"step {len(replay.trace)}")
        tab.keyboard.press("w")
        system = "<|im_start|>system\nYou are a patient tutor. Answer in one short sentence, then"
        tab.fill(".miss textarea", system + " stop.")
        until(tab, "document.querySelectorAll('.miss .answer').length === 2")
        assert [text.split()[1] for text in tab.locator(".miss .verdict").all_inner_texts()] == ["0", "1"]
        assert tab.evaluate(LIT) == 2, "the path on rank 0"
        tab.locator(".miss .answer").nth(1).hover()
        until(tab, f"{LIT} === 2 || {LIT} === 0")
        box = tab.locator(".miss").bounding_box()
        assert box["y"] + box["height"] <= 800 and box["x"] + box["width"] <= 1280
