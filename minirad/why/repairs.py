"""What to change so that more is found in the cache: each proposal is replayed, and what it saves is counted.

    salt      everybody in one namespace
    tools     the tools always in one order, those that are new behind the others
    lines     of a system prompt (or a plain one), what varies goes behind what is common, to the last message
    messages  what was kept of the earlier messages stays in its place, and what is new comes behind it
    pair      of two requests that part, what differs goes behind what is common
    cache     a larger cache

A proposal is the same log with other prompts, or the same log and another cache; a saving is the tokens that
need not be computed any more when it is replayed from its beginning. Nothing is estimated. Whether a prompt
still means the same in another order is for its author to judge.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from minirad.cache.node import Slots
from minirad.doctor import Encoder, diagnose
from minirad.logs.request import OPENING, Part
from minirad.why.history import Cache, Entry, hits

MOST_FAMILIES = 64  # of prompts that have most of their lines in common
LONGEST = 200_000  # characters of a prompt whose lines are compared one by one
ALIKE = 0.5  # of the characters of two prompts of a family, at least
LARGER = (2, 4, None)  # times the cache; None: no limit
_HEADS = ("<|im_start|>system\n", "<|im_start|>developer\n")
_PIECES = re.compile(r"(?s).+?(?:[.!?](?=\s)\s*|\n\s*|\Z)")
_MESSAGE = re.compile(r"(?s)(<\|im_start\|>[^\n]*\n)(.*)(<\|im_end\|>\n)")

Progress = Callable[[], Any] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A proposal, replayed. saved: tokens of the whole log that are not computed any more (fewer than 0: more
    are); of: the same of each request, in order. capacity: of "cache", else None. requests: changed by it."""

    name: str
    what: str
    saved: int
    of: tuple[int, ...] = field(repr=False)
    requests: int = 0
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """The same log, changed. changed: how many requests are other than before."""

    name: str
    what: str
    entries: Sequence[Entry]
    cache: Cache
    changed: int = 0

    def outcome(self, computed: Sequence[int], progress: Progress = None) -> Outcome:
        """Replays it. computed: tokens that each request computes without it."""
        found = hits(self.entries, self.cache, progress)
        after = [len(entry.ids) - hit for entry, hit in zip(self.entries, found, strict=True)]
        of = tuple(before - now for before, now in zip(computed, after, strict=True))
        return Outcome(self.name, self.what, sum(of), of, self.changed, self.cache.capacity)


def proposals(
    entries: Sequence[Entry],
    cache: Cache,
    causes: Sequence[str],
    encode: Callable[[Sequence[Part]], Slots] | None,
) -> Iterator[Proposal]:
    """Those that may help against some causes.

    encode: the ids of a prompt's parts; None where the log has no texts.
    """
    if "namespace" in causes:
        yield _changed(
            "salt", "no salts and adapters that keep them apart", entries, cache, _one_space(entries)
        )
    if encode is not None and "differs" in causes:
        for name, what, change in (
            ("tools", "the tools always in one order, new ones last", _tools_in_order),
            ("lines", "what varies in the head of the prompts moved next to the last message", _moved_lines),
            ("messages", "messages that were kept left in their place, what is new behind them", _in_order),
        ):
            parts = [entry.source.request.parts for entry in entries]
            yield _changed(name, what, entries, cache, _encoded(entries, parts, change(entries), encode))
    if cache.capacity is not None and {"evicted", "large"} & set(causes):
        for times in LARGER:
            capacity = None if times is None else cache.capacity * times
            what = "a cache without limit" if capacity is None else f"a cache of {capacity:,} tokens"
            yield Proposal("cache", what, entries, replace(cache, capacity=capacity))


def outcomes(
    entries: Sequence[Entry], computed: Sequence[int], causes: Sequence[str], cache: Cache,
    encode: Callable[[Sequence[Part]], Slots] | None, progress: Progress = None,
) -> list[Outcome]:  # fmt: skip
    """All proposals that change something, replayed; those that save most first. computed: see Proposal."""
    found = [
        each.outcome(computed, progress)
        for each in proposals(entries, cache, causes, encode)
        if each.changed or each.name == "cache"
    ]
    return sorted(_useful(found), key=lambda each: -each.saved)


def _useful(found: Sequence[Outcome]) -> Iterator[Outcome]:
    """Of caches of several sizes only those that save more than a smaller one."""
    most = 0
    for each in found:
        if each.name != "cache" or each.saved > most:
            yield each
        if each.name == "cache":
            most = max(most, each.saved)


def pair(
    entries: Sequence[Entry], number: int, other: int, computed: Sequence[int], cache: Cache, text: Encoder,
    progress: Progress = None,
) -> Outcome | None:  # fmt: skip
    """Two requests that part, with what differs behind what is common, as the doctor proposes it; replayed.

    None where no other order helps, and for prompts too long to be looked at.
    """
    first, second = (entries[each].source.request.text for each in (other, number))
    if not first or not second or max(len(first), len(second)) > LONGEST:
        return None
    better = diagnose(first, second, text, cache.page_size).better
    if better is None:
        return None
    changed = list(entries)
    for each, prompt in ((other, better.first), (number, better.second)):
        changed[each] = replace(entries[each], ids=np.array(text.encode(prompt), dtype=np.int64))
    shown = (
        ", ".join(repr(part.strip()) for part in better.moved[:2]) or f"what differs in {entries[other].name}"
    )
    what = f"what differs moved behind what is common ({shown})"
    return Proposal("pair", what, changed, cache, 2).outcome(computed, progress)


def room_for(entries: Sequence[Entry], number: int, cache: Cache, progress: Progress = None) -> int | None:
    """A capacity with which request `number` would have found all that a cache without limit has of it.

    None if that is what it finds. Found by halving, each step replayed: one page less would not have done.
    """
    past = entries[: number + 1]

    def found(capacity: int | None) -> int:
        return hits(past, replace(cache, capacity=capacity), progress)[-1]

    assert cache.capacity is not None
    wanted, page = found(None), cache.page_size
    if found(cache.capacity) >= wanted:
        return None
    low, high = cache.capacity // page, cache.capacity // page * 2 + 1
    while found(high * page) < wanted:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle * page) >= wanted else (middle, high)
    return high * page


# ---------------------------------------------------------------------- changing a log


def _changed(
    name: str, what: str, entries: Sequence[Entry], cache: Cache, other: Sequence[Entry]
) -> Proposal:
    changed = sum(one is not two for one, two in zip(entries, other, strict=True))
    return Proposal(name, what, other, cache, changed)


def _one_space(entries: Sequence[Entry]) -> list[Entry]:
    return [entry if entry.namespace is None else replace(entry, namespace=None) for entry in entries]


def _encoded(
    entries: Sequence[Entry], before: Sequence[Sequence[Part]], after: Sequence[Sequence[Part]],
    encode: Callable[[Sequence[Part]], Slots],
) -> list[Entry]:  # fmt: skip
    return [
        entry if list(old) == list(new) else replace(entry, ids=encode(new))
        for entry, old, new in zip(entries, before, after, strict=True)
    ]


def _parts(entry: Entry) -> list[Part]:
    return list(entry.source.request.parts)


def _tools_in_order(entries: Sequence[Entry]) -> list[list[Part]]:
    """Each tool at the place that it had when it was first seen in the log."""
    order: dict[str, tuple[int, str]] = {}  # what it is, in one spelling -> its place and first spelling
    found = []
    for entry in entries:
        parts = _parts(entry)
        for number, part in enumerate(parts):
            message = _MESSAGE.fullmatch(part.text) if part.name == "tools" else None
            tools = _json_list(message[2]) if message else None
            if message and tools:
                for tool in tools:
                    order.setdefault(_spelled(tool), (len(order), json.dumps(tool, ensure_ascii=False)))
                sorted_tools = sorted(order[_spelled(tool)] for tool in tools)
                text = f"[{', '.join(spelling for _, spelling in sorted_tools)}]"
                parts[number] = replace(part, text=message[1] + text + message[3])
        found.append(parts)
    return found


def _spelled(tool: Any) -> str:
    return json.dumps(tool, sort_keys=True, ensure_ascii=False)


def _json_list(text: str) -> list[Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


@dataclass(slots=True)
class _Family:
    """Heads of prompts that have most of their pieces in common; common: those that all of them have."""

    first: frozenset[str]
    common: set[str]
    texts: int = 1


def _moved_lines(entries: Sequence[Entry]) -> list[list[Part]]:
    """What is not common to all heads of a family goes behind what is, next to the last message."""
    families: list[_Family] = []
    of_text: dict[str, _Family | None] = {}
    for entry in entries:
        for part in _head(entry.source.request.parts):
            if part.text not in of_text:
                of_text[part.text] = _family(families, part.text)
    return [_with_lines_moved(_parts(entry), of_text) for entry in entries]


def _head(parts: Sequence[Part]) -> list[Part]:
    """System messages before all others, tools and formats aside; or a plain prompt."""
    told = [part for part in parts if part.name not in ("tools", "response_format")]
    return list(takewhile(lambda part: part.ids is None and part.text.startswith(_HEADS), told)) or [
        part for part in told if part.name == "prompt" and part.ids is None
    ]


def _family(families: list[_Family], text: str) -> _Family | None:
    pieces = frozenset(_content(text)[1])
    size = sum(map(len, pieces))
    for family in families:
        alike = sum(map(len, family.first & pieces))
        if alike >= ALIKE * max(size, sum(map(len, family.first))):
            family.common &= pieces
            family.texts += 1
            return family
    if len(families) == MOST_FAMILIES:
        return None
    families.append(_Family(pieces, set(pieces)))
    return families[-1]


def _content(text: str) -> tuple[str, list[str], str]:
    """What opens a message, its content in pieces (lines, sentences), and what closes it."""
    message = _MESSAGE.fullmatch(text)
    opening, content, closing = message.groups() if message else ("", text, "")
    return opening, _PIECES.findall(content), closing


def _with_lines_moved(parts: list[Part], of_text: dict[str, _Family | None]) -> list[Part]:
    moved: list[Part] = []
    head = _head(parts)
    for number, part in enumerate(parts):
        family = of_text.get(part.text) if any(part is each for each in head) else None
        if family is None or family.texts == 1:
            continue
        opening, pieces, closing = _content(part.text)
        common = [piece for piece in pieces if piece in family.common]
        varying = [piece for piece in pieces if piece not in family.common]
        if not varying or not common:
            continue
        if not opening:  # a plain prompt: all in one
            parts[number] = replace(part, text=_text(common) + _text(varying))
        elif len(parts) > number + 1:
            parts[number] = replace(part, text=opening + _text(common) + closing)
            moved.append(replace(part, name=f"{part.name} (moved)", text=opening + _text(varying) + closing))
    if moved:
        last = len(parts) - (parts[-1].name == OPENING) - 1
        parts[last:last] = moved
    return parts


def _text(pieces: list[str]) -> str:
    """Pieces joined; what ended a text may now stand in the middle, and needs a line of its own."""
    inner = [piece if piece[-1].isspace() else piece + "\n" for piece in pieces[:-1]]
    return "".join(inner + pieces[-1:])


def _in_order(entries: Sequence[Entry]) -> list[list[Part]]:
    """What a request still has of the one before it in its session stands where it stood there."""
    last: dict[str, list[Part]] = {}
    found = []
    for entry in entries:
        session, parts = entry.source.request.session, _parts(entry)
        if session is not None:
            parts = _as_before(last.get(session, []), parts)
            last[session] = parts
        found.append(parts)
    return found


def _as_before(before: list[Part], parts: list[Part]) -> list[Part]:
    """`parts`, those that go on as `before` did first; the last message and what asks for the reply stay."""
    common = 0
    while common < min(len(before), len(parts)) and before[common].text == parts[common].text:
        common += 1
    fixed = max(len(parts) - (bool(parts) and parts[-1].name == OPENING) - 1, common)
    rest = parts[common:fixed]
    texts = Counter(part.text for part in rest)
    kept: list[Part] = []
    for part in before[common:]:
        if not texts[part.text]:
            break
        texts[part.text] -= 1
        kept.append(part)
    gone = Counter(part.text for part in kept)
    others = []
    for part in rest:
        if gone[part.text]:
            gone[part.text] -= 1
        else:
            others.append(part)
    return [*parts[:common], *kept, *others, *parts[fixed:]]


def joined(rows: Sequence[Slots]) -> Slots:
    """Ids of parts, one after another."""
    return np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
