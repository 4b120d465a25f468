"""What an engine with drafts tells: which tokens it guessed for a request, and how many of them held; and
which ones a grammar forced, so that nothing was to be guessed.

They come in this order, in the step's own frame: TokensDrafted, DraftVerified, then SlotsFreed (cause
"rejected") where a whole page of rejected drafts is free again, then the TokenSampled of what was accepted.
TokensForced stands in the place of the first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minirad.observe.event import Event, Headline, Ints, ReplayState, Word, expect, request_order
from minirad.observe.events import listed

MOST_DRAFTED = 1 << 16  # tokens of one draft


@dataclass(frozen=True, slots=True)
class TokensDrafted(Event):
    """Tokens were guessed behind a request's last one, and have these slots, the last ones of its row.

    source: "ngram" (found earlier in its text) or "eagle" (a draft head).
    """

    request: str
    tokens: Ints
    slots: Ints
    source: str

    word = Word("draft")

    def describe(self) -> str:
        count = len(self.tokens)
        return f"{self.request}: {count} token{'s' * (count != 1)} drafted ({self.source})"

    def says(self) -> Ints:
        return self.tokens

    def check(self, state: ReplayState) -> None:
        Event.check(self, state)
        expect(
            len(self.tokens) == len(self.slots) <= MOST_DRAFTED,
            f"TokensDrafted has {len(self.tokens)} tokens and {len(self.slots)} slots",
        )


@dataclass(frozen=True, slots=True)
class DraftVerified(Event):
    """The model computed a request's drafts. The last `drafted - accepted` slots of its row are given up.

    accepted: of `drafted` tokens those that the model chose itself and went on from. tokens: all that the
    request gets in this step: those, and the one that the model chose behind them (not after an error).
    """

    request: str
    drafted: int
    accepted: int
    tokens: Ints

    word, headline = Word("verify"), Headline(85, "decode")

    def describe(self) -> str:
        return f"{self.request}: {self.accepted} of {self.drafted} drafted tokens accepted"

    def says(self) -> Ints:
        return self.tokens

    def apply(self, state: ReplayState) -> None:
        slots = state.requests[self.request]["slots"]
        del slots[len(slots) - (self.drafted - self.accepted) :]

    def check(self, state: ReplayState) -> None:
        Event.check(self, state)
        expect(
            0 <= self.accepted <= self.drafted <= len(state.requests[self.request]["slots"]),
            f"{self.accepted} of {self.drafted} drafts accepted, in a row of "
            f"{len(state.requests[self.request]['slots'])} slots",
        )

    @classmethod
    def together(cls, events: Sequence[DraftVerified]) -> tuple[str, str]:
        accepted, drafted = sum(e.accepted for e in events), sum(e.drafted for e in events)
        who = listed(sorted({e.request for e in events}, key=request_order))
        got = sum(len(e.tokens) for e in events)
        said = f"{got} token{'s' * (got != 1)} for {who}"
        return cls.headline.tone, f"{said}: {accepted} of {drafted} drafted tokens accepted"


@dataclass(frozen=True, slots=True)
class TokensForced(Event):
    """A request's grammar allows only these tokens behind its last one. They were computed together with it.

    slots: those of their KV, the last ones of the request's row. None of them is ever given up.
    """

    request: str
    tokens: Ints
    slots: Ints

    word, headline = Word("forced"), Headline(84, "decode")

    def describe(self) -> str:
        count = len(self.tokens)
        return f"{self.request}: {count} token{'s' * (count != 1)} forced by its grammar, not sampled"

    def says(self) -> Ints:
        return self.tokens

    def check(self, state: ReplayState) -> None:
        Event.check(self, state)
        row = state.requests[self.request]["slots"]
        count = len(self.tokens)
        expect(
            0 < count == len(self.slots) <= MOST_DRAFTED and list(self.slots) == row[-count:],
            f"TokensForced has {count} tokens and the slots {list(self.slots)}, which do not end its row",
        )

    @classmethod
    def together(cls, events: Sequence[TokensForced]) -> tuple[str, str]:
        count = sum(len(e.tokens) for e in events)
        who = listed(sorted({e.request for e in events}, key=request_order))
        return cls.headline.tone, f"{count} token{'s' * (count != 1)} forced for {who}, not sampled"
