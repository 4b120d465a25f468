"""The one error that is ours: a caller's mistake is a ValueError, a broken promise of the engine is this."""

from __future__ import annotations


class InvariantError(AssertionError):
    """An invariant of the engine does not hold; the message names the place and both numbers."""


def require(condition: bool, message: str) -> None:
    """Raises InvariantError unless the condition holds (also under `python -O`)."""
    if not condition:
        raise InvariantError(message)
