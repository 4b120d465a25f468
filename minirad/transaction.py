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

from minirad.observe.events import EventBus


class Transaction:
    """An engine's public calls, one after another; a call inside another one is refused.

    bus: whose handlers' errors wait for the end. An engine serves one thread at a time.
    """

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._call: dict[str, tuple[int, object]] = {}  # thread and token of the call that is running
        self._usual: Callable[[int, FrameType | None], Any] | None = None  # what Ctrl-C did before
        self._noted = False

    @property
    def running(self) -> bool:
        """A call has begun and its books may not be right yet."""
        return bool(self._call)

    def __enter__(self) -> Transaction:
        mine = threading.get_ident(), object()
        try:
            owner = self._call.setdefault("running", mine)  # atomic, also among threads
            if owner is not mine:
                raise ValueError(
                    "a step is running: an event handler must not drive the engine, nor change it"
                    if owner[0] == mine[0] else "an engine serves one thread at a time: another one is in it"
                )  # fmt: skip
            self._hold()
            self._bus.hold_failures()
        except BaseException:  # Ctrl-C before it was held
            if self._call.get("running") is mine:
                self._call.clear()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures, usual = self._bus.release_failures(), self._usual
        self._call.clear()
        # Python may collect a stream here, and what ends its request is a call of its own: see `_hold`.
        if usual is not None:
            signal.signal(signal.SIGINT, usual)  # from here on Ctrl-C is raised at once
            if self._noted:
                self._noted = False
                usual(signal.SIGINT, None)
        if failures and error is None:
            raise failures[0]

    def _hold(self) -> None:
        """From now on Ctrl-C is noted, if this is the thread that gets it.

        What it did before is what it did at that very moment: a handler may have put another in its place.
        Where that is our own note, a call that is just ending will put the usual one back.
        """
        self._usual = None
        now = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(now):
            return
        if now != self._note:
            self._noted = False
        before: Any = signal.signal(signal.SIGINT, self._note)
        if not callable(before):
            signal.signal(signal.SIGINT, before)
        elif before != self._note:
            self._usual = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

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
            if transaction._noted:
                transaction._noted = False
                transaction._usual(signal.SIGINT, None)

    def __exit__(self, *exc: object) -> None:
        if self._transaction._usual is not None:
            self._transaction._hold()
