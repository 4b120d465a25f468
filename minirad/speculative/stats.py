"""Running totals of drafts: how many were accepted, and what a forward pass yields with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DraftStats"]


@dataclass(slots=True)
class DraftStats:
    """Since the engine started.

    passes: forward passes over a decoding request (one of a batch of three counts as three); tokens: what
    they yielded. verified: those of them that had drafts to verify; yielded: their tokens. drafted, accepted:
    tokens; an accepted one is one that the model chose itself and went on from. forced: tokens that a grammar
    left no choice about; they count among `tokens`, and as nobody's drafts.
    """

    passes: int = 0
    tokens: int = 0
    verified: int = 0
    yielded: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0

    def add(self, drafted: int, accepted: int, tokens: int, forced: bool = False) -> None:
        """One request's part of a forward pass; forced: what was drafted is what its grammar forces."""
        self.passes += 1
        self.tokens += tokens
        if forced:
            self.forced += drafted
        elif drafted:
            self.verified += 1
            self.yielded += tokens
            self.drafted += drafted
            self.accepted += accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens that a pass with drafts yields in the mean; 0 before the first."""
        return self.yielded / self.verified if self.verified else 0.0

    @property
    def tokens_a_pass(self) -> float:
        """Tokens that a pass over a decoding request yields in the mean, with drafts or without."""
        return self.tokens / self.passes if self.passes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        names = ("passes", "tokens", "verified", "drafted", "accepted", "forced")
        return {
            **{name: getattr(self, name) for name in names},
            "acceptance_length": round(self.acceptance_length, 3),
            "tokens_a_pass": round(self.tokens_a_pass, 3),
        }

    def __str__(self) -> str:
        if not self.passes:
            return "no token was decoded"
        said = f"{self.tokens_a_pass:.2f} tokens a forward pass"
        if self.forced:
            said += f", {self.forced} of {self.tokens} forced by a grammar"
        if not self.verified:
            return said if self.forced else f"{said}, nothing drafted"
        share = f"{self.accepted} of {self.drafted} drafted tokens accepted"
        return f"{said}; {share}, {self.acceptance_length:.2f} tokens a pass with drafts"
