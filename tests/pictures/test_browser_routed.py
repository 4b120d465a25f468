"""A served page, and the page of a router's workers, in a real browser."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest
from browsers import browser, cards_lie_apart, leaving, open_at, tab, until
from test_live import wait
from test_route_page import story
from test_served_page import NONE, Asking

from minirad.observe.recorder import Recorder
from viz.live import Driver, Live, Replay, Settings, main
from viz.web import routed, served
from viz.web.export import export

pytestmark = [pytest.mark.browser, pytest.mark.slow]
__all__ = ["browser", "tab"]  # fixtures
SIZE = (1280, 800)


def test_what_comes_by_http_is_seen_on_the_page(tab):
    driver = served.ServedDriver(NONE, 0.0, served.Front(0), served.Served())
    with leaving(tab, Live(driver)) as live:
        tab.goto(live.url)
        until(tab, "document.querySelector('.serving code')?.textContent.startsWith('curl ')")
        until(tab, "document.querySelector('.status').textContent === 'waiting for requests'")
        cards_lie_apart(tab, SIZE)
        assert Asking(driver, text="What is the capital of France?").answer()[0] == 200
        until(tab, "document.querySelectorAll('.lane').length === 1")
        assert "capital of France" in tab.inner_text(".lane")
        until(tab, "document.querySelector('.serving').textContent.includes('requests so far: 1')")
        assert tab.get_attribute(".go.main", "title") == "Pause (space)"
        tab.locator(".go.main").click()
        until(tab, "document.querySelector('.serving').textContent.includes('is paused with this page')")
        until(tab, "document.querySelector('.status').textContent.startsWith('engine paused')")
        asked = Asking(driver, text="What is the capital of Peru?")
        until(tab, "document.querySelectorAll('.lane.waits').length === 1")
        tab.locator(".go.main").click()
        until(
            tab, "document.querySelectorAll('.lane').length === 2 && !document.querySelector('.lane.waits')"
        )
        assert asked.answer()[0] == 200
        tab.locator("select[aria-label='Speed']").select_option("8")
        until(tab, "document.querySelector('.serving').textContent.includes('at most 8 steps per second')")
        tab.locator("input.prompt").fill("Who are you?")
        tab.locator("button", has_text="submit").click()
        until(tab, "document.querySelectorAll('.lane').length === 3")
        tab.keyboard.press("Escape")
        tab.locator(".go.first").click()
        until(tab, "document.body.dataset.position === 'step 0'")
        assert tab.locator(".mr-tree g.node").count() == 1  # the root
        assert not tab.locator("button", has_text="restart").is_visible()
        cards_lie_apart(tab, SIZE)


def test_where_requests_went_from_a_recording_and_an_export(tab, tmp_path):
    path = tmp_path / "fleet.jsonl"
    story(path=path).flight.close()
    replay = Replay(Recorder.load(path), path.name)
    with leaving(tab, Live(Driver(Settings(), 3.0, replay=replay))) as live:
        looks(tab, live.url)
    export(replay.page, tmp_path / "fleet.html", title="workers")
    looks(tab, (tmp_path / "fleet.html").as_uri())


def looks(tab, url):
    open_at(tab, url, "step 40")
    assert tab.inner_text(".ranks h2").startswith("Workers")
    assert tab.locator(".ranks tr").count() == 5 and tab.locator(".routelist tr").count() == 18
    assert tab.inner_text(".banner.wrong") == "w2 is dead: its process was ended by SIGKILL"
    assert not tab.locator(".shares").is_visible() and not tab.locator(".serving").is_visible()
    assert not tab.locator(".routetools").is_visible()  # nothing can be changed here
    row = tab.locator(".routelist tr[data-request='R12']").first
    assert row.locator(".chosen").count() == 1
    assert row.locator("line.limit").count() == 2 * 4  # of match and load, of each worker
    row.hover()
    reason = "document.querySelector('.routes .reason').innerText"
    until(tab, f"{reason}.startsWith('R12 goes to w0: w0 holds 24 of 28 tokens (86%)')")
    assert tab.locator(".policies tr").count() == 3
    cards_lie_apart(tab, SIZE)
    tab.keyboard.press("Home")
    until(tab, "document.body.dataset.position === 'step 0'")
    assert tab.locator(".routelist tr").count() == 1
    assert tab.inner_text(".routes .reason") == "no request has come yet"


def test_workers_a_router_and_a_page(tab, tmp_path):
    """The real thing: two processes; another policy, and the workload once more."""
    from viz.live import _parser

    record = tmp_path / "fleet.jsonl"
    asked = _parser().parse_args(["--workers", "2", "--record", str(record)])
    workload = routed.texts(2, requests=16)
    router, may_start = routed.router_of(asked, workload), threading.Event()
    launch = router.workers._launch

    def launch_when_told(rank, ended):
        assert may_start.wait(120)
        return launch(rank, ended)

    router.workers._launch = launch_when_told
    source = routed.RoutedSource(router, workload)
    with leaving(tab, Live(source)) as live:
        tab.goto(live.url)
        until(tab, "document.querySelectorAll('.ranks tr').length === 3")
        assert "are starting" in tab.inner_text(".serving")
        assert not tab.locator(".banner.wrong").is_visible()
        cards_lie_apart(tab, SIZE)
        may_start.set()
        until(tab, "document.querySelectorAll('.routelist tr').length === 17", 120)
        wait(lambda: source.over, 60)
        until(tab, "document.querySelector('.serving code')?.textContent.startsWith('curl ')")
        tab.locator(".routetools select").select_option("round-robin")
        tab.locator(".routetools button", has_text="send again").click()
        until(tab, "document.querySelectorAll('.policies tr').length === 3", 60)
        wait(lambda: source.over, 60)
        until(tab, "document.querySelectorAll('.mr-tree g.node').length > 3")
        cards_lie_apart(tab, SIZE)
        body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode()
        url, headers = f"{source.router.url}/v1/completions", {"Content-Type": "application/json"}
        assert urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30).status == 200
        until(tab, "document.querySelectorAll('.routelist tr').length === 33")
    assert source.error == "" and source.traffic.failures == []
    page = Replay(Recorder.load(record), record.name).page
    sums = {row["policy"]: row for row in page.view("step", len(page.trace))["routes"]["sums"]}
    assert [sums[policy]["tries"] for policy in ("cache-aware", "round-robin")] == [16, 17]
    assert sums["cache-aware"]["failed"] == sums["round-robin"]["failed"] == 0


def test_the_command_line_exports_what_the_workers_did(tmp_path, capfd):
    path = tmp_path / "run.html"
    found = []
    thread = threading.Thread(
        target=lambda: found.append(main(["--workers", "1", "--steps", "12", "--export", str(path)]))
    )
    thread.start()
    thread.join(250)
    assert found == [0]
    assert "steps" in capfd.readouterr().out and path.stat().st_size > 10_000
