"""One request of a log, whatever wrote the log: its prompt in named parts, and all that is known beside it.

Does not read files (reader.py does) and does not tokenise (tokens.py does).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

OPENING = "opening"  # the part that asks for the reply; all others are what was said before


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt, as the model read it: role markers included, so parts joined are the prompt.

    name: "tools", "response_format", "system", "message 3 (user)", "prompt", OPENING.
    ids: token ids, where the log has those in place of a text. breakpoint: the client asked for the cache
    to be kept up to its end (Anthropic's cache_control).
    """

    name: str
    text: str = ""
    ids: tuple[int, ...] | None = None
    breakpoint: bool = False


def common_parts(before: Sequence[Part], now: Sequence[Part]) -> int:
    """How many parts two prompts begin with alike: in text and ids, whatever they are called."""
    if before == now[: len(before)]:  # nearly always, and mostly the very same objects
        return len(before)
    common = 0
    for one, other in zip(before, now, strict=False):
        if one is not other and (one.text != other.text or one.ids != other.ids):
            break
        common += 1
    return common


class Usage(NamedTuple):
    """What the provider said of a prompt, in its tokens. cached: found; written: put into its cache."""

    prompt: int
    cached: int | None = None
    written: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request.

    file, line: where it stands (in a transcript: its reply's first line). where: "line 7", or "entry 7" of
    a list. kind: one of reader.KINDS. parts: its prompt; () where only `blocks` are known. reply: its
    text, tool calls included; None if unknown. time: milliseconds since 1970, or of the trace's own clock.
    session: requests of one conversation. namespace: what must be equal for KV to be shared, as
    (name, value): "model", "adapter", "cache_salt", "extra_key". not_understood: what in its lines is
    neither part of the prompt nor known to be none, by name ("body.colour"). incomplete: why the prompt is
    known to be longer or other than its parts say, a sentence; "" if nothing says so.
    blocks, tokens: hash ids and length of a trace without texts. reply_tokens: the reply's length, or the
    most that was asked for, where only that is known.
    """

    file: str
    line: int
    where: str
    kind: str
    parts: tuple[Part, ...] = ()
    reply: str | None = None
    time: float | None = None
    session: str | None = None
    namespace: tuple[tuple[str, str], ...] = ()
    id: str | None = None
    not_understood: tuple[str, ...] = ()
    incomplete: str = ""
    usage: Usage | None = None
    reply_tokens: int | None = None
    blocks: tuple[int, ...] | None = None
    tokens: int | None = None

    @property
    def text(self) -> str:
        """The whole prompt; parts given as ids are left out."""
        return "".join(part.text for part in self.parts)

    @property
    def extra_key(self) -> str | None:
        """The namespace as one text: the model's name alone where nothing else is known, None for none."""
        if not self.namespace:
            return None
        if len(self.namespace) == 1 and self.namespace[0][0] == "model":
            return self.namespace[0][1]
        return json.dumps(dict(self.namespace), ensure_ascii=False)


class LeftOut(NamedTuple):
    """A record that became no request, and why."""

    line: int
    where: str
    why: str
