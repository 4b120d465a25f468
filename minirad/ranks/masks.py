"""Token masks: functions that rank 0 alone has. The others hear what they answered, one broadcast a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from minirad.parts import Pending, Result
from minirad.ranks.group import Group
from minirad.runner import checked_mask
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

Answer = tuple[bytes | None, str]  # packed bits (None: all may come), or what went wrong


def with_masks(launch: Callable[[Batch], Pending], group: Group, vocab: int) -> Callable[[Batch], Pending]:
    """A runner's `launch` whose batches ask each mask on rank 0 only."""

    def launched(batch: Batch) -> Pending:
        asking = [each for each in batch.requests if each.token_mask is not None and _wanted(each)]
        pending = launch(batch)
        return _Masked(pending, asking, group, vocab) if asking else pending

    return launched


def _wanted(request: Request) -> bool:
    return request.computed and request.params.max_new_tokens > 0


class _Masked:
    """A launched batch with requests that have masks."""

    def __init__(self, inner: Pending, asking: list[Request], group: Group, vocab: int) -> None:
        self._inner, self._asking, self._group, self._vocab = inner, asking, group, vocab

    def read(self) -> list[Result]:
        masks = [request.token_mask for request in self._asking]
        mine = [self._answers(request) for request in self._asking] if self._group.rank == 0 else None
        told = self._group.share(mine)
        try:
            for request, mask, answers in zip(self._asking, masks, told, strict=True):
                request.token_mask = _Told(mask, answers, self._vocab)
            return self._inner.read()
        finally:
            for request, mask in zip(self._asking, masks, strict=True):
                request.token_mask = mask

    def _answers(self, request: Request) -> list[Answer]:
        """What a request's mask says, once for each sample that is about to be drawn."""
        return [self._answer(request) for _ in range(1 + request.unbranched)]

    def _answer(self, request: Request) -> Answer:
        assert request.token_mask is not None
        try:
            allowed = request.token_mask(list(request.output))
            if allowed is None:
                return None, ""
            return np.packbits(checked_mask(allowed, self._vocab).cpu().numpy()).tobytes(), ""
        except Exception as error:  # the caller's code: anything may come out of it
            return None, repr(error)


class _Told:
    """Answers as rank 0's mask did."""

    def __init__(self, mask: Any, answers: list[Answer], vocab: int) -> None:
        self._mask, self._answers, self._vocab = mask, iter(answers), vocab

    def __call__(self, output: list[int]) -> Any:
        bits, problem = next(self._answers)
        if problem:
            raise MaskFailed(problem)
        if bits is None:
            return None
        unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._vocab)
        return torch.from_numpy(unpacked.astype(bool))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mask, name)


class MaskFailed(Exception):
    """Shown as what the mask itself raised."""

    def __repr__(self) -> str:
        return str(self)
