"""An engine's texts: prompts to ids, replies to text, and where a reply ends.

The tokenizer is loaded when it is first asked for: callers that give token ids need none. What single tokens
say, and how they join, is text.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minirad import errors
from minirad.cache.node import MAX_TOKEN, Slots
from minirad.config import SamplingParams
from minirad.config import token_ids as as_token_ids
from minirad.errors import as_int64
from minirad.parts import Prompt
from minirad.schedule.request import Request
from minirad.text import ReplyText, StreamText, TokenTexts, encode_prompt


class Tokenizing:
    """tokenizer: a ready one; load: how to get one (None: a bare model); eos_ids: the model's end tokens."""

    def __init__(self, tokenizer: Any, load: Callable[[], Any] | None, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._load, self._eos_ids = tokenizer, load, tuple(eos_ids)
        self._texts: TokenTexts | None = None

    @property
    def is_bare(self) -> bool:
        """There is no tokenizer: ids in, ids out."""
        return self._tokenizer is None and self._load is None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; ValueError if there is none."""
        if self._tokenizer is None:
            if self._load is None:
                raise ValueError("this engine has no tokenizer: give token ids, not text")
            self._tokenizer = self._load()
        return self._tokenizer

    @property
    def texts(self) -> TokenTexts:
        """What each token says; nothing, for a bare model."""
        if self._texts is None:
            self._texts = TokenTexts(None if self.is_bare else self.tokenizer)
        return self._texts

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens: the model's, and the tokenizer's own, which a fine-tune may have to itself."""
        known, own = self._eos_ids, self.texts.end_id
        return known if own is None or own in known else (*known, own)

    def encode(self, prompt: Prompt) -> Slots:
        """Text to token ids; ids are passed on."""
        if isinstance(prompt, str):
            prompt = encode_prompt(self.tokenizer, prompt)
        errors.prompt(prompt)
        tokens: Slots = as_int64(prompt, "a prompt").copy()
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text, special tokens left out; ValueError for what are none."""
        ids = as_token_ids("token_ids", token_ids)
        if max(ids, default=0) > MAX_TOKEN:
            raise ValueError(f"token_ids: {errors.said(max(ids))} is out of range 0 to {MAX_TOKEN}")
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    # ------------------------------------------------------------ a request's reply

    def prepare(self, params: SamplingParams) -> None:
        """Loads the tokenizer where replies need it; ValueError for stop texts without one."""
        if params.stop or not self.is_bare:
            self.tokenizer  # noqa: B018  (refused now rather than in the loop)

    def stream(self, stop: Sequence[str]) -> StreamText:
        """One reply's text as pieces that are never taken back."""
        return StreamText(self.texts, stop)

    def has_ended(self, request: Request) -> bool:
        """The reply's last token, or a stop text, ends it."""
        output = request.output
        return bool(output) and (self.is_end(request, output[-1]) or self.has_stopped(request))

    def is_end(self, request: Request, token: int) -> bool:
        """A stop token; or an end token, which only a grammar keeps where end tokens are ignored."""
        if token in request.params.stop_token_ids:
            return True
        if request.params.ignore_eos and not getattr(request.token_mask, "ends_reply", False):
            return False
        return token in self._eos_ids or token == self.texts.end_id

    def has_stopped(self, request: Request) -> bool:
        """A stop text is complete."""
        return bool(request.params.stop) and self._read(request, request.output).found

    def final(self, request: Request) -> str:
        """The text of a reply that has ended; what ended it is no part of it.

        A stop text comes first: it may hold the very token that ends the reply.
        """
        output, stop = request.output, request.params.stop
        if stop and self._read(request, output).found:
            return self._read(request, output).text()
        if output and self.is_end(request, output[-1]):
            output = output[:-1]
        return self.texts.whole(output)

    def _read(self, request: Request, output: Sequence[int]) -> ReplyText:
        if request.reply is None:
            request.reply = ReplyText(self.texts, request.params.stop)
        reply: ReplyText = request.reply
        reply.read(output)
        return reply
