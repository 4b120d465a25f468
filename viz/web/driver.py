"""The engine's thread of the live page: steps at a pace, and the page's commands in between.

Other threads put a command into its queue, and read what was recorded. Knows nothing of HTTP (routes.py).
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future

from minirad import workloads
from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import HOST_WRITE
from minirad.errors import InvariantError, RankLost
from minirad.schedule.policies import POLICIES as SCHEDULE
from viz.web.commands import COMMANDS, LOOKING, Command, Json, RunBroke, Session
from viz.web.compare import Shown
from viz.web.settings import Settings

DISK_ENDING = 10.0  # seconds in which what the tree holds is written


class Driver(threading.Thread, Session):
    """The one thread that touches the engine: runs steps at a pace, and commands in between."""

    what, ending = "the engine", 0.3  # ending: seconds that its end may take

    def __init__(
        self, settings: Settings, speed: float, *, paused: bool = False, replay: Shown | None = None
    ) -> None:
        threading.Thread.__init__(self, name="engine", daemon=True)
        Session.__init__(self, settings, speed, not paused and replay is None, replay)
        if settings.disk_dir is not None:
            self.ending = DISK_ENDING
        self.error = ""
        self.failure: Exception | None = None  # the same, as it was raised
        self.first: Callable[[], None] = lambda: None  # called in this thread before there is an engine
        self._listeners: list[Callable[[], None]] = []
        self._token = secrets.token_hex(4)
        self._commands: queue.Queue[tuple[Command, Json, Future[Json]]] = queue.Queue()
        self._stopping, self._ended = threading.Event(), threading.Event()

    # ------------------------------------------------------------ from other threads

    def command(self, name: str, arguments: Json) -> Future[Json]:
        """Asks for a command in the engine's thread. Its answer, or its ValueError; one that is given up
        before it began is not run."""
        answer: Future[Json] = Future()
        if name not in COMMANDS:
            answer.set_exception(ValueError(f"unknown command {name!r}"))
        elif self.error or self._ended.is_set():
            answer.set_exception(
                ValueError("the engine has stopped with an error" if self.error else "the engine has stopped")
            )
        else:
            self._commands.put((COMMANDS[name], arguments, answer))
            if self._ended.is_set():  # meanwhile: then the thread may have looked before this came
                self._refuse_the_rest()
        return answer

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._stopping.set()
        self._commands.put((_wake, {}, Future()))  # it may be waiting for one
        self._announce()

    def fail(self, error: str) -> None:
        """The run is over, whatever the thread does: so say the pages. What it said itself stays."""
        self.error = self.error or error
        self._announce()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called, in any thread, whenever something has changed; returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def key(self, run: Shown) -> str:
        """Names a run so that no page takes it for one of a server that was here before."""
        return f"{run.number}.{self._token}"

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def page_kind(self) -> str:
        """Which page shows this: viz/static/page.js, compare.js for two engines, ranks.js for ranks."""
        if self.run_now is not None:
            return self.run_now.page.kind
        return "compare" if self.settings.compare else "ranks" if self.settings.tp > 1 else "page"

    def hello(self, run: Shown) -> Json:
        """What a page needs when a run begins."""
        settings = dataclasses.asdict(self.settings)
        return {
            "run": self.key(run),
            "kind": self.page_kind,
            "meta": run.page.meta(run.workload.title),
            "choices": {
                "workload": list(workloads.WORKLOADS),
                "schedule_policy": list(SCHEDULE),
                "eviction_policy": list(EVICTION),
                "page_size": [1, 2, 4, 8, 16],
                "host_write": list(HOST_WRITE),
            },
            "settings": {
                **settings,
                "record": None,
                "model": None,
                "cache": None,
                "lora": None,
                "disk_dir": None,
                "base": None,
                "workload": self.settings.workload_name,  # what a restart begins anew, also of a fork
            },
            "status": self.status(),
        }

    def status(self) -> Json:
        """What the page's header and buttons depend on."""
        run = self.run_now
        return {
            "run": self.key(run) if run else "",
            "playing": self.playing,
            "speed": self.speed,
            "idle": run is None or run.idle,
            "drivable": run is not None and run.drivable and not self.error,
            "error": self.error,
            "notices": list(run.notices[-3:]) if run else [],
            "refused": run.refused if run else "",
            "policy": run.policy if run else "",
        }

    @property
    def mistake(self) -> Exception | None:
        """Why no engine could be made of what the caller asked for, if that is so."""
        begun = self.run_now is not None
        return self.failure if not begun and isinstance(self.failure, ValueError | OSError) else None

    # ------------------------------------------------------------ in the engine's thread

    def run(self) -> None:
        try:
            if self.run_now is None:
                self.first()
                self.begin(self.settings, None)
                self._announce()
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            students = self.settings.students and isinstance(error, InvariantError)
            self.error, self.failure = str(error) if students else f"{type(error).__name__}: {error}", error
            if not students and not isinstance(error, RankLost) and self.mistake is None:
                traceback.print_exc()  # of what a student wrote the one line that is printed says more
        finally:
            try:
                if self.run_now is not None:
                    self.run_now.close(broken=bool(self.error))
            finally:
                self._end()

    def _end(self) -> None:
        """Answers the commands that will not be done; pages hear it after the last frame, which may hold what
        broke a student's tree."""
        self._ended.set()
        self._refuse_the_rest()
        self._announce()

    def _refuse_the_rest(self) -> None:
        """Of the commands in the queue none will be done. From any thread."""
        while True:
            try:
                _, _, answer = self._commands.get_nowait()
            except queue.Empty:
                return
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ValueError("the engine has stopped"))

    def _turn(self) -> None:
        """One step if one is due, and every command that comes until the next one is."""
        started = time.perf_counter()
        run = self.run_now
        pause = 0.5
        if run is not None and run.drivable and self.playing and not run.idle:
            run.advance()
            self._announce()
            pause = 1 / self.speed if self.speed > 0 else 0.0
        while not self._stopping.is_set():
            left = started + pause - time.perf_counter()
            try:
                command, arguments, answer = self._commands.get(timeout=max(left, 0.0005))
            except queue.Empty:
                return
            if self._obey(command, arguments, answer):
                return

    def _obey(self, command: Command, arguments: Json, answer: Future[Json]) -> bool:
        """Runs one command. What is wrong with the command is the page's to show, and the run goes on;
        only what broke within the run ends it."""
        if not answer.set_running_or_notify_cancel():
            return False  # its page no longer waits
        try:
            answer.set_result(command(self, arguments))
        except ValueError as error:
            answer.set_exception(error)
        except RunBroke as broke:
            cause = broke.__cause__ or broke
            answer.set_exception(ValueError(f"{type(cause).__name__}: {cause}"))
            raise cause from None
        except Exception as error:
            answer.set_exception(ValueError(f"{type(error).__name__}: {error}"))
        self._announce()
        return command not in LOOKING

    def _announce(self) -> None:
        for listener in tuple(self._listeners):
            listener()


def _wake(session: Session, arguments: Json) -> Json:
    """Does nothing: an engine's thread that waits for a command looks up."""
    return {}
