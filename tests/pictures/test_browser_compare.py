"""Two engines side by side in a real browser: both at the same step, from a server and from a file."""

from __future__ import annotations

import re

import pytest
from browsers import (
    SEEK,
    at,
    browser,
    cards_lie_apart,
    leaving,
    open_at,
    run_to_its_end,
    tab,
    until,
    until_idle,
)

from viz.live import Driver, Live, Settings
from viz.web.export import export

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures

SIDE = """n => { const side = document.querySelector('.side' + n); return [
    [...side.querySelectorAll('g.node')].map(g => g.id + ' ' + g.getAttribute('class')),
    [...side.querySelectorAll('.pool i')].map(c => c.dataset.owner)]; }"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    settings = Settings(workload="mixed", compare="lpm,fcfs")
    with run_to_its_end(settings, tmp_path_factory.mktemp("compare")) as (server, file):
        yield server.driver.run_now, server, file


@pytest.fixture(params=["server", "file"])
def url(request, both):
    _, server, file = both
    return server.url if request.param == "server" else file.as_uri()


def test_both_are_shown_at_the_same_step(tab, url, both):
    pair = both[0]
    differ = next(
        i
        for i in range(1, len(pair.page))
        if len({str(s["svg"]) for s in pair.page.view("step", i)["sides"]}) > 1
    )
    open_at(tab, url, f"step {differ}")
    for index, then in ((differ, "ArrowRight"), (differ + 1, "ArrowLeft"), (differ, "Home")):
        at(tab, f"step {index}")
        view = pair.page.view("step", index)
        for number, side in enumerate(view["sides"]):
            nodes, owners = tab.evaluate(SIDE, number)
            assert {n.split()[0] for n in nodes} == {"n0", *(f"n{n}" for n in side["nodes"])}
            assert owners == [owner for owner, length in side["pool"] for _ in range(length)]
        assert tab.inner_text(".say .text") == view["say"] + "."
        tab.keyboard.press(then)


def test_pointing_lights_one_side_or_a_request_on_both(tab, url, both):
    pair = both[0]
    open_at(tab, url, "step 60")
    left = pair.page.view("step", 60)["sides"][0]
    number = next(iter(left["nodes"]))
    tab.locator(f".side0 #n{number}").dispatch_event("pointerover")
    lit = tab.evaluate("[...document.querySelectorAll('.pool i.lit')].length")
    assert lit == left["nodes"][number]["body"]["size"]
    assert tab.locator(".side1 .lit").count() == 0
    tab.locator(".waits").first.dispatch_event("pointerenter")
    assert "under lpm" in tab.inner_text(".tip") and "under fcfs" in tab.inner_text(".tip")


def test_keys_and_the_end(tab, url, both):
    pair = both[0]
    open_at(tab, url, "step 5")
    tab.keyboard.press("e")
    marked = [i for i, frame in enumerate(pair.page.frames(), start=1) if "evict" in frame["m"]]
    at(tab, f"step {marked[0]}")
    tab.keyboard.press("End")
    at(tab, f"step {len(pair.page)}")
    assert "done after" in tab.inner_text(".side0 .own") and "done after" in tab.inner_text(".side1 .own")
    assert "33 of 33" in tab.inner_text(".score")
    tab.keyboard.press("Home")
    at(tab, "step 0")
    tab.keyboard.press(" ")
    until(tab, "Number(document.body.dataset.position.split(' ')[1]) >= 3")
    tab.keyboard.press(" ")


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080)])
def test_nothing_overlaps_or_is_cut_off(tab, url, both, size):
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    open_at(tab, url, f"step {int(0.86 * len(both[0].page))}")
    cards_lie_apart(tab, size)
    for number in (0, 1):
        last = f"document.querySelector('.side{number} .pool i:last-child').getBoundingClientRect().bottom"
        card = f"document.querySelector('.side{number}').getBoundingClientRect().bottom"
        assert tab.evaluate(last) <= tab.evaluate(card), "every page is seen"
    tab.evaluate(SEEK, 7)
    at(tab, "step 7")


def test_both_engines_are_driven(tab):
    driver = Driver(Settings(workload="chat", compare="lru,lfu"), speed=20, paused=True)
    with leaving(tab, Live(driver)) as server:
        tab.goto(server.url)
        at(tab, "step 0")
        tab.keyboard.press("ArrowRight")
        at(tab, "step 1")
        assert [len(side.trace) for side in driver.run_now.sides] == [1, 1]
        tab.keyboard.press(" ")
        until(tab, "document.querySelector('.status').innerText.includes('both are done')", seconds=60)
        steps = len(driver.run_now.page)
        at(tab, f"step {steps}")
        driver.command("speed", {"speed": 1}).result(60)  # it runs for as long as one may take to look
        tab.click("text=from the start")
        until(tab, "document.querySelector('.status').innerText.includes('running')")
        driver.command("speed", {"speed": 20}).result(60)
        until(tab, "document.querySelector('.status').innerText.includes('both are done')", seconds=60)
        assert driver.run_now.number == 2


@pytest.mark.parametrize("place", ["server", "file"])
def test_refused_requests_are_told_in_a_banner(tab, tmp_path, place):
    driver = Driver(Settings(workload="agents", compare="lru,lfu", kv_tokens=40), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        file = tmp_path / "both.html"
        export(driver.run_now.page, file)
        tab.goto(server.url if place == "server" else file.as_uri())
        until(tab, "document.querySelector('.banner.refused')?.hidden === false")
        assert tab.inner_text(".banner.refused") == driver.run_now.page.refused
        assert re.match(r"both: \d+ of \d+ requests refused: ", driver.run_now.page.refused)
