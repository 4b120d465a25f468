"""The servers behind a router: each a process of ours, started, watched, given up for dead, taken back.

A worker is *starting* until it says where it is and answers /health, then *ready*; *slow* while an answer is
overdue; *dead* when its process ended or it has not answered for so long. A process that ended is started
again, later each time, and after so many failures in a row no more. One that hangs may come *back*: its cache
is emptied first, as nobody remembers what was in it. One that does not is ended and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minirad.command import one_line
from minirad.text import escaped

if TYPE_CHECKING:
    import httpx

ALIVE = ("ready", "slow", "back")
STABLE = 30.0  # seconds that a worker must have been alive for its earlier failures to be forgotten
LAST_LINES = 20  # of what a process wrote to stderr
MOST_OF_A_LINE = 2000  # characters
MOST_TOLD = 1000  # different lines of stderr that are kept; after that each is passed on
_URL = re.compile(r"https?://\S+")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long what is waited for; all in seconds but `restarts`.

    turn: that a new process waits for those that start, if there are as many as processors. starting: until
    it must answer. every: between two questions after its health. deadline: without an answer it is dead.
    hung: so long it may still come back. again: before the first restart, doubled with each failure up to
    `longest`. restarts: in a row without success. grace: between the request to end and force.
    """

    turn: float = 5.0
    starting: float = 180.0
    every: float = 1.0
    deadline: float = 10.0
    hung: float = 60.0
    again: float = 0.5
    longest: float = 30.0
    restarts: int = 5
    grace: float = 4.0


class CannotStart(RuntimeError):
    """A worker cannot start at all; says which and why, in one sentence."""


class Process(Protocol):
    """A server's process, as it is watched from outside; `ended` is called in any thread, once it is over."""

    @property
    def url(self) -> str:
        """Where it serves, "" until it has said so."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def last_words(self) -> str:
        """The last line that it wrote to stderr since it served, or as it did not."""

    def end(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it."""


Launch = Callable[[int, Callable[[], None]], Process]


class ServerProcess:
    """A command that serves: the first URL on its stdout is where. What it says on stderr is passed on.

    It does not get the terminal's Ctrl-C: its owner ends it. secret: of its environment. told: lines of all
    servers, and who was the first to say each: what another has said word for word is not passed on again.
    """

    def __init__(
        self, name: str, command: Sequence[str], ended: Callable[[], None], secret: Mapping[str, str],
        told: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        alone: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            alone = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        # What a pipe holds is seen at once, and texts are UTF-8 whatever the machine's own is.
        environment = {**os.environ, **secret, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, **alone,
        )  # fmt: skip
        self._name, self._ended, self._said = name, ended, deque[str](maxlen=LAST_LINES)
        self._url, self._told = "", {} if told is None else told
        self._readers = [
            threading.Thread(target=read, name=f"{name}-{read.__name__}", daemon=True)
            for read in (self._read_out, self._read_err)
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, name=f"{name}-end", daemon=True).start()

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        if self.poll() is not None:
            for reader in self._readers:  # a process of its own may hold the pipe: not for ever
                reader.join(1.0)
        return self._said[-1] if self._said else ""

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = None if self._url else _URL.search(line.decode("utf-8", "replace"))
            if found is not None:
                self._said.clear()  # what it said before it served is not why it ends
                self._url = found[0].rstrip("/")

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = escaped(line.decode("utf-8", "replace").strip())[:MOST_OF_A_LINE]
            if text:
                self._said.append(text)
            if text and (
                len(self._told) >= MOST_TOLD or self._told.setdefault(text, self._name) == self._name
            ):
                print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def _wait(self) -> None:
        self._process.wait()
        self._ended()


@dataclass(eq=False)
class Worker:
    """One server, and what the router knows of it.

    load: requests in flight. queued_tokens: prompt tokens of those that have no output yet. routed, failed:
    requests so far. attempts: whom to tell when it dies. client: to ask it by.
    """

    rank: int
    name: str
    state: str = "starting"
    why: str = ""
    url: str = ""
    pid: int = 0
    load: int = 0
    queued_tokens: int = 0
    routed: int = 0
    failed: int = 0
    restarts: int = 0
    attempts: set[Callable[[str], None]] = field(default_factory=set)
    client: httpx.AsyncClient | None = None
    doubt: asyncio.Event = field(default_factory=asyncio.Event)  # its health is to be asked for at once

    @property
    def alive(self) -> bool:
        """Requests may be sent to it."""
        return self.state in ALIVE


class Workers:
    """Starts the servers, watches them and ends them.

    launch: starts the process of a rank. names: of each worker. changed: called, in the loop, with each new
    state and why. key: the key they ask for, or "".
    """

    def __init__(
        self, names: Sequence[str], launch: Launch, changed: Callable[[Worker, str, str], None],
        patience: Patience | None = None, key: str = "",
    ) -> None:  # fmt: skip
        self.all = [Worker(rank, name) for rank, name in enumerate(names)]
        self.patience = patience or Patience()
        self._launch, self._changed, self._key = launch, changed, key
        self._running: dict[int, Process] = {}
        self._starting = set[int]()
        self._ending = False

    def __iter__(self) -> Any:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    async def keep(self) -> None:
        """Keeps all of them running until it is cancelled; CannotStart where that is hopeless."""
        tasks = [asyncio.ensure_future(self._keep(worker)) for worker in self.all]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            self._ending = True  # before Python 3.12 `wait_for` may swallow that it was cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise CannotStart(f"no worker is left: {self.all[-1].name} {self.all[-1].why}")

    async def end(self) -> None:
        """Ends all processes: asks first, and does not ask again after the grace."""
        self._ending = True
        for process in list(self._running.values()):
            process.end()
        until = time.monotonic() + self.patience.grace
        while time.monotonic() < until and any(p.poll() is None for p in list(self._running.values())):
            await asyncio.sleep(0.02)
        self.kill()
        for worker in self.all:
            await self._close(worker)

    def kill(self) -> None:
        """Ends all processes that are left, at once; from any thread."""
        self._ending = True
        for process in list(self._running.values()):
            process.kill()

    # ------------------------------------------------------------ one worker

    async def _keep(self, worker: Worker) -> None:
        """Starts a worker's process again and again; returns when that has failed too often."""
        failures, patience = 0, self.patience
        while not self._ending:
            begun = time.monotonic()
            served = await self._live(worker)
            if self._ending:
                return
            failures = 0 if served and time.monotonic() - begun > STABLE else failures + 1
            if not served and not worker.restarts:
                raise CannotStart(f"{worker.name} cannot start: {worker.why}")
            if failures > patience.restarts:
                why = f"{worker.why}; it failed {failures} times in a row and is given up"
                return self._to(worker, "dead", why)
            await asyncio.sleep(min(patience.again * 2**failures / 2, patience.longest) if failures else 0)
            worker.restarts += 1

    async def _live(self, worker: Worker) -> bool:
        """The life of one process, from its start to its end; True if it was ever ready."""
        worker.url, worker.doubt = "", asyncio.Event()
        self._to(worker, "starting", f"process {worker.restarts + 1}" if worker.restarts else "")
        process: Process | None = None
        try:
            await self._turn(worker)
            process = await self._new_process(worker)
            if not await self._start(worker, process):
                return False
            self._starting.discard(worker.rank)
            await self._watch(worker, process)
            return True
        finally:
            self._starting.discard(worker.rank)
            if process is not None and not self._ending:  # then `end` asks it first: it may hold something
                process.kill()
            await self._close(worker)

    async def _turn(self, worker: Worker) -> None:
        """Not more start at once than there are processors: the first ones serve while others come."""
        until, places = time.monotonic() + self.patience.turn, os.cpu_count() or 1
        while len(self._starting) >= places and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._starting.add(worker.rank)

    async def _new_process(self, worker: Worker) -> Process:
        loop, doubt = asyncio.get_running_loop(), worker.doubt

        def ended() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(doubt.set)

        def launch() -> Process:
            process = self._launch(worker.rank, ended)
            self._running[worker.rank] = process  # here: whoever waits for it may have been cancelled
            if self._ending:
                process.kill()
            return process

        process = await loop.run_in_executor(None, launch)
        worker.pid = process.pid
        return process

    async def _start(self, worker: Worker, process: Process) -> bool:
        """Waits for a new process to answer; False, and the worker is dead, where it does not."""
        until = time.monotonic() + self.patience.starting
        while time.monotonic() < until and not self._ending:
            if process.poll() is not None:
                self._to(worker, "dead", await self._end_of(process))
                return False
            if process.url and not worker.url:
                self._open(worker, process.url)
            if worker.url and not await self._sick(worker, self.patience.deadline):
                self._to(worker, "ready", f"at {worker.url}")
                return True
            await self._pause(worker, 0.05)
        if not self._ending:
            where = f"at {worker.url} it does not answer" if worker.url else "it has not said where it serves"
            self._to(worker, "dead", f"after {self.patience.starting:g} s {where}")
        return False

    async def _watch(self, worker: Worker, process: Process) -> None:
        """Asks a worker after its health until its process is over, or is ended here."""
        patience, heard = self.patience, time.monotonic()
        while not self._ending:
            asked = time.monotonic()
            sick = await self._sick(worker, patience.deadline / 2)
            now = time.monotonic()
            if process.poll() is not None:
                return self._to(worker, "dead", await self._end_of(process))
            if not sick:
                heard = now
                await self._is_well(worker)
            elif worker.state != "dead" and now - heard >= patience.deadline:
                why = f"it has not answered /health for {now - heard:.1f} s ({sick})"
                self._to(worker, "dead", why)
            elif worker.state == "dead" and now - heard >= patience.deadline + patience.hung:
                return self._to(worker, "dead", f"it hung for {now - heard:.0f} s and is ended")
            elif worker.alive and worker.state != "slow":
                self._to(worker, "slow", sick)
            await self._pause(worker, patience.every - (now - asked))

    async def _is_well(self, worker: Worker) -> None:
        if worker.state == "slow":
            self._to(worker, "ready", "it answers again")
        elif worker.state == "dead" and await self._is_flushed(worker):
            self._to(worker, "back", "it answers again, and its cache is empty")

    async def _is_flushed(self, worker: Worker) -> bool:
        """Empties the cache of a worker that hung; False: not yet (what it had begun is not yet aborted)."""
        import httpx

        assert worker.client is not None
        try:
            answer = await worker.client.post("/flush_cache", timeout=self.patience.deadline / 2)
        except httpx.HTTPError:
            return False
        return answer.status_code in (200, 404)

    async def _sick(self, worker: Worker, seconds: float) -> str:
        """Why a worker is not well, or ""."""
        import httpx

        assert worker.client is not None
        try:
            answer = await asyncio.wait_for(worker.client.get("/health", timeout=seconds), seconds)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            return f"no answer within {seconds:g} s"
        except httpx.HTTPError as error:
            return one_line(error)
        return "" if answer.status_code == 200 else f"/health answers with {answer.status_code}"

    async def _pause(self, worker: Worker, seconds: float) -> None:
        """Waits, but no longer than until there is a doubt; a little while in any case."""
        doubt, least = worker.doubt, min(0.02, self.patience.every)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(doubt.wait(), max(seconds, least))
        if doubt.is_set():
            doubt.clear()
            await asyncio.sleep(least)  # whoever doubts in a circle must not keep the loop busy

    async def _end_of(self, process: Process) -> str:
        words = await asyncio.get_running_loop().run_in_executor(None, process.last_words)
        return f"its process {_ended(process.poll())}{f': {words}' if words else ''}"

    def _open(self, worker: Worker, url: str) -> None:
        import httpx

        headers = {b"authorization": f"Bearer {self._key}".encode()} if self._key else {}
        # A connection for each request: one that is kept may be closed at the other end as it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        worker.url = url
        worker.client = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, trust_env=False,
            timeout=httpx.Timeout(None, connect=5.0),
        )  # fmt: skip

    async def _close(self, worker: Worker) -> None:
        client, worker.client = worker.client, None
        if client is not None:
            await client.aclose()

    def _to(self, worker: Worker, state: str, why: str) -> None:
        """A new state: told, and to those who wait for an answer of a worker that is dead as well."""
        worker.state, worker.why = state, why
        if state == "dead":
            for tell in list(worker.attempts):
                tell(why)
        self._changed(worker, state, why)


def _ended(code: int | None) -> str:
    """How a process ended: with code 1; by SIGKILL."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
