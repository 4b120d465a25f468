"""Texts of prompts and nodes in a form that is harmless and short. Does not escape for HTML: draw/ does."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache


def pretty(text: str) -> str:
    """Special tokens and invisible characters as short signs: ► begins a message, ■ ends one."""
    text = text.replace("<|im_start|>", "►").replace("<|im_end|>", "■")
    return re.sub(r"►(\w+)\n", r"►\1: ", text)


def visible(text: str) -> str:
    """Control, unassigned and direction-changing characters as signs: each harmless in XML and on
    screen. What joins emoji together is kept."""
    return text if text.isprintable() else "".join(_sign(character) for character in text)


def short(text: str, most: int) -> str:
    """A text from outside, harmless on screen, of at most so many characters."""
    text = visible(text[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 1]}…"


@lru_cache(maxsize=4096)
def _sign(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return "¶" if character == "\n" else chr(0x2400 + code)
    if character in "\u200d\ufe0f":
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return "␡" if code == 0x7F else "□"
    return character


def asked_text(prompt: str) -> str:
    """What a prompt asks, in a few words: the last thing that the user says in it."""
    said = re.findall(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|$)", prompt, flags=re.DOTALL)
    if not said:
        said = re.findall(r"Question \d+: (.*)", prompt)
    return short((said[-1] if said else prompt).strip().replace("\n", " "), 60)


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: R7, R8 and R9."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
