"""The live page and an exported file in a real browser: what is seen, and that nothing leaves the house."""

from __future__ import annotations

import json
import re
import statistics
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
from browsers import (
    SEEK,
    at,
    break_at,
    browser,
    cards_lie_apart,
    leaving,
    open_at,
    run_to_its_end,
    submitted,
    tab,
    until,
    until_idle,
)

from minirad import own_code
from minirad.cache.eviction import POLICIES
from minirad.fleet.endpoints import free_ports
from minirad.observe.recorder import Recorder
from minirad.own_policy import join
from viz import live
from viz.live import Driver, Live, Replay, Settings

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

GROUPS = "[...document.querySelectorAll('.mr-tree g.node, .mr-tree g.edge')]"
IDS = f"{GROUPS}.map(g => g.id + ' ' + g.getAttribute('class'))"
POOL = "[...document.querySelectorAll('.pool i')].map(c => c.dataset.owner)"
WIDTHS = "s => { const e = document.querySelector(s); return [e.scrollWidth, e.clientWidth]; }"
LIT = "[...document.querySelectorAll('.pool i.lit')].map(c => Number(c.dataset.page))"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The mixed workload, run to its end, as a page and as an exported file."""
    with run_to_its_end(Settings(workload="mixed"), tmp_path_factory.mktemp("export")) as both:
        yield both


@pytest.fixture(params=["server", "file"])
def url(request, served):
    server, file = served
    return server.url if request.param == "server" else file.as_uri()


def first_mark(served, kind: str) -> int:
    return served[0].driver.run_now.trace.marks()[kind][0] + 1


def test_the_tree_is_shown(tab, url, served):
    index = first_mark(served, "evict")
    open_at(tab, url, f"step {index}")
    view = served[0].driver.run_now.trace.view("step", index)
    shown = set(tab.evaluate("[...document.querySelectorAll('.mr-tree g.node')].map(g => g.id)"))
    assert shown == {"n0", *(f"n{node}" for node in view.status)}
    for node, status in view.status.items():
        assert status in tab.get_attribute(f"#n{node}", "class").split()
    assert "evicted" in tab.inner_text(".say")
    assert tab.locator(".spoken").inner_text()


def test_stepping_back_restores_the_very_same_picture(tab, url, served):
    index = first_mark(served, "evict")
    open_at(tab, url, f"step {index - 2}")
    seen = {}
    for i in range(index - 2, index + 4):
        at(tab, f"step {i}")
        seen[i] = tab.evaluate(IDS), tab.evaluate(POOL), tab.inner_text(".say")
        tab.keyboard.press("ArrowRight")
    at(tab, f"step {index + 4}")
    for i in range(index + 3, index - 3, -1):
        tab.keyboard.press("ArrowLeft")
        at(tab, f"step {i}")
        assert (tab.evaluate(IDS), tab.evaluate(POOL), tab.inner_text(".say")) == seen[i]
    assert len({str(picture) for picture in seen.values()}) > 1


def test_pointing_at_a_node_lights_exactly_its_pages(tab, url, served):
    index = first_mark(served, "evict") - 1
    open_at(tab, url, f"step {index}")
    view = served[0].driver.run_now.trace.view("step", index)
    for number, node in list(view.nodes.items())[:6]:
        tab.locator(f"#n{number}").dispatch_event("pointerover")
        assert tab.evaluate(LIT) == sorted(node["slots"])
        assert tab.locator("#n0").evaluate("g => g.classList.contains('lit')") is False
    tab.locator("#n0").dispatch_event("pointerover")
    assert tab.evaluate(LIT) == []
    number, node = next(iter(view.nodes.items()))
    tab.locator(f".pool i[data-page='{node['slots'][0]}']").dispatch_event("pointerover")
    assert tab.evaluate(LIT) == sorted(node["slots"])
    assert "lit" in tab.get_attribute(f"#n{number}", "class").split()


def test_requests_and_events_are_brushed_too(tab, url, served):
    index = first_mark(served, "evict")
    open_at(tab, url, f"step {index}")
    trace = served[0].driver.run_now.trace
    state = trace.state("step", index)
    name, request = next((n, r) for n, r in state["requests"].items() if r["row"] >= 0)
    tab.locator(f".lane[data-request='{name}']").dispatch_event("pointerenter")
    lit = set(tab.evaluate("[...document.querySelectorAll('.mr-tree g.node.lit')].map(g => g.id)"))
    assert f"n{request['node']}" in lit
    assert set(request["slots"][request["protected"] :]) <= set(tab.evaluate(LIT))
    tab.locator(".events li", has_text="evicted").first.dispatch_event("pointerenter")
    lit = tab.evaluate("[...document.querySelectorAll('.mr-tree g.node.lit')].map(g => g.id)")
    assert len(lit) == 1 and "evicted" in tab.get_attribute(f"#{lit[0]}", "class")


def test_keys_and_jumps(tab, url, served):
    trace = served[0].driver.run_now.trace
    open_at(tab, url, "step 5")
    tab.keyboard.press("Home")
    at(tab, "step 0")
    tab.keyboard.press("e")
    evicts = trace.next_mark("step", 0, "evict")
    at(tab, f"step {evicts}")
    until(tab, f"location.hash === '#step={evicts}'")
    tab.keyboard.press("End")
    at(tab, f"step {trace.count() - 1}")
    tab.keyboard.press("Shift+S")
    at(tab, f"step {trace.marks()['split'][-1] + 1}")
    tab.keyboard.press("3")
    until(tab, "document.body.dataset.position.startsWith('scene')")
    if not url.startswith("file"):  # too many events for a file
        tab.keyboard.press("1")
        until(tab, "document.body.dataset.position.startsWith('event')")
        assert tab.locator(".events li.on").count() == 1
    tab.keyboard.press("2")
    tab.keyboard.press("Home")
    at(tab, "step 0")
    tab.keyboard.press(" ")
    until(tab, "Number(document.body.dataset.position.split(' ')[1]) >= 3")
    tab.keyboard.press(" ")
    assert tab.locator(".go.main").get_attribute("aria-label").startswith("Play")


def test_why_and_quiz(tab, url, served):
    index = first_mark(served, "evict")
    open_at(tab, url, f"step {index}")
    tab.click(".say .link")
    assert "evicted" in tab.inner_text(".why tr.victim")
    tab.keyboard.press("ArrowLeft")
    at(tab, f"step {index - 1}")
    tab.keyboard.press("q")
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector(".panel.quiz:not([hidden])")
    assert tab.evaluate("document.body.dataset.position") == f"step {index - 1}", "hidden until answered"
    victim = served[0].driver.run_now.page.view("step", index)["quiz"]
    if victim["ask"] == "victim":
        tab.locator(f"#n{victim['answer']}").dispatch_event("click")
    else:
        tab.fill(".panel.quiz input", str(victim["answer"]))
        tab.click("text=answer")
    at(tab, f"step {index}")
    assert "Right!" in tab.inner_text(".say") and "1 of 1 right" in tab.inner_text(".say")


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080), (800, 4000)])  # a narrow page scrolls
def test_nothing_overlaps_or_is_cut_off(tab, url, served, size):
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    open_at(tab, url, f"step {first_mark(served, 'retract')}")
    cards_lie_apart(tab, size)
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    last_page, card = (tab.evaluate(bottom.format(at)) for at in (".pool i:last-child", ".poolcard"))
    assert last_page <= card, "every page is seen"
    for selector in ("nav.bar", "header", ".ask .row"):
        if tab.locator(selector).is_visible():
            wide, room = tab.evaluate(WIDTHS, selector)
            assert wide <= room + 1


def test_waiting_is_seen_in_the_timeline(tab, url, served):
    page = served[0].driver.run_now.page
    request = max(page.requests().values(), key=lambda r: len(r["passed"]))
    frame, by = request["passed"][-1]
    open_at(tab, url, f"step {frame + 1}")
    lane = tab.locator(f".lane[data-request='{request['id']}']")
    assert lane.locator("b.pass").count() == len(request["passed"])
    assert f"↷{len(request['passed'])}" in lane.locator(".hitbar").inner_text()
    lane.locator("b.pass").last.dispatch_event("pointermove")
    assert f"passed over by {', '.join(by)}" in tab.inner_text(".tip")
    lane.locator("b.defer").first.dispatch_event("pointermove")
    assert request["defers"][0][2] in tab.inner_text(".tip")
    assert tab.locator(".lane.longest").count() == 1
    longest = tab.get_attribute(".lane.longest", "data-request")
    assert f"longest {longest}: " in tab.inner_text(".queue")
    known, shown = page.requests(), page.view("step", frame + 1)["requests"]
    since = {
        name: max(start for _, start, _ in known[name]["segs"] if start <= frame)  # a retraction begins anew
        for name, request in shown.items()
        if request["waiting"]
    }
    assert since[longest] == min(since.values())
    assert tab.locator(".events li", has_text="is passed over").count() >= 1


def test_the_doctor_on_the_page(tab, served):
    server, _ = served
    open_at(tab, server.url, "step 150")
    tab.keyboard.press("d")
    until(tab, "document.querySelector('.doctor .verdict')")
    tab.click(".doctor >> text=an example")
    until(tab, "document.querySelector('.doctor .verdict').innerText.includes('part at token 11')")
    assert tab.locator(".doctor mark.bad").all_inner_texts() == ["4", "5"]
    assert "Saves" in tab.inner_text(".cure") and "It is 09:15." in tab.inner_text(".cure .moved")
    tab.locator(".doctor textarea").first.focus()
    tab.locator(".doctor textarea").first.blur()
    names = [tab.locator(".lane").nth(n).get_attribute("data-request") for n in (0, 1)]
    for n in (0, 1):
        tab.locator(".lane").nth(n).dispatch_event("click")
        until(
            tab, f"[...document.querySelectorAll('.doctor select')][{n}].value === '{names[n].split('.')[0]}'"
        )
    text = tab.locator(".doctor textarea").first.input_value()
    assert text == server.driver.run_now.page.prompt_text(names[0])
    tab.fill(".doctor textarea >> nth=0", "<b>bold</b> one")
    tab.fill(".doctor textarea >> nth=1", "<b>bold</b> two")
    until(tab, "document.querySelector('.doctor .diverge code').innerText.includes('<b>bold</b>')")
    assert tab.locator(".doctor select").first.input_value() == "", "typed now"
    tab.fill(".doctor textarea >> nth=1", "<b>bold</b> one")
    until(tab, "document.querySelector('.doctor .verdict').innerText.startsWith('They are equal')")
    assert "B's own" not in tab.inner_text(".doctor .keys"), "what is not found, either, is equal"
    bar = tab.locator(".doctor .tokens i").evaluate_all(
        "all => all.map((one) => [one.title, +one.style.flexGrow])"
    )
    size = int(server.driver.run_now.page.trace.recording.header["start"]["tree"]["page_size"])
    total = sum(tokens for _, tokens in bar)
    found = (total - 1) // size * size
    assert [tokens for _, tokens in bar] == [each for each in (found, total - 1 - found, 1) if each]
    assert bar[-1][0] == "1 token: equal to A's, but the last token is always computed"
    assert tab.evaluate("document.body.dataset.position") == "step 150"
    tab.keyboard.press("Escape")  # out of the text
    tab.keyboard.press("Escape")
    assert not tab.is_visible(".doctor")


def test_a_file_offers_nothing_that_needs_an_engine(tab, served):
    _, file = served
    open_at(tab, file.as_uri(), "step 3")
    assert tab.inner_text("h1") == "minirad recording"
    for text in ("restart…", "doctor", "submit", "flush"):
        assert not tab.locator(f"button:text-is('{text}')").is_visible(), text
    tab.keyboard.press("d")
    assert not tab.is_visible(".doctor")
    assert "live" not in tab.title()


def test_only_ctrl_and_the_wheel_zoom_and_text_stays_readable(tab, url, served):
    tab.set_viewport_size({"width": 1280, "height": 800})
    open_at(tab, url, f"step {first_mark(served, 'retract')}")
    box = "document.querySelector('.mr-tree svg').getAttribute('viewBox')"
    before = tab.evaluate(box)
    wheel = """ctrl => {
        const e = new WheelEvent('wheel', {deltaY: -200, ctrlKey: ctrl, bubbles: true, cancelable: true});
        document.querySelector('.mr-tree').dispatchEvent(e);
        return e.defaultPrevented;
    }"""
    assert tab.evaluate(wheel, False) is False and tab.evaluate(box) == before
    assert tab.evaluate(wheel, True) is True and tab.evaluate(box) != before
    tab.keyboard.press("0")
    until(tab, f"{box} === '{before}'")
    smallest = """Math.min(...[...document.querySelectorAll('.mr-tree g.node text')].map(t =>
        parseFloat(t.getAttribute('font-size')) * t.getCTM().a))"""
    trace = served[0].driver.run_now.trace
    for index in range(5, trace.count(), 40):
        tab.evaluate(SEEK, index)
        at(tab, f"step {index}")
        assert tab.evaluate(smallest) >= 8.99


def test_a_prompt_is_text_and_never_markup(tab):
    driver = Driver(Settings(workload="none", kv_tokens=400), speed=0)
    with leaving(tab, Live(driver)) as server:
        tab.goto(server.url)
        at(tab, "step 0")
        tab.wait_for_selector(".drivable")
        tab.click(".ask .mode >> text=raw")
        tab.fill(".prompt", "<script>document.title='owned'</script> \"quotes\" & 😀 שלום")
        until(tab, "document.querySelector('.whatif').innerText.includes('would hit')")
        tab.click("text=submit")
        tab.wait_for_selector(".mr-tree g.node.new, .mr-tree g.node.cached, .mr-tree g.node.grown")
        assert "<script>" in tab.inner_text(".lanes")
        assert "<script>" in tab.locator(".mr-tree").evaluate("e => e.textContent")
        assert tab.title() != "owned" and tab.locator(".mr-tree script").count() == 0
        tab.locator("#n1").dispatch_event("pointerover")
        assert "<script>" in tab.inner_text(".tip pre") and "שלום" in tab.inner_text(".tip pre")
        tab.allowed_complaints.append("400")  # the browser's own note of the refusal
        tab.fill(".prompt", "word " * 900)
        until(tab, "document.querySelector('.whatif').innerText.includes('too long')")
        tab.click("text=submit")
        until(tab, "document.querySelector('.say').innerText.includes('more than the KV pool of 400')")
        tab.fill(".prompt", "<script>document")
        until(tab, "/^[1-9]\\d* of/.test(document.querySelector('.whatif').innerText)")
        assert tab.inner_text(".whatif mark").startswith("<script>")


def test_driving_restarting_and_going_back_while_it_runs(tab):
    driver = Driver(Settings(workload="chat"), speed=3)  # it does not end before it is paused
    with leaving(tab, Live(driver)) as server:
        tab.goto(server.url)
        until(tab, "Number(document.body.dataset.position?.split(' ')[1]) >= 6")
        tab.keyboard.press("ArrowLeft")
        until(tab, "document.querySelector('.status').innerText.includes('paused')")
        assert not driver.playing
        frozen = len(driver.run_now.trace)
        tab.click(".ask >> text=step")
        until(tab, f"document.body.dataset.position === 'step {frozen + 1}'")
        tab.click(".go.main")
        until(tab, "document.querySelector('.status').innerText.includes('running')")
        driver.command("speed", {"speed": 12}).result(60)
        tab.click("text=restart…")
        tab.select_option(".restart select >> nth=0", "raw")
        tab.select_option(".restart select >> nth=2", "mru")
        tab.click(".restart >> text=restart")
        until(tab, "document.querySelector('.chips').innerText.includes('mru')")
        until(tab, "document.querySelector('.status').innerText.includes('all requests done')", seconds=60)
        assert driver.run_now.number == 2 and driver.run_now.engine.config.eviction_policy == "mru"


def test_play_at_the_end_of_a_run_is_no_pause(tab):
    """The button says what it does: what is asked afterwards runs without another word."""
    driver = Driver(Settings(workload="chat"), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        tab.goto(server.url)
        at(tab, f"step {len(driver.run_now.trace)}")
        assert tab.get_attribute(".go.main", "title") == "Play (space)"
        with tab.expect_response("**/do/play"):
            tab.click(".go.main")
        assert driver.playing
        tab.fill(".prompt", "Who are you?")
        submitted(tab)
        until_idle(driver)
        at(tab, f"step {len(driver.run_now.trace)}")
        assert "Who are you?" in tab.locator(".lane").last.inner_text()


def test_an_engine_error_is_shown(tab, monkeypatch):
    driver = Driver(Settings(workload="chat"), speed=20)
    break_at(monkeypatch, 10)
    tab.allowed_complaints += ["ERR_", "Failed to load"]
    banner = "document.querySelector('.banner').innerText"
    with Live(driver) as server:
        tab.goto(server.url)
        until(tab, f"{banner}.includes('a broken promise. What it did until then can still be looked at')")
        at(tab, "step 10")  # it is drawn a moment after it is told
        tab.keyboard.press("ArrowLeft")
        at(tab, "step 9")
        assert tab.is_visible(".banner")
    until(
        tab, f"{banner}.includes('a broken promise. Its program has ended, too: what is not on view is gone')"
    )


def test_a_lost_connection_comes_back_with_history(tab, served):
    driver = Driver(Settings(workload="chat"), speed=0)
    tab.allowed_complaints += ["ERR_", "Failed to load"]
    port = free_ports(1)
    with Live(driver, port) as server:
        assert server.server.port == port
        tab.goto(server.url)
        until(tab, "document.querySelector('.status').innerText.includes('all requests done')", seconds=60)
        steps = len(driver.run_now.trace)
    until(tab, "document.querySelector('.status').innerText.includes('lost')")
    again = Driver(
        Settings(workload="none"), speed=0, replay=Replay(served[0].driver.run_now.recorder, "again")
    )
    with leaving(tab, Live(again, port=port)) as server:
        assert server.server.port == port
        more = len(again.run_now.trace)
        until(
            tab,
            f"document.querySelector('.status').innerText.includes('recording of {more} steps')",
        )
    assert more != steps


HASH = "location.hash"


def test_the_address_is_the_position(tab, url, served):
    last = served[0].driver.run_now.trace.count() - 1
    open_at(tab, url, "step 5")
    for asked, answer in (
        ("#step=99999", last),
        ("#step=-3", 0),
        ("#step=abc", 0),
        ("#step=7", 7),
        ("#x", 7),
    ):
        tab.evaluate(f"location.hash = '{asked}'")
        at(tab, f"step {answer}")
        until(tab, f"{HASH} === '#step={answer}'")
    tab.goto("about:blank")
    tab.goto(f"{url}#step=99999")
    at(tab, f"step {last}")
    until(tab, f"{HASH} === '#step={last}'")


def test_after_a_fork_the_address_is_of_the_new_run(tab):
    driver = Driver(Settings(workload="chat"), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        open_at(tab, server.url, "step 30")
        tab.get_by_role("button", name="restart…").click()
        tab.get_by_role("button", name="fork from step 30").click()
        start = time.monotonic()
        while driver.run_now.number == 1:
            assert time.monotonic() - start < 60
            tab.wait_for_timeout(10)
        until_idle(driver)
        last = driver.run_now.trace.count() - 1
        at(tab, f"step {last}")
        until(tab, f"{HASH} === '#step={last}'")
        tab.get_by_role("button", name="restart…").click()
        assert tab.input_value(".restart select >> nth=0") == "chat", "what a restart begins anew"


def test_a_restart_begins_a_workload_of_a_file_anew(tab, tmp_path):
    file = tmp_path / "mine.json"
    mine = {"name": "raw", "title": "Mine", "sessions": [{"turns": [{"text": "Who are you?"}]}]}
    file.write_text(json.dumps(mine), encoding="utf-8")
    driver = Driver(Settings(workload=str(file)), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        tab.goto(server.url)
        tab.get_by_role("button", name="restart…").click()
        assert tab.input_value(".restart select >> nth=0") == "mine.json"
        tab.select_option(".restart select >> nth=2", "mru")
        tab.click(".restart >> text=restart")
        until(tab, "document.querySelector('.restart').hidden")  # it has begun
        until_idle(driver)
        assert driver.run_now.number == 2 and driver.run_now.workload.title == "Mine"
        assert driver.run_now.engine.config.eviction_policy == "mru"


def test_refused_requests_are_seen(tab, tmp_path):
    driver = Driver(Settings(workload="chat", kv_tokens=40), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        tab.goto(server.url)
        until(tab, "document.querySelector('.refused').innerText.startsWith('4 of 4 requests refused: ')")
        until(tab, "document.querySelector('.status').innerText.includes('no request was taken')")
        from viz.web.export import export

        file = tmp_path / "run.html"
        export(driver.run_now.page, file)
        tab.goto(file.as_uri())
        until(tab, "document.querySelector('.refused').innerText.startsWith('4 of 4 requests refused: ')")


@pytest.mark.exhaustive
def test_how_quickly_a_click_is_answered(tab, served):
    server, _ = served
    index = first_mark(served, "evict")
    open_at(tab, server.url, f"step {index - 20}")
    times = []
    for i in range(index - 19, index + 20):
        tab.keyboard.press("ArrowRight")
        at(tab, f"step {i}")
        times.append(float(tab.evaluate("document.body.dataset.latency")))
        tab.wait_for_timeout(30)
    median = statistics.median(times)  # 50 on a quiet machine
    print(f"\nclick to new picture: {median:.0f} ms median, {max(times):.0f} ms at most")


def test_a_long_recording_scrubs(tab, make_engine):
    """Thousands of steps: opens at once, and any place in it is soon there."""
    import random

    from minirad.config import SamplingParams

    engine, rng = make_engine(kv_tokens=256), random.Random(0)
    recorder = Recorder(engine)
    while len(recorder.frames) < 3000:
        if len(engine.scheduler.waiting) < 2:
            prompt = [rng.randrange(3, 6) for _ in range(4)] + [rng.randrange(3, 60) for _ in range(8)]
            engine.add_request(prompt, SamplingParams(max_new_tokens=20))
        engine.step()
    recorder.close()
    driver = Driver(Settings(), speed=3, replay=Replay(recorder, "long"))
    with Live(driver) as server:
        open_at(tab, server.url, "step 1500")
        until(tab, "document.querySelector('.status').innerText.includes('3000')")
        times = []
        for _ in range(15):
            i = rng.randrange(3000)
            tab.evaluate(SEEK, i)
            at(tab, f"step {i}")
            times.append(float(tab.evaluate("document.body.dataset.latency")))
        tab.goto("about:blank")  # what it draws ahead is no longer asked for
        print(f"\n3000 steps: {statistics.median(times):.0f} ms median to any of them")


# ---------------------------------------------------------------------- a host tier, and another policy


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """A chat that does not fit on the device but on the host, as a page and as a file."""
    from viz import stories
    from viz.trace import Trace
    from viz.web.export import export_html
    from viz.web.page import Page

    story = stories.host_tier()
    file = tmp_path_factory.mktemp("export") / "tiers.html"
    export_html(Page(Trace(story.recording), story.labels), file, "tiers")
    return Trace(story.recording), file


HOST = "[...document.querySelectorAll('.pool.host i')].map(c => [c.dataset.owner, c.className])"


def test_host_memory_is_a_second_map(tab, tiered):
    trace, file = tiered
    from viz import kv

    for scene in (1, 4, 7):
        open_at(tab, file.as_uri(), f"scene {scene}")
        expected = kv.host_pages(trace.view("scene", scene))
        shown = tab.evaluate(HOST)
        assert [owner for owner, _ in shown] == [f"n{p.node}" if p.node else "" for p in expected]
        assert [look for _, look in shown] == [f"copy {p.tier}" if p.node else "" for p in expected]
        for node in trace.view("scene", scene).nodes.values():
            classes = tab.get_attribute(f"#n{node['id']}", "class")
            assert ("tier-host" in classes) == (node["slots"] == [])
    assert "9 loaded back" in tab.inner_text(".sums")
    assert tab.is_visible(".tiers") and tab.locator(".chart .hostline").count() == 1


def test_pointing_at_a_copy_lights_its_node(tab, tiered):
    _, file = tiered
    open_at(tab, file.as_uri(), "scene 7")
    owner, look = tab.evaluate(HOST)[40]
    assert look == "copy host", "it lies on the host only: no square of the device lights up"
    tab.hover(".pool.host i:nth-child(41)")
    until(tab, f"document.querySelector('#{owner}').classList.contains('lit')")
    assert tab.evaluate(LIT) and all(
        tab.evaluate(
            f"[...document.querySelectorAll('.pool.host i.lit')].map(c => c.dataset.owner === '{owner}')"
        )
    )
    assert "on the host only" in tab.inner_text(".tip")


def test_without_a_host_tier_there_is_no_trace_of_one(tab, url):
    open_at(tab, url, "step 3")
    for part in (".tiers", ".hostpart", ".hostline"):
        assert not tab.locator(part).first.is_visible(), part


def test_the_policy_is_changed_on_the_page(tab):
    driver = Driver(Settings(workload="none", kv_tokens=400), speed=0, paused=True)
    with leaving(tab, Live(driver)) as server:
        tab.goto(server.url)
        until(tab, "document.querySelector('.joined select')?.disabled === false")
        tab.select_option(".joined select", "lfu")
        until(tab, "document.querySelector('.events')?.innerText.includes('changed from lru to lfu')")
        assert driver.run_now.engine.cache.eviction_policy == "lfu"
        until(tab, "document.querySelector('.chip.changed')?.textContent === 'lpm · lfu'")


def test_a_large_pool_s_usage_can_be_seen(tab, tmp_path):
    """Drawn to the scale of the whole pool, 600 of 50,000 slots would be less than a pixel high."""
    file = tmp_path / "large.html"
    live.main(["--workload", "chat", "--kv-tokens", "50000", "--steps", "30", "--export", str(file)])
    open_at(tab, file.as_uri(), "step 30")
    boxes = (
        "[...document.querySelectorAll('.two .card:first-child .chart path')].map(p => p.getBBox().height)"
    )
    assert max(tab.evaluate(boxes)) > 20
    assert "of 50000" in tab.inner_text(".two .card:first-child h2")


# ---------------------------------------------------------------------- what cannot be drawn


def test_a_tree_that_cannot_be_drawn_says_so_in_its_place(tab, served, monkeypatch):
    from viz.draw import tree

    server, _ = served
    index = first_mark(served, "evict")
    open_at(tab, server.url, f"step {index}")
    drawn = {name: tab.inner_html(name) for name in (".pool", ".lanes", ".events", ".say")}
    whole = tree.tree_svg

    def broken(*_):
        raise RuntimeError("of no use")

    monkeypatch.setattr(tree, "tree_svg", broken)
    tab.goto("about:blank")
    open_at(tab, server.url, f"step {index}")
    assert tab.inner_text(".mr-tree") == "The tree cannot be drawn: RuntimeError: of no use"
    assert tab.locator(".undrawn").count() == 1
    for name, html in drawn.items():
        assert tab.inner_html(name) == html, name
    monkeypatch.setattr(tree, "tree_svg", whole)
    tab.keyboard.press("ArrowRight")
    until(tab, "document.querySelector('.mr-tree g.node')")
    assert tab.locator(".undrawn").count() == 0
    server.driver.run_now.page._failures.clear()


@pytest.mark.parametrize(
    ("function", "place", "name"),
    [
        ("drawHits", ".two .card:last-child .chart", "The hit rate"),
        ("drawLanes", ".lanes", "The requests"),
        ("drawEvents", ".events", "The events"),
        ("drawPool", ".pool", "The pool"),
        ("drawTree", ".mr-tree", "The tree"),
    ],
)
def test_a_chart_that_fails_in_the_page_takes_nothing_with_it(tab, served, function, place, name):
    server, _ = served

    def spoil(route):
        text = route.fetch().text()
        assert text.count(f"\nfunction {function}() {{\n") == 1
        route.fulfill(
            body=text.replace(
                f"function {function}() {{\n", f"function {function}() {{ throw Error('no use');\n"
            ),
            content_type="text/javascript",
        )

    tab.allowed_complaints.append("no use")
    tab.route("**/static/page.js", spoil)
    index = first_mark(served, "evict")
    open_at(tab, server.url, f"step {index}")
    assert tab.inner_text(place) == f"{name} cannot be drawn: no use"
    assert tab.locator(".undrawn").count() == 1
    for other in (".mr-tree g.node", ".pool i", ".lane", ".events li", ".chart svg"):
        if not place.startswith(other.split()[0]):
            assert tab.locator(other).count() > 0, other
    tab.keyboard.press("ArrowLeft")
    at(tab, f"step {index - 1}")


@pytest.mark.parametrize("compared", [False, True])
def test_a_learners_file_that_does_not_come_back_is_on_the_page(tab, monkeypatch, tmp_path, compared):
    """Of one engine and of two: a sentence while it runs, and none before and after."""
    monkeypatch.setattr(own_code, "PATIENCE", 1)
    go, file = threading.Event(), tmp_path / "mine.py"
    monkeypatch.setattr("builtins.go", go, raising=False)
    head = "def victim_key(node):\n" if compared else "def space_of(salt, adapter, loaded):\n"
    file.write_text(f"{head}    while not go.wait(0.01):\n        pass\n    return 0\n", encoding="utf-8")
    go.set()  # a policy is tried once when it is read
    with mock.patch.dict(POLICIES):
        settings = Settings("mixed", compare=f"lru,{join(str(file))}") if compared else Settings("chat")
        driver = Driver(settings if compared else replace(settings, cache=(str(file),)), 0, paused=True)
        with leaving(tab, Live(driver)) as server:
            tab.goto(server.url)
            until(tab, "document.querySelector('.banner.slow')")
            banner = tab.locator(".banner.slow")
            assert banner.is_hidden()
            go.clear()
            driver.command("play", {"on": True})
            banner.wait_for(state="visible")
            said = rf"{re.escape(str(file))} has been running for \d+ seconds, in "
            assert re.match(said, banner.inner_text())
            go.set()
            banner.wait_for(state="hidden")
