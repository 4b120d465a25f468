"""What to change so that more is found in the cache: each proposal is replayed, and what it saves is counted.

    salt      everybody with the same model and adapter in one namespace
    tools     the tools always in one order, those that are new behind the others
    lines     of a system prompt (or a plain one), what varies goes behind what is common
    last      the same, but before the last message
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from minirad.cache.node import Slots
from minirad.doctor import Encoder, diagnose
from minirad.logs.request import OPENING, Part
from minirad.why.history import Cache, Entry, Serving, hits

MOST_FAMILIES = 64  # of prompts that have most of their lines in common
LONGEST = 200_000  # characters of a prompt whose lines are compared one by one
ALIKE = 0.5  # of the characters of two prompts of a family, at least
LARGER = (2, 4, None)  # times the cache; None: no limit
_HEADS = ("<|im_start|>system\n", "<|im_start|>developer\n")
_PIECES = re.compile(r"(?s).+?(?:[.!?](?=\s)\s*|\n\s*|\Z)")
_MESSAGE = re.compile(r"(?s)(<\|im_start\|>[^\n]*\n)(.*)(<\|im_end\|>\n)")

Progress = Callable[[], Any] | None
Encode = Callable[[Sequence[Part]], Slots]
Change = Callable[[Sequence[Entry]], Iterator[list[Part]]]


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
    """The same log, changed. entries: makes it, one request after another (all of them would be large)."""

    name: str
    what: str
    entries: Callable[[], Iterable[Entry]]
    cache: Cache

    def outcome(self, before: Sequence[Entry], computed: Sequence[int], progress: Progress = None) -> Outcome:
        """Replays it. before, computed: the log without it, and what each request computes of it then."""
        serving, changed = Serving(self.cache), 0
        of = []
        for old, new, once in zip(before, self.entries(), computed, strict=True):
            of.append(once - (len(new.ids) - serving.serve(new)))
            changed += new is not old
            if progress is not None:
                progress()
        return Outcome(self.name, self.what, sum(of), tuple(of), changed, self.cache.capacity)


def proposals(
    entries: Sequence[Entry], cache: Cache, causes: Sequence[str], encode: Encode | None
) -> Iterator[Proposal]:
    """Those that change something and may help against some causes.

    encode: the ids of a prompt's parts; None where the log has no texts.
    """
    if "namespace" in causes and any(_without_salt(entry) is not entry for entry in entries):
        what = "no salts that keep them apart"
        yield Proposal("salt", what, lambda: map(_without_salt, entries), cache)
    if encode is not None and "differs" in causes:
        for name, what, change in (
            ("tools", "the tools always in one order, new ones last", _tools_in_order),
            ("lines", "what varies in a system prompt moved to its end", _to_the_end),
            ("last", "what varies in a system prompt moved next to the last message", _to_the_last),
            ("messages", "messages that were kept left in their place, what is new behind them", _in_order),
        ):
            pairs = zip(entries, change(entries), strict=True)
            if any(parts != _parts(entry) for entry, parts in pairs):
                yield Proposal(name, what, partial(_encoded, entries, change, encode), cache)
    if cache.capacity is not None and {"evicted", "large"} & set(causes):
        for times in LARGER:
            capacity = None if times is None else cache.capacity * times
            what = "a cache without limit" if capacity is None else f"a cache of {capacity:,} tokens"
            yield Proposal("cache", what, lambda: entries, replace(cache, capacity=capacity))


def outcomes(
    entries: Sequence[Entry], computed: Sequence[int], causes: Sequence[str], cache: Cache,
    encode: Encode | None, progress: Progress = None,
) -> list[Outcome]:  # fmt: skip
    """All proposals, replayed; those that save most first. computed: see Proposal."""
    found = [each.outcome(entries, computed, progress) for each in proposals(entries, cache, causes, encode)]
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
    return Proposal("pair", what, lambda: changed, cache).outcome(entries, computed, progress)


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


def _without_salt(entry: Entry) -> Entry:
    """Another model's or adapter's KV is of no use whatever the namespace: those stay."""
    request = entry.source.request
    kept = tuple(each for each in request.namespace if each[0] in ("model", "adapter"))
    namespace = replace(request, namespace=kept).extra_key
    return entry if namespace == entry.namespace else replace(entry, namespace=namespace)


def _encoded(entries: Sequence[Entry], change: Change, encode: Encode) -> Iterator[Entry]:
    for entry, parts in zip(entries, change(entries), strict=True):
        yield entry if parts == _parts(entry) else replace(entry, ids=encode(parts))


def _parts(entry: Entry) -> list[Part]:
    return list(entry.source.request.parts)


def _tools_in_order(entries: Sequence[Entry]) -> Iterator[list[Part]]:
    """Each tool at the place that it had when it was first seen in the log."""
    order: dict[str, tuple[int, str]] = {}  # what it is, in one spelling -> its place and first spelling
    known: dict[str, str] = {}
    for entry in entries:
        parts = _parts(entry)
        for number, part in enumerate(parts):
            if part.name in ("tools", "functions"):
                if part.text not in known:
                    known[part.text] = _sorted(part.text, order)
                parts[number] = replace(part, text=known[part.text])
        yield parts


def _sorted(text: str, order: dict[str, tuple[int, str]]) -> str:
    message = _MESSAGE.fullmatch(text)
    tools = _json_list(message[2]) if message else None
    if not message or not tools:
        return text
    for tool in tools:
        order.setdefault(_spelled(tool), (len(order), json.dumps(tool, ensure_ascii=False)))
    spelled = [spelling for _, spelling in sorted(order[_spelled(tool)] for tool in tools)]
    return f"{message[1]}[{', '.join(spelled)}]{message[3]}"


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


def _to_the_end(entries: Sequence[Entry]) -> Iterator[list[Part]]:
    """What is not common to all heads of a family stands behind what is, in the same message."""
    divided = _divided(entries)
    for entry in entries:
        parts = _parts(entry)
        for number in _head(parts):
            if (halves := divided.get(parts[number].text)) is not None:
                opening, common, varying, closing = halves
                parts[number] = replace(parts[number], text=f"{opening}{common}{varying}{closing}")
        yield parts


def _to_the_last(entries: Sequence[Entry]) -> Iterator[list[Part]]:
    """The same, but in a message of its own before the last one."""
    divided = _divided(entries)
    for entry in entries:
        parts = _parts(entry)
        moved: list[Part] = []
        for number in _head(parts):
            halves = divided.get(parts[number].text)
            if halves is not None and halves[0] and len(parts) > number + 1:
                opening, common, varying, closing = halves
                name = f"{parts[number].name} (moved)"
                parts[number] = replace(parts[number], text=f"{opening}{common}{closing}")
                moved.append(replace(parts[number], name=name, text=f"{opening}{varying}{closing}"))
        last = len(parts) - (bool(parts) and parts[-1].name == OPENING) - 1
        parts[last:last] = moved
        yield parts


Halves = tuple[str, str, str, str]  # what opens a message, what is common, what varies, what closes it


def _divided(entries: Sequence[Entry]) -> dict[str, Halves]:
    """The heads of all prompts, by their text, those of which something varies in their family."""
    families: list[_Family] = []
    of_text: dict[str, _Family | None] = {}
    for entry in entries:
        parts = entry.source.request.parts
        for number in _head(parts):
            if (text := parts[number].text) not in of_text:
                of_text[text] = _family(families, text)
    found = {}
    for text, family in of_text.items():
        opening, pieces, closing = _content(text)
        common = [piece for piece in pieces if family is not None and piece in family.common]
        varying = [piece for piece in pieces if family is not None and piece not in family.common]
        if common and varying:
            behind = _text(varying)
            behind = behind if pieces[-1][-1].isspace() else behind.rstrip("\n")
            found[text] = opening, _text(common), behind, closing
    return found


def _head(parts: Sequence[Part]) -> list[int]:
    """The system messages before all others, tools and formats aside, or a plain prompt: by their number."""
    found = []
    for number, part in enumerate(parts):
        if part.ids is not None or not (part.text.startswith(_HEADS) or part.name == "prompt"):
            break
        if part.name not in ("tools", "functions", "response_format"):
            found.append(number)
    return found


def _family(families: list[_Family], text: str) -> _Family | None:
    pieces = frozenset(_content(text)[1])
    size = sum(map(len, pieces))
    for family in families:
        alike = sum(map(len, family.first & pieces))
        if alike >= ALIKE * max(size, sum(map(len, family.first))):
            family.common &= pieces
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


def _text(pieces: list[str]) -> str:
    """Pieces joined; what ended a text may now stand in the middle, and needs a line of its own."""
    return "".join(piece if piece[-1].isspace() else piece + "\n" for piece in pieces)


def _in_order(entries: Sequence[Entry]) -> Iterator[list[Part]]:
    """What a request still has of the one before it in its session stands where it stood there."""
    last: dict[str, list[Part]] = {}
    for entry in entries:
        session, parts = entry.source.request.session, _parts(entry)
        if session is not None:
            parts = _as_before(last.get(session, []), parts)
            last[session] = parts
        yield parts


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
