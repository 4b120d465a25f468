"""Why did it miss? One memory for a recording, kept up as it grows, and what it says of requests and prompts.

    reasons = Reasons(recording, decode)
    reasons.of("R7")                      # as it was when R7 was admitted ("R7#2": after a retraction)
    reasons.now([1, 2, 3], frame=80)      # what a prompt would find there: of a stream on each rank

What a cell shows of the result is its sentence; `data` is the same as pages and programs get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minirad.observe.events import RequestAdmitted
from minirad.observe.recording import Recording
from minirad.why.answer import Answer, Decode
from minirad.why.recorded import Recorded, admission
from minirad.why.streamed import Streamed
from minirad.why.words import Words
from viz.trace import decoder_for, is_fleet
from viz.view.text import visible

Told = Recorded | Streamed


@dataclass(frozen=True, slots=True)
class Why:
    """An answer; of a stream one for each rank. text: sentences, a line each. data: as JSON can hold it."""

    answers: tuple[Answer, ...]
    text: str
    data: tuple[dict[str, Any], ...] = field(repr=False)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__  # what a cell shows


def why(recording: Recording, asked: str | Sequence[int]) -> Why:
    """Why a request of a recording missed ("R7"), or what token ids would find when it ends.

    ValueError for a request that was not admitted. A stepper's `why` takes texts, too, and at any position.
    """
    reasons = Reasons(recording, decoder_for(recording.header))
    return reasons.of(asked) if isinstance(asked, str) else reasons.now(asked, len(recording.frames) - 1)


class Reasons:
    """A recording's answers. `failed` says why there are none, if it cannot be followed."""

    def __init__(self, recording: Recording, decode: Decode) -> None:
        self._recording = recording
        self._streamed = is_fleet(recording.header["start"])
        self._words = Words.of(recording.header, decode)
        self.failed = ""
        self._told: Told | None = None
        self._past: tuple[int, Told] | None = None  # the same up to a frame that was asked about

    def of(self, request: str) -> Why:
        """Of a request's admission; ValueError where there is none."""
        if self._streamed:
            raise ValueError("a stream does not tell what was asked: ask about a prompt")
        told = self._present()
        assert isinstance(told, Recorded)
        if request not in told.answers:
            known = f"; known: {', '.join(list(told.answers)[:8])}" if told.answers else ""
            raise ValueError(f"no request {request!r} was admitted{known}")
        return self._why([told.answers[request]])

    def asked(self, request: str) -> bool:
        """Whether a request of this name was admitted."""
        told = None if self._streamed else self._present()
        return isinstance(told, Recorded) and request in told.answers

    def now(self, tokens: Sequence[int], frame: int, namespace: Any = None) -> Why:
        """What a prompt would find behind a frame (-1: the start). namespace: its number; a stream's name."""
        told = self._at(frame)
        if isinstance(told, Streamed):
            return self._why(list(told.why(tokens, namespace or "").values()))
        return self._why([told.why(tokens, namespace or 0)])

    def sentence(self, event: RequestAdmitted) -> str:
        """Behind the sentence of an admission: why it hit no further; "" if that is not known."""
        if self._streamed or self.failed:
            return ""
        try:
            told = self._present()
        except ValueError:
            return ""
        name = admission(event.request, event.attempt)
        answer = told.answers.get(name) if isinstance(told, Recorded) else None
        if answer is None:
            return ""
        return self.clauses(answer)

    def clauses(self, answer: Answer) -> str:
        """What the rest is computed for, without how much was found."""
        return f"computed: {visible('; '.join(self._words.clauses(answer)))}"

    # ------------------------------------------------------------ memories

    def _why(self, answers: list[Answer]) -> Why:
        text = "\n".join(visible(self._words.sentence(each)) for each in answers)
        return Why(tuple(answers), text, tuple(map(self._words.as_data, answers)))

    def _present(self) -> Told:
        """All that is recorded so far."""
        if self._told is None:
            self._told = self._empty()
        return self._follow(self._told, len(self._recording.frames))

    def _at(self, frame: int) -> Told:
        """A memory that ends with a frame: the same as long as one goes forwards."""
        if frame >= len(self._recording.frames) - 1:
            return self._present()
        if self._past is None or self._past[0] > frame:
            self._past = (-1, self._empty())
        told = self._follow(self._past[1], frame + 1)
        self._past = (frame, told)
        return told

    def _empty(self) -> Told:
        header = self._recording.header
        return Streamed(header) if self._streamed else Recorded(header)

    def _follow(self, told: Told, frames: int) -> Told:
        """Takes what is new, up to so many frames. ValueError where a tree's changes cannot be followed."""
        if self.failed:
            raise ValueError(self.failed)
        try:
            told.catch_up(self._recording.frames[:frames])
        except Exception as error:  # of a student's tree, whose events may say anything
            self.failed = f"this recording cannot be followed: {error}"
            raise ValueError(self.failed) from error
        return told
