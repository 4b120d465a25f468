"""Sessions, turn by turn: where a prompt stopped being the one before with something behind it, and why.

    turns = Turns()
    for request, answer in ...: turns.add(request, answer)
    turns.report()                         # plain data: of each session its turns, its breaks, its runs

A turn breaks the prefix if it does not go on from all that the turn before was asked: something was
compacted, the tools or a date changed, a message stands elsewhere. A request without a session is held
against the one that it parts from. A run is parts of prompts that always stood together: the session's
prompts are paths in a tree of runs, which has a branch where the prefix broke.

Does not tokenise, and does not look for what would help: repairs.py does.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minirad.logs import Tokenized
from minirad.logs.apis import spoken
from minirad.logs.claude_code import CLEARED
from minirad.logs.request import OPENING, Part, common_parts
from minirad.logs.writing import OPEN
from minirad.why.answer import Answer

MOST_SESSIONS = 64  # that are followed; those that come later are counted
MOST_TURNS = 1000  # of a session that are kept, the first ones
MOST_SHOWN = 8  # sessions in a report, those that computed most
MOST_RUNS = 40  # of a session in a report, those of most tokens
SHOWN = 40  # characters of a change
ALIKE = 0.5  # a message of which at most so much is another is the same one, changed
NO_SESSION = ""

# What broke a prefix, and what it is called.
BREAKS: dict[str, str] = {
    "compaction": "compaction", "tools": "the tools changed", "format": "the output format changed",
    "date": "a date or time changed", "system": "the system prompt changed", "cleared": "old results cleared",
    "reordered": "messages in another order", "inserted": "something put in between",
    "left out": "messages left out",
    "back": "went back", "edited": "a message changed", "namespace": "another model, salt or adapter",
    "gone": "what was there is gone",
}  # fmt: skip
_DATE = re.compile(
    r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}|\d\d?:\d\d|\b1\d{9}(\d{3})?\b"
    r"|\b(Mon|Tues?|Wed(nes)?|Thu(rs)?|Fri|Sat(ur)?|Sun)(day)?\b"
    r"|\b(Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.? \d"
)
_GONE = ("evicted", "flushed", "large", "weights", "host", "hole", "unkept", "forgotten", "aborted", "failed")


@dataclass(frozen=True, slots=True)
class Break:
    """Where a turn stopped following the one before.

    kind: of BREAKS. what: the change in words. part, token: where it is, in this turn's prompt. computed:
    tokens of the turn that were computed; again: of them, those of parts that the turn before had as well.
    lost: tokens of the turn before that are of no use any more.
    """

    kind: str
    what: str
    part: str
    token: int
    computed: int
    again: int
    lost: int


@dataclass(slots=True, eq=False)
class Run:
    """Parts that always stood together. parts: (key, name, tokens). first, last, turns: who had them."""

    parts: list[tuple[int, str, int]]
    first: int
    last: int
    turns: int = 1
    parent: Run | None = None
    below: dict[int, Run] = field(default_factory=dict)

    def split(self, at: int) -> Run:
        """The part before `at` as a run of its own, this one below it."""
        upper = Run(self.parts[:at], self.first, self.last, self.turns, self.parent, {})
        assert self.parent is not None
        self.parent.below[self.parts[0][0]] = upper
        self.parts, self.parent = self.parts[at:], upper
        upper.below[self.parts[0][0]] = self
        return upper


@dataclass(slots=True)
class _Prompt:
    """A request's prompt, without what asks for the reply."""

    parts: tuple[Part, ...]
    ends: list[int]
    namespace: str | None

    def tokens(self, first: int, last: int) -> int:
        """Of parts first to last - 1."""
        return (self.ends[last - 1] if last else 0) - (self.ends[first - 1] if first else 0)


class _Session:
    """One session's turns and the tree of their prompts."""

    def __init__(self) -> None:
        self.turns: list[dict[str, Any]] = []
        self.count = self.computed = 0
        self.root = Run([], 0, 0)
        self.last: _Prompt | None = None
        self._leaf: Run | None = None  # the run that the last prompt ends with, if nothing comes behind it

    def add(self, prompt: _Prompt, before: _Prompt | None, answer: Answer, known: bool) -> None:
        """The next turn. known: `before` is the turn before for sure."""
        self.count += 1
        self.computed += answer.missed
        if self.count <= MOST_TURNS:
            common = 0 if before is None else common_parts(before.parts, prompt.parts)
            broke = None if before is None else _break(before, prompt, common, answer)
            if broke is not None and not known and not broke.again:
                broke = None  # two requests that have nothing to do with each other
            turn = {
                "name": answer.name,
                "tokens": answer.length,
                "cached": answer.cached,
                "lost": answer.by_cause(),
            }
            if broke is not None:
                turn["break"] = {name: getattr(broke, name) for name in Break.__slots__}
            self.turns.append(turn)
            goes_on = before is not None and before is self.last and common == len(before.parts)
            self._insert(prompt, common if goes_on and self._leaf is not None else 0)
        self.last = prompt

    def _insert(self, prompt: _Prompt, start: int) -> None:
        """A prompt into the tree; start: parts at the end of which the last one's leaf ends."""
        number, size = self.count, len(prompt.parts)
        row = [
            (hash((part.text, part.ids)), part.name, prompt.tokens(at, at + 1))
            for at, part in enumerate(prompt.parts[start:], start=start)
        ]
        if start and self._leaf is not None:
            self._leaf.parts += row
            step: Run | None = self._leaf
            while step is not None:
                step.last, step.turns, step = number, step.turns + 1, step.parent
            return
        run, at = self.root, 0
        while at < size and row[at][0] in run.below:
            run = run.below[row[at][0]]
            same = 0
            while same < min(len(run.parts), size - at) and run.parts[same][0] == row[at + same][0]:
                same += 1
            if same < len(run.parts):
                run = run.split(same)
            run.last, run.turns, at = number, run.turns + 1, at + same
        if at < size:
            run.below[row[at][0]] = run = Run(row[at:], number, number, 1, run)
        self._leaf = None if run.below or run is self.root else run

    def report(self, name: str) -> dict[str, Any]:
        """As plain data."""
        runs = self._runs()
        numbers = {id(run): at for at, run in enumerate(runs, start=1)}
        shown = {id(run) for run in sorted(runs, key=lambda run: -_size(run))[:MOST_RUNS]}
        for run in reversed(runs):  # whoever is above one that is shown is shown
            if id(run) in shown and run.parent is not None:
                shown.add(id(run.parent))
        return {
            "session": name, "turns": self.turns, "more": self.count - len(self.turns),
            "computed": self.computed,
            "runs": [
                {
                    "run": numbers[id(run)], "parent": numbers.get(id(run.parent), 0), "first": run.first,
                    "last": run.last, "turns": run.turns, "tokens": _size(run), "parts": len(run.parts),
                    "names": [name for _, name, _ in run.parts][: 3 if len(run.parts) > 4 else 4],
                    "end": run.parts[-1][1],
                }
                for run in runs if id(run) in shown
            ],
            "runs_more": sum(id(run) not in shown for run in runs),
        }  # fmt: skip

    def _runs(self) -> list[Run]:
        """Parents first, siblings in the order in which they came."""
        found, stack = [], [self.root]
        while stack:
            run = stack.pop()
            if run is not self.root:
                found.append(run)
            stack += sorted(run.below.values(), key=lambda below: -below.first)
        return found


def _size(run: Run) -> int:
    return sum(tokens for _, _, tokens in run.parts)


class Turns:
    """The sessions of a log."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._others: OrderedDict[str, _Prompt] = OrderedDict()  # of requests without a session, by name
        self._left_out: set[str] = set()

    def add(self, each: Tokenized, answer: Answer) -> None:
        """The next request, and what became of it."""
        if not len(each.ends):
            return
        name = each.request.session
        session = self._sessions.get(name or NO_SESSION)
        if session is None:
            if len(self._sessions) == MOST_SESSIONS:
                self._left_out.add(name or NO_SESSION)
                return
            session = self._sessions[name or NO_SESSION] = _Session()
        size = len(each.ends) - (each.request.parts[-1].name == OPENING)
        prompt = _Prompt(each.request.parts[:size], each.ends[:size].tolist(), each.request.extra_key)
        before = session.last if name is not None else self._before(answer, prompt)
        session.add(prompt, before, answer, name is not None)

    def _before(self, answer: Answer, prompt: _Prompt) -> _Prompt | None:
        """The request that one without a session parts from."""
        before = self._others.get(answer.main.other)
        self._others[answer.name] = prompt
        if len(self._others) > MOST_SESSIONS:
            self._others.popitem(last=False)
        return before

    def report(self) -> list[dict[str, Any]]:
        """The sessions of two turns or more, those that computed most first."""
        found = [(name, each) for name, each in self._sessions.items() if each.count > 1]
        found.sort(key=lambda item: -item[1].computed)
        return [each.report(name) for name, each in found[:MOST_SHOWN]]


# ---------------------------------------------------------------------- what broke


def _break(before: _Prompt, now: _Prompt, common: int, answer: Answer) -> Break | None:
    """Why a turn does not hit what the one before was asked; None if it does."""
    lost = before.tokens(common, len(before.parts))
    if common == len(before.parts):
        kept = before.tokens(0, common)
        if answer.cached >= kept // answer.page_size * answer.page_size or answer.cached == answer.length - 1:
            return None
        if before.namespace != now.namespace:
            kind, what = "namespace", f"{_named(before.namespace)}, now {_named(now.namespace)}"
        elif any(cause in _GONE for cause in answer.by_cause()):
            kind, what = "gone", answer.main.cause
        else:
            return None
        return Break(kind, what, "", answer.cached, answer.missed, kept - answer.cached, kept - answer.cached)
    old, new = before.parts[common:], now.parts[common:]
    kind, what = _change(old, new)
    place = new[0].name if new else old[0].name
    again = _again(old, now, common, answer.cached)
    return Break(kind, what, place, now.tokens(0, common), answer.missed, again, lost)


def _again(old: Sequence[Part], now: _Prompt, common: int, cached: int) -> int:
    """Tokens of parts behind the break that were there before, and are computed."""
    there, found = Counter(map(_key, old)), 0
    for number, part in enumerate(now.parts[common:], start=common):
        if there[_key(part)]:
            there[_key(part)] -= 1
            found += max(now.ends[number] - max(now.tokens(0, number), cached), 0)
    return found


def _change(old: Sequence[Part], new: Sequence[Part]) -> tuple[str, str]:
    """What became of `old`, the first parts of which are not those of `new` any more."""
    summary = next((part for part in new if "compaction" in part.name), None)
    there = {_key(part) for part in old}
    if summary is not None and _key(summary) not in there:
        name = summary.name.partition(" (")[0]
        return "compaction", f"{_count(old)} became a summary ({name})"
    if not new:
        return "back", f"by {_count(old)}"
    one, other = old[0], new[0]
    for name, kind in (("tools", "tools"), ("functions", "tools"), ("response_format", "format")):
        if name in (one.name, other.name):
            return kind, _tools(one, other) if kind == "tools" else "another one"
    if CLEARED in other.text and CLEARED not in one.text:
        return "cleared", f"the result in {other.name}"
    was = next((part.name for part in old if _key(part) == _key(other)), "")  # as the turn before numbered it
    kept = any(_key(part) == _key(one) for part in new)
    if was and kept:
        return "reordered", f"{was} where {one.name} was"
    if kept:
        return "inserted", f"{other.name}, where {one.name} was"
    if was:
        return "left out", f"{one.name} and what was behind it up to {was}"
    return _edited(old, one, other, any(_key(part) in there for part in new))


def _edited(old: Sequence[Part], one: Part, other: Part, goes_on: bool) -> tuple[str, str]:
    """goes_on: something behind it is as it was."""
    ours, theirs = _apart(_said(other), _said(one))
    head = other.text.partition("\n")[0]
    what = f"{_short(theirs)} became {_short(ours)}"
    dated = _DATE.search(ours) or _DATE.search(theirs)
    if dated and head == one.text.partition("\n")[0] and max(len(ours), len(theirs)) <= 2 * SHOWN:
        return "date", what
    if head.endswith(("system", "developer")):
        return "system", what
    alike = len(ours) + len(theirs) < ALIKE * (len(_said(one)) + len(_said(other)))
    if alike or goes_on:
        return "edited", what
    return "back", f"by {_count(old)}, to {other.name}: {_short(_said(other))}"


def _key(part: Part) -> tuple[str, tuple[int, ...] | None]:
    return part.text, part.ids


def _said(part: Part) -> str:
    return spoken(part) if part.text.startswith(OPEN) else part.text


def _apart(one: str, other: str) -> tuple[str, str]:
    """What two texts differ in, in whole words, some characters around it."""
    least = min(len(one), len(other))
    start = next((at for at in range(least) if one[at] != other[at]), least)
    end = next((at for at in range(least - start) if one[-1 - at] != other[-1 - at]), least - start)
    while start and not one[start - 1].isspace():
        start -= 1
    while end and not one[len(one) - end].isspace():
        end -= 1
    return one[start : len(one) - end], other[start : len(other) - end]


def _tools(one: Part, other: Part) -> str:
    """How a list of tools changed."""
    before, now = _names(one), _names(other)
    if before is None or now is None:
        return f"{other.name} in place of {one.name}" if one.name != other.name else "other definitions"
    more = [name for name in now if name not in before]
    less = [name for name in before if name not in now]
    if more or less:
        said = [f"+{name}" for name in more[:3]] + [f"-{name}" for name in less[:3]]
        hidden = len(more) + len(less) - len(said)
        return ", ".join(said) + (f" and {hidden} more" if hidden else "")
    return "another order" if now != before else "other definitions"


def _names(part: Part) -> list[str] | None:
    if part.name not in ("tools", "functions"):
        return None
    start, end = part.text.find("["), part.text.rfind("]")
    try:
        tools = json.loads(part.text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    found = []
    for tool in tools if isinstance(tools, list) else ():
        inner = tool.get("function", tool) if isinstance(tool, dict) else {}
        name = inner.get("name") if isinstance(inner, dict) else None
        found.append(name[:SHOWN] if isinstance(name, str) else json.dumps(tool)[:SHOWN])
    return found


def _named(namespace: str | None) -> str:
    return "none" if namespace is None else _short(namespace)


def _count(parts: Sequence[Part]) -> str:
    return f"{len(parts):,} message{'s' * (len(parts) != 1)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")
