"""Why would it miss? A prompt typed on the page, or a request log that is pasted, at the moment on view.

    ask(page, {"text": "...", "as": "", "g": "step", "i": 12})

The answer is minirad.why's, for each rank of a stream or for our own tree; here is what was typed, and what
of it is shown. A prompt is asked about as if it came then, without a salt. Blocks its thread.

Does not draw and needs no engine: a recording will do.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from minirad import workloads
from minirad.cache.node import MAX_TOKEN
from minirad.logs import LogReader, PromptTokenizer, Tokenized, tokenized
from minirad.logs.reader import UnknownFormatError
from minirad.model.load import load_tokenizer
from minirad.text import encode_prompt
from minirad.why.answer import Answer
from minirad.why.recorded import Recorded
from minirad.why.words import Words
from viz.trace import GRANULARITIES, View, local_folder, units
from viz.view.text import short, visible
from viz.web.page import Children, Page, spelled_path
from viz.web.told import Behind, no_text, sentence, words_for

Json = dict[str, Any]
WAYS = ("", "prompt", "chat", "log", "ids")  # "": by its looks
MOST_REQUESTS = 500  # of a pasted log, the last ones: their names are listed
_SENTENCE, _SHOWN, _NOTES = 1200, 160, 12
_IDS = re.compile(r"[\s,;\[\]]+")


class Typed(NamedTuple):
    """What was asked. way: what it was taken for. names: of a log, its requests; name: the one asked."""

    way: str
    ids: Sequence[int]
    names: tuple[str, ...] = ()
    name: str = ""
    notes: tuple[str, ...] = ()


class _Pasted(io.BytesIO):
    name = "what was pasted"


def ask(page: Page, arguments: Json) -> Json:
    """What a prompt would find. arguments: "text"; "as", one of WAYS; "request": which one of a log, "": its
    last; "from": the request whose prompt the text is; "g", "i": the position. {"wait": a sentence} where the
    moment is not reached yet: ask again. ValueError says what is wrong."""
    typed, space = _typed(page, arguments), 0
    view = page.trace.view(_one_of(arguments, "g", GRANULARITIES, "step"), _index(arguments))
    with page.moments.turn:
        try:
            memory = page.moments.at(view)
        except Behind as behind:
            return {"wait": f"going to this moment: {behind}"}
        found: list[tuple[int | None, Answer]]
        if isinstance(memory, Recorded):
            lora = _adapter(arguments)
            space = memory.space_of(lora)
            found = [(None, memory.why(typed.ids, lora=lora))]
        else:
            found = list(memory.why(typed.ids).items())
    if not found:
        raise ValueError("no rank has been told of yet")
    words = words_for(page.trace.recording.header, page.trace.decode)
    nodes = _Nodes(view, typed.ids, space)
    return {
        "as": typed.way, "requests": list(typed.names[-MOST_REQUESTS:]), "request": typed.name,
        "tokens": len(typed.ids), "notes": [short(note, 300) for note in typed.notes[:_NOTES]],
        "moment": view.title, "g": view.granularity, "i": view.index,
        "answers": [_shown(words, answer, rank, nodes) for rank, answer in found],
    }  # fmt: skip


def _adapter(arguments: Json) -> str:
    """The adapter that is asked about; "" for none."""
    lora = arguments.get("lora", "")
    if not isinstance(lora, str):
        raise ValueError(f"an adapter has a name, not {str(lora)[:40]!r}")
    return lora


def _shown(words: Words, answer: Answer, rank: int | None, nodes: _Nodes) -> Json:
    """What the page draws of an answer."""
    data = words.as_data(answer)
    names = ("cause", "what", "say", "start", "tokens", "other", "before_text", "ours_text", "theirs_text")
    return {
        "rank": rank, "say": short(sentence(words, answer), _SENTENCE),
        **{name: data[name] for name in ("tokens", "cached", "matched", "cause")},
        "losses": [
            {name: _text(loss[name], name) for name in names if name in loss} for loss in data["losses"]
        ],
        "path": nodes.holding(data["matched"]),
    }  # fmt: skip


def _text(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    return f"…{visible(value[-_SHOWN:])}" if name == "before_text" and value else short(value, _SHOWN)


# ---------------------------------------------------------------------- what was typed


def _one_of(arguments: Json, name: str, known: Sequence[str], otherwise: str) -> str:
    value = arguments.get(name, otherwise)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {str(value)[:40]!r}")
    return str(value)


def _index(arguments: Json) -> int:
    value = arguments.get("i", 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"a position is a whole number, not {str(value)[:40]!r}")
    return value


def _typed(page: Page, arguments: Json) -> Typed:
    text = arguments.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("nothing is asked: type a prompt, or paste a request log")
    way = _one_of(arguments, "as", WAYS, "")
    request = str(arguments.get("from") or "")
    if request and page.prompt_text(request) == text:
        return Typed("prompt", page.prompt(request), notes=(f"the prompt of {request}, as it came",))
    way = way or _looks_like(text, local_folder(page.tokenizer) is not None)
    if way == "ids":
        return Typed(way, _ids(text))
    tokenizer = _tokenizer(page.tokenizer)
    if way == "log":
        return _logged(text, tokenizer, str(arguments.get("request") or ""))
    if tokenizer is None:
        raise ValueError(no_text(page.tokenizer, page.theirs))
    text = workloads.chat_prompt(text) if way == "chat" else text
    ids = tokenizer.encode(text) if page.theirs else encode_prompt(_engines(page.tokenizer), text)
    if not ids:
        raise ValueError("this text has no tokens")
    return Typed(way, ids)


@lru_cache(maxsize=4)
def _tokenizer(source: str | None) -> PromptTokenizer | None:
    return None if local_folder(source) is None else PromptTokenizer(source)


@lru_cache(maxsize=4)
def _engines(source: str | None) -> Any:
    """The tokenizer as an engine of ours has it, which may begin prompts with a token of its own."""
    return load_tokenizer(local_folder(source) or "")


def _looks_like(text: str, readable: bool) -> str:
    start = text.lstrip()
    if start.startswith(("{", "[{", "[\n")):
        return "log"
    return "prompt" if readable or not re.fullmatch(r"[\d\s,;\[\]]+", start) else "ids"


def _ids(text: str) -> list[int]:
    ids = []
    for word in filter(None, _IDS.split(text)):
        if not (word.isascii() and word.isdigit() and len(word) < 12 and int(word) <= MAX_TOKEN):
            raise ValueError(f"token ids are whole numbers from 0 to {MAX_TOKEN}, not {word[:40]!r}")
        ids.append(int(word))
    if not ids:
        raise ValueError("no token id is typed")
    return ids


def _logged(text: str, tokenizer: PromptTokenizer | None, wanted: str) -> Typed:
    """A pasted log's last request, or the one that is wanted."""
    reader = LogReader(_Pasted(text.encode("utf-8", "replace")))
    found: dict[str, Tokenized] = {}
    try:
        for each in _requests(reader, tokenizer):
            found[each.request.where] = each
    except UnknownFormatError as error:
        raise ValueError(str(error).partition("; --format")[0]) from error
    notes = list(reader.summary(_NOTES))
    if not found:
        raise ValueError(f"no request is in it: {notes[0] if notes else 'nothing was read'}")
    name = wanted if wanted in found else list(found)[-1]
    asked = found[name]
    if not len(asked.ids):
        raise ValueError(f"the prompt of {name} is empty")
    salts = [f"{key} {value!r}" for key, value in asked.request.namespace if key != "model"]
    if salts:
        notes.append(f"asked as without {' and '.join(salts)}: what a server makes of it is not known here")
    if asked.request.incomplete:
        notes.append(asked.request.incomplete)
    if len(found) > MOST_REQUESTS:
        notes.append(f"the last {MOST_REQUESTS} of {len(found):,} requests are listed")
    return Typed("log", asked.ids.tolist(), tuple(found), name, tuple(notes))


def _requests(reader: LogReader, tokenizer: PromptTokenizer | None) -> Any:
    for request in reader:
        if request.blocks is not None:
            raise ValueError(f"{request.where} holds hashes of blocks: which tokens they are is not known")
        if tokenizer is None and any(part.ids is None for part in request.parts):
            raise ValueError(f"{request.where} is text, and there is no tokenizer: token ids only")
        yield from tokenized([request], tokenizer or PromptTokenizer())


# ---------------------------------------------------------------------- where it lies in the tree


class _Nodes:
    """The nodes of a view along a prompt."""

    def __init__(self, view: View, ids: Sequence[int], space: int) -> None:
        self._nodes = view.nodes
        tokens, children = tuple(map(int, ids)), Children(view)
        self._path = spelled_path(children, tokens, space)
        at = sum(units(self._nodes[number]) for number in self._path)
        parent = self._path[-1] if self._path else 0
        for node in children.beginning(parent, space, tokens[at : at + children.page]):  # found in part
            self._path = [*self._path, node["id"]]
            break

    def holding(self, tokens: int) -> list[int]:
        """Those that hold the first so many tokens."""
        path, at = [], 0
        for number in self._path:
            if at >= tokens:
                break
            path.append(number)
            at += units(self._nodes[number])
        return path
