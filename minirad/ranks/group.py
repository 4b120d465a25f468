"""The processes of one run: set up once, by torch.distributed and what torchrun puts into the environment.

Two groups of all ranks: one of gloo for what rank 0 tells and what is compared, and one for the model's sums
(NCCL on GPUs, else gloo). Whoever waits for another rank waits `TIMEOUT` seconds at most; a rank that ended
is noticed at once, since its connections close. While rank 0 has nothing to do, a thread of it says so now
and then, so that the others go on waiting.

Who notices that a rank is lost raises the alarm (a key in the store that torchrun keeps, or rank 0); a thread
of every other rank looks there, answers, and ends its process, whatever it waits for. Who did not answer is
who was lost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore
from torch.distributed.rendezvous import rendezvous

from minirad.errors import RankLost
from minirad.ranks import timeout
from minirad.ranks.messages import BEAT, END, Message

FIRST = 4096  # bytes of the one broadcast that most messages are
START = timedelta(minutes=10)  # for all processes to be there, and for a model to be read
LOOK = 0.2  # seconds between two looks at the alarm
ANSWER = 2.0  # seconds in which a living rank answers it
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_joined: Group | None = None


def join(size: int | None = None) -> Group:
    """The group of this run, set up at the first call. size: what the configuration says (tp).

    ValueError, in one sentence, if there are no other processes, or not as many.
    """
    global _joined
    if _joined is None:
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing and not dist.is_initialized():
            raise ValueError(
                f"tp={size} needs {size} processes, and this is one: start it with torchrun, "
                f"`torchrun --nproc-per-node {size} {_typed() or f'-m minirad generate --tp {size} Hello'}`"
            )
        there = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
        _require_size(size, there)
        _joined = Group()
    else:
        _require_size(size, _joined.size)
    return _joined


def _typed() -> str:
    """What was typed, but for Python itself; "" where that is no command of ours and no program."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if words and Path(words[0]).stem == "minirad":  # the script that pip installs
        words = ["-m", "minirad", *words[1:]]
    return shlex.join(words) if words[:2] == ["-m", "minirad"] or (words and words[0].endswith(".py")) else ""


def _require_size(size: int | None, there: int) -> None:
    if size is not None and size != there:
        raise ValueError(
            f"tp={size} needs {size} processes, and here are {there}: "
            f"start it with `torchrun --nproc-per-node {size}`"
        )


def joined() -> Group | None:
    """The group of this run, if it was set up."""
    return _joined


def leave() -> None:
    """Rank 0's run is over: the others end, and this process may join another group."""
    global _joined
    if _joined is not None:
        group, _joined = _joined, None
        group.end()


class Group:
    """All ranks of a run, seen from one of them.

    Attributes:
        rank, size: this one's number, and how many there are.
        model: the process group for the model's sums, once `model_group` was asked for it.
        broken: why no rank can go on, in one sentence; "" while all is well.
        place: what this rank is doing ("step 12"), for sentences.
    """

    def __init__(self) -> None:
        self.timeout = timeout()
        self._store, self.rank, self.size = _processes()
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        self.model: Any = None
        self.broken = ""
        self.place = "the start"
        self.lock = threading.RLock()  # who says something, or waits for something
        self.dropped: list[int] = []
        self.engines: WeakSet[Any] = WeakSet()
        self._busy, self._moved = False, time.monotonic()  # in a step; when something came from others last
        self._engines, self._last, self._ending = 0, time.monotonic(), threading.Event()
        self._first = torch.zeros(FIRST, dtype=torch.uint8)
        work = self._keep_waiting if self.rank == 0 else self._look_out
        self._thread = threading.Thread(target=work, name="minirad ranks", daemon=True)
        self._thread.start()
        if self.rank == 0:
            atexit.register(leave)

    def next_engine(self) -> int:
        self._engines += 1
        return self._engines

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Rank 0: all ranks are at the same, so no heartbeat comes between, and it may not take for ever."""
        with self.lock:
            self._busy, self._moved = True, time.monotonic()
            try:
                yield
            finally:
                self._busy = False

    # ------------------------------------------------------------ what is said

    def tell(self, message: Message) -> int:
        """Rank 0: one broadcast; returns its size in bytes. RankLost if a rank is gone."""
        with self.lock:
            self.require_whole()
            message.dropped = self.dropped[:]
            del self.dropped[: len(message.dropped)]  # the same list: engines that end later add to it
            data = message.to_bytes()
            self._broadcast(data)
            self._last = time.monotonic()
        return len(data)

    def hear(self) -> Message:
        """Another rank: what rank 0 says next, however long it has nothing to say."""
        while True:
            message = Message.from_bytes(self._broadcast(b""))
            if message.action != BEAT:
                return message

    def share(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank, in one broadcast."""
        data = self._broadcast(pickle.dumps(value, protocol=5) if self.rank == 0 else b"")
        return value if self.rank == 0 else pickle.loads(data)

    def share_tensor(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor (on the host) comes into every rank's, which is of the same shape."""
        self._wait(lambda: dist.broadcast(tensor.view(torch.uint8), 0, group=self._control))

    def _broadcast(self, data: bytes) -> bytes:
        first = self._first
        if self.rank == 0:
            whole = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
            first[: len(whole)] = whole[:FIRST]
        self._wait(lambda: dist.broadcast(first, 0, group=self._control))
        if self.rank != 0:
            length = int.from_bytes(bytes(first[:8].tolist()), "little") + 8
            whole = torch.empty(length, dtype=torch.uint8)
            whole[:FIRST] = first[:length]
        if len(whole) > FIRST:
            rest = whole[FIRST:].contiguous()
            self._wait(lambda: dist.broadcast(rest, 0, group=self._control))
            whole[FIRST:] = rest
        return whole[8:].numpy().tobytes()

    def gather(self, data: bytes, patient: bool = False) -> list[bytes]:
        """Every rank's bytes, as many from each; on every rank. patient: a model is being read meanwhile."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = START if patient else timedelta(seconds=self.timeout)
        self._wait(lambda: self._control.allgather([parts], [mine], options).wait())
        return [part.numpy().tobytes() for part in parts]

    def gather_any(self, value: Any, patient: bool = False) -> list[Any]:
        """Every rank's value, on every rank."""
        data = pickle.dumps(value, protocol=5)
        sizes = [int.from_bytes(each, "little") for each in self.gather(_number(len(data)), patient)]
        parts = self.gather(data.ljust(max(sizes), b"\0"))
        return [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def all_well(self, fine: bool) -> bool:
        """Whether it is so on every rank."""
        return min(self.gather(bytes([fine]))) == b"\1"

    def model_group(self, device: torch.device) -> Any:
        """The process group for the model's sums; on GPUs every rank has its own."""
        if self.model is None:
            backend = "nccl" if device.type == "cuda" else "gloo"
            self.model = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout))
        return self.model

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum of every rank's tensor takes its place, the same bits on every rank."""
        self._wait(lambda: dist.all_reduce(tensor, group=self.model))

    def join(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, on every rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(parts, tensor, group=self.model))
        return parts

    # ------------------------------------------------------------ who is lost

    def _wait(self, work: Any) -> None:
        try:
            work()
        except RuntimeError as error:  # all that gloo and NCCL raise
            raise self.lost(error) from None
        self._moved = time.monotonic()

    def require_whole(self) -> None:
        """RankLost, if that was found before."""
        if self.broken:
            raise RankLost(self.broken)

    def lost(self, error: BaseException) -> RankLost:
        """Another rank did not do its part: the alarm is raised, and who is lost found out."""
        if not self.broken:
            with _unterminated():
                self.broken = self._sentence(error)
                self.alarm(self.broken)
        return RankLost(self.broken)

    def _sentence(self, error: BaseException) -> str:
        self.alarm("")
        told = self._said()
        if told:
            return told
        suspects = self._silent()
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        what = f"did not answer for {self.timeout:g} seconds" if late else "ended"
        if not suspects:
            return f"the ranks lost each other in {self.place}: {error}"
        names = " and ".join(map(str, suspects))
        return f"rank{'s' * (len(suspects) > 1)} {names} {what} (rank {self.rank} was in {self.place})"

    def fail(self, error: BaseException) -> RankLost:
        """This rank cannot go on, and so none can: all are told why."""
        if not self.broken:
            self.broken = f"rank {self.rank} failed in {self.place}: {type(error).__name__}: {error}"
            self.alarm(self.broken)
        return RankLost(self.broken)

    def alarm(self, why: str) -> None:
        """Every rank ends. why: a sentence, if it is known what happened."""

        def say() -> None:
            self._store.set(f"here/{self.rank}", "1")
            if why:
                self._store.set("why", why.encode(errors="replace"))
            self._store.set("alarm", "1")

        with contextlib.suppress(RuntimeError):
            _in_time(say)

    def _said(self) -> str:
        """What another rank said of the end; "" for nothing."""
        try:
            there: bool = _in_time(lambda: self._store.check(["why"]))
            return _in_time(lambda: self._store.get("why")).decode() if there else ""
        except RuntimeError:
            return ""

    def _silent(self) -> list[int]:
        """The ranks that do not answer the alarm."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if len(others) == 1:
            return others
        end = time.monotonic() + max(ANSWER, 5 * LOOK)
        try:
            while others and time.monotonic() < end:
                here = [_in_time(partial(self._store.check, [f"here/{rank}"])) for rank in others]
                others = [rank for rank, found in zip(others, here, strict=True) if not found]
                time.sleep(LOOK / 2)
        except RuntimeError:
            return [0]  # with which the store has gone
        return others

    def _look_out(self) -> None:
        """The thread of every rank but 0: ends the process soon after an alarm, whatever it waits for."""
        try:
            while not self._store.check(["alarm"]):
                if self._ending.wait(LOOK):
                    return
            self._store.set(f"here/{self.rank}", "1")
        except RuntimeError:  # rank 0 had the store, and may have said goodbye
            pass
        end = time.monotonic() + 2 * ANSWER
        while time.monotonic() < end and not self._said():
            if self._ending.wait(LOOK):
                return
        if not self.broken:
            said = self._said() or f"rank 0 ended (rank {self.rank} was in {self.place})"
            print(f"minirad: {said}", file=sys.__stderr__, flush=True)
        os._exit(1)

    # ------------------------------------------------------------ idle, and the end

    def _keep_waiting(self) -> None:
        """Rank 0's thread: says now and then that there is nothing to say, and answers an alarm."""
        answered, looked = False, time.monotonic()
        while not self._ending.wait(min(LOOK, self.timeout / 5)):
            looked, before = time.monotonic(), looked
            if looked - before > self.timeout:  # this process stood still, not the others
                self._moved = looked
            with contextlib.suppress(RuntimeError):
                if not answered and self._store.check(["alarm"]):
                    self._store.set("here/0", "1")  # it may wait for a living rank, and know of nothing yet
                    answered = True
            if not self.broken and time.monotonic() - self._last > self.timeout / 4:
                if self._busy:
                    self._require_moving()
                    continue
                with contextlib.suppress(RankLost):  # which the next call will raise
                    self.tell(Message(BEAT))

    def _require_moving(self) -> None:
        """Ends the process where a step stands still: a captured one waits for other GPUs without a limit."""
        waited = time.monotonic() - self._moved
        if waited < 2 * self.timeout:
            return
        self.broken = f"{self.place} has not come on for {waited:.0f} seconds: a rank hangs"
        self.alarm(self.broken)
        print(f"minirad: {self.broken}", file=sys.__stderr__, flush=True)
        os._exit(1)

    def end(self) -> None:
        """The run is over. Rank 0 tells the others, and waits until they have heard it."""
        if self.rank == 0 and not self.broken:
            with contextlib.suppress(RankLost):
                self.tell(Message(END))
                self.gather(b"\1")
        elif not self.broken:
            with contextlib.suppress(RankLost):
                self.gather(b"\1")
        self._ending.set()
        self._thread.join(1)
        for engine in list(self.engines):
            engine.let_go()
        destroying = threading.Thread(target=_destroy, daemon=True)
        destroying.start()  # which may wait for ever for a rank that is lost
        destroying.join(5 if self.broken else None)


def _destroy() -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()


def _processes() -> tuple[Any, int, int]:
    """The store that all ranks see, this one's number, and how many there are."""
    if dist.is_initialized():  # by the caller's own program
        store: Any = dist.distributed_c10d._get_default_store()
        return PrefixStore("minirad", store), dist.get_rank(), dist.get_world_size()
    store, rank, size = next(rendezvous("env://", timeout=START))
    dist.init_process_group(
        "gloo", store=PrefixStore("minirad/groups", store), rank=rank, world_size=size, timeout=START
    )
    return PrefixStore("minirad", store), rank, size


def _in_time(ask: Callable[[], Any]) -> Any:
    """What the store answers; RuntimeError where it does not, because the rank that keeps it hangs."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ANSWER)
    if not answers:
        raise RuntimeError("the store does not answer")
    return answers[0]


@contextlib.contextmanager
def _unterminated() -> Iterator[None]:
    """torchrun ends all processes when one has: it is said first which."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
