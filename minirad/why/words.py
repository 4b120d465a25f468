"""An answer in words: one sentence for people, and plain data for pages and programs.

What a moment is called is the clock's: a recording has steps, a log has requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from minirad.observe.events import listed
from minirad.observe.snapshot import State, is_fleet
from minirad.why.answer import CAUSES, Answer, Decode, Loss
from minirad.why.memory import CPU, GPU, Departure
from minirad.why.streamed import Streamed

LAST = "the last one, as always"
MEDIA = {GPU: "the device", CPU: "the host"}


@dataclass(frozen=True, slots=True)
class Clock:
    """What moments are called. unit: "step", "request" or "batch"; before: the preposition."""

    unit: str = "step"
    before: str = "in"

    def at(self, when: float) -> str:
        """in step 12"""
        return f"{self.before} {self.unit} {when:g}"

    def later(self, first: float, then: float) -> str:
        """7 steps"""
        many = "es" if self.unit.endswith("ch") else "s"
        return f"{then - first:g} {self.unit}{many * (then - first != 1)}"


STEPS, REQUESTS, BATCHES = Clock(), Clock("request", "at"), Clock("batch")


def _namespace(name: Hashable) -> str:
    return "no salt" if name is None else f"namespace {name}"


def _adapter(name: Hashable) -> str:
    return f"adapter {name}" if name else "no adapter"


@dataclass(frozen=True, slots=True)
class Words:
    """How answers are told.

    decode: token ids -> text, to show where prompts part; None shows ids. named: what a namespace is called.
    unit: what a key unit is called.
    """

    decode: Decode | None = None
    clock: Clock = STEPS
    named: Callable[[Hashable], str] = _namespace
    unit: str = "token"

    @classmethod
    def of(cls, header: State, decode: Decode | None) -> Words:
        """Those for answers about a recording: of an engine, or of a stream of KV events."""
        return cls(decode, BATCHES, Streamed.named) if is_fleet(header["start"]) else cls(decode)

    def sentence(self, answer: Answer) -> str:
        """How far a prompt hits, and what the rest is computed for."""
        who = answer.name or "this prompt"
        found = f"{who} finds {answer.cached:,} of {answer.length:,} {self.unit}s in the cache"
        return f"{found}; computed are {'; '.join(self.clauses(answer))}"

    def clauses(self, answer: Answer) -> list[str]:
        """What all of the rest is computed for, in order; neighbours of which the same is said are one."""
        alike = groupby(answer.losses, lambda loss: self.because(loss, answer))
        return [_numbered(sum(loss.tokens for loss in losses), words) for words, losses in alike]

    def clause(self, loss: Loss, answer: Answer) -> str:
        """What some tokens are computed for: "12 that were evicted from the device in step 9 for R5"."""
        return _numbered(loss.tokens, self.because(loss, answer))

    def because(self, loss: Loss, answer: Answer) -> str:
        """The same without how many they are."""
        clock, other = self.clock, loss.other or "another request"
        said: dict[str, Callable[[], str]] = {
            "new": lambda: "never seen" + (f", behind what {loss.other} had" if loss.other else ""),
            "differs": lambda: (
                f"from {self.unit} {loss.start:,} on, where it parts from {other}: "
                f"{self.shown(loss.ours)} instead of {self.shown(loss.theirs)}"
            ),
            "evicted": lambda: f"{_gone(loss, clock)}{_last_use(loss, clock)}",
            "flushed": lambda: f"{_gone(loss, clock)}{_last_use(loss, clock)}",
            "weights": lambda: f"computed by old weights, which changed {clock.at(loss.left[-1].when)}",
            "host": lambda: (
                f"in host memory only, and not loaded back{_because(loss, clock)}"
                if answer.name
                else "in host memory only: they are loaded back if there is room, and if they are enough"
            ),
            "hole": lambda: f"on {_media(loss)}, but what is before them is not",
            "namespace": lambda: (
                f"there for {self.named(loss.namespace)} only" + (f" (by {loss.other})" if loss.other else "")
            ),
            "adapter": lambda: (
                f"that are there under {_adapter(loss.namespace)}, where the same tokens have other keys "
                "and values" + (f" (by {loss.other})" if loss.other else "")
            ),
            "running": lambda: f"which {other} computes now, too",
            "aborted": lambda: f"of {other}, which was aborted before they were kept",
            "retracted": lambda: f"of {_whose(loss, answer)}, which was retracted before they were kept",
            "failed": lambda: f"of {other}, which failed before they were kept",
            "unkept": lambda: f"of {other}, which were not kept",
            "large": lambda: "of a prompt that is larger than the whole cache",
            "forgotten": lambda: "that may have been there: the memory does not reach back so far",
            "unknown": lambda: "of which nothing is known",
            "page": lambda: f"that make no whole page of {answer.page_size}",
            "logprobs": lambda: "for their log-probabilities",
            "last": lambda: LAST,
        }
        return said[loss.cause]()

    def shown(self, ids: Sequence[int]) -> str:
        """Some tokens as they are shown."""
        if not ids:
            return "its end"
        return repr(self.decode(ids)) if self.decode is not None else f"{', '.join(map(str, ids[:3]))}"

    def parting(self, loss: Loss) -> tuple[str, str, str]:
        """Where prompts part, by characters: what is before, ours, theirs."""
        if self.decode is None:
            return _spaced(loss.before), _spaced(loss.ours), _spaced(loss.theirs)
        ours, theirs = (self.decode((*loss.before, *ids)) for ids in (loss.ours, loss.theirs))
        same = (one == other for one, other in zip(ours, theirs, strict=False))
        at = next((at for at, equal in enumerate(same) if not equal), min(len(ours), len(theirs)))
        return ours[:at], ours[at:], theirs[at:]

    def as_data(self, answer: Answer) -> dict[str, Any]:
        """The answer as JSON can hold it, with its sentence."""
        losses = []
        for loss in answer.losses:
            data = {name: value for name, value in asdict(loss).items() if value not in (None, "", ())}
            data["what"], data["say"] = CAUSES[loss.cause], self.clause(loss, answer)
            if loss.cause == "differs":
                data["before_text"], data["ours_text"], data["theirs_text"] = self.parting(loss)
            losses.append(data)
        return {
            "request": answer.name, "tokens": answer.length, "matched": answer.matched,
            "cached": answer.cached, "computed": answer.missed, "common": answer.common,
            "page_size": answer.page_size, "cause": answer.main.cause, "losses": losses,
            "say": self.sentence(answer),
        }  # fmt: skip


def _numbered(tokens: int, words: str) -> str:
    return words if words == LAST else f"{tokens:,} {words}"


def _whose(loss: Loss, answer: Answer) -> str:
    if loss.other == answer.name.partition("#")[0]:
        return "its own"
    return loss.other or "another request"


def _spaced(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _media(loss: Loss) -> str:
    return " and ".join(MEDIA.get(each, each) for each in loss.media)


def _gone(loss: Loss, clock: Clock) -> str:
    parts = [f"from {MEDIA.get(each.medium, each.medium)} {_departure(each, clock)}" for each in loss.left]
    word = "evicted" if loss.cause == "evicted" else "flushed"
    return f"that were {word} {' and '.join(parts)}"


def _departure(left: Departure, clock: Clock) -> str:
    said = []
    if not (left.by and clock.unit == "request"):  # who it was for says when
        said.append(clock.at(left.when))
    if left.along:
        said.append("together with what was before them")
    if left.by:
        said.append(f"for {listed(left.by)}")
    if left.policy:
        said.append(f"by {left.policy}")
    return " ".join(said)


def _last_use(loss: Loss, clock: Clock) -> str:
    if loss.used is None or not loss.left or loss.left[0].when < loss.used:
        return ""
    user = f" by {loss.user}" if loss.user else ""
    return f", {clock.later(loss.used, loss.left[0].when)} after their last use{user}"


def _because(loss: Loss, clock: Clock) -> str:
    return f" (evicted from the device {_departure(loss.left[-1], clock)})" if loss.left else ""
