"""Why did a request miss the cache? For a request of a log, and summed over the log, with what to change.

The requests of the log go one after another through a cache of this size (minirad's own tree, no model);
each token that is computed has a cause, and each proposal is replayed. Without --log, FILE is the log. Of a
recording every request is told as it was; with it as --log, what FILE's would find at its end (of a stream of
KV events: on each rank).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
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
from minirad.logs.writing import CLOSE, OPEN
from minirad.observe.events import listed
from minirad.observe.recording import Recording
from minirad.why.answer import Answer, Decode
from minirad.why.history import Cache, Entry, History
from minirad.why.recorded import Recorded
from minirad.why.repairs import Outcome, joined, outcomes, pair, room_for
from minirad.why.report import Picked, Report, Totals, text_of
from minirad.why.streamed import Streamed
from minirad.why.turns import Turns
from minirad.why.words import REQUESTS, Words

MOST_KEPT = 1 << 25  # tokens of a log that are kept to be replayed
_NUMBERED = re.compile(r"message \d+")
RECORDING = b'{"minirad"'  # how a recording begins
TEXTS = (".txt", ".md")  # files that hold one prompt, as it is
TOP = 10  # requests that --all tells
REPLAYED: dict[str, Any] = {  # what says how a log is replayed, unless it is said otherwise
    "cache": "inf", "page_size": 1, "eviction_policy": "lru", "prompts_only": False,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad why`."""
    formats = ", ".join(name for name in FORMATS if name != "workload")
    parser.add_argument(
        "file",
        help="a log or transcript (- for standard input), or a recording: its last request is asked about",
    )
    parser.add_argument("--log", help="what was asked before; FILE is asked behind it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--request", help="of FILE the one that is asked about, such as 'line 7' or R7")
    which.add_argument("--all", action="store_true", help="ask about all requests of FILE, not the last one")
    parser.add_argument(
        "--top", type=command.positive, help=f"with --all: the worst so many are told (default: {TOP})"
    )
    parser.add_argument("--format", help=f"of the files: {formats} (default: by their first records)")
    parser.add_argument("--tokenizer", help="model name, directory or tokenizer.json (default: classroom)")
    parser.set_defaults(**REPLAYED)
    parser.add_argument("--cache", help="tokens that the cache holds (default: no limit)")
    parser.add_argument("--page-size", type=command.positive, help="tokens per page (default: 1)")
    parser.add_argument("--eviction-policy", help=f"{', '.join(POLICIES)} (default: lru)")
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
    if args.top is not None and not args.all:
        raise ValueError(f"--top {args.top} goes with --all only")
    if args.html is not None:
        command.may_be_written("--html", args.html, (".html",), [name for name in files if name != "-"])
        write = command.figure_writer("why", "--html")
    totals = Totals(args.request, (args.top or TOP) if args.all else 0)
    if any(map(_is_recording, files)):
        report = recorded(args, totals)
    else:
        text = PromptTokenizer(args.tokenizer)
        closes = int(text.ids(CLOSE)[0]) if text.by_parts and not args.prompts_only else None
        size, policy = _capacity(args.cache, args.page_size), args.eviction_policy
        report = Run(Cache(size, args.page_size, policy, closes), text, args, totals).report()
    if args.html is not None:
        write(report, args.html)
        print(f"page written to {args.html}", file=sys.stderr)
    print(json.dumps(report, indent=1, ensure_ascii=False) if args.json else text_of(report))
    if not args.json:
        for note in report["notes"]:
            print(note, file=sys.stderr)
    return 0


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


def _requests(name: str, format: str | None, text: PromptTokenizer, notes: list[str]) -> Iterator[Tokenized]:
    """The requests of a file, or a text's as one. notes: gets what was not read or understood."""
    if Path(name).suffix in TEXTS:
        part = Part("prompt", read_text(name, "utf-8-sig"))
        if not part.text:
            raise ValueError(f"{name} is empty")
        yield from tokenized([LoggedRequest(name, 1, Path(name).name, "completions", (part,))], text)
        return
    reader = LogReader(name, format)
    yield from tokenized(reader.with_progress(), text)
    notes += reader.summary()


# ---------------------------------------------------------------------- a recording


def _is_recording(name: str) -> bool:
    path = Path(name)
    if name == "-" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(BOM_UTF8 + RECORDING)).removeprefix(BOM_UTF8).startswith(RECORDING)


def recorded(args: argparse.Namespace, totals: Totals) -> Report:
    """Of a run of the engine: every admission as it was; or (FILE is another) what would come next."""
    if args.log is not None and _is_recording(args.file):
        raise ValueError(f"{args.file} is a recording: it is asked about without a --log")
    _only_of_a_log(args)
    recording = Recording.load(args.log or args.file)
    if "ranks" in recording.header["start"]["tree"]:
        return streamed(recording, args)
    told, log, again = Recorded.of(recording), args.file, {}
    if args.log is not None:
        log = f"{args.file}, at the end of {args.log}"
        _ask_now(told, recording, args, totals)
    else:
        for name, answer in told.answers.items():
            totals.add(replace(answer, name=name))
        again = _admissions(told)
    start = recording.header["start"]
    cache = {
        "capacity": start["kv_tokens"] or None, "page_size": told.page_size,
        "eviction_policy": start["tree"]["eviction_policy"],
    }  # fmt: skip
    report = totals.report(log, "token", cache, **again)
    words = Words.of(recording.header, _decode(args.tokenizer, recording.header))
    _expect_some(totals, args)
    report["answers"] = [{**words.as_data(each.answer), "repairs": []} for each in totals.picked]
    report["notes"] = [recording.missing] if recording.missing else []
    if told.unknown:
        report["notes"].append(f"the recording does not tell the tokens of {listed(told.unknown)}")
    return report


def _only_of_a_log(args: argparse.Namespace) -> None:
    """ValueError for options that say how a log is read and replayed: a recording was run already."""
    usual = {**REPLAYED, "format": None if args.log is None else args.format}
    for name in usual:
        value = getattr(args, name)
        if value != usual[name]:
            option = f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            recording = args.log or args.file
            raise ValueError(f"{option} goes with a log only: {recording} is a recording, told as it was")


def _admissions(told: Recorded) -> dict[str, Any]:
    """What a report is told where requests were admitted again, after a retraction."""
    requests = len({name.partition("#")[0] for name in told.answers})
    return {} if requests == len(told.answers) else {"each": "admission", "requests": requests}


def streamed(recording: Recording, args: argparse.Namespace) -> Report:
    """Of a stream of KV events: what FILE's last request (all, the one named) would find on each rank."""
    if args.log is None:
        raise ValueError(
            f"{args.file} is of a stream, which does not tell what was asked: say --log and a FILE"
        )
    told = Streamed.of(recording)
    totals = Totals(worst=(args.top or TOP) if args.all else max(len(told.ranks), 1))
    asked = [each for each in _asked_now(recording, args) if args.request in (None, each.request.where)]
    asked = asked if args.all else asked[-1:]
    for each in asked:
        for rank, answer in told.why(each.ids).items():
            totals.add(replace(answer, name=f"{each.request.where} on rank {rank}"))
    _expect_some(totals, args)
    policy = recording.header["start"]["tree"]["eviction_policy"]
    cache = {"capacity": None, "page_size": told.block_size, "eviction_policy": policy}
    ranks = f"each of {len(told.ranks)} ranks" if len(told.ranks) > 1 else "the one rank"
    log = f"{args.file}, on {ranks} of {args.log}"
    report = totals.report(log, "token", cache, "answer", len(asked))
    words = Words.of(recording.header, _decode(args.tokenizer, recording.header))
    report["answers"] = [{**words.as_data(each.answer), "repairs": []} for each in totals.picked]
    report["notes"] = [recording.missing] if recording.missing else []
    return report


def _ask_now(told: Recorded, recording: Recording, args: argparse.Namespace, totals: Totals) -> None:
    """Each request of FILE by itself, as if it came when the recording ends, without a salt."""
    for each in _asked_now(recording, args):
        totals.add(told.why(each.ids, name=each.request.where))


def _asked_now(recording: Recording, args: argparse.Namespace) -> Iterator[Tokenized]:
    text = text_for(args.tokenizer, recording.header)
    for each in _requests(args.file, args.format, text or PromptTokenizer(), []):
        if text is None and any(part.ids is None for part in each.request.parts):
            raise ValueError(f"{args.log} has no tokenizer: say --tokenizer, or ask for token ids")
        yield each


def text_for(name: str | None, header: dict[str, Any]) -> PromptTokenizer | None:
    """The recording's tokenizer, if it is here; nothing is fetched."""
    source = name or (header.get("model") or {}).get("tokenizer", "")
    if source == "" or (name is None and source is not None and not Path(source).is_dir()):
        return None
    return PromptTokenizer(source)


def _decode(name: str | None, header: dict[str, Any]) -> Decode | None:
    text = text_for(name, header)
    return None if text is None else text.decode


def _expect_some(totals: Totals, args: argparse.Namespace, notes: Sequence[str] = ()) -> None:
    if not totals.picked:
        which = "no request" if args.request is None else f"no request {args.request!r}"
        raise ValueError(f"there is {which} in {args.file}{f': {notes[0]}' if notes else ''}")


# ---------------------------------------------------------------------- a log


class Run:
    """A log, read and replayed."""

    def __init__(self, cache: Cache, text: PromptTokenizer, args: argparse.Namespace, totals: Totals) -> None:
        self.cache, self.text, self.args, self.totals = cache, text, args, totals
        self.history = History(cache)
        self.turns = Turns()
        self.entries: list[Entry] | None = []  # None: too many to be kept
        self.kept = 0
        self.notes: list[str] = []
        self.unit = "token"

    def report(self) -> Report:
        """Reads both files, and says all that there is to say."""
        args = self.args
        for name in () if args.log is None else (args.log,):
            for each in _requests(name, args.format, self.text, self.notes):
                self._serve(each, f"{Path(name).name}, {each.request.where}", asked=False)
        for each in _requests(args.file, args.format, self.text, self.notes):
            self._serve(each, each.request.where)
        _expect_some(self.totals, args, self.notes)
        cache = {name: value for name, value in asdict(self.cache).items() if name != "closes"}
        log = args.file if args.log is None else f"{args.log}, and {args.file} behind it"
        report = self.totals.report(log, self.unit, cache)
        found = self._outcomes()
        decode = None if self.unit == "block" else self.text.decode
        words = Words(decode, REQUESTS, self.history.namespace, self.unit)
        report["answers"] = [self._answer(picked, words, found) for picked in self.totals.picked]
        report["repairs"] = [_repair(each, each.saved) for each in found]
        report["sessions"] = self.turns.report()
        report["notes"] = self.notes
        return report

    def _serve(self, each: Tokenized, name: str, asked: bool = True) -> None:
        if each.request.blocks is not None:
            self.unit = "block"
        session = each.request.session
        entry = Entry(name, each.ids, each.request.extra_key, self._reply(each), each, session)
        answer = self.history.serve(entry)
        self.totals.add(answer, asked, each, _parts_in(each, answer))
        self.turns.add(each, answer)
        self._keep(entry)

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
        begun, ids = self._ids(opening.text), self._ids(opening.text + reply + CLOSE)
        end = len(ids) - len(self._ids(CLOSE))
        return ids[len(begun) : end] if np.array_equal(ids[: len(begun)], begun) else none

    def _ids(self, text: str) -> Slots:
        return np.asarray(self.text.ids(text), dtype=np.int64)

    # ------------------------------------------------------------ what to change

    def _outcomes(self) -> list[Outcome]:
        """Those that save something in the log, or for a request that is asked about."""
        if self.entries is None:
            return []
        encode, totals = None if self.unit == "block" else self._encode, self.totals
        with self._bar("replaying proposals") as bar:
            found = outcomes(self.entries, totals.computed, list(totals.sums), self.cache, encode, bar.update)
        asked = [picked.number for picked in totals.picked]
        return [each for each in found if each.saved > 0 or any(each.of[number] > 0 for number in asked)]

    def _bar(self, about: str) -> Any:
        return tqdm(desc=about, unit=" requests", delay=1, leave=False, disable=None)

    def _encode(self, parts: Sequence[Part]) -> Slots:
        if not self.text.by_parts:
            return np.array(self.text.encode("".join(part.text for part in parts)), dtype=np.int64)
        rows = [self._ids(p.text) if p.ids is None else np.array(p.ids, dtype=np.int64) for p in parts]
        return joined(rows)

    def _answer(self, picked: Picked, words: Words, found: Sequence[Outcome]) -> dict[str, Any]:
        answer, number, each = picked.answer, picked.number, picked.more
        data = words.as_data(answer)
        for loss in data["losses"]:
            if loss["cause"] == "differs" and len(each.ends):
                part, token = each.part_at(loss["start"])
                loss["part"], loss["part_token"] = part.name, token
                loss["character"] = len(self.text.decode(each.ids[: loss["start"]].tolist()))
        alone = [] if self.args.all else self._pair(number, answer)
        helps = [one for one in [*alone, *found] if one.of[number] > 0]
        data["repairs"] = [_repair(one, one.of[number]) for one in helps]
        if self.entries is not None and "evicted" in answer.by_cause() and not self.args.all:
            with self._bar("looking for the cache that would have kept it") as bar:
                room = room_for(self.entries, number, self.cache, bar.update)
            if room is not None and self.cache.capacity is not None:
                data["room"] = {"capacity": room, "more": room - self.cache.capacity}
        return data

    def _pair(self, number: int, answer: Answer) -> list[Outcome]:
        """The request and the one that it parts from, in another order."""
        if self.entries is None or self.unit == "block" or answer.main.cause != "differs":
            return []
        before = [at for at in range(number) if self.entries[at].name == answer.main.other]
        if not before or not _same_message(self.entries[before[-1]], self.entries[number], answer.main.start):
            return []
        with self._bar("looking for another order") as bar:
            found = pair(
                self.entries, number, before[-1], self.totals.computed, self.cache, self.text, bar.update
            )
        return [] if found is None else [found]


def _parts_in(each: Tokenized, answer: Answer) -> str:
    """What kind of part a prompt parts from another in: "system", "a message (user)"."""
    start = next((loss.start for loss in answer.losses if loss.cause == "differs"), None)
    if start is None or not len(each.ends):
        return ""
    return _NUMBERED.sub("a message", each.part_at(start)[0].name)


def _same_message(one: Entry, other: Entry, position: int) -> bool:
    """Whether they part in a message of the same role: only lines of such change places."""
    names = [entry.source.part_at(position)[0] for entry in (one, other) if position < len(entry.ids)]
    heads = {part.text.partition("\n")[0] for part in names}
    return len(names) == 2 and (len(heads) == 1 or not names[0].text.startswith(OPEN))


def _repair(each: Outcome, saved: int) -> dict[str, Any]:
    return {
        "name": each.name, "what": each.what, "saved": saved, "requests": each.requests,
        "capacity": each.capacity,
    }  # fmt: skip
