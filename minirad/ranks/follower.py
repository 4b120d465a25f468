"""The other ranks: do what rank 0 says, until its run is over."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from typing import Any, NoReturn, cast

from minirad.cache.node import RadixKey
from minirad.errors import RankLost, RanksDiffer
from minirad.ranks.build import build, send_weights, shard
from minirad.ranks.group import Group, join
from minirad.ranks.messages import AHEAD, END, NEW, STEP, AskedFor, Message
from minirad.ranks.steps import RankSteps
from minirad.ranks.watching import Sender


def follow() -> NoReturn:
    """Follows rank 0 and ends this process: code 0 when its run is over, 1 with a sentence if it broke.

    ValueError on rank 0, which nobody leads, and where there are no other processes.
    """
    group = join()
    if group.rank == 0:
        raise ValueError("follow() is for the other ranks: rank 0 makes engines and is asked for replies")
    code = _follow(group)
    # Where all is lost, gloo's threads may still wait; and in another thread SystemExit ends that alone.
    if code or threading.current_thread() is not threading.main_thread():
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _follow(group: Group) -> int:
    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all: rank 0 says what comes
            signal.signal(each, signal.SIG_IGN)  # of it, and may finish what it has begun; this ends then
    engines: dict[int, Follower] = {}
    try:
        while (message := group.hear()).action != END:
            for number in message.dropped:
                engines.pop(number, None)
            with contextlib.suppress(RanksDiffer):  # rank 0 tells of it, and may go on with other engines
                _do(group, engines, message)
        group.end()
        return 0
    except RankLost as error:
        print(f"minirad: {error}", file=sys.__stderr__, flush=True)
    except Exception as error:
        print(f"minirad: {group.fail(error)}", file=sys.__stderr__, flush=True)
    return 1


def _do(group: Group, engines: dict[int, Follower], message: Message) -> None:
    if message.action == NEW:
        with contextlib.suppress(ValueError):  # which rank 0 has, too
            engines[message.engine] = Follower(group, message)
    else:
        engines[message.engine].do(message)


class Follower(RankSteps):
    """An engine of another rank: takes inputs from rank 0, and has outputs that nobody reads."""

    def __init__(self, group: Group, message: Message) -> None:
        config, sent, packed = message.more
        self.group, self.number = group, message.engine
        group.place = f"the beginning of engine {self.number}"
        tokenizer = None if packed is None else pickle.loads(packed)
        super().__init__(parts=build(group, config, sent, None, tokenizer))
        self._on_this_rank()
        self._sender: Sender | None = None

    def do(self, message: Message) -> None:
        """Takes the inputs of a message, and does what it says."""
        with self.transaction:
            if self._copier is not None:
                self._copier.decisions.extend(message.decisions)
            for name, arguments in message.inputs:
                getattr(self, f"take_{name}")(*arguments)
            if self._copier is not None:
                self._copier.ended = message.ended
            if message.action == STEP:
                self._begin()
                self._step()
            elif message.action == AHEAD:
                self._ahead()
            elif message.more is not None:
                what, more = message.more
                getattr(self, f"take_{what}")(more)
            self.outbox.take()

    def take_enqueue(self, asked: AskedFor) -> None:
        self._enqueue(asked.request())

    def take_abort(self, request_id: str) -> None:
        self._abort(request_id)

    def take_drain(self) -> None:
        self._drain()

    def take_pin(self, number: int, data: bytes, namespace: Any, width: int) -> None:
        self._pin(number, RadixKey._from_bytes(data, namespace, width))

    def take_unpin(self, number: int) -> None:
        self._unpin(number)

    def take_flush(self) -> None:
        self._flush()

    def take_evict_by(self, policy: str) -> None:
        self._evict_by(policy)

    def take_make_room(self, slots: int) -> None:
        self.cache_manager.make_room(slots)

    def take_poll(self, *wait: bool) -> None:
        cast(Any, self.cache).poll(*wait)

    def take_wait_for_copies(self) -> None:
        self.cache_manager.wait_for_copies()

    def take_weights(self, sent: Any) -> None:
        weights = send_weights(self.group, None, sent)
        self._use_weights(shard(self.group, sent[0], weights, self.device))

    def take_watch(self, _: None) -> None:
        self._sender = Sender(self, self.group)

    def take_unwatch(self, _: None) -> None:
        assert self._sender is not None
        self._sender.close()
        self._sender = None

    def _differs(self, parts: list[tuple[Any, str]]) -> None:
        self._differ = "rank 0 says what"
        if self._sender is not None:
            self._sender.differ()
            self._sender = None
        raise RanksDiffer(self._differ)

    def _send_frames(self) -> None:
        if self._sender is not None:
            self._sender.send()


__all__ = ["Follower", "follow"]
