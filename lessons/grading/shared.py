"""Checks and material that several lessons' exercises have in common."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
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
