"""A student's Router as a policy of the engine's own router: simulated workers take it, and real ones.

    python -m viz.live --workers 3 --route lessons/12_many_workers/exercise.py

`StudentPolicy` asks the student's object, and looks at each answer. With `strict` a wrong one is a Failure
(the grader); else the request goes to the least loaded worker, the reason says what was wrong, and all goes
on (the page). `add_policy` makes it one of the policies that the router knows by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons.grading.shared import whole
from lessons.grading.spec import Failure, students_file
from lessons.grading.words import one_line, said, shown
from minirad.cache.radix_cache import Slots
from minirad.route.policies import POLICIES, CacheAware, Choice, NoWorker, Policy, RouteOptions, WorkerView

METHODS = ("__init__", "choose", "sent", "forget")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as exercise.py describes it; it cannot be changed."""

    name: str
    alive: bool
    load: int


class Wrong(Exception):
    """What a student's method did that it must not, in words."""


class StudentPolicy(Policy):
    """A Policy that asks a student's Router. make: makes one."""

    name = "student"

    def __init__(
        self, options: RouteOptions | None = None, make: Callable[[], Any] | None = None, strict: bool = False
    ) -> None:
        super().__init__(options)
        assert make is not None
        self.broken = ""  # what went wrong first
        self._wrong, self.requests, self._strict = "", 0, strict
        self._spaces: dict[Hashable, int] = {None: 0}
        self._sent = CacheAware(self.options)  # what was sent where, for those who watch
        self._router: Any = None
        self._guarded("__init__", lambda: setattr(self, "_router", make()))

    def choose(self, tokens: Slots, workers: Sequence[WorkerView], space: Hashable = None) -> Choice:
        """What the student's choose says; where that cannot be used, the least loaded worker."""
        views = [Worker(each.name, each.alive, each.load) for each in workers]
        if not any(each.alive for each in views):
            raise NoWorker(f"none of the {len(workers)} workers is alive")
        self.requests += 1
        units = self._units(tokens, space)
        answer = self._guarded("choose", lambda: self._answer(self._router.choose(units, views), views))
        if answer is None:
            alive = [at for at, each in enumerate(views) if each.alive]
            worker = min(alive, key=lambda at: (views[at].load, (at - self._turn) % len(views)))
            answer = worker, f"the least loaded: {self._wrong}"
        self._turn = answer[0] + 1
        matches = tuple(self._sent.match(at, each, tokens, space) for at, each in enumerate(workers))
        return Choice(answer[0], answer[1], matches, tuple(each.load for each in views))

    def sent(self, worker: int, tokens: Slots, space: Hashable = None) -> None:
        self._sent.sent(worker, tokens, space)
        self._guarded("sent", lambda: self._router.sent(worker, self._units(tokens, space)))

    def forget(self, worker: int) -> None:
        self._sent.forget(worker)
        self._guarded("forget", lambda: self._router.forget(worker))

    def _units(self, tokens: Slots, space: Hashable) -> list[int]:
        """Tokens as numbers that differ between namespaces; so a student need not know of these."""
        first = self._spaces.setdefault(space, len(self._spaces)) << 32
        return [first + int(token) for token in tokens]

    def _answer(self, answer: Any, views: Sequence[Worker]) -> tuple[int, str]:
        """The same if it can be one; Wrong says what it is instead."""
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Wrong(f"returned {shown(answer)}, not (worker, why)")
        worker, why = whole(answer[0]), answer[1]
        if worker is None or isinstance(answer[0], bool) or not 0 <= worker < len(views):
            raise Wrong(f"chose worker {shown(answer[0])}; they have the numbers 0 to {len(views) - 1}")
        if not views[worker].alive:
            raise Wrong(f"chose worker {worker}, which is not alive")
        if not isinstance(why, str) or not why.strip():
            raise Wrong(f"gave {shown(why)} as the reason, not a line of text")
        return worker, one_line(why)

    def _guarded(self, name: str, call: Callable[[], Any]) -> Any:
        """Runs a method of the student's. What is wrong is raised, or kept, with the moment."""
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._strict and isinstance(error, NotImplementedError | Failure | SystemExit):
                raise
            what = str(error) if isinstance(error, Wrong) else f"raised {said(error)}"
            when = f"at request {self.requests} " if self.requests else ""
            self._wrong = one_line(f"{when}your {name} {what}")
            self.broken = self.broken or self._wrong
            if self._strict:
                raise Failure(self._wrong) from error
            return None


def student_router(path: str | Path) -> Callable[[], Any]:
    """What makes the Router of a file; ValueError says what is not there, or not written yet."""
    file, (own, todo) = Path(path), students_file(path)
    make: Callable[[], Any] | None = own.get("Router")
    if make is None or not callable(make):
        raise ValueError(f"{file} has no class Router")
    for name in METHODS:
        if name in todo or not hasattr(make, name):
            raise ValueError(f"{file}: Router.{name} is not written yet")
    return make


def add_policy(path: str) -> None:
    """The Router of a file joins the policies that the engine's router knows, under the file's name."""
    make = student_router(path)

    class OfFile(StudentPolicy):
        name = path

        def __init__(self, options: RouteOptions | None = None) -> None:
            super().__init__(options, make)

    POLICIES[path] = OfFile
