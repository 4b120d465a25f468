"""Memories of a page's recording: why each request computed what it did, and what was there at a moment.

`Told` takes frames as the page does and answers for the requests; `Moments` keeps memories at the moments
that were asked about last, and replays to others. Both say nothing of a tree that does not tell what it does
(a student's), or did something else than it told: no answer is better than a wrong one.

Does not know what is asked (ask.py) and touches no engine.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from minirad.observe import events as ev
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State, is_fleet
from minirad.why.answer import LESSER, Answer
from minirad.why.recorded import Recorded, admission
from minirad.why.streamed import Streamed
from minirad.why.words import Words
from viz.trace import Decode, View, ids_as_text, local_folder
from viz.view.text import pretty

MOST = 1 << 24  # numbers that a memory holds; what is older is forgotten, and told as that
KEPT = 2  # memories at moments: the present, and one of the past
PATIENCE = 2.0  # seconds of replaying after which a page is told how far it is
SILENT = "this tree does not tell what it does, so why something is not in it cannot be said"
Memory = Recorded | Streamed


def words_for(header: State, decode: Decode) -> Words:
    """How answers about a recording are told."""
    spell = None if decode is ids_as_text else lambda ids: pretty(decode(ids)).replace("\n", "¶")
    return Words.of(header, spell)


def reasons(words: Words, answer: Answer) -> dict[str, int]:
    """What tokens were computed for, those of one reason together: the words behind a number -> it."""
    found: dict[str, int] = {}
    for loss in answer.losses:
        if loss.cause not in LESSER:
            said = words.because(loss, answer)
            found[said] = found.get(said, 0) + loss.tokens
    return found


def sentence(words: Words, answer: Answer) -> str:
    """The answer's own sentence, those of one reason together."""
    head = words.sentence(answer).partition("; computed are ")[0]
    said = [f"{count:,} {why}" for why, count in reasons(words, answer).items()]
    said += [words.clause(loss, answer) for loss in answer.losses if loss.cause in LESSER]
    return f"{head}; computed are {'; '.join(said)}"


def is_silent(header: State, frames: list[Frame]) -> bool:
    """The events were put together afterwards: each frame has the whole state then, from the first one on."""
    own = not is_fleet(header["start"])
    return own and (
        header["start"]["tree"]["eviction_policy"] == "its own"
        or (bool(frames) and frames[0].keyframe is not None)
    )


def no_text(tokenizer: str | None, theirs: bool) -> str:
    """One sentence: why only token ids can be asked about; "" where texts can, too."""
    if tokenizer == "":
        how = " (--tokenizer names one when the page is started)" if theirs else ""
        return f"Without a tokenizer{how} token ids can be asked about, no text."
    if local_folder(tokenizer) is None:
        return f"The tokenizer {tokenizer!r} is no folder here (nothing is fetched): token ids, no text."
    return ""


class Told:
    """Answers of a recording's requests, as its frames come. A stream tells of no requests."""

    def __init__(self, header: State, decode: Decode) -> None:
        self._words = words_for(header, decode)
        self._answers: dict[str, Answer] = {}
        self._told: Recorded | None = None
        if not is_fleet(header["start"]) and not is_silent(header, []):
            self._told = Recorded(header, MOST)

    def take(self, frame: Frame) -> None:
        """The next frame. One that does not fit ends it: what was said before stays."""
        if self._told is None:
            return
        known = len(self._told.answers)
        try:
            if frame.index == 0 and frame.keyframe is not None:
                raise ValueError(SILENT)
            self._told.take(frame)
            if self._told.misfits:
                raise ValueError("the tree changed without telling")
        except Exception:  # whatever a broken tree tells: the page goes on
            self._answers = dict(list(self._told.answers.items())[:known])
            self._told = None
        else:
            self._answers = self._told.answers

    def why(self, request: str, attempt: int = 1) -> str:
        """What an admitted request's tokens were computed for, without what is always so; "" if unknown."""
        answer = self._answers.get(admission(request, attempt))
        if answer is None:
            return ""
        found = list(reasons(self._words, answer).items())
        told = [
            *found[:1],
            *sorted(found[1:], key=lambda each: -each[1])[:1],
        ]  # the first, and what cost most
        rest = sum(count for _, count in found) - sum(count for _, count in told)
        parts = [f"{count:,} {said}" for said, count in told]
        return "; ".join([*parts, *([f"{rest:,} for other reasons"] if rest else [])])

    def sentence(self, event: ev.RequestAdmitted) -> str:
        """An admission in words, and why it did not hit further."""
        reason = self.why(event.request, event.attempt)
        return f"{event.describe()}: {reason}" if reason else event.describe()


class Behind(Exception):
    """A moment that is not reached yet. done, of: frames."""

    def __init__(self, done: int, of: int) -> None:
        self.done, self.of = done, of
        super().__init__(f"{done:,} of {of:,} frames are replayed")


class Moments:
    """A recording's memory at any moment. Not for several threads at once: hold `turn`."""

    def __init__(self, recording: Recording) -> None:
        self.turn = threading.Lock()
        self._recording = recording
        self._kept: list[list[Any]] = []  # [frames taken, memory], the one asked last at the end

    def at(self, view: View) -> Memory:
        """The memory at a position. `Behind`: it has to be asked for again; ValueError: there is none."""
        frames, part = view.frame + 1, 0
        inside = view.granularity == "event" and view.frame >= 0
        if inside and len(view.so_far) < len(self._recording.frames[view.frame].events):
            frames, part = view.frame, len(view.so_far)
        kept = self._nearest(frames)
        self._replay(kept, frames)
        if part:  # in the middle of a frame: this one cannot go on from there
            self._kept.remove(kept)
            frame = self._recording.frames[frames]
            self._take(kept, replace(frame, events=frame.events[:part], keyframe=None))
        return self._sound(kept[1])

    def _nearest(self, frames: int) -> list[Any]:
        """The memory that has least to replay, as the last one; a new one takes the place of the oldest."""
        before = [each for each in self._kept if each[0] <= frames]
        found = max(before, key=lambda each: int(each[0])) if before else None
        if found is not None:
            self._kept.remove(found)
        else:
            header = self._recording.header
            kind = Streamed if is_fleet(header["start"]) else Recorded
            if is_silent(header, self._recording.frames[:1]):
                raise ValueError(SILENT)
            found = [0, kind(header, MOST)]
            del self._kept[: len(self._kept) - KEPT + 1]
        self._kept.append(found)
        return found

    def _replay(self, kept: list[Any], frames: int) -> None:
        until = time.monotonic() + PATIENCE
        while kept[0] < frames:
            if time.monotonic() > until:
                raise Behind(kept[0], frames)
            self._take(kept, self._recording.frames[kept[0]])

    def _take(self, kept: list[Any], frame: Frame) -> None:
        try:
            kept[1].take(frame)
        except Exception as error:  # whatever was recorded
            self._kept = [each for each in self._kept if each is not kept]
            raise ValueError(f"what was recorded cannot be followed: {error}") from error
        kept[0] += 1

    @staticmethod
    def _sound(memory: Memory) -> Memory:
        if isinstance(memory, Recorded) and memory.misfits:
            raise ValueError(f"{memory.misfits[0]} found something else than this tree had told: {SILENT}")
        return memory
