"""Drafts by looking them up: what followed the last few tokens when they stood in the text before.

Needs no model and no slots of its own. Good where replies repeat their prompt (summaries, edits, code).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minirad.cache.node import Slots
from minirad.config import EngineConfig
from minirad.schedule.request import Request
from minirad.speculative.runner import Ahead, DraftRunner, Verified

__all__ = ["NgramDrafter", "look_up"]

SHORTEST = 2  # a single token is found almost anywhere, and says little about what follows


class NgramDrafter:
    """Looks drafts up in prompt and reply. longest: how many last tokens are looked for at most."""

    source = "ngram"
    layers = 0

    def __init__(self, config: EngineConfig) -> None:
        self.longest = config.draft_ngram

    def around(self, runner: Any) -> DraftRunner:
        """The runner that verifies the drafts."""
        return DraftRunner(runner, self)

    def propose(self, request: Request, most: int) -> int:
        """How many tokens it drafts for a request, `most` at most."""
        found = Ahead.of(request).guess = look_up(request.tokens, most, self.longest)
        return len(found)

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """The drafts themselves: `counts[i]` tokens of each request."""
        return [
            request.draft.guess[:count] if count else []
            for request, count in zip(requests, counts, strict=True)
        ]

    def learn(self, verified: Verified, results: list[Any]) -> None:
        """What a forward pass said is of no use here."""

    def branched(self, sample: Request, result: Any) -> None:
        """A sample parted from its leader: nothing to do."""

    def use(self, model: Any) -> None:
        """Other weights draft no other tokens."""


def look_up(tokens: Slots, most: int, longest: int) -> list[int]:
    """What followed when the last n tokens stood in `tokens` before, `most` tokens at most.

    The largest n counts, from `longest` down; of several places the last one. Where the copy comes to the end
    of what there is, it goes on with itself: in "a b a b" the last two are followed by "a b a b ...".
    """
    size = len(tokens)
    for n in range(min(longest, size - 1), min(SHORTEST, longest) - 1, -1):
        begins = np.ones(size - n, dtype=bool)  # where the last n tokens begin, the end itself left out
        for at in range(n):
            begins &= tokens[at : size - n + at] == tokens[size - n + at]
        places = np.flatnonzero(begins)
        if len(places):
            follows = int(places[-1]) + n
            period = size - follows
            return [int(tokens[follows + at % period]) for at in range(most)]
    return []
