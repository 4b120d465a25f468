"""Token ids to text, one token at a time, and back: what a reply says, where it stops, what may be sent.

    tokenizer -> TokenTexts (what each token says, shared) -> ReplyText (one reply, with its stop texts)

A reply's text is the one that the tokenizer gives for all of its ids, special tokens left out, and it is
never decoded twice: a token is looked up, and its characters join those before it. Three kinds of decoders:

* **bytes** (byte-level BPE): tokens are bytes, what is no UTF-8 becomes U+FFFD.
* **runs** (byte fallback, as in Llama 2): most tokens are text, some are one byte. A run of such bytes is
  read as a whole: if anything in it is no UTF-8, each of its bytes becomes U+FFFD. So what an open run
  says may be searched for stop texts, but is sent only when the run has ended.
* **plain** (anything else): a token says what it adds behind another one. For a decoder that looks at
  several tokens at once the text is what these pieces join to, for `generate` and `stream` alike.

Does not import torch, and does not decide when a request ends: the engine asks.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

UNREADABLE = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RUN_DECODERS = (["Replace", "ByteFallback", "Fuse"], ["ByteFallback", "Fuse"])
_MOST_BYTES = 4  # of one character
_FIRST_MARK = 0xD800  # marks are lone surrogates, which no text holds


class InvalidTextError(ValueError):
    """A text that is no valid Unicode."""


class TextWarning(UserWarning):
    """Something about a text was mended or left out."""


def valid_text(text: Any, what: str) -> str:
    """`text`, if it can be written as UTF-8; else an InvalidTextError that begins with `what`."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a text, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise InvalidTextError(
            f"{what} is no valid text: character {error.start + 1} is half of a surrogate pair, {half!r}"
        ) from None
    return text


def escaped(text: str) -> str:
    """A text from elsewhere on one line, with everything escaped that a terminal might obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def no_length_warning() -> Iterator[None]:
    """Holds back, in this thread, what transformers says of a long text: the engine has its own bounds.

    Not by `verbose=False`: a tokenizer may be any object with an `encode`.
    """
    here = threading.get_ident()

    def other(record: logging.LogRecord) -> bool:
        return record.thread != here or not str(record.msg).startswith("Token indices sequence length")

    log = logging.getLogger("transformers.tokenization_utils_base")
    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Ids of a whole prompt, with the first token (BOS) that the tokenizer puts before it.

    A text that begins with it already gets no second one, and a warning says so.
    """
    with no_length_warning():
        ids: list[int] = tokenizer.encode(valid_text(text, "the prompt"))
    first = getattr(tokenizer, "bos_token_id", None)
    if first is not None and ids[:2] == [first, first] and text.startswith(tokenizer.bos_token):
        warnings.warn(
            f"the prompt begins with {tokenizer.bos_token!r} already: no second one is added",
            TextWarning,
            stacklevel=3,
        )
        return ids[1:]
    return ids


# ---------------------------------------------------------------------- decoders of one reply


class Decoder(Protocol):
    """Turns the tokens of one reply into characters.

    `add`, `mark` and `flush` return how many of the last characters are taken back, and what follows
    then. open: how many of the last characters may still be taken back.
    """

    @property
    def open(self) -> int: ...

    def add(self, token: int) -> tuple[int, str]: ...

    def mark(self, mark: str) -> tuple[int, str]:
        """Puts a mark between two characters; it is no text."""
        ...

    def flush(self) -> tuple[int, str]:
        """What would follow if the reply ended here. Changes nothing."""
        ...


class _Bytes:
    open = 0

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> tuple[int, str]:
        return 0, self._utf8.decode(self._texts.bytes_of(token))

    def mark(self, mark: str) -> tuple[int, str]:
        return 0, mark

    def flush(self) -> tuple[int, str]:
        return 0, self._utf8.getstate()[0].decode("utf-8", "replace")


class _Runs:
    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._strip = texts.strip  # characters at the very beginning that are left out
        self._run: list[int | str] = []  # bytes, and marks between them
        self._broken = False  # the run that is open holds what is no UTF-8
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self.open = 0

    def add(self, token: int) -> tuple[int, str]:
        piece = self._texts.piece(token)
        if piece is None:
            return 0, ""
        if isinstance(piece, int):
            return self._add_byte(piece)
        back, text = self.flush()
        self._run, self._broken, self.open = [], False, 0
        self._utf8.reset()
        return back, self._stripped(text + piece)

    def _add_byte(self, byte: int) -> tuple[int, str]:
        if self._broken:
            return 0, UNREADABLE
        self._run.append(byte)
        try:
            text = self._stripped(self._utf8.decode(bytes([byte])))
        except UnicodeDecodeError:
            back, text = self.open, self._unreadable()
            self._run, self._broken, self.open = [], True, 0
            return back, self._stripped(text)
        self.open += len(text)
        return 0, text

    def mark(self, mark: str) -> tuple[int, str]:
        if self._run:
            self._run.append(mark)
            self.open += len(mark)
        return 0, mark

    def flush(self) -> tuple[int, str]:
        unfinished = bool(self._utf8.getstate()[0]) and not self._broken
        return (self.open, self._unreadable()) if unfinished else (0, "")

    def _unreadable(self) -> str:
        return "".join(each if isinstance(each, str) else UNREADABLE for each in self._run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip[0]:
                self._strip = ""
            else:
                text, self._strip = text[1:], self._strip[1:]
        return text


class _Plain:
    open = 0

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._held: list[int] = []  # of a character that is not complete
        self._begun = False

    def add(self, token: int) -> tuple[int, str]:
        if not self._held and self._begun:
            text = self._texts.text_of(token)
        else:
            text = self._texts.joined([*self._held, token], self._begun)
        if text.endswith(UNREADABLE) and len(self._held) + 1 < _MOST_BYTES:
            self._held.append(token)
            return 0, ""
        self._held, self._begun = [], self._begun or bool(text)
        return 0, text

    def mark(self, mark: str) -> tuple[int, str]:
        return 0, mark

    def flush(self) -> tuple[int, str]:
        return 0, self._texts.joined(self._held, self._begun) if self._held else ""


# ---------------------------------------------------------------------- a tokenizer's tokens


class TokenTexts:
    """What each token of a tokenizer says; every token is looked up once.

    tokenizer: a transformers tokenizer or whatever has its `encode` and `decode`; None: no text at all.
    special: the tokens that are left out of a text, by what they are called. end_id: the one that ends a
    reply, or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        chain = _decoder_chain(tokenizer)
        names = [each["type"] for each in chain]
        strips = [each for each in chain if each["type"] == "Strip"]
        self.kind = "bytes" if names == ["ByteLevel"] else "runs" if "ByteFallback" in names else "plain"
        self.strip = "" if "Metaspace" not in names else " "
        if names[-2:] == ["Fuse", "Strip"]:
            self.strip = strips[-1]["content"] * strips[-1]["start"]
        # The tokenizer's own decoder may then be asked for a whole text: it says the same, and sooner.
        self._exact = self.kind == "bytes" or (
            [name for name in names if name != "Strip"] in _RUN_DECODERS
            and names.count("Strip") == (names[-1] == "Strip")
            and not any(each["stop"] for each in strips)
        )
        self.end_id: int | None = getattr(tokenizer, "eos_token_id", None)
        self.special = _special_tokens(tokenizer)
        self._special_ids = frozenset(self.special.values())
        self._pieces: dict[int, str | int | None] = {}
        self._bytes: dict[int, bytes] = {}

    # ------------------------------------------------------------ whole texts

    def decoder(self) -> Decoder:
        """A fresh one, for one reply."""
        kinds: dict[str, type[Decoder]] = {"bytes": _Bytes, "runs": _Runs, "plain": _Plain}
        return kinds[self.kind](self)  # type: ignore[call-arg]

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all these ids: what `decoder` gives for them one by one."""
        if self._tokenizer is None:
            return ""
        if self._exact:
            return self._decode(ids)
        reply = ReplyText(self)
        reply.read(ids)
        return reply.text()

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Ids of a text that goes on behind the token `after`; no first token (BOS) is put before it.

        Some tokenizers put a space before every text; not where it goes on in the middle of one.
        """
        if after is None or after in self._special_ids or not self._puts_a_space_before:
            return self._encode(text)
        return self._behind("\n", text) or self._behind("-", text) or self._encode(text)

    @cached_property
    def _puts_a_space_before(self) -> bool:
        return self._encode("-") != self._behind("\n", "-")

    def _behind(self, before: str, text: str) -> list[int] | None:
        """The ids of `text` where `before` stands in front of it; None if the two run into one another."""
        first, both = self._encode(before), self._encode(before + text)
        return both[len(first) :] if both[: len(first)] == first else None

    def _encode(self, text: str) -> list[int]:
        with no_length_warning():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    # ------------------------------------------------------------ single tokens

    def bytes_of(self, token: int) -> bytes:
        """Of a byte-level token; empty for one that is left out."""
        found = self._bytes.get(token)
        if found is None:
            name = None if token in self._special_ids else self._tokenizer.convert_ids_to_tokens(int(token))
            found = self._bytes[token] = b"" if name is None else _byte_level(name)
        return found

    def piece(self, token: int) -> str | int | None:
        """What a token says: text, a byte (byte fallback), or None for one that is left out."""
        if token not in self._pieces:
            self._pieces[token] = self._looked_up(token)
        return self._pieces[token]

    def text_of(self, token: int) -> str:
        """What a token adds behind another one ("" for one that is left out)."""
        piece = self.piece(token)
        return piece if isinstance(piece, str) else ""

    def joined(self, ids: Sequence[int], behind: bool) -> str:
        """What some ids say, at the beginning of a text or behind other tokens."""
        if self._tokenizer is None:
            return ""
        before, length = self._context if behind else ([], 0)
        return self._decode([*before, *ids])[length:]

    def _looked_up(self, token: int) -> str | int | None:
        if self._tokenizer is None or token in self._special_ids:
            return None
        if self.kind == "runs":
            name = self._tokenizer.convert_ids_to_tokens(int(token))
            if name is None:
                return None
            byte = _BYTE.fullmatch(name)
            if byte:
                return int(byte[1], 16)
        return self.joined([token], behind=True)

    @cached_property
    def _context(self) -> tuple[list[int], int]:
        """A token to put before others, and the length of its text: at the beginning some say less."""
        for letter in "aeot1.":
            ids = self._encode(letter)[-1:]
            if self._decode(ids).endswith(letter):
                return ids, len(self._decode(ids))
        return [], 0


def _decoder_chain(tokenizer: Any) -> list[dict[str, Any]]:
    """The decoders of a fast tokenizer in their order, as they are written in tokenizer.json."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # one that is written in Python
        return []
    return [state] if state["type"] != "Sequence" else list(state["decoders"])


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is not None:
        return {token.content: int(number) for number, token in added.items() if token.special}
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return dict(zip(names, ids, strict=False))


def _byte_table() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others come from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + at): byte for at, byte in enumerate(others)},
    }


_BYTE_TABLE = _byte_table()


def _byte_level(name: str) -> bytes:
    """A token's bytes; one that was added as it reads holds letters that stand for no byte."""
    try:
        return bytes(_BYTE_TABLE[letter] for letter in name)
    except KeyError:
        return name.encode()


# ---------------------------------------------------------------------- one reply


class _Searched:
    """Characters that grow, and the stop texts looked for in them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.chars: list[str] = []
        self._stops = stops
        self._longest = max(map(len, stops), default=0)

    def change(self, back: int, text: str) -> int | None:
        """Takes characters back, adds others; where a stop text begins that is complete now."""
        if back:
            del self.chars[-back:]
        start = max(0, len(self.chars) - self._longest + 1)
        self.chars += text
        if not self._stops or not text:
            return None
        tail = "".join(self.chars[start:])
        found = [at for stop in self._stops if (at := tail.find(stop)) >= 0]
        return start + min(found) if found else None

    def free(self, end: int) -> int:
        """How many of the first `end` characters cannot be part of a stop text that is not complete yet."""
        tail = "".join(self.chars[max(0, end - self._longest + 1) : end])
        for at in range(len(tail)):
            if any(stop.startswith(tail[at:]) for stop in self._stops):
                return end - len(tail) + at
        return end


class ReplyText:
    """The text of one reply while it grows: tokens are added one at a time, each once.

    stop: texts that end it. One that names a special token is found where that token is; the others are
    looked for in the text, from which special tokens are left out. Of several the earliest counts.
    """

    def __init__(self, texts: TokenTexts, stop: Sequence[str] = ()) -> None:
        self._texts = texts
        self._decoder = texts.decoder()
        self._said = _Searched(stop)
        self._marks, marked = _marked(stop, texts.special)
        self._marked = _Searched(marked) if marked else None  # the same text with marks in it
        self._cut: int | None = None
        self.count = 0  # tokens read

    @property
    def found(self) -> bool:
        """A stop text has been read; nothing more is read then."""
        return self._cut is not None

    def read(self, ids: Sequence[int]) -> None:
        """Goes on to the end of a reply's ids, or to the first stop text."""
        while self.count < len(ids) and not self.found:
            self.add(ids[self.count])

    def add(self, token: int) -> None:
        """Takes the next token on."""
        self.count += 1
        mark = self._marks.get(token)
        back, text = self._decoder.add(token) if mark is None else self._decoder.mark(mark)
        cuts = []
        if self._marked is None:
            cuts.append(self._said.change(back, text))
        else:
            gone = self._without_marks(self._marked.chars[len(self._marked.chars) - back :])
            cuts.append(self._said.change(len(gone), "".join(self._without_marks(text))))
            at = self._marked.change(back, text)
            cuts.append(None if at is None else self._place(at))
        self._cut = min((cut for cut in cuts if cut is not None), default=None)

    @property
    def ready(self) -> int:
        """How many characters can be sent: whatever comes, the text will begin with them."""
        if self._cut is not None:
            return self._cut
        whole, closed = len(self._said.chars), len(self._said.chars) - self._open
        ready = min(self._said.free(whole), self._said.free(closed))
        if self._marked is not None:
            ready = min(ready, self._place(self._marked.free(len(self._marked.chars))))
        return ready

    def slice(self, start: int, stop: int) -> str:
        """Some of the characters."""
        return "".join(self._said.chars[start:stop])

    def text(self) -> str:
        """All of it, as if it ended here: up to the stop text, or with what is not complete."""
        back, rest = self._decoder.flush()
        kept = len(self._said.chars) - (self._open if back else 0)
        whole = self.slice(0, kept) + "".join(self._without_marks(rest))
        return whole[: self._cut]

    @property
    def _open(self) -> int:
        """Characters that the decoder may take back, marks not counted."""
        count = self._decoder.open
        if self._marked is None or not count:
            return count
        return len(self._without_marks(self._marked.chars[-count:]))

    def _without_marks(self, chars: Iterable[str]) -> list[str]:
        marks = self._marks.values()
        return [char for char in chars if char not in marks]

    def _place(self, at: int) -> int:
        """A place among the marked characters as one in the text."""
        assert self._marked is not None
        return len(self._said.chars) - len(self._without_marks(self._marked.chars[at:]))


def _marked(stop: Sequence[str], special: dict[str, int]) -> tuple[dict[int, str], list[str]]:
    """A mark for each special token that the stop texts name, by id; and those texts with marks in them."""
    named = [name for name in special if name and any(name in text for text in stop)]
    if not named:
        return {}, []
    marks = {name: chr(_FIRST_MARK + at) for at, name in enumerate(named)}
    either = re.compile("|".join(map(re.escape, sorted(named, key=len, reverse=True))))
    texts = [either.sub(lambda name: marks[name[0]], text) for text in stop if either.search(text)]
    return {special[name]: mark for name, mark in marks.items()}, texts


class StreamText:
    """A reply's text as pieces that never have to be taken back and join to the output's text."""

    def __init__(self, texts: TokenTexts, stop: Sequence[str] = ()) -> None:
        self._reply = ReplyText(texts, stop)
        self._sent = 0

    @property
    def count(self) -> int:
        """Tokens added so far."""
        return self._reply.count

    def add(self, token: int) -> str:
        """The piece that a token makes ready."""
        self._reply.add(token)
        piece = self._reply.slice(self._sent, self._reply.ready)
        self._sent += len(piece)
        return piece

    def end(self, text: str) -> str:
        """The last piece, for a reply whose whole text is known."""
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece
