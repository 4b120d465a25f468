"""Rank 0: an engine as any other, which tells the other ranks what it was asked for.

engine.py finds this file by name when a configuration says tp > 1. What was asked between two steps is noted
in its order and told at the beginning of the next one; nothing that is decided here is told.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from minirad import machine
from minirad.cache.node import RadixKey
from minirad.config import EngineConfig
from minirad.engine import Engine
from minirad.errors import RankLost, RanksDiffer
from minirad.errors import said as shown
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.observe import rank_events
from minirad.observe.recording import Recording
from minirad.parts import Parts
from minirad.ranks import digest
from minirad.ranks.build import Sent, build, send_weights, shard
from minirad.ranks.follower import follow
from minirad.ranks.group import join
from minirad.ranks.messages import AHEAD, NEW, NOTHING, STEP, AskedFor, Keys, Message
from minirad.ranks.model import local_config
from minirad.ranks.steps import RankSteps
from minirad.ranks.watching import receive
from minirad.schedule.request import Request
from minirad.transaction import Transaction


def ranked(kind: type[Engine], tp: int) -> type[Engine]:
    """On rank 0 the class of an engine that tells the others; on these it follows, and does not return."""
    if issubclass(kind, RankSteps):
        return kind
    if join(tp).rank != 0:
        follow()
    if kind not in _TELLING:
        _TELLING[kind] = RankedEngine if kind is Engine else type(kind.__name__, (RankedEngine, kind), {})
    return _TELLING[kind]


_TELLING: dict[Any, type[Engine]] = {}  # by the class that a caller made an engine of


class _Whole(Transaction):
    """Ctrl-C waits for the end of a step: a forward pass in which others wait is not torn."""

    def let_through(self) -> Any:
        return contextlib.nullcontext()


class RankedEngine(RankSteps):
    """Rank 0's engine. `told`: what the other ranks were told last, as a snapshot has it."""

    def __init__(
        self, config: EngineConfig | None = None, cache: Any = None, *, model: Any = None,
        tokenizer: Any = None, parts: Parts | None = None,
    ) -> None:  # fmt: skip
        assert isinstance(config, EngineConfig)
        for name, given in (("cache", cache), ("parts", parts)):
            if given is not None:
                raise ValueError(f"tp={config.tp}: {name}= cannot be given, each rank makes its own")
        self.group = join(config.tp)
        self._inputs: list[tuple[str, tuple[Any, ...]]] = []
        self._new: list[str] = []  # ids of the requests among them
        self._keys = Keys()
        self._differ = ""
        self.told = rank_events.new_ranks(self.group.size)
        self.number = 0
        self.recordings: list[Recording] = []  # of the other ranks, while they are watched (watching.py)
        self.stop_watching: Callable[[], None] = lambda: None
        with Transaction(ev.EventBus()), self.group.lock:
            made = self._make(config, model, tokenizer)
        super().__init__(parts=made)
        self.transaction = _Whole(self.bus)
        self._on_this_rank()
        for owner, name in ((self.cache_manager, "make_room"), (self.cache, "poll")):
            if hasattr(owner, name):  # callers do that by hand, a page's "evict" say
                setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _make(self, config: EngineConfig, model: Any, tokenizer: Any) -> Parts:
        machine.check_arguments(config, None, model)
        sent: Sent | None = None
        if model is not None:
            _require_whole_model(model)
            local_config(model.config, config.tp)
            sent = model.config, model.dtype
        else:
            machine.model_directory(config)  # what has to be fetched or converted is, once
        packed = None if tokenizer is None else _pickled(tokenizer)
        self.number = number = self.group.next_engine()
        self.group.place = f"the beginning of engine {number}"
        self.group.tell(Message(NEW, number, more=(config, sent, packed)))
        try:
            parts = build(self.group, config, sent, model, tokenizer)
        except ValueError:
            self.group.dropped.append(number)
            raise
        weakref.finalize(self, self.group.dropped.append, number)
        return parts

    # ------------------------------------------------------------ telling

    def _note(self, name: str, *arguments: Any) -> None:
        self._inputs.append((name, arguments))

    def _noting(self, name: str, call: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            if self.transaction.running:
                return call(*arguments, **named)
            with self.transaction:
                result = call(*arguments, **named)
                self._note(name, *arguments, *named.values())
            return result

        return noted

    def tell(self, action: str, more: Any = None) -> None:
        """One broadcast: what was asked for since the last one, and what is done now."""
        if self._differ:
            raise RanksDiffer(self._differ)
        self._begin()
        copier = self._copier
        ended = 0 if copier is None else copier.count()
        decisions = [] if copier is None else list(copier.decisions)
        inputs, self._inputs = self._inputs, []
        size = self.group.tell(Message(action, self.number, inputs, ended, decisions=decisions, more=more))
        if copier is not None:
            copier.decisions.clear()
            copier.live = True
        new, self._new = self._new, []
        said = inputs if more is None else [*inputs, (more[0], ())]
        self._say(rank_events.told(self._now, said, new, size, self.group.size))

    def _say(self, event: Any) -> None:
        """A rank event, which a snapshot shows also where nobody heard it."""
        self.told = event.state(self.told)
        if self.bus.wants(type(event)):
            self.bus.emit(event)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks are at the same."""
        with self.group.together():
            try:
                yield
            finally:
                if self._copier is not None:
                    self._copier.live = False

    # ------------------------------------------------------------ steps

    def _step(self) -> Any:
        with self.together():
            self.tell(STEP)
            return super()._step()

    def advance(self) -> None:
        with self.transaction:
            overlap = self.overlap if self.config.overlap and not self._left else None
            if overlap is not None and overlap.possible():
                with self.together():
                    self.tell(AHEAD)
                    self._ahead()
            else:
                self._drain()
                self._step()

    def _agreed(self, mine: bytes) -> None:
        self._say(rank_events.RanksAgreed(self.steps, mine.hex(), self.group.size))

    def _send_frames(self) -> None:
        if self.recordings:
            receive(self.group, self.recordings)

    def _differs(self, parts: list[tuple[Any, str]]) -> None:
        mine, failure = parts[0]
        texts = None if self.tokenizing.is_bare else self.texts
        rank, what = self.group.size - 1, "the ranks are not at the same place"
        for rank, (other, problem) in enumerate(parts):
            known = mine["books"] and other["books"]
            found = digest.difference(texts, mine, other, rank) if known else ""
            if not found and problem != failure:
                found = f"rank {rank if problem else 0} failed alone: {problem or failure}"
            if found:
                what = found
                break
        self._differ = f"{self.group.place}: {what}"
        self._say(rank_events.RanksDiffered(self._now, rank, what))
        with contextlib.suppress(RankLost):  # what differs is known, and is what is to be told
            self._send_frames()
        raise RanksDiffer(self._differ)

    # ------------------------------------------------------------ what is asked for

    def _enqueue(self, request: Request) -> None:
        asked = AskedFor.of(request, self._keys, request.seed)
        super()._enqueue(request)
        self._note("enqueue", asked)
        self._new.append(request.id)

    def _abort(self, request_id: str) -> bool:
        found = super()._abort(request_id)
        if found:
            self._note("abort", request_id)
        return found

    def _drain(self) -> None:
        if self.overlap is not None and self.overlap.in_flight is not None:
            self._note("drain")
        super()._drain()

    def _pin(self, number: int, key: RadixKey) -> Any:
        match = super()._pin(number, key)
        self._note("pin", number, key.data, (self._keys.sent(key.extra_key), key.is_bigram), key.width)
        return match

    def _unpin(self, number: int) -> None:
        super()._unpin(number)
        self._note("unpin", number)

    def _flush(self) -> None:
        super()._flush()
        self._note("flush")

    def _evict_by(self, policy: str) -> None:
        super()._evict_by(policy)
        self._note("evict_by", policy)

    def update_weights(self, model: Any) -> None:
        machine.check_weights(model, self.model)
        _require_whole_model(model)
        super().update_weights(model)

    def _use_weights(self, model: Any) -> None:
        with self.together():
            self.tell(NOTHING, more=("weights", (model.config, model.dtype)))
            weights = send_weights(self.group, model, (model.config, model.dtype))
        super()._use_weights(shard(self.group, model.config, weights, self.device))

    def wait_for_copies(self) -> bool:
        """Returns when no copy between the tiers is under way any more; False if there was none."""
        with self.transaction:
            self._drain()
            waited = self.cache_manager.wait_for_copies()
            self._note("wait_for_copies")
            return waited

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "ranks": dict(self.told)}


def _require_whole_model(model: Any) -> None:
    if type(model) is not LlamaModel:
        raise ValueError(f"only a plain LlamaModel can be cut into ranks, got {shown(model)}")


def _pickled(tokenizer: Any) -> bytes:
    try:
        return pickle.dumps(tokenizer, protocol=5)
    except Exception as error:
        raise ValueError(f"the tokenizer cannot be sent to the other ranks: {error}") from error


__all__ = ["RankedEngine", "ranked"]
