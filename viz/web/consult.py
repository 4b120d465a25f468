"""The prompt doctor on the page: two prompts of a run, or typed ones, as plain data.

What is asked is `minirad.doctor`'s to answer. A request that is picked is diagnosed with the very token ids
that it came with: a reply in its history may be written in other tokens than a tokenizer would choose.

Does not draw and needs no engine: a recording will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from minirad.doctor import diagnose
from minirad.traces import tokenizer
from viz.trace import local_folder
from viz.web.page import Page

Json = dict[str, Any]
LONGEST = 24_000  # characters of a prompt: more would keep the engine waiting


class _Exact:
    """A tokenizer that knows some texts' token ids already."""

    def __init__(self, text: Any, known: Mapping[str, Sequence[int]]) -> None:
        self._text, self._known = text, known

    def encode(self, text: str) -> list[int]:
        ids = self._known.get(text)
        return list(ids) if ids is not None else [int(token) for token in self._text.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._text.decode(list(ids)))


def consult(page: Page, arguments: Json) -> Json:
    """What two prompts share. arguments: "a" and "b" (texts), "from_a" and "from_b" (the requests whose
    prompts they are, or ""). ValueError for what is no prompt, or a run without a tokenizer."""
    header = page.trace.recording.header
    source = (header.get("model") or {}).get("tokenizer", "")
    if source == "":
        raise ValueError("this run has no tokenizer: its prompts are ids without text")
    if local_folder(source) is None:
        raise ValueError(f"the tokenizer of this run, {source!r}, is no folder here (nothing is fetched)")
    known: dict[str, Sequence[int]] = {}
    for side in ("a", "b"):
        text, request = arguments.get(side), str(arguments.get(f"from_{side}") or "")
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt {side.upper()} is empty: type it, or pick a request")
        if len(text) > LONGEST:
            raise ValueError(f"prompt {side.upper()} has {len(text):,} characters; {LONGEST:,} are looked at")
        if request and page.prompt_text(request) == text:
            known[text] = page.prompt(request)
    found = diagnose(
        arguments["a"], arguments["b"], _Exact(tokenizer(source), known),
        int(header["start"]["tree"]["page_size"]),
    )  # fmt: skip
    said = {"verdict": found.verdict, "loss": found.loss, "outcome": found.outcome, "say": found.describe()}
    return {**asdict(found), "equal": found.equal, **said}
