"""When Python's collector of garbage has to rest: as long as a block runs, in the whole process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["no_collections", "rare_collections"]


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """While a stream is followed, circles are looked for less often.

    A hundred thousand blocks live long and leave no circles behind; looking through them again and again was
    two fifths of the time that an event takes.
    """
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
