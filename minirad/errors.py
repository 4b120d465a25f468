"""Errors of our own. A caller's mistake is a ValueError; a broken promise of the engine an InvariantError."""

from __future__ import annotations


class InvariantError(AssertionError):
    """An invariant of the engine does not hold; the message names the place and both numbers."""


class HostCopyError(RuntimeError):
    """A copy between device and host memory could not be begun; nothing was copied."""


def require(condition: bool, message: str) -> None:
    """Raises InvariantError unless the condition holds (also under `python -O`)."""
    if not condition:
        raise InvariantError(message)
