"""Why did a prompt miss? How far it hits a cache, and for every token behind that why it is computed.

The tokens that are computed are divided among causes, so that what each of them cost adds up to the whole:

    0 ..... cached ....................... common ........ length
      found        seen before, but not      differs, or was
                   (or not so) there now     never seen

`common` is how far the prompt is like anything that the memory knows. Of the pages up to there each has a
cause of its own, by what became of it. A page that is common in part only was never there; the last token of
a prompt is computed even if it is cached, since the next token needs its logits.

Does not change the memory, and does not say what to do about it: repairs.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from minirad.errors import as_int64, whole
from minirad.why.memory import GPU, NEVER, Departure, Memory, Path, Record, common_units

MOST_SPACES = 32  # namespaces of one text that are looked at, the latest first
CONTEXT = 12  # tokens shown on either side of where two prompts part

# Each cause, and what it is called in a table.
CAUSES: dict[str, str] = {
    "new": "never seen",
    "differs": "differs from what was seen",
    "evicted": "seen and evicted",
    "flushed": "seen, but the cache was flushed",
    "weights": "computed by old weights",
    "host": "in host memory only",
    "hole": "there, but what is before it is not",
    "namespace": "there for another model, salt or rank",
    "adapter": "there under another adapter",
    "running": "another request computes it now",
    "aborted": "its computation was aborted",
    "retracted": "its computation was retracted",
    "failed": "its computation failed",
    "unkept": "computed, but not kept",
    "large": "larger than the whole cache",
    "forgotten": "not known any more",
    "unknown": "not known: from before the memory begins",
    "page": "no whole page in common",
    "logprobs": "computed for its log-probabilities",
    "last": "the last token is always computed",
}
LESSER = ("page", "logprobs", "last")  # not what one asks for, if there is another cause
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, as a cache sees it.

    data: its key units as bytes. length: tokens that must be there before the next one can be drawn. usable:
    of them, those that may come from the cache. name: the request's, "" for none.
    """

    data: bytes
    length: int
    usable: int
    namespace: Hashable = None
    page_size: int = 1
    name: str = ""

    @classmethod
    def of(
        cls, tokens: Path, namespace: Hashable = None, page_size: int = 1, name: str = "",
        *, usable: int | None = None, pairs: bool = False,
    ) -> Asked:  # fmt: skip
        """Of token ids. pairs: the cache's units are pairs of tokens. usable: None is all but one."""
        ids = (
            np.frombuffer(tokens, dtype="<i4") if isinstance(tokens, bytes) else as_int64(tokens, "a prompt")
        )
        if not len(ids):
            raise ValueError("the prompt is empty")
        most = len(ids) - 1 if usable is None else min(whole("usable", usable, 0), len(ids) - 1)
        return cls(unit_bytes(ids, pairs), len(ids), most, namespace, whole("page_size", page_size, 1), name)


def unit_bytes(ids: Any, pairs: bool = False) -> bytes:
    """Token ids as a tree's units: int32 each, or pairs of them."""
    row = np.asarray(ids, dtype="<i4")
    return (np.stack((row[:-1], row[1:]), axis=1) if pairs else row).tobytes()


@dataclass(frozen=True, slots=True)
class Loss:
    """Some tokens in a row that are computed, all for one cause (of CAUSES).

    start: their first position. other: the request that brought them, computes them now, or that the prompt
    parts from. when: when that one computed them. left: all that they left and are not back in, the last of
    them is why they are not there. used, user: when they were last found, and by whom. media: where they lie.
    namespace: of "namespace" and "adapter", the other one ("": no adapter). before, ours, theirs: of
    "differs", token ids around the place.
    """

    cause: str
    start: int
    tokens: int
    other: str = ""
    when: float | None = None
    left: tuple[Departure, ...] = ()
    used: float | None = None
    user: str = ""
    media: tuple[str, ...] = ()
    namespace: Hashable = None
    before: tuple[int, ...] = ()
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """How far a prompt hits, and what each other token was computed for.

    name: the request. matched: tokens of whole pages that were in the cache; cached: those used of them.
    common: how far the prompt is like anything known. losses: from `cached` on, in order; their tokens add up
    to length - cached. when: the moment.
    """

    name: str
    length: int
    matched: int
    cached: int
    common: int
    page_size: int
    namespace: Hashable
    losses: tuple[Loss, ...]
    when: float = NEVER

    @property
    def missed(self) -> int:
        """Tokens that are computed."""
        return self.length - self.cached

    @property
    def main(self) -> Loss:
        """Why it does not hit further: the first loss that is no matter of pages or of the last token."""
        return next((loss for loss in self.losses if loss.cause not in LESSER), self.losses[0])

    def by_cause(self) -> dict[str, int]:
        """Tokens lost by each cause, in the order of the losses."""
        found: dict[str, int] = {}
        for loss in self.losses:
            found[loss.cause] = found.get(loss.cause, 0) + loss.tokens
        return found


def why(memory: Memory, asked: Asked, when: float = NEVER) -> Answer:
    """What becomes of a prompt now, and why."""
    return _Question(memory, asked, when).answer()


def fitted(answer: Answer, matched: int, cached: int) -> Answer:
    """The answer, if this is what was found; else with what it does not explain told as unknown.

    A tree that tells nothing itself (a student's) may have changed since the memory last heard of it.
    """
    if (answer.matched, answer.cached) == (matched, cached):
        return answer
    losses = []
    if cached < answer.cached:
        losses.append(Loss("unknown", cached, answer.cached - cached))
    for loss in answer.losses:
        start = max(loss.start, cached)
        if start < loss.start + loss.tokens:
            losses.append(replace(loss, start=start, tokens=loss.start + loss.tokens - start))
    return replace(answer, matched=matched, cached=cached, losses=tuple(losses))


def held(memory: Memory, namespace: Hashable, data: bytes, page_size: int = 1) -> int:
    """How many units of a path lie on the device, in whole pages from the beginning."""
    found = 0
    for run, end in memory.trail(data):
        if end // page_size * page_size > found:
            record = run.spaces.get(namespace)
            if record is None or GPU not in record.held:
                break
            found = end // page_size * page_size
    return found


class _Piece(NamedTuple):
    """A run's part of the prompt: what is known of it in the prompt's namespace."""

    record: Record
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Known:
    """How far a prompt is like something: `end` tokens of a request `other`.

    goes_on: who went on behind that, and with what. forgot: something else that did is forgotten.
    """

    end: int
    other: str = ""
    goes_on: tuple[str, bytes] | None = None
    namespace: Hashable = None
    forgot: bool = False


class _Question:
    """One look at a memory."""

    def __init__(self, memory: Memory, asked: Asked, when: float) -> None:
        self.memory, self.asked, self.when = memory, asked, when
        self.page = asked.page_size
        self.trail = memory.trail(asked.data)
        self.pieces = list(self._pieces(asked.namespace))
        self.own = self._own()
        self.matched = self._held(self.pieces)
        self.running = self._running()
        self.elsewhere = self._elsewhere()

    def answer(self) -> Answer:
        asked, page = self.asked, self.page
        known = max((self.own, self.running, self.elsewhere), key=lambda each: each.end)  # first of equals
        common = known.end
        usable = min(common, asked.usable)
        pages = usable // page * page
        cached = min(self.matched, pages)
        losses = [*self._pages(cached, pages), *self._rest(pages, usable, common)]
        if common < asked.length:
            losses.append(self._parting(known))
        joined = tuple(_joined(losses))
        return Answer(
            asked.name, asked.length, self.matched, cached, common, page, asked.namespace, joined, self.when
        )

    # ------------------------------------------------------------ how far

    def _floor(self, position: int) -> int:
        return position // self.page * self.page

    def _pieces(self, namespace: Hashable) -> Iterator[_Piece]:
        start = 0
        for run, end in self.trail:
            if namespace not in run.spaces:
                return
            yield _Piece(run.spaces[namespace], start, end)
            start = end

    def _held(self, pieces: Sequence[_Piece]) -> int:
        """Whole pages from the beginning that lie on the device; a page is known by its last unit."""
        held = 0
        for record, _, end in pieces:
            if self._floor(end) > held:
                if GPU not in record.held:
                    break
                held = self._floor(end)
        return held

    def _own(self) -> _Known:
        end = self.pieces[-1].end if self.pieces else 0
        return self._known_to(self.asked.namespace, end, len(self.pieces))

    def _known_to(self, namespace: Hashable, end: int, runs: int) -> _Known:
        """A prompt's first `end` tokens, to the trail's run number `runs`, as a namespace knows them."""
        if not runs:
            return _Known(0, namespace=namespace, forgot=self.memory.forgot_beginning)
        (run, _), start = self.trail[runs - 1], self.trail[runs - 2][1] if runs > 1 else 0
        found = self.memory.goes_on(namespace, run, (end - start) * self.memory.unit)
        record = run.spaces[namespace]
        after = None if found is None else (_who(found[0]), found[1])
        forgot = record.forgot and (end - start) * self.memory.unit == len(run.edge)
        return _Known(end, _who(record), after, namespace, forgot)

    def _running(self) -> _Known:
        """Who computes most of the prompt now, in the same namespace; of equals one that goes on."""
        best, unit = _Known(0), self.memory.unit
        for each in self.memory.running.values():
            if each.namespace == self.asked.namespace and each.by != self.asked.name:
                end = common_units(self.asked.data, each.data, unit)
                rest = bytes(each.data[end * unit :])
                if (end, bool(rest)) > (best.end, best.goes_on is not None):
                    best = _Known(end, each.by, (each.by, rest) if rest else None, each.namespace)
        return best

    def _elsewhere(self) -> _Known:
        """The namespace of which the prompt would hit most pages, if these are more than are known here."""
        best, looked_at = _Known(0), {self.asked.namespace}
        for run, end in reversed(self.trail):
            if self._floor(end) <= self.own.end or end < best.end:
                break
            for namespace in islice(reversed(run.spaces), MOST_SPACES):
                if namespace in looked_at:
                    continue
                looked_at.add(namespace)
                found = self._known_in(namespace)
                rank = found.end, found.goes_on is not None
                if self._floor(found.end) > self.own.end and rank > (best.end, best.goes_on is not None):
                    best = found
                if best.end == end and best.goes_on is not None:
                    return best  # none that comes later is better
        return best

    def _known_in(self, namespace: Hashable) -> _Known:
        """How far a prompt is like another namespace's cached pages, and the one that it would hit next."""
        pieces = list(self._pieces(namespace))
        held, known = self._held(pieces), self._known_to(namespace, pieces[-1].end, len(pieces))
        return known if self._floor(known.end) == held else replace(known, end=held, goes_on=None)

    # ------------------------------------------------------------ why

    def _pages(self, start: int, stop: int) -> Iterator[Loss]:
        """Whole pages from `start` to `stop`: they are known, but not in the cache from the beginning."""
        on_host = True  # all pages so far, so that this one could be loaded back
        at = start
        for record, _, end in self.pieces:
            last = min(self._floor(end), stop)
            for upto in sorted({min(self._floor(self.running.end), last), last}):
                if upto > at:
                    loss = self._page(record, at, upto, on_host)
                    on_host = loss.cause == "host"
                    yield loss
                    at = upto
        if at < min(self._floor(self.running.end), stop):
            end = min(self._floor(self.running.end), stop)
            yield Loss("running", at, end - at, self.running.other)
            at = end
        if at < stop:
            found = self.elsewhere
            yield Loss("namespace", at, stop - at, found.other, namespace=found.namespace, media=(GPU,))

    def _page(self, record: Record, start: int, stop: int, on_host: bool) -> Loss:
        """Pages of one run: what became of them."""
        loss = Loss(
            "unknown", start, stop - start, record.by, _time(record.came), record.left, _time(record.used),
            record.user, record.held,
        )  # fmt: skip
        computing = record.computing
        if record.held:
            return replace(loss, cause="host" if on_host and GPU not in record.held else "hole")
        if stop <= self.running.end:
            return replace(loss, cause="running", other=self.running.other)
        if record.left:
            return replace(loss, cause=record.left[-1].why)
        if computing is not None and computing.by != self.asked.name and not computing.end:
            return replace(loss, cause="running", other=computing.by, when=computing.when)
        if computing is not None:
            end = "unkept" if computing.end in ("", "finished") else computing.end
            return replace(loss, cause=end, other=computing.by, when=computing.ended)
        if stop <= self.elsewhere.end:
            found = self.elsewhere
            return Loss(
                "namespace", start, stop - start, found.other, namespace=found.namespace, media=(GPU,)
            )
        return loss

    def _rest(self, pages: int, usable: int, common: int) -> Iterator[Loss]:
        """What is known, but is no whole page, or has to be computed anyway."""
        asked = self.asked
        if pages < usable:
            yield Loss("page", pages, usable - pages)
        last = asked.length - 1
        if usable < min(common, last):
            yield Loss("logprobs", usable, min(common, last) - usable)
        if common > last:
            yield Loss("last", last, 1)

    def _parting(self, known: _Known) -> Loss:
        """All behind what is known: it differs from there on, or goes on where nothing was."""
        asked, unit, at = self.asked, self.memory.unit, known.end
        size = asked.length - at
        if at * unit == len(asked.data):  # of pairs the last token has none
            return Loss("last", at, size)
        if known.forgot or self.own.forgot:
            return Loss("forgotten", at, size)
        if not at or known.goes_on is None:
            return Loss("new", at, size, known.other)
        other, rest = known.goes_on
        return Loss(
            "differs", at, size, other,
            before=_ids(asked.data[max(at - CONTEXT, 0) * unit : at * unit], unit),
            ours=_ids(asked.data[at * unit : (at + CONTEXT) * unit], unit),
            theirs=_ids(rest[: CONTEXT * unit], unit),
        )  # fmt: skip


def _joined(losses: Sequence[Loss]) -> Iterator[Loss]:
    """Neighbours that say the same become one."""
    last: Loss | None = None
    for loss in losses:
        if last is not None and last.start + last.tokens == loss.start:
            together = replace(last, tokens=last.tokens + loss.tokens)
            if replace(loss, start=last.start, tokens=together.tokens) == together:
                last = together
                continue
        if last is not None:
            yield last
        last = loss
    if last is not None:
        yield last


def _who(record: Record) -> str:
    if record.by or record.computing is None:
        return record.by
    return record.computing.by


def _time(when: float) -> float | None:
    return None if when == NEVER else when


def _ids(data: bytes, unit: int) -> tuple[int, ...]:
    """Token ids of units; of pairs the first of each."""
    return tuple(np.frombuffer(data, dtype="<i4")[:: unit // 4].tolist())
