"""How good a choice was: against an oracle that knows what every worker really holds.

The regret of a choice is how many prompt tokens more another worker that was alive would have had at that
moment. (What became of it until the request was admitted: `judged_in_the_end` of
route_events.py.) It is no reproach: who balances loads, or fills an empty worker, regrets on purpose.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from minirad.cache.radix_cache import Slots
from minirad.errors import require
from minirad.route.trees import PrefixView


@dataclass(frozen=True, slots=True)
class Judgement:
    """best: the most tokens of the prompt that a worker alive held; worker: the first that did.

    had: what the chosen one held.
    """

    best: int
    worker: int
    had: int

    @property
    def regret(self) -> int:
        """Tokens that the best worker had, and the chosen one had not."""
        return self.best - self.had


def judge(matches: Sequence[int], alive: Sequence[bool], chosen: int) -> Judgement:
    """A choice, where each worker really held so many tokens of the prompt. The chosen one is alive."""
    require(alive[chosen], f"worker {chosen} was chosen, and is not alive")
    best = max((at for at, is_alive in enumerate(alive) if is_alive), key=lambda at: (matches[at], -at))
    return Judgement(matches[best], best, matches[chosen])


class Oracle:
    """Judges choices by the workers' true trees. Where one is None, not known, nothing can be said."""

    def __init__(self, trees: Sequence[PrefixView | None]) -> None:
        self.trees = list(trees)

    def judge(
        self, tokens: Slots, alive: Sequence[bool], chosen: int, space: Hashable = None
    ) -> Judgement | None:
        """A choice at this moment, before the request is sent; None where a tree is not known."""
        matches: list[int] = []
        for tree, is_alive in zip(self.trees, alive, strict=True):
            if is_alive and tree is None:
                return None
            matches.append(tree.match(tokens, space) if is_alive and tree is not None else 0)
        return judge(matches, alive, chosen)
