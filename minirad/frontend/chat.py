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
from minirad.text import valid_text

if TYPE_CHECKING:  # torch is heavy, and programs are simulated without it
    from minirad.engine import Engine
    from minirad.outputs import GenerationOutput, StreamToken
    from minirad.text import TokenTexts

_SYSTEM, _USER, _REPLY, _NEXT = (f"MINIRAD-{word}-GOES-HERE" for word in ("SYSTEM", "USER", "REPLY", "NEXT"))
_BLANK = " \n "  # put around a marker, to see whether the template takes it away


@dataclass(frozen=True, slots=True)
class Template:
    """The texts between the texts of a chat.

    system, after_system: before the system prompt; between it and the first question (None: this
    template knows no system prompt). first: before the first question of a chat without one.
    reply: between a question and its reply. turn: between a reply and the next question.
    trims: (place, side) where the template takes white space off a text, such as ("turn", "left").
    """

    system: str | None
    after_system: str
    first: str
    reply: str
    turn: str
    trims: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Read off a tokenizer's chat template by rendering a chat of markers.

        ValueError if there is no template, or one that does not say what it is told.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template")
        chat = (("user", _USER), ("assistant", _REPLY), ("user", _NEXT))
        try:
            first, reply = _around(tokenizer, _USER, chat[:1])
            turn = _around(tokenizer, _NEXT, chat)[0].split(_REPLY)[1]
        except Exception as error:  # jinja's, or a template that leaves a text out
            raise ValueError(f"the chat template cannot be used: {error}") from error
        places = {"first": (_USER, chat[:1]), "turn": (_NEXT, chat)}
        system, after = None, ""
        asked = (("system", _SYSTEM), ("user", _USER))
        try:
            system, after = _around(tokenizer, _USER, asked)[0].split(_SYSTEM)
            places.update(system=(_SYSTEM, asked), after_system=(_USER, asked))
        except Exception:  # some templates refuse the role, some leave it out
            pass
        trims = {(name, side) for name, place in places.items() for side in _trimmed(tokenizer, *place)}
        return cls(system, after, first, reply, turn, frozenset(trims))

    def put(self, place: str, text: str) -> str:
        """A user's or system's text behind what stands before it; place: one of this class's fields.

        ValueError for a system prompt that cannot be, and for what is no valid text.
        """
        valid_text(text, "the system prompt" if place == "system" else "the user's message")
        before = getattr(self, place)
        if before is None:
            raise ValueError(f"this model's chat template has no place for a system prompt: {text!r}")
        text = text.lstrip() if (place, "left") in self.trims else text
        text = text.rstrip() if (place, "right") in self.trims else text
        return str(before) + text


def _around(tokenizer: Any, marker: str, chat: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """What a template writes before and behind a marker."""
    said = [{"role": role, "content": text} for role, text in chat]
    text: str = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    before, *behind = text.split(marker)
    if len(behind) != 1:
        raise ValueError(f"it writes a message {len(behind)} times")
    return before, behind[0]


def _trimmed(tokenizer: Any, marker: str, chat: tuple[tuple[str, str], ...]) -> list[str]:
    """On which sides of this text the template takes white space away."""
    blank = tuple((role, text.replace(marker, _BLANK + marker + _BLANK)) for role, text in chat)
    plain, spaced = _around(tokenizer, marker, chat), _around(tokenizer, marker, blank)
    kept = plain[0] + _BLANK == spaced[0], _BLANK + plain[1] == spaced[1]
    return [side for side, is_kept in zip(("left", "right"), kept, strict=True) if not is_kept]


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

    system: the system prompt, or None for none. lora: the adapter that answers, "" for none.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = "You are a helpful assistant.",
        extra_key: Hashable = None,
        lora: str = "",
    ) -> None:
        self.engine = engine
        self.extra_key, self.lora = extra_key, lora
        self.tokens: list[int] = []
        self._template = template = Template.of(engine.tokenizer)
        self._system = "" if system is None else template.put("system", system)
        self._first = "first" if system is None else "after_system"

    def prompt(self, user: str) -> list[int]:
        """The token ids to send for the next turn; changes nothing."""
        template = self._template
        texts: TokenTexts = self.engine.texts
        if not self.tokens:
            return texts.encode(self._system + template.put(self._first, user) + template.reply)
        said = list(self.tokens)
        # The template closes the reply. The model's own end token has no KV yet, so it can make way.
        while said and said[-1] in self.engine.eos_ids:
            said.pop()
        return said + texts.encode(template.put("turn", user) + template.reply, said[-1] if said else None)

    def send(self, user: str, params: SamplingParams | None = None) -> GenerationOutput:
        """Sends a turn, waits for the reply and takes both into the history."""
        prompt = self.prompt(user)
        params = replace(params or SamplingParams(), n=1)
        output = self.engine.generate([prompt], params, extra_key=self.extra_key, lora=self.lora)[0]
        if output.finish_reason in ("stop", "length"):
            self.tokens = prompt + output.token_ids
        return output

    def stream(self, user: str, params: SamplingParams | None = None) -> Iterator[StreamToken]:
        """Like `send`, token by token; a turn is remembered once the end of its reply has been read."""
        prompt = self.prompt(user)
        params = replace(params or SamplingParams(), n=1)
        reply: list[int] = []
        for token in self.engine.stream(prompt, params, extra_key=self.extra_key, lora=self.lora):
            if token.token_id is not None:
                reply.append(token.token_id)
            if token.finish_reason in ("stop", "length"):
                self.tokens = prompt + reply
            yield token
