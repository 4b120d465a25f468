"""Why did a request miss the cache? For a request of a log, and summed over the log, with what to change.

The requests of the log go one after another through a cache of this size (minirad's own tree, no model);
each token that is computed has a cause, and each proposal is replayed. Without --log, FILE is the log.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappush, heapreplace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minirad import command
from minirad.cache.eviction import POLICIES
from minirad.cache.node import MAX_TOKEN, Slots
from minirad.config import one_of
from minirad.errors import read_text
from minirad.logs import FORMATS, LogReader, Part, PromptTokenizer, Tokenized, tokenized
from minirad.logs.request import OPENING, LoggedRequest
from minirad.logs.writing import CLOSE
from minirad.why.answer import CAUSES, Answer
from minirad.why.history import Cache, Entry, History
from minirad.why.repairs import Outcome, joined, outcomes, pair, room_for
from minirad.why.words import REQUESTS, Words

MOST_KEPT = 1 << 26  # tokens of a log that are kept to be replayed
MOST_BARS = 600  # of a page's series of requests
TEXTS = (".txt", ".md")  # files that hold one prompt, as it is
CONTEXT = 60  # characters before the place where two prompts part


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad why`."""
    formats = ", ".join(name for name in FORMATS if name != "workload")
    parser.add_argument(
        "file", help="a log or transcript (- for standard input): its last request is asked about"
    )
    parser.add_argument("--log", help="what was asked before; FILE is asked behind it")
    parser.add_argument("--all", action="store_true", help="ask about all requests of FILE, not the last one")
    parser.add_argument("--top", type=command.positive, default=10, help="with --all: the worst so many")
    parser.add_argument("--format", help=f"of the files: {formats} (default: by their first records)")
    parser.add_argument("--tokenizer", help="model name, directory or tokenizer.json (default: classroom)")
    parser.add_argument("--cache", default="inf", help="tokens that the cache holds (default: no limit)")
    parser.add_argument("--page-size", type=command.positive, default=1, help="tokens per page")
    parser.add_argument("--eviction-policy", default="lru", help=", ".join(POLICIES))
    parser.add_argument("--prompts-only", action="store_true", help="replies do not go into the cache")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--html", type=Path, help="write a Plotly page to this file, readable offline")


def main(args: argparse.Namespace) -> int:
    """Runs the command; ValueError for what cannot be done, with the value."""
    one_of("eviction policy", args.eviction_policy, tuple(POLICIES))
    if args.format == "workload":
        raise ValueError("a workload has no log to ask about")
    files = [name for name in (args.log, args.file) if name is not None]
    if files == ["-", "-"]:
        raise ValueError("--log and FILE cannot both be standard input")
    if args.html is not None:
        command.may_be_written("--html", args.html, (".html",), [name for name in files if name != "-"])
        write = _figure_writer()
    cache = Cache(_capacity(args.cache, args.page_size), args.page_size, args.eviction_policy)
    run = Run(cache, PromptTokenizer(args.tokenizer), args)
    run.read()
    report = run.report()
    if args.html is not None:
        write(report, args.html)
        print(f"page written to {args.html}", file=sys.stderr)
    print(json.dumps(report, indent=1, ensure_ascii=False) if args.json else text_of(report))
    if not args.json:
        for note in report["notes"]:
            print(note, file=sys.stderr)
    return 0


def _figure_writer() -> Callable[[Any, Path], Any]:
    """What draws reports: a package beside this one announces it (entry points), none is imported here."""
    for each in entry_points(group="minirad.figures", name="why"):
        draw: Callable[[Any, Path], Any] = each.load()
        return draw
    raise ValueError("--html: nothing that can draw it is installed: install the project with pip")


def _capacity(text: str, page_size: int) -> int | None:
    if text in ("inf", "unlimited"):
        return None
    try:
        tokens = int(text)
    except ValueError:
        tokens = 0
    if not page_size <= tokens <= MAX_TOKEN:
        raise ValueError(f"--cache must be inf or a number of tokens, {page_size} or more, got {text!r}")
    return tokens


# ---------------------------------------------------------------------- a run


@dataclass(slots=True)
class Sum:
    """What one cause cost: tokens, and requests that lost some to it."""

    tokens: int = 0
    requests: int = 0


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


class Run:
    """A log, read and replayed."""

    def __init__(self, cache: Cache, text: PromptTokenizer, args: argparse.Namespace) -> None:
        self.cache, self.text, self.args = cache, text, args
        self.history = History(cache)
        self.entries: list[Entry] | None = []  # None: too many to be kept
        self.computed: list[int] = []
        self.sums: dict[str, Sum] = {}
        self.series = Series()
        self.tokens = self.cached = self.kept = 0
        self.asked: list[tuple[int, int, Answer, Tokenized]] = []  # computed, number; a heap with --all
        self.notes: list[str] = []
        self.unit = "token"

    def read(self) -> None:
        """Takes both files in."""
        args = self.args
        if args.log is not None:
            for each in self._requests(args.log):
                self._serve(each, f"{Path(args.log).name}, {each.request.where}" if args.file else "")
        before = self.history.served
        for each in self._requests(args.file):
            self._ask(each, self._serve(each, each.request.where))
        if self.history.served == before:
            raise ValueError(f"there is no request in {args.file}" + _why_none(self.notes))

    def _requests(self, name: str) -> Iterator[Tokenized]:
        if Path(name).suffix in TEXTS:
            part = Part("prompt", read_text(name, "utf-8-sig"))
            if not part.text:
                raise ValueError(f"{name} is empty")
            yield from tokenized([LoggedRequest(name, 1, Path(name).name, "completions", (part,))], self.text)
            return
        reader = LogReader(name, self.args.format)
        yield from tokenized(reader.with_progress(), self.text)
        if reader.format == "mooncake":
            self.unit = "block"
        self.notes += reader.summary()

    def _serve(self, each: Tokenized, name: str) -> Answer:
        entry = Entry(name, each.ids, each.request.extra_key, self._reply(each), each)
        answer = self.history.serve(entry)
        self._keep(entry)
        self.computed.append(answer.missed)
        self.tokens += answer.length
        self.cached += answer.cached
        lost = answer.by_cause()
        for cause, tokens in lost.items():
            found = self.sums.setdefault(cause, Sum())
            found.tokens += tokens
            found.requests += 1
        self.series.add(Counter({"cached": answer.cached, **lost}))
        return answer

    def _keep(self, entry: Entry) -> None:
        """Turns of a session share their ids: what is kept of one is what it has more than the one before."""
        if self.entries is None:
            return
        last = self.entries[-1] if self.entries else None
        shares = last is not None and last.ids.base is not None and last.ids.base is entry.ids.base
        self.kept += max(len(entry.ids) - (len(last.ids) if shares and last else 0), 0)
        self.entries.append(entry)
        if self.kept > MOST_KEPT:
            self.entries = None
            self.notes.append(f"more than {MOST_KEPT:,} tokens: what to change is not replayed")

    def _reply(self, each: Tokenized) -> Slots:
        """What of a reply has KV afterwards: all but its end token, which nothing was computed for."""
        reply, none = each.request.reply, np.empty(0, dtype=np.int64)
        if not reply or self.args.prompts_only or each.request.blocks is not None:
            return none
        opening = each.request.parts[-1]
        if opening.name != OPENING or not self.text.by_parts:
            return np.array(self.text.encode(reply)[:-1], dtype=np.int64)
        # As the next turn spells it: what opens a message may join the first characters of the reply.
        begun, ids = self.text.ids(opening.text), self.text.ids(opening.text + reply + CLOSE)
        end = len(ids) - len(self.text.ids(CLOSE))
        return ids[len(begun) : end] if np.array_equal(ids[: len(begun)], begun) else none

    def _ask(self, each: Tokenized, answer: Answer) -> None:
        asked = (answer.missed, -self.history.served, answer, each)
        if not self.args.all:
            self.asked = [asked]
        elif len(self.asked) < self.args.top:
            heappush(self.asked, asked)
        elif asked[:2] > self.asked[0][:2]:
            heapreplace(self.asked, asked)

    # ------------------------------------------------------------ what is said

    def report(self) -> dict[str, Any]:
        """Everything as plain data: for JSON, for the page, and for the text."""
        words = Words(
            None if self.unit == "block" else self.text.decode, REQUESTS, self.history.namespace, self.unit
        )
        found = self._outcomes()
        worst = sorted(self.sums.items(), key=lambda item: -item[1].tokens)
        asked = sorted(self.asked, key=lambda each: each[:2], reverse=True)
        answers = [self._answer(-number, answer, each, words, found) for _, number, answer, each in asked]
        return {
            "log": self.args.log or self.args.file, "unit": self.unit, "requests": self.history.served,
            "tokens": self.tokens, "cached": self.cached, "computed": self.tokens - self.cached,
            "cache": asdict(self.cache), "answers": answers,
            "causes": [{"cause": cause, "what": CAUSES[cause], **asdict(each)} for cause, each in worst],
            "repairs": [_repair(each) for each in found],
            "series": {"width": self.series.width, "bars": [dict(bar) for bar in self.series.bars]},
            "notes": self.notes,
        }  # fmt: skip

    def _outcomes(self) -> list[Outcome]:
        if self.entries is None:
            return []
        encode = None if self.unit == "block" else self._encode
        with self._bar("replaying proposals") as bar:
            return outcomes(self.entries, self.computed, list(self.sums), self.cache, encode, bar.update)

    def _bar(self, about: str) -> Any:
        return tqdm(desc=about, unit=" requests", delay=1, leave=False, disable=None)

    def _encode(self, parts: Sequence[Part]) -> Slots:
        if not self.text.by_parts:
            return np.array(self.text.encode("".join(part.text for part in parts)), dtype=np.int64)
        rows = [self.text.ids(p.text) if p.ids is None else np.array(p.ids, dtype=np.int64) for p in parts]
        return joined(rows)

    def _answer(
        self, number: int, answer: Answer, each: Tokenized, words: Words, found: Iterable[Outcome]
    ) -> dict[str, Any]:
        data = words.as_data(answer)
        for loss in data["losses"]:
            if loss["cause"] == "differs" and len(each.ends):
                part, token = each.part_at(loss["start"])
                loss["part"], loss["part_token"] = part.name, token
                loss["character"] = len(self.text.decode(each.ids[: loss["start"]].tolist()))
        alone = [] if self.args.all else self._pair(number, answer)
        data["repairs"] = [
            {"name": one.name, "what": one.what, "saved": one.of[number - 1], "capacity": one.capacity}
            for one in [*alone, *found]
            if one.of[number - 1] > 0
        ]
        if self.entries is not None and "evicted" in answer.by_cause() and not self.args.all:
            with self._bar("looking for the cache that would have kept it") as bar:
                room = room_for(self.entries, number - 1, self.cache, bar.update)
            if room is not None and self.cache.capacity is not None:
                data["room"] = {"capacity": room, "more": room - self.cache.capacity}
        return data

    def _pair(self, number: int, answer: Answer) -> list[Outcome]:
        """The request and the one that it parts from, in another order."""
        if self.entries is None or self.unit == "block" or answer.main.cause != "differs":
            return []
        names = [entry.name for entry in self.entries[: number - 1]]
        if answer.main.other not in names:
            return []
        other = len(names) - 1 - names[::-1].index(answer.main.other)
        with self._bar("looking for another order") as bar:
            found = pair(self.entries, number - 1, other, self.computed, self.cache, self.text, bar.update)
        return [] if found is None else [found]


def _why_none(notes: Sequence[str]) -> str:
    return f": {notes[0]}" if notes else ""


def _repair(each: Outcome) -> dict[str, Any]:
    return {
        "name": each.name, "what": each.what, "saved": each.saved, "requests": each.requests,
        "capacity": each.capacity,
    }  # fmt: skip


# ---------------------------------------------------------------------- as text


def text_of(report: dict[str, Any]) -> str:
    """A report as text."""
    lines = [line for answer in report["answers"] for line in [*_told(answer, report), ""]]
    unit, computed = report["unit"], report["computed"]
    lines.append(
        f"{report['log']}: {report['requests']:,} requests, {report['tokens']:,} prompt {unit}s, "
        f"{report['cached']:,} from the cache ({report['cached'] / max(report['tokens'], 1):.1%}), "
        f"{computed:,} computed"
    )
    rows = [("computed", "share", "requests", "because")]
    for each in report["causes"]:
        share = f"{each['tokens'] / max(computed, 1):.1%}"
        rows.append((f"{each['tokens']:,}", share, f"{each['requests']:,}", each["what"]))
    lines += ["", *_columns(rows)]
    if report["repairs"]:
        rows = [("saved", "of all", "requests", "if it were so (replayed)")]
        for each in report["repairs"]:
            requests = f"{each['requests']:,}" if each["requests"] else "-"
            rows.append(
                (f"{each['saved']:,}", f"{each['saved'] / max(computed, 1):.1%}", requests, each["what"])
            )
        lines += ["", *_columns(rows)]
    return "\n".join(lines)


def _told(answer: dict[str, Any], report: dict[str, Any]) -> list[str]:
    unit = report["unit"]
    share = answer["cached"] / answer["tokens"]
    lines = [
        f"{answer['request']}: {answer['cached']:,} of {answer['tokens']:,} {unit}s from the cache "
        f"({share:.1%}), {answer['computed']:,} computed"
    ]
    for loss in answer["losses"]:
        lines.append(f"  {loss['say']}")
        if loss["cause"] == "differs" and "part" in loss:
            before = loss["before_text"][-CONTEXT:]
            lines += [
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


def _marked(before: str, text: str) -> str:
    return f"...{repr(before)[1:-1]}«{repr(text)[1:-1] or 'end'}»"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns, the last one to be read."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(c.rjust(w) for c, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in rows
    ]
