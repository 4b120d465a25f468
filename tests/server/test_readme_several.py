"""What the README offers of ranks, a server and a router, run as it stands there until it shows it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import ROOT

from minirad.fleet.endpoints import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal"),
]

PAGE, TORCHRUN = "python -m viz.live ", "torchrun "
RANKS = 'torchrun --nproc-per-node 2 -m minirad generate --tp 2 "Hello"'
# Commands that go on until Ctrl-C, and what is added so that tests can run beside each other.
SERVING = {
    "python -m minirad serve": "--port 0",
    "python -m minirad route --workers 4 --policy cache-aware": "--port 0",
    "python -m viz.live --serve 8000": "--no-open --port 0 --serve 0",
    "python -m viz.live --workers 4": "--no-open --port 0 --serve 0",
    "python -m viz.live --tp 2": "--no-open --port 0",
}


def offered() -> set[str]:
    """The commands of the README that are for several processes, or for others to ask."""
    text = " ".join(
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Where to find what")[0].split()
    )
    words = r"torchrun |python -m minirad (?:serve|route)|python -m viz\.live --(?:tp|serve|workers)"
    return set(re.findall(rf"`((?:{words})[^`]*)`", text))


def test_these_are_the_commands_of_the_readme() -> None:
    assert offered() == {RANKS, *SERVING}


class Told:
    """What a process prints, line by line, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line)

    def address(self, before: str) -> str:
        """The first one behind these words. AssertionError if it does not come."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            for line in self.lines:
                if found := re.search(rf"^minirad {before}: (http://127\.0\.0\.1:\d+)", line):
                    return found[1]
            time.sleep(0.1)
        raise AssertionError(f"no address behind {before!r}: {''.join(self.lines)}")


@contextmanager
def started(command: str) -> Iterator[Told]:
    """A command that runs until Ctrl-C; it has to end by that, quickly, without a traceback."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    words = shlex.split(f"{command} {SERVING[command]}")
    with subprocess.Popen(
        [sys.executable, *words[1:]], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={**env, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        told = Told(process)
        try:
            yield told
            os.kill(process.pid, signal.SIGINT)
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code in (0, 130) and "Traceback" not in "".join(told.lines), (code, "".join(told.lines))


def asked(address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def reply(server: str) -> str:
    """What the API says to a question that the classroom Llama can answer."""
    body = {
        "prompt": "Question 1: What is the capital of France?\nAnswer 1:",
        "max_tokens": 8,
        "temperature": 0,
    }
    return str(asked(f"{server}/v1/completions", body)["choices"][0]["text"])


def test_a_server() -> None:
    with started("python -m minirad serve") as told:
        server = told.address("serve")
        assert "Paris" in reply(server)
        assert "minirad" in asked(f"{server}/metrics")


def test_a_server_and_its_page() -> None:
    with started("python -m viz.live --serve 8000") as told:
        server, page = told.address("server"), told.address("live")
        assert "Paris" in reply(server)
        assert "<title>" in asked(page)


def test_workers_behind_a_router() -> None:
    with started("python -m minirad route --workers 4 --policy cache-aware") as told:
        router = told.address("route")
        assert "Paris" in reply(router) and "Paris" in reply(router)
        until = time.monotonic() + 60
        seen = asked(f"{router}/workers")
        while seen["routes"][-1]["cached"] is None and time.monotonic() < until:  # told behind the answer
            time.sleep(0.1)
            seen = asked(f"{router}/workers")
        assert len(seen["workers"]) == 4
        first, second = seen["routes"][-2:]
        assert first["worker"] == second["worker"] and second["cached"] > 0, "where the prefix is held"


def test_workers_a_router_and_a_page() -> None:
    with started("python -m viz.live --workers 4") as told:
        page = told.address("live")
        router = told.address("router")
        until = time.monotonic() + 120
        while not asked(f"{router}/workers")["routes"] and time.monotonic() < until:
            time.sleep(0.2)
        assert asked(f"{router}/workers")["routes"], "a workload is sent by itself"
        assert "<title>" in asked(page)


def test_ranks_and_their_page() -> None:
    with started("python -m viz.live --tp 2") as told:
        assert "<title>" in asked(told.address("live"))


def test_ranks_in_a_terminal() -> None:
    words = shlex.split(RANKS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_ports(1)), *words[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = subprocess.run(
        [sys.executable, "-m", "minirad", "generate", words[-1]],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    first, second = (re.sub(r"[\d.]+ s\]", "", each.stdout) for each in (done, alone))
    assert first.startswith("> Hello\nHello!") and first == second
