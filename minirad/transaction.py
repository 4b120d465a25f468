"""One public call of the engine: it happens whole or not at all, whatever comes between.

Two things come from outside at any moment: Ctrl-C, which Python raises between any two instructions, also
between "taken off the queue" and "put into the batch"; and the error of an event handler (a full disk under a
recorder). Inside a transaction both are noted and raised at its end, when the books are right. `let_through`
opens a window for work that can be given up at any point: a forward pass.

What is raised at the very end comes out of `with`, so a call that owes its caller something (an output, a
pin) holds it in a `try` around: see `Engine.step` and `Engine.add_request`. Only the main thread gets
signals.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from minirad.events import EventBus


class Transaction:
    """An engine's public calls, one after another; a call inside another one is refused.

    bus: whose handlers' errors wait for the end.
    """

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._usual: Callable[[int, FrameType | None], Any] | None = None  # what Ctrl-C did before
        self._noted = False
        self.running = False

    def __enter__(self) -> Transaction:
        if self.running:
            raise ValueError("a step is running: an event handler must not drive the engine, nor change it")
        main = threading.current_thread() is threading.main_thread()
        self._noted, self._usual = False, None
        if main and callable(signal.getsignal(signal.SIGINT)):
            self._hold()
        self._bus.hold_failures()
        self.running = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.running = False
        failures = self._bus.release_failures()
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)  # from here on Ctrl-C is raised at once
            self._deliver()
        if failures and error is None:
            raise failures[0]

    def _hold(self) -> None:
        """From now on Ctrl-C is noted. What it did before is what it did at that very moment: a handler may
        have put another in its place."""
        before: Any = signal.signal(signal.SIGINT, self._note)
        self._usual = before if callable(before) else None
        if self._usual is None:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def _deliver(self) -> None:
        """Does now what Ctrl-C would have done (raise KeyboardInterrupt, usually), if it was pressed."""
        if self._noted and self._usual is not None:
            self._noted = False
            self._usual(signal.SIGINT, None)

    def let_through(self) -> Window:
        """A window in which Ctrl-C is raised as usual, also one that was noted before."""
        return Window(self)


class Window:
    """Between its two ends Ctrl-C is raised at once. No generator: one that Python collects late would close
    its window late, too."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def __enter__(self) -> None:
        transaction = self._transaction
        if transaction._usual is not None:
            signal.signal(signal.SIGINT, transaction._usual)
            transaction._deliver()

    def __exit__(self, *exc: object) -> None:
        if self._transaction._usual is not None:
            self._transaction._hold()
