"""The prompt doctor: where two prompts part, what that costs, and what another order would save.

A prefix cache shares from the first token on and stops at the first difference, however much is equal
behind it. A date in the first line of a system prompt makes everything after it private.

* `diagnose` compares two prompts: the first differing token, the tokens lost behind it, and the real
  saving (counted with the tokenizer) of moving what differs behind what is common. What it says is counted
  as it would be found: in whole pages, and never the last token, which is always computed.
* `early_breaks` looks for such faults in many prompts: families that part within their first tokens and
  then go on alike.

Does not judge whether a prompt still means the same in another order: it is a proposal to read. Does not
look at a live cache.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minirad.cache.prefix_cache import usable
from minirad.cache.radix_cache import RadixCache, RadixKey, Slots

CONTEXT = 12  # tokens shown on either side of a break
EARLY = 128  # a family parts early if it does so within so many tokens
WINDOW = 64  # the longest varying part that is looked for, in tokens
LEAST_RUN = 16  # tokens in a row that must be equal again after it
GRAM = 8  # tokens by which the equal run is found
LEADS = 4  # prompts of a group that the others are compared with
MOST_CLOSING = 8  # parts that close a chat prompt, at most
LEAST_SAVING = 0.05  # of a family's prompt tokens; less is not worth saying

# What closes a chat prompt ("<|im_end|>\n<|im_start|>assistant\n"): nothing may be moved behind it.
_CLOSING = re.compile(r"(?:\s*<\|[^|<>]*\|>\s*(?:assistant\b)?)+\s*\Z")
_MARKERS = re.compile(r"(<\|[^|<>]*\|>\n?)")  # of chat templates: never inside a part that is moved
_SENTENCES = re.compile(r"(?s).+?(?:[.!?](?=\s)\s*|\n\s*|\Z)")


class Encoder(Protocol):
    """The two halves of a tokenizer that are needed here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


# ---------------------------------------------------------------------- two prompts


@dataclass(frozen=True, slots=True)
class Reordering:
    """The same two prompts with what differs behind what is common.

    parts: "lines" or "sentences", the pieces that were moved. moved: those of the second prompt. shared:
    tokens that the second would now find cached. saved: how many more than before, less those by which the
    second has grown (a text that ended it needs a line of its own now): so many fewer are computed.
    tokens: of the second in this order.
    """

    parts: str
    moved: tuple[str, ...]
    first: str
    second: str
    shared: int
    saved: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What two prompts share. Counts are tokens.

    shared: equal tokens at the beginning, in whole pages: what the second finds cached after the first
    (but for its last token, which is always computed). position: of the first difference.
    token: the differing token of each, as text ("" where a prompt ends there). before, after: the
    text around it. lost: tokens of the second behind the difference that the first has as well: in runs
    of GRAM or more and in the same order and at the end of both, or those that another order brings to
    the front, if more.
    better: None where no other order helps.

    A saving is what was lost, and what was equal in front but in no whole page:
    better.saved <= lost + position - shared, for all prompts and page sizes.
    """

    tokens: tuple[int, int]
    shared: int
    position: int
    before: str
    token: tuple[str, str]
    after: tuple[str, str]
    lost: int
    better: Reordering | None

    @property
    def equal(self) -> bool:
        """Token for token the same."""
        return self.tokens[0] == self.tokens[1] == self.position

    @property
    def verdict(self) -> str:
        """Where they part and what the second finds, in half a sentence."""
        total, last = self.tokens[1], self.position == self.tokens[1] > 0
        reasons = ["whole pages are matched"] * (self.position - self.shared > last)
        reasons += ["the last token is always computed"] * last
        found = f"B finds {self.shared} of its {_tokens(total)} in the cache"
        if self.equal and 0 < self.shared == total - 1:
            found = "B finds all but its last token in the cache; the last is always computed"
        elif reasons:
            found += f", as {' and '.join(reasons)}"
        return (
            f"they are equal, and {found}" if self.equal else f"they part at token {self.position}; {found}"
        )

    @property
    def loss(self) -> str:
        """What is computed again though the first has it."""
        if self.lost:
            are = "is" if self.lost == 1 else "are"
            return f"{_tokens(self.lost)} of B behind that point {are} in A, too, but must be computed again"
        if self.position in self.tokens:
            return f"nothing, for {'B' if self.position == self.tokens[1] else 'A'} ends there"
        return f"nothing, for no {GRAM} tokens in a row behind that point are in A behind it, too"

    @property
    def outcome(self) -> str:
        """What the second finds in the better order; "" where there is none."""
        if self.better is None:
            return ""
        then = " then" if self.better.tokens != self.tokens[1] else ""
        said = f"B would find {self.better.shared} of its {_tokens(self.better.tokens)}{then} in the cache"
        paged = self.better.saved - self.lost
        if paged > 0:
            said += f" (at least {_tokens(paged)} more than were lost: equal in front, but in no whole page)"
        return said

    def describe(self) -> str:
        """Some lines of text, the differing tokens between angle quotes."""
        lines = [f"A has {_tokens(self.tokens[0])}, B {_tokens(self.tokens[1])}"]
        if self.equal:
            return f"{lines[0]}: {self.verdict}"
        lines += [
            self.verdict,
            f"  A: {_marked(self.before, self.token[0], self.after[0])}",
            f"  B: {_marked(self.before, self.token[1], self.after[1])}",
            f"lost: {self.loss}",
        ]
        if self.better is None:
            return "\n".join(
                [*lines, "no other order of its lines or sentences was found that would save any"]
            )
        better = self.better
        lines.append(
            f"moving the {better.parts} that differ behind what is common saves {_tokens(better.saved)}: "
            f"{self.outcome}"
        )
        return "\n".join(lines + [f"  move: {part.strip()!r}" for part in better.moved])


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def _marked(before: str, token: str, after: str) -> str:
    shown = repr(before)[1:-1], repr(token)[1:-1], repr(after)[1:-1]
    return f"...{shown[0]}«{shown[1] or 'end'}»{shown[2]}"


def diagnose(first: str, second: str, text: Encoder, page_size: int = 1) -> Diagnosis:
    """Compares two prompts as the cache would, the second asked after the first.

    page_size: tokens per page; sharing goes by whole pages. ValueError if it is below 1.
    """
    if page_size < 1:
        raise ValueError(f"page size must be at least 1, got {page_size}")
    a, b = text.encode(first), text.encode(second)
    at = _common(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64))
    shared = usable(at, len(b), page_size)
    better, brought = _best_order(first, second, text, page_size, shared, len(b))
    following = [ids[at + 1 : at + 1 + CONTEXT] for ids in (a, b)]
    return Diagnosis(
        tokens=(len(a), len(b)),
        shared=shared,
        position=at,
        before=text.decode(a[max(at - CONTEXT, 0) : at]),
        token=(text.decode(a[at : at + 1]), text.decode(b[at : at + 1])),
        after=(text.decode(following[0]), text.decode(following[1])),
        lost=max(_lost(a[at:], b[at:]), brought - at),
        better=better,
    )


def _lost(a: list[int], b: list[int]) -> int:
    """Tokens of `b` in runs (GRAM or longer) that `a` has in the same order, each taken at the first
    place where it comes, and those with which both end, however few. In time proportional to the lengths;
    difflib's would be to their product."""
    places: dict[tuple[int, ...], list[int]] = {}
    for at in range(len(a) - GRAM + 1):
        places.setdefault(tuple(a[at : at + GRAM]), []).append(at)
    total = ours = theirs = end = 0  # `end`: of the last run in `b`
    while theirs + GRAM <= len(b):
        known = places.get(tuple(b[theirs : theirs + GRAM]), [])
        next_one = bisect_left(known, ours)
        if next_one == len(known):
            theirs += 1
            continue
        ours, start = known[next_one], theirs
        while ours < len(a) and theirs < len(b) and a[ours] == b[theirs]:
            ours, theirs = ours + 1, theirs + 1
        total, end = total + theirs - start, theirs
    return total + _common(np.array(a[ours:][::-1]), np.array(b[end:][::-1]))


def _matching(a: list[Any], b: list[Any]) -> list[difflib.Match]:
    """Equal runs in the same order, the empty one at the end last. In long rows, what is everywhere
    (an empty line) starts no run: difflib would take time in proportion to the square of its number."""
    return difflib.SequenceMatcher(None, a, b, autojunk=len(a) * len(b) > 1_000_000).get_matching_blocks()


def _best_order(
    first: str, second: str, text: Encoder, page_size: int, shared: int, length: int
) -> tuple[Reordering | None, int]:
    """The order that saves most, and how many tokens of the second (of `length`) an order brings to the
    front at most, whole pages or not. What the order itself adds to the second's tokens counts in neither.

    Lines are moved if that saves as much as moving sentences does, for they are easier to move."""
    best: Reordering | None = None
    most = 0
    for parts, cut in (("lines", _lines), ("sentences", _sentences)):
        found = _reordered(cut(first), cut(second))
        if found is None:
            continue
        a, b, moved = found
        ids = text.encode(b)
        added = max(len(ids) - length, 0)
        equal = _common(np.array(text.encode(a), dtype=np.int64), np.array(ids, dtype=np.int64))
        front = usable(equal, len(ids), page_size)
        most = max(most, equal - added)
        if front - added - shared > (best.saved if best else 0):
            best = Reordering(parts, moved, a, b, front, front - added - shared, len(ids))
    return best, most


def _lines(text: str) -> list[str]:
    return [line for piece in _MARKERS.split(text) for line in piece.splitlines(keepends=True)]


def _sentences(text: str) -> list[str]:
    return [part for piece in _MARKERS.split(text) for part in _SENTENCES.findall(piece)]


def _reordered(a: list[str], b: list[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Both texts with the differing parts behind the common ones, and what was moved of the second.

    They go in front of the last differing part (the question, mostly), and never behind what
    closes a chat prompt. None if nothing differing stands before something common.
    """
    closing = _closing(a, b)
    a, b = a[: len(a) - closing[0]], b[: len(b) - closing[0]]
    blocks = _matching(a, b)
    common = [b[block.b : block.b + block.size] for block in blocks if block.size]
    ours, theirs = _between(a, [(k.a, k.size) for k in blocks]), _between(b, [(k.b, k.size) for k in blocks])
    moved = theirs[: len(common)]  # each of these stands before a common part
    if not common or (not any(ours[: len(common)]) and not any(moved)):
        return None
    texts = [_joined(_flat(common) + _flat(each)) + closing[1] for each in (ours, theirs)]
    return texts[0], texts[1], tuple(_flat(moved))


def _flat(runs: list[list[str]]) -> list[str]:
    return [part for run in runs for part in run]


def _joined(parts: list[str]) -> str:
    """What ended a text may now stand in the middle of one, and then needs a line of its own."""
    inner = [part if part[-1].isspace() or _MARKERS.fullmatch(part) else part + "\n" for part in parts[:-1]]
    return "".join(inner + parts[-1:])


def _between(parts: list[str], matches: list[tuple[int, int]]) -> list[list[str]]:
    """What lies before each matching block, the last one being the empty block at the end."""
    runs, start = [], 0
    for at, size in matches:
        runs.append(parts[start:at])
        start = at + size
    return runs


def _closing(a: list[str], b: list[str]) -> tuple[int, str]:
    """How many parts at the end of both close a chat prompt, and their text."""
    most = 0
    for size in range(1, min(len(a), len(b), MOST_CLOSING) + 1):
        if a[-size:] != b[-size:]:
            break
        if _CLOSING.fullmatch("".join(a[-size:])):
            most = size
    return most, "".join(a[len(a) - most :])


def _common(a: Slots, b: Slots) -> int:
    """How many tokens two rows begin with alike."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


# ---------------------------------------------------------------------- many prompts


@dataclass(frozen=True, slots=True)
class EarlyBreak:
    """A family of prompts that part early and then go on alike. Counts are tokens.

    position: where they part. requests: how many. before, after: the text around. varying: what
    differs, of some of them (where: their places in the file). cached: tokens that the family shares
    among itself now, could: with the varying part behind what is common; both counted by running it.
    """

    position: int
    requests: int
    tokens: int
    before: str
    varying: tuple[str, ...]
    after: str
    where: tuple[str, ...]
    cached: int
    could: int

    @property
    def saved(self) -> int:
        return self.could - self.cached

    def describe(self) -> str:
        """Some lines of text."""
        some = ", ".join(f"{text!r} ({at})" for text, at in zip(self.varying, self.where, strict=True))
        return (
            f"sharing breaks early: {self.requests:,} prompts part at token {self.position} and go on alike\n"
            f"  ...{self.before!r} then {some} then {self.after!r}...\n"
            f"  {self.cached:,} of their {self.tokens:,} tokens are shared now, {self.could:,} if that part "
            f"came behind what is common: {self.saved:,} saved"
        )


@dataclass(frozen=True, slots=True)
class _Member:
    """A prompt of a family: `skip` tokens vary from the break on, then `run` are common."""

    number: int
    skip: int
    run: int


def early_breaks(
    prompts: Sequence[Slots],
    decode: Callable[[Sequence[int]], str],
    where: Sequence[str] | None = None,
    top: int = 5,
) -> list[EarlyBreak]:
    """The breaks that cost most, worst first.

    prompts: token ids, in the order in which they were asked. where: how to call each of them.
    """
    rows = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    places = where or [f"prompt {number}" for number in range(1, len(rows) + 1)]
    found = [_examined(rows, at, members, decode, places) for at, members in _families(rows)]
    worth = [each for each in found if each.saved >= LEAST_SAVING * each.tokens and each.saved > 0]
    return sorted(worth, key=lambda each: -each.saved)[:top]


def _families(rows: Sequence[Slots]) -> Iterator[tuple[int, list[_Member]]]:
    """Groups that part within EARLY tokens and are found to go on alike, topmost break first.

    Sorted as big-endian bytes, the prompts that begin alike lie together, and what the first and the
    last of a group share, all of it share: this walks the prompts' tree without building it.
    """
    order = sorted(range(len(rows)), key=lambda number: rows[number].astype(">u4").tobytes())
    todo = [order]
    while todo:
        group = todo.pop()
        at = _common(rows[group[0]], rows[group[-1]]) if len(group) > 1 else EARLY + 1
        if at > EARLY:
            continue
        members = _alike(rows, group, at)
        # If all of them go on with one token, they part later on, in one of the parts.
        if len({int(rows[member.number][at]) for member in members}) > 1:
            yield at, members
        else:
            todo += _parted(rows, group, at)


def _parted(rows: Sequence[Slots], group: list[int], at: int) -> list[list[int]]:
    """A sorted group, cut where the token at `at` changes; prompts that end there are left out."""
    parts: dict[int, list[int]] = {}
    for number in group:
        if len(rows[number]) > at:
            parts.setdefault(int(rows[number][at]), []).append(number)
    return list(parts.values())


def _alike(rows: Sequence[Slots], group: list[int], at: int) -> list[_Member]:
    """The largest family among a group: those that go on like one of them, some tokens behind the break."""
    parts = sorted(_parted(rows, group, at), key=len, reverse=True)[:LEADS]
    families = [_going_on_like(min(part), rows, group, at) for part in parts]
    return max(families, key=len, default=[])


def _going_on_like(first: int, rows: Sequence[Slots], group: list[int], at: int) -> list[_Member]:
    """The members of a group that go on like one of them."""
    lead = rows[first][at:]
    grams = {
        lead[skip : skip + GRAM].tobytes(): skip for skip in range(min(WINDOW, len(lead) - GRAM), -1, -1)
    }
    met = [(number, *_meeting(lead, grams, rows[number][at:])) for number in sorted(group)]
    varying = [skip for _, skip, _, run in met if run >= LEAST_RUN and skip]
    if not varying:
        return []
    usual = Counter(varying).most_common(1)[0][0]  # where the lead's varying part ends
    found = []
    for number, ours, skip, run in met:
        late = usual - ours  # tokens of the varying part that happen to be equal
        if late >= 0 and run - late >= LEAST_RUN:
            found.append(_Member(number, skip + late, run - late))
    return found


def _meeting(lead: Slots, grams: dict[bytes, int], row: Slots) -> tuple[int, int, int]:
    """Where a prompt first goes on like the lead: tokens skipped of each, and how many are equal then."""
    for skip in range(max(min(WINDOW, len(row) - GRAM) + 1, 0)):
        ours = grams.get(row[skip : skip + GRAM].tobytes())
        if ours is not None:
            run = _common(lead[ours:], row[skip:])
            if run >= LEAST_RUN:
                return ours, skip, run
    return 0, 0, 0


def _examined(
    rows: Sequence[Slots],
    at: int,
    members: list[_Member],
    decode: Callable[[Sequence[int]], str],
    places: Sequence[str],
) -> EarlyBreak:
    """What a family shares now, and what it would with its varying part moved."""
    common = int(np.median([member.run for member in members]))
    now = [rows[member.number] for member in members]
    moved = []
    for member in members:
        row, end = rows[member.number], at + member.skip
        stop = end + min(member.run, common)
        moved.append(np.concatenate((row[:at], row[end:stop], row[at:end], row[stop:])))
    shown = {rows[m.number][at : at + m.skip].tobytes(): m for m in reversed(members)}
    some = sorted(shown.values(), key=lambda member: member.number)[:3]
    first = members[0]
    end = at + first.skip
    return EarlyBreak(
        at, len(members), sum(map(len, now)), decode(now[0][max(at - CONTEXT, 0) : at].tolist()),
        tuple(decode(rows[m.number][at : at + m.skip].tolist()) for m in some),
        decode(now[0][end : end + CONTEXT].tolist()), tuple(places[m.number] for m in some),
        _shared(now), _shared(moved),
    )  # fmt: skip


def _shared(rows: Sequence[Slots]) -> int:
    """Tokens found in an endless cache by these prompts, asked one after another."""
    cache, total = RadixCache(), 0
    for row in rows:
        key = RadixKey(row)
        total += cache.match_prefix(key).length
        cache.insert(key, np.zeros(len(row), dtype=np.int64))
    return total
