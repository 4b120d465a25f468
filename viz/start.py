"""How long `python -m viz.live` takes from the command to the first tree, and what of it is torch.

    python -m viz.measure --start [--reps 3] [--browser] [--json]

A command is started as a person starts it, and asked as its page asks: the page, its files, the news, and the
picture of the first step that there is. --browser: a Chromium that is open already opens the page, too (needs
playwright), and the last row is the tree that it has drawn. Seconds since the command: by the clock, and (on
Linux) of processor time that the command has used by then. Of several starts the median by the clock, and the
least processor time: what else runs only adds to it. A start before them fills the disk's cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tornado.websocket import websocket_connect

from minirad.bench.tables import table

TORCH = "import gc; gc.set_threshold(50_000, 20, 100); import torch"  # as viz.live does
PATIENCE = 120.0  # seconds
FILES = (
    "tree.css", "style.css", "page.js", "tree.js", "parts.js", "route.js", "fleet.js", "why.js", "drafts.js",
)  # fmt: skip
DRAWN = "Boolean(document.querySelector('svg g.node')) && document.body.dataset.position !== 'step 0'"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
ROWS = {
    "interpreter": "python -c pass",
    "torch": "python -c 'import torch', with as few collections",
    "address": "the page's address is printed",
    "page": "the page and its scripts are answered",
    "engine": "there is an engine",
    "event": "the first step's events have come",
    "tree": "the tree of that step is drawn: the server's SVG",
    "browser": "the tree of a step stands in the browser",
}
Mark = tuple[float, float | None]  # seconds by the clock, and of processor time


class Started:
    """A command that runs, and the marks that were seen of it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.marks: dict[str, Mark] = {}
        self._began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def mark(self, name: str) -> None:
        """It has come so far."""
        self.marks[name] = time.perf_counter() - self._began, processor_seconds(self.process.pid)

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()


def processor_seconds(process: int) -> float | None:
    """What a process has used so far; None where that cannot be read."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def finished(name: str, *arguments: str) -> dict[str, Mark]:
    """The mark of a command that ends by itself: its processor time is that of all of it."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True)
    spent, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {name: (spent, used or None)}


def one_start(tab: Any = None) -> dict[str, Mark]:
    """The marks of one start. tab: of a browser; None: what a page asks for is asked here."""
    started = Started(["-m", "viz.live", "--no-open", "--port", "0"])
    try:
        assert started.process.stdout is not None
        line = started.process.stdout.readline()
        if not line.startswith("minirad live: "):
            raise RuntimeError(f"viz.live did not start: {line.strip() or 'it said nothing'}")
        started.mark("address")
        url = line.split()[2]
        if tab is None:
            asyncio.run(asyncio.wait_for(_asked(started, url), PATIENCE))
        else:
            _opened(started, url, tab)
        return started.marks
    finally:
        started.end()


async def _asked(started: Started, url: str) -> None:
    """As the page does: itself, its files, the news, the picture of the first step that has come."""
    for name in ("", *(f"static/{file}" for file in FILES)):
        await asyncio.to_thread(_got, url + name)
    started.mark("page")
    news = await websocket_connect(url.replace("http", "ws", 1) + "stream")
    run = ""
    while True:
        said = json.loads(await news.read_message() or "{}")
        if said.get("event") == "run":
            run = said["data"]["run"]
            started.mark("engine")
        elif said.get("event") == "frames" and said["data"]["frames"]:
            started.mark("event")
            view = await asyncio.to_thread(_got, f"{url}view?run={run}&g=step&i=1&open=&height=400&rank=")
            if b"<svg" not in view:
                raise RuntimeError("the first step's view has no tree")
            started.mark("tree")
            news.close()
            return


def _got(url: str) -> bytes:
    with urlopen(url, timeout=PATIENCE) as answer:
        body: bytes = answer.read()
    return body


def _opened(started: Started, url: str, tab: Any) -> None:
    tab.goto(url)
    until = time.monotonic() + PATIENCE
    while not tab.evaluate(DRAWN):
        if time.monotonic() > until:
            raise RuntimeError(f"no tree in the browser after {PATIENCE:.0f} s")
        tab.wait_for_timeout(5)
    started.mark("browser")
    tab.goto("about:blank")


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A tab of a Chromium. ValueError where there is none."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise ValueError("--browser needs playwright: pip install playwright") from None
    path = os.environ.get("MINIRAD_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    with sync_playwright() as playing:
        try:
            browser = playing.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            raise ValueError(f"--browser: no Chromium to start: {str(error).splitlines()[0]}") from None
        try:
            yield browser.new_page()
        finally:
            browser.close()


def measured(reps: int, browser: bool = False) -> list[dict[str, Any]]:
    """A row for each mark, of so many starts: {mark, what, seconds, processor}; processor may be None."""
    one_start()
    found: list[dict[str, Mark]] = []
    for _ in range(reps):
        found.append({**finished("interpreter", "-c", "pass"), **finished("torch", "-c", TORCH)})
        found.append(one_start())
    if browser:
        with open_browser() as tab:
            found += [one_start(tab) for _ in range(reps)]
            for each in found[-reps:]:
                del each["address"]  # counted among the starts without a browser
    rows = []
    for name, what in ROWS.items():
        marks = [each[name] for each in found if name in each]
        used = [processor for _, processor in marks if processor is not None]
        if marks:
            clock = round(statistics.median(seconds for seconds, _ in marks), 2)
            processor = round(min(used), 2) if used else None
            rows.append({"mark": name, "what": what, "seconds": clock, "processor": processor})
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """For a terminal, with the share of torch's import."""
    cells = [[row["what"], row["seconds"], row["processor"]] for row in rows]
    text = table(["since the command", "seconds", "processor"], cells)
    spent = {row["mark"]: row["processor"] for row in rows}
    if spent["torch"] and spent["tree"]:
        share = min((spent["torch"] - (spent["interpreter"] or 0)) / spent["tree"], 1.0)
        text += f"\nimport torch: {share:.0%} of the processor time until the first tree"
    return f"{text}\n{os.cpu_count()} cores{_load()}"


def _load() -> str:
    """How busy the machine is: the clock's seconds say little on a busy one."""
    return f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
