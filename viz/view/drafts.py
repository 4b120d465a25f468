"""What decoding requests drafted in a step, as far as a position has come; and sums of all drafts up to it.

In the order of the events: slots are handed out for a request's drafts, tokens are drafted, the model
verifies them, and the slots of those that it did not choose are given back. Tokens that a grammar forces
(jump-forward) have slots, and that is all. `DraftBook` keeps up with a recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minirad.observe import events as ev
from minirad.observe.draft_events import DraftVerified, TokensDrafted, TokensForced
from minirad.observe.event import Event, Ints
from minirad.observe.snapshot import State
from viz.trace import Trace, View
from viz.view.victims import first_frame

STAGES = ("none", "slots", "drafted", "verified", "returned", "forced")
MOST_DRAFTS = 60  # of a scene: the latest ones


@dataclass(frozen=True, slots=True)
class Draft:
    """One request's drafts in one frame.

    stage: how far they have come (STAGES; "none": nothing was drafted for it). source: who drafted. slots:
    where they lie. accepted: how many of `tokens` hold. own: what the model said behind them. back: the slots
    that are free again; where a page goes on being used, fewer than were rejected. forced: nobody guessed,
    its grammar forces them; said: how many tokens it has taken on by now, of forced ones. now: the present
    event is about it.
    """

    request: str
    frame: int
    stage: str = "none"
    source: str = ""
    tokens: Ints = ()
    slots: Ints = ()
    accepted: int = 0
    own: Ints = ()
    back: Ints = ()
    forced: bool = False
    said: int = 0
    now: bool = False

    @property
    def rejected(self) -> Ints:
        """The slots of what was not accepted; none before it is known."""
        return self.slots[self.accepted :] if self.stage in ("verified", "returned") else ()

    def fates(self) -> list[str]:
        """Of each token: "held" before it is verified, then "accepted", "rejected", or "last": the model said
        it as well, and the reply ends with it, so that its KV is of no use. Or "forced"."""
        if self.forced:
            return ["forced"] * len(self.tokens or self.slots)
        if self.stage == "drafted":
            return ["held"] * len(self.tokens)
        fates = ["accepted" if at < self.accepted else "rejected" for at in range(len(self.tokens))]
        if self.own and self.own[:1] == self.tokens[self.accepted : self.accepted + 1]:
            fates[self.accepted] = "last"
        return fates


@dataclass(frozen=True, slots=True)
class DraftSums:
    """As minirad.speculative.stats.DraftStats counts them: a pass is one over one decoding request.

    verified: passes with drafts; yielded: their tokens. forced: tokens that a grammar forced.
    """

    passes: int = 0
    tokens: int = 0
    verified: int = 0
    yielded: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0

    @property
    def length(self) -> float:
        """The acceptance length: tokens that a pass with drafts yields in the mean."""
        return self.yielded / self.verified if self.verified else 0.0

    @property
    def a_pass(self) -> float:
        """The same of all passes."""
        return self.tokens / self.passes if self.passes else 0.0

    def __add__(self, other: DraftSums) -> DraftSums:
        return DraftSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class DraftBook:
    """Which requests decoded in each frame, and sums. start: the state with which the recording begins."""

    def __init__(self, start: State) -> None:
        self._decoding = {
            name
            for name, request in start["requests"].items()
            if request["row"] >= 0 and len(request["slots"]) == request["length"] - 1
        }
        self._known: list[frozenset[str]] = []  # by frame: those that decoded before it
        self._sums = [DraftSums()]  # before each frame; one more entry than frames

    def take(self, events: Sequence[Event]) -> None:
        """The next frame."""
        before = frozenset(self._decoding)
        self._known.append(before)
        self._sums.append(self._sums[-1] + _sums(drafts_in(events, len(events), before)))
        for event in events:
            if isinstance(event, ev.TokenSampled):
                self._decoding.add(event.request)
            elif isinstance(event, ev.RequestRetracted | ev.RequestFinished | ev.RequestAborted):
                self._decoding.discard(event.request)

    def of(self, trace: Trace, view: View) -> tuple[list[Draft], DraftSums]:
        """The drafts of a position (by scene those of all its steps), and the sums up to it."""
        if view.frame < 0:
            return [], DraftSums()
        found: list[Draft] = []
        for frame in range(max(first_frame(trace, view), 0), view.frame + 1):
            events = trace.frame_events(frame)
            upto = len(view.so_far) if view.granularity == "event" else len(events)
            drafts = drafts_in(events, upto, self._known[frame], frame)
            if frame == view.frame:
                sums = self._sums[frame] + _sums(drafts)
            found += drafts
        if view.granularity == "scene":  # who drafted nothing is of no interest there
            found = [draft for draft in found if draft.stage != "none"][-MOST_DRAFTS:]
        if view.granularity != "event":
            found = [replace(draft, now=False) for draft in found]
        return found, sums


def drafts_in(events: Sequence[Event], upto: int, decoding: Iterable[str], frame: int = 0) -> list[Draft]:
    """What decoding requests drafted in a frame, after `upto` of its events, in the batch's order."""
    theirs = [e for e in events if isinstance(e, TokensDrafted | TokensForced)]
    known, slots = set(decoding), {e.request: e.slots for e in theirs}
    forced = {e.request for e in theirs if isinstance(e, TokensForced)}
    found: dict[str, Draft] = {}
    last = ""  # whose drafts were verified last: SlotsFreed names nobody
    for at, event in enumerate(events[:upto]):
        name = getattr(event, "request", last)
        change: dict[str, Any] = {}
        if isinstance(event, ev.BatchScheduled):
            found = {name: Draft(name, frame) for name in event.requests if name in known}
        elif isinstance(event, ev.RequestRetracted):
            known.discard(name)
        elif isinstance(event, ev.SlotsAllocated) and slots.get(name, ()) == event.slots:
            change = {"stage": "slots", "slots": event.slots, "forced": name in forced}
        elif isinstance(event, TokensDrafted):
            change = {
                "stage": "drafted", "source": event.source, "tokens": event.tokens, "slots": event.slots,
            }  # fmt: skip
        elif isinstance(event, TokensForced):
            change = {"stage": "forced", "tokens": event.tokens, "slots": event.slots, "forced": True}
        elif isinstance(event, DraftVerified):
            last, stage = name, "verified" if _gives_back(events[at + 1 : at + 2]) else "returned"
            change = {"stage": stage, "accepted": event.accepted, "own": event.tokens[event.accepted :]}
        elif _gives_back([event]):
            change = {"stage": "returned", "back": event.slots}  # type: ignore[attr-defined]
        elif isinstance(event, ev.TokenSampled) and name in found and found[name].stage == "none":
            change = {"own": (event.token,)}
        elif isinstance(event, ev.TokenSampled) and name in found and found[name].stage == "forced":
            said = found[name].said + 1
            change = {"said": said, "own": (event.token,) if said > len(found[name].tokens) else ()}
        if change and name in found:
            found[name] = replace(found[name], now=at == upto - 1, **change)
    return list(found.values())


def _gives_back(following: Sequence[Event]) -> bool:
    return any(isinstance(event, ev.SlotsFreed) and event.cause == "rejected" for event in following)


def _sums(drafts: Iterable[Draft]) -> DraftSums:
    """What these come to, as far as it is known: a request that has said nothing yet counts as no pass."""
    total = DraftSums()
    for draft in drafts:
        if draft.stage in ("verified", "returned"):
            said = draft.accepted + len(draft.own)
            total += DraftSums(1, said, 1, said, len(draft.tokens), draft.accepted)
        elif draft.said:
            total += DraftSums(1, draft.said, forced=len(draft.tokens))
        elif draft.own:
            total += DraftSums(1, 1)
    return total


def draft_pages(drafts: Iterable[Draft], page_size: int) -> list[tuple[str, str, list[int]]]:
    """(fate, request, pages) of pages in which drafts lie or lay: "held" before they are verified,
    "accepted", "rejected" as long as they are not yet free, "returned"; "forced" from the start. The last
    that names a page counts.
    """
    found: list[tuple[str, str, list[int]]] = []
    for draft in drafts:
        if draft.forced:
            parts = {"forced": draft.slots}
        elif draft.stage in ("slots", "drafted"):
            parts = {"held": draft.slots}
        elif draft.stage == "verified":
            parts = {"rejected": draft.rejected, "accepted": draft.slots[: draft.accepted]}
        else:
            parts = {"returned": draft.back, "accepted": draft.slots[: draft.accepted]}
        for fate, slots in parts.items():
            if slots:
                found.append((fate, draft.request, sorted({slot // page_size for slot in slots})))
    return found


def told(draft: Draft, what: str = "drafted") -> str:
    """Where a request's drafts stand, in few words. what: "forced" where nobody drafts."""
    if draft.stage == "none":
        return f"nothing {what}" if draft.own else f"nothing {what} yet"
    if draft.stage == "slots":
        return f"{_slots(draft.slots)} handed out"
    if draft.stage == "forced":
        return f"{len(draft.tokens)} forced by its grammar, in {_slots(draft.slots)}"
    if draft.stage == "drafted":
        return f"held in {_slots(draft.slots)}"
    held = f"{draft.accepted} of {len(draft.tokens)} accepted"
    if not draft.rejected:
        return held
    if draft.stage == "verified":
        return f"{held}; {_slots(draft.rejected)} to give back"
    kept = len(draft.rejected) - len(draft.back)
    back = [f"{_slots(draft.back)} given back"] if draft.back else []
    return f"{held}; {', '.join(back + [f'{kept} kept in a page in use'] * (kept > 0))}"


def _slots(slots: Sequence[int]) -> str:
    """In the order in which they are used: slot 7; slots 38–41, 45."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    said = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
    return f"slot{'s' * (len(slots) > 1)} {said}"


def is_drafting(header: State) -> bool:
    """A recording of an engine whose passes may yield several tokens: with drafts, or jump-forward."""
    config = header.get("config") or {}
    return bool(config.get("speculative") or config.get("jump_forward"))
