"""Conversations on top of the engine, and what a chat template puts around the texts.

A chat keeps its history as token ids. The reply's ids go into the next prompt as they were sampled;
only what the template puts around them is new text. Decoding a reply and tokenising it again can give
other ids (two ways to spell one text), and then everything after the first difference misses the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minirad.config import SamplingParams

if TYPE_CHECKING:  # torch is heavy, and programs are simulated without it
    from minirad.engine import Engine
    from minirad.outputs import GenerationOutput, StreamToken

_SYSTEM, _USER, _REPLY, _NEXT = (f"MINIRAD-{word}-GOES-HERE" for word in ("SYSTEM", "USER", "REPLY", "NEXT"))


@dataclass(frozen=True, slots=True)
class Template:
    """The texts between the texts of a chat.

    system, after_system: before the system prompt; between it and the first question (None: this
    template knows no system prompt). first: before the first question of a chat without one.
    reply: between a question and its reply. turn: between a reply and the next question.
    """

    system: str | None
    after_system: str
    first: str
    reply: str
    turn: str

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Read off a tokenizer's chat template by rendering a chat of markers.

        ValueError if there is no template.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template")

        def render(*messages: tuple[str, str]) -> str:
            said = [{"role": role, "content": text} for role, text in messages]
            text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            return text

        first, reply = render(("user", _USER)).split(_USER)
        whole = render(("user", _USER), ("assistant", _REPLY), ("user", _NEXT))
        turn = whole.split(_REPLY)[1].split(_NEXT)[0]
        system, after = None, ""
        try:
            opening = render(("system", _SYSTEM), ("user", _USER)).split(_USER)[0]
        except Exception:  # jinja's: some templates refuse the role
            opening = ""
        if _SYSTEM in opening:
            system, after = opening.split(_SYSTEM)
        return cls(system, after, first, reply, turn)

    def opening(self, system: str | None) -> str:
        """All that comes before the first question; ValueError for a system prompt that cannot be."""
        if system is None:
            return self.first
        if self.system is None:
            raise ValueError(f"this model's chat template has no place for a system prompt: {system!r}")
        return self.system + system + self.after_system


CHATML = Template(
    system="<|im_start|>system\n",
    after_system="<|im_end|>\n<|im_start|>user\n",
    first="<|im_start|>user\n",
    reply="<|im_end|>\n<|im_start|>assistant\n",
    turn="<|im_end|>\n<|im_start|>user\n",
)
"""The classroom Llama's template, for where there is no tokenizer to ask."""


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
        self.engine = engine
        self.extra_key = extra_key
        self.tokens: list[int] = []
        self._template = Template.of(engine.tokenizer)
        self._opening = self._template.opening(system)

    def prompt(self, user: str) -> list[int]:
        """The token ids to send for the next turn; changes nothing."""
        template = self._template
        if not self.tokens:
            return self._encode(self._opening + user + template.reply)
        following = self._encode(template.turn + user + template.reply)
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

    def _encode(self, text: str) -> list[int]:
        tokenizer: Any = self.engine.tokenizer
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids
