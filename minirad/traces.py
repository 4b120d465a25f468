"""Trace and log files as requests: what was asked, in which order, in the key units of a radix tree.

Three formats, told apart by their first record:

* **mooncake**: JSON lines `{"timestamp" ms, "input_length", "output_length", "hash_ids"}`, published with
  Mooncake (FAST 2025). A hash id stands for a block of 512 tokens and for all that comes before it, so
  the ids themselves are the key units; nothing is expanded to tokens, and no text is known.
* **openai**: request logs, JSON lines or one list, with "messages" or "prompt", also inside "body"
  (batch files) or "request" (with "response" beside it).
* **sharegpt**: a list or JSON lines of `{"conversations": [{"from", "value"}, ...]}`; each turn that has
  a reply is one request, and its prompt is the conversation so far.

Messages are written as ChatML, whatever the model: for sharing it matters what comes first and what is
equal, not how a role is spelled. Texts become tokens by the `tokenizers` library; no torch is imported
for a tokenizer that is a directory, a tokenizer.json or the classroom's.

Does not simulate anything (simulate.py does), and does not repair: a malformed record stops the reading
with its line number and what is wrong with it. A record whose text is no valid Unicode (cut in the middle
of an emoji, say) is left out and named: real logs have such.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np

from minirad.cache.node import MAX_TOKEN, Slots
from minirad.errors import read_text, said
from minirad.model.classroom import corpus
from minirad.text import InvalidTextError, TextWarning, no_length_warning, valid_text

LATEST = 1e16  # milliseconds: no clock is later, and arithmetic with it is exact enough
BLOCK_TOKENS = 512  # of one Mooncake hash id
DEFAULT_OUTPUT = 64  # tokens of a reply that a log says nothing about
FORMATS = ("mooncake", "openai", "sharegpt", "workload")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}

Where = str  # "line 7", or "entry 7" of a list
Record = tuple[Where, Any]


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


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
    """Requests in file order. tokenizer: None where the file has no text. left_out: records, and why."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...] = ()
    unit_tokens: int = 1
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    left_out: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What a key unit is called."""
        return "token" if self.unit_tokens == 1 else "block"


# ---------------------------------------------------------------------- tokenizers


class FastTokenizer:
    """A tokenizer.json, read by the `tokenizers` library alone."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust: Any = Rust.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is no tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._rust.encode(valid_text(text, "a text"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._rust.decode([int(each) for each in ids], skip_special_tokens=False)
        return text


class _TransformersTokenizer:
    """Any other tokenizer, through transformers."""

    def __init__(self, path: Path) -> None:
        from minirad.model.load import load_tokenizer

        self._inner: Any = load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        with no_length_warning():
            ids: list[int] = self._inner.encode(valid_text(text, "a text"), add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._inner.decode(list(ids))
        return text


def tokenizer(name: str | Path | None = None) -> Tokenizer:
    """None: the classroom's; a tokenizer.json or a directory with one; else a name for resolve_model."""
    if name is None or name == "classroom":
        path = Path(corpus.__file__).parent / "weights"
    else:
        path = Path(name).expanduser()
        if path.suffix == ".json" and path.is_file():
            return FastTokenizer(path)
        if not (path / "tokenizer.json").is_file():
            from minirad.model.load import resolve_model

            path = resolve_model(name)
    file = path / "tokenizer.json"
    return FastTokenizer(file) if file.is_file() else _TransformersTokenizer(path)


# ---------------------------------------------------------------------- records of a file


def records(path: Path) -> Iterator[Record]:
    """The records of a file of JSON lines, or of one JSON list; blank lines are skipped.

    A line that is no UTF-8 gives an InvalidTextError in place of its record.
    """
    if _opening(path).startswith("["):
        try:
            entries = json.loads(read_text(path, "utf-8-sig"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: no JSON: {error.msg}") from error
        except RecursionError:
            raise ValueError(f"{path}: no JSON that can be read: it is nested too deeply") from None
        yield from ((f"entry {number}", each) for number, each in enumerate(entries, start=1))
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield where, json.loads(line)
            except UnicodeDecodeError as error:
                yield where, InvalidTextError(f"no UTF-8 text: {error.reason}")
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, {where}: no JSON: {error.msg} at column {error.colno}") from error
            except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 100,000 brackets
                told = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise ValueError(f"{path}, {where}: no JSON that can be read: {told}") from None


def _opening(path: Path) -> str:
    """The first characters that are no white space ("" for an empty file)."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            if line.strip():
                return line.strip()
    return ""


def detect(path: Path) -> str | None:
    """One of FORMATS by the first record; None for an empty file. ValueError if it is none of them."""
    opening = _opening(path)
    if not opening:
        return None
    if opening.startswith('{"minirad"'):
        return "workload"  # a recording, which workloads.load reads
    if opening == "{":
        return "workload"  # a whole file that is one object
    readable = (each for each in records(path) if not isinstance(each[1], InvalidTextError))
    first = next(readable, next(records(path), None))
    if first is None:
        return None
    where, record = first
    if isinstance(record, InvalidTextError):
        raise ValueError(f"{path}, {where}: {record}")
    kinds = record if isinstance(record, dict) else {}
    if "sessions" in kinds:
        return "workload"
    if "hash_ids" in kinds or "input_length" in kinds:
        return "mooncake"
    if "conversations" in kinds or "conversation" in kinds:
        return "sharegpt"
    if any(key in kinds for key in ("messages", "prompt", "body", "request")):
        return "openai"
    found = ", ".join(map(repr, kinds)) or type(record).__name__
    raise ValueError(
        f"{path}, {where}: unknown format ({found}); it has neither hash_ids (mooncake), messages or "
        "prompt (openai) nor conversations (sharegpt); --format says which it is meant to be"
    )


def read_trace(
    path: str | Path,
    format: str | None = None,
    tokenizer_name: str | Path | None = None,
    limit: int | None = None,
    progress: Callable[[], Any] | None = None,
) -> Trace:
    """A trace file. format: one of mooncake, openai, sharegpt; None: by its first record.

    limit: how many requests to read at most. progress: called once for each.
    Raises ValueError with the place and what is wrong there.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    format = format or detect(path)
    if format == "workload":
        raise ValueError(f"{path} is a workload or a recording, not a trace")
    if format is None:
        return Trace(path.stem, "empty")
    text = None if format == "mooncake" else tokenizer(tokenizer_name)
    requests: list[TraceRequest] = []
    left_out: list[str] = []
    for request in _requests(path, format, text, left_out):
        requests.append(request)
        if progress:
            progress()
        if limit is not None and len(requests) >= limit:
            break
    size = BLOCK_TOKENS if format == "mooncake" else 1
    if left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        warnings.warn(f"left out: {path}, {left_out[0]}{more}", TextWarning, stacklevel=2)
    return Trace(path.stem, format, tuple(_from_the_first(requests)), size, text, tuple(left_out))


def _requests(path: Path, format: str, text: Tokenizer | None, left_out: list[str]) -> Iterator[TraceRequest]:
    known: dict[int, int] = {}
    for where, record in records(path):
        try:
            if isinstance(record, InvalidTextError):
                raise record
            if not isinstance(record, dict):
                raise ValueError(f"an object was expected, not {type(record).__name__}")
            if text is None:
                yield _mooncake(record, where, known)
            elif format == "sharegpt":
                yield from _sharegpt(record, where, text)
            else:
                yield from _openai(record, where, text)
        except InvalidTextError as error:
            if text is None:  # a format without texts: the file is not what it seems
                raise ValueError(f"{path}, {where}: {error}") from error
            left_out.append(f"{where}: {error}")
        except ValueError as error:
            raise ValueError(f"{path}, {where}: {error}") from error


def _from_the_first(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Arrivals counted from the earliest, whatever clock the file has."""
    arrivals = [request.arrival for request in requests if request.arrival is not None]
    origin = min(arrivals, default=0.0)
    for request in requests:
        late = None if request.arrival is None else request.arrival - origin
        yield replace(request, arrival=late)


# ---------------------------------------------------------------------- mooncake


def _mooncake(record: dict[str, Any], where: Where, known: dict[int, int]) -> TraceRequest:
    """known: hash id -> key unit. Other traces of this format use ids wider than a key unit is."""
    arrival = record.get("timestamp")
    if not _is_number(arrival):
        raise ValueError(f"timestamp must be a number of milliseconds, 0 or more, not {said(arrival)}")
    tokens, output = _whole(record, "input_length", 1), _whole(record, "output_length", 0)
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids must be a list, not {said(ids)}")
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise ValueError(f"hash_ids must be whole numbers, 0 or more, not {said(each)}")
    blocks = -(-tokens // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise ValueError(
            f"input_length {tokens} is {blocks} blocks of {BLOCK_TOKENS}, but there are {len(ids)} hash_ids"
        )
    units = np.array([known.setdefault(each, len(known)) for each in ids], dtype=np.int64)
    return TraceRequest(units, tokens, None, -(-output // BLOCK_TOKENS), float(arrival), where=where)


def _whole(record: dict[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, not {said(value)}")
    if value > MAX_TOKEN:
        raise ValueError(f"{name} must be at most {MAX_TOKEN}, not {said(value)}")
    return value


# ---------------------------------------------------------------------- OpenAI-style logs


def _openai(record: dict[str, Any], where: Where, text: Tokenizer) -> Iterator[TraceRequest]:
    outer = record
    body = _unwrapped(record)
    prompts = _prompts(body, text)
    output = _reply(outer, text) if len(prompts) == 1 else None
    length = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_OUTPUT
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_TOKEN:
        raise ValueError(f"max_tokens must be a whole number, not {said(length)}")
    for ids in prompts:
        yield TraceRequest(
            np.array(ids, dtype=np.int64), len(ids), output, length if output is None else len(output),
            _arrival(outer, body), _name(outer, "session"), _name(body, "model"), where,
        )  # fmt: skip


def _name(record: dict[str, Any], field: str) -> str | None:
    return None if record.get(field) is None else valid_text(str(record[field]), field)


def _unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """The request itself, out of "request" (a log with the reply beside it) and "body" (a batch file)."""
    for name in ("request", "body"):
        if name in record:
            inner = record[name]
            if isinstance(inner, str):
                try:
                    inner = json.loads(inner)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{name} is a text that is no JSON: {error}") from error
            if not isinstance(inner, dict):
                raise ValueError(f"{name} must be an object, not {type(inner).__name__}")
            record = inner
    return record


def _prompts(body: dict[str, Any], text: Tokenizer) -> list[list[int]]:
    """Token ids of each prompt: a completion request may bring several."""
    if "messages" in body:
        return [text.encode(_chat_text(body["messages"], body.get("tools")))]
    if "prompt" not in body:
        raise ValueError(f"neither messages nor prompt (there is {', '.join(map(repr, body)) or 'nothing'})")
    prompt = body["prompt"]
    many = prompt if isinstance(prompt, list) and not all(_is_id(each) for each in prompt) else [prompt]
    found = []
    for each in many:
        if isinstance(each, str):
            each = text.encode(each)
        elif not isinstance(each, list) or not all(_is_id(token) for token in each):
            raise ValueError(f"prompt must be a text, token ids or a list of such, not {str(each)[:60]!r}")
        if not each:
            raise ValueError("the prompt is empty")
        found.append(each)
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN


def prompt_text(record: Any) -> str:
    """The prompt of one logged request as text (its messages as ChatML). ValueError says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"an object was expected, not {type(record).__name__}")
    body = _unwrapped(record)
    if "messages" in body:
        return _chat_text(body["messages"], body.get("tools"))
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"neither messages nor a prompt that is a text: {str(body)[:60]!r}")
    return prompt


def _chat_text(messages: Any, tools: Any = None) -> str:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list with at least one, not {messages!r}")
    said = []
    if tools:  # what templates do: the tools' descriptions come first
        said.append(corpus.message("system", json.dumps(tools, ensure_ascii=False)))
    for number, each in enumerate(messages, start=1):
        if not isinstance(each, dict) or not isinstance(each.get("role"), str):
            raise ValueError(f"message {number} has no role: {str(each)[:60]!r}")
        said.append(corpus.message(each["role"], _content(each, number)))
    return corpus.chat_text(said, add_generation_prompt=True)


def _content(message: dict[str, Any], number: int) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and calls:
        return json.dumps(calls, ensure_ascii=False)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        # What is no text (a picture) stands for itself by its data: equal data is equal KV.
        return "".join(
            str(part["text"]) if "text" in part else json.dumps(part, ensure_ascii=False) for part in content
        )
    raise ValueError(f"message {number} has no content: {str(message)[:60]!r}")


def _reply(record: dict[str, Any], text: Tokenizer) -> tuple[int, ...] | None:
    """The first choice of a response beside the request, as token ids."""
    response = record.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    message = choices[0].get("message")
    said = message.get("content") if isinstance(message, dict) else choices[0].get("text")
    return tuple(text.encode(said)) if isinstance(said, str) else None


def _arrival(record: dict[str, Any], body: dict[str, Any]) -> float | None:
    """Milliseconds. Numbers are seconds, or milliseconds where seconds would lie beyond the year 5000."""
    for name in ("timestamp", "created_at", "created"):
        value = record.get(name, body.get(name))
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp() * 1000
            except ValueError:
                raise ValueError(f"{name} is no date: {value!r}") from None
        if value is not None:
            if not _is_number(value):
                raise ValueError(f"{name} must be a date or a number, 0 or more, not {said(value)}")
            return float(value) if value > 1e11 else value * 1000.0
    return None


def _is_number(value: Any) -> TypeGuard[float]:
    """A time: 0 or more, and not beyond all clocks."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


# ---------------------------------------------------------------------- ShareGPT


def _sharegpt(record: dict[str, Any], where: Where, text: Tokenizer) -> Iterator[TraceRequest]:
    turns = record.get("conversations", record.get("conversation"))
    if not isinstance(turns, list):
        raise ValueError(f"conversations must be a list, not {str(turns)[:60]!r}")
    said: list[dict[str, str]] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} must be an object, not {type(turn).__name__}")
        speaker, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(speaker, str) or not isinstance(value, str):
            raise ValueError(f'turn {number} needs the texts "from" and "value": {str(turn)[:60]!r}')
        role = ROLES.get(speaker, speaker)
        if role == "assistant" and said:
            ids = text.encode(corpus.chat_text(said, add_generation_prompt=True))
            reply = tuple(text.encode(value))
            yield TraceRequest(
                np.array(ids, dtype=np.int64), len(ids), reply, len(reply), None, where, where=where
            )
        said.append(corpus.message(role, value))
