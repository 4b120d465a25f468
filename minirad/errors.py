"""Errors of our own, and what a caller gives looked at once.

A caller's mistake is a ValueError whose sentence names the argument and what it takes; a broken promise of
the engine is an InvariantError. Numpy's scalars are numbers. Nothing here changes anything or imports torch.
"""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST_NAME = 500  # characters of an adapter's name
MOST = (1 << 63) - 1  # what the rest of the world calls a number


class InvariantError(AssertionError):
    """An invariant of the engine does not hold; the message names the place and both numbers."""


class RanksDiffer(InvariantError):
    """The trees, pools or queues of two ranks are not the same; the message names step, place and rank."""


class RankLost(RuntimeError):
    """Another rank of this run has ended, hangs or failed: no rank can go on."""


class HostCopyError(RuntimeError):
    """A copy between device and host memory could not be begun; nothing was copied."""


class DiskWarning(RuntimeWarning):
    """Something is wrong with the files of a disk tier: what they were to save is computed."""


def require(condition: bool, message: str) -> None:
    """Raises InvariantError unless the condition holds (also under `python -O`)."""
    if not condition:
        raise InvariantError(message)


def said(value: Any) -> str:
    """A value in a sentence, shortened."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return f"{type(value).__name__} with too many digits"


def plain(value: Any) -> Any:
    """A numpy scalar as Python's own number; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def whole(name: str, value: Any, least: int = -MOST) -> int:
    """A whole number of at most 64 bits as an int; ValueError names it otherwise."""
    if type(value) is int and least <= value <= MOST:  # nearly always
        return value
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {said(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {said(value)}")
    if value > MOST:
        raise ValueError(f"{name} must fit into 64 bits, got {said(value)}")
    return value


def truth(name: str, value: Any, *, or_none: bool = False) -> None:
    """ValueError unless it is True or False (or None): "no" is no bool."""
    if not (isinstance(value, bool) or (or_none and value is None)):
        kinds = "True, False or None" if or_none else "True or False"
        raise ValueError(f"{name} must be {kinds}, got {said(value)}")


def prompt(value: Any, name: str = "a prompt") -> None:
    """ValueError unless it can be a text or a row of token ids; the ids themselves are not looked at."""
    row = isinstance(value, Sequence | np.ndarray) or hasattr(value, "__array__")
    if not isinstance(value, str) and (isinstance(value, bytes | bytearray | memoryview) or not row):
        raise ValueError(f"{name} is a text or a row of token ids, got {said(value)}")


def prompts(value: Any) -> None:
    """ValueError unless it can be one prompt, or a list of them."""
    one_number = getattr(value, "ndim", 1) == 0  # an array with a length, which cannot be asked for
    if isinstance(value, dict | set | frozenset) or not hasattr(value, "__len__") or one_number:
        raise ValueError(f"prompts are one prompt or a list of them, got {said(value)}")
    prompt(value, "prompts")


def mask(value: Any) -> None:
    """ValueError unless a token mask can be called."""
    if value is not None and (not callable(value) or inspect.isclass(value)):
        raise ValueError(f"token_mask must be a function of the ids generated so far, got {said(value)}")


def extra_key(value: Any) -> Hashable:
    """ValueError for what cannot be hashed, or cannot be said to be equal to another (a tensor)."""
    try:
        hash(value)
        bool(value == value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"extra_key must be hashable, and equal to another or not, got {said(value)}"
        ) from None
    key: Hashable = value
    return key


def adapter_name(value: Any) -> str:
    """ValueError unless it can be an adapter's name: a text that can be shown, without "=" and spaces."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= LONGEST_NAME:
        good = f"a printable text of 1 to {LONGEST_NAME} characters"
        raise ValueError(f"an adapter's name is {good}, got {said(value)}")
    if "=" in value or " " in value:
        raise ValueError(f"an adapter's name is a text without '=' and spaces, got {said(value)}")
    return value


def request_id(value: Any) -> str:
    """ValueError unless it is a text, as `add_request` returns it."""
    if not isinstance(value, str):
        raise ValueError(f"a request's id is a text such as 'R1', got {said(value)}")
    return value


def path(name: str, value: Any) -> Path:
    """A file's or a directory's path; ValueError names the argument otherwise."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a path, got {said(value)}")
    return Path(text)


def expanded(path: str | os.PathLike[str]) -> Path:
    """`~` in front of a path as the home directory; it stays where there is no such user."""
    return Path(os.path.expanduser(path))


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """A text file; ValueError names one that is no UTF-8."""
    try:
        return Path(path).read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error


def as_int64(values: Any, what: str) -> npt.NDArray[np.int64]:
    """Any one-dimensional integer sequence as a numpy int64 array; ValueError names what is off."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # rows of different lengths, say
        raise ValueError(f"{what} must be one row of integers, got {said(values)}") from error
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    kind = array.dtype.kind
    if array.ndim != 1 or kind not in "iu":
        shown = said(values) if array.ndim == 0 or kind == "O" else f"of shape {array.shape}"
        raise ValueError(f"{what} must be one row of integers, got {array.dtype} {shown}")
    if kind == "u" and array.max() > MOST:
        raise ValueError(f"{what}: {array.max()} does not fit into a signed 64-bit integer")
    return array.astype(np.int64, copy=False)
