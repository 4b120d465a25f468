"""What was found out about many requests: sums by cause, the requests asked about; as data, and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappush, heapreplace
from typing import Any

from minirad.observe.fleet_events import counted
from minirad.text import escaped
from minirad.why.answer import CAUSES, Answer
from minirad.why.turns import BREAKS

MOST_BARS = 600  # of the series of requests
MOST_PARTINGS = 8  # of what prompts part in
MOST_BREAKS = 10  # of the prefix, in the text
CONTEXT = 60  # characters before the place where two prompts part

Report = dict[str, Any]


@dataclass(slots=True)
class Sum:
    """What one cause cost: tokens, and requests that lost some to it."""

    tokens: int = 0
    requests: int = 0

    def add(self, tokens: int) -> None:
        """Of one more request."""
        self.tokens += tokens
        self.requests += 1


@dataclass(slots=True)
class Series:
    """Tokens of every request by cause ("cached" for hits), so many requests in one bar that MOST_BARS do."""

    width: int = 1
    bars: list[Counter[str]] = field(default_factory=list)
    count: int = 0

    def add(self, tokens: Counter[str]) -> None:
        """Those of the next request."""
        if self.count % self.width == 0:
            if len(self.bars) == MOST_BARS:
                self.bars = [a + b for a, b in zip(self.bars[::2], self.bars[1::2], strict=True)]
                self.width *= 2
            self.bars.append(Counter())
        self.bars[-1].update(tokens)
        self.count += 1


@dataclass(frozen=True, slots=True)
class Picked:
    """A request that is asked about. number: from 0; more: what the one who picked it needs."""

    number: int
    answer: Answer
    more: Any = None


class Totals:
    """Sums over all requests, and the answers of some.

    named: the request asked about; None: the last one. worst: those that computed most instead, so many.

    Attributes:
        computed: of each request, in order. picked: the requests asked about, the worst first.
        left: that many more were asked about, and are told in the sums alone.
    """

    def __init__(self, named: str | None = None, worst: int = 0) -> None:
        self._named, self._worst = named, worst
        self.sums: dict[str, Sum] = {}
        self.partings: dict[str, Sum] = {}  # of the cause "differs", by what they part in
        self.series = Series()
        self.computed: list[int] = []
        self.tokens = self.cached = self._asked = 0
        self._heap: list[tuple[int, int, Picked]] = []

    def add(self, answer: Answer, asked: bool = True, more: Any = None, where: str = "") -> None:
        """The next request's answer. asked: it may be picked. where: in what part it differs, if it does."""
        lost = answer.by_cause()
        for cause, tokens in lost.items():
            self.sums.setdefault(cause, Sum()).add(tokens)
        if where and "differs" in lost:
            self.partings.setdefault(where, Sum()).add(lost["differs"])
        self.series.add(Counter({"cached": answer.cached, **lost}))
        if asked:
            self._asked += 1
            self._pick(Picked(len(self.computed), answer, more))
        self.computed.append(answer.missed)
        self.tokens += answer.length
        self.cached += answer.cached

    def _pick(self, picked: Picked) -> None:
        entry = (picked.answer.missed, -picked.number, picked)
        if not self._worst:
            if self._named in (None, picked.answer.name):
                self._heap = [entry]
        elif len(self._heap) < self._worst:
            heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapreplace(self._heap, entry)

    @property
    def picked(self) -> list[Picked]:
        return [entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]

    @property
    def left(self) -> int:
        return self._asked - len(self._heap) if self._worst else 0

    def report(
        self, log: str, unit: str, cache: dict[str, Any], each: str = "request", requests: int | None = None
    ) -> Report:
        """As plain data; answers and repairs are still to be filled in.

        log: what all of it is about, in words. each: what an answer is of; requests: that many had those
        (None: one each).
        """
        worst, partings = _worst_first(self.sums), _worst_first(self.partings)
        count = len(self.computed)
        return {
            "log": log, "unit": unit, "each": each, "count": count, "tokens": self.tokens,
            "requests": count if requests is None else requests,
            "cached": self.cached, "computed": self.tokens - self.cached, "cache": cache, "answers": [],
            "left": self.left,
            "causes": [{"cause": cause, "what": CAUSES[cause], **asdict(each)} for cause, each in worst],
            "partings": [{"where": where, **asdict(each)} for where, each in partings],
            "repairs": [], "sessions": [], "notes": [],
            "series": {"width": self.series.width, "bars": [dict(bar) for bar in self.series.bars]},
        }  # fmt: skip


def _worst_first(sums: dict[str, Sum]) -> list[tuple[str, Sum]]:
    return sorted(sums.items(), key=lambda item: -item[1].tokens)


# ---------------------------------------------------------------------- as text


def text_of(report: dict[str, Any]) -> str:
    """A report as text."""
    lines = [line for answer in report["answers"] for line in [*_told(answer, report), ""]]
    if report["left"]:
        lines += [f"... and {report['left']:,} more, which computed no more than these (--top N tells N)", ""]
    computed = report["computed"]
    lines.append(
        f"{report['log']}: {asked_for(report)}, {report['cached']:,} from the cache "
        f"({report['cached'] / max(report['tokens'], 1):.1%}), {computed:,} computed"
    )
    rows = [("computed", "share", f"{report['each']}s", "because")]
    for each in report["causes"]:
        share = f"{each['tokens'] / max(computed, 1):.1%}"
        rows.append((f"{each['tokens']:,}", share, f"{each['requests']:,}", each["what"]))
        if each["cause"] == "differs":
            for one in report["partings"][:MOST_PARTINGS]:
                rows.append((f"{one['tokens']:,}", "", f"{one['requests']:,}", f"  in {one['where']}"))
    lines += ["", *_columns(rows)]
    if report["repairs"]:
        rows = [("saved", "of all", "requests", "if it were so (replayed)")]
        for each in report["repairs"]:
            requests = f"{each['requests']:,}" if each["requests"] else "-"
            rows.append(
                (f"{each['saved']:,}", f"{each['saved'] / max(computed, 1):.1%}", requests, each["what"])
            )
        lines += ["", *_columns(rows)]
    return "\n".join(map(escaped, [*lines, *_breaks(report)]))  # nothing of a log is raw on a terminal


def _breaks(report: Report) -> list[str]:
    """Where sessions broke their prefix, what cost most first."""
    found = [
        (turn["break"], turn["name"])
        for session in report["sessions"]
        for turn in session["turns"]
        if "break" in turn
    ]
    if not found:
        return []
    rows = [("computed", "of them again", "given up", "at", "a session's prefix broke: why")]
    for broke, name in sorted(found, key=lambda item: -item[0]["computed"])[:MOST_BREAKS]:
        what = f"{BREAKS[broke['kind']]}: {broke['what']}"
        numbers = (f"{broke[each]:,}" for each in ("computed", "again", "lost"))
        rows.append((*numbers, name, what))
    more = f"  ... and {len(found) - MOST_BREAKS:,} more" if len(found) > MOST_BREAKS else ""
    return ["", *_columns(rows), *([more] if more else [])]


def _told(answer: dict[str, Any], report: dict[str, Any]) -> list[str]:
    unit = report["unit"]
    share = answer["cached"] / answer["tokens"]
    lines = [
        f"{answer['request']}: {answer['cached']:,} of {answer['tokens']:,} {unit}s from the cache "
        f"({share:.1%}), {answer['computed']:,} computed"
    ]
    for loss in answer["losses"]:
        if loss["cause"] != "differs" or "part" not in loss:
            lines.append(f"  {loss['say']}")
        else:
            before = loss["before_text"][-CONTEXT:]
            lines += [
                f"  {loss['tokens']:,} from {unit} {loss['start']:,} on, where it parts from {loss['other']}",
                f"    in {loss['part']}, its token {loss['part_token']:,} (character {loss['character']:,})",
                f"    {loss['other']}: {_marked(before, loss['theirs_text'])}",
                f"    {answer['request']}: {_marked(before, loss['ours_text'])}",
            ]
    lines += [f"  {each['saved']:,} {unit}s fewer with {each['what']}" for each in answer["repairs"]]
    if "room" in answer:
        room = answer["room"]
        lines.append(
            f"  a cache of {room['capacity']:,} {unit}s ({room['more']:,} more) would have kept what is gone"
        )
    return lines


def asked_for(report: Report) -> str:
    """How many requests there were (and answers, where they had several), and of how many tokens."""
    each, unit = report["each"], report["unit"]
    requests = counted(report["requests"], "request")
    if each == "request":
        return f"{requests}, {counted(report['tokens'], f'prompt {unit}')}"
    return f"{counted(report['count'], each)} of {requests}, {counted(report['tokens'], unit)}"


def _marked(before: str, text: str) -> str:
    return f"...{repr(before)[1:-1]}«{repr(text)[1:-1] or 'end'}»"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns, the last one to be read."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows
    ]
