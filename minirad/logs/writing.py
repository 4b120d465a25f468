"""How a prompt is written: messages as ChatML, whatever the model; what is no text as JSON.

For sharing it matters what comes first and what is equal, not how a role is spelled. Every message is a part
that begins with a role marker, which is one token of its own: so a part's tokens depend on no other part.

* tools, response_format: `json.dumps` as they stand, keys in the order given, as a system message each,
  before all messages (tools first). `cache_control` is no text and is left out; it marks its part as a
  breakpoint.
* calls of tools: their JSON. Results of tools: their text between <tool_result> tags, as raw as it came.
* pictures, files and other long data: their JSON with a digest in the data's place. Equal data is equal KV,
  but how many tokens it takes is not known, and its characters would be far too many.
* thinking: its text between <thinking> tags; signatures and encrypted reasoning are opaque and left out.

What is written as JSON because it is not known is named: see `Odd`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from minirad.errors import said
from minirad.logs.request import OPENING, Part
from minirad.text import valid_text

OPEN, CLOSE = "<|im_start|>", "<|im_end|>\n"
LONG_DATA = 256  # characters: a longer text in a picture's or a file's JSON is data


def names(text: str) -> frozenset[str]:
    """Words as a set."""
    return frozenset(text.split())


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "summary_text": "text",
          "reasoning_text": "text", "refusal": "refusal"}  # fmt: skip
_DATA = names(
    "image image_url input_image document input_file file input_audio audio video video_url audio_url "
    "redacted_thinking container_upload"
)
_CALLS = {"tool_use", "server_tool_use", "mcp_tool_use", "tool_reference"}
_RESULTS = {"tool_result", "mcp_tool_result"}

Odd = list[str]  # names of what is not understood


def dumps(value: Any) -> str:
    """JSON as it is written into prompts. ValueError for what is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply to be written") from None


def message(name: str, role: str, content: str, breakpoint: bool = False) -> Part:
    """A message as a part; an InvalidTextError for what is no valid Unicode."""
    return Part(name, valid_text(f"{OPEN}{role}\n{content}{CLOSE}", name), breakpoint=breakpoint)


def opening(begun: str = "") -> Part:
    """What asks for the reply. begun: how it has to begin (a prefilled reply)."""
    return Part(OPENING, valid_text(f"{OPEN}assistant\n{begun}", OPENING))


def raw(text: str) -> Part:
    """A prompt that is a text."""
    return Part("prompt", valid_text(text, "prompt"))


def definitions(name: str, value: Any) -> Part:
    """Tools or an output format, as a system message."""
    marked = False
    if isinstance(value, list):
        marked = any(isinstance(each, dict) and "cache_control" in each for each in value)
        value = [_without(each, "cache_control") for each in value]
    return message(name, "system", dumps(value), marked)


def mended(text: str, odd: Odd) -> str:
    """A text with U+FFFD for each half of a surrogate pair: a line of a transcript cannot be left out, for
    all that follows stands on it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        odd.append("half of a surrogate pair (read as U+FFFD)")
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _without(value: Any, *keys: str) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if key not in keys}


def known_only(record: dict[str, Any], known: frozenset[str] | set[str], what: str, odd: Odd) -> None:
    """Names the fields of a record that nobody here knows."""
    for name in record:
        if name not in known:
            odd.append(f"{what}{name}"[:80])


# ---------------------------------------------------------------------- content


class Piece(NamedTuple):
    """A block of a content as text. apart: it is no plain text and begins on a line of its own. result: the
    call whose result it is."""

    text: str
    apart: bool = False
    result: str = ""


def content(value: Any, what: str, odd: Odd) -> tuple[str, bool]:
    """A message's content as text, and whether a breakpoint is in it. ValueError if it is none."""
    if isinstance(value, str):
        return value, False
    marked = isinstance(value, list) and any(isinstance(b, dict) and "cache_control" in b for b in value)
    return join(pieces(value, what, odd)), marked


def pieces(value: Any, what: str, odd: Odd) -> list[Piece]:
    """A content's blocks, each as text. ValueError if it is no content."""
    if value is None:
        return []
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, str):
        return [Piece(value)]
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a text or a list of blocks, not {said(value)}")
    return [block(each, what, odd) for each in value]


def join(found: list[Piece]) -> str:
    """Blocks as one text."""
    text: list[str] = []
    for piece in found:
        if piece.apart and text and not text[-1].endswith("\n"):
            text.append("\n")
        if piece.text:
            text.append(piece.text)
    return "".join(text)


def block(value: Any, what: str, odd: Odd) -> Piece:
    """One block of a content as text."""
    if isinstance(value, str):
        return Piece(value)
    if not isinstance(value, dict):
        raise ValueError(f"{what} has a block that is neither a text nor an object: {said(value)}")
    kind = value.get("type", "text" if "text" in value else None)
    kind = kind if isinstance(kind, str) else said(kind)
    if kind in _TEXTS and isinstance(value.get(_TEXTS[kind]), str):
        return Piece(value[_TEXTS[kind]])
    if kind == "thinking" and isinstance(value.get("thinking"), str):
        text = value["thinking"]
        return Piece(f"<thinking>\n{text}\n</thinking>\n" if text else "", apart=bool(text))
    if kind in _RESULTS:
        return tool_result(value, what, odd)
    if kind in _CALLS:
        return Piece(dumps(_without(value, "cache_control", "caller")), apart=True)
    value = _without(value, "cache_control")
    if kind in _DATA and not _is_text_document(value):
        odd.append(f"tokens of a block {kind!r} (a digest stands for its data)")
        return Piece(dumps(digested(value)), apart=True)
    if kind not in _DATA:
        odd.append(f"block {kind!r}"[:80])
    return Piece(dumps(value), apart=True)


def _is_text_document(value: dict[str, Any]) -> bool:
    source = value.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def tool_result(value: dict[str, Any], what: str, odd: Odd, cleared: str | None = None) -> Piece:
    """What a tool gave back, raw, between tags. cleared: what stands in its place."""
    text = content(value.get("content"), what, odd)[0] if cleared is None else cleared
    call = value.get("tool_use_id")
    call = call if isinstance(call, str) else ""
    error = " error" if value.get("is_error") is True else ""
    return Piece(f"<tool_result {call}{error}>\n{text}\n</tool_result>\n", True, call)


def digested(value: Any, depth: int = 0) -> Any:
    """A JSON value with a digest in the place of every text that is data."""
    if isinstance(value, str) and len(value) > LONG_DATA:
        digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return {"sha256": digest, "characters": len(value)}
    if depth > 50:
        return value
    if isinstance(value, dict):
        return {key: digested(each, depth + 1) for key, each in value.items()}
    return [digested(each, depth + 1) for each in value] if isinstance(value, list) else value
