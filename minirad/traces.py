"""Trace and log files as requests: what was asked, in which order, in the key units of a radix tree.

Formats, told apart by their first records, are those of `minirad.logs` (OpenAI chat, completions, Responses
and batches, Anthropic, ShareGPT, Mooncake, sessions of Claude Code and Codex; all also as .gz):

* **mooncake** has no texts. A hash id stands for a block of 512 tokens and for all that comes before it, so
  the ids themselves are the key units; nothing is expanded to tokens.
* all others have texts, which become tokens by the `tokenizers` library; no torch is imported for a tokenizer
  that is a directory, a tokenizer.json or the classroom's. How a prompt is written: logs/writing.py.

Does not simulate anything (simulate.py does), and does not repair: a malformed record stops the reading with
its line number and what is wrong with it, or is left out and named, as the caller wants. A record whose text
is no valid Unicode (cut in the middle of an emoji, say) is always left out and named: real logs have such.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from minirad.cache.node import Slots
from minirad.logs import FORMATS, LogReader, PromptTokenizer, Tokenized, detect, tokenized
from minirad.logs.apis import BLOCK_TOKENS, Apis
from minirad.logs.records import Record
from minirad.logs.tokens import FastTokenizer, Tokenizer, tokenizer
from minirad.text import TextWarning

DEFAULT_OUTPUT = 64  # tokens of a reply that a log says nothing about
# Traces that are part of the project, by name; whose they are: NOTICE beside them.
TRACES = {"mooncake": Path(__file__).parent / "logs" / "traces" / "mooncake.jsonl.gz"}

Where = str  # "line 7", or "entry 7" of a list

__all__ = [
    "BLOCK_TOKENS", "DEFAULT_OUTPUT", "FORMATS", "TRACES", "FastTokenizer", "Tokenizer", "Trace",
    "TraceRequest", "detect", "prompt_text", "read_trace", "tokenizer", "trace_file",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    units: key units of the prompt (tokens, or blocks of `Trace.unit_tokens`). tokens: the prompt's
    length in tokens. output: units of the reply where the log has it; else output_units says how many.
    arrival: milliseconds from the first one's, or None. session: requests of one conversation wait for
    each other. where: its place in the file.
    """

    units: Slots
    tokens: int
    output: tuple[int, ...] | None = None
    output_units: int = DEFAULT_OUTPUT
    arrival: float | None = None
    session: str | None = None
    extra_key: str | None = None
    where: Where = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in file order. tokenizer: None where the file has no text. left_out: records, and why. notes:
    what else is to be said of what was left out or not understood, a line each."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...] = ()
    unit_tokens: int = 1
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a key unit is called."""
        return "token" if self.unit_tokens == 1 else "block"


def trace_file(name: str | Path) -> Path:
    """The file of a trace that is part of the project; else the path itself, as a Path always is."""
    return TRACES[name] if isinstance(name, str) and name in TRACES else Path(name)


def read_trace(
    path: str | Path,
    format: str | None = None,
    tokenizer_name: str | Path | None = None,
    limit: int | None = None,
    progress: Callable[[], Any] | None = None,
    malformed: str = "stop",
) -> Trace:
    """A trace or log file, or one of TRACES by its name. format: one of FORMATS; None: by its first records.

    limit: how many requests to read at most. progress: called once for each. malformed: what becomes of a
    record that is: "stop" raises ValueError with the place and what is wrong there, "skip" leaves it out.
    """
    path = trace_file(path)
    name = Path(path.name.removesuffix(".gz")).stem
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    reader = LogReader(path, format, malformed)
    found = iter(reader)
    first = next(found, None)
    if reader.format is None:
        return Trace(name, "empty")
    text = None if reader.format == "mooncake" else PromptTokenizer(tokenizer_name)
    requests: list[TraceRequest] = []
    for each in tokenized(islice(chain([first] if first else [], found), limit), text):
        requests.append(_request(each, text))
        if progress:
            progress()
    left_out = tuple(f"{record.where}: {record.why}" for record in reader.left_out)
    notes = reader.summary()
    if left_out:  # the first is named by the warning
        notes.remove(f"left out: {path}, {left_out[0]}")
        more = f" (and {reader.left_out_count - 1} more)" if reader.left_out_count > 1 else ""
        warnings.warn(f"left out: {path}, {left_out[0]}{more}", TextWarning, stacklevel=2)
    size = BLOCK_TOKENS if text is None else 1
    return Trace(name, reader.format, tuple(_from_the_first(requests)), size, text, left_out, tuple(notes))


def _request(each: Tokenized, text: PromptTokenizer | None) -> TraceRequest:
    request = each.request
    if text is None:
        units = -(-(request.reply_tokens or 0) // BLOCK_TOKENS)
        return TraceRequest(
            each.ids, request.tokens or 0, None, units, request.time, request.session, where=request.where
        )
    output = None if request.reply is None else tuple(text.encode(request.reply))
    length = DEFAULT_OUTPUT if request.reply_tokens is None else request.reply_tokens
    return TraceRequest(
        each.ids, len(each.ids), output, length if output is None else len(output), request.time,
        request.session, request.extra_key, request.where,
    )  # fmt: skip


def _from_the_first(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Arrivals counted from the earliest, whatever clock the file has."""
    arrivals = [request.arrival for request in requests if request.arrival is not None]
    origin = min(arrivals, default=0.0)
    for request in requests:
        late = None if request.arrival is None else request.arrival - origin
        yield replace(request, arrival=late)


def prompt_text(record: Any) -> str:
    """The prompt of one logged request as text (its messages as ChatML). ValueError says what is wrong."""
    first = next(Apis("").requests(Record(1, "", record), []))
    if any(part.ids is not None for part in first.parts):
        raise ValueError("its prompt is token ids, not a text")
    return first.text
