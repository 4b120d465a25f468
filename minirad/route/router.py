"""The router: one API in front of several servers of ours, a policy that says which, events that say why.

    router = Router(Settings(workers=4, policy="cache-aware"))
    router.listen(print)                      # RequestRouted, RouteFinished, WorkerChanged
    router.start()
    ...                                       # clients talk to router.url
    router.stop()

All of it runs in one event loop, in a thread of its own: the front, the workers' health, their KV events (as
they come from the follower's thread) and the trees made of them. So no lock is needed, and whoever owns the
router may be any thread. Texts become tokens in another thread. Of torch nothing is imported.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from minirad import command
from minirad.config import EngineConfig, namespace
from minirad.errors import whole
from minirad.fleet.endpoints import free_ports, rank_endpoints
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered, Follower, Restart, State, Told, Trouble
from minirad.model.load import load_tokenizer, resolve_model
from minirad.observe.fleet_events import LONGEST_TEXT
from minirad.observe.route_events import (
    ROUTES_KEPT,
    RequestRouted,
    RouteFinished,
    WorkerChanged,
    judged_in_the_end,
    worker_name,
)
from minirad.options import add_engine_options, engine_config
from minirad.rooms import room
from minirad.route.app import make_app
from minirad.route.metrics import Metrics
from minirad.route.oracle import Oracle
from minirad.route.policies import RouteOptions, WorkerView, make_policy
from minirad.route.proxy import ENDING, Asked, Ended, Job, Limits, Proxy
from minirad.route.trees import EventTree
from minirad.route.workers import Launch, Patience, ServerProcess, Worker, Workers
from minirad.server.connections import Connection, listening
from minirad.server.prompts import chat_prompt, completion_prompts
from minirad.server.protocol import Body, chat, completion
from minirad.tokenizing import Tokenizing

RouteEvent = RequestRouted | RouteFinished | WorkerChanged
Listener = Callable[[RouteEvent], object]

MOST_WORKERS = 64
DRAIN = 3.0  # seconds that requests in flight have when the router ends
GRACE = 2.0  # seconds that a worker's have when nobody is there any more to read them
TICK = 0.1  # seconds
# How an attempt ended (proxy.Ended), as events say it.
_OUTCOMES = {
    "answered": "finished", "failed": "moved", "full": "moved", "broken": "failed", "refused": "failed",
    "gone": "cancelled",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What a router is told once.

    workers: how many. engine: options of `python -m minirad serve` for each of them. host, port: of the
    front; port 0: any. key: of the front and of the workers, "" for none. kv_port: of the KV events of worker
    0, next to it those of the others, then their replays; None: any. record: a new file for stream and
    routes. keep: a recording in memory, `Router.flight`, without a file too. loud: says on stderr how workers
    are. launch, follow: in tests, other workers, and without KV events.
    """

    workers: int = 4
    policy: str = "cache-aware"
    options: RouteOptions = field(default_factory=RouteOptions)
    engine: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 0
    key: str = ""
    limits: Limits = field(default_factory=Limits)
    patience: Patience = field(default_factory=Patience)
    kv_port: int | None = None
    record: Path | None = None
    keep: bool = False
    loud: bool = False
    launch: Launch | None = None
    follow: bool = True

    def __post_init__(self) -> None:
        whole("workers", self.workers, 1)
        if self.workers > MOST_WORKERS:
            raise ValueError(f"a router starts 1 to {MOST_WORKERS} workers, got {self.workers}")
        make_policy(self.policy)
        if not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise ValueError("an API key must be printable ASCII without spaces")
        if not self.follow and (self.policy == "events" or self.record is not None or self.keep):
            raise ValueError("the policy events, and a recording, need the workers' KV events")
        if self.kv_port is not None:
            rank_endpoints(f"tcp://127.0.0.1:{self.kv_port}", 2 * self.workers)


class Router:
    """A front and its workers, from `start` to `stop`.

    url: of the front, from `start` on. workers: how each is. flight: the recording of stream and routes where
    the settings ask for one (`flight.recording`, `flight.files`), else None. routes: the last choices, newest
    last.

    Raises ValueError for engine options that are none, and a model or an adapter that is not there.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.url, self.kv_port = "", settings.kv_port or 0
        self.engine = engine_of(settings.engine)
        if self.engine.lora:  # each worker would say the same
            room("adapters.where").check(self.engine.lora)
        options = replace(settings.options, page_size=self.engine.page_size)
        self.policy, self.metrics = make_policy(settings.policy, options), Metrics()
        self.trees = [EventTree() for _ in range(settings.workers)]
        self._lines: dict[str, str] = {}  # of the workers' stderr
        self._said = [""] * settings.workers  # the last state of each stream of KV events
        self.oracle = Oracle(self.trees if settings.follow else [None] * settings.workers)
        self.routes: deque[dict[str, Any]] = deque(maxlen=ROUTES_KEPT)
        self.flight: Flight | None = None
        names = [worker_name(rank) for rank in range(settings.workers)]
        launch = settings.launch or self._launch
        self.workers = Workers(names, launch, self._worker_changed, settings.patience, settings.key)
        self.proxy = Proxy(self._read, self._choose, self._over, settings.limits)
        self.folder = _folder(self.engine)
        self._texts = Tokenizing(None, None if self.folder is None else self._load, ())
        self._reader = ThreadPoolExecutor(1, "router-texts")  # a tokenizer is not for two threads at once
        self._listeners: list[Listener] = []
        self._failure: BaseException | None = None
        self._ready, self._ended = threading.Event(), threading.Event()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ from any thread

    def start(self, wait: bool = True) -> Router:
        """Opens the front and starts the workers; wait: until all of them are ready.

        CannotStart, and nothing is left running, where a worker cannot start at all. ValueError for a port
        that is taken; OSError for a file that cannot be written.
        """
        settings = self.settings
        front = listening(settings.host, settings.port)
        try:
            host, port = front.getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if settings.follow and not self.kv_port:
                self.kv_port = free_ports(2 * settings.workers)
            if settings.record is not None or settings.keep:
                self.flight = Flight(
                    self.endpoints, block_size=self.engine.page_size, path=settings.record,
                    tokenizer=None if self.folder is None else str(self.folder),
                    notes={
                        "title": f"{settings.workers} workers, {settings.policy}",
                        "route": asdict(settings.options),  # a page draws the thresholds
                    },
                )  # fmt: skip
        except BaseException:
            front.close()
            raise
        self._thread = threading.Thread(target=self._run, args=(front,), name="router", daemon=True)
        atexit.register(self.workers.kill)
        self._thread.start()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Waits until all workers were ready once; False: not in time. Raises what ended the router."""
        self._ready.wait(timeout)
        if self._failure is not None:
            self.stop()
            raise self._failure
        return self._ready.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits; True if the router has ended. Raises what ended it."""
        over = self._ended.wait(seconds)
        if over and self._failure is not None:
            raise self._failure
        return over

    def stop(self) -> None:
        """Ends requests, front and workers, within seconds; calling it twice does no harm."""
        self.end_soon()
        if self._thread is not None and threading.current_thread() is not self._thread:
            patience = self.settings.patience.grace + DRAIN + 10
            self._thread.join(patience)
            self.workers.kill()
        atexit.unregister(self.workers.kill)

    def end_soon(self) -> None:
        """Asks it to end; does not wait."""
        self._stopped = True
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                loop.call_soon_threadsafe(stopping.set)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls this with each event, in the router's thread; returns what ends it.

        A listener that raises is left out from then on.
        """
        self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    @property
    def endpoints(self) -> list[str]:
        """Where each worker publishes its KV events."""
        if not self.kv_port:
            return []
        return rank_endpoints(f"tcp://127.0.0.1:{self.kv_port}", self.settings.workers)

    @property
    def replays(self) -> list[str]:
        """Where each worker can be asked for those that were missed."""
        count = self.settings.workers
        return rank_endpoints(f"tcp://127.0.0.1:{self.kv_port + count}", count) if self.kv_port else []

    # ------------------------------------------------------------ its life

    def _run(self, front: socket.socket) -> None:
        try:
            asyncio.run(self._main(front))
        except BaseException as error:  # told by wait and wait_ready
            self._failure = self._failure or error
        finally:
            front.close()
            self.workers.kill()
            if self.flight is not None:
                self.flight.close()
            self._ended.set()
            self._ready.set()

    async def _main(self, front: socket.socket) -> None:
        import uvicorn

        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if self._stopped:
            return
        config = uvicorn.Config(
            make_app(self), http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            log_level="critical", server_header=False, timeout_graceful_shutdown=1, timeout_keep_alive=15,
        )  # fmt: skip
        server = uvicorn.Server(config)
        follower = Follower(self.endpoints, self.replays, tell=self._hand_over) if self.endpoints else None
        tasks = [
            asyncio.ensure_future(each)
            for each in (server.serve([front]), self.workers.keep(), self._stopping.wait(), self._tick())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.exception() for task in tasks if task.done()]
            self._failure = next((each for each in failures if each is not None), None)
            await self._drain()
        finally:
            server.should_exit = True
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.workers.end()
            if follower is not None:
                await self._loop.run_in_executor(None, follower.close)

    async def _drain(self) -> None:
        """Nothing new is taken; what is in flight may end, and is ended after a while."""
        self.proxy.closing = True
        until = time.monotonic() + (DRAIN if self._failure is None else 0.0)
        while self.proxy.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for worker in self.workers:
            for tell in list(worker.attempts):
                tell(ENDING)
        until = time.monotonic() + 0.5
        while self.proxy.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)

    async def _tick(self) -> None:
        """Loads the tokenizer before it is needed, and ends the recording's frames."""
        await asyncio.get_running_loop().run_in_executor(self._reader, lambda: self._texts.texts)
        while True:
            await asyncio.sleep(TICK)
            if self.flight is not None:
                self.flight.tick()

    # ------------------------------------------------------------ workers

    def _launch(self, rank: int, ended: Callable[[], None]) -> ServerProcess:
        settings = self.settings
        parent = str(os.getpid())
        words = [sys.executable, "-m", "minirad", "serve", "--port", "0", "--exit-with-parent", parent]
        words += ["--max-body", str(settings.limits.body), "--grace", str(GRACE)]
        if self.endpoints:
            words += ["--kv-events", self.endpoints[rank], "--kv-replay", self.replays[rank]]
        secret = {"MINIRAD_API_KEY": settings.key}  # no process list shows it
        return ServerProcess(worker_name(rank), [*words, *settings.engine], ended, secret, self._lines)

    def _worker_changed(self, worker: Worker, state: str, why: str) -> None:
        if state == "dead":
            self._forget(worker.rank, why)
        self._tell(WorkerChanged(worker.rank, state, _short(why), worker.url))
        if self.settings.loud:
            said = f": {command.one_line(why)}" if why else ""
            print(f"minirad route: {worker.name} {state}{said}", file=sys.stderr, flush=True)
        if all(each.alive for each in self.workers):
            self._ready.set()

    def _forget(self, rank: int, why: str) -> None:
        """What a worker held is forgotten, in all trees."""
        self.policy.forget(rank)
        self.trees[rank].clear()
        if self.flight is not None:
            self.flight.take(Restart(rank, _short(f"{worker_name(rank)} is dead: {why}")))

    # ------------------------------------------------------------ KV events

    def _hand_over(self, told: Told) -> None:
        """In the follower's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._told, told)

    def _told(self, told: Told) -> None:
        if isinstance(told, Delivered):
            for event in told.batch.events:
                self.trees[told.rank].take(event)
        elif isinstance(told, Restart):
            self.trees[told.rank].clear()
        if self.flight is not None and not self._is_idle(told):
            self.flight.take(told)

    def _is_idle(self, told: Told) -> bool:
        """It says no more than that nothing is stored just now, or again, or that a worker is not yet there.

        How workers are is told by themselves: their health is asked for.
        """
        if isinstance(told, Trouble):
            return not self.workers.all[told.rank].alive
        if not isinstance(told, State):
            return False
        before, self._said[told.rank] = self._said[told.rank], told.state
        return told.state == "silent" or (before, told.state) == ("silent", "live")

    def _tell(self, event: RouteEvent) -> None:
        self.metrics.take(event)
        if self.flight is not None:
            self.flight.note(event)
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception as error:  # a page's mistake is no reason to lose a request
                self._listeners.remove(listener)
                print(f"minirad route: a listener failed: {error!r}", file=sys.stderr)

    # ------------------------------------------------------------ requests

    async def _read(self, path: str, body: bytes) -> Asked:
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._asked, path, body)

    def _asked(self, path: str, body: bytes) -> Asked:
        """In the thread of the tokenizer. ApiError says what is wrong, as a worker would."""
        if path.endswith("/chat/completions"):
            talk = chat(body)
            asked: Body = talk
            prompts = [chat_prompt(talk, self._texts)]
        else:
            text = completion(body)
            asked, prompts = text, completion_prompts(text, self._texts)
        hides = asked.stream and not asked.include_usage
        space = namespace(self.engine, asked.cache_salt, asked.adapter(dict(self.engine.lora)))
        return Asked(prompts[0], sum(map(len, prompts)), space, hides)

    def _load(self) -> Any:
        assert self.folder is not None
        return load_tokenizer(self.folder)

    def _choose(self, job: Job) -> Worker | None:
        """A worker for a request, or None: nothing is left to be tried."""
        if self.proxy.closing:
            return None
        asked, workers = job.asked, self.workers.all
        left = [worker.alive and worker.name not in job.tried for worker in workers]
        if not any(left):
            return None
        views = [
            WorkerView(each.name, is_left, each.load, each.queued_tokens, tree)
            for each, is_left, tree in zip(workers, left, self.trees, strict=True)
        ]
        choice = self.policy.choose(asked.tokens, views, asked.space)
        judged = self.oracle.judge(asked.tokens, left, choice.worker, asked.space)
        event = RequestRouted(
            job.name, choice.worker, self.policy.name, _short(choice.reason), choice.matches, choice.loads,
            None if judged is None else judged.best, None if judged is None else judged.regret,
            asked.prompt_tokens,
        )  # fmt: skip
        self.policy.sent(choice.worker, asked.tokens, asked.space)
        worker = workers[choice.worker]
        worker.routed += 1
        self.routes.append({**asdict(event), "outcome": "", "cached": None})
        self._tell(event)
        return worker

    def _over(self, job: Job, worker: Worker, ended: Ended) -> None:
        """An attempt has ended."""
        asked, outcome = job.asked, _OUTCOMES[ended.outcome]
        if outcome == "finished":
            self.policy.finished(worker.rank, asked.tokens, asked.space)
        worker.failed += ended.outcome in ("failed", "broken")
        cached = min(job.cached or 0, asked.prompt_tokens)
        for route in reversed(self.routes):
            if (route["request"], route["worker"], route["outcome"]) == (job.name, worker.rank, ""):
                route.update(outcome=outcome, cached=job.cached, why=ended.why)
                if outcome == "finished":
                    said = judged_in_the_end(route["best"], route["regret"], cached)
                    route["best"], route["regret"] = said
                break
        self._tell(RouteFinished(job.name, worker.rank, cached, asked.prompt_tokens, outcome))


# ---------------------------------------------------------------------- what it is made of


def engine_of(options: Sequence[str]) -> EngineConfig:
    """What the workers' options say of their engines; ValueError for what is no engine's option."""
    parser = command.Parser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_engine_options(parser)
    try:
        known, others = parser.parse_known_args(list(options))
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"options of the workers' engines: {error}") from None
    if others:
        raise ValueError(f"options of the workers' engines: {' '.join(others)} is none")
    return engine_config(known)


def _folder(engine: EngineConfig) -> Path | None:
    """Where the tokenizer of the workers' model lies; None: a bare model."""
    return None if engine.dummy_weights else resolve_model(engine.model)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
