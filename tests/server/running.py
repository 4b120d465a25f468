"""`python -m minirad serve` as a process of its own, for tests that talk to it from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from support import ROOT

from minirad.fleet.endpoints import free_ports


class Server:
    """A server that takes requests from when this is made until `end`; said: what it printed.

    command: what comes before the command's own words.
    """

    def __init__(
        self, *words: str, key: str | None = None, command: Sequence[str] = ("-m", "minirad")
    ) -> None:
        self.port, self.key = free_ports(1), key
        self.url = f"http://127.0.0.1:{self.port}"
        if key is not None:
            words = (*words, "--api-key", key)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/server")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self.process = subprocess.Popen(
            [sys.executable, *command, "serve", "--port", str(self.port), *words], cwd=ROOT, env=env,
            stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.wait_for(self._serves, 120, "it takes requests")

    def _serves(self) -> bool:
        assert self.process.poll() is None, f"the server ended: {self.said}"
        try:
            self.get("/health")
            return True
        except OSError:
            return False

    def wait_for(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        """Fails unless something becomes true in time."""
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, f"not within {seconds} s: {what}; {self.said[-2000:]}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def get(self, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=headers), timeout=30
        ) as it:
            return bytes(it.read())

    def post(self, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of the answer, also of one that refuses."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, dict(answer.headers), json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), json.loads(error.read())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        found, total = False, 0.0
        for line in self.get("/metrics").decode().splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match:
                has = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
                if all(has.get(label) == value for label, value in labels.items()):
                    total, found = total + float(match[2]), True
        assert found or labels, f"no metric {name}"
        return total

    def end(self) -> int:
        """Asks it to end, and returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self._output.close()
        return code
