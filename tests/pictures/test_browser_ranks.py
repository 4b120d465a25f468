"""The ranks of one engine side by side in a real browser: two that run, up to four from recordings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from browsers import (
    at,
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
from rank_support import RankPair
from support import ROOT
from test_rank_page import alone, as_ranks, shown

from viz.live import Driver, Live, Settings
from viz.web.export import export

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["alone", "browser", "tab"]  # fixtures

SIDE = """n => { const side = document.querySelector('.side' + n); return [
    [...side.querySelectorAll('g.node')].map(g => g.id).sort(),
    [...side.querySelectorAll('.pool i')].map(c => c.dataset.owner),
    side.querySelector('.digest').innerText]; }"""
UNLIKE = "[...document.querySelectorAll('.side%d g.unlike')].map(g => g.id)"


@pytest.fixture(scope="module")
def pair():
    with RankPair() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def done(pair, tmp_path_factory):
    """A run of two ranks that is over, on its server and as a file."""
    with run_to_its_end(Settings(workload="chat", tp=2), tmp_path_factory.mktemp("ranks")) as (server, file):
        yield server.driver.run_now, server, file


@pytest.fixture(params=["server", "file"])
def url(request, done):
    _, server, file = done
    return server.url if request.param == "server" else file.as_uri()


def test_all_ranks_are_shown_at_the_same_step_with_their_digest(tab, url, done):
    page = done[0].page
    first = next(i for i, frame in enumerate(page.frames(), start=1) if frame["t"][0] and i > 5)
    open_at(tab, url, f"step {first}")
    for index, then in ((first, "ArrowRight"), (first + 1, "ArrowLeft"), (first, "End"), (len(page), "Home")):
        at(tab, f"step {index}")
        view = page.view("step", index)
        digest = " ".join(view["digest"][k : k + 4] for k in range(0, 32, 4))
        for number, side in enumerate(view["sides"]):
            nodes, owners, said = tab.evaluate(SIDE, number)
            assert set(nodes) == {"n0", *(f"n{n}" for n in side["nodes"])}
            assert owners == [owner for owner, length in side["pool"] for _ in range(length)]
            assert digest in said and len(digest) == 39
        assert tab.inner_text(".say .text") == view["say"] + "."
        told = tab.inner_text(".told")
        assert all(name in told for name, _, _ in (view["told"] or {"requests": []})["requests"])
        assert ("No slots, no drawn tokens" in told) == (view["told"] is not None)
        tab.keyboard.press(then)
    at(tab, "step 0")


def stepped(tab, server, steps):
    """The page of an engine that stands still, after so many steps by hand."""
    tab.goto(server.url)
    at(tab, "step 0")
    for step in range(1, steps + 1):
        tab.keyboard.press("ArrowRight")
        at(tab, f"step {step}")


def test_a_planted_difference_is_seen_and_another_run_begins(tab, pair):
    driver = Driver(Settings(workload="chat", tp=2), speed=0, paused=True)
    with leaving(tab, Live(driver)) as server:
        stepped(tab, server, 5)
        with tab.expect_response("**/do/plant"):
            tab.click("text=plant a difference")
        tab.locator("body").press("ArrowRight")
        at(tab, "step 6")
        ((rank, what, (node,)),) = driver.run_now.page.view("step", 6)["unlike"]
        assert rank == 1 and what.startswith("rank 1 has lock_ref ") and f" at n{node} (" in what
        assert what in tab.inner_text(".side1 .digest")
        until(tab, "document.querySelector('.status').innerText === 'stopped: the ranks differ'")
        assert what in tab.inner_text(".banner.refused")
        for side in (0, 1):
            assert tab.evaluate(UNLIKE % side) == [f"n{node}"]
        assert "did not come" not in tab.inner_text(".side1 .own")
        assert tab.inner_text(".say .more") == "step 6" and "step 6: " in tab.inner_text(".banner.refused")
        its, own = map(int, re.match(r"rank 1 has lock_ref (\d+) .*, rank 0 has (\d+)$", what).groups())
        sides = driver.run_now.page.view("step", 6)["sides"]
        assert [side["nodes"][node]["lock"] for side in sides] == [own, its], "as the sentence says"
        for side, lock in ((0, own), (1, its)):
            tab.hover(f".side{side} g.node.unlike")
            assert f"· lock {lock} ·" in tab.inner_text(".tip")
        tab.locator("body").press("ArrowLeft")
        at(tab, "step 5")
        sides = driver.run_now.page.view("step", 5)["sides"]
        assert sides[0]["nodes"][node]["lock"] == sides[1]["nodes"][node]["lock"]
        assert tab.evaluate(UNLIKE % 1) == [] and "digest" in tab.inner_text(".side1 .digest")
        tab.locator("body").press("d")
        at(tab, "step 6")
        tab.click("text=from the start")
        until(tab, "document.querySelector('.status').innerText.includes('all is done')", seconds=60)
        assert driver.run_now.number == 2 and not driver.run_now.page.broken and not driver.error
        until(tab, "document.querySelector('.banner.refused').hidden")
        with tab.expect_response("**/do/play"):
            tab.click(".go.main")  # at the end of a run that plays: it goes on playing
        tab.fill(".sent input", "What is the capital of France?")
        submitted(tab)
        until_idle(driver)
        asked = [i for i, frame in enumerate(driver.run_now.page.frames(), start=1) if frame["t"][0]]
        view = driver.run_now.page.view("step", asked[-1])
        ((name, text, _),) = view["told"]["requests"]
        assert text.startswith("yours: ") and name in view["sides"][1]["requests"]


def test_what_only_rank_0_evicted_is_not_told_of_each(tab, pair):
    """One number where all have the same; between two steps rank 0 may be ahead."""
    evicted = "document.querySelector('.score tr:nth-child(6)').innerText.replace(/\\s+/g, ' ')"
    driver = Driver(Settings(workload="chat", tp=2), speed=0)
    with leaving(tab, Live(driver)) as server:
        until_idle(driver)
        tab.goto(server.url)
        at(tab, f"step {len(driver.run_now.trace)}")
        before = driver.run_now.page.totals(1, len(driver.run_now.trace)).evicted
        assert tab.evaluate(evicted) == f"each rank: tokens evicted {before}"
        freed = driver.command("evict", {"tokens": 20}).result(60)["freed"]
        at(tab, f"step {len(driver.run_now.trace)}")
        assert tab.evaluate(evicted) == f"each rank: tokens evicted {before + freed}, {before}"


def test_steps_are_the_engines_after_a_prompt_between_two(tab, pair):
    driver = Driver(Settings(workload="chat", tp=2), speed=0, paused=True)
    with leaving(tab, Live(driver)) as server:
        stepped(tab, server, 3)
        for nth in (4, 5):
            tab.fill(".sent input", f"What is the capital of France? {nth}")
            submitted(tab)
            at(tab, f"step {nth}")  # a position: each prompt has a frame
            until(tab, "document.querySelector('.say').innerText.includes('waits at rank 0')")
        tab.evaluate("document.activeElement.blur()")  # keys are no text from here on
        tab.keyboard.press("End")
        until(tab, "document.querySelector('.say .more').innerText === 'after step 3'")
        until(tab, "document.querySelector('.status').innerText === 'paused at step 3'")
        for step in (4, 5, 6):
            tab.locator("body").press("ArrowRight")
            at(tab, f"step {step + 2}")
            assert tab.inner_text(".say .more") == f"step {step}"
            until(tab, f"document.querySelector('.status').innerText === 'paused at step {step}'")
            assert tab.inner_text(".side0 .queue") == tab.inner_text(".side1 .queue")


def test_a_prompt_waits_at_rank_0_until_the_next_step(tab, pair):
    driver = Driver(Settings(workload="chat", tp=2), speed=0, paused=True)
    with leaving(tab, Live(driver)) as server:
        stepped(tab, server, 1)
        tab.fill(".sent input", "Who are you?")
        submitted(tab)
        at(tab, "step 2")
        until(tab, "document.querySelector('.say').innerText.includes('waits at rank 0')")
        driver.command("step", {}).result(60)
        at(tab, "step 3")
        assert "waits at rank 0" not in tab.inner_text(".say")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_nothing_overlaps_or_is_cut_off(tab, tmp_path, alone, count):
    file = tmp_path / "ranks.html"
    page = shown(as_ranks(alone, count, differ=30)).page
    export(page, file, title="recorded")
    for size in ((1280, 800), (1920, 1080)):
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        open_at(tab, file.as_uri(), f"step {len(page)}")
        cards_lie_apart(tab, size)
        assert tab.evaluate("document.querySelectorAll('.sides .card').length") == count
        for number in range(count):
            card = f"document.querySelector('.side{number}').getBoundingClientRect()"
            for part in (".pool i:last-child", ".digest", ".mr-tree"):
                lowest = f"document.querySelector('.side{number} {part}').getBoundingClientRect().bottom"
                assert tab.evaluate(lowest) <= tab.evaluate(f"{card}.bottom"), (count, number, part)
        assert tab.evaluate(UNLIKE % 1) == ["n3"]
        tab.goto("about:blank")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("end", ["Ctrl-C", "a rank dies", "a rank dies when all is done"])
def test_started_plainly_it_starts_the_ranks_and_ends_them(tab, tmp_path, end):
    file = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "viz.live", "--tp", "2", "--no-open", "--port", "0", "--speed", "20"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [*command, "--record", str(file)], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        url = process.stdout.readline().split()[2]
        tab.goto(url)
        until(tab, "document.querySelectorAll('.side1 g.node').length > 2", seconds=120)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        first, second = sorted(map(int, ranks.stdout.split()))
        if end == "Ctrl-C":
            tab.goto("about:blank")
            os.killpg(process.pid, signal.SIGINT)
        else:
            tab.allowed_complaints += ["ERR_CONNECTION_REFUSED", "WebSocket"]
            if end != "a rank dies":  # then no step finds it out, but the launcher
                until(tab, "document.querySelector('.status').innerText.includes('all is done')", seconds=120)
            os.kill(second, signal.SIGKILL)
            until(tab, "!document.querySelector('.banner').hidden", seconds=60)
            assert "RankLost: rank 1 ended" in tab.inner_text(".banner")
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (0 if end == "Ctrl-C" else 1), said
    assert "Traceback" not in said
    for rank in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)
    if end == "Ctrl-C":
        assert json.loads(file.read_text().splitlines()[0])["config"]["tp"] == 2
        assert (tmp_path / "run.rank1.jsonl").exists()
