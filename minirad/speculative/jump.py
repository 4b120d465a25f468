"""Jump-forward: where a request's token mask leaves no choice, its tokens are computed in one pass, undrawn.

A grammar knows much of a reply in advance: the braces, names and quotes of JSON. A mask that can tell has a
method `forced(output, most)` (grammar.py): the tokens that must follow, each the only one that the mask
allows behind those before it. They join the pass of the last token as drafts do; but nothing can reject
them, nothing is drawn for them, and the mask is asked only for the token behind them. How many is not a
matter of `draft_tokens`: those of a step are `chunk_tokens` at most, as a prompt's are. Where nothing is
forced, a drafter may draft.

A reply is the same with it and without, token for token, with the same log-probabilities (as far as one pass
over several tokens gives the numbers of several passes; that is so with drafts as well). llguidance's own
masks see to that: where the next bytes are certain they allow one token, the first of the usual way to write
these bytes, although another way to cut them would match as well. What is not the same: a mask is not asked
at the places of forced tokens.
"""

from __future__ import annotations

from typing import Any

from minirad.schedule.request import Request
from minirad.speculative.runner import Ahead, DraftRunner, Verified

__all__ = ["NoDrafter", "forced_tokens"]


def forced_tokens(request: Request, most: int, texts: Any, vocab: int) -> list[int]:
    """What must follow a request's reply, `most` tokens at most; nothing where its mask cannot tell.

    It ends before a token that ends the reply: that one comes as the token behind them, and needs no KV.
    texts: says where a reply ends (a Tokenizing); vocab: how many ids the model has.
    """
    ask = getattr(request.token_mask, "forced", None)
    if ask is None or most < 1:
        return []
    ahead = Ahead.of(request)
    try:
        tokens = [int(token) for token in ask(list(request.output), most)][:most]
        for at, token in enumerate(tokens):
            ahead.output = request.output + tokens[: at + 1]
            if not 0 <= token < vocab or texts.has_ended(ahead):
                return tokens[:at]
    except Exception:  # the caller's code: the mask is asked for the next token, and then it is told
        return []
    return tokens


class NoDrafter:
    """Drafts nothing: an engine whose only several tokens a pass are forced ones."""

    source = "none"
    layers = 0

    def around(self, runner: Any) -> DraftRunner:
        """The runner that computes what is forced."""
        return DraftRunner(runner, self)

    def propose(self, request: Request, most: int) -> int:
        """Nothing."""
        return 0

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Nothing for each."""
        return [[] for _ in requests]

    def learn(self, verified: Verified, results: list[Any]) -> None:
        """There is nothing to learn."""

    def branched(self, sample: Request, result: Any) -> None:
        """Nothing is kept of a request."""

    def use(self, model: Any) -> None:
        """Any weights do."""
