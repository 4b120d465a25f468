"""Ctrl-C that waits: a step that has begun to change the books is finished before it is interrupted.

Python raises KeyboardInterrupt between any two instructions, also between "taken off the queue" and "put
into the batch". Inside a `HeldInterrupts` block it is noted instead; `let_through` opens a window for
work that can be given up at any point (a forward pass), and `deliver` raises what was noted. Only the
main thread gets signals, so elsewhere this does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class HeldInterrupts:
    """A block in which Ctrl-C is noted, not raised; the handler that was there is put back at its end."""

    def __init__(self) -> None:
        self._usual: Callable[[int, FrameType | None], Any] | None = None
        self._noted = False

    def __enter__(self) -> HeldInterrupts:
        usual = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(usual):
            self._usual = usual
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    @property
    def noted(self) -> bool:
        """Ctrl-C was pressed and is not delivered yet."""
        return self._noted

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """A window in which Ctrl-C is raised as usual, also one that was noted before."""
        if self._usual is None:
            yield
            return
        signal.signal(signal.SIGINT, self._usual)
        try:
            self.deliver()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def deliver(self) -> None:
        """Does now what Ctrl-C would have done (raise KeyboardInterrupt, usually), if it was pressed."""
        if self._noted and self._usual is not None:
            self._noted = False
            self._usual(signal.SIGINT, None)
