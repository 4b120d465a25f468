"""Text to token ids and back, for programs: through an engine, or through any `encode` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minirad.frontend.chat import CHATML, Template
from minirad.text import valid_text

if TYPE_CHECKING:
    from minirad.engine import Engine


class Texts:
    """What programs need of a tokenizer.

    encode: text -> ids. engine: None where there is no model: chats are then written in ChatML, no token
    ends a reply, and `regex` and `json_schema` mask nothing (a script writes the replies).
    """

    def __init__(self, encode: Callable[[str], Iterable[int]], engine: Engine | None = None) -> None:
        self._encode, self._engine = encode, engine

    def ids(self, text: str, after: Sequence[int] = (), beginning: bool = False) -> list[int]:
        """A text's ids behind those of other texts; InvalidTextError if it is no valid Unicode.

        beginning: plain text at the start of a prompt, where a tokenizer may put a first token.
        """
        valid_text(text, "a program's text")
        if self._engine is None or beginning:
            return [int(token) for token in self._encode(text)]
        ids: list[int] = self._engine.texts.encode(text, after[-1] if after else None)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """With special tokens; ValueError without a tokenizer."""
        if self._engine is None:
            raise ValueError("without a model there is no text to read, only token ids")
        text: str = self._engine.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def template(self) -> Template:
        return CHATML if self._engine is None else Template.of(self._engine.tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return () if self._engine is None else self._engine.eos_ids

    def mask(self, regex: str | None, json_schema: str | None = None) -> Callable[[list[int]], Any] | None:
        """A token mask for one reply that must match, or None; see minirad.grammar for what it raises."""
        if self._engine is None or regex is json_schema is None:
            return None
        from minirad.grammar import json_mask, regex_mask

        engine = self._engine
        make, pattern = (json_mask, json_schema) if regex is None else (regex_mask, regex)
        assert pattern is not None
        return make(pattern, engine.tokenizer, self.eos_ids, engine.model.config.vocab_size)
