"""Shared by the tests in a real browser: Chromium, a tab that notes what it asks for, a run to look at."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from viz.live import Driver, Live, Run, Settings
from viz.web.export import export

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CARDS = """[...document.querySelectorAll('.card, .say, nav.bar, header')].map(e => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
})"""
PATIENCE = 120.0  # seconds for what takes a moment on a quiet machine
SEEK = """i => {
    const slider = document.querySelector('.scrub input');
    slider.value = i;
    slider.dispatchEvent(new Event('input'));
}"""


@contextlib.contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """A headless Chromium (MINIRAD_CHROMIUM says which); where there is none, the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("MINIRAD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", *arguments])
        except playwright.Error as error:
            pytest.skip(f"no Chromium to start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def tab(browser):
    """A page that notes where it goes and what it complains about; both are checked at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    # The browser's own note where a picture was asked for while its run was replaced: the page asks anew.
    page.allowed_complaints = ["status of 409"]
    yield page
    context.close()
    elsewhere = [
        u
        for u in asked
        if urlsplit(u).scheme not in ("data", "file", "blob") and urlsplit(u).hostname != "127.0.0.1"
    ]
    assert not elsewhere, elsewhere
    complaints = [c for c in complaints if not any(part in c for part in page.allowed_complaints)]
    assert not complaints, complaints


@contextlib.contextmanager
def run_to_its_end(settings: Settings, folder: Path) -> Iterator[tuple[Live, Path]]:
    """A live page whose run is over, and the same run as an exported file."""
    driver = Driver(settings, speed=0)
    with Live(driver) as server:
        until_idle(driver)
        export(driver.run_now.page, folder / "run.html", title=settings.workload)
        yield server, folder / "run.html"


def until_idle(driver: Driver) -> None:
    """Waits for the engine, whose word is never an old one; a page may still say what was so before a key."""
    start = time.monotonic()
    while driver.run_now is None or not driver.run_now.idle:
        assert time.monotonic() - start < PATIENCE and not driver.error
        time.sleep(0.05)


def submitted(tab: Any) -> None:
    """Sends the prompt that is typed, and waits until the engine has it: from then on its run is not over."""
    with tab.expect_response("**/do/submit"):
        tab.keyboard.press("Enter")


def break_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Engines of live pages break when they have taken so many steps."""
    advance = Run.advance

    def breaks(run: Run) -> None:
        if run.clock == step:
            raise RuntimeError("a broken promise")
        advance(run)

    monkeypatch.setattr(Run, "advance", breaks)


@contextlib.contextmanager
def leaving(tab, live):
    """A server that the tab has left before it ends: what the page still asks for would be refused."""
    with live as server:
        yield server
        tab.goto("about:blank")


def until(tab, condition: str, seconds: float = PATIENCE) -> None:
    """Waits for a condition in the page. (Playwright's own wait evaluates text, which our CSP forbids.)"""
    start = time.monotonic()
    while not tab.evaluate(f"Boolean({condition})"):
        assert time.monotonic() - start < seconds, (
            f"{condition}: {tab.evaluate('document.body.dataset.position')}"
        )
        tab.wait_for_timeout(10)


def at(tab, position: str) -> None:
    until(tab, f"document.body.dataset.position === '{position}'")


def open_at(tab, url: str, position: str) -> None:
    granularity, index = position.split()
    tab.goto(f"{url}#{granularity}={index}")
    at(tab, position)


def settle(tab: Any) -> None:
    """What the page does when sizes have changed comes with the next frame it draws, and is done then."""
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def cards_lie_apart(tab: Any, size: tuple[int, int]) -> None:
    """All of the page is inside a window of this size, and no card covers another."""
    settle(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert tab.evaluate("document.documentElement.scrollHeight") <= size[1]
    boxes = tab.evaluate(CARDS)
    for i, a in enumerate(boxes):
        assert a[0] >= 0 and a[1] >= 0 and a[2] <= size[0] and a[3] <= size[1]
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 1 or b[3] <= a[1] + 1
