"""A rank is lost at each exchange of a run, one after another: rank 0's books are right whichever it was.

No other process, and no time: the group is one of this rank alone, whose n-th exchange raises.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_config

from minirad.config import EngineConfig, SamplingParams
from minirad.errors import RankLost
from minirad.model.llama import LlamaModel, random_weights
from minirad.ranks.steps import RankSteps

MODEL = LlamaModel(tiny_config(), random_weights(tiny_config(), 0, dtype=torch.float32, device="cpu"))
PROMPTS = [[5] * 9, [5, 6] * 4, [5, 5, 5, 7, 8]]


class Alone:
    """A group of one rank. left: exchanges until one raises."""

    rank, size, place = 0, 1, ""

    def __init__(self, left: int) -> None:
        self.left, self.broken, self.engines = left, "", set[Any]()

    def _exchange(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.broken = "rank 1 ended"
            raise RankLost(self.broken)

    def gather(self, data: bytes) -> list[bytes]:
        self._exchange()
        return [data]

    def share(self, value: Any) -> Any:
        self._exchange()
        return value


def engine_of(group: Any, **config: Any) -> RankSteps:
    engine = RankSteps(EngineConfig(**{"kv_tokens": 64, "max_running": 4, **config}), model=MODEL)
    engine.group = group
    engine._on_this_rank()
    return engine


@pytest.mark.parametrize(
    "config", [{"overlap": False}, {"overlap": False, "page_size": 4, "chunk_tokens": 6}]
)
def test_whichever_exchange_fails_the_books_are_right(config: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    for number in range(100):
        engine = engine_of(group := Alone(number), **config)
        engine.add_request([5, 5, 6], params, token_mask=lambda output: None)
        try:
            engine.generate(PROMPTS, params)
        except RankLost:
            assert group.broken
            engine.check()
            assert all(request.row == -1 for request in engine.scheduler.waiting)
            continue
        assert number > 15 and not group.broken
        break
    else:
        pytest.fail("the run never ended")
