"""Prompts of a log as token ids: part by part, each text once, many at a time.

Why parts and not prompts: a transcript's every turn repeats all before it. A part begins with a role marker
that is one token of its own, and tokenizers cut a text at such tokens before they do anything else; so the
ids of a prompt are those of its parts, one after another, whatever the tokenizer. One that does not know
the markers learns them (as ids behind its vocabulary). One that would take white space into them, or is no
`tokenizers` one, is given whole prompts instead: `PromptTokenizer.by_parts` is False then.

The turns of a session share one array as long as they only grow. Does not read files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from minirad import errors
from minirad.logs.request import LoggedRequest, Part, common_parts
from minirad.logs.writing import CLOSE, OPEN
from minirad.model.classroom import corpus
from minirad.text import no_length_warning, valid_text

MOST_CACHED = 1 << 25  # characters whose ids are kept
AT_ONCE = 1 << 21  # characters that are tokenised together
MOST_AT_ONCE = 256  # requests that wait for each other
MOST_SESSIONS = 64  # whose last prompt is kept, to go on from

Ids = npt.NDArray[np.int64]
Kept = npt.NDArray[np.int32]  # half as large


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FastTokenizer:
    """A tokenizer.json, read by the `tokenizers` library alone."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust: Any = Rust.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is no tokenizer: {error}") from error
        self._rust.no_truncation()  # a file may say so, and texts would be cut without a word
        self._rust.no_padding()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._rust.encode(valid_text(text, "a text"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._rust.decode([int(each) for each in ids], skip_special_tokens=False)
        return text


class TransformersTokenizer:
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
        path = errors.expanded(name)
        if path.suffix == ".json" and path.is_file():
            return FastTokenizer(path)
        if not (path / "tokenizer.json").is_file():
            from minirad.model.load import resolve_model

            path = resolve_model(name)
    file = path / "tokenizer.json"
    return FastTokenizer(file) if file.is_file() else TransformersTokenizer(path)


class Tokenized(NamedTuple):
    """A request with its prompt's ids, int64 [n], read-only; and ends, int64 [parts]: where each part ends.

    Of a trace of blocks: ids are the blocks, and there are no parts.
    """

    request: LoggedRequest
    ids: Ids
    ends: Ids

    def part_at(self, position: int) -> tuple[Part, int]:
        """The part that a token lies in, and which of its tokens it is. IndexError outside the prompt."""
        if not 0 <= position < len(self.ids) or not len(self.ends):
            raise IndexError(f"token {position} of {len(self.ids)} lies in no part")
        number = int(np.searchsorted(self.ends, position, side="right"))
        return self.request.parts[number], position - (int(self.ends[number - 1]) if number else 0)


class PromptTokenizer:
    """A tokenizer for parts of prompts, with a cache by text of MOST_CACHED characters.

    by_parts: whether a prompt's ids are those of its parts.
    """

    def __init__(self, name: str | Path | None = None) -> None:
        self._text = tokenizer(name)
        self._rust = self._text._rust if isinstance(self._text, FastTokenizer) else None
        self.by_parts = self._rust is not None and _knows_markers(self._rust)
        self._ids: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def encode(self, text: str) -> list[int]:
        """Ids of a whole text, not kept."""
        return self._text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids)

    def ids(self, text: str) -> Kept:
        """Ids of a text, int32, read-only, kept."""
        found = self._ids.get(text)
        if found is None:
            self.prepare([text])
            return self._ids[text]
        self._ids.move_to_end(text)
        return found

    def prepare(self, texts: Iterable[str]) -> None:
        """Tokenises all texts that are not there yet: together, on all cores that the library takes
        (RAYON_NUM_THREADS, TOKENIZERS_PARALLELISM)."""
        new = [text for text in dict.fromkeys(texts) if text not in self._ids]
        if self._rust is not None:
            valid = [valid_text(text, "a text") for text in new]
            found = [each.ids for each in self._rust.encode_batch_fast(valid, add_special_tokens=False)]
        else:
            found = [self._text.encode(text) for text in new]
        for text, row in zip(new, found, strict=True):
            self._ids[text] = kept = np.array(row, dtype=np.int32)
            kept.flags.writeable = False
            self._size += len(text)
        while self._size > MOST_CACHED and len(self._ids) > len(new) + 1:
            self._size -= len(self._ids.popitem(last=False)[0])

    def __contains__(self, text: str) -> bool:
        return text in self._ids


def _knows_markers(rust: Any) -> bool:
    """Makes the markers tokens of their own; False if they would take what is beside them into them."""
    from tokenizers import AddedToken

    there = {token.content: token for token in rust.get_added_tokens_decoder().values()}
    markers = [marker for marker in (OPEN, CLOSE.strip()) if marker not in there]
    rust.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in markers])
    begins = there.get(OPEN)
    return begins is None or not (begins.lstrip or begins.single_word or begins.normalized)


def _fixed(ids: Ids) -> Ids:
    ids.flags.writeable = False
    return ids


# ---------------------------------------------------------------------- a log


def tokenized(requests: Iterable[LoggedRequest], text: PromptTokenizer | None) -> Iterator[Tokenized]:
    """Every request with its ids, in order. Reads ahead as far as AT_ONCE characters are new.

    text: None for a trace of blocks, which has no texts.
    """
    if text is None:
        yield from map(_of_blocks, requests)
        return
    prompts = _Prompts(text)
    waiting: list[LoggedRequest] = []
    new: dict[str, None] = {}
    size = 0
    for request in requests:
        waiting.append(request)
        for each in prompts.texts(request):
            if each not in new and each not in text:
                new[each] = None
                size += len(each)
        if size >= AT_ONCE or len(waiting) >= MOST_AT_ONCE:
            text.prepare(new)
            yield from map(prompts.of, waiting)
            waiting, new, size = [], {}, 0
    text.prepare(new)
    yield from map(prompts.of, waiting)


@dataclass(slots=True)
class _Last:
    """The last prompt of a session: its parts, and the array that the next one may go on in. used: how far
    the array is shown, by this prompt or one before."""

    parts: tuple[Part, ...]
    ends: Ids
    room: Ids
    used: int


class _Prompts:
    """Puts prompts together out of parts, each session's turns in one array as long as they only grow."""

    def __init__(self, text: PromptTokenizer) -> None:
        self._text = text
        self._last: OrderedDict[tuple[str, str], _Last] = OrderedDict()
        self._looked: dict[tuple[str, str], tuple[Part, ...]] = {}

    def texts(self, request: LoggedRequest) -> list[str]:
        """Texts that have to be tokenised for a request, those of the turn before it left out."""
        if not self._text.by_parts:
            return [request.text] if all(part.ids is None for part in request.parts) else []
        common = 0
        if request.session is not None:
            key = (request.file, request.session)
            common = common_parts(self._looked.get(key, ()), request.parts)
            self._looked[key] = request.parts
            if len(self._looked) > MOST_SESSIONS:
                del self._looked[next(iter(self._looked))]
        return [part.text for part in request.parts[common:] if part.ids is None]

    def of(self, request: LoggedRequest) -> Tokenized:
        """A request with its ids."""
        if request.blocks is not None:
            return _of_blocks(request)
        if not self._text.by_parts:
            return self._whole(request)
        key = (request.file, request.session) if request.session is not None else None
        last = self._last.get(key) if key is not None else None
        common = common_parts(last.parts, request.parts) if last else 0
        rows = [self._row(part, number) for number, part in enumerate(request.parts[common:], start=common)]
        begun = int(last.ends[common - 1]) if last and common else 0
        ends = np.cumsum([begun, *map(len, rows)], dtype=np.int64)[1:]
        if last and common:
            ends = np.concatenate((last.ends[:common], ends))
        size = int(ends[-1]) if len(ends) else 0
        room = self._room(last, begun, rows, size, grows=key is not None)
        if key is not None:
            used = max(last.used, size) if last and room is last.room else size
            self._last[key] = _Last(request.parts, ends, room, used)
            self._last.move_to_end(key)
            if len(self._last) > MOST_SESSIONS:
                self._last.popitem(last=False)
        return Tokenized(request, _fixed(room[:size]), _fixed(ends))

    def _row(self, part: Part, number: int) -> Kept:
        if part.ids is not None:
            return np.array(part.ids, dtype=np.int32)
        if number and not part.text.startswith(OPEN):
            raise ValueError(f"part {number + 1} ({part.name}) does not begin with a role marker")
        return self._text.ids(part.text)

    def _room(self, last: _Last | None, begun: int, rows: list[Kept], size: int, grows: bool) -> Ids:
        """An array with the prompt at its beginning: the last one's, if nothing that it shows changes."""
        tail = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        if last is not None and size <= len(last.room):
            shown = min(last.used, size) - begun
            if np.array_equal(last.room[begun : begun + shown], tail[:shown]):
                last.room[last.used : size] = tail[shown:]
                return last.room
        room = np.empty(size * 3 // 2 + 64 if grows else size, dtype=np.int64)
        if last is not None:
            room[:begun] = last.room[:begun]
        room[begun:size] = tail
        return room

    def _whole(self, request: LoggedRequest) -> Tokenized:
        parts = request.parts
        if any(part.ids is not None for part in parts):
            rows = [self._text.ids(part.text) if part.ids is None else np.array(part.ids) for part in parts]
            ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
            return Tokenized(request, _fixed(np.concatenate(rows).astype(np.int64)), _fixed(ends))
        ids = self._text.ids(request.text)
        begun = ["".join(part.text for part in parts[: number + 1]) for number in range(len(parts))]
        ends = np.array([len(self._text.encode(each)) for each in begun[:-1]] + [len(ids)], dtype=np.int64)
        return Tokenized(request, _fixed(ids.astype(np.int64)), _fixed(np.minimum(ends, len(ids))))


def _of_blocks(request: LoggedRequest) -> Tokenized:
    blocks = np.array(request.blocks or (), dtype=np.int64)
    return Tokenized(request, _fixed(blocks), _fixed(np.empty(0, dtype=np.int64)))
