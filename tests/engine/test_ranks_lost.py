"""The ranks are lost at each exchange of a run, one after another: rank 0's books are right whichever it was.

No other process, and no time: the group is one of this rank alone, in whose n-th exchange something happens.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from support import drive, tiny_config
from test_ahead import EagerSteps

from minirad.config import EngineConfig, SamplingParams
from minirad.errors import RankLost, RanksDiffer
from minirad.model.llama import LlamaModel, random_weights
from minirad.ranks import digest
from minirad.ranks import engine as ranks_engine
from minirad.ranks.copies import COPY
from minirad.ranks.engine import RankedEngine
from minirad.ranks.group import Group
from minirad.ranks.messages import Message

MODELS = [
    LlamaModel(tiny_config(), random_weights(tiny_config(), seed, dtype=torch.float32, device="cpu"))
    for seed in (0, 1)
]
PROMPTS = [[5] * 9, [5, 6] * 4, [5, 5, 5, 7, 8]]
REPLY = SamplingParams(max_new_tokens=5, ignore_eos=True)


class Alone(Group):
    """A group of one rank. happen: called in the exchange in which `left` falls below 0."""

    def __init__(self, happen: Callable[[Alone], None]) -> None:
        self.rank, self.size, self.broken, self.place, self.model = 0, 1, "", "the start", None
        self.lock, self.dropped, self.engines = threading.RLock(), list[int](), WeakSet()
        self._engines, self.left, self.happen = 0, 10**9, happen
        self.exchanged: list[str] = []

    def _exchange(self, what: str) -> None:
        self.require_whole()
        self.exchanged.append(what)
        self.left -= 1
        if self.left == -1:
            self.happen(self)

    def _broadcast(self, data: bytes) -> bytes:
        self._exchange("broadcast")
        return data

    def gather(self, data: bytes, patient: bool = False) -> list[bytes]:
        self._exchange("copy" if data[0] == COPY and len(data) > digest.SIZE else "gather")
        return [data]

    def share_tensor(self, tensor: torch.Tensor) -> None:
        self._exchange("weights")

    def model_group(self, device: torch.device) -> None:
        """There is nobody to add up with."""

    def add_up(self, tensor: torch.Tensor) -> None:
        self._exchange("sum")

    def join(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._exchange("logits")
        return [tensor]


def lose(group: Alone) -> None:
    group.broken = "rank 1 ended"
    raise RankLost(group.broken)


def differ(group: Alone) -> None:
    """As the exchange of a step's comparison finds it; in another the ranks cannot be found to differ."""
    if group.exchanged[-1] not in ("gather", "copy"):
        group.left = 0
        return
    for engine in group.engines:
        engine._differ = "rank 1 has lock_ref 2 at n1, rank 0 has 1"
        raise RanksDiffer(engine._differ)


def press(group: Alone) -> None:
    signal.raise_signal(signal.SIGINT)


def ranked(monkeypatch: pytest.MonkeyPatch, group: Alone, ahead: bool, **config: Any) -> Any:
    """Rank 0's engine; ahead: it launches a step before it has read the last one."""
    monkeypatch.setattr(ranks_engine, "join", lambda size: group)
    engine = RankedEngine(EngineConfig(**{"kv_tokens": 40, "max_running": 4, **config}), model=MODELS[0])
    if ahead:
        engine.runner.graphs = EagerSteps(engine)
    return engine


def game(engine: Any) -> None:
    """All that ranks exchange anything for."""
    engine.add_request([5, 5, 6], REPLY, token_mask=lambda output: None)
    for prompt in PROMPTS:
        engine.add_request(prompt, REPLY)
    for _ in range(4):
        engine.step()
    engine.generate(PROMPTS, REPLY)
    engine.add_request([9] * 20, REPLY)
    engine.step()
    engine.update_weights(MODELS[1])
    for prompt in ([7] * 30, [8] * 20, [7] * 31):  # which is loaded back
        engine.generate([prompt], REPLY)


def books(engine: Any) -> None:
    engine.check()
    assert all(request.row == -1 for request in engine.scheduler.waiting)
    assert engine.overlap is None or engine.overlap.in_flight is None


TIERS = {"host_kv_tokens": 60, "load_back_threshold": 1}
CONFIGS = {
    "pages": {"page_size": 4, "chunk_tokens": 6},
    "write_through": {**TIERS, "host_write": "write_through"},
    "write_back": {**TIERS, "host_write": "write_back"},
    "nothing compared": {**TIERS, "host_write": "write_back", "rank_digest": False},
}


SLOW = [pytest.param(name, ahead, 1, marks=pytest.mark.slow) for name in CONFIGS for ahead in (False, True)]


@pytest.mark.parametrize(("name", "ahead", "every"), [("write_back", True, 9), ("pages", False, 37), *SLOW])
@pytest.mark.parametrize(("happen", "error"), [(lose, RankLost), (differ, RanksDiffer)])
def test_whichever_exchange_fails_the_books_are_right(
    monkeypatch: pytest.MonkeyPatch, happen: Any, error: Any, name: str, ahead: bool, every: int
) -> None:
    """Every exchange but the model's sums, of which there are many alike; in the default run some of them."""
    whole = ranked(monkeypatch, Alone(happen), ahead, **CONFIGS[name])
    game(whole)
    exchanged, failed = whole.group.exchanged, 0
    assert {"broadcast", "weights", "sum", "logits"} <= set(exchanged)
    some = [at for at, what in enumerate(exchanged) if what in ("gather", "broadcast") or at % 11 == 0]
    copies = [at for at, what in enumerate(exchanged) if what == "copy"]
    for number in (*some[::every], *copies):
        group = Alone(happen)
        engine = ranked(monkeypatch, group, ahead, **CONFIGS[name])
        group.left = number - len(group.exchanged)
        with contextlib.suppress(error):
            game(engine)
            continue
        failed += 1
        books(engine)
        with pytest.raises(error):
            engine.step()
        books(engine)
    assert failed > len(some) / every / 3


def test_ctrl_c_in_an_exchange_leaves_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["write_back"]
    whole = ranked(monkeypatch, Alone(press), True, **config)
    game(whole)
    pressed = 0
    for number in range(40, len(whole.group.exchanged), 23):
        group = Alone(press)
        engine = ranked(monkeypatch, group, True, **config)
        group.left = number - len(group.exchanged)
        with pytest.raises(KeyboardInterrupt):
            game(engine)
        pressed += 1
        engine.check()
        assert not group.broken
        drive(engine)
        engine.flush_cache()
        assert engine.allocator.available == engine.config.kv_tokens
    assert pressed > 5


def test_an_engine_that_is_let_go_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever that is, or they would keep its KV pool as long as they live."""
    group, told = Alone(lose), list[int]()

    def broadcast(data: bytes) -> bytes:
        told.extend(Message.from_bytes(data).dropped)
        return data

    monkeypatch.setattr(group, "_broadcast", broadcast)
    first, second = (ranked(monkeypatch, group, False, **CONFIGS["pages"]) for _ in range(2))
    for engine in (first, second):  # which tells something in each step
        engine.generate(PROMPTS, REPLY)
    number = first.number
    assert number != second.number and not told
    del first, engine
    gc.collect()
    second.generate(PROMPTS, REPLY)
    assert told == [number]
