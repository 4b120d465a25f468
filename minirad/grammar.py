"""Token masks for replies that must match a regular expression, or be JSON of a schema.

The automaton over tokens is llguidance's (the extra `grammar`; MIT, no dependencies of its own, wheels
for Linux, macOS and Windows). It works token by token, so that a pattern costs nothing in advance, however
large the vocabulary; outlines-core compiles the whole index first, and xgrammar depends on triton and
tvm-ffi.

The syntax is that of Rust's `regex` crate, which is Python's without look-around, back-references and
word boundaries. The reply as a whole must match, as in `re.fullmatch`. (Which letters `\\w` takes differs
a little between the two.)
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from minirad.errors import said
from minirad.text import valid_text

Mask = npt.NDArray[np.bool_]
MOST_LOOKED = 1 << 15  # tokens that llguidance cuts while it is asked what is forced: some 50 ms
OLDEST = (1, 9)  # of llguidance: before it, {"type": "array", "minItems": 1000000000} took 100 GB


class GrammarMask:
    """Says which tokens may come next; what `Engine.add_request` takes as `token_mask`.

    Called with the ids generated so far, it returns bool `[vocab]`. An end token is allowed where the
    reply matches as it stands. It may be called for several samples in turn, and again after a
    retraction: it goes back to what the new ids and those of the call before have in common.

    grammar: as llguidance writes it; what: how sentences call it. ValueError for one it does not take.
    trouble: why it gave up while it was used (it became too large), or "".
    forced(output, most): what must come next (speculative/jump.py asks for it).
    ends_reply: an end token ends a reply under this mask, `ignore_eos` or not: nothing can follow a match.
    """

    ends_reply = True

    def __init__(
        self, grammar: str, what: str, tokenizer: Any, eos_ids: Collection[int], vocab: int
    ) -> None:  # fmt: skip
        from llguidance import LLMatcher

        self._what, self._vocab, self.trouble = what, vocab, ""
        self._eos = sorted(eos_ids)
        self._matcher = LLMatcher(_token_table(tokenizer, self._eos[0], vocab), grammar, log_level=0)
        if self._matcher.is_error():
            raise ValueError(f"{what} cannot be used: {_told(self._matcher.get_error())}")
        self._seen: list[int] = []

    def __call__(self, output: list[int]) -> Mask:
        """Bool `[vocab]` of what may follow `output`. ValueError if `output` itself cannot be."""
        self._go_to(output)
        allowed = self._allowed()
        if self._matcher.is_error():  # what it gave is no mask
            self._give_up(f"{self._what} cannot be used")
        return allowed

    def forced(self, output: list[int], most: int) -> list[int]:
        """The tokens that must follow `output`, `most` at most. ValueError if `output` itself cannot be.

        Each is the only one that a call behind those before it would allow. That is asked token by token, as
        calls are: llguidance cuts bytes into tokens with an eye on the token before, and what it says of a
        whole run at once is now and then cut otherwise (an apostrophe and what follows it). End tokens are
        not among them. Each look takes as long as a call, longer the more is forced: a very long run is told
        in parts.
        """
        self._go_to(output)
        found: list[int] = []
        ahead = self._matcher.deep_copy()  # which may become too large: calls find that in time
        looked = 0
        while len(found) < most and looked < MOST_LOOKED:
            following = ahead.compute_ff_tokens()
            if not following or not ahead.consume_tokens(following[:1]):
                break
            found.append(following[0])
            looked += len(following)
        return found

    def _go_to(self, output: list[int]) -> None:
        """The automaton stands behind `output`. ValueError if it cannot, or has given up before."""
        if self.trouble:
            raise ValueError(self.trouble)
        same = 0
        for ours, theirs in zip(self._seen, output, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(self._seen):
            self._matcher.rollback(len(self._seen) - same)
        if output[same:] and not self._matcher.consume_tokens(output[same:]):
            self._give_up(f"{output} cannot begin a match of {self._what}")
        self._seen = list(output)

    def _give_up(self, said: str) -> NoReturn:
        """ValueError with llguidance's reason."""
        self.trouble = f"{said}: {_told(self._matcher.get_error())}"
        raise ValueError(self.trouble)

    def _allowed(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(np.bool_)
        allowed = np.zeros(self._vocab, dtype=np.bool_)
        allowed[: len(known)] = known
        allowed[self._eos] = allowed[self._eos[0]]  # llguidance was told of one end token only
        return allowed


class RegexMask(GrammarMask):
    """Replies that match a regular expression as a whole."""

    def __init__(self, pattern: str, tokenizer: Any, eos_ids: Collection[int], vocab: int) -> None:
        from llguidance import LLMatcher

        self.pattern = pattern
        grammar = LLMatcher.grammar_from_regex(pattern)
        super().__init__(grammar, f"regex {pattern!r}", tokenizer, eos_ids, vocab)


def regex_mask(pattern: str, tokenizer: Any, eos_ids: Collection[int], vocab: int) -> RegexMask:
    """A fresh mask for one request.

    ValueError for a pattern that llguidance does not take or a model without an end token;
    ModuleNotFoundError, saying what to install, without the extra.
    """
    _needed("regex", eos_ids)
    return RegexMask(valid_text(pattern, "the regex"), tokenizer, eos_ids, vocab)


def json_mask(schema: str, tokenizer: Any, eos_ids: Collection[int], vocab: int) -> GrammarMask:
    """The same for a reply that is JSON of this schema (itself JSON), without white space between its parts
    but one space behind commas and colons: a small model would fill its reply with it."""
    _needed("a JSON schema", eos_ids)
    from llguidance import LLMatcher

    text = valid_text(schema, "the schema")
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    except ValueError as error:  # no JSON, or none that is an object
        raise ValueError(f"the JSON schema {said(schema)} cannot be used: {_told(str(error))}") from None
    return GrammarMask(grammar, "the JSON schema", tokenizer, eos_ids, vocab)


def _needed(what: str, eos_ids: Collection[int]) -> None:
    """llguidance is there, not too old, and the model has an end token."""
    check_installed(what)
    if not eos_ids:
        raise ValueError("this model has no end token: a reply that must match could not end")


def check_installed(what: str) -> None:
    """ModuleNotFoundError, saying what to install for `what`, where llguidance is missing or too old."""
    try:
        import llguidance  # noqa: F401

        found = version("llguidance")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs llguidance: pip install 'minirad[grammar]'") from error
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ModuleNotFoundError(
            f"{what} needs a newer llguidance than {found}, which a schema of one line lets fill the memory: "
            "pip install -U 'minirad[grammar]'"
        )


@lru_cache(maxsize=4)
def _token_table(tokenizer: Any, eos: int, vocab: int) -> Any:
    """The vocabulary as llguidance reads it: 20 ms for 1,024 tokens, about a second for 128,000."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab, eos_token=eos)


def _told(error: str) -> str:
    """llguidance's message on one line, without its state and its excerpt of the grammar."""
    return " ".join(error.split("<state>")[0].split(" 1 | start:")[0].split())
