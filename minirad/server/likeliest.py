"""The k likeliest tokens at each place (`top_logprobs`), for the requests that ask for them and no others.

A request asks by its token mask: `Asking` allows what another mask allows, or everything, and notes what was
likeliest. A mask also keeps the engine from launching a step before the last one was read, so that the logits
are still there. While somebody asks, `Watch` stands in front of the runner's `launch`; else nothing does.
Ranks that compute the same need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Top = tuple[tuple[int, float], ...]  # token ids and their log-probabilities, the likeliest first


class Asking:
    """A token mask that also asks for the `count` likeliest tokens.

    now: of each sample, by its index, what the last step that drew tokens for it found at each place (drafts
    make several). prompt: by position, of those prompt tokens whose log-probability was asked for.
    """

    def __init__(self, count: int, mask: Any = None) -> None:
        self.count, self._mask = count, mask
        self.ends_reply: bool = getattr(mask, "ends_reply", False)
        self.forced = getattr(mask, "forced", None)
        self.now: dict[int, list[Top]] = {}
        self.prompt: dict[int, Top] = {}

    def __call__(self, output: list[int]) -> Any:
        return None if self._mask is None else self._mask(output)

    def of_next(self, index: int) -> Top:
        """What was likeliest at the next token's place of a sample that is told of its tokens one by one."""
        found = self.now.get(index)
        return found.pop(0) if found else ()


class Watch:
    """Notes the likeliest tokens of a runner's batches, for as long as somebody asks (`begin`, `end`)."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._asking, self._launch = runner, 0, runner.launch
        self._before: Any = None  # what stood in front of the runner's own `launch` already

    def begin(self) -> None:
        """One more asks."""
        self._asking += 1
        if self._asking == 1:
            self._launch, self._before = self._runner.launch, vars(self._runner).get("launch")
            self._runner.launch = self.launch

    def end(self) -> None:
        """One less."""
        self._asking -= 1
        if self._asking:
            return
        del self._runner.launch  # the class's own is there again
        if self._before is not None:
            self._runner.launch = self._before

    def launch(self, batch: Any) -> Any:
        """The runner's, whose batch is looked at when it is read."""
        pending = self._launch(batch)
        asks = any(isinstance(request.token_mask, Asking) for request in batch.requests)
        return _Watched(pending) if asks else pending


class _Watched:
    """A launched batch whose logits are looked at before they are drawn from."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def read(self) -> Any:
        computed = self._pending
        while not hasattr(computed, "logits"):
            computed = computed._inner  # a batch of ranks, around what this one computed
        note(computed)
        return self._pending.read()


def note(computed: Any) -> None:
    """Tells each mask that asks what was likeliest; computed: a runner.Computed."""
    from minirad.runner import logprob_positions  # brings torch, which is here by now

    places: list[tuple[Asking, int, bool]] = []
    rows: list[int] = []
    first, batch = 0, computed.batch
    drafts = getattr(computed, "drafts", None) or [()] * len(batch.requests)
    for request, start, last, draft in zip(batch.requests, batch.starts, computed.last, drafts, strict=True):
        asking, end = request.token_mask, last + len(draft)  # behind the last token's row are its drafts'
        if isinstance(asking, Asking):
            positions = logprob_positions(request, start)
            places += [(asking, at + 1, True) for at in positions]
            rows += range(first, first + len(positions))
            if request.computed or draft:
                for index in range(request.index, request.index + 1 + request.unbranched):
                    asking.now[index] = []
                    places += [(asking, index, False)] * (end + 1 - last)
                    rows += range(last, end + 1)
        first = end + 1
    if rows:
        found = likeliest(computed.logits[rows], max(asking.count for asking, _, _ in places))
        for (asking, at, of_prompt), row in zip(places, found, strict=True):
            top = row[: asking.count]
            if of_prompt:
                asking.prompt[at] = top
            else:
                asking.now[at].append(top)


def likeliest(logits: Any, count: int) -> Sequence[Top]:
    """The `count` likeliest tokens of each row of logits `[N, vocab]`, of equals the smaller id first."""
    logits = logits.float()
    values, ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    values = values - logits.logsumexp(-1, keepdim=True)
    pairs = (zip(*row, strict=True) for row in zip(ids.tolist(), values.tolist(), strict=True))
    return [tuple(sorted(row, key=lambda pair: (-pair[1], pair[0]))) for row in pairs]
