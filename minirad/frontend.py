"""Conversations on top of the engine.

A chat keeps its history as token ids. The reply's ids go into the next prompt as they were sampled;
only what the template puts around them is new text. Decoding a reply and tokenising it again can give
other ids (two ways to spell one text), and then everything after the first difference misses the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from minirad.config import SamplingParams
from minirad.engine import Engine, GenerationOutput, StreamToken

_REPLY = "MINIRAD-REPLY-GOES-HERE"


class ChatSession:
    """One conversation. `tokens` is all of it so far, the last reply included.

    system: the system prompt, or None for none.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = "You are a helpful assistant.",
        extra_key: Hashable = None,
    ) -> None:
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise ValueError(f"the tokenizer of {engine.model_path} has no chat template")
        self.engine = engine
        self.extra_key = extra_key
        self.tokens: list[int] = []
        self._opening = [] if system is None else [{"role": "system", "content": system}]

    def prompt(self, user: str) -> list[int]:
        """The token ids to send for the next turn; changes nothing."""
        turn = {"role": "user", "content": user}
        if not self.tokens:
            return self._encode(self._render([*self._opening, turn]))
        before = [*self._opening, {"role": "user", "content": "."}]
        whole = self._render([*before, {"role": "assistant", "content": _REPLY}, turn])
        following = self._encode(whole.split(_REPLY)[1])
        # The template closes the reply with the token that the model itself ended it with.
        if following[:1] == self.tokens[-1:] and following[0] in self.engine.model.config.eos_ids:
            following = following[1:]
        return self.tokens + following

    def send(self, user: str, params: SamplingParams | None = None) -> GenerationOutput:
        """Sends a turn, waits for the reply and takes both into the history."""
        prompt = self.prompt(user)
        params = replace(params or SamplingParams(), n=1)
        output = self.engine.generate([prompt], params, extra_key=self.extra_key)[0]
        if output.finish_reason in ("stop", "length"):
            self.tokens = prompt + output.token_ids
        return output

    def stream(self, user: str, params: SamplingParams | None = None) -> Iterator[StreamToken]:
        """Like `send`, token by token; a reply that is not read to its end is not remembered."""
        prompt = self.prompt(user)
        params = replace(params or SamplingParams(), n=1)
        reply: list[int] = []
        for token in self.engine.stream(prompt, params, extra_key=self.extra_key):
            reply.append(token.token_id)
            yield token
        self.tokens = prompt + reply

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self.engine.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _encode(self, text: str) -> list[int]:
        tokenizer: Any = self.engine.tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids
