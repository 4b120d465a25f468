"""What strangers wrote, made fit for a report: of bounded length, and every character can be written."""

from __future__ import annotations

import os
import re

LONGEST = 4000
# Control characters other than tab and newline, and those that turn the direction of writing round.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]")


def plain(text: str, longest: int = LONGEST) -> str:
    """The beginning of a text; what cannot be encoded or seen is written as an escape."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def one_line(text: str, longest: int = 200) -> str:
    """The same, without line breaks."""
    return plain(text, longest).replace("\n", "\\n").replace("\t", "\\t")


def file_name(name: str) -> str:
    """A file's name in words, also one that is no UTF-8."""
    return one_line(os.fsencode(name).decode("utf-8", "backslashreplace"))


def said(error: BaseException) -> str:
    """An exception's type and text; its text may be anything, and may itself raise."""
    try:
        text = plain(str(error))
    except Exception:
        text = "(its text cannot be made)"
    name = plain(type(error).__name__, 200)
    return f"{name}: {text}" if text else name


def shown(value: object) -> str:
    """A returned value in words."""
    try:
        return one_line(repr(value))
    except Exception as error:
        kinds = [plain(type(each).__name__, 200) for each in (value, error)]
        return f"something of type {kinds[0]} whose repr raises {kinds[1]}"
