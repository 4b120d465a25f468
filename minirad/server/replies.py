"""What the engine says becomes JSON in OpenAI's shapes: replies, chunks of a stream, log-probabilities.

`Writer` is told of one request's pieces in their order: `chunks` for those of a stream, `take` and at the end
`whole` for others.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from minirad.outputs import GenerationOutput
from minirad.server.likeliest import Top
from minirad.server.protocol import Chat, Completion
from minirad.server.service import Piece, Spec

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class TokenWords:
    """What single tokens say. texts: a text.TokenTexts."""

    def __init__(self, texts: Any) -> None:
        self._texts = texts
        self._special = {token: name for name, token in texts.special.items()}

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; those of its name, for a special one."""
        if token in self._special:
            return str(self._special[token]).encode()
        if self._texts.kind == "bytes":
            return bytes(self._texts.bytes_of(token))
        piece = self._texts.piece(token)
        return bytes([piece]) if isinstance(piece, int) else str(piece or "").encode()

    def word(self, token: int, prefix: str = "") -> str:
        """A token as text; one that is no text by itself as its escaped bytes behind `prefix`."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class Writer:
    """One request's answer. model: what the server calls it; texts: a tokenizing.Tokenizing."""

    def __init__(self, body: Completion | Chat, spec: Spec, model: str, texts: Any) -> None:
        self.body, self.spec = body, spec
        self.words = TokenWords(texts.texts)
        self._chat = isinstance(body, Chat)
        kind = "chat.completion" if self._chat else "text_completion"
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._whole = {**self._head, "object": kind}
        self._chunk = {**self._head, "object": f"{kind}.chunk" if self._chat else kind}
        if body.include_usage:
            self._chunk["usage"] = None  # of all chunks but the last
        self._logprobs = [
            (_ChatLogprobs if self._chat else _CompletionLogprobs)(self.words) for _ in range(spec.samples)
        ]
        self._begun: set[int] = set()
        self._outputs: dict[int, GenerationOutput] = {}
        self._prompt_texts = self._echoed(texts) if isinstance(body, Completion) and body.echo else []

    def _echoed(self, texts: Any) -> list[str]:
        """The text of each sample's prompt."""
        found: list[str] = []
        for prompt, params, said in zip(self.spec.prompts, self.spec.params, self._asked(), strict=True):
            text = said if isinstance(said, str) else texts.texts.whole(prompt.tolist())
            found += [text] * params.n
        return found

    def _asked(self) -> Sequence[Any]:
        return self.body.prompt if isinstance(self.body, Completion) else ()

    # ------------------------------------------------------------ streams

    def chunks(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        """The chunks of a stream that some pieces make."""
        for piece in pieces:
            before = self._first(piece) if piece.index not in self._begun else None
            logprobs = self._said(piece) if piece.token is not None else None
            if self._chat:
                yield from self._chat_chunks(piece, before is not None, logprobs)
            else:
                yield from self._completion_chunks(piece, before or "", logprobs)
            if piece.output is not None:
                self._outputs[piece.index] = piece.output

    def _first(self, piece: Piece) -> str:
        """A sample begins: the text before it, where that is echoed."""
        self._begun.add(piece.index)
        return self._prompt_texts[piece.index] if self._prompt_texts else ""

    def _said(self, piece: Piece) -> Any:
        """The log-probabilities of a piece's token; None where nobody asked."""
        assert piece.token is not None
        return self._logprobs[piece.index].of(piece.token, piece.logprob, piece.top) if self._asks else None

    @property
    def _asks(self) -> bool:
        return self.spec.tops is not None

    def _chat_chunks(self, piece: Piece, first: bool, logprobs: Any) -> Iterator[Json]:
        if first:
            yield self._choice(piece.index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})
        if piece.text or logprobs is not None:
            yield self._choice(piece.index, {"delta": {"content": piece.text}, "logprobs": logprobs})
        if piece.output is not None:
            yield self._choice(piece.index, {"delta": {}, "logprobs": None}, piece.output.finish_reason)

    def _completion_chunks(self, piece: Piece, before: str, logprobs: Any) -> Iterator[Json]:
        reason = piece.output.finish_reason if piece.output is not None else None
        if before or piece.text or reason or logprobs is not None:
            yield self._choice(piece.index, {"text": before + piece.text, "logprobs": logprobs}, reason)

    def _choice(self, index: int, more: Json, reason: str | None = None) -> Json:
        return {**self._chunk, "choices": [{"index": index, **more, "finish_reason": reason}]}

    def usage_chunk(self) -> Json:
        """The last chunk of a stream, for who asked for the usage."""
        return {**self._chunk, "choices": [], "usage": self.usage()}

    # ------------------------------------------------------------ whole replies

    def take(self, pieces: Iterable[Piece]) -> None:
        """Goes on with what is new of an answer that is sent whole."""
        for piece in pieces:
            if piece.output is None and piece.token is None:
                continue
            if self._asks:
                self._note(piece)
            if piece.output is not None:
                self._outputs[piece.index] = piece.output

    def _note(self, piece: Piece) -> None:
        logprobs = self._logprobs[piece.index]
        if piece.token is not None:
            logprobs.add(piece.token, piece.logprob, piece.top)
        if piece.output is not None and self._prompt_texts:
            logprobs.before(self.spec.prompts[self._at(piece.index)].tolist(), piece)

    def _at(self, index: int) -> int:
        """Of which prompt a sample is."""
        return index // self.body.n

    def whole(self) -> Json:
        """The answer, when all samples have ended."""
        choices = [self._ended(index, self._outputs[index]) for index in range(self.spec.samples)]
        return {**self._whole, "choices": choices, "usage": self.usage()}

    def _ended(self, index: int, output: GenerationOutput) -> Json:
        logprobs = self._logprobs[index].all() if self._asks else None
        text = (self._prompt_texts[index] if self._prompt_texts else "") + output.text
        choice: Json = {"index": index, "logprobs": logprobs, "finish_reason": output.finish_reason}
        if self._chat:
            return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}
        return {**choice, "text": text}

    def failed(self) -> GenerationOutput | None:
        """A sample that did not come to its end."""
        bad = [out for out in self._outputs.values() if out.finish_reason not in ("stop", "length")]
        return bad[0] if bad else None

    def usage(self) -> Json:
        """Tokens of all prompts, and of all replies; each prompt counts once."""
        firsts = [self._outputs[at * self.body.n] for at in range(len(self.spec.prompts))]
        prompt = sum(output.prompt_tokens for output in firsts)
        new = sum(len(output.token_ids) for output in self._outputs.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in firsts)},
        }  # fmt: skip


class _ChatLogprobs:
    """Of one sample of a chat: for each token its bytes, and the likeliest at its place."""

    def __init__(self, words: TokenWords) -> None:
        self._words = words
        self._content: list[Json] = []

    def of(self, token: int, logprob: float, top: Top) -> Json:
        """Of one token, as a chunk has it."""
        likeliest = [self._entry(*pair) for pair in top]
        return {"content": [{**self._entry(token, logprob), "top_logprobs": likeliest}], "refusal": None}

    def add(self, token: int, logprob: float, top: Top) -> None:
        self._content += self.of(token, logprob, top)["content"]

    def before(self, prompt: Sequence[int], piece: Piece) -> None:
        """A chat says nothing of its prompt."""

    def all(self) -> Json:
        return {"content": self._content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        raw = self._words.bytes_of(token)
        return {"token": self._words.word(token), "logprob": logprob, "bytes": list(raw)}


class _CompletionLogprobs:
    """Of one sample of a completion: rows of tokens, log-probabilities and places in the text."""

    def __init__(self, words: TokenWords) -> None:
        self._words = words
        self._rows: list[tuple[int, float | None, Top | None]] = []
        self._places = _Places(words)

    def of(self, token: int, logprob: float, top: Top) -> Json:
        return self._shaped([(token, logprob, top)], self._places)

    def add(self, token: int, logprob: float, top: Top) -> None:
        self._rows.append((token, logprob, top))

    def before(self, prompt: Sequence[int], piece: Piece) -> None:
        """The prompt is echoed: its tokens come first. Nothing is known of the very first one."""
        assert piece.output is not None
        known = piece.output.prompt_logprobs
        rows = [
            (token, known[at], piece.prompt_tops.get(at, ()) if at else None)
            for at, token in enumerate(prompt)
        ]
        self._rows = [*rows, *self._rows]

    def all(self) -> Json:
        return self._shaped(self._rows, _Places(self._words))

    def _shaped(self, rows: Sequence[tuple[int, float | None, Top | None]], places: _Places) -> Json:
        return {
            "tokens": [self._word(token) for token, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [self._likeliest(*row) for row in rows],
            "text_offset": [places.next(token) for token, _, _ in rows],
        }

    def _word(self, token: int) -> str:
        return self._words.word(token, "bytes:")

    def _likeliest(self, token: int, logprob: float | None, top: Top | None) -> Json | None:
        """The likeliest by what they say, and always the one that was taken."""
        if top is None or logprob is None:
            return None
        found = {self._word(each): known for each, known in top}
        found.setdefault(self._word(token), logprob)
        return found


class _Places:
    """At which character of the text each token begins."""

    def __init__(self, words: TokenWords) -> None:
        self._words, self._at = words, 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        at = self._at
        if token not in self._words._special:
            self._at += len(self._utf8.decode(self._words.bytes_of(token)))
        return at
