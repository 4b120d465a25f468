"""What a program can await, and how it is resumed: a trampoline, without asyncio and without threads.

A program is a coroutine. Where it awaits something that is not there yet, it hands that thing out and
stands still; the one that has the answer settles the thing, and the program is put into a queue to go on.
Nothing here knows an engine or decides who is resumed first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
Resume = Callable[["Task[Any]"], None]


class ProgramError(Exception):
    """What a program asked for could not be had; the message says what, and in whose words why."""


class Waitable(Generic[T]):
    """A value that will be there later, or the error that came instead.

    what: its name in messages. resume: called with each task that waited, once it is settled.
    """

    def __init__(self, what: str, resume: Resume) -> None:
        self.what = what
        self.done = False
        self.error: Exception | None = None
        self.heard = False  # a caller has taken the result (so an error has reached the program)
        self._value: T | None = None
        self._resume = resume
        self._waiting: list[Task[Any]] = []

    def __await__(self) -> Generator[Waitable[Any], None, T]:
        if not self.done:
            yield self
        return self.result()

    def result(self) -> T:
        """The value, or raises the error; ProgramError before it is settled."""
        if not self.done:
            raise ProgramError(f"{self.what} is not done: await it first")
        self.heard = True
        if self.error is not None:
            raise self.error
        return cast(T, self._value)

    def settle(self, value: T | None = None, error: Exception | None = None) -> None:
        """Gives the value or the error, and lets those who wait go on, in the order of their waiting."""
        self.done, self._value, self.error = True, value, error
        for task in self._waiting:
            self._resume(task)

    def wait(self, task: Task[Any]) -> None:
        """Has `task` resumed once this is settled."""
        if self.done:
            self._resume(task)
        else:
            self._waiting.append(task)


class Task(Waitable[T]):
    """A coroutine on its way; its return value is what others await."""

    def __init__(self, what: str, coroutine: Coroutine[Any, None, T], resume: Resume) -> None:
        super().__init__(what, resume)
        self._coroutine = coroutine

    def step(self) -> None:
        """Runs the coroutine to the next thing that is not there yet, or to its end."""
        if self.done:
            return
        try:
            waits_for = self._coroutine.send(None)
            while not isinstance(waits_for, Waitable):
                mistake = f"a program can await its state's calls and other programs, not {waits_for!r}"
                waits_for = self._coroutine.throw(TypeError(mistake))
        except StopIteration as stop:
            self.settle(stop.value)
        except Exception as error:  # the program's own code: anything may come out of it
            self.settle(error=error)
        else:
            waits_for.wait(self)

    def close(self) -> None:
        """Ends the coroutine where it stands; its `finally` blocks run."""
        if not self.done:
            with suppress(Exception):  # an end for good: what its last words raise changes nothing
                self._coroutine.close()
            self.settle(error=ProgramError(f"{self.what} was ended"))
