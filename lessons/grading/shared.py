"""Checks and material that several lessons' exercises have in common."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import WrapperDescriptorType
from typing import Any

import numpy as np
import numpy.typing as npt

from lessons.grading.spec import expect
from lessons.grading.words import shown


def rows_of(lengths: Sequence[int], page_size: int, order: Sequence[int], rest: int) -> npt.NDArray[np.int64]:
    """Rows as the engine makes them, of pages in the given order; `rest` fills what is beyond the lengths."""
    rows = np.full((len(lengths), max(lengths) + 2 * page_size), rest, dtype=np.int64)
    pages = iter(order)
    for row, length in zip(rows, lengths, strict=True):
        for first in range(0, length, page_size):
            count = min(page_size, length - first)
            row[first : first + count] = next(pages) * page_size + np.arange(count)
    return rows


def whole(value: Any) -> int | None:
    """A whole number, however it came about: Python's, numpy's, one of an array, or 3.0. None for all else.

    (Also for 2.5: whoever forgot to round a page's number down has made a mistake.)
    """
    try:
        if isinstance(value, numbers.Real):
            down: Any = math.floor(value)
            return int(down) if down == value else None
        return operator.index(value)
    except Exception:  # nan, a text, or an object that will not be asked
        return None


def as_ints(values: Any, where: str) -> list[int]:
    """What a student's function returned as a list of numbers; a Failure says what it was instead."""
    try:
        found = [whole(value) for value in iter(values)]
    except TypeError:
        found = [None]
    known = [number for number in found if number is not None]
    expect(len(known) == len(found), f"{where}: it returned {shown(values)}, which is no list of numbers")
    return known


CONTAINERS = (list, tuple, set, frozenset, dict)
PLAIN = (int, float, complex, str, bytes, *CONTAINERS)


def expect_plain(name: str, answer: Any, folder: Path) -> None:
    """A Failure for an answer whose == or != was written in this folder, a submission's: it may say that it
    is equal to whatever is right.

    Looks into lists, tuples, sets, dictionaries and numpy's arrays of objects. An object of an own class may
    have an == (a learner keeps it, and is given it again), unless it is equal to what it has never seen.
    """
    left, seen = [answer], set()
    while left:
        value = left.pop()
        wrong = _own_equality(type(value), folder) and (isinstance(value, PLAIN) or _equals_all(value))
        expect(not wrong, f"{name} returned {shown(value)}, which has an == of its own: return a plain value")
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            value = value.ravel().tolist()
        if isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))  # a list may hold itself
            within = [*value, *value.values()] if isinstance(value, dict) else list(value)
            left += [each for each in within if isinstance(each, (*CONTAINERS, np.ndarray))]
            left += {type(each): each for each in within if not isinstance(each, CONTAINERS)}.values()


def _own_equality(kind: type, folder: Path) -> bool:
    for made in (kind.__eq__, kind.__ne__):
        if isinstance(made, WrapperDescriptorType):  # Python's or numpy's
            continue
        code = getattr(made, "__code__", None)
        if code is None:  # no function: no library does so
            return True
        file = code.co_filename  # of what a dataclass makes "<string>"
        if not file.startswith("<") and folder in Path(file).absolute().parents:
            return True
    return False


def _equals_all(value: Any) -> bool:
    unseen = object()
    try:
        return bool(value == unseen) or bool(value != unseen) is False
    except Exception:  # it knows its own kind alone
        return False


def expect_answers(name: str, answer: Any, truth: Mapping[str, Any], why: Mapping[str, str]) -> None:
    """A claim's numbers, as the student's function `name` gave them, beside those of the engine."""
    expect(isinstance(answer, dict), f"{name} returned {answer!r}, not a dictionary")
    missing = sorted(set(truth) - set(answer))
    expect(not missing, f"{name}: {', '.join(missing)} is missing")
    for key, value in truth.items():
        expect(
            answer[key] == value,
            f'"{key}" is {answer[key]!r} in your answer; that is not what the engine does: {why[key]}',
        )
