"""An answer in words: one sentence for people, and plain data for pages and programs.

What a moment is called is the clock's: a recording has steps, a log has requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minirad.why.answer import CAUSES, Answer, Decode, Loss
from minirad.why.memory import CPU, GPU, Departure

MEDIA = {GPU: "the device", CPU: "the host"}
MOST_NAMED = 3  # requests in one clause


@dataclass(frozen=True, slots=True)
class Clock:
    """What moments are called. unit: "step" or "request"; before: the preposition."""

    unit: str = "step"
    before: str = "in"

    def at(self, when: float) -> str:
        """in step 12"""
        return f"{self.before} {self.unit} {when:g}"

    def later(self, first: float, then: float) -> str:
        """7 steps"""
        return f"{then - first:g} {self.unit}{'s' * (then - first != 1)}"


STEPS, REQUESTS = Clock(), Clock("request", "at")
Named = Callable[[Hashable], str]


def _namespace(name: Hashable) -> str:
    return "no salt" if name is None else f"namespace {name}"


def sentence(
    answer: Answer, decode: Decode | None = None, clock: Clock = STEPS, named: Named = _namespace
) -> str:
    """How far a prompt hits, and what the rest is computed for.

    decode: token ids -> text, to show where prompts part; None shows ids. named: what a namespace is called.
    """
    who = answer.name or "this prompt"
    found = f"{who} finds {answer.cached:,} of {answer.length:,} tokens in the cache"
    clauses = [clause(loss, answer, decode, clock, named) for loss in answer.losses]
    return f"{found}; computed are {'; '.join(clauses)}"


def clause(
    loss: Loss, answer: Answer, decode: Decode | None = None, clock: Clock = STEPS, named: Named = _namespace
) -> str:
    """What some tokens are computed for: "12 that were evicted from the device in step 9 for R5"."""
    said: dict[str, Callable[[], str]] = {
        "new": lambda: "never seen" + (f", behind what {loss.other} had" if loss.other else ""),
        "differs": lambda: f"from token {loss.start:,} on, where it parts from {_other(loss)}: "
        f"{shown(loss.ours, decode)} instead of {shown(loss.theirs, decode)}",
        "evicted": lambda: f"{_gone(loss, clock)}{_last_use(loss, clock)}",
        "flushed": lambda: f"{_gone(loss, clock)}{_last_use(loss, clock)}",
        "weights": lambda: f"computed by old weights, which changed {clock.at(loss.left[-1].when)}",
        "host": lambda: "in host memory only, and not loaded back" + _because(loss, clock),
        "hole": lambda: f"on {_media(loss)}, but what is before them is not",
        "namespace": lambda: f"there for {named(loss.namespace)} only"
        + (f" (by {loss.other})" if loss.other else ""),
        "running": lambda: f"which {_other(loss)} computes now, too",
        "aborted": lambda: f"of {_other(loss)}, which was aborted before they were kept",
        "retracted": lambda: f"of {_own(loss, answer)}, which was retracted before they were kept",
        "failed": lambda: f"of {_other(loss)}, which failed before they were kept",
        "unkept": lambda: f"of {_other(loss)}, which were not kept",
        "large": lambda: "of a prompt that is larger than the whole cache",
        "forgotten": lambda: "that may have been there: the memory does not reach back so far",
        "unknown": lambda: "of which nothing is known",
        "page": lambda: f"that make no whole page of {answer.page_size}",
        "logprobs": lambda: "for their log-probabilities",
        "last": lambda: "",
    }
    if loss.cause == "last":
        return "the last one, as always"
    return f"{loss.tokens:,} {said[loss.cause]()}"


def shown(ids: Sequence[int], decode: Decode | None) -> str:
    """Some tokens as they are shown."""
    if not ids:
        return "its end"
    return repr(decode(ids)) if decode is not None else f"tokens {', '.join(map(str, ids[:3]))}"


def _other(loss: Loss) -> str:
    return loss.other or "another request"


def _own(loss: Loss, answer: Answer) -> str:
    return "itself" if loss.other == answer.name.partition("#")[0] else _other(loss)


def _media(loss: Loss) -> str:
    return " and ".join(MEDIA.get(each, each) for each in loss.media)


def _gone(loss: Loss, clock: Clock) -> str:
    parts = [f"from {MEDIA.get(each.medium, each.medium)} {_departure(each, clock)}" for each in loss.left]
    word = "evicted" if loss.cause == "evicted" else "flushed"
    return f"that were {word} {' and '.join(parts)}"


def _departure(left: Departure, clock: Clock) -> str:
    text = clock.at(left.when)
    if left.along:
        text += " together with what was before them"
    if left.by:
        more = f" and {len(left.by) - MOST_NAMED} more" * (len(left.by) > MOST_NAMED)
        text += f" for {', '.join(left.by[:MOST_NAMED])}{more}"
    return text + (f" ({left.policy}: {left.reason})" if left.policy else "")


def _last_use(loss: Loss, clock: Clock) -> str:
    if loss.used is None or not loss.left or loss.left[0].when < loss.used:
        return ""
    user = f" by {loss.user}" if loss.user else ""
    return f", {clock.later(loss.used, loss.left[0].when)} after their last use{user}"


def _because(loss: Loss, clock: Clock) -> str:
    return f" (evicted from the device {_departure(loss.left[-1], clock)})" if loss.left else ""


def as_data(answer: Answer, decode: Decode | None = None, clock: Clock = STEPS) -> dict[str, Any]:
    """The answer as JSON can hold it, with its sentence."""
    losses = []
    for loss in answer.losses:
        data = {name: value for name, value in asdict(loss).items() if value not in (None, "", ())}
        data["what"], data["say"] = CAUSES[loss.cause], clause(loss, answer, decode, clock)
        for name in ("before", "ours", "theirs"):
            if name in data and decode is not None:
                data[f"{name}_text"] = decode(data[name])
        losses.append(data)
    return {
        "request": answer.name, "tokens": answer.length, "matched": answer.matched, "cached": answer.cached,
        "computed": answer.missed, "common": answer.common, "page_size": answer.page_size,
        "cause": answer.main.cause, "losses": losses, "say": sentence(answer, decode, clock),
    }  # fmt: skip
